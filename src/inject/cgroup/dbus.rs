//! As much of D-Bus as one call takes: a method call to systemd, and its answer. Pure.
//!
//! A D-Bus library brings a bus and an executor; this is one message of a fixed form, over systemd's own socket.
//! The wire format: <https://dbus.freedesktop.org/doc/dbus-specification.html#message-protocol>

use super::DeviceRule;

/// The first bytes of every message: enough to know how long it is.
pub(super) const HEAD: usize = 16;
/// More than any answer to our call.
const MAX_MESSAGE: usize = 64 * 1024;

const METHOD_CALL: u8 = 1;
const METHOD_RETURN: u8 = 2;
const ERROR: u8 = 3;
/// Of our only call.
const SERIAL: u32 = 1;

/// What a message is to us.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// A signal, or an answer to somebody else: read on.
    Other,
    /// Done.
    Done,
    /// The name of an error, such as `org.freedesktop.systemd1.NoSuchUnit`.
    Refused(String),
}

/// Bytes with D-Bus alignment, little-endian.
#[derive(Default)]
struct Writer(Vec<u8>);

impl Writer {
    fn align(&mut self, to: usize) {
        self.0.resize(self.0.len().next_multiple_of(to), 0);
    }

    fn u32(&mut self, value: u32) {
        self.align(4);
        self.0.extend(value.to_le_bytes());
    }

    fn string(&mut self, text: &str) {
        self.u32(length(text.len()));
        self.0.extend(text.bytes());
        self.0.push(0);
    }

    fn signature(&mut self, text: &str) {
        self.0.push(u8::try_from(text.len()).unwrap_or(u8::MAX));
        self.0.extend(text.bytes());
        self.0.push(0);
    }

    /// An array whose elements are aligned to 8 bytes; the padding before the first is not counted.
    fn array(&mut self, elements: impl FnOnce(&mut Self)) {
        self.u32(0);
        let at = self.0.len() - 4;
        self.align(8);
        let start = self.0.len();
        elements(self);
        let written = length(self.0.len() - start).to_le_bytes();
        for (to, from) in self.0.iter_mut().skip(at).zip(written) {
            *to = from;
        }
    }
}

/// A length that D-Bus can say; none of ours is near the limit.
fn length(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}

/// `SetUnitProperties(unit, runtime, DeviceAllow=…)`, which adds to the list that the unit has.
/// <https://www.freedesktop.org/software/systemd/man/latest/org.freedesktop.systemd1.html>
pub(super) fn set_device_allow(unit: &str, rules: &[DeviceRule]) -> Vec<u8> {
    let mut body = Writer::default();
    body.string(unit);
    body.u32(1); // for as long as the unit is there
    body.array(|properties| {
        properties.string("DeviceAllow");
        properties.signature("a(ss)");
        properties.array(|entries| {
            for rule in rules {
                entries.align(8);
                // systemd reads the numbers from such a path, and needs no node there (since 240; before, the node).
                entries.string(&format!("/dev/char/{}:{}", rule.major, rule.minor));
                entries.string("rw");
            }
        });
    });
    let mut message = Writer(vec![b'l', METHOD_CALL, 0, 1]);
    message.u32(length(body.0.len()));
    message.u32(SERIAL);
    message.array(|fields| {
        for (code, kind, value) in [
            (1, "o", "/org/freedesktop/systemd1"),
            (2, "s", "org.freedesktop.systemd1.Manager"),
            (3, "s", "SetUnitProperties"),
            (6, "s", "org.freedesktop.systemd1"),
        ] {
            fields.align(8);
            fields.0.push(code);
            fields.signature(kind);
            fields.string(value);
        }
        fields.align(8);
        fields.0.push(8);
        fields.signature("g");
        fields.signature("sba(sv)");
    });
    message.align(8);
    message.0.extend(body.0);
    message.0
}

/// How long the message is that begins so; `None` if it is none, or absurdly long.
pub(super) fn message_length(head: &[u8; HEAD]) -> Option<usize> {
    let u32_at = |at: usize| read_u32(head, at, head.first() == Some(&b'B'));
    if !matches!(head.first(), Some(b'l' | b'B')) {
        return None;
    }
    let (body, fields) = (u32_at(4)?, u32_at(12)?);
    let length = HEAD.checked_add(fields.checked_next_multiple_of(8)?)?.checked_add(body)?;
    (length <= MAX_MESSAGE).then_some(length)
}

/// What a whole message says about our call.
pub(super) fn answer(message: &[u8]) -> Option<Answer> {
    let big = message.first() == Some(&b'B');
    let kind = *message.get(1)?;
    if !matches!(kind, METHOD_RETURN | ERROR) {
        return Some(Answer::Other);
    }
    let end = HEAD.checked_add(read_u32(message, 12, big)?)?;
    let (mut at, mut name, mut ours) = (HEAD, String::new(), false);
    while at < end {
        at = at.next_multiple_of(8);
        let code = *message.get(at)?;
        let kind = *message.get(at + 2)?;
        at += 4; // code, and a signature of one letter
        match kind {
            b'u' => {
                ours |= code == 5 && read_u32(message, at, big)? == SERIAL as usize;
                at += 4;
            }
            b's' | b'o' => {
                let length = read_u32(message, at, big)?;
                let text = message.get(at + 4..at.checked_add(4)?.checked_add(length)?)?;
                if code == 4 {
                    name = String::from_utf8_lossy(text).into_owned();
                }
                at += 4 + length + 1;
            }
            b'g' => at += usize::from(*message.get(at)?) + 2,
            _ => return None,
        }
    }
    Some(match kind {
        _ if !ours => Answer::Other,
        ERROR => Answer::Refused(name),
        _ => Answer::Done,
    })
}

fn read_u32(bytes: &[u8], at: usize, big: bool) -> Option<usize> {
    let bytes: [u8; 4] = bytes.get(at..at.checked_add(4)?)?.try_into().ok()?;
    let value = if big { u32::from_be_bytes(bytes) } else { u32::from_le_bytes(bytes) };
    usize::try_from(value).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn head(message: &[u8]) -> [u8; HEAD] {
        message[..HEAD].try_into().unwrap()
    }

    #[test]
    fn a_call_says_its_length() {
        for count in 0..20 {
            let rules: Vec<_> = (0..count).map(|minor| DeviceRule { major: 195, minor }).collect();
            let call = set_device_allow("libpod-0a.scope", &rules);
            assert_eq!(message_length(&head(&call)), Some(call.len()));
            assert_eq!(answer(&call), Some(Answer::Other), "it is a call");
        }
    }

    /// As systemd sent them; the socket's own test is `systemd::…` in tests/it.
    #[test]
    fn answers() {
        let message = |kind: u8, code: u8, text: &str, serial: u32| {
            let mut fields = Writer(vec![b'l', kind, 1, 1]);
            fields.u32(0);
            fields.u32(7);
            fields.array(|fields| {
                fields.0.push(5);
                fields.signature("u");
                fields.u32(serial);
                fields.align(8);
                fields.0.push(code);
                fields.signature("s");
                fields.string(text);
            });
            fields.align(8);
            fields.0
        };
        assert_eq!(answer(&message(METHOD_RETURN, 7, "org.freedesktop.systemd1", 1)), Some(Answer::Done));
        assert_eq!(answer(&message(METHOD_RETURN, 7, "x", 2)), Some(Answer::Other));
        assert_eq!(answer(&message(4, 7, "x", 1)), Some(Answer::Other), "a signal");
        let refused = answer(&message(ERROR, 4, "org.freedesktop.systemd1.NoSuchUnit", 1));
        assert_eq!(refused, Some(Answer::Refused("org.freedesktop.systemd1.NoSuchUnit".to_owned())));
    }

    proptest! {
        #[test]
        fn never_panics(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            answer(&bytes);
            if let Some(head) = bytes.first_chunk() {
                message_length(head);
            }
        }
    }
}
