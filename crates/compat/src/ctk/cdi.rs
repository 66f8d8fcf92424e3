//! Translates `nvidia-ctk cdi generate` into a command line of oci-nvidia-hook.

use std::ffi::OsString;

use anyhow::Result;
use nvidia_host::cdi::extra_devices::IMEX_CLASS;
use nvidia_host::feature::Feature;

use super::args::{Generate, Refused};
use super::refusal;

/// The feature flag that has a counterpart.
const NO_GIDS: &str = "no-additional-gids-for-device-nodes";
const JETSON: &str = "lists in CSV files exist only for Jetson";

/// Returns the arguments for oci-nvidia-hook.
///
/// # Errors
/// If an option is not supported, with the reason.
pub(super) fn generate(options: &Generate) -> Result<Vec<OsString>> {
    let class = class_of(&options.mode)?;
    refuse(options)?;
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
fn class_of(mode: &str) -> Result<Option<&'static str>> {
    let why = match mode {
        // The host decides which driver it has.
        "auto" | "nvml" | "wsl" => return Ok(None),
        "imex" => return Ok(Some(IMEX_CLASS)),
        "csv" => JETSON,
        "management" => "a container with all devices is a privileged one",
        feature => return Ok(Feature::from_name(feature).map(|feature| feature.row().name)),
    };
    Err(refusal(
        format!("--mode={mode} is not supported: {why}"),
        "leave the option out, or give --mode=auto",
    ))
}

/// An option of NVIDIA's program that this program rejects.
struct Unsupported {
    option: &'static str,
    is_given: fn(&Refused) -> bool,
    why: &'static str,
    hint: &'static str,
}

const LIMITS: &str =
    "the spec has all GPUs that containers may get; limit them with [devices] in config.toml";
const ONE_VALUE: &str = "the hook and its commands need one value";
const LEAVE_OUT: &str = "leave the option out";

const UNSUPPORTED: [Unsupported; 11] = [
    Unsupported {
        option: "--device-id",
        is_given: |refused| !refused.device_id.is_empty(),
        why: "a spec of some GPUs would be replaced at the next refresh",
        hint: LIMITS,
    },
    Unsupported {
        option: "--no-all-device",
        is_given: |refused| refused.no_all_device,
        why: "the device \"all\" is in every spec",
        hint: LIMITS,
    },
    Unsupported {
        option: "--dev-root",
        is_given: |refused| refused.dev_root.is_some(),
        why: ONE_VALUE,
        hint: "set dev-root in [driver] of config.toml",
    },
    Unsupported {
        option: "--library-search-path",
        is_given: |refused| !refused.library_search_path.is_empty(),
        why: ONE_VALUE,
        hint: "set library-dirs in [driver] of config.toml",
    },
    Unsupported {
        option: "--config-search-path",
        is_given: |refused| !refused.config_search_path.is_empty(),
        why: ONE_VALUE,
        hint: "set files in [driver] of config.toml",
    },
    Unsupported {
        option: "--nvidia-cdi-hook-path",
        is_given: |refused| refused.nvidia_cdi_hook_path.is_some(),
        why: "the hook entry starts oci-nvidia-hook, which does what all hooks of NVIDIA do",
        hint: LEAVE_OUT,
    },
    Unsupported {
        option: "--disable-hook",
        is_given: |refused| !refused.disable_hook.is_empty(),
        why: "the spec has one hook entry, which the container needs",
        hint: "leave the option out; cuda-compat-mode in config.toml turns the libraries of the image off",
    },
    Unsupported {
        option: "--enable-hook",
        is_given: |refused| !refused.enable_hook.is_empty(),
        why: "all hooks are enabled",
        hint: LEAVE_OUT,
    },
    Unsupported {
        option: "--csv.file",
        is_given: |refused| !refused.csv_file.is_empty(),
        why: JETSON,
        hint: LEAVE_OUT,
    },
    Unsupported {
        option: "--csv.ignore-pattern",
        is_given: |refused| !refused.csv_ignore_pattern.is_empty(),
        why: JETSON,
        hint: LEAVE_OUT,
    },
    Unsupported {
        option: "--csv.compat-container-root",
        is_given: |refused| refused.csv_compat_container_root.is_some(),
        why: JETSON,
        hint: LEAVE_OUT,
    },
];

fn refuse(options: &Generate) -> Result<()> {
    for row in &UNSUPPORTED {
        if (row.is_given)(&options.refused) {
            let Unsupported {
                option, why, hint, ..
            } = row;
            return Err(refusal(format!("{option} is not supported: {why}"), *hint));
        }
    }
    match options.feature_flags.iter().find(|flag| *flag != NO_GIDS) {
        Some(flag) => Err(refusal(
            format!(
                "--feature-flag={flag} is not supported: it changes how NVIDIA's program finds files"
            ),
            format!("leave the option out; {NO_GIDS} is supported"),
        )),
        None => Ok(()),
    }
}
