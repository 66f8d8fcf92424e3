//! `nvidia-ctk config`: prints the hook's config.toml, and sets its keys.

use std::path::Path;

use anyhow::{Result, anyhow};

use base::go;
use base::nearest::nearest;
use base::report::{classify, failure};
use findings::catalog;
use nvidia_host::config;
use nvidia_host::config::schema::{self, KEYS, Meaning};
use serde_json::Value;

use super::args::{Config, ConfigCommand};
use super::{note, refusal};
use crate::edit;

/// The file that packages install, with a comment for each key.
const DEFAULT: &str = include_str!("../../../../config/config.toml");

/// The lists among the keys that have no effect here.
const LISTS: [&str; 2] = [
    "nvidia-container-runtime.modes.cdi.annotation-prefixes",
    "nvidia-container-runtime.modes.cdi.spec-dirs",
];

/// Returns the text for stdout, or nothing if it was written to a file.
pub(super) fn run(options: &Config) -> Result<Vec<u8>> {
    if let Some(ConfigCommand::Default { output }) = &options.command {
        return put(output.as_deref(), DEFAULT);
    }
    let path = options
        .file
        .as_deref()
        .unwrap_or_else(|| Path::new(config::FILE));
    let text = edit::file::read(path)
        .map_err(|error| classify(error, &catalog::CONFIG, "run the command as root"))?;
    let mut text = text.unwrap_or_else(|| DEFAULT.to_owned());
    for one in &options.set {
        let (key, value) = match one.split_once('=') {
            Some((key, value)) => (key, Some(value)),
            None => (one.as_str(), None),
        };
        let literal = literal(key, value, &options.set_list_separator)?;
        let keys: Vec<_> = key.split('.').collect();
        text = edit::toml::set(&text, &keys, &literal).map_err(|error| {
            let what = format!("cannot set {key:?} in {path:?}: {error:#}");
            failure(
                &catalog::CONFIG,
                what,
                format!(
                    "add the line {:?} with an editor",
                    format!("{key} = {literal}")
                ),
            )
        })?;
    }
    // The hook would report a wrong value at the next start of a container.
    config::parse(&text, path)?;
    put(
        if options.in_place {
            Some(path)
        } else {
            options.output.as_deref()
        },
        &text,
    )
}

/// Writes the text to a file, or returns it for stdout.
fn put(path: Option<&Path>, text: &str) -> Result<Vec<u8>> {
    let Some(path) = path.filter(|path| *path != Path::new("-")) else {
        return Ok(text.into());
    };
    let hint = "run the command as root, and give the file itself if the path is a link";
    edit::file::replace(path, text.as_bytes())
        .map_err(|error| classify(error, &catalog::CONFIG, hint))?;
    Ok(Vec::new())
}

/// Returns the value of a key as TOML, with the type of the key. `separator` is between the values of a list.
fn literal(key: &str, value: Option<&str>, separator: &str) -> Result<String> {
    let Some(found) = schema::find(key) else {
        let hint = match nearest(key, KEYS.iter().map(|key| key.name)) {
            Some(name) => format!("did you mean {name}?"),
            None => {
                "\"nvidia-ctk config default\" prints all keys; set the keys of [kubelet-plugin] with an editor".to_owned()
            }
        };
        return Err(refusal(format!("unknown key {key:?}"), hint));
    };
    if let Meaning::Unused(why) = found.meaning {
        note(&format!("{key} has no effect here: {why}"));
    }
    // A boolean key without a value is set to true.
    let boolean = value.map_or(Some(true), go::parse_bool);
    let is_boolean = match found.meaning {
        Meaning::Bool(_) => true,
        Meaning::Unused(_) => boolean.is_some() && !LISTS.contains(&key),
        _ => false,
    };
    if is_boolean {
        return match boolean {
            Some(boolean) => Ok(boolean.to_string()),
            None => Err(refusal(
                format!("{:?} is not a value of {key}", value.unwrap_or_default()),
                "give true or false",
            )),
        };
    }
    let Some(value) = value else {
        return Err(refusal(
            format!("{key} needs a value"),
            format!("write --set {key}=VALUE"),
        ));
    };
    if value.contains('\n') {
        return Err(anyhow!("the value has a line break"));
    }
    match found.meaning {
        Meaning::Seconds(_) => Ok(value.to_owned()),
        Meaning::Texts(_) => Ok(list(value, separator)),
        Meaning::Unused(_) if LISTS.contains(&key) => Ok(list(value, separator)),
        _ => Ok(Value::from(value).to_string()),
    }
}

fn list(value: &str, separator: &str) -> String {
    let words = value.split(separator).filter(|word| !word.is_empty());
    Value::from(words.collect::<Vec<_>>()).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::report::render;

    #[test]
    fn values_of_a_list_can_contain_commas() {
        let key = "nvidia-container-cli.environment";
        assert_eq!(
            literal(key, Some("A=b,c;D=e"), ";").unwrap(),
            "[\"A=b,c\",\"D=e\"]"
        );
    }

    #[test]
    fn values_have_the_type_of_the_key() {
        for (key, value, literal) in [
            ("nvidia-container-cli.no-cgroups", None, "true"),
            ("nvidia-container-cli.no-cgroups", Some("F"), "false"),
            (
                "nvidia-container-cli.root",
                Some("/run/\"x"),
                "\"/run/\\\"x\"",
            ),
            (
                "nvidia-container-cli.environment",
                Some("A=b,C=d"),
                "[\"A=b\",\"C=d\"]",
            ),
            ("devices.allow", Some(""), "[]"),
            ("oci-nvidia-hook.nvml-timeout", Some("60"), "60"),
            ("nvidia-container-runtime.mode", Some("cdi"), "\"cdi\""),
            (
                "nvidia-container-runtime.runtimes",
                Some("crun,runc"),
                "[\"crun\",\"runc\"]",
            ),
            (
                "features.disable-imex-channel-creation",
                Some("true"),
                "true",
            ),
        ] {
            assert_eq!(super::literal(key, value, ",").unwrap(), literal, "{key}");
        }
        for (key, value, why) in [
            (
                "nvidia-container-cli.no-cgroup",
                None,
                "unknown key \"nvidia-container-cli.no-cgroup\"",
            ),
            (
                "disable-require",
                Some("yes"),
                "\"yes\" is not a value of disable-require",
            ),
            (
                "nvidia-container-cli.root",
                None,
                "nvidia-container-cli.root needs a value",
            ),
        ] {
            let text = render(&super::literal(key, value, ",").unwrap_err());
            assert!(text.contains(why) && text.contains("hint: "), "{text}");
        }
    }

    #[test]
    fn the_file_keeps_its_comments() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.toml");
        let run = |set: &[&str], in_place| {
            super::run(&Config {
                file: Some(path.clone()),
                set: set.iter().map(|one| (*one).to_owned()).collect(),
                set_list_separator: ",".to_owned(),
                in_place,
                output: None,
                command: None,
            })
        };
        assert_eq!(run(&[], false).unwrap(), DEFAULT.as_bytes());
        assert!(
            run(&["nvidia-container-cli.no-cgroups", "devices.deny=0"], true)
                .unwrap()
                .is_empty()
        );
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(text.lines().count(), DEFAULT.lines().count() + 2, "{text}");
        for line in DEFAULT.lines() {
            assert!(text.contains(line), "{line}");
        }
        let (read, _) = config::parse(&text, &path).unwrap();
        assert!(!read.edit_cgroups && read.devices.deny == ["0"]);
        let text = render(&run(&["oci-nvidia-hook.nvml-timeout=0"], true).unwrap_err());
        assert!(text.contains("nvml-timeout"), "{text}");
    }
}
