//! Reads a running container into [`ContainerFacts`].
//!
//! [`examine`] runs in a child process with a deadline: the container can mount a FUSE file system at any path, its server decides how
//! long a lookup takes, and a process that waits for it cannot always be killed. The child opens all files below the root of its process with
//! [`Root`], which resolves links within that root, and read only its linker cache, `/dev` and the process's files in /proc. The
//! process can end at any time, and the kernel can reuse its number; so it is identified by its start time too.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use nix::unistd::Pid;
use rustix::fs::{CWD, FileType, Mode, OFlags, StatVfsMountFlags};
use rustix::io::Errno;

use base::read::read_file_limited;
use base::report::{failure, line};
use base::sys::confine::Identity;
use base::sys::in_root::{Root, fd_path, real_path};
use base::sys::proc_file;
use findings::catalog;
use nvidia_host::config::Config;
use nvidia_host::driver::DriverKind;
use nvidia_host::driver::file_table::LIBRARY_DIRS;
use nvidia_host::driver::is_version;
use nvidia_host::driver::ldcache::{self, Arch, Cache};
use nvidia_host::driver::locate;
use nvidia_host::driver::node_name::{CONTROL, NodeName};
use nvidia_host::driver::nodes::{CAPS, CTL_MINOR, NVIDIA_MAJOR};
use nvidia_host::driver::wsl;
use nvidia_host::host::Roots;
use nvidia_host::inventory::procfs;
use nvidia_host::prepare;

use super::facts::{
    ContainerFacts, ContainerNode, ContainerProcess, FoundLibrary, FoundNode, Library,
};
use super::find::ProcessId;
use crate::cgroup::filter::{self, Filter};

/// The libraries that CUDA programs and nvidia-smi open.
const LIBRARIES: [&str; 2] = ["libcuda.so.1", "libnvidia-ml.so.1"];

/// A file, by its device and inode number. The mount of a file has the same numbers.
type FileId = (u64, u64);

/// The default directories of the dynamic linker. Debian adds directories with the name of the machine.
const LINKER_DIRS: [&str; 4] = ["/lib64", "/usr/lib64", "/lib", "/usr/lib"];
/// The size limit of a linker cache in bytes. Those of large systems have 1 MB.
const MAX_CACHE: usize = 16 << 20;
/// The size limit of an environment in bytes. A process can change the place that the kernel shows as its environment.
const MAX_ENVIRONMENT: u64 = 1 << 20;
/// The limit for the value of a variable, in characters.
const MAX_VALUE: usize = 64 << 10;
/// The limit for the directories in `LD_LIBRARY_PATH`, and for the entries of a library in the linker cache.
const MOST_PLACES: usize = 64;
/// The limit of names in /dev that are read.
const MOST_NODES: usize = 4096;
/// The capability with which permissions of files are ignored.
const CAP_DAC_OVERRIDE: u64 = 1 << 1;

/// What is known before the container's files are examined.
#[derive(Debug)]
pub(super) struct Known<'a> {
    process: ProcessId,
    name: &'a str,
    /// The version of the host's kernel module
    module: Option<String>,
    /// The files of [`LIBRARIES`] on the host, if they are known
    hosts: [Option<FileId>; LIBRARIES.len()],
    driver_kind: DriverKind,
    /// The device number of /dev/dxg, if the host is WSL 2
    dxg: Option<(u32, u32)>,
    /// The major numbers in /proc/devices
    majors: BTreeMap<String, u32>,
    /// The minor numbers of the GPUs that the kernel lists, if it lists them
    gpus: Option<BTreeSet<u32>>,
    /// Its device cgroup, or why that cannot be read
    filter: Result<Filter, String>,
}

impl<'a> Known<'a> {
    /// Reads files of the host, and files in /proc for which the kernel does not need the memory of the process.
    ///
    /// # Errors
    /// If the process is not in a container, or the driver root cannot be opened.
    pub(super) fn read(process: ProcessId, name: &'a str, config: &Config) -> anyhow::Result<Self> {
        let pid = process.pid;
        if is_ours(&PathBuf::from(format!("/proc/{pid}")), "ns/mnt") {
            return Err(failure(
                &catalog::NOT_EXAMINED,
                format!("process {pid} is not in a container"),
                "give a process of a container with --pid, or the id of a container with --container",
            ));
        }
        let roots = Roots::open(config)?;
        let module = procfs::read_version(&roots.proc);
        let hosts = LIBRARIES.map(|name| hosts_file(&roots, config, module.as_deref(), name));
        let dxg = match roots.kind {
            DriverKind::Linux => None,
            DriverKind::Wsl => {
                let node = roots.dev.locate(Path::new(wsl::NODE_PATH));
                Some(node.map_or((0, 0), |node| node.device))
            }
        };
        let devices = roots.proc.read_text(Path::new("/proc/devices"));
        let majors = prepare::parse_majors(&devices.unwrap_or_default());
        let gpus = module.as_ref().map(|_| minors(&roots));
        let filter = filter::filter(Pid::from_raw(pid)).map_err(|error| line(&error));
        Ok(Self {
            process,
            name,
            module,
            hosts,
            driver_kind: roots.kind,
            dxg,
            majors,
            gpus,
            filter,
        })
    }

    pub(super) fn with(self, (process, libraries, nodes): Examined) -> ContainerFacts {
        ContainerFacts {
            pid: self.process.pid,
            name: self.name.to_owned(),
            module: self.module,
            driver_kind: self.driver_kind,
            process,
            libraries,
            nodes,
            gpus: self.gpus,
            filter: self.filter,
        }
    }
}

fn minors(roots: &Roots) -> BTreeSet<u32> {
    let gpus = procfs::read_gpus(&roots.proc).into_iter();
    gpus.filter_map(|gpu| gpu.minor).collect()
}

/// Returns the host's file of a library, in the version of the kernel module.
fn hosts_file(roots: &Roots, config: &Config, version: Option<&str>, name: &str) -> Option<FileId> {
    let version = match (version, roots.kind) {
        (Some(version), _) => version,
        (None, DriverKind::Linux) => return None,
        // The names of WSL's files do not contain the version.
        (None, DriverKind::Wsl) => "",
    };
    let cache = roots.linker_cache(config);
    let search = roots.search(&cache, version, config);
    let library = locate::library(&search, name.strip_suffix(".so.1")?)?;
    let stat = rustix::fs::stat(library.source.as_path()).ok()?;
    Some((stat.st_dev, stat.st_ino))
}

/// Returns whether a namespace of the process with this directory in /proc is also the namespace of this program.
fn is_ours(dir: &Path, namespace: &str) -> bool {
    let ours = std::fs::read_link(Path::new("/proc/self").join(namespace)).ok();
    std::fs::read_link(dir.join(namespace)).ok() == ours
}

/// What is read from the container's process and its files
pub(super) type Examined = (ContainerProcess, Vec<Library>, Vec<ContainerNode>);

/// Examines the container in this process, which may have to wait forever. An error is a number of the system: ESRCH if the process has
/// ended. Otherwise, it may not be inspected.
pub(super) fn examine(known: &Known<'_>) -> Result<Examined, i32> {
    let number = |error: io::Error| error.raw_os_error().unwrap_or_default();
    let opened = Opened::open(known.process).map_err(number)?;
    let mut process = opened.process().map_err(number)?;
    let environment = opened.environment();
    process.capabilities = variable(&environment, "NVIDIA_DRIVER_CAPABILITIES");
    let path = variable(&environment, "LD_LIBRARY_PATH");
    let libraries = find_libraries(&opened.root, path.as_deref(), known.hosts);
    let nodes = find_nodes(&opened.root, known);
    Ok((process, libraries, nodes))
}

/// The process of a container, opened in a child.
struct Opened {
    /// Its directory in /proc, which always belongs to the same process
    proc: OwnedFd,
    root: Root,
}

impl Opened {
    fn open(process: ProcessId) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let proc = rustix::fs::openat(CWD, format!("/proc/{}", process.pid), flags, Mode::empty())?;
        let dir = PathBuf::from(fd_path(proc.as_fd()));
        if ProcessId::read(&dir, process.pid)? != process {
            return Err(Errno::SRCH.into());
        }
        Ok(Self {
            root: Root::open(&dir.join("root"))?,
            proc,
        })
    }

    fn path(&self, name: &str) -> PathBuf {
        Path::new(&fd_path(self.proc.as_fd())).join(name)
    }

    fn process(&self) -> io::Result<ContainerProcess> {
        let status = proc_file::read_text(self.path("status"))?;
        let process = parse_process(&status, is_ours(&self.path("."), "ns/user"));
        process.ok_or_else(|| Errno::INVAL.into())
    }

    /// Reads the environment. The kernel reads it from the memory of the process, which can be a file of a FUSE file system.
    #[expect(
        clippy::disallowed_methods,
        reason = "in a child, which the deadline ends if the container's memory blocks it"
    )]
    fn environment(&self) -> Vec<u8> {
        let mut environment = Vec::new();
        if let Ok(file) = File::open(self.path("environ")) {
            file.take(MAX_ENVIRONMENT)
                .read_to_end(&mut environment)
                .ok();
        }
        environment
    }
}

fn variable(environment: &[u8], name: &str) -> Option<String> {
    let mut entries = environment
        .split(|byte| *byte == 0)
        .map(String::from_utf8_lossy);
    let value =
        entries.find_map(|entry| Some(entry.strip_prefix(name)?.strip_prefix('=')?.to_owned()))?;
    Some(value.chars().take(MAX_VALUE).collect())
}

/// Parses /proc/PID/status. The kernel prints ids as seen from the user namespace of the reader.
fn parse_process(status: &str, in_our_namespace: bool) -> Option<ContainerProcess> {
    let field = |name: &str| {
        status
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
    };
    // The four values are the real, effective, saved and file system id.
    let last = |name: &str| field(name)?.split_whitespace().nth(3)?.parse::<u32>().ok();
    let groups = field("Groups")
        .unwrap_or_default()
        .split_whitespace()
        .filter_map(|group| group.parse().ok());
    let caps = u64::from_str_radix(field("CapEff")?.trim(), 16).ok()?;
    Some(ContainerProcess {
        identity: Identity {
            uid: last("Uid")?,
            gid: last("Gid")?,
        },
        groups: groups.collect(),
        // In another user namespace, the capability does not apply to device nodes of the host.
        overrides: in_our_namespace && caps & CAP_DAC_OVERRIDE != 0,
        capabilities: None,
    })
}

fn find_libraries(
    root: &Root,
    library_path: Option<&str>,
    hosts: [Option<FileId>; LIBRARIES.len()],
) -> Vec<Library> {
    let cache = read_cache(root).unwrap_or_default();
    let cache = ldcache::parse(&cache).ok();
    let named = LIBRARIES.into_iter().zip(hosts);
    let find = |(name, host)| {
        let mut library = find_library(root, cache.as_ref(), library_path, name);
        if let (Some(found), Some(host)) = (&mut library.found, host) {
            found.is_hosts = Some(found.id == host);
        }
        library
    };
    named.map(find).collect()
}

fn find_library(
    root: &Root,
    cache: Option<&Cache<'_>>,
    library_path: Option<&str>,
    name: &str,
) -> Library {
    let machine = format!("{}-linux-gnu", std::env::consts::ARCH);
    let debians = [format!("/lib/{machine}"), format!("/usr/lib/{machine}")];
    let given = library_path
        .unwrap_or_default()
        .split(':')
        .filter(|dir| dir.starts_with('/'));
    let cached = cache
        .iter()
        .flat_map(|cache| cache.candidates(OsStr::new(name), Arch::native()));
    let usual = debians.iter().map(String::as_str).chain(LINKER_DIRS);
    let mut paths: Vec<PathBuf> = given
        .take(MOST_PLACES)
        .map(|dir| Path::new(dir).join(name))
        .collect();
    paths.extend(
        cached
            .take(MOST_PLACES)
            .map(|entry| PathBuf::from(entry.path)),
    );
    paths.extend(usual.map(|dir| Path::new(dir).join(name)));
    if let Some(found) = paths.iter().find_map(|path| inspect_library(root, path)) {
        return Library {
            name: name.to_owned(),
            found: Some(found),
            elsewhere: None,
        };
    }
    let mut others = LIBRARY_DIRS
        .iter()
        .chain(&["/usr/local/nvidia/lib", "/usr/local/lib"]);
    let elsewhere = others.find_map(|dir| inspect_library(root, &Path::new(dir).join(name)));
    Library {
        name: name.to_owned(),
        found: None,
        elsewhere: elsewhere.map(|found| found.path),
    }
}

fn read_cache(root: &Root) -> Option<Vec<u8>> {
    let path = Path::new("/etc/ld.so.cache");
    let found = root.open_at(path, OFlags::PATH).ok()?;
    read_file_limited(&root.open_stored(found).ok()?, MAX_CACHE).ok()
}

fn inspect_library(root: &Root, path: &Path) -> Option<FoundLibrary> {
    let fd = root.open_at(path, OFlags::PATH).ok()?;
    let stat = rustix::fs::fstat(&fd).ok()?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return None;
    }
    // Only the file name is used, for its version. A mount can have any name.
    let real = real_path(fd.as_fd()).ok();
    let version = real
        .as_deref()
        .and_then(Path::file_name)
        .and_then(OsStr::to_str)
        .and_then(version_of);
    Some(FoundLibrary {
        path: path.to_string_lossy().into_owned(),
        version,
        id: (stat.st_dev, stat.st_ino),
        is_hosts: None,
        is_empty: stat.st_size == 0,
    })
}

/// Returns the version in a file name: `535.183.01` for `libcuda.so.535.183.01`.
fn version_of(name: &str) -> Option<String> {
    let (_, version) = name.split_once(".so.")?;
    is_version(version).then(|| version.to_owned())
}

/// Returns the nodes that every container with GPUs needs, and the existing nodes of GPUs.
fn find_nodes(root: &Root, known: &Known<'_>) -> Vec<ContainerNode> {
    let control = (CONTROL.to_owned(), Some((NVIDIA_MAJOR, CTL_MINOR)));
    let mut all = match known.dxg {
        Some(number) => vec![(wsl::NODE.to_owned(), Some(number))],
        None => {
            let uvm = known.majors.get("nvidia-uvm");
            vec![
                control,
                ("nvidia-uvm".to_owned(), uvm.map(|major| (*major, 0))),
            ]
        }
    };
    for name in names(root, Path::new(DEV)) {
        if let Some(NodeName::Gpu(minor)) = NodeName::parse(&name) {
            all.push((name, Some((NVIDIA_MAJOR, minor))));
        }
    }
    for name in names(root, Path::new(CAPS)) {
        let node = NodeName::of_path(&Path::new(CAPS).join(name));
        if let Some(node @ NodeName::Cap(minor)) = node {
            let major = known.majors.get("nvidia-caps");
            all.push((node.to_string(), major.map(|major| (*major, minor))));
        }
    }
    let mut nodes = Vec::new();
    for (name, expected) in all {
        let found = inspect_node(root, &Path::new(DEV).join(&name));
        nodes.push(ContainerNode {
            found,
            name,
            expected,
        });
    }
    nodes
}

const DEV: &str = "/dev";

fn names(root: &Root, dir: &Path) -> Vec<String> {
    let opened = root
        .open_at(dir, OFlags::PATH | OFlags::DIRECTORY)
        .and_then(|dir| root.open_stored_dir(dir));
    let Ok(entries) = opened.and_then(|dir| Ok(rustix::fs::Dir::new(dir)?)) else {
        return Vec::new();
    };
    let names = entries
        .take(MOST_NODES)
        .filter_map(|entry| Some(entry.ok()?.file_name().to_str().ok()?.to_owned()));
    let mut names: Vec<_> = names.collect();
    names.sort();
    names
}

fn inspect_node(root: &Root, path: &Path) -> Option<FoundNode> {
    let fd: OwnedFd = root.open_at(path, OFlags::PATH).ok()?;
    let stat = rustix::fs::fstat(&fd).ok()?;
    let is_char = FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice;
    let nodev =
        rustix::fs::fstatvfs(&fd).is_ok_and(|fs| fs.f_flag.contains(StatVfsMountFlags::NODEV));
    Some(FoundNode {
        device: is_char.then(|| {
            (
                rustix::fs::major(stat.st_rdev),
                rustix::fs::minor(stat.st_rdev),
            )
        }),
        mode: stat.st_mode & 0o7777,
        uid: stat.st_uid,
        gid: stat.st_gid,
        nodev,
    })
}

#[cfg(test)]
mod tests {
    use super::super::find::by_pid;
    use super::*;

    #[test]
    fn processes() {
        let status = "Name:\tsh\nUid:\t0\t1\t2\t1000\nGid:\t5\t6\t7\t100\nGroups:\t44 100 \nCapEff:\t0000000000000002\n";
        let process = parse_process(status, true).unwrap();
        assert_eq!(
            (process.identity, process.groups.as_slice()),
            (
                Identity {
                    uid: 1000,
                    gid: 100
                },
                &[44, 100][..]
            )
        );
        assert!(process.overrides);
        assert!(!parse_process(status, false).unwrap().overrides);
        assert_eq!(parse_process("Name:\tsh\n", true), None);
        assert_eq!(
            variable(b"A=b\0LD_LIBRARY_PATH=/x:/y\0", "LD_LIBRARY_PATH").as_deref(),
            Some("/x:/y")
        );
        assert_eq!(variable(b"LD_LIBRARY_PATHS=/x", "LD_LIBRARY_PATH"), None);
    }

    /// Another process has the number of one that has ended.
    #[test]
    fn a_number_that_is_used_again() {
        let now = by_pid(std::process::id().try_into().unwrap()).unwrap();
        Opened::open(now).unwrap();
        let before = ProcessId {
            start: now.start - 1,
            ..now
        };
        assert_eq!(
            Opened::open(before).err().unwrap().raw_os_error(),
            Some(Errno::SRCH.raw_os_error())
        );
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
