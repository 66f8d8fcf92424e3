//! Command lines with our name and with NVIDIA's names: words with 0 bytes between them.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;

use nvidia_host::config::Config;
use nvidia_host::device_id::VisibleDevices;
use oci_nvidia_hook::testing::cli::args::{self, Cli};
use oci_nvidia_hook::testing::cli::nvidia::cli::{self, Configure, ContainerCommand};
use oci_nvidia_hook::testing::cli::nvidia::hook;
use oci_nvidia_hook::testing::cli::parse::{self, Parsed};
use oci_nvidia_hook::testing::cli::stage;

use super::check_error;

/// Any words are either parsed or rejected; also computes the request of a command line with NVIDIA's names.
pub fn run(data: &[u8]) {
    let words: Vec<OsString> = data
        .split(|byte| *byte == 0)
        .take(64)
        .map(|word| OsString::from_vec(word.to_vec()))
        .collect();
    check_stage(&words);
    match cli::parse(words.clone()) {
        Ok(Parsed::Run(cli::ContainerCli {
            command: ContainerCommand::Configure(options),
            ..
        })) => check_request(&options),
        Ok(_) => {}
        Err(error) => check_error(&error),
    }
    match hook::parse(words) {
        Ok(call) => assert_ne!(call.config, Some("".into())),
        Err(error) => check_error(&error),
    }
}

/// The command lines that the hook parses itself mean the same to the parser of all commands.
fn check_stage(words: &[OsString]) {
    let by_hand = stage::parse(words);
    match parse::parse::<Cli>(words) {
        Ok(Parsed::Run(Cli {
            config,
            command: args::Command::Stage(stage),
            ..
        })) => {
            if let Some(by_hand) = by_hand {
                assert_eq!(by_hand, (stage, config.as_deref()), "{words:?}");
            }
        }
        Ok(_) => assert_eq!(by_hand, None, "{words:?}"),
        Err(error) => {
            check_error(&error);
            assert_eq!(by_hand, None, "{words:?}");
        }
    }
}

fn check_request(options: &Configure) {
    assert!(options.pid.is_none_or(|pid| pid > 0));
    match options.selection.request(
        options.capabilities(),
        &options.requirements,
        &Config::default(),
    ) {
        Ok(request) => {
            if let VisibleDevices::List(names) = &request.devices {
                let once = |name: &String| names.iter().filter(|other| *other == name).count() == 1;
                assert!(
                    names.iter().all(|name| !name.is_empty() && once(name)),
                    "{names:?}"
                );
            }
            assert!(
                request
                    .mig_config
                    .as_deref()
                    .is_none_or(|devices| devices == "all")
            );
        }
        Err(error) => check_error(&error),
    }
}
