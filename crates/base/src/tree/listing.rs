//! The names in a small directory.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;

use rustix::fs::{FileType, Mode, OFlags, RawDir};

/// The size of a directory in bytes up to which it is listed. On ext4 and XFS, this is one block with a hundred names of libraries; on a
/// tmpfs, it is two hundred names. Listing them takes as long as a few lookups.
const SMALL: i64 = 4096;

/// The bytes that one call of getdents64(2) returns at most.
const BUFFER: usize = 16 << 10;

/// The names in a directory with their types, sorted, in one text.
#[derive(Debug, Default)]
pub(super) struct Listing {
    text: Vec<u8>,
    /// Start and end of each name in `text`, and its type
    names: Vec<(usize, usize, FileType)>,
}

impl Listing {
    /// Lists a directory. Returns `None` if it is large, or if the file system does not show its size, like proc(5).
    ///
    /// # Errors
    /// If it cannot be read.
    pub(super) fn of_small(dir: impl AsFd) -> io::Result<Option<Self>> {
        if !(1..=SMALL).contains(&rustix::fs::fstat(&dir)?.st_size) {
            return Ok(None);
        }
        Self::read(dir, Some(1))
    }

    /// Lists a directory of any size.
    ///
    /// # Errors
    /// If it cannot be read.
    pub(super) fn of(dir: impl AsFd) -> io::Result<Self> {
        Ok(Self::read(dir, None)?.unwrap_or_default())
    }

    /// Lists a directory. Returns `None` if its names need more than `most` buffers: an overlay shows the size of one of its layers
    /// for a merged directory, and ZFS shows the number of names as the size.
    fn read(dir: impl AsFd, most: Option<usize>) -> io::Result<Option<Self>> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = rustix::fs::openat(&dir, c".", flags, Mode::empty())?;
        let mut buffer = Vec::with_capacity(BUFFER);
        let mut entries = RawDir::new(opened, buffer.spare_capacity_mut());
        let mut listing = Self::default();
        let mut buffers = 0;
        loop {
            buffers += usize::from(entries.is_buffer_empty());
            let Some(entry) = entries.next() else {
                break;
            };
            let entry = entry?;
            if most.is_some_and(|most| buffers > most) {
                return Ok(None);
            }
            let start = listing.text.len();
            listing.text.extend_from_slice(entry.file_name().to_bytes());
            listing
                .names
                .push((start, listing.text.len(), entry.file_type()));
        }
        let Self { text, names } = &mut listing;
        names.sort_unstable_by(|a, b| name_in(text, *a).cmp(name_in(text, *b)));
        Ok(Some(listing))
    }

    /// Returns the sorted names.
    pub(super) fn names(&self) -> Vec<OsString> {
        let names = self.names.iter().map(|entry| name_in(&self.text, *entry));
        names
            .filter(|name| !matches!(*name, b"." | b".."))
            .map(|name| OsStr::from_bytes(name).to_owned())
            .collect()
    }

    /// Returns the type of a name, or `None` if the directory does not have it. The type is unknown on some file systems.
    pub(super) fn kind(&self, name: &OsStr) -> Option<FileType> {
        let at = self
            .names
            .binary_search_by(|entry| name_in(&self.text, *entry).cmp(name.as_bytes()))
            .ok()?;
        Some(self.names.get(at)?.2)
    }
}

fn name_in(text: &[u8], (start, end, _): (usize, usize, FileType)) -> &[u8] {
    text.get(start..end).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::unix::fs::symlink;

    #[test]
    fn names_of_a_small_directory() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("b"), "").unwrap();
        std::fs::create_dir(dir.path().join("a")).unwrap();
        symlink("b", dir.path().join("c")).unwrap();
        let listing = Listing::of_small(File::open(dir.path()).unwrap())
            .unwrap()
            .unwrap();
        let kind = |name: &str| {
            listing
                .kind(OsStr::new(name))
                .filter(|kind| *kind != FileType::Unknown)
        };
        let known = [kind("a"), kind("b"), kind("c")];
        let expected = [
            FileType::Directory,
            FileType::RegularFile,
            FileType::Symlink,
        ];
        assert!(
            known
                .iter()
                .zip(expected)
                .all(|(kind, expected)| kind.is_none_or(|kind| kind == expected)),
            "{known:?}"
        );
        assert_eq!(
            (listing.kind(OsStr::new("d")), listing.names.len()),
            (None, 5),
            "with . and .."
        );
    }

    #[test]
    fn a_large_directory_is_not_listed() {
        let dir = tempfile::tempdir().unwrap();
        for number in 0..300 {
            std::fs::write(
                dir.path()
                    .join(format!("a-name-of-thirty-two-bytes-{number:05}")),
                "",
            )
            .unwrap();
        }
        assert!(
            Listing::of_small(File::open(dir.path()).unwrap())
                .unwrap()
                .is_none()
        );
        assert!(
            Listing::of_small(File::open("/proc").unwrap())
                .unwrap()
                .is_none(),
            "its size is unknown"
        );
    }

    /// Like the merged /usr/bin of an overlay, whose size is 4096.
    #[test]
    fn a_directory_that_is_larger_than_its_size() {
        let dir = tempfile::tempdir().unwrap();
        for number in 0..1000 {
            std::fs::write(dir.path().join(format!("a-program-{number}")), "").unwrap();
        }
        let open = || File::open(dir.path()).unwrap();
        assert!(Listing::read(open(), Some(1)).unwrap().is_none());
        let all = Listing::of(open()).unwrap();
        assert_eq!(all.names().len(), 1000);
    }
}
