//! Pods and claims that share a GPU: the device plugin with a fake kubelet, next to the supervisor and the fake daemon.

use crate::built;
use crate::fake_mps::{Host, NEEDS};
use crate::mps;

tests! {
    NEEDS => pods_with_limits, claims_with_limits;
}

/// `kubelet OPTION...` and `plugin OPTION...` start the programs, `ask COMMAND...` prints the answer of the kubelet, `waits PATTERN` waits for
/// a line of the kubelet, and `pod MIB SECONDS` uses the GPU as a container does that has the directory in `SOURCE`, read-only.
const FUNCTIONS: &str = r#"
    G=GPU-51eed000-0000-4000-8000-0000fa4e0000
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
        r#"kubelet; plugin --sharing mps --replicas 4 --device-list-strategy envvar
         waits 'list nvidia.com/gpu'; reason
         all="list nvidia.com/gpu $G::0=Healthy $G::1=Healthy $G::2=Healthy $G::3=Healthy"
         none="list nvidia.com/gpu $G::0=Unhealthy $G::1=Unhealthy $G::2=Unhealthy $G::3=Unhealthy"
         new; sup 0 --memory-limit 16G; waits "$all"
         SOURCE=$(ask allocate nvidia.com/gpu $G::0 | sed 's/.*host_path: "\([^"]*pipe\)".*/\1/'); echo ${SOURCE#$D/}
         pod 15000 3 & A=$!; pod 15000 0; wait $A; pod 17000 0
         new; kill -9 $(field daemon); ended; waits "$none"; reason; ask allocate nvidia.com/gpu $G::0 | grep -o 'does not work.*systemctl'
         new; sup 0 --memory-limit 16G; waits "$all"; pod 15000 0
         new; kill $SUP; ended; waits "$none"; reason
         new; sup 0 --memory-limit 40G; until reason | grep -q exceed; do sleep 0.1; done; reason; kill $SUP; ended
         new; sup 0 --memory-limit 16G; waits "$all"
         new; sed -i 's/^gpu minor=0 /gpu minor=0 fail=15 /' "$(find /usr/lib -name nvml.conf)"; 
         until ask allocate nvidia.com/gpu $G::0 | grep -q refused; do sleep 0.1; done; echo lost"#,
    );
    let gpu = "GPU-51eed000-0000-4000-8000-0000fa4e0000";
    let none = format!("it has no MPS daemon; run \"systemctl enable --now oci-nvidia-mps@{gpu}\"");
    let failed = "its MPS daemon is not ready: the daemon ended (SIGKILL); run \"systemctl status oci-nvidia-mps@0\"";
    let exceed = "4 containers with 40960 MiB each, the memory limit of its MPS daemon, exceed its 81559 MiB; set mps-memory-limit = \
                  \"20389M\", or less, in [sharing] of config.toml, and run \"systemctl restart oci-nvidia-mps@0\"";
    let expected = [
        &*none,
        "pipe",
        "done",
        "done",
        NO_MEMORY,
        "status 1",
        failed,
        "does not work: its MPS daemon is not ready: the daemon ended (SIGKILL); run \"systemctl",
        "done",
        &none,
        exceed,
        "lost",
    ];
    assert_eq!(lines, expected);
}

fn claims_with_limits() {
    let lines = lines(
        &Host::new(),
        r#"sup 0 --memory-limit 16G
         kubelet --claims; plugin --interface dra --kubeconfig /run/kubelet/kubelet.conf --cdi-dir /run/cdi
         waits 'published gpu-0=Free gpu-1=Free'; waits 'drivers gpu.nvidia.com'
         ask claim a u-1 gpu-0; ask claim b u-2 gpu-0; ask prepare gpu.nvidia.com a u-1; ask prepare gpu.nvidia.com b u-2
         SOURCE=$(grep -o "\"hostPath\": *\"$D/pipe\"" /run/cdi/k8s.gpu.nvidia.com-gpu.json | sort -u | sed 's/.*: *"//; s/"//'); echo ${SOURCE#$D/}
         pod 15000 3 & A=$!; pod 15000 0; wait $A; pod 17000 0
         new; kill -9 $(field daemon); ended; waits 'published gpu-0=Tainted gpu-1=Free'
         ask prepare gpu.nvidia.com b u-2 | grep -o 'it does not work.*; run'
         new; sup 0 --memory-limit 16G; waits 'published gpu-0=Free gpu-1=Free'; pod 15000 0"#,
    );
    let prepared = "prepared k8s.gpu.nvidia.com/gpu=GPU-51eed000-0000-4000-8000-0000fa4e0000";
    let expected = [
        "ok",
        "ok",
        prepared,
        prepared,
        "pipe",
        "done",
        "done",
        NO_MEMORY,
        "status 1",
        "it does not work: its MPS daemon is not ready: the daemon ended (SIGKILL); run",
        "done",
    ];
    assert_eq!(lines, expected);
}
