//! `/etc/ld.so.conf` of an image: directories are absolute, and reading our own file returns what was written.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use nvidia_host::driver::ldconf::{Directive, drop_in, is_ours, matches, parse};

/// Parses lines, and a pattern for names.
pub fn run(data: &[u8]) {
    let directives = parse(data, Path::new("/etc"));
    assert!(directives.len() <= data.len());
    let mut dirs = Vec::new();
    for directive in &directives {
        match directive {
            Directive::Directory(dir) => dirs.push(dir.as_path()),
            Directive::Include(dir, pattern) => {
                assert!(
                    dir.is_absolute() && !pattern.is_empty() && !pattern.contains(&b'/'),
                    "{directive:?}"
                );
                let has_wildcards = pattern.iter().any(|byte| b"*?[".contains(byte));
                assert!(has_wildcards || matches(pattern, pattern), "{directive:?}");
                assert!(
                    !has_wildcards || !matches(pattern, b".hidden") || pattern.starts_with(b".")
                );
            }
        }
    }
    for dir in &dirs {
        assert!(
            dir.is_absolute() && !dir.as_os_str().as_bytes().contains(&b'\n'),
            "{dir:?}"
        );
    }
    let written = drop_in(dirs.iter().copied());
    assert!(is_ours(&written));
    let again = parse(&written, Path::new("/elsewhere"));
    let expected: Vec<_> = dirs
        .iter()
        .map(|dir| Directive::Directory((*dir).to_owned()))
        .collect();
    assert_eq!(again, expected);
    assert!(matches(b"*", OsStr::new("x").as_bytes()));
}
