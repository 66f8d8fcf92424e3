//! Reads the hooks directories of an engine.

use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use rustix::fs::FileType;

use base::debug;
use base::tree::{ResolvedFile, Tree};
use nvidia_host::driver::elf;
use nvidia_host::driver::ldcache::Arch;
use nvidia_host::programs;

use super::hook_args::removed_stage;
use super::hook_file::{self, HookFile, Refusal};
use super::settings;

/// A hook that the engine accepts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HookEntry {
    /// The hook file
    pub file: PathBuf,
    /// Its content
    pub hook: HookFile,
    /// The program, with all links resolved
    pub program: PathBuf,
    /// Whether the kernel can execute the program
    pub execution: Execution,
}

/// Whether the kernel can execute a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Execution {
    /// It is neither a script nor a program for this machine, for example an empty file: execve(2) fails with ENOEXEC
    OtherFormat,
    /// It is not a regular file with execute permission: execve(2) fails with EACCES
    Denied,
    /// As far as can be seen
    Possible,
}

impl Execution {
    fn of(host: &Tree, program: &ResolvedFile) -> Self {
        if program.kind != FileType::RegularFile || program.mode & 0o111 == 0 {
            return Self::Denied;
        }
        // A user may be allowed to execute a file and not to read it.
        let Ok(mut file) = host.open_file(&program.path) else {
            return Self::Possible;
        };
        let mut start = [0; elf::HEADER];
        let is_complete = file.read_exact(&mut start).is_ok();
        let is_script = start.starts_with(b"#!");
        if is_script || is_complete && elf::is_for(&start, Arch::native()) {
            Self::Possible
        } else {
            Self::OtherFormat
        }
    }
}

/// The hooks of an engine, and the files that it does not use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hooks {
    /// The accepted hooks, sorted by the name of their file
    pub entries: Vec<HookEntry>,
    /// Files that the engine rejects, and why. Podman then starts no container, and CRI-O does not start
    pub refused: Vec<(PathBuf, Refusal)>,
    /// Files that the engine ignores without a message because their program is missing, and the programs
    pub without_program: Vec<(PathBuf, PathBuf)>,
    /// Files, each with the file of the same name that replaces it
    pub masked: Vec<(PathBuf, PathBuf)>,
}

const OURS: &str = "oci-nvidia-hook";

/// Returns whether this program, whose path has no links, is oci-nvidia-hook.
#[must_use]
pub fn is_our_program(program: &Path) -> bool {
    program.ends_with(OURS)
}

impl HookEntry {
    /// Returns whether the program is oci-nvidia-hook. The file may name a link with one of NVIDIA's names.
    pub fn is_ours(&self) -> bool {
        is_our_program(&self.program) && !is_old_wrapper(&self.hook)
    }

    /// Returns whether the program is one of NVIDIA's.
    pub fn is_nvidias(&self) -> bool {
        is_old_wrapper(&self.hook)
            || programs::is_hook(&self.program)
            || programs::is_cdi_hook(&self.program)
    }
}

impl Hooks {
    /// Inserts an entry in the order of file names. It replaces an entry with the same file name.
    fn take(&mut self, entry: HookEntry) {
        let name = entry.file.file_name();
        let found = self
            .entries
            .binary_search_by_key(&name, |known| known.file.file_name());
        match found {
            Ok(place) => {
                let masked = self.entries.remove(place).file;
                self.masked.push((masked, entry.file.clone()));
                self.entries.insert(place, entry);
            }
            Err(place) => self.entries.insert(place, entry),
        }
    }
}

/// Whether this process sees the programs of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Programs {
    /// It sees them
    Visible,
    /// It runs in a container that has only the configuration of the host
    Hidden,
}

/// Reads these directories, which are sorted by ascending priority. `precreate` is whether the engine supports this stage.
#[must_use]
pub fn read(host: &Tree, dirs: &[PathBuf], precreate: bool, programs: Programs) -> Hooks {
    let mut hooks = Hooks::default();
    for dir in dirs {
        if is_a_file(host, dir) {
            let why = "it is not a directory".to_owned();
            hooks.refused.push((dir.clone(), Refusal::Invalid(why)));
        }
        for file in hook_files(host, dir) {
            // Engines ignore a link to a missing file, like a file that is removed while they read the directory.
            if is_missing(host, &file) {
                continue;
            }
            match read_file(host, &file, precreate, programs) {
                Ok(entry) => hooks.take(entry),
                Err(Passed::Refused(why)) => hooks.refused.push((file, why)),
                Err(Passed::WithoutProgram(program)) => hooks.without_program.push((file, program)),
            }
        }
    }
    hooks
}

/// Whether another file is at the path of a directory. Engines ignore a missing directory, but not this.
fn is_a_file(host: &Tree, dir: &Path) -> bool {
    let found = host.locate(dir);
    found.is_ok_and(|found| found.kind != FileType::Directory)
}

fn is_missing(host: &Tree, file: &Path) -> bool {
    let found = host.locate(file);
    found.is_err_and(|error| error.kind() == ErrorKind::NotFound)
}

/// The hook file of the package.
pub const PACKAGED: &str = "/usr/share/containers/oci/hooks.d/oci-nvidia-hook.json";

/// The directories in which hook files of this program may be, even if no engine reads them.
const PLACES: [&str; 4] = [
    settings::HOOKS_DIR,
    // Earlier versions installed a hook file for the stage precreate here.
    "/usr/share/containers/oci/hooks.podman.d",
    settings::OVERRIDE_DIR,
    "/run/containers/oci/hooks.d",
];

fn hook_files(host: &Tree, dir: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for name in host.names(dir) {
        if name.to_str().is_some_and(|name| name.ends_with(".json")) {
            files.push(dir.join(name));
        }
    }
    files
}

/// Returns the hook files of this program, except for those with a removed stage.
pub fn installed(host: &Tree) -> Vec<PathBuf> {
    files_of_ours(host, None)
}

/// Returns what to do about the hook files of this host with this removed stage.
pub fn fix_removed_stage(host: &Tree, stage: &str) -> String {
    match files_of_ours(host, Some(stage)).first() {
        Some(file) => removal_of(file),
        // A directory that only the configuration of the engine names.
        None => format!(
            "remove the hook file that \"oci-nvidia-hook doctor\" prints, and {REPLACEMENT}"
        ),
    }
}

/// Returns how to replace a hook file with a removed stage.
pub(crate) fn removal_of(file: &Path) -> String {
    format!("run \"rm {}\", and {REPLACEMENT}", file.display())
}

/// What replaces the removed stages.
const REPLACEMENT: &str =
    "use the hook file of the package oci-nvidia-hook, or \"--device nvidia.com/gpu=all\"";

/// Returns the hook files of this program whose removed stage is this one.
fn files_of_ours(host: &Tree, removed: Option<&str>) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for dir in PLACES {
        files.extend(hook_files(host, Path::new(dir)));
    }
    files.retain(|file| match read_ours(host, file) {
        Some(hook) => removed_stage(&hook) == removed,
        None => false,
    });
    files
}

fn read_ours(host: &Tree, file: &Path) -> Option<HookFile> {
    let hook = hook_file::parse(&host.read(file).ok()?).ok()?;
    let is_ours = hook.path.ends_with(OURS) && !is_old_wrapper(&hook);
    is_ours.then_some(hook)
}

/// Returns whether the hook is NVIDIA's shell script of 2018 with the name of this program:
/// `/usr/libexec/oci/hooks.d/oci-nvidia-hook`.
fn is_old_wrapper(hook: &HookFile) -> bool {
    hook.path.starts_with("/usr/libexec/oci/hooks.d")
}

enum Passed {
    Refused(Refusal),
    WithoutProgram(PathBuf),
}

fn read_file(
    host: &Tree,
    file: &Path,
    precreate: bool,
    programs: Programs,
) -> Result<HookEntry, Passed> {
    let bytes = host
        .read(file)
        .map_err(|error| Passed::Refused(Refusal::Invalid(base::report::line(&error))))?;
    debug::log(|| format!("read the hook file {file:?}"));
    let hook = hook_file::parse(&bytes).map_err(|why| Passed::Refused(Refusal::Invalid(why)))?;
    let located = match (host.locate(&hook.path), programs) {
        (Ok(located), _) => Some(located),
        (Err(_), Programs::Hidden) => None,
        (Err(_), Programs::Visible) => return Err(Passed::WithoutProgram(hook.path)),
    };
    hook.check(precreate).map_err(Passed::Refused)?;
    let execution = match &located {
        Some(found) => Execution::of(host, found),
        None => Execution::Possible,
    };
    let program = located.map_or_else(|| hook.path.clone(), |found| found.path);
    Ok(HookEntry {
        file: file.to_owned(),
        hook,
        program,
        execution,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::paths::HostPath;
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn as_an_engine_reads_them() {
        let dir = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        let json = |program: &str| {
            format!(
                r#"{{"version":"1.0.0","hook":{{"path":"{program}"}},"when":{{"always":true}},"stages":["precreate"]}}"#
            )
        };
        write("usr/bin/oci-nvidia-hook", "#!/bin/sh\n");
        symlink(
            "oci-nvidia-hook",
            dir.path().join("usr/bin/nvidia-container-runtime-hook"),
        )
        .unwrap();
        write("usr/bin/nvidia-cdi-hook", "");
        write("usr/libexec/oci/hooks.d/oci-nvidia-hook", "");
        for name in ["oci-nvidia-hook", "nvidia-cdi-hook"] {
            let path = dir.path().join("usr/bin").join(name);
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
        }
        write("a/1.json", &json("/usr/bin/oci-nvidia-hook"));
        write("a/2.json", &json("/usr/bin/nowhere"));
        symlink("nowhere", dir.path().join("a/6.json")).unwrap();
        write("c", "");
        write("a/3.json", "{");
        write("a/4.json.rpmsave", "{");
        write(
            "b/0.json",
            &json("/usr/libexec/oci/hooks.d/oci-nvidia-hook"),
        );
        write("b/1.json", &json("/usr/bin/nvidia-container-runtime-hook"));
        write("b/5.json", &json("/usr/bin/nvidia-cdi-hook"));
        let host = Tree::open(&HostPath::new(dir.path())).unwrap();
        let dirs = ["/a", "/gone", "/b", "/c"].map(PathBuf::from);
        let hooks = read(&host, &dirs, true, Programs::Visible);
        let seen: Vec<_> = hooks
            .entries
            .iter()
            .map(|entry| {
                (
                    entry.file.to_str().unwrap(),
                    entry.is_ours(),
                    entry.is_nvidias(),
                    entry.execution,
                )
            })
            .collect();
        let expected = [
            ("/b/0.json", false, true, Execution::Denied),
            ("/b/1.json", true, false, Execution::Possible),
            ("/b/5.json", false, true, Execution::OtherFormat),
        ];
        assert_eq!(seen, expected);
        assert_eq!(hooks.masked, [("/a/1.json".into(), "/b/1.json".into())]);
        assert_eq!(
            hooks.without_program,
            [("/a/2.json".into(), "/usr/bin/nowhere".into())]
        );
        let refused: Vec<_> = hooks.refused.iter().map(|(file, _)| file).collect();
        assert_eq!(refused, [Path::new("/a/3.json"), Path::new("/c")]);
        assert_eq!(
            read(&host, &dirs, false, Programs::Visible).refused.len(),
            6,
            "CRI-O does not support precreate"
        );
    }
}
