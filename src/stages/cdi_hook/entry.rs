//! Parses the hook entries of CDI specs that NVIDIA's programs write.

use std::ffi::OsString;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};

use base::go::flag;
use base::paths::ContainerPath;
use nvidia_host::driver::compat;
use nvidia_host::programs::CDI_HOOK;

/// NVIDIA's names of the hooks.
pub(crate) const HOOKS: [&str; 6] = [
    "create-symlinks",
    "update-ldcache",
    "enable-cuda-compat",
    "disable-device-node-modification",
    "update-application-profile",
    "chmod",
];

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    Help,
    Version,
    Hook(HookArgs),
    /// An unknown or missing hook, which is ignored: like NVIDIA's programs, this one accepts newer specs
    Unknown(String),
}

#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct HookArgs {
    pub(super) name: &'static str,
    pub(super) links: Vec<(PathBuf, ContainerPath)>,
    pub(super) folders: Vec<ContainerPath>,
    pub(super) host_driver: String,
    pub(super) host_cuda: String,
    pub(super) compat_dir: Option<ContainerPath>,
    pub(super) mode: Option<u32>,
    pub(super) paths: Vec<ContainerPath>,
    pub(super) state: Option<PathBuf>,
}

/// Parses the arguments of an entry, without argv\[0\], for a program of this name.
///
/// # Errors
/// If an option is unknown, or its value is wrong.
pub(crate) fn parse(program: &str, args: Vec<OsString>) -> Result<Verb> {
    let mut args = args.into_iter();
    let mut in_group = program == CDI_HOOK;
    let name = loop {
        let Some(word) = args.next() else {
            return Ok(Verb::Unknown(
                "the name of the CDI hook is missing".to_owned(),
            ));
        };
        match flag(&word) {
            Some(("help" | "h", _)) => return Ok(Verb::Help),
            Some(("version" | "v", _)) => return Ok(Verb::Version),
            // These set the log level.
            Some(("debug" | "d" | "quiet" | "q", _)) => {}
            Some(_) if in_group => {
                return Ok(Verb::Unknown(format!(
                    "unknown option {word:?} before the CDI hook"
                )));
            }
            Some(_) => bail!("unknown option {word:?}"),
            None if word == "hook" && !in_group => in_group = true,
            None if in_group => match HOOKS.iter().find(|name| word == **name) {
                Some(name) => break *name,
                None => return Ok(Verb::Unknown(format!("unknown CDI hook {word:?}"))),
            },
            None => bail!("{program} has no command {word:?}"),
        }
    };
    let mut hook = HookArgs {
        name,
        ..HookArgs::default()
    };
    while let Some(word) = args.next() {
        let (option, value) =
            flag(&word).with_context(|| format!("unexpected argument {word:?} of {name}"))?;
        if matches!(option, "help" | "h") {
            return Ok(Verb::Help);
        }
        if !takes(name, option) {
            bail!("unknown option {word:?} of {name}");
        }
        let value = match value {
            Some(value) => value.to_owned(),
            None => args
                .next()
                .and_then(|value| value.into_string().ok())
                .with_context(|| format!("--{option} needs a value"))?,
        };
        hook.set(option, value)?;
    }
    Ok(Verb::Hook(hook))
}

fn takes(hook: &str, option: &str) -> bool {
    let options: &[&str] = match hook {
        "create-symlinks" => &["link"],
        // --ldconfig-path is ignored, because ldconfig is never run.
        "update-ldcache" => &["folder", "ldconfig-path"],
        "enable-cuda-compat" => &[
            "host-driver-version",
            "host-cuda-version",
            "cuda-compat-container-root",
        ],
        "chmod" => &["mode", "path"],
        _ => &[],
    };
    option == "container-spec" || options.contains(&option)
}

impl HookArgs {
    fn set(&mut self, option: &str, value: String) -> Result<()> {
        match option {
            "link" => {
                let (target, link) = value
                    .split_once("::")
                    .filter(|(target, _)| !target.is_empty())
                    .with_context(|| format!("--link {value:?} is not TARGET::PATH"))?;
                self.links.push((target.into(), container_path(link)?));
            }
            "folder" => self.folders.push(container_path(&value)?),
            "host-driver-version" => self.host_driver = value,
            "host-cuda-version" => self.host_cuda = value,
            "cuda-compat-container-root" => self.compat_dir = Some(container_path(&value)?),
            "mode" => {
                let mode = u32::from_str_radix(&value, 8)
                    .ok()
                    .filter(|mode| *mode <= 0o777);
                self.mode = Some(mode.with_context(|| {
                    format!("--mode {value:?} is not an octal number up to 777")
                })?);
            }
            "path" => self.paths.push(container_path(&value)?),
            "container-spec" => {
                self.state = Some(value)
                    .filter(|path| !matches!(path.as_str(), "" | "-"))
                    .map(Into::into)
            }
            _ => {}
        }
        Ok(())
    }

    pub(super) fn compat_dir(&self) -> Option<ContainerPath> {
        self.compat_dir
            .clone()
            .or_else(|| ContainerPath::new(compat::DIR))
    }
}

fn container_path(path: &str) -> Result<ContainerPath> {
    ContainerPath::new(path).with_context(|| format!("{path:?} is not a path in a container"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvidia_host::programs::CTK;

    fn parsed(program: &str, line: &str) -> Result<Verb> {
        parse(
            program,
            line.split_whitespace().map(OsString::from).collect(),
        )
    }

    fn hook(line: &str) -> HookArgs {
        match parsed(CDI_HOOK, line) {
            Ok(Verb::Hook(hook)) => hook,
            other => panic!("{line}: {other:?}"),
        }
    }

    /// NVIDIA's program has the same hooks and options.
    #[test]
    fn every_option_is_known() {
        let parts: serde_json::Value = serde_json::from_str(include_str!(
            "../../../tests/fixtures/conformance/parts.json"
        ))
        .unwrap();
        let commands = parts["commands"].as_object().unwrap().iter();
        let hooks = commands
            .filter_map(|(line, options)| Some((line.strip_prefix("nvidia-cdi-hook ")?, options)));
        let mut names: Vec<&str> = Vec::new();
        for (name, options) in hooks {
            names.push(name);
            for option in options.as_array().unwrap() {
                assert!(
                    takes(name, option.as_str().unwrap().trim_start_matches('-')),
                    "{name} {option}"
                );
            }
        }
        let mut expected = HOOKS.to_vec();
        expected.sort_unstable();
        names.sort_unstable();
        assert_eq!(names, expected);
    }

    #[test]
    fn entries_as_nvidias_programs_write_them() {
        let path = |path| ContainerPath::new(path).unwrap();
        assert_eq!(
            hook("create-symlinks --link libcuda.so.1::/usr/lib64/libcuda.so --link=../x::/usr/lib64/gbm/y").links,
            [("libcuda.so.1".into(), path("/usr/lib64/libcuda.so")), ("../x".into(), path("/usr/lib64/gbm/y"))]
        );
        let ldcache = hook(
            "update-ldcache --ldconfig-path /sbin/ldconfig --folder /usr/lib64 --folder /usr/lib64/vdpau",
        );
        assert_eq!(
            ldcache.folders,
            [path("/usr/lib64"), path("/usr/lib64/vdpau")]
        );
        let compat =
            hook("enable-cuda-compat --host-driver-version=535.183.01 --host-cuda-version=12.2");
        assert_eq!(
            (compat.host_driver.as_str(), compat.host_cuda.as_str()),
            ("535.183.01", "12.2")
        );
        assert_eq!(compat.compat_dir(), ContainerPath::new(compat::DIR));
        let chmod =
            hook("chmod --mode 755 --path /dev/dri --path /dev/nvidia-caps --container-spec -");
        assert_eq!(
            (chmod.mode, chmod.paths.len(), chmod.state),
            (Some(0o755), 2, None)
        );
        assert_eq!(
            hook("disable-device-node-modification --container-spec=/s").state,
            Some("/s".into())
        );
        // nvidia-ctk has other commands beside its hooks.
        for line in [
            "hook create-symlinks --link a::/b",
            "--quiet hook create-symlinks -link a::/b",
            "-d hook create-symlinks --link a::/b",
        ] {
            let Verb::Hook(of_ctk) = parsed(CTK, line).unwrap() else {
                panic!("{line}")
            };
            assert_eq!(of_ctk, hook("create-symlinks --link a::/b"), "{line}");
        }
    }

    #[test]
    fn unknown_words_are_ignored_or_refused() {
        for (program, line) in [
            (CTK, "hook"),
            (CTK, "hook new-hook --x y"),
            (CDI_HOOK, ""),
            (CDI_HOOK, "--new update-ldcache"),
        ] {
            assert!(
                matches!(parsed(program, line), Ok(Verb::Unknown(_))),
                "{program} {line}"
            );
        }
        for (program, line, says) in [
            (CTK, "cdi generate", "nvidia-ctk has no command \"cdi\""),
            (CTK, "--new hook", "unknown option \"--new\""),
            (
                CDI_HOOK,
                "update-ldcache --link a::/b",
                "unknown option \"--link\" of update-ldcache",
            ),
            (
                CDI_HOOK,
                "update-ldcache word",
                "unexpected argument \"word\"",
            ),
            (
                CDI_HOOK,
                "update-ldcache --folder",
                "--folder needs a value",
            ),
            (CDI_HOOK, "create-symlinks --link a", "is not TARGET::PATH"),
            (
                CDI_HOOK,
                "create-symlinks --link a::/b/../../c",
                "is not a path in a container",
            ),
            (
                CDI_HOOK,
                "chmod --mode 4755 --path /x",
                "is not an octal number up to 777",
            ),
            (
                CDI_HOOK,
                "chmod --mode 9 --path /x",
                "is not an octal number",
            ),
        ] {
            let error = parsed(program, line).unwrap_err().to_string();
            assert!(error.contains(says), "{line}: {error}");
        }
    }
}
