//! The id of a container in the name of its cgroup: `libpod-<id>.scope`, `crio-<id>`, `cri-containerd-<id>.scope`, `docker/<id>`. All
//! engines use such names, so /proc shows which process belongs to which container, and no engine has to be asked.

/// The length of ids of engines.
const LENGTH: usize = 64;

/// Returns the id in /proc/PID/cgroup that begins with `beginning`. The cgroup of conmon, which also contains the id, is ignored.
pub(crate) fn find<'c>(cgroup: &'c str, beginning: &str) -> Option<&'c str> {
    for line in cgroup.lines() {
        // hierarchy-ID:controller-list:cgroup-path, see cgroups(7)
        let path = line.splitn(3, ':').nth(2).unwrap_or_default();
        for name in path.split('/') {
            if name.contains("conmon") {
                continue;
            }
            let mut words = name.split(['-', '.', ':']);
            let id = words.find(|word| word.starts_with(beginning) && is_id(word));
            if id.is_some() {
                return id;
            }
        }
    }
    None
}

fn is_id(word: &str) -> bool {
    word.len() == LENGTH && word.bytes().all(|c| c.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    #[test]
    fn ids_in_cgroups() {
        for (cgroup, matches) in [
            (
                format!("0::/machine.slice/libpod-{ID}.scope/container\n"),
                true,
            ),
            (
                format!("12:devices:/libpod_parent/libpod-{ID}\n0::/\n"),
                true,
            ),
            (
                format!("0::/kubepods.slice/kubepods-pod7.slice/crio-{ID}.scope\n"),
                true,
            ),
            (format!("0::/system.slice/docker-{ID}.scope\n"), true),
            (
                format!("0::/kubepods.slice/x.slice:cri-containerd:{ID}\n"),
                true,
            ),
            (
                format!("0::/machine.slice/libpod-conmon-{ID}.scope\n"),
                false,
            ),
            (format!("0::/machine.slice/libpod-x{ID}.scope\n"), false),
            ("0::/user.slice/012345\n".to_owned(), false),
        ] {
            assert_eq!(find(&cgroup, "012345"), matches.then_some(ID), "{cgroup}");
            assert_eq!(find(&cgroup, ""), matches.then_some(ID), "{cgroup}");
        }
        assert_eq!(
            find(&format!("0::/{ID}"), "123456"),
            None,
            "not the beginning"
        );
    }
}
