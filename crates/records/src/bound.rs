//! Limits the size of a record. A request can be as long as config.json, up to 16 MiB, and `/run` is in memory: systemd and the
//! engines fail if it is full.

use base::json;
use serde_json::Value;

use super::Record;

/// Upper limit for the file of a record, in bytes.
pub(crate) const MAX_SIZE: usize = 32 << 10;

/// Limits for the entries of a list and the characters of a text. The next pair applies if the record is still too large; with
/// the last one it always fits.
const LIMITS: [(usize, usize); 4] = [(64, 2000), (24, 300), (8, 100), (2, 40)];

impl Record {
    /// Returns the record as JSON, shortened to [`MAX_SIZE`]. `None` if the path of its bundle is not UTF-8.
    pub fn to_bytes(&self) -> Option<Vec<u8>> {
        let text = json::pretty(self).ok()?;
        if text.len() <= MAX_SIZE {
            return Some(text.into_bytes());
        }
        for (items, chars) in LIMITS {
            let bytes = self.shortened(items, chars)?;
            if bytes.len() <= MAX_SIZE {
                return Some(bytes);
            }
        }
        None
    }

    fn shortened(&self, items: usize, chars: usize) -> Option<Vec<u8>> {
        let mut value = serde_json::to_value(self).ok()?;
        shorten(&mut value, items, chars);
        let mut record: Self = serde_json::from_value(value).ok()?;
        (record.container.id, record.container.bundle) =
            (self.container.id.clone(), self.container.bundle.clone());
        Some(json::pretty(&record).ok()?.into_bytes())
    }
}

/// Cuts all lists and texts of a value.
fn shorten(value: &mut Value, items: usize, chars: usize) {
    match value {
        Value::String(text) => *text = cut(text, chars),
        Value::Array(list) => {
            let more = list.len().saturating_sub(items);
            list.truncate(items);
            for item in list.iter_mut() {
                shorten(item, items, chars);
            }
            if more > 0 && list.iter().all(Value::is_string) {
                list.push(format!("… and {more} more").into());
            }
        }
        Value::Object(members) => {
            for member in members.values_mut() {
                shorten(member, items, chars);
            }
        }
        _ => {}
    }
}

fn cut(text: &str, chars: usize) -> String {
    match text.char_indices().nth(chars) {
        Some((end, _)) => format!("{}…", text.get(..end).unwrap_or_default()),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::asked::RecordedRequest;
    use crate::{Outcome, Pod, RecordedDevice, StoredFinding, TimedStep};
    use proptest::prelude::*;
    use std::path::Path;
    use std::time::SystemTime;

    #[test]
    fn a_small_record_is_kept_as_it_is() {
        let mut record = Record::begin("prestart", SystemTime::UNIX_EPOCH);
        record.asked = Some(RecordedRequest {
            visible_devices: vec!["0".to_owned(); 64],
            ..RecordedRequest::default()
        });
        record.end(Outcome::Given, "x".repeat(2000));
        assert_eq!(Record::parse(&record.to_bytes().unwrap()).unwrap(), record);
    }

    #[test]
    fn a_list_says_how_much_of_it_is_gone() {
        let mut record = Record::begin("prestart", SystemTime::UNIX_EPOCH);
        record.asked = Some(RecordedRequest {
            visible_devices: vec!["abcd".to_owned(); 1_000_000],
            ..RecordedRequest::default()
        });
        let read = Record::parse(&record.to_bytes().unwrap()).unwrap();
        assert_eq!(
            read.asked.unwrap().visible_devices.last().unwrap(),
            "… and 999936 more"
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(12))]
        #[test]
        fn no_record_is_larger(
            text in "[a\u{1b}\u{202e}\u{e0041}\u{10ffff}]{0,3000}",
            items in 0..300_usize,
            deep in 0..1000_usize,
        ) {
            let texts = vec![text.clone(); items];
            let mut record = Record::begin("prestart", SystemTime::UNIX_EPOCH);
            let pod = Pod { name: text.clone(), namespace: text.clone(), container: text.clone() };
            let bundle = "/\u{1b}\u{1b}a".repeat(deep);
            record.name_container("i".repeat(200), pod, Path::new(&bundle));
            record.container.name.clone_from(&text);
            record.request.clone_from(&text);
            record.driver.clone_from(&text);
            record.devices = texts.iter().map(|text| RecordedDevice { uuid: text.clone(), ..RecordedDevice::default() }).collect();
            record.asked = Some(RecordedRequest {
                features: Vec::new(),
                visible_devices: texts.clone(),
                driver_capabilities: texts.clone(),
                requirements: texts.clone(),
                mig_config_devices: Some(text.clone()),
                mig_monitor_devices: Some(text.clone()),
                imex_channels: texts,
            });
            record.findings = vec![
                StoredFinding { id: text.clone(), severity: text.clone(), what: text.clone(), why: text.clone(), fix: text.clone() };
                items
            ];
            record.steps = vec![TimedStep { name: text.clone(), milliseconds: 1.0 }; items];
            record.end(Outcome::Failed, text);
            let bytes = record.to_bytes().unwrap();
            prop_assert!(bytes.len() <= MAX_SIZE, "{}", bytes.len());
            prop_assert_eq!(Record::parse(&bytes).unwrap().container.bundle, record.container.bundle);
        }
    }
}
