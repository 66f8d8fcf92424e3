//! `completion SHELL`: small scripts that ask the program itself what can stand at the end of a line, so that all shells
//! offer the same.

use std::ffi::OsString;
use std::process::ExitCode;

use clap::builder::{StyledStr, ValueHint};
use clap::{Arg, Command, CommandFactory};

use base::report::one_line;

use super::args::{Cli, Shell};
use super::{cdi_check, output};

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
pub(super) fn run(shell: Shell) -> ExitCode {
    output::print(match shell {
        Shell::Bash => BASH,
        Shell::Zsh => ZSH,
        Shell::Fish => FISH,
    })
}

/// Prints what can stand in the place of the last of these words: each on a line, with its help behind a tab; or `:files`, or
/// `:directories`, which shells know.
pub(super) fn complete(words: &[OsString]) -> ExitCode {
    let words: Vec<String> = words.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    output::print(&offer(&words).unwrap_or_default())
}

/// `None` behind a word that is not a command.
fn offer(words: &[String]) -> Option<String> {
    let mut program = Cli::command();
    program.build();
    let (last, before) = words.split_last()?;
    let mut command = &program;
    let mut wants: Option<&Arg> = None;
    let mut spec_dirs = Vec::new();
    for word in before {
        if let Some(option) = wants.take() {
            if option.get_id() == "spec_dirs" {
                spec_dirs.push(word.as_str());
            }
        } else if word.starts_with('-') {
            wants = option(command, word).filter(|_| !word.contains('='));
        } else if command.has_subcommands() {
            command = command.find_subcommand(word)?;
        }
    }
    let mut offers = Offers { text: String::new(), last };
    if let Some(option) = wants {
        offers.add_values(option, "", &spec_dirs);
    } else if let Some((name, _)) = last.split_once('=').filter(|_| last.starts_with('-')) {
        offers.add_values(option(command, name)?, last.get(..=name.len())?, &spec_dirs);
    } else {
        offers.add_words(command, &spec_dirs);
    }
    Some(offers.text)
}

/// The option of this word that takes a value, `--option=value` too.
fn option<'a>(command: &'a Command, word: &str) -> Option<&'a Arg> {
    let name = word.split('=').next().unwrap_or(word);
    let is_it = |arg: &&Arg| match name.strip_prefix("--") {
        Some(long) => arg.get_long() == Some(long),
        None => arg.get_short().is_some_and(|letter| name.strip_prefix('-') == Some(letter.encode_utf8(&mut [0; 4]))),
    };
    command.get_arguments().find(is_it).filter(|arg| arg.get_action().takes_values())
}

struct Offers<'a> {
    text: String,
    /// What has been typed of the word
    last: &'a str,
}

impl Offers<'_> {
    /// Commands, what a command works on, and options.
    fn add_words(&mut self, command: &Command, spec_dirs: &[&str]) {
        for command in command.get_subcommands() {
            self.add(command.get_name(), command.get_about());
        }
        if let Some(operand) = command.get_positionals().next() {
            self.add_values(operand, "", spec_dirs);
        }
        // Where nothing was typed yet, options would hide the rest.
        if !self.text.is_empty() && !self.last.starts_with('-') {
            return;
        }
        for arg in command.get_arguments() {
            if let Some(long) = arg.get_long() {
                self.add(&format!("--{long}"), arg.get_help());
            }
        }
    }

    fn add_values(&mut self, arg: &Arg, prefix: &str, spec_dirs: &[&str]) {
        match (arg.get_id().as_str(), arg.get_value_hint()) {
            ("names", _) => {
                cdi_check::names(spec_dirs).iter().for_each(|name| self.add(&one_line(name), None));
            }
            ("devices", _) => self.add(&format!("{prefix}all"), None),
            (_, ValueHint::FilePath) => self.text.push_str(":files\n"),
            (_, ValueHint::DirPath) => self.text.push_str(":directories\n"),
            _ => {
                for value in arg.get_possible_values().iter().filter(|value| !value.is_hide_set()) {
                    self.add(&format!("{prefix}{}", value.get_name()), None);
                }
            }
        }
    }

    fn add(&mut self, word: &str, help: Option<&StyledStr>) {
        if word.starts_with(self.last) {
            self.text.push_str(word);
            if let Some(help) = help {
                self.text.push('\t');
                self.text.push_str(&help.to_string().replace('\n', " "));
            }
            self.text.push('\n');
        }
    }
}
