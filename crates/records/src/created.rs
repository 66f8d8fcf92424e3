//! Names that the hook created in a container's file system, to be removed at `poststop`.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Error};
use serde::{Deserialize, Serialize};

/// Upper limit for the names. A driver has a hundred files with one or two links each.
const MAX_ENTRIES: usize = 400;

/// How a created file is recognized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// By its inode number, without the rest of its [`base::sys::file_id::FileId`]: the file is empty, so its times say nothing more, and
    /// the device of an overlay is another one each time it is mounted
    Inode(u64),
    /// By its time: when the setup that created it was complete, in milliseconds since 1970. The file is not examined for this
    /// mark: the result of the call shows that the hook created the name.
    SetUp(u64),
}

impl Mark {
    /// Returns the mark of a setup that is complete now.
    #[must_use]
    pub fn set_up(now: SystemTime) -> Self {
        let since = now.duration_since(SystemTime::UNIX_EPOCH);
        let milliseconds = since.unwrap_or_default().as_millis();
        // Rounded up, so that no file of the setup is later.
        Self::SetUp(u64::try_from(milliseconds).map_or(u64::MAX, |passed| passed.saturating_add(1)))
    }
}

/// A created name. A record stores it as one short string, because there are many: the inode number or, after `@`, the time, and the path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Entry {
    /// Path in the container
    pub path: PathBuf,
    /// How its file is recognized
    pub mark: Mark,
}

impl From<Entry> for String {
    fn from(Entry { path, mark }: Entry) -> Self {
        match mark {
            Mark::Inode(inode) => format!("{inode} {}", path.display()),
            Mark::SetUp(milliseconds) => format!("@{milliseconds} {}", path.display()),
        }
    }
}

impl TryFrom<String> for Entry {
    type Error = Error;

    fn try_from(text: String) -> Result<Self, Error> {
        let (mark, path) = text.split_once(' ').context("not a mark and a path")?;
        let mark = match mark.strip_prefix('@') {
            Some(milliseconds) => Mark::SetUp(milliseconds.parse()?),
            None => Mark::Inode(mark.parse()?),
        };
        Ok(Self {
            path: path.into(),
            mark,
        })
    }
}

/// A created name in a document for other programs. The field names are an interface.
#[derive(Debug, Serialize)]
pub struct Created<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    inode: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    set_up: Option<String>,
    path: &'a Path,
}

impl<'a> From<&'a Entry> for Created<'a> {
    fn from(Entry { path, mark }: &'a Entry) -> Self {
        let (inode, set_up) = match mark {
            Mark::Inode(inode) => (Some(*inode), None),
            Mark::SetUp(milliseconds) => (None, rfc3339(*milliseconds)),
        };
        Self {
            inode,
            set_up,
            path,
        }
    }
}

/// Returns a time as text; `None` for one that no clock shows, which would not have four digits for the year.
fn rfc3339(milliseconds: u64) -> Option<String> {
    let time = SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(milliseconds))?;
    let text = humantime::format_rfc3339_millis(time);
    let mut shown = String::new();
    std::fmt::write(&mut shown, format_args!("{text}")).ok()?;
    Some(shown)
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
        marked(path, Mark::Inode(inode))
    }

    fn marked(path: &str, mark: Mark) -> Entry {
        Entry {
            path: path.into(),
            mark,
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
        let of_setup = marked("/usr/bin/nvidia-smi", Mark::SetUp(1_764_000_000_001));
        let text = serde_json::to_string(&of_setup).unwrap();
        assert_eq!(text, r#""@1764000000001 /usr/bin/nvidia-smi""#);
        assert_eq!(serde_json::from_str::<Entry>(&text).unwrap(), of_setup);
        for text in [
            r#""""#,
            r#""1""#,
            r#""x /a""#,
            r#""@ /a""#,
            r#""@-1 /a""#,
            "3",
        ] {
            assert!(serde_json::from_str::<Entry>(text).is_err(), "{text}");
        }
    }

    #[test]
    fn documents_have_the_mark() {
        let shown = |mark| serde_json::to_string(&Created::from(&marked("/a", mark))).unwrap();
        assert_eq!(shown(Mark::Inode(7)), r#"{"inode":7,"path":"/a"}"#);
        let text = r#"{"set_up":"2025-11-24T16:00:00.001Z","path":"/a"}"#;
        assert_eq!(shown(Mark::SetUp(1_764_000_000_001)), text);
        assert_eq!(shown(Mark::SetUp(u64::MAX)), r#"{"path":"/a"}"#);
    }

    #[test]
    fn the_time_of_a_setup_is_rounded_up() {
        let at = |time: Duration| Mark::set_up(SystemTime::UNIX_EPOCH + time);
        assert_eq!(at(Duration::from_micros(5999)), Mark::SetUp(6));
        assert_eq!(at(Duration::from_millis(6)), Mark::SetUp(7));
    }
}
