//! The record of a call, as `why` reads and prints it, and a record with the names and findings of a container.

use std::path::Path;
use std::time::SystemTime;

use base::report::Finding;
use findings::catalog;
use oci_nvidia_hook::testing::cli::why::to_text;
use oci_nvidia_hook::testing::record::{Outcome, Pod, Record};

use super::{check_line, text};

/// A record that can be read can be printed, and one that was written can be read.
pub fn run(data: &[u8]) {
    if let Ok(record) = Record::parse(data) {
        let shown = to_text(&record);
        let requirements = record
            .asked
            .as_ref()
            .map_or(0, |asked| asked.requirements.len());
        let most = 6 + requirements + record.devices.len() + 2 * record.findings.len();
        assert!(
            shown.lines().count() <= most,
            "{} lines:\n{shown}",
            shown.lines().count()
        );
        assert!(
            !shown.contains(|c: char| c.is_control() && c != '\n'),
            "{shown:?}"
        );
        let again = Record::parse(&serde_json::to_vec(&record).unwrap()).expect("what was printed");
        assert_eq!(to_text(&again), shown);
    }
    let text = text(data);
    let mut words = text.split('\0');
    let mut word = || words.next().unwrap_or_default().to_owned();
    let mut record = Record::begin("prestart", SystemTime::UNIX_EPOCH);
    let pod = Pod {
        name: word(),
        namespace: word(),
        container: word(),
    };
    record.name_container(word(), pod, Path::new("/nowhere"));
    (0..70).for_each(|_| record.add_finding(&Finding::new(&catalog::CONFIG, word(), word())));
    record.end(Outcome::Failed, word());
    // The same finding counts once.
    assert!(record.findings.len() <= 64);
    record
        .findings
        .iter()
        .for_each(|said| check_line(&said.what));
    record
        .findings
        .iter()
        .for_each(|said| check_line(&said.fix));
    let again = Record::parse(&serde_json::to_vec_pretty(&record).unwrap()).expect("its own");
    assert_eq!(again, record);
    assert!(to_text(&record).starts_with("container "));
}
