//! The program as `cargo build` compiles it and as packages have it, with the feature `lean`, start and end in the same way.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::built;
use crate::support::{HOOK, Need, run_with, scratch, write_file};

tests! {
    NEEDS => exit_codes, standard_streams, a_closed_pipe_is_an_error;
}
const NEEDS: &[Need] = &[Need::Release, Need::Program("cc")];

fn variants() -> [&'static str; 2] {
    [HOOK, built::release().to_str().unwrap()]
}

fn exit_codes() {
    let dir = scratch();
    let spec = r#"{"ociVersion":"1.0.2","process":{"args":["sh"],"env":["PATH=/bin"]},"root":{"path":"/r"}}"#;
    write_file(dir.path().join("config.json"), spec);
    let state = serde_json::json!({"id": "lean", "pid": 1, "bundle": dir.path()}).to_string();
    for (arguments, stdin, code) in [
        (&["--version"][..], "", 0),
        (&["prestart"], &state, 0),
        (&["prestart"], "{}", 1),
        (&["no-such-command"], "", 2),
    ] {
        let [plain, lean] = variants()
            .map(|program| run_with(Command::new(program).args(arguments), stdin.as_bytes()));
        assert_eq!(
            (plain.code, lean.code),
            (Some(code), Some(code)),
            "{arguments:?}: {plain:?} {lean:?}"
        );
        assert_eq!(
            (plain.stdout, plain.stderr),
            (lean.stdout, lean.stderr),
            "{arguments:?}"
        );
    }
}

/// Closed streams are opened on /dev/null, so that files of the program do not get their numbers.
fn standard_streams() {
    for program in variants() {
        let mut sh = Command::new("sh");
        sh.args(["-c", "exec \"$1\" prestart >&- 2>&-", "sh", program])
            .stdin(Stdio::piped());
        // The hook waits for the state.
        let mut waiting = sh.spawn().unwrap();
        let is_null = |fd: u32| {
            let link = fs::read_link(format!("/proc/{}/fd/{fd}", waiting.id()));
            link.is_ok_and(|target| target == Path::new("/dev/null"))
        };
        let end = Instant::now() + Duration::from_secs(60);
        while !(is_null(1) && is_null(2)) {
            assert!(Instant::now() < end, "{program}");
            std::thread::sleep(Duration::from_millis(5));
        }
        drop(waiting.stdin.take());
        assert_eq!(
            waiting.wait().unwrap().code(),
            Some(1),
            "{program}: no state"
        );
    }
}

fn a_closed_pipe_is_an_error() {
    for program in variants() {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = Command::new(program);
        let status = command
            .arg("help")
            .stdout(writer)
            .stderr(Stdio::null())
            .status()
            .unwrap();
        assert_eq!(status.code(), Some(1), "{program}: {status}");
    }
}
