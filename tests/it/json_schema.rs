//! Validates the JSON output of the commands against docs/schemas, with a validator that shares no code with the program. Other
//! tests pass their output through [`checked`], which covers many broken hosts.

use std::process::Command;

use boon::{Compiler, Schemas};
use serde_json::{Value, json};

use crate::docs::texts;
use crate::driver::{FakeDriver, NEEDS};
use crate::records::REMOVED_RECORDS;
use crate::support::{HOOK, Need, read, run, scratch, sh_unshared, shell, source, write_file};

tests! {
    NEEDS => commands_print_what_it_documents;
    &[Need::Root] => a_container_without_a_record;
    &[] => each_key_is_described, an_error_leaves_stdout_empty;
}

/// Returns the document in this text, which matches the schema.
#[track_caller]
pub fn checked(name: &str, text: &str) -> Value {
    let parsed = serde_json::from_str(text);
    let document: Value = parsed.unwrap_or_else(|error| panic!("{name}: {error}: {text:?}"));
    let (mut schemas, mut compiler) = (Schemas::new(), Compiler::new());
    let place = format!("file://{}/{name}.json", source("docs/schemas").display());
    let schema = compiler.compile(&place, &mut schemas).unwrap();
    if let Err(why) = schemas.validate(&document, schema) {
        panic!("{name}: {why:#}\n{document:#}");
    }
    document
}

/// Returns this field of each element of a list.
pub fn fields<'a>(list: &'a Value, field: &str) -> Vec<&'a str> {
    let elements = list.as_array().unwrap().iter();
    elements
        .map(|element| element[field].as_str().unwrap())
        .collect()
}

/// The elements of a document of one part.
#[track_caller]
pub fn part(name: &str, text: &str, part: &str) -> Vec<Value> {
    checked(name, text)[part].as_array().unwrap().clone()
}

/// No GPU, MIG devices, and GPUs that each fail in another way.
fn hosts() -> [FakeDriver; 3] {
    let broken = FakeDriver::new(&["--gpus", "4"]);
    broken.set_nvml(|old| {
        let failing = old.replace("gpu minor=1 ", "gpu minor=1 fail=15 ");
        let failing = failing.replace("gpu minor=2 ", "gpu minor=2 fail-handle=15 ");
        failing.replace("gpu minor=3 ", "# ")
    });
    shell!(
        "sed -i 's/GPU Excluded:\t No/GPU Excluded:\t Yes/' '{}'/proc/driver/nvidia/gpus/0000:04:*/information",
        broken.root.display()
    );
    [
        FakeDriver::new(&["--gpus", "0"]),
        FakeDriver::new(&["--gpus", "2", "--mig", "--drm"]),
        broken,
    ]
}

/// Each command with JSON output on each host. If it fails, it prints no document.
fn commands_print_what_it_documents() {
    let dir = scratch();
    let specs = dir.path().to_str().unwrap();
    write_file(dir.path().join("broken.json"), "{");
    let spec = json!({
        "process": {"env": ["NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=all"]},
        "root": {"path": dir.path()},
    });
    for fake in hosts() {
        let output = dir.path().join("nvidia.yaml");
        let hook = |arguments: &str| {
            let words: Vec<_> = arguments.split(' ').collect();
            fake.run_with(&words, &spec.to_string())
        };
        hook(&format!("cdi generate --output {}", output.display()));
        for (name, command) in [
            ("doctor", "doctor".to_owned()),
            ("status", "status".to_owned()),
            ("info", "info".to_owned()),
            ("files", "files".to_owned()),
            ("cdi-check", format!("cdi check --spec-dir {specs}")),
            ("cdi-list", format!("cdi list --spec-dir {specs}")),
            ("explain", "explain 30".to_owned()),
            ("explain", "explain --list".to_owned()),
            ("plan", "plan -".to_owned()),
        ] {
            let ran = hook(&format!("{command} --json"));
            assert!(ran.code.is_some(), "{command}: {ran:?}");
            if ran.stdout.is_empty() {
                let is_expected = name == "files" && ran.code == Some(1);
                assert!(is_expected, "{command}: {ran:?}");
                continue;
            }
            checked(name, &ran.stdout);
        }
    }
}

/// Runs in a mount namespace, as if Podman had these containers.
fn a_container_without_a_record() {
    let dir = scratch();
    let ids = ["a", "b", "c"].map(|digit| digit.repeat(64));
    let asks = r#""process":{"env":["NVIDIA_VISIBLE_DEVICES=all"]},"root":{"path":"r"}"#;
    let hooks = r#""hooks":{"prestart":[{"path":"/usr/bin/nvidia-container-runtime-hook"}]}"#;
    let specs = [
        r#"{"process":{"env":[]},"root":{"path":"r"},"annotations":{"cdi.k8s.io/x":"nvidia.com/gpu=0"}}"#.to_owned(),
        format!("{{{asks}}}"),
        format!("{{{asks},{hooks}}}"),
    ];
    let mut list = Vec::new();
    for (id, spec) in ids.iter().zip(specs) {
        let bundle = dir.path().join(id).join("userdata");
        std::fs::create_dir_all(&bundle).unwrap();
        write_file(bundle.join("config.json"), spec);
        list.push(json!({"id": id, "names": [&id[..1]]}));
    }
    let containers = serde_json::to_string(&list).unwrap();
    write_file(dir.path().join("containers.json"), containers);
    let why = |arguments: &str| {
        let script = format!(
            "mount -t tmpfs lib /var/lib; mkdir -p /var/lib/containers/storage/overlay-containers; \
             mount --bind '{}' /var/lib/containers/storage/overlay-containers; mount -t tmpfs run /run; \
             {REMOVED_RECORDS}; exec {HOOK} why {arguments}",
            dir.path().display()
        );
        sh_unshared(&script).ok()
    };
    for (name, outcome) in [("a", "nothing"), ("b", "not-called"), ("c", "left-alone")] {
        let document = checked("why", &why(&format!("{name} --json")));
        let answer = &document["without_record"];
        assert_eq!(document["records"], json!([]));
        assert_eq!(
            (&answer["name"], &answer["outcome"]),
            (&name.into(), &outcome.into())
        );
        let devices = json!([{"name": "nvidia.com/gpu=0"}]);
        assert!(name != "a" || answer["devices"] == devices, "{answer:#}");
        // Only a request without a record can be one of those whose record was removed.
        let removed = answer.get("removed_records") == Some(&json!(3));
        assert_eq!(removed, outcome == "not-called", "{answer:#}");
        let reason = answer["reason"].as_str().unwrap();
        let text = why(name);
        assert!(text.contains(reason), "{answer:#}");
        assert_eq!(text.contains("3 records of running"), removed, "{text}");
    }
}

/// Each key of each object has a description, and other keys are not allowed: tests find undocumented keys.
fn is_described(schema: &Value, at: &str) {
    if let Some(properties) = schema["properties"].as_object() {
        assert_eq!(schema["additionalProperties"], false, "{at}");
        for (name, property) in properties {
            let description = property["description"].as_str();
            assert!(
                description.is_some_and(|text| !text.is_empty()),
                "{at}/{name}"
            );
            is_described(property, &format!("{at}/{name}"));
        }
    }
    for (key, part) in schema.as_object().into_iter().flatten() {
        if key != "properties" {
            is_described(part, at);
        }
    }
    for part in schema.as_array().into_iter().flatten() {
        is_described(part, at);
    }
}

fn each_key_is_described() {
    let page = read(source("docs/schemas/README.md"));
    let schemas = texts(&source("docs/schemas"), "json");
    assert!(schemas.len() > 10, "{}", schemas.len());
    for (path, text) in schemas {
        let schema: Value = serde_json::from_str(&text).unwrap();
        let file = path.file_name().unwrap().to_str().unwrap();
        is_described(&schema, file);
        assert_eq!(schema["properties"]["version"]["const"], 1, "{file}");
        assert!(page.contains(&format!("]({file})")), "{file}");
    }
}

fn an_error_leaves_stdout_empty() {
    let empty = scratch();
    let root = empty.path().to_str().unwrap();
    for arguments in [
        &["info", "--root", root][..],
        &["files", "--root", root],
        &["why", "no-such-container"],
        &["cdi", "check", "--config", "/nowhere"],
    ] {
        let ran = run(Command::new(HOOK).args(arguments).arg("--json").env_clear());
        assert_eq!(ran.stdout, "", "{arguments:?}");
        let stderr = ran.failed(1);
        assert!(stderr.contains("(ONH-"), "{arguments:?}: {stderr}");
    }
}
