//! Causes each error text of engines that docs/troubleshooting.md quotes, and compares it with the page.

use std::fs;

use engines::Version;

use crate::cdi::write_spec;
use crate::cdi_containers::only_spec;
use crate::driver::FakeDriver;
use crate::engine::{Cgroup, IMAGE, NEEDS, NEEDS_CRUN, Podman};
use crate::support::{HOOK, Ran, read, scratch, source, write_file};

tests! {
    NEEDS => of_runc, of_a_removed_stage, of_cdi, of_a_time_that_is_up, of_containers_conf;
    NEEDS_CRUN => of_crun;
}

/// Returns the quoted text of the page, in the column of symptoms, that contains these words.
fn of_the_page(words: &str) -> String {
    let page = read(source("docs/troubleshooting.md"));
    let seen = page
        .lines()
        .filter_map(|line| line.strip_prefix("| ")?.split(" | ").next());
    let quoted = |cell: &str| -> Vec<String> {
        // Texts in double backticks contain a backtick.
        let (mut texts, mut rest) = (Vec::new(), cell);
        while let Some(start) = rest.find('`') {
            let mark = if rest[start..].starts_with("``") {
                "``"
            } else {
                "`"
            };
            let (text, behind) = rest[start + mark.len()..].split_once(mark).unwrap();
            texts.push(text.to_owned());
            rest = behind;
        }
        texts
    };
    let found: Vec<_> = seen
        .flat_map(quoted)
        .filter(|text| text.contains(words))
        .collect();
    assert_eq!(found.len(), 1, "{words:?} is on the page: {found:?}");
    found[0].clone()
}

/// Matches the text of an engine: `…` stands for anything.
#[track_caller]
fn assert_says(ran: &Ran, text: &str) {
    let mut rest = ran.stderr.as_str();
    for part in text.split('…') {
        let at = rest
            .find(part)
            .unwrap_or_else(|| panic!("{part:?} of {text:?} is not in {ran:?}"));
        rest = &rest[at + part.len()..];
    }
}

const WRONG: &[&str] = &["-e", "NVIDIA_VISIBLE_DEVICES=9", IMAGE, "true"];

fn of_runc() {
    let podman = Podman::shared();
    let ran = podman.run(Cgroup::AsMounted, &[IMAGE, "nvidia-smi"]);
    assert_says(&ran, &of_the_page("exec: \"nvidia-smi\""));
    assert_says(&ran, &of_the_page("attempted to invoke a command"));
    assert_says(
        &podman.run(Cgroup::AsMounted, WRONG),
        &of_the_page("error during container init"),
    );
}

fn of_crun() {
    let podman = Podman::shared();
    let ran = podman.run(Cgroup::WithCrun, &[IMAGE, "nvidia-smi"]);
    assert_says(&ran, &of_the_page("executable file `nvidia-smi`"));
    let ran = podman.run(Cgroup::WithCrun, WRONG);
    assert_says(
        &ran,
        &of_the_page("error executing hook").replace("/usr/bin/oci-nvidia-hook", HOOK),
    );
}

fn of_a_removed_stage() {
    let podman = Podman::with_image();
    podman.install_stage("precreate", &FakeDriver::shared().config);
    let text =
        of_the_page("executing [").replace("oci-nvidia-hook ", "oci-nvidia-hook --config … ");
    assert_says(&podman.run(Cgroup::AsMounted, WRONG), &text);
}

fn of_cdi() {
    let fake = FakeDriver::new(&["--gpus", "1"]);
    let dir = scratch();
    let path = dir.path().join("nvidia.yaml");
    write_spec(&fake, &path);
    let start = |device: &str| {
        Podman::shared().run_after(
            &only_spec(&path),
            Cgroup::AsMounted,
            &[device, IMAGE, "true"],
        )
    };
    assert_says(
        &start("--device=nvidia.com/gpu=7"),
        &of_the_page("unresolvable CDI devices"),
    );
    // Nodes that another driver no longer creates.
    fs::remove_file(fake.root.join("dev/nvidia0")).unwrap();
    assert_says(
        &start("--device=nvidia.com/gpu=0"),
        &of_the_page("failed to stat CDI host device"),
    );
}

fn of_a_time_that_is_up() {
    let fake = FakeDriver::new(&["--gpus", "1"]);
    fake.set_nvml(|text| format!("init-delay-ms 20000\n{text}"));
    let podman = Podman::with_image();
    podman.install_hook(&fake.config);
    let file = podman.hooks.join("oci-nvidia-hook.json");
    let mut json: serde_json::Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    json["hook"]["timeout"] = 1.into();
    write_file(&file, json.to_string());
    let ran = podman.run(
        Cgroup::AsMounted,
        &["-e", "NVIDIA_VISIBLE_DEVICES=all", IMAGE, "true"],
    );
    assert_says(&ran, &of_the_page("hook ran past specified timeout"));
}

/// For Podman before 4.8; later versions support the syntax.
fn of_containers_conf() {
    let version = Version::parse(
        &crate::support::run(std::process::Command::new("podman").arg("--version")).ok(),
    )
    .unwrap();
    let podman = Podman::shared();
    let conf = podman.dir.path().join("append.conf");
    write_file(&conf, "[engine]\nhooks_dir = [\"/x\", {append = true}]\n");
    let ran = podman.run_with_conf(&conf, &[IMAGE, "true"]);
    if version < Version(4, 8, 0) {
        assert_says(&ran, &of_the_page("incompatible types"));
    } else {
        assert!(!ran.stderr.contains("toml"), "{ran:?}");
    }
}
