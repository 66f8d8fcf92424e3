//! An engine's configuration: files one after the other, with 0 bytes between them.

use std::path::Path;

use base::report::one_line;
use engines::settings::EngineSettings;
use engines::{EngineKind, Version};

use super::{check_line, text};

/// Reads the files for each engine, and for versions that read them differently.
pub fn run(data: &[u8]) {
    let texts: Vec<_> = data.split(|byte| *byte == 0).take(8).map(text).collect();
    for kind in [EngineKind::Podman, EngineKind::Crio, EngineKind::Docker] {
        for version in [None, Some(Version(5, 0, 0))] {
            let mut settings = EngineSettings::default();
            for (number, text) in texts.iter().enumerate() {
                settings.add(Path::new(&format!("/{number}")), text, &kind, version);
            }
            check(&settings, &kind, version);
        }
    }
}

fn check(settings: &EngineSettings, kind: &EngineKind, version: Option<Version>) {
    if let Some((path, why)) = &settings.refused {
        assert!(path.is_absolute() && !why.is_empty());
        check_line(&one_line(why));
    }
    if *kind == EngineKind::Docker {
        return assert_eq!(
            *settings,
            EngineSettings::default(),
            "Docker has no such file"
        );
    }
    assert_ne!(settings.runtime.as_deref(), Some(""));
    assert!(
        !settings.cdi_dirs.is_empty()
            || settings.hooks_from.is_some()
            || settings.refused.is_some()
    );
    let more = |text: &str| {
        let mut settings = settings.clone();
        settings.add(Path::new("/last"), text, kind, version);
        settings
    };
    assert_eq!(more("# nothing\n[of.nobody]\nx = 1\n"), *settings);
    let table = if kind.is_podman() {
        "engine"
    } else {
        "crio.runtime"
    };
    let last = more(&format!("[{table}]\nhooks_dir = [\"/x\"]\n"));
    assert_eq!(
        last.hooks_dirs.last().map(|dir| dir.as_path()),
        Some(Path::new("/x"))
    );
    assert_eq!(last.hooks_from.as_deref(), Some(Path::new("/last")));
    let broken = more("[");
    let (first, _) = broken.refused.as_ref().expect("a broken file is refused");
    assert_eq!(
        settings
            .refused
            .as_ref()
            .map_or_else(|| Path::new("/last"), |(path, _)| path),
        first,
        "the first one is shown"
    );
    let mut finished = settings.clone();
    finished.finish(kind, version);
    let asks_both = *kind == EngineKind::Podman && version >= Some(Version(5, 0, 0));
    assert!(!finished.hooks_dirs.is_empty() || !asks_both);
}
