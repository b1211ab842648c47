//! Spans on their way to a collector.

use dflockd_testkit::http::Ask;
use dflockd_testkit::{Server, command, run};
use serde_json::json;

use super::collector::Collector;
use crate::site::Site;

/// The ids of a trace and of the span in it that asks.
const TRACE: [u8; 16] = [
    0x4b, 0xf9, 0x2f, 0x35, 0x77, 0xb3, 0x4d, 0xa6, 0xa3, 0xce, 0x92, 0x9d, 0x0e, 0x0e, 0x47, 0x36,
];
const PARENT: [u8; 8] = [0x00, 0xf0, 0x67, 0xaa, 0x0b, 0xa9, 0x02, 0xb7];

fn traceparent(sampled: bool) -> String {
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    format!("00-{}-{}-0{}", hex(&TRACE), hex(&PARENT), u8::from(sampled))
}

#[test]
fn a_request_becomes_a_span_of_the_callers_trace() {
    let collector = Collector::start();
    let endpoint = collector.endpoint();
    let mut site = Site::start(&["--otlp-endpoint", &endpoint, "--otlp-sample-percent", "0"]);
    let session = site.session();
    let ask = Ask::post("/v1/locks/hush-key", &json!({ "lease_ttl_s": 60 }));
    let ask = ask.session(&session.id).header("traceparent", &traceparent(true));
    site.ask(ask).ok();
    let seen = collector.wait_for(&[
        &TRACE,
        &PARENT,
        b"POST /v1/locks/{key}",
        b"http.route",
        b"http.response.status_code",
        b"service.name",
        b"dflockd",
    ]);
    let shown = seen.escape_ascii().to_string();
    assert!(!shown.contains("hush"), "a key is shown: {shown}");
    assert!(!shown.contains(&session.id), "a session is shown: {shown}");
    // What belongs to no trace, or to one that is not wanted, was left out.
    assert!(!shown.contains("/v1/sessions"), "{shown}");
    let unwanted = Ask::get("/v1/overview").header("traceparent", &traceparent(false));
    site.ask(unwanted).ok();
    site.server.terminate();
    let rest = collector.rest().escape_ascii().to_string();
    assert!(!rest.contains("/v1/overview"), "{rest}");
}

/// GUARANTEES 48: who has no token has no say in what is sent to the collector.
#[test]
fn the_trace_of_a_stranger_is_not_followed() {
    let collector = Collector::start();
    let endpoint = collector.endpoint();
    let flags = ["--otlp-endpoint", &endpoint, "--otlp-sample-percent", "0"];
    let mut site = Site::guarded("t0ken-of-the-tests", &flags);
    for (path, status) in [("/v1/overview", 401), ("/v1/openapi.json", 200), ("/ui/", 200)] {
        let stranger = Ask::get(path).header("traceparent", &traceparent(true));
        assert_eq!(site.wire().ask(&stranger).status, status, "{path}");
    }
    site.ask(Ask::get("/v1/contention").header("traceparent", &traceparent(true))).ok();
    let seen = collector.wait_for(&[&TRACE, b"GET /v1/contention"]);
    site.server.terminate();
    let all = [seen, collector.rest()].concat().escape_ascii().to_string();
    for path in ["/v1/overview", "/v1/openapi.json", "/ui/"] {
        assert!(!all.contains(path), "{path}: {all}");
    }
}

#[test]
fn a_connection_becomes_a_span_and_the_last_ones_are_sent_at_the_end() {
    let collector = Collector::start();
    let endpoint = collector.endpoint();
    let args = ["--otlp-endpoint", &endpoint, "--otlp-sample-percent", "100"];
    let mut server = Server::start(&args);
    let mut client = server.connect();
    client.check("ping", "_", "", "ok");
    drop(client);
    server.terminate();
    collector.wait_for(&[b"line connection", b"network.peer.address", b"127.0.0.1"]);
}

#[test]
fn nobody_waits_for_a_collector_that_is_away() {
    let away = dflockd_testkit::free_addresses(dflockd_testkit::host(), 1)[0];
    let endpoint = format!("http://{away}");
    let mut site = Site::start(&["--otlp-endpoint", &endpoint, "--otlp-sample-percent", "100"]);
    // More than the queue holds.
    let mut wire = site.wire();
    for _ in 0..6000 {
        assert_eq!(wire.ask(&Ask::get("/v1/overview")).status, 200);
    }
    let said = "traces can not be sent";
    site.server.wait_for_output(said);
    site.server.terminate();
    let output = site.server.output();
    assert_eq!(output.matches(said).count(), 1, "said once: {output}");
}

#[test]
fn an_endpoint_that_is_none_is_refused() {
    for endpoint in ["collector:4317", "ftp://collector:4317", "http://"] {
        let output = run(command(&["--otlp-endpoint", endpoint, "--port", "0"]));
        output.expect(1).complains(&["otlp-endpoint"]);
    }
}
