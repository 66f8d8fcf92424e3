//! Limits the size of a record. A request can be as long as config.json, up to 16 MiB, and `/run` is in memory: systemd and the
//! engines fail if it is full.

use base::json;

use super::{Container, Record, StoredFinding, TimedStep};
use crate::oci::Pod;
use crate::plan::asked::Asked;

/// Upper limit for the file of a record, in bytes.
pub(super) const MAX_SIZE: usize = 32 << 10;

/// Limits for the entries of a list and the characters of a text. The next pair applies if the record is still too large; with
/// the last one it always fits.
const LIMITS: [(usize, usize); 4] = [(64, 2000), (24, 300), (8, 100), (2, 40)];

impl Record {
    /// Returns the record as JSON, shortened to [`MAX_SIZE`]. `None` if the path of its bundle is not UTF-8.
    pub fn to_bytes(&self) -> Option<Vec<u8>> {
        let forms =
            LIMITS.iter().filter_map(|(items, chars)| Some(json::pretty(&self.cut(*items, *chars)).ok()?.into_bytes()));
        forms.into_iter().find(|bytes| bytes.len() <= MAX_SIZE)
    }

    fn cut(&self, items: usize, chars: usize) -> Self {
        let text = |text: &String| cut(text, chars);
        let texts = |list: &[String]| cut_list(list, items, chars);
        let Container { id, name, pod, bundle } = &self.container;
        Self {
            version: self.version,
            hook: text(&self.hook),
            container: Container {
                id: id.clone(),
                name: text(name),
                pod: Pod { name: text(&pod.name), namespace: text(&pod.namespace), container: text(&pod.container) },
                bundle: bundle.clone(),
            },
            stage: text(&self.stage),
            started: text(&self.started),
            since: text(&self.since),
            ended: text(&self.ended),
            pid: self.pid,
            outcome: self.outcome,
            reason: text(&self.reason),
            request: text(&self.request),
            asked: self.asked.as_ref().map(|asked| Asked {
                visible_devices: texts(&asked.visible_devices),
                driver_capabilities: texts(&asked.driver_capabilities),
                requirements: texts(&asked.requirements),
                mig_config_devices: asked.mig_config_devices.as_ref().map(text),
                mig_monitor_devices: asked.mig_monitor_devices.as_ref().map(text),
                imex_channels: texts(&asked.imex_channels),
            }),
            driver: text(&self.driver),
            devices: texts(&self.devices),
            findings: self
                .findings
                .iter()
                .take(items)
                .map(|finding| StoredFinding {
                    id: text(&finding.id),
                    severity: text(&finding.severity),
                    what: text(&finding.what),
                    why: text(&finding.why),
                    fix: text(&finding.fix),
                })
                .collect(),
            steps: self.steps.iter().take(items).map(|step| TimedStep { name: text(&step.name), ..*step }).collect(),
            // All or none: the number of created names does not depend on the request.
            created: if items == LIMITS[0].0 { self.created.clone() } else { Vec::new() },
        }
    }
}

fn cut_list(list: &[String], items: usize, chars: usize) -> Vec<String> {
    let mut kept: Vec<_> = list.iter().take(items).map(|text| cut(text, chars)).collect();
    if list.len() > items {
        kept.push(format!("… and {} more", list.len() - items));
    }
    kept
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
    use crate::record::Outcome;
    use proptest::prelude::*;
    use std::path::Path;
    use std::time::SystemTime;

    #[test]
    fn a_small_record_is_kept_as_it_is() {
        let mut record = Record::begin("prestart", SystemTime::UNIX_EPOCH);
        record.asked = Some(Asked { visible_devices: vec!["0".to_owned(); 64], ..Asked::default() });
        record.end(Outcome::Given, "x".repeat(2000));
        assert_eq!(Record::parse(&record.to_bytes().unwrap()).unwrap(), record);
    }

    #[test]
    fn a_list_says_how_much_of_it_is_gone() {
        let mut record = Record::begin("prestart", SystemTime::UNIX_EPOCH);
        record.asked = Some(Asked { visible_devices: vec!["abcd".to_owned(); 1_000_000], ..Asked::default() });
        let read = Record::parse(&record.to_bytes().unwrap()).unwrap();
        assert_eq!(read.asked.unwrap().visible_devices.last().unwrap(), "… and 999936 more");
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
            record.devices.clone_from(&texts);
            record.asked = Some(Asked {
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
