//! Makes the decision of the hook for a container that requests all GPUs. It is the same code as at a start, so doctor reports an
//! error exactly if such a container does not start, and each finding that its start would report.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Result;

use base::report::Finding;
use base::tree::Tree;
use nvidia_host::capability::DRIVER_CAPABILITIES;
use nvidia_host::config::Config;
use nvidia_host::device_id::VISIBLE_DEVICES;
use nvidia_host::host::{Driver, DriverParts, Host, Source};
use nvidia_host::prepare::host::Preparation;
use nvidia_host::request::{self, Container, Decision, GpuRequest};

use super::check::{Check, Section, Status};
use super::engines;
use super::facts::{DriverFacts, Facts, Start};
use crate::{plan, stages};

/// The driver capabilities of most images, and those that need the whole driver.
const REQUESTS: [&str; 2] = ["compute,utility", "all"];

/// The name of this check.
pub(super) const NAME: (Section, &str) = (Section::Hook, "containers");

/// Decides for each of the usual requests. Nothing is decided without an answer of NVML, unless a start would prepare the host first:
/// other checks report why there is no answer.
pub(super) fn inspect(
    host: &Tree,
    config: &Config,
    driver: &DriverFacts,
    is_root: bool,
) -> Vec<Start> {
    let is_this_host = host.path().as_path() == Path::new("/");
    let mut starts = Vec::new();
    for capabilities in REQUESTS {
        let mut start = Start {
            capabilities,
            findings: Vec::new(),
            error: None,
            prepares: Preparation::default(),
        };
        let decided = if is_root && is_this_host {
            decide_like_a_start(config, &mut start)
        } else if let (Some(roots), Some(inventory)) = (&driver.roots, driver.inventory()) {
            Driver::of_parts(DriverParts::below(roots.clone(), config), config)
                .and_then(|driver| driver.host(Source::Given(inventory.clone())))
                .and_then(|host| decide(config, &host, &mut start))
        } else {
            continue;
        };
        // Such a start used the cached inventory, which doctor discards because NVML does not answer.
        if driver.inventory().is_none() && start.prepares.is_empty() {
            continue;
        }
        if let Err(error) = decided {
            if driver.inventory().is_none() {
                continue;
            }
            start.error = Some(Finding::error(&error));
        }
        starts.push(start);
    }
    starts
}

/// Follows a start of this host, with the modules and nodes that it would add first.
fn decide_like_a_start(config: &Config, start: &mut Start) -> Result<()> {
    let Some(request) = request(start.capabilities, config)? else {
        return Ok(());
    };
    let expected = stages::host::expect(&request, config, &[], &mut start.findings)?;
    start.prepares = expected.prepares;
    if let Some(decided) = expected.decided {
        decided?;
    }
    Ok(())
}

fn decide(config: &Config, host: &Host, start: &mut Start) -> Result<()> {
    if let Some(request) = request(start.capabilities, config)? {
        plan::decide(&request, config, host, &[], &mut start.findings)?;
    }
    Ok(())
}

/// Returns the request of a container for all GPUs.
fn request(capabilities: &str, config: &Config) -> Result<Option<GpuRequest>> {
    let env = [
        (VISIBLE_DEVICES, "all"),
        (DRIVER_CAPABILITIES, capabilities),
    ];
    let env = BTreeMap::from(env.map(|(name, value)| (name.to_owned(), value.to_owned())));
    // Privileged, because config.toml may ignore the variables of other containers.
    let container = Container {
        env: (&env).into(),
        mounts: Vec::new(),
        nodes: Vec::new(),
        privileged: true,
    };
    match request::decide(&container, config)? {
        Decision::Gpus(request) => Ok(Some(*request)),
        _ => Ok(None),
    }
}

/// The checks of what a start repairs.
const REPAIRED: [&str; 6] = ["nodes", "uvm", "module", "nvml", "gpus", "hook-user"];

/// Lowers the errors of the driver if containers start nevertheless: a start creates missing nodes, or leaves a GPU out.
pub(super) fn temper(facts: &Facts, checks: &mut [Check]) {
    let starts = &facts.driver.starts;
    let all_start = !starts.is_empty() && starts.iter().all(|start| start.error.is_none());
    if !all_start || facts.config.is_err() {
        return;
    }
    let prepares = starts.iter().any(|start| !start.prepares.is_empty());
    for check in checks {
        let is_of_driver = check.section == Section::Driver || check.check == "hook-user";
        let is_repaired = prepares && REPAIRED.contains(&check.check);
        if is_of_driver && is_repaired && check.status > Status::Note {
            check.status = Status::Note;
            check.what += "; the next start of a container with GPUs repairs this";
        } else if is_of_driver && check.status == Status::Error {
            check.status = Status::Warning;
        }
    }
}

/// Returns the errors and findings that no other check has reported.
pub(super) fn report(facts: &Facts, others: &[Check]) -> Vec<Check> {
    let mut checks: Vec<Check> = Vec::new();
    for start in &facts.driver.starts {
        for finding in results(start) {
            let check = Check::found(finding);
            let is_same = |other: &Check| other.id == check.id && other.status >= check.status;
            if !others.iter().chain(&checks).any(is_same) {
                checks.push(check);
            }
        }
    }
    if checks.is_empty() {
        checks.push(summary(facts, others));
    }
    let (section, name) = NAME;
    let named = checks.into_iter().map(|check| check.named(section, name));
    named.collect()
}

fn results(start: &Start) -> Vec<Finding> {
    let mut results = Vec::new();
    if let Some(error) = &start.error {
        let mut error = error.clone();
        error.what = format!(
            "a container with {DRIVER_CAPABILITIES}={} does not start: {}",
            start.capabilities, error.what
        );
        results.push(error);
    }
    results.extend_from_slice(&start.findings);
    results
}

fn summary(facts: &Facts, others: &[Check]) -> Check {
    if facts.driver.starts.is_empty() {
        Check::skipped("NVML did not answer")
    } else if others.iter().any(|check| check.status == Status::Error) {
        Check::skipped("other checks report why containers do not start")
    } else if !engines::any_starts_the_hook(facts) {
        Check::skipped("no engine starts the hook, so containers get no GPU with the variable")
    } else {
        let Some(start) = facts
            .driver
            .starts
            .iter()
            .find(|start| !start.prepares.is_empty())
        else {
            return Check::ok("containers that request all GPUs start");
        };
        let mut first = Vec::new();
        for module in &start.prepares.modules {
            first.push(format!("loads {module}"));
        }
        for name in start.prepares.nodes.keys() {
            first.push(format!("creates \"/dev/{name}\""));
        }
        for name in start.prepares.permissions.keys() {
            first.push(format!("sets the owner and mode of \"/dev/{name}\""));
        }
        Check::ok(format!(
            "containers that request all GPUs start, and the hook first {}",
            first.join(", ")
        ))
    }
}
