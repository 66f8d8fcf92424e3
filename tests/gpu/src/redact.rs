//! Removes what identifies a machine from a report: UUIDs, the name of the host, serial numbers.

/// Replaces each UUID of a GPU or a MIG device, and each secret.
pub fn redact(text: &str, secrets: &[String]) -> String {
    let mut known: Vec<String> = Vec::new();
    let mut out = String::new();
    let mut rest = text;
    while let Some((at, length)) = next_uuid(rest) {
        let (before, from) = rest.split_at(at);
        let (uuid, after) = from.split_at(length);
        let number = known.iter().position(|one| one == uuid).unwrap_or_else(|| {
            known.push(uuid.to_owned());
            known.len() - 1
        });
        out += &format!("{before}{}-<{number}>", &uuid[..3]);
        rest = after;
    }
    out += rest;
    for secret in secrets.iter().filter(|secret| secret.len() > 2) {
        out = out.replace(secret.as_str(), "<removed>");
    }
    out
}

/// Returns the place and the length of the first UUID: GPU- or MIG-, then at least eight hexadecimal digits and dashes.
fn next_uuid(text: &str) -> Option<(usize, usize)> {
    let mut from = 0;
    loop {
        let rest = text.get(from..)?;
        let at = ["GPU-", "MIG-"]
            .iter()
            .filter_map(|prefix| rest.find(prefix))
            .min()?;
        let prefix = if rest.get(at..)?.starts_with("MIG-GPU-") {
            8
        } else {
            4
        };
        let id = rest.get(at + prefix..)?;
        let length = id
            .find(|c: char| !c.is_ascii_hexdigit() && c != '-')
            .unwrap_or(id.len());
        if length >= 8 {
            return Some((from + at, prefix + length));
        }
        from += at + 4;
    }
}

/// Returns what must not be in a report: the name of the host.
pub fn secrets() -> Vec<String> {
    let name = nix::unistd::gethostname()
        .ok()
        .and_then(|name| name.into_string().ok())
        .unwrap_or_default();
    let short = name.split('.').next().unwrap_or_default().to_owned();
    // The longer name contains the shorter one.
    [name, short]
        .into_iter()
        .filter(|name| !matches!(name.as_str(), "" | "localhost"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_identifies_a_machine_is_removed() {
        let text = "GPU 0: X (UUID: GPU-51eed000-0000-4000-8000-0000fa4e0000)\n\
                    GPU 1: X (UUID: GPU-51eed001-0001-4001-8000-0000fa4e0001) GPU-51eed000-0000-4000-8000-0000fa4e0000\n\
                    MIG-GPU-51eed000-0000-4000-8000-0000fa4e0000/1/0 on node7.example.org, node7. GPU-Util MIG-1";
        let clean = redact(text, &["node7.example.org".to_owned(), "node7".to_owned()]);
        assert!(
            !clean.contains("51eed") && !clean.contains("node7"),
            "{clean}"
        );
        assert!(
            clean.starts_with("GPU 0: X (UUID: GPU-<0>)\nGPU 1: X (UUID: GPU-<1>) GPU-<0>\n"),
            "{clean}"
        );
        assert!(clean.contains("GPU-Util MIG-1"), "{clean}");
    }
}
