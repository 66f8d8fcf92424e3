//! Applies the steps of a plan to a container.
//!
//! [`prepare()`] first does everything on the host that can fail. [`apply()`] then enters the container's mount namespace,
//! which the process cannot leave, and runs the steps. If a step fails, the runtime ends the container, and the kernel removes
//! its mounts with the namespace; [`Runner::undo`] removes the names that the hook created in its file system, unless another
//! container uses it.
//!
//! | module | purpose |
//! |---|---|
//! | [`prepare`](mod@prepare) | opens the source of each step on the host |
//! | [`mod@apply`] | applies steps inside the container's mount namespace |
//! | [`container`] | the container: its root, its /dev, its mounts and its linker cache |
//! | [`layer`] | covers directories that cannot be changed |
//! | [`remove`] | removes created names, after a failure and at poststop |
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
use remove::leftovers;
use remove::undo::StillMounted;

use base::report::{Finding, classify};
use base::sys::mount::{self, Label};
use findings::catalog;
use nvidia_host::edits::Need;

use crate::plan::Container;
use crate::plan::step::Step;
use records::created::Entry;

/// Carries out a step whose sources are open and checked.
type ApplyStep<'a, T> = Box<dyn FnOnce(&mut T) -> Result<()> + 'a>;

/// Steps with their opened sources. The container is still unchanged.
pub(crate) struct PreparedSteps<'a> {
    steps: Vec<(&'a Step, ApplyStep<'a, Applier>)>,
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

/// The result of [`apply()`].
#[derive(Debug, Default)]
pub(crate) struct Finished {
    pub findings: Vec<Finding>,
    /// Names that were created in the container
    pub created: Vec<Entry>,
}

/// Runs all steps of a plan, or none. This process stays in the container's mount namespace. `earlier`: names that earlier starts of
/// the container created, from its record.
///
/// # Errors
/// If a required step fails. The steps before it are undone.
pub(crate) fn apply(
    plan: PreparedSteps<'_>,
    open: OpenContainer,
    container: &Container<'_>,
    earlier: &[Entry],
) -> Result<Finished> {
    let PreparedSteps {
        steps,
        api,
        host_dev,
        label,
        mut findings,
    } = plan;
    let is_own = leftovers::is_own(
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
    let target =
        inside.map(|layout| Applier::new(layout, api, is_own, earlier.to_vec(), own_nodes));
    let finished = target.and_then(|target| run_all(target, steps));
    // In a container with a user namespace, the files so far were created as its root user. From here on, files belong to the
    // host's root: a record is only accepted if no other user could have written it.
    if has_other_owner {
        base::sys::process::create_files_as_ourselves();
    }
    let finished = finished?;
    findings.extend(finished.findings);
    Ok(Finished {
        findings,
        ..finished
    })
}

/// The hint for an error whose cause is unknown.
const INSPECT: &str = "inspect that path in the image and what is mounted on it";

/// Runs steps: in a container, or as a failing stand-in in tests.
trait Runner: Sized {
    /// Runs one step. If it fails, undoes the changes of this step.
    fn run(&mut self, apply: ApplyStep<'_, Self>, need: Need) -> Result<()>;
    /// Adds a finding about the container.
    fn add_finding(&mut self, finding: Finding);
    /// Undoes all steps as far as possible: the container does not start anyway.
    fn undo(self);
    /// Completes the setup after the last step.
    fn finish(&mut self) -> Result<Finished>;
}

fn run_all<T: Runner>(mut target: T, steps: Vec<(&Step, ApplyStep<'_, T>)>) -> Result<Finished> {
    for (step, apply) in steps {
        match target
            .run(apply, step.need())
            .with_context(|| format!("cannot {step}"))
        {
            Ok(()) => {}
            Err(error)
                if step.need() == Need::Optional
                    && error.downcast_ref::<StillMounted>().is_none() =>
            {
                if let Some(finding) = omitted(step, &error) {
                    target.add_finding(finding);
                }
            }
            Err(error) => {
                target.undo();
                return Err(classify(error, &catalog::IN_THE_WAY, INSPECT));
            }
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
    use std::cell::RefCell;
    use std::rc::Rc;

    use anyhow::bail;

    use super::*;
    use crate::plan::step::CacheEntry;
    use base::paths::ContainerPath;
    use nvidia_host::edits::placement::Link;

    /// Logs its calls, and fails at the step `fail_at`.
    #[derive(Debug, Default)]
    struct Recording {
        fail_at: Option<usize>,
        taken: usize,
        log: Rc<RefCell<Vec<String>>>,
        still_mounted: bool,
    }

    impl Recording {
        fn step(&mut self, what: String) -> Result<()> {
            self.taken += 1;
            if Some(self.taken - 1) == self.fail_at {
                if self.still_mounted {
                    return Err(anyhow::anyhow!("refused")
                        .context(StillMounted)
                        .context("do it"));
                }
                bail!("refused");
            }
            self.log.borrow_mut().push(what);
            Ok(())
        }
    }

    impl Runner for Recording {
        fn run(&mut self, apply: ApplyStep<'_, Self>, _need: Need) -> Result<()> {
            apply(self)
        }
        fn add_finding(&mut self, finding: Finding) {
            self.log.borrow_mut().push(finding.kind.id().to_owned());
        }
        fn undo(self) {
            self.log.borrow_mut().push("undo".to_owned());
        }
        fn finish(&mut self) -> Result<Finished> {
            self.step("finish".to_owned()).map(|()| Finished::default())
        }
    }

    /// Fails at every step once: a required step ends the run and is undone, an optional step becomes a finding.
    #[test]
    fn a_failure_at_any_step() {
        let path = |name: &str| ContainerPath::new(name).unwrap();
        let link = |name: &str, need| {
            Step::Link(Link {
                link: path(name),
                text: "x".into(),
                file: path("x"),
                need,
            })
        };
        let cache: Vec<CacheEntry> = Vec::new();
        let steps = [
            link("a", Need::Required),
            link("b", Need::Optional),
            link("c", Need::Required),
            Step::UpdateLinkerCache(cache),
        ];
        let run_so = |fail_at, still_mounted| {
            let target = Recording {
                fail_at,
                still_mounted,
                ..Recording::default()
            };
            let log = Rc::clone(&target.log);
            let apply = |step: &Step| -> ApplyStep<'_, Recording> {
                let what = match step {
                    Step::Link(Link { link, .. }) => format!("link {link}"),
                    _ => "cache".to_owned(),
                };
                Box::new(|recording| recording.step(what))
            };
            let result = run_all(
                target,
                steps.iter().map(|step| (step, apply(step))).collect(),
            );
            (result.is_ok(), log.take().join(", "))
        };
        let run = |fail_at| run_so(fail_at, false);
        assert_eq!(
            run_so(Some(1), true),
            (false, "link \"/a\", undo".to_owned()),
            "also an optional one"
        );
        assert_eq!(
            run(None),
            (
                true,
                "link \"/a\", link \"/b\", link \"/c\", cache, finish".to_owned()
            )
        );
        assert_eq!(run(Some(0)), (false, "undo".to_owned()));
        assert_eq!(
            run(Some(1)),
            (
                true,
                "link \"/a\", ONH-303, link \"/c\", cache, finish".to_owned()
            )
        );
        assert_eq!(
            run(Some(2)),
            (false, "link \"/a\", link \"/b\", undo".to_owned())
        );
        assert_eq!(
            run(Some(3)),
            (
                false,
                "link \"/a\", link \"/b\", link \"/c\", undo".to_owned()
            )
        );
        assert_eq!(
            run(Some(4)),
            (
                false,
                "link \"/a\", link \"/b\", link \"/c\", cache, undo".to_owned()
            )
        );
    }
}
