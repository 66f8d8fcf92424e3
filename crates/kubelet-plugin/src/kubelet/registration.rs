//! Decides what to do about the registration of a resource.
//!
//! Only one question matters: does this kubelet have an open ListAndWatch stream of ours? The kubelet does not report the loss of a
//! registration, and events of the file system can be missed, so the decision depends on the present state alone.

use super::socket::SocketId;

/// The state of a resource's registration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RegistrationState {
    /// The kubelet's socket
    pub kubelet: Option<SocketId>,
    /// Our socket
    pub socket: Socket,
    /// The kubelet's stream
    pub stream: Option<Stream>,
    /// The kubelet that Register was sent to, until it answers
    pub registering: Option<SocketId>,
    /// Another plugin offers GPUs; the value states whether it offers the same resource.
    pub conflict: Option<bool>,
    /// The pause after the last attempt is over.
    pub may_register: bool,
}

impl RegistrationState {
    /// Whether another kubelet has replaced this one.
    fn is_earlier(&self, kubelet: SocketId) -> bool {
        self.kubelet.is_some_and(|current| current != kubelet)
    }
}

/// The state of our socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Socket {
    /// It exists.
    #[default]
    Bound,
    /// It was not created yet, or its file was deleted: a kubelet that starts deletes all files in the directory.
    Missing,
    /// It cannot be created now.
    Unavailable,
}

/// The kubelet's stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream {
    /// The kubelet that the plugin was registered with
    pub kubelet: SocketId,
    /// No list is sent, because another plugin has registered the resource.
    pub silent: bool,
    /// The kubelet has opened two, because it executed a call of Register after its deadline.
    pub doubled: bool,
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Wait for a change.
    Wait,
    /// Create our socket.
    Bind,
    /// Send Register.
    Register,
    /// Give up a Register that was sent to an earlier kubelet.
    Abandon,
    /// End the stream.
    Close,
    /// Keep the stream open, but send no list.
    Silence,
}

/// Returns the next action.
#[must_use]
pub fn decide(facts: &RegistrationState) -> Action {
    if facts
        .registering
        .is_some_and(|kubelet| facts.is_earlier(kubelet))
    {
        return Action::Abandon;
    }
    if facts
        .stream
        .is_some_and(|stream| facts.is_earlier(stream.kubelet))
    {
        return Action::Close;
    }
    if facts.socket == Socket::Missing {
        return Action::Bind;
    }
    if let Some(stream) = facts.stream {
        return keep_or_close(stream, facts.conflict);
    }
    let can_register =
        facts.kubelet.is_some() && facts.socket == Socket::Bound && facts.registering.is_none();
    if can_register && facts.conflict.is_none() && facts.may_register {
        Action::Register
    } else {
        Action::Wait
    }
}

/// If the other plugin offers the same resource, it has taken over the registration: the kubelet sends its requests there, but accepts
/// lists from both. Closing our stream would disconnect the other plugin (Kubernetes issue 127803), and then the node would have no
/// GPU. When the other plugin has gone, the kubelet does not return to our stream, so the resource is registered again.
fn keep_or_close(stream: Stream, conflict: Option<bool>) -> Action {
    match conflict {
        _ if stream.doubled => Action::Close,
        Some(true) if stream.silent => Action::Wait,
        Some(true) => Action::Silence,
        Some(false) => Action::Close,
        None if stream.silent => Action::Close,
        None => Action::Wait,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_state_has_an_action() {
        let dir = tempfile::tempdir().unwrap();
        let socket = |name: &str| {
            let path = dir.path().join(name);
            drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
            SocketId::at(&path).unwrap()
        };
        let (new, old) = (socket("new"), socket("old"));
        let ready = RegistrationState {
            kubelet: Some(new),
            may_register: true,
            ..RegistrationState::default()
        };
        let with = |base: RegistrationState, change: &dyn Fn(&mut RegistrationState)| {
            let mut facts = base;
            change(&mut facts);
            facts
        };
        let stream = |kubelet, silent, doubled| {
            let stream = Stream {
                kubelet,
                silent,
                doubled,
            };
            with(ready, &|it| it.stream = Some(stream))
        };
        let (live, silent) = (stream(new, false, false), stream(new, true, false));
        let mut gone = with(ready, &|it| it.registering = Some(old));
        gone.kubelet = None;
        let mut nothing = with(ready, &|it| it.kubelet = None);
        nothing.socket = Socket::Missing;
        for (name, facts, action) in [
            (
                "no kubelet",
                with(ready, &|it| it.kubelet = None),
                Action::Wait,
            ),
            ("no kubelet and no socket", nothing, Action::Bind),
            (
                "our socket is missing",
                with(ready, &|it| it.socket = Socket::Missing),
                Action::Bind,
            ),
            (
                "our socket cannot be created",
                with(ready, &|it| it.socket = Socket::Unavailable),
                Action::Wait,
            ),
            ("ready", ready, Action::Register),
            (
                "pause",
                with(ready, &|it| it.may_register = false),
                Action::Wait,
            ),
            (
                "other plugin",
                with(ready, &|it| it.conflict = Some(true)),
                Action::Wait,
            ),
            (
                "other plugin, other resource",
                with(ready, &|it| it.conflict = Some(false)),
                Action::Wait,
            ),
            (
                "registering",
                with(ready, &|it| it.registering = Some(new)),
                Action::Wait,
            ),
            (
                "registering with an earlier kubelet",
                with(ready, &|it| it.registering = Some(old)),
                Action::Abandon,
            ),
            ("registering, the kubelet has gone", gone, Action::Wait),
            ("live", live, Action::Wait),
            ("registered twice", stream(new, false, true), Action::Close),
            (
                "live before Register returned",
                with(live, &|it| it.registering = Some(new)),
                Action::Wait,
            ),
            (
                "live, socket deleted",
                with(live, &|it| it.socket = Socket::Missing),
                Action::Bind,
            ),
            (
                "live, kubelet's socket deleted",
                with(live, &|it| it.kubelet = None),
                Action::Wait,
            ),
            (
                "live with an earlier kubelet",
                stream(old, false, false),
                Action::Close,
            ),
            (
                "silent with an earlier kubelet",
                stream(old, true, false),
                Action::Close,
            ),
            (
                "taken over",
                with(live, &|it| it.conflict = Some(true)),
                Action::Silence,
            ),
            (
                "still taken over",
                with(silent, &|it| it.conflict = Some(true)),
                Action::Wait,
            ),
            ("the other plugin has gone", silent, Action::Close),
            (
                "GPUs offered elsewhere",
                with(live, &|it| it.conflict = Some(false)),
                Action::Close,
            ),
        ] {
            assert_eq!(decide(&facts), action, "{name}");
        }
    }
}
