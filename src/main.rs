//! `oci-nvidia-hook`: see the library's documentation.

use std::process::ExitCode;

use oci_nvidia_hook::cli::{self, Invocation};

#[expect(clippy::disallowed_methods, reason = "the one place where the environment is read")]
fn main() -> ExitCode {
    cli::run(Invocation {
        args: std::env::args_os().skip(1).collect(),
        xdg_config_home: std::env::var_os("XDG_CONFIG_HOME").map(Into::into),
    })
}
