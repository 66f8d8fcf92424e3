//! Who else sets the driver up in a container: what is done twice is done wrong, so the second one leaves it alone.

use std::path::Path;

use crate::lower::rootfs::VERB;
use crate::oci::SpecView;

/// NVIDIA's programs that an engine or its runtime wrapper names as hooks.
const HOOKS: [&str; 2] = ["nvidia-container-runtime-hook", "nvidia-container-toolkit"];
/// Those that CDI specs of NVIDIA's programs name.
const CDI_HOOKS: [&str; 2] = ["nvidia-cdi-hook", "nvidia-ctk"];
/// Every spec for GPUs mounts one of these.
const LIBRARIES: [&str; 2] = ["libnvidia-ml.so.", "libcuda.so."];

/// What in config.json says that somebody else does; `is_us` tells whether a program of the host is this one, which
/// may be installed under NVIDIA's names as well.
pub fn set_up_by(spec: &SpecView, is_us: impl Fn(&Path) -> bool) -> Option<String> {
    let hook = spec.hooks.iter().find(|hook| {
        let own_edits = hook.args.get(1).is_some_and(|verb| verb == VERB);
        let name = hook.path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        // A spec of NVIDIA's is one, whichever program has that name here.
        let of_spec = CDI_HOOKS.contains(&name);
        if own_edits { is_us(&hook.path) } else { of_spec || HOOKS.contains(&name) && !is_us(&hook.path) }
    });
    let mount = || {
        spec.mounts.iter().find(|mount| {
            let name = mount.destination.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            LIBRARIES.iter().any(|library| name.starts_with(library))
        })
    };
    hook.map(|hook| format!("the hook {:?}", hook.path))
        .or_else(|| mount().map(|mount| format!("the mount of {:?}", mount.destination)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oci::spec_view::parse;

    #[test]
    fn config_json_tells() {
        for (more, says) in [
            (
                r#""hooks":{"prestart":[{"path":"/usr/bin/nvidia-container-runtime-hook","args":["x","prestart"]}]}"#,
                "runtime-hook",
            ),
            (r#""hooks":{"createContainer":[{"path":"/usr/bin/nvidia-cdi-hook"}]}"#, "nvidia-cdi-hook"),
            (r#""hooks":{"createContainer":[{"path":"/us/nvidia-ctk"}]}"#, "nvidia-ctk"),
            (r#""hooks":{"createContainer":[{"path":"/us","args":["oci-nvidia-hook","rootfs"]}]}"#, "the hook \"/us\""),
            (r#""hooks":{"prestart":[{"path":"/us","args":["oci-nvidia-hook","prestart"]}]}"#, ""),
            (r#""hooks":{"prestart":[{"path":"/us/nvidia-container-runtime-hook"}]}"#, ""),
            (r#""hooks":{"prestart":[{"path":"/other","args":["other","rootfs"]}]}"#, ""),
            (r#""hooks":{"prestart":[3, {"path":7}], "new":{}}"#, ""),
            (r#""mounts":[{"source":"/a","destination":"/usr/lib64/libcuda.so.535.1"}]"#, "the mount of"),
            (r#""mounts":[{"source":"/a","destination":"/usr/lib64"}]"#, ""),
        ] {
            let text = format!(r#"{{"root":{{"path":"/r"}},"process":{{}},{more}}}"#);
            let spec = parse(text.as_bytes(), Path::new("/b")).unwrap();
            let found =
                set_up_by(&spec, |path| path.starts_with("/us") && !path.starts_with("/usr")).unwrap_or_default();
            assert_eq!(found.is_empty(), says.is_empty(), "{more}: {found}");
            assert!(found.contains(says), "{more}: {found}");
        }
    }
}
