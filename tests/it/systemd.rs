//! A real systemd, containers whose scopes it manages, and the units: what happens to GPUs when systemd reloads, and what the units
//! do when the host changes.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use oci_nvidia_hook::testing::cgroup::DeviceAccess;

use crate::booted::Systemd;
use crate::driver::{FakeDriver, Image};
use crate::kernels::{self, Kernel};
use crate::support::{Need, assert_says, read, run, run_with, shell, source, write_file};
use crate::{built, cgroup};

const NEEDS: &[Need] = &[
    Need::Root,
    Need::Programs(&["runc", "cc", "systemd-run", "nsenter"]),
    Need::CgroupV2,
];

const NEEDS_CARGO: &[Need] = &[
    Need::Root,
    Need::Programs(&["cc", "systemd-run", "nsenter"]),
    Need::CgroupV2,
    Need::Build,
];

tests! {
    NEEDS => gpus_survive_a_daemon_reload, other_devices_survive_in_a_scope_without_a_policy,
        a_systemd_that_is_busy_gets_the_devices;
    &[Need::Program("systemd-analyze")] => services_are_confined;
    NEEDS_CARGO => the_device_plugin_as_a_service, claims_as_a_service;
}

/// The exposure of a service as systemd computes it, from 0 to 100, and the directories to which it can write.
fn services_are_confined() {
    for (unit, exposure) in [
        ("oci-nvidia-hook-cdi.service", 30),
        ("oci-nvidia-hook-cdi-recheck.service", 30),
        ("oci-nvidia-mps@.service", 45),
        (PLUGIN_UNIT, 40),
        (SOCKETS_UNIT, 20),
        (NRI_UNIT, 40),
    ] {
        let path = source("packaging/systemd").join(unit);
        let mut analyze = Command::new("systemd-analyze");
        analyze.args(["security", "--offline=yes", "--no-pager"]);
        run(analyze.arg(format!("--threshold={exposure}")).arg(&path)).ok();
        let text = read(&path);
        let mut writable = text
            .lines()
            .filter_map(|line| line.strip_prefix("ReadWritePaths="));
        let is_wide = |path: &str| {
            ["/run", "/etc", "/var", "/tmp", "/"].contains(&path.trim_start_matches('-'))
        };
        let wide = writable.find(|paths| paths.split(' ').any(is_wide));
        assert_eq!(wide, None, "{unit}");
        // The directory of the MPS daemon is in /tmp.
        assert!(!text.contains("\nPrivateTmp="), "{unit}");
    }
}

/// "Failed to initialize NVML: Unknown Error" after a daemon-reload, and how the hook prevents it.
fn gpus_survive_a_daemon_reload() {
    let systemd = Systemd::start();
    let fake = FakeDriver::shared();
    let image = Image::new(systemd.dir.path(), &["--layout", "debian"]);
    let without_telling = Kernel {
        name: "untold",
        errno: "ENOSYS",
        without: "connect",
    };
    // Created like the nodes of the host (`prepare`): runc before 1.1.7 does not pass devices without them to systemd.
    let nodes = "for node in nvidia1:1 nvidiactl:255; do mknod /dev/${node%:*} c 195 ${node#*:}; \
                 ln -s ../${node%:*} /dev/char/195:${node#*:}; done";
    systemd.enter(nodes).ok();
    for (id, kernel, stage, survives) in [
        ("untold", Some(without_telling), "prestart", false),
        ("told", None, "prestart", true),
        ("listed", None, "edit-config", true),
    ] {
        let bundle = systemd.dir.path().join(id);
        std::fs::create_dir(&bundle).unwrap();
        kernels::set(kernel);
        write_bundle(&bundle, &image, id, &fake.config, stage);
        kernels::set(None);
        let bundle = bundle.display();
        let start =
            format!("runc --systemd-cgroup run -d --bundle {bundle} {id} >{bundle}/said 2>&1");
        // A detached container keeps its output open.
        systemd
            .service(&format!("{start} || {{ cat {bundle}/said; false; }}"))
            .ok();
        let opened = || {
            systemd
                .service(&format!("runc exec {id} probe-open /dev/nvidia1 || true"))
                .ok()
        };
        assert_eq!(opened(), "/dev/nvidia1: ENXIO\n", "{id}");
        systemd.enter("systemctl daemon-reload").ok();
        assert_eq!(
            opened() == "/dev/nvidia1: ENXIO\n",
            survives,
            "{id}: {}",
            opened()
        );
        if stage == "edit-config" {
            // The runtime writes its rules again, which include ours.
            systemd
                .service(&format!(
                    "echo \"{{}}\" | runc --systemd-cgroup update --resources - {id}"
                ))
                .ok();
            assert_eq!(opened(), "/dev/nvidia1: ENXIO\n", "{id}");
        }
        let allowed = systemd
            .enter(&format!("systemctl show onh-{id}.scope -p DeviceAllow"))
            .ok();
        assert_eq!(
            allowed.contains("/dev/char/195:1 rw"),
            survives,
            "{allowed}"
        );
        assert!(!allowed.contains("195:0 "), "the other GPU: {allowed}");
        systemd.service(&format!("runc delete --force {id}")).ok();
    }
}

/// crun before 1.18 creates a scope without a device policy and attaches its own program. An entry in systemd's empty list makes
/// systemd deny all other devices.
fn other_devices_survive_in_a_scope_without_a_policy() {
    const INSIDE: &str = "ONH_TEST_SCOPE";
    if std::env::var_os(INSIDE).is_some() {
        // Without that systemd: the actions of crun, then the hook.
        cgroup::attach_as_crun("/sys/fs/cgroup/system.slice/onh-plain.scope");
        return;
    }
    let systemd = Systemd::start();
    let scope = "/sys/fs/cgroup/system.slice/onh-plain.scope";
    let nodes = "mknod /dev/other c 240 7; mknod /dev/nvidia0 c 195 0";
    systemd.enter(nodes).ok();
    let start = "systemd-run --quiet --scope --unit=onh-plain.scope --slice=system.slice -p DefaultDependencies=no \
                 -p Delegate=yes sleep 600 >/dev/null 2>&1 & \
                 for n in $(seq 100); do [ -e SCOPE/cgroup.procs ] && exit 0; sleep 0.1; done; exit 1";
    systemd.enter(&start.replace("SCOPE", scope)).ok();
    let opens = |node: &str| {
        let script = format!("sh -c 'echo $$ >{scope}/cgroup.procs; : <>/dev/{node}' 2>&1 || true");
        systemd.enter(&script).ok()
    };
    assert!(
        opens("other").contains("No such device or address"),
        "{}",
        opens("other")
    );
    let test = std::env::current_exe().unwrap();
    let inside = format!(
        "{INSIDE}=1 CI=true {} --exact systemd::other_devices_survive_in_a_scope_without_a_policy --nocapture",
        test.display()
    );
    systemd.enter(&inside).ok();
    for when in ["after the hook", "after a daemon-reload"] {
        for node in ["other", "nvidia0"] {
            assert!(
                opens(node).contains("No such device or address"),
                "{when}: {node}: {}",
                opens(node)
            );
        }
        let shown = systemd
            .enter("systemctl show onh-plain.scope -p DevicePolicy -p DeviceAllow")
            .ok();
        assert_eq!(shown.trim(), "DevicePolicy=auto", "{when}");
        systemd.enter("systemctl daemon-reload").ok();
    }
    // The state before the fix: the list is not empty.
    systemd
        .enter("systemctl set-property --runtime onh-plain.scope 'DeviceAllow=/dev/nvidia0 rw'")
        .ok();
    assert!(
        opens("other").contains("not permitted"),
        "{}",
        opens("other")
    );
}

/// While systemd reloads, it replies to nothing. The hook waits, because the next reload would remove devices that systemd does not
/// know.
fn a_systemd_that_is_busy_gets_the_devices() {
    const INSIDE: &str = "ONH_TEST_BUSY";
    let scope = "/sys/fs/cgroup/system.slice/onh-busy.scope";
    if std::env::var_os(INSIDE).is_some() {
        return cgroup::allow_in_scope(scope, DeviceAccess::Present);
    }
    let systemd = Systemd::start();
    let start = "systemd-run --quiet --scope --unit=onh-busy.scope --slice=system.slice -p DefaultDependencies=no \
                 -p Delegate=yes -p DevicePolicy=strict -p 'DeviceAllow=/dev/null rw' sleep 600 >/dev/null 2>&1 & \
                 for n in $(seq 100); do grep -qs . SCOPE/cgroup.procs && exit 0; sleep 0.1; done; exit 1";
    systemd.enter(&start.replace("SCOPE", scope)).ok();
    // Longer than the hook waits for a single reply.
    systemd.pause(6);
    let test = std::env::current_exe().unwrap();
    let inside = format!(
        "{INSIDE}=1 CI=true {} --exact systemd::a_systemd_that_is_busy_gets_the_devices --nocapture",
        test.display()
    );
    systemd.enter(&inside).ok();
    let allowed = systemd
        .enter("systemctl show onh-busy.scope -p DeviceAllow")
        .ok();
    assert!(allowed.contains("/dev/char/195:0 rw"), "{allowed}");
}

/// The output of `runc spec`, in a scope that systemd manages, with the hook.
fn write_bundle(bundle: &Path, image: &Image, id: &str, config: &Path, stage: &str) {
    shell!("cd '{}' && runc spec", bundle.display());
    let path = bundle.join("config.json");
    let mut spec: serde_json::Value =
        serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    spec["root"] = serde_json::json!({"path": image.rootfs});
    spec["process"]["terminal"] = false.into();
    spec["process"]["args"] = serde_json::json!(["sleep", "600"]);
    spec["process"]["env"] = serde_json::json!(["PATH=/usr/bin:/bin", "NVIDIA_VISIBLE_DEVICES=1"]);
    spec["process"].as_object_mut().unwrap().remove("rlimits");
    spec["linux"]["cgroupsPath"] = format!("system.slice:onh:{id}").into();
    if stage == "edit-config" {
        let mut hook = kernels::hook_command();
        let hook = hook
            .arg("--config")
            .arg(config)
            .arg(stage)
            .current_dir(bundle)
            .env_clear();
        write_file(path, run_with(hook, spec.to_string().as_bytes()).ok());
        return;
    }
    let mut words = kernels::hook();
    let program = words[0].clone();
    words.extend([
        "--config".to_owned(),
        config.display().to_string(),
        stage.to_owned(),
    ]);
    let hook = serde_json::json!({"path": program, "args": words, "env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"]});
    spec["hooks"] = serde_json::json!({stage: [hook]});
    write_file(path, spec.to_string());
}

/// The kubelet of the device plugin's tests as a service. It takes commands from a FIFO and writes its events to a file.
struct Kubelet<'a> {
    systemd: &'a Systemd,
    commands: std::fs::File,
    /// The number of lines that [`Kubelet::wait`] has passed
    seen: usize,
}

impl<'a> Kubelet<'a> {
    fn start(systemd: &'a Systemd, options: &str) -> Self {
        let program = built::programs().join("examples/fake-kubelet");
        let dir = systemd.dir.path().display();
        systemd
            .enter(&format!(
                "mkdir -p /var/lib/kubelet; cp '{}' /usr/bin/fake-kubelet",
                program.display()
            ))
            .ok();
        shell!("mkfifo '{dir}/commands'");
        let run =
            format!("fake-kubelet /var/lib/kubelet {options} <'{dir}/commands' >'{dir}/events'");
        systemd
            .enter(&format!(
                "systemd-run --quiet -p DefaultDependencies=no --unit kubelet sh -c \"{run}\""
            ))
            .ok();
        let commands = std::fs::OpenOptions::new()
            .write(true)
            .open(systemd.dir.path().join("commands"))
            .unwrap();
        Self {
            systemd,
            commands,
            seen: 0,
        }
    }

    fn send(&mut self, command: &str) {
        writeln!(self.commands, "{command}").unwrap();
    }

    /// Waits for a line with this beginning, after those that earlier calls have found.
    #[track_caller]
    fn wait(&mut self, beginning: &str) -> String {
        let start = Instant::now();
        loop {
            let events =
                std::fs::read_to_string(self.systemd.dir.path().join("events")).unwrap_or_default();
            let found = events
                .lines()
                .enumerate()
                .skip(self.seen)
                .find(|(_, line)| line.starts_with(beginning));
            if let Some((at, line)) = found {
                self.seen = at + 1;
                return line.to_owned();
            }
            let log = || read(self.systemd.dir.path().join("plugin"));
            assert!(
                start.elapsed() < Duration::from_secs(60),
                "{beginning}: {events}{}",
                log()
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// The directory of Node Feature Discovery.
const FEATURES: &str = "/etc/kubernetes/node-feature-discovery/features.d";

/// The unit as packages install it, with its restrictions.
const PLUGIN_UNIT: &str = "oci-nvidia-kubelet-plugin.service";
const NRI_UNIT: &str = "oci-nvidia-nri.service";
/// It removes the sockets if the plugin stops for good.
const SOCKETS_UNIT: &str = "oci-nvidia-kubelet-plugin-sockets.service";

/// Installs the units and the programs as packages do, with these lines of configuration for the plugin, and returns the directory of the
/// sources. The network is this machine's.
fn install_units(systemd: &Systemd, fake: &FakeDriver, config: &str, metrics: &str) -> PathBuf {
    let programs = built::programs();
    let (unit, nri) = (PLUGIN_UNIT, NRI_UNIT);
    // Only the directories of the tests are visible in the namespaces.
    let shared = systemd.dir.path().join("install");
    std::fs::create_dir(&shared).unwrap();
    // The service sees neither /root nor /tmp, so everything is copied to where a host has it.
    let install = format!(
        "cp '{programs}/oci-nvidia-kubelet-plugin' '{programs}/oci-nvidia-hook' '{programs}/oci-nvidia-nvml' /usr/bin; cp '{install}'/*.service /run/systemd/system\n\
         mkdir -p /opt/driver /etc/nvidia-container-runtime /run/systemd/system/{unit}.d /run/systemd/system/{nri}.d\n\
         cp -a '{root}/.' /opt/driver\n\
         rm /opt/driver/dev/nvidia1\n\
         printf '[nvidia-container-cli]\\nroot = \"/opt/driver\"\\n[kubelet-plugin]\\n{config}\\n' \\\n\
         >/etc/nvidia-container-runtime/config.toml\n\
         printf '[Unit]\\nDefaultDependencies=no\\n[Service]\\nStandardError=append:{log}\\nEnvironment=METRICS_ADDRESS={metrics}\\n' \\\n\
         >/run/systemd/system/{unit}.d/test.conf\n\
         cp /run/systemd/system/{unit}.d/test.conf /run/systemd/system/{nri}.d\n\
         mkdir -p /run/systemd/system/{SOCKETS_UNIT}.d\n\
         printf '[Unit]\\nDefaultDependencies=no\\n' >/run/systemd/system/{SOCKETS_UNIT}.d/test.conf\n\
         systemctl daemon-reload",
        programs = programs.display(),
        install = shared.display(),
        root = fake.root.display(),
        log = systemd.dir.path().join("plugin").display()
    );
    for unit in [unit, nri, SOCKETS_UNIT] {
        std::fs::copy(source("packaging/systemd").join(unit), shared.join(unit)).unwrap();
    }
    write_file(shared.join("script"), install);
    systemd
        .enter(&format!("sh -eu '{}'", shared.join("script").display()))
        .ok();
    shared
}

fn the_device_plugin_as_a_service() {
    let systemd = Systemd::start();
    let fake = FakeDriver::new(&["--gpus", "2"]);
    let (unit, nri) = (PLUGIN_UNIT, NRI_UNIT);
    let shared = install_units(
        &systemd,
        &fake,
        "device-list-strategy = [\"envvar\"]",
        "127.0.0.1:2112",
    );
    std::fs::copy(
        source("tests/fake-driver/make-root"),
        shared.join("make-root"),
    )
    .unwrap();
    write_file(
        shared.join("layout"),
        "mig gpu=0 gi=1 ci=0 profile=1g.10gb uuid=MIG-new\n",
    );

    // The unit is ready without a kubelet. It creates the directory for the labels, and the device node that is missing after a boot.
    systemd.enter(&format!("systemctl start {unit}")).ok();
    let mut kubelet = Kubelet::start(&systemd, "");
    kubelet.wait("registered nvidia.com/gpu oci-nvidia-gpu.sock");
    let healthy = |kubelet: &mut Kubelet<'_>, count| loop {
        let list = kubelet.wait("list nvidia.com/gpu");
        if list.matches("=Healthy").count() == count {
            return list;
        }
    };
    let list = healthy(&mut kubelet, 2);
    let first = list
        .split([' ', '='])
        .find(|word| word.starts_with("GPU-"))
        .unwrap()
        .to_owned();
    kubelet.send(&format!("allocate nvidia.com/gpu {first}"));
    assert!(kubelet.wait("allocated").contains("/dev/nvidiactl"));
    systemd
        .enter(&format!(
            "grep -q nvidia.com/gpu.count=2 {FEATURES}/oci-nvidia-kubelet-plugin"
        ))
        .ok();
    let scrape =
        r"exec 3<>/dev/tcp/127.0.0.1/2112; printf 'GET /metrics HTTP/1.0\r\n\r\n' >&3; cat <&3";
    let metrics = systemd.enter(&format!("bash -c \"{scrape}\"")).ok();
    assert_says(
        &metrics,
        &["onh_registration_timestamp_seconds{resource_name=\"nvidia.com/gpu\"}"],
    );

    let status = |field: &str| {
        let pid = systemd
            .enter(&format!("systemctl show --value -p MainPID {unit}"))
            .ok();
        systemd
            .enter(&format!(
                "sed -n 's/^{field}:[^0-9a-f]*//p' /proc/{}/status",
                pid.trim()
            ))
            .ok()
            .trim()
            .to_owned()
    };
    // CAP_SETGID, CAP_SETUID, CAP_SETPCAP and CAP_SYS_CHROOT
    assert_eq!(
        (status("CapBnd"), status("NoNewPrivs")),
        ("00000000000401c0".to_owned(), "1".to_owned())
    );

    systemd
        .enter(&format!("systemctl kill -s USR1 --kill-who=main {unit}"))
        .ok();
    healthy(&mut kubelet, 0);
    systemd
        .enter(&format!("systemctl kill -s USR2 --kill-who=main {unit}"))
        .ok();
    healthy(&mut kubelet, 2);

    // Both restart.
    kubelet.send("start");
    kubelet.wait("registered nvidia.com/gpu");
    systemd.enter(&format!("systemctl restart {unit}")).ok();
    kubelet.wait("registered nvidia.com/gpu");

    let install = shared.display();
    systemd
        .enter(&format!(
            "'{install}/make-root' /opt/driver --mig-layout '{install}/layout'"
        ))
        .ok();
    kubelet.wait("list nvidia.com/mig-1g.10gb MIG-new");

    systemd.enter(&format!("systemctl stop {unit}")).ok();
    kubelet.wait("ended nvidia.com/gpu");
    let left = systemd.enter("ls /var/lib/kubelet/device-plugins").ok();
    assert_eq!(left, "kubelet.sock\n");
    assert_eq!(systemd.enter(&format!("ls {FEATURES}")).ok(), "");
    let ended = systemd
        .enter(&format!("systemctl show --value -p Result {unit}"))
        .ok();
    assert_eq!(ended, "success\n");

    // The plugin of engines keeps its CDI spec, and waits for an engine.
    systemd.enter(&format!("systemctl start {nri}")).ok();
    let spec = "/var/run/cdi/k8s.device-plugin.nvidia.com-gpu.json";
    let appears = format!(
        "sh -c 'for n in $(seq 300); do grep -q MIG-new {spec} && exit 0; sleep 0.1; done; exit 1'"
    );
    systemd.enter(&appears).ok();
    let log = read(systemd.dir.path().join("plugin"));
    assert_says(&log, &["cannot serve NRI on \"/var/run/nri/nri.sock\""]);
    systemd.enter(&format!("systemctl stop {nri}")).ok();
    let ended = systemd
        .enter(&format!("systemctl show --value -p Result {nri}"))
        .ok();
    assert_eq!(ended, "success\n");
}

/// The restrictions of the unit permit the sockets for claims, the kubelet's credentials where kubeadm has them, and new certificates.
fn claims_as_a_service() {
    let systemd = Systemd::start();
    let fake = FakeDriver::new(&["--gpus", "2"]);
    install_units(&systemd, &fake, "interface = \"dra\"", "127.0.0.1:21130");
    let mut cluster = Kubelet::start(&systemd, "--claims");
    cluster.wait("ready");
    systemd
        .enter("mkdir -p /etc/kubernetes; mv /var/lib/kubelet/kubelet.conf /etc/kubernetes; chmod 600 /etc/kubernetes/*")
        .ok();
    systemd
        .enter(&format!(
            "systemctl start {PLUGIN_UNIT}; systemctl status {SOCKETS_UNIT}"
        ))
        .ok();
    cluster.wait("drivers gpu.nvidia.com 1");
    cluster.wait("published gpu-0=Free gpu-1=Free");
    let spec = "/var/run/cdi/k8s.gpu.nvidia.com-gpu.json";
    let prepares = |cluster: &mut Kubelet<'_>| {
        cluster.send("prepare gpu.nvidia.com train u-1");
        let answer = cluster.wait("prepared ");
        let uuid = answer
            .strip_prefix("prepared k8s.gpu.nvidia.com/gpu=")
            .unwrap_or_else(|| panic!("{answer}"));
        systemd.enter(&format!("grep -q {uuid} {spec}")).ok();
    };
    cluster.send("claim train u-1 gpu-1");
    prepares(&mut cluster);
    let sockets = "/var/lib/kubelet/plugins_registry/gpu.nvidia.com-reg.sock /var/lib/kubelet/plugins/gpu.nvidia.com/dra.sock";
    assert_eq!(
        systemd.enter(&format!("stat -c %F:%a {sockets}")).ok(),
        "socket:600\nsocket:600\n"
    );
    // The kubelet replaces its certificate.
    cluster.send("rotate 2");
    cluster.wait("ok");
    prepares(&mut cluster);
    cluster.wait("serial [2]");
    let diagnosis = systemd
        .enter("oci-nvidia-hook doctor --all kubelet || true")
        .ok();
    assert_says(&diagnosis, &["the driver \"gpu.nvidia.com\" serves claims"]);

    systemd
        .enter(&format!(
            "systemctl kill -s USR1 --kill-who=main {PLUGIN_UNIT}"
        ))
        .ok();
    cluster.wait("published gpu-0=Tainted gpu-1=Tainted");
    systemd
        .enter(&format!(
            "systemctl kill -s USR2 --kill-who=main {PLUGIN_UNIT}"
        ))
        .ok();
    cluster.wait("published gpu-0=Free gpu-1=Free");
    // Both restart.
    cluster.send("start");
    cluster.wait("drivers gpu.nvidia.com 2");
    // The kubelet has deleted the slices.
    cluster.send("published");
    cluster.wait("published gpu-0=Free gpu-1=Free");
    // A restart, and a crash: the kubelet keeps the sockets, and its calls wait.
    let inodes = format!("stat -c %i {sockets}");
    let before = systemd.enter(&inodes).ok();
    systemd
        .enter(&format!("systemctl restart {PLUGIN_UNIT}; test -e {spec}"))
        .ok();
    prepares(&mut cluster);
    systemd
        .enter(&format!(
            "systemctl kill -s KILL --kill-who=main {PLUGIN_UNIT}; \
             for n in $(seq 100); do systemctl show -p SubState {PLUGIN_UNIT} | grep -q auto-restart && exit; sleep 0.1; done; exit 1"
        ))
        .ok();
    prepares(&mut cluster);
    cluster.send("unprepare gpu.nvidia.com train u-1");
    cluster.wait("unprepared");
    assert_eq!(systemd.enter(&inodes).ok(), before);
    let events = read(systemd.dir.path().join("events"));
    assert!(!events.contains("drivers gpu.nvidia.com 3"), "{events}");
    let check = systemd
        .enter("oci-nvidia-kubelet-plugin check --interface dra || true")
        .ok();
    assert!(!check.contains("has not registered"), "{check}");

    systemd.enter(&format!("systemctl stop {PLUGIN_UNIT}")).ok();
    // The other unit stops after that.
    let are_gone = format!(
        "for n in $(seq 100); do [ -n \"$(ls {sockets} 2>/dev/null)\" ] || exit 0; sleep 0.1; done; \
         systemctl status {SOCKETS_UNIT}; exit 1"
    );
    systemd.enter(&are_gone).ok();
    let ended = systemd
        .enter(&format!("systemctl show --value -p Result {PLUGIN_UNIT}"))
        .ok();
    assert_eq!(ended, "success\n");
}
