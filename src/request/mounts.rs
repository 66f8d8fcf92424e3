//! A device list as volume mounts: a mount of `/dev/null` at `/var/run/nvidia-container-devices/<device>`. A user of
//! Kubernetes cannot make one, so it says more than a variable; the device plugin does.

use std::path::{Component, Path, PathBuf};

use anyhow::Result;

use super::devices::unique;
use crate::error::failure;
use crate::finding::catalog;
use crate::oci::spec_view::Mount;

/// Where such mounts are.
const DIR: &str = "/var/run/nvidia-container-devices";
/// What asked, in messages.
pub const ORIGIN: &str = "a mount below /var/run/nvidia-container-devices";

/// What the mounts ask for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MountRequest {
    /// GPUs, as in NVIDIA_VISIBLE_DEVICES
    pub devices: Vec<String>,
    /// IMEX channels
    pub imex: Vec<String>,
}

/// Whether it is such a mount.
#[must_use]
pub fn is_request(mount: &Mount) -> bool {
    clean(&mount.source).as_deref() == Some(Path::new("/dev/null"))
        && mount.destination.starts_with(DIR)
        && mount.destination != Path::new(DIR)
}

/// Whether there can be one in this JSON text. The name of the directory stands in it as it is, unless something in the text
/// is written with a backslash.
#[must_use]
pub fn may_request(mounts: &str) -> bool {
    mounts.contains("nvidia-container-devices") || mounts.contains('\\')
}

/// Reads the mounts, if `accepted`; else they ask for nothing.
///
/// # Errors
/// If a name climbs out of the directory.
pub fn parse(mounts: &[Mount], accepted: bool) -> Result<MountRequest> {
    let mut request = MountRequest::default();
    for mount in mounts.iter().filter(|mount| accepted && is_request(mount)) {
        let name = clean(&mount.destination).and_then(|path| Some(path.strip_prefix(DIR).ok()?.to_str()?.to_owned()));
        let Some(name) = name.filter(|name| !name.is_empty()) else {
            return Err(failure(
                &catalog::BAD_REQUEST,
                format!("the mount {:?} asks for no device: its name leaves {DIR}", mount.destination),
                "mount /dev/null at a name of one device below that directory",
            ));
        };
        if let Some(channel) = name.strip_prefix("imex/") {
            request.imex.push(channel.to_owned());
        } else if let Some(qualified) = name.strip_prefix("cdi/") {
            // cdi/vendor/class/device and cdi/vendor/class=device are one CDI name; another form is none.
            let parts: Vec<_> = qualified.splitn(3, '/').collect();
            match parts.as_slice() {
                [vendor, class, device] => request.devices.push(format!("{vendor}/{class}={device}")),
                [vendor, rest] if rest.contains('=') => request.devices.push(format!("{vendor}/{rest}")),
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

/// `.` and `//` taken out; `None` if it has `..`.
fn clean(path: &Path) -> Option<PathBuf> {
    path.components().all(|component| component != Component::ParentDir).then(|| path.components().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mount(source: &str, destination: &str) -> Mount {
        Mount { source: source.into(), destination: destination.into(), ..Mount::default() }
    }

    #[test]
    fn kinds_of_mounts() {
        let mounts = [
            mount("/dev/null", "/var/run/nvidia-container-devices/GPU-1"),
            mount("/dev//./null", "/var/run/nvidia-container-devices/GPU-1"),
            mount("/dev/null", "/var/run/nvidia-container-devices/imex/7"),
            mount("/dev/null", "/var/run/nvidia-container-devices/cdi/nvidia.com/gpu/0"),
            mount("/dev/null", "/var/run/nvidia-container-devices/cdi/nvidia.com/gpu=1"),
            mount("/dev/null", "/var/run/nvidia-container-devicesX/GPU-2"),
            mount("/dev/zero", "/var/run/nvidia-container-devices/GPU-3"),
        ];
        let request = parse(&mounts, true).unwrap();
        assert_eq!(request.devices, ["GPU-1", "nvidia.com/gpu=0", "nvidia.com/gpu=1"]);
        assert_eq!(request.imex, ["7"]);
        assert_eq!(parse(&mounts, false).unwrap(), MountRequest::default());
    }

    #[test]
    fn climbing_names_are_refused() {
        let climbing = [mount("/dev/null", "/var/run/nvidia-container-devices/../../../etc")];
        let text = crate::error::render(&parse(&climbing, true).unwrap_err());
        assert!(text.contains("../../../etc") && text.contains("hint: "), "{text}");
    }

    proptest::proptest! {
        #[test]
        fn never_panics(source in "/dev/null|/dev/./null|[a-z/.]{0,12}", name in "[a-zA-Z0-9/.=\u{e9}-]{0,24}") {
            let destination = format!("/var/run/nvidia-container-devices/{name}");
            parse(&[mount(&source, &destination)], true).ok();
        }
    }
}
