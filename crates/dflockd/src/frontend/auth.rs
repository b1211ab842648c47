//! Who may use the server: which tokens are valid, whose they are, what came with which of them, and how often somebody
//! may guess.
//!
//! Several tokens of an identity are valid at a time, so that clients can change over one by one: those of
//! `--identities-file`, and two of `--auth-token-file` and `--admin-token-file`, which are two identities that need no
//! file. A connection, a session or a stream remembers by a number which token it came with ([`Pass`]), never the token
//! itself. When a token is no longer valid, or its identity has other rights, what came with it ends:
//! [`Auth::revoked`] tells the futures of HTTP and gRPC, the server goes through the connections and sessions. So a
//! pass has the same rights as long as it is valid.
//!
//! What an identity may do decides [`Identity::may`]; every API asks by [`Service::check_right`] before the engine sees
//! a request.
//!
//! Wrong tokens are counted per address and in total by all protocols together. Who has used up what it may is refused
//! without a comparison, with the right token too: otherwise guessing would go on. A connection that has shown the
//! right token before is not concerned.

use std::collections::HashMap;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::task::Context;
use std::time::{Duration, Instant, SystemTime};

use arc_swap::ArcSwap;
use axum::http::header::AUTHORIZATION;
use axum::http::{HeaderMap, HeaderValue};
use dflockd_core::{Command, Query, Refusal};
use dflockd_engine::{AddressKey, Api};
use dflockd_identity::{
    Access, Identities, Identity, Proof, RESERVED, Role, TOKEN_BYTES_MAX, TokenHash,
    certificate_names,
};
use parking_lot::Mutex;
use rustls::pki_types::CertificateDer;
use tokio::sync::watch;

use crate::config::{Config, Secret, Tokens};
use crate::frontend::rate::{Bucket, Rate, RateLimit};
use crate::logging;
use crate::service::Service;

/// Wrong tokens that an address may send at once.
const BURST: u64 = 10;
/// Each answer to a wrong token comes this much later.
pub(crate) const WRONG_TOKEN_PAUSE: Duration = Duration::from_millis(100);

/// Whose token it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TokenKind {
    /// Needed for everything, where one is configured.
    Client,
    /// Needed for what operators do.
    Admin,
}

impl TokenKind {
    pub(crate) const ALL: [Self; 2] = [Self::Client, Self::Admin];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Admin => "admin",
        }
    }
}

/// Who somebody is.
pub(crate) type Who = Arc<Identity>;

/// Whoever has the token of `--auth-token`.
static AUTH_TOKEN: LazyLock<Who> =
    LazyLock::new(|| Arc::new(Identity::new(RESERVED[0], Role::Use)));
/// Whoever has the token of `--admin-token`.
static ADMIN_TOKEN: LazyLock<Who> =
    LazyLock::new(|| Arc::new(Identity::new(RESERVED[1], Role::Admin)));
/// Everybody where no token is needed.
static ANYONE: LazyLock<Who> = LazyLock::new(|| Arc::new(Identity::new(RESERVED[2], Role::Use)));
/// Whoever has a token that is no longer valid.
static NOBODY: LazyLock<Who> = LazyLock::new(|| Arc::new(Identity::nobody()));

/// With which token somebody came: its number, or that none was needed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Pass(u64);

impl Pass {
    /// No token was needed.
    pub(crate) const OPEN: Self = Self(0);
}

/// Where a request over HTTP or gRPC comes from, and with which token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Peer(pub(crate) IpAddr, pub(crate) Pass);

/// A [`Pass`] that changes when its owner comes with another token.
#[derive(Debug, Default)]
pub(crate) struct LatestPass(AtomicU64);

impl LatestPass {
    pub(crate) fn new(pass: Pass) -> Self {
        Self(AtomicU64::new(pass.0))
    }

    pub(crate) fn get(&self) -> Pass {
        Pass(self.0.load(Ordering::SeqCst))
    }

    pub(crate) fn set(&self, pass: Pass) {
        self.0.store(pass.0, Ordering::SeqCst);
    }
}

/// Why somebody is not let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Denied {
    /// The token is missing or wrong.
    Wrong,
    /// Too many were wrong; this one was not looked at.
    TooMany,
    /// There is no such token, so nobody has it.
    Disabled,
    /// The token is right, but what an operator does can not be written down now, and so is not done.
    Unaudited,
}

/// Where an attempt comes from.
#[derive(Clone, Debug)]
pub(crate) struct Origin {
    pub(crate) address: IpAddr,
    /// Whether this connection has shown a right token before.
    proven: Arc<AtomicBool>,
    /// The names of the certificate that it has shown, if it has shown one.
    certificate: Option<Arc<[String]>>,
}

impl Origin {
    /// A connection that has shown nothing yet.
    pub(crate) fn new(address: IpAddr) -> Self {
        Self { address, proven: Arc::default(), certificate: None }
    }

    /// A connection whose client has shown these certificates in the handshake of TLS, its own first.
    pub(crate) fn with_certificates(
        mut self,
        certificates: Option<&[CertificateDer<'static>]>,
    ) -> Self {
        let own = certificates.and_then(|certificates| certificates.first());
        self.certificate = own.map(|own| certificate_names(own).into());
        self
    }

    /// Whether a request that comes without a token may count on the certificate of its connection.
    pub(crate) fn has_certificate(&self) -> bool {
        self.certificate.is_some()
    }
}

/// The tokens of the server.
pub(crate) struct Auth {
    client: Valid,
    admin: Valid,
    listed: Listed,
    /// The last pass that was given out.
    last: Mutex<u64>,
    guesses: Guesses,
    /// Grows when a token is dropped.
    dropped: watch::Sender<u64>,
    /// How often a token was dropped, in a form that every request can look at.
    generation: AtomicU64,
}

/// The valid tokens of a kind, each with its number.
#[derive(Default)]
struct Valid {
    tokens: ArcSwap<Vec<(Pass, Secret)>>,
}

/// The identities of the file.
#[derive(Default)]
struct Listed {
    file: Mutex<File>,
    now: ArcSwap<ListedNow>,
}

/// What the file has; nothing without one.
#[derive(Default)]
struct File {
    identities: Option<Identities>,
    /// When a token becomes valid or stops being so.
    changes_at: Option<SystemTime>,
}

/// Whose tokens are valid now.
#[derive(Default)]
struct ListedNow {
    /// There is a file, so everybody needs a token.
    is_used: bool,
    passes: HashMap<Proof, Pass>,
    identities: HashMap<Pass, Who>,
}

/// How often tokens may be wrong.
struct Guesses {
    per_address: Option<RateLimit>,
    in_total: Option<(Rate, Mutex<Bucket>)>,
}

impl Auth {
    pub(crate) fn new(config: &Config) -> Self {
        let total = config.auth_failure_rate;
        let rate = Rate::new(total, total);
        let in_total = (total > 0).then(|| (rate, Mutex::new(rate.full())));
        let per_address = RateLimit::new(config.auth_failure_rate_per_ip, BURST);
        let auth = Self {
            client: Valid::default(),
            admin: Valid::default(),
            listed: Listed::default(),
            last: Mutex::new(0),
            guesses: Guesses { per_address, in_total },
            dropped: watch::Sender::new(0),
            generation: AtomicU64::new(0),
        };
        auth.replace(TokenKind::Client, config.auth_token.as_ref());
        auth.replace(TokenKind::Admin, config.admin_token.as_ref());
        auth.replace_identities(config.identities.clone(), SystemTime::now());
        auth
    }

    /// Whether clients need a token.
    pub(crate) fn is_required(&self) -> bool {
        !self.client.tokens.load().is_empty() || self.listed.now.load().is_used
    }

    /// Who came with this token.
    pub(crate) fn who(&self, pass: Pass) -> Who {
        if pass == Pass::OPEN {
            return Arc::clone(if self.is_required() { &NOBODY } else { &ANYONE });
        }
        if let Some(who) = self.listed.now.load().identities.get(&pass) {
            return Arc::clone(who);
        }
        Arc::clone(if self.client.has(pass) {
            &AUTH_TOKEN
        } else if self.admin.has(pass) {
            &ADMIN_TOKEN
        } else {
            &NOBODY
        })
    }

    /// Whether a request comes with a valid token, or none is needed. For what a client is never told: a wrong token is
    /// not counted here.
    pub(crate) fn knows(&self, headers: &HeaderMap) -> bool {
        let find = |token: &[u8]| self.find(TokenKind::Client, token);
        !self.is_required() || bearer(headers).is_some_and(|token| find(token).is_some())
    }

    /// Whether anybody can be an operator.
    pub(crate) fn has_operators(&self) -> bool {
        let is_admin = |who: &Who| who.role() == Role::Admin;
        !self.admin.tokens.load().is_empty()
            || self.listed.now.load().identities.values().any(is_admin)
    }

    /// How many bytes the longest valid token of clients has.
    pub(crate) fn longest(&self) -> usize {
        let tokens = self.client.tokens.load();
        let longest = tokens.iter().map(|(_, token)| token.bytes().len()).max().unwrap_or(0);
        if self.listed.now.load().is_used { longest.max(TOKEN_BYTES_MAX) } else { longest }
    }

    /// Takes other tokens for valid. True if one is no longer, so that what came with it must end.
    pub(crate) fn replace(&self, kind: TokenKind, tokens: Option<&Tokens>) -> bool {
        let was_open = !self.is_required();
        let dropped = self.of(kind).replace(tokens, || self.next_pass());
        self.tell(dropped || was_open && self.is_required())
    }

    /// Takes the identities of a file for valid, as far as they are at that time. True if a token is not any more, or
    /// its identity has changed, so that what came with it must end.
    pub(crate) fn replace_identities(&self, file: Option<Identities>, now: SystemTime) -> bool {
        let was_open = !self.is_required();
        let mut current = self.listed.file.lock();
        let dropped = self.listed.replace(file.as_ref(), now, || self.next_pass());
        let changes_at = file.as_ref().and_then(|file| file.next_change(now));
        *current = File { identities: file, changes_at };
        self.tell(dropped || was_open && self.is_required())
    }

    /// Looks at the dates of tokens. True if one is no longer valid, so that what came with it must end.
    pub(crate) fn look_at_dates(&self, now: SystemTime) -> bool {
        let mut file = self.listed.file.lock();
        if file.changes_at.is_none_or(|at| now < at) {
            return false;
        }
        file.changes_at = file.identities.as_ref().and_then(|file| file.next_change(now));
        self.tell(self.listed.replace(file.identities.as_ref(), now, || self.next_pass()))
    }

    /// Tells those who wait for it that what they came with may not be good any more, if so.
    fn tell(&self, dropped: bool) -> bool {
        if dropped {
            self.generation.fetch_add(1, Ordering::SeqCst);
            self.dropped.send_modify(|count| *count += 1);
        }
        dropped
    }

    fn next_pass(&self) -> Pass {
        let mut last = self.last.lock();
        *last += 1;
        Pass(*last)
    }

    /// How often tokens were dropped. Who finds it changed asks whether its own is still valid.
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Whether what somebody came with is still good.
    pub(crate) fn is_valid(&self, kind: TokenKind, pass: Pass) -> bool {
        match kind {
            TokenKind::Client => !self.is_required() || !Arc::ptr_eq(&self.who(pass), &NOBODY),
            TokenKind::Admin => self.who(pass).role() == Role::Admin,
        }
    }

    /// Waits until what somebody came with is no longer good.
    pub(crate) async fn revoked(&self, kind: TokenKind, pass: Pass) {
        let mut dropped = self.dropped.subscribe();
        // The sender is here, so it can not end otherwise.
        let _ = dropped.wait_for(|_| !self.is_valid(kind, pass)).await;
    }

    /// Forgets addresses that are not limited any more.
    pub(crate) fn sweep(&self) {
        if let Some(limit) = &self.guesses.per_address {
            limit.sweep(Instant::now());
        }
    }

    /// The number of the token that was presented.
    fn find(&self, kind: TokenKind, presented: &[u8]) -> Option<Pass> {
        self.of(kind).find(presented).or_else(|| self.listed.find(kind, presented))
    }

    fn of(&self, kind: TokenKind) -> &Valid {
        match kind {
            TokenKind::Client => &self.client,
            TokenKind::Admin => &self.admin,
        }
    }

    fn admit(
        &self,
        kind: TokenKind,
        origin: &Origin,
        presented: Option<&[u8]>,
    ) -> Result<Pass, Denied> {
        match kind {
            TokenKind::Client if !self.is_required() => return Ok(Pass::OPEN),
            TokenKind::Admin if !self.has_operators() => return Err(Denied::Disabled),
            TokenKind::Client | TokenKind::Admin => {}
        }
        let Some(presented) = presented else {
            // Nothing was guessed.
            let names = origin.certificate.as_deref().unwrap_or_default();
            return self.listed.find_certificate(kind, names).ok_or(Denied::Wrong);
        };
        // That somebody has the token of clients says nothing about the token of operators.
        let proven = kind == TokenKind::Client && origin.proven.load(Ordering::Relaxed);
        let address = AddressKey::from(origin.address);
        if !proven && !self.guesses.may_try(address) {
            return Err(Denied::TooMany);
        }
        match self.find(kind, presented) {
            Some(pass) => {
                if kind == TokenKind::Client && !proven {
                    origin.proven.store(true, Ordering::Relaxed);
                }
                Ok(pass)
            }
            None => {
                self.guesses.failed(address);
                Err(Denied::Wrong)
            }
        }
    }
}

impl Valid {
    /// The number of the token that was presented, in a time that does not tell which it is.
    fn find(&self, presented: &[u8]) -> Option<Pass> {
        let mut found = None;
        for (pass, token) in &**self.tokens.load() {
            if token.matches(presented) {
                found = Some(*pass);
            }
        }
        found
    }

    /// True if a token is no longer valid.
    fn replace(&self, tokens: Option<&Tokens>, mut next: impl FnMut() -> Pass) -> bool {
        let before = self.tokens.load();
        let mut after: Vec<(Pass, Secret)> = Vec::new();
        for token in tokens.into_iter().flat_map(Tokens::iter) {
            let known = before.iter().find(|(_, known)| known.matches(token.bytes()));
            let pass = known.map_or_else(&mut next, |(pass, _)| *pass);
            after.push((pass, token.clone()));
        }
        let stays = |pass: Pass| after.iter().any(|(known, _)| *known == pass);
        let dropped = before.iter().any(|(pass, _)| !stays(*pass));
        self.tokens.store(Arc::new(after));
        dropped
    }

    fn has(&self, pass: Pass) -> bool {
        self.tokens.load().iter().any(|(known, _)| *known == pass)
    }
}

impl ListedNow {
    fn find(&self, kind: TokenKind, proof: &Proof) -> Option<Pass> {
        let pass = *self.passes.get(proof)?;
        let is_admin = |who: &Who| who.role() == Role::Admin;
        let may_come = match kind {
            TokenKind::Client => true,
            TokenKind::Admin => self.identities.get(&pass).is_some_and(is_admin),
        };
        may_come.then_some(pass)
    }
}

impl Listed {
    /// Whose token it is. The time it takes tells something of the digest, from which nobody finds the token.
    fn find(&self, kind: TokenKind, presented: &[u8]) -> Option<Pass> {
        let now = self.now.load();
        if now.passes.is_empty() || presented.len() > TOKEN_BYTES_MAX {
            return None;
        }
        now.find(kind, &Proof::Token(TokenHash::of(presented)))
    }

    /// Whose certificate it is, if one of its names is in the file: the first in the order of the certificate counts.
    fn find_certificate(&self, kind: TokenKind, names: &[String]) -> Option<Pass> {
        let now = self.now.load();
        names.iter().find_map(|name| now.find(kind, &Proof::Certificate(name.clone())))
    }

    /// True if a token is no longer valid, or not for the same rights.
    fn replace(
        &self,
        file: Option<&Identities>,
        now: SystemTime,
        mut next: impl FnMut() -> Pass,
    ) -> bool {
        let before = self.now.load();
        let mut after = ListedNow { is_used: file.is_some(), ..ListedNow::default() };
        let credentials = file.into_iter().flat_map(Identities::credentials);
        for credential in credentials.filter(|credential| credential.is_valid_at(now)) {
            let who = &credential.identity;
            let known = before.passes.get(&credential.proof).copied();
            let known = known.filter(|pass| before.identities.get(pass) == Some(who));
            let pass = known.unwrap_or_else(&mut next);
            after.passes.insert(credential.proof.clone(), pass);
            after.identities.insert(pass, Arc::clone(who));
        }
        let dropped = before.identities.keys().any(|pass| !after.identities.contains_key(pass));
        self.now.store(Arc::new(after));
        dropped
    }
}

impl Guesses {
    fn may_try(&self, address: AddressKey) -> bool {
        let now = Instant::now();
        let in_total = |(rate, bucket): &(Rate, Mutex<Bucket>)| bucket.lock().has_any(*rate, now);
        self.per_address.as_ref().is_none_or(|limit| limit.has_any(address, now))
            && self.in_total.as_ref().is_none_or(in_total)
    }

    fn failed(&self, address: AddressKey) {
        let now = Instant::now();
        if let Some(limit) = &self.per_address {
            limit.take(address, now);
        }
        if let Some((rate, bucket)) = &self.in_total {
            bucket.lock().take(*rate, now);
        }
    }
}

impl Service {
    /// Whether somebody who presents this token may come in. Who may not is counted and logged.
    pub(crate) fn admit(
        &self,
        kind: TokenKind,
        api: Api,
        origin: &Origin,
        presented: Option<&[u8]>,
    ) -> Result<Pass, Denied> {
        let admitted = self.auth.admit(kind, origin, presented);
        // To ask for what is switched off is no attempt, unless it comes with a token.
        let is_attempt = |denied: &Denied| *denied != Denied::Disabled || presented.is_some();
        if let Some(denied) = admitted.err().filter(is_attempt) {
            let (peer, token) = (origin.address, kind.name());
            let what = match denied {
                Denied::Wrong => "authentication failed",
                Denied::TooMany => "too many wrong tokens",
                Denied::Disabled => "no admin token is configured",
                Denied::Unaudited => "no room for an audit record",
            };
            if let Some(suppressed) = self.log_budget.admit(peer, what) {
                tracing::warn!(%peer, token, suppressed, "{what}");
            }
            self.metrics.auth_failed(api, kind, denied);
        }
        admitted
    }

    /// Whether a client may come in with the token in the headers of its request. Who may not is counted and logged.
    pub(crate) fn admit_bearer(
        &self,
        api: Api,
        origin: &Origin,
        headers: &HeaderMap,
    ) -> Result<Pass, Denied> {
        self.admit(TokenKind::Client, api, origin, bearer(headers))
    }

    /// Whether somebody may do that; if not, the refusal that the request is answered with. Who may not is counted and
    /// logged.
    pub(crate) fn check_right(
        &self,
        api: Api,
        who: &Identity,
        access: Access<'_>,
        peer: IpAddr,
    ) -> Result<(), Refusal> {
        if who.may(access) {
            return Ok(());
        }
        self.metrics.forbidden(api);
        let what = "an identity asked for what it may not do";
        if let Some(suppressed) = self.log_budget.admit(peer, what) {
            tracing::warn!(%peer, identity = who.name(), suppressed, "{what}");
        }
        Err(Refusal::Forbidden)
    }

    /// Whether somebody who presents this token may do what operators do.
    pub(crate) fn admit_operator(
        &self,
        api: Api,
        origin: &Origin,
        presented: Option<&[u8]>,
    ) -> Result<Pass, Denied> {
        let pass = self.admit(TokenKind::Admin, api, origin, presented)?;
        if logging::audit_has_room() { Ok(pass) } else { Err(Denied::Unaudited) }
    }

    /// Whether a request with these headers may do what operators do. The answer to a wrong token comes after a pause.
    pub(crate) async fn admit_admin(
        &self,
        api: Api,
        origin: &Origin,
        headers: &HeaderMap,
    ) -> Result<Pass, Denied> {
        let shown = headers.get("x-dflockd-admin").map(HeaderValue::as_bytes);
        // An operator of the file needs no second token.
        let own = || bearer(headers).filter(|own| self.auth.find(TokenKind::Admin, own).is_some());
        let presented = shown.or_else(own);
        let admitted = self.admit_operator(api, origin, presented);
        if admitted == Err(Denied::Wrong) {
            tokio::time::sleep(WRONG_TOKEN_PAUSE).await;
        }
        admitted
    }
}

/// What was found to be within the rights of whoever asks for it, so that the engine may see it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Allowed<T>(T);

impl<T> Allowed<T> {
    /// What the server does by itself, or has asked about already.
    pub(crate) fn by_server(asked: T) -> Self {
        Self(asked)
    }

    /// What is to be done.
    pub(crate) fn get(self) -> T {
        self.0
    }
}

/// Whoever makes a request over HTTP or gRPC.
#[derive(Clone)]
pub(crate) struct Asker {
    service: Arc<Service>,
    api: Api,
    address: IpAddr,
    pub(crate) who: Who,
}

impl Asker {
    pub(crate) fn new(service: &Arc<Service>, api: Api, Peer(address, pass): Peer) -> Self {
        Self { service: Arc::clone(service), api, address, who: service.auth.who(pass) }
    }

    /// See [`Service::check_right`].
    pub(crate) fn check(&self, access: Access<'_>) -> Result<(), Refusal> {
        self.service.check_right(self.api, &self.who, access, self.address)
    }

    /// A command that may be sent.
    pub(crate) fn command<'a>(
        &self,
        command: Command<'a>,
    ) -> Result<Allowed<Command<'a>>, Refusal> {
        self.check(Access::command(&command)).map(|()| Allowed(command))
    }

    /// A read that may be asked for.
    pub(crate) fn query<'a>(&self, query: Query<'a>) -> Result<Allowed<Query<'a>>, Refusal> {
        self.check(Access::query(&query)).map(|()| Allowed(query))
    }

    /// A pattern whose keys may be followed.
    pub(crate) fn pattern<'a>(&self, pattern: &'a [u8]) -> Result<Allowed<&'a [u8]>, Refusal> {
        self.check(Access::follow(pattern)).map(|()| Allowed(pattern))
    }
}

/// The token that a request over HTTP or gRPC came with, if any.
pub(crate) struct Revocable {
    service: Arc<Service>,
    api: Api,
    pass: Pass,
    /// Ready when the token is no longer valid; made when the request has to wait.
    revoked: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

impl Revocable {
    pub(crate) fn new(service: &Arc<Service>, api: Api, pass: Pass) -> Self {
        Self { service: Arc::clone(service), api, pass, revoked: None }
    }

    /// Whether the token is no longer valid now. Then the request is counted as revoked.
    pub(crate) fn is_gone(&self) -> bool {
        let is_gone =
            self.pass != Pass::OPEN && !self.service.auth.is_valid(TokenKind::Client, self.pass);
        if is_gone {
            self.service.metrics.revoked(self.api);
        }
        is_gone
    }

    /// Whether the token is no longer valid, which is told and counted once. If not, the task is woken when that
    /// changes.
    pub(crate) fn is_revoked(&mut self, cx: &mut Context<'_>) -> bool {
        if self.pass == Pass::OPEN {
            return false;
        }
        let (service, pass) = (&self.service, self.pass);
        let revoked = self.revoked.get_or_insert_with(|| {
            let service = Arc::clone(service);
            Box::pin(async move { service.auth.revoked(TokenKind::Client, pass).await })
        });
        let is_revoked = revoked.as_mut().poll(cx).is_ready();
        if is_revoked {
            self.service.metrics.revoked(self.api);
            self.pass = Pass::OPEN;
        }
        is_revoked
    }
}

/// The token that a request carries, if any.
fn bearer(headers: &HeaderMap) -> Option<&[u8]> {
    let presented = headers.get(AUTHORIZATION)?.as_bytes();
    let (scheme, credentials) = presented.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| credentials.trim_ascii())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(lines: &[&str]) -> Tokens {
        Tokens::new(lines.iter().map(|line| Secret::new(line.as_bytes())).collect())
    }

    fn auth(per_address: u64, total: u64) -> Auth {
        let mut config = Config::default();
        config.auth_token = Some(tokens(&["one"]));
        config.auth_failure_rate_per_ip = per_address;
        config.auth_failure_rate = total;
        Auth::new(&config)
    }

    fn origin(last: u8) -> Origin {
        Origin::new(IpAddr::from([10, 0, 0, last]))
    }

    fn client(auth: &Auth, origin: &Origin, token: &str) -> Result<Pass, Denied> {
        auth.admit(TokenKind::Client, origin, Some(token.as_bytes()))
    }

    #[test]
    fn a_token_keeps_its_number_as_long_as_it_is_valid() {
        let auth = auth(0, 0);
        let here = origin(1);
        let one = client(&auth, &here, "one").unwrap();
        assert!(!auth.replace(TokenKind::Client, Some(&tokens(&["two", "one"]))));
        let two = client(&auth, &here, "two").unwrap();
        assert_eq!(client(&auth, &here, "one"), Ok(one));
        assert_ne!(one, two);
        assert!(auth.is_valid(TokenKind::Client, one) && auth.is_valid(TokenKind::Client, two));
        assert!(auth.replace(TokenKind::Client, Some(&tokens(&["two"]))));
        assert!(!auth.is_valid(TokenKind::Client, one) && auth.is_valid(TokenKind::Client, two));
        assert_eq!(client(&auth, &here, "one"), Err(Denied::Wrong));
        // The same text later is another token: what came with the first is gone.
        auth.replace(TokenKind::Client, Some(&tokens(&["one", "two"])));
        assert_ne!(client(&auth, &here, "one"), Ok(one));
    }

    #[test]
    fn whoever_came_without_a_token_needs_one_when_there_is_one() {
        let auth = Auth::new(&Config::default());
        assert_eq!(client(&auth, &origin(1), "x"), Ok(Pass::OPEN));
        assert!(auth.is_valid(TokenKind::Client, Pass::OPEN));
        assert!(auth.replace(TokenKind::Client, Some(&tokens(&["one"]))));
        assert!(!auth.is_valid(TokenKind::Client, Pass::OPEN));
        assert!(auth.replace(TokenKind::Client, None));
        assert!(auth.is_valid(TokenKind::Client, Pass::OPEN));
    }

    /// GUARANTEES 48: nobody guesses faster than the limit, from one address or from many.
    #[test]
    fn guesses_are_limited() {
        let auth = auth(1, 15);
        let guess = |last: u8| client(&auth, &origin(last), "wrong");
        for _ in 0..BURST {
            assert_eq!(guess(1), Err(Denied::Wrong));
        }
        assert_eq!(guess(1), Err(Denied::TooMany));
        // Not even with the right one; from elsewhere it is good.
        assert_eq!(client(&auth, &origin(1), "one"), Err(Denied::TooMany));
        let other = origin(2);
        client(&auth, &other, "one").unwrap();
        // What is no guess costs nothing.
        for _ in 0..100 {
            assert_eq!(auth.admit(TokenKind::Client, &origin(3), None), Err(Denied::Wrong));
        }
        let far = (3..=8).map(guess).filter(|denied| *denied == Err(Denied::Wrong)).count();
        assert_eq!(far, 5, "15 in all");
        assert_eq!(client(&auth, &origin(9), "one"), Err(Denied::TooMany));
        // A connection that has shown the token before goes on.
        client(&auth, &other, "one").unwrap();
    }

    #[test]
    fn the_token_of_clients_does_not_help_to_guess_the_one_of_operators() {
        let auth = auth(1, 0);
        auth.replace(TokenKind::Admin, Some(&tokens(&["admin"])));
        let here = origin(1);
        client(&auth, &here, "one").unwrap();
        let guess = || auth.admit(TokenKind::Admin, &here, Some(b"wrong"));
        for _ in 0..BURST {
            assert_eq!(guess(), Err(Denied::Wrong));
        }
        assert_eq!(guess(), Err(Denied::TooMany));
        assert_eq!(auth.admit(TokenKind::Admin, &here, Some(b"admin")), Err(Denied::TooMany));
    }

    #[test]
    fn bearer_tokens() {
        let with = |value: &'static str| {
            let headers = HeaderMap::from_iter([(AUTHORIZATION, HeaderValue::from_static(value))]);
            bearer(&headers).map(<[u8]>::to_vec)
        };
        for right in ["Bearer x", "bearer  x ", "BEARER x"] {
            assert_eq!(with(right), Some(b"x".to_vec()), "{right}");
        }
        assert_eq!(with("Bearer "), Some(Vec::new()));
        for wrong in ["", "Bearer", "Basic x", "x"] {
            assert_eq!(with(wrong), None, "{wrong}");
        }
        assert_eq!(bearer(&HeaderMap::new()), None);
    }
}
