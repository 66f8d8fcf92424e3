//! The administrator's limits, `[devices]` of config.toml: which GPUs containers may have.
//!
//! A deny list that is misread gives a GPU away, so an entry is either of a form that is known here or an error of
//! config.toml; and an entry that matches nothing on the host is reported.

use super::{BusId, ExcludedGpu, FailedGpu, Gpu, Inventory, MigDevice};
use crate::config::Limits;
use crate::finding::{Finding, catalog};
use crate::request::DeviceId;

/// What an entry names.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Entry {
    /// An index, a whole UUID, a PCI bus id or a MIG device
    Id(DeviceId),
    /// A UUID with `*` or `?` in it
    Uuid(String),
    /// A model name with `*` or `?` in it
    Model(String),
}

/// Whether config.toml may have this entry.
///
/// # Errors
/// What it must be instead.
pub fn check(entry: &str) -> Result<(), String> {
    parse(entry).map(|_| ())
}

fn parse(entry: &str) -> Result<Entry, String> {
    const FORMS: &str = "an index (0), a UUID (GPU-…, or GPU-51e*), a PCI bus id (02:00.0), a MIG device (0:1), or a model \
                         name with * or ? (*H100*)";
    let has_wildcard = entry.contains(['*', '?']);
    let id = DeviceId::parse(entry);
    match &id {
        _ if entry != entry.trim() => Err(format!("{FORMS}, without blanks around it")),
        DeviceId::Uuid(uuid) if has_wildcard => Ok(Entry::Uuid(uuid.clone())),
        // Shortened without a star, it would match nothing, and a deny list of it would deny nothing.
        DeviceId::Uuid(uuid) if !is_whole(uuid) => Err(format!("{FORMS}; a shortened UUID ends in *: {uuid}*")),
        // 02:00 is the MIG device 2:0 in a request, and half of a bus id in the output of lspci.
        DeviceId::Mig { gpu, mig } if *entry != format!("{gpu}:{mig}") => {
            Err(format!("{FORMS}; {entry} is either {gpu}:{mig} or {entry}.0"))
        }
        DeviceId::Unknown(_) if has_wildcard && entry.contains(':') => {
            Err(format!("{FORMS}; only UUIDs and model names can have wildcards"))
        }
        DeviceId::Unknown(_) if has_wildcard => Ok(Entry::Model(entry.to_owned())),
        DeviceId::Unknown(_) => short_bus_id(entry).map(Entry::Id).ok_or_else(|| match is_name(entry) {
            true => format!("{FORMS}: write \"*{entry}*\" for a model"),
            false => FORMS.to_owned(),
        }),
        _ => Ok(Entry::Id(id)),
    }
}

/// Letters make it a name. A list of numbers with a star on each side would match nothing.
fn is_name(entry: &str) -> bool {
    entry.starts_with(|c: char| c.is_ascii_alphabetic())
        && entry.chars().all(|c| c.is_ascii_alphanumeric() || " -_.".contains(c))
}

/// `02:00.0`, as lspci prints it, and forms without the function, which is always 0.
fn short_bus_id(entry: &str) -> Option<DeviceId> {
    let with_function = if entry.contains('.') { entry.to_owned() } else { format!("{entry}.0") };
    let whole = match entry.matches(':').count() {
        // Without a function, that would be the form of a MIG device.
        1 if entry.contains('.') => format!("0000:{with_function}"),
        2 => with_function,
        _ => return None,
    };
    BusId::parse(&whole).filter(|_| whole.ends_with(".0"))?;
    Some(DeviceId::parse(&whole)).filter(|id| matches!(id, DeviceId::PciBusId { .. }))
}

/// `GPU-` and `MIG-` with 8-4-4-4-12 digits, or the form of drivers before 470, `MIG-GPU-<uuid>/<gi>/<ci>`.
fn is_whole(uuid: &str) -> bool {
    let Some(rest) = uuid.get(4..) else { return false };
    let is_digits = |text: &str| {
        let mut parts = text.split('-');
        let is = |(part, length): (&str, usize)| part.len() == length && part.bytes().all(|b| b.is_ascii_hexdigit());
        [8, 4, 4, 4, 12].into_iter().all(|length| parts.next().is_some_and(|part| is((part, length))))
            && parts.next().is_none()
    };
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    match rest.get(..4).filter(|start| start.eq_ignore_ascii_case("GPU-")) {
        Some(_) if uuid.starts_with("MIG-") => {
            let mut parts = rest.get(4..).unwrap_or_default().split('/');
            let [gpu, instance, compute] = [parts.next(), parts.next(), parts.next()].map(Option::unwrap_or_default);
            is_digits(gpu) && is_number(instance) && is_number(compute) && parts.next().is_none()
        }
        _ => is_digits(rest),
    }
}

/// Whether containers may have this GPU, or this MIG device of it. A pattern that names a GPU means its MIG devices too.
#[must_use]
pub fn permit(limits: &Limits, gpu: &Gpu, mig: Option<&MigDevice>) -> bool {
    let is_unknown = gpu.model.is_empty();
    let allowed = |entry: &String| matches(entry, gpu, mig);
    // Which models a pattern excludes cannot be decided for a GPU whose model NVML does not know: it is denied.
    let denied = |entry: &String| allowed(entry) || is_unknown && matches!(parse(entry), Ok(Entry::Model(_)));
    (limits.allow.is_empty() || limits.allow.iter().any(allowed)) && !limits.deny.iter().any(denied)
}

/// The same for a GPU that does not work. A pattern for models matches nothing where the model is unknown; an `allow` list
/// of such patterns then keeps nothing away, so that a broken GPU does not vanish without a word.
#[must_use]
pub fn permit_failed(limits: &Limits, gpu: &FailedGpu) -> bool {
    let matches = |entry: &String| matches_failed(entry, gpu);
    let is_allowed = limits.allow.is_empty() || limits.allow.iter().any(|entry| matches(entry).unwrap_or(true));
    is_allowed && !limits.deny.iter().any(|entry| matches(entry).unwrap_or(false))
}

/// `None`: what the entry compares is not known.
fn matches_failed(entry: &str, gpu: &FailedGpu) -> Option<bool> {
    match parse_leniently(entry) {
        Entry::Id(DeviceId::Mig { .. }) => Some(false),
        Entry::Id(id) => Some(gpu.is_named(&id)),
        Entry::Uuid(pattern) => gpu.uuid.as_ref().map(|uuid| is_like(&pattern, uuid)),
        Entry::Model(pattern) => gpu.model.as_ref().map(|model| is_like(&pattern, model)),
    }
}

/// Entries that match nothing on this host: a misspelt one denies nothing.
#[must_use]
pub fn findings(limits: &Limits, inventory: &Inventory) -> Vec<Finding> {
    let lists = [("allow", &limits.allow), ("deny", &limits.deny)];
    let entries = lists.into_iter().flat_map(|(list, entries)| entries.iter().map(move |entry| (list, entry)));
    let unmatched = entries.filter(|(_, entry)| !matches_any(entry, inventory));
    let finding = |(list, entry): (&str, &String)| {
        Finding::of(
            &catalog::LIMIT_UNMATCHED,
            format!("{list} in the [devices] table of config.toml has {entry:?}, which matches no GPU of this host"),
            "correct the entry, or remove it; \"oci-nvidia-hook info\" prints the GPUs of this host",
        )
    };
    unmatched.map(finding).collect()
}

fn matches_any(entry: &str, inventory: &Inventory) -> bool {
    let is_part = |gpu: &FailedGpu| matches!(parse_leniently(entry), Entry::Id(id) if gpu.is_named(&id));
    let is_failed = |gpu: &FailedGpu| is_part(gpu) || matches_failed(entry, gpu).unwrap_or(true);
    let is_any_of =
        |gpu: &Gpu| matches(entry, gpu, None) || gpu.mig_devices.iter().any(|mig| matches(entry, gpu, Some(mig)));
    let is_excluded = |gpu: &ExcludedGpu| match parse_leniently(entry) {
        Entry::Id(id) => gpu.is_named(&id),
        Entry::Uuid(pattern) => gpu.uuid.as_deref().is_none_or(|uuid| is_like(&pattern, uuid)),
        Entry::Model(_) => true,
    };
    inventory.gpus.iter().any(is_any_of)
        || inventory.failed.iter().any(is_failed)
        || inventory.excluded.iter().any(is_excluded)
}

fn matches(entry: &str, gpu: &Gpu, mig: Option<&MigDevice>) -> bool {
    match parse_leniently(entry) {
        Entry::Id(id) => gpu.is_named(&id) || mig.is_some_and(|mig| mig.is_named(&id, gpu)),
        Entry::Uuid(pattern) => {
            is_like(&pattern, &gpu.uuid)
                || mig.is_some_and(|mig| is_like(&pattern, &mig.uuid) || is_like(&pattern, &mig.old_name(gpu)))
        }
        Entry::Model(pattern) => is_like(&pattern, &gpu.model),
    }
}

/// Entries of other forms are errors of config.toml, so there are none by now.
fn parse_leniently(entry: &str) -> Entry {
    parse(entry).unwrap_or_else(|_| Entry::Id(DeviceId::parse(entry)))
}

fn is_like(pattern: &str, text: &str) -> bool {
    glob(pattern.to_ascii_lowercase().as_bytes(), text.to_ascii_lowercase().as_bytes())
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
        assert_eq!(permitted(&["0", "gpu-*2"], &["02:00.0"]), [0, 2]);
        assert_eq!(permitted(&[], &["02:00.0", "0000:03:00"]), [0]);
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

    /// Each of these denied nothing once, without a word.
    #[test]
    fn what_is_no_entry() {
        for entry in [
            "",
            " ",
            " 1",
            "1 ",
            "+1",
            "-1",
            "0x1",
            "0,1",
            "0-2",
            "H100",
            "h100",
            "NVIDIA H100",
            "GPU 1",
            "nvidia1",
            "/dev/nvidia1",
            "all",
            "none",
            "GPU-51eed001",
            "GPU-",
            "MIG-",
            "MIG-GPU-00000002/7/0",
            "0000:02:00.1",
            "02:00.1",
            "02:00",
            "3b:00",
            "1:*",
            "0000:02:*",
            "99999999999",
            "GPU-*\n",
            "0000:100:00.0",
            "0000::00.0",
        ] {
            assert!(check(entry).is_err(), "{entry:?}");
        }
        assert!(check("H100").unwrap_err().ends_with("write \"*H100*\" for a model"));
        assert!(check("GPU-51e").unwrap_err().ends_with("ends in *: GPU-51e*"));
        assert!(check("02:00").unwrap_err().ends_with("02:00 is either 2:0 or 02:00.0"));
    }

    #[test]
    fn what_an_entry_names() {
        let uuid = "51eed001-0001-4001-8000-0000fa4e0001";
        let bus = |bus| Entry::Id(DeviceId::PciBusId { domain: 0, bus, device: 0 });
        for (entry, names) in [
            ("0".to_owned(), Entry::Id(DeviceId::Index(0))),
            ("0:1".to_owned(), Entry::Id(DeviceId::Mig { gpu: 0, mig: 1 })),
            ("02:00.0".to_owned(), bus(2)),
            ("3B:00.0".to_owned(), bus(0x3b)),
            ("0000:02:00".to_owned(), bus(2)),
            ("0000:02:00.0".to_owned(), bus(2)),
            ("00000000:02:00.0".to_owned(), bus(2)),
            (format!("gpu-{uuid}"), Entry::Id(DeviceId::Uuid(format!("GPU-{uuid}")))),
            (format!("MIG-{uuid}"), Entry::Id(DeviceId::Uuid(format!("MIG-{uuid}")))),
            (format!("MIG-GPU-{uuid}/7/0"), Entry::Id(DeviceId::Uuid(format!("MIG-GPU-{uuid}/7/0")))),
            ("GPU-51e*".to_owned(), Entry::Uuid("GPU-51e*".to_owned())),
            ("mig-*".to_owned(), Entry::Uuid("MIG-*".to_owned())),
            ("*".to_owned(), Entry::Model("*".to_owned())),
            ("*H100*".to_owned(), Entry::Model("*H100*".to_owned())),
            ("NVIDIA T?000".to_owned(), Entry::Model("NVIDIA T?000".to_owned())),
        ] {
            assert_eq!(parse(&entry), Ok(names), "{entry}");
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
            Limits { allow: list(allow), deny: list(deny) }
        };
        for (allow, deny, permitted) in [
            (&[][..], &["*A100*"][..], false),
            (&[], &["1"], true),
            (&["*H100*"], &[], false),
            (&["*H100*", "0"], &[], true),
            (&["*"], &[], true),
        ] {
            assert_eq!(permit(&limits(allow, deny), gpu, None), permitted, "{allow:?} {deny:?}");
        }
    }

    #[test]
    fn an_entry_that_matches_nothing_is_reported() {
        let mut inventory = inventory();
        let uuid = "GPU-51eed001-0001-4001-8000-0000fa4e0001";
        let limits = Limits {
            allow: ["0", "2:1", "*H100*", "*A100*", "GPU-9*"].map(str::to_owned).into(),
            deny: ["7", "02:00.0", "09:00.0", uuid, "MIG-*", "2:2"].map(str::to_owned).into(),
        };
        let found = findings(&limits, &inventory);
        let of: Vec<_> = found.iter().map(|finding| finding.what.split('"').nth(1).unwrap()).collect();
        assert_eq!(of, ["*A100*", "GPU-9*", "7", "09:00.0", uuid, "2:2"], "{found:?}");
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
