//! What the engine hands us: the container state on stdin and the bundle's config.json.
//!
//! Both are read through small lenient views. `oci_spec::runtime::Spec` would drop fields it does not know and
//! refuse capability names it does not know; for a hook that is an outage over a field nobody reads.

mod annotated;
pub(crate) mod device_rules;
pub(crate) mod insertion;
mod lists;
pub(crate) mod pod;
pub(crate) mod spec_view;
pub(crate) mod state;

pub use pod::Pod;
pub use spec_view::SpecView;
pub(crate) use state::State;

use anyhow::Result;
use serde_json::value::RawValue;

/// No engine writes a state or config.json anywhere near this; a larger one is a mistake or an attack on memory.
pub(crate) const MAX_JSON: usize = 16 << 20;

/// Whether these bytes are config.json, and not the state of a container, which names a bundle and describes no process.
pub(crate) fn is_spec(bytes: &[u8]) -> bool {
    #[derive(serde::Deserialize)]
    struct Members<'a> {
        #[serde(default, borrow)]
        bundle: Option<&'a RawValue>,
        #[serde(default, borrow, rename = "bundlePath")]
        bundle_path: Option<&'a RawValue>,
        #[serde(default, borrow)]
        process: Option<&'a RawValue>,
        #[serde(default, borrow)]
        root: Option<&'a RawValue>,
    }
    let is_object = |value: Option<&RawValue>| value.is_some_and(|value| value.get().starts_with('{'));
    first_json_value::<Members<'_>>(bytes).is_ok_and(|members| {
        let is_state = members.bundle.is_some() || members.bundle_path.is_some();
        !is_state && (is_object(members.process) || is_object(members.root))
    })
}

/// The first JSON value of `bytes`; what follows it is not looked at, as with the engines' own decoders.
fn first_json_value<'a, T: serde::Deserialize<'a>>(bytes: &'a [u8]) -> Result<T> {
    match serde_json::Deserializer::from_slice(bytes).into_iter::<T>().next() {
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
            (r#"{"id":"c","pid":7,"bundlePath":"/b","process":{}}"#, false),
            (r#"{"id":"c","pid":7,"root":"/r"}"#, false),
            ("3", false),
            ("{", false),
            ("", false),
        ] {
            assert_eq!(is_spec(text.as_bytes()), expected, "{text}");
        }
        assert!(is_spec(include_bytes!("../../tests/fixtures/captures/kubelet-prestart/config.json")));
        assert!(!is_spec(include_bytes!("../../tests/fixtures/captures/crio-prestart/state.json")));
    }
}
