//! An MPS daemon in the output of commands.

use base::report::one_line;
use serde::Serialize;

use super::Daemon;

/// The daemon of a GPU. The field names are part of the JSON interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Entry {
    /// The UUID of the GPU
    pub gpu: String,
    /// Whether containers can use it
    pub ready: bool,
    /// Why it is not ready
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// `None` if it is not ready
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clients: Option<u32>,
    /// The memory of a client; `None` if it is not limited
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_limit_mib: Option<u64>,
    /// The part of the threads that a client can use; `None` if it is not limited
    #[serde(skip_serializing_if = "Option::is_none")]
    pub active_thread_percentage: Option<u8>,
}

impl From<&Daemon> for Entry {
    fn from(daemon: &Daemon) -> Self {
        let (why, state) = (daemon.problem(), &daemon.state);
        let clients = if why.is_none() {
            Some(state.clients)
        } else {
            None
        };
        Self {
            gpu: state.gpu.clone(),
            ready: why.is_none(),
            clients,
            why,
            memory_limit_mib: state.memory_limit_mib,
            active_thread_percentage: state.active_thread_percentage,
        }
    }
}

impl Entry {
    /// Returns the entries of these daemons.
    #[must_use]
    pub fn of(daemons: &[Daemon]) -> Vec<Self> {
        daemons.iter().map(Self::from).collect()
    }

    /// Returns what follows the word for the state: the clients and their limits, or the reason.
    #[must_use]
    pub fn details(&self) -> String {
        let Some(clients) = self.clients else {
            return format!(": {}", one_line(self.why.as_deref().unwrap_or_default()));
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
        format!(", {clients}, {memory} and {threads} % of the threads for each")
    }
}
