//! `explain ONH-030`: prints the catalog entry of a finding.

use std::fmt::Write;
use std::path::Path;
use std::process::ExitCode;

use base::json;
use base::report::{Kind, failure};
use findings::catalog;

use super::{output, usage_error};

/// Prints the finding with this number, in upper or lower case, with or without `ONH-`. Returns `None` if `name` does not look like
/// a number, because it may then be the name of a container.
pub(super) fn run(name: &str, json: bool) -> Option<ExitCode> {
    if let Some(kind) = catalog::find(name) {
        let text = if json { json::pretty(kind).unwrap_or_default() + "\n" } else { page(kind) };
        return Some(output::print(&text));
    }
    let prefix = name.get(..4)?;
    prefix.eq_ignore_ascii_case("ONH-").then(|| {
        usage_error(&failure(
            &catalog::COMMAND_LINE,
            format!("unknown finding {name:?}"),
            "see troubleshooting.md in the documentation for the list of numbers; they have three digits, as in ONH-030",
        ))
    })
}

/// Returns the path of a page of the documentation where a package has installed it. For another reference, or without a
/// package, it returns the reference itself.
fn installed(reference: &str) -> String {
    let dirs = ["/usr/share/doc/packages/oci-nvidia-hook", "/usr/share/doc/oci-nvidia-hook"];
    let mut paths = dirs.iter().map(|dir| Path::new(dir).join("docs").join(reference));
    paths
        .find(|path| path.try_exists().unwrap_or_default())
        .map_or_else(|| reference.to_owned(), |path| path.display().to_string())
}

fn page(kind: &Kind) -> String {
    let Kind { id, severity, title, why, fix, see } = kind;
    let see = &installed(see);
    let mut text = format!("{id}: {title}\n");
    for (label, content) in [("severity", severity.name()), ("why", why), ("fix", fix), ("see", see)] {
        if !content.is_empty() {
            writeln!(text, "{:<10}{content}", format!("{label}:")).ok();
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_page_contains_the_whole_catalog_entry() {
        for kind in catalog::ALL {
            let text = page(kind);
            for part in [kind.id, kind.title, kind.severity.name(), kind.why, kind.fix, kind.see] {
                assert!(text.contains(part), "{text}");
            }
            assert!(text.lines().count() == 5 && text.ends_with('\n'), "{text}");
        }
    }
}
