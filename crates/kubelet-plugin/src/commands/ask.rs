//! Asks the driver once, for `check`.

use std::collections::BTreeSet;
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
use crate::node::facts::Facts;
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
    pub facts: Facts,
    /// Why the driver does not work, if the node has a GPU
    pub problem: Option<Finding>,
}

/// Asks the driver once.
///
/// # Errors
/// If the monitor cannot be started.
pub async fn ask(settings: &Settings, config_path: Option<&Path>) -> Result<Answer> {
    let (updates, mut received) = mpsc::channel(64);
    let gpus =
        host::kernel_gpus(&settings.common, "the driver does not answer").unwrap_or_default();
    let mut facts = Facts::default();
    let mut node = Node::new(settings.clone(), gpus, Instant::now());
    let time_limit = settings.plugin.nvml_timeout;
    let deadline = Instant::now() + time_limit + MARGIN;
    let (mut problem, begun) = (None, Instant::now());
    let collect = async {
        let mut unanswered: Option<BTreeSet<String>> = None;
        while unanswered.as_ref().is_none_or(|gpus| !gpus.is_empty()) {
            let Some(update) = received.recv().await else {
                return;
            };
            match &update {
                Update::Snapshot(snapshot) => {
                    unanswered = Some(
                        snapshot
                            .inventory
                            .gpus
                            .iter()
                            .map(|gpu| gpu.uuid.clone())
                            .collect(),
                    );
                }
                Update::Sample(Sample { gpu, .. }) => {
                    drop(unanswered.as_mut().map(|gpus| gpus.remove(gpu)))
                }
                Update::Silent { gpu: Some(gpu), .. } => {
                    drop(unanswered.as_mut().map(|gpus| gpus.remove(gpu)))
                }
                Update::Absent(why) | Update::Silent { gpu: None, why } => {
                    problem = Some(why.clone());
                    unanswered = Some(BTreeSet::new());
                }
                Update::Event(_) | Update::LetGo => {}
            }
            facts.apply(&update);
            node.apply(&update, Instant::now());
        }
    };
    tokio::select! {
        () = collect => {}
        () = sleep_until(deadline.into()) => {}
        () = tell_a_person(time_limit + MARGIN) => {}
        error = supervisor::supervise(supervisor::Options::new(config_path, settings, false), updates) => return Err(error),
    }
    debug::log(|| {
        format!(
            "the driver was asked for {} ms",
            begun.elapsed().as_millis()
        )
    });
    node.set_numa_nodes(host::numa_nodes(&settings.common, node.gpus()).unwrap_or_default());
    if let Ok((features, findings)) =
        host::extra_devices(&settings.common, settings.plugin.extra_devices)
    {
        node.set_features(features, findings);
    }
    // A node without a GPU needs no driver.
    let problem = problem
        .filter(|_| !has_no_gpu(&settings.common))
        .map(|why| {
            Finding::new(
                &catalog::PLUGIN_DRIVER,
                why,
                "run \"oci-nvidia-hook doctor\" on the node",
            )
        });
    Ok(Answer {
        node,
        facts,
        problem,
    })
}

/// Prints a line if the driver takes long, unless stderr is not a terminal. The future never ends, because the report does.
async fn tell_a_person(limit: Duration) {
    if rustix::stdio::stderr().is_terminal() {
        sleep(notice::SOON).await;
        stdio::offer_stderr(&notice::line(None, limit));
    }
    std::future::pending::<()>().await;
}
