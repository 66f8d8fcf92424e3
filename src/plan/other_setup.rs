//! Detects other programs that set up the driver in a container. The setup is not idempotent across programs, so the second one
//! must not run.

use std::path::Path;

use crate::oci::{SpecView, gpu_nodes};
use nvidia_host::cdi::entry::{PROGRAM, RootfsEdits, VERB};
use nvidia_host::programs::{is_cdi_hook, is_hook};

/// Every CDI spec for GPUs mounts one of these libraries and contains the control node.
const LIBRARIES: [&str; 2] = ["libnvidia-ml.so.", "libcuda.so."];

/// Another program that sets the container up, as config.json shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum OtherSetup {
    /// A hook: this program at another stage, or NVIDIA's hook
    Hook(String),
    /// Mounts of driver libraries and the control node
    Files(String),
}

/// Returns the other program, if there is one. `is_us` reports whether a path on the host is this program, which can also be
/// installed with NVIDIA's names.
pub(crate) fn set_up_by(spec: &SpecView, is_us: impl Fn(&Path) -> bool) -> Option<OtherSetup> {
    for hook in &spec.hooks {
        let verb = hook.args.get(1).map(String::as_str);
        let sets_up = if verb == Some(VERB) && !only_checks(&hook.args) {
            is_us(&hook.path)
        } else {
            // An entry of NVIDIA's CDI specs counts even if this program is installed with that name.
            is_cdi_hook(&hook.path) || is_hook(&hook.path) && !is_us(&hook.path)
        };
        if sets_up {
            return Some(OtherSetup::Hook(format!("the hook {:?}", hook.path)));
        }
    }
    mounted_files(spec).map(OtherSetup::Files)
}

/// Whether a hook entry of this program belongs to a spec without GPUs, next to which the hook can set up GPUs.
fn only_checks(args: &[String]) -> bool {
    RootfsEdits::from_entry(args).is_some_and(|edits| edits.only_checks())
}

/// Describes the hook entry or the mounts of a CDI spec for GPUs in config.json.
pub(super) fn trace_of_cdi_spec(spec: &SpecView) -> Option<String> {
    for hook in &spec.hooks {
        let is_own = match hook.args.as_slice() {
            [program, verb, ..] => program == PROGRAM && verb == VERB && !only_checks(&hook.args),
            _ => false,
        };
        if is_own || is_cdi_hook(&hook.path) {
            return Some(format!("the hook {:?}", hook.path));
        }
    }
    mounted_files(spec)
}

/// Names the mounts of driver files, if there are any: a driver library and the control node. A library alone proves nothing: users
/// mount their own for forward compatibility or monitoring. All GPU programs need the control node. A privileged container has all
/// nodes of the host, so there only a mount of the node counts.
fn mounted_files(spec: &SpecView) -> Option<String> {
    let control = gpu_nodes(spec).control()?;
    let library = spec
        .mounts
        .iter()
        .find(|mount| is_library(&mount.destination))?;
    Some(format!(
        "the mount of {:?} and {:?}",
        library.destination, control.path
    ))
}

fn is_library(path: &Path) -> bool {
    let Some(name) = path.file_name().and_then(|name| name.to_str()) else {
        return false;
    };
    LIBRARIES.iter().any(|library| name.starts_with(library))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oci::spec_view::parse;

    #[test]
    fn other_programs_in_config_json() {
        for (more, says) in [
            (
                r#""hooks":{"prestart":[{"path":"/usr/bin/nvidia-container-runtime-hook","args":["x","prestart"]}]}"#,
                "runtime-hook",
            ),
            (
                r#""hooks":{"createContainer":[{"path":"/usr/bin/nvidia-cdi-hook"}]}"#,
                "nvidia-cdi-hook",
            ),
            (
                r#""hooks":{"createContainer":[{"path":"/us/nvidia-ctk"}]}"#,
                "nvidia-ctk",
            ),
            (
                r#""hooks":{"createContainer":[{"path":"/us","args":["oci-nvidia-hook","rootfs"]}]}"#,
                "the hook \"/us\"",
            ),
            (
                r#""hooks":{"prestart":[{"path":"/us","args":["oci-nvidia-hook","prestart"]}]}"#,
                "",
            ),
            (
                r#""hooks":{"prestart":[{"path":"/us/nvidia-container-runtime-hook"}]}"#,
                "",
            ),
            (
                r#""hooks":{"prestart":[{"path":"/other","args":["other","rootfs"]}]}"#,
                "",
            ),
            (r#""hooks":{"prestart":[3, {"path":7}], "new":{}}"#, ""),
            (
                r#""mounts":[{"source":"/a","destination":"/usr/lib64/libcuda.so.535.1"}]"#,
                "",
            ),
            (
                r#""mounts":[{"source":"/a","destination":"/opt/mylibs/libcuda.so.1"}]"#,
                "",
            ),
            (
                r#""mounts":[{"source":"/a","destination":"/usr/lib64/libcuda.so.535.1"}],
                   "linux":{"devices":[{"path":"/dev/nvidiactl","type":"c","major":195,"minor":255}]}"#,
                "the mount of \"/usr/lib64/libcuda.so.535.1\" and",
            ),
            (
                r#""mounts":[{"source":"/a","destination":"/usr/lib64/libnvidia-ml.so.535.1"},
                             {"type":"bind","source":"/dev/nvidiactl","destination":"/dev/nvidiactl"}]"#,
                "the mount of",
            ),
            (
                r#""process":{"capabilities":{"bounding":["CAP_SYS_ADMIN"]}},
                   "mounts":[{"source":"/a","destination":"/usr/lib64/libcuda.so.535.1"}],
                   "linux":{"devices":[{"path":"/dev/nvidiactl","type":"c","major":195,"minor":255}]}"#,
                "",
            ),
            (
                r#""linux":{"devices":[{"path":"/dev/nvidiactl","type":"c","major":195,"minor":255}]}"#,
                "",
            ),
            (
                r#""mounts":[{"source":"/a","destination":"/usr/lib64"}]"#,
                "",
            ),
        ] {
            let process = if more.contains("process") {
                ""
            } else {
                r#""process":{},"#
            };
            let text = format!(r#"{{"root":{{"path":"/r"}},{process}{more}}}"#);
            let spec = parse(text.as_bytes(), Path::new("/b")).unwrap();
            let found = match set_up_by(&spec, |path| {
                path.starts_with("/us") && !path.starts_with("/usr")
            }) {
                Some(OtherSetup::Hook(what) | OtherSetup::Files(what)) => what,
                None => String::new(),
            };
            assert_eq!(found.is_empty(), says.is_empty(), "{more}: {found}");
            assert!(found.contains(says), "{more}: {found}");
        }
    }
}
