//! Parses the arguments with which an engine starts the hook: a stage and options.
//!
//! The hook itself uses this parser, so `status` and `doctor` judge the arguments in hook files as the hook does. It is written by hand,
//! because clap would take longer than the hook does for a container without GPUs.

use std::ffi::OsStr;
use std::path::Path;

use crate::hook_file::{HookFile, PRECREATE};

/// The stages that the hook knows.
pub const STAGES: [&str; 4] = ["prestart", "createRuntime", "poststart", "poststop"];

/// The stages of earlier versions. Hook files of administrators may still name them.
pub const REMOVED_STAGES: [&str; 2] = ["createContainer", PRECREATE];

/// The commands of the hook for people.
pub const COMMANDS: [&str; 13] = [
    "ps",
    "why",
    "plan",
    "explain",
    "info",
    "files",
    "doctor",
    "status",
    "cdi",
    "prepare",
    "completion",
    "version",
    "help",
];

/// A call at a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StageCall<'a> {
    /// One of [`STAGES`] or [`REMOVED_STAGES`]
    pub stage: &'static str,
    /// The file of `--config`
    pub config: Option<&'a Path>,
    /// Whether there are other global options, which only clap reads
    pub has_options: bool,
}

/// Parses the arguments after argv\[0\]. Returns `None` for a command line without a stage, and for invalid ones.
#[must_use]
pub fn parse<S: AsRef<OsStr>>(args: &[S]) -> Option<StageCall<'_>> {
    let (mut stage, mut config, mut has_options) = (None, None, false);
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        let word = arg.as_ref().to_str()?;
        if word == "--config" {
            config = Some(value(args.next()?.as_ref())?);
        } else if let Some(value) = word.strip_prefix("--config=") {
            if value.is_empty() {
                return None;
            }
            config = Some(value);
        } else if word == "--debug" {
            has_options = true;
        } else if word == "--color" {
            value(args.next()?.as_ref())?;
            has_options = true;
        } else if word.starts_with("--color=") {
            has_options = true;
        } else if stage.is_none() {
            stage = Some(stage_named(word)?);
        } else {
            return None;
        }
    }
    Some(StageCall {
        stage: stage?,
        config: config.map(Path::new),
        has_options,
    })
}

fn stage_named(word: &str) -> Option<&'static str> {
    let mut stages = STAGES.into_iter().chain(REMOVED_STAGES);
    stages.find(|stage| *stage == word)
}

/// Returns a word that can be the value of an option.
fn value(word: &OsStr) -> Option<&str> {
    let word = word.to_str()?;
    if word.is_empty() || (word.starts_with('-') && word != "-") {
        return None;
    }
    Some(word)
}

/// Parses the command line in a hook file, with argv\[0\].
#[must_use]
pub fn parse_entry(args: &[String]) -> Option<StageCall<'_>> {
    parse(args.get(1..)?)
}

/// Returns the removed stage at which a hook file starts the hook, or which its arguments name.
#[must_use]
pub fn removed_stage(hook: &HookFile) -> Option<&'static str> {
    let mut stages = REMOVED_STAGES.into_iter();
    stages.find(|stage| hook.is_at(stage) || hook.args.iter().skip(1).any(|arg| arg == stage))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls() {
        let call = |stage, config, has_options| {
            Some(StageCall {
                stage,
                config,
                has_options,
            })
        };
        let file = Some(Path::new("/c"));
        for (line, expected) in [
            ("prestart", call("prestart", None, false)),
            ("createContainer", call("createContainer", None, false)),
            ("--config /c prestart", call("prestart", file, false)),
            (
                "--config /x prestart --config /c",
                call("prestart", file, false),
            ),
            ("precreate --config=/c", call("precreate", file, false)),
            ("--debug prestart", call("prestart", None, true)),
            ("prestart --color never", call("prestart", None, true)),
            ("prestart --config -c", None),
            ("prestart --config", None),
            ("prestart --config=", None),
            ("prestart --help", None),
            ("prestart prestart", None),
            ("startContainer", None),
            ("plan", None),
            ("--config /c", None),
            ("", None),
        ] {
            let args: Vec<_> = line.split_whitespace().map(str::to_owned).collect();
            assert_eq!(parse(&args), expected, "{line}");
        }
    }
}
