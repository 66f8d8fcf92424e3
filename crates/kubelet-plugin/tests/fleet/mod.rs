//! Counts the requests of many nodes that publish their devices, with the pauses and the lengths of watches of the driver. Nothing runs and
//! nothing waits: each node is asked for the time of its next request.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::ops::Range;

use kubelet_plugin::dra::pace::{Pace, watch_length};

/// The most requests that the nodes of a cluster may make in a second.
pub const MOST: u64 = 400;
/// The nodes of the cluster.
pub const NODES: u64 = 5_000;

/// Marsaglia's xorshift: each run counts the same requests.
struct Random(u64);

impl Random {
    fn chance(&mut self) -> f64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// The requests in each second, and those that failed to connect.
#[derive(Default)]
pub struct Counts(BTreeMap<u64, u64>);

impl Counts {
    fn add(&mut self, millis: u64, requests: u64) {
        *self.0.entry(millis / 1000).or_default() += requests;
    }

    /// The most requests in a second.
    pub fn peak(&self, seconds: Range<u64>) -> u64 {
        let counts = self.0.range(seconds).map(|(_, count)| *count);
        counts.max().unwrap_or_default()
    }

    /// All requests.
    pub fn sum(&self, seconds: Range<u64>) -> u64 {
        self.0.range(seconds).map(|(_, count)| *count).sum()
    }
}

/// Counts the requests until a time, in seconds. All nodes begin in the first minute, and the API server is away for a while.
pub fn requests(pace: Pace, away: &Range<u64>, end: u64) -> Counts {
    let mut random = Random(0x2545_f491_4f6c_dd1d);
    let mut counts = Counts::default();
    let away = away.start * 1000..away.end * 1000;
    // The next moment at which a node does something, and how often it has failed
    let mut nodes = BinaryHeap::new();
    for _ in 0..NODES {
        let begin = (60_000.0 * random.chance()) as u64;
        nodes.push(Reverse((begin, 0)));
    }
    while let Some(Reverse((now, failures))) = nodes.pop() {
        if now >= end * 1000 {
            continue;
        }
        let pause = |failures, random: &mut Random| {
            let pause = pace.pause(failures, None, random.chance());
            u64::try_from(pause.as_millis()).unwrap()
        };
        if away.contains(&now) {
            counts.add(now, 1);
            let pause = pause(failures + 1, &mut random);
            nodes.push(Reverse((now + pause, failures + 1)));
            continue;
        }
        // A new watch; before it the list, if the node has been disconnected or begins.
        let length = u64::from(watch_length(random.chance())) * 1000;
        let is_renewed = failures == u32::MAX;
        counts.add(now, if is_renewed { 1 } else { 2 });
        if now < away.start && now + length > away.start {
            let pause = pause(1, &mut random);
            nodes.push(Reverse((away.start + pause, 1)));
        } else {
            nodes.push(Reverse((now + length, u32::MAX)));
        }
    }
    counts
}
