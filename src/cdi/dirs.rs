//! Where an engine looks for specs, by its own configuration.

use std::path::PathBuf;

use super::engine::{Engine, Kind};
use crate::driver::DriverRoot;
use crate::engine::settings::Settings;
use crate::engine::{self, Version, files};

/// Where engines look that are not told otherwise, the least important first.
pub const DEFAULT: [&str; 2] = ["/etc/cdi", "/var/run/cdi"];

/// The directories of an engine of root's.
#[must_use]
pub fn read(engine: Engine, host: &DriverRoot) -> Vec<PathBuf> {
    let version = Some(Version(engine.version.0, engine.version.1, 0));
    let kind = match engine.kind {
        Kind::Podman => engine::Kind::Podman,
        Kind::Crio => engine::Kind::Crio,
    };
    let mut settings = Settings::default();
    for file in files::of(&kind, version, host) {
        if let Ok(bytes) = host.read(&file) {
            settings.add(&file, &String::from_utf8_lossy(&bytes), &kind, version);
        }
    }
    settings.cdi_dirs
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::paths::HostPath;

    #[test]
    fn later_files_win() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        let host = DriverRoot::open(&HostPath::new(root.path())).unwrap();
        let [crio, podman] = [Kind::Crio, Kind::Podman].map(|kind| Engine { kind, version: (4, 3) });
        assert_eq!(read(crio, &host), DEFAULT.map(PathBuf::from));
        write("etc/crio/crio.conf", "[crio.runtime]\ncdi_spec_dirs = [\"/a\"]");
        write("etc/crio/crio.conf.d/10-x.conf", "[crio.runtime]\ncdi_spec_dirs = [\"/b\"]");
        write("etc/crio/crio.conf.d/20-x.conf", "[crio.runtime]\nlog_level = \"debug\"");
        write("etc/crio/crio.conf.d/30-x.conf", "[crio.runtime]\ncdi_spec_dirs = []");
        write("etc/crio/crio.conf.d/40-x.conf", "[crio");
        assert_eq!(read(crio, &host), [PathBuf::from("/b")]);
        assert_eq!(read(podman, &host), DEFAULT.map(PathBuf::from));
    }
}
