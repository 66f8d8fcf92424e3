//! Finds hook entries to which a runtime passes the environment of the container. The dynamic linker then loads the library that
//! `LD_PRELOAD` of the image names into the hook, which runs as root of the host (CVE-2025-23266).

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use base::report::Finding;
use cdi_spec::environment::is_inherited;
use cdi_spec::registry::SpecFile;
use cdi_spec::spec::Spec;
use findings::catalog;
use nvidia_host::programs;

use crate::Engine;
use crate::hook_file::HookFile;

/// An environment for hooks that need none.
const ENV: &str = "[\"PATH=/usr/sbin:/usr/bin:/sbin:/bin\"]";

/// Returns a finding for each stage and program of the CDI specs, together with the file.
#[must_use]
pub fn in_specs(files: &[SpecFile]) -> Vec<(&SpecFile, Finding)> {
    let mut found = Vec::new();
    for file in files {
        let Ok(spec) = &file.spec else { continue };
        let path = file.path.display();
        for (stage, program) in without_env(spec) {
            let program = Path::new(program);
            let fix = if programs::is_cdi_hook(program) {
                format!(
                    "update the program that wrote {path}, and have it write the file again: the NVIDIA Container Toolkit \
                     writes \"env\" since 1.17.8"
                )
            } else {
                format!(
                    "add env: {ENV} to the hook in {path}, or update the program that wrote the file"
                )
            };
            found.push((file, finding(&file.path, stage, program, fix)));
        }
    }
    found
}

/// Returns stage and program of the entries of a CDI spec.
fn without_env(spec: &Spec) -> BTreeSet<(&str, &str)> {
    let devices = spec.devices.iter().map(|device| &device.container_edits);
    let mut found = BTreeSet::new();
    for edits in devices.chain([&spec.container_edits]) {
        for hook in &edits.hooks {
            if is_inherited(&hook.hook_name, &hook.env) {
                found.insert((hook.hook_name.as_str(), hook.path.as_str()));
            }
        }
    }
    found
}

/// Returns a finding for each stage of the hook files that engines read.
#[must_use]
pub fn in_hook_files(engines: &[Engine]) -> Vec<Finding> {
    // Several engines can read the same file.
    let mut files: BTreeMap<&PathBuf, &HookFile> = BTreeMap::new();
    for engine in engines {
        for entry in &engine.hooks.entries {
            files.insert(&entry.file, &entry.hook);
        }
    }
    let mut found = Vec::new();
    for (path, hook) in files {
        let name = path.display();
        let fix = format!(
            "add \"env\": {ENV} to the \"hook\" of {name}, which must have \"version\": \"1.0.0\""
        );
        for stage in &hook.stages {
            if is_inherited(stage, &hook.env) {
                found.push(finding(path, stage, &hook.path, fix.clone()));
            }
        }
    }
    found
}

fn finding(file: &Path, stage: &str, program: &Path, fix: String) -> Finding {
    let what = format!("{file:?} starts {program:?} at the stage {stage} without \"env\"");
    Finding::new(&catalog::HOOK_WITHOUT_ENV, what, fix)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hook_file;
    use crate::hooks::{Execution, HookEntry, Hooks};
    use cdi_spec::file;

    fn spec(hooks: &str) -> SpecFile {
        let text = format!(
            r#"{{"cdiVersion":"0.5.0","kind":"vendor.com/nic","devices":[{{"name":"0","containerEdits":{{{hooks}}}}}]}}"#
        );
        let spec = file::parse(text.as_bytes());
        SpecFile {
            path: "/etc/cdi/x.json".into(),
            priority: 0,
            for_everybody: true,
            spec,
        }
    }

    fn entry(stage: &str, more: &str) -> String {
        format!(
            r#"{{"hookName":"{stage}","path":"/usr/bin/nvidia-cdi-hook","args":["nvidia-cdi-hook","chmod"]{more}}}"#
        )
    }

    /// Every vendor, both stages, in the edits of a device and of the spec; an empty list is like a missing one.
    #[test]
    fn entries_of_specs() {
        for (stage, more, is_found) in [
            ("createContainer", "", true),
            ("createContainer", r#","env":[]"#, true),
            ("startContainer", "", true),
            (
                "createContainer",
                r#","env":["NVIDIA_CTK_DEBUG=false"]"#,
                false,
            ),
            ("createRuntime", "", false),
            ("prestart", "", false),
            ("poststart", "", false),
            ("poststop", "", false),
        ] {
            let one = entry(stage, more);
            let files = [spec(&format!(r#""hooks":[{one},{one}]"#))];
            let found = in_specs(&files);
            assert_eq!(
                found.len(),
                usize::from(is_found),
                "{stage} {more}: {found:?}"
            );
            for (file, finding) in found {
                assert_eq!(
                    (file.path.as_path(), finding.kind.id()),
                    (Path::new("/etc/cdi/x.json"), "ONH-061")
                );
                let what = format!(
                    "\"/etc/cdi/x.json\" starts \"/usr/bin/nvidia-cdi-hook\" at the stage {stage} without \"env\""
                );
                assert_eq!(finding.what, what);
                assert!(finding.fix.contains("1.17.8"), "{finding:?}");
            }
        }
        let mut of_all = spec(&format!(
            r#""hooks":[{}]"#,
            entry("createContainer", "").replace("nvidia-cdi-hook", "other")
        ));
        let spec = of_all.spec.as_mut().unwrap();
        spec.container_edits = std::mem::take(&mut spec.devices[0].container_edits);
        let files = [of_all];
        let found = in_specs(&files);
        assert!(
            found.len() == 1 && found[0].1.fix.starts_with("add env: [\"PATH="),
            "{found:?}"
        );
    }

    #[test]
    fn hook_files() {
        let engine = |text: &str| {
            let hook = hook_file::parse(text.as_bytes()).unwrap();
            let entry = HookEntry {
                file: "/h/x.json".into(),
                program: hook.path.clone(),
                hook,
                execution: Execution::Possible,
            };
            Engine {
                hooks: Hooks {
                    entries: vec![entry],
                    ..Hooks::default()
                },
                ..Engine::default()
            }
        };
        let new = |stages: &str, env: &str| {
            format!(
                r#"{{"version":"1.0.0","hook":{{"path":"/p"{env}}},"when":{{"always":true}},"stages":[{stages}]}}"#
            )
        };
        for (text, stages) in [
            (
                new(r#""createContainer","startContainer","prestart""#, ""),
                2,
            ),
            (new(r#""createContainer""#, r#","env":["PATH=/bin"]"#), 0),
            (new(r#""createContainer""#, r#","env":null"#), 1),
            (new(r#""prestart","createRuntime","poststop""#, ""), 0),
            (
                r#"{"hook":"/p","stages":["createContainer"],"cmds":[".*"]}"#.to_owned(),
                1,
            ),
        ] {
            let found = in_hook_files(&[engine(&text), engine(&text)]);
            assert_eq!(found.len(), stages, "{text}: {found:?}");
            assert!(
                found
                    .iter()
                    .all(|finding| finding.fix.contains("/h/x.json")),
                "{found:?}"
            );
        }
    }
}
