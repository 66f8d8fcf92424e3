//! The script of the package -podman that adds and removes the drop-in file of Podman's configuration. `rpm.rs` and `deb.rs` run it with
//! the packages.

use std::path::Path;
use std::process::Command;

use crate::support::{Ran, run, scratch, sh, source};

tests! {
    &[] => it_is_added_if_no_other_file_has_a_list, an_edited_file_remains;
}

const FILE: &str = "etc/containers/containers.conf.d/50-oci-nvidia-hook.conf";

fn drop_in(action: &str, root: &Path) -> Ran {
    run(Command::new(source("packaging/podman/drop-in"))
        .arg(action)
        .arg(root))
}

fn it_is_added_if_no_other_file_has_a_list() {
    for (file, text, added) in [
        ("etc/containers/registries.conf", "hooks_dir = []", true),
        (
            "etc/containers/containers.conf",
            "[engine]\n#hooks_dir = [\n# \"/a\",\n#]\n",
            true,
        ),
        (
            "usr/share/containers/containers.conf",
            "[engine]\nhooks_dir = [\"/a\"]\n",
            false,
        ),
        (
            "etc/containers/containers.conf",
            "[engine]\n  \"hooks_dir\"=[\"/a\"]\n",
            false,
        ),
        (
            "etc/containers/containers.conf",
            "engine.hooks_dir = [\"/a\"]\n",
            false,
        ),
        (
            "etc/containers/containers.conf.d/10-a.conf",
            "engine = { hooks_dir = [\"/a\"] }\n",
            false,
        ),
        (
            "etc/containers/containers.rootless.conf.d/99-a.conf",
            "[engine]\nhooks_dir = [\"/a\"]\n",
            false,
        ),
    ] {
        let dir = scratch();
        let path = dir.path().join(file);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, text).unwrap();
        let ran = drop_in("add", dir.path());
        assert_eq!(
            (ran.code, dir.path().join(FILE).is_file()),
            (Some(0), added),
            "{file}: {text}"
        );
        assert_eq!(
            ran.stderr
                .contains(&format!("{} sets hooks_dir", path.display())),
            !added,
            "{}",
            ran.stderr
        );
        drop_in("remove", dir.path()).ok();
        assert!(!dir.path().join(FILE).exists());
    }
}

fn an_edited_file_remains() {
    let dir = scratch();
    let file = dir.path().join(FILE);
    sh(&format!(
        "umask 077; '{}' add '{}'",
        source("packaging/podman/drop-in").display(),
        dir.path().display()
    ))
    .ok();
    let mode = |path: &Path| {
        std::os::unix::fs::PermissionsExt::mode(&path.metadata().unwrap().permissions()) & 0o777
    };
    assert_eq!(
        (mode(&file), mode(file.parent().unwrap())),
        (0o644, 0o755),
        "rootless Podman reads it"
    );
    for text in [
        "# An empty file turns the stage off.\n",
        "[engine]\nhooks_dir = [\"/mine\"]\n",
    ] {
        std::fs::write(&file, text).unwrap();
        drop_in("add", dir.path()).ok();
        assert!(
            drop_in("remove", dir.path())
                .stderr
                .contains("has been edited")
        );
        assert_eq!(std::fs::read_to_string(&file).unwrap(), text);
    }
}
