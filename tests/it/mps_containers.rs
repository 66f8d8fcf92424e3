//! Containers of Podman with a GPU that is shared through MPS, with each of the ways in which containers get GPUs. The daemon is the fake
//! one, which [`crate::fake_mps`] compares with the real one; the test writes and locks the state as the supervisor does.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use nvidia_host::mps;

use crate::cdi::{GPU_0, write_spec};
use crate::cdi_containers::only_spec;
use crate::driver::FakeDriver;
use crate::engine::{Cgroup, IMAGE, NEEDS, Podman};
use crate::podman_shapes::{self, User};
use crate::support::{Ran, assert_says, read, scratch, shell, source};

tests! {
    NEEDS => by_variable, by_cdi_name, several_gpus, daemons_that_are_not_ready;
    podman_shapes::NEEDS_USER => by_a_user;
}

/// A fake driver whose first GPU is shared, with 2 GiB and 40 percent of the multiprocessors for each client.
struct SharedGpu {
    fake: FakeDriver,
    directory: PathBuf,
    daemon: Child,
    state: Option<File>,
    programs: tempfile::TempDir,
}

const SHARING: &str = "[sharing]\nmps-gpus = [\"0\"]\n";

/// The daemon runs in the foreground, and its server ends with it.
impl Drop for SharedGpu {
    fn drop(&mut self) {
        self.daemon.kill().ok();
        self.daemon.wait().ok();
    }
}

impl SharedGpu {
    fn new() -> Self {
        let fake = FakeDriver::new(&["--gpus", "2"]);
        fake.configure(SHARING);
        Self::of(fake)
    }

    fn of(fake: FakeDriver) -> Self {
        let below = mps::directory_of(GPU_0);
        let directory = fake.root.join(below.strip_prefix("/").unwrap());
        for name in [mps::PIPE, mps::LOG] {
            fs::create_dir_all(directory.join(name)).unwrap();
        }
        let programs = scratch();
        shell!(
            "cc -std=gnu11 -o '{}' '{}' -ldl; chmod 755 '{0}' '{}'",
            programs.path().join("cuda-check").display(),
            source("tests/gpu/cuda/cuda-check.c").display(),
            programs.path().display(),
        );
        let mut shared = Self {
            daemon: start_daemon(&fake, &directory),
            fake,
            directory,
            state: None,
            programs,
        };
        shared.wait_for_server();
        shared.write("ready");
        shared
    }

    fn wait_for_server(&self) {
        let log = self.directory.join(mps::LOG).join("server.log");
        for _ in 0..100 {
            if fs::read_to_string(&log).is_ok_and(|text| text.contains("Server has started")) {
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        panic!("the server of the fake MPS does not start");
    }

    /// Writes the state as the supervisor does.
    fn write(&mut self, phase: &str) {
        let state = serde_json::json!({
            "format": mps::FORMAT, "gpu": GPU_0, "state": phase, "why": "the server is in the state FAULT",
            "memory_limit_mib": 2048, "active_thread_percentage": 40,
        });
        let new = self.directory.join("new");
        let mut file = File::create(&new).unwrap();
        mps::lock(&file).unwrap();
        file.write_all(state.to_string().as_bytes()).unwrap();
        fs::rename(new, self.directory.join(mps::STATE)).unwrap();
        self.state = Some(file);
    }

    /// Returns what the container's arguments must have to run `script` with cuda-check.
    fn container<'a>(&self, options: &[&'a str], script: &'a str) -> Vec<String> {
        let volume = format!(
            "{}:/usr/bin/cuda-check:ro",
            self.programs.path().join("cuda-check").display()
        );
        let mut arguments = vec!["-v".to_owned(), volume];
        for word in options.iter().chain(&[IMAGE, "sh", "-euc", script]) {
            arguments.push((*word).to_owned());
        }
        arguments
    }
}

/// Starts the daemon and its server, in a mount namespace in which its sockets have short paths (`sun_path` in unix(7)).
fn start_daemon(fake: &FakeDriver, directory: &Path) -> Child {
    let script = format!(
        "mount -t tmpfs run /run; mkdir /run/pipe; mount --bind '{pipe}' /run/pipe
         export CUDA_MPS_PIPE_DIRECTORY=/run/pipe CUDA_MPS_LOG_DIRECTORY='{log}'
         {{
             until timeout 5 sh -c 'echo get_server_list | nvidia-cuda-mps-control'; do sleep 0.1; done
             for command in 'set_default_device_pinned_mem_limit 0 2G' 'set_default_active_thread_percentage 40' 'start_server -uid 0'; do
                 echo \"$command\" | nvidia-cuda-mps-control
             done
             until echo get_server_list | nvidia-cuda-mps-control | grep .; do sleep 0.1; done
         }} >'{log}/commands' 2>&1 &
         CUDA_VISIBLE_DEVICES={GPU_0} exec nvidia-cuda-mps-control -f -M >/dev/null",
        pipe = directory.join(mps::PIPE).display(),
        log = directory.join(mps::LOG).display(),
    );
    Command::new(source("tests/fake-driver/as-host"))
        .arg(&fake.root)
        .args(["sh", "-euc"])
        .arg(&script)
        .spawn()
        .unwrap()
}

/// What each container tries: memory within the limit, memory beyond it, and a change of the daemon's directory.
const SCRIPT: &str = "cuda-check memory 1000 0; cuda-check memory 3000 0 || echo refused; \
     grep -c ' /tmp/nvidia-mps ro,nosuid,nodev,noexec' /proc/self/mountinfo; touch /tmp/nvidia-mps/x 2>&1 || echo read-only";

#[track_caller]
fn check(text: &str) {
    for part in [
        "multiprocessors 52",
        "allocated 1000 MiB",
        "CUDA_ERROR_OUT_OF_MEMORY",
        "refused",
        "\n1\n",
        "read-only",
    ] {
        assert!(text.contains(part), "{part:?}: {text}");
    }
}

fn run_in(podman: &Podman, before: &str, arguments: &[String]) -> Ran {
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    podman.run_after(before, Cgroup::AsMounted, &words)
}

/// Has the hook write its records to this directory.
fn records_in(dir: &Path) -> String {
    let dir = dir.display();
    format!("mkdir -p /run/oci-nvidia-hook; mount --bind '{dir}' /run/oci-nvidia-hook")
}

/// Whether a record has the note about root.
fn has_note(records: &Path) -> bool {
    let mut text = String::new();
    for name in ["containers", "."] {
        for entry in fs::read_dir(records.join(name)).into_iter().flatten() {
            text += &fs::read_to_string(entry.unwrap().path()).unwrap_or_default();
        }
    }
    assert!(text.contains(GPU_0), "no record: {text}");
    text.contains("ONH-319")
}

fn by_variable() {
    let (shared, podman) = (SharedGpu::new(), Podman::with_image());
    podman.install_hook(&shared.fake.config);
    // Several users, of which root has no user namespace only in the first container
    for (user, is_noted) in [
        ("--user=0", true),
        ("--user=1000", false),
        ("--uidmap=0:100000:65536", false),
    ] {
        let records = scratch();
        let arguments = shared.container(&["-e", "NVIDIA_VISIBLE_DEVICES=0", user], SCRIPT);
        check(&run_in(&podman, &records_in(records.path()), &arguments).ok());
        assert_eq!(has_note(records.path()), is_noted, "{user}");
    }
    let other = shared.container(
        &["-e", "NVIDIA_VISIBLE_DEVICES=1"],
        "ls /tmp/nvidia-mps 2>&1 || cuda-check memory 3000 0",
    );
    let text = run_in(&podman, "", &other).ok();
    assert!(text.contains("allocated 3000 MiB"), "{text}");
}

/// Root of the container is the user of the host, and cannot mount over the directory or write to it either.
fn by_a_user() {
    let user = User::new();
    let config = PathBuf::from(user.path("config.toml"));
    let text = fs::read_to_string(&config).unwrap();
    fs::write(&config, text + SHARING).unwrap();
    let mut shared = SharedGpu::of(FakeDriver::existing(user.path("driver").into()));
    user.import();
    let programs = user.path("programs");
    shell!("cp -r '{}' '{programs}'", shared.programs.path().display());
    fs::write(format!("{programs}/script"), SCRIPT).unwrap();
    let run = format!(
        "run --rm --network=none --log-driver=k8s-file -v '{programs}/cuda-check:/usr/bin/cuda-check:ro' \
         -v '{programs}/script:/script:ro' -e NVIDIA_VISIBLE_DEVICES=0"
    );
    for options in ["", "--userns=keep-id", "--user=1000"] {
        let text = user.podman(&format!("{run} {options} {IMAGE} sh -eu /script"));
        check(&text.ok());
    }
    shared.state = None;
    let refused = user.podman(&format!("{run} {IMAGE} true"));
    assert_ne!(refused.code, Some(0));
    let expected = "the MPS daemon of GPU 0 is not ready: its supervisor has ended (ONH-056)";
    assert_says(&refused.stderr, &[expected]);
}

/// The hook entry asks for the daemon at each start, so the spec is the same before and after.
fn by_cdi_name() {
    let (mut shared, podman, dir) = (SharedGpu::new(), Podman::with_image(), scratch());
    podman.remove_hook();
    let path = dir.path().join("nvidia.json");
    write_spec(&shared.fake, &path);
    let before = only_spec(&path);
    let arguments = shared.container(&["--device=nvidia.com/gpu=0"], SCRIPT);
    let records = scratch();
    let before_it = format!("{before}\n{}", records_in(records.path()));
    check(&run_in(&podman, &before_it, &arguments).ok());
    assert!(has_note(records.path()));
    for several in [
        &["--device=nvidia.com/gpu=all"][..],
        &["--device=nvidia.com/gpu=0", "--device=nvidia.com/gpu=1"],
    ] {
        let arguments = shared.container(several, "true");
        let refused = run_in(&podman, &before, &arguments);
        assert_ne!(refused.code, Some(0), "{several:?}");
        let expected = "GPU 0 is shared through MPS, and the container requests 2 GPUs (ONH-057)";
        assert!(refused.stderr.contains(expected), "{refused:?}");
        let options = [several, &["-e", "NVIDIA_DRIVER_CAPABILITIES=utility"]].concat();
        let monitor = shared.container(&options, "ls /tmp/nvidia-mps 2>&1 || nvidia-smi -L");
        let text = run_in(&podman, &before, &monitor).ok();
        assert_eq!(text.matches("UUID: GPU-").count(), 2, "{text}");
    }
    shared.state = None;
    let arguments = shared.container(&["--device=nvidia.com/gpu=0"], "true");
    let refused = run_in(&podman, &before, &arguments).stderr;
    let expected = "the MPS daemon of GPU 0 is not ready: its supervisor has ended (ONH-056)";
    assert!(refused.contains(expected), "{refused}");
    fs::remove_file(shared.directory.join(mps::STATE)).unwrap();
    let again = dir.path().join("again.json");
    write_spec(&shared.fake, &again);
    let texts = [path, again].map(|path| read(path));
    assert_eq!(texts[0], texts[1]);
}

fn several_gpus() {
    let (shared, podman) = (SharedGpu::new(), Podman::with_image());
    podman.install_hook(&shared.fake.config);
    let both = shared.container(&["-e", "NVIDIA_VISIBLE_DEVICES=all"], "true");
    let refused = run_in(&podman, "", &both);
    assert_ne!(refused.code, Some(0));
    assert_says(
        &refused.stderr,
        &["GPU 0 is shared through MPS, and the container requests 2 GPUs (ONH-057)"],
    );
    let monitor = shared.container(
        &[
            "-e",
            "NVIDIA_VISIBLE_DEVICES=all",
            "-e",
            "NVIDIA_DRIVER_CAPABILITIES=utility",
        ],
        "nvidia-smi -L",
    );
    let text = run_in(&podman, "", &monitor).ok();
    assert_eq!(text.matches("UUID: GPU-").count(), 2, "{text}");
}

fn daemons_that_are_not_ready() {
    let (mut shared, podman) = (SharedGpu::new(), Podman::with_image());
    podman.install_hook(&shared.fake.config);
    let arguments = shared.container(&["-e", "NVIDIA_VISIBLE_DEVICES=0"], "true");
    let fails = |why: &str| {
        let ran = run_in(&podman, "", &arguments);
        assert_ne!(ran.code, Some(0), "{why}");
        let expected = format!("the MPS daemon of GPU 0 is not ready: {why} (ONH-056)");
        assert!(ran.stderr.contains(&expected), "{expected}: {ran:?}");
        assert_says(&ran.stderr, &[&format!("oci-nvidia-mps@{GPU_0}")]);
    };
    shared.write("starting");
    fails("it is starting or stopping");
    shared.write("failed");
    fails("the server is in the state FAULT");
    shared.write("ready");
    shared.state = None;
    fails("its supervisor has ended");
    fs::remove_file(shared.directory.join(mps::STATE)).unwrap();
    let missing = run_in(&podman, "", &arguments).stderr;
    let expected = "is not ready: it was not started (ONH-056)";
    assert!(missing.contains(expected), "{missing}");
    shared.fake.configure("");
    run_in(&podman, "", &arguments).ok();
}
