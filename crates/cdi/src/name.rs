//! Checks CDI names: `VENDOR/CLASS=DEVICE`.

/// Checks a vendor or a class. It starts with a letter, ends with a letter or digit, and may contain `_`, `-` and `.`.
///
/// # Errors
/// Describes the first mistake.
pub fn check_vendor_or_class(name: &str) -> Result<(), String> {
    check(name, |first| first.is_ascii_alphabetic(), "a letter", "_-.")
}

/// Checks a device name. It starts and ends with a letter or digit, and may contain `_`, `-`, `.` and `:`.
///
/// # Errors
/// Describes the first mistake.
pub fn check_device(name: &str) -> Result<(), String> {
    check(
        name,
        |first| first.is_ascii_alphanumeric(),
        "a letter or digit",
        "_-.:",
    )
}

fn check(
    name: &str,
    may_start: impl Fn(char) -> bool,
    start: &str,
    marks: &str,
) -> Result<(), String> {
    let (Some(first), Some(last)) = (name.chars().next(), name.chars().next_back()) else {
        return Err("the name is empty".to_owned());
    };
    if !may_start(first) {
        return Err(format!("{name:?} does not start with {start}"));
    }
    if !last.is_ascii_alphanumeric() {
        return Err(format!("{name:?} does not end with a letter or digit"));
    }
    match name
        .chars()
        .find(|c| !c.is_ascii_alphanumeric() && !marks.contains(*c))
    {
        Some(wrong) => Err(format!("{name:?} contains {wrong:?}")),
        None => Ok(()),
    }
}

/// Splits a kind into vendor and class, and checks both.
///
/// # Errors
/// Describes the first mistake.
pub fn parse_kind(kind: &str) -> Result<(&str, &str), String> {
    let (vendor, class) = kind
        .split_once('/')
        .ok_or_else(|| format!("{kind:?} does not have the form VENDOR/CLASS"))?;
    check_vendor_or_class(vendor).map_err(|why| format!("invalid vendor: {why}"))?;
    check_vendor_or_class(class).map_err(|why| format!("invalid class: {why}"))?;
    Ok((vendor, class))
}

/// NVIDIA's vendor. The vendors of its device plugin and DRA driver end in it, as in `k8s.device-plugin.nvidia.com/gpu=GPU-…`.
const NVIDIA: &str = "nvidia.com";

/// Returns whether a qualified device name, or a kind, is NVIDIA's, or belongs to another program that offers NVIDIA GPUs with CDI.
#[must_use]
pub fn is_nvidia(name: &str) -> bool {
    let Some((vendor, _)) = name.split_once('/') else {
        return false;
    };
    vendor
        .strip_suffix(NVIDIA)
        .is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vendors_of_nvidia() {
        for (name, expected) in [
            ("nvidia.com/gpu=0", true),
            ("nvidia.com/gpu", true),
            ("k8s.device-plugin.nvidia.com/gpu=GPU-0", true),
            ("k8s.gpu.nvidia.com/claim=x", true),
            ("runtime.nvidia.com/gpu=all", true),
            ("notnvidia.com/gpu=0", false),
            ("nvidia.com.example/gpu=0", false),
            ("example.org/nvidia.com=0", false),
            ("nvidia.com", false),
            ("", false),
        ] {
            assert_eq!(is_nvidia(name), expected, "{name}");
        }
    }

    #[test]
    fn names() {
        for good in [
            "0",
            "0:1",
            "all",
            "GPU-51eed000-0000-4000-8000-0000fa4e0000",
            "a.b_c-d",
        ] {
            assert_eq!(check_device(good), Ok(()), "{good}");
        }
        for bad in ["", ":0", "0:", ".-not-valid", "a b", "MIG-GPU-1/7/0", "é"] {
            assert!(check_device(bad).is_err(), "{bad}");
        }
        assert_eq!(parse_kind("nvidia.com/gpu"), Ok(("nvidia.com", "gpu")));
        for bad in [
            "nvidia.com",
            "/gpu",
            "nvidia.com/",
            "1.com/gpu",
            "nvidia.com/gpu/x",
            "nvidia.com/2gpu",
            "a:b/c",
        ] {
            assert!(parse_kind(bad).is_err(), "{bad}");
        }
    }
}
