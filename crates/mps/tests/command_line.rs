//! The command line of the program, without root and without a GPU.

#![allow(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    reason = "tests run the program, and end if it does not start"
)]

use std::process::{Command, Output};

fn run(arguments: &[&str]) -> Output {
    let program = env!("CARGO_BIN_EXE_oci-nvidia-mps");
    Command::new(program).args(arguments).output().unwrap()
}

#[test]
fn invalid_command_lines() {
    for (arguments, message) in [
        (&[][..], "a command is missing"),
        (&["start"], "unrecognized subcommand \"start\""),
        (&["run"], "not provided: <UUID>"),
        (&["end", "GPU-1"], "not provided: <RESULT>"),
        (
            &["restore", "--some"],
            "unexpected argument \"--some\" found",
        ),
    ] {
        let output = run(arguments);
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{text}");
        let start = "oci-nvidia-mps: invalid command line: ";
        assert!(text.starts_with(start) && text.contains(message), "{text}");
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn help_and_version() {
    let help = run(&["--help"]);
    let text = String::from_utf8_lossy(&help.stdout);
    assert!(
        help.status.success() && text.contains("Usage: oci-nvidia-mps"),
        "{text}"
    );
    let version = run(&["--version"]);
    let expected = concat!("oci-nvidia-mps ", env!("CARGO_PKG_VERSION"), "\n");
    assert_eq!(String::from_utf8_lossy(&version.stdout), expected);
}

/// No GPU is shared by default, so nothing is asked.
#[test]
fn a_configuration_without_shared_gpus() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("config.toml");
    let list = |text: &str| {
        std::fs::write(&file, text).unwrap();
        run(&["--config", file.to_str().unwrap(), "list"])
    };
    let empty = list("");
    assert!(
        empty.status.success() && empty.stdout.is_empty(),
        "{empty:?}"
    );
    let invalid = list("[sharing]\nmps-gpus = [\"H100\"]\n");
    let text = String::from_utf8_lossy(&invalid.stderr);
    assert!(text.contains("(ONH-005)\nhint: "), "{text}");
    assert_eq!(invalid.status.code(), Some(1));
}
