//! Applies the limits of `[devices]` in config.toml: which GPUs containers may have.
//!
//! A misread entry of `deny` would give a GPU to containers. Therefore an entry of an unknown form is an error, and an entry that
//! matches no GPU of the host is reported.

use base::report::Finding;
use findings::catalog;

use super::{ExcludedGpu, FailedGpu, Gpu, Inventory, MigDevice};
use crate::config::sharing::ALL;
use crate::config::{Limits, Sharing};
use crate::device_id::DeviceId;
use crate::glob;
use crate::limit_entry::{LimitEntry, parse};

/// Whether containers may have this GPU, or this MIG device of it. An entry for a GPU also applies to its MIG devices.
#[must_use]
pub fn permit(limits: &Limits, gpu: &Gpu, mig: Option<&MigDevice>) -> bool {
    let is_unknown = gpu.model.is_empty();
    let allowed = |entry: &String| matches(entry, gpu, mig);
    // If NVML does not know the model of a GPU, any pattern for models denies it.
    let denied = |entry: &String| {
        allowed(entry) || is_unknown && matches!(parse(entry), Ok(LimitEntry::Model(_)))
    };
    (limits.allow.is_empty() || limits.allow.iter().any(allowed)) && !limits.deny.iter().any(denied)
}

/// Like [`permit`], for a GPU that does not work. If its model is unknown, patterns for models in `deny` do not match, and those in `allow`
/// do, so that the broken GPU is reported.
#[must_use]
pub(crate) fn permit_failed(limits: &Limits, gpu: &FailedGpu) -> bool {
    let matches = |entry: &String| matches_failed(entry, gpu);
    let Limits { allow, deny, .. } = limits;
    let is_denied = deny.iter().any(|entry| matches(entry) == Some(true));
    let may_be_allowed = |entry: &String| matches(entry) != Some(false);
    !is_denied && (allow.is_empty() || allow.iter().any(may_be_allowed))
}

/// Whether an entry matches a failed GPU, or `None` if that is unknown.
fn matches_failed(entry: &str, gpu: &FailedGpu) -> Option<bool> {
    match parse_leniently(entry) {
        LimitEntry::Id(DeviceId::Mig { .. }) => Some(false),
        LimitEntry::Id(id) => Some(gpu.is_named(&id)),
        LimitEntry::Uuid(pattern) => gpu.uuid.as_ref().map(|uuid| is_like(&pattern, uuid)),
        LimitEntry::Model(pattern) => gpu.model.as_ref().map(|model| is_like(&pattern, model)),
    }
}

/// Returns findings about entries that match no GPU of this host: a misspelled entry of `deny` has no effect.
#[must_use]
pub fn findings(limits: &Limits, inventory: &Inventory) -> Vec<Finding> {
    let lists = [("allow", &limits.allow), ("deny", &limits.deny)];
    let mut findings = Vec::new();
    for (list, entries) in lists {
        for entry in entries {
            if !matches_any(entry, inventory) {
                findings.push(unmatched(list, "devices", entry));
            }
        }
    }
    findings
}

/// Returns findings about entries of `mps-gpus` that match no GPU of this host: a misspelled entry shares no GPU.
#[must_use]
pub fn unmatched_shared(sharing: &Sharing, inventory: &Inventory) -> Vec<Finding> {
    let mut findings = Vec::new();
    for entry in &sharing.mps_gpus {
        if entry != ALL && !matches_any(entry, inventory) {
            findings.push(unmatched("mps-gpus", "sharing", entry));
        }
    }
    findings
}

/// Whether config.toml says that MPS shares this GPU. MPS shares whole GPUs only, so a GPU in MIG mode is not shared.
#[must_use]
pub fn is_shared(sharing: &Sharing, gpu: &Gpu) -> bool {
    let mut entries = sharing.mps_gpus.iter();
    !gpu.mig_enabled && entries.any(|entry| entry == ALL || matches(entry, gpu, None))
}

fn unmatched(list: &str, table: &str, entry: &str) -> Finding {
    Finding::new(
        &catalog::LIMIT_UNMATCHED,
        format!(
            "{list} in the [{table}] table of config.toml contains {entry:?}, which matches no GPU of this host"
        ),
        "correct the entry, or remove it; \"oci-nvidia-hook info\" prints the GPUs of this host",
    )
}

fn matches_any(entry: &str, inventory: &Inventory) -> bool {
    let Inventory {
        gpus,
        failed,
        excluded,
        ..
    } = inventory;
    gpus.iter().any(|gpu| matches_part(entry, gpu))
        || failed.iter().any(|gpu| may_match_failed(entry, gpu))
        || excluded.iter().any(|gpu| may_match_excluded(entry, gpu))
}

/// Whether an entry matches a GPU or one of its MIG devices.
fn matches_part(entry: &str, gpu: &Gpu) -> bool {
    matches(entry, gpu, None)
        || gpu
            .mig_devices
            .iter()
            .any(|mig| matches(entry, gpu, Some(mig)))
}

/// Whether an entry matches a failed GPU, one of the MIG devices that it may have, or something of it that is unknown.
fn may_match_failed(entry: &str, gpu: &FailedGpu) -> bool {
    matches!(parse_leniently(entry), LimitEntry::Id(id) if gpu.is_named(&id))
        || matches_failed(entry, gpu).unwrap_or(true)
}

/// Whether an entry matches an excluded GPU, or something of it that is unknown. Its model always is.
fn may_match_excluded(entry: &str, gpu: &ExcludedGpu) -> bool {
    match parse_leniently(entry) {
        LimitEntry::Id(id) => gpu.is_named(&id),
        LimitEntry::Uuid(pattern) => gpu
            .uuid
            .as_deref()
            .is_none_or(|uuid| is_like(&pattern, uuid)),
        LimitEntry::Model(_) => true,
    }
}

fn matches(entry: &str, gpu: &Gpu, mig: Option<&MigDevice>) -> bool {
    match parse_leniently(entry) {
        LimitEntry::Id(id) => gpu.is_named(&id) || mig.is_some_and(|mig| mig.is_named(&id, gpu)),
        LimitEntry::Uuid(pattern) => {
            is_like(&pattern, &gpu.uuid)
                || mig.is_some_and(|mig| {
                    is_like(&pattern, &mig.uuid) || is_like(&pattern, &mig.old_name(gpu))
                })
        }
        LimitEntry::Model(pattern) => is_like(&pattern, &gpu.model),
    }
}

/// Parses an entry. Invalid entries do not occur here, because they are errors of config.toml.
pub(super) fn parse_leniently(entry: &str) -> LimitEntry {
    parse(entry).unwrap_or_else(|_| LimitEntry::Id(DeviceId::parse(entry)))
}

/// Whether a text matches a pattern with `*` and `?`; case is ignored.
#[must_use]
pub fn is_like(pattern: &str, text: &str) -> bool {
    glob::matches(
        pattern.to_ascii_lowercase().as_bytes(),
        text.to_ascii_lowercase().as_bytes(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bus_id::BusId;
    use crate::inventory::select::tests::inventory;

    #[test]
    fn an_excluded_gpu_can_be_meant() {
        let known = ExcludedGpu {
            bus_id: BusId::parse("0000:07:00.0").unwrap(),
            uuid: Some("GPU-7a".to_owned()),
        };
        let unknown = ExcludedGpu {
            uuid: None,
            ..known.clone()
        };
        for (entry, of_known, of_unknown) in [
            ("07:00.0", true, true),
            ("08:00.0", false, false),
            ("GPU-7a", true, false),
            ("GPU-7*", true, true),
            ("GPU-8*", false, true),
            ("*H100*", true, true),
        ] {
            assert_eq!(
                [&known, &unknown].map(|gpu| may_match_excluded(entry, gpu)),
                [of_known, of_unknown],
                "{entry}"
            );
        }
    }

    #[test]
    fn deny_is_stronger_and_a_gpu_means_its_parts() {
        let inventory = inventory();
        let permitted = |allow: &[&str], deny: &[&str]| -> Vec<u32> {
            let list = |list: &[&str]| list.iter().map(|s| (*s).to_owned()).collect();
            let limits = Limits {
                allow: list(allow),
                deny: list(deny),
                ..Limits::default()
            };
            inventory
                .gpus
                .iter()
                .filter(|gpu| permit(&limits, gpu, None))
                .map(|gpu| gpu.index)
                .collect()
        };
        assert_eq!(permitted(&[], &[]), [0, 1, 2]);
        assert_eq!(permitted(&["0", "GPU-00000002"], &[]), [0, 2]);
        assert_eq!(permitted(&["0", "gpu-*2"], &["02:00.0"]), [0, 2]);
        assert_eq!(permitted(&[], &["02:00.0", "0000:03:00"]), [0]);
        assert_eq!(permitted(&["*H100*"], &["0000:02:00.0"]), [0, 2]);
        assert_eq!(permitted(&["0"], &["*"]), Vec::<u32>::new());
        let gpu = &inventory.gpus[2];
        let deny = |pattern: &str| Limits {
            deny: vec![pattern.to_owned()],
            ..Limits::default()
        };
        assert!(!permit(&deny("2"), gpu, Some(&gpu.mig_devices[0])));
        assert!(!permit(&deny("MIG-21"), gpu, Some(&gpu.mig_devices[1])));
        assert!(permit(&deny("MIG-21"), gpu, Some(&gpu.mig_devices[0])));
    }

    #[test]
    fn limits_hold_for_gpus_that_do_not_work() {
        let gpu = |model: Option<&str>| FailedGpu {
            index: Some(1),
            uuid: Some("GPU-00000001".into()),
            bus_id: Some(crate::inventory::BusId {
                domain: 0,
                bus: 2,
                device: 0,
            }),
            model: model.map(Into::into),
            ..FailedGpu::default()
        };
        let (known, unknown) = (gpu(Some("NVIDIA H100")), gpu(None));
        for (allow, deny, of_known, of_unknown) in [
            (&[][..], &[][..], true, true),
            (&[], &["1"], false, false),
            (&[], &["gpu-00000001"], false, false),
            (&[], &["0000:02:00.0"], false, false),
            (&[], &["0", "1:0"], true, true),
            (&["0"], &[], false, false),
            (&["0", "1"], &[], true, true),
            (&[], &["*h100*"], false, true),
            (&["*A100*"], &[], false, true),
            (&["*H100*"], &[], true, true),
        ] {
            let list = |list: &[&str]| list.iter().map(|s| (*s).to_owned()).collect();
            let limits = Limits {
                allow: list(allow),
                deny: list(deny),
                ..Limits::default()
            };
            assert_eq!(permit_failed(&limits, &known), of_known, "{limits:?}");
            assert_eq!(permit_failed(&limits, &unknown), of_unknown, "{limits:?}");
        }
    }

    /// NVML does not know the name of every GPU.
    #[test]
    fn a_gpu_of_unknown_model_is_denied() {
        let mut inventory = inventory();
        inventory.gpus[0].model = String::new();
        let gpu = &inventory.gpus[0];
        let limits = |allow: &[&str], deny: &[&str]| {
            let list = |list: &[&str]| list.iter().map(|s| (*s).to_owned()).collect();
            Limits {
                allow: list(allow),
                deny: list(deny),
                ..Limits::default()
            }
        };
        for (allow, deny, permitted) in [
            (&[][..], &["*A100*"][..], false),
            (&[], &["1"], true),
            (&["*H100*"], &[], false),
            (&["*H100*", "0"], &[], true),
            (&["*"], &[], true),
        ] {
            assert_eq!(
                permit(&limits(allow, deny), gpu, None),
                permitted,
                "{allow:?} {deny:?}"
            );
        }
    }

    #[test]
    fn an_entry_that_matches_nothing_is_reported() {
        let mut inventory = inventory();
        let uuid = "GPU-51eed001-0001-4001-8000-0000fa4e0001";
        let limits = Limits {
            allow: ["0", "2:1", "*H100*", "*A100*", "GPU-9*"]
                .map(str::to_owned)
                .into(),
            deny: ["7", "02:00.0", "09:00.0", uuid, "MIG-*", "2:2"]
                .map(str::to_owned)
                .into(),
            ..Limits::default()
        };
        let found = findings(&limits, &inventory);
        let of: Vec<_> = found
            .iter()
            .map(|finding| finding.what.split('"').nth(1).unwrap())
            .collect();
        assert_eq!(
            of,
            ["*A100*", "GPU-9*", "7", "09:00.0", uuid, "2:2"],
            "{found:?}"
        );
        // One that does not answer is there.
        inventory.failed.push(FailedGpu {
            index: Some(7),
            uuid: Some(uuid.to_owned()),
            bus_id: BusId::parse("0000:09:00.0"),
            ..FailedGpu::default()
        });
        let found = findings(&limits, &inventory);
        assert_eq!(found.len(), 2, "{found:?}");
    }
}
