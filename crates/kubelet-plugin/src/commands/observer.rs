//! Publishes what else follows from the state of the node: its labels and metrics.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use nvidia_host::host::has_no_gpu;
use nvidia_host::inventory::BusId;
use tokio::sync::watch;

use crate::labels::{self, file::File};
use crate::log::Log;
use crate::metrics::readings::Readings;
use crate::monitor::update::Update;
use crate::node::Node;
use crate::node::facts::NvmlFacts;
use crate::node::host;
use crate::settings::Settings;

/// How often the file with the labels is compared, although they have not changed.
const LABELS_PERIOD: Duration = Duration::from_secs(30);

/// The labels and the values for metrics.
#[derive(Debug)]
pub struct Observer {
    settings: Settings,
    readings: watch::Sender<Readings>,
    facts: NvmlFacts,
    host: labels::Host,
    /// The addresses of the GPUs for which the host is described
    addresses: Vec<BusId>,
    /// `None` if no labels are wanted
    file: Option<File>,
    /// The labels that were written last, and when
    written: Option<(Vec<String>, Instant)>,
    log: Log,
}

impl Observer {
    /// Creates an observer, and removes the labels of an earlier process that was killed.
    #[must_use]
    pub fn new(settings: &Settings, log: Log) -> Self {
        let plugin = &settings.plugin;
        let mut file = File::new(&plugin.labels_dir, plugin.labels == Some(true));
        file.update(&[]).unwrap_or_else(|error| log.note(&error));
        Self {
            settings: settings.clone(),
            readings: watch::Sender::default(),
            facts: NvmlFacts::default(),
            host: labels::Host {
                machine: host::machine(&settings.common),
                started: SystemTime::now()
                    .duration_since(UNIX_EPOCH)
                    .map_or(0, |since| since.as_secs()),
                ..labels::Host::default()
            },
            addresses: Vec::new(),
            file: (plugin.labels != Some(false)).then_some(file),
            written: None,
            log,
        }
    }

    /// Returns the newest values.
    #[must_use]
    pub fn readings(&self) -> watch::Receiver<Readings> {
        self.readings.subscribe()
    }

    /// Returns what the driver reports about itself and the GPUs.
    #[must_use]
    pub const fn facts(&self) -> &NvmlFacts {
        &self.facts
    }

    /// Takes a report of the monitor into account.
    pub fn apply(&mut self, update: &Update) {
        self.facts.apply(update);
        self.readings
            .send_modify(|readings| readings.apply(update, Instant::now()));
    }

    /// Publishes what follows from the state of the node.
    pub fn publish(&mut self, node: &Node) {
        self.readings.send_modify(|readings| {
            readings.health = node.health();
            readings.is_without_gpu =
                readings.driver.why_not().is_some() && has_no_gpu(&self.settings.common);
        });
        let Some(file) = &mut self.file else { return };
        let addresses: Vec<BusId> = node.gpus().iter().map(|gpu| gpu.gpu.bus_id).collect();
        if addresses != self.addresses {
            self.host.classes = host::pci_classes(&self.settings.common);
            self.addresses = addresses;
        }
        let lines = labels::lines(
            &self.facts,
            node.gpus(),
            &self.settings.plugin,
            node.limits(),
            &self.host,
        );
        if let Some((written, when)) = &self.written
            && *written == lines
            && when.elapsed() < LABELS_PERIOD
        {
            return;
        }
        file.update(&lines)
            .unwrap_or_else(|error| self.log.note(&error));
        self.written = Some((lines, Instant::now()));
    }
}
