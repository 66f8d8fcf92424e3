//! `tests/suse/check`, the command for the first person with an openSUSE machine: rehearsed with programs that answer like such a machine.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::{
    Need, Ran, assert_lacks, assert_says, read, run, scratch, source, write_file, write_program,
};

tests! {
    &[] => the_packages_are_required;
    &[Need::Root] => a_good_machine_passes, each_fault_fails_its_check, a_transactional_system_needs_a_reboot;
}

/// The programs of the machine. `$STATE` is a directory that contains `installed` while the packages are installed.
const PROGRAMS: &[(&str, &str)] = &rows! {
    "rpm", "case \"$*\" in -qp*) echo oci-nvidia-hook ;; '-q --qf'*) printf 'oci-nvidia-hook 0.1.0-0 ' ;; \
         -V*) ;; -q*) test -e $STATE/installed ;; esac";
    "zypper", "case \"$*\" in *' install '*) touch $STATE/installed ;; *' remove '*) rm $STATE/installed ;; esac";
    "systemctl", "case $1 in is-enabled) echo enabled ;; is-active) echo active ;; *) echo systemd 257 ;; esac";
    "journalctl", "cat $STATE/journal";
    "getenforce", "echo Enforcing";
    "nvidia-smi", "echo 'GPU 0: NVIDIA A100 (UUID: GPU-51eed000-1111-2222-3333-444455556666)'";
    "podman", "case $1 in --version) echo podman version 5.4.2 ;; run) nvidia-smi ;; esac";
    "runc", "echo runc version 1.2.6";
    "crun", "echo crun version 1.19";
    "oci-nvidia-hook", "exit 0";
};

struct Machine {
    dir: tempfile::TempDir,
}

impl Machine {
    fn new() -> Self {
        let machine = Self { dir: scratch() };
        std::fs::create_dir(machine.path("bin")).unwrap();
        write_file(machine.path("journal"), "");
        write_file(machine.path("a.rpm"), "");
        for (name, script) in PROGRAMS {
            machine.set(name, script);
        }
        machine
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Replaces a program.
    fn set(&self, name: &str, script: &str) {
        let program = self.path("bin").join(name);
        write_program(&program, format!("#!/bin/sh\n{script}\n"));
    }

    /// Runs the command, on a host whose `/run` is empty.
    fn check(&self) -> Ran {
        let mut unshare = Command::new("unshare");
        unshare
            .args(["--mount", "--propagation", "private", "sh", "-euc"])
            .arg("mount -t tmpfs run /run; exec \"$@\"")
            .arg("sh")
            .arg(source("tests/suse/check"))
            .arg("--report")
            .args([self.path("report"), self.path("a.rpm")])
            .env("STATE", self.dir.path())
            .env(
                "PATH",
                format!(
                    "{}:/usr/sbin:/usr/bin:/sbin:/bin",
                    self.path("bin").display()
                ),
            );
        run(&mut unshare)
    }

    fn report(&self) -> String {
        read(self.path("report"))
    }
}

fn the_packages_are_required() {
    let ran = run(Command::new(source("tests/suse/check")).arg("--help"));
    assert!(
        ran.code == Some(2) && ran.stdout.starts_with("Installs the packages on this"),
        "{ran:?}"
    );
    let ran = run(&mut Command::new(source("tests/suse/check")));
    assert_eq!(ran.code, Some(2), "{ran:?}");
    assert_says(&ran.stderr, &["; hint: "]);
}

fn a_good_machine_passes() {
    let machine = Machine::new();
    let ran = machine.check();
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let report = machine.report();
    for row in [
        "| Podman | podman version 5.4.2 |",
        "| installation | passed | |",
        "| podman run --gpus all | passed | |",
        "| SELinux denies nothing | passed | |",
        "| removal | passed | |",
    ] {
        assert!(report.replace("  ", " ").contains(row), "{row}: {report}");
    }
    assert_lacks(&report, &["failed", "cannot run"]);
    assert!(!machine.path("installed").exists());
}

fn each_fault_fails_its_check() {
    let denial = "avc:  denied  { read } for pid=7 comm=\"nvidia-smi\" scontext=system_u:system_r:container_t:s0:c1,c2 \
                  tcontext=system_u:object_r:device_t:s0 tclass=chr_file";
    let leak = "echo \"no GPU-51eed000-1111-2222-3333-444455556666 on $(uname -n) for /home/anna, 192.168.1.7\"; exit 1";
    let denies = format!("echo '{denial}'");
    let faults = rows! {
        "rpm -V", "rpm", "case \"$*\" in -qp*) echo oci-nvidia-hook ;; -V*) exit 1 ;; -q*) test -e $STATE/installed ;; esac",
            "files of the packages";
        "unit", "systemctl", "case $1 in is-active) echo inactive ;; *) echo enabled ;; esac", "oci-nvidia-hook-cdi.path is active";
        "container", "podman", leak, "podman run --device nvidia.com/gpu=all";
        "doctor", "oci-nvidia-hook", "[ \"$1\" != doctor ] || exit 2", "doctor";
        "removal", "zypper", "case \"$*\" in *' install '*) touch $STATE/installed ;; *) exit 104 ;; esac", "removal";
        "journal", "journalctl", denies.as_str(), "SELinux denies nothing";
    };
    for (fault, program, script, check) in faults {
        let machine = Machine::new();
        machine.set(program, script);
        let ran = machine.check();
        assert_eq!(ran.code, Some(1), "{fault}: {ran:?}");
        let report = machine.report();
        assert!(
            report.contains(&format!("| {check} | failed |")),
            "{fault}: {report}"
        );
        assert_lacks(&report, &["51eed000", "anna", "192.168"]);
        let name = read("/proc/sys/kernel/hostname");
        assert!(!report.contains(&format!(" {} ", name.trim())), "{report}");
        assert_eq!(
            report.contains("container_t device_t chr_file read"),
            fault == "journal",
            "{report}"
        );
    }
}

fn a_transactional_system_needs_a_reboot() {
    let machine = Machine::new();
    let home = Path::new("/root/oci-nvidia-hook-check");
    machine.set("transactional-update", "echo \"$*\" >>$STATE/transactions");
    let ran = machine.check();
    std::fs::remove_dir_all(home).unwrap();
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert_says(&ran.stdout, &["reboot, and run this command again"]);
    // The next snapshot
    write_file(machine.path("installed"), "");
    assert_eq!(machine.check().code, Some(0));
    let transactions = read(machine.path("transactions"));
    let lines: Vec<_> = transactions.lines().collect();
    assert!(
        lines[0].starts_with(
            "--non-interactive pkg install --allow-unsigned-rpm /root/oci-nvidia-hook-check/a.rpm"
        ),
        "{lines:?}"
    );
    assert_eq!(lines[1..], ["--non-interactive pkg remove oci-nvidia-hook"]);
    assert!(machine.report().contains("| transactional | yes |"));
}
