//! `cdi list` and `cdi check`: the devices of all specs, and whether engines can use them.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use serde_json::json;

use super::{Options, info, output};
use crate::cdi::check::{self, Now, Verdict};
use crate::cdi::dirs;
use crate::cdi::engine::{self, Engine, Kind};
use crate::cdi::registry::{self, Found, SpecFile};
use crate::cdi::stamp::Stamp;
use crate::driver::DriverRoot;
use crate::error::one_line;
use crate::finding::{Finding, catalog};
use crate::paths::HostPath;
use crate::sys::process;

/// How long an engine may take to tell its version.
const VERSION_DEADLINE: Duration = Duration::from_secs(5);

/// Engines that look in the same directories.
#[derive(Debug)]
struct View {
    engines: Vec<Engine>,
    dirs: Vec<PathBuf>,
}

fn views(options: &Options) -> Vec<View> {
    let engines = engines();
    if !options.cdi.spec_dirs.is_empty() || engines.is_empty() {
        let given = options.cdi.spec_dirs.clone();
        let dirs = if given.is_empty() { dirs::DEFAULT.map(PathBuf::from).into() } else { given };
        return vec![View { engines, dirs }];
    }
    let mut views: Vec<View> = Vec::new();
    let host = DriverRoot::open(&HostPath::new("/"));
    for engine in engines {
        let Ok(host) = &host else { break };
        let dirs = dirs::read(engine, host);
        match views.iter_mut().find(|view| view.dirs == dirs) {
            Some(view) => view.engines.push(engine),
            None => views.push(View { engines: vec![engine], dirs }),
        }
    }
    views
}

/// Prints the qualified names of the devices that engines find.
///
/// # Errors
/// None: files that they do not read have no devices.
pub fn list(options: &Options) -> Result<ExitCode> {
    let names = names_of(options);
    if options.json {
        return Ok(output::print(&(serde_json::to_string_pretty(&names)? + "\n")));
    }
    Ok(output::print(&names.iter().map(|name| one_line(name) + "\n").collect::<String>()))
}

fn names_of(options: &Options) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for view in views(options) {
        for (name, found) in registry::resolve(&registry::read(&view.dirs)) {
            if matches!(found, Found::In(_)) {
                names.insert(name);
            }
        }
    }
    names
}

/// The names of the devices that engines find, or that are in these directories.
#[must_use]
pub fn names(spec_dirs: &[&str]) -> BTreeSet<String> {
    let mut options = Options::default();
    options.cdi.spec_dirs = spec_dirs.iter().map(Into::into).collect();
    names_of(&options)
}

/// Prints what engines make of each device. 0 if they can use all of them, and there is one.
///
/// # Errors
/// If config.toml is wrong.
pub fn check(options: &Options) -> Result<ExitCode> {
    let config = info::configuration(options)?;
    let stamp = Stamp::look(&config, &options.cdi);
    let mut all_good = true;
    let (mut text, mut data) = (String::new(), Vec::new());
    for View { engines, dirs } in views(options) {
        let now = Now { engines: &engines, stamp: stamp.as_ref() };
        let verdicts = judge(&registry::read(&dirs), &now, options);
        all_good &= !verdicts.is_empty() && verdicts.iter().all(|verdict| verdict.ok);
        let engines: Vec<_> = engines.iter().map(ToString::to_string).collect();
        text += &in_words(&verdicts, &dirs, &engines.join(", "));
        data.push(json!({"engines": engines, "spec_dirs": dirs, "verdicts": verdicts}));
    }
    let text = if options.json { serde_json::to_string_pretty(&data)? + "\n" } else { text };
    let printed = output::print(&text);
    Ok(if all_good { printed } else { ExitCode::FAILURE })
}

/// Why engines may not find what was written there.
#[must_use]
pub fn doubts(path: &Path, options: &Options) -> Vec<Finding> {
    let mut doubts = Vec::new();
    for View { engines, dirs } in views(options) {
        let Some(priority) = dirs.iter().position(|dir| is_in(path, dir)) else {
            let engines: Vec<_> = engines.iter().map(ToString::to_string).collect();
            let engines = if engines.is_empty() { "engines".to_owned() } else { engines.join(", ") };
            let dirs: Vec<_> = dirs.iter().map(|dir| dir.display().to_string()).collect();
            doubts.push(Finding::of(
                &catalog::SPEC_UNSEEN,
                format!("{path:?} is in no directory where {engines} looks for CDI specs"),
                format!("name a file in one of {} with --output, or set cdi_spec_dirs", dirs.join(", ")),
            ));
            continue;
        };
        let files = registry::read(&dirs);
        let is_ours = |file: &SpecFile| file.priority == priority && file.path.file_name() == path.file_name();
        let other = files.iter().position(is_ours).and_then(|ours| check::in_the_way(&files, ours));
        doubts.extend(other.map(|other| {
            let what = format!("{:?} has devices of the same names", other.path);
            let fix = format!("run \"rm {}\"", other.path.display());
            Finding::of(&catalog::SPEC_CONFLICT, what, fix)
        }));
    }
    doubts
}

/// Also where one of them is a link, as /var/run is.
fn is_in(path: &Path, dir: &Path) -> bool {
    let identity = |dir: &Path| dir.metadata().ok().map(|dir| (dir.dev(), dir.ino()));
    path.parent().and_then(identity).is_some_and(|parent| Some(parent) == identity(dir))
}

fn judge(files: &[SpecFile], now: &Now<'_>, options: &Options) -> Vec<Verdict> {
    let mut devices = check::devices(files, now, |path| rustix::fs::lstat(path).is_ok());
    if options.cdi.names.is_empty() {
        devices.extend(check::files(files));
        return devices;
    }
    let named = |name: &String| {
        let known = devices.iter().find(|device| device.subject == *name);
        known.cloned().unwrap_or_else(|| check::unknown(name, &devices))
    };
    let mut named: Vec<_> = options.cdi.names.iter().map(named).collect();
    if named.iter().any(|verdict| verdict.file.is_empty()) {
        // It may be in one of these.
        named.extend(check::files(files));
    }
    named
}

/// Those of this host that tell their version.
#[must_use]
pub fn engines() -> Vec<Engine> {
    let ask = |(kind, program): (Kind, &str)| {
        let version = engine::parse_version(&process::read_version(Path::new(program), VERSION_DEADLINE).ok()?)?;
        Some(Engine { kind, version })
    };
    Kind::ALL.into_iter().filter_map(ask).collect()
}

fn in_words(verdicts: &[Verdict], dirs: &[PathBuf], engines: &str) -> String {
    let mut text = String::new();
    let engines = if engines.is_empty() { String::new() } else { format!(" for {engines}") };
    let (yes, no) = (format!("yes{engines}"), format!("no{engines}"));
    if verdicts.is_empty() {
        let dirs: Vec<_> = dirs.iter().map(|dir| dir.display().to_string()).collect();
        let dirs = dirs.join(", ");
        writeln!(text, "there are no CDI devices{engines} in {dirs}\nhint: run \"oci-nvidia-hook cdi generate\"").ok();
    }
    for Verdict { subject, ok, reason, hint, file } in verdicts {
        let found = if *ok { format!(" ({})", one_line(file)) } else { String::new() };
        let word = if *ok { &yes } else { &no };
        let separator = if reason.is_empty() { "" } else { ": " };
        writeln!(text, "{}: {word}{found}{separator}{}", one_line(subject), one_line(reason)).ok();
        if !hint.is_empty() {
            writeln!(text, "  hint: {}", one_line(hint)).ok();
        }
    }
    text
}
