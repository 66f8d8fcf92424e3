//! Options of NVIDIA's program that are refused with a reason.

use std::ffi::{OsStr, OsString};

use anyhow::Result;

use super::refusal;

const ONE_VALUE: &str =
    "the hook and its commands need one value, which [driver] in config.toml sets";
const JETSON: &str = "lists in CSV files exist only for Jetson";
const NOT_RUN: &str = "the file of the engine is changed, and no program is run";
const PACKAGED: &str = "packages install the hook files of Podman and CRI-O, and \"oci-nvidia-hook status\" shows them";

/// The words of a command, its options that are refused, and why.
const TABLE: [(&str, &[&str], &str); 11] = [
    (
        "cdi generate",
        &["--device-id", "--device-ids", "--device", "--devices"],
        "a spec of some GPUs would be replaced at the next refresh; [devices] in config.toml limits those for containers",
    ),
    (
        "cdi generate",
        &["--no-all-device"],
        "the device \"all\" is in every spec",
    ),
    (
        "cdi generate",
        &[
            "--dev-root",
            "--library-search-path",
            "--config-search-path",
        ],
        ONE_VALUE,
    ),
    (
        "cdi generate",
        &["--nvidia-cdi-hook-path", "--nvidia-ctk-path"],
        "the hook entry starts oci-nvidia-hook",
    ),
    (
        "cdi generate",
        &[
            "--disable-hook",
            "--disable-hooks",
            "--enable-hook",
            "--enable-hooks",
        ],
        "the spec has one hook entry, which the container needs",
    ),
    (
        "cdi generate",
        &[
            "--csv.file",
            "--csv.ignore-pattern",
            "--csv.compat-container-root",
        ],
        JETSON,
    ),
    (
        "runtime configure",
        &["--oci-hook-path", "--hook-file-path"],
        PACKAGED,
    ),
    (
        "runtime configure",
        &["--drop-in-config"],
        "an engine reads such a file only if its main file imports it; give the main file with --config",
    ),
    (
        "runtime configure",
        &["--nvidia-runtime-hook-path", "--executable-path"],
        NOT_RUN,
    ),
    ("system", &["--dev-root"], ONE_VALUE),
    (
        "system",
        &["--dry-run"],
        "what is missing is known after the modules are loaded",
    ),
];

/// Returns the refused options, for the comparison with those of NVIDIA's program.
#[cfg(test)]
pub(super) fn names() -> Vec<&'static str> {
    TABLE
        .iter()
        .flat_map(|(_, options, _)| *options)
        .copied()
        .collect()
}

/// # Errors
/// If the command line has such an option.
pub(super) fn check(args: &[OsString]) -> Result<()> {
    let words: Vec<&str> = args.iter().filter_map(|word| OsStr::to_str(word)).collect();
    let mut command = words.clone();
    command.retain(|word| !word.starts_with('-'));
    let command = command.join(" ");
    for (of, options, why) in TABLE {
        for word in &words {
            let option = word.split('=').next().unwrap_or_default();
            if command.starts_with(of) && options.contains(&option) {
                return Err(refusal(
                    format!("{option} is not supported: {why}"),
                    "leave the option out",
                ));
            }
        }
    }
    Ok(())
}
