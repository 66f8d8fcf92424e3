//! A real systemd, as the first process of a PID namespace with its own cgroup v2 hierarchy, over the files of this machine.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::support::{HOOK, Ran, host_wide_name, read, run, scratch, sh, shell, write_file};

/// The number of started instances: each has its own cgroup.
static STARTED: AtomicUsize = AtomicUsize::new(0);

/// Everything except for its cgroup is in namespaces that end with its first process.
pub struct Systemd {
    outer: Child,
    /// Its first process, in the host's PID namespace
    pid: String,
    cgroup: String,
    pub dir: tempfile::TempDir,
}

impl Systemd {
    pub fn start() -> Self {
        let dir = scratch();
        let number = STARTED.fetch_add(1, Ordering::Relaxed);
        let cgroup = host_wide_name(&number.to_string());
        let first = dir.path().join("first");
        // systemd sets up a host: it creates and removes files in many places. All of these are in a temporary layer over the
        // host's files, except for the directories of the tests.
        let shared = [
            env!("CARGO_TARGET_TMPDIR"),
            Path::new(HOOK).parent().unwrap().to_str().unwrap(),
        ];
        let binds: String = shared
            .iter()
            .map(|dir| format!("mkdir -p \"$root{dir}\"; mount --bind '{dir}' \"$root{dir}\"\n"))
            .collect();
        write_file(
            &first,
            format!(
                "set -eu\n\
                 mount -t tmpfs layer /mnt; mkdir /mnt/upper /mnt/work /mnt/root; root=/mnt/root\n\
                 mount -t overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work none $root\n\
                 mount -t proc proc $root/proc; mount --bind $root/proc/sys $root/proc/sys\n\
                 mount -o remount,bind,ro $root/proc/sys; mount -t sysfs -o ro sys $root/sys\n\
                 mount -t cgroup2 none $root/sys/fs/cgroup\n\
                 mount -t tmpfs dev $root/dev; mknod $root/dev/null c 1 3; mknod $root/dev/zero c 1 5\n\
                 mknod $root/dev/urandom c 1 9; chmod 666 $root/dev/*; mkdir $root/dev/char\n\
                 mount -t tmpfs run $root/run; mount -t tmpfs tmp $root/tmp\n\
                 {binds}\
                 mkdir -p $root/run/lock $root/run/systemd/system\n\
                 printf '[Unit]\\nDescription=nothing\\nDefaultDependencies=no\\n' >$root/run/systemd/system/nothing.target\n\
                 cd $root; mkdir -p .old; pivot_root . .old; umount -l /.old\n\
                 export container=test\n\
                 exec chroot . /lib/systemd/systemd --system --unit=nothing.target --log-target=console --show-status=no\n"
            ),
        );
        let script = format!(
            "mount -t cgroup2 none /mnt; mkdir /mnt/{cgroup}; echo $$ >/mnt/{cgroup}/cgroup.procs; umount /mnt; \
             exec unshare --cgroup --fork --pid --mount --uts --ipc sh '{}'",
            first.display()
        );
        let log = std::fs::File::create(dir.path().join("log")).unwrap();
        let outer = Command::new("unshare")
            .args(["--mount", "sh", "-euc", &script])
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        let mut systemd = Self {
            outer,
            pid: String::new(),
            cgroup,
            dir,
        };
        let start = Instant::now();
        while !systemd.is_running() {
            let log = || read(systemd.dir.path().join("log"));
            assert!(
                start.elapsed() < Duration::from_secs(30),
                "systemd does not start: {}",
                log()
            );
            std::thread::sleep(Duration::from_millis(100));
        }
        systemd
    }

    fn is_running(&mut self) -> bool {
        let outer = self.outer.id();
        let children = std::fs::read_to_string(format!("/proc/{outer}/task/{outer}/children"))
            .unwrap_or_default();
        self.pid = children.trim().to_owned();
        !self.pid.is_empty()
            && matches!(
                self.enter("systemctl is-system-running").stdout.trim(),
                "running" | "degraded"
            )
    }

    /// Stops systemd for some seconds, like a long reload.
    pub fn pause(&self, seconds: u32) {
        let pid = &self.pid;
        shell!("kill -STOP {pid}; (sleep {seconds}; kill -CONT {pid}) >/dev/null 2>&1 &");
    }

    /// Runs a command in its namespaces.
    pub fn enter(&self, script: &str) -> Ran {
        let mut nsenter = Command::new("nsenter");
        nsenter
            .args([
                "-t", &self.pid, "-m", "-p", "-C", "-u", "-i", "sh", "-euc", script,
            ])
            .env_clear();
        run(nsenter.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"))
    }

    /// Runs a command as one of its services: `nsenter` alone leaves a process in a cgroup outside of systemd's.
    pub fn service(&self, script: &str) -> Ran {
        let work = tempfile::tempdir_in(self.dir.path()).unwrap();
        let path = |name: &str| work.path().join(name);
        let [out, err, code] = ["out", "err", "code"].map(path);
        // `--wait` would need a bus daemon.
        let all = format!(
            "code=0; ( set -eu; {script} ) >{} 2>{} || code=$?; echo $code >{1}.new; mv {1}.new {2}",
            out.display(),
            err.display(),
            code.display()
        );
        write_file(path("script"), all);
        self.enter(&format!(
            "systemd-run --quiet --collect -p DefaultDependencies=no sh {}",
            path("script").display()
        ))
        .ok();
        let start = Instant::now();
        while !code.try_exists().unwrap() {
            assert!(
                start.elapsed() < Duration::from_secs(60),
                "no end of {script}"
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        Ran {
            code: read(code).trim().parse().ok(),
            stdout: read(out),
            stderr: read(err),
        }
    }
}

impl Drop for Systemd {
    fn drop(&mut self) {
        // All other processes of the namespace end with its first one.
        sh(&format!("kill -KILL {}", self.pid));
        self.outer.wait().ok();
        let cgroup = format!("/mnt/{}", self.cgroup);
        let remove =
            format!("mount -t cgroup2 none /mnt; find {cgroup} -depth -type d -exec rmdir {{}} +");
        for _ in 0..50 {
            if run(Command::new("unshare").args(["--mount", "sh", "-euc", &remove])).code == Some(0)
            {
                return;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}
