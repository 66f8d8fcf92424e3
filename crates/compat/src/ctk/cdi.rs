//! Translates `nvidia-ctk cdi generate` into a command line of oci-nvidia-hook.

use std::ffi::OsString;

use anyhow::Result;
use nvidia_host::cdi::extra_devices::IMEX_CLASS;
use nvidia_host::feature::Feature;

use super::args::{Format, Generate, Mode, Strategy};
use super::refusal;

/// The feature flag that has a counterpart.
const NO_GIDS: &str = "no-additional-gids-for-device-nodes";
const JETSON: &str = "the lists in CSV files are those of Jetson";

/// Returns the arguments for oci-nvidia-hook.
///
/// # Errors
/// If an option is not supported, with the reason.
pub(super) fn generate(options: &Generate) -> Result<Vec<OsString>> {
    let class = class_of(options.mode)?;
    refuse(options)?;
    let mut words: Vec<OsString> = vec!["cdi".into(), "generate".into()];
    let mut add = |option: &str, value: OsString| words.extend([option.into(), value]);
    if let Some(root) = &options.driver_root {
        add("--root", root.into());
    }
    if !options.strategies.is_empty() {
        let names: Vec<_> = options.strategies.iter().copied().map(name_of).collect();
        add("--name-strategy", names.join(",").into());
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
    let format = options.format.map(|format| {
        if format == Format::Json {
            "json"
        } else {
            "yaml"
        }
    });
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

const fn name_of(strategy: Strategy) -> &'static str {
    match strategy {
        Strategy::Index => "index",
        Strategy::Uuid => "uuid",
        Strategy::TypeIndex => "type-index",
    }
}

/// Returns the class of the mode's devices; `None` for GPUs.
fn class_of(mode: Mode) -> Result<Option<&'static str>> {
    let (name, why) = match mode {
        // The host decides which driver it has.
        Mode::Auto | Mode::Nvml | Mode::Wsl => return Ok(None),
        Mode::Gdrcopy => return Ok(Some(Feature::Gdrcopy.row().name)),
        Mode::Gds => return Ok(Some(Feature::Gds.row().name)),
        Mode::Imex => return Ok(Some(IMEX_CLASS)),
        Mode::Mofed => return Ok(Some(Feature::Mofed.row().name)),
        Mode::Nvswitch => return Ok(Some(Feature::Nvswitch.row().name)),
        Mode::Csv => ("csv", JETSON),
        Mode::Management => (
            "management",
            "a container with all devices is a privileged one",
        ),
    };
    Err(refusal(
        format!("--mode={name} is not supported: {why}"),
        "leave the option out, or give --mode=auto",
    ))
}

fn refuse(options: &Generate) -> Result<()> {
    let refused = &options.refused;
    let limits =
        "the spec has all GPUs that containers may get; limit them with [devices] in config.toml";
    let table = [
        (
            !refused.device_id.is_empty(),
            "--device-id",
            "a spec of some GPUs would be replaced at the next refresh",
            limits,
        ),
        (
            refused.no_all_device,
            "--no-all-device",
            "the device \"all\" is in every spec",
            limits,
        ),
        (
            refused.dev_root.is_some(),
            "--dev-root",
            "the hook and its commands need one value",
            "set dev-root in [driver] of config.toml",
        ),
        (
            !refused.library_search_path.is_empty(),
            "--library-search-path",
            "the hook and its commands need one value",
            "set library-dirs in [driver] of config.toml",
        ),
        (
            !refused.config_search_path.is_empty(),
            "--config-search-path",
            "the hook and its commands need one value",
            "set files in [driver] of config.toml",
        ),
        (
            refused.nvidia_cdi_hook_path.is_some(),
            "--nvidia-cdi-hook-path",
            "the hook entry starts oci-nvidia-hook, which does what all hooks of NVIDIA do",
            "leave the option out",
        ),
        (
            !refused.disable_hook.is_empty(),
            "--disable-hook",
            "the spec has one hook entry, which the container needs",
            "leave the option out; cuda-compat-mode in config.toml turns the libraries of the image off",
        ),
        (
            !refused.enable_hook.is_empty(),
            "--enable-hook",
            "all hooks are enabled",
            "leave the option out",
        ),
        (
            !refused.csv_file.is_empty(),
            "--csv.file",
            JETSON,
            "leave the option out",
        ),
        (
            !refused.csv_ignore_pattern.is_empty(),
            "--csv.ignore-pattern",
            JETSON,
            "leave the option out",
        ),
        (
            refused.csv_compat_container_root.is_some(),
            "--csv.compat-container-root",
            JETSON,
            "leave the option out",
        ),
    ];
    for (is_given, option, why, hint) in table {
        if is_given {
            return Err(refusal(format!("{option} is not supported: {why}"), hint));
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
