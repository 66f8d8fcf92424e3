//! Parses a hook file like the library that Podman, CRI-O and Buildah share: oci-hooks(5).

use std::fmt;
use std::path::PathBuf;

use serde_json::Value;

/// The stages of the OCI runtime specification. Podman adds [`PRECREATE`].
const STAGES: [&str; 6] = [
    "createContainer",
    "createRuntime",
    "prestart",
    "poststart",
    "poststop",
    "startContainer",
];
/// The stage that only Podman has.
pub const PRECREATE: &str = "precreate";

/// A hook file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HookFile {
    /// The program
    pub path: PathBuf,
    /// The arguments, including `argv[0]`
    pub args: Vec<String>,
    /// The stages at which the runtime starts the program
    pub stages: Vec<String>,
    /// The containers for which the engine starts the hook
    pub applies: Applies,
    /// The whole environment; empty if the runtime chooses it
    pub env: Vec<String>,
    /// The seconds after which the runtime kills the hook; `None` if it waits without a limit
    pub timeout: Option<u64>,
}

/// The containers for which a hook runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Applies {
    /// All containers
    Always,
    /// No container: the conditions exclude each other, or the file has none
    Never,
    /// The containers for which this text is true
    If(String),
}

/// Parses a file.
///
/// # Errors
/// Returns why an engine rejects the file. Podman then starts no container, and CRI-O does not start.
pub fn parse(bytes: &[u8]) -> Result<HookFile, String> {
    let file: Value = base::json::from_bytes(bytes).map_err(|error| error.to_string())?;
    if !file.is_object() {
        return Err("invalid: not an object".to_owned());
    }
    let hook = match text(&file, "version")?.unwrap_or_default() {
        "1.0.0" => current(&file)?,
        "0.1.0" | "" => old(&file)?,
        other => return Err(format!("unknown version {other:?}")),
    };
    if hook.path.as_os_str().is_empty() {
        return Err("hook.path is missing".to_owned());
    }
    Ok(hook)
}

/// Why an engine rejects a hook file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The file cannot be read or is not a hook file, for this reason
    Invalid(String),
    /// The engine does not have this stage
    UnknownStage(String),
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Invalid(why) => f.write_str(why),
            Self::UnknownStage(stage) => {
                write!(f, "this engine does not support the stage {stage:?}")
            }
        }
    }
}

impl HookFile {
    /// Returns whether the hook is called at this stage.
    pub fn is_at(&self, stage: &str) -> bool {
        self.stages.iter().any(|other| other == stage)
    }

    /// Returns whether this word is one of the arguments.
    pub fn has_arg(&self, word: &str) -> bool {
        self.args.iter().any(|arg| arg == word)
    }

    /// Checks the stages. Engines do this only if the program exists. `precreate` is whether the engine supports this stage.
    ///
    /// # Errors
    /// If the engine does not support a stage.
    pub fn check_stages(&self, precreate: bool) -> Result<(), Refusal> {
        let known = |stage: &str| STAGES.contains(&stage) || precreate && stage == PRECREATE;
        match self.stages.iter().find(|stage| !known(stage)) {
            Some(stage) => Err(Refusal::UnknownStage(stage.clone())),
            None => Ok(()),
        }
    }
}

/// Returns a field of an object. Go's decoder treats null like a missing field.
fn field<'v>(object: &'v Value, name: &str) -> Option<&'v Value> {
    object.get(name).filter(|value| !value.is_null())
}

fn text<'v>(object: &'v Value, name: &str) -> Result<Option<&'v str>, String> {
    field(object, name)
        .map(|value| {
            value
                .as_str()
                .ok_or_else(|| format!("{name} is not a string"))
        })
        .transpose()
}

fn boolean(object: &Value, name: &str) -> Result<Option<bool>, String> {
    field(object, name)
        .map(|value| {
            value
                .as_bool()
                .ok_or_else(|| format!("{name} is neither true nor false"))
        })
        .transpose()
}

fn texts(object: &Value, name: &str) -> Result<Option<Vec<String>>, String> {
    let Some(value) = field(object, name) else {
        return Ok(None);
    };
    let Value::Array(items) = value else {
        return Err(format!("{name} is not a list"));
    };
    let items: Option<Vec<_>> = items
        .iter()
        .map(|item| item.as_str().map(str::to_owned))
        .collect();
    items
        .map(Some)
        .ok_or_else(|| format!("{name} is not a list of strings"))
}

/// Returns the list with one of two names.
fn either(file: &Value, one: &str, other: &str) -> Result<Option<Vec<String>>, String> {
    Ok(texts(file, one)?.or(texts(file, other)?))
}

fn current(file: &Value) -> Result<HookFile, String> {
    let program = field(file, "hook").ok_or("hook.path is missing")?;
    if !program.is_object() {
        return Err("hook is not an object".to_owned());
    }
    let path = PathBuf::from(text(program, "path")?.unwrap_or_default());
    let args = texts(program, "args")?.unwrap_or_default();
    let env = texts(program, "env")?.unwrap_or_default();
    let applies = when(field(file, "when").unwrap_or(&Value::Null))?;
    let stages = texts(file, "stages")?.ok_or("stages is missing")?;
    let timeout = field(program, "timeout").and_then(Value::as_u64);
    Ok(HookFile {
        path,
        args,
        stages,
        applies,
        env,
        timeout,
    })
}

/// Parses version 0.1.0, which is also the version of files without one.
fn old(file: &Value) -> Result<HookFile, String> {
    let path = text(file, "hook")?.unwrap_or_default();
    let stages = either(file, "stages", "stage")?.ok_or("stages is missing")?;
    let args = std::iter::once(path.to_owned())
        .chain(texts(file, "arguments")?.unwrap_or_default())
        .collect();
    // One matching pattern is enough.
    let mut patterns = either(file, "cmds", "cmd")?.unwrap_or_default();
    patterns.extend(either(file, "annotations", "annotation")?.unwrap_or_default());
    let applies = if patterns.iter().any(|pattern| matches_all(pattern)) {
        Applies::Always
    } else if !patterns.is_empty() || boolean(file, "hasbindmounts")? == Some(true) {
        Applies::If("the container's command, annotations or volumes match".to_owned())
    } else {
        Applies::Never
    };
    // Files of this version cannot contain an environment or a timeout.
    Ok(HookFile {
        path: path.into(),
        args,
        stages,
        applies,
        env: Vec::new(),
        timeout: None,
    })
}

/// Parses `when`. All given conditions must be true, and at least one must be given.
fn when(when: &Value) -> Result<Applies, String> {
    let mut conditions = Vec::new();
    let (always, volumes) = (boolean(when, "always")?, boolean(when, "hasBindMounts")?);
    if volumes == Some(true) {
        conditions.push("the container has volumes".to_owned());
    }
    let mut has_annotations = false;
    if let Some(annotations) = field(when, "annotations") {
        for (key, value) in annotations
            .as_object()
            .ok_or("annotations is not an object")?
        {
            has_annotations = true;
            let value = value
                .as_str()
                .ok_or("annotations has a value that is not a string")?;
            if !(matches_all(key) && matches_all(value)) {
                conditions.push(format!("the annotation {key:?} is {value:?}"));
            }
        }
    }
    let commands = texts(when, "commands")?.unwrap_or_default();
    if !commands.is_empty() && !commands.iter().any(|command| matches_all(command)) {
        conditions.push(format!(
            "the container's command matches {}",
            commands.join(" or ")
        ));
    }
    let has_any = always.is_some() || has_annotations || !commands.is_empty();
    Ok(match conditions.is_empty() {
        _ if always == Some(false) || volumes == Some(false) => Applies::Never,
        true if has_any => Applies::Always,
        true => Applies::Never,
        false => Applies::If(conditions.join(", and ")),
    })
}

/// Returns whether a regular expression is one of the usual ones for everything. Others count as a condition.
fn matches_all(pattern: &str) -> bool {
    ["", ".", ".*", ".+", "^", "^.*", "^.*$", "^.+$", "^/", "/"].contains(&pattern)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(when: &str, stage: &str) -> String {
        format!(
            r#"{{"version":"1.0.0","hook":{{"path":"/h","args":["h"]}},"when":{when},"stages":["{stage}"]}}"#
        )
    }

    /// The results are those of Podman 4.3.1.
    #[test]
    fn conditions() {
        for (when, applies) in [
            (r#"{"always":true}"#, "Always"),
            (r#"{"always":true,"commands":[".*"]}"#, "Always"),
            (r#"{"annotations":{".*":".*"}}"#, "Always"),
            ("{}", "Never"),
            (r#"{"always":false}"#, "Never"),
            (r#"{"always":true,"hasBindMounts":false}"#, "Never"),
            (
                r#"{"always":true,"commands":["nothing"]}"#,
                "If(\"the container's command matches nothing\")",
            ),
            (
                r#"{"always":true,"hasBindMounts":true}"#,
                "If(\"the container has volumes\")",
            ),
        ] {
            let hook = parse(with(when, "prestart").as_bytes()).unwrap();
            assert_eq!(format!("{:?}", hook.applies), applies, "{when}");
        }
        let old = br#"{"hook":"/h","arguments":["prestart"],"stages":["prestart"],"cmds":[".*"]}"#;
        let hook = parse(old).unwrap();
        assert_eq!(
            (hook.applies, hook.args),
            (
                Applies::Always,
                vec!["/h".to_owned(), "prestart".to_owned()]
            )
        );
        let nvidias = br#"{"hook":"/h","stage":["prestart"],"hasbindmounts":true}"#;
        assert!(matches!(parse(nvidias).unwrap().applies, Applies::If(_)));
    }

    #[test]
    fn files_that_engines_reject() {
        for (text, why) in [
            ("{", "EOF"),
            ("[]", "invalid"),
            (r#"{"version":"2.0.0"}"#, "version \"2.0.0\""),
            (
                r#"{"version":"1.0.0","stages":["prestart"]}"#,
                "hook.path is missing",
            ),
            (
                r#"{"version":"1.0.0","hook":{"path":""},"stages":["prestart"]}"#,
                "hook.path is missing",
            ),
            (
                r#"{"version":"1.0.0","hook":{"path":"/h"}}"#,
                "stages is missing",
            ),
            (&with("{}", "nonsense"), "the stage \"nonsense\""),
            (&with("{}", "precreate"), "the stage \"precreate\""),
        ] {
            let parsed = parse(text.as_bytes()).map_err(Refusal::Invalid);
            let error = parsed
                .and_then(|hook| hook.check_stages(false))
                .unwrap_err()
                .to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
        assert!(
            parse(with("{}", "precreate").as_bytes())
                .unwrap()
                .check_stages(true)
                .is_ok()
        );
    }

    proptest::proptest! {
        /// No content of a file causes a panic.
        #[test]
        fn no_file_ends_the_program(
            bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..64),
            value in "[0-9a-z\\[\\]{}\":,]{0,40}",
            key in proptest::sample::select(vec!["version", "hook", "when", "stages", "cmds"]),
        ) {
            parse(&bytes).ok();
            parse(format!(r#"{{"version":"1.0.0","{key}":{value}}}"#).as_bytes()).ok();
            parse(format!(r#"{{"{key}":{value}}}"#).as_bytes()).ok();
        }
    }
}
