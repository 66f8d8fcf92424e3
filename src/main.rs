//! `oci-nvidia-hook`: see the library's documentation.
#![cfg_attr(all(feature = "lean", not(test)), no_main)]

use std::process::ExitCode;

#[cfg(all(feature = "lean", not(test)))]
mod lean;

fn main() -> ExitCode {
    oci_nvidia_hook::run()
}
