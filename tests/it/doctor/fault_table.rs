//! The faults of a host, as scripts that change a host without problems.

use oci_nvidia_hook::testing::doctor::Status;

/// Changes to the good host, and the result that reading them from its files leads to. Each decision of a check has a row in
/// src/doctor/tests.rs.
pub const FAULTS: &[(&str, &str, &str, Status)] = &rows! {
    "rm -r sys/bus proc/driver proc/modules; mkdir -p sys/bus/pci/devices", "pci", "ONH-010", Status::Error;
    "rm -r sys/bus proc/driver proc/modules dev/nvidia*; mkdir -p sys/bus/pci/devices; touch dev/dxg",
        "libraries", "ONH-012: this host is WSL 2", Status::Error;
    "rm -r sys/bus proc/driver proc/modules; mkdir -p sys/bus/pci/devices; touch etc/nv_tegra_release",
        "pci", "ONH-024: this host is a Jetson", Status::Error;
    "rm -r proc/driver; mkdir -p sys/firmware/efi/efivars; \
         printf '\\6\\0\\0\\0\\1' >sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c; \
         printf '4,1,2,-;nvidia: module verification failed: signature missing\\n' >dev/kmsg",
        "module", "ONH-011: there are 8 NVIDIA GPUs on the PCI bus, but the kernel module nvidia is not loaded; the kernel logged: nvidia: \
         module verification failed: signature missing; Secure Boot is on", Status::Error;
    "rm -r usr/lib/*/libnvidia-ml*; /sbin/ldconfig -r .", "libraries", "ONH-012", Status::Error;
    "sed -i s/535.183.01/550.54.14/ proc/driver/nvidia/version", "libraries", "ONH-013", Status::Error;
    "cp usr/lib/*/libcuda.so.535.183.01 usr/lib/x86_64-linux-gnu/libcuda.so.550.54.14", "versions", "ONH-209", Status::Note;
    "rm usr/lib/*/libcuda.so*; /sbin/ldconfig -r .", "capabilities", "ONH-023", Status::Error;
    "rm dev/nvidia3", "nodes", "ONH-021", Status::Error;
    "rm dev/nvidia3; touch dev/nvidia3", "nodes", "ONH-022", Status::Error;
    "rm dev/nvidia3; mknod dev/nvidia3 c 195 5", "nodes", "ONH-022", Status::Error;
    "rm dev/nvidia-uvm; echo nvidia 1 >proc/modules", "uvm", "ONH-205", Status::Warning;
    "echo '[oci-nvidia-hook]\nnvml-timeout = 0.0' >>etc/nvidia-container-runtime/config.toml", "config", "ONH-005", Status::Error;
    "chmod 666 etc/nvidia-container-runtime/config.toml", "config", "ONH-004", Status::Error;
    "echo 'x = 1' >>etc/nvidia-container-runtime/config.toml", "config", "ONH-101", Status::Warning;
    "sed -i '/container-cli/a debug = \"/gone/log\"' etc/nvidia-container-runtime/config.toml", "log", "ONH-102", Status::Warning;
    "chmod 660 dev/nvidia*; sed -i '/container-cli/a user = \"nobody\"' etc/nvidia-container-runtime/config.toml",
        "hook-user", "ONH-019", Status::Error;
    "chmod 600 dev/nvidia*", "hook-user", "ONH-314", Status::Note;
    "echo init-error 999 >>usr/lib/x86_64-linux-gnu/nvml.conf", "nvml", "ONH-018", Status::Error;
    "sed -i '/minor=3/s/$/ fail=15/' usr/lib/x86_64-linux-gnu/nvml.conf; \
         printf '3,1,2,-;NVRM: Xid (PCI:0000:04:00): 79, GPU has fallen off the bus.\\n' >dev/kmsg",
        "gpus", "ONH-201: GPU 3", Status::Warning;
    "rm run/nvidia-persistenced/socket; ln -s / run/nvidia-persistenced/socket; chown -h 7 run/nvidia-persistenced",
        "daemons", "ONH-218", Status::Warning;
    "sed -i '/^.sharing]/a mps-gpus = [\"3\"]' etc/nvidia-container-runtime/config.toml; \
         mkdir -p run/oci-nvidia-mps/GPU-51eed003-0003-4003-8000-0000fa4e0003/pipe; cd run/oci-nvidia-mps/GPU-51eed003-0003-4003-8000-0000fa4e0003; \
         echo '{\"format\":2,\"gpu\":\"GPU-51eed003-0003-4003-8000-0000fa4e0003\",\"state\":\"ready\"}' >state",
        "mps", "ONH-027: the MPS daemon of GPU-51eed003-0003-4003-8000-0000fa4e0003 does not work: its supervisor has ended", Status::Error;
    "sed -i '/^.sharing]/a mps-gpus = [\"3\"]' etc/nvidia-container-runtime/config.toml",
        "mps", "ONH-027: the MPS daemon of GPU-51eed003-0003-4003-8000-0000fa4e0003 does not work: it was not started", Status::Error;
    "sed -i '/^.sharing]/a mps-gpus = [\"9\"]' etc/nvidia-container-runtime/config.toml",
        "mps", "ONH-107: mps-gpus in the [sharing] table of config.toml contains \"9\"", Status::Warning;
    "mkdir -p run/oci-nvidia-mps/GPU-51eed003-0003-4003-8000-0000fa4e0003; touch run/oci-nvidia-mps/GPU-51eed003-0003-4003-8000-0000fa4e0003/state",
        "mps", "ONH-235: config.toml does not share GPU-51eed003-0003-4003-8000-0000fa4e0003 any more", Status::Warning;
    "sed -i '/minor=3/s/$/ mig/' usr/lib/x86_64-linux-gnu/nvml.conf; mkdir -p proc/driver/nvidia-caps; echo 510 nvidia-caps >>proc/devices; \
         printf 'gpu3/gi1/access 12\\ngpu3/gi1/ci0/access 13\\n' >proc/driver/nvidia-caps/mig-minors; \
         mkdir -p proc/driver/nvidia/capabilities/gpu3/mig/gi1/ci0; \
         echo DeviceFileMinor: 12 >proc/driver/nvidia/capabilities/gpu3/mig/gi1/access; \
         echo DeviceFileMinor: 13 >proc/driver/nvidia/capabilities/gpu3/mig/gi1/ci0/access; \
         mkdir -p dev/nvidia-caps; mknod dev/nvidia-caps/nvidia-cap12 c 510 12",
        "mig", "ONH-232: device nodes of MIG devices of GPU 3 are missing: \"/dev/nvidia-caps/nvidia-cap13\"", Status::Warning;
    "rm dev/nvidia-modeset", "modeset", "ONH-223: the device node \"/dev/nvidia-modeset\" is missing", Status::Note;
    "rm usr/share/containers/oci/hooks.d/*", "engines", "ONH-501: Podman", Status::Warning;
    "rm usr/bin/oci-nvidia-hook", "engines", "ONH-501", Status::Warning;
    "sed -i 's/\"always\": true/\"hasBindMounts\": true/' usr/share/containers/oci/hooks.d/*", "engines", "ONH-502", Status::Note;
    "mkdir -p etc/containers/oci/hooks.d; \
         sed 's/prestart/precreate/' usr/share/containers/oci/hooks.d/oci-nvidia-hook.json >etc/containers/oci/hooks.d/own.json; \
         printf '[engine]\\nhooks_dir = [\"/usr/share/containers/oci/hooks.d\", \"/etc/containers/oci/hooks.d\"]\\n' \
             >etc/containers/containers.conf",
        "engines", "ONH-060: Podman as root: no container that requests GPUs starts: /etc/containers/oci/hooks.d/own.json names the stage \"precreate\"", Status::Error;
    "sed -i 's/\"stages\": .*/\"stages\": [\"createContainer\"]/' usr/share/containers/oci/hooks.d/*",
        "engines", "ONH-060: CRI-O: no container that requests GPUs starts: /usr/share/containers/oci/hooks.d/oci-nvidia-hook.json names the stage \"createContainer\"", Status::Error;
    "echo '{' >usr/share/containers/oci/hooks.d/x.json", "engines", "ONH-060: Podman", Status::Error;
    "sed -i 's/prestart/precreate/' usr/share/containers/oci/hooks.d/oci-nvidia-hook.json",
        "engines", "ONH-060: CRI-O: the engine does not start: ", Status::Error;
    "echo '[crio' >etc/crio/crio.conf.d/10-x", "engines", "ONH-060: CRI-O", Status::Error;
    "touch usr/bin/nvidia-container-runtime-hook; chmod 755 usr/bin/nvidia-container-runtime-hook; \
         sed s,oci-nvidia-hook,nvidia-container-runtime-hook,g usr/share/containers/oci/hooks.d/oci-nvidia-hook.json \
             >usr/share/containers/oci/hooks.d/nvidia.json",
        "second-hook", "ONH-503", Status::Warning;
    "sed -i -e 's/\"env\": .*\\],/\"env\": [],/' -e 's/\"prestart\"/\"createContainer\"/' usr/share/containers/oci/hooks.d/*; \
         grep -q '\"env\": \\[\\],' usr/share/containers/oci/hooks.d/*",
        "hook-env", "ONH-061: \"/usr/share/containers/oci/hooks.d/oci-nvidia-hook.json\" starts \"/usr/bin/oci-nvidia-hook\" at the stage createContainer", Status::Error;
    "touch usr/bin/other; chmod 755 usr/bin/other; printf '{\"version\": \"1.0.0\", \"hook\": {\"path\": \"/usr/bin/other\"}, \
         \"when\": {\"always\": true}, \"stages\": [\"prestart\", \"startContainer\"]}' >usr/share/containers/oci/hooks.d/other.json",
        "hook-env", "ONH-061: \"/usr/share/containers/oci/hooks.d/other.json\" starts \"/usr/bin/other\" at the stage startContainer", Status::Error;
    "mkdir -p var/run/cdi; printf 'cdiVersion: 0.5.0\\nkind: vendor.com/nic\\ndevices:\\n- name: a\\n  containerEdits:\\n    \
         hooks: [{hookName: createContainer, path: /usr/bin/nic}]\\n' >var/run/cdi/nic.yaml",
        "hook-env", "ONH-061: \"/var/run/cdi/nic.yaml\" starts \"/usr/bin/nic\" at the stage createContainer without \"env\"", Status::Error;
    "mkdir -p etc/systemd/system/multi-user.target.wants; cd etc/systemd/system/multi-user.target.wants; \
         for unit in oci-nvidia-hook-cdi.path nvidia-cdi-refresh.path nvidia-cdi-refresh.service; do \
         ln -s /lib/systemd/system/$unit; done; ln -s /dev/null ../nvidia-cdi-refresh.service",
        "nvidia-toolkit", "ONH-517: the services of NVIDIA's container toolkit also write \"/var/run/cdi/nvidia.yaml\": nvidia-cdi-refresh.path", Status::Warning;
    "rm sys/fs/cgroup/*; mkdir sys/fs/cgroup/devices", "cgroups", "ONH-506: Podman as root", Status::Warning;
    "sed -i s/1.2.6/1.1.4/ usr/bin/runc; rm dev/char/195:3",
        "dev-char", "ONH-507: CRI-O: runc 1.1.4 denies access to \"/dev/nvidia3\"", Status::Warning;
    "touch usr/bin/oci-nvidia-kubelet-plugin; chmod 755 usr/bin/oci-nvidia-kubelet-plugin; \
         mkdir -p var/lib/kubelet/device-plugins; cd var/lib/kubelet/device-plugins; touch kubelet.sock nvidia-gpu.sock",
        "kubelet-plugin", "ONH-601: another device plugin serves \"/var/lib/kubelet/device-plugins/nvidia-gpu.sock\"", Status::Warning;
    "echo '0 0' >sys/fs/selinux/booleans/container_use_devices", "selinux", "ONH-508", Status::Warning;
    "mkdir -p etc/cdi; for name in a b; do printf 'cdiVersion: 0.3.0\\nkind: nvidia.com/gpu\\ndevices:\\n- name: all\\n  \
         containerEdits:\\n    env: [A=b]\\n' >etc/cdi/$name.yaml; done",
        "specs", "ONH-402", Status::Warning;
    "mkdir -p etc/cdi; printf 'cdiVersion: 0.3.0\\nkind: nvidia.com/gpu\\ndevices:\\n- name: all\\n  containerEdits:\\n    \
         env: [A=b]\\n' >etc/cdi/a.yaml; chmod 600 etc/cdi/a.yaml",
        "specs", "ONH-404: /etc/cdi/a.yaml: rootless Podman cannot read the file", Status::Warning;
    "mkdir -p etc/cdi; echo '#!/bin/sh' >usr/bin/oci-nvidia-hook; printf 'cdiVersion: 0.3.0\\nkind: nvidia.com/gpu\\ndevices:\\n- name: all\\n  \
         containerEdits:\\n    env: [A=b]\\ncontainerEdits:\\n  hooks:\\n  - {hookName: createRuntime, path: /usr/bin/oci-nvidia-hook, \
         args: [oci-nvidia-hook, rootfs, --stamp, \"driver=535.183.01,boot=b,host=1,files=1\"]}\\n' >etc/cdi/a.yaml",
        "specs", "ONH-405: driver files were added or removed after \"/etc/cdi/a.yaml\" was written", Status::Warning;
    "rm usr/lib/x86_64-linux-gnu/libnvidia-glcore* usr/lib/x86_64-linux-gnu/libnvcuvid*",
        "capabilities", "ONH-224: the libraries of the driver capabilities \"display\", \"graphics\", \"video\" are missing below ", Status::Note;
    "cd usr/lib/x86_64-linux-gnu; cp libnvidia-cfg.so.535.183.01 libnvidia-later.so.535.183.01", "capabilities", "ONH-225", Status::Note;
};
