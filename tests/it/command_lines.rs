//! Invalid command lines of all commands: exit status 2, nothing on stdout, and one message of one line with a hint.

use std::process::{Command, Stdio};

use crate::help::{commands, program};
use crate::support::{HOOK, run};

tests! {
    &[] => each_command_and_option, invalid_lines;
}

/// What clap adds to a message.
const FOREIGN: [&str; 5] = ["error:", "For more information", "Usage:", "tip:", " '"];

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
        let problem = with(&["--frobnicate"]);
        assert!(problem.contains("\"--frobnicate\""), "{name}: {problem}");
        // The stages ignore options, and "help" has a command as its argument.
        let takes_any = command.get_positionals().any(|arg| {
            arg.get_num_args()
                .is_some_and(|count| count.max_values() > 1)
        });
        if !takes_any {
            let problem = with(&["word", "word", "word"]);
            assert!(problem.contains("\"word\""), "{name}: {problem}");
        }
        for arg in command.get_arguments() {
            let Some(long) = arg.get_long() else { continue };
            count += 1;
            let option = format!("--{long}");
            let problem = if arg.get_action().takes_values() {
                with(&[&option])
            } else {
                with(&[&format!("{option}=x")])
            };
            assert!(problem.contains(&option), "{name}: {problem}");
        }
    }
    assert!(count > 60, "{count}");
}

/// Command lines, and what is wrong with them. The arguments of hook entries in CDI specs have another parser.
const INVALID: &str = r#"
info --json --csv                => cannot be used with
explain 30 --list                => cannot be used with
doctor --container a --pid 1     => cannot be used with
doctor --container a cdi         => cannot be used with
doctor --pid 1 cdi               => cannot be used with
plan                             => not provided: <CONTAINER|->
explain                          => not provided: <NUMBER>
completion                       => not provided: <SHELL>
cdi                              => a command is missing
--debug                          => a command is missing
--color blue status              => [possible values: auto, always, never]
cdi generate --name-strategy=x   => [possible values: index, uuid, type-index]
cdi generate --class=a           => has only one letter
files -ld -b                     => a value is required for "--device <ID>"
doctor disk                      => [possible values: driver, hook, cdi, kubelet]
doctor --pid 0                   => 0 is not in 1..=2147483647
doctor --container=              => a value is required for "--container <NAME>"
ps --gpu=                        => a value is required for "--gpu <GPU>"
help frobnicate                  => unrecognized subcommand "frobnicate"
frobnicate                       => unrecognized subcommand "frobnicate"
rootfs --frobnicate              => unknown option "--frobnicate"
rootfs word                      => unexpected argument "word"
rootfs --link                    => "--link" needs a value
rootfs --link x                  => "x" is not A::B
edit-config --frobnicate         => unexpected argument "--frobnicate" found
"#;

fn invalid_lines() {
    for row in INVALID.trim().lines() {
        let (line, problem) = row.split_once(" => ").unwrap();
        let words: Vec<_> = line.split_whitespace().collect();
        let found = refused(&words);
        assert!(found.contains(problem), "{line}: {found}");
    }
}
