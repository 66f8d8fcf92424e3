//! Requests by volume mounts: a mount of `/dev/null` at `/var/run/nvidia-container-devices/<device>`. The device plugin creates
//! such mounts. Users of Kubernetes cannot, so a mount is more trustworthy than a variable.

use std::path::{Component, Path, PathBuf};

use anyhow::Result;

use base::report::failure;
use findings::catalog;

use crate::cdi::extra_devices::IMEX_CLASS;
use crate::cdi::generate::ALL;
use crate::device_id::{self, VisibleDevices, unique};
use crate::feature::{Feature, Features};

/// The directory of these mounts. `/var/run` is a link to `/run` in nearly every image.
const DIR: &str = "/var/run/nvidia-container-devices";
const DIRS: [&str; 2] = [DIR, "/run/nvidia-container-devices"];
/// The origin of such a request, for messages.
pub const ORIGIN: &str = "a mount below /var/run/nvidia-container-devices";

/// The vendor in the CDI names of features and IMEX channels.
const VENDOR: &str = "nvidia.com";

/// A mount of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestMount<'a> {
    /// On the host
    pub source: &'a Path,
    /// In the container
    pub destination: &'a Path,
}

/// The devices, IMEX channels and features that mounts name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MountRequest {
    /// The names of GPUs
    pub devices: Vec<String>,
    /// The IMEX channels
    pub imex: Vec<String>,
    /// The features
    pub features: Features,
}

impl MountRequest {
    /// Adds a CDI name. Features and IMEX channels have the names that NVIDIA's generator of CDI specs gives them.
    fn qualified(&mut self, vendor: &str, class: &str, device: &str) {
        match Feature::from_name(class).filter(|_| vendor == VENDOR && device == ALL) {
            Some(feature) => self.features.insert(feature),
            None if vendor == VENDOR && class == IMEX_CLASS => self.imex.push(device.to_owned()),
            None => self.devices.push(format!("{vendor}/{class}={device}")),
        }
    }

    /// Returns the requested GPUs; `None` if no mount names one. `all` and `none` mean what they mean in the variable: NVIDIA's
    /// documentation and guides for kind use a mount named `all`.
    #[must_use]
    pub fn visible(&self) -> Option<VisibleDevices> {
        match self.devices.as_slice() {
            [] => None,
            names => Some(device_id::of_words(names.iter().map(String::as_str))),
        }
    }
}

/// Returns the name of the mount that requests a feature, below the directory of the mounts.
#[must_use]
pub fn name_of(feature: Feature) -> String {
    format!("cdi/{VENDOR}/{}={ALL}", feature.row().name)
}

/// Reports whether a mount is a request: its normalized path is in the directory, or its path starts there and leaves it with
/// `..`.
#[must_use]
pub fn is_request(mount: &RequestMount<'_>) -> bool {
    let is_below = |path: &Path| {
        DIRS.iter()
            .any(|dir| path.starts_with(dir) && path != Path::new(dir))
    };
    clean(mount.source) == Path::new("/dev/null")
        && (is_below(&clean(mount.destination)) || is_below(mount.destination))
}

/// Reads the request of the mounts; empty unless `accepted`.
///
/// # Errors
/// If a path leaves the directory.
pub fn parse(mounts: &[RequestMount<'_>], accepted: bool) -> Result<MountRequest> {
    let mut request = MountRequest::default();
    for mount in mounts.iter().filter(|mount| accepted && is_request(mount)) {
        let destination = clean(mount.destination);
        let below = DIRS
            .iter()
            .find_map(|dir| destination.strip_prefix(dir).ok()?.to_str());
        let Some(name) = below.filter(|name| !name.is_empty()).map(str::to_owned) else {
            return Err(failure(
                &catalog::BAD_REQUEST,
                format!(
                    "invalid device mount {:?}: its path leaves {DIR}",
                    mount.destination
                ),
                "mount /dev/null at the name of a device in that directory",
            ));
        };
        if let Some(channel) = name.strip_prefix("imex/") {
            request.imex.push(channel.to_owned());
        } else if let Some(qualified) = name.strip_prefix("cdi/") {
            // cdi/vendor/class/device and cdi/vendor/class=device are the same CDI name; other forms are ignored.
            let parts: Vec<_> = qualified.splitn(3, '/').collect();
            match parts.as_slice() {
                [vendor, class, device] => request.qualified(vendor, class, device),
                [vendor, rest] => {
                    if let Some((class, device)) = rest.split_once('=') {
                        request.qualified(vendor, class, device);
                    }
                }
                _ => {}
            }
        } else {
            request.devices.push(name);
        }
    }
    request.devices = unique(request.devices.iter().map(String::as_str));
    request.imex = unique(request.imex.iter().map(String::as_str));
    Ok(request)
}

/// Normalizes `.`, `//` and `..` in the text of a path, like NVIDIA's hook does. The result is only compared, never opened.
fn clean(path: &Path) -> PathBuf {
    let mut clean = PathBuf::new();
    for component in path.components() {
        match component {
            // The parent of `/` is `/`.
            Component::ParentDir => drop(clean.pop()),
            other => clean.push(other),
        }
    }
    clean
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mount<'a>(source: &'a str, destination: &'a str) -> RequestMount<'a> {
        RequestMount {
            source: Path::new(source),
            destination: Path::new(destination),
        }
    }

    #[test]
    fn kinds_of_mounts() {
        let mounts = [
            mount("/dev/null", "/var/run/nvidia-container-devices/GPU-1"),
            mount("/dev//./null", "/var/run/nvidia-container-devices/GPU-1"),
            mount(
                "/dev/../dev/null",
                "/var//run/x/../nvidia-container-devices/./GPU-4/",
            ),
            mount("/dev/null", "/run/nvidia-container-devices/GPU-5"),
            mount("/dev/null", "/var/run/nvidia-container-devices/imex/7"),
            mount(
                "/dev/null",
                "/var/run/nvidia-container-devices/cdi/nvidia.com/gpu/0",
            ),
            mount(
                "/dev/null",
                "/var/run/nvidia-container-devices/cdi/nvidia.com/gpu=1",
            ),
            mount("/dev/null", "/var/run/nvidia-container-devicesX/GPU-2"),
            mount("/dev/zero", "/var/run/nvidia-container-devices/GPU-3"),
            mount("/dev/../null", "/var/run/nvidia-container-devices/GPU-3"),
            mount("/dev/null", "/var/run/nvidia-container-devices"),
        ];
        let request = parse(&mounts, true).unwrap();
        assert_eq!(
            request.devices,
            [
                "GPU-1",
                "GPU-4",
                "GPU-5",
                "nvidia.com/gpu=0",
                "nvidia.com/gpu=1"
            ]
        );
        assert_eq!(request.imex, ["7"]);
        assert_eq!(parse(&mounts, false).unwrap(), MountRequest::default());
    }

    #[test]
    fn all_and_none_are_those_of_the_variable() {
        let visible = |names: &[&str]| {
            let paths: Vec<_> = names
                .iter()
                .map(|name| format!("/var/run/nvidia-container-devices/{name}"))
                .collect();
            let mounts: Vec<_> = paths.iter().map(|path| mount("/dev/null", path)).collect();
            parse(&mounts, true).unwrap().visible()
        };
        assert_eq!(visible(&["all"]), Some(VisibleDevices::All));
        assert_eq!(visible(&["GPU-1", "ALL"]), Some(VisibleDevices::All));
        assert_eq!(visible(&["none"]), Some(VisibleDevices::None));
        assert_eq!(
            visible(&["GPU-1", "none"]),
            Some(VisibleDevices::None),
            "as in the variable"
        );
        assert_eq!(
            visible(&["NONE"]),
            Some(VisibleDevices::List(vec!["NONE".into()])),
            "as in the variable"
        );
        assert_eq!(visible(&["imex/0"]), None);
        assert_eq!(visible(&[]), None);
    }

    #[test]
    fn paths_that_leave_the_directory_are_refused() {
        let climbing = [mount(
            "/dev/null",
            "/var/run/nvidia-container-devices/../../../etc",
        )];
        let text = base::report::render(&parse(&climbing, true).unwrap_err());
        assert!(
            text.contains("../../../etc") && text.contains("hint: "),
            "{text}"
        );
    }

    proptest::proptest! {
        #[test]
        fn never_panics(source in "/dev/null|/dev/./null|[a-z/.]{0,12}", name in "[a-zA-Z0-9/.=\u{e9}-]{0,24}") {
            let destination = format!("/var/run/nvidia-container-devices/{name}");
            parse(&[mount(&source, &destination)], true).ok();
        }
    }
}
