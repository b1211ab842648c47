//! The served OpenAPI document: valid, closed, and exactly what the server registers.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use dflockd_testkit::http::Ask;
use serde_json::{Value, json};

use super::site::{Place, Site};

/// All routes. One that is added to the server has to be added here, which is the moment to write its tests.
const ROUTES: &[&str] = &[
    "DELETE /v1/admin/voters/{id}",
    "DELETE /v1/kv/{key}",
    "DELETE /v1/sessions/{id}",
    "GET /health",
    "GET /metrics",
    "GET /ready",
    "GET /v1/admin/audit",
    "GET /v1/cluster/members",
    "GET /v1/contention",
    "GET /v1/counters/{key}",
    "GET /v1/elections/{key}/events",
    "GET /v1/events",
    "GET /v1/kv/{key}",
    "GET /v1/lists/{key}",
    "GET /v1/lists/{key}/length",
    "GET /v1/locks",
    "GET /v1/locks/{key}",
    "GET /v1/openapi.json",
    "GET /v1/overview",
    "GET /v1/readindex",
    "GET /v1/sessions",
    "GET /v1/signals",
    "GET /v1/stats",
    "GET /v1/watch",
    "POST /v1/admin/locks/{key}/force-release",
    "POST /v1/admin/sessions/{id}/end",
    "POST /v1/admin/voters",
    "POST /v1/barriers/{key}/wait",
    "POST /v1/counters/{key}/add",
    "POST /v1/elections/{key}",
    "POST /v1/elections/{key}/renew",
    "POST /v1/elections/{key}/resign",
    "POST /v1/lists/{key}/pop",
    "POST /v1/lists/{key}/push",
    "POST /v1/locks/{key}",
    "POST /v1/locks/{key}/enqueue",
    "POST /v1/locks/{key}/release",
    "POST /v1/locks/{key}/renew",
    "POST /v1/locks/{key}/wait",
    "POST /v1/rwlocks/{key}/read",
    "POST /v1/rwlocks/{key}/read/enqueue",
    "POST /v1/rwlocks/{key}/release",
    "POST /v1/rwlocks/{key}/renew",
    "POST /v1/rwlocks/{key}/wait",
    "POST /v1/rwlocks/{key}/write",
    "POST /v1/rwlocks/{key}/write/enqueue",
    "POST /v1/semaphores/{key}",
    "POST /v1/semaphores/{key}/enqueue",
    "POST /v1/semaphores/{key}/release",
    "POST /v1/semaphores/{key}/renew",
    "POST /v1/semaphores/{key}/wait",
    "POST /v1/sessions",
    "POST /v1/sessions/self/ping",
    "DELETE /v1/sessions/self",
    "POST /v1/sessions/{id}/ping",
    "POST /v1/signals/{channel}",
    "PUT /v1/counters/{key}",
    "PUT /v1/kv/{key}",
];

const METHODS: [&str; 8] = ["get", "post", "put", "delete", "patch", "head", "options", "trace"];

pub(super) fn document(place: &Place) -> Value {
    let reply = place.get("/v1/openapi.json");
    assert_eq!(reply.status, 200);
    serde_json::from_slice(&reply.body).expect("a document")
}

/// Every operation of the document: method, path, description.
pub(super) fn operations(place: &Place) -> Vec<(String, String, Value)> {
    let document = document(place);
    let mut all = Vec::new();
    for (path, item) in document["paths"].as_object().expect("paths") {
        for (method, operation) in item.as_object().expect("an item") {
            if METHODS.contains(&method.as_str()) {
                all.push((method.to_uppercase(), path.clone(), operation.clone()));
            }
        }
    }
    all
}

#[test]
fn lists_exactly_the_routes_of_the_server() {
    let site = Site::start(&["--admin-token", "adm1n"]);
    let all = operations(&site);
    let described: BTreeSet<String> =
        all.iter().map(|(method, path, _)| format!("{method} {path}")).collect();
    let known: BTreeSet<String> = ROUTES.iter().map(ToString::to_string).collect();
    let missing: Vec<_> = known.difference(&described).collect();
    let unknown: Vec<_> = described.difference(&known).collect();
    assert!(missing.is_empty(), "not in the document: {missing:?}");
    assert!(unknown.is_empty(), "not in the list of this test: {unknown:?}");
    // What is described is there: no path unknown, no method refused.
    let id = "0".repeat(32);
    for (method, path, _) in &all {
        let path = path.replace("{key}", "k").replace("{id}", &id).replace("{channel}", "c");
        // Streams need a pattern; without one they refuse, which will do.
        let mut wire = site.wire();
        wire.begin(&Ask::new(method, &path).admin("adm1n").session(&id));
        let head = wire.head(std::time::Instant::now() + dflockd_testkit::LIMIT).unwrap();
        assert_ne!(head.status, 405, "{method} {path}");
        if head.status == 404 {
            let body = wire.exactly(head.header("content-length").unwrap().parse().unwrap());
            let body: Value = serde_json::from_slice(&body.unwrap()).unwrap();
            let own = ["not_held", "cluster_disabled"].map(Value::from).contains(&body["error"]);
            let view = path == "/v1/locks/k" || path.starts_with("/v1/admin/sessions/");
            assert!(own || view, "{method} {path}: {body}");
        }
    }
}

/// The router describes what it registers. Only what goes around it could be missing from the document.
#[test]
fn no_route_goes_around_the_document() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/frontend/http");
    let mut files = Vec::new();
    let mut dirs = vec![source];
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(&dir).expect("the sources are there") {
            let path = entry.unwrap().path();
            if path.is_dir() {
                dirs.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                files.push(path);
            }
        }
    }
    assert!(files.len() >= 5, "{files:?}");
    for path in files {
        // The page is no part of the API.
        if path.file_name().is_some_and(|name| name == "ui.rs") {
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        let code = text.split("#[cfg(test)]").next().unwrap_or_default();
        for call in [".route(", ".route_service(", ".nest(", ".nest_service(", ".merge("] {
            for line in code.lines().filter(|line| line.contains(call)) {
                let fine = call == ".merge(";
                assert!(fine, "{}: a route that no document knows: {line}", path.display());
            }
        }
    }
}

#[test]
fn is_a_valid_document() {
    let site = Site::start(&[]);
    let document = document(&site);
    let version = document["openapi"].as_str().expect("a version");
    assert!(version.starts_with("3.1"), "{version}");
    for name in ["title", "version"] {
        assert!(document["info"][name].is_string(), "info.{name}");
    }
    let known = ["openapi", "info", "servers", "paths", "components", "security", "tags"];
    let more = ["externalDocs", "webhooks", "jsonSchemaDialect"];
    for name in document.as_object().unwrap().keys() {
        assert!(known.contains(&name.as_str()) || more.contains(&name.as_str()), "{name}");
    }
    references_resolve(&document, &document);

    let mut ids = BTreeSet::new();
    for (method, path, operation) in operations(&site) {
        let at = format!("{method} {path}");
        let id = operation["operationId"].as_str().unwrap_or_else(|| panic!("{at}: no id"));
        assert!(ids.insert(id.to_owned()), "{at}: {id} twice");
        let summary = operation.get("summary").or_else(|| operation.get("description"));
        assert!(summary.is_some_and(|text| !text.as_str().unwrap().is_empty()), "{at}: no words");
        parameters(&document, &at, &path, &operation);
        responses(&document, &at, &operation);
        if let Some(body) = operation.get("requestBody") {
            let schema = &body["content"]["application/json"]["schema"];
            assert!(!schema.is_null(), "{at}: a body without a schema");
            closed(&document, &at, schema);
        }
    }
}

fn references_resolve(document: &Value, part: &Value) {
    match part {
        Value::Object(members) => {
            if let Some(Value::String(reference)) = members.get("$ref") {
                let pointer = reference.strip_prefix('#').expect("a local reference");
                assert!(document.pointer(pointer).is_some(), "{reference} leads nowhere");
            }
            members.values().for_each(|value| references_resolve(document, value));
        }
        Value::Array(items) => items.iter().for_each(|item| references_resolve(document, item)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

fn resolved<'a>(document: &'a Value, part: &'a Value) -> &'a Value {
    match part["$ref"].as_str() {
        Some(reference) => resolved(document, document.pointer(&reference[1..]).unwrap()),
        None => part,
    }
}

fn parameters(document: &Value, at: &str, path: &str, operation: &Value) {
    let none = Vec::new();
    let list = operation["parameters"].as_array().unwrap_or(&none);
    let mut in_path = BTreeSet::new();
    for parameter in list {
        let parameter = resolved(document, parameter);
        let name = parameter["name"].as_str().unwrap_or_else(|| panic!("{at}: {parameter}"));
        let schema = resolved(document, &parameter["schema"]);
        assert!(schema.is_object(), "{at}: {name} has no schema");
        match parameter["in"].as_str() {
            Some("path") => {
                assert_eq!(parameter["required"], true, "{at}: {name}");
                in_path.insert(name.to_owned());
                if name == "key" {
                    assert_eq!(schema["minLength"], 1, "{at}: {schema}");
                    assert_eq!(schema["maxLength"], 256, "{at}: {schema}");
                    assert_eq!(schema["pattern"], r"^\S+$", "{at}: {schema}");
                }
            }
            Some("query" | "header" | "cookie") => {}
            other => panic!("{at}: {name} is in {other:?}"),
        }
    }
    let template: BTreeSet<String> = path
        .split('/')
        .filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'))
        .map(str::to_owned)
        .collect();
    assert_eq!(in_path, template, "{at}: parameters of the path");
}

fn responses(document: &Value, at: &str, operation: &Value) {
    let responses = operation["responses"].as_object().unwrap_or_else(|| panic!("{at}: none"));
    assert!(!responses.is_empty(), "{at}: no responses");
    for (status, response) in responses {
        assert!(status == "default" || status.parse::<u16>().is_ok(), "{at}: {status}");
        let response = resolved(document, response);
        assert!(response["description"].is_string(), "{at} {status}: no description");
        if status == "204" {
            assert!(response.get("content").is_none(), "{at} {status}: a body");
        }
        // Every refusal has the same form.
        if status.starts_with('4') || status.starts_with('5') {
            let schema = &response["content"]["application/json"]["schema"];
            assert!(!schema.is_null(), "{at} {status}: no schema");
        }
    }
}

/// Requests are closed, seconds and tokens have their limits.
fn closed(document: &Value, at: &str, schema: &Value) {
    let schema = resolved(document, schema);
    for name in ["oneOf", "anyOf", "allOf"] {
        if let Some(choices) = schema[name].as_array() {
            for choice in choices.iter().filter(|choice| choice["type"] != "null") {
                closed(document, at, choice);
            }
            return;
        }
    }
    assert_eq!(schema["additionalProperties"], false, "{at}: {schema}");
    let properties = schema["properties"].as_object().expect("properties");
    for (name, property) in properties {
        let property = resolved(document, property);
        if name.ends_with("_s") {
            assert_eq!(property["maximum"], 9_223_372_036_u64, "{at}: {name} {property}");
            assert_eq!(property["minimum"], 0, "{at}: {name} {property}");
        }
        if name == "token" {
            assert_eq!(property["pattern"], "^[0-9a-f]{32}$", "{at}: {property}");
        }
    }
}

/// What the tests of this crate see of refusals is what the document promises.
#[test]
fn refusals_are_described() {
    let site = Site::start(&[]);
    let described: BTreeMap<String, Value> = operations(&site)
        .into_iter()
        .map(|(method, path, operation)| (format!("{method} {path}"), operation))
        .collect();
    for (operation, statuses) in [
        ("POST /v1/sessions", &["200", "400", "401", "429", "503"][..]),
        ("POST /v1/sessions/{id}/ping", &["204", "400", "401", "410", "429"]),
        ("POST /v1/locks/{key}", &["200", "400", "401", "409", "410", "429", "503"]),
        ("POST /v1/locks/{key}/release", &["204", "400", "401", "404", "410", "429", "503"]),
        ("POST /v1/semaphores/{key}", &["200", "400", "401", "409", "410", "429", "503"]),
        ("PUT /v1/kv/{key}", &["200", "400", "401", "429", "503"]),
        ("GET /v1/locks/{key}", &["200", "400", "401", "404", "429"]),
        ("POST /v1/admin/voters", &["200", "400", "401", "404", "429", "503"]),
    ] {
        let responses = &described[operation]["responses"];
        for status in statuses {
            assert!(!responses[*status].is_null(), "{operation} has no {status}");
        }
    }
    assert_eq!(site.get("/health").ok(), json!({ "status": "ok" }));
}
