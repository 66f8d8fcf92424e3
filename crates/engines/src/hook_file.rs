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
    /// The seconds after which the runtime kills the hook; `None` if it waits without a limit. With 0 or less, it kills the hook at once
    pub timeout: Option<i64>,
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

    /// Checks the stages. Engines do this only if the program exists. `precreate` is whether the engine supports this stage.
    ///
    /// Engines also compile the regular expressions of the conditions. This is not checked, because their syntax is Go's.
    ///
    /// # Errors
    /// If the engine does not support a stage.
    pub fn check(&self, precreate: bool) -> Result<(), Refusal> {
        for stage in &self.stages {
            if !(STAGES.contains(&stage.as_str()) || precreate && stage == PRECREATE) {
                return Err(Refusal::UnknownStage(stage.clone()));
            }
        }
        Ok(())
    }
}

/// Returns a field of an object. Go's decoder treats null like a missing field, and reads names without regard to case.
fn field<'v>(object: &'v Value, name: &str) -> Option<&'v Value> {
    let fields = object.as_object()?;
    let mut similar = fields.iter();
    let value = match fields.get(name) {
        Some(value) => value,
        None => similar.find(|(key, _)| key.eq_ignore_ascii_case(name))?.1,
    };
    if value.is_null() { None } else { Some(value) }
}

fn text<'v>(object: &'v Value, name: &str) -> Result<Option<&'v str>, String> {
    match field(object, name) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(_) => Err(format!("{name} is not a string")),
    }
}

fn boolean(object: &Value, name: &str) -> Result<Option<bool>, String> {
    match field(object, name) {
        None => Ok(None),
        Some(Value::Bool(value)) => Ok(Some(*value)),
        Some(_) => Err(format!("{name} is neither true nor false")),
    }
}

/// Returns a whole number. Go's decoder rejects `60.0` and `6e1`, too.
fn whole_number(object: &Value, name: &str) -> Result<Option<i64>, String> {
    match field(object, name) {
        None => Ok(None),
        Some(value) => match value.as_i64() {
            Some(number) => Ok(Some(number)),
            None => Err(format!("{name} is not a whole number")),
        },
    }
}

fn texts(object: &Value, name: &str) -> Result<Option<Vec<String>>, String> {
    let Some(value) = field(object, name) else {
        return Ok(None);
    };
    let Value::Array(items) = value else {
        return Err(format!("{name} is not a list"));
    };
    let mut texts = Vec::new();
    for item in items {
        match item {
            Value::String(text) => texts.push(text.clone()),
            // Go's decoder leaves the element empty.
            Value::Null => texts.push(String::new()),
            _ => return Err(format!("{name} is not a list of strings")),
        }
    }
    Ok(Some(texts))
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
    let timeout = whole_number(program, "timeout")?;
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
    let mut args = vec![path.to_owned()];
    args.extend(texts(file, "arguments")?.unwrap_or_default());
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
    let mut has_any = always.is_some();
    if volumes == Some(true) {
        conditions.push("the container has volumes".to_owned());
    }
    if let Some(annotations) = field(when, "annotations") {
        let annotations = annotations
            .as_object()
            .ok_or("annotations is not an object")?;
        for (key, value) in annotations {
            let value = match value {
                Value::String(value) => value.as_str(),
                Value::Null => "",
                _ => return Err("annotations has a value that is not a string".to_owned()),
            };
            has_any = true;
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
    has_any |= !commands.is_empty();
    let applies = if always == Some(false) || volumes == Some(false) {
        Applies::Never
    } else if !conditions.is_empty() {
        Applies::If(conditions.join(", and "))
    } else if has_any {
        Applies::Always
    } else {
        Applies::Never
    };
    Ok(applies)
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

    /// Podman 4.3.1 returns these results.
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
        let go = br#"{"Version":"1.0.0","Hook":{"Path":"/h","TIMEOUT":3},"when":{"Always":true},"Stages":["prestart"]}"#;
        let hook = parse(go).unwrap();
        assert_eq!((hook.applies, hook.timeout), (Applies::Always, Some(3)));
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
            (
                r#"{"version":"1.0.0","hook":{"path":"/h","timeout":"60"},"stages":[]}"#,
                "timeout is not a whole number",
            ),
            (
                r#"{"version":"1.0.0","hook":{"path":"/h","timeout":6e1},"stages":[]}"#,
                "timeout is not a whole number",
            ),
            (&with("{}", "nonsense"), "the stage \"nonsense\""),
            (&with("{}", "precreate"), "the stage \"precreate\""),
        ] {
            let parsed = parse(text.as_bytes()).map_err(Refusal::Invalid);
            let error = parsed
                .and_then(|hook| hook.check(false))
                .unwrap_err()
                .to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
        assert!(
            parse(with("{}", "precreate").as_bytes())
                .unwrap()
                .check(true)
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
