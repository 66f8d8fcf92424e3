//! Determines whether a cgroup belongs to the container alone. Pure.
//!
//! A container can run in the cgroup of the service that started it, with crun and `--cgroups=disabled`, or if the runtime
//! cannot create a cgroup. Device rules that are added there apply to the whole service and stay after the container has ended.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

/// What identifies the container's own cgroup.
#[derive(Clone, Copy, Debug)]
pub(super) struct ContainerCgroup<'a> {
    pub(super) id: &'a str,
    /// `linux.cgroupsPath` of config.json; empty if it is missing. `None`: the caller has named the process, and guarantees
    /// that the cgroup is the container's.
    pub(super) cgroups_path: Option<&'a str>,
    /// The cgroup of this process and the runtime
    pub(super) caller: Option<&'a Path>,
}

impl ContainerCgroup<'_> {
    /// Returns the cgroups between `path` and `mount` whose device rules affect only this container: the cgroup of its init
    /// process, and its ancestors up to the one with the container's name. Empty if other processes share init's cgroup.
    ///
    /// crun puts init into a sub-cgroup (`libpod-<id>.scope/container`), but its device program, or systemd's, can be attached
    /// to the scope; both must allow. Further up are slices and services that other processes share.
    pub(super) fn own(&self, mount: &Path, path: &Path) -> Vec<PathBuf> {
        let mut inside = Vec::new();
        let mut has_name = false;
        for cgroup in path.ancestors() {
            if cgroup == mount || has_name {
                break;
            }
            inside.push(cgroup);
            has_name = self.is_named(mount, cgroup);
        }
        if !has_name {
            inside.truncate(usize::from(self.cgroups_path.is_none()));
        }
        let mut own = Vec::new();
        for cgroup in inside {
            if self.is_callers(cgroup) {
                break;
            }
            own.push(cgroup.to_owned());
        }
        own
    }

    /// Reports whether the runtime is in the cgroup or below it, so that its device rules apply to the runtime too.
    fn is_callers(&self, cgroup: &Path) -> bool {
        self.cgroups_path.is_some() && self.caller.is_some_and(|caller| caller.starts_with(cgroup))
    }

    fn is_named(&self, mount: &Path, cgroup: &Path) -> bool {
        let is_at = |path| is_at(mount, cgroup, path);
        carries_id(cgroup, self.id) || self.cgroups_path.is_some_and(is_at)
    }
}

/// Engines name the container's cgroup `<id>`, `<engine>-<id>` or `<engine>-<id>.scope` (`libpod-`, `libpod-payload-`, `crio-`,
/// `docker-`, `cri-containerd-`, `runc-`); a name that only contains the id is not enough, as runtimes accept an id like
/// "machine".
pub(super) fn carries_id(cgroup: &Path, id: &str) -> bool {
    let Some(name) = cgroup.file_name().and_then(OsStr::to_str) else {
        return false;
    };
    let name = name.strip_suffix(".scope").unwrap_or(name);
    match name.strip_suffix(id) {
        Some(engine) if !id.is_empty() => engine.is_empty() || engine.ends_with('-'),
        _ => false,
    }
}

/// Reports whether `linux.cgroupsPath` names `cgroup`, as a path or as `slice:prefix:name` for systemd.
fn is_at(mount: &Path, cgroup: &Path, cgroups_path: &str) -> bool {
    let below = cgroup.strip_prefix(mount).unwrap_or(cgroup);
    if let [_slice, prefix, name] = cgroups_path.split(':').collect::<Vec<_>>().as_slice() {
        let unit = match (prefix.is_empty(), name.ends_with(".slice")) {
            (_, true) => (*name).to_owned(),
            (true, false) => format!("{name}.scope"),
            (false, false) => format!("{prefix}-{name}.scope"),
        };
        return !name.is_empty() && below.file_name().is_some_and(|last| last == unit.as_str());
    }
    let asked = Path::new(cgroups_path.trim_start_matches('/'));
    !asked.as_os_str().is_empty() && below.ends_with(asked)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNT: &str = "/sys/fs/cgroup";

    fn own(path: &str, id: &str, cgroups_path: Option<&str>, caller: &str) -> Vec<String> {
        let caller = format!("{MOUNT}{caller}");
        let container = ContainerCgroup {
            id,
            cgroups_path,
            caller: Some(Path::new(&caller)),
        };
        let found = container.own(Path::new(MOUNT), Path::new(&format!("{MOUNT}{path}")));
        found
            .into_iter()
            .map(|path| path.to_str().unwrap()[MOUNT.len()..].to_owned())
            .collect()
    }

    #[test]
    fn own_cgroups_end_where_the_name_is() {
        let podman = "/machine.slice/libpod-0a.scope/container";
        assert_eq!(
            own(podman, "0a", Some(""), "/x"),
            [podman, "/machine.slice/libpod-0a.scope"]
        );
        for (path, id, cgroups_path) in [
            (
                "/kubepods.slice/crio-0a.scope",
                "0a",
                "kubepods.slice:crio:0a",
            ),
            ("/libpod_parent/libpod-0a", "0a", "/libpod_parent/libpod-0a"),
            (
                "/user.slice/x.service/libpod-payload-0a",
                "0a",
                "/user.slice/x.service/libpod-payload-0a",
            ),
            ("/docker/0a", "0a", "/docker/0a"),
            ("/0a", "0a", ""),
            // names from cgroupsPath
            ("/foo/bar", "0a", "/foo/bar"),
            ("/nested/foo/bar", "0a", "foo/bar"),
            ("/system.slice/onh-box.scope", "0a", "system.slice:onh:box"),
            ("/system.slice/box.scope", "0a", "system.slice::box"),
            ("/system.slice/box.slice", "0a", "system.slice:x:box.slice"),
        ] {
            assert_eq!(
                own(path, id, Some(cgroups_path), "/x.service"),
                [path],
                "{cgroups_path}"
            );
        }
        assert_eq!(
            own("/foo/container", "0a", Some("/foo"), "/x"),
            ["/foo/container", "/foo"]
        );
    }

    #[test]
    fn a_cgroup_of_others_is_not_the_containers() {
        for (what, path, id, cgroups_path, caller) in [
            (
                "crun without cgroups",
                "/system.slice/web.service",
                "0a",
                "",
                "/system.slice/web.service",
            ),
            (
                "and with a path that is not used",
                "/system.slice/web.service",
                "0a",
                "/libpod-0a",
                "/system.slice/web.service",
            ),
            (
                "below the caller's",
                "/system.slice/web.service/sub",
                "0a",
                "",
                "/system.slice/web.service",
            ),
            (
                "another's",
                "/machine.slice/libpod-0b.scope",
                "0a",
                "machine.slice:libpod:0a",
                "/x",
            ),
            (
                "the name is in the middle",
                "/machine.slice/libpod-0a-old.scope",
                "0a",
                "",
                "/x",
            ),
            (
                "a longer id that ends like this one",
                "/machine.slice/libpod-x0a.scope",
                "0a",
                "",
                "/x",
            ),
            (
                "a service with the same name",
                "/system.slice/0a",
                "0a",
                "",
                "/system.slice/0a",
            ),
            (
                "a path that is the caller's",
                "/system.slice/web.service",
                "0a",
                "/system.slice/web.service",
                "/system.slice/web.service",
            ),
            ("the root", "", "0a", "", "/x"),
        ] {
            assert!(
                own(path, id, Some(cgroups_path), caller).is_empty(),
                "{what}"
            );
        }
        // A cgroup above it that is the caller's is not included.
        assert_eq!(
            own("/a-0a/inner-0a", "0a", Some(""), "/a-0a/x"),
            ["/a-0a/inner-0a"]
        );
        // Without a config.json, the caller guarantees for the process.
        assert_eq!(
            own("/system.slice/lxc", "process 7", None, "/system.slice/lxc"),
            ["/system.slice/lxc"]
        );
    }
}
