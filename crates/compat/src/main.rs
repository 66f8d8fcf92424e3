//! The program behind NVIDIA's names: `nvidia-cdi-hook`, `nvidia-ctk`, `nvidia-container-runtime-hook`, `nvidia-container-toolkit`,
//! `nvidia-container-cli` and `nvidia-container-runtime`, which are links to it.
//!
//! Hook entries that other programs wrote can lack an `env`. runc before 1.3 then passes the environment of the image to hooks at the
//! createContainer stage, with `LD_PRELOAD` and a library of the image as its value (CVE-2025-23266). This
//! program is static: no dynamic linker reads these variables, in a process that has all capabilities of the host's root. It carries
//! out the hook entries of NVIDIA's CDI specs, which need neither NVML nor another library. It also has the commands that configure
//! engines ([`ctk`]), and the runtime for engines without hooks ([`runtime`]). It passes everything else to oci-nvidia-hook with an
//! empty environment.

#![cfg_attr(
    test,
    allow(
        clippy::disallowed_methods,
        reason = "tests open files that they created"
    )
)]

#[cfg(not(any(target_feature = "crt-static", debug_assertions)))]
compile_error!(
    "cargo rustc --release --package oci-nvidia-hook-compat -- -C target-feature=+crt-static"
);

mod ctk;
mod edit;
mod runtime;

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use nvidia_host::programs;
use oci_nvidia_hook::CdiHook;

fn main() -> ExitCode {
    let args: Vec<OsString> = std::env::args_os().collect();
    let name = args
        .first()
        .and_then(|called| Path::new(called).file_name())
        .and_then(OsStr::to_str);
    let rest = args.get(1..).unwrap_or_default();
    if name == Some(programs::RUNTIME) {
        return runtime::run(rest, &main_program());
    }
    let is_ctk = name == Some(programs::CTK) && ctk::is_command(rest);
    let program = match CdiHook::parse(&args) {
        _ if is_ctk && has_no_environment() => return ctk::run(rest, &main_program()),
        Some(hook) if has_no_environment() => return hook.run(),
        // The start-up code of libc reads variables such as GLIBC_TUNABLES, even in a static program. The program that works on the
        // container or the host therefore starts again without any.
        Some(_) => "/proc/self/exe".into(),
        None if is_ctk => "/proc/self/exe".into(),
        None => main_program(),
    };
    oci_nvidia_hook::pass_on(&program, &args)
}

fn has_no_environment() -> bool {
    std::env::vars_os().next().is_none()
}

/// Returns oci-nvidia-hook, which packages install in the directory of this program.
fn main_program() -> PathBuf {
    neighbor("oci-nvidia-hook")
}

/// Returns the path of a program in the directory of this one.
fn neighbor(name: &str) -> PathBuf {
    let this = std::env::current_exe();
    this.map_or_else(
        |_| Path::new("/usr/bin").join(name),
        |this| this.with_file_name(name),
    )
}
