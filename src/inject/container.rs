//! A container that waits at a hook: its rootfs, opened once, and its mount namespace.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use rustix::fs::{Mode, OFlags};

use base::paths::ContainerPath;
use base::report::{Failure, catalog, failure, render};
use base::sys::deadline;
use base::sys::ids::Ids;
use base::sys::in_root::Root;
use base::sys::ns::{self, MountNs};
use nvidia_host::driver::ldcache::Arch;
use nvidia_host::driver::{compat, elf};
use nvidia_host::edits::placement::{Loader, RootfsFacts};
use nvidia_host::timeouts;

/// NVIDIA's directory has a dozen files.
const MAX_COMPAT: usize = 1000;

/// Ends this process if a container's files do not answer in time. To be called before the first of them is looked at; `start`
/// is when the hook began.
///
/// # Errors
/// If the kernel refuses.
pub(crate) fn set_deadline(start: Instant) -> Result<()> {
    let patience = timeouts::for_container(start.elapsed());
    let error = failure(
        &catalog::TOO_LONG,
        format!("the container was not set up within {} seconds", patience.as_secs()),
        "run \"findmnt\" on the host, and check that the servers of its FUSE and network file systems answer, which the image or \
         a volume may lie on",
    );
    let text = format!("{}: {}", crate::log::NAME, render(&error));
    deadline::set(patience, text).context("cannot set a timer")
}

/// A container before pivot_root, seen from the host's side.
#[derive(Debug)]
pub(crate) struct OpenContainer {
    rootfs: Root,
    /// None: the one that we are in
    mount_ns: Option<MountNs>,
    /// Who owns files that are made in it: its root user on the host.
    owner: (u32, u32),
    /// The ids of its user namespace, if that is not ours
    ids: Option<Ids>,
}

/// A container whose mount namespace we are in.
#[derive(Debug)]
pub(crate) struct Inside {
    pub rootfs: Root,
    /// The ids of its user namespace, if that is not ours
    pub ids: Option<Ids>,
}

impl OpenContainer {
    /// Opens the container whose init process is `pid`.
    ///
    /// The rootfs is opened through `/proc/<pid>/root`, that is in the container's mount namespace, where `/dev` and
    /// `/proc` and volumes are mounted below it; this is the only time that its path is used.
    ///
    /// # Errors
    /// If the process is gone, the rootfs is not there, or the process is in a mount namespace of the host's, where mounts
    /// would stay when the container is gone.
    pub(crate) fn open(pid: i32, rootfs: &Path) -> Result<Self> {
        Self::of_process(pid, rootfs).with_context(|| {
            Failure::new(
                &catalog::CONTAINER,
                format!("cannot open the container of process {pid}"),
                "the hook must run at the prestart or createRuntime stage, before the container's process does; \
                 check \"stages\" in the hook's JSON file",
            )
        })
    }

    fn of_process(pid: i32, rootfs: &Path) -> Result<Self> {
        ensure!(rootfs != Path::new("/"), "its rootfs is \"/\"");
        let owner = std::fs::metadata(format!("/proc/{pid}")).context("its init process is gone")?;
        let owner = (owner.uid(), owner.gid());
        let mount_ns = MountNs::of_process(pid)?;
        if [ns::mount_ns_of("self"), ns::mount_ns_of("1")].contains(&Some(mount_ns.id()?)) {
            return Err(no_mount_namespace());
        }
        let host = Root::open(Path::new(&format!("/proc/{pid}/root")))?;
        let rootfs = host.open_root(rootfs).with_context(|| format!("open its rootfs {rootfs:?}"))?;
        let ids = if owner == us() { None } else { Some(Ids::of_process(pid)?) };
        Ok(Self { rootfs, mount_ns: Some(mount_ns), owner, ids })
    }

    /// The same as [`Self::here`] for a stage at which the runtime has gone into the container, and has mounted its `/dev` and
    /// `/proc`: an entry of a spec that is called at another stage would mount for the host.
    ///
    /// # Errors
    /// If none of them is mounted, the rootfs is not there, or we are in a mount namespace of the host's.
    pub(crate) fn inside(rootfs: &Path) -> Result<Self> {
        let container = Self::here(rootfs)?;
        let device =
            |path| Some(rustix::fs::fstat(container.rootfs.open_at(Path::new(path), OFlags::PATH).ok()?).ok()?.st_dev);
        let own = device("/");
        if ["dev", "proc"].into_iter().filter_map(device).all(|device| Some(device) == own) {
            return Err(failure(
                &catalog::CONTAINER,
                format!("nothing of the container is mounted in its rootfs {rootfs:?} here: this is the host's side"),
                "have the hook called at the createContainer stage, or write a CDI spec anew with \"oci-nvidia-hook cdi generate\"",
            ));
        }
        // After the check above, whose reason is the more likely one at the wrong stage.
        if ns::in_mount_ns_of_runtime() {
            return Err(no_mount_namespace());
        }
        Ok(container)
    }

    /// Opens the container whose mount namespace we are in: at the createContainer stage runtimes start hooks there,
    /// before pivot_root. The pid in the state is one of the container's pid namespace then, and says nothing here.
    ///
    /// # Errors
    /// If the rootfs is not there.
    pub(crate) fn here(rootfs: &Path) -> Result<Self> {
        ensure!(rootfs != Path::new("/"), "the container's rootfs is \"/\"");
        let rootfs = Root::open(rootfs).with_context(|| format!("cannot open the container's rootfs {rootfs:?}"))?;
        Ok(Self { rootfs, mount_ns: None, owner: us(), ids: None })
    }

    /// The root file system of the container.
    pub(crate) const fn rootfs(&self) -> &Root {
        &self.rootfs
    }

    /// The facts about the rootfs that decide which steps are needed.
    pub(crate) fn facts(&self) -> RootfsFacts {
        facts(&self.rootfs)
    }

    /// The same of a rootfs that no process waits in; `None` if nothing of it can be seen. For a container with a user
    /// namespace, Podman names an empty directory from 5.0 on, and mounts the rootfs there when it starts the runtime.
    pub(crate) fn facts_of(rootfs: &Path) -> Option<RootfsFacts> {
        let rootfs = Root::open(rootfs).ok()?;
        let dir = rootfs.open_at(Path::new("."), OFlags::RDONLY | OFlags::DIRECTORY).ok()?;
        let is_name = |entry: rustix::fs::DirEntry| !matches!(entry.file_name().to_bytes(), b"." | b"..");
        let is_empty = !rustix::fs::Dir::new(dir).ok()?.flatten().any(is_name);
        (!is_empty).then(|| facts(&rootfs))
    }

    /// A library that is mounted in it: for which programs, and the name by which they know it. `None` if it is something
    /// else. It may be of a volume, and then any file.
    pub(crate) fn library(&self, path: &ContainerPath) -> Option<(Arch, OsString)> {
        let is_library = |name: &OsStr| name.as_bytes().starts_with(b"lib") && name.to_string_lossy().contains(".so");
        let file = self.rootfs.open_at(path.relative(), OFlags::PATH | OFlags::NOFOLLOW).ok();
        let mut file = self.rootfs.open_stored(file.filter(|_| is_library(path.file_name()))?).ok()?;
        let mut header = [0; elf::HEADER];
        file.read_exact(&mut header).ok()?;
        let native = Arch::native();
        let arch = [Some(native), native.compat32()].into_iter().flatten().find(|arch| elf::is_for(&header, *arch))?;
        // As ldconfig does with a library that has no SONAME.
        Some((arch, elf::soname(file).unwrap_or_else(|| path.file_name().to_owned())))
    }

    /// The names in its directory of CUDA compatibility libraries, if those are to be used with this driver.
    pub(crate) fn compat_libraries(
        &self,
        dir: &ContainerPath,
        host_driver: &str,
        host_cuda: &str,
    ) -> BTreeSet<OsString> {
        self.usable_compat_libraries(dir, host_driver, host_cuda).unwrap_or_default()
    }

    fn usable_compat_libraries(
        &self,
        dir: &ContainerPath,
        host_driver: &str,
        host_cuda: &str,
    ) -> Option<BTreeSet<OsString>> {
        let dir = self.rootfs.open_at(dir.relative(), OFlags::PATH | OFlags::DIRECTORY).ok()?;
        let dir = self.rootfs.open_stored_dir(dir).ok()?;
        let library = dir.try_clone().ok()?;
        let entries = rustix::fs::Dir::new(dir).ok()?.take(MAX_COMPAT).flatten();
        let names =
            BTreeSet::from_iter(entries.map(|entry| OsStr::from_bytes(entry.file_name().to_bytes()).to_owned()));
        let version = compat::version_of(names.iter().filter_map(|name| name.to_str()))?.to_owned();
        // The path could lead elsewhere by now, so the file is opened in the directory that was listed. A link, a FIFO or a
        // device there is not a library.
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(library, format!("libcuda.so.{version}"), flags, Mode::empty()).ok()?;
        let note = self.rootfs.open_stored(file).ok().and_then(compat::read_note);
        compat::is_to_be_used(note.as_ref(), &version, host_driver, host_cuda).then_some(names)
    }

    /// Enters its mount namespace. There is no way back.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub(crate) fn enter(self) -> Result<Inside> {
        let owner_is_us = self.owner == us();
        if let Some(mount_ns) = self.mount_ns {
            mount_ns.enter().context("cannot enter the container's mount namespace")?;
        }
        if !owner_is_us {
            let (uid, gid) = self.owner;
            base::sys::process::create_files_as(uid, gid)
                .with_context(|| format!("cannot create files as the container's root user {uid}:{gid}"))?;
        }
        Ok(Inside { rootfs: self.rootfs, ids: self.ids })
    }
}

fn us() -> (u32, u32) {
    (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw())
}

fn no_mount_namespace() -> anyhow::Error {
    failure(
        &catalog::CONTAINER,
        "the container has no mount namespace of its own: what is mounted for it would stay on the host",
        "have config.json list a new \"mount\" namespace in \"linux.namespaces\"",
    )
}

/// Where glibc's loader is, by an ABI that every distribution keeps; see ld.so(8).
const GLIBC: &[&str] =
    if cfg!(target_arch = "aarch64") { &["lib/ld-linux-aarch64.so.1"] } else { &["lib64/ld-linux-x86-64.so.2"] };
/// The dynamic loaders of musl.
const MUSL: &[&str] = &["lib/ld-musl-x86_64.so.1", "lib/ld-musl-aarch64.so.1"];

/// Decided by what exists, whatever it is.
fn facts(rootfs: &Root) -> RootfsFacts {
    let has = |path: &str| rootfs.open_at(Path::new(path), OFlags::PATH).is_ok();
    let has_any = |paths: &[&str]| paths.iter().any(|path| has(path));
    let loader = match () {
        () if has_any(GLIBC) => Loader::Glibc,
        () if has_any(MUSL) => Loader::Musl,
        () => Loader::None,
    };
    RootfsFacts { debian: has("etc/debian_version"), lib32: has("usr/lib32"), loader }
}

/// Whether an error means that there is nothing by that name.
pub(crate) fn is_missing(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound
}
