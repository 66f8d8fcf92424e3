//! What is left to do in a container whose engine mounts the driver's files and makes its nodes: links, the linker cache,
//! the mask of /proc/driver/nvidia. Written as the arguments of a hook entry, and read from them. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::live::{self, CacheEntry, RootfsFacts, Step};
use crate::driver::ipc::Expected;
use crate::driver::ldcache::Arch;
use crate::edits::{Channel, Need, ProcMask};
use crate::paths::{ContainerPath, HostPath};

/// The verb of the hook entry.
pub const VERB: &str = "rootfs";
const OUTSIDE: &str = "--outside";
/// The program's own name, `argv[0]` of the hook entry.
pub const PROGRAM: &str = "oci-nvidia-hook";

/// What is left to do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RootfsEdits {
    /// Called at createRuntime, outside of the container's namespaces; else at createContainer, in them, as by specs that
    /// were written before
    pub outside: bool,
    /// Links by their path, with their text
    pub links: BTreeMap<ContainerPath, PathBuf>,
    /// Files and links that programs open by path below the directory of libraries: name below it, and where they are
    pub below: BTreeMap<PathBuf, ContainerPath>,
    /// Libraries for the linker cache, each by the path that ends in its SONAME
    pub libraries: BTreeSet<(Arch, ContainerPath)>,
    /// The host's /proc/driver/nvidia, if the container's is to be masked
    pub mask: Option<HostPath>,
    /// What of the host's stays to be seen: path below /proc/driver/nvidia, and source
    pub shown: BTreeMap<PathBuf, HostPath>,
    /// Daemons of the host's that an engine must not mount by their path
    pub channels: BTreeSet<Channel>,
    /// As in [`crate::edits::Edits::egl_devices`]
    pub egl_devices: u64,
    /// The versions of the driver and of CUDA, if an image's newer libcuda may be used with them
    pub cuda_compat: Option<(String, String)>,
    /// What the spec was made from; nothing is done with it in a container
    pub stamp: Option<String>,
}

impl RootfsEdits {
    /// Both together.
    #[must_use]
    pub fn merge(mut self, other: Self) -> Self {
        self.links.extend(other.links);
        self.below.extend(other.below);
        self.libraries.extend(other.libraries);
        self.shown.extend(other.shown);
        self.channels.extend(other.channels);
        Self {
            outside: self.outside || other.outside,
            mask: self.mask.or(other.mask),
            egl_devices: self.egl_devices | other.egl_devices,
            cuda_compat: self.cuda_compat.or(other.cuda_compat),
            stamp: self.stamp.or(other.stamp),
            ..self
        }
    }

    /// The arguments, `argv[0]` first; `None` if there is nothing to do. What is not UTF-8 cannot be written in a spec and
    /// is left out.
    #[must_use]
    pub fn to_args(&self) -> Option<Vec<String>> {
        if *self == Self::default() {
            return None;
        }
        let mut args = vec![PROGRAM.to_owned(), VERB.to_owned()];
        let mut option = |name: &str, value: Option<String>| {
            if let Some(value) = value {
                args.extend([name.to_owned(), value]);
            }
        };
        option("--stamp", self.stamp.clone());
        let compat = self.cuda_compat.as_ref();
        option("--cuda-compat", compat.map(|(driver, cuda)| format!("{driver}::{cuda}")));
        for (link, text) in &self.links {
            option("--link", pair(text, &link.absolute()));
        }
        for (name, path) in &self.below {
            option("--below", pair(name, &path.absolute()));
        }
        for (arch, path) in &self.libraries {
            let name = if *arch == Arch::native() { "--library" } else { "--library32" };
            option(name, path.absolute().to_str().map(str::to_owned));
        }
        if let Some(mask) = &self.mask {
            option("--mask-proc", mask.as_path().to_str().map(str::to_owned));
        }
        for (path, source) in &self.shown {
            option("--show-proc", pair(source.as_path(), path));
        }
        for channel in &self.channels {
            let name = if channel.expected == Expected::Socket { "--socket" } else { "--directory" };
            option(name, pair(channel.root.as_path(), &channel.path));
        }
        if self.egl_devices != 0 {
            option("--egl-devices", Some(format!("{:#x}", self.egl_devices)));
        }
        args.extend(self.outside.then(|| OUTSIDE.to_owned()));
        Some(args)
    }

    /// Reads arguments, without `argv[0]` and the verb.
    ///
    /// # Errors
    /// If one is unknown or wrong.
    pub fn parse(args: Vec<OsString>) -> Result<Self> {
        use lexopt::Arg::Long;
        let mut parser = lexopt::Parser::from_args(args);
        let mut edits = Self::default();
        while let Some(arg) = parser.next()? {
            match arg {
                Long("outside") => edits.outside = true,
                Long("stamp") => edits.stamp = Some(text(parser.value()?)?),
                Long("cuda-compat") => {
                    let value = text(parser.value()?)?;
                    let (driver, cuda) = split(&value)?;
                    edits.cuda_compat = Some((driver.to_owned(), cuda.to_owned()));
                }
                Long("link") => {
                    let value = text(parser.value()?)?;
                    let (text, link) = split(&value)?;
                    edits.links.insert(container_path(link)?, text.into());
                }
                Long("below") => {
                    let value = text(parser.value()?)?;
                    let (name, path) = split(&value)?;
                    edits.below.insert(container_path(name)?.relative().to_owned(), container_path(path)?);
                }
                Long("library") => {
                    edits.libraries.insert((Arch::native(), container_path(&text(parser.value()?)?)?));
                }
                Long("library32") => {
                    let arch = Arch::native().compat32().context("this machine has no 32-bit programs")?;
                    edits.libraries.insert((arch, container_path(&text(parser.value()?)?)?));
                }
                Long("mask-proc") => edits.mask = Some(HostPath::new(parser.value()?)),
                Long("show-proc") => {
                    let value = text(parser.value()?)?;
                    let (source, path) = split(&value)?;
                    let path = container_path(path)?.relative().to_owned();
                    edits.shown.insert(path, HostPath::new(source));
                }
                Long("socket") => edits.channel(parser.value()?, Expected::Socket)?,
                // Only one that the administrator named can be where others may write.
                Long("directory") => edits.channel(parser.value()?, Expected::NamedDirectory)?,
                Long("egl-devices") => {
                    let value = text(parser.value()?)?;
                    let bits = value.strip_prefix("0x").and_then(|digits| u64::from_str_radix(digits, 16).ok());
                    edits.egl_devices = bits.with_context(|| format!("{value:?} is no hexadecimal number"))?;
                }
                other => return Err(other.unexpected().into()),
            }
        }
        Ok(edits)
    }

    fn channel(&mut self, value: OsString, expected: Expected) -> Result<()> {
        let value = text(value)?;
        let (root, path) = split(&value)?;
        let path = container_path(path)?.absolute();
        self.channels.insert(Channel { root: HostPath::new(root), path, expected });
        Ok(())
    }

    /// Reads the arguments of a hook entry; `None` if it is none of ours, or cannot be read.
    #[must_use]
    pub fn of_entry(args: &[String]) -> Option<Self> {
        let (start, rest) = args.split_at_checked(2)?;
        let ours = start.iter().map(String::as_str).eq([PROGRAM, VERB]);
        ours.then(|| Self::parse(rest.iter().map(OsString::from).collect()).ok()).flatten()
    }

    /// The steps, in the order in which they must be taken. `proc_files` is what the files of `mask` have in them.
    #[must_use]
    pub fn steps(&self, facts: RootfsFacts, proc_files: Vec<(OsString, Vec<u8>)>) -> Vec<Step> {
        let links = self.links.iter().map(|(link, text)| Step::Link {
            link: link.clone(),
            text: text.clone().into(),
            file: self.file_of(link),
            need: Need::Optional,
        });
        let mut steps: Vec<_> = links.collect();
        let libraries = ContainerPath::new(live::library_dir(facts, Arch::native()));
        for (name, path) in &self.below {
            // Where the image looks; that is where the host has them, if both are alike.
            let link = libraries.as_ref().and_then(|dir| dir.join(name)).filter(|link| link != path);
            let text = path.absolute().into();
            steps.extend(link.map(|link| Step::Link { link, text, file: self.file_of(path), need: Need::Optional }));
        }
        steps.extend(self.channels.iter().filter_map(|channel| {
            let below = channel.path.strip_prefix("/").unwrap_or(&channel.path);
            let source = HostPath::new(channel.root.as_path().join(below));
            Some(Step::MountIpc { channel: channel.clone(), source, target: ContainerPath::new(&channel.path)? })
        }));
        if self.mask.is_some() {
            let mounts = self.shown.iter().map(|(path, source)| (path.clone(), source.clone())).collect();
            steps.push(Step::MaskProc(ProcMask { files: proc_files, mounts }));
        }
        steps.extend(live::egl_profile(self.egl_devices));
        let entries = self.libraries.iter().map(|(arch, path)| CacheEntry {
            soname: path.file_name().to_owned(),
            path: path.clone(),
            arch: *arch,
        });
        steps.extend(live::linker_steps(entries.collect(), facts));
        steps
    }

    /// The file that a link leads to, by way of our other links.
    fn file_of(&self, link: &ContainerPath) -> ContainerPath {
        let mut file = link.clone();
        // A chain is libcuda.so, libcuda.so.1, libcuda.so.535; the limit is for one that bites its tail.
        for _ in 0..8 {
            let Some(next) = self.links.get(&file).and_then(|text| beside(&file, text)) else { break };
            file = next;
        }
        file
    }
}

/// What a link's text means, as far as that can be said without looking.
fn beside(link: &ContainerPath, text: &Path) -> Option<ContainerPath> {
    let mut dir = link.parent();
    let mut rest = text;
    while let Ok(more) = rest.strip_prefix("..") {
        dir = dir?.parent();
        rest = more;
    }
    dir?.join(rest)
}

fn pair(a: &Path, b: &Path) -> Option<String> {
    let (a, b) = (a.to_str()?, b.to_str()?);
    (!a.contains("::")).then(|| format!("{a}::{b}"))
}

fn split(value: &str) -> Result<(&str, &str)> {
    value.split_once("::").filter(|(a, _)| !a.is_empty()).with_context(|| format!("{value:?} is not A::B"))
}

fn text(value: OsString) -> Result<String> {
    value.into_string().map_err(|value| anyhow::anyhow!("{value:?} is not UTF-8"))
}

fn container_path(path: &str) -> Result<ContainerPath> {
    match ContainerPath::new(path) {
        Some(path) => Ok(path),
        None => bail!("{path:?} is no path in a container"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parsed(args: &[&str]) -> Result<RootfsEdits> {
        RootfsEdits::parse(args.iter().map(OsString::from).collect())
    }

    const ARGS: [&str; 14] = [
        "--link",
        "libcuda.so.1::/usr/lib64/libcuda.so",
        "--link",
        "libcuda.so.535::/usr/lib64/libcuda.so.1",
        "--link",
        "../libcuda.so.1::/usr/lib64/gbm/x.so",
        "--library",
        "/usr/lib64/libcuda.so.1",
        "--mask-proc",
        "/proc/driver/nvidia",
        "--show-proc",
        "/proc/driver/nvidia/gpus/0000:01:00.0::gpus/0000:01:00.0",
        "--egl-devices",
        "0x5",
    ];

    #[test]
    fn steps_of_arguments() {
        let edits = parsed(&ARGS).unwrap();
        let files = vec![("params".into(), b"x".to_vec())];
        let steps = edits.steps(RootfsFacts::default(), files.clone());
        let texts: Vec<_> = steps.iter().map(ToString::to_string).collect();
        assert_eq!(
            texts,
            [
                "link \"/usr/lib64/gbm/x.so\" to \"../libcuda.so.1\" in the container",
                "link \"/usr/lib64/libcuda.so\" to \"libcuda.so.1\" in the container",
                "link \"/usr/lib64/libcuda.so.1\" to \"libcuda.so.535\" in the container",
                "mask \"/proc/driver/nvidia\" in the container",
                "mount a directory of ours at \"/etc/nvidia/nvidia-application-profiles-rc.d\" in the container",
                "update \"/etc/ld.so.cache\" in the container",
            ]
        );
        for step in &steps {
            match step {
                Step::Link { file, .. } => assert_eq!(file.absolute(), Path::new("/usr/lib64/libcuda.so.535")),
                Step::MaskProc(mask) => assert_eq!((&mask.files, mask.mounts.len()), (&files, 1)),
                _ => {}
            }
        }
    }

    #[test]
    fn what_programs_open_by_path_is_where_the_image_looks() {
        let edits =
            parsed(&["--below", "vdpau/x.so.1::/usr/lib64/vdpau/x.so.1", "--link", "x.so.5::/usr/lib64/vdpau/x.so.1"]);
        let steps = |debian| edits.as_ref().unwrap().steps(RootfsFacts { debian, ..RootfsFacts::default() }, vec![]);
        assert_eq!(steps(false).len(), 1, "alike");
        let dir = live::library_dir(RootfsFacts { debian: true, ..RootfsFacts::default() }, Arch::native());
        let link = ContainerPath::new(dir).unwrap().join("vdpau/x.so.1").unwrap();
        let text = "/usr/lib64/vdpau/x.so.1".into();
        let file = ContainerPath::new("/usr/lib64/vdpau/x.so.5").unwrap();
        assert_eq!(steps(true)[1], Step::Link { link, text, file, need: Need::Optional });
    }

    #[test]
    fn wrong_arguments() {
        for args in [
            &["--link", "x"][..],
            &["--link", "::/x"],
            &["--link", "x::/a/../b"],
            &["--library", "/"],
            &["--show-proc", "/x::../y"],
            &["--egl-devices", "5"],
            &["--bogus"],
            &["word"],
        ] {
            assert!(parsed(args).is_err(), "{args:?}");
        }
    }

    #[test]
    fn links_in_a_circle_end() {
        let edits = parsed(&["--link", "b::/a", "--link", "a::/b"]).unwrap();
        assert_eq!(edits.steps(RootfsFacts::default(), vec![]).len(), 2);
    }

    fn name() -> impl Strategy<Value = String> {
        "[a-z][a-z0-9.]{0,6}[a-z]"
    }

    prop_compose! {
        fn any_edits()(
            links in prop::collection::btree_map(name(), name(), 0..4),
            libraries in prop::collection::btree_set(name(), 0..4),
            shown in prop::collection::btree_map(name(), name(), 0..4),
            mask in any::<bool>(), egl_devices in any::<u64>(), stamp in prop::option::of(name()),
            cuda_compat in prop::option::of((name(), name())), outside in any::<bool>(),
            below in prop::collection::btree_map(name(), name(), 0..4),
            channels in prop::collection::btree_map(name(), any::<bool>(), 0..3),
        ) -> RootfsEdits {
            let path = |name: &String| ContainerPath::new(name).unwrap();
            RootfsEdits {
                outside,
                links: links.iter().map(|(link, text)| (path(link), text.into())).collect(),
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
            }
        }
    }

    proptest! {
        #[test]
        fn arguments_are_read_as_they_were_written(edits in any_edits()) {
            let again = edits.to_args().map(|args| RootfsEdits::of_entry(&args).unwrap());
            prop_assert_eq!(again.unwrap_or_default(), edits);
        }

        #[test]
        fn merging_again_changes_nothing(a in any_edits(), b in any_edits()) {
            let once = a.merge(b.clone());
            prop_assert_eq!(once.clone().merge(b), once);
        }
    }
}
