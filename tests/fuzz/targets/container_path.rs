//! Paths in a container: the first line is a directory, the second a name in it.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path};

use base::paths::ContainerPath;
use nvidia_host::request::{RequestMount, mounts};

use super::check_error;

/// No path leaves its directory.
pub fn run(data: &[u8]) {
    let at = data
        .iter()
        .position(|byte| *byte == b'\n')
        .unwrap_or(data.len());
    let (dir, name) = data.split_at(at);
    let (dir, name) = (
        OsStr::from_bytes(dir),
        OsStr::from_bytes(name.get(1..).unwrap_or_default()),
    );
    if let Some(path) = ContainerPath::new(dir) {
        check(&path);
        if let Some(below) = path.join(name) {
            check(&below);
            assert!(
                below.relative().starts_with(path.relative()) && below != path,
                "{below} is not below {path}"
            );
        }
    }
    let mount = RequestMount {
        source: Path::new("/dev/null"),
        destination: Path::new(dir),
    };
    match mounts::parse(&[mount], true) {
        Ok(request) => {
            for name in request.devices.iter().chain(&request.imex) {
                assert!(
                    !name.is_empty()
                        && Path::new(name)
                            .components()
                            .all(|part| part != Component::ParentDir)
                );
            }
        }
        Err(error) => check_error(&error),
    }
}

fn check(path: &ContainerPath) {
    let plain = |part: Component<'_>| matches!(part, Component::Normal(name) if !name.as_bytes().contains(&0));
    assert!(path.relative().components().all(plain), "{path}");
    assert!(path.relative().components().count() > 0, "{path}");
    assert_eq!(
        ContainerPath::new(path.absolute()).as_ref(),
        Some(path),
        "what is clean stays"
    );
    assert_eq!(
        path.parent()
            .map_or_else(
                || ContainerPath::new(path.file_name()),
                |dir| dir.join(path.file_name())
            )
            .as_ref(),
        Some(path)
    );
}
