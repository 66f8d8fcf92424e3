//! Servers on threads of their own, and the state that tests share with them.

use std::fmt::Debug;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;

/// What a test can inspect and change while a server runs.
#[derive(Debug, Default)]
pub struct Shared<S>(Arc<(Mutex<S>, Condvar)>);

impl<S> Clone for Shared<S> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<S: Debug> Shared<S> {
    /// The state does not change until the guard is dropped.
    pub fn lock(&self) -> MutexGuard<'_, S> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state, and wakes those that wait.
    pub fn change<T>(&self, change: impl FnOnce(&mut S) -> T) -> T {
        let result = change(&mut self.lock());
        self.0.1.notify_all();
        result
    }

    /// Waits until the state is so, and returns how long that took.
    #[track_caller]
    pub fn wait(&self, what: &str, most: Duration, is: impl Fn(&S) -> bool) -> Duration {
        let start = Instant::now();
        let mut state = self.lock();
        while !is(&state) {
            let left = most.checked_sub(start.elapsed());
            let left = left.unwrap_or_else(|| panic!("not within {most:?}: {what}: {:#?}", *state));
            let waited = self.0.1.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        start.elapsed()
    }
}

/// A task on a thread of its own. When it is dropped, the task ends and all its connections are closed, as at the end of a process.
#[derive(Debug)]
pub struct Thread<T: Send + 'static = ()> {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<Option<T>>>,
}

impl<T: Send + 'static> Thread<T> {
    /// Runs a task.
    pub fn run<F: Future<Output = T>>(task: impl FnOnce() -> F + Send + 'static) -> Self {
        let (stop, stopped) = oneshot::channel::<()>();
        let thread = std::thread::spawn(move || {
            let runtime = Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                tokio::select! {
                    result = task() => Some(result),
                    _ = stopped => None,
                }
            })
        });
        Self {
            stop: Some(stop),
            thread: Some(thread),
        }
    }

    /// Waits for the end of the task.
    pub fn join(mut self) -> Option<T> {
        self.thread.take().unwrap().join().unwrap()
    }

    /// Ends the task. Returns its result if it has ended by itself.
    pub fn stop(mut self) -> Option<T> {
        drop(self.stop.take());
        self.join()
    }
}

impl Thread {
    /// Starts a server, and waits until it is ready: `start` spawns its tasks.
    pub fn serve<F: Future<Output = ()>>(
        start: impl FnOnce() -> F + Send + 'static,
    ) -> (Self, Handle) {
        let (ready, is_ready) = std::sync::mpsc::channel();
        let thread = Self::run(async move || {
            start().await;
            ready.send(Handle::current()).unwrap();
            std::future::pending().await
        });
        (thread, is_ready.recv().unwrap())
    }
}

impl<T: Send + 'static> Drop for Thread<T> {
    fn drop(&mut self) {
        drop(self.stop.take());
        let result = self.thread.take().map(JoinHandle::join);
        assert!(
            !matches!(result, Some(Err(_))) || std::thread::panicking(),
            "the task has panicked"
        );
    }
}
