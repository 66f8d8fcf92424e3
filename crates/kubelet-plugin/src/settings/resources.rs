//! The rules for names of extended resources, and the settings that contain such names.

use toml::de::{DeArray, DeValue};

use super::parse::last;
use super::values::SharingStrategy;

/// The largest number of replicas of a device: more than a hundred containers on one GPU are a mistake. How many MPS serves depends on the
/// GPU (`node::mps`).
const MAX_REPLICAS: u32 = 100;
/// The longest name of an extended resource after its prefix, by the rules of Kubernetes for qualified names.
const MAX_NAME: usize = 63;
/// The longest prefix, a DNS subdomain.
const MAX_PREFIX: usize = 253;

const REPLICAS: &str = "a number from 1 to 100";
/// The form of a row on the command line, for error messages.
const OPTION: &str = "name=NAME,model=PATTERN[,replicas=N]";
/// The form of `resources` in a configuration file, for error messages.
pub(super) const LIST: &str =
    "a list of { name = \"nvidia.com/h100\", model = \"*H100*\", replicas = 1 }";

/// A row of `resources`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResourceRow {
    /// The name with its prefix, such as `nvidia.com/h100`
    pub name: String,
    /// A pattern for the model of the GPU
    pub model: String,
    /// The number of replicas; `None` for the default
    pub replicas: Option<u32>,
}

impl ResourceRow {
    /// Parses `name=nvidia.com/h100,model=*H100*,replicas=4`.
    fn parse(text: &str) -> Result<Self, String> {
        let mut row = Self::default();
        for part in text.split(',') {
            let (key, value) = part
                .split_once('=')
                .ok_or_else(|| format!("{part:?} is not KEY=VALUE"))?;
            row.set(key, value, value.parse().ok())?;
        }
        Ok(row)
    }

    /// Reads an entry of the list in config.toml.
    fn read(value: &DeValue<'_>) -> Result<Self, String> {
        let DeValue::Table(table) = value else {
            return Err("an entry is not a table".to_owned());
        };
        let mut row = Self::default();
        for (key, value) in table {
            match value.get_ref() {
                DeValue::String(text) if key.get_ref() != "replicas" => {
                    row.set(key.get_ref(), text, None)?
                }
                DeValue::Integer(number) if key.get_ref() == "replicas" => {
                    row.set(
                        "replicas",
                        number.as_str(),
                        u32::from_str_radix(number.as_str(), number.radix()).ok(),
                    )?;
                }
                _ => return Err(format!("{:?} has a value of the wrong type", key.get_ref())),
            }
        }
        Ok(row)
    }

    fn set(&mut self, key: &str, text: &str, number: Option<u32>) -> Result<(), String> {
        match (key, number) {
            ("name", _) => text.clone_into(&mut self.name),
            ("model", _) => text.clone_into(&mut self.model),
            ("replicas", Some(number)) => self.replicas = Some(in_range(number)?),
            ("replicas", None) => return Err(format!("{text:?} is not {REPLICAS}")),
            _ => return Err(format!("{key:?} is not one of name, model and replicas")),
        }
        Ok(())
    }

    fn checked(self) -> Result<Self, String> {
        let Self { name, model, .. } = &self;
        if !is_resource(name) {
            return Err(format!(
                "{name:?} is not the name of a resource: a DNS name, a slash and at most {MAX_NAME} letters, digits, \".\", \
                 \"-\" and \"_\""
            ));
        }
        match model.is_empty() {
            true => Err(format!("{name:?} has no model")),
            false => Ok(self),
        }
    }
}

/// Parses rows on the command line.
pub(super) fn rows(values: &[&str]) -> Result<Vec<ResourceRow>, String> {
    checked(values.iter().map(|text| ResourceRow::parse(text)), OPTION)
}

/// Reads the list in config.toml.
pub(super) fn read(list: &DeArray<'_>) -> Result<Vec<ResourceRow>, String> {
    checked(
        list.iter().map(|value| ResourceRow::read(value.get_ref())),
        LIST,
    )
}

/// Checks the rows, which must have this form.
///
/// # Errors
/// The form, and what is wrong with a row.
pub(super) fn checked(
    rows: impl Iterator<Item = Result<ResourceRow, String>>,
    form: &str,
) -> Result<Vec<ResourceRow>, String> {
    let mut found: Vec<ResourceRow> = Vec::new();
    for row in rows {
        let row = row
            .and_then(ResourceRow::checked)
            .map_err(|why| format!("{form}, and {why}"))?;
        if found
            .iter()
            .any(|other| other.name == row.name && other.model == row.model)
        {
            return Err(format!(
                "{form}, and the row {:?} with model {:?} appears twice",
                row.name, row.model
            ));
        }
        found.push(row);
    }
    Ok(found)
}

/// A row of `sharing.timeSlicing.resources` or `sharing.mps.resources` in the configuration file of NVIDIA's plugin.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SharedResource {
    /// The name of the resource with its prefix, such as `nvidia.com/gpu`
    pub name: String,
    /// The name under which it is offered instead
    pub rename: Option<String>,
    /// The number of replicas
    pub replicas: u32,
    /// How the containers share a device
    pub strategy: SharingStrategy,
}

impl SharedResource {
    /// Checks the row.
    ///
    /// # Errors
    /// The name of a field that is invalid, and the allowed values.
    pub(super) fn check(&self) -> Result<(), (&'static str, String)> {
        const RESOURCE: &str = "the name of a resource, such as \"nvidia.com/gpu\"";
        if !is_resource(&self.name) {
            return Err(("name", RESOURCE.to_owned()));
        }
        if self.rename.as_ref().is_some_and(|name| !is_resource(name)) {
            return Err(("rename", RESOURCE.to_owned()));
        }
        in_range(self.replicas)
            .map(drop)
            .map_err(|allowed| ("replicas", allowed))
    }
}

/// Parses a number of replicas.
pub(super) fn replicas(values: &[&str]) -> Result<u32, String> {
    last(values)
        .parse()
        .map_err(|_| REPLICAS.to_owned())
        .and_then(in_range)
}

/// Checks a number of replicas.
pub(super) fn in_range(number: u32) -> Result<u32, String> {
    if (1..=MAX_REPLICAS).contains(&number) {
        Ok(number)
    } else {
        Err(REPLICAS.to_owned())
    }
}

/// Parses the prefix of resources.
pub(super) fn prefix(values: &[&str]) -> Result<String, String> {
    let text = last(values);
    if is_prefix(text) {
        Ok(text.to_owned())
    } else {
        Err("a DNS name, such as \"nvidia.com\"".to_owned())
    }
}

fn is_resource(name: &str) -> bool {
    name.split_once('/')
        .is_some_and(|(prefix, name)| is_prefix(prefix) && is_qualified_name(name))
}

/// Whether this is a DNS subdomain in the sense of Kubernetes, except `kubernetes.io`, which extended resources must not use.
fn is_prefix(text: &str) -> bool {
    let is_reserved = text == "kubernetes.io"
        || text.ends_with(".kubernetes.io")
        || text.starts_with("requests.");
    text.len() <= MAX_PREFIX && text.split('.').all(is_label) && !is_reserved
}

/// Whether this is a part of a DNS name (RFC 1123).
fn is_label(text: &str) -> bool {
    (1..=MAX_NAME).contains(&text.len())
        && text
            .bytes()
            .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'-')
        && !text.starts_with('-')
        && !text.ends_with('-')
}

/// Whether this is the part of a qualified name after the slash.
#[must_use]
pub fn is_qualified_name(text: &str) -> bool {
    text.len() <= MAX_NAME
        && text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text.ends_with(|c: char| c.is_ascii_alphanumeric())
        && text
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<ResourceRow, String> {
        rows(&[text]).map(|rows| rows[0].clone())
    }

    #[test]
    fn rows_on_the_command_line() {
        let row = parsed("name=nvidia.com/h100,model=*H100*,replicas=4").unwrap();
        assert_eq!(
            row,
            ResourceRow {
                name: "nvidia.com/h100".into(),
                model: "*H100*".into(),
                replicas: Some(4)
            }
        );
        for (text, why) in [
            ("", "not KEY=VALUE"),
            ("name=nvidia.com/h100", "has no model"),
            ("model=*", "not the name of a resource"),
            ("name=h100,model=*", "not the name of a resource"),
            ("name=nvidia.com/-x,model=*", "not the name of a resource"),
            ("name=kubernetes.io/x,model=*", "not the name of a resource"),
            ("name=a.b/x,model=*,replicas=0", "from 1 to 100"),
            ("name=a.b/x,model=*,replicas=many", "from 1 to 100"),
            ("name=a.b/x,model=*,color=red", "not one of name"),
        ] {
            let error = parsed(text).unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
        let long = format!("name=a.b/{},model=*", "x".repeat(MAX_NAME + 1));
        assert!(parsed(&long).is_err());
        assert!(parsed(&long.replacen('x', "", 1)).is_ok());
    }

    #[test]
    fn the_same_row_twice_is_an_error() {
        assert!(rows(&["name=a.b/x,model=*A*", "name=a.b/x,model=*B*"]).is_ok());
        let error = rows(&["name=a.b/x,model=*A*", "name=a.b/x,model=*A*"]).unwrap_err();
        assert!(
            error.ends_with("\"a.b/x\" with model \"*A*\" appears twice"),
            "{error}"
        );
    }
}
