//! Queries NVML for each GPU. If a GPU fails, the query continues with the next one.

use base::sys::confine::CapabilitySet;
use nvidia_host::driver::DriverKind;
use nvidia_host::inventory::nvml::{Driver, NvmlProgress};
use nvidia_host::inventory::{BusId, FailedGpu, Gpu, MigDevice};
use nvidia_host::nvml::protocol::{InventoryLine, LibraryPlace, MAX_GPUS};
use nvidia_host::nvml::{Code, Failed};

use crate::api::{Api, DeviceHandle};
use crate::lines::Lines;
use crate::load::load;

/// The limit for the MIG devices of one GPU. Current GPUs have at most 7.
const MAX_MIG: u32 = 64;

/// Writes a line for each GPU, and a last line.
pub(crate) fn answer(place: &LibraryPlace, leave_out: &[u32], lines: &mut Lines) {
    let loaded = match load(CapabilitySet::empty(), place, &[], lines) {
        Ok(loaded) => loaded,
        Err(refused) => return lines.write(&InventoryLine::Refused(refused)),
    };
    let mut report = |report| lines.write(&InventoryLine::Report(report));
    let last = match take(&loaded.library, place.kind, leave_out, &mut report) {
        Ok(()) => InventoryLine::Done,
        Err(failed) => InventoryLine::Nvml(failed),
    };
    lines.write(&last);
}

/// Queries everything that the hook needs, except for the GPUs with these indices. On WSL 2, GPUs have no device minor.
///
/// # Errors
/// If NVML cannot be initialized, or does not report the driver version and the number of GPUs.
pub(crate) fn take(
    api: &impl Api,
    kind: DriverKind,
    leave_out: &[u32],
    report: &mut dyn FnMut(NvmlProgress),
) -> Result<(), Failed> {
    api.init()?;
    let driver = Driver {
        version: api.driver_version()?,
        cuda: api
            .cuda_driver_version()
            .map(|v| format!("{}.{}", v / 1000, v % 100 / 10))
            .unwrap_or_default(),
        count: api.device_count()?.min(MAX_GPUS),
    };
    let indices = (0..driver.count).filter(|index| !leave_out.contains(index));
    report(NvmlProgress::Driver(driver.clone()));
    for index in indices {
        report(NvmlProgress::Next(index));
        report(match take_gpu(api, index, kind) {
            Ok(gpu) => NvmlProgress::Gpu(gpu),
            Err(failed) => NvmlProgress::Failed(failed),
        });
    }
    Ok(())
}

fn take_gpu(api: &impl Api, index: u32, kind: DriverKind) -> Result<Gpu, FailedGpu> {
    let mut known = FailedGpu {
        index: Some(index),
        ..FailedGpu::default()
    };
    let taken = (|| {
        let device = api.device(index)?;
        let (domain, bus, slot) = api.pci(device)?;
        let bus_id = BusId {
            domain,
            bus,
            device: slot,
        };
        known.bus_id = Some(bus_id);
        let uuid = api.uuid(device)?;
        known.uuid = Some(uuid.clone());
        let mig_enabled = match api.mig_mode(device) {
            Ok(mode) => mode == 1,
            // The answers of a GPU or a driver without MIG.
            Err(Failed {
                code: Code::NOT_SUPPORTED | Code::FUNCTION_NOT_FOUND,
                ..
            }) => false,
            Err(failed) => return Err(failed),
        };
        Ok(Gpu {
            index,
            minor: match kind {
                DriverKind::Linux => api.minor(device)?,
                DriverKind::Wsl => index,
            },
            uuid,
            bus_id,
            // Containers do not depend on these values, so errors are ignored.
            model: api.name(device).unwrap_or_default(),
            compute_capability: api
                .compute_capability(device)
                .map(|(a, b)| format!("{a}.{b}"))
                .unwrap_or_default(),
            brand: api
                .brand(device)
                .map(brand_name)
                .unwrap_or_default()
                .to_owned(),
            mig_devices: if mig_enabled {
                take_mig(api, device)?
            } else {
                Vec::new()
            },
            mig_enabled,
            unlisted_mig: Vec::new(),
        })
    })();
    taken.map_err(|failed: Failed| {
        known.why = failed.to_string();
        known
    })
}

/// Queries all possible MIG devices of a GPU, because the indices may have gaps.
fn take_mig(api: &impl Api, gpu: DeviceHandle) -> Result<Vec<MigDevice>, Failed> {
    let mut found = Vec::new();
    for index in 0..api.max_mig_device_count(gpu)?.min(MAX_MIG) {
        let device = match api.mig_device(gpu, index) {
            Ok(device) => device,
            Err(Failed {
                code: Code::NOT_FOUND,
                ..
            }) => continue,
            Err(failed) => return Err(failed),
        };
        let profile = match api.name(device) {
            Ok(name) => profile_in_name(&name),
            Err(_) => None,
        };
        let gpu_instance = api.gpu_instance(device)?;
        let compute_instance = api.compute_instance(device)?;
        found.push(MigDevice {
            index,
            uuid: api.uuid(device)?,
            profile,
            gpu_instance,
            compute_instance,
        });
    }
    Ok(found)
}

/// Returns the profile at the end of the name of a MIG device: `NVIDIA H100 80GB HBM3 MIG 1g.10gb`. With the handle of a MIG device,
/// `nvmlDeviceGetName` returns the name of its kind (nvml.h).
fn profile_in_name(name: &str) -> Option<String> {
    let (_, profile) = name.rsplit_once(" MIG ")?;
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '+' | '-');
    if profile.is_empty() || !profile.chars().all(is_plain) {
        return None;
    }
    Some(profile.to_owned())
}

/// Returns the name of an `nvmlBrandType_t`, as used in requirements.
const fn brand_name(brand: u32) -> &'static str {
    match brand {
        1 => "Quadro",
        2 => "Tesla",
        3 => "NVS",
        4 => "GRID",
        5 => "GeForce",
        6 => "TITAN",
        7 => "VApps",
        8 => "VPC",
        9 => "VCS",
        10 => "VWS",
        11 => "CloudGaming",
        12 => "QuadroRTX",
        13 => "NvidiaRTX",
        14 => "Nvidia",
        15 => "GeForceRTX",
        16 => "TitanRTX",
        _ => "Unknown",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvidia_host::inventory::Inventory;

    /// Answers like a healthy library, but for the call and device named in `failing`.
    struct Scripted {
        count: u32,
        failing: Option<(&'static str, u32, Code)>,
        mig: bool,
    }

    impl Scripted {
        fn answer<T>(&self, call: &'static str, device: u32, value: T) -> Result<T, Failed> {
            match self.failing {
                Some((name, index, code)) if name == call && index == device => Err(Failed {
                    call: call.into(),
                    code,
                    text: "GPU is lost".into(),
                }),
                _ => Ok(value),
            }
        }
    }

    fn index(device: DeviceHandle) -> u32 {
        u32::try_from(device.raw()).unwrap()
    }

    fn handle(number: u32) -> DeviceHandle {
        DeviceHandle::new(usize::try_from(number).unwrap())
    }

    /// Of all GPUs.
    fn take(api: &Scripted) -> Result<Inventory, Failed> {
        let mut inventory = Inventory::default();
        super::take(api, DriverKind::Linux, &[], &mut |report| match report {
            NvmlProgress::Driver(driver) => {
                (inventory.driver_version, inventory.cuda_version) = (driver.version, driver.cuda);
            }
            NvmlProgress::Next(_) => {}
            NvmlProgress::Gpu(gpu) => inventory.gpus.push(gpu),
            NvmlProgress::Failed(failed) => inventory.failed.push(failed),
        })?;
        Ok(inventory)
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
        fn device(&self, index: u32) -> Result<DeviceHandle, Failed> {
            self.answer("device", index, handle(index))
        }
        fn pci(&self, device: DeviceHandle) -> Result<(u32, u32, u32), Failed> {
            self.answer("pci", index(device), (0, index(device) + 1, 0))
        }
        fn uuid(&self, device: DeviceHandle) -> Result<String, Failed> {
            self.answer("uuid", index(device), format!("GPU-{}", index(device)))
        }
        fn minor(&self, device: DeviceHandle) -> Result<u32, Failed> {
            self.answer("minor", index(device), index(device))
        }
        fn name(&self, device: DeviceHandle) -> Result<String, Failed> {
            let name = match index(device) {
                0..100 => "H100",
                102 => "H100 MIG 1g.10gb+me",
                _ => "H100 MIG 1g.10gb",
            };
            self.answer("name", index(device), name.into())
        }
        fn compute_capability(&self, device: DeviceHandle) -> Result<(u32, u32), Failed> {
            self.answer("cc", index(device), (9, 0))
        }
        fn brand(&self, device: DeviceHandle) -> Result<u32, Failed> {
            self.answer("brand", index(device), 2)
        }
        fn mig_mode(&self, device: DeviceHandle) -> Result<u32, Failed> {
            self.answer("mig", index(device), u32::from(self.mig))
        }
        fn max_mig_device_count(&self, _: DeviceHandle) -> Result<u32, Failed> {
            Ok(3)
        }
        fn mig_device(&self, gpu: DeviceHandle, index: u32) -> Result<DeviceHandle, Failed> {
            // a hole in the middle
            if index == 1 {
                return Err(Failed {
                    call: String::new(),
                    code: Code::NOT_FOUND,
                    text: String::new(),
                });
            }
            Ok(handle(100 + self::index(gpu) * 10 + index))
        }
        fn gpu_instance(&self, device: DeviceHandle) -> Result<u32, Failed> {
            Ok(index(device) % 10 + 5)
        }
        fn compute_instance(&self, device: DeviceHandle) -> Result<u32, Failed> {
            self.answer("ci", index(device), 0)
        }
    }

    #[test]
    fn all_is_well() {
        let inventory = take(&Scripted {
            count: 2,
            failing: None,
            mig: false,
        })
        .unwrap();
        assert_eq!(
            (
                inventory.driver_version.as_str(),
                inventory.cuda_version.as_str()
            ),
            ("535.183.01", "12.2")
        );
        assert_eq!(inventory.gpus.len(), 2);
        assert_eq!(inventory.gpus[1].uuid, "GPU-1");
        assert_eq!(inventory.gpus[1].compute_capability, "9.0");
    }

    #[test]
    fn a_gpu_that_fails_does_not_take_the_others_along() {
        for call in ["device", "pci", "uuid", "minor", "mig"] {
            let inventory = take(&Scripted {
                count: 3,
                failing: Some((call, 1, Code(15))),
                mig: false,
            })
            .unwrap();
            assert_eq!(
                inventory
                    .gpus
                    .iter()
                    .map(|gpu| gpu.index)
                    .collect::<Vec<_>>(),
                [0, 2],
                "{call}"
            );
            assert_eq!(inventory.failed[0].index, Some(1));
            assert!(inventory.failed[0].why.contains("GPU is lost"));
        }
    }

    #[test]
    fn mig_devices_are_numbered_as_nvml_does() {
        let inventory = take(&Scripted {
            count: 1,
            failing: None,
            mig: true,
        })
        .unwrap();
        let mig: Vec<_> = inventory.gpus[0]
            .mig_devices
            .iter()
            .map(|mig| (mig.index, mig.gpu_instance, mig.profile.as_deref()))
            .collect();
        assert_eq!(mig, [(0, 5, Some("1g.10gb")), (2, 7, Some("1g.10gb+me"))]);
        assert_eq!(inventory.gpus[0].brand, "Tesla");
        let inventory = take(&Scripted {
            count: 2,
            failing: Some(("ci", 112, Code(15))),
            mig: true,
        })
        .unwrap();
        assert_eq!((inventory.gpus.len(), inventory.failed.len()), (1, 1));
    }

    #[test]
    fn what_is_only_told_may_be_missing() {
        for call in ["name", "cc", "brand"] {
            let inventory = take(&Scripted {
                count: 1,
                failing: Some((call, 0, Code(999))),
                mig: false,
            })
            .unwrap();
            assert_eq!(inventory.gpus.len(), 1, "{call}");
        }
        let inventory = take(&Scripted {
            count: 1,
            failing: Some(("mig", 0, Code::NOT_SUPPORTED)),
            mig: true,
        })
        .unwrap();
        assert!(!inventory.gpus[0].mig_enabled);
    }

    #[test]
    fn a_mig_device_without_a_name_has_no_profile() {
        let inventory = take(&Scripted {
            count: 1,
            failing: Some(("name", 102, Code(999))),
            mig: true,
        })
        .unwrap();
        let mut profiles = Vec::new();
        for mig in &inventory.gpus[0].mig_devices {
            profiles.push(mig.profile.as_deref());
        }
        assert_eq!(profiles, [Some("1g.10gb"), None]);
    }

    #[test]
    fn the_profile_is_at_the_end_of_the_name() {
        for (name, profile) in [
            ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", Some("1g.10gb")),
            ("NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb", Some("1c.3g.20gb")),
            ("NVIDIA H100 80GB HBM3 MIG 1g.10gb+me", Some("1g.10gb+me")),
            ("NVIDIA H100 80GB HBM3", None),
            ("X MIG a b", None),
            ("X MIG ", None),
        ] {
            assert_eq!(profile_in_name(name).as_deref(), profile, "{name}");
        }
    }

    #[test]
    fn each_gpu_is_announced_before_it_is_asked() {
        let mut seen = Vec::new();
        let api = Scripted {
            count: 4,
            failing: Some(("uuid", 3, Code(15))),
            mig: false,
        };
        super::take(&api, DriverKind::Linux, &[0, 2], &mut |report| {
            seen.push(match report {
                NvmlProgress::Driver(driver) => format!("{} GPUs", driver.count),
                NvmlProgress::Next(index) => format!("next {index}"),
                NvmlProgress::Gpu(gpu) => format!("GPU {}", gpu.index),
                NvmlProgress::Failed(failed) => format!("failed {:?}", failed.index),
            });
        })
        .unwrap();
        assert_eq!(
            seen,
            ["4 GPUs", "next 1", "GPU 1", "next 3", "failed Some(3)"]
        );
    }

    #[test]
    fn a_driver_that_does_not_start_is_an_error() {
        assert!(
            take(&Scripted {
                count: 1,
                failing: Some(("init", 0, Code(9))),
                mig: false
            })
            .is_err()
        );
    }
}
