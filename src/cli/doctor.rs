//! `doctor`: prints the problems of this host or of a container, and how to fix them.

use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;

use base::paths::HostPath;
use base::report::Finding;
use base::tree::Tree;
use findings::catalog;
use nvidia_host::config;

use super::doctor_text::{self, View};
use super::status::this_user;
use super::terminal::Terminal;
use super::{args, output, ps};
use crate::doctor::{self, Caller, Check, Nvml, Status, container};
use crate::record::call::Call;

/// Returns the exit status for the worst check. 2 is an invalid command line, as for all commands.
const fn code(worst: Status) -> u8 {
    match worst {
        Status::Ok | Status::Skipped | Status::Note => 0,
        Status::Warning => 1,
        Status::Error => 3,
    }
}

/// Examines this host, or a container, and prints the results.
pub(super) fn run(options: &args::Doctor, config: Option<&Path>, terminal: Terminal) -> ExitCode {
    match examine(options, config, terminal) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            Call::default().error(&error);
            ExitCode::from(code(Status::Error))
        }
    }
}

fn examine(options: &args::Doctor, config: Option<&Path>, terminal: Terminal) -> Result<u8> {
    if options.container.is_some() || options.pid.is_some() {
        let checks = examine_container(options, config)?;
        let printed = print(&checks, options, terminal)?;
        return Ok(if printed {
            code(doctor::worst(&checks))
        } else {
            code(Status::Error)
        });
    }
    let host = Tree::open(&HostPath::new("/"))?;
    let mut facts = doctor::inspect(&host, config, caller());
    if let Some(module) = &facts.driver.module {
        facts.driver.other_driver = ps::with_other_driver(module);
    }
    let checks = doctor::examine(&facts);
    invalidate_cached_inventory(&facts);
    let is_selected =
        |check: &&Check| options.sections.is_empty() || options.sections.contains(&check.section);
    let selected: Vec<_> = checks.iter().filter(is_selected).cloned().collect();
    let printed = print(&selected, options, terminal)?;
    Ok(if printed {
        code(doctor::worst(&selected))
    } else {
        code(Status::Error)
    })
}

fn print(checks: &[Check], options: &args::Doctor, terminal: Terminal) -> Result<bool> {
    let view = View {
        all: options.all,
        is_root: this_user().is_none(),
    };
    let text = if options.output.json {
        doctor::document(checks)?
    } else {
        doctor_text::text(checks, view, terminal)
    };
    Ok(output::print(&text) == ExitCode::SUCCESS)
}

fn examine_container(options: &args::Doctor, config: Option<&Path>) -> Result<Vec<Check>> {
    let (config, _) = config::read(config)?;
    let name = options.container.as_deref().unwrap_or_default();
    let process = match options.pid {
        Some(pid) => container::find::by_pid(pid)?,
        None => container::find::by_name(Path::new("/proc"), name, super::containers::id_of)?,
    };
    container::examine(process, name, &config)
}

/// Discards the cached inventory if NVML has just contradicted it. The fingerprint does not cover faults that only NVML notices, so
/// the cached inventory may contain a GPU that no longer works. The next container then asks NVML again.
fn invalidate_cached_inventory(facts: &doctor::Facts) {
    let Some(Nvml {
        question, answer, ..
    }) = &facts.driver.nvml
    else {
        return;
    };
    if let Err(finding) = answer
        && is_about_this_process(finding)
    {
        return;
    }
    if let Some(cache) = question.existing_cache() {
        cache.invalidate_unless(answer.as_ref().ok());
    }
}

/// Returns whether NVML failed because this process lacks a permission or a resource, which the hook may have.
fn is_about_this_process(finding: &Finding) -> bool {
    let of_this_process = [
        &catalog::NVML_PERMISSION,
        &catalog::NVML_PROCESS,
        &catalog::SYSTEM,
    ];
    of_this_process
        .iter()
        .any(|kind| kind.id() == finding.kind.id())
}

fn caller() -> Caller {
    let groups = [nix::unistd::getgid()]
        .into_iter()
        .chain(nix::unistd::getgroups().unwrap_or_default());
    Caller {
        user: this_user(),
        groups: groups.map(nix::unistd::Gid::as_raw).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invalid_command_line_has_another_code() {
        let codes = [
            Status::Ok,
            Status::Skipped,
            Status::Note,
            Status::Warning,
            Status::Error,
        ]
        .map(code);
        assert_eq!(codes, [0, 0, 0, 1, 3]);
    }
}
