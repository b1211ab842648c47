//! The text format, read strictly: what is not as it must be is a failure of the server.

use std::collections::{BTreeMap, BTreeSet};

use dflockd::metrics::{Kind, METRICS, Metric};

/// Names and values of labels, in their order.
type Labels = Vec<(String, String)>;

/// A page of metrics.
pub(super) struct Scrape {
    /// By name, with the suffixes of histograms, then by labels.
    samples: BTreeMap<String, BTreeMap<Labels, f64>>,
    pub(super) families: BTreeSet<String>,
}

impl Scrape {
    /// Reads and checks a page.
    #[track_caller]
    pub(super) fn parse(text: &str) -> Self {
        assert!(text.ends_with('\n'), "the last line has an end");
        let mut it = Self { samples: BTreeMap::new(), families: BTreeSet::new() };
        let mut current: Option<&Metric> = None;
        let mut lines = text.lines();
        while let Some(line) = lines.next() {
            if let Some(rest) = line.strip_prefix("# HELP ") {
                let (name, help) = rest.split_once(' ').expect("help has a text");
                let metric = declared(name);
                assert_eq!(metric.help, help, "{name}");
                let kind = format!("# TYPE {name} {}", metric.kind.name());
                assert_eq!(lines.next(), Some(&*kind), "the type follows the help");
                assert!(it.families.insert(name.to_owned()), "{name} comes twice");
                current = Some(metric);
                continue;
            }
            assert!(!line.starts_with('#'), "{line}");
            it.sample(current.expect("a family has begun"), line);
        }
        it.check_histograms();
        it
    }

    fn sample(&mut self, family: &Metric, line: &str) {
        let (name, labels, value) = split(line);
        let suffix = name.strip_prefix(family.name).unwrap_or_else(|| panic!("stray: {line}"));
        let mut names: Vec<_> = labels.iter().map(|(name, _)| name.as_str()).collect();
        match (family.kind, suffix) {
            (Kind::Counter | Kind::Gauge, "") | (Kind::Histogram, "_sum" | "_count") => {}
            (Kind::Histogram, "_bucket") => names.retain(|name| *name != "le"),
            (Kind::Counter | Kind::Gauge | Kind::Histogram, _) => panic!("stray: {line}"),
        }
        assert_eq!(names, family.labels, "{line}");
        let value: f64 = value.parse().unwrap_or_else(|_| panic!("no number: {line}"));
        assert!(value.is_finite() && value >= 0.0, "{line}");
        let before = self.samples.entry(name.to_owned()).or_default().insert(labels, value);
        assert_eq!(before, None, "twice: {line}");
    }

    /// Buckets grow, and the last has all.
    fn check_histograms(&self) {
        for metric in METRICS.iter().filter(|metric| metric.kind == Kind::Histogram) {
            let Some(buckets) = self.samples.get(&format!("{}_bucket", metric.name)) else {
                continue;
            };
            let mut rows: BTreeMap<Labels, Vec<(f64, f64)>> = BTreeMap::new();
            for (labels, count) in buckets {
                let bound = labels.iter().find(|(name, _)| name == "le").expect("a bound");
                let bound =
                    if bound.1 == "+Inf" { f64::INFINITY } else { bound.1.parse().unwrap() };
                let labels = labels.iter().filter(|(name, _)| name != "le").cloned().collect();
                rows.entry(labels).or_default().push((bound, *count));
            }
            for (labels, mut row) in rows {
                row.sort_by(|a, b| a.0.total_cmp(&b.0));
                assert!(row.is_sorted_by(|a, b| a.1 <= b.1), "{} {labels:?}", metric.name);
                let (bound, all) = *row.last().unwrap();
                assert_eq!(bound, f64::INFINITY, "{} {labels:?}", metric.name);
                let count = self.samples[&format!("{}_count", metric.name)][&labels];
                assert_eq!(all, count, "{} {labels:?}", metric.name);
            }
        }
    }

    /// A value, by its labels in their order; none is zero if the metric has values at all.
    #[track_caller]
    pub(super) fn get(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        self.find(name, labels).unwrap_or_else(|| panic!("there is no {name} {labels:?}"))
    }

    pub(super) fn find(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let labels: Labels =
            labels.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect();
        self.samples.get(name)?.get(&labels).copied()
    }

    /// All values of a metric together.
    pub(super) fn sum(&self, name: &str) -> f64 {
        self.samples.get(name).map_or(0.0, |values| values.values().sum())
    }

    /// The values of a label.
    pub(super) fn labels(&self, name: &str, label: &str) -> BTreeSet<String> {
        let rows = self.samples.get(name).into_iter().flat_map(BTreeMap::keys);
        let labels = rows.flat_map(|labels| labels.iter().filter(|(name, _)| name == label));
        labels.map(|(_, value)| value.clone()).collect()
    }
}

#[track_caller]
fn declared(name: &str) -> &'static Metric {
    let metric = METRICS.iter().find(|metric| metric.name == name);
    metric.unwrap_or_else(|| panic!("{name} is not declared"))
}

/// Name, labels and value of a line.
#[track_caller]
fn split(line: &str) -> (&str, Labels, &str) {
    let (series, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("no value: {line}"));
    let Some((name, rest)) = series.split_once('{') else { return (series, Vec::new(), value) };
    let mut rest = rest.strip_suffix('}').unwrap_or_else(|| panic!("no end: {line}"));
    let mut labels = Vec::new();
    while !rest.is_empty() {
        let (name, after) = rest.split_once("=\"").unwrap_or_else(|| panic!("no label: {line}"));
        let (mut value, mut chars) = (String::new(), after.char_indices());
        let end = loop {
            match chars.next() {
                Some((at, '"')) => break at,
                Some((_, '\\')) => value.extend(chars.next().map(|(_, escaped)| escaped)),
                Some((_, plain)) => value.push(plain),
                None => panic!("no end: {line}"),
            }
        };
        labels.push((name.to_owned(), value));
        rest = after[end + 1..].trim_start_matches(',');
    }
    // The bound of a bucket may come first or last.
    labels.sort_by_key(|(name, _)| name == "le");
    (name, labels, value)
}
