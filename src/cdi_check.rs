//! What engines make of the devices of a host, and the first reason where it is nothing. Pure.

use std::path::Path;

use serde::Serialize;

use cdi_spec::file::Format;
use cdi_spec::registry::{self, Found, SpecFile};
use cdi_spec::spec::Spec;
use nvidia_host::cdi::entry::RootfsEdits;
use nvidia_host::cdi::generate::sources;
use nvidia_host::cdi::stamp::Stamp;

use crate::engine::cdi::Reader;

/// What can be said of a device, or of a file. The names are an interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Verdict {
    /// The qualified name of the device, or the path of the file
    pub subject: String,
    pub ok: bool,
    /// Why not; if they can, what there is to know, or nothing
    pub reason: String,
    /// The command or the setting that fixes it
    pub hint: String,
    /// The file that has the device
    pub file: String,
    /// Whether this program wrote that file
    pub ours: bool,
    /// The engines that cannot use it, where others can
    pub unread_by: Vec<String>,
    /// Whether only root can use it, as others cannot read the file
    #[serde(skip)]
    pub root_only: bool,
}

/// What the host is like now.
#[derive(Debug)]
pub(crate) struct Now<'a> {
    pub readers: &'a [Reader],
    /// If a driver is loaded
    pub stamp: Option<&'a Stamp>,
}

impl Verdict {
    /// Engines can use it, until a reason against that is found.
    fn of(subject: impl Into<String>, file: impl Into<String>) -> Self {
        Self {
            subject: subject.into(),
            ok: true,
            reason: String::new(),
            hint: String::new(),
            file: file.into(),
            ours: false,
            unread_by: Vec::new(),
            root_only: false,
        }
    }

    fn useless(self, reason: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { ok: false, reason: reason.into(), hint: hint.into(), ..self }
    }
}

const REFRESH: &str = "run \"oci-nvidia-hook cdi generate\"";

/// The hint that replaces this file. A new spec in /var/run/cdi would hide an old one in /etc/cdi only until the next boot.
fn rewrite(file: &str) -> String {
    if Path::new(file) == nvidia_host::cdi::default_path(Format::Yaml) {
        return REFRESH.to_owned();
    }
    format!("run \"oci-nvidia-hook cdi generate --output {file}\"")
}

/// Whether this program wrote the spec: each spec of ours has one of our hook entries.
pub(crate) fn is_ours(spec: &Spec) -> bool {
    spec.container_edits.hooks.iter().any(|hook| RootfsEdits::of_entry(&hook.args).is_some())
}

/// Every file that engines do not read.
pub(crate) fn files(files: &[SpecFile]) -> Vec<Verdict> {
    let mut verdicts = Vec::new();
    for file in files {
        let Err(why) = &file.spec else { continue };
        let path = file.path.display().to_string();
        // This name is ours and NVIDIA's: whichever program wrote the file, a new spec replaces it.
        let ours = file.path.file_stem().is_some_and(|stem| stem == nvidia_host::cdi::DEFAULT_NAME);
        let hint = if ours { rewrite(&path) } else { format!("fix it, or remove it: \"rm {path}\"") };
        let verdict = Verdict::of(path.clone(), path).useless(format!("engines do not read it: {why}"), hint);
        verdicts.push(Verdict { ours, ..verdict });
    }
    verdicts
}

/// Every device, by name. `is_there` says whether the host has a path.
pub(crate) fn devices(files: &[SpecFile], now: &Now<'_>, is_there: impl Fn(&str) -> bool) -> Vec<Verdict> {
    let path = |number: usize| files.get(number).map(|file| file.path.display().to_string()).unwrap_or_default();
    let mut verdicts = Vec::new();
    for (name, found) in registry::resolve(files) {
        verdicts.push(match found {
            Found::Conflict(a, b) => {
                let (a, b) = (path(a), path(b));
                let reason = format!("\"{a}\" and \"{b}\" both have it, and engines then take neither");
                let hint = format!("remove one of them: \"rm {a}\"");
                Verdict::of(name, a).useless(reason, hint)
            }
            Found::In(number) => match files.get(number) {
                Some(file) => of_device(file, name, now, &is_there),
                None => unknown(&name, &[]),
            },
        });
    }
    verdicts
}

fn of_device(file: &SpecFile, name: String, now: &Now<'_>, is_there: &impl Fn(&str) -> bool) -> Verdict {
    let mut verdict = Verdict::of(name, file.path.display().to_string());
    let Ok(spec) = &file.spec else { return verdict };
    verdict.ours = is_ours(spec);
    // What is wrong for all engines comes first: a newer engine would not help.
    if let Some((reason, hint)) = stale(spec, &verdict, now, is_there) {
        return verdict.useless(reason, hint);
    }
    let unread: Vec<_> = now.readers.iter().filter(|reader| reader.reads(&spec.cdi_version) == Some(false)).collect();
    if let Some(reader) = unread.first() {
        // One that is not ours may be for one engine only, and we cannot write another one.
        verdict.ok = !verdict.ours && unread.len() < now.readers.len();
        verdict.reason = format!("{reader} does not read cdiVersion {}", spec.cdi_version);
        verdict.hint = match verdict.ours {
            true => format!("{REFRESH} with --no-additional-gids, or install a newer version of {}", reader.kind),
            false => format!("install a newer version of {}; another program wrote {}", reader.kind, verdict.file),
        };
        if unread.len() < now.readers.len() {
            verdict.unread_by = unread.iter().map(ToString::to_string).collect();
        }
        return verdict;
    }
    verdict.root_only = !file.for_everybody;
    (verdict.reason, verdict.hint) = known(file, spec, now).unwrap_or_default();
    verdict
}

/// Why no container gets the device, whichever engine starts it.
fn stale(spec: &Spec, verdict: &Verdict, now: &Now<'_>, is_there: &impl Fn(&str) -> bool) -> Option<(String, String)> {
    let device = registry::device(spec, &verdict.subject)?;
    let alone =
        Spec { devices: vec![device.clone()], container_edits: spec.container_edits.clone(), ..Spec::default() };
    if let Some((made_for, now)) = Stamp::from_spec(spec).zip(now.stamp) {
        if made_for.driver != now.driver {
            let reason = format!("{:?} is for driver {}, but {} is loaded", verdict.file, made_for.driver, now.driver);
            return Some((reason, rewrite(&verdict.file)));
        }
        // Whole GPUs of that spec are as they were.
        let uses_mig = sources(&alone).iter().any(|path| path.contains("/nvidia-caps/"));
        if uses_mig && made_for.has_other_mig_devices(now) {
            let reason = format!("{:?} is for MIG devices that do not exist any more", verdict.file);
            return Some((reason, rewrite(&verdict.file)));
        }
    }
    let gone: Vec<_> = sources(&alone).into_iter().filter(|path| !is_there(path)).map(str::to_owned).collect();
    let first = gone.first()?;
    let more = if gone.len() > 1 { format!(" and {} more", gone.len() - 1) } else { String::new() };
    let hint = if verdict.ours { rewrite(&verdict.file) } else { hint_for_others(first, &verdict.file) };
    Some((format!("{first:?}{more} of the host is gone"), hint))
}

/// Of a spec that another program wrote, and that we cannot write anew.
fn hint_for_others(gone: &str, file: &str) -> String {
    let program = Path::new(gone).file_name().and_then(|name| name.to_str()).unwrap_or_default();
    match program {
        "nvidia-ctk" | "nvidia-cdi-hook" => {
            format!("install oci-nvidia-hook-compat, which has {program}, or remove {file}")
        }
        _ => format!("run the program that wrote {file} again, or remove the file"),
    }
}

/// What else there is to know of it.
fn known(file: &SpecFile, spec: &Spec, now: &Now<'_>) -> Option<(String, String)> {
    if !file.for_everybody {
        let path = file.path.display();
        return Some(("rootless Podman cannot read the file".to_owned(), format!("run \"chmod 644 {path}\"")));
    }
    let unsure = now.readers.iter().find(|reader| reader.reads(&spec.cdi_version).is_none())?;
    let version = &spec.cdi_version;
    Some((format!("it is not known whether {unsure} reads cdiVersion {version}"), String::new()))
}

/// A file because of which engines do not take the devices of `ours`: one that is more important, or as important.
pub(crate) fn in_the_way(files: &[SpecFile], ours: usize) -> Option<&SpecFile> {
    let spec = files.get(ours)?.spec.as_ref().ok()?;
    let found = registry::resolve(files);
    let names = spec.devices.iter().map(|device| format!("{}={}", spec.kind, device.name));
    let others = names.filter_map(|name| match found.get(&name)? {
        Found::In(other) if *other == ours => None,
        Found::In(other) => Some(*other),
        Found::Conflict(a, b) if *a == ours => Some(*b),
        Found::Conflict(a, _) => Some(*a),
    });
    files.get(others.min()?)
}

/// For a name that nobody has: the reason, with what there is.
pub(crate) fn unknown(name: &str, known: &[Verdict]) -> Verdict {
    let names = known.iter().map(|known| known.subject.as_str());
    let similar = names.clone().find(|known| is_similar(known, name));
    let names: Vec<_> = names.filter(|known| known.split('=').next() == name.split('=').next()).collect();
    let is_nvidias = name.starts_with("nvidia.com/") || !name.contains('/');
    let hint = match similar {
        Some(similar) => format!("did you mean {similar}?"),
        None if names.is_empty() && is_nvidias => REFRESH.to_owned(),
        None if names.is_empty() => "specs of another vendor are written by that vendor's program".to_owned(),
        None => format!("ask for one of {}", names.join(", ")),
    };
    Verdict::of(name, "").useless("no spec has it", hint)
}

/// Whether `asked` is a short form of the qualified name `known`, such as `gpu=0`, which engines do not know. A name with a vendor
/// means that vendor.
fn is_similar(known: &str, asked: &str) -> bool {
    let device = known.split_once('=').map_or("", |(_, device)| device);
    let asked_device = asked.rsplit('=').next().unwrap_or_default();
    !asked.contains('/') && device == asked_device || format!("gpu{device}") == asked_device
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{Kind, Version};
    use cdi_spec::spec::{ContainerEdits, Device, Hook, Mount};
    use std::path::PathBuf;

    fn file(path: &str, priority: usize, version: &str) -> SpecFile {
        let mount = |path: &str| Mount { host_path: path.into(), container_path: path.into(), ..Mount::default() };
        let edits = |paths: &[&str]| ContainerEdits {
            mounts: paths.iter().map(|path| mount(path)).collect(),
            ..ContainerEdits::default()
        };
        let devices = ["0", "all"].map(|name| Device {
            name: name.into(),
            container_edits: edits(if name == "all" { &["/a", "/b"] } else { &["/a"] }),
            ..Device::default()
        });
        let spec = Spec {
            cdi_version: version.into(),
            kind: "nvidia.com/gpu".into(),
            devices: devices.into(),
            container_edits: edits(&["/common"]),
            ..Spec::default()
        };
        SpecFile { path: PathBuf::from(path), priority, for_everybody: true, spec: Ok(spec) }
    }

    fn judged(files: &[SpecFile], readers: &[Reader], gone: &[&str]) -> Vec<(bool, String)> {
        let now = Now { readers, stamp: None };
        let verdicts = devices(files, &now, |path| !gone.contains(&path));
        verdicts.into_iter().map(|verdict| (verdict.ok, verdict.reason)).collect()
    }

    fn podman(minor: u32) -> Reader {
        Reader { kind: Kind::Podman, version: Some(Version(4, minor, 0)) }
    }

    fn crio(minor: u32) -> Reader {
        Reader { kind: Kind::Crio, version: Some(Version(1, minor, 0)) }
    }

    #[test]
    fn the_first_reason() {
        let one = || file("/etc/cdi/x.yaml", 0, "0.5.0");
        let good = (true, String::new());
        assert_eq!(judged(&[one()], &[podman(3)], &[]), [good.clone(), good.clone()]);
        for (files, engine, gone, says) in [
            (vec![one()], 2, &[][..], "Podman as root (4.2.0) does not read cdiVersion 0.5.0"),
            (vec![one()], 3, &["/common", "/a"], "\"/a\" and 1 more of the host is gone"),
            // No engine could use it, however new: that comes first.
            (vec![one()], 2, &["/common", "/a"], "\"/a\" and 1 more of the host is gone"),
            (vec![one(), file("/etc/cdi/y.yaml", 0, "0.5.0")], 3, &[], "both have it"),
        ] {
            let (ok, why) = judged(&files, &[podman(engine)], gone).remove(0);
            assert!(!ok && why.contains(says), "{why}");
        }
        assert_eq!(judged(&[one()], &[], &["/b"]).iter().filter(|(ok, _)| *ok).count(), 1, "only all has /b");
        let winner = [one(), file("/var/run/cdi/y.yaml", 1, "0.5.0")];
        assert_eq!(judged(&winner, &[], &[]), [good.clone(), good]);
        let hidden = SpecFile { for_everybody: false, ..one() };
        assert_eq!(judged(&[hidden], &[], &[])[0], (true, "rootless Podman cannot read the file".to_owned()));
        assert!(judged(&[file("/x", 0, "0.6.0")], &[podman(9)], &[])[0].1.starts_with("it is not known"));
    }

    /// One that another program wrote for CRI-O is not wrong because there is an old Podman too, and we cannot fix it.
    #[test]
    fn specs_of_other_programs() {
        let readers = [podman(3), crio(37)];
        let judge = |spec: &SpecFile, readers: &[Reader], gone: &str| {
            let now = Now { readers, stamp: None };
            devices(std::slice::from_ref(spec), &now, |path| path != gone).remove(0)
        };
        let theirs = file("/var/run/cdi/theirs.json", 0, "0.7.0");
        let verdict = judge(&theirs, &readers, "");
        assert!(verdict.ok && !verdict.ours && verdict.unread_by == ["Podman as root (4.3.0)"], "{verdict:?}");
        assert!(!verdict.hint.contains("cdi generate"), "{verdict:?}");
        let verdict = judge(&theirs, &readers[..1], "");
        assert!(!verdict.ok && verdict.unread_by.is_empty(), "no engine reads it: {verdict:?}");
        let mut with_hook = theirs;
        let Ok(spec) = &mut with_hook.spec else { unreachable!() };
        spec.container_edits.hooks = vec![Hook { path: "/usr/bin/nvidia-ctk".into(), ..Hook::default() }];
        let verdict = judge(&with_hook, &readers, "/usr/bin/nvidia-ctk");
        assert_eq!(verdict.reason, "\"/usr/bin/nvidia-ctk\" of the host is gone");
        assert!(
            !verdict.ok && verdict.hint.starts_with("install oci-nvidia-hook-compat, which has nvidia-ctk, or"),
            "{verdict:?}"
        );
        let verdict = judge(&with_hook, &readers, "/a");
        assert_eq!(verdict.hint, "run the program that wrote /var/run/cdi/theirs.json again, or remove the file");
        // Ours is for all engines of this host.
        let Ok(spec) = &mut with_hook.spec else { unreachable!() };
        let edits = RootfsEdits { stamp: Some("driver=1,boot=b,host=7".into()), ..RootfsEdits::default() };
        spec.container_edits.hooks =
            vec![Hook { path: "/hook".into(), args: edits.to_args().unwrap(), ..Hook::default() }];
        let verdict = judge(&with_hook, &readers, "");
        assert!(!verdict.ok && verdict.ours && verdict.hint.starts_with(REFRESH), "{verdict:?}");
        assert_eq!(verdict.unread_by, ["Podman as root (4.3.0)"]);
    }

    /// A spec in /etc/cdi outlives a reboot; one that hides it in /var/run/cdi does not.
    #[test]
    fn a_spec_is_replaced_at_its_place() {
        assert_eq!(rewrite("/var/run/cdi/nvidia.yaml"), "run \"oci-nvidia-hook cdi generate\"");
        assert_eq!(rewrite("/etc/cdi/n.json"), "run \"oci-nvidia-hook cdi generate --output /etc/cdi/n.json\"");
    }

    #[test]
    fn what_is_in_the_way() {
        let files = |priorities: &[usize]| -> Vec<_> {
            priorities.iter().map(|priority| file("/x.yaml", *priority, "0.5.0")).collect()
        };
        for (priorities, ours, other) in [
            (&[0, 1][..], 1, None),
            (&[0, 1], 0, Some(1)),
            (&[1, 1], 0, Some(1)),
            (&[1, 1], 1, Some(0)),
            // a conflict of others stays one
            (&[0, 0, 1], 2, Some(0)),
        ] {
            let files = files(priorities);
            let found = in_the_way(&files, ours).map(std::ptr::from_ref);
            assert_eq!(found, other.map(|other: usize| std::ptr::from_ref(&files[other])), "{priorities:?} {ours}");
        }
    }

    #[test]
    fn an_unknown_name_gets_a_suggestion() {
        let known = devices(&[file("/x.yaml", 0, "0.5.0")], &Now { readers: &[], stamp: None }, |_| true);
        for (name, hint) in [
            ("nvidia.com/gpu=gpu0", "did you mean nvidia.com/gpu=0?"),
            ("all", "did you mean nvidia.com/gpu=all?"),
            ("gpu=0", "did you mean nvidia.com/gpu=0?"),
            ("gpu=7", "run \"oci-nvidia-hook cdi generate\""),
            ("nvidia.com/gpu=7", "ask for one of nvidia.com/gpu=0, nvidia.com/gpu=all"),
            ("nvidia.com/x=7", "run \"oci-nvidia-hook cdi generate\""),
            ("amd.com/gpu=7", "specs of another vendor are written by that vendor's program"),
        ] {
            assert_eq!(unknown(name, &known).hint, hint);
        }
    }
}
