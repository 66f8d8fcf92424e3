//! Passes the options of the linker: a build id in any case, and in release builds those of the other programs.
#![allow(
    clippy::disallowed_methods,
    reason = "these rules are for the program, not for a build"
)]
#![allow(
    clippy::print_stdout,
    reason = "build scripts pass instructions to cargo on stdout"
)]

#[path = "../../packaging/linker.rs"]
mod linker;

/// The linker script of the hook's feature `lean`.
const SCRIPT: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../packaging/no-unwind-tables.ld"
);

fn main() {
    println!("cargo::rerun-if-changed={SCRIPT}");
    println!("cargo::rustc-link-arg-bins={}", linker::BUILD_ID);
    if std::env::var("PROFILE").as_deref() == Ok("release") {
        linker::options(SCRIPT)
            .iter()
            .for_each(|option| println!("cargo::rustc-link-arg-bins={option}"));
    }
}
