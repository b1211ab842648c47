//! How many connections each API may have, so that the process never runs out of file descriptors.
//!
//! The limit of the operating system, less a reserve for everything that is no client's connection, is shared by the
//! APIs: half of it is divided among those that are on and kept for each, the other half is for whoever comes first.
//! So strangers at one API, or at all others, leave each API a share. `--max-connections` and its likes are caps on top
//! of that.

use std::fs::File;
use std::time::Duration;

use dflockd_engine::Api;
use dflockd_replica::disk::is_out_of_descriptors;
use parking_lot::Mutex;

use crate::config::Config;

/// Standard streams, listening sockets, the runtime's own, certificate and token files, the fence state file, a
/// collector of traces, and one connection per API that is about to be refused.
const BASE: u64 = 32;
/// Each worker waits for its sockets with two.
const PER_WORKER: u64 = 2;
/// The files of the log: the segment in use, the next one, snapshots, the directory.
const LOG_FILES: u64 = 16;
/// Connections to and from the other members of the cluster.
const MEMBERS: u64 = 64;
/// Connections at the peer port that are not authenticated yet.
const STRANGERS_MIN: u64 = 8;
const STRANGERS_MAX: u64 = 256;

/// Pauses while there is no descriptor for a file: each is twice as long as the one before.
const PAUSE_MIN: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// The descriptors of the process, and what they are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Descriptors {
    /// As the operating system has it.
    pub(crate) limit: u64,
    /// Kept from the connections of clients.
    pub(crate) reserve: u64,
    /// Connections at the peer port that are not authenticated yet; part of the reserve.
    pub(crate) strangers: u64,
}

impl Descriptors {
    /// Those of this process.
    pub(crate) fn of_process(config: &Config, workers: usize) -> Self {
        // Without an answer it is better to be careful than to trust in luck.
        let (limit, _) = rlimit::Resource::NOFILE.get().unwrap_or((1024, 1024));
        Self::within(limit, workers as u64, config.replicated().is_some())
    }

    fn within(limit: u64, workers: u64, replicated: bool) -> Self {
        let strangers = (limit / 16).clamp(STRANGERS_MIN, STRANGERS_MAX);
        let cluster = if replicated { LOG_FILES + MEMBERS.min(limit / 4) + strangers } else { 0 };
        // With a very low limit at least a quarter is for clients: the reserve is seldom used up.
        let reserve = (BASE + PER_WORKER * workers + cluster).min(limit - limit / 4);
        Self { limit, reserve, strangers }
    }

    fn for_clients(self) -> u64 {
        (self.limit - self.reserve).max(1)
    }
}

/// Counts the connections of clients. All caps are exact.
#[derive(Debug)]
pub(crate) struct Connections {
    shares: [Share; 3],
    /// What the APIs may use beyond what is kept for each, all together.
    common: u64,
    open: Mutex<[u64; 3]>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Share {
    /// So many whatever happens elsewhere.
    kept: u64,
    max: u64,
}

impl Connections {
    pub(crate) fn new(config: &Config, descriptors: Descriptors) -> Self {
        let caps = [
            Some(config.max_connections),
            config.http_address().map(|_| config.http_max_connections),
            config.grpc_address().map(|_| config.grpc_max_connections),
        ];
        Self::shared(descriptors.for_clients(), caps)
    }

    /// `caps` are those of the APIs that are on; zero is none.
    fn shared(all: u64, caps: [Option<u64>; 3]) -> Self {
        let on = caps.iter().flatten().count().max(1) as u64;
        let kept = if on == 1 { all } else { all / 2 / on };
        let share = |cap: Option<u64>| {
            let max = cap.map_or(0, |cap| if cap == 0 { u64::MAX } else { cap });
            Share { kept: kept.min(max), max }
        };
        let shares = caps.map(share);
        let common = all - shares.iter().map(|share| share.kept).sum::<u64>();
        let shares = shares
            .map(|share| Share { max: share.max.min(share.kept.saturating_add(common)), ..share });
        Self { shares, common, open: Mutex::default() }
    }

    /// Takes a place for a connection, to be given back by [`leave`](Self::leave). False: there is none.
    pub(crate) fn enter(&self, api: Api) -> bool {
        let mut open = self.open.lock();
        let Share { kept, max } = self.shares[api as usize];
        let here = open[api as usize];
        let beyond = open.iter().zip(&self.shares);
        let beyond: u64 = beyond.map(|(open, share)| open.saturating_sub(share.kept)).sum();
        let is_room = here < max && (here < kept || beyond < self.common);
        open[api as usize] += u64::from(is_room);
        is_room
    }

    /// A connection is closed.
    pub(crate) fn leave(&self, api: Api) {
        self.open.lock()[api as usize] -= 1;
    }

    /// How many connections an API can have at most.
    pub(crate) fn max(&self, api: Api) -> u64 {
        self.shares[api as usize].max
    }

    /// Says in the log what the limits are, and which settings can not be reached.
    pub(crate) fn log(&self, config: &Config, descriptors: Descriptors) {
        let Descriptors { limit, reserve, .. } = descriptors;
        let [line, http, grpc] = Api::ALL.map(|api| self.max(api));
        tracing::info!(open_files = limit, reserve, line, http, grpc, "most connections");
        let caps = [
            ("--max-connections", Api::Line, config.max_connections),
            ("--http-max-connections", Api::Http, config.http_max_connections),
            ("--grpc-max-connections", Api::Grpc, config.grpc_max_connections),
        ];
        for (flag, api, cap) in caps {
            let max = self.max(api);
            if max > 0 && cap > max {
                tracing::warn!(
                    "{flag} {cap} can not be reached: the limit of {limit} open files leaves {max} connections; \
                     raise it (LimitNOFILE, ulimit -n)"
                );
            }
        }
    }
}

/// Waits until files can be opened.
pub(crate) async fn some_free() {
    let mut pause = PAUSE_MIN;
    while !can_open() {
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

/// Whether a few files could be opened now.
fn can_open() -> bool {
    let files: Vec<_> = (0..4).map(|_| File::open("/")).collect();
    !files.iter().any(|file| file.as_ref().is_err_and(is_out_of_descriptors))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn enter_all(connections: &Connections, api: Api) -> u64 {
        (0..).take_while(|_| connections.enter(api)).count() as u64
    }

    /// GUARANTEES 48: all APIs together never have more connections than there are descriptors for, and each has a
    /// share that the others can not take.
    #[test]
    fn no_api_takes_the_share_of_another() {
        for flooded in Api::ALL {
            let connections = Connections::shared(120, [Some(0); 3]);
            assert_eq!(enter_all(&connections, flooded), 80);
            let others: Vec<_> = Api::ALL.into_iter().filter(|api| *api != flooded).collect();
            assert_eq!(enter_all(&connections, others[0]), 20);
            assert_eq!(enter_all(&connections, others[1]), 20);
            connections.leave(flooded);
            assert!(connections.enter(others[1]), "what is not kept goes to whoever comes first");
            assert!(!connections.enter(flooded));
        }
    }

    #[test]
    fn caps_are_exact_and_what_they_leave_is_for_the_others() {
        let connections = Connections::shared(120, [Some(5), Some(0), None]);
        assert_eq!(connections.max(Api::Line), 5);
        assert_eq!(enter_all(&connections, Api::Line), 5);
        assert_eq!(enter_all(&connections, Api::Http), 115);
        assert_eq!(enter_all(&connections, Api::Grpc), 0, "it is off");
        let alone = Connections::shared(120, [Some(0), None, None]);
        assert_eq!(enter_all(&alone, Api::Line), 120);
        let wishful = Connections::shared(120, [Some(1000), Some(0), None]);
        assert_eq!((wishful.max(Api::Line), wishful.max(Api::Http)), (90, 90));
        let unlimited = Connections::shared(u64::MAX, [Some(0); 3]);
        assert!(Api::ALL.iter().all(|&api| unlimited.enter(api)));
    }

    #[test]
    fn the_reserve_fits_the_limit() {
        for replicated in [false, true] {
            for limit in [1, 16, 64, 100, 256, 300, 1024, 4096, 1 << 20, u64::MAX] {
                let descriptors = Descriptors::within(limit, 2, replicated);
                let clients = descriptors.for_clients();
                assert!(clients >= limit / 4 && clients <= limit, "{descriptors:?}");
            }
        }
        let small = Descriptors::within(300, 1, true);
        assert_eq!((small.reserve, small.strangers, small.for_clients()), (132, 18, 168));
        let usual = Descriptors::within(1 << 20, 2, true);
        assert_eq!((usual.reserve, usual.strangers), (372, 256));
        assert_eq!(Descriptors::within(1024, 1, false).reserve, 34);
    }
}
