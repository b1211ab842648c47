//! A request that nobody can decide yet. A client that greeted is told so at once; the others have no word for it but
//! `error`, which may also mean "not held", so the connection asks again for them.

use dflockd_core::{Command, Outcome, Refusal, Span, Timestamp};
use dflockd_engine::PendingFlushes;
use dflockd_wire::{Decoded, Decoder, Op, Request};

use super::Connection;

/// How long at least it is tried to have a request decided before a client hears `error`, which may mean "not held".
const DECIDE_MIN: Span = Span::from_secs(5);
/// How long after it found nobody who could decide a request is asked again.
const ASK_AGAIN: Span = Span::from_millis(100);

/// The last request that was not answered at once.
#[derive(Default)]
pub(super) struct Undecided {
    frame: Vec<u8>,
    begun: Timestamp,
    /// Until then nobody is told that nobody can decide.
    until: Timestamp,
    /// When it is asked again; none while somebody may be deciding it.
    pub(super) again_at: Option<Timestamp>,
    is_again: bool,
}

impl Undecided {
    pub(super) fn keep(&mut self, frame: &[u8]) {
        self.frame.clear();
        self.frame.extend_from_slice(frame);
    }
}

impl Connection {
    /// Until when a request that is about to be asked is asked again if nobody can decide it: as long as its command
    /// may wait, and a while at least. A command that is asked again has used up some of its time.
    pub(super) fn set_time_to_decide(&mut self, command: Option<&mut Command<'_>>) {
        if self.greeted || !self.service.engine.is_replicated() {
            return;
        }
        let undecided = self.undecided.get_or_insert_default();
        if !undecided.is_again {
            let wait = command.as_ref().map_or(Span::ZERO, |command| command.wait());
            undecided.begun = self.now;
            undecided.until = self.now + wait.max(DECIDE_MIN);
        } else if let Some(command) = command {
            command.shorten_wait(self.now.since(undecided.begun));
        }
    }

    /// Whether nobody could decide a request, and there is time to ask again.
    pub(super) fn is_undecided(&self, outcome: &Outcome) -> bool {
        let until = self.undecided.as_ref().map(|undecided| undecided.until);
        matches!(outcome, Outcome::Refused(Refusal::Unavailable | Refusal::NoFence))
            && !self.service.is_draining()
            && until.is_some_and(|until| self.now < until)
    }

    pub(super) fn wait_to_ask_again(&mut self) {
        if let Some(undecided) = &mut self.undecided {
            undecided.again_at = Some((self.now + ASK_AGAIN).min(undecided.until));
        }
    }

    pub(super) fn again_at(&self) -> Option<Timestamp> {
        self.undecided.as_ref()?.again_at
    }

    /// Asks for what nobody could decide before, and goes on with what came behind it once it is decided.
    pub(super) fn ask_again(&mut self, flushes: &mut PendingFlushes) {
        let Some(undecided) = &mut self.undecided else { return };
        let text = std::mem::take(&mut undecided.frame);
        (undecided.again_at, undecided.is_again) = (None, true);
        let mut decoder = Decoder::new(self.service.value_bytes_max);
        if let Decoded::Frame { frame, .. } = decoder.decode(&text)
            && let Some(op) = Op::parse(frame.command)
            && let Ok(request) = Request::parse(op, &frame, self.unit)
        {
            self.handle_request(op, None, &request, flushes);
        }
        if let Some(undecided) = &mut self.undecided {
            undecided.is_again = false;
            undecided.frame = text;
        }
        self.resume(flushes);
    }
}
