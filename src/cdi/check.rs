//! What engines make of the devices of a host, and the first reason where it is nothing. Pure.

use serde::Serialize;

use super::engine::Engine;
use super::generate::sources;
use super::registry::{self, Found, SpecFile};
use super::spec::Spec;
use super::stamp::Stamp;

/// What can be said of a device, or of a file. The names are an interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Verdict {
    /// The qualified name of the device, or the path of the file
    pub subject: String,
    /// Whether engines can use it
    pub ok: bool,
    /// Why not; if they can, what there is to know, or nothing
    pub reason: String,
    /// The command or the setting that mends it
    pub hint: String,
    /// The file that has the device
    pub file: String,
}

/// What the host is like now.
#[derive(Debug)]
pub struct Now<'a> {
    /// The engines that are installed
    pub engines: &'a [Engine],
    /// If a driver is loaded
    pub stamp: Option<&'a Stamp>,
}

/// Every file that engines do not read.
#[must_use]
pub fn files(files: &[SpecFile]) -> Vec<Verdict> {
    let broken = files.iter().filter_map(|file| Some((file, file.spec.as_ref().err()?)));
    let verdict = |(file, why): (&SpecFile, &String)| Verdict {
        subject: file.path.display().to_string(),
        ok: false,
        reason: format!("engines do not read it: {why}"),
        hint: "mend it or remove it; \"oci-nvidia-hook cdi generate\" writes a new one".to_owned(),
        file: file.path.display().to_string(),
    };
    broken.map(verdict).collect()
}

/// Every device, by name. `is_there` says whether the host has a path.
#[must_use]
pub fn devices(files: &[SpecFile], now: &Now<'_>, is_there: impl Fn(&str) -> bool) -> Vec<Verdict> {
    let verdict = |(name, found): (String, Found)| {
        let path = |number: usize| files.get(number).map(|file| file.path.display().to_string()).unwrap_or_default();
        let (file, refused) = match found {
            Found::Conflict(a, b) => {
                let reason = format!("\"{}\" and \"{}\" both have it, and engines then take neither", path(a), path(b));
                (path(a), Some((reason, format!("remove one of them: \"rm {}\"", path(a)))))
            }
            Found::In(number) => {
                let file = files.get(number);
                let spec = file.and_then(|file| file.spec.as_ref().ok());
                (path(number), spec.and_then(|spec| refused(spec, &name, now, &is_there)))
            }
        };
        let ok = refused.is_none();
        let known = || known(files.iter().find(|known| known.path.display().to_string() == file), now);
        let (reason, hint) = refused.or_else(known).unwrap_or_default();
        Verdict { subject: name, ok, reason, hint, file }
    };
    registry::resolve(files).into_iter().map(verdict).collect()
}

const REFRESH: &str = "run \"oci-nvidia-hook cdi generate\"";

/// Why no container gets the device.
fn refused(spec: &Spec, name: &str, now: &Now<'_>, is_there: &impl Fn(&str) -> bool) -> Option<(String, String)> {
    if let Some(engine) = now.engines.iter().find(|engine| engine.reads(&spec.cdi_version) == Some(false)) {
        let reason = format!("{engine} does not read cdiVersion {}", spec.cdi_version);
        let hint = format!("{REFRESH} without --additional-gids, or install a newer engine");
        return Some((reason, hint));
    }
    let loaded = Stamp::of(spec).zip(now.stamp).filter(|(made_for, now)| made_for.driver != now.driver);
    if let Some((made_for, now)) = loaded {
        let reason = format!("it is made for driver {}, but {} is loaded", made_for.driver, now.driver);
        return Some((reason, REFRESH.to_owned()));
    }
    let device = registry::device(spec, name)?;
    let alone =
        Spec { devices: vec![device.clone()], container_edits: spec.container_edits.clone(), ..Spec::default() };
    let gone: Vec<_> = sources(&alone).into_iter().filter(|path| !is_there(path)).map(str::to_owned).collect();
    let first = gone.first()?;
    let more = if gone.len() > 1 { format!(" and {} more", gone.len() - 1) } else { String::new() };
    Some((format!("{first:?}{more} of the host is gone"), REFRESH.to_owned()))
}

/// What else there is to know of it.
fn known(file: Option<&SpecFile>, now: &Now<'_>) -> Option<(String, String)> {
    let file = file?;
    if !file.for_everybody {
        let path = file.path.display();
        return Some(("rootless Podman cannot read the file".to_owned(), format!("run \"chmod 644 {path}\"")));
    }
    let spec = file.spec.as_ref().ok()?;
    let unsure = now.engines.iter().find(|engine| engine.reads(&spec.cdi_version).is_none())?;
    let version = &spec.cdi_version;
    Some((format!("it is not known whether {unsure} reads cdiVersion {version}"), String::new()))
}

/// A file because of which engines do not take the devices of `ours`: one that is more important, or as important.
#[must_use]
pub fn in_the_way(files: &[SpecFile], ours: usize) -> Option<&SpecFile> {
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
#[must_use]
pub fn unknown(name: &str, known: &[Verdict]) -> Verdict {
    let ends = |known: &&Verdict| {
        let device = known.subject.split_once('=').map_or("", |(_, device)| device);
        device == name || format!("gpu{device}") == name.rsplit('=').next().unwrap_or_default()
    };
    let same_kind = |known: &&Verdict| known.subject.split('=').next() == name.split('=').next();
    let names: Vec<_> = known.iter().filter(same_kind).map(|known| known.subject.as_str()).collect();
    let hint = match known.iter().find(ends) {
        Some(known) => format!("did you mean {}?", known.subject),
        None if names.is_empty() => REFRESH.to_owned(),
        None => format!("ask for one of {}", names.join(", ")),
    };
    let reason = "no spec has it".to_owned();
    Verdict { subject: name.to_owned(), ok: false, reason, hint, file: String::new() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cdi::engine::Kind;
    use crate::cdi::spec::{ContainerEdits, Device, Mount};
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

    fn judged(files: &[SpecFile], engines: &[Engine], gone: &[&str]) -> Vec<(bool, String)> {
        let now = Now { engines, stamp: None };
        let verdicts = devices(files, &now, |path| !gone.contains(&path));
        verdicts.into_iter().map(|verdict| (verdict.ok, verdict.reason)).collect()
    }

    #[test]
    fn the_first_reason() {
        let one = || file("/etc/cdi/x.yaml", 0, "0.5.0");
        let podman = |version| Engine { kind: Kind::Podman, version };
        let good = (true, String::new());
        assert_eq!(judged(&[one()], &[podman((4, 3))], &[]), [good.clone(), good.clone()]);
        for (files, engine, gone, says) in [
            (vec![one()], (4, 2), &[][..], "Podman 4.2 does not read cdiVersion 0.5.0"),
            (vec![one()], (4, 3), &["/common", "/a"], "\"/a\" and 1 more of the host is gone"),
            (vec![one(), file("/etc/cdi/y.yaml", 0, "0.5.0")], (4, 3), &[], "both have it"),
        ] {
            let (ok, why) = judged(&files, &[podman(engine)], gone).remove(0);
            assert!(!ok && why.contains(says), "{why}");
        }
        assert_eq!(judged(&[one()], &[], &["/b"]).iter().filter(|(ok, _)| *ok).count(), 1, "only all has /b");
        let winner = [one(), file("/var/run/cdi/y.yaml", 1, "0.5.0")];
        assert_eq!(judged(&winner, &[], &[]), [good.clone(), good]);
        let hidden = SpecFile { for_everybody: false, ..one() };
        assert_eq!(judged(&[hidden], &[], &[])[0], (true, "rootless Podman cannot read the file".to_owned()));
        assert!(judged(&[file("/x", 0, "0.6.0")], &[podman((4, 9))], &[])[0].1.starts_with("it is not known"));
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
        let known = devices(&[file("/x.yaml", 0, "0.5.0")], &Now { engines: &[], stamp: None }, |_| true);
        for (name, hint) in [
            ("nvidia.com/gpu=gpu0", "did you mean nvidia.com/gpu=0?"),
            ("all", "did you mean nvidia.com/gpu=all?"),
            ("nvidia.com/gpu=7", "ask for one of nvidia.com/gpu=0, nvidia.com/gpu=all"),
            ("amd.com/gpu=7", "run \"oci-nvidia-hook cdi generate\""),
        ] {
            assert_eq!(unknown(name, &known).hint, hint);
        }
    }
}
