//! What doctor decides about a running container.

use base::sys::confine::Identity;
use nvidia_host::driver::DriverKind;

use super::facts::{ContainerNode, ContainerProcess, FoundLibrary, FoundNode, Library};
use super::*;
use crate::cgroup::filter::Filter;
use crate::doctor::check;
use crate::doctor::tests::{in_words, rows};

fn node(name: &str, minor: u32) -> ContainerNode {
    let found = FoundNode {
        device: Some((195, minor)),
        mode: 0o666,
        uid: 0,
        gid: 0,
        nodev: false,
    };
    ContainerNode {
        name: name.to_owned(),
        expected: Some((195, minor)),
        found: Some(found),
    }
}

fn library(name: &str) -> Library {
    let found = FoundLibrary {
        path: format!("/usr/lib64/{name}"),
        version: Some("535.1".to_owned()),
        id: (1, 2),
        is_hosts: Some(true),
        is_empty: false,
    };
    Library {
        name: name.to_owned(),
        found: Some(found),
        elsewhere: None,
    }
}

/// A container without problems, whose process is not root.
fn good() -> ContainerFacts {
    ContainerFacts {
        pid: 7,
        name: "web".to_owned(),
        module: Some("535.1".to_owned()),
        driver_kind: DriverKind::Linux,
        process: ContainerProcess {
            identity: Identity { uid: 9, gid: 9 },
            groups: vec![44],
            overrides: false,
            capabilities: None,
        },
        libraries: vec![library("libcuda.so.1"), library("libnvidia-ml.so.1")],
        nodes: vec![node("nvidiactl", 255), node("nvidia0", 0)],
        gpus: Some([0].into()),
        filter: Ok(Filter::None),
    }
}

fn results(facts: &ContainerFacts, name: &str) -> Vec<String> {
    in_words(check::run(Section::Container, CHECKS, facts), name)
}

fn cuda(facts: &mut ContainerFacts) -> &mut FoundLibrary {
    facts.libraries[0].found.as_mut().unwrap()
}

fn found_node(facts: &mut ContainerFacts) -> &mut FoundNode {
    facts.nodes[1].found.as_mut().unwrap()
}

#[test]
fn libraries_and_processes() {
    rows! { good results
        "container" f: f.pid = 8 => "ok: process 8 runs as user 9, group 9 of the host; driver 535.1";
        "container" f: f.module = None => "ONH-011: the kernel module of the host is not loaded";
        "libraries" f: f.pid = 8 => "ok: libcuda.so.1 is \"/usr/lib64/libcuda.so.1\", the host's file of driver 535.1";
        "libraries" f: f.libraries[0].found = None
            => "ONH-509: libcuda.so.1 is missing in the container; start the container with -e NVIDIA_VISIBLE_DEVICES=all, ";
        "libraries" f: { f.libraries[0].found = None; f.process.capabilities = Some("utility".to_owned()) }
            => "skipped: NVIDIA_DRIVER_CAPABILITIES does not request libcuda.so.1";
        // An empty variable requests the default, compute and utility.
        "libraries" f: { f.libraries[0].found = None; f.process.capabilities = Some(String::new()) } => "ONH-509: ";
        "libraries" f: { f.libraries[1].found = None; f.process.capabilities = Some("graphics, video".to_owned()) } => "ONH-509: libnvidia";
        "libraries" f: { f.libraries[0].found = None; f.libraries[0].elsewhere = Some("/opt/libcuda.so.1".to_owned()) }
            => "ONH-510: the container's dynamic linker does not find libcuda.so.1, which is at \"/opt/libcuda.so.1\"; \
                start the container with -e LD_LIBRARY_PATH=/opt,";
        "libraries" f: cuda(f).is_empty = true => "ONH-509: \"/usr/lib64/libcuda.so.1\" is empty";
        // The name of a file that is not the host's proves nothing.
        "libraries" f: cuda(f).is_hosts = Some(false) => "skipped: libcuda.so.1 is \"/usr/lib64/libcuda.so.1\", which is not the host's";
        "libraries" f: { cuda(f).is_hosts = None; cuda(f).version = None } => "skipped: libcuda.so.1 is \"/usr/lib64/libcuda.so.1\", ";
        "libraries" f: { cuda(f).is_hosts = Some(false); cuda(f).version = Some("550".to_owned()) }
            => "ONH-511: \"/usr/lib64/libcuda.so.1\" has version 550, but the kernel module has version 535.1";
        "libraries" f: { f.module = None; f.driver_kind = DriverKind::Wsl } => "ok: libcuda.so.1 is \"/usr/lib64/libcuda.so.1\", the host's";
        "libraries" f: { f.module = None; f.driver_kind = DriverKind::Wsl; cuda(f).is_hosts = Some(false) }
            => "ONH-511: \"/usr/lib64/libcuda.so.1\" belongs to the Linux driver 535.1";
    }
}

#[test]
fn nodes_and_permissions() {
    rows! { good results
        "nodes" f: f.pid = 8 => "ok: the container has nvidiactl, nvidia0";
        "nodes" f: f.nodes[0].found = None => "ONH-512: the device node \"/dev/nvidiactl\" is missing in the container";
        "nodes" f: f.nodes.clear() => "ONH-512: the container has no device node of a GPU";
        "nodes" f: f.nodes[1].expected = Some((195, 3)) => "ONH-512: \"/dev/nvidia0\" in the container is 195:0 instead of 195:3";
        "nodes" f: found_node(f).device = None => "ONH-512: \"/dev/nvidia0\" in the container is not a device node";
        "nodes" f: f.gpus = Some([1].into()) => "ONH-030: the GPU of \"/dev/nvidia0\" does not exist on this host any more";
        "nodes" f: f.gpus = None => "ok: the container has nvidiactl, nvidia0";
        "access" f: f.pid = 8 => "ok: the container's process has permission";
        "access" f: f.nodes.clear() => "skipped: the container has no device nodes";
        "access" f: found_node(f).nodev = true => "ONH-513: file systems that are mounted with nodev contain \"/dev/nvidia0\"";
        "access" f: found_node(f).mode = 0o660 => "ONH-513: user 9, group 9 of the host cannot open \"/dev/nvidia0\" (0:root 0660)";
        "access" f: { found_node(f).mode = 0o660; f.process.overrides = true } => "ok: ";
        "access" f: { found_node(f).mode = 0o660; found_node(f).gid = 44 } => "ok: ";
        "access" f: { found_node(f).mode = 0o660; found_node(f).uid = 9 } => "ok: ";
        "cgroup" f: f.pid = 8 => "ok: no device cgroup limits the container";
        "cgroup" f: f.filter = Ok(Filter::List("c 195:255 rwm\n".to_owned()))
            => "ONH-514: the device cgroup denies \"/dev/nvidia0\" (195:0); restart the container";
        "cgroup" f: f.filter = Ok(Filter::Programs(vec![None])) => "skipped: cannot determine what the programs";
        "cgroup" f: f.filter = Err("gone".to_owned()) => "skipped: cannot read the device cgroup: gone";
    }
}
