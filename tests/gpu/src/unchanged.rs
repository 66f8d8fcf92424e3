//! What the checks must not change: a list of names, modes, sizes and times, made before and after.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Directories and files that are listed with all below them.
const PLACES: [&str; 14] = [
    "/etc/cdi",
    "/etc/ld.so.cache",
    "/etc/nvidia-container-runtime",
    "/etc/containers",
    "/run/cdi",
    "/run/nri",
    "/run/oci-nvidia-hook",
    "/run/oci-nvidia-kubelet-plugin",
    "/run/oci-nvidia-mps",
    "/usr/share/containers/oci/hooks.d",
    "/var/lib/kubelet/device-plugins",
    "/var/lib/kubelet/plugins_registry",
    "/etc/kubernetes/node-feature-discovery",
    "/dev/nvidia-caps",
];

/// The state: an entry for each file, module and mount.
pub type State = BTreeMap<String, String>;

/// Lists the state.
pub fn list() -> State {
    let mut state = State::new();
    PLACES
        .iter()
        .for_each(|place| add(Path::new(place), &mut state));
    for entry in std::fs::read_dir("/dev").into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with("nvidia") {
            add(&entry.path(), &mut state);
        }
    }
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    for module in read("/proc/modules")
        .lines()
        .filter_map(|line| line.split(' ').next())
    {
        if module.starts_with("nvidia") {
            state.insert(format!("module {module}"), "loaded".to_owned());
        }
    }
    for mount in read("/proc/self/mountinfo").lines() {
        let fields: Vec<_> = mount.split(' ').collect();
        if let (Some(id), Some(place)) = (fields.first(), fields.get(4)) {
            state.insert(format!("mount {id} {place}"), "mounted".to_owned());
        }
    }
    state
}

fn add(path: &Path, state: &mut State) {
    let Ok(found) = std::fs::symlink_metadata(path) else {
        return;
    };
    // The times of a directory change if a file in it is replaced by an equal one; its entries are listed.
    let what = match found.is_dir() {
        true => format!("{:o} {}:{}", found.mode(), found.uid(), found.gid()),
        false => format!(
            "{:o} {}:{} {} {} {}.{}",
            found.mode(),
            found.uid(),
            found.gid(),
            found.rdev(),
            found.size(),
            found.mtime(),
            found.mtime_nsec()
        ),
    };
    state.insert(path.display().to_string(), what);
    if found.is_dir() {
        let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
        entries.for_each(|entry| add(&entry.path(), state));
    }
}

/// Returns the names that appeared, disappeared or changed.
pub fn differences(before: &State, after: &State) -> Vec<String> {
    let appeared = after
        .keys()
        .filter(|name| !before.contains_key(*name))
        .map(|name| format!("{name} appeared"));
    let others = before
        .iter()
        .filter_map(|(name, was)| match after.get(name) {
            None => Some(format!("{name} disappeared")),
            Some(is) if is != was => Some(format!("{name} changed")),
            Some(_) => None,
        });
    appeared.chain(others).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_found() {
        let state = |entries: &[(&str, &str)]| -> State {
            entries
                .iter()
                .map(|(name, what)| ((*name).to_owned(), (*what).to_owned()))
                .collect()
        };
        let before = state(&[("a", "1"), ("b", "1"), ("c", "1")]);
        let after = state(&[("a", "1"), ("b", "2"), ("d", "1")]);
        assert_eq!(
            differences(&before, &after),
            ["d appeared", "b changed", "c disappeared"]
        );
        assert!(differences(&before, &before).is_empty());
    }
}
