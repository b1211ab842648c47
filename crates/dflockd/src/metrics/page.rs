//! The text format. `prometheus-client` writes OpenMetrics, where the name of a counter is cut short in its
//! description; here names are whole everywhere, as in the older format that everything reads.

use std::fmt::{self, Write as _};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeGaugeValue, GaugeValueEncoder, MetricEncoder, NoLabelSet, text,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;

use super::names::{Kind, Metric};

/// What the text is served as.
pub(crate) const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// A value of a metric.
#[derive(Clone, Copy, Debug)]
pub(super) enum Value {
    Whole(u64),
    Real(f64),
}

impl From<u64> for Value {
    fn from(value: u64) -> Self {
        Self::Whole(value)
    }
}

impl From<usize> for Value {
    fn from(value: usize) -> Self {
        Self::Whole(value as u64)
    }
}

impl From<bool> for Value {
    fn from(value: bool) -> Self {
        Self::Whole(value.into())
    }
}

impl From<f64> for Value {
    fn from(value: f64) -> Self {
        Self::Real(value)
    }
}

impl EncodeGaugeValue for Value {
    fn encode(&self, encoder: &mut GaugeValueEncoder<'_>) -> fmt::Result {
        match *self {
            // The library takes no whole number beyond 63 bits.
            Self::Whole(value) if i64::try_from(value).is_err() => {
                #[expect(clippy::cast_precision_loss, reason = "readers have no more precision")]
                let value = value as f64;
                value.encode(encoder)
            }
            Self::Whole(value) => value.encode(encoder),
            Self::Real(value) => value.encode(encoder),
        }
    }
}

/// Lengths of time in buckets.
#[derive(Debug)]
pub(super) struct Buckets {
    /// Bounds and counts; the last bound is infinite.
    pub(super) counts: Vec<(f64, u64)>,
    pub(super) sum: f64,
}

/// One metric with all its values.
#[derive(Debug)]
enum Entry {
    Values(Vec<(Vec<String>, Value)>),
    Histograms(Vec<(Vec<String>, Buckets)>),
}

/// What a scrape has found.
#[derive(Debug, Default)]
pub(super) struct Page {
    entries: Vec<(&'static Metric, Entry)>,
}

impl Page {
    /// A metric without labels.
    pub(super) fn value(&mut self, metric: &'static Metric, value: impl Into<Value>) {
        self.entries.push((metric, Entry::Values(vec![(Vec::new(), value.into())])));
    }

    /// A metric without labels, if its value is known.
    pub(super) fn known(&mut self, metric: &'static Metric, value: Option<impl Into<Value>>) {
        if let Some(value) = value {
            self.value(metric, value);
        }
    }

    /// A metric with one label.
    pub(super) fn by<V: Into<Value>>(
        &mut self,
        metric: &'static Metric,
        values: impl IntoIterator<Item = (impl Into<String>, V)>,
    ) {
        let values = values.into_iter();
        self.values(metric, values.map(|(label, value)| ([label.into()], value)));
    }

    /// A metric with several labels, in the order of its description.
    pub(super) fn values<const N: usize, V: Into<Value>>(
        &mut self,
        metric: &'static Metric,
        values: impl IntoIterator<Item = ([String; N], V)>,
    ) {
        let values = values.into_iter();
        let values = values.map(|(labels, value)| (labels.into(), value.into()));
        self.entries.push((metric, Entry::Values(values.collect())));
    }

    /// A histogram without labels, or with one.
    pub(super) fn histograms(
        &mut self,
        metric: &'static Metric,
        histograms: impl IntoIterator<Item = (Option<&'static str>, Buckets)>,
    ) {
        let histograms = histograms.into_iter();
        let histograms = histograms
            .map(|(label, buckets)| (label.map(str::to_owned).into_iter().collect(), buckets));
        self.entries.push((metric, Entry::Histograms(histograms.collect())));
    }

    /// The text.
    pub(super) fn print(self) -> String {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(self));
        let mut text = String::new();
        if text::encode_registry(&mut text, &registry).is_err() {
            // A string takes all that is written to it, so this is about a value.
            tracing::error!("a metric could not be written");
            let _ = writeln!(text, "# incomplete");
        }
        text
    }
}

impl Collector for Page {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        for (metric, entry) in &self.entries {
            let kind = match metric.kind {
                Kind::Counter => MetricType::Counter,
                Kind::Gauge => MetricType::Gauge,
                Kind::Histogram => MetricType::Histogram,
            };
            let mut encoder = encoder.encode_descriptor(metric.name, metric.help, None, kind)?;
            match entry {
                Entry::Values(values) => {
                    for (labels, value) in values {
                        // What the library calls a counter gets a suffix; here the name has it already.
                        labelled(&mut encoder, metric, labels, |e| e.encode_gauge(value))?;
                    }
                }
                Entry::Histograms(histograms) => {
                    for (labels, Buckets { counts, sum }) in histograms {
                        let total = counts.iter().map(|(_, count)| count).sum();
                        labelled(&mut encoder, metric, labels, |e| {
                            e.encode_histogram::<NoLabelSet>(*sum, total, counts, None)
                        })?;
                    }
                }
            }
        }
        Ok(())
    }
}

fn labelled(
    encoder: &mut MetricEncoder<'_>,
    metric: &Metric,
    values: &[String],
    encode: impl FnOnce(&mut MetricEncoder<'_>) -> fmt::Result,
) -> fmt::Result {
    debug_assert_eq!(metric.labels.len(), values.len(), "labels of {}", metric.name);
    if values.is_empty() {
        return encode(encoder);
    }
    let labels: Vec<_> =
        metric.labels.iter().copied().zip(values.iter().map(String::as_str)).collect();
    encode(&mut encoder.encode_family(&labels)?)
}
