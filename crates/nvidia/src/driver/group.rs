//! Returns commands that add a user to the group of the driver's device nodes. The group differs between hosts ("video", "render", a
//! number without a name), so it is read from the nodes.

use base::accounts;

/// The fix if only root can open the nodes. The kernel module reads these options when it is loaded.
pub const GIVE_A_GROUP: &str = "give the nodes a group and mode 0660: options nvidia NVreg_DeviceFileGID=… \
                                NVreg_DeviceFileMode=0660 in /etc/modprobe.d";

/// Returns the name of a group, or `None` if the host has no name for it.
#[must_use]
pub fn name(gid: u32) -> Option<String> {
    let group = accounts::group(gid).ok()??;
    Some(group.name)
}

/// Returns the commands that root runs to permit `user` to open a node with this group and mode.
#[must_use]
pub fn join(user: &str, gid: u32, mode: u32) -> String {
    commands(user, gid, mode, name(gid).as_deref())
}

fn commands(user: &str, gid: u32, mode: u32, name: Option<&str>) -> String {
    // Membership in the group root would give access to more than the GPUs.
    if gid == 0 || mode & 0o060 != 0o060 {
        return GIVE_A_GROUP.to_owned();
    }
    match name {
        Some(name) => format!("run \"usermod -aG {name} {user}\", and log in again"),
        // usermod(8) does not create a group.
        None => format!(
            "run \"groupadd -g {gid} gpu{gid} && usermod -aG gpu{gid} {user}\", and log in again"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_group_is_that_of_the_node() {
        for (gid, mode, name, expected) in [
            (
                44,
                0o660,
                Some("video"),
                "run \"usermod -aG video tux\", and log in again",
            ),
            (
                105,
                0o660,
                Some("render"),
                "run \"usermod -aG render tux\", and log in again",
            ),
            (
                4321,
                0o660,
                None,
                "run \"groupadd -g 4321 gpu4321 && usermod -aG gpu4321 tux\", and log in again",
            ),
            (0, 0o660, Some("root"), GIVE_A_GROUP),
            (44, 0o600, Some("video"), GIVE_A_GROUP),
            (44, 0o640, Some("video"), GIVE_A_GROUP),
        ] {
            assert_eq!(commands("tux", gid, mode, name), expected, "{gid} {mode:o}");
        }
    }
}
