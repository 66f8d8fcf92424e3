//! Names the environment variables of NVIDIA's image convention. The decision about a request reads the environment only with them, so
//! that [`Variable::ALL`] is complete: an admission policy that rejects requests by variable must list each one that requests devices.

use std::collections::BTreeMap;

use crate::capability::DRIVER_CAPABILITIES;
use crate::config::SWARM_PREFIX;
use crate::device_id::VISIBLE_DEVICES;
use crate::feature::Feature;

/// A variable of the convention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Variable {
    /// The GPUs
    VisibleDevices,
    /// The CUDA version of the image. Without [`Self::RequireCuda`], it requests all GPUs
    CudaVersion,
    /// The GPUs whose MIG devices the container may configure
    MigConfigDevices,
    /// The GPUs whose MIG devices the container may monitor
    MigMonitorDevices,
    /// The IMEX channels
    ImexChannels,
    /// Devices next to the GPUs
    Feature(Feature),
    /// The parts of the driver
    DriverCapabilities,
    /// A requirement. If it is empty, it counts like a missing one, so that [`Self::CudaVersion`] of the image requests all GPUs
    RequireCuda,
    /// Whether requirements are ignored
    DisableRequire,
}

impl Variable {
    /// All variables.
    pub const ALL: [Self; 12] = [
        Self::VisibleDevices,
        Self::CudaVersion,
        Self::MigConfigDevices,
        Self::MigMonitorDevices,
        Self::ImexChannels,
        Self::Feature(Feature::Gds),
        Self::Feature(Feature::Mofed),
        Self::Feature(Feature::Gdrcopy),
        Self::Feature(Feature::Nvswitch),
        Self::DriverCapabilities,
        Self::RequireCuda,
        Self::DisableRequire,
    ];

    /// Returns its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::VisibleDevices => VISIBLE_DEVICES,
            Self::CudaVersion => "CUDA_VERSION",
            Self::MigConfigDevices => "NVIDIA_MIG_CONFIG_DEVICES",
            Self::MigMonitorDevices => "NVIDIA_MIG_MONITOR_DEVICES",
            Self::ImexChannels => "NVIDIA_IMEX_CHANNELS",
            Self::Feature(feature) => feature.row().variable,
            Self::DriverCapabilities => DRIVER_CAPABILITIES,
            Self::RequireCuda => "NVIDIA_REQUIRE_CUDA",
            Self::DisableRequire => "NVIDIA_DISABLE_REQUIRE",
        }
    }

    /// Whether a value of it requests GPUs, MIG management, IMEX channels or other devices.
    #[must_use]
    pub const fn requests(self) -> bool {
        match self {
            Self::VisibleDevices
            | Self::CudaVersion
            | Self::MigConfigDevices
            | Self::MigMonitorDevices
            | Self::ImexChannels
            | Self::Feature(_) => true,
            Self::DriverCapabilities | Self::RequireCuda | Self::DisableRequire => false,
        }
    }
}

/// The environment of a container's process.
#[derive(Clone, Copy, Debug)]
pub struct Environment<'a>(&'a BTreeMap<String, String>);

impl<'a> From<&'a BTreeMap<String, String>> for Environment<'a> {
    fn from(variables: &'a BTreeMap<String, String>) -> Self {
        Self(variables)
    }
}

impl<'a> Environment<'a> {
    /// Returns the names of all variables, also of those that are not in the convention.
    pub(super) fn names(self) -> impl Iterator<Item = &'a str> {
        self.0.keys().map(String::as_str)
    }

    /// Returns the value of a variable.
    #[must_use]
    pub fn get(self, variable: Variable) -> Option<&'a str> {
        self.0.get(variable.name()).map(String::as_str)
    }

    /// Returns the value of a variable; `None` if it is empty.
    pub(super) fn get_filled(self, variable: Variable) -> Option<&'a str> {
        self.get(variable).filter(|value| !value.is_empty())
    }

    /// Returns the names and values of the variables that `swarm-resource` in config.toml names.
    pub(super) fn swarm_resources<'n>(self, names: &'n [String]) -> Vec<(&'n str, &'a str)> {
        names
            .iter()
            .filter_map(|name| Some((name.as_str(), self.0.get(name)?.as_str())))
            .collect()
    }

    /// Whether a variable has a name that `swarm-resource` can contain.
    pub(super) fn may_have_swarm_resource(self) -> bool {
        self.0.keys().any(|name| name.starts_with(SWARM_PREFIX))
    }

    /// Returns the names and values of the requirements.
    pub(super) fn requirements(self) -> impl Iterator<Item = (&'a str, &'a str)> {
        let named = self.0.iter().filter(|(name, _)| {
            // On Tegra, these variables contain lists of files.
            name.starts_with("NVIDIA_REQUIRE_") && !name.starts_with("NVIDIA_REQUIRE_JETPACK")
        });
        named.map(|(name, value)| (name.as_str(), value.as_str()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::request::{Container, Decision, Hint, decide, hint};

    #[test]
    fn a_variable_that_requests_nothing_changes_no_device() {
        for variable in Variable::ALL
            .into_iter()
            .filter(|variable| !variable.requests())
        {
            for value in ["", "all", "0", "true"] {
                let env = BTreeMap::from([(variable.name().to_owned(), value.to_owned())]);
                let container = Container {
                    env: (&env).into(),
                    mounts: vec![],
                    nodes: vec![],
                    privileged: true,
                };
                assert_eq!(hint(&container), Hint::No, "{variable:?}={value}");
                assert!(
                    matches!(
                        decide(&container, &Config::default()),
                        Ok(Decision::Nothing(_))
                    ),
                    "{variable:?}={value}"
                );
            }
        }
        let names = Variable::ALL.map(Variable::name);
        assert!(
            names
                .iter()
                .enumerate()
                .all(|(index, name)| !names[..index].contains(name)),
            "{names:?}"
        );
    }
}
