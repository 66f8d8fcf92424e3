//! Queries NVML in an executed child process, as a process with threads must. This test process has threads.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Result;
use base::paths::HostPath;
use base::report::render;
use nvidia_host::inventory::ask::Question;
use nvidia_host::inventory::gather::NvmlAnswer;
use nvidia_host::inventory::identity::Who;
use nvidia_host::inventory::{identity, probe};

use crate::Test;
use crate::driver::FakeDriver;
use crate::support::{HOOK, Need, run, scratch};

const NEEDS: &[Need] = &[Need::Root, Need::Program("cc")];

pub const TESTS: &[Test] = &[
    ("probe::gives_the_same_inventory", NEEDS, gives_the_same_inventory),
    ("probe::a_gpu_that_hangs_or_crashes_is_left_out", NEEDS, a_gpu_that_hangs_or_crashes_is_left_out),
    ("probe::an_nvml_that_hangs_or_crashes_is_an_error", NEEDS, an_nvml_that_hangs_or_crashes_is_an_error),
    ("probe::inherits_nothing", NEEDS, inherits_nothing),
];

fn question(fake: &FakeDriver, seconds: u64) -> Question {
    let config = nvidia_host::config::read(Some(&fake.config)).unwrap().0;
    let library = Path::new("/").join(fake.library().strip_prefix(&fake.root).unwrap());
    let who = identity::from_config(&config).unwrap();
    assert_eq!(who, Who::Fewest, "as root it has to be nobody");
    Question { root: HostPath::new(&fake.root), library, who, deadline: Duration::from_secs(seconds) }
}

fn ask(question: &Question) -> Result<NvmlAnswer> {
    probe::ask(Path::new(HOOK), question, Instant::now() + question.deadline)
}

/// Returns the processes that have this directory as `/`.
fn inside(root: &Path) -> Vec<PathBuf> {
    let processes = std::fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().path());
    processes.filter(|process| std::fs::read_link(process.join("root")).is_ok_and(|to| to == root)).collect()
}

/// The output of the hook, which forks.
fn forked(fake: &FakeDriver) -> serde_json::Value {
    let text = run(Command::new(HOOK).arg("--config").arg(&fake.config).args(["info", "--json"])).ok();
    serde_json::from_str(&text).unwrap()
}

fn gives_the_same_inventory() {
    let fake = FakeDriver::new(&["--gpus", "3", "--mig"]);
    let question = question(&fake, 60);
    let answers: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| ask(&question).unwrap())).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let forked = forked(&fake);
    for answer in answers {
        assert!(!answer.gave_up);
        let asked = nvidia_host::inventory::report::Report::from(&answer.inventory);
        let asked = serde_json::to_value(asked).unwrap();
        for field in ["driver_version", "cuda_version", "gpus"] {
            assert_eq!(asked[field], forked[field], "{field}");
        }
        assert_eq!(asked["gpus"].as_array().unwrap().len(), 3);
    }
}

fn a_gpu_that_hangs_or_crashes_is_left_out() {
    for (fault, says) in [("hang", "does not answer when it is asked about it"), ("crash", "(SIGABRT)")] {
        let fake = FakeDriver::new(&["--gpus", "3"]);
        fake.set_nvml(|old| old.replace("gpu minor=1 ", &format!("gpu minor=1 {fault}=handle ")));
        let question = question(&fake, 8);
        let start = Instant::now();
        let answer = ask(&question).unwrap();
        assert!(start.elapsed() < question.deadline, "{fault}: the deadline is for all of it");
        let inventory = answer.inventory;
        assert_eq!(inventory.gpus.iter().map(|gpu| gpu.index).collect::<Vec<_>>(), [0, 2], "{fault}");
        assert!(answer.gave_up && inventory.failed[0].why.contains(says), "{fault}: {:?}", inventory.failed);
        assert_eq!(inside(&fake.root), Vec::<PathBuf>::new(), "{fault}: processes are left");
    }
}

fn an_nvml_that_hangs_or_crashes_is_an_error() {
    for (fault, says) in [
        ("init-hang", "NVML did not answer within 1 s (ONH-016)"),
        ("init-crash", "was ended by SIGABRT"),
        ("init-error 9", "(ONH-011)"),
    ] {
        let fake = FakeDriver::new(&["--gpus", "1"]);
        fake.set_nvml(|old| format!("{old}\n{fault}\n"));
        let start = Instant::now();
        let error = render(&ask(&question(&fake, 1)).unwrap_err());
        assert!(error.contains(says) && error.contains("\nhint: "), "{fault}: {error}");
        assert!(start.elapsed().as_secs() < 30);
        assert_eq!(inside(&fake.root), Vec::<PathBuf>::new(), "{fault}: processes are left");
    }
}

/// The process inherits neither the environment nor open files of the caller.
fn inherits_nothing() {
    let (dir, fake) = (scratch(), FakeDriver::new(&["--gpus", "1"]));
    fake.set_nvml(|old| old + "\ninit-hang\n");
    // A program that prints what it inherited.
    let spy = dir.path().join("spy");
    let script =
        "#!/bin/sh\ncat >\"${0%/*}/question\"; tr '\\0' '\\n' </proc/$$/environ >\"${0%/*}/environ\"; exit 1\n";
    std::fs::write(&spy, script).unwrap();
    std::fs::set_permissions(&spy, PermissionsExt::from_mode(0o755)).unwrap();
    let question = question(&fake, 20);
    probe::ask(&spy, &question, Instant::now() + question.deadline).unwrap_err();
    let environment = std::fs::read_to_string(dir.path().join("environ")).unwrap();
    assert!(environment.lines().all(|line| line.starts_with("PATH=")), "{environment}");

    let mut caller = Command::new("sh");
    caller.args(["-euc", "exec 9</etc/passwd; exec \"$0\" nvml-probe", HOOK]).stdout(Stdio::null());
    let question = std::fs::File::open(dir.path().join("question")).unwrap();
    let mut program = caller.stdin(question).spawn().unwrap();
    let end = Instant::now() + Duration::from_secs(15);
    while inside(&fake.root).is_empty() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(10));
    }
    let mut examined = inside(&fake.root);
    assert!(!examined.is_empty(), "NVML is being asked");
    examined.push(format!("/proc/{}", program.id()).into());
    let files = |process: &PathBuf| -> Vec<String> {
        let fds = std::fs::read_dir(process.join("fd")).unwrap().map(|fd| fd.unwrap().path());
        fds.filter_map(|fd| std::fs::read_link(fd).ok()).map(|file| file.display().to_string()).collect()
    };
    let open: Vec<_> = examined.iter().flat_map(files).collect();
    program.kill().unwrap();
    program.wait().unwrap();
    assert!(!open.is_empty() && !open.iter().any(|file| file == "/etc/passwd"), "{open:?}");
}
