//! `completion SHELL`: small scripts that ask the program itself what can stand at the end of a line, so that all shells
//! offer the same.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::process::ExitCode;

use base::report::one_line;

use super::grammar::{self, Command, Completes, Opt};
use super::{PROGRAM, cdi_check, output, usage_error};

/// What the scripts call, with the words of the line but for the program's name. Nobody types it.
pub(super) const VERB: &str = "__complete";

const BASH: &str = r#"# bash completion for oci-nvidia-hook, made by "oci-nvidia-hook completion bash"
_oci_nvidia_hook() {
    local line=${COMP_LINE:0:COMP_POINT} IFS=$' \t\n' offered word
    local -a words
    read -ra words <<<"$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    word=${words[${#words[@]}-1]}
    offered=$("${words[0]}" __complete "${words[@]:1}" 2>/dev/null)
    COMPREPLY=()
    case $offered in
        :files) compopt -o filenames; COMPREPLY=($(compgen -f -- "${word##*=}")) ;;
        :directories) compopt -o filenames; COMPREPLY=($(compgen -d -- "${word##*=}")) ;;
        *)
            # Bash has made words of what is between = and :, and replaces the last one.
            local before=
            [[ $word == *[=:]* ]] && before=${word%"${word##*[=:]}"}
            while IFS=$'\t' read -r word _; do
                [[ -z $word ]] || COMPREPLY+=("${word#"$before"}")
            done <<<"$offered" ;;
    esac
    return 0
}
complete -F _oci_nvidia_hook oci-nvidia-hook
"#;

const ZSH: &str = r#"#compdef oci-nvidia-hook
# made by "oci-nvidia-hook completion zsh"
_oci_nvidia_hook() {
    local -a offered
    offered=("${(@f)$("${words[1]}" __complete "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    case $offered[1] in
        (:files) compset -P '*='; _files ;;
        (:directories) compset -P '*='; _files -/ ;;
        ('') _message 'value' ;;
        (*)
            offered=("${(@)offered//:/\\:}")
            offered=("${(@)offered/$'\t'/:}")
            _describe oci-nvidia-hook offered ;;
    esac
}
_oci_nvidia_hook "$@"
"#;

const FISH: &str = r#"# made by "oci-nvidia-hook completion fish"
function __oci_nvidia_hook_offer
    set -l words (commandline -opc) (commandline -ct)
    set -l offered ($words[1] __complete $words[2..-1] 2>/dev/null)
    switch "$offered[1]"
        case :files
            __fish_complete_path (commandline -ct)
        case :directories
            __fish_complete_directories (commandline -ct)
        case '*'
            printf '%s\n' $offered
    end
end
complete -c oci-nvidia-hook -f -a '(__oci_nvidia_hook_offer)'
"#;

/// Prints the script for this shell.
pub(super) fn run(operands: &[OsString]) -> ExitCode {
    match operands.first().and_then(|shell| shell.to_str()) {
        Some("bash") => output::print(BASH),
        Some("zsh") => output::print(ZSH),
        Some("fish") => output::print(FISH),
        _ => usage_error(&grammar::wrong(&PROGRAM, None, "there are completions for bash, zsh and fish")),
    }
}

/// Prints what can stand in the place of the last of these words: each on a line, with its help behind a tab; or `:files`, or
/// `:directories`, which shells know.
pub(super) fn complete(words: &[OsString]) -> ExitCode {
    let words: Vec<String> = words.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    output::print(&offer(&words))
}

fn offer(words: &[String]) -> String {
    let (last, before) = words.split_last().map_or(("", &[][..]), |(last, before)| (last.as_str(), before));
    let line = read(before);
    let (prefix, completes) = match (line.wants, last.split_once('=')) {
        (Some(completes), _) => ("", completes),
        // What stands behind = is the value of that option.
        (None, Some((name, _))) if name.starts_with('-') => {
            let Some(option) = find(&line, name).filter(|option| option.value().is_some()) else {
                return String::new();
            };
            (last.get(..=name.len()).unwrap_or_default(), option.completes)
        }
        _ => return of_place(&line, last),
    };
    let mut text = String::new();
    add(&mut text, completes, prefix, last, &line);
    text
}

/// What the words before the last one are.
#[derive(Default)]
struct Before<'a> {
    group: Option<&'a str>,
    command: Option<&'static Command>,
    spec_dirs: Vec<&'a str>,
    /// The last of them is an option whose value comes
    wants: Option<Completes>,
}

fn read(words: &[String]) -> Before<'_> {
    let mut line = Before::default();
    let mut words = words.iter();
    while let Some(word) = words.next() {
        if word.starts_with('-') {
            let Some(option) = find(&line, word).filter(|option| option.value().is_some() && !word.contains('='))
            else {
                continue;
            };
            match words.next() {
                Some(value) if option.long() == "spec-dir" => line.spec_dirs.push(value),
                Some(_) => {}
                None => line.wants = Some(option.completes),
            }
        } else if line.command.is_none() {
            let name = line.group.map_or_else(|| word.clone(), |group| format!("{group} {word}"));
            line.command = PROGRAM.commands.iter().find(|command| command.name == name);
            line.group = Some(word);
        }
    }
    line
}

/// The option of this word, `--option=value` too.
fn find(line: &Before<'_>, word: &str) -> Option<&'static Opt> {
    let name = word.split('=').next().unwrap_or(word);
    let own = line.command.into_iter().flat_map(|command| command.options.iter().copied());
    let is = |option: &&Opt| match name.strip_prefix("--") {
        Some(long) => option.long() == long,
        None => option.short().is_some_and(|letter| name.strip_prefix('-') == Some(letter)),
    };
    own.chain(PROGRAM.options).find(is)
}

/// Commands, options, and what a command works on.
fn of_place(line: &Before<'_>, last: &str) -> String {
    let mut text = String::new();
    match (line.command, line.group) {
        (None, None) => add(&mut text, Completes::Commands, "", last, line),
        (None, Some(group)) => {
            for command in PROGRAM.group(group) {
                add_word(&mut text, command.name.get(group.len() + 1..).unwrap_or_default(), command.summary, last);
            }
        }
        (Some(command), _) => {
            if let Some(operand) = command.operand {
                add(&mut text, operand.completes, "", last, line);
            }
        }
    }
    let own = line.command.into_iter().flat_map(|command| command.options.iter().copied());
    let of_program = PROGRAM.options.iter().filter(|_| line.command.is_some() || line.group.is_none());
    // Where nothing was typed yet, options would hide the rest.
    let hidden = !text.is_empty() && !last.starts_with('-');
    for option in own.chain(of_program).filter(|_| !hidden) {
        add_word(&mut text, &format!("--{}", option.long()), option.help(), last);
    }
    text
}

fn add(text: &mut String, completes: Completes, prefix: &str, last: &str, line: &Before<'_>) {
    match completes {
        Completes::Nothing => {}
        Completes::Files => text.push_str(":files\n"),
        Completes::Directories => text.push_str(":directories\n"),
        Completes::Words(words) => {
            words.split(' ').for_each(|word| add_word(text, &format!("{prefix}{word}"), "", last));
        }
        Completes::Commands => {
            let mut groups: Vec<&str> = Vec::new();
            for command in PROGRAM.commands {
                match command.name.split_once(' ') {
                    None => add_word(text, command.name, command.summary, last),
                    Some((group, _)) if groups.contains(&group) => {}
                    Some((group, _)) => {
                        groups.push(group);
                        add_word(text, group, "its own commands", last);
                    }
                }
            }
        }
        Completes::CdiDevices => {
            let names: BTreeSet<String> = cdi_check::names(&line.spec_dirs);
            names.iter().for_each(|name| add_word(text, &one_line(name), "", last));
        }
    }
}

fn add_word(text: &mut String, word: &str, help: &str, last: &str) {
    if word.starts_with(last) {
        text.push_str(word);
        if !help.is_empty() {
            text.push('\t');
            text.push_str(help);
        }
        text.push('\n');
    }
}
