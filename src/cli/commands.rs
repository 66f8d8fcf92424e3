//! The command line of `oci-nvidia-hook`, as data.

use Completes::{CdiDevices, Commands, Directories, Files, Nothing, Words};

use super::grammar::{Command, Completes, Operand, Opt, Program, option, switch};
use super::{Verb, cdi};
use crate::stages::prestart::Place;

/// What is parsed, explained and completed.
pub static PROGRAM: Program = Program {
    name: "oci-nvidia-hook",
    summary: "NVIDIA GPUs in containers of CRI-O and Podman",
    about: "A container engine starts it for every container, as a hooks.d JSON file tells it to. It looks at the \
            container's environment, and if that asks for GPUs with NVIDIA_VISIBLE_DEVICES, it mounts the driver's files \
            and the GPUs' device nodes into the container before the container starts.",
    options: &[
        option(
            "--config FILE\tread this file, which must exist; without it /etc/nvidia-container-runtime/config.toml, else defaults",
            Files,
        ),
        switch("-h, --help\tprint help, on a command if there is one"),
        switch("-V, --version\tprint the version"),
    ],
    options_anywhere: true,
    commands: COMMANDS,
    exit_status: "0 done or nothing to do, 1 failed: the container must not start, 2 wrong command line; see the help of doctor \
                  and status for theirs",
    examples: &[
        ("with the hook's JSON file installed", "podman run --rm -e NVIDIA_VISIBLE_DEVICES=all IMAGE nvidia-smi"),
        ("what a container would get", "oci-nvidia-hook explain < config.json"),
        (
            "with CDI, and no hook installed",
            "oci-nvidia-hook cdi generate\npodman run --rm --device nvidia.com/gpu=all IMAGE nvidia-smi",
        ),
    ],
};

/// What a script reads.
static JSON: Opt = switch("--json\tprint JSON");
static ROOT: Opt = option("--root DIR\tthe root directory of the driver (/)", Directories);
static SPEC_DIR: Opt =
    option("--spec-dir DIR\tlook for specs there; the last one has priority (/etc/cdi, /var/run/cdi)", Directories);
static OUTPUT: Opt = option("--output FILE\twrite the spec there, - for stdout (/var/run/cdi/nvidia.yaml)", Files);
static FORMAT: Opt = option("--format FORMAT\tjson or yaml (what the file's name says)", Words("json yaml"));
static NAME_STRATEGY: Opt =
    option("--name-strategy LIST\tname devices by index, uuid or both (index,uuid)", Words("index uuid index,uuid"));
static VENDOR: Opt = option("--vendor VENDOR\tof the devices' names (nvidia.com)", Nothing);
static CLASS: Opt = option("--class CLASS\tof the devices' names (gpu)", Nothing);
static ADDITIONAL_GIDS: Opt = switch(
    "--additional-gids\tput containers into the groups of device nodes (only if all engines of this host read that: Podman 5.1, CRI-O 1.30)",
);
static NO_ADDITIONAL_GIDS: Opt = switch("--no-additional-gids\tdo not put containers into these groups");
static CREATE: Opt = switch("--create\twrite the spec even if there is none yet");
static HOOK_PATH: Opt = option("--hook-path FILE\tthe program that containers' runtimes start (this one)", Files);
static REQUEST: Opt = switch("--request\texplain only what the container asks for, not the driver");
static INVENTORY: Opt = option("--inventory FILE\texplain with the GPUs of this file, made by info --json", Files);
static STAGE: Opt = option(
    "--stage STAGE\ttake stdin for what this stage gets: config.json at precreate, else the container state",
    Words("precreate prestart createRuntime createContainer"),
);
static BUNDLE: Opt = option("--bundle FILE\talso write what a bug report needs to this new file (.tar.gz)", Files);
static CONTAINER: Opt =
    option("--container NAME\texamine this running container (an id or a name) instead of the host", Nothing);
static PID: Opt = option("--pid PID\texamine the container of this process", Nothing);
static CSV: Opt =
    switch("--csv\tprint comma-separated values: a table of the driver, a blank line, a table of the GPUs");

/// A stage: an engine calls it.
const fn stage(name: &'static str, verb: Verb, summary: &'static str, about: &'static str) -> Command {
    Command { name, verb, operand: None, redirections: " < state.json", summary, about, options: &[], examples: &[] }
}

static COMMANDS: &[Command] = &[
    stage(
        "prestart",
        Verb::Inject(Place::Outside),
        "set the container up",
        "An engine calls it when the container's file system is mounted and its process waits. The container's state is on \
         stdin, and config.json is where the state says.",
    ),
    stage(
        "createRuntime",
        Verb::Inject(Place::Outside),
        "the same, by its newer name",
        "CRI-O and Podman call it where a hook's JSON file says prestart.",
    ),
    stage(
        "createContainer",
        Verb::Inject(Place::Inside),
        "the same, from inside of the container's namespaces",
        "For engines that know only the newer stages. It does not work in a container with a user namespace.",
    ),
    Command {
        redirections: " < config.json > new.json",
        ..stage(
            "precreate",
            Verb::Precreate,
            "Podman's own: print config.json with the GPUs in it",
            "The runtime then sets the container up. Never put a JSON file with this stage into a directory that CRI-O reads: \
             it does not start then.",
        )
    },
    stage("poststart", Verb::Nothing, "nothing to do", ""),
    stage(
        "poststop",
        Verb::Forget,
        "remove what a start created, and its record",
        "What a start created in the container is removed, if it is unchanged; the record of one that failed stays for a while.",
    ),
    Command {
        name: "explain",
        verb: Verb::Explain,
        operand: Some(Operand { usage: "[CONTAINER]", completes: Nothing }),
        redirections: " [< config.json]",
        summary: "show what the hook would do for a container",
        about: "Follows the hook's decisions and changes nothing: which GPUs, which files, or why none. CONTAINER is an id, \
                the start of one, a name, or a pod, as for why. Without one, stdin is the container's OCI spec \
                (config.json), or the container state that engines pass to hooks. A number such as ONH-030 in place of CONTAINER \
                prints what that finding means and how to fix it. The edits are the steps of the hook at \
                prestart; with --stage precreate, what precreate adds to config.json. The exit status is the hook's.",
        options: &[&JSON, &REQUEST, &STAGE, &INVENTORY, &ROOT],
        examples: &[
            ("a container that an engine has", "oci-nvidia-hook explain NAME"),
            ("an OCI spec", "oci-nvidia-hook explain < config.json"),
            ("what a number in a message means", "oci-nvidia-hook explain ONH-030"),
            ("with the GPUs of another machine", "oci-nvidia-hook explain --inventory gpus.json < config.json"),
        ],
    },
    Command {
        name: "doctor",
        verb: Verb::Doctor,
        operand: None,
        redirections: "",
        summary: "find what is wrong with this host, and how to fix it",
        about: "It does not need root, and reports what it could not examine. It asks NVML, and changes nothing on the host \
                except that it ends the answer of NVML that is kept for containers if NVML now contradicts it. The exit \
                status is 0 if there is nothing to fix, 1 with warnings, 3 with errors.",
        options: &[&JSON, &BUNDLE, &CONTAINER, &PID],
        examples: &[
            ("why a running container has no GPU, as root", "oci-nvidia-hook doctor --container NAME"),
            ("all checks, each problem with the command that fixes it", "oci-nvidia-hook doctor"),
            ("for a bug report; no secrets, no serial numbers", "oci-nvidia-hook doctor --bundle report.tar.gz"),
        ],
    },
    Command {
        name: "status",
        verb: Verb::Status,
        operand: None,
        redirections: "",
        summary: "show for each engine whether it starts this hook, and by which file",
        about: "The exit status is 1 if an installed engine does not start it.",
        options: &[&JSON],
        examples: &[],
    },
    Command {
        name: "why",
        verb: Verb::Why,
        operand: Some(Operand { usage: "[CONTAINER]", completes: Nothing }),
        redirections: "",
        summary: "show what the hook did for a container, and why",
        about: "CONTAINER is an id, the start of one, a name, or a pod (POD, NAMESPACE/POD or NAMESPACE/POD/CONTAINER). \
                Without one, the last containers that asked for GPUs are listed: when, which, and their GPUs. Records of \
                root's containers can be read by root only.",
        options: &[&JSON],
        examples: &[
            ("the last containers", "oci-nvidia-hook why"),
            ("one container", "oci-nvidia-hook why NAME"),
            ("a container of a pod", "oci-nvidia-hook why NAMESPACE/POD/CONTAINER"),
        ],
    },
    Command {
        name: "info",
        verb: Verb::Info,
        operand: None,
        redirections: "",
        summary: "show the driver and the GPUs",
        about: "The labels and their order are those of nvidia-container-cli info.",
        options: &[&JSON, &CSV, &ROOT],
        examples: &[
            ("for people", "oci-nvidia-hook info"),
            ("for explain on another machine", "oci-nvidia-hook info --json > gpus.json"),
        ],
    },
    Command {
        name: "list",
        verb: Verb::List,
        operand: None,
        redirections: "",
        summary: "list the driver's files and devices that containers can get",
        about: "A path on each line, without the driver's root, in the order of nvidia-container-cli list. Without an option \
                that chooses, everything: all devices, and the 32-bit libraries too. Only where devices are listed, the \
                driver is asked for its GPUs. Libraries that this program does not know are named on stderr; containers get \
                them with NVIDIA_DRIVER_CAPABILITIES=all only.",
        options: &[
            &super::selection::DEVICE,
            &super::selection::LIBRARIES,
            &super::selection::BINARIES,
            &super::selection::IPCS,
            &super::selection::FIRMWARES,
            &super::selection::COMPAT32,
            &super::selection::MIG_CONFIG,
            &super::selection::MIG_MONITOR,
            &super::selection::IMEX_CHANNEL,
            &super::selection::NO_PERSISTENCED,
            &super::selection::NO_FABRICMANAGER,
            &super::selection::NO_GSP_FIRMWARE,
            &JSON,
            &ROOT,
        ],
        examples: &[
            ("what nvidia-smi needs on GPU 0", "oci-nvidia-hook list --device 0 --binaries --libraries"),
            ("all of it, with its kind", "oci-nvidia-hook list --json"),
        ],
    },
    Command {
        name: "prepare",
        verb: Verb::Prepare,
        operand: None,
        redirections: "",
        summary: "load the driver's modules, make its device nodes and ask NVML, as root",
        about: "So no container has to wait for that. It prints what it did, a line each, and nothing where nothing is \
                missing. What fails is reported on stderr, and the exit status is 1. IMEX channels are made where they \
                are named, and channel 0 where the driver is configured to share it (NVreg_CreateImexChannel0=1).",
        options: &[&super::selection::IMEX_CHANNEL, &ROOT],
        examples: &[],
    },
    Command {
        name: "cdi generate",
        verb: Verb::Cdi(cdi::Verb::Generate),
        operand: None,
        redirections: "",
        summary: "write a CDI spec: GPUs as devices of podman --device, CRI-O and others",
        about: "",
        options: &[
            &OUTPUT,
            &FORMAT,
            &NAME_STRATEGY,
            &VENDOR,
            &CLASS,
            &ADDITIONAL_GIDS,
            &NO_ADDITIONAL_GIDS,
            &HOOK_PATH,
            &SPEC_DIR,
            &ROOT,
        ],
        examples: &[
            ("where engines look for it", "oci-nvidia-hook cdi generate"),
            ("to see it", "oci-nvidia-hook cdi generate --output - --format yaml"),
        ],
    },
    Command {
        name: "cdi refresh",
        verb: Verb::Cdi(cdi::Verb::Refresh),
        operand: None,
        redirections: "",
        summary: "rewrite the CDI spec if it no longer fits the host",
        about: "Without --create it does nothing where there is no spec. Made for boot, udev and package scripts: it prints nothing, and asks the driver only if something changed or there are \
                MIG devices. The kernel does not report that MIG devices change: run it after nvidia-smi mig.",
        options: &[
            &CREATE,
            &OUTPUT,
            &FORMAT,
            &NAME_STRATEGY,
            &VENDOR,
            &CLASS,
            &ADDITIONAL_GIDS,
            &NO_ADDITIONAL_GIDS,
            &HOOK_PATH,
            &ROOT,
        ],
        examples: &[],
    },
    Command {
        name: "cdi list",
        verb: Verb::Cdi(cdi::Verb::List),
        operand: None,
        redirections: "",
        summary: "list the CDI devices that engines find",
        about: "",
        options: &[&SPEC_DIR, &JSON, &ROOT],
        examples: &[],
    },
    Command {
        name: "cdi check",
        verb: Verb::Cdi(cdi::Verb::Check),
        operand: Some(Operand { usage: "[NAME...]", completes: CdiDevices }),
        redirections: "",
        summary: "show for each CDI device whether engines can use it, and why not",
        about: "",
        options: &[&SPEC_DIR, &JSON, &ROOT],
        examples: &[("one of them", "oci-nvidia-hook cdi check nvidia.com/gpu=0")],
    },
    Command {
        name: "completion",
        verb: Verb::Completion,
        operand: Some(Operand { usage: "SHELL", completes: Words("bash zsh fish") }),
        redirections: "",
        summary: "print the script that completes commands and options in a shell",
        about: "SHELL is bash, zsh or fish. Packages install it.",
        options: &[],
        examples: &[("in this bash", "source <(oci-nvidia-hook completion bash)")],
    },
    Command {
        name: "help",
        verb: Verb::Help,
        operand: Some(Operand { usage: "[COMMAND...]", completes: Commands }),
        redirections: "",
        summary: "print help, on a command if there is one",
        about: "",
        options: &[],
        examples: &[],
    },
];
