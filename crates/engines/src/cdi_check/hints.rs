//! The hints of verdicts: how a spec is written again, by the program that wrote it and with its kind.

use std::path::Path;

use cdi_spec::file::Format;
use cdi_spec::spec::Spec;
use nvidia_host::cdi::extra_devices;
use nvidia_host::cdi::of_host::GPU_CLASS;
use nvidia_host::programs;
use plugin_api::kinds::SpecVendor;

use super::{CdiVerdict, Now, denied_feature};

/// The default of `--vendor`.
const VENDOR: &str = "nvidia.com";
/// The kind of the spec that the units write
const USUAL_KIND: &str = "nvidia.com/gpu";

pub(super) const GENERATE: &str = "run \"oci-nvidia-hook cdi generate\"";

/// Returns the hint that replaces a spec of this project in its file.
pub(super) fn rewrite(spec: &Spec, verdict: &CdiVerdict, now: &Now<'_>) -> String {
    match SpecVendor::of_kind(&spec.kind) {
        Some(vendor) if verdict.ours => vendor.how_to_rewrite(now.plugins),
        _ => generate(spec, &verdict.file, now),
    }
}

/// Returns the hint that replaces a spec in its file. A new spec in /var/run/cdi would hide an old one in /etc/cdi only until the next
/// boot, so the old one is removed if units write the new one at each boot.
pub(super) fn generate(spec: &Spec, file: &str, now: &Now<'_>) -> String {
    let path = Path::new(file);
    let is_usual = spec.kind == USUAL_KIND && extra_devices::base_of(path) == path;
    if now.units_write && is_usual && path.starts_with("/etc") {
        return format!("run \"rm {file}\" and \"oci-nvidia-hook cdi refresh --create\"");
    }
    run("generate", &spec.kind, path)
}

/// Returns the hint that replaces a file of this project that engines cannot read.
pub(super) fn replace(file: &str) -> String {
    run("generate", "", Path::new(file))
}

/// Returns the hint for a spec of another program that is not the host's.
pub(super) fn of_others(file: &str) -> String {
    format!("run the program that wrote {file} again, or remove the file")
}

/// Returns the hint for a spec that includes a denied GPU or a denied feature.
pub(super) fn without_denied(spec: &Spec, verdict: &CdiVerdict, now: &Now<'_>) -> String {
    let feature = denied_feature(spec, now.limits);
    let file = Path::new(&verdict.file);
    if !verdict.ours {
        let what = if feature.is_some() { "devices" } else { "GPU" };
        return format!(
            "remove the {what} from {} with the program that wrote it, or remove the file",
            verdict.file
        );
    }
    if let Some(vendor) = SpecVendor::of_kind(&spec.kind) {
        return vendor.how_to_rewrite(now.plugins);
    }
    // "cdi refresh" removes the spec of a feature only next to the spec of the GPUs.
    if feature.is_some() && extra_devices::base_of(file) == file {
        return format!("run \"rm {}\"", verdict.file);
    }
    run("refresh", &spec.kind, file)
}

/// Returns the command of `cdi` that writes this file with this kind. The spec of a class next to the spec of the GPUs is written
/// together with it.
fn run(verb: &str, kind: &str, file: &Path) -> String {
    let base = extra_devices::base_of(file);
    let (vendor, class) = kind.split_once('/').unwrap_or((VENDOR, GPU_CLASS));
    let mut command = format!("oci-nvidia-hook cdi {verb}");
    if vendor != VENDOR {
        command += &format!(" --vendor {vendor}");
    }
    if base == file && class != GPU_CLASS {
        command += &format!(" --class {class}");
    }
    if base != nvidia_host::cdi::default_path(Format::Yaml) {
        command += &format!(" --output {}", base.display());
    }
    format!("run \"{command}\"")
}

/// Returns the hint for a missing file in the spec of another program, which this program cannot regenerate.
pub(super) fn for_others(missing: &str, file: &str) -> String {
    let missing = Path::new(missing);
    if !programs::is_cdi_hook(missing) {
        return of_others(file);
    }
    let program = missing.file_name().unwrap_or_default().display();
    format!("install oci-nvidia-hook-compat, which contains {program}, or remove {file}")
}
