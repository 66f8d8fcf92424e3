//! A table of node states: the last line of `check` and what a pod of an engine then gets must agree. `check` has not failed if
//! it cannot know the answer, but only for the reasons in [`is_unknowable`].

mod table;
mod world;

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::harness::{Need, part};
use table::{Engine, Pod, State};
use world::{Answer, World};

tests! {
    NEEDS => a_sample;
    NEEDS_ALL => the_whole_table;
}

const NEEDS: &[Need] = &[
    Need::Root,
    Need::Program("cc"),
    Need::Program("unshare"),
    Need::Program("nsenter"),
];
const NEEDS_ALL: &[Need] = &[
    Need::Root,
    Need::Program("cc"),
    Need::Program("unshare"),
    Need::Program("nsenter"),
    Need::Part(part::HOST_STATES),
];

/// The default run has one state of this many.
const SAMPLE: usize = 12;
/// The plugin examines the files of the driver every ten seconds.
const NOTICED: Duration = Duration::from_secs(12);
/// How long `check` and the start may differ: the plugin notices a fault before or after the other.
const AGREED: Duration = Duration::from_secs(20);
/// Most of the time, a state waits.
const THREADS: usize = 8;

fn a_sample() {
    let states = table::all();
    compare(&states.iter().step_by(SAMPLE).collect::<Vec<_>>());
}

fn the_whole_table() {
    let mut states = table::all();
    assert!(states.len() >= 60, "{} states", states.len());
    // ONH_NODE_STATES=TEXT limits the table to the states with this text in their names.
    if let Ok(text) = std::env::var("ONH_NODE_STATES") {
        states.retain(|state| state.name.contains(&text));
    }
    compare(&states.iter().collect::<Vec<_>>());
}

/// Compares some states at a time, and panics with all differences.
fn compare(states: &[&State]) {
    let next = AtomicUsize::new(0);
    let differences = Mutex::new(Vec::new());
    let started = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                while let Some(state) = states.get(next.fetch_add(1, Ordering::Relaxed)) {
                    match difference(state) {
                        Ok(true) => drop(started.fetch_add(1, Ordering::Relaxed)),
                        Ok(false) => {}
                        Err(text) => differences.lock().unwrap().push(text),
                    }
                }
            });
        }
    });
    let mut differences = differences.into_inner().unwrap();
    differences.sort();
    assert!(
        differences.is_empty(),
        "{} differences in {} states:\n{}",
        differences.len(),
        states.len(),
        differences.join("\n")
    );
    let started = started.into_inner();
    assert!(started > 0, "no pod of {} states starts", states.len());
    assert!(
        states.len() < 10 || started < states.len(),
        "each pod starts"
    );
}

/// Returns whether pods start in this state.
///
/// # Errors
/// If `check` prints something else.
fn difference(state: &State) -> Result<bool, String> {
    let world = World::new(state);
    if !state.after.is_empty() {
        world.change(&state.after);
        std::thread::sleep(NOTICED);
    }
    let start = Instant::now();
    loop {
        let (answer, started) = (world.check(), world.start_pods());
        let agree = match &answer {
            Answer::Starts => started.is_ok(),
            Answer::Fails(_) => started.is_err(),
            Answer::Unknown(_) => is_unknowable(state),
        };
        if agree {
            return Ok(started.is_ok());
        }
        if start.elapsed() > AGREED {
            let name = &state.name;
            return Err(format!(
                "{name}: check: {answer:?}, start: {started:?}\n{}",
                world.log()
            ));
        }
        std::thread::sleep(Duration::from_millis(500));
    }
}

/// Whether the answer depends on the pod: with these engines, only the runtime "nvidia" reads the variable. In a pod, the plugin does
/// not see the engine. And without a valid configuration, `check` reports only that.
fn is_unknowable(state: &State) -> bool {
    let mut options = state.options.iter();
    let by_variable =
        options.any(|option| option.contains("envvar") || option.contains("volume-mounts"));
    if state.pod != Pod::No {
        return !by_variable;
    }
    match state.engine {
        _ if state.after.contains("[[[") => true,
        Engine::Docker => !state.has_claims,
        Engine::Crio => false,
        Engine::Containerd | Engine::ContainerdWithoutCdi | Engine::CrioWithoutHook => by_variable,
    }
}
