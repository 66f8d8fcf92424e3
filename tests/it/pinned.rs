//! The device program that crun 1.23 and newer pins, with a real systemd, which attaches it again.

use oci_nvidia_hook::testing::cgroup::DeviceAccess;

use crate::booted::Systemd;
use crate::cgroup;
use crate::support::Need;

tests! {
    &[Need::Root, Need::Programs(&["systemd-run", "nsenter"]), Need::CgroupV2] =>
        the_program_that_crun_pins_stays_extended;
    &[
        Need::Root,
        Need::Programs(&["systemd-run", "nsenter", "strace"]),
        Need::CgroupV2,
    ] => a_hook_that_is_killed_leaves_the_devices_denied;
}

const PIN: &str = "/sys/fs/bpf/crun/onh-pinned_scope";
const PINNED_SCOPE: &str = "/sys/fs/cgroup/system.slice/onh-pinned.scope";
const ALLOWED: &str = "No such device or address";
const DENIED: &str = "not permitted";

/// crun 1.23 and newer: systemd attaches a pinned program. It attaches it again when it reloads, and when it executes itself.
fn the_program_that_crun_pins_stays_extended() {
    match std::env::var(PINNED_STEP).as_deref() {
        Ok("pin") => return cgroup::pin_as_crun(PIN),
        Ok(_) => return cgroup::allow_in_scope(PINNED_SCOPE, DeviceAccess::Added),
        Err(_) => {}
    }
    let systemd = Systemd::start();
    prepare_pin(&systemd);
    start_pinned_scope(&systemd);
    expect(&systemd, "before the hook", [false, false]);
    systemd.enter(&pinned_step("hook")).ok();
    for when in ["after the hook", "daemon-reload", "daemon-reexec"] {
        if when != "after the hook" {
            systemd.enter(&format!("systemctl {when}")).ok();
        }
        expect(&systemd, when, [true, false]);
    }
    let shown = systemd
        .enter("systemctl show onh-pinned.scope -p NeedDaemonReload -p BPFProgram")
        .ok();
    assert_eq!(shown.trim(), "NeedDaemonReload=no");
}

/// The hook is killed before and after each system call that changes the programs or the unit file, and before and after it waits
/// for systemd. The container can never open the other GPU, and after a reload its GPU only if the unit file has been changed.
///
/// systemd 257.13 of Debian 13 does not attach a pinned program again when it reloads, also without the hook: a container then has no
/// device filter at all, unless the hook has attached its own.
fn a_hook_that_is_killed_leaves_the_devices_denied() {
    let systemd = Systemd::start();
    prepare_pin(&systemd);
    start_pinned_scope(&systemd);
    systemd.enter("systemctl daemon-reload").ok();
    let is_restored = !is_allowed(&opened_in_pinned_scope(&systemd), PINNED_NODES[1]);
    systemd.enter("systemctl stop onh-pinned.scope").ok();
    start_pinned_scope(&systemd);
    let hook = pinned_step("hook");
    let strace = format!("strace -f -qq -o /tmp/trace -e trace={TRACED}");
    systemd.enter(&format!("{strace} sh -c '{hook}' >&2")).ok();
    let calls = calls_of(&systemd.enter("cat /tmp/trace").ok());
    let first = calls
        .iter()
        .position(|call| call.changes_something)
        .unwrap();
    let last = calls
        .iter()
        .rposition(|call| call.changes_something)
        .unwrap();
    let edit = calls
        .iter()
        .position(|call| call.name == "pwrite64")
        .unwrap();
    assert!(first < edit && edit < last, "{calls:?}");
    for (at, call) in calls.iter().enumerate() {
        if at < first || at > last + 1 {
            continue;
        }
        let Call { name, number, .. } = call;
        systemd.enter("systemctl stop onh-pinned.scope").ok();
        start_pinned_scope(&systemd);
        let inject = format!("-e inject={name}:signal=KILL:when={number}");
        let killed = systemd.enter(&format!("{strace} {inject} sh -c '{hook}' >&2"));
        assert_ne!(killed.code, Some(0), "{name} {number}: {killed:?}");
        for when in ["at once", "daemon-reload", "daemon-reload again"] {
            let is_reloaded = when != "at once";
            if is_reloaded {
                systemd.enter("systemctl daemon-reload").ok();
            }
            let is_attached = at > first;
            let gpus = if is_reloaded && is_restored {
                [at > edit, false]
            } else if is_reloaded && !is_attached {
                [true, true]
            } else {
                [is_attached, false]
            };
            expect(
                &systemd,
                &format!("killed at {name} {number}, {when}"),
                gpus,
            );
        }
    }
}

/// Compares whether a process in the scope can open the two GPUs; it can always open the device that crun allows.
#[track_caller]
fn expect(systemd: &Systemd, when: &str, gpus: [bool; 2]) {
    let answers = opened_in_pinned_scope(systemd);
    let seen = PINNED_NODES.map(|node| is_allowed(&answers, node));
    assert_eq!(seen, [true, gpus[0], gpus[1]], "{when}");
}

/// Reports whether the device cgroup allowed to open a node: the message is then that no driver has its numbers.
#[track_caller]
fn is_allowed(answers: &str, node: &str) -> bool {
    let line = answers.lines().find(|line| line.contains(node)).unwrap();
    assert!(line.contains(ALLOWED) || line.contains(DENIED), "{line}");
    line.contains(ALLOWED)
}

const PINNED_STEP: &str = "ONH_TEST_PINNED";
/// A device that crun allows, the GPU of the container, and another one
const PINNED_NODES: [&str; 3] = ["/dev/other", "/dev/nvidia0", "/dev/nvidia1"];

/// Returns the command that executes a step of `the_program_that_crun_pins_stays_extended` with that systemd.
fn pinned_step(name: &str) -> String {
    let test = std::env::current_exe().unwrap();
    format!(
        "{PINNED_STEP}={name} CI=true {} --exact pinned::the_program_that_crun_pins_stays_extended --nocapture",
        test.display()
    )
}

fn prepare_pin(systemd: &Systemd) {
    let nodes = "mount -t bpf bpf /sys/fs/bpf; mkdir /sys/fs/bpf/crun; mknod /dev/other c 240 7; \
                 mknod /dev/nvidia0 c 195 0; mknod /dev/nvidia1 c 195 1";
    systemd.enter(nodes).ok();
    systemd.enter(&pinned_step("pin")).ok();
}

/// Starts a scope with the pinned program, as crun does.
fn start_pinned_scope(systemd: &Systemd) {
    let start = format!(
        "systemd-run --quiet --scope --unit=onh-pinned.scope --slice=system.slice -p DefaultDependencies=no \
         -p Delegate=yes -p BPFProgram=device:{PIN} sleep 600 >/dev/null 2>&1 & \
         for n in $(seq 100); do grep -qs . {PINNED_SCOPE}/cgroup.procs && exit 0; sleep 0.1; done; exit 1"
    );
    systemd.enter(&start).ok();
}

/// Returns the messages of a process in the scope that opens the nodes, a line for each.
fn opened_in_pinned_scope(systemd: &Systemd) -> String {
    let nodes = PINNED_NODES.join(" ");
    let open = "for node in NODES; do (: <>$node) 2>&1 || true; done";
    let script = format!("sh -c 'echo $$ >{PINNED_SCOPE}/cgroup.procs; {open}'");
    systemd.enter(&script.replace("NODES", &nodes)).ok()
}

/// The system calls with which the hook changes programs and the unit file, and asks systemd.
const TRACED: &str = "bpf,pwrite64,utimensat,connect";

/// A system call of the hook.
#[derive(Debug)]
struct Call {
    name: String,
    /// How many calls with this name there are up to this one
    number: usize,
    changes_something: bool,
}

/// Reads the output of strace(1): the calls of the thread that changes programs.
fn calls_of(trace: &str) -> Vec<Call> {
    let mut calls: Vec<Call> = Vec::new();
    let of_bpf = trace.lines().find(|line| line.contains(" bpf(")).unwrap();
    let (thread, _) = of_bpf.split_once(' ').unwrap();
    for line in trace.lines() {
        let Some((of, call)) = line.split_once(' ') else {
            continue;
        };
        let Some((name, arguments)) = call.trim_start().split_once('(') else {
            continue;
        };
        if of != thread {
            continue;
        }
        // strace prints calls that are newer than itself, whatever the filter is.
        if !TRACED.split(',').any(|traced| traced == name) {
            continue;
        }
        let before = calls.iter().filter(|call| call.name == name).count();
        calls.push(Call {
            name: name.to_owned(),
            number: before + 1,
            changes_something: name != "bpf" || arguments.starts_with("BPF_PROG_ATTACH"),
        });
    }
    calls
}
