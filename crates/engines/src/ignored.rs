//! Requests for GPUs that Podman accepts and does not pass on. They leave no trace in config.json, but Podman keeps the command line and
//! the labels of a container.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use base::search_path;
use base::sys::process;
use base::tree::Tree;
use serde::Deserialize;

use super::inspect::{Versions, trusted};
use super::{EngineKind, Version};

/// The time limit for `podman inspect`, which waits for the locks of other commands.
const DEADLINE: Duration = Duration::from_secs(5);
/// Labels that compose providers add
const COMPOSE: [&str; 2] = ["com.docker.compose.project", "io.podman.compose.project"];

/// How a request was made that does not reach the container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ignored {
    /// The option `--gpus`, which Podman has since 5.0
    Gpus(Option<Version>),
    /// A compose file, whose keys for GPUs the provider may have left out
    Compose,
    /// A pod file, or Podman's API
    PodFile,
}

impl Ignored {
    /// Describes what is ignored.
    pub fn what(self) -> String {
        match self {
            Self::Gpus(Some(version)) => format!("Podman {version} ignores the option --gpus"),
            Self::Gpus(None) => "this version of Podman ignores the option --gpus".to_owned(),
            Self::Compose => {
                "the compose provider did not pass on \"gpus\" or \"deploy\", if the file has them"
                    .to_owned()
            }
            Self::PodFile => {
                "Podman ignores nvidia.com/gpu, if the pod file requests it".to_owned()
            }
        }
    }

    /// Returns what to use instead.
    pub fn instead(self) -> &'static str {
        match self {
            Self::Gpus(_) => {
                "use \"-e NVIDIA_VISIBLE_DEVICES=all\" or \"--device nvidia.com/gpu=all\""
            }
            Self::Compose => "add \"environment: {NVIDIA_VISIBLE_DEVICES: all}\" to the service",
            Self::PodFile => {
                "add \"env: [{name: NVIDIA_VISIBLE_DEVICES, value: all}]\" to the container in the pod file"
            }
        }
    }
}

/// The first version of Podman that passes on `--gpus`
const HAS_GPUS: Version = Version(5, 0, 0);

/// Asks Podman how the container was created. Returns `None` if it was not created by Podman of the calling user, or no such request is
/// known.
pub fn ignored_request(host: &Tree, id: &str) -> Option<Ignored> {
    // The id comes from a file of the engine, and must not be an option of Podman.
    if id.is_empty() || !id.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    let program = search_path::find(host, EngineKind::Podman.program())?;
    let request = parse(&inspect(host, &program, id)?)?;
    let Ignored::Gpus(_) = request else {
        return Some(request);
    };
    match Versions::existing().ask(host, &program) {
        Ok(version) if version >= HAS_GPUS => None,
        asked => Some(Ignored::Gpus(asked.ok())),
    }
}

fn inspect(host: &Tree, program: &Path, id: &str) -> Option<String> {
    let program = trusted(host, program)?;
    let arguments = ["container", "inspect", id];
    process::read_output(program.as_path(), &arguments, DEADLINE).ok()
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Container {
    config: Created,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Created {
    create_command: Option<Vec<String>>,
    labels: Option<BTreeMap<String, String>>,
    /// The arguments after the image, or the image's command
    cmd: Option<Vec<String>>,
}

/// Parses the output of `podman container inspect` for one container.
fn parse(document: &str) -> Option<Ignored> {
    let containers: Vec<Container> = serde_json::from_str(document).ok()?;
    let created = containers.into_iter().next()?.config;
    let labels = created.labels.unwrap_or_default();
    if COMPOSE.iter().any(|label| labels.contains_key(*label)) {
        return Some(Ignored::Compose);
    }
    let Some(command) = created.create_command else {
        return Some(Ignored::PodFile);
    };
    // A program in the container may have an option with this name.
    let arguments = created.cmd.unwrap_or_default();
    let options = command.strip_suffix(&arguments[..]).unwrap_or(&command);
    for word in options {
        if word == "--gpus" || word.starts_with("--gpus=") {
            return Some(Ignored::Gpus(None));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_podman_prints_containers() {
        let command = |words: &str| {
            let words: Vec<_> = words.split(' ').collect();
            serde_json::json!(words)
        };
        let none = serde_json::Value::Null;
        for (created, labels, cmd, expected) in [
            (
                "podman run --gpus all image",
                &none,
                &none,
                Some(Ignored::Gpus(None)),
            ),
            (
                "podman run --gpus=1 image sh",
                &none,
                &command("sh"),
                Some(Ignored::Gpus(None)),
            ),
            (
                "podman run image serve --gpus 2",
                &none,
                &command("serve --gpus 2"),
                None,
            ),
            ("podman run -d image", &none, &command("nginx --gpus"), None),
            ("", &none, &none, Some(Ignored::PodFile)),
            (
                "",
                &serde_json::json!({"com.docker.compose.project": "p"}),
                &none,
                Some(Ignored::Compose),
            ),
            (
                "podman create image",
                &serde_json::json!({"io.podman.compose.project": "p"}),
                &none,
                Some(Ignored::Compose),
            ),
        ] {
            let created = match created {
                "" => none.clone(),
                words => command(words),
            };
            let config =
                serde_json::json!({"CreateCommand": created, "Labels": labels, "Cmd": cmd});
            let document = serde_json::json!([{"Id": "1", "Config": config}]);
            assert_eq!(parse(&document.to_string()), expected, "{document}");
        }
        assert_eq!(parse("[]"), None);
        assert_eq!(parse("Error: no such object"), None);
    }
}
