//! System calls, paths, errors and findings for the other crates. This crate does not know containers or GPUs.
//!
//! | module | what it does |
//! |---|---|
//! | [`sys`] | system calls with safe signatures, and almost all `unsafe` code |
//! | [`paths`] | paths of the host and paths of a container, as types that do not convert |
//! | [`tree`] | a directory of the host used as `/`: no symbolic link leads out of it |
//! | [`mountinfo`] | a mount table, parsed |
//! | [`search_path`] | finds programs |
//! | [`read`] | reads input of limited size |
//! | [`report`] | errors and findings with a number and a fix |
//! | [`debug`] | the log of `--debug` |
//! | [`json`], [`nearest`] | JSON as printed, and suggestions for misspelled words |

#![cfg_attr(
    test,
    allow(
        clippy::disallowed_methods,
        reason = "tests open files that they created"
    )
)]

pub mod accounts;
pub mod debug;
pub mod go;
pub mod json;
pub mod mountinfo;
pub mod nearest;
pub mod paths;
pub mod read;
pub mod report;
pub mod search_path;
pub mod sys;
pub mod tree;
