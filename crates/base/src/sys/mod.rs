//! System calls: with the NVML bindings of another crate, the only place with `unsafe`.
//!
//! Files here wrap the kernel and decide nothing. Where `rustix` or `nix` has a safe function, callers use that.

pub mod bpf;
pub mod child;
pub mod confine;
pub mod deadline;
pub mod guarded;
pub mod ids;
pub mod in_root;
pub mod landlock;
pub mod mount;
pub mod ns;
pub mod proc_file;
pub mod process;
pub mod run_dir;
