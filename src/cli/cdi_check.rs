//! `cdi list` and `cdi check`: the devices of all specs, and whether engines can use them.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use serde_json::json;

use super::{Options, info, output};
use crate::cdi::check::{self, Now, Verdict};
use crate::cdi::engine::{self, Engine, Kind};
use crate::cdi::file::SPEC_DIRS;
use crate::cdi::registry::{self, Found, SpecFile};
use crate::cdi::stamp::Stamp;
use crate::error::one_line;
use crate::sys::process;

fn spec_dirs(options: &Options) -> Vec<PathBuf> {
    match options.cdi.spec_dirs.as_slice() {
        [] => SPEC_DIRS.map(PathBuf::from).into(),
        dirs => dirs.to_vec(),
    }
}

/// Prints the qualified names of the devices that engines find.
///
/// # Errors
/// None: files that they do not read have no devices.
pub fn list(options: &Options) -> Result<ExitCode> {
    let found = registry::resolve(&registry::read(&spec_dirs(options)));
    let names = found.into_iter().filter(|(_, found)| matches!(found, Found::In(_))).map(|(name, _)| name);
    if options.json {
        return Ok(output::print(&(serde_json::to_string_pretty(&names.collect::<Vec<_>>())? + "\n")));
    }
    Ok(output::print(&names.map(|name| one_line(&name) + "\n").collect::<String>()))
}

/// Prints what engines make of each device. 0 if they can use all of them, and there is one.
///
/// # Errors
/// If config.toml is wrong.
pub fn check(options: &Options) -> Result<ExitCode> {
    let dirs = spec_dirs(options);
    let files = registry::read(&dirs);
    let config = info::configuration(options)?;
    let stamp = Stamp::look(&config, &options.cdi);
    let engines = engines();
    let now = Now { engines: &engines, stamp: stamp.as_ref() };
    let verdicts = judge(&files, &now, options);
    let all_good = !verdicts.is_empty() && verdicts.iter().all(|verdict| verdict.ok);
    let text = if options.json {
        let engines: Vec<_> = engines.iter().map(ToString::to_string).collect();
        serde_json::to_string_pretty(&json!({"spec_dirs": dirs, "engines": engines, "verdicts": verdicts}))? + "\n"
    } else {
        in_words(&verdicts, &dirs, &engines)
    };
    let printed = output::print(&text);
    Ok(if all_good { printed } else { ExitCode::FAILURE })
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
        let version = engine::parse_version(&process::read_version(Path::new(program)).ok()?)?;
        Some(Engine { kind, version })
    };
    Kind::ALL.into_iter().filter_map(ask).collect()
}

fn in_words(verdicts: &[Verdict], dirs: &[PathBuf], engines: &[Engine]) -> String {
    let mut text = String::new();
    let engines: Vec<_> = engines.iter().map(ToString::to_string).collect();
    let yes = if engines.is_empty() { "yes".to_owned() } else { format!("yes for {}", engines.join(", ")) };
    if verdicts.is_empty() {
        let dirs: Vec<_> = dirs.iter().map(|dir| dir.display().to_string()).collect();
        writeln!(text, "there are no CDI devices in {}\nhint: run \"oci-nvidia-hook cdi generate\"", dirs.join(", "))
            .ok();
    }
    for Verdict { subject, ok, reason, hint, file } in verdicts {
        let found = if *ok { format!(" ({})", one_line(file)) } else { String::new() };
        let word = if *ok { &yes } else { "no" };
        let separator = if reason.is_empty() { "" } else { ": " };
        writeln!(text, "{}: {word}{found}{separator}{}", one_line(subject), one_line(reason)).ok();
        if !hint.is_empty() {
            writeln!(text, "  hint: {}", one_line(hint)).ok();
        }
    }
    text
}
