//! The catalog of findings. Scripts rely on the numbers, so a number is never reused.
//!
//! Errors: 00x command line and configuration, 01x and 02x driver, 03x request, 04x container, 05x files that commands write,
//! 06x engines. Warnings and notes: 1xx config.toml and permissions, 2xx host, 3xx image and container,
//! 4xx CDI, 5xx engines, 6xx the kubelet plugin. The page docs/findings.md is generated from this file.

use base::report::Kind;
pub use base::report::SYSTEM;
use base::report::Severity::{Error, Note, Warning};

/// Returns the kind with this number: `ONH-030`, `onh-030`, `ONH030`, `030` or `30`.
#[must_use]
pub fn find(number: &str) -> Option<&'static Kind> {
    let number = number_of(number)?;
    ALL.iter()
        .copied()
        .find(|kind| number_of(kind.id()) == Some(number))
}

/// Returns the number in `ONH-030`, `onh030`, `030` or `30`; `None` if the text is something else.
#[must_use]
pub fn number_of(text: &str) -> Option<u16> {
    let digits = match text.split_at_checked(3) {
        Some((prefix, rest)) if prefix.eq_ignore_ascii_case("ONH") => {
            rest.strip_prefix('-').unwrap_or(rest)
        }
        _ => text,
    };
    let is_number =
        (1..=3).contains(&digits.len()) && digits.bytes().all(|byte| byte.is_ascii_digit());
    digits.parse().ok().filter(|_| is_number)
}

/// Returns the kind with the next lower or next higher number, whichever is nearer, if it is at most 5 away.
#[must_use]
pub fn neighbor(number: u16) -> Option<&'static Kind> {
    let away = |kind: &&Kind| number_of(kind.id()).map_or(u16::MAX, |other| other.abs_diff(number));
    ALL.iter()
        .copied()
        .min_by_key(away)
        .filter(|kind| away(kind) <= 5)
}

macro_rules! kinds {
    ($($name:ident $id:literal $severity:ident $title:literal why $why:literal fix $fix:literal see $see:literal;)*) => {
        $(
            #[allow(rustdoc::broken_intra_doc_links, reason = "titles name tables of config.toml in brackets")]
            #[doc = concat!($id, ": ", $title, ".")]
            pub static $name: Kind =
                Kind::new($id, $severity, concat!($title, "\n", $why, "\n", $fix, "\n", $see));
        )*
        /// All kinds in the order of their numbers.
        pub static ALL: &[&Kind] = &[&SYSTEM, $(&$name),*];
    };
}

kinds! {
    COMMAND_LINE "ONH-002" Error "invalid command line"
        why "nothing was done"
        fix "see `oci-nvidia-hook --help`, or `args` in the hook file if an engine started it" see "oci-nvidia-hook(8)";
    STATE "ONH-003" Error "the container's state or config.json cannot be read"
        why "the hook cannot read the request of the container"
        fix "have the engine call the hook at a stage of the OCI runtime specification, with the container's state on stdin" see "modes.md#modes";
    CONFIG_FILE "ONH-004" Error "config.toml cannot be read, or is writable by users other than root"
        why "config.toml decides which containers get GPUs and which libraries are loaded"
        fix "make root the owner and the only writer: `chown root:root FILE; chmod go-w FILE`" see "security.md#guarantees";
    CONFIG "ONH-005" Error "config.toml has an invalid value or a syntax error"
        why "guessing the intended value could give GPUs to the wrong containers"
        fix "correct the line in the message, which lists the allowed values" see "oci-nvidia-hook.toml(5)";
    NOT_ROOT "ONH-006" Error "the command must run as root"
        why "only root can load kernel modules and create device nodes"
        fix "run `sudo oci-nvidia-hook prepare`" see "oci-nvidia-hook(8)";
    NO_GPU "ONH-010" Error "there is no NVIDIA GPU on the PCI bus"
        why "a container that requests a GPU cannot work on this host"
        fix "list the NVIDIA devices with `lspci -d 10de:`; on a host without GPUs, set `no-gpu = \"start\"` in config.toml" see "";
    NOT_LOADED "ONH-011" Error "the kernel module nvidia is not loaded"
        why "no GPU can be used without it"
        fix "run `modprobe nvidia`; if that fails, `journalctl -k` shows the reason (Secure Boot rejects unsigned modules)" see "";
    NO_LIBRARIES "ONH-012" Error "the driver's libraries are missing"
        why "containers use the libraries of the host"
        fix "install the libraries in the version of the kernel module, or set `root` in config.toml" see "driver.md#which-packages";
    MISMATCH "ONH-013" Error "the kernel module and the libraries have different versions"
        why "the libraries work only with a kernel module of the same version"
        fix "if the libraries are newer, reboot, or load the new module. If the module is newer, install the libraries of its version; in a container of LXC, install them there" see "driver-update.md#update-the-driver";
    DRIVER_ROOT "ONH-014" Error "the driver root cannot be opened"
        why "the hook searches this directory for the driver"
        fix "correct `root` or `dev-root` in config.toml" see "hosts.md#driver-roots";
    NVML_LOAD "ONH-015" Error "libnvidia-ml cannot be loaded"
        why "the hook queries this library"
        fix "reinstall the driver's libraries and run `ldconfig`" see "";
    NVML_TIMEOUT "ONH-016" Error "NVML did not answer in time"
        why "a GPU that hangs must not block the engine"
        fix "run `nvidia-smi` on the host: if it is slow too, enable persistence mode with `nvidia-smi -pm 1`; otherwise raise `nvml-timeout`" see "oci-nvidia-hook.toml(5)";
    NVML_DIED "ONH-017" Error "NVML crashed"
        why "without NVML it is unknown which GPUs exist"
        fix "run `nvidia-smi` on the host, and see `journalctl -k`" see "";
    NVML "ONH-018" Error "NVML reported an error"
        why "without NVML it is unknown which GPUs exist"
        fix "run `nvidia-smi` on the host, and see `journalctl -k`" see "";
    NVML_PERMISSION "ONH-019" Error "the hook's user has no permission to open the GPUs"
        why "the device nodes belong to a group of which the user is not a member"
        fix "as root, compare `ls -l /dev/nvidiactl` with `user` in config.toml. As another user, join the group of the nodes (`usermod -aG GROUP USER`; `video` on SUSE), log in again, and start rootless containers with crun and `--group-add keep-groups`" see "";
    NVML_PROCESS "ONH-020" Error "the process that queries NVML cannot be set up"
        why "the hook does not run the driver's library with more privileges than it needs"
        fix "run the hook as root; check `user` and `root` in config.toml" see "security.md#nvml";
    NODE_MISSING "ONH-021" Error "a device node is missing"
        why "the container would start with fewer GPUs than it requested"
        fix "run `oci-nvidia-hook prepare` as root, with `--imex-channel N` for an IMEX channel" see "";
    NODE_WRONG "ONH-022" Error "a device node belongs to another driver"
        why "the container would get another device"
        fix "run `oci-nvidia-hook prepare` as root, which replaces the node" see "";
    LIBRARY_MISSING "ONH-023" Error "a required library of the driver is missing"
        why "programs in the container would not start"
        fix "install the driver's libraries in the version of the kernel module and run `ldconfig`" see "driver.md#which-packages";
    PLATFORM "ONH-024" Error "the driver of this platform is not supported"
        why "Jetson has another driver, and the kubelet plugin cannot assign the GPUs of WSL 2"
        fix "use NVIDIA's container toolkit on a Jetson; on WSL 2, use the hook or CDI" see "compatibility.md#parts-of-the-toolkit";
    NOT_LIMITED "ONH-025" Error "config.toml denies a GPU of WSL 2"
        why "on WSL 2, one device node stands for all GPUs"
        fix "remove `allow` and `deny` of GPUs from `[devices]` in config.toml, or disable the GPU in Windows" see "hosts.md#wsl-2";
    MPS_START "ONH-026" Error "the MPS daemon of a GPU cannot be started"
        why "containers that share the GPU do not start until its daemon runs"
        fix "follow the hint of the message, then run `systemctl restart oci-nvidia-mps`" see "sharing.md#problems";
    MPS_FAILED "ONH-027" Error "the MPS daemon of a GPU failed"
        why "without the daemon, nothing limits the GPU memory of a container. Therefore no CUDA program can start on the GPU"
        fix "see `journalctl -u 'oci-nvidia-mps@*'`; systemd starts the daemon again. To use the GPU without MPS, remove it from `mps-gpus` in config.toml, and run `systemctl restart oci-nvidia-mps`" see "sharing.md#problems";
    UNKNOWN_DEVICE "ONH-030" Error "the requested GPU does not exist"
        why "the container would start with fewer GPUs than it requested"
        fix "request one of the GPUs that the message lists; `oci-nvidia-hook info` also prints UUIDs and bus ids" see "";
    NO_DEVICE "ONH-031" Error "\"all\" matches no GPU"
        why "a container that requests GPUs cannot work without one"
        fix "run `nvidia-smi -L` on the host; check `[devices]` in config.toml" see "oci-nvidia-hook.toml(5)";
    DENIED "ONH-032" Error "config.toml does not allow containers to use the requested GPU or device"
        why "the container would start with fewer devices than it requested"
        fix "request one of the GPUs that the message lists, or change `[devices]` in config.toml" see "oci-nvidia-hook.toml(5)";
    NOT_USABLE "ONH-033" Error "the requested GPU does not work, or the device cgroup of the caller denies it"
        why "the container would start with fewer GPUs than it requested"
        fix "see `nvidia-smi -q` and `journalctl -k`; a GPU that fell off the bus needs a reset or a reboot. In a job of Slurm or a container of LXC, request the GPU for it" see "";
    REQUIREMENT "ONH-034" Error "the image requires another driver or GPU"
        why "programs of the image would fail later with a less specific error"
        fix "update the driver, use an image for an earlier CUDA version, or set `NVIDIA_DISABLE_REQUIRE=true`" see "";
    BAD_REQUIREMENT "ONH-035" Error "a requirement of the image has a syntax error"
        why "the hook cannot check whether the driver meets it"
        fix "correct the term in the message; `cuda>=12.4` is a term, a comma means and, a space means or" see "usage.md#requesting-gpus";
    CAPABILITY "ONH-036" Error "a driver capability is unknown or not allowed"
        why "the container would lack libraries that it requested"
        fix "request capabilities that the message lists, or extend `supported-driver-capabilities` in config.toml" see "oci-nvidia-hook.toml(5)";
    PRIVILEGE "ONH-037" Error "the request requires a privileged container"
        why "managing or monitoring MIG devices affects all users of a GPU"
        fix "start the container with `--privileged` and without a user namespace, or without the variable in the message" see "compatibility.md#comparison-of-messages";
    BAD_REQUEST "ONH-038" Error "the request is invalid"
        why "guessing the intended value could give the container the wrong device"
        fix "correct the variable or mount in the message; the message lists the allowed values" see "";
    CONTAINER "ONH-040" Error "the container cannot be entered"
        why "the hook was not called at a stage at which it can set the container up"
        fix "have the engine call the hook at prestart or createRuntime (`stages` in the hook file)" see "modes.md#modes";
    CGROUP "ONH-041" Error "the container's device cgroup denies the GPUs, and cannot be changed to allow them"
        why "the device nodes would exist, but programs could not open them"
        fix "follow the hint of the message, or use CDI; `denied-devices = \"start\"` in config.toml starts such containers" see "modes.md#modes";
    SHARED "ONH-042" Error "a mount would propagate to the host"
        why "nothing that is set up for a container may change the host"
        fix "mount the volume with `rslave` or `rprivate` propagation" see "usage.md#limitations";
    READ_ONLY "ONH-043" Error "a read-only directory of the container cannot be covered with an overlay"
        why "the driver's files cannot be placed in it"
        fix "load the kernel module `overlay`, or use an image whose root file system is writable" see "usage.md#limitations";
    DEVICE_TAKEN "ONH-044" Error "config.json lists another device at the path of a GPU's device node"
        why "the container can have only one of the two"
        fix "start the container without that `--device` option" see "usage.md#requesting-gpus";
    NO_PROC "ONH-045" Error "/proc of the container is not a proc file system"
        why "the hook cannot limit which GPUs the container sees there"
        fix "have the engine mount a proc file system at `/proc`" see "security.md#guarantees";
    IN_THE_WAY "ONH-046" Error "a file of the image or of a volume blocks a mount point"
        why "the container would lack something that it requires"
        fix "change the image or the volume at the path in the message" see "";
    HOSTS_DEV "ONH-047" Error "a device node would have to be created in the host's /dev"
        why "the node would remain, and be visible to other containers"
        fix "create the node with `oci-nvidia-hook prepare --root /`, or start the container without `-v /dev:/dev`" see "hosts.md#device-nodes-and-proc";
    VOLUME "ONH-048" Error "the driver's files would have to be created on a volume"
        why "files on a volume remain, and may belong to the host"
        fix "mount the volume at another path: it contains other mounts, or its file system does not support an overlay" see "security.md#exceptions";
    TOO_LONG "ONH-049" Error "the container was not set up in time"
        why "a file system of the container does not answer, or the host is overloaded"
        fix "find the volume that does not answer; `findmnt -t fuse,nfs,nfs4` lists the candidates" see "";
    SPEC_FILE "ONH-050" Error "the CDI spec cannot be written"
        why "an existing CDI spec is unchanged"
        fix "run the command as root, or select a file with `--output`" see "modes.md#cdi";
    SPEC_EMPTY "ONH-051" Error "there is no device for a CDI spec"
        why "engines reject a CDI spec without devices"
        fix "list the GPUs with `oci-nvidia-hook info`; check `[devices]` in config.toml; for other devices, load the kernel module in the message" see "modes.md#cdi";
    INVENTORY_FILE "ONH-052" Error "the inventory file cannot be read"
        why "`plan --inventory` takes the GPUs from this file"
        fix "create it with `oci-nvidia-hook info --json` on the host that has the GPUs" see "oci-nvidia-hook(8)";
    NO_RECORD "ONH-053" Error "the container is unknown"
        why "the hook keeps records only of containers that request GPUs"
        fix "list the containers that requested GPUs with `oci-nvidia-hook ps --all`, and the engines that call the hook with `oci-nvidia-hook status`" see "";
    NOT_EXAMINED "ONH-055" Error "a running container cannot be examined"
        why "its process does not exist, or belongs to another user, or is not in a container"
        fix "run `oci-nvidia-hook doctor --container NAME` as root, for a container that is running" see "";
    MPS_NOT_READY "ONH-056" Error "config.toml shares the GPU through MPS, and its daemon is not ready"
        why "programs could not use the GPU, or would use it without limits"
        fix "run `systemctl enable --now oci-nvidia-mps`, and see `systemctl status 'oci-nvidia-mps*'`; to use the GPU without MPS, remove it from `mps-gpus` in config.toml and restart that unit" see "sharing.md#mps";
    MPS_SEVERAL "ONH-057" Error "a GPU that is shared through MPS is requested together with other GPUs"
        why "a program can connect to the MPS daemon of one GPU only"
        fix "request only this GPU, or only the others; for monitoring, set `NVIDIA_DRIVER_CAPABILITIES=utility`" see "sharing.md#mps";
    ENGINE_STOPPED "ONH-060" Error "an engine rejects one of its configuration or hook files"
        why "the engine starts no container, or none that requests GPUs"
        fix "correct or remove the file in the message" see "";
    HOOK_WITHOUT_ENV "ONH-061" Error "a hook entry inside of containers has no `env`"
        why "the linker loads the library that `LD_PRELOAD` of the image names into the hook, which runs as root of the host (CVE-2025-23266)"
        fix "add `env` to the entry, for example `[\"PATH=/usr/sbin:/usr/bin:/sbin:/bin\"]`, or update the program that wrote it" see "security.md#guarantees";
    SPEC_DENIED "ONH-062" Error "a CDI spec includes a GPU that config.toml denies"
        why "the hook entry of our specs stops containers with the GPU, but other hook entries do not"
        fix "run `oci-nvidia-hook cdi refresh`; remove the GPU from specs of other programs" see "security.md#exceptions";

    OUTDATED_NODE "ONH-063" Error "a CDI spec has device nodes of an earlier boot or of an earlier load of a module"
        why "the number belongs to no driver or to another one now"
        fix "run `oci-nvidia-hook cdi refresh`; `oci-nvidia-hook cdi check` shows which spec has which numbers" see "modes.md#keeping-the-spec-up-to-date";

    PLUGIN_UNKNOWN_DEVICE "ONH-071" Error "the kubelet requests a device that does not exist"
        why "the GPU was removed, or its MIG devices were replaced, after the kubelet had chosen it"
        fix "delete the pod" see "kubernetes.md#if-it-does-not-work";
    PLUGIN_UNHEALTHY_DEVICE "ONH-072" Error "the kubelet requests a device that does not work"
        why "the GPU failed after the kubelet had chosen it"
        fix "delete the pod; `oci-nvidia-kubelet-plugin check` on the node prints the state of its GPUs" see "kubernetes.md#if-it-does-not-work";
    PLUGIN_SHARED_DEVICE "ONH-073" Error "a container requests several replicas of shared GPUs"
        why "two replicas can be the same GPU, and a client of MPS can use one GPU only"
        fix "request one, or GPUs that are not shared" see "sharing.md#kubernetes";
    PLUGIN_DRIVER "ONH-074" Error "the kubelet plugin cannot query the driver"
        why "without the driver, it is unknown which GPUs work, so none is offered"
        fix "run `oci-nvidia-hook doctor` on the node" see "";
    PLUGIN_CONFIG "ONH-075" Error "a configuration file or a variable of the kubelet plugin is invalid"
        why "a setting in NVIDIA's or GKE's configuration file, or in a variable, cannot be used"
        fix "correct the line in the message" see "device-plugins.md#switching-from-nvidias-plugin";
    PLUGIN_MOUNTS "ONH-076" Error "config.toml does not accept requests by volume mounts, which the kubelet plugin uses"
        why "with `device-list-strategy = \"volume-mounts\"`, no pod with GPUs would start"
        fix "set `accept-nvidia-visible-devices-as-volume-mounts = true` in config.toml" see "device-plugins.md#strategies";
    PLUGIN_HOST_PATH "ONH-077" Error "the directory for the kubelet plugin's strategy host-path is missing"
        why "containers would find no driver in it"
        fix "install the driver in the directory, or set another `host-path` or `device-list-strategy`" see "device-plugins.md#strategies";
    CLAIM_UNREADABLE "ONH-081" Error "the claim of a pod cannot be read from the API server"
        why "only the claim lists the devices of the pod; the kubelet retries"
        fix "run `oci-nvidia-kubelet-plugin check --interface dra` on the node, which tests the credentials" see "claims.md#credentials";
    CLAIM_STALE "ONH-082" Error "the claim that the kubelet names does not exist any more, or has no device"
        why "the claim was deleted or replaced while the pod started"
        fix "delete the pod" see "claims.md#if-it-does-not-work";
    CLAIM_CONFIG "ONH-083" Error "a claim has a configuration that is not supported"
        why "the device would not behave as the claim requires"
        fix "remove the configuration from the claim or its DeviceClass. `GpuConfig` is accepted with the defaults of time-slicing, or with MPS if the limits in `[sharing]` of config.toml are not above the claim's" see "claims.md#if-it-does-not-work";

    UNKNOWN_KEY "ONH-101" Warning "unknown key in config.toml"
        why "the key has no effect"
        fix "correct the key; the message suggests a similar one if there is one" see "oci-nvidia-hook.toml(5)";
    NO_LOG "ONH-102" Warning "the log file cannot be written"
        why "the log lacks entries; containers are set up as usual"
        fix "set `debug` in config.toml to a file in an existing directory that only root can write to" see "oci-nvidia-hook.toml(5)";
    REFUSED "ONH-103" Warning "the container is not allowed to request GPUs in this way"
        why "the container starts without GPUs"
        fix "in Kubernetes, request GPUs with `resources.limits: nvidia.com/gpu`; otherwise use CDI, or change the `accept-…` keys of config.toml" see "kubernetes.md#restricting-requests";
    SWARM_RESOURCE "ONH-104" Warning "a name in swarm-resource does not begin with DOCKER_"
        why "a container that uses only this variable gets no GPUs"
        fix "rename the resource in Docker so that its variable begins with `DOCKER_RESOURCE_`" see "oci-nvidia-hook.toml(5)";
    OTHERS "ONH-105" Note "GPUs are already provided by another mechanism"
        why "setting up a container twice causes conflicts"
        fix "no action is needed; to have this hook set the container up, remove the other mechanism" see "modes.md#modes";
    EXPOSED "ONH-106" Note "every pod can request all GPUs"
        why "a variable in the image is enough"
        fix "on a shared cluster, set `accept-nvidia-visible-devices-envvar-when-unprivileged = false` and `accept-nvidia-visible-devices-as-volume-mounts = true` in config.toml" see "kubernetes.md#restricting-requests";
    LIMIT_UNMATCHED "ONH-107" Warning "an entry of the [devices] or [sharing] table matches no GPU"
        why "a misspelled entry does not protect or share any GPU"
        fix "correct or remove the entry in config.toml; `oci-nvidia-hook info` prints the GPUs of the host" see "oci-nvidia-hook.toml(5)";
    TIMEOUTS "ONH-108" Warning "the engine may end the hook before it can report an error"
        why "a container then fails without a reason, or its start never ends"
        fix "raise `timeout` in the hook file, or lower `nvml-timeout` in config.toml" see "oci-nvidia-hook.toml(5)";
    BROKEN_RECORD "ONH-109" Warning "the record of a container cannot be read"
        why "the result of the hook for that container is unknown"
        fix "remove the file; the hook also removes it when there are many records" see "oci-nvidia-hook(8)";
    OTHER_FILES "ONH-110" Warning "config.json already contains files of the driver"
        why "setting up a container twice causes conflicts, so the hook does nothing"
        fix "remove one of the two mechanisms" see "modes.md#modes";
    NODES_ONLY "ONH-111" Warning "a container has device nodes of GPUs but gets no files of the driver"
        why "an error keeps the hook from adding the driver's files; the container starts without them"
        fix "fix the error in the message, or set `NVIDIA_VISIBLE_DEVICES=void`" see "device-plugins.md#nvidias-device-plugin";
    NO_GPU_HERE "ONH-112" Warning "a container starts without GPUs because the host has none"
        why "it requests `all`, and `no-gpu = \"start\"` in config.toml allows it to start"
        fix "set `no-gpu = \"error\"` if such containers must not start" see "configuration.md#nodes-without-a-gpu";
    FEATURE_VALUE "ONH-115" Warning "a variable has no effect, because its value is unknown"
        why "the variable has other values"
        fix "set the variable to the value in the message, or remove it" see "usage.md#requesting-gpus";

    GPU_LEFT_OUT "ONH-201" Warning "a GPU does not answer"
        why "containers that request `all` get the other GPUs, if there are any; those that request this GPU do not start"
        fix "see `journalctl -k` and `nvidia-smi -q` on the host" see "";
    STALE_CACHE "ONH-202" Warning "the linker cache lists a library that does not exist"
        why "the library cannot be given to containers"
        fix "run `ldconfig` on the host as root" see "";
    OTHER_VERSION "ONH-203" Warning "a library of another driver version was found"
        why "the libraries work only with a kernel module of the same version"
        fix "if the library is newer, load the new module or reboot; otherwise remove the packages of the other version" see "hosts.md#versions-and-additional-files";
    REQUIREMENT_WARNING "ONH-204" Warning "a requirement of the image is not met"
        why "programs in the container may fail; `require = \"warn\"` in config.toml allows it to start"
        fix "update the driver, or use an image for an earlier CUDA version" see "oci-nvidia-hook.toml(5)";
    NO_UVM "ONH-205" Warning "the device node /dev/nvidia-uvm is missing"
        why "CUDA does not work in the container"
        fix "run `oci-nvidia-hook prepare` as root" see "";
    NO_CACHE "ONH-206" Note "the linker cache cannot be read"
        why "the hook searches the usual library directories instead"
        fix "run `ldconfig` on the host as root" see "compatibility.md#comparison-of-messages";
    NO_FILE "ONH-207" Warning "a file or directory that config.toml names for containers does not exist"
        why "containers do not get the file, or the libraries of the directory"
        fix "correct `files` or `library-dirs` in the `[driver]` table of config.toml" see "oci-nvidia-hook.toml(5)";
    UNREADABLE "ONH-208" Warning "a path of the driver cannot be read"
        why "containers lack the files below it"
        fix "run `stat` on the path as root" see "";
    SEVERAL_VERSIONS "ONH-209" Note "libraries of several driver versions are installed"
        why "only the libraries with the version of the kernel module work, and programs on the host may use the others"
        fix "remove the packages of the versions that are not loaded" see "";
    LACKING_LIBRARIES "ONH-210" Warning "the libraries of a driver capability are not installed"
        why "containers that request the capability lack them, or do not start"
        fix "install the package in the message" see "graphics.md#graphics";
    NODE_ACCESS "ONH-211" Warning "rootless containers of a user have no permission to open the device nodes"
        why "rootless containers of that user get no GPU"
        fix "join the group of the nodes (`usermod -aG GROUP USER`; `video` on SUSE), log in again, and start rootless containers with crun and `--group-add keep-groups`" see "";
    GROUP_NODES "ONH-212" Note "only members of a group can open the device nodes"
        why "processes of containers that do not run as root are not members of the group by default"
        fix "use `--group-add keep-groups` with rootless Podman and crun, and `supplementalGroups` with the group's number for pods that have `runAsUser`" see "";
    SLOW_NVML "ONH-213" Warning "NVML is slow"
        why "without persistence mode the driver initializes idle GPUs for every container, which delays its start"
        fix "run `systemctl enable --now nvidia-persistenced`" see "";
    NO_PERSISTENCE "ONH-214" Note "nvidia-persistenced is not running"
        why "the driver may initialize an idle GPU for each user, which takes seconds"
        fix "run `systemctl enable --now nvidia-persistenced`, unless `nvidia-smi -pm 1` has enabled persistence mode" see "";
    NO_FABRIC_MANAGER "ONH-215" Warning "the fabric manager is not running"
        why "on a board with NVSwitches, CUDA fails with \"system not yet initialized\" (802)"
        fix "run `systemctl enable --now nvidia-fabricmanager`; its version must be the driver's" see "";
    MIG_EMPTY "ONH-216" Warning "a GPU in MIG mode has no MIG device"
        why "containers can use such a GPU only through its MIG devices"
        fix "create MIG devices (`nvidia-smi mig -cgi PROFILE -C`) or leave MIG mode (`nvidia-smi -mig 0`)" see "usage.md#mig-devices";
    NOT_IN_TABLE "ONH-217" Warning "a GPU does not answer and is missing from the table"
        why "programs that read the output of `info --csv` do not see the GPU"
        fix "see `nvidia-smi -q` and `journalctl -k` on the host" see "";
    LOCAL_SOURCE "ONH-218" Warning "a socket or directory of a driver daemon is not given to containers"
        why "another user may have created it, or it contains a socket, a FIFO or a device"
        fix "have root start the daemon, or set the MPS directory in `environment` of config.toml" see "security.md#guarantees";
    NO_ACCESS "ONH-219" Warning "the container's process has no permission to open its device nodes"
        why "NVML reports \"Insufficient Permissions\", and CUDA finds no device"
        fix "add the group of the nodes (`--group-add GROUP`, `supplementalGroups: [GROUP]`, or rootless `--group-add keep-groups` with crun), use CDI, or give the host's nodes mode 0666" see "";
    NO_MODESET "ONH-223" Note "the device node /dev/nvidia-modeset is missing"
        why "X11 and Vulkan can fail in containers that request `graphics` or `display`"
        fix "run `modprobe nvidia-modeset` and then `oci-nvidia-hook prepare`, as root" see "";
    NOT_INSTALLED "ONH-224" Note "parts of the driver are not installed"
        why "containers that request these capabilities do not get them"
        fix "install the packages in the message if containers need them" see "driver.md#which-packages";
    UNKNOWN_LIBRARIES "ONH-225" Note "libraries of the driver are not in the catalog"
        why "the driver is newer than this program"
        fix "set `NVIDIA_DRIVER_CAPABILITIES=all` for containers that need them; `oci-nvidia-hook files` reports the libraries" see "compatibility.md#differences-from-the-nvidia-container-toolkit";
    MIG_WHOLE "ONH-230" Warning "a GPU in MIG mode is given without a MIG device"
        why "CUDA programs find no device, since they run on MIG devices only"
        fix "request MIG devices (`0:0`, `MIG-<uuid>`) or `all`; if the GPU has no MIG devices, create one or leave MIG mode" see "usage.md#mig-devices";
    IMAGE_CUDA "ONH-231" Note "the image's libcuda is used, not the host's libcuda"
        why "the image contains NVIDIA's forward compatibility libraries, which are newer than the host's"
        fix "no action is needed; `cuda-compat-mode = \"disabled\"` in config.toml selects the host's libcuda" see "oci-nvidia-hook.toml(5)";
    MIG_LEFT_OUT "ONH-232" Warning "MIG devices without device nodes are left out"
        why "NVML does not list a MIG device without nodes, and its index may select another one"
        fix "run `oci-nvidia-hook prepare` as root" see "usage.md#mig-devices";

    NO_FEATURE "ONH-233" Warning "the host has no device nodes for GPUDirect, GDRCopy or NVSwitches"
        why "the container starts without them"
        fix "load the kernel module in the message" see "usage.md#requesting-gpus";

    NOT_ISOLATED "ONH-234" Warning "a container on WSL 2 can use more GPUs than it requests"
        why "on WSL 2, one device node stands for all GPUs"
        fix "set `CUDA_VISIBLE_DEVICES` in the container to limit its programs" see "hosts.md#wsl-2";

    MPS_DIFFERS "ONH-235" Warning "an MPS daemon differs from config.toml"
        why "`[sharing]` was changed after the daemon started"
        fix "run `systemctl restart oci-nvidia-mps`, which ends the clients of all daemons" see "sharing.md#problems";
    MPS_OUTDATED "ONH-236" Warning "the driver was updated while an MPS daemon runs"
        why "the daemon keeps the old kernel module loaded"
        fix "stop the unit `oci-nvidia-mps`, load the new kernel module, and start the unit again" see "driver-update.md#a-host-with-podman-or-cri-o";

    HIDDEN "ONH-301" Note "a file of the driver hides a file of the image"
        why "the image's copy would not work with the host's kernel module"
        fix "no action is needed; remove the copy from the image to avoid the note" see "";
    IMAGE_CACHE "ONH-302" Warning "the image's ld.so.cache was not changed"
        why "its format is unknown, or it is not a regular file; some programs do not find the driver's libraries"
        fix "run `ldconfig` when the image is built, or set `LD_LIBRARY_PATH` in the container" see "";
    LEFT_OUT "ONH-303" Warning "an optional file of the driver cannot be given to the container"
        why "the container starts without it"
        fix "check the path in the message, in the image and on its volumes" see "";
    CGROUP_ABOVE "ONH-304" Warning "a parent cgroup of the container restricts devices"
        why "its rules may deny the GPUs to the container"
        fix "allow the GPUs in the systemd unit of that cgroup with `DeviceAllow=`" see "";
    SYSTEMD_UNAWARE "ONH-305" Note "systemd does not know about the devices of the container"
        why "`systemctl daemon-reload` removes the container's access to them"
        fix "use CDI" see "modes.md#modes";
    NO_GLIBC "ONH-306" Warning "the image does not contain glibc"
        why "the device nodes exist, but nvidia-smi and the CUDA libraries cannot be loaded"
        fix "use an image with glibc (openSUSE, Debian, Fedora, UBI)" see "troubleshooting.md#the-container-starts-without-a-gpu";
    COVERED "ONH-307" Warning "a directory of a volume is read-only in the container"
        why "the hook covers the directory with a read-only layer that contains the driver's files"
        fix "mount the volume at another path if the container has to write to the directory" see "usage.md#limitations";
    CRUN "ONH-310" Warning "systemd will restore the device rules that crun passed to it"
        why "`systemctl daemon-reload` removes the container's access to the GPUs, because the hook could not change its unit file"
        fix "allow hooks of the engine to write to `/run/systemd/transient`, or use CDI" see "hosts.md#selinux";
    SHARED_CGROUP "ONH-311" Warning "the container shares its cgroup with a service"
        why "device rules would apply to the whole service, and would remain"
        fix "start the container without `--cgroups=disabled`, or allow the GPUs with `DeviceAllow=` in the unit" see "troubleshooting.md#permissions";
    DENIED_BY_PROGRAM "ONH-312" Warning "a device program of the container's cgroup denies the GPUs"
        why "it was attached to deny them and stays in effect, so the container cannot open them"
        fix "change the policy that attached the program; `bpftool prog show id ID` describes it" see "security.md#details";
    NO_CGROUPS "ONH-313" Warning "no-cgroups in config.toml prevents containers from opening the GPUs"
        why "the device nodes exist, but the device cgroup denies them"
        fix "remove the key; rootless containers do not need it" see "oci-nvidia-hook.toml(5)";
    NVML_AS_ROOT "ONH-314" Note "NVML runs as root"
        why "only root can open the device nodes or read the library"
        fix "give the device nodes a group (`NVreg_DeviceFileGID`, `NVreg_DeviceFileMode=0660`), or make the library readable for all users" see "security.md#nvml";
    NOT_LISTED "ONH-315" Note "the image's ldconfig does not search the directory of the driver's libraries"
        why "programs no longer find the libraries after ldconfig has run in the container"
        fix "add `include /etc/ld.so.conf.d/*.conf` to `/etc/ld.so.conf` of the image" see "";
    UNKNOWN_CDI_HOOK "ONH-316" Warning "a CDI spec contains an unknown hook"
        why "this program ignores the hook, so the container lacks a part of its setup"
        fix "update this program" see "compatibility.md#nvidia-cdi-hook";
    MISSPELLED_VARIABLE "ONH-317" Warning "an unknown variable has a name like `NVIDIA_VISIBLE_DEVICES`"
        why "the container may lack a device that its author wanted to request"
        fix "correct the name of the variable" see "usage.md#requesting-gpus";
    LEFT_BEHIND "ONH-318" Warning "files of another driver version remain in the container"
        why "a program that loads one of these libraries fails with `file too short`; the files may belong to another container too"
        fix "create the container again from its image, or remove the files in the message" see "driver-update.md#a-host-with-podman-or-cri-o";
    MPS_ROOT "ONH-319" Note "root of the container can change the limits of MPS"
        why "the driver's daemon takes commands from root of the host. `oci-nvidia-mps` notices a changed limit, and ends the daemon with all its clients"
        fix "start the container as another user or with a user namespace, or use MIG" see "sharing.md#what-is-enforced";

    SPEC_LACKS_GPU "ONH-401" Warning "the CDI spec lacks a GPU"
        why "the GPU does not answer"
        fix "see `nvidia-smi -q` and `journalctl -k` on the host, then run `oci-nvidia-hook cdi refresh`" see "modes.md#keeping-the-spec-up-to-date";
    SPEC_CONFLICT "ONH-402" Warning "another CDI spec defines the same devices"
        why "engines accept neither of the two definitions"
        fix "remove one of the CDI specs, and run `oci-nvidia-hook cdi generate` if you removed the one of this program" see "modes.md#keeping-the-spec-up-to-date";
    SPEC_UNSEEN "ONH-403" Warning "the CDI spec is in a directory that engines do not read"
        why "no container gets its devices"
        fix "write it to a directory that engines read, with `--output`, or add its directory to `cdi_spec_dirs` of the engine" see "troubleshooting.md#the-container-does-not-start";
    SPEC_USELESS "ONH-404" Warning "engines cannot use a CDI device or a CDI spec"
        why "a container that requests the device does not start"
        fix "run `oci-nvidia-hook cdi check`, which prints a hint for each device: another driver version, a missing file, or a CDI version that the engine does not support" see "troubleshooting.md#the-container-does-not-start";
    SPEC_OUTDATED "ONH-405" Warning "driver files were added or removed after a CDI spec was written"
        why "containers lack the new files"
        fix "run `oci-nvidia-hook cdi refresh`, and check `systemctl status oci-nvidia-hook-cdi.path`" see "modes.md#keeping-the-spec-up-to-date";

    NOT_ACTIVE "ONH-501" Warning "an engine does not start the hook"
        why "its containers get no GPU with `NVIDIA_VISIBLE_DEVICES`"
        fix "run `oci-nvidia-hook status`, which prints the directories that the engine reads" see "";
    CONDITIONAL "ONH-502" Note "an engine starts the hook only for some containers"
        why "other containers get no GPU with `NVIDIA_VISIBLE_DEVICES`"
        fix "set `\"when\": {\"always\": true}` in the hook file" see "troubleshooting.md#the-hook-was-not-called";
    SECOND_HOOK "ONH-503" Warning "an engine also starts another NVIDIA hook"
        why "the second hook does nothing, or fails"
        fix "remove NVIDIA's package, or its hook file" see "migration.md#what-stays-and-what-to-remove";
    NVIDIA_BESIDE "ONH-504" Note "the NVIDIA Container Toolkit is installed too"
        why "its hook, CDI specs and services set up containers, as this program does"
        fix "remove it unless something else needs it" see "migration.md#what-stays-and-what-to-remove";
    NO_RUNTIME "ONH-505" Warning "the OCI runtime of an engine is missing"
        why "the engine cannot start containers"
        fix "install the runtime, or configure another one in the engine" see "engines.md#tested-engines";
    RELOAD_CUTS "ONH-506" Warning "systemd manages cgroup v1"
        why "`systemctl daemon-reload` removes the GPUs from running containers"
        fix "use CDI, or boot with cgroup v2" see "troubleshooting.md#lost-device-rules";
    DEV_CHAR "ONH-507" Warning "runc ignores devices without a link in /dev/char"
        why "some containers cannot open devices that the engine adds"
        fix "run `oci-nvidia-hook prepare`, which creates the links, or update to runc 1.1.7 or newer" see "troubleshooting.md#lost-device-rules";
    SELINUX "ONH-508" Warning "SELinux denies containers access to devices"
        why "opening a GPU fails with \"permission denied\", and NVML reports \"insufficient permissions\""
        fix "run `setsebool -P container_use_xserver_devices on`, or set `container_use_devices` if the policy does not have that boolean" see "hosts.md#selinux";
    CONTAINER_LIBRARY "ONH-509" Warning "a container lacks a library of the driver"
        why "its programs fail with \"cannot open shared object file\""
        fix "start it with the hook or CDI; a device plugin has to mount the library itself" see "";
    CONTAINER_PATH "ONH-510" Warning "the dynamic linker of a container does not find a library of the driver"
        why "the file exists, but programs fail with \"cannot open shared object file\""
        fix "set `LD_LIBRARY_PATH` to the library's directory, or have the hook or CDI place the libraries" see "";
    CONTAINER_VERSION "ONH-511" Warning "a container has libraries of another driver version"
        why "the libraries work only with a kernel module of the same version"
        fix "restart the container after a driver update; remove driver libraries from the image and from volumes" see "";
    CONTAINER_NODE "ONH-512" Warning "a container lacks a device node, or has another device at its path"
        why "its programs find no GPU"
        fix "start it with the hook, CDI or `--device`" see "";
    CONTAINER_ACCESS "ONH-513" Warning "the process of a container has no permission to open a device node"
        why "NVML reports \"insufficient permissions\", and CUDA finds no device"
        fix "create the container again, and request the GPUs with `NVIDIA_VISIBLE_DEVICES` or CDI instead of `--device`, without `device-node-access = \"host\"`. Rootless: use `--group-add keep-groups` with crun, which gives the group to the first user only, or nodes with mode 0666" see "";
    CONTAINER_CGROUP "ONH-514" Warning "the device cgroup of a container denies a GPU"
        why "opening the GPU fails with \"operation not permitted\", and NVML reports \"unknown error\""
        fix "restart the container, and use CDI or `--device`" see "modes.md#modes";
    CONTAINER_SILENT "ONH-515" Warning "the files of a container cannot be examined"
        why "a FUSE or network file system of the container does not answer"
        fix "list the file systems of the container with `findmnt --task PID`, and check their servers" see "";
    SECOND_WRITER "ONH-517" Warning "a service of the NVIDIA Container Toolkit also writes the CDI spec"
        why "each replaces the other's file; NVIDIA's version ignores `[devices]` in config.toml"
        fix "run `systemctl disable --now nvidia-cdi-refresh.path nvidia-cdi-refresh.service`, then `oci-nvidia-hook cdi refresh`" see "migration.md#what-stays-and-what-to-remove";

    OTHER_PLUGIN "ONH-601" Warning "another device plugin offers the GPUs of the node"
        why "two plugins would give the same GPU to two pods"
        fix "use one device plugin: delete the DaemonSet of the other plugin, or stop `oci-nvidia-kubelet-plugin.service`" see "claims.md#from-one-mode-to-the-other";
    PLUGIN_MIG_STRATEGY "ONH-602" Warning "MIG devices cannot be offered as GPUs"
        why "with the MIG strategy \"single\", all devices of the resource must be of one kind"
        fix "create MIG devices of one profile on all GPUs, or set `mig-strategy = \"mixed\"`" see "sharing.md#kubernetes";
    PLUGIN_NOT_RUNNING "ONH-603" Warning "the kubelet plugin is installed and offers nothing"
        why "the kubelet does not know the GPUs of the node"
        fix "run `oci-nvidia-kubelet-plugin check`, and `systemctl enable --now oci-nvidia-kubelet-plugin`" see "kubernetes.md#3-the-kubelet-plugin";
    PLUGIN_NO_EFFECT "ONH-604" Warning "a setting of the kubelet plugin has no effect"
        why "the kubelet plugin does not support this setting of another plugin, or `[devices]` denies the devices in `extra-devices`"
        fix "remove the setting" see "device-plugins.md#switching-from-nvidias-plugin";
    PLUGIN_DIFFERS "ONH-605" Note "the running kubelet plugin offers other devices than these settings describe"
        why "`check` reads config.toml and its own options; the running plugin has read them when it started"
        fix "run `oci-nvidia-kubelet-plugin check` with the options of the running plugin, or restart the plugin" see "kubernetes.md#3-the-kubelet-plugin";
    PLUGIN_WITHDREW "ONH-606" Warning "the kubelet plugin has withdrawn devices"
        why "the kubelet assigns them to no pod: a GPU had an error, or the driver does not work"
        fix "run `oci-nvidia-kubelet-plugin check`, which prints the reasons; a repaired GPU is offered again after `quiet-period`, or after `oci-nvidia-kubelet-plugin clear UUID`" see "kubernetes.md#health";
    OTHER_DRIVER "ONH-607" Warning "another DRA driver, or a device plugin, already offers the node's GPUs"
        why "two of them would give the same GPU to two pods"
        fix "use one of them: delete the DaemonSet of the other program, or stop `oci-nvidia-kubelet-plugin.service`" see "claims.md#from-one-mode-to-the-other";
    API_SERVER "ONH-608" Warning "the devices of the node cannot be published"
        why "the API server does not answer, or refuses the request"
        fix "run `oci-nvidia-kubelet-plugin check --interface dra` on the node" see "claims.md#if-it-does-not-work";
    ENGINE_WITHOUT_CDI "ONH-609" Warning "the engine of the node gives containers no CDI devices"
        why "pods would start without the GPUs that their CDI names select"
        fix "with cri-dockerd, set `device-list-strategy = \"envvar\"` and use the runtime `nvidia` of `oci-nvidia-hook-compat`, or use `host-path`; with containerd, set `enable_cdi = true`; DRA mode needs an engine with CDI" see "device-plugins.md#strategies";
}

#[cfg(test)]
mod tests {
    use base::report::Severity;

    use super::*;

    #[test]
    fn numbers_are_used_once_and_in_order() {
        let ids: Vec<_> = ALL.iter().map(|kind| kind.id()).collect();
        assert!(
            ids.is_sorted() && ids.windows(2).all(|pair| pair[0] != pair[1]),
            "{ids:?}"
        );
        for kind in ALL {
            assert!(
                kind.id().len() == 7 && kind.id().starts_with("ONH-"),
                "{}",
                kind.id()
            );
            assert_eq!(
                kind.severity == Severity::Error,
                kind.id() < "ONH-100",
                "{}",
                kind.id()
            );
            let texts = kind.texts();
            for text in [texts.title, texts.why, texts.fix] {
                assert!(
                    !text.is_empty() && !text.ends_with('.') && text.trim() == text,
                    "{text}"
                );
                assert!(
                    !text.contains(['|', '\n']) && text.matches('`').count() % 2 == 0,
                    "a table cell: {text}"
                );
            }
        }
    }

    #[test]
    fn numbers_are_found_however_they_are_written() {
        for number in [
            "ONH-030", "onh-030", "Onh-030", "ONH030", "onh30", "ONH-30", "030", "30",
        ] {
            assert_eq!(
                find(number).map(|kind| kind.id()),
                Some("ONH-030"),
                "{number}"
            );
        }
        for number in [
            "", "ONH-", "ONH-999", "999", "0030", "ONH-0300", "-30", "+30", "ONH--30", "\u{e9}30",
            "web",
        ] {
            assert_eq!(find(number), None, "{number}");
        }
    }

    #[test]
    fn only_near_numbers_are_neighbors() {
        let last = number_of(ALL.last().unwrap().id()).unwrap();
        assert_eq!(neighbor(last + 2), ALL.last().copied());
        assert_eq!(
            (neighbor(0), neighbor(30).map(|kind| kind.id())),
            (Some(&SYSTEM), Some("ONH-030"))
        );
        assert_eq!(neighbor(last + 6), None);
    }
}
