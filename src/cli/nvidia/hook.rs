//! Runs as `nvidia-container-runtime-hook`: parses the command line of that program, and runs the hook.
//!
//! The syntax is defined by Go's package flag: one or two dashes, and no flags after the first other word. Words after the stage are
//! ignored. <https://pkg.go.dev/flag#hdr-Command_line_flag_syntax>

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, bail};

use base::go;
use base::report::failure;
use findings::catalog;
use nvidia_host::programs;

use crate::cli::output;
use crate::cli::stage::Stage;
use crate::cli::usage::hook_usage_error;

const HELP: &str = "\
usage: nvidia-container-runtime-hook [-config FILE] [-debug] STAGE < state.json

oci-nvidia-hook, called with the name of NVIDIA's hook. STAGE is prestart, poststart,
poststop, or another stage that \"oci-nvidia-hook --help\" lists.

  -config FILE  read this configuration file
  -debug        log each step on stderr
  -version      print the version
";

#[derive(Debug, Default, PartialEq, Eq)]
pub struct Call {
    /// `-config`
    pub config: Option<PathBuf>,
    debug: bool,
    version: bool,
    help: bool,
    stage: Option<OsString>,
}

/// Runs the hook with the arguments after argv\[0\].
pub fn run(args: Vec<OsString>) -> ExitCode {
    let call = match parse(args) {
        Ok(call) => call,
        Err(error) => return invalid(&error.to_string()),
    };
    if call.help {
        return output::print(HELP);
    }
    if call.version {
        return output::print(concat!(
            "NVIDIA Container Runtime Hook version ",
            env!("CARGO_PKG_VERSION"),
            " (oci-nvidia-hook)\n"
        ));
    }
    let Some(stage) = call.stage else {
        return invalid("the stage is missing");
    };
    match stage.to_str().and_then(Stage::named) {
        Some(stage) => stage.run(call.config.as_deref(), call.debug),
        None => invalid(&format!("unknown stage {stage:?}")),
    }
}

fn invalid(what: &str) -> ExitCode {
    let hint = "the stages are prestart, poststart and poststop; see \"oci-nvidia-hook --help\"";
    hook_usage_error(
        programs::RUNTIME_HOOK,
        &failure(
            &catalog::COMMAND_LINE,
            format!("invalid command line: {what}"),
            hint,
        ),
    )
}

/// Parses the arguments after argv\[0\].
///
/// # Errors
/// If a flag is unknown, or its value is invalid.
pub fn parse(args: Vec<OsString>) -> Result<Call> {
    let mut call = Call::default();
    let mut args = args.into_iter();
    while let Some(word) = args.next() {
        let Some((name, value)) = go::flag(&word) else {
            call.stage = Some(word);
            break;
        };
        match (name, value) {
            // "--" ends the flags.
            ("", None) => {
                call.stage = args.next();
                break;
            }
            ("config", Some(value)) => call.config = Some(value.into()),
            ("config", None) => match args.next() {
                Some(value) => call.config = Some(value.into()),
                None => bail!("-config needs a file"),
            },
            ("debug", value) => call.debug = is_on(name, value)?,
            ("version", value) => call.version = is_on(name, value)?,
            ("h" | "help", _) => call.help = true,
            _ => bail!("unknown flag {word:?}"),
        }
    }
    // An empty path means the default.
    call.config = call.config.filter(|path| !path.as_os_str().is_empty());
    Ok(call)
}

/// Parses a boolean. A flag without a value is true.
fn is_on(name: &str, value: Option<&str>) -> Result<bool> {
    let Some(value) = value else {
        return Ok(true);
    };
    match go::parse_bool(value) {
        Some(is_on) => Ok(is_on),
        None => bail!("-{name}={value:?} is neither true nor false"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(args: &[&str]) -> Result<Call> {
        parse(args.iter().map(OsString::from).collect())
    }

    #[test]
    fn flags_are_gos() {
        let prestart = || Call {
            stage: Some("prestart".into()),
            ..Call::default()
        };
        let with_config = || Call {
            config: Some("/c".into()),
            ..prestart()
        };
        for (args, call) in [
            (&["prestart"][..], prestart()),
            (&["-config", "/c", "prestart"], with_config()),
            (&["--config", "/c", "prestart"], with_config()),
            (&["-config=/c", "prestart"], with_config()),
            (&["--config=/c", "--", "prestart"], with_config()),
            (&["--config=", "prestart"], prestart()),
            (&["prestart", "-config", "/c", "x"], prestart()),
            (
                &["-debug", "prestart"],
                Call {
                    debug: true,
                    ..prestart()
                },
            ),
            (&["-debug=true", "-debug=F", "prestart"], prestart()),
            (
                &["--version"],
                Call {
                    version: true,
                    ..Call::default()
                },
            ),
            (
                &["-h"],
                Call {
                    help: true,
                    ..Call::default()
                },
            ),
            (&[], Call::default()),
            (
                &["-", "prestart"],
                Call {
                    stage: Some("-".into()),
                    ..Call::default()
                },
            ),
        ] {
            assert_eq!(parsed(args).unwrap(), call, "{args:?}");
        }
        for args in [
            &["-x", "prestart"][..],
            &["-config"],
            &["-debug=perhaps", "prestart"],
            &["---config", "/c"],
        ] {
            assert!(parsed(args).is_err(), "{args:?}");
        }
    }
}
