//! Every kind of finding. A number keeps its meaning: scripts and search engines know it.
//!
//! 00x how the hook is used, 01x and 02x the driver, 03x what is asked for, 04x the container, 05x files that are written;
//! 1xx config.toml, 2xx the host, 3xx the image and its container, 4xx CDI, 5xx engines.

use Severity::{Error, Note, Warning};

/// How much it matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// Worth knowing, nothing to do.
    Note,
    /// The container starts, but lacks something.
    Warning,
    /// The container does not start.
    Error,
}

impl Severity {
    /// As it is printed.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Note => "note",
            Self::Warning => "warning",
            Self::Error => "error",
        }
    }
}

/// One entry.
#[derive(Debug, PartialEq, Eq)]
pub struct Kind {
    /// `ONH-` and three digits
    pub id: &'static str,
    /// How much it matters
    pub severity: Severity,
    /// What is the case, without the names of one host
    pub title: &'static str,
    /// Why that matters
    pub why: &'static str,
}

macro_rules! kinds {
    ($($name:ident $id:literal $severity:ident $title:literal, $why:literal;)*) => {
        $(
            #[doc = concat!("`", $title, "`")]
            pub static $name: Kind = Kind { id: $id, severity: $severity, title: $title, why: $why };
        )*
        /// All of them, in the order of their numbers.
        pub static ALL: &[&Kind] = &[$(&$name),*];
    };
}

kinds! {
    SYSTEM "ONH-001" Error "a call of the system failed", "the container does not start";
    COMMAND_LINE "ONH-002" Error "the command line is wrong", "nothing is done";
    STATE "ONH-003" Error "the container's state or config.json cannot be read", "the hook cannot tell which container it is called for";
    CONFIG_FILE "ONH-004" Error "config.toml cannot be read, or others than root may write it", "it decides who gets GPUs, and whose libraries are loaded";
    CONFIG "ONH-005" Error "config.toml is wrong", "guessing what was meant could give GPUs away";
    NOT_ROOT "ONH-006" Error "it needs root", "only root of the host can load modules and make device nodes";
    NO_GPU "ONH-010" Error "there is no NVIDIA GPU on the PCI bus", "a container that asks for one cannot work";
    NOT_LOADED "ONH-011" Error "the kernel module is not loaded", "without it there is no GPU to give";
    NO_LIBRARIES "ONH-012" Error "the driver's libraries are missing", "containers get them from the host";
    MISMATCH "ONH-013" Error "kernel module and libraries are of different versions", "libraries work with the kernel module of their own version only";
    DRIVER_ROOT "ONH-014" Error "the driver root cannot be opened", "that is where the driver is looked for";
    NVML_LOAD "ONH-015" Error "libnvidia-ml cannot be loaded", "it is what knows the GPUs";
    NVML_TIMEOUT "ONH-016" Error "NVML does not answer in time", "a GPU that hangs must not hang the engine";
    NVML_DIED "ONH-017" Error "NVML crashed", "without its answer nobody knows which GPU is which";
    NVML "ONH-018" Error "NVML reports an error", "without its answer nobody knows which GPU is which";
    NVML_PERMISSION "ONH-019" Error "the hook's user may not open the GPUs", "the device nodes belong to a group that it is not in";
    NVML_PROCESS "ONH-020" Error "the process that asks NVML cannot be prepared", "the driver's library is not run with more rights than it needs";
    NODE_MISSING "ONH-021" Error "a device node is missing", "the container would start with fewer GPUs than it asked for";
    NODE_WRONG "ONH-022" Error "a device node is not the driver's", "the container would get another device";
    LIBRARY_MISSING "ONH-023" Error "a library is missing that the container cannot do without", "its programs would not start";
    UNKNOWN_DEVICE "ONH-030" Error "there is no such GPU", "the container would start with fewer GPUs than it asked for";
    NO_DEVICE "ONH-031" Error "\"all\" is no GPU at all", "a container that asks for GPUs cannot work without one";
    DENIED "ONH-032" Error "config.toml keeps this GPU from containers", "the container would start with fewer GPUs than it asked for";
    NOT_USABLE "ONH-033" Error "the GPU that is asked for does not work", "the container would start with fewer GPUs than it asked for";
    REQUIREMENT "ONH-034" Error "the image needs another driver or GPU", "its programs would fail later, with less to read";
    BAD_REQUIREMENT "ONH-035" Error "a requirement of the image cannot be read", "whether the driver fits is not known";
    CAPABILITY "ONH-036" Error "a driver capability is unknown or not allowed", "the container would lack libraries that it asked for";
    PRIVILEGE "ONH-037" Error "the container is not privileged enough for what it asks for", "MIG layout and monitoring concern all users of a GPU";
    BAD_REQUEST "ONH-038" Error "what is asked for makes no sense", "guessing what was meant could give the wrong device";
    CONTAINER "ONH-040" Error "the container cannot be entered", "the hook is not called at the moment that it expects";
    CGROUP "ONH-041" Error "the container's cgroup cannot be made to allow the GPUs", "the device nodes would be there, and opening them would fail";
    SHARED "ONH-042" Error "a mount would be seen by the host", "nothing of a container may leak to the host";
    READ_ONLY "ONH-043" Error "a read-only directory of the container cannot be covered", "the driver's files have no place there";
    DEVICE_TAKEN "ONH-044" Error "config.json has another device in that place", "the container would get one or the other";
    NO_PROC "ONH-045" Error "the container's /proc is none", "which GPUs it sees there could not be limited";
    IN_THE_WAY "ONH-046" Error "something of the image or of a volume is in the way", "the container would lack something that it cannot do without";
    HOSTS_DEV "ONH-047" Error "a device node would leave something in the host's /dev", "it would be in the way of the driver, there and for every container";
    VOLUME "ONH-048" Error "the driver's files would have to be created on a volume", "what is created there stays when the container is gone, and it may be the host's";
    TOO_LONG "ONH-049" Error "the container was not set up in time", "a file system of the container does not answer, or the host is overloaded";
    SPEC_FILE "ONH-050" Error "the CDI spec cannot be written", "the one that was there is unchanged";
    SPEC_EMPTY "ONH-051" Error "there is no GPU for a CDI spec", "engines refuse a spec without devices";
    INVENTORY_FILE "ONH-052" Error "the inventory file cannot be read", "there are no GPUs to explain with";
    NO_RECORD "ONH-053" Error "there is no record of the container", "a container that asks for no GPU has none";
    BUNDLE "ONH-054" Error "the bundle cannot be written", "there is nothing to attach to a report";
    ENGINE_STOPPED "ONH-060" Error "an engine starts no container because of one of its files", "it refuses all of them for one mistake";

    UNKNOWN_KEY "ONH-101" Warning "an unknown key in config.toml", "it does nothing";
    NO_LOG "ONH-102" Warning "the log cannot be written", "what happens to containers is not in the log";
    REFUSED "ONH-103" Warning "a request that may not be made", "the container starts without GPUs";
    SWARM_RESOURCE "ONH-104" Warning "a swarm-resource that does not begin with DOCKER_", "a container that asks by this variable alone gets nothing";
    OTHERS "ONH-105" Note "another one sets the container up", "done twice is done wrong";
    EXPOSED "ONH-106" Note "every pod may ask for all GPUs", "a variable in an image is enough, whatever the scheduler gave";
    LIMIT_UNMATCHED "ONH-107" Warning "an entry of [devices] matches no GPU", "a misspelt entry keeps no GPU from containers";
    TIMEOUTS "ONH-108" Warning "the engine may end the hook before it can report", "the container fails without a reason, or its start never ends";
    BROKEN_RECORD "ONH-109" Warning "a record cannot be read", "what the hook did for that container is not known";
    OTHER_FILES "ONH-110" Warning "something else gives the container the driver's files", "done twice is done wrong: the hook leaves it alone";
    NODES_ONLY "ONH-111" Warning "a container has GPU nodes and gets no driver files", "its config.json lists the nodes, and what belongs to them cannot be given";
    NO_GPU_HERE "ONH-112" Warning "a container starts without GPUs: the host has none", "no-gpu = \"start\" in config.toml lets it start";

    GPU_LEFT_OUT "ONH-201" Warning "a GPU does not answer", "a GPU that does not answer stops only those who ask for it by name";
    STALE_CACHE "ONH-202" Warning "the linker cache lists a library that is not there", "the library cannot be given to containers";
    OTHER_VERSION "ONH-203" Warning "a library of another driver version", "libraries work with the kernel module of their own version only";
    REQUIREMENT_WARNING "ONH-204" Warning "a requirement of the image is not met", "the container's programs may fail";
    NO_UVM "ONH-205" Warning "the device node /dev/nvidia-uvm is missing", "CUDA will not work in the container";
    NO_CACHE "ONH-206" Note "the linker cache cannot be read", "libraries are looked for in the usual directories";
    NO_FILE "ONH-207" Warning "a file of the driver's files list is not there", "config.toml names it for containers";
    UNREADABLE "ONH-208" Warning "a place of the driver's cannot be looked at", "what is there is missing in the container";
    SEVERAL_VERSIONS "ONH-209" Note "there are libraries of several drivers", "only those of the loaded module work; programs on the host may take others";
    LACKING_LIBRARIES "ONH-210" Warning "the libraries of a driver capability are not installed", "containers that ask for it lack them, or do not start";
    NODE_ACCESS "ONH-211" Warning "a user may not open the device nodes", "rootless containers of that user get no GPU";
    GROUP_NODES "ONH-212" Note "the device nodes are for a group", "processes of containers that are not root are not in it by themselves";
    SLOW_NVML "ONH-213" Warning "NVML is slow", "every container waits for it: the driver starts GPUs anew that nobody uses";
    NO_PERSISTENCE "ONH-214" Note "nvidia-persistenced does not run", "unless persistence mode is on, the driver starts a GPU anew for its first user, which takes seconds";
    NO_FABRIC_MANAGER "ONH-215" Warning "the fabric manager does not run", "CUDA on a board with NVSwitches says \"system not yet initialized\" (802)";
    MIG_EMPTY "ONH-216" Warning "a GPU in MIG mode has no MIG device", "there is nothing of it to give to containers";
    NOT_IN_TABLE "ONH-217" Warning "a GPU does not answer, and a table has no place for it", "programs that read the table do not know of it";
    LOCAL_SOURCE "ONH-218" Warning "a daemon's socket or directory is not given to containers", "a user of the host, or a container, could have put it there";
    NO_ACCESS "ONH-219" Warning "the container's process cannot open its device nodes", "NVML reports \"Insufficient Permissions\", and CUDA finds no device";
    NO_MODESET "ONH-223" Note "the device node /dev/nvidia-modeset is missing", "X11 and Vulkan may not work in the container";
    NOT_INSTALLED "ONH-224" Note "parts of the driver are not installed", "containers that ask for them by capability get nothing of them";
    UNKNOWN_LIBRARIES "ONH-225" Note "libraries of the driver are not in the catalogue", "containers get them with NVIDIA_DRIVER_CAPABILITIES=all only";
    MIG_WHOLE "ONH-230" Warning "a GPU in MIG mode is given without a MIG device", "CUDA programs find no device: they run on MIG devices only";
    IMAGE_CUDA "ONH-231" Note "the image's newer libcuda comes before the host's", "it is made for forward compatibility with the host's driver";

    HIDDEN "ONH-301" Note "a library of the image is hidden by the driver's", "its copy could not work with the host's kernel module";
    IMAGE_CACHE "ONH-302" Warning "the image's ld.so.cache is left as it is", "its programs find the driver's libraries only where ld.so looks without a cache";
    LEFT_OUT "ONH-303" Warning "something cannot be given that the container can do without", "the container starts without it";
    CGROUP_ABOVE "ONH-304" Warning "a cgroup above the container's has device rules of its own", "it may keep the GPUs from the container";
    NOT_TOLD "ONH-305" Note "systemd could not be told about the devices", "\"systemctl daemon-reload\" takes them away from the container";
    NO_GLIBC "ONH-306" Warning "the image has no glibc", "nvidia-smi and CUDA do not run in the container";
    COVERED "ONH-307" Warning "a directory of a volume is read-only in the container", "the hook creates nothing on volumes: a read-only layer with the driver's files covers the directory";
    CRUN "ONH-310" Warning "crun has left the device rules to systemd", "a hook cannot add to them";
    SHARED_CGROUP "ONH-311" Warning "the container has no cgroup of its own", "device rules that are added there hold for all processes of a service, and stay";
    DENIED_BY_PROGRAM "ONH-312" Warning "a device program of the container's cgroup denies the GPUs", "it was attached to deny them, and is left in force: the container cannot open them";
    NO_CGROUPS "ONH-313" Warning "no-cgroups in config.toml keeps the GPUs from containers", "the device nodes are there, and opening them fails";
    NVML_AS_ROOT "ONH-314" Note "NVML runs as root", "the driver's library gets more rights than it needs";
    NOT_LISTED "ONH-315" Note "the image's ldconfig does not look where the driver's libraries are", "when ldconfig runs in the container, as package managers have it do, programs no longer find the libraries";
    UNKNOWN_CDI_HOOK "ONH-316" Warning "a CDI spec names a hook that is not known", "it is passed over, and what it was to do is missing in the container";

    SPEC_LACKS_GPU "ONH-401" Warning "a GPU is left out of the CDI spec", "it is not in the CDI spec";
    SPEC_CONFLICT "ONH-402" Warning "another CDI spec has the same devices", "engines do not take those that were written";
    SPEC_UNSEEN "ONH-403" Warning "the CDI spec lies where engines do not look", "no container gets its devices";
    SPEC_USELESS "ONH-404" Warning "engines cannot use a CDI device, or a CDI spec", "a container that names it does not start";

    NOT_ACTIVE "ONH-501" Warning "an engine does not start the hook", "its containers get no GPU by NVIDIA_VISIBLE_DEVICES";
    CONDITIONAL "ONH-502" Note "an engine starts the hook only for some containers", "the others get no GPU by NVIDIA_VISIBLE_DEVICES";
    SECOND_HOOK "ONH-503" Warning "an engine starts another NVIDIA hook too", "done twice is done wrong: the second one leaves the container alone, or fails";
    NVIDIA_BESIDE "ONH-504" Note "NVIDIA's container toolkit is installed too", "its hook, its CDI specs and its services do what this program does";
    NO_RUNTIME "ONH-505" Warning "an engine's OCI runtime is not there", "it starts no container";
    RELOAD_CUTS "ONH-506" Warning "systemd manages cgroups of version 1", "\"systemctl daemon-reload\" takes GPUs away from running containers";
    DEV_CHAR "ONH-507" Warning "runc leaves out devices that have no link in /dev/char", "containers that are given them by name may not open them";
    SELINUX "ONH-508" Warning "SELinux keeps containers from devices", "opening a GPU fails with \"permission denied\", and NVML says \"insufficient permissions\"";
    CONTAINER_LIBRARY "ONH-509" Warning "a container lacks a library of the driver", "its programs fail with \"cannot open shared object file\"";
    CONTAINER_PATH "ONH-510" Warning "the dynamic linker of a container does not find a library of the driver", "the file exists, and its programs fail with \"cannot open shared object file\"";
    CONTAINER_VERSION "ONH-511" Warning "a container has libraries of another driver version", "libraries work with the kernel module of their own version only";
    CONTAINER_NODE "ONH-512" Warning "a container lacks a device node, or has another device in its place", "its programs find no GPU";
    CONTAINER_ACCESS "ONH-513" Warning "the process of a container may not open a device node", "NVML says \"insufficient permissions\", and CUDA finds no device";
    CONTAINER_CGROUP "ONH-514" Warning "the device cgroup of a container denies a GPU", "opening it fails with \"operation not permitted\", and NVML says \"unknown error\"";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_used_once_and_in_order() {
        let ids: Vec<_> = ALL.iter().map(|kind| kind.id).collect();
        assert!(ids.is_sorted() && ids.windows(2).all(|pair| pair[0] != pair[1]), "{ids:?}");
        for kind in ALL {
            assert!(kind.id.len() == 7 && kind.id.starts_with("ONH-"), "{}", kind.id);
            assert_eq!(kind.severity == Severity::Error, kind.id < "ONH-100", "{}", kind.id);
            for text in [kind.title, kind.why] {
                assert!(!text.is_empty() && !text.ends_with('.') && !text.starts_with(' '), "{text}");
            }
        }
    }
}
