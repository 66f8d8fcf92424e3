//! Writes the series in the formats that Prometheus reads: OpenMetrics, and the older text format.

use std::fmt;
use std::io::{self, Write};

use flate2::Compression;
use flate2::write::GzEncoder;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use super::dcgm;
use super::series::{METRICS, MetricKind, Series};

/// The name of the histogram.
pub const LATENCY: &str = "onh_allocate_duration_seconds";

/// A format of the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpositionFormat {
    /// OpenMetrics 1.0
    OpenMetrics,
    /// The text format of Prometheus, version 0.0.4
    Plain,
}

impl ExpositionFormat {
    /// Returns the value of `Content-Type`.
    #[must_use]
    pub const fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Plain => "text/plain; version=0.0.4; charset=utf-8",
        }
    }

    /// Returns the format that a client prefers with this value of `Accept` (RFC 9110, section 12.5.1), OpenMetrics if it has no
    /// preference.
    #[must_use]
    pub fn preferred(accept: &str) -> Self {
        let ranges: Vec<(String, f64)> = accept.split(',').map(range).collect();
        let open = weight(
            &ranges,
            &["application/openmetrics-text", "application/*", "*/*"],
        );
        let plain = weight(&ranges, &["text/plain", "text/*", "*/*"]);
        if plain > open {
            Self::Plain
        } else {
            Self::OpenMetrics
        }
    }
}

/// Returns the weight of the first of these ranges: the most specific one that matches a type has its weight.
fn weight(ranges: &[(String, f64)], names: &[&str]) -> f64 {
    let found = names
        .iter()
        .find_map(|name| ranges.iter().find(|(range, _)| range == name));
    found.map_or(0.0, |(_, weight)| *weight)
}

/// Whether a client accepts gzip with this value of `Accept-Encoding`, and does not prefer an answer that is not compressed (RFC 9110,
/// section 12.5.3). Without the header, it may not know gzip.
#[must_use]
pub fn accepts_gzip(encodings: &str) -> bool {
    let ranges: Vec<(String, f64)> = encodings.split(',').map(range).collect();
    let gzip = weight(&ranges, &["gzip", "x-gzip", "*"]);
    gzip > 0.0 && gzip >= weight(&ranges, &["identity"])
}

/// Compresses a text. The metrics of 56 MIG devices shrink to a fiftieth.
///
/// # Errors
/// None, because writing to memory does not fail.
pub fn gzip(text: &str) -> io::Result<Vec<u8>> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(text.as_bytes())?;
    encoder.finish()
}

/// Returns a media range or an encoding in lower case without its parameters, and its weight.
fn range(text: &str) -> (String, f64) {
    let mut parts = text.split(';').map(str::trim);
    let name = parts.next().unwrap_or_default().to_ascii_lowercase();
    let weight = parts
        .find_map(|part| part.strip_prefix("q="))
        .map_or(Ok(1.0), str::parse);
    (name, weight.unwrap_or(0.0))
}

/// Returns the text.
///
/// # Errors
/// None, because writing to memory does not fail.
pub fn text(
    series: Series,
    latency: Histogram,
    format: ExpositionFormat,
) -> Result<String, fmt::Error> {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Collected(series)));
    registry.register(LATENCY, "Time to answer the kubelet's Allocate", latency);
    let mut text = String::new();
    encode(&mut text, &registry)?;
    Ok(match format {
        ExpositionFormat::OpenMetrics => text,
        ExpositionFormat::Plain => plain(&text),
    })
}

/// Translates OpenMetrics. The series have the same syntax in both formats; the older one has the name of the series of a counter
/// in its description, and no last line.
fn plain(open: &str) -> String {
    let counters: Vec<&str> = open
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.strip_suffix(" counter"))
        .collect();
    let mut text = String::with_capacity(open.len());
    for line in open.lines().filter(|line| *line != "# EOF") {
        let description = ["# HELP ", "# TYPE "]
            .iter()
            .find_map(|start| Some((*start, line.strip_prefix(start)?)));
        match description.and_then(|(start, rest)| Some((start, rest.split_once(' ')?))) {
            Some((start, (name, rest))) if counters.contains(&name) => {
                text.extend([start, name, "_total ", rest]);
            }
            // The name of that type in the older format
            Some(("# TYPE ", (name, "unknown"))) => text.extend(["# TYPE ", name, " untyped"]),
            _ => text.push_str(line),
        }
        text.push('\n');
    }
    text
}

#[derive(Debug)]
struct Collected(Series);

impl Collector for Collected {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        for metric in METRICS.into_iter().chain(dcgm::metrics()) {
            let Some(series) = self.0.get(&metric) else {
                continue;
            };
            let kind = match metric.kind {
                MetricKind::Gauge => MetricType::Gauge,
                MetricKind::Counter => MetricType::Counter,
                MetricKind::CounterWithoutSuffix => MetricType::Unknown,
            };
            let mut family =
                encoder.encode_descriptor(metric.name, &format!("{}.", metric.help), None, kind)?;
            for (labels, value) in series {
                if labels.is_empty() {
                    // A family without labels would print "{}".
                    write(&mut family, metric.kind, *value)?;
                } else {
                    write(&mut family.encode_family(labels)?, metric.kind, *value)?;
                }
            }
        }
        Ok(())
    }
}

fn write(encoder: &mut MetricEncoder<'_>, kind: MetricKind, value: f64) -> fmt::Result {
    match kind {
        MetricKind::Gauge | MetricKind::CounterWithoutSuffix => encoder.encode_gauge(&value),
        MetricKind::Counter => encoder.encode_counter::<NoLabelSet, _, f64>(&value, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gzip_is_used_if_the_client_accepts_it() {
        for (encodings, accepted) in [
            ("gzip", true),
            ("deflate, GZIP;q=0.5", true),
            ("x-gzip", true),
            ("*", true),
            ("br;q=1.0, *;q=0.1", true),
            ("gzip, identity;q=0.5", true),
            ("", false),
            ("deflate", false),
            ("gzip;q=0", false),
            ("gzip; q=0.000, *", false),
            ("*;q=0", false),
            ("gzip;q=0.5, identity", false),
            ("gzip;q=x", false),
        ] {
            assert_eq!(accepts_gzip(encodings), accepted, "{encodings:?}");
        }
    }

    #[test]
    fn the_format_that_a_client_prefers() {
        for (accept, expected) in [
            ("", ExpositionFormat::OpenMetrics),
            ("*/*", ExpositionFormat::OpenMetrics),
            ("text/plain", ExpositionFormat::Plain),
            ("Text/Plain; version=0.0.4", ExpositionFormat::Plain),
            ("text/*;q=0.2, */*;q=0.1", ExpositionFormat::Plain),
            ("text/html, application/*", ExpositionFormat::OpenMetrics),
            (
                "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1",
                ExpositionFormat::OpenMetrics,
            ),
            (
                "application/openmetrics-text; q=0.5, text/plain; q=0.9",
                ExpositionFormat::Plain,
            ),
            ("text/plain;q=x", ExpositionFormat::OpenMetrics),
        ] {
            assert_eq!(ExpositionFormat::preferred(accept), expected, "{accept}");
        }
    }

    #[test]
    fn the_older_format() {
        let open = "# HELP a_b Text a_b.\n# TYPE a_b counter\na_b_total{c=\"d\"} 1.0\n# HELP e f.\n# TYPE e gauge\ne 2.0\n# EOF\n";
        let expected = "# HELP a_b_total Text a_b.\n# TYPE a_b_total counter\na_b_total{c=\"d\"} 1.0\n# HELP e f.\n# TYPE e gauge\ne 2.0\n";
        assert_eq!(plain(open), expected);
    }

    /// Reasons, models and names of resources come from the driver and from files. The text format escapes three characters.
    #[test]
    fn hostile_labels() {
        let hostile = "a\\b\"c\nd 1.0\n# TYPE e counter\r\0\u{1b}[2J\u{2028}ä}{,=";
        let labels = vec![("uuid", hostile.to_owned()), ("reason", "\\".to_owned())];
        for format in [ExpositionFormat::OpenMetrics, ExpositionFormat::Plain] {
            let series = Series::from([(METRICS[9], vec![(labels.clone(), 1.0)])]);
            let text = text(series, super::super::timed::latency(), format).unwrap();
            let start = "onh_gpu_health{uuid=\"";
            let lines: Vec<&str> = text
                .split('\n')
                .filter(|line| line.contains(start))
                .collect();
            let escaped = r#"a\\b\"c\nd 1.0\n# TYPE e counter"#;
            let rest = "\r\0\u{1b}[2J\u{2028}ä}{,=";
            let expected = format!("{start}{escaped}{rest}\",reason=\"\\\\\"}} 1.0");
            assert_eq!(lines, [expected], "{format:?}");
            assert!(!text.contains("\n# TYPE e"), "{text}");
        }
    }
}
