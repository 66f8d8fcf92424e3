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
mod hosts;
mod ldcache;
mod live;
mod packaging;
mod podman;
mod support;

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
        .chain(hosts::TESTS)
        .chain(ldcache::TESTS)
        .chain(live::TESTS)
        .chain(packaging::TESTS)
        .chain(podman::TESTS);
    let trials = tests.map(|(name, needs, test)| trial(name, needs, *test)).collect();
    let conclusion = libtest_mimic::run(&arguments, trials);
    support::remove_shared();
    conclusion.exit_code()
}

fn trial(name: &'static str, needs: &'static [Need], test: fn()) -> Trial {
    Trial::ignorable_test(name, move || {
        let Some(missing) = needs.iter().find_map(|need| need.missing()) else {
            test();
            return Ok(Completion::Completed);
        };
        if std::env::var_os("CI").is_some() {
            return Err(format!("cannot run on this machine: {missing}").into());
        }
        Ok(Completion::ignored_with(missing))
    })
}
