//! A GPU that a container got.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A GPU or MIG device that the hook selected, or the device node of a GPU that the engine gave to the container. The field names are an
/// interface.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(default)]
pub struct RecordedDevice {
    /// NVML's index of the GPU
    #[serde(skip_serializing_if = "Option::is_none")]
    pub index: Option<u32>,
    /// NVML's index of the MIG device within the GPU
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mig_index: Option<u32>,
    /// The model of the GPU; without other fields, the name of a CDI device
    #[serde(skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// `GPU-…` or `MIG-…`
    #[serde(skip_serializing_if = "String::is_empty")]
    pub uuid: String,
    /// The path of the device node, if the engine gave it to the container
    #[serde(skip_serializing_if = "String::is_empty")]
    pub node: String,
}

impl RecordedDevice {
    /// Returns a device of which only the node is known.
    #[must_use]
    pub fn of_node(path: String) -> Self {
        Self {
            node: path,
            ..Self::default()
        }
    }

    fn uuid_or_name(&self) -> &str {
        if self.uuid.is_empty() {
            &self.name
        } else {
            &self.uuid
        }
    }

    /// Returns the UUID; without one, the path of the node or the name of a CDI device.
    #[must_use]
    pub fn id(&self) -> &str {
        if self.node.is_empty() {
            self.uuid_or_name()
        } else {
            &self.node
        }
    }

    /// Returns the index as in a request, `0` or `0:1`; without one, the name of the node, the UUID, or the name of a CDI device.
    #[must_use]
    pub fn short(&self) -> String {
        match (self.index, self.mig_index) {
            (Some(gpu), None) => gpu.to_string(),
            (Some(gpu), Some(mig)) => format!("{gpu}:{mig}"),
            (None, _) if self.node.is_empty() => self.uuid_or_name().to_owned(),
            (None, _) => self.node.trim_start_matches("/dev/").to_owned(),
        }
    }
}

/// Formats a device as `nvidia-smi -L` does.
impl fmt::Display for RecordedDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, uuid, .. } = self;
        match (self.index, self.mig_index) {
            (Some(gpu), None) => write!(f, "GPU {gpu}: {name} (UUID: {uuid})"),
            (Some(gpu), Some(mig)) => write!(f, "MIG {gpu}:{mig} of {name} (UUID: {uuid})"),
            (None, _) if self.node.is_empty() => f.write_str(self.uuid_or_name()),
            (None, _) => f.write_str(&self.node),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_of_device() {
        let gpu = RecordedDevice {
            index: Some(1),
            name: "H100".to_owned(),
            uuid: "GPU-1".to_owned(),
            ..RecordedDevice::default()
        };
        let mig = RecordedDevice {
            mig_index: Some(2),
            uuid: "MIG-1".to_owned(),
            ..gpu.clone()
        };
        let node = RecordedDevice::of_node("/dev/nvidia3".to_owned());
        let named = RecordedDevice {
            name: "nvidia.com/gpu=0".to_owned(),
            ..RecordedDevice::default()
        };
        for (device, short, text, json) in [
            (
                gpu,
                "1",
                "GPU 1: H100 (UUID: GPU-1)",
                r#"{"index":1,"name":"H100","uuid":"GPU-1"}"#,
            ),
            (
                mig,
                "1:2",
                "MIG 1:2 of H100 (UUID: MIG-1)",
                r#"{"index":1,"mig_index":2,"name":"H100","uuid":"MIG-1"}"#,
            ),
            (
                named,
                "nvidia.com/gpu=0",
                "nvidia.com/gpu=0",
                r#"{"name":"nvidia.com/gpu=0"}"#,
            ),
            (
                node,
                "nvidia3",
                "/dev/nvidia3",
                r#"{"node":"/dev/nvidia3"}"#,
            ),
        ] {
            assert_eq!(
                (device.short().as_str(), device.to_string().as_str()),
                (short, text)
            );
            assert_eq!(serde_json::to_string(&device).unwrap(), json);
            assert_eq!(
                serde_json::from_str::<RecordedDevice>(json).unwrap(),
                device
            );
        }
    }
}
