//! Restricts this process with Landlock, which needs no privilege and also applies to root.
//! <https://docs.kernel.org/userspace-api/landlock.html>

use std::io;
use std::os::fd::OwnedFd;

use landlock::{
    ABI, Access as _, AccessFs, AccessNet, BitFlags, PathBeneath, RestrictSelfError, Ruleset,
    RulesetAttr, RulesetCreated, RulesetCreatedAttr, RulesetError, Scope, make_bitflags,
};
use rustix::io::Errno;

/// The version of Landlock whose restrictions are tested. An earlier kernel enforces those that it has.
const VERSION: ABI = ABI::V6;

/// Reading files and listing directories.
const READING: BitFlags<AccessFs> = make_bitflags!(AccessFs::{ReadFile | ReadDir});

/// What a restricted process may do with a file, or with all files below a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// List the directory.
    List,
    /// Read.
    Read,
    /// Read and write, and use as a device.
    Use,
}

impl Access {
    fn rights(self) -> BitFlags<AccessFs> {
        match self {
            Self::List => AccessFs::ReadDir.into(),
            Self::Read => READING,
            Self::Use => READING | AccessFs::WriteFile | AccessFs::IoctlDev,
        }
    }
}

/// The files that a restricted process may open.
#[derive(Debug, Default)]
pub struct Files {
    /// Open files and directories (`O_PATH` suffices). The permission belongs to the file and not to its name: it does not apply to
    /// another file that gets the name later.
    pub allowed: Vec<(OwnedFd, Access)>,
    /// Whether only these files may be read. Otherwise the process may read any file that its user and groups can read.
    pub limits_reading: bool,
}

/// Restricts this process and its children to `files`: they cannot open other files for writing, create, rename or remove files,
/// execute programs, use TCP, or signal other processes. Files that are open already stay usable.
///
/// # Errors
/// If a call of Landlock fails. Without Landlock, or if a seccomp filter denies it, the process is not restricted, and that is not an
/// error.
pub fn restrict(files: Files) -> io::Result<()> {
    match rules(files).and_then(RulesetCreated::restrict_self) {
        Ok(_) => Ok(()),
        Err(error) if is_at_the_limit(&error) => Ok(()),
        Err(error) => Err(io::Error::other(error)),
    }
}

fn rules(files: Files) -> Result<RulesetCreated, RulesetError> {
    let mut handled = AccessFs::from_all(VERSION);
    if !files.limits_reading {
        handled.remove(READING);
    }
    let mut rules = Ruleset::default()
        .handle_access(handled)?
        .handle_access(AccessNet::from_all(VERSION))?
        .scope(Scope::from_all(VERSION))?
        .create()?;
    for (place, access) in files.allowed {
        let rights = access.rights() & handled;
        // The kernel rejects an empty rule (ENOMSG).
        if !rights.is_empty() {
            rules = rules.add_rule(PathBeneath::new(place, rights))?;
        }
    }
    Ok(rules)
}

/// Reports whether 16 rule sets are in force already, which is the limit of the kernel (E2BIG).
fn is_at_the_limit(error: &RulesetError) -> bool {
    let RulesetError::RestrictSelf(RestrictSelfError::RestrictSelfCall { source, .. }) = error
    else {
        return false;
    };
    source.raw_os_error() == Some(Errno::TOOBIG.raw_os_error())
}
