//! `hello`: which features a connection has, and whose session it continues.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use dflockd_core::{Outcome, RequestId};
use dflockd_engine::{Attaching, Attachment, PendingFlushes, SessionSecret, Submitted};
use dflockd_wire::{ErrorCode, Op, Response, Unit};

use super::{Connection, Open};
use crate::frontend::line::translate;

/// How the word begins that names the session to attach to.
const ATTACH: &str = "attach=";
/// Attempts to attach to a session that does not exist, after which a connection is closed.
const FAILED_ATTACHES_MAX: u8 = 10;

/// A greeting whose session is not there yet.
pub(super) struct Greeting {
    words: Vec<String>,
    /// The word that names the session.
    session: Option<String>,
}

impl Connection {
    /// Agrees on features. The sessions of a cluster are kept by all its members, so that may take a while.
    pub(super) fn greet(
        &mut self,
        id: RequestId,
        number: Option<u64>,
        name: &str,
        words: &[&str],
        flushes: &mut PendingFlushes,
    ) {
        self.me.set_label(name.into());
        let engine = Arc::clone(&self.service.engine);
        let mut greeting =
            Greeting { words: words.iter().map(ToString::to_string).collect(), session: None };
        if let Some(digits) = words.iter().find_map(|word| word.strip_prefix(ATTACH)) {
            greeting.session = Some(format!("{ATTACH}{digits}"));
            let attaching = match parse_secret(digits) {
                Some(secret) => engine.attach(&self.me, id, secret, flushes),
                None => Attaching::Done(None),
            };
            match attaching {
                Attaching::Done(attached) => {
                    self.finish_greeting(number, greeting, attached.ok_or(ErrorCode::Error));
                }
                Attaching::Later => self.wait_greeting(id, greeting),
            }
        } else if words.contains(&"keep") {
            let (secret, submitted) = engine.keep(&self.me, id);
            greeting.session = Some(format!("keep={}", hex::encode(secret.0)));
            match submitted {
                Submitted::Done(Outcome::Done) => {
                    let me = self.me.clone();
                    self.finish_greeting(number, greeting, Ok(me));
                }
                Submitted::Done(refused) => {
                    self.finish_greeting(number, greeting, Err(translate::no_session(&refused)));
                }
                Submitted::Later(_) => self.wait_greeting(id, greeting),
                Submitted::Gone => self.close(),
            }
        } else {
            let me = self.me.clone();
            self.finish_greeting(number, greeting, Ok(me));
        }
    }

    fn wait_greeting(&mut self, id: RequestId, greeting: Greeting) {
        self.greeting = Some(Box::new(greeting));
        let place = Some(self.service.engine.place(b""));
        self.wait(id, Open { place, ..Open::new(Op::Hello) });
    }

    /// The session of the greeting is there, or is not to be had.
    pub(super) fn finish_greeting(
        &mut self,
        number: Option<u64>,
        greeting: Greeting,
        session: Result<Attachment, ErrorCode>,
    ) {
        let session = match session {
            Ok(session) => session,
            Err(code) => {
                // Never a new session in place of the one asked for. The client may greet again.
                self.fresh = true;
                self.respond(number, &Response::Error(code));
                self.failed_attaches += u8::from(code == ErrorCode::Error);
                if self.failed_attaches >= FAILED_ATTACHES_MAX {
                    tracing::warn!(peer = %self.peer, "closed: too many unknown sessions");
                    self.close();
                }
                return;
            }
        };
        self.me = session;
        let mut accepted = Vec::new();
        let mut is_attached = false;
        if let Some(session) = greeting.session {
            self.kept = true;
            is_attached = session.starts_with(ATTACH);
            accepted.push(session);
        }
        let mut numbered = false;
        for word in greeting.words {
            match word.as_str() {
                "fence" => self.client_features.fence = true,
                "lease-status" => self.client_features.lease_status = true,
                "redirect" => self.wants_redirect = true,
                "ms" => self.unit = Unit::Millis,
                "lost" => self.inbox.wants_lost.store(true, Ordering::Relaxed),
                "mux" => numbered = true,
                "last" if is_attached => {
                    accepted.push(format!("last={}", self.me.last_request().0));
                    continue;
                }
                _ => continue,
            }
            accepted.push(word);
        }
        self.greeted = true;
        self.client_features.unavailable = true;
        self.undecided = None;
        self.respond(number, &Response::Value(accepted.join(" ").as_bytes()));
        if numbered {
            self.numbered = true;
            self.open = Some(Box::default());
            self.decoder.set_numbered(true);
        }
    }
}

fn parse_secret(digits: &str) -> Option<SessionSecret> {
    let mut secret = [0; 16];
    hex::decode_to_slice(digits, &mut secret).ok()?;
    Some(SessionSecret(secret))
}
