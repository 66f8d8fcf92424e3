//! Translates `nvidia-ctk cdi generate` into a command line of oci-nvidia-hook.

use std::ffi::OsString;

use anyhow::Result;
use nvidia_host::cdi::extra_devices::IMEX_CLASS;
use nvidia_host::feature::Feature;

use super::args::Generate;
use super::refusal;

/// Returns the arguments for oci-nvidia-hook.
///
/// # Errors
/// If the mode has its own class.
pub(super) fn generate(options: &Generate) -> Result<Vec<OsString>> {
    let class = class_of(&options.mode);
    let mut words: Vec<OsString> = vec!["cdi".into(), "generate".into()];
    let mut add = |option: &str, value: OsString| words.extend([option.into(), value]);
    if let Some(root) = &options.driver_root {
        add("--root", root.into());
    }
    if !options.strategies.is_empty() {
        add("--name-strategy", options.strategies.join(",").into());
    }
    if let Some(vendor) = &options.vendor {
        add("--vendor", vendor.into());
    }
    match (class, &options.class) {
        (None, None) => {}
        (None, Some(class)) => add("--class", class.into()),
        (Some(class), None) => add("--class", class.into()),
        (Some(class), Some(_)) => {
            let what = format!(
                "--class is not supported with this mode: its devices always have the class {class:?}"
            );
            return Err(refusal(what, "leave --class out"));
        }
    }
    if !options.feature_flags.is_empty() {
        words.push("--no-additional-gids".into());
    }
    words.push("--output".into());
    let format = options.format.as_deref();
    match &options.output {
        Some(path) if path.as_os_str() != "-" => {
            // NVIDIA's program adds an extension too, because engines read only these files.
            let path = match path.extension() {
                Some(_) => path.clone(),
                None => path.with_extension(format.unwrap_or("yaml")),
            };
            words.push(path.into());
            words.extend(
                format
                    .into_iter()
                    .flat_map(|format| ["--format".into(), format.into()]),
            );
        }
        _ => words.extend([
            "-".into(),
            "--format".into(),
            format.unwrap_or("yaml").into(),
        ]),
    }
    Ok(words)
}

/// Returns the class of the mode's devices; `None` for GPUs.
fn class_of(mode: &str) -> Option<&'static str> {
    match mode {
        // The host decides which driver it has.
        "auto" | "nvml" | "wsl" => None,
        "imex" => Some(IMEX_CLASS),
        feature => Feature::from_name(feature).map(|feature| feature.row().name),
    }
}
