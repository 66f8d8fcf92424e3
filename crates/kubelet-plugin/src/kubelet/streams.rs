//! Which ListAndWatch streams of a resource are open, and which of them is the kubelet's.
//!
//! The kubelet opens its stream after a registration, so the first stream after one is the kubelet's. Others, for example from a
//! debugging tool, are served but do not count.

use std::sync::Arc;

use tokio::sync::watch;

/// The state of the streams of a resource.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct StreamState {
    /// The kubelet's stream
    pub(super) kubelet: Kubelet,
    /// No list is sent.
    pub(super) silent: bool,
    /// How many streams were opened since the plugin began to register: two, if the kubelet executed two calls of Register
    pub(super) since: u64,
    /// How many streams were opened
    opened: u64,
    /// Streams with a number up to this one end.
    ended: u64,
}

/// The kubelet's stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Kubelet {
    /// The plugin is not registered, or the kubelet has closed the stream.
    #[default]
    None,
    /// The plugin registers, and the next stream is the kubelet's.
    Expected,
    /// The stream with this number is open.
    Open(u64),
}

/// The streams of a resource.
#[derive(Clone, Debug)]
pub(super) struct Streams(Arc<watch::Sender<StreamState>>);

impl Default for Streams {
    fn default() -> Self {
        Self(Arc::new(watch::Sender::new(StreamState::default())))
    }
}

impl Streams {
    /// Returns the current state, and wakes at changes.
    #[must_use]
    pub(super) fn watch(&self) -> watch::Receiver<StreamState> {
        self.0.subscribe()
    }

    /// Declares that the next stream is the kubelet's, unless it has one.
    pub(super) fn expect(&self) {
        self.0.send_modify(|state| {
            if state.kubelet == Kubelet::None {
                state.kubelet = Kubelet::Expected;
            }
        });
    }

    /// Ends all streams.
    pub(super) fn close(&self) {
        self.0.send_modify(|state| {
            state.ended = state.opened;
            state.kubelet = Kubelet::None;
            state.since = 0;
            state.silent = false;
        });
    }

    /// Sends no list until all streams are closed.
    pub(super) fn silence(&self) {
        self.0
            .send_if_modified(|state| !std::mem::replace(&mut state.silent, true));
    }

    /// Adds a stream, which lasts until the returned value is dropped.
    #[must_use]
    pub(super) fn open(&self) -> Open {
        let mut number = 0;
        self.0.send_modify(|state| {
            state.opened += 1;
            number = state.opened;
            match state.kubelet {
                Kubelet::None => return,
                Kubelet::Expected => state.kubelet = Kubelet::Open(number),
                Kubelet::Open(_) => {}
            }
            state.since += 1;
        });
        Open {
            streams: self.clone(),
            number,
        }
    }
}

/// An open stream.
#[derive(Debug)]
pub(super) struct Open {
    streams: Streams,
    number: u64,
}

impl Open {
    /// Reports whether the stream has to end.
    #[must_use]
    pub(super) fn is_ended(&self, state: &StreamState) -> bool {
        state.ended >= self.number
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.streams.0.send_if_modified(|state| {
            let was_kubelet = state.kubelet == Kubelet::Open(self.number);
            if was_kubelet {
                state.kubelet = Kubelet::None;
                state.since = 0;
            }
            was_kubelet
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_stream_after_a_registration_counts() {
        let streams = Streams::default();
        let kubelet = || streams.watch().borrow().kubelet;
        let tool = streams.open();
        assert_eq!(kubelet(), Kubelet::None);
        streams.expect();
        drop(tool);
        assert_eq!(kubelet(), Kubelet::Expected);
        let first = streams.open();
        let second = streams.open();
        assert_eq!(kubelet(), Kubelet::Open(2));
        assert_eq!(streams.watch().borrow().since, 2);
        drop(second);
        streams.expect();
        assert_eq!(kubelet(), Kubelet::Open(2));
        drop(first);
        assert_eq!(
            (kubelet(), streams.watch().borrow().since),
            (Kubelet::None, 0)
        );
    }

    #[test]
    fn closing_ends_the_open_streams_only() {
        let streams = Streams::default();
        let old = streams.open();
        streams.silence();
        streams.close();
        let new = streams.open();
        let state = *streams.watch().borrow();
        assert!(old.is_ended(&state) && !new.is_ended(&state) && !state.silent);
        streams.expect();
        let kubelet = streams.open();
        drop(old);
        assert_eq!(
            streams.watch().borrow().kubelet,
            Kubelet::Open(kubelet.number)
        );
    }
}
