//! Detects variables whose name resembles a variable of the convention. A container with `NVIDIA_VISIBLE_DEVICE=all` starts without
//! GPUs, and nothing else would say why.

use base::nearest::nearest;
use base::report::Finding;
use findings::catalog;

use super::variables::{Environment, Variable};

/// Other variables that images of NVIDIA set have this prefix too, so only a similar name counts.
const PREFIX: &str = "NVIDIA_";

/// Whether a variable has the name of another one, but for one or two letters.
#[must_use]
pub fn is_any(env: Environment<'_>) -> bool {
    pairs(env).next().is_some()
}

/// Returns a finding for each of them.
pub fn findings(env: Environment<'_>) -> impl Iterator<Item = Finding> {
    pairs(env).map(|(name, meant)| {
        let what = format!("the variable {name:?} is unknown and has no effect");
        Finding::new(
            &catalog::MISSPELLED_VARIABLE,
            what,
            format!("if you mean {meant}, correct the name"),
        )
    })
}

/// Returns the name of each of them, and the variable with the similar name.
fn pairs<'a>(env: Environment<'a>) -> impl Iterator<Item = (&'a str, &'static str)> {
    env.names().filter_map(|name| Some((name, meant(name)?)))
}

fn meant(name: &str) -> Option<&'static str> {
    let rest = name
        .strip_prefix(PREFIX)
        .filter(|rest| !rest.starts_with("REQUIRE_"))?;
    let known = || Variable::ALL.iter().map(|variable| variable.name());
    if known().any(|known| known == name) {
        return None;
    }
    let meant = nearest(rest, known().filter_map(|known| known.strip_prefix(PREFIX)))?;
    known().find(|known| known.strip_prefix(PREFIX) == Some(meant))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn similar_names() {
        for (name, expected) in [
            ("NVIDIA_VISIBLE_DEVICE", Some("NVIDIA_VISIBLE_DEVICES")),
            ("NVIDIA_VISBLE_DEVICES", Some("NVIDIA_VISIBLE_DEVICES")),
            ("NVIDIA_DRIVER_CAPABILITY", None),
            (
                "NVIDIA_DRIVER_CAPABILITES",
                Some("NVIDIA_DRIVER_CAPABILITIES"),
            ),
            ("NVIDIA_IMEX_CHANNEL", Some("NVIDIA_IMEX_CHANNELS")),
            ("NVIDIA_VISIBLE_DEVICES", None),
            ("NVIDIA_REQUIRE_CUDE", None),
            // Variables of images for PyTorch and others
            ("NVIDIA_PYTORCH_VERSION", None),
            ("NVIDIA_PRODUCT_NAME", None),
            ("NVIDIA_BUILD_ID", None),
            ("NVIDIA_", None),
            ("CUDA_VERSIONS", None),
        ] {
            assert_eq!(meant(name), expected, "{name}");
        }
        for variable in Variable::ALL {
            assert_eq!(meant(variable.name()), None, "{variable:?}");
        }
    }
}
