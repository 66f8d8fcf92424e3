//! Integration tests: the built hook, against the real kernel and real engines.
//!
//! Each test says what it needs of the machine. Where that is missing the test is reported as ignored, with the
//! reason; with `CI` in the environment it fails instead, so that nothing passes by not running.
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

mod bad_input;
mod captures;
mod cdi;
mod cdi_conformance;
mod cdi_containers;
mod cdi_schema;
mod cgroup;
mod conformance;
mod debian;
mod driver;
mod engine;
mod failure;
mod fuzz_corpus;
mod hostile;
mod hosts;
mod kernels;
mod ldcache;
mod live;
mod packaging;
mod podman;
mod podman_shapes;
mod precreate;
mod shapes;
mod support;

use kernels::Kernel;
use libtest_mimic::{Arguments, Completion, Trial};
use support::Need;

/// Its name, what it needs of the machine, and the test: it fails by panicking.
pub type Test = (&'static str, &'static [Need], fn());

fn main() -> std::process::ExitCode {
    let arguments = Arguments::from_args();
    let tests = bad_input::TESTS
        .iter()
        .chain(captures::TESTS)
        .chain(cdi::TESTS)
        .chain(cdi_conformance::TESTS)
        .chain(cdi_containers::TESTS)
        .chain(cgroup::TESTS)
        .chain(conformance::TESTS)
        .chain(debian::TESTS)
        .chain(failure::TESTS)
        .chain(hostile::TESTS)
        .chain(fuzz_corpus::TESTS)
        .chain(hosts::TESTS)
        .chain(ldcache::TESTS)
        .chain(live::TESTS)
        .chain(packaging::TESTS)
        .chain(podman::TESTS)
        .chain(podman_shapes::TESTS)
        .chain(precreate::TESTS)
        .chain(shapes::TESTS);
    let mut trials: Vec<Trial> = tests.map(|test| trial(test, None)).collect();
    for kernel in kernels::OLD {
        trials.extend(live::TESTS.iter().chain(shapes::TESTS).map(|test| trial(test, Some(*kernel))));
    }
    trials.extend(failure::TESTS.iter().map(|test| trial(test, Some(kernels::OLD[0]))));
    for kernel in kernels::OLD.iter().chain(kernels::PARTIAL) {
        let of_all = live::TESTS.iter().filter(|_| !kernels::OLD.iter().any(|old| old.name == kernel.name)).take(5);
        trials.extend(of_all.chain(&podman::TESTS[..4]).map(|test| trial(test, Some(*kernel))));
    }
    let conclusion = libtest_mimic::run(&arguments, trials);
    support::remove_shared();
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
