//! The names by which the dynamic linker finds a library.

use std::ffi::{OsStr, OsString};

/// Names without duplicates, in the order of their bytes. Most libraries have one name, and a start reads all libraries of the driver: the
/// smallest node of a `BTreeSet` has room for eleven names, and together these nodes would take several pages.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Sonames(Vec<OsString>);

impl Sonames {
    /// Adds a name, unless it is in the list.
    pub fn insert(&mut self, name: OsString) {
        if let Err(place) = self.0.binary_search(&name) {
            self.0.insert(place, name);
        }
    }

    /// Reports whether the list contains a name.
    #[must_use]
    pub fn contains(&self, name: &OsStr) -> bool {
        self.0.iter().any(|known| known == name)
    }

    /// Returns the names.
    pub fn iter(&self) -> std::slice::Iter<'_, OsString> {
        self.0.iter()
    }

    /// Reports whether the list is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl FromIterator<OsString> for Sonames {
    fn from_iter<I: IntoIterator<Item = OsString>>(names: I) -> Self {
        let mut sonames = Self::default();
        for name in names {
            sonames.insert(name);
        }
        sonames
    }
}

impl<const COUNT: usize> From<[OsString; COUNT]> for Sonames {
    fn from(names: [OsString; COUNT]) -> Self {
        names.into_iter().collect()
    }
}

impl<'a> IntoIterator for &'a Sonames {
    type Item = &'a OsString;
    type IntoIter = std::slice::Iter<'a, OsString>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_sorted_and_listed_once() {
        let mut sonames = Sonames::from(["libb.so.1", "liba.so.1", "libb.so.1"].map(Into::into));
        sonames.insert("liba.so".into());
        sonames.insert("liba.so.1".into());
        let names: Vec<_> = sonames.iter().collect();
        assert_eq!(names, ["liba.so", "liba.so.1", "libb.so.1"]);
        assert!(sonames.contains(OsStr::new("liba.so")) && !sonames.contains(OsStr::new("libc")));
    }
}
