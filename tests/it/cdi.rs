//! CDI specs: their content for a host, how engines read them, and when they are regenerated.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use base::paths::ContainerPath;
use cdi_spec::spec::{ContainerEdits, Spec};
use cdi_spec::{file, registry};
use engines::cdi::SpecReader;
use engines::cdi_check::{self, Now};
use engines::{EngineKind, Version};
use nvidia_host::cdi::compare::HostView;
use nvidia_host::cdi::entry::RootfsEdits;
use nvidia_host::cdi::generate::sources;
use nvidia_host::inventory::node_limits::NodeLimits;
use oci_nvidia_hook::testing::cli::cdi_check as cdi_text;

use crate::driver::FakeDriver;
use crate::own_nodes::NODES_OF_THE_HOST;
use crate::support::{
    HOOK, Need, Ran, assert_says, chmod, read, run, scratch, sh, sh_unshared, shell, write_file,
    write_program,
};
use crate::{cdi_schema, golden, json_schema};

const NEEDS_DRIVER: &[Need] = &[Need::Root, Need::Program("cc")];

pub const GPU_0: &str = "GPU-51eed000-0000-4000-8000-0000fa4e0000";
pub const GPU_1: &str = "GPU-51eed001-0001-4001-8000-0000fa4e0001";
const GPU_2: &str = "GPU-51eed002-0002-4002-8000-0000fa4e0002";
const MIG_0: &str = "MIG-51eed000-0001-4000-8000-0000fa4e0001";
pub const MIG_1: &str = "MIG-51eed000-0002-4000-8000-0000fa4e0002";

tests! {
    &[] => what_check_prints;
    NEEDS_DRIVER => a_spec_is_valid, names_and_versions_of_a_choice, the_hook_and_the_spec_agree,
        refresh_rewrites_what_is_stale, recreated_mig_devices_are_detected,
        no_engine_is_run_without_need, refresh_without_gpus_prints_what_it_removes, refresh_asks_a_failing_gpu_again,
        refresh_by_many_at_once, refresh_makes_no_conflict, specs_keep_their_kind, one_advice_about_a_conflict, generate_warns_of_a_file_that_engines_ignore, check_gives_reasons;
}

/// Runs `cdi ARGUMENTS` for this driver.
pub fn cdi(fake: &FakeDriver, arguments: &[&str]) -> Ran {
    fake.run(&[&["cdi"], arguments].concat())
}

/// Writes the CDI spec of this host to a file.
pub fn write_spec(fake: &FakeDriver, path: &Path) {
    write_spec_with(fake, path, &[]);
}

/// The same with these options.
pub fn write_spec_with(fake: &FakeDriver, path: &Path, options: &[&str]) {
    let generate = ["generate", "--output", path.to_str().unwrap()];
    cdi(fake, &[&generate, options].concat()).ok();
}

/// Runs `cdi refresh`, which also creates the file.
pub fn create_spec(fake: &FakeDriver, path: &Path) -> Ran {
    let output = ["--output", path.to_str().unwrap()];
    cdi(fake, &[&["refresh", "--create"], &output[..]].concat())
}

/// Returns the number of the finding of `cdi check --json` about one device, and its reason.
pub fn verdict(ran: &Ran) -> (Option<String>, String) {
    let groups = json_schema::part("cdi-check", &ran.stdout, "groups");
    let result = &groups[0]["results"][0];
    assert_eq!(result["usable"] == true, ran.code == Some(0), "{ran:?}");
    let text = |field: &str| result[field].as_str().map(str::to_owned);
    (text("finding"), text("why").unwrap_or_default())
}

/// Runs `cdi check` for the specs in a directory.
pub fn check_specs(fake: &FakeDriver, dir: &Path) -> Ran {
    cdi(fake, &["check", "--spec-dir", dir.to_str().unwrap()])
}

pub fn generate(fake: &FakeDriver, arguments: &[&str]) -> Spec {
    let mut words = vec!["generate", "--output", "-"];
    words.extend(arguments);
    file::parse(cdi(fake, &words).ok().as_bytes()).unwrap()
}

/// Checks the rules of the engines, and further rules that engines do not check.
fn a_spec_is_valid() {
    for (arguments, names) in [
        (
            &["--gpus", "2", "--drm"][..],
            &["0", GPU_0, "1", GPU_1, "all"][..],
        ),
        // GPU 0 is split, so it is not a device itself.
        (
            &["--gpus", "2", "--mig"],
            &["0:0", MIG_0, "0:1", MIG_1, "1", GPU_1, "all"],
        ),
    ] {
        let fake = FakeDriver::new(arguments);
        for format in ["json", "yaml"] {
            let spec = generate(&fake, &["--format", format]);
            assert_eq!(spec.check(), Ok(()));
            cdi_schema::validate(&serde_json::to_value(&spec).unwrap());
            assert_eq!(
                (spec.cdi_version.as_str(), spec.kind.as_str()),
                ("0.5.0", "nvidia.com/gpu")
            );
            let found: Vec<_> = spec
                .devices
                .iter()
                .map(|device| device.name.as_str())
                .collect();
            assert_eq!(found, names);
            for path in sources(&spec) {
                assert!(
                    Path::new(path).is_absolute() && Path::new(path).exists(),
                    "{path}"
                );
            }
            let devices = spec.devices.iter().map(|device| &device.container_edits);
            for edits in devices.chain([&spec.container_edits]) {
                for hook in &edits.hooks {
                    assert!(!hook.env.is_empty(), "CVE-2025-23266");
                    assert!(hook.args.len() > 2 && hook.args[0] == "oci-nvidia-hook");
                }
                for mount in &edits.mounts {
                    assert!(
                        mount.options.iter().any(|option| option == "nosuid"),
                        "{mount:?}"
                    );
                    assert!(
                        !mount.container_path.contains("/root/"),
                        "below the driver root: {mount:?}"
                    );
                }
                assert!(
                    edits
                        .device_nodes
                        .iter()
                        .all(|node| node.permissions.as_deref() == Some("rw"))
                );
            }
        }
    }
}

fn names_and_versions_of_a_choice() {
    let fake = FakeDriver::new(&["--gpus", "1", "--dev-mode", "0660", "--dev-group", "video"]);
    let choice = [
        "--name-strategy",
        "uuid",
        "--vendor",
        "example.com",
        "--class",
        "accelerator.x",
    ];
    let spec = generate(&fake, &[&choice[..], &["--no-additional-gids"]].concat());
    let names: Vec<_> = spec
        .devices
        .iter()
        .map(|device| device.name.as_str())
        .collect();
    assert_eq!(
        (spec.kind.as_str(), names.as_slice()),
        ("example.com/accelerator.x", &[GPU_0, "all"][..])
    );
    assert_eq!(spec.cdi_version, "0.6.0", "for the dot in its class");
    cdi_schema::validate(&serde_json::to_value(&spec).unwrap());
    // Nodes of a group, as on SUSE: the spec has the host's group number.
    let video = sh("getent group video | cut -d: -f3")
        .ok()
        .trim()
        .parse()
        .unwrap();
    let with_gids = generate(&fake, &["--additional-gids"]);
    let without = generate(&fake, &["--no-additional-gids"]);
    assert_eq!(
        (with_gids.cdi_version.as_str(), without.cdi_version.as_str()),
        ("0.7.0", "0.5.0")
    );
    for (spec, gids) in [(&with_gids, &[video][..]), (&without, &[])] {
        assert_eq!(
            spec.container_edits.additional_gids, gids,
            "/dev/nvidiactl is of that group too"
        );
        let node = &spec.devices[0].container_edits.device_nodes[0];
        assert_eq!(
            (node.file_mode, node.uid, node.gid),
            (Some(0o666), None, Some(video))
        );
        cdi_schema::validate(&serde_json::to_value(spec).unwrap());
    }
    fake.configure(NODES_OF_THE_HOST);
    let node = &generate(&fake, &["--no-additional-gids"]).devices[0]
        .container_edits
        .device_nodes[0];
    assert_eq!(
        (node.file_mode, node.gid),
        (Some(0o660), Some(video)),
        "{NODES_OF_THE_HOST}"
    );
    for (arguments, says) in rows! {
        &["--name-strategy", "type"][..], "invalid value \"type\" for \"--name-strategy <LIST>\" [possible values: index, uuid, type-index]";
        &["--format", "toml"], "invalid value \"toml\" for \"--format <FORMAT>\" [possible values: json, yaml]";
        &["--vendor", "9.com"], "invalid value \"9.com\" for \"--vendor <VENDOR>\": \"9.com\" does not start with a letter";
        &["--class", ""], "for \"--class <CLASS>\": the name is empty";
        // The CDI library of this version panics: it accesses the part between the first and the last letter.
        &["--class", "g"], "\"g\" for \"--class <CLASS>\": CRI-O 1.37 does not start if the vendor or class of a CDI spec has only one letter";
        &["--vendor", "n"], "invalid value \"n\" for \"--vendor <VENDOR>\": CRI-O 1.37 does not start";
    } {
        let mut words = vec!["generate", "--output", "-"];
        words.extend(arguments);
        assert!(cdi(&fake, &words).failed(2).contains(says), "{says}");
    }
    let stderr = cdi(&fake, &["generate", "--output", "/tmp/nvidia.yml"]).failed(2);
    assert_says(&stderr, &["engines do not read \"/tmp/nvidia.yml\""]);
}

/// The edits that `plan` lists are the edits of the spec, merged as an engine merges them.
fn the_hook_and_the_spec_agree() {
    // In an image that is not like Debian, libraries are placed where this host has them.
    let fake = FakeDriver::new(&["--gpus", "3", "--mig", "--drm", "--layout", "lib64"]);
    let spec = generate(&fake, &[]);
    assert!(
        spec.devices
            .iter()
            .all(|device| device.container_edits.hooks.is_empty()),
        "one entry for all: {spec:?}"
    );
    let chosen = ["0:0", "0:1", "1", GPU_2];
    let mut seen = 0;
    for bits in 1..1_u32 << chosen.len() {
        let names: Vec<_> = (0..chosen.len())
            .filter(|n| bits & (1 << n) != 0)
            .map(|n| chosen[n])
            .collect();
        assert_eq!(
            by_engine(&spec, &names),
            by_hook(&fake, &names.join(",")),
            "{names:?}"
        );
        seen += 1;
    }
    assert_eq!(by_engine(&spec, &["all"]), by_hook(&fake, "all"));
    assert_eq!(seen, 15);
    assert_ne!(
        by_engine(&spec, &["1"]),
        by_hook(&fake, "0:0"),
        "the test can see a difference"
    );
}

/// Returns the edits for a container with these devices of a spec, as an engine merges them.
pub fn edits_of(spec: &Spec, names: &[&str]) -> ContainerEdits {
    let mut edits = spec.container_edits.clone();
    for name in names {
        let device = spec.devices.iter().find(|device| device.name == *name);
        edits = edits.merge(device.unwrap().container_edits.clone());
    }
    edits
}

fn by_engine(spec: &Spec, names: &[&str]) -> BTreeSet<String> {
    let edits = edits_of(spec, names);
    let mut words = BTreeSet::new();
    for mount in &edits.mounts {
        words.insert(format!(
            "mount {} {}",
            mount.host_path, mount.container_path
        ));
    }
    for node in &edits.device_nodes {
        let (major, minor) = (node.major.unwrap(), node.minor.unwrap());
        let source = node.host_path.as_ref().unwrap_or(&node.path);
        words.insert(format!(
            "device {source} {} {major} {minor} {}",
            node.path,
            node.permissions.as_ref().unwrap()
        ));
    }
    for hook in &edits.hooks {
        let has = |node: &ContainerPath| {
            edits
                .device_nodes
                .iter()
                .any(|given| node.absolute() == Path::new(&given.path))
        };
        let rest = RootfsEdits::from_entry(&hook.args).unwrap().resolve(has);
        words.extend(
            rest.links
                .iter()
                .map(|(link, text)| format!("link {link} {text:?}")),
        );
        words.extend(
            rest.libraries
                .iter()
                .map(|(_, path)| format!("cache {:?}", path.file_name())),
        );
        words.extend(rest.shown.keys().map(|path| format!("show {path:?}")));
        words.extend(rest.mask.map(|_| "mask".to_owned()));
        words.extend((rest.egl_devices != 0).then(|| "profile".to_owned()));
    }
    words
}

fn by_hook(fake: &FakeDriver, names: &str) -> BTreeSet<String> {
    let devices = format!("NVIDIA_VISIBLE_DEVICES={names}");
    let said = fake.plan(&[&devices, "NVIDIA_DRIVER_CAPABILITIES=all"]);
    let mut words = BTreeSet::new();
    for edit in said["edits"].as_array().unwrap() {
        let text = |name: &str| edit[name].as_str().unwrap_or_default();
        let list = |name: &str| edit[name].as_array().cloned().unwrap_or_default();
        match text("action") {
            "mount" if text("source").is_empty() => {
                words.insert("profile".to_owned());
            }
            "mount" => {
                words.insert(format!("mount {} {}", text("source"), text("path")));
            }
            "device" => {
                let (major, minor, access) = (&edit["major"], &edit["minor"], text("access"));
                words.insert(format!(
                    "device {} {} {major} {minor} {access}",
                    text("source"),
                    text("path")
                ));
            }
            "link" => {
                words.insert(format!("link {:?} {:?}", text("path"), text("target")));
            }
            "mask" => {
                words.insert("mask".to_owned());
                // A spec has a directory for each of its devices. The hook mounts the directory of all GPUs, if the container has all of them.
                for path in list("shown") {
                    match path.as_str() == Some("gpus") {
                        true => words.extend(
                            gpu_dirs(fake)
                                .iter()
                                .map(|dir| format!("show \"gpus/{dir}\"")),
                        ),
                        false => _ = words.insert(format!("show {path}")),
                    }
                }
            }
            "linker-cache" => {
                words.extend(list("names").iter().map(|name| format!("cache {name}")))
            }
            other => panic!("{other}"),
        }
    }
    words
}

fn gpu_dirs(fake: &FakeDriver) -> Vec<String> {
    let dirs = std::fs::read_dir(fake.root.join("proc/driver/nvidia/gpus")).unwrap();
    dirs.map(|dir| dir.unwrap().file_name().into_string().unwrap())
        .collect()
}

/// What `refresh` did to the file.
fn refreshed(fake: &FakeDriver, path: &Path) -> bool {
    let identity = || {
        path.metadata()
            .ok()
            .map(|file| (file.ino(), file.mtime(), file.mtime_nsec()))
    };
    let before = identity();
    // Engines of all users read the file, whatever the umask.
    let mut refresh = Command::new("sh");
    refresh
        .args(["-euc", "umask 077; exec \"$@\"", "sh", HOOK, "--config"])
        .arg(&fake.config);
    let ran = run(refresh
        .args(["cdi", "refresh", "--create", "--output"])
        .arg(path)
        .env_clear());
    assert_eq!(
        (ran.code, ran.stdout.as_str(), ran.stderr.as_str()),
        (Some(0), "", "")
    );
    identity() != before
}

fn names(path: &Path) -> Vec<String> {
    let spec = registry::read_spec(path).unwrap();
    spec.devices.into_iter().map(|device| device.name).collect()
}

fn refresh_rewrites_what_is_stale() {
    let fake = FakeDriver::new(&["--gpus", "2", "--drm"]);
    let dir = scratch();
    for format in ["yaml", "json"] {
        let path = dir
            .path()
            .join(format)
            .join("cdi")
            .join(format!("nvidia.{format}"));
        fake.rebuild(&["--gpus", "2", "--drm"]);
        assert_eq!(
            cdi(&fake, &["refresh", "--output", path.to_str().unwrap()]).ok(),
            ""
        );
        assert!(
            !path.exists(),
            "whether there is to be one is not its choice"
        );
        assert!(refreshed(&fake, &path), "there was none");
        assert!(!refreshed(&fake, &path), "nothing changed");
        // NVML would take two seconds. A debug build on a busy machine may take one.
        fake.set_nvml(|old| old + "\ninit-delay-ms 2000\n");
        let limit = Duration::from_millis(if cfg!(debug_assertions) { 1000 } else { 5 });
        let mut fastest = Duration::MAX;
        for _ in 0..20 {
            let start = Instant::now();
            assert!(!refreshed(&fake, &path));
            fastest = fastest.min(start.elapsed());
        }
        assert!(fastest < limit, "{fastest:?}");

        fake.rebuild(&["--gpus", "2", "--drm", "--version", "560.35.03"]);
        assert!(refreshed(&fake, &path), "another driver");
        assert!(read(&path).contains("libcuda.so.560.35.03"));
        assert!(!refreshed(&fake, &path));

        fake.rebuild(&["--gpus", "3", "--drm", "--version", "560.35.03"]);
        assert!(refreshed(&fake, &path), "one GPU more");
        assert_eq!(names(&path).len(), 7);

        fake.rebuild(&["--gpus", "3", "--mig", "--version", "560.35.03"]);
        assert!(refreshed(&fake, &path), "GPU 0 is split");
        assert_eq!(names(&path)[..2], ["0:0".to_owned(), MIG_0.to_owned()]);
        assert!(!refreshed(&fake, &path));
        // The MIG devices are configured differently, and the kernel shows it. udev creates the nodes of the new numbers.
        let nodes = fake.root.join("dev/nvidia-caps").display().to_string();
        shell!(
            "cd '{nodes}'; for minor in 84 85; do rm -f nvidia-cap$minor; mknod nvidia-cap$minor c 510 $minor; done"
        );
        let caps = fake.root.join("proc/driver/nvidia/capabilities/gpu0/mig");
        std::fs::rename(caps.join("gi2"), caps.join("gi9")).unwrap();
        std::fs::create_dir_all(caps.join("gi2/ci0")).unwrap();
        assert!(refreshed(&fake, &path), "the MIG layout");
        assert!(!refreshed(&fake, &path));

        std::fs::remove_file(fake.root.join("usr/bin/nvidia-smi")).unwrap();
        assert!(refreshed(&fake, &path), "a file that it mounts is gone");
        assert!(!read(&path).contains("nvidia-smi"));
        files_appear(&fake, &path);
        fake.configure("[devices]\ndeny = [\"2\"]");
        assert!(refreshed(&fake, &path), "a setting");
        assert!(!names(&path).contains(&"2".to_owned()));
        fake.configure("");
        assert!(refreshed(&fake, &path));
        write_file(&path, "half a fi");
        assert!(refreshed(&fake, &path), "it was broken");
        assert_eq!(path.metadata().unwrap().mode() & 0o7777, 0o644);
        sockets_come_and_go(&fake, &path);
        fake.configure("[devices]\ndeny = [\"*\"]");
        let ran = cdi(&fake, &["refresh", "--output", path.to_str().unwrap()]);
        let says = format!(
            "removed {}: this host has no GPU for containers\n",
            path.display()
        );
        assert!(ran.stderr.ends_with(&says) && !path.exists(), "{ran:?}");
        ran.ok();
        fake.configure("");
    }
}

/// Packages without libraries do not run ldconfig.
fn files_appear(fake: &FakeDriver, path: &Path) {
    let check = || {
        let dir = path.parent().unwrap().to_str().unwrap();
        cdi(fake, &["check", "--spec-dir", dir])
    };
    for (file, place) in rows! {
        "usr/bin/nvidia-smi", "usr/bin/nvidia-smi";
        "usr/share/vulkan/icd.d/nvidia_icd.json", "vulkan/icd.d/nvidia_icd.json";
        "usr/share/glvnd/egl_vendor.d/10_nvidia.json", "egl_vendor.d/10_nvidia.json";
    } {
        let has_it = || read(path).contains(place);
        assert!(!has_it(), "{file}");
        assert!(!check().ok().contains("driver files were added"), "{file}");
        let added = fake.root.join(file);
        write_file(&added, "");
        let shown = check().ok();
        assert_says(
            &shown,
            &["driver files were added or removed after ", "hint: run "],
        );
        assert!(refreshed(fake, path) && has_it(), "{file}");
        assert!(!refreshed(fake, path), "{file}");
    }
}

/// Daemons start after the spec was written, and stop. If a spec mounts a socket that does not exist, no container starts.
fn sockets_come_and_go(fake: &FakeDriver, path: &Path) {
    for (socket, is_dir) in [
        ("run/nvidia-persistenced/socket", false),
        ("run/nvidia-fabricmanager/socket", false),
        ("tmp/nvidia-mps", true),
    ] {
        let place = fake.root.join(socket);
        let has_it = || read(path).contains(&format!("/{socket}"));
        let aside = place.with_extension("aside");
        if place.exists() {
            std::fs::rename(&place, &aside).unwrap();
            assert!(refreshed(fake, path), "{socket} is gone");
        }
        assert!(!has_it());
        std::fs::create_dir_all(place.parent().unwrap()).unwrap();
        if is_dir {
            std::fs::create_dir(&place).unwrap();
        } else {
            drop(std::os::unix::net::UnixListener::bind(&place).unwrap());
        }
        assert!(refreshed(fake, path) && has_it(), "{socket} came");
        assert!(!refreshed(fake, path));
        if is_dir {
            std::fs::remove_dir(&place)
        } else {
            std::fs::remove_file(&place)
        }
        .unwrap();
        assert!(refreshed(fake, path) && !has_it(), "{socket} went");
    }
}

/// MIG devices that were destroyed and created again can have the same numbers but other UUIDs, and procfs does not show the
/// difference.
fn recreated_mig_devices_are_detected() {
    let fake = FakeDriver::new(&["--gpus", "2", "--mig"]);
    let dir = scratch();
    let path = dir.path().join("nvidia.yaml");
    assert!(refreshed(&fake, &path));
    let check = || {
        let ran = cdi(
            &fake,
            &[
                "check",
                "--json",
                "--spec-dir",
                dir.path().to_str().unwrap(),
            ],
        );
        let groups = json_schema::part("cdi-check", &ran.stdout, "groups");
        let results = groups[0]["results"].as_array().unwrap().clone();
        let bad = results.iter().filter(|result| result["usable"] == false);
        bad.map(|result| result["device"].as_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    for (old, new) in [
        ("0000fa4e0001", "0000fa4e1111"),
        ("0000fa4e1111", "0000fa4e2222"),
    ] {
        let kernel = crate::support::fingerprint(&fake.root.join("proc"), "none");
        fake.set_nvml(|conf| {
            let changed = conf.replace(
                &format!("MIG-51eed000-0001-4000-8000-{old}"),
                &format!("MIG-51eed000-0001-4000-8000-{new}"),
            );
            assert_ne!(changed, conf);
            changed
        });
        assert!(
            kernel == crate::support::fingerprint(&fake.root.join("proc"), "none"),
            "the kernel shows no difference"
        );
        let stale = check();
        assert!(
            stale.contains(&"nvidia.com/gpu=0:0".to_owned())
                && stale.contains(&"nvidia.com/gpu=all".to_owned()),
            "{stale:?}"
        );
        assert!(
            !stale.contains(&"nvidia.com/gpu=1".to_owned()),
            "a whole GPU is as it was: {stale:?}"
        );
        assert!(refreshed(&fake, &path));
        assert!(names(&path).iter().any(|name| name.ends_with(new)));
        assert_eq!(check(), Vec::<String>::new());
        assert!(!refreshed(&fake, &path), "nothing changed since");
    }
    fake.set_nvml(|old| old + "\ninit-error 999\n");
    let ran = check_specs(&fake, dir.path());
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert_says(&ran.stderr, &["(ONH-018)"]);
}

/// `podman --version` takes longer than the rest of `cdi generate`.
fn no_engine_is_run_without_need() {
    let fake = FakeDriver::new(&["--gpus", "1", "--dev-mode", "0660", "--dev-group", "video"]);
    let dir = scratch();
    let run_with_engines = |arguments: &str| {
        let script = format!(
            r#"d='{dir}'; rm -f $d/asked $d/new
            cp $d/fake $d/new # an earlier command stored the version of the file
            mount -t tmpfs x /usr/local/bin
            for name in podman crio; do
                if test -e /usr/bin/$name; then mount --bind $d/new /usr/bin/$name; fi
                cp $d/new /usr/local/bin/$name
            done
            '{HOOK}' --config '{config}' cdi {arguments} >/dev/null
            test ! -e $d/asked || echo asked"#,
            dir = dir.path().display(),
            config = fake.config.display(),
        );
        sh_unshared(&script).ok()
    };
    let fake_engine = format!(
        "#!/bin/sh\necho >>'{}/asked'\necho podman version 5.4.1\n",
        dir.path().display()
    );
    write_program(dir.path().join("fake"), fake_engine);
    let path = dir.path().join("nvidia.yaml");
    let output = format!("--output {}", path.display());
    for arguments in [
        format!("generate --no-additional-gids {output}"),
        format!("generate --additional-gids {output}"),
        "list".to_owned(),
    ] {
        assert_eq!(run_with_engines(&arguments), "", "{arguments}");
    }
    assert!(read(&path).contains("additionalGids"));
    std::fs::remove_file(&path).unwrap();
    // Here the answer depends on the engine: only engines that know the field get the group's number. Podman is found on the PATH
    // of shells.
    assert_eq!(run_with_engines(&format!("generate {output}")), "asked\n");
    assert!(read(&path).contains("additionalGids"));
    assert!(run_with_engines("check || true").ends_with("asked\n"));
}

/// Engines use neither of two specs in one directory with devices of the same names.
fn refresh_makes_no_conflict() {
    let fake = FakeDriver::new(&["--gpus", "1"]);
    let dir = scratch();
    let [yaml, json, theirs] =
        ["nvidia.yaml", "nvidia.json", "theirs.json"].map(|name| dir.path().join(name));
    let spec = r#"{"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": [{"name": "NAME",
        "containerEdits": {"env": ["A=b"]}}]}"#;
    write_file(&theirs, spec.replace("NAME", "all"));
    let ran = create_spec(&fake, &yaml);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert_says(&ran.stderr, &["(ONH-402)", "theirs.json"]);
    assert!(!yaml.exists());
    write_file(&theirs, spec.replace("NAME", "first"));
    assert!(refreshed(&fake, &yaml), "another name");
    // The options of the unit were changed.
    assert!(refreshed(&fake, &json));
    assert!(!yaml.exists() && theirs.exists());
    // A spec that the administrator wrote with another name
    let mine = dir.path().join("mine.yaml");
    write_spec(&fake, &mine);
    std::fs::remove_file(&json).unwrap();
    let ran = create_spec(&fake, &json);
    assert!(
        ran.code == Some(0) && ran.stderr.contains("(ONH-402)") && mine.exists() && !json.exists(),
        "{ran:?}"
    );
    std::fs::remove_file(&mine).unwrap();
    assert!(refreshed(&fake, &json));
    // A spec that exists is kept current. "cdi check" and doctor report the conflict.
    write_file(&theirs, spec.replace("NAME", "all"));
    fake.configure("[nvidia-container-runtime.modes.legacy]\ncuda-compat-mode = \"disabled\"");
    assert!(refreshed(&fake, &json));
}

/// The hint of "cdi check" for a spec of claims named "cdi refresh", which then changed its kind: prepared claims lost their devices.
fn specs_keep_their_kind() {
    let fake = FakeDriver::new(&["--gpus", "2"]);
    let dir = scratch();
    let kind = |file: &Path| registry::read_spec(file).unwrap().kind;
    for (vendor, is_plugins) in [
        ("k8s.gpu.nvidia.com", true),
        ("k8s.device-plugin.nvidia.com", true),
        ("example.org", false),
        ("nvidia.com", false),
    ] {
        let file = dir.path().join(format!("{vendor}-gpu.json"));
        let output = ["--output", file.to_str().unwrap()];
        cdi(
            &fake,
            &[&["generate", "--vendor", vendor], &output[..]].concat(),
        )
        .ok();
        fake.configure("[devices]\ndeny = [\"0\"]");
        let check = check_specs(&fake, dir.path());
        let hint = check
            .stdout
            .lines()
            .find(|line| line.contains("hint: run"))
            .unwrap();
        let command = hint.split('"').nth(1).unwrap();
        if is_plugins {
            // Tests of the plugin can run on this host at the same time.
            assert!(
                command.starts_with("systemctl restart oci-nvidia-"),
                "{command}"
            );
            for verb in ["refresh", "generate"] {
                let ran = cdi(&fake, &[&[verb], &output[..]].concat());
                let stderr = ran.failed(1);
                assert_says(&stderr, &["cannot replace", command]);
            }
        } else {
            let words: Vec<_> = command.split(' ').collect();
            assert_eq!(words[..3], ["oci-nvidia-hook", "cdi", "refresh"]);
            cdi(&fake, &words[2..]).ok();
        }
        assert_eq!(kind(&file), format!("{vendor}/gpu"));
        if vendor == "example.org" {
            fake.configure("");
            let ran = cdi(&fake, &[&["refresh"], &output[..]].concat());
            assert!(ran.failed(1).contains("--vendor"));
            assert_eq!(kind(&file), "example.org/gpu");
        }
        std::fs::remove_file(&file).unwrap();
        fake.configure("");
    }
}

/// All commands advise to remove the same one of two files.
fn one_advice_about_a_conflict() {
    let fake = FakeDriver::new(&["--gpus", "1"]);
    let dir = scratch();
    let ours = dir.path().join("nvidia.yaml");
    let specs = ["--spec-dir", dir.path().to_str().unwrap()];
    let generate = ["generate", "--output", ours.to_str().unwrap()];
    cdi(&fake, &generate).ok();
    let theirs = r#"{"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": [{"name": "all", "containerEdits": {"env": ["A=b"]}}]}"#;
    let copy = read(&ours);
    // The second is the name on NixOS, which engines read before nvidia.yaml.
    for name in ["other.yaml", "nvidia-container-toolkit.yaml"] {
        let other = dir.path().join(name);
        for text in [theirs, copy.as_str()] {
            write_file(&other, text);
            let advice = format!("run \"rm {}\"", other.display());
            let check = cdi(&fake, &[&["check"], &specs[..]].concat());
            assert!(check.stdout.contains(&advice), "{check:?}");
            let list = cdi(&fake, &[&["list"], &specs[..]].concat());
            assert_eq!(list.code, Some(0), "{list:?}");
            assert_says(&list.stderr, &[&advice, "(ONH-402)"]);
            for output in [&ours, &other] {
                if *output == other && text == theirs {
                    continue;
                }
                let generate = ["generate", "--output", output.to_str().unwrap()];
                let ran = cdi(&fake, &[&generate, &specs[..]].concat());
                assert!(ran.stderr.contains(&advice), "{ran:?}");
            }
        }
        std::fs::remove_file(&other).unwrap();
    }
}

fn refresh_without_gpus_prints_what_it_removes() {
    let fake = FakeDriver::new(&["--gpus", "1"]);
    let dir = scratch();
    let path = dir.path().join("cdi/nvidia.yaml");
    let gpus = fake.root.join("proc/driver/nvidia/gpus");
    std::fs::rename(&gpus, dir.path().join("gpus")).unwrap();
    assert!(!refreshed(&fake, &path), "a driver without GPUs");
    assert!(!path.parent().unwrap().exists());
    std::fs::rename(dir.path().join("gpus"), &gpus).unwrap();
    assert!(refreshed(&fake, &path));
    std::fs::remove_dir_all(&gpus).unwrap();
    let file = path.to_str().unwrap();
    let removed = cdi(&fake, &["refresh", "--create", "--output", file]);
    assert_eq!(
        (removed.code, removed.stdout.as_str(), removed.stderr),
        (
            Some(0),
            "",
            format!("oci-nvidia-hook: removed {file}: this host has no GPU for containers\n")
        ),
        "the last GPU is gone"
    );
    assert!(!path.exists());
    // The spec of another program is left unchanged.
    let theirs = r#"{"cdiVersion": "0.3.0", "kind": "a.b/c", "devices": [{"name": "d", "containerEdits": {"env": ["A=b"]}}]}"#;
    write_file(&path, theirs);
    assert!(!refreshed(&fake, &path));
    std::fs::remove_dir_all(&fake.root).unwrap();
    assert!(!refreshed(&fake, &path), "no driver at all");
    let stderr = cdi(&fake, &["refresh", "--output", "-"]).failed(2);
    assert!(stderr.contains("\"cdi refresh\" needs a file"), "{stderr}");
}

/// A GPU that does not answer is left out, reported, and asked again, because nothing on the host shows when it works again.
fn refresh_asks_a_failing_gpu_again() {
    let (dir, fake) = (scratch(), FakeDriver::new(&["--gpus", "2"]));
    let path = dir.path().join("nvidia.yaml");
    fake.set_nvml(|old| old.replace("gpu minor=1 ", "gpu minor=1 fail=15 "));
    let ran = create_spec(&fake, &path);
    assert_says(&ran.stderr, &["warning: GPU 1: nvmlDeviceGet", "(ONH-401)"]);
    ran.ok();
    assert_eq!(names(&path), ["0", GPU_0, "all"]);
    fake.set_nvml(|old| old.replace(" fail=15", ""));
    assert!(refreshed(&fake, &path));
    assert_eq!(names(&path).len(), 5);
    assert!(!refreshed(&fake, &path));
}

/// Several programs write at boot. A reader always finds a complete file.
fn refresh_by_many_at_once() {
    let fake = FakeDriver::new(&["--gpus", "2"]);
    let dir = scratch();
    let path = dir.path().join("nvidia.yaml");
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..8)
            .map(|_| scope.spawn(|| write_spec(&fake, &path)))
            .collect();
        while !writers
            .iter()
            .all(std::thread::ScopedJoinHandle::is_finished)
        {
            if let Ok(bytes) = std::fs::read(&path) {
                assert_eq!(file::parse(&bytes).unwrap().check(), Ok(()));
            }
        }
    });
    assert_eq!(
        std::fs::read_dir(dir.path()).unwrap().count(),
        1,
        "nothing is left beside it"
    );
}

/// A file that no engine reads is written, with a warning.
fn generate_warns_of_a_file_that_engines_ignore() {
    let fake = FakeDriver::new(&["--gpus", "1"]);
    let dir = scratch();
    let (etc, run_dir) = (dir.path().join("etc"), dir.path().join("run"));
    let write = |path: &Path| {
        let mut words = vec!["generate", "--output", path.to_str().unwrap()];
        words.extend([
            "--spec-dir",
            etc.to_str().unwrap(),
            "--spec-dir",
            run_dir.to_str().unwrap(),
        ]);
        let ran = cdi(&fake, &words);
        let report = format!(
            "oci-nvidia-hook: wrote {}: nvidia.com/gpu=0, nvidia.com/gpu=all\n",
            path.display()
        );
        let doubts = ran
            .stderr
            .strip_prefix(&report)
            .unwrap_or_else(|| panic!("{ran:?}"))
            .to_owned();
        ran.ok();
        doubts
    };
    assert_eq!(write(&etc.join("nvidia.yaml")), "");
    assert_eq!(
        write(&run_dir.join("nvidia.yaml")),
        "",
        "the more important one"
    );
    assert!(
        write(&etc.join("nvidia.yaml"))
            .contains("run/nvidia.yaml\" has devices of the same names (ONH-402)")
    );
    std::fs::remove_file(run_dir.join("nvidia.yaml")).unwrap();
    assert!(
        write(&etc.join("other.yaml"))
            .contains("etc/nvidia.yaml\" has devices of the same names (ONH-402)")
    );
    std::os::unix::fs::symlink(&run_dir, dir.path().join("link")).unwrap();
    std::fs::remove_dir_all(&etc).unwrap();
    assert_eq!(
        write(&dir.path().join("link/nvidia.yaml")),
        "",
        "by another name"
    );
    assert!(write(&dir.path().join("nvidia.yaml")).contains("searches for CDI specs"));
}

/// The views of `cdi check` for a device that works, one whose file is missing, a file with an error, and a spec that Podman cannot read.
fn what_check_prints() {
    let dir = scratch();
    let spec = |name: &str, version: &str, devices: &str| {
        let text = format!("cdiVersion: {version}\nkind: nvidia.com/{name}\ndevices:\n{devices}");
        write_file(dir.path().join(format!("{name}.yaml")), text);
    };
    let device = |name: &str, node: &str| {
        format!("- name: \"{name}\"\n  containerEdits:\n    deviceNodes: [{{path: {node}}}]\n")
    };
    let devices = device("0", "/dev/nvidia0")
        + &device("GPU-51eed000-0000-4000-8000-00000000fa4e", "/dev/nvidia0");
    spec("gpu", "0.5.0", &(devices + &device("1", "/dev/nvidia1")));
    spec("other", "1.0.0", &device("0", "/dev/nvidia0"));
    spec("broken", "0.5.0", "- nonsense: 1\n");
    let files = registry::read(&[dir.path().to_owned()]);
    let readers = [
        (EngineKind::Podman, Version(4, 9, 5)),
        (EngineKind::Crio, Version(1, 37, 0)),
    ];
    let readers = readers.map(|(kind, version)| SpecReader {
        kind,
        version: Some(version),
    });
    let now = Now {
        readers: &readers,
        stamp: None,
        host: &HostView::default(),
        units_write: false,
        limits: &NodeLimits::default(),
        plugins: &[],
    };
    let mut verdicts = cdi_check::devices(&files, &now, |path| path != "/dev/nvidia1");
    verdicts.extend(cdi_check::files(&files, &now));
    let below = |text: &str| text.replace(dir.path().to_str().unwrap(), "/etc/cdi");
    for verdict in &mut verdicts {
        for text in [
            &mut verdict.subject,
            &mut verdict.reason,
            &mut verdict.hint,
            &mut verdict.file,
        ] {
            *text = below(text);
        }
    }
    golden::check_text("cdi-check", "oci-nvidia-hook cdi check", |terminal| {
        cdi_text::text(&verdicts, &["/etc/cdi".into()], &readers, terminal)
    });
    golden::check_text("cdi-check-none", "oci-nvidia-hook cdi check", |terminal| {
        cdi_text::text(
            &[],
            &["/etc/cdi".into(), "/var/run/cdi".into()],
            &readers,
            terminal,
        )
    });
}

fn check_gives_reasons() {
    let fake = FakeDriver::new(&["--gpus", "1"]);
    let dir = scratch();
    let (etc, run_dir) = (dir.path().join("etc"), dir.path().join("run"));
    let check = |names: &[&str]| {
        let mut words = vec![
            "check",
            "--spec-dir",
            etc.to_str().unwrap(),
            "--spec-dir",
            run_dir.to_str().unwrap(),
        ];
        words.extend(names);
        let ran = cdi(&fake, &words);
        (ran.code.unwrap(), ran.stdout)
    };
    let (code, text) = check(&[]);
    assert!(code == 1 && text.starts_with("no CDI devices"), "{text}");
    let empty = cdi(&fake, &["list", "--spec-dir", etc.to_str().unwrap()]);
    assert_says(
        &empty.stderr,
        &["no CDI devices; \"oci-nvidia-hook cdi generate\""],
    );
    assert_eq!(empty.ok(), "");
    let path = run_dir.join("nvidia.yaml");
    let ran = cdi(&fake, &["generate", "--output", path.to_str().unwrap()]);
    let report = format!(
        "oci-nvidia-hook: wrote {}: nvidia.com/gpu=0, ",
        path.display()
    );
    assert!(ran.stderr.starts_with(&report) && ran.ok().is_empty());
    let (code, text) = check(&[]);
    assert!(
        code == 0 && text.lines().filter(|line| line.starts_with("yes ")).count() == 3,
        "{text}"
    );
    assert_eq!(check(&["nvidia.com/gpu=0"]).0, 0);
    let (code, text) = check(&["nvidia.com/gpu=gpu0"]);
    assert!(
        code == 1
            && text.contains(
                "no spec contains the device\n        hint: did you mean nvidia.com/gpu=0?"
            ),
        "{text}"
    );

    std::fs::create_dir_all(&etc).unwrap();
    write_file(etc.join("broken.yaml"), "cdiVersion: 0.5.0\nbogus: 1\n");
    std::fs::copy(&path, etc.join("ignored.yml")).unwrap();
    let (code, text) = check(&[]);
    assert!(
        code == 1 && text.contains("unknown field \"bogus\""),
        "{text}"
    );
    assert!(!text.contains("ignored.yml"), "{text}");
    std::fs::remove_dir_all(&etc).unwrap();

    let twin = run_dir.join("old.yaml");
    std::fs::copy(&path, &twin).unwrap();
    let (code, text) = check(&[]);
    assert!(
        code == 1 && text.contains("both contain the device, therefore engines use neither"),
        "{text}"
    );
    std::fs::remove_file(twin).unwrap();

    // A hook to which runc passes the environment of the image, of whatever vendor.
    let nic = run_dir.join("nic.json");
    let hook = r#"{"hookName":"createContainer","path":"/bin/sh","args":["sh","-c","true"]}"#;
    let text = format!(
        r#"{{"cdiVersion":"0.5.0","kind":"vendor.com/nic","containerEdits":{{"hooks":[{hook}]}},
            "devices":[{{"name":"0","containerEdits":{{"env":["A=b"]}}}}]}}"#
    );
    write_file(&nic, &text);
    for names in [&[][..], &["vendor.com/nic=0"]] {
        let (code, text) = check(names);
        let message =
            "nic.json\" starts \"/bin/sh\" at the stage createContainer without \"env\" (ONH-061)";
        assert!(
            code == 1
                && text.contains(message)
                && text.contains("unsafe  ")
                && text.contains("nic.json\n"),
            "{text}"
        );
        assert_says(&text, &["hint: add env: [\"PATH=", "vendor.com/nic=0 ("]);
    }
    assert_eq!(check(&["nvidia.com/gpu=0"]).0, 0, "of another file");
    write_file(&nic, text.replace("\"path\"", "\"env\":[\"A=b\"],\"path\""));
    assert_eq!(check(&[]).0, 0);
    std::fs::remove_file(nic).unwrap();

    fake.rebuild(&["--gpus", "1", "--version", "560.35.03"]);
    let (code, text) = check(&["nvidia.com/gpu=all"]);
    assert!(
        code == 1 && text.contains("is for driver 535.183.01, but 560.35.03 is loaded"),
        "{text}"
    );
    cdi(&fake, &["refresh", "--output", path.to_str().unwrap()]).ok();
    std::fs::remove_file(fake.root.join("usr/bin/nvidia-smi")).unwrap();
    let (code, text) = check(&["nvidia.com/gpu=all"]);
    assert!(
        code == 1
            && text.contains("/usr/bin/nvidia-smi\" is missing on the host\n        hint: run"),
        "{text}"
    );
    cdi(&fake, &["refresh", "--output", path.to_str().unwrap()]).ok();
    chmod(&path, 0o600);
    let (code, text) = check(&["nvidia.com/gpu=all"]);
    assert!(
        code == 0 && text.contains("rootless Podman cannot read the file"),
        "{text}"
    );
    let listed = cdi(&fake, &["list", "--spec-dir", run_dir.to_str().unwrap()]).ok();
    assert_eq!(
        listed,
        format!("nvidia.com/gpu=0\nnvidia.com/gpu={GPU_0}\nnvidia.com/gpu=all\n")
    );
}
