//! Streams: watches that resume, signals, elections, health.

use dflockd_testkit::eventually::tasks::soon;
use dflockd_wire::grpc::subscribe_response::What;
use dflockd_wire::grpc::*;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Streaming};

use super::site::{Link, Members, Session, Site, info, refused};

async fn set(link: &Link, key: &str) -> u64 {
    let request =
        SetRequest { key: key.to_owned().into(), value: "x".into(), ..Default::default() };
    link.kv().set(request).await.unwrap().into_inner().revision
}

fn watch(pattern: &str, after_revision: Option<u64>) -> WatchRequest {
    let patterns = vec![pattern.to_owned().into()];
    WatchRequest { patterns, after_revision, kinds: Vec::new() }
}

async fn next<T>(stream: &mut Streaming<T>) -> T {
    soon("the next message", stream.message()).await.unwrap().expect("it goes on")
}

/// The next changes; bookmarks in between say how far the stream is.
async fn changes(stream: &mut Streaming<WatchResponse>, count: usize) -> Vec<(u64, String)> {
    let mut all = Vec::new();
    let mut told = 0;
    while all.len() < count {
        let message = next(stream).await;
        assert!(message.revision >= told, "bookmarks do not go back");
        told = message.revision;
        for change in message.changes {
            assert!(change.revision <= told, "promise 31");
            all.push((change.revision, String::from_utf8(change.key.to_vec()).unwrap()));
        }
    }
    all
}

/// Promises 31 and 32.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watch_resumes_where_it_was() {
    let members = Members::start(3, &[]);
    let (link, other) = (members.link(0).await, members.link(1).await);
    let mut stream = link.watch().watch(watch("w.>", None)).await.unwrap().into_inner();
    let first = next(&mut stream).await;
    assert!(first.changes.is_empty(), "a bookmark says where it begins");
    let mut expected = Vec::new();
    for number in 0..10 {
        let key = format!("w.{number}");
        set(&other, "elsewhere").await;
        expected.push((set(&link, &key).await, key));
    }
    assert_eq!(changes(&mut stream, 10).await, expected, "in order, each once");
    // From the middle, through another member.
    let middle = Some(expected[4].0);
    let resumed = other.watch().watch(watch("w.>", middle)).await;
    let mut resumed = resumed.unwrap().into_inner();
    assert_eq!(changes(&mut resumed, 5).await, expected[5..]);
    // Filters.
    let request = WatchRequest {
        patterns: vec!["w.3".into(), "c".into()],
        after_revision: Some(first.revision),
        kinds: vec![ChangeKind::Kset.into(), ChangeKind::Incr.into()],
    };
    let add = |delta| AddCounterRequest { key: "c".into(), delta, ..Default::default() };
    link.counters().add(add(1)).await.unwrap();
    link.counters().add(add(-1)).await.unwrap();
    set(&link, "w.3").await;
    let mut filtered = link.watch().watch(request).await.unwrap().into_inner();
    let keys: Vec<_> = changes(&mut filtered, 3).await.into_iter().map(|(_, key)| key).collect();
    assert_eq!(keys, ["w.3", "c", "w.3"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watch_says_what_it_can_not_tell() {
    let site = Site::start(&[]);
    let link = site.link().await;
    let revision = set(&link, "k").await;
    // Changes that are no longer kept, and those of another life of the server.
    for after in [0, revision + 1_000_000] {
        let stream = link.watch().watch(watch("k", Some(after))).await;
        let ended = match stream.map(tonic::Response::into_inner) {
            Err(status) => status,
            Ok(mut stream) => loop {
                match soon("the end", stream.message()).await {
                    Ok(Some(message)) => assert!(message.changes.is_empty()),
                    Ok(None) => panic!("it ends with a reason"),
                    Err(status) => break status,
                }
            },
        };
        assert!(info(&ended).revision > 0 && info(&ended).revision <= revision);
        refused(Err::<(), _>(ended), Code::OutOfRange, Reason::Compacted);
    }
    for patterns in [vec![], vec!["a*".into()], vec!["k".into(); 65]] {
        let request = WatchRequest { patterns, ..WatchRequest::default() };
        let status = link.watch().watch(request).await.map(|_| ());
        refused(status, Code::InvalidArgument, Reason::BadRequest);
    }
}

fn subscription(pattern: &str, group: &str) -> Subscription {
    Subscription { pattern: pattern.to_owned().into(), group: group.to_owned().into() }
}

struct Listener {
    requests: mpsc::Sender<SubscribeRequest>,
    stream: Streaming<SubscribeResponse>,
}

impl Listener {
    async fn start(link: &Link, pattern: &str, group: &str) -> Self {
        let (requests, stream) = mpsc::channel(4);
        let add = vec![subscription(pattern, group)];
        requests.send(SubscribeRequest { add, remove: Vec::new() }).await.unwrap();
        let stream = link.signals().subscribe(ReceiverStream::new(stream)).await;
        let mut listener = Self { requests, stream: stream.unwrap().into_inner() };
        assert_eq!(listener.next().await, None, "it listens");
        listener
    }

    /// The payload of the next signal; none if a request was applied.
    async fn next(&mut self) -> Option<String> {
        match next(&mut self.stream).await.what.expect("one of them") {
            What::Applied(_) => None,
            What::Signal(signal) => Some(String::from_utf8(signal.payload.to_vec()).unwrap()),
        }
    }
}

async fn publish(link: &Link, channel: &str, payload: &str) -> u64 {
    let request = PublishRequest {
        channel: channel.to_owned().into(),
        payload: payload.to_owned().into(),
        ..Default::default()
    };
    link.signals().publish(request).await.unwrap().into_inner().receivers
}

/// Promises 33 and 34.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn signals_reach_whoever_listens() {
    let members = Members::start(3, &[]);
    let (here, there) = (members.link(0).await, members.link(1).await);
    let mut all = Listener::start(&here, "a.>", "").await;
    let (mut one, mut two) =
        (Listener::start(&here, "a.b", "g").await, Listener::start(&there, "a.b", "g").await);
    for number in 0..6 {
        assert_eq!(publish(&there, "a.b", &number.to_string()).await, 2);
        assert_eq!(all.next().await, Some(number.to_string()), "in order");
    }
    let (mut of_one, mut of_two) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        of_one.push(one.next().await.unwrap());
        of_two.push(two.next().await.unwrap());
    }
    let mut both = [of_one, of_two].concat();
    both.sort();
    assert_eq!(both, ["0", "1", "2", "3", "4", "5"], "each to one of the group");
    // More wishes on the same stream.
    let (add, remove) = (vec![subscription("z", "")], vec![subscription("a.>", "")]);
    all.requests.send(SubscribeRequest { add, remove }).await.unwrap();
    assert_eq!(all.next().await, None);
    assert_eq!(publish(&here, "a.c", "nobody").await, 0);
    assert_eq!(publish(&here, "z", "there").await, 1);
    assert_eq!(all.next().await.as_deref(), Some("there"));
    // Who has said all it wanted still listens.
    let Listener { requests, mut stream } = all;
    drop(requests);
    assert_eq!(publish(&here, "z", "still").await, 1);
    let what = next(&mut stream).await.what;
    assert!(matches!(what, Some(What::Signal(signal)) if &signal.payload[..] == b"still"));
}

async fn campaign(link: &Link, session: &Session, wait_ms: u64) -> Grant {
    let request = CampaignRequest {
        session: session.id.clone(),
        key: "e".into(),
        wait_ms,
        ..Default::default()
    };
    let response = link.elections().campaign(request).await.unwrap().into_inner();
    response.grant.expect("it leads")
}

/// Promise 29: leaders in the order of fences, without repeats.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn observers_see_who_leads() {
    let site = Site::start(&[]);
    let link = site.link().await;
    let (a, b) = (link.open(0).await, link.open(0).await);
    let observe = ObserveRequest { key: "e".into() };
    let mut stream = link.elections().observe(observe.clone()).await.unwrap().into_inner();
    let at_first = next(&mut stream).await;
    assert_eq!(at_first, ObserveResponse::default(), "nobody leads");
    let first = campaign(&link, &a, 0).await;
    let told = next(&mut stream).await;
    assert_eq!(told.event(), LeaderEvent::Elected);
    let leader = told.leader.expect("somebody leads");
    assert_eq!((leader.fence, leader.session), (first.fence, a.number));
    let proclaim = ProclaimRequest {
        session: a.id.clone(),
        key: "e".into(),
        token: first.token.clone(),
        value: "at 10.0.0.1".into(),
        lease_ms: 0,
    };
    link.elections().proclaim(proclaim).await.unwrap();
    let told = next(&mut stream).await.leader.expect("it still leads");
    assert_eq!((told.fence, &told.value[..]), (first.fence, &b"at 10.0.0.1"[..]));
    // Who comes later is told at once, and once.
    let mut late = link.elections().observe(observe).await.unwrap().into_inner();
    let told = next(&mut late).await.leader.expect("it leads");
    assert_eq!((told.fence, &told.value[..]), (first.fence, &b"at 10.0.0.1"[..]));
    let (link_of_b, waits) = (link.clone(), b.clone());
    let waiting = tokio::spawn(async move { campaign(&link_of_b, &waits, 20_000).await });
    link.wait_for_waiters("e", 1).await;
    let resign = ResignRequest {
        session: a.id.clone(),
        key: "e".into(),
        token: first.token.clone(),
        ..Default::default()
    };
    link.elections().resign(resign).await.unwrap();
    let second = soon("its turn", waiting).await.unwrap();
    for stream in [&mut stream, &mut late] {
        let mut last = first.fence;
        loop {
            let told = next(stream).await;
            let fence = told.leader.as_ref().map_or(last, |leader| leader.fence);
            assert!(fence >= last, "promise 29");
            last = fence;
            if told.event() == LeaderEvent::Elected {
                let leader = told.leader.expect("somebody leads");
                assert_eq!((leader.fence, leader.session), (second.fence, b.number));
                assert!(leader.value.is_empty(), "the value went with its leader");
                break;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_says_how_the_server_is() {
    let site = Site::start(&[]);
    let link = site.link().await;
    let mut stream = link.cluster().health(HealthRequest {}).await.unwrap().into_inner();
    let now = next(&mut stream).await;
    assert!(now.ready && !now.draining && now.role == "memory", "{now:?}");
    site.server.signal("TERM");
    let last = next(&mut stream).await;
    assert!(!last.ready && last.draining, "{last:?}");
}
