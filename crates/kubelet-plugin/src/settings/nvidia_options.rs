//! The table of the options of NVIDIA's device plugin 0.20, with their variables and keys.

use std::path::{Path, PathBuf};

use base::paths::HostPath;
use base::report::Finding;
use clap::Arg;

use super::problems::no_effect;
use super::table::{self, OFF};
use super::values::{Settings, absolute};

/// Sets an option. The error describes the allowed values.
type Setter = fn(&mut Settings, &str) -> Result<(), String>;

/// What an option does here.
#[derive(Clone, Copy, Debug)]
pub(super) enum Effect {
    /// The same as the setting with this name
    Setting(&'static str),
    /// Changes what is not in the table of settings
    Sets(Setter),
    /// Nothing is to be done: this program does it in any case, or another option decides
    Nothing,
    /// It is not supported, except for values that ask for nothing.
    Other { harmless: &'static [&'static str], why: &'static str },
}

/// An option of NVIDIA's plugin.
#[derive(Clone, Copy, Debug)]
pub(super) struct NvidiaOption {
    /// The names on the command line; empty if there is only a variable
    pub(super) names: &'static [&'static str],
    /// The environment variable
    pub(super) variable: &'static str,
    /// The key below `flags` in the configuration file; empty if the option has no key
    pub(super) key: &'static str,
    /// Whether the value can be omitted on the command line
    pub(super) is_switch: bool,
    pub(super) effect: Effect,
}

impl NvidiaOption {
    pub(super) fn name(&self) -> &'static str {
        self.names.first().copied().unwrap_or_default()
    }

    /// Whether it is an option of NVIDIA's plugin only.
    pub(super) fn is_foreign_flag(&self) -> bool {
        !self.names.is_empty() && table::find(self.name()).is_none()
    }

    /// Returns the option of the command line, which the help text does not list.
    pub(super) fn flag(&self) -> Arg {
        let (name, aliases) = self.names.split_first().unwrap_or((&"", &[]));
        let arg = Arg::new(*name).long(*name).aliases(aliases).hide(true);
        match self.is_switch {
            true => arg.num_args(0..=1).require_equals(true).default_missing_value("true"),
            false => arg,
        }
    }

    /// Applies a value. `place` names the option in a finding.
    ///
    /// # Errors
    /// The allowed values.
    pub(super) fn set(&self, settings: &mut Settings, place: &str, value: &str) -> Result<Option<Finding>, String> {
        match self.effect {
            Setting(name) => match table::find(name) {
                Some(setting) => setting.set_texts(&mut settings.plugin, &[value]).map(|()| None),
                None => Ok(None),
            },
            Sets(set) => set(settings, value).map(|()| None),
            Other { harmless, .. } if harmless.contains(&value) => Ok(None),
            Other { why, .. } => Ok(Some(no_effect(place, why))),
            Nothing => Ok(None),
        }
    }
}

use Effect::{Nothing, Other, Sets, Setting};

const fn option(
    names: &'static [&'static str],
    variable: &'static str,
    key: &'static str,
    effect: Effect,
) -> NvidiaOption {
    NvidiaOption { names, variable, key, is_switch: false, effect }
}

const fn switch(
    names: &'static [&'static str],
    variable: &'static str,
    key: &'static str,
    effect: Effect,
) -> NvidiaOption {
    NvidiaOption { names, variable, key, is_switch: true, effect }
}

const OWN_SPEC: &str = "the plugin writes the CDI spec with hooks of its own";
const NO_EXTRAS: &str = "the image requests it with variables of its own";
const XIDS: &str = "ignored-xids lists the XIDs that do not affect the health";
const IMEX: &str = "IMEX channels are requested with NVIDIA_IMEX_CHANNELS";

/// The option for the configuration file.
pub(super) const CONFIG_FILE: NvidiaOption = option(&["config-file"], "CONFIG_FILE", "", Nothing);

/// All options.
pub(super) static OPTIONS: [NvidiaOption; 25] = [
    CONFIG_FILE,
    option(&["mig-strategy"], "MIG_STRATEGY", "migStrategy", Setting("mig-strategy")),
    option(&["device-list-strategy"], "DEVICE_LIST_STRATEGY", "plugin.deviceListStrategy", {
        Setting("device-list-strategy")
    }),
    option(&["device-id-strategy"], "DEVICE_ID_STRATEGY", "plugin.deviceIDStrategy", Setting("device-id-strategy")),
    switch(&["pass-device-specs"], "PASS_DEVICE_SPECS", "plugin.passDeviceSpecs", Setting("pass-device-specs")),
    option(&["nvidia-driver-root", "driver-root"], "NVIDIA_DRIVER_ROOT", "nvidiaDriverRoot", {
        Sets(|settings, value| absolute(value).map(|path| settings.common.driver_root = HostPath::new(path)))
    }),
    option(&["nvidia-dev-root", "dev-root"], "NVIDIA_DEV_ROOT", "nvidiaDevRoot", {
        Sets(|settings, value| absolute(value).map(|path| settings.common.dev_root = Some(HostPath::new(path))))
    }),
    option(
        &["shared-devices-allocation-policy"],
        "SHARED_DEVICES_ALLOCATION_POLICY",
        "sharedDevicesAllocationPolicy",
        Setting("allocation"),
    ),
    option(&["kubelet-socket"], "KUBELET_SOCKET", "plugin.kubeletSocket", Sets(kubelet_socket)),
    switch(&["fail-on-init-error"], "FAIL_ON_INIT_ERROR", "failOnInitError", Nothing),
    // MPS itself is a section of the configuration file.
    option(&["mps-root"], "MPS_ROOT", "mpsRoot", Nothing),
    switch(&["use-node-feature-api"], "USE_NODE_FEATURE_API", "useNodeFeatureAPI", Nothing),
    option(&["device-discovery-strategy"], "DEVICE_DISCOVERY_STRATEGY", "deviceDiscoveryStrategy", {
        Other { harmless: &["auto", "nvml"], why: "devices are always discovered with NVML" }
    }),
    option(&["container-driver-root", "driver-root-ctr-path"], "DRIVER_ROOT_CTR_PATH", "plugin.containerDriverRoot", {
        Other { harmless: &["/driver-root"], why: "the driver root must have the same path in the plugin's container" }
    }),
    option(&["cdi-annotation-prefix"], "CDI_ANNOTATION_PREFIX", "plugin.cdiAnnotationPrefix", {
        Other { harmless: &["cdi.k8s.io/"], why: "the prefix is always cdi.k8s.io/" }
    }),
    option(&["nvidia-cdi-hook-path", "nvidia-ctk-path"], "NVIDIA_CDI_HOOK_PATH", "plugin.nvidiaCTKPath", {
        Other { harmless: &["/usr/bin/nvidia-ctk", "/usr/bin/nvidia-cdi-hook"], why: OWN_SPEC }
    }),
    option(&["cdi-feature-flags"], "CDI_FEATURE_FLAGS", "plugin.cdiFeatureFlags", {
        Other { harmless: &[""], why: OWN_SPEC }
    }),
    option(&["cdi-disable-hooks"], "CDI_DISABLE_HOOKS", "plugin.cdiDisableHooks", {
        Other { harmless: &[""], why: OWN_SPEC }
    }),
    option(&[], "DP_DISABLE_HEALTHCHECKS", "", Other { harmless: &[], why: XIDS }),
    option(&[], "DP_ENABLE_HEALTHCHECKS", "", Other { harmless: &[], why: XIDS }),
    switch(&["gdrcopy-enabled"], "GDRCOPY_ENABLED", "gdrcopyEnabled", Other { harmless: OFF, why: NO_EXTRAS }),
    switch(&["gds-enabled"], "GDS_ENABLED", "gdsEnabled", Other { harmless: OFF, why: NO_EXTRAS }),
    switch(&["mofed-enabled"], "MOFED_ENABLED", "mofedEnabled", Other { harmless: OFF, why: NO_EXTRAS }),
    switch(&["imex-required"], "IMEX_REQUIRED", "", Other { harmless: OFF, why: IMEX }),
    option(&["imex-channel-ids"], "IMEX_CHANNEL_IDS", "", Other { harmless: &["", "[]"], why: IMEX }),
];

fn kubelet_socket(settings: &mut Settings, value: &str) -> Result<(), String> {
    let dir = Path::new(value).strip_prefix("/").ok().filter(|path| path.ends_with("device-plugins/kubelet.sock"));
    let dir = dir.and_then(Path::parent).and_then(Path::parent);
    let dir = dir.ok_or("an absolute path that ends in \"device-plugins/kubelet.sock\"")?;
    settings.kubelet_dir = PathBuf::from("/").join(dir);
    Ok(())
}
