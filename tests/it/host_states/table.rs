//! The table of host states: each object of a host with each fault that it can have.

/// A state of a host.
#[derive(Debug)]
pub struct State {
    /// The part of the host, the object and its fault
    pub name: String,
    /// The shell script that makes it
    pub script: String,
    /// Whether the fault is one of the engine's, so only an engine can show what happens
    pub is_of_engine: bool,
    /// Whether a start repairs the fault
    pub is_repaired: bool,
}

/// What an object is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// A library or program
    Elf,
    /// A text that names versions, paths or users
    Text,
    /// A device node, with the number of its device
    Node(u32, u32),
    Dir,
}

const FAULTS: [&str; 8] = [
    "missing",
    "empty",
    "wrong type",
    "wrong owner",
    "wrong mode",
    "wrong version",
    "foreign architecture",
    "dangling link",
];

/// Returns the script that makes the fault, if such an object can have it.
fn script(kind: Kind, path: &str, fault: &str) -> Option<String> {
    let script = match (fault, kind) {
        ("missing", _) => format!("rm -rf {path}"),
        ("empty", Kind::Elf | Kind::Text) => format!(": >{path}"),
        ("empty", Kind::Node(..)) => format!("rm {path}; : >{path}"),
        ("empty", Kind::Dir) => format!("find {path} -mindepth 1 -delete"),
        ("wrong type", Kind::Elf | Kind::Text) => format!("rm {path}; mkdir {path}"),
        ("wrong type", Kind::Node(major, minor)) => {
            format!("rm {path}; mknod -m 666 {path} b {major} {minor}")
        }
        ("wrong type", Kind::Dir) => format!("rm -r {path}; : >{path}"),
        ("wrong owner", _) => format!("chown 1000:1000 {path}; chmod go-rwx {path}"),
        ("wrong mode", _) => format!("chmod 0 {path}"),
        // A file of another driver at the place of this one.
        ("wrong version", Kind::Elf) => {
            format!("sed -i 's/535\\.183\\.01/550.054.14/g' $(readlink -f {path})")
        }
        ("wrong version", Kind::Text) => {
            format!(
                "sed 's/535\\.183\\.01/550.54.14/g; s/[0-9]/7/g' {path} >/run/other; cat /run/other >{path}"
            )
        }
        ("wrong version", Kind::Node(major, minor)) => {
            format!("rm {path}; mknod -m 666 {path} c {major} {}", minor ^ 8)
        }
        // e_machine of the ELF header: there is no driver for EM_RISCV.
        ("foreign architecture", Kind::Elf) => format!(
            "printf '\\363\\000' | dd of=$(readlink -f {path}) bs=1 seek=18 conv=notrunc status=none"
        ),
        ("foreign architecture", Kind::Text) => {
            format!("iconv -f LATIN1 -t UTF-16 {path} >/run/other; cat /run/other >{path}")
        }
        ("dangling link", _) => format!("rm -rf {path}; ln -s /nowhere {path}"),
        _ => return None,
    };
    Some(script)
}

const LIBRARIES: Objects = &[
    ("$lib/libnvidia-ml.so.535.183.01", Kind::Elf),
    ("$lib/libnvidia-ml.so.1", Kind::Elf),
    ("$lib/libcuda.so.535.183.01", Kind::Elf),
    ("$lib/libcuda.so.1", Kind::Elf),
    ("$lib/libnvidia-ptxjitcompiler.so.535.183.01", Kind::Elf),
    ("$lib/libnvidia-nvvm.so.535.183.01", Kind::Elf),
    ("/usr/bin/nvidia-smi", Kind::Elf),
    ("/etc/ld.so.cache", Kind::Text),
];
const PROC: Objects = &[
    ("/proc/driver/nvidia", Kind::Dir),
    ("/proc/driver/nvidia/version", Kind::Text),
    ("/proc/driver/nvidia/params", Kind::Text),
    ("/proc/driver/nvidia/gpus", Kind::Dir),
    ("/proc/driver/nvidia/gpus/0000:01:00.0", Kind::Dir),
    (
        "/proc/driver/nvidia/gpus/0000:01:00.0/information",
        Kind::Text,
    ),
];
const NODES: Objects = &[
    ("/dev/nvidiactl", Kind::Node(195, 255)),
    ("/dev/nvidia0", Kind::Node(195, 0)),
    ("/dev/nvidia1", Kind::Node(195, 1)),
    ("/dev/nvidia-uvm", Kind::Node(511, 0)),
    ("/dev/nvidia-uvm-tools", Kind::Node(511, 1)),
    ("/dev/nvidia-modeset", Kind::Node(195, 254)),
    ("/dev/char", Kind::Dir),
];
const CONFIG: Objects = &[
    ("/etc/nvidia-container-runtime/config.toml", Kind::Text),
    ("/etc/nvidia-container-runtime", Kind::Dir),
    (
        "/etc/nvidia-container-runtime/config.toml.d/10.toml",
        Kind::Text,
    ),
    ("/etc/nvidia-container-runtime/config.toml.d", Kind::Dir),
];
const HOOK_FILES: Objects = &[
    (
        "/usr/share/containers/oci/hooks.d/oci-nvidia-hook.json",
        Kind::Text,
    ),
    ("/usr/share/containers/oci/hooks.d", Kind::Dir),
    ("/usr/bin/oci-nvidia-hook", Kind::Elf),
];
const RUN: Objects = &[
    ("/run/oci-nvidia-hook", Kind::Dir),
    ("/run/oci-nvidia-hook/inventory", Kind::Text),
    ("/run/oci-nvidia-hook/inventory.lock", Kind::Text),
    ("/run/oci-nvidia-hook/containers", Kind::Dir),
];
const USERS: Objects = &[
    ("/etc/passwd", Kind::Text),
    ("/etc/group", Kind::Text),
    ("/etc/nsswitch.conf", Kind::Text),
];

/// The objects of a part of a host: their paths, and what they are.
type Objects = &'static [(&'static str, Kind)];

/// A part of a host: its name, its objects, and a script that runs first.
const PARTS: &[(&str, Objects, &str)] = &[
    ("libraries", LIBRARIES, ""),
    ("/proc", PROC, ""),
    ("nodes", NODES, ""),
    ("nodes, load-kmods = false", NODES, LEAVE),
    ("nodes of a group", NODES, OF_A_GROUP),
    ("config.toml", CONFIG, A_DROP_IN),
    ("hook files", HOOK_FILES, ""),
    (RUN_DIRECTORY, RUN, A_RUN_DIRECTORY),
    ("users", USERS, ""),
    ("users, user = nobody", USERS, AS_NOBODY),
];
pub const RUN_DIRECTORY: &str = "run directory";

const LEAVE: &str = "printf '[nvidia-container-cli]\\nload-kmods = false\\n' >/etc/nvidia-container-runtime/config.toml;";
/// As SUSE's packages of the driver create them.
const OF_A_GROUP: &str = "chgrp 44 /dev/nvidia?* /dev/nvidia?; chmod 660 /dev/nvidia0 /dev/nvidia1 /dev/nvidiactl; \
     sed -i 's/^DeviceFileGID: .*/DeviceFileGID: 44/; s/^DeviceFileMode: .*/DeviceFileMode: 432/' /proc/driver/nvidia/params;";
const A_DROP_IN: &str = "mkdir -p /etc/nvidia-container-runtime/config.toml.d; \
     printf '[devices]\\nallow = [\"0\", \"1\"]\\n' >/etc/nvidia-container-runtime/config.toml.d/10.toml; \
     printf '[nvidia-container-cli]\\ndebug = \"/run/onh.log\"\\n' >/etc/nvidia-container-runtime/config.toml;";
const A_RUN_DIRECTORY: &str = "mkdir -p -m 700 /run/oci-nvidia-hook/containers; for file in inventory inventory.lock; do \
     [ -e /run/oci-nvidia-hook/$file ] || install -m 600 /dev/null /run/oci-nvidia-hook/$file; done;";
const AS_NOBODY: &str = "printf '[nvidia-container-cli]\\nuser = \"nobody\"\\n' >/etc/nvidia-container-runtime/config.toml;";

/// Faults of more than one object, which reports of users contain.
const MORE: &[(&str, &str)] = &rows! {
    "none", "";
    "all nodes missing", "rm /dev/nvidia[0-9]* /dev/nvidiactl /dev/nvidia-uvm* /dev/nvidia-modeset";
    "all nodes of another user", "chown 1000:1000 /dev/nvidia*; chmod 600 /dev/nvidia?*";
    "all nodes of mode 0", "chmod 0 /dev/nvidia?*";
    "a GPU that NVML does not list", "cp -r /proc/driver/nvidia/gpus/0000:02:00.0 /proc/driver/nvidia/gpus/0000:03:00.0; \
         sed -i 's/02:00.0/03:00.0/; s/Device Minor:.*/Device Minor: \\t 2/; s/51eed001/51eed002/' \
         /proc/driver/nvidia/gpus/0000:03:00.0/information";
    "no module", "rm -r /proc/driver/nvidia /sys/module/nvidia*";
    "no uvm module", "rm -r /sys/module/nvidia_uvm /dev/nvidia-uvm*";
    "no libraries", "rm $lib/libnvidia* $lib/libcuda*; ldconfig";
    "a full disk during an update", ": >$lib/libcuda.so.535.183.01; : >$lib/libnvidia-nvvm.so.535.183.01; ldconfig";
    "all GPUs denied", "printf '[devices]\\ndeny = [\"all\"]\\n' >/etc/nvidia-container-runtime/config.toml";
    "one GPU denied", "printf '[devices]\\ndeny = [\"0\"]\\n' >/etc/nvidia-container-runtime/config.toml";
    "setting: a missing dev-root", "printf '[driver]\\ndev-root = \"/nonexistent\"\\n' >/etc/nvidia-container-runtime/config.toml";
    "setting: a dev-root that is a file", "printf '[driver]\\ndev-root = \"/etc/passwd\"\\n' >/etc/nvidia-container-runtime/config.toml";
    "setting: a missing file", "printf '[driver]\\nfiles = [\"/gone\"]\\n' >/etc/nvidia-container-runtime/config.toml";
    "setting: a missing library directory", "printf '[driver]\\nlibrary-dirs = [\"/gone\"]\\n' >/etc/nvidia-container-runtime/config.toml";
    "setting: a missing linker cache", "printf '[nvidia-container-cli]\\nldcache = \"/gone\"\\n' >/etc/nvidia-container-runtime/config.toml";
    "setting: a linker cache that is a text", "printf '[nvidia-container-cli]\\nldcache = \"/etc/passwd\"\\n' >/etc/nvidia-container-runtime/config.toml";
    "setting: only a GPU that does not exist", "printf '[devices]\\nallow = [\"77\"]\\n' >/etc/nvidia-container-runtime/config.toml";
    "an unknown key", "echo 'bogus = 1' >/etc/nvidia-container-runtime/config.toml";
    "an unknown user", "printf '[nvidia-container-cli]\\nuser = \"nosuchuser\"\\n' >/etc/nvidia-container-runtime/config.toml";
    "a driver root without a driver",
        "mkdir /run/empty; printf '[nvidia-container-cli]\\nroot = \"/run/empty\"\\n' >/etc/nvidia-container-runtime/config.toml";
    "a missing driver root", "printf '[nvidia-container-cli]\\nroot = \"/run/gone\"\\n' >/etc/nvidia-container-runtime/config.toml";
    "no major numbers", "mount --bind /dev/null /proc/devices";
    "no PCI devices", "mount -t tmpfs none /sys/bus/pci/devices";
};

/// Returns the table.
pub fn all() -> Vec<State> {
    let mut states = Vec::new();
    for (part, objects, before) in PARTS {
        for (path, kind) in *objects {
            for fault in FAULTS {
                let Some(script) = script(*kind, path, fault) else {
                    continue;
                };
                states.push(State {
                    name: format!("{part}: {path}: {fault}"),
                    script: format!("{before} {script}"),
                    is_of_engine: *part == "hook files",
                    is_repaired: *part == "nodes" || *part == "nodes of a group",
                });
            }
        }
    }
    for (name, script) in MORE {
        states.push(State {
            name: (*name).to_owned(),
            script: (*script).to_owned(),
            is_of_engine: false,
            is_repaired: name.starts_with("all nodes"),
        });
    }
    states
}
