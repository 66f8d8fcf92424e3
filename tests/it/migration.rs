//! The commands of docs/migration.md for Debian, as an administrator copies them, with packages that own the same files as NVIDIA's.
//! `toolkit` has those for openSUSE, and `cdi_units` those that stop the toolkit's services.

use std::path::Path;

use crate::deb;
use crate::docs::{blocks, removal_commands};
use crate::support::{Need, read, source};

const NEEDS: &[Need] = &[
    Need::Root,
    Need::Programs(&["dpkg-buildpackage", "dh", "cc", "apt-get"]),
];

tests! {
    NEEDS => debian_moves_to_our_package_and_back;
}

/// Builds and installs packages with the names and the important files of NVIDIA's toolkit 1.18.
const TOOLKIT: &str = r#"
toolkit() {
  for name in libnvidia-container1 libnvidia-container-tools nvidia-container-toolkit-base nvidia-container-toolkit; do
    tree=/mnt/toolkit/$name
    mkdir -p "$tree/DEBIAN" "$tree/usr/bin" "$tree/etc/nvidia-container-runtime"
    printf 'Package: %s\nVersion: 1.18.0-1\nArchitecture: all\nMaintainer: test\nDescription: test\n' $name >"$tree/DEBIAN/control"
    touch "$tree/usr/bin/$name"
    if [ $name = nvidia-container-toolkit-base ]; then
      touch "$tree/usr/bin/nvidia-ctk"
      echo '# NVIDIA' >"$tree/etc/nvidia-container-runtime/config.toml"
      echo /etc/nvidia-container-runtime/config.toml >"$tree/DEBIAN/conffiles"
    else
      rmdir "$tree/etc/nvidia-container-runtime" "$tree/etc"
    fi
    dpkg-deb -Znone --root-owner-group -b "$tree" "/mnt/toolkit/$name.deb" >/dev/null
  done
  install --force-confold -i /mnt/toolkit/*.deb
}
"#;

fn debian_moves_to_our_package_and_back() {
    let page = read(source("docs/migration.md"));
    let (_, section) = page.split_once("### Debian and Ubuntu\n").unwrap();
    let commands = blocks(section, "sh")[0];
    let remove = &removal_commands("Debian, Ubuntu")[0];
    let config = "/etc/nvidia-container-runtime/config.toml";
    let script = format!(
        "{TOOLKIT}\
         printf 'APT::Get::Assume-Yes \"true\";\\nAPT::Install-Recommends \"false\";\\nAPT::Sandbox::User \"root\";\\n' \
           >/etc/apt/apt.conf.d/99test\n\
         state() {{\n\
           dpkg-query -W -f '${{db:Status-Abbrev}} ${{Package}}\\n' '*nvidia-container*' 'oci-nvidia-*' 2>/dev/null | \
             sed -n 's/^ii *//p'\n\
           cat {config}\n\
         }}\n\
         mkdir -p /mnt/clone/target; ln -s '{debs}' /mnt/clone/target/deb; cd /mnt/clone\n\
         toolkit\n\
         echo 'disable-require = true' >{config}\n\
         cat >commands <<'END'\n{commands}\nEND\n\
         sh commands </dev/null >/mnt/log 2>&1 || [ $? -le 3 ] || {{ cat /mnt/log >&2; exit 1; }}\n\
         grep -q ' checks passed' /mnt/log || {{ cat /mnt/log >&2; exit 1; }}\n\
         state\n\
         {{ {remove}; }} </dev/null >/mnt/log 2>&1 || {{ cat /mnt/log >&2; exit 1; }}\n\
         toolkit\n\
         state",
        debs = deb::packages().display(),
    );
    let stdout = deb::on_host(&script, Path::new("/nonexistent")).ok();
    assert_eq!(
        stdout,
        "oci-nvidia-hook\n\
         disable-require = true\n\
         libnvidia-container-tools\n\
         libnvidia-container1\n\
         nvidia-container-toolkit\n\
         nvidia-container-toolkit-base\n\
         disable-require = true\n"
    );
}
