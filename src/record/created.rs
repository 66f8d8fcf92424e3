//! Names that a call created in a container's file system: at `poststop` they are removed again.

use std::path::PathBuf;

use anyhow::{Context, Error};
use serde::{Deserialize, Serialize};

/// A driver has a hundred files, and each of them at most a link or two.
const MAX_ENTRIES: usize = 400;

/// A name, and the number of what was created under it. In a record it is one short text, since there are many of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Entry {
    /// Path in the container
    pub path: PathBuf,
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
        Ok(Self { path: path.into(), inode: inode.parse()? })
    }
}

/// Both, each path once: a container has a record of its last call, and several calls can set it up.
pub(crate) fn merge(earlier: Vec<Entry>, later: Vec<Entry>) -> Vec<Entry> {
    let is_later = |entry: &Entry| later.iter().any(|other| other.path.as_os_str() == entry.path.as_os_str());
    let mut all: Vec<_> = earlier.into_iter().filter(|entry| !is_later(entry)).collect();
    all.extend(later);
    all.truncate(MAX_ENTRIES);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(path: &str, inode: u64) -> Entry {
        Entry { path: path.into(), inode }
    }

    #[test]
    fn the_later_call_counts() {
        let all = merge(vec![entry("/a", 1), entry("/b", 2)], vec![entry("/b", 3), entry("/c", 4)]);
        assert_eq!(all, [entry("/a", 1), entry("/b", 3), entry("/c", 4)]);
    }

    #[test]
    fn what_is_written_is_read() {
        let text = serde_json::to_string(&entry("/a b", u64::MAX)).unwrap();
        assert_eq!(text, r#""18446744073709551615 /a b""#);
        assert_eq!(serde_json::from_str::<Entry>(&text).unwrap(), entry("/a b", u64::MAX));
        for text in [r#""""#, r#""1""#, r#""x /a""#, "3"] {
            assert!(serde_json::from_str::<Entry>(text).is_err(), "{text}");
        }
    }
}
