//! The fake driver, and a container that waits for a hook without an engine.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::kernels::hook_command;
use crate::support::{
    HOOK, Need, Ran, read, run, run_with, scratch, sh, sh_unshared, shell, source, write_file,
};

/// The needs of tests with [`Waiting`].
pub const NEEDS: &[Need] = &[Need::Root, Need::Programs(&["cc", "unshare", "nsenter"])];

/// For [`Waiting::start`] and the program of the package -compat.
pub const NEEDS_COMPAT: &[Need] = &[
    Need::Root,
    Need::Programs(&["cc", "unshare", "nsenter"]),
    Need::Build,
    Need::StaticLibc,
];

/// The environment of a container that requests all GPUs.
pub const ALL_GPUS: &[&str] = &["NVIDIA_VISIBLE_DEVICES=all"];

/// For [`Waiting::start`]: a /proc that can be masked.
pub const MASKABLE_PROC: &str =
    "mount -t tmpfs proc $rootfs/proc; mkdir -p $rootfs/proc/driver/nvidia";

/// A driver root of the fake driver, and a config.toml that names it.
#[derive(Debug)]
pub struct FakeDriver {
    pub root: PathBuf,
    pub config: PathBuf,
    _dir: tempfile::TempDir,
}

impl FakeDriver {
    /// Creates the driver with these arguments for `make-root`.
    pub fn new(arguments: &[&str]) -> Self {
        let dir = scratch();
        let root = dir.path().join("root");
        let fake = Self {
            root,
            config: dir.path().join("config.toml"),
            _dir: dir,
        };
        fake.rebuild(arguments);
        fake.configure("");
        fake
    }

    /// A driver that `make-root` created before.
    pub fn existing(root: PathBuf) -> Self {
        let dir = scratch();
        let config = dir.path().join("config.toml");
        Self {
            root,
            config,
            _dir: dir,
        }
    }

    /// Replaces the driver or the host at the same place.
    pub fn rebuild(&self, arguments: &[&str]) {
        std::fs::remove_dir_all(&self.root).ok();
        create("tests/fake-driver/make-root", arguments, &self.root);
    }

    /// Divides each of eight GPUs into seven MIG devices.
    pub fn divide(&self) {
        let mut layout = String::new();
        for (gpu, instance) in (0..8).flat_map(|gpu| (1..=7).map(move |instance| (gpu, instance))) {
            layout += &format!(
                "mig gpu={gpu} gi={instance} ci=0 profile=1g.10gb uuid=MIG-{gpu}{instance}
"
            );
        }
        let file = self.root.with_file_name("layout");
        write_file(&file, layout);
        run(Command::new(source("tests/fake-driver/make-root"))
            .arg(&self.root)
            .arg("--mig-layout")
            .arg(file))
        .ok();
    }

    /// Creates a driver of this version with NVIDIA's real user-space files below `real`, except for the management library,
    /// which would need a GPU.
    pub fn among_real_files(real: &Path, version: &str) -> Self {
        let fake = Self::new(&["--gpus", "1", "--version", version]);
        let (root, real) = (fake.root.display(), real.display());
        let dir = "usr/lib/x86_64-linux-gnu";
        shell!(
            "cd '{root}'; mkdir keep; mv {dir}/libnvidia-ml.so.{version} {dir}/nvml.conf keep; rm -r usr etc; \
             cp -al '{real}/usr' '{real}/etc' .; rm -f {dir}/nvidia/current/libnvidia-ml.so.{version}; \
             mv keep/* {dir}/nvidia/current; /sbin/ldconfig -r ."
        );
        fake
    }

    /// Two GPUs.
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<FakeDriver> = OnceLock::new();
        SHARED.get_or_init(|| Self::new(&["--gpus", "2"]))
    }

    /// Adds lines to config.toml; those outside of tables go last.
    pub fn configure(&self, more: &str) {
        let text = format!(
            "[nvidia-container-cli]\nroot = \"{}\"\n{more}\n",
            self.root.display()
        );
        write_file(&self.config, text);
    }

    /// Rewrites the library's configuration, in the file next to it.
    pub fn set_nvml(&self, change: impl Fn(String) -> String) {
        let library = self.library();
        let beside = library.with_file_name("nvml.conf");
        let old = read(&beside);
        write_file(beside, change(old));
    }

    /// Removes the lines of the library's configuration that start with this text.
    pub fn remove_from_nvml(&self, start: &str) {
        self.set_nvml(|old| {
            let kept = old.lines().filter(|line| !line.starts_with(start));
            kept.map(|line| format!("{line}\n")).collect()
        });
    }

    /// Returns the names of the driver's files below /usr.
    pub fn file_names(&self) -> Vec<String> {
        let find = format!(
            "find '{}/usr' ! -type d -printf '%f\\n'",
            self.root.display()
        );
        sh(&find).ok().lines().map(str::to_owned).collect()
    }

    pub fn library(&self) -> PathBuf {
        let find = format!("find '{}' -name libnvidia-ml.so.1", self.root.display());
        std::fs::canonicalize(sh(&find).ok().trim()).unwrap()
    }

    /// Runs a command as a user of the host of this driver: with its programs, its libraries, and its nodes in /dev.
    pub fn on_host(&self, program: &str) -> String {
        let root = self.root.display();
        let script = format!(
            "mount -t tmpfs dev /dev; for node in '{root}'/dev/nvidia*; do \
               [ ! -d \"$node\" ] || continue; touch /dev/${{node##*/}}; mount --bind \"$node\" /dev/${{node##*/}}; done; \
             export LD_LIBRARY_PATH=\"$(dirname \"$(find '{root}' -name libnvidia-ml.so.1)\")\"; '{root}/usr/bin/'{program}"
        );
        sh_unshared(&script).ok()
    }

    /// Runs the program with these arguments and the configuration of this host.
    pub fn run(&self, arguments: &[&str]) -> Ran {
        self.run_with(arguments, "")
    }

    /// The same with this text on stdin.
    pub fn run_with(&self, arguments: &[&str], stdin: &str) -> Ran {
        run_with(self.command().args(arguments).env_clear(), stdin.as_bytes())
    }

    /// Returns the document that `plan` prints for a container with this environment.
    pub fn plan(&self, env: &[&str]) -> serde_json::Value {
        let spec = serde_json::json!({"process": {"env": env}, "root": {"path": "/nowhere"}});
        let ran = self.run_with(&["plan", "-", "--json"], &spec.to_string());
        serde_json::from_str(&ran.stdout).unwrap_or_else(|_| panic!("{ran:?}"))
    }

    /// Lets the hook edit this config.json, as nvidia-container-runtime does.
    pub fn edit_config(&self, spec: &str) -> Ran {
        self.run_with(&["edit-config"], spec)
    }

    /// Returns the command line of the program with the configuration of this host.
    pub fn command(&self) -> Command {
        let mut command = Command::new(HOOK);
        command.arg("--config").arg(&self.config);
        command
    }
}

/// Creates the directory `place` as this script does with these arguments. The script runs once for the same arguments: the others get
/// a copy of what it created.
fn create(script: &'static str, arguments: &[&str], place: &Path) {
    type Created = BTreeMap<(&'static str, Vec<String>), PathBuf>;
    static CREATED: Mutex<Created> = Mutex::new(BTreeMap::new());
    // One script at a time, because they share the compiled files.
    let mut created = CREATED.lock().unwrap_or_else(PoisonError::into_inner);
    let key = (
        script,
        arguments.iter().copied().map(String::from).collect(),
    );
    if !created.contains_key(&key) {
        let name = Path::new(script).parent().unwrap().file_name().unwrap();
        let build = Path::new(env!("CARGO_TARGET_TMPDIR"))
            .join("build")
            .join(name);
        let template = scratch().keep().join("template");
        let mut make = Command::new(source(script));
        run(make
            .arg(&template)
            .arg("--build")
            .arg(build)
            .args(arguments))
        .ok();
        created.insert(key.clone(), template);
    }
    let template = created[&key].clone();
    drop(created);
    std::fs::create_dir_all(place).unwrap();
    let copy = ["--archive", "--no-target-directory"];
    run(Command::new("cp").args(copy).arg(template).arg(place)).ok();
}

/// The root file system of a small image, copied for one test.
#[derive(Debug)]
pub struct Image {
    pub rootfs: PathBuf,
}

impl Image {
    /// Creates the image with these arguments for `make-image`, below `dir`.
    pub fn new(dir: &Path, arguments: &[&str]) -> Self {
        let rootfs = dir.join("image");
        create("tests/image/make-image", arguments, &rootfs);
        Self { rootfs }
    }

    /// Creates an image with the directories of Debian, in a directory of its own, which is returned too.
    pub fn debian() -> (tempfile::TempDir, Self) {
        let dir = crate::support::scratch();
        let image = Self::new(dir.path(), &["--layout", "debian"]);
        (dir, image)
    }
}

/// A process in a separate mount namespace, with an image mounted as by a runtime before pivot_root, and a bundle that describes
/// it.
#[derive(Debug)]
pub struct Waiting {
    init: Child,
    pub rootfs: PathBuf,
    pub bundle: PathBuf,
    /// The directory of the image, if no other container uses it
    _dir: Option<tempfile::TempDir>,
}

impl Waiting {
    /// Starts a container of this image that requests all GPUs.
    pub fn with_all_gpus(dir: &Path, image: &Image) -> Self {
        Self::start(dir, &image.rootfs, ALL_GPUS, "")
    }

    /// Starts a container of an image with the directories of Debian, which no other container uses. See [`Self::start`].
    pub fn debian(env: &[&str], before: &str) -> Self {
        let (dir, image) = Image::debian();
        let mut waiting = Self::start(dir.path(), &image.rootfs, env, before);
        waiting._dir = Some(dir);
        waiting
    }

    /// The shell script `before` runs with the new namespace's `$rootfs` before the container waits.
    pub fn start(dir: &Path, rootfs: &Path, env: &[&str], before: &str) -> Self {
        let bundle = dir.join("bundle");
        std::fs::create_dir_all(&bundle).unwrap();
        let script = format!(
            "rootfs='{}'; mount --bind \"$rootfs\" \"$rootfs\"; mount -t tmpfs -o nosuid dev \"$rootfs/dev\"; \
             {before}\n echo ready; exec sleep 600",
            rootfs.display()
        );
        let mut init = Command::new("unshare")
            .args(["--mount", "--propagation", "private", "sh", "-euc", &script])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(init.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        assert_eq!(line, "ready\n");
        let waiting = Self {
            init,
            rootfs: rootfs.to_owned(),
            bundle,
            _dir: None,
        };
        waiting.set_env(env);
        waiting
    }

    /// Writes config.json again.
    pub fn set_env(&self, env: &[&str]) {
        self.set_process(env, &[]);
    }

    /// Writes config.json of a privileged container.
    pub fn set_privileged_env(&self, env: &[&str]) {
        self.set_process(env, &["CAP_SYS_ADMIN"]);
    }

    /// Writes config.json again, with additional fields.
    pub fn set_spec(&self, env: &[&str], more: &serde_json::Value) {
        self.write_spec(env, &[], more);
    }

    fn set_process(&self, env: &[&str], bounding: &[&str]) {
        self.write_spec(env, bounding, &serde_json::json!({}));
    }

    fn write_spec(&self, env: &[&str], bounding: &[&str], more: &serde_json::Value) {
        let process =
            serde_json::json!({"args": ["sh"], "env": env, "capabilities": {"bounding": bounding}});
        let mut spec = serde_json::json!({
            "ociVersion": "1.0.2", "process": process, "root": {"path": self.rootfs},
        });
        let fields = spec.as_object_mut().unwrap();
        fields.extend(
            more.as_object()
                .unwrap()
                .iter()
                .map(|(name, value)| (name.clone(), value.clone())),
        );
        write_file(self.bundle.join("config.json"), spec.to_string());
    }

    pub fn state(&self) -> String {
        serde_json::json!({"id": "waiting", "pid": self.init.id(), "bundle": self.bundle})
            .to_string()
    }

    /// Calls the hook for the container, like an engine.
    pub fn hook(&self, config: &Path) -> Ran {
        self.call(&mut hook_command(), config)
    }

    /// Calls another program for the container.
    pub fn call(&self, hook: &mut Command, config: &Path) -> Ran {
        run_with(
            hook.arg("--config").arg(config).arg("prestart").env_clear(),
            self.state().as_bytes(),
        )
    }

    /// Returns the directory of its bundle and image.
    pub fn dir(&self) -> &Path {
        self.bundle.parent().unwrap()
    }

    /// Returns its process id in the host's PID namespace.
    pub fn pid(&self) -> u32 {
        self.init.id()
    }

    /// Sets a field of config.json.
    pub fn set_spec_field(&self, field: &str, value: serde_json::Value) {
        let path = self.bundle.join("config.json");
        let mut spec: serde_json::Value =
            serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        spec[field] = value;
        write_file(path, spec.to_string());
    }

    /// Adds hook entries to config.json, like an engine for a CDI device.
    pub fn set_hooks(&self, stage: &str, hooks: &serde_json::Value) {
        self.set_spec_field("hooks", serde_json::json!({ stage: hooks }));
    }

    /// Starts the program with these arguments, like runtimes at the createRuntime stage.
    pub fn create_runtime_hook(&self, args: &[String]) -> Ran {
        let mut hook = crate::kernels::hook_command();
        hook.args(args).env_clear();
        run_with(
            hook.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"),
            self.state().as_bytes(),
        )
    }

    /// Starts the program like runc at the createContainer stage: in the container's mount namespace, while the host's root is
    /// still visible, with a process id of the container's PID namespace.
    pub fn create_container_hook(&self, args: &[String]) -> Ran {
        self.create_container_program(Path::new(HOOK), args)
    }

    /// Does the same with the program under another name.
    pub fn create_container_program(&self, program: &Path, args: &[String]) -> Ran {
        let mut state: serde_json::Value = serde_json::from_str(&self.state()).unwrap();
        state["pid"] = 1.into();
        let mut enter = Command::new("nsenter");
        enter
            .args(["-m", "-t", &self.init.id().to_string()])
            .arg(program)
            .args(args)
            .env_clear();
        run_with(
            enter.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"),
            state.to_string().as_bytes(),
        )
    }

    /// Runs a program like the container's process: in its namespace, with the rootfs as root.
    pub fn exec(&self, script: &str) -> Ran {
        let pid = self.init.id().to_string();
        let mut enter = Command::new("nsenter");
        enter
            .args(["-m", "-t", &pid, "chroot"])
            .arg(&self.rootfs)
            .args(["/bin/sh", "-c", script]);
        run(&mut enter)
    }

    /// Runs a program in the same way, which must end with success. Returns its stdout.
    #[track_caller]
    pub fn output(&self, script: &str) -> String {
        self.exec(script).ok()
    }

    /// Its mount table.
    pub fn mountinfo(&self) -> String {
        read(format!("/proc/{}/mountinfo", self.init.id()))
    }

    /// The options of the mount at this path in the container.
    #[track_caller]
    pub fn mount_options(&self, path: &str) -> String {
        let point = format!("{}{path}", self.rootfs.display());
        let info = self.mountinfo();
        let line = info
            .lines()
            .rfind(|line| line.split(' ').nth(4) == Some(&point));
        line.unwrap_or_else(|| panic!("no mount at {point} in\n{info}"))
            .split(' ')
            .nth(5)
            .unwrap()
            .to_owned()
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.init.kill().ok();
        self.init.wait().ok();
    }
}
