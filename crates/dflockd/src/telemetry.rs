//! Traces for whoever collects them: a span for each HTTP request, beneath the caller's own if it names one, and one
//! for each line-protocol connection.
//!
//! Nothing of this exists unless an endpoint is given. What is finished goes into a bounded queue, from which a thread
//! of its own sends; when that can not keep up, spans are dropped and nobody waits. Spans carry methods, routes,
//! statuses and addresses, never a key, a token or a value.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use axum::http::{HeaderMap, Method, StatusCode};
use opentelemetry::propagation::{Extractor, TextMapPropagator};
use opentelemetry::trace::{Span as _, SpanKind, Status, Tracer, TracerProvider};
use opentelemetry::{Context, KeyValue};
use opentelemetry_otlp::{SpanExporter, WithExportConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{
    self, BatchConfigBuilder, BatchSpanProcessor, Sampler, SdkTracer, SdkTracerProvider, Span,
    SpanData,
};

use crate::config::Config;
use crate::metrics::known_method;
use crate::service::Service;

/// Spans that may wait to be sent.
const QUEUE_MAX: usize = 4096;
/// Spans that are sent at once.
const BATCH_MAX: usize = 512;
/// How long a span waits for others to be sent with.
const DELAY: Duration = Duration::from_secs(1);
/// How long the collector may take.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(5);
/// What is left is sent within this time at the end.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

/// Where spans are made.
pub(crate) struct Telemetry {
    provider: SdkTracerProvider,
    tracer: SdkTracer,
    propagator: TraceContextPropagator,
}

/// The trace of an HTTP request. One that is dropped is the trace of a client that went away.
pub(crate) struct RequestTrace(Span);

/// The trace of a connection, which ends when dropped.
pub(crate) struct ConnectionTrace(Span);

/// What the settings ask for.
///
/// # Errors
///
/// If the endpoint can not be used.
pub(crate) fn start(config: &Config) -> anyhow::Result<Option<Telemetry>> {
    let start = |endpoint: &String| {
        let node = config.node_id.as_deref();
        Telemetry::start(endpoint, config.otlp_sample_percent, node)
    };
    config.otlp_endpoint.as_ref().map(start).transpose()
}

/// Sends what is left.
pub(crate) async fn stop(service: &Arc<Service>) {
    if service.telemetry.is_some() {
        let service = Arc::clone(service);
        // Not here: it is this thread that sends.
        let stop = move || service.telemetry.as_ref().map(Telemetry::stop);
        let _ = tokio::task::spawn_blocking(stop).await;
    }
}

impl Telemetry {
    /// Makes spans for a collector. Must be called inside a runtime; whether the collector is there shows later.
    ///
    /// # Errors
    ///
    /// If the endpoint is none.
    fn start(endpoint: &str, sample_percent: u64, node: Option<&str>) -> anyhow::Result<Self> {
        let exporter = SpanExporter::builder()
            .with_tonic()
            .with_endpoint(endpoint)
            .with_timeout(EXPORT_TIMEOUT)
            .build()
            .with_context(|| format!("cannot send traces to {endpoint}"))?;
        let batches = BatchConfigBuilder::default()
            .with_max_queue_size(QUEUE_MAX)
            .with_max_export_batch_size(BATCH_MAX)
            .with_scheduled_delay(DELAY)
            .build();
        let version = KeyValue::new("service.version", env!("CARGO_PKG_VERSION"));
        let node = node.map(|node| KeyValue::new("service.instance.id", node.to_owned()));
        let resource = Resource::builder_empty()
            .with_service_name("dflockd")
            .with_attributes([version].into_iter().chain(node))
            .build();
        let share = f64::from(u32::try_from(sample_percent).unwrap_or(100)) / 100.0;
        let sampler = Sampler::ParentBased(Box::new(Sampler::TraceIdRatioBased(share)));
        let provider = SdkTracerProvider::builder()
            .with_resource(resource)
            .with_sampler(sampler)
            .with_span_processor(
                BatchSpanProcessor::builder(Outlet::new(exporter))
                    .with_batch_config(batches)
                    .build(),
            )
            .build();
        let tracer = provider.tracer("dflockd");
        Ok(Self { provider, tracer, propagator: TraceContextPropagator::new() })
    }

    /// An HTTP request begins, beneath the span that the headers of an authenticated client name.
    pub(crate) fn request(&self, method: &Method, headers: Option<&HeaderMap>) -> RequestTrace {
        let none = Context::new();
        let parent = match headers {
            Some(headers) => self.propagator.extract_with_context(&none, &Headers(headers)),
            None => none,
        };
        let span = self
            .tracer
            .span_builder(known_method(method))
            .with_kind(SpanKind::Server)
            .start_with_context(&self.tracer, &parent);
        RequestTrace(span)
    }

    /// A line-protocol connection begins.
    pub(crate) fn connection(&self, peer: SocketAddr) -> ConnectionTrace {
        let attributes = [
            KeyValue::new("network.peer.address", peer.ip().to_canonical().to_string()),
            KeyValue::new("network.peer.port", i64::from(peer.port())),
        ];
        let span = self
            .tracer
            .span_builder("line connection")
            .with_kind(SpanKind::Server)
            .with_attributes(attributes)
            .start_with_context(&self.tracer, &Context::new());
        ConnectionTrace(span)
    }

    /// Sends what is left. Blocks, but not for long.
    fn stop(&self) {
        if let Err(error) = self.provider.shutdown_with_timeout(FLUSH_TIMEOUT) {
            tracing::warn!(%error, "the last traces may be lost");
        }
    }
}

impl RequestTrace {
    /// The request is answered. `path` is the template of its route, if it has one.
    pub(crate) fn answered(mut self, method: &Method, path: Option<&str>, status: StatusCode) {
        let method = known_method(method);
        if !self.0.is_recording() {
            return;
        }
        self.0.set_attribute(KeyValue::new("http.request.method", method));
        if let Some(path) = path {
            self.0.update_name(format!("{method} {path}"));
            self.0.set_attribute(KeyValue::new("http.route", path.to_owned()));
        }
        let code = i64::from(status.as_u16());
        self.0.set_attribute(KeyValue::new("http.response.status_code", code));
        if status.is_server_error() {
            self.0.set_status(Status::error(""));
        }
        self.0.end();
    }
}

impl Drop for ConnectionTrace {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// Where spans leave; says once that they can not, and once that they can again.
#[derive(Debug)]
struct Outlet {
    exporter: SpanExporter,
    blocked: AtomicBool,
}

impl Outlet {
    fn new(exporter: SpanExporter) -> Self {
        Self { exporter, blocked: AtomicBool::new(false) }
    }
}

impl trace::SpanExporter for Outlet {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let result = self.exporter.export(batch).await;
        let was_blocked = self.blocked.swap(result.is_err(), Ordering::Relaxed);
        match &result {
            Err(error) if !was_blocked => {
                tracing::warn!(%error, "traces can not be sent, and are dropped");
            }
            Ok(()) if was_blocked => tracing::info!("traces are sent again"),
            Err(_) | Ok(()) => {}
        }
        result
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.exporter.set_resource(resource);
    }
}

/// The headers that name the caller's span.
struct Headers<'a>(&'a HeaderMap);

impl Extractor for Headers<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.to_str().ok()
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(|name| name.as_str()).collect()
    }
}
