//! The dashboard and the alerts ask for metrics that exist.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use dflockd::metrics::{Kind, METRICS};
use serde_json::Value;

fn read(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy").join(name);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The names of metrics in a query; what Prometheus makes itself is left out.
fn names(query: &str) -> BTreeSet<&str> {
    let words = query.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| word.starts_with("dflockd_") || word.starts_with("process_")).collect()
}

/// The declared metric that a name of a query is about.
fn base(name: &str) -> Option<&'static str> {
    METRICS.iter().find_map(|metric| {
        let suffix = name.strip_prefix(metric.name)?;
        let found = suffix.is_empty()
            || metric.kind == Kind::Histogram && ["_bucket", "_sum", "_count"].contains(&suffix);
        found.then_some(metric.name)
    })
}

/// Labels in the selectors and groups of a query belong to the metric, if the query is about one only.
fn check(place: &str, query: &str) -> BTreeSet<&'static str> {
    assert!(!query.trim().is_empty(), "{place} asks for nothing");
    let mut asked = BTreeSet::new();
    for name in names(query) {
        let name = base(name).unwrap_or_else(|| panic!("{place} asks for {name}"));
        asked.insert(name);
    }
    let pairs = [('(', ')'), ('{', '}'), ('[', ']')];
    for (open, close) in pairs {
        assert_eq!(query.matches(open).count(), query.matches(close).count(), "{place}: {query}");
    }
    let known: BTreeSet<_> = METRICS
        .iter()
        .filter(|metric| asked.contains(metric.name))
        .flat_map(|metric| metric.labels.iter().copied())
        .chain(["job", "instance", "le"])
        .collect();
    for part in query.split("by (").skip(1) {
        let group = part.split(')').next().unwrap();
        for label in group.split(',').map(str::trim) {
            assert!(known.contains(label), "{place} groups by {label}: {query}");
        }
    }
    asked
}

#[test]
fn the_dashboard_asks_for_metrics_that_exist() {
    let dashboard: Value = serde_json::from_str(&read("grafana/dflockd.json")).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let mut asked = BTreeSet::new();
    let mut ids = BTreeSet::new();
    for panel in panels {
        let title = panel["title"].as_str().unwrap();
        assert!(ids.insert(panel["id"].as_u64().unwrap()), "the number of {title} is taken");
        let place = &panel["gridPos"];
        let right = place["x"].as_u64().unwrap() + place["w"].as_u64().unwrap();
        assert!(right <= 24, "{title} is too wide");
        if panel["type"] == "row" {
            continue;
        }
        assert!(!panel["description"].as_str().unwrap().is_empty(), "{title}");
        let targets = panel["targets"].as_array().unwrap();
        assert!(!targets.is_empty(), "{title} shows nothing");
        for target in targets {
            asked.extend(check(title, target["expr"].as_str().unwrap()));
        }
    }
    for list in [&dashboard["templating"]["list"], &dashboard["annotations"]["list"]] {
        for entry in list.as_array().unwrap() {
            for field in ["definition", "expr"] {
                if let Some(query) = entry[field].as_str() {
                    asked.extend(check(entry["name"].as_str().unwrap(), query));
                }
            }
        }
    }
    // What an operator asks for at night.
    for name in [
        "dflockd_grants_total",
        "dflockd_waiters",
        "dflockd_wait_seconds",
        "dflockd_hold_seconds",
        "dflockd_expiries_total",
        "dflockd_refusals_total",
        "dflockd_open_connections",
        "dflockd_raft_is_leader",
        "dflockd_raft_term",
        "dflockd_raft_follower_lag_entries",
        "dflockd_raft_fsync_seconds",
    ] {
        assert!(asked.contains(name), "the dashboard does not show {name}");
    }
}

/// One rule of the alerts.
struct Rule {
    name: String,
    query: String,
    fields: BTreeSet<String>,
}

/// The rules, as far as this file's way of writing YAML goes.
fn rules(text: &str) -> Vec<Rule> {
    let mut rules: Vec<Rule> = Vec::new();
    let mut folded = false;
    let mut before = "";
    for line in text.lines() {
        let (trimmed, indent) = (line.trim(), line.len() - line.trim_start().len());
        if let Some(name) = trimmed.strip_prefix("- alert: ") {
            assert!(before.trim().starts_with('#'), "{name} has no comment that says why");
            let (name, query, fields) = (name.to_owned(), String::new(), BTreeSet::new());
            rules.push(Rule { name, query, fields });
        }
        before = line;
        let Some(rule) = rules.last_mut() else { continue };
        // Keys of a rule stand eight deep, what is folded ten.
        folded &= indent == 10;
        if folded {
            rule.query += trimmed;
            rule.query += " ";
        } else if indent == 8
            && let Some((key, value)) = trimmed.split_once(':')
        {
            rule.fields.insert(key.to_owned());
            if key == "expr" {
                folded = value.trim() == ">-";
                rule.query = if folded { String::new() } else { value.trim().to_owned() };
            }
        } else if indent == 10
            && let Some((key, _)) = trimmed.split_once(':')
        {
            rule.fields.insert(key.to_owned());
        }
    }
    rules
}

#[test]
fn the_alerts_ask_for_metrics_that_exist() {
    let text = read("prometheus/alerts.yml");
    let rules = rules(&text);
    assert_eq!(rules.len(), text.matches("- alert:").count());
    assert!(rules.len() > 15, "only {} rules found", rules.len());
    let mut seen = BTreeSet::new();
    for Rule { name, query, fields } in &rules {
        assert!(name.starts_with("Dflockd"), "{name}");
        assert!(seen.insert(name), "{name} comes twice");
        for field in ["expr", "labels", "severity", "annotations", "summary"] {
            assert!(fields.contains(field), "{name} has no {field}");
        }
        let asked = check(name, query);
        assert!(!asked.is_empty() || query.starts_with("up{"), "{name}: {query}");
    }
}

#[test]
fn a_name_that_does_not_exist_is_noticed() {
    assert_eq!(base("dflockd_wait_seconds_bucket"), Some("dflockd_wait_seconds"));
    assert_eq!(base("dflockd_grants_total"), Some("dflockd_grants_total"));
    assert_eq!(base("dflockd_grants_total_bucket"), None);
    assert_eq!(base("dflockd_grants"), None);
    let query = "sum by (le) (rate(dflockd_a_bucket[5m])) / process_b > 1";
    assert_eq!(names(query), BTreeSet::from(["dflockd_a_bucket", "process_b"]));
}
