//! Effects on the container, in one place: everything that can fail on the host's side first, then into the
//! container's mount namespace, for good, and through the steps.
//!
//! The mount namespace is the transaction. If a step fails, the runtime ends the container and its mounts with it;
//! what we created in its file system is removed by [`Take::undo`].

pub(crate) mod cgroup;
pub(crate) mod container;
mod directory;
pub(crate) mod hosts_dev;
pub(crate) mod leftovers;
pub(crate) mod linker_cache;
mod mountinfo;
mod mounts;
pub(crate) mod prepare;
mod read_only;
mod source;
pub(crate) mod target;
mod tmpfs;

use std::fmt;

use anyhow::{Context, Result};
use container::OpenContainer;
use hosts_dev::HostsDev;
use prepare::Prepared;
use target::{Target, TargetFacts};

use base::report::{Finding, catalog, classify};
use base::sys::mount::{self, Label};
use nvidia_host::edits::Need;

use crate::lower::live::Step;
use crate::plan::Container;
use crate::record::created::Entry;

/// Steps with all that they need of the host: nothing has been done to the container yet.
#[derive(Debug)]
pub(crate) struct Plan<'a> {
    steps: Vec<(&'a Step, Prepared<'a>)>,
    api: mount::Api,
    hosts_dev: HostsDev,
    label: Option<Label>,
    findings: Vec<Finding>,
}

/// Does everything that can fail without the container. A step that it can do without is a finding where that fails.
/// `mount_label` is what config.json says.
///
/// # Errors
/// If one fails that it cannot do without, or the label is none.
pub(crate) fn prepare<'a>(steps: &'a [Step], mount_label: &str) -> Result<Plan<'a>> {
    let label = Label::from_config(mount_label)?;
    let (api, hosts_dev) = (mount::api(), HostsDev::find());
    let mut plan = Plan { steps: Vec::new(), api, hosts_dev, label, findings: Vec::new() };
    for step in steps {
        match prepare::prepare(step, plan.api, plan.label.as_ref()).with_context(|| format!("cannot {step}")) {
            Ok(prepared) => plan.steps.push((step, prepared)),
            Err(error) if step.need() == Need::Optional => plan.findings.push(left_out(&error)),
            Err(error) => return Err(error),
        }
    }
    Ok(plan)
}

#[derive(Debug, Default)]
pub(crate) struct Finished {
    pub findings: Vec<Finding>,
    /// Names that were created in the container
    pub created: Vec<Entry>,
}

/// Takes the steps, all or none. There is no way back from the container's mount namespace.
///
/// # Errors
/// If one fails; then those before it are undone.
pub(crate) fn carry_out(plan: Plan<'_>, open: OpenContainer, container: &Container<'_>) -> Result<Finished> {
    let Plan { steps, api, hosts_dev, label, mut findings } = plan;
    let facts = TargetFacts {
        has_own_dev: mounts::has_own_dev(container.mounts),
        is_alone: leftovers::is_own(open.rootfs(), container.id, container.bundle, container.rootfs),
    };
    let taken = open.enter().and_then(|root| take_all(Target::new(root, api, hosts_dev, label, facts), steps));
    // In a container with a user namespace its root user owned what was made. What is written from here on is the host's:
    // the record, which is only read if root alone can have written it.
    base::sys::process::create_files_as_ourselves();
    let taken = taken?;
    findings.extend(taken.findings);
    Ok(Finished { findings, ..taken })
}

/// The mend for what we cannot know better.
const LOOK: &str = "look at that path in the image, and at what is mounted there";

/// Carries out steps: in the container, or as a failing stand-in in tests.
trait Take {
    /// Takes one step, or takes back what it got done of it.
    fn take(&mut self, step: Prepared<'_>, need: Need) -> Result<()>;
    /// Adds to what there is to say about the container.
    fn note(&mut self, finding: Finding);
    /// Takes back all steps, as far as it goes: the container will not start anyway.
    fn undo(self);
    /// After the last step; says what there is to say.
    fn finish(&mut self) -> Result<Finished>;
}

/// In an error: a mount of ours hides something of the image, and could not be taken away. A step that the container can
/// do without stops it then, too.
#[derive(Debug)]
struct StillMounted;

impl fmt::Display for StillMounted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a mount of ours could not be taken away again")
    }
}

fn take_all<T: Take>(mut target: T, steps: Vec<(&Step, Prepared<'_>)>) -> Result<Finished> {
    for (step, prepared) in steps {
        match target.take(prepared, step.need()).with_context(|| format!("cannot {step}")) {
            Ok(()) => {}
            Err(error) if step.need() == Need::Optional && error.downcast_ref::<StillMounted>().is_none() => {
                target.note(left_out(&error));
            }
            Err(error) => {
                target.undo();
                return Err(classify(error, &catalog::IN_THE_WAY, LOOK));
            }
        }
    }
    let finished = target.finish();
    match finished {
        // This process ends next, and the kernel closes a hundred files faster than a hundred calls do.
        Ok(_) => std::mem::forget(target),
        Err(_) => target.undo(),
    }
    finished
}

fn left_out(error: &anyhow::Error) -> Finding {
    let finding = Finding::error(error);
    if finding.kind == &catalog::LOCAL_SOURCE {
        return finding;
    }
    Finding::of(&catalog::LEFT_OUT, base::report::line(error), "if it is needed, look at that path in the image")
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::rc::Rc;

    use anyhow::bail;

    use super::*;
    use crate::lower::live::CacheEntry;
    use base::paths::ContainerPath;

    /// Writes down what it is told, and fails at the step of that number.
    #[derive(Debug, Default)]
    struct Recording {
        fail_at: Option<usize>,
        taken: usize,
        said: Rc<RefCell<Vec<String>>>,
        still_mounted: bool,
    }

    impl Recording {
        fn step(&mut self, what: String) -> Result<()> {
            self.taken += 1;
            if Some(self.taken - 1) == self.fail_at {
                if self.still_mounted {
                    return Err(anyhow::anyhow!("refused").context(StillMounted).context("do it"));
                }
                bail!("refused");
            }
            self.said.borrow_mut().push(what);
            Ok(())
        }
    }

    impl Take for Recording {
        fn take(&mut self, step: Prepared<'_>, _need: Need) -> Result<()> {
            match step {
                Prepared::Link { link, .. } => self.step(format!("link {link}")),
                Prepared::UpdateLinkerCache(_) => self.step("cache".to_owned()),
                other => bail!("{other:?}"),
            }
        }
        fn note(&mut self, finding: Finding) {
            self.said.borrow_mut().push(finding.kind.id.to_owned());
        }
        fn undo(self) {
            self.said.borrow_mut().push("undo".to_owned());
        }
        fn finish(&mut self) -> Result<Finished> {
            self.step("finish".to_owned()).map(|()| Finished::default())
        }
    }

    /// For every n: required steps stop it and are undone, optional ones are said, and nothing comes after an undo.
    #[test]
    fn a_failure_at_any_step() {
        let path = |name: &str| ContainerPath::new(name).unwrap();
        let link = |name: &str, need| Step::Link { link: path(name), text: "x".into(), file: path("x"), need };
        let cache: Vec<CacheEntry> = Vec::new();
        let steps = [
            link("a", Need::Required),
            link("b", Need::Optional),
            link("c", Need::Required),
            Step::UpdateLinkerCache(cache),
        ];
        let run_so = |fail_at, still_mounted| {
            let target = Recording { fail_at, still_mounted, ..Recording::default() };
            let said = Rc::clone(&target.said);
            let plan = prepare(&steps, "").unwrap();
            let result = take_all(target, plan.steps);
            (result.is_ok(), said.take().join(", "))
        };
        let run = |fail_at| run_so(fail_at, false);
        assert_eq!(run_so(Some(1), true), (false, "link \"/a\", undo".to_owned()), "also an optional one");
        assert_eq!(run(None), (true, "link \"/a\", link \"/b\", link \"/c\", cache, finish".to_owned()));
        assert_eq!(run(Some(0)), (false, "undo".to_owned()));
        assert_eq!(run(Some(1)), (true, "link \"/a\", ONH-303, link \"/c\", cache, finish".to_owned()));
        assert_eq!(run(Some(2)), (false, "link \"/a\", link \"/b\", undo".to_owned()));
        assert_eq!(run(Some(3)), (false, "link \"/a\", link \"/b\", link \"/c\", undo".to_owned()));
        assert_eq!(run(Some(4)), (false, "link \"/a\", link \"/b\", link \"/c\", cache, undo".to_owned()));
    }
}
