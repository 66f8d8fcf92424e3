//! Parses the entries of the lists in `[devices]` of config.toml.

use crate::decimal::parse_decimal;
use crate::device_id::DeviceId;

/// A parsed entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LimitEntry {
    /// An index, a complete UUID, a PCI bus id or a MIG device
    Id(DeviceId),
    /// A UUID with `*` or `?`
    Uuid(String),
    /// A model name with `*` or `?`
    Model(String),
}

/// Checks an entry.
///
/// # Errors
/// Describes the valid forms.
pub fn check(entry: &str) -> Result<(), String> {
    parse(entry).map(|_| ())
}

/// Parses an entry.
///
/// # Errors
/// Describes the valid forms.
pub fn parse(entry: &str) -> Result<LimitEntry, String> {
    const FORMS: &str = "an index (0), a UUID (GPU-…, or GPU-51e*), a PCI bus id (02:00.0), a MIG device (0:1), or a model \
                         name with * or ? (*H100*)";
    let has_wildcard = entry.contains(['*', '?']);
    let id = DeviceId::parse(entry);
    match &id {
        _ if entry != entry.trim() => Err(format!("{FORMS}, without blanks around it")),
        DeviceId::Uuid(uuid) if has_wildcard => Ok(LimitEntry::Uuid(uuid.clone())),
        // A shortened UUID without a star would match no GPU, so an entry of `deny` would have no effect.
        DeviceId::Uuid(uuid) if !is_whole(uuid) => {
            Err(format!("{FORMS}; a shortened UUID ends in *: {uuid}*"))
        }
        // 02:00 is ambiguous: in a request it is the MIG device 2:0, in the output of lspci it is the start of a bus id.
        DeviceId::Mig { gpu, mig } if *entry != format!("{gpu}:{mig}") => Err(format!(
            "{FORMS}; {entry} is either {gpu}:{mig} or {entry}.0"
        )),
        DeviceId::Unknown(_) if has_wildcard && entry.contains(':') => Err(format!(
            "{FORMS}; only UUIDs and model names can have wildcards"
        )),
        DeviceId::Unknown(_) if has_wildcard => Ok(LimitEntry::Model(entry.to_owned())),
        DeviceId::Unknown(_) => {
            short_bus_id(entry)
                .map(LimitEntry::Id)
                .ok_or_else(|| match is_name(entry) {
                    true => format!("{FORMS}: write \"*{entry}*\" for a model"),
                    false => FORMS.to_owned(),
                })
        }
        _ => Ok(LimitEntry::Id(id)),
    }
}

/// Whether an entry may be a model name without wildcards.
fn is_name(entry: &str) -> bool {
    entry.starts_with(|c: char| c.is_ascii_alphabetic())
        && entry
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || " -_.".contains(c))
}

/// Parses a PCI bus id with a domain, but without the function, which is always 0.
fn short_bus_id(entry: &str) -> Option<DeviceId> {
    if entry.matches(':').count() != 2 {
        return None;
    }
    match DeviceId::parse(&format!("{entry}.0")) {
        id @ DeviceId::PciBusId(_) => Some(id),
        _ => None,
    }
}

/// Whether a UUID is complete: `GPU-` or `MIG-` with 8-4-4-4-12 digits, or `MIG-GPU-<uuid>/<gi>/<ci>` of drivers before 470.
fn is_whole(uuid: &str) -> bool {
    let Some(rest) = uuid.get(4..) else {
        return false;
    };
    match rest
        .get(..4)
        .filter(|start| start.eq_ignore_ascii_case("GPU-"))
    {
        Some(_) if uuid.starts_with("MIG-") => {
            let mut parts = rest.get(4..).unwrap_or_default().split('/');
            let [gpu, instance, compute] =
                [parts.next(), parts.next(), parts.next()].map(Option::unwrap_or_default);
            is_uuid(gpu)
                && parse_decimal(instance).is_some()
                && parse_decimal(compute).is_some()
                && parts.next().is_none()
        }
        _ => is_uuid(rest),
    }
}

/// Whether the text consists of groups of 8, 4, 4, 4 and 12 hexadecimal digits.
fn is_uuid(text: &str) -> bool {
    text.split('-').map(str::len).eq([8, 4, 4, 4, 12])
        && text.bytes().all(|b| b == b'-' || b.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bus_id::BusId;

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
        assert!(
            check("H100")
                .unwrap_err()
                .ends_with("write \"*H100*\" for a model")
        );
        assert!(
            check("GPU-51e")
                .unwrap_err()
                .ends_with("ends in *: GPU-51e*")
        );
        assert!(
            check("02:00")
                .unwrap_err()
                .ends_with("02:00 is either 2:0 or 02:00.0")
        );
    }

    #[test]
    fn what_an_entry_names() {
        let uuid = "51eed001-0001-4001-8000-0000fa4e0001";
        let bus = |bus| {
            LimitEntry::Id(DeviceId::PciBusId(BusId {
                domain: 0,
                bus,
                device: 0,
            }))
        };
        for (entry, names) in [
            ("0".to_owned(), LimitEntry::Id(DeviceId::Index(0))),
            (
                "0:1".to_owned(),
                LimitEntry::Id(DeviceId::Mig { gpu: 0, mig: 1 }),
            ),
            ("02:00.0".to_owned(), bus(2)),
            ("3B:00.0".to_owned(), bus(0x3b)),
            ("0000:02:00".to_owned(), bus(2)),
            ("0000:02:00.0".to_owned(), bus(2)),
            ("00000000:02:00.0".to_owned(), bus(2)),
            (
                format!("gpu-{uuid}"),
                LimitEntry::Id(DeviceId::Uuid(format!("GPU-{uuid}"))),
            ),
            (
                format!("MIG-{uuid}"),
                LimitEntry::Id(DeviceId::Uuid(format!("MIG-{uuid}"))),
            ),
            (
                format!("MIG-GPU-{uuid}/7/0"),
                LimitEntry::Id(DeviceId::Uuid(format!("MIG-GPU-{uuid}/7/0"))),
            ),
            (
                "GPU-51e*".to_owned(),
                LimitEntry::Uuid("GPU-51e*".to_owned()),
            ),
            ("mig-*".to_owned(), LimitEntry::Uuid("MIG-*".to_owned())),
            ("*".to_owned(), LimitEntry::Model("*".to_owned())),
            ("*H100*".to_owned(), LimitEntry::Model("*H100*".to_owned())),
            (
                "NVIDIA T?000".to_owned(),
                LimitEntry::Model("NVIDIA T?000".to_owned()),
            ),
        ] {
            assert_eq!(parse(&entry), Ok(names), "{entry}");
        }
    }
}
