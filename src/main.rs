//! `oci-nvidia-hook`: see the library's documentation.
#![cfg_attr(not(test), no_main)]
#![allow(unsafe_code, reason = "the C runtime calls main by its name")]

use std::process::ExitCode;

use base::sys::process;
use oci_nvidia_hook::cli;
use oci_nvidia_hook::cli::terminal::Terminal;

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

/// In place of libgcc_s in the released program, which has no tables to unwind by (`packaging/no-unwind-tables.ld`): there is no
/// stack, and so nothing to print of it. That the compiler sees it leaves out std's reader of debug information, a tenth of
/// the program, and to load a library more takes a tenth of what a container without GPUs costs.
#[cfg(not(any(test, debug_assertions)))]
mod no_unwinder {
    macro_rules! answers {
        ($answer:literal: $($name:ident)*) => {
            // SAFETY: C functions that do nothing but answer, whatever they are called with. The names are not exported: a
            // library that NVML brings along finds its own unwinder.
            $(#[unsafe(no_mangle)] extern "C" fn $name() -> usize { $answer })*
        };
    }
    // _URC_END_OF_STACK, and no function is called back.
    answers! { 5: _Unwind_Backtrace }
    // Only an unwinder would call these.
    answers! { 0:
        _Unwind_GetDataRelBase _Unwind_GetIP _Unwind_GetIPInfo _Unwind_GetLanguageSpecificData _Unwind_GetRegionStart
        _Unwind_GetTextRelBase _Unwind_Resume _Unwind_SetGR _Unwind_SetIP
    }
}
