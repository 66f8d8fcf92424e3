//! Pods and claims that share a GPU: the device plugin with a fake kubelet, next to the supervisor and the fake daemon.

use crate::built;
use crate::fake_mps::{Host, NEEDS};
use crate::mps;

tests! {
    NEEDS => pods_with_limits, claims_with_limits;
}

/// `limit GIB` shares the first GPU, `kubelet OPTION...` and `plugin OPTION...` start the programs, `ask COMMAND...` prints the answer of the kubelet, `waits PATTERN` waits for
/// a line of the kubelet, `until_reason PATTERN` prints why the GPU is unhealthy as soon as it matches (between the ends of a supervisor and of
/// `end`, it is that the supervisor has ended), and `pod MIB SECONDS` uses the GPU as a container does that has the directory in `SOURCE`, read-only.
const FUNCTIONS: &str = r#"
    limit() { GPU=0 share "mps-memory-limit = \"${1}G\""; }
    mkdir -p /run/kubelet/device-plugins; mkfifo /run/in
    kubelet() {
        $PROGRAMS/examples/fake-kubelet /run/kubelet "$@" <>/run/in >/run/out 2>&1 &
        waits ready
    }
    plugin() {
        $PROGRAMS/oci-nvidia-kubelet-plugin run --kubelet-dir /run/kubelet --run-dir /run/plugin --labels false "$@" >/run/plugin.log 2>&1 &
    }
    waits() {
        n=0
        until tail -n +${FROM:-1} /run/out | grep -q "$1"; do
            n=$((n + 1)); [ $n -lt 300 ] || { cat /run/out /run/plugin.log /run/messages; exit 1; }; sleep 0.1
        done
    }
    new() { FROM=$(($(wc -l </run/out) + 1)); }
    ask() { new; echo "$*" >/run/in; waits "^allocated\|^refused\|^prepared\|^ok"; tail -n +$FROM /run/out | grep "^allocated\|^refused\|^prepared\|^ok"; }
    pod() {
        unshare --mount sh -euc "
            mkdir -p /tmp/nvidia-mps; mount --bind $SOURCE /tmp/nvidia-mps; mount -o remount,bind,ro /tmp/nvidia-mps
            unset CUDA_MPS_PIPE_DIRECTORY; exec cuda-check memory $1 $2" | tail -n 1
    }
    reason() { sed -n "s/.*$G is unhealthy: //p" /run/plugin.log | tail -n 1; }
    until_reason() {
        n=0
        until reason | grep "$1"; do n=$((n + 1)); [ $n -lt 300 ] || { cat /run/plugin.log; exit 1; }; sleep 0.1; done
    }
"#;

fn lines(host: &Host, script: &str) -> Vec<String> {
    let programs = built::programs().display();
    mps::lines(
        host,
        &format!("PROGRAMS='{programs}'\n{FUNCTIONS}\n{script}"),
    )
}

const NO_MEMORY: &str = "cuMemAlloc_v2: 2, CUDA_ERROR_OUT_OF_MEMORY";

fn pods_with_limits() {
    let lines = lines(
        &Host::new(),
        r#"limit 16; kubelet; plugin --sharing mps --replicas 4 --device-list-strategy envvar
         waits 'list nvidia.com/gpu'; reason
         all="list nvidia.com/gpu $G::0=Healthy $G::1=Healthy $G::2=Healthy $G::3=Healthy"
         none="list nvidia.com/gpu $G::0=Unhealthy $G::1=Unhealthy $G::2=Unhealthy $G::3=Unhealthy"
         new; sup; waits "$all"
         SOURCE=$(ask allocate nvidia.com/gpu $G::0 | sed 's/.*host_path: "\([^"]*pipe\)".*/\1/'); echo ${SOURCE#$D/}
         pod 15000 3 & A=$!; pod 15000 0; wait $A; pod 17000 0
         new; kill -9 $(field daemon); ended; waits "$none"; reason; ask allocate nvidia.com/gpu $G::0 | grep -o 'does not work.*systemctl'
         new; sup; waits "$all"; pod 15000 0
         new; kill $SUP; ended; end success; waits "$none"; until_reason 'was stopped'
         new; limit 40; sup; until_reason exceed; kill $SUP; ended
         new; limit 16; sup; waits "$all"
         new; sed -i 's/^gpu minor=0 /gpu minor=0 fail=15 /' "$(find /usr/lib -name nvml.conf)"; 
         until ask allocate nvidia.com/gpu $G::0 | grep -q refused; do sleep 0.1; done; echo lost"#,
    );
    let unit = "oci-nvidia-mps@GPU-51eed000-0000-4000-8000-0000fa4e0000";
    let none = "its MPS daemon is not ready: it was not started; run \"systemctl enable --now oci-nvidia-mps\"";
    let not_ready =
        |why: &str| format!("its MPS daemon is not ready: {why}; run \"systemctl status {unit}\"");
    let exceed = "4 containers with 40960 MiB each, the memory limit of its MPS daemon, exceed its 81559 MiB; set mps-memory-limit = \
                  \"20389M\", or less, in [sharing] of config.toml, and run \"systemctl restart oci-nvidia-mps\"";
    let expected = [
        none,
        "pipe",
        "done",
        "done",
        NO_MEMORY,
        "status 1",
        &not_ready("the daemon ended (SIGKILL)"),
        "does not work: its MPS daemon is not ready: the daemon ended (SIGKILL); run \"systemctl",
        "done",
        &not_ready("its unit was stopped"),
        exceed,
        "lost",
    ];
    assert_eq!(lines, expected);
}

fn claims_with_limits() {
    let lines = lines(
        &Host::new(),
        r#"limit 16; sup
         kubelet --claims; plugin --interface dra --kubeconfig /run/kubelet/kubelet.conf --cdi-dir /run/cdi
         waits 'published gpu-0=Free gpu-1=Free'; waits 'drivers gpu.nvidia.com'
         ask claim a u-1 gpu-0; ask claim b u-2 gpu-0; ask prepare gpu.nvidia.com a u-1; ask prepare gpu.nvidia.com b u-2
         SOURCE=$D/pipe
         pod 15000 3 & A=$!; pod 15000 0; wait $A; pod 17000 0
         new; kill -9 $(field daemon); ended; waits 'published gpu-0=Tainted gpu-1=Free'
         ask prepare gpu.nvidia.com b u-2 | grep -o 'it does not work.*; run'
         new; sup; waits 'published gpu-0=Free gpu-1=Free'; pod 15000 0"#,
    );
    let prepared = "prepared k8s.gpu.nvidia.com/gpu=GPU-51eed000-0000-4000-8000-0000fa4e0000";
    let expected = [
        "ok",
        "ok",
        prepared,
        prepared,
        "done",
        "done",
        NO_MEMORY,
        "status 1",
        "it does not work: its MPS daemon is not ready: the daemon ended (SIGKILL); run",
        "done",
    ];
    assert_eq!(lines, expected);
}
