//! The options that choose devices and parts of the driver, as nvidia-container-cli has them, and the request they make.

use std::ffi::OsString;

use anyhow::Result;

use base::report::{catalog, failure};
use nvidia_host::capability::{Capabilities, Capability, Omit};
use nvidia_host::config::{Config, Require};
use nvidia_host::device_id::{self, VisibleDevices};
use nvidia_host::require::Requirement;

use super::grammar::{Completes, Opt, option, switch};
use crate::request::{GpuRequest, MAX_REQUIREMENTS};

pub(super) static DEVICE: Opt = option(
    "-d, --device ID\tGPUs and MIG devices, by index, UUID or bus id; a comma list, or all",
    Completes::Words("all"),
);
pub(super) static LIBRARIES: Opt = switch("-l, --libraries\tlibraries");
pub(super) static BINARIES: Opt = switch("-b, --binaries\tprograms");
pub(super) static IPCS: Opt = switch("-i, --ipcs\tsockets of the driver's daemons");
pub(super) static FIRMWARES: Opt = switch("-f, --firmwares\tthe firmware of the GPUs' own processor");
pub(super) static COMPAT32: Opt = switch("--compat32\t32-bit libraries");
pub(super) static MIG_CONFIG: Opt =
    option("--mig-config ID\twhat it takes to lay out MIG devices; only all is accepted", Completes::Words("all"));
pub(super) static MIG_MONITOR: Opt =
    option("--mig-monitor ID\twhat it takes to watch MIG devices; only all is accepted", Completes::Words("all"));
pub(super) static IMEX_CHANNEL: Opt =
    option("--imex-channel CHANNEL\tIMEX channels, by number; a comma list", Completes::Nothing);
pub(super) static NO_PERSISTENCED: Opt = switch("--no-persistenced\twithout the socket of nvidia-persistenced");
pub(super) static NO_FABRICMANAGER: Opt = switch("--no-fabricmanager\twithout the socket of the fabric manager");
pub(super) static NO_GSP_FIRMWARE: Opt = switch("--no-gsp-firmware\twithout GPU firmware");

/// What was chosen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selection {
    /// `--device`; none: it was not given
    pub devices: Option<Vec<String>>,
    /// `--libraries`
    pub libraries: bool,
    /// `--compat32`
    pub compat32: bool,
    /// `--binaries`
    pub binaries: bool,
    /// `--ipcs`
    pub ipcs: bool,
    /// `--firmwares`
    pub firmwares: bool,
    /// `--mig-config`
    pub mig_config: Option<String>,
    /// `--mig-monitor`
    pub mig_monitor: Option<String>,
    /// `--imex-channel`
    pub imex_channels: Vec<String>,
    /// `--compute` and its like
    pub capabilities: Vec<Capability>,
    /// `--require`
    pub requirements: Vec<String>,
    /// `--no-persistenced` and its like
    pub omit: Omit,
}

impl Selection {
    /// Takes an option, if it is one of these.
    ///
    /// # Errors
    /// If its value is wrong.
    pub fn set(&mut self, option: &str, value: Option<&OsString>) -> Result<bool> {
        let text = value.and_then(|value| value.to_str()).unwrap_or_default();
        match option {
            "device" => self.devices.get_or_insert_default().extend(words(text)),
            "libraries" => self.libraries = true,
            "binaries" => self.binaries = true,
            "ipcs" => self.ipcs = true,
            "firmwares" => self.firmwares = true,
            "compat32" => self.compat32 = true,
            "mig-config" => self.mig_config = Some(only_all(option, text)?),
            "mig-monitor" => self.mig_monitor = Some(only_all(option, text)?),
            "imex-channel" => self.imex_channels.extend(words(text)),
            "no-persistenced" => self.omit.persistenced = true,
            "no-fabricmanager" => self.omit.fabricmanager = true,
            "no-gsp-firmware" => self.omit.firmware = true,
            "no-devbind" => self.omit.node_mounts = true,
            "require" => self.requirements.push(text.to_owned()),
            capability => match Capability::ALL.into_iter().find(|known| known.name() == capability) {
                Some(capability) => self.capabilities.push(capability),
                None => return Ok(false),
            },
        }
        Ok(true)
    }

    /// Whether nothing was chosen: that means everything. A channel chooses nothing else away.
    #[must_use]
    pub fn is_everything(&self) -> bool {
        let chosen = Self { imex_channels: Vec::new(), omit: Omit::default(), ..self.clone() };
        chosen == Self::default()
    }

    /// The same with what everything is.
    #[must_use]
    pub fn completed(self) -> Self {
        if !self.is_everything() {
            return self;
        }
        let devices = Some(vec!["all".to_owned()]);
        Self { devices, libraries: true, compat32: true, binaries: true, ipcs: true, firmwares: true, ..self }
    }

    /// The request that it is, under the administrator's rules.
    ///
    /// # Errors
    /// If it asks for what containers may not have.
    pub fn request(&self, capabilities: Capabilities, config: &Config) -> Result<GpuRequest> {
        if let Some(refused) = capabilities.iter().find(|asked| !config.supported_driver_capabilities.has(*asked)) {
            return Err(failure(
                &catalog::CAPABILITY,
                format!("\"--{}\" asks for what containers may not have", refused.name()),
                "check supported-driver-capabilities in config.toml",
            ));
        }
        if self.requirements.len() > MAX_REQUIREMENTS {
            return Err(failure(
                &catalog::BAD_REQUIREMENT,
                format!(
                    "there are {} \"--require\", at most {MAX_REQUIREMENTS} are looked at",
                    self.requirements.len()
                ),
                "join them with commas",
            ));
        }
        let requirement = |text: &String| Requirement { variable: "--require".to_owned(), text: text.clone() };
        let requirements = match config.requirements() {
            Require::Off => Vec::new(),
            Require::Enforce | Require::Warn => self.requirements.iter().map(requirement).collect(),
        };
        Ok(GpuRequest {
            devices: visible(self.devices.as_deref().unwrap_or_default()),
            asked_by: "--device".to_owned(),
            capabilities,
            requirements,
            mig_config: self.mig_config.clone(),
            mig_monitor: self.mig_monitor.clone(),
            imex_channels: device_id::unique(self.imex_channels.iter().map(String::as_str)),
            omit: self.omit,
        })
    }
}

fn words(text: &str) -> impl Iterator<Item = String> {
    text.split(',').map(str::trim).filter(|word| !word.is_empty()).map(str::to_owned)
}

fn only_all(option: &str, text: &str) -> Result<String> {
    if text != "all" {
        return Err(failure(
            &catalog::BAD_REQUEST,
            format!("--{option}={text:?} is not \"all\""),
            format!("give --{option}=all, or leave it out"),
        ));
    }
    Ok(text.to_owned())
}

/// `none` and `void` are words of images, and no devices here.
fn visible(names: &[String]) -> VisibleDevices {
    if names.is_empty() {
        VisibleDevices::None
    } else if names.iter().any(|name| name.eq_ignore_ascii_case("all")) {
        VisibleDevices::All
    } else {
        VisibleDevices::List(device_id::unique(names.iter().map(|name| unsigned(name))))
    }
}

/// nvidia-container-cli reads indices with strtoul(3), which takes a sign.
fn unsigned(name: &str) -> &str {
    let digits = name.strip_prefix('+').filter(|rest| rest.bytes().all(|byte| byte.is_ascii_digit()));
    digits.filter(|digits| !digits.is_empty()).unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn selection(options: &[(&str, &str)]) -> Selection {
        let mut selection = Selection::default();
        for (name, value) in options {
            assert!(selection.set(name, Some(&value.into())).unwrap(), "{name}");
        }
        selection
    }

    #[test]
    fn a_request_of_flags() {
        let all = Capabilities::of(&Capability::ALL);
        let devices = |options: &[(&str, &str)]| {
            selection(options).request(all, &Config::default()).unwrap().devices.names().join(" ")
        };
        assert_eq!(devices(&[]), "none");
        assert_eq!(devices(&[("device", "")]), "none");
        assert_eq!(devices(&[("device", "1,0"), ("device", "GPU-x,,1")]), "1 0 GPU-x");
        assert_eq!(devices(&[("device", "0"), ("device", "ALL")]), "all");
        assert_eq!(devices(&[("device", "+1,1,+x,+")]), "1 +x +");
        assert_eq!(devices(&[("device", "void,none")]), "void none", "which no host has");
        assert!(Selection::default().set("mig-config", Some(&"0".into())).is_err());
        assert!(!Selection::default().set("json", None).unwrap());
    }

    #[test]
    fn the_administrator_has_the_last_word() {
        let config = Config {
            supported_driver_capabilities: Capabilities::of(&[Capability::Utility]),
            disable_require: true,
            ..Config::default()
        };
        let asked = selection(&[("require", "cuda>=99")]);
        assert!(asked.request(Capabilities::of(&[Capability::Utility]), &config).unwrap().requirements.is_empty());
        let refused = asked.request(Capabilities::of(&[Capability::Compute]), &config).unwrap_err();
        assert!(base::report::render(&refused).contains("\"--compute\" asks for what containers may not have"));
        let many = Selection { requirements: vec![String::new(); 33], ..Selection::default() };
        assert!(many.request(Capabilities::of(&[]), &Config::default()).is_err());
    }

    #[test]
    fn nothing_chosen_is_everything() {
        for (options, everything) in [
            (&[][..], true),
            (&[("imex-channel", "0")], true),
            (&[("no-persistenced", "")], true),
            (&[("libraries", "")], false),
            (&[("device", "")], false),
            (&[("mig-config", "all")], false),
        ] {
            assert_eq!(selection(options).is_everything(), everything, "{options:?}");
            assert_eq!(selection(options).completed().binaries, everything, "{options:?}");
        }
    }
}
