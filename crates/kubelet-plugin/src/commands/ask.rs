//! Asks the driver once, for `check`.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::io::IsTerminal;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;
use tokio::sync::mpsc;
use tokio::time::{sleep, sleep_until};

use base::debug;
use base::report::Finding;
use base::sys::stdio;
use findings::catalog;
use nvidia_host::host::has_no_gpu;
use nvidia_host::inventory::notice;

use crate::monitor::message::Sample;
use crate::monitor::supervisor;
use crate::monitor::update::Update;
use crate::node::facts::NvmlFacts;
use crate::node::{Node, host};
use crate::settings::Settings;

/// The time for the monitor to start, in addition to the time limit of a call.
const MARGIN: Duration = Duration::from_secs(5);

/// What the driver answered.
#[derive(Debug)]
pub struct Answer {
    /// The state of the node
    pub node: Node,
    /// What the driver reports about itself and the GPUs
    pub facts: NvmlFacts,
    /// Why the driver does not work, if the node has a GPU
    pub problem: Option<Finding>,
}

/// What the driver has answered so far.
struct Collected {
    node: Node,
    facts: NvmlFacts,
    problem: Option<String>,
    /// The GPUs that NVML listed, and that have not been measured yet
    unanswered: Option<BTreeSet<String>>,
}

impl Collected {
    fn is_complete(&self) -> bool {
        self.unanswered.as_ref().is_some_and(BTreeSet::is_empty)
    }

    fn apply(&mut self, update: &Update) {
        match update {
            Update::Snapshot(snapshot) => {
                let gpus = &snapshot.inventory.gpus;
                self.unanswered = Some(gpus.iter().map(|gpu| gpu.uuid.clone()).collect());
            }
            Update::Sample(Sample { gpu, .. }) | Update::Silent { gpu: Some(gpu), .. } => {
                if let Some(gpus) = &mut self.unanswered {
                    gpus.remove(gpu);
                }
            }
            Update::Absent(why) | Update::Silent { gpu: None, why } => {
                self.problem = Some(why.clone());
                self.unanswered = Some(BTreeSet::new());
            }
            Update::Event(_) | Update::LetGo => {}
        }
        self.facts.apply(update);
        self.node.apply(update, Instant::now());
    }

    /// Applies the reports of the monitor until each GPU has answered.
    async fn collect(&mut self, mut updates: mpsc::Receiver<Update>) {
        while !self.is_complete() {
            let Some(update) = updates.recv().await else {
                return;
            };
            self.apply(&update);
        }
    }
}

/// Asks the driver once.
///
/// # Errors
/// If the monitor cannot be started.
pub async fn ask(settings: &Settings, config_path: Option<&Path>) -> Result<Answer> {
    let (updates, received) = mpsc::channel(64);
    let gpus =
        host::kernel_gpus(&settings.common, "the driver does not answer").unwrap_or_default();
    let begun = Instant::now();
    let mut collected = Collected {
        node: Node::new(settings.clone(), gpus, begun),
        facts: NvmlFacts::default(),
        problem: None,
        unanswered: None,
    };
    let time_limit = settings.plugin.nvml_timeout + MARGIN;
    let monitor = supervisor::SupervisorOptions::new(config_path, settings, false);
    tokio::select! {
        () = collected.collect(received) => {}
        () = sleep_until((begun + time_limit).into()) => {}
        never = print_wait_notice(time_limit) => match never {},
        error = supervisor::supervise(monitor, updates) => return Err(error),
    }
    let elapsed = begun.elapsed().as_millis();
    debug::log(|| format!("the driver was asked for {elapsed} ms"));
    let Collected {
        mut node,
        facts,
        problem,
        ..
    } = collected;
    node.set_numa_nodes(host::numa_nodes(&settings.common, node.gpus()).unwrap_or_default());
    node.set_mps(host::mps_daemons(&settings.common, node.gpus()));
    if let Ok((features, findings)) =
        host::extra_devices(&settings.common, settings.plugin.extra_devices)
    {
        node.set_features(features, findings);
    }
    // A node without a GPU needs no driver.
    let problem = match problem {
        Some(why) if !has_no_gpu(&settings.common) => Some(Finding::new(
            &catalog::PLUGIN_DRIVER,
            why,
            "run \"oci-nvidia-hook doctor\" on the node",
        )),
        _ => None,
    };
    Ok(Answer {
        node,
        facts,
        problem,
    })
}

/// Prints a line if the driver takes long, unless stderr is not a terminal. The future never ends,
/// because the report does.
async fn print_wait_notice(limit: Duration) -> Infallible {
    if rustix::stdio::stderr().is_terminal() {
        sleep(notice::SOON).await;
        stdio::offer_stderr(&notice::line(limit));
    }
    std::future::pending().await
}
