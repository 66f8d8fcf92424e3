//! Help, completions and the man page describe exactly the commands and options of the program.

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use clap::{Arg, CommandFactory};
use oci_nvidia_hook::testing::cli::args::Cli;

use crate::driver::FakeDriver;
use crate::support::{HOOK, Need, run, scratch, source};

tests! {
    &[] => each_command_has_its_own, hints_lead_to_the_right_help, the_man_page_is_complete;
    &[Need::Program("bash")] => bash_completes;
    &[Need::Root, Need::Program("bash"), Need::Program("cc")] => bash_completes_cdi_devices;
    &[Need::Program("zsh")] => zsh_reads_its_script;
    &[Need::Program("fish")] => fish_completes;
    &[Need::Program("mandoc")] => man_pages_have_no_mistakes;
    &[Need::Program("groff")] => man_pages_fit_a_terminal;
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
    let of_group =
        |command: &'_ clap::Command| command.get_name() != "help" && command.has_subcommands();
    let mut commands = Vec::new();
    for command in program.get_subcommands() {
        let name = command.get_name();
        if of_group(command) {
            commands.extend(
                command
                    .get_subcommands()
                    .map(|sub| (format!("{name} {}", sub.get_name()), sub)),
            );
        } else {
            commands.push((name.to_owned(), command));
        }
    }
    commands
}

/// The first words that shells offer, which people type.
fn first_words(program: &clap::Command) -> BTreeSet<String> {
    let visible = program
        .get_subcommands()
        .filter(|command| !command.is_hide_set());
    visible
        .map(|command| command.get_name().to_owned())
        .collect()
}

/// `-d, --device ID`, as the man page has it.
fn usage_of(arg: &Arg) -> String {
    let short = arg
        .get_short()
        .map(|short| format!("-{short}, "))
        .unwrap_or_default();
    let value = arg
        .get_value_names()
        .filter(|_| arg.get_action().takes_values());
    let value = value
        .map(|names| format!(" {}", names.join(" ")))
        .unwrap_or_default();
    format!("{short}--{}{value}", arg.get_long().unwrap())
}

/// Returns the options of a command, without the options of the program.
fn own_options<'a>(program: &clap::Command, command: &'a clap::Command) -> Vec<&'a Arg> {
    let of_program = |arg: &Arg| {
        program
            .get_arguments()
            .any(|other| other.get_id() == arg.get_id())
    };
    command
        .get_arguments()
        .filter(|arg| !arg.is_positional() && !of_program(arg))
        .collect()
}

fn each_command_has_its_own() {
    let program = program();
    let overview = hook(&["--help"]);
    assert_eq!(hook(&["help"]), overview);
    assert!(overview.lines().all(|line| line.len() <= 80), "{overview}");
    // Each command is in one of the two groups, those for people first.
    let (own, called) = overview.split_once("\nCalled by engines:\n").unwrap();
    for command in program.get_subcommands() {
        let line = format!("\n  {} ", command.get_name());
        let group = if command.is_hide_set() {
            format!("\n{called}")
        } else {
            own.to_owned()
        };
        assert_eq!(
            (
                group.matches(&line).count(),
                overview.matches(&line).count()
            ),
            (1, 1),
            "{line}"
        );
    }
    let first = own.split("\nCommands:\n").nth(1).unwrap();
    assert!(first.starts_with("  ps "), "{first}");
    assert_eq!(
        called.lines().take_while(|line| !line.is_empty()).count(),
        6,
        "{called}"
    );
    // A bare command prints the help too.
    let stderr = run(Command::new(HOOK).env_clear()).failed(2);
    assert!(
        stderr.starts_with(&overview)
            && stderr.contains(": a command is missing (ONH-002)\nhint: "),
        "{stderr}"
    );
    for (name, command) in commands(&program) {
        let words: Vec<_> = name.split(' ').collect();
        let text = hook(&[&words[..], &["--help"]].concat());
        assert_eq!(hook(&[&["help"], &words[..]].concat()), text);
        assert!(
            text.starts_with(&command.get_about().unwrap().to_string()),
            "{text}"
        );
        assert!(
            text.contains(&format!("\nUsage: oci-nvidia-hook {name} [OPTIONS]")),
            "{text}"
        );
        assert!(text.lines().all(|line| line.len() <= 80), "{text}");
        for option in own_options(&program, command) {
            assert!(
                text.contains(&format!("--{}", option.get_long().unwrap())),
                "{option}: {text}"
            );
        }
    }
    // A group is one page, with a line for each of its commands.
    let group = hook(&["cdi", "--help"]);
    assert_eq!(
        (hook(&["help", "cdi"]), hook(&["cdi", "-h"])),
        (group.clone(), group.clone())
    );
    assert!(
        group.contains("Usage: oci-nvidia-hook cdi [OPTIONS] <COMMAND>\n"),
        "{group}"
    );
    for word in ["generate", "refresh", "list", "check"] {
        assert_eq!(
            group
                .lines()
                .filter(|line| line.starts_with(&format!("  {word} ")))
                .count(),
            1,
            "{group}"
        );
    }
    let stderr = run(Command::new(HOOK).args(["help", "nonsense"])).failed(2);
    assert!(
        stderr.contains("\"nonsense\"") && stderr.contains("hint: "),
        "{stderr}"
    );
    let stderr = run(Command::new(HOOK).args(["flies"])).failed(2);
    assert!(stderr.contains("did you mean files?"), "{stderr}");
}

/// Returns the completions of bash at the end of this line.
fn offered(path: &str, line: &str) -> BTreeSet<String> {
    let script = "source <(oci-nvidia-hook completion bash) && COMP_LINE=$1 COMP_POINT=${#1} && compopt() { :; } && \
                  _oci_nvidia_hook && printf '%s\\n' \"${COMPREPLY[@]}\"";
    let mut bash = Command::new("bash");
    bash.args(["--norc", "-c", script, "bash", line])
        .env("PATH", path);
    let text = run(bash.current_dir(source("docs"))).ok();
    text.lines()
        .filter(|line| !line.is_empty())
        .map(str::to_owned)
        .collect()
}

fn path_with_the_hook() -> (tempfile::TempDir, String) {
    let dir = scratch();
    std::os::unix::fs::symlink(HOOK, dir.path().join("oci-nvidia-hook")).unwrap();
    let path = format!(
        "{}:{}",
        dir.path().display(),
        std::env::var("PATH").unwrap()
    );
    (dir, path)
}

fn bash_completes() {
    let (_dir, path) = path_with_the_hook();
    let offered = |line: &str| offered(&path, &format!("oci-nvidia-hook {line}"));
    let set = |words: &[&str]| {
        words
            .iter()
            .map(|word| (*word).to_owned())
            .collect::<BTreeSet<_>>()
    };
    let program = program();
    assert_eq!(offered(""), first_words(&program));
    for (line, words) in [
        ("exp", &["explain"][..]),
        ("cdi ", &["generate", "refresh", "list", "check"]),
        (
            "--",
            &["--config", "--color", "--debug", "--help", "--version"],
        ),
        ("pre", &["prepare"]),
        ("post", &[]),
        ("prestart --con", &["--config"]),
        ("help cdi gen", &["generate"]),
        (
            "explain --",
            &[
                "--list",
                "--json",
                "--config",
                "--color",
                "--debug",
                "--help",
                "--version",
            ],
        ),
        ("cdi r", &["refresh"]),
        ("--config /x inf", &["info"]),
        ("--config=/x inf", &["info"]),
        (
            "info --",
            &[
                "--json",
                "--csv",
                "--root",
                "--config",
                "--color",
                "--debug",
                "--help",
                "--version",
            ],
        ),
        ("cdi generate --format ", &["json", "yaml"]),
        ("cdi generate --format=y", &["yaml"]),
        ("cdi generate --output x.json --name-strategy=uu", &["uuid"]),
        ("plan --stage create", &["createRuntime", "createContainer"]),
        ("explain ONH-9", &[]),
        ("explain ONH-001", &["ONH-001"]),
        ("files --device ", &["all"]),
        ("--config trou", &["troubleshooting.md"]),
        ("info --root ma", &["man/"]),
        ("info --root find", &[]),
        ("completion z", &["zsh"]),
        ("doctor --color ", &["auto", "always", "never"]),
        ("help expl", &["explain"]),
    ] {
        assert_eq!(offered(line), set(words), "{line}");
    }
    for (name, command) in commands(&program)
        .into_iter()
        .filter(|(name, _)| name != "help")
    {
        let options = own_options(&program, command)
            .into_iter()
            .chain(program.get_arguments());
        let expected: BTreeSet<_> = options
            .map(|option| format!("--{}", option.get_long().unwrap()))
            .collect();
        assert_eq!(offered(&format!("{name} --")), expected, "{name}");
    }
}

fn bash_completes_cdi_devices() {
    let (dir, path) = path_with_the_hook();
    let fake = FakeDriver::shared();
    let specs = dir.path().join("cdi");
    std::fs::create_dir(&specs).unwrap();
    let mut generate = Command::new(HOOK);
    generate
        .arg("--config")
        .arg(&fake.config)
        .args(["cdi", "generate", "--output"])
        .arg(specs.join("nvidia.yaml"));
    run(&mut generate).ok();
    let line = format!(
        "oci-nvidia-hook cdi check --spec-dir {} nvid",
        specs.display()
    );
    let all = offered(&path, &line);
    assert!(
        all.contains("nvidia.com/gpu=all") && all.contains("nvidia.com/gpu=1"),
        "{all:?}"
    );
    let split = offered(&path, &format!("{line}ia.com/gpu=a"));
    assert_eq!(
        split,
        BTreeSet::from(["all".to_owned()]),
        "bash already has the part up to ="
    );

    // The author of a pod chooses the names of its containers, and bash does not quote what a function returns.
    let program = dir.path().join("hostile");
    std::fs::write(&program, "#!/bin/sh\nprintf '$(id) x\\tits help\\n'").unwrap();
    std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
    let quoted = offered(&path, &format!("{} why ", program.display()));
    assert_eq!(quoted, BTreeSet::from([r"\$\(id\)\ x".to_owned()]));
}

fn zsh_reads_its_script() {
    let (dir, path) = path_with_the_hook();
    let script = dir.path().join("_oci-nvidia-hook");
    std::fs::write(&script, hook(&["completion", "zsh"])).unwrap();
    run(Command::new("zsh").arg("-n").arg(&script)).ok();
    // The functions of the completion system, replaced by ones that print their arguments.
    let harness = "_describe() { print -l -- ${(P)2%%:*}; }; _message() { print $1; }; \
                   offer() { local -a words=(oci-nvidia-hook \"$@\") ; local -i CURRENT=$#words; source $SCRIPT; }; offer \"$@\"";
    let offered = |line: &[&str]| {
        let mut zsh = Command::new("zsh");
        zsh.args(["-f", "-c", harness, "zsh"])
            .args(line)
            .env("SCRIPT", &script)
            .env("PATH", &path);
        let ran = run(&mut zsh);
        assert_eq!(ran.stderr, "", "{line:?}");
        ran.ok().lines().map(str::to_owned).collect::<BTreeSet<_>>()
    };
    let has = |line: &[&str], words: &[&str]| {
        let offered = offered(line);
        assert!(
            words.iter().all(|word| offered.contains(*word)),
            "{line:?}: {offered:?}"
        );
    };
    has(&[""], &["info", "cdi", "explain"]);
    has(&["-"], &["--config"]);
    has(&["cdi", ""], &["generate", "refresh", "list", "check"]);
    has(
        &["cdi", "generate", ""],
        &["--output", "--format", "--config"],
    );
    has(&["--config", "/x", "info", ""], &["--json", "--csv"]);
    has(&["cdi", "generate", "--format", ""], &["json", "yaml"]);
    has(&["--config", ""], &["README.md", "docs/"]);
    has(&["--config", "/x", "nonsense", "y"], &["value"]);
    has(&["completion", ""], &["bash", "zsh", "fish"]);
}

fn fish_completes() {
    let (dir, path) = path_with_the_hook();
    let script = dir.path().join("oci-nvidia-hook.fish");
    std::fs::write(&script, hook(&["completion", "fish"])).unwrap();
    run(Command::new("fish").arg("-n").arg(&script)).ok();
    let offered = |line: &str| {
        let mut fish = Command::new("fish");
        fish.args(["--no-config", "-c", "source $argv[1]; complete -C $argv[2]"])
            .arg(&script);
        fish.arg(format!("oci-nvidia-hook {line}"))
            .env("PATH", &path)
            .env("HOME", dir.path());
        let text = run(fish.current_dir(source("docs"))).ok();
        text.lines()
            .map(|line| line.split('\t').next().unwrap().to_owned())
            .collect::<BTreeSet<_>>()
    };
    let set = |words: &[&str]| {
        words
            .iter()
            .map(|word| (*word).to_owned())
            .collect::<BTreeSet<_>>()
    };
    assert_eq!(offered(""), first_words(&program()));
    for (line, words) in [
        ("cdi ", &["generate", "refresh", "list", "check"][..]),
        (
            "info --",
            &[
                "--json",
                "--csv",
                "--root",
                "--config",
                "--color",
                "--debug",
                "--help",
                "--version",
            ],
        ),
        (
            "cdi list --",
            &[
                "--spec-dir",
                "--json",
                "--root",
                "--config",
                "--color",
                "--debug",
                "--help",
                "--version",
            ],
        ),
        (
            "explain ONH-03",
            &[
                "ONH-030", "ONH-031", "ONH-032", "ONH-033", "ONH-034", "ONH-035", "ONH-036",
                "ONH-037", "ONH-038",
            ],
        ),
        ("files --no-f", &["--no-fabricmanager"]),
        ("cdi generate --format ", &["json", "yaml"]),
        ("completion ", &["bash", "zsh", "fish"]),
        ("--config trou", &["troubleshooting.md"]),
    ] {
        assert_eq!(offered(line), set(words), "{line}");
    }
}

/// The words in bold in the man page that look like commands or options exist on the command line.
fn the_man_page_is_complete() {
    let page = std::fs::read_to_string(source("docs/man/oci-nvidia-hook.8"))
        .unwrap()
        .replace("\\-", "-");
    let section = |name: &str| {
        let rest = page
            .split(&format!(".SH {name}\n"))
            .nth(1)
            .unwrap_or_else(|| panic!("{name}"));
        rest.split("\n.SH ").next().unwrap().to_owned()
    };
    let shown = format!(
        "\n{}\n{}",
        section("COMMANDS"),
        section("CALLED BY ENGINES")
    );
    let program = program();
    let known = commands(&program);
    let mut documented = Vec::new();
    for part in shown.split("\n.SS ").skip(1) {
        let (name, text) = part.split_once('\n').unwrap();
        // `plan [OPTIONS] CONTAINER|-`, as in the help.
        let heading = name.trim_matches('"');
        let usage = |command: &clap::Command| {
            let usage = command.clone().render_usage().to_string();
            usage
                .strip_prefix("Usage: oci-nvidia-hook ")
                .unwrap()
                .replace(['<', '>'], "")
        };
        let (name, command) = known
            .iter()
            .find(|(_, command)| usage(command) == heading)
            .unwrap_or_else(|| panic!("unknown {heading}"));
        documented.push(name.as_str());
        let usages: Vec<_> = own_options(&program, command)
            .into_iter()
            .map(usage_of)
            .collect();
        assert_eq!(options_of(text), usages, "{name}");
        assert_values(text, &own_options(&program, command));
        let values = command.get_positionals().flat_map(Arg::get_possible_values);
        assert!(
            values
                .into_iter()
                .all(|value| page.contains(value.get_name())),
            "{name}"
        );
    }
    assert_eq!(
        documented,
        known
            .iter()
            .map(|(name, _)| name.as_str())
            .collect::<Vec<_>>()
    );
    assert_eq!(
        options_of(&section("OPTIONS")),
        program.get_arguments().map(usage_of).collect::<Vec<_>>()
    );
    let of_program: Vec<_> = program.get_arguments().collect();
    assert_values(&section("OPTIONS"), &of_program);
    // Both pages name each other and the installed documents.
    assert!(section("SEE ALSO").contains("oci-nvidia-hook.toml"));
}

/// Compares the values in bold in the entries of these options with the values that the program accepts.
#[track_caller]
fn assert_values(text: &str, options: &[&Arg]) {
    for option in options {
        let values = option.get_possible_values();
        if values.is_empty() || !option.get_action().takes_values() {
            continue;
        }
        let head = format!("--{} ", option.get_long().unwrap());
        let mut entries = text.split("\n.TP\n");
        let entry = entries.find(|entry| entry.lines().next().unwrap().contains(&head));
        let (_, entry) = entry.unwrap().split_once('\n').unwrap();
        let mut shown = BTreeSet::new();
        for line in entry.lines() {
            let bold = line
                .strip_prefix(".B ")
                .or_else(|| line.strip_prefix(".BR "));
            shown.extend(bold.and_then(|words| words.split(' ').next()));
        }
        let visible = values.iter().filter(|value| !value.is_hide_set());
        let accepted: BTreeSet<_> = visible.map(|value| value.get_name()).collect();
        assert_eq!(shown, accepted, "{head}");
    }
}

/// Returns `-d, --device ID` from the lines `.BR -d ", " --device " " \fIID\fR`, in their order.
fn options_of(text: &str) -> Vec<String> {
    let lines: Vec<_> = text.lines().collect();
    let heads = lines
        .windows(2)
        .filter(|pair| pair[0] == ".TP" && pair[1].contains("--"))
        .map(|pair| pair[1]);
    let plain = |line: &str| {
        line.trim_start_matches(".B ")
            .replace("\\fI", "")
            .replace("\\fR", "")
            .replace("\\fB", "")
            .replace('"', "")
    };
    heads.map(plain).collect()
}

fn man_pages_have_no_mistakes() {
    let mut seen = 0;
    for page in std::fs::read_dir(source("docs/man")).unwrap().flatten() {
        let ran = run(Command::new("mandoc")
            .args(["-Tlint", "-Wstyle"])
            .arg(page.path()));
        let said: Vec<_> = ran.stdout.lines().chain(ran.stderr.lines()).collect();
        assert!(said.is_empty(), "{said:?}");
        // .TH TITLE SECTION "DATE" "SOURCE" "VOLUME"
        let text = std::fs::read_to_string(page.path()).unwrap();
        let head = text.lines().next().unwrap();
        let quoted: Vec<_> = head.split('"').skip(1).step_by(2).collect();
        assert_eq!(
            quoted[..2],
            [
                release_date().as_str(),
                concat!("oci-nvidia-hook ", env!("CARGO_PKG_VERSION"))
            ],
            "{head}"
        );
        // In a terminal of 80 columns, the title is on both sides of the volume.
        let title = head.split(' ').nth(1).unwrap().len() + "(8)".len();
        assert!(2 * title + quoted[2].len() + 2 * 2 <= 78, "{head}");
        seen += 1;
    }
    assert_eq!(seen, 3);
}

/// groff, which `man` uses, warns about a line that it cannot fill in a terminal of 80 columns; mandoc does not.
fn man_pages_fit_a_terminal() {
    let mut seen = 0;
    for page in std::fs::read_dir(source("docs/man")).unwrap().flatten() {
        let ran = run(Command::new("groff")
            .args(["-man", "-Tascii", "-P-bcou", "-rLL=80n", "-ww"])
            .arg(page.path()));
        assert_eq!(ran.stderr, "", "{:?}", page.path());
        for line in ran.stdout.lines() {
            assert!(line.len() <= 80, "{:?}: {line}", page.path());
            seen += 1;
        }
    }
    assert!(seen > 1500, "{seen}");
}

/// Returns the date of the last entry of the changelog in the RPM spec, `* Sat Nov 21 2026 …`, as `2026-11-21`.
fn release_date() -> String {
    let spec = std::fs::read_to_string(source("packaging/rpm.spec")).unwrap();
    let entry = spec.lines().find(|line| line.starts_with("* ")).unwrap();
    let words: Vec<_> = entry.split(' ').collect();
    let months = [
        "Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec",
    ];
    let month = months.iter().position(|name| *name == words[2]).unwrap() + 1;
    format!("{}-{month:02}-{:0>2}", words[4], words[3])
}

/// The help to which an invalid command line refers lists the possible values.
fn hints_lead_to_the_right_help() {
    for (arguments, hint) in [
        (
            &["files", "--librarie"][..],
            "did you mean --libraries? See \"oci-nvidia-hook files --help\"",
        ),
        (
            &["why", "--frobnicate"],
            "run \"oci-nvidia-hook why --help\"",
        ),
        (&["cdi"], "run \"oci-nvidia-hook cdi --help\""),
        (&["cdi", "nonsense"], "run \"oci-nvidia-hook cdi --help\""),
        (
            &["cdi", "genrate"],
            "did you mean generate? See \"oci-nvidia-hook cdi --help\"",
        ),
        (
            &["doctr"],
            "did you mean doctor? See \"oci-nvidia-hook --help\"",
        ),
        (&[], "run \"oci-nvidia-hook help\""),
    ] {
        let stderr = run(Command::new(HOOK).args(arguments)).failed(2);
        assert!(
            stderr.ends_with(&format!(" (ONH-002)\nhint: {hint}\n")),
            "{arguments:?}: {stderr}"
        );
    }
}
