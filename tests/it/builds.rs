//! Two builds of one version: what one of them has stored is not used by the other one, whichever is newer. Distributions rebuild a package
//! with another release and the same version, and packages are downgraded.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;

use cdi_spec::registry;
use nvidia_host::cdi::stamp::Stamp;

use crate::cdi::verdict;
use crate::driver::{FakeDriver, Image, NEEDS, Waiting};
use crate::support::{
    HOOK, Need, Ran, assert_says, copy_nvml_program, read, run, run_with, scratch, source,
    write_program,
};
use crate::why::isolated_program;

tests! {
    &[Need::Program("readelf")] => a_build_without_a_build_id_fails;
    NEEDS => stored_files, stored_answers_belong_to_a_build, specs_belong_to_a_build, a_program_without_a_build_id_uses_nothing_that_is_stored;
}

/// Returns the place of the build id in a program: after a note's sizes of its owner and its content, its type and its owner.
fn place(program: &[u8]) -> Range<usize> {
    const HEADER: &[u8] = b"\x04\0\0\0\x14\0\0\0\x03\0\0\0GNU\0";
    let mut places = program.windows(HEADER.len());
    let start = places.position(|bytes| bytes == HEADER).unwrap() + HEADER.len();
    start..start + 20
}

/// Copies the hook with a change of its note.
fn changed(dir: &Path, change: impl Fn(&mut [u8], usize)) -> PathBuf {
    let mut bytes = fs::read(HOOK).unwrap();
    let start = place(&bytes).start;
    change(&mut bytes, start);
    copy_nvml_program(dir);
    let path = dir.join("changed");
    write_program(&path, bytes);
    path
}

/// Returns another build of the same version.
pub fn rebuilt(dir: &Path) -> PathBuf {
    changed(dir, |bytes, start| bytes[start] ^= 0xff)
}

/// Returns a program without a build id: its note has another type.
fn without(dir: &Path) -> PathBuf {
    changed(dir, |bytes, start| bytes[start - 8] = 0x7f)
}

fn a_build_without_a_build_id_fails() {
    let dir = scratch();
    let check = |program: &Path| {
        let mut check = Command::new(source("packaging/check-programs"));
        run(check.arg(HOOK).arg(program))
    };
    check(&rebuilt(dir.path())).ok();
    let stderr = check(&without(dir.path())).failed(1);
    assert!(stderr.contains("changed has no build id"), "{stderr}");
}

/// Runs `plan` for all GPUs, with the run-time directory `dir/run`.
fn plan(program: &Path, fake: &FakeDriver, dir: &Path) -> Ran {
    let spec = r#"{"root":{"path":"/nowhere"},"process":{"env":["NVIDIA_VISIBLE_DEVICES=all"]}}"#;
    let mut plan = isolated_program(dir, program);
    plan.arg("--config").arg(&fake.config).args(["plan", "-"]);
    run_with(plan.env_clear(), spec.as_bytes())
}

/// NVML does not answer any more, so that a start works only with a stored answer.
fn hang(fake: &FakeDriver) {
    fake.configure("[oci-nvidia-hook]\nnvml-timeout = 1");
    fake.set_nvml(|old| old + "\ninit-hang\n");
}

fn stored_answers_belong_to_a_build() {
    let hook = Path::new(HOOK);
    let programs = scratch();
    let rebuilt = rebuilt(programs.path());
    for (old, new) in [(hook, rebuilt.as_path()), (&rebuilt, hook)] {
        let (fake, dir) = (FakeDriver::new(&["--gpus", "2"]), scratch());
        plan(old, &fake, dir.path()).ok();
        hang(&fake);
        plan(old, &fake, dir.path()).ok();
        let ran = plan(new, &fake, dir.path());
        assert_eq!(ran.code, Some(1), "{ran:?}");
        assert_says(&ran.stdout, &["(ONH-016)"]);
        fake.set_nvml(|old| old.replace("init-hang", ""));
        plan(new, &fake, dir.path()).ok();
        hang(&fake);
        plan(new, &fake, dir.path()).ok();
    }
}

fn a_program_without_a_build_id_uses_nothing_that_is_stored() {
    let (fake, dir, programs) = (FakeDriver::new(&["--gpus", "2"]), scratch(), scratch());
    let without = without(programs.path());
    plan(&without, &fake, dir.path()).ok();
    hang(&fake);
    assert_eq!(plan(&without, &fake, dir.path()).code, Some(1));
}

/// Each file that commands store is in the table of docs/architecture.md, and the table names no file of the hook that does not exist.
fn stored_files() {
    let text = read(source("docs/architecture.md"));
    let (_, table) = text.split_once("## Stored files").unwrap();
    let mut patterns = Vec::new();
    for line in table
        .lines()
        .filter(|line| line.starts_with("| `/run/oci-nvidia-hook/"))
    {
        let pattern = line.split('`').nth(1).unwrap().rsplit('/').next().unwrap();
        patterns.push(pattern.to_owned());
    }
    let matches = |pattern: &str, name: &str| match pattern.split_once('*') {
        Some((start, end)) => name.starts_with(start) && name.ends_with(end),
        None => name == pattern,
    };
    let (fake, dir) = (FakeDriver::new(&["--gpus", "2"]), scratch());
    let image = Image::new(dir.path(), &["--layout", "debian"]);
    let container = Waiting::with_all_gpus(dir.path(), &image);
    container
        .call(
            &mut isolated_program(dir.path(), Path::new(HOOK)),
            &fake.config,
        )
        .ok();
    // What has just changed is not stored.
    std::thread::sleep(std::time::Duration::from_millis(1100));
    plan(Path::new(HOOK), &fake, dir.path()).ok();
    for words in [
        &["cdi", "refresh", "--create"][..],
        &["doctor"],
        &["ps"],
        &["info"],
    ] {
        run(isolated_program(dir.path(), Path::new(HOOK))
            .arg("--config")
            .arg(&fake.config)
            .args(words));
    }
    hang(&fake);
    fs::remove_file(fake.root.join("dev/nvidia1")).unwrap();
    plan(Path::new(HOOK), &fake, dir.path()).failed(1);
    let mut names = Vec::new();
    for entry in fs::read_dir(dir.path().join("run")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        if !name.ends_with(".lock") {
            names.push(name);
        }
    }
    for name in names.iter().filter(|name| *name != "containers") {
        assert!(
            patterns.iter().any(|pattern| matches(pattern, name)),
            "{name}: {patterns:?}"
        );
    }
    // The records are in a directory, and the versions are those of installed engines.
    for pattern in patterns
        .iter()
        .filter(|pattern| !["*", "version-*"].contains(&pattern.as_str()))
    {
        assert!(
            names.iter().any(|name| matches(pattern, name)),
            "{pattern}: {names:?}"
        );
    }
}

fn specs_belong_to_a_build() {
    let hook = Path::new(HOOK);
    let programs = scratch();
    let rebuilt = rebuilt(programs.path());
    for (old, new) in [(hook, rebuilt.as_path()), (&rebuilt, hook)] {
        let (fake, dir) = (FakeDriver::new(&["--gpus", "2"]), scratch());
        let path = dir.path().join("nvidia.yaml");
        let cdi = |program: &Path, verb: &str| {
            let mut cdi = isolated_program(dir.path(), program);
            cdi.arg("--config")
                .arg(&fake.config)
                .args(["cdi", verb, "--output"]);
            run(cdi.arg(&path).args(["--hook-path", HOOK])).ok();
            let stamp = Stamp::from_spec(&registry::read_spec(&path).unwrap());
            stamp.unwrap().build
        };
        let check = |program: &Path| {
            let mut check = isolated_program(dir.path(), program);
            check
                .arg("--config")
                .arg(&fake.config)
                .args(["cdi", "check", "--json"]);
            verdict(&run(check.arg("--spec-dir").arg(dir.path()))).1
        };
        let first = cdi(old, "generate");
        assert_eq!(
            (check(old).as_str(), cdi(old, "refresh")),
            ("", first.clone())
        );
        let why = check(new);
        assert!(
            why.starts_with("another build of this program wrote"),
            "{why}"
        );
        let second = cdi(new, "refresh");
        assert_ne!(first, second);
        assert_eq!(check(new), "");
    }
}
