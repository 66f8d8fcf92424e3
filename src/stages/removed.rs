//! The stages `precreate` and `createContainer` of earlier versions, which hook files of administrators may still name.
//!
//! A container that requests GPUs does not start, because it would lack them. Other containers start, and also one that has its GPUs
//! from a CDI spec.

use std::path::Path;
use std::process::ExitCode;

use anyhow::Context;

use base::paths::HostPath;
use base::report::Failure;
use base::sys::stdio;
use base::tree::Tree;
use engines::hook_file::PRECREATE;
use engines::hooks;
use findings::catalog;

use super::{decide, edit_config, read_state, run_stage};
use crate::oci;
use crate::plan::request;

/// Answers a runtime or an engine that calls the hook at a removed stage. Exit status 0 if the container may start, 1 if not.
// Not inlined: a start at another stage would need a larger stack, and each page costs a fault.
#[inline(never)]
pub(crate) fn run(stage: &'static str, config: Option<&Path>) -> ExitCode {
    run_stage(stage, |call| {
        // Podman parses the output of this stage.
        let mut answer = Vec::new();
        let spec = if stage == PRECREATE {
            let (text, spec) = edit_config::read_spec(call)?;
            answer = text;
            spec
        } else {
            let (_, state) = read_state()?;
            // In a user namespace, the hook may not be permitted to read it.
            let spec = oci::spec_view::read_if(&state.bundle, request::may_ask)
                .with_context(|| no_longer_exists(stage))?;
            call.name_container(&state.id, spec.pod.clone(), &state.bundle);
            spec
        };
        if decide::request(&spec, config, call)?.is_some() {
            return Err(no_longer_exists(stage).into());
        }
        stdio::write_stdout(&answer)?;
        Ok(())
    })
}

fn no_longer_exists(stage: &str) -> Failure {
    let fix = match Tree::open(&HostPath::new("/")) {
        Ok(host) => hooks::fix_removed_stage(&host, stage),
        Err(_) => "remove the hook file with this stage".to_owned(),
    };
    Failure::new(
        &catalog::COMMAND_LINE,
        format!("cannot set up the container: the stage {stage:?} no longer exists"),
        fix,
    )
}
