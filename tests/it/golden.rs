//! What a person reads: the output of a program on terminals of two widths, with and without colors, and in a pipe. It is compared with
//! `tests/golden/NAME.txt`, which must be reviewed when it changes: `UPDATE_GOLDEN=1 cargo test --test it -- MODULE::`.
//!
//! A file has a section for each view. Escape codes are visible, as `\e[31m`. The inputs of a test make the output stable, so nothing in
//! it is replaced: tests write records with fixed ids and with times relative to now, and run the program where paths are fixed.

use std::process::Command;

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

/// Compares the text of each view with `tests/golden/NAME.txt`, for hosts that are directories. `render` gets the number of columns,
/// `None` in a pipe, and whether there are colors.
#[track_caller]
pub fn check_text(name: &str, shown: &str, render: impl Fn(Option<usize>, bool) -> String) {
    let mut text = format!("$ {shown}\n");
    for view in VIEWS {
        let (columns, color) = match view {
            View::Terminal { columns, color } => (Some(columns), color),
            View::Pipe => (None, false),
        };
        text += &format!(
            "\n## {}\n\n{}",
            view.title(),
            visible(&render(columns, color))
        );
        assert_eq!(
            without_color(&render(columns, true)),
            render(columns, false),
            "colors change the text of {shown:?}"
        );
    }
    compare(name, &text);
}

fn each_view_is_what_it_says() {
    let mut program = Command::new("sh");
    let script = "test -t 1 && stty size | cut -d' ' -f2; echo \"NO_COLOR=${NO_COLOR-} $FIXED it's\"; \
                  printf '\\033[31mred\\033[0m\\n'; echo problem >&2; exit 3";
    program.args(["-c", script]).env("FIXED", "a value");
    let plain = View::Terminal {
        columns: 80,
        color: false,
    }
    .run(&program);
    assert_eq!(
        plain.stdout,
        "80\nNO_COLOR=1 a value it's\n\u{1b}[31mred\u{1b}[0m\nproblem\n"
    );
    let wide = View::Terminal {
        columns: 200,
        color: true,
    }
    .run(&program);
    assert_eq!(
        wide.stdout,
        "200\nNO_COLOR= a value it's\n\u{1b}[31mred\u{1b}[0m\nproblem\n"
    );
    let piped = View::Pipe.output(&program);
    assert_eq!(
        section(View::Pipe, &piped),
        "## pipe\n\nNO_COLOR= a value it's\n\\e[31mred\\e[0m\n\n# stderr\n\nproblem\n\n# exit status 3\n"
    );
    assert_eq!(
        (plain.code, wide.code, piped.status.code()),
        (Some(3), Some(3), Some(3))
    );
    assert_eq!(
        without_color(&wide.stdout),
        "200\nNO_COLOR= a value it's\nred\nproblem\n"
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
