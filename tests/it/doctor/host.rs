//! The hosts that `doctor` examines: directories that look like a host.

use std::sync::OnceLock;

use crate::driver::FakeDriver;
use crate::support::{scratch, sh, shell, source};

/// A driver root of `make-root` in a host like openSUSE: GPUs in sysfs, modules, Podman and CRI-O with the hook.
pub(super) fn good_host() -> &'static FakeDriver {
    static HOST: OnceLock<FakeDriver> = OnceLock::new();
    HOST.get_or_init(|| {
        let fake = FakeDriver::new(&["--gpus", "8"]);
        let (root, shipped) = (fake.root.display(), source("."));
        let script = format!(
            r#"cd '{root}'
            mkdir -p sys/bus/pci/drivers/nvidia sys/fs/cgroup sys/fs/selinux/booleans run/systemd/system run/nvidia-persistenced \
                usr/share/containers/oci/hooks.d etc/containers \
                etc/nvidia-container-runtime etc/crio/crio.conf.d run/systemd/journal dev/char usr/libexec
            for bus in proc/driver/nvidia/gpus/*; do
                device=sys/bus/pci/devices/${{bus##*/}}; mkdir -p $device
                echo 0x10de >$device/vendor; echo 0x030200 >$device/class; ln -s ../../drivers/nvidia $device/driver
            done
            printf 'nvidia_uvm 1 0 - Live 0x0\nnvidia 2 1 nvidia_uvm, Live 0x0\n' >proc/modules
            printf 'Character devices:\n195 nvidia\n511 nvidia-uvm\n' >proc/devices
            touch sys/fs/cgroup/cgroup.controllers run/systemd/journal/socket
            for link in 195:255 195:254 511:0 511:1 195:0 195:1 195:2 195:3 195:4 195:5 195:6 195:7; do
                ln -s ../null dev/char/$link; done
            touch dev/null
            for name in nvcuvid nvidia-encode nvidia-glcore nvidia-ngx; do
                cp usr/lib/x86_64-linux-gnu/libnvidia-cfg.so.535.183.01 usr/lib/x86_64-linux-gnu/lib$name.so.535.183.01; done
            echo 1 >sys/fs/selinux/enforce; echo '1 1' >sys/fs/selinux/booleans/container_use_devices
            echo '0 0' >sys/fs/selinux/booleans/container_use_xserver_devices
            printf 'ID="opensuse-leap"\nID_LIKE="suse opensuse"\n' >etc/os-release
            program() {{ printf '#!/bin/sh\necho "%s"\n' "$2" >usr/bin/$1; chmod 755 usr/bin/$1; }}
            program podman 'podman version 4.9.5'; program crio 'crio version 1.30.2'
            program crun 'crun version 1.20'; program runc 'runc version 1.2.6'
            echo '#!/bin/sh' >usr/bin/oci-nvidia-hook; chmod 755 usr/bin/oci-nvidia-hook
            cp '{shipped}/hooks.d/oci-nvidia-hook.json' usr/share/containers/oci/hooks.d
            sed '/^\[nvidia-container-cli/i accept-nvidia-visible-devices-envvar-when-unprivileged = false' \
                '{shipped}/config/config.toml' >etc/nvidia-container-runtime/config.toml
            chmod 644 etc/nvidia-container-runtime/config.toml"#,
            shipped = shipped.display()
        );
        sh(&script).ok();
        let socket = fake.root.join("run/nvidia-persistenced/socket");
        let kind = rustix::fs::FileType::Socket;
        rustix::fs::mknodat(rustix::fs::CWD, socket, kind, rustix::fs::Mode::from_raw_mode(0o666), 0).unwrap();
        fake
    })
}

/// A copy of that host, changed by a script that runs in its top directory.
pub(super) fn changed(script: &str) -> tempfile::TempDir {
    let dir = scratch();
    shell!(
        "cp -a '{}'/. '{1}'; cd '{1}'; {script}",
        good_host().root.display(),
        dir.path().display()
    );
    dir
}
