//! Subscriptions: what comes by a stream.

use dflockd_wire::Push;
use dflockd_wire::grpc::elections_client::ElectionsClient;
use dflockd_wire::grpc::signals_client::SignalsClient;
use dflockd_wire::grpc::subscribe_response::What;
use dflockd_wire::grpc::watch_client::WatchClient;
use dflockd_wire::grpc::{ChangeKind, LeaderEvent, ObserveRequest, SubscribeRequest, WatchRequest};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use super::{Api, Failure, Outlet};
use crate::reply::Reply;

/// A subscription as the message that makes it.
#[derive(Clone)]
pub(super) enum Subscription {
    Signals(SubscribeRequest),
    Changes(WatchRequest),
    Leaders(ObserveRequest),
}

/// Passes on what a subscription brings until its stream ends; says why it did.
pub(super) async fn follow(api: &Api, subscription: Subscription, outlet: &Outlet) -> Failure {
    let mut listener = Listener { outlet, begun: false };
    let ended = match subscription {
        Subscription::Signals(message) => listen(api, message, &mut listener).await,
        Subscription::Changes(message) => watch(api, message, &mut listener).await,
        Subscription::Leaders(message) => observe(api, message, &mut listener).await,
    };
    match ended {
        Err(status) if !listener.begun => status.into(),
        // The connection is told apart by nothing else: it ends with what it was for.
        Ok(()) | Err(_) => Failure::Broken,
    }
}

struct Listener<'a> {
    outlet: &'a Outlet,
    begun: bool,
}

impl Listener<'_> {
    /// From now on nothing is missed.
    fn begin(&mut self) {
        if !std::mem::replace(&mut self.begun, true) {
            self.outlet.settle(Ok(Reply::Ok));
        }
    }

    fn push(&self, push: Push<'_>) {
        self.outlet.tell(push.into());
    }
}

async fn listen(
    api: &Api,
    message: SubscribeRequest,
    listener: &mut Listener<'_>,
) -> Result<(), Status> {
    // Open as long as somebody listens: a request that never ends would keep the stream when all else is gone.
    let (wishes, wished) = mpsc::channel(1);
    let _ = wishes.send(message).await;
    let request = api.request(ReceiverStream::new(wished));
    let mut heard = SignalsClient::new(api.channel.clone()).subscribe(request).await?.into_inner();
    while let Some(told) = heard.message().await? {
        match told.what {
            Some(What::Applied(_)) => listener.begin(),
            Some(What::Signal(signal)) => {
                listener.push(Push::Signal { channel: &signal.channel, payload: &signal.payload });
            }
            None => {}
        }
    }
    Ok(())
}

async fn watch(
    api: &Api,
    message: WatchRequest,
    listener: &mut Listener<'_>,
) -> Result<(), Status> {
    let request = api.request(message);
    let mut heard = WatchClient::new(api.channel.clone()).watch(request).await?.into_inner();
    while let Some(told) = heard.message().await? {
        // The first message is a bookmark.
        listener.begin();
        for change in &told.changes {
            if let Some(event) = event_of(change.kind()) {
                listener.push(Push::Watch { event, key: &change.key });
            }
        }
    }
    Ok(())
}

async fn observe(
    api: &Api,
    message: ObserveRequest,
    listener: &mut Listener<'_>,
) -> Result<(), Status> {
    let (key, request) = (message.key.clone(), api.request(message));
    let mut heard = ElectionsClient::new(api.channel.clone()).observe(request).await?.into_inner();
    listener.begin();
    while let Some(told) = heard.message().await? {
        let event = match (told.event(), &told.leader) {
            (LeaderEvent::Resigned, _) => "resigned",
            (LeaderEvent::Failover, _) => "failover",
            (LeaderEvent::Elected, _) | (LeaderEvent::Unspecified, Some(_)) => "elected",
            (LeaderEvent::Unspecified, None) => continue,
        };
        listener.push(Push::Leader { event, key: &key });
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
