//! The supervisor of an MPS daemon, on a host with the fake driver: what it does when something ends, hangs or fails, and what programs on
//! the GPU see then.

use std::os::unix::net::UnixDatagram;
use std::time::Duration;

use crate::fake_mps::{Host, NEEDS};
use crate::support::{HOOK, scratch};

tests! {
    NEEDS => limits_hold_until_the_mode_is_restored, limits_of_config_toml, a_killed_daemon, a_daemon_that_hangs, a_killed_server,
        an_updated_driver, an_older_driver, a_server_with_a_fault, a_server_that_does_not_start, a_killed_supervisor,
        a_killed_supervisor_that_is_not_needed_any_more, a_lost_gpu, what_cannot_be_shared, what_commands_show,
        the_service_manager_is_informed;
}

/// `sup OPTION...` starts the supervisor and waits until its daemon is ready, `ended` waits for its end, `state` and `field NAME` show the
/// file `state`, `current` shows the compute mode, and `alone MIB` uses the GPU without MPS.
const FUNCTIONS: &str = r#"
    D=/run/oci-nvidia-mps/GPU-51eed000-0000-4000-8000-0000fa4e0000
    export CUDA_MPS_PIPE_DIRECTORY=$D/pipe
    field() { sed "s/.*\"$1\":\"*\([^,\"}]*\).*/\1/" $D/state; }
    state() { if [ -e $D/state ]; then field state; else echo none; fi; }
    is() { [ "$(state)" = $1 ] || [ "$(field supervisor 2>/dev/null)" = $1 ]; }
    becomes() { n=0; until is $1; do n=$((n + 1)); [ $n -lt 300 ] || { state; exit 1; }; sleep 0.1; done; }
    start_sup() { $HOOK mps "$@" 2>/run/messages & SUP=$!; }
    sup() { start_sup "$@"; becomes $SUP; becomes ready; }
    ended() { wait $SUP || echo "status $?"; }
    message() { sed -n 's/^oci-nvidia-hook: //p' /run/messages; }
    current() { cat /dev/nvidia-modes/compute-mode-0; }
    last() { "$@" | tail -n 1; }
    alone() { CUDA_MPS_PIPE_DIRECTORY=/nowhere last cuda-check memory $1 0; }
"#;

pub fn lines(host: &Host, script: &str) -> Vec<String> {
    host.lines(&format!("HOOK='{HOOK}'\n{FUNCTIONS}\n{script}"))
}

const NO_MEMORY: &str = "cuMemAlloc_v2: 2, CUDA_ERROR_OUT_OF_MEMORY";
const UNAVAILABLE: &str = "cuDevicePrimaryCtxRetain: 46, CUDA_ERROR_DEVICE_UNAVAILABLE";

fn limits_hold_until_the_mode_is_restored() {
    let lines = lines(
        &Host::new(),
        "sup 0 --memory-limit 2G --thread-percentage 25
         current; field memory_limit_mib; field active_thread_percentage; I=$(stat -c %i $D/pipe)
         last check 1500 3 & A=$!; last check 1500 3; wait $A; last check 3000 0
         check 100 0 | sed -n 's/, compute.*//p'; alone 100
         check 100 20 >/dev/null & until [ $(field clients) = 1 ]; do sleep 0.1; done; echo client
         kill $SUP; ended; current; state; ls $D; [ $I = $(stat -c %i $D/pipe) ]; alone 100",
    );
    let expected = [
        "3",
        "2048",
        "25",
        "done",
        "done",
        NO_MEMORY,
        "multiprocessors 32",
        UNAVAILABLE,
        "client",
        "0",
        "none",
        "lock",
        "log",
        "pipe",
        "done",
    ];
    assert_eq!(lines, expected);
}

fn limits_of_config_toml() {
    let lines = lines(
        &Host::new(),
        "mkdir -p /etc/nvidia-container-runtime
         printf '[sharing]\\nmps-memory-limit = \"2G\"\\nmps-thread-percentage = 40\\n' >/etc/nvidia-container-runtime/config.toml
         sup 0; field memory_limit_mib; field active_thread_percentage; last check 3000 0; kill $SUP; ended
         sup GPU-51eed000-0000-4000-8000-0000fa4e0000 --memory-limit 4G; field memory_limit_mib; last check 3000 0; kill $SUP; ended",
    );
    assert_eq!(lines, ["2048", "40", NO_MEMORY, "4096", "done"]);
}

fn a_killed_daemon() {
    let lines = lines(
        &Host::new(),
        "sup 0 --memory-limit 2G; last check 500 20 & A=$!; settled
         kill -9 $(field daemon); ended; wait $A; message; state; current; last check 100 0; alone 100; pgrep mps || echo no process
         sup 0 --memory-limit 2G; current; last check 3000 0; kill $SUP; ended; current",
    );
    let failed = "the MPS daemon of GPU-51eed000-0000-4000-8000-0000fa4e0000 failed: the daemon ended (SIGKILL) (ONH-027)";
    let expected = [
        "cuCtxSynchronize: 805, CUDA_ERROR_MPS_CONNECTION_FAILED",
        "status 1",
        failed,
        "failed",
        "2",
        UNAVAILABLE,
        UNAVAILABLE,
        "no process",
        "3",
        NO_MEMORY,
        "0",
    ];
    let mut lines = lines;
    // The client may notice the end before or after the supervisor.
    lines[..2].sort_unstable();
    assert!(lines[0].contains("CUDA_ERROR_MPS_RPC_FAILURE"), "{lines:?}");
    assert_eq!(lines[1..], expected[1..]);
}

/// A program that connects meanwhile would wait for ever.
fn a_daemon_that_hangs() {
    let lines = lines(
        &Host::new(),
        "sup 0; kill -STOP $(field daemon); last check 100 0 >/run/client & C=$!; ended; wait $C; cat /run/client
         message; current; alone 100; pgrep mps || echo no process",
    );
    let failed = "the MPS daemon of GPU-51eed000-0000-4000-8000-0000fa4e0000 failed: the daemon does not obey \"get_server_list\": \
                  no answer within 5 s (ONH-027)";
    let expected = [
        "status 1",
        "cuInit: 805, CUDA_ERROR_MPS_CONNECTION_FAILED",
        failed,
        "2",
        UNAVAILABLE,
        "no process",
    ];
    assert_eq!(lines, expected);
}

/// The daemon starts another server, which has the limits.
fn a_killed_server() {
    let lines = lines(
        &Host::new(),
        "sup 0 --memory-limit 2G; S=$(field server); last check 100 20 & A=$!; settled; kill -9 $S; wait $A
         last check 3000 0; last check 1000 0
         until [ $(field server) != $S ] && [ $(state) = ready ]; do sleep 0.1; done; current; kill $SUP; ended; current",
    );
    let lost = "cuMemsetD8_v2: 806, CUDA_ERROR_MPS_RPC_FAILURE";
    assert_eq!(lines, [lost, NO_MEMORY, "done", "3", "0"]);
}

/// The files of another version are installed, and the kernel module is the old one until the next boot.
fn an_updated_driver() {
    let lines = lines(
        &Host::new(),
        "conf=$(find /usr/lib -name nvml.conf)
         update() { echo init-error 18 >>$conf; sed -i s/535.183.01/550.54.15/ /proc/driver/nvidia/version; }
         boot() { sed -i /init-error/d $conf; sed -i s/550.54.15/535.183.01/ /proc/driver/nvidia/version; }
         sup 0; update; sleep 6; state; last check 100 0; kill $SUP; ended; current; state
         start_sup 0; ended; message; current; boot
         sup 0; update; kill -9 $(field daemon); ended; current; start_sup 0; ended; message; state; current; boot
         sup 0; kill $SUP; ended; current",
    );
    let mismatch = "the loaded kernel module has version 550.54.15, and the libraries below \"/\" have version 535.183.01 (ONH-013)";
    let expected = [
        &["ready", "done", "0", "none"][..],
        &["status 1", mismatch, "0"],
        &["status 1", "2", "status 1", mismatch, "failed", "2"],
        &["0"],
    ];
    assert_eq!(lines, expected.concat());
}

/// A driver whose daemon serves one user at a time.
fn an_older_driver() {
    let lines = lines(
        &Host::new(),
        "echo mps-single-user >>$(find /usr/lib -name nvml.conf); sup 0 --memory-limit 2G; field multi_user
         check 100 3 >/dev/null & settled; B=$(date +%s%N); as 1000 cuda-check memory 100 0 | tail -n 1
         [ $(($(date +%s%N) - B)) -gt 1500000000 ] && echo waited
         S=$(field server); until [ $(field server) != $S ]; do sleep 0.1; done; state
         as 1000 cuda-check memory 3000 0 | tail -n 1; kill $SUP; ended; current",
    );
    assert_eq!(lines, ["false", "done", "waited", "ready", NO_MEMORY, "0"]);
}

fn a_server_with_a_fault() {
    let host = Host::new();
    let conf = "$(find /usr/lib -name nvml.conf)";
    let lines = lines(
        &host,
        &format!(
            "sup 0; echo mps-fault >>{conf}; ended; message | sed 's/server [0-9]*/server N/'; current"
        ),
    );
    let failed = "the MPS daemon of GPU-51eed000-0000-4000-8000-0000fa4e0000 failed: the server N is not active: \"FAULT\" (ONH-027)";
    assert_eq!(lines, ["status 1", failed, "2"]);
}

fn a_server_that_does_not_start() {
    let host = Host::new();
    host.add_line("mps-server-fails");
    let lines = lines(
        &host,
        "start_sup 0 --memory-limit 2G; until [ $(current) = 3 ]; do sleep 0.1; done
         sleep 1; state; kill $SUP; ended; current; state",
    );
    assert_eq!(lines, ["starting", "0", "none"]);
}

/// The daemon keeps running with its limits until the GPU is closed.
fn a_killed_supervisor() {
    let lines = lines(
        &Host::new(),
        "sup 0 --memory-limit 2G; kill -9 $SUP; ended; current; last check 3000 0
         $HOOK mps --after signal 0 2>/dev/null; current; state; field why; alone 100; pgrep mps || echo no process
         sup 0; field compute_mode_before; kill -9 $SUP; ended; sup 0; field compute_mode_before; kill $SUP; ended; current",
    );
    let expected = [
        "status 137",
        "3",
        NO_MEMORY,
        "2",
        "failed",
        "its supervisor was ended (signal)",
        UNAVAILABLE,
        "no process",
        "0",
        "status 137",
        "0",
        "0",
    ];
    assert_eq!(lines, expected);
}

fn a_killed_supervisor_that_is_not_needed_any_more() {
    let lines = lines(
        &Host::new(),
        "sup 0; $HOOK mps --after signal 0; $HOOK mps --after success 0; state; current
         kill -9 $SUP; ended; $HOOK mps --after success 1; current
         $HOOK mps --after success 0 2>/dev/null; current; state; pgrep mps || echo no process",
    );
    let expected = ["ready", "3", "status 137", "3", "0", "none", "no process"];
    assert_eq!(lines, expected);
}

fn a_lost_gpu() {
    let conf = "$(find /usr/lib -name nvml.conf)";
    let lines = lines(
        &Host::new(),
        &format!(
            "sup 0; sed -i '/bus=00000000:01:/s/$/ fail=15/' {conf}; kill -9 $(field daemon); ended; state; message
             start_sup 0; ended; message | sed 's/: .*//'"
        ),
    );
    let failed = "the MPS daemon of GPU-51eed000-0000-4000-8000-0000fa4e0000 failed: the daemon ended (SIGKILL) (ONH-027)";
    assert_eq!(
        lines,
        [
            "status 1",
            "failed",
            failed,
            "status 1",
            "NVML does not list the GPU \"GPU-51eed000-0000-4000-8000-0000fa4e0000\" (ONH-033)"
        ]
    );
}

fn what_cannot_be_shared() {
    let lines = lines(
        &Host::new(),
        "try() { start_sup \"$@\"; ended; message; current; }
         try 7 | head -n 2
         sup 0; P=$SUP; try 0 | sed 's/process [0-9]*/process N/'; kill $P; wait $P
         echo 2 >/dev/nvidia-modes/compute-mode-0; try 0; echo 0 >/dev/nvidia-modes/compute-mode-0
         mkdir /tmp/nvidia-mps; CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps start -d; try 0
         CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps ctl quit; sup 0; kill $SUP; ended
         rm /usr/bin/nvidia-cuda-mps-server; try 0 | sed 's, below.*,,'",
    );
    let gpu = "GPU-51eed000-0000-4000-8000-0000fa4e0000";
    let expected = [
        "status 1".to_owned(),
        "the command line requests \"7\": this host has no such GPU (ONH-030)".to_owned(),
        "status 78".to_owned(),
        format!("process N already runs the MPS daemon of {gpu} (ONH-026)"),
        "3".to_owned(),
        "status 78".to_owned(),
        format!(
            "the compute mode of {gpu} is PROHIBITED, and this program has not set it (ONH-026)"
        ),
        "2".to_owned(),
        "status 78".to_owned(),
        "another MPS daemon runs, with the directory \"/tmp/nvidia-mps\" (ONH-026)".to_owned(),
        "0".to_owned(),
        "status 78".to_owned(),
        "the driver's program \"nvidia-cuda-mps-server\" is missing".to_owned(),
        "0".to_owned(),
    ];
    assert_eq!(lines, expected);
}

fn what_commands_show() {
    let lines = lines(
        &Host::new(),
        "shown() { for command in info status ps; do $HOOK $command | grep -m 1 MPS; done; }
         found() { $HOOK doctor driver | sed -n 's/^[a-z]* *mps (driver): //p'; }
         sup 0 --memory-limit 2G --thread-percentage 25; check 100 30 >/dev/null &
         until [ $(field clients) = 1 ]; do sleep 0.1; done
         shown; found; $HOOK ps | grep outside; $HOOK ps --json | grep -c '\"gpu\": \"GPU-51eed000'
         cp /usr/bin/nvidia-cuda-mps-control /run/new; mv /run/new /usr/bin/nvidia-cuda-mps-control
         found | grep updated; kill -9 $(field daemon); ended; shown; found",
    );
    let gpu = "GPU-51eed000-0000-4000-8000-0000fa4e0000";
    let ready = "MPS daemon ready, 1 client, 2048 MiB and 25 % of the threads for each";
    let dead = "MPS daemon not ready: the daemon ended (SIGKILL)";
    let expected = [
        format!("GPU 0: {ready}"),
        format!("{gpu}: {ready}"),
        format!("GPU 0: {ready}"),
        format!(
            "the MPS daemon of {gpu} limits each client to 2048 MiB and 25 % of the threads, config.toml to all memory and 100 % of \
             the threads (ONH-235)"
        ),
        "1 process outside of containers uses a GPU".to_owned(),
        "1".to_owned(),
        format!("the driver was updated while the MPS daemon of {gpu} runs (ONH-236)"),
        "status 1".to_owned(),
        format!("GPU 0: {dead}"),
        format!("{gpu}: {dead}"),
        format!("GPU 0: {dead}"),
        format!("the MPS daemon of {gpu} does not work: the daemon ended (SIGKILL) (ONH-027)"),
    ];
    assert_eq!(lines, expected);
}

/// The unit has Type=notify, and `systemctl status` shows the text.
fn the_service_manager_is_informed() {
    let dir = scratch();
    let path = dir.path().join("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    manager
        .set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    let reader = std::thread::spawn(move || {
        let (mut messages, mut buffer) = (Vec::new(), [0; 512]);
        while messages.last().is_none_or(|last| last != "STOPPING=1") {
            let length = manager.recv(&mut buffer).expect("a message");
            let text = std::str::from_utf8(&buffer[..length]).unwrap();
            messages.extend(text.lines().map(str::to_owned));
        }
        messages.dedup();
        messages
    });
    lines(
        &Host::new(),
        &format!(
            "export NOTIFY_SOCKET='{}'; sup 0; kill $SUP; ended",
            path.display()
        ),
    );
    let expected = [
        "STATUS=starting",
        "STATUS=ready, client processes: 0",
        "READY=1",
        "STOPPING=1",
    ];
    assert_eq!(reader.join().unwrap(), expected);
}
