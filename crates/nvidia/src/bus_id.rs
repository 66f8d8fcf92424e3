//! The PCI bus address of a GPU.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error};
use serde::ser::{Serialize, Serializer};

/// PCI domain, bus and device. The function of a GPU is always 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct BusId {
    /// 32 bits since driver 384
    pub domain: u32,
    /// 8 bits
    pub bus: u32,
    /// 5 bits
    pub device: u32,
}

impl BusId {
    /// Parses `domain:bus:device.function`, in hexadecimal, the form of the directory names in /proc/driver/nvidia/gpus.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (domain, rest) = text.split_once(':')?;
        let (bus, rest) = rest.split_once(':')?;
        let (device, function) = rest.split_once('.')?;
        let (domain, bus, device, _) = (hex(domain)?, hex(bus)?, hex(device)?, hex(function)?);
        (bus <= 0xff && device <= 0x1f).then_some(Self {
            domain,
            bus,
            device,
        })
    }

    /// Returns the form in sysfs: the domain has four digits, or more if necessary.
    #[must_use]
    pub fn in_sysfs(self) -> String {
        format!("{:04x}:{:02x}:{:02x}.0", self.domain, self.bus, self.device)
    }
}

/// Prints NVML's form, in which the domain has eight digits.
impl fmt::Display for BusId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:08x}:{:02x}:{:02x}.0",
            self.domain, self.bus, self.device
        )
    }
}

impl Serialize for BusId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for BusId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Self::parse(&text)
            .ok_or_else(|| D::Error::custom(format!("{text:?} is not a PCI bus address")))
    }
}

/// Parses a hexadecimal number: `u32::from_str_radix` would accept `+1`.
fn hex(digits: &str) -> Option<u32> {
    digits
        .bytes()
        .all(|byte| byte.is_ascii_hexdigit())
        .then(|| u32::from_str_radix(digits, 16).ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bus_ids_of_both_widths() {
        for (text, printed) in [
            ("0000:3b:00.0", Some("00000000:3b:00.0")),
            ("00010000:01:1f.0", Some("00010000:01:1f.0")),
            ("0000:100:00.0", None),
            ("+0:00:00.0", None),
            ("3b:00.0", None),
            ("", None),
        ] {
            let sysfs = BusId::parse(text).map(BusId::in_sysfs);
            assert_eq!(
                sysfs.as_deref().and_then(BusId::parse),
                BusId::parse(text),
                "{text}"
            );
            assert_eq!(
                BusId::parse(text).map(|id| id.to_string()).as_deref(),
                printed,
                "{text}"
            );
        }
    }
}
