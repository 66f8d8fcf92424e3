//! The local time of the user who calls a command. Only commands for people use it: documents and records have UTC.
#![allow(unsafe_code, reason = "localtime_r and setenv have no safe form")]

use std::ffi::{CStr, OsString};
use std::mem::MaybeUninit;
use std::sync::OnceLock;
use std::time::{SystemTime, UNIX_EPOCH};

use nix::libc;

/// `TZ` of the caller, if it is set.
static ZONE: OnceLock<OsString> = OnceLock::new();

/// Returns `TZ`. Called before the environment is cleared.
#[expect(
    clippy::disallowed_methods,
    reason = "called where the environment is read"
)]
#[must_use]
pub fn zone() -> Option<OsString> {
    std::env::var_os("TZ")
}

/// Stores what [`zone`] returned, for the times that a command for people prints.
pub fn keep(zone: OsString) {
    ZONE.set(zone).ok();
}

/// Returns the time as `2026-11-23 20:01:03 CET`, or `None` if the C library cannot convert it. The process must have only one thread.
#[must_use]
pub fn format(time: SystemTime) -> Option<String> {
    let seconds = libc::time_t::try_from(time.duration_since(UNIX_EPOCH).ok()?.as_secs()).ok()?;
    // tzset(3) reads the variable once, so it need not stay in the environment of programs that this process starts.
    if let Some(zone) = ZONE.get() {
        // SAFETY: this process has one thread, and it keeps no pointer into the environment.
        unsafe { std::env::set_var("TZ", zone) };
    }
    // SAFETY: tzset(3) takes no arguments. This process has one thread.
    unsafe { tzset() };
    // SAFETY: see above.
    unsafe { std::env::remove_var("TZ") };
    let mut parts = MaybeUninit::<libc::tm>::uninit();
    // SAFETY: both pointers are valid for the call, and localtime_r(3) keeps neither.
    let stored = unsafe { libc::localtime_r(&raw const seconds, parts.as_mut_ptr()) };
    if stored.is_null() {
        return None;
    }
    // SAFETY: localtime_r(3) returned the pointer, so it has filled the structure.
    let parts = unsafe { parts.assume_init() };
    if parts.tm_zone.is_null() {
        return None;
    }
    // SAFETY: not NULL, so the name of the zone, a C string that is valid until the next tzset(3).
    let zone = unsafe { CStr::from_ptr(parts.tm_zone) }.to_string_lossy();
    let libc::tm {
        tm_year,
        tm_mon,
        tm_mday,
        tm_hour,
        tm_min,
        tm_sec,
        ..
    } = parts;
    let (year, month) = (tm_year + 1900, tm_mon + 1);
    Some(format!(
        "{year}-{month:02}-{tm_mday:02} {tm_hour:02}:{tm_min:02}:{tm_sec:02} {zone}"
    ))
}

unsafe extern "C" {
    /// tzset(3), which the crate libc does not declare for Linux
    fn tzset();
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_time_has_its_zone() {
        ZONE.set("XST-5:30".into()).unwrap();
        let time = UNIX_EPOCH + Duration::from_secs(1_774_263_663);
        assert_eq!(format(time).as_deref(), Some("2026-03-23 16:31:03 XST"));
    }
}
