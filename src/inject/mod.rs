//! Applies the steps of a plan to a container.
//!
//! [`prepare()`] first does everything on the host that can fail. [`apply()`] then enters the container's mount namespace,
//! which the process cannot leave, and runs the steps. If a step fails, the runtime ends the container, and the kernel removes
//! its mounts with the namespace; [`Applier::undo`] removes the names that the hook created in its file system, unless another
//! container uses it.
//!
//! | module | purpose |
//! |---|---|
//! | [`prepare`](mod@prepare) | opens the source of each step on the host |
//! | [`mod@apply`] | applies steps inside the container's mount namespace |
//! | [`container`] | the container: its root, its /dev, its mounts and its linker cache |
//! | [`layer`] | covers directories that cannot be changed |
//! | [`remove`] | removes created names after a failure |
//! | [`files`] | mount sources, and operations in a directory |

mod apply;
pub(crate) mod container;
mod files;
mod layer;
pub(crate) mod prepare;
pub(crate) mod remove;

use anyhow::{Context, Result};
use apply::Applier;
use apply::layout::Layout;
use container::OpenContainer;
use container::host_dev::HostDev;
use prepare::Prepared;
use remove::undo::StillMounted;

use base::report::{Finding, classify};
use base::sys::mount::{self, Label};
use findings::catalog;
use nvidia_host::edits::Need;

use crate::plan::Container;
use crate::plan::step::Step;

/// Steps with their opened sources. The container is still unchanged.
pub(crate) struct PreparedSteps<'a> {
    steps: Vec<(&'a Step, Prepared<'a>)>,
    api: mount::Api,
    host_dev: HostDev,
    label: Option<Label>,
    findings: Vec<Finding>,
}

/// Opens and checks everything on the host that the steps need. If an optional step fails, the plan has a finding instead of
/// it. `mount_label` is `linux.mountLabel` of config.json.
///
/// # Errors
/// If a required step fails, or the label is invalid.
pub(crate) fn prepare<'a>(steps: &'a [Step], mount_label: &str) -> Result<PreparedSteps<'a>> {
    let hint = "start the container with another label, or with \"--security-opt label=disable\"";
    let label =
        Label::from_config(mount_label).map_err(|error| classify(error, &catalog::STATE, hint))?;
    let (api, host_dev) = (mount::api(), HostDev::find());
    let mut plan = PreparedSteps {
        steps: Vec::new(),
        api,
        host_dev,
        label,
        findings: Vec::new(),
    };
    for step in steps {
        match prepare::prepare(step, plan.api, plan.label.as_ref())
            .with_context(|| format!("cannot {step}"))
        {
            Ok(prepared) => plan.steps.push((step, prepared)),
            Err(error) if step.need() == Need::Optional => plan.findings.push(left_out(&error)),
            Err(error) => return Err(error),
        }
    }
    Ok(plan)
}

/// Runs all steps of a plan, or none. This process stays in the container's mount namespace.
///
/// # Errors
/// If a required step fails. The steps before it are undone.
pub(crate) fn apply(
    plan: PreparedSteps<'_>,
    open: OpenContainer,
    container: &Container<'_>,
) -> Result<Vec<Finding>> {
    let PreparedSteps {
        steps,
        api,
        host_dev,
        label,
        mut findings,
    } = plan;
    let is_own = apply::is_own(
        open.rootfs(),
        container.id,
        container.bundle,
        &container.spec.rootfs,
    );
    let own_nodes = steps
        .iter()
        .filter_map(|(step, _)| step.own_node())
        .collect();
    let has_other_owner = open.has_other_owner();
    let inside = open
        .enter()
        .map(|inside| Layout::new(inside, api, host_dev, label, &container.spec.mounts));
    let target = inside.map(|layout| Applier::new(layout, api, is_own, own_nodes));
    let finished = target.and_then(|target| run_all(target, steps));
    // In a container with a user namespace, the files so far were created as its root user. From here on, files belong to the
    // host's root: a record is only accepted if no other user could have written it.
    if has_other_owner {
        base::sys::process::create_files_as_ourselves();
    }
    findings.extend(finished?);
    Ok(findings)
}

/// The hint for an error whose cause is unknown.
const INSPECT: &str = "inspect that path in the image and what is mounted on it";

fn run_all(mut target: Applier, steps: Vec<(&Step, Prepared<'_>)>) -> Result<Vec<Finding>> {
    for (step, prepared) in steps {
        let done = target.run(prepared, step.need());
        let Err(error) = done.with_context(|| format!("cannot {step}")) else {
            continue;
        };
        if stops(step, &error) {
            target.undo();
            return Err(classify(error, &catalog::IN_THE_WAY, INSPECT));
        }
        if let Some(finding) = omitted(step, &error) {
            target.add_finding(finding);
        }
    }
    let finished = target.finish();
    match finished {
        // The process exits soon, and the kernel closes a hundred descriptors faster than a hundred calls of close(2).
        Ok(_) => std::mem::forget(target),
        Err(_) => target.undo(),
    }
    finished
}

/// Reports whether the container does not start because of the error of this step.
fn stops(step: &Step, error: &anyhow::Error) -> bool {
    step.need() == Need::Required || error.downcast_ref::<StillMounted>().is_some()
}

/// Returns the finding about an optional step that failed. A volume with the host's `/dev` has the links that the host's udev creates, so a
/// link that the host does not have, such as one in `/dev/dri/by-path`, is not reported as missing in the container.
fn omitted(step: &Step, error: &anyhow::Error) -> Option<Finding> {
    let is_of_hosts_dev = Finding::error(error).kind == &catalog::HOSTS_DEV;
    if is_of_hosts_dev && matches!(step, Step::Link(_)) {
        return None;
    }
    Some(left_out(error))
}

fn left_out(error: &anyhow::Error) -> Finding {
    let finding = Finding::error(error);
    if finding.kind == &catalog::LOCAL_SOURCE {
        return finding;
    }
    let fix = if finding.fix.is_empty() {
        INSPECT
    } else {
        &finding.fix
    };
    Finding::new(
        &catalog::LEFT_OUT,
        base::report::line(error),
        format!("if the container needs it, {fix}"),
    )
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;
    use base::paths::ContainerPath;
    use nvidia_host::edits::placement::Link;

    fn link(need: Need) -> Step {
        let path = |name| ContainerPath::new(name).unwrap();
        Step::Link(Link {
            link: path("a"),
            text: "x".into(),
            file: path("x"),
            need,
        })
    }

    #[test]
    fn an_optional_step_stops_only_with_a_mount_that_stays() {
        let (required, optional) = (link(Need::Required), link(Need::Optional));
        let refused = || anyhow!("refused").context("do it");
        let still_mounted = || anyhow!("refused").context(StillMounted).context("do it");
        assert!(stops(&required, &refused()) && stops(&required, &still_mounted()));
        assert!(!stops(&optional, &refused()) && stops(&optional, &still_mounted()));
    }

    #[test]
    fn an_optional_step_that_fails_is_a_finding() {
        let optional = link(Need::Optional);
        let id = |step, error| omitted(step, &error).map(|finding| finding.kind.id());
        assert_eq!(id(&optional, anyhow!("refused")), Some("ONH-303"));
        // The host's udev creates the links.
        let in_hosts_dev = container::host_dev::refusal;
        assert_eq!(id(&optional, in_hosts_dev()), None);
        assert_eq!(id(&Step::MaskParams, in_hosts_dev()), Some("ONH-303"));
    }
}
