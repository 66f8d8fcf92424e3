//! `NVIDIA_DRIVER_CAPABILITIES` (the first line) under `supported-driver-capabilities` (the second).

use nvidia_host::capability::{Capabilities, Capability, parse};

use super::{check_error, check_line, text};

/// Parses the lists, and parses the printed result.
pub fn run(data: &[u8]) {
    let text = text(data);
    let mut lines = text.lines();
    let value = lines.next().unwrap_or_default();
    let every = Capabilities::new(&Capability::ALL);
    let supported = lines.next().map_or(Ok(every), Capabilities::supported);
    let supported = supported.unwrap_or_else(|allowed| {
        check_line(&base::report::one_line(&allowed));
        every
    });
    for legacy in [false, true] {
        match parse(Some(value), legacy, supported) {
            Ok(set) => {
                assert!(
                    set.iter().all(|capability| supported.has(capability)),
                    "{set} is more than {supported}"
                );
                let printed = format!("{set},"); // an empty value would request the default
                assert_eq!(
                    parse(Some(&printed), legacy, supported).expect("its own words"),
                    set
                );
                assert_eq!(Capabilities::supported(&set.to_string()), Ok(set));
            }
            Err(error) => check_error(&error),
        }
    }
}
