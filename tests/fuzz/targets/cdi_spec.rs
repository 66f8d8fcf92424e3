//! A CDI spec of any program, its stamp, and the arguments of our hook in it.

use base::report::one_line;
use cdi_spec::file::{Format, parse};
use nvidia_host::cdi::entry::RootfsEdits;
use nvidia_host::cdi::stamp::Stamp;

use super::{check_error, check_line, text};

/// Uses the bytes as a file, as a stamp, and as arguments with 0 bytes between them.
pub fn run(data: &[u8]) {
    match parse(data) {
        Ok(spec) => {
            for format in [Format::Json, Format::Yaml] {
                let printed = format.print(&spec).unwrap();
                assert_eq!(
                    parse(printed.as_bytes()).expect("what was printed"),
                    spec,
                    "{format:?}"
                );
            }
            if let Err(why) = spec.check() {
                check_line(&one_line(&why));
            }
            Stamp::from_spec(&spec).iter().for_each(check_stamp);
        }
        Err(why) => check_line(&one_line(&why)),
    }
    let text = text(data);
    Stamp::parse(&text).iter().for_each(check_stamp);
    match RootfsEdits::parse(text.split('\0').map(Into::into).collect()) {
        Ok(edits) => {
            let again = edits
                .to_args()
                .map(|args| RootfsEdits::from_entry(&args).expect("its own"));
            assert_eq!(again.unwrap_or_default(), edits);
        }
        Err(error) => check_error(&error),
    }
}

fn check_stamp(stamp: &Stamp) {
    assert!(
        !stamp.driver.contains(',') && !stamp.boot.contains(','),
        "{stamp:?}"
    );
    assert_eq!(Stamp::parse(&stamp.to_text()).as_ref(), Some(stamp));
}
