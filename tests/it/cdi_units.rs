//! The units that keep the CDI spec of the host current, with a real systemd.

use crate::booted::Systemd;
use crate::built;
use crate::docs::blocks;
use crate::driver::FakeDriver;
use crate::harness::part;
use crate::support::{Need, nvml_program, read, source, write_file};

const NEEDS: &[Need] = &[
    Need::Root,
    Need::Programs(&["cc", "systemd-run", "nsenter"]),
    Need::CgroupV2,
    Need::Cargo,
];
/// This test takes a minute.
const LONG: &[Need] = &[
    Need::Root,
    Need::Programs(&["cc", "systemd-run", "nsenter"]),
    Need::CgroupV2,
    Need::Cargo,
    Need::Part(part::ENDURANCE),
];

tests! {
    &[] => both_services_have_the_same_restrictions;
    NEEDS => the_path_unit_watches_the_configuration, the_page_of_the_migration_stops_the_toolkit, stopped_units_write_no_spec;
    LONG => a_change_at_the_end_of_a_run_is_not_lost;
}

const PATH: &str = "oci-nvidia-hook-cdi.path";
const SERVICE: &str = "oci-nvidia-hook-cdi.service";
const RECHECK: &str = "oci-nvidia-hook-cdi-recheck.service";

/// Starts a host with a driver in `/opt/driver`, on which the units are installed and started.
fn start() -> Systemd {
    let (systemd, fake) = (Systemd::start(), FakeDriver::new(&["--gpus", "2"]));
    let dir = systemd.dir.path();
    let mut install = format!(
        "rm -rf /etc/nvidia-container-runtime; mkdir -p /opt/driver /etc/nvidia-container-runtime\n\
         cp '{hook}' '{nvml}' /usr/bin; cp -a '{root}/.' /opt/driver\n\
         printf '[nvidia-container-cli]\\nroot = \"/opt/driver\"\\n' >/etc/nvidia-container-runtime/config.toml\n",
        hook = built::programs().join("oci-nvidia-hook").display(),
        nvml = nvml_program().display(),
        root = fake.root.display(),
    );
    for unit in [PATH, SERVICE, RECHECK] {
        // Only the directories of the tests are visible in the namespaces.
        std::fs::copy(source("packaging/systemd").join(unit), dir.join(unit)).unwrap();
        let drop_ins = format!("/run/systemd/system/{unit}.d");
        install += &format!(
            "cp '{}' /run/systemd/system; mkdir -p {drop_ins}\n\
             printf '[Unit]\\nDefaultDependencies=no\\n' >{drop_ins}/test.conf\n",
            dir.join(unit).display()
        );
    }
    install += &format!("systemctl daemon-reload; systemctl start {PATH} {SERVICE}\n");
    write_file(dir.join("install"), install);
    systemd
        .enter(&format!("sh -eu '{}'", dir.join("install").display()))
        .ok();
    systemd
}

/// The second service does a part of the first one's work.
fn both_services_have_the_same_restrictions() {
    let restrictions = |unit: &str| {
        let path = source("packaging/systemd").join(unit);
        let text = read(path);
        let (_, service) = text.split_once("[Service]\n").unwrap();
        let (service, _) = service.split_once("\n[").unwrap_or((service, ""));
        let mut lines = Vec::new();
        for line in service.lines() {
            if !line.is_empty() && !line.starts_with('#') && !line.starts_with("Exec") {
                lines.push(line.to_owned());
            }
        }
        lines
    };
    assert_eq!(restrictions(SERVICE), restrictions(RECHECK));
}

/// The first commands of migration.md, with the toolkit's units and files, and without them.
fn the_page_of_the_migration_stops_the_toolkit() {
    let page = read(source("docs/migration.md"));
    let (_, after) = page.split_once("## Commands\n").unwrap();
    let commands = format!("{}\n", blocks(after, "sh")[0]);
    assert!(commands.starts_with(
        "systemctl disable --now nvidia-cdi-refresh.path nvidia-cdi-refresh.service\n"
    ));
    let systemd = start();
    let toolkit = "cd /etc/systemd/system\n\
        printf '[Path]\\nPathChanged=/etc/hosts\\n[Install]\\nWantedBy=multi-user.target\\n' >nvidia-cdi-refresh.path\n\
        printf '[Service]\\nType=oneshot\\nExecStart=/bin/true\\n[Install]\\nWantedBy=multi-user.target\\n' >nvidia-cdi-refresh.service\n\
        mkdir -p /run/systemd/system/nvidia-cdi-refresh.path.d /etc/cdi /etc/containers/oci/hooks.d\n\
        printf '[Unit]\\nDefaultDependencies=no\\n' >/run/systemd/system/nvidia-cdi-refresh.path.d/test.conf\n\
        touch /etc/cdi/nvidia.yaml /etc/containers/oci/hooks.d/oci-nvidia-hook.json\n\
        systemctl daemon-reload; systemctl enable --now nvidia-cdi-refresh.path; systemctl enable nvidia-cdi-refresh.service\n\
        systemctl is-active nvidia-cdi-refresh.path";
    assert_eq!(systemd.enter(toolkit).stdout, "active\n");
    let script = systemd.dir.path().join("commands");
    write_file(&script, commands);
    // Without -e, as in the shell of an administrator: the exit status is the last command's.
    let copied = format!("sh '{}'", script.display());
    systemd.enter(&copied).ok();
    let state = "ls /etc/cdi /etc/containers/oci/hooks.d; systemctl is-active nvidia-cdi-refresh.path || true\n\
        systemctl is-enabled nvidia-cdi-refresh.path nvidia-cdi-refresh.service || true";
    let stdout = systemd.enter(state).stdout;
    assert!(
        stdout.ends_with("inactive\ndisabled\ndisabled\n") && !stdout.contains("nvidia.yaml"),
        "{stdout}"
    );
    assert!(!stdout.contains("oci-nvidia-hook.json"), "{stdout}");
    systemd
        .enter("rm /etc/systemd/system/nvidia-cdi-refresh.*; systemctl daemon-reload")
        .ok();
    systemd.enter(&copied).ok();
}

/// The number of updates of the driver. Without the second service, one in twelve leaves an outdated spec.
const UPDATES: usize = 200;

/// An update of the driver changes several watched files in a short time: ldconfig runs more than once, and configuration follows. The
/// last change comes at another moment of the unit's run each time, also in the milliseconds before its end.
fn a_change_at_the_end_of_a_run_is_not_lost() {
    let systemd = start();
    let dir = "/etc/nvidia-container-runtime/config.toml.d";
    let script = format!(
        "cp -a /opt/driver /opt/other; mkdir -p {dir}\n\
         stale=0\n\
         for n in $(seq 0 {last}); do\n\
           if [ $((n % 2)) = 0 ]; then root=/opt/other; else root=/opt/driver; fi\n\
           printf '[nvidia-container-cli]\\nroot = \"%s\"\\n' $root >/etc/new.toml\n\
           cp -a /etc/ld.so.cache /etc/ld.so.cache~; mv /etc/ld.so.cache~ /etc/ld.so.cache\n\
           case $((n % 3)) in\n\
           0) systemctl start {SERVICE} ;;\n\
           1) systemctl start {SERVICE}; sleep 0.00$((n % 10)) ;;\n\
           2) sleep 0.0$((n % 90 + 10)) ;;\n\
           esac\n\
           mv /etc/new.toml {dir}/root.toml\n\
           tries=0\n\
           until grep -q \"hostPath: .*$root/\" /run/cdi/nvidia.yaml; do\n\
             tries=$((tries + 1))\n\
             if [ $tries = 100 ]; then stale=$((stale + 1)); systemctl start {SERVICE}; break; fi\n\
             sleep 0.05\n\
           done\n\
         done\n\
         echo \"$stale outdated specs\"",
        last = UPDATES - 1
    );
    let path = systemd.dir.path().join("updates");
    write_file(&path, script);
    let stdout = systemd.enter(&format!("sh -eu '{}'", path.display())).ok();
    assert_eq!(stdout, "0 outdated specs\n");
}

/// An administrator disables the units and removes the spec, as switch-off.md states, while one of the services runs. The other one must
/// not write the spec again.
fn stopped_units_write_no_spec() {
    let sleep = |unit: &str| {
        format!(
            "printf '[Service]\\nExecStartPre=/bin/sleep 3\\n' >/run/systemd/system/{unit}.d/slow.conf"
        )
    };
    // The third one is stopped while it prepares the driver.
    let slow_driver = "echo init-delay-ms 3000 >>\"$(find /opt/driver -name nvml.conf)\"";
    for (running, slow) in [
        (RECHECK, sleep(RECHECK)),
        (SERVICE, sleep(SERVICE)),
        (SERVICE, slow_driver.to_owned()),
    ] {
        let systemd = start();
        let script = format!(
            // A unit of this type is never active: while it runs, it is activating, or its job waits.
            "until [ -e /run/cdi/nvidia.yaml ] && [ -z \"$(systemctl list-jobs --no-legend)\" ] && \
               [ \"$(systemctl show -p ActiveState --value {SERVICE} {RECHECK} | sort -u | xargs)\" = inactive ]; do sleep 0.1; done\n\
             {slow}\n\
             systemctl daemon-reload; systemctl start --no-block {SERVICE}\n\
             until [ \"$(systemctl show -p ActiveState --value {running})\" = activating ]; do sleep 0.1; done\n\
             systemctl disable --now {PATH} {SERVICE}; rm /var/run/cdi/nvidia*.yaml\n\
             sleep 5; ls /run/cdi"
        );
        assert_eq!(systemd.enter(&script).ok(), "", "{running}: {slow}");
    }
}

/// The units of the package write the CDI spec again, however config.toml and its drop-in files are changed.
fn the_path_unit_watches_the_configuration() {
    let systemd = start();
    let has = |gpus: &str, after: &str| {
        let found = "oci-nvidia-hook cdi list --spec-dir /run/cdi | sed -n 's/^nvidia.com.gpu=\\([01]\\)$/\\1/p' | tr -d '\\n'";
        let wait = format!(
            "for n in $(seq 150); do [ \"$({found})\" = '{gpus}' ] && exit 0; sleep 0.1; done; {found}; exit 1"
        );
        let ran = systemd.enter(&wait);
        assert_eq!(ran.code, Some(0), "{after}: {ran:?}");
    };
    has("01", "the first start");
    let dir = "/etc/nvidia-container-runtime";
    let root = "[nvidia-container-cli]\\nroot = \"/opt/driver\"\\n";
    for (change, gpus) in rows! {
        // The directory does not exist at first.
        format!("mkdir {dir}/config.toml.d; printf '[devices]\\ndeny = [\"1\"]\\n' >{dir}/config.toml.d/10.toml"), "0";
        format!("printf '[devices]\\ndeny = [\"0\"]\\n' >{dir}/x; mv {dir}/x {dir}/config.toml.d/10.toml"), "1";
        format!("printf '[devices]\\nallow = [\"0\"]\\n' >{dir}/config.toml.d/10.toml"), "0";
        format!("rm {dir}/config.toml.d/10.toml"), "01";
        format!("printf '[devices]\\ndeny = [\"1\"]\\n' >>{dir}/config.toml"), "0";
        format!("printf '{root}' >{dir}/x; mv {dir}/x {dir}/config.toml"), "01";
        format!("printf '{root}[devices]\\ndeny = [\"0\"]\\n' >{dir}/config.toml"), "1";
        format!("rm -r {dir}/config.toml.d; printf '{root}' >{dir}/config.toml"), "01";
        format!("mkdir {dir}/x; printf '[devices]\\ndeny = [\"1\"]\\n' >{dir}/x/10.toml; mv {dir}/x {dir}/config.toml.d"), "0";
    } {
        systemd.enter(&change).ok();
        has(gpus, &change);
    }
    // An invalid file leaves the spec as it is, and the unit fails.
    systemd
        .enter(&format!(
            "printf '[devices]\\ndeny = [\"H100\"]\\n' >{dir}/config.toml.d/20.toml"
        ))
        .ok();
    systemd
        .enter(&format!(
            "for n in $(seq 200); do ! systemctl is-failed -q {SERVICE} {RECHECK} || exit 0; sleep 0.1; done; exit 1"
        ))
        .ok();
    has("0", "an invalid file");
    systemd.enter(&format!("rm {dir}/config.toml.d/*")).ok();
    has("01", "after it was corrected");
}
