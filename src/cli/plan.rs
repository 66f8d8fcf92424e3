//! `plan`: prints what the hook would do for a container, and why, without changing anything.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::{Value, json};

use base::json;
use base::paths::HostPath;
use base::read::read_limited;
use base::report::{Finding, failure, one_line};
use base::tree::Tree;
use findings::catalog;
use nvidia_host::cdi::entry::RootfsEdits;
use nvidia_host::config::Config;
use nvidia_host::device_id::in_words;
use nvidia_host::driver::access::Permissions;
use nvidia_host::driver::nodes::DeviceNode;
use nvidia_host::inventory::report;
use nvidia_host::prepare::host::Foreseen;
use nvidia_host::request::select;

use super::args::{self, PlanStage};
use super::terminal::{Line, Terminal, Tone};
use super::usage::usage_error;
use super::{containers, output, plan_image};
use crate::inject::container::OpenContainer;
use crate::oci::{self, SpecView};
use crate::plan::request::{self, Decision, GpuRequest};
use crate::plan::{self, Container, Gpus, Image, Live, Verdict};
use crate::plan::{step, text};
use crate::stages::{self, limits, precreate};
use records::asked::RecordedRequest;

/// The document of `--json`, whose schema is `docs/schemas/plan.json`.
#[derive(Debug, Default, Serialize)]
struct Preview {
    version: u32,
    outcome: Effect,
    reason: String,
    container: Subject,
    #[serde(skip_serializing_if = "Option::is_none")]
    request: Option<RecordedRequest>,
    devices: Vec<String>,
    /// What the hook does on the host before that
    prepares: Vec<Value>,
    edits: Vec<Value>,
    findings: Vec<Finding>,
    /// Whether the last finding is the reason for the outcome
    #[serde(skip)]
    last_decides: bool,
}

/// What the hook does for the container.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Effect {
    Inject,
    #[default]
    None,
    Error,
}

#[derive(Debug, Default, Serialize)]
struct Subject {
    /// As the command line names it
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    rootfs: String,
    pid: i32,
    privileged: bool,
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
        (Input::Bundle(_), None) => config_of_hooks(),
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
        terminal.render(&lines(&preview))
    };
    let printed = output::print(&text);
    Ok(if preview.outcome == Effect::Error {
        ExitCode::FAILURE
    } else {
        printed
    })
}

/// Returns the configuration file that the engines of this host pass to the hook, if it is not the usual one.
fn config_of_hooks() -> Option<PathBuf> {
    let host = Tree::open(&HostPath::new("/")).ok()?;
    let engines = engines::inspect_engines(&host, None);
    let (config, _) = engines::status::config_of_hooks(&engines)?;
    Some(config)
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
    let (spec, called) = read_container(input, options)?;
    let pid = if let Called::WithState(pid) = called {
        pid
    } else {
        0
    };
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
        check_entry(&spec, config, options.root.as_deref())?;
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
        Verdict::Gpus(request) => return preview.request(*request, config, options, &spec, called),
    }
    Ok(())
}

/// Checks the limits like the hook entry of a CDI spec or of precreate, if config.json contains one.
fn check_entry(spec: &SpecView, config: Option<&Path>, root: Option<&Path>) -> Result<()> {
    let entries = spec
        .hooks
        .iter()
        .filter_map(|hook| RootfsEdits::from_entry(&hook.args));
    let Some(entry) = entries.reduce(RootfsEdits::merge) else {
        return Ok(());
    };
    let (config, root) = (
        config.map(HostPath::new).or(entry.config),
        root.map(HostPath::new).or(entry.root),
    );
    limits::check(spec, config.as_ref(), root.as_ref(), entry.features)
}

impl Preview {
    /// Follows a request.
    fn request(
        &mut self,
        request: GpuRequest,
        mut config: Config,
        options: &args::Plan,
        spec: &SpecView,
        called: Called,
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
                .push_str("; it first prepares the host, and NVML answers only after that");
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
        self.devices = provided
            .devices
            .into_iter()
            .map(|device| device.uuid)
            .collect();
        let gpus = Gpus::new(request, config, host, provided.edits);
        match called {
            Called::WithState(pid) => self.steps(&gpus, spec, pid),
            Called::Precreate(text) => self.additions(&gpus, spec, text),
        }
    }

    /// Adds the steps that the hook takes: in the waiting container if there is one, otherwise in its root file system on the host.
    fn steps(&mut self, gpus: &Gpus, spec: &SpecView, pid: i32) -> Result<()> {
        let image = plan_image::within_deadline(|| {
            let waiting = if pid > 0 {
                OpenContainer::open(pid, &spec.rootfs).ok()
            } else {
                None
            };
            waiting.map_or_else(|| image_at(spec, gpus), |open| stages::image(&open, gpus))
        })?;
        let Live {
            steps, findings, ..
        } = gpus.steps(&Container::from_spec(spec)?, &image);
        self.findings.extend(findings);
        self.edits = steps.iter().map(step::describe).collect();
        Ok(())
    }

    /// Adds the additions of precreate to config.json, and what its hook entry does later in the root file system.
    fn additions(&mut self, gpus: &Gpus, spec: &SpecView, text: String) -> Result<()> {
        let additions = precreate::additions(gpus, spec, &mut self.findings)?;
        additions.apply(text)?;
        self.edits = text::describe_additions(&additions);
        let image = plan_image::within_deadline(|| image_at(spec, gpus))?;
        self.findings.extend(plan::newer_libcuda(&image));
        Ok(())
    }
}

/// Describes what the hook does on the host first.
fn preparations(foreseen: &Foreseen) -> Vec<Value> {
    let mut list = Vec::new();
    for module in &foreseen.modules {
        list.push(json!({"module": module}));
    }
    for DeviceNode {
        path, major, minor, ..
    } in foreseen.nodes.values()
    {
        list.push(json!({"node": path.absolute(), "major": major, "minor": minor}));
    }
    for node in foreseen.permissions.values() {
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

/// Returns the facts about the image, before a runtime mounts anything in it.
fn image_at(spec: &SpecView, gpus: &Gpus) -> Image {
    let facts = OpenContainer::facts_of(&spec.rootfs).unwrap_or_default();
    OpenContainer::here(&spec.rootfs).map_or_else(
        |_| Image::default(),
        |open| Image {
            facts,
            ..stages::image(&open, gpus)
        },
    )
}

/// The call of the hook that is previewed.
enum Called {
    /// At prestart, with the state of a container. The number is its process, or 0 if it has none
    WithState(i32),
    /// At precreate, with the text of config.json
    Precreate(String),
}

enum Input {
    /// The bundle of a container of an engine
    Bundle(PathBuf),
    Text(Vec<u8>),
}

const HINT: &str =
    "run \"oci-nvidia-hook plan CONTAINER\", or \"oci-nvidia-hook plan - < config.json\"";

fn read_container(input: Input, options: &args::Plan) -> Result<(SpecView, Called)> {
    let is_precreate = options.stage == Some(PlanStage::Precreate);
    let (bytes, here) = match input {
        Input::Bundle(bundle) if is_precreate => {
            let text = oci::spec_view::read_named_text(&bundle);
            (
                text.with_context(|| oci::spec_view::cannot_read(&bundle))?,
                bundle,
            )
        }
        Input::Bundle(bundle) => {
            return Ok((oci::spec_view::read_named(&bundle)?, Called::WithState(0)));
        }
        // Runtimes and Podman start hooks in the bundle.
        Input::Text(bytes) => (bytes, base::sys::in_root::working_directory()?),
    };
    if is_precreate || (options.stage.is_none() && oci::is_spec(&bytes)) {
        let spec =
            oci::spec_view::parse(&bytes, &here).context("cannot read the container's spec")?;
        if !is_precreate {
            return Ok((spec, Called::WithState(0)));
        }
        let text = String::from_utf8(bytes).context("the container's spec is not UTF-8")?;
        return Ok((spec, Called::Precreate(text)));
    }
    let state = oci::state::parse(&bytes).map_err(|error| {
        let what = format!(
            "stdin is neither config.json nor the state of a container: {}",
            error.root_cause()
        );
        if options.stage.is_none() {
            failure(&catalog::STATE, what, HINT)
        } else {
            error
        }
    })?;
    Ok((
        oci::spec_view::read(&state.bundle)?,
        Called::WithState(state.pid),
    ))
}

fn lines(preview: &Preview) -> Vec<Line> {
    let (decisive, others) = match preview.findings.split_last() {
        Some((last, others)) if preview.last_decides => (Some(last), others),
        _ => (None, preview.findings.as_slice()),
    };
    let mut lines = outcome_lines(preview, decisive);
    lines.extend(request_lines(preview));
    for device in &preview.devices {
        lines.push(item("device: ", device));
    }
    for one in &preview.prepares {
        lines.push(item("on the host: ", &preparation(one)));
    }
    for (heading, items) in text::groups(&preview.edits) {
        lines.push(item(&format!("{heading}: "), &items.join(", ")));
    }
    for finding in others {
        lines.extend(finding_lines(finding));
    }
    lines
}

/// Describes what the hook does and why, with the finding that decides it.
fn outcome_lines(preview: &Preview, decisive: Option<&Finding>) -> Vec<Line> {
    let mut lines = Vec::new();
    if let Some(name) = &preview.container.name {
        lines.push(item("container ", name));
    }
    let (tone, outcome) = match preview.outcome {
        Effect::Inject => (Tone::Good, "the hook sets up the container"),
        Effect::None => (Tone::Plain, "the hook does nothing"),
        Effect::Error => (Tone::Bad, "the hook fails"),
    };
    let mut reason = format!(": {}", one_line(&preview.reason));
    if let Some(finding) = decisive {
        reason += &format!(" ({})", finding.kind.id);
    }
    let line = Line::default().then(tone, outcome);
    lines.push(line.then(Tone::Plain, reason));
    if let Some(finding) = decisive
        && !finding.fix.is_empty()
    {
        lines.push(item("  hint: ", &finding.fix));
    }
    lines
}

/// Describes the container and its request.
fn request_lines(preview: &Preview) -> Vec<Line> {
    let mut lines = Vec::new();
    let container = &preview.container;
    if !container.rootfs.is_empty() {
        let privileged = if container.privileged {
            "privileged"
        } else {
            "not privileged"
        };
        let rootfs = format!("{}, {privileged}", container.rootfs);
        lines.push(item("root file system: ", &rootfs));
    }
    let Some(asked) = &preview.request else {
        return lines;
    };
    let capabilities = asked.driver_capabilities.join(", ");
    lines.push(item("driver capabilities: ", &capabilities));
    if !asked.features.is_empty() {
        lines.push(item("features: ", &asked.features.join(", ")));
    }
    for requirement in &asked.requirements {
        lines.push(item("requires: ", requirement));
    }
    lines
}

fn finding_lines(finding: &Finding) -> Vec<Line> {
    let severity = finding.kind.severity.name();
    let what = format!(": {}", one_line(&finding.what));
    let line = Line::new(format!("{} ", finding.kind.id));
    let line = line.then(Tone::of_severity(severity), severity);
    let mut lines = vec![line.then(Tone::Plain, what)];
    if !finding.fix.is_empty() {
        lines.push(item("  hint: ", &finding.fix));
    }
    lines
}

fn item(name: &str, text: &str) -> Line {
    Line::new(format!("{}{}", one_line(name), one_line(text)))
}

/// Describes what the hook does on the host first.
fn preparation(one: &Value) -> String {
    if let Some(module) = one["module"].as_str() {
        return format!("load the kernel module {module}");
    }
    let node = one["node"].as_str().unwrap_or_default();
    match one["permissions"].as_str() {
        Some(permissions) => format!("set the owner and mode of {node} to {permissions}"),
        None => format!("create {node} c {}:{}", one["major"], one["minor"]),
    }
}
