//! Records the containers that do not get the GPUs that they request, for `oci-nvidia-hook why`.

use std::path::Path;
use std::thread;
use std::time::SystemTime;

use anyhow::Error;
use base::report::{ErrorReport, Finding, one_line};
use records::store::Store;
use records::{NRI, Outcome, Pod, Record};

use crate::proto::nri::{Container, PodSandbox};

/// Writes the record of a container that must not start.
pub fn refusal(pod: Option<&PodSandbox>, container: &Container, error: &Error) {
    write(
        pod,
        container,
        Outcome::Failed,
        &Finding::error(error),
        ErrorReport::new(error).line,
    );
}

/// Writes the record of a container that starts without GPUs.
pub fn left_unchanged(pod: Option<&PodSandbox>, container: &Container, finding: &Finding) {
    write(
        pod,
        container,
        Outcome::Unchanged,
        finding,
        one_line(&finding.what),
    );
}

fn write(
    pod: Option<&PodSandbox>,
    container: &Container,
    outcome: Outcome,
    finding: &Finding,
    reason: String,
) {
    let mut record = Record::begin(NRI, SystemTime::now());
    record.name_container(
        one_line(&container.id),
        pod.map(|pod| names(pod, container)).unwrap_or_default(),
        Path::new(""),
    );
    if pod.is_none() {
        record.container.name = one_line(&container.name);
    }
    record.add_finding(finding);
    record.end(outcome, reason);
    // A failure can replace other records, all of which are read then. The engine waits for the answer meanwhile.
    thread::Builder::new().spawn(move || store(&record)).ok();
}

/// Errors are ignored, as the hook ignores them: the log has the refusal too.
fn store(record: &Record) {
    if let Ok(store) = Store::open() {
        store.prune();
        store.write(record);
    }
}

fn names(pod: &PodSandbox, container: &Container) -> Pod {
    let [name, namespace, container] =
        [&pod.name, &pod.namespace, &container.name].map(|text| one_line(text));
    Pod {
        name,
        namespace,
        container,
    }
}
