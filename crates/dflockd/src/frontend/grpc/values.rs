//! The services `Counters`, `Kv`, `Lists` and `Barriers`.

#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "all that a call does not hope for is refused alike"
)]

use dflockd_core::{Bytes, Command, Expect, Outcome, Query, Revision, command};
use dflockd_wire::grpc::barriers_server::Barriers;
use dflockd_wire::grpc::compare_and_set_request::Expect as Expected;
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
use super::gate::{hold, respond};
use super::locks::done;
use super::{App, Services, budget, fields, open};
use crate::service::ANSWER_BYTES_MAX;

impl App {
    /// Answers a read.
    async fn read(&self, query: Query<'_>) -> Result<Outcome, Refused> {
        let outcome = self.common().query(query).await;
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
        let request = request.into_inner();
        let key = fields::key(&request.key)?;
        let value = number(&self.0.read(Query::Counter { key }).await?)?;
        Ok(Response::new(CounterResponse { value }))
    }

    async fn add(
        &self,
        request: Request<AddCounterRequest>,
    ) -> Result<Response<CounterResponse>, Status> {
        let (peer, request) = open(request)?;
        let key = fields::key(&request.key)?;
        // Who subtracts is seen by watchers as one who does.
        let delta = request.delta;
        let command = match delta.checked_neg() {
            Some(positive @ 1..) => {
                Command::Add(command::Add { key, delta: positive, decrement: true })
            }
            _ => Command::Add(command::Add { key, delta, decrement: false }),
        };
        let client = self.0.client(peer, &request).await?;
        let value = number(client.execute(command).await?.outcome())?;
        Ok(Response::new(CounterResponse { value }))
    }

    async fn set(
        &self,
        request: Request<SetCounterRequest>,
    ) -> Result<Response<CounterResponse>, Status> {
        let (peer, request) = open(request)?;
        let (key, value) = (fields::key(&request.key)?, request.value);
        let client = self.0.client(peer, &request).await?;
        done(
            client
                .execute(Command::CounterSet(command::CounterSet { key, value }))
                .await?
                .outcome(),
        )?;
        Ok(Response::new(CounterResponse { value }))
    }
}

#[tonic::async_trait]
impl Kv for Services {
    async fn get(&self, request: Request<GetRequest>) -> Result<Response<GetResponse>, Status> {
        let budget = budget(&request)?;
        let request = request.into_inner();
        let key = fields::key(&request.key)?;
        let room = budget.answer(self.0.service.value_bytes_max).await;
        let entry = match self.0.read(Query::Entry { key }).await? {
            Outcome::Entry { value, revision } => {
                Some(Entry { value: value.to_vec().into(), revision: revision.0 })
            }
            Outcome::Empty => None,
            other => return Err(Refused::by(&other).into()),
        };
        Ok(hold(room, GetResponse { entry }))
    }

    async fn set(&self, request: Request<SetRequest>) -> Result<Response<SetResponse>, Status> {
        let (peer, request) = open(request)?;
        let (key, value) = (fields::key(&request.key)?, fields::entry(&request.value)?);
        let ttl = fields::lasting(request.ttl_ms)?;
        let client = self.0.client(peer, &request).await?;
        let told = client.execute(Command::KvSet(command::KvSet { key, value, ttl })).await?;
        match told.outcome() {
            Outcome::Written(revision) => Ok(Response::new(SetResponse { revision: revision.0 })),
            other => Err(Refused::by(other).into()),
        }
    }

    async fn delete(
        &self,
        request: Request<DeleteRequest>,
    ) -> Result<Response<DeleteResponse>, Status> {
        let (peer, request) = open(request)?;
        let key = fields::key(&request.key)?;
        let client = self.0.client(peer, &request).await?;
        done(client.execute(Command::KvDelete(command::KvDelete { key })).await?.outcome())?;
        Ok(Response::new(DeleteResponse {}))
    }

    async fn compare_and_set(
        &self,
        request: Request<CompareAndSetRequest>,
    ) -> Result<Response<CompareAndSetResponse>, Status> {
        let (peer, request) = open(request)?;
        let (key, value) = (fields::key(&request.key)?, fields::entry(&request.new_value)?);
        let ttl = fields::lasting(request.ttl_ms)?;
        let expect = match &request.expect {
            Some(Expected::Absent(true)) => Expect::Absent,
            Some(Expected::Value(value)) => Expect::Value(fields::entry(value)?),
            Some(Expected::Revision(revision)) => Expect::Revision(Revision(*revision)),
            Some(Expected::Absent(false)) | None => {
                return Err(Refused::bad_request("what is expected is required").into());
            }
        };
        let client = self.0.client(peer, &request).await?;
        let command =
            Command::KvCompareAndSet(command::KvCompareAndSet { key, expect, value, ttl });
        let (written, revision) = match client.execute(command).await?.outcome() {
            Outcome::Written(revision) => (true, revision.0),
            Outcome::Conflict => (false, 0),
            other => return Err(Refused::by(other).into()),
        };
        Ok(Response::new(CompareAndSetResponse { written, revision }))
    }
}

#[tonic::async_trait]
impl Lists for Services {
    async fn push(&self, request: Request<PushRequest>) -> Result<Response<PushResponse>, Status> {
        let (peer, request) = open(request)?;
        let (key, value) = (fields::key(&request.key)?, fields::value(&request.item)?);
        let end = fields::end(request.end)?;
        let client = self.0.client(peer, &request).await?;
        let told = client.execute(Command::Push(command::Push { key, end, value })).await?;
        let length = number(told.outcome())?.unsigned_abs();
        Ok(Response::new(PushResponse { length }))
    }

    async fn pop(&self, request: Request<PopRequest>) -> Result<Response<PopResponse>, Status> {
        let (peer, request) = open(request)?;
        let (key, end) = (fields::key(&request.key)?, fields::end(request.end)?);
        let wait = request.wait_ms.map(fields::millis).transpose()?;
        let client = self.0.client(peer, &request).await?;
        let told = client.execute(Command::Pop(command::Pop { key, end, wait })).await?;
        let item = match told.outcome() {
            Outcome::Popped { value, .. } => Some(value.to_vec().into()),
            Outcome::Empty | Outcome::Timeout => None,
            other => return Err(Refused::by(other).into()),
        };
        Ok(respond(told, PopResponse { item }))
    }

    async fn length(
        &self,
        request: Request<LengthRequest>,
    ) -> Result<Response<LengthResponse>, Status> {
        let request = request.into_inner();
        let key = fields::key(&request.key)?;
        let length = number(&self.0.read(Query::Length { key }).await?)?;
        Ok(Response::new(LengthResponse { length: length.unsigned_abs() }))
    }

    async fn range(
        &self,
        request: Request<RangeRequest>,
    ) -> Result<Response<RangeResponse>, Status> {
        let budget = budget(&request)?;
        let RangeRequest { key, start, stop } = request.into_inner();
        let key = fields::key(&key)?;
        let room = budget.answer(ANSWER_BYTES_MAX).await;
        let response = match self.0.read(Query::Range { key, start, stop }).await? {
            Outcome::Items(items) => RangeResponse { items: messages(items), next: None },
            Outcome::Part(items) if start >= 0 => part(start, items),
            Outcome::Part(_) => {
                // Where this is from the left end, the only place that can be named for the next page.
                let length = number(&self.0.read(Query::Length { key }).await?)?;
                let start = start.saturating_add(length).max(0);
                match self.0.read(Query::Range { key, start, stop }).await? {
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
        let (peer, request) = open(request)?;
        let (key, count) = (fields::key(&request.key)?, fields::count(request.count.into())?);
        let wait = fields::millis(request.wait_ms)?;
        let client = self.0.member(peer, &request).await?;
        let told =
            client.execute(Command::BarrierWait(command::BarrierWait { key, count, wait })).await?;
        let passed = match told.outcome() {
            Outcome::Done => true,
            Outcome::Timeout => false,
            other => return Err(Refused::by(other).into()),
        };
        Ok(Response::new(BarrierWaitResponse { passed }))
    }
}

fn number(outcome: &Outcome) -> Result<i64, Refused> {
    match outcome {
        Outcome::Number(number) => Ok(*number),
        other => Err(Refused::by(other)),
    }
}
