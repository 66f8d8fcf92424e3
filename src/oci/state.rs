//! Parses the container state that the runtime writes to a hook's stdin.
//! <https://github.com/opencontainers/runtime-spec/blob/main/runtime.md#state>

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Deserialize;

use base::report::{Failure, failure};
use findings::catalog;

use records::Pod;

use super::lists::Object;
use super::pod;

/// The fields of the state that a hook needs. Everything else in it is ignored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct State {
    /// The container's id
    pub id: String,
    /// The container's init process in the hook's pid namespace; 0 if there is none yet
    pub pid: i32,
    pub bundle: PathBuf,
    /// Whether the container has ended, as at the poststop stage
    pub has_ended: bool,
}

#[derive(Deserialize)]
struct Raw {
    #[serde(default)]
    id: String,
    #[serde(default)]
    status: String,
    #[serde(default)]
    pid: i32,
    #[serde(default)]
    bundle: PathBuf,
    /// The name of `bundle` before runtime-spec 1.0.0-rc3; runc of Docker 17.03 still writes it.
    #[serde(default, rename = "bundlePath")]
    bundle_path: PathBuf,
}

const HINT: &str = "a container engine calls this hook and writes the container state to its stdin; \
                    run \"oci-nvidia-hook --help\"";

/// Parses a state.
///
/// # Errors
/// If the text is not a JSON object, or names no bundle.
pub fn parse(bytes: &[u8]) -> Result<State> {
    let raw: Raw = super::first_json_value(bytes).with_context(|| {
        Failure::new(
            &catalog::STATE,
            "cannot read the container state on stdin",
            HINT,
        )
    })?;
    let bundle = if raw.bundle.as_os_str().is_empty() {
        raw.bundle_path
    } else {
        raw.bundle
    };
    if bundle.as_os_str().is_empty() {
        return Err(failure(
            &catalog::STATE,
            "the container state on stdin has no \"bundle\"",
            HINT,
        ));
    }
    Ok(State {
        id: raw.id,
        pid: raw.pid.max(0),
        bundle,
        has_ended: raw.status == "stopped",
    })
}

/// Returns the bundle in the arguments of a runtime, which proc_pid_cmdline(5) separates with NUL, such as
/// `crun create --bundle DIR ID`. Returns `None` if it is relative to the runtime's working directory.
pub(crate) fn bundle_argument(arguments: &[u8]) -> Option<PathBuf> {
    let mut arguments = arguments.split(|byte| *byte == 0);
    let bundle = arguments.find_map(|argument| match argument {
        b"--bundle" | b"-b" => Some(None),
        _ => argument.strip_prefix(b"--bundle=").map(Some),
    })?;
    let bundle = bundle.or_else(|| arguments.next())?;
    bundle
        .starts_with(b"/")
        .then(|| OsStr::from_bytes(bundle).into())
}

/// Returns the Kubernetes names in the annotations of a state, for a container whose config.json cannot be read.
pub(crate) fn pod(bytes: &[u8], bundle: &Path) -> Pod {
    let state = Object::first(bytes, &["annotations"]);
    state
        .and_then(|state| pod::from_annotations(state.get("annotations"), bundle, ""))
        .unwrap_or_default()
}

impl State {
    /// Returns the process id of the container's init process, for stages that enter its namespaces.
    ///
    /// # Errors
    /// If the state has none: setns(2) with 0 would mean the hook itself.
    pub fn init(&self) -> Result<i32> {
        if self.pid == 0 {
            return Err(failure(
                &catalog::STATE,
                "the container state on stdin has no \"pid\" of a container process",
                HINT,
            ));
        }
        Ok(self.pid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_runc_and_crun_write() {
        for (text, bundle) in [
            (
                r#"{"ociVersion":"1.0.2","id":"c","status":"creating","pid":7,"bundle":"/b"}"#,
                "/b",
            ),
            (r#"{"id":"c","pid":7,"bundlePath":"/old"}"#, "/old"),
            (
                r#"{"id":"c","pid":7,"bundle":"/b","bundlePath":"/old","root":"/r","new":{"x":[1]}} trailing"#,
                "/b",
            ),
        ] {
            let state = parse(text.as_bytes()).unwrap();
            assert_eq!(
                (state.id.as_str(), state.pid, state.bundle),
                ("c", 7, PathBuf::from(bundle))
            );
        }
    }

    #[test]
    fn bad_input_is_named() {
        for (text, says) in [
            ("", "it is empty"),
            ("  \n", "it is empty"),
            ("hello", "expected value at line 1"),
            (r#"{"id":"c","pid":7"#, "EOF"),
            ("3", "cannot read the container state on stdin"),
            (r#"{"id":"c","pid":7}"#, "has no \"bundle\""),
            (r#"{"id":"c","bundle":"/b","pid":"7"}"#, "invalid type"),
        ] {
            let text = base::report::render(&parse(text.as_bytes()).unwrap_err());
            assert!(text.contains(says), "{text}");
            assert!(text.contains("\nhint: "), "{text}");
        }
    }

    #[test]
    fn a_state_without_a_process_cannot_be_entered() {
        for text in [
            r#"{"id":"c","bundle":"/b"}"#,
            r#"{"id":"c","bundle":"/b","pid":-1}"#,
        ] {
            let error = parse(text.as_bytes()).unwrap().init().unwrap_err();
            assert!(base::report::render(&error).contains("has no \"pid\""));
        }
    }

    #[test]
    fn the_bundle_in_the_arguments_of_runtimes() {
        for (arguments, bundle) in [
            // containerd-shim-runc-v2
            (
                "/usr/bin/crun --root /r --log /l create --bundle /b --pid-file /p c",
                Some("/b"),
            ),
            // conmon
            (
                "/usr/bin/crun --root=/r create --bundle /b --pid-file /p c",
                Some("/b"),
            ),
            ("crun create -b /b c", Some("/b")),
            ("crun create --bundle=/b c", Some("/b")),
            ("crun create --bundle b c", None),
            ("crun create --bundle", None),
            ("crun create c", None),
            ("", None),
        ] {
            let found = bundle_argument(arguments.replace(' ', "\0").as_bytes());
            assert_eq!(found, bundle.map(PathBuf::from), "{arguments}");
        }
    }

    #[test]
    fn a_pod_is_named_by_annotations() {
        let text = r#"{"id":"c","annotations":{"io.kubernetes.pod.name":"p","io.kubernetes.pod.namespace":"n","x":"y"}}"#;
        assert_eq!(
            pod(text.as_bytes(), Path::new("/b")),
            Pod {
                name: "p".into(),
                namespace: "n".into(),
                container: String::new()
            }
        );
        for text in [
            "",
            "{}",
            r#"{"annotations":3}"#,
            r#"{"annotations":{"io.kubernetes.pod.name":3}}"#,
        ] {
            assert_eq!(
                pod(text.as_bytes(), Path::new("/b")),
                Pod::default(),
                "{text}"
            );
        }
    }

    #[test]
    fn captured_states_are_read() {
        let state = include_bytes!("../../tests/fixtures/captures/crio-prestart/state.json");
        let state = parse(state).unwrap();
        assert_eq!(state.pid, 5952);
        assert!(state.bundle.ends_with("userdata"));
    }
}
