//! Recognizes quotes that belong to the value of a variable by mistake.

/// Returns the fix if the value contains quotes. The list form of compose files keeps them: in `- NVIDIA_VISIBLE_DEVICES="all"`, the YAML
/// scalar does not begin with a quote, so the quotes are part of it.
#[must_use]
pub(crate) fn fix(value: &str) -> Option<&'static str> {
    if !value.contains(['"', '\'']) {
        return None;
    }
    Some(
        "remove the quotes, which are part of the value: compose files keep them in the list form (- NAME=\"value\")",
    )
}
