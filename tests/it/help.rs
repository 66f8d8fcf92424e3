//! Help, completions and the man page: all that the grammar has is told of, and nothing else.

use std::collections::BTreeSet;
use std::process::Command;

use oci_nvidia_hook::cli::PROGRAM;
use oci_nvidia_hook::cli::grammar::Completes;

use crate::Test;
use crate::driver::FakeDriver;
use crate::support::{HOOK, Need, run, scratch, source};

pub const TESTS: &[Test] = &[
    ("help::each_command_has_its_own", &[], each_command_has_its_own),
    ("help::hints_lead_to_the_right_help", &[], hints_lead_to_the_right_help),
    ("help::bash_completes", &[Need::Program("bash")], bash_completes),
    ("help::bash_completes_cdi_devices", &[Need::Root, Need::Program("bash"), Need::Program("cc")], cdi_devices),
    ("help::zsh_reads_its_script", &[Need::Program("zsh")], zsh_reads_its_script),
    ("help::fish_completes", &[Need::Program("fish")], fish_completes),
    ("help::the_man_page_tells_of_all", &[], the_man_page_tells_of_all),
    ("help::man_pages_have_no_mistakes", &[Need::Program("mandoc")], man_pages_have_no_mistakes),
];

fn hook(arguments: &[&str]) -> String {
    run(Command::new(HOOK).args(arguments).env_clear()).ok()
}

fn each_command_has_its_own() {
    let overview = hook(&["--help"]);
    assert_eq!(hook(&["help"]), overview);
    assert!(overview.lines().all(|line| line.len() <= 80), "{overview}");
    for command in PROGRAM.commands {
        assert!(overview.contains(&format!("\n  {} ", command.name)), "{}", command.name);
        let words: Vec<_> = command.name.split(' ').collect();
        let text = hook(&[&words[..], &["--help"]].concat());
        assert_eq!(hook(&[&["help"], &words[..]].concat()), text);
        assert!(text.starts_with(&format!("oci-nvidia-hook {}: {}\n", command.name, command.summary)), "{text}");
        for option in command.options {
            assert!(text.contains(&format!("\n  {}", option.usage())), "{}: {text}", option.usage());
        }
        for (_, lines) in command.examples {
            assert!(lines.lines().all(|line| text.contains(&format!("    {line}\n"))), "{text}");
        }
    }
    // A group is one page, with a line for each of its commands.
    let group = hook(&["cdi", "--help"]);
    assert_eq!((hook(&["help", "cdi"]), hook(&["cdi", "-h"])), (group.clone(), group.clone()));
    assert!(group.starts_with("usage: oci-nvidia-hook cdi COMMAND [options]\n"), "{group}");
    assert!(group.ends_with("\n\"oci-nvidia-hook cdi COMMAND --help\" shows the options of a command.\n"), "{group}");
    assert_eq!(group.matches("usage: ").count(), 1, "{group}");
    for word in ["generate", "refresh", "list", "check"] {
        assert_eq!(group.lines().filter(|line| line.starts_with(&format!("  {word} "))).count(), 1, "{group}");
    }
    let stderr = run(Command::new(HOOK).args(["help", "nonsense"])).failed(2);
    assert!(stderr.contains("\"nonsense\"") && stderr.contains("hint: "), "{stderr}");
    let stderr = run(Command::new(HOOK).args(["lsit"])).failed(2);
    assert!(stderr.contains("did you mean list?"), "{stderr}");
}

/// What bash offers at the end of this line.
fn offered(path: &str, line: &str) -> BTreeSet<String> {
    let script = "source <(oci-nvidia-hook completion bash) && COMP_LINE=$1 COMP_POINT=${#1} && compopt() { :; } && \
                  _oci_nvidia_hook && printf '%s\\n' \"${COMPREPLY[@]}\"";
    let mut bash = Command::new("bash");
    bash.args(["--norc", "-c", script, "bash", line]).env("PATH", path);
    let text = run(bash.current_dir(source("docs"))).ok();
    text.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect()
}

fn path_with_the_hook() -> (tempfile::TempDir, String) {
    let dir = scratch();
    std::os::unix::fs::symlink(HOOK, dir.path().join("oci-nvidia-hook")).unwrap();
    let path = format!("{}:{}", dir.path().display(), std::env::var("PATH").unwrap());
    (dir, path)
}

fn bash_completes() {
    let (_dir, path) = path_with_the_hook();
    let offered = |line: &str| offered(&path, &format!("oci-nvidia-hook {line}"));
    let set = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<BTreeSet<_>>();
    let first: BTreeSet<_> = PROGRAM.commands.iter().map(|command| command.name.split(' ').next().unwrap()).collect();
    let words = offered("");
    assert!(first.iter().all(|word| words.contains(*word)), "{words:?}");
    assert_eq!(words.len(), first.len(), "{words:?}");
    for (line, words) in [
        ("exp", &["explain"][..]),
        ("cdi ", &["generate", "refresh", "list", "check"]),
        ("--", &["--config", "--help", "--version"]),
        ("cdi r", &["refresh"]),
        ("--config /x inf", &["info"]),
        ("--config=/x inf", &["info"]),
        ("info --", &["--json", "--csv", "--root", "--config", "--help", "--version"]),
        ("cdi generate --format ", &["json", "yaml"]),
        ("cdi generate --format=y", &["yaml"]),
        ("cdi generate --output x.json --name-strategy=uu", &["uuid"]),
        ("explain --stage create", &["createRuntime", "createContainer"]),
        ("list --device ", &["all"]),
        ("--config find", &["findings.md"]),
        ("info --root ma", &["man"]),
        ("info --root find", &[]),
        ("completion z", &["zsh"]),
        ("help expl", &["explain"]),
        ("cdi nonsense ", &[]),
    ] {
        assert_eq!(offered(line), set(words), "{line}");
    }
    for command in PROGRAM.commands {
        let words = offered(&format!("{} --", command.name));
        let expected: BTreeSet<_> = command
            .options
            .iter()
            .copied()
            .chain(PROGRAM.options)
            .map(|option| format!("--{}", option.long()))
            .collect();
        assert_eq!(words, expected, "{}", command.name);
    }
}

fn cdi_devices() {
    let (dir, path) = path_with_the_hook();
    let fake = FakeDriver::shared();
    let specs = dir.path().join("cdi");
    std::fs::create_dir(&specs).unwrap();
    let mut generate = Command::new(HOOK);
    generate.arg("--config").arg(&fake.config).args(["cdi", "generate", "--output"]).arg(specs.join("nvidia.yaml"));
    run(&mut generate).ok();
    let line = format!("oci-nvidia-hook cdi check --spec-dir {} nvid", specs.display());
    let all = offered(&path, &line);
    assert!(all.contains("nvidia.com/gpu=all") && all.contains("nvidia.com/gpu=1"), "{all:?}");
    let split = offered(&path, &format!("{line}ia.com/gpu=a"));
    assert_eq!(split, BTreeSet::from(["all".to_owned()]), "bash has the part before = already");
}

fn zsh_reads_its_script() {
    let (dir, path) = path_with_the_hook();
    let script = dir.path().join("_oci-nvidia-hook");
    std::fs::write(&script, hook(&["completion", "zsh"])).unwrap();
    run(Command::new("zsh").arg("-n").arg(&script)).ok();
    // The completion system's own functions, told to print what they are given.
    let harness = "_describe() { [[ $1 == -o ]] && shift; print -l -- ${(P)2%%:*}; }; compadd() { shift; print -l -- $@; }; \
                   _files() { print files; }; compset() { :; }; _message() { print message; }; \
                   offer() { local -a words=(oci-nvidia-hook \"$@\") ; local -i CURRENT=$#words; source $SCRIPT; }; offer \"$@\"";
    let offered = |line: &[&str]| {
        let mut zsh = Command::new("zsh");
        zsh.args(["-f", "-c", harness, "zsh"]).args(line).env("SCRIPT", &script).env("PATH", &path);
        let ran = run(&mut zsh);
        assert_eq!(ran.stderr, "", "{line:?}");
        ran.ok().lines().map(str::to_owned).collect::<BTreeSet<_>>()
    };
    let has = |line: &[&str], words: &[&str]| {
        let offered = offered(line);
        assert!(words.iter().all(|word| offered.contains(*word)), "{line:?}: {offered:?}");
    };
    has(&[""], &["info", "cdi", "explain"]);
    has(&["-"], &["--config"]);
    has(&["cdi", ""], &["generate", "refresh", "list", "check"]);
    has(&["cdi", "generate", ""], &["--output", "--format", "--config"]);
    has(&["--config", "/x", "info", ""], &["--json", "--csv"]);
    has(&["cdi", "generate", "--format", ""], &["json", "yaml"]);
    has(&["--config", ""], &["files"]);
    has(&["completion", ""], &["bash", "zsh", "fish"]);
}

fn fish_completes() {
    let (dir, path) = path_with_the_hook();
    let script = dir.path().join("oci-nvidia-hook.fish");
    std::fs::write(&script, hook(&["completion", "fish"])).unwrap();
    run(Command::new("fish").arg("-n").arg(&script)).ok();
    let offered = |line: &str| {
        let mut fish = Command::new("fish");
        fish.args(["--no-config", "-c", "source $argv[1]; complete -C $argv[2]"]).arg(&script);
        fish.arg(format!("oci-nvidia-hook {line}")).env("PATH", &path).env("HOME", dir.path());
        let text = run(fish.current_dir(source("docs"))).ok();
        text.lines().map(|line| line.split('\t').next().unwrap().to_owned()).collect::<BTreeSet<_>>()
    };
    let set = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<BTreeSet<_>>();
    let first: BTreeSet<_> =
        PROGRAM.commands.iter().map(|command| command.name.split(' ').next().unwrap().to_owned()).collect();
    assert_eq!(offered(""), first);
    for (line, words) in [
        ("cdi ", &["generate", "refresh", "list", "check"][..]),
        ("info --", &["--json", "--csv", "--root", "--config", "--help", "--version"]),
        ("cdi list --", &["--spec-dir", "--json", "--root", "--config", "--help", "--version"]),
        ("list --no-f", &["--no-fabricmanager"]),
        ("cdi generate --format ", &["json", "yaml"]),
        ("completion ", &["bash", "zsh", "fish"]),
        ("--config find", &["findings.md"]),
    ] {
        assert_eq!(offered(line), set(words), "{line}");
    }
}

/// Words of the man page in bold that look like commands or options, and those of the grammar: the same.
fn the_man_page_tells_of_all() {
    let page = std::fs::read_to_string(source("docs/man/oci-nvidia-hook.8")).unwrap().replace("\\-", "-");
    let section = |name: &str| {
        let rest = page.split(&format!(".SH {name}\n")).nth(1).unwrap_or_else(|| panic!("{name}"));
        rest.split("\n.SH ").next().unwrap().to_owned()
    };
    let told = format!("{}\n{}", section("STAGES"), section("COMMANDS"));
    let mut commands = Vec::new();
    for part in told.split("\n.SS ").skip(1) {
        let (name, text) = part.split_once('\n').unwrap();
        commands.push(name.trim_matches('"').to_owned());
        let command = PROGRAM.commands.iter().find(|command| command.name == name.trim_matches('"'));
        let command = command.unwrap_or_else(|| panic!("{name} is no command"));
        assert_eq!(options_of(text), command.options.iter().map(|option| option.usage()).collect::<Vec<_>>(), "{name}");
    }
    assert_eq!(commands, PROGRAM.commands.iter().map(|command| command.name).collect::<Vec<_>>());
    assert_eq!(
        options_of(&section("OPTIONS")),
        PROGRAM.options.iter().map(|option| option.usage()).collect::<Vec<_>>()
    );
    for words in PROGRAM.commands.iter().filter_map(|command| match command.operand?.completes {
        Completes::Words(words) => Some(words),
        _ => None,
    }) {
        assert!(words.split(' ').all(|word| page.contains(word)));
    }
    // Both pages name each other, and the documents that are installed.
    assert!(section("SEE ALSO").contains("oci-nvidia-hook.toml"));
}

/// `-d, --device ID` of the lines `.BR -d ", " --device " " \fIID\fR`, in their order.
fn options_of(text: &str) -> Vec<String> {
    let lines: Vec<_> = text.lines().collect();
    let heads = lines.windows(2).filter(|pair| pair[0] == ".TP" && pair[1].contains("--")).map(|pair| pair[1]);
    let plain = |line: &str| {
        line.trim_start_matches(".B ").replace("\\fI", "").replace("\\fR", "").replace("\\fB", "").replace('"', "")
    };
    heads.map(plain).collect()
}

fn man_pages_have_no_mistakes() {
    let mut seen = 0;
    for page in std::fs::read_dir(source("docs/man")).unwrap().flatten() {
        let ran = run(Command::new("mandoc").args(["-Tlint", "-Wwarning"]).arg(page.path()));
        // The date is left out on purpose: it would be that of no build.
        let said: Vec<_> =
            ran.stdout.lines().chain(ran.stderr.lines()).filter(|line| !line.contains("missing date")).collect();
        assert!(said.is_empty(), "{said:?}");
        seen += 1;
    }
    assert_eq!(seen, 2);
}

/// The help that a wrong command line leads to lists what there is.
fn hints_lead_to_the_right_help() {
    for (arguments, hint) in [
        (&["list", "--librarie"][..], "did you mean --libraries? See \"oci-nvidia-hook list --help\""),
        (&["why", "--frobnicate"], "run \"oci-nvidia-hook why --help\""),
        (&["cdi"], "run \"oci-nvidia-hook cdi --help\""),
        (&["cdi", "nonsense"], "run \"oci-nvidia-hook cdi --help\""),
        (&["cdi", "genrate"], "did you mean generate? See \"oci-nvidia-hook cdi --help\""),
        (&["doctr"], "did you mean doctor? See \"oci-nvidia-hook --help\""),
        (&[], "run \"oci-nvidia-hook --help\""),
    ] {
        let stderr = run(Command::new(HOOK).args(arguments)).failed(2);
        assert!(stderr.ends_with(&format!(" (ONH-002)\nhint: {hint}\n")), "{arguments:?}: {stderr}");
    }
}
