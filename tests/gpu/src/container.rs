//! Containers of the small image, started by an OCI runtime without an engine.

use std::path::{Path, PathBuf};
use std::time::Duration;

use cdi_spec::spec::ContainerEdits;
use rustix::mount::{MountFlags, UnmountFlags};
use serde_json::{Value, json};

use crate::options::Options;
use crate::process::{self, Ran, Started};

/// The id of the host that is root in a user namespace.
const FIRST_ID: u32 = 100_000;

/// The capabilities of a container of Podman.
const CAPABILITIES: [&str; 11] = [
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_NET_BIND_SERVICE",
    "CAP_SETFCAP",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_SETUID",
    "CAP_SYS_CHROOT",
];

/// How long a container without a GPU may take.
const BASELINE: Duration = Duration::from_secs(20);

/// A runtime that starts containers on this machine.
#[derive(Clone, Debug)]
pub struct Runtime {
    program: PathBuf,
    /// Its first line of `--version`
    pub version: String,
}

impl Runtime {
    /// Finds the first runtime that starts a container without a GPU: the runtime of the option, of the kit, or of the machine.
    ///
    /// # Errors
    /// Why each of them failed.
    pub fn find(options: &Options, work: &Path) -> Result<Self, String> {
        let named = options.runtime.clone();
        let others = [
            Some(options.program("runc")),
            process::find("runc"),
            process::find("crun"),
        ];
        let candidates: Vec<_> = match named {
            Some(named) => vec![named],
            None => others
                .into_iter()
                .flatten()
                .filter(|path| path.is_file())
                .collect(),
        };
        let mut errors = Vec::new();
        for program in candidates {
            let tried = Self::at(&program, work).and_then(|runtime| {
                let container = Container::new("baseline", &runtime, options, work, BASELINE);
                container
                    .args(&["true"])
                    .run()?
                    .ok()
                    .map_err(|error| format!("it starts no container: {error}"))?;
                Ok(runtime)
            });
            match tried {
                Ok(runtime) => return Ok(runtime),
                Err(error) => errors.push(format!("{}: {error}", program.display())),
            }
        }
        errors.dedup();
        Err(if errors.is_empty() {
            "there is no OCI runtime".to_owned()
        } else {
            errors.join("; ")
        })
    }

    fn at(program: &Path, work: &Path) -> Result<Self, String> {
        let text = process::run(
            process::command(program).arg("--version"),
            b"",
            work,
            BASELINE,
        )?
        .ok()?;
        Ok(Self {
            program: program.to_owned(),
            version: text.lines().next().unwrap_or_default().to_owned(),
        })
    }
}

/// A container that is not started yet.
#[derive(Clone, Debug)]
pub struct Container<'a> {
    id: String,
    runtime: &'a Runtime,
    options: &'a Options,
    work: &'a Path,
    limit: Duration,
    args: Vec<String>,
    env: Vec<String>,
    /// config.toml of the hook at prestart; none without the hook
    hook: Option<PathBuf>,
    edits: ContainerEdits,
    user: u32,
    is_read_only: bool,
    has_user_namespace: bool,
    may_create_nodes: bool,
}

impl<'a> Container<'a> {
    pub fn new(
        name: &str,
        runtime: &'a Runtime,
        options: &'a Options,
        work: &'a Path,
        limit: Duration,
    ) -> Self {
        Self {
            id: format!("{}-{name}", prefix(work)),
            runtime,
            options,
            work,
            limit,
            args: Vec::new(),
            env: Vec::new(),
            hook: None,
            edits: ContainerEdits::default(),
            user: 0,
            is_read_only: false,
            has_user_namespace: false,
            may_create_nodes: false,
        }
    }

    pub fn id(&self) -> &str {
        &self.id
    }

    pub fn args(mut self, args: &[&str]) -> Self {
        self.args = args.iter().map(|word| (*word).to_owned()).collect();
        self
    }

    /// Requests GPUs with the variable, from the hook with this config.toml.
    pub fn gpus(mut self, devices: &str, config: &Path) -> Self {
        self.env.push(format!("NVIDIA_VISIBLE_DEVICES={devices}"));
        self.env
            .push("NVIDIA_DRIVER_CAPABILITIES=compute,utility".to_owned());
        self.hook = Some(config.to_owned());
        self
    }

    /// Applies the edits of CDI devices.
    pub fn edits(mut self, edits: ContainerEdits) -> Self {
        self.edits = self.edits.merge(edits);
        self
    }

    pub const fn user(mut self, user: u32) -> Self {
        self.user = user;
        self
    }

    pub const fn read_only(mut self) -> Self {
        self.is_read_only = true;
        self
    }

    pub const fn user_namespace(mut self) -> Self {
        self.has_user_namespace = true;
        self
    }

    /// Adds CAP_MKNOD.
    pub const fn create_nodes(mut self) -> Self {
        self.may_create_nodes = true;
        self
    }

    /// Runs the container to its end, and removes it.
    ///
    /// # Errors
    /// If the bundle cannot be created, or the container does not end in time.
    pub fn run(&self) -> Result<Ran, String> {
        self.start()?.wait(self.limit)
    }

    /// Starts the container.
    ///
    /// # Errors
    /// If the bundle cannot be created, or the runtime cannot be started.
    pub fn start(&self) -> Result<Running<'a>, String> {
        let bundle = Bundle::create(self)?;
        let mut start = self.command();
        start
            .args(["run", "--bundle"])
            .arg(&bundle.dir)
            .arg(&self.id);
        let started = process::start(&mut start, b"", self.work)?;
        Ok(Running {
            started: Some(started),
            container: self.clone(),
            _bundle: bundle,
        })
    }

    fn command(&self) -> std::process::Command {
        let mut command = process::command(&self.runtime.program);
        command.arg("--root").arg(self.work.join("runtime"));
        command
    }

    fn config(&self, rootfs: &Path) -> Result<Value, String> {
        let mut capabilities: Vec<_> = CAPABILITIES.to_vec();
        if self.may_create_nodes {
            capabilities.push("CAP_MKNOD");
        }
        let mut env = vec!["PATH=/usr/sbin:/usr/bin:/sbin:/bin".to_owned()];
        env.extend(self.env.iter().cloned());
        let mut namespaces = vec!["pid", "ipc", "uts", "mount"];
        if self.has_user_namespace {
            namespaces.push("user");
        }
        let mount = |to: &str, kind: &str, options: &[&str]| json!({"destination": to, "type": kind, "source": kind, "options": options});
        let mut config = json!({
            "ociVersion": "1.0.2",
            "process": {
                "terminal": false,
                "user": {"uid": self.user, "gid": self.user},
                "args": self.args,
                "env": env,
                "cwd": "/",
                "capabilities": {"bounding": capabilities, "effective": capabilities, "permitted": capabilities},
                "noNewPrivileges": true,
            },
            "root": {"path": rootfs, "readonly": self.is_read_only},
            "hostname": "container",
            "mounts": [
                mount("/proc", "proc", &["nosuid", "noexec", "nodev"]),
                mount("/dev", "tmpfs", &["nosuid", "strictatime", "mode=755", "size=65536k"]),
                mount("/dev/pts", "devpts", &["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"]),
                mount("/dev/shm", "tmpfs", &["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"]),
                {"destination": "/sys", "type": "none", "source": "/sys", "options": ["rbind", "nosuid", "noexec", "nodev", "ro"]},
            ],
            "linux": {
                "namespaces": namespaces.iter().map(|kind| json!({"type": kind})).collect::<Vec<_>>(),
                "cgroupsPath": format!("/{}", self.id),
                "resources": {"devices": [{"allow": false, "access": "rwm"}]},
            },
        });
        if self.has_user_namespace {
            let map = json!([{"containerID": 0, "hostID": FIRST_ID, "size": 65536}]);
            config["linux"]["uidMappings"] = map.clone();
            config["linux"]["gidMappings"] = map;
        }
        if let Some(toml) = &self.hook {
            let hook = self.options.program("oci-nvidia-hook");
            let args = json!(["oci-nvidia-hook", "--config", toml, "prestart"]);
            config["hooks"]["prestart"] =
                json!([{"path": hook, "args": args, "env": [format!("PATH={}", process::PATH)]}]);
        }
        crate::cdi::apply(&mut config, &self.edits)?;
        Ok(config)
    }
}

/// A container that was started. Dropping it ends and removes it.
#[derive(Debug)]
pub struct Running<'a> {
    started: Option<Started>,
    container: Container<'a>,
    _bundle: Bundle,
}

impl Running<'_> {
    /// Waits until the container has printed `text`, or has ended.
    pub fn wait_for(&mut self, text: &str, limit: Duration) -> bool {
        let started = self.started.as_mut();
        started.is_some_and(|started| started.wait_for(text, limit))
    }

    /// Waits for the end of the container.
    ///
    /// # Errors
    /// If it does not end in time.
    pub fn wait(mut self, limit: Duration) -> Result<Ran, String> {
        let Some(started) = self.started.take() else {
            return Err("the container has ended".to_owned());
        };
        let ran = started.wait(limit);
        // The runtime has removed a container that succeeded.
        if !ran.as_ref().is_ok_and(|ran| ran.status.success()) {
            self.delete();
        }
        ran
    }

    /// Kills all processes of the container.
    ///
    /// # Errors
    /// If the runtime fails.
    pub fn kill(&self) -> Result<(), String> {
        let mut kill = self.container.command();
        kill.args(["kill", &self.container.id, "KILL"]);
        let ran = process::run(&mut kill, b"", self.container.work, BASELINE)?;
        ran.ok().map(drop)
    }

    fn delete(&self) {
        let mut delete = self.container.command();
        delete.args(["delete", "--force", &self.container.id]);
        process::run(&mut delete, b"", self.container.work, BASELINE).ok();
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        if let Some(mut started) = self.started.take() {
            self.delete();
            started.kill();
        }
    }
}

/// The directory with config.json, and a root file system that the container can change.
#[derive(Debug)]
struct Bundle {
    dir: PathBuf,
    has_overlay: bool,
}

impl Bundle {
    fn create(container: &Container<'_>) -> Result<Self, String> {
        let dir = container.work.join(&container.id);
        let image = container.options.kit.join("image");
        let rootfs = dir.join("rootfs");
        for name in ["rootfs", "upper", "layer"] {
            std::fs::create_dir_all(dir.join(name))
                .map_err(|error| format!("cannot create {dir:?}: {error}"))?;
        }
        let mut bundle = Self {
            dir,
            has_overlay: false,
        };
        let options = format!(
            "lowerdir={},upperdir={},workdir={}",
            image.display(),
            bundle.dir.join("upper").display(),
            bundle.dir.join("layer").display()
        );
        let options = std::ffi::CString::new(options).map_err(|error| error.to_string())?;
        let mount = || {
            rustix::mount::mount(
                "overlay",
                &rootfs,
                "overlay",
                MountFlags::empty(),
                options.as_c_str(),
            )
        };
        if container.has_user_namespace {
            // Like an engine: the files belong to root of the container, for which the runtime creates mount points.
            copy(&image, &rootfs, container)?;
            chown(&rootfs, container)?;
        } else if mount().is_ok() {
            bundle.has_overlay = true;
        } else {
            // A kernel without overlayfs, or one that refuses the file system of the kit
            copy(&image, &rootfs, container)?;
        }
        let config = container.config(&rootfs)?.to_string();
        let path = bundle.dir.join("config.json");
        std::fs::write(&path, config).map_err(|error| format!("cannot write {path:?}: {error}"))?;
        Ok(bundle)
    }
}

fn copy(image: &Path, rootfs: &Path, container: &Container<'_>) -> Result<(), String> {
    let mut copy = process::command("cp");
    copy.arg("-a").arg(image.join(".")).arg(rootfs);
    process::run(&mut copy, b"", container.work, container.limit)?
        .ok()
        .map(drop)
}

/// Gives all files to root of the user namespace.
fn chown(rootfs: &Path, container: &Container<'_>) -> Result<(), String> {
    let mut chown = process::command("chown");
    chown
        .args(["-hR", &format!("{FIRST_ID}:{FIRST_ID}")])
        .arg(rootfs);
    process::run(&mut chown, b"", container.work, container.limit)?
        .ok()
        .map(drop)
}

impl Drop for Bundle {
    fn drop(&mut self) {
        if self.has_overlay {
            rustix::mount::unmount(self.dir.join("rootfs"), UnmountFlags::DETACH).ok();
        }
        std::fs::remove_dir_all(&self.dir).ok();
    }
}

/// Returns the first part of the ids of the containers, and of the names of their cgroups: the name of the directory, which no other
/// run of the checks has.
fn prefix(work: &Path) -> String {
    work.file_name()
        .map(|name| name.to_string_lossy().into_owned())
        .unwrap_or_default()
}

/// Returns the cgroups that containers of the checks left.
pub fn leftover_cgroups(work: &Path) -> Vec<PathBuf> {
    let list = |dir: &Path| {
        std::fs::read_dir(dir)
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| entry.path())
            .collect::<Vec<_>>()
    };
    let top = list(Path::new("/sys/fs/cgroup"));
    let below = top
        .iter()
        .filter(|path| path.is_dir())
        .flat_map(|dir| list(dir))
        .collect::<Vec<_>>();
    let prefix = prefix(work);
    let is_ours = |path: &PathBuf| {
        path.file_name()
            .is_some_and(|name| name.to_string_lossy().starts_with(&prefix))
    };
    top.into_iter().chain(below).filter(is_ours).collect()
}
