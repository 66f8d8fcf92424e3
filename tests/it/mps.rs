//! `oci-nvidia-mps`, on a host with the fake driver: what it does when something ends, hangs or fails, and what programs on the GPU see then.
//! The tests do what systemd does: they start `run` in the cgroup of the unit, and `end` after it.

use std::os::unix::net::UnixDatagram;
use std::time::Duration;

use crate::built;
use crate::fake_mps::{Host, NEEDS as OF_HOST};
use crate::support::{HOOK, Need, scratch};

const NEEDS: &[Need] = &[
    OF_HOST[0],
    OF_HOST[1],
    Need::Programs(&["strace"]),
    Need::CgroupV2,
];

tests! {
    NEEDS => limits_hold_until_the_gpu_is_not_shared, the_configuration_decides, a_killed_daemon, a_daemon_that_hangs, a_killed_server,
        an_updated_driver, an_older_driver, a_server_with_a_fault, a_server_that_does_not_start, a_killed_supervisor, a_lost_gpu,
        what_cannot_be_shared, what_commands_show, the_service_manager_is_informed, a_gpu_is_closed_whatever_else_fails,
        processes_of_others, what_others_change, the_daemon_has_few_capabilities, gpus_that_are_given_back, random_kills, ends_at_each_call;
}

/// `share LINE` writes config.toml with a GPU that is shared, `unit COMMAND...` runs a command in the cgroup of the unit, `start_sup` and
/// `sup` start the supervisor, and `sup` waits until its daemon is ready. `ended` waits for its end, `end RESULT` cleans up after it, `state`
/// and `field NAME` show the file `state`, `current` shows the compute mode, and `alone MIB` uses the GPU without MPS.
const FUNCTIONS: &str = r#"
    G=GPU-51eed000-0000-4000-8000-0000fa4e0000
    D=/run/oci-nvidia-mps/$G
    export CUDA_MPS_PIPE_DIRECTORY=$D/pipe
    CG=$(mktemp -d "$(sed -n 's/^[^ ]* [^ ]* [^ ]* [^ ]* \([^ ]*\) .* - cgroup2 .*/\1/p' /proc/self/mountinfo | head -n 1)/onh.XXXXXX")
    UNIT=$CG/oci-nvidia-mps@$G.service
    mkdir $UNIT
    mps_processes() { grep -c . $UNIT/cgroup.procs || true; }
    clean() { for pid in $(cat $UNIT/cgroup.procs); do kill -9 $pid || true; done 2>/dev/null; n=0
        until rmdir $UNIT $CG 2>/dev/null || [ $n = 50 ]; do n=$((n + 1)); sleep 0.1; done; }
    trap clean EXIT
    C=/etc/nvidia-container-runtime/config.toml
    mkdir -p ${C%/*}
    share() { { echo '[sharing]'; echo "mps-gpus = [\"${GPU-all}\"]"; printf '%s\n' "$@"; } >$C; }
    share
    field() { sed "s/.*\"$1\":\"*\([^,\"}]*\).*/\1/" $D/state; }
    state() { if [ -e $D/state ]; then field state; else echo none; fi; }
    is() { [ "$(state)" = $1 ] || [ "$(field supervisor 2>/dev/null)" = $1 ]; }
    becomes() { n=0; until is $1; do n=$((n + 1)); [ $n -lt 300 ] || { state; cat /run/messages; exit 1; }; sleep 0.1; done; }
    unit() { (echo 0 >$UNIT/cgroup.procs; exec "$@"); }
    start_sup() { (echo 0 >$UNIT/cgroup.procs; exec $MPS run $G) 2>/run/messages & SUP=$!; }
    sup() { start_sup; becomes $SUP; becomes ready; }
    ended() { wait $SUP || echo "status $?"; }
    end() { unit $MPS end $G "${1-signal}" 2>/run/end || echo "end $?"; }
    message() { sed -n 's/^oci-nvidia-mps: //p' /run/messages; }
    current() { cat /dev/nvidia-modes/compute-mode-0; }
    last() { "$@" | tail -n 1; }
    alone() { CUDA_MPS_PIPE_DIRECTORY=/nowhere last cuda-check memory $1 0; }
"#;

pub fn lines(host: &Host, script: &str) -> Vec<String> {
    let programs = built::programs().display();
    host.lines(&format!(
        "HOOK='{HOOK}'; MPS='{programs}/oci-nvidia-mps'\n{FUNCTIONS}\n{script}"
    ))
}

const NO_MEMORY: &str = "cuMemAlloc_v2: 2, CUDA_ERROR_OUT_OF_MEMORY";
const UNAVAILABLE: &str = "cuDevicePrimaryCtxRetain: 46, CUDA_ERROR_DEVICE_UNAVAILABLE";
const LIMITS: &str = "share 'mps-memory-limit = \"2G\"' 'mps-thread-percentage = 25'";
const LIMIT: &str = "share 'mps-memory-limit = \"2G\"'";

fn limits_hold_until_the_gpu_is_not_shared() {
    let lines = lines(
        &Host::new(),
        &format!(
            "{LIMITS}; sup; current; field memory_limit_mib; field active_thread_percentage; I=$(stat -c %i $D/pipe)
             last check 1500 3 & A=$!; last check 1500 3; wait $A; last check 3000 0
             check 100 0 | sed -n 's/, compute.*//p'; alone 100
             check 100 20 >/dev/null & until [ $(field clients) = 1 ]; do sleep 0.1; done; echo client
             kill $SUP; ended; current; end success; current; field why; mps_processes; alone 100
             echo >$C; end success; current; state; ls $D; [ $I = $(stat -c %i $D/pipe) ]; alone 100"
        ),
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
        "2",
        "2",
        "its unit was stopped",
        "0",
        UNAVAILABLE,
        "0",
        "none",
        "log",
        "pipe",
        "done",
    ];
    assert_eq!(lines, expected);
}

fn the_configuration_decides() {
    let lines = lines(
        &Host::new(),
        "$MPS list; GPU=1 share; $MPS list; GPU=$G share; $MPS list; echo >$C; $MPS list
         GPU=1 share; start_sup; ended; message | sed 's/ (.*//'; end exit-code; current; ls $D 2>/dev/null || echo none
         echo 3 >/dev/nvidia-modes/compute-mode-0; start_sup; ended; end exit-code; current",
    );
    let first = "GPU-51eed000-0000-4000-8000-0000fa4e0000";
    let second = "GPU-51eed001-0001-4001-8000-0000fa4e0001";
    let refused = format!("mps-gpus in the [sharing] table of config.toml does not list {first}");
    let expected = [
        first,
        second,
        second,
        first,
        "status 78",
        &refused,
        "0",
        "none",
        "status 78",
        "3",
    ];
    assert_eq!(lines, expected);
}

fn a_killed_daemon() {
    let lines = lines(
        &Host::new(),
        &format!(
            "{LIMIT}; sup; last check 500 20 & A=$!; settled
             kill -9 $(field daemon); ended; wait $A; message; state; current; last check 100 0; alone 100
             end exit-code; current; mps_processes; field why
             sup; current; last check 3000 0; kill $SUP; ended; end success; current"
        ),
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
        "2",
        "0",
        "the daemon ended (SIGKILL)",
        "3",
        NO_MEMORY,
        "2",
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
        "sup; kill -STOP $(field daemon); last check 100 0 >/run/client & CLIENT=$!; ended; end exit-code; wait $CLIENT; cat /run/client
         message | tail -n 1; current; alone 100; mps_processes",
    );
    let failed = "the MPS daemon of GPU-51eed000-0000-4000-8000-0000fa4e0000 failed: the daemon does not obey \"get_server_list\": \
                  no answer within 5 s (ONH-027)";
    let expected = [
        "status 1",
        "cuInit: 805, CUDA_ERROR_MPS_CONNECTION_FAILED",
        failed,
        "2",
        UNAVAILABLE,
        "0",
    ];
    assert_eq!(lines, expected);
}

/// The daemon starts another server, which has the limits.
fn a_killed_server() {
    let lines = lines(
        &Host::new(),
        &format!(
            "{LIMIT}; sup; S=$(field server); last check 100 20 & A=$!; settled; kill -9 $S; wait $A
             last check 3000 0; last check 1000 0
             until [ $(field server) != $S ] && [ $(state) = ready ]; do sleep 0.1; done; current; kill $SUP; ended; current"
        ),
    );
    let lost = "cuMemsetD8_v2: 806, CUDA_ERROR_MPS_RPC_FAILURE";
    assert_eq!(lines, [lost, NO_MEMORY, "done", "3", "2"]);
}

/// The files of another version are installed, and the kernel module is the old one until the next boot.
fn an_updated_driver() {
    let lines = lines(
        &Host::new(),
        "conf=$(find /usr/lib -name nvml.conf)
         update() { echo init-error 18 >>$conf; sed -i s/535.183.01/550.54.15/ /proc/driver/nvidia/version; }
         boot() { sed -i /init-error/d $conf; sed -i s/550.54.15/535.183.01/ /proc/driver/nvidia/version; }
         sup; update; sleep 6; state; last check 100 0; kill -9 $(field daemon); ended; current; end exit-code; state
         start_sup; ended; message; current; boot; sup; kill $SUP; ended; current",
    );
    let mismatch = "the loaded kernel module has version 550.54.15, and the libraries below \"/\" have version 535.183.01 (ONH-013)";
    let expected = [
        &["ready", "done", "status 1", "2", "end 1", "failed"][..],
        &["status 1", mismatch, "2", "2"],
    ];
    assert_eq!(lines, expected.concat());
}

/// A driver whose daemon serves one user at a time.
fn an_older_driver() {
    let lines = lines(
        &Host::new(),
        &format!(
            "echo mps-single-user >>$(find /usr/lib -name nvml.conf); {LIMIT}; sup
             check 100 3 >/dev/null & settled; B=$(date +%s%N); as 1000 cuda-check memory 100 0 | tail -n 1
             [ $(($(date +%s%N) - B)) -gt 1500000000 ] && echo waited
             S=$(field server); until [ $(field server) != $S ]; do sleep 0.1; done; state
             as 1000 cuda-check memory 3000 0 | tail -n 1; kill $SUP; ended; current"
        ),
    );
    assert_eq!(lines, ["done", "waited", "ready", NO_MEMORY, "2"]);
}

fn a_server_with_a_fault() {
    let host = Host::new();
    let conf = "$(find /usr/lib -name nvml.conf)";
    let lines = lines(
        &host,
        &format!(
            "sup; echo mps-fault >>{conf}; ended; message | sed -n '/failed/s/server [0-9]*/server N/p'; current"
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
        &format!(
            "{LIMIT}; start_sup; until [ $(current) = 3 ]; do sleep 0.1; done
             sleep 1; state; kill $SUP; ended; current; end success; field why"
        ),
    );
    assert_eq!(lines, ["starting", "2", "its unit was stopped"]);
}

/// The daemon keeps running with its limits until the GPU is closed.
fn a_killed_supervisor() {
    let lines = lines(
        &Host::new(),
        &format!(
            "{LIMIT}; sup; kill -9 $SUP; ended; current; last check 3000 0
             end; current; state; field why; alone 100; mps_processes
             sup; kill -9 $SUP; ended; sup; current; last check 3000 0; kill $SUP; ended; current"
        ),
    );
    let expected = [
        "status 137",
        "3",
        NO_MEMORY,
        "2",
        "failed",
        "its supervisor was ended (signal)",
        UNAVAILABLE,
        "0",
        "status 137",
        "3",
        NO_MEMORY,
        "2",
    ];
    assert_eq!(lines, expected);
}

fn a_lost_gpu() {
    let conf = "$(find /usr/lib -name nvml.conf)";
    let lines = lines(
        &Host::new(),
        &format!(
            "sup; sed -i '/bus=00000000:01:/s/$/ fail=15/' {conf}; kill -9 $(field daemon); ended; message; end exit-code; state
             mps_processes; start_sup; ended; message | sed 's/.*PROHIBITED: //'"
        ),
    );
    let failed = "the MPS daemon of GPU-51eed000-0000-4000-8000-0000fa4e0000 failed: the daemon ended (SIGKILL) (ONH-027)";
    assert_eq!(
        lines,
        [
            "status 1",
            failed,
            "end 1",
            "failed",
            "0",
            "status 1",
            "NVML does not list the GPU \"GPU-51eed000-0000-4000-8000-0000fa4e0000\" (ONH-033)"
        ]
    );
}

fn what_cannot_be_shared() {
    let lines = lines(
        &Host::new(),
        "try() { start_sup; ended; message; current; }
         $MPS run $G 2>/run/messages || echo $?; message
         rm /usr/bin/nvidia-cuda-mps-server; try | sed 's, below.*,,'; end exit-code; current",
    );
    let gpu = "GPU-51eed000-0000-4000-8000-0000fa4e0000";
    let expected = [
        "78".to_owned(),
        format!("this process does not belong to the unit oci-nvidia-mps@{gpu} (ONH-026)"),
        "status 78".to_owned(),
        "the driver's program \"nvidia-cuda-mps-server\" is missing".to_owned(),
        "2".to_owned(),
        "2".to_owned(),
    ];
    assert_eq!(lines, expected);
}

fn what_commands_show() {
    let lines = lines(
        &Host::new(),
        &format!(
            "shown() {{ for command in info status ps; do $HOOK $command | grep -m 1 MPS; done; }}
             found() {{ $HOOK doctor driver | sed -n 's/^[a-z]* *mps (driver): //p'; }}
             GPU=0 share; shown; found; {LIMITS}; GPU=0; {LIMITS}; sup; check 100 30 >/dev/null &
             until [ $(field clients) = 1 ]; do sleep 0.1; done
             shown; GPU=0 share; found; $HOOK ps | grep outside; $HOOK ps --json | grep -c '\"gpu\": \"GPU-51eed000'
             cp /usr/bin/nvidia-cuda-mps-control /run/new; mv /run/new /usr/bin/nvidia-cuda-mps-control
             found | grep updated; kill -9 $(field daemon); ended; shown; found; echo >$C; found"
        ),
    );
    let gpu = "GPU-51eed000-0000-4000-8000-0000fa4e0000";
    let ready = "MPS daemon ready, 1 client, 2048 MiB and 25 % of the threads for each";
    let dead = "MPS daemon not ready: the daemon ended (SIGKILL)";
    let missing = "MPS daemon not ready: it was not started";
    let expected = [
        format!("GPU 0: {missing}"),
        format!("{gpu}: {missing}"),
        format!("GPU 0: {missing}"),
        format!("the MPS daemon of {gpu} does not work: it was not started (ONH-027)"),
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
        format!(
            "config.toml does not share {gpu} any more, and its compute mode was not restored (ONH-235)"
        ),
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
            "export NOTIFY_SOCKET='{}'; sup; kill $SUP; ended",
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

/// What a local user, a container, another program or the administrator can do before the unit ends.
fn a_gpu_is_closed_whatever_else_fails() {
    let user = "setpriv --reuid 65534 --regid 65534 --clear-groups";
    for (what, disturbance, undo) in rows! {
        "locks of another user",
            format!("{user} flock -s $D/state sleep 99 & settled"), "";
        "a full /run", "dd if=/dev/zero of=/run/fill bs=64k 2>/dev/null || true".to_owned(), "rm /run/fill";
        "a read-only directory", "mount --bind $D $D; mount -o remount,bind,ro $D".to_owned(), "umount $D";
        "an invalid config.toml", "echo '[sharing' >$C".to_owned(), "share";
        "the directory of another GPU", "mkdir -p ${D%/*}/GPU-0/pipe; cp $D/state ${D%/*}/GPU-0".to_owned(), "";
        "another file in the directory", "echo >${D%/*}/GPU-7; echo >${D%/*}/x".to_owned(), "";
        "a truncated state", "echo '{' >$D/state".to_owned(), "";
        "a state of another version", "echo '{\"format\": 99}' >$D/state".to_owned(), "";
        "no state", "rm $D/state".to_owned(), "";
        "a directory of another user", "chown 65534 $D".to_owned(), "chown 0 $D";
    } {
        // The messages do not fit into a full or read-only /run.
        let script = format!(
            "sup; {disturbance}; kill -9 $SUP; wait $SUP || true; unit $MPS end $G signal 2>/dev/null || true
             current; mps_processes
             {undo}
             sup; current"
        );
        let lines = lines(&Host::new(), &script);
        assert_eq!(lines, ["2", "0", "3"], "{what}");
    }
}

/// A container can give its process any name, environment and user.
fn processes_of_others() {
    let lines = lines(
        &Host::new(),
        "cp /bin/sleep /run/nvidia-cuda-mps-control; chmod 755 /run/nvidia-cuda-mps-control; mount -o remount,exec /run
         /run/nvidia-cuda-mps-control 99 & OTHER=$!
         sup; kill -9 $(field daemon); ended; end exit-code; mps_processes; kill -0 $OTHER && echo alive; kill $OTHER",
    );
    assert_eq!(lines, ["status 1", "0", "alive"]);
}

fn what_others_change() {
    let lines = lines(
        &Host::new(),
        &format!(
            "mkdir -p -m 755 $D/pipe; chmod 755 ${{D%/*}} $D; touch $D/pipe/control_lock; chmod 666 $D/pipe/control_lock
             flock $D/pipe/control_lock sleep 99 & settled; {LIMIT}; sup; stat -c %a $D/pipe/control_lock $D/log
             echo 0 >/dev/nvidia-modes/compute-mode-0; until [ $(current) = 3 ]; do sleep 0.1; done; message
             ctl set_device_pinned_mem_limit $(field server) 0 70G; ended; message; current"
        ),
    );
    let changed = "the MPS daemon of GPU-51eed000-0000-4000-8000-0000fa4e0000 failed: another process changed a limit: \
                   get_device_pinned_mem_limit N 0 returns \"70G\" (ONH-027)";
    let expected = [
        "600",
        "700",
        "another program changed the compute mode; setting it again",
        "status 1",
        "another program changed the compute mode; setting it again",
        changed,
        "2",
    ];
    let mut lines = lines;
    if let Some(line) = lines.get_mut(5) {
        let (start, rest) = line.split_once("mem_limit ").unwrap_or((line, ""));
        let rest = rest.trim_start_matches(|c: char| c.is_ascii_digit());
        *line = format!("{start}mem_limit N{rest}");
    }
    assert_eq!(lines, expected);
}

/// CAP_KILL, CAP_SETGID, CAP_SETUID, CAP_SYS_PTRACE and CAP_SYS_NICE
fn the_daemon_has_few_capabilities() {
    let lines = lines(
        &Host::new(),
        "caps() { sed -n 's/^Cap\\(Eff\\|Bnd\\|Prm\\):.*0*\\(.\\{7\\}\\)$/\\2/p' /proc/$1/status; }
         sup; caps $(field daemon); caps $(field server)",
    );
    assert_eq!(lines, ["08800e0"; 6]);
}

fn gpus_that_are_given_back() {
    let lines = lines(
        &Host::new(),
        "sup; GPU=1 share; $MPS restore; current; kill $SUP; ended; current; $MPS restore 2>/dev/null; current; state
         share; sup; kill $SUP; ended; end success; $MPS restore; current; $MPS restore --all 2>/dev/null; current; state
         sup; current; kill $SUP; ended; echo '[sharing' >$C; $MPS restore 2>/dev/null || echo $?; current; $MPS restore --all 2>/dev/null; current",
    );
    assert_eq!(
        lines,
        ["3", "2", "0", "none", "2", "0", "none", "3", "1", "2", "0"]
    );
}

/// After each round, the GPU is closed, or served with its limits.
/// How often random ends are tried. `ONH_MPS_ROUNDS=500` takes minutes.
fn rounds(default: usize) -> usize {
    let rounds = std::env::var("ONH_MPS_ROUNDS");
    rounds.map_or(default, |rounds| rounds.parse().unwrap())
}

/// Kills the supervisor, the daemon, the server or the unit, at any time and beside what an administrator or another user may have done.
fn random_kills() {
    let rounds = rounds(12);
    let lines = lines(
        &Host::new(),
        &format!(
            "{LIMIT}; seed=$$; other=
             random() {{ seed=$(((seed * 1103515245 + 12345) % 2147483648)); R=$((seed / 65536 % $1)); }}
             disturb() {{ case $1 in
                 0) setpriv --reuid 65534 --regid 65534 --clear-groups flock -s $D/state sleep 99 2>/dev/null & other=$!;;
                 1) dd if=/dev/zero of=/run/fill bs=64k 2>/dev/null || true;;
                 2) mount --bind $D $D && mount -o remount,bind,ro $D;;
                 3) echo '[sharing' >$C;;
                 4) mkdir -p ${{D%/*}}/GPU-0/pipe; cp $D/state ${{D%/*}}/GPU-0 || true;;
                 5) echo '{{' >$D/state;;
                 6) rm -f $D/state;;
                 7) chown 65534 $D;;
                 8) echo 0 >/dev/nvidia-modes/compute-mode-0;;
             esac; }}
             undo() {{ rm -rf /run/fill ${{D%/*}}/GPU-0; umount $D 2>/dev/null || true; chown 0 $D; {LIMIT}
                 [ -z \"$other\" ] || kill $other 2>/dev/null || true; other=; }}
             for round in $(seq {rounds}); do
                 start_sup; random 3; [ $R = 0 ] || becomes ready
                 server=$(field server 2>/dev/null || true); daemon=$(field daemon 2>/dev/null || true)
                 random 10; sleep 0.$R; random 12; disturbance=$R; disturb $R
                 random 4; case $R in
                     0) kill -9 $SUP;;
                     1) kill -9 $server 2>/dev/null || true; kill -9 $SUP;;
                     2) kill -9 $daemon 2>/dev/null || kill -9 $SUP;;
                     3) kill $SUP;;
                 esac
                 wait $SUP || true; unit $MPS end $G signal 2>/dev/null || true
                 echo \"$(current) $(mps_processes) after $R, $disturbance\"; undo
             done"
        ),
    );

    assert_eq!(lines.len(), rounds, "{lines:?}");
    for line in lines {
        assert!(line.starts_with("2 0 after "), "{line}");
    }
}

/// Kills the supervisor, and then what closes the GPU after it, at one system call after the other.
fn ends_at_each_call() {
    let rounds = rounds(12);
    let lines = lines(
        &Host::new(),
        &format!(
            "{LIMIT}
             # strace is in another cgroup: the end of the unit kills all that is in the unit's.
             traced() {{ strace -qq \"$@\" 2>/dev/null; }}
             inside='echo 0 >$0/cgroup.procs; exec \"$@\"'
             calls_of() {{ grep -o '^[a-z0-9_]*(' /run/trace | grep -v '^execve(' >$1; wc -l <$1; }}
             # strace counts the calls of each name apart.
             killed() {{ local at list name nth; at=$1 list=$2; shift 2; name=$(sed -n \"$at{{s/(//;p}}\" $list); nth=$(head -n $at $list | grep -cx \"$name(\")
                 # The next run may have fewer calls of this name.
                 (sleep 10; kill -9 $(field supervisor)) 2>/dev/null & local dog=$!
                 traced -o /dev/null -e inject=$name:signal=KILL:when=$nth sh -c \"$inside\" $UNIT \"$@\" || true
                 kill $dog 2>/dev/null || true; wait $dog || true; }}
             traced -o /run/trace sh -c \"$inside\" $UNIT $MPS run $G & becomes ready
             kill -9 $(field supervisor); wait $! || true; calls=$(calls_of /run/first)
             traced -o /run/trace sh -c \"$inside\" $UNIT $MPS end $G signal; last=$(calls_of /run/last)
             [ $calls -gt 100 ] && [ $last -gt 100 ]
             for round in $(seq {rounds}); do
                 killed $((1 + (round - 1) * calls / {rounds})) /run/first $MPS run $G; end; echo $(current) $(mps_processes)
                 sup; kill -9 $SUP; wait $SUP || true; killed $((1 + (round - 1) * last / {rounds})) /run/last $MPS end $G signal
                 alone 100; end; echo $(current) $(mps_processes)
             done"
        ),
    );
    let expected = ["2 0", UNAVAILABLE, "2 0"].repeat(rounds);
    assert_eq!(lines, expected);
}
