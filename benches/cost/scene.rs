//! Creates images with many libraries, and containers that wait for the hook.

use std::cell::Cell;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use super::measure::{self, Took};
use crate::cri_scene::CriContainer;
use crate::driver::{FakeDriver, Image};
use crate::support::{HOOK, run, sh};

/// Returns the path of a copy of a program, which is written like the file of a package. The linker writes a program through a mapping, and
/// of such a file the kernel maps fewer pages at once: a start of this build would have 20 page faults more than one of a copied build.
/// The program that loads NVML is copied with it, if there is one in its directory: builds from before it loaded NVML themselves.
pub fn installed(program: &str) -> String {
    let program = Path::new(program);
    let name = program.display().to_string().replace('/', "-");
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("installed{name}"));
    std::fs::create_dir_all(&dir).unwrap();
    let nvml = program.with_file_name("oci-nvidia-nvml");
    for file in [program, &nvml].into_iter().filter(|file| file.exists()) {
        run(Command::new("cp").arg("--reflink=never").args([file, &dir])).ok();
    }
    let copy = dir.join(program.file_name().unwrap());
    copy.to_str().unwrap().to_owned()
}

/// Returns the path of this build of the hook.
pub fn hook() -> &'static str {
    static INSTALLED: OnceLock<String> = OnceLock::new();
    INSTALLED.get_or_init(|| installed(HOOK))
}

/// A file system of a disk. Without a journal, as `/` of some virtual machines, ext4 checks for each new inode which ones were deleted
/// recently (`recently_deleted` in fs/ext4/ialloc.c), and the end of a container deletes dozens.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum FileSystem {
    Ext4,
    Xfs,
    Btrfs,
}

impl FileSystem {
    pub const ALL: [Self; 3] = [Self::Ext4, Self::Xfs, Self::Btrfs];

    pub fn name(self) -> &'static str {
        match self {
            Self::Ext4 => "ext4",
            Self::Xfs => "xfs",
            Self::Btrfs => "btrfs",
        }
    }

    fn mkfs(self) -> &'static str {
        match self {
            Self::Ext4 => "mkfs.ext4 -q -F -O has_journal -N 600000",
            Self::Xfs => "mkfs.xfs -q -f",
            Self::Btrfs => "mkfs.btrfs -q -f",
        }
    }
}

/// A file system in a file on the disk of the build directory.
pub struct Disk {
    pub kind: FileSystem,
    pub dir: PathBuf,
    /// Commits of the journal while programs ran that are measured
    pub commits_during_starts: Cell<u64>,
    _file: tempfile::TempDir,
}

impl Disk {
    /// Creates the file system, and mounts it in the namespace of this process.
    pub fn new(kind: FileSystem) -> Self {
        let dir = crate::support::scratch();
        let path = dir.path().display();
        sh(&format!(
            "truncate -s 2G '{path}/image'; {mkfs} '{path}/image'; mkdir '{path}/disk'; \
             mount -o loop '{path}/image' '{path}/disk'",
            mkfs = kind.mkfs()
        ))
        .ok();
        Self {
            kind,
            dir: dir.path().join("disk"),
            commits_during_starts: Cell::default(),
            _file: dir,
        }
    }

    /// Returns how many transactions the journal of ext4 has committed. Fails on an ext4 without a journal.
    pub fn commits(&self) -> u64 {
        if self.kind != FileSystem::Ext4 {
            return 0;
        }
        let device = sh(&format!("findmnt -no SOURCE '{}'", self.dir.display())).ok();
        let name = device.trim().trim_start_matches("/dev/").to_owned();
        let info = std::fs::read_to_string(format!("/proc/fs/jbd2/{name}-8/info")).unwrap();
        info.split_whitespace().next().unwrap().parse().unwrap()
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        sh(&format!("umount '{}'", self.dir.display())).ok();
    }
}

/// What a start leaves in the writable layer of a container.
pub struct Names {
    /// Files and links
    pub files: usize,
    /// Directories that the image lacks
    pub directories: usize,
    /// Directories of the image
    pub copied: usize,
    /// A file with a line for each: type, path and, of a link, the text
    pub list: PathBuf,
}

/// Creates the names of the file `list` in the root file system of a process. A program of its own runs this, because it changes the
/// namespace.
pub fn create(pid: &str, rootfs: &Path, list: &Path) {
    let list = std::fs::read_to_string(list).unwrap();
    let namespace = File::open(format!("/proc/{pid}/ns/mnt")).unwrap();
    nix::sched::setns(namespace, nix::sched::CloneFlags::CLONE_NEWNS).unwrap();
    for line in list.lines() {
        let mut fields = line.split(' ');
        let (kind, path, text) = (
            fields.next().unwrap(),
            rootfs.join(fields.next().unwrap()),
            fields.next(),
        );
        match kind {
            "d" => std::fs::create_dir(path).unwrap(),
            "l" => std::os::unix::fs::symlink(text.unwrap(), path).unwrap(),
            _ if path.exists() => std::fs::write(path, [0; 16384]).unwrap(),
            _ => nix::sys::stat::mknod(
                &path,
                nix::sys::stat::SFlag::S_IFREG,
                nix::sys::stat::Mode::from_bits_truncate(0o644),
                0,
            )
            .unwrap(),
        }
    }
}

/// Where the writable layer of a container is.
#[derive(Clone, Copy)]
pub enum Layer<'a> {
    Tmpfs,
    Disk(&'a Disk),
}

/// The directory of the measurements.
pub struct Scene {
    dir: tempfile::TempDir,
    made: Cell<usize>,
}

impl Scene {
    pub fn new() -> Self {
        Self {
            dir: crate::support::scratch(),
            made: Cell::new(0),
        }
    }

    /// Creates a small image with additional libraries, each with its own SONAME, and updates its linker cache.
    pub fn image(&self, libraries: usize) -> PathBuf {
        let image = Image::new(
            &self.dir.path().join(format!("of-{libraries}")),
            &["--layout", "debian"],
        );
        let source = self.dir.path().join("library.c");
        std::fs::write(&source, "int answer(void) { return 42; }\n").unwrap();
        let library = self.dir.path().join("library.so");
        let mut cc = Command::new("cc");
        cc.args([
            "-shared",
            "-fPIC",
            "-nostdlib",
            "-s",
            "-Wl,-z,noseparate-code,-soname,libmany00000.so.1",
            "-o",
        ]);
        run(cc.arg(&library).arg(&source)).ok();
        let bytes = std::fs::read(&library).unwrap();
        let at = bytes
            .windows(12)
            .position(|part| part == b"libmany00000")
            .unwrap();
        for number in 0..libraries {
            let name = format!("libmany{number:05}");
            let mut bytes = bytes.clone();
            bytes[at..at + name.len()].copy_from_slice(name.as_bytes());
            let file = image
                .rootfs
                .join("usr/lib/x86_64-linux-gnu")
                .join(format!("{name}.so.1"));
            std::fs::write(file, bytes).unwrap();
        }
        run(Command::new("/sbin/ldconfig").arg("-r").arg(&image.rootfs)).ok();
        image.rootfs
    }

    /// Creates a small image on the disk, with the names of all files of this host's distribution in addition, because the cost of a
    /// new name depends on the directory.
    pub fn distribution(&self, disk: &Disk) -> PathBuf {
        let image = Image::new(&disk.dir, &["--layout", "debian"]).rootfs;
        let script = "cd /; for kind in d f; do \
                          find usr etc -xdev -name .git -prune -o -type $kind -print0 | \
                              (cd \"$image\"; case $kind in d) xargs -0 mkdir -p;; f) xargs -0 touch;; esac); \
                      done";
        sh(&format!("image='{}'; {script}", image.display())).ok();
        // The copy has filled the kernel's caches of names and inodes. Their hash tables are small on some virtual machines, so each
        // lookup would search a long chain.
        sh("sync; echo 2 >/proc/sys/vm/drop_caches").ok();
        image
    }

    /// Creates a container like an engine: an overlay with a writable layer on the image.
    pub fn container(&self, image: &Path, at: Layer<'_>) -> CriContainer {
        self.container_with(image, at, "all")
    }

    /// The same with these visible devices.
    fn container_with(&self, image: &Path, at: Layer<'_>, visible: &str) -> CriContainer {
        self.made.set(self.made.get() + 1);
        let (parent, mount) = match at {
            Layer::Tmpfs => (self.dir.path(), "mount -t tmpfs layer $layer"),
            Layer::Disk(disk) => (disk.dir.as_path(), "true"),
        };
        let dir = parent.join(format!("container-{}", self.made.get()));
        let container = CriContainer::start_with(&dir, image, mount, visible);
        // The records of earlier containers, which no poststop hook removes here.
        sh("rm -f /run/oci-nvidia-hook/containers/*").ok();
        container
    }

    /// Writes the container's state for the hook's stdin to a file.
    pub fn state(&self, container: &CriContainer) -> PathBuf {
        let file = self.dir.path().join(format!("state-{}", container.pid()));
        std::fs::write(&file, container.state()).unwrap();
        file
    }

    /// Returns the command of the hook for a container.
    pub fn hook(&self, container: &CriContainer, fake: &FakeDriver) -> Command {
        self.hook_of(hook(), container, fake)
    }

    fn hook_of(&self, program: &str, container: &CriContainer, fake: &FakeDriver) -> Command {
        let state = self.state(container);
        let mut hook = Command::new(program);
        hook.arg("--config")
            .arg(&fake.config)
            .arg("prestart")
            .env_clear()
            .stdin(File::open(state).unwrap());
        hook
    }

    /// Measures the start of a container.
    pub fn start(&self, image: &Path, fake: &FakeDriver) -> Took {
        self.start_with(hook(), image, Layer::Tmpfs, fake)
    }

    /// Measures the start of a container, with another build of the hook or on a disk.
    pub fn start_with(
        &self,
        program: &str,
        image: &Path,
        at: Layer<'_>,
        fake: &FakeDriver,
    ) -> Took {
        let container = self.container(image, at);
        measure::time(&mut self.hook_of(program, &container, fake))
    }

    /// Measures the start of a container with one device.
    pub fn start_one(&self, program: &str, image: &Path, fake: &FakeDriver, device: &str) -> Took {
        let container = self.container_with(image, Layer::Tmpfs, device);
        measure::time(&mut self.hook_of(program, &container, fake))
    }

    /// Measures the start of several containers at the same time.
    pub fn start_all(&self, count: usize, image: &Path, at: Layer<'_>, fake: &FakeDriver) -> Took {
        self.start_all_with(hook(), count, image, at, fake)
    }

    /// The same with another build of the hook.
    pub fn start_all_with(
        &self,
        program: &str,
        count: usize,
        image: &Path,
        at: Layer<'_>,
        fake: &FakeDriver,
    ) -> Took {
        self.all(count, image, at, |container| {
            self.hook_of(program, container, fake)
        })
    }

    /// Measures a program that only creates these names, in several containers at the same time.
    pub fn create_all(&self, count: usize, image: &Path, at: Layer<'_>, names: &Path) -> Took {
        self.all(count, image, at, |container| {
            let mut stand_in = Command::new(std::env::current_exe().unwrap());
            stand_in
                .arg("--create")
                .arg(container.pid().to_string())
                .arg(&container.rootfs)
                .arg(names);
            stand_in
        })
    }

    fn all(
        &self,
        count: usize,
        image: &Path,
        at: Layer<'_>,
        command: impl Fn(&CriContainer) -> Command,
    ) -> Took {
        let containers: Vec<_> = (0..count).map(|_| self.container(image, at)).collect();
        let commands = containers.iter().map(command).collect();
        let commits = || {
            if let Layer::Disk(disk) = at {
                disk.commits()
            } else {
                0
            }
        };
        let before = commits();
        let took = measure::time_all(commands);
        if let Layer::Disk(disk) = at {
            disk.commits_during_starts
                .update(|known| known + commits() - before);
        }
        for container in containers {
            let dir = container.rootfs.parent().unwrap().to_owned();
            drop(container);
            std::fs::remove_dir_all(dir).unwrap();
        }
        took
    }

    /// Measures starts while as many other containers end, whose layers overlayfs then syncs.
    pub fn start_while_others_end(
        &self,
        count: usize,
        image: &Path,
        disk: &Disk,
        fake: &FakeDriver,
    ) -> Took {
        let create = || {
            (0..count)
                .map(|_| self.container(image, Layer::Disk(disk)))
                .collect::<Vec<_>>()
        };
        let (others, containers) = (create(), create());
        measure::time_all(
            others
                .iter()
                .map(|container| self.hook(container, fake))
                .collect(),
        );
        let dirs: Vec<_> = others
            .iter()
            .chain(&containers)
            .map(|container| container.rootfs.parent().unwrap().to_owned())
            .collect();
        let commands = containers
            .iter()
            .map(|container| self.hook(container, fake))
            .collect();
        for container in &others {
            let pid = nix::unistd::Pid::from_raw(container.pid().try_into().unwrap());
            nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
        }
        let took = measure::time_all(commands);
        drop((others, containers));
        dirs.iter()
            .for_each(|dir| std::fs::remove_dir_all(dir).unwrap());
        took
    }

    /// Lists what a start with the hook leaves in the container's layer.
    pub fn names(&self, image: &Path, disk: &Disk, fake: &FakeDriver) -> Names {
        let container = self.container(image, Layer::Disk(disk));
        measure::time(&mut self.hook(&container, fake));
        let upper = container.rootfs.with_file_name("layer").join("upper");
        let listed = sh(&format!(
            "cd '{}'; find . -mindepth 1 -printf '%y %P %l\\n'",
            upper.display()
        ))
        .ok();
        let is_new = |line: &&str| !image.join(line.split(' ').nth(1).unwrap()).exists();
        let is_dir = |line: &&str| line.starts_with("d ");
        let dev = |line: &&str| line.starts_with("d dev");
        let lines: Vec<&str> = listed.lines().filter(|line| !dev(line)).collect();
        let (dirs, files): (Vec<_>, Vec<_>) = lines.iter().copied().partition(is_dir);
        let (new, copied): (Vec<_>, Vec<_>) = dirs.into_iter().partition(is_new);
        let list = self.dir.path().join("names");
        let mut made: Vec<&str> = new.iter().chain(&files).copied().collect();
        made.sort_by_key(|line| !is_dir(line));
        std::fs::write(&list, made.join("\n")).unwrap();
        Names {
            files: files.len(),
            directories: new.len(),
            copied: copied.len(),
            list,
        }
    }

    /// Returns the command of the hook for a container without a request, with about `bytes` bytes of mounts in config.json.
    pub fn no_request(&self, bytes: usize) -> Command {
        self.no_request_of(hook(), bytes)
    }

    /// The same with another build of the hook.
    pub fn no_request_of(&self, program: &str, bytes: usize) -> Command {
        let bundle = self.dir.path().join(format!("bundle-{bytes}"));
        std::fs::create_dir_all(&bundle).unwrap();
        let mounts: Vec<_> = (0..bytes / 100)
            .map(|n| serde_json::json!({"destination": format!("/m/{n:040}"), "source": "/s", "options": ["ro"]}))
            .collect();
        let process = serde_json::json!({"args": ["sh"], "env": ["PATH=/bin"]});
        let spec = serde_json::json!({"ociVersion": "1.0.2", "process": process, "root": {"path": "/r"}, "mounts": mounts});
        std::fs::write(bundle.join("config.json"), spec.to_string()).unwrap();
        let state = bundle.join("state");
        std::fs::write(
            &state,
            serde_json::json!({"id": "x", "pid": 1, "bundle": bundle}).to_string(),
        )
        .unwrap();
        let mut hook = Command::new(program);
        hook.arg("prestart")
            .env_clear()
            .stdin(File::open(state).unwrap());
        hook
    }
}

/// A state directory for one build of the hook. Builds of other versions would replace each other's cached inventory, so that each
/// start in turn would be a cold one.
pub struct StateDir(PathBuf);

impl StateDir {
    pub fn new(scene: &Scene) -> Self {
        scene.made.set(scene.made.get() + 1);
        let dir = scene
            .dir
            .path()
            .join(format!("state-dir-{}", scene.made.get()));
        std::fs::create_dir(&dir).unwrap();
        sh(&format!(
            "mount -t tmpfs -o mode=700 run '{}'",
            dir.display()
        ))
        .ok();
        Self(dir)
    }

    /// Mounts it at the hook's place while `start` runs.
    pub fn during(&self, start: impl FnOnce() -> Took) -> Took {
        sh(&format!(
            "mount --bind '{}' /run/oci-nvidia-hook",
            self.0.display()
        ))
        .ok();
        let took = start();
        sh("umount /run/oci-nvidia-hook").ok();
        took
    }
}

impl Drop for StateDir {
    fn drop(&mut self) {
        sh(&format!("umount '{}'", self.0.display())).ok();
    }
}

/// Removes the cached inventory of this driver.
pub fn forget(fake: &FakeDriver) {
    sh(&format!(
        "grep -l '{}' /run/oci-nvidia-hook/inventory-* | xargs -r rm -f",
        fake.root.display()
    ))
    .ok();
}
