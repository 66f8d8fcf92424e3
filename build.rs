//! Passes the linker's options of the feature `lean`.
#![allow(clippy::disallowed_methods, reason = "these rules are for the program, not for a build")]

use std::process::Command;

fn main() {
    const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/packaging/no-unwind-tables.ld");
    emit(&format!("cargo:rerun-if-changed={SCRIPT}"));
    emit("cargo:rerun-if-changed=build.rs");
    if cfg!(feature = "lean") {
        emit(&format!("cargo:rustc-link-arg-bins=-Wl,--no-eh-frame-hdr,-T,{SCRIPT}"));
        if glibc_version() >= Some((2, 36)) {
            // 1 KB of relocations instead of 105 KB, which the dynamic linker reads at each start. Older versions of glibc cannot.
            emit("cargo:rustc-link-arg-bins=-Wl,-z,pack-relative-relocs");
        }
    }
}

/// The glibc of this host, which the program is built for. `None` when cross-compiling, and if `getconf` is missing.
fn glibc_version() -> Option<(u32, u32)> {
    if std::env::var_os("HOST") != std::env::var_os("TARGET") {
        return None;
    }
    let output = Command::new("getconf").arg("GNU_LIBC_VERSION").output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let (major, minor) = text.trim().strip_prefix("glibc ")?.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

#[allow(clippy::print_stdout, reason = "build scripts pass instructions to cargo on stdout")]
fn emit(line: &str) {
    println!("{line}");
}
