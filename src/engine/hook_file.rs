//! One JSON file of a hooks directory, by the rules of the library that Podman, CRI-O and Buildah share: oci-hooks(5).
//! Pure.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Deserialize;

/// The stages of the runtime-spec. Podman adds [`PRECREATE`].
const STAGES: [&str; 6] = ["createContainer", "createRuntime", "prestart", "poststart", "poststop", "startContainer"];
/// The stage that only Podman knows.
pub const PRECREATE: &str = "precreate";

/// A hook, as far as it matters here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HookFile {
    /// The program
    pub path: PathBuf,
    /// Its arguments, argv[0] among them
    pub args: Vec<String>,
    /// When engines have it run
    pub stages: Vec<String>,
    /// For which containers
    pub applies: Applies,
}

/// For which containers a hook runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Applies {
    /// All
    Always,
    /// None: its conditions exclude each other, or there are none
    Never,
    /// Those of which this is true
    If(String),
}

#[derive(Deserialize)]
struct Versioned {
    #[serde(default)]
    version: String,
}

#[derive(Deserialize)]
struct Current {
    hook: Option<Program>,
    #[serde(default)]
    when: When,
    stages: Option<Vec<String>>,
}

#[derive(Deserialize)]
struct Program {
    #[serde(default)]
    path: PathBuf,
    #[serde(default)]
    args: Vec<String>,
}

#[derive(Default, Deserialize)]
struct When {
    always: Option<bool>,
    #[serde(default)]
    annotations: BTreeMap<String, String>,
    #[serde(default)]
    commands: Vec<String>,
    #[serde(rename = "hasBindMounts")]
    has_bind_mounts: Option<bool>,
}

/// Version 0.1.0, which files without a version have too.
#[derive(Deserialize)]
struct Old {
    #[serde(default)]
    hook: PathBuf,
    #[serde(default)]
    arguments: Vec<String>,
    #[serde(alias = "stage")]
    stages: Option<Vec<String>>,
    #[serde(default, alias = "cmd")]
    cmds: Vec<String>,
    #[serde(default, alias = "annotation")]
    annotations: Vec<String>,
    #[serde(default, rename = "hasbindmounts")]
    has_bind_mounts: bool,
}

/// Parses a file.
///
/// # Errors
/// Why an engine refuses it, and with it every container, or its own start.
pub fn parse(bytes: &[u8]) -> Result<HookFile, String> {
    let versioned: Versioned = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    let hook = match versioned.version.as_str() {
        "1.0.0" => current(serde_json::from_slice(bytes).map_err(|error| error.to_string())?)?,
        "0.1.0" | "" => old(serde_json::from_slice(bytes).map_err(|error| error.to_string())?)?,
        other => return Err(format!("no engine knows version {other:?}")),
    };
    if hook.path.as_os_str().is_empty() {
        return Err("it has no hook.path".to_owned());
    }
    Ok(hook)
}

impl HookFile {
    /// What is said of a program that is there; engines look for it first. `precreate`: whether the engine knows that stage.
    ///
    /// # Errors
    /// Why an engine refuses the file.
    pub fn check_stages(&self, precreate: bool) -> Result<(), String> {
        let known = |stage: &str| STAGES.contains(&stage) || precreate && stage == PRECREATE;
        match self.stages.iter().find(|stage| !known(stage)) {
            Some(stage) => Err(format!("this engine does not know the stage {stage:?}")),
            None => Ok(()),
        }
    }
}

fn current(raw: Current) -> Result<HookFile, String> {
    let Program { path, args } = raw.hook.ok_or("it has no hook.path")?;
    let stages = raw.stages.ok_or("it has no stages")?;
    Ok(HookFile { path, args, stages, applies: raw.when.applies() })
}

fn old(raw: Old) -> Result<HookFile, String> {
    let stages = raw.stages.ok_or("it has no stages")?;
    let args = std::iter::once(raw.hook.display().to_string()).chain(raw.arguments).collect();
    // Any one of them is enough.
    let patterns = || raw.cmds.iter().chain(&raw.annotations);
    let applies = if patterns().any(|pattern| matches_all(pattern)) {
        Applies::Always
    } else if patterns().next().is_some() || raw.has_bind_mounts {
        Applies::If("its command, its annotations or its volumes match".to_owned())
    } else {
        Applies::Never
    };
    Ok(HookFile { path: raw.hook, args, stages, applies })
}

impl When {
    /// All that are there must be true, and one must be there.
    fn applies(&self) -> Applies {
        let mut conditions = Vec::new();
        if self.always == Some(false) || self.has_bind_mounts == Some(false) {
            return Applies::Never;
        }
        if self.has_bind_mounts == Some(true) {
            conditions.push("it has volumes".to_owned());
        }
        for (key, value) in &self.annotations {
            if !(matches_all(key) && matches_all(value)) {
                conditions.push(format!("an annotation {key:?} is {value:?}"));
            }
        }
        if !self.commands.is_empty() && !self.commands.iter().any(|command| matches_all(command)) {
            conditions.push(format!("its command matches {}", self.commands.join(" or ")));
        }
        let has_any = self.always.is_some() || !self.annotations.is_empty() || !self.commands.is_empty();
        match conditions.is_empty() {
            true if has_any => Applies::Always,
            true => Applies::Never,
            false => Applies::If(conditions.join(", and ")),
        }
    }
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
            let error = parse(text.as_bytes()).and_then(|hook| hook.check_stages(false)).unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
        assert!(parse(with("{}", "precreate").as_bytes()).unwrap().check_stages(true).is_ok());
    }
}
