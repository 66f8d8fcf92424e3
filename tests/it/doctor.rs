//! `doctor` on hosts that are directories: a bare one, one without problems, one with many problems, and one for each problem.
//! The output for the first three is in `tests/golden` and must be reviewed when it changes: `UPDATE_GOLDEN=1 cargo test --test it --
//! doctor::`.

use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

use base::paths::HostPath;
use base::report::Finding;
use base::tree::Tree;
use engines::{User, status};
use findings::catalog;
use oci_nvidia_hook::testing::cli::doctor_text::{self, View};
use oci_nvidia_hook::testing::cli::status as status_words;
use oci_nvidia_hook::testing::doctor::{self, Caller, Check, Status};
use serde_json::{Value, json};

use crate::driver::FakeDriver;
use crate::golden;
use crate::json_schema;
use crate::support::{HOOK, Need, run, run_with, scratch, sh, source};

const NEEDS: &[Need] = &[Need::Root, Need::Program("cc")];

tests! {
    &[] => a_bare_host, this_host, the_man_page_explains_each_check;
    NEEDS => a_good_host, a_broken_host, devices_next_to_the_gpus, each_fault_has_its_finding, an_error_is_a_container_that_does_not_start,
        a_spec_is_not_the_hook, the_configuration_of_the_hook_file, a_driver_root_with_files_only, nothing_is_changed, the_health_that_the_kubelet_has,
        one_sentence_for_all_names_of_a_library, a_package_keeps_its_hook_file;
    &[Need::Root, Need::Program("cc"), Need::Program("setpriv")] => a_user_sees_less_and_says_so;
    &[Need::Root, Need::Program("podman"), Need::Program("crun"), Need::Program("runc")] => programs_that_are_asked_change_nothing;
    &[Need::Program("tar")] => bundle;
    &[Need::Root, Need::Program("tar")] => a_link_in_the_place_of_the_log;
}

/// A driver root of `make-root` in a host like openSUSE: GPUs in sysfs, modules, Podman and CRI-O with the hook.
fn good_host() -> &'static FakeDriver {
    static HOST: OnceLock<FakeDriver> = OnceLock::new();
    HOST.get_or_init(|| {
        let fake = FakeDriver::new(&["--gpus", "8"]);
        let (root, shipped) = (fake.root.display(), source("."));
        let script = format!(
            r#"cd '{root}'
            mkdir -p sys/bus/pci/drivers/nvidia sys/fs/cgroup sys/fs/selinux/booleans run/systemd/system run/nvidia-persistenced \
                usr/share/containers/oci/hooks.d usr/share/containers/oci/hooks.podman.d etc/containers/containers.conf.d \
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
            cp '{shipped}/packaging/podman/oci-nvidia-hook-precreate.json' usr/share/containers/oci/hooks.podman.d
            cp '{shipped}/packaging/podman/50-oci-nvidia-hook.conf' etc/containers/containers.conf.d
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
fn changed(script: &str) -> tempfile::TempDir {
    let dir = scratch();
    sh(&format!(
        "cp -a '{}'/. '{1}'; cd '{1}'; {script}",
        good_host().root.display(),
        dir.path().display()
    ))
    .ok();
    dir
}

fn examine(host: &Path, caller: Caller) -> Vec<Check> {
    let host = Tree::open(&HostPath::new(host)).unwrap();
    doctor::examine(&doctor::inspect(&host, None, caller))
}

/// Compares what `doctor`, `doctor --all` and `status` print for a host with the golden files.
#[track_caller]
fn assert_golden(name: &str, dir: &Path) {
    let outcomes = examine(dir, Caller::default());
    let report = status::report(&Tree::open(&HostPath::new(dir)).unwrap(), None);
    let dir = dir.to_str().unwrap();
    let outcomes: Vec<_> = outcomes
        .into_iter()
        .map(|outcome| Check {
            what: below_root(&outcome.what, dir),
            fix: below_root(&outcome.fix, dir),
            ..outcome
        })
        .collect();
    for (command, all) in [("doctor", false), ("doctor --all", true)] {
        golden::check_text(
            &format!("{}-{name}", command.replace(" --", "-")),
            &format!("oci-nvidia-hook {command}"),
            |terminal| doctor_text::text(&outcomes, View { all, is_root: true }, terminal),
        );
    }
    golden::check_text(
        &format!("status-{name}"),
        "oci-nvidia-hook status",
        |terminal| status_words::text(&report, terminal),
    );
}

/// Removes the directory of the host from a text. It can be the driver root, too.
fn below_root(text: &str, dir: &str) -> String {
    text.replace(&format!("{dir:?}"), "\"/\"").replace(dir, "")
}

fn a_bare_host() {
    let dir = scratch();
    assert_golden("bare", dir.path());
}

fn a_good_host() {
    assert_golden("good", &good_host().root);
    let outcomes = examine(&good_host().root, Caller::default());
    let bad: Vec<_> = outcomes
        .iter()
        .filter(|outcome| outcome.status > Status::Skipped)
        .collect();
    assert!(bad.is_empty(), "{bad:?}");
}

/// Of two hook files that start the hook, the fix names the one that no package installs again.
fn a_package_keeps_its_hook_file() {
    for name in ["nvidia-old.json", "z.json"] {
        let dir = changed(&format!(
            "cd usr/share/containers/oci/hooks.d; cp oci-nvidia-hook.json {name}"
        ));
        let outcomes = examine(dir.path(), Caller::default());
        let fixes = outcomes
            .iter()
            .filter(|outcome| outcome.id == Some("ONH-503"))
            .map(|outcome| outcome.fix.as_str());
        let expected = format!("rm /usr/share/containers/oci/hooks.d/{name}");
        assert_eq!(
            fixes.collect::<Vec<_>>(),
            [expected.as_str(); 2],
            "of Podman and of CRI-O"
        );
    }
}

/// Several faults at once, as after a failed update.
fn a_broken_host() {
    let dir = changed(
        "sed -i 's/^driver .*/driver 535.183.01/' usr/lib/*/nvml.conf; rm dev/nvidia-uvm dev/nvidia3; \
         chgrp 4321 dev/nvidia*; chmod 660 dev/nvidia*; sed -i '/container-cli/a user = \"nobody\"' \
             etc/nvidia-container-runtime/config.toml; echo 'bogus = 1' | cat - etc/nvidia-container-runtime/config.toml >c; \
         mv c etc/nvidia-container-runtime/config.toml; rm usr/lib/*/libcuda.so*; rm run/nvidia-persistenced/socket; \
         cp usr/share/containers/oci/hooks.podman.d/*.json usr/share/containers/oci/hooks.d; \
         printf '#!/bin/sh\\necho crun version 1.24\\n' >usr/bin/crun; touch usr/bin/nvidia-ctk; \
         rm etc/containers/containers.conf.d/*; \
         printf '[engine]\\nhooks_dir = [\"/etc/containers/oci/hooks.d\"]\\n' >etc/containers/containers.conf; \
         echo '0 0' >sys/fs/selinux/booleans/container_use_devices",
    );
    assert_golden("broken", dir.path());
}

/// What the host has, how containers get it, and what is missing.
fn devices_next_to_the_gpus() {
    let spec = "cdiVersion: 0.5.0\nkind: nvidia.com/gdrcopy\ndevices:\n- name: all\n  containerEdits:\n    env: [A=b]\n";
    let dir = changed(&format!(
        "mkdir -p dev/infiniband var/run/cdi; mknod dev/infiniband/uverbs0 c 231 192; mknod dev/gdrdrv c 506 0; \
         mknod dev/nvidia-fs0 c 508 0; mknod dev/nvidia-fs1 c 508 1; printf '{spec}' >var/run/cdi/gdrcopy.yaml; \
         sed -i '/^\\[devices/a deny = [\"mofed\"]' etc/nvidia-container-runtime/config.toml"
    ));
    let checks = examine(dir.path(), Caller::default())
        .into_iter()
        .filter(|check| check.check == "extra-devices");
    let found: Vec<_> = checks.map(|check| (check.what, check.status)).collect();
    let expected = [
        (
            "containers get GPUDirect Storage (2 device nodes) with NVIDIA_GDS=enabled; \
             no usable CDI spec contains nvidia.com/gds=all",
            Status::Ok,
        ),
        (
            "[devices] in config.toml denies GPUDirect RDMA to containers",
            Status::Ok,
        ),
        (
            "containers get GDRCopy (1 device node) with NVIDIA_GDRCOPY=enabled or the CDI device nvidia.com/gdrcopy=all",
            Status::Ok,
        ),
        ("this host does not have NVSwitches", Status::Skipped),
    ];
    assert_eq!(
        found,
        expected.map(|(what, status)| (what.to_owned(), status))
    );
}

/// Changes to the good host, and the result: check, id and status.
const FAULTS: &[(&str, &str, &str, Status)] = &[
    (
        "rm -r sys/bus proc/driver proc/modules; mkdir -p sys/bus/pci/devices",
        "pci",
        "ONH-010",
        Status::Error,
    ),
    (
        "rm -r sys/bus proc/driver proc/modules dev/nvidia*; mkdir -p sys/bus/pci/devices; touch dev/dxg",
        "libraries",
        "ONH-012: this host is WSL 2",
        Status::Error,
    ),
    (
        "rm -r sys/bus proc/driver proc/modules; mkdir -p sys/bus/pci/devices; touch etc/nv_tegra_release",
        "pci",
        "ONH-024: this host is a Jetson",
        Status::Error,
    ),
    ("rm -r proc/driver", "module", "ONH-011", Status::Error),
    (
        "rm -r proc/driver; mkdir sys/bus/pci/drivers/nouveau; \
         for device in sys/bus/pci/devices/*; do ln -sfn ../../drivers/nouveau $device/driver; done",
        "module",
        "ONH-011: the kernel module nouveau drives",
        Status::Error,
    ),
    (
        "rm -r proc/driver; mkdir -p sys/firmware/efi/efivars; \
         printf '\\6\\0\\0\\0\\1' >sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c; \
         printf '4,1,2,-;nvidia: module verification failed: signature missing\\n' >dev/kmsg",
        "module",
        "ONH-011: there are 8 NVIDIA GPUs on the PCI bus, but the kernel module nvidia is not loaded; the kernel logged: nvidia: \
         module verification failed: signature missing; Secure Boot is on",
        Status::Error,
    ),
    (
        "rm -r usr/lib/*/libnvidia-ml*; /sbin/ldconfig -r .",
        "libraries",
        "ONH-012",
        Status::Error,
    ),
    (
        "sed -i s/535.183.01/550.54.14/ proc/driver/nvidia/version",
        "libraries",
        "ONH-013",
        Status::Error,
    ),
    (
        "cp usr/lib/*/libcuda.so.535.183.01 usr/lib/x86_64-linux-gnu/libcuda.so.550.54.14",
        "versions",
        "ONH-209",
        Status::Note,
    ),
    (
        "rm usr/lib/*/libcuda.so*; /sbin/ldconfig -r .",
        "capabilities",
        "ONH-023",
        Status::Error,
    ),
    ("rm dev/nvidia3", "nodes", "ONH-021", Status::Error),
    (
        "rm dev/nvidia3; touch dev/nvidia3",
        "nodes",
        "ONH-022",
        Status::Error,
    ),
    (
        "rm dev/nvidia3; mknod dev/nvidia3 c 195 5",
        "nodes",
        "ONH-022",
        Status::Error,
    ),
    (
        "rm dev/nvidia-uvm; echo nvidia 1 >proc/modules",
        "uvm",
        "ONH-205",
        Status::Warning,
    ),
    (
        "echo '[oci-nvidia-hook]\nnvml-timeout = 0.0' >>etc/nvidia-container-runtime/config.toml",
        "config",
        "ONH-005",
        Status::Error,
    ),
    (
        "sed -i '/container-cli/a no-cgroups = true' etc/nvidia-container-runtime/config.toml",
        "config",
        "ONH-313",
        Status::Warning,
    ),
    (
        "chmod 666 etc/nvidia-container-runtime/config.toml",
        "config",
        "ONH-004",
        Status::Error,
    ),
    (
        "echo 'x = 1' >>etc/nvidia-container-runtime/config.toml",
        "config",
        "ONH-101",
        Status::Warning,
    ),
    (
        "printf '[devices]\ndeny = [\"0\"]\n' >etc/nvidia-container-runtime/config.toml.rpmsave",
        "config",
        "ONH-113: \"/etc/nvidia-container-runtime/config.toml.rpmsave\" contains settings that are not in force: devices.deny",
        Status::Warning,
    ),
    (
        "echo 'disable-require = true' >etc/nvidia-container-runtime/config.toml.dpkg-dist",
        "config",
        "ONH-113: \"/etc/nvidia-container-runtime/config.toml.dpkg-dist\"",
        Status::Warning,
    ),
    (
        "sed -i '/container-cli/a debug = \"/gone/log\"' etc/nvidia-container-runtime/config.toml",
        "log",
        "ONH-102",
        Status::Warning,
    ),
    (
        "chmod 660 dev/nvidia*; sed -i '/container-cli/a user = \"nobody\"' etc/nvidia-container-runtime/config.toml",
        "hook-user",
        "ONH-019",
        Status::Error,
    ),
    (
        "chmod 600 dev/nvidia*",
        "hook-user",
        "ONH-314",
        Status::Note,
    ),
    (
        "chmod 600 dev/nvidia*; sed -i '/container-cli/a user = \"root:video\"' etc/nvidia-container-runtime/config.toml",
        "hook-user",
        "ONH-314: only root can open the driver's device nodes, so NVML runs as root",
        Status::Note,
    ),
    (
        "echo init-error 999 >>usr/lib/x86_64-linux-gnu/nvml.conf",
        "nvml",
        "ONH-018",
        Status::Error,
    ),
    (
        "echo init-delay-ms 3200 >>usr/lib/x86_64-linux-gnu/nvml.conf",
        "nvml",
        "ONH-213",
        Status::Warning,
    ),
    (
        "sed -i '/minor=3/s/$/ fail=15/' usr/lib/x86_64-linux-gnu/nvml.conf; \
         printf '3,1,2,-;NVRM: Xid (PCI:0000:04:00): 79, GPU has fallen off the bus.\\n' >dev/kmsg",
        "gpus",
        "ONH-201: GPU 3",
        Status::Warning,
    ),
    (
        "echo 'nvml-timeout = 55' >>etc/nvidia-container-runtime/config.toml",
        "timeouts",
        "ONH-108: \"/usr/share/containers/oci/hooks.d/oci-nvidia-hook.json\" kills the hook after 60 s, but with nvml-timeout = 55 it can take 70 s",
        Status::Warning,
    ),
    (
        "sed -i 's/\"timeout\": 60/\"x\": 60/' usr/share/containers/oci/hooks.d/*.json",
        "timeouts",
        "ONH-108: \"/usr/share/containers/oci/hooks.d/oci-nvidia-hook.json\" has no timeout",
        Status::Warning,
    ),
    (
        "rm run/nvidia-persistenced/socket",
        "persistence",
        "ONH-214",
        Status::Note,
    ),
    (
        "rm run/nvidia-persistenced/socket; ln -s / run/nvidia-persistenced/socket; chown -h 7 run/nvidia-persistenced",
        "daemons",
        "ONH-218",
        Status::Warning,
    ),
    (
        "mkdir -p sys/bus/pci/devices/0000:c0:00.0; cd sys/bus/pci/devices/0000:c0:00.0; echo 0x10de >vendor; \
         echo 0x068000 >class",
        "fabric-manager",
        "ONH-215",
        Status::Warning,
    ),
    (
        "sed -i '/minor=3/s/$/ mig/' usr/lib/x86_64-linux-gnu/nvml.conf",
        "mig",
        "ONH-216: GPU 3 ",
        Status::Warning,
    ),
    (
        "sed -i '/minor=3/s/$/ mig/' usr/lib/x86_64-linux-gnu/nvml.conf; mkdir -p proc/driver/nvidia-caps; \
         touch proc/driver/nvidia-caps/mig-minors; mkdir -p proc/driver/nvidia/capabilities/gpu3/mig/gi1/ci0; \
         echo DeviceFileMinor: 12 >proc/driver/nvidia/capabilities/gpu3/mig/gi1/access; \
         echo DeviceFileMinor: 13 >proc/driver/nvidia/capabilities/gpu3/mig/gi1/ci0/access; \
         mkdir -p dev/nvidia-caps; mknod dev/nvidia-caps/nvidia-cap12 c 510 12",
        "mig",
        "ONH-232: device nodes of MIG devices of GPU 3 are missing: \"/dev/nvidia-caps/nvidia-cap13\"",
        Status::Warning,
    ),
    (
        "sed -i '/minor=3/s/$/ mig/' usr/lib/x86_64-linux-gnu/nvml.conf; mkdir -p proc/driver/nvidia-caps; \
         touch proc/driver/nvidia-caps/mig-minors; mkdir -p proc/driver/nvidia/capabilities/gpu3/mig/gi1; \
         echo DeviceFileMinor: 12 >proc/driver/nvidia/capabilities/gpu3/mig/gi1/access; \
         mkdir -p dev/nvidia-caps; mknod dev/nvidia-caps/nvidia-cap12 c 510 12",
        "mig",
        "ONH-216: GPU 3 has GPU instances without a compute instance",
        Status::Warning,
    ),
    (
        "echo 'gdrdrv 1 0 - Live 0x0' >>proc/modules",
        "extra-devices",
        "ONH-233: the kernel module gdrdrv is loaded, but \"/dev/gdrdrv\" is missing",
        Status::Warning,
    ),
    (
        "rm dev/nvidia-modeset",
        "modeset",
        "ONH-223: the device node \"/dev/nvidia-modeset\" is missing",
        Status::Note,
    ),
    (
        "rm dev/nvidia-modeset; mknod dev/nvidia-modeset c 195 5",
        "modeset",
        "ONH-022",
        Status::Error,
    ),
    (
        "rm etc/containers/containers.conf.d/*; rm usr/share/containers/oci/hooks.d/*",
        "engines",
        "ONH-501: Podman",
        Status::Warning,
    ),
    (
        "rm usr/share/containers/oci/hooks.d/*",
        "engines",
        "ONH-501: CRI-O",
        Status::Warning,
    ),
    (
        "rm usr/bin/oci-nvidia-hook",
        "engines",
        "ONH-501",
        Status::Warning,
    ),
    (
        "mkdir -p etc/containers/oci/hooks.d; echo '{}' >etc/containers/oci/hooks.d/own.json; \
         printf '[engine]\\nhooks_dir = [\"/usr/share/containers/oci/hooks.d\", \"/etc/containers/oci/hooks.d\"]\\n' \
             >etc/containers/containers.conf",
        "hooks-dir",
        "ONH-516: Podman as root: the hooks in \"/etc/containers/oci/hooks.d\" do not run: \
         \"/etc/containers/containers.conf.d/50-oci-nvidia-hook.conf\" replaces hooks_dir of \"/etc/containers/containers.conf\"",
        Status::Warning,
    ),
    (
        "rm etc/containers/containers.conf.d/*; \
         printf '[engine]\\nhooks_dir = [\"/usr/share/containers/oci/hooks.d\"]\\n' >etc/containers/containers.conf",
        "hooks-dir",
        "ONH-516: Podman as root: the hook file in \"/usr/share/containers/oci/hooks.podman.d\" has no effect",
        Status::Warning,
    ),
    (
        "sed -i 's/\"always\": true/\"hasBindMounts\": true/' usr/share/containers/oci/hooks.d/*",
        "engines",
        "ONH-502",
        Status::Note,
    ),
    (
        "sed -i 's/\"stages\": .*/\"stages\": [\"precreate\"]/' usr/share/containers/oci/hooks.d/*; rm etc/containers/containers.conf.d/*",
        "engines",
        "ONH-060: Podman as root: no container starts: /usr/share/containers/oci/hooks.d/oci-nvidia-hook.json starts the hook at the stage precreate with the argument",
        Status::Error,
    ),
    (
        "echo '{' >usr/share/containers/oci/hooks.d/x.json",
        "engines",
        "ONH-060: Podman",
        Status::Error,
    ),
    (
        "cp usr/share/containers/oci/hooks.podman.d/* usr/share/containers/oci/hooks.d",
        "engines",
        "ONH-060: CRI-O",
        Status::Error,
    ),
    (
        "echo '[crio' >etc/crio/crio.conf.d/10-x",
        "engines",
        "ONH-060: CRI-O",
        Status::Error,
    ),
    (
        "touch usr/bin/nvidia-container-runtime-hook; chmod 755 usr/bin/nvidia-container-runtime-hook; \
         sed s,oci-nvidia-hook,nvidia-container-runtime-hook,g usr/share/containers/oci/hooks.d/oci-nvidia-hook.json \
             >usr/share/containers/oci/hooks.d/nvidia.json",
        "second-hook",
        "ONH-503",
        Status::Warning,
    ),
    (
        "cp usr/share/containers/oci/hooks.d/oci-nvidia-hook.json usr/share/containers/oci/hooks.d/old.json",
        "second-hook",
        "ONH-503: CRI-O starts the hook twice",
        Status::Warning,
    ),
    (
        "sed -i -e 's/\"env\": .*\\],/\"env\": [],/' -e 's/\"prestart\"/\"createContainer\"/' usr/share/containers/oci/hooks.d/*; \
         grep -q '\"env\": \\[\\],' usr/share/containers/oci/hooks.d/*",
        "hook-env",
        "ONH-061: \"/usr/share/containers/oci/hooks.d/oci-nvidia-hook.json\" starts \"/usr/bin/oci-nvidia-hook\" at the stage createContainer",
        Status::Error,
    ),
    (
        "touch usr/bin/other; chmod 755 usr/bin/other; printf '{\"version\": \"1.0.0\", \"hook\": {\"path\": \"/usr/bin/other\"}, \
         \"when\": {\"always\": true}, \"stages\": [\"prestart\", \"startContainer\"]}' >usr/share/containers/oci/hooks.d/other.json",
        "hook-env",
        "ONH-061: \"/usr/share/containers/oci/hooks.d/other.json\" starts \"/usr/bin/other\" at the stage startContainer",
        Status::Error,
    ),
    (
        "mkdir -p var/run/cdi; printf 'cdiVersion: 0.5.0\\nkind: vendor.com/nic\\ndevices:\\n- name: a\\n  containerEdits:\\n    \
         hooks: [{hookName: createContainer, path: /usr/bin/nic}]\\n' >var/run/cdi/nic.yaml",
        "hook-env",
        "ONH-061: \"/var/run/cdi/nic.yaml\" starts \"/usr/bin/nic\" at the stage createContainer without \"env\"",
        Status::Error,
    ),
    (
        "touch usr/bin/nvidia-ctk",
        "nvidia-toolkit",
        "ONH-504",
        Status::Note,
    ),
    (
        "mkdir -p etc/systemd/system/multi-user.target.wants; cd etc/systemd/system/multi-user.target.wants; \
         for unit in oci-nvidia-hook-cdi.path nvidia-cdi-refresh.path nvidia-cdi-refresh.service; do \
         ln -s /lib/systemd/system/$unit; done; ln -s /dev/null ../nvidia-cdi-refresh.service",
        "nvidia-toolkit",
        "ONH-517: the services of NVIDIA's container toolkit also write \"/var/run/cdi/nvidia.yaml\": nvidia-cdi-refresh.path",
        Status::Warning,
    ),
    (
        "printf '[engine]\\nruntime = \"kata\"\\n' >etc/containers/containers.conf",
        "runtime",
        "ONH-505: Podman",
        Status::Warning,
    ),
    (
        "rm sys/fs/cgroup/*; mkdir sys/fs/cgroup/devices",
        "cgroups",
        "ONH-506: CRI-O",
        Status::Warning,
    ),
    (
        "sed -i s/1.2.6/1.1.4/ usr/bin/runc; rm dev/char/195:3",
        "dev-char",
        "ONH-507: CRI-O: runc 1.1.4 denies access to \"/dev/nvidia3\"",
        Status::Warning,
    ),
    (
        "touch usr/bin/oci-nvidia-kubelet-plugin; chmod 755 usr/bin/oci-nvidia-kubelet-plugin; \
         mkdir -p var/lib/kubelet/device-plugins; touch var/lib/kubelet/device-plugins/kubelet.sock",
        "kubelet-plugin",
        "ONH-603",
        Status::Warning,
    ),
    (
        "touch usr/bin/oci-nvidia-kubelet-plugin; chmod 755 usr/bin/oci-nvidia-kubelet-plugin; \
         mkdir -p var/lib/kubelet/device-plugins; cd var/lib/kubelet/device-plugins; touch kubelet.sock nvidia-gpu.sock",
        "kubelet-plugin",
        "ONH-601: another device plugin serves \"/var/lib/kubelet/device-plugins/nvidia-gpu.sock\"",
        Status::Warning,
    ),
    (
        "echo '0 0' >sys/fs/selinux/booleans/container_use_devices",
        "selinux",
        "ONH-508",
        Status::Warning,
    ),
    (
        "mkdir -p etc/cdi; echo '{' >etc/cdi/x.yaml",
        "specs",
        "ONH-404",
        Status::Warning,
    ),
    (
        "mkdir -p etc/cdi; for name in a b; do printf 'cdiVersion: 0.3.0\\nkind: nvidia.com/gpu\\ndevices:\\n- name: all\\n  \
         containerEdits:\\n    env: [A=b]\\n' >etc/cdi/$name.yaml; done",
        "specs",
        "ONH-402",
        Status::Warning,
    ),
    (
        "mkdir -p etc/cdi; printf 'cdiVersion: 0.3.0\\nkind: nvidia.com/gpu\\ndevices:\\n- name: all\\n  containerEdits:\\n    \
         deviceNodes: [{path: /dev/gone}]\\n' >etc/cdi/a.yaml",
        "specs",
        "ONH-404",
        Status::Warning,
    ),
    (
        "mkdir -p etc/cdi; printf 'cdiVersion: 0.3.0\\nkind: nvidia.com/gpu\\ndevices:\\n- name: all\\n  containerEdits:\\n    \
         env: [A=b]\\n' >etc/cdi/a.yaml; chmod 600 etc/cdi/a.yaml",
        "specs",
        "ONH-404: /etc/cdi/a.yaml: rootless Podman cannot read the file",
        Status::Warning,
    ),
    (
        "mkdir -p etc/cdi; echo '#!/bin/sh' >usr/bin/oci-nvidia-hook; printf 'cdiVersion: 0.3.0\\nkind: nvidia.com/gpu\\ndevices:\\n- name: all\\n  \
         containerEdits:\\n    env: [A=b]\\ncontainerEdits:\\n  hooks:\\n  - {hookName: createRuntime, path: /usr/bin/oci-nvidia-hook, \
         args: [oci-nvidia-hook, rootfs, --stamp, \"driver=535.183.01,boot=b,host=1,files=1\"]}\\n' >etc/cdi/a.yaml",
        "specs",
        "ONH-405: driver files were added or removed after \"/etc/cdi/a.yaml\" was written",
        Status::Warning,
    ),
    (
        "sed -i '/^accept.*= false/d' etc/nvidia-container-runtime/config.toml",
        "exposed",
        "ONH-106",
        Status::Note,
    ),
    (
        "chmod 660 dev/nvidia*; chgrp video dev/nvidia*",
        "groups",
        "ONH-212",
        Status::Note,
    ),
    (
        "rm usr/lib/x86_64-linux-gnu/libnvidia-glcore* usr/lib/x86_64-linux-gnu/libnvcuvid*",
        "capabilities",
        "ONH-224: the libraries of the driver capabilities \"display\", \"graphics\", \"video\" are missing below ",
        Status::Note,
    ),
    (
        "cd usr/lib/x86_64-linux-gnu; cp libnvidia-cfg.so.535.183.01 libnvidia-later.so.535.183.01",
        "capabilities",
        "ONH-225",
        Status::Note,
    ),
];

/// NVML's answer without the kernel module: NVML_ERROR_DRIVER_NOT_LOADED.
const NOT_LOADED: &str = "echo init-error 9 >>$(find usr -name nvml.conf)";

fn hides_the_module(script: &str) -> bool {
    script.contains("proc/driver proc") || script.contains("rm -r proc/driver")
}

fn each_fault_has_its_finding() {
    let mut wrong = Vec::new();
    for (script, check, expected, status) in FAULTS {
        let dir = changed(&if hides_the_module(script) {
            format!("{script}; {NOT_LOADED}")
        } else {
            (*script).to_owned()
        });
        let outcomes = examine(dir.path(), Caller::default());
        let of_check: Vec<_> = outcomes
            .iter()
            .filter(|outcome| outcome.check == *check)
            .collect();
        let text = |outcome: &&Check| {
            let id = outcome.id.unwrap_or_default();
            format!("{id}: {}", outcome.what).replace(dir.path().to_str().unwrap(), "")
        };
        let is_it =
            |outcome: &&&Check| text(outcome).starts_with(expected) && outcome.status == *status;
        match of_check.iter().find(is_it) {
            Some(outcome) if outcome.fix.is_empty() => {
                wrong.push(format!("{script}\n  no fix: {outcome:?}"))
            }
            Some(_) => {}
            None => wrong.push(format!(
                "{script}\n  expected {check} {expected}\n  found {of_check:?}"
            )),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    // A fault is reported once.
    let outcomes = examine(changed("rm dev/nvidia3").path(), Caller::default());
    assert_eq!(
        outcomes
            .iter()
            .filter(|outcome| outcome.status > Status::Skipped)
            .count(),
        1,
        "{outcomes:?}"
    );
    // doctor does not suggest to create existing MIG devices again, because that would end the programs that use them.
    let mut hosts_with_mig = FAULTS
        .iter()
        .filter(|(script, check, ..)| *check == "mig" && script.contains("gi1"));
    let fixes: Vec<_> = hosts_with_mig
        .by_ref()
        .map(|(script, ..)| {
            let outcomes = examine(changed(script).path(), Caller::default());
            outcomes
                .iter()
                .find(|outcome| outcome.check == "mig")
                .unwrap()
                .fix
                .clone()
        })
        .collect();
    assert_eq!(
        fixes,
        ["oci-nvidia-hook prepare", "nvidia-smi mig -i 3 -cci"]
    );
}

/// More faults: nodes and settings because of which a container does not start, and others that its start only reports.
const MORE_FAULTS: &[&str] = &[
    "true",
    "sed -i '/container-cli/i [driver]\\ndev-root = \"/nonexistent\"' etc/nvidia-container-runtime/config.toml",
    "sed -i '/container-cli/i [driver]\\ndev-root = \"/etc/passwd\"' etc/nvidia-container-runtime/config.toml",
    "rm dev/nvidia-uvm; touch dev/nvidia-uvm",
    "rm dev/nvidia-uvm-tools; touch dev/nvidia-uvm-tools",
    "rm dev/nvidia-uvm-tools",
    "rm dev/nvidiactl",
    "rm dev/nvidiactl; touch dev/nvidiactl",
    "rm dev/nvidia-modeset; touch dev/nvidia-modeset",
    "printf '[devices]\\nallow = [\"7\"]\\n' >>etc/nvidia-container-runtime/config.toml; rm dev/nvidia7",
    "printf '[devices]\\nallow = [\"77\"]\\n' >>etc/nvidia-container-runtime/config.toml",
    "printf '[devices]\\ndeny = [\"all\"]\\n' >>etc/nvidia-container-runtime/config.toml",
    "printf '[devices]\\ndeny = [\"0\"]\\n' >>etc/nvidia-container-runtime/config.toml",
    "sed -i '/container-cli/a ldcache = \"/gone\"' etc/nvidia-container-runtime/config.toml",
    "sed -i '/container-cli/a ldcache = \"/etc/os-release\"' etc/nvidia-container-runtime/config.toml",
    "sed -i '/container-cli/i [driver]\\nfiles = [\"/gone\"]' etc/nvidia-container-runtime/config.toml",
    "sed -i '/container-cli/i [driver]\\nlibrary-dirs = [\"/gone\"]' etc/nvidia-container-runtime/config.toml",
    "rm usr/lib/*/libcuda.so*",
    "rm usr/lib/*/libnvidia-ptxjitcompiler*; /sbin/ldconfig -r .",
    "rm usr/bin/nvidia-smi",
    "truncate -s 0 usr/lib/*/libcuda.so.535.183.01",
    "sed -i 's/name=\"[^\"]*\"/name=\"Orin (nvgpu)\"/' usr/lib/*/nvml.conf",
];

/// The checks of the hook's own hook file, and of what other hook files and CDI specs permit an image to do.
const ABOUT_ENGINES: &[&str] = &["engines", "hook-env"];

/// Whether doctor reports an error, and which containers do not start: both are the same decision. The engines of the host are not part
/// of it, and a host without the kernel module cannot be simulated, because the fake driver answers without one.
fn an_error_is_a_container_that_does_not_start() {
    let faults = FAULTS
        .iter()
        .map(|(script, ..)| *script)
        .filter(|script| !hides_the_module(script));
    let mut wrong = Vec::new();
    for script in faults.chain(MORE_FAULTS.iter().copied()) {
        let dir = changed(script);
        let outcomes = examine(dir.path(), Caller::default());
        let errors: Vec<_> = outcomes
            .iter()
            .filter(|outcome| {
                outcome.status == Status::Error && !ABOUT_ENGINES.contains(&outcome.check)
            })
            .map(|outcome| {
                format!(
                    "{} {}: {}",
                    outcome.check,
                    outcome.id.unwrap(),
                    outcome.what
                )
            })
            .collect();
        let mut refused = Vec::new();
        for capabilities in ["compute,utility", "all"] {
            let spec = serde_json::json!({
                "root": {"path": dir.path().join("image")},
                "process": {
                    "env": ["NVIDIA_VISIBLE_DEVICES=all", format!("NVIDIA_DRIVER_CAPABILITIES={capabilities}")],
                    "capabilities": {"bounding": ["CAP_SYS_ADMIN"], "effective": ["CAP_SYS_ADMIN"]},
                },
            });
            let mut plan = Command::new(HOOK);
            plan.arg("--config")
                .arg(dir.path().join("etc/nvidia-container-runtime/config.toml"));
            plan.args(["plan", "-", "--json", "--root"]).arg(dir.path());
            let ran = run_with(&mut plan, spec.to_string().as_bytes());
            let document: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
            if document["outcome"] != "inject" {
                refused.push(format!("{capabilities}: {}", document["reason"]));
            }
            // What a start reports, doctor reports too.
            for finding in document["findings"].as_array().unwrap() {
                let id = finding["kind"]["id"]
                    .as_str()
                    .or_else(|| finding["id"].as_str())
                    .unwrap();
                if !outcomes.iter().any(|outcome| outcome.id == Some(id)) {
                    wrong.push(format!("{script}\n  doctor does not report {finding}"));
                }
            }
        }
        if errors.is_empty() != refused.is_empty() {
            wrong.push(format!(
                "{script}\n  doctor: {errors:?}\n  not started: {refused:?}"
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

fn a_user_sees_less_and_says_so() {
    let tux = |groups: &[u32]| Caller {
        user: Some(User {
            name: "tux".into(),
            uid: 1000,
            home: Some("/home/tux".into()),
        }),
        groups: groups.iter().copied().collect(),
    };
    let dir = changed("chgrp 484 dev/nvidia*; chmod 660 dev/nvidia*; rm dev/nvidia-uvm");
    let find = |outcomes: &[Check], check: &str| {
        outcomes
            .iter()
            .find(|outcome| outcome.check == check)
            .unwrap()
            .clone()
    };
    let outside = examine(dir.path(), tux(&[1000]));
    let groups = find(&outside, "groups");
    assert_eq!(groups.id.unwrap(), "ONH-211");
    assert_eq!(
        groups.what,
        "user tux cannot open \"/dev/nvidiactl\" (root:484 0660)"
    );
    assert_eq!(
        groups.fix,
        "as root: groupadd -g 484 gpu484 && usermod -aG gpu484 tux, and log in again"
    );
    let uvm = find(&outside, "uvm");
    assert!(
        uvm.what.contains("rootless containers cannot load it") && uvm.fix.starts_with("as root"),
        "{uvm:?}"
    );
    let inside = find(&examine(dir.path(), tux(&[484, 1000])), "groups");
    assert_eq!(inside.id.unwrap(), "ONH-212");
    assert_eq!(inside.fix, "podman run --group-add keep-groups …");
    // The configuration of the user's Podman is examined too.
    let mut engines = outside
        .iter()
        .filter(|outcome| outcome.check == "engines" && outcome.what.contains("Podman of tux"));
    assert_eq!(engines.next().unwrap().status, Status::Ok);
    // A fault is reported once: as a warning, with the group.
    let mut facts = doctor::inspect(
        &Tree::open(&HostPath::new(dir.path())).unwrap(),
        None,
        tux(&[1000]),
    );
    let refused = Finding::new(
        &catalog::NVML_PERMISSION,
        "this user may not open the GPUs",
        "x",
    );
    for (user, status) in [(facts.user.clone(), Status::Skipped), (None, Status::Error)] {
        facts.user = user;
        facts.driver.nvml.as_mut().unwrap().answer = Err(refused.clone());
        facts.driver.starts.clear();
        let nvml = find(&doctor::examine(&facts), "nvml");
        assert_eq!(nvml.status, status, "{nvml:?}");
    }
    // A real user: NVML below another driver root is not asked, and doctor reports that.
    sh(&format!(
        "chmod 755 '{}'; chmod -R go+rX '{}'",
        dir.path().display(),
        dir.path().display()
    ))
    .ok();
    let parent = tempfile::tempdir_in("/var/tmp").unwrap();
    std::fs::set_permissions(parent.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let path = parent.path().display();
    sh(&format!(
        "cp -a '{}' '{path}/root'; cp '{HOOK}' '{path}/hook'",
        dir.path().display()
    ))
    .ok();
    let config = parent.path().join("config.toml");
    std::fs::write(
        &config,
        format!("[nvidia-container-cli]\nroot = \"{path}/root\"\n"),
    )
    .unwrap();
    let ran = sh(&format!(
        "setpriv --reuid 65534 --regid 65534 --clear-groups '{path}/hook' --config '{path}/config.toml' doctor --all || true"
    ));
    let text = ran.ok();
    for says in [
        "only root can ask NVML below another driver root",
        "only root can check whether the hook as root can open the GPUs",
    ] {
        assert!(text.contains(says), "{text}");
    }
}

/// A CDI spec does not hide that no engine starts the hook: the unit of the packages always writes one.
fn a_spec_is_not_the_hook() {
    let dir = changed(
        "rm usr/share/containers/oci/hooks.d/* etc/containers/containers.conf.d/*; mkdir -p etc/cdi; \
         printf 'cdiVersion: 0.3.0\\nkind: nvidia.com/gpu\\ndevices:\\n- name: all\\n  containerEdits:\\n    \
         env: [A=b]\\n' >etc/cdi/a.yaml",
    );
    let outcomes = examine(dir.path(), Caller::default());
    let of = |check: &str| {
        let mut found = outcomes.clone();
        found.retain(|outcome| outcome.check == check);
        found
    };
    assert_eq!(of("engines").len(), 2, "{outcomes:?}");
    for engine in of("engines") {
        assert_eq!(
            (engine.status, engine.id),
            (Status::Warning, Some("ONH-501"))
        );
        assert!(
            engine
                .what
                .contains("1 CDI device can be requested by name"),
            "{engine:?}"
        );
    }
    assert!(
        of("containers")
            .iter()
            .all(|found| found.status != Status::Ok)
    );
}

/// doctor judges the configuration that the engines pass to the hook.
fn the_configuration_of_the_hook_file() {
    const PASS: &str = r#"sed -i 's|"prestart"\],|"--config", "/etc/gpu.toml", "prestart"],|' \
        usr/share/containers/oci/hooks.d/oci-nvidia-hook.json; "#;
    let config_of = |script: &str| {
        let dir = changed(&format!("{PASS}{script}"));
        let outcomes = examine(dir.path(), Caller::default());
        let mut found = outcomes.into_iter();
        let check = found.find(|check| check.check == "config").unwrap();
        let what = below_root(&check.what, dir.path().to_str().unwrap());
        (check.status, check.id, what)
    };
    let (status, id, what) = config_of("echo '[devices' >etc/gpu.toml");
    assert_eq!((status, id), (Status::Error, Some("ONH-005")), "{what}");
    assert!(what.contains("/etc/gpu.toml"), "{what}");
    let what = "\"/etc/gpu.toml\", which /usr/share/containers/oci/hooks.d/oci-nvidia-hook.json passes to the hook, is valid";
    assert_eq!(
        config_of("echo >etc/gpu.toml"),
        (Status::Ok, None, what.to_owned())
    );
}

/// On GKE's nodes, the driver root contains only files; /dev and /proc are the host's, and NVML must run there.
fn a_driver_root_with_files_only() {
    let dir = changed(
        "mkdir -p home/kubernetes/bin/nvidia/usr/lib home/kubernetes/bin/nvidia/etc; \
         mv usr/lib/x86_64-linux-gnu home/kubernetes/bin/nvidia/usr/lib; mv etc/ld.so.* home/kubernetes/bin/nvidia/etc; \
         sed -i '/container-cli/a root = \"/home/kubernetes/bin/nvidia\"' etc/nvidia-container-runtime/config.toml",
    );
    let outcomes = examine(dir.path(), Caller::default());
    let nvml = outcomes
        .iter()
        .find(|outcome| outcome.check == "nvml")
        .unwrap();
    assert_eq!(
        (nvml.status, nvml.what.as_str()),
        (Status::Ok, "8 GPUs answered: driver 535.183.01, CUDA 12.2")
    );
    assert!(
        outcomes
            .iter()
            .all(|outcome| outcome.status <= Status::Skipped),
        "{outcomes:?}"
    );
}

fn nothing_is_changed() {
    let dir = changed("true");
    let before = crate::support::fingerprint(dir.path(), "none");
    examine(dir.path(), Caller::default());
    assert!(before == crate::support::fingerprint(dir.path(), "none"));
}

/// doctor and status ask engines and runtimes for their versions, and each of these programs could create files in /run.
fn programs_that_are_asked_change_nothing() {
    let script = "mount -t tmpfs run /run; said=$(\"$0\" doctor --all || true; \"$0\" status || true); \
                  echo \"$said\" | grep -c 'crun [0-9]'; find /run -mindepth 1";
    let text = run(Command::new("unshare").args(["-m", "sh", "-euc", script, HOOK])).ok();
    let (asked, left) = text.split_once('\n').unwrap();
    assert!(
        asked.parse::<u32>().unwrap() > 0 && left.is_empty(),
        "{text}"
    );
}

/// The bundle contains everything that is documented, and existing files are not changed.
fn bundle() {
    let dir = scratch();
    let path = dir.path().join("b.tar.gz");
    let doctor = |path: &Path| run(Command::new(HOOK).args(["doctor", "--bundle"]).arg(path));
    let ran = doctor(&path);
    assert!(matches!(ran.code, Some(0 | 1 | 3)), "{ran:?}");
    assert_eq!(
        path.metadata().unwrap().permissions().mode() & 0o7777,
        0o600
    );
    let list = run(Command::new("tar").arg("-tzf").arg(&path)).ok();
    let report = format!(
        "wrote {} with {} files, for a bug report",
        path.display(),
        list.lines().count()
    );
    assert_eq!(ran.stderr, format!("oci-nvidia-hook: {report}\n"));
    for name in [
        "doctor.json",
        "status.json",
        "engines.json",
        "files/etc/os-release",
        "files/proc/version",
        "files/proc/devices",
    ] {
        assert!(
            list.lines()
                .any(|line| line == format!("oci-nvidia-hook/{name}")),
            "{name} is not in\n{list}"
        );
    }
    let json = run(Command::new("tar")
        .args(["-xzOf"])
        .arg(&path)
        .arg("oci-nvidia-hook/doctor.json"))
    .ok();
    assert!(json_schema::part("doctor", &json, "checks").len() > 20);
    let content = std::fs::read(&path).unwrap();
    let link = dir.path().join("link");
    std::os::unix::fs::symlink(dir.path().join("elsewhere"), &link).unwrap();
    for taken in [&path, &link, &dir.path().join("gone/b.tar.gz")] {
        let stderr = doctor(taken).failed(3);
        assert!(
            stderr.contains("(ONH-054)") && stderr.contains("hint: "),
            "{stderr}"
        );
    }
    assert!(
        std::fs::read(&path).unwrap() == content && link.symlink_metadata().unwrap().is_symlink()
    );
    assert!(std::fs::metadata(dir.path().join("elsewhere")).is_err());
}

/// The bundle is for a public tracker, and the log can be in a directory that every user can write to.
fn a_link_in_the_place_of_the_log() {
    let dir = scratch();
    let (log, secret, config) = (
        dir.path().join("onh.log"),
        dir.path().join("secret"),
        dir.path().join("config.toml"),
    );
    std::fs::write(&secret, "root:secret").unwrap();
    std::fs::write(
        &config,
        format!("[nvidia-container-cli]\ndebug = {log:?}\n"),
    )
    .unwrap();
    let packed = |name: &str| {
        let path = dir.path().join(name);
        run(Command::new(HOOK)
            .arg("--config")
            .arg(&config)
            .args(["doctor", "--bundle"])
            .arg(&path));
        let content = run(Command::new("tar").args(["-xzOf"]).arg(&path)).ok();
        let list = run(Command::new("tar").arg("-tzf").arg(&path)).ok();
        (
            content,
            list.lines().any(|line| line.ends_with("/left-out.txt")),
        )
    };
    // The old implementation: a copy by path.
    std::os::unix::fs::symlink(&secret, &log).unwrap();
    assert_eq!(std::fs::read_to_string(&log).unwrap(), "root:secret");
    let (content, left_out) = packed("link.tar.gz");
    assert!(!content.contains("root:secret") && left_out, "{content}");
    std::fs::remove_file(&log).unwrap();
    std::fs::hard_link(&secret, &log).unwrap();
    let (content, left_out) = packed("hard.tar.gz");
    assert!(
        !content.contains("root:secret")
            && left_out
            && content.contains("the file has other hard links"),
        "{content}"
    );
    std::fs::remove_file(&log).unwrap();
    std::fs::write(&log, "of a user").unwrap();
    std::os::unix::fs::chown(&log, Some(7777), None).unwrap();
    let (content, left_out) = packed("user.tar.gz");
    assert!(
        !content.contains("of a user") && left_out && content.contains("another user, 7777"),
        "{content}"
    );
    std::fs::remove_file(&log).unwrap();
    std::fs::write(&log, format!("{}the last line", "x".repeat(300 << 10))).unwrap();
    let (content, left_out) = packed("log.tar.gz");
    assert!(content.contains("the last line") && !left_out);
}

/// oci-nvidia-hook(8) explains each check, under the name that doctor prints.
fn the_man_page_explains_each_check() {
    let page = std::fs::read_to_string(source("docs/man/oci-nvidia-hook.8"))
        .unwrap()
        .replace("\\-", "-");
    let table = page
        .split("\n.SH CHECKS\n")
        .nth(1)
        .unwrap()
        .split("\n.SH ")
        .next()
        .unwrap();
    let mut explained = Vec::new();
    for section in table.split("\n.SS ").skip(1) {
        let (name, text) = section.split_once('\n').unwrap();
        let rows = text
            .split(".TP\n.B ")
            .skip(1)
            .map(|row| row.split_once('\n').unwrap());
        for (check, meaning) in rows {
            assert!(meaning.len() > 10, "{check}: {meaning}");
            explained.push((name.to_owned(), check.to_owned()));
        }
    }
    let names = doctor::names()
        .into_iter()
        .map(|(section, name)| (section.to_string(), name.to_owned()));
    assert_eq!(explained, names.collect::<Vec<_>>());
}

/// The built program: the text, the JSON and the exit status agree.
fn this_host() {
    let json = run(Command::new(HOOK).args(["doctor", "--json"]));
    let outcomes = json_schema::part("doctor", &json.stdout, "checks");
    for outcome in &outcomes {
        let keys: Vec<_> = outcome
            .as_object()
            .unwrap()
            .keys()
            .map(String::as_str)
            .collect();
        let is_problem =
            ["note", "warning", "error"].contains(&outcome["status"].as_str().unwrap());
        let expected = ["check", "fix", "id", "section", "status", "what", "why"];
        let of_all = ["check", "section", "status", "what"];
        assert_eq!(
            keys,
            if is_problem { &expected[..] } else { &of_all },
            "{outcome}"
        );
    }
    let has = |status: &str| outcomes.iter().any(|outcome| outcome["status"] == status);
    let expected = if has("error") {
        3
    } else {
        i32::from(has("warning"))
    };
    assert_eq!(json.code, Some(expected));
    let words = run(Command::new(HOOK).args(["doctor", "--all"]));
    assert_eq!(words.code, Some(expected));
    // A section has its own exit status.
    let cdi = run(Command::new(HOOK).args(["doctor", "--json", "cdi", "kubelet"]));
    let of_sections = json_schema::part("doctor", &cdi.stdout, "checks");
    let is_part =
        |outcome: &&Value| ["cdi", "kubelet"].contains(&outcome["section"].as_str().unwrap());
    assert_eq!(
        of_sections,
        outcomes.iter().filter(is_part).cloned().collect::<Vec<_>>()
    );
    assert!(
        !of_sections.is_empty() && cdi.code <= Some(expected),
        "{cdi:?}"
    );
    for outcome in &outcomes {
        assert!(
            words.stdout.contains(outcome["check"].as_str().unwrap()),
            "{}",
            words.stdout
        );
    }
}

/// The running plugin knows which GPUs it has withdrawn. Its sockets alone do not show that it works.
fn the_health_that_the_kubelet_has() {
    let dir = changed(
        "install -m 755 /dev/null usr/bin/oci-nvidia-kubelet-plugin; mkdir -p run/oci-nvidia-kubelet-plugin; \
         mkdir -p var/lib/kubelet/device-plugins; cd var/lib/kubelet/device-plugins; touch kubelet.sock oci-nvidia-gpu.sock",
    );
    let found = || {
        examine(dir.path(), Caller::default())
            .into_iter()
            .find(|check| check.check == "kubelet-plugin")
    };
    let found = || {
        found()
            .map(|check| (check.status, check.id, check.what))
            .unwrap()
    };
    let (status, id, what) = found();
    assert_eq!((status, id), (Status::Skipped, None), "{what}");
    assert!(what.contains("no device plugin answers"), "{what}");
    let listener = UnixListener::bind(
        dir.path()
            .join("run/oci-nvidia-kubelet-plugin/control.sock"),
    )
    .unwrap();
    let device = |number: u32, unhealthy: Value| json!({"id": format!("GPU-{number}::0"), "gpu": format!("GPU-{number}"), "unhealthy": unhealthy});
    let sick = json!({"why": "XID 79", "since": "2026-01-02T03:04:05Z"});
    let answer = |devices: Value| {
        json!({"resources": [{"name": "nvidia.com/gpu", "is_live": true, "devices": devices}]})
            .to_string()
    };
    let claims = |is_registered: bool, problem: Value, unpublished: Value| {
        let driver = json!({"name": "gpu.nvidia.com", "is_registered": is_registered, "problem": problem, "unpublished": unpublished});
        let resource = json!({"name": "nvidia.com/gpu", "is_live": is_registered, "devices": [device(0, Value::Null)]});
        json!({"resources": [resource], "driver": driver}).to_string()
    };
    let cases = [
        (
            claims(true, Value::Null, Value::Null),
            Status::Ok,
            None,
            "claims with the driver \"gpu.nvidia.com\"",
        ),
        (
            claims(false, Value::Null, Value::Null),
            Status::Warning,
            Some("ONH-603"),
            "has not registered it",
        ),
        (
            claims(true, json!("NVML fails"), Value::Null),
            Status::Error,
            Some("ONH-074"),
            "cannot have a device: NVML",
        ),
        (
            claims(true, Value::Null, json!("cannot publish")),
            Status::Warning,
            Some("ONH-608"),
            "cannot publish",
        ),
        (
            answer(json!([device(0, Value::Null)])),
            Status::Ok,
            None,
            "offers 1 device as healthy",
        ),
        (
            answer(json!([
                device(0, Value::Null),
                device(1, sick.clone()),
                device(1, sick)
            ])),
            Status::Warning,
            Some("ONH-606"),
            "the device plugin offers 1 of 3 devices as healthy: GPU-1: XID 79 (since 2026-01-02T03:04:05Z)",
        ),
        (
            "unknown command".to_owned(),
            Status::Skipped,
            None,
            "does not report its devices: its answer is invalid",
        ),
    ];
    for (answer, status, id, what) in cases {
        let found = std::thread::scope(|scope| {
            scope.spawn(|| {
                let (mut stream, _) = listener.accept().unwrap();
                stream.read_exact(&mut [0; "devices\n".len()]).unwrap();
                stream.write_all(answer.as_bytes()).unwrap();
            });
            found()
        });
        assert_eq!((found.0, found.1), (status, id), "{found:?}");
        assert!(found.2.contains(what), "{found:?}");
    }
}

/// The linker cache can list a library of another version under several names. The fix is for the driver root.
fn one_sentence_for_all_names_of_a_library() {
    let dir = changed(
        "cd usr/lib/x86_64-linux-gnu; mv libcuda.so.535.183.01 libcuda.so.550.54.14; \
         for name in libcuda.so libcuda.so.1; do ln -sfn libcuda.so.550.54.14 $name; done; cd ../../..; /sbin/ldconfig -r .",
    );
    let checks = examine(dir.path(), Caller::default());
    let check = checks
        .iter()
        .find(|check| check.id == Some("ONH-023"))
        .unwrap_or_else(|| panic!("{checks:?}"));
    assert_eq!(check.status, Status::Error, "the default request needs it");
    assert_eq!(
        check.what.matches("libraries are ignored").count(),
        1,
        "{}",
        check.what
    );
    let root = dir.path();
    let fix = format!(
        "chroot {root:?} zypper install nvidia-compute-G06 (driver 590 and newer: G07); if it is installed, ldconfig -r {root:?}"
    );
    assert_eq!(check.fix, fix);
}
