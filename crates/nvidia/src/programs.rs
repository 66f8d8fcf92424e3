//! The names of NVIDIA's programs that set up containers, and of MPS. Packages install this project's programs with some of these names
//! too.

use std::path::Path;

/// The hook, which sets up a container with [`CLI`]; Docker searches for this name.
pub const RUNTIME_HOOK: &str = "nvidia-container-runtime-hook";
/// The hook in versions before 1.12, and a link to it since then.
pub const TOOLKIT: &str = "nvidia-container-toolkit";
/// The program that the hook starts. LXC, Apptainer and enroot start it themselves.
pub const CLI: &str = "nvidia-container-cli";
/// The program in hook entries of CDI specs, since 1.17.
pub const CDI_HOOK: &str = "nvidia-cdi-hook";
/// The program in hook entries of older CDI specs, as `nvidia-ctk hook`.
pub const CTK: &str = "nvidia-ctk";
/// The wrapper of an OCI runtime.
pub const RUNTIME: &str = "nvidia-container-runtime";
/// The command of the hook with which [`RUNTIME`] edits config.json.
pub const EDIT_CONFIG: &str = "edit-config";
/// The daemon of the Multi-Process Service (MPS), which is also the program that sends commands to it.
pub const MPS_CONTROL: &str = "nvidia-cuda-mps-control";
/// The server of MPS, which the daemon starts.
pub const MPS_SERVER: &str = "nvidia-cuda-mps-server";
/// The suffix of a program that NVIDIA's container of the toolkit has wrapped in a script.
const WRAPPED: &str = ".real";

/// NVIDIA's programs that set up containers.
pub const ALL: [&str; 6] = [RUNTIME_HOOK, TOOLKIT, RUNTIME, CLI, CDI_HOOK, CTK];

fn name_of(program: &Path) -> &str {
    let name = program
        .file_name()
        .and_then(|name| name.to_str())
        .unwrap_or_default();
    name.strip_suffix(WRAPPED).unwrap_or(name)
}

/// Returns whether a program with this path is a hook that engines or runtime wrappers start to set up a container.
#[must_use]
pub fn is_hook(program: &Path) -> bool {
    [RUNTIME_HOOK, TOOLKIT].contains(&name_of(program))
}

/// Returns whether a program with this path is one that CDI specs name as a hook.
#[must_use]
pub fn is_cdi_hook(program: &Path) -> bool {
    [CDI_HOOK, CTK].contains(&name_of(program))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrapped_programs_have_another_name() {
        for (path, hook, cdi_hook) in [
            ("/usr/bin/nvidia-container-runtime-hook", true, false),
            (
                "/usr/local/nvidia/toolkit/nvidia-container-runtime-hook.real",
                true,
                false,
            ),
            ("/usr/bin/nvidia-container-toolkit", true, false),
            ("/usr/bin/nvidia-ctk", false, true),
            (
                "/usr/local/nvidia/toolkit/nvidia-cdi-hook.real",
                false,
                true,
            ),
            ("/usr/bin/nvidia-container-runtime", false, false),
            ("/usr/bin/oci-nvidia-hook", false, false),
            ("/", false, false),
        ] {
            assert_eq!(
                (is_hook(Path::new(path)), is_cdi_hook(Path::new(path))),
                (hook, cdi_hook),
                "{path}"
            );
        }
    }
}
