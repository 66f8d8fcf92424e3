//! The fake kubelet of the tests as a program: `fake-kubelet DIR [--claims]`, where `DIR` takes the place of `/var/lib/kubelet`.
//!
//! It prints a line for each event, and reads commands from stdin: `start`, `stop`, `cut RESOURCE`, `hang on|off`, `refuse N`,
//! `allocate RESOURCE ID…`, `prefer RESOURCE N ID…`, `podresources RESOURCE ID…`, `pod NAMESPACE POD CONTAINER RESOURCE ID…`,
//! `devices RESOURCE`. It ends with stdin.
//!
//! With `--claims`, it also manages claims (DRA), next to an API server whose credentials are in `DIR/kubelet.conf`. More commands then:
//! `claim NAME UID DEVICE…` allocates devices, `prepare DRIVER NAME UID` and `unprepare DRIVER NAME UID` call the driver, `rotate N` writes
//! another certificate with this serial number, and `published` prints the devices on the API server. `start` then deletes the slices of the node too, as a kubelet does.
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

use std::io::BufRead;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fake_api::FakeApi;
use fake_kubelet::dra::DraKubelet;
use fake_kubelet::{Container, Event, FakeKubelet};

type Slot = Arc<Mutex<Option<FakeKubelet>>>;

fn main() {
    let mut arguments = std::env::args_os().skip(1);
    let dir = PathBuf::from(
        arguments
            .next()
            .expect("usage: fake-kubelet DIR [--claims]"),
    );
    let claims = arguments.next().map(|_| Arc::new(Claims::start(&dir)));
    let slot: Slot = Arc::new(Mutex::new(Some(FakeKubelet::start(&dir))));
    let printed = (Arc::clone(&slot), claims.clone());
    std::thread::spawn(move || print_events(&printed.0, printed.1.as_deref()));
    println!("ready");
    for line in std::io::stdin().lock().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split_whitespace().collect();
        if let Some(answer) = claims.as_ref().and_then(|claims| claims.command(&words)) {
            println!("{answer}");
            continue;
        }
        let mut slot = slot.lock().unwrap();
        match (&*words, &*slot) {
            (["start"], _) => {
                *slot = None;
                *slot = Some(FakeKubelet::start(&dir));
                if let Some(claims) = &claims {
                    claims.restart(&dir);
                }
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
            kubelet
                .state()
                .more_devices
                .insert((*resource).to_owned(), strings(ids));
            "ok".to_owned()
        }
        ["pod", namespace, pod, name, resource, ids @ ..] => {
            let container = Container {
                namespace: kept(namespace),
                pod: kept(pod),
                name: kept(name),
                resource: kept(resource),
                ids: strings(ids),
            };
            kubelet.state().containers.push(container);
            "ok".to_owned()
        }
        ["devices", resource] => match kubelet.state().resources.get(*resource) {
            Some(known) => format!("devices {resource}{}", devices(&known.devices)),
            None => format!("devices {resource}"),
        },
        [_, resource, ..] if !kubelet.state().is_registered(resource) => {
            format!("error: {resource} is not registered")
        }
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

/// Tests name their pods in the source. This program keeps the names that it reads until it ends.
fn kept(text: &str) -> &'static str {
    text.to_owned().leak()
}

fn devices(devices: &std::collections::BTreeMap<String, bool>) -> String {
    let word = |healthy: bool| if healthy { "Healthy" } else { "Unhealthy" };
    devices
        .iter()
        .map(|(id, healthy)| format!(" {id}={}", word(*healthy)))
        .collect()
}

/// The part for claims.
struct Claims {
    api: FakeApi,
    /// The kubelet, and the registrations at earlier ones
    kubelet: Mutex<(DraKubelet, usize)>,
}

impl Claims {
    fn start(dir: &Path) -> Self {
        std::fs::create_dir_all(dir).unwrap();
        Self {
            api: FakeApi::start(dir),
            kubelet: Mutex::new((DraKubelet::start(dir), 0)),
        }
    }

    fn restart(&self, dir: &Path) {
        let mut kubelet = self.kubelet.lock().unwrap();
        let registrations = kubelet.1 + kubelet.0.state().registrations;
        self.api.state().wipe();
        *kubelet = (DraKubelet::start(dir), registrations);
    }

    /// Answers a command for claims.
    fn command(&self, words: &[&str]) -> Option<String> {
        let (kubelet, _) = &*self.kubelet.lock().unwrap();
        Some(match words {
            ["published"] => published(&self.api),
            ["rotate", serial] => {
                self.api.certificates.rotate(serial.parse().unwrap());
                "ok".to_owned()
            }
            ["claim", name, uid, devices @ ..] => {
                self.api.state().allocate(name, uid, devices);
                "ok".to_owned()
            }
            ["prepare", driver, name, uid] => match kubelet.try_prepare(driver, &[(name, uid)]) {
                Ok(mut claims) => match claims.remove(*uid) {
                    Some(claim) if claim.error.is_empty() => {
                        let ids = claim
                            .devices
                            .into_iter()
                            .flat_map(|device| device.cdi_device_ids);
                        format!("prepared {}", ids.collect::<Vec<_>>().join(" "))
                    }
                    claim => format!(
                        "refused {}",
                        claim.map(|claim| claim.error).unwrap_or_default()
                    ),
                },
                Err(error) => format!("refused {error}"),
            },
            ["unprepare", driver, name, uid] => {
                match kubelet.try_unprepare(driver, &[(name, uid)]) {
                    Ok(claims) if claims.values().all(|claim| claim.error.is_empty()) => {
                        "unprepared".to_owned()
                    }
                    Ok(claims) => format!("refused {claims:?}"),
                    Err(error) => format!("refused {error}"),
                }
            }
            _ => return None,
        })
    }

    /// A line for each part of the state: the drivers and their registrations, the published devices with their taints, their health, and
    /// the serial number of the driver's certificate.
    fn lines(&self) -> [String; 4] {
        let (kubelet, earlier) = &*self.kubelet.lock().unwrap();
        let state = kubelet.state();
        let drivers: String = state
            .drivers
            .keys()
            .map(|name| format!(" {name}"))
            .collect();
        let asked = self.api.state().asked.last().cloned();
        let serial = asked.map(|asked| asked.serial).unwrap_or_default();
        let health = state
            .health
            .iter()
            .map(|(name, (healthy, why))| format!(" {name}={healthy} {why};"));
        [
            format!("drivers{drivers} {}", earlier + state.registrations),
            published(&self.api),
            format!("health{}", health.collect::<String>()),
            format!("serial {serial:?}"),
        ]
    }
}

/// The published devices with their taints.
fn published(api: &FakeApi) -> String {
    let taint = |is_tainted: bool| if is_tainted { "Tainted" } else { "Free" };
    let devices = api.state().devices();
    let devices = devices
        .iter()
        .map(|(name, tainted)| format!(" {name}={}", taint(*tainted)));
    format!("published{}", devices.collect::<String>())
}

fn print_events(slot: &Slot, claims: Option<&Claims>) {
    let mut printed = [const { String::new() }; 4];
    loop {
        std::thread::sleep(Duration::from_millis(20));
        let now = claims.map(Claims::lines).unwrap_or_default();
        now.iter()
            .zip(&printed)
            .filter(|(now, printed)| now != printed)
            .for_each(|(now, _)| println!("{now}"));
        printed = now;
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
        Event::List {
            resource,
            devices: found,
        } => format!("list {resource}{}", devices(found)),
        Event::Ended { resource } => format!("ended {resource}"),
    }
}
