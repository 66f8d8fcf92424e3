//! Container engines and the versions of CDI that they read. Pure.
//!
//! An engine refuses a whole file that is newer than itself, and then says only that it does not know the device.

use std::fmt;

use super::rules::VERSIONS;

/// An engine that reads specs by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `podman`
    Podman,
    /// `crio`
    Crio,
}

/// An engine of this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Engine {
    /// Which
    pub kind: Kind,
    /// Major and minor
    pub version: (u32, u32),
}

impl Kind {
    /// All of them, with the program that tells its version.
    pub const ALL: [(Self, &'static str); 2] = [(Self::Podman, "/usr/bin/podman"), (Self::Crio, "/usr/bin/crio")];
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.kind {
            Kind::Podman => "Podman",
            Kind::Crio => "CRI-O",
        };
        write!(f, "{name} {}.{}", self.version.0, self.version.1)
    }
}

/// Parses what `--version` prints: `podman version 4.3.1`, `crio version 1.30.2`.
#[must_use]
pub fn parse_version(text: &str) -> Option<(u32, u32)> {
    let word = text.lines().next()?.split(' ').skip_while(|word| *word != "version").nth(1)?;
    let mut parts = word.split(['.', '-']).map(|part| part.parse().ok());
    Some((parts.next()??, parts.next()??))
}

/// The first engine of a kind that reads specs of a version, as far as it is known: NVIDIA's toolkit documents the one for
/// 0.7.0 and its issue 38 that Podman 4.2 does not read 0.5.0, which 4.3 does.
const SINCE: [(Kind, &str, (u32, u32)); 7] = [
    (Kind::Podman, "0.1.0", (4, 1)),
    (Kind::Crio, "0.1.0", (1, 23)),
    (Kind::Podman, "0.4.0", (4, 1)),
    (Kind::Podman, "0.5.0", (4, 3)),
    (Kind::Podman, "0.7.0", (5, 1)),
    (Kind::Crio, "0.4.0", (1, 23)),
    (Kind::Crio, "0.7.0", (1, 30)),
];

impl Engine {
    /// Whether it reads specs of this version; `None` if that is not known.
    #[must_use]
    pub fn reads(self, cdi_version: &str) -> Option<bool> {
        let place = |version: &str| VERSIONS.iter().position(|known| *known == version);
        let asked = place(cdi_version.trim_start_matches('v'))?;
        let of_kind = || SINCE.iter().filter(|(kind, ..)| *kind == self.kind);
        if of_kind().any(|(_, version, since)| place(version) >= Some(asked) && self.version >= *since) {
            return Some(true);
        }
        if of_kind().any(|(_, version, since)| place(version) <= Some(asked) && self.version < *since) {
            return Some(false);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_as_engines_print_them() {
        for (text, version) in [
            ("podman version 4.3.1\n", Some((4, 3))),
            ("podman version 5.6.0-dev\n", Some((5, 6))),
            ("crio version 1.30.2\nVersion:        1.30.2\n", Some((1, 30))),
            ("podman version x\n", None),
            ("", None),
        ] {
            assert_eq!(parse_version(text), version, "{text}");
        }
    }

    #[test]
    fn what_engines_read() {
        for (kind, version, cdi, reads) in [
            (Kind::Podman, (3, 4), "0.3.0", Some(false)),
            (Kind::Podman, (4, 2), "0.3.0", Some(true)),
            (Kind::Podman, (4, 2), "0.5.0", Some(false)),
            (Kind::Podman, (4, 3), "0.5.0", Some(true)),
            (Kind::Podman, (4, 9), "0.6.0", None),
            (Kind::Podman, (4, 9), "0.7.0", Some(false)),
            (Kind::Podman, (5, 1), "0.7.0", Some(true)),
            (Kind::Podman, (5, 1), "1.1.0", None),
            (Kind::Crio, (1, 29), "0.5.0", None),
            (Kind::Crio, (1, 29), "0.7.0", Some(false)),
            (Kind::Crio, (1, 30), "v0.5.0", Some(true)),
        ] {
            assert_eq!(Engine { kind, version }.reads(cdi), reads, "{kind:?} {version:?} {cdi}");
        }
    }
}
