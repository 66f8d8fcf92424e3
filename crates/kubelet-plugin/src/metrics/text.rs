//! Writes the series in the text format of Prometheus, which all programs read that collect metrics.

use std::fmt;
use std::io::{self, Write};

use flate2::Compression;
use flate2::write::GzEncoder;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use super::dcgm;
use super::series::{METRICS, MetricKind, Series};

/// The name of the histogram.
pub const LATENCY: &str = "onh_allocate_duration_seconds";

/// Its upper bounds in seconds. The kubelet waits for ten seconds.
const BOUNDS: [f64; 9] = [0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 2.5, 10.0];

/// The value of `Content-Type`.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Creates the histogram.
#[must_use]
pub fn latency() -> Histogram {
    Histogram::new(BOUNDS)
}

/// Returns the text. The crate writes OpenMetrics, which has the same syntax apart from its last line. A counter there has the suffix
/// `_total` in its series only, and a gauge has none, so the series of counters are written as gauges.
///
/// # Errors
/// None, because writing to memory does not fail.
pub fn text(series: Series, latency: Histogram) -> Result<String, fmt::Error> {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Collected(series)));
    registry.register(LATENCY, "Time to answer the kubelet's Allocate", latency);
    let mut text = String::new();
    encode(&mut text, &registry)?;
    let end = text.trim_end_matches("# EOF\n").len();
    text.truncate(end);
    Ok(text)
}

/// Whether a client accepts gzip with this value of `Accept-Encoding` (RFC 9110, section 12.5.3). All programs that collect metrics name
/// it without a weight, so a weight counts as a refusal.
#[must_use]
pub fn accepts_gzip(encodings: &str) -> bool {
    encodings.split(',').any(|name| name.trim() == "gzip")
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
            };
            let mut family =
                encoder.encode_descriptor(metric.name, &format!("{}.", metric.help), None, kind)?;
            for (labels, value) in series {
                if labels.is_empty() {
                    // A family without labels would print "{}".
                    family.encode_gauge(value)?;
                } else {
                    family.encode_family(labels)?.encode_gauge(value)?;
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reasons, models and names of resources come from the driver and from files. The text format escapes three characters.
    #[test]
    fn hostile_labels() {
        let hostile = "a\\b\"c\nd 1.0\n# TYPE e counter\r\0\u{1b}[2J\u{2028}ä}{,=";
        let labels = vec![("uuid", hostile.to_owned()), ("reason", "\\".to_owned())];
        let series = Series::from([(METRICS[9], vec![(labels, 1.0)])]);
        let text = text(series, latency()).unwrap();
        let start = "onh_gpu_health{uuid=\"";
        let lines: Vec<&str> = text
            .split('\n')
            .filter(|line| line.contains(start))
            .collect();
        let escaped = r#"a\\b\"c\nd 1.0\n# TYPE e counter"#;
        let rest = "\r\0\u{1b}[2J\u{2028}ä}{,=";
        let expected = format!("{start}{escaped}{rest}\",reason=\"\\\\\"}} 1.0");
        assert_eq!(lines, [expected]);
        assert!(!text.contains("\n# TYPE e"), "{text}");
    }
}
