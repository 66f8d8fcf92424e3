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
mod built;
mod cache;
mod captures;
mod cdi;
mod cdi_conformance;
mod cdi_containers;
mod cdi_schema;
mod cgroup;
mod conformance;
mod daemon_set;
mod deb;
mod debian;
mod docker;
mod docs;
mod doctor;
mod doctor_container;
mod driver;
mod driver_roots;
mod engine;
mod engine_texts;
mod failure;
mod features;
mod findings;
mod fuzz_corpus;
mod golden;
mod gpu_kit;
mod gpudirect;
mod gpus;
mod grants;
mod help;
mod hostile;
mod hosts;
mod json_schema;
mod kernels;
mod ldcache;
mod ldconfig;
mod lean;
mod limits;
mod limits_cdi;
mod live;
mod log;
mod nvidia_cli;
mod nvidia_ctk;
mod obs;
mod own_nodes;
mod packages;
mod packaging;
mod peers;
mod plan;
mod podman;
mod podman_drop_in;
mod podman_shapes;
mod poststop;
mod precreate;
mod precreate_podman;
mod prepare;
mod ps;
mod readme;
mod records;
mod repository;
mod rpm;
mod shapes;
mod slowest;
mod soak;
mod status;
mod streams;
mod style;
mod support;
mod systemd;
mod timeouts;
mod toolkit;
mod units;
mod views;
mod walks;
mod why;
mod wsl;
mod zypper;

use harness::{Need, Test};
use kernels::Kernel;
use libtest_mimic::Trial;

macro_rules! tests_of {
    ($($($module:ident)::+),+) => {
        const ALL: &[&[Test]] = &[$($($module::)+TESTS),+];
    };
}

tests_of! {
    advisories, architecture, bad_input, budget, cache, captures, cdi, cdi_conformance, cdi_containers, cgroup, conformance,
    daemon_set, deb, debian, docker, docs, doctor, doctor_container, driver_roots, engine_texts, failure,
    features, findings, fuzz_corpus, golden, gpu_kit, gpudirect, gpus, grants, help, hostile::blocking, hostile::engine, hostile::environment,
    hostile::host_sources, hostile::inherited, hostile::ldconfig, hostile::nvml, hostile::paths, hostile::processes, hostile::races,
    hostile::volumes, hosts, json_schema, ldcache, ldconfig, lean, limits, limits_cdi, live, log, nvidia_cli,
    nvidia_ctk, obs, own_nodes, packages, packaging, peers, plan, podman, podman_drop_in, podman_shapes, poststop, precreate,
    precreate_podman, prepare, ps, readme, records, repository, rpm, shapes, soak, status, streams, style, systemd, timeouts, toolkit,
    units, walks, why, wsl, zypper
}

fn main() -> std::process::ExitCode {
    let mut trials: Vec<Trial> = ALL
        .iter()
        .copied()
        .flatten()
        .map(|test| trial(test, None))
        .collect();
    for kernel in kernels::OLD {
        let on_old = [
            live::TESTS,
            features::TESTS,
            shapes::TESTS,
            &podman::TESTS[..4],
            &cdi_containers::TESTS[..2],
        ];
        trials.extend(
            on_old
                .into_iter()
                .flatten()
                .map(|test| trial(test, Some(*kernel))),
        );
    }
    for kernel in kernels::PARTIAL {
        let on_partial = live::TESTS[..5].iter().chain(&podman::TESTS[..4]);
        trials.extend(on_partial.map(|test| trial(test, Some(*kernel))));
    }
    // These tests take longest.
    let on_oldest = failure::TESTS.iter().chain(podman_shapes::TESTS);
    trials.extend(on_oldest.map(|test| trial(test, Some(kernels::OLD[0]))));
    // Compiling the programs that packages contain takes minutes, in which the other tests can run.
    trials.sort_by_key(|trial| needs_release(trial.name()));
    if harness::runs_everything()
        && [Need::Root, Need::Release]
            .iter()
            .all(|need| need.missing().is_none())
    {
        std::thread::spawn(|| (built::release(), built::compat_release()));
    }
    // Half of the time, tests wait: for engines, deadlines, and builds that use one core.
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let code = harness::run(trials, 2 * cores);
    slowest::print();
    support::remove_shared();
    support::remove_records();
    code
}

/// Returns whether a test belongs to those that wait for these programs.
fn needs_release(test: &str) -> bool {
    let tests = [
        "architecture::the_program_of_compat",
        "budget::",
        "deb::",
        "gpu_kit::",
        "lean::",
        "nvidia_ctk::",
        "readme::",
        "rpm::",
        "zypper::",
    ];
    tests.iter().any(|name| test.starts_with(name))
}

fn trial(test: &'static Test, kernel: Option<Kernel>) -> Trial {
    let name = kernel.map_or_else(
        || test.name(),
        |kernel| format!("{} {}", kernel.name, test.name()),
    );
    let full_name = name.clone();
    test.trial(name, move |run| {
        kernels::set(kernel);
        slowest::timed(&full_name, run);
    })
}
