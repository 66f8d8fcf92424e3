//! `explain`: prints what the hook would do for a container, and why, without changing anything.

use std::fmt::Write;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::{Value, json};

use base::json;
use base::paths::HostPath;
use base::read::read_limited;
use base::report::{Finding, failure, one_line};
use findings::catalog;
use nvidia_host::cdi::entry::RootfsEdits;
use nvidia_host::config::Config;
use nvidia_host::driver::nodes::DeviceNode;
use nvidia_host::inventory::report;
use nvidia_host::prepare::host::Foreseen;
use nvidia_host::request::select;

use super::args::{Explain, ExplainStage};
use super::{containers, explain_finding, explain_image, output, usage_error};
use crate::inject::container::OpenContainer;
use crate::oci::{self, SpecView};
use crate::plan::request::{self, Decision, GpuRequest};
use crate::plan::{self, Container, Gpus, Image, Live, Verdict};
use crate::plan::{step, text};
use crate::stages::{self, limits, precreate};
use records::asked::Asked;

/// The document of `--json`, whose schema is `docs/schemas/explain.json`.
#[derive(Debug, Default, Serialize)]
struct Explanation {
    version: u32,
    outcome: Effect,
    reason: String,
    container: Subject,
    request: Option<Asked>,
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
    rootfs: String,
    pid: i32,
    privileged: bool,
}

/// Explains a container, given by its name, or by its state or config.json on stdin, or a finding, given by its number such as
/// `ONH-030`. Returns the exit code of the hook.
pub(crate) fn run(options: &Explain, config: Option<&Path>) -> Result<ExitCode> {
    if let Some(printed) = options.container.as_deref().and_then(|name| explain_finding::run(name, options.json)) {
        return Ok(printed);
    }
    let input = match &options.container {
        Some(name) => Input::Bundle(containers::bundle_of(name)?),
        None => Input::Text(read_stdin()?),
    };
    if matches!(&input, Input::Text(text) if text.iter().all(u8::is_ascii_whitespace)) {
        let error = failure(&catalog::COMMAND_LINE, "no container is given, and stdin is empty", HINT);
        return Ok(usage_error(&error));
    }
    let explanation = explain(input, options, config);
    let text = if options.json { json::pretty(&explanation).unwrap_or_default() + "\n" } else { to_text(&explanation) };
    let printed = output::print(&text);
    Ok(if explanation.outcome == Effect::Error { ExitCode::FAILURE } else { printed })
}

impl Explanation {
    fn decide(&mut self, outcome: Effect, finding: Finding) {
        self.outcome = outcome;
        self.reason.clone_from(&finding.what);
        self.findings.push(finding);
        self.last_decides = true;
    }
}

fn explain(input: Input, options: &Explain, config: Option<&Path>) -> Explanation {
    let mut explanation = Explanation { version: json::VERSION, ..Explanation::default() };
    if let Err(error) = follow(input, options, config, &mut explanation) {
        explanation.decide(Effect::Error, Finding::error(&error));
        explanation.edits.clear();
    }
    explanation
}

/// Takes the steps of the hook, up to the point at which the hook would change the container.
fn follow(input: Input, options: &Explain, config: Option<&Path>, explanation: &mut Explanation) -> Result<()> {
    let (spec, called) = read_container(input, options)?;
    let pid = if let Called::WithState(pid) = called { pid } else { 0 };
    explanation.container = Subject { rootfs: spec.rootfs.display().to_string(), pid, privileged: spec.privileged };
    if !options.request_only && options.inventory.is_none() {
        check_entry(&spec, config, options.root.as_deref())?;
    }
    let Some((config, findings)) = plan::read_config(&spec, config)? else {
        // Without a request, the reason does not depend on config.toml.
        if let Ok(Decision::Nothing(reason)) = request::from_spec(&spec, &Config::default()) {
            explanation.reason = plan::nothing(reason, &spec);
        }
        return Ok(());
    };
    explanation.findings.extend(findings);
    match plan::verdict(&spec, &config)? {
        Verdict::Nothing(reason) => explanation.reason = plan::nothing(reason, &spec),
        Verdict::LeftAlone(finding) => explanation.decide(Effect::None, finding),
        Verdict::Gpus(request) => return explanation.request(*request, config, options, &spec, called),
    }
    Ok(())
}

/// Checks the limits like the hook entry of a CDI spec or of precreate, if config.json contains one.
fn check_entry(spec: &SpecView, config: Option<&Path>, root: Option<&Path>) -> Result<()> {
    let Some(entry) = spec.hooks.iter().find_map(|hook| RootfsEdits::from_entry(&hook.args)) else { return Ok(()) };
    let (config, root) = (config.map(HostPath::new).or(entry.config), root.map(HostPath::new).or(entry.root));
    limits::check(spec, config.as_ref(), root.as_ref())
}

impl Explanation {
    /// Follows a request.
    fn request(
        &mut self,
        request: GpuRequest,
        mut config: Config,
        options: &Explain,
        spec: &SpecView,
        called: Called,
    ) -> Result<()> {
        self.outcome = Effect::Inject;
        self.reason = format!("{} asks for {}", request.asked_by, request.devices.names().join(","));
        self.request = Some(Asked::from(&request));
        if let Some(root) = &options.root {
            config.driver_root = HostPath::new(root);
        }
        if let Some(file) = &options.inventory {
            let inventory = report::read(file)?;
            let (devices, findings) = select::decide(&request, &inventory, &config)?;
            self.findings.extend(findings);
            self.devices = devices.iter().map(|device| device.uuid().to_owned()).collect();
            return Ok(());
        }
        if options.request_only {
            return Ok(());
        }
        let expected = stages::host::expect(&request, &config)?;
        let Foreseen { modules, nodes } = &expected.prepares;
        self.prepares =
            modules.iter().map(|module| json!({"module": module})).chain(nodes.values().map(node)).collect();
        if expected.is_unknown {
            self.reason.push_str("; it first prepares the host, and NVML answers only after that");
            return Ok(());
        }
        let found = expected
            .host
            .and_then(|host| Ok((plan::decide(&request, &config, &host, &spec.devices, &mut self.findings)?, host)));
        let (provided, host) = match found {
            Ok(found) => found,
            Err(error) => {
                self.decide(Effect::None, plan::excuse(&request, &config, error)?);
                return Ok(());
            }
        };
        self.devices = provided.devices.into_iter().map(|device| device.uuid).collect();
        let gpus = Gpus::new(request, config, host, provided.edits);
        match called {
            Called::WithState(pid) => self.steps(&gpus, spec, pid),
            Called::Precreate(text) => self.additions(&gpus, spec, text),
        }
    }

    /// Adds the steps that the hook takes: in the waiting container if there is one, otherwise in its root file system on the host.
    fn steps(&mut self, gpus: &Gpus, spec: &SpecView, pid: i32) -> Result<()> {
        let image = explain_image::within_deadline(|| {
            let waiting = if pid > 0 { OpenContainer::open(pid, &spec.rootfs).ok() } else { None };
            waiting.map_or_else(|| image_at(spec, gpus), |open| stages::image(&open, gpus))
        })?;
        let Live { steps, findings, .. } = gpus.steps(&Container::from_spec(spec)?, &image);
        self.findings.extend(findings);
        self.edits = steps.iter().map(step::describe).collect();
        Ok(())
    }

    /// Adds the additions of precreate to config.json, and what its hook entry does later in the root file system.
    fn additions(&mut self, gpus: &Gpus, spec: &SpecView, text: String) -> Result<()> {
        let additions = precreate::additions(gpus, spec, &mut self.findings)?;
        additions.apply(text)?;
        self.edits = text::describe_additions(&additions);
        let image = explain_image::within_deadline(|| image_at(spec, gpus))?;
        self.findings.extend(plan::newer_libcuda(&image));
        Ok(())
    }
}

/// Describes a device node of the host that the hook makes.
fn node(node: &DeviceNode) -> Value {
    json!({"node": node.path.absolute(), "major": node.major, "minor": node.minor})
}

/// Returns the facts about the image, before a runtime mounts anything in it.
fn image_at(spec: &SpecView, gpus: &Gpus) -> Image {
    let facts = OpenContainer::facts_of(&spec.rootfs).unwrap_or_default();
    OpenContainer::here(&spec.rootfs)
        .map_or_else(|_| Image::default(), |open| Image { facts, ..stages::image(&open, gpus) })
}

/// The call of the hook that is explained.
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

const HINT: &str = "oci-nvidia-hook explain CONTAINER, or oci-nvidia-hook explain < config.json";

fn read_stdin() -> Result<Vec<u8>> {
    let stdin = std::io::stdin();
    if stdin.is_terminal() {
        return Ok(Vec::new());
    }
    read_limited(stdin.lock(), oci::MAX_JSON).context("cannot read stdin")
}

fn read_container(input: Input, options: &Explain) -> Result<(SpecView, Called)> {
    let is_precreate = options.stage == Some(ExplainStage::Precreate);
    let (bytes, here) = match input {
        Input::Bundle(bundle) if is_precreate => {
            let path = bundle.join("config.json");
            let file = std::fs::File::open(&path).with_context(|| format!("cannot open {path:?}"))?;
            (read_limited(file, oci::MAX_JSON).with_context(|| format!("cannot read {path:?}"))?, bundle)
        }
        Input::Bundle(bundle) => return Ok((oci::spec_view::read(&bundle)?, Called::WithState(0))),
        // Runtimes and Podman start hooks in the bundle.
        Input::Text(bytes) => (bytes, base::sys::in_root::working_directory()?),
    };
    if is_precreate || (options.stage.is_none() && oci::is_spec(&bytes)) {
        let spec = oci::spec_view::parse(&bytes, &here).context("cannot read the container's spec")?;
        if !is_precreate {
            return Ok((spec, Called::WithState(0)));
        }
        let text = String::from_utf8(bytes).context("the container's spec is not UTF-8")?;
        return Ok((spec, Called::Precreate(text)));
    }
    let state = oci::state::parse(&bytes).map_err(|error| {
        let what = format!("stdin is neither config.json nor the state of a container: {}", error.root_cause());
        if options.stage.is_none() { failure(&catalog::STATE, what, HINT) } else { error }
    })?;
    Ok((oci::spec_view::read(&state.bundle)?, Called::WithState(state.pid)))
}

fn to_text(explanation: &Explanation) -> String {
    let Explanation { outcome, reason, container, request, devices, prepares, edits, findings, last_decides, .. } =
        explanation;
    let mut text = String::new();
    let outcome = match outcome {
        Effect::Inject => "the hook sets up the container",
        Effect::None => "the hook does nothing",
        Effect::Error => "the hook fails",
    };
    let decisive = findings.last().filter(|_| *last_decides);
    let number = decisive.map(|finding| format!(" ({})", finding.kind.id)).unwrap_or_default();
    writeln!(text, "{outcome}: {}{number}", one_line(reason)).ok();
    if let Some(finding) = decisive.filter(|finding| !finding.fix.is_empty()) {
        writeln!(text, "  hint: {}", one_line(&finding.fix)).ok();
    }
    if !container.rootfs.is_empty() {
        let privileged = if container.privileged { "privileged" } else { "not privileged" };
        writeln!(text, "container: {}, {privileged}", one_line(&container.rootfs)).ok();
    }
    if let Some(asked) = request {
        writeln!(text, "driver capabilities: {}", asked.driver_capabilities.join(",")).ok();
        for requirement in &asked.requirements {
            writeln!(text, "requires: {}", one_line(requirement)).ok();
        }
    }
    for device in devices {
        writeln!(text, "device: {}", one_line(device)).ok();
    }
    for one in prepares {
        let what = match (one["module"].as_str(), one["node"].as_str()) {
            (Some(module), _) => format!("load the kernel module {module}"),
            (_, node) => format!("make {} c {}:{}", node.unwrap_or_default(), one["major"], one["minor"]),
        };
        writeln!(text, "on the host: {what}").ok();
    }
    for edit in edits {
        writeln!(text, "edit: {}", text::line(edit)).ok();
    }
    let others = findings.len().saturating_sub(usize::from(decisive.is_some()));
    for finding in findings.iter().take(others) {
        writeln!(text, "{} {}: {}", finding.kind.id, finding.kind.severity.name(), one_line(&finding.what)).ok();
        if !finding.fix.is_empty() {
            writeln!(text, "  hint: {}", one_line(&finding.fix)).ok();
        }
    }
    text
}
