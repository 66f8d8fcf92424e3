//! What the process publishes: offers for engines and Allocate, lists and claims for the kubelet,
//! labels, metrics and the errors of GPUs.

use std::path::Path;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use base::report::Finding;
use plugin_api::control::OfferedDriver;
use tokio::sync::watch;

use super::specs::Specs;
use super::state::NodeState;
use crate::commands::claims::Claims;
use crate::commands::control::ControlCommand;
use crate::commands::observer::Observer;
use crate::commands::offered::offered;
use crate::commands::role::Role;
use crate::dra;
use crate::dra::pool::Pool;
use crate::kubelet;
use crate::log::Log;
use crate::metrics::readings::Readings;
use crate::model::Resource;
use crate::monitor::update::Update;
use crate::node::errors::ErrorFile;
use crate::node::{Offer, changes, health};
use crate::settings::Settings;

type List = Arc<Vec<Resource>>;

/// What the process publishes.
#[derive(Debug)]
pub struct Outlets {
    settings: Settings,
    offers: watch::Sender<Offer>,
    /// `None` if no kubelet is served
    kubelet: Option<KubeletOutlets>,
    /// The findings that are in the log
    reported: Vec<Finding>,
    log: Log,
}

/// What exists only with a kubelet.
#[derive(Debug)]
struct KubeletOutlets {
    lists: watch::Sender<List>,
    /// The state of the resources at the kubelet
    registrations: watch::Receiver<kubelet::Status>,
    /// `None` if the kubelet gets resources
    claims: Option<ClaimsOutlet>,
    observer: Observer,
    errors: ErrorFile,
}

#[derive(Debug)]
struct ClaimsOutlet {
    claims: Claims,
    driver: dra::DriverOptions,
}

impl Outlets {
    /// Creates the outlets of a role. The state gets the errors of GPUs that an earlier process
    /// has stored.
    #[must_use]
    pub fn new(
        settings: &Settings,
        role: &Role,
        state: &mut NodeState,
        registrations: watch::Receiver<kubelet::Status>,
        log: Log,
    ) -> Self {
        let mut kubelet = None;
        if let Some(run_dir) = role.run_dir() {
            let claims = match role {
                Role::Claims(_) => Some(ClaimsOutlet {
                    claims: Claims::new(settings),
                    driver: dra::DriverOptions::new(settings),
                }),
                Role::DevicePlugin(_) | Role::Engine => None,
            };
            kubelet = Some(KubeletOutlets {
                lists: watch::Sender::default(),
                registrations,
                claims,
                observer: Observer::new(settings, log),
                errors: restore(run_dir, settings, state),
            });
        }
        Self {
            settings: settings.clone(),
            offers: watch::Sender::new(state.node.offer()),
            kubelet,
            reported: Vec::new(),
            log,
        }
    }

    /// Returns the newest offer.
    #[must_use]
    pub fn offer(&self) -> watch::Receiver<Offer> {
        self.offers.subscribe()
    }

    /// Returns the newest list of resources.
    #[must_use]
    pub fn list(&self) -> watch::Receiver<List> {
        match &self.kubelet {
            Some(kubelet) => kubelet.lists.subscribe(),
            None => watch::Sender::default().subscribe(),
        }
    }

    /// Returns the newest values for metrics; `None` without a kubelet.
    #[must_use]
    pub fn readings(&self) -> Option<watch::Receiver<Readings>> {
        Some(self.kubelet.as_ref()?.observer.readings())
    }

    /// Returns what the driver for claims serves; `None` if the kubelet gets no claims.
    #[must_use]
    pub fn claims(&self) -> Option<(dra::DriverOptions, watch::Receiver<Pool>)> {
        let outlet = self.kubelet.as_ref()?.claims.as_ref()?;
        Some((outlet.driver.clone(), outlet.claims.pool()))
    }

    /// Takes a report of the monitor into account.
    pub fn apply(&mut self, update: &Update) {
        if let Some(kubelet) = &mut self.kubelet {
            kubelet.observer.apply(update);
        }
    }

    /// Executes a command. Its caller may have gone.
    pub fn handle(&self, command: ControlCommand, state: &mut NodeState, specs: &Specs) {
        match command {
            ControlCommand::Clear(uuid, done) => {
                done.send(state.node.clear(&uuid)).ok();
            }
            ControlCommand::Devices(done) => {
                if let Some(kubelet) = &self.kubelet {
                    let now = (Instant::now(), SystemTime::now());
                    let list = kubelet.lists.borrow();
                    let is_live = |name: &str| kubelet.is_live(name);
                    let mut devices = offered(&list, is_live, &state.node, now);
                    devices.driver = kubelet.claims.as_ref().map(ClaimsOutlet::offered);
                    devices.spec = specs.file();
                    done.send(devices).ok();
                }
            }
        }
    }

    /// Publishes what has changed.
    pub fn publish(&mut self, state: &NodeState, specs: &Specs) {
        let offer = state.node.offer();
        if offer != *self.offers.borrow() {
            self.log_changes(&offer);
            self.offers.send_replace(offer);
        }
        let Some(kubelet) = &mut self.kubelet else {
            return;
        };
        if state.listed_by().is_none() {
            let resources = Arc::clone(&self.offers.borrow().resources);
            kubelet.lists.send_if_modified(|list| {
                let changed = *list != resources;
                *list = resources;
                changed
            });
        }
        kubelet.observer.publish(&state.node);
        if let Some(outlet) = &mut kubelet.claims {
            let facts = kubelet.observer.facts();
            outlet.claims.publish(state, specs, facts);
        }
        let now = (Instant::now(), SystemTime::now());
        if let Err(error) = kubelet.errors.update(state.node.errors(), now) {
            self.log.note(&error);
        }
    }

    /// Logs which devices became healthy or unhealthy, and new findings.
    fn log_changes(&mut self, offer: &Offer) {
        let before = self.offers.borrow();
        for change in changes::of_devices(&before, offer, &self.settings.plugin) {
            self.log.note(&change);
        }
        let mut logged: Vec<&str> = Vec::new();
        for device in offer.devices() {
            let known = before.devices().find(|known| known.id == device.id);
            let was_unhealthy = known.map(|known| &known.unhealthy);
            if was_unhealthy == Some(&device.unhealthy) || logged.contains(&device.gpu.as_str()) {
                continue;
            }
            logged.push(&device.gpu);
            match &device.unhealthy {
                None => self.log.note(&format!("{} is healthy", device.gpu)),
                // Each start would otherwise log that all GPUs are unhealthy, for a fraction of a
                // second.
                Some(why) if why == health::UNKNOWN && was_unhealthy != Some(&None) => {}
                Some(why) => self
                    .log
                    .note(&format!("{} is unhealthy: {why}", device.gpu)),
            }
        }
        drop(before);
        for finding in &offer.findings {
            if !self.reported.contains(finding) {
                self.log.finding(finding);
            }
        }
        self.reported.clone_from(&offer.findings);
    }
}

impl KubeletOutlets {
    /// Reports whether the kubelet has this resource, or the driver for claims.
    fn is_live(&self, resource: &str) -> bool {
        if let Some(outlet) = &self.claims {
            return outlet.is_registered();
        }
        let registrations = self.registrations.borrow();
        registrations
            .get(resource)
            .is_some_and(|registration| registration.live)
    }
}

impl ClaimsOutlet {
    fn is_registered(&self) -> bool {
        *self.driver.registered.borrow() == Some(true)
    }

    fn offered(&self) -> OfferedDriver {
        OfferedDriver {
            name: self.driver.driver.clone(),
            is_registered: self.is_registered(),
            problem: self.claims.pool().borrow().problem.clone(),
            unpublished: self.driver.unpublished.borrow().clone(),
        }
    }
}

/// Gives the state the errors of GPUs that an earlier process has stored. Returns their file.
fn restore(run_dir: &Path, settings: &Settings, state: &mut NodeState) -> ErrorFile {
    let errors = ErrorFile::new(run_dir, &settings.common);
    let now = Instant::now();
    let found = errors.read((now, SystemTime::now()));
    state.node.restore(found, now);
    errors
}
