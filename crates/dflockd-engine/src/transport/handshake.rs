//! How two members prove to each other who they are, before the first frame.
//!
//! Bytes in, bytes out: no sockets, no clock, no randomness (nonces are arguments). One node dials
//! and speaks first; each message is a frame (u32 length, little-endian, then the message), and all
//! messages of one side together stay below [`BYTES_MAX`].
//!
//! ```text
//! dialer                                          acceptor
//!   Hello: who I am, whom I mean, lane, nonce  ->
//!                                              <- Challenge: nonce
//!   Proof: MAC over both                       ->
//!                                              <- Welcome: who I am, or why not; MAC over all
//!   Verdict: go, or why not                    ->
//!   frames ...                                 ->
//! ```
//!
//! There are two [`Version`]s, which differ in what comes behind them. With TLS it is version 1: TLS protects the
//! frames. Without TLS it is version 2: the nonces are X25519 public keys, and the verdict and all frames are sealed
//! with a key from both of them and the shared secret (`seal.rs`). A program that knows version 1 only sends its frames
//! unprotected without TLS, so version 1 is spoken without TLS only with such members, and only until the cluster has
//! left their version behind: from then on neither side falls back, whatever it is told. The version is under every
//! MAC, so nobody on the path can make two sides use version 1 of which one refuses it.
//!
//! The dialer proves itself first, so that a stranger learns nothing but the version, the mode and a
//! nonce: neither the name nor the cluster of the node, and no reason for the close. Why it does not
//! work:
//!
//! - *Replay*: every MAC covers a fresh nonce of the side that checks it.
//! - *Reflection*: the two directions have different labels, and a proof covers the node that was
//!   meant; a proof obtained from a node names somebody else as its target, and is refused there.
//! - *Relay through another TLS session*: with TLS every MAC covers a value exported from the session.
//! - *Taking over after the handshake*: TLS or the seals end the connection at the first byte that is not the peer's.
//!
//! [`parse`] takes any bytes and is the only parser.
//!
//! # Messages
//!
//! `Hello`: tag 1, magic `dflkpeer`, version (2 bytes), TLS and secret or not (1), lane (1), nonce (32), identity, the
//! node id that is meant. `Challenge`: tag 2, magic, version, mode, nonce. `Proof` (tag 3) and `Welcome` (tag 4:
//! identity, or why not) carry an HMAC-SHA-256 over all that was said, keyed with the shared secret and, with TLS,
//! bound to the session by an exported value; without a secret that value is the key. `Verdict` is tag 5. An
//! [`Identity`] is cluster id, node id, Raft id, number of the data directory, witness or not, version.
//!
//! The key of sealed frames is HKDF-SHA-256 of what the two public keys agree on, salted with the shared secret, over
//! the SHA-256 of hello, challenge and welcome; the verdict is the first message that is sealed with it, as number 0.
//! The nonce of a seal is four zeros and the number of the frame (8 bytes, big-endian).

use ring::{digest, hmac};
use thiserror::Error;

use super::credentials::Secret;
use super::seal::{Framing, KeyShare};

/// A version of this handshake and of the framing behind it.
///
/// Both sides must speak the same one. A later version keeps tag, magic and version of [`Hello`] and
/// [`Challenge`] where they are, so that each side can tell the other's version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// Frames as they are. The one for TLS; without TLS for members that know no other.
    Plain,
    /// Sealed frames, for connections without TLS.
    Sealed,
}

impl Version {
    /// The newest one to speak without TLS.
    #[must_use]
    pub fn newest() -> Self {
        if dflockd_replica::version::seals_frames() { Self::Sealed } else { Self::Plain }
    }
}

impl Version {
    /// Its number in a message.
    pub fn number(self) -> u16 {
        match self {
            Self::Plain => 1,
            Self::Sealed => 2,
        }
    }
}

/// What one side may say in all before it is authenticated, length prefixes included.
pub const BYTES_MAX: usize = 1024;

/// The longest node id.
pub const NODE_BYTES_MAX: usize = 64;

/// The longest reason of a refusal.
pub const REASON_BYTES_MAX: usize = 400;

const MAGIC: [u8; 8] = *b"dflkpeer";

const TAG_HELLO: u8 = 1;
const TAG_CHALLENGE: u8 = 2;
const TAG_PROOF: u8 = 3;
const TAG_WELCOME: u8 = 4;
const TAG_VERDICT: u8 = 5;

const MAC_BYTES: usize = 32;

// Neither is the beginning of the other, so what follows them cannot be mistaken.
const LABEL_DIALER: &[u8] = b"dflockd peer 1 dialer\0";
const LABEL_ACCEPTOR: &[u8] = b"dflockd peer 1 acceptor\0";
const LABEL_FRAMES: &[u8] = b"dflockd peer 2 frames of the dialer\0";

/// A number that is used once.
pub type Nonce = [u8; 32];

/// A value exported from a TLS session: the same on both ends of it and nowhere else.
pub(super) type Binding = [u8; 32];

/// Who a node says it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The cluster that the node belongs to; none while it waits to be added to one.
    pub cluster: Option<[u8; 16]>,
    /// The node id.
    pub node: String,
    /// The Raft id of the node, 0 while the node does not know it.
    pub raft_id: u64,
    /// The number of its data directory, drawn when that was made: tells a wiped disk from the old one.
    pub disk: u64,
    /// Whether the node is a witness: it votes and keeps the log, but no state.
    pub witness: bool,
    /// The version of what the node says inside frames.
    pub version: u32,
}

/// Which of the two connections to a peer.
///
/// A snapshot goes over its own connection, so that it never delays a heartbeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Lane {
    /// The lane of frames that are small and urgent.
    Main,
    /// The lane of frames that are large and can wait.
    Bulk,
}

impl Lane {
    /// Both lanes.
    pub const ALL: [Self; 2] = [Self::Main, Self::Bulk];

    /// Its place in [`Self::ALL`].
    pub(super) fn index(self) -> usize {
        self.code().into()
    }

    fn code(self) -> u8 {
        match self {
            Self::Main => 0,
            Self::Bulk => 1,
        }
    }
}

/// What a connection is protected by. Both sides must be set up alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mode {
    /// Mutual TLS below this handshake.
    pub tls: bool,
    /// A shared secret proven in this handshake.
    pub secret: bool,
}

impl Mode {
    fn code(self) -> u8 {
        u8::from(self.tls) | u8::from(self.secret) << 1
    }

    fn describe(self) -> &'static str {
        match (self.tls, self.secret) {
            (true, true) => "TLS and a shared secret",
            (true, false) => "TLS without a shared secret",
            (false, true) => "a shared secret without TLS",
            (false, false) => "no protection",
        }
    }
}

/// Any message of the handshake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// The first, by the dialer.
    Hello(Hello),
    /// The answer to it.
    Challenge(Challenge),
    /// The dialer knows the secret.
    Proof {
        /// MAC over hello and challenge.
        mac: [u8; MAC_BYTES],
    },
    /// The acceptor knows the secret too, and who it is.
    Welcome(Welcome),
    /// The dialer's last word.
    Verdict {
        /// Why it will not go on; none if frames follow.
        refusal: Option<String>,
    },
}

/// The dialer says who it is and whom it wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// What the dialer wants to speak.
    pub version: Version,
    /// How the dialer is set up.
    pub mode: Mode,
    /// What the connection is for.
    pub lane: Lane,
    /// The dialer's nonce.
    pub nonce: Nonce,
    /// Who the dialer is.
    pub identity: Identity,
    /// The node id of whom it means to have reached.
    pub target: String,
}

/// The acceptor asks for a proof.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Challenge {
    /// What the acceptor speaks with this dialer.
    pub version: Version,
    /// How the acceptor is set up.
    pub mode: Mode,
    /// The acceptor's nonce.
    pub nonce: Nonce,
}

/// The acceptor says who it is, and proves it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Welcome {
    /// Who the acceptor is.
    pub identity: Identity,
    /// Why it will not talk to the dialer; none if it will.
    pub refusal: Option<String>,
    /// MAC over everything said so far and the fields above.
    pub mac: [u8; MAC_BYTES],
}

/// Why bytes are not a message.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Malformed {
    /// The other side speaks a version that this program does not know.
    #[error("it speaks version {0} of the peer protocol, this node versions 1 and 2")]
    Version(u16),
    /// The first bytes of a TLS connection.
    #[error("it speaks TLS, and this node is not set up for it")]
    Tls,
    /// Anything else.
    #[error("not a message of the peer protocol: {0}")]
    Field(&'static str),
}

/// Why a handshake ended without a connection.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub(super) enum Fault {
    #[error(transparent)]
    Malformed(#[from] Malformed),
    #[error("{0} was expected")]
    Unexpected(&'static str),
    #[error(
        "it speaks version {} of the peer protocol, this node version {} with it",
        .theirs.number(),
        .ours.number()
    )]
    Version { theirs: Version, ours: Version },
    /// The other side has sent what can not be the other half of a key.
    #[error("no key for the frames can be made with it")]
    NoKey,
    #[error("its last message was changed on the way")]
    Changed,
    #[error("it is set up for {}, this node for {}", .theirs.describe(), .ours.describe())]
    Mode { theirs: Mode, ours: Mode },
    #[error("{0} has another shared secret")]
    Proof(String),
    /// By us, after the other side has proven itself.
    #[error("{0}")]
    Refused(String),
    /// By the other side, which has proven itself.
    #[error("refused by the other side: {0}")]
    RefusedByPeer(String),
    /// By the node that we have dialed, which has proven who it is.
    #[error("refused by the other side: {reason}")]
    RefusedBy { reason: String, theirs: Box<Identity> },
}

impl Fault {
    /// Whether the acceptor still sends its challenge, so that the dialer's log can tell what differs.
    /// It says nothing that a well-formed hello would not be told.
    pub(super) fn is_difference_of_setup(&self) -> bool {
        matches!(
            self,
            Self::Malformed(Malformed::Version(_)) | Self::Version { .. } | Self::Mode { .. }
        )
    }
}

/// What a side brings to prove itself, and to check the other: the secrets and the TLS session.
#[derive(Clone, Copy)]
pub(super) struct Keys<'a> {
    /// The first is used for dialing, all are accepted.
    pub(super) secrets: &'a [Secret],
    /// Of the TLS session below.
    pub(super) binding: Option<Binding>,
}

impl Keys<'_> {
    pub(super) fn mode(&self) -> Mode {
        Mode { tls: self.binding.is_some(), secret: !self.secrets.is_empty() }
    }

    /// Without a shared secret the TLS session itself is the key: certificates have proven who is at
    /// its ends, and the MACs still tie every word of the handshake to it.
    fn key(&self, index: usize) -> Option<hmac::Key> {
        let bytes = match self.secrets.get(index) {
            Some(secret) => secret.bytes(),
            None if self.secrets.is_empty() && index == 0 => self.binding.as_ref()?,
            None => return None,
        };
        Some(hmac::Key::new(hmac::HMAC_SHA256, bytes))
    }

    fn text(&self, label: &[u8], parts: &[&[u8]]) -> Vec<u8> {
        let mut text = Vec::with_capacity(BYTES_MAX);
        text.extend_from_slice(label);
        text.push(u8::from(self.binding.is_some()));
        text.extend_from_slice(&self.binding.unwrap_or_default());
        for part in parts {
            text.extend_from_slice(&(part.len() as u64).to_le_bytes());
            text.extend_from_slice(part);
        }
        text
    }

    fn sign(&self, index: usize, label: &[u8], parts: &[&[u8]]) -> [u8; MAC_BYTES] {
        let key = self.key(index).expect("a transport has a secret or TLS");
        let tag = hmac::sign(&key, &self.text(label, parts));
        tag.as_ref().try_into().expect("HMAC-SHA-256 gives 32 bytes")
    }

    /// How frames go behind a handshake in which all this was said, made with the secret of this index.
    fn frames(
        &self,
        index: usize,
        share: KeyShare,
        theirs: &Nonce,
        parts: &[&[u8]],
    ) -> Result<Framing, Fault> {
        let secret = self.secrets.get(index).map_or(&[][..], Secret::bytes);
        let said = digest::digest(&digest::SHA256, &self.text(LABEL_FRAMES, parts));
        share.agree(theirs, secret, said.as_ref()).map_err(|_| Fault::NoKey)
    }

    /// Which key made `mac`, if any of ours did.
    fn verify(&self, label: &[u8], parts: &[&[u8]], mac: &[u8]) -> Option<usize> {
        let text = self.text(label, parts);
        (0..self.secrets.len().max(1))
            .find(|&index| self.key(index).is_some_and(|k| hmac::verify(&k, &text, mac).is_ok()))
    }
}

/// The side that speaks first.
pub(super) struct Dialer<'a> {
    keys: Keys<'a>,
    version: Version,
    ours: &'a Identity,
    target: &'a str,
    hello: Vec<u8>,
    challenge: Vec<u8>,
    /// Of the acceptor.
    nonce: Nonce,
}

impl<'a> Dialer<'a> {
    pub(super) fn new(
        keys: Keys<'a>,
        ours: &'a Identity,
        target: &'a str,
        lane: Lane,
        version: Version,
        nonce: Nonce,
    ) -> Self {
        let (identity, mode) = (ours.clone(), keys.mode());
        let hello = Hello { version, mode, lane, nonce, identity, target: target.to_owned() };
        let hello = Message::Hello(hello).print();
        let (challenge, nonce) = (Vec::new(), Nonce::default());
        Self { keys, version, ours, target, hello, challenge, nonce }
    }

    pub(super) fn hello(&self) -> &[u8] {
        &self.hello
    }

    /// Takes the challenge, gives the proof.
    pub(super) fn prove(&mut self, challenge: &[u8]) -> Result<Vec<u8>, Fault> {
        let Message::Challenge(Challenge { version, mode, nonce }) = parse(challenge)? else {
            return Err(Fault::Unexpected("a challenge"));
        };
        if mode != self.keys.mode() {
            return Err(Fault::Mode { theirs: mode, ours: self.keys.mode() });
        }
        if version != self.version {
            return Err(Fault::Version { theirs: version, ours: self.version });
        }
        self.challenge = challenge.to_vec();
        self.nonce = nonce;
        let mac = self.keys.sign(0, LABEL_DIALER, &[&self.hello, &self.challenge]);
        Ok(Message::Proof { mac }.print())
    }

    /// Takes the welcome; gives who the acceptor is, if it is the one we mean.
    ///
    /// [`Fault::Refused`] is to be told to the acceptor, by [`verdict`].
    pub(super) fn conclude(&self, bytes: &[u8]) -> Result<Identity, Fault> {
        let Message::Welcome(welcome) = parse(bytes)? else {
            return Err(Fault::Unexpected("a welcome"));
        };
        let said = &bytes[..bytes.len() - MAC_BYTES];
        let parts: [&[u8]; 3] = [&self.hello, &self.challenge, said];
        // Only the key that we have used: the acceptor knows which one that was.
        if self.keys.verify(LABEL_ACCEPTOR, &parts, &welcome.mac) != Some(0) {
            return Err(Fault::Proof(self.target.to_owned()));
        }
        let theirs = welcome.identity;
        if theirs.node != self.target {
            let reason = format!("it is {}, not {}", theirs.node, self.target);
            return Err(match welcome.refusal {
                Some(reason) => Fault::RefusedByPeer(reason),
                None => Fault::Refused(reason),
            });
        }
        if let Some(reason) = welcome.refusal {
            return Err(Fault::RefusedBy { reason, theirs: Box::new(theirs) });
        }
        same_cluster(self.ours, &theirs)?;
        Ok(theirs)
    }

    /// How the verdict and frames go, after a welcome that [`Self::conclude`] did not call false.
    pub(super) fn frames(&self, share: KeyShare, welcome: &[u8]) -> Result<Framing, Fault> {
        self.keys.frames(0, share, &self.nonce, &[&self.hello, &self.challenge, welcome])
    }
}

/// The side that listens first.
pub(super) struct Acceptor<'a> {
    keys: Keys<'a>,
    hello_bytes: Vec<u8>,
    hello: Hello,
    challenge: Vec<u8>,
}

impl<'a> Acceptor<'a> {
    /// Takes the hello. `challenge` (see [`challenge`]), which was made for this version, is to be sent then, and also
    /// if the fault [is a difference of set-up](Fault::is_difference_of_setup).
    pub(super) fn new(
        keys: Keys<'a>,
        version: Version,
        bytes: &[u8],
        challenge: &[u8],
    ) -> Result<Self, Fault> {
        let Message::Hello(hello) = parse(bytes)? else {
            return Err(Fault::Unexpected("a hello"));
        };
        if hello.mode != keys.mode() {
            return Err(Fault::Mode { theirs: hello.mode, ours: keys.mode() });
        }
        if hello.version != version {
            return Err(Fault::Version { theirs: hello.version, ours: version });
        }
        Ok(Self { keys, hello_bytes: bytes.to_vec(), hello, challenge: challenge.to_vec() })
    }

    pub(super) fn hello(&self) -> &Hello {
        &self.hello
    }

    /// Takes the proof; gives which of our secrets the dialer knows (0 without secrets).
    pub(super) fn check(&self, proof: &[u8]) -> Result<usize, Fault> {
        let Message::Proof { mac } = parse(proof)? else {
            return Err(Fault::Unexpected("a proof"));
        };
        self.keys
            .verify(LABEL_DIALER, &[&self.hello_bytes, &self.challenge], &mac)
            .ok_or_else(|| Fault::Proof(self.hello.identity.node.clone()))
    }

    /// Whether the dialer means us. Asked after [`Self::check`]: a stranger is told nothing.
    pub(super) fn judge(&self, ours: &Identity) -> Result<(), Fault> {
        let Hello { identity: theirs, target, .. } = &self.hello;
        if *target != ours.node {
            return Err(Fault::Refused(format!(
                "{} wants {target}, this is {}",
                theirs.node, ours.node
            )));
        }
        if theirs.node == ours.node {
            return Err(Fault::Refused(format!("there are two nodes {}", ours.node)));
        }
        same_cluster(ours, theirs)
    }

    /// The welcome, made with the secret that [`Self::check`] has found.
    pub(super) fn welcome(&self, ours: &Identity, refusal: Option<&str>, secret: usize) -> Vec<u8> {
        let welcome = Welcome {
            identity: ours.clone(),
            refusal: refusal.map(presentable),
            mac: [0; MAC_BYTES],
        };
        let mut bytes = Message::Welcome(welcome).print();
        let said = bytes.len() - MAC_BYTES;
        let parts: [&[u8]; 3] = [&self.hello_bytes, &self.challenge, &bytes[..said]];
        let mac = self.keys.sign(secret, LABEL_ACCEPTOR, &parts);
        bytes[said..].copy_from_slice(&mac);
        bytes
    }

    /// How the verdict and frames come, after this welcome, made with the secret of this index.
    pub(super) fn frames(
        &self,
        share: KeyShare,
        welcome: &[u8],
        secret: usize,
    ) -> Result<Framing, Fault> {
        let parts: [&[u8]; 3] = [&self.hello_bytes, &self.challenge, welcome];
        self.keys.frames(secret, share, &self.hello.nonce, &parts)
    }
}

/// The version that a hello asks for, if this program knows it.
pub(super) fn version_of(hello: &[u8]) -> Option<Version> {
    match parse(hello) {
        Ok(Message::Hello(hello)) => Some(hello.version),
        _ => None,
    }
}

/// The acceptor's first message.
pub(super) fn challenge(version: Version, mode: Mode, nonce: Nonce) -> Vec<u8> {
    Message::Challenge(Challenge { version, mode, nonce }).print()
}

/// The dialer's last message.
pub(super) fn verdict(refusal: Option<&str>) -> Vec<u8> {
    Message::Verdict { refusal: refusal.map(presentable) }.print()
}

/// Takes the dialer's last message.
pub(super) fn check_verdict(mut bytes: Vec<u8>, framing: &mut Framing) -> Result<(), Fault> {
    framing.open(&mut bytes).map_err(|_| Fault::Changed)?;
    match parse(&bytes)? {
        Message::Verdict { refusal: None } => Ok(()),
        Message::Verdict { refusal: Some(reason) } => Err(Fault::RefusedByPeer(reason)),
        Message::Hello(_) | Message::Challenge(_) | Message::Proof { .. } | Message::Welcome(_) => {
            Err(Fault::Unexpected("a verdict"))
        }
    }
}

/// Whether `node` may be a node id.
pub fn is_node_id(node: &str) -> bool {
    (1..=NODE_BYTES_MAX).contains(&node.len())
        && node.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
}

fn same_cluster(ours: &Identity, theirs: &Identity) -> Result<(), Fault> {
    match (ours.cluster, theirs.cluster) {
        (Some(mine), Some(other)) if mine != other => Err(Fault::Refused(format!(
            "{} belongs to cluster {:032x}, {} to cluster {:032x}",
            theirs.node,
            u128::from_be_bytes(other),
            ours.node,
            u128::from_be_bytes(mine),
        ))),
        // One without a cluster is about to join; whether it may, the handler says.
        _ => Ok(()),
    }
}

/// A reason as it may stand in a message and in a log.
fn presentable(reason: &str) -> String {
    let mut text: String = reason.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    text.truncate(text.floor_char_boundary(REASON_BYTES_MAX));
    if text.is_empty() {
        text.push_str("no reason given");
    }
    text
}

/// Any bytes to a message. What it accepts, [`Message::print`] prints as the same bytes.
pub fn parse(bytes: &[u8]) -> Result<Message, Malformed> {
    let mut input = Input(bytes);
    let message = match input.u8()? {
        TAG_HELLO => {
            let version = input.preamble()?;
            Message::Hello(Hello {
                version,
                mode: input.mode()?,
                lane: input.lane()?,
                nonce: input.array()?,
                identity: input.identity()?,
                target: input.node()?,
            })
        }
        TAG_CHALLENGE => {
            let version = input.preamble()?;
            Message::Challenge(Challenge { version, mode: input.mode()?, nonce: input.array()? })
        }
        TAG_PROOF => Message::Proof { mac: input.array()? },
        TAG_WELCOME => Message::Welcome(Welcome {
            identity: input.identity()?,
            refusal: input.refusal()?,
            mac: input.array()?,
        }),
        TAG_VERDICT => Message::Verdict { refusal: input.refusal()? },
        _ => return Err(Malformed::Field("unknown tag")),
    };
    if !input.0.is_empty() {
        return Err(Malformed::Field("bytes behind its end"));
    }
    Ok(message)
}

struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn take(&mut self, length: usize) -> Result<&'a [u8], Malformed> {
        let (head, rest) = self.0.split_at_checked(length).ok_or(Malformed::Field("too short"))?;
        self.0 = rest;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        self.take(N)?.try_into().map_err(|_| Malformed::Field("too short"))
    }

    fn u8(&mut self) -> Result<u8, Malformed> {
        self.array().map(|[byte]| byte)
    }

    fn bool(&mut self) -> Result<bool, Malformed> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(Malformed::Field("a flag that is neither 0 nor 1")),
        }
    }

    fn preamble(&mut self) -> Result<Version, Malformed> {
        if self.array()? != MAGIC {
            return Err(Malformed::Field("wrong magic"));
        }
        let number = u16::from_le_bytes(self.array()?);
        let version =
            [Version::Plain, Version::Sealed].into_iter().find(|it| it.number() == number);
        version.ok_or(Malformed::Version(number))
    }

    fn mode(&mut self) -> Result<Mode, Malformed> {
        match self.u8()? {
            code @ 0..=3 => Ok(Mode { tls: code & 1 != 0, secret: code & 2 != 0 }),
            _ => Err(Malformed::Field("unknown mode")),
        }
    }

    fn lane(&mut self) -> Result<Lane, Malformed> {
        let code = self.u8()?;
        let lane = Lane::ALL.into_iter().find(|lane| lane.code() == code);
        lane.ok_or(Malformed::Field("unknown lane"))
    }

    fn identity(&mut self) -> Result<Identity, Malformed> {
        let (known, cluster) = (self.bool()?, self.array()?);
        if !known && cluster != [0; 16] {
            return Err(Malformed::Field("a cluster id that is said to be unknown"));
        }
        Ok(Identity {
            cluster: known.then_some(cluster),
            raft_id: u64::from_le_bytes(self.array()?),
            disk: u64::from_le_bytes(self.array()?),
            witness: self.bool()?,
            version: u32::from_le_bytes(self.array()?),
            node: self.node()?,
        })
    }

    fn node(&mut self) -> Result<String, Malformed> {
        let length = self.u8()?.into();
        match str::from_utf8(self.take(length)?) {
            Ok(node) if is_node_id(node) => Ok(node.to_owned()),
            _ => Err(Malformed::Field("not a node id")),
        }
    }

    fn refusal(&mut self) -> Result<Option<String>, Malformed> {
        let length = u16::from_le_bytes(self.array()?).into();
        if length == 0 {
            return Ok(None);
        }
        match str::from_utf8(self.take(length)?) {
            // It will stand in our log.
            Ok(text) if presentable(text) == text => Ok(Some(text.to_owned())),
            _ => Err(Malformed::Field("a reason that cannot be shown")),
        }
    }
}

impl Message {
    /// The bytes of the message, without the length prefix.
    pub fn print(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(256);
        match self {
            Self::Hello(Hello { version, mode, lane, nonce, identity, target }) => {
                preamble(TAG_HELLO, *version, &mut out);
                out.extend_from_slice(&[mode.code(), lane.code()]);
                out.extend_from_slice(nonce);
                identity.print(&mut out);
                print_node(target, &mut out);
            }
            Self::Challenge(Challenge { version, mode, nonce }) => {
                preamble(TAG_CHALLENGE, *version, &mut out);
                out.push(mode.code());
                out.extend_from_slice(nonce);
            }
            Self::Proof { mac } => {
                out.push(TAG_PROOF);
                out.extend_from_slice(mac);
            }
            Self::Welcome(Welcome { identity, refusal, mac }) => {
                out.push(TAG_WELCOME);
                identity.print(&mut out);
                print_refusal(refusal.as_deref(), &mut out);
                out.extend_from_slice(mac);
            }
            Self::Verdict { refusal } => {
                out.push(TAG_VERDICT);
                print_refusal(refusal.as_deref(), &mut out);
            }
        }
        out
    }
}

impl Identity {
    fn print(&self, out: &mut Vec<u8>) {
        out.push(u8::from(self.cluster.is_some()));
        out.extend_from_slice(&self.cluster.unwrap_or_default());
        out.extend_from_slice(&self.raft_id.to_le_bytes());
        out.extend_from_slice(&self.disk.to_le_bytes());
        out.push(u8::from(self.witness));
        out.extend_from_slice(&self.version.to_le_bytes());
        print_node(&self.node, out);
    }
}

fn preamble(tag: u8, version: Version, out: &mut Vec<u8>) {
    out.push(tag);
    out.extend_from_slice(&MAGIC);
    out.extend_from_slice(&version.number().to_le_bytes());
}

fn print_node(node: &str, out: &mut Vec<u8>) {
    out.push(node.len().try_into().expect("node ids have at most 64 bytes"));
    out.extend_from_slice(node.as_bytes());
}

fn print_refusal(refusal: Option<&str>, out: &mut Vec<u8>) {
    let reason = refusal.unwrap_or_default();
    let length: u16 = reason.len().try_into().expect("reasons have at most 400 bytes");
    out.extend_from_slice(&length.to_le_bytes());
    out.extend_from_slice(reason.as_bytes());
}
