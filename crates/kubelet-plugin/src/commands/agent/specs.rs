//! The CDI specs of the process.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use nvidia_host::config::{Config, Limits};
use nvidia_host::feature::Features;

use crate::cdi_specs::{self, CLAIMS, DEVICE_PLUGIN, Devices, Kind, SharedSpecs, VendorSpecs};
use crate::commands::role::{Role, SpecPaths};
use crate::log::Log;
use crate::model::InSpecs;
use crate::monitor::update::Update;
use crate::node::{Node, host};
use crate::settings::Settings;
use crate::strategy::Chooser;

/// How often the plugin's own CDI specs are made again, although no directory of their files has changed.
const REFRESH_PERIOD: Duration = Duration::from_secs(300);

/// The CDI specs of the process.
#[derive(Debug)]
pub struct Specs {
    /// One for each kind of names
    vendors: Vec<(Kind, SharedSpecs)>,
    /// When they were last made
    refreshed: Instant,
    /// The error that is in the log
    error: Option<String>,
    /// The features that containers are to get; none without a kubelet
    extra_devices: Features,
    /// How containers of the device plugin get their devices; `None` in other roles
    chooser: Option<Arc<Chooser>>,
    config: Config,
    log: Log,
}

impl Specs {
    /// Creates the specs of these kinds, without writing them.
    #[must_use]
    pub fn new(
        settings: &Settings,
        role: &Role,
        kinds: &[Kind],
        paths: &SpecPaths,
        chooser: &Arc<Chooser>,
        log: Log,
    ) -> Self {
        let config = settings.common.clone();
        let default = PathBuf::from(cdi_specs::DIR);
        let dir: &Path = paths.dir.as_ref().unwrap_or(&default);
        let mut vendors = Vec::new();
        for kind in kinds {
            let specs = VendorSpecs::new(*kind, &config, dir, &paths.hook);
            vendors.push((*kind, SharedSpecs::new(specs)));
        }
        let extra_devices = match role {
            Role::DevicePlugin(_) | Role::Claims(_) => settings.plugin.extra_devices,
            Role::Engine => Features::EMPTY,
        };
        Self {
            vendors,
            refreshed: Instant::now(),
            error: None,
            extra_devices,
            chooser: matches!(role, Role::DevicePlugin(_)).then(|| Arc::clone(chooser)),
            config,
            log,
        }
    }

    /// Returns what is wrong with the specs.
    #[must_use]
    pub fn error(&self) -> Option<&str> {
        self.error.as_deref()
    }

    /// Returns the specs of a kind; `None` if this process does not keep them.
    #[must_use]
    pub fn of(&self, kind: Kind) -> Option<SharedSpecs> {
        let mut vendors = self.vendors.iter();
        let (_, specs) = vendors.find(|(found, _)| *found == kind)?;
        Some(specs.clone())
    }

    /// Returns the names of the devices for claims in the spec of the GPUs, without the kind.
    #[must_use]
    pub fn names_for_claims(&self) -> Arc<BTreeSet<String>> {
        let specs = self.of(CLAIMS);
        let in_specs = specs.map(|specs| specs.lock().in_specs());
        in_specs.unwrap_or_default().devices
    }

    /// Returns the spec in which engines find the devices of the kubelet; `None` if containers get no CDI devices.
    #[must_use]
    pub fn file(&self) -> Option<PathBuf> {
        let (_, specs) = self.vendors.first()?;
        Some(specs.lock().path().to_owned())
    }

    /// Returns the directories of the specs.
    pub fn dirs(&self) -> Vec<PathBuf> {
        let mut dirs = Vec::new();
        for (_, specs) in &self.vendors {
            dirs.extend(specs.lock().path().parent().map(Path::to_owned));
        }
        dirs
    }

    /// Writes the specs again that another program has removed or replaced, or that could not be written: an answer to the kubelet may have
    /// written them since. Returns whether there was one.
    pub fn restore(&mut self, node: &mut Node) -> bool {
        let mut vendors = self.vendors.iter();
        if self.error.is_none() && !vendors.any(|(_, specs)| specs.lock().are_lost()) {
            return false;
        }
        self.update(node, VendorSpecs::refresh);
        true
    }

    /// Updates the specs if a directory has changed, and once in a while: files of the driver, sockets of its services and devices next to
    /// the GPUs can appear at any time.
    pub fn refresh_if_due(&mut self, node: &mut Node) {
        let mut vendors = self.vendors.iter();
        if self.refreshed.elapsed() < REFRESH_PERIOD
            && vendors.all(|(_, specs)| specs.lock().are_settled())
        {
            return;
        }
        self.refreshed = Instant::now();
        self.update(node, VendorSpecs::refresh);
    }

    /// Takes a report of the monitor into account.
    pub fn apply(&mut self, node: &mut Node, update: &Update) {
        let devices = match update {
            Update::Snapshot(snapshot) => Devices::Known(snapshot.inventory.clone()),
            Update::Absent(_) | Update::LetGo => Devices::Absent,
            Update::Sample(_) | Update::Event(_) | Update::Silent { .. } => return,
        };
        self.update(node, |specs| specs.set(&devices));
    }

    /// Sets the limits: the specs have only the devices that they permit.
    pub fn set_limits(&mut self, node: &mut Node, limits: &Limits) {
        self.config.devices.clone_from(limits);
        self.update(node, |specs| specs.set_limits(limits));
    }

    /// Updates the specs and the features that containers get, and logs what is wrong with the
    /// specs.
    pub fn update(&mut self, node: &mut Node, change: impl Fn(&mut VendorSpecs) -> Result<()>) {
        let mut result = Ok(());
        for (_, specs) in &self.vendors {
            // An error of one kind does not keep the others.
            let changed = change(&mut specs.lock());
            result = result.and(changed);
        }
        let error = result.as_ref().err().map(|error| format!("{error:#}"));
        node.set_in_specs(self.in_specs());
        self.find_features(node);
        if error == self.error {
            return;
        }
        match &result {
            Ok(()) => self.log.note("the CDI spec is current again"),
            Err(error) => self.log.error(error),
        }
        self.error = error;
    }

    /// Describes the specs for engines and Allocate.
    fn in_specs(&self) -> InSpecs {
        let are_needed = match &self.chooser {
            Some(chooser) => chooser.current().uses_cdi(),
            None => false,
        };
        let found = match self.of(DEVICE_PLUGIN) {
            Some(specs) => specs.lock().in_specs(),
            None => InSpecs {
                error: Some("the plugin keeps no CDI spec; restart it".to_owned()),
                ..InSpecs::default()
            },
        };
        InSpecs {
            are_needed,
            ..found
        }
    }

    /// Determines which features containers get: a container with the name of a device that is in
    /// no spec would not start.
    fn find_features(&self, node: &mut Node) {
        if self.extra_devices.is_empty() {
            return;
        }
        let Ok((found, findings)) = host::extra_devices(&self.config, self.extra_devices) else {
            return;
        };
        let in_specs = found.iter().filter(|feature| {
            let mut vendors = self.vendors.iter();
            vendors.all(|(_, specs)| specs.lock().in_specs().features.has(*feature))
        });
        node.set_features(in_specs.collect(), findings);
    }
}
