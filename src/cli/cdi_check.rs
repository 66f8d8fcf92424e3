//! `cdi list` and `cdi check`: list the devices of all specs, and check whether engines can use them.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use serde_json::json;

use base::paths::HostPath;
use base::report::{Finding, one_line};
use base::tree::Tree;
use cdi_spec::registry::{self, Found, SpecFile};
use findings::catalog;
use nvidia_host::cdi::stamp::Stamp;
use nvidia_host::config::Config;
use nvidia_host::host::{Driver, Host, Source, node_limits};
use nvidia_host::inventory::Inventory;
use nvidia_host::inventory::node_limits::NodeLimits;
use plugin_api::processes;

use super::args::{CdiCheck, SpecDirs};
use super::status::{remark_line, this_user};
use super::terminal::{Line, Terminal, Tone};
use super::{info, output};
use crate::record::call::Call;
use engines::cdi::{self, DEFAULT_DIRS, SpecReader, View};
use engines::cdi_check::{self, CdiVerdict, Now};
use engines::inspect::{self, Versions};

/// Returns the spec directories of each engine, or the command line's directories for all of them.
fn views(given: &SpecDirs, inspect: impl Fn(&Tree) -> Vec<View>) -> Vec<View> {
    let views = match Tree::open(&HostPath::new("/")) {
        Ok(host) => inspect(&host),
        Err(_) => Vec::new(),
    };
    let dirs = if !given.spec_dirs.is_empty() {
        given.spec_dirs.clone()
    } else if views.is_empty() {
        DEFAULT_DIRS.map(PathBuf::from).into()
    } else {
        return views;
    };
    let readers = views.into_iter().flat_map(|view| view.readers).collect();
    vec![View { readers, dirs }]
}

/// Returns the views without asking each engine for its version, which would take longer than everything else.
fn quick_views(dirs: &SpecDirs) -> Vec<View> {
    views(dirs, |host| {
        inspect::cdi_views(host, this_user(), &mut Versions::stored())
    })
}

/// Prints the qualified names of the devices that engines find.
///
/// # Errors
/// None: files that engines do not read have no devices.
pub(crate) fn list(dirs: &SpecDirs, json: bool) -> Result<ExitCode> {
    let names = names_of(dirs);
    let has_conflict = report_conflicts(dirs);
    if json {
        return Ok(output::print(&base::json::document("devices", &names)?));
    }
    if names.is_empty() && !has_conflict {
        // On stderr: stdout contains only names, for scripts.
        Call::default().report(
            "no CDI devices; \"oci-nvidia-hook cdi generate\" writes a spec for this host's GPUs",
        );
    }
    let mut text = String::new();
    for name in &names {
        text += &format!("{}\n", one_line(name));
    }
    Ok(output::print(&text))
}

fn exists(path: &str) -> bool {
    rustix::fs::lstat(path).is_ok()
}

fn names_of(dirs: &SpecDirs) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for view in quick_views(dirs) {
        for (name, found) in registry::resolve(&registry::read(&view.dirs)) {
            if matches!(found, Found::In(_)) {
                names.insert(name);
            }
        }
    }
    names
}

/// Reports on stderr why engines use none of two files with the same device. Returns whether there are any.
fn report_conflicts(dirs: &SpecDirs) -> bool {
    let mut reported = BTreeSet::new();
    for view in quick_views(dirs) {
        for conflict in cdi_check::conflicts(&registry::read(&view.dirs), &exists) {
            if reported.insert(conflict.what.clone()) {
                Call::default().finding(&conflict);
            }
        }
    }
    !reported.is_empty()
}

/// Returns the names of the devices in these directories, or without any, in the directories of the engines.
pub(crate) fn names(spec_dirs: &[PathBuf]) -> BTreeSet<String> {
    names_of(&SpecDirs {
        spec_dirs: spec_dirs.to_owned(),
    })
}

/// Prints for each device whether engines can use it. Returns 0 if there are devices and engines can use all of them.
///
/// # Errors
/// If config.toml is invalid.
pub(crate) fn check(
    options: &CdiCheck,
    config: Option<&Path>,
    terminal: Terminal,
) -> Result<ExitCode> {
    let config = info::configuration(config, options.root.as_deref())?;
    let (stamp, inventory) = stamp(&config);
    let limits = limits(&config)?;
    let plugins = Tree::open(&HostPath::new("/")).map(|host| processes::of_host(&host));
    let plugins = plugins.unwrap_or_default();
    let mut all_good = true;
    let (mut words, mut data) = (String::new(), Vec::new());
    for View { readers, dirs } in views(&options.dirs, |host| {
        cdi::views(&inspect::inspect_engines(host, this_user()))
    }) {
        let files = registry::read(&dirs);
        let host = cdi_check::view(&files, &config, None, stamp.as_ref(), inventory.as_ref());
        let now = Now {
            readers: &readers,
            stamp: stamp.as_ref(),
            host: &host,
            units_write: cdi_check::units_write(exists),
            limits: &limits,
            plugins: &plugins,
        };
        let verdicts = judge(&files, &now, &options.names);
        all_good &= !verdicts.is_empty() && verdicts.iter().all(|verdict| verdict.ok);
        let engines: Vec<_> = readers.iter().map(ToString::to_string).collect();
        words += &text(&verdicts, &dirs, &readers, terminal);
        let spec_dirs: Vec<_> = dirs.iter().map(|dir| dir.to_string_lossy()).collect();
        data.push(json!({"engines": engines, "spec_dirs": spec_dirs, "results": verdicts}));
    }
    let printed = output::print(&if options.output.json {
        base::json::document("groups", &data)?
    } else {
        words
    });
    Ok(if all_good { printed } else { ExitCode::FAILURE })
}

/// Returns the current state of the host, to compare with the state for which a spec was made, and NVML's answer if there are MIG devices,
/// which only NVML knows.
fn stamp(config: &Config) -> (Option<Stamp>, Option<Inventory>) {
    let Some(mut stamp) = Stamp::of_host(config, &()) else {
        return (None, None);
    };
    let mut inventory = None;
    if stamp.mig.is_some() {
        match Driver::find(config).and_then(|driver| driver.host(Source::Nvml)) {
            Ok(host) => {
                stamp.complete(&host.inventory);
                inventory = Some(host.inventory);
            }
            Err(error) => Call::default().finding(&Finding::error(&error)),
        }
    }
    (Some(stamp), inventory)
}

/// Returns the limits, with the inventory if there are any: only NVML knows models and MIG devices.
fn limits(config: &Config) -> Result<NodeLimits> {
    let limits = node_limits(config)?;
    if limits.is_empty() {
        return Ok(limits);
    }
    Ok(match Host::inspect(config, &|| ()) {
        Ok(host) => limits.with_inventory(host.inventory),
        Err(error) => {
            Call::default().finding(&Finding::error(&error));
            limits
        }
    })
}

/// Returns the reasons why engines may not use the specs that were written to these files. The specs have different kinds.
pub(crate) fn problems(written: &[PathBuf], dirs: &SpecDirs) -> Vec<Finding> {
    let views = quick_views(dirs);
    let mut problems = Vec::new();
    for path in written {
        for view in &views {
            problems.extend(problem(path, written, view));
        }
    }
    problems
}

fn problem(path: &Path, written: &[PathBuf], view: &View) -> Option<Finding> {
    let View { readers, dirs } = view;
    let Some(priority) = dirs.iter().position(|dir| is_in(path, dir)) else {
        return Some(unseen(path, readers, dirs));
    };
    // Parsing takes longer than everything else, and most hosts have no other specs.
    if !has_others(written, dirs, priority) {
        return None;
    }
    let files = registry::read(dirs);
    let ours = files
        .iter()
        .position(|file| file.priority == priority && file.path.file_name() == path.file_name())?;
    let other = cdi_check::conflicting(&files, ours)?;
    Some(Finding::new(
        &catalog::SPEC_CONFLICT,
        format!("{:?} has devices of the same names", other.path),
        cdi_check::how_to_separate(other, files.get(ours)?, &exists),
    ))
}

/// Whether these directories have files that were not written just now. The directory with this index has the written ones.
fn has_others(written: &[PathBuf], dirs: &[PathBuf], ours: usize) -> bool {
    let written: Vec<_> = written.iter().map(|path| path.file_name()).collect();
    for (number, dir) in dirs.iter().enumerate() {
        for file in registry::paths(dir) {
            if number != ours || !written.contains(&file.file_name()) {
                return true;
            }
        }
    }
    false
}

fn unseen(path: &Path, readers: &[SpecReader], dirs: &[PathBuf]) -> Finding {
    let names: Vec<_> = readers
        .iter()
        .map(|reader| reader.kind.to_string())
        .collect();
    let engines = if names.is_empty() {
        "engines".to_owned()
    } else {
        names.join(", ")
    };
    Finding::new(
        &catalog::SPEC_UNSEEN,
        format!("{path:?} is not in a directory in which {engines} searches for CDI specs"),
        format!(
            "write to one of {} with --output, or set cdi_spec_dirs in the engine's configuration",
            cdi::list_paths(dirs)
        ),
    )
}

/// Returns whether the file is in this directory. The paths can differ, because /var/run is a link.
fn is_in(path: &Path, dir: &Path) -> bool {
    match path.parent().and_then(identity) {
        Some(parent) => identity(dir) == Some(parent),
        None => false,
    }
}

fn identity(dir: &Path) -> Option<(u64, u64)> {
    dir.metadata().ok().map(|dir| (dir.dev(), dir.ino()))
}

fn judge(files: &[SpecFile], now: &Now<'_>, names: &[String]) -> Vec<CdiVerdict> {
    let mut devices = cdi_check::devices(files, now, exists);
    let without_env = cdi_check::without_env(files);
    if names.is_empty() {
        devices.extend(cdi_check::files(files, now));
        devices.extend(without_env);
        return devices;
    }
    let mut named = Vec::new();
    for name in names {
        named.push(
            match devices.iter().find(|device| device.subject == *name) {
                Some(known) => known.clone(),
                None => cdi_check::unknown(name, &devices),
            },
        );
    }
    if named.iter().any(|verdict| verdict.file.is_empty()) {
        // The device may be in a file that engines do not read.
        named.extend(cdi_check::files(files, now));
    }
    for hook in without_env {
        if named.iter().any(|device| device.file == hook.file) {
            named.push(hook);
        }
    }
    named
}

fn for_engines(engines: &[String]) -> String {
    if engines.is_empty() {
        String::new()
    } else {
        format!(" for {}", engines.join(", "))
    }
}

/// Returns what is known about the devices in these directories as text.
pub fn text(
    verdicts: &[CdiVerdict],
    dirs: &[PathBuf],
    readers: &[SpecReader],
    terminal: Terminal,
) -> String {
    terminal.render(&to_lines(verdicts, dirs, readers))
}

fn to_lines(verdicts: &[CdiVerdict], dirs: &[PathBuf], readers: &[SpecReader]) -> Vec<Line> {
    let names: Vec<_> = readers.iter().map(ToString::to_string).collect();
    if verdicts.is_empty() {
        let devices = format!(
            "no CDI devices{} in {}",
            for_engines(&names),
            cdi::list_paths(dirs)
        );
        return vec![
            Line::new(devices),
            remark_line(4, "hint: run \"oci-nvidia-hook cdi generate\""),
        ];
    }
    let mut lines = Vec::new();
    if !names.is_empty() {
        lines.push(Line::new(format!("for {}:", names.join(", "))));
    }
    for verdict in verdicts {
        lines.push(first_line(verdict));
        if !verdict.unread_by.is_empty() {
            let mut others = names.clone();
            others.retain(|name| !verdict.unread_by.contains(name));
            let parts = format!(
                "usable by {}, not by {}",
                others.join(", "),
                verdict.unread_by.join(", ")
            );
            lines.push(remark_line(NAMES, &parts));
        }
        if !verdict.reason.is_empty() {
            lines.push(remark_line(NAMES, &verdict.full_reason()));
        }
        if !verdict.hint.is_empty() {
            lines.push(remark_line(NAMES, &format!("hint: {}", verdict.hint)));
        }
    }
    lines
}

fn first_line(verdict: &CdiVerdict) -> Line {
    let (tone, word) = if !verdict.unread_by.is_empty() {
        (Tone::Warning, "partly")
    } else if verdict.ok {
        (Tone::Good, "yes")
    } else if verdict.is_unsafe {
        (Tone::Bad, "unsafe")
    } else {
        (Tone::Bad, "no")
    };
    let gap = NAMES.saturating_sub(word.len());
    let mut name = format!("{:gap$}{}", "", one_line(&verdict.subject));
    if verdict.ok {
        name += &format!(" ({})", one_line(&verdict.file));
    }
    Line::default().then(tone, word).then(Tone::Plain, name)
}

/// The column of the names: after the longest word that states whether a device is usable.
const NAMES: usize = "unsafe".len() + 2;
