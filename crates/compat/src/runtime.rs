//! Runs as `nvidia-container-runtime`, an OCI runtime for Docker and containerd: adds the GPUs to config.json of the bundle, and
//! becomes runc.
//!
//! These engines have no hooks directories. Docker can add a hook only for `--gpus`, and no setting of a runtime in daemon.json adds
//! one: a container that requests GPUs with a variable needs a program in front of runc. The hook prints the edited config.json. The shim
//! of containerd starts runtimes with its environment, not with an image's, so runc gets it unchanged.

use std::ffi::OsString;
use std::fmt;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};

use base::go::flag;
use base::paths::HostPath;
use base::report::{failure, line, render};
use base::sys::in_root::open_host_file;
use base::sys::process::{self, Filtered};
use base::sys::stdio;
use base::tree::Tree;
use findings::catalog;
use nvidia_host::config::{self, Config};
use nvidia_host::programs::{EDIT_CONFIG, RUNTIME};

use crate::{THIS_PROGRAM, edit};

/// How long the hook may take. It has shorter time limits for all that can hang, such as NVML.
const PATIENCE: Duration = Duration::from_secs(240);
/// The global options of runc and crun with a value.
const WITH_VALUE: [&str; 7] = [
    "log",
    "log-format",
    "log-level",
    "root",
    "criu",
    "rootless",
    "cgroup-manager",
];

/// A command line of an OCI runtime.
#[derive(Debug, Default, PartialEq, Eq)]
struct RuntimeCall {
    /// The bundle, if the command creates a container
    bundle: Option<PathBuf>,
    /// The file that the engine reads after a failure
    log: Option<PathBuf>,
    is_json: bool,
}

/// Runs the command with the arguments after `argv[0]`. Returns only after a failure.
#[must_use]
pub fn run(args: &[OsString]) -> ExitCode {
    let call = parse(args);
    let error = match edit(call.bundle.as_deref()).and_then(|()| become_runtime(args)) {
        Ok(never) => match never {},
        Err(error) => error,
    };
    let (text, message) = match error.downcast_ref::<OfHook>() {
        Some(OfHook(text)) => (text.clone(), text.replace('\n', "; ")),
        None => (render(&error), line(&error)),
    };
    stdio::print_stderr(&format!("{RUNTIME}: {text}\n"));
    log(&call, &message);
    ExitCode::FAILURE
}

/// The error text of the hook, which has its number and its hint.
#[derive(Debug)]
struct OfHook(String);

impl fmt::Display for OfHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for OfHook {}

fn parse(args: &[OsString]) -> RuntimeCall {
    let mut call = RuntimeCall::default();
    let mut creates = None;
    let mut words = args.iter();
    while let Some(word) = words.next() {
        let Some((name, value)) = flag(word) else {
            // After the command, other words are the id of the container.
            creates.get_or_insert_with(|| word == "create" || word == "run");
            continue;
        };
        let takes_value = match creates {
            None => WITH_VALUE.contains(&name),
            Some(_) => matches!(name, "bundle" | "b"),
        };
        let value = match value {
            Some(value) => Some(OsString::from(value)),
            None if takes_value => words.next().cloned(),
            None => None,
        };
        match (name, creates) {
            ("log", None) => call.log = value.map(PathBuf::from),
            ("log-format", None) => call.is_json = value.is_some_and(|value| value == "json"),
            ("bundle" | "b", Some(true)) => call.bundle = value.map(PathBuf::from),
            _ => {}
        }
    }
    if creates == Some(true) {
        call.bundle.get_or_insert_with(|| ".".into());
    }
    call
}

/// Replaces config.json of the bundle with the output of this program as the hook, which starts without an environment.
fn edit(bundle: Option<&Path>) -> Result<()> {
    let Some(bundle) = bundle else { return Ok(()) };
    let path = bundle.join("config.json");
    let (file, _) = open_host_file(&path).with_context(|| format!("cannot read {path:?}"))?;
    let Filtered {
        succeeded,
        output,
        messages,
        is_same,
    } = process::filter(
        Path::new(THIS_PROGRAM),
        &[EDIT_CONFIG],
        bundle,
        file,
        PATIENCE,
    )
    .context("cannot run the hook")?;
    if !succeeded {
        let text = messages.trim();
        let text = text.strip_prefix("oci-nvidia-hook: ").unwrap_or(text);
        let text = if text.is_empty() {
            "the hook failed"
        } else {
            text
        };
        return Err(OfHook(text.to_owned()).into());
    }
    stdio::print_stderr(&messages);
    if is_same {
        Ok(())
    } else {
        edit::file::replace(&path, &output)
    }
}

/// Replaces this process with the first runtime of config.toml that exists. An invalid file stops only containers that request GPUs, and
/// has done so before.
fn become_runtime(args: &[OsString]) -> Result<std::convert::Infallible> {
    let host = Tree::open(&HostPath::new("/"))?;
    let (Config { runtimes, .. }, _) = config::read(None).unwrap_or_default();
    let Some(found) = runtimes.iter().find_map(|name| existing(&host, name)) else {
        return Err(failure(
            &catalog::SYSTEM,
            format!("none of the runtimes {runtimes:?} exists"),
            "install the package runc or crun, or set runtimes in config.toml",
        ));
    };
    Err(process::replace_with_environment(&found, args))
        .with_context(|| format!("cannot start {found:?}"))
}

/// Returns the program with this name or path, unless it is NVIDIA's runtime, which would start itself again and again.
fn existing(host: &Tree, name: &str) -> Option<PathBuf> {
    let path = Path::new(name);
    let found = if !path.is_absolute() {
        base::search_path::find(host, name)?
    } else if host.locate(path).is_ok() {
        path.to_owned()
    } else {
        return None;
    };
    if found.file_name()? == RUNTIME {
        return None;
    }
    Some(found)
}

/// Appends the error to the log, from which the shim of containerd takes the message for the user.
#[expect(
    clippy::disallowed_methods,
    reason = "the engine that calls the runtime names its log"
)]
fn log(call: &RuntimeCall, message: &str) {
    let Some(path) = &call.log else { return };
    let text = if call.is_json {
        serde_json::json!({"level": "error", "msg": message}).to_string()
    } else {
        message.to_owned()
    };
    if let Ok(mut file) = File::options().append(true).create(true).open(path) {
        file.write_all(format!("{text}\n").as_bytes()).ok();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_paths_of_runtimes() {
        let root = tempfile::tempdir().unwrap();
        for name in [
            "usr/bin/runc",
            "usr/local/sbin/kata-runtime",
            "opt/crun",
            "usr/bin/nvidia-container-runtime",
        ] {
            let path = root.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "").unwrap();
        }
        let host = Tree::open(&HostPath::new(root.path())).unwrap();
        for (name, expected) in [
            ("runc", Some("/usr/bin/runc")),
            ("/opt/crun", Some("/opt/crun")),
            ("/usr/bin/crun", None),
            ("crun", None),
            ("nvidia-container-runtime", None),
            ("/usr/bin/nvidia-container-runtime", None),
        ] {
            assert_eq!(existing(&host, name), expected.map(PathBuf::from), "{name}");
        }
    }

    #[test]
    fn command_lines_of_engines() {
        let with = |bundle: &str, log: &str| RuntimeCall {
            bundle: Some(bundle)
                .filter(|path| !path.is_empty())
                .map(PathBuf::from),
            log: Some(log).filter(|path| !path.is_empty()).map(PathBuf::from),
            is_json: !log.is_empty(),
        };
        for (line, call) in [
            (
                "--root /r --log /l --log-format json --systemd-cgroup create --bundle /b --pid-file /p id",
                with("/b", "/l"),
            ),
            (
                "--root create --log=/l --log-format=json start create",
                with("", "/l"),
            ),
            ("--debug run -b /b id", with("/b", "")),
            ("create --no-pivot id", with(".", "")),
            ("create --bundle=/b id", with("/b", "")),
            ("exec --bundle /b create", with("", "")),
            ("--version", with("", "")),
            ("", with("", "")),
        ] {
            let args: Vec<_> = line.split_whitespace().map(OsString::from).collect();
            assert_eq!(parse(&args), call, "{line}");
        }
    }
}
