//! One JSON file of a hooks directory, by the rules of the library that Podman, CRI-O and Buildah share: oci-hooks(5).
//! Pure.

use std::fmt;
use std::path::PathBuf;

use serde_json::Value;

/// The stages of the runtime-spec. Podman adds [`PRECREATE`].
const STAGES: [&str; 6] = ["createContainer", "createRuntime", "prestart", "poststart", "poststop", "startContainer"];
/// The stage that only Podman knows.
pub const PRECREATE: &str = "precreate";

/// A hook, as far as it matters here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HookFile {
    pub path: PathBuf,
    /// Its arguments, `argv[0]` among them
    pub args: Vec<String>,
    pub stages: Vec<String>,
    /// Containers that the hook is started for
    pub applies: Applies,
    /// After how many seconds the engine ends it; without one it waits for ever
    pub timeout: Option<u64>,
}

/// For which containers a hook runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Applies {
    Always,
    /// None: its conditions exclude each other, or there are none
    Never,
    /// Those of which this is true
    If(String),
}

/// Parses a file.
///
/// # Errors
/// Why an engine refuses it, and with it every container, or its own start.
pub fn parse(bytes: &[u8]) -> Result<HookFile, String> {
    let file: Value = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    if !file.is_object() {
        return Err("invalid: it is no object".to_owned());
    }
    let hook = match text(&file, "version")?.unwrap_or_default() {
        "1.0.0" => current(&file)?,
        "0.1.0" | "" => old(&file)?,
        other => return Err(format!("no engine knows version {other:?}")),
    };
    if hook.path.as_os_str().is_empty() {
        return Err("it has no hook.path".to_owned());
    }
    Ok(hook)
}

/// Why an engine refuses a hook file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The file cannot be read or is not a hook file; why, in words
    Invalid(String),
    /// The engine does not have this stage
    UnknownStage(String),
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Invalid(why) => f.write_str(why),
            Self::UnknownStage(stage) => write!(f, "this engine does not know the stage {stage:?}"),
        }
    }
}

impl HookFile {
    /// What is said of a program that is there; engines look for it first. `precreate`: whether the engine knows that stage.
    ///
    /// # Errors
    /// The first stage that the engine does not know.
    pub fn check_stages(&self, precreate: bool) -> Result<(), Refusal> {
        let known = |stage: &str| STAGES.contains(&stage) || precreate && stage == PRECREATE;
        match self.stages.iter().find(|stage| !known(stage)) {
            Some(stage) => Err(Refusal::UnknownStage(stage.clone())),
            None => Ok(()),
        }
    }
}

/// A field of an object: null is as good as none.
fn field<'v>(object: &'v Value, name: &str) -> Option<&'v Value> {
    object.get(name).filter(|value| !value.is_null())
}

fn text<'v>(object: &'v Value, name: &str) -> Result<Option<&'v str>, String> {
    field(object, name).map(|value| value.as_str().ok_or_else(|| format!("{name} is no text"))).transpose()
}

fn boolean(object: &Value, name: &str) -> Result<Option<bool>, String> {
    field(object, name)
        .map(|value| value.as_bool().ok_or_else(|| format!("{name} is neither true nor false")))
        .transpose()
}

fn texts(object: &Value, name: &str) -> Result<Option<Vec<String>>, String> {
    let Some(value) = field(object, name) else { return Ok(None) };
    let Value::Array(items) = value else { return Err(format!("{name} is no list")) };
    let item = |item: &Value| item.as_str().map(str::to_owned).ok_or_else(|| format!("{name} is no list of texts"));
    items.iter().map(item).collect::<Result<_, _>>().map(Some)
}

fn current(file: &Value) -> Result<HookFile, String> {
    let program = field(file, "hook").ok_or("it has no hook.path")?;
    if !program.is_object() {
        return Err("hook is no object".to_owned());
    }
    let path = PathBuf::from(text(program, "path")?.unwrap_or_default());
    let args = texts(program, "args")?.unwrap_or_default();
    let applies = when(field(file, "when").unwrap_or(&Value::Null))?;
    let stages = texts(file, "stages")?.ok_or("it has no stages")?;
    let timeout = field(program, "timeout").and_then(Value::as_u64);
    Ok(HookFile { path, args, stages, applies, timeout })
}

/// Version 0.1.0, which files without a version have too.
fn old(file: &Value) -> Result<HookFile, String> {
    let either = |one, other| -> Result<Option<Vec<String>>, String> { Ok(texts(file, one)?.or(texts(file, other)?)) };
    let path = text(file, "hook")?.unwrap_or_default();
    let stages = either("stages", "stage")?.ok_or("it has no stages")?;
    let args = std::iter::once(path.to_owned()).chain(texts(file, "arguments")?.unwrap_or_default()).collect();
    // Any one of them is enough.
    let mut patterns: Vec<String> = either("cmds", "cmd")?.unwrap_or_default();
    patterns.extend(either("annotations", "annotation")?.unwrap_or_default());
    let applies = if patterns.iter().any(|pattern| matches_all(pattern)) {
        Applies::Always
    } else if !patterns.is_empty() || boolean(file, "hasbindmounts")? == Some(true) {
        Applies::If("its command, its annotations or its volumes match".to_owned())
    } else {
        Applies::Never
    };
    // Files of this version cannot name a timeout.
    Ok(HookFile { path: path.into(), args, stages, applies, timeout: None })
}

/// All conditions that are there must be true, and one must be there.
fn when(when: &Value) -> Result<Applies, String> {
    let mut conditions = Vec::new();
    let (always, volumes) = (boolean(when, "always")?, boolean(when, "hasBindMounts")?);
    if volumes == Some(true) {
        conditions.push("it has volumes".to_owned());
    }
    let mut has_annotations = false;
    if let Some(annotations) = field(when, "annotations") {
        for (key, value) in annotations.as_object().ok_or("annotations is no object")? {
            has_annotations = true;
            let value = value.as_str().ok_or("annotations has something that is no text")?;
            if !(matches_all(key) && matches_all(value)) {
                conditions.push(format!("an annotation {key:?} is {value:?}"));
            }
        }
    }
    let commands = texts(when, "commands")?.unwrap_or_default();
    if !commands.is_empty() && !commands.iter().any(|command| matches_all(command)) {
        conditions.push(format!("its command matches {}", commands.join(" or ")));
    }
    let has_any = always.is_some() || has_annotations || !commands.is_empty();
    Ok(match conditions.is_empty() {
        _ if always == Some(false) || volumes == Some(false) => Applies::Never,
        true if has_any => Applies::Always,
        true => Applies::Never,
        false => Applies::If(conditions.join(", and ")),
    })
}

/// The regular expressions that people write for it; another one counts as a condition.
fn matches_all(pattern: &str) -> bool {
    ["", ".", ".*", ".+", "^", "^.*", "^.*$", "^.+$", "^/", "/"].contains(&pattern)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(when: &str, stage: &str) -> String {
        format!(r#"{{"version":"1.0.0","hook":{{"path":"/h","args":["h"]}},"when":{when},"stages":["{stage}"]}}"#)
    }

    /// What podman 4.3.1 did with each.
    #[test]
    fn conditions() {
        for (when, applies) in [
            (r#"{"always":true}"#, "Always"),
            (r#"{"always":true,"commands":[".*"]}"#, "Always"),
            (r#"{"annotations":{".*":".*"}}"#, "Always"),
            ("{}", "Never"),
            (r#"{"always":false}"#, "Never"),
            (r#"{"always":true,"hasBindMounts":false}"#, "Never"),
            (r#"{"always":true,"commands":["nothing"]}"#, "If(\"its command matches nothing\")"),
            (r#"{"always":true,"hasBindMounts":true}"#, "If(\"it has volumes\")"),
        ] {
            let hook = parse(with(when, "prestart").as_bytes()).unwrap();
            assert_eq!(format!("{:?}", hook.applies), applies, "{when}");
        }
        let old = br#"{"hook":"/h","arguments":["prestart"],"stages":["prestart"],"cmds":[".*"]}"#;
        let hook = parse(old).unwrap();
        assert_eq!((hook.applies, hook.args), (Applies::Always, vec!["/h".to_owned(), "prestart".to_owned()]));
        let nvidias = br#"{"hook":"/h","stage":["prestart"],"hasbindmounts":true}"#;
        assert!(matches!(parse(nvidias).unwrap().applies, Applies::If(_)));
    }

    #[test]
    fn what_engines_refuse() {
        for (text, why) in [
            ("{", "EOF"),
            ("[]", "invalid"),
            (r#"{"version":"2.0.0"}"#, "version \"2.0.0\""),
            (r#"{"version":"1.0.0","stages":["prestart"]}"#, "no hook.path"),
            (r#"{"version":"1.0.0","hook":{"path":""},"stages":["prestart"]}"#, "no hook.path"),
            (r#"{"version":"1.0.0","hook":{"path":"/h"}}"#, "no stages"),
            (&with("{}", "nonsense"), "the stage \"nonsense\""),
            (&with("{}", "precreate"), "the stage \"precreate\""),
        ] {
            let parsed = parse(text.as_bytes()).map_err(Refusal::Invalid);
            let error = parsed.and_then(|hook| hook.check_stages(false)).unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
        assert!(parse(with("{}", "precreate").as_bytes()).unwrap().check_stages(true).is_ok());
    }

    proptest::proptest! {
        /// Whatever somebody put into a hooks directory.
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
