//! What a person reads: the output of a program on a terminal, with and without colors, and in a pipe. It is compared with
//! `tests/golden/NAME.txt`, which must be reviewed when it changes: `UPDATE_GOLDEN=1 cargo test --test it -- MODULE::`.
//!
//! A file has a section for each view. Escape codes are visible, as `\e[31m`. The inputs of a test make the output stable, so nothing in
//! it is replaced: tests write records with fixed ids and with times relative to now, and run the program where paths are fixed.

use std::process::Command;

use oci_nvidia_hook::testing::cli::terminal::Terminal;

use crate::driver::FakeDriver;
use crate::support::{HOOK, Need, Ran};
use crate::views::{VIEWS, compare, section, visible};
pub use crate::views::{View, check, without_color};

/// What a test with [`check`] needs in addition to its own program.
pub const SCRIPT: Need = Need::Program("script");

tests! {
    &[SCRIPT] => each_view_is_what_it_says;
    &[SCRIPT, Need::Root, Need::Program("cc")] => the_gpus;
}

impl View {
    /// Runs the program with only the environment that the command sets and PATH.
    pub fn run(self, command: &Command) -> Ran {
        let mut ran = Ran::from(self.output(command));
        ran.stdout = ran.stdout.replace("\r\n", "\n");
        ran
    }
}

/// Compares the text of each view with `tests/golden/NAME.txt`, for hosts that are directories. `render` gets the terminal.
#[track_caller]
pub fn check_text(name: &str, shown: &str, render: impl Fn(Terminal) -> String) {
    let mut text = format!("$ {shown}\n");
    for view in VIEWS {
        let is_screen = view != View::Pipe;
        let plain = render(Terminal { has_color: false });
        let colored = render(Terminal { has_color: true });
        assert_eq!(
            without_color(&colored),
            plain,
            "colors change the text of {shown:?}"
        );
        let shown = if is_screen { colored } else { plain };
        text += &format!("\n## {}\n\n{}", view.title(), visible(&shown));
    }
    compare(name, &text);
}

fn each_view_is_what_it_says() {
    let mut program = Command::new("sh");
    let script = "test -t 1 && echo terminal; echo \"NO_COLOR=${NO_COLOR-} $FIXED it's\"; \
                  printf '\\033[31mred\\033[0m\\n'; echo problem >&2; exit 3";
    program.args(["-c", script]).env("FIXED", "a value");
    for (color, variable) in [(false, "1"), (true, "")] {
        let ran = View::Terminal { color }.run(&program);
        assert_eq!(ran.code, Some(3));
        assert_eq!(
            ran.stdout,
            format!(
                "terminal\nNO_COLOR={variable} a value it's\n\u{1b}[31mred\u{1b}[0m\nproblem\n"
            )
        );
    }
    let piped = View::Pipe.output(&program);
    assert_eq!(
        section(View::Pipe, &piped),
        "## pipe\n\nNO_COLOR= a value it's\n\\e[31mred\\e[0m\n\n# stderr\n\nproblem\n\n# exit status 3\n"
    );
}

fn the_gpus() {
    let mut info = Command::new(HOOK);
    check(
        "info",
        "oci-nvidia-hook info",
        info.arg("--config")
            .arg(&FakeDriver::shared().config)
            .arg("info"),
    );
}
