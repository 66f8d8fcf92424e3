//! Users and groups of the host, by name or number.
//!
//! The files are read without the name services of libc, which load libraries of the host into the program. Users that only a name
//! service knows, such as those of LDAP, are unknown here.

use std::io;
use std::path::{Path, PathBuf};

use crate::read::read_file_limited;
use crate::sys::in_root::open_host_file;

/// The directories of passwd and group. Systems that are images, such as Fedora CoreOS, have the users of packages in the second one
/// (nss-altfiles).
const DIRS: [&str; 2] = ["/etc", "/usr/lib"];
/// The longest file in bytes, for 100,000 users.
const MAX_FILE: usize = 16 << 20;

/// An entry of passwd(5).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    /// The name
    pub name: String,
    /// Its number
    pub uid: u32,
    /// The number of its primary group
    pub gid: u32,
    /// The home directory
    pub home: PathBuf,
}

/// An entry of group(5).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// The name
    pub name: String,
    /// Its number
    pub gid: u32,
}

/// Returns the user with this number.
///
/// # Errors
/// If a file exists and cannot be read.
pub fn user(uid: u32) -> io::Result<Option<User>> {
    find("passwd", parse_user, |user| user.uid == uid)
}

/// Returns the user with this name.
///
/// # Errors
/// If a file exists and cannot be read.
pub fn user_named(name: &str) -> io::Result<Option<User>> {
    find("passwd", parse_user, |user| user.name == name)
}

/// Returns the group with this number.
///
/// # Errors
/// If a file exists and cannot be read.
pub fn group(gid: u32) -> io::Result<Option<Group>> {
    find("group", parse_group, |group| group.gid == gid)
}

/// Returns the group with this name.
///
/// # Errors
/// If a file exists and cannot be read.
pub fn group_named(name: &str) -> io::Result<Option<Group>> {
    find("group", parse_group, |group| group.name == name)
}

/// Returns the first entry that matches. As in libc, lines that are not entries are left out.
fn find<T>(
    file: &str,
    parse: fn(&str) -> Option<T>,
    matches: impl Fn(&T) -> bool,
) -> io::Result<Option<T>> {
    for dir in DIRS {
        let text = match read(&Path::new(dir).join(file)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            text => text?,
        };
        for line in text.lines() {
            if let Some(entry) = parse(line)
                && matches(&entry)
            {
                return Ok(Some(entry));
            }
        }
    }
    Ok(None)
}

fn read(path: &Path) -> io::Result<String> {
    let (file, _) = open_host_file(path)?;
    let bytes = read_file_limited(&file, MAX_FILE).map_err(io::Error::other)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Parses `name:password:uid:gid:comment:home:shell`.
fn parse_user(line: &str) -> Option<User> {
    let fields: Vec<&str> = line.split(':').collect();
    let [name, _, uid, gid, _, home, _] = fields.as_slice() else {
        return None;
    };
    Some(User {
        name: (*name).to_owned(),
        uid: uid.parse().ok()?,
        gid: gid.parse().ok()?,
        home: PathBuf::from(home),
    })
}

/// Parses `name:password:gid:members`.
fn parse_group(line: &str) -> Option<Group> {
    let fields: Vec<&str> = line.split(':').collect();
    let [name, _, gid, _] = fields.as_slice() else {
        return None;
    };
    Some(Group {
        name: (*name).to_owned(),
        gid: gid.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_passwd_and_group() {
        let user = parse_user("tux:x:1000:100:Tux, the penguin:/home/tux:/bin/bash").unwrap();
        assert_eq!((user.name.as_str(), user.uid, user.gid), ("tux", 1000, 100));
        assert_eq!(user.home, Path::new("/home/tux"));
        for line in [
            "",
            "#tux",
            "+::::::",
            "tux:x:1000:100",
            "tux:x:one:100::/:/",
        ] {
            assert_eq!(parse_user(line), None, "{line:?}");
        }
        let group = parse_group("video:x:44:tux,geeko").unwrap();
        assert_eq!((group.name.as_str(), group.gid), ("video", 44));
        for line in ["", "+:::", "video:x:44", "video:x::tux"] {
            assert_eq!(parse_group(line), None, "{line:?}");
        }
    }

    #[test]
    fn root_is_known() {
        assert_eq!(user(0).unwrap().unwrap().name, "root");
        assert_eq!(user_named("root").unwrap().unwrap().gid, 0);
        assert_eq!(group(0).unwrap().unwrap().name, "root");
        assert_eq!(group_named("root").unwrap().unwrap().gid, 0);
        assert_eq!(user_named("nobody-here").unwrap(), None);
        assert_eq!(group(4_294_000_000).unwrap(), None);
    }
}
