//! Creates images with many libraries, and containers that wait for the hook.

use std::cell::Cell;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::measure::{self, Took};
use crate::driver::{FakeDriver, Image, Waiting};
use crate::support::{HOOK, run, sh};

/// The directory of the measurements.
pub struct Scene {
    pub dir: tempfile::TempDir,
    made: Cell<usize>,
}

impl Scene {
    pub fn new() -> Self {
        Self { dir: crate::support::scratch(), made: Cell::new(0) }
    }

    /// Creates a small image with additional libraries, each with its own SONAME, and updates its linker cache.
    pub fn image(&self, libraries: usize) -> PathBuf {
        let image = Image::new(&self.dir.path().join(format!("of-{libraries}")), &["--layout", "debian"]);
        let source = self.dir.path().join("library.c");
        std::fs::write(&source, "int answer(void) { return 42; }\n").unwrap();
        let library = self.dir.path().join("library.so");
        let mut cc = Command::new("cc");
        cc.args(["-shared", "-fPIC", "-nostdlib", "-s", "-Wl,-z,noseparate-code,-soname,libmany00000.so.1", "-o"]);
        run(cc.arg(&library).arg(&source)).ok();
        let bytes = std::fs::read(&library).unwrap();
        let at = bytes.windows(12).position(|part| part == b"libmany00000").unwrap();
        for number in 0..libraries {
            let name = format!("libmany{number:05}");
            let mut bytes = bytes.clone();
            bytes[at..at + name.len()].copy_from_slice(name.as_bytes());
            let file = image.rootfs.join("usr/lib/x86_64-linux-gnu").join(format!("{name}.so.1"));
            std::fs::write(file, bytes).unwrap();
        }
        run(Command::new("/sbin/ldconfig").arg("-r").arg(&image.rootfs)).ok();
        image.rootfs
    }

    /// Creates a container like an engine: an overlay with a writable layer on the image.
    pub fn container(&self, image: &Path) -> Waiting {
        self.made.set(self.made.get() + 1);
        let dir = self.dir.path().join(format!("container-{}", self.made.get()));
        let rootfs = dir.join("merged");
        std::fs::create_dir_all(rootfs.join("dev")).unwrap();
        let layer = format!(
            "layer='{dir}/layer'; mkdir $layer; mount -t tmpfs layer $layer; mkdir $layer/upper $layer/work; \
             mount -t overlay -o lowerdir='{image}',upperdir=$layer/upper,workdir=$layer/work overlay \"$rootfs\"; \
             mount -t tmpfs -o nosuid dev \"$rootfs/dev\"; {proc}",
            dir = dir.display(),
            image = image.display(),
            proc = crate::driver::MASKABLE_PROC
        );
        Waiting::start(&dir, &rootfs, &["NVIDIA_VISIBLE_DEVICES=all"], &layer)
    }

    /// Writes the container's state for the hook's stdin to a file.
    pub fn state(&self, container: &Waiting) -> PathBuf {
        let file = self.dir.path().join(format!("state-{}", container.pid()));
        std::fs::write(&file, container.state()).unwrap();
        file
    }

    /// Returns the command of the hook for a container.
    pub fn hook(&self, container: &Waiting, fake: &FakeDriver) -> Command {
        self.hook_of(HOOK, container, fake)
    }

    fn hook_of(&self, program: &str, container: &Waiting, fake: &FakeDriver) -> Command {
        let state = self.state(container);
        let mut hook = Command::new(program);
        hook.arg("--config").arg(&fake.config).arg("prestart").env_clear().stdin(File::open(state).unwrap());
        hook
    }

    /// Measures the start of a container.
    pub fn start(&self, image: &Path, fake: &FakeDriver) -> Took {
        self.start_with(HOOK, image, fake)
    }

    /// Measures the start of a container with another build of the hook.
    pub fn start_with(&self, program: &str, image: &Path, fake: &FakeDriver) -> Took {
        let container = self.container(image);
        measure::time(&mut self.hook_of(program, &container, fake))
    }

    /// Measures the start of several containers at the same time.
    pub fn start_all(&self, count: usize, image: &Path, fake: &FakeDriver) -> Took {
        let containers: Vec<_> = (0..count).map(|_| self.container(image)).collect();
        measure::time_all(containers.iter().map(|container| self.hook(container, fake)).collect())
    }

    /// Returns the command of the hook for a container without a request, with about `bytes` bytes of mounts in config.json.
    pub fn no_request(&self, bytes: usize) -> Command {
        let bundle = self.dir.path().join(format!("bundle-{bytes}"));
        std::fs::create_dir_all(&bundle).unwrap();
        let mounts: Vec<_> = (0..bytes / 100)
            .map(|n| serde_json::json!({"destination": format!("/m/{n:040}"), "source": "/s", "options": ["ro"]}))
            .collect();
        let process = serde_json::json!({"args": ["sh"], "env": ["PATH=/bin"]});
        let spec =
            serde_json::json!({"ociVersion": "1.0.2", "process": process, "root": {"path": "/r"}, "mounts": mounts});
        std::fs::write(bundle.join("config.json"), spec.to_string()).unwrap();
        let state = bundle.join("state");
        std::fs::write(&state, serde_json::json!({"id": "x", "pid": 1, "bundle": bundle}).to_string()).unwrap();
        let mut hook = Command::new(HOOK);
        hook.arg("prestart").env_clear().stdin(File::open(state).unwrap());
        hook
    }
}

/// Removes the cached inventory of this driver.
pub fn forget(fake: &FakeDriver) {
    sh(&format!("grep -l '{}' /run/oci-nvidia-hook/inventory-* | xargs -r rm -f", fake.root.display())).ok();
}
