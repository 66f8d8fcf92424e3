//! `completion SHELL`: scripts that complete commands and options, made from the grammar.

use std::ffi::OsString;
use std::fmt::Write;
use std::process::ExitCode;

use super::grammar::{Command, Completes, Opt};
use super::{PROGRAM, grammar, output, usage_error};

/// Prints the script for this shell.
pub(super) fn run(operands: &[OsString]) -> ExitCode {
    match operands.first().and_then(|shell| shell.to_str()) {
        Some("bash") => output::print(&bash()),
        Some("zsh") => output::print(&zsh()),
        Some("fish") => output::print(&fish()),
        _ => usage_error(&grammar::wrong(&PROGRAM, None, "there are completions for bash, zsh and fish")),
    }
}

/// What prints the names of CDI devices, of these words.
const CDI_DEVICES: &str = "oci-nvidia-hook cdi list 2>/dev/null";

/// All options, each once.
fn options() -> impl Iterator<Item = &'static Opt> {
    let of_commands = PROGRAM.commands.iter().flat_map(|command| command.options.iter().copied());
    let mut seen = Vec::new();
    of_commands.chain(PROGRAM.options).filter(move |option| is_new(&mut seen, option.long))
}

/// Options with a value, by what completes it, as patterns of a shell's `case`.
fn values() -> Vec<(Completes, String)> {
    let mut found: Vec<(Completes, String)> = Vec::new();
    for option in options() {
        let Some(value) = option.value else { continue };
        let mut words = format!("--{}", option.long);
        if let Some(letter) = option.short {
            write!(words, "|-{letter}").ok();
        }
        match found.iter_mut().find(|(completes, _)| *completes == value.completes) {
            Some((_, patterns)) => write!(patterns, "|{words}").unwrap_or_default(),
            None => found.push((value.completes, words)),
        }
    }
    found
}

/// The patterns of all of them.
fn value_options() -> String {
    values().into_iter().map(|(_, patterns)| patterns).collect::<Vec<_>>().join("|")
}

/// Whether it was not there before.
fn is_new(seen: &mut Vec<&'static str>, word: &'static str) -> bool {
    let new = !seen.contains(&word);
    if new {
        seen.push(word);
    }
    new
}

/// First words of commands of two.
fn groups() -> Vec<&'static str> {
    let mut groups = Vec::new();
    for command in PROGRAM.commands {
        if let Some((group, _)) = command.name.split_once(' ') {
            is_new(&mut groups, group);
        }
    }
    groups
}

fn first_words() -> Vec<&'static str> {
    let mut words = Vec::new();
    for command in PROGRAM.commands {
        is_new(&mut words, command.name.split_once(' ').map_or(command.name, |(first, _)| first));
    }
    words
}

fn second_words(group: &'static str) -> Vec<&'static str> {
    PROGRAM.group(group).filter_map(|command| command.name.split(' ').nth(1)).collect()
}

/// Its own options and those of the program, with their dashes.
fn option_words(command: Option<&'static Command>) -> Vec<String> {
    let own = command.into_iter().flat_map(|command| command.options.iter().copied());
    own.chain(PROGRAM.options).map(|option| format!("--{}", option.long)).collect()
}

fn operand_words(command: &Command) -> String {
    match command.operand.map(|operand| operand.completes) {
        Some(Completes::Words(words)) => words.join(" "),
        Some(Completes::Commands) => first_words().join(" "),
        Some(Completes::CdiDevices) => format!("$({CDI_DEVICES})"),
        _ => String::new(),
    }
}

fn bash() -> String {
    let mut text = format!(
        "# bash completion for oci-nvidia-hook, made by \"oci-nvidia-hook completion bash\"\n\
_oci_nvidia_hook() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} command= words= split= i
    # Bash makes three words of --option=value and of vendor/class=name.
    if [[ $cur == = ]]; then
        split=$prev cur=
    elif [[ $prev == = ]]; then
        split=${{COMP_WORDS[COMP_CWORD-2]}}
    fi
    [[ $split == -* ]] && prev=$split
    for ((i = 1; i < COMP_CWORD; i++)); do
        case ${{COMP_WORDS[i]}} in
            {values})
                [[ ${{COMP_WORDS[i+1]}} == = ]] && ((i++))
                ((i++)) ;;
            -*|=) ;;
            *)
                case $command in
                    '') command=${{COMP_WORDS[i]}} ;;
                    {groups}) command=\"$command ${{COMP_WORDS[i]}}\" ;;
                esac ;;
        esac
    done
    COMPREPLY=()
    case $prev in
",
        values = value_options(),
        groups = groups().join("|"),
    );
    for (completes, patterns) in values() {
        let reply = match completes {
            Completes::Files => "compopt -o filenames; COMPREPLY=($(compgen -f -- \"$cur\")); return".to_owned(),
            Completes::Directories => "compopt -o filenames; COMPREPLY=($(compgen -d -- \"$cur\")); return".to_owned(),
            Completes::Words(words) => {
                format!("COMPREPLY=($(compgen -W '{}' -- \"$cur\")); return", words.join(" "))
            }
            Completes::Nothing | Completes::Commands | Completes::CdiDevices => "return".to_owned(),
        };
        writeln!(text, "        {patterns}) {reply} ;;").ok();
    }
    text.push_str("    esac\n    case $command in\n");
    let first = first_words();
    writeln!(text, "        '') words='{} {}' ;;", first.join(" "), option_words(None).join(" ")).ok();
    for group in groups() {
        writeln!(text, "        {group}) words='{} --help' ;;", second_words(group).join(" ")).ok();
    }
    for command in PROGRAM.commands {
        let (options, operands) = (option_words(Some(command)).join(" "), operand_words(command));
        writeln!(text, "        '{}') words=\"{}\" ;;", command.name, format!("{operands} {options}").trim()).ok();
    }
    text.push_str(
        "    esac
    if [[ $split == */* ]]; then
        COMPREPLY=($(compgen -W \"$words\" -- \"$split=$cur\"))
        COMPREPLY=(\"${COMPREPLY[@]#*=}\")
    else
        COMPREPLY=($(compgen -W \"$words\" -- \"$cur\"))
    fi
}
complete -F _oci_nvidia_hook oci-nvidia-hook
",
    );
    text
}

/// In single quotes of a shell.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}

/// `word:help`, as zsh's _describe takes it.
fn described(word: &str, help: &str) -> String {
    quoted(&format!("{}:{help}", word.replace(':', "\\:")))
}

fn zsh() -> String {
    let mut text = format!(
        "#compdef oci-nvidia-hook
# made by \"oci-nvidia-hook completion zsh\"
_oci_nvidia_hook() {{
    local command=
    local -i i=2
    local -a found
    while (( i < CURRENT )); do
        case $words[i] in
            ({values}) (( i++ )) ;;
            (-*) ;;
            (*)
                case $command in
                    ('') command=$words[i] ;;
                    ({groups}) command=\"$command $words[i]\" ;;
                esac ;;
        esac
        (( i++ ))
    done
    case $words[CURRENT-1] in
",
        values = value_options(),
        groups = groups().join("|"),
    );
    for (completes, patterns) in values() {
        let reply = match completes {
            Completes::Files => "_files".to_owned(),
            Completes::Directories => "_files -/".to_owned(),
            Completes::Words(words) => format!("compadd -- {}", words.join(" ")),
            Completes::Nothing | Completes::Commands | Completes::CdiDevices => "_message value".to_owned(),
        };
        writeln!(text, "        ({patterns}) {reply}; return ;;").ok();
    }
    text.push_str("    esac\n    case $command in\n        ('')\n            found=(\n");
    let mut groups_told = Vec::new();
    for command in PROGRAM.commands {
        let told = match command.name.split_once(' ') {
            None => described(command.name, command.summary),
            Some((group, _)) if is_new(&mut groups_told, group) => described(group, &second_words(group).join(", ")),
            Some(_) => continue,
        };
        writeln!(text, "                {told}").ok();
    }
    text.push_str("            )\n            _describe command found ;;\n");
    for group in groups() {
        writeln!(text, "        ({group})\n            found=(").ok();
        for command in PROGRAM.group(group) {
            let word = command.name.split(' ').nth(1).unwrap_or_default();
            writeln!(text, "                {}", described(word, command.summary)).ok();
        }
        text.push_str("            )\n            _describe command found ;;\n");
    }
    for command in PROGRAM.commands.iter().filter(|command| command.operand.is_some()) {
        writeln!(text, "        ({}) compadd -- {} ;;", quoted(command.name), operand_words(command)).ok();
    }
    text.push_str("    esac\n    case $command in\n");
    for command in PROGRAM.commands.iter().filter(|command| !command.options.is_empty()) {
        writeln!(text, "        ({})\n            found=(", quoted(command.name)).ok();
        for option in command.options {
            writeln!(text, "                {}", described(&format!("--{}", option.long), option.help)).ok();
        }
        text.push_str("            )\n            _describe -o option found ;;\n");
    }
    text.push_str("    esac\n    found=(\n");
    for option in PROGRAM.options {
        writeln!(text, "        {}", described(&format!("--{}", option.long), option.help)).ok();
    }
    text.push_str("    )\n    _describe -o option found\n}\n_oci_nvidia_hook \"$@\"\n");
    text
}

fn fish() -> String {
    let mut text = String::from("# made by \"oci-nvidia-hook completion fish\"\n");
    let first = first_words();
    writeln!(text, "set -l commands {}\ncomplete -c oci-nvidia-hook -f", first.join(" ")).ok();
    for option in PROGRAM.options {
        fish_option(&mut text, "", option);
    }
    for group in groups() {
        let none = "not __fish_seen_subcommand_from $commands";
        fish_word(&mut text, none, group, &second_words(group).join(", "));
    }
    for command in PROGRAM.commands {
        let condition = match command.name.split_once(' ') {
            None => {
                fish_word(&mut text, "not __fish_seen_subcommand_from $commands", command.name, command.summary);
                let others = groups().join(" ");
                format!("__fish_seen_subcommand_from {}; and not __fish_seen_subcommand_from {others}", command.name)
            }
            Some((group, word)) => {
                let seconds = second_words(group).join(" ");
                let none =
                    format!("__fish_seen_subcommand_from {group}; and not __fish_seen_subcommand_from {seconds}");
                fish_word(&mut text, &none, word, command.summary);
                format!("__fish_seen_subcommand_from {group}; and __fish_seen_subcommand_from {word}")
            }
        };
        for option in command.options {
            fish_option(&mut text, &condition, option);
        }
        let operands = operand_words(command).replace("$(", "(");
        if !operands.is_empty() {
            let operands = if operands.starts_with('(') { operands } else { quoted(&operands) };
            writeln!(text, "complete -c oci-nvidia-hook -n {} -a {}", quoted(&condition), quoted_once(&operands)).ok();
        }
    }
    text
}

/// What is quoted stays so; what is to be run when it is needed is quoted for that.
fn quoted_once(text: &str) -> String {
    if text.starts_with('\'') { text.to_owned() } else { quoted(text) }
}

fn fish_word(text: &mut String, condition: &str, word: &str, help: &str) {
    // Double quotes: a variable in the condition is the script's own, and gone when it is asked.
    writeln!(text, "complete -c oci-nvidia-hook -n \"{condition}\" -a {word} -d {}", quoted(help)).ok();
}

fn fish_option(text: &mut String, condition: &str, option: &Opt) {
    text.push_str("complete -c oci-nvidia-hook");
    if !condition.is_empty() {
        write!(text, " -n {}", quoted(condition)).ok();
    }
    write!(text, " -l {}", option.long).ok();
    if let Some(letter) = option.short {
        write!(text, " -s {letter}").ok();
    }
    match option.value.map(|value| value.completes) {
        None => {}
        Some(Completes::Files) => text.push_str(" -r -F"),
        Some(Completes::Directories) => text.push_str(" -x -a '(__fish_complete_directories)'"),
        Some(Completes::Words(words)) => {
            write!(text, " -x -a {}", quoted(&words.join(" "))).ok();
        }
        Some(_) => text.push_str(" -x"),
    }
    writeln!(text, " -d {}", quoted(option.help)).ok();
}
