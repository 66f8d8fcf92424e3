//! Shared parts of the tests: needs, scratch directories, programs and their output.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

pub use crate::harness::Need;

/// The hook under test.
pub const HOOK: &str = env!("CARGO_BIN_EXE_oci-nvidia-hook");

/// Returns the program that loads NVML, which is in the directory of the hook under test.
pub fn nvml_program() -> PathBuf {
    Path::new(HOOK).with_file_name("oci-nvidia-nvml")
}

/// Copies the program that loads NVML to the directory of a copy of the hook.
pub fn copy_nvml_program(dir: &Path) {
    std::fs::copy(nvml_program(), dir.join("oci-nvidia-nvml")).unwrap();
}

/// A file of the source tree.
pub fn source(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn scratch_prefix() -> String {
    format!("it-{}-", std::process::id())
}

/// Returns a name for something that the whole host shares, such as a cgroup. A process id alone is not enough: test runs in other
/// PID namespaces of this host can have the same one.
pub fn host_wide_name(what: &str) -> String {
    use std::os::unix::fs::MetadataExt;

    let namespace = std::fs::metadata("/proc/self/ns/pid").unwrap().ino();
    format!("onh-{namespace}-{}-{what}", std::process::id())
}

/// Creates a directory that is removed when the value is dropped. It is on a disk, not on a tmpfs that may be mounted nodev; for
/// a plain user, in that user's temporary directory.
pub fn scratch() -> tempfile::TempDir {
    let mut builder = tempfile::Builder::new();
    let prefix = scratch_prefix();
    let builder = builder.prefix(&prefix);
    match rustix::fs::access(env!("CARGO_TARGET_TMPDIR"), rustix::fs::Access::WRITE_OK) {
        Ok(()) => builder.tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap(),
        Err(_) => builder.tempdir().unwrap(),
    }
}

/// Creates a directory in which only this user can create names, whoever has cloned the repository: the place for a log.
pub fn private_dir() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

/// Creates a directory with a short path, for Podman 4: it refuses a `--runroot` of more than 50 characters, and the path of a
/// clone can be longer.
pub fn scratch_with_short_path() -> tempfile::TempDir {
    tempfile::Builder::new()
        .prefix(&scratch_prefix())
        .tempdir()
        .unwrap()
}

/// Removes the directories in statics, which are never dropped.
pub fn remove_shared() {
    let entries = |dir: &Path| std::fs::read_dir(dir).unwrap().flatten();
    for entry in
        entries(Path::new(env!("CARGO_TARGET_TMPDIR"))).chain(entries(&std::env::temp_dir()))
    {
        if entry
            .file_name()
            .to_string_lossy()
            .starts_with(&scratch_prefix())
        {
            std::fs::remove_dir_all(entry.path()).ok();
        }
    }
}

/// The result of a program.
#[derive(Debug)]
pub struct Ran {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl From<Output> for Ran {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

/// Returns the stdout of a shell script, which is formatted as by `format!`; panics if it fails.
#[allow(unused_macros, reason = "a bench has no such script")]
macro_rules! shell {
    ($($arg:tt)*) => { $crate::support::sh(&format!($($arg)*)).ok() };
}
#[allow(unused_imports, reason = "a bench has no such script")]
pub(crate) use shell;

/// Panics with the text unless it has all these words.
#[track_caller]
pub fn assert_says(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "no {word:?} in {text}");
    }
}

/// Panics with the text if it has one of these words.
#[track_caller]
pub fn assert_lacks(text: &str, words: &[&str]) {
    for word in words {
        assert!(!text.contains(word), "{word:?} in {text}");
    }
}

impl Ran {
    /// Returns its stdout; panics with all its output if it failed.
    #[track_caller]
    pub fn ok(self) -> String {
        assert_eq!(
            self.code,
            Some(0),
            "stdout: {}\nstderr: {}",
            self.stdout,
            self.stderr
        );
        self.stdout
    }

    /// Returns its stderr; panics unless it failed with this code.
    #[track_caller]
    pub fn failed(self, code: i32) -> String {
        assert_eq!(
            self.code,
            Some(code),
            "stdout: {}\nstderr: {}",
            self.stdout,
            self.stderr
        );
        self.stderr
    }
}

/// Returns the text of a file.
#[track_caller]
pub fn read(path: impl AsRef<Path>) -> String {
    let path = path.as_ref();
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("read {path:?}: {error}"))
}

/// Writes a file. Creates its directory if it is missing.
#[track_caller]
pub fn write_file(path: impl AsRef<Path>, content: impl AsRef<[u8]>) {
    let path = path.as_ref();
    let is_written = std::fs::create_dir_all(path.parent().unwrap())
        .and_then(|()| std::fs::write(path, content));
    is_written.unwrap_or_else(|error| panic!("write {path:?}: {error}"));
}

/// Writes an executable file.
#[track_caller]
pub fn write_program(path: impl AsRef<Path>, content: impl AsRef<[u8]>) {
    write_file(path.as_ref(), content);
    chmod(path, 0o755);
}

#[track_caller]
pub fn chmod(path: impl AsRef<Path>, mode: u32) {
    use std::os::unix::fs::PermissionsExt;

    let path = path.as_ref();
    let permissions = std::fs::Permissions::from_mode(mode);
    std::fs::set_permissions(path, permissions)
        .unwrap_or_else(|error| panic!("chmod {path:?}: {error}"));
}

/// Runs a program with `input` on its stdin.
pub fn run_with(command: &mut Command, input: &[u8]) -> Ran {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("start {command:?}: {error}"));
    // A program that ends without reading all its input is not an error here.
    child.stdin.take().unwrap().write_all(input).ok();
    child.wait_with_output().unwrap().into()
}

/// Runs a program.
pub fn run(command: &mut Command) -> Ran {
    run_with(command, b"")
}

/// `sh -c script`
pub fn sh(script: &str) -> Ran {
    run(Command::new("sh").args(["-euc", script]))
}

/// Returns the command that runs this shell script in a separate mount namespace. Its further arguments are the script's `"$@"`.
pub fn unshare(script: &str) -> Command {
    let mut unshare = Command::new("unshare");
    unshare.args([
        "--mount",
        "--propagation",
        "private",
        "sh",
        "-euc",
        script,
        "sh",
    ]);
    unshare
}

/// Options of unshare for a mount and a PID namespace without the processes of other tests, which end with the first one.
pub const OWN_PROCESSES: [&str; 7] = [
    "--mount",
    "--propagation",
    "private",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
];

/// Runs this shell script in a separate mount namespace.
pub fn sh_unshared(script: &str) -> Ran {
    run(&mut unshare(script))
}

/// Returns every path below `dir`, but not below its entry `except`, with everything that a write, a mount or a chmod would
/// change: inode, type, mode, owner, size, times, link text, content.
pub fn fingerprint(dir: &Path, except: &str) -> String {
    shell!(
        "cd '{}'; find . -path './{except}' -prune -o -printf '%p %i %y %m %U:%G %s %T@ %C@ %l\\n' | sort; \
         find . -path './{except}' -prune -o -type f -exec sha256sum {{}} + | sort",
        dir.display()
    )
}

/// Returns every path below `dir` with its type, mode, size and link text, to check that nothing changed.
pub fn snapshot(dir: &Path) -> String {
    shell!(
        "cd '{}' && find . -xdev -printf '%p %y %m %s %l\\n' | sort",
        dir.display()
    )
}
