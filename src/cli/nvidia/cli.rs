//! Called as `nvidia-container-cli`: that program's `info`, `list` and `configure`, done by ours. Global options stand before
//! the command. Errors are in our words, and the exit status is 1, also for a wrong command line.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use clap::builder::ValueHint;
use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};

use base::paths::HostPath;
use base::report::{catalog, failure, line};
use nvidia_host::capability::{Capabilities, Capability};
use nvidia_host::config::{self, Config, UserSpec};
use nvidia_host::device_id::imex_channel;
use nvidia_host::prepare::host::{AT_BOOT, may_prepare, prepare_host};

use super::configure;
use crate::cli::parse::{self, Asked};
use crate::cli::selection::{Parts, Selection};
use crate::cli::{info, list, output};
use crate::log::Log;
use crate::stages;

/// oci-nvidia-hook under the name of NVIDIA's program
///
/// It reads config.toml as the hook does; options override it. It does not read the environment. The exit status is 0 done,
/// 1 failed.
#[derive(Debug, Parser)]
#[command(
    name = super::CLI,
    version,
    disable_help_flag = true,
    disable_help_subcommand = true,
    propagate_version = true,
    args_override_self = true,
    arg_required_else_help = false,
    max_term_width = 80,
    after_help = "Example, an LXC container:\n  \
                  nvidia-container-cli --user configure --no-cgroups --device=all \\\n    \
                  --utility ROOTFS"
)]
pub struct Cli {
    /// A log file
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    debug: Option<PathBuf>,
    /// Load the driver's modules and make its device nodes first, as root
    #[arg(short = 'k', long)]
    load_kmods: bool,
    /// Without effect: no ldconfig is run
    #[arg(short, long)]
    no_pivot: bool,
    /// The user who asks the driver for its GPUs; without a value, the user who calls this
    #[arg(short, long, value_name = "UID[:GID]", num_args = 0..=1, require_equals = true, default_missing_value = "")]
    #[arg(value_parser = User::parse)]
    user: Option<User>,
    /// The directory that is / for the driver
    #[arg(short, long, value_name = "PATH", value_hint = ValueHint::DirPath)]
    root: Option<PathBuf>,
    /// The linker cache with the driver's libraries
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    ldcache: Option<PathBuf>,
    /// With --load-kmods: do not make the device nodes of IMEX channels
    #[arg(long)]
    no_create_imex_channels: bool,
    #[arg(short = '?', long, global = true, action = ArgAction::Help, help = "Print help")]
    help: Option<bool>,
    #[arg(long, global = true, action = ArgAction::Help, help = "Print help")]
    usage: Option<bool>,
    /// What to do
    #[command(subcommand)]
    pub command: Command,
}

/// What the program can do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show the driver and the GPUs
    Info {
        /// Print comma-separated values
        #[arg(long)]
        csv: bool,
    },
    /// List the driver's files and devices that containers can get
    List(Parts),
    /// Give the driver and GPUs to a container that does not run yet
    ///
    /// It does what the hook does. ROOTFS is the container's root file system as the process of --pid sees it; without --pid,
    /// as this program does, which must be in the container's mount namespace then.
    Configure(Configure),
}

/// Options of `configure`.
#[derive(Args, Debug)]
pub struct Configure {
    /// The container's root file system
    pub rootfs: PathBuf,
    /// The container's first process
    #[arg(short, long, value_name = "PID", value_parser = clap::value_parser!(i32).range(1..))]
    pub pid: Option<i32>,
    /// Devices
    #[command(flatten)]
    pub selection: Selection,
    /// What driver and GPUs must be: cuda>=12.4, brand=tesla, ...
    #[arg(short, long = "require", value_name = "EXPR")]
    pub requirements: Vec<String>,
    /// Without effect: no ldconfig is run
    #[arg(short, long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    ldconfig: Option<PathBuf>,
    /// CUDA and OpenCL
    #[arg(short, long)]
    compute: bool,
    /// nvidia-smi and NVML
    #[arg(short, long)]
    utility: bool,
    /// Video codecs
    #[arg(short, long)]
    video: bool,
    /// OpenGL and Vulkan
    #[arg(short, long)]
    graphics: bool,
    /// X11
    #[arg(short = 'D', long)]
    display: bool,
    /// NGX
    #[arg(short, long)]
    ngx: bool,
    /// Leave the container's device cgroup as it is
    #[arg(long)]
    no_cgroups: bool,
    /// Do not mount device nodes
    #[arg(long)]
    pub no_devbind: bool,
    /// The same as --cuda-compat-mode=disabled
    #[arg(long)]
    no_cntlibs: bool,
    /// Whether a newer libcuda of the image is used
    #[arg(long, value_name = "MODE", value_enum)]
    cuda_compat_mode: Option<CudaCompatMode>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum CudaCompatMode {
    Disabled,
    Ldconfig,
    Mount,
}

/// The user of `--user`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct User(Option<UserSpec>);

impl User {
    fn parse(text: &str) -> Result<Self, String> {
        UserSpec::parse(text).map(Self).map_err(|why| format!("it must be {why}"))
    }
}

/// Runs the command with these arguments, argv\[0\] left out.
pub fn run(args: Vec<OsString>) -> ExitCode {
    let mut log = Log::for_stage(super::CLI);
    let text = match parse(args) {
        Ok(Asked::Help(text)) => Ok(text),
        Ok(Asked::Version) => Ok(version()),
        Ok(Asked::Run(cli)) => carry_out(&cli, &mut log),
        Err(error) => Err(error),
    };
    output::print_or_fail(text, &mut log)
}

/// Parses the arguments, argv\[0\] left out.
///
/// # Errors
/// If the command line is wrong.
pub fn parse(mut args: Vec<OsString>) -> Result<Asked<Cli>> {
    // argp takes the optional value of a short option from the rest of its word; clap, only behind "=".
    for arg in args.iter_mut().take_while(|arg| !matches!(arg.to_str(), Some("info" | "list" | "configure"))) {
        if let Some(user) = arg.to_str().and_then(|arg| arg.strip_prefix("-u")).filter(|user| !user.is_empty()) {
            *arg = format!("--user={}", user.trim_start_matches('=')).into();
        }
    }
    parse::parse(&args)
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
fn carry_out(cli: &Cli, log: &mut Log) -> Result<String> {
    let config = cli.configuration(log)?;
    match &cli.command {
        Command::Info { csv } => {
            cli.prepare(&[], &config, log)?;
            info::text(&config, if *csv { info::Form::Csv } else { info::Form::Labels }, log)
        }
        Command::List(parts) => {
            let channels: Vec<_> = parts.selection.imex_channels().collect();
            cli.prepare(&channels, &config, log)?;
            list::text(parts, &config, log)
        }
        Command::Configure(options) => configure::configure(options, config, log).map(|()| String::new()),
    }
}

impl Configure {
    /// What of the driver is given.
    pub fn capabilities(&self) -> Capabilities {
        let asked = [
            (self.compute, Capability::Compute),
            (self.utility, Capability::Utility),
            (self.video, Capability::Video),
            (self.graphics, Capability::Graphics),
            (self.display, Capability::Display),
            (self.ngx, Capability::Ngx),
            (self.selection.compat32, Capability::Compat32),
        ];
        Capabilities::of(&asked.into_iter().filter_map(|(is_on, what)| is_on.then_some(what)).collect::<Vec<_>>())
    }

    fn override_config(&self, config: &mut Config) {
        config.edit_cgroups &= !self.no_cgroups;
        config.cuda_compat &= !self.no_cntlibs && self.cuda_compat_mode != Some(CudaCompatMode::Disabled);
    }
}

impl Cli {
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
            Some(User(Some(user))) => config.user = Some(user.clone()),
            Some(User(None)) => {
                let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
                config.user = Some(UserSpec { user: uid.to_string(), group: Some(gid.to_string()) });
            }
        }
        config.load_kmods = self.load_kmods;
        config.make_imex_channels &= !self.no_create_imex_channels;
        if let Command::Configure(options) = &self.command {
            options.override_config(&mut config);
        }
        stages::open_log(&config, log);
        findings.iter().for_each(|finding| log.finding(finding));
        Ok(config)
    }

    fn prepare(&self, channels: &[&str], config: &Config, log: &mut Log) -> Result<()> {
        if self.load_kmods && may_prepare()? {
            let channels = channels.iter().filter(|_| config.make_imex_channels);
            let channels = channels.map(|channel| imex_channel(channel)).collect::<Result<Vec<_>>>()?;
            let prepared = prepare_host(config, &channels, AT_BOOT)?;
            prepared.done.iter().for_each(|line| log.note(line));
            // As with NVIDIA's: what is missing in the end is reported by what needs it.
            prepared.failed.iter().for_each(|error| log.note(&line(error)));
        }
        Ok(())
    }
}

fn absolute(option: &str, path: &Path) -> Result<HostPath> {
    if !path.is_absolute() {
        return Err(failure(
            &catalog::COMMAND_LINE,
            format!("{option} {path:?} is not an absolute path"),
            "begin it with /",
        ));
    }
    Ok(HostPath::new(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(args: &[&str]) -> Result<Cli> {
        match parse(args.iter().map(OsString::from).collect())? {
            Asked::Run(cli) => Ok(cli),
            Asked::Help(_) | Asked::Version => anyhow::bail!("help"),
        }
    }

    #[test]
    fn a_letter_means_what_its_place_says() {
        let cli = parsed(&["-d/log", "-l", "/cache", "-r/root", "-u1000:44", "-n", "-k", "info"]).unwrap();
        assert_eq!((cli.debug, cli.root), (Some("/log".into()), Some("/root".into())));
        assert_eq!(cli.user, Some(User(Some(UserSpec { user: "1000".into(), group: Some("44".into()) }))));
        assert!(cli.load_kmods && cli.ldcache.is_some());
        for line in [&["--user", "list", "-lbd0"][..], &["-u", "list", "-lbd0"]] {
            let Cli { user, command: Command::List(parts), .. } = parsed(line).unwrap() else { panic!() };
            assert!(parts.libraries && parts.binaries && user == Some(User(None)));
            assert_eq!(parts.selection.devices, Some(vec!["0".into()]));
        }
        let line = ["configure", "-n", "-u", "-rcuda>=1", "-l@/x", "-p7", "/r"];
        let Cli { user: None, ldcache: None, command: Command::Configure(options), .. } = parsed(&line).unwrap() else {
            panic!()
        };
        assert_eq!(options.capabilities(), Capabilities::of(&[Capability::Utility, Capability::Ngx]));
        assert_eq!((options.pid, options.requirements), (Some(7), vec!["cuda>=1".to_owned()]));
    }

    #[test]
    fn wrong_command_lines() {
        for (args, says) in [
            (&["lsit"][..], "did you mean list?"),
            (&["list", "--libaries"], "did you mean --libraries?"),
            (&["list", "-r", "/x"], "unexpected argument '-r'"),
            (&["list", "--root", "/x"], "unexpected argument '--root'"),
            (&["configure"], "<ROOTFS>"),
            (&["configure", "/a", "/b"], "unexpected argument '/b'"),
            (&["configure", "-p0", "/a"], "invalid value '0' for '--pid <PID>'"),
            (&["list", "--mig-config=0"], "invalid value '0' for '--mig-config <ID>'"),
            (&[], "requires a subcommand"),
        ] {
            let text = base::report::render(&parsed(args).unwrap_err());
            assert!(text.contains(says), "{args:?}: {text}");
        }
    }
}
