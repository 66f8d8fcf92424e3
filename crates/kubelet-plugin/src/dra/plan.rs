//! Decides how the slices on the API server become those that describe the node. Pure.

use k8s_openapi::api::resource::v1::{Device, DeviceTaint, ResourceSlice, ResourceSliceSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};

use super::slice::give_whole;

/// The longest name of an object.
const MAX_NAME: usize = 253;

/// A request to the API server.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Create this slice.
    Create(Box<ResourceSlice>),
    /// Replace the slice of this name and resource version.
    Replace(Box<ResourceSlice>),
    /// Delete the slice with this name.
    Delete(String),
}

/// Decides what has to be done. Existing slices are used again, whether an earlier run or another driver of the name wrote them. The order
/// of the actions is safe: the slices of a new generation come first, then the slices of older ones are deleted.
#[must_use]
pub fn plan(
    existing: &[ResourceSlice],
    desired: &[ResourceSliceSpec],
    node: Option<&OwnerReference>,
) -> Vec<Action> {
    let published = Published::new(existing, desired);
    let mut actions = Vec::new();
    if !published.is_current(desired) {
        actions.extend(published.write(desired, node));
        let superfluous = published.ours.iter().skip(desired.len());
        actions.extend(superfluous.filter_map(|slice| delete(slice)));
    }
    actions.extend(published.others.iter().filter_map(|slice| delete(slice)));
    actions
}

/// The slices of the driver on the API server, in the order of their names.
struct Published<'a> {
    /// The slices of the desired pool; all of them if the node has no devices
    ours: Vec<&'a ResourceSlice>,
    /// The slices of other pools
    others: Vec<&'a ResourceSlice>,
}

impl<'a> Published<'a> {
    fn new(existing: &'a [ResourceSlice], desired: &[ResourceSliceSpec]) -> Self {
        let mut existing: Vec<&ResourceSlice> = existing.iter().collect();
        existing.sort_by(|a, b| a.metadata.name.cmp(&b.metadata.name));
        let pool = desired.first().map(|spec| &spec.pool.name);
        let (mut ours, mut others) = (Vec::new(), Vec::new());
        for slice in existing {
            if pool.is_none_or(|pool| *pool == slice.spec.pool.name) {
                ours.push(slice);
            } else {
                others.push(slice);
            }
        }
        Self { ours, others }
    }

    /// Whether our slices are of one generation and have the desired devices.
    fn is_current(&self, desired: &[ResourceSliceSpec]) -> bool {
        if self.ours.len() != desired.len() {
            return false;
        }
        let newest = generation(&self.ours);
        for (slice, spec) in self.ours.iter().zip(desired) {
            if slice.spec.pool.generation != newest || !is_like(&slice.spec, spec) {
                return false;
            }
        }
        true
    }

    /// Returns the actions that write a new generation.
    fn write(&self, desired: &[ResourceSliceSpec], node: Option<&OwnerReference>) -> Vec<Action> {
        let generation = generation(&self.ours) + 1;
        let mut actions = Vec::new();
        for (at, spec) in desired.iter().enumerate() {
            let mut spec = spec.clone();
            spec.pool.generation = generation;
            keep_times(&mut spec, &self.ours);
            if let Some(slice) = self.ours.get(at) {
                let metadata = slice.metadata.clone();
                actions.push(Action::Replace(Box::new(ResourceSlice { metadata, spec })));
                continue;
            }
            let metadata = ObjectMeta {
                name: Some(name(&spec, at, &self.ours)),
                owner_references: node.map(|node| vec![node.clone()]),
                ..ObjectMeta::default()
            };
            actions.push(Action::Create(Box::new(ResourceSlice { metadata, spec })));
        }
        actions
    }
}

/// Takes over what the existing slices have about the hardware of the devices. An earlier run has published it, and the kernel does not show
/// it.
pub fn keep_attributes(desired: &mut [ResourceSliceSpec], existing: &[ResourceSlice]) {
    let known: Vec<&ResourceSlice> = existing.iter().collect();
    for spec in desired {
        for device in spec.devices.iter_mut().flatten() {
            let is_it = |known: &&Device| known.name == device.name && uuid(known) == uuid(device);
            if let Some(known) = published_devices(&known).find(is_it) {
                device.attributes.clone_from(&known.attributes);
                device.capacity.clone_from(&known.capacity);
                // The capacity may have a request policy, which only a shared device can have.
                device.allow_multiple_allocations = known.allow_multiple_allocations;
            }
        }
    }
}

/// Keeps counting the shares of devices that are shared no longer: claims may still hold some. Each claim then gets the whole capacity, for
/// which the scheduler waits until no share is held. It would give a device that is not shared to a claim at once, because it counts those
/// apart from shares.
pub fn count_shares(desired: &mut [ResourceSliceSpec], existing: &[ResourceSlice]) {
    let existing: Vec<&ResourceSlice> = existing.iter().collect();
    for spec in desired {
        for device in spec.devices.iter_mut().flatten() {
            if device.allow_multiple_allocations.is_none() && was_shared(device, &existing) {
                give_whole(device);
            }
        }
    }
}

fn was_shared(device: &Device, existing: &[&ResourceSlice]) -> bool {
    published_devices(existing).any(|known| {
        known.name == device.name
            && uuid(known) == uuid(device)
            && known.allow_multiple_allocations == Some(true)
    })
}

fn published_devices<'a>(slices: &[&'a ResourceSlice]) -> impl Iterator<Item = &'a Device> {
    let devices = slices.iter().map(|slice| &slice.spec.devices);
    devices.flatten().flatten()
}

fn uuid(device: &Device) -> Option<&str> {
    device.attributes.as_ref()?.get("uuid")?.string.as_deref()
}

fn delete(slice: &ResourceSlice) -> Option<Action> {
    slice.metadata.name.clone().map(Action::Delete)
}

/// Returns the newest generation.
fn generation(slices: &[&ResourceSlice]) -> i64 {
    let generations = slices.iter().map(|slice| slice.spec.pool.generation);
    generations.max().unwrap_or_default()
}

/// Whether the API server has this specification, apart from the generation and from what it adds.
fn is_like(found: &ResourceSliceSpec, desired: &ResourceSliceSpec) -> bool {
    let mut found = found.clone();
    found.pool.generation = desired.pool.generation;
    for device in found.devices.iter_mut().flatten() {
        for taint in device.taints.iter_mut().flatten() {
            taint.time_added = None;
        }
        if device.taints.as_ref().is_some_and(Vec::is_empty) {
            device.taints = None;
        }
    }
    found == *desired
}

/// A taint that exists keeps its time.
fn keep_times(spec: &mut ResourceSliceSpec, slices: &[&ResourceSlice]) {
    for device in spec.devices.iter_mut().flatten() {
        let mut published = published_devices(slices);
        let Some(before) = published.find(|before| before.name == device.name) else {
            continue;
        };
        for taint in device.taints.iter_mut().flatten() {
            let is_it =
                |known: &&DeviceTaint| known.key == taint.key && known.effect == taint.effect;
            let known = before.taints.iter().flatten().find(is_it);
            taint.time_added = known.and_then(|known| known.time_added.clone());
        }
    }
}

/// Returns a name that is not in use. It does not depend on chance, so that a slice is not created twice if the answer of the API server is
/// lost.
fn name(spec: &ResourceSliceSpec, at: usize, used: &[&ResourceSlice]) -> String {
    let mut number = at;
    loop {
        let suffix = format!("-{}-{number}", spec.driver);
        let mut node = spec.node_name.clone().unwrap_or_default();
        node.truncate(MAX_NAME.saturating_sub(suffix.len()));
        let name = format!("{}{suffix}", node.trim_end_matches(['.', '-']));
        let mut used = used.iter();
        if !used.any(|slice| slice.metadata.name.as_ref() == Some(&name)) {
            return name;
        }
        number += 1;
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use proptest::prelude::*;

    use super::*;
    use crate::dra::devices::{ClaimDevice as OurDevice, MpsLimits};
    use crate::dra::slice::specs;
    use crate::dra::slice::tests::{OWNER, device};

    /// Carries out actions as the API server does.
    fn apply(mut slices: Vec<ResourceSlice>, actions: &[Action]) -> Vec<ResourceSlice> {
        for action in actions {
            match action {
                Action::Create(slice) => {
                    assert!(
                        slices
                            .iter()
                            .all(|known| known.metadata.name != slice.metadata.name),
                        "{slice:?}"
                    );
                    slices.push((**slice).clone());
                }
                Action::Replace(slice) => {
                    let known = slices
                        .iter_mut()
                        .find(|known| known.metadata.name == slice.metadata.name)
                        .unwrap();
                    *known = (**slice).clone();
                }
                Action::Delete(name) => {
                    slices.retain(|slice| slice.metadata.name.as_ref() != Some(name))
                }
            }
        }
        for taint in slices
            .iter_mut()
            .flat_map(|slice| slice.spec.devices.iter_mut().flatten())
            .flat_map(|device| device.taints.iter_mut().flatten())
        {
            taint
                .time_added
                .get_or_insert(Time(k8s_openapi::jiff::Timestamp::UNIX_EPOCH));
        }
        slices
    }

    fn many(count: usize) -> Vec<OurDevice> {
        (0..count)
            .map(|at| device(&format!("gpu-{at}"), None))
            .collect()
    }

    #[test]
    fn slices_are_created_once() {
        let desired = specs(&many(65), &OWNER);
        let node = OwnerReference {
            kind: "Node".into(),
            name: "node-1".into(),
            ..OwnerReference::default()
        };
        let actions = plan(&[], &desired, Some(&node));
        let [Action::Create(first), Action::Create(second)] = actions.as_slice() else {
            panic!("{actions:?}")
        };
        assert_eq!(
            first.metadata.name.as_deref(),
            Some("node-1-gpu.nvidia.com-0")
        );
        assert_eq!(second.metadata.owner_references, Some(vec![node]));
        assert_eq!(
            (
                first.spec.pool.generation,
                second.spec.pool.resource_slice_count
            ),
            (1, 2)
        );
        assert_eq!(plan(&apply(vec![], &actions), &desired, None), []);
    }

    #[test]
    fn a_taint_is_one_new_generation_and_keeps_its_time() {
        let (mut devices, owner) = (many(2), OWNER);
        let slices = apply(vec![], &plan(&[], &specs(&devices, &owner), None));
        devices[1].unhealthy = Some("XID 79".into());
        let actions = plan(&slices, &specs(&devices, &owner), None);
        assert!(
            matches!(actions.as_slice(), [Action::Replace(slice)] if slice.spec.pool.generation == 2)
        );
        let slices = apply(slices, &actions);
        devices[1].unhealthy = Some("another reason".into());
        assert_eq!(
            plan(&slices, &specs(&devices, &owner), None),
            [],
            "the reason is not in the slice"
        );
        devices[0].unhealthy = Some("XID 48".into());
        let actions = plan(&slices, &specs(&devices, &owner), None);
        let [Action::Replace(slice)] = actions.as_slice() else {
            panic!("{actions:?}")
        };
        let times: Vec<_> = slice
            .spec
            .devices
            .iter()
            .flatten()
            .map(|it| it.taints.as_ref().unwrap()[0].time_added.is_some())
            .collect();
        assert_eq!(times, [false, true]);
    }

    #[test]
    fn attributes_of_an_earlier_run_are_kept() {
        let (full, owner) = (many(2), OWNER);
        let slices = apply(vec![], &plan(&[], &specs(&full, &owner), None));
        let mut bare = full.clone();
        for device in &mut bare {
            device.attributes.retain(|name, _| *name == "uuid");
            device.capacity.clear();
        }
        let mut desired = specs(&bare, &owner);
        assert_ne!(plan(&slices, &desired, None), []);
        keep_attributes(&mut desired, &slices);
        assert_eq!(plan(&slices, &desired, None), []);
        // Another GPU with the minor number
        bare[0]
            .attributes
            .insert("uuid", crate::dra::devices::Value::Text("GPU-other".into()));
        let mut desired = specs(&bare, &owner);
        keep_attributes(&mut desired, &slices);
        assert_eq!(
            desired[0].devices.as_ref().unwrap()[0]
                .attributes
                .as_ref()
                .unwrap()
                .len(),
            1
        );
    }

    #[test]
    fn a_device_that_was_shared_is_given_as_a_whole() {
        let (alone, owner) = (many(2), OWNER);
        let mut shared = alone.clone();
        shared[0].mps = Some(MpsLimits {
            memory: Some(8 << 30),
            thread_percentage: 100,
        });
        let slices = apply(vec![], &plan(&[], &specs(&shared, &owner), None));
        let counted = |devices: &[OurDevice]| {
            let mut desired = specs(devices, &owner);
            count_shares(&mut desired, &slices);
            desired
        };
        let desired = counted(&alone);
        let devices = desired[0].devices.as_ref().unwrap();
        let memory = &devices[0].capacity.as_ref().unwrap()["memory"];
        let policy = memory.request_policy.as_ref().unwrap();
        assert_eq!(policy.default.as_ref(), Some(&memory.value));
        assert_eq!(policy.valid_values, Some(vec![memory.value.clone()]));
        assert_eq!(
            devices[1],
            specs(&alone, &owner)[0].devices.as_ref().unwrap()[1]
        );
        // The next run knows it from the slices.
        let slices = apply(slices.clone(), &plan(&slices, &desired, None));
        assert_eq!(plan(&slices, &counted(&alone), None), []);
        assert_eq!(counted(&shared), specs(&shared, &owner), "shared again");
        let mut other = alone.clone();
        let uuid = crate::dra::devices::Value::Text("GPU-other".into());
        other[0].attributes.insert("uuid", uuid);
        assert_eq!(counted(&other), specs(&other, &owner), "another GPU");
        let mut unknown = alone;
        unknown[0].capacity.clear();
        assert_eq!(
            counted(&unknown),
            specs(&unknown, &owner),
            "nothing to count"
        );
    }

    #[test]
    fn slices_of_others_are_adopted_or_deleted() {
        let desired = specs(&many(1), &OWNER);
        let slice = |name: &str, pool: &str, generation| {
            let mut spec = desired[0].clone();
            (spec.pool.name, spec.pool.generation, spec.devices) = (pool.into(), generation, None);
            ResourceSlice {
                metadata: ObjectMeta {
                    name: Some(name.into()),
                    ..ObjectMeta::default()
                },
                spec,
            }
        };
        let existing = [
            slice("b", "node-1", 7),
            slice("a", "node-1", 3),
            slice("c", "other", 1),
        ];
        let actions = plan(&existing, &desired, None);
        let [
            Action::Replace(first),
            Action::Delete(second),
            Action::Delete(third),
        ] = actions.as_slice()
        else {
            panic!("{actions:?}")
        };
        assert_eq!(
            (first.metadata.name.as_deref(), first.spec.pool.generation),
            (Some("a"), 8)
        );
        assert_eq!((second.as_str(), third.as_str()), ("b", "c"));
        assert_eq!(
            plan(&apply(existing.to_vec(), &actions), &desired, None),
            []
        );
        assert_eq!(
            plan(&existing, &[], None).len(),
            3,
            "a node without devices has no slices"
        );
    }

    proptest! {
        #[test]
        fn one_plan_is_sufficient(steps in prop::collection::vec((0..140usize, any::<bool>(), any::<bool>()), 1..6)) {
            let mut slices = Vec::new();
            for (count, has_unhealthy, has_taints) in steps {
                let mut devices = many(count);
                if let Some(device) = devices.first_mut().filter(|_| has_unhealthy) {
                    device.unhealthy = Some("unhealthy".into());
                }
                let desired = specs(&devices, &crate::dra::slice::Owner { has_taints, ..OWNER });
                let before = generation(&slices.iter().collect::<Vec<_>>());
                let actions = plan(&slices, &desired, None);
                slices = apply(slices, &actions);
                prop_assert_eq!(plan(&slices, &desired, None), vec![]);
                let after: Vec<i64> = slices.iter().map(|slice| slice.spec.pool.generation).collect();
                prop_assert!(after.iter().all(|generation| *generation >= before && *generation == after[0]));
                prop_assert_eq!(slices.len(), desired.len());
            }
        }
    }
}
