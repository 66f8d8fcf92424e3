//! `oci-nvidia-hook`: see the library's documentation.
#![cfg_attr(not(test), no_main)]
#![allow(unsafe_code, reason = "the C runtime calls main by its name")]

use std::process::ExitCode;

use oci_nvidia_hook::cli;
use oci_nvidia_hook::cli::terminal::Terminal;
use oci_nvidia_hook::sys::process;

/// Called by the C runtime, past what Rust's runtime does before it calls a main of its own: it reads
/// /proc/self/maps for a message about stack overflows, which takes longer than a container without GPUs takes here.
// SAFETY: no other symbol of the program or of its libraries has this name; the C runtime expects exactly this function.
#[cfg_attr(not(test), unsafe(no_mangle))]
extern "C" fn main() -> i32 {
    process::start();
    let args: Vec<_> = std::env::args_os().collect();
    let terminal = Terminal::look();
    // Whoever started us, and with whatever: at some stages of some runtimes this is the image's (CVE-2025-23266).
    process::clear_environment();
    let code = cli::run(args, terminal);
    // The type does not tell its number.
    (0..=u8::MAX).find(|number| ExitCode::from(*number) == code).map_or(1, i32::from)
}

/// What the linker puts in place of libgcc_s in the released program (`packaging/no-unwind-tables.ld`): the answer
/// `_URC_END_OF_STACK` of `_Unwind_Backtrace`, and for the others, which only an unwinder calls, nothing.
// SAFETY: no other symbol of the program or of its libraries has this name.
#[cfg(not(test))]
#[unsafe(no_mangle)]
extern "C" fn unwind_nothing() -> i32 {
    5
}
