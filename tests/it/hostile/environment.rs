//! CVE-2025-23266: a hook whose entry has no environment gets the image's environment, and with it a library to load.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use cdi_spec::environment::is_inherited;
use engines::version::Version;

use super::{
    NEEDS_PODMAN, NEEDS_PODMAN_CRUN, NEEDS_STATIC, NEEDS_STATIC_CRUN, NEEDS_STATIC_STRACE,
};
use crate::built;
use crate::cdi::GPU_0;
use crate::cdi_containers::{only_spec, runc_version};
use crate::driver::{FakeDriver, Image, Waiting};
use crate::engine::{Cgroup, IMAGE, Podman};
use crate::nvidia_ctk;
use crate::support::{
    Ran, assert_lacks, nvml_program, read, run, run_with, scratch, sh_unshared, shell, source,
    write_file, write_program,
};

tests! {
    NEEDS_PODMAN => cve_2025_23266_a_library_preloaded_into_the_hook,
        cve_2025_23266_environment_of_each_stage_with_runc = environment_of_each_stage("runc", Cgroup::AsMounted);
    NEEDS_STATIC => cve_2025_23266_specs_of_old_toolkits_with_runc = specs_of_old_toolkits(Cgroup::AsMounted),
        cve_2025_23266_nvidias_other_names;
    NEEDS_STATIC_CRUN => cve_2025_23266_specs_of_old_toolkits_with_crun = specs_of_old_toolkits(Cgroup::WithCrun);
    NEEDS_STATIC_STRACE => cve_2025_23266_the_static_program;
    NEEDS_PODMAN_CRUN =>
        cve_2025_23266_environment_of_each_stage_with_crun = environment_of_each_stage("crun", Cgroup::WithCrun);
}

/// A library that writes to a file of the host which programs load it.
const PRELOADED: &str = r#"
#include <fcntl.h>
#include <unistd.h>
__attribute__((constructor)) static void tell(void)
{
	char exe[4096];
	ssize_t size = readlink("/proc/self/exe", exe, sizeof exe - 1);
	int fd = open(MARKER, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
	if (fd < 0 || size < 0)
		return;
	exe[size] = '\n';
	if (write(fd, exe, size + 1) < 0)
		return;
}
/* As an auditor, see rtld-audit(7). */
unsigned la_version(unsigned version)
{
	return version;
}
"#;

/// An image with a library, programs and a config.toml that a hook must not use, and its environment, which names them.
struct Attack {
    podman: Podman,
    env: Vec<String>,
    /// The files of the image, as a path of the host
    rootfs: String,
    /// A directory of the host, in which each file is the trace of a successful attack
    marks: PathBuf,
}

impl Attack {
    fn new() -> Self {
        let podman = Podman::new();
        let marks = podman.dir.path().join("marks");
        let image = Image::new(podman.dir.path(), &["--layout", "debian"]);
        make_hostile(&image.rootfs, &marks);
        podman.import(&image.rootfs, IMAGE);
        Self {
            podman,
            env: environment(&marks),
            rootfs: image.rootfs.display().to_string(),
            marks,
        }
    }

    /// Starts a container of the image after this shell script. Returns the names of the files in the directory of traces, and the
    /// programs that loaded the library.
    fn start(&self, script: &str, cgroup: Cgroup, more: &[&str]) -> (Ran, String) {
        std::fs::remove_dir_all(&self.marks).ok();
        std::fs::create_dir(&self.marks).unwrap();
        let mut arguments: Vec<_> = self
            .env
            .iter()
            .flat_map(|variable| ["-e", variable])
            .collect();
        arguments.extend(more);
        arguments.extend([IMAGE, "nvidia-smi", "-L"]);
        let ran = self.podman.run_after(script, cgroup, &arguments);
        (ran, traces(&self.marks))
    }
}

/// Adds what the environment of [`environment`] names.
fn make_hostile(rootfs: &Path, marks: &Path) {
    let source = rootfs.with_extension("evil.c");
    write_file(&source, PRELOADED);
    let mut cc = Command::new("cc");
    cc.args([
        "-shared",
        "-fPIC",
        &format!("-DMARKER=\"{}/preloaded\"", marks.display()),
        "-o",
    ]);
    run(cc.arg(rootfs.join("evil.so")).arg(source)).ok();
    for name in ["modprobe", "ldconfig", "nvidia-modprobe", "oci-nvidia-hook"] {
        let program = rootfs.join("evil").join(name);
        write_program(
            &program,
            format!("#!/bin/sh\necho \"$0\" >>{}/started\n", marks.display()),
        );
    }
    let config = rootfs.join("evil/nvidia-container-runtime/config.toml");
    write_file(config, "this is no toml");
}

/// The root file system of the image for a hook that runc starts at createContainer. With crun, the directory is the bundle.
const CWD: &str = "/proc/self/cwd";

/// Variables that the dynamic linker and the C library interpret, and the variables of NVIDIA's stack.
fn environment(marks: &Path) -> Vec<String> {
    let (cwd, marks) = (CWD, marks.display());
    vec![
        format!("LD_PRELOAD={cwd}/evil.so"),
        format!("LD_AUDIT={cwd}/evil.so"),
        format!("LD_LIBRARY_PATH={cwd}/evil"),
        format!("LD_PROFILE_OUTPUT={marks}"),
        format!("GCONV_PATH={cwd}/evil"),
        format!("LOCPATH={cwd}/evil"),
        format!("NLSPATH={cwd}/evil/%N"),
        format!("MALLOC_TRACE={marks}/malloc"),
        "MALLOC_PERTURB_=165".to_owned(),
        "GLIBC_TUNABLES=glibc.malloc.check=3:glibc.malloc.perturb=90:glibc.malloc.tcache_count=0"
            .to_owned(),
        format!("PATH={cwd}/evil:/bin"),
        format!("XDG_CONFIG_HOME={cwd}/evil"),
        format!("NVIDIA_CTK_CONFIG_FILE_PATH={cwd}/evil/nvidia-container-runtime/config.toml"),
        format!("RUST_BACKTRACE={cwd}/evil"),
        "NVIDIA_VISIBLE_DEVICES=all".to_owned(),
    ]
}

/// Returns the names of the files in this directory, and the content of those that the library and the programs write.
fn traces(marks: &Path) -> String {
    let script =
        "cd \"$1\"; ls; for file in preloaded started; do [ ! -e $file ] || cat $file; done";
    run(Command::new("sh").args(["-euc", script, "sh"]).arg(marks)).ok()
}

/// The hook inherits an image's ENV if the engine's entry for the hook has no environment.
fn cve_2025_23266_a_library_preloaded_into_the_hook() {
    let attack = Attack::new();
    let start = |change: &dyn Fn(&mut Value)| -> (Ran, String) {
        let text = read(source("hooks.d/oci-nvidia-hook.json"));
        let mut json: Value = serde_json::from_str(&text).unwrap();
        json["hook"]["path"] = built::static_hook().to_str().unwrap().into();
        change(&mut json);
        write_file(
            attack.podman.hooks.join("oci-nvidia-hook.json"),
            json.to_string(),
        );
        attack.start("", Cgroup::AsMounted, &[])
    };
    let with_config = json!([
        "oci-nvidia-hook",
        "--config",
        FakeDriver::shared().config,
        "prestart"
    ]);

    // At this stage, runc before 1.3 passes the container's environment to hooks that have none of their own.
    let without_env = |json: &mut Value| {
        json["stages"] = json!(["createContainer"]);
        json["hook"].as_object_mut().unwrap().remove("env");
    };
    let (ran, traces) = start(&|json| {
        without_env(json);
        json["hook"]["path"] = nvml_program().to_str().unwrap().into();
    });
    assert_eq!(
        is_hit(&traces),
        runc_passes_environment(),
        "a dynamic program: {ran:?}, {traces:?}"
    );
    let (ran, traces) = start(&without_env);
    assert_eq!(traces, "", "{ran:?}");
    // No variable selects a file, whoever set it.
    assert_lacks(&ran.stderr, &["evil/nvidia-container-runtime/config.toml"]);

    for stage in ["prestart", "createRuntime", "createContainer"] {
        let (ran, traces) = start(&|json| {
            json["stages"] = json!([stage]);
            json["hook"]["args"] = with_config.clone();
        });
        assert_eq!(traces, "", "{stage}: {ran:?}");
        assert!(
            stage == "createContainer" || ran.stdout.starts_with("GPU 0: "),
            "{stage}: {ran:?}"
        );
        let (ran, traces) = start(&|json| json["stages"] = json!([stage]));
        assert_eq!(traces, "", "{stage}: {ran:?}");
        assert!(!ran.stderr.contains("evil"), "{stage}: {ran:?}");
    }
}

/// Whether runc passes the container's environment at createContainer, see docs/security.md. Version 1.3 and newer pass only `PATH`.
fn runc_passes_environment() -> bool {
    runc_version() < Version(1, 3, 0)
}

/// A dynamic program in place of the hook, as the hook was until another program loaded NVML.
fn naive_link(dir: &Path, name: &str) -> PathBuf {
    let link = dir.join(name);
    symlink(nvml_program(), &link).unwrap();
    link
}

/// Whether the dynamic program has loaded the library.
fn is_hit(traces: &str) -> bool {
    let program = nvml_program();
    traces.lines().any(|loaded| Path::new(loaded) == program)
}

/// The CDI spec of a toolkit whose hook entries have no environment, 1.17.0 to 1.17.7. crun does not pass the image's environment at this
/// stage; with it, the entries contain the variables themselves.
fn specs_of_old_toolkits(cgroup: Cgroup) {
    let attack = Attack::new();
    let fake = FakeDriver::new(&["--gpus", "1", "--layout", "lib64"]);
    let dir = scratch();
    let start = |link: fn(&Path, &str) -> PathBuf, name: &str, with_env: bool| {
        let bin = scratch();
        let (_, mut spec) = nvidia_ctk::spec_of_nvidia(&fake, &link(bin.path(), name), 17);
        for hook in spec["containerEdits"]["hooks"].as_array_mut().unwrap() {
            assert_eq!(hook.get("env"), None, "as NVIDIA's program writes it");
            if with_env {
                hook["env"] = attack
                    .env
                    .iter()
                    .map(|variable| variable.replace(CWD, &attack.rootfs))
                    .collect();
            }
        }
        let path = dir.path().join("plugin.json");
        write_file(&path, spec.to_string());
        attack.start(
            &only_spec(&path),
            cgroup,
            &["--device=k8s.device-plugin.nvidia.com/gpu=0"],
        )
    };
    for name in ["nvidia-ctk", "nvidia-cdi-hook"] {
        for with_env in [false, true] {
            let (ran, traces) = start(naive_link, name, with_env);
            let is_hit = is_hit(&traces);
            let passes = matches!(cgroup, Cgroup::AsMounted) && runc_passes_environment();
            assert_eq!(
                is_hit,
                with_env || passes,
                "{name}, naive, {with_env}: {ran:?}, {traces:?}"
            );
            let (ran, traces) = start(nvidia_ctk::link, name, with_env);
            assert_eq!(traces, "", "{name}, {with_env}: {ran:?}");
            assert!(ran.ok().contains(GPU_0), "{name}, {with_env}");
        }
    }
}

/// Hook files of other programs, with NVIDIA's other names.
fn cve_2025_23266_nvidias_other_names() {
    let attack = Attack::new();
    let config = &FakeDriver::shared().config;
    for (name, args) in [
        (
            "nvidia-container-runtime-hook",
            json!(["x", "-config", config, "prestart"]),
        ),
        ("nvidia-container-toolkit", json!(["x", "prestart"])),
        ("nvidia-container-cli", json!(["x", "info"])),
        ("nvidia-ctk", json!(["x", "--version"])),
        ("nvidia-cdi-hook", json!(["x", "new-hook"])),
    ] {
        for (link, is_naive) in [
            (naive_link as fn(&Path, &str) -> PathBuf, true),
            (nvidia_ctk::link, false),
        ] {
            let bin = scratch();
            let mut args = args.clone();
            args[0] = name.into();
            let file = json!({"version": "1.0.0", "hook": {"path": link(bin.path(), name), "args": args},
                "when": {"always": true}, "stages": ["createContainer"]});
            write_file(
                attack.podman.hooks.join("oci-nvidia-hook.json"),
                file.to_string(),
            );
            let (ran, traces) = attack.start("", Cgroup::AsMounted, &[]);
            match is_naive {
                true => {
                    assert_eq!(
                        is_hit(&traces),
                        runc_passes_environment(),
                        "{name}: {ran:?}, {traces:?}"
                    );
                }
                false => assert_eq!(traces, "", "{name}: {ran:?}"),
            }
        }
    }
}

/// The program itself: what it executes and opens, with every variable that a C library interprets.
fn cve_2025_23266_the_static_program() {
    let (dir, image) = Image::debian();
    let marks = dir.path().join("marks");
    std::fs::create_dir(&marks).unwrap();
    make_hostile(&image.rootfs, &marks);
    let container = Waiting::start(dir.path(), &image.rootfs, &[], "");
    let program = nvidia_ctk::link(dir.path(), "nvidia-cdi-hook");
    let log = dir.path().join("strace");
    let call = |args: &[&str]| {
        let mut strace = Command::new("strace");
        strace
            .args([
                "-f",
                "-v",
                "-s",
                "200",
                "-e",
                "trace=execve,open,openat,openat2,mmap,mprotect",
                "-o",
            ])
            .arg(&log);
        strace.args([
            "nsenter",
            "-m",
            "-t",
            &container.pid().to_string(),
            "sh",
            "-c",
        ]);
        // Like at createContainer: in the container's mount namespace and in its root file system, and with its environment.
        strace
            .args(["cd \"$1\"; shift; exec env -i \"$@\"", "sh"])
            .arg(&image.rootfs)
            .args(environment(&marks));
        let ran = run_with(
            strace.arg(&program).args(args),
            container.state().as_bytes(),
        );
        let text = read(&log);
        // What the program itself does.
        let at = text
            .find(&format!("execve(\"{}\"", program.display()))
            .unwrap_or_else(|| panic!("{ran:?} {text}"));
        (ran, text[at..].to_owned())
    };
    let started = |text: &str| -> Vec<String> {
        let calls = text
            .lines()
            .filter(|line| line.contains("execve(") && line.ends_with(" = 0"));
        calls
            .map(|line| line[line.find("execve(").unwrap()..].to_owned())
            .collect()
    };
    let (ran, text) = call(&["create-symlinks", "--link", "x::/y"]);
    ran.ok();
    assert_eq!(container.output("readlink /y"), "x\n");
    let calls = started(&text);
    assert_eq!(calls.len(), 2, "{text}");
    assert!(calls[0].contains("LD_PRELOAD="), "{text}");
    assert!(
        calls[1].starts_with("execve(\"/proc/self/exe\", ") && calls[1].ends_with("], []) = 0"),
        "{text}"
    );
    assert!(
        !text.contains("PROT_EXEC|") && !text.contains("|PROT_EXEC"),
        "no code is loaded: {text}"
    );
    let (ran, text) = call(&["--version"]);
    assert!(ran.ok().starts_with("nvidia-cdi-hook version "));
    let calls = started(&text);
    assert!(
        calls.len() == 2 && calls[1].ends_with(" \"--version\"], []) = 0"),
        "{text}"
    );
    for (what, text) in [
        ("verb", call(&["create-symlinks", "--link", "x::/y"]).1),
        ("version", text),
    ] {
        let opened: Vec<_> = text
            .lines()
            .filter(|line| line.contains("open") && line.contains("evil"))
            .collect();
        assert!(opened.is_empty(), "{what}: {opened:?}");
    }
    assert_eq!(traces(&marks), "");
}

/// Which hooks get the environment of the container: the rule of `is_inherited` covers what the runtime does at each stage.
fn environment_of_each_stage(runtime: &str, cgroup: Cgroup) {
    let (dir, image) = Image::debian();
    let bundle = dir.path().join("bundle");
    std::fs::create_dir(&bundle).unwrap();
    let stages = [
        "prestart",
        "createRuntime",
        "createContainer",
        "startContainer",
        "poststart",
        "poststop",
    ];
    let out = dir.path().join("environ");
    let mut hooks = json!({});
    for stage in stages {
        // The program of this stage is one of the image.
        let out = if stage == "startContainer" {
            PathBuf::from("/environ")
        } else {
            out.clone()
        };
        let script = format!("cat /proc/self/environ >{}-{stage}", out.display());
        hooks[stage] = json!([{"path": "/bin/sh", "args": ["sh", "-c", script]}]);
    }
    let spec = json!({
        "ociVersion": "1.0.2",
        "process": {"user": {"uid": 0, "gid": 0}, "args": ["true"], "cwd": "/", "env": ["PATH=/usr/bin:/bin:/image", "OF_THE=image"]},
        "root": {"path": image.rootfs},
        "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}],
        "hooks": hooks,
        "linux": {"namespaces": [{"type": "pid"}, {"type": "mount"}]},
    });
    write_file(bundle.join("config.json"), spec.to_string());
    let script = format!(
        "{} cd '{bundle}'; exec env -i PATH=\"$PATH\" OF_THE=runtime {runtime} --root '{bundle}/state' run environment-{pid}",
        cgroup.prepare(),
        bundle = bundle.display(),
        pid = std::process::id(),
    );
    sh_unshared(&script).ok();
    shell!(
        "mv '{}'/environ-* '{}'",
        image.rootfs.display(),
        dir.path().display()
    );
    let mut of_image = Vec::new();
    for stage in stages {
        let text = read(dir.path().join(format!("environ-{stage}")));
        assert!(
            !(text.contains("OF_THE=image") && text.contains("OF_THE=runtime")),
            "{stage}: {text}"
        );
        // runc 1.3 and newer pass only PATH at createContainer.
        if text.contains("OF_THE=image") || text.contains(":/image") {
            assert!(
                is_inherited(stage, &[]),
                "{runtime} passes the environment at {stage}: {text}"
            );
            of_image.push(stage);
        }
    }
    assert!(of_image.contains(&"startContainer"), "{of_image:?}");
}
