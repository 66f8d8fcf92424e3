//! The feature `lean`: builds the program without Rust's start-up code and without libgcc_s. It changes only how the program
//! starts.
//!
//! In the static program, for a container that requests no GPU, it saves 16 page faults and 0.9 MB of 5.1.
//! `make bench OPTIONS="--compare OTHER-BUILD"` compares the times.
#![allow(
    unsafe_code,
    reason = "the C runtime and std call these functions by their names"
)]

use std::process::ExitCode;

use nix::libc;

/// Replaces the `main` that rustc generates, which asks glibc for the bounds of the stack to report overflows. glibc parses
/// /proc/self/maps to find them.
// SAFETY: the C runtime expects a function with this name and this signature, and no other symbol of the program has the name.
#[unsafe(no_mangle)]
extern "C" fn main() -> i32 {
    // SAFETY: signal(2) with SIG_IGN installs no handler. Writing to a closed pipe is now an error, as in any Rust program.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
    number(crate::main())
}

/// Returns the exit status as a number. `ExitCode` has no such function.
fn number(code: ExitCode) -> i32 {
    (0..=u8::MAX)
        .find(|number| ExitCode::from(*number) == code)
        .map_or(1, i32::from)
}

/// Replaces libgcc_s, from which std takes the functions that walk the stack for a backtrace. These find an empty stack: a
/// panic ends the program, and the linker has dropped the tables to walk by (`packaging/no-unwind-tables.ld`). As link-time
/// optimization sees the bodies, it drops std's reader of debug information as well.
mod no_unwinder {
    macro_rules! stubs {
        ($result:literal: $($name:ident)*) => {
            // SAFETY: these C functions only return a constant, whatever their arguments. The linker script makes the names
            // local. Nothing else of a static program calls them.
            $(#[unsafe(no_mangle)] extern "C" fn $name() -> usize { $result })*
        };
    }
    // _URC_END_OF_STACK, without a call of the callback.
    stubs! { 5: _Unwind_Backtrace }
    // Called only by an unwinder.
    stubs! { 0:
        _Unwind_GetDataRelBase _Unwind_GetIP _Unwind_GetIPInfo _Unwind_GetLanguageSpecificData _Unwind_GetRegionStart
        _Unwind_GetTextRelBase _Unwind_Resume _Unwind_SetGR _Unwind_SetIP
    }
}
