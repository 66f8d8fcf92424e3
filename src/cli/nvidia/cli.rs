//! Called as `nvidia-container-cli`: that program's `info`, `list` and `configure`, done by ours. Global options stand before
//! the command. Errors are in our words, and the exit status is 1, also for a wrong command line.

use std::ffi::OsString;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};

use base::paths::HostPath;
use base::report::{catalog, failure, line};
use nvidia_host::config::{self, Config, UserSpec};
use nvidia_host::device_id::imex_channel;
use nvidia_host::prepare::host::{AT_BOOT, may_prepare, prepare_host};

use super::configure;
use crate::cli::grammar::{self, Asked, Command, Completes, Line, Operand, Opt, Program, option, switch};
use crate::cli::selection::{self, Selection};
use crate::cli::{Verb, help, info, list, output};
use crate::log::Log;
use crate::stages;

/// What is parsed and explained.
pub static PROGRAM: Program = Program {
    name: super::CLI,
    summary: "oci-nvidia-hook under the name of NVIDIA's program",
    about: "It reads config.toml as the hook does; options come after it. The environment is not looked at.",
    options: &[
        option("-d, --debug FILE\ta log file", Completes::Files),
        switch("-k, --load-kmods\tload the driver's modules and make its device nodes first, as root"),
        switch("-n, --no-pivot\tnothing: no ldconfig is run"),
        switch("-u, --user[=UID[:GID]]\twho asks the driver for its GPUs; without a value, whoever calls this"),
        option("-r, --root PATH\tthe directory that is / for the driver", Completes::Directories),
        option("-l, --ldcache FILE\tthe linker cache with the driver's libraries", Completes::Files),
        switch("--no-create-imex-channels\twith --load-kmods: do not make the device nodes of IMEX channels"),
        switch("-?, --help\tprint help, on a command if there is one"),
        switch("--usage\tthe same"),
        switch("-V, --version\tprint the version"),
    ],
    options_anywhere: false,
    exit_status: "0 done, 1 failed",
    commands: &[
        Command {
            name: "info",
            verb: Verb::Info,
            operand: None,
            redirections: "",
            summary: "tell what driver and GPUs there are",
            about: "",
            options: &[&CSV],
            examples: &[],
        },
        Command {
            name: "list",
            verb: Verb::List,
            operand: None,
            redirections: "",
            summary: "list the driver's files and devices that containers can get",
            about: "",
            options: &[
                &selection::DEVICE,
                &selection::LIBRARIES,
                &selection::BINARIES,
                &selection::IPCS,
                &selection::FIRMWARES,
                &selection::COMPAT32,
                &selection::MIG_CONFIG,
                &selection::MIG_MONITOR,
                &selection::IMEX_CHANNEL,
                &selection::NO_PERSISTENCED,
                &selection::NO_FABRICMANAGER,
                &selection::NO_GSP_FIRMWARE,
            ],
            examples: &[],
        },
        Command {
            name: "configure",
            verb: Verb::Configure,
            operand: Some(Operand { usage: "ROOTFS", completes: Completes::Directories }),
            redirections: "",
            summary: "give a container that does not run yet the driver and GPUs",
            about: "As the hook does it. ROOTFS is the container's root file system as the process of --pid sees it; without \
                    --pid, as this program does, which must be in the container's mount namespace then.",
            options: &[
                &PID,
                &selection::DEVICE,
                &REQUIRE,
                &LDCONFIG,
                &COMPUTE,
                &UTILITY,
                &VIDEO,
                &GRAPHICS,
                &DISPLAY,
                &NGX,
                &selection::COMPAT32,
                &selection::MIG_CONFIG,
                &selection::MIG_MONITOR,
                &selection::IMEX_CHANNEL,
                &NO_CGROUPS,
                &NO_DEVBIND,
                &selection::NO_PERSISTENCED,
                &selection::NO_FABRICMANAGER,
                &selection::NO_GSP_FIRMWARE,
                &NO_CNTLIBS,
                &CUDA_COMPAT_MODE,
            ],
            examples: &[],
        },
    ],
    examples: &[(
        "an LXC container",
        "nvidia-container-cli --user configure --no-cgroups --device=all --utility ROOTFS",
    )],
};

static CSV: Opt = switch("--csv\tprint comma-separated values");
static PID: Opt = option("-p, --pid PID\tthe container's first process", Completes::Nothing);
static REQUIRE: Opt =
    option("-r, --require EXPR\twhat driver and GPUs must be: cuda>=12.4, brand=tesla, ...", Completes::Nothing);
static LDCONFIG: Opt = option("-l, --ldconfig PATH\tnothing: no ldconfig is run", Completes::Files);
static COMPUTE: Opt = switch("-c, --compute\tCUDA and OpenCL");
static UTILITY: Opt = switch("-u, --utility\tnvidia-smi and NVML");
static VIDEO: Opt = switch("-v, --video\tvideo codecs");
static GRAPHICS: Opt = switch("-g, --graphics\tOpenGL and Vulkan");
static DISPLAY: Opt = switch("-D, --display\tX11");
static NGX: Opt = switch("-n, --ngx\tNGX");
static NO_CGROUPS: Opt = switch("--no-cgroups\tleave the container's device cgroup as it is");
static NO_DEVBIND: Opt = switch("--no-devbind\tdo not mount device nodes");
static NO_CNTLIBS: Opt = switch("--no-cntlibs\tas --cuda-compat-mode=disabled");
static CUDA_COMPAT_MODE: Opt = option(
    "--cuda-compat-mode MODE\tdisabled: do not use a newer libcuda of the image; ldconfig, mount: use it",
    Completes::Words("disabled ldconfig mount"),
);

/// What a command line says.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Options {
    debug: Option<OsString>,
    load_kmods: bool,
    /// `Some(None)`: whoever calls
    user: Option<Option<UserSpec>>,
    root: Option<OsString>,
    ldcache: Option<OsString>,
    csv: bool,
    no_cgroups: bool,
    no_cuda_compat: bool,
    no_imex_channels: bool,
    /// `--pid`
    pub pid: Option<i32>,
    /// What is chosen
    pub selection: Selection,
}

/// Runs the command with these arguments, argv\[0\] left out.
#[must_use]
pub fn run(args: Vec<OsString>) -> ExitCode {
    let mut log = Log::for_stage(super::CLI);
    match grammar::parse(&PROGRAM, args) {
        Ok(Asked::Help(command)) => {
            let of_command = command.and_then(|name| help::of_command(&PROGRAM, name));
            output::print(&of_command.unwrap_or_else(|| help::of_program(&PROGRAM)))
        }
        Ok(Asked::Version) => output::print(&version()),
        Ok(Asked::Run(line)) => {
            let text = carry_out(&line, &mut log);
            output::print_or_fail(text, &mut log)
        }
        Err(error) => output::print_or_fail(Err(error), &mut log),
    }
}

/// With the labels of that program, and nothing in them that changes from build to build.
fn version() -> String {
    let version = env!("CARGO_PKG_VERSION");
    format!(
        "cli-version: {version}\nlib-version: {version}\nbuild date: -\nbuild revision: oci-nvidia-hook {version}\n\
         build compiler: rustc\nbuild platform: {}\nbuild flags: -\n",
        std::env::consts::ARCH
    )
}

/// What it prints.
fn carry_out(line: &Line, log: &mut Log) -> Result<String> {
    let options = Options::of(line)?;
    let config = options.configuration(log)?;
    match line.command.verb {
        Verb::Info => {
            options.prepare(&config, log)?;
            info::text(&config, if options.csv { info::Form::Csv } else { info::Form::Labels }, log)
        }
        Verb::List => {
            options.prepare(&config, log)?;
            list::text(&options.selection, &config, log)
        }
        _ => {
            let rootfs = line.operands.first().context("it names no rootfs")?;
            configure::configure(rootfs.as_ref(), &options, config, log).map(|()| String::new())
        }
    }
}

impl Options {
    /// What a line of [`PROGRAM`] says.
    ///
    /// # Errors
    /// If a value is wrong.
    pub fn of(line: &Line) -> Result<Self> {
        let mut options = Self::default();
        for (option, value) in &line.given {
            options.set(option.long(), value.as_ref()).map_err(|error| match base::report::kind_of(&error) {
                Some(_) => error,
                None => grammar::wrong(&PROGRAM, Some(line.command), &error.to_string()),
            })?;
        }
        Ok(options)
    }

    fn set(&mut self, option: &str, value: Option<&OsString>) -> Result<()> {
        let text = value.and_then(|value| value.to_str()).unwrap_or_default();
        match option {
            "debug" => self.debug = value.cloned(),
            "load-kmods" => self.load_kmods = true,
            "user" => self.user = Some(UserSpec::parse(text).map_err(|why| anyhow::anyhow!("--user must be {why}"))?),
            "root" => self.root = value.cloned(),
            "ldcache" => self.ldcache = value.cloned(),
            "csv" => self.csv = true,
            "pid" => self.pid = Some(parse_pid(text)?),
            "no-cgroups" => self.no_cgroups = true,
            "no-cntlibs" => self.no_cuda_compat = true,
            "cuda-compat-mode" => match text {
                "disabled" => self.no_cuda_compat = true,
                "ldconfig" | "mount" => {}
                _ => bail!("--cuda-compat-mode {text:?} is not disabled, ldconfig or mount"),
            },
            "no-create-imex-channels" => self.no_imex_channels = true,
            // No ldconfig is run.
            "no-pivot" | "ldconfig" => {}
            _ if self.selection.set(option, value)? => {}
            _ => bail!("--{option} means nothing here"),
        }
        Ok(())
    }

    /// Config.toml, and what the command line says otherwise. The log is opened.
    fn configuration(&self, log: &mut Log) -> Result<Config> {
        let (mut config, findings) = config::read(None)?;
        if let Some(root) = &self.root {
            config.driver_root = absolute("--root", root)?;
        }
        if let Some(ldcache) = &self.ldcache {
            config.ldcache = Some(absolute("--ldcache", ldcache)?);
        }
        if let Some(debug) = &self.debug {
            config.debug = Some(absolute("--debug", debug)?);
        }
        match &self.user {
            None => {}
            Some(Some(user)) => config.user = Some(user.clone()),
            Some(None) => {
                let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
                config.user = Some(UserSpec { user: uid.to_string(), group: Some(gid.to_string()) });
            }
        }
        config.load_kmods = self.load_kmods;
        config.make_imex_channels &= !self.no_imex_channels;
        config.edit_cgroups &= !self.no_cgroups;
        config.cuda_compat &= !self.no_cuda_compat;
        stages::open_log(&config, log);
        findings.iter().for_each(|finding| log.finding(finding));
        Ok(config)
    }

    fn prepare(&self, config: &Config, log: &mut Log) -> Result<()> {
        if self.load_kmods && may_prepare()? {
            let channels = self.selection.imex_channels.iter().filter(|_| config.make_imex_channels);
            let channels = channels.map(|channel| imex_channel(channel)).collect::<Result<Vec<_>>>()?;
            let prepared = prepare_host(config, &channels, AT_BOOT)?;
            prepared.done.iter().for_each(|line| log.note(line));
            // As with NVIDIA's: what is missing in the end is reported by what needs it.
            prepared.failed.iter().for_each(|error| log.note(&line(error)));
        }
        Ok(())
    }
}

fn absolute(option: &str, path: &OsString) -> Result<HostPath> {
    let path = std::path::Path::new(path);
    if !path.is_absolute() {
        return Err(failure(
            &catalog::COMMAND_LINE,
            format!("{option} {path:?} is no absolute path"),
            "begin it with /",
        ));
    }
    Ok(HostPath::new(path))
}

fn parse_pid(text: &str) -> Result<i32> {
    match text.parse() {
        Ok(pid) if pid > 0 => Ok(pid),
        _ => bail!("--pid {text:?} is no number of a process"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(args: &[&str]) -> Result<Options> {
        let Asked::Run(line) = grammar::parse(&PROGRAM, args.iter().map(OsString::from).collect())? else {
            bail!("help")
        };
        Options::of(&line)
    }

    #[test]
    fn a_letter_means_what_its_place_says() {
        let global = options(&["-d/log", "-l", "/cache", "-r/root", "-u1000:44", "-n", "-k", "info"]).unwrap();
        assert_eq!((global.debug, global.root), (Some("/log".into()), Some("/root".into())));
        assert_eq!(global.user, Some(Some(UserSpec { user: "1000".into(), group: Some("44".into()) })));
        assert!(global.load_kmods && global.ldcache.is_some());
        let of_list = options(&["--user", "list", "-lbd0"]).unwrap();
        assert!(of_list.selection.libraries && of_list.selection.binaries && of_list.user == Some(None));
        assert_eq!(of_list.selection.devices, Some(vec!["0".into()]));
        let of_configure = options(&["configure", "-n", "-u", "-rcuda>=1", "-l@/x", "-p7", "/r"]).unwrap();
        assert_eq!((of_configure.selection.capabilities.len(), of_configure.pid), (2, Some(7)));
        assert_eq!(of_configure.selection.requirements, ["cuda>=1"]);
        assert_eq!((of_configure.user, of_configure.ldcache), (None, None));
    }

    #[test]
    fn each_option_has_a_meaning() {
        for command in PROGRAM.commands {
            for option in command.options.iter().copied().chain(PROGRAM.options) {
                if matches!(option.long(), grammar::HELP | grammar::VERSION | "usage") {
                    continue;
                }
                let value = match option.long() {
                    "pid" => "7",
                    "cuda-compat-mode" => "mount",
                    "mig-config" | "mig-monitor" => "all",
                    _ => "0",
                };
                Options::default().set(option.long(), option.value().map(|_| value.into()).as_ref()).unwrap();
            }
        }
    }

    #[test]
    fn wrong_command_lines() {
        for (args, says) in [
            (&["lsit"][..], "did you mean list?"),
            (&["list", "--libaries"], "did you mean --libraries?"),
            (&["list", "-r", "/x"], "unknown option \"-r\""),
            (&["list", "--root", "/x"], "unknown option \"--root\" of list"),
            (&["configure"], "configure needs ROOTFS"),
            (&["configure", "/a", "/b"], "unexpected argument \"/b\""),
            (&["configure", "-p0", "/a"], "--pid \"0\" is no number of a process"),
            (&["list", "--mig-config=0"], "is not \"all\""),
            (&[], "no command is given"),
        ] {
            let text = base::report::render(&options(args).unwrap_err());
            assert!(text.contains(says), "{args:?}: {text}");
        }
    }
}
