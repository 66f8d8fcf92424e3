//! The administrator's limits, `[devices]` of config.toml: which GPUs containers may have.

use super::{FailedGpu, Gpu, MigDevice};
use crate::config::Limits;
use crate::request::DeviceId;

/// Whether containers may have this GPU, or this MIG device of it. A pattern that names a GPU means its MIG devices too.
#[must_use]
pub fn permit(limits: &Limits, gpu: &Gpu, mig: Option<&MigDevice>) -> bool {
    let named = |patterns: &[String]| patterns.iter().any(|pattern| matches(pattern, gpu, mig));
    (limits.allow.is_empty() || named(&limits.allow)) && !named(&limits.deny)
}

/// The same for a GPU that does not work. A pattern for models matches nothing where the model is unknown; an `allow` list
/// of such patterns then keeps nothing away, so that a broken GPU does not vanish without a word.
#[must_use]
pub fn permit_failed(limits: &Limits, gpu: &FailedGpu) -> bool {
    let matches = |pattern: &String| match DeviceId::parse(pattern) {
        DeviceId::Unknown(pattern) => gpu.model.as_deref().map(|model| is_model(&pattern, model)),
        DeviceId::Mig { .. } => Some(false),
        id => Some(gpu.is_named(&id)),
    };
    let is_allowed = limits.allow.is_empty() || limits.allow.iter().any(|pattern| matches(pattern).unwrap_or(true));
    is_allowed && !limits.deny.iter().any(|pattern| matches(pattern).unwrap_or(false))
}

/// An index, a UUID or a PCI bus id, as in `NVIDIA_VISIBLE_DEVICES`; anything else is a pattern for the model.
fn matches(pattern: &str, gpu: &Gpu, mig: Option<&MigDevice>) -> bool {
    match DeviceId::parse(pattern) {
        DeviceId::Unknown(pattern) => is_model(&pattern, &gpu.model),
        id => gpu.is_named(&id) || mig.is_some_and(|mig| mig.is_named(&id, gpu)),
    }
}

fn is_model(pattern: &str, model: &str) -> bool {
    glob(pattern.to_ascii_lowercase().as_bytes(), model.to_ascii_lowercase().as_bytes())
}

/// `*` is any text, `?` any byte. Linear in the text for each `*`, so no pattern is slow.
fn glob(pattern: &[u8], text: &[u8]) -> bool {
    let (mut p, mut t) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while t < text.len() {
        match pattern.get(p) {
            Some(b'*') => {
                star = Some((p, t));
                p += 1;
            }
            Some(c) if *c == b'?' || Some(c) == text.get(t) => {
                p += 1;
                t += 1;
            }
            _ => {
                // Let the last star take one byte more.
                let Some((at, taken)) = star else { return false };
                star = Some((at, taken + 1));
                p = at + 1;
                t = taken + 1;
            }
        }
    }
    pattern.get(p..).unwrap_or_default().iter().all(|c| *c == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inventory::select::tests::inventory;

    #[test]
    fn globs() {
        for (pattern, text, is) in [
            ("nvidia h100*", "nvidia h100 80gb hbm3", true),
            ("*h100*", "nvidia h100 80gb hbm3", true),
            ("*a100*", "nvidia h100 80gb hbm3", false),
            ("h?00", "h100", true),
            ("h?00", "h1000", false),
            ("*", "", true),
            ("", "", true),
            ("a*b*c", "axxbxxbxc", true),
            ("a*b*c", "axxbxx", false),
        ] {
            assert_eq!(glob(pattern.as_bytes(), text.as_bytes()), is, "{pattern} {text}");
        }
    }

    #[test]
    fn deny_is_stronger_and_a_gpu_means_its_parts() {
        let inventory = inventory();
        let permitted = |allow: &[&str], deny: &[&str]| -> Vec<u32> {
            let list = |list: &[&str]| list.iter().map(|s| (*s).to_owned()).collect();
            let limits = Limits { allow: list(allow), deny: list(deny) };
            inventory.gpus.iter().filter(|gpu| permit(&limits, gpu, None)).map(|gpu| gpu.index).collect()
        };
        assert_eq!(permitted(&[], &[]), [0, 1, 2]);
        assert_eq!(permitted(&["0", "GPU-00000002"], &[]), [0, 2]);
        assert_eq!(permitted(&["*H100*"], &["0000:02:00.0"]), [0, 2]);
        assert_eq!(permitted(&["0"], &["*"]), Vec::<u32>::new());
        let gpu = &inventory.gpus[2];
        let deny = |pattern: &str| Limits { allow: vec![], deny: vec![pattern.to_owned()] };
        assert!(!permit(&deny("2"), gpu, Some(&gpu.mig_devices[0])));
        assert!(!permit(&deny("MIG-21"), gpu, Some(&gpu.mig_devices[1])));
        assert!(permit(&deny("MIG-21"), gpu, Some(&gpu.mig_devices[0])));
    }

    #[test]
    fn limits_hold_for_gpus_that_do_not_work() {
        let gpu = |model: Option<&str>| FailedGpu {
            index: Some(1),
            uuid: Some("GPU-00000001".into()),
            bus_id: Some(crate::inventory::BusId { domain: 0, bus: 2, device: 0 }),
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
            let limits = Limits { allow: list(allow), deny: list(deny) };
            assert_eq!(permit_failed(&limits, &known), of_known, "{limits:?}");
            assert_eq!(permit_failed(&limits, &unknown), of_unknown, "{limits:?}");
        }
    }
}
