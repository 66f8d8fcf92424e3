//! config.toml.

use std::path::Path;

use base::report::render;
use nvidia_host::config::{Config, parse};

use super::{check_error, check_findings};

/// Parses the file, and parses it again with additions that have no effect.
pub fn run(data: &[u8]) {
    // A file that is not UTF-8 is an error before it is parsed.
    let Ok(text) = str::from_utf8(data) else {
        return;
    };
    let parse = |text: &str| parse(text, Path::new("/etc/c.toml"));
    match parse(text) {
        Ok((config, findings)) => {
            check_config(&config);
            // 16 unknown keys, and swarm variables
            assert!(findings.len() <= 17, "{} findings", findings.len());
            check_findings(&findings);
            let again = parse(&format!("{text}\n# the end")).expect("a comment more");
            assert_eq!(again, (config, findings));
        }
        Err(error) => {
            check_error(&error);
            let said = render(&error);
            assert!(said.contains("\nhint: "), "{said}");
            let line = said.split_once("/etc/c.toml\" line ").expect("a line").1;
            let line: usize = line
                .split([':', ' '])
                .next()
                .and_then(|line| line.parse().ok())
                .expect("its number");
            assert!((1..=text.split('\n').count()).contains(&line), "{said}");
        }
    }
}

fn check_config(config: &Config) {
    assert!(
        (1..=600).contains(&config.nvml_timeout.as_secs()),
        "{:?}",
        config.nvml_timeout
    );
    let named = [
        Some(&config.driver_root),
        config.dev_root.as_ref(),
        config.ldcache.as_ref(),
        config.debug.as_ref(),
    ];
    assert!(
        named
            .iter()
            .flatten()
            .all(|path| path.as_path().is_absolute()),
        "{named:?}"
    );
    assert!(
        config
            .library_dirs
            .iter()
            .chain(&config.driver_files)
            .all(|path| path.is_absolute()),
        "{config:?}"
    );
    assert!(
        config
            .swarm_resource
            .iter()
            .all(|name| !name.is_empty() && !name.contains(',')),
        "{config:?}"
    );
    if let Some(user) = &config.user {
        let names = [Some(&user.user), user.group.as_ref()];
        let plain = |name: &String| {
            !name.is_empty() && !name.contains(|c: char| c == ':' || c.is_whitespace())
        };
        assert!(names.iter().flatten().copied().all(plain), "{user:?}");
    }
}
