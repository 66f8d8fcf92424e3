//! `nvidia-ctk runtime configure`: reports how Podman and CRI-O start the hook, and changes the files of Docker and containerd.

use std::path::PathBuf;

use anyhow::Result;

use base::paths::HostPath;
use base::report::{classify, failure};
use base::tree::Tree;
use engines::EngineKind;
use engines::status;
use findings::catalog;
use nvidia_host::programs;

use super::args::{Configure, Engine};
use super::{RuntimeEntry, containerd, docker, note};
use crate::{edit, neighbor};

/// Returns the text for stdout: the changed file with `--dry-run`, or the state of the engine.
pub(super) fn configure(options: &Configure) -> Result<Vec<u8>> {
    let program = options
        .path
        .clone()
        .unwrap_or_else(|| neighbor(programs::RUNTIME));
    let wanted = RuntimeEntry {
        name: &options.name,
        program: &program,
        is_default: options.set_as_default,
    };
    match options.runtime {
        Engine::Podman => report(&EngineKind::Podman),
        Engine::Crio => report(&EngineKind::Crio),
        Engine::Docker => change(options, docker::FILE, "docker", |text| {
            docker::changed(text, &wanted)
        }),
        Engine::Containerd => change(options, containerd::FILE, "containerd", |text| {
            containerd::changed(text, &wanted)
        }),
    }
}

/// Returns how an engine starts the hook. Nothing is changed: the package contains the hook file.
fn report(kind: &EngineKind) -> Result<Vec<u8>> {
    let host = Tree::open(&HostPath::new("/"))?;
    let name = kind.to_string();
    let report = status::report(&host, None);
    let Some(engine) = report
        .engines
        .iter()
        .find(|engine| engine.engine == name && engine.installed)
    else {
        return Ok(format!(
            "{name} is not installed; when it is, it starts the hook without configuration\n"
        )
        .into());
    };
    if engine.nri {
        return Ok(format!("nothing to configure: {}\n", engine.why).into());
    }
    if !engine.active {
        return Err(failure(
            &catalog::SYSTEM,
            format!("{name} does not start the hook: {}", engine.why),
            engine.fix.clone(),
        ));
    }
    let condition = if engine.why.is_empty() {
        String::new()
    } else {
        format!(" ({})", engine.why)
    };
    Ok(format!(
        "nothing to configure: {name} starts the hook because of {}{condition}\n",
        engine.files().join(", ")
    )
    .into())
}

/// Changes the file of an engine, which reads it when it starts.
fn change(
    options: &Configure,
    file: &str,
    service: &str,
    changed: impl Fn(&str) -> Result<String>,
) -> Result<Vec<u8>> {
    let path = options
        .config
        .clone()
        .unwrap_or_else(|| PathBuf::from(file));
    let hint = format!(
        "edit the file, or give another one with --config; \"--runtime={service} --dry-run\" prints the result"
    );
    let old = edit::file::read(&path)
        .map_err(|error| classify(error, &catalog::SYSTEM, "run the command as root"))?;
    let old = old.unwrap_or_default();
    let new = changed(&old).map_err(|error| {
        classify(
            error.context(format!("cannot change {path:?}")),
            &catalog::SYSTEM,
            &hint,
        )
    })?;
    if options.dry_run {
        return Ok(new.into_bytes());
    }
    if new == old {
        note(&format!("{path:?} is already configured"));
        return Ok(Vec::new());
    }
    let hint =
        "run the command as root, and give the file itself with --config if the path is a link";
    edit::file::replace(&path, new.as_bytes())
        .map_err(|error| classify(error, &catalog::SYSTEM, hint))?;
    note(&format!(
        "wrote {path:?}; restart {service}, for example with \"systemctl restart {service}\""
    ));
    Ok(Vec::new())
}
