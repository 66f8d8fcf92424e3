//! `oci-nvidia-mps@.service` with a real systemd: its confinement, and what systemd does when the daemon or its supervisor ends.

use crate::booted::Systemd;
use crate::built;
use crate::driver::FakeDriver;
use crate::support::{HOOK, Need, nvml_program, source, write_file};

const NEEDS: &[Need] = &[
    Need::Root,
    Need::Programs(&["cc", "systemd-run", "nsenter"]),
    Need::CgroupV2,
];

tests! {
    NEEDS => a_shared_gpu_as_a_service;
}

const UNIT: &str = "oci-nvidia-mps@GPU-51eed000-0000-4000-8000-0000fa4e0000.service";

/// `becomes WORD` waits for a state of the daemon, `field NAME` shows the file `state`, and `mode` shows the compute mode.
const FUNCTIONS: &str = r#"
D=/run/oci-nvidia-mps/GPU-51eed000-0000-4000-8000-0000fa4e0000
field() { sed "s/.*\"$1\":\"*\([^,\"}]*\).*/\1/" $D/state; }
state() { if [ -e $D/state ]; then field state; else echo none; fi; }
becomes() { n=0; until [ "$(state)" = $1 ]; do n=$((n + 1)); [ $n -lt 300 ] || { state; exit 1; }; sleep 0.1; done; }
another() { n=0; until [ "$(field supervisor)" != $1 ]; do n=$((n + 1)); [ $n -lt 300 ] || exit 1; sleep 0.1; done; }
mode() { cat /opt/driver/dev/nvidia-modes/compute-mode-0; }
"#;

fn install(systemd: &Systemd, fake: &FakeDriver) {
    // Only the directories of the tests are visible in the namespaces.
    let shared = systemd.dir.path().join("install");
    std::fs::create_dir(&shared).unwrap();
    let unit = "oci-nvidia-mps@.service";
    for unit in [unit, "oci-nvidia-mps.service"] {
        std::fs::copy(source("packaging/systemd").join(unit), shared.join(unit)).unwrap();
    }
    let program = built::programs().join("oci-nvidia-mps");
    let script = format!(
        "cp '{HOOK}' /usr/bin/oci-nvidia-hook; cp '{program}' /usr/bin/oci-nvidia-mps; cp '{nvml}' /usr/bin; cp '{install}'/*.service /run/systemd/system
         mkdir -p /opt/driver /etc/nvidia-container-runtime /run/systemd/system/{unit}.d
         cp -a '{root}/.' /opt/driver; cp -a /opt/driver/dev/nvidia* /dev
         {{ echo '[nvidia-container-cli]'; echo 'root = \"/opt/driver\"'; echo '[sharing]'; echo 'mps-gpus = [\"all\"]'
             echo 'mps-memory-limit = \"2G\"'; echo 'mps-thread-percentage = 25'; }} >/etc/nvidia-container-runtime/config.toml
         printf '[Unit]\\nDefaultDependencies=no\\n[Service]\\nStandardError=append:{log}\\n\
         ReadWritePaths=/opt/driver/dev/nvidia-modes\\n' >/run/systemd/system/{unit}.d/test.conf
         systemctl daemon-reload",
        nvml = nvml_program().display(),
        install = shared.display(),
        program = program.display(),
        root = fake.root.display(),
        log = systemd.dir.path().join("mps").display()
    );
    write_file(shared.join("script"), script);
    systemd
        .enter(&format!("sh -eu '{}'", shared.join("script").display()))
        .ok();
}

fn a_shared_gpu_as_a_service() {
    let systemd = Systemd::start();
    install(&systemd, &FakeDriver::new(&["--gpus", "1"]));
    let lines = |script: &str| {
        let ran = systemd.enter(&format!("set -eu\n{FUNCTIONS}\n{script}"));
        let log = std::fs::read_to_string(systemd.dir.path().join("mps")).unwrap_or_default();
        if ran.code != Some(0) {
            let status = systemd.enter(&format!("systemctl status --no-pager {UNIT}"));
            panic!("{}{}{log}{}", ran.stdout, ran.stderr, status.stdout);
        }
        ran.stdout.lines().map(str::to_owned).collect::<Vec<_>>()
    };
    let status = format!("systemctl show --value -p StatusText {UNIT}");
    // Type=notify: the unit is started when the daemon is ready.
    assert_eq!(
        lines(&format!(
            "systemctl start oci-nvidia-mps; state; mode; field memory_limit_mib; field active_thread_percentage; {status}"
        )),
        ["ready", "3", "2048", "25", "ready, client processes: 0"]
    );
    // systemd starts the unit again after each failure, also one of the supervisor.
    for victim in ["daemon", "supervisor"] {
        assert_eq!(
            lines(&format!(
                "P=$(field supervisor); kill -9 $(field {victim}); another $P; becomes ready; mode"
            )),
            ["3"],
            "{victim}"
        );
    }
    // The GPU stays closed, because config.toml shares it.
    assert_eq!(
        lines(&format!(
            "systemctl stop oci-nvidia-mps; state; mode; pgrep nvidia-cuda-mps || echo no process; systemctl show --value -p Result {UNIT}"
        )),
        ["failed", "2", "no process", "success"]
    );
    // A GPU that cannot be shared is not tried again and again. With an invalid file, it is.
    let wrong = "sed -i 's/^mps-memory-limit.*/mps-memory-limit = \"2X\"/' /etc/nvidia-container-runtime/config.toml";
    assert_eq!(
        lines(&format!(
            "systemctl start oci-nvidia-mps; becomes ready; {wrong}; P=$(field supervisor); kill -9 $P; becomes failed; mode
             sed -i s/2X/2G/ /etc/nvidia-container-runtime/config.toml; becomes ready; mode"
        )),
        ["2", "3"]
    );
    assert_eq!(
        lines(&format!(
            "sed -i 's/^mps-gpus.*/mps-gpus = [\"1\"]/' /etc/nvidia-container-runtime/config.toml; systemctl restart oci-nvidia-mps
             state; mode; systemctl start {UNIT} 2>/dev/null || echo failed; sleep 2
             systemctl is-failed {UNIT}; systemctl show --value -p ExecMainStatus -p NRestarts {UNIT} | sort; mode"
        )),
        ["none", "0", "failed", "failed", "0", "78", "0"]
    );
}
