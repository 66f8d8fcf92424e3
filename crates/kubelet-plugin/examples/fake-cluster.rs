//! The fake kubelet and the fake API server of the tests for claims, as a program: `fake-cluster DIR`, where `DIR` takes the place of
//! `/var/lib/kubelet`, and gets the kubelet's credentials.
//!
//! It prints a line for each event: `registered DRIVER N`, `devices NAME…` with `!` after those that are tainted, and `serial N`, the number
//! of the client's certificate. It reads commands from stdin: `start`, which starts the kubelet again, `devices`, `rotate N`, `allocate NAME UID DEVICE…`,
//! `prepare NAME UID`, `unprepare NAME UID`. It ends with stdin.
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

#[path = "../tests/fake_api/mod.rs"]
mod fake_api;
#[path = "../tests/fake_kubelet/mod.rs"]
mod fake_kubelet;

use std::io::{BufRead, Write};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fake_api::{FakeApi, State};
use fake_kubelet::dra::DraKubelet;

const DRIVER: &str = "gpu.nvidia.com";

struct Cluster {
    dir: PathBuf,
    api: FakeApi,
    kubelet: DraKubelet,
    /// The registrations at earlier kubelets
    registrations: usize,
}

fn main() {
    let dir = PathBuf::from(std::env::args_os().nth(1).expect("usage: fake-cluster DIR"));
    let (api, kubelet) = (FakeApi::start(&dir), DraKubelet::start(&dir));
    print(&format!("credentials {}", api.kubeconfig().display()));
    let cluster = Arc::new(Mutex::new(Cluster {
        dir,
        api,
        kubelet,
        registrations: 0,
    }));
    let watched = Arc::clone(&cluster);
    std::thread::spawn(move || print_events(&watched));
    for line in std::io::stdin().lock().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split_whitespace().collect();
        print(&cluster.lock().unwrap().obey(&words));
    }
}

fn print(line: &str) {
    println!("{line}");
    std::io::stdout().flush().unwrap();
}

impl Cluster {
    fn obey(&mut self, words: &[&str]) -> String {
        match words {
            ["start"] => {
                self.registrations += self.kubelet.state().registrations;
                self.api.state().wipe();
                self.kubelet = DraKubelet::start(&self.dir);
            }
            ["devices"] => return devices(&self.api.state()),
            ["rotate", serial] => self.api.certificates.rotate(serial.parse().unwrap()),
            ["allocate", name, uid, devices @ ..] => self.api.state().allocate(name, uid, devices),
            ["prepare", name, uid] => match self.kubelet.try_prepare(DRIVER, &[(name, uid)]) {
                Ok(mut answers) => {
                    let answer = answers.remove(*uid).unwrap();
                    let ids: Vec<_> = answer
                        .devices
                        .into_iter()
                        .flat_map(|device| device.cdi_device_ids)
                        .collect();
                    return format!("prepared {}{}", ids.join(" "), answer.error);
                }
                Err(error) => return format!("error: {error}"),
            },
            ["unprepare", name, uid] => match self.kubelet.try_unprepare(DRIVER, &[(name, uid)]) {
                Ok(answers) => return format!("unprepared {}", answers[*uid].error),
                Err(error) => return format!("error: {error}"),
            },
            _ => return "error: unknown command".to_owned(),
        }
        "ok".to_owned()
    }
}

fn devices(state: &State) -> String {
    let devices = state.devices();
    let name = |(name, is_tainted): (&String, &bool)| {
        format!(" {name}{}", if *is_tainted { "!" } else { "" })
    };
    format!("devices{}", devices.iter().map(name).collect::<String>())
}

fn print_events(cluster: &Mutex<Cluster>) {
    let mut printed: [String; 3] = Default::default();
    loop {
        std::thread::sleep(Duration::from_millis(20));
        let lines = {
            let cluster = cluster.lock().unwrap();
            let kubelet = cluster.kubelet.state();
            let names: Vec<_> = kubelet.drivers.keys().cloned().collect();
            let state = cluster.api.state();
            let serial = state
                .asked
                .last()
                .map(|asked| asked.serial.clone())
                .unwrap_or_default();
            [
                format!(
                    "registered {} {}",
                    names.join(","),
                    cluster.registrations + kubelet.registrations
                ),
                devices(&state),
                format!("serial {serial:?}"),
            ]
        };
        for (line, before) in lines.into_iter().zip(&mut printed) {
            if line != *before {
                print(&line);
                *before = line;
            }
        }
    }
}
