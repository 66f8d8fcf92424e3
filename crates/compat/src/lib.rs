//! What the hook does under NVIDIA's names besides setting up containers: the commands of `nvidia-ctk` that configure engines ([`ctk`]), and
//! the runtime for engines without hooks ([`runtime`]).

#![cfg_attr(
    test,
    allow(
        clippy::disallowed_methods,
        reason = "tests open files that they created"
    )
)]

pub mod ctk;
mod edit;
pub mod runtime;

use std::path::{Path, PathBuf};

/// The program that runs, also after an update has replaced its file (proc(5)).
const THIS_PROGRAM: &str = "/proc/self/exe";

/// Returns the path of a program in the directory of this one.
fn neighbor(name: &str) -> PathBuf {
    let this = std::env::current_exe();
    this.map_or_else(
        |_| Path::new("/usr/bin").join(name),
        |this| this.with_file_name(name),
    )
}
