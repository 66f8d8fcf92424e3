//! Times for people: local ones, and how long ago something was.

use std::time::{Duration, SystemTime};

use base::report::one_line;
use base::sys::local_time;

const MINUTE: u64 = 60;
const HOUR: u64 = 60 * MINUTE;
const DAY: u64 = 24 * HOUR;

/// Parses a time of a record.
pub(super) fn parse(text: &str) -> Option<SystemTime> {
    humantime::parse_rfc3339(text).ok()
}

/// Returns a time of a record as local time with its zone. A text that is not a time stays as it is.
pub(super) fn local(text: &str) -> String {
    parse(text)
        .and_then(local_time::format)
        .unwrap_or_else(|| one_line(text))
}

/// Returns the local time of the day, such as `20:01:03`.
pub(super) fn of_day(time: SystemTime) -> Option<String> {
    local_time::format(time)?
        .split(' ')
        .nth(1)
        .map(str::to_owned)
}

/// Returns how long ago a time was, such as `2 minutes ago`. The clock can have been set back.
pub(super) fn ago(then: SystemTime, now: SystemTime) -> String {
    let seconds = now.duration_since(then).unwrap_or(Duration::ZERO).as_secs();
    let (count, unit) = match seconds {
        0 => return "now".to_owned(),
        1..MINUTE => (seconds, "second"),
        MINUTE..HOUR => (seconds / MINUTE, "minute"),
        HOUR..DAY => (seconds / HOUR, "hour"),
        _ => (seconds / DAY, "day"),
    };
    format!("{count} {unit}{} ago", if count == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_has_one_unit() {
        for (seconds, words) in [
            (0, "now"),
            (1, "1 second ago"),
            (59, "59 seconds ago"),
            (60, "1 minute ago"),
            (3599, "59 minutes ago"),
            (7200, "2 hours ago"),
            (86_400, "1 day ago"),
            (864_000, "10 days ago"),
        ] {
            let now = SystemTime::UNIX_EPOCH + Duration::from_secs(864_000);
            assert_eq!(ago(now - Duration::from_secs(seconds), now), words);
        }
        assert_eq!(
            ago(
                SystemTime::UNIX_EPOCH + Duration::from_secs(1),
                SystemTime::UNIX_EPOCH
            ),
            "now"
        );
        assert_eq!(local("no time\n"), "no time\\n");
    }
}
