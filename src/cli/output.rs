//! The only file that writes to stdout: at some stages stdout is data.

use std::io::Write;
use std::process::ExitCode;

/// `--help`
pub const HELP: &str = "\
oci-nvidia-hook: NVIDIA GPUs in containers of CRI-O and Podman

usage: oci-nvidia-hook [--config FILE] STAGE < state.json
       oci-nvidia-hook [--config FILE] precreate < config.json > new.json
       oci-nvidia-hook [--config FILE] explain [options] < state.json
       oci-nvidia-hook [--config FILE] why [--json] [CONTAINER]
       oci-nvidia-hook [--config FILE] info [--json] [--root DIR]
       oci-nvidia-hook [--config FILE] list [--root DIR] [--libraries] [--compat32]
                                       [--binaries] [--ipcs] [--firmwares]
       oci-nvidia-hook [--config FILE] prepare [--root DIR]
       oci-nvidia-hook [--config FILE] doctor [--json] [--bundle FILE.tar.gz]
       oci-nvidia-hook status [--json]
       oci-nvidia-hook [--config FILE] cdi generate|refresh [options]
       oci-nvidia-hook [--config FILE] cdi list|check [--spec-dir DIR] [--json] [NAME]

A container engine starts it for every container, as a hooks.d JSON file tells it
to. It looks at the container's environment, and if that asks for GPUs with
NVIDIA_VISIBLE_DEVICES, it mounts the driver's files and the GPUs' device nodes
into the container before the container starts.

stages:
  prestart, createRuntime  set the container up
  createContainer          the same, from inside of the container's namespaces
  precreate                Podman's own: print config.json with the GPUs in it,
                           so that the runtime sets the container up
  poststop                 drop the record that \"why\" reads
  poststart                nothing to do

commands:
  explain  tell what the hook would do for a container, and change nothing
  why      tell what the hook did for a container, by id or name, and why; without
           one, list the last
  info     tell what driver and GPUs there are
  list     list the driver's files that containers can get
  prepare  load the driver's modules, make its device nodes and ask NVML, as root,
           so that no container has to wait for it
  doctor   look for what is wrong with this host, and tell what mends it
  status   tell for each engine whether it starts this hook, and by which file
  cdi generate  write a CDI spec: GPUs as devices of podman --device, CRI-O and others
  cdi refresh   write it if the one that is there does not fit the host any more
  cdi list      list the CDI devices that engines find
  cdi check     tell of each whether engines can use it, and why not

options:
  --config FILE   read this file; it must exist. Without it:
                  /etc/nvidia-container-runtime/config.toml, else defaults
  --json          print JSON (doctor, explain, why, info, status, cdi list, cdi check)
  --root DIR      the directory that is / for the driver
  --bundle F      write what a bug report needs to this new file (doctor)
  --request       explain only what the container asks for, not the driver
  --inventory F   explain with the GPUs of this file, made by info --json
  --stage STAGE   explain for this stage; at precreate stdin is config.json
  --output F      write the spec there, - for stdout (/var/run/cdi/nvidia.yaml)
  --format F      json or yaml (what the file's name says)
  --name-strategy LIST
                  name devices by index, uuid or both (index,uuid)
  --vendor V, --class C
                  of the devices' names (nvidia.com, gpu)
  --additional-gids, --no-additional-gids
                  put containers into the groups of device nodes, or not: engines
                  before Podman 5.1 and CRI-O 1.30 read no spec that says so
                  (only if all engines of this host read it)
  --hook-path F   the program that containers' runtimes start (this one)
  --spec-dir DIR  look there for specs; the last counts most (/etc/cdi, /var/run/cdi)
  -h, --help      print this
  -V, --version   print the version

exit status: 0 done or nothing to do, 1 failed: the container must not start,
2 wrong command line; doctor: 0 nothing to mend, 1 warnings, 3 errors; status: 1 if
an engine does not start the hook

examples:
  with the hook's JSON file installed:
    podman run --rm -e NVIDIA_VISIBLE_DEVICES=all IMAGE nvidia-smi
  what will a container get?
    oci-nvidia-hook explain --stage precreate < config.json
  with CDI, and no hook installed:
    oci-nvidia-hook cdi generate
    podman run --rm --device nvidia.com/gpu=all IMAGE nvidia-smi
";

/// Prints and succeeds, or fails when nobody reads.
pub fn print(text: &str) -> ExitCode {
    write(text.as_bytes())
}

/// The same for bytes.
pub fn write(bytes: &[u8]) -> ExitCode {
    let mut stdout = std::io::stdout().lock();
    // Stdout is buffered by lines, and what it could not write at the end of the program nobody would hear of.
    match stdout.write_all(bytes).and_then(|()| stdout.flush()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}
