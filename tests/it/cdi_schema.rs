//! The fields of a CDI spec as listed in the CDI specification, and a strict check of a spec. The check shares no code with the
//! code under test.

use std::collections::BTreeSet;

use Kind::{Count, Edits, List, Map, Number, Object, Text};
use serde_json::Value;

#[derive(Clone, Copy)]
enum Kind {
    Text,
    /// An integer
    Number,
    /// An integer that is not negative
    Count,
    /// An object whose values are strings
    Map,
    Object(&'static [Field]),
    List(&'static Kind),
    /// An object of [`EDITS`]
    Edits,
}

/// The name of a field, its type, whether it is required, and the version that introduced it.
type Field = (&'static str, Kind, bool, &'static str);

const SPEC: &[Field] = &[
    ("cdiVersion", Text, true, "0.1.0"),
    ("kind", Text, true, "0.1.0"),
    ("annotations", Map, false, "0.6.0"),
    ("devices", List(&Object(DEVICE)), true, "0.1.0"),
    ("containerEdits", Edits, false, "0.3.0"),
];
const DEVICE: &[Field] = &[
    ("name", Text, true, "0.1.0"),
    ("annotations", Map, false, "0.6.0"),
    ("containerEdits", Edits, true, "0.3.0"),
];
const EDITS: &[Field] = &[
    ("env", List(&Text), false, "0.3.0"),
    ("deviceNodes", List(&Object(NODE)), false, "0.3.0"),
    ("mounts", List(&Object(MOUNT)), false, "0.3.0"),
    ("hooks", List(&Object(HOOK)), false, "0.3.0"),
    ("additionalGids", List(&Count), false, "0.7.0"),
];
const NODE: &[Field] = &[
    ("path", Text, true, "0.3.0"),
    ("hostPath", Text, false, "0.5.0"),
    ("type", Text, false, "0.3.0"),
    ("major", Number, false, "0.3.0"),
    ("minor", Number, false, "0.3.0"),
    ("fileMode", Count, false, "0.3.0"),
    ("permissions", Text, false, "0.3.0"),
    ("uid", Count, false, "0.3.0"),
    ("gid", Count, false, "0.3.0"),
];
const MOUNT: &[Field] = &[
    ("hostPath", Text, true, "0.3.0"),
    ("containerPath", Text, true, "0.3.0"),
    ("options", List(&Text), false, "0.3.0"),
    ("type", Text, false, "0.4.0"),
];
const HOOK: &[Field] = &[
    ("hookName", Text, true, "0.3.0"),
    ("path", Text, true, "0.3.0"),
    ("args", List(&Text), false, "0.3.0"),
    ("env", List(&Text), false, "0.3.0"),
    ("timeout", Number, false, "0.3.0"),
];

/// Panics with the invalid part, also if the version is not the lowest that has all fields.
#[track_caller]
pub fn validate(spec: &Value) {
    let mut lowest = "0.3.0".to_owned();
    object(spec, SPEC, &mut lowest);
    let (vendor, class) = spec["kind"].as_str().unwrap().split_once('/').unwrap();
    for name in [vendor, class] {
        assert!(
            is_name(name, "_-.") && name.starts_with(|first: char| first.is_ascii_alphabetic()),
            "{name}"
        );
    }
    if class.contains('.') {
        lowest = lowest.max("0.6.0".to_owned());
    }
    let devices = spec["devices"].as_array().unwrap();
    let names: BTreeSet<_> = devices
        .iter()
        .map(|device| device["name"].as_str().unwrap())
        .collect();
    assert!(
        !devices.is_empty() && names.len() == devices.len(),
        "{names:?}"
    );
    for name in names {
        assert!(is_name(name, "_-.:"), "{name}");
        if name.starts_with(|first: char| first.is_ascii_digit()) {
            lowest = lowest.max("0.5.0".to_owned());
        }
    }
    assert_eq!(spec["cdiVersion"], lowest);
}

fn is_name(name: &str, marks: &str) -> bool {
    name.starts_with(|first: char| first.is_ascii_alphanumeric())
        && name.ends_with(|last: char| last.is_ascii_alphanumeric())
        && name
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || marks.contains(c))
}

#[track_caller]
fn object(value: &Value, fields: &[Field], lowest: &mut String) {
    let map = value
        .as_object()
        .unwrap_or_else(|| panic!("{value} is not an object"));
    for (name, value) in map {
        let known = fields.iter().find(|field| field.0 == name);
        let (_, kind, _, since) = known.unwrap_or_else(|| panic!("unknown field {name}"));
        *lowest = lowest.clone().max((*since).to_owned());
        check(name, value, *kind, lowest);
    }
    for (name, _, required, _) in fields {
        assert!(
            !required || map.contains_key(*name),
            "{name} is missing in {value}"
        );
    }
}

#[track_caller]
fn check(name: &str, value: &Value, kind: Kind, lowest: &mut String) {
    match kind {
        Text => assert!(
            value.as_str().is_some_and(|text| !text.is_empty()),
            "{name}: {value}"
        ),
        Number => assert!(value.is_i64(), "{name}: {value}"),
        Count => assert!(value.is_u64(), "{name}: {value}"),
        Map => assert!(
            value.as_object().unwrap().values().all(Value::is_string),
            "{name}: {value}"
        ),
        Object(fields) => object(value, fields, lowest),
        Edits => {
            assert!(!value.as_object().unwrap().is_empty(), "{name} is empty");
            object(value, EDITS, lowest);
        }
        List(kind) => {
            let list = value.as_array().unwrap();
            assert!(!list.is_empty(), "{name} is empty");
            list.iter()
                .for_each(|item| check(name, item, *kind, lowest));
        }
    }
}
