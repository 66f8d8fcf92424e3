//! Help, completions and the man pages describe exactly the commands and options of the program.

use std::collections::BTreeSet;
use std::process::Command;

use clap::{Arg, CommandFactory};
use oci_nvidia_hook::testing::cli::args::Cli;

use crate::cdi::write_spec;
use crate::docs::texts;
use crate::driver::FakeDriver;
use crate::support::{HOOK, Need, read, run, scratch, source, write_program};

tests! {
    &[] => each_command_has_a_page, the_man_page_is_complete, words_are_offered;
    &[Need::Root, Need::Programs(&["bash", "cc"])] => bash_completes;
    &[Need::Program("zsh")] => zsh_completes;
    &[Need::Program("fish")] => fish_completes;
    &[Need::Programs(&["mandoc", "groff"])] => man_pages_have_no_mistakes;
}

fn hook(arguments: &[&str]) -> String {
    run(Command::new(HOOK).args(arguments).env_clear()).ok()
}

/// Returns the command line with the arguments that clap adds.
pub fn program() -> clap::Command {
    let mut program = Cli::command();
    program.build();
    program
}

/// Returns the commands by their names of one or two words.
pub fn commands(program: &clap::Command) -> Vec<(String, &clap::Command)> {
    let mut commands = Vec::new();
    for command in program.get_subcommands() {
        let name = command.get_name();
        if name == "help" || !command.has_subcommands() {
            commands.push((name.to_owned(), command));
            continue;
        }
        for sub in command.get_subcommands() {
            commands.push((format!("{name} {}", sub.get_name()), sub));
        }
    }
    commands
}

/// `-d, --device ID`, as the man page has it.
fn usage_of(arg: &Arg) -> String {
    let mut usage = format!("--{}", arg.get_long().unwrap());
    if let Some(short) = arg.get_short() {
        usage = format!("-{short}, {usage}");
    }
    match arg.get_value_names() {
        Some(names) if arg.get_action().takes_values() => format!("{usage} {}", names.join(" ")),
        _ => usage,
    }
}

fn each_command_has_a_page() {
    let overview = hook(&["--help"]);
    for (name, command) in commands(&program()) {
        let words: Vec<_> = name.split(' ').collect();
        let text = hook(&[&words[..], &["--help"]].concat());
        assert_eq!(hook(&[&["help"], &words[..]].concat()), text);
        let about = command.get_about().unwrap().to_string();
        assert!(text.starts_with(&about), "{text}");
        assert!(text.lines().all(|line| line.len() <= 80), "{text}");
        let lines = overview.lines();
        let is_of = |line: &&str| line.starts_with(&format!("  {} ", words[0]));
        // No hook file of this project calls it.
        if name == "poststart" {
            assert!(!overview.contains("poststart"), "{overview}");
        } else if command.is_hide_set() {
            assert!(overview.contains(&name), "{name}: {overview}");
        } else {
            assert_eq!(lines.filter(is_of).count(), 1, "{name}: {overview}");
        }
    }
}

/// The text of a man page below a heading of this kind.
fn section<'a>(page: &'a str, kind: &str, name: &str) -> &'a str {
    let (_, rest) = page.split_once(&format!("\n{kind} {name}\n")).expect(name);
    let rest = rest.split("\n.SH ").next().unwrap();
    rest.split("\n.SS ").next().unwrap()
}

/// Returns `-d, --device ID` from the lines `.BR -d ", " --device " " \fIID\fR`, in their order.
fn options_of(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let lines: Vec<_> = text.lines().collect();
    for pair in lines.windows(2) {
        if pair[0] == ".TP" && pair[1].contains("--") {
            let line = pair[1].trim_start_matches(".B ").replace('"', "");
            let fonts = ["\\fI", "\\fR", "\\fB"];
            found.push(
                fonts
                    .into_iter()
                    .fold(line, |line, font| line.replace(font, "")),
            );
        }
    }
    found
}

/// Compares a part of the man page with the options and values that the program accepts.
#[track_caller]
fn assert_documents(text: &str, arguments: &[&Arg]) {
    let is_shown = |arg: &&&Arg| !arg.is_positional() && !arg.is_hide_set();
    let options = arguments.iter().filter(is_shown);
    let expected: Vec<_> = options.map(|arg| usage_of(arg)).collect();
    assert_eq!(options_of(text), expected);
    for arg in arguments {
        for value in arg.get_possible_values() {
            let is_flag = !arg.get_action().takes_values();
            let name = value.get_name();
            assert!(
                is_flag || value.is_hide_set() || text.contains(name),
                "{arg}: {name}"
            );
        }
    }
}

fn the_man_page_is_complete() {
    let page = read(source("docs/man/oci-nvidia-hook.8"));
    let page = page.replace("\\-", "-");
    let program = program();
    let general: Vec<_> = program.get_arguments().collect();
    assert_documents(section(&page, ".SH", "OPTIONS"), &general);
    let commands = commands(&program);
    for (name, command) in &commands {
        // `plan [OPTIONS] CONTAINER|-`, as in the help.
        let usage = (*command).clone().render_usage().to_string();
        let usage = usage.replace(['<', '>'], "");
        let heading = usage.strip_prefix("Usage: oci-nvidia-hook ").expect(name);
        let mut own: Vec<_> = command.get_arguments().collect();
        own.retain(|arg| !general.iter().any(|other| other.get_id() == arg.get_id()));
        assert_documents(section(&page, ".SS", &format!("\"{heading}\"")), &own);
    }
    assert_eq!(page.matches("\n.SS \"").count(), commands.len());
}

/// A line in a terminal, and the words that can complete its last one.
type Offer = (&'static str, &'static [&'static str]);

/// Words that the engine of clap offers, and values that only this program knows.
const ENGINE: &[Offer] = &[
    ("exp", &["explain"]),
    ("post", &[]),
    ("help cdi gen", &["generate"]),
    (
        "explain --",
        &[
            "--list", "--json", "--config", "--color", "--debug", "--help",
        ],
    ),
    ("--config /x inf", &["info"]),
    ("explain ONH-9", &[]),
    ("explain ONH-001", &["ONH-001"]),
    ("files --device ", &["all"]),
    ("info --root find", &[]),
];

/// Words that the scripts must pass on.
const SCRIPTS: &[Offer] = &[
    ("cdi ", &["generate", "refresh", "list", "check"]),
    ("cdi generate --format ", &["json", "yaml"]),
    ("completion ", &["bash", "zsh", "fish"]),
    ("files --lib", &["--libraries"]),
    ("--config trou", &["troubleshooting.md"]),
];

#[track_caller]
fn assert_offers(rows: &[Offer], offered: impl Fn(&str) -> BTreeSet<String>) {
    for (line, words) in rows {
        let words = words.iter().map(|word| (*word).to_owned());
        assert_eq!(offered(line), words.collect(), "{line}");
    }
}

/// Returns the words before the help in the output of a program in the directory docs, in which this build is in PATH.
fn words(command: &mut Command) -> BTreeSet<String> {
    let dir = scratch();
    std::os::unix::fs::symlink(HOOK, dir.path().join("oci-nvidia-hook")).unwrap();
    let path = std::env::var("PATH").unwrap();
    command.env("PATH", format!("{}:{path}", dir.path().display()));
    let text = run(command.current_dir(source("docs"))).ok();
    let words = text.lines().map(|line| line.split('\t').next().unwrap());
    words
        .filter(|word| !word.is_empty())
        .map(str::to_owned)
        .collect()
}

fn words_are_offered() {
    let engine = |line: &str| {
        let mut hook = Command::new(HOOK);
        words(hook.arg("__complete").args(line.split(' ')))
    };
    assert_offers(ENGINE, engine);
    assert_offers(SCRIPTS, engine);
}

/// Returns the completions of bash at the end of this line.
fn in_bash(line: &str) -> BTreeSet<String> {
    let script = "source <(oci-nvidia-hook completion bash) && COMP_LINE=$1 COMP_POINT=${#1} && compopt() { :; } && \
                  _oci_nvidia_hook && printf '%s\\n' \"${COMPREPLY[@]}\"";
    words(Command::new("bash").args(["--norc", "-c", script, "bash", line]))
}

fn bash_completes() {
    assert_offers(SCRIPTS, |line| in_bash(&format!("oci-nvidia-hook {line}")));
    // bash splits a line at = and :, and already has the part before it.
    let (dir, fake) = (scratch(), FakeDriver::shared());
    let dirs = dir.path().display();
    let spec = dir.path().join("nvidia.yaml");
    write_spec(fake, &spec);
    for (line, word) in [
        ("cdi generate --format=y", "yaml"),
        ("cdi check --spec-dir DIR nvidia.com/gpu=a", "all"),
    ] {
        let line = line.replace("DIR", &dirs.to_string());
        let found = in_bash(&format!("oci-nvidia-hook {line}"));
        assert_eq!(found, [word.to_owned()].into(), "{line}");
    }
    // The author of a pod chooses the names of its containers, and bash does not quote what a function returns.
    let program = dir.path().join("hostile");
    write_program(&program, "#!/bin/sh\nprintf '$(id) x\\tits help\\n'");
    let quoted = in_bash(&format!("{} why ", program.display()));
    assert_eq!(quoted, [r"\$\(id\)\ x".to_owned()].into());
}

fn zsh_completes() {
    // The functions of the completion system, replaced by ones that print their arguments.
    let harness = "_describe() { print -l -- ${(P)2%%:*}; }; _message() { print $1; }; offer() { local -a words=(oci-nvidia-hook \"$@\"); \
                   local -i CURRENT=$#words; source <(oci-nvidia-hook completion zsh); }; offer \"$@\"";
    assert_offers(SCRIPTS, |line| {
        let mut zsh = Command::new("zsh");
        words(zsh.args(["-f", "-c", harness, "zsh"]).args(line.split(' ')))
    });
}

fn fish_completes() {
    let home = scratch();
    let script = "oci-nvidia-hook completion fish | source; complete -C $argv[1]";
    assert_offers(SCRIPTS, |line| {
        let mut fish = Command::new("fish");
        fish.args([
            "--no-config",
            "-c",
            script,
            &format!("oci-nvidia-hook {line}"),
        ]);
        words(fish.env("HOME", home.path()))
    });
}

/// groff, which `man` uses, warns about a line that it cannot fill in a terminal of 80 columns; mandoc does not.
fn man_pages_have_no_mistakes() {
    let mut pages = texts(&source("docs/man"), "8");
    pages.extend(texts(&source("docs/man"), "5"));
    assert_eq!(pages.len(), 4);
    let release = concat!("\"oci-nvidia-hook ", env!("CARGO_PKG_VERSION"), "\"");
    for (page, text) in pages {
        let lint = run(Command::new("mandoc")
            .args(["-Tlint", "-Wstyle"])
            .arg(&page));
        assert_eq!((lint.stdout.as_str(), lint.stderr.as_str()), ("", ""));
        let mut groff = Command::new("groff");
        groff.args(["-man", "-Tascii", "-P-bcou", "-rLL=80n", "-ww"]);
        let shown = run(groff.arg(&page));
        assert_eq!(shown.stderr, "", "{page:?}");
        assert!(
            shown.stdout.lines().all(|line| line.len() <= 80),
            "{page:?}"
        );
        assert!(text.lines().next().unwrap().contains(release), "{page:?}");
    }
}
