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

/// In place of libgcc_s's in the released program, which has no tables to unwind by: there is no stack, and so nothing to print
/// of it. That the compiler sees it here leaves out std's reader of debug information, a tenth of the program.
// SAFETY: the C ABI's signature, and an answer (`_URC_END_OF_STACK`) that every caller knows; nothing is called back. The name
// is not exported: a library that NVML brings along finds its own.
#[cfg(not(any(test, debug_assertions)))]
#[unsafe(no_mangle)]
extern "C" fn _Unwind_Backtrace(_: *const u8, _: *mut u8) -> i32 {
    5
}

/// For the rest of libgcc_s (`packaging/no-unwind-tables.ld`), which only an unwinder would call.
// SAFETY: no other symbol of the program or of its libraries has this name.
#[cfg(not(test))]
#[unsafe(no_mangle)]
extern "C" fn unwind_nothing() -> i32 {
    5
}
