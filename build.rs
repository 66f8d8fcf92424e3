//! Passes the options of the linker: a build id in any case, and what the feature `lean` needs.
#![allow(
    clippy::disallowed_methods,
    reason = "these rules are for the program, not for a build"
)]
#![allow(
    clippy::print_stdout,
    reason = "build scripts pass instructions to cargo on stdout"
)]

#[path = "packaging/linker.rs"]
mod linker;

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/packaging/no-unwind-tables.ld");
/// Functions that a start runs are next to each other.
const ORDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/packaging/start-order.ld");

fn main() {
    println!("cargo:rerun-if-changed={SCRIPT}");
    println!("cargo:rerun-if-changed={ORDER}");
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-link-arg-bins={}", linker::BUILD_ID);
    if cfg!(feature = "lean") {
        linker::options(SCRIPT)
            .iter()
            .for_each(|option| println!("cargo:rustc-link-arg-bins={option}"));
        println!("cargo:rustc-link-arg-bins=-Wl,-T,{ORDER}");
    }
}
