//! The SELinux label of a file system that is mounted for a container: `linux.mountLabel` of its config.json, which
//! runtimes give to those that they mount.

use std::path::Path;

use rustix::fs::StatVfsMountFlags;

use crate::report::{catalog, failure};

/// A label that can be an option of a mount as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Label(String);

impl Label {
    /// `None` where there is none to give, or SELinux is off: kernels refuse the option then.
    ///
    /// # Errors
    /// If it is no label, and SELinux is on.
    pub fn of(mount_label: &str) -> anyhow::Result<Option<Self>> {
        if mount_label.is_empty() || !is_on(Path::new("/sys/fs/selinux")) {
            Ok(None)
        } else {
            parse(mount_label).map(Some)
        }
    }

    /// As the option `context` has it.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Behind other options of mount(2). A comma ends an option, and categories have them: quotes keep it together.
    #[must_use]
    pub fn after(label: Option<&Self>, options: &str) -> String {
        label.map_or_else(|| options.to_owned(), |Self(label)| format!("{options},context=\"{label}\""))
    }
}

/// `user:role:type`, and with MLS `:level`. What the kernel does with other characters would be for it to say; here they
/// could end the option and begin another.
fn parse(text: &str) -> anyhow::Result<Label> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-.:,".contains(c);
    let parts: Vec<&str> = text.splitn(4, ':').collect();
    // The first three have no categories.
    let is_label = parts.len() >= 3
        && parts.iter().all(|part| !part.is_empty())
        && parts.iter().take(3).all(|part| !part.contains(','))
        && text.chars().all(is_plain)
        && text.len() <= 1024;
    if is_label {
        return Ok(Label(text.to_owned()));
    }
    let shown: String = text.chars().take(100).collect();
    Err(failure(
        &catalog::STATE,
        format!("linux.mountLabel of config.json is {shown:?}, which is no SELinux label"),
        "start the container with another label, or with \"--security-opt label=disable\"",
    ))
}

/// Whether the kernel has a policy. Containers see it read-only, and for programs in them there is none.
fn is_on(selinuxfs: &Path) -> bool {
    const SELINUX_MAGIC: i64 = 0xf97c_ff8c;
    rustix::fs::statfs(selinuxfs).is_ok_and(|fs| fs.f_type == SELINUX_MAGIC)
        && rustix::fs::statvfs(selinuxfs).is_ok_and(|fs| !fs.f_flag.contains(StatVfsMountFlags::RDONLY))
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
            assert_eq!(Label::after(Some(&label), "size=1m"), format!("size=1m,context=\"{text}\""));
        }
        assert_eq!(Label::after(None, "size=1m"), "size=1m");
    }

    #[test]
    fn what_could_be_another_option_is_none() {
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
            let error = crate::report::render(&parse(text).unwrap_err());
            assert!(error.contains("which is no SELinux label"), "{text:?}: {error}");
        }
        assert!(parse(&format!("a:b:c:{}", "x".repeat(2000))).is_err());
    }

    #[test]
    fn only_the_kernels_own_file_system_says_that_it_is_on() {
        assert!(!is_on(Path::new("/none")));
        assert!(!is_on(Path::new("/proc")));
    }
}
