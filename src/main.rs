//! `oci-nvidia-hook`: see the library's documentation.

use std::process::ExitCode;

use oci_nvidia_hook::cli;
use oci_nvidia_hook::sys::process;

fn main() -> ExitCode {
    let args: Vec<_> = std::env::args_os().collect();
    // Whoever started us, and with whatever: at some stages of some runtimes this is the image's (CVE-2025-23266).
    process::clear_environment();
    cli::run(args)
}
