//! NVML's answer, kept in the run-time directory for the containers that start next: NVML takes milliseconds where a daemon
//! keeps the GPUs initialised, and seconds where none does.
//!
//! # Why it is never wrong
//!
//! A kept answer is used only if all of this is so, read from the kernel at each start:
//!
//! 1. *Same question*: the driver root, the library's path, who asks, and this program's version.
//! 2. *Same driver*: boot id, module version, and the number of the module's directory in sysfs, which changes when it is
//!    loaded again; device, inode, size and times of the library.
//! 3. *Same GPUs*: the module itself gives bus id, UUID and device minor of each of its GPUs in /proc/driver/nvidia/gpus,
//!    and the kept answer has exactly these, each once. So no entry of it can mean another GPU than the container will
//!    open: one that was removed, added, replaced at the same place or numbered anew differs in one of the three. A
//!    module that was just loaded does not know UUIDs before a GPU is first opened, and says question marks: not used.
//! 4. *Same order*: an index is given by NVML, in the order of bus ids among the GPUs that it can open. The set is the same
//!    by 3, and what can be opened is the same if mode, owner and numbers of `/dev/nvidiactl` and of each GPU's node are.
//! 5. *Whole GPUs*: there is no directory of a GPU instance below /proc/driver/nvidia/capabilities, and NVML told of no
//!    GPU in MIG mode. What identifies a MIG device is made of its GPU, its instance and the engine that it runs on
//!    (`nvGenerateSmcUuid` in NVIDIA's open module), and procfs does not show the last one: instances destroyed and made
//!    again can have the same numbers and other UUIDs. With MIG devices nothing is kept, and each start asks.
//! 6. *Alive*: the configuration space of each GPU answers. Of one that fell off the bus it reads as ones.
//!
//! An answer with a GPU that failed is not kept: it is asked for again, and told again, at each start. A GPU that breaks
//! later in a way that only NVML sees is given to containers as it was, as it would be to one that started a second
//! earlier; `info` asks afresh, and keeps what it is told.
//!
//! A reset changes none of these, and no answer either: nodes, UUIDs and minors stay. MIG mode that it turns on is seen by
//! 5 as soon as there is an instance; without one the whole GPU is given, as NVML would have it.
//!
//! The file is read only if we alone can have written it ([`RunDir`]), and only if it is whole. A file that is anything else
//! is replaced. Without a directory to keep it in, each start asks.
//!
//! # Many at once
//!
//! The first one asks, under a lock; the others wait and find the answer. If that is not one to be kept, a waiter may still
//! use it if it was asked after the waiter came: that is no older than its own would be. Answers are numbered: of those
//! with the number `n` on arrival, `n + 1` may have been asked before, `n + 2` was not, since the lock lets one ask at a
//! time. Nobody waits longer than NVML may take; then everybody asks for itself.

use std::hash::{DefaultHasher, Hasher};
use std::time::Duration;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use super::Inventory;
use super::kept::is_confirmed;
use super::procfs::KernelGpu;
use crate::sys::run_dir::RunDir;

/// 256 GPUs have 64 KiB.
const MAX_SIZE: u64 = 1 << 20;
/// The first line, before the checksum of the rest.
const HEADER: &str = concat!("oci-nvidia-hook ", env!("CARGO_PKG_VERSION"), " inventory 1 ");

/// What the kernel says now.
#[derive(Clone, Debug)]
pub struct Look {
    /// Of the loaded module
    pub version: String,
    /// Its GPUs
    pub gpus: Vec<KernelGpu>,
    /// [`super::kept::host_state`]
    pub state: Option<String>,
}

/// An answer, as it is in the file.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Answer {
    number: u64,
    question: String,
    /// The host that it is true of; `None` if it is only for those who waited for it
    state: Option<String>,
    inventory: Inventory,
}

impl Answer {
    /// As it is kept.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let body = serde_json::to_string(self).unwrap_or_default();
        format!("{HEADER}{:016x}\n{body}", checksum(body.as_bytes())).into_bytes()
    }

    /// Reads it; `None` if it is not whole, or of another version of this program.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let rest = bytes.strip_prefix(HEADER.as_bytes())?;
        let (sum, body) = rest.split_at_checked(16)?;
        let body = body.strip_prefix(b"\n")?;
        let sum = u64::from_str_radix(std::str::from_utf8(sum).ok()?, 16).ok()?;
        (sum == checksum(body)).then(|| serde_json::from_slice(body).ok())?
    }

    /// Whether the kernel confirms it, now.
    #[must_use]
    pub fn is_true_of(&self, look: &Look) -> bool {
        self.state.is_some() && self.state == look.state && is_confirmed(&self.inventory, &look.version, &look.gpus)
    }
}

/// Against damage, not against forgers: those cannot write the file.
fn checksum(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(bytes);
    hasher.finish()
}

/// Where the answer to one question is kept.
#[derive(Debug)]
pub struct Cache {
    dir: RunDir,
    name: String,
    question: String,
    patience: Duration,
}

impl Cache {
    /// In our run-time directory. `root` is the driver root, `question` what is asked and by whom; another process that asks
    /// already is waited for as long as `patience`. `None` if there is no such directory: then nothing is kept.
    #[must_use]
    pub fn open(root: &str, question: String, patience: Duration) -> Option<Self> {
        Some(Self::at(RunDir::open().ok()?, root, question, patience))
    }

    fn at(dir: RunDir, root: &str, question: String, patience: Duration) -> Self {
        let name = match root {
            "/" => "inventory".to_owned(),
            root => format!("inventory-{:016x}", checksum(root.as_bytes())),
        };
        Self { dir, name, question, patience }
    }

    /// The kept answer if it is still true, else the one that `ask` gives, which is kept if it can be. `slow` is called if
    /// it is not true: from there on it may take a while.
    ///
    /// # Errors
    /// Those of `ask`.
    pub fn get(
        &self,
        look: &dyn Fn() -> Look,
        slow: &dyn Fn(),
        ask: &dyn Fn() -> Result<Inventory>,
    ) -> Result<(Inventory, Look)> {
        let now = look();
        let before = self.read();
        if let Some(kept) = before.as_ref().filter(|answer| answer.is_true_of(&now)) {
            return Ok((kept.inventory.clone(), now));
        }
        slow();
        let arrived = before.map_or(0, |answer| answer.number);
        let lock = self.dir.lock(&format!("{}.lock", self.name), self.patience);
        let Ok(Some(_lock)) = lock else { return Ok((ask()?, look())) };
        // Whoever had the lock before may have got it.
        if let Some(answer) = self.read() {
            let now = look();
            if answer.is_true_of(&now) || answer.number >= arrived.saturating_add(2) {
                return Ok((answer.inventory, now));
            }
        }
        self.ask(look, ask)
    }

    /// Asks, whatever is kept, and keeps the answer if it can be.
    ///
    /// # Errors
    /// Those of `ask`.
    pub fn renew(&self, look: &dyn Fn() -> Look, ask: &dyn Fn() -> Result<Inventory>) -> Result<(Inventory, Look)> {
        match self.dir.lock(&format!("{}.lock", self.name), self.patience) {
            Ok(Some(_lock)) => self.ask(look, ask),
            _ => Ok((ask()?, look())),
        }
    }

    /// Under the lock.
    fn ask(&self, look: &dyn Fn() -> Look, ask: &dyn Fn() -> Result<Inventory>) -> Result<(Inventory, Look)> {
        let number = self.read().map_or(0, |answer| answer.number).saturating_add(1);
        let inventory = ask()?;
        // Looked at afterwards: to ask is what makes the module learn who its GPUs are.
        let now = look();
        let state = now.state.clone().filter(|_| is_confirmed(&inventory, &now.version, &now.gpus));
        let answer = Answer { number, question: self.question.clone(), state, inventory };
        // A disk that is full costs the next container time.
        self.dir.replace(&self.name, &answer.to_bytes()).ok();
        Ok((answer.inventory, now))
    }

    fn read(&self) -> Option<Answer> {
        let bytes = self.dir.read(&self.name, MAX_SIZE).ok()??;
        Answer::parse(&bytes).filter(|answer| answer.question == self.question)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::path::PathBuf;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Instant;

    use super::*;
    use crate::inventory::FailedGpu;
    use crate::inventory::select::tests::inventory;

    /// Two whole GPUs.
    fn whole() -> Inventory {
        let mut whole = Inventory { driver_version: "535.1".into(), ..inventory() };
        whole.gpus.truncate(2);
        whole
    }

    fn with_failed() -> Inventory {
        let mut inventory = whole();
        let gpu = inventory.gpus.remove(1);
        let why = "GPU is lost".to_owned();
        let (index, uuid, bus_id) = (Some(1), Some(gpu.uuid), Some(gpu.bus_id));
        inventory.failed.push(FailedGpu { index, uuid, bus_id, why, ..FailedGpu::default() });
        inventory
    }

    fn look(state: &str) -> Look {
        let gpu = |gpu: &crate::inventory::Gpu| KernelGpu {
            dir: gpu.bus_id.in_sysfs().into(),
            bus_id: gpu.bus_id,
            minor: Some(gpu.minor),
            uuid: Some(gpu.uuid.clone()),
            ..KernelGpu::default()
        };
        Look {
            version: "535.1".into(),
            gpus: whole().gpus.iter().map(gpu).collect(),
            state: (!state.is_empty()).then(|| state.to_owned()),
        }
    }

    /// A run-time directory, and how often NVML was asked.
    struct Scene {
        base: tempfile::TempDir,
        asked: AtomicU64,
    }

    impl Scene {
        fn new() -> Self {
            Self { base: tempfile::tempdir().unwrap(), asked: AtomicU64::new(0) }
        }

        fn cache(&self, question: &str, patience: Duration) -> Cache {
            Cache::at(RunDir::open_in(self.base.path()).unwrap(), "/", question.to_owned(), patience)
        }

        fn ask(&self, answer: &Inventory, takes: Duration) -> Result<Inventory> {
            self.asked.fetch_add(1, Ordering::SeqCst);
            std::thread::sleep(takes);
            Ok(answer.clone())
        }

        /// One start, and how often NVML was asked so far.
        fn start(&self, question: &str, state: &str, answer: &Inventory) -> (Inventory, u64) {
            let cache = self.cache(question, Duration::from_secs(9));
            let got = cache.get(&|| look(state), &|| (), &|| self.ask(answer, Duration::ZERO)).unwrap().0;
            (got, self.asked.load(Ordering::SeqCst))
        }

        fn file(&self) -> PathBuf {
            self.base.path().join("oci-nvidia-hook/inventory")
        }
    }

    #[test]
    fn an_answer_is_kept_as_long_as_the_host_is_the_same() {
        let scene = Scene::new();
        for (question, state, asked) in
            [("q", "a", 1), ("q", "a", 1), ("q", "b", 2), ("q", "b", 2), ("q", "a", 3), ("r", "a", 4), ("r", "a", 4)]
        {
            assert_eq!(scene.start(question, state, &whole()), (whole(), asked), "{question} {state}");
        }
        let mode = scene.file().metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o600);
        let cache = scene.cache("r", Duration::from_secs(9));
        cache.renew(&|| look("a"), &|| scene.ask(&whole(), Duration::ZERO)).unwrap();
        assert_eq!(scene.start("r", "a", &whole()), (whole(), 5), "asked afresh, and known from then on");
    }

    #[test]
    fn what_may_not_be_kept_is_asked_again() {
        let other_driver = Inventory { driver_version: "1".into(), ..whole() };
        for (state, answer) in [("", whole()), ("a", with_failed()), ("a", other_driver)] {
            let scene = Scene::new();
            for asked in 1..4 {
                assert_eq!(scene.start("q", state, &answer), (answer.clone(), asked));
            }
            // What was in the way is gone.
            assert_eq!(scene.start("q", "a", &whole()), (whole(), 4));
            assert_eq!(scene.start("q", "a", &with_failed()), (whole(), 4));
            assert_eq!(scene.start("q", "", &with_failed()), (with_failed(), 5), "no longer confirmed");
        }
    }

    #[test]
    fn a_file_that_is_anything_else_is_replaced() {
        let scene = Scene::new();
        scene.start("q", "a", &whole());
        let good = std::fs::read(scene.file()).unwrap();
        let damaged = |at: usize| {
            let mut bytes = good.clone();
            bytes[at] ^= 1;
            bytes
        };
        let older = String::from_utf8(good.clone()).unwrap().replacen(" inventory 1 ", " inventory 0 ", 1).into_bytes();
        let unknown = String::from_utf8(good[HEADER.len() + 17..].to_vec()).unwrap().replacen('{', "{\"more\":1,", 1);
        let unknown = format!("{HEADER}{:016x}\n{unknown}", checksum(unknown.as_bytes())).into_bytes();
        let mut files = vec![Vec::new(), b"nonsense".to_vec(), older, unknown, vec![b' '; 2 << 20]];
        files.extend([0, HEADER.len(), HEADER.len() + 16, HEADER.len() + 17, good.len() / 2].map(damaged));
        files.extend([10, HEADER.len() + 3, good.len() - 1].map(|end| good[..end].to_vec()));
        for (number, bytes) in files.into_iter().enumerate() {
            std::fs::write(scene.file(), &bytes).unwrap();
            let before = scene.asked.load(Ordering::SeqCst);
            assert_eq!(scene.start("q", "a", &whole()), (whole(), before + 1), "{number}");
            assert_eq!(scene.start("q", "a", &whole()), (whole(), before + 1), "{number}");
        }
    }

    #[test]
    fn what_others_could_have_written_is_replaced() {
        let scene = Scene::new();
        scene.start("q", "a", &whole());
        let elsewhere = scene.base.path().join("elsewhere");
        std::fs::copy(scene.file(), &elsewhere).unwrap();
        let put: [(&str, &dyn Fn()); 4] = [
            ("a link", &|| symlink(&elsewhere, scene.file()).unwrap()),
            ("a hard link", &|| std::fs::hard_link(&elsewhere, scene.file()).unwrap()),
            ("a fifo", &|| nix::unistd::mkfifo(&scene.file(), nix::sys::stat::Mode::S_IRUSR).unwrap()),
            ("writable", &|| {
                std::fs::copy(&elsewhere, scene.file()).unwrap();
                std::fs::set_permissions(scene.file(), PermissionsExt::from_mode(0o622)).unwrap();
            }),
        ];
        for (what, put) in put {
            std::fs::remove_file(scene.file()).unwrap();
            put();
            let before = scene.asked.load(Ordering::SeqCst);
            assert_eq!(scene.start("q", "a", &whole()), (whole(), before + 1), "{what}");
            assert!(scene.file().symlink_metadata().unwrap().is_file(), "{what}");
        }
    }

    /// So many threads at once; how often NVML was asked.
    fn at_once(answer: &Inventory) -> u64 {
        let scene = Scene::new();
        std::thread::scope(|scope| {
            for _ in 0..100 {
                scope.spawn(|| {
                    let cache = scene.cache("q", Duration::from_secs(30));
                    let got = cache.get(&|| look("a"), &|| (), &|| scene.ask(answer, Duration::from_millis(100)));
                    assert_eq!(got.unwrap().0, *answer);
                });
            }
        });
        scene.asked.load(Ordering::SeqCst)
    }

    #[test]
    fn of_a_hundred_one_asks() {
        assert_eq!(at_once(&whole()), 1);
        // Those who come while one is asked need one more; so do those who come while that one is.
        let asked = at_once(&with_failed());
        assert!((1..=10).contains(&asked), "{asked}");
    }

    #[test]
    fn what_was_asked_before_is_not_taken_for_new() {
        let scene = Scene::new();
        assert_eq!(scene.start("q", "a", &with_failed()).1, 1);
        let slow = scene.cache("q", Duration::from_secs(30));
        std::thread::scope(|scope| {
            let takes = Duration::from_millis(300);
            let (slow, scene) = (&slow, &scene);
            let asking = scope.spawn(move || slow.get(&|| look("a"), &|| (), &|| scene.ask(&with_failed(), takes)));
            std::thread::sleep(takes / 4);
            assert_eq!(scene.start("q", "a", &whole()), (whole(), 3), "the GPU is well again");
            asking.join().unwrap().unwrap();
        });
    }

    #[test]
    fn nobody_waits_for_ever() {
        let scene = Scene::new();
        let held = RunDir::open_in(scene.base.path()).unwrap().lock("inventory.lock", Duration::ZERO).unwrap().unwrap();
        let start = Instant::now();
        let cache = scene.cache("q", Duration::from_millis(100));
        type Answer = fn(&Cache, &dyn Fn() -> Look, &dyn Fn() -> Result<Inventory>) -> Result<(Inventory, Look)>;
        let get: Answer = |cache, look, ask| cache.get(look, &|| (), ask);
        for answer in [get, Cache::renew] {
            let got = answer(&cache, &|| look("a"), &|| scene.ask(&whole(), Duration::ZERO)).unwrap();
            assert_eq!(got.0, whole());
        }
        assert_eq!(scene.asked.load(Ordering::SeqCst), 2);
        assert!(start.elapsed() >= Duration::from_millis(200) && start.elapsed() < Duration::from_secs(5));
        drop(held);
        // A lock that is no file of ours.
        let lock = scene.base.path().join("oci-nvidia-hook/inventory.lock");
        std::fs::remove_file(&lock).unwrap();
        symlink("/dev/null", &lock).unwrap();
        assert_eq!(scene.start("q", "a", &whole()), (whole(), 3));
    }

    #[test]
    fn what_nvml_cannot_say_is_an_error_each_time() {
        let scene = Scene::new();
        for _ in 0..2 {
            let cache = scene.cache("q", Duration::from_secs(9));
            assert!(cache.get(&|| look("a"), &|| (), &|| anyhow::bail!("no")).is_err());
        }
        assert!(!scene.file().try_exists().unwrap());
    }
}
