//! Reads the user and group ids that a user namespace maps, see user_namespaces(7).

use std::io;

use super::ns::parse_id_map;
use super::proc_file;

/// The mapped ids of one user namespace, as ranges in the namespace of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ids {
    users: Vec<(u32, u32)>,
    groups: Vec<(u32, u32)>,
}

impl Ids {
    /// Reads the ids of the user namespace of a process.
    ///
    /// # Errors
    /// If the process does not exist.
    pub fn of_process(pid: i32) -> io::Result<Self> {
        let read = |name: &str| {
            Ok::<_, io::Error>(ranges(&proc_file::read_text(format!(
                "/proc/{pid}/{name}"
            ))?))
        };
        Ok(Self {
            users: read("uid_map")?,
            groups: read("gid_map")?,
        })
    }

    /// Whether the namespace maps the owner and the group of a file. Only then do the capabilities of its root user apply to the
    /// file, see capabilities(7).
    #[must_use]
    pub fn has(&self, uid: u32, gid: u32) -> bool {
        let has = |ranges: &[(u32, u32)], id: u32| {
            ranges
                .iter()
                .any(|(first, count)| id.wrapping_sub(*first) < *count)
        };
        has(&self.users, uid) && has(&self.groups, gid)
    }
}

/// Returns the ids that a map mentions, in the namespace of this process: the first one, and their count.
fn ranges(map: &str) -> Vec<(u32, u32)> {
    parse_id_map(map)
        .map(|(_, outside, count)| (outside, count))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_mapped_ids_are_known() {
        let users = ranges("         0       1000          1\n         1     100000      65536\n");
        let ids = Ids {
            users,
            groups: ranges("0 0 4294967295\n"),
        };
        for (uid, is) in [
            (0, false),
            (999, false),
            (1000, true),
            (1001, false),
            (100_000, true),
            (165_535, true),
            (165_536, false),
        ] {
            assert_eq!(ids.has(uid, 7), is, "{uid}");
        }
        assert!(
            !Ids {
                users: ranges("0 0 10"),
                groups: ranges("nonsense\n1")
            }
            .has(1, 1)
        );
        assert!(
            Ids::of_process(std::process::id().try_into().unwrap())
                .unwrap()
                .has(
                    rustix::process::geteuid().as_raw(),
                    rustix::process::getegid().as_raw()
                )
        );
    }
}
