//! An open directory, in which names are looked up one by one until there are many: then it is listed.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::fs::{AtFlags, FileType, Stat};
use rustix::io::Errno;

use super::listing::Listing;

/// An open directory below a tree.
#[derive(Debug)]
pub struct OpenDir {
    pub(super) fd: OwnedFd,
    /// The path below the tree, with a leading slash, after all symbolic links
    pub(super) path: PathBuf,
    /// How many names were looked up of which only the type matters
    lookups: AtomicUsize,
    /// Its names, if it is small
    pub(super) listing: OnceLock<Option<Listing>>,
}

/// What is read of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Look {
    /// Its state
    Completely,
    /// Its type
    Type,
    /// Its type, but it is probably a link
    Link,
}

impl Look {
    /// Returns what is read of the next name, to which a link in the same directory leads. Of a library, this is the file.
    pub(super) const fn after_link(self) -> Self {
        match self {
            Self::Completely => Self::Completely,
            Self::Type | Self::Link => Self::Type,
        }
    }
}

/// What a name is.
pub(super) enum Seen {
    /// A link with this text
    Link(OsString),
    /// A file of this type
    Type(FileType),
    /// A file with this state
    Stat(Stat),
}

impl Seen {
    pub(super) const fn kind(&self) -> FileType {
        match self {
            Self::Link(_) => FileType::Symlink,
            Self::Type(kind) => *kind,
            Self::Stat(stat) => FileType::from_raw_mode(stat.st_mode),
        }
    }
}

/// The number of lookups in a directory after which it is listed, if it is small: a listing takes five system calls.
const LOOKUPS: usize = 2;

impl OpenDir {
    pub(super) const fn new(fd: OwnedFd, path: PathBuf) -> Self {
        Self {
            fd,
            path,
            lookups: AtomicUsize::new(0),
            listing: OnceLock::new(),
        }
    }

    /// Returns the path below the tree, with a leading slash, after all symbolic links.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the state of `name` without following links, or `None` if it is missing or cannot be examined.
    #[must_use]
    pub fn stat(&self, name: &str) -> Option<Stat> {
        rustix::fs::statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW).ok()
    }

    /// Lists the directory at the next lookup, if it is small.
    pub(super) fn expect_lookups(&self) {
        self.lookups.store(LOOKUPS, Ordering::Relaxed);
    }

    /// Returns the sorted names in the directory, or none if it cannot be read. Files in it are then found without further lookups.
    #[must_use]
    pub fn names(&self) -> Vec<OsString> {
        self.expect_lookups();
        let listing = self.listing.get_or_init(|| Listing::of(&self.fd).ok());
        listing.as_ref().map(Listing::names).unwrap_or_default()
    }

    pub(super) fn look(&self, name: &OsStr, look: Look) -> io::Result<Seen> {
        if look != Look::Completely {
            // The text of a link is needed in any case, so only other names are a reason to list the directory.
            let listing = match look {
                Look::Link => self.listing.get().and_then(Option::as_ref),
                _ => self.listing(),
            };
            match listing.map(|listing| listing.kind(name)) {
                Some(None) => return Err(Errno::NOENT.into()),
                Some(Some(FileType::Symlink)) => return Ok(Seen::Link(self.link(name)?)),
                Some(Some(FileType::Unknown)) => {}
                Some(Some(kind)) => return Ok(Seen::Type(kind)),
                None if look == Look::Link => match self.link(name) {
                    Err(Errno::INVAL) => {} // not a link
                    text => return Ok(Seen::Link(text?)),
                },
                None => {}
            }
        }
        let stat = rustix::fs::statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW)?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Symlink => Ok(Seen::Link(self.link(name)?)),
            _ => Ok(Seen::Stat(stat)),
        }
    }

    fn link(&self, name: &OsStr) -> rustix::io::Result<OsString> {
        Ok(OsString::from_vec(
            rustix::fs::readlinkat(&self.fd, name, Vec::new())?.into_bytes(),
        ))
    }

    /// Returns the names of the directory, if many were looked up and it is small.
    fn listing(&self) -> Option<&Listing> {
        if self.lookups.fetch_add(1, Ordering::Relaxed) < LOOKUPS {
            return None;
        }
        self.listing
            .get_or_init(|| Listing::of_small(&self.fd).ok().flatten())
            .as_ref()
    }
}
