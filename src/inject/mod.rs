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

use crate::finding::Finding;
use crate::lower::live::Step;
use container::Container;
use target::Target;

/// Takes the steps, all or none.
///
/// # Errors
/// If one fails; then those before it are undone.
pub fn run(container: Container, steps: &[Step]) -> Result<Vec<Finding>> {
    let prepared = steps
        .iter()
        .map(|step| prepare::prepare(step).with_context(|| format!("cannot {step}")))
        .collect::<Result<Vec<_>>>()?;
    let mut target = Target::new(container.enter()?);
    for (step, prepared) in steps.iter().zip(prepared) {
        if let Err(error) = target.apply(prepared).with_context(|| format!("cannot {step}")) {
            target.undo();
            return Err(error);
        }
    }
    Ok(target.findings())
}
