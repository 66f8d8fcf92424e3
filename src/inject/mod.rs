//! Effects on the container, in one place: everything that can fail on the host's side first, then into the
//! container's mount namespace, for good, and through the steps.
//!
//! The mount namespace is the transaction. If a step fails, the runtime ends the container and its mounts with it;
//! what we created in its file system is removed by [`target::Target::undo`].

pub mod cgroup;
pub mod container;
pub mod linker_cache;
pub mod prepare;
pub mod target;

use anyhow::{Context, Result};

use crate::edits::Need;
use crate::finding::Finding;
use crate::lower::live::Step;
use container::Container;
use target::Target;

/// Takes the steps, all or none; one that the container can do without is a finding where it cannot be taken.
///
/// # Errors
/// If one fails; then those before it are undone.
pub fn run(container: Container, steps: &[Step]) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    let mut prepared = Vec::new();
    for step in steps {
        match prepare::prepare(step).with_context(|| format!("cannot {step}")) {
            Ok(ready) => prepared.push((step, ready)),
            Err(error) if step.need() == Need::Optional => findings.push(left_out(&error)),
            Err(error) => return Err(error),
        }
    }
    let mut target = Target::new(container.enter()?);
    for (step, ready) in prepared {
        match target.apply(ready).with_context(|| format!("cannot {step}")) {
            Ok(()) => {}
            Err(error) if step.need() == Need::Optional => target.note(left_out(&error)),
            Err(error) => {
                target.undo();
                return Err(error);
            }
        }
    }
    findings.extend(target.findings());
    Ok(findings)
}

fn left_out(error: &anyhow::Error) -> Finding {
    Finding::warning(
        "ONH-303",
        crate::error::render(error),
        "the container starts without it",
        "if it is needed, look at that path in the image",
    )
}
