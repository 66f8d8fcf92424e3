//! `completion SHELL`: prints small scripts that ask this program for the words that can complete a command line, so that all
//! shells offer the same. The words come from clap's engine, with values that only this host knows.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Arg, Command, CommandFactory, Parser};
use clap_complete::engine::{self, ArgValueCandidates, CompletionCandidate};

use base::report::{Kind, one_line, without_markdown};
use base::sys::process;
use findings::catalog;

use super::args::{self, Cdi, CdiCheck, Cli, Shell};
use super::{cdi_check, containers, output};

/// The command that the scripts call, with the words of the command line after the program's name.
pub(super) const VERB: &str = "__complete";

/// Prints the script for this shell.
pub(super) fn run(shell: Shell) -> ExitCode {
    output::print(match shell {
        Shell::Bash => include_str!("completion/oci-nvidia-hook.bash"),
        Shell::Zsh => include_str!("completion/oci-nvidia-hook.zsh"),
        Shell::Fish => include_str!("completion/oci-nvidia-hook.fish"),
    })
}

/// Prints the words that can replace the last one: one on each line, followed by a tab and its help. `home` is the meaning of `~`, for which
/// std would ask a name service if the variable was not set.
pub(super) fn complete(words: &[OsString], home: Option<&Path>) -> ExitCode {
    let root = Path::new("/");
    process::set_variable("HOME", home.unwrap_or(root).as_os_str());
    let mut line = vec![OsString::from("oci-nvidia-hook")];
    line.extend_from_slice(words);
    let mut program = with_values_of_host(&line);
    let current_dir = std::env::current_dir().ok();
    let mut offers = engine::complete(&mut program, line, words.len(), current_dir.as_deref())
        .unwrap_or_default();
    // People do not type stages. clap offers them if nothing else begins like this.
    offers.retain(|offer| !offer.is_hide_set());
    // Before a dash is typed, options would outnumber the other words.
    let last = words.last().map(|word| word.to_string_lossy());
    let begins_option = last.is_some_and(|word| word.starts_with('-'));
    if !begins_option && !offers.iter().all(is_option) {
        offers.retain(|offer| !is_option(offer));
    }
    output::print(&offers.iter().map(text).collect::<String>())
}

fn is_option(offer: &CompletionCandidate) -> bool {
    offer.get_value().to_string_lossy().starts_with('-')
}

fn text(offer: &CompletionCandidate) -> String {
    let value = offer.get_value().to_string_lossy();
    match offer.get_help() {
        Some(help) => format!("{value}\t{}\n", help.to_string().replace('\n', " ")),
        None => format!("{value}\n"),
    }
}

/// Returns the command line of the program, with the values of arguments that depend on this host.
fn with_values_of_host(line: &[OsString]) -> Command {
    let dirs = spec_dirs(line);
    let helped = Vec::from(line);
    let cdi_devices = move || candidates(cdi_check::names(&dirs));
    Cli::command()
        .mut_subcommand("plan", |plan| {
            plan.mut_arg("container", |arg| with(arg, containers))
        })
        .mut_subcommand("explain", |explain| {
            explain.mut_arg("number", |arg| with(arg, findings))
        })
        .mut_subcommand("doctor", |doctor| {
            doctor.mut_arg("container", |arg| with(arg, containers))
        })
        .mut_subcommand("ps", |ps| ps.mut_arg("gpu", |arg| with(arg, gpus)))
        .mut_subcommand("why", |why| {
            why.mut_arg("container", |arg| with(arg, containers))
        })
        .mut_subcommand("files", |files| {
            files.mut_arg("devices", |arg| {
                with(arg, || candidates(["all".to_owned()]))
            })
        })
        .mut_subcommand("help", |help| {
            help.mut_arg("command", |arg| {
                with(arg, move || candidates(commands(&helped)))
            })
        })
        .mut_subcommand("cdi", |cdi| {
            cdi.mut_subcommand("check", |check| {
                check.mut_arg("names", |arg| with(arg, cdi_devices))
            })
        })
}

/// Returns the commands that can follow the words after `help` in this line.
fn commands(line: &[OsString]) -> Vec<String> {
    let program = Cli::command();
    let mut words = before_last(line).iter();
    words.find(|word| *word == "help");
    let mut group = &program;
    for word in words {
        let Some(below) = group.find_subcommand(word) else {
            return Vec::new();
        };
        group = below;
    }
    let visible = group.get_subcommands().filter(|one| !one.is_hide_set());
    visible.map(|one| one.get_name().to_owned()).collect()
}

fn before_last(line: &[OsString]) -> &[OsString] {
    match line.split_last() {
        Some((_, before)) => before,
        None => &[],
    }
}

fn with(arg: Arg, values: impl Fn() -> Vec<CompletionCandidate> + Send + Sync + 'static) -> Arg {
    arg.add(ArgValueCandidates::new(values))
}

/// Returns the values of `--spec-dir` in the words of `cdi check` before the last one.
fn spec_dirs(line: &[OsString]) -> Vec<PathBuf> {
    match Cli::try_parse_from(before_last(line)) {
        Ok(Cli {
            command: args::Command::Cdi(Cdi::Check(CdiCheck { dirs, .. })),
            ..
        }) => dirs.spec_dirs,
        _ => Vec::new(),
    }
}

/// Offers these values, except for those that a terminal cannot show.
fn candidates(values: impl IntoIterator<Item = String>) -> Vec<CompletionCandidate> {
    let shown = values.into_iter().filter(|value| one_line(value) == *value);
    shown.map(CompletionCandidate::new).collect()
}

fn containers() -> Vec<CompletionCandidate> {
    let known = containers::read().unwrap_or_default();
    candidates(BTreeSet::from_iter(
        known.iter().map(containers::KnownContainer::name),
    ))
}

/// Offers the indices of the GPUs in records, because NVML can take seconds.
fn gpus() -> Vec<CompletionCandidate> {
    let mut indices = BTreeSet::new();
    for known in containers::read().unwrap_or_default() {
        if let Some(record) = known.record {
            indices.extend(record.devices.iter().map(records::RecordedDevice::short));
        }
    }
    candidates(indices)
}

fn findings() -> Vec<CompletionCandidate> {
    let offer = |kind: &&Kind| {
        let title = without_markdown(kind.texts().title);
        CompletionCandidate::new(kind.id()).help(Some(title.into()))
    };
    catalog::ALL.iter().map(offer).collect()
}
