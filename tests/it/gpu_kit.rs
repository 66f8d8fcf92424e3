//! `make gpu` rehearsed: the whole command with the fake driver, as a driver root and in `/`. Each check is shown to fail if what it
//! checks is broken.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use serde_json::Value;

use crate::built;
use crate::driver::FakeDriver;
use crate::harness::part;
use crate::support::{Need, OWN_PROCESSES, Ran, read, run, scratch, sh, shell, source, write_file};

const NEEDS: &[Need] = &[
    Need::Root,
    Need::Build,
    Need::Part(part::GPU_KIT),
    Need::StaticLibc,
    Need::Programs(&["cc", "runc", "setpriv", "strace", "strip", "unshare"]),
];

tests! {
    NEEDS => a_driver_in_a_driver_root, a_driver_in_the_root_directory, mig_devices, without_namespaces, a_plain_user,
        the_checks_that_cannot_start, the_compute_mode_is_restored, each_check_can_fail;
}

/// The checks that need what a machine with two GPUs and without MIG devices lacks.
const WITHOUT_MIG: [&str; 1] = ["mig"];

/// Returns the kit with the programs of this build. It is created once.
fn kit() -> &'static Path {
    static CREATED: OnceLock<PathBuf> = OnceLock::new();
    CREATED.get_or_init(|| {
        let kit = Path::new(env!("CARGO_TARGET_TMPDIR")).join("gpu-kit");
        built::static_hook();
        run(Command::new(source("tests/gpu/make-kit"))
            .arg(&kit)
            .arg(built::programs()))
        .ok();
        kit
    })
}

/// Runs a command in a mount namespace with an empty /run.
const RUN_KIT: &str = "mount -t tmpfs run /run; exec \"$@\"";

/// A machine with the fake driver.
struct Machine {
    fake: FakeDriver,
    dir: tempfile::TempDir,
    kit: PathBuf,
}

/// The report of the checks.
struct Report {
    ran: Ran,
    json: Value,
    markdown: String,
}

impl Machine {
    fn new(make_root: &[&str]) -> Self {
        let fake = FakeDriver::new(make_root);
        // The fake CUDA reports faults to the fake NVML with it.
        write_file(fake.library().with_file_name("nvml.events"), "");
        Self {
            fake,
            dir: scratch(),
            kit: kit().to_owned(),
        }
    }

    /// Replaces a program of the kit by a shell script, in which `$real` is the program.
    fn replace(&mut self, program: &str, script: &str) {
        let kit = self.dir.path().join("kit");
        if self.kit != kit {
            shell!("cp -al '{}' '{}'", self.kit.display(), kit.display());
            self.kit = kit;
        }
        let (path, real) = (
            self.kit.join("bin").join(program),
            self.kit.join("bin").join(format!("{program}.real")),
        );
        shell!(
            "mv '{path}' '{real}'; printf '%s\\n' '#!/bin/sh' 'real=\"{real}\"' '{script}' >'{path}'; chmod 755 '{path}'",
            path = path.display(),
            real = real.display()
        );
    }

    /// Runs the checks with the driver root.
    fn run_with_root(&self, options: &[&str]) -> Report {
        let root = self.fake.root.to_str().unwrap();
        self.run(&[], &[&["--root", root], options].concat())
    }

    /// Runs the checks with the driver in `/`.
    fn run_in_root(&self, options: &[&str]) -> Report {
        let as_host = source("tests/fake-driver/as-host");
        self.run(&[&as_host, &self.fake.root], options)
    }

    /// Runs the checks in a mount namespace that has an empty /run: other tests use the directories of the hook.
    fn run(&self, before: &[&Path], options: &[&str]) -> Report {
        let mut command = Command::new("unshare");
        command
            .args(OWN_PROCESSES)
            .args(before)
            .args(["sh", "-euc", RUN_KIT, "sh"])
            .arg(self.kit.join("run"))
            .arg("--report")
            .arg(self.dir.path().join("report"))
            .args(options);
        self.report(run(&mut command))
    }

    /// The same after a shell script in the mount namespace, and with less privileges, which a command takes.
    fn run_with_less(&self, before: &str, command: &str, after: &str) -> Report {
        let script = format!(
            "mount -t tmpfs run /run; {before}\n{command} '{}' --report '{}' --time 60; {after}",
            self.kit.join("run").display(),
            self.dir.path().join("report").display()
        );
        let mut as_host = Command::new(source("tests/fake-driver/as-host"));
        self.report(run(as_host
            .arg(&self.fake.root)
            .args(["sh", "-euc", &script])))
    }

    fn report(&self, ran: Ran) -> Report {
        let read = |name: &str| {
            std::fs::read_to_string(self.dir.path().join("report").join(name))
                .unwrap_or_else(|error| panic!("{name}: {error}: {ran:?}"))
        };
        let (json, markdown) = (
            serde_json::from_str(&read("gpu-report.json")).unwrap(),
            read("gpu-report.md"),
        );
        Report {
            json,
            markdown,
            ran,
        }
    }

    fn file(&self, path: &str) -> PathBuf {
        self.fake.root.join(path)
    }
}

impl Report {
    /// The verdicts and what was seen, by the name of the check.
    fn checks(&self) -> BTreeMap<String, (String, String)> {
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let checks = self.json["checks"].as_array().unwrap().iter();
        checks
            .map(|check| {
                (
                    text(&check["check"]),
                    (text(&check["verdict"]), text(&check["seen"])),
                )
            })
            .collect()
    }

    /// All checks passed, except for those that cannot run.
    #[track_caller]
    fn all_passed_but(&self, cannot_run: &[&str]) {
        for (name, (verdict, seen)) in self.checks() {
            let expected = if cannot_run.contains(&name.as_str()) {
                "cannot run"
            } else {
                "passed"
            };
            assert_eq!(verdict, expected, "{name}: {seen}");
            assert!(!seen.is_empty(), "{name}");
        }
        assert_eq!(self.ran.code, Some(0), "{:?}", self.ran);
    }

    #[track_caller]
    fn seen(&self, check: &str, text: &str) {
        let (_, seen) = &self.checks()[check];
        assert!(seen.contains(text), "{check}: {seen}");
    }
}

fn a_driver_in_a_driver_root() {
    let machine = Machine::new(&["--gpus", "2"]);
    let report = machine.run_with_root(&[]);
    // runc cannot use nodes of a driver root in a user namespace.
    report.all_passed_but(&[&WITHOUT_MIG[..], &["cdi-user-namespace"]].concat());
    assert!(report.checks().len() > 25, "{:?}", report.checks());
    report.seen(
        "smi",
        "-L byte-equal, six fields byte-equal, the table byte-equal",
    );
    report.seen("cuda", "Test PASSED");
    report.seen("xid", "CUDA_ERROR_ILLEGAL_ADDRESS");
    report.seen("claims-xid", "one of 2 devices was tainted");
    report.seen("mps", "52 of 132 multiprocessors and 1830 of 81033 MiB");
    report.seen(
        "info",
        &format!("driver root {}", machine.fake.root.display()),
    );
    let hostname = sh("cat /proc/sys/kernel/hostname").ok();
    for text in [
        report.json.to_string(),
        report.markdown.clone(),
        report.ran.stdout.clone(),
    ] {
        assert!(text.contains("535.183.01"), "{text}");
        assert!(!text.contains("51eed000-0000"), "{text}");
        // A name such as "vm" can be a part of another word.
        assert!(
            hostname.len() <= 4 || !text.contains(hostname.trim()),
            "{text}"
        );
    }
    assert_eq!(
        report.json["machine"]["driver"]["gpus"]
            .as_array()
            .unwrap()
            .len(),
        2
    );
    assert!(report.markdown.contains(" failed, "), "{}", report.markdown);
    let events = read(machine.fake.library().with_file_name("nvml.events"));
    assert_eq!(events, "xid 0 31\nxid 0 31\n", "a program caused each XID");
}

fn a_driver_in_the_root_directory() {
    let report = Machine::new(&["--gpus", "1"]).run_in_root(&[]);
    report.all_passed_but(&[&WITHOUT_MIG[..], &["one-gpu"]].concat());
    report.seen("info", "driver root /");
    report.seen("one-gpu", "the machine has one GPU");
    report.seen("prepare", "5 nodes");
    let machine = &report.json["machine"];
    assert_eq!(
        (&machine["root"], &machine["namespaces"]),
        (&true.into(), &"permitted".into())
    );
}

/// The first GPU is in MIG mode.
fn mig_devices() {
    let machine = Machine::new(&["--gpus", "2", "--mig"]);
    // An answer about an instance that is younger than a second is not cached.
    std::thread::sleep(std::time::Duration::from_secs(2));
    let report = machine.run_with_root(&["--no-fault"]);
    report.all_passed_but(&["cdi-user-namespace", "claims-xid", "xid"]);
    report.seen("mig", "one of 2 MIG devices of GPU 0");
    report.seen("info", "2 GPUs, 2 MIG devices, as nvidia-smi -L");
    report.seen("xid", "--no-fault");
}

/// A sandbox like a container: what needs a mount namespace is listed with the reason, and the hook's directory does not stay.
fn without_namespaces() {
    let machine = Machine::new(&["--gpus", "1"]);
    let report = machine.run_with_less("", "setpriv --bounding-set=-sys_admin", "ls /run");
    assert!(
        report.ran.stdout.ends_with("gpu-report.md\n"),
        "/run is empty: {:?}",
        report.ran
    );
    let checks = report.checks();
    for check in ["info", "files", "nvml", "cuda-host", "unchanged"] {
        assert_eq!(checks[check].0, "passed", "{check}: {}", checks[check].1);
    }
    for check in [
        "doctor", "cache", "prepare", "smi", "cuda", "cdi", "plugin", "metrics", "xid", "claims",
        "mps", "warm", "at-once",
    ] {
        assert_eq!(
            checks[check].0, "cannot run",
            "{check}: {}",
            checks[check].1
        );
        assert!(
            checks[check]
                .1
                .contains("cannot create a mount namespace: EPERM"),
            "{check}: {}",
            checks[check].1
        );
    }
}

fn a_plain_user() {
    let machine = Machine::new(&["--gpus", "1"]);
    shell!("chmod 777 '{}'", machine.dir.path().display());
    let plain = "setpriv --reuid 65534 --regid 65534 --clear-groups";
    let report = machine.run_with_less(&crate::engine::make_searchable(), plain, "");
    let checks = report.checks();
    assert_eq!(report.ran.code, Some(0), "{checks:?}");
    assert_eq!(checks["info"].0, "passed", "{checks:?}");
    assert!(
        checks["cuda"].0 == "cannot run" && checks["cuda"].1.contains("this is not root"),
        "{checks:?}"
    );
}

/// Without a runtime, or if the time is up.
fn the_checks_that_cannot_start() {
    let machine = Machine::new(&["--gpus", "1"]);
    let report = machine.run_with_root(&[
        "--runtime",
        "/bin/false",
        "--only",
        "cuda,denied,plugin,nvml",
    ]);
    let checks = report.checks();
    for check in ["cuda", "denied"] {
        assert!(
            checks[check].0 == "cannot run" && checks[check].1.contains("/bin/false"),
            "{checks:?}"
        );
    }
    assert_eq!(checks["nvml"].0, "passed", "{checks:?}");
    let report = machine.run_with_root(&["--time", "0", "--only", "files,cuda"]);
    for (name, (verdict, seen)) in report.checks() {
        assert!(
            verdict == "cannot run" && seen.contains("the time limit of 0 s"),
            "{name}: {verdict}: {seen}"
        );
    }
}

/// The process with the checks is killed while a GPU is shared.
fn the_compute_mode_is_restored() {
    let mut machine = Machine::new(&["--gpus", "1"]);
    machine.replace(
        "oci-nvidia-hook",
        r#"case "$*" in *prestart) pkill -KILL -f -- "gpu-checks --inside";; esac; exec "$real" "$@""#,
    );
    let script = format!(
        "mount -t tmpfs run /run
         mode() {{ nvidia-smi --query-gpu=compute_mode --format=csv,noheader; }}
         '{}' --report '{}' --only mps-client || i=0
         while [ \"$(mode)\" != Default ] && [ $i -lt 120 ]; do i=$((i + 1)); sleep 0.2; done
         mode; pgrep -c -x nvidia-cuda-mps || true",
        machine.kit.join("run").display(),
        machine.dir.path().join("report").display()
    );
    let mut command = Command::new("unshare");
    command
        .args(OWN_PROCESSES)
        .arg(source("tests/fake-driver/as-host"))
        .arg(&machine.fake.root)
        .args(["sh", "-euc", &script]);
    let report = machine.report(run(&mut command));
    // Nothing else can remove the containers of checks that are killed.
    let (_, left) = &report.checks()["unchanged"];
    for cgroup in left.split(' ') {
        if cgroup.starts_with("/sys/fs/cgroup/") {
            std::fs::remove_dir(cgroup).ok();
            Path::new(cgroup).parent().map(std::fs::remove_dir);
        }
    }
    report.seen("mps-client", "signal: 9");
    assert!(
        report.ran.stdout.ends_with("\nDefault\n0\n"),
        "{:?}",
        report.ran
    );
}

/// A hook that does not set up containers.
const NOTHING: &str = r#"case "$*" in *prestart) exit 0;; esac; exec "$real" "$@""#;

/// A hook that generates a CDI spec whose libcuda has another name.
const WITHOUT_LIBCUDA: &str = r#"case "$*" in *"cdi generate"*) "$real" "$@" | sed "s|/libcuda.so|/libcudb.so|g";; *) exec "$real" "$@";; esac"#;

/// What breaks, and the checks that then fail. The others that are named do not.
struct Fault {
    name: &'static str,
    /// Breaks the machine
    breaks: fn(&mut Machine),
    fails: &'static [&'static str],
    others: &'static [&'static str],
    in_root: bool,
}

const fn fault(
    name: &'static str,
    breaks: fn(&mut Machine),
    fails: &'static [&'static str],
    others: &'static [&'static str],
) -> Fault {
    Fault {
        name,
        breaks,
        fails,
        others,
        in_root: false,
    }
}

const FAULTS: &[Fault] = &[
    fault(
        "a libcuda that computes wrong sums",
        |machine| {
            shell!(
                "cp '{dir}'/*.[ch] '{scratch}'; cd '{scratch}'; sed -i 's/a\\[i\\] + b\\[i\\]/a[i]/' cuda.c; \
                 cc -D_DEFAULT_SOURCE -shared -fPIC -Wl,-soname,libcuda.so.1 -o wrong.so cuda.c mps_client.c mps.c compute_mode.c config.c; \
                 cp wrong.so '{root}'/usr/lib/*/libcuda.so.535.183.01",
                dir = source("tests/fake-driver").display(),
                scratch = machine.dir.path().display(),
                root = machine.fake.root.display()
            );
        },
        &["cuda-host"],
        &["info", "smi"],
    ),
    fault(
        "a missing node",
        |machine| std::fs::remove_file(machine.file("dev/nvidia-uvm")).unwrap(),
        &["files", "cuda-host"],
        &["info", "smi"],
    ),
    fault(
        "a GPU that is lost",
        |machine| {
            machine
                .fake
                .set_nvml(|text| text.replace("gpu minor=1 ", "gpu minor=1 fail=15 "))
        },
        &["info", "plugin", "metrics", "xid", "claims", "claims-xid"],
        &["cuda-host", "cuda"],
    ),
    fault(
        "a driver without libcuda",
        |machine| {
            shell!(
                "rm '{root}'/usr/lib/*/libcuda.so*; /sbin/ldconfig -r '{root}'",
                root = machine.fake.root.display()
            );
        },
        &["doctor", "files"],
        &["info", "nvml"],
    ),
    fault(
        "libraries of another version",
        |machine| {
            let version = machine.file("proc/driver/nvidia/version");
            let text = read(&version).replace("535.183.01", "550.54.15");
            write_file(version, text);
        },
        &["info"],
        &[],
    ),
    fault(
        "another GPU on the host than in the container",
        |machine| machine.fake.set_nvml(|text| text.replace("H100", "H200")),
        &["smi", "cdi"],
        &["info", "cuda"],
    ),
    fault(
        "nodes with another mode than the module's",
        |machine| {
            let params = machine.file("proc/driver/nvidia/params");
            let text = read(&params).replace("DeviceFileMode: 438", "DeviceFileMode: 384");
            write_file(params, text);
        },
        &["prepare"],
        &["info", "cuda"],
    ),
    fault(
        "a GPU without a UUID in the kernel",
        |machine| {
            let root = machine.fake.root.display();
            shell!("sed -i '/GPU UUID/d' '{root}'/proc/driver/nvidia/gpus/*/information");
        },
        &["cache"],
        &["info", "cuda"],
    ),
    fault(
        "a fault that the driver does not report",
        |machine| {
            std::fs::remove_file(machine.fake.library().with_file_name("nvml.events")).unwrap()
        },
        &["xid", "claims-xid"],
        &["cuda"],
    ),
    fault(
        "NVML lists more GPUs than the container has",
        |machine| {
            shell!(
                "printf 'count-all\\n' >>'{}'",
                machine.fake.library().display()
            );
        },
        &["one-gpu"],
        &["info"],
    ),
    fault(
        "nvidia-smi reports other memory than NVML",
        |machine| {
            let smi = machine.file("usr/bin/nvidia-smi");
            shell!(
                "mv '{smi}' '{smi}.real'; printf '%s\\n' '#!/bin/sh' '\"{smi}.real\" \"$@\" | sed s/81559/40960/' >'{smi}'; chmod 755 '{smi}'",
                smi = smi.display()
            );
        },
        &["metrics"],
        &["info"],
    ),
    fault(
        "a hook that does nothing",
        |machine| machine.replace("oci-nvidia-hook", NOTHING),
        &[
            "smi",
            "cuda",
            "user",
            "read-only",
            "user-namespace",
            "denied",
            "unknown-gpu",
            "cgroup",
            "plugin",
            "mps",
            "mps-client",
            "mps-daemon",
            "at-once",
        ],
        &["info", "cuda-host"],
    ),
    fault(
        "a supervisor of MPS that sets no limits",
        |machine| {
            machine.replace(
                "oci-nvidia-mps",
                r#"case "$*" in *" run "*) sed -i '/^mps-[mt]/d' "$2";; esac; exec "$real" "$@""#,
            );
        },
        &["mps", "mps-daemon"],
        &["mps-client"],
    ),
    fault(
        "a supervisor of MPS that opens the GPU when its daemon has ended",
        |machine| {
            let smi = machine.file("usr/bin/nvidia-smi");
            machine.replace(
                "oci-nvidia-mps",
                &format!(
                    r#"case "$*" in *" end "*) exec "{}" -c DEFAULT;; esac; exec "$real" "$@""#,
                    smi.display()
                ),
            );
        },
        &["mps-daemon"],
        &["info"],
    ),
    fault(
        "a hook that fails",
        |machine| {
            machine.replace(
                "oci-nvidia-hook",
                r#"case "$*" in *prestart|*--debug*|*" info") echo broken >&2; exit 1;; esac; exec "$real" "$@""#,
            );
        },
        &[
            "nvml",
            "nvml-calls",
            "cache",
            "cuda",
            "warm",
            "cold",
            "denied",
        ],
        &["info"],
    ),
    fault(
        "a ps that asks NVML in another PID namespace",
        |machine| {
            machine.replace(
                "oci-nvidia-hook",
                r#"case "$*" in *"ps --json") exec unshare --pid --fork "$real" "$@";; esac; exec "$real" "$@""#,
            );
        },
        &["processes"],
        &["info", "cuda"],
    ),
    fault(
        "a CDI spec without libcuda",
        |machine| machine.replace("oci-nvidia-hook", WITHOUT_LIBCUDA),
        &["cdi", "cdi-user", "cdi-read-only"],
        &["info", "cuda"],
    ),
    fault(
        "a hook that fails under NVIDIA's name",
        |machine| {
            machine.replace(
                "oci-nvidia-hook",
                r#"case "$0" in *nvidia-container-cli) exit 1;; esac; exec "$real" "$@""#,
            );
        },
        &["compat"],
        &["info"],
    ),
    fault(
        "a device plugin that does not start",
        |machine| machine.replace("oci-nvidia-kubelet-plugin", "echo broken >&2; exit 1"),
        &["plugin", "claims"],
        &["cuda"],
    ),
];

/// A fault that needs a host with MIG devices, and faults that are in `/`.
fn more_faults() -> Vec<(&'static [&'static str], Fault)> {
    vec![
        (
            &["--gpus", "1", "--mig"],
            fault(
                "a hook that does nothing, with MIG devices",
                |machine| machine.replace("oci-nvidia-hook", NOTHING),
                &["mig"],
                &["info"],
            ),
        ),
        (
            &["--gpus", "1"],
            Fault {
                in_root: true,
                ..fault(
                    "a hook that changes the machine",
                    |machine| {
                        machine.replace(
                            "oci-nvidia-hook",
                            r#"mkdir -p /etc/cdi; touch /etc/cdi/left; exec "$real" "$@""#,
                        );
                    },
                    &["unchanged"],
                    &["info"],
                )
            },
        ),
        (
            &["--gpus", "1"],
            Fault {
                in_root: true,
                ..fault(
                    "a CDI spec without libcuda, in /",
                    |machine| machine.replace("oci-nvidia-hook", WITHOUT_LIBCUDA),
                    &["cdi-user-namespace"],
                    &["info"],
                )
            },
        ),
    ]
}

fn each_check_can_fail() {
    let two: &[&str] = &["--gpus", "2"];
    let more = more_faults();
    let all: Vec<_> = FAULTS
        .iter()
        .map(|fault| (two, fault))
        .chain(more.iter().map(|(args, fault)| (*args, fault)))
        .collect();
    let wrong = std::thread::scope(|scope| {
        // Half of the time, the checks wait.
        let wrong = |chunk: &[(&[&str], &Fault)]| -> Vec<String> {
            chunk
                .iter()
                .filter_map(|(args, fault)| fails(args, fault).err())
                .collect()
        };
        let threads: Vec<_> = all
            .chunks(all.len().div_ceil(4))
            .map(|chunk| scope.spawn(move || wrong(chunk)))
            .collect();
        threads
            .into_iter()
            .flat_map(|thread| thread.join().unwrap())
            .collect::<Vec<_>>()
    });
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let shown: Vec<_> = all.iter().flat_map(|(_, fault)| fault.fails).collect();
    let list = run(Command::new(kit().join("bin/gpu-checks")).arg("--list")).ok();
    let names = list
        .lines()
        .filter_map(|line| line.split_whitespace().next())
        .chain(["unchanged"]);
    let not_shown: Vec<_> = names.filter(|name| !shown.contains(&name)).collect();
    assert!(
        not_shown.is_empty(),
        "no fault makes these checks fail: {not_shown:?}"
    );
}

/// Runs the checks of a fault, and returns the first verdict that is not the expected one.
fn fails(make_root: &[&str], fault: &Fault) -> Result<(), String> {
    let mut machine = Machine::new(make_root);
    (fault.breaks)(&mut machine);
    let names: Vec<_> = fault
        .fails
        .iter()
        .chain(fault.others)
        .copied()
        .filter(|name| *name != "unchanged")
        .collect();
    let options = ["--only", &names.join(","), "--time", "120"];
    let report = if fault.in_root {
        machine.run_in_root(&options)
    } else {
        machine.run_with_root(&options)
    };
    let checks = report.checks();
    let expected = fault
        .fails
        .iter()
        .map(|name| (name, "failed"))
        .chain(fault.others.iter().map(|name| (name, "passed")));
    for (name, expected) in expected {
        match checks.get(*name) {
            Some((verdict, _)) if verdict == expected => {}
            found => {
                return Err(format!(
                    "{}: {name}: {found:?} instead of {expected}",
                    fault.name
                ));
            }
        }
    }
    assert_eq!(report.ran.code, Some(1), "{}: {:?}", fault.name, report.ran);
    Ok(())
}
