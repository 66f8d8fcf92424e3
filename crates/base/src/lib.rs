//! What every other crate here builds on: system calls, directories that are used as `/`, paths that do not mix, bounded
//! reads, and reports (errors and findings with a number and a fix). It knows no container and asks no GPU.

pub mod json;
pub mod nearest;
pub mod paths;
pub mod read;
pub mod report;
pub mod sys;
pub mod tree;
