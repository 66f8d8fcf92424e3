//! A container as CRI-O starts it, for the limits of a start (budget) and for the measurements of `make bench`: its config.json, an overlay
//! as root file system, and on cgroup v1 a cgroup that denies all devices.

use std::ops::Deref;
use std::path::{Path, PathBuf};

use crate::driver::{MASKABLE_PROC, Waiting};
use crate::support::{shell, write_file};

/// A config.json that CRI-O wrote, for the size and the mounts of a real one.
const CONFIG_JSON: &str = include_str!("../fixtures/captures/crio-prestart/config.json");
/// The controller of devices on cgroup v1.
const DEVICES: &str = "/sys/fs/cgroup/devices";

/// A container that waits for the hook.
#[derive(Debug)]
pub struct CriContainer {
    waiting: Waiting,
    _cgroup: Option<Cgroup>,
}

impl Deref for CriContainer {
    type Target = Waiting;

    fn deref(&self) -> &Waiting {
        &self.waiting
    }
}

impl CriContainer {
    /// Starts a container of an image in `dir` that requests all GPUs, see [`Self::start_with`].
    pub fn start(dir: &Path, image: &Path, mount: &str) -> Self {
        Self::start_with(dir, image, mount, "all")
    }

    /// Starts a container of an image in `dir`, which must be a new directory, with these visible devices. The script `mount` mounts the
    /// file system of the writable layer at `$layer`.
    pub fn start_with(dir: &Path, image: &Path, mount: &str, visible: &str) -> Self {
        let rootfs = dir.join("merged");
        std::fs::create_dir_all(rootfs.join("dev")).unwrap();
        let waiting = Waiting::start(dir, &rootfs, &[], &overlay(dir, image, mount));
        let mut spec: serde_json::Value = serde_json::from_str(CONFIG_JSON).unwrap();
        spec["root"]["path"] = serde_json::json!(rootfs);
        let visible = format!("NVIDIA_VISIBLE_DEVICES={visible}");
        spec["process"]["env"] = serde_json::json!(["PATH=/usr/bin:/bin", visible]);
        spec["linux"]["cgroupsPath"] = Cgroup::name(&waiting).into();
        write_file(waiting.bundle.join("config.json"), spec.to_string());
        let cgroup = Cgroup::of(&waiting);
        Self {
            waiting,
            _cgroup: cgroup,
        }
    }

    /// Returns the container's state for the hook's stdin. Each container has its own id, so that none continues the record of another.
    pub fn state(&self) -> String {
        let id = format!("container-{}", self.pid());
        serde_json::json!({"id": id, "pid": self.pid(), "bundle": self.bundle}).to_string()
    }
}

/// Returns the script that mounts an overlay with a writable layer on the image, like an engine, at `$rootfs`.
pub fn overlay(dir: &Path, image: &Path, mount: &str) -> String {
    format!(
        "layer='{dir}/layer'; mkdir $layer; {mount}; mkdir $layer/upper $layer/work; \
         mount -t overlay -o lowerdir='{image}',upperdir=$layer/upper,workdir=$layer/work overlay \"$rootfs\"; \
         mount -t tmpfs -o nosuid dev \"$rootfs/dev\"; {MASKABLE_PROC}",
        dir = dir.display(),
        image = image.display(),
    )
}

/// A cgroup of cgroup v1 that denies all devices to its process. It is removed with the value, after the process has ended.
#[derive(Debug)]
struct Cgroup(PathBuf);

impl Cgroup {
    /// Returns the name in config.json.
    fn name(container: &Waiting) -> String {
        format!("/scene-{}", container.pid())
    }

    /// Puts a container into a new cgroup. Returns `None` if this machine has only cgroup v2.
    fn of(container: &Waiting) -> Option<Self> {
        if !Path::new(DEVICES).is_dir() {
            return None;
        }
        let pid = container.pid();
        let path = PathBuf::from(format!("{DEVICES}{}", Self::name(container)));
        std::fs::create_dir(&path).unwrap();
        shell!(
            "cd '{}'; echo a >devices.deny; echo {pid} >cgroup.procs",
            path.display()
        );
        Some(Self(path))
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        std::fs::remove_dir(&self.0).ok();
    }
}
