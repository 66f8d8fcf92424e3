//! `oci-nvidia-hook`: see the library's documentation.
#![cfg_attr(all(feature = "lean", not(test)), no_main)]

use std::process::ExitCode;

use base::sys::process;
use oci_nvidia_hook::cli;
use oci_nvidia_hook::cli::terminal::Terminal;

#[cfg(all(feature = "lean", not(test)))]
mod lean;

fn main() -> ExitCode {
    let args: Vec<_> = std::env::args_os().collect();
    let terminal = Terminal::look();
    // At some stages, some runtimes start a hook with the environment that the image chose (CVE-2025-23266).
    process::clear_environment();
    cli::run(args, terminal)
}
