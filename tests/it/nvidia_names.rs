//! Command lines of the program under NVIDIA's names. The modules `nvidia_ctk`, `nvidia_cli` and `docker` test what it does.

use std::os::unix::process::CommandExt;
use std::process::Command;

use crate::support::HOOK;

tests! {
    &[] => invalid_command_lines, mistakes_are_reported_under_the_called_name;
}

/// Runs the program under this name, and returns its exit status and stderr.
fn called(line: &str) -> (Option<i32>, String) {
    let mut words = line.split(' ');
    let mut program = Command::new(HOOK);
    program.arg0(words.next().unwrap()).args(words).env_clear();
    let ran = program.output().unwrap();
    assert_eq!(ran.stdout, b"", "{line}");
    (ran.status.code(), String::from_utf8(ran.stderr).unwrap())
}

/// nvidia-container-cli ends with 1, like NVIDIA's program.
fn invalid_command_lines() {
    for (line, code, problem) in [
        ("nvidia-ctk", 2, "a command is missing"),
        ("nvidia-ctk --frobnicate", 2, "\"--frobnicate\" found"),
        (
            "nvidia-ctk config --in-place --output x",
            2,
            "cannot be used with",
        ),
        ("nvidia-container-cli", 1, "a command is missing"),
        (
            "nvidia-container-cli configure",
            1,
            "not provided: <ROOTFS>",
        ),
        (
            "nvidia-container-cli configure --pid 0 /",
            1,
            "0 is not in 1..=2147483647",
        ),
        ("nvidia-container-runtime-hook", 2, "the stage is missing"),
        (
            "nvidia-container-runtime-hook word",
            2,
            "unknown stage \"word\"",
        ),
        (
            "nvidia-container-runtime-hook -config",
            2,
            "-config needs a file",
        ),
    ] {
        let (found, stderr) = called(line);
        assert_eq!(found, Some(code), "{line}: {stderr}");
        let (message, _) = stderr.split_once(" (ONH-002)\nhint: ").unwrap();
        let is_said = message.contains(": invalid command line: ") && message.contains(problem);
        assert!(is_said, "{line}: {stderr}");
    }
}

fn mistakes_are_reported_under_the_called_name() {
    let mut program = Command::new(HOOK);
    let ran = program.arg0("nvidia-ctk").arg("hok").output().unwrap();
    let stderr = String::from_utf8(ran.stderr).unwrap();
    assert_eq!(ran.status.code(), Some(2), "{stderr}");
    assert!(
        stderr.starts_with("nvidia-ctk: invalid command line: unrecognized subcommand \"hok\""),
        "{stderr}"
    );
}
