//! The MPS daemons of the node, as `check` reports them. Pure.

use base::report::one_line;
use command_line::terminal::{Line, Tone};
use nvidia_host::mps::Daemon;
use serde::Serialize;

/// The daemon of a GPU in a document.
#[derive(Debug, Serialize)]
pub(super) struct MpsEntry {
    gpu: String,
    ready: bool,
    /// Why it is not ready
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<String>,
    /// `None` if it is not ready
    #[serde(skip_serializing_if = "Option::is_none")]
    clients: Option<u32>,
    /// The memory of a client; `None` if it is not limited
    #[serde(skip_serializing_if = "Option::is_none")]
    memory_limit_mib: Option<u64>,
    /// The part of the threads that a client can use; `None` if it is not limited
    #[serde(skip_serializing_if = "Option::is_none")]
    active_thread_percentage: Option<u8>,
}

impl From<&Daemon> for MpsEntry {
    fn from(daemon: &Daemon) -> Self {
        let (why, state) = (daemon.problem(), &daemon.state);
        Self {
            gpu: state.gpu.clone(),
            ready: why.is_none(),
            clients: if why.is_none() {
                Some(state.clients)
            } else {
                None
            },
            why,
            memory_limit_mib: state.memory_limit_mib,
            active_thread_percentage: state.active_thread_percentage,
        }
    }
}

impl MpsEntry {
    /// Returns the daemons of the node.
    pub(super) fn of(daemons: &[Daemon]) -> Vec<Self> {
        daemons.iter().map(Self::from).collect()
    }

    /// Describes the daemon for people.
    pub(super) fn line(&self) -> Line {
        let line = Line::new(format!("{}: MPS daemon ", self.gpu));
        let Some(clients) = self.clients else {
            let why = self.why.as_deref().unwrap_or_default();
            let line = line.then(Tone::Bad, "not ready");
            return line.then(Tone::Plain, format!(": {}", one_line(why)));
        };
        let clients = match clients {
            1 => "1 client".to_owned(),
            count => format!("{count} clients"),
        };
        let memory = match self.memory_limit_mib {
            Some(limit) => format!("{limit} MiB"),
            None => "all memory".to_owned(),
        };
        let threads = self.active_thread_percentage.unwrap_or(100);
        line.then(Tone::Good, "ready").then(
            Tone::Plain,
            format!(", {clients}, {memory} and {threads} % of the threads for each"),
        )
    }
}
