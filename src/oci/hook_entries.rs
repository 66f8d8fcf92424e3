//! The hook entries of config.json, as the engine wrote them.

use std::path::PathBuf;

use anyhow::Result;
use serde::Deserialize;
use serde_json::Value;

/// A program that the runtime starts.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct HookEntry {
    /// The program
    #[serde(default)]
    pub path: PathBuf,
    /// With argv[0]
    #[serde(default)]
    pub args: Vec<String>,
}

#[derive(Deserialize)]
struct Raw {
    #[serde(default)]
    hooks: Option<RawHooks>,
}

#[derive(Deserialize)]
struct RawHooks {
    #[serde(default, rename = "createContainer")]
    create_container: Option<Vec<Value>>,
}

/// Those of the createContainer stage, in order; entries of an unknown form are left out.
///
/// # Errors
/// If `bytes` is no JSON object.
pub fn create_container(bytes: &[u8]) -> Result<Vec<HookEntry>> {
    let raw: Raw = super::first_json_value(bytes)?;
    let entries = raw.hooks.and_then(|hooks| hooks.create_container).unwrap_or_default();
    Ok(entries.into_iter().filter_map(|entry| serde_json::from_value(entry).ok()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_those_of_the_stage_and_of_a_known_form() {
        let text =
            br#"{"hooks": {"prestart": [{"path": "/a"}], "createContainer": [{"path": "/b", "args": ["b"]}, 3, {}]}}"#;
        let entries = create_container(text).unwrap();
        assert_eq!(entries.len(), 2);
        assert_eq!((entries[0].path.to_str(), entries[0].args.len()), (Some("/b"), 1));
        for none in [&b"{}"[..], br#"{"hooks": null}"#, br#"{"hooks": {"createContainer": null}}"#] {
            assert_eq!(create_container(none).unwrap(), []);
        }
        assert!(create_container(b"").is_err());
    }
}
