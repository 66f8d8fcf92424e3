//! Checks of the MPS daemons, one for each GPU that is shared.

use findings::catalog;
use nvidia_host::config::Sharing;
use nvidia_host::mps::{Daemon, Entry, Status};

use super::check::Check;
use super::facts::Facts;

pub(super) fn check(facts: &Facts) -> Vec<Check> {
    let mut checks = Vec::new();
    for daemon in &facts.driver.mps {
        checks.push(works(&daemon.daemon));
        if daemon.is_replaced {
            checks.push(replaced(&daemon.daemon));
        }
        checks.extend(limits(&daemon.daemon, facts.settings().sharing));
    }
    checks
}

fn works(daemon: &Daemon) -> Check {
    let gpu = &daemon.state.gpu;
    let unit = daemon.state.unit();
    let why = match &daemon.status {
        Status::Ready => {
            let details = Entry::from(daemon).details();
            return Check::ok(format!("the MPS daemon of {gpu} is ready{details}"));
        }
        Status::Starting => {
            return Check::skipped(format!("the MPS daemon of {gpu} is starting or stopping"));
        }
        Status::Failed(why) => why.clone(),
        Status::Dead => "its supervisor has ended".to_owned(),
    };
    Check::of(
        &catalog::MPS_FAILED,
        format!("the MPS daemon of {gpu} does not work: {why}"),
        format!(
            "see \"systemctl status {unit}\" and run \"systemctl restart {unit}\"; to give containers the GPU without MPS, run \
             \"systemctl disable --now {unit}\" and \"oci-nvidia-hook mps --after success {}\"",
            daemon.state.gpu
        ),
    )
}

/// Returns the finding for a daemon whose program was replaced or removed.
fn replaced(daemon: &Daemon) -> Check {
    let unit = daemon.state.unit();
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
fn limits(daemon: &Daemon, configured: Sharing) -> Option<Check> {
    if daemon.status != Status::Ready {
        return None;
    }
    let actual = Sharing {
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
    let unit = daemon.state.unit();
    let fix = format!(
        "run \"systemctl restart {unit}\", which ends its clients, unless MPS_OPTIONS in /etc/sysconfig/oci-nvidia-mps or its command \
         line sets the limits"
    );
    Some(Check::of(&catalog::MPS_LIMITS, what, fix))
}

fn in_words(limits: Sharing) -> String {
    let memory = match limits.memory_limit_mib {
        Some(limit) => format!("{limit} MiB"),
        None => "all memory".to_owned(),
    };
    let threads = limits.thread_percentage.unwrap_or(100);
    format!("{memory} and {threads} % of the threads")
}
