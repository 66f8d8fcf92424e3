//! Our packages on a host with an old package of NVIDIA's toolkit, which owns files of the same names: real rpm and zypper.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::docs::blocks;
use crate::rpm::{CONFIG, Packages, find};
use crate::support::{Need, read, run, scratch, sh, shell, source, write_file};
use crate::zypper::{install_base, zypper};

const NEEDS: &[Need] = &[Need::Root, Need::Programs(&["rpmbuild", "cc", "zypper"])];

tests! {
    NEEDS => zypper_removes_an_old_toolkit, a_new_toolkit_stays;
}

/// The files of openSUSE's package of 2020, and of NVIDIA's up to 1.13.
const OLD: &str = "mkdir -p %{buildroot}/usr/bin %{buildroot}/usr/share/containers/oci/hooks.d %{buildroot}/etc/nvidia-container-runtime\n\
     touch %{buildroot}/usr/bin/nvidia-container-toolkit\n\
     echo '{}' >%{buildroot}/usr/share/containers/oci/hooks.d/oci-nvidia-hook.json\n\
     echo '# NVIDIA' >%{buildroot}/etc/nvidia-container-runtime/config.toml\n\
     %files\n/usr/bin/nvidia-container-toolkit\n/usr/share/containers/oci/hooks.d/oci-nvidia-hook.json\n\
     %config(noreplace) /etc/nvidia-container-runtime/config.toml\n";
/// Since 1.14, NVIDIA's package owns neither, and also provides the name of its predecessor.
const NEW: &str = "mkdir -p %{buildroot}/usr/bin\ntouch %{buildroot}/usr/bin/nvidia-container-runtime-hook\n\
     %files\n/usr/bin/nvidia-container-runtime-hook\n";

/// Builds a package of NVIDIA's toolkit with these files.
fn toolkit(dir: &Path, version: &str, files: &str) -> PathBuf {
    let spec = dir.join("toolkit.spec");
    let head = format!(
        "Name: nvidia-container-toolkit\nVersion: {version}\nRelease: 1\nSummary: x\nLicense: MIT\nBuildArch: noarch\n\
         Provides: nvidia-container-runtime-hook\n%description\nx\n%install\n"
    );
    write_file(&spec, format!("{head}{files}"));
    let top = dir.join("toolkit");
    run(Command::new("rpmbuild")
        .args(["-bb", "--quiet", "--define"])
        .arg(format!("_topdir {}", top.display()))
        .arg(spec))
    .ok();
    PathBuf::from(shell!("find '{}/RPMS' -name '*.rpm'", top.display()).trim())
}

fn zypper_removes_an_old_toolkit() {
    let (host, packages) = (scratch(), &Packages::shared().now);
    let (root, main) = (host.path().join("root"), find(packages, "oci-nvidia-hook"));
    install_base(&root, packages);
    zypper(
        &root,
        "install --allow-unsigned-rpm",
        &[&toolkit(host.path(), "1.13.5", OLD)],
    )
    .ok();
    let config = root.join(CONFIG);
    write_file(&config, "disable-require = true\n");
    // Without an answer, zypper changes nothing, and shows what it would remove.
    let ran = zypper(&root, "install --allow-unsigned-rpm", &[main]);
    assert!(
        ran.code != Some(0)
            && ran
                .stdout
                .contains("deinstallation of nvidia-container-toolkit"),
        "{ran:?}"
    );
    assert!(
        root.join("usr/bin/nvidia-container-toolkit").exists()
            && !root.join("usr/bin/oci-nvidia-hook").exists()
    );
    zypper(
        &root,
        "install --allow-unsigned-rpm --force-resolution",
        &[main],
    )
    .ok();
    assert!(!root.join("usr/bin/nvidia-container-toolkit").exists());
    let hook_file = root.join("usr/share/containers/oci/hooks.d/oci-nvidia-hook.json");
    assert!(read(hook_file).contains("/usr/bin/oci-nvidia-hook"));
    // rpm renames the edited file of a package that it removes.
    assert!(!config.exists());
    let page = read(source("docs/migration.md"));
    let (_, section) = page
        .split_once("## config.toml after the removal\n")
        .unwrap();
    let copied = blocks(section, "sh")[0].replace(" /", &format!(" {}/", root.display()));
    assert!(copied.starts_with("mv "), "{copied}");
    sh(&copied).ok();
    let saved = read(&config);
    assert_eq!(saved, "disable-require = true\n");
}

fn a_new_toolkit_stays() {
    let (host, packages) = (scratch(), &Packages::shared().now);
    let root = host.path().join("root");
    install_base(&root, packages);
    zypper(
        &root,
        "install --allow-unsigned-rpm",
        &[&toolkit(host.path(), "1.17.8", NEW)],
    )
    .ok();
    let config = root.join(CONFIG);
    write_file(&config, "disable-require = true\n");
    zypper(
        &root,
        "install --allow-unsigned-rpm",
        &[find(packages, "oci-nvidia-hook")],
    )
    .ok();
    zypper(&root, "remove", &[Path::new("oci-nvidia-hook")]).ok();
    assert_eq!(read(&config), "disable-require = true\n");
    assert!(root.join("usr/bin/nvidia-container-runtime-hook").exists());
}
