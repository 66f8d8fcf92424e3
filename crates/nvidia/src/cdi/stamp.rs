//! Stores in a spec the state of the host from which it was created, so that a spec that is out of date is detected. NVML is only called
//! if there are MIG devices.
//!
//! The stamp is an argument of a hook entry in the spec. Older engines reject annotations, and a separate file could belong to another
//! spec.

use std::fmt::Debug;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

use base::sys::build_id;
use base::tree::Tree;
use cdi_spec::spec::Spec;

use crate::capability::{Capabilities, Capability, Omit};
use crate::cdi::entry::RootfsEdits;
use crate::config::Config;
use crate::driver::access::Permissions;
use crate::driver::files::DriverFiles;
use crate::driver::ipc;
use crate::driver::locate::locate_installed;
use crate::driver::nodes::CAPS;
use crate::driver::{DriverKind, wsl};
use crate::host::{DriverParts, HostState, Roots, SpecFiles};
use crate::inventory::Inventory;

/// The state of a host, as far as a spec depends on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// The version of the loaded driver; on WSL 2, the names of its packages
    pub driver: String,
    /// The boot id: device numbers can change with each boot
    pub boot: String,
    /// A hash of the GPUs, the GPU instances, the device nodes, the sockets and the settings
    pub host: u64,
    /// A hash of the driver's files
    pub files: u64,
    /// A hash of the devices that only NVML lists: MIG devices, or the GPUs of WSL 2; `None` without such devices. The kernel does not show
    /// their UUIDs, so the value is a placeholder until [`Stamp::complete`] is called.
    pub mig: Option<u64>,
    /// The build id of the program that wrote the spec; empty if it has none, or an earlier version of this program wrote the spec
    pub build: String,
}

/// The placeholder: there are MIG devices, but NVML has not been called.
const UNASKED: u64 = 0;

impl Stamp {
    /// Returns the stamp as text, as in a spec.
    #[must_use]
    pub fn to_text(&self) -> String {
        let mig = self
            .mig
            .map(|mig| format!(",mig={mig:016x}"))
            .unwrap_or_default();
        let Self {
            driver,
            boot,
            host,
            files,
            build,
            ..
        } = self;
        format!(
            "driver={driver},boot={boot},host={host:016x},files={files:016x}{mig},build={build}"
        )
    }

    /// Parses a stamp. Returns `None` if the text is not one. Fields at the end that are unknown belong to a later version.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut fields = text.split(',').peekable();
        let mut field = |name: &str| {
            let value = fields.peek()?.strip_prefix(name)?.strip_prefix('=')?;
            fields.next();
            Some(value.to_owned())
        };
        let (driver, boot) = (field("driver")?, field("boot")?);
        let hash = |text: String| u64::from_str_radix(&text, 16).ok();
        let (host, files) = (hash(field("host")?)?, hash(field("files")?)?);
        let mig = match field("mig") {
            Some(mig) => Some(hash(mig)?),
            None => None,
        };
        let build = field("build").unwrap_or_default();
        Some(Self {
            driver,
            boot,
            host,
            files,
            mig,
            build,
        })
    }

    /// Whether a spec with the stamp `self` is what this program would write for a host with the stamp `now`. Another build may write
    /// another spec for the same host, and a program without a build id cannot tell.
    #[must_use]
    pub fn is_current(&self, now: &Self) -> bool {
        !now.build.is_empty() && self == now
    }

    /// Adds the MIG devices, or the GPUs of WSL 2, from NVML's answer. Devices that were destroyed and created again can have the same
    /// numbers in procfs, but other UUIDs or other indices (see [`crate::inventory::cache`]).
    pub fn complete(&mut self, inventory: &Inventory) {
        if self.mig.is_none() {
            return;
        }
        let mut hasher = DefaultHasher::new();
        for gpu in inventory.gpus.iter().filter(|gpu| {
            !inventory.driver_kind.is_listed_by_kernel() || !gpu.mig_devices.is_empty()
        }) {
            (gpu.index, &gpu.uuid).hash(&mut hasher);
            for mig in &gpu.mig_devices {
                (mig.index, &mig.uuid, mig.gpu_instance, mig.compute_instance).hash(&mut hasher);
            }
        }
        self.mig = Some(hasher.finish().max(UNASKED + 1));
    }

    /// Whether both stamps have MIG devices that NVML has listed, and these differ.
    #[must_use]
    pub fn has_other_mig_devices(&self, now: &Self) -> bool {
        let is_known = |stamp: &Self| stamp.mig != Some(UNASKED);
        self.mig.is_some() && is_known(self) && is_known(now) && self.mig != now.mig
    }

    /// Returns the stamp in a spec, or `None` if another program wrote the spec.
    #[must_use]
    pub fn from_spec(spec: &Spec) -> Option<Self> {
        let entries = spec
            .container_edits
            .hooks
            .iter()
            .filter_map(|hook| RootfsEdits::from_entry(&hook.args));
        Self::parse(&entries.filter_map(|entry| entry.stamp).next()?)
    }

    /// Takes the stamp of this host. Returns `None` if no driver is loaded, or the driver has no GPU. `settings` are part of the stamp.
    #[must_use]
    pub fn of_host(config: &Config, settings: &impl Debug) -> Option<Self> {
        Some(Taken::of_host(config, settings)?.stamp)
    }
}

/// A stamp that was taken, and what was examined for it.
#[derive(Debug)]
pub(super) struct Taken {
    pub(super) stamp: Stamp,
    pub(super) parts: DriverParts,
    /// The files for a spec, of which the stamp contains a hash; `None` if one that all containers require is missing
    pub(super) located: Option<SpecFiles>,
}

impl Taken {
    /// Takes the stamp of this host, see [`Stamp::of_host`].
    pub(super) fn of_host(config: &Config, settings: &impl Debug) -> Option<Self> {
        let parts = DriverParts::below(Roots::open(config).ok()?, config);
        let roots = &parts.roots;
        // A spec depends on all nodes, not only on the nodes of this state, and not on their inodes.
        let mut state = HostState::of_kernel(&roots.proc, parts.module.clone());
        let boot = state.boot.take().unwrap_or_default();
        let driver = match roots.kind {
            DriverKind::Linux if state.gpus.is_empty() => return None,
            DriverKind::Linux => state.module.take()?,
            DriverKind::Wsl => wsl::identity(&roots.driver)?,
        };
        let (files, located) = files(&parts, config, &driver);
        let settings = (config, settings);
        let host = hash(&(&state, nodes(&roots.dev), sockets(roots, config), settings));
        let is_nvml_needed = !roots.kind.is_listed_by_kernel() || !state.instances.is_empty();
        let stamp = Stamp {
            driver,
            boot,
            host,
            files,
            mig: if is_nvml_needed { Some(UNASKED) } else { None },
            build: build_id().unwrap_or_default().to_owned(),
        };
        Some(Self {
            stamp,
            parts,
            located,
        })
    }
}

/// Returns a hash of a value as text: paths and numbers, which are written in the same way by each run of this program.
fn hash(value: &impl Debug) -> u64 {
    let mut hasher = DefaultHasher::new();
    format!("{value:?}").hash(&mut hasher);
    hasher.finish()
}

/// Returns the driver's files, as a spec contains them, and their hash. They are searched for as for a container, because files can
/// be added without a trace elsewhere: packages without libraries do not run ldconfig, and not every driver root has a linker cache.
fn files(parts: &DriverParts, config: &Config, version: &str) -> (u64, Option<SpecFiles>) {
    let DriverParts {
        roots,
        linker_cache,
        ..
    } = parts;
    let found = locate_installed(
        &roots.search(linker_cache, version, config),
        config.supported_driver_capabilities,
        &config.driver_files,
    );
    match found {
        Ok((files, mut findings)) => {
            findings.extend(roots.findings());
            let located = SpecFiles {
                version: version.to_owned(),
                files,
                findings,
            };
            (hash(&Ok::<_, String>(&located.files)), Some(located))
        }
        Err(error) => {
            let error = base::report::line(&error);
            (hash(&Err::<&DriverFiles, _>(error)), None)
        }
    }
}

/// Returns the sockets of daemons. A new socket must be added to the spec, and engines fail to mount a socket that does not exist any
/// more.
fn sockets(roots: &Roots, config: &Config) -> Vec<(PathBuf, bool)> {
    let all = Capabilities::new(&Capability::ALL);
    let (sockets, _) = ipc::find(
        &roots.driver,
        all,
        config.mps_directory.as_deref(),
        Omit::default(),
    );
    sockets
        .iter()
        .map(|socket| (socket.source.as_path().to_owned(), socket.is_fixed))
        .collect()
}

/// The number and the permissions of a device node, if it can be examined.
type NodeIdentity = Option<((u32, u32), Permissions)>;

/// Returns numbers and permissions of all nodes of the driver and of its display devices.
fn nodes(dev: &Tree) -> Vec<(PathBuf, NodeIdentity)> {
    let mut nodes = Vec::new();
    for dir in ["/dev", "/dev/dri", CAPS].map(Path::new) {
        let is_one = |name: &str| {
            dir != Path::new("/dev") || name.starts_with("nvidia") || name == wsl::NODE
        };
        for name in dev
            .names(dir)
            .iter()
            .filter(|name| name.to_str().is_some_and(is_one))
        {
            let path = dir.join(name);
            let node = dev.locate(&path).ok();
            nodes.push((
                path,
                node.map(|node| (node.device, Permissions::from(&node))),
            ));
        }
    }
    nodes
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::driver::elf::tests as elf;
    use crate::driver::file_table::{
        BINARIES, DESCRIPTIONS, FIRMWARE_DIRS, LIBRARIES, LibraryKind, WINE_DIR, WINE_FILES,
        XORG_DIRS,
    };

    #[test]
    fn a_stamp_is_read_as_it_was_written() {
        let stamp = Stamp {
            driver: "535.183.01".into(),
            boot: "a-b".into(),
            host: 7,
            files: 8,
            mig: None,
            build: "ab".into(),
        };
        let text = "driver=535.183.01,boot=a-b,host=0000000000000007,files=0000000000000008";
        assert_eq!(stamp.to_text(), format!("{text},build=ab"));
        let mig = Stamp {
            mig: Some(9),
            ..stamp.clone()
        };
        let mig_text = format!("{text},mig=0000000000000009");
        assert_eq!(mig.to_text(), format!("{mig_text},build=ab"));
        for (text, stamp) in [(text.to_owned(), stamp), (mig_text, mig)] {
            let later = format!("{},later=1", stamp.to_text());
            assert_eq!(Stamp::parse(&stamp.to_text()).as_ref(), Some(&stamp));
            assert_eq!(Stamp::parse(&later).as_ref(), Some(&stamp));
            // An earlier version has no build.
            let build = String::new();
            assert_eq!(Stamp::parse(&text), Some(Stamp { build, ..stamp }));
        }
        for wrong in [
            "",
            "driver=1",
            "driver=1,boot=2,host=x,files=4",
            "driver=1,boot=2,host=3",
            "driver=1,boot=2,host=3,files=x",
            "boot=1,driver=2,host=3,files=4",
            "driver=1,boot=2,host=3,files=4,mig=x",
        ] {
            assert_eq!(Stamp::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn mig_devices_made_anew_are_others() {
        let stamp = |mig| Stamp {
            driver: "1".into(),
            boot: "b".into(),
            host: 7,
            files: 8,
            mig,
            build: "b".into(),
        };
        let inventory = crate::inventory::select::tests::inventory();
        let complete = |mig, change: fn(&mut crate::inventory::MigDevice)| {
            let (mut stamp, mut inventory) = (stamp(mig), inventory.clone());
            inventory
                .gpus
                .iter_mut()
                .flat_map(|gpu| &mut gpu.mig_devices)
                .for_each(change);
            stamp.complete(&inventory);
            stamp
        };
        let before = complete(Some(UNASKED), |_| ());
        assert_eq!(before, complete(Some(UNASKED), |_| ()));
        assert_eq!(
            complete(None, |_| ()),
            stamp(None),
            "no MIG devices in procfs"
        );
        let mut fewer = inventory.clone();
        fewer.gpus.retain(|gpu| !gpu.mig_devices.is_empty());
        assert!(fewer.gpus.len() < inventory.gpus.len());
        let mut of_fewer = stamp(Some(UNASKED));
        of_fewer.complete(&fewer);
        assert_eq!(of_fewer, before, "only the MIG devices count");
        for (now, are_others) in [
            (before.clone(), false),
            (complete(Some(UNASKED), |mig| mig.uuid.push('x')), true),
            (complete(Some(UNASKED), |mig| mig.index += 1), true),
            (stamp(None), true),
            (stamp(Some(UNASKED)), false),
        ] {
            assert_eq!(before.has_other_mig_devices(&now), are_others, "{now:?}");
        }
        assert!(
            !stamp(None).has_other_mig_devices(&before),
            "that is a change that the kernel shows"
        );
    }

    /// A driver root without a linker cache, with one GPU.
    pub(crate) fn host() -> (tempfile::TempDir, Config) {
        let dir = tempfile::tempdir().unwrap();
        let driver_root = base::paths::HostPath::new(dir.path());
        let config = Config {
            driver_root,
            library_dirs: vec!["/usr/lib/driver".into()],
            ..Config::default()
        };
        let version = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86  Release Build\n";
        write(dir.path(), "proc/driver/nvidia/version", version);
        write(
            dir.path(),
            "proc/driver/nvidia/gpus/0000:01:00.0/information",
            "IRQ: 1\nDevice Minor: 0\n",
        );
        for name in ["libcuda", "libnvidia-ml"] {
            write(
                dir.path(),
                &format!("usr/lib/driver/{name}.so.570.86"),
                elf::of_this_machine(),
            );
        }
        write(dir.path(), "dev/nvidiactl", "");
        (dir, config)
    }

    pub(crate) fn write(root: &Path, path: &str, text: impl AsRef<[u8]>) {
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    #[test]
    fn a_spec_of_another_build_is_not_current() {
        let (_dir, config) = host();
        let now = Stamp::of_host(&config, &()).unwrap();
        assert_eq!(Some(now.build.as_str()), build_id());
        assert!(now.is_current(&now));
        for build in ["", "0123456789abcdef"] {
            let build = build.to_owned();
            let other = Stamp {
                build,
                ..now.clone()
            };
            assert!(!other.is_current(&now) && !now.is_current(&other));
            assert_eq!(other.is_current(&other), !other.build.is_empty());
        }
    }

    /// udev and the driver's own program create nodes again with the same numbers.
    #[test]
    fn the_inode_of_a_node_is_not_in_the_stamp() {
        let (dir, config) = host();
        let before = Stamp::of_host(&config, &()).unwrap();
        let node = dir.path().join("dev/nvidiactl");
        // The old file keeps its inode, so that the new one gets another.
        std::fs::rename(&node, dir.path().join("old")).unwrap();
        write(dir.path(), "dev/nvidiactl", "");
        assert_eq!(Stamp::of_host(&config, &()).unwrap(), before);
    }

    #[test]
    fn the_boot_is_in_the_stamp() {
        let (_dir, config) = host();
        let stamp = Stamp::of_host(&config, &()).unwrap();
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
        assert_eq!(
            (stamp.driver.as_str(), stamp.boot.as_str(), stamp.mig),
            ("570.86", boot.trim(), None)
        );
    }

    /// No package runs ldconfig here, so that each file appears without a trace elsewhere.
    #[test]
    fn every_kind_of_file_of_a_spec_is_in_the_stamp() {
        let (dir, config) = host();
        let listed = "/opt/nvidia/extra.json";
        let config = Config {
            driver_files: vec![listed.into()],
            ..config
        };
        let libraries = LIBRARIES
            .iter()
            .filter(|row| matches!(row.kind, LibraryKind::Plain));
        let libraries = libraries.map(|row| format!("usr/lib/driver/{}.so.570.86", row.name));
        let programs = BINARIES.iter().map(|row| format!("usr/bin/{}", row.name));
        // The description of 32-bit libraries needs these.
        let descriptions = DESCRIPTIONS.iter().filter(|row| row.and.is_none());
        let descriptions = descriptions.map(|row| {
            format!(
                "{}/{}",
                row.search.first().unwrap(),
                row.path.replace("$V", "570.86")
            )
        });
        let xorg = XORG_DIRS
            .iter()
            .take(1)
            .map(|dir| format!("{dir}/nvidia_drv.so"));
        let wine = WINE_FILES
            .iter()
            .map(|name| format!("usr/lib/driver/{WINE_DIR}/{name}"));
        let firmware = FIRMWARE_DIRS
            .iter()
            .take(1)
            .map(|dir| format!("{dir}/nvidia/570.86/gsp_ga10x.bin"));
        let files = libraries
            .chain(programs)
            .chain(descriptions)
            .chain(xorg)
            .chain(wine)
            .chain(firmware);
        let mut count = 0;
        let mut before = Stamp::of_host(&config, &()).unwrap();
        for path in files.chain([listed.to_owned()]) {
            write(
                dir.path(),
                path.trim_start_matches('/'),
                elf::of_this_machine(),
            );
            let after = Stamp::of_host(&config, &()).unwrap();
            assert!(before.files != after.files, "{path}");
            (before, count) = (after, count + 1);
        }
        assert!(count > 40, "{count}");
    }

    #[test]
    fn a_stamp_changes_with_the_host() {
        let (dir, config) = host();
        let take = || Stamp::of_host(&config, &()).unwrap();
        for path in [
            // Packages without libraries do not run ldconfig.
            "usr/bin/nvidia-smi",
            "usr/share/vulkan/icd.d/nvidia_icd.json",
            "usr/share/glvnd/egl_vendor.d/10_nvidia.json",
            "lib/firmware/nvidia/570.86/gsp_ga10x.bin",
            "usr/lib/driver/libnvidia-ptxjitcompiler.so.570.86",
            "usr/lib/driver/libnvidia-new.so.570.86",
        ] {
            let before = take();
            write(dir.path(), path, elf::of_this_machine());
            let after = take();
            assert!(
                before.files != after.files && before.host == after.host,
                "{path}"
            );
        }
        for (path, text) in [
            ("dev/nvidia0", ""),
            ("dev/dri/card0", ""),
            ("dev/nvidia-caps/nvidia-cap1", ""),
            (
                "proc/driver/nvidia/gpus/0000:01:00.0/information",
                "Device Minor: 1\n",
            ),
            ("proc/driver/nvidia/gpus/0000:02:00.0/information", ""),
            (
                "proc/driver/nvidia/capabilities/gpu0/mig/gi1/ci0/access",
                "",
            ),
        ] {
            let before = take();
            write(dir.path(), path, text);
            let after = take();
            assert!(
                before.host != after.host && before.files == after.files,
                "{path}"
            );
        }
        assert_eq!(take().mig, Some(UNASKED));
        let before = take();
        for (path, text) in [
            ("usr/bin/other", ""),
            ("etc/ld.so.conf", ""),
            ("dev/other", ""),
            ("usr/lib/driver/libother.so.1", ""),
            (
                "proc/driver/nvidia/gpus/0000:01:00.0/information",
                "IRQ: 2\nDevice Minor: 1\n",
            ),
        ] {
            write(dir.path(), path, text);
            assert_eq!(take(), before, "{path}");
        }
        assert_ne!(
            Stamp::of_host(&config, &"other").unwrap().host,
            before.host,
            "the settings"
        );
        let other = Config {
            cuda_compat: !config.cuda_compat,
            ..config.clone()
        };
        assert_ne!(
            Stamp::of_host(&other, &()).unwrap().host,
            before.host,
            "config.toml"
        );
        std::fs::remove_file(dir.path().join("usr/lib/driver/libcuda.so.570.86")).unwrap();
        assert_ne!(
            take().files,
            before.files,
            "without a library that all containers need"
        );
        std::fs::remove_dir_all(dir.path().join("proc/driver/nvidia/gpus")).unwrap();
        assert_eq!(Stamp::of_host(&config, &()), None);
    }
}
