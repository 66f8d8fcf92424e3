//! The rules for names of extended resources, and the settings that contain such names.

use toml::de::DeValue;

/// The largest number of replicas of a device. NVIDIA's MPS supports 48 clients; more than a hundred containers on one GPU are a mistake.
const MAX_REPLICAS: u32 = 100;
/// The longest name of an extended resource after its prefix, by the rules of Kubernetes for qualified names.
const MAX_NAME: usize = 63;
/// The longest prefix, a DNS subdomain.
const MAX_PREFIX: usize = 253;

const REPLICAS: &str = "a number from 1 to 100";
/// The form of `resources`, for error messages.
pub(super) const ROWS: &str = "a list of { name = \"nvidia.com/h100\", model = \"*H100*\", replicas = 1 }";

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
    /// Parses `name=nvidia.com/h100,model=*H100*,replicas=4`, the form on the command line.
    ///
    /// # Errors
    /// What is wrong.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let mut row = Self::default();
        for part in text.split(',') {
            let (key, value) = part.split_once('=').ok_or_else(|| format!("{part:?} is not KEY=VALUE"))?;
            row.set(key, value, value.parse().ok())?;
        }
        Ok(row)
    }

    /// Reads an entry of the list in config.toml.
    ///
    /// # Errors
    /// What is wrong.
    pub(super) fn read(value: &DeValue<'_>) -> Result<Self, String> {
        let DeValue::Table(table) = value else { return Err("an entry is not a table".to_owned()) };
        let mut row = Self::default();
        for (key, value) in table {
            match value.get_ref() {
                DeValue::String(text) if key.get_ref() != "replicas" => row.set(key.get_ref(), text, None)?,
                DeValue::Integer(number) if key.get_ref() == "replicas" => {
                    row.set("replicas", number.as_str(), u32::from_str_radix(number.as_str(), number.radix()).ok())?;
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
            ("replicas", Some(number)) => self.replicas = Some(replicas(number)?),
            ("replicas", None) => return Err(format!("{text:?} is not {REPLICAS}")),
            _ => return Err(format!("{key:?} is not one of name, model and replicas")),
        }
        Ok(())
    }

    fn check(&self) -> Result<(), String> {
        let Self { name, model, .. } = self;
        if !is_resource(name) {
            return Err(format!(
                "{name:?} is not the name of a resource: a DNS name, a slash and at most {MAX_NAME} letters, digits, \".\", \
                 \"-\" and \"_\""
            ));
        }
        match model.is_empty() {
            true => Err(format!("{name:?} has no model")),
            false => Ok(()),
        }
    }
}

/// Checks the rows of `resources`.
///
/// # Errors
/// The allowed values, and what is wrong with a row.
pub(super) fn checked(rows: Vec<ResourceRow>) -> Result<Vec<ResourceRow>, String> {
    for (at, row) in rows.iter().enumerate() {
        row.check().map_err(|why| format!("{ROWS}, and {why}"))?;
        if rows.iter().take(at).any(|other| other.name == row.name && other.model == row.model) {
            return Err(format!("{ROWS}, and the row {:?} with model {:?} appears twice", row.name, row.model));
        }
    }
    Ok(rows)
}

/// A row of `sharing.timeSlicing.resources` in the configuration file of NVIDIA's plugin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TimeSlicing {
    /// The name of the resource with its prefix, such as `nvidia.com/gpu`
    pub name: String,
    /// The name under which it is offered instead
    pub rename: Option<String>,
    /// The number of replicas
    pub replicas: u32,
}

impl TimeSlicing {
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
        replicas(self.replicas).map(drop).map_err(|allowed| ("replicas", allowed))
    }
}

/// Checks a number of replicas.
///
/// # Errors
/// The allowed values.
pub(super) fn replicas(number: u32) -> Result<u32, String> {
    if (1..=MAX_REPLICAS).contains(&number) { Ok(number) } else { Err(REPLICAS.to_owned()) }
}

/// Checks a prefix of resources.
///
/// # Errors
/// The allowed values.
pub(super) fn prefix(text: &str) -> Result<String, String> {
    if is_prefix(text) { Ok(text.to_owned()) } else { Err("a DNS name, such as \"nvidia.com\"".to_owned()) }
}

fn is_resource(name: &str) -> bool {
    name.split_once('/').is_some_and(|(prefix, name)| is_prefix(prefix) && is_qualified_name(name))
}

/// Whether this is a DNS subdomain in the sense of Kubernetes, except `kubernetes.io`, which extended resources must not use.
fn is_prefix(text: &str) -> bool {
    let is_reserved = text == "kubernetes.io" || text.ends_with(".kubernetes.io") || text.starts_with("requests.");
    text.len() <= MAX_PREFIX && text.split('.').all(is_label) && !is_reserved
}

/// Whether this is a part of a DNS name (RFC 1123).
fn is_label(text: &str) -> bool {
    (1..=MAX_NAME).contains(&text.len())
        && text.bytes().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'-')
        && !text.starts_with('-')
        && !text.ends_with('-')
}

/// Whether this is the part of a qualified name after the slash.
#[must_use]
pub fn is_qualified_name(text: &str) -> bool {
    text.len() <= MAX_NAME
        && text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text.ends_with(|c: char| c.is_ascii_alphanumeric())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<ResourceRow, String> {
        checked(vec![ResourceRow::parse(text)?]).map(|rows| rows[0].clone())
    }

    #[test]
    fn rows_on_the_command_line() {
        let row = parsed("name=nvidia.com/h100,model=*H100*,replicas=4").unwrap();
        assert_eq!(row, ResourceRow { name: "nvidia.com/h100".into(), model: "*H100*".into(), replicas: Some(4) });
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
        let row = |name: &str, model: &str| ResourceRow { name: name.into(), model: model.into(), replicas: None };
        assert!(checked(vec![row("a.b/x", "*A*"), row("a.b/x", "*B*")]).is_ok());
        let error = checked(vec![row("a.b/x", "*A*"), row("a.b/x", "*A*")]).unwrap_err();
        assert!(error.ends_with("\"a.b/x\" with model \"*A*\" appears twice"), "{error}");
    }
}
