//! Command lines, of our own name and of NVIDIA's: words with 0 bytes between them.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;

use nvidia_host::capability::Capabilities;
use nvidia_host::config::Config;
use nvidia_host::device_id::VisibleDevices;
use oci_nvidia_hook::cli as ours;
use oci_nvidia_hook::cli::grammar::{self, Asked, Line, Program};
use oci_nvidia_hook::cli::nvidia::{cli, hook};

use super::check_error;

/// Parse, write with each value joined to its option, parse; and what a line of NVIDIA's asks for.
pub fn run(data: &[u8]) {
    let words: Vec<OsString> =
        data.split(|byte| *byte == 0).take(64).map(|word| OsString::from_vec(word.to_vec())).collect();
    check(&ours::PROGRAM, &words);
    if let Some(line) = check(&cli::PROGRAM, &words) {
        match cli::Options::of(&line) {
            Ok(options) => check_request(&options),
            Err(error) => check_error(&error),
        }
    }
    match hook::parse(words) {
        Ok(call) => assert_ne!(call.config, Some("".into())),
        Err(error) => check_error(&error),
    }
}

fn check(program: &'static Program, words: &[OsString]) -> Option<Line> {
    let line = match grammar::parse(program, words.to_vec()) {
        Ok(Asked::Run(line)) => line,
        Ok(Asked::Help(_) | Asked::Version) => return None,
        Err(error) => {
            check_error(&error);
            return None;
        }
    };
    let is_own = |option: &grammar::Opt| line.command.options.iter().any(|own| std::ptr::eq(*own, option));
    let (own, of_program): (Vec<_>, Vec<_>) = line.given.iter().partition(|(option, _)| is_own(option));
    let written = |given: &[&(&'static grammar::Opt, Option<OsString>)]| -> Vec<OsString> {
        let one = |(option, value): &&(&grammar::Opt, Option<OsString>)| {
            let mut word = OsString::from(format!("--{}", option.long()));
            assert!(value.is_none() || option.value().is_some(), "a switch has no value: {option:?}");
            if let Some(value) = value {
                word.push("=");
                word.push(value);
            }
            word
        };
        given.iter().map(one).collect()
    };
    let mut again = written(&of_program);
    again.extend(line.command.name.split(' ').map(OsString::from));
    again.extend(written(&own));
    again.push("--".into());
    again.extend(line.operands.iter().cloned());
    let Ok(Asked::Run(parsed)) = grammar::parse(program, again.clone()) else { panic!("{again:?}") };
    assert!(std::ptr::eq(parsed.command, line.command), "{again:?}");
    let names = |given: &mut dyn Iterator<Item = &(&'static grammar::Opt, Option<OsString>)>| -> Vec<_> {
        given.map(|(option, value)| (option.long(), value.clone())).collect()
    };
    assert_eq!(names(&mut parsed.given.iter()), names(&mut of_program.into_iter().chain(own)), "{again:?}");
    assert_eq!(parsed.operands, line.operands, "{again:?}");
    Some(line)
}

fn check_request(options: &cli::Options) {
    assert!(options.pid.is_none_or(|pid| pid > 0));
    let capabilities = Capabilities::of(&options.selection.capabilities);
    match options.selection.clone().completed().request(capabilities, &Config::default()) {
        Ok(request) => {
            if let VisibleDevices::List(names) = &request.devices {
                let once = |name: &String| names.iter().filter(|other| *other == name).count() == 1;
                assert!(names.iter().all(|name| !name.is_empty() && once(name)), "{names:?}");
            }
            assert!(request.mig_config.as_deref().is_none_or(|devices| devices == "all"));
        }
        Err(error) => check_error(&error),
    }
}
