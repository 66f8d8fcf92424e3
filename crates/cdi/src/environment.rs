//! Determines which hooks get the environment of the container, and with it the `LD_PRELOAD` of an image (CVE-2025-23266).

/// The stages at which runtimes start hooks from the container's first process.
const INSIDE: [&str; 2] = ["createContainer", "startContainer"];

/// Returns whether a runtime can pass the environment of the container to a hook at this stage.
///
/// It does so for an entry without `env`: runc before 1.3 at both stages, runc since 1.3 and crun at startContainer. At createContainer, runc
/// since 1.3 passes only the `PATH` of the container, which suffices to attack a script. At all other stages, and with crun at
/// createContainer, such a hook gets the environment of the runtime. Engines treat an empty list like a missing one.
#[must_use]
pub fn is_inherited(stage: &str, env: &[String]) -> bool {
    env.is_empty() && INSIDE.contains(&stage)
}
