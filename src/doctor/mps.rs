//! Checks of the MPS daemons, one for each GPU that config.toml shares.

use findings::catalog;
use nvidia_host::config::ClientLimits;
use nvidia_host::mps::{self, Daemon, Entry, Status};

use super::check::Check;
use super::facts::Facts;

pub(super) fn check(facts: &Facts) -> Vec<Check> {
    let mut checks = Vec::new();
    let sharing = facts.settings().sharing;
    for daemon in &facts.driver.mps {
        checks.push(works(&daemon.daemon));
        if daemon.is_replaced {
            checks.push(replaced(&daemon.daemon));
        }
        checks.extend(limits(&daemon.daemon, sharing.limits));
    }
    for uuid in &facts.driver.mps_before {
        checks.push(not_shared(uuid));
    }
    if let Some(inventory) = facts.driver.inventory() {
        let unmatched = nvidia_host::inventory::limits::unmatched_shared(&sharing, inventory);
        checks.extend(unmatched.into_iter().map(Check::found));
    }
    checks
}

fn works(daemon: &Daemon) -> Check {
    let gpu = &daemon.state.gpu;
    let why = match (&daemon.status, daemon.problem()) {
        (_, None) => {
            let details = Entry::from(daemon).details();
            return Check::ok(format!("the MPS daemon of {gpu} is ready{details}"));
        }
        (Status::Starting, _) => {
            return Check::skipped(format!("the MPS daemon of {gpu} is starting or stopping"));
        }
        (_, Some(why)) => why,
    };
    Check::of(
        &catalog::MPS_FAILED,
        format!("the MPS daemon of {gpu} does not work: {why}"),
        format!(
            "{}; to give containers the GPU without MPS, remove it from mps-gpus in config.toml, and run \"systemctl restart {}\"",
            daemon.fix(),
            mps::UNIT
        ),
    )
}

/// Returns the finding for a daemon whose program was replaced or removed.
fn replaced(daemon: &Daemon) -> Check {
    let unit = mps::UNIT;
    Check::of(
        &catalog::MPS_OUTDATED,
        format!(
            "the driver was updated while the MPS daemon of {} runs",
            daemon.state.gpu
        ),
        format!(
            "run \"systemctl stop {unit}\", load the new kernel module, run \"systemctl start {unit}\""
        ),
    )
}

/// Returns the finding for limits that differ from config.toml. A daemon that does not run gets its limits when it starts.
fn limits(daemon: &Daemon, configured: ClientLimits) -> Option<Check> {
    if daemon.status != Status::Ready {
        return None;
    }
    let actual = ClientLimits {
        memory_limit_mib: daemon.state.memory_limit_mib,
        thread_percentage: daemon.state.active_thread_percentage,
    };
    if actual == configured {
        return None;
    }
    let what = format!(
        "the MPS daemon of {} limits each client to {}, config.toml to {}",
        daemon.state.gpu,
        in_words(actual),
        in_words(configured)
    );
    let unit = mps::UNIT;
    let fix = format!("run \"systemctl restart {unit}\", which ends the clients of all daemons");
    Some(Check::of(&catalog::MPS_DIFFERS, what, fix))
}

/// Returns the finding for a GPU that was shared, and is still closed or served.
fn not_shared(uuid: &str) -> Check {
    Check::of(
        &catalog::MPS_DIFFERS,
        format!(
            "config.toml does not share {uuid} any more, and its compute mode was not restored"
        ),
        format!("run \"systemctl restart {}\"", mps::UNIT),
    )
}

fn in_words(limits: ClientLimits) -> String {
    let memory = match limits.memory_limit_mib {
        Some(limit) => format!("{limit} MiB"),
        None => "all memory".to_owned(),
    };
    let threads = limits.thread_percentage.unwrap_or(100);
    format!("{memory} and {threads} % of the threads")
}
