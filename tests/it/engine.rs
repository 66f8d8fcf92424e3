//! A real engine with separate storage, hooks and configuration, for tests that start containers.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::driver::{FakeDriver, Image};
use crate::kernels;
use crate::support::{
    HOOK, Need, Ran, chmod, read, run, scratch, scratch_with_short_path, unshare, write_file,
};

/// The needs of tests with podman and runc.
pub const NEEDS: &[Need] = &[Need::Root, Need::Programs(&["podman", "runc", "cc"])];
/// The needs of tests that examine cgroup v1.
pub const NEEDS_V1: &[Need] = &[
    Need::Root,
    Need::Programs(&["podman", "runc", "cc"]),
    Need::CgroupV1,
];
/// The needs of tests on cgroup v2.
pub const NEEDS_V2: &[Need] = &[
    Need::Root,
    Need::Programs(&["podman", "runc", "cc"]),
    Need::CgroupV2,
];
/// The needs of tests with crun.
pub const NEEDS_CRUN: &[Need] = &[Need::Root, Need::Programs(&["podman", "crun", "cc"])];

/// The cgroups that the container's runtime sees.
#[derive(Clone, Copy, Debug)]
pub enum Cgroup {
    AsMounted,
    /// Only cgroup2, in a separate mount namespace
    V2,
    /// With crun, which rejects a unified hierarchy next to cgroup v1
    WithCrun,
}

impl Cgroup {
    /// Returns the commands that a shell in a separate mount namespace must run first.
    pub const fn prepare(self) -> &'static str {
        match self {
            Self::AsMounted => "",
            Self::V2 => "umount -R /sys/fs/cgroup; mount -t cgroup2 none /sys/fs/cgroup;",
            Self::WithCrun => {
                "if mountpoint -q /sys/fs/cgroup/unified; then umount /sys/fs/cgroup/unified; fi;"
            }
        }
    }
}

fn shipped_hook(path: &str) -> serde_json::Value {
    serde_json::from_str(&read(crate::support::source(path))).unwrap()
}

/// Podman with separate storage, hooks and configuration.
pub struct Podman {
    pub dir: tempfile::TempDir,
    runroot: tempfile::TempDir,
    pub hooks: PathBuf,
}

/// The directory in which the hook stores its data.
const RUN_DIR: &str = "/run/oci-nvidia-hook";

/// Podman's default limits need CAP_SYS_RESOURCE, and a controller that cgroup v2 lacks if v1 has it. `--pids-limit` does not
/// help: Podman's and runc's versions interpret its values differently.
pub const CONTAINERS_CONF: &str = "[containers]\ndefault_ulimits = [\"nofile=20000:20000\", \"nproc=30000:30000\"]\npids_limit = 0\n";

/// Options of Podman for hosts without systemd.
pub const OPTIONS: [&str; 6] = [
    "--cgroup-manager",
    "cgroupfs",
    "--runtime",
    "runc",
    "--events-backend",
    "none",
];

pub const IMAGE: &str = "localhost/small";

impl Podman {
    /// One instance for all tests, because importing an image takes longer than most of them.
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<Podman> = OnceLock::new();
        SHARED.get_or_init(Self::with_image)
    }

    /// With the small image, which is imported once, because that takes longer than most tests.
    pub fn with_image() -> Self {
        static IMPORTED: OnceLock<Podman> = OnceLock::new();
        let imported = IMPORTED.get_or_init(|| {
            let podman = Self::new();
            let image = Image::new(podman.dir.path(), &["--layout", "debian"]);
            podman.import(&image.rootfs, IMAGE);
            // The database of containers contains the path of the storage. Podman 5 has it in db.sql.
            let storage = podman.dir.path().join("storage");
            std::fs::remove_dir_all(storage.join("libpod")).unwrap();
            for name in ["db.sql", "db.sql-shm", "db.sql-wal"] {
                let _ = std::fs::remove_file(storage.join(name));
            }
            podman
        });
        let podman = Self::new();
        let storage = imported.dir.path().join("storage");
        let mut copy = Command::new("cp");
        run(copy.arg("--archive").arg(storage).arg(podman.dir.path())).ok();
        podman
    }

    pub fn new() -> Self {
        let dir = scratch();
        let runroot = scratch_with_short_path();
        // Root of a user namespace must be able to search the directories.
        for dir in [&dir, &runroot] {
            chmod(dir.path(), 0o755);
        }
        let hooks = dir.path().join("hooks.d");
        std::fs::create_dir_all(&hooks).unwrap();
        std::fs::create_dir_all(dir.path().join("old")).unwrap();
        let networks = dir.path().join("networks");
        let conf = format!(
            "{CONTAINERS_CONF}[network]\nnetwork_config_dir = \"{}\"\n",
            networks.display()
        );
        write_file(dir.path().join("containers.conf"), conf);
        let podman = Self {
            dir,
            runroot,
            hooks,
        };
        podman.install_hook(&FakeDriver::shared().config);
        podman
    }

    /// Installs the hook file of the packages, with the tested binary and a config.toml of the test.
    pub fn install_hook(&self, config: &Path) {
        self.install_stage("prestart", config);
    }

    /// Installs the same hook file for another stage.
    pub fn install_stage(&self, stage: &str, config: &Path) {
        let mut json = shipped_hook("hooks.d/oci-nvidia-hook.json");
        json["stages"] = serde_json::json!([stage]);
        json["hook"]["path"] = HOOK.into();
        json["hook"]["args"] = serde_json::json!(["oci-nvidia-hook", "--config", config, stage]);
        write_file(self.hooks.join("oci-nvidia-hook.json"), json.to_string());
    }

    /// Removes the hook file.
    pub fn remove_hook(&self) {
        std::fs::remove_file(self.hooks.join("oci-nvidia-hook.json")).unwrap();
    }

    /// Removes all hook files.
    pub fn remove_hooks(&self) {
        for file in std::fs::read_dir(&self.hooks).unwrap() {
            std::fs::remove_file(file.unwrap().path()).unwrap();
        }
    }

    /// The same hook as on the kernel of this test.
    fn hooks(&self) -> PathBuf {
        let Some(kernel) = kernels::current() else {
            return self.hooks.clone();
        };
        let text = read(self.hooks.join("oci-nvidia-hook.json"));
        let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
        let mut args = kernels::hook();
        json["hook"]["path"] = args[0].clone().into();
        args.extend(
            json["hook"]["args"].as_array().unwrap()[1..]
                .iter()
                .map(|arg| arg.as_str().unwrap().to_owned()),
        );
        json["hook"]["args"] = args.into();
        let dir = self.dir.path().join(format!("hooks-{}", kernel.name));
        std::fs::create_dir_all(&dir).unwrap();
        // The file is renamed into place, because another test may be reading it.
        let temporary = dir.join(format!("{:?}", std::thread::current().id()));
        write_file(&temporary, json.to_string());
        std::fs::rename(temporary, dir.join("oci-nvidia-hook.json")).unwrap();
        dir
    }

    fn base(&self) -> Vec<String> {
        let mut words = self.with_storage();
        words.extend(["--hooks-dir".to_owned(), self.hooks().display().to_string()]);
        words
    }

    /// The command with the storage of this value, and the hooks directories of the configuration.
    pub fn with_storage(&self) -> Vec<String> {
        let path = |name: &str| self.dir.path().join(name).display().to_string();
        [
            "podman",
            "--root",
            &path("storage"),
            "--runroot",
            &self.runroot.path().display().to_string(),
            "--tmpdir",
            &path("tmp"),
            "--storage-driver",
            "vfs",
        ]
        .into_iter()
        .chain(OPTIONS)
        .map(str::to_owned)
        .collect()
    }

    pub fn import(&self, rootfs: &Path, name: &str) {
        self.import_with(rootfs, name, "");
    }

    /// The same with these options for `podman import`.
    pub fn import_with(&self, rootfs: &Path, name: &str, options: &str) {
        let podman = self.base().join(" ");
        crate::support::shell!(
            "tar -C '{}' -c . | {podman} import {options} - {name}",
            rootfs.display()
        );
    }

    /// `podman run --rm ARGUMENTS` without a hooks directory of the test, and with the directories of `root` laid over /usr and /etc,
    /// read-only: either the hook is found where it is installed, or it is not found.
    pub fn run_installed(&self, root: &Path, arguments: &[&str]) -> Ran {
        let drop_ins = root.join("etc/containers/containers.conf.d");
        std::fs::create_dir_all(&drop_ins).unwrap();
        std::fs::copy(
            self.dir.path().join("containers.conf"),
            drop_ins.join("10-test.conf"),
        )
        .unwrap();
        let script = format!(
            "for dir in usr etc; do mkdir -p '{root}'/$dir; \
               mount -t overlay -o \"lowerdir={root}/$dir:/$dir\" overlay /$dir; done; exec \"$@\"",
            root = root.display()
        );
        let mut unshare = unshare(&script);
        unshare.args(self.with_storage());
        let log = Log::new(self.dir.path());
        unshare
            .args(["run", "--rm", "--network=none"])
            .args(log.options())
            .args(arguments);
        log.complete(run(unshare.env_remove("CONTAINERS_CONF")))
    }

    /// `podman run --rm ARGUMENTS`
    pub fn run(&self, cgroup: Cgroup, arguments: &[&str]) -> Ran {
        self.run_after("", cgroup, arguments)
    }

    /// The same after this shell script, in the same mount namespace.
    pub fn run_after(&self, script: &str, cgroup: Cgroup, arguments: &[&str]) -> Ran {
        let log = Log::new(self.dir.path());
        let options = log.options();
        let words = ["run", "--rm", "--network=none"]
            .into_iter()
            .chain(options.iter().map(String::as_str));
        let words = words.chain(arguments.iter().copied());
        let words: Vec<_> = words
            .map(|word| format!("'{}'", word.replace('\'', "'\\''")))
            .collect();
        log.complete(self.shell(
            cgroup,
            &format!("{script}\nexec \"$@\" {}", words.join(" ")),
        ))
    }

    /// `podman run --rm ARGUMENTS` with only this containers.conf, which names the hooks directories.
    pub fn run_with_conf(&self, conf: &Path, arguments: &[&str]) -> Ran {
        let mut words = self.base();
        words.truncate(words.iter().position(|word| word == "--hooks-dir").unwrap());
        let log = Log::new(self.dir.path());
        words.extend(["run", "--rm", "--network=none"].map(str::to_owned));
        words.extend(log.options());
        log.complete(run(Command::new(&words[0])
            .args(&words[1..])
            .args(arguments)
            .env("CONTAINERS_CONF", conf)))
    }

    /// Runs a shell script in a separate mount namespace, in which `"$@"` is podman.
    pub fn shell(&self, cgroup: Cgroup, script: &str) -> Ran {
        let mut words = self.base();
        match cgroup {
            Cgroup::AsMounted | Cgroup::V2 => {}
            Cgroup::WithCrun => words
                .iter_mut()
                .filter(|word| *word == "runc")
                .for_each(|word| *word = "crun".into()),
        }
        // The hook's data about these containers is removed with the namespace.
        let own_run =
            format!("mkdir -p -m 700 {RUN_DIR}; mount -t tmpfs -o mode=0700 run {RUN_DIR};");
        let script = format!("{own_run} {} {script}", cgroup.prepare());
        let mut unshare = unshare(&script);
        unshare.args(&words);
        run(unshare.env("CONTAINERS_CONF", self.dir.path().join("containers.conf")))
    }
}

/// Returns a script that makes the compiled files accessible to all users in its mount namespace, if they are below a private
/// home directory: a hook in a user namespace runs as another user of the host.
pub fn make_searchable() -> String {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
    let is_closed = |dir: &&Path| std::fs::metadata(dir).unwrap().permissions().mode() & 1 == 0;
    let Some(closed) = target.ancestors().filter(is_closed).last() else {
        return String::new();
    };
    format!(
        "mount -t tmpfs stage /mnt; mkdir /mnt/target; mount --bind '{target}' /mnt/target; \
         mount -t tmpfs -o mode=755 home '{closed}'; mkdir -p '{target}'; mount --move /mnt/target '{target}'; umount /mnt",
        target = target.display(),
        closed = closed.display()
    )
}

/// A log file of conmon. On a busy machine, `podman run` can lose the output of a container that ends before podman has attached
/// to it; conmon writes all output to the log.
struct Log(PathBuf);

impl Log {
    fn new(dir: &Path) -> Self {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        Self(dir.join(format!("log-{}", NUMBER.fetch_add(1, Ordering::Relaxed))))
    }

    fn options(&self) -> Vec<String> {
        [
            "--log-driver=k8s-file".into(),
            format!("--log-opt=path={}", self.0.display()),
        ]
        .into()
    }

    /// The same with the complete output of the container, if one was started.
    fn complete(self, mut ran: Ran) -> Ran {
        let Ok(log) = std::fs::read_to_string(&self.0) else {
            return ran;
        };
        // TIME stdout F LINE; P instead of F: the line continues in the next entry.
        let entries = log
            .lines()
            .filter_map(|line| line.split_once(" stdout "))
            .map(|(_, entry)| entry);
        ran.stdout = entries.fold(String::new(), |output, entry| match entry.split_once(' ') {
            Some(("P", text)) => output + text,
            Some((_, text)) => output + text + "\n",
            None => output,
        });
        ran
    }
}
