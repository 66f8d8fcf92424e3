//! A table of host states, from a generator: `doctor`, `status` and `plan` are asked about each of them, and then a container starts. What
//! they say and what the start does must agree, with an empty cache and with a filled one.

mod table;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::Value;

use crate::driver::{FakeDriver, Image};
use crate::engine::CONTAINERS_CONF;
use crate::harness::part;
use crate::support::{HOOK, Need, nvml_program, run, scratch, shell, source, write_file};
use table::State;

tests! {
    NEEDS => a_sample;
    NEEDS_ALL => the_whole_table;
}

const NEEDS: &[Need] = &[
    Need::Root,
    Need::Programs(&["cc", "unshare", "podman", "runc"]),
];
const NEEDS_ALL: &[Need] = &[
    Need::Root,
    Need::Programs(&["cc", "unshare", "podman", "runc"]),
    Need::Part(part::HOST_STATES),
];

/// The default run has one state of this many.
const SAMPLE: usize = 25;

fn a_sample() {
    let states = table::all();
    compare(states.iter().skip(SAMPLE / 2).step_by(SAMPLE).collect());
}

fn the_whole_table() {
    let mut states: Vec<_> = table::all();
    assert!(states.len() >= 200, "{} states", states.len());
    // ONH_HOST_STATES=TEXT limits the table to the states with this text in their names.
    if let Ok(text) = std::env::var("ONH_HOST_STATES") {
        states.retain(|state| state.name.contains(&text));
    }
    compare(states.iter().collect());
}

/// The host without a fault, as a driver root that becomes `/`.
struct Host {
    fake: FakeDriver,
    image: Image,
    dir: tempfile::TempDir,
}

impl Host {
    fn new() -> Self {
        let fake = FakeDriver::new(&["--gpus", "2"]);
        let dir = scratch();
        let root = fake.root.display();
        shell!(
            "cd '{root}'; mkdir -p usr/bin usr/share/containers/oci/hooks.d etc/containers/containers.conf.d \
               etc/nvidia-container-runtime; cp '{HOOK}' usr/bin/oci-nvidia-hook; cp '{nvml}' usr/bin; \
             cp '{hooks}/oci-nvidia-hook.json' usr/share/containers/oci/hooks.d; : >etc/nvidia-container-runtime/config.toml; \
             printf '%s' '{CONTAINERS_CONF}' >etc/containers/containers.conf.d/10-test.conf; \
             : >etc/containers/containers.conf",
            hooks = source("hooks.d").display(),
            nvml = nvml_program().display()
        );
        let image = Image::new(dir.path(), &["--layout", "debian"]);
        Self { fake, image, dir }
    }

    /// Makes the state, asks, and starts containers. Returns the directory with the answers.
    fn observe(&self, number: usize, state: &State, is_warm: bool) -> PathBuf {
        let out = self
            .dir
            .path()
            .join(format!("{number}-{}", u8::from(is_warm)));
        std::fs::create_dir(&out).unwrap();
        let library = self.fake.library();
        let lib = Path::new("/").join(library.strip_prefix(&self.fake.root).unwrap());
        let script = format!("lib={}; {}", lib.parent().unwrap().display(), state.script);
        let mut as_host = Command::new(source("tests/fake-driver/as-host"));
        as_host
            .arg(&self.fake.root)
            .arg(source("tests/it/host_states/run-state"))
            .arg(&out)
            .args([
                u8::from(is_warm).to_string(),
                u8::from(state.is_of_engine).to_string(),
            ])
            .arg(HOOK)
            .arg(&self.image.rootfs)
            .arg(script);
        let ran = run(&mut as_host);
        if ran.code != Some(0) {
            write_file(out.join("failed"), &ran.stderr);
        }
        out
    }
}

/// Observes these states cold and warm, some at a time, and panics with all differences.
fn compare(states: Vec<&State>) {
    let host = Host::new();
    let next = AtomicUsize::new(0);
    let differences = Mutex::new(Vec::new());
    let threads = 2 * std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    let Some(state) = states.get(number / 2) else {
                        return;
                    };
                    let is_warm = number % 2 == 1;
                    let out = host.observe(number, state, is_warm);
                    let found = Answers::read(&out).differences(state);
                    let temperature = if is_warm { "warm" } else { "cold" };
                    for difference in found {
                        let line = format!("{} ({temperature}): {difference}", state.name);
                        differences.lock().unwrap().push(line);
                    }
                    // conmon starts "podman container cleanup", which can still write there. The rest goes with the scratch directory.
                    std::fs::remove_dir_all(out).ok();
                }
            });
        }
    });
    let mut differences = differences.into_inner().unwrap();
    differences.sort();
    assert!(
        differences.is_empty(),
        "{} differences in {} states:\n{}",
        differences.len(),
        states.len(),
        differences.join("\n")
    );
}

/// What was said about a state, and what happened.
struct Answers {
    dir: PathBuf,
}

/// Errors of these checks concern an engine, and only it shows whether they are true.
const ABOUT_ENGINES: [&str; 3] = ["engines", "hooks-dir", "runtime"];

impl Answers {
    fn read(dir: &Path) -> Self {
        Self {
            dir: dir.to_owned(),
        }
    }

    fn text(&self, name: &str) -> String {
        let bytes = std::fs::read(self.dir.join(name)).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn json(&self, name: &str) -> Value {
        serde_json::from_str(&self.text(name)).unwrap_or_default()
    }

    fn code(&self, name: &str) -> u8 {
        self.text(&format!("{name}.code")).trim().parse().unwrap()
    }

    fn checks(&self) -> Vec<Value> {
        let doctor = self.json("doctor");
        doctor["checks"].as_array().cloned().unwrap_or_default()
    }

    /// The errors of doctor about the engines, or about all else.
    fn errors(&self, about_engines: bool) -> Vec<String> {
        let mut errors = Vec::new();
        for check in self.checks() {
            let name = check["check"].as_str().unwrap_or_default();
            if check["status"] == "error" && ABOUT_ENGINES.contains(&name) == about_engines {
                errors.push(format!(
                    "{name} {}: {}",
                    check["id"].as_str().unwrap_or_default(),
                    check["what"].as_str().unwrap_or_default()
                ));
            }
        }
        errors
    }

    fn differences(&self, state: &State) -> Vec<String> {
        let failed = self.text("failed");
        if !failed.is_empty() {
            return vec![format!("the state cannot be made: {failed}")];
        }
        let mut differences = Vec::new();
        if self.checks().is_empty() {
            differences.push(format!("doctor fails: {}", self.text("doctor.err").trim()));
        }
        if self.text("nodes-before") != self.text("nodes-after") {
            differences.push("doctor or plan changed device nodes".to_owned());
        }
        if state.is_of_engine {
            differences.extend(self.of_podman());
            return differences;
        }
        differences.extend(self.doctor_and_start());
        differences.extend(self.doctor_and_findings(state));
        if state.is_repaired {
            differences.extend(self.repaired());
        }
        for name in ["usual", "whole"] {
            differences.extend(self.plan_and_start(name));
        }
        differences
    }

    /// The numbers of the findings in doctor's checks.
    fn numbers(&self) -> BTreeSet<String> {
        let mut numbers = BTreeSet::new();
        for check in self.checks() {
            numbers.extend(check["id"].as_str().map(str::to_owned));
        }
        numbers
    }

    /// What a start reports, doctor reports too. A container with fewer GPUs than the host is at least a warning.
    fn doctor_and_findings(&self, state: &State) -> Vec<String> {
        let mut differences = Vec::new();
        for name in ["usual", "whole"] {
            // What NVML reports after the host was prepared is unknown before.
            if self.is_unknown(name) {
                continue;
            }
            let record = &self.json(&format!("why-{name}"))["records"][0];
            let ids = texts(&record["findings"], |finding| finding["id"].as_str());
            let unknown: Vec<_> = ids.difference(&self.numbers()).cloned().collect();
            if !unknown.is_empty() {
                differences.push(format!("doctor lacks {unknown:?}, which {name} reports"));
            }
            let given = texts(&record["devices"], |gpu| gpu["uuid"].as_str());
            let started = self.code(&format!("start-{name}")) == 0;
            let is_limited = state.script.contains("[devices]");
            let lacks_gpus = !is_limited && given.len() < 2;
            if started && !record.is_null() && lacks_gpus && self.code("doctor") == 0 {
                differences.push(format!("doctor ends with 0, {name} has {given:?}"));
            }
        }
        differences
    }

    /// A start repairs each fault of a node of a GPU, unless config.toml forbids that.
    fn repaired(&self) -> Option<String> {
        let record = &self.json("why-usual")["records"][0];
        let given = texts(&record["devices"], |gpu| gpu["uuid"].as_str());
        let findings = texts(&record["findings"], |finding| finding["id"].as_str());
        if given.len() == 2 && findings.is_empty() {
            return None;
        }
        Some(format!(
            "the start repairs not all: {given:?}, {findings:?}"
        ))
    }

    fn doctor_and_start(&self) -> Option<String> {
        let mut refused = Vec::new();
        for name in ["usual", "whole"] {
            if self.code(&format!("start-{name}")) != 0 {
                let stderr = self.text(&format!("start-{name}.err"));
                refused.push(stderr.lines().next().unwrap_or_default().to_owned());
            }
        }
        let errors = self.errors(false);
        if errors.is_empty() == refused.is_empty() {
            return None;
        }
        Some(format!("doctor: {errors:?}, refused: {refused:?}"))
    }

    /// Whether plan cannot know what NVML reports after the start has prepared the host.
    fn is_unknown(&self, name: &str) -> bool {
        let plan = self.json(&format!("plan-{name}"));
        let reason = plan["reason"].as_str().unwrap_or_default();
        reason.contains("NVML answers only after that")
    }

    fn plan_and_start(&self, name: &str) -> Vec<String> {
        let plan = self.json(&format!("plan-{name}"));
        let why = self.json(&format!("why-{name}"));
        let record = &why["records"][0];
        let started = self.code(&format!("start-{name}")) == 0;
        let stderr = self.text(&format!("start-{name}.err"));
        let mut differences = Vec::new();
        if (plan["outcome"] != "error") != started {
            differences.push(format!(
                "plan {name}: {} ({}), start: {}",
                plan["outcome"],
                plan["reason"],
                stderr.trim()
            ));
            return differences;
        }
        if !started || self.is_unknown(name) {
            return differences;
        }
        let expected = texts(&plan["devices"], |device| device.as_str());
        let given = texts(&record["devices"], |gpu| gpu["uuid"].as_str());
        if !record.is_null() && expected != given {
            differences.push(format!("plan {name}: {expected:?}, start: {given:?}"));
        }
        let expected = texts(&plan["findings"], |finding| finding["id"].as_str());
        let found = texts(&record["findings"], |finding| finding["id"].as_str());
        if !record.is_null() && expected != found {
            differences.push(format!("plan {name}: {expected:?}, start: {found:?}"));
        }
        differences
    }

    /// Compares doctor and status with what Podman did.
    fn of_podman(&self) -> Vec<String> {
        let code = self.code("podman");
        let (starts, has_gpus) = (code < 2, code == 0);
        let status = self.json("status");
        let engine = &status["engines"][0];
        let mut differences = Vec::new();
        let podman = format!("podman: {code} {}", self.text("podman.err").trim());
        if (engine["active"] == true) != has_gpus {
            differences.push(format!("status: {engine}, {podman}"));
        }
        let errors = self.errors(true);
        if errors.is_empty() != starts {
            differences.push(format!("doctor: {errors:?}, {podman}"));
        }
        let warns = self.code("doctor") != 0;
        if warns == has_gpus {
            differences.push(format!(
                "doctor ends with {}, {podman}",
                self.code("doctor")
            ));
        }
        differences
    }
}

fn texts(list: &Value, text: impl Fn(&Value) -> Option<&str>) -> BTreeSet<String> {
    let mut texts = BTreeSet::new();
    for value in list.as_array().into_iter().flatten() {
        texts.insert(text(value).unwrap_or_default().to_owned());
    }
    texts
}
