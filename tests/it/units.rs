//! The units of the installed packages, with a real systemd: an installation enables and starts them, an upgrade restarts them, and a
//! removal stops and disables them. What the administrator has disabled stays disabled.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::booted::Systemd;
use crate::deb;
use crate::driver::{FakeDriver, Image};
use crate::engine::{CONTAINERS_CONF, OPTIONS};
use crate::rpm::{self, Packages};
use crate::support::{Need, Ran, run, shell, source, write_file};

const DEB: &[Need] = &[
    Need::Root,
    Need::Programs(&[
        "dpkg-buildpackage",
        "dh",
        "cc",
        "podman",
        "runc",
        "setpriv",
        "newuidmap",
        "systemd-run",
        "nsenter",
    ]),
    Need::CgroupV2,
];

const RPM: &[Need] = &[
    Need::Root,
    Need::Programs(&["rpmbuild", "cc", "strip", "systemd-run", "nsenter"]),
    Need::CgroupV2,
];

tests! {
    DEB => debian_packages;
    RPM => rpm_packages;
}

const UNITS: [&str; 4] = [
    "oci-nvidia-hook-cdi.path",
    "oci-nvidia-hook-cdi.service",
    "oci-nvidia-kubelet-plugin.service",
    "oci-nvidia-nri.service",
];
const STARTED_BY_UNITS: [&str; 1] = ["oci-nvidia-kubelet-plugin-sockets.service"];
const MPS: [&str; 2] = [
    "oci-nvidia-mps.service",
    "oci-nvidia-mps@GPU-51eed000-0000-4000-8000-0000fa4e0000.service",
];
const DROP_INS: &str = "/etc/nvidia-container-runtime/config.toml.d";
const NAMES: &str = "oci-nvidia-hook oci-nvidia-kubelet-plugin";

/// A host with systemd and without a GPU. `/opt/driver` contains a driver, which no configuration names.
struct Host {
    systemd: Systemd,
}

impl Host {
    fn new() -> Self {
        let (systemd, fake) = (
            Systemd::start(),
            FakeDriver::new(&["--gpus", "2", "--dev-mode", "0666"]),
        );
        // Images of containers contain a file that keeps maintainer scripts from starting services.
        systemd.enter("rm -f /usr/sbin/policy-rc.d").ok();
        let log = systemd.dir.path().join("units");
        for unit in UNITS.into_iter().chain(STARTED_BY_UNITS).chain(MPS) {
            // The other units of a boot need a machine.
            let drop_in = "[Unit]\\nDefaultDependencies=no\\n[Service]\\nStandardOutput=append:LOG\\nStandardError=append:LOG\\n";
            let drop_in = drop_in.replace("LOG", log.to_str().unwrap());
            let dir = format!("/run/systemd/system/{unit}.d");
            systemd
                .enter(&format!(
                    "mkdir -p {dir}; printf '{drop_in}' >{dir}/test.conf"
                ))
                .ok();
        }
        systemd
            .enter(&format!("cp -a '{}' /opt/driver", fake.root.display()))
            .ok();
        Self { systemd }
    }

    #[track_caller]
    fn run(&self, script: &str) -> String {
        self.systemd.enter(script).ok()
    }

    /// Returns for each unit whether it is enabled, whether it is active, and its process.
    fn units(&self) -> Vec<Unit> {
        let show = |unit: &&str| {
            // For a unit that does not exist, systemd 257 prints "not-found", and earlier versions print nothing.
            let enabled = self
                .systemd
                .enter(&format!("systemctl is-enabled {unit}"))
                .stdout
                .replace("not-found", "");
            let enabled = enabled.trim();
            let active = self
                .systemd
                .enter(&format!("systemctl is-active {unit}"))
                .stdout
                .trim()
                .to_owned();
            let pid = self
                .systemd
                .enter(&format!("systemctl show --value -p MainPID {unit}"))
                .stdout
                .trim()
                .to_owned();
            Unit {
                state: format!("{enabled} {active}").trim().to_owned(),
                pid,
            }
        };
        UNITS.iter().map(show).collect()
    }

    /// Compares the states of the units, in the order of [`UNITS`], and returns the processes of the last two.
    #[track_caller]
    fn are(&self, states: [&str; 4], when: &str) -> [String; 2] {
        let units = self.units();
        let found: Vec<_> = units.iter().map(|unit| unit.state.as_str()).collect();
        assert_eq!(found, states, "{when}: {}", self.log());
        [units[2].pid.clone(), units[3].pid.clone()]
    }

    /// Loads the driver, as far as the programs can see.
    fn load(&self) {
        let text = "[nvidia-container-cli]\\nroot = \"/opt/driver\"\\n";
        self.run(&format!(
            "mkdir -p {DROP_INS}; printf '{text}' >{DROP_INS}/root.toml"
        ));
    }

    fn unload(&self) {
        self.run(&format!("rm {DROP_INS}/root.toml"));
        write_file(self.systemd.dir.path().join("units"), "");
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.systemd.dir.path().join("units")).unwrap_or_default()
    }

    /// Returns links to the units, files and directories of the programs, and their processes.
    fn left(&self) -> String {
        // The unit of the sockets stops after the plugin.
        self.run(
            "for n in $(seq 50); do [ -e /run/oci-nvidia-kubelet-plugin-sockets ] || break; sleep 0.1; done; \
             find /etc/systemd/system -name 'oci-nvidia*'; find /run/cdi -type f; pgrep -l '^oci-nvidia' || true; \
             ls -d /run/oci-nvidia* /var/lib/kubelet /etc/kubernetes 2>/dev/null || true",
        )
    }
}

struct Unit {
    state: String,
    pid: String,
}

/// The states after an installation.
const INSTALLED: [&str; 4] = [
    "enabled active",
    "enabled inactive",
    "enabled active",
    "disabled inactive",
];
/// The states after a removal.
const REMOVED: [&str; 4] = ["inactive"; 4];

/// What a package manager does with the packages: commands for a shell.
struct Manager {
    install: String,
    upgrade: String,
    /// An upgrade to the first release
    downgrade: String,
    remove: String,
    /// Removes the settings that a removal keeps
    purge: String,
}

fn debian_packages() {
    let host = Host::new();
    let now = deb_packages(deb::packages());
    let later: Vec<_> = now
        .iter()
        .map(|package| next_release(package, host.systemd.dir.path()))
        .collect();
    let dpkg = |arguments: &str, packages: &[PathBuf]| {
        let quiet = "</dev/null >/tmp/dpkg 2>&1 || { cat /tmp/dpkg >&2; exit 1; }";
        format!(
            "export DEBIAN_FRONTEND=noninteractive; dpkg --no-triggers {arguments}{} {quiet}",
            words(packages)
        )
    };
    let manager = Manager {
        install: dpkg("-i", &now),
        upgrade: dpkg("-i", &later),
        downgrade: dpkg("-i", &now),
        remove: dpkg(&format!("-r {NAMES}"), &[]),
        purge: dpkg(&format!("-P {NAMES}"), &[]),
    };
    follow(&host, &manager);

    // The names of CDI devices are there as soon as the package is installed.
    let podman = Podman::new(&host);
    assert_ne!(podman.all_gpus("root").code, Some(0));
    host.run(&manager.install);
    for name in ["root", "tux"] {
        let gpus = podman.all_gpus(name);
        assert_eq!(
            gpus.stdout.matches("UUID: GPU-").count(),
            2,
            "{name}: {gpus:?}"
        );
    }
    // A unit that the administrator has disabled stays disabled if the package is removed and installed again.
    host.run(&format!("systemctl disable --now {}", UNITS[0]));
    host.run(&manager.remove);
    host.run(&manager.install);
    host.are(
        [
            "disabled inactive",
            INSTALLED[1],
            INSTALLED[2],
            INSTALLED[3],
        ],
        "installed again",
    );

    host.run(&dpkg(&format!("-P {NAMES}"), &[]));
    host.are(REMOVED, "purged");
    let gpus = podman.all_gpus("root");
    assert!(
        gpus.code != Some(0) && gpus.stderr.contains("unresolvable CDI devices"),
        "{gpus:?}"
    );
    assert_eq!(
        host.run("find /etc/systemd/system /var/lib/systemd -name '*oci-nvidia*'"),
        ""
    );
}

/// Podman on the host, for root and for the user tux.
struct Podman<'a> {
    host: &'a Host,
}

impl<'a> Podman<'a> {
    fn new(host: &'a Host) -> Self {
        let dir = host.systemd.dir.path();
        let image = Image::new(dir, &["--layout", "debian"]);
        // A user's runtime mounts nodes of the host: the nodes that each host has, and the driver's nodes.
        host.run(&format!(
            "mkdir -p /dev/shm; mount -t tmpfs -o mode=1777 shm /dev/shm; cp -a /opt/driver/dev/nvidia* /dev\n\
             mknod -m 666 /dev/random c 1 8; mknod -m 666 /dev/full c 1 7; mknod -m 666 /dev/tty c 5 0\n\
             useradd --create-home --home-dir /var/tux tux\n\
             grep -q ^tux: /etc/subuid || usermod --add-subuids 900000-965535 --add-subgids 900000-965535 tux\n\
             install -d -o tux -m 700 /run/tux; install -d -m 700 /run/root; install -d /var/root\n\
             tar -C '{}' -cf /tmp/image.tar .; cat >/tmp/containers.conf <<'END'\n{CONTAINERS_CONF}END\n\
             chmod 644 /tmp/image.tar /tmp/containers.conf",
            image.rootfs.display()
        ));
        let podman = Self { host };
        for user in ["root", "tux"] {
            podman
                .run(user, "import --quiet /tmp/image.tar localhost/small")
                .ok();
        }
        podman
    }

    fn run(&self, user: &str, arguments: &str) -> Ran {
        let options = OPTIONS.join(" ");
        // In a user namespace, the kernel mounts /proc only if nothing covers parts of another one.
        self.host.systemd.enter(&format!(
            "exec unshare --mount sh -euc 'mount -t proc proc /proc; cd /; exec setpriv --reuid {user} --regid {user} --init-groups \
             env -i PATH=$PATH HOME=/var/{user} XDG_RUNTIME_DIR=/run/{user} CONTAINERS_CONF=/tmp/containers.conf podman \
             --root /var/{user}/storage --runroot /run/{user}/run --tmpdir /run/{user}/tmp --storage-driver vfs {options} {arguments}'"
        ))
    }

    /// Runs nvidia-smi in a container with all GPUs.
    fn all_gpus(&self, user: &str) -> Ran {
        // The container writes its output to a file, because Podman can lose the output of a short container.
        let out = format!("/run/{user}/out");
        self.host
            .run(&format!("rm -rf {out}; install -d -m 777 {out}"));
        let arguments = format!(
            "run --rm --network=none --log-driver=none -v {out}:/out --device nvidia.com/gpu=all localhost/small \
             sh -c \"nvidia-smi -L >/out/gpus\""
        );
        let ran = self.run(user, &arguments);
        let stdout = self.host.systemd.enter(&format!("cat {out}/gpus")).stdout;
        Ran { stdout, ..ran }
    }
}

fn deb_packages(dir: &Path) -> Vec<PathBuf> {
    let list = shell!(
        "ls '{0}'/oci-nvidia-hook_*.deb '{0}'/oci-nvidia-kubelet-plugin_*.deb",
        dir.display()
    );
    list.lines().map(PathBuf::from).collect()
}

/// Builds the same package with a higher version.
fn next_release(package: &Path, dir: &Path) -> PathBuf {
    let tree = dir.join("tree");
    let to = dir
        .join(package.file_name().unwrap())
        .with_extension("later.deb");
    let script = "rm -rf \"$2\"; dpkg-deb -R \"$1\" \"$2\"; sed -i 's/^Version: .*/&.1/' \"$2/DEBIAN/control\"; \
                  dpkg-deb -Znone --root-owner-group -b \"$2\" \"$3\"";
    run(Command::new("sh")
        .args(["-euc", script, "sh"])
        .args([package, &tree, &to]))
    .ok();
    to
}

fn words(packages: &[PathBuf]) -> String {
    packages
        .iter()
        .map(|package| format!(" '{}'", package.display()))
        .collect()
}

/// The scripts for distributions whose macros are not known, which rpm runs, and then those with openSUSE's macros.
fn rpm_packages() {
    let host = Host::new();
    let packages = Packages::shared();
    let only = |packages: &[PathBuf]| -> Vec<PathBuf> {
        let is_one = |package: &&PathBuf| {
            NAMES
                .split(' ')
                .any(|name| rpm::query(package, "%{NAME}") == name)
        };
        packages.iter().filter(is_one).cloned().collect()
    };
    let (now, later) = (only(&packages.now), only(&packages.later));
    let rpm = |arguments: &str, packages: &[PathBuf]| {
        // Debian's rpm advises against its use.
        let quiet =
            ">/tmp/rpm 2>&1 && ! grep -v '^rpm: ' /tmp/rpm >&2 || { cat /tmp/rpm >&2; exit 1; }";
        format!(
            "mkdir -p /var/lib/rpm; rpm --dbpath /var/lib/rpm --nodeps {arguments}{} {quiet}",
            words(packages)
        )
    };
    let plain = Manager {
        install: rpm("-i", &now),
        upgrade: rpm("-U", &later),
        downgrade: rpm("-U --oldpackage", &now),
        remove: rpm(&format!("-e {NAMES}"), &[]),
        purge: ":".to_owned(),
    };
    follow(&host, &plain);

    // In the order of rpm: an upgrade runs the first two scripts of the new packages, then the last two of the old ones.
    host.unload();
    host.run(&format!("mkdir /tmp/suse; {}", suse_scripts()));
    let scripts = |tags: &[&str], count: u8| -> String {
        let run = |tag: &&str| {
            let each = NAMES
                .split(' ')
                .map(|name| format!("sh -e /tmp/suse/{name}.{tag} {count} >>/tmp/said 2>&1\n"));
            each.collect::<String>()
        };
        tags.iter().map(run).collect()
    };
    let trigger = "/usr/lib/systemd/systemd-update-helper system-reload-restart";
    let replace = |packages: &[PathBuf]| {
        let unpack = rpm("-U --oldpackage --noscripts", packages);
        format!(
            "{}{unpack}\n{}{trigger}",
            scripts(&["pre"], 2),
            scripts(&["post"], 2) + &scripts(&["preun", "postun"], 1)
        )
    };
    let suse = Manager {
        install: format!(
            "{}{}\n{}{trigger}",
            scripts(&["pre"], 1),
            rpm("-i --noscripts", &now),
            scripts(&["post"], 1)
        ),
        upgrade: replace(&later),
        downgrade: replace(&now),
        remove: format!(
            "{}{}\n{}{trigger}",
            scripts(&["preun"], 0),
            rpm(&format!("-e --noscripts {NAMES}"), &[]),
            scripts(&["postun"], 0)
        ),
        purge: ":".to_owned(),
    };
    follow(&host, &suse);
    assert_eq!(host.run("cat /tmp/said"), "", "the scripts print nothing");
}

/// Returns commands that write the scripts of the spec, as openSUSE's macros define them, and a replacement for the program that these
/// macros call.
fn suse_scripts() -> String {
    let format = "#%{NAME}.pre\n%{PREIN}\n#%{NAME}.post\n%{POSTIN}\n#%{NAME}.preun\n%{PREUN}\n#%{NAME}.postun\n%{POSTUN}\n";
    let mut rpmspec = Command::new("rpmspec");
    rpmspec
        .arg("--load")
        .arg(source("tests/fixtures/rpm/macros.suse"))
        .args(["--define", "test_cargo cargo"]);
    let text = run(rpmspec
        .args(["-q", "--qf", format])
        .arg(source("packaging/rpm.spec")))
    .ok();
    let helper = "case $1 in\n\
        mark-install-system-units) shift; for unit; do\n\
          test -e /usr/lib/systemd/system/$unit || touch /run/is-new-$unit\n\
        done ;;\n\
        install-system-units) shift; for unit; do\n\
          test ! -e /run/is-new-$unit || systemctl --no-reload preset $unit; rm -f /run/is-new-$unit\n\
        done ;;\n\
        remove-system-units) shift; systemctl --no-reload disable --now \"$@\" ;;\n\
        mark-restart-system-units) shift; for unit; do systemctl set-property $unit Markers=+needs-restart; done ;;\n\
        system-reload-restart) systemctl daemon-reload; systemctl reload-or-restart --marked ;;\n\
        *) exit 3 ;;\n\
        esac 2>/dev/null\n";
    let file = "/usr/lib/systemd/systemd-update-helper";
    format!(
        "cat >{file} <<'END'\n#!/bin/sh\n{helper}END\nchmod 755 {file}\n\
         awk '/^#oci-nvidia[-a-z]*[.][a-z]*$/ {{ file = \"/tmp/suse/\" substr($0, 2); next }} {{ print >file }}' <<'END'\n{text}END\n"
    )
}

/// Installs, upgrades and removes.
fn follow(host: &Host, manager: &Manager) {
    let Manager {
        install,
        upgrade,
        downgrade,
        remove,
        purge,
    } = manager;
    // A host without a GPU
    host.run(install);
    host.are(INSTALLED, "installed");
    assert_eq!(host.run("ls /run/cdi 2>/dev/null || true"), "");
    let said = host.log();
    assert!(
        said.lines()
            .all(|line| line.starts_with("oci-nvidia-kubelet-plugin: ")),
        "{said}"
    );
    // The driver is loaded, and udev starts the unit.
    host.load();
    host.run(&format!("systemctl start {}", UNITS[1]));
    assert_eq!(host.run(SPEC), READABLE);
    host.run(remove);
    host.are(REMOVED, "removed");
    assert_eq!(host.left(), "");

    // The spec exists when the installation returns.
    host.run(install);
    assert_eq!(host.run(SPEC), READABLE);
    let [plugin, _] = host.are(INSTALLED, "installed again");
    host.run(&format!("rm {SPEC_FILE}; {upgrade}"));
    assert_eq!(host.run(SPEC), READABLE);
    let [after, _] = host.are(INSTALLED, "upgraded");
    assert_ne!(plugin, after, "the upgrade restarts the plugin");

    // The administrator's choice stays.
    host.run(&format!(
        "systemctl disable --now {} {}; systemctl enable --now {}",
        UNITS[0], UNITS[2], UNITS[3]
    ));
    let chosen = [
        "disabled inactive",
        "enabled inactive",
        "disabled inactive",
        "enabled active",
    ];
    let [_, nri] = host.are(chosen, "chosen");
    host.run(downgrade);
    let [_, after] = host.are(chosen, "the choice after another upgrade");
    assert_ne!(nri, after, "the upgrade restarts the plugin of engines");
    host.run(&format!("systemctl enable --now {} {}", UNITS[0], UNITS[2]));
    // What is enabled, but stopped, does not start before the next boot.
    host.run(&format!("systemctl stop {} {}", UNITS[0], UNITS[2]));
    let stopped = [
        "enabled inactive",
        "enabled inactive",
        "enabled inactive",
        "enabled active",
    ];
    host.are(stopped, "stopped");
    host.run(&format!("rm {SPEC_FILE}; {upgrade}"));
    host.are(stopped, "stopped, and upgraded");
    assert_eq!(host.run(SPEC), READABLE, "the new program writes the spec");

    host.run(remove);
    host.are(REMOVED, "removed again");
    assert_eq!(host.left(), "");

    let others = STARTED_BY_UNITS.into_iter().chain([RECHECK]).chain(MPS);
    for unit in UNITS.into_iter().chain(others) {
        for state in ["failed", "masked"] {
            host.run(install);
            if state == "failed" {
                fails(host, unit);
            } else {
                host.run(&format!("systemctl mask --now '{unit}'"));
            }
            host.run(upgrade);
            host.run(remove);
            if state == "masked" {
                host.run(purge);
            }
            let failed =
                host.run("systemctl list-units --failed --all --plain --no-legend 'oci-nvidia*'");
            assert_eq!(failed, "", "{unit} was {state}");
            assert_eq!(host.left(), "", "{unit} was {state}");
        }
    }
}

/// Lets a unit fail. A unit for paths fails if its service starts too often.
fn fails(host: &Host, unit: &str) {
    if unit.ends_with(".path") {
        return;
    }
    let dir = format!("/run/systemd/system/{unit}.d");
    let start = if STARTED_BY_UNITS.contains(&unit) {
        let starts = UNITS[2];
        format!(
            "systemctl stop {starts}; while systemctl is-active -q {unit}; do sleep 0.1; done; systemctl start {starts}"
        )
    } else {
        format!("! systemctl restart {unit} 2>/dev/null")
    };
    host.run(&format!(
        "mkdir -p {dir}; printf '[Service]\\nExecStartPre=/bin/false\\nRestart=no\\n' >{dir}/fails.conf; systemctl daemon-reload; \
         {start}; systemctl is-failed {unit}; rm {dir}/fails.conf; systemctl daemon-reload"
    ));
}

/// The unit that the unit of the CDI spec starts
const RECHECK: &str = "oci-nvidia-hook-cdi-recheck.service";

const SPEC_FILE: &str = "/run/cdi/nvidia.yaml";
/// Prints whether users can read the spec.
const SPEC: &str = "stat -c '%a %U %n' /run/cdi /run/cdi/nvidia.yaml";
const READABLE: &str = "755 root /run/cdi\n644 root /run/cdi/nvidia.yaml\n";
