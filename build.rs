//! Leaves what nobody reads out of the released program.

fn main() {
    const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/packaging/no-unwind-tables.ld");
    emit(&format!("cargo:rerun-if-changed={SCRIPT}"));
    emit("cargo:rerun-if-changed=build.rs");
    // Whoever looks for a mistake wants to see the stack.
    if released() {
        emit(&format!("cargo:rustc-link-arg-bins=-Wl,--no-eh-frame-hdr,-T,{SCRIPT}"));
    }
}

#[allow(clippy::disallowed_methods, reason = "cargo tells its build scripts by the environment")]
fn released() -> bool {
    std::env::var_os("PROFILE").is_some_and(|profile| profile == "release")
}

#[allow(clippy::print_stdout, reason = "that is how a build script speaks to cargo")]
fn emit(line: &str) {
    println!("{line}");
}
