//! What the program answers to requests that it cannot carry out.
#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "tests run programs, and end at the first surprise"
)]

use std::path::Path;
use std::process::{Command, Output};

use nvidia_host::driver::DriverKind;
use nvidia_host::nvml::program;
use nvidia_host::nvml::protocol::{InventoryLine, LibraryPlace, OTHER_BUILD, Request, Unloadable};

fn run(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oci-nvidia-nvml"));
    command.args(arguments).output().unwrap()
}

fn inventory(library: &str) -> Request {
    Request::Inventory {
        library: LibraryPlace {
            root: "/".into(),
            library: library.into(),
            identity: None,
            kind: DriverKind::Linux,
        },
        leave_out: Vec::new(),
    }
}

#[test]
fn a_person_learns_that_it_has_no_commands() {
    for arguments in [&[][..], &["--help"], &["a", "b", "c"]] {
        let output = run(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(stderr.starts_with("oci-nvidia-nvml: oci-nvidia-hook and "));
    }
}

/// A request of another build is not even read.
#[test]
fn another_build_is_refused() {
    let output = run(&["0123456789abcdef", "no request"]);
    assert!(output.status.success());
    let stdout = String::from_utf8(output.stdout).unwrap();
    assert_eq!(stdout, format!("{OTHER_BUILD}\n"));
}

#[test]
fn a_request_that_is_none_is_an_error() {
    let [_, id, _] = &program::arguments(&inventory("/x")).unwrap()[..] else {
        unreachable!("the name, the identity and the request");
    };
    let output = run(&[id.to_str().unwrap(), "{}"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(output.stdout.is_empty());
}

/// An answer that is not a whole line would be lost.
#[test]
fn it_reports_why_it_has_no_library() {
    let library = "/nonexistent/libnvidia-ml.so.1";
    let arguments = program::arguments(&inventory(library)).unwrap();
    let words: Vec<_> = arguments[1..]
        .iter()
        .map(|word| word.to_str().unwrap())
        .collect();
    let output = run(&words);
    let line: InventoryLine = base::json::from_bytes(&output.stdout).unwrap();
    assert!(!Path::new(library).exists());
    // A plain user may not confine the process.
    assert!(
        matches!(
            line,
            InventoryLine::Refused(Unloadable::Load(_) | Unloadable::Confine(_))
        ),
        "{line:?}"
    );
}
