//! The command line of the checks. The rehearsal of the checks is the module `gpu_kit` of the tests of the hook.
#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "tests run programs"
)]

use std::process::{Command, Output};

fn run(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_gpu-checks"))
        .args(words)
        .output()
        .unwrap()
}

#[test]
fn mistakes_are_reported() {
    for (words, message) in [
        (&["--rot", "/"][..], "unknown option --rot"),
        (&["now"], "unexpected argument"),
        (&["--time", "soon"], "soon"),
        (
            &["--inside", "/nonexistent", "--only", "cuda,smy"],
            "unknown check \"smy\"",
        ),
    ] {
        let ran = run(words);
        let stderr = String::from_utf8_lossy(&ran.stderr);
        assert!(
            ran.status.code() == Some(2) && stderr.contains(message),
            "{words:?}: {stderr}"
        );
    }
}

#[test]
fn checks_have_a_name_and_a_purpose() {
    let list = String::from_utf8(run(&["--list"]).stdout).unwrap();
    assert!(list.lines().count() > 25, "{list}");
    assert!(
        list.lines().all(|line| line.split_whitespace().count() > 3),
        "{list}"
    );
    assert!(
        String::from_utf8(run(&["--help"]).stdout)
            .unwrap()
            .contains("--report DIR")
    );
}
