//! Hints can be pasted: the programs understand their commands, their units exist, and a test runs each command of this program in the
//! state that printed it.

use std::path::Path;
use std::process::Command;

use clap::error::ErrorKind;
use findings::catalog;

use crate::docs::is_test;
use crate::doctor::fault_table::FAULTS;
use crate::help;
use crate::style::literals_of_the_program;
use crate::support::{HOOK, Ran, read, run, source};

tests! {
    &[] => commands_can_be_pasted, commands_of_the_catalog_are_run;
}

/// The programs whose commands hints contain.
const PROGRAMS: &str = "apt bpftool cat chmod chown chroot dnf echo findmnt getenforce grep groupadd journalctl ldconfig ls lspci mknod \
     modprobe mokutil nvidia-smi oci-nvidia-hook oci-nvidia-kubelet-plugin podman ps rm setsebool stat sudo systemctl \
     transactional-update usermod wsl zypper";

/// The units of other packages.
const OTHER_UNITS: &str =
    "crio kubelet nvidia-cdi-refresh nvidia-fabricmanager nvidia-persistenced";

/// The tests that run the commands of findings that are not in the table of faults.
const ELSEWHERE: &str = "\
ONH-001 doctor::this_host
ONH-002 help::each_command_has_a_page
ONH-006 findings::of_commands
ONH-030 findings::of_commands
ONH-047 podman_shapes::the_hosts_dev_is_left_alone
ONH-051 findings::of_commands
ONH-052 findings::of_commands
ONH-053 findings::of_commands
ONH-055 doctor_container::
ONH-062 limits_cdi::doctor_and_check
ONH-063 cdi_outdated::
ONH-074 doctor::this_host
ONH-401 cdi::refresh_asks_a_failing_gpu_again";

fn is_command(text: &str) -> bool {
    let name = text.split(' ').next().unwrap_or_default();
    PROGRAMS.split_whitespace().any(|program| program == name)
}

/// Returns the commands of a hint, each of which a person pastes as a whole: those in quotes, or the one at the end.
pub fn commands(hint: &str) -> Vec<&str> {
    let end = hint.rsplit(": ").next().unwrap();
    if is_command(end) {
        return vec![end];
    }
    let quoted = hint.split(['"', '`']).skip(1).step_by(2);
    quoted.filter(|text| is_command(text)).collect()
}

/// Panics if a person cannot paste this command.
pub fn assert_pasted(command: &str) {
    run(Command::new("sh").args(["-n", "-c", command])).ok();
    assert!(
        !command.contains(", "),
        "{command:?} continues as a sentence"
    );
    for part in command.split("; ").flat_map(|part| part.split(" && ")) {
        let words = part.split_whitespace();
        let words = words.take_while(|word| !matches!(*word, "<" | ">" | "|" | "#"));
        let words: Vec<_> = words.skip_while(|word| *word == "sudo").collect();
        match words.as_slice() {
            ["oci-nvidia-hook", arguments @ ..] => assert_understood(arguments),
            ["oci-nvidia-kubelet-plugin", arguments @ ..] => assert_of_the_plugin(arguments),
            ["systemctl", _, units @ ..] => units.iter().for_each(|unit| assert_unit(unit)),
            _ => assert!(
                part == "reboot" || is_command(part),
                "{part:?} in {command:?}"
            ),
        }
    }
}

/// The program accepts these arguments, in which a word in capital letters, or in braces in the source, is a value.
fn assert_understood(arguments: &[&str]) {
    let mut words = vec!["oci-nvidia-hook"];
    for argument in arguments {
        let is_value = argument.contains('{') || argument.chars().all(char::is_uppercase);
        words.push(if is_value { "1" } else { argument });
    }
    let Err(error) = help::program().try_get_matches_from(&words) else {
        return;
    };
    let is_help = matches!(
        error.kind(),
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion
    );
    // `cdi {verb}`
    let is_composed = error.kind() == ErrorKind::InvalidSubcommand && words.ends_with(&["1"]);
    assert!(is_help || is_composed, "{words:?}: {error}");
}

/// The man page, which tests of the kubelet plugin compare with the program, has this command and its options.
fn assert_of_the_plugin(arguments: &[&str]) {
    let page = read(source("docs/man/oci-nvidia-kubelet-plugin.8")).replace(['\\', '"'], "");
    let mut options = arguments
        .iter()
        .filter(|word| word.starts_with("--") && **word != "--help");
    let is_known = page.contains(&format!("\n.SS {}", arguments[0]))
        && options.all(|option| page.contains(*option));
    assert!(is_known, "oci-nvidia-kubelet-plugin {arguments:?}");
}

/// A unit is one of this project, or of the others.
fn assert_unit(unit: &str) {
    let name = |unit: &str| {
        let unit = unit.trim_matches(['\'', '*']);
        unit.split(['@', '.']).next().unwrap().to_owned()
    };
    let mut known: Vec<_> = OTHER_UNITS.split_whitespace().map(str::to_owned).collect();
    for entry in std::fs::read_dir(source("packaging/systemd"))
        .unwrap()
        .flatten()
    {
        known.push(name(entry.file_name().to_str().unwrap()));
    }
    let is_known = unit.contains('{') || unit.starts_with("--") || known.contains(&name(unit));
    assert!(is_known, "there is no unit {unit:?}");
}

/// The commands in the catalog, and those in the texts of the program.
fn commands_can_be_pasted() {
    let mut count = 0;
    for kind in catalog::ALL {
        let fix = kind.texts().fix;
        for text in fix.split('`').skip(1).step_by(2) {
            let is_setting = text.starts_with('-') || text.contains(['=', ':', '*']);
            let is_word = !text.contains(' ');
            assert!(
                is_command(text) || is_setting || is_word,
                "{}: {text:?}",
                kind.id()
            );
        }
        commands(fix).into_iter().for_each(assert_pasted);
    }
    for (_, text) in literals_of_the_program() {
        // A literal begins after a period.
        for part in text.split(['\'', '`']).flat_map(|part| part.split(". ")) {
            let command = part.trim().trim_end_matches(['\\', ' ', '.']);
            let programs = [
                "oci-nvidia-hook ",
                "oci-nvidia-kubelet-plugin ",
                "systemctl ",
            ];
            if programs.iter().any(|program| command.starts_with(program)) {
                assert_pasted(command);
                count += 1;
            }
        }
    }
    assert!(count > 50, "{count}");
}

/// A command of this program in the catalog is run by a test in a state that has the finding.
fn commands_of_the_catalog_are_run() {
    let mut wrong = Vec::new();
    for kind in catalog::ALL {
        let commands = commands(kind.texts().fix);
        let is_ours = commands
            .iter()
            .any(|command| command.contains("oci-nvidia-hook "));
        let is_fault = FAULTS
            .iter()
            .any(|(_, _, text, _)| text.starts_with(kind.id()));
        let elsewhere = ELSEWHERE
            .lines()
            .find_map(|line| line.strip_prefix(kind.id()));
        if is_ours && !is_fault && !elsewhere.is_some_and(|test| is_test(test.trim())) {
            wrong.push(kind.id());
        }
    }
    assert!(wrong.is_empty(), "no test runs the commands of {wrong:?}");
}

/// Runs the commands of the hint that a program printed, with this configuration.
pub fn obey(ran: &Ran, config: &Path) -> Vec<Ran> {
    let printed = format!("{}{}", ran.stdout, ran.stderr);
    let (_, hint) = printed
        .split_once("hint: ")
        .unwrap_or_else(|| panic!("{ran:?}"));
    let mut obeyed = Vec::new();
    for command in commands(hint.lines().next().unwrap()) {
        let arguments = command
            .trim_start_matches("sudo ")
            .strip_prefix("oci-nvidia-hook ")
            .unwrap();
        let mut hook = Command::new(HOOK);
        hook.arg("--config").arg(config).args(arguments.split(' '));
        obeyed.push(run(&mut hook));
    }
    assert!(!obeyed.is_empty(), "no command in the hint of {ran:?}");
    obeyed
}
