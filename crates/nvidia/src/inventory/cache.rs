//! Caches the inventory: NVML's answer is stored in the run-time directory for later containers. NVML answers within milliseconds if a
//! daemon keeps the GPUs initialized, otherwise within seconds.
//!
//! # Why the cached inventory is correct
//!
//! It is used only if all of these conditions, which are read from the kernel at each start, are true:
//!
//! 1. *Same query*: the driver root, the path of the library, the user that calls NVML, and the version of this program.
//! 2. *Same driver*: the boot id, the version of the module, and the inode number of its directory in sysfs, which changes when the
//!    module is loaded again; the device, inode, size and times of the library.
//! 3. *Same GPUs*: the module lists the bus id, UUID and device minor of its GPUs in /proc/driver/nvidia/gpus, and the cached inventory
//!    contains exactly these. The file of a GPU is not read if its directory is the same entry of procfs as before, see [`KnownGpu`].
//!    A GPU that was removed, added, replaced in the same slot or renumbered differs in one of the three, so no entry can refer to
//!    another GPU than the one that the container opens. After the module is loaded, it prints question marks until it opens the GPU
//!    for the first time; the cached inventory is not used then.
//! 4. *Same order*: NVML numbers the GPUs that it can open in the order of their bus ids. The GPUs are the same because of 3, and
//!    NVML can open the same ones if mode, owner and numbers of `/dev/nvidiactl` and of each GPU's node are the same.
//! 5. *Same MIG devices*: the directories of GPU instances and compute instances below /proc/driver/nvidia/capabilities are the same
//!    entries of procfs as before and after the query, NVML listed exactly these compute instances, and the nodes that it needs for them
//!    have the same mode and owner. Numbers do not suffice: instances that were destroyed and created again can have the same numbers
//!    and other UUIDs. In NVIDIA's open module, the UUID of a MIG device is a function of the chip, its instance and its physical engine
//!    (`nvGenerateSmcUuid`). The module creates an entry only when an instance is created, and removes it first when the instance is
//!    destroyed (`osRmCapRegisterSmc*`, `osRmCapUnregister` in kernel_mig_manager.c). If the GPU is unloaded and loaded again, the entries
//!    stay, and the instances return with the same engines (`kmigmgrRestoreFromPersistence`). Therefore the same entry is the same
//!    instance with the same UUID. [`super::procfs`] explains how an entry is identified; an answer is not cached if one of them
//!    is younger than a second at the query. MIG mode cannot change while there is an instance. A GPU in MIG mode without instances is
//!    not cached.
//! 6. *GPUs respond*: the configuration space of each GPU can be read. For a GPU that has fallen off the bus, all bits are 1.
//!
//! If a request names its devices, conditions 5 and 6 are examined only for their GPUs ([`Scope`]): the MIG devices of other GPUs have
//! other indices, and a GPU that fell off the bus keeps its index ([`super::merge`]). So a request for one MIG device does not compare
//! those of other GPUs, and another GPU that sleeps is not woken: reading its configuration space would (`pci_config_pm_runtime_get`).
//! The other conditions are examined for all GPUs, because each index depends on them.
//!
//! An inventory with a failed GPU is not cached: NVML is called, and the GPU is reported, at each start. If a GPU breaks later in a way
//! that only NVML shows, containers still get it, as if they had started a second earlier. `info` always calls NVML and replaces
//! the cached inventory.
//!
//! A GPU reset changes neither these conditions nor NVML's answer: nodes, UUIDs and minors stay the same. The kernel does not show MIG
//! mode, but condition 5 detects it as soon as there is an instance. Without an instance, the whole GPU is given, as with NVML's answer;
//! only the warning about it is missing. Commands that ask NVML and see the mode replace or invalidate the cached inventory.
//!
//! The file is read only if no other user can have written it ([`RunDir`]) and its checksum is correct. Any other file is replaced.
//! Without a run-time directory, NVML is called at each start.
//!
//! # A GPU that hangs or crashes NVML
//!
//! A query of such a GPU takes long, and all containers that start would wait for it. Therefore the inventory without the GPU is cached
//! for one minute, under the same conditions for the GPUs that have answered.
//!
//! # Concurrent starts
//!
//! The first process calls NVML while it holds a lock; the others wait and use the answer. If the answer cannot be cached, a waiting
//! process uses it only if the query began after the process arrived, so that it is as recent as an own query. Answers are
//! numbered: if the last one was `n` on arrival, query `n + 1` may have begun before, and query `n + 2` has not, because
//! only one process queries at a time. The wait for the lock counts against the time limit for NVML. An error that occurs while
//! others wait is returned by them too, because they have no time left for their own query.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::Result;
use serde::{Deserialize, Serialize};

use base::sys::run_dir::RunDir;
use base::tree::Tree;

use super::cap_files::{CapNode, Instance};
use super::fingerprint::{Fingerprint, is_confirmed, is_confirmed_in_part};
use super::notice::Wait;
use super::procfs::{self, KernelGpu, KnownGpu};
use super::scope::Scope;
use super::stored_error::StoredError;
use super::{Gpu, Inventory, gather};
use crate::driver::nodes::DeviceNode;
use crate::stored;

/// The size limit in bytes. 256 GPUs need 64 KiB.
const MAX_SIZE: u64 = 1 << 20;
/// The kind of the file, with the number of its format.
const KIND: &str = "inventory 7";
/// The number of seconds for which an inventory without a hanging GPU is cached.
const BRIEFLY: u64 = 60;
/// How long a process waits for a lock that is not required for correctness.
const SHORTLY: Duration = Duration::from_secs(1);

/// The current state according to the kernel.
#[derive(Clone, Debug, Default)]
pub struct KernelView {
    /// The GPUs whose MIG devices and bus were examined
    pub scope: Scope,
    /// The version of the loaded module
    pub version: String,
    /// The GPUs of the module
    pub gpus: Vec<KernelGpu>,
    /// What need not be read again about them
    pub known_gpus: Vec<KnownGpu>,
    /// The driver's control node and the nodes of the GPUs, by their names below /dev
    pub nodes: BTreeMap<String, DeviceNode>,
    /// The GPU instances and compute instances of these GPUs
    pub instances: Vec<Instance>,
    /// The nodes of their MIG capabilities; empty if there are no instances
    pub caps: Vec<CapNode>,
    /// The nodes among these that are missing
    pub missing_caps: Vec<CapNode>,
    /// The fingerprint, if the host has one
    pub state: Option<Fingerprint>,
    /// Seconds since the host was booted; 0 if unknown
    pub uptime: u64,
}

impl KernelView {
    /// Reads only which GPUs the module has.
    pub(crate) fn of_gpus(proc: &Tree) -> Self {
        Self {
            gpus: procfs::read_gpus(proc),
            ..Self::default()
        }
    }
}

/// A function that examines the kernel, except for what is known about GPUs. It examines only some things of GPUs outside the scope.
pub type Look<'a> = &'a dyn Fn(&[KnownGpu], Scope) -> KernelView;

/// A function that queries NVML until the given time.
pub type Ask<'a> = &'a dyn Fn(Instant) -> Result<gather::NvmlAnswer>;

/// The content of the file.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CachedInventory {
    number: u64,
    question: String,
    /// The fingerprint for which it is valid; `None` if only processes that waited for it may use it
    state: Option<Fingerprint>,
    /// The end of its validity in terms of [`KernelView::uptime`], if a hanging GPU is missing in it
    until: Option<u64>,
    /// What the kernel module said about its GPUs
    known_gpus: Vec<KnownGpu>,
    inventory: Inventory,
}

impl CachedInventory {
    /// Returns the content of the file as bytes.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        stored::to_bytes(KIND, self)
    }

    /// Parses a file. Returns `None` if it is damaged, or another version of this program wrote it.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        stored::parse(KIND, bytes)
    }

    /// Whether the current state of the kernel confirms the inventory, as far as it concerns the GPUs in the scope of the view.
    #[must_use]
    pub fn is_confirmed_by(&self, view: &KernelView) -> bool {
        let (Some(known), Some(state)) = (&self.state, &view.state) else {
            return false;
        };
        let KernelView {
            scope,
            version,
            gpus,
            instances,
            uptime,
            ..
        } = view;
        let is_confirmed = match self.until {
            None => {
                state.is_whole && is_confirmed(&self.inventory, version, gpus, instances, scope)
            }
            Some(until) => {
                *uptime > 0
                    && (until.saturating_sub(BRIEFLY)..until).contains(uptime)
                    && is_confirmed_in_part(&self.inventory, version, gpus, instances, scope)
            }
        };
        known.agrees_with(state) && is_confirmed
    }

    /// Examines the kernel for a request with these names.
    fn examine(&self, names: Option<&[String]>, view: Look<'_>) -> KernelView {
        view(&self.known_gpus, Scope::of_names(names, &self.inventory))
    }
}

/// An error, for the processes that wait for the answer.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Failed {
    number: u64,
    question: String,
    error: StoredError,
}

/// Whether both have the same working GPUs in the same MIG mode.
fn has_same_gpus(cached: &Inventory, newer: &Inventory) -> bool {
    let is_same =
        |known: &Gpu, gpu: &Gpu| known.uuid == gpu.uuid && known.mig_enabled == gpu.mig_enabled;
    let is_cached = |gpu: &Gpu| cached.gpus.iter().any(|known| is_same(known, gpu));
    cached.gpus.len() == newer.gpus.len() && newer.gpus.iter().all(is_cached)
}

/// The cache for one query.
#[derive(Debug)]
pub struct Cache {
    dir: RunDir,
    name: String,
    question: String,
    patience: Duration,
}

impl Cache {
    /// Returns the cache in a run-time directory. `root` is the driver root, `question` identifies the query, and `patience` is the time
    /// limit for the lock and the query together.
    #[must_use]
    pub fn at(dir: RunDir, root: &str, question: String, patience: Duration) -> Self {
        Self {
            dir,
            name: stored::name_for("inventory", root),
            question,
            patience,
        }
    }

    /// Returns the cached inventory if the kernel confirms it for the devices with these names, or for all if there are no names.
    /// Otherwise calls `slow`, because the rest can take seconds, and then `ask`, whose answer is cached if possible.
    ///
    /// # Errors
    /// If `ask` fails.
    pub fn get(
        &self,
        names: Option<&[String]>,
        view: Look<'_>,
        slow: &dyn Fn(),
        ask: Ask<'_>,
    ) -> Result<(Inventory, KernelView)> {
        let before = self.read();
        if let Some(cached) = &before {
            let now = cached.examine(names, view);
            if cached.is_confirmed_by(&now) {
                if cached.known_gpus != now.known_gpus {
                    self.know(cached.number, &now.known_gpus);
                }
                return Ok((cached.inventory.clone(), now));
            }
        }
        slow();
        let end = Instant::now() + self.patience;
        let arrived = before.map_or(0, |answer| answer.number);
        let failures = self.last_failure().map_or(0, |failed| failed.number);
        // Without the lock, there is no time left or the lock file cannot be created.
        let Ok(Some(_lock)) = self.lock() else {
            return Ok((ask(end)?.inventory, view(&[], Scope::All)));
        };
        // The previous owner of the lock may have stored an answer.
        if let Some(answer) = self.read() {
            let now = answer.examine(names, view);
            if answer.is_confirmed_by(&now) || answer.number >= arrived.saturating_add(2) {
                return Ok((answer.inventory, now));
            }
        }
        if let Some(failed) = self
            .last_failure()
            .filter(|failed| failed.number > failures)
        {
            return Err(failed.error.into());
        }
        self.ask(view, ask, end)
    }

    /// Returns the cached inventory if the kernel confirms it. Never queries NVML.
    #[must_use]
    pub fn confirmed(&self, view: &KernelView) -> Option<Inventory> {
        self.read()
            .filter(|answer| answer.is_confirmed_by(view))
            .map(|answer| answer.inventory)
    }

    /// Calls `ask` in any case, and caches the answer if possible.
    ///
    /// # Errors
    /// If `ask` fails.
    pub(crate) fn renew(&self, view: Look<'_>, ask: Ask<'_>) -> Result<(Inventory, KernelView)> {
        let end = Instant::now() + self.patience;
        match self.lock() {
            Ok(Some(_lock)) => self.ask(view, ask, end),
            _ => Ok((ask(end)?.inventory, view(&[], Scope::All))),
        }
    }

    /// Invalidates the cached inventory unless it has exactly the GPUs of a newer one. `None` stands for a failure of NVML, after which
    /// earlier answers are not reliable.
    pub fn invalidate_unless(&self, newer: Option<&Inventory>) {
        // The owner of the lock queries NVML at this moment. If its answer is invalidated here, the only cost is another query.
        let _lock = self.dir.lock(&self.lock_name(), SHORTLY);
        let Some(mut cached) = self.read() else {
            return;
        };
        if cached.state.is_some()
            && newer.is_none_or(|newer| !has_same_gpus(&cached.inventory, newer))
        {
            cached.state = None;
            self.dir.replace(&self.name, &cached.to_bytes()).ok();
        }
    }

    /// Stores what need not be read again, unless the answer was replaced since or is being replaced: the kernel drops entries of procfs
    /// when memory is short, and they have new times afterwards.
    fn know(&self, number: u64, known: &[KnownGpu]) {
        let Ok(Some(_lock)) = self.dir.lock(&self.lock_name(), Duration::ZERO) else {
            return;
        };
        if let Some(mut answer) = self.read()
            && answer.number == number
        {
            answer.known_gpus = known.to_vec();
            self.dir.replace(&self.name, &answer.to_bytes()).ok();
        }
    }

    fn lock_name(&self) -> String {
        format!("{}.lock", self.name)
    }

    fn lock(&self) -> std::io::Result<Option<base::sys::run_dir::Lock>> {
        let name = self.lock_name();
        let end = Instant::now() + self.patience;
        let left = |end: Instant| end.saturating_duration_since(Instant::now());
        Wait::begin(self.patience)
            .until(end, |end| self.dir.lock(&name, left(end)).transpose())
            .transpose()
    }

    /// Queries NVML and stores the answer. The caller holds the lock.
    fn ask(&self, view: Look<'_>, ask: Ask<'_>, end: Instant) -> Result<(Inventory, KernelView)> {
        let number = self
            .read()
            .map_or(0, |answer| answer.number)
            .saturating_add(1);
        let gather::NvmlAnswer {
            mig,
            inventory,
            gave_up,
        } = ask(end).inspect_err(|error| self.share(error))?;
        // The kernel is examined after the query, because the query makes the module open its GPUs and learn their UUIDs.
        let now = view(&[], Scope::All);
        let until = gave_up.then(|| now.uptime.saturating_add(BRIEFLY));
        let mut answer = CachedInventory {
            number,
            question: self.question.clone(),
            state: now.state.clone(),
            until,
            known_gpus: now.known_gpus.clone(),
            inventory,
        };
        if !answer.is_confirmed_by(&now) || !mig.is_certain(&now.instances) {
            answer.state = None;
        }
        // An error, such as a full disk, is ignored: the next container queries NVML again.
        self.dir.replace(&self.name, &answer.to_bytes()).ok();
        Ok((answer.inventory, now))
    }

    /// Stores an error for waiting processes. It has a separate file, because the cached inventory may become valid again.
    fn share(&self, error: &anyhow::Error) {
        let number = self
            .last_failure()
            .map_or(0, |failed| failed.number)
            .saturating_add(1);
        let failed = Failed {
            number,
            question: self.question.clone(),
            error: StoredError::new(error),
        };
        self.dir
            .replace(&self.failures(), &stored::to_bytes(KIND, &failed))
            .ok();
    }

    fn failures(&self) -> String {
        format!("{}.failed", self.name)
    }

    fn last_failure(&self) -> Option<Failed> {
        let bytes = self.dir.read(&self.failures(), MAX_SIZE).ok()??;
        stored::parse(KIND, &bytes).filter(|failed: &Failed| failed.question == self.question)
    }

    fn read(&self) -> Option<CachedInventory> {
        let bytes = self.dir.read(&self.name, MAX_SIZE).ok()??;
        CachedInventory::parse(&bytes).filter(|answer| answer.question == self.question)
    }
}

#[cfg(test)]
mod tests;
