//! Writes the series in the format of OpenMetrics, which Prometheus reads.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use super::series::{METRICS, Series, XID_ERRORS};

/// The value of `Content-Type` for the text.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The name of the histogram.
pub const LATENCY: &str = "onh_allocate_duration_seconds";

/// Returns the text.
///
/// # Errors
/// None, because writing to memory does not fail.
pub fn text(series: Series, latency: Histogram) -> Result<String, fmt::Error> {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Collected(series)));
    registry.register(LATENCY, "Time to answer the kubelet's Allocate", latency);
    let mut text = String::new();
    encode(&mut text, &registry)?;
    Ok(text)
}

#[derive(Debug)]
struct Collected(Series);

impl Collector for Collected {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        for metric in METRICS {
            let Some(series) = self.0.get(&metric) else { continue };
            let is_counter = metric == XID_ERRORS;
            let kind = if is_counter { MetricType::Counter } else { MetricType::Gauge };
            let mut family = encoder.encode_descriptor(metric.name, &format!("{}.", metric.help), None, kind)?;
            for (labels, value) in series {
                let mut one = family.encode_family(labels)?;
                match is_counter {
                    true => one.encode_counter::<NoLabelSet, _, f64>(value, None)?,
                    false => one.encode_gauge(value)?,
                }
            }
        }
        Ok(())
    }
}
