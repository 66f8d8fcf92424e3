//! A container whose process waits for the hook: its rootfs, opened once, and its mount namespace.

pub(crate) mod host_dev;
pub(in crate::inject) mod ld_so_conf;
pub(crate) mod linker_cache;
pub(in crate::inject) mod mountinfo;
pub(in crate::inject) mod mounts;

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use rustix::fs::{Mode, OFlags};

use base::paths::ContainerPath;
use base::report::{Failure, failure};
use base::sys::ids::Ids;
use base::sys::in_root::Root;
use base::sys::ns::{self, MountNs};
use findings::catalog;
use nvidia_host::driver::ldcache::Arch;
use nvidia_host::driver::{compat, elf};
use nvidia_host::edits::placement::{Compat32, Loader, RootfsFacts, library_dir};

/// Upper limit for the names in the directory of compatibility libraries; NVIDIA's has a dozen files.
const MAX_COMPAT: usize = 1000;

/// A container before pivot_root(2), not yet entered.
#[derive(Debug)]
pub(crate) struct OpenContainer {
    rootfs: Root,
    /// `None` for the current mount namespace
    mount_ns: Option<MountNs>,
    /// User and group id of its root user on the host, the owner of files that the hook creates; `None` if that is the user of this
    /// process
    owner: Option<(u32, u32)>,
    /// The ids of its user namespace, if that is not ours
    ids: Option<Ids>,
}

/// A container whose mount namespace this process has entered.
#[derive(Debug)]
pub(crate) struct Inside {
    pub rootfs: Root,
    /// The ids of its user namespace, if that is not ours
    pub ids: Option<Ids>,
}

impl OpenContainer {
    /// Opens the container whose init process is `pid`.
    ///
    /// The rootfs is opened through `/proc/<pid>/root`, in the container's mount namespace, where `/dev`, `/proc` and volumes
    /// are mounted below it. Its path is not used again.
    ///
    /// # Errors
    /// If the process has ended, the rootfs is missing, or the process is in the host's mount namespace, where mounts would
    /// outlive the container.
    pub(crate) fn open(pid: i32, rootfs: &Path) -> Result<Self> {
        Self::of_process(pid, rootfs).with_context(|| {
            Failure::new(
                &catalog::CONTAINER,
                format!("cannot open the container of process {pid}"),
                "the hook must run at the prestart or createRuntime stage, before the container's process starts; \
                 check \"stages\" in the hook file",
            )
        })
    }

    fn of_process(pid: i32, rootfs: &Path) -> Result<Self> {
        ensure!(rootfs != Path::new("/"), "its rootfs is \"/\"");
        // A runtime is not dumpable, so its files in /proc belong to root. The directory still belongs to the effective user
        // (`task_dump_owner` in fs/proc/base.c).
        let owner =
            std::fs::metadata(format!("/proc/{pid}")).context("its init process has ended")?;
        let owner = Some((owner.uid(), owner.gid())).filter(|owner| *owner != us());
        let mount_ns = MountNs::of_process(pid)?;
        if [ns::mount_ns_of("self"), ns::mount_ns_of("1")].contains(&Some(mount_ns.id()?)) {
            return Err(no_mount_namespace());
        }
        let host = Root::open(Path::new(&format!("/proc/{pid}/root")))?;
        let rootfs = host
            .open_root(rootfs)
            .with_context(|| format!("open its rootfs {rootfs:?}"))?;
        let ids = owner.map(|_| Ids::of_process(pid)).transpose()?;
        Ok(Self {
            rootfs,
            mount_ns: Some(mount_ns),
            owner,
            ids,
        })
    }

    /// Like [`Self::here`], and checks that the runtime has mounted `/dev` or `/proc` in the rootfs. A hook entry of a CDI spec
    /// that is called at another stage would mount on the host.
    ///
    /// # Errors
    /// If neither is mounted, the rootfs is missing, or this is the host's mount namespace.
    pub(crate) fn inside(rootfs: &Path) -> Result<Self> {
        let container = Self::here(rootfs)?;
        let device = |path| {
            Some(
                rustix::fs::fstat(
                    container
                        .rootfs
                        .open_at(Path::new(path), OFlags::PATH)
                        .ok()?,
                )
                .ok()?
                .st_dev,
            )
        };
        let own = device("/");
        if ["dev", "proc"]
            .into_iter()
            .filter_map(device)
            .all(|device| Some(device) == own)
        {
            return Err(failure(
                &catalog::CONTAINER,
                format!(
                    "nothing is mounted in the rootfs {rootfs:?}: the hook is not in the container's mount namespace"
                ),
                "have the hook called at the createContainer stage, or regenerate the CDI spec with \"oci-nvidia-hook cdi generate\"",
            ));
        }
        // At a wrong stage, both checks fail. The error of the check above names the more likely cause.
        if ns::in_mount_ns_of_runtime() {
            return Err(no_mount_namespace());
        }
        Ok(container)
    }

    /// Opens the container of the current mount namespace: at createContainer, runtimes call hooks there before pivot_root(2).
    /// The pid in the state is then one of the container's pid namespace and cannot be used.
    ///
    /// # Errors
    /// If the rootfs is missing.
    pub(crate) fn here(rootfs: &Path) -> Result<Self> {
        ensure!(rootfs != Path::new("/"), "the container's rootfs is \"/\"");
        let rootfs = Root::open(rootfs)
            .with_context(|| format!("cannot open the container's rootfs {rootfs:?}"))?;
        Ok(Self {
            rootfs,
            mount_ns: None,
            owner: None,
            ids: None,
        })
    }

    /// Whether [`Self::enter`] makes this process create files for another user.
    pub(crate) const fn has_other_owner(&self) -> bool {
        self.owner.is_some()
    }

    /// The root file system of the container.
    pub(crate) const fn rootfs(&self) -> &Root {
        &self.rootfs
    }

    /// Returns the facts about the rootfs that decide which steps are needed.
    pub(crate) fn facts(&self) -> RootfsFacts {
        facts(&self.rootfs)
    }

    /// Returns the facts about a rootfs without a process; `None` if it cannot be read or is empty.
    pub(crate) fn facts_of(rootfs: &Path) -> Option<RootfsFacts> {
        let rootfs = Root::open(rootfs).ok()?;
        has_files(&rootfs)?.then(|| facts(&rootfs))
    }

    /// Reports whether a rootfs can be read and is not empty. For a container with a user namespace, Podman 5.0 and newer names an
    /// empty directory and mounts the rootfs there when it starts the runtime.
    pub(crate) fn has_files(rootfs: &Path) -> bool {
        let rootfs = Root::open(rootfs).ok();
        rootfs
            .and_then(|rootfs| has_files(&rootfs))
            .unwrap_or_default()
    }

    /// Returns the architecture and the SONAME of a library in the container. `None` if the file is not a library: on a volume,
    /// it may be any file.
    pub(crate) fn library(&self, path: &ContainerPath) -> Option<(Arch, OsString)> {
        let is_library = |name: &OsStr| {
            name.as_bytes().starts_with(b"lib") && name.to_string_lossy().contains(".so")
        };
        let file = self
            .rootfs
            .open_at(path.relative(), OFlags::PATH | OFlags::NOFOLLOW)
            .ok();
        let mut file = self
            .rootfs
            .open_stored(file.filter(|_| is_library(path.file_name()))?)
            .ok()?;
        let mut header = [0; elf::HEADER];
        file.read_exact(&mut header).ok()?;
        let arch = Arch::supported().find(|arch| elf::is_for(&header, *arch))?;
        // ldconfig also uses the file name if a library has no SONAME.
        Some((
            arch,
            elf::soname(file).unwrap_or_else(|| path.file_name().to_owned()),
        ))
    }

    /// Returns the names in the image's directory of CUDA compatibility libraries; `None` if they must not be used with this
    /// driver.
    pub(crate) fn compat_libraries(
        &self,
        dir: &ContainerPath,
        host_driver: &str,
        host_cuda: &str,
    ) -> Option<BTreeSet<OsString>> {
        let rootfs = &self.rootfs;
        let dir = rootfs
            .open_at(dir.relative(), OFlags::PATH | OFlags::DIRECTORY)
            .ok()?;
        let dir = rootfs.open_stored_dir(dir).ok()?;
        let library = dir.try_clone().ok()?;
        let entries = rustix::fs::Dir::new(dir).ok()?.take(MAX_COMPAT).flatten();
        let names = BTreeSet::from_iter(
            entries.map(|entry| OsStr::from_bytes(entry.file_name().to_bytes()).to_owned()),
        );
        let version = compat::version_of(names.iter().filter_map(|name| name.to_str()))?.to_owned();
        // The path could lead elsewhere by now, so the file is opened in the directory that was listed. A link, a FIFO or a
        // device there is not a library.
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(
            library,
            format!("libcuda.so.{version}"),
            flags,
            Mode::empty(),
        )
        .ok()?;
        let note = rootfs.open_stored(file).ok().and_then(compat::read_note);
        compat::is_to_be_used(note.as_ref(), &version, host_driver, host_cuda).then_some(names)
    }

    /// Enters the container's mount namespace. The process cannot return from it.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub(crate) fn enter(self) -> Result<Inside> {
        if let Some(mount_ns) = self.mount_ns {
            mount_ns
                .enter()
                .context("cannot enter the container's mount namespace")?;
        }
        if let Some((uid, gid)) = self.owner {
            base::sys::process::create_files_as(uid, gid).with_context(|| {
                format!("cannot create files as the container's root user {uid}:{gid}")
            })?;
        }
        Ok(Inside {
            rootfs: self.rootfs,
            ids: self.ids,
        })
    }
}

fn has_files(rootfs: &Root) -> Option<bool> {
    let dir = rootfs
        .open_at(Path::new("."), OFlags::PATH | OFlags::DIRECTORY)
        .ok()?;
    let dir = rustix::fs::Dir::new(rootfs.open_stored_dir(dir).ok()?).ok()?;
    for entry in dir.flatten() {
        if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
            return Some(true);
        }
    }
    Some(false)
}

fn us() -> (u32, u32) {
    (
        rustix::process::geteuid().as_raw(),
        rustix::process::getegid().as_raw(),
    )
}

fn no_mount_namespace() -> anyhow::Error {
    failure(
        &catalog::CONTAINER,
        "the container has no separate mount namespace: its mounts would stay on the host",
        "have config.json list a new \"mount\" namespace in \"linux.namespaces\"",
    )
}

/// The path of glibc's loader, which the ABI fixes for every distribution; see ld.so(8).
const GLIBC: &[&str] = if cfg!(target_arch = "aarch64") {
    &["lib/ld-linux-aarch64.so.1"]
} else {
    &["lib64/ld-linux-x86-64.so.2"]
};
/// The dynamic loaders of musl.
const MUSL: &[&str] = &["lib/ld-musl-x86_64.so.1", "lib/ld-musl-aarch64.so.1"];

/// Determines the facts from paths only: no file of the image is read.
fn facts(rootfs: &Root) -> RootfsFacts {
    let has = |path: &str| rootfs.open_at(Path::new(path), OFlags::PATH).is_ok();
    let has_any = |paths: &[&str]| paths.iter().any(|path| has(path));
    let loader = match () {
        () if has_any(GLIBC) => Loader::Glibc,
        () if has_any(MUSL) => Loader::Musl,
        () => Loader::None,
    };
    if has("etc/debian_version") {
        // The multiarch directories differ for each architecture.
        return RootfsFacts {
            debian: true,
            loader,
            ..RootfsFacts::default()
        };
    }
    let native = directory_id(rootfs, library_dir(RootfsFacts::default(), Arch::native()));
    let merged = native.is_some() && native == directory_id(rootfs, "usr/lib");
    let compat32 = match directory_id(rootfs, "usr/lib32") {
        Some(lib32) if native == Some(lib32) => Compat32::Nowhere,
        Some(_) => Compat32::Lib32,
        None if merged => Compat32::Lib32,
        None => Compat32::Lib,
    };
    RootfsFacts {
        debian: false,
        compat32,
        merged,
        loader,
    }
}

/// Returns the device and inode number of a directory, to which several paths can lead: `/usr/lib64` is a link to `lib` in some images.
fn directory_id(rootfs: &Root, path: &str) -> Option<(u64, u64)> {
    let dir = rootfs.open_at(Path::new(path), OFlags::PATH).ok()?;
    let stat = rustix::fs::fstat(dir).ok()?;
    Some((stat.st_dev, stat.st_ino))
}
