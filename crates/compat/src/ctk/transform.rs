//! `nvidia-ctk cdi transform root`: replaces the beginning of paths in a CDI spec.

use std::path::Path;

use anyhow::{Context, Result, anyhow};

use base::read::read_limited;
use base::report::classify;
use cdi_spec::file::{self, Format};
use cdi_spec::spec::{ContainerEdits, Spec};
use findings::catalog;

use super::args::{Root, Side};
use crate::edit;

/// The size limit in bytes of a spec.
const MAX_SIZE: usize = 16 << 20;

/// Returns the changed spec for stdout, or nothing if it was written to a file.
pub(super) fn root(options: &Root) -> Result<Vec<u8>> {
    transformed(options).map_err(|error| {
        classify(
            error,
            &catalog::SPEC_FILE,
            "give a CDI spec with --input, and a file with --output",
        )
    })
}

fn transformed(options: &Root) -> Result<Vec<u8>> {
    let is_stdin = options.input == Path::new("-");
    let text = if is_stdin {
        String::from_utf8(read_limited(std::io::stdin().lock(), MAX_SIZE)?)
            .context("cannot read stdin")?
    } else {
        edit::file::read(&options.input)?
            .ok_or_else(|| anyhow!("{:?} is missing", options.input))?
    };
    let mut spec = file::parse(text.as_bytes())
        .map_err(|why| anyhow!("{:?} is not a CDI spec: {why}", options.input))?;
    let (from, to) = (text_of(&options.from)?, text_of(&options.to)?);
    change(&mut spec, from, to, options.relative_to);
    let is_json = text.trim_start().starts_with('{');
    match options
        .output
        .as_deref()
        .filter(|path| *path != Path::new("-"))
    {
        None => Ok(if is_json { Format::Json } else { Format::Yaml }
            .print(&spec)?
            .into_bytes()),
        Some(path) => {
            let format =
                Format::from_path(path).ok_or_else(|| anyhow!("engines do not read {path:?}"))?;
            file::write(path, &format.print(&spec)?)
                .with_context(|| format!("cannot write {path:?}"))?;
            Ok(Vec::new())
        }
    }
}

fn text_of(path: &Path) -> Result<&str> {
    path.to_str()
        .with_context(|| format!("{path:?} is not UTF-8"))
}

fn change(spec: &mut Spec, from: &str, to: &str, side: Side) {
    let devices = spec
        .devices
        .iter_mut()
        .map(|device| &mut device.container_edits);
    for edits in devices.chain([&mut spec.container_edits]) {
        change_edits(edits, from, to, side);
    }
}

fn change_edits(edits: &mut ContainerEdits, from: &str, to: &str, side: Side) {
    for node in &mut edits.device_nodes {
        match side {
            Side::Host => {
                // Without a path on the host, the path in the container is that path.
                let old = node.host_path.as_ref().unwrap_or(&node.path);
                let new = replaced(old, from, to);
                node.host_path = (new != node.path).then_some(new);
            }
            Side::Container => {
                let new = replaced(&node.path, from, to);
                let host = node
                    .host_path
                    .get_or_insert_with(|| node.path.clone())
                    .clone();
                node.host_path = (host != new).then_some(host);
                node.path = new;
            }
        }
    }
    for mount in &mut edits.mounts {
        let path = if side == Side::Host {
            &mut mount.host_path
        } else {
            &mut mount.container_path
        };
        *path = replaced(path, from, to);
    }
    for hook in &mut edits.hooks {
        match side {
            Side::Host => hook.path = replaced(&hook.path, from, to),
            Side::Container => hook
                .args
                .iter_mut()
                .skip(1)
                .for_each(|arg| *arg = replaced(arg, from, to)),
        }
    }
}

/// Returns the path with another beginning, if it begins with the directory `from`.
fn replaced(path: &str, from: &str, to: &str) -> String {
    let (from, to) = (from.trim_end_matches('/'), to.trim_end_matches('/'));
    match path.strip_prefix(from) {
        Some("") => (if to.is_empty() { "/" } else { to }).to_owned(),
        Some(rest) if rest.starts_with('/') => format!("{to}{rest}"),
        _ => path.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPEC: &str = "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices:\n- name: \"0\"\n  containerEdits:\n    deviceNodes:\n    - path: /dev/nvidia0\n      hostPath: /run/d/dev/nvidia0\n    - path: /dev/x\ncontainerEdits:\n  mounts:\n  - hostPath: /run/d/lib/a\n    containerPath: /lib/a\n  - hostPath: /run/driver\n    containerPath: /b\n  hooks:\n  - hookName: createContainer\n    path: /run/d/hook\n    args: [x, /lib/a, --folder=/lib]\n";

    #[test]
    fn paths_begin_with_another_directory() {
        let mut spec = file::parse(SPEC.as_bytes()).unwrap();
        change(&mut spec, "/run/d/", "/", Side::Host);
        let nodes = &spec.devices[0].container_edits.device_nodes;
        assert_eq!((&nodes[0].host_path, &nodes[1].host_path), (&None, &None));
        let edits = &spec.container_edits;
        assert_eq!(
            (
                edits.mounts[0].host_path.as_str(),
                edits.hooks[0].path.as_str()
            ),
            ("/lib/a", "/hook")
        );
        assert_eq!(
            edits.mounts[1].host_path, "/run/driver",
            "another directory"
        );
        change(&mut spec, "/dev", "/host/dev", Side::Host);
        let nodes = &spec.devices[0].container_edits.device_nodes;
        assert_eq!(nodes[0].host_path.as_deref(), Some("/host/dev/nvidia0"));
        change(&mut spec, "/lib", "/usr/lib", Side::Container);
        let edits = &spec.container_edits;
        assert_eq!(edits.mounts[0].container_path, "/usr/lib/a");
        assert_eq!(edits.hooks[0].args, ["x", "/usr/lib/a", "--folder=/lib"]);
    }
}
