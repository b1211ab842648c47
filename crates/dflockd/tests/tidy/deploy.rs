//! The files of `deploy/`: what they set exists, what they ask for exists, and the server starts with it.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use dflockd::config::{Config, Parsed};
use dflockd_testkit::{Dir, command, run};
use serde_json::{Value, json};

fn read(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy").join(name);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The documents of a YAML file, references resolved.
fn documents(name: &str) -> Vec<Value> {
    use serde::Deserialize;
    let text = read(name);
    let documents = serde_yaml_ng::Deserializer::from_str(&text).map(|document| {
        let mut value = serde_yaml_ng::Value::deserialize(document).expect("it is YAML");
        value.apply_merge().expect("references lead somewhere");
        serde_json::to_value(value).expect("it has a form in JSON")
    });
    documents.collect()
}

fn kind(kind: &str) -> Value {
    let all = documents("kubernetes/dflockd.yaml");
    let mut found = all.into_iter().filter(|document| document["kind"] == kind);
    found.next().unwrap_or_else(|| panic!("there is no {kind}"))
}

fn help() -> String {
    run(command(&["--help"])).out
}

/// Words that begin so.
fn words<'a>(text: &'a str, begin: &'a str) -> impl Iterator<Item = &'a str> {
    text.split(|c: char| !(c.is_ascii_alphanumeric() || "_-".contains(c)))
        .filter(move |word| word.starts_with(begin))
}

#[test]
fn every_setting_exists() {
    let help = help();
    let known: Vec<&str> = words(&help, "DFLOCKD_").collect();
    let mut seen = 0;
    for file in [
        "systemd/dflockd.service",
        "docker/Dockerfile",
        "compose/compose.yaml",
        "kubernetes/dflockd.yaml",
    ] {
        let text = read(file);
        for word in words(&text, "DFLOCKD_") {
            assert!(known.contains(&word), "{file}: there is no variable {word}");
            seen += 1;
        }
    }
    assert!(seen > 30, "only {seen} settings were found");
}

/// A file for a setting that names one of another machine, with a token that no other setting has.
fn token_file(dir: &Dir, setting: &str) -> String {
    dir.write(setting, format!("{setting}-0123456789abcdef"))
}

/// That the server accepts the variables. Gives its node id and its peers.
#[track_caller]
fn starts(mut settings: BTreeMap<String, String>, dir: &Dir) -> (String, Vec<String>) {
    for (name, value) in &mut settings {
        if name.ends_with("_FILE") {
            *value = token_file(dir, name);
        }
    }
    let parsed = Config::from_args(Vec::new(), &|name| settings.get(name).cloned());
    let Ok(Parsed::Run(config)) = parsed else { panic!("{settings:?} is refused") };
    let cluster = config.replicated().expect("it is a cluster");
    (cluster.node.to_owned(), config.cluster_peers.iter().map(|peer| peer.node.clone()).collect())
}

#[test]
fn nodes_of_kubernetes_start() {
    let set = kind("StatefulSet");
    let pod = &set["spec"]["template"]["spec"];
    let container = &pod["containers"][0];
    let dir = Dir::new();
    let name = set["metadata"]["name"].as_str().unwrap();
    let replicas = set["spec"]["replicas"].as_u64().unwrap();
    for number in 0..replicas {
        let node = format!("{name}-{number}");
        let settings = container["env"].as_array().unwrap().iter().map(|variable| {
            let value = match variable["value"].as_str() {
                Some(value) => value.replace("$(DFLOCKD_NODE_ID)", &node),
                None => {
                    assert_eq!(variable["valueFrom"]["fieldRef"]["fieldPath"], "metadata.name");
                    node.clone()
                }
            };
            (variable["name"].as_str().unwrap().to_owned(), value)
        });
        let (started, peers) = starts(settings.collect(), &dir);
        assert_eq!(started, node);
        let all: Vec<String> = (0..replicas).map(|number| format!("{name}-{number}")).collect();
        assert_eq!(peers, all);
    }
}

#[test]
fn parts_of_kubernetes_fit_together() {
    let set = kind("StatefulSet");
    let labels = set["spec"]["template"]["metadata"]["labels"].clone();
    assert_eq!(set["spec"]["selector"]["matchLabels"], labels);
    assert_eq!(kind("PodDisruptionBudget")["spec"]["selector"]["matchLabels"], labels);
    assert_eq!(kind("PodDisruptionBudget")["spec"]["maxUnavailable"], 1);
    let services: Vec<Value> = documents("kubernetes/dflockd.yaml")
        .into_iter()
        .filter(|document| document["kind"] == "Service")
        .collect();
    let headless = services.iter().find(|service| service["spec"]["clusterIP"] == "None").unwrap();
    assert_eq!(headless["metadata"]["name"], set["spec"]["serviceName"]);
    assert_eq!(headless["spec"]["publishNotReadyAddresses"], true);
    let pod = &set["spec"]["template"]["spec"];
    let container = &pod["containers"][0];
    let ports = container["ports"].as_array().unwrap();
    for service in &services {
        assert_eq!(service["spec"]["selector"], labels);
        for port in service["spec"]["ports"].as_array().unwrap() {
            let target = ports.iter().find(|known| known["name"] == port["targetPort"]);
            assert_eq!(target.unwrap()["containerPort"], port["port"], "{port}");
        }
    }
    // The pages exist: docs/http.md, and the tests of the HTTP interface.
    for (probe, path) in
        [("startupProbe", "/health"), ("livenessProbe", "/health"), ("readinessProbe", "/ready")]
    {
        assert_eq!(container[probe]["httpGet"], json!({ "path": path, "port": "http" }), "{probe}");
    }
    assert_eq!(pod["securityContext"]["runAsNonRoot"], true);
    assert_eq!(container["securityContext"]["allowPrivilegeEscalation"], false);
    // The drain takes 30 s by default, the hand-over before it 3 s.
    assert!(pod["terminationGracePeriodSeconds"].as_u64() > Some(35));
    let mounted = |volume: &str| {
        let mounts = container["volumeMounts"].as_array().unwrap().iter();
        let mount =
            mounts.filter(|mount| mount["name"] == volume).map(|mount| mount["mountPath"].clone());
        mount.max_by_key(Value::to_string).unwrap().as_str().unwrap().to_owned()
    };
    for variable in container["env"].as_array().unwrap() {
        let value = variable["value"].as_str().unwrap_or_default();
        let name = variable["name"].as_str().unwrap();
        if name == "DFLOCKD_RAFT_DIR" {
            assert!(value.starts_with(&mounted("data")), "{value}");
        } else if name.ends_with("_FILE") {
            assert!(value.starts_with(&mounted("tokens")), "{value}");
        } else if name.starts_with("DFLOCKD_RAFT_TLS_") {
            assert!(value.starts_with(&mounted("certificates")), "{value}");
        }
    }
    assert_eq!(set["spec"]["volumeClaimTemplates"][0]["metadata"]["name"], "data");
}

/// GUARANTEES 48: only the nodes reach the peer port, and everybody what clients need.
#[test]
fn the_peer_port_is_for_the_nodes() {
    let policy = kind("NetworkPolicy");
    let set = kind("StatefulSet");
    let labels = set["spec"]["template"]["metadata"]["labels"].clone();
    let nodes = json!({ "matchLabels": labels });
    assert_eq!(policy["spec"]["podSelector"], nodes);
    assert_eq!(policy["spec"]["policyTypes"], json!(["Ingress"]));
    let ports = set["spec"]["template"]["spec"]["containers"][0]["ports"].clone();
    for port in ports.as_array().unwrap() {
        let rules = policy["spec"]["ingress"].as_array().unwrap().iter();
        let mut rules = rules.filter(|rule| {
            rule["ports"].as_array().unwrap().iter().any(|known| known["port"] == port["name"])
        });
        let rule = rules.next().unwrap_or_else(|| panic!("nobody reaches {port}"));
        assert!(rules.next().is_none(), "{port} is named twice");
        let from = &rule["from"];
        if port["name"] == "peers" {
            assert_eq!(*from, json!([{ "podSelector": nodes }]));
        } else {
            assert!(from.is_null(), "{port} is for everybody");
        }
    }
}

#[test]
fn nodes_of_compose_start() {
    let [compose] = documents("compose/compose.yaml").try_into().expect("one document");
    let dir = Dir::new();
    let services = compose["services"].as_object().unwrap();
    assert_eq!(services.len(), 3);
    for (name, service) in services {
        let environment = service["environment"].as_object().unwrap();
        let text =
            |value: &Value| value.as_str().unwrap_or_else(|| panic!("{name}: {value}")).to_owned();
        let settings = environment.iter().map(|(name, value)| (name.clone(), text(value)));
        let (node, peers) = starts(settings.collect(), &dir);
        assert_eq!(&node, name);
        assert_eq!(peers, services.keys().cloned().collect::<Vec<_>>());
        let volume = service["volumes"][0].as_str().unwrap();
        let (volume, place) = volume.split_once(':').unwrap();
        assert!(compose["volumes"].as_object().unwrap().contains_key(volume));
        assert!(environment["DFLOCKD_RAFT_DIR"].as_str().unwrap().starts_with(place));
        for secret in service["secrets"].as_array().unwrap() {
            let file = format!("/run/secrets/{}", secret.as_str().unwrap());
            assert!(environment.values().any(|value| *value == file.as_str()), "{file}");
            assert!(compose["secrets"][secret.as_str().unwrap()]["file"].is_string());
        }
    }
}

/// GUARANTEES 48: an image that listens everywhere does not start without a token.
#[test]
fn the_image_needs_a_token() {
    let text = read("docker/Dockerfile");
    let settings = text.lines().filter_map(|line| line.strip_prefix("ENV ")?.split_once('='));
    let mut settings: BTreeMap<&str, String> =
        settings.map(|(name, value)| (name, value.to_owned())).collect();
    assert_eq!(settings["DFLOCKD_HOST"], "0.0.0.0");
    let parse = |settings: &BTreeMap<&str, String>| {
        Config::from_args(Vec::new(), &|name| settings.get(name).cloned())
    };
    let refused = parse(&settings).unwrap_err().to_string();
    assert!(refused.contains("--require-auth needs --auth-token"), "{refused}");
    let dir = Dir::new();
    settings.insert("DFLOCKD_AUTH_TOKEN_FILE", token_file(&dir, "auth"));
    assert!(matches!(parse(&settings), Ok(Parsed::Run(_))));
}

#[test]
fn the_image_runs_as_nobody_in_particular() {
    let text = read("docker/Dockerfile");
    let instructions: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
    assert!(instructions.iter().filter(|line| line.starts_with("FROM ")).count() > 1, "stages");
    let user = instructions.iter().rfind(|line| line.starts_with("USER ")).unwrap();
    assert!(!user.contains("root") && !user.contains(" 0"), "{user}");
    assert!(text.contains("HEALTHCHECK") && text.contains("ENTRYPOINT [\"dflockd\"]"));
    let toolchain = include_str!("../../../../Cargo.toml");
    let version = toolchain.lines().find_map(|line| line.strip_prefix("rust-version = \""));
    let version = version.unwrap().trim_end_matches('"');
    let newest = text.lines().find_map(|line| line.strip_prefix("FROM rust:")).unwrap();
    let newest = newest.split('-').next().unwrap();
    let number = |version: &str| version.split('.').nth(1).unwrap().parse::<u32>().unwrap();
    assert!(number(newest) >= number(version), "{newest} is older than {version}");
}

#[test]
fn the_unit_is_hardened() {
    let text = read("systemd/dflockd.service");
    let mut settings: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for line in text.lines().filter(|line| !line.starts_with(['#', '[']) && !line.is_empty()) {
        let (name, value) = line.split_once('=').unwrap_or_else(|| panic!("{line}"));
        settings.entry(name).or_default().push(value);
    }
    for (name, value) in [
        ("Type", "notify"),
        ("NoNewPrivileges", "yes"),
        ("ProtectSystem", "strict"),
        ("PrivateTmp", "yes"),
        ("CapabilityBoundingSet", ""),
        ("Restart", "on-failure"),
        ("ExecReload", "/bin/kill -HUP $MAINPID"),
        ("ExecStart", "/usr/local/bin/dflockd"),
        ("EnvironmentFile", "/etc/dflockd/dflockd.env"),
    ] {
        assert_eq!(settings.get(name), Some(&vec![value]), "{name}");
    }
    // Where `dflockctl cluster init` says that the data are.
    assert_eq!(settings["StateDirectory"], ["dflockd"]);
    let stop: u64 = settings["TimeoutStopSec"][0].parse().unwrap();
    assert!(stop > 35, "the drain takes 30 s, the hand-over 3 s");
}
