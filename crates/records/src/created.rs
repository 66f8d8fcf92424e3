//! Names that the hook created in a container's file system, to be removed at `poststop`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Error};
use serde::{Deserialize, Serialize};

/// Upper limit for the names. A driver has a hundred files with one or two links each.
const MAX_ENTRIES: usize = 400;

/// A created name and its inode. A record stores it as one short string, because there are many.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Entry {
    /// Path in the container
    pub path: PathBuf,
    /// Its inode
    pub inode: u64,
}

impl From<Entry> for String {
    fn from(entry: Entry) -> Self {
        format!("{} {}", entry.inode, entry.path.display())
    }
}

impl TryFrom<String> for Entry {
    type Error = Error;

    fn try_from(text: String) -> Result<Self, Error> {
        let (inode, path) = text.split_once(' ').context("not a number and a path")?;
        Ok(Self {
            path: path.into(),
            inode: inode.parse()?,
        })
    }
}

/// A created name in a document for other programs. The field names are an interface.
#[derive(Debug, Serialize)]
pub struct Created<'a> {
    inode: u64,
    path: &'a Path,
}

impl<'a> From<&'a Entry> for Created<'a> {
    fn from(Entry { path, inode }: &'a Entry) -> Self {
        Self {
            inode: *inode,
            path,
        }
    }
}

/// Merges two lists, each path once; the later entry counts. A container can be set up by several calls, and has only the
/// record of the last.
#[must_use]
pub fn merge(earlier: Vec<Entry>, later: Vec<Entry>) -> Vec<Entry> {
    let is_later = |entry: &Entry| {
        later
            .iter()
            .any(|other| other.path.as_os_str() == entry.path.as_os_str())
    };
    let mut all: Vec<_> = earlier
        .into_iter()
        .filter(|entry| !is_later(entry))
        .collect();
    all.extend(later);
    all.truncate(MAX_ENTRIES);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(path: &str, inode: u64) -> Entry {
        Entry {
            path: path.into(),
            inode,
        }
    }

    #[test]
    fn the_later_call_counts() {
        let all = merge(
            vec![entry("/a", 1), entry("/b", 2)],
            vec![entry("/b", 3), entry("/c", 4)],
        );
        assert_eq!(all, [entry("/a", 1), entry("/b", 3), entry("/c", 4)]);
    }

    #[test]
    fn what_is_written_is_read() {
        let text = serde_json::to_string(&entry("/a b", u64::MAX)).unwrap();
        assert_eq!(text, r#""18446744073709551615 /a b""#);
        assert_eq!(
            serde_json::from_str::<Entry>(&text).unwrap(),
            entry("/a b", u64::MAX)
        );
        for text in [r#""""#, r#""1""#, r#""x /a""#, "3"] {
            assert!(serde_json::from_str::<Entry>(text).is_err(), "{text}");
        }
    }
}
