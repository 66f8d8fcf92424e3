//! Reads a running container into [`ContainerFacts`].
//!
//! All files are opened below the root of its process with [`Root`], which resolves links within that root. They are checked and read
//! through the same descriptor. Only the linker cache, if it is a regular file, and the process's files in /proc are read.

use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use nix::unistd::Pid;
use rustix::fs::{CWD, FileType, Mode, OFlags, StatVfsMountFlags};

use base::read::read_file_limited;
use base::report::{Failure, catalog, failure, line};
use base::sys::confine::Identity;
use base::sys::in_root::{Root, open_regular, real_path};
use base::sys::proc_file;
use nvidia_host::config::Config;
use nvidia_host::driver::file_table::LIBRARY_DIRS;
use nvidia_host::driver::is_version;
use nvidia_host::driver::ldcache::{self, Arch, Cache};
use nvidia_host::driver::nodes::{CTL_MINOR, NVIDIA_MAJOR};
use nvidia_host::inventory::procfs::{self, DRIVER_PROC};
use nvidia_host::prepare;

use super::{ContainerFacts, ContainerNode, ContainerProcess, FoundLibrary, FoundNode, Library, gpu_number};
use crate::cgroup::ask;

/// The libraries that CUDA programs and nvidia-smi open.
const LIBRARIES: [&str; 2] = ["libcuda.so.1", "libnvidia-ml.so.1"];
/// The default directories of the dynamic linker. Debian adds directories with the name of the machine.
const LINKER_DIRS: [&str; 4] = ["/lib64", "/usr/lib64", "/lib", "/usr/lib"];
/// The size limit of a linker cache. Those of large systems have 1 MB.
const MAX_CACHE: usize = 16 << 20;
/// The limit of names in /dev that are read.
const MOST_NODES: usize = 4096;
/// The capability with which permissions of files are ignored.
const CAP_DAC_OVERRIDE: u64 = 1 << 1;

/// Inspects the container of this process. `name` is the name or id from the command line.
///
/// # Errors
/// If the process is not in a container, has ended, or may not be inspected.
pub(crate) fn inspect(pid: i32, name: &str, config: &Config) -> Result<ContainerFacts> {
    // The kernel reuses process ids. An open directory of /proc always belongs to the same process.
    let open = rustix::fs::openat(
        CWD,
        format!("/proc/{pid}"),
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    );
    let proc = open.map_err(|errno| cannot_enter(pid, errno.into()))?;
    let path = |name: &str| PathBuf::from(format!("/proc/self/fd/{}/{name}", proc.as_fd().as_raw_fd()));
    let root = Root::open(&path("root")).map_err(|error| cannot_enter(pid, error))?;
    let namespace = |name: &str| std::fs::read_link(path(name)).ok();
    let ours = |name: &str| std::fs::read_link(Path::new("/proc/self").join(name)).ok();
    if namespace("ns/mnt") == ours("ns/mnt") {
        return Err(failure(
            &catalog::NOT_EXAMINED,
            format!("process {pid} is not in a container"),
            "give a process of a container with --pid, or the id of a container with --container",
        ));
    }
    let status = proc_file::read_text(path("status"))?;
    let environment = proc_file::read(path("environ")).unwrap_or_default();
    let in_ours = namespace("ns/user") == ours("ns/user");
    let process = parse_process(&status, in_ours, variable(&environment, "NVIDIA_DRIVER_CAPABILITIES"))
        .with_context(|| format!("cannot read the status of process {pid}"))?;
    let driver = nvidia_host::driver::open_root(&config.driver_root)?;
    let module = procfs::read_version(&driver.owner_of(DRIVER_PROC)?);
    let devices = proc_file::read_text("/proc/devices").unwrap_or_default();
    let uvm = prepare::parse_majors(&devices).get("nvidia-uvm").map(|major| (*major, 0));
    let filter = ask::filter(Pid::from_raw(pid)).map_err(|error| line(&error));
    Ok(ContainerFacts {
        pid,
        name: name.to_owned(),
        module,
        process,
        libraries: libraries(&root, variable(&environment, "LD_LIBRARY_PATH").as_deref()),
        nodes: nodes(&root, uvm),
        filter,
    })
}

/// Returns the error for a file of a process in /proc that cannot be opened.
fn cannot_enter(pid: i32, error: std::io::Error) -> anyhow::Error {
    // The option hidepid= of /proc hides the processes of other users from everyone but root.
    if error.kind() == std::io::ErrorKind::NotFound && rustix::process::geteuid().is_root() {
        return failure(
            &catalog::NOT_EXAMINED,
            format!("process {pid} does not exist"),
            "give a running container with --container; \"oci-nvidia-hook why\" and \"podman ps\" list containers",
        );
    }
    let what = format!("cannot inspect the container of process {pid}");
    let hint = "run the command as root; \"ps -e\" lists the existing processes";
    anyhow::Error::new(error).context(Failure::new(&catalog::NOT_EXAMINED, what, hint))
}

fn variable(environment: &[u8], name: &str) -> Option<String> {
    let mut entries = environment.split(|byte| *byte == 0).map(String::from_utf8_lossy);
    entries.find_map(|entry| Some(entry.strip_prefix(name)?.strip_prefix('=')?.to_owned()))
}

/// Parses /proc/PID/status. The kernel prints ids as seen from the user namespace of the reader.
fn parse_process(status: &str, in_our_namespace: bool, capabilities: Option<String>) -> Option<ContainerProcess> {
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    // The four values are the real, effective, saved and file system id.
    let last = |name: &str| field(name)?.split_whitespace().nth(3)?.parse::<u32>().ok();
    let groups = field("Groups").unwrap_or_default().split_whitespace().filter_map(|group| group.parse().ok());
    let caps = u64::from_str_radix(field("CapEff")?.trim(), 16).ok()?;
    Some(ContainerProcess {
        identity: Identity { uid: last("Uid")?, gid: last("Gid")? },
        groups: groups.collect(),
        // In another user namespace, the capability does not apply to device nodes of the host.
        overrides: in_our_namespace && caps & CAP_DAC_OVERRIDE != 0,
        capabilities,
    })
}

fn libraries(root: &Root, library_path: Option<&str>) -> Vec<Library> {
    let cache = read_cache(root).unwrap_or_default();
    let cache = ldcache::parse(&cache).ok();
    LIBRARIES.map(|name| find_library(root, cache.as_ref(), library_path, name)).into()
}

fn find_library(root: &Root, cache: Option<&Cache>, library_path: Option<&str>, name: &'static str) -> Library {
    let machine = format!("{}-linux-gnu", std::env::consts::ARCH);
    let debians = [format!("/lib/{machine}"), format!("/usr/lib/{machine}")];
    let given = library_path.unwrap_or_default().split(':').filter(|dir| dir.starts_with('/'));
    let cached = cache.iter().flat_map(|cache| cache.candidates(OsStr::new(name), Arch::native()));
    let usual = debians.iter().map(String::as_str).chain(LINKER_DIRS);
    let mut paths: Vec<PathBuf> = given.map(|dir| Path::new(dir).join(name)).collect();
    paths.extend(cached.map(|entry| PathBuf::from(entry.path)));
    paths.extend(usual.map(|dir| Path::new(dir).join(name)));
    if let Some(found) = paths.iter().find_map(|path| inspect_library(root, path)) {
        return Library { name, found: Some(found), elsewhere: None };
    }
    let mut others = LIBRARY_DIRS.iter().chain(&["/usr/local/nvidia/lib", "/usr/local/lib"]);
    let elsewhere = others.find_map(|dir| inspect_library(root, &Path::new(dir).join(name)));
    Library { name, found: None, elsewhere: elsewhere.map(|found| found.path) }
}

fn read_cache(root: &Root) -> Option<Vec<u8>> {
    let fd = root.open_at(Path::new("/etc/ld.so.cache"), OFlags::PATH).ok()?;
    read_file_limited(&open_regular(fd).ok()?, MAX_CACHE).ok()
}

fn inspect_library(root: &Root, path: &Path) -> Option<FoundLibrary> {
    let fd = root.open_at(path, OFlags::PATH).ok()?;
    let stat = rustix::fs::fstat(&fd).ok()?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return None;
    }
    // Only the file name is used, for its version.
    let real = real_path(fd.as_fd()).ok();
    let version = real.as_deref().and_then(Path::file_name).and_then(OsStr::to_str).and_then(version_of);
    Some(FoundLibrary { path: path.to_string_lossy().into_owned(), version, is_empty: stat.st_size == 0 })
}

/// Returns the version in a file name: `535.183.01` for `libcuda.so.535.183.01`.
fn version_of(name: &str) -> Option<String> {
    let (_, version) = name.split_once(".so.")?;
    is_version(version).then(|| version.to_owned())
}

/// Returns the nodes that every container with GPUs needs, and the existing nodes of GPUs.
fn nodes(root: &Root, uvm: Option<(u32, u32)>) -> Vec<ContainerNode> {
    let names = names(root, Path::new("/dev")).into_iter();
    let gpus = names.filter_map(|name| gpu_number(&name).map(|number| (name, Some(number))));
    let all = [("nvidiactl".to_owned(), Some((NVIDIA_MAJOR, CTL_MINOR))), ("nvidia-uvm".to_owned(), uvm)];
    let inspect =
        |(name, expected)| ContainerNode { found: inspect_node(root, &Path::new("/dev").join(&name)), name, expected };
    all.into_iter().chain(gpus).map(inspect).collect()
}

fn names(root: &Root, dir: &Path) -> Vec<String> {
    let Ok(fd) = root.open_at(dir, OFlags::RDONLY | OFlags::DIRECTORY) else { return Vec::new() };
    let Ok(entries) = rustix::fs::Dir::new(fd) else { return Vec::new() };
    let names = entries.take(MOST_NODES).filter_map(|entry| Some(entry.ok()?.file_name().to_str().ok()?.to_owned()));
    let mut names: Vec<_> = names.collect();
    names.sort();
    names
}

fn inspect_node(root: &Root, path: &Path) -> Option<FoundNode> {
    let fd: OwnedFd = root.open_at(path, OFlags::PATH).ok()?;
    let stat = rustix::fs::fstat(&fd).ok()?;
    let is_char = FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice;
    let nodev = rustix::fs::fstatvfs(&fd).is_ok_and(|fs| fs.f_flag.contains(StatVfsMountFlags::NODEV));
    Some(FoundNode {
        device: is_char.then(|| (rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev))),
        mode: stat.st_mode & 0o7777,
        uid: stat.st_uid,
        gid: stat.st_gid,
        nodev,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes() {
        let status =
            "Name:\tsh\nUid:\t0\t1\t2\t1000\nGid:\t5\t6\t7\t100\nGroups:\t44 100 \nCapEff:\t0000000000000002\n";
        let process = parse_process(status, true, None).unwrap();
        assert_eq!((process.identity, process.groups.as_slice()), (Identity { uid: 1000, gid: 100 }, &[44, 100][..]));
        assert!(process.overrides);
        assert!(!parse_process(status, false, None).unwrap().overrides);
        assert_eq!(parse_process("Name:\tsh\n", true, None), None);
        assert_eq!(variable(b"A=b\0LD_LIBRARY_PATH=/x:/y\0", "LD_LIBRARY_PATH").as_deref(), Some("/x:/y"));
        assert_eq!(variable(b"LD_LIBRARY_PATHS=/x", "LD_LIBRARY_PATH"), None);
    }

    #[test]
    fn versions_in_names() {
        for (name, version) in [
            ("libcuda.so.535.183.01", Some("535.183.01")),
            ("libcuda.so.1", None),
            ("libcuda.so.1.x", None),
            ("libcuda.so", None),
        ] {
            assert_eq!(version_of(name).as_deref(), version, "{name}");
        }
    }
}
