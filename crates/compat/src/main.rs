//! The program behind NVIDIA's names: `nvidia-cdi-hook`, `nvidia-ctk`, `nvidia-container-runtime-hook`, `nvidia-container-toolkit`
//! and `nvidia-container-cli`, which are links to it.
//!
//! Hook entries that other programs wrote can lack an `env`. runc then passes the environment of the image to hooks at the
//! createContainer and startContainer stages, with `LD_PRELOAD` and a library of the image as its value (CVE-2025-23266). This
//! program is static: no dynamic linker reads these variables, in a process that has all capabilities of the host's root. It carries
//! out the hook entries of NVIDIA's CDI specs, which need neither NVML nor another library, and passes everything else to
//! oci-nvidia-hook with an empty environment.

#[cfg(not(any(target_feature = "crt-static", debug_assertions)))]
compile_error!("cargo rustc --release --package oci-nvidia-hook-compat -- -C target-feature=+crt-static");

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use oci_nvidia_hook::CdiHook;

fn main() -> ExitCode {
    let args: Vec<OsString> = std::env::args_os().collect();
    let program = match CdiHook::parse(&args) {
        Some(hook) if has_no_environment() => return hook.run(),
        // The start-up code of libc reads variables such as GLIBC_TUNABLES, even in a static program. The program that works on the
        // container therefore starts again without any.
        Some(_) => "/proc/self/exe".into(),
        None => main_program(),
    };
    oci_nvidia_hook::pass_on(&program, &args)
}

fn has_no_environment() -> bool {
    std::env::vars_os().next().is_none()
}

/// Returns oci-nvidia-hook, which packages install in the directory of this program.
fn main_program() -> PathBuf {
    let this = std::env::current_exe();
    this.map_or_else(|_| "/usr/bin/oci-nvidia-hook".into(), |this| this.with_file_name("oci-nvidia-hook"))
}
