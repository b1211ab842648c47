//! Metrics and traces of the built binary: after real traffic over both protocols the numbers are right, the text is
//! valid, nothing secret is in it, and spans arrive at a collector.

#[cfg(test)]
#[path = "metrics/calls.rs"]
mod calls;
#[cfg(test)]
#[path = "metrics/collector.rs"]
mod collector;
#[cfg(test)]
#[path = "metrics/deploy.rs"]
mod deploy;
#[cfg(test)]
#[path = "cluster/harness.rs"]
#[expect(dead_code, reason = "shared with the tests of the cluster, which need more of it")]
mod harness;
#[cfg(test)]
#[path = "metrics/numbers.rs"]
mod numbers;
#[cfg(test)]
#[path = "http/site.rs"]
#[expect(dead_code, reason = "shared with the tests of HTTP, which need more of it")]
mod site;
#[cfg(test)]
#[path = "process/support.rs"]
#[expect(dead_code, reason = "shared with the tests of the process, which need more of it")]
mod support;
#[cfg(test)]
#[path = "metrics/text.rs"]
mod text;
#[cfg(test)]
#[path = "metrics/traces.rs"]
mod traces;
#[cfg(test)]
#[path = "http/wire.rs"]
#[expect(dead_code, reason = "shared with the tests of HTTP, which need more of it")]
mod wire;
