//! The inventory as NVML tells it. A GPU that fails is noted; the others go on.

use super::{BusId, FailedGpu, Gpu, Inventory};
use crate::nvml::api::{Api, Code, Failed};

/// More GPUs than one machine ever had; beyond it the library's count is not believed.
const MAX_GPUS: u32 = 256;

/// Asks for everything that the hook needs.
///
/// # Errors
/// If NVML cannot start or does not know its own driver.
pub fn take(api: &impl Api) -> Result<Inventory, Failed> {
    api.init()?;
    let mut inventory = Inventory {
        driver_version: api.driver_version()?,
        cuda_version: api.cuda_driver_version().map(|v| format!("{}.{}", v / 1000, v % 100 / 10)).unwrap_or_default(),
        ..Inventory::default()
    };
    for index in 0..api.device_count()?.min(MAX_GPUS) {
        match take_gpu(api, index) {
            Ok(gpu) => inventory.gpus.push(gpu),
            Err(failed) => inventory.failed.push(failed),
        }
    }
    Ok(inventory)
}

fn take_gpu(api: &impl Api, index: u32) -> Result<Gpu, FailedGpu> {
    let mut known = FailedGpu { index: Some(index), uuid: None, bus_id: None, why: String::new(), node_missing: false };
    let taken = (|| {
        let device = api.device(index)?;
        let (domain, bus, slot) = api.pci(device)?;
        let bus_id = BusId { domain, bus, device: slot };
        known.bus_id = Some(bus_id);
        let uuid = api.uuid(device)?;
        known.uuid = Some(uuid.clone());
        Ok(Gpu {
            index,
            minor: api.minor(device)?,
            uuid,
            bus_id,
            // Nothing is injected by these: a GPU that does not know its name still computes.
            model: api.name(device).unwrap_or_default(),
            compute_capability: api.compute_capability(device).map(|(a, b)| format!("{a}.{b}")).unwrap_or_default(),
            mig_enabled: match api.mig_mode(device) {
                Ok(mode) => mode == 1,
                // What a GPU or a driver without MIG answers.
                Err(Failed { code: Code::NOT_SUPPORTED | Code::FUNCTION_NOT_FOUND, .. }) => false,
                Err(failed) => return Err(failed),
            },
        })
    })();
    taken.map_err(|failed: Failed| {
        known.why = failed.to_string();
        known
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nvml::api::Device;

    /// Answers like a healthy library, but for the call and device named in `failing`.
    struct Scripted {
        count: u32,
        failing: Option<(&'static str, u32, Code)>,
    }

    impl Scripted {
        fn answer<T>(&self, call: &'static str, device: u32, value: T) -> Result<T, Failed> {
            match self.failing {
                Some((name, index, code)) if name == call && index == device => {
                    Err(Failed { call: call.into(), code, text: "GPU is lost".into() })
                }
                _ => Ok(value),
            }
        }
    }

    fn index(device: Device) -> u32 {
        u32::try_from(device.0).unwrap()
    }

    impl Api for Scripted {
        fn init(&self) -> Result<(), Failed> {
            self.answer("init", 0, ())
        }
        fn driver_version(&self) -> Result<String, Failed> {
            self.answer("version", 0, "535.183.01".into())
        }
        fn cuda_driver_version(&self) -> Result<u32, Failed> {
            self.answer("cuda", 0, 12020)
        }
        fn device_count(&self) -> Result<u32, Failed> {
            Ok(self.count)
        }
        fn device(&self, index: u32) -> Result<Device, Failed> {
            self.answer("device", index, Device(usize::try_from(index).unwrap()))
        }
        fn pci(&self, device: Device) -> Result<(u32, u32, u32), Failed> {
            self.answer("pci", index(device), (0, index(device) + 1, 0))
        }
        fn uuid(&self, device: Device) -> Result<String, Failed> {
            self.answer("uuid", index(device), format!("GPU-{}", index(device)))
        }
        fn minor(&self, device: Device) -> Result<u32, Failed> {
            self.answer("minor", index(device), index(device))
        }
        fn name(&self, device: Device) -> Result<String, Failed> {
            self.answer("name", index(device), "H100".into())
        }
        fn compute_capability(&self, device: Device) -> Result<(u32, u32), Failed> {
            self.answer("cc", index(device), (9, 0))
        }
        fn mig_mode(&self, device: Device) -> Result<u32, Failed> {
            self.answer("mig", index(device), 0)
        }
    }

    #[test]
    fn all_is_well() {
        let inventory = take(&Scripted { count: 2, failing: None }).unwrap();
        assert_eq!((inventory.driver_version.as_str(), inventory.cuda_version.as_str()), ("535.183.01", "12.2"));
        assert_eq!(inventory.gpus.len(), 2);
        assert_eq!(inventory.gpus[1].uuid, "GPU-1");
        assert_eq!(inventory.gpus[1].compute_capability, "9.0");
    }

    #[test]
    fn a_gpu_that_fails_does_not_take_the_others_along() {
        for call in ["device", "pci", "uuid", "minor", "mig"] {
            let inventory = take(&Scripted { count: 3, failing: Some((call, 1, Code(15))) }).unwrap();
            assert_eq!(inventory.gpus.iter().map(|gpu| gpu.index).collect::<Vec<_>>(), [0, 2], "{call}");
            assert_eq!(inventory.failed[0].index, Some(1));
            assert!(inventory.failed[0].why.contains("GPU is lost"));
        }
    }

    #[test]
    fn what_is_only_told_may_be_missing() {
        for call in ["name", "cc"] {
            let inventory = take(&Scripted { count: 1, failing: Some((call, 0, Code(999))) }).unwrap();
            assert_eq!(inventory.gpus.len(), 1, "{call}");
        }
        let inventory = take(&Scripted { count: 1, failing: Some(("mig", 0, Code::NOT_SUPPORTED)) }).unwrap();
        assert!(!inventory.gpus[0].mig_enabled);
    }

    #[test]
    fn a_driver_that_does_not_start_is_an_error() {
        assert!(take(&Scripted { count: 1, failing: Some(("init", 0, Code(9))) }).is_err());
    }
}
