//! The GPUs on which a request depends. A start examines only these again, so a GPU that sleeps stays asleep, and the MIG devices of other
//! GPUs cost nothing.

use std::collections::BTreeSet;

use super::Inventory;
use super::select::every_device;
use crate::device_id::DeviceId;

/// The GPUs on which a request depends.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Scope {
    /// All GPUs
    #[default]
    All,
    /// The GPUs with these device minors
    Gpus(BTreeSet<u32>),
}

impl Scope {
    /// Returns the GPUs that these names refer to, also by a MIG device. All GPUs, if there are no names, or if one of them matches no
    /// device: another inventory can have it.
    #[must_use]
    pub fn of_names(names: Option<&[String]>, inventory: &Inventory) -> Self {
        let Some(names) = names else {
            return Self::All;
        };
        let mut minors = BTreeSet::new();
        for name in names {
            let id = DeviceId::parse(name);
            let Some(device) = every_device(inventory).find(|device| device.is_named(&id)) else {
                return Self::All;
            };
            minors.insert(device.gpu().minor);
        }
        Self::Gpus(minors)
    }

    /// Whether the GPU with this device minor is one of them.
    #[must_use]
    pub fn has(&self, minor: u32) -> bool {
        match self {
            Self::All => true,
            Self::Gpus(minors) => minors.contains(&minor),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inventory::select::tests::inventory;

    #[test]
    fn a_request_depends_on_the_gpus_that_it_names() {
        let inventory = inventory();
        let of = |names: &[&str]| {
            let names: Vec<_> = names.iter().map(ToString::to_string).collect();
            Scope::of_names(Some(&names), &inventory)
        };
        let gpus = |minors: &[u32]| Scope::Gpus(minors.iter().copied().collect());
        let mig = &inventory.gpus[2].mig_devices[0].uuid;
        for (names, expected) in [
            (vec!["1"], gpus(&[1])),
            (vec!["0", &inventory.gpus[1].uuid], gpus(&[0, 1])),
            (vec!["2:0"], gpus(&[2])),
            (vec![mig], gpus(&[2])),
            (vec!["1", "GPU-new"], Scope::All),
            (vec!["2:9"], Scope::All),
            (vec!["all"], Scope::All),
        ] {
            assert_eq!(of(&names), expected, "{names:?}");
        }
        assert_eq!(Scope::of_names(None, &inventory), Scope::All);
        assert!(Scope::All.has(7) && gpus(&[1]).has(1) && !gpus(&[1]).has(7));
    }
}
