//! The services `Counters`, `Kv`, `Lists` and `Barriers`.

#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "all that a call does not hope for is refused alike"
)]

use dflockd_core::{Bytes, Outcome, Query};
use dflockd_wire::grpc::barriers_server::Barriers;
use dflockd_wire::grpc::counters_server::Counters;
use dflockd_wire::grpc::kv_server::Kv;
use dflockd_wire::grpc::lists_server::Lists;
use dflockd_wire::grpc::{
    AddCounterRequest, BarrierWaitRequest, BarrierWaitResponse, CompareAndSetRequest,
    CompareAndSetResponse, CounterResponse, DeleteRequest, DeleteResponse, Entry,
    GetCounterRequest, GetRequest, GetResponse, LengthRequest, LengthResponse, PopRequest,
    PopResponse, PushRequest, PushResponse, RangeRequest, RangeResponse, SetCounterRequest,
    SetRequest, SetResponse,
};
use tonic::{Request, Response, Status};

use super::error::Refused;
use super::gate::hold;
use super::{App, Services, budget, fields};
use crate::frontend::auth::Asker;
use crate::service::ANSWER_BYTES_MAX;

impl App {
    /// Answers a read.
    async fn read(&self, asker: &Asker, query: Query<'_>) -> Result<Outcome, Refused> {
        let outcome = self.common().query(asker.query(query)?).await;
        // The common session says nothing about the client's.
        outcome.map_err(|_| Refused::unavailable())
    }
}

#[tonic::async_trait]
impl Counters for Services {
    async fn get(
        &self,
        request: Request<GetCounterRequest>,
    ) -> Result<Response<CounterResponse>, Status> {
        let asker = Asker::of(&self.0, &request)?;
        let request = request.into_inner();
        let key = fields::key(&request.key)?;
        let value = number(&self.0.read(&asker, Query::Counter { key }).await?)?;
        Ok(Response::new(CounterResponse { value }))
    }

    async fn add(
        &self,
        request: Request<AddCounterRequest>,
    ) -> Result<Response<CounterResponse>, Status> {
        self.execute(request).await
    }

    async fn set(
        &self,
        request: Request<SetCounterRequest>,
    ) -> Result<Response<CounterResponse>, Status> {
        self.execute(request).await
    }
}

#[tonic::async_trait]
impl Kv for Services {
    async fn get(&self, request: Request<GetRequest>) -> Result<Response<GetResponse>, Status> {
        let budget = budget(&request)?;
        let asker = Asker::of(&self.0, &request)?;
        let request = request.into_inner();
        let key = fields::key(&request.key)?;
        let room = budget.answer(self.0.service.value_bytes_max).await;
        let entry = match self.0.read(&asker, Query::Entry { key }).await? {
            Outcome::Entry { value, revision } => {
                Some(Entry { value: value.to_vec().into(), revision: revision.0 })
            }
            Outcome::Empty => None,
            other => return Err(Refused::by(&other).into()),
        };
        Ok(hold(room, GetResponse { entry }))
    }

    async fn set(&self, request: Request<SetRequest>) -> Result<Response<SetResponse>, Status> {
        self.execute(request).await
    }

    async fn delete(
        &self,
        request: Request<DeleteRequest>,
    ) -> Result<Response<DeleteResponse>, Status> {
        self.execute(request).await
    }

    async fn compare_and_set(
        &self,
        request: Request<CompareAndSetRequest>,
    ) -> Result<Response<CompareAndSetResponse>, Status> {
        self.execute(request).await
    }
}

#[tonic::async_trait]
impl Lists for Services {
    async fn push(&self, request: Request<PushRequest>) -> Result<Response<PushResponse>, Status> {
        self.execute(request).await
    }

    async fn pop(&self, request: Request<PopRequest>) -> Result<Response<PopResponse>, Status> {
        self.execute(request).await
    }

    async fn length(
        &self,
        request: Request<LengthRequest>,
    ) -> Result<Response<LengthResponse>, Status> {
        let asker = Asker::of(&self.0, &request)?;
        let request = request.into_inner();
        let key = fields::key(&request.key)?;
        let length = number(&self.0.read(&asker, Query::Length { key }).await?)?;
        Ok(Response::new(LengthResponse { length: length.unsigned_abs() }))
    }

    async fn range(
        &self,
        request: Request<RangeRequest>,
    ) -> Result<Response<RangeResponse>, Status> {
        let budget = budget(&request)?;
        let asker = Asker::of(&self.0, &request)?;
        let RangeRequest { key, start, stop } = request.into_inner();
        let key = fields::key(&key)?;
        let room = budget.answer(ANSWER_BYTES_MAX).await;
        let response = match self.0.read(&asker, Query::Range { key, start, stop }).await? {
            Outcome::Items(items) => RangeResponse { items: messages(items), next: None },
            Outcome::Part(items) if start >= 0 => part(start, items),
            Outcome::Part(_) => {
                // Where this is from the left end, the only place that can be named for the next page.
                let length = number(&self.0.read(&asker, Query::Length { key }).await?)?;
                let start = start.saturating_add(length).max(0);
                match self.0.read(&asker, Query::Range { key, start, stop }).await? {
                    Outcome::Items(items) => RangeResponse { items: messages(items), next: None },
                    Outcome::Part(items) => part(start, items),
                    other => return Err(Refused::by(&other).into()),
                }
            }
            other => return Err(Refused::by(&other).into()),
        };
        Ok(hold(room, response))
    }
}

/// The first of the items that were asked for, and where the others begin.
fn part(start: i64, items: Vec<Bytes>) -> RangeResponse {
    let count = i64::try_from(items.len()).unwrap_or(i64::MAX);
    RangeResponse { items: messages(items), next: Some(start.saturating_add(count)) }
}

fn messages(items: Vec<Bytes>) -> Vec<bytes::Bytes> {
    items.iter().map(|item| item.to_vec().into()).collect()
}

#[tonic::async_trait]
impl Barriers for Services {
    async fn wait(
        &self,
        request: Request<BarrierWaitRequest>,
    ) -> Result<Response<BarrierWaitResponse>, Status> {
        self.execute(request).await
    }
}

fn number(outcome: &Outcome) -> Result<i64, Refused> {
    match outcome {
        Outcome::Number(number) => Ok(*number),
        other => Err(Refused::by(other)),
    }
}
