//! Validates the JSON output of the commands against docs/schemas, with a validator that shares no code with the program. Other
//! tests pass their output through [`checked`], which covers many broken hosts.

use std::process::Command;

use boon::{Compiler, Schemas};
use serde_json::Value;

use crate::cdi::cdi;
use crate::driver::{FakeDriver, Image, NEEDS, Waiting};
use crate::support::{HOOK, Need, Ran, run, run_with, scratch, sh, source};
use crate::why::{isolated, why};

tests! {
    NEEDS => commands_print_what_it_documents, records, explanations;
    &[Need::Root] => a_container_without_a_record;
    &[] => each_key_is_described, an_error_leaves_stdout_empty, numbers;
}

fn schema(name: &str) -> Value {
    let path = source("docs/schemas").join(format!("{name}.json"));
    serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap()
}

fn validate(name: &str, document: &Value) -> Result<(), String> {
    let (mut schemas, mut compiler) = (Schemas::new(), Compiler::new());
    let place = format!("file:///{name}.json");
    compiler.add_resource(&place, schema(name)).unwrap();
    let schema = compiler.compile(&place, &mut schemas).unwrap();
    schemas
        .validate(document, schema)
        .map_err(|error| format!("{error:#}"))
}

/// Returns the document in this text. It matches the schema; with one more key anywhere, it would not match.
#[track_caller]
pub fn checked(name: &str, text: &str) -> Value {
    let document: Value =
        serde_json::from_str(text).unwrap_or_else(|error| panic!("{name}: {error}: {text:?}"));
    if let Err(why) = validate(name, &document) {
        panic!("{name}: {why}\n{document:#}");
    }
    document
}

/// The elements of a document of one part.
#[track_caller]
pub fn part(name: &str, text: &str, part: &str) -> Vec<Value> {
    checked(name, text)[part].as_array().unwrap().clone()
}

/// JSON pointers to all objects in a document.
fn objects(document: &Value, at: &str, found: &mut Vec<String>) {
    match document {
        Value::Object(fields) => {
            found.push(at.to_owned());
            fields
                .iter()
                .for_each(|(name, value)| objects(value, &format!("{at}/{name}"), found));
        }
        Value::Array(values) => {
            (0..).zip(values).for_each(|(number, value): (u32, _)| {
                objects(value, &format!("{at}/{number}"), found)
            });
        }
        _ => {}
    }
}

/// An undocumented key anywhere in the document is an error.
#[track_caller]
fn is_complete(name: &str, document: &Value) {
    let mut places = Vec::new();
    objects(document, "", &mut places);
    for place in places {
        let mut changed = document.clone();
        let object = changed
            .pointer_mut(&place)
            .unwrap()
            .as_object_mut()
            .unwrap();
        object.insert("undocumented".to_owned(), Value::Null);
        assert!(
            validate(name, &changed).is_err(),
            "{name}: {place:?} may have any key"
        );
    }
}

fn hook(fake: &FakeDriver, arguments: &[&str]) -> Ran {
    run(Command::new(HOOK)
        .arg("--config")
        .arg(&fake.config)
        .args(arguments)
        .arg("--json")
        .env_clear())
}

/// No GPU, two GPUs, MIG devices, GPUs that each fail in another way, and a driver that does not answer.
fn hosts() -> Vec<(&'static str, FakeDriver)> {
    let broken = FakeDriver::new(&["--gpus", "4"]);
    broken.set_nvml(|old| {
        let failing = old
            .replace("gpu minor=1 ", "gpu minor=1 fail=15 ")
            .replace("gpu minor=2 ", "gpu minor=2 fail-handle=15 ");
        failing
            .lines()
            .filter(|line| !line.starts_with("gpu minor=3 "))
            .map(|line| line.to_owned() + "\n")
            .collect()
    });
    sh(&format!(
        "sed -i 's/GPU Excluded:\t No/GPU Excluded:\t Yes/' '{}'/proc/driver/nvidia/gpus/0000:04:*/information",
        broken.root.display()
    ))
    .ok();
    let silent = FakeDriver::new(&["--gpus", "1"]);
    silent.set_nvml(|old| old + "\ninit-error 999\n");
    vec![
        ("no GPU", FakeDriver::new(&["--gpus", "0"])),
        ("two GPUs", FakeDriver::new(&["--gpus", "2", "--drm"])),
        ("MIG", FakeDriver::new(&["--gpus", "2", "--mig"])),
        ("broken", broken),
        ("silent", silent),
    ]
}

fn commands_print_what_it_documents() {
    for (host, fake) in hosts() {
        let dir = scratch();
        let specs = dir.path().to_str().unwrap();
        let spec = dir.path().join("nvidia.yaml");
        cdi(&fake, &["generate", "--output", spec.to_str().unwrap()]);
        std::fs::write(dir.path().join("broken.json"), "{").unwrap();
        for (name, arguments, codes) in [
            ("doctor", &["doctor"][..], &[0, 1, 3][..]),
            ("status", &["status"], &[0, 1]),
            ("info", &["info"], &[0, 1]),
            ("files", &["files"], &[0, 1]),
            ("files", &["files", "--libraries"], &[0]),
            ("cdi-check", &["cdi", "check", "--spec-dir", specs], &[1]),
            ("cdi-check", &["cdi", "check"], &[0, 1]),
            ("cdi-list", &["cdi", "list", "--spec-dir", specs], &[0]),
        ] {
            let ran = hook(&fake, arguments);
            assert!(
                codes.contains(&ran.code.unwrap()),
                "{host} {arguments:?}: {ran:?}"
            );
            // An error: no document, and a message on stderr.
            let is_error = matches!(
                (host, arguments),
                ("silent", ["info"] | ["files"]) | ("no GPU", ["files"])
            );
            if is_error {
                assert!(
                    ran.stdout.is_empty() && ran.code == Some(1),
                    "{host} {arguments:?}: {ran:?}"
                );
                continue;
            }
            let document = checked(name, &ran.stdout);
            is_complete(name, &document);
            let part = |key: &str| document[key].as_array().map(Vec::len);
            match (host, name) {
                ("broken", "info") => assert_eq!(
                    (part("gpus"), part("not_usable"), part("excluded")),
                    (Some(1), Some(2), Some(1)),
                    "{document:#}"
                ),
                ("MIG", "info") => assert_eq!(
                    document["gpus"][0]["mig"]["devices"]
                        .as_array()
                        .unwrap()
                        .len(),
                    2
                ),
                ("two GPUs", "files") => assert!(part("files") > Some(3), "{document:#}"),
                _ => {}
            }
        }
    }
}

fn records() {
    let dir = scratch();
    let none = checked("why", &why(dir.path(), &["--json"]).ok());
    assert_eq!(none["records"].as_array().map(Vec::len), Some(0));
    let image = Image::new(dir.path(), &["--layout", "debian"]);
    let waiting = Waiting::start(dir.path(), &image.rootfs, &[], "");
    let fake = FakeDriver::new(&["--gpus", "3"]);
    fake.set_nvml(|old| old.replace("gpu minor=1 ", "gpu minor=1 fail=15 "));
    for (env, outcome) in [
        (&["NVIDIA_VISIBLE_DEVICES=9"][..], "failed"),
        (
            &[
                "NVIDIA_VISIBLE_DEVICES=all",
                "NVIDIA_REQUIRE_CUDA=cuda>=1.0",
            ],
            "incomplete",
        ),
        (&["NVIDIA_VISIBLE_DEVICES=0"], "ok"),
    ] {
        waiting.set_env(env);
        waiting.call(&mut isolated(dir.path()), &fake.config);
        for arguments in [&["--json"][..], &["--json", "waiting"]] {
            let document = checked("why", &why(dir.path(), arguments).ok());
            // Without a name, only failures are listed.
            let expected = if outcome == "ok" && arguments.len() == 1 {
                &Value::Null
            } else {
                &outcome.into()
            };
            assert_eq!(document["records"][0]["outcome"], *expected);
            is_complete("why", &document);
        }
    }
}

/// The two forms of `explain`.
fn numbers() {
    let explain = |words: &[&str]| {
        checked(
            "explain",
            &run(Command::new(HOOK).args(["explain", "--json"]).args(words)).ok(),
        )
    };
    let one = explain(&["030"]);
    is_complete("explain", &one);
    let all = explain(&["--list"]);
    let all = all["findings"].as_array().unwrap();
    assert!(
        all.len() > 100 && all.contains(&one["findings"][0]),
        "{one:#}"
    );
}

/// All stages that plan supports, with and without a request.
fn explanations() {
    let (dir, fake) = (
        scratch(),
        FakeDriver::new(&["--gpus", "2", "--mig", "--drm"]),
    );
    std::fs::create_dir_all(dir.path().join("rootfs/usr/lib64")).unwrap();
    for (env, outcome) in [
        ("NVIDIA_VISIBLE_DEVICES=void", "none"),
        ("NVIDIA_VISIBLE_DEVICES=9", "error"),
        ("NVIDIA_VISIBLE_DEVICES=all", "inject"),
    ] {
        let spec = serde_json::json!({
            "process": {"env": [env, "NVIDIA_DRIVER_CAPABILITIES=all"]}, "root": {"path": dir.path().join("rootfs")},
        });
        for arguments in [&["plan", "-"][..], &["plan", "-", "--stage", "precreate"]] {
            let mut command = Command::new(HOOK);
            command
                .arg("--config")
                .arg(&fake.config)
                .args(arguments)
                .arg("--json")
                .env_clear();
            let ran = run_with(command.current_dir(dir.path()), spec.to_string().as_bytes());
            let mut document = checked("plan", &ran.stdout);
            assert_eq!(document["outcome"], outcome, "{document:#}");
            let edits = document["edits"].as_array_mut().unwrap();
            assert_eq!(edits.len() > 10, outcome == "inject", "{edits:?}");
            // The OCI runtime specification describes the items.
            edits
                .iter_mut()
                .filter_map(|edit| edit.get_mut("item"))
                .for_each(|item| *item = 0.into());
            is_complete("plan", &document);
        }
    }
}

/// Runs in a mount namespace, as if Podman had these containers.
fn a_container_without_a_record() {
    let dir = scratch();
    let ids = ["a", "b", "c"].map(|digit| digit.repeat(64));
    let specs = [
        r#"{"process":{"env":[]},"root":{"path":"r"},"annotations":{"cdi.k8s.io/x":"nvidia.com/gpu=0"}}"#,
        r#"{"process":{"env":["NVIDIA_VISIBLE_DEVICES=all"]},"root":{"path":"r"}}"#,
        r#"{"process":{"env":["NVIDIA_VISIBLE_DEVICES=all"]},"root":{"path":"r"},"hooks":{"prestart":[{"path":"/usr/bin/nvidia-container-runtime-hook"}]}}"#,
    ];
    for (id, spec) in ids.iter().zip(specs) {
        let bundle = dir.path().join(id).join("userdata");
        std::fs::create_dir_all(&bundle).unwrap();
        std::fs::write(bundle.join("config.json"), spec).unwrap();
    }
    let list: Vec<_> = ids
        .iter()
        .map(|id| serde_json::json!({"id": id, "names": [&id[..1]]}))
        .collect();
    std::fs::write(
        dir.path().join("containers.json"),
        serde_json::to_string(&list).unwrap(),
    )
    .unwrap();
    let why = |arguments: &str| {
        let script = format!(
            "mount -t tmpfs lib /var/lib; mkdir -p /var/lib/containers/storage/overlay-containers; \
             mount --bind '{}' /var/lib/containers/storage/overlay-containers; mount -t tmpfs run /run; \
             exec {HOOK} why {arguments}",
            dir.path().display()
        );
        run(Command::new("unshare")
            .args(["-m", "sh", "-euc", &script])
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"))
    };
    for (name, outcome) in [("a", "nothing"), ("b", "not-called"), ("c", "left-alone")] {
        let document = checked("why", &why(&format!("{name} --json")).ok());
        assert_eq!(document["records"].as_array().map(Vec::len), Some(0));
        let answer = &document["without_record"];
        assert_eq!(
            (answer["name"].as_str(), answer["outcome"].as_str()),
            (Some(name), Some(outcome)),
            "{answer:#}"
        );
        is_complete("why", &document);
        let text = why(name).ok();
        assert!(
            text.starts_with("container ") && text.contains(answer["reason"].as_str().unwrap()),
            "{text}"
        );
    }
    let given = checked("why", &why("a --json").ok());
    let devices = serde_json::json!([{"name": "nvidia.com/gpu=0"}]);
    assert_eq!(given["without_record"]["devices"], devices, "{given:#}");
}

/// Collects the keys without a description, in any object.
fn undescribed(schema: &Value, at: &str, found: &mut Vec<String>) {
    let Some(fields) = schema.as_object() else {
        return;
    };
    for (name, property) in fields
        .get("properties")
        .and_then(Value::as_object)
        .into_iter()
        .flatten()
    {
        let at = format!("{at}/{name}");
        if property["description"].as_str().is_none_or(str::is_empty) {
            found.push(at.clone());
        }
        undescribed(property, &at, found);
    }
    if let Some(items) = fields.get("items") {
        undescribed(items, at, found);
    }
}

fn each_key_is_described() {
    let page = std::fs::read_to_string(source("docs/schemas/README.md")).unwrap();
    let mut seen = 0;
    for entry in std::fs::read_dir(source("docs/schemas")).unwrap() {
        let file = entry.unwrap().file_name().into_string().unwrap();
        let Some(name) = file.strip_suffix(".json") else {
            continue;
        };
        let schema = schema(name);
        assert_eq!(
            schema["$schema"], "https://json-schema.org/draft/2020-12/schema",
            "{file}"
        );
        assert_eq!(schema["properties"]["version"]["const"], 1, "{file}");
        let mut found = Vec::new();
        undescribed(&schema, "", &mut found);
        assert!(found.is_empty(), "{file}: {found:?}");
        assert!(
            page.contains(&format!("]({file})")),
            "docs/schemas/README.md does not name {file}"
        );
        seen += 1;
    }
    assert!(seen >= 6, "{seen}");
}

fn an_error_leaves_stdout_empty() {
    let empty = scratch();
    let root = empty.path().to_str().unwrap();
    for arguments in [
        &["info", "--root", root][..],
        &["files", "--root", root],
        &["why", "no-such-container"],
        &["cdi", "check", "--config", "/nowhere"],
    ] {
        let ran = run(Command::new(HOOK).args(arguments).arg("--json").env_clear());
        assert_eq!(ran.stdout, "", "{arguments:?}");
        let stderr = ran.failed(1);
        assert!(
            stderr.contains("(ONH-") && stderr.contains("\nhint: "),
            "{arguments:?}: {stderr}"
        );
    }
}
