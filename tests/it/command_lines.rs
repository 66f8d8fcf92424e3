//! Invalid command lines of all commands: exit status 2, nothing on stdout, and one message in our words.

use std::process::{Command, Stdio};

use clap::Arg;

use crate::help::{commands, program};
use crate::support::{HOOK, run};

tests! {
    &[] => each_command_and_option, invalid_lines;
}

/// Words and notation of clap, of lexopt and of Rust's parsers.
const FOREIGN: [&str; 15] = [
    "error:",
    "For more information",
    "Usage:",
    "tip:",
    " found",
    "the argument",
    "unrecognized",
    "see a summary",
    "see more",
    "possible values",
    " '",
    "<",
    "[",
    "..",
    "in string",
];

/// Returns the message of an invalid command line.
#[track_caller]
fn refused(arguments: &[&str]) -> String {
    let mut hook = Command::new(HOOK);
    let ran = run(hook.args(arguments).env_clear().stdin(Stdio::null()));
    assert_eq!(
        (ran.code, ran.stdout.as_str()),
        (Some(2), ""),
        "{arguments:?}: {ran:?}"
    );
    let start = "oci-nvidia-hook: invalid command line: ";
    let message = ran.stderr.strip_prefix(start);
    let message = message.unwrap_or_else(|| panic!("{arguments:?}: {ran:?}"));
    let (problem, hint) = message
        .split_once(" (ONH-002)\nhint: ")
        .unwrap_or_else(|| panic!("{arguments:?}: {message}"));
    assert_eq!(hint.lines().count(), 1, "{arguments:?}: {hint}");
    for words in FOREIGN {
        assert!(
            !message.contains(words),
            "{arguments:?}: {words:?} in {message}"
        );
    }
    problem.to_owned()
}

/// For each command: an unknown option, a word too many, each option without its value, and each flag with a value.
fn each_command_and_option() {
    let program = program();
    let mut count = 0;
    for (name, command) in commands(&program) {
        let words: Vec<_> = name.split(' ').collect();
        let with = |more: &[&str]| refused(&[words.as_slice(), more].concat());
        assert_eq!(with(&["--frobnicate"]), "unknown option \"--frobnicate\"");
        // The stages ignore options, and "help" has a command as its argument.
        let takes_any = command.get_positionals().any(|arg| {
            arg.get_num_args()
                .is_some_and(|count| count.max_values() > 1)
        });
        if !takes_any {
            let problem = with(&["word", "word", "word"]);
            assert!(
                problem.starts_with("unexpected argument \"word\"")
                    || problem.starts_with("invalid value \"word\" for ")
                    || problem == "unknown command \"word\"",
                "{name}: {problem}"
            );
        }
        for arg in command.get_arguments() {
            let Some(long) = arg.get_long() else { continue };
            count += 1;
            let option = format!("--{long}");
            if takes_value(arg) {
                assert_eq!(
                    with(&[&option]),
                    format!("{option:?} needs a value"),
                    "{name}"
                );
            } else {
                let problem = with(&[&format!("{option}=x")]);
                assert_eq!(problem, format!("{option:?} takes no value"), "{name}");
            }
        }
    }
    assert!(count > 60, "{count}");
}

fn takes_value(arg: &Arg) -> bool {
    arg.get_action().takes_values()
}

/// Command lines, and what is wrong with them. The arguments of hook entries in CDI specs have another parser.
const INVALID: &str = r#"
ps --watch --json                => "--watch" cannot be used with "--json"
info --json --csv                => "--json" cannot be used with "--csv"
explain 30 --list                => NUMBER cannot be used with "--list"
explain --list 30                => "--list" cannot be used with NUMBER
doctor --container a --pid 1     => "--container" cannot be used with "--pid"
doctor --container a --bundle b  => "--container" cannot be used with "--bundle"
doctor --pid 1 cdi               => "--pid" cannot be used with SECTION
plan                             => CONTAINER or - is missing
explain                          => NUMBER is missing
completion                       => SHELL is missing
cdi                              => a command is missing
--debug                          => a command is missing
--color blue status              => invalid value "blue" for "--color": must be one of auto, always, never
completion tcsh                  => invalid value "tcsh" for SHELL: must be one of bash, zsh, fish
doctor disk                      => invalid value "disk" for SECTION: must be one of driver, hook, cdi, kubelet
doctor --pid one                 => invalid value "one" for "--pid": it is not a number
doctor --pid 0                   => invalid value "0" for "--pid": it must be a number from 1 to 2147483647
doctor --pid=                    => invalid value "" for "--pid": it is not a number
doctor --container=              => "--container" needs a value
ps --gpu=                        => "--gpu" needs a value
ps --watch                       => --watch needs a terminal
cdi generate --format xml        => invalid value "xml" for "--format": must be one of json, yaml
help frobnicate                  => unknown command "frobnicate"
frobnicate                       => unknown command "frobnicate"
-x                               => unknown option "-x"
rootfs --frobnicate              => unknown option "--frobnicate"
rootfs word                      => unexpected argument "word"
rootfs --link                    => "--link" needs a value
rootfs --link x                  => "x" is not A::B
prestart word                    => unexpected argument "word"
edit-config --frobnicate         => unknown option "--frobnicate"
"#;

fn invalid_lines() {
    for row in INVALID.trim().lines() {
        let (line, problem) = row.split_once(" => ").unwrap();
        let words: Vec<_> = line.split_whitespace().collect();
        assert_eq!(refused(&words), problem, "{line}");
    }
}
