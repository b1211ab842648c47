//! What we dial: per peer and lane a task that connects, sends what is queued, and connects again.

use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, lookup_host};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

use super::credentials::{Credentials, Proven, Role};
use super::establish::{Duplex, Fresh, NoConnection, no_random, prepare};
use super::handshake::{self, Dialer, Fault, Identity, Keys, Lane, Version};
use super::outbox::{Batch, Line, Outbox};
use super::seal::KeyShare;
use super::{Limits, PeerAddress, Shared, State};

/// How long a connection must have lived for its end to be a surprise, answered by dialing at once.
const STEADY: Duration = Duration::from_secs(1);

/// How long a connection that is no longer wanted may take to write what is queued.
const LINGER: Duration = Duration::from_millis(500);

/// Why a connection for sending is over.
enum End {
    /// Neither the peer nor we are wanted any longer.
    Unwanted,
    /// A new one would be better.
    Renew(&'static str),
    Lost(io::Error),
}

/// The task behind one lane to one peer: dials, sends, dials again.
pub(super) struct Sender {
    pub(super) shared: Arc<Shared>,
    pub(super) peer: PeerAddress,
    pub(super) lane: Lane,
    pub(super) outbox: Arc<Outbox>,
    pub(super) state: watch::Receiver<State>,
    /// Ends when its sender is dropped.
    pub(super) wanted: watch::Receiver<()>,
}

/// A connection that we dialed, ready for frames.
struct Dialed {
    stream: Box<dyn Duplex>,
    line: Line,
    proven: Proven,
    /// Who we said we are.
    told: Identity,
    /// Who the other side is.
    theirs: Identity,
}

impl Sender {
    pub(super) async fn run(mut self) {
        let mut pause = Backoff::new(&self.shared.limits);
        let mut last_reason = String::new();
        loop {
            let credentials = Arc::clone(&self.state.borrow_and_update().credentials);
            let dialed = tokio::select! {
                biased;
                () = self.unwanted() => return,
                dialed = self.dial(&credentials) => dialed,
            };
            let mut steady = false;
            let refused = match dialed {
                Ok(dialed) => {
                    let since = Instant::now();
                    last_reason.clear();
                    self.report("connected to peer", None);
                    self.shared.handler.reachable(self.peer.raft_id, self.lane);
                    match self.pump(dialed).await {
                        End::Unwanted => return,
                        End::Renew(reason) => self.report("reconnecting to peer", Some(reason)),
                        End::Lost(error) => {
                            self.report("lost connection to peer", Some(&error.to_string()));
                        }
                    }
                    steady = since.elapsed() >= STEADY;
                    false
                }
                Err(NoConnection { reason, refused, .. }) => {
                    let Self { peer: PeerAddress { node, address, .. }, lane, .. } = &self;
                    // Said once, not at every attempt.
                    if reason != last_reason {
                        tracing::warn!(node, address, ?lane, reason, "cannot connect to peer");
                        last_reason = reason;
                    } else {
                        tracing::debug!(node, address, ?lane, reason, "cannot connect to peer");
                    }
                    refused
                }
            };
            self.outbox.clear();
            self.shared.handler.unreachable(self.peer.raft_id, self.lane, refused);
            if steady {
                // At once: whether it is refused now tells a dead process from a broken connection.
                pause = Backoff::new(&self.shared.limits);
            } else if self.wait(pause.next()).await.is_err() {
                return;
            }
        }
    }

    fn report(&self, message: &str, reason: Option<&str>) {
        let Self { peer: PeerAddress { node, address, .. }, lane, .. } = self;
        tracing::info!(node, address, ?lane, reason, "{message}");
    }

    /// Waits before the next attempt; an error if there is to be none.
    async fn wait(&mut self, pause: Duration) -> Result<(), ()> {
        let Self { outbox, state, wanted, .. } = self;
        tokio::select! {
            biased;
            // Also new credentials are a reason to try at once.
            changed = state.changed() => changed.map_err(drop)?,
            _ = wanted.changed() => return Err(()),
            () = outbox.hint.notified() => (),
            () = sleep(pause) => (),
        }
        if self.state.borrow().stopping { Err(()) } else { Ok(()) }
    }

    /// Ends when the connection is not wanted any more.
    async fn unwanted(&self) {
        let (mut state, mut wanted) = (self.state.clone(), self.wanted.clone());
        tokio::select! {
            biased;
            _ = state.wait_for(|state| state.stopping) => (),
            _ = wanted.changed() => (),
        }
    }

    async fn dial(&self, credentials: &Credentials) -> Result<Dialed, NoConnection> {
        let handler = &self.shared.handler;
        let fault = match self.dial_as(handler.identity(), credentials).await {
            Err(fault) => fault,
            dialed => return dialed,
        };
        let Some(theirs) = &fault.refused_by else { return Err(fault) };
        handler.refused_by(theirs);
        // A member that has not heard of its cluster's id yet knows us by the one before.
        match handler.former_identity(theirs) {
            Some(Ok(former)) => self.dial_as(former, credentials).await,
            Some(Err(_)) | None => Err(fault),
        }
    }

    async fn dial_as(
        &self,
        told: Identity,
        credentials: &Credentials,
    ) -> Result<Dialed, NoConnection> {
        // TLS protects the frames itself.
        let version =
            if credentials.tls.is_some() { Version::Plain } else { self.shared.version_max };
        match self.dial_with(version, told.clone(), credentials).await {
            Err(fault) if fault.older && version == Version::Sealed => {
                if self.state.borrow().sealed_only {
                    return Err(format!(
                        "{}, and the cluster has left version 1 behind: an older server, or somebody on the path",
                        fault.reason
                    )
                    .into());
                }
                // Nobody has proven that; but the cluster still has room for members of an older program.
                self.dial_with(Version::Plain, told, credentials).await
            }
            dialed => dialed,
        }
    }

    async fn dial_with(
        &self,
        version: Version,
        told: Identity,
        credentials: &Credentials,
    ) -> Result<Dialed, NoConnection> {
        let Limits { connect: connect_max, handshake: handshake_max, .. } = self.shared.limits;
        let tcp = timeout(connect_max, connect(&self.peer.address))
            .await
            .map_err(|_| "no answer to dialing in time".to_owned())??;
        prepare(&tcp, self.shared.limits.of(self.lane).stall);
        timeout(handshake_max, self.shake(tcp, version, told, credentials))
            .await
            .map_err(|_| "no answer to the handshake in time".to_owned())?
    }

    async fn shake(
        &self,
        tcp: TcpStream,
        version: Version,
        told: Identity,
        credentials: &Credentials,
    ) -> Result<Dialed, NoConnection> {
        let Shared { handler, .. } = &*self.shared;
        let target = &self.peer.node;
        let mut direct = None;
        let mut fresh = match &credentials.tls {
            None => {
                let socket = tcp.into_std()?;
                direct = Some(Arc::new(socket.try_clone()?));
                Fresh::plain(TcpStream::from_std(socket)?)
            }
            Some(tls) => Fresh::dial_tls(tcp, tls).await?,
        };
        fresh.check_name(target)?;

        let keys = Keys { secrets: &credentials.secrets, binding: fresh.binding };
        let share = KeyShare::draw(version, &self.shared.random).map_err(no_random)?;
        let mut dialer = Dialer::new(keys, &told, target, self.lane, version, share.nonce);
        fresh.write(dialer.hello()).await?;
        let proof = dialer.prove(&fresh.read().await?)?;
        fresh.write(&proof).await?;
        let welcome = fresh.read().await.map_err(|fault| {
            let hint = ": most likely its shared secret is another one, its log tells more";
            if fault.dull { format!("{}{hint}", fault.reason).into() } else { fault }
        })?;
        let judged = dialer.conclude(&welcome).and_then(|theirs| {
            handler.admit(&theirs).map_err(Fault::Refused)?;
            Ok(theirs)
        });
        let mut framing = dialer.frames(share, &welcome)?;
        match &judged {
            Ok(_) => fresh.write_framed(&handshake::verdict(None), &mut framing).await?,
            Err(Fault::Refused(reason)) => {
                fresh.write_framed(&handshake::verdict(Some(reason)), &mut framing).await?;
                // Lets the verdict out before the close; TLS has no other way to say that it ends.
                let _ = fresh.stream.shutdown().await;
            }
            Err(_) => (),
        }
        let theirs = judged?;
        let proven = Proven {
            role: Role::Acceptor,
            secret: credentials.secrets.first().cloned(),
            certificates: fresh.certificates,
            is_sealed: !framing.is_plain(),
        };
        Ok(Dialed { stream: fresh.stream, line: Line { framing, direct }, proven, told, theirs })
    }

    /// Sends what is queued until something ends it.
    async fn pump(&mut self, dialed: Dialed) -> End {
        let end = self.write_on(dialed).await;
        self.outbox.disconnect();
        end
    }

    async fn write_on(&mut self, dialed: Dialed) -> End {
        let Dialed { stream, line, proven, told, theirs } = dialed;
        let (mut reader, mut writer) = tokio::io::split(stream);
        let stall = self.shared.limits.of(self.lane).stall;
        let Self { shared, outbox, state, wanted, .. } = self;
        let mut line = Some(line);
        let mut batch = Batch::default();
        let mut unexpected = [0];
        loop {
            if batch.is_done() {
                batch = outbox.take(&mut line);
            }
            let lost = tokio::select! {
                biased;
                end = examine(shared, state, &proven, (&told, &theirs)) => match end {
                    End::Unwanted => break,
                    End::Renew(_) | End::Lost(_) => return end,
                },
                _ = wanted.changed() => break,
                // The other side never speaks here, but this is how we learn that it is gone.
                read = reader.read(&mut unexpected) => Some(match read {
                    Ok(0) => io::Error::new(ErrorKind::UnexpectedEof, "closed by the other side"),
                    Ok(_) => io::Error::new(ErrorKind::InvalidData, "it talks where it should listen"),
                    Err(error) => error,
                }),
                written = batch.write(&mut writer, stall), if !batch.is_done() => written.err(),
                () = outbox.filled(), if batch.is_done() => None,
            };
            if let Some(error) = lost {
                return End::Lost(error);
            }
        }
        let farewell = async {
            batch.write(&mut writer, stall).await?;
            while !outbox.is_empty() {
                outbox.take(&mut line).write(&mut writer, stall).await?;
            }
            writer.shutdown().await
        };
        // Whether it went out or not, this is the end.
        let _ = timeout(LINGER, farewell).await;
        End::Unwanted
    }
}

/// Ends when a change of `state` is the end of a connection that we dialed.
async fn examine(
    shared: &Shared,
    state: &mut watch::Receiver<State>,
    proven: &Proven,
    (told, theirs): (&Identity, &Identity),
) -> End {
    loop {
        if state.changed().await.is_err() {
            return End::Unwanted;
        }
        let State { credentials, stopping, sealed_only, .. } = state.borrow_and_update().clone();
        if stopping {
            return End::Unwanted;
        }
        if sealed_only && !proven.is_protected() {
            return End::Renew("every frame is sealed from now on");
        }
        if !credentials.still_accept(proven) {
            return End::Renew("the credentials have changed");
        }
        // A node that has just learnt its cluster and its number should be known by them.
        let handler = &shared.handler;
        let now = handler.identity();
        // That its cluster has got its name meanwhile is no reason: the other side may not have heard of it.
        let is_former = matches!(handler.former_identity(theirs), Some(Ok(_)));
        let knew = told.cluster.is_some() && is_former;
        let known_as = if knew { told.cluster } else { now.cluster };
        if *told != (Identity { cluster: known_as, ..now }) {
            return End::Renew("this node has a new identity");
        }
    }
}

/// Pauses between attempts. Random, so that nodes that lost each other do not meet in step.
struct Backoff {
    next: Duration,
    max: Duration,
}

impl Backoff {
    fn new(limits: &Limits) -> Self {
        Self { next: limits.redial_min, max: limits.redial_max }
    }

    fn next(&mut self) -> Duration {
        let pause = self.next;
        self.next = (pause * 2).min(self.max);
        pause.mul_f64(rand::random_range(0.5..=1.0))
    }
}

pub(super) async fn connect(address: &str) -> Result<TcpStream, NoConnection> {
    let addresses: Vec<_> = lookup_host(address)
        .await
        .map_err(|error| format!("cannot look up its address: {error}"))?
        .collect();
    let mut failure = NoConnection::from("its address has no meaning".to_owned());
    let mut all_refused = true;
    for address in addresses {
        match TcpStream::connect(address).await {
            Ok(tcp) => return Ok(tcp),
            Err(error) => {
                all_refused &= error.kind() == ErrorKind::ConnectionRefused;
                failure = NoConnection::from(error.to_string());
                failure.refused = all_refused;
            }
        }
    }
    Err(failure)
}
