//! Chooses devices for GetPreferredAllocation. Pure, and without errors: an error would fail the pod.
//!
//! Whole GPUs are chosen so that they are close to each other: NVLink, then PCIe switches, then the NUMA node. Replicas are chosen from
//! different GPUs, by the number of their containers.

use std::collections::BTreeMap;

use crate::model::ResourceDevice;
use crate::node::closeness::{self, Closeness};
use crate::settings::values::Allocation;

/// Above this number of candidates, the choice is not exhaustive.
const MAX_EXHAUSTIVE: usize = 16;

/// Returns `size` ids of `available`, with all of `required`. If that is impossible, it returns as many as possible.
#[must_use]
pub fn choose(
    devices: &[ResourceDevice],
    closeness: &Closeness,
    allocation: Allocation,
    available: &[String],
    required: &[String],
    size: usize,
) -> Vec<String> {
    let mut chosen: Vec<&str> = Vec::new();
    for id in required.iter().take(size) {
        if !chosen.contains(&id.as_str()) {
            chosen.push(id);
        }
    }
    let mut rest: Vec<&str> = Vec::new();
    for id in available {
        if !chosen.contains(&id.as_str()) && !rest.contains(&id.as_str()) {
            rest.push(id);
        }
    }
    let candidates = Candidates::new(devices, closeness);
    // The kubelet learns later than the plugin that a device has failed.
    let (healthy, unhealthy): (Vec<_>, Vec<_>) =
        rest.into_iter().partition(|id| candidates.is_healthy(id));
    for rest in [healthy, unhealthy] {
        let missing = size.saturating_sub(chosen.len());
        let more = if candidates.are_replicas(&rest) {
            candidates.spread(&chosen, rest, missing, allocation)
        } else {
            candidates.close(&chosen, rest, missing)
        };
        chosen.extend(more);
    }
    chosen.into_iter().map(str::to_owned).collect()
}

struct Candidates<'a> {
    devices: BTreeMap<&'a str, &'a ResourceDevice>,
    closeness: &'a Closeness,
    /// The number of replicas of each GPU, by UUID
    sizes: BTreeMap<&'a str, usize>,
}

impl<'a> Candidates<'a> {
    fn new(devices: &'a [ResourceDevice], closeness: &'a Closeness) -> Self {
        let mut by_id = BTreeMap::new();
        let mut sizes = BTreeMap::new();
        for device in devices {
            by_id.insert(device.id.as_str(), device);
            *sizes.entry(device.gpu.as_str()).or_default() += 1;
        }
        Self {
            devices: by_id,
            closeness,
            sizes,
        }
    }

    fn is_healthy(&self, id: &str) -> bool {
        let device = self.devices.get(id);
        device.is_none_or(|device| device.unhealthy.is_none())
    }

    /// Returns the GPU of a device. An unknown id counts as a separate GPU.
    fn gpu<'b>(&'b self, id: &'b str) -> &'b str {
        self.devices.get(id).map_or(id, |device| &device.gpu)
    }

    /// Whether two of the ids belong to one GPU: replicas or MIG devices.
    fn are_replicas(&self, ids: &[&str]) -> bool {
        let size = |id| self.sizes.get(self.gpu(id)).copied().unwrap_or_default();
        ids.iter().any(|id| size(id) > 1)
    }

    /// Chooses one id after the other from the GPU with the fewest, or with the most, devices in use.
    fn spread<'b>(
        &self,
        chosen: &[&str],
        rest: Vec<&'b str>,
        count: usize,
        allocation: Allocation,
    ) -> Vec<&'b str> {
        let mut taken: BTreeMap<&str, usize> = BTreeMap::new();
        for id in chosen {
            *taken.entry(self.gpu(id)).or_default() += 1;
        }
        // What is not available is in use.
        let mut in_use = self.sizes.clone();
        for id in rest.iter().chain(chosen) {
            if let Some(count) = in_use.get_mut(self.gpu(id)) {
                *count = count.saturating_sub(1);
            }
        }
        let mut rest = rest;
        let mut more = Vec::new();
        while more.len() < count {
            let key = |id: &str| {
                let gpu = self.gpu(id);
                let own = taken.get(gpu).copied().unwrap_or_default();
                let used = in_use.get(gpu).copied().unwrap_or_default();
                let order = match allocation {
                    Allocation::Packed => usize::MAX - used,
                    Allocation::Distributed => used,
                };
                // A container gets different GPUs first: a second replica of the same GPU gives it
                // nothing.
                (own, order)
            };
            let best = rest.iter().enumerate().min_by_key(|(_, id)| key(id));
            let Some((best, _)) = best else {
                break;
            };
            let id = rest.remove(best);
            *taken.entry(self.gpu(id)).or_default() += 1;
            more.push(id);
        }
        more
    }

    /// Chooses the ids that are closest to each other and to the chosen ones, and leaves close ones for other containers. Of equal
    /// choices, it prefers the first one.
    fn close<'b>(&self, chosen: &[&'b str], rest: Vec<&'b str>, count: usize) -> Vec<&'b str> {
        if count == 0 || count >= rest.len() {
            return rest.into_iter().take(count).collect();
        }
        let all = [chosen, &rest].concat();
        let mut scores = Vec::new();
        for a in &all {
            scores.push(all.iter().map(|b| self.score(a, b)).collect());
        }
        let places = if rest.len() <= MAX_EXHAUSTIVE && all.len() < 64 {
            let search = Search {
                scores: &scores,
                fixed: chosen.len(),
                count,
            };
            search.best()
        } else {
            grow(&scores, chosen.len(), count)
        };
        let ids = places.into_iter().filter_map(|at| all.get(at));
        ids.copied().collect()
    }

    fn score(&self, a: &str, b: &str) -> u32 {
        let pair = (self.gpu(a).to_owned(), self.gpu(b).to_owned());
        if let Some(score) = self.closeness.get(&pair) {
            return *score;
        }
        match self.closeness.get(&(pair.1, pair.0)) {
            Some(score) => *score,
            None => closeness::of_numa_nodes(self.numa_node(a), self.numa_node(b)),
        }
    }

    fn numa_node(&self, id: &str) -> Option<u32> {
        self.devices.get(id)?.numa_node
    }
}

/// The exhaustive search for `count` candidates. The first `fixed` members are part of every choice.
struct Search<'a> {
    scores: &'a [Vec<u32>],
    fixed: usize,
    count: usize,
}

impl Search<'_> {
    /// Returns the set with the closest members. Of equal sets, it is the one that leaves the closest candidates for other containers, and
    /// then the one with the first members.
    fn best(&self) -> Vec<usize> {
        let total = self.scores.len() - self.fixed;
        let all = (1_u32 << total) - 1;
        let mut best: Option<((u32, u32, u32), u32)> = None;
        for set in subsets(total, self.count) {
            let inside = self.inside(set, true);
            if best.is_some_and(|((most, ..), _)| inside < most) {
                continue;
            }
            let value = (inside, self.inside(all & !set, false), set.reverse_bits());
            if best.is_none_or(|(most, _)| value > most) {
                best = Some((value, set));
            }
        }
        let set = best.map_or(0, |(_, set)| set);
        let places = (0..total).filter(|at| set >> at & 1 == 1);
        places.map(|at| at + self.fixed).collect()
    }

    /// The closeness of all pairs of a set, with the fixed members or without them.
    fn inside(&self, set: u32, with_fixed: bool) -> u32 {
        let fixed = if with_fixed {
            (1_u64 << self.fixed) - 1
        } else {
            0
        };
        let mut members = u64::from(set) << self.fixed | fixed;
        let mut sum = 0;
        while let Some(first) = take_first(&mut members) {
            let mut others = members;
            while let Some(other) = take_first(&mut others) {
                sum += pair(self.scores, first, other);
            }
        }
        sum
    }
}

/// Removes the lowest member of a set.
const fn take_first(set: &mut u64) -> Option<usize> {
    if *set == 0 {
        return None;
    }
    let first = set.trailing_zeros() as usize;
    *set &= *set - 1;
    Some(first)
}

/// Returns all sets of `count` of `total` numbers, as bits. `count` is at least 1.
fn subsets(total: usize, count: usize) -> impl Iterator<Item = u32> {
    let above = 1_u32.checked_shl(u32::try_from(count).unwrap_or(u32::MAX));
    std::iter::successors(above.map(|above| above - 1), |set| next(*set))
        .take_while(move |set| set >> total == 0)
}

/// Returns the next larger number with as many bits (Gosper's hack).
const fn next(set: u32) -> Option<u32> {
    let lowest = set & set.wrapping_neg();
    let Some(carried) = set.checked_add(lowest) else {
        return None;
    };
    Some(carried | (set ^ carried) >> 2 >> lowest.trailing_zeros())
}

/// Adds the closest candidate, one after the other.
fn grow(scores: &[Vec<u32>], fixed: usize, count: usize) -> Vec<usize> {
    let mut members: Vec<usize> = (0..fixed).collect();
    while members.len() < fixed + count {
        let gain = |at: usize| -> u32 {
            let scores = members.iter().map(|member| pair(scores, at, *member));
            scores.sum()
        };
        let free = (0..scores.len()).rev().filter(|at| !members.contains(at));
        let Some(best) = free.max_by_key(|at| gain(*at)) else {
            break;
        };
        members.push(best);
    }
    members.split_off(fixed)
}

fn pair(scores: &[Vec<u32>], a: usize, b: usize) -> u32 {
    let score = scores.get(a).and_then(|row| row.get(b));
    score.copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn devices(gpus: u32, replicas: u32, numa: impl Fn(u32) -> Option<u32>) -> Vec<ResourceDevice> {
        let of_gpu = |gpu: u32| {
            let numa_node = numa(gpu);
            (0..replicas).map(move |replica| ResourceDevice {
                id: if replicas == 1 {
                    format!("G{gpu}")
                } else {
                    format!("G{gpu}::{replica}")
                },
                gpu: format!("G{gpu}"),
                numa_node,
                ..ResourceDevice::default()
            })
        };
        (0..gpus).flat_map(of_gpu).collect()
    }

    fn ids(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn closeness(pairs: &[(u32, u32, u32)]) -> Closeness {
        pairs
            .iter()
            .map(|(a, b, score)| ((format!("G{a}"), format!("G{b}")), *score))
            .collect()
    }

    #[test]
    fn close_gpus_and_the_rest_stays_close() {
        let eight = devices(8, 1, |gpu| Some(gpu / 4));
        let all: Vec<String> = eight.iter().map(|device| device.id.clone()).collect();
        let links = closeness(&[(0, 1, 300), (2, 3, 100), (4, 5, 100), (6, 7, 300)]);
        for (available, required, size, expected) in [
            (&all[..], &[][..], 0, &[][..]),
            (&all, &[], 2, &["G0", "G1"]),
            // The pair of the most links, although another one comes first.
            (&all[2..], &[], 2, &["G6", "G7"]),
            (&all, &["G5"], 2, &["G5", "G4"]),
            // The two pairs with the most links, although they are at different NUMA nodes.
            (&all, &[], 4, &["G0", "G1", "G6", "G7"]),
            // One GPU: not one of a pair with many links.
            (&all, &[], 1, &["G2"]),
            (&all[..1], &[], 3, &["G0"]),
            (&all[..2], &["G9"], 2, &["G9", "G0"]),
        ] {
            let chosen = choose(
                &eight,
                &links,
                Allocation::Distributed,
                available,
                &ids(required),
                size,
            );
            assert_eq!(chosen, ids(expected), "{available:?} {required:?} {size}");
        }
    }

    #[test]
    fn replicas_of_different_gpus() {
        let devices = devices(3, 3, |_| None);
        let free = ids(&["G0::1", "G0::2", "G1::0", "G1::1", "G1::2", "G2::2"]);
        for (allocation, size, expected) in [
            (Allocation::Distributed, 1, &["G1::0"][..]),
            (Allocation::Distributed, 3, &["G1::0", "G0::1", "G2::2"]),
            (Allocation::Packed, 1, &["G2::2"]),
            (Allocation::Packed, 2, &["G2::2", "G0::1"]),
            (Allocation::Packed, 4, &["G2::2", "G0::1", "G1::0", "G0::2"]),
        ] {
            let chosen = choose(&devices, &Closeness::new(), allocation, &free, &[], size);
            assert_eq!(chosen, ids(expected), "{allocation:?} {size}");
        }
    }

    #[test]
    fn a_device_that_failed_is_the_last_choice() {
        for (replicas, expected) in [(1, ["G2", "G1"]), (2, ["G2::0", "G1::0"])] {
            let mut devices = devices(3, replicas, |_| None);
            devices
                .iter_mut()
                .filter(|device| device.gpu != "G2")
                .for_each(|device| device.unhealthy = Some("XID 79".into()));
            // The kubelet does not know yet that two of them are lost.
            let available: Vec<String> = devices
                .iter()
                .map(|device| device.id.clone())
                .filter(|id| !id.starts_with("G0") && !id.ends_with("::1"))
                .collect();
            let links = closeness(&[(0, 1, 300)]);
            for allocation in [Allocation::Distributed, Allocation::Packed] {
                assert_eq!(
                    choose(&devices, &links, allocation, &available, &[], 1),
                    ids(&expected[..1])
                );
                assert_eq!(
                    choose(&devices, &links, allocation, &available, &[], 2),
                    ids(&expected)
                );
            }
        }
    }

    #[test]
    fn more_gpus_than_an_exhaustive_search_covers() {
        let many = devices(40, 1, |gpu| Some(gpu % 5));
        let all: Vec<String> = many.iter().map(|device| device.id.clone()).collect();
        let chosen = choose(
            &many,
            &Closeness::new(),
            Allocation::Distributed,
            &all,
            &ids(&["G7"]),
            4,
        );
        assert_eq!(chosen, ids(&["G7", "G2", "G12", "G17"]));
    }

    proptest! {
        #[test]
        fn as_many_as_possible_without_duplicates(
            gpus in 0..17_u32, replicas in 1..4_u32, size in 0..20_usize, first in 0..5_usize, strange in any::<bool>(),
        ) {
            let devices = devices(gpus, replicas, |gpu| Some(gpu % 2));
            let mut available: Vec<String> = devices.iter().map(|device| device.id.clone()).collect();
            if strange {
                available.push("unknown".to_owned());
                available.push("unknown".to_owned());
            }
            let required: Vec<String> = available.iter().take(first).cloned().collect();
            let chosen = choose(&devices, &Closeness::new(), Allocation::Distributed, &available, &required, size);
            let mut distinct = available.clone();
            distinct.dedup();
            prop_assert_eq!(chosen.len(), size.min(distinct.len()));
            let mut sorted = chosen.clone();
            sorted.sort();
            sorted.dedup();
            prop_assert_eq!(sorted.len(), chosen.len());
            prop_assert!(required.iter().take(size).all(|id| chosen.contains(id)));
        }
    }
}
