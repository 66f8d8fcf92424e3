//! The cached inventory: NVML's answer, stored in the run-time directory for the containers that start next. NVML answers in
//! milliseconds where a daemon keeps the GPUs initialised, and in seconds elsewhere.
//!
//! # Why it is never wrong
//!
//! A cached inventory is used only if all of the following is true, read from the kernel at each start:
//!
//! 1. *Same question*: the driver root, the library's path, the user that asks, and the version of this program.
//! 2. *Same driver*: boot id, module version, and the inode number of the module's directory in sysfs, which changes when the
//!    module is loaded again; device, inode, size and times of the library.
//! 3. *Same GPUs*: the module itself lists bus id, UUID and device minor of each of its GPUs in /proc/driver/nvidia/gpus,
//!    and the cached inventory has exactly these, each once. So no entry of it can mean another GPU than the container will
//!    open: a GPU that was removed, added, replaced in the same slot or numbered anew differs in one of the three. A
//!    module that was just loaded does not know a UUID before the GPU is first opened, and prints question marks: then the
//!    cached inventory is not used.
//! 4. *Same order*: NVML numbers the GPUs that it can open in the order of their bus ids. The set of GPUs is the same by 3, and
//!    which of them can be opened is the same if mode, owner and numbers of `/dev/nvidiactl` and of each GPU's node are.
//! 5. *Whole GPUs*: there is no directory of a GPU instance below /proc/driver/nvidia/capabilities, and NVML reported no
//!    GPU in MIG mode. The UUID of a MIG device is made of its GPU, its instance and the engine that it runs on
//!    (`nvGenerateSmcUuid` in NVIDIA's open module), and procfs does not show the engine: instances that were destroyed and
//!    created again can have the same numbers and other UUIDs. An inventory with MIG devices is not cached, and each start asks.
//! 6. *Alive*: the configuration space of each GPU answers. It reads as ones for a GPU that has fallen off the bus.
//!
//! An inventory with a GPU that failed is not cached: the GPU is asked for again, and reported again, at each start. A GPU that
//! breaks later in a way that only NVML sees is given to containers as before, as it would be to a container that started a
//! second earlier; `info` always asks, and replaces the cached inventory.
//!
//! A GPU reset changes none of these, and NVML's answer neither: nodes, UUIDs and minors stay. MIG mode that a reset turns on is
//! seen by 5 as soon as there is an instance; without one the whole GPU is given, as NVML would have it.
//!
//! The file is read only if no other user can have written it ([`RunDir`]), and only if its checksum is right. Any other file
//! is replaced. Without a run-time directory each start asks.
//!
//! # A GPU that hangs or crashes NVML
//!
//! To ask about such a GPU takes long, so the inventory without it is cached for a minute, under the same conditions for the
//! GPUs that have answered: otherwise every container that starts would wait. With MIG devices it is not cached (5).
//!
//! # Concurrent starts
//!
//! The first process asks, under a lock; the others wait and find the answer. If that cannot be cached, a waiter may still
//! use it if it was asked after the waiter arrived: it is no older than the waiter's own would be. Answers are numbered: if the
//! last one was `n` on arrival, `n + 1` may have been asked before, `n + 2` was not, since the lock lets one process ask at a
//! time. A process that waited for the lock has that much less time to ask, so that none takes longer than NVML may.
//! An error that comes while others wait is theirs as well: they would have no time left to get the same one.

use std::hash::{DefaultHasher, Hasher};
use std::time::{Duration, Instant};

use anyhow::Result;
use serde::{Deserialize, Serialize};

use base::json;
use base::sys::run_dir::RunDir;

use super::fingerprint::{Fingerprint, is_confirmed, is_confirmed_in_part};
use super::procfs::KernelGpu;
use super::stored_error::StoredError;
use super::{Inventory, gather};

/// 256 GPUs have 64 KiB.
const MAX_SIZE: u64 = 1 << 20;
/// The first line, before the checksum of the rest.
const HEADER: &str = concat!("oci-nvidia-hook ", env!("CARGO_PKG_VERSION"), " inventory 2 ");
/// For how many seconds an inventory is cached that lacks a GPU which hangs.
const BRIEFLY: u64 = 60;
/// How long a command waits for a lock that it does not strictly need.
const SHORTLY: Duration = Duration::from_secs(1);

/// What the kernel says now.
#[derive(Clone, Debug)]
pub struct KernelView {
    /// Of the loaded module
    pub version: String,
    /// Its GPUs
    pub gpus: Vec<KernelGpu>,
    /// [`super::fingerprint::take`]
    pub state: Option<Fingerprint>,
    /// Seconds since the host was started; 0 if that is unknown
    pub uptime: u64,
}

/// Asks NVML, until then.
pub type Ask<'a> = &'a dyn Fn(Instant) -> Result<gather::NvmlAnswer>;

/// An answer, as it is in the file.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CachedInventory {
    number: u64,
    question: String,
    /// The host that it is true of; `None` if it is only for those who waited for it
    state: Option<String>,
    /// Until when it is valid, as [`KernelView::uptime`], if a GPU is missing in it that hangs
    until: Option<u64>,
    inventory: Inventory,
}

impl CachedInventory {
    /// The content of the file.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        to_bytes(self)
    }

    /// Reads it; `None` if it is not whole, or of another version of this program.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        parse(bytes)
    }

    /// Whether the kernel confirms it, now.
    #[must_use]
    pub fn is_confirmed_by(&self, look: &KernelView) -> bool {
        let Some(state) = &look.state else { return false };
        let is_confirmed = match self.until {
            None => state.is_whole && is_confirmed(&self.inventory, &look.version, &look.gpus),
            Some(until) => {
                look.uptime > 0
                    && (until.saturating_sub(BRIEFLY)..until).contains(&look.uptime)
                    && is_confirmed_in_part(&self.inventory, &look.version, &look.gpus)
            }
        };
        self.state.as_ref() == Some(&state.text) && is_confirmed
    }
}

/// An error, for those who waited for the answer.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Failed {
    number: u64,
    question: String,
    error: StoredError,
}

fn to_bytes(value: &impl Serialize) -> Vec<u8> {
    let body = serde_json::to_string(value).unwrap_or_default();
    format!("{HEADER}{:016x}\n{body}", checksum(body.as_bytes())).into_bytes()
}

fn parse<T: serde::de::DeserializeOwned>(bytes: &[u8]) -> Option<T> {
    let rest = bytes.strip_prefix(HEADER.as_bytes())?;
    let (sum, body) = rest.split_at_checked(16)?;
    let body = body.strip_prefix(b"\n")?;
    let sum = u64::from_str_radix(std::str::from_utf8(sum).ok()?, 16).ok()?;
    (sum == checksum(body)).then(|| json::from_bytes(body).ok())?
}

/// Against damage, not against forgers: those cannot write the file.
fn checksum(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(bytes);
    hasher.finish()
}

fn has_same_gpus(cached: &Inventory, newer: &Inventory) -> bool {
    let is_cached = |gpu: &super::Gpu| cached.gpus.iter().any(|known| known.uuid == gpu.uuid);
    cached.gpus.len() == newer.gpus.len() && newer.gpus.iter().all(is_cached)
}

/// Where the answer to one question is cached.
#[derive(Debug)]
pub struct Cache {
    dir: RunDir,
    name: String,
    question: String,
    patience: Duration,
}

impl Cache {
    /// In our run-time directory. `root` is the driver root, `question` what is asked and by whom; `patience` is how long it
    /// may take to wait for the lock and to ask.
    #[must_use]
    pub fn at(dir: RunDir, root: &str, question: String, patience: Duration) -> Self {
        let name = match root {
            "/" => "inventory".to_owned(),
            root => format!("inventory-{:016x}", checksum(root.as_bytes())),
        };
        Self { dir, name, question, patience }
    }

    /// The cached inventory if the kernel confirms it, else the one that `ask` returns, which is cached if it can be. `slow` is called if
    /// it is not true: from there on it may take a while.
    ///
    /// # Errors
    /// Those of `ask`.
    pub fn get(&self, look: &dyn Fn() -> KernelView, slow: &dyn Fn(), ask: Ask<'_>) -> Result<(Inventory, KernelView)> {
        let now = look();
        let before = self.read();
        if let Some(cached) = before.as_ref().filter(|answer| answer.is_confirmed_by(&now)) {
            return Ok((cached.inventory.clone(), now));
        }
        slow();
        let end = Instant::now() + self.patience;
        let arrived = before.map_or(0, |answer| answer.number);
        let failures = self.last_failure().map_or(0, |failed| failed.number);
        // Without the lock there is no time left, or there can be no lock.
        let Ok(Some(_lock)) = self.lock() else { return Ok((ask(end)?.inventory, look())) };
        // Whoever had the lock before may have got it.
        if let Some(answer) = self.read() {
            let now = look();
            if answer.is_confirmed_by(&now) || answer.number >= arrived.saturating_add(2) {
                return Ok((answer.inventory, now));
            }
        }
        if let Some(failed) = self.last_failure().filter(|failed| failed.number > failures) {
            return Err(failed.error.into());
        }
        self.ask(look, ask, end)
    }

    /// Asks in any case, and caches the answer if it can be.
    ///
    /// # Errors
    /// Those of `ask`.
    pub(crate) fn renew(&self, look: &dyn Fn() -> KernelView, ask: Ask<'_>) -> Result<(Inventory, KernelView)> {
        let end = Instant::now() + self.patience;
        match self.lock() {
            Ok(Some(_lock)) => self.ask(look, ask, end),
            _ => Ok((ask(end)?.inventory, look())),
        }
    }

    /// Invalidates the cached inventory unless it has the GPUs of this newer one, no more and no fewer. Without a newer one NVML has
    /// failed as a whole, and nothing it answered before can be relied on.
    pub fn invalidate_unless(&self, newer: Option<&Inventory>) {
        // Whoever holds the lock asks anew at this moment. What that gives is lost if this comes later: one more question.
        let _lock = self.dir.lock(&self.lock_name(), SHORTLY);
        let Some(mut cached) = self.read() else { return };
        if cached.state.is_some() && newer.is_none_or(|newer| !has_same_gpus(&cached.inventory, newer)) {
            cached.state = None;
            self.dir.replace(&self.name, &cached.to_bytes()).ok();
        }
    }

    fn lock_name(&self) -> String {
        format!("{}.lock", self.name)
    }

    fn lock(&self) -> std::io::Result<Option<base::sys::run_dir::Lock>> {
        self.dir.lock(&self.lock_name(), self.patience)
    }

    /// Under the lock.
    fn ask(&self, look: &dyn Fn() -> KernelView, ask: Ask<'_>, end: Instant) -> Result<(Inventory, KernelView)> {
        let number = self.read().map_or(0, |answer| answer.number).saturating_add(1);
        let gather::NvmlAnswer { inventory, gave_up } = ask(end).inspect_err(|error| self.share(error))?;
        // Looked at afterwards: to ask is what makes the module learn who its GPUs are.
        let now = look();
        let state = now.state.as_ref().map(|state| state.text.clone());
        let until = gave_up.then(|| now.uptime.saturating_add(BRIEFLY));
        let mut answer = CachedInventory { number, question: self.question.clone(), state, until, inventory };
        if !answer.is_confirmed_by(&now) {
            answer.state = None;
        }
        // A disk that is full costs the next container time.
        self.dir.replace(&self.name, &answer.to_bytes()).ok();
        Ok((answer.inventory, now))
    }

    /// In a file of its own: the cached inventory may become valid again.
    fn share(&self, error: &anyhow::Error) {
        let number = self.last_failure().map_or(0, |failed| failed.number).saturating_add(1);
        let failed = Failed { number, question: self.question.clone(), error: StoredError::of(error) };
        self.dir.replace(&self.failures(), &to_bytes(&failed)).ok();
    }

    fn failures(&self) -> String {
        format!("{}.failed", self.name)
    }

    fn last_failure(&self) -> Option<Failed> {
        let bytes = self.dir.read(&self.failures(), MAX_SIZE).ok()??;
        parse(&bytes).filter(|failed: &Failed| failed.question == self.question)
    }

    fn read(&self) -> Option<CachedInventory> {
        let bytes = self.dir.read(&self.name, MAX_SIZE).ok()??;
        CachedInventory::parse(&bytes).filter(|answer| answer.question == self.question)
    }
}

#[cfg(test)]
mod tests;
