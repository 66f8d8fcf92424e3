//! Encodes the D-Bus method calls to systemd that the hook needs, and decodes the replies. Pure.
//!
//! A D-Bus library would add a bus connection and an executor; these messages have a fixed form and use systemd's private
//! socket. The wire format: <https://dbus.freedesktop.org/doc/dbus-specification.html#message-protocol>

use crate::oci::device_rules::DeviceRule;

/// The number of bytes at the start of a message that contain its length.
pub(super) const HEAD: usize = 16;
/// Upper limit for a message in bytes; replies to these calls are much shorter.
const MAX_MESSAGE: usize = 64 * 1024;

const METHOD_CALL: u8 = 1;
const METHOD_RETURN: u8 = 2;
const ERROR: u8 = 3;

const MANAGER_PATH: &str = "/org/freedesktop/systemd1";
const MANAGER: &str = "org.freedesktop.systemd1.Manager";

/// A received message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Received {
    /// A signal, or a reply to another call
    Other,
    /// The returned values of the call
    Done(Body),
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

/// Converts a length to D-Bus; the messages here are far below the limit.
fn length(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}

/// `SetUnitProperties(unit, runtime, DeviceAllow=…)`, which adds to the list that the unit has.
/// <https://www.freedesktop.org/software/systemd/man/latest/org.freedesktop.systemd1.html>
pub(super) fn set_device_allow(serial: u32, unit: &str, rules: &[DeviceRule]) -> Vec<u8> {
    let mut body = Writer::default();
    body.string(unit);
    body.u32(1); // runtime: until the unit is removed
    body.array(|properties| {
        properties.string("DeviceAllow");
        properties.signature("a(ss)");
        properties.array(|entries| {
            for rule in rules {
                entries.align(8);
                // systemd 240 and newer takes the numbers from this path; the node need not exist. Older versions open it.
                entries.string(&format!("/dev/char/{}:{}", rule.major, rule.minor));
                entries.string("rw");
            }
        });
    });
    let method = [MANAGER_PATH, MANAGER, "SetUnitProperties"];
    call(serial, method, "sba(sv)", &body.0)
}

/// `Get(interface, property)` for a scope.
pub(super) fn get_property(serial: u32, unit: &str, property: &str) -> Vec<u8> {
    let path = format!("/org/freedesktop/systemd1/unit/{}", escape(unit));
    get(serial, &path, "org.freedesktop.systemd1.Scope", property)
}

/// `Get(interface, property)` for the version of systemd.
pub(super) fn get_version(serial: u32) -> Vec<u8> {
    get(serial, MANAGER_PATH, MANAGER, "Version")
}

fn get(serial: u32, path: &str, interface: &str, property: &str) -> Vec<u8> {
    let mut body = Writer::default();
    body.string(interface);
    body.string(property);
    let method = [path, "org.freedesktop.DBus.Properties", "Get"];
    call(serial, method, "ss", &body.0)
}

/// Escapes a unit name for an object path: systemd writes a leading digit, and all bytes except letters and digits, as `_xx`.
fn escape(unit: &str) -> String {
    let mut escaped = String::new();
    for (at, byte) in unit.bytes().enumerate() {
        if byte.is_ascii_alphabetic() || byte.is_ascii_digit() && at > 0 {
            escaped.push(byte.into());
        } else {
            escaped.push_str(&format!("_{byte:02x}"));
        }
    }
    escaped
}

/// Encodes a method call: object path, interface and method; the signature of its parameters, and their bytes.
fn call(
    serial: u32,
    [path, interface, method]: [&str; 3],
    signature: &str,
    body: &[u8],
) -> Vec<u8> {
    let mut message = Writer(vec![b'l', METHOD_CALL, 0, 1]);
    message.u32(length(body.len()));
    message.u32(serial);
    message.array(|fields| {
        let texts = [
            (1, "o", path),
            (2, "s", interface),
            (3, "s", method),
            (6, "s", "org.freedesktop.systemd1"),
        ];
        for (code, kind, value) in texts {
            fields.align(8);
            fields.0.push(code);
            fields.signature(kind);
            fields.string(value);
        }
        fields.align(8);
        fields.0.push(8);
        fields.signature("g");
        fields.signature(signature);
    });
    message.align(8);
    message.0.extend(body);
    message.0
}

/// Returns the string in the reply to [`get_property`].
pub(super) fn text_property(body: &Body) -> Option<String> {
    let at = body.after_signature("s")?.next_multiple_of(4);
    let length = read_u32(&body.0, at)?;
    let text = body
        .0
        .get(at + 4..at.checked_add(4)?.checked_add(length)?)?;
    Some(String::from_utf8_lossy(text).into_owned())
}

/// Reports whether the list in the reply to [`get_property`] is empty.
pub(super) fn is_empty_list(body: &Body, signature: &str) -> Option<bool> {
    let at = body.after_signature(signature)?.next_multiple_of(4);
    Some(read_u32(&body.0, at)? == 0)
}

/// The returned values of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Body(Vec<u8>);

impl Body {
    /// Returns the offset of the value of a variant of this type, without its padding.
    fn after_signature(&self, signature: &str) -> Option<usize> {
        let length = usize::from(*self.0.first()?);
        let end = length.checked_add(1)?;
        if self.0.get(1..end)? != signature.as_bytes() {
            return None;
        }
        Some(end + 1)
    }
}

/// Returns the length of the message with this header; `None` if it is not a message or too long.
pub(super) fn message_length(head: &[u8; HEAD]) -> Option<usize> {
    if head.first() != Some(&b'l') {
        return None;
    }
    let (body, fields) = (read_u32(head, 4)?, read_u32(head, 12)?);
    let length = HEAD
        .checked_add(fields.checked_next_multiple_of(8)?)?
        .checked_add(body)?;
    if length > MAX_MESSAGE {
        return None;
    }
    Some(length)
}

/// Decodes a message with respect to the call of this serial number.
pub(super) fn answer(message: &[u8], serial: u32) -> Option<Received> {
    let kind = *message.get(1)?;
    if !matches!(kind, METHOD_RETURN | ERROR) {
        return Some(Received::Other);
    }
    let end = HEAD.checked_add(read_u32(message, 12)?)?;
    let (mut at, mut name, mut ours) = (HEAD, String::new(), false);
    while at < end {
        at = at.next_multiple_of(8);
        let code = *message.get(at)?;
        let kind = *message.get(at + 2)?;
        at += 4; // code, and a signature of one letter
        match kind {
            b'u' => {
                ours |= code == 5 && Some(read_u32(message, at)?) == usize::try_from(serial).ok();
                at += 4;
            }
            b's' | b'o' => {
                let length = read_u32(message, at)?;
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
        _ if !ours => Received::Other,
        ERROR => Received::Refused(name),
        _ => {
            let body = message
                .get(end.checked_next_multiple_of(8)?..)
                .unwrap_or_default();
            Received::Done(Body(body.to_vec()))
        }
    })
}

fn read_u32(bytes: &[u8], at: usize) -> Option<usize> {
    let bytes: [u8; 4] = bytes.get(at..at.checked_add(4)?)?.try_into().ok()?;
    usize::try_from(u32::from_le_bytes(bytes)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn head(message: &[u8]) -> [u8; HEAD] {
        message[..HEAD].try_into().unwrap()
    }

    #[test]
    fn a_call_contains_its_length() {
        for count in 0..20 {
            let rules: Vec<_> = (0..count)
                .map(|minor| DeviceRule { major: 195, minor })
                .collect();
            let call = set_device_allow(3, "libpod-0a.scope", &rules);
            assert_eq!(message_length(&head(&call)), Some(call.len()));
            assert_eq!(answer(&call, 3), Some(Received::Other), "it is a call");
        }
        let call = get_property(1, "libpod-0a.scope", "DevicePolicy");
        assert_eq!(message_length(&head(&call)), Some(call.len()));
        assert!(
            call.windows(45)
                .any(|part| part == b"/org/freedesktop/systemd1/unit/libpod_2d0a_2e")
        );
        assert_eq!(escape("0a.scope"), "_30a_2escope");
    }

    /// In the form that systemd sends; `systemd::…` in tests/it tests the real socket.
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
        let empty = Body(Vec::new());
        let done = answer(&message(METHOD_RETURN, 7, "org.freedesktop.systemd1", 1), 1);
        assert_eq!(done, Some(Received::Done(empty.clone())));
        assert_eq!(
            (text_property(&empty), is_empty_list(&empty, "a(ss)")),
            (None, None)
        );
        assert_eq!(
            answer(&message(METHOD_RETURN, 7, "x", 2), 1),
            Some(Received::Other)
        );
        assert_eq!(
            answer(&message(4, 7, "x", 1), 1),
            Some(Received::Other),
            "a signal"
        );
        let refused = answer(
            &message(ERROR, 4, "org.freedesktop.systemd1.NoSuchUnit", 1),
            1,
        );
        assert_eq!(
            refused,
            Some(Received::Refused(
                "org.freedesktop.systemd1.NoSuchUnit".to_owned()
            ))
        );
    }

    #[test]
    fn properties() {
        let body = |bytes: &[u8]| Body(bytes.to_vec());
        let policy = body(b"\x01s\0\0\x04\0\0\0auto\0");
        assert_eq!(text_property(&policy).as_deref(), Some("auto"));
        assert_eq!(is_empty_list(&policy, "a(ss)"), None);
        let list = |length: u8| body(&[b"\x05a(ss)\0\0".as_slice(), &[length, 0, 0, 0]].concat());
        assert_eq!(is_empty_list(&list(0), "a(ss)"), Some(true));
        assert_eq!(is_empty_list(&list(24), "a(ss)"), Some(false));
    }

    proptest! {
        #[test]
        fn never_panics(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            if let Some(Received::Done(body)) = answer(&bytes, 1) {
                text_property(&body);
                is_empty_list(&body, "a(ss)");
            }
            if let Some(head) = bytes.first_chunk() {
                message_length(head);
            }
        }
    }
}
