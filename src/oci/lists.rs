//! Reads lists and objects of config.json one entry at a time. The user who starts a container decides their length, and a tree
//! of parsed values needs sixty times the memory of the text.

use std::collections::BTreeMap;
use std::fmt;

use anyhow::{Result, bail};
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
    // Of equal keys, the last one counts, as in the engines. serde_json does that for a `Value`, but rejects duplicate fields
    // of a struct.
    each(list, &mut |entry| known.extend(serde_json::from_value(value(entry)).ok()))?;
    Ok(known)
}

/// Returns the members of an object that have these names. A missing object has no members.
///
/// # Errors
/// If the value is not an object.
pub(super) fn members(object: Option<&RawValue>, names: &[&str]) -> Result<BTreeMap<String, Value>> {
    members_if(object, &|name| names.contains(&name))
}

/// Returns the members of an object whose names `is_wanted` accepts.
///
/// # Errors
/// If the value is not an object.
pub(super) fn members_if(
    object: Option<&RawValue>,
    is_wanted: &dyn Fn(&str) -> bool,
) -> Result<BTreeMap<String, Value>> {
    struct Members<'n>(&'n dyn Fn(&str) -> bool);
    impl<'de> Visitor<'de> for Members<'_> {
        type Value = BTreeMap<String, Value>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<Self::Value, A::Error> {
            let mut members = BTreeMap::new();
            while let Some((name, text)) = object.next_entry::<String, &RawValue>()? {
                if (self.0)(&name) {
                    members.insert(name, value(text.get()));
                }
            }
            Ok(members)
        }
    }
    let Some(object) = object else { return Ok(BTreeMap::new()) };
    Ok(serde_json::Deserializer::from_str(object.get()).deserialize_map(Members(is_wanted))?)
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
                            environment.variables.insert(name.to_owned(), value.to_owned());
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
        assert_eq!(known_entries::<crate::oci::spec_view::IdMapping>(twice).unwrap()[0].size, 2);
        let object = Some(raw(r#"{"a":1,"b":[],"\u0061":"x","c":1e400}"#));
        let found = members(object, &["a", "c", "d"]).unwrap();
        assert_eq!(serde_json::to_string(&found).unwrap(), r#"{"a":"x","c":null}"#);
        assert!(members(Some(raw("[]")), &["a"]).is_err());
        let env: Environment = serde_json::from_str(r#"["A=1","B=","A=2=3"]"#).unwrap();
        assert_eq!(serde_json::to_string(&env.variables().unwrap()).unwrap(), r#"{"A":"2=3","B":""}"#);
    }
}
