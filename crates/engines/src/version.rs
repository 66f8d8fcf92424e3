//! Parses the versions that programs print.

use std::fmt;

/// A version with three numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub u32, pub u32, pub u32);

impl Version {
    /// Parses the output of `PROGRAM --version`: `podman version 4.3.1`, `Docker version 24.0.5, build x`,
    /// `runc version 1.1.5+ds1`, `crun version 1.8.1`, `crio version 1.30.2`, `containerd containerd.io 1.7.22 7f7fdf5`,
    /// `containerd github.com/containerd/containerd/v2 v2.0.0 x`.
    pub fn parse(text: &str) -> Option<Self> {
        let line = text.lines().next()?;
        let mut words = line.split(' ');
        let word = if line.starts_with("containerd ") {
            words.nth(2)?.trim_start_matches('v')
        } else {
            words.skip_while(|word| *word != "version").nth(1)?
        };
        let mut parts = word
            .split(|c: char| !c.is_ascii_digit())
            .map(|part| part.parse().ok());
        Some(Self(
            parts.next()??,
            parts.next()??,
            parts.next().flatten().unwrap_or_default(),
        ))
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.0, self.1, self.2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_programs_print_them() {
        for (text, version) in [
            ("podman version 4.3.1\n", Some(Version(4, 3, 1))),
            ("podman version 5.6.0-dev\n", Some(Version(5, 6, 0))),
            (
                "crio version 1.30.2\nVersion:        1.30.2\n",
                Some(Version(1, 30, 2)),
            ),
            (
                "runc version 1.1.5+ds1\ncommit: 1.1.5+ds1-1+deb12u1\n",
                Some(Version(1, 1, 5)),
            ),
            ("runc version 1.2.0-rc.1\n", Some(Version(1, 2, 0))),
            ("crun version 1.23\ncommit: x\n", Some(Version(1, 23, 0))),
            (
                "Docker version 24.0.5, build ced0996\n",
                Some(Version(24, 0, 5)),
            ),
            (
                "containerd containerd.io 1.7.22 7f7fdf5fed64\n",
                Some(Version(1, 7, 22)),
            ),
            (
                "containerd github.com/containerd/containerd/v2 v2.1.0 a\n",
                Some(Version(2, 1, 0)),
            ),
            ("containerd\n", None),
            ("podman version x\n", None),
            ("", None),
        ] {
            assert_eq!(Version::parse(text), version, "{text}");
        }
    }
}
