//! The SELinux label of file systems that are mounted for a container. Runtimes take it from `linux.mountLabel` in config.json.

use std::path::Path;

use rustix::fs::StatVfsMountFlags;

use anyhow::bail;

/// A label that cannot contain another mount option.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Label(String);

impl Label {
    /// Parses `linux.mountLabel`. Returns `None` if it is empty or SELinux is disabled, because the kernel then rejects the option.
    ///
    /// # Errors
    /// If SELinux is enabled and the text is not a label.
    pub fn from_config(mount_label: &str) -> anyhow::Result<Option<Self>> {
        if mount_label.is_empty() || !is_on(Path::new("/sys/fs/selinux")) {
            Ok(None)
        } else {
            parse(mount_label).map(Some)
        }
    }

    /// Returns the value for the mount option `context`.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Appends the label to other options of mount(2). The quotes keep the commas between categories from ending the option.
    #[must_use]
    pub fn after(label: Option<&Self>, options: &str) -> String {
        label.map_or_else(
            || options.to_owned(),
            |Self(label)| format!("{options},context=\"{label}\""),
        )
    }
}

/// Parses `user:role:type`, with `:level` if the policy has MLS. Other characters are rejected, because they could end the option
/// and start another one.
fn parse(text: &str) -> anyhow::Result<Label> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-.:,".contains(c);
    let parts: Vec<&str> = text.splitn(4, ':').collect();
    // Only the level has categories, which commas separate.
    let is_label = parts.len() >= 3
        && parts.iter().all(|part| !part.is_empty())
        && parts.iter().take(3).all(|part| !part.contains(','))
        && text.chars().all(is_plain)
        && text.len() <= 1024;
    if is_label {
        return Ok(Label(text.to_owned()));
    }
    let shown: String = text.chars().take(100).collect();
    bail!("linux.mountLabel in config.json is {shown:?}, which is not a SELinux label")
}

/// Whether SELinux is enabled for this process. Runtimes mount selinuxfs read-only in containers, and libselinux then treats
/// SELinux as disabled.
fn is_on(selinuxfs: &Path) -> bool {
    const SELINUX_MAGIC: i64 = 0xf97c_ff8c;
    rustix::fs::statfs(selinuxfs).is_ok_and(|fs| fs.f_type == SELINUX_MAGIC)
        && rustix::fs::statvfs(selinuxfs)
            .is_ok_and(|fs| !fs.f_flag.contains(StatVfsMountFlags::RDONLY))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_of_engines_are_labels() {
        for text in [
            "system_u:object_r:container_file_t:s0:c1,c2",
            "system_u:object_r:container_file_t:s0-s15:c0.c1023",
            "unconfined_u:object_r:user_home_t",
        ] {
            let label = parse(text).unwrap();
            assert_eq!(label.as_str(), text);
            assert_eq!(
                Label::after(Some(&label), "size=1m"),
                format!("size=1m,context=\"{text}\"")
            );
        }
        assert_eq!(Label::after(None, "size=1m"), "size=1m");
    }

    #[test]
    fn other_mount_options_are_not_labels() {
        for text in [
            "x",
            "a:b",
            "a::c",
            ":b:c",
            "a:b:c:",
            "a:b:c\",mode=\"777",
            "a:b:c\",upperdir=/etc",
            "a:b,mode=0777:c",
            "a:b:c\nd",
            "a:b:c d",
            "a:b:c=d",
            "a:b:c\\",
            "a:b:c\0",
            "ä:b:c",
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(
                error.contains("which is not a SELinux label"),
                "{text:?}: {error}"
            );
        }
        assert!(parse(&format!("a:b:c:{}", "x".repeat(2000))).is_err());
    }

    #[test]
    fn only_selinuxfs_shows_that_selinux_is_enabled() {
        assert!(!is_on(Path::new("/none")));
        assert!(!is_on(Path::new("/proc")));
    }
}
