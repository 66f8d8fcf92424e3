//! Access to devices, where the engine did not give it: the container's device cgroup.
//!
//! What we add here the runtime knows nothing of, and it, or systemd, takes it away again when it next writes its own
//! rules (`systemctl daemon-reload`, `podman update`). So nothing is added for a device that config.json allows.

mod program;
mod v1;
mod v2;

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use oci_spec::runtime::{LinuxDeviceCgroup, LinuxDeviceType};

/// May read and write this character device. Never make a node of it: those that are asked for are there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DeviceRule {
    /// Device major
    pub major: u32,
    /// Device minor
    pub minor: u32,
}

/// As cgroup v1 writes it.
impl fmt::Display for DeviceRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "c {}:{} rw", self.major, self.minor)
    }
}

/// What decides about a process's devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceCgroup {
    /// A directory of the v1 device hierarchy
    V1(PathBuf),
    /// A cgroup v2 directory
    V2(PathBuf),
    /// No hierarchy with devices is mounted: nothing does.
    None,
}

/// Gives the container `id` with the init process `pid` access to the devices of `rules`.
///
/// # Errors
/// If its cgroup cannot be found or changed.
pub fn allow(id: &str, pid: i32, rules: &[DeviceRule]) -> Result<()> {
    if rules.is_empty() {
        return Ok(());
    }
    match locate(&read("/proc/self/mountinfo")?, &read(&format!("/proc/{pid}/cgroup"))?)? {
        DeviceCgroup::V1(path) => v1::allow(&path, rules),
        DeviceCgroup::V2(path) => v2::allow(&of_container(&path, id), rules),
        DeviceCgroup::None => Ok(()),
    }
}

/// Not `read_to_string`: a path in mountinfo need not be UTF-8.
fn read(path: &str) -> Result<Vec<u8>> {
    std::fs::read(path).with_context(|| format!("read {path:?}"))
}

/// The cgroups that are the container's alone: its own, and those above it that are named after it. crun puts the process
/// into `…/libpod-<id>.scope/container`, and a program on both.
fn of_container(path: &Path, id: &str) -> Vec<PathBuf> {
    let named =
        |path: &&Path| !id.is_empty() && path.file_name().is_some_and(|name| name.to_string_lossy().contains(id));
    let above = path.ancestors().skip(1).take_while(named);
    std::iter::once(path).chain(above).map(Path::to_owned).collect()
}

/// Decides by what is mounted where we are: /proc/<pid>/cgroup lists v1 hierarchies also on a host where nobody
/// mounted them and cgroup v2 rules.
///
/// # Errors
/// If the process is in a cgroup that no mount shows.
pub fn locate(mountinfo: &[u8], cgroup: &[u8]) -> Result<DeviceCgroup> {
    let mounts: Vec<_> = mountinfo.split(|b| *b == b'\n').filter_map(parse_mount).collect();
    let entries = || cgroup.split(|b| *b == b'\n').filter_map(parse_entry);
    let v1: Vec<_> =
        mounts.iter().filter(|mount| mount.kind == b"cgroup" && has_word(mount.options, b"devices")).collect();
    if !v1.is_empty()
        && let Some((_, path)) = entries().find(|(controllers, _)| has_word(controllers, b"devices"))
    {
        return seen_through(&v1, path).map(DeviceCgroup::V1);
    }
    let v2: Vec<_> = mounts.iter().filter(|mount| mount.kind == b"cgroup2").collect();
    if v2.is_empty() {
        return Ok(DeviceCgroup::None);
    }
    match entries().find(|(controllers, _)| controllers.is_empty()) {
        Some((_, path)) => seen_through(&v2, path).map(DeviceCgroup::V2),
        None => bail!("the container's process is in no cgroup v2"),
    }
}

/// Where the cgroup `path` is, through the first of these mounts of its hierarchy that shows it: a mount may show
/// a part only (those of other containers do), and a later one on the same directory hides an earlier one.
fn seen_through(mounts: &[&Mount<'_>], path: &[u8]) -> Result<PathBuf> {
    let path = Path::new(OsStr::from_bytes(path));
    // /../…: outside our cgroup namespace
    let inside = !path.starts_with("/..");
    let shown = mounts.iter().enumerate().find_map(|(at, mount)| {
        let hidden = mounts.iter().skip(at + 1).any(|later| later.point == mount.point);
        let rest = path.strip_prefix(&mount.root).ok().filter(|_| inside && !hidden)?;
        Some(if rest == Path::new("") { mount.point.clone() } else { mount.point.join(rest) })
    });
    shown.with_context(|| format!("the container's cgroup {path:?} is not to be seen in any cgroup mount of this host"))
}

struct Mount<'a> {
    root: PathBuf,
    point: PathBuf,
    kind: &'a [u8],
    options: &'a [u8],
}

/// A line of mountinfo, see proc_pid_mountinfo(5).
fn parse_mount(line: &[u8]) -> Option<Mount<'_>> {
    let mut fields = line.split(|b| *b == b' ');
    let root = fields.nth(3)?;
    let point = fields.next()?;
    let mut after = fields.skip_while(|field| *field != b"-").skip(1);
    let kind = after.next()?;
    let options = after.nth(1)?;
    Some(Mount { root: unescape(root), point: unescape(point), kind, options })
}

/// A line of /proc/<pid>/cgroup, see cgroups(7): `4:devices:/path`, or `0::/path` for v2.
fn parse_entry(line: &[u8]) -> Option<(&[u8], &[u8])> {
    let mut fields = line.splitn(3, |b| *b == b':').skip(1);
    Some((fields.next()?, fields.next()?))
}

fn has_word(list: &[u8], word: &[u8]) -> bool {
    list.split(|b| *b == b',').any(|item| item == word)
}

/// Blank, tab, newline and backslash are written as octal numbers: `\040`.
fn unescape(field: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, after)) = rest.split_first() {
        let number = || u8::from_str_radix(std::str::from_utf8(after.get(..3)?).ok()?, 8).ok();
        match (first, number()) {
            (b'\\', Some(byte)) => {
                bytes.push(byte);
                rest = after.get(3..).unwrap_or_default();
            }
            _ => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    PathBuf::from(OsString::from_vec(bytes))
}

/// Whether `linux.resources.devices` of config.json lets the container read and write the device: the last entry that
/// speaks of it decides, and an absent type or number speaks of all. In doubt it does not, and a rule is added.
#[must_use]
pub fn already_allowed(entries: &[LinuxDeviceCgroup], rule: DeviceRule) -> bool {
    let speaks = |number: Option<i64>, of: u32| number.is_none_or(|number| number < 0 || number == i64::from(of));
    for entry in entries.iter().rev() {
        let kind = matches!(entry.typ(), None | Some(LinuxDeviceType::A | LinuxDeviceType::C | LinuxDeviceType::U));
        if !kind || !speaks(entry.major(), rule.major) || !speaks(entry.minor(), rule.minor) {
            continue;
        }
        let has = |letter| entry.access().as_ref().is_none_or(|access| access.contains(letter));
        match (entry.allow(), has('r'), has('w')) {
            (true, true, true) => return true,
            (false, true, _) | (false, _, true) => return false,
            _ => {} // half of it, or making nodes
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    const HYBRID: &[u8] = include_bytes!("../../../tests/fixtures/captures/crio-prestart/ctr.mountinfo");
    const IN_HYBRID: &[u8] = include_bytes!("../../../tests/fixtures/captures/kubelet-prestart/ctr.cgroup");

    #[test]
    fn a_captured_hybrid_host_is_v1() {
        let DeviceCgroup::V1(path) = locate(HYBRID, IN_HYBRID).unwrap() else { panic!() };
        assert!(path.starts_with("/sys/fs/cgroup/devices/kubepods/besteffort"), "{path:?}");
    }

    #[test]
    fn what_is_mounted_decides() {
        let v2 = b"30 25 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n";
        let entries = b"5:devices:/a\n1:name=systemd:/a\n0::/a/b c\n";
        let found = |mounts: &[u8]| locate(mounts, entries).unwrap();
        assert_eq!(found(v2), DeviceCgroup::V2("/sys/fs/cgroup/a/b c".into()));
        assert_eq!(found(b"1 1 0:1 / /proc rw - proc proc rw\n"), DeviceCgroup::None);
        assert_eq!(
            found(b"1 1 0:1 / /cg/devices,cpu rw shared:3 - cgroup x rw,devices,cpu\n"),
            DeviceCgroup::V1("/cg/devices,cpu/a".into())
        );
        // a part of the hierarchy, at a path with a blank; a later mount hides an earlier one
        let part = b"1 1 0:1 /x /my\\040cg rw - cgroup2 c rw\n2 1 0:1 /a /my\\040cg rw - cgroup2 c rw\n\
                     3 1 0:1 /other /rootfs/sys/fs/cgroup rw - cgroup2 c rw\n";
        assert_eq!(found(part), DeviceCgroup::V2("/my cg/b c".into()));
        assert_eq!(locate(part, b"0::/a\n").unwrap(), DeviceCgroup::V2("/my cg".into()));
    }

    #[test]
    fn a_cgroup_that_cannot_be_seen_is_an_error() {
        let mount = b"2 1 0:1 /a /cg rw - cgroup2 c rw\n";
        for entries in [&b"0::/b\n"[..], b"0::/../x\n", b"1:cpu:/a\n", b""] {
            assert!(locate(mount, entries).is_err());
        }
    }

    #[test]
    fn the_scope_above_the_process_is_the_containers_too() {
        let of = |path: &str| of_container(Path::new(path), "0f3a");
        assert_eq!(of("/cg/machine.slice/libpod-0f3a.scope/container").len(), 2);
        assert_eq!(of("/cg/machine.slice/libpod-0f3a.scope").len(), 1);
        assert_eq!(of_container(Path::new("/cg/a/b"), "").len(), 1);
    }

    #[test]
    fn config_json_is_read_from_the_end() {
        let nvidia0 = DeviceRule { major: 195, minor: 0 };
        for (entries, allowed) in [
            ("[]", false),
            (r#"[{"allow":false,"access":"rwm"},{"allow":true,"type":"c","major":195,"minor":0,"access":"rw"}]"#, true),
            (
                r#"[{"allow":false,"access":"rwm"},{"allow":true,"type":"c","major":195,"minor":1,"access":"rw"}]"#,
                false,
            ),
            (r#"[{"allow":true,"type":"c","major":195,"access":"rwm"}]"#, true),
            (r#"[{"allow":true,"type":"c","major":195,"minor":-1,"access":"rwm"}]"#, true),
            (r#"[{"allow":true,"access":"rwm"}]"#, true),
            (r#"[{"allow":true,"type":"a","access":"rwm"}]"#, true),
            (r#"[{"allow":true,"type":"b","major":195,"minor":0,"access":"rwm"}]"#, false),
            (r#"[{"allow":true,"type":"c","major":195,"minor":0,"access":"r"}]"#, false),
            (r#"[{"allow":true,"access":"rwm"},{"allow":false,"type":"c","major":195,"access":"rwm"}]"#, false),
            (r#"[{"allow":true,"access":"rwm"},{"allow":false,"type":"c","major":195,"access":"w"}]"#, false),
            (r#"[{"allow":true,"access":"rwm"},{"allow":false,"access":"m"}]"#, true),
        ] {
            let parsed: Vec<LinuxDeviceCgroup> = serde_json::from_str(entries).unwrap();
            assert_eq!(already_allowed(&parsed, nvidia0), allowed, "{entries}");
        }
    }
}
