//! The commands of the MPS daemon, and its answers.
//!
//! The program that sends a command succeeds for nearly all of them, also for an unknown command and for an unknown server. Therefore an
//! answer counts only if it has the form of an answer.

use std::fmt;

/// A command for the daemon. Device 0 is the first one in the `CUDA_VISIBLE_DEVICES` of the daemon, which has one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Command {
    /// Starts a server for root
    StartServer,
    /// Lists the servers
    ServerList,
    /// Shows the status of a server
    ServerStatus(u32),
    /// Lists the clients of a server
    ClientList(u32),
    /// Shows a limit of the servers that start later
    Default(Limit),
    /// Shows a limit of a server
    Of(u32, Limit),
    /// Sets a limit for the servers that start later
    SetDefault(Limit, Amount),
    /// Ends the daemon, after at most this many seconds for the clients
    Quit(u32),
}

/// A limit for each client process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Limit {
    /// The memory of the GPU
    Memory,
    /// The percentage of the multiprocessors
    Threads,
}

/// MiB, or a percentage.
pub(crate) type Amount = u64;

impl fmt::Display for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::StartServer => f.write_str("start_server -uid 0"),
            Self::ServerList => f.write_str("get_server_list"),
            Self::ServerStatus(pid) => write!(f, "get_server_status {pid}"),
            Self::ClientList(pid) => write!(f, "get_client_list {pid}"),
            Self::Default(Limit::Memory) => f.write_str("get_default_device_pinned_mem_limit 0"),
            Self::Default(Limit::Threads) => f.write_str("get_default_active_thread_percentage"),
            Self::Of(pid, Limit::Memory) => write!(f, "get_device_pinned_mem_limit {pid} 0"),
            Self::Of(pid, Limit::Threads) => write!(f, "get_active_thread_percentage {pid}"),
            Self::SetDefault(Limit::Memory, mib) => {
                write!(f, "set_default_device_pinned_mem_limit 0 {mib}M")
            }
            Self::SetDefault(Limit::Threads, percent) => {
                write!(f, "set_default_active_thread_percentage {percent}")
            }
            Self::Quit(seconds) => write!(f, "quit -t {seconds}"),
        }
    }
}

impl Limit {
    /// Parses the answer to [`Command::Default`] or [`Command::Of`]. `None` stands for no limit.
    pub(crate) fn parse(self, answer: &str) -> Option<Amount> {
        let word = answer.split_whitespace().next_back()?;
        match self {
            Self::Memory => parse_memory(word),
            Self::Threads => parse_percentage(word).filter(|percent| *percent < 100),
        }
    }
}

/// Parses the amount of a memory limit, such as `2G`, in MiB.
fn parse_memory(word: &str) -> Option<Amount> {
    let split = word.find(|c: char| !c.is_ascii_digit())?;
    let (number, unit) = word.split_at_checked(split)?;
    let number: u64 = number.parse().ok()?;
    match unit {
        "K" | "KB" => Some(number / 1024),
        "M" | "MB" => Some(number),
        "G" | "GB" => number.checked_mul(1024),
        _ => None,
    }
}

/// Parses a percentage with a fraction of 0, such as `40.0`.
fn parse_percentage(word: &str) -> Option<Amount> {
    let (whole, fraction) = word.split_once('.').unwrap_or((word, "0"));
    if !fraction.bytes().all(|byte| byte == b'0') {
        return None;
    }
    whole.parse().ok()
}

/// Parses a list of processes, one on each line. Other lines are ignored.
pub(crate) fn parse_pids(answer: &str) -> Vec<u32> {
    let mut pids = Vec::new();
    for line in answer.lines() {
        if let Ok(pid) = line.trim().parse()
            && pid > 1
        {
            pids.push(pid);
        }
    }
    pids
}

/// Whether a server works, from the answer to [`Command::ServerStatus`]. The other statuses are `INITIALIZING` and `FAULT`.
pub(crate) fn is_active(answer: &str) -> bool {
    answer.trim() == "ACTIVE"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_of_the_manual() {
        for (command, text) in [
            (Command::StartServer, "start_server -uid 0"),
            (Command::ServerStatus(7), "get_server_status 7"),
            (
                Command::SetDefault(Limit::Memory, 8192),
                "set_default_device_pinned_mem_limit 0 8192M",
            ),
            (
                Command::Of(7, Limit::Threads),
                "get_active_thread_percentage 7",
            ),
            (Command::Quit(10), "quit -t 10"),
        ] {
            assert_eq!(command.to_string(), text);
        }
    }

    #[test]
    fn answers() {
        for (text, mib) in [
            ("2G\n", Some(2048)),
            ("2048M", Some(2048)),
            ("2097152K", Some(2048)),
            ("", None),
            ("Server 1 not found", None),
            ("18446744073709551615G", None),
        ] {
            assert_eq!(Limit::Memory.parse(text), mib, "{text:?}");
        }
        for (text, percent) in [
            ("40.0\n", Some(40)),
            ("25", Some(25)),
            ("100.0", None),
            ("40.5", None),
            ("Insufficient privileges", None),
        ] {
            assert_eq!(Limit::Threads.parse(text), percent, "{text:?}");
        }
        assert_eq!(parse_pids("703\n1\n -4\nx\n835\n"), [703, 835]);
        assert_eq!(parse_pids("Server not found"), [0; 0]);
        assert!(is_active("ACTIVE\n") && !is_active("FAULT") && !is_active(""));
    }
}
