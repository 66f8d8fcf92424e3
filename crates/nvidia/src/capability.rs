//! Parses `NVIDIA_DRIVER_CAPABILITIES`, the parts of the driver that a container requests.

use std::fmt;

use anyhow::{Result, bail};

use base::report::failure;
use findings::catalog;

use crate::quotes;

/// The variable that names parts of the driver.
pub const DRIVER_CAPABILITIES: &str = "NVIDIA_DRIVER_CAPABILITIES";

/// A driver capability. (Kernel capabilities are "caps" in this code.)
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Capability {
    /// 32-bit libraries
    Compat32,
    /// CUDA and OpenCL
    Compute,
    /// X11 display
    Display,
    /// OpenGL and Vulkan
    Graphics,
    /// Deep learning super sampling
    Ngx,
    /// nvidia-smi and NVML
    Utility,
    /// Video codec SDK
    Video,
}

use Capability::{Compat32, Compute, Display, Graphics, Ngx, Utility, Video};

impl Capability {
    /// All capabilities, in the order in which they are printed.
    pub const ALL: [Self; 7] = [Compat32, Compute, Display, Graphics, Ngx, Utility, Video];

    /// Returns the name in the variable.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Compat32 => "compat32",
            Compute => "compute",
            Display => "display",
            Graphics => "graphics",
            Ngx => "ngx",
            Utility => "utility",
            Video => "video",
        }
    }

    fn from_name(name: &str) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|capability| capability.name() == name)
    }

    const fn bit(self) -> u8 {
        1 << self as u8
    }
}

/// Parts that a container does not get although its capabilities include them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Omit {
    /// The socket of nvidia-persistenced
    pub persistenced: bool,
    /// The socket of the fabric manager
    pub fabricmanager: bool,
    /// The GSP firmware
    pub firmware: bool,
    /// The mounts of device nodes; the container still gets access to the devices
    pub node_mounts: bool,
}

/// A set of capabilities.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capabilities(u8);

impl Capabilities {
    /// Returns the set of these capabilities.
    #[must_use]
    pub fn new(list: &[Capability]) -> Self {
        Self(
            list.iter()
                .fold(0, |bits, capability| bits | capability.bit()),
        )
    }

    /// Returns the capabilities of an image that does not set the variable. `supported` is the upper limit.
    #[must_use]
    pub(crate) fn default_set(supported: Self) -> Self {
        Self(Self::new(&[Compute, Utility]).0 & supported.0)
    }

    /// Returns a number for the set, which depends neither on words nor on their order.
    #[must_use]
    pub(crate) const fn bits(self) -> u8 {
        self.0
    }

    /// Parses `supported-driver-capabilities`, the upper limit in config.toml: a list of names, or `all`.
    ///
    /// # Errors
    /// Names an unknown capability and the allowed values.
    pub fn supported(value: &str) -> Result<Self, String> {
        if value == "all" {
            return Ok(Self::new(&Capability::ALL));
        }
        let mut known = Vec::new();
        for name in value.split(',').map(str::trim) {
            match Capability::from_name(name) {
                Some(capability) => known.push(capability),
                None if name.is_empty() => {}
                None => {
                    let all = Self::new(&Capability::ALL);
                    return Err(format!("\"all\" or a list of {all}; {name:?} is neither"));
                }
            }
        }
        Ok(Self::new(&known))
    }

    /// Whether the set contains `capability`.
    #[must_use]
    pub fn has(self, capability: Capability) -> bool {
        self.0 & capability.bit() != 0
    }

    /// Whether the set contains one of `list`.
    #[must_use]
    pub fn any(self, list: &[Capability]) -> bool {
        self.0 & Self::new(list).0 != 0
    }

    /// Whether the whole driver is requested. The container then also gets the libraries that are not in the catalog: each driver branch
    /// adds some, and other libraries open them by name. Their capability is unknown. If `supported-driver-capabilities` denies one
    /// capability, they are denied too, because they could belong to it.
    #[must_use]
    pub fn are_everything(self) -> bool {
        let mut required = Capability::ALL.into_iter();
        required.all(|capability| capability == Compat32 || self.has(capability))
    }

    /// Returns the capabilities, sorted by name.
    pub fn iter(self) -> impl Iterator<Item = Capability> {
        Capability::ALL
            .into_iter()
            .filter(move |capability| self.has(*capability))
    }
}

impl fmt::Display for Capabilities {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.iter().map(Capability::name).collect();
        f.write_str(&names.join(","))
    }
}

/// Returns the capabilities that a container gets with this `value` (`None` if the variable is not set). `supported` is the upper limit.
/// A legacy image without the variable gets all supported capabilities.
///
/// # Errors
/// If a capability is unknown or not supported.
pub fn parse(value: Option<&str>, legacy: bool, supported: Capabilities) -> Result<Capabilities> {
    let value = match value {
        None if legacy => return Ok(supported),
        None | Some("") => return Ok(Capabilities::default_set(supported)),
        Some(value) => value,
    };
    let mut words: Vec<&str> = value.split(',').map(str::trim).collect();
    words.retain(|word| !word.is_empty());
    if words.iter().any(|word| word.eq_ignore_ascii_case("all")) {
        return Ok(supported);
    }
    let mut set = 0;
    for word in words {
        match Capability::from_name(word) {
            Some(capability) if supported.has(capability) => set |= capability.bit(),
            Some(_) => bail!(refused(
                word,
                "not enabled by supported-driver-capabilities in config.toml",
                supported
            )),
            None => bail!(refused(word, "not a driver capability", supported)),
        }
    }
    Ok(Capabilities(set))
}

fn refused(word: &str, why: &str, supported: Capabilities) -> anyhow::Error {
    let fix = match quotes::fix(word) {
        Some(fix) => fix.to_owned(),
        None => format!(
            "start the container with {DRIVER_CAPABILITIES} set to \"all\" or some of {supported}"
        ),
    };
    failure(
        &catalog::CAPABILITY,
        format!("{DRIVER_CAPABILITIES}: {word:?} is {why}"),
        fix,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn every() -> Capabilities {
        Capabilities::new(&Capability::ALL)
    }

    #[test]
    fn the_words_of_the_variable() {
        for (value, supported, expected) in [
            (None, every(), "compute,utility"),
            (Some(""), every(), "compute,utility"),
            (Some(" , "), every(), ""),
            (
                Some("all"),
                every(),
                "compat32,compute,display,graphics,ngx,utility,video",
            ),
            (Some("ALL"), Capabilities::new(&[Video]), "video"),
            (
                Some("video,all"),
                Capabilities::new(&[Utility, Compute]),
                "compute,utility",
            ),
            (Some("video, compute"), every(), "compute,video"),
            (None, Capabilities::new(&[Utility]), "utility"),
        ] {
            assert_eq!(
                parse(value, false, supported).unwrap().to_string(),
                expected,
                "{value:?}"
            );
        }
    }

    #[test]
    fn refused_words_are_named() {
        for (value, supported, says) in [
            (
                "computer",
                every(),
                "\"computer\" is not a driver capability",
            ),
            ("Compute", every(), "\"Compute\" is not a driver capability"),
            ("none", every(), "\"none\" is not a driver capability"),
            ("\"all\"", every(), "hint: remove the quotes"),
            (
                "compute,video",
                Capabilities::new(&[Compute]),
                "\"video\" is not enabled",
            ),
        ] {
            let text = base::report::render(&parse(Some(value), false, supported).unwrap_err());
            assert!(text.contains(says) && text.contains("hint: "), "{text}");
        }
    }

    #[test]
    fn the_ceiling() {
        assert_eq!(Capabilities::supported("all").unwrap(), every());
        assert_eq!(
            Capabilities::supported(" utility,").unwrap().to_string(),
            "utility"
        );
        assert!(
            Capabilities::supported("all,utility")
                .unwrap_err()
                .contains("\"all\" is neither")
        );
    }
}
