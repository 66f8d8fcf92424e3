//! Describes for the log which GPUs disappeared, and which are offered in another way. Pure.

use nvidia_host::inventory::MigDevice;

use super::Offer;
use super::devices::parts;
use super::gpus::NodeGpu;
use crate::model::Resource;
use crate::settings::Plugin;

/// Returns a line for each GPU that disappeared, that was split into MIG devices or put together again, and for each resource
/// without devices.
#[must_use]
pub fn of_devices(old: &Offer, new: &Offer, settings: &Plugin) -> Vec<String> {
    let mut lines = Vec::new();
    for before in &old.gpus {
        let uuid = &before.gpu.uuid;
        match new.gpus.iter().find(|gpu| gpu.gpu.uuid == *uuid) {
            None => lines.push(format!(
                "{uuid} has disappeared: neither the driver nor the kernel lists it"
            )),
            Some(after) => lines.extend(of_parts(before, after, settings)),
        }
    }
    for Resource { name, .. } in old.resources.iter() {
        if !new.resources.iter().any(|resource| resource.name == *name) {
            lines.push(format!("the node has no device of {name} any more"));
        }
    }
    lines
}

fn of_parts(before: &NodeGpu, after: &NodeGpu, settings: &Plugin) -> Option<String> {
    let (old, new) = (parts(before, settings), parts(after, settings));
    if uuids(&old) == uuids(&new) {
        return None;
    }
    let uuid = &after.gpu.uuid;
    Some(match new.as_slice() {
        [None] => format!("{uuid} is offered as a whole GPU"),
        [] => format!("{uuid} is in MIG mode without MIG devices, and is not offered"),
        migs => {
            let profiles: Vec<&str> = migs.iter().filter_map(|mig| profile(after, *mig)).collect();
            let devices = if migs.len() == 1 {
                "MIG device"
            } else {
                "MIG devices"
            };
            format!(
                "{uuid} is offered as {} {devices}: {}",
                migs.len(),
                profiles.join(", ")
            )
        }
    })
}

fn uuids<'a>(parts: &[Option<&'a MigDevice>]) -> Vec<Option<&'a str>> {
    let uuid = |mig: &'a MigDevice| mig.uuid.as_str();
    parts.iter().map(|part| part.map(uuid)).collect()
}

fn profile<'a>(gpu: &'a NodeGpu, mig: Option<&MigDevice>) -> Option<&'a str> {
    gpu.profiles.get(&mig?.uuid).map(String::as_str)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::gpus::tests::gpu;
    use crate::settings::values::MigStrategy;

    fn offer(gpus: &[NodeGpu], resources: &[&str]) -> Offer {
        let resources = resources.iter().map(|name| Resource {
            name: (*name).to_owned(),
            ..Resource::default()
        });
        Offer {
            gpus: gpus.to_vec(),
            resources: resources.collect::<Vec<_>>().into(),
            ..Offer::default()
        }
    }

    #[test]
    fn what_the_log_says() {
        let (whole, split) = (gpu(0, "A", &[]), gpu(0, "A", &["1g.5gb", "2g.10gb"]));
        let mut empty = whole.clone();
        empty.gpu.mig_enabled = true;
        let mut lost = split.clone();
        lost.failure = Some("lost".to_owned());
        let other = gpu(1, "A", &[]);
        let mixed = Plugin::default();
        let none = Plugin {
            mig_strategy: MigStrategy::None,
            ..Plugin::default()
        };
        for (old, new, settings, expected) in [
            (
                &whole,
                &split,
                &mixed,
                vec!["GPU-0 is offered as 2 MIG devices: 1g.5gb, 2g.10gb"],
            ),
            (
                &split,
                &whole,
                &mixed,
                vec!["GPU-0 is offered as a whole GPU"],
            ),
            (
                &whole,
                &empty,
                &mixed,
                vec!["GPU-0 is in MIG mode without MIG devices, and is not offered"],
            ),
            (&whole, &split, &none, vec![]),
            (&split, &lost, &mixed, vec![]),
            (
                &whole,
                &other,
                &mixed,
                vec!["GPU-0 has disappeared: neither the driver nor the kernel lists it"],
            ),
        ] {
            let found = of_devices(
                &offer(std::slice::from_ref(old), &[]),
                &offer(std::slice::from_ref(new), &[]),
                settings,
            );
            assert_eq!(found, expected);
        }
        let gpus = [whole];
        let found = of_devices(
            &offer(&gpus, &["a.b/c", "a.b/d"]),
            &offer(&gpus, &["a.b/d"]),
            &mixed,
        );
        assert_eq!(found, ["the node has no device of a.b/c any more"]);
    }
}
