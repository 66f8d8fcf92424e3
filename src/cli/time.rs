//! Times for people: in UTC, as in documents and records, and how long ago something was.

use std::time::{Duration, SystemTime};

use base::report::one_line;

const MINUTE: u64 = 60;
const HOUR: u64 = 60 * MINUTE;
const DAY: u64 = 24 * HOUR;

/// Parses a time of a record.
pub(super) fn parse(text: &str) -> Option<SystemTime> {
    humantime::parse_rfc3339(text).ok()
}

/// Returns a time of a record, such as `2026-01-02 03:04:05 UTC`, and how long ago it was if that is less than a day. A text that is
/// not a time stays as it is.
pub(super) fn utc(text: &str, now: SystemTime) -> String {
    let Some(time) = parse(text) else {
        return one_line(text);
    };
    let seconds = humantime::format_rfc3339_seconds(time).to_string();
    let utc = seconds.replace('T', " ").replace('Z', " UTC");
    match now.duration_since(time) {
        Ok(age) if age.as_secs() < DAY => format!("{utc} ({})", ago(time, now)),
        _ => utc,
    }
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
    }

    #[test]
    fn a_time_has_its_zone() {
        let noon = SystemTime::UNIX_EPOCH + Duration::from_secs(DAY / 2);
        for (text, expected) in [
            (
                "1970-01-01T11:58:00Z",
                "1970-01-01 11:58:00 UTC (2 minutes ago)",
            ),
            ("1969-12-31T11:58:00.123Z", "1969-12-31T11:58:00.123Z"),
            ("1970-01-03T03:04:05.999Z", "1970-01-03 03:04:05 UTC"),
            ("no time\n", "no time\\n"),
        ] {
            assert_eq!(utc(text, noon), expected);
        }
        let later = noon + Duration::from_secs(DAY);
        assert_eq!(
            utc("1970-01-01T11:58:00Z", later),
            "1970-01-01 11:58:00 UTC"
        );
    }
}
