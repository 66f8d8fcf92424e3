//! Passes the linker script of the feature `lean`.

fn main() {
    const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/packaging/no-unwind-tables.ld");
    emit(&format!("cargo:rerun-if-changed={SCRIPT}"));
    emit("cargo:rerun-if-changed=build.rs");
    if cfg!(feature = "lean") {
        emit(&format!("cargo:rustc-link-arg-bins=-Wl,--no-eh-frame-hdr,-T,{SCRIPT}"));
    }
}

#[allow(clippy::print_stdout, reason = "build scripts pass instructions to cargo on stdout")]
fn emit(line: &str) {
    println!("{line}");
}
