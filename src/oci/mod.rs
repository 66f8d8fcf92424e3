//! Reads the input of OCI hooks: the container state on stdin, and config.json of the bundle.
//!
//! Both are read into small, lenient views. `oci_spec::runtime::Spec` drops unknown fields and rejects unknown capabilities: a
//! container would fail because of a field that the hook does not use.

mod annotated;
pub(crate) mod cgroup_id;
pub(crate) mod conmon;
pub(crate) mod device_rules;
pub(crate) mod gpu_nodes;
pub(crate) mod insertion;
mod lists;
pub(crate) mod pod;
pub(crate) mod spec_view;
pub(crate) mod state;

pub(crate) use gpu_nodes::gpu_nodes;
pub use spec_view::SpecView;
pub(crate) use state::State;

use anyhow::Result;
use serde_json::value::RawValue;

/// Upper limit for a state or config.json in bytes, far above what engines write; it bounds the memory.
pub(crate) const MAX_JSON: usize = 16 << 20;

/// Reports whether the text is a config.json and not a container state, which names a bundle and has no process.
pub(crate) fn is_spec(bytes: &[u8]) -> bool {
    let names = ["bundle", "bundlePath", "process", "root"];
    let Ok(members) = lists::Object::first(bytes, &names) else {
        return false;
    };
    if members.get("bundle").is_some() || members.get("bundlePath").is_some() {
        return false;
    }
    is_object(members.get("process")) || is_object(members.get("root"))
}

fn is_object(value: Option<&RawValue>) -> bool {
    value.is_some_and(|value| value.get().starts_with('{'))
}

/// Parses the first JSON value of `bytes`. The rest is ignored, as in the engines' decoders.
fn first_json_value<'a, T: serde::Deserialize<'a>>(bytes: &'a [u8]) -> Result<T> {
    match serde_json::Deserializer::from_slice(bytes)
        .into_iter::<T>()
        .next()
    {
        Some(value) => Ok(value?),
        None => anyhow::bail!("it is empty"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn config_json_or_a_state() {
        for (text, expected) in [
            (r#"{"process":{},"root":{"path":"/r"}}"#, true),
            (r#"{"ociVersion":"1.0.2","root":{"path":"/r"}}"#, true),
            (r#"{"id":"c","pid":7,"bundle":"/b","root":"/r"}"#, false),
            (
                r#"{"id":"c","pid":7,"bundlePath":"/b","process":{}}"#,
                false,
            ),
            (r#"{"id":"c","pid":7,"root":"/r"}"#, false),
            ("3", false),
            ("{", false),
            ("", false),
        ] {
            assert_eq!(is_spec(text.as_bytes()), expected, "{text}");
        }
        assert!(is_spec(include_bytes!(
            "../../tests/fixtures/captures/kubelet-prestart/config.json"
        )));
        assert!(!is_spec(include_bytes!(
            "../../tests/fixtures/captures/crio-prestart/state.json"
        )));
    }
}
