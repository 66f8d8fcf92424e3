//! Watches the GPUs for the kubelet plugin.
//!
//! The process has one thread, and the privileges of a user who can open the device nodes. It polls the GPUs, waits for events, and prints
//! a line for each result. It ends when its standard input is closed, and if another process is needed to see the GPUs as they are now:
//! NVML counts the GPUs when it is initialized.
//!
//! An idle node must not notice it, so what rarely changes is asked rarely. The GPUs and MIG devices are listed again if the kernel shows a
//! change, if NVML reports one, or if a GPU fails. procfs reports no changes (inotify(7)), so a few of its directories are examined.

mod ask;
mod measure;

use std::io;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use base::paths::HostPath;
use base::sys::confine::CapabilitySet;
use nvidia_host::config::{self, Config};
use nvidia_host::driver::DriverKind;
use nvidia_host::host::{HostMarks, HostState, WatchedDriver};
use nvidia_host::inventory::nvml::NvmlProgress;
use nvidia_host::inventory::{FailedGpu, Inventory};
use nvidia_host::nvml::message::{End, GpuEvent, Link, Message, NvmlCall, Sample, Snapshot};
use nvidia_host::nvml::progress::Progress;
use nvidia_host::nvml::protocol::{Measures, MonitorRequest};
use nvidia_host::nvml::{Failed, query};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use self::ask::{Handle, Meaning};
use self::measure::{DeviceConstants, MigMemory};
use crate::inventory::take;
use crate::lines::Lines;
use crate::load::{load, may_own_files};
use crate::monitoring::{EventData, EventSet, Monitoring};

/// The time between two polls of all GPUs. The driver reports most errors as events, so this is the age of the values for metrics.
const ROUND: Duration = Duration::from_secs(10);

/// How often the kernel is examined for changes, and the standard input for its end. While a GPU fails, all are polled as often.
const STEP: Duration = Duration::from_secs(5);

/// How often the GPUs and MIG devices are listed although nothing shows a change. If the driver reports none, this finds compute instances
/// that are removed from a GPU instance.
const LISTING: Duration = Duration::from_secs(300);

/// How long lines are held while NVML is slow.
const HELD: Duration = Duration::from_millis(200);

/// The shortest time between two polls, also if NVML cannot wait for events.
const PAUSE: Duration = Duration::from_secs(1);

/// How long a GPU may fail before another process tries: after a reset, a GPU may answer only after another initialization.
const MAX_FAILING: Duration = Duration::from_secs(30);

/// The time in which a repetition of an event is not reported.
const REPETITION: Duration = Duration::from_secs(1);

/// Why a GPU is not asked.
const SKIPPED: &str = "the driver does not answer queries about this GPU";

/// Watches the GPUs until the standard input is closed.
///
/// # Errors
/// If nothing reads the lines. Errors of the driver are lines.
pub(crate) fn answer(
    request: &MonitorRequest,
    progress: Option<Progress>,
    lines: &mut Lines,
) -> Result<()> {
    match watch(request, progress, lines) {
        Ok(Some(end)) => lines.write(&Message::End(end)),
        Ok(None) => {}
        Err(error) => lines.write(&Message::End(End::Unusable(base::report::line(&error)))),
    }
    ensure!(!lines.is_closed(), "cannot write to stdout");
    Ok(())
}

/// Tells the supervisor which call follows. Results of earlier calls do not wait for a slow one.
struct Announcer<'a> {
    progress: Option<Progress>,
    lines: &'a mut Lines,
    flushed: Instant,
}

impl Announcer<'_> {
    fn announce(&mut self, index: Option<u32>, gpu: Option<&str>) {
        if self.flushed.elapsed() >= HELD {
            self.flush();
        }
        self.store(NvmlCall {
            index,
            gpu: gpu.map(str::to_owned),
            wait_ms: 0,
        });
    }

    /// Tells that no GPU is asked, and that the call waits for events.
    fn announce_wait(&self, limit: Duration) {
        self.store(NvmlCall {
            wait_ms: milliseconds(limit),
            ..NvmlCall::default()
        });
    }

    fn store(&self, call: NvmlCall) {
        if let Some(progress) = &self.progress {
            progress.store(call);
        }
    }

    fn hold(&mut self, message: &Message) {
        self.lines.hold(message);
    }

    fn flush(&mut self) {
        self.lines.flush();
        self.flushed = Instant::now();
    }
}

/// Returns the configuration with what options have changed.
fn config_of(request: &MonitorRequest) -> Result<Config> {
    let (mut config, _) = config::read(request.config.as_deref())?;
    config.driver_root = HostPath::new(&request.driver_root);
    if let Some(root) = &request.dev_root {
        config.dev_root = Some(HostPath::new(root));
    }
    Ok(config)
}

/// Returns `None` when the standard input is closed.
fn watch(
    request: &MonitorRequest,
    progress: Option<Progress>,
    lines: &mut Lines,
) -> Result<Option<End>> {
    let site = WatchedDriver::find(&config_of(request)?)?;
    let question = site.question();
    let place = question.library_place()?;
    let loaded = load(CapabilitySet::empty(), &place, &site.trees(), lines)
        .map_err(|refused| query::explain_refused(&refused, question))?;
    // A change between the two is noticed.
    let marks = site.marks(&site.state());
    let mut watch = Watch {
        api: &loaded.library,
        site: &site,
        limits_reading: may_own_files(place.identity),
        skip: &request.skip,
        measures: request.measures,
        out: Announcer {
            progress,
            lines,
            flushed: Instant::now(),
        },
        marks,
        host: site.state(),
        handles: Vec::new(),
        snapshot: None,
        listed: Instant::now(),
        is_outdated: true,
        mig_memory: MigMemory::default(),
        known: DeviceConstants::default(),
        links: None,
        events: None,
        last_event: None,
        failing: None,
    };
    watch
        .run()
        .map_err(|failed| query::explain_nvml(&failed, question, place.identity))
}

struct Watch<'a, M> {
    api: &'a M,
    site: &'a WatchedDriver,
    /// Whether this process cannot open nodes of MIG devices that are created while it runs
    limits_reading: bool,
    skip: &'a [u32],
    measures: Measures,
    out: Announcer<'a>,
    /// The marks of the host's state
    marks: HostMarks,
    host: HostState,
    handles: Vec<Handle>,
    snapshot: Option<Snapshot>,
    /// When the GPUs were listed
    listed: Instant,
    /// The GPUs must be listed again.
    is_outdated: bool,
    mig_memory: MigMemory,
    known: DeviceConstants,
    /// The links, and the UUIDs of all GPUs for which they are known
    links: Option<(Vec<String>, Vec<Link>)>,
    /// The event set, and the UUIDs of the GPUs in it
    events: Option<(EventSet, Vec<String>)>,
    last_event: Option<(GpuEvent, Instant)>,
    /// Since when a GPU fails
    failing: Option<Instant>,
}

/// Why a wait ended.
enum Woken {
    /// The time is over.
    Time,
    /// The standard input is closed.
    Closed,
    /// The GPUs must be polled.
    Poll,
}

impl<M: Monitoring> Watch<'_, M> {
    fn run(&mut self) -> Result<Option<End>, Failed> {
        loop {
            let start = Instant::now();
            self.round()?;
            if let Some(since) = self.failing
                && since.elapsed() >= MAX_FAILING
            {
                return Ok(Some(End::Changed));
            }
            let pause = if self.is_outdated { STEP } else { ROUND };
            self.out.hold(&Message::Polled {
                next_ms: milliseconds(pause),
            });
            self.out.flush();
            if let Some(end) = self.wait_until(start + pause) {
                return Ok(end);
            }
            if self.out.lines.is_closed() {
                return Ok(None);
            }
        }
    }

    /// Waits for events, and for changes that the kernel shows. Returns why the process ends, if it does.
    fn wait_until(&mut self, end: Instant) -> Option<Option<End>> {
        loop {
            let now = Instant::now();
            match self.wait(end.saturating_duration_since(now).min(STEP)) {
                Woken::Closed => return Some(None),
                Woken::Poll => {
                    self.is_outdated = true;
                    return None;
                }
                Woken::Time => {}
            }
            let marks = self.site.marks(&self.host);
            if marks != self.marks {
                let has_other_mig = marks.has_other_mig(&self.marks);
                self.marks = marks;
                if self.needs_another_process(has_other_mig) {
                    return Some(Some(End::Changed));
                }
                if has_other_mig {
                    self.is_outdated = true;
                    return None;
                }
            }
            if Instant::now() >= end {
                return None;
            }
        }
    }

    /// Whether this process cannot see the GPUs or MIG devices as they are now.
    fn needs_another_process(&mut self, has_other_mig: bool) -> bool {
        let host = self.site.state();
        let has_other_gpus = host.has_other_gpus(&self.host);
        self.host = host;
        has_other_gpus || has_other_mig && self.limits_reading
    }

    /// Lists the GPUs and MIG devices, unless they are known, and polls the GPUs.
    fn round(&mut self) -> Result<(), Failed> {
        let is_due = self.is_outdated || self.listed.elapsed() >= LISTING;
        let snapshot = match &self.snapshot {
            Some(known) if !is_due => known.clone(),
            _ => self.list()?,
        };
        let handles = self.handles.clone();
        self.mig_memory.expire();
        if self.events.is_none() {
            // An event between the sample and the registration would be lost.
            self.register(&handles);
        }
        let mut working = Vec::new();
        for handle in handles {
            if self.sample(&handle).error.is_none() {
                working.push(handle);
            }
        }
        for failed in &snapshot.inventory.failed {
            let Some(uuid) = &failed.uuid else { continue };
            let mut sample = Sample {
                gpu: uuid.clone(),
                node_missing: failed.node_missing,
                ..Sample::default()
            };
            if !failed.node_missing {
                sample.error = Some(failed.why.clone());
            }
            self.out.hold(&Message::Sample(sample));
        }
        let mut failed = snapshot.inventory.failed.iter();
        self.is_outdated = working.len() < self.handles.len()
            || failed.any(|gpu| !gpu.node_missing && gpu.why != SKIPPED);
        if self.is_outdated {
            self.failing.get_or_insert_with(Instant::now);
        } else {
            self.failing = None;
        }
        self.register(&working);
        Ok(())
    }

    /// Takes the inventory, and reports it if it is another one.
    fn list(&mut self) -> Result<Snapshot, Failed> {
        let snapshot = self.take()?;
        self.listed = Instant::now();
        if self.snapshot.as_ref() != Some(&snapshot) {
            self.mig_memory = MigMemory::default();
            self.out
                .hold(&Message::Snapshot(Box::new(snapshot.clone())));
        }
        self.snapshot = Some(snapshot.clone());
        Ok(snapshot)
    }

    fn sample(&mut self, handle: &Handle) -> Sample {
        self.out
            .announce(Some(handle.index), Some(&handle.gpu.uuid));
        let mut sample = Sample {
            node_missing: handle.node_missing,
            ..ask::sample(self.api, handle)
        };
        if sample.error.is_none() {
            let mig_memory = &mut self.mig_memory;
            sample.measured = measure::measure(self.api, handle, self.measures, mig_memory);
        }
        self.out.hold(&Message::Sample(sample.clone()));
        sample
    }

    fn take(&mut self) -> Result<Snapshot, Failed> {
        let mut inventory = self.take_inventory()?;
        self.handles.clear();
        let mut snapshot = Snapshot::default();
        for gpu in &inventory.gpus {
            self.out.announce(Some(gpu.index), Some(&gpu.uuid));
            // It has answered already.
            let Ok(device) = self.api.device(gpu.index) else {
                continue;
            };
            let handle = Handle {
                index: gpu.index,
                gpu: gpu.clone(),
                device,
                // A node that is created or removed needs another process.
                node_missing: !self.site.has_node(gpu.minor),
            };
            snapshot
                .mig_profiles
                .append(&mut ask::mig_profiles(self.api, &handle));
            self.known.add(self.api, &handle);
            if ask::supported_events(self.api, device) == 0 {
                snapshot.without_events.push(gpu.uuid.clone());
            }
            self.handles.push(handle);
        }
        self.known.retain(&self.handles);
        snapshot.properties.clone_from(&self.known.properties);
        snapshot
            .mig_attributes
            .clone_from(&self.known.mig_attributes);
        snapshot.memory_slices.clone_from(&self.known.memory_slices);
        self.out.announce(None, None);
        snapshot.links = self.links();
        self.site.complete(&mut inventory);
        Ok(Snapshot {
            inventory,
            ..snapshot
        })
    }

    fn take_inventory(&mut self) -> Result<Inventory, Failed> {
        let mut inventory = Inventory::default();
        let Self { handles, out, .. } = self;
        out.announce(None, None);
        take(
            self.api,
            DriverKind::Linux,
            self.skip,
            &mut |report| match report {
                NvmlProgress::Driver(driver) => {
                    (inventory.driver_version, inventory.cuda_version) =
                        (driver.version, driver.cuda);
                }
                NvmlProgress::Next(index) => {
                    let known = handles.iter().find(|handle| handle.index == index);
                    out.announce(Some(index), known.map(|handle| handle.gpu.uuid.as_str()));
                }
                NvmlProgress::Gpu(gpu) => inventory.gpus.push(gpu),
                NvmlProgress::Failed(failed) => inventory.failed.push(failed),
            },
        )?;
        for index in self.skip {
            inventory.failed.push(FailedGpu {
                index: Some(*index),
                why: SKIPPED.to_owned(),
                ..FailedGpu::default()
            });
        }
        inventory.failed.sort_by_key(|failed| failed.index);
        Ok(inventory)
    }

    /// Returns the links, which do not change while the GPUs are the same.
    fn links(&mut self) -> Vec<Link> {
        let gpus = uuids(&self.handles);
        if let Some((known, links)) = &self.links
            && *known == gpus
        {
            return links.clone();
        }
        let links = ask::links(self.api, &self.handles);
        self.links = Some((gpus, links.clone()));
        links
    }

    /// Registers for the events of these GPUs. Events that are already in the old set are reported.
    fn register(&mut self, working: &[Handle]) {
        let gpus = uuids(working);
        if let Some((_, known)) = &self.events
            && *known == gpus
        {
            return;
        }
        self.out.announce(None, None);
        let Self { api, out, .. } = self;
        let new = ask::register(*api, working, &mut |gpu| {
            out.announce(Some(gpu.index), Some(&gpu.gpu.uuid))
        });
        self.out.announce(None, None);
        if let Some((old, _)) = std::mem::replace(&mut self.events, new.map(|set| (set, gpus))) {
            while let Ok(Some(event)) = self.api.wait(&old, Duration::ZERO) {
                self.handle(event);
            }
            self.api.free_event_set(old).ok();
        }
    }

    /// Waits for an event.
    fn wait(&mut self, limit: Duration) -> Woken {
        let has_events = self.events.is_some();
        if is_stdin_closed(if has_events { Duration::ZERO } else { limit }) {
            return Woken::Closed;
        }
        let Some((set, _)) = &self.events else {
            return Woken::Time;
        };
        self.out.announce_wait(limit);
        match self.api.wait(set, limit) {
            Ok(None) => Woken::Time,
            Ok(Some(event)) => {
                let woken = self.handle(event);
                self.out.flush();
                woken
            }
            Err(_) => {
                // The error does not name the GPU. Polling shows which one fails, and the next set is without it.
                if let Some((set, _)) = self.events.take() {
                    self.api.free_event_set(set).ok();
                }
                if is_stdin_closed(PAUSE) {
                    Woken::Closed
                } else {
                    Woken::Poll
                }
            }
        }
    }

    /// Returns the GPU of an event, also if the event names one of its MIG devices.
    fn gpu_of(&self, data: &EventData) -> Option<Handle> {
        let mut handles = self.handles.iter();
        if let Some(handle) = handles.find(|handle| handle.device == data.device) {
            return Some(handle.clone());
        }
        let uuid = self.api.uuid(data.device).ok()?;
        let has_uuid = |handle: &&Handle| handle.gpu.uuid == uuid || handle.has_mig(&uuid);
        self.handles.iter().find(has_uuid).cloned()
    }

    fn handle(&mut self, data: EventData) -> Woken {
        let Some(handle) = self.gpu_of(&data) else {
            return Woken::Time;
        };
        let kind = match ask::meaning(data.kind, data.data) {
            Some(Meaning::Report(kind)) => kind,
            Some(Meaning::MigChanged) => return Woken::Poll,
            None => return Woken::Time,
        };
        let event = GpuEvent {
            gpu: handle.gpu.uuid.clone(),
            kind,
        };
        if let Some((last, at)) = &self.last_event
            && *last == event
            && at.elapsed() < REPETITION
        {
            return Woken::Time;
        }
        self.out.hold(&Message::Event(event.clone()));
        self.last_event = Some((event, Instant::now()));
        self.sample(&handle);
        Woken::Time
    }
}

fn uuids(handles: &[Handle]) -> Vec<String> {
    let uuids = handles.iter().map(|handle| handle.gpu.uuid.clone());
    uuids.collect()
}

fn milliseconds(time: Duration) -> u32 {
    u32::try_from(time.as_millis()).unwrap_or(u32::MAX)
}

/// Whether the standard input is closed within this time. The parent writes nothing to it.
fn is_stdin_closed(limit: Duration) -> bool {
    let stdin = io::stdin();
    // poll(2) reports POLLHUP and POLLERR without being asked for them.
    let mut polled = [PollFd::new(&stdin, PollFlags::empty())];
    let limit = Timespec::try_from(limit).ok();
    poll(&mut polled, limit.as_ref()).is_ok_and(|count| count > 0)
}
