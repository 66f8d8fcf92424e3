//! Defines the options of nvidia-container-cli that select devices and parts of the driver, and turns them into a request.

use anyhow::Result;
use clap::Args;

use base::report::failure;
use findings::catalog;
use nvidia_host::capability::{Capabilities, Omit};
use nvidia_host::config::{Config, Require};
use nvidia_host::device_id::{self, VisibleDevices};
use nvidia_host::feature::Features;
use nvidia_host::request::{GpuRequest, MAX_REQUIREMENTS};
use nvidia_host::require::Requirement;

/// Options that select devices.
#[derive(Args, Clone, Debug, Default, PartialEq, Eq)]
pub struct Selection {
    /// GPUs and MIG devices: a comma-separated list of indices, UUIDs or bus ids, or all
    #[arg(short, long = "device", value_name = "ID", value_delimiter = ',')]
    pub devices: Option<Vec<String>>,
    /// 32-bit libraries
    #[arg(long)]
    pub compat32: bool,
    /// Device nodes for configuring MIG devices; only all is supported
    #[arg(long, value_name = "ID", value_parser = ["all"], hide_possible_values = true)]
    pub mig_config: Option<String>,
    /// Device nodes for monitoring MIG devices; only all is supported
    #[arg(long, value_name = "ID", value_parser = ["all"], hide_possible_values = true)]
    pub mig_monitor: Option<String>,
    /// IMEX channels: a comma-separated list of numbers
    #[arg(long = "imex-channel", value_name = "CHANNEL", value_delimiter = ',')]
    pub imex_channels: Vec<String>,
    /// Omit the socket of nvidia-persistenced
    #[arg(long)]
    no_persistenced: bool,
    /// Omit the socket of the fabric manager
    #[arg(long)]
    no_fabricmanager: bool,
    /// Omit GPU firmware
    #[arg(long)]
    no_gsp_firmware: bool,
}

/// Options that select parts of the driver.
#[derive(Args, Clone, Debug, Default, PartialEq, Eq)]
pub struct Parts {
    /// Devices
    #[command(flatten)]
    pub selection: Selection,
    /// Libraries
    #[arg(short, long)]
    pub libraries: bool,
    /// Programs
    #[arg(short, long)]
    pub binaries: bool,
    /// Sockets of the driver's daemons
    #[arg(short, long)]
    pub ipcs: bool,
    /// GSP firmware
    #[arg(short, long)]
    pub firmwares: bool,
}

impl Parts {
    /// Returns whether no option selects a part, which means all parts. IMEX channels do not count: they are never part of all.
    pub fn is_everything(&self) -> bool {
        let Self {
            selection:
                Selection {
                    devices,
                    compat32,
                    mig_config,
                    mig_monitor,
                    ..
                },
            ..
        } = self;
        let has_parts = self.libraries || self.binaries || self.ipcs || self.firmwares || *compat32;
        !has_parts && devices.is_none() && mig_config.is_none() && mig_monitor.is_none()
    }

    /// Returns the options with all parts selected if none was.
    pub fn completed(self) -> Self {
        if !self.is_everything() {
            return self;
        }
        let selection = Selection {
            devices: Some(vec!["all".to_owned()]),
            compat32: true,
            ..self.selection
        };
        Self {
            selection,
            libraries: true,
            binaries: true,
            ipcs: true,
            firmwares: true,
        }
    }
}

impl Selection {
    /// Returns the files to omit.
    pub fn omit(&self) -> Omit {
        Omit {
            persistenced: self.no_persistenced,
            fabricmanager: self.no_fabricmanager,
            firmware: self.no_gsp_firmware,
            ..Omit::default()
        }
    }

    /// Returns the IMEX channels, without empty words.
    pub fn imex_channels(&self) -> impl Iterator<Item = &str> {
        words(&self.imex_channels)
    }

    /// Returns the request for these devices with these capabilities and `--require` options.
    ///
    /// # Errors
    /// If config.toml does not allow a capability, or there are too many requirements.
    pub fn request(
        &self,
        capabilities: Capabilities,
        requirements: &[String],
        config: &Config,
    ) -> Result<GpuRequest> {
        if let Some(refused) = capabilities
            .iter()
            .find(|asked| !config.supported_driver_capabilities.has(*asked))
        {
            return Err(failure(
                &catalog::CAPABILITY,
                format!("config.toml does not allow \"--{}\"", refused.name()),
                "check supported-driver-capabilities in config.toml",
            ));
        }
        if requirements.len() > MAX_REQUIREMENTS {
            return Err(failure(
                &catalog::BAD_REQUIREMENT,
                format!(
                    "{} \"--require\" options, at most {MAX_REQUIREMENTS} are allowed",
                    requirements.len()
                ),
                "join requirements with commas",
            ));
        }
        let requirement = |text: &String| Requirement {
            variable: "--require".to_owned(),
            text: text.clone(),
        };
        let requirements = match config.requirements() {
            Require::Off => Vec::new(),
            Require::Enforce | Require::Warn => requirements.iter().map(requirement).collect(),
        };
        Ok(GpuRequest {
            devices: visible(self.devices.as_deref().unwrap_or_default()),
            asked_by: "--device".to_owned(),
            capabilities,
            requirements,
            mig_config: self.mig_config.clone(),
            mig_monitor: self.mig_monitor.clone(),
            imex_channels: device_id::unique(self.imex_channels()),
            features: Features::default(),
            remarks: Vec::new(),
            omit: self.omit(),
        })
    }
}

/// Returns the words of a comma-separated list, without empty ones.
pub(super) fn words(list: &[String]) -> impl Iterator<Item = &str> {
    list.iter()
        .map(|word| word.trim())
        .filter(|word| !word.is_empty())
}

/// Parses `--device`. `none` and `void` have a meaning only in the container's variable: here they are names of unknown devices.
fn visible(names: &[String]) -> VisibleDevices {
    let mut names = words(names).peekable();
    if names.peek().is_none() {
        return VisibleDevices::None;
    }
    let names: Vec<_> = names.map(unsigned).collect();
    if names.iter().any(|name| name.eq_ignore_ascii_case("all")) {
        VisibleDevices::All
    } else {
        VisibleDevices::List(device_id::unique(names))
    }
}

/// Removes a plus sign: nvidia-container-cli reads indices with strtoul(3), which accepts one.
fn unsigned(name: &str) -> &str {
    let digits = name
        .strip_prefix('+')
        .filter(|rest| rest.bytes().all(|byte| byte.is_ascii_digit()));
    digits.filter(|digits| !digits.is_empty()).unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use nvidia_host::capability::Capability;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        parts: Parts,
    }

    fn parts(options: &[&str]) -> Parts {
        Line::try_parse_from(std::iter::once(&"list").chain(options))
            .unwrap()
            .parts
    }

    #[test]
    fn a_request_of_flags() {
        let all = Capabilities::new(&Capability::ALL);
        let devices = |options: &[&str]| {
            let request = parts(options)
                .selection
                .request(all, &[], &Config::default());
            request.unwrap().devices.names().join(" ")
        };
        assert_eq!(devices(&[]), "none");
        assert_eq!(devices(&["--device="]), "none");
        assert_eq!(devices(&["--device", "1,0", "-dGPU-x,, 1"]), "1 0 GPU-x");
        assert_eq!(devices(&["--device", "0", "-d=ALL"]), "all");
        assert_eq!(devices(&["--device", "+1,1,+x,+"]), "1 +x +");
        assert_eq!(
            devices(&["--device", "void,none"]),
            "void none",
            "which no host has"
        );
        assert!(Line::try_parse_from(["list", "--mig-config", "0"]).is_err());
    }

    #[test]
    fn the_administrator_has_the_last_word() {
        let config = Config {
            supported_driver_capabilities: Capabilities::new(&[Capability::Utility]),
            disable_require: true,
            ..Config::default()
        };
        let request = |capability, requirements: &[String], config| {
            Selection::default().request(Capabilities::new(&[capability]), requirements, config)
        };
        assert!(
            request(Capability::Utility, &["cuda>=99".into()], &config)
                .unwrap()
                .requirements
                .is_empty()
        );
        let refused = request(Capability::Compute, &[], &config).unwrap_err();
        assert!(
            base::report::render(&refused).contains("config.toml does not allow \"--compute\"")
        );
        assert!(
            request(
                Capability::Utility,
                &vec![String::new(); 33],
                &Config::default()
            )
            .is_err()
        );
    }

    #[test]
    fn nothing_chosen_is_everything() {
        for (options, everything) in [
            (&[][..], true),
            (&["--imex-channel=0"], true),
            (&["--no-persistenced"], true),
            (&["--libraries"], false),
            (&["--device="], false),
            (&["--mig-config=all"], false),
        ] {
            assert_eq!(parts(options).is_everything(), everything, "{options:?}");
            assert_eq!(
                parts(options).completed().binaries,
                everything,
                "{options:?}"
            );
        }
    }
}
