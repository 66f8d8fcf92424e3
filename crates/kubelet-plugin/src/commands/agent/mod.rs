//! Connects the reports of the monitor with what the process publishes.
//!
//! | module | purpose |
//! |---|---|
//! | [`state`] | the state of the node |
//! | [`specs`] | the CDI specs, which have a device before it is offered |
//! | [`outlets`] | what follows from the state, for the kubelet, engines and metrics |

pub mod outlets;
pub mod specs;
pub mod state;

use std::path::Path;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval, sleep_until};

use nvidia_host::config::Limits;

use super::control::ControlCommand;
use crate::cdi_specs::Devices;
use crate::dir_events::DirEvents;
use crate::log::Log;
use crate::monitor::update::Update;
use crate::settings::Settings;
use crate::settings::follow::{self, Follower};
use outlets::Outlets;
use specs::Specs;
use state::NodeState;

/// The time between two looks at the MPS daemons, if there are any. No event of a directory shows that a daemon's supervisor was killed.
const MPS_PERIOD: Duration = Duration::from_secs(1);

/// The time between two looks at what causes no event, such as the directories of the driver.
const INSPECTION: Duration = Duration::from_secs(30);
/// The same while NVML does not answer: the GPUs that the kernel lists are offered to restarted containers until then.
const UNANSWERED_INSPECTION: Duration = Duration::from_secs(10);

/// The shortest time between two looks at the directories because of events. Another program may write a file again and again, for example a
/// second plugin that keeps the same CDI spec.
const EVENT_PAUSE: Duration = Duration::from_millis(500);

/// Publishes each change of the node.
#[derive(Debug)]
pub struct Agent {
    state: NodeState,
    specs: Specs,
    outlets: Outlets,
    follower: Follower,
    log: Log,
}

impl Agent {
    /// Creates an agent that follows this config.toml.
    #[must_use]
    pub fn new(
        settings: &Settings,
        config_path: Option<&Path>,
        state: NodeState,
        specs: Specs,
        outlets: Outlets,
        log: Log,
    ) -> Self {
        Self {
            state,
            specs,
            outlets,
            follower: Follower::new(config_path, settings.common.devices.clone()),
            log,
        }
    }

    /// Publishes every change until the monitor's supervisor ends.
    pub async fn follow(
        &mut self,
        mut updates: mpsc::Receiver<Update>,
        mut commands: mpsc::Receiver<ControlCommand>,
    ) {
        self.list_kernel_gpus();
        self.state.find_mps_daemons();
        let mut mps_period = interval(MPS_PERIOD);
        mps_period.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut inspection = Instant::now();
        let events = DirEvents::new();
        let mut handled = Instant::now();
        let mut follow_period = interval(follow::PERIOD);
        follow_period.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let next_tick = self.state.node.next_tick();
            let listed_by = self.state.listed_by();
            tokio::select! {
                update = updates.recv() => match update {
                    Some(update) => self.apply(update),
                    None => return,
                },
                Some(command) = commands.recv() => {
                    // `check` reads the specs.
                    self.specs.restore(&mut self.state.node);
                    self.outlets.handle(command, &mut self.state, &self.specs);
                }
                _ = follow_period.tick(), if self.follower.is_waiting() => {
                    if !self.follow_settings() {
                        continue;
                    }
                }
                _ = mps_period.tick(), if !self.state.node.mps().daemons.is_empty() => {
                    if !self.state.find_mps_daemons() {
                        continue;
                    }
                }
                () = events.next_after(handled + EVENT_PAUSE) => {
                    handled = Instant::now();
                    self.watch(&events);
                    if !self.inspect_dirs() {
                        continue;
                    }
                }
                () = at(Some(inspection)) => {
                    inspection = Instant::now() + self.inspection_period();
                    self.inspect(&events);
                }
                () = at(next_tick), if next_tick.is_some() => {}
                () = at(listed_by), if listed_by.is_some() => {}
            }
            self.state.node.tick(Instant::now());
            self.state.end_wait();
            self.outlets.publish(&self.state, &self.specs);
        }
    }

    /// Looks at what causes no event, such as a directory that appears, or that a link names.
    fn inspect(&mut self, events: &DirEvents) {
        self.watch(events);
        self.inspect_dirs();
        if self.state.is_unanswered {
            self.list_kernel_gpus();
        } else {
            self.specs.refresh_if_due(&mut self.state.node);
        }
    }

    const fn inspection_period(&self) -> Duration {
        if self.state.is_unanswered {
            UNANSWERED_INSPECTION
        } else {
            INSPECTION
        }
    }

    /// Watches the directories of what the agent follows.
    fn watch(&self, events: &DirEvents) {
        let mut dirs = self.follower.dirs();
        dirs.extend(self.specs.dirs());
        dirs.extend(self.state.mps_dirs());
        for dir in dirs {
            events.add_or_expect(&dir);
        }
    }

    /// Inspects what is in these directories, and returns whether anything has changed.
    fn inspect_dirs(&mut self) -> bool {
        let has_settings = self.follow_settings();
        let has_daemons = self.state.find_mps_daemons();
        let has_specs = self.specs.restore(&mut self.state.node);
        has_settings || has_daemons || has_specs
    }

    /// Applies a change of the settings, and returns whether there was one.
    fn follow_settings(&mut self) -> bool {
        match self.follower.poll(Instant::now()) {
            None => return false,
            Some(Err(error)) => self.log.error(&error),
            Some(Ok((limits, findings))) => {
                self.set_limits(&limits);
                self.log.findings(&findings);
            }
        }
        true
    }

    /// Uses the GPUs that the kernel lists, until NVML answers. The kernel knows the UUID of a GPU
    /// that was opened once.
    fn list_kernel_gpus(&mut self) {
        let devices = Devices::Unanswered(self.state.list_kernel_gpus());
        self.specs
            .update(&mut self.state.node, |specs| specs.set(&devices));
    }

    fn apply(&mut self, update: Update) {
        self.log.debug(|| format!("the driver: {update:?}"));
        self.state.apply(&update, self.log);
        self.outlets.apply(&update);
        self.specs.apply(&mut self.state.node, &update);
        if let Update::Snapshot(snapshot) = update {
            self.state.set_devices(&snapshot);
        }
    }

    /// The CDI spec has a GPU before the kubelet learns of it.
    fn set_limits(&mut self, limits: &Limits) {
        self.state.node.set_limits(limits.clone());
        self.specs.set_limits(&mut self.state.node, limits);
        let mut deny = limits.deny.clone();
        deny.extend(limits.denied_features.names());
        self.log.note(&format!(
            "config.toml has changed, and has these limits: allow = {:?}, deny = {deny:?}",
            limits.allow
        ));
    }
}

/// Sleeps until this time, which callers check before.
async fn at(time: Option<Instant>) {
    sleep_until(time.unwrap_or_else(Instant::now).into()).await;
}
