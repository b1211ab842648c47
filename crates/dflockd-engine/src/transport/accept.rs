//! What others dial: the listener, connections that are not authenticated yet, and the streams of peers.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{oneshot, watch};
use tokio::time::{sleep, timeout};

use super::credentials::{Credentials, Proven, Role};
use super::establish::{Duplex, Fresh, NoConnection, no_random, prepare};
use super::handshake::{self, Acceptor, Fault, Identity, Keys, Lane, Version};
use super::seal::{BadFrame, Framing, KeyShare};
use super::{PeerAddress, Shared, State};
use crate::address::AddressKey;

/// What is asked of a socket at once.
const READ_BYTES: usize = 64 << 10;

/// An accepted stream.
pub(super) struct Stream {
    number: u64,
    /// Dropped when a newer stream takes over.
    _newest: oneshot::Sender<()>,
    /// Held by whoever delivers frames: the next one must not overtake the last one.
    floor: Arc<tokio::sync::Mutex<()>>,
}

/// The task behind the listener.
pub(super) async fn accept(
    shared: Arc<Shared>,
    listener: TcpListener,
    mut state: watch::Receiver<State>,
) {
    loop {
        let accepted = tokio::select! {
            biased;
            changed = state.changed() => {
                if changed.is_err() || state.borrow().stopping {
                    return;
                }
                continue;
            }
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((tcp, from)) => {
                let (stranger, pushed_out) = Stranger::new(&shared, from);
                let peers = Arc::clone(&state.borrow_and_update().peers);
                let (shared, state) = (Arc::clone(&shared), state.clone());
                let receiver = Receiver { shared, state, peers, from };
                tokio::spawn(receiver.run(tcp, stranger, pushed_out));
            }
            Err(error) => {
                // Most likely there are no file descriptors left; others will be closed.
                let anybody = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
                if let Some(suppressed) = shared.log.admit(anybody, "cannot accept a peer") {
                    tracing::warn!(%error, suppressed, "cannot accept a peer");
                }
                sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

/// Connections that are not authenticated yet.
#[derive(Default)]
pub(super) struct Strangers {
    /// Oldest first. Dropping the sender ends the connection.
    pub(super) places: BTreeMap<u64, (AddressKey, oneshot::Sender<()>)>,
}

impl Strangers {
    /// Gives a place to one more, which may cost another one its place: the oldest of the address that has the most, so
    /// that nobody can push out others by coming often.
    pub(super) fn enter(
        &mut self,
        number: u64,
        from: AddressKey,
        max: usize,
    ) -> oneshot::Receiver<()> {
        let (place, pushed_out) = oneshot::channel();
        if self.places.len() >= max {
            let mut by_address: HashMap<AddressKey, (usize, u64)> = HashMap::new();
            // The newest first, so that the number is that of the oldest in the end.
            for (&number, (address, _)) in self.places.iter().rev() {
                let (count, oldest) = by_address.entry(*address).or_default();
                (*count, *oldest) = (*count + 1, number);
            }
            let most = self.places.iter().map(|(_, (address, _))| by_address[address]);
            let most = most.max_by_key(|&(count, oldest)| (count, Reverse(oldest)));
            most.and_then(|(_, oldest)| self.places.remove(&oldest));
        }
        self.places.insert(number, (from, place));
        pushed_out
    }
}

/// A place among the connections that are not authenticated yet.
struct Stranger {
    shared: Arc<Shared>,
    number: u64,
}

impl Stranger {
    fn new(shared: &Arc<Shared>, from: SocketAddr) -> (Self, oneshot::Receiver<()>) {
        let (number, max) = (shared.number(), shared.limits.strangers_max);
        let pushed_out = shared.strangers.lock().enter(number, from.ip().into(), max);
        (Self { shared: Arc::clone(shared), number }, pushed_out)
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        self.shared.strangers.lock().places.remove(&self.number);
    }
}

/// The task behind an accepted connection.
struct Receiver {
    shared: Arc<Shared>,
    /// What was not seen of it when the connection came is looked at when frames are read.
    state: watch::Receiver<State>,
    /// The list that was in force when the connection was last compared with it.
    peers: Arc<Vec<PeerAddress>>,
    from: SocketAddr,
}

/// A connection that a peer dialed, ready for frames.
struct Accepted {
    stream: Box<dyn Duplex>,
    framing: Framing,
    proven: Proven,
    peer: Identity,
    lane: Lane,
}

impl Receiver {
    async fn run(self, tcp: TcpStream, stranger: Stranger, pushed_out: oneshot::Receiver<()>) {
        let credentials = Arc::clone(&self.state.borrow().credentials);
        let mut state = self.state.clone();
        let too_slow = |reason: &str| NoConnection { dull: true, ..reason.to_owned().into() };
        let accepted = tokio::select! {
            biased;
            _ = state.wait_for(|state| state.stopping) => return,
            _ = pushed_out => Err(too_slow("too many others came after it")),
            accepted = timeout(self.shared.limits.handshake, self.shake(tcp, &credentials)) => {
                accepted.unwrap_or_else(|_| Err(too_slow("not authenticated in time")))
            }
        };
        drop(stranger);
        let from = self.from;
        match accepted {
            Ok(accepted) => self.listen(accepted).await,
            Err(NoConnection { reason, dull, .. }) => {
                let admitted =
                    if dull { None } else { self.shared.log.admit(from.ip(), "refused a peer") };
                match admitted {
                    Some(suppressed) => {
                        tracing::warn!(%from, reason, suppressed, "refused a peer");
                    }
                    None => tracing::debug!(%from, reason, "refused a peer"),
                }
            }
        }
    }

    async fn shake(
        &self,
        tcp: TcpStream,
        credentials: &Credentials,
    ) -> Result<Accepted, NoConnection> {
        let Shared { handler, limits, .. } = &*self.shared;
        prepare(&tcp, limits.main.stall);
        let mut fresh = match &credentials.tls {
            None => Fresh::plain(tcp),
            Some(tls) => Fresh::accept_tls(tcp, tls).await?,
        };
        let keys = Keys { secrets: &credentials.secrets, binding: fresh.binding };
        let hello = fresh.read().await?;
        let version = self.version_for(&hello, credentials);
        let share = KeyShare::draw(version, &self.shared.random).map_err(no_random)?;
        let challenge = handshake::challenge(version, keys.mode(), share.nonce);
        let acceptor = Acceptor::new(keys, version, &hello, &challenge);
        if acceptor.as_ref().err().is_none_or(Fault::is_difference_of_setup) {
            fresh.write(&challenge).await?;
        }
        let acceptor = acceptor?;
        let peer = acceptor.hello().identity.clone();
        fresh.check_name(&peer.node)?;
        let secret = acceptor.check(&fresh.read().await?)?;

        // From here on it is no stranger: it is told why.
        let former = handler.former_identity(&peer).transpose();
        let ours = former.clone().ok().flatten().unwrap_or_else(|| handler.identity());
        let judged = former
            .map_err(Fault::Refused)
            .and_then(|_| acceptor.judge(&ours))
            .and_then(|()| handler.admit(&peer).map_err(Fault::Refused));
        let refusal = judged.as_ref().err().map(ToString::to_string);
        let welcome = acceptor.welcome(&ours, refusal.as_deref(), secret);
        fresh.write(&welcome).await?;
        if judged.is_err() {
            let _ = fresh.stream.shutdown().await;
        }
        judged.map_err(|fault| format!("{}: {fault}", peer.node))?;
        let mut framing = acceptor.frames(share, &welcome, secret)?;
        handshake::check_verdict(fresh.read().await?, &mut framing)
            .map_err(|fault| format!("{}: {fault}", peer.node))?;

        let proven = Proven {
            role: Role::Dialer,
            secret: credentials.secrets.get(secret).cloned(),
            certificates: fresh.certificates,
            is_sealed: !framing.is_plain(),
        };
        Ok(Accepted { stream: fresh.stream, framing, proven, peer, lane: acceptor.hello().lane })
    }

    /// What to speak with somebody who begins like this.
    fn version_for(&self, hello: &[u8], credentials: &Credentials) -> Version {
        let older = handshake::version_of(hello) == Some(Version::Plain);
        if credentials.tls.is_some() || older && !self.state.borrow().sealed_only {
            Version::Plain
        } else {
            self.shared.version_max
        }
    }

    /// Takes the place of an older stream of the same peer, and delivers frames to the end.
    async fn listen(mut self, accepted: Accepted) {
        let shared = Arc::clone(&self.shared);
        let (node, lane) = (accepted.peer.node.clone(), accepted.lane);
        let (from, raft_id) = (self.from, accepted.peer.raft_id);
        let number = shared.number();
        let (newest, mut replaced) = oneshot::channel();
        let floor = {
            let mut streams = shared.streams.lock();
            let floor = streams.get(&(node.clone(), lane)).map(|older| Arc::clone(&older.floor));
            let floor = floor.unwrap_or_default();
            let stream = Stream { number, _newest: newest, floor: Arc::clone(&floor) };
            streams.insert((node.clone(), lane), stream);
            floor
        };
        // It is up: no need to wait any longer before we dial it.
        if let Some(lanes) = shared.hints.lock().get(&node) {
            lanes.iter().for_each(|outbox| outbox.hint.notify_one());
        }
        tracing::info!(node, %from, ?lane, "accepted a peer");

        let ended = tokio::select! {
            biased;
            _ = &mut replaced => None,
            ended = async {
                let _floor = floor.lock().await;
                self.deliver(accepted).await
            } => ended,
        };
        let mut streams = shared.streams.lock();
        if streams.get(&(node.clone(), lane)).is_some_and(|stream| stream.number == number) {
            streams.remove(&(node.clone(), lane));
        }
        drop(streams);
        if let Some(error) = ended {
            tracing::info!(node, %from, ?lane, reason = %error, "lost a stream of a peer");
            shared.handler.stream_lost(raft_id, lane);
        } else {
            tracing::info!(node, %from, ?lane, "closed a stream of a peer");
        }
    }

    /// Gives why the stream was lost; nothing if it was us who ended it.
    async fn deliver(&mut self, accepted: Accepted) -> Option<io::Error> {
        let Accepted { mut stream, mut framing, proven, peer, lane } = accepted;
        let mut buffer = BytesMut::new();
        loop {
            let wanted = match framing.missing(&buffer) {
                Ok(missing) => missing,
                Err(bad) => return Some(self.bad_frame(&peer, lane, bad)),
            };
            buffer.reserve(wanted.max(READ_BYTES));
            let read = tokio::select! {
                biased;
                changed = self.state.changed() => {
                    let state = self.state.borrow_and_update();
                    let listed = |known: &PeerAddress| {
                        known.node == peer.node && [0, known.raft_id].contains(&peer.raft_id)
                    };
                    let removed =
                        !Arc::ptr_eq(&self.peers, &state.peers) && !state.peers.iter().any(listed);
                    let handler = &self.shared.handler;
                    let foreign = peer.cluster.is_some()
                        && peer.cluster != handler.identity().cluster
                        && !matches!(handler.former_identity(&peer), Some(Ok(_)));
                    let keep = changed.is_ok()
                        && !state.stopping
                        && !removed
                        && !foreign
                        && (proven.is_protected() || !state.sealed_only)
                        && state.credentials.still_accept(&proven);
                    if !keep {
                        return None;
                    }
                    self.peers = Arc::clone(&state.peers);
                    continue;
                }
                read = stream.read_buf(&mut buffer) => read,
            };
            match read {
                Ok(0) => {
                    let error = "closed by the other side";
                    return Some(io::Error::new(ErrorKind::UnexpectedEof, error));
                }
                Ok(_) => (),
                Err(error) => return Some(error),
            }
            while let Some(frame) = framing.take(&mut buffer).transpose() {
                match frame {
                    Ok(frame) => self.shared.handler.received(peer.raft_id, lane, frame),
                    Err(bad) => return Some(self.bad_frame(&peer, lane, bad)),
                }
            }
        }
    }

    fn bad_frame(&self, peer: &Identity, lane: Lane, bad: BadFrame) -> io::Error {
        self.shared.handler.bad_frame(peer.raft_id, lane);
        let (node, from) = (&peer.node, self.from);
        if let Some(suppressed) = self.shared.log.admit(from.ip(), "refused a frame") {
            tracing::warn!(
                node, %from, ?lane, suppressed, reason = %bad,
                "refused a frame, the connection ends"
            );
        }
        io::Error::new(ErrorKind::InvalidData, bad)
    }
}
