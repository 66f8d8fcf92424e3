//! The fake kubelet of the tests as a program: `fake-kubelet DIR`, where `DIR` takes the place of `/var/lib/kubelet`.
//!
//! It prints a line for each event, and reads commands from stdin: `start`, `stop`, `cut RESOURCE`, `hang on|off`, `refuse N`,
//! `allocate RESOURCE ID…`, `prefer RESOURCE N ID…`, `podresources RESOURCE ID…`, `devices RESOURCE`. It ends with stdin.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stdout,
    clippy::disallowed_methods,
    clippy::disallowed_types,
    unreachable_pub,
    dead_code,
    missing_docs,
    reason = "a tool for tests"
)]

#[path = "../tests/fake_kubelet/mod.rs"]
mod fake_kubelet;

use std::io::BufRead;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fake_kubelet::{Event, FakeKubelet};

type Slot = Arc<Mutex<Option<FakeKubelet>>>;

fn main() {
    let dir = PathBuf::from(std::env::args_os().nth(1).expect("usage: fake-kubelet DIR"));
    let slot: Slot = Arc::new(Mutex::new(Some(FakeKubelet::start(&dir))));
    let printed = Arc::clone(&slot);
    std::thread::spawn(move || print_events(&printed));
    for line in std::io::stdin().lock().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split_whitespace().collect();
        let mut slot = slot.lock().unwrap();
        match (&*words, &*slot) {
            (["start"], _) => {
                *slot = None;
                *slot = Some(FakeKubelet::start(&dir));
            }
            (["stop"], _) => *slot = None,
            ([], _) => {}
            (words, Some(kubelet)) => println!("{}", command(kubelet, words)),
            (_, None) => println!("error: the kubelet is stopped"),
        }
    }
}

fn command(kubelet: &FakeKubelet, words: &[&str]) -> String {
    let strings = |ids: &[&str]| ids.iter().map(|id| (*id).to_owned()).collect::<Vec<_>>();
    match words {
        ["hang", value] => {
            kubelet.state().hangs = *value == "on";
            "ok".to_owned()
        }
        ["refuse", times] => {
            kubelet.state().refuses = times.parse().unwrap();
            "ok".to_owned()
        }
        ["podresources", resource, ids @ ..] => {
            kubelet.state().more_devices.insert((*resource).to_owned(), strings(ids));
            "ok".to_owned()
        }
        ["devices", resource] => match kubelet.state().resources.get(*resource) {
            Some(known) => format!("devices {resource}{}", devices(&known.devices)),
            None => format!("devices {resource}"),
        },
        [_, resource, ..] if !kubelet.state().is_registered(resource) => format!("error: {resource} is not registered"),
        ["cut", resource] => {
            kubelet.cut(resource);
            "ok".to_owned()
        }
        ["allocate", resource, ids @ ..] => match kubelet.allocate(resource, &[&strings(ids)]) {
            Ok(answer) => format!("allocated {:?}", answer.container_responses),
            Err(status) => format!("refused {:?} {}", status.code(), status.message()),
        },
        ["prefer", resource, size, ids @ ..] => {
            match kubelet.prefer(resource, &[(&strings(ids), &[], size.parse().unwrap())]) {
                Ok(preferred) => format!("preferred {}", preferred.concat().join(" ")),
                Err(status) => format!("refused {:?} {}", status.code(), status.message()),
            }
        }
        _ => "error: unknown command".to_owned(),
    }
}

fn devices(devices: &std::collections::BTreeMap<String, bool>) -> String {
    let word = |healthy: bool| if healthy { "Healthy" } else { "Unhealthy" };
    devices.iter().map(|(id, healthy)| format!(" {id}={}", word(*healthy))).collect()
}

fn print_events(slot: &Slot) {
    loop {
        std::thread::sleep(Duration::from_millis(20));
        let slot = slot.lock().unwrap();
        let Some(kubelet) = &*slot else { continue };
        let events: Vec<_> = kubelet.state().events.drain(..).collect();
        for (_, event) in events {
            println!("{}", line(&event));
        }
    }
}

fn line(event: &Event) -> String {
    match event {
        Event::Called { resource } => format!("called {resource}"),
        Event::Registered { resource, endpoint } => format!("registered {resource} {endpoint}"),
        Event::Refused { resource, error } => format!("refused {resource} {error}"),
        Event::List { resource, devices: found } => format!("list {resource}{}", devices(found)),
        Event::Ended { resource } => format!("ended {resource}"),
    }
}
