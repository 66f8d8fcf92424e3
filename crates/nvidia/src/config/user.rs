//! Parses and resolves `user = "root:video"`, the user of the process that calls NVML.

use anyhow::Result;

use base::accounts;
use base::report::failure;
use base::sys::confine::Identity;
use findings::catalog;

/// A user and an optional group, each by name or number, not yet resolved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UserSpec {
    /// The part before the colon
    pub user: String,
    /// The part after the colon; by default the primary group of the user
    pub group: Option<String>,
}

impl UserSpec {
    /// Parses `USER[:GROUP]`. Returns `None` for an empty string.
    ///
    /// # Errors
    /// Describes the allowed form.
    pub fn parse(text: &str) -> Result<Option<Self>, String> {
        if text.is_empty() {
            return Ok(None);
        }
        let (user, group) = text
            .split_once(':')
            .map_or((text, None), |(user, group)| (user, Some(group)));
        if user.is_empty()
            || group.is_some_and(|group| group.contains(':'))
            || text.contains(char::is_whitespace)
        {
            return Err("USER or USER:GROUP, each a name or a number".to_owned());
        }
        let group = group.filter(|group| !group.is_empty()).map(str::to_owned);
        Ok(Some(Self {
            user: user.to_owned(),
            group,
        }))
    }
}

/// Looks the user and the group up in the files of the host.
///
/// # Errors
/// If the user or the group does not exist.
pub fn resolve(spec: &UserSpec) -> Result<Identity> {
    let entry = match spec.user.parse() {
        Ok(uid) => accounts::user(uid)?,
        Err(_) => {
            let found = accounts::user_named(&spec.user)?;
            Some(found.ok_or_else(|| unknown("user", &spec.user, spec))?)
        }
    };
    let uid = match &entry {
        Some(user) => user.uid,
        None => spec.user.parse()?,
    };
    let gid = match &spec.group {
        Some(group) => match group.parse() {
            Ok(gid) => gid,
            Err(_) => {
                let found = accounts::group_named(group)?;
                found.ok_or_else(|| unknown("group", group, spec))?.gid
            }
        },
        None => entry.ok_or_else(|| unknown("user", &spec.user, spec))?.gid,
    };
    let identity = Identity { uid, gid };
    // For setresuid(2), -1 means that the id is not changed.
    if [identity.uid, identity.gid].contains(&u32::MAX) {
        return Err(unknown("user or group", &u32::MAX.to_string(), spec));
    }
    Ok(identity)
}

fn unknown(kind: &str, name: &str, spec: &UserSpec) -> anyhow::Error {
    let group = spec
        .group
        .as_ref()
        .map_or_else(String::new, |group| format!(":{group}"));
    let database = if kind == "user" { "passwd" } else { "group" };
    failure(
        &catalog::CONFIG,
        format!(
            "user = \"{}{group}\" in the [nvidia-container-cli] table of config.toml: unknown {kind} {name:?}",
            spec.user
        ),
        format!("choose a number or a name in /etc/{database}, or remove the line"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_grammar() {
        let spec = |user: &str, group: Option<&str>| {
            Some(UserSpec {
                user: user.into(),
                group: group.map(Into::into),
            })
        };
        for (text, expected) in [
            ("", Some(None)),
            ("root", Some(spec("root", None))),
            ("root:video", Some(spec("root", Some("video")))),
            ("1000:44", Some(spec("1000", Some("44")))),
            ("root:", Some(spec("root", None))),
            (":video", None),
            ("a:b:c", None),
            ("a b", None),
        ] {
            assert_eq!(UserSpec::parse(text).ok(), expected, "{text:?}");
        }
    }

    #[test]
    fn lookups() {
        let resolved = |text| resolve(&UserSpec::parse(text).unwrap().unwrap());
        assert_eq!(resolved("root").unwrap(), Identity { uid: 0, gid: 0 });
        assert_eq!(resolved("0:44").unwrap(), Identity { uid: 0, gid: 44 });
        assert_eq!(
            resolved("4294000000:7").unwrap(),
            Identity {
                uid: 4_294_000_000,
                gid: 7
            }
        );
        for (text, says) in [
            ("root:vidoe", "unknown group \"vidoe\""),
            ("nobody-here", "unknown user \"nobody-here\""),
            ("4294000000", "unknown user \"4294000000\""),
            ("4294967295:7", "unknown user or group \"4294967295\""),
            ("0:4294967295", "unknown user or group \"4294967295\""),
        ] {
            assert!(base::report::render(&resolved(text).unwrap_err()).contains(says));
        }
    }
}
