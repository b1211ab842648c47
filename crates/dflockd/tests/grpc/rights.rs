//! What identities may do over gRPC: every method of the services against the table.
//!
//! Requests are made from the descriptors of the services, field by field, so a new method needs a row here and nothing
//! else.

use std::collections::BTreeMap;

use bytes::{Buf, BufMut, Bytes};
use dflockd_testkit::certificates::Authority;
use dflockd_testkit::identities::{
    self, ALL, BILLING, KEYS, Known, Needs, OPERATOR, SCRAPER, VIEWER,
};
use dflockd_testkit::{Dir, Pair};
use dflockd_wire::grpc::*;
use prost::Message;
use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{DescriptorProto, FileDescriptorSet};
use tonic::client::Grpc;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::metadata::MetadataValue;
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity};
use tonic::{Code, Request, Status};

use super::site::{Link, Members, Site, refused};

/// Messages as bytes.
#[derive(Clone, Copy, Default)]
struct Raw;

impl Codec for Raw {
    type Encode = Vec<u8>;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Raw {
    type Item = Vec<u8>;
    type Error = Status;

    fn encode(&mut self, message: Vec<u8>, out: &mut EncodeBuf<'_>) -> Result<(), Status> {
        out.put_slice(&message);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, bytes: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(bytes.copy_to_bytes(bytes.remaining())))
    }
}

/// What a method needs; none for what operators do.
fn needs(path: &str) -> Option<Needs> {
    let (service, method) = path.rsplit_once('/').unwrap();
    Some(match (service.rsplit('.').next().unwrap(), method) {
        ("Sessions", "Open" | "KeepAlive" | "KeepAliveStream" | "Close" | "Attach" | "Cancel") => {
            Needs::Session
        }
        // It lists what may be read.
        ("Locks", "List") | ("Cluster", "Members" | "Health") => Needs::Session,
        ("Locks", "Describe") => Needs::Read,
        ("Locks", "Acquire" | "TryAcquire" | "Release" | "Renew" | "Enqueue" | "Wait") => {
            Needs::Lock
        }
        ("Elections", "Campaign" | "Proclaim" | "Resign") | ("Barriers", "Wait") => Needs::Lock,
        ("Elections", "Observe") | ("Counters" | "Kv", "Get") => Needs::Read,
        ("Lists", "Length" | "Range") => Needs::Read,
        ("Counters", "Add" | "Set") | ("Kv", "Set" | "Delete" | "CompareAndSet") => Needs::Write,
        ("Lists", "Push" | "Pop") => Needs::Write,
        ("Signals", "Publish") => Needs::Signal,
        ("Signals", "Subscribe") | ("Watch", "Watch") => Needs::Read,
        ("Admin", "ForceRelease" | "ListSessions" | "EndSession" | "Audit") => return None,
        (
            "Cluster",
            "Add" | "Promote" | "Remove" | "Transfer" | "Snapshot" | "Policy" | "SetPolicy"
            | "Address" | "Finalize" | "Drain",
        ) => return None,
        _ => panic!("{path} has no row"),
    })
}

/// All methods by their paths, with the messages that they take.
fn methods() -> (BTreeMap<String, String>, BTreeMap<String, DescriptorProto>) {
    let set = FileDescriptorSet::decode(DESCRIPTORS).unwrap();
    let (mut methods, mut messages) = (BTreeMap::new(), BTreeMap::new());
    for file in &set.file {
        for message in &file.message_type {
            messages.insert(format!(".{}.{}", file.package(), message.name()), message.clone());
        }
        for service in file.service.iter().filter(|_| file.package() == "dflockd.v1") {
            for method in &service.method {
                let path = format!("/{}.{}/{}", file.package(), service.name(), method.name());
                methods.insert(path, method.input_type().to_owned());
            }
        }
    }
    (methods, messages)
}

/// The bytes of a message that is about this key.
fn message(
    messages: &BTreeMap<String, DescriptorProto>,
    name: &str,
    key: &str,
    session: &str,
) -> Vec<u8> {
    let mut bytes = Vec::new();
    for field in &messages[name].field {
        let tag = u64::try_from(field.number()).unwrap() << 3;
        let mut text = |text: &[u8]| {
            prost::encoding::encode_varint(tag | 2, &mut bytes);
            prost::encoding::encode_varint(text.len() as u64, &mut bytes);
            bytes.extend_from_slice(text);
        };
        match (field.name(), field.r#type()) {
            ("key" | "channel", _) => text(key.as_bytes()),
            ("pattern", _) => text(format!("{key}/*").as_bytes()),
            ("patterns", _) => text(format!("{key}/>").as_bytes()),
            ("session", Type::String) => text(session.as_bytes()),
            ("token", _) => text(b"00000000000000010000000000000002"),
            ("value" | "new_value" | "item" | "payload", Type::Bytes) => text(b"v"),
            ("reason", Type::String) => text(b"because"),
            ("node", _) => text(b"nobody"),
            ("peer_addr" | "client_addr", _) => text(b"127.0.0.1:1"),
            (_, Type::Message) if field.label() == Label::Repeated && field.name() == "add" => {
                text(&message(messages, field.type_name(), key, session));
            }
            ("fence" | "number" | "count" | "absent", _) => {
                // One way to say what is expected.
                let value = if field.name() == "number" { 999_999 } else { 1 };
                prost::encoding::encode_varint(tag, &mut bytes);
                prost::encoding::encode_varint(value, &mut bytes);
            }
            ("lease_ms", _) => {
                prost::encoding::encode_varint(tag, &mut bytes);
                prost::encoding::encode_varint(5000, &mut bytes);
            }
            _ => {}
        }
    }
    bytes
}

fn bearer<T>(message: T, known: Known) -> Request<T> {
    let mut request = Request::new(message);
    let token = MetadataValue::try_from(format!("Bearer {}", known.token)).unwrap();
    request.metadata_mut().insert("authorization", token);
    request
}

/// How a call begins: what it is refused with, if it is.
async fn call(link: &Link, path: &str, message: Vec<u8>, known: Known) -> Result<(), Status> {
    let mut client = Grpc::new(link.channel.clone());
    client.ready().await.map_err(|error| Status::unknown(error.to_string()))?;
    let request = bearer(tokio_stream::iter([message]), known);
    let path = path.to_owned().try_into().unwrap();
    client.streaming(request, path, Raw).await.map(drop)
}

async fn play(link: &Link, is_cluster: bool) {
    let (methods, messages) = methods();
    for (path, input) in &methods {
        for known in ALL {
            if is_cluster && known == OPERATOR && needs(path).is_none() {
                continue;
            }
            for key in KEYS {
                let open = link.sessions().open(bearer(OpenRequest::default(), known)).await;
                let session = open.map_or_else(|_| String::new(), |open| open.into_inner().session);
                let result =
                    call(link, path, message(&messages, input, key, &session), known).await;
                let what = format!("{path} of {} with {key}: {result:?}", known.name);
                let code = result.err().map(|status| status.code());
                let is_denied = code == Some(Code::PermissionDenied);
                match needs(path) {
                    Some(needs) => assert_eq!(!is_denied, known.may(needs, key), "{what}"),
                    None => assert_eq!(!is_denied, known == OPERATOR, "{what}"),
                }
                assert_ne!(code, Some(Code::Unauthenticated), "{what}");
            }
        }
    }
}

/// GUARANTEES 55: no method does more for an identity than its entry says.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_method_against_the_table() {
    let dir = Dir::new();
    let site = Site::start(&["--identities-file", &identities::write(&dir)]);
    let link = site.link().await;
    play(&link, false).await;
    let get = GetRequest { key: "other/k".into() };
    let denied = link.kv().get(bearer(get, BILLING)).await;
    refused(denied, Code::PermissionDenied, Reason::Forbidden);
    let denied = link.locks().list(bearer(ListRequest::default(), SCRAPER)).await;
    refused(denied, Code::PermissionDenied, Reason::Forbidden);
    // One pattern of many is enough.
    let patterns = ["billing/>", "other/>"].map(|pattern| pattern.into()).to_vec();
    let watch = WatchRequest { patterns, ..WatchRequest::default() };
    let denied = link.watch().watch(bearer(watch, BILLING)).await;
    refused(denied, Code::PermissionDenied, Reason::Forbidden);
}

/// GUARANTEES 55: the same through a follower of a cluster.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_method_through_a_follower() {
    let dir = Dir::new();
    let file = identities::write(&dir);
    let flags = ["--identities-file", &file, "--auth-token", "the-token-of-the-test-kit"];
    let members = Members::start(3, &flags);
    play(&members.link(members.cluster.follower()).await, true).await;
}

/// GUARANTEES 55: lists have the keys that may be read; operators are known by name.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lists_show_what_may_be_read() {
    let dir = Dir::new();
    let site = Site::start(&["--identities-file", &identities::write(&dir)]);
    let mut line = site.server.login(OPERATOR.token);
    for key in ["a", "billing/1", "billing/2", "other/1", "shared/1"] {
        line.lock(key, "0 600");
    }
    let link = site.link().await;
    let list = async |known: Known, after: &str| {
        let request =
            ListRequest { after: after.to_owned().into(), limit: 2, ..ListRequest::default() };
        let page = link.locks().list(bearer(request, known)).await.unwrap().into_inner();
        let keys = page.locks.iter().map(|lock| String::from_utf8_lossy(&lock.key).into_owned());
        (keys.collect::<Vec<_>>(), String::from_utf8_lossy(&page.next).into_owned())
    };
    let keys = |keys: &[&str]| keys.iter().map(ToString::to_string).collect::<Vec<_>>();
    assert_eq!(list(BILLING, "").await, (keys(&["billing/1", "billing/2"]), "billing/2".into()));
    assert_eq!(list(BILLING, "billing/2").await, (keys(&["shared/1"]), String::new()));
    assert_eq!(list(VIEWER, "").await.0, keys(&["a", "billing/1"]));
    let end = EndSessionRequest { number: 999_999, reason: "because".into() };
    let none = link.admin().end_session(bearer(end, OPERATOR)).await;
    assert_eq!(none.unwrap_err().code(), Code::NotFound);
    let audit = AuditRequest { limit: 1, ..AuditRequest::default() };
    let mut audit = link.admin().audit(bearer(audit, OPERATOR)).await.unwrap().into_inner();
    assert_eq!(audit.message().await.unwrap().unwrap().identity, "ops");
}

/// GUARANTEES 55: a certificate is enough.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn certificates_are_identities() {
    let (dir, pair, authority) = (Dir::new(), Pair::new(), Authority::new());
    let named = |name: &str| format!("name = \"{name}\"");
    let line = format!("{}\ncertificates = [\"dns:billing.example\"]", named("billing"));
    let file = dir.write("identities.toml", identities::FILE.replace(&named("billing"), &line));
    let ca = dir.write("clients.pem", &authority.cert);
    let [cert, key] = pair.flags(&dir);
    let site = Site::start(&["--identities-file", &file, "--tls-client-ca", &ca, &cert, &key]);
    let link = async |name: &str| {
        let own = authority.sign(name);
        let tls = ClientTlsConfig::new()
            .ca_certificate(Certificate::from_pem(&pair.cert))
            .identity(Identity::from_pem(&own.cert, &own.key))
            .domain_name("localhost");
        let endpoint = Endpoint::from_shared(format!("https://{}", site.grpc)).unwrap();
        Link::over(endpoint.tls_config(tls).unwrap()).await
    };
    let get = |key: &'static str| GetRequest { key: key.into() };
    let billing = link("billing.example").await;
    billing.kv().get(get("billing/k")).await.unwrap();
    let denied = billing.kv().get(get("other/k")).await;
    refused(denied, Code::PermissionDenied, Reason::Forbidden);
    billing.kv().get(bearer(get("other/k"), VIEWER)).await.unwrap();
    let stranger = link("stranger.example").await.kv().get(get("billing/k")).await;
    refused(stranger, Code::Unauthenticated, Reason::Unauthenticated);
}
