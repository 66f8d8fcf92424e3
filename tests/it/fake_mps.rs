//! The fake MPS behaves as the real one did: driver 580.159.04 on an H200. The tests of MPS are worth as much as this.

use std::path::PathBuf;
use std::process::Command;

use crate::driver::FakeDriver;
use crate::support::{Need, run, scratch, shell, source};

pub const NEEDS: &[Need] = &[
    Need::Root,
    Need::Programs(&["cc", "unshare", "setpriv", "timeout"]),
];

tests! {
    NEEDS => files_of_the_daemon, commands_of_the_daemon, clients_have_the_lowest_limit, one_user_at_a_time, users_at_once,
        only_the_owner_changes_settings, a_daemon_of_a_user, what_ends_with_what, compute_modes, a_fault;
}

/// `ctl COMMAND` asks the daemon, `start OPTION...` starts it for the first GPU, `as UID COMMAND...` is another user, and
/// `check MIB SECONDS` uses memory of the GPU.
const FUNCTIONS: &str = r#"
    mount -t tmpfs -o size=64m run /run; mount -t tmpfs tmp /tmp
    mkdir -m 755 /run/pipe /run/log
    export CUDA_MPS_PIPE_DIRECTORY=/run/pipe CUDA_MPS_LOG_DIRECTORY=/run/log
    ctl() { echo "$*" | timeout 5 nvidia-cuda-mps-control 2>&1; }
    start() { CUDA_VISIBLE_DEVICES=GPU-51eed000-0000-4000-8000-0000fa4e0000 nvidia-cuda-mps-control "$@" 2>&1; }
    as() { uid=$1; shift; setpriv --reuid "$uid" --regid "$uid" --clear-groups "$@" 2>&1; }
    check() { cuda-check memory "$@"; }
    left() { cd /run/pipe; echo *; }
    mode() { echo "$1" >"$(dirname "$(find /usr/lib -name nvml.conf)")/compute-mode-0"; }
    server() { ctl get_server_list; }
    settled() { sleep 0.3; }
"#;

/// A host with the fake driver.
pub struct Host {
    pub fake: FakeDriver,
    _dir: tempfile::TempDir,
    program: PathBuf,
}

impl Host {
    pub fn new() -> Self {
        let dir = scratch();
        let program = dir.path().join("cuda-check");
        shell!(
            "cc -std=gnu11 -o '{}' '{}' -ldl; chmod 755 '{}'",
            program.display(),
            source("tests/gpu/cuda/cuda-check.c").display(),
            dir.path().display()
        );
        Self {
            fake: FakeDriver::new(&["--gpus", "2"]),
            _dir: dir,
            program,
        }
    }

    /// Runs a script with [`FUNCTIONS`], in a PID namespace that ends its daemons, and returns the lines of its output.
    pub fn lines(&self, script: &str) -> Vec<String> {
        let script = format!(
            "{FUNCTIONS}\ncp '{}' /usr/bin/cuda-check\n{script}",
            self.program.display()
        );
        // As the first namespace, because it has another /proc, in which as-host mounts the files of the kernel module.
        let mut command = Command::new("unshare");
        command
            .args(["--pid", "--fork", "--kill-child", "--mount-proc"])
            .arg(source("tests/fake-driver/as-host"))
            .arg(&self.fake.root)
            .args(["sh", "-euc", &script]);
        let text = run(&mut command).ok();
        text.lines()
            .map(|line| line.trim_end().to_owned())
            .collect()
    }

    pub fn add_line(&self, line: &str) {
        self.fake.set_nvml(|text| format!("{text}\n{line}\n"));
    }
}

/// The program's line about what it may use.
fn may_use(multiprocessors: u32, free: u32) -> String {
    format!("multiprocessors {multiprocessors}, compute mode 0, free {free} MiB")
}

fn without_first(lines: &[String]) -> Vec<&str> {
    let is_first = |line: &&str| line.starts_with("CUDA ");
    let lines = lines.iter().map(String::as_str);
    lines.filter(|line| !is_first(line)).collect()
}

const AFTER_START: &str = "control control_lock control_privileged log nvidia-cuda-mps-control.pid";
const AFTER_QUIT: &str = "control control_lock control_privileged";
const NO_DAEMON: &str = "Cannot find MPS control daemon process";

fn files_of_the_daemon() {
    let lines = Host::new().lines(
        "ctl get_server_list || echo $?
         start -d
         stat -c '%n %A %U' /run/pipe/* /run/log/*
         grep -o '0005 01 .*/run/pipe/.*' /proc/net/unix | sed 's/ 01 [0-9]*//' | sort -u
         [ \"$(cat /run/pipe/nvidia-cuda-mps-control.pid)\" = \"$(pgrep -x nvidia-cuda-mps)\" ]
         start -d || echo $?
         ctl quit; left
         nvidia-cuda-mps-control -f >/dev/null & settled; left
         kill $!; wait $! || echo $?
         left; start -d; ctl get_server_list; kill -9 $(cat nvidia-cuda-mps-control.pid); settled; left
         start -d; echo again",
    );
    let expected = [
        NO_DAEMON,
        "1",
        "/run/pipe/control srw-rw-rw- root",
        "/run/pipe/control_lock -rw-rw-rw- root",
        "/run/pipe/control_privileged srwxr-xr-x root",
        "/run/pipe/log prwxrwxrwx root",
        "/run/pipe/nvidia-cuda-mps-control.pid -rw-rw-rw- root",
        "/run/log/control.log -rw-r--r-- root",
        "/run/log/server.log -rw-r--r-- root",
        "0005 /run/pipe/control",
        "0005 /run/pipe/control_privileged",
        "An instance of this daemon is already running",
        "1",
        AFTER_QUIT,
        AFTER_START,
        "143",
        AFTER_START,
        AFTER_START,
        "again",
    ];
    assert_eq!(lines, expected);
}

/// In the order in which the real daemon got them.
fn commands_of_the_daemon() {
    let lines = Host::new().lines(
        "start -d
         ctl help; ctl get_server_list; ctl ps; ctl get_default_active_thread_percentage
         ctl get_default_device_pinned_mem_limit 0; ctl set_default_device_pinned_mem_limit 0 2G
         ctl set_default_active_thread_percentage 40; ctl get_default_device_pinned_mem_limit 0
         ctl set_default_device_pinned_mem_limit 7 2G; ctl set_default_active_thread_percentage 400
         ctl set_default_device_pinned_mem_limit GPU-51eed000-0000-4000-8000-0000fa4e0000 3G
         ctl get_default_device_pinned_mem_limit 0; echo x
         ctl set_default_device_pinned_mem_limit 0 x; ctl get_default_device_pinned_mem_limit 0; echo none
         ctl set_default_device_pinned_mem_limit 0 2048M
         ctl start_server -uid 0; S=$(server); ctl get_server_status $S; ctl get_client_list $S
         ctl get_active_thread_percentage $S; ctl get_device_pinned_mem_limit $S 0; ctl get_device_client_list
         ctl get_server_status 1
         cuda-check memory 1000 3 >/dev/null & C=$!; settled
         [ \"$(ctl get_client_list $S)\" = $C ]; ctl get_device_client_list | sed 's,^[0-9]*[.]1$,CLIENT.1,'
         ctl ps | sed \"s/^$C /CLIENT /; s/ $S / SERVER /; s/ 402653[0-9]* / NAMESPACE /\" | tr -s ' '
         ctl set_default_device_pinned_mem_limit 0 4G; ctl get_device_pinned_mem_limit $S 0
         nvidia-smi --query-compute-apps=pid --format=csv | sed s/$S/SERVER/",
    );
    let expected = [
        "Unknown command \"help\"",
        "Server not found",
        "100.0",
        "40.0",
        "2G",
        "40.0",
        "2G",
        "x",
        "none",
        "ACTIVE",
        "40.0",
        "2G",
        "Server 1 not found",
        "[0] 00:00.0, NVIDIA H100 80GB HBM3",
        "CLIENT.1",
        "PID ID SERVER DEVICE NAMESPACE COMMAND",
        "CLIENT 1 SERVER GPU-51eed000-0000-4000 NAMESPACE cuda-check",
        "2G",
        "SERVER",
    ];
    assert_eq!(lines, expected);
}

fn clients_have_the_lowest_limit() {
    let lines = Host::new().lines(
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=1G CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=20 start -d
         ctl get_default_device_pinned_mem_limit 0; ctl get_default_active_thread_percentage
         ctl set_default_device_pinned_mem_limit 0 2G; ctl set_default_active_thread_percentage 40 >/dev/null
         check 1000 0; check 1900 0 || echo $?
         U=GPU-51eed000-0000-4000-8000-0000fa4e0000
         CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=8G CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=90 check 3000 0 || echo $?
         CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=$U=1G check 900 0 || echo $?
         CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=1G CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=10 check 100 0
         cd /run; mkdir other; mount --bind pipe other; mount -o remount,bind,ro,nosuid,nodev,noexec other
         CUDA_MPS_PIPE_DIRECTORY=/run/other check 100 0
         mkdir /tmp/nvidia-mps; mount --bind /run/pipe /tmp/nvidia-mps; unset CUDA_MPS_PIPE_DIRECTORY; check 100 0",
    );
    let too_much = ["cuMemAlloc_v2: 2, CUDA_ERROR_OUT_OF_MEMORY", "1"];
    let shared = may_use(52, 1830);
    let (less, least) = (may_use(52, 806), may_use(12, 806));
    let expected = [
        &["20.0", &shared, "allocated 1000 MiB", "done", &shared][..],
        &too_much,
        &[&shared],
        &too_much,
        &[&less],
        &too_much,
        &[&least, "allocated 100 MiB", "done"],
        &[&shared, "allocated 100 MiB", "done"],
        &[&shared, "allocated 100 MiB", "done"],
    ];
    assert_eq!(without_first(&lines), expected.concat());
    let first = "CUDA 12.2, 1 devices, the first is NVIDIA H100 80GB HBM3";
    assert!(
        lines.iter().filter(|line| *line == first).count() == 7,
        "{lines:?}"
    );
}

/// The client of another user waits until the server has no client, and gets another server.
fn one_user_at_a_time() {
    let lines = Host::new().lines(
        "start -d; check 100 0 >/dev/null; S=$(server)
         as 1000 cuda-check memory 100 0 | tail -n 1
         [ $(server) != $S ] && stat -c %u /proc/$(server)
         check 100 2 >/dev/null & B=$(date +%s%N)
         settled; as 1000 cuda-check memory 100 0 | tail -n 1
         [ $(($(date +%s%N) - B)) -gt 1500000000 ] && echo waited
         as 1000 unshare --user --map-root-user cuda-check memory 100 0 | tail -n 1",
    );
    assert_eq!(lines, ["done", "1000", "done", "waited", "done"]);
}

fn users_at_once() {
    let host = Host::new();
    let lines = host.lines(
        "nvidia-cuda-mps-control -h | grep -c multiuser
         nvidia-cuda-mps-control -f -M >/dev/null & settled; check 100 5 >/dev/null & settled; S=$(server)
         timeout 2 setpriv --reuid 1000 --regid 1000 --clear-groups cuda-check memory 100 0 | tail -n 1
         [ \"$(server)\" = $S ] && ctl get_client_list $S | wc -l",
    );
    assert_eq!(lines, ["1", "done", "1"]);
    host.add_line("mps-single-user");
    let lines = host.lines(
        "nvidia-cuda-mps-control -h | grep -c multiuser || start -d --multiuser-server >/dev/null || echo $?; left",
    );
    assert_eq!(lines, ["0", "1", "*"]);
}

fn only_the_owner_changes_settings() {
    let lines = Host::new().lines(
        "start -d; ctl start_server -uid 0
         ask() { echo \"$*\" | as 1000 nvidia-cuda-mps-control; echo $?; }
         [ \"$(ask get_server_list | head -n 1)\" = $(server) ] && ask get_default_active_thread_percentage
         ask set_default_active_thread_percentage 10; ask quit; ctl get_default_active_thread_percentage",
    );
    let expected = [
        "100.0",
        "0",
        "Insufficient privileges for UID 1000. Control deamon settings can only be modified by the user who started it or by the root \
         user.",
        "0",
        "Not enough privilege to execute quit command",
        "0",
        "100.0",
    ];
    assert_eq!(lines, expected);
}

fn a_daemon_of_a_user() {
    let lines = Host::new().lines(
        "chown 1000:1000 /run/pipe /run/log
         as 1000 nvidia-cuda-mps-control -d; as 1000 cuda-check memory 100 0 | tail -n 1
         check 100 0 || echo $?; as 1001 cuda-check memory 100 0 || echo $?; ctl get_server_list
         grep -c 'Failed to start server using uid 0, error: Operation not permitted' /run/log/control.log",
    );
    let refused = "cuInit: 805, CUDA_ERROR_MPS_CONNECTION_FAILED";
    assert_eq!(lines, ["done", refused, "1", refused, "1", "6"]);
}

fn what_ends_with_what() {
    let lines = Host::new().lines(
        "start -d; ctl set_default_device_pinned_mem_limit 0 2G; ctl start_server -uid 0; S=$(server)
         cuda-check memory 500 20 >/dev/null & A=$!; settled; kill -9 $A & check 500 1 | tail -n 1; settled
         [ $(server) = $S ] && ctl get_client_list $S && echo client
         check 500 20 | tail -n 1 & settled; kill -9 $S; wait; check 100 0 | grep multi; [ $(server) != $S ] && echo server
         D=$(cat /run/pipe/nvidia-cuda-mps-control.pid); kill -STOP $D
         ctl get_server_list || echo $?; timeout 1 cuda-check memory 100 0 || echo $?; kill -CONT $D; settled
         check 500 20 | tail -n 1 & settled; kill -9 $D; wait
         ctl get_server_list || check 100 0 | grep multi; pgrep mps || echo daemon
         start -d; ctl get_default_device_pinned_mem_limit 0; check 100 20 | tail -n 1 & settled
         B=$(date +%s); ctl quit -t 1; [ $(($(date +%s) - B)) -lt 3 ] && wait && pgrep mps || echo quit",
    );
    let lost = "cuMemsetD8_v2: 806, CUDA_ERROR_MPS_RPC_FAILURE";
    let (limited, unlimited) = (may_use(132, 1830), may_use(132, 81033));
    let expected = [
        "done", "client", lost, &limited, "server", "124", "124", lost, NO_DAEMON, &unlimited,
        "daemon",
    ];
    assert_eq!(lines[..expected.len()], expected);
    assert!(
        matches!(&lines[expected.len()..], [ended, quit] if ended.contains("806") && quit == "quit"),
        "{lines:?}"
    );
}

fn compute_modes() {
    let lines = Host::new().lines(
        "start -d; mode 3; ctl start_server -uid 0; check 100 0 | tail -n 1
         alone() { CUDA_MPS_PIPE_DIRECTORY=/nowhere cuda-check memory 100 $1 | tail -n 1; }
         alone 0; mode 2; alone 0; check 100 0 | tail -n 1; ctl quit; mode 3; alone 2 & settled; alone 0; wait
         mode 2; start -d; ctl start_server -uid 0; ctl get_server_list; timeout 5 cuda-check memory 100 0 || echo $?",
    );
    let unavailable = "cuDevicePrimaryCtxRetain: 46, CUDA_ERROR_DEVICE_UNAVAILABLE";
    let expected = [
        "done",
        unavailable,
        unavailable,
        unavailable,
        unavailable,
        "done",
        "cuInit: 805, CUDA_ERROR_MPS_CONNECTION_FAILED",
        "1",
    ];
    assert_eq!(lines, expected);
}

/// NVIDIA's documents: all clients get the fault of one, and the server accepts no others until they have ended.
fn a_fault() {
    let kernels = source("tests/gpu/cuda/kernels.ptx");
    let lines = Host::new().lines(&format!(
        "start -d; ctl start_server -uid 0; S=$(server); ctl get_server_status $S
         (check 100 5 | tail -n 1; sleep 1) & settled; (cuda-check fault '{}' | tail -n 1)
         wait; ctl get_server_status $S; check 100 0 | tail -n 1",
        kernels.display()
    ));
    let mut lines: Vec<_> = lines.iter().map(String::as_str).collect();
    lines[1..3].sort_unstable();
    let expected = [
        "ACTIVE",
        "cuMemsetD8_v2: 719, CUDA_ERROR_LAUNCH_FAILED",
        "the driver reports 700, CUDA_ERROR_ILLEGAL_ADDRESS",
        "ACTIVE",
        "done",
    ];
    assert_eq!(lines, expected);
}
