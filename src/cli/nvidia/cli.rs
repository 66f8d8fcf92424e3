//! Runs as `nvidia-container-cli`: its commands `info`, `list` and `configure`.
//!
//! Global options precede the command, as in NVIDIA's program. The messages come from oci-nvidia-hook. The exit status is 1 also
//! for an invalid command line.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use clap::builder::ValueHint;
use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};

use base::paths::HostPath;
use base::report::{failure, line};
use findings::catalog;
use nvidia_host::capability::{Capabilities, Capability};
use nvidia_host::config::{self, Config, UserSpec};
use nvidia_host::device_id::imex_channel;
use nvidia_host::prepare::host::{AT_BOOT, may_prepare, prepare_host};
use nvidia_host::programs;

use crate::cli::parse::{self, Parsed};
use crate::cli::selection::{Parts, Selection};
use crate::cli::{files, info, output};
use crate::record::call::Call;
use crate::stages;

/// oci-nvidia-hook, called with the name of NVIDIA's program
///
/// The program reads the hook's config.toml; options override it. Environment variables have no effect. The exit status is 0 on
/// success and 1 on failure.
#[derive(Debug, Parser)]
#[command(
    name = programs::CLI,
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
pub struct ContainerCli {
    /// Write a log to this file
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    debug: Option<PathBuf>,
    /// As root, load the driver's modules and create its device nodes first
    #[arg(short = 'k', long)]
    load_kmods: bool,
    /// Ignored: ldconfig is never run
    #[arg(short, long)]
    no_pivot: bool,
    /// Run NVML as this user; without a value, as the calling user
    #[arg(short, long, value_name = "UID[:GID]", num_args = 0..=1, require_equals = true, default_missing_value = "")]
    #[arg(value_parser = User::parse)]
    user: Option<User>,
    /// Driver root
    #[arg(short, long, value_name = "PATH", value_hint = ValueHint::DirPath)]
    root: Option<PathBuf>,
    /// Linker cache that lists the driver's libraries
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    ldcache: Option<PathBuf>,
    /// With --load-kmods, do not create the device nodes of IMEX channels
    #[arg(long)]
    no_create_imex_channels: bool,
    #[arg(short = '?', long, global = true, action = ArgAction::Help, help = "Print help")]
    help: Option<bool>,
    #[arg(long, global = true, action = ArgAction::Help, help = "Print help")]
    usage: Option<bool>,
    /// The command to run
    #[command(subcommand)]
    pub command: ContainerCommand,
}

/// The commands of the program.
#[derive(Debug, Subcommand)]
pub enum ContainerCommand {
    /// Show the driver and the GPUs
    Info {
        /// Print comma-separated values
        #[arg(long)]
        csv: bool,
    },
    /// List the driver's files and devices that containers can get
    List(Parts),
    /// Give the driver and GPUs to a container before it runs
    ///
    /// The command sets up the container like the hook. ROOTFS is the container's root file system as the process of --pid sees it.
    /// Without --pid, this program must run in the mount namespace of the container.
    Configure(Configure),
}

/// Options of `configure`.
#[derive(Args, Debug)]
pub struct Configure {
    /// Root file system of the container
    pub rootfs: PathBuf,
    /// First process of the container
    #[arg(short, long, value_name = "PID", value_parser = clap::value_parser!(i32).range(1..))]
    pub pid: Option<i32>,
    /// Devices
    #[command(flatten)]
    pub selection: Selection,
    /// Requirement on the driver or the GPUs, such as cuda>=12.4 or brand=tesla
    #[arg(short, long = "require", value_name = "EXPR")]
    pub requirements: Vec<String>,
    /// Ignored: ldconfig is never run
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
    /// Do not change the container's device cgroup
    #[arg(long)]
    no_cgroups: bool,
    /// Do not mount device nodes
    #[arg(long)]
    pub no_devbind: bool,
    /// Same as --cuda-compat-mode=disabled
    #[arg(long)]
    no_cntlibs: bool,
    /// Whether to use a newer libcuda of the image
    #[arg(long, value_name = "MODE", value_enum)]
    cuda_compat_mode: Option<CudaCompatMode>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum CudaCompatMode {
    Disabled,
    Ldconfig,
    Mount,
}

/// The value of `--user`; `None` is the calling user.
#[derive(Clone, Debug, PartialEq, Eq)]
struct User(Option<UserSpec>);

impl User {
    fn parse(text: &str) -> Result<Self, String> {
        UserSpec::parse(text)
            .map(Self)
            .map_err(|why| format!("it must be {why}"))
    }
}

/// Runs the command with the arguments after argv\[0\].
pub fn run(args: Vec<OsString>) -> ExitCode {
    let mut call = Call::for_stage(programs::CLI);
    let text = match parse(args) {
        Ok(Parsed::Help(text)) => Ok(text),
        Ok(Parsed::Version) => Ok(version()),
        Ok(Parsed::Run(cli)) => carry_out(&cli, &mut call),
        Err(error) => Err(error),
    };
    match text {
        Ok(text) => output::print(&text),
        Err(error) => {
            call.error(&error);
            ExitCode::FAILURE
        }
    }
}

/// Parses the arguments after argv\[0\].
///
/// # Errors
/// If the command line is invalid.
pub fn parse(mut args: Vec<OsString>) -> Result<Parsed<ContainerCli>> {
    // argp takes the optional value of a short option from the rest of its word, clap only after "=".
    for arg in args
        .iter_mut()
        .take_while(|arg| !matches!(arg.to_str(), Some("info" | "list" | "configure")))
    {
        if let Some(user) = arg
            .to_str()
            .and_then(|arg| arg.strip_prefix("-u"))
            .filter(|user| !user.is_empty())
        {
            *arg = format!("--user={}", user.trim_start_matches('=')).into();
        }
    }
    parse::parse(&args)
}

/// Returns the version with the labels of nvidia-container-cli. The values do not depend on the build, which is reproducible.
fn version() -> String {
    let version = env!("CARGO_PKG_VERSION");
    format!(
        "cli-version: {version}\nlib-version: {version}\nbuild date: -\nbuild revision: oci-nvidia-hook {version}\n\
         build compiler: rustc\nbuild platform: {}\nbuild flags: -\n",
        std::env::consts::ARCH
    )
}

/// Runs the command and returns its output.
fn carry_out(cli: &ContainerCli, call: &mut Call) -> Result<String> {
    let config = cli.configuration(call)?;
    match &cli.command {
        ContainerCommand::Info { csv } => {
            cli.prepare(&[], &config, call)?;
            let form = if *csv {
                info::Form::Csv
            } else {
                info::Form::Labels
            };
            let text = info::text(&config, form, call)?;
            // People attach the log to reports of bugs.
            for line in text.lines().filter(|line| !line.is_empty()) {
                call.log(line);
            }
            Ok(text)
        }
        ContainerCommand::List(parts) => {
            let channels: Vec<_> = parts.selection.imex_channels().collect();
            cli.prepare(&channels, &config, call)?;
            files::text(parts, &config, call)
        }
        ContainerCommand::Configure(options) => {
            configure(options, config, call).map(|()| String::new())
        }
    }
}

/// Sets up the container with this root file system, in the mount namespace of `--pid` or else of this process.
fn configure(options: &Configure, config: Config, call: &mut Call) -> Result<()> {
    let rootfs = &options.rootfs;
    if !rootfs.is_absolute() || rootfs == Path::new("/") {
        return Err(failure(
            &catalog::COMMAND_LINE,
            format!("invalid root file system {rootfs:?}"),
            "give the absolute path of the container's root file system, which cannot be /",
        ));
    }
    let mut request =
        options
            .selection
            .request(options.capabilities(), &options.requirements, &config)?;
    request.omit.node_mounts = options.no_devbind;
    stages::configure::configure(rootfs, options.pid, request, config, call)
}

impl Configure {
    /// Returns the driver capabilities that the options select.
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
        Capabilities::new(
            &asked
                .into_iter()
                .filter_map(|(is_on, what)| is_on.then_some(what))
                .collect::<Vec<_>>(),
        )
    }

    fn override_config(&self, config: &mut Config) {
        config.edit_cgroups &= !self.no_cgroups;
        config.cuda_compat &=
            !self.no_cntlibs && self.cuda_compat_mode != Some(CudaCompatMode::Disabled);
    }
}

impl ContainerCli {
    /// Opens the log, and returns the configuration: config.toml, overridden by the command line.
    fn configuration(&self, call: &mut Call) -> Result<Config> {
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
                let (uid, gid) = (
                    rustix::process::geteuid().as_raw(),
                    rustix::process::getegid().as_raw(),
                );
                config.user = Some(UserSpec {
                    user: uid.to_string(),
                    group: Some(gid.to_string()),
                });
            }
        }
        config.load_kmods = self.load_kmods;
        config.make_imex_channels &= !self.no_create_imex_channels;
        if let ContainerCommand::Configure(options) = &self.command {
            options.override_config(&mut config);
        }
        stages::open_log(&config, call);
        call.findings(&findings);
        Ok(config)
    }

    fn prepare(&self, channels: &[&str], config: &Config, call: &mut Call) -> Result<()> {
        if self.load_kmods && may_prepare()? {
            let channels = channels.iter().filter(|_| config.make_imex_channels);
            let channels = channels
                .map(|channel| imex_channel(channel))
                .collect::<Result<Vec<_>>>()?;
            let prepared = prepare_host(config, &channels, AT_BOOT)?;
            prepared.done.iter().for_each(|line| call.note(line));
            // Like NVIDIA's program: the command that needs a missing part reports it.
            prepared
                .failed
                .iter()
                .for_each(|error| call.note(&line(error)));
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
#[path = "../../../tests/it/known_options.rs"]
mod known_options;

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(args: &[&str]) -> Result<ContainerCli> {
        match parse(args.iter().map(OsString::from).collect())? {
            Parsed::Run(cli) => Ok(cli),
            Parsed::Help(_) | Parsed::Version => anyhow::bail!("help"),
        }
    }

    #[test]
    fn the_meaning_of_a_letter_depends_on_its_place() {
        let cli = parsed(&[
            "-d/log",
            "-l",
            "/cache",
            "-r/root",
            "-u1000:44",
            "-n",
            "-k",
            "info",
        ])
        .unwrap();
        assert_eq!(
            (cli.debug, cli.root),
            (Some("/log".into()), Some("/root".into()))
        );
        assert_eq!(
            cli.user,
            Some(User(Some(UserSpec {
                user: "1000".into(),
                group: Some("44".into())
            })))
        );
        assert!(cli.load_kmods && cli.ldcache.is_some());
        for line in [&["--user", "list", "-lbd0"][..], &["-u", "list", "-lbd0"]] {
            let ContainerCli {
                user,
                command: ContainerCommand::List(parts),
                ..
            } = parsed(line).unwrap()
            else {
                panic!()
            };
            assert!(parts.libraries && parts.binaries && user == Some(User(None)));
            assert_eq!(parts.selection.devices, Some(vec!["0".into()]));
        }
        let line = ["configure", "-n", "-u", "-rcuda>=1", "-l@/x", "-p7", "/r"];
        let ContainerCli {
            user: None,
            ldcache: None,
            command: ContainerCommand::Configure(options),
            ..
        } = parsed(&line).unwrap()
        else {
            panic!()
        };
        assert_eq!(
            options.capabilities(),
            Capabilities::new(&[Capability::Utility, Capability::Ngx])
        );
        assert_eq!(
            (options.pid, options.requirements),
            (Some(7), vec!["cuda>=1".to_owned()])
        );
    }

    /// Each option of NVIDIA's program is known, so that it is carried out or refused with a reason.
    #[test]
    fn every_option_is_known() {
        use clap::CommandFactory;
        let count = known_options::check(&ContainerCli::command(), &[], programs::CLI);
        assert!(count > 30, "{count}");
    }

    #[test]
    fn wrong_command_lines() {
        for (args, message) in [
            (&["lsit"][..], "a similar subcommand exists: \"list\""),
            (&["list", "--root", "/x"], "unexpected argument \"--root\""),
            (&["configure"], "not provided: <ROOTFS>"),
            (&["configure", "-p0", "/a"], "0 is not in"),
            (&["list", "--mig-config=0"], "invalid value \"0\""),
            (&[], "a command is missing"),
        ] {
            let text = base::report::render(&parsed(args).unwrap_err());
            assert!(text.contains(message), "{args:?}: {text}");
        }
    }
}
