//! What a program prints on a terminal, with and without colors, and in a pipe, and its comparison with
//! `tests/golden/NAME.txt` of the crate. The tests of the device plugin use this file, too.

use std::path::Path;
use std::process::{Command, Output};

/// What the program's stdout is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum View {
    /// A terminal, which also shows stderr
    Terminal { color: bool },
    /// A pipe; stderr is another one
    Pipe,
}

/// The views of [`check`], which also compares a terminal without colors with the one that has them.
pub const VIEWS: [View; 2] = [View::Terminal { color: true }, View::Pipe];

impl View {
    pub const fn title(self) -> &'static str {
        match self {
            Self::Terminal { color: true } => "terminal with colors",
            Self::Terminal { color: false } => "terminal",
            Self::Pipe => "pipe",
        }
    }

    /// Runs the program with only the environment that the command sets and PATH.
    pub fn output(self, command: &Command) -> Output {
        let (program, more) = match self {
            Self::Terminal { color } => {
                let line = format!("exec {}", words(command));
                let color = if color { "A=b" } else { "NO_COLOR=1" };
                (
                    vec![
                        "script".to_owned(),
                        "-qec".to_owned(),
                        line,
                        "/dev/null".to_owned(),
                    ],
                    ["TERM=xterm", color],
                )
            }
            Self::Pipe => (
                vec![
                    "sh".to_owned(),
                    "-c".to_owned(),
                    format!("exec {}", words(command)),
                ],
                ["TERM=xterm", "A=b"],
            ),
        };
        let mut env = Command::new("env");
        env.arg("-i")
            .args(more)
            .arg(format!("PATH={}", std::env::var("PATH").unwrap()));
        // Without it, script of util-linux 2.42 starts the shell of the user, and the shell of a system user is nologin.
        env.arg("SHELL=/bin/sh");
        for (name, value) in command.get_envs() {
            env.arg(format!(
                "{}={}",
                name.to_str().unwrap(),
                value.unwrap().to_str().unwrap()
            ));
        }
        env.args(program).output().unwrap()
    }
}

/// Returns the command as a line for a shell.
fn words(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let quoted = words.map(|word| format!("'{}'", word.to_str().unwrap().replace('\'', "'\\''")));
    quoted.collect::<Vec<_>>().join(" ")
}

/// Removes the codes for colors.
pub fn without_color(text: &str) -> String {
    let mut parts = text.split("\u{1b}[");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |plain, part| {
        plain + part.split_once('m').map_or(part, |(_, rest)| rest)
    })
}

/// Makes escape codes and other control characters visible.
pub fn visible(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        match c {
            '\n' => out.push('\n'),
            '\u{1b}' => out.push_str("\\e"),
            c if c.is_control() => out.extend(c.escape_default()),
            c => out.push(c),
        }
    }
    out
}

/// Returns the text of a stream. A terminal gets a carriage return with each line feed.
pub fn text(stream: &[u8]) -> String {
    String::from_utf8(stream.to_vec())
        .unwrap()
        .replace("\r\n", "\n")
}

/// Returns the section of a view: its title, what the program printed, and its exit status unless that is 0.
pub fn section(view: View, ran: &Output) -> String {
    let mut section = format!("## {}\n\n{}", view.title(), visible(&text(&ran.stdout)));
    if !ran.stderr.is_empty() {
        section += &format!("\n# stderr\n\n{}", visible(&text(&ran.stderr)));
    }
    match ran.status.code() {
        Some(0) => section,
        code => format!("{section}\n# exit status {}\n", code.unwrap_or(-1)),
    }
}

/// Compares the output of the program in each view with `tests/golden/NAME.txt`. `shown` is the command line as users type it.
#[track_caller]
pub fn check(name: &str, shown: &str, command: &Command) {
    let mut all = format!("$ {shown}\n");
    for view in VIEWS {
        let ran = view.output(command);
        all += &format!("\n{}", section(view, &ran));
        if view == (View::Terminal { color: true }) {
            let plain = View::Terminal { color: false }.output(command);
            assert_eq!(
                without_color(&text(&ran.stdout)),
                text(&plain.stdout),
                "colors change the text of {shown:?}"
            );
        }
    }
    compare(name, &all);
}

#[track_caller]
pub fn compare(name: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/golden")
        .join(format!("{name}.txt"));
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&path, text).unwrap();
        return;
    }
    let golden = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        golden == text,
        "{} differs. UPDATE_GOLDEN=1 writes it. The output is now:\n{text}",
        path.display()
    );
}
