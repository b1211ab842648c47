//! Who may speak: TLS, auth token, admin token.

use dflockd_testkit::eventually::tasks::{eventually, soon};
use dflockd_testkit::http::Ask;
use dflockd_testkit::{Dir, Pair};
use dflockd_wire::grpc::*;
use tonic::metadata::MetadataValue;
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint};
use tonic::{Code, Request};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

use super::site::{Link, Site, ask_http, refused};

const TOKEN: &str = "t0ken-of-the-tests";
const ADMIN: &str = "adm1n-of-the-tests";

fn with<T>(message: T, name: &'static str, value: &str) -> Request<T> {
    let mut request = Request::new(message);
    request.metadata_mut().insert(name, MetadataValue::try_from(value).unwrap());
    request
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_speaks_without_the_token() {
    let site = Site::start(&["--auth-token", TOKEN]);
    let link = site.link().await;
    let open = OpenRequest::default;
    let without = link.sessions().open(open()).await;
    refused(without, Code::Unauthenticated, Reason::Unauthenticated);
    for wrong in ["", "Bearer", "Bearer ", "Bearer wrong", "Basic x", TOKEN] {
        let refusal = link.sessions().open(with(open(), "authorization", wrong)).await;
        refused(refusal, Code::Unauthenticated, Reason::Unauthenticated);
    }
    for right in [format!("Bearer {TOKEN}"), format!("bearer  {TOKEN} ")] {
        link.sessions().open(with(open(), "authorization", &right)).await.unwrap();
    }
    // Whoever watches the server needs no token.
    let mut health = HealthClient::new(link.channel.clone());
    let healthy = health.check(HealthCheckRequest::default()).await.unwrap().into_inner();
    assert_eq!(healthy.status, 1);
    let mut reflection =
        tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient::new(
            link.channel.clone(),
        );
    let asked = tokio_stream::iter([tonic_reflection::pb::v1::ServerReflectionRequest::default()]);
    let described = reflection.server_reflection_info(asked).await;
    assert_eq!(described.unwrap_err().code(), Code::Unauthenticated);
    assert!(!site.server.output().contains(TOKEN), "no token in the log");
}

/// GUARANTEES 51: what came with a token that is dropped ends at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_token_ends_what_came_with_it() {
    let dir = Dir::new();
    let file = dir.write("token", TOKEN);
    let admin_file = dir.write("admin", ADMIN);
    let flags = ["--auth-token-file", &file, "--admin-token-file", &admin_file];
    let (site, http) = Site::start_with_http(&flags);
    let link = site.link().await;
    let (old, new) = (format!("Bearer {TOKEN}"), "Bearer another-token-of-the-tests".to_owned());
    let open = async |bearer: &str| {
        let open = with(OpenRequest::default(), "authorization", bearer);
        link.sessions().open(open).await.map(tonic::Response::into_inner)
    };
    let opened = open(&old).await.unwrap();
    let acquire = |session: &str, key: &str, wait_ms, bearer: &str| {
        let (session, key) = (session.to_owned(), key.to_owned().into());
        let request = AcquireRequest { session, key, wait_ms, ..AcquireRequest::default() };
        with(request, "authorization", bearer)
    };
    link.locks().acquire(acquire(&opened.session, "k", 0, &old)).await.unwrap();
    let waits = open(&old).await.unwrap();
    let waiting = {
        let (mut locks, request) = (link.locks(), acquire(&waits.session, "k", 600_000, &old));
        tokio::spawn(async move { locks.acquire(request).await })
    };
    let pattern = Subscription { pattern: "a".into(), group: Default::default() };
    let wish = tokio_stream::iter([SubscribeRequest { add: vec![pattern], remove: Vec::new() }]);
    let wish = tokio_stream::StreamExt::chain(wish, tokio_stream::pending());
    let signals = link.signals().subscribe(with(wish, "authorization", &old)).await;
    let mut signals = signals.unwrap().into_inner();
    assert!(signals.message().await.unwrap().is_some(), "applied");
    let watch = WatchRequest { patterns: vec!["a".into()], ..WatchRequest::default() };
    let watch = link.watch().watch(with(watch, "authorization", &old)).await;
    let mut watch = watch.unwrap().into_inner();
    assert!(watch.message().await.unwrap().is_some(), "a bookmark");

    dir.write("token", format!("another-token-of-the-tests\n{TOKEN}\n"));
    site.server.signal("HUP");
    eventually("the new token is good", async || open(&new).await.ok()).await;
    open(&old).await.unwrap();
    let mut follow = AuditRequest { follow: true, ..AuditRequest::default() };
    follow.after = 0;
    let mut follow = with(follow, "authorization", &new);
    follow.metadata_mut().insert("x-dflockd-admin", MetadataValue::try_from(ADMIN).unwrap());
    let mut audit = link.admin().audit(follow).await.unwrap().into_inner();

    dir.write("token", "another-token-of-the-tests");
    dir.write("admin", "another-admin-of-the-tests");
    site.server.signal("HUP");
    let (code, reason) = (Code::Unauthenticated, Reason::Unauthenticated);
    refused(soon("the wait ends", waiting).await.unwrap(), code, reason);
    refused(soon("the signals end", signals.message()).await, code, reason);
    let ended = soon("the watch ends", async {
        loop {
            if let Err(status) = watch.message().await {
                return status;
            }
        }
    });
    refused(Err::<(), _>(ended.await), code, reason);
    let audited = soon("the audit ends", audit.message()).await;
    refused(audited, Code::PermissionDenied, Reason::NotAdmin);
    refused(open(&old).await, code, reason);
    let other = open(&new).await.unwrap();
    link.locks().acquire(acquire(&other.session, "k", 20_000, &new)).await.unwrap();
    // The session is nobody's any more.
    let gone = link.locks().acquire(acquire(&opened.session, "x", 0, &new)).await;
    refused(gone, Code::NotFound, Reason::SessionGone);
    let scrape = Ask::get("/metrics").header("Authorization", &new);
    let count = ask_http(http, &scrape).metric("dflockd_revoked_total{api=\"grpc\"}");
    assert!(count >= 4.0, "{count}");
}

/// GUARANTEES 48: wrong tokens are limited; who is in goes on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn guessing_is_limited() {
    let (site, http) = Site::start_with_http(&["--auth-token", TOKEN, "--admin-token", ADMIN]);
    let (link, known) = (site.link().await, site.link().await);
    let open = async |link: &Link, token: &str| {
        let bearer = format!("Bearer {token}");
        link.sessions().open(with(OpenRequest::default(), "authorization", &bearer)).await
    };
    open(&known, TOKEN).await.unwrap();
    let mut looked_at = 0;
    for _ in 0..30 {
        let status = open(&link, "wrong").await.unwrap_err();
        looked_at += u32::from(status.code() == Code::Unauthenticated);
    }
    assert!((10..20).contains(&looked_at), "{looked_at}");
    let right = open(&link, TOKEN).await;
    refused(right, Code::ResourceExhausted, Reason::RateLimited);
    open(&known, TOKEN).await.unwrap();
    let list = ListSessionsRequest { after: 0, limit: 0 };
    let mut list = with(list, "authorization", &format!("Bearer {TOKEN}"));
    list.metadata_mut().insert("x-dflockd-admin", MetadataValue::from_static("wrong"));
    let listed = known.admin().list_sessions(list).await;
    refused(listed, Code::ResourceExhausted, Reason::RateLimited);
    let page = eventually("the right token is good again", async || {
        let scrape = Ask::get("/metrics").header("Authorization", &format!("Bearer {TOKEN}"));
        let reply = ask_http(http, &scrape);
        (reply.status == 200).then(|| reply.text())
    })
    .await;
    let line = "dflockd_auth_failures_total{api=\"grpc\",token=\"admin\"} 1";
    assert!(page.contains(line), "{page}");
}

/// Promise 10.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_operator_ends_holds_and_sessions() {
    let site = Site::start(&["--admin-token", ADMIN]);
    let link = site.link().await;
    let mut metadata = std::collections::BTreeMap::new();
    metadata.insert("version".to_owned(), "7".to_owned());
    let request = OpenRequest { ttl_ms: 0, client_name: "victim".into(), metadata };
    let opened = link.sessions().open(request).await.unwrap().into_inner();
    let victim =
        super::site::Session { link: link.clone(), id: opened.session, number: opened.number };
    let held = victim.lock("k").await;
    let force =
        |fence| ForceReleaseRequest { key: "k".into(), mode: 0, fence, reason: "because".into() };
    let without = link.admin().force_release(force(held.fence)).await;
    refused(without, Code::PermissionDenied, Reason::NotAdmin);
    let wrong = with(force(held.fence), "x-dflockd-admin", "wrong");
    let wrong = link.admin().force_release(wrong).await;
    refused(wrong, Code::PermissionDenied, Reason::NotAdmin);
    let none =
        with(ForceReleaseRequest { reason: " ".into(), ..force(1) }, "x-dflockd-admin", ADMIN);
    let none = link.admin().force_release(none).await;
    refused(none, Code::InvalidArgument, Reason::BadRequest);
    let missing = link.admin().force_release(with(force(1), "x-dflockd-admin", ADMIN)).await;
    refused(missing, Code::NotFound, Reason::NotHeld);
    let right = with(force(held.fence), "x-dflockd-admin", ADMIN);
    link.admin().force_release(right).await.unwrap();
    site.server.wait_for_output("hold ended by an operator");
    let lost = victim.keep_alive().await.unwrap().lost;
    assert_eq!((lost.len(), lost[0].fence, lost[0].reason), (1, held.fence, 2));
    let again = victim.lock("k").await;
    assert!(again.fence > held.fence, "promise 10");

    let list = with(ListSessionsRequest { after: 0, limit: 0 }, "x-dflockd-admin", ADMIN);
    let listed = link.admin().list_sessions(list).await.unwrap().into_inner();
    let found = listed.sessions.iter().find(|session| session.number == victim.number);
    let found = found.expect("it is listed");
    assert_eq!((&*found.client, &*found.api, found.holds), ("victim", "grpc", 1));
    assert_eq!(found.metadata["version"], "7");
    let end = |number| {
        let request = EndSessionRequest { number, reason: "because".into() };
        with(request, "x-dflockd-admin", ADMIN)
    };
    link.admin().end_session(end(victim.number)).await.unwrap();
    let gone = link.admin().end_session(end(victim.number)).await;
    refused(gone, Code::NotFound, Reason::NotFound);
    refused(victim.keep_alive().await, Code::NotFound, Reason::SessionGone);
    assert!(!site.server.output().contains(ADMIN), "no token in the log");
    // Without a token nobody is an operator.
    let other = Site::start(&[]);
    let disabled = other.link().await.admin().end_session(end(1)).await;
    refused(disabled, Code::FailedPrecondition, Reason::AdminDisabled);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tls_is_the_one_of_the_line_protocol() {
    let dir = Dir::new();
    let pair = Pair::new();
    let [cert, key] = pair.flags(&dir);
    let site = Site::start(&["--auth-token", TOKEN, &cert, &key]);
    let authority = Certificate::from_pem(&pair.cert);
    let tls = ClientTlsConfig::new().ca_certificate(authority).domain_name("localhost");
    let endpoint = Endpoint::from_shared(format!("https://{}", site.grpc)).unwrap();
    let link = Link::over(endpoint.tls_config(tls).unwrap()).await;
    let bearer = format!("Bearer {TOKEN}");
    let open = with(OpenRequest::default(), "authorization", &bearer);
    link.sessions().open(open).await.unwrap();
    let refusal = link.sessions().open(OpenRequest::default()).await;
    refused(refusal, Code::Unauthenticated, Reason::Unauthenticated);
    // Plain text is not answered.
    let plain = Endpoint::from_shared(format!("http://{}", site.grpc)).unwrap();
    match plain.connect().await {
        Err(_) => {}
        Ok(channel) => {
            let plain = Link { channel };
            let open = with(OpenRequest::default(), "authorization", &bearer);
            assert!(plain.sessions().open(open).await.is_err());
        }
    }
}
