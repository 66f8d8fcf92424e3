//! The command line: dispatch by the name that the program is called by, and exit codes. What a command line can be is data,
//! in [`commands`] and [`nvidia`]; [`grammar`] parses it.

pub mod cdi;
pub mod cdi_check;
mod commands;
mod completion;
pub mod doctor;
pub mod explain;
mod explain_finding;
pub mod grammar;
mod help;
pub mod info;
pub mod list;
pub mod nvidia;
pub mod output;
pub mod prepare;
pub mod selection;
pub mod status;
pub mod terminal;
pub mod why;
mod why_list;

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};

use base::report::{catalog, failure};
use base::sys::child;

use crate::log::Log;
use crate::stages;
use crate::stages::prestart::{self, Place};
pub use commands::PROGRAM;
use grammar::{Asked, Line};
use nvidia_host::cdi::entry::{self as rootfs_edits, RootfsEdits};
use nvidia_host::inventory::probe;
use selection::Selection;
use terminal::Terminal;

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// prestart, createRuntime, createContainer
    Inject(Place),
    /// Podman's own stage
    Precreate,
    /// A stage at which there is nothing to do
    Nothing,
    /// `cdi` and its second word
    Cdi(cdi::Verb),
    /// `doctor`
    Doctor,
    /// `explain`
    Explain,
    /// `info`
    Info,
    /// `list`
    List,
    /// `configure`, of nvidia-container-cli alone
    Configure,
    /// `prepare`
    Prepare,
    /// `completion`
    Completion,
    /// `status`
    Status,
    /// `why`
    Why,
    /// A stage at which a container's record goes
    Forget,
    /// `help`
    Help,
}

/// The options of all verbs.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// `--config`
    pub config: Option<PathBuf>,
    /// `--json`
    pub json: bool,
    /// `--csv`
    pub csv: bool,
    /// `--request`
    pub request_only: bool,
    /// `--stage`: at precreate stdin is config.json
    pub stage: Option<Stage>,
    /// `--root`
    pub root: Option<PathBuf>,
    /// `--inventory`
    pub inventory: Option<PathBuf>,
    /// `--create`
    pub create: bool,
    /// `--bundle`
    pub bundle: Option<PathBuf>,
    /// `--pid`
    pub pid: Option<i32>,
    /// Of `why`, and of `doctor`
    pub container: Option<String>,
    /// Of `list`
    pub selection: Selection,
    /// Of `cdi`
    pub cdi: cdi::Options,
    /// What stands behind the command
    pub operands: Vec<OsString>,
}

/// When an engine calls a hook; what it writes to stdin differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Podman's own: config.json on stdin
    Precreate,
    /// Any other: the container state on stdin
    WithState,
}

const USAGE: u8 = 2;

/// Runs the command with these arguments, argv\[0\] first; the exit code is 0, 1 if it failed, 2 if the command line is wrong.
#[must_use]
pub fn run(args: impl IntoIterator<Item = OsString>, terminal: Terminal) -> ExitCode {
    let mut args = args.into_iter();
    let called = args.next().unwrap_or_default();
    let args: Vec<OsString> = args.collect();
    let name = Path::new(&called).file_name().and_then(OsStr::to_str);
    match name {
        Some(nvidia::HOOK | nvidia::OLD_HOOK) => return nvidia::hook::run(args),
        Some(nvidia::CLI) => return nvidia::cli::run(args),
        Some(name @ (nvidia::CDI_HOOK | nvidia::CTK)) => return nvidia::cdi_hook::run(name, args),
        _ => {}
    }
    // What our own CDI specs have engines call; nobody types it.
    if args.first().is_some_and(|word| word == rootfs_edits::VERB) {
        return match RootfsEdits::parse(args.into_iter().skip(1).collect()) {
            Ok(edits) => stages::rootfs::run(edits),
            Err(error) => usage_error(&grammar::wrong(&PROGRAM, None, &error.to_string())),
        };
    }
    // What a program with threads executes to ask NVML.
    if args.first().is_some_and(|word| word == probe::VERB) {
        return answer_probe();
    }
    if args.first().is_some_and(|word| word == completion::VERB) {
        return completion::complete(args.get(1..).unwrap_or_default());
    }
    match grammar::parse(&PROGRAM, args) {
        Ok(Asked::Run(line)) => match options(&line) {
            Ok(options) => carry_out(line.command.verb, &options, terminal),
            Err(error) => usage_error(&grammar::wrong(&PROGRAM, Some(line.command), &error.to_string())),
        },
        Ok(Asked::Help(command)) => print_help(command),
        Ok(Asked::Version) => output::print(concat!("oci-nvidia-hook ", env!("CARGO_PKG_VERSION"), "\n")),
        Err(error) => usage_error(&error),
    }
}

fn answer_probe() -> ExitCode {
    child::close_inherited();
    let reply = probe::respond(std::io::stdin().lock()).map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    output::print_or_fail(reply, &mut Log::default())
}

fn usage_error(error: &anyhow::Error) -> ExitCode {
    Log::default().error(error);
    ExitCode::from(USAGE)
}

fn carry_out(verb: Verb, options: &Options, terminal: Terminal) -> ExitCode {
    match verb {
        Verb::Inject(place) => prestart::run(place, options.config.as_deref(), false),
        Verb::Precreate => precreate(options.config.as_deref(), options.cdi.hook_path.as_deref()),
        // Of nvidia-container-cli, which runs it by itself.
        Verb::Nothing | Verb::Configure => ExitCode::SUCCESS,
        Verb::Cdi(verb) => cdi::run(verb, options),
        Verb::Doctor => doctor::run(options, terminal),
        Verb::Explain => explain::run(options),
        Verb::Info => info::run(options),
        Verb::List => list::run(options),
        Verb::Prepare => prepare::run(options),
        Verb::Status => status::run(options, terminal),
        Verb::Why => why::run(options),
        Verb::Forget => stages::poststop::run(),
        Verb::Completion => completion::run(&options.operands),
        Verb::Help => {
            let words: Vec<_> = options.operands.iter().map(|word| word.to_string_lossy()).collect();
            print_help((!words.is_empty()).then(|| words.join(" ")).as_deref())
        }
    }
}

/// Podman does not show what a hook of this stage writes to stderr.
pub(super) fn precreate(config: Option<&Path>, hook_path: Option<&Path>) -> ExitCode {
    match stages::precreate::run(config, hook_path) {
        Some(config_json) => output::write(&config_json),
        None => ExitCode::FAILURE,
    }
}

fn print_help(command: Option<&str>) -> ExitCode {
    match command {
        None => output::print(&help::of_program(&PROGRAM)),
        Some(name) => match help::of_command(&PROGRAM, name) {
            Some(text) => output::print(&text),
            None => {
                let what = format!("wrong command line: {name:?} is not a command");
                usage_error(&failure(
                    &catalog::COMMAND_LINE,
                    what,
                    "run \"oci-nvidia-hook --help\" for the list of commands",
                ))
            }
        },
    }
}

fn options(line: &Line) -> Result<Options> {
    let mut options = Options { operands: line.operands.clone(), ..Options::default() };
    for (option, value) in &line.given {
        options.set(option.long(), value.clone().unwrap_or_default())?;
    }
    let mut names = line.operands.iter().map(|name| name.to_string_lossy().into_owned());
    match line.command.verb {
        Verb::Why | Verb::Explain => options.container = names.next(),
        Verb::Cdi(_) => options.cdi.names = names.collect(),
        _ => {}
    }
    Ok(options)
}

impl Options {
    /// The parser has seen to it that the command has the option.
    fn set(&mut self, option: &str, value: OsString) -> Result<()> {
        match option {
            "config" => self.config = Some(value.into()),
            "json" => self.json = true,
            "csv" => self.csv = true,
            "root" => self.root = Some(value.into()),
            "request" => self.request_only = true,
            "stage" => self.stage = Some(parse_stage(&value)?),
            "create" => self.create = true,
            "container" => self.container = value.to_str().map(str::to_owned),
            "pid" => self.pid = Some(parse_pid(&value)?),
            "bundle" => self.bundle = Some(value.into()),
            "inventory" => self.inventory = Some(value.into()),
            _ if self.selection.set(option, Some(&value))? => {}
            _ => self.cdi.set(option, value)?,
        }
        Ok(())
    }
}

fn parse_pid(word: &OsString) -> Result<i32> {
    let pid = word.to_str().and_then(|text| text.parse().ok()).filter(|pid: &i32| *pid > 0);
    pid.with_context(|| format!("--pid {word:?} is not the number of a process"))
}

fn parse_stage(word: &OsString) -> Result<Stage> {
    Ok(match word.to_str() {
        Some("precreate") => Stage::Precreate,
        Some("prestart" | "createRuntime" | "createContainer" | "startContainer") => Stage::WithState,
        _ => bail!("{word:?} is not a stage (precreate, prestart, createRuntime, createContainer, startContainer)"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(args: &[&str]) -> Result<(Verb, Options)> {
        match grammar::parse(&PROGRAM, args.iter().map(OsString::from).collect())? {
            Asked::Run(line) => Ok((
                line.command.verb,
                options(&line).map_err(|error| grammar::wrong(&PROGRAM, Some(line.command), &error.to_string()))?,
            )),
            Asked::Help(command) => bail!("help {}", command.unwrap_or_default()),
            Asked::Version => bail!("version"),
        }
    }

    #[test]
    fn commands() {
        let with_config = || Options { config: Some("/c".into()), ..Options::default() };
        for (args, verb, options) in [
            (&["prestart"][..], Verb::Inject(Place::Outside), Options::default()),
            (&["createRuntime"], Verb::Inject(Place::Outside), Options::default()),
            (&["createContainer"], Verb::Inject(Place::Inside), Options::default()),
            (&["--config", "/c", "prestart"], Verb::Inject(Place::Outside), with_config()),
            (&["precreate", "--config=/c"], Verb::Precreate, with_config()),
            (&["poststop"], Verb::Forget, Options::default()),
            (
                &["why", "web"],
                Verb::Why,
                Options { container: Some("web".into()), operands: vec!["web".into()], ..Options::default() },
            ),
            (&["status"], Verb::Status, Options::default()),
            (
                &["doctor", "--json", "--bundle", "/b"],
                Verb::Doctor,
                Options { json: true, bundle: Some("/b".into()), ..Options::default() },
            ),
            (&["info", "--json"], Verb::Info, Options { json: true, ..Options::default() }),
            (
                &["cdi", "check", "--json", "0", "all"],
                Verb::Cdi(cdi::Verb::Check),
                Options {
                    json: true,
                    cdi: cdi::Options { names: vec!["0".into(), "all".into()], ..cdi::Options::default() },
                    operands: vec!["0".into(), "all".into()],
                    ..Options::default()
                },
            ),
            (
                &["list", "-lbd", "0,1", "--device=GPU-x"],
                Verb::List,
                Options {
                    selection: Selection {
                        devices: Some(vec!["0".into(), "1".into(), "GPU-x".into()]),
                        libraries: true,
                        binaries: true,
                        ..Selection::default()
                    },
                    ..Options::default()
                },
            ),
            (
                &["explain", "--request", "--stage", "precreate", "--inventory=i"],
                Verb::Explain,
                Options {
                    request_only: true,
                    stage: Some(Stage::Precreate),
                    inventory: Some("i".into()),
                    ..Options::default()
                },
            ),
        ] {
            assert_eq!(parsed(args).unwrap(), (verb, options), "{args:?}");
        }
    }

    #[test]
    fn help_is_asked_for_anywhere() {
        for (args, asked) in [
            (&["--help"][..], "help "),
            (&["list", "-h"], "help list"),
            (&["cdi", "--help"], "help cdi"),
            (&["cdi", "check", "--help"], "help cdi check"),
            (&["prestart", "-V"], "version"),
        ] {
            assert_eq!(parsed(args).unwrap_err().to_string(), asked);
        }
    }

    /// What the grammar has, the program knows.
    #[test]
    fn each_option_has_a_meaning() {
        for command in PROGRAM.commands {
            for option in command.options.iter().copied().chain(PROGRAM.options) {
                if matches!(option.long(), grammar::HELP | grammar::VERSION) {
                    continue;
                }
                let value = match option.completes {
                    grammar::Completes::Words(words) => words.split(' ').next().unwrap(),
                    _ => "1",
                };
                let value = match option.long() {
                    "vendor" | "class" => "ab",
                    _ => value,
                };
                Options::default().set(option.long(), value.into()).unwrap();
            }
        }
    }

    #[test]
    fn wrong_command_lines() {
        for args in [
            &[][..],
            &["startContainer"],
            &["prestart", "x"],
            &["prestart", "--json"],
            &["--conf", "x"],
            &["--config"],
            &["nonsense"],
            &["configure", "/x"],
            &["explain", "--stage", "x"],
            &["status", "--bundle", "x"],
            &["doctor", "x"],
            &["cdi"],
            &["cdi", "nonsense"],
            &["cdi", "generate", "x"],
            &["cdi", "generate", "--json"],
            &["cdi", "list", "--output", "x"],
            &["cdi", "refresh", "--spec-dir", "x"],
            &["info", "--output", "x"],
            &["completion"],
            &["why", "a", "b"],
        ] {
            let text = base::report::render(&parsed(args).unwrap_err());
            assert!(text.starts_with("wrong command line: ") && text.contains("--help"), "{text}");
        }
    }

    #[test]
    fn a_value_is_no_option() {
        for (args, value) in [
            (&["doctor", "--bundle=--x"][..], "--x"),
            (&["doctor", "--bundle", "-"], "-"),
            (&["doctor", "--bundle", ""], ""),
            (&["doctor", "--bundle=-x"], "-x"),
        ] {
            assert_eq!(parsed(args).unwrap().1.bundle, Some(value.into()), "{args:?}");
        }
        let joined = parsed(&["list", "-d-1", "-d=-2"]).unwrap().1.selection.devices;
        assert_eq!(joined, Some(vec!["-1".into(), "-2".into()]));
        for (args, says) in [
            (&["doctor", "--bundle", "--x"][..], "--bundle FILE needs a value, and \"--x\" looks like an option"),
            (&["doctor", "--bundle", "--json"], "--bundle FILE needs a value, and \"--json\" looks"),
            (&["doctor", "--bundle", "--"], "--bundle FILE needs a value, and \"--\" looks"),
            (&["list", "-ld", "-b"], "-d, --device ID needs a value, and \"-b\" looks"),
            (&["--config", "-x", "prestart"], "--config FILE needs a value, and \"-x\" looks"),
            (&["cdi", "generate", "--output", "-x"], "--output FILE needs a value, and \"-x\" looks"),
        ] {
            let text = base::report::render(&parsed(args).unwrap_err());
            assert!(text.starts_with("wrong command line: ") && text.contains(says), "{text}");
            assert!(
                text.contains("looks like an option: \"=\" joins them (ONH-002)\nhint: run \"oci-nvidia-hook "),
                "{text}"
            );
        }
    }

    #[test]
    fn a_near_word_is_offered() {
        for (args, meant) in [
            (&["prestrat"][..], "did you mean prestart?"),
            (&["cdi", "chekc"], "did you mean check?"),
            (&["list", "--nonsense"], "run \"oci-nvidia-hook list --help\""),
            (&["list", "--lib"], "did you mean --libraries?"),
            (&["list", "--librarie"], "did you mean --libraries?"),
            (&["info", "--jsn"], "did you mean --json?"),
        ] {
            let text = base::report::render(&parsed(args).unwrap_err());
            assert!(text.contains(meant), "{text}");
        }
    }
}
