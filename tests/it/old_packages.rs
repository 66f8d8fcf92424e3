//! The packages of a version with the stage precreate, for tests of upgrades: with the files and the scripts that an upgrade must remove.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::{HOOK, nvml_program, run, sh, source};

/// What the package for Podman, or its script, has created. Nothing of it is left after an upgrade.
pub const LEFT: [&str; 3] = [
    "etc/containers/containers.conf.d/50-oci-nvidia-hook.conf",
    "usr/share/containers/oci/hooks.podman.d",
    "usr/share/oci-nvidia-hook/podman",
];
/// The name of the package.
pub const PODMAN: &str = "oci-nvidia-hook-podman";

/// Builds the RPM packages of this version in a directory. Returns the main package and the one for Podman.
pub fn rpms(dir: &Path, version: &str) -> [PathBuf; 2] {
    let files = source("tests/fixtures/podman-package");
    let top = dir.join("old-rpm");
    let mut build = Command::new("rpmbuild");
    build.args(["-bb", "--quiet"]);
    for definition in [
        format!("_topdir {}", top.display()),
        format!("from {}", files.display()),
        format!("old {version}"),
    ] {
        build.args(["--define", &definition]);
    }
    run(build.arg(files.join("old.spec"))).ok();
    ["oci-nvidia-hook", PODMAN].map(|name| {
        let find = format!("ls '{}'/RPMS/*/{name}-[0-9]*.rpm", top.display());
        PathBuf::from(sh(&find).ok().trim())
    })
}

/// Builds the Debian packages in a directory, of a version before this one. The program of the main package is the tested one, in front of
/// which a script has the stage.
pub fn debs(dir: &Path) -> [PathBuf; 2] {
    let script = format!(
        r#"cd "$1"; files=$2; mkdir -p main/DEBIAN main/usr/bin main/usr/lib/oci-nvidia-hook podman/DEBIAN
        control() {{ printf '%s\n' "Package: $1" "Version: 0.1.0-0" "Architecture: $2" 'Maintainer: test' 'Description: test' "$3"; }}
        control oci-nvidia-hook amd64 'Section: admin' >main/DEBIAN/control
        control {PODMAN} all 'Depends: oci-nvidia-hook (>= 0.1.0-0)' >podman/DEBIAN/control
        cp '{HOOK}' main/usr/lib/oci-nvidia-hook/hook; cp '{nvml}' main/usr/lib/oci-nvidia-hook
        cat >main/usr/bin/oci-nvidia-hook <<'END'
#!/bin/sh
[ "${{1-}}" != precreate ] || set -- edit-config
exec /usr/lib/oci-nvidia-hook/hook "$@"
END
        chmod 755 main/usr/bin/oci-nvidia-hook
        install -D -m 644 -t main/usr/share/containers/oci/hooks.d "$3"
        cp "$files"/postinst "$files"/prerm "$files"/postrm podman/DEBIAN
        chmod 755 podman/DEBIAN/p*
        install -D -m 644 -t podman/usr/share/containers/oci/hooks.podman.d "$files/oci-nvidia-hook-precreate.json"
        install -D -m 644 -t podman/usr/share/oci-nvidia-hook/podman "$files/50-oci-nvidia-hook.conf"
        install -D -m 755 -t podman/usr/share/oci-nvidia-hook/podman "$files/drop-in"
        for name in main podman; do dpkg-deb -Znone --root-owner-group -b $name $name.deb >/dev/null; done"#,
        nvml = nvml_program().display()
    );
    let mut build = Command::new("sh");
    build.args(["-euc", &script, "sh"]).arg(dir);
    build
        .arg(source("tests/fixtures/podman-package"))
        .arg(source("hooks.d/oci-nvidia-hook.json"));
    run(&mut build).ok();
    ["main.deb", "podman.deb"].map(|name| dir.join(name))
}
