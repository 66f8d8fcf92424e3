//! Device nodes that a container needs and the host lacks: the hook creates them, or names the command that does.

use std::path::Path;
use std::process::Command;

use serde_json::json;

use crate::driver::{ALL_GPUS, FakeDriver, MASKABLE_PROC, NEEDS, Waiting};
use crate::support::{
    HOOK, Need, Ran, assert_lacks, assert_says, nvml_program, run_with, scratch, shell, unshare,
    write_file,
};

tests! {
    NEEDS => what_a_request_needs_is_made, what_is_made_is_explained, nothing_more_is_made, one_number_and_one_command, failures_are_reported,
        doctor_reports_a_node_once;
    USER_NEEDS => a_plain_user_reads_what_root_has_to_do;
}

const USER_NEEDS: &[Need] = &[
    Need::Root,
    Need::Programs(&["cc", "unshare", "nsenter", "setpriv"]),
];

/// A host with the fake driver's nodes in its /dev and the kernel module's reports in its /proc. Libraries are in a driver root
/// that contains only files, as on GKE.
struct Host {
    fake: FakeDriver,
    kept: tempfile::TempDir,
}

impl Host {
    fn new(arguments: &[&str]) -> Self {
        let (fake, kept) = (FakeDriver::new(arguments), scratch());
        let (root, dir) = (fake.root.display(), kept.path().display());
        shell!(
            "mv '{root}/dev' '{root}/proc' '{dir}'; mkdir -p '{root}/sys/module/nvidia_modeset' '{dir}/dev/char'; \
             mknod -m 666 '{dir}/dev/null' c 1 3; \
             for node in nvidiactl:195:255 nvidia-uvm:511:0; do ln -s ../${{node%%:*}} '{dir}/dev/char/'${{node#*:}}; done"
        );
        Self { fake, kept }
    }

    fn dev(&self, name: &str) -> std::path::PathBuf {
        self.kept.path().join("dev").join(name)
    }

    fn remove(&self, names: &str) -> &Self {
        shell!("cd '{}'; rm -r {names}", self.dev("").display());
        self
    }

    /// Returns the program in the mount namespace of that host.
    fn program(&self) -> Command {
        self.program_by(&[HOOK])
    }

    /// The same, started by these words.
    fn program_by(&self, words: &[&str]) -> Command {
        let script = format!(
            "mount --bind '{dir}/dev' /dev; mount -t tmpfs proc /proc/driver; cp -a '{dir}/proc/driver/.' /proc/driver; \
             mount --bind '{dir}/proc/devices' /proc/devices; exec \"$@\"",
            dir = self.kept.path().display()
        );
        let mut program = unshare(&script);
        program
            .args(words)
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        program
    }

    /// Runs the hook for a new container, and returns the output of this shell script in it.
    fn container(&self, env: &[&str], script: &str) -> (Ran, String) {
        let container = Waiting::debian(env, MASKABLE_PROC);
        let mut hook = self.program();
        hook.arg("--config").arg(&self.fake.config).arg("prestart");
        let ran = run_with(&mut hook, container.state().as_bytes());
        let text = if ran.code == Some(0) {
            container.output(script)
        } else {
            String::new()
        };
        (ran, text)
    }

    fn prepare(&self, arguments: &[&str]) -> Ran {
        let mut prepare = self.program();
        run_with(
            prepare
                .arg("--config")
                .arg(&self.fake.config)
                .arg("prepare")
                .args(arguments),
            b"",
        )
    }
}

fn mode(path: &Path) -> String {
    shell!("stat -c '%a %U:%G %t:%T' '{}'", path.display())
        .trim()
        .to_owned()
}

const ALL: &str = "NVIDIA_VISIBLE_DEVICES=all";

fn what_a_request_needs_is_made() {
    let host = Host::new(&["--gpus", "2", "--dev-mode", "0660", "--dev-group", "video"]);
    let (ran, usual) = host.container(&[ALL], "nvidia-smi -L");
    ran.ok();
    assert_eq!(usual.lines().count(), 2, "{usual}");
    for missing in [
        "nvidia1",
        "nvidia0",
        "nvidia0 nvidia1",
        "nvidiactl",
        "nvidia-uvm",
    ] {
        let (ran, listed) = host.remove(missing).container(&[ALL], "nvidia-smi -L");
        assert_eq!((ran.ok().as_str(), &listed), ("", &usual), "{missing}");
    }
    // The host defines an index, whichever node was missing.
    let (ran, listed) = host
        .remove("nvidia0")
        .container(&["NVIDIA_VISIBLE_DEVICES=0"], "nvidia-smi -L");
    ran.ok();
    assert_eq!(listed.trim(), usual.lines().next().unwrap());
    assert_eq!(mode(&host.dev("nvidia0")), "660 root:video c3:0");
    assert_eq!(mode(&host.dev("nvidia-uvm")), "666 root:root 1ff:0");

    // A node that NVML cannot open is repaired like a missing one, also if it is the only one.
    for wrong in ["chmod 0", "chown 1000:1000"] {
        let node = host.dev("nvidia1");
        shell!("chmod 600 '{0}'; {wrong} '{0}'", node.display());
        let (ran, listed) = host.container(&[ALL], "nvidia-smi -L");
        assert_eq!((ran.ok().as_str(), &listed), ("", &usual), "{wrong}");
        assert_eq!(mode(&node), "660 root:video c3:1", "{wrong}");
    }

    let graphics = "NVIDIA_DRIVER_CAPABILITIES=graphics,utility";
    host.remove("nvidia-modeset")
        .container(&[ALL, graphics], "test -c /dev/nvidia-modeset")
        .0
        .ok();
    assert_eq!(mode(&host.dev("nvidia-modeset")), "660 root:video c3:fe");

    let channel = "nvidia-caps-imex-channels/channel7";
    let imex = [ALL, "NVIDIA_IMEX_CHANNELS=7"];
    host.container(&imex, &format!("test -c /dev/{channel}"))
        .0
        .ok();
    assert_eq!(mode(&host.dev(channel)), "660 root:video 1fd:7");
    host.remove("nvidia-caps-imex-channels")
        .fake
        .configure("[features]\ndisable-imex-channel-creation = true\n");
    let stderr = host.container(&imex, "").0.failed(1);
    assert_says(
        &stderr,
        &[&format!(
            "\"/dev/{channel}\" is missing below \"/\" (ONH-021)"
        )],
    );
    assert_says(
        &stderr,
        &["hint: run \"oci-nvidia-hook prepare --imex-channel 7\""],
    );
    assert!(
        host.prepare(&["--imex-channel", "7"])
            .ok()
            .starts_with(&format!("made /dev/{channel} c 509:7 0:"))
    );
    host.container(&imex, &format!("test -c /dev/{channel}"))
        .0
        .ok();

    let host = Host::new(&["--gpus", "2", "--mig"]);
    for (request, lines) in [("0:0", 2), ("all", 4)] {
        host.remove("nvidia-caps");
        let (ran, listed) = host.container(
            &[&format!("NVIDIA_VISIBLE_DEVICES={request}")],
            "nvidia-smi -L",
        );
        assert_eq!(ran.ok(), "", "{request}");
        assert_eq!(listed.lines().count(), lines, "{request}: {listed}");
    }
    // If the hook may not create the nodes, it names the command that does, and never suggests to create the MIG devices again.
    host.remove("nvidia-caps")
        .fake
        .configure("load-kmods = false\n");
    let (ran, _) = host.container(&["NVIDIA_VISIBLE_DEVICES=0"], "true");
    let warned = ran.stderr;
    assert!(warned.contains("(ONH-230)"), "{warned}");
    assert_says(&warned, &["(ONH-230)"]);
    assert_lacks(&warned, &["-cgi"]);
    for name in ["0:0", "MIG-51eed000-0001-4000-8000-0000fa4e0001"] {
        let stderr = host
            .container(&[&format!("NVIDIA_VISIBLE_DEVICES={name}")], "")
            .0
            .failed(1);
        assert_says(
            &stderr,
            &["\"/dev/nvidia-caps/nvidia-cap12\", ", "(ONH-021)"],
        );
        assert_says(
            &stderr,
            &["\nhint: run \"oci-nvidia-hook prepare\" as root on the host\n"],
        );
    }
    host.fake.configure("");
    host.container(ALL_GPUS, "").0.ok();
    a_mig_device_without_its_node(&host);
    assert_eq!(mode(&host.dev("nvidia-caps")), "755 root:root 0:0");
    for (minor, expected) in [(1, "400"), (2, "444"), (12, "444"), (22, "444")] {
        let made = mode(&host.dev(&format!("nvidia-caps/nvidia-cap{minor}")));
        assert_eq!(made, format!("{expected} root:root 1fe:{minor:x}"));
    }
}

/// `plan` makes nothing, and answers like the hook, which makes the nodes.
fn what_is_made_is_explained() {
    let graphics = "NVIDIA_DRIVER_CAPABILITIES=graphics,utility";
    let channel = "nvidia-caps-imex-channels/channel7";
    let of = |host: &Host, env: &[&str]| {
        let spec = json!({"process": {"env": env}, "root": {"path": "/nowhere"}}).to_string();
        let mut plan = host.program();
        run_with(
            plan.arg("--config")
                .arg(&host.fake.config)
                .args(["plan", "-"]),
            spec.as_bytes(),
        )
    };
    let host = Host::new(&["--gpus", "2"]);
    host.container(&[ALL], "true").0.ok();
    for (missing, env, number) in [
        ("nvidia1", &[ALL][..], "195:1"),
        ("nvidia-uvm", &[ALL], "511:0"),
        ("nvidiactl", &[ALL], "195:255"),
        ("nvidia-modeset", &[ALL, graphics], "195:254"),
        (channel, &[ALL, "NVIDIA_IMEX_CHANNELS=7"], "509:7"),
    ] {
        if missing != channel {
            host.remove(missing);
        }
        let shown = of(&host, env).ok();
        assert!(
            shown.starts_with("the hook would set up the container: "),
            "{missing}: {shown}"
        );
        assert_says(
            &shown,
            &[&format!(
                "\non the host: create /dev/{missing} c {number}\n"
            )],
        );
        let is_known = !shown.contains("NVML answers only after that");
        assert!(
            !is_known || shown.contains(missing) && shown.contains("libnvidia-ml.so"),
            "{shown}"
        );
        assert!(!host.dev(missing).exists(), "{missing}");
        host.container(env, &format!("test -c /dev/{missing}"))
            .0
            .ok();
        assert!(!of(&host, env).ok().contains("on the host: "), "{missing}");
    }
    // Nodes that the request does not need, and nodes that the hook may not make.
    host.remove("nvidia-modeset");
    assert!(!of(&host, &[ALL]).ok().contains("on the host: "));
    host.remove("nvidia1")
        .fake
        .configure("load-kmods = false\n");
    assert!(of(&host, &[ALL]).failed(1).is_empty());

    let host = Host::new(&["--gpus", "1", "--mig"]);
    host.remove("nvidia-caps");
    let shown = of(&host, &["NVIDIA_VISIBLE_DEVICES=0:0"]).ok();
    assert_says(
        &shown,
        &["; it would first prepare the host, and NVML answers only after that\n"],
    );
    assert_says(&shown, &["create /dev/nvidia-caps/nvidia-cap12 c "]);
}

/// NVML lists the other MIG device under the index of this one. Each mode reports that.
fn a_mig_device_without_its_node(host: &Host) {
    host.remove("nvidia-caps/nvidia-cap13")
        .fake
        .configure("load-kmods = false\n");
    let missing = "device nodes of MIG devices of GPU 0 are missing: \"/dev/nvidia-caps/nvidia-cap13\" \
                   (GPU instance 1, compute instance 0)";
    let (ran, listed) = host.container(&[ALL], "nvidia-smi -L");
    assert_eq!((ran.code, listed.lines().count()), (Some(0), 3), "{listed}");
    let spec_of = |request: &str| {
        json!({"process": {"env": [request]}, "root": {"path": "/nowhere"}}).to_string()
    };
    let hook = |arguments: &[&str], stdin: &str| {
        let mut hook = host.program();
        run_with(
            hook.arg("--config").arg(&host.fake.config).args(arguments),
            stdin.as_bytes(),
        )
    };
    let edited = hook(&["edit-config"], &spec_of(ALL));
    let generated = hook(&["cdi", "generate", "--output", "-"], "");
    assert!(
        !generated.stdout.contains("\"0:0\""),
        "an index may name another MIG device: {}",
        generated.stdout
    );
    assert_says(
        &generated.stdout,
        &["MIG-51eed000-0002-4000-8000-0000fa4e0002"],
    );
    for ran in [ran, edited, generated] {
        assert_eq!(ran.code, Some(0), "{ran:?}");
        let warning = format!(
            "{missing} (ONH-232)\nhint: run \"oci-nvidia-hook prepare\" as root on the host"
        );
        assert!(
            ran.stderr.replace("warning: ", "").contains(&warning),
            "{}",
            ran.stderr
        );
    }
    let explained = hook(&["plan", "-"], &spec_of(ALL)).ok();
    assert_says(&explained, &["ONH-232 warning: ", missing]);
    for (name, is_given) in [
        ("0:0", false),
        ("0:1", false),
        ("MIG-51eed000-0001-4000-8000-0000fa4e0001", false),
        ("MIG-51eed000-0002-4000-8000-0000fa4e0002", true),
    ] {
        let ran = hook(
            &["edit-config"],
            &spec_of(&format!("NVIDIA_VISIBLE_DEVICES={name}")),
        );
        assert_eq!(ran.code == Some(0), is_given, "{name}: {ran:?}");
        let error = format!(
            "{missing} (ONH-021)\nhint: run \"oci-nvidia-hook prepare\" as root on the host"
        );
        assert_eq!(ran.stderr.contains(&error), !is_given, "{name}: {ran:?}");
    }
}

/// Nodes that only another container would need are not created.
fn nothing_more_is_made() {
    let host = Host::new(&["--gpus", "2"]);
    host.remove("nvidia-modeset");
    host.container(&[ALL], "true").0.ok();
    assert!(!host.dev("nvidia-modeset").exists(), "only for graphics");
    host.remove("nvidia1");
    host.container(&["NVIDIA_VISIBLE_DEVICES=none"], "true")
        .0
        .ok();
    assert!(!host.dev("nvidia1").exists(), "no GPU is requested");
    // A node that NVML can open is not changed as long as none is missing.
    shell!("mknod -m 606 '{}' c 195 1", host.dev("nvidia1").display());
    host.container(&["NVIDIA_VISIBLE_DEVICES=0"], "true").0.ok();
    assert_eq!(mode(&host.dev("nvidia1")), "606 root:root c3:1");
    assert!(!host.dev("nvidia-caps-imex-channels").exists());
}

/// The form of the request does not matter.
fn one_number_and_one_command() {
    let host = Host::new(&["--gpus", "2"]);
    let uuid = host
        .container(&["NVIDIA_VISIBLE_DEVICES=1"], "nvidia-smi -L")
        .1;
    let uuid = uuid
        .split("UUID: ")
        .nth(1)
        .unwrap()
        .trim()
        .trim_end_matches(')')
        .to_owned();
    host.fake.configure("load-kmods = false\n");
    host.remove("nvidia1");
    for request in ["all", "0000:02:00.0"] {
        let stderr = host
            .container(&[&format!("NVIDIA_VISIBLE_DEVICES={request}")], "")
            .0
            .failed(1);
        assert!(
            stderr.contains("\"/dev/nvidia1\" is missing (bus id 00000000:02:00.0) (ONH-021)"),
            "{request}: {stderr}"
        );
        assert!(
            stderr.contains("\nhint: run \"oci-nvidia-hook prepare\" as root on the host\n"),
            "{request}: {stderr}"
        );
    }
    assert!(
        host.prepare(&[])
            .ok()
            .contains("made /dev/nvidia1 c 195:1 0:")
    );
    let (ran, _) = host.container(&[&format!("NVIDIA_VISIBLE_DEVICES={uuid}")], "true");
    ran.ok();
    host.remove("char/195:1");
    assert_eq!(
        host.prepare(&[]).ok(),
        "created the link /dev/char/195:1 to /dev/nvidia1\n"
    );
    shell!("chmod 600 '{}'", host.dev("nvidia1").display());
    assert!(
        host.prepare(&[])
            .ok()
            .starts_with("set the owner and mode of /dev/nvidia1 c 195:1 0:")
    );
    assert_eq!(host.prepare(&[]).ok(), "");
}

fn failures_are_reported() {
    let host = Host::new(&["--gpus", "1"]);
    host.remove("nvidia0");
    // A file system that does not allow device nodes.
    let mut read_only = Command::new("unshare");
    let script = format!(
        "mount --bind '{dir}/dev' /dev; mount -o remount,bind,ro /dev; mount -t tmpfs proc /proc/driver; \
         cp -a '{dir}/proc/driver/.' /proc/driver; mount --bind '{dir}/proc/devices' /proc/devices; exec \"$@\"",
        dir = host.kept.path().display()
    );
    read_only.args(["-m", "sh", "-euc", &script, "sh", HOOK]);
    let ran = run_with(
        read_only
            .arg("--config")
            .arg(&host.fake.config)
            .arg("prepare"),
        b"",
    );
    let stderr = ran.failed(1);
    assert_says(
        &stderr,
        &[
            "cannot make the device node \"/dev/nvidia0\": read-only file system (EROFS) (ONH-021)\nhint: ",
        ],
    );

    let stderr = host.prepare(&["--imex-channel", "2048"]).failed(1);
    assert_says(&stderr, &["2048 of them (ONH-021)\nhint: "]);
    assert!(
        host.dev("nvidia0").exists(),
        "a failure does not stop the rest"
    );

    let params = host.kept.path().join("proc/driver/nvidia/params");
    write_file(params, "ModifyDeviceFiles: 0\nDeviceFileMode: 432\n");
    assert_eq!(
        host.prepare(&[]).ok(),
        "",
        "the administrator's nodes are unchanged"
    );
    let stderr = host.remove("nvidia0").prepare(&[]).failed(1);
    assert_says(
        &stderr,
        &["leaves its device nodes to the administrator (ModifyDeviceFiles: 0) (ONH-021)"],
    );
    assert_says(
        &stderr,
        &["\nhint: run \"mknod -m 660 /dev/nvidia0 c 195 0\" as root\n"],
    );
}

/// The error for a user who is not in the nodes' group: one number, and the group by its name, or with the command that creates a
/// name.
fn a_plain_user_reads_what_root_has_to_do() {
    const NOBODY: [&str; 4] = [
        "setpriv",
        "--reuid=65534",
        "--regid=65534",
        "--clear-groups",
    ];
    let host = Host::new(&["--gpus", "2", "--dev-mode", "0660", "--dev-group", "video"]);
    // The program, the libraries and config.toml, at paths that the user can read.
    let place = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = place.path().display();
    shell!(
        "chmod 755 '{path}'; cp '{HOOK}' '{path}/hook'; cp '{nvml}' '{path}'; cp -a '{}' '{path}/root'",
        host.fake.root.display(),
        nvml = nvml_program().display()
    );
    let (program, config) = (format!("{path}/hook"), format!("{path}/config.toml"));
    write_file(
        &config,
        format!("[nvidia-container-cli]\nroot = \"{path}/root\"\n"),
    );
    let call = |by: &[&str], verb: &str| {
        let words: Vec<_> = NOBODY
            .iter()
            .chain(by)
            .copied()
            .chain([program.as_str(), "--config", &config])
            .collect();
        run_with(host.program_by(&words).arg(verb), b"")
    };
    let stderr = call(&[], "prepare").failed(1);
    assert!(stderr.contains("(ONH-006)\nhint: run \"sudo "), "{stderr}");
    let named = "as root, run \"usermod -aG video nobody\", and log in again";
    let unnamed =
        "as root, run \"groupadd -g 4321 gpu4321 && usermod -aG gpu4321 nobody\", and log in again";
    for (group, hint) in [("video", named), ("4321", unnamed)] {
        shell!("chgrp {group} '{}'/nvidia*", host.dev("").display());
        let stderr = call(&[], "info").failed(1);
        assert!(stderr.contains("(ONH-019)"), "{stderr}");
        assert_says(&stderr, &[&format!("(ONH-019)\nhint: {hint}\n")]);
        let doctor = call(&[], "doctor").stdout;
        assert_says(&doctor, &["user nobody cannot open \"/dev/nvidiactl\""]);
        assert!(doctor.contains(&format!("fix: {hint}\n")), "{doctor}");
        assert_says(&doctor, &["(ONH-211)"]);
        assert_lacks(&doctor, &["ONH-019"]);
    }
    // In a user namespace, as in rootless Podman, the node's group has no number; the driver's parameters contain it.
    let stderr = call(&["unshare", "-Ur"], "info").failed(1);
    let hint = "as root, run \"usermod -aG video nobody\", and log in again; rootless containers then need crun and \
                \"--group-add keep-groups\"\n";
    assert_says(&stderr, &[&format!("(ONH-019)\nhint: {hint}")]);
    let doctor = call(&[], "doctor");
    assert_says(&doctor.stdout, &["fix: as root, run \"groupadd"]);
}

/// One fault is one finding, with the one command that fixes it.
fn doctor_reports_a_node_once() {
    let host = Host::new(&["--gpus", "2", "--mig"]);
    let doctor = |checks: &[&str]| -> Vec<(String, String, String)> {
        let mut doctor = host.program();
        let ran = run_with(
            doctor
                .arg("--config")
                .arg(&host.fake.config)
                .args(["doctor", "--json"]),
            b"",
        );
        let outcomes = crate::json_schema::part("doctor", &ran.stdout, "checks");
        let text = |outcome: &serde_json::Value, field: &str| {
            outcome[field].as_str().unwrap_or_default().to_owned()
        };
        let mut of_driver: Vec<_> = outcomes
            .iter()
            .filter(|outcome| checks.contains(&&*text(outcome, "check")))
            .collect();
        // A tree below a home directory that only root may search contains a library that only root can read.
        of_driver.retain(|outcome| outcome["id"].is_string() && outcome["id"] != "ONH-314");
        of_driver
            .iter()
            .map(|found| (text(found, "check"), text(found, "id"), text(found, "fix")))
            .collect()
    };
    let checks = [
        "nodes",
        "uvm",
        "modeset",
        "nvml",
        "gpus",
        "mig",
        "limits",
        "libraries",
        "hook-user",
    ];
    assert_eq!(doctor(&checks), []);
    for (missing, check, id) in [
        ("nvidia1", "nodes", "ONH-021"),
        ("nvidia-modeset", "modeset", "ONH-223"),
        ("nvidia-caps/nvidia-cap12", "mig", "ONH-232"),
        ("nvidia-caps", "mig", "ONH-232"),
    ] {
        host.remove(missing);
        let found = doctor(&checks);
        assert_eq!(
            found,
            [(
                check.to_owned(),
                id.to_owned(),
                "oci-nvidia-hook prepare".to_owned()
            )],
            "{missing}"
        );
        host.prepare(&[]).ok();
        assert_eq!(doctor(&checks), [], "{missing}");
    }
}
