//! Streams that cannot be written: full, closed, without a reader, or with a reader that does not read. A message that cannot be
//! written changes no result; data that cannot be written is an error.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{PipeReader, Read, Write, pipe};
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nvidia_host::cdi::entry::VERB;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use crate::built;
use crate::driver::{FakeDriver, Image, NEEDS, NEEDS_COMPAT, Waiting};
use crate::help;
use crate::nvidia_ctk;
use crate::support::{HOOK, Need, private_dir, read, run, scratch, write_file};
use crate::why::{isolated, why};

tests! {
    NEEDS => of_each_stage, no_file_gets_the_messages, a_run_directory_that_is_full, a_journal_that_does_not_read;
    &[Need::Root, Need::Program("cc")] => of_each_command;
    NEEDS_COMPAT => of_the_hooks_with_nvidias_names;
    &[Need::Root, Need::Build, Need::Program("cc")] => of_the_device_plugin;
}

/// A hook does not wait this long for a reader.
const SOON: Duration = Duration::from_secs(10);
/// A process that runs this long hangs.
const HANGS: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stream {
    /// A file; its content is returned
    Good,
    /// Every write fails with ENOSPC.
    Full,
    /// A pipe whose reader has ended
    NoReader,
    /// No file
    Closed,
    /// A full pipe with a reader that does not read
    Stuck,
}
use Stream::{Closed, Full, Good, NoReader, Stuck};

/// One end of each stream, to be kept as long as the program runs.
enum Kept {
    Nothing,
    Reader { _reader: PipeReader },
    Output(File),
}

fn open(stream: Stream) -> (Stdio, Kept) {
    match stream {
        Good => {
            let file = tempfile::tempfile().unwrap();
            (file.try_clone().unwrap().into(), Kept::Output(file))
        }
        Full => (
            File::options()
                .write(true)
                .open("/dev/full")
                .unwrap()
                .into(),
            Kept::Nothing,
        ),
        NoReader => (pipe().unwrap().1.into(), Kept::Nothing),
        // The shell closes it.
        Closed => (Stdio::null(), Kept::Nothing),
        Stuck => {
            let (reader, mut writer) = pipe().unwrap();
            let flags = fcntl_getfl(&writer).unwrap();
            fcntl_setfl(&writer, flags | OFlags::NONBLOCK).unwrap();
            while writer.write(&[b'x'; 4096]).is_ok() {}
            fcntl_setfl(&writer, flags).unwrap();
            (writer.into(), Kept::Reader { _reader: reader })
        }
    }
}

fn content(kept: Kept) -> String {
    let Kept::Output(mut file) = kept else {
        return String::new();
    };
    std::io::Seek::rewind(&mut file).unwrap();
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).unwrap();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A call of a program.
struct Call {
    name: String,
    words: Vec<String>,
    stdin: Vec<u8>,
}

/// The words of the line have spaces between them.
fn call(name: &str, line: &str, stdin: &str) -> Call {
    Call {
        name: name.to_owned(),
        words: line.split(' ').map(str::to_owned).collect(),
        stdin: stdin.into(),
    }
}

/// Runs the call in this shell script, whose $0 is `name`.
fn in_shell(script: &str, name: &str, call: Call) -> Call {
    let words = ["sh", "-c", script, name]
        .map(str::to_owned)
        .into_iter()
        .chain(call.words);
    Call {
        words: words.collect(),
        ..call
    }
}

#[derive(Debug, PartialEq, Eq)]
struct Ended {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Call {
    fn start(&self, stdout: Stream, stderr: Stream) -> (Child, [Kept; 2]) {
        let close = |stream, text| if stream == Closed { text } else { "" };
        let script = format!(
            "exec \"$@\" {} {}",
            close(stdout, ">&-"),
            close(stderr, "2>&-")
        );
        // In the namespaces of the container, if the call enters them.
        let at = if self.words[0] == "nsenter" { 4 } else { 0 };
        let (before, words) = self.words.split_at(at);
        let (out, kept_out) = open(stdout);
        let (err, kept_err) = open(stderr);
        let mut command = Command::new("env");
        command
            .args(before)
            .args(["sh", "-c", &script, "sh"])
            .args(words)
            .env_clear();
        let mut stdin = tempfile::tempfile().unwrap();
        stdin.write_all(&self.stdin).unwrap();
        std::io::Seek::rewind(&mut stdin).unwrap();
        command
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .stdin(stdin)
            .stdout(out)
            .stderr(err);
        (command.spawn().unwrap(), [kept_out, kept_err])
    }

    fn run(&self, stdout: Stream, stderr: Stream) -> Ended {
        let began = Instant::now();
        let (mut child, [out, err]) = self.start(stdout, stderr);
        let status = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break status;
            }
            if began.elapsed() > HANGS {
                child.kill().unwrap();
                panic!("{}: hangs with {stdout:?} and {stderr:?}", self.name);
            }
            std::thread::sleep(Duration::from_millis(2));
        };
        Ended {
            code: status.code(),
            stdout: content(out),
            stderr: content(err),
        }
    }

    /// Checks all combinations. A stage or a service does not wait for a reader of its messages; a command may.
    fn check(&self, waits: bool) {
        let good = self.run(Good, Good);
        let code = good
            .code
            .unwrap_or_else(|| panic!("{}: {good:?}", self.name));
        for stderr in [Full, NoReader, Closed, Stuck] {
            if stderr == Stuck && waits {
                continue;
            }
            let began = Instant::now();
            let ended = self.run(Good, stderr);
            assert_eq!(
                ended.code,
                Some(code),
                "{} with stderr {stderr:?}: {good:?}",
                self.name
            );
            assert_eq!(
                ended.stdout.is_empty(),
                good.stdout.is_empty(),
                "{} with stderr {stderr:?}",
                self.name
            );
            assert!(
                began.elapsed() < SOON + HANGS / 6,
                "{} with stderr {stderr:?}: {:?}",
                self.name,
                began.elapsed()
            );
        }
        for stdout in [Full, NoReader, Closed] {
            for stderr in [Good, stdout] {
                let ended = self.run(stdout, stderr);
                assert!(
                    !ended.stderr.contains("panicked"),
                    "{} with stdout {stdout:?}: {ended:?}",
                    self.name
                );
                if good.stdout.is_empty() {
                    assert_eq!(
                        ended.code,
                        Some(code),
                        "{} with stdout {stdout:?}: {ended:?}",
                        self.name
                    );
                } else {
                    let failed = ended.code.is_some_and(|code| (1..=3).contains(&code));
                    assert!(failed, "{} with stdout {stdout:?}: {ended:?}", self.name);
                }
            }
        }
    }
}

/// A container whose setup succeeds with a warning, and calls of the hook for it at each stage.
struct Scene {
    dir: tempfile::TempDir,
    fake: FakeDriver,
    container: Waiting,
}

impl Scene {
    fn new() -> Self {
        let (dir, fake) = (scratch(), FakeDriver::new(&["--gpus", "1"]));
        fake.configure("nonsense = 1");
        let image = Image::new(dir.path(), &["--layout", "debian"]);
        let container = Waiting::with_all_gpus(dir.path(), &image);
        Self {
            dir,
            fake,
            container,
        }
    }

    fn stages(&self) -> Vec<Call> {
        let config = self.fake.config.display();
        let state = self.container.state();
        let spec = read(self.container.bundle.join("config.json"));
        let mut calls = Vec::new();
        for (stage, stdin) in [
            ("prestart", &state),
            ("createRuntime", &state),
            ("edit-config", &spec),
            (VERB, &state),
            ("poststart", &state),
            ("poststop", &state),
        ] {
            let with_config = format!("{HOOK} --config {config} {stage}");
            // The entries of CDI specs have no options before the stage.
            let line = match stage {
                VERB => format!("{HOOK} {stage}"),
                _ => with_config,
            };
            calls.push(call(stage, &line, stdin));
            calls.push(call(&format!("{stage} with an error"), &line, "nonsense"));
        }
        // The name of NVIDIA's program.
        let hook = self.dir.path().join("nvidia-container-runtime-hook");
        symlink(HOOK, &hook).ok();
        let hook = hook.display();
        for (name, line, stdin) in [
            (
                "runtime-hook",
                format!("{hook} -config {config} -debug prestart"),
                &*state,
            ),
            (
                "runtime-hook with an error",
                format!("{hook} -config {config} prestart"),
                "nonsense",
            ),
            (
                "runtime-hook with an unknown option",
                format!("{hook} -nonsense prestart"),
                &state,
            ),
            (
                "rootfs with an unknown option",
                format!("{HOOK} {VERB} --nonsense"),
                &state,
            ),
        ] {
            calls.push(call(name, &line, stdin));
        }
        calls
    }
}

fn of_each_stage() {
    let scene = Scene::new();
    let calls = scene.stages();
    for stage in help::program()
        .get_subcommands()
        .filter(|command| command.is_hide_set())
    {
        assert!(
            calls.iter().any(|call| call.name == stage.get_name()),
            "{}",
            stage.get_name()
        );
    }
    for call in calls {
        let good = call.run(Good, Good);
        let is_error = call.name.contains(' ') && !call.name.starts_with("post");
        let expected = if call.name.ends_with("option") {
            2
        } else {
            i32::from(is_error)
        };
        assert_eq!(good.code, Some(expected), "{}: {good:?}", call.name);
        let warns = matches!(&*call.name, "prestart" | "createRuntime" | "edit-config");
        assert!(
            !warns || good.stderr.contains("(ONH-101)"),
            "{}: {good:?}",
            call.name
        );
        call.check(false);
    }
    // The log on stderr.
    scene.fake.configure("debug = \"/dev/stderr\"");
    let prestart = scene.stages().remove(0);
    assert!(
        prestart
            .run(Good, Good)
            .stderr
            .contains(": note: waiting: injected ")
    );
    prestart.check(false);
}

/// The entries of NVIDIA's CDI specs at createContainer, each with a message, an error, or data on stdout.
fn of_the_hooks_with_nvidias_names() {
    let scene = Scene::new();
    let state: serde_json::Value = serde_json::from_str(&scene.container.state()).unwrap();
    let inside =
        serde_json::json!({"id": "waiting", "pid": 1, "bundle": state["bundle"]}).to_string();
    let pid = scene.container.pid().to_string();
    for (name, group) in [("nvidia-ctk", &["hook"][..]), ("nvidia-cdi-hook", &[])] {
        let program = nvidia_ctk::link(scene.dir.path(), name);
        let program = program.to_str().unwrap();
        for (words, stdin, code) in [
            (&["create-symlinks", "--link", "x::/y"][..], &*inside, 0),
            (&["update-ldcache", "--folder", "/usr/lib64"], &inside, 0),
            (&["new-hook", "--x"], &inside, 0),
            (&["update-ldcache", "--new"], &inside, 2),
            (&["create-symlinks", "--link", "x::/y"], "nonsense", 1),
            (&["chmod", "--help"], "", 0),
            (&[], "", 0),
        ] {
            let words = [&["nsenter", "-m", "-t", &pid, program], group, words].concat();
            let text = words.join(" ");
            let call = Call {
                name: text,
                words: words.into_iter().map(str::to_owned).collect(),
                stdin: stdin.into(),
            };
            let good = call.run(Good, Good);
            assert_eq!(good.code, Some(code), "{}: {good:?}", call.name);
            call.check(false);
        }
    }
}

fn of_each_command() {
    let (dir, fake) = (scratch(), FakeDriver::new(&["--gpus", "1"]));
    let config = fake.config.to_str().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (spec, broken) = (at("spec/nvidia.json"), at("broken.toml"));
    fs::create_dir(dir.path().join("spec")).unwrap();
    write_file(&broken, "nonsense = ");
    let state = serde_json::json!({"id": "c", "bundle": dir.path()}).to_string();
    write_file(
        at("config.json"),
        r#"{"process":{"env":["NVIDIA_VISIBLE_DEVICES=0"]},"root":{"path":"/x"}}"#,
    );
    let hook = |name: &str, words: &[&str]| {
        let words = [&[HOOK, "--config", config], words].concat();
        Call {
            name: name.to_owned(),
            words: words.into_iter().map(str::to_owned).collect(),
            stdin: state.clone().into(),
        }
    };
    let calls = [
        hook("doctor", &["doctor"]),
        hook("doctor", &["doctor", "--json"]),
        hook("doctor", &["doctor", "--pid", &i32::MAX.to_string()]),
        hook("status", &["status"]),
        hook("plan", &["plan", "-"]),
        hook("plan", &["plan", "-", "--json"]),
        hook("explain", &["explain", "ONH-030"]),
        hook("explain", &["explain", "--list"]),
        hook("plan", &["plan", "no-such-container"]),
        hook("ps", &["ps", "--all"]),
        hook("why", &["why"]),
        hook("why", &["why", "no-such-container"]),
        hook("info", &["info"]),
        hook("info", &["info", "--json"]),
        hook("info", &["--config", &broken, "info"]),
        hook("files", &["files"]),
        hook("files", &["files", "--json"]),
        hook(
            "prepare",
            &["prepare", "--root", dir.path().to_str().unwrap()],
        ),
        hook("mps", &["mps", "no-such-gpu"]),
        hook("cdi generate", &["cdi", "generate", "--output", "-"]),
        hook("cdi generate", &["cdi", "generate", "--output", &spec]),
        hook("cdi refresh", &["cdi", "refresh", "--output", &spec]),
        hook("cdi list", &["cdi", "list"]),
        hook("cdi check", &["cdi", "check"]),
        hook("completion", &["completion", "bash"]),
        hook("version", &["version"]),
        hook("help", &["help"]),
        hook("help", &["--help"]),
        hook("help", &["--version"]),
        hook("help", &["nonsense"]),
        hook("help", &["__complete", "fi"]),
        call("help", &format!("{HOOK} --version"), ""),
    ];
    let known: BTreeSet<_> = calls.iter().map(|call| call.name.as_str()).collect();
    let program = help::program();
    for (name, command) in help::commands(&program) {
        assert!(command.is_hide_set() || known.contains(&*name), "{name}");
    }
    for call in &calls {
        call.check(true);
    }
    // A reader that needs no more gets no message; another error is reported.
    assert_eq!(
        hook("info", &["info"]).run(NoReader, Good),
        Ended {
            code: Some(1),
            stdout: String::new(),
            stderr: String::new()
        }
    );
    for (stream, says) in [
        (Full, "no space left on device (ENOSPC)"),
        (Closed, "bad file descriptor (EBADF)"),
    ] {
        let stderr = hook("info", &["info"]).run(stream, Good).stderr;
        assert_eq!(
            stderr,
            format!("oci-nvidia-hook: cannot write to stdout: {says} (ONH-001)\n"),
            "{stream:?}"
        );
    }
}

fn of_the_device_plugin() {
    let (dir, fake) = (scratch(), FakeDriver::new(&["--gpus", "1"]));
    let program = built::programs().join("oci-nvidia-kubelet-plugin");
    let (program, config) = (program.display(), fake.config.display());
    let at = |name: &str| dir.path().join(name).display().to_string();
    let (kubelet, run_dir, cdi) = (at("kubelet"), at("run"), at("cdi"));
    let (broken, socket) = (at("broken.toml"), at("nri.sock"));
    write_file(&broken, "nonsense = ");
    fs::create_dir_all(dir.path().join("kubelet/device-plugins")).unwrap();
    for line in [
        format!("check --config {config} --kubelet-dir {kubelet}"),
        format!("check --config {config} --kubelet-dir {kubelet} --json"),
        format!("check --config {broken}"),
        format!("run --config {broken}"),
        format!("nri --config {broken}"),
        format!("clear GPU-1 --run-dir {run_dir}"),
        "completion zsh".to_owned(),
        "--help".to_owned(),
        "--version".to_owned(),
        "nonsense".to_owned(),
    ] {
        // A wrong command line is for a user, who may be slow.
        let waits = line.starts_with("--") || line == "nonsense";
        call(&line, &format!("{program} {line}"), "").check(waits);
    }
    // The services run until they are stopped.
    for line in [
        format!(
            "run --config {config} --kubelet-dir {kubelet} --run-dir {run_dir} --cdi-dir {cdi}"
        ),
        format!("nri --config {config} --socket {socket} --cdi-dir {cdi}"),
    ] {
        let call = call(&line, &format!("{program} {line}"), "");
        for stream in [Full, NoReader, Closed, Stuck] {
            let (mut child, kept) = call.start(stream, stream);
            std::thread::sleep(Duration::from_secs(3));
            assert_eq!(
                child.try_wait().unwrap(),
                None,
                "{} with {stream:?}",
                call.name
            );
            nix::sys::signal::kill(
                nix::unistd::Pid::from_raw(child.id().try_into().unwrap()),
                nix::sys::signal::Signal::SIGTERM,
            )
            .unwrap();
            let began = Instant::now();
            let status = child.wait().unwrap();
            assert!(
                status.success() && began.elapsed() < SOON,
                "{} with {stream:?}: {status}",
                call.name
            );
            drop(kept);
        }
    }
}

/// A closed stderr is not replaced by the next file that the program opens.
fn no_file_gets_the_messages() {
    let scene = Scene::new();
    let private = private_dir();
    let log = private.path().join("log");
    scene
        .fake
        .configure(&format!("nonsense = 1\ndebug = \"{}\"", log.display()));
    for call in scene.stages() {
        for stdout in [Good, Closed] {
            call.run(stdout, Closed);
        }
    }
    let text = read(&log);
    assert!(text.contains("(ONH-101)"), "{text}");
    for line in text.lines() {
        assert!(
            line.contains("Z oci-nvidia-hook["),
            "{line:?} is not of the log"
        );
    }
    let found = Command::new("grep")
        .args(["-rl", "oci-nvidia-hook: warning"])
        .arg(scene.dir.path())
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&found.stdout), "");
}

/// `/run` is a small file system.
fn a_run_directory_that_is_full() {
    let scene = Scene::new();
    let script = "mount -t tmpfs -o size=16k,nr_inodes=8 run /run; cat /dev/zero >/run/fill 2>/dev/null || true; \
                  touch /run/1 /run/2 /run/3 /run/4 /run/5 /run/6 /run/7 /run/8 2>/dev/null || true; exec \"$@\"";
    for stage in scene
        .stages()
        .into_iter()
        .filter(|call| !call.words.contains(&"nsenter".to_owned()))
    {
        let good = stage.run(Good, Good);
        let mut full = in_shell(script, "sh", stage);
        full.words
            .splice(0..0, ["unshare", "-m"].map(str::to_owned));
        let ended = full.run(Good, Good);
        assert_eq!(
            (ended.code, ended.stdout),
            (good.code, good.stdout),
            "{}: {}",
            full.name,
            ended.stderr
        );
    }
}

fn a_journal_that_does_not_read() {
    let scene = Scene::new();
    run(isolated(scene.dir.path()).arg("--version")).ok();
    // The path of a socket has at most 107 bytes.
    let short = private_dir();
    symlink(scene.dir.path().join("journal"), short.path().join("j")).unwrap();
    let path = short.path().join("j/socket");
    let _journal = UnixDatagram::bind(&path).unwrap();
    let sender = UnixDatagram::unbound().unwrap();
    sender.connect(&path).unwrap();
    sender.set_nonblocking(true).unwrap();
    while sender.send(&[b'x'; 1024]).is_ok() {}
    for args in [
        ["--config", config(&scene.fake), "prestart"],
        ["--config", config(&scene.fake), "createRuntime"],
    ] {
        let began = Instant::now();
        let mut hook = isolated(scene.dir.path());
        crate::support::run_with(hook.args(args), scene.container.state().as_bytes()).ok();
        assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
    }
    why(scene.dir.path(), &["waiting"]).ok();
}

fn config(fake: &FakeDriver) -> &str {
    Path::to_str(&fake.config).unwrap()
}
