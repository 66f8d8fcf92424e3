//! Called as `nvidia-cdi-hook`, or as `nvidia-ctk hook`: the hook entries of CDI specs that NVIDIA's toolkit, device plugin
//! and DRA driver write. The steps are those of our own entries, so the same fence holds: no ldconfig is run, and no path
//! leads out of the container.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result, bail};

use base::paths::ContainerPath;
use base::read::read_limited;
use base::report::{Finding, catalog, failure};
use base::sys::in_root::open_host_file;
use nvidia_host::cdi::entry::RootfsEdits;
use nvidia_host::driver::compat;

use super::{CDI_HOOK, CTK};
use crate::cli::{USAGE, output};
use crate::inject;
use crate::inject::container::{self, OpenContainer};
use crate::log::Log;
use crate::lower::live::{self, Step};
use crate::lower::rootfs;
use crate::oci::{self, SpecView};
use crate::plan::Container;

const HELP: &str = "\
usage: nvidia-ctk hook HOOK [OPTIONS] < state.json
       nvidia-cdi-hook HOOK [OPTIONS] < state.json

This is oci-nvidia-hook under the name of NVIDIA's program. CDI specs have engines
call it at the createContainer stage. HOOK is one of:

  create-symlinks                   --link TARGET::PATH ...
  update-ldcache                    --folder DIRECTORY ...
  enable-cuda-compat                --host-driver-version VERSION
                                    --host-cuda-version VERSION
                                    --cuda-compat-container-root DIRECTORY
  disable-device-node-modification
  update-application-profile
  chmod                             --mode OCTAL --path PATH ...

All take --container-spec FILE, which has the container's state instead of stdin.
";

/// The hooks, as NVIDIA calls them.
const HOOKS: [&str; 6] = [
    "create-symlinks",
    "update-ldcache",
    "enable-cuda-compat",
    "disable-device-node-modification",
    "update-application-profile",
    "chmod",
];

/// What a command line asks for.
#[derive(Debug, PartialEq, Eq)]
enum Call {
    Help,
    Version,
    Hook(Hook),
    /// A hook that this program does not have, or none: newer specs than the program are used all the same, as NVIDIA's
    /// programs do it
    Unknown(String),
}

/// One hook entry.
#[derive(Debug, Default, PartialEq, Eq)]
struct Hook {
    name: &'static str,
    links: Vec<(PathBuf, ContainerPath)>,
    folders: Vec<ContainerPath>,
    host_driver: String,
    host_cuda: String,
    compat_dir: Option<ContainerPath>,
    mode: Option<u32>,
    paths: Vec<ContainerPath>,
    state: Option<PathBuf>,
}

/// Runs the hook with these arguments, argv\[0\] left out, under this name.
#[must_use]
pub fn run(name: &str, args: Vec<OsString>) -> ExitCode {
    let hook = match parse(name, args) {
        Ok(Call::Hook(hook)) => hook,
        Ok(Call::Help) => return output::print(HELP),
        Ok(Call::Version) => {
            return output::print(&format!("{name} version {} (oci-nvidia-hook)\n", env!("CARGO_PKG_VERSION")));
        }
        Ok(Call::Unknown(what)) => {
            let mut log = Log::of(name);
            log.connect();
            log.finding(&Finding::of(&catalog::UNKNOWN_CDI_HOOK, what, supported()));
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            let what = format!("wrong command line of {name}: {error:#}");
            Log::default().error(&failure(
                &catalog::COMMAND_LINE,
                what,
                format!("{}; see \"{name} --help\"", supported()),
            ));
            return ExitCode::from(USAGE);
        }
    };
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    let mut log = Log::of(hook.name);
    match carry_out(&hook, &mut log) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log.fail(&error);
            ExitCode::FAILURE
        }
    }
}

fn supported() -> String {
    format!("the hooks of \"nvidia-ctk hook\" that oci-nvidia-hook has are {}", HOOKS.join(", "))
}

/// Go's flags have one dash or two.
fn flag(word: &OsStr) -> Option<(&str, Option<&str>)> {
    let flag = word.to_str()?.strip_prefix('-').filter(|flag| !flag.is_empty())?;
    let flag = flag.strip_prefix('-').unwrap_or(flag);
    Some(flag.split_once('=').map_or((flag, None), |(name, value)| (name, Some(value))))
}

fn parse(program: &str, args: Vec<OsString>) -> Result<Call> {
    let mut args = args.into_iter();
    let mut in_group = program == CDI_HOOK;
    let name = loop {
        let Some(word) = args.next() else { return Ok(Call::Unknown("no CDI hook is named".to_owned())) };
        match flag(&word) {
            Some(("help" | "h", _)) => return Ok(Call::Help),
            Some(("version" | "v", _)) => return Ok(Call::Version),
            // They say how much is logged, and to whom.
            Some(("debug" | "d" | "quiet" | "q", _)) => {}
            Some(_) if in_group => return Ok(Call::Unknown(format!("unknown option {word:?} before the CDI hook"))),
            Some(_) => bail!("unknown option {word:?}"),
            None if word == "hook" && !in_group => in_group = true,
            None if in_group => match HOOKS.iter().find(|name| word == **name) {
                Some(name) => break *name,
                None => return Ok(Call::Unknown(format!("unknown CDI hook {word:?}"))),
            },
            None => bail!("{word:?} is not supported; CDI specs are written by \"oci-nvidia-hook cdi generate\""),
        }
    };
    let mut hook = Hook { name, ..Hook::default() };
    while let Some(word) = args.next() {
        let (option, value) = flag(&word).with_context(|| format!("unexpected argument {word:?} of {name}"))?;
        if matches!(option, "help" | "h") {
            return Ok(Call::Help);
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
    Ok(Call::Hook(hook))
}

fn takes(hook: &str, option: &str) -> bool {
    let options: &[&str] = match hook {
        "create-symlinks" => &["link"],
        // There is no ldconfig to be run.
        "update-ldcache" => &["folder", "ldconfig-path"],
        "enable-cuda-compat" => &["host-driver-version", "host-cuda-version", "cuda-compat-container-root"],
        "chmod" => &["mode", "path"],
        _ => &[],
    };
    option == "container-spec" || options.contains(&option)
}

impl Hook {
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
                let mode = u32::from_str_radix(&value, 8).ok().filter(|mode| *mode <= 0o777);
                self.mode = Some(mode.with_context(|| format!("--mode {value:?} is not an octal number up to 777"))?);
            }
            "path" => self.paths.push(container_path(&value)?),
            "container-spec" => {
                self.state = Some(value).filter(|path| !matches!(path.as_str(), "" | "-")).map(Into::into)
            }
            _ => {}
        }
        Ok(())
    }

    fn compat_dir(&self) -> Option<ContainerPath> {
        self.compat_dir.clone().or_else(|| ContainerPath::new(compat::DIR))
    }
}

fn container_path(path: &str) -> Result<ContainerPath> {
    ContainerPath::new(path).with_context(|| format!("{path:?} is not a path in a container"))
}

fn carry_out(hook: &Hook, log: &mut Log) -> Result<()> {
    let bytes = match &hook.state {
        Some(file) => open_host_file(file)
            .map_err(anyhow::Error::from)
            .and_then(|(file, _)| read_limited(file, oci::MAX_JSON))
            .with_context(|| format!("cannot read the container state {file:?}"))?,
        None => {
            read_limited(std::io::stdin().lock(), oci::MAX_JSON).context("cannot read the container state on stdin")?
        }
    };
    let state = oci::state::parse(&bytes)?;
    let spec = oci::spec_view::read(&state.bundle)?;
    log.name_container(&state.id, spec.pod.clone(), &state.bundle);
    log.connect();
    container::set_deadline(Instant::now())?;
    let container = OpenContainer::inside(&spec.rootfs)?;
    let steps = steps(hook, &container, &spec);
    let finished =
        inject::carry_out(inject::prepare(&steps, &spec.mount_label)?, container, &Container::of(&state, &spec)?)?;
    finished.findings.iter().for_each(|finding| log.finding(finding));
    Ok(())
}

fn steps(hook: &Hook, container: &OpenContainer, spec: &SpecView) -> Vec<Step> {
    let mut edits = RootfsEdits::default();
    match hook.name {
        "create-symlinks" => edits.links.extend(hook.links.iter().map(|(text, link)| (link.clone(), text.clone()))),
        "update-ldcache" => {
            add_libraries(&mut edits, &hook.folders, container, spec);
            let mut steps = rootfs::steps(&edits, container.facts(), Vec::new());
            for (dir, names) in compat_hooks(spec).filter_map(|hook| compat_of(&hook, container)) {
                live::prefer(&mut steps, &dir, |soname| names.contains(soname));
            }
            return steps;
        }
        // Together with update-ldcache it decides what the linker cache leads to; alone, what the image's ldconfig finds.
        "enable-cuda-compat" => {
            return compat_of(hook, container)
                .map(|(dir, _)| Step::ListDirectories { first: vec![dir], others: Vec::new() })
                .into_iter()
                .collect();
        }
        "disable-device-node-modification" => return vec![Step::MaskParams],
        "update-application-profile" => edits.egl_devices = gpus_of(spec),
        _ => {
            let modes = hook.paths.iter().zip(std::iter::repeat(hook.mode.unwrap_or(0o755)));
            return modes.map(|(path, mode)| Step::SetMode { target: path.clone(), mode }).collect();
        }
    }
    rootfs::steps(&edits, container.facts(), Vec::new())
}

/// The libraries that the engine mounted in these directories, with the links by which the loader knows them: what
/// ldconfig would find there. What the image has there itself is in its own linker cache.
fn add_libraries(edits: &mut RootfsEdits, folders: &[ContainerPath], container: &OpenContainer, spec: &SpecView) {
    for mount in spec.mounts.iter().filter(|mount| mount.is_bind()) {
        let Some(path) = ContainerPath::new(&mount.destination) else { continue };
        let Some(dir) = path.parent().filter(|dir| folders.contains(dir)) else { continue };
        let Some((arch, soname)) = container.library(&path) else { continue };
        let Some(link) = dir.join(&soname) else { continue };
        if link != path {
            edits.links.insert(link.clone(), path.file_name().into());
        }
        edits.libraries.insert((arch, link));
    }
}

/// The same container's hook entries for compatibility libraries.
fn compat_hooks(spec: &SpecView) -> impl Iterator<Item = Hook> {
    let hook = |args: &[String]| {
        let (called, args) = args.split_first()?;
        let name =
            Path::new(called).file_name().and_then(OsStr::to_str).filter(|name| [CTK, CDI_HOOK].contains(name))?;
        match parse(name, args.iter().map(OsString::from).collect()) {
            Ok(Call::Hook(hook)) if hook.name == "enable-cuda-compat" => Some(hook),
            _ => None,
        }
    };
    spec.hooks.iter().filter_map(move |entry| hook(&entry.args))
}

/// Where the image has a newer libcuda that is to be used, and the names there.
fn compat_of(hook: &Hook, container: &OpenContainer) -> Option<(ContainerPath, std::collections::BTreeSet<OsString>)> {
    let dir = hook.compat_dir()?;
    let names = container.compat_libraries(&dir, &hook.host_driver, &hook.host_cuda);
    (!hook.host_driver.is_empty() && !names.is_empty()).then_some((dir, names))
}

/// Bit N for the device node `/dev/nvidiaN`.
fn gpus_of(spec: &SpecView) -> u64 {
    let minor = |path: &Path| path.to_str()?.strip_prefix("/dev/nvidia")?.parse::<u32>().ok();
    let minors =
        spec.devices.iter().map(|device| &device.path).chain(spec.mounts.iter().map(|mount| &mount.destination));
    minors.filter_map(|path| 1_u64.checked_shl(minor(path)?)).fold(0, |mask, bit| mask | bit)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oci::spec_view;

    fn parsed(program: &str, line: &str) -> Result<Call> {
        parse(program, line.split_whitespace().map(OsString::from).collect())
    }

    fn hook(line: &str) -> Hook {
        match parsed(CDI_HOOK, line) {
            Ok(Call::Hook(hook)) => hook,
            other => panic!("{line}: {other:?}"),
        }
    }

    #[test]
    fn entries_as_nvidias_programs_write_them() {
        let path = |path| ContainerPath::new(path).unwrap();
        assert_eq!(
            hook("create-symlinks --link libcuda.so.1::/usr/lib64/libcuda.so --link=../x::/usr/lib64/gbm/y").links,
            [("libcuda.so.1".into(), path("/usr/lib64/libcuda.so")), ("../x".into(), path("/usr/lib64/gbm/y"))]
        );
        let ldcache =
            hook("update-ldcache --ldconfig-path /sbin/ldconfig --folder /usr/lib64 --folder /usr/lib64/vdpau");
        assert_eq!(ldcache.folders, [path("/usr/lib64"), path("/usr/lib64/vdpau")]);
        let compat = hook("enable-cuda-compat --host-driver-version=535.183.01 --host-cuda-version=12.2");
        assert_eq!((compat.host_driver.as_str(), compat.host_cuda.as_str()), ("535.183.01", "12.2"));
        assert_eq!(compat.compat_dir(), ContainerPath::new(compat::DIR));
        let chmod = hook("chmod --mode 755 --path /dev/dri --path /dev/nvidia-caps --container-spec -");
        assert_eq!((chmod.mode, chmod.paths.len(), chmod.state), (Some(0o755), 2, None));
        assert_eq!(hook("disable-device-node-modification --container-spec=/s").state, Some("/s".into()));
        // nvidia-ctk has other commands beside its hooks.
        for line in [
            "hook create-symlinks --link a::/b",
            "--quiet hook create-symlinks -link a::/b",
            "-d hook create-symlinks --link a::/b",
        ] {
            let Call::Hook(of_ctk) = parsed(CTK, line).unwrap() else { panic!("{line}") };
            assert_eq!(of_ctk, hook("create-symlinks --link a::/b"), "{line}");
        }
    }

    #[test]
    fn what_is_not_known_is_passed_over_or_refused() {
        for (program, line) in
            [(CTK, "hook"), (CTK, "hook new-hook --x y"), (CDI_HOOK, ""), (CDI_HOOK, "--new update-ldcache")]
        {
            assert!(matches!(parsed(program, line), Ok(Call::Unknown(_))), "{program} {line}");
        }
        for (program, line, says) in [
            (CTK, "cdi generate", "\"cdi\" is not supported"),
            (CTK, "--new hook", "unknown option \"--new\""),
            (CDI_HOOK, "update-ldcache --link a::/b", "unknown option \"--link\" of update-ldcache"),
            (CDI_HOOK, "update-ldcache word", "unexpected argument \"word\""),
            (CDI_HOOK, "update-ldcache --folder", "--folder needs a value"),
            (CDI_HOOK, "create-symlinks --link a", "is not TARGET::PATH"),
            (CDI_HOOK, "create-symlinks --link a::/b/../../c", "is not a path in a container"),
            (CDI_HOOK, "chmod --mode 4755 --path /x", "is not an octal number up to 777"),
            (CDI_HOOK, "chmod --mode 9 --path /x", "is not an octal number"),
        ] {
            let error = parsed(program, line).unwrap_err().to_string();
            assert!(error.contains(says), "{line}: {error}");
        }
    }

    #[test]
    fn gpus_and_compatibility_hooks_of_config_json() {
        let text = r#"{"root":{"path":"/r"},"process":{},
            "linux":{"devices":[{"path":"/dev/nvidia0"},{"path":"/dev/nvidiactl"},{"path":"/dev/nvidia64"}]},
            "mounts":[{"destination":"/dev/nvidia3","source":"/dev/nvidia3"}],
            "hooks":{"createContainer":[
              {"path":"/usr/bin/nvidia-ctk","args":["nvidia-ctk","hook","enable-cuda-compat","--host-driver-version=535.1"]},
              {"path":"/usr/bin/nvidia-ctk","args":["nvidia-ctk","hook","update-ldcache","--folder","/usr/lib64"]},
              {"path":"/usr/bin/other","args":["other","enable-cuda-compat","--host-driver-version=1"]}]}}"#;
        let spec = spec_view::parse(text.as_bytes(), Path::new("/b")).unwrap();
        assert_eq!(gpus_of(&spec), 0b1001);
        let versions: Vec<_> = compat_hooks(&spec).map(|hook| hook.host_driver).collect();
        assert_eq!(versions, ["535.1"]);
    }
}
