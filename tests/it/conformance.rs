//! Compares the hook with the behavior of NVIDIA's stack, row by row (`tests/fixtures/conformance`). Each intentional difference
//! is named here with its reason, and in docs/compatibility.md.

use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use nvidia_host::capability::{self, Capabilities};
use nvidia_host::config::{self, schema};
use nvidia_host::driver::compat::{Note, is_to_be_used, version_of};
use nvidia_host::edits::build::mask_params;
use nvidia_host::inventory::caps::{self, MigCap};
use nvidia_host::prepare::parse_majors;
use nvidia_host::request::Variable;
use nvidia_host::require::{self, Properties, Requirement};
use oci_nvidia_hook::testing::oci::spec_view;

use crate::support::{HOOK, read, run_with, scratch, source, write_file};

tests! {
    &[] => requests, devices_from_env, devices_from_mounts, visible_devices, imex_channels, image_requirements,
        driver_capabilities, capability_sets, configuration, privilege, cuda_versions, requirements, params, mig_minors,
        proc_devices, cuda_compat, each_part_has_an_answer;
}

pub fn table(file: &str) -> Value {
    let path = source("tests/fixtures/conformance").join(file);
    serde_json::from_str(&read(path)).unwrap()
}

/// Nothing that a user of NVIDIA's stack can write is ignored without a word: docs/compatibility.md has an answer for each name, and the
/// hook knows each variable and key to which the answer is not "no".
fn each_part_has_an_answer() {
    let parts = table("parts.json");
    let page = read(source("docs/compatibility.md"));
    let section = page
        .split("\n## Parts of the toolkit\n")
        .nth(1)
        .unwrap()
        .split("\n## ")
        .next()
        .unwrap();
    let rows: Vec<Vec<&str>> = section
        .lines()
        .filter(|line| line.starts_with("| ") && line.contains('`'))
        .map(|line| line.trim_matches('|').split(" | ").map(str::trim).collect())
        .collect();
    let answer = |group: &str, name: &str| {
        let row = rows.iter().find(|row| {
            row[0] == group && row[1].split(", ").any(|named| named == format!("`{name}`"))
        });
        let row = row.unwrap_or_else(|| {
            panic!("docs/compatibility.md has no row for {name:?} of {group:?}")
        });
        assert!(["yes", "different", "no"].contains(&row[2]), "{row:?}");
        assert!(
            row[2] == "yes" || row.get(3).is_some_and(|remark| !remark.is_empty()),
            "{row:?} has no remark"
        );
        row[2].to_owned()
    };
    for name in strings(&parts["variables"]) {
        let is_known = name.starts_with("NVIDIA_REQUIRE_")
            || Variable::ALL.iter().any(|variable| variable.name() == name);
        assert_eq!(
            answer("variable", &name) != "no",
            is_known && !name.contains("JETPACK"),
            "{name}"
        );
    }
    for variable in Variable::ALL {
        assert!(
            strings(&parts["variables"]).contains(&variable.name().to_owned()),
            "{variable:?}"
        );
    }
    for (command, options) in parts["commands"].as_object().unwrap() {
        options_have_an_answer(&page, command, &strings(options));
    }
    for key in strings(&parts["keys"]) {
        assert!(schema::find(&key).is_some(), "{key}");
    }
    for (group, list) in [
        ("variable of programs", "variables_of_programs"),
        ("mode of the runtime", "modes_of_the_runtime"),
        ("mode of `cdi generate`", "modes_of_generate"),
        ("program", "programs"),
    ] {
        strings(&parts[list]).iter().for_each(|name| {
            answer(group, name);
        });
    }
}

/// Checks that the section of a program has each option of one of its commands exactly once, and a reason for each that does not work.
fn options_have_an_answer(page: &str, command: &str, options: &[String]) {
    let (program, verb) = command.split_once(' ').unwrap_or((command, command));
    let section = page
        .split(&format!("\n## {program}\n"))
        .nth(1)
        .unwrap_or_else(|| panic!("no section {program:?}"));
    let section = section.split("\n## ").next().unwrap();
    let rows = section
        .lines()
        .filter_map(|line| line.strip_prefix(&format!("| `{verb}` |")));
    let rows: Vec<Vec<&str>> = rows
        .map(|row| row.split('|').map(str::trim).collect())
        .collect();
    assert!(!rows.is_empty(), "{program} has no row for {verb:?}");
    let mut listed: Vec<String> = Vec::new();
    for row in &rows {
        let [names, answer, remark, ..] = row[..] else {
            panic!("{verb}: {row:?}")
        };
        assert!(
            ["yes", "different", "no"].contains(&answer),
            "{verb}: {row:?}"
        );
        assert!(
            answer == "yes" || !remark.is_empty(),
            "{verb}: {row:?} has no remark"
        );
        listed.extend(
            names
                .split(", ")
                .filter(|name| !name.is_empty())
                .map(|name| name.trim_matches('`').to_owned()),
        );
    }
    let mut expected = options.to_vec();
    listed.sort();
    expected.sort();
    assert_eq!(listed, expected, "{command}");
}

/// The rows of a group of hook.json.
fn rows(group: &str) -> Vec<Value> {
    rows_of("hook.json", group)
}

/// Returns the rows of a group and checks their number, so that no row is lost.
pub fn rows_of(file: &str, group: &str) -> Vec<Value> {
    let table = table(file);
    let group = table["groups"]
        .as_array()
        .unwrap()
        .iter()
        .find(|g| g["id"] == group)
        .unwrap();
    let rows = group["cases"].as_array().unwrap().clone();
    assert_eq!(rows.len() as u64, group["count"].as_u64().unwrap());
    rows
}

fn strings(value: &Value) -> Vec<String> {
    value
        .as_array()
        .map(|list| {
            list.iter()
                .map(|s| s.as_str().unwrap().to_owned())
                .collect()
        })
        .unwrap_or_default()
}

/// NVIDIA's empty name for "no GPU" is `none` here, as the container requested it.
fn devices(value: &Value) -> Value {
    if *value == json!([""]) {
        json!(["none"])
    } else {
        value.clone()
    }
}

/// Returns `process.env` of an object, or a list unchanged.
fn env(value: &Value) -> Vec<String> {
    match value.as_object() {
        Some(map) => map
            .iter()
            .map(|(name, value)| format!("{name}={}", value.as_str().unwrap()))
            .collect(),
        None => strings(value),
    }
}

/// Returns the output of `plan --request --json` for a container with this environment and these mounts.
fn plan(env: &[String], mounts: &Value, privileged: bool, config: &str) -> Value {
    let dir = scratch();
    let bounding = if privileged {
        json!(["CAP_SYS_ADMIN"])
    } else {
        json!(["CAP_CHOWN"])
    };
    let spec = json!({
        "ociVersion": "1.0.2", "root": {"path": "rootfs"}, "mounts": mounts,
        "process": {"env": env, "capabilities": {"bounding": bounding}},
    });
    write_file(dir.path().join("config.json"), spec.to_string());
    let file = dir.path().join("config.toml");
    write_file(&file, config);
    let mut hook = Command::new(HOOK);
    hook.arg("--config")
        .arg(file)
        .args(["plan", "-", "--request", "--json"])
        .env_clear();
    let ran = run_with(
        &mut hook,
        json!({"id": "c", "bundle": dir.path()})
            .to_string()
            .as_bytes(),
    );
    let said: Value = serde_json::from_str(&ran.stdout).unwrap_or_else(|_| panic!("{ran:?}"));
    assert_eq!(
        ran.code,
        Some(i32::from(said["outcome"] == "error")),
        "{said}"
    );
    said
}

fn toml_of(settings: &Value) -> String {
    let lines = settings.as_object().into_iter().flatten();
    lines
        .map(|(key, value)| format!("{key} = {value}\n"))
        .collect()
}

fn sorted(mut list: Vec<String>) -> Vec<String> {
    list.sort();
    list
}

fn requests() {
    for row in rows("nvidia_config") {
        let (input, expect) = (&row["input"], &row["expect"]);
        let privileged = input["privileged"].as_bool().unwrap();
        let said = plan(
            &env(&input["env"]),
            &json!([]),
            privileged,
            &toml_of(&input["config"]),
        );
        if expect["error"] == true {
            assert_eq!(said["outcome"], "error", "{row}");
            assert!(
                said["findings"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .any(|finding| finding["id"] == "ONH-037"),
                "{said}"
            );
            continue;
        }
        if expect["gpu_container"] == false {
            assert_eq!(
                (&said["outcome"], &said["request"]),
                (&json!("none"), &Value::Null),
                "{row}"
            );
            continue;
        }
        let request = &said["request"];
        assert_eq!(
            request["visible_devices"],
            devices(&expect["devices"]),
            "{row}"
        );
        let capabilities = strings(&request["driver_capabilities"]).join(",");
        assert_eq!(json!(capabilities), expect["driver_capabilities"], "{row}");
        assert_eq!(
            sorted(strings(&request["requirements"])),
            sorted(strings(&expect["requirements_any_order"])),
            "{row}"
        );
        for (ours, theirs) in [
            ("mig_config_devices", "mig_config"),
            ("mig_monitor_devices", "mig_monitor"),
        ] {
            let asked = request[ours].as_str().unwrap_or_default();
            assert_eq!(json!(asked), expect[theirs], "{row}");
        }
    }
}

fn assert_devices(said: &Value, row: &Value) {
    let expected = devices(&row["expect"]["devices"]);
    let found = said["request"]
        .get("visible_devices")
        .cloned()
        .unwrap_or(Value::Null);
    assert_eq!(found, expected, "{row}\n{said}");
}

fn devices_from_env() {
    for row in rows("devices_from_env") {
        let swarm = strings(&row["input"]["preferred_env_vars"]).join(",");
        // Rows with CUDA_VERSION=legacy concern only devices; as a version, the value would be an error.
        let mut env = env(&row["input"]["env"]);
        env.push("NVIDIA_DISABLE_REQUIRE=true".into());
        assert_devices(
            &plan(
                &env,
                &json!([]),
                false,
                &format!("swarm-resource = \"{swarm}\""),
            ),
            &row,
        );
    }
}

fn devices_from_mounts() {
    for row in rows("devices_from_mounts") {
        let config = "accept-nvidia-visible-devices-as-volume-mounts = true";
        assert_devices(&plan(&[], &row["input"]["mounts"], false, config), &row);
    }
}

fn visible_devices() {
    for row in rows("visible_devices") {
        let input = &row["input"];
        let config = format!(
            "accept-nvidia-visible-devices-envvar-when-unprivileged = {}\n\
             accept-nvidia-visible-devices-as-volume-mounts = {}\nswarm-resource = \"{}\"\n",
            input["accept_envvar_unprivileged"],
            input["accept_volume_mounts"],
            strings(&input["preferred_env_vars"]).join(",")
        );
        let said = plan(
            &env(&input["env"]),
            &input["mounts"],
            input["privileged"].as_bool().unwrap(),
            &config,
        );
        assert_devices(&said, &row);
    }
}

fn imex_channels() {
    for row in rows("imex_channels_env") {
        let mut env = strings(&row["input"]["env"]);
        env.push("NVIDIA_VISIBLE_DEVICES=all".into());
        let said = plan(&env, &json!([]), false, "");
        assert_eq!(
            strings(&said["request"]["imex_channels"]),
            strings(&row["expect"]["channels"]),
            "{row}"
        );
    }
}

fn image_requirements() {
    for row in rows("image_requirements") {
        let mut env = strings(&row["input"]["env"]);
        env.push("NVIDIA_VISIBLE_DEVICES=all".into());
        let said = plan(&env, &json!([]), false, "");
        let expected = sorted(strings(&row["expect"]["requirements_any_order"]));
        assert_eq!(
            sorted(strings(&said["request"]["requirements"])),
            expected,
            "{row}"
        );
    }
}

fn driver_capabilities() {
    for row in rows("driver_capabilities") {
        let input = &row["input"];
        let parsed = Capabilities::supported(input["supported"].as_str().unwrap())
            .ok()
            .and_then(|supported| {
                let value = input["env"]
                    .get("NVIDIA_DRIVER_CAPABILITIES")
                    .map(|value| value.as_str().unwrap());
                capability::parse(value, input["legacy_image"].as_bool().unwrap(), supported).ok()
            });
        let found = parsed.map_or_else(
            || json!({"error": true}),
            |set| json!({"capabilities": set.to_string()}),
        );
        assert_eq!(found, row["expect"], "{row}");
    }
}

/// The set functions of NVIDIA's stack accept any word; ours know seven capabilities. The observable behavior is the same: a
/// request with another word, or with an unsupported capability, is rejected.
fn capability_sets() {
    let known = |word: &String| Capabilities::supported(word).is_ok();
    for row in rows("capabilities_intersection") {
        let (requested, supported) = (
            strings(&row["input"]["requested"]),
            strings(&row["input"]["supported"]),
        );
        if !supported.iter().all(known) {
            assert!(
                Capabilities::supported(&supported.join(",")).is_err(),
                "{row}"
            );
            continue;
        }
        // "," requests nothing, but an empty value requests the default.
        let value = format!("{},", requested.join(","));
        let supported = Capabilities::supported(&supported.join(",")).unwrap();
        let expected = strings(&row["expect"]["intersection"]).join(",");
        match capability::parse(Some(&value), false, supported) {
            Ok(set) => assert_eq!(set.to_string(), expected, "{row}"),
            Err(_) => assert!(
                requested
                    .iter()
                    .any(|word| !expected.split(',').any(|e| e == word)),
                "{row}"
            ),
        }
    }
    for row in rows("capabilities_list") {
        let value = row["input"]["value"].as_str().unwrap();
        let all = Capabilities::supported("all").unwrap();
        match strings(&row["expect"]["list"]).as_slice() {
            [] if value.is_empty() => {
                assert_eq!(
                    capability::parse(Some(value), false, all)
                        .unwrap()
                        .to_string(),
                    "compute,utility"
                )
            }
            [] => assert_eq!(
                capability::parse(Some(value), false, all)
                    .unwrap()
                    .to_string(),
                ""
            ),
            _ => assert!(capability::parse(Some(value), false, all).is_err(), "{row}"),
        }
    }
}

fn configuration() {
    let load = |text: &str| config::parse(text, Path::new("/c.toml"));
    for row in rows("supported_capabilities_config") {
        let text = strings(&row["input"]["config_lines"]).join("\n");
        let found = load(&text).map_or_else(
            |_| json!({"error": true}),
            |(config, _)| json!({"supported_driver_capabilities": config.supported_driver_capabilities.to_string()}),
        );
        assert_eq!(found, row["expect"], "{row}");
    }
    for row in rows("config_load") {
        let (config, _) = load(&strings(&row["input"]["toml_lines"]).join("\n")).unwrap();
        let expect = &row["expect"];
        assert_eq!(
            json!(config.disable_require),
            expect["disable-require"],
            "{row}"
        );
        assert_eq!(
            json!(config.swarm_resource.join(",")),
            expect["swarm-resource"],
            "{row}"
        );
        assert_eq!(
            json!(config.accept_envvar_when_unprivileged),
            expect["accept-nvidia-visible-devices-envvar-when-unprivileged"]
        );
        assert_eq!(
            json!(config.accept_volume_mounts),
            expect["accept-nvidia-visible-devices-as-volume-mounts"]
        );
        assert_eq!(
            json!(config.supported_driver_capabilities.to_string()),
            expect["supported-driver-capabilities"]
        );
        assert_eq!(
            json!(!config.edit_cgroups),
            expect["nvidia-container-cli.no-cgroups"]
        );
        let root = config.driver_root.as_path().to_str().unwrap().to_owned();
        assert_eq!(
            json!(if root == "/" { "" } else { &root }),
            expect["nvidia-container-cli.root"]
        );
        let user = config
            .user
            .map_or_else(String::new, |user| match user.group {
                Some(group) => format!("{}:{group}", user.user),
                None => user.user,
            });
        // NVIDIA writes a user into the file on SUSE. Our file does not need one: the hook uses the group that owns the nodes.
        let theirs = if row["name"] == "suse config" {
            &json!("")
        } else {
            &expect["nvidia-container-cli.user"]
        };
        assert_eq!(&json!(user), theirs, "{row}");
    }
    // There, an ldconfig of the container is an error; here, ldconfig never runs, whatever the key contains.
    for row in rows("config_validate") {
        let value = row["input"]["nvidia-container-cli.ldconfig"]
            .as_str()
            .unwrap();
        assert!(
            load(&format!("[nvidia-container-cli]\nldconfig = \"{value}\""))
                .unwrap()
                .1
                .is_empty(),
            "{row}"
        );
    }
}

fn privilege() {
    for row in rows("is_privileged") {
        let mut spec = row["input"]["spec_json"].clone();
        spec["root"] = json!({"path": "/r"});
        let view = spec_view::parse(spec.to_string().as_bytes(), Path::new("/b")).unwrap();
        assert_eq!(
            json!({"privileged": view.privileged}),
            row["expect"],
            "{row}"
        );
    }
}

fn cuda_versions() {
    for row in rows("cuda_version_parse") {
        let found = require::parse_cuda_version(row["input"].as_str().unwrap()).map_or_else(
            || json!({"error": true}),
            |(major, minor)| json!(format!("{major}.{minor}")),
        );
        assert_eq!(found, row["expect"], "{row}");
    }
}

fn requirements() {
    let table = table("require.json");
    let rows = table["evaluate"].as_array().unwrap();
    assert_eq!(rows.len(), 57);
    for row in rows {
        let property = |name: &str| row["properties"][name].as_str().map(str::to_owned);
        let has = Properties {
            cuda: property("cuda"),
            driver: property("driver"),
            arch: property("arch"),
            brand: property("brand"),
        };
        let checked = strings(&row["requirements"])
            .into_iter()
            .try_for_each(|text| {
                let requirement = Requirement {
                    variable: "NVIDIA_REQUIRE_X".into(),
                    text,
                };
                require::check(&requirement, &[("GPU 0".into(), has.clone())])
            });
        // The wording is our own: it names both sides and a fix.
        let found = match checked.map_err(|error| error.to_string()) {
            Ok(()) => "satisfied",
            Err(text) if text.contains("is malformed at") => "invalid",
            Err(text) if text.contains("but GPU 0 has ") => "unsatisfied",
            Err(text) => panic!("{text}"),
        };
        assert_eq!(json!(found), row["expect"]["result"], "{row}");
    }
}

fn params() {
    for row in rows("nvidia_params") {
        let found = mask_params(row["input"].as_str().unwrap_or_default());
        assert_eq!(json!(found), row["expect"], "{row}");
    }
}

fn mig_minors() {
    let cap = |name: &str| caps::parse_cap(name).unwrap();
    for row in rows("mig_minors_line") {
        let parsed = caps::parse_mig_minors(row["input"].as_str().unwrap());
        match parsed.first_key_value() {
            None => assert_eq!(row["expect"], json!({"error": true}), "{row}"),
            Some((found, minor)) => {
                assert_eq!(*found, cap(row["expect"]["cap"].as_str().unwrap()), "{row}");
                assert_eq!(json!(minor), row["expect"]["minor"], "{row}");
            }
        }
    }
    for row in rows("mig_minors_file") {
        let parsed = caps::parse_mig_minors(&strings(&row["input"]).join("\n"));
        let expected = row["expect"].as_object().unwrap();
        assert_eq!(parsed.len(), expected.len(), "{row}");
        for (name, minor) in expected {
            assert_eq!(json!(parsed[&cap(name)]), *minor, "{row}");
        }
    }
    for row in rows("mig_cap_proc_path") {
        let cap: MigCap = cap(row["input"].as_str().unwrap());
        assert_eq!(json!(cap.proc_path()), row["expect"], "{row}");
    }
}

/// NVIDIA's stack fails on a table without NVIDIA's devices; here there is nothing to create.
fn proc_devices() {
    let expected = |row: &Value| {
        if row["expect"]["error"] == true {
            json!({})
        } else {
            row["expect"].clone()
        }
    };
    for row in rows("proc_devices_file") {
        assert_eq!(
            json!(parse_majors(&strings(&row["input"]).join("\n"))),
            expected(&row),
            "{row}"
        );
    }
    for row in rows("proc_devices_line") {
        let found = parse_majors(row["input"].as_str().unwrap());
        let found = found.first_key_value().map_or_else(
            || json!({}),
            |(name, major)| json!({"name": name, "major": major}),
        );
        assert_eq!(found, expected(&row), "{row}");
    }
}

/// The rows on directories end in a decision here; `live::cuda_compat` checks that links of the image stay inside it.
fn cuda_compat() {
    for row in rows("cuda_compat_note") {
        let input = &row["input"];
        let text = |name: &str| input[name].as_str().unwrap();
        let note: Note = serde_json::from_value(input["elf_header"].clone()).unwrap();
        let (compat, host, cuda) = (
            text("compat_driver_version"),
            text("host_driver_version"),
            text("host_cuda_version"),
        );
        assert_eq!(
            json!(is_to_be_used(Some(&note), compat, host, cuda)),
            row["expect"]["use_compat"],
            "{row}"
        );
    }
    for row in rows("cuda_compat_dir") {
        let input = &row["input"];
        let files = input["rootfs"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|file| file.get("file").is_some());
        // The only directory that we know; the row with another directory selects it with an option that we do not have.
        let root = input["compat_root"]
            .as_str()
            .unwrap()
            .rsplit('/')
            .next()
            .unwrap()
            .to_owned();
        let names: Vec<_> = files
            .filter_map(|file| {
                let path = Path::new(file["path"].as_str().unwrap());
                (path.parent()?.file_name()? == root.as_str())
                    .then(|| path.file_name().unwrap().to_str().unwrap().to_owned())
            })
            .collect();
        let host = input["host_driver_version"].as_str().unwrap();
        let used = version_of(names.iter().map(String::as_str))
            .is_some_and(|version| is_to_be_used(None, version, host, ""));
        assert_eq!(used, !row["expect"]["compat_dir"].is_null(), "{row}");
    }
}
