//! conmon, the parent of a container's runtime in Podman and CRI-O. Its arguments contain the name of the container, which config.json
//! does not.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use base::sys::proc_file;

/// The processes between a container's init process and conmon: the runtime, and for crun a second process of it.
const BETWEEN: usize = 2;

/// Returns the name of the container `id` whose init process is `init`. It is the engine's, so its user has chosen it. Returns `None`
/// without conmon.
pub(crate) fn name_of(id: &str, init: i32) -> Option<String> {
    let mut pid = init;
    for _ in 0..=BETWEEN {
        pid = proc_file::parent(&pid.to_string())?;
        let arguments = proc_file::read(format!("/proc/{pid}/cmdline")).ok()?;
        if let Some(name) = name_argument(&arguments, id) {
            return Some(name);
        }
    }
    None
}

/// Returns the name in the arguments of the conmon of the container `id`, which proc_pid_cmdline(5) separates with NUL.
fn name_argument(arguments: &[u8], id: &str) -> Option<String> {
    let mut words = arguments.split(|byte| *byte == 0);
    let program = Path::new(OsStr::from_bytes(words.next()?));
    let words: Vec<_> = words.collect();
    let option = |short: &[u8], long: &[u8]| {
        let place = words.iter().position(|word| *word == short || *word == long)?;
        words.get(place + 1).copied()
    };
    let is_ours = program.file_name() == Some(OsStr::new("conmon")) && option(b"-c", b"--cid") == Some(id.as_bytes());
    let name = option(b"-n", b"--name").filter(|_| is_ours)?;
    Some(String::from_utf8_lossy(name).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        let name = |text: &str| name_argument(text.replace(' ', "\0").as_bytes(), "aa1");
        assert_eq!(
            name("/usr/bin/conmon --api-version 1 -c aa1 -u aa1 -n web --exit-dir /e -s").as_deref(),
            Some("web")
        );
        assert_eq!(name("conmon --cid aa1 --name k8s_main").as_deref(), Some("k8s_main"));
        assert_eq!(name("/usr/bin/conmon -c bb2 -n web"), None, "another container");
        assert_eq!(name("/usr/bin/conmon -c aa1 -n"), None);
        assert_eq!(name("/usr/bin/runc create -c aa1 -n web"), None);
        assert_eq!(name(""), None);
    }
}
