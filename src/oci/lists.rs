//! Reads lists and objects of config.json one entry at a time. The user who starts a container decides their length, and a tree
//! of parsed values needs sixty times the memory of the text.

use std::collections::BTreeMap;
use std::fmt;

use anyhow::{Result, bail, ensure};
use serde::Deserialize;
use serde::de::{DeserializeOwned, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use serde_json::value::RawValue;

/// Calls `take` with the text of each entry. A missing list has no entries.
///
/// # Errors
/// If the value is not a list.
pub(super) fn each(list: Option<&RawValue>, take: &mut dyn FnMut(&str)) -> Result<()> {
    struct Entries<'t>(&'t mut dyn FnMut(&str));
    impl<'de> Visitor<'de> for Entries<'_> {
        type Value = ();

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a list")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
            while let Some(entry) = list.next_element::<&RawValue>()? {
                (self.0)(entry.get());
            }
            Ok(())
        }
    }
    let Some(list) = list else { return Ok(()) };
    Ok(serde_json::Deserializer::from_str(list.get()).deserialize_seq(Entries(take))?)
}

/// Parses an entry; null if it contains a number that no Rust type can hold.
pub(super) fn value(entry: &str) -> Value {
    serde_json::from_str(entry).unwrap_or_default()
}

/// Returns the entries of the expected form. Others are ignored: they neither request nor allow anything.
///
/// # Errors
/// If the value is not a list.
pub(super) fn known_entries<T: DeserializeOwned>(list: Option<&RawValue>) -> Result<Vec<T>> {
    let mut known = Vec::new();
    each(list, &mut |entry| known.extend(known_entry(entry)))?;
    Ok(known)
}

fn known_entry<T: DeserializeOwned>(entry: &str) -> Option<T> {
    // Without the detour through a `Value`, which takes a tenth of the instructions of a start.
    if let Ok(known) = serde_json::from_str(entry) {
        return Some(known);
    }
    // Of equal keys, the last one counts, as in the engines. serde_json does that for a `Value`, but rejects duplicate fields
    // of a struct.
    serde_json::from_value(value(entry)).ok()
}

/// The used members of an object, as texts. Of equal names, the last one counts, as in the engines.
#[derive(Debug, Default)]
pub(super) struct Object<'a>(BTreeMap<String, &'a RawValue>);

impl<'a> Object<'a> {
    /// Reads the members with these names from the first JSON value of `bytes`. The rest is ignored, as in the engines' decoders.
    ///
    /// # Errors
    /// If the value is not an object.
    pub(super) fn first(bytes: &'a [u8], names: &[&str]) -> Result<Self> {
        ensure!(!bytes.trim_ascii().is_empty(), "it is empty");
        Ok(serde_json::Deserializer::from_slice(bytes)
            .deserialize_map(Members(&|name| names.contains(&name)))?)
    }

    /// Reads the members with these names. A missing object, or null, has no members.
    ///
    /// # Errors
    /// If the value is not an object.
    pub(super) fn of(object: Option<&'a RawValue>, names: &[&str]) -> Result<Self> {
        Self::of_names(object, &|name| names.contains(&name))
    }

    /// Reads the members whose names `is_wanted` accepts.
    ///
    /// # Errors
    /// The errors of [`Self::of`].
    pub(super) fn of_names(
        object: Option<&'a RawValue>,
        is_wanted: &dyn Fn(&str) -> bool,
    ) -> Result<Self> {
        match object {
            Some(object) => Ok(serde_json::Deserializer::from_str(object.get())
                .deserialize_map(Members(is_wanted))?),
            None => Ok(Self::default()),
        }
    }

    /// Returns a member, unless it is null.
    pub(super) fn get(&self, name: &str) -> Option<&'a RawValue> {
        self.0
            .get(name)
            .copied()
            .filter(|value| value.get() != "null")
    }

    /// Returns the text of a member; `None` if it is not a string.
    pub(super) fn text(&self, name: &str) -> Option<String> {
        self.get(name).and_then(text)
    }

    /// Returns the members in the order of their names.
    pub(super) fn members(&self) -> impl Iterator<Item = (&str, &'a RawValue)> {
        self.0.iter().map(|(name, value)| (name.as_str(), *value))
    }
}

/// Returns the text of a string.
pub(super) fn text(value: &RawValue) -> Option<String> {
    serde_json::from_str(value.get()).ok()
}

struct Members<'n>(&'n dyn Fn(&str) -> bool);

impl<'de> Visitor<'de> for Members<'_> {
    type Value = Object<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<Self::Value, A::Error> {
        let mut members = BTreeMap::new();
        while let Some((name, text)) = object.next_entry::<String, &RawValue>()? {
            if (self.0)(&name) {
                members.insert(name, text);
            }
        }
        Ok(Object(members))
    }
}

/// `process.env`.
#[derive(Default)]
pub(super) struct Environment {
    variables: BTreeMap<String, String>,
    /// The first entry without `=`
    wrong: Option<String>,
}

impl Environment {
    /// Returns the variables by name; the last of several equal names counts.
    ///
    /// # Errors
    /// If an entry has no `=`.
    pub(super) fn variables(self) -> Result<BTreeMap<String, String>> {
        match self.wrong {
            Some(entry) => bail!("its process.env has {entry:?}, which is not NAME=VALUE"),
            None => Ok(self.variables),
        }
    }
}

impl<'de> Deserialize<'de> for Environment {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Environment;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Environment, A::Error> {
                let mut environment = Environment::default();
                while let Some(entry) = list.next_element::<String>()? {
                    match entry.split_once('=') {
                        Some((name, value)) => {
                            environment
                                .variables
                                .insert(name.to_owned(), value.to_owned());
                        }
                        None => {
                            environment.wrong.get_or_insert(entry);
                        }
                    }
                }
                Ok(environment)
            }
        }
        deserializer.deserialize_seq(Entries)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(text: &str) -> &RawValue {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn entries_of_another_form_are_left_out() {
        let list = raw(r#"[1, "x", 2.5, null, {}, 1e400, -1, [3], 4]"#);
        assert_eq!(known_entries::<u32>(Some(list)).unwrap(), [1, 4]);
        assert!(known_entries::<u32>(None).unwrap().is_empty());
        assert!(known_entries::<u32>(Some(raw(r#"{"a":1}"#))).is_err());
    }

    #[test]
    fn of_equal_keys_the_last_counts() {
        let twice = Some(raw(r#"[{"containerID":1,"hostID":1,"size":1,"size":2}]"#));
        assert_eq!(
            known_entries::<crate::oci::spec_view::IdMapping>(twice).unwrap()[0].size,
            2
        );
        let object = Some(raw(r#"{"a":1,"b":[],"\u0061":"x","c":1e400,"e":null}"#));
        let found = Object::of(object, &["a", "c", "d", "e"]).unwrap();
        let members: Vec<_> = found
            .members()
            .map(|(name, value)| (name, value.get()))
            .collect();
        assert_eq!(members, [("a", "\"x\""), ("c", "1e400"), ("e", "null")]);
        assert_eq!(
            (found.text("a").as_deref(), found.text("c")),
            (Some("x"), None)
        );
        assert!(found.get("d").is_none() && found.get("e").is_none());
        assert!(Object::of(Some(raw("[]")), &["a"]).is_err());
        let env: Environment = serde_json::from_str(r#"["A=1","B=","A=2=3"]"#).unwrap();
        assert_eq!(
            serde_json::to_string(&env.variables().unwrap()).unwrap(),
            r#"{"A":"2=3","B":""}"#
        );
    }
}
