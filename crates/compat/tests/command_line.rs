//! The program under NVIDIA's names. The modules `nvidia_ctk`, `nvidia_cli` and `docker` of the tests of the hook test what it does.
#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "tests run programs"
)]

use std::os::unix::process::CommandExt;
use std::process::Command;

#[test]
fn mistakes_are_reported_under_the_called_name() {
    let mut program = Command::new(env!("CARGO_BIN_EXE_oci-nvidia-hook-compat"));
    let ran = program.arg0("nvidia-ctk").arg("hok").output().unwrap();
    let stderr = String::from_utf8(ran.stderr).unwrap();
    assert_eq!(ran.status.code(), Some(2), "{stderr}");
    assert!(
        stderr.starts_with("nvidia-ctk: invalid command line: unknown command \"hok\""),
        "{stderr}"
    );
}
