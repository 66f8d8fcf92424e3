//! Options of the linker for the programs of the packages, for the build scripts of both.

use std::process::Command;

/// Not every compiler passes this option to the linker. Stored files belong to one build, see `base::sys::build_id`.
pub(crate) const BUILD_ID: &str = "-Wl,--build-id";

/// Returns the options that make a program smaller: without tables for unwinding, and with packed relocations if the glibc of this host
/// supports them.
pub(crate) fn options(script: &str) -> Vec<String> {
    let mut options = vec![format!("-Wl,--no-eh-frame-hdr,-T,{script}")];
    if glibc_version() >= Some((2, 36)) {
        // 1 KB of relocations instead of more than 100 KB, which the dynamic linker reads at each start. Older versions of glibc cannot.
        options.push("-Wl,-z,pack-relative-relocs".to_owned());
    }
    options
}

/// The glibc of this host, which the program is built for. `None` when cross-compiling, and if `getconf` is missing.
fn glibc_version() -> Option<(u32, u32)> {
    if std::env::var_os("HOST") != std::env::var_os("TARGET") {
        return None;
    }
    let output = Command::new("getconf")
        .arg("GNU_LIBC_VERSION")
        .output()
        .ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let (major, minor) = text.trim().strip_prefix("glibc ")?.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}
