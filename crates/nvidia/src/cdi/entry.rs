//! Writes and parses the arguments of the hook entry in a CDI spec or in config.json. They describe the changes that remain after the
//! engine has mounted the driver files and created the device nodes.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use base::paths::{ContainerPath, HostPath};

use crate::config::Config;
use crate::driver::ipc::{Channel, Expected};
use crate::driver::ldcache::Arch;
use crate::feature::{Feature, Features};

/// The command of the hook entry.
pub const VERB: &str = "rootfs";
const WITH_NODE: &str = "--with-node";
const LINK: &str = "--link";
const REQUIRED_LINK: &str = "--required-link";
/// The program name, `argv[0]` of the hook entry.
pub const PROGRAM: &str = "oci-nvidia-hook";

/// The changes to the container's root file system that the hook entry makes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RootfsEdits {
    /// Symbolic links: the path and the text
    pub links: BTreeMap<ContainerPath, PathBuf>,
    /// Those links without which the container must not start
    pub required: BTreeSet<ContainerPath>,
    /// Files and links that programs open by path below the library directory: the name below it, and the path in the container
    pub below: BTreeMap<PathBuf, ContainerPath>,
    /// Libraries for the linker cache, as paths that end in the SONAME
    pub libraries: BTreeSet<(Arch, ContainerPath)>,
    /// The host's /proc/driver/nvidia, if it is masked in the container
    pub mask: Option<HostPath>,
    /// Files and directories that stay visible: the path below /proc/driver/nvidia, and the source
    pub shown: BTreeMap<PathBuf, HostPath>,
    /// Channels to daemons of the host that an engine must not mount by path
    pub channels: BTreeSet<Channel>,
    /// The value of [`crate::edits::Edits::egl_devices`]
    pub egl_devices: u64,
    /// The versions of the driver and of CUDA, if a newer libcuda of the image may be used
    pub cuda_compat: Option<(String, String)>,
    /// The stamp of the spec, which has no effect in a container
    pub stamp: Option<String>,
    /// The UUID of the device to which the node of these changes belongs. It has no effect in a container
    pub uuid: Option<String>,
    /// The file with the limits for GPUs; `None` for the default one
    pub config: Option<HostPath>,
    /// The driver root; `None` for the one in that file
    pub root: Option<HostPath>,
    /// The features in the spec, which the hook entry compares with the limits
    pub features: Features,
    /// Further changes for containers that have this device node. A spec thus has one entry for any number of devices, and the runtime
    /// starts one process.
    pub with_node: Vec<(ContainerPath, Self)>,
}

impl RootfsEdits {
    /// Returns the places from which the hook entry reads the limits, and no changes.
    #[must_use]
    pub fn of_config(config: &Config) -> Self {
        let root = Some(&config.driver_root).filter(|root| root.as_path() != Path::new("/"));
        Self {
            config: config.file.clone(),
            root: root.cloned(),
            ..Self::default()
        }
    }

    /// Whether the hook entry only compares a container with the limits, as in a spec of other devices than GPUs.
    #[must_use]
    pub fn only_checks(&self) -> bool {
        // A setup has at least one of these.
        let has_no_files =
            self.links.is_empty() && self.libraries.is_empty() && self.below.is_empty();
        let has_no_nodes =
            self.shown.is_empty() && self.with_node.is_empty() && self.egl_devices == 0;
        self.stamp.is_some()
            && has_no_files
            && has_no_nodes
            && self.mask.is_none()
            && self.channels.is_empty()
    }

    /// Merges both.
    #[must_use]
    pub fn merge(mut self, other: Self) -> Self {
        self.links.extend(other.links);
        self.required.extend(other.required);
        self.below.extend(other.below);
        self.libraries.extend(other.libraries);
        self.shown.extend(other.shown);
        self.channels.extend(other.channels);
        for (node, more) in other.with_node {
            match self.with_node.iter_mut().find(|(known, _)| *known == node) {
                Some((_, known)) => *known = std::mem::take(known).merge(more),
                None => self.with_node.push((node, more)),
            }
        }
        Self {
            mask: self.mask.or(other.mask),
            egl_devices: self.egl_devices | other.egl_devices,
            features: self.features.iter().chain(other.features.iter()).collect(),
            cuda_compat: self.cuda_compat.or(other.cuda_compat),
            stamp: self.stamp.or(other.stamp),
            uuid: self.uuid.or(other.uuid),
            config: self.config.or(other.config),
            root: self.root.or(other.root),
            ..self
        }
    }

    /// Returns the changes for a container with the nodes for which `has` returns true.
    #[must_use]
    pub fn resolve(mut self, has: impl Fn(&ContainerPath) -> bool) -> Self {
        for (node, more) in std::mem::take(&mut self.with_node) {
            if has(&node) {
                self = self.merge(more);
            }
        }
        self
    }

    /// Returns the arguments, starting with `argv[0]`, or `None` if there is nothing to do. Paths that are not UTF-8 cannot be
    /// represented in a spec and are left out.
    #[must_use]
    pub fn to_args(&self) -> Option<Vec<String>> {
        if *self == Self::default() {
            return None;
        }
        let mut args = vec![PROGRAM.to_owned(), VERB.to_owned()];
        self.add_options(&mut args);
        for (node, more) in &self.with_node {
            let Some(node) = node.absolute().to_str().map(str::to_owned) else {
                continue;
            };
            args.extend([WITH_NODE.to_owned(), node]);
            more.add_options(&mut args);
        }
        Some(args)
    }

    fn add_options(&self, args: &mut Vec<String>) {
        let mut option = |name: &str, value: Option<String>| {
            if let Some(value) = value {
                args.extend([name.to_owned(), value]);
            }
        };
        option("--stamp", self.stamp.clone());
        option("--uuid", self.uuid.clone());
        let path = |path: &Option<HostPath>| path.as_ref()?.as_path().to_str().map(str::to_owned);
        option("--config", path(&self.config));
        option("--root", path(&self.root));
        self.features
            .names()
            .into_iter()
            .for_each(|name| option("--feature", Some(name)));
        let compat = self.cuda_compat.as_ref();
        option(
            "--cuda-compat",
            compat.map(|(driver, cuda)| format!("{driver}::{cuda}")),
        );
        for (link, text) in &self.links {
            let name = if self.required.contains(link) {
                REQUIRED_LINK
            } else {
                LINK
            };
            option(name, pair(text, &link.absolute()));
        }
        for (name, path) in &self.below {
            option("--below", pair(name, &path.absolute()));
        }
        for (arch, path) in &self.libraries {
            let name = if *arch == Arch::native() {
                "--library"
            } else {
                "--library32"
            };
            option(name, path.absolute().to_str().map(str::to_owned));
        }
        if let Some(mask) = &self.mask {
            option("--mask-proc", mask.as_path().to_str().map(str::to_owned));
        }
        for (path, source) in &self.shown {
            option("--show-proc", pair(source.as_path(), path));
        }
        for channel in &self.channels {
            let name = if channel.expected == Expected::Socket {
                "--socket"
            } else {
                "--directory"
            };
            option(name, pair(channel.root.as_path(), &channel.path));
        }
        if self.egl_devices != 0 {
            option("--egl-devices", Some(format!("{:#x}", self.egl_devices)));
        }
    }

    /// Parses arguments, without `argv[0]` and the command.
    ///
    /// # Errors
    /// If an argument is unknown or invalid.
    pub fn parse(args: Vec<OsString>) -> Result<Self> {
        Self::parse_options(args).map_err(in_our_words)
    }

    fn parse_options(args: Vec<OsString>) -> Result<Self> {
        use lexopt::Arg::Long;
        let mut parser = lexopt::Parser::from_args(args);
        let (mut edits, mut all, mut node) = (Self::default(), Self::default(), None);
        while let Some(arg) = parser.next()? {
            match arg {
                Long("with-node") => {
                    let next = container_path(&text(&mut parser)?)?;
                    all.add(node.replace(next), std::mem::take(&mut edits));
                }
                Long("stamp") => edits.stamp = Some(text(&mut parser)?),
                Long("uuid") => edits.uuid = Some(text(&mut parser)?),
                Long("config") => edits.config = Some(HostPath::new(parser.value()?)),
                Long("feature") => {
                    let name = text(&mut parser)?;
                    let feature = Feature::from_name(&name);
                    let feature = feature.with_context(|| format!("{name:?} is not a feature"))?;
                    edits.features.insert(feature);
                }
                Long("root") => edits.root = Some(HostPath::new(parser.value()?)),
                Long("cuda-compat") => edits.cuda_compat = Some(two(&mut parser)?),
                Long("link") => drop(edits.link(two(&mut parser)?)?),
                Long("required-link") => {
                    let link = edits.link(two(&mut parser)?)?;
                    edits.required.insert(link);
                }
                Long("below") => {
                    let (name, path) = two(&mut parser)?;
                    edits.below.insert(
                        container_path(&name)?.relative().to_owned(),
                        container_path(&path)?,
                    );
                }
                Long("library") => edits.library(Arch::native(), &text(&mut parser)?)?,
                Long("library32") => {
                    let arch = Arch::native().compat32();
                    let arch = arch.context("this machine has no 32-bit programs")?;
                    edits.library(arch, &text(&mut parser)?)?;
                }
                Long("mask-proc") => edits.mask = Some(HostPath::new(parser.value()?)),
                Long("show-proc") => {
                    let (source, path) = two(&mut parser)?;
                    edits.shown.insert(
                        container_path(&path)?.relative().to_owned(),
                        HostPath::new(source),
                    );
                }
                Long("socket") => edits.channel(two(&mut parser)?, Expected::Socket)?,
                // Only a directory that config.toml names is passed in this way. Other directories that users other than root can
                // replace are not given to containers.
                Long("directory") => edits.channel(two(&mut parser)?, Expected::NamedDirectory)?,
                Long("egl-devices") => edits.egl_devices = hexadecimal(&text(&mut parser)?)?,
                other => return Err(other.unexpected().into()),
            }
        }
        all.add(node, edits);
        Ok(all)
    }

    /// Adds the changes for a node, or without a node the changes for all containers.
    fn add(&mut self, node: Option<ContainerPath>, edits: Self) {
        match node {
            Some(node) => self.with_node.push((node, edits)),
            None => *self = edits,
        }
    }

    /// Adds a link, and returns its path.
    fn link(&mut self, (text, link): (String, String)) -> Result<ContainerPath> {
        let link = container_path(&link)?;
        self.links.insert(link.clone(), text.into());
        Ok(link)
    }

    fn library(&mut self, arch: Arch, path: &str) -> Result<()> {
        self.libraries.insert((arch, container_path(path)?));
        Ok(())
    }

    fn channel(&mut self, (root, path): (String, String), expected: Expected) -> Result<()> {
        let path = container_path(&path)?.absolute();
        self.channels.insert(Channel {
            root: HostPath::new(root),
            path,
            expected,
        });
        Ok(())
    }

    /// Parses the arguments of a hook entry. Returns `None` if the entry belongs to another program or is invalid.
    #[must_use]
    pub fn from_entry(args: &[String]) -> Option<Self> {
        let (start, rest) = args.split_at_checked(2)?;
        let ours = start.iter().map(String::as_str).eq([PROGRAM, VERB]);
        ours.then(|| Self::parse(rest.iter().map(OsString::from).collect()).ok())
            .flatten()
    }
}

fn pair(a: &Path, b: &Path) -> Option<String> {
    let (a, b) = (a.to_str()?, b.to_str()?);
    (!a.contains("::")).then(|| format!("{a}::{b}"))
}

/// Replaces the messages of lexopt with those of the other command lines.
fn in_our_words(error: anyhow::Error) -> anyhow::Error {
    use lexopt::Error::{MissingValue, UnexpectedArgument, UnexpectedOption, UnexpectedValue};
    match error.downcast_ref() {
        Some(MissingValue { option }) => {
            let name = option.as_deref().unwrap_or_default();
            anyhow::anyhow!("{name:?} needs a value")
        }
        Some(UnexpectedOption(name)) => anyhow::anyhow!("unknown option {name:?}"),
        Some(UnexpectedArgument(value)) => anyhow::anyhow!("unexpected argument {value:?}"),
        Some(UnexpectedValue { option, .. }) => anyhow::anyhow!("{option:?} takes no value"),
        _ => error,
    }
}

/// Returns the value of an option.
fn text(parser: &mut lexopt::Parser) -> Result<String> {
    parser
        .value()?
        .into_string()
        .map_err(|value| anyhow::anyhow!("{value:?} is not UTF-8"))
}

fn hexadecimal(value: &str) -> Result<u64> {
    let digits = value.strip_prefix("0x");
    let bits = digits.and_then(|digits| u64::from_str_radix(digits, 16).ok());
    bits.with_context(|| format!("{value:?} is not a hexadecimal number"))
}

/// Returns both parts of a value `A::B`.
fn two(parser: &mut lexopt::Parser) -> Result<(String, String)> {
    let value = text(parser)?;
    let parts = value.split_once("::").filter(|(a, _)| !a.is_empty());
    let (a, b) = parts.with_context(|| format!("{value:?} is not A::B"))?;
    Ok((a.to_owned(), b.to_owned()))
}

fn container_path(path: &str) -> Result<ContainerPath> {
    match ContainerPath::new(path) {
        Some(path) => Ok(path),
        None => bail!("{path:?} is not a path in a container"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parsed(args: &[&str]) -> Result<RootfsEdits> {
        RootfsEdits::parse(args.iter().map(OsString::from).collect())
    }

    /// The entry of a spec for a driver on the host has no option for the driver root.
    #[test]
    fn the_driver_root_of_the_entry() {
        let of = |root: &str| {
            let config = Config {
                driver_root: HostPath::new(root),
                file: Some(HostPath::new("/c")),
                ..Config::default()
            };
            RootfsEdits::of_config(&config)
        };
        let expected = RootfsEdits {
            config: Some(HostPath::new("/c")),
            ..RootfsEdits::default()
        };
        assert_eq!(of("/"), expected);
        assert_eq!(
            of("/opt/driver"),
            RootfsEdits {
                root: Some(HostPath::new("/opt/driver")),
                ..expected
            }
        );
    }

    #[test]
    fn wrong_arguments_in_our_words() {
        for (args, message) in [
            (&["--bogus"][..], "unknown option \"--bogus\""),
            (&["word"], "unexpected argument \"word\""),
            (&["--link"], "\"--link\" needs a value"),
            (&["--link", "x"], "\"x\" is not A::B"),
        ] {
            assert_eq!(parsed(args).unwrap_err().to_string(), message);
        }
    }

    #[test]
    fn wrong_arguments() {
        for args in [
            &["--link", "x"][..],
            &["--link", "::/x"],
            &["--required-link", "x::/a/../b"],
            &["--link", "x::/a/../b"],
            &["--library", "/"],
            &["--show-proc", "/x::../y"],
            &["--egl-devices", "5"],
            &["--feature", "GDS"],
            &["--with-node", "/"],
            &["--bogus"],
            &["word"],
        ] {
            assert!(parsed(args).is_err(), "{args:?}");
        }
    }

    fn name() -> impl Strategy<Value = String> {
        "[a-z][a-z0-9.]{0,6}[a-z]"
    }

    prop_compose! {
        fn flat_edits()(
            links in prop::collection::btree_map(name(), (name(), any::<bool>()), 0..4),
            libraries in prop::collection::btree_set(name(), 0..4),
            shown in prop::collection::btree_map(name(), name(), 0..4),
            mask in any::<bool>(), egl_devices in any::<u64>(), stamp in prop::option::of(name()), uuid in prop::option::of(name()),
            cuda_compat in prop::option::of((name(), name())),
            below in prop::collection::btree_map(name(), name(), 0..4),
            channels in prop::collection::btree_map(name(), any::<bool>(), 0..3),
            features in prop::collection::vec(prop::sample::select(&Feature::ALL[..]), 0..3),
            config in prop::option::of(name()), root in prop::option::of(name()),
        ) -> RootfsEdits {
            let path = |name: &String| ContainerPath::new(name).unwrap();
            RootfsEdits {
                links: links.iter().map(|(link, (text, _))| (path(link), text.into())).collect(),
                required: links.iter().filter(|(_, (_, is))| *is).map(|(link, _)| path(link)).collect(),
                libraries: libraries.iter().map(|library| (Arch::native(), path(library))).collect(),
                mask: mask.then(|| HostPath::new("/proc/driver/nvidia")),
                shown: shown.iter().map(|(path, source)| (path.into(), HostPath::new(source))).collect(),
                egl_devices,
                cuda_compat,
                below: below.iter().map(|(name, file)| (name.into(), path(file))).collect(),
                channels: channels.iter().map(|(name, is_socket)| Channel {
                    root: HostPath::new("/"),
                    path: path(name).absolute(),
                    expected: if *is_socket { Expected::Socket } else { Expected::NamedDirectory },
                }).collect(),
                stamp,
                uuid,
                features: features.into_iter().collect(),
                config: config.map(HostPath::new),
                root: root.map(HostPath::new),
                with_node: Vec::new(),
            }
        }
    }

    prop_compose! {
        fn any_edits()(
            edits in flat_edits(), with_node in prop::collection::btree_map(name(), flat_edits(), 0..3),
        ) -> RootfsEdits {
            let nodes = with_node.into_iter().map(|(node, more)| (ContainerPath::new(node).unwrap(), more));
            RootfsEdits { with_node: nodes.collect(), ..edits }
        }
    }

    proptest! {
        #[test]
        fn arguments_are_read_as_they_were_written(edits in any_edits()) {
            let again = edits.to_args().map(|args| RootfsEdits::from_entry(&args).unwrap());
            prop_assert_eq!(again.unwrap_or_default(), edits);
        }

        #[test]
        fn merging_again_changes_nothing(a in any_edits(), b in any_edits()) {
            let once = a.merge(b.clone());
            prop_assert_eq!(once.clone().merge(b), once);
        }
    }
}
