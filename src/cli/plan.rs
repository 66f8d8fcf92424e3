//! `plan`: prints what the hook would do for a container, and why, without changing anything.

mod plan_text;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::{Value, json};

use base::json;
use base::paths::HostPath;
use base::read::read_limited;
use base::report::{Finding, failure};
use findings::catalog;
use nvidia_host::config::Config;
use nvidia_host::device_id::in_words;
use nvidia_host::driver::access::Permissions;
use nvidia_host::driver::nodes::DeviceNode;
use nvidia_host::inventory::report;
use nvidia_host::prepare::host::Preparation;
use nvidia_host::request::select;

use super::args;
use super::plan_image;
use super::terminal::Terminal;
use super::usage::usage_error;
use super::{containers, hook_config, output};
use crate::oci::{self, SpecView};
use crate::plan::request::{self, Decision, GpuRequest};
use crate::plan::step;
use crate::plan::{self, Container, Gpus, Image, Live, Verdict};
use crate::stages::{self, rootfs};
use records::asked::RecordedRequest;

/// The document of `--json`, whose schema is `docs/schemas/plan.json`.
#[derive(Debug, Default, Serialize)]
pub(super) struct Preview {
    pub version: u32,
    pub outcome: Effect,
    pub reason: String,
    pub container: Subject,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request: Option<RecordedRequest>,
    pub devices: Vec<String>,
    /// The devices for a person: with index and model, if they are known
    #[serde(skip)]
    pub device_names: Vec<String>,
    /// What the hook does on the host before that
    pub prepares: Vec<Value>,
    pub edits: Vec<Value>,
    pub findings: Vec<Finding>,
    /// What could not be examined
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub unknown: Vec<String>,
    /// Whether the last finding is the reason for the outcome
    #[serde(skip)]
    pub last_decides: bool,
}

/// What the hook does for the container.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Effect {
    Inject,
    #[default]
    None,
    Error,
}

#[derive(Debug, Default, Serialize)]
pub(super) struct Subject {
    /// As the command line names it
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    pub rootfs: String,
    pub pid: i32,
    pub privileged: bool,
}

/// Previews the hook for a container, given by its name, or by its state or config.json on stdin. Returns the exit code of the
/// hook.
pub(crate) fn run(
    options: &args::Plan,
    config: Option<&Path>,
    terminal: Terminal,
) -> Result<ExitCode> {
    let input = match options.container.as_str() {
        "-" => Input::Text(
            read_limited(std::io::stdin().lock(), oci::MAX_JSON).context("cannot read stdin")?,
        ),
        name => Input::Bundle(containers::bundle_of(name)?),
    };
    let of_hooks = match (&input, config) {
        (Input::Bundle(_), None) => hook_config::of_engines(),
        _ => None,
    };
    let config = config.or(of_hooks.as_deref());
    if matches!(&input, Input::Text(text) if text.iter().all(u8::is_ascii_whitespace)) {
        return Ok(usage_error(&failure(
            &catalog::COMMAND_LINE,
            "stdin is empty",
            HINT,
        )));
    }
    let preview = preview(input, options, config);
    let text = if options.json {
        json::pretty(&preview).unwrap_or_default() + "\n"
    } else {
        terminal.render(&plan_text::lines(&preview))
    };
    let printed = output::print(&text);
    Ok(if preview.outcome == Effect::Error {
        ExitCode::FAILURE
    } else {
        printed
    })
}

impl Preview {
    fn decide(&mut self, outcome: Effect, finding: Finding) {
        self.outcome = outcome;
        self.reason.clone_from(&finding.what);
        self.findings.push(finding);
        self.last_decides = true;
    }
}

fn preview(input: Input, options: &args::Plan, config: Option<&Path>) -> Preview {
    let mut preview = Preview {
        version: json::VERSION,
        ..Preview::default()
    };
    if let Err(error) = follow(input, options, config, &mut preview) {
        preview.decide(Effect::Error, Finding::error(&error));
        preview.edits.clear();
    }
    preview
}

/// Takes the steps of the hook, up to the point at which the hook would change the container.
fn follow(
    input: Input,
    options: &args::Plan,
    config: Option<&Path>,
    preview: &mut Preview,
) -> Result<()> {
    let (spec, pid) = read_container(input)?;
    let name = Some(&options.container)
        .filter(|name| *name != "-")
        .cloned();
    preview.container = Subject {
        name,
        rootfs: spec.rootfs.display().to_string(),
        pid,
        privileged: spec.privileged,
    };
    if !options.request_only && options.inventory.is_none() {
        preview.entries(&spec, pid, config, options)?;
        if preview.outcome == Effect::Error {
            return Ok(());
        }
    }
    let Some((config, findings)) = plan::read_config(&spec, config)? else {
        // Without a request, the reason does not depend on config.toml.
        if let Ok(Decision::Nothing(reason)) = request::from_spec(&spec, &Config::default()) {
            preview.reason = plan::nothing(reason, &spec);
        }
        return Ok(());
    };
    preview.findings.extend(findings);
    match plan::verdict(&spec, &config)? {
        Verdict::Nothing(reason) => preview.reason = plan::nothing(reason, &spec),
        Verdict::Unchanged(finding) => preview.decide(Effect::None, finding),
        Verdict::Gpus(request) => return preview.request(*request, config, options, &spec, pid),
    }
    Ok(())
}

impl Preview {
    /// Does what the hook entries of a CDI spec would do, if config.json contains one.
    fn entries(
        &mut self,
        spec: &SpecView,
        pid: i32,
        config: Option<&Path>,
        options: &args::Plan,
    ) -> Result<()> {
        let Some(entry) = rootfs::all_entries(spec) else {
            return Ok(());
        };
        let config = config.map(HostPath::new);
        let config = config.as_ref().or(entry.config.as_ref());
        let root = options.root.as_deref().map(HostPath::new);
        let root = root.as_ref().or(entry.root.as_ref());
        rootfs::check(&entry, spec, config, root)?;
        if !entry.only_checks() {
            self.entry(plan_image::of_entries(entry, spec, pid)?, spec);
        }
        Ok(())
    }

    /// Adds what a hook entry would report about the image.
    fn entry(&mut self, examined: Option<Image>, spec: &SpecView) {
        let image = self.image(examined, spec);
        let findings = image.facts.finding().into_iter();
        for finding in findings.chain(plan::newer_libcuda(&image)) {
            if !self.findings.contains(&finding) {
                self.findings.push(finding);
            }
        }
    }

    /// Returns the properties of the image. Those of an image that cannot be examined are assumed.
    fn image(&mut self, examined: Option<Image>, spec: &SpecView) -> Image {
        if examined.is_none() {
            self.unknown.push(format!(
                "the files of the image: the root file system {:?} is not mounted here; \"podman mount\" mounts it for a \
                 container that does not run",
                spec.rootfs
            ));
        }
        examined.unwrap_or_default()
    }
}

impl Preview {
    /// Follows a request.
    fn request(
        &mut self,
        request: GpuRequest,
        mut config: Config,
        options: &args::Plan,
        spec: &SpecView,
        pid: i32,
    ) -> Result<()> {
        self.outcome = Effect::Inject;
        self.reason = format!(
            "{} requests {}",
            request.asked_by,
            in_words(&request.devices.names())
        );
        self.request = Some(RecordedRequest::from(&request));
        if let Some(root) = &options.root {
            config.driver_root = HostPath::new(root);
        }
        if let Some(file) = &options.inventory {
            let inventory = report::read(file)?;
            let (devices, findings) = select::decide(&request, &inventory, &config)?;
            self.findings.extend(findings);
            self.devices = devices
                .iter()
                .map(|device| device.uuid().to_owned())
                .collect();
            return Ok(());
        }
        if options.request_only {
            return Ok(());
        }
        let expected = stages::host::expect(&request, &config, &spec.devices, &mut self.findings)?;
        self.prepares = preparations(&expected.prepares);
        let Some(decided) = expected.decided else {
            self.reason
                .push_str("; it would first prepare the host, and NVML answers only after that");
            return Ok(());
        };
        let (provided, host) = match decided {
            Ok(found) => found,
            Err(error) => {
                self.decide(
                    Effect::None,
                    plan::allow_without_gpu(&request, &config, error)?,
                );
                return Ok(());
            }
        };
        for device in provided.devices {
            self.device_names.push(device.to_string());
            self.devices.push(device.uuid);
        }
        let gpus = Gpus::new(request, config, host, provided.edits);
        self.steps(&gpus, spec, pid)
    }

    /// Adds the steps that the hook takes: in the waiting container if there is one, otherwise in its root file system on the host.
    fn steps(&mut self, gpus: &Gpus, spec: &SpecView, pid: i32) -> Result<()> {
        let image = self.image(plan_image::of_hook(gpus, spec, pid)?, spec);
        let Live {
            steps, findings, ..
        } = gpus.steps(&Container::from_spec(spec)?, &image);
        self.findings.extend(findings);
        self.edits = steps.iter().map(step::describe).collect();
        Ok(())
    }
}

/// Describes what the hook does on the host first.
fn preparations(preparation: &Preparation) -> Vec<Value> {
    let mut list = Vec::new();
    for module in &preparation.modules {
        list.push(json!({"module": module}));
    }
    for DeviceNode {
        path, major, minor, ..
    } in preparation.nodes.values()
    {
        list.push(json!({"node": path.absolute(), "major": major, "minor": minor}));
    }
    for node in preparation.permissions.values() {
        let Permissions { mode, uid, gid } = node.permissions;
        list.push(json!({
            "node": node.path.absolute(),
            "major": node.major,
            "minor": node.minor,
            "permissions": format!("{uid}:{gid} {mode:04o}"),
        }));
    }
    list
}

enum Input {
    /// The bundle of a container of an engine
    Bundle(PathBuf),
    Text(Vec<u8>),
}

const HINT: &str =
    "run \"oci-nvidia-hook plan CONTAINER\", or \"oci-nvidia-hook plan - < config.json\"";

/// Returns the container, and its process, or 0 if it has none.
fn read_container(input: Input) -> Result<(SpecView, i32)> {
    let bytes = match input {
        Input::Bundle(bundle) => return Ok((oci::spec_view::read_named(&bundle)?, 0)),
        Input::Text(bytes) => bytes,
    };
    if oci::is_spec(&bytes) {
        // Runtimes and Podman start hooks in the bundle.
        let here = base::sys::in_root::working_directory()?;
        let spec =
            oci::spec_view::parse(&bytes, &here).context("cannot read the container's spec")?;
        return Ok((spec, 0));
    }
    let state = oci::state::parse(&bytes).map_err(|error| {
        let what = format!(
            "stdin is neither config.json nor the state of a container: {}",
            error.root_cause()
        );
        failure(&catalog::STATE, what, HINT)
    })?;
    Ok((oci::spec_view::read(&state.bundle)?, state.pid))
}
