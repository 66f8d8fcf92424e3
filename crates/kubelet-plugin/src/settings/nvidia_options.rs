//! The table of the options of NVIDIA's device plugin 0.20, with their variables and keys.

use std::path::{Path, PathBuf};

use base::paths::HostPath;
use base::report::Finding;
use clap::Arg;
use nvidia_host::feature::Feature;

use super::parse::{OFF, absolute, truth};
use super::problems::no_effect;
use super::table::{self, Settings};
use super::xids::ignored_xids;

/// Sets an option. The error describes the allowed values.
type Setter = fn(&mut Settings, &str) -> Result<(), String>;

/// What an option does here.
#[derive(Clone, Copy, Debug)]
pub(super) enum Effect {
    /// The same as the setting with this name
    Setting(&'static str),
    /// Changes what is not in the table of settings
    Sets(Setter),
    /// Adds the feature to the setting `extra-devices`, or removes it
    Extra(Feature),
    /// Nothing is to be done: this program does it in any case, or another option decides
    Nothing,
    /// It is not supported, except for values that ask for nothing.
    Other {
        harmless: &'static [&'static str],
        why: &'static str,
    },
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
    pub(super) fn is_only_nvidias(&self) -> bool {
        !self.names.is_empty() && table::find(self.name()).is_none()
    }

    /// Returns the option of the command line, which the help text does not list.
    pub(super) fn flag(&self) -> Arg {
        let (name, aliases) = self.names.split_first().unwrap_or((&"", &[]));
        let arg = Arg::new(*name).long(*name).aliases(aliases).hide(true);
        match self.is_switch {
            true => arg
                .num_args(0..=1)
                .require_equals(true)
                .default_missing_value("true"),
            false => arg,
        }
    }

    /// Applies a value. `place` names the option in a finding.
    ///
    /// # Errors
    /// The allowed values.
    pub(super) fn set(
        &self,
        settings: &mut Settings,
        place: &str,
        value: &str,
    ) -> Result<Option<Finding>, String> {
        match self.effect {
            Setting(name) => match table::find(name) {
                Some(setting) => setting.set(&mut settings.plugin, &[value]).map(|()| None),
                None => Ok(None),
            },
            Sets(set) => set(settings, value).map(|()| None),
            Extra(feature) => {
                settings.plugin.extra_devices.set(feature, truth(&[value])?);
                Ok(None)
            }
            Other { harmless, .. } if harmless.contains(&value) => Ok(None),
            Other { why, .. } => Ok(Some(no_effect(place, why))),
            Nothing => Ok(None),
        }
    }
}

use Effect::{Extra, Nothing, Other, Sets, Setting};

const OWN_SPEC: &str = "the plugin writes the CDI spec with its own hooks";
const XIDS: &str = "ignored-xids lists the XIDs that do not affect the health";
const IMEX: &str = "IMEX channels are requested with NVIDIA_IMEX_CHANNELS";

/// Defines [`OPTIONS`] from rows of the variable, the key, the names and the effect. The value of a `switch` can be omitted.
macro_rules! options {
    ($($kind:ident $variable:literal $key:literal [$($name:literal),*] $effect:expr;)*) => {
        /// All options.
        pub(super) const OPTIONS: &[NvidiaOption] = &[$(NvidiaOption {
            names: &[$($name),*],
            variable: $variable,
            key: $key,
            is_switch: matches!(stringify!($kind).as_bytes(), b"switch"),
            effect: $effect,
        }),*];
    };
}

options! {
    option "CONFIG_FILE" "" ["config-file"] Nothing;
    option "MIG_STRATEGY" "migStrategy" ["mig-strategy"] Setting("mig-strategy");
    option "DEVICE_LIST_STRATEGY" "plugin.deviceListStrategy" ["device-list-strategy"] Setting("device-list-strategy");
    option "DEVICE_ID_STRATEGY" "plugin.deviceIDStrategy" ["device-id-strategy"] Setting("device-id-strategy");
    switch "PASS_DEVICE_SPECS" "plugin.passDeviceSpecs" ["pass-device-specs"] Setting("pass-device-specs");
    option "SHARED_DEVICES_ALLOCATION_POLICY" "sharedDevicesAllocationPolicy" ["shared-devices-allocation-policy"]
        Setting("allocation");
    option "NVIDIA_DRIVER_ROOT" "nvidiaDriverRoot" ["nvidia-driver-root", "driver-root"] Sets(driver_root);
    option "NVIDIA_DEV_ROOT" "nvidiaDevRoot" ["nvidia-dev-root", "dev-root"] Sets(dev_root);
    option "KUBELET_SOCKET" "plugin.kubeletSocket" ["kubelet-socket"] Sets(kubelet_socket);
    switch "FAIL_ON_INIT_ERROR" "failOnInitError" ["fail-on-init-error"] Nothing;
    // MPS itself is a section of the configuration file.
    option "MPS_ROOT" "mpsRoot" ["mps-root"] Nothing;
    switch "USE_NODE_FEATURE_API" "useNodeFeatureAPI" ["use-node-feature-api"]
        Other { harmless: OFF, why: "the labels are in a file, which Node Feature Discovery reads" };
    option "DEVICE_DISCOVERY_STRATEGY" "deviceDiscoveryStrategy" ["device-discovery-strategy"]
        Other { harmless: &["auto", "nvml"], why: "devices are always discovered with NVML" };
    option "DRIVER_ROOT_CTR_PATH" "plugin.containerDriverRoot" ["container-driver-root", "driver-root-ctr-path"]
        Other { harmless: &["/driver-root"], why: "the driver root must have the same path in the plugin's container" };
    option "CDI_ANNOTATION_PREFIX" "plugin.cdiAnnotationPrefix" ["cdi-annotation-prefix"]
        Other { harmless: &["cdi.k8s.io/"], why: "the prefix is always cdi.k8s.io/" };
    option "NVIDIA_CDI_HOOK_PATH" "plugin.nvidiaCTKPath" ["nvidia-cdi-hook-path", "nvidia-ctk-path"]
        Other { harmless: &["/usr/bin/nvidia-ctk", "/usr/bin/nvidia-cdi-hook"], why: OWN_SPEC };
    option "CDI_FEATURE_FLAGS" "plugin.cdiFeatureFlags" ["cdi-feature-flags"] Other { harmless: &[""], why: OWN_SPEC };
    option "CDI_DISABLE_HOOKS" "plugin.cdiDisableHooks" ["cdi-disable-hooks"] Other { harmless: &[""], why: OWN_SPEC };
    option "DP_DISABLE_HEALTHCHECKS" "" [] Sets(more_ignored_xids);
    option "DP_ENABLE_HEALTHCHECKS" "" [] Other { harmless: &[], why: XIDS };
    switch "GDRCOPY_ENABLED" "gdrcopyEnabled" ["gdrcopy-enabled"] Extra(Feature::Gdrcopy);
    switch "GDS_ENABLED" "gdsEnabled" ["gds-enabled"] Extra(Feature::Gds);
    switch "MOFED_ENABLED" "mofedEnabled" ["mofed-enabled"] Extra(Feature::Mofed);
    switch "IMEX_REQUIRED" "" ["imex-required"] Other { harmless: OFF, why: IMEX };
    option "IMEX_CHANNEL_IDS" "" ["imex-channel-ids"] Other { harmless: &["", "[]"], why: IMEX };
}

fn driver_root(settings: &mut Settings, value: &str) -> Result<(), String> {
    settings.common.driver_root = HostPath::new(absolute(&[value])?);
    Ok(())
}

fn dev_root(settings: &mut Settings, value: &str) -> Result<(), String> {
    settings.common.dev_root = Some(HostPath::new(absolute(&[value])?));
    Ok(())
}

/// The variable has more XIDs than those that are ignored by default. "xids" stands for all of them too, as these are the only events.
fn more_ignored_xids(settings: &mut Settings, value: &str) -> Result<(), String> {
    let value = if value == "xids" { "all" } else { value };
    let values: Vec<&str> = value.split(',').map(str::trim).collect();
    settings.plugin.ignored_xids.extend(ignored_xids(&values)?);
    Ok(())
}

fn kubelet_socket(settings: &mut Settings, value: &str) -> Result<(), String> {
    let dir = Path::new(value)
        .strip_prefix("/")
        .ok()
        .filter(|path| path.ends_with("device-plugins/kubelet.sock"));
    let dir = dir.and_then(Path::parent).and_then(Path::parent);
    let dir = dir.ok_or("an absolute path that ends in \"device-plugins/kubelet.sock\"")?;
    settings.kubelet_dir = PathBuf::from("/").join(dir);
    Ok(())
}
