//! The service `Signals`.

use std::collections::VecDeque;
use std::sync::Arc;

use dflockd_core::{Command, Push, Subscription as Wanted, command};
use dflockd_engine::Api;
use dflockd_wire::grpc::signals_server::Signals;
use dflockd_wire::grpc::subscribe_response::What;
use dflockd_wire::grpc::{
    Applied, PublishRequest, PublishResponse, Reason, Signal, SubscribeRequest, SubscribeResponse,
    Subscription,
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Response, Status, Streaming};

use super::error::Refused;
use super::session_calls::ResponseStream;
use super::{App, Peer, Services, budget, done, fields};
use crate::frontend::auth::Asker;
use crate::frontend::caller::Caller;

/// What may wait for a reader besides what the session keeps for it.
const NEWS_MAX: usize = 4;

type News = mpsc::Sender<Result<SubscribeResponse, Status>>;

#[tonic::async_trait]
impl Signals for Services {
    async fn publish(
        &self,
        request: Request<PublishRequest>,
    ) -> Result<Response<PublishResponse>, Status> {
        self.execute(request).await
    }

    type SubscribeStream = ResponseStream<SubscribeResponse>;

    async fn subscribe(
        &self,
        request: Request<Streaming<SubscribeRequest>>,
    ) -> Result<Response<Self::SubscribeStream>, Status> {
        let Peer(peer, _) = Peer::of(&request)?;
        let pushes = Arc::clone(&budget(&request)?.pushes);
        let asker = Asker::of(&self.0, &request)?;
        let mut requests = request.into_inner();
        let app = Arc::clone(&self.0);
        let first = requests.message().await?;
        let first = first.filter(|first| !first.add.is_empty());
        let first = first.ok_or_else(|| Refused::bad_request("a subscription is required"))?;
        let permit = app.sessions.permit(peer)?;
        let label = format!("signals {peer}");
        let caller = Caller::open_with(&app.service, Api::Grpc, label.into(), pushes);
        // Refused before the stream begins, where that is seen at once.
        apply(&asker, &caller, &first).await?;
        let (sender, news) = mpsc::channel(NEWS_MAX);
        tokio::spawn(async move {
            let _permit = permit;
            let told = tokio::select! {
                told = listen(&app, &asker, &caller, requests, &sender) => told,
                () = sender.closed() => return,
                () = app.drained() => Err(Refused::draining().into()),
            };
            if let Err(status) = told {
                let _ = sender.send(Err(status)).await;
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(news))))
    }
}

/// Tells signals and takes more wishes until nobody listens.
async fn listen(
    app: &App,
    asker: &Asker,
    caller: &Caller,
    mut requests: Streaming<SubscribeRequest>,
    news: &News,
) -> Result<(), Status> {
    let mut unsent = VecDeque::from([applied()]);
    let mut speaks = true;
    loop {
        tokio::select! {
            biased;
            permit = news.reserve(), if !unsent.is_empty() => {
                let Ok(permit) = permit else { return Ok(()) };
                if let Some(next) = unsent.pop_front() {
                    permit.send(Ok(next));
                }
            }
            push = caller.pushed(), if unsent.is_empty() => match push {
                Some(Push::Signal { channel, payload }) => {
                    let (channel, payload) = (channel.to_vec().into(), payload.to_vec().into());
                    let what = Some(What::Signal(Signal { channel, payload }));
                    unsent.push_back(SubscribeResponse { what });
                }
                Some(Push::Change(_) | Push::Leader { .. } | Push::Lost { .. }) => {}
                None => return Err(lagged(app).into()),
            },
            () = caller.gone(), if !unsent.is_empty() => return Err(lagged(app).into()),
            request = requests.message(), if speaks && unsent.is_empty() => match request? {
                Some(request) => {
                    apply(asker, caller, &request).await?;
                    unsent.push_back(applied());
                }
                None => speaks = false,
            },
        }
    }
}

fn lagged(app: &App) -> Refused {
    app.service.metrics.slow_reader(Api::Grpc);
    let text = "the stream was read too slowly";
    Refused::new(Code::ResourceExhausted, Reason::Lagged, text)
}

fn applied() -> SubscribeResponse {
    SubscribeResponse { what: Some(What::Applied(Applied {})) }
}

async fn apply(asker: &Asker, caller: &Caller, request: &SubscribeRequest) -> Result<(), Refused> {
    let wanted = |subscription: &Subscription| -> Result<_, Refused> {
        let pattern = fields::pattern(&subscription.pattern)?.to_vec();
        Ok((pattern, fields::group(&subscription.group)?.to_vec()))
    };
    for subscription in &request.add {
        let (pattern, group) = wanted(subscription)?;
        let wanted = Wanted::Signals { pattern: &pattern, group: &group };
        let subscribe = asker.command(Command::Subscribe(command::Subscribe { to: wanted }))?;
        done(caller.call(subscribe).await?.outcome())?;
    }
    for subscription in &request.remove {
        let (pattern, group) = wanted(subscription)?;
        let wanted = Wanted::Signals { pattern: &pattern, group: &group };
        let unsubscribe = Command::Unsubscribe(command::Unsubscribe { from: wanted });
        done(caller.call(asker.command(unsubscribe)?).await?.outcome())?;
    }
    Ok(())
}
