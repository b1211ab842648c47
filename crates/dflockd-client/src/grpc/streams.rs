//! Subscriptions: what comes by a stream, as pushes of the line protocol.

use dflockd_wire::grpc::elections_client::ElectionsClient;
use dflockd_wire::grpc::signals_client::SignalsClient;
use dflockd_wire::grpc::subscribe_response::What;
use dflockd_wire::grpc::watch_client::WatchClient;
use dflockd_wire::grpc::{
    ChangeKind, LeaderEvent, ObserveRequest, SubscribeRequest, Subscription, WatchRequest,
};
use dflockd_wire::{Push, Request};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::{Api, Failure, Said, bytes};

type Teller<'a> = &'a mpsc::UnboundedSender<Said>;

/// If the request is a subscription: makes it, says `ok`, and passes on what comes until the stream ends. Says why
/// it did.
pub(super) async fn follow(
    api: &Api,
    request: &Request<'_>,
    ok: &[u8],
    said: Teller<'_>,
) -> Option<Failure> {
    let ended = if let Request::Listen { pattern, group } = *request {
        listen(api, pattern, group, ok, said).await
    } else if let Request::Watch { pattern } = *request {
        watch(api, pattern, ok, said).await
    } else if let Request::Observe { key } = *request {
        observe(api, key, ok, said).await
    } else {
        return None;
    };
    // A stream that ends without a reason is broken, too.
    Some(ended.err().unwrap_or(Failure::Broken))
}

fn say(said: Teller<'_>, push: &Push<'_>) {
    let mut line = Vec::new();
    push.print(&mut line);
    let _ = said.send(Said::Lines(line));
}

async fn listen(
    api: &Api,
    pattern: &[u8],
    group: &[u8],
    ok: &[u8],
    said: Teller<'_>,
) -> Result<(), Failure> {
    let add = vec![Subscription { pattern: bytes(pattern), group: bytes(group) }];
    // Open as long as somebody listens: a request that never ends would keep the stream when all else is gone.
    let (wishes, wished) = mpsc::channel(1);
    let _ = wishes.send(SubscribeRequest { add, remove: Vec::new() }).await;
    let request = api.request(ReceiverStream::new(wished));
    let mut signals = SignalsClient::new(api.channel.clone());
    let mut heard = signals.subscribe(request).await?.into_inner();
    while let Some(told) = heard.message().await? {
        match told.what {
            Some(What::Applied(_)) => _ = said.send(Said::Lines(ok.to_vec())),
            Some(What::Signal(signal)) => {
                say(said, &Push::Signal { channel: &signal.channel, payload: &signal.payload });
            }
            None => {}
        }
    }
    Ok(())
}

async fn watch(api: &Api, pattern: &[u8], ok: &[u8], said: Teller<'_>) -> Result<(), Failure> {
    let patterns = vec![bytes(pattern)];
    let request = WatchRequest { patterns, after_revision: None, kinds: Vec::new() };
    let mut watch = WatchClient::new(api.channel.clone());
    let mut heard = watch.watch(api.request(request)).await?.into_inner();
    let mut begun = false;
    while let Some(told) = heard.message().await? {
        // The first message is a bookmark.
        if !std::mem::replace(&mut begun, true) {
            let _ = said.send(Said::Lines(ok.to_vec()));
        }
        for change in &told.changes {
            if let Some(event) = event_of(change.kind()) {
                say(said, &Push::Watch { event, key: &change.key });
            }
        }
    }
    Ok(())
}

async fn observe(api: &Api, key: &[u8], ok: &[u8], said: Teller<'_>) -> Result<(), Failure> {
    let request = api.request(ObserveRequest { key: bytes(key) });
    let mut elections = ElectionsClient::new(api.channel.clone());
    let mut heard = elections.observe(request).await?.into_inner();
    let _ = said.send(Said::Lines(ok.to_vec()));
    while let Some(told) = heard.message().await? {
        let event = match (told.event(), &told.leader) {
            (LeaderEvent::Resigned, _) => "resigned",
            (LeaderEvent::Failover, _) => "failover",
            (LeaderEvent::Elected, _) | (LeaderEvent::Unspecified, Some(_)) => "elected",
            (LeaderEvent::Unspecified, None) => continue,
        };
        say(said, &Push::Leader { event, key });
    }
    Ok(())
}

fn event_of(kind: ChangeKind) -> Option<&'static str> {
    Some(match kind {
        ChangeKind::Unspecified => return None,
        ChangeKind::Acquire => "acquire",
        ChangeKind::Release => "release",
        ChangeKind::Elect => "elect",
        ChangeKind::Resign => "resign",
        ChangeKind::Incr => "incr",
        ChangeKind::Decr => "decr",
        ChangeKind::Cset => "cset",
        ChangeKind::Kset => "kset",
        ChangeKind::Kdel => "kdel",
        ChangeKind::Kcas => "kcas",
        ChangeKind::Lpush => "lpush",
        ChangeKind::Rpush => "rpush",
        ChangeKind::Lpop => "lpop",
        ChangeKind::Rpop => "rpop",
        ChangeKind::Blpop => "blpop",
        ChangeKind::Brpop => "brpop",
    })
}
