//! `cdi generate` and `cdi refresh`: write CDI specs, with which engines know the GPUs as devices.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;

use base::paths::HostPath;
use base::report::failure;
use base::tree::Tree;
use cdi_spec::file::Format;
use cdi_spec::registry;
use cdi_spec::spec::Spec;
use findings::catalog;
use nvidia_host::cdi::extra_devices;
use nvidia_host::cdi::of_host::{GPU_CLASS, Settings, SpecWriter};
use nvidia_host::cdi::stamp::Stamp;
use plugin_api::kinds::{SpecVendor, VENDORS};
use plugin_api::processes;

use super::args::{Cdi, SpecDirs, SpecOptions};
use super::status::this_user;
use super::terminal::Terminal;
use super::{cdi_check, info, output};
use crate::plan::hook_program;
use crate::record::call::Call;
use engines::cdi_check::is_ours;
use engines::inspect::{self, Versions};

impl SpecOptions {
    /// Returns the settings of the spec.
    fn settings(&self, format: Format) -> Result<Settings> {
        Ok(Settings {
            naming: self.naming(),
            vendor: self.vendor.clone(),
            class: self.class.clone(),
            additional_gids: self.additional_gids(),
            program: hook_program(self.hook_path.as_deref())?,
            format,
        })
    }

    /// Returns the file to write (`None` for stdout) and its format.
    fn target(&self) -> Result<(Option<PathBuf>, Format)> {
        let Some(path) = &self.output else {
            let format = self.format.unwrap_or_default();
            let gpus = nvidia_host::cdi::default_path(format);
            let path = match extra_devices::class_named(&self.class) {
                Some(class) => extra_devices::path_of(class, &gpus),
                None => gpus,
            };
            return Ok((Some(path), format));
        };
        if path == Path::new("-") {
            return Ok((None, self.format.unwrap_or_default()));
        }
        let Some(format) = Format::from_path(path) else {
            return Err(failure(
                &catalog::COMMAND_LINE,
                format!("engines do not read {path:?}"),
                "name a file that ends in .json or .yaml with --output",
            ));
        };
        Ok((Some(path.clone()), self.format.unwrap_or(format)))
    }
}

/// Runs a command of `cdi`.
pub(crate) fn run(command: &Cdi, config: Option<&Path>, terminal: Terminal) -> Result<ExitCode> {
    match command {
        Cdi::Generate { spec, dirs, root } => generate(spec, dirs, config, root.as_deref()),
        Cdi::Refresh { create, spec, root } => refresh(*create, spec, config, root.as_deref()),
        Cdi::List {
            dirs,
            json,
            root: _,
        } => cdi_check::list(dirs, *json),
        Cdi::Check(options) => cdi_check::check(options, config, terminal),
    }
}

fn generate(
    options: &SpecOptions,
    dirs: &SpecDirs,
    config: Option<&Path>,
    root: Option<&Path>,
) -> Result<ExitCode> {
    let (path, format) = options.target()?;
    let config = info::configuration(config, root)?;
    let settings = options.settings(format)?;
    if let Some(path) = &path {
        refuse_spec_of_plugin(path, &settings)?;
    }
    let mut writer = SpecWriter::new(&config, &settings, engines_read_gids);
    let spec = match extra_devices::class_named(&settings.class) {
        Some(class) => writer.make_class(class),
        None => writer.make(),
    };
    let mut call = Call::default();
    report_findings(&mut writer, &mut call);
    let spec = spec?;
    if spec.devices.is_empty() {
        return Err(failure(
            &catalog::SPEC_EMPTY,
            "this host has no GPU for containers",
            "run \"oci-nvidia-hook info\", and check the allow and deny lists of [devices] in config.toml: no spec can be written while \
             they deny every GPU",
        ));
    }
    let text = format.print(&spec)?;
    let Some(path) = path else {
        return Ok(output::print(&text));
    };
    nvidia_host::cdi::write(&path, &text)?;
    call.report(&wrote(&path, &spec));
    let mut files = vec![path.clone()];
    if settings.class == GPU_CLASS {
        let more = writer.refresh_extra(&path, Stamp::from_spec(&spec).as_ref());
        report_findings(&mut writer, &mut call);
        for (path, spec) in more? {
            call.report(&wrote(&path, &spec));
            files.push(path);
        }
    }
    for problem in cdi_check::problems(&files, dirs) {
        call.finding(&problem);
    }
    Ok(ExitCode::SUCCESS)
}

/// Refuses to replace a spec that the kubelet plugin keeps current with a spec of another kind: containers and claims store the names of
/// its devices.
fn refuse_spec_of_plugin(path: &Path, settings: &Settings) -> Result<()> {
    // Parsing takes longer than the search, and most files are not of the plugin, which writes its vendors as they are.
    if !registry::has_any(path, &VENDORS.map(SpecVendor::as_str)) {
        return Ok(());
    }
    let Ok(spec) = registry::read_spec(path) else {
        return Ok(());
    };
    let Some(vendor) = SpecVendor::of_kind(&spec.kind) else {
        return Ok(());
    };
    if spec.kind == settings.kind() || !is_ours(&spec) {
        return Ok(());
    }
    let processes = Tree::open(&HostPath::new("/")).map(|host| processes::of_host(&host));
    Err(failure(
        &catalog::SPEC_FILE,
        format!(
            "cannot replace {path:?}, which has the kind {:?} of the kubelet plugin",
            spec.kind
        ),
        vendor.how_to_rewrite(&processes.unwrap_or_default()),
    ))
}

fn wrote(path: &Path, spec: &Spec) -> String {
    format!("wrote {}: {}", path.display(), summary(spec))
}

/// Returns the kind and the names of the first devices. UUIDs are left out if the devices have other names.
fn summary(spec: &Spec) -> String {
    let (mut uuids, mut short) = (Vec::new(), Vec::new());
    for device in &spec.devices {
        let name = device.name.as_str();
        if name.starts_with("GPU-") || name.starts_with("MIG-") {
            uuids.push(name);
        } else {
            short.push(name);
        }
    }
    let names = if short.iter().all(|name| *name == ALL) {
        [uuids, short].concat()
    } else {
        short
    };
    let mut shown = Vec::new();
    for name in names.iter().take(MAX_SHOWN) {
        shown.push(format!("{}={name}", spec.kind));
    }
    match names.len() - shown.len() {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

/// The device that stands for all others.
const ALL: &str = "all";
/// Names of devices in a summary. Most nodes have at most eight GPUs, but can have many MIG devices.
const MAX_SHOWN: usize = 9;

/// Rewrites the spec if it is out of date. This runs at boot and after changes, so a host without GPUs or with a current spec is
/// left unchanged without a message. Without `--create`, a missing spec is not created: the administrator may use the specs of
/// another program, and two files with the same devices are a conflict.
fn refresh(
    create: bool,
    options: &SpecOptions,
    config: Option<&Path>,
    root: Option<&Path>,
) -> Result<ExitCode> {
    let (Some(path), format) = options.target()? else {
        return Err(failure(
            &catalog::COMMAND_LINE,
            "\"cdi refresh\" needs a file",
            "give it with --output, or use \"cdi generate\"",
        ));
    };
    if let Some(class) = extra_devices::class_named(&options.class) {
        return Err(failure(
            &catalog::COMMAND_LINE,
            format!(
                "\"cdi refresh\" updates the spec of {class} together with the spec of the GPUs"
            ),
            "leave --class out, or use \"cdi generate\"",
        ));
    }
    if !create && rustix::fs::lstat(&path).is_err() {
        return Ok(ExitCode::SUCCESS);
    }
    let config = info::configuration(config, root)?;
    let settings = options.settings(format)?;
    refuse_spec_of_plugin(&path, &settings)?;
    let mut writer = SpecWriter::new(&config, &settings, engines_read_gids);
    let existed = rustix::fs::lstat(&path).is_ok();
    let refreshed = writer.refresh(&path);
    let mut call = Call::default();
    report_findings(&mut writer, &mut call);
    refreshed?;
    if existed && rustix::fs::lstat(&path).is_err() {
        call.report(&format!(
            "removed {}: this host has no GPU for containers",
            path.display()
        ));
    }
    Ok(ExitCode::SUCCESS)
}

fn report_findings(writer: &mut SpecWriter<'_>, call: &mut Call) {
    for finding in writer.findings.drain(..) {
        call.finding(&finding);
    }
}

/// Returns whether all engines of this host read the field `additionalGids`. Others reject the whole file because of it.
fn engines_read_gids() -> bool {
    Tree::open(&HostPath::new("/")).is_ok_and(|host| {
        inspect::all_read_cdi(&host, this_user(), "0.7.0", &mut Versions::stored())
    })
}
