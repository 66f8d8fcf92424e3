//! NVIDIA's devices on the PCI bus, from sysfs. The configuration space is not read, because that would wake sleeping GPUs.

use std::path::Path;

use base::tree::Tree;

use crate::bus_id::BusId;

/// The PCI devices in sysfs.
pub const PCI_DEVICES: &str = "/sys/bus/pci/devices";

/// A device of vendor 10de.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PciDevice {
    /// `0000:3b:00.0`
    pub address: String,
    /// `0x030200`
    pub class: String,
    /// The kernel module that drives it
    pub driver: Option<String>,
}

impl PciDevice {
    /// Returns whether the device is a display controller.
    #[must_use]
    pub fn is_gpu(&self) -> bool {
        self.class.starts_with("0x03")
    }

    /// Returns whether the device is an NVSwitch, whose PCI class is "other bridge".
    #[must_use]
    pub fn is_switch(&self) -> bool {
        self.class.starts_with("0x0680")
    }
}

/// Returns the names of the nodes of a GPU in `/dev/dri`: `card1`, `renderD128`. A host without nvidia-drm has none.
#[must_use]
pub fn drm_names(root: &Tree, gpu: BusId) -> Vec<String> {
    let dir = Path::new(PCI_DEVICES).join(gpu.in_sysfs()).join("drm");
    let mut names = Vec::new();
    for name in root.names(&dir) {
        if let Ok(name) = name.into_string()
            && (name.starts_with("card") || name.starts_with("renderD"))
        {
            names.push(name);
        }
    }
    names
}

/// Returns NVIDIA's devices; `None` if the bus cannot be examined.
#[must_use]
pub fn devices(root: &Tree) -> Option<Vec<PciDevice>> {
    let dir = Path::new(PCI_DEVICES);
    root.locate(dir).ok()?;
    Some(
        root.names(dir)
            .into_iter()
            .filter_map(|name| device(root, &dir.join(name)))
            .collect(),
    )
}

/// Counts the GPUs.
#[must_use]
pub fn count_gpus(root: &Tree) -> Option<usize> {
    Some(
        devices(root)?
            .iter()
            .filter(|device| device.is_gpu())
            .count(),
    )
}

fn device(root: &Tree, dir: &Path) -> Option<PciDevice> {
    let attribute = |name: &str| Some(root.read_text(&dir.join(name)).ok()?.trim().to_owned());
    if attribute("vendor")? != "0x10de" {
        return None;
    }
    let driver = root
        .locate(&dir.join("driver"))
        .ok()
        .and_then(|driver| file_name(&driver.path));
    Some(PciDevice {
        address: file_name(dir)?,
        class: attribute("class")?,
        driver,
    })
}

fn file_name(path: &Path) -> Option<String> {
    Some(path.file_name()?.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::paths::HostPath;

    #[test]
    fn devices_in_sysfs() {
        let dir = tempfile::tempdir().unwrap();
        let device = |name: &str, vendor: &str, class: &str| {
            let device = dir.path().join("sys/bus/pci/devices").join(name);
            std::fs::create_dir_all(&device).unwrap();
            std::fs::write(device.join("vendor"), vendor).unwrap();
            std::fs::write(device.join("class"), class).unwrap();
        };
        let root = Tree::open(&HostPath::new(dir.path())).unwrap();
        assert_eq!((devices(&root), count_gpus(&root)), (None, None));
        device("0000:01:00.0", "0x10de\n", "0x030200\n");
        device("0000:01:00.1", "0x10de\n", "0x040300\n"); // its sound device
        device("0000:02:00.0", "0x1002\n", "0x030000\n");
        device("0000:03:00.0", "0x10de\n", "0x068000\n");
        std::os::unix::fs::symlink(
            "../drivers/nvidia",
            dir.path().join("sys/bus/pci/devices/0000:01:00.0/driver"),
        )
        .unwrap();
        std::fs::create_dir_all(dir.path().join("sys/bus/pci/devices/drivers/nvidia")).unwrap();
        assert_eq!(count_gpus(&root), Some(1));
        let found = devices(&root).unwrap();
        assert_eq!(found.iter().filter(|device| device.is_switch()).count(), 1);
        let gpu = found.iter().find(|device| device.is_gpu()).unwrap();
        assert_eq!(
            (gpu.address.as_str(), gpu.driver.as_deref()),
            ("0000:01:00.0", Some("nvidia"))
        );
    }
}
