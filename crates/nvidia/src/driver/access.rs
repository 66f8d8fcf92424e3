//! The permissions of a device node, and who can open it. Everything that asks this question asks here: the hook for a container's
//! process, doctor for a user, and the choice of the user who asks NVML.

use rustix::fs::Stat;

use base::tree::ResolvedFile;

/// The permissions of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Permissions {
    /// The permission bits
    pub mode: u32,
    /// The owner
    pub uid: u32,
    /// The group
    pub gid: u32,
}

impl Permissions {
    /// Returns the permissions in the result of stat(2).
    #[must_use]
    pub const fn from_stat(stat: &Stat) -> Self {
        Self {
            mode: stat.st_mode & 0o7777,
            uid: stat.st_uid,
            gid: stat.st_gid,
        }
    }

    /// Returns the group of which a process must be a member to open the node, or `None` if all users can open it.
    #[must_use]
    pub const fn additional_gid(self) -> Option<u32> {
        let for_everybody = self.mode & 0o006 == 0o006;
        if self.gid != 0 && !for_everybody {
            Some(self.gid)
        } else {
            None
        }
    }

    /// Returns whether a group can open the node and other users cannot. Nodes that only root can open are not among them: the
    /// driver creates the node that configures MIG devices in this way.
    #[must_use]
    pub const fn is_for_a_group(self) -> bool {
        self.gid != 0
            && self.allow(self.wanted(), false, true)
            && !self.allow(self.wanted(), false, false)
    }

    /// Returns the mode with which all users have the access that the group has.
    #[must_use]
    pub const fn mode_for_all(self) -> u32 {
        self.mode | self.mode >> 3 & 0o6
    }

    /// Returns the bits with which the driver's libraries open the node: 6 for reading and writing, or 4 for the nodes of MIG
    /// capabilities, which have mode 0444.
    #[must_use]
    pub const fn wanted(self) -> u32 {
        if self.mode & 0o222 == 0 { 0o4 } else { 0o6 }
    }

    /// Returns whether the permissions include `bits` for a process without capabilities. As in the kernel (path_resolution(7)), only
    /// the first matching class counts: the owner, the group, all others.
    #[must_use]
    pub const fn allow(self, bits: u32, is_owner: bool, is_in_group: bool) -> bool {
        let class = match (is_owner, is_in_group) {
            (true, _) => 6,
            (false, true) => 3,
            (false, false) => 0,
        };
        self.mode >> class & bits == bits
    }
}

impl From<&ResolvedFile> for Permissions {
    fn from(file: &ResolvedFile) -> Self {
        Self {
            mode: file.mode,
            uid: file.uid,
            gid: file.gid,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_first_matching_class_counts() {
        let node = |mode| Permissions {
            mode,
            uid: 0,
            gid: 44,
        };
        for (mode, bits, owner, group, others) in [
            (0o660, 0o6, true, true, false),
            (0o606, 0o6, true, false, true),
            (0o066, 0o6, false, true, true),
            // Readable, but not writable.
            (0o664, 0o6, true, true, false),
            (0o644, 0o6, true, false, false),
            (0o444, 0o4, true, true, true),
            (0o400, 0o4, true, false, false),
        ] {
            let found = [(true, true), (false, true), (false, false)]
                .map(|(is_owner, is_in_group)| node(mode).allow(bits, is_owner, is_in_group));
            assert_eq!(found, [owner, group, others], "{mode:o} {bits:o}");
        }
        assert_eq!((node(0o660).wanted(), node(0o444).wanted()), (0o6, 0o4));
        assert_eq!(
            (node(0o660).additional_gid(), node(0o666).additional_gid()),
            (Some(44), None)
        );
        assert_eq!(
            Permissions {
                gid: 0,
                ..node(0o600)
            }
            .additional_gid(),
            None
        );
        for (mode, is, all) in [
            (0o660, true, 0o666),
            (0o666, false, 0o666),
            (0o440, true, 0o444),
            (0o600, false, 0o600),
        ] {
            assert_eq!(
                (node(mode).is_for_a_group(), node(mode).mode_for_all()),
                (is, all),
                "{mode:o}"
            );
        }
        assert!(
            !Permissions {
                gid: 0,
                ..node(0o660)
            }
            .is_for_a_group()
        );
    }
}
