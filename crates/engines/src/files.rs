//! Lists the configuration files of an engine, sorted by ascending priority: containers.conf(5), containers-config(5), crio.conf(5),
//! crio.conf.d(5).

use std::path::{Path, PathBuf};

use base::tree::Tree;

use super::{EngineKind, Version};

/// The first Podman that also reads `containers.rootless.conf`.
const ROOTLESS_CONF: Version = Version(5, 6, 0);
/// The first Podman that, as root, also reads the file in the home directory.
const ROOTS_HOME: Version = Version(5, 0, 0);
/// The first Podman that reads only one main file, and the drop-ins of all directories in the order of their names.
const ONE_MAIN_FILE: Version = Version(6, 0, 0);
/// The versions since which Podman reads other files, or in another order.
pub(crate) const MILESTONES: [Version; 3] = [ROOTS_HOME, ROOTLESS_CONF, ONE_MAIN_FILE];

/// Returns the configuration files of an engine of this version, including missing ones. An unknown version counts as an old one.
pub fn list(kind: &EngineKind, version: Option<Version>, host: &Tree) -> Vec<PathBuf> {
    let version = version.unwrap_or_default();
    match kind {
        EngineKind::Crio => crio(host),
        EngineKind::Docker => vec![PathBuf::from("/etc/docker/daemon.json")],
        EngineKind::Podman | EngineKind::PodmanOf(_) if version >= ONE_MAIN_FILE => {
            podman_6(kind, host)
        }
        EngineKind::Podman => {
            let mut files = system(host);
            if version >= ROOTS_HOME {
                files.extend(with_drop_ins(
                    host,
                    Path::new("/root/.config/containers/containers.conf"),
                ));
            }
            files
        }
        EngineKind::PodmanOf(user) => {
            let mut files = system(host);
            if version >= ROOTLESS_CONF {
                let rootless = Path::new("/etc/containers/containers.rootless.conf");
                files.extend(with_drop_ins(host, rootless));
                files.extend(drop_ins(
                    host,
                    &drop_in_dir(rootless).join(user.uid.to_string()),
                ));
            }
            files.extend(home(kind).iter().flat_map(|file| with_drop_ins(host, file)));
            files
        }
    }
}

fn system(host: &Tree) -> Vec<PathBuf> {
    let mut files = vec![PathBuf::from("/usr/share/containers/containers.conf")];
    files.extend(with_drop_ins(
        host,
        Path::new("/etc/containers/containers.conf"),
    ));
    files
}

fn home(kind: &EngineKind) -> Option<PathBuf> {
    let home = match kind {
        EngineKind::PodmanOf(user) => user.home.clone()?,
        _ => PathBuf::from("/root"),
    };
    Some(home.join(".config/containers/containers.conf"))
}

/// Returns the files of Podman 6: the user's main file replaces the administrator's, and this one the distribution's. A drop-in file
/// replaces those with the same name in directories of lower priority.
fn podman_6(kind: &EngineKind, host: &Tree) -> Vec<PathBuf> {
    let bases = ["/usr/share/containers", "/etc/containers"].map(PathBuf::from);
    let user = home(kind);
    let mut mains = bases
        .iter()
        .map(|base| base.join("containers.conf"))
        .chain(user.clone());
    let main = mains.rfind(|file| host.locate(file).is_ok());
    let mut dirs = Vec::new();
    for base in &bases {
        dirs.push(base.join("containers.conf.d"));
        match kind {
            EngineKind::PodmanOf(user) => {
                let rootless = base.join("containers.rootless.conf.d");
                let own = rootless.join(user.uid.to_string());
                dirs.extend([rootless, own]);
            }
            _ => dirs.push(base.join("containers.rootful.conf.d")),
        }
    }
    dirs.extend(user.map(|file| drop_in_dir(&file)));
    let mut files: Vec<PathBuf> = Vec::new();
    for file in dirs.iter().flat_map(|dir| drop_ins(host, dir)) {
        files.retain(|known| known.file_name() != file.file_name());
        let place = files
            .iter()
            .position(|known| known.file_name() > file.file_name())
            .unwrap_or(files.len());
        files.insert(place, file);
    }
    files.splice(0..0, main);
    files
}

fn with_drop_ins(host: &Tree, file: &Path) -> Vec<PathBuf> {
    let mut files = vec![file.to_owned()];
    files.extend(drop_ins(host, &drop_in_dir(file)));
    files
}

fn drop_in_dir(file: &Path) -> PathBuf {
    let mut dir = file.as_os_str().to_owned();
    dir.push(".d");
    PathBuf::from(dir)
}

fn drop_ins(host: &Tree, dir: &Path) -> Vec<PathBuf> {
    let names = host
        .names(dir)
        .into_iter()
        .filter(|name| name.to_str().is_some_and(|name| name.ends_with(".conf")));
    names.map(|name| dir.join(name)).collect()
}

/// Returns the files of CRI-O, which reads drop-in files with any name, also in subdirectories.
fn crio(host: &Tree) -> Vec<PathBuf> {
    let mut files = vec![PathBuf::from("/etc/crio/crio.conf")];
    walk(host, Path::new("/etc/crio/crio.conf.d"), 0, &mut files);
    files
}

fn walk(host: &Tree, dir: &Path, depth: usize, files: &mut Vec<PathBuf>) {
    const DEEPEST: usize = 8;
    for path in host.names(dir).into_iter().map(|name| dir.join(name)) {
        let is_dir = host
            .locate(&path)
            .is_ok_and(|found| found.kind == rustix::fs::FileType::Directory);
        if !is_dir {
            files.push(path);
        } else if depth < DEEPEST {
            walk(host, &path, depth + 1, files);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::User;
    use base::paths::HostPath;

    #[test]
    fn in_the_order_of_each_version() {
        let dir = tempfile::tempdir().unwrap();
        let user = User {
            name: "tux".into(),
            uid: 1000,
            home: Some("/home/tux".into()),
        };
        for file in [
            "usr/share/containers/containers.conf",
            "etc/containers/containers.conf",
            "etc/containers/containers.conf.d/20.conf",
            "etc/containers/containers.conf.d/10.conf",
            "etc/containers/containers.conf.d/10.conf.rpmsave",
            "etc/containers/containers.rootless.conf.d/15.conf",
            "etc/containers/containers.rootless.conf.d/1000/16.conf",
            "usr/share/containers/containers.conf.d/20.conf",
            "home/tux/.config/containers/containers.conf.d/05.conf",
            "etc/crio/crio.conf.d/10-a",
            "etc/crio/crio.conf.d/05/b.conf",
        ] {
            let path = dir.path().join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "").unwrap();
        }
        let host = Tree::open(&HostPath::new(dir.path())).unwrap();
        let of_user = EngineKind::PodmanOf(user);
        let old = [
            "/usr/share/containers/containers.conf",
            "/etc/containers/containers.conf",
            "/etc/containers/containers.conf.d/10.conf",
            "/etc/containers/containers.conf.d/20.conf",
        ];
        let home = [
            "/home/tux/.config/containers/containers.conf",
            "/home/tux/.config/containers/containers.conf.d/05.conf",
        ];
        let rootless = [
            "/etc/containers/containers.rootless.conf",
            "/etc/containers/containers.rootless.conf.d/15.conf",
            "/etc/containers/containers.rootless.conf.d/1000/16.conf",
        ];
        for (kind, version, expected) in [
            (&EngineKind::Podman, None, old.to_vec()),
            (
                &EngineKind::Podman,
                Some(Version(5, 0, 0)),
                [&old[..], &["/root/.config/containers/containers.conf"]].concat(),
            ),
            (&of_user, Some(Version(4, 3, 1)), [&old[..], &home].concat()),
            (
                &of_user,
                Some(Version(5, 6, 0)),
                [&old[..], &rootless, &home].concat(),
            ),
            (
                &of_user,
                Some(Version(6, 0, 0)),
                // One main file; the last drop-in with a name replaces the others.
                [
                    &["/etc/containers/containers.conf", home[1], old[2]],
                    &rootless[1..],
                    &[old[3]],
                ]
                .concat(),
            ),
            (
                &EngineKind::Podman,
                Some(Version(6, 0, 0)),
                vec!["/etc/containers/containers.conf", old[2], old[3]],
            ),
            (
                &EngineKind::Crio,
                None,
                vec![
                    "/etc/crio/crio.conf",
                    "/etc/crio/crio.conf.d/05/b.conf",
                    "/etc/crio/crio.conf.d/10-a",
                ],
            ),
        ] {
            let expected: Vec<_> = expected.into_iter().map(PathBuf::from).collect();
            assert_eq!(list(kind, version, &host), expected, "{kind} {version:?}");
        }
    }
}
