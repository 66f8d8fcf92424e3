//! Requests by device node: config.json lists nodes of GPUs in `linux.devices`, because of a device plugin or `--device`. A pod
//! cannot add them itself without `hostPath` or privilege. The runtime creates the nodes, and the hook adds the driver files
//! for these GPUs.

use std::collections::BTreeSet;
use std::path::Path;

use nvidia_host::device_id::Nodes;
use nvidia_host::driver::nodes::{CAPS, NVIDIA_MAJOR};

use crate::oci::spec_view::Device;

/// The origin of such a request, for messages.
pub(crate) const ORIGIN: &str = "a device node in config.json";
/// The largest minor number of a GPU. Larger ones are nodes of the driver itself, such as `/dev/nvidiactl`
/// (`NV_MINOR_DEVICE_NUMBER_REGULAR_MAX`).
const LAST_GPU: u32 = 247;

/// Returns the GPU nodes of config.json; `None` if there are none.
pub fn granted(devices: &[Device]) -> Option<Nodes> {
    let characters = || devices.iter().filter(|device| device.kind.as_deref() == Some("c"));
    let number = |number: Option<i64>| number.and_then(|number| u32::try_from(number).ok());
    let gpus = characters().filter(|device| number(device.major) == Some(NVIDIA_MAJOR));
    let gpus: BTreeSet<u32> = gpus.filter_map(|gpu| number(gpu.minor)).filter(|minor| *minor <= LAST_GPU).collect();
    // The major number of MIG capabilities is dynamic, so they are identified by their directory.
    let caps = characters().filter(|device| is_cap(&device.path)).filter_map(|cap| number(cap.minor)).collect();
    (!gpus.is_empty()).then_some(Nodes { gpus, caps })
}

fn is_cap(path: &Path) -> bool {
    path.parent() == Some(Path::new(CAPS))
        && path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"nvidia-cap"))
}

/// Reports whether this JSON text of `linux` can contain a GPU node: [`granted`] accepts only plain decimal numbers, so the
/// major number must occur in the text.
pub(crate) fn may_be_granted(linux: &str) -> bool {
    linux.contains("195")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(path: &str, kind: &str, major: i64, minor: i64) -> Device {
        Device { path: path.into(), kind: Some(kind.into()), major: Some(major), minor: Some(minor) }
    }

    #[test]
    fn nodes_of_gpus_count() {
        assert_eq!(NVIDIA_MAJOR, 195, "the number that the text is searched for");
        let ctl = device("/dev/nvidiactl", "c", 195, 255);
        let modeset = device("/dev/nvidia-modeset", "c", 195, 254);
        let uvm = device("/dev/nvidia-uvm", "c", 511, 0);
        assert_eq!(granted(&[ctl.clone(), modeset, uvm, device("/dev/nvidia0", "b", 195, 0)]), None);
        let mut devices = vec![ctl, device("/dev/x", "c", 195, 3), device("/dev/nvidia0", "c", 195, 0)];
        devices.push(device("/dev/nvidia-caps/nvidia-cap12", "c", 510, 12));
        devices.push(device("/dev/nvidia-caps-imex-channels/channel0", "c", 509, 0));
        devices.push(device("/dev/nvidia1", "c", 195, -1));
        let nodes = granted(&devices).unwrap();
        assert_eq!(nodes.names(), ["/dev/nvidia0", "/dev/nvidia3", "/dev/nvidia-caps/nvidia-cap12"]);
    }

    proptest::proptest! {
        /// The check of the text never misses a node that the parser finds.
        #[test]
        fn nothing_is_missed(major in "195|1950|0195|1\\.95e2|19|null|\"195\"", minor in "0|1|255|null", space in " {0,2}") {
            let text = format!("{{\"devices\":[{{\"path\":\"/dev/x\",\"type\":\"c\",\"major\":{space}{major},\"minor\":{minor}}}]}}");
            if let Ok(value) = serde_json::from_str::<serde_json::Value>(&text) {
                let devices: Vec<Device> = serde_json::from_value(value["devices"].clone()).unwrap_or_default();
                proptest::prop_assert!(may_be_granted(&text) || granted(&devices).is_none());
            }
        }
    }
}
