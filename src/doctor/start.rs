//! Makes the decision of the hook for a container that requests all GPUs. It is the same code as at a start, so doctor reports an
//! error exactly if such a container does not start, and each finding that its start would report.

use std::collections::BTreeMap;

use anyhow::Result;

use base::report::Finding;
use nvidia_host::capability::DRIVER_CAPABILITIES;
use nvidia_host::config::Config;
use nvidia_host::device_id::VISIBLE_DEVICES;
use nvidia_host::host::Host;
use nvidia_host::request::{self, Container, Decision};

use super::check::{Check, Section, Status};
use super::engines;
use super::facts::{DriverFacts, Facts, Start};
use crate::plan;

/// The driver capabilities of most images, and those that need the whole driver.
const REQUESTS: [&str; 2] = ["compute,utility", "all"];

/// The name of this check.
pub(super) const NAME: (Section, &str) = (Section::Hook, "containers");

/// Decides for each of the usual requests. Nothing is decided without an answer of NVML: other checks report why there is none.
pub(super) fn inspect(config: &Config, driver: &DriverFacts) -> Vec<Start> {
    let Some((roots, inventory)) = driver.roots.as_ref().zip(driver.inventory()) else {
        return Vec::new();
    };
    let start = |capabilities| {
        let mut findings = Vec::new();
        let host = Host::below(roots.clone(), config, inventory.clone());
        let error = host
            .and_then(|host| decide(capabilities, config, &host, &mut findings))
            .err();
        Start {
            capabilities,
            findings,
            error: error.map(|error| Finding::error(&error)),
        }
    };
    REQUESTS.into_iter().map(start).collect()
}

fn decide(
    capabilities: &str,
    config: &Config,
    host: &Host,
    findings: &mut Vec<Finding>,
) -> Result<()> {
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
    if let Decision::Gpus(request) = request::decide(&container, config)? {
        plan::decide(&request, config, host, &[], findings)?;
    }
    Ok(())
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
        Check::ok("containers that request all GPUs start")
    }
}
