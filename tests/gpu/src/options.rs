//! The command line.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use lexopt::prelude::*;

pub const HELP: &str = "\
Checks the hook and the device plugin on this machine, and writes a report

Usage: ./run [OPTION]...

Options:
      --root DIR        Driver root [default: searched for]
      --runtime FILE    OCI runtime [default: runc of the kit, or of this machine]
      --report DIR      Directory for gpu-report.md and gpu-report.json [default: .]
      --only NAMES      Only these checks, separated by commas
      --no-fault        Leave out the check that causes an XID with a faulty kernel
      --no-mps          Leave out the checks that set the compute mode of a GPU
      --time SECONDS    Time limit of all checks together [default: 480]
      --list            List the checks
  -h, --help            Print this help
      --version         Print the version

The checks change nothing on the machine but the compute mode of a GPU that no program
uses, for the checks of MPS, which restore it. They run in a mount namespace with a
separate /run and /dev, load no modules, and remove their files. A check that the machine
cannot run is listed with the reason.

Exit status:
  0 no check failed, 1 a check failed, 2 the checks could not run
";

/// What to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Perform the checks and write the report
    Run,
    /// Perform the checks in a mount namespace, and print a line for each
    Inside,
    /// Run a program of the driver with the device nodes in this directory
    OnHost(Vec<OsString>),
    List,
    Help,
    Version,
}

/// The command line of this program.
#[derive(Clone, Debug)]
pub struct Options {
    pub command: Command,
    /// The directory of the kit
    pub kit: PathBuf,
    pub root: Option<PathBuf>,
    pub runtime: Option<PathBuf>,
    pub report: PathBuf,
    /// The checks to perform; all if empty
    pub only: Vec<String>,
    pub no_fault: bool,
    pub no_mps: bool,
    pub time: Duration,
    /// The directory in which all files of the checks are. The first process creates it.
    pub work: PathBuf,
}

impl Options {
    /// Parses the command line of this process.
    ///
    /// # Errors
    /// The unknown option, or the invalid value.
    pub fn parse() -> Result<Self, String> {
        let kit = std::env::current_exe()
            .ok()
            .and_then(|program| Some(program.parent()?.parent()?.to_owned()));
        let mut options = Self {
            command: Command::Run,
            kit: kit.unwrap_or_default(),
            root: None,
            runtime: None,
            report: PathBuf::from("."),
            only: Vec::new(),
            no_fault: false,
            no_mps: false,
            time: Duration::from_secs(480),
            work: PathBuf::new(),
        };
        let mut parser = lexopt::Parser::from_env();
        while let Some(argument) = parser.next().map_err(|error| error.to_string())? {
            options
                .set(&argument.into(), &mut parser)
                .map_err(|error| error.to_string())?;
        }
        Ok(options)
    }

    fn set(
        &mut self,
        argument: &Argument,
        parser: &mut lexopt::Parser,
    ) -> Result<(), lexopt::Error> {
        let Argument::Option(name) = argument else {
            return Err("unexpected argument".into());
        };
        match name.as_str() {
            "root" => self.root = Some(parser.value()?.into()),
            "runtime" => self.runtime = Some(parser.value()?.into()),
            "report" => self.report = parser.value()?.into(),
            "only" => self
                .only
                .extend(parser.value()?.string()?.split(',').map(str::to_owned)),
            "no-fault" => self.no_fault = true,
            "no-mps" => self.no_mps = true,
            "time" => self.time = Duration::from_secs(parser.value()?.parse()?),
            "list" => self.command = Command::List,
            "help" | "h" => self.command = Command::Help,
            "version" => self.command = Command::Version,
            // For the second process only
            "inside" => {
                self.command = Command::Inside;
                self.work = parser.value()?.into();
            }
            "on-host" => self.command = Command::OnHost(parser.raw_args()?.collect()),
            _ => return Err(format!("unknown option --{name}").into()),
        }
        Ok(())
    }

    /// Returns the arguments with which the second process gets these options.
    pub fn for_inside(&self, work: &Path) -> Vec<OsString> {
        let mut words: Vec<OsString> = vec!["--inside".into(), work.into()];
        for (name, value) in [("--root", &self.root), ("--runtime", &self.runtime)] {
            if let Some(value) = value {
                words.extend([name.into(), value.into()]);
            }
        }
        if !self.only.is_empty() {
            words.extend(["--only".into(), self.only.join(",").into()]);
        }
        for (name, is_set) in [("--no-fault", self.no_fault), ("--no-mps", self.no_mps)] {
            if is_set {
                words.push(name.into());
            }
        }
        words.extend(["--time".into(), self.time.as_secs().to_string().into()]);
        words
    }

    /// Returns the path of a program of the kit.
    pub fn program(&self, name: &str) -> PathBuf {
        self.kit.join("bin").join(name)
    }
}

enum Argument {
    Option(String),
    Value,
}

impl From<lexopt::Arg<'_>> for Argument {
    fn from(argument: lexopt::Arg<'_>) -> Self {
        match argument {
            Long(name) => Self::Option(name.to_owned()),
            Short(letter) => Self::Option(letter.to_string()),
            Value(_) => Self::Value,
        }
    }
}
