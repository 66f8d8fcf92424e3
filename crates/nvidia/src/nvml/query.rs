//! Asks NVML, which another program loads ([`program`]), with a deadline.
//!
//! The library is 3 MB of code of the driver vendor. It opens devices, can hang for minutes on a broken GPU, and starts a set-uid helper
//! if possible. It gets the privileges of a user who can open `/dev/nvidia*`. The process reports each GPU when it is done, so that the
//! GPU is known at which it hangs or crashes.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Result;
use base::accounts;
use base::debug;
use base::json;
use base::paths::HostPath;
use base::report::{Failure, failure};
use base::sys::child::{Child, NoAnswer};
use base::sys::confine::Identity;
use base::sys::ns;
use base::sys::run_dir::RunDir;
use base::tree::Tree;
use findings::catalog;

use super::program::{self, Isolation};
use super::protocol::{InventoryLine, LibraryPlace, Request, Unloadable};
use super::{Code, Failed};
use crate::driver::{DriverKind, group, params};
use crate::inventory::cache::Cache;
use crate::inventory::gather::{Gathered, NvmlAnswer, WORTH_ASKING};
use crate::inventory::identity::{self, RunAs};
use crate::inventory::notice::Wait;
use crate::inventory::procfs::DRIVER_PROC;

/// A query of NVML.
#[derive(Clone, Debug)]
pub struct NvmlQuery {
    /// The root directory of the child: the driver root if it contains the device nodes, otherwise `/`.
    pub root: HostPath,
    /// The path of libnvidia-ml.so.1 below that root.
    pub library: PathBuf,
    /// The user of the child.
    pub who: RunAs,
    /// The time limit, which includes the wait for other processes that query NVML.
    pub deadline: Duration,
    /// The kind of the driver
    pub kind: DriverKind,
}

impl NvmlQuery {
    /// Returns the root directory for NVML and the path of the library below it. NVML opens device nodes in `/dev` of its root
    /// directory, so it runs in the tree `dev` if that contains the library, otherwise in the tree `driver`.
    ///
    /// # Errors
    /// If the library is in neither tree.
    pub fn place(driver: &Tree, dev: &Tree, library: &HostPath) -> Result<(HostPath, PathBuf)> {
        match dev.inside(library) {
            Ok(path) => Ok((dev.path(), path)),
            Err(_) => Ok((driver.path(), driver.inside(library)?)),
        }
    }

    /// Returns the library for a request, with the user who loads it.
    ///
    /// # Errors
    /// If the root cannot be opened.
    pub fn library_place(&self) -> Result<LibraryPlace> {
        Ok(LibraryPlace {
            root: self.root.as_path().to_owned(),
            library: self.library.clone(),
            identity: identity::choose(self.who, &self.root, &self.library)?,
            kind: self.kind,
        })
    }

    /// Returns the cache for the answer, or `None` if there is no run-time directory. The deadline does not identify the query.
    #[must_use]
    pub fn cache(&self) -> Option<Cache> {
        self.cache_in(RunDir::open().ok()?)
    }

    /// Returns the cache if the run-time directory already exists.
    #[must_use]
    pub fn existing_cache(&self) -> Option<Cache> {
        self.cache_in(RunDir::existing().ok()??)
    }

    fn cache_in(&self, dir: RunDir) -> Option<Cache> {
        let root = self.root.as_path().to_str()?;
        let Self { library, who, .. } = self;
        Some(Cache::at(
            dir,
            root,
            format!("{root:?} {library:?} {who:?}"),
            self.deadline,
        ))
    }
}

/// The limit for processes that are started for one query.
const MAX_PROCESSES: usize = 64;

/// Queries NVML for the inventory until `end`. If a GPU hangs or crashes the child, it is reported as failed, and another child continues
/// with the next GPU.
///
/// # Errors
/// If the library cannot be loaded, fails as a whole, or does not answer in time.
pub fn ask(question: &NvmlQuery, end: Instant) -> Result<NvmlAnswer> {
    timed(question, || ask_all(question, end))
}

/// Asks NVML, and logs how long it took.
pub(super) fn timed<T>(question: &NvmlQuery, ask: impl FnOnce() -> Result<T>) -> Result<T> {
    debug::log(|| {
        format!(
            "NVML is {:?} below {:?}",
            question.library.as_path(),
            question.root.as_path()
        )
    });
    let begun = Instant::now();
    let answer = ask();
    let how = if answer.is_ok() { "answered" } else { "failed" };
    debug::log(|| format!("NVML {how} after {} ms", begun.elapsed().as_millis()));
    answer
}

fn ask_all(question: &NvmlQuery, end: Instant) -> Result<NvmlAnswer> {
    let library = question.library_place()?;
    let identity = library.identity;
    let wait = Wait::begin(question.deadline);
    let mut gathered = Gathered::default();
    for _ in 0..MAX_PROCESSES {
        if end.saturating_duration_since(Instant::now()) < WORTH_ASKING {
            break;
        }
        let request = Request::Inventory {
            library: library.clone(),
            leave_out: gathered.indices(),
        };
        let mut process = program::start(&request, Isolation::Alone)?;
        match listen(&mut process, &mut gathered, end, wait) {
            Reply::All => return Ok(gathered.answer()),
            Reply::Changed => gathered = Gathered::default(),
            Reply::Error(line) => return Err(explain(line, question, identity)),
            Reply::Nothing(why) if !gathered.give_up(&why) => {
                return Err(no_answer(why, question, &gathered));
            }
            Reply::Nothing(_) if gathered.is_whole() => return Ok(gathered.answer()),
            Reply::Nothing(_) => {}
        }
    }
    Err(no_answer(NoAnswer::Timeout, question, &gathered))
}

/// The result of one child.
enum Reply {
    All,
    /// The previous child had other GPUs.
    Changed,
    Error(InventoryLine),
    Nothing(NoAnswer),
}

fn listen(process: &mut Child, gathered: &mut Gathered, end: Instant, wait: Wait) -> Reply {
    loop {
        let line = match next_line(process, gathered.limit(end), wait) {
            Ok(line) => line,
            Err(why) => return Reply::Nothing(why),
        };
        match json::from_bytes(&line) {
            Ok(InventoryLine::Report(report)) => {
                if !gathered.take(report, Instant::now()) {
                    return Reply::Changed;
                }
            }
            Ok(InventoryLine::Done) if gathered.is_whole() => return Reply::All,
            Ok(InventoryLine::Done) => return Reply::Nothing(NoAnswer::Died(None)),
            Ok(error) => return Reply::Error(error),
            Err(error) => return Reply::Nothing(NoAnswer::System(error.into())),
        }
    }
}

/// Returns the next line of the child. The part of a line that has arrived stays in `process` when the notice is given.
pub(super) fn next_line(
    process: &mut Child,
    end: Instant,
    wait: Wait,
) -> Result<Vec<u8>, NoAnswer> {
    let answer = wait.until(end, |end| match process.line(end) {
        Err(NoAnswer::Timeout) => None,
        answer => Some(answer),
    });
    answer.unwrap_or(Err(NoAnswer::Timeout))
}

fn no_answer(error: NoAnswer, question: &NvmlQuery, gathered: &Gathered) -> anyhow::Error {
    let suspects: Vec<String> = gathered.given_up().iter().map(u32::to_string).collect();
    let suspects = match suspects.as_slice() {
        [] => String::new(),
        gpus => format!("; GPU {} did not answer", gpus.join(", ")),
    };
    match error {
        NoAnswer::System(error) => {
            anyhow::Error::new(error).context("cannot start the NVML process")
        }
        NoAnswer::Timeout => failure(
            &catalog::NVML_TIMEOUT,
            format!(
                "NVML did not answer within {} s{suspects}",
                question.deadline.as_secs_f32()
            ),
            "if \"nvidia-smi\" on the host is slow too, enable persistence mode (\"nvidia-smi -pm 1\"); or raise \
             nvml-timeout in the [oci-nvidia-hook] table of config.toml",
        ),
        NoAnswer::Died(signal) => failure(
            &catalog::NVML_DIED,
            match signal {
                Some(signal) => {
                    format!("the NVML process was killed by {signal}{suspects}")
                }
                None => "the NVML process ended without an answer".to_owned(),
            },
            "run \"nvidia-smi\" on the host",
        ),
    }
}

/// Returns the error for a process that asks NVML and gave no answer.
pub(super) fn without_answer(error: NoAnswer, question: &NvmlQuery) -> anyhow::Error {
    no_answer(error, question, &Gathered::default())
}

fn explain(line: InventoryLine, question: &NvmlQuery, identity: Option<Identity>) -> anyhow::Error {
    match line {
        InventoryLine::Nvml(failed) => explain_nvml(&failed, question, identity),
        InventoryLine::Refused(refused) => explain_refused(&refused, question),
        InventoryLine::Report(_) | InventoryLine::Done => {
            without_answer(NoAnswer::Died(None), question)
        }
    }
}

/// Returns the error for a program that does not have the library.
#[must_use]
pub fn explain_refused(refused: &Unloadable, question: &NvmlQuery) -> anyhow::Error {
    match refused {
        Unloadable::OtherBuild => failure(
            &catalog::NVML_PROCESS,
            format!(
                "{} belongs to another build than this program",
                program::NAME
            ),
            "install the packages of oci-nvidia-hook again, all in the same version",
        ),
        Unloadable::Load(text) => failure(
            &catalog::NVML_LOAD,
            format!(
                "cannot load the driver's library {:?} below {}: {text}",
                question.library, question.root
            ),
            "reinstall the driver's libraries, and run \"ldconfig\"",
        ),
        Unloadable::Confine(text) => failure(
            &catalog::NVML_PROCESS,
            format!("cannot set up the NVML process: {text}"),
            if rustix::process::geteuid().is_root() {
                "check user and root in the [nvidia-container-cli] table of config.toml"
            } else {
                "run the command as root, for example with sudo"
            },
        ),
    }
}

/// Returns the hint for a missing permission. `user` in config.toml only has an effect if root runs the hook; for other users, their
/// groups decide.
fn permission_hint(question: &NvmlQuery, identity: Option<Identity>) -> String {
    let name = question.kind.control_node();
    let node = question.root.as_path().join("dev").join(name);
    let node = node.display();
    match identity {
        Some(_) => format!(
            "compare \"ls -l {node}\" with user in the [nvidia-container-cli] table of config.toml"
        ),
        None if is_of_no_user() => format!(
            "no user of the host has the ids of this user namespace, so none can join the group of {node}: as root, set \
             \"options nvidia NVreg_DeviceFileMode=0666\" in /etc/modprobe.d and reboot, or map the group of the nodes into the \
             container (LXC, Incus: idmap)"
        ),
        None => {
            let join = match group_of_the_nodes(&question.root, name) {
                Some((gid, mode)) => format!("as root, {}", group::join(&this_user(), gid, mode)),
                None => format!(
                    "add the user to the group that \"ls -l {node}\" shows on the host, and log in again"
                ),
            };
            join + keep_groups()
        }
    }
}

/// Returns the group and mode of the nodes below this root. In a user namespace, a group that is not mapped appears as the overflow group;
/// the parameters of the kernel module contain the real group.
fn group_of_the_nodes(root: &HostPath, name: &str) -> Option<(u32, u32)> {
    let root = Tree::open(root).ok()?;
    let node = root.locate(&Path::new("/dev").join(name)).ok()?;
    if node.gid != identity::NOBODY {
        return Some((node.gid, node.mode));
    }
    let params = root
        .read_text(&Path::new(DRIVER_PROC).join("params"))
        .ok()?;
    Some((params::field(&params, "DeviceFileGID")?, node.mode))
}

/// Returns the additional step for rootless containers: the group is not mapped in their user namespace, and runc drops it.
fn keep_groups() -> &'static str {
    if ns::in_user_namespace().unwrap_or_default() {
        return "; rootless containers then need crun and \"--group-add keep-groups\"";
    }
    ""
}

/// Returns the name of the user outside of the user namespace, or `USER` for root.
fn this_user() -> String {
    name_of(uid_on_host()).unwrap_or_else(|| "USER".to_owned())
}

/// Reports whether the process is in a user namespace of ids that only a range in /etc/subuid contains, as in containers of LXC and
/// Incus.
fn is_of_no_user() -> bool {
    let uid = uid_on_host();
    uid != 0 && ns::in_user_namespace().unwrap_or_default() && name_of(uid).is_none()
}

fn uid_on_host() -> u32 {
    let inside = rustix::process::geteuid().as_raw();
    ns::uid_outside(inside).ok().flatten().unwrap_or(inside)
}

fn name_of(uid: u32) -> Option<String> {
    if uid == 0 {
        return None;
    }
    let user = accounts::user(uid).ok()??;
    Some(user.name)
}

/// Returns the error for a failed call of NVML. `identity` is the user who called it.
#[must_use]
pub fn explain_nvml(
    failed: &Failed,
    question: &NvmlQuery,
    identity: Option<Identity>,
) -> anyhow::Error {
    let (kind, what, hint) = match failed.code {
        Code::DRIVER_NOT_LOADED if question.kind == DriverKind::Wsl => (
            &catalog::NVML,
            "NVML cannot start: Windows offers no NVIDIA GPU to WSL 2".to_owned(),
            "run \"nvidia-smi\" in Windows and in WSL; update the driver in Windows, and restart WSL with \"wsl --shutdown\""
                .to_owned(),
        ),
        Code::DRIVER_NOT_LOADED => (
            &catalog::NOT_LOADED,
            "the NVIDIA kernel driver is not loaded".to_owned(),
            "load it with \"modprobe nvidia\", then create the device nodes with \"oci-nvidia-hook prepare\", as root"
                .to_owned(),
        ),
        Code::NO_PERMISSION => (
            &catalog::NVML_PERMISSION,
            match identity {
                Some(Identity { uid, gid }) => format!("user {uid}, group {gid} has no permission to open the GPUs"),
                None => "this user has no permission to open the GPUs".to_owned(),
            },
            permission_hint(question, identity),
        ),
        Code::LIB_RM_VERSION_MISMATCH => (
            &catalog::MISMATCH,
            "the driver's libraries do not have the version of the loaded kernel module".to_owned(),
            "reboot the host if its driver was just updated; otherwise install the libraries in the version of the module, which \
             \"cat /proc/driver/nvidia/version\" prints"
                .to_owned(),
        ),
        _ => (&catalog::NVML, "NVML cannot start".to_owned(), "run \"nvidia-smi\" on the host".to_owned()),
    };
    anyhow::Error::msg(failed.to_string()).context(Failure::new(kind, what, hint))
}
