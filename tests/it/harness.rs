//! Tests that declare what they need of the machine. If the machine lacks something, the test is reported as ignored, with the reason;
//! with `CI` in the environment it fails instead, so that a test cannot pass without running. The tests of the device plugin use this
//! file, too.
//!
//! Tests of a part, such as packages, run only if the command line names them or has `--ignored` (only these) or
//! `--include-ignored`, like Rust's tests with `#[ignore]`: `make test` omits them, and `make test-all` runs them.

#[path = "private_run.rs"]
mod private_run;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, ExitCode};

use libtest_mimic::{Arguments, Completion, Trial};

use private_run::with_private_run;

/// Lists the tests of a module as its `TESTS`: `NEEDS => function, name = call;`. Modules that use it must follow.
macro_rules! tests {
    ($($needs:expr => $($name:ident $(= $call:expr)?),+;)+) => {
        pub const TESTS: &[$crate::harness::Test] = &[$($($crate::harness::Test {
            module: module_path!(),
            function: stringify!($name),
            needs: $needs,
            run: tests!(@run $name $(= $call)?),
        }),+),+];
    };
    (@run $name:ident) => { $name };
    (@run $name:ident = $call:expr) => { || $call };
}

/// A table: `rows! { a, 1; b, 2; }` is `[(a, 1), (b, 2)]`, and rustfmt keeps a row on its line.
#[allow(
    unused_macros,
    reason = "some programs of the device plugin's tests have no table"
)]
macro_rules! rows {
    ($($($cell:expr),+;)+) => {
        [$(($($cell),+)),+]
    };
}

/// What a test needs of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// Real root, with mount namespaces and mknod
    Root,
    /// A program on `PATH`
    Program(&'static str),
    /// Several programs on `PATH`
    Programs(&'static [&'static str]),
    /// Rust for this user: what rustup puts on `PATH` works only for some users
    Cargo,
    /// The same, and that this user can write to `target`, to build programs
    Build,
    /// The same, to build the programs as packages contain them
    Release,
    /// libc.a, for the program of the package -compat
    StaticLibc,
    /// The device controller of cgroup v1, mounted
    CgroupV1,
    /// eBPF device programs
    CgroupV2,
    /// Debian, whose mirrors have NVIDIA's packages
    Debian,
    /// A device node that the kernel provides
    Device(&'static str),
    /// A separate process. The test calls functions that make this process adopt orphans and end its new children
    /// (`base::sys::child`): in the process of all tests, these are also the monitors of other tests' containers.
    OwnProcess,
    /// Nothing: the test belongs to this part because it takes long
    Part(&'static str),
}

impl Need {
    /// Returns the part of the tests that needs this.
    pub fn part(self) -> Option<&'static str> {
        match self {
            Self::Part(part) => Some(part),
            Self::Release => Some(part::RELEASES),
            Self::Debian => Some(part::DRIVERS),
            Self::Programs(names) => names.iter().find_map(|name| Self::Program(name).part()),
            Self::Program("valgrind") => Some(part::BUDGETS),
            Self::Program("prometheus" | "promtool") => Some(part::METRICS),
            Self::Program(
                "apt-ftparchive" | "createrepo_c" | "dh" | "dpkg-buildpackage" | "lintian" | "rpm"
                | "rpmbuild" | "rpmlint" | "rpmsign" | "rpmspec" | "zypper",
            ) => Some(part::PACKAGES),
            _ => None,
        }
    }

    /// Returns why the machine lacks it; `None` if it does not.
    pub fn missing(self) -> Option<String> {
        match self {
            Self::Root => (!rustix::process::geteuid().is_root()).then(|| "needs root".to_owned()),
            Self::Programs(names) => names.iter().find_map(|name| Self::Program(name).missing()),
            Self::Program(name) => {
                let paths = std::env::var_os("PATH").unwrap_or_default();
                let found = std::env::split_paths(&paths).any(|dir| dir.join(name).is_file());
                (!found).then(|| format!("needs the program {name:?}"))
            }
            Self::Cargo => {
                let works = |program: &str| {
                    Command::new(program)
                        .arg("-vV")
                        .output()
                        .is_ok_and(|ran| ran.status.success())
                };
                (!works("cargo") || !works("rustc"))
                    .then(|| "needs a cargo that works for this user".to_owned())
            }
            Self::Build | Self::Release => Self::Cargo.missing().or_else(|| {
                let crates = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
                let tree = crates
                    .filter(|dir| dir.join("Cargo.lock").is_file())
                    .last()?;
                let target = tree.join("target");
                let dir = if target.is_dir() { &target } else { tree };
                tempfile::tempfile_in(dir)
                    .err()
                    .map(|_| "needs to write to the directory \"target\"".to_owned())
            }),
            Self::StaticLibc => {
                let found = Command::new("cc").arg("-print-file-name=libc.a").output();
                // The compiler prints the bare name if it does not find the file.
                let is_there = found.is_ok_and(|ran| ran.stdout.starts_with(b"/"));
                (!is_there).then(|| {
                    "needs libc.a: libc6-dev (Debian) or glibc-devel-static (openSUSE)".to_owned()
                })
            }
            Self::CgroupV1 => {
                (!Path::new("/sys/fs/cgroup/devices/devices.list").is_file()).then(|| {
                    "needs cgroup v1 with its device controller at /sys/fs/cgroup/devices"
                        .to_owned()
                })
            }
            Self::Debian => {
                let release = std::fs::read_to_string("/etc/os-release").unwrap_or_default();
                (!release.lines().any(|line| line == "ID=debian"))
                    .then(|| "needs Debian".to_owned())
            }
            Self::Part(_) | Self::OwnProcess => None,
            Self::Device(path) => (!Path::new(path).exists()).then(|| format!("needs {path:?}")),
            Self::CgroupV2 => {
                let filesystems = std::fs::read_to_string("/proc/filesystems").unwrap_or_default();
                (!filesystems.contains("cgroup2")).then(|| "needs cgroup v2".to_owned())
            }
        }
    }
}

/// A part of the tests that `make test` leaves to `make test-all`: the kind of its trials.
pub mod part {
    pub const BUDGETS: &str = "budgets";
    pub const DRIVERS: &str = "drivers";
    pub const ENDURANCE: &str = "endurance";
    pub const GPU_KIT: &str = "gpu-kit";
    pub const HOST_STATES: &str = "host-states";
    pub const KERNELS: &str = "kernels";
    pub const METRICS: &str = "metrics";
    pub const PACKAGES: &str = "packages";
    pub const RELEASES: &str = "releases";
}

/// A test, which fails by panicking.
#[derive(Debug)]
pub struct Test {
    pub module: &'static str,
    pub function: &'static str,
    pub needs: &'static [Need],
    pub run: fn(),
}

impl Test {
    /// Returns `MODULE::FUNCTION`, in which the module is a file or directory next to `main.rs`.
    pub fn name(&self) -> String {
        let module = self
            .module
            .split("::")
            .nth(1)
            .map(|module| format!("{module}::"))
            .unwrap_or_default();
        format!("{module}{}", self.function)
    }

    /// Returns the part to which the test belongs because of its needs.
    pub fn part(&self) -> Option<&'static str> {
        self.needs.iter().find_map(|need| need.part())
    }

    /// Returns the trial that calls the test with `run`, in a thread with a separate /run.
    pub fn trial(&'static self, name: String, run: impl FnOnce(fn()) + Send + 'static) -> Trial {
        let trial_name = name.clone();
        let trial = Trial::ignorable_test(name, move || {
            let Some(missing) = self.needs.iter().find_map(|need| need.missing()) else {
                if self.needs.contains(&Need::OwnProcess) && !has_own_process() {
                    run_in_own_process(&trial_name)?;
                } else {
                    with_private_run(move || run(self.run));
                }
                return Ok(Completion::Completed);
            };
            if std::env::var_os("CI").is_some() {
                return Err(format!("cannot run on this machine: {missing}").into());
            }
            Ok(Completion::ignored_with(missing))
        });
        match self.part() {
            Some(part) => trial.with_kind(part),
            None => trial,
        }
    }
}

/// In the environment of a process that runs one trial
const OWN_PROCESS: &str = "ONH_TEST_OWN_PROCESS";

/// Reports whether no other trial runs in this process.
pub fn has_own_process() -> bool {
    std::env::var_os(OWN_PROCESS).is_some()
}

/// Runs a trial in another process of this program. Returns its output if it fails.
fn run_in_own_process(trial: &str) -> Result<(), String> {
    let output = Command::new(std::env::current_exe().map_err(|error| error.to_string())?)
        .args(["--exact", trial])
        .env(OWN_PROCESS, "1")
        .output()
        .map_err(|error| format!("cannot start a process for the test: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let [stdout, stderr] =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    Err(format!("{stdout}{stderr}"))
}

/// The trials that the command line selects.
#[derive(Debug)]
pub struct Selection {
    arguments: Arguments,
    pub trials: Vec<Trial>,
    /// The number of omitted trials of each part
    omitted: BTreeMap<String, usize>,
}

impl Selection {
    /// Reads the command line.
    pub fn of(trials: impl IntoIterator<Item = Trial>) -> Self {
        let mut selection = Self {
            arguments: Arguments::from_args(),
            trials: Vec::new(),
            omitted: BTreeMap::new(),
        };
        for trial in trials {
            if selection.includes(&trial) {
                selection.trials.push(trial);
            } else if is_of_part(&trial) {
                *selection
                    .omitted
                    .entry(trial.kind().to_owned())
                    .or_default() += 1;
            }
        }
        // libtest-mimic would leave out the trials of parts, which it does not know as ignored.
        selection.arguments.ignored = false;
        selection
    }

    /// Reports whether the command line names no tests.
    pub fn is_complete(&self) -> bool {
        !self.arguments.list && self.arguments.filter.is_none()
    }

    fn includes(&self, trial: &Trial) -> bool {
        let Arguments {
            filter,
            list,
            ignored,
            include_ignored,
            ..
        } = &self.arguments;
        if *ignored {
            return is_of_part(trial);
        }
        filter.is_some() || *list || *include_ignored || !is_of_part(trial)
    }

    /// Runs the trials, `threads` at a time unless the command line has a number.
    #[allow(clippy::print_stdout, reason = "the end of libtest-mimic's output")]
    pub fn run(mut self, threads: usize) -> ExitCode {
        self.arguments.test_threads.get_or_insert(threads);
        let code = libtest_mimic::run(&self.arguments, self.trials).exit_code();
        if !self.omitted.is_empty() {
            let parts: Vec<_> = self
                .omitted
                .iter()
                .map(|(part, count)| format!("{part} {count}"))
                .collect();
            println!("left to \"make test-all\": {}", parts.join(", "));
        }
        code
    }
}

fn is_of_part(trial: &Trial) -> bool {
    !trial.kind().is_empty()
}
