//! The service `Elections`.
//!
//! What a leader proclaims is a KV entry under a name of its own, with the fence of its leadership in front. It is only
//! replaced by one with a fence that is not lower, so observers never see an earlier leader's value after a later
//! one's. Who may campaign for an election may set its value, and who may read its key is told: the entry is the
//! server's own.

use std::sync::Arc;

use dflockd_core::{
    Command, Expect, Fence, KeyView, LockView, Outcome, Push, Query, Space, Subscription, command,
};
use dflockd_engine::Api;
use dflockd_wire::grpc::elections_server::Elections;
use dflockd_wire::grpc::{
    CampaignRequest, CampaignResponse, Head, Leader, LeaderEvent as Told, ObserveRequest,
    ObserveResponse, ProclaimRequest, ProclaimResponse, Reason, ResignRequest, ResignResponse,
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Response, Status};

use super::error::Refused;
use super::session_calls::ResponseStream;
use super::views::{Names, millis};
use super::{App, Peer, Services, budget, done, fields, open};
use crate::frontend::auth::{Allowed, Asker};
use crate::frontend::caller::Caller;
use crate::frontend::feed::Follower;

/// What the entries of proclaimed values begin with.
const VALUE_PREFIX: &[u8] = b"_elections.";
/// A fence in hexadecimal digits and a colon.
const FENCE_BYTES: usize = 17;
/// How often a value is tried to be set while others change it.
const TRIES_MAX: usize = 16;
/// News that may wait for their reader.
const NEWS_MAX: usize = 16;

#[tonic::async_trait]
impl Elections for Services {
    async fn campaign(
        &self,
        request: Request<CampaignRequest>,
    ) -> Result<Response<CampaignResponse>, Status> {
        self.execute(request).await
    }

    async fn proclaim(
        &self,
        request: Request<ProclaimRequest>,
    ) -> Result<Response<ProclaimResponse>, Status> {
        let (peer, request) = open(request)?;
        let (key, value) = (fields::key(&request.key)?, fields::value(&request.value)?);
        let (token, lease) = (fields::token(&request.token)?, fields::lasting(request.lease_ms)?);
        let head = Head { session: &request.session, ..Head::default() };
        let client = self.0.member(peer, head).await?;
        let mut renew = command::Renew { key, space: Space::Locks, token, lease }.into();
        client.set_lease(&mut renew)?;
        // That this succeeds shows that it leads.
        let told = client.execute(renew).await?;
        let &Outcome::Renewed { fence, lease } = told.outcome() else {
            return Err(Refused::by(told.outcome()).into());
        };
        self.0.set_value(key, token.fence, value).await?;
        let (fence, valid_for_ms) = (fence.0, millis(lease));
        Ok(Response::new(ProclaimResponse { fence, valid_for_ms }))
    }

    async fn resign(
        &self,
        request: Request<ResignRequest>,
    ) -> Result<Response<ResignResponse>, Status> {
        let (key, token) = (request.get_ref().key.clone(), fields::token(&request.get_ref().token));
        let response = self.execute(request).await?;
        self.0.forget_value(&key, token?.fence).await;
        Ok(response)
    }

    type ObserveStream = ResponseStream<ObserveResponse>;

    async fn observe(
        &self,
        request: Request<ObserveRequest>,
    ) -> Result<Response<Self::ObserveStream>, Status> {
        let pushes = Arc::clone(&budget(&request)?.pushes);
        let asker = Asker::of(&self.0, &request)?;
        let (Peer(peer, _), request) = open(request)?;
        let key = fields::key(&request.key)?.to_vec();
        let subscription = Subscription::Leaders { key: &key };
        let subscribe = Command::Subscribe(command::Subscribe { to: subscription });
        let subscribe = asker.command(subscribe).map_err(Refused::from)?;
        let app = Arc::clone(&self.0);
        let permit = app.sessions.permit(peer)?;
        let label = format!("observer {peer}");
        let caller = Caller::open_with(&app.service, Api::Grpc, label.into(), pushes);
        let answer = caller.call(subscribe).await;
        done(answer.map_err(Refused::from)?.outcome())?;
        let values = value_key(&key);
        let values = app.service.feed.follow(Allowed::by_server(&values), 1, None).await;
        let values = values.map_err(Refused::by_core)?;
        let (sender, news) = mpsc::channel(NEWS_MAX);
        tokio::spawn(async move {
            let _permit = permit;
            let told = tokio::select! {
                told = observe(&app, &caller, values, key, &sender) => told,
                () = sender.closed() => return,
                () = app.drained() => Err(Refused::draining()),
            };
            if let Err(refused) = told {
                let _ = sender.send(Err(refused.into())).await;
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(news))))
    }
}

/// Tells what happens until nobody listens.
async fn observe(
    app: &Arc<App>,
    caller: &Caller,
    mut values: Follower,
    key: Vec<u8>,
    news: &mpsc::Sender<Result<ObserveResponse, Status>>,
) -> Result<(), Refused> {
    let mut last = app.leader(&key).await?;
    let mut fence = last.as_ref().map_or(0, |leader| leader.fence);
    let response = ObserveResponse { event: Told::Unspecified.into(), leader: last.clone() };
    if news.send(Ok(response)).await.is_err() {
        return Ok(());
    }
    loop {
        let event = tokio::select! {
            biased;
            push = caller.pushed() => match push {
                Some(Push::Leader { event, .. }) => Told::from(event),
                Some(Push::Signal { .. } | Push::Change(_) | Push::Lost { .. }) => continue,
                None => {
                    app.service.metrics.slow_reader(Api::Grpc);
                    let text = "the stream was read too slowly";
                    return Err(Refused::new(Code::ResourceExhausted, Reason::Lagged, text));
                }
            },
            changes = values.next() => match changes {
                Ok(_) => Told::Unspecified,
                Err(gone) => {
                    values.skip_to(gone.0);
                    Told::Unspecified
                }
            },
        };
        let leader = app.leader(&key).await?;
        let told = leader.as_ref().map_or(0, |leader| leader.fence);
        match event {
            // A later one was told already, or this one.
            Told::Elected if told <= fence => continue,
            Told::Unspecified if leader == last => continue,
            Told::Unspecified | Told::Elected | Told::Resigned | Told::Failover => {}
        }
        fence = fence.max(if event == Told::Elected { told } else { 0 });
        last.clone_from(&leader);
        let response = ObserveResponse { event: event.into(), leader };
        if news.send(Ok(response)).await.is_err() {
            return Ok(());
        }
    }
}

impl App {
    /// Who leads, and what it proclaimed.
    async fn leader(self: &Arc<Self>, key: &[u8]) -> Result<Option<Leader>, Refused> {
        let (app, asked) = (Arc::clone(self), key.to_vec());
        let found = self.inspect(move || {
            let engine = &*app.service.engine;
            let views = engine.inspect(&asked, 1)?;
            let is_election = |view: &&LockView| view.space == Space::Locks;
            let locks = views.iter().filter_map(|view| match view {
                KeyView::Lock(lock) => Some(lock),
                KeyView::Counter(_) | KeyView::Kv(_) | KeyView::List(_) | KeyView::Barrier(_) => {
                    None
                }
            });
            let mut locks = locks.filter(is_election);
            let holder = locks.find_map(|lock| lock.holders.first());
            let mut names = Names::new(engine);
            Some(holder.map(|holder| Leader {
                fence: holder.fence.0,
                session: holder.session.0,
                client: names.of(holder.session, holder.client.as_ref()),
                value: Default::default(),
            }))
        });
        let Some(mut leader) = found.await? else { return Ok(None) };
        if let Some((fence, value, _)) = self.value(key).await?
            && fence.0 == leader.fence
        {
            leader.value = value.into();
        }
        Ok(Some(leader))
    }

    /// The value of an election, by whom it was proclaimed, and the revision of its entry.
    async fn value(
        &self,
        key: &[u8],
    ) -> Result<Option<(Fence, Vec<u8>, dflockd_core::Revision)>, Refused> {
        let entry = Query::Entry { key: &value_key(key) };
        let read = self.common().query(Allowed::by_server(entry)).await;
        let Outcome::Entry { value, revision } = read.map_err(|_| Refused::unavailable())? else {
            return Ok(None);
        };
        let parsed = value.split_at_checked(FENCE_BYTES).and_then(|(fence, value)| {
            let fence = std::str::from_utf8(fence).ok()?.strip_suffix(':')?;
            Some((u64::from_str_radix(fence, 16).ok()?, value.to_vec()))
        });
        Ok(parsed.map(|(fence, value)| (Fence(fence), value, revision)))
    }

    /// Makes a value known, unless a later leader has.
    async fn set_value(&self, key: &[u8], fence: Fence, value: &[u8]) -> Result<(), Refused> {
        let mut entry = format!("{:016x}:", fence.0).into_bytes();
        entry.extend_from_slice(value);
        let name = value_key(key);
        for _ in 0..TRIES_MAX {
            let expect = match self.value(key).await? {
                None => Expect::Absent,
                Some((known, _, _)) if known > fence => {
                    let text = "a later leader has proclaimed something";
                    return Err(Refused::new(Code::FailedPrecondition, Reason::Deposed, text));
                }
                Some((_, _, revision)) => Expect::Revision(revision),
            };
            let command = Command::KvCompareAndSet(command::KvCompareAndSet {
                key: &name,
                expect,
                value: &entry,
                ttl: None,
            });
            let answer = self.common().call(Allowed::by_server(command)).await;
            let answer = answer.map_err(|_| Refused::unknown())?;
            let outcome = answer.outcome();
            if matches!(outcome, Outcome::Written(_)) {
                return Ok(());
            }
            if *outcome != Outcome::Conflict {
                return Err(Refused::by(outcome));
            }
        }
        Err(Refused::unavailable())
    }

    /// Forgets what a leader that has resigned proclaimed. It shows no more anyway.
    async fn forget_value(&self, key: &[u8], fence: Fence) {
        if let Ok(Some((known, _, _))) = self.value(key).await
            && known == fence
        {
            let delete = Command::KvDelete(command::KvDelete { key: &value_key(key) });
            let _ = self.common().call(Allowed::by_server(delete)).await;
        }
    }
}

/// The entry of an election's value.
fn value_key(key: &[u8]) -> Vec<u8> {
    [VALUE_PREFIX, key].concat()
}
