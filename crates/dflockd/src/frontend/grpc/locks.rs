//! The service `Locks`: mutexes, semaphores, read-write locks.

use std::sync::Arc;

use dflockd_core::{LockPage, Only};
use dflockd_identity::Access;
use dflockd_wire::grpc::locks_server::Locks;
use dflockd_wire::grpc::{
    AcquireRequest, AcquireResponse, DescribeRequest, DescribeResponse, EnqueueRequest,
    EnqueueResponse, ListRequest, ListResponse, ReleaseRequest, ReleaseResponse, RenewRequest,
    RenewResponse, TryAcquireRequest, WaitRequest, WaitResponse,
};
use prost::Message;
use tonic::{Request, Response, Status};

use super::error::Refused;
use super::views::{self, Names};
use super::{Services, budget, fields, fitting};
use crate::frontend::auth::Asker;
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
        self.execute(request).await
    }

    async fn try_acquire(
        &self,
        request: Request<TryAcquireRequest>,
    ) -> Result<Response<AcquireResponse>, Status> {
        self.execute(request).await
    }

    async fn release(
        &self,
        request: Request<ReleaseRequest>,
    ) -> Result<Response<ReleaseResponse>, Status> {
        self.execute(request).await
    }

    async fn renew(
        &self,
        request: Request<RenewRequest>,
    ) -> Result<Response<RenewResponse>, Status> {
        self.execute(request).await
    }

    async fn enqueue(
        &self,
        request: Request<EnqueueRequest>,
    ) -> Result<Response<EnqueueResponse>, Status> {
        self.execute(request).await
    }

    async fn wait(&self, request: Request<WaitRequest>) -> Result<Response<WaitResponse>, Status> {
        self.execute(request).await
    }

    async fn list(&self, request: Request<ListRequest>) -> Result<Response<ListResponse>, Status> {
        let budget = budget(&request)?;
        let asker = Asker::of(&self.0, &request)?;
        let ListRequest { prefix, after, limit } = request.into_inner();
        let limit = fields::page(limit)?;
        let after = Some(&after[..]).filter(|after| !after.is_empty());
        let page = LockPage::new(asker.who.readable(&prefix), after, limit, Only::All);
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
        let asker = Asker::of(&self.0, &request)?;
        let key = request.into_inner().key;
        fields::key(&key)?;
        asker.check(Access::read(&key)).map_err(Refused::from)?;
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
