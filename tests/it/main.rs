//! Integration tests of the built hook, with the real kernel and real engines.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::disallowed_methods,
    clippy::indexing_slicing,
    missing_docs,
    unreachable_pub,
    reason = "tests run programs, and end at the first surprise"
)]

#[macro_use]
mod harness;

mod advisories;
mod architecture;
mod bad_input;
mod booted;
mod budget;
mod builds;
mod built;
mod cache;
mod captures;
mod cdi;
mod cdi_conformance;
mod cdi_containers;
mod cdi_outdated;
mod cdi_schema;
mod cdi_units;
mod cgroup;
mod command_lines;
mod conformance;
mod containerd;
mod daemon_set;
mod deb;
mod debian;
mod docker;
mod docs;
mod doctor;
mod doctor_container;
mod driver;
mod driver_roots;
mod edit_config;
mod engine;
mod engine_texts;
mod failure;
mod fake_mps;
mod features;
mod findings;
mod fuzz_corpus;
mod golden;
mod gpu_kit;
mod gpudirect;
mod gpus;
mod grants;
mod help;
mod hints;
mod histories;
mod host_states;
mod hostile;
mod hosts;
mod image_layouts;
mod json_schema;
mod kernels;
mod ldcache;
mod ldconfig;
mod lean;
mod licenses;
mod limits;
mod limits_cdi;
mod live;
mod log;
mod migration;
mod mps;
mod mps_containers;
mod mps_pods;
mod mps_unit;
mod nvidia_cli;
mod nvidia_ctk;
mod obs;
mod old_packages;
mod own_nodes;
mod packages;
mod packaging;
mod partial_driver;
mod peers;
mod pictures;
mod pinned;
mod plan;
mod podman;
mod podman_shapes;
mod prepare;
mod ps;
mod readme;
mod real_images;
mod records;
mod removed_stages;
mod repository;
mod restart;
mod rpm;
mod scene;
mod shapes;
mod slowest;
mod soak;
mod start_order;
mod status;
mod streams;
mod style;
mod support;
mod suse_kit;
mod systemd;
mod timeouts;
mod toolkit;
mod units;
mod views;
mod walks;
mod why;
mod wsl;
mod zypper;

use harness::{Need, Selection, Test, part};
use kernels::{Kernel, Scope};
use libtest_mimic::Trial;

macro_rules! tests_of {
    ($($($module:ident)::+),+) => {
        const ALL: &[&[Test]] = &[$($($module::)+TESTS),+];
    };
}

// Tests run in this order. The slowest ones are first: at the end, they would run alone.
tests_of! {
    streams, daemon_set, mps, mps_pods, hostile::blocking, hostile::races, timeouts, cdi_units, doctor_container, own_nodes, podman_shapes,

    advisories, architecture, bad_input, budget, builds, cache, captures, cdi, cdi_conformance, cdi_containers, cdi_outdated, cgroup, command_lines,
    conformance, containerd, deb, debian, docker, docs, doctor, doctor::engines, doctor::faults, doctor::kubelet_plugin, doctor::packages,
    doctor::user, driver_roots, edit_config, engine_texts, failure, fake_mps, features, findings, fuzz_corpus, golden, gpu_kit, gpudirect, gpus, grants,
    help, hints, histories,
    hostile::engine, hostile::environment, hostile::host_sources, hostile::inherited, hostile::ldconfig, hostile::nvml, hostile::paths,
    hostile::processes, hostile::volumes, host_states, hosts, image_layouts, json_schema, ldcache, ldconfig, lean, licenses, limits,
    limits_cdi, live, log, migration, mps_containers, mps_unit, nvidia_cli, nvidia_ctk, obs, packages, packaging, partial_driver, peers, pictures, pinned,
    plan, podman, prepare, ps, readme, real_images, records, removed_stages, repository, restart, rpm, shapes,
    soak, start_order, status, style, suse_kit, systemd, toolkit, units, walks, why, wsl, zypper
}

fn main() -> std::process::ExitCode {
    let mut trials: Vec<Trial> = ALL.iter().copied().flatten().map(trial).collect();
    trials.extend(on_simulated_kernels());
    let mut selection = Selection::of(trials);
    let waits_for_release =
        |trial: &Trial| [part::PACKAGES, part::RELEASES].contains(&trial.kind());
    // Compiling the programs that packages contain takes minutes, in which the other tests can run.
    selection.trials.sort_by_key(waits_for_release);
    if selection.is_complete()
        && selection.trials.iter().any(waits_for_release)
        && [Need::Root, Need::Release]
            .iter()
            .all(|need| need.missing().is_none())
    {
        std::thread::spawn(|| (built::release(), built::nvml_release()));
    }
    // Half of the time, tests wait: for engines, deadlines, and builds that use one core.
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let code = selection.run(2 * cores);
    slowest::print();
    support::remove_shared();
    code
}

/// Returns the trials on simulated kernels. `make test` runs the main path on the kernel that lacks all system calls, and on the one
/// that denies them with another error. The others take the fallbacks of one call each.
fn on_simulated_kernels() -> Vec<Trial> {
    let mut trials = Vec::new();
    for variant in kernels::VARIANTS {
        let [live, with_engines, others]: [&[&'static [Test]]; 3] = match variant.scope {
            Scope::Everything => [
                &[live::TESTS],
                &[&podman::TESTS[..4], &cdi_containers::TESTS[..2]],
                &[
                    features::TESTS,
                    shapes::TESTS,
                    failure::TESTS,
                    podman_shapes::TESTS,
                ],
            ],
            Scope::Starts => [
                &[live::TESTS],
                &[&podman::TESTS[..4], &cdi_containers::TESTS[..2]],
                &[],
            ],
            Scope::MainPath => [&[&live::TESTS[..5]], &[&podman::TESTS[..4]], &[]],
        };
        for test in live.iter().copied().flatten() {
            let trial = trial_on(variant.kernel, test);
            trials.push(if variant.in_make_test {
                trial
            } else {
                trial.with_kind(part::KERNELS)
            });
        }
        for test in with_engines.iter().chain(others).copied().flatten() {
            trials.push(trial_on(variant.kernel, test).with_kind(part::KERNELS));
        }
    }
    trials
}

fn trial(test: &'static Test) -> Trial {
    let name = test.name();
    test.trial(name.clone(), move |run| slowest::timed(&name, run))
}

fn trial_on(kernel: Kernel, test: &'static Test) -> Trial {
    let name = format!("{} {}", kernel.name, test.name());
    test.trial(name.clone(), move |run| {
        kernels::set(Some(kernel));
        slowest::timed(&name, run);
    })
}
