//! Parses `NVIDIA_VISIBLE_DEVICES`.

use std::collections::BTreeSet;
use std::fmt;

use anyhow::Result;

use base::report::failure;
use cdi_spec::name::is_nvidia;
use findings::catalog;

use crate::bus_id::BusId;
use crate::decimal::parse_decimal;
use crate::driver::node_name::NodeName;

/// The variable that names GPUs in an image or on a command line.
pub const VISIBLE_DEVICES: &str = "NVIDIA_VISIBLE_DEVICES";

/// The device nodes that a container already has, at least one of a GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Nodes {
    /// The N of each `/dev/nvidiaN`
    pub gpus: BTreeSet<u32>,
    /// The N of each `/dev/nvidia-caps/nvidia-capN`: with MIG devices, two for each
    pub caps: BTreeSet<u32>,
}

impl Nodes {
    /// Returns the paths of the nodes on a host.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        let gpus = self.gpus.iter().map(|minor| NodeName::Gpu(*minor));
        let caps = self.caps.iter().map(|minor| NodeName::Cap(*minor));
        gpus.chain(caps)
            .map(|node| format!("/dev/{node}"))
            .collect()
    }
}

/// The GPUs that a container requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VisibleDevices {
    /// `all`
    All,
    /// `none`: the driver's files, but no GPU.
    None,
    /// A list of names as they were given, each once; see [`DeviceId::parse`].
    List(Vec<String>),
    /// The GPUs of these device nodes.
    Nodes(Nodes),
}

impl VisibleDevices {
    /// Returns the names in the request, for messages and for `plan`.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        match self {
            Self::All => vec!["all".to_owned()],
            Self::None => vec!["none".to_owned()],
            Self::List(names) => names.clone(),
            Self::Nodes(nodes) => nodes.names(),
        }
    }
}

/// Returns the names of a request in words: `GPU 0,1`, `all GPUs`. Names without an index stay as they are.
#[must_use]
pub fn in_words(names: &[String]) -> String {
    match names {
        [one] if one == "all" => "all GPUs".to_owned(),
        [one] if one == "none" => "no GPU".to_owned(),
        [first, ..] if first.starts_with(|c: char| c.is_ascii_digit()) => {
            format!("GPU {}", names.join(","))
        }
        _ => names.join(","),
    }
}

/// A name in the list. Whether it matches a GPU of this host depends on the inventory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceId {
    /// NVML's index, `0`.
    Index(u32),
    /// `GPU-…` or `MIG-…`, the prefix in upper case.
    Uuid(String),
    /// `00000000:01:00.0`; the domain may have fewer digits, or be missing if it is 0.
    PciBusId(BusId),
    /// `0:1`, MIG device 1 of GPU 0.
    Mig {
        /// NVML's index of the GPU
        gpu: u32,
        /// NVML's index of the MIG device in it
        mig: u32,
    },
    /// None of these forms.
    Unknown(String),
}

/// Parses the value of the variable. Returns `None` if it requests nothing: it is empty, consists of blanks and commas, or contains `void`.
#[must_use]
pub fn parse(value: &str) -> Option<VisibleDevices> {
    let mut words: Vec<&str> = value.split(',').map(str::trim).collect();
    words.retain(|word| !word.is_empty());
    if words.is_empty() || words.contains(&"void") {
        return None;
    }
    Some(of_words(words.iter().copied().map(without_kind)))
}

/// Returns the device in the name of a CDI device of NVIDIA's GPUs, such as `nvidia.com/gpu=0`: NVIDIA's manual writes such names for its
/// runtime. Its specs and ours have the same names of devices as this variable.
fn without_kind(word: &str) -> &str {
    match word.split_once('=') {
        Some((kind, device)) if kind.ends_with("/gpu") && is_nvidia(kind) => device,
        _ => word,
    }
}

/// Returns what these names request. Of `all` and `none`, the first one decides, at any position. NVIDIA's stack accepts `ALL`, but not
/// `NONE`.
#[must_use]
pub fn of_words<'a>(mut words: impl Iterator<Item = &'a str> + Clone) -> VisibleDevices {
    let names = words.clone();
    match words.find(|word| word.eq_ignore_ascii_case("all") || *word == "none") {
        Some("none") => VisibleDevices::None,
        Some(_) => VisibleDevices::All,
        None => VisibleDevices::List(unique(names)),
    }
}

/// Removes duplicates and keeps the order. The set keeps this fast for a long list in config.json.
#[must_use]
pub fn unique<'a>(names: impl IntoIterator<Item = &'a str>) -> Vec<String> {
    let (mut seen, mut unique) = (BTreeSet::new(), Vec::new());
    for name in names {
        if seen.insert(name) {
            unique.push(name.to_owned());
        }
    }
    unique
}

impl DeviceId {
    /// Parses a name. A name of no known form is [`DeviceId::Unknown`].
    #[must_use]
    pub fn parse(word: &str) -> Self {
        if let Some(index) = parse_decimal(word) {
            return Self::Index(index);
        }
        if let Some((start, rest)) = word.split_at_checked(4) {
            for prefix in ["GPU-", "MIG-"] {
                if start.eq_ignore_ascii_case(prefix) {
                    return Self::Uuid(format!("{prefix}{rest}"));
                }
            }
        }
        // The function of a GPU is 0. lspci omits the domain if all devices of the host are in domain 0.
        if word.ends_with(".0")
            && let Some(bus_id) = BusId::parse(word).or_else(|| BusId::parse(&format!("0:{word}")))
        {
            return Self::PciBusId(bus_id);
        }
        if let Some((gpu, mig)) = word.split_once(':')
            && let (Some(gpu), Some(mig)) = (parse_decimal(gpu), parse_decimal(mig))
        {
            return Self::Mig { gpu, mig };
        }
        Self::Unknown(word.to_owned())
    }
}

/// Parses the number of an IMEX channel.
///
/// # Errors
/// If the text is not a number below the limit.
pub fn imex_channel(text: &str) -> Result<u32> {
    // The limit of libnvidia-container
    const CHANNELS: u32 = 1 << 20;
    parse_decimal(text)
        .filter(|number| *number < CHANNELS)
        .ok_or_else(|| {
            failure(
                &catalog::BAD_REQUEST,
                format!("invalid IMEX channel {text:?}"),
                format!("request numbers below {CHANNELS} with NVIDIA_IMEX_CHANNELS"),
            )
        })
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Index(index) => write!(f, "{index}"),
            Self::Uuid(uuid) => f.write_str(uuid),
            Self::PciBusId(bus_id) => bus_id.fmt(f),
            Self::Mig { gpu, mig } => write!(f, "{gpu}:{mig}"),
            Self::Unknown(word) => f.write_str(word),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn nothing_is_asked_by() {
        for value in [
            "", " ", ",", " , ", "void", "0,void", "all,void", "void,all",
        ] {
            assert_eq!(parse(value), None, "{value:?}");
        }
    }

    #[test]
    fn words_and_lists() {
        for (value, expected) in [
            ("all", VisibleDevices::All),
            ("ALL", VisibleDevices::All),
            ("0,all", VisibleDevices::All),
            ("all,none", VisibleDevices::All),
            ("none,all", VisibleDevices::None),
            ("none", VisibleDevices::None),
            ("0", VisibleDevices::List(vec!["0".into()])),
            (
                " 0 , 1,0",
                VisibleDevices::List(vec!["0".into(), "1".into()]),
            ),
            ("gpu0", VisibleDevices::List(vec!["gpu0".into()])),
            ("nvidia.com/gpu=all", VisibleDevices::All),
            ("runtime.nvidia.com/gpu=all", VisibleDevices::All),
            (
                "nvidia.com/gpu=0:1,nvidia.com/gpu=GPU-a,0:1",
                VisibleDevices::List(vec!["0:1".into(), "GPU-a".into()]),
            ),
            (
                "nvidia.com/gds=all,example.com/gpu=0",
                VisibleDevices::List(vec![
                    "nvidia.com/gds=all".into(),
                    "example.com/gpu=0".into(),
                ]),
            ),
        ] {
            assert_eq!(parse(value), Some(expected), "{value:?}");
        }
    }

    #[test]
    fn forms_of_one_id() {
        for (word, expected, printed) in [
            ("gpu-AB", DeviceId::Uuid("GPU-AB".into()), "GPU-AB"),
            ("MIG-1/2/3", DeviceId::Uuid("MIG-1/2/3".into()), "MIG-1/2/3"),
            ("0:1", DeviceId::Mig { gpu: 0, mig: 1 }, "0:1"),
            (
                "3b:00.0",
                DeviceId::PciBusId(BusId {
                    domain: 0,
                    bus: 0x3b,
                    device: 0,
                }),
                "00000000:3b:00.0",
            ),
            ("3b:00.1", DeviceId::Unknown("3b:00.1".into()), "3b:00.1"),
            ("3b:00", DeviceId::Unknown("3b:00".into()), "3b:00"),
            (
                "0000:3B:00.0",
                DeviceId::PciBusId(BusId {
                    domain: 0,
                    bus: 0x3b,
                    device: 0,
                }),
                "00000000:3b:00.0",
            ),
            (
                "10000:01:00.0",
                DeviceId::PciBusId(BusId {
                    domain: 0x10000,
                    bus: 1,
                    device: 0,
                }),
                "00010000:01:00.0",
            ),
            (
                "0000:01:00.1",
                DeviceId::Unknown("0000:01:00.1".into()),
                "0000:01:00.1",
            ),
            ("-1", DeviceId::Unknown("-1".into()), "-1"),
            ("+1", DeviceId::Unknown("+1".into()), "+1"),
            ("None", DeviceId::Unknown("None".into()), "None"),
            (
                "99999999999",
                DeviceId::Unknown("99999999999".into()),
                "99999999999",
            ),
        ] {
            let id = DeviceId::parse(word);
            assert_eq!(id, expected, "{word}");
            assert_eq!(id.to_string(), printed);
        }
    }

    proptest! {
        #[test]
        fn never_panics(value in "[ -~\\x00,\u{e9}]{0,60}") {
            if let Some(VisibleDevices::List(names)) = parse(&value) {
                prop_assert!(!names.is_empty());
                for name in names {
                    prop_assert!(!name.contains(',') && !name.is_empty());
                    DeviceId::parse(&name).to_string();
                }
            }
        }

        #[test]
        fn what_is_printed_means_the_same(word in "(GPU|MIG)-[0-9a-f/]{0,8}|[0-9]{1,3}|[0-9]:[0-9]|[0-9a-f]{4}:[0-9a-f]{2}:[01][0-9a-f]\\.0") {
            let id = DeviceId::parse(&word);
            prop_assert_eq!(DeviceId::parse(&id.to_string()), id);
        }
    }
}
