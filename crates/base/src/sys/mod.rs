//! Safe functions for system calls. Apart from the NVML bindings of the crate `nvidia_host`, all `unsafe` code is here.
//!
//! The modules wrap the kernel and contain no policy. If `rustix` or `nix` has a safe function, callers use that.

mod answer;
pub mod bpf;
mod build_id;
pub mod child;
pub mod confine;
pub mod deadline;
pub mod file_id;
pub mod guarded;
pub mod host_process;
pub mod ids;
pub mod in_root;
pub mod landlock;
pub mod listen_fds;
pub mod live_files;
pub mod log_file;
pub mod mount;
pub mod ns;
pub mod proc_file;
pub mod process;
pub mod run_dir;
pub mod seccomp;
pub mod service;
pub mod signals;
pub mod stdio;
pub mod unix_socket;

pub use build_id::build_id;
