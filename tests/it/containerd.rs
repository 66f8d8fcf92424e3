//! On generated nodes, the verdict about CDI is what containerd does: according to a model, and to containerd itself.

use std::path::{Path, PathBuf};
use std::process::Command;

use base::paths::HostPath;
use base::tree::Tree;
use engines::cdi::CdiVerdict;
use engines::node::EngineView;

use crate::support::{Need, run, scratch, source, write_file, write_program};

tests! {
    &[] => generated_nodes;
    &[Need::Debian, Need::Programs(&["apt-get", "dpkg-deb"])] => generated_nodes_with_containerd;
}

/// A containerd: its socket, its configuration file and its program.
const CONTAINERDS: [(&str, &str, &str); 5] = rows! {
    "/run/containerd/containerd.sock", "etc/containerd/config.toml", "usr/bin/containerd";
    "/run/k3s/containerd/containerd.sock", "var/lib/rancher/k3s/agent/etc/containerd/config.toml", "var/lib/rancher/k3s/data/current/bin/containerd";
    "/run/k3s/containerd/containerd.sock", "var/lib/rancher/rke2/agent/etc/containerd/config.toml", "var/lib/rancher/rke2/bin/containerd";
    "/run/k0s/containerd.sock", "etc/k0s/containerd.toml", "var/lib/k0s/bin/containerd";
    "/var/snap/microk8s/common/run/containerd.sock", "var/snap/microk8s/current/args/containerd.toml", "snap/microk8s/current/bin/containerd";
};

/// What a configuration file sets.
#[derive(Clone, Copy, Debug)]
struct Settings {
    enable: Option<bool>,
    dir: Option<&'static str>,
}

/// The format of a file, 0 if it has none, and the table with the settings.
type Form = (u32, &'static str);

const OLDEST: &str = "cri";
const OLD: &str = "\"io.containerd.grpc.v1.cri\"";
const NEW: &str = "\"io.containerd.cri.v1.runtime\"";

impl Settings {
    fn text(self, (format, table): Form) -> String {
        let mut text = format!("[plugins.{table}]\n");
        if format > 0 {
            text = format!("version = {format}\n{text}");
        }
        if let Some(enable) = self.enable {
            text += &format!("  enable_cdi = {enable}\n");
        }
        if let Some(dir) = self.dir {
            text += &format!("  cdi_spec_dirs = [\"/etc/cdi\", \"{dir}\"]\n");
        }
        text
    }
}

/// Two configuration files, of which the first one imports the second one.
type Files = (Settings, Option<Settings>);

fn all_files() -> Vec<Files> {
    let set = |enable, dir| Settings { enable, dir };
    let enables = [None, Some(true), Some(false)];
    let mut drop_ins = vec![None, Some(set(Some(true), Some("/srv/cdi")))];
    drop_ins.extend(enables.map(|enable| Some(set(enable, None))));
    let mut all = Vec::new();
    for enable in enables {
        for dir in [None, Some("/run/cdi"), Some("/srv/cdi")] {
            all.extend(drop_ins.iter().map(|drop_in| (set(enable, dir), *drop_in)));
        }
    }
    all
}

/// What containerd does: 1.6 knows nothing of CDI, 1.7 replaces the table of the plugin with the one of a drop-in file, 2 merges them.
fn gives_devices(version: &str, (main, drop_in): Files) -> bool {
    let is_two = version.starts_with('2');
    let in_force = match drop_in {
        None => main,
        Some(drop_in) if !is_two => drop_in,
        Some(drop_in) => Settings {
            enable: drop_in.enable.or(main.enable),
            dir: drop_in.dir.or(main.dir),
        },
    };
    let is_enabled = in_force.enable.unwrap_or(is_two);
    let is_read = in_force.dir.is_none_or(|dir| dir.ends_with("/run/cdi"));
    !version.starts_with("1.6") && is_enabled && is_read
}

/// Creates nodes with a program that prints this as its version, whose files have these forms. Compares the verdict about each with `expected`.
fn compare(
    containerds: &[(&str, &str, &str)],
    printed: &str,
    forms: &[(Form, Form)],
    expected: impl Fn(&Path, Files) -> bool,
) {
    for (socket, config, program) in containerds {
        let dir = scratch();
        let root = dir.path();
        // Docker's containerd
        write_file(root.join("run/containerd/containerd.sock"), "");
        write_file(root.join("etc/containerd/config.toml"), "version = 2\n");
        let version = |printed: &str| format!("#!/bin/sh\necho {printed}\n");
        let docker = version("containerd containerd.io 1.7.27 x");
        write_program(root.join("usr/bin/containerd"), docker);
        write_program(root.join(program), version(printed));
        let endpoint = format!("containerRuntimeEndpoint: unix://{socket}\n");
        write_file(root.join("var/lib/kubelet/config.yaml"), endpoint);
        let config = root.join(config);
        for (form, form_of_drop_in) in forms {
            for files in all_files() {
                let (main, drop_in) = files;
                let imports = "imports = [\"conf.d/*.toml\"]\n";
                write_file(&config, imports.to_owned() + &main.text(*form));
                let file = config.with_file_name("conf.d/99.toml");
                std::fs::remove_file(&file).ok();
                if let Some(drop_in) = drop_in {
                    write_file(&file, drop_in.text(*form_of_drop_in));
                }
                let host = Tree::open(&HostPath::new(root)).unwrap();
                let view = EngineView::inspect(&host, Path::new("/var/lib/kubelet"));
                let found = view.cdi.verdict(Path::new("/var/run/cdi"));
                let lists = [main.dir, drop_in.and_then(|drop_in| drop_in.dir)];
                let is_right = match found {
                    CdiVerdict::Given => expected(&config, files),
                    CdiVerdict::Dropped(_) => !expected(&config, files),
                    // The versions merge lists in different ways.
                    CdiVerdict::Unknown(_) => {
                        printed.contains(" 2.") && matches!(lists, [Some(a), Some(b)] if a != b)
                    }
                };
                let node = format!("{printed}, {socket}, {form:?} {form_of_drop_in:?} {files:?}");
                assert!(is_right, "{node}: {found:?}");
            }
        }
    }
}

fn generated_nodes() {
    for version in ["1.6.20", "1.7.27", "2.1.4"] {
        let printed = format!("containerd github.com/containerd/containerd {version} x");
        let forms = [((2, OLD), (2, OLD)), ((3, NEW), (3, NEW))];
        let forms = &forms[..if version.starts_with('2') { 2 } else { 1 }];
        compare(&CONTAINERDS, &printed, forms, |_, files| {
            gives_devices(version, files)
        });
    }
}

/// containerd 1 refuses the new table.
const FORMS: [(Form, Form); 9] = [
    ((2, OLD), (2, OLD)),
    ((2, OLD), (0, OLD)),
    ((0, OLD), (2, OLD)),
    ((0, OLD), (0, OLD)),
    ((0, OLDEST), (0, OLDEST)),
    ((3, NEW), (3, NEW)),
    ((2, OLD), (2, NEW)),
    ((2, OLD), (3, NEW)),
    ((3, NEW), (2, OLD)),
];

/// With the programs of releases of Debian, which `CONTAINERDS=trixie,sid` selects.
fn generated_nodes_with_containerd() {
    let suites = std::env::var("CONTAINERDS").unwrap_or_else(|_| "bookworm,trixie".to_owned());
    for suite in suites.split(',') {
        let program = containerd(suite);
        let printed = run(Command::new(&program).arg("--version")).ok();
        let mut forms = FORMS.to_vec();
        forms.retain(|(main, drop_in)| {
            printed.contains(" 2.") || ![main.1, drop_in.1].contains(&NEW)
        });
        compare(&CONTAINERDS[..1], printed.trim(), &forms, |config, _| {
            let mut dump = Command::new(&program);
            dump.arg("--config").arg(config).args(["config", "dump"]);
            let dump = run(&mut dump).ok();
            let value = |key: &str| {
                let mut lines = dump.lines();
                lines.find_map(|line| line.trim().strip_prefix(key))
            };
            let dirs = value("cdi_spec_dirs = ").unwrap_or_default();
            value("enable_cdi = ") == Some("true") && dirs.contains("/run/cdi")
        });
    }
}

/// Unpacks the containerd of a release of Debian, which is kept between runs, and returns its program.
fn containerd(suite: &str) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR"))
        .join("containerd")
        .join(suite);
    let mut fetch = Command::new(source("tests/debian-driver"));
    fetch.arg(&dir).args([suite, "containerd"]);
    // A mirror may fail temporarily; a test must not.
    if run(&mut fetch).code != Some(0) {
        run(&mut fetch).ok();
    }
    dir.join("usr/bin/containerd")
}
