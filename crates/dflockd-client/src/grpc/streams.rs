//! Subscriptions: what comes by a stream.

use dflockd_wire::grpc::elections_client::ElectionsClient;
use dflockd_wire::grpc::signals_client::SignalsClient;
use dflockd_wire::grpc::subscribe_response::What;
use dflockd_wire::grpc::watch_client::WatchClient;
use dflockd_wire::grpc::{ObserveRequest, SubscribeRequest, WatchRequest};
use dflockd_wire::{LeaderEvent, Push};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use super::{Api, Failure, Outlet};
use crate::reply::Reply;

/// Where a subscription puts what it brings.
struct Listener<'a> {
    outlet: &'a Outlet,
    begun: bool,
}

impl Listener<'_> {
    /// From now on nothing is missed.
    fn begin(&mut self) {
        if !std::mem::replace(&mut self.begun, true) {
            self.outlet.resolve(Ok(Reply::Ok));
        }
    }

    fn push(&self, push: Push<'_>) {
        self.outlet.tell(push.into());
    }
}

/// When nothing is missed any more.
#[derive(PartialEq, Eq)]
enum Begins {
    /// As soon as the stream is open.
    Opened,
    /// When the stream says so.
    Told,
}

/// Passes on what a stream brings until it ends; says why it did.
async fn follow<T>(
    outlet: &Outlet,
    begins: Begins,
    opened: impl Future<Output = Result<tonic::Response<Streaming<T>>, Status>>,
    mut hear: impl FnMut(&mut Listener<'_>, T),
) -> Failure {
    let mut listener = Listener { outlet, begun: false };
    let ended = async {
        let mut heard = opened.await?.into_inner();
        if begins == Begins::Opened {
            listener.begin();
        }
        while let Some(told) = heard.message().await? {
            hear(&mut listener, told);
        }
        Ok::<(), Status>(())
    };
    match ended.await {
        Err(status) if !listener.begun => status.into(),
        // Nothing but its end tells that a connection brings nothing any more.
        Ok(()) | Err(_) => Failure::Broken,
    }
}

pub(super) async fn listen(api: &Api, message: SubscribeRequest, outlet: &Outlet) -> Failure {
    // Open as long as somebody listens: a request that never ends would keep the stream when all else is gone.
    let (wishes, wished) = mpsc::channel(1);
    let _ = wishes.send(message).await;
    let mut client = SignalsClient::new(api.channel.clone());
    let opened = client.subscribe(api.request(ReceiverStream::new(wished)));
    follow(outlet, Begins::Told, opened, |listener, told| match told.what {
        Some(What::Applied(_)) => listener.begin(),
        Some(What::Signal(signal)) => {
            listener.push(Push::Signal { channel: &signal.channel, payload: &signal.payload });
        }
        None => {}
    })
    .await
}

pub(super) async fn watch(api: &Api, message: WatchRequest, outlet: &Outlet) -> Failure {
    let mut client = WatchClient::new(api.channel.clone());
    follow(outlet, Begins::Told, client.watch(api.request(message)), |listener, told| {
        // The first message is a bookmark.
        listener.begin();
        for change in &told.changes {
            if let Some(event) = change.kind().known() {
                listener.push(Push::Watch { event: event.name(), key: &change.key });
            }
        }
    })
    .await
}

pub(super) async fn observe(api: &Api, message: ObserveRequest, outlet: &Outlet) -> Failure {
    let mut client = ElectionsClient::new(api.channel.clone());
    let (key, request) = (message.key.clone(), api.request(message));
    follow(outlet, Begins::Opened, client.observe(request), |listener, told| {
        // Whoever leads at the beginning was elected.
        let at_first = told.leader.as_ref().map(|_| LeaderEvent::Elected);
        if let Some(event) = told.event().known().or(at_first) {
            listener.push(Push::Leader { event: event.name(), key: &key });
        }
    })
    .await
}
