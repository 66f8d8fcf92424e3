//! `oci-nvidia-kubelet-plugin`: see the library's documentation.

use std::process::ExitCode;

fn main() -> ExitCode {
    kubelet_plugin::main()
}
