//! Compares `status` with podman: a hook leaves a trace if and only if `status` reports it as active.

use std::path::Path;
use std::process::Command;

use base::paths::HostPath;
use base::tree::Tree;
use engines::{Version, status as engine_status};
use serde_json::{Value, json};

use crate::built;
use crate::driver::{FakeDriver, Image};
use crate::podman_shapes::{NEEDS_USER, User};
use crate::support::{
    HOOK, Need, chmod, copy_nvml_program, run, scratch, scratch_with_short_path, sh, sh_unshared,
    shell, source, unshare, write_file, write_program,
};
use crate::views::without_color;

const NEEDS: &[Need] = &[Need::Root, Need::Programs(&["podman", "runc", "cc"])];

tests! {
    NEEDS => agrees_with_podman_of_root;
    NEEDS_USER => agrees_with_podman_of_a_user;
    &[Need::Root] => of_a_cri_o_that_runs, knows_the_nri_plugin, knows_the_device_plugin;
    &[Need::Root, Need::Build] => all_programs_agree_about_cri_o;
    &[] => of_the_device_plugin_for_a_user;
    &[Need::Program("script")] => colours_are_for_terminals;
    &[Need::Root, Need::Programs(&["cc", "script"])] => a_pipe_gets_the_same_lines;
}

/// The administrator's containers.conf, a shell script, and the first Podman with which the hook is active then. `hook FILE STAGE WHEN` writes a
/// hook file that leaves a trace, and `always FILE` one for all containers; `$usr` and `$etc` are the two default directories.
type Case = (&'static str, &'static str, Version);

const ANY: Version = Version(0, 0, 0);
const NONE: Version = Version(u32::MAX, 0, 0);

pub fn podman_version() -> Version {
    Version::parse(&run(Command::new("podman").arg("--version")).ok()).unwrap()
}

const CASES: &[Case] = &rows! {
    "", "", NONE;
    "", "always $usr/a.json", ANY;
    "", "hook $usr/a.json createRuntime '{\"always\":true,\"commands\":[\".*\"]}'", ANY;
    "", "hook $usr/a.json prestart '{}'", NONE;
    "", "hook $usr/a.json prestart '{\"always\":true,\"hasBindMounts\":false}'", NONE;
    "", "always $etc/a.json", NONE;
    "hooks_dir = [\"/etc/containers/oci/hooks.d\"]", "always $usr/a.json", NONE;
    "hooks_dir = [\"/etc/containers/oci/hooks.d\"]", "always $etc/a.json", ANY;
    // The drop-in has priority.
    "hooks_dir = [\"/nowhere\"]", "always $usr/a.json; mkdir -p /etc/containers/containers.conf.d; \
         printf '[engine]\\nhooks_dir = [\"%s\"]\\n' $usr >/etc/containers/containers.conf.d/50-x.conf", ANY;
    "hooks_dir = [\"/nowhere\"]", "always $usr/a.json", NONE;
    // One name in two directories: the later directory has priority.
    "hooks_dir = [\"/usr/share/containers/oci/hooks.d\", \"/etc/containers/oci/hooks.d\"]",
        "always $usr/a.json; hook $etc/a.json prestart '{\"always\":false}'", NONE;
    "", "always $usr/a.json; echo '{' >$usr/b.json", NONE;
    "", "always $usr/a.json; echo '{' >$usr/b.json.rpmsave", ANY;
    "", "always $usr/a.json; hook $usr/b.json nonsense '{\"always\":true}'", NONE;
    // A missing program: that file is ignored, others are not.
    "", "sed s,oci-nvidia-hook,gone,g $trace >$trace.gone; trace=$trace.not always $usr/a.json", NONE;
    "", "trace=$trace.not hook $usr/b.json nonsense '{}'; always $usr/a.json", ANY;
    "", "always $usr/a.json; chmod 644 $trace", NONE;
    "", "printf '{\"hook\":\"%s\",\"arguments\":[\"prestart\"],\"stages\":[\"prestart\"],\"cmds\":[\".*\"]}' $trace >$usr/a.json", ANY;
    "hooks_dir = [\"/usr/share/containers/oci/hooks.d\", {append = true}]", "always $usr/a.json", Version(4, 8, 0);
    "runtime = \"runc", "always $usr/a.json", NONE;
};

/// With an empty list, Podman as root reads its default directories from 4.8 on.
const ROOTS_CASES: &[Case] = &rows! {
    "hooks_dir = []", "always $usr/a.json", Version(4, 8, 0);
    "hooks_dir = []", "always $etc/a.json", Version(4, 8, 0);
};

/// Runs in a mount namespace in which `/etc/containers` and the hooks directories come from the case; the shell's `$1` runs
/// podman. Returns the trace of the hook, and the output of status.
fn script(dir: &Path, (conf, setup, _): &Case) -> String {
    format!(
        r#"dir='{dir}'; trace=$dir/oci-nvidia-hook; usr=/usr/share/containers/oci/hooks.d; etc=/etc/containers/oci/hooks.d
        mount -t tmpfs x /etc/containers; mount -t tmpfs x /usr/share/containers
        mkdir -p $usr $etc /etc/containers/containers.conf.d; chmod 755 /etc/containers /usr/share/containers
        printf '[containers]\ndefault_ulimits = ["nofile=20000:20000", "nproc=30000:30000"]\npids_limit = 0\n' >/etc/containers/containers.conf.d/00-test.conf
        printf '%s\n' '[engine]' '{conf}' >/etc/containers/containers.conf
        echo '{{"default":[{{"type":"insecureAcceptAnything"}}]}}' >/etc/containers/policy.json
        printf '#!/bin/sh\necho ran >>%s/ran/trace; exec cat\n' "$dir" >$trace; chmod 755 $trace
        hook() {{ printf '{{"version":"1.0.0","hook":{{"path":"%s","args":["h","%s"],"env":["A=b"]}},"when":%s,"stages":["%s"]}}' \
            "$trace" "$2" "$3" "$2" >$1; }}
        always() {{ hook "$1" prestart '{{"always":true}}'; }}
        rm -f $dir/ran/trace
        {setup}
        "$@" >$dir/said 2>&1 || true
        if test -e $dir/ran/trace; then echo ran; else echo not; fi"#,
        dir = dir.display(),
    )
}

/// Podman's options for a container that ends at once.
const RUN: &str = "--storage-driver vfs --cgroup-manager cgroupfs --runtime runc --events-backend none run --rm \
                   --network=none --log-driver=none --rootfs";

fn prepare(dir: &Path) {
    chmod(dir, 0o755);
    let image = Image::new(dir, &["--layout", "debian"]);
    shell!(
        "cd '{}'; mkdir -p run/secrets var/tmp '{}'/ran; chmod 777 '{}'/ran; touch etc/hosts etc/hostname etc/resolv.conf run/.containerenv",
        image.rootfs.display(),
        dir.display(),
        dir.display()
    );
}

/// Returns whether the hook ran, and what status reports for the engine.
fn outcome(
    dir: &Path,
    case: &Case,
    podman: &str,
    status: &str,
    engine: &str,
) -> (bool, serde_json::Value) {
    let script = format!("{}\n{status}", script(dir, case));
    let mut unshare = unshare(&script);
    unshare
        .args(["sh", "-euc", podman])
        .env_remove("CONTAINERS_CONF");
    let ran = run(&mut unshare);
    let (trace, json) = ran
        .stdout
        .split_once('\n')
        .unwrap_or_else(|| panic!("{ran:?}"));
    let all = crate::json_schema::part("status", json, "engines");
    let one = all
        .iter()
        .find(|one| one["engine"].as_str().unwrap().starts_with(engine))
        .unwrap()
        .clone();
    (trace == "ran", one)
}

#[track_caller]
fn assert_agrees(case: &Case, dir: &Path, (ran, status): (bool, serde_json::Value)) {
    let said = std::fs::read_to_string(dir.join("said")).unwrap_or_default();
    let (conf, setup, first) = case;
    let text = format!("{conf:?} {setup:?}: {status}\npodman: {said}");
    assert_eq!(ran, podman_version() >= *first, "podman: {text}");
    assert_eq!(status["active"], ran, "status: {text}");
    if ran {
        assert!(
            status["hooks"][0]["file"].is_string() && status["hooks"][0]["stages"][0].is_string(),
            "{text}"
        );
    } else {
        assert!(
            !status["why"].as_str().unwrap().is_empty()
                && !status["fix"].as_str().unwrap().is_empty(),
            "{text}"
        );
    }
}

fn agrees_with_podman_of_root() {
    let (dir, runroot) = (scratch(), scratch_with_short_path());
    prepare(dir.path());
    let (path, runroot) = (dir.path().display(), runroot.path().display());
    let podman = format!(
        "podman --root '{path}/st' --runroot '{runroot}' --tmpdir '{path}/tmp' {RUN} '{path}/image' true"
    );
    for case in CASES.iter().chain(ROOTS_CASES) {
        let status = format!("'{HOOK}' status --json || true");
        assert_agrees(
            case,
            dir.path(),
            outcome(dir.path(), case, &podman, &status, "Podman as root"),
        );
    }
}

/// Files in the user's home directory have the highest priority.
const USERS_CASES: &[Case] = &rows! {
    "hooks_dir = []", "always $usr/a.json", NONE;
    "hooks_dir = [\"/nowhere\"]", "always $usr/a.json; mkdir -p $dir/home/.config/containers/containers.conf.d; \
         printf '[engine]\\nhooks_dir = [\"%s\"]\\n' $usr >$dir/home/.config/containers/containers.conf.d/a.conf", ANY;
    "", "always $usr/a.json; printf '[engine]\\nhooks_dir = [\"/nowhere\"]\\n' >$dir/home/.config/containers/containers.conf", ANY;
    "", "rm -r $dir/home/.config/containers/containers.conf.d; always $usr/a.json", NONE;
};

fn agrees_with_podman_of_a_user() {
    let user = User::made();
    let dir = user.dir.path();
    prepare(dir);
    let path = dir.display();
    shell!(
        "chown -R {0} '{path}/image'; install -d -o {0} -m 0700 '{path}/run'; cp '{HOOK}' '{path}/hook'",
        user.name
    );
    copy_nvml_program(dir);
    let as_user = format!(
        "cd /; setpriv --reuid {0} --regid {0} --init-groups env -i PATH=\"$PATH\" HOME='{path}/home' \
         XDG_RUNTIME_DIR='{path}/run'",
        user.name
    );
    // The process that keeps the user namespace also keeps the mount namespace of the case.
    let podman = format!(
        "{as_user} podman --root '{path}/home/st' --runroot '{path}/run/rr' --tmpdir '{path}/run/tmp' {RUN} \
         '{path}/image' true || true; for file in $(find '{path}/run' -name pause.pid); do kill $(cat $file); rm $file; done"
    );
    let status = format!("({as_user} '{path}/hook' status --json) || true");
    for case in CASES.iter().chain(USERS_CASES) {
        assert_agrees(
            case,
            dir,
            outcome(dir, case, &podman, &status, "Podman of onh-"),
        );
    }
}

/// The output of `crio status config` decides, not the files: they are read at the next start, and the command line has priority.
fn of_a_cri_o_that_runs() {
    let dir = scratch();
    let shipped = source("hooks.d/oci-nvidia-hook.json");
    // A program that prints its configuration like CRI-O, from a file instead of a running daemon.
    let script = r#"#!/bin/sh
        case "$*" in
        --version) printf 'crio version 1.37.0\nVersion: 1.37.0\n' ;;
        "status config") cat "$(dirname "$0")/../../running.toml" ;;
        *) exit 1 ;;
        esac"#;
    shell!(
        "cd '{}'; mkdir -p usr/bin usr/share/containers/oci/hooks.d etc/crio/crio.conf.d run/crio opt/hooks; \
         cp '{}' usr/share/containers/oci/hooks.d; echo '#!/bin/sh' >usr/bin/oci-nvidia-hook; \
         chmod 755 usr/bin/oci-nvidia-hook; touch run/crio/crio.sock",
        dir.path().display(),
        shipped.display()
    );
    let crio = dir.path().join("usr/bin/crio");
    write_program(&crio, script);
    let conf = dir.path().join("etc/crio/crio.conf.d/10-x.conf");
    let running = dir.path().join("running.toml");
    let list = |hooks: &str| {
        format!(
            "[crio]\n  root = \"/var/lib\"\n  [crio.runtime]\n    hooks_dir = [{hooks}]\n    default_runtime = \"crun\"\n"
        )
    };
    let (usual, other) = (
        "\"/usr/share/containers/oci/hooks.d\"",
        "\"/etc/nohooks\", \"/opt/hooks\"",
    );
    let status = |live: Option<&str>, on_disk: Option<&str>| {
        let write = |path: &Path, text: Option<&str>| match text {
            Some(text) => write_file(path, list(text)),
            None => drop(std::fs::remove_file(path)),
        };
        write(&running, live);
        write(&conf, on_disk);
        let host = Tree::open(&HostPath::new(dir.path())).unwrap();
        let report = engine_status::report(&host, None);
        report
            .engines
            .into_iter()
            .find(|status| status.engine == "CRI-O")
            .unwrap()
    };
    for (live, on_disk, active, why, fix) in rows! {
        Some(usual), None, true, "", "";
        None, None, true, "", "";
        Some(other), None, false, "the hooks directories of the running CRI-O are /etc/nohooks, /opt/hooks",
            "run \"systemctl restart crio\"; if";
        Some(""), None, false, "the hooks directories of the running CRI-O are (none), its configuration files name ",
            "run \"systemctl restart crio\"; if";
        Some(other), Some(other), false, "sets the hooks directories /etc/nohooks", ", and run \"systemctl restart crio\"";
        None, Some(other), false, "sets the hooks directories /etc/nohooks", ", and run \"systemctl restart crio\"";
        Some(usual), Some(other), true, "until its next start: ", "add \"/usr/share/containers/oci/hooks.d\" to hooks_dir";
    } {
        let status = status(live, on_disk);
        let text = format!("{live:?} {on_disk:?}: {status:?}");
        assert_eq!(status.active, active, "{text}");
        assert!(
            status.why.contains(why) && status.why.is_empty() == why.is_empty(),
            "{text}"
        );
        assert!(
            status.fix.contains(fix) && status.fix.is_empty() == fix.is_empty(),
            "{text}"
        );
    }
    // CRI-O reads the directory again when a file in it changes, and keeps its hooks if one file is invalid.
    let broken = dir.path().join("usr/share/containers/oci/hooks.d/x.json");
    write_file(&broken, "{");
    let live = status(Some(usual), None);
    assert!(
        !live.active
            && live
                .why
                .starts_with("the engine uses the hooks that it read before, and cannot"),
        "{live:?}"
    );
    assert!(
        status(None, None)
            .why
            .starts_with("the engine does not start: ")
    );
    std::fs::remove_file(&broken).unwrap();
    // Not asked: it does not run, or other users could have written the program.
    std::fs::remove_file(dir.path().join("run/crio/crio.sock")).unwrap();
    assert!(status(Some(other), None).active);
    write_file(dir.path().join("run/crio/crio.sock"), "");
    chmod(&crio, 0o757);
    assert!(status(Some(other), None).active);
    // The command does not wait for a program that hangs.
    write_program(&crio, script.replace("cat \"", "exec sleep 60; cat \""));
    let start = std::time::Instant::now();
    assert!(status(Some(other), None).active);
    assert!(start.elapsed() < std::time::Duration::from_secs(30));
}

/// CRI-O without the hook, while our NRI plugin runs as each of the two units, and then not at all.
fn knows_the_nri_plugin() {
    let state = |arguments: &str, user: &str| {
        let script = format!(
            "mount -t tmpfs x /usr/local/bin; mount -t tmpfs x /run; mkdir -p /run/nri; touch /run/nri/nri.sock\n\
             for dir in /etc/crio /usr/share/containers/oci /etc/containers/oci; do [ ! -e $dir ] || mount -t tmpfs x $dir; done\n\
             printf '#!/bin/sh\\n' >/usr/local/bin/crio; cp /bin/sh /usr/local/bin/oci-nvidia-kubelet-plugin; chmod 755 /usr/local/bin/*\n\
             setpriv --reuid {user} /usr/local/bin/oci-nvidia-kubelet-plugin -c 'sleep 60; :' {arguments} &\n\
             sleep 0.3; {HOOK} status --json || true; echo ===; {HOOK} status || true; echo ===; {HOOK} doctor --all hook || true; kill %1"
        );
        let mut contained = Command::new("unshare");
        let printed =
            run(contained.args(["-m", "-p", "-f", "--mount-proc", "bash", "-euc", &script])).stdout;
        let [json, text, diagnosis] = *printed.split("===\n").collect::<Vec<_>>() else {
            panic!("{printed}")
        };
        let status = crate::json_schema::checked("status", json);
        let crio = status["engines"]
            .as_array()
            .unwrap()
            .iter()
            .find(|engine| engine["engine"] == "CRI-O")
            .unwrap();
        let is_ok = diagnosis
            .lines()
            .any(|line| line.starts_with("ok") && line.contains("CRI-O: the NRI plugin gives"));
        (
            status["nri"].clone(),
            crio["nri"] == true && crio.get("fix").is_none() && is_ok,
            text.to_owned(),
        )
    };
    let socket = "/run/nri/nri.sock";
    let (nri, is_crio_served, text) = state("nri", "0");
    assert_eq!(
        (nri, is_crio_served),
        (
            json!({"unit": "oci-nvidia-nri.service", "socket": socket}),
            true
        ),
        "{text}"
    );
    let row = text.lines().find(|line| line.contains("NRI plugin  "));
    let row: Vec<_> = row
        .unwrap_or_else(|| panic!("{text}"))
        .split_whitespace()
        .collect();
    assert_eq!(
        row,
        [
            "CRI-O",
            "NRI",
            "plugin",
            "active",
            socket,
            "(oci-nvidia-nri.service)"
        ],
        "{text}"
    );
    let (nri, is_crio_served, text) = state("run --nri", "0");
    let unit = "oci-nvidia-kubelet-plugin.service";
    assert_eq!(
        (nri, is_crio_served),
        (json!({"unit": unit, "socket": socket}), true),
        "{text}"
    );
    for (arguments, user) in [("run", "0"), ("nri", "65534")] {
        let (nri, is_crio_served, text) = state(arguments, user);
        assert_eq!(
            (nri, is_crio_served),
            (Value::Null, false),
            "{arguments} {user}: {text}"
        );
    }
}

/// The plugin is installed and started, a kubelet starts, another plugin serves it, and then ours does.
fn knows_the_device_plugin() {
    let dir = "/var/lib/kubelet/device-plugins";
    let socket = format!("{dir}/oci-nvidia-gpu.sock");
    let unit = "oci-nvidia-kubelet-plugin.service";
    let idle = |why: &str, fix: &str| {
        let mut status = json!({"unit": unit, "active": false, "why": why});
        if !fix.is_empty() {
            status["fix"] = json!(fix);
        }
        status
    };
    let other = format!("another device plugin serves \"{dir}/nvidia-gpu.sock\"");
    let enable = "run \"oci-nvidia-kubelet-plugin check\" and \"systemctl enable --now oci-nvidia-kubelet-plugin\"";
    let steps = rows! {
        "true", Value::Null, "";
        "install -D -m 755 /dev/null /usr/local/bin/oci-nvidia-kubelet-plugin", idle("no kubelet runs", ""), "skipped";
        "touch $dir/oci-nvidia-gpu.sock", idle("no kubelet runs", ""), "skipped";
        "rm $dir/*; touch $dir/kubelet.sock", idle("it serves no resource to the kubelet", enable), "ONH-603";
        "touch $dir/nvidia-gpu.sock", idle(&other, "remove one of the two plugins"), "ONH-601";
        "touch $dir/oci-nvidia-gpu.sock", json!({"unit": unit, "active": true, "sockets": [&socket]}), "skipped";
    };
    for count in 1..=steps.len() {
        let (_, expected, finding) = &steps[count - 1];
        let setup: Vec<_> = steps.iter().take(count).map(|(setup, ..)| *setup).collect();
        let script = format!(
            "mount -t tmpfs x /var/lib; mount -t tmpfs x /usr/local/bin; dir={dir}; mkdir -p $dir; {}\n\
             {HOOK} status || true; echo ===; {HOOK} status --json || true; echo ===; {HOOK} doctor --all kubelet || true",
            setup.join("; ")
        );
        // Other tests start plugins at the same time, whose processes the commands would find.
        let mut alone = Command::new("unshare");
        alone.args([
            "-m",
            "-p",
            "-f",
            "--kill-child",
            "--mount-proc",
            "sh",
            "-euc",
            &script,
        ]);
        let printed = run(&mut alone).ok();
        let [text, json, diagnosis] = *printed.split("===\n").collect::<Vec<_>>() else {
            panic!("{printed}")
        };
        let status = &crate::json_schema::checked("status", json)["kubelet_plugin"];
        assert_eq!(status, expected, "{printed}");
        // The row of the plugin, and the line below it with the reason.
        let mut lines = text
            .lines()
            .skip_while(|line| !line.contains("device plugin  "));
        let row = lines.next().map(|line| {
            line.split_whitespace()
                .skip(3)
                .collect::<Vec<_>>()
                .join(" ")
        });
        let expected = match &status["active"] {
            Value::Null => None,
            Value::Bool(true) => Some(format!("active {socket} ({unit})")),
            _ => Some(format!("not active ({unit})")),
        };
        assert_eq!(row, expected, "{text}");
        assert_eq!(
            lines.next().map(str::trim),
            status["why"].as_str(),
            "{text}"
        );
        assert_eq!(text.contains(enable), *finding == "ONH-603", "{text}");
        let check = diagnosis
            .lines()
            .find(|line| line.contains(" kubelet-plugin (kubelet): "))
            .unwrap();
        assert!(check.contains(finding), "{check}");
    }
}

/// Only root can see the sockets.
fn of_the_device_plugin_for_a_user() {
    let dir = scratch();
    shell!(
        "cd '{}'; install -D -m 755 /dev/null usr/bin/oci-nvidia-kubelet-plugin",
        dir.path().display()
    );
    let host = Tree::open(&HostPath::new(dir.path())).unwrap();
    let user = engines::User {
        name: "tux".to_owned(),
        uid: 1000,
        home: None,
    };
    let plugin = engine_status::report(&host, Some(user))
        .kubelet_plugin
        .unwrap();
    assert_eq!(
        (plugin.active, plugin.why.as_str()),
        (None, "only root can see the sockets of the kubelet")
    );
}

/// On a terminal there are colors unless they are disabled; in a pipe there are none.
fn colours_are_for_terminals() {
    let on_a_terminal = |variables: &str| {
        shell!(
            "env -i TERM=xterm SHELL=/bin/sh {variables} script -qec '{HOOK} status' /dev/null </dev/null || true"
        )
    };
    assert!(on_a_terminal("A=b").contains('\u{1b}'));
    assert!(!on_a_terminal("NO_COLOR=1").contains('\u{1b}'));
    assert!(!on_a_terminal("TERM=dumb").contains('\u{1b}'));
    let piped = run(Command::new(HOOK).arg("status").env("TERM", "xterm"));
    assert!(!piped.stdout.is_empty() && !piped.stdout.contains('\u{1b}'));
    let colored = run(Command::new(HOOK).args(["status", "--color", "always"]));
    assert!(colored.stdout.contains('\u{1b}'));
}

/// The terminal wraps long lines: without colors, a pipe gets the same text.
fn a_pipe_gets_the_same_lines() {
    let fake = FakeDriver::new(&["--gpus", "2", "--mig"]);
    for command in ["doctor", "status", "info"] {
        let hook = format!("{HOOK} --config {} {command}", fake.config.display());
        let screen = format!(
            "env -i TERM=xterm SHELL=/bin/sh PATH=\"$PATH\" script -qec 'stty cols 60; {hook} || true' /dev/null </dev/null"
        );
        let screen = sh(&screen).ok().replace('\r', "");
        assert!(screen.contains('\u{1b}'), "{screen}");
        let piped = shell!("env -i PATH=\"$PATH\" {hook} || true");
        assert_eq!(without_color(&screen), piped, "{command}");
    }
}

/// The states of a node whose engine is CRI-O: commands that change the node with an active hook, and whether CRI-O still starts the
/// hook.
const STATES: &[(&str, bool)] = &rows! {
    "true", true;
    "rm /usr/local/bin/oci-nvidia-hook", false;
    "sed -i 's/\"always\": true/\"always\": false/' $hooks/oci-nvidia-hook.json", false;
    "echo '{' >$hooks/oci-nvidia-hook.json", false;
    "mkdir -p /etc/crio/crio.conf.d/more /run/hooks; mv $hooks/*.json /run/hooks; \
         printf '[crio.runtime]\\nhooks_dir = [\"/run/hooks\"]\\n' >/etc/crio/crio.conf.d/more/10-hooks", true;
    "mv $hooks/oci-nvidia-hook.json $hooks/gpus.json", true;
    "rm $hooks/oci-nvidia-hook.json", false;
    "chmod 644 /usr/local/bin/oci-nvidia-hook", false;
};

/// `status`, `doctor` and the device plugin's `check` agree whether CRI-O starts the hook. The plugin's answer matters most: with a
/// variable, a pod whose engine does not start the hook would get device nodes without driver libraries.
fn all_programs_agree_about_cri_o() {
    let dir = scratch();
    let (programs, hook_file) = (built::programs(), source("hooks.d/oci-nvidia-hook.json"));
    for (change, active) in STATES {
        let script = format!(
            r#"hooks=/usr/share/containers/oci/hooks.d out='{out}'
            for dir in /run /etc /usr/share/containers /usr/local/bin; do
                mount -t tmpfs -o mode=755 x $dir
            done
            mkdir -p $hooks /run/crio /run/oci-nvidia-hook /etc/crio; chmod 700 /run/oci-nvidia-hook; touch /run/crio/crio.sock
            echo 'root:x:0:0:root:/root:/bin/sh' >/etc/passwd
            printf '#!/bin/sh\ncase "$*" in --version) echo crio version 1.37.0 ;; *) exit 1 ;; esac\n' >/usr/local/bin/crio
            cp '{programs}/oci-nvidia-hook' /usr/local/bin; chmod 755 /usr/local/bin/*
            sed s,/usr/bin/,/usr/local/bin/, '{hook_file}' >$hooks/oci-nvidia-hook.json
            {change}
            '{programs}/oci-nvidia-hook' status --json >$out/status.json || true
            '{programs}/oci-nvidia-hook' doctor --json >$out/doctor.json || true
            '{programs}/oci-nvidia-kubelet-plugin' check --json >$out/check.json || true"#,
            out = dir.path().display(),
            programs = programs.display(),
            hook_file = hook_file.display(),
        );
        sh_unshared(&script).ok();
        let json = |name: &str| -> Value {
            serde_json::from_slice(&std::fs::read(dir.path().join(name)).unwrap()).expect(name)
        };
        let (status, doctor, check) =
            (json("status.json"), json("doctor.json"), json("check.json"));
        let engines = status["engines"].as_array().unwrap();
        let crio = engines
            .iter()
            .find(|engine| engine["engine"] == "CRI-O")
            .unwrap();
        assert_eq!(crio["active"], *active, "{change}: {crio}");
        let checks = doctor["checks"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|check| check["check"] == "engines");
        let says: Vec<_> = checks
            .filter(|check| check["what"].as_str().unwrap().starts_with("CRI-O"))
            .collect();
        assert_eq!(says.len(), 1, "{change}: {doctor}");
        assert_eq!(says[0]["status"] == "ok", *active, "{change}: {}", says[0]);
        let strategy = &check["strategy"];
        assert_eq!(
            strategy["names"][0],
            if *active { "envvar" } else { "cdi-cri" },
            "{change}: {strategy}"
        );
        let why = crio["why"].as_str().unwrap_or_default();
        assert!(
            strategy["why"].as_str().unwrap().contains(why),
            "{change}: {strategy} {why}"
        );
    }
}
