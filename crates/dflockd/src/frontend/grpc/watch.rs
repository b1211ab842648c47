//! The service `Watch`.

use std::sync::Arc;
use std::time::Duration;

use dflockd_core::{Change as CoreChange, Revision, Separators, pattern_matches};
use dflockd_engine::Api;
use dflockd_wire::grpc::watch_server::Watch;
use dflockd_wire::grpc::{Change, ChangeKind, Reason, WatchRequest, WatchResponse};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Response, Status};

use super::error::Refused;
use super::session_calls::ResponseStream;
use super::{App, Peer, Services, fields, open};
use crate::frontend::auth::{Allowed, Asker};
use crate::frontend::feed::{Compacted, Follower};

/// Patterns of one stream.
const PATTERNS_MAX: usize = 64;
/// A stream says how far it is at least this often.
const BOOKMARK: Duration = Duration::from_secs(5);
/// Messages that may wait for their reader; what comes behind them stays in the history.
const NEWS_MAX: usize = 4;
/// All keys.
const EVERYTHING: &[u8] = b">";

type News = mpsc::Sender<Result<WatchResponse, Status>>;

/// Which changes are told.
struct Filter {
    patterns: Vec<Vec<u8>>,
    kinds: Vec<ChangeKind>,
}

#[tonic::async_trait]
impl Watch for Services {
    type WatchStream = ResponseStream<WatchResponse>;

    async fn watch(
        &self,
        request: Request<WatchRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let asker = Asker::of(&self.0, &request)?;
        let (Peer(peer, _), request) = open(request)?;
        let filter = Filter::new(&request)?;
        for pattern in &filter.patterns {
            asker.pattern(pattern).map_err(Refused::from)?;
        }
        let app = Arc::clone(&self.0);
        let after = request.after_revision.map(Revision);
        let permit = app.sessions.permit(peer)?;
        if let Some(now) = app.service.feed.not_reached(after) {
            return Err(compacted(now).into());
        }
        let pattern = match &filter.patterns[..] {
            [only] => only,
            _ => EVERYTHING,
        };
        let follow = app
            .service
            .feed
            .follow(Allowed::by_server(pattern), filter.patterns.len(), after)
            .await;
        let follower = follow.map_err(Refused::by_core)?;
        let (sender, news) = mpsc::channel(NEWS_MAX);
        tokio::spawn(async move {
            let _permit = permit;
            let told = tokio::select! {
                told = stream_changes(&app, follower, &filter, &sender) => told,
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

fn compacted(upto: Revision) -> Refused {
    let text = "the changes asked for are no longer kept";
    Refused::missed(Code::OutOfRange, Reason::Compacted, text, upto)
}

/// Tells changes until nobody listens.
async fn stream_changes(
    app: &App,
    mut follower: Follower,
    filter: &Filter,
    news: &News,
) -> Result<(), Refused> {
    let mut is_new = true;
    let mut bookmark_at = Instant::now();
    loop {
        let changes = tokio::select! {
            biased;
            () = sleep_until(bookmark_at) => Vec::new(),
            changes = follower.next() => match changes {
                Ok(changes) => filter.choose(&changes),
                Err(Compacted(upto)) if is_new => return Err(compacted(upto)),
                Err(Compacted(upto)) => {
                    app.service.metrics.slow_reader(Api::Grpc);
                    let text = "the stream was read too slowly";
                    return Err(Refused::missed(
                        Code::ResourceExhausted,
                        Reason::Lagged,
                        text,
                        upto,
                    ));
                }
            },
        };
        let is_bookmark = bookmark_at <= Instant::now();
        is_new &= is_bookmark;
        if changes.is_empty() && !is_bookmark {
            continue;
        }
        let revision = follower.revision().0;
        if news.send(Ok(WatchResponse { changes, revision })).await.is_err() {
            return Ok(());
        }
        bookmark_at = Instant::now() + BOOKMARK;
    }
}

impl Filter {
    fn new(request: &WatchRequest) -> Result<Self, Refused> {
        if !(1..=PATTERNS_MAX).contains(&request.patterns.len()) {
            return Err(Refused::bad_request("1 to 64 patterns are required"));
        }
        let patterns = request.patterns.iter();
        let patterns = patterns.map(|pattern| fields::pattern(pattern).map(<[u8]>::to_vec));
        let kinds = request.kinds.iter().map(|kind| ChangeKind::try_from(*kind));
        let kinds = kinds.collect::<Result<_, _>>();
        let kinds = kinds.map_err(|_| Refused::bad_request("an unknown kind of changes"))?;
        Ok(Self { patterns: patterns.collect::<Result<_, _>>()?, kinds })
    }

    fn choose(&self, changes: &[CoreChange]) -> Vec<Change> {
        let chosen = changes.iter().filter_map(|change| {
            let kind = ChangeKind::from(change.event);
            let is_wanted = self.kinds.is_empty() || self.kinds.contains(&kind);
            let matches =
                |pattern: &Vec<u8>| pattern_matches(pattern, &change.key, Separators::NEWEST);
            (is_wanted && self.patterns.iter().any(matches)).then(|| Change {
                revision: change.revision.0,
                kind: kind.into(),
                key: change.key.to_vec().into(),
            })
        });
        chosen.collect()
    }
}
