//! Sorted lists, sets and maps of few things, in little code. Where it sorts, std puts 5 KB into the program for each type,
//! also to collect a set or a map, and the program is read for every container.

use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

/// The items, in order. Equal ones may change places.
#[must_use]
pub fn sorted<T: Ord>(items: Vec<T>) -> Vec<T> {
    BinaryHeap::from(items).into_sorted_vec()
}

/// The items in the order of their keys; those of equal keys stay in theirs.
#[must_use]
pub fn sorted_by_key<T, K: Ord>(items: Vec<T>, key: impl Fn(&T) -> K) -> Vec<T> {
    let keys = sorted(items.iter().map(key).zip(0_usize..).collect());
    let mut items: Vec<_> = items.into_iter().map(Some).collect();
    keys.into_iter().filter_map(|(_, place)| items.get_mut(place)?.take()).collect()
}

/// Each item once.
#[must_use]
pub fn set<T: Ord>(items: impl IntoIterator<Item = T>) -> BTreeSet<T> {
    let mut set = BTreeSet::new();
    set.extend(items);
    set
}

/// Of equal keys the last one.
#[must_use]
pub fn map<K: Ord, V>(items: impl IntoIterator<Item = (K, V)>) -> BTreeMap<K, V> {
    let mut map = BTreeMap::new();
    map.extend(items);
    map
}
