//! Calls over gRPC, by method and by how they ended. Only methods that exist have a name here; what clients invent is
//! counted together.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{LazyLock, OnceLock};
use std::time::Duration;

use dflockd_wire::grpc::DESCRIPTORS;
use prost::Message as _;
use prost_types::FileDescriptorSet;
use tonic::Code;

/// The service and the method of calls that match none.
const OTHER: &str = "other";
/// Those that tell how the server is. When it shuts down they say so before they end.
const HEALTH: [(&str, &str); 2] =
    [("grpc.health.v1.Health", "Watch"), ("dflockd.v1.Cluster", "Health")];
/// Those that describe the services.
const REFLECTION: &str = "grpc.reflection.";
/// All codes, in their order.
const CODES: [&str; 17] = [
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
];

/// A method that is served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Method {
    at: usize,
    service: String,
    name: String,
    pub(crate) streams: Streams,
    /// Its client may send more messages than one.
    pub(crate) client_streams: bool,
}

/// Whether there are more messages than one in a direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Streams {
    No,
    Yes,
    /// And it ends by itself when the server shuts down, after a last word.
    Health,
    /// And it is served by a library, which knows nothing of that.
    Reflection,
}

struct Methods {
    all: Vec<Method>,
    by_path: HashMap<String, usize>,
}

static METHODS: LazyLock<Methods> = LazyLock::new(Methods::read);

impl Methods {
    fn read() -> Self {
        let sets = [
            DESCRIPTORS,
            tonic_health::pb::FILE_DESCRIPTOR_SET,
            tonic_reflection::pb::v1::FILE_DESCRIPTOR_SET,
            tonic_reflection::pb::v1alpha::FILE_DESCRIPTOR_SET,
        ];
        let other = Method {
            at: 0,
            service: OTHER.to_owned(),
            name: OTHER.to_owned(),
            streams: Streams::No,
            client_streams: false,
        };
        let mut methods = Self { all: vec![other], by_path: HashMap::new() };
        for set in sets {
            let set = FileDescriptorSet::decode(set).expect("what the build made");
            for file in &set.file {
                for service in &file.service {
                    let full = format!("{}.{}", file.package(), service.name());
                    for method in &service.method {
                        let client_streams = method.client_streaming();
                        let is_stream = client_streams || method.server_streaming();
                        methods.add(&full, method.name(), is_stream, client_streams);
                    }
                }
            }
        }
        methods
    }

    fn add(&mut self, service: &str, name: &str, is_stream: bool, client_streams: bool) {
        let at = self.all.len();
        if self.by_path.insert(format!("/{service}/{name}"), at).is_some() {
            return;
        }
        let streams = match is_stream {
            false => Streams::No,
            true if HEALTH.contains(&(service, name)) => Streams::Health,
            true if service.starts_with(REFLECTION) => Streams::Reflection,
            true => Streams::Yes,
        };
        let (service, name) = (service.to_owned(), name.to_owned());
        self.all.push(Method { at, service, name, streams, client_streams });
    }
}

impl Method {
    /// The method that a path names.
    pub(crate) fn of(path: &str) -> &'static Self {
        let methods = &*METHODS;
        &methods.all[methods.by_path.get(path).copied().unwrap_or(0)]
    }
}

/// How many calls have ended, and how long they took together.
#[derive(Default)]
pub(super) struct Calls(OnceLock<Box<[Row]>>);

#[derive(Default)]
struct Row {
    count: AtomicU64,
    nanos: AtomicU64,
}

impl Calls {
    /// A call has ended.
    pub(super) fn add(&self, method: &Method, code: Code, took: Duration) {
        let rows = self.0.get_or_init(|| {
            let rows = std::iter::repeat_with(Row::default);
            rows.take(METHODS.all.len() * CODES.len()).collect()
        });
        let code = usize::try_from(i32::from(code)).unwrap_or_default();
        let Some(row) = rows.get(method.at * CODES.len() + code) else { return };
        row.count.fetch_add(1, Relaxed);
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        row.nanos.fetch_add(nanos, Relaxed);
    }

    /// All that there were.
    pub(super) fn total(&self) -> u64 {
        self.0.get().map_or(0, |rows| rows.iter().map(|row| row.count.load(Relaxed)).sum())
    }

    /// Labels, count and nanoseconds of each combination that there was.
    pub(super) fn rows(&self) -> Vec<([String; 3], u64, u64)> {
        let Some(rows) = self.0.get() else { return Vec::new() };
        let methods = rows.chunks(CODES.len()).zip(&METHODS.all);
        let rows = methods.flat_map(|(rows, method)| {
            rows.iter().zip(CODES).map(move |(row, code)| {
                let labels = [method.service.clone(), method.name.clone(), code.to_owned()];
                (labels, row.count.load(Relaxed), row.nanos.load(Relaxed))
            })
        });
        let mut rows: Vec<_> = rows.filter(|(_, count, _)| *count > 0).collect();
        rows.sort_unstable();
        rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn methods_are_known_by_their_paths() {
        for (path, name, streams) in [
            ("/dflockd.v1.Locks/Acquire", "Acquire", Streams::No),
            ("/dflockd.v1.Sessions/KeepAliveStream", "KeepAliveStream", Streams::Yes),
            ("/dflockd.v1.Cluster/Health", "Health", Streams::Health),
            ("/grpc.health.v1.Health/Check", "Check", Streams::No),
            ("/grpc.health.v1.Health/Watch", "Watch", Streams::Health),
            (
                "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
                "ServerReflectionInfo",
                Streams::Reflection,
            ),
            ("/dflockd.v1.Locks/Acquires", OTHER, Streams::No),
            ("", OTHER, Streams::No),
        ] {
            let method = Method::of(path);
            assert_eq!((&*method.name, method.streams), (name, streams), "{path}");
        }
    }

    #[test]
    fn calls_are_counted_by_method_and_code() {
        let calls = Calls::default();
        assert!(calls.rows().is_empty());
        let took = Duration::from_nanos(5);
        let [acquire, invented] = ["/dflockd.v1.Locks/Acquire", "/a/b"].map(Method::of);
        calls.add(acquire, Code::Ok, took);
        calls.add(acquire, Code::Ok, took);
        calls.add(acquire, Code::Unauthenticated, took);
        calls.add(invented, Code::Unimplemented, took);
        let labels = |a: &str, b: &str, c: &str| [a, b, c].map(str::to_owned);
        let expected = [
            (labels("dflockd.v1.Locks", "Acquire", "OK"), 2, 10),
            (labels("dflockd.v1.Locks", "Acquire", "UNAUTHENTICATED"), 1, 5),
            (labels(OTHER, OTHER, "UNIMPLEMENTED"), 1, 5),
        ];
        assert_eq!(calls.rows(), expected);
        assert_eq!(calls.total(), 4);
    }
}
