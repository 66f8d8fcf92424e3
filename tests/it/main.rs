//! Integration tests of the built hook, with the real kernel and real engines.
//!
//! Each test declares what it needs of the machine. If the machine lacks something, the test is reported as ignored, with the
//! reason; with `CI` in the environment it fails instead, so that a test cannot pass without running.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::disallowed_methods,
    clippy::indexing_slicing,
    missing_docs,
    unreachable_pub,
    reason = "tests run programs, and end at the first surprise"
)]

mod architecture;
mod bad_input;
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
mod explain;
mod failure;
mod features;
mod findings;
mod fuzz_corpus;
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
mod podman;
mod podman_shapes;
mod poststop;
mod precreate;
mod precreate_podman;
mod prepare;
mod readme;
mod records;
mod rpm;
mod shapes;
mod soak;
mod status;
mod streams;
mod style;
mod support;
mod systemd;
mod timeouts;
mod walks;
mod why;
mod zypper;

use kernels::Kernel;
use libtest_mimic::{Arguments, Completion, Trial};
use support::Need;

/// The name of a test, its needs, and its function, which fails by panicking.
pub type Test = (&'static str, &'static [Need], fn());

/// All of them.
const ALL: &[&[Test]] = &[
    architecture::TESTS,
    bad_input::TESTS,
    budget::TESTS,
    cache::TESTS,
    captures::TESTS,
    cdi::TESTS,
    cdi_conformance::TESTS,
    cdi_containers::TESTS,
    cgroup::TESTS,
    conformance::TESTS,
    daemon_set::TESTS,
    deb::TESTS,
    debian::TESTS,
    docker::TESTS,
    docs::TESTS,
    doctor::TESTS,
    doctor_container::TESTS,
    driver_roots::TESTS,
    engine_texts::TESTS,
    explain::TESTS,
    failure::TESTS,
    features::TESTS,
    findings::TESTS,
    fuzz_corpus::TESTS,
    gpus::TESTS,
    grants::TESTS,
    help::TESTS,
    hostile::TESTS,
    hosts::TESTS,
    json_schema::TESTS,
    ldcache::TESTS,
    limits::TESTS,
    limits_cdi::TESTS,
    ldconfig::TESTS,
    lean::TESTS,
    live::TESTS,
    log::TESTS,
    nvidia_cli::TESTS,
    nvidia_ctk::TESTS,
    obs::TESTS,
    own_nodes::TESTS,
    packages::TESTS,
    packaging::TESTS,
    peers::TESTS,
    podman::TESTS,
    podman_shapes::TESTS,
    poststop::TESTS,
    precreate::TESTS,
    precreate_podman::TESTS,
    prepare::TESTS,
    readme::TESTS,
    records::TESTS,
    rpm::TESTS,
    shapes::TESTS,
    soak::TESTS,
    status::TESTS,
    streams::TESTS,
    style::TESTS,
    systemd::TESTS,
    timeouts::TESTS,
    walks::TESTS,
    why::TESTS,
    zypper::TESTS,
];

fn main() -> std::process::ExitCode {
    let arguments = Arguments::from_args();
    let mut trials: Vec<Trial> = ALL.iter().copied().flatten().map(|test| trial(test, None)).collect();
    for kernel in kernels::OLD {
        let on_old = [live::TESTS, features::TESTS, shapes::TESTS, &podman::TESTS[..4]];
        trials.extend(on_old.into_iter().flatten().map(|test| trial(test, Some(*kernel))));
    }
    for kernel in kernels::PARTIAL {
        let on_partial = live::TESTS[..5].iter().chain(&podman::TESTS[..4]);
        trials.extend(on_partial.map(|test| trial(test, Some(*kernel))));
    }
    // These tests take longest.
    let on_oldest = failure::TESTS.iter().chain(podman_shapes::TESTS);
    trials.extend(on_oldest.map(|test| trial(test, Some(kernels::OLD[0]))));
    let conclusion = libtest_mimic::run(&arguments, trials);
    support::remove_shared();
    support::remove_records();
    conclusion.exit_code()
}

fn trial((name, needs, test): &'static Test, kernel: Option<Kernel>) -> Trial {
    let (needs, test) = (*needs, *test);
    let name = kernel.map_or_else(|| (*name).to_owned(), |kernel| format!("{} {name}", kernel.name));
    Trial::ignorable_test(name, move || {
        let Some(missing) = needs.iter().find_map(|need| need.missing()) else {
            kernels::set(kernel);
            test();
            return Ok(Completion::Completed);
        };
        if std::env::var_os("CI").is_some() {
            return Err(format!("cannot run on this machine: {missing}").into());
        }
        Ok(Completion::ignored_with(missing))
    })
}
