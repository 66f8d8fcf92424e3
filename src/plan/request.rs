//! Reads a container's request for GPUs from config.json. The rules are in `nvidia_host::request`.

use anyhow::Result;

use nvidia_host::config::Config;
use nvidia_host::request::{self, Container, RequestMount};

use crate::oci::SpecView;
use crate::oci::gpu_nodes::characters;
pub use nvidia_host::request::{Decision, GpuRequest, Hint};

/// Decides from config.json alone whether the container requests GPUs. So a container without GPUs costs little, and an invalid
/// config.toml cannot stop it.
pub fn hint(spec: &SpecView) -> Hint {
    request::hint(&container(spec))
}

/// Reports from environment, privilege, and the JSON text of `mounts` and `linux` whether the container can contain a request.
/// Never false if [`hint`] is not [`Hint::No`].
pub(crate) fn may_ask(spec: &SpecView, mounts: &str, linux: &str) -> bool {
    request::hint_of((&spec.env).into()) != Hint::No
        || mounts_may_request(mounts)
        || (!spec.has_all_nodes
            && request::nodes_may_request((&spec.env).into())
            && nodes_may_be_granted(linux))
}

/// Reports whether this JSON text of `mounts` can contain a request. The name of the directory must occur in it, unless the
/// text contains escapes.
fn mounts_may_request(mounts: &str) -> bool {
    mounts.contains("nvidia-container-devices") || mounts.contains('\\')
}

/// Reports whether this JSON text of `linux` can contain a GPU node: its parser accepts only plain decimal numbers, so the
/// major number must occur in the text.
fn nodes_may_be_granted(linux: &str) -> bool {
    linux.contains("195")
}

/// Decides about the request with the rules of config.toml.
///
/// # Errors
/// If the request is invalid, or requires a privileged container.
pub fn from_spec(spec: &SpecView, config: &Config) -> Result<Decision> {
    request::decide(&container(spec), config)
}

fn container(spec: &SpecView) -> Container<'_> {
    let mounts = spec.mounts.iter().map(|mount| RequestMount {
        source: &mount.source,
        destination: &mount.destination,
    });
    Container {
        env: (&spec.env).into(),
        mounts: mounts.collect(),
        nodes: if spec.has_all_nodes {
            Vec::new()
        } else {
            characters(&spec.devices)
        },
        privileged: spec.privileged,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oci::spec_view::LinuxDevice;
    use nvidia_host::device_id::Nodes;
    use nvidia_host::request::nodes;
    use proptest::prelude::*;
    use std::path::Path;

    fn granted(devices: &[LinuxDevice]) -> Option<Nodes> {
        nodes::granted(&characters(devices))
    }

    fn decide(env: &[String]) -> Option<Decision> {
        let text = serde_json::json!({"root": {"path": "/r"}, "process": {"env": env}}).to_string();
        let spec = crate::oci::spec_view::parse(text.as_bytes(), Path::new("/b")).unwrap();
        from_spec(&spec, &Config::default()).ok()
    }

    fn device(path: &str, kind: &str, major: i64, minor: i64) -> LinuxDevice {
        LinuxDevice {
            path: path.into(),
            kind: Some(kind.into()),
            major: Some(major),
            minor: Some(minor),
            ..LinuxDevice::default()
        }
    }

    #[test]
    fn config_json_is_passed_on() {
        let outcome = |spec: &SpecView, config: &Config| match from_spec(spec, config).unwrap() {
            Decision::Gpus(request) => request.devices.names().join(","),
            Decision::Nothing(_) => "nothing".to_owned(),
            Decision::Refused(_) => "refused".to_owned(),
        };
        let (open, locked) = (
            Config::default(),
            Config {
                accept_envvar_when_unprivileged: false,
                ..Config::default()
            },
        );
        let devices = vec![
            device("/dev/nvidiactl", "c", 195, 255),
            device("/dev/nvidia1", "c", 195, 1),
        ];
        let nodes = SpecView {
            devices,
            ..SpecView::default()
        };
        let env = [("NVIDIA_VISIBLE_DEVICES".to_owned(), "all".to_owned())];
        let all = SpecView {
            env: env.into_iter().collect(),
            ..nodes.clone()
        };
        for (spec, when_open, when_locked) in [
            (nodes.clone(), "/dev/nvidia1", "/dev/nvidia1"),
            (all.clone(), "all", "/dev/nvidia1"),
            (
                SpecView {
                    privileged: true,
                    has_all_nodes: true,
                    ..nodes.clone()
                },
                "nothing",
                "nothing",
            ),
            (
                SpecView {
                    privileged: true,
                    has_all_nodes: true,
                    ..all.clone()
                },
                "all",
                "all",
            ),
            // With a user namespace, a privileged container has every node and no privilege.
            (
                SpecView {
                    has_all_nodes: true,
                    ..nodes
                },
                "nothing",
                "nothing",
            ),
            (
                SpecView {
                    has_all_nodes: true,
                    ..all
                },
                "all",
                "refused",
            ),
        ] {
            assert_eq!(
                (
                    outcome(&spec, &open).as_str(),
                    outcome(&spec, &locked).as_str()
                ),
                (when_open, when_locked)
            );
            assert!(
                hint(&spec) != Hint::No || when_open == "nothing",
                "{spec:?}"
            );
        }
    }

    proptest! {
        #[test]
        fn the_order_of_variables_means_nothing(
            seed in any::<u64>(),
            devices in "all|none|0|1,0|GPU-x|void",
            capabilities in "all|compute|utility,video|nonsense",
            requirement in "cuda>=12.0|brand=tesla|x",
        ) {
            let mut env = vec![
                format!("NVIDIA_VISIBLE_DEVICES={devices}"),
                format!("NVIDIA_DRIVER_CAPABILITIES={capabilities}"),
                format!("NVIDIA_REQUIRE_CUDA={requirement}"),
                "NVIDIA_REQUIRE_OTHER=arch>=7".to_owned(),
                "CUDA_VERSION=12.1".to_owned(),
                "PATH=/bin".to_owned(),
            ];
            let before = decide(&env);
            let by = usize::try_from(seed % 6).unwrap();
            env.rotate_left(by);
            env.swap(0, by);
            prop_assert_eq!(decide(&env), before);
        }
    }

    #[test]
    fn character_devices_with_numbers_count() {
        assert_eq!(
            nvidia_host::driver::nodes::NVIDIA_MAJOR,
            195,
            "the number that the text is searched for"
        );
        assert_eq!(
            granted(&[
                device("/dev/nvidia0", "b", 195, 0),
                device("/dev/nvidia1", "c", 195, -1)
            ]),
            None
        );
        let devices = [
            device("/dev/nvidia0", "b", 195, 0),
            device("/dev/x", "c", 195, 3),
        ];
        assert_eq!(granted(&devices).unwrap().names(), ["/dev/nvidia3"]);
    }

    proptest::proptest! {
        /// The check of the text never misses a node that the parser finds.
        #[test]
        fn nothing_is_missed(major in "195|1950|0195|1\\.95e2|19|null|\"195\"", minor in "0|1|255|null", space in " {0,2}") {
            let text = format!("{{\"devices\":[{{\"path\":\"/dev/x\",\"type\":\"c\",\"major\":{space}{major},\"minor\":{minor}}}]}}");
            if let Ok(value) = serde_json::from_str::<serde_json::Value>(&text) {
                let devices: Vec<LinuxDevice> = serde_json::from_value(value["devices"].clone()).unwrap_or_default();
                proptest::prop_assert!(nodes_may_be_granted(&text) || granted(&devices).is_none());
            }
        }
    }
}
