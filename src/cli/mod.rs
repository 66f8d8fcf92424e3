//! The command line: grammar, dispatch, exit codes.

pub mod cdi;
pub mod cdi_check;
pub mod doctor;
pub mod explain;
pub mod hook;
pub mod info;
pub mod list;
pub mod output;
pub mod precreate;
pub mod prepare;
pub mod rootfs;
pub mod status;
pub mod terminal;
pub mod why;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, bail};

use crate::error::{Failure, failure};
use crate::finding::catalog;
use crate::log::Log;
use crate::lower::rootfs::RootfsEdits;
use terminal::Terminal;

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verb {
    Inject(hook::Place),
    Precreate,
    Nothing,
    Cdi(cdi::Verb),
    Doctor,
    Explain,
    Info,
    List,
    Prepare,
    Rootfs,
    Status,
    Why,
    Forget,
    Help,
    Version,
}

/// The options of all verbs.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// `--config`
    pub config: Option<PathBuf>,
    /// `--json`
    pub json: bool,
    /// `--request`
    pub request_only: bool,
    /// `--stage`: at precreate stdin is config.json
    pub stage: Option<Stage>,
    /// `--root`
    pub root: Option<PathBuf>,
    /// `--inventory`
    pub inventory: Option<PathBuf>,
    /// `--bundle`
    pub bundle: Option<PathBuf>,
    /// Of `why`
    pub container: Option<String>,
    /// Of `list`
    pub wanted: list::Wanted,
    /// Of `cdi`
    pub cdi: cdi::Options,
    /// Of `rootfs`
    pub rootfs: RootfsEdits,
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

/// Runs the command with these arguments, argv[0] left out; the exit code is 0, 1 if it failed, 2 if the command line is wrong.
#[must_use]
pub fn run(args: Vec<OsString>, terminal: Terminal) -> ExitCode {
    let (verb, options) = match parse(args) {
        Ok(command) => command,
        Err(error) => {
            Log::default().error(&error);
            return ExitCode::from(USAGE);
        }
    };
    match verb {
        Verb::Inject(place) => hook::run(place, options.config.as_deref()),
        Verb::Precreate => precreate::run(&options),
        Verb::Nothing => ExitCode::SUCCESS,
        Verb::Cdi(verb) => cdi::run(verb, &options),
        Verb::Doctor => doctor::run(&options, terminal),
        Verb::Explain => explain::run(&options),
        Verb::Info => info::run(&options),
        Verb::List => list::run(&options),
        Verb::Prepare => prepare::run(&options),
        Verb::Rootfs => rootfs::run(options.rootfs),
        Verb::Status => status::run(&options, terminal),
        Verb::Why => why::run(&options),
        Verb::Forget => hook::forget(),
        Verb::Help => output::print(output::HELP),
        Verb::Version => output::print(concat!("oci-nvidia-hook ", env!("CARGO_PKG_VERSION"), "\n")),
    }
}

fn parse(args: Vec<OsString>) -> Result<(Verb, Options)> {
    parse_args(args).map_err(|error| {
        if error.downcast_ref::<Failure>().is_some() {
            return error;
        }
        failure(&catalog::COMMAND_LINE, format!("wrong command line: {error}"), "run \"oci-nvidia-hook --help\"")
    })
}

fn parse_args(args: Vec<OsString>) -> Result<(Verb, Options)> {
    use lexopt::Arg::{Long, Short, Value};
    let mut parser = lexopt::Parser::from_args(args);
    let mut options = Options::default();
    let mut verb = None;
    while let Some(arg) = parser.next()? {
        match (arg, verb) {
            (Long("help") | Short('h'), _) => return Ok((Verb::Help, options)),
            (Long("version") | Short('V'), _) => return Ok((Verb::Version, options)),
            (Long("config"), _) => options.config = Some(parser.value()?.into()),
            (Value(word), None) if word == "rootfs" => {
                options.rootfs = RootfsEdits::parse(parser.raw_args()?.collect())?;
                return Ok((Verb::Rootfs, options));
            }
            (Value(word), None) if word == "cdi" => verb = Some(Verb::Cdi(cdi::parse_verb(&parser.value()?)?)),
            (Long(name), Some(Verb::Cdi(of))) if cdi::takes(of, name) => {
                let name = name.to_owned();
                options.cdi.set(&name, &mut parser)?;
            }
            (Value(word), Some(Verb::Cdi(cdi::Verb::Check))) => {
                options.cdi.names.push(word.to_string_lossy().into_owned());
            }
            (Value(word), Some(Verb::Why)) if options.container.is_none() => {
                options.container = Some(word.to_string_lossy().into_owned());
            }
            (Value(word), None) => verb = Some(parse_verb(&word)?),
            (
                Long("json"),
                Some(
                    Verb::Doctor
                    | Verb::Explain
                    | Verb::Info
                    | Verb::Status
                    | Verb::Why
                    | Verb::Cdi(cdi::Verb::List | cdi::Verb::Check),
                ),
            ) => options.json = true,
            (Long("root"), Some(Verb::Cdi(_) | Verb::Explain | Verb::Info | Verb::List | Verb::Prepare)) => {
                options.root = Some(parser.value()?.into())
            }
            (Long("bundle"), Some(Verb::Doctor)) => options.bundle = Some(parser.value()?.into()),
            (Long("request"), Some(Verb::Explain)) => options.request_only = true,
            (Long("stage"), Some(Verb::Explain)) => options.stage = Some(parse_stage(&parser.value()?)?),
            (Long("inventory"), Some(Verb::Explain)) => options.inventory = Some(parser.value()?.into()),
            (Long("libraries") | Short('l'), Some(Verb::List)) => options.wanted.libraries = true,
            (Long("compat32"), Some(Verb::List)) => options.wanted.compat32 = true,
            (Long("binaries") | Short('b'), Some(Verb::List)) => options.wanted.binaries = true,
            (Long("ipcs") | Short('i'), Some(Verb::List)) => options.wanted.ipcs = true,
            (Long("firmwares") | Short('f'), Some(Verb::List)) => options.wanted.firmwares = true,
            (other, _) => return Err(other.unexpected().into()),
        }
    }
    match verb {
        Some(verb) => Ok((verb, options)),
        None => bail!("it names no stage and no command"),
    }
}

fn parse_verb(word: &OsString) -> Result<Verb> {
    Ok(match word.to_str() {
        // CRI-O rewrites prestart into createRuntime: the same moment, the same job.
        Some("prestart" | "createRuntime") => Verb::Inject(hook::Place::Outside),
        Some("createContainer") => Verb::Inject(hook::Place::Inside),
        Some("precreate") => Verb::Precreate,
        Some("doctor") => Verb::Doctor,
        Some("poststart") => Verb::Nothing,
        Some("poststop") => Verb::Forget,
        Some("why") => Verb::Why,
        Some("explain") => Verb::Explain,
        Some("info") => Verb::Info,
        Some("list") => Verb::List,
        Some("status") => Verb::Status,
        Some("prepare") => Verb::Prepare,
        _ => bail!("{word:?} is no stage this hook serves and no command"),
    })
}

fn parse_stage(word: &OsString) -> Result<Stage> {
    Ok(match word.to_str() {
        Some("precreate") => Stage::Precreate,
        Some("prestart" | "createRuntime" | "createContainer" | "startContainer") => Stage::WithState,
        _ => bail!("{word:?} is no stage (precreate, prestart, createRuntime, createContainer, startContainer)"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(args: &[&str]) -> Result<(Verb, Options)> {
        parse(args.iter().map(OsString::from).collect())
    }

    #[test]
    fn commands() {
        let with_config = || Options { config: Some("/c".into()), ..Options::default() };
        for (args, verb, options) in [
            (&["prestart"][..], Verb::Inject(hook::Place::Outside), Options::default()),
            (&["createRuntime"], Verb::Inject(hook::Place::Outside), Options::default()),
            (&["createContainer"], Verb::Inject(hook::Place::Inside), Options::default()),
            (&["--config", "/c", "prestart"], Verb::Inject(hook::Place::Outside), with_config()),
            (&["precreate", "--config=/c"], Verb::Precreate, with_config()),
            (&["poststop"], Verb::Forget, Options::default()),
            (&["why", "web"], Verb::Why, Options { container: Some("web".into()), ..Options::default() }),
            (&["--help"], Verb::Help, Options::default()),
            (&["prestart", "-V"], Verb::Version, Options::default()),
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
                    ..Options::default()
                },
            ),
            (
                &["rootfs", "--egl-devices", "0x3"],
                Verb::Rootfs,
                Options { rootfs: RootfsEdits { egl_devices: 3, ..RootfsEdits::default() }, ..Options::default() },
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
    fn wrong_command_lines() {
        for args in [
            &[][..],
            &["startContainer"],
            &["prestart", "x"],
            &["prestart", "--json"],
            &["--conf", "x"],
            &["--config"],
            &["nonsense"],
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
            &["rootfs", "--bogus"],
            &["why", "a", "b"],
        ] {
            let text = crate::error::render(&parsed(args).unwrap_err());
            assert!(text.starts_with("wrong command line: ") && text.contains("--help"), "{text}");
        }
    }
}
