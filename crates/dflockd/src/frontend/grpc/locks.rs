//! The service `Locks`: mutexes, semaphores, read-write locks.

#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "all that a call does not hope for is refused alike"
)]

use std::sync::Arc;

use dflockd_core::{Command, Grant as CoreGrant, LockPage, Only, Outcome, command};
use dflockd_wire::TokenText;
use dflockd_wire::grpc::locks_server::Locks;
use dflockd_wire::grpc::{
    AcquireRequest, AcquireResponse, DescribeRequest, DescribeResponse, EnqueueRequest,
    EnqueueResponse, Grant, ListRequest, ListResponse, ReleaseRequest, ReleaseResponse,
    RenewRequest, RenewResponse, TryAcquireRequest, WaitRequest, WaitResponse,
};
use prost::Message;
use tonic::{Request, Response, Status};

use super::error::Refused;
use super::gate::respond;
use super::sessions::Told;
use super::views::{self, Names, millis};
use super::{Services, budget, fields, fitting, open};
use crate::service::ANSWER_BYTES_MAX;

/// Holders and waiters that are named per lock in a list.
const EACH_MAX: usize = 32;
/// Holders and waiters that are named where one key is inspected.
const EACH_OF_ONE_MAX: usize = 1000;

#[tonic::async_trait]
impl Locks for Services {
    async fn acquire(
        &self,
        request: Request<AcquireRequest>,
    ) -> Result<Response<AcquireResponse>, Status> {
        let (peer, request) = open(request)?;
        let key = fields::key(&request.key)?;
        let mode = fields::mode(request.mode, request.limit)?;
        let wait = fields::millis(request.wait_ms)?;
        let client = self.0.member(peer, &request).await?;
        let lease = Some(client.lease(request.lease_ms)?);
        let salt = rand::random();
        let told = client
            .execute(Command::Acquire(command::Acquire { key, mode, wait, lease, salt }))
            .await?;
        let grant = granted(&told)?;
        Ok(respond(told, AcquireResponse { grant }))
    }

    async fn try_acquire(
        &self,
        request: Request<TryAcquireRequest>,
    ) -> Result<Response<AcquireResponse>, Status> {
        let (peer, request) = open(request)?;
        let key = fields::key(&request.key)?;
        let mode = fields::mode(request.mode, request.limit)?;
        let client = self.0.member(peer, &request).await?;
        let lease = Some(client.lease(request.lease_ms)?);
        let (wait, salt) = (dflockd_core::Span::ZERO, rand::random());
        let told = client
            .execute(Command::Acquire(command::Acquire { key, mode, wait, lease, salt }))
            .await?;
        let grant = granted(&told)?;
        Ok(respond(told, AcquireResponse { grant }))
    }

    async fn release(
        &self,
        request: Request<ReleaseRequest>,
    ) -> Result<Response<ReleaseResponse>, Status> {
        let (peer, request) = open(request)?;
        let key = fields::key(&request.key)?;
        let space = fields::space(request.mode)?;
        let token = fields::token(&request.token)?;
        let client = self.0.client(peer, &request).await?;
        let told = client
            .execute(Command::Release(command::Release { key, space, token, resign: false }))
            .await?;
        done(told.outcome())?;
        Ok(Response::new(ReleaseResponse {}))
    }

    async fn renew(
        &self,
        request: Request<RenewRequest>,
    ) -> Result<Response<RenewResponse>, Status> {
        let (peer, request) = open(request)?;
        let key = fields::key(&request.key)?;
        let space = fields::space(request.mode)?;
        let token = fields::token(&request.token)?;
        let client = self.0.client(peer, &request).await?;
        let lease = Some(client.lease(request.lease_ms)?);
        let told =
            client.execute(Command::Renew(command::Renew { key, space, token, lease })).await?;
        let (fence, valid_for_ms) = renewed(&told)?;
        Ok(Response::new(RenewResponse { fence, valid_for_ms }))
    }

    async fn enqueue(
        &self,
        request: Request<EnqueueRequest>,
    ) -> Result<Response<EnqueueResponse>, Status> {
        let (peer, request) = open(request)?;
        let key = fields::key(&request.key)?;
        let mode = fields::mode(request.mode, request.limit)?;
        let client = self.0.member(peer, &request).await?;
        let lease = Some(client.lease(request.lease_ms)?);
        let salt = rand::random();
        let told =
            client.execute(Command::Enqueue(command::Enqueue { key, mode, lease, salt })).await?;
        let grant = granted(&told)?;
        Ok(respond(told, EnqueueResponse { grant }))
    }

    async fn wait(&self, request: Request<WaitRequest>) -> Result<Response<WaitResponse>, Status> {
        let (peer, request) = open(request)?;
        let key = fields::key(&request.key)?;
        let space = fields::space(request.mode)?;
        let wait = fields::millis(request.wait_ms)?;
        let client = self.0.member(peer, &request).await?;
        let told = client.execute(Command::Wait(command::Wait { key, space, wait })).await?;
        let grant = granted(&told)?;
        Ok(respond(told, WaitResponse { grant }))
    }

    async fn list(&self, request: Request<ListRequest>) -> Result<Response<ListResponse>, Status> {
        let budget = budget(&request)?;
        let ListRequest { prefix, after, limit } = request.into_inner();
        let limit = fields::page(limit)?;
        let after = Some(&after[..]).filter(|after| !after.is_empty());
        let page = LockPage::new(&prefix, after, limit, Only::All);
        let engine = Arc::clone(&self.0.service.engine);
        let listed = move || {
            let (views, mut next) = engine.locks(page, EACH_MAX)?;
            let mut names = Names::new(&engine);
            // The locks of a key stay together, because the next page begins after a key.
            let keys: Vec<_> = views.chunk_by(|a, b| a.key == b.key).collect();
            let count = fitting(keys.iter().map(|views| {
                views.iter().map(|view| names.lock(view).encoded_len() + 8).sum::<usize>()
            }));
            if count < keys.len() {
                next = keys[count - 1].first().map(|view| view.key.clone());
            }
            let locks = keys[..count].iter().flat_map(|views| views.iter());
            let locks = locks.map(|view| names.lock(view)).collect();
            let next = next.map_or_else(Default::default, |key| key.to_vec().into());
            Some(ListResponse { locks, next })
        };
        Ok(self.0.show(&budget, listed).await?)
    }

    async fn describe(
        &self,
        request: Request<DescribeRequest>,
    ) -> Result<Response<DescribeResponse>, Status> {
        let budget = budget(&request)?;
        let key = request.into_inner().key;
        fields::key(&key)?;
        let engine = Arc::clone(&self.0.service.engine);
        let described = move || {
            let views = engine.inspect(&key, EACH_OF_ONE_MAX)?;
            let mut all = Names::new(&engine).key(&views);
            while all.encoded_len() > ANSWER_BYTES_MAX && views::name_fewer(&mut all) {}
            Some(all)
        };
        let described = self.0.show(&budget, described).await?;
        if *described.get_ref() == DescribeResponse::default() {
            return Err(Refused::not_found("no such key").into());
        }
        Ok(described)
    }
}

/// The grant, or none if it was not granted in time or has a place in the queue.
pub(super) fn granted(told: &Told) -> Result<Option<Grant>, Refused> {
    match told.outcome() {
        Outcome::Granted(CoreGrant { token, lease })
        | Outcome::Acquired(CoreGrant { token, lease }) => {
            let text = TokenText::from_parts(token.fence.0, token.salt);
            Ok(Some(Grant {
                token: text.as_str().to_owned(),
                fence: token.fence.0,
                valid_for_ms: millis(*lease),
            }))
        }
        Outcome::Timeout | Outcome::Queued => Ok(None),
        other => Err(Refused::by(other)),
    }
}

/// The fence of a hold that goes on, and for how long.
pub(super) fn renewed(told: &Told) -> Result<(u64, u64), Refused> {
    match told.outcome() {
        Outcome::Renewed { fence, lease } => Ok((fence.0, millis(*lease))),
        other => Err(Refused::by(other)),
    }
}

/// The answer to what can only succeed.
pub(super) fn done(outcome: &Outcome) -> Result<(), Refused> {
    match outcome {
        Outcome::Done => Ok(()),
        other => Err(Refused::by(other)),
    }
}
