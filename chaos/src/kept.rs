//! Clients with many requests at a time, whose sessions outlive their connections: they attach elsewhere and repeat
//! what was not answered.

use std::collections::{BTreeMap, VecDeque};
use std::thread;
use std::time::{Duration, Instant};

use dflockd_testkit::{Client, Heard, Noise, millis};

use crate::choice::Choice;
use crate::history::{Act, Event, Moment, Stay, moment};
use crate::request::{Kind, Request, Unit, Want, fence_of, is_definite, is_push, token_of};

/// Requests that are open at a time.
const OPEN_MAX: usize = 5;
/// A session without a client lives for this long at least.
const DETACHED: Duration = Duration::from_secs(10);
/// After this long without success a session is given up.
const GIVEN_UP: Duration = Duration::from_secs(40);
/// Answers that are remembered, to be asked for again.
const REMEMBERED: usize = 20;
/// What it agrees on.
const WORDS: &str = "mux ms fence lease-status lost";

/// One such client.
pub struct Kept<'a> {
    act: &'a Act,
    client: usize,
    choice: Choice<'a>,
    link: Option<Client>,
    session: Option<Session>,
}

/// What it knows of its session.
struct Session {
    secret: String,
    next: u64,
    open: BTreeMap<u64, Open>,
    holds: Vec<Held>,
    /// Requests with their answers: what is asked for again must be the same.
    answered: VecDeque<(u64, Request, String)>,
    /// Repeats of these are under way.
    repeated: BTreeMap<u64, (Request, String)>,
    /// The highest number of an answered request that changed something.
    highest: u64,
    /// The sending of something that was answered: the session had a client then.
    alive_at: Moment,
    /// Since when it has no connection.
    away_since: Option<Instant>,
}

struct Open {
    request: Request,
    begin: Moment,
    /// It was sent before, on another connection.
    is_repeat: bool,
}

struct Held {
    key: String,
    kind: Kind,
    lease: Duration,
    token: String,
    until: Moment,
    renewals: usize,
    next_at: Instant,
    is_busy: bool,
}

impl<'a> Kept<'a> {
    /// A client with chance from a seed.
    pub fn new(act: &'a Act, seed: u64, client: usize) -> Self {
        let choice = Choice::new(act, seed, client);
        Self { act, client, choice, link: None, session: None }
    }

    /// Does this and that until the act is over and everything is answered.
    pub fn run(mut self) {
        loop {
            let is_over = self.act.is_over();
            let is_open = self.session.as_ref().is_some_and(|session| !session.open.is_empty());
            if is_over && !is_open {
                break;
            }
            if self.link.is_none() {
                if self.connect().is_none() {
                    let pause = self.choice.between(50, 200);
                    thread::sleep(pause);
                }
                continue;
            }
            if !is_over {
                self.begin();
            }
            let pause = self.choice.between(5, 60);
            self.listen(pause);
            if !is_over && self.choice.one_in(150) {
                self.cut();
            }
        }
        self.act.give_up(self.client);
    }

    /// Ends the connection somehow, and goes on after a while.
    fn cut(&mut self) {
        let Some(link) = self.link.take() else { return };
        if self.choice.one_in(2) {
            link.reset()
        } else {
            drop(link)
        }
        self.act.count("session detached");
        let pause = match self.choice.noise.below(8) {
            0 => self.choice.between(1000, 8000),
            1 | 2 => self.choice.between(100, 1000),
            _ => Duration::ZERO,
        };
        thread::sleep(pause);
    }

    /// A new connection, for the session if there is one. None: try again, unless that took too long.
    fn connect(&mut self) -> Option<()> {
        let now = Instant::now();
        let away = self.session.as_mut().map(|it| *it.away_since.get_or_insert(now));
        let connected = self.try_connect();
        if connected.is_none() && away.is_some_and(|since| since.elapsed() > GIVEN_UP) {
            self.give_up("session given up");
        }
        connected
    }

    fn try_connect(&mut self) -> Option<()> {
        let server = self.act.server(&mut self.choice.noise);
        let mut link = Client::connect(server).ok()?;
        let words = match &self.session {
            Some(session) => format!("attach={} last {WORDS}", session.secret),
            None => format!("keep {WORDS}"),
        };
        let begin = self.act.now();
        let heard = link.try_ask("hello", "kept", &words, Duration::from_secs(45));
        match heard.line() {
            Some(line) if line.starts_with("ok ") => {
                let line = line.to_owned();
                self.link = Some(link);
                self.greeted(&line, begin);
                return Some(());
            }
            Some("error") => self.refused(begin),
            Some("error_draining" | "error_unavailable" | "error_unknown") | None => {
                if heard == Heard::Nothing {
                    self.act.check_time(&"hello", begin, Duration::ZERO);
                }
            }
            Some(other) => self.act.broken(format!("20: hello is answered {other}")),
        }
        None
    }

    /// `error` to an attach: there is no such session, or nobody can tell for five seconds.
    fn refused(&mut self, begin: Moment) {
        let now = self.act.now();
        let Some(session) = &self.session else { return };
        if now - begin > moment(Duration::from_secs(4)) {
            return;
        }
        if now < session.alive_at + moment(DETACHED) / 100 * 99 {
            let away = (now - session.alive_at) / 1_000_000;
            self.act.broken(format!("17: a kept session is gone after {away} ms"));
        }
        self.give_up("session ended");
    }

    /// The session is over, as far as this client knows.
    fn give_up(&mut self, what: &str) {
        self.act.count(what);
        let Some(session) = self.session.take() else { return };
        self.act.give_up(self.client);
        for (_, Open { request, begin, .. }) in session.open {
            let (client, end, greeted) = (self.client, None, true);
            self.act.took(Event { client, request, begin, end, greeted });
        }
    }

    fn greeted(&mut self, line: &str, begin: Moment) {
        let words: Vec<_> = line.split(' ').collect();
        let value = |name: &str| words.iter().find_map(|word| word.strip_prefix(name));
        let Some(link) = &mut self.link else { return };
        let Some(session) = &mut self.session else {
            let Some(secret) = value("keep=") else {
                return self.act.broken(format!("17: no session is kept: {line}"));
            };
            self.session = Some(Session {
                secret: secret.to_owned(),
                next: 1,
                open: BTreeMap::new(),
                holds: Vec::new(),
                answered: VecDeque::new(),
                repeated: BTreeMap::new(),
                highest: 0,
                alive_at: begin,
                away_since: None,
            });
            return;
        };
        self.act.count("session attached");
        session.away_since = None;
        session.alive_at = begin;
        let last = value("last=").and_then(|last| last.parse::<u64>().ok());
        if !last.is_some_and(|last| last >= session.highest && last < session.next) {
            let (highest, next) = (session.highest, session.next);
            let what = format!("19: {line}, but {highest} was answered and {next} is next");
            self.act.broken(what);
        }
        for (number, Open { request, is_repeat, .. }) in &mut session.open {
            *is_repeat = true;
            let (command, arg) = request.lines(Unit::Millis);
            link.begin(&format!("{number} {command}"), &request.key, &arg);
            self.act.count("repeated");
        }
        session.repeated.clear();
        // An answer that was told is told again.
        if !session.answered.is_empty() && self.choice.one_in(2) {
            let at = self.choice.noise.below(session.answered.len());
            let (number, request, answer) = session.answered[at].clone();
            let (command, arg) = request.lines(Unit::Millis);
            link.begin(&format!("{number} {command}"), &request.key, &arg);
            session.repeated.insert(number, (request, answer));
        }
    }

    /// Sends something new, if there is something to do.
    fn begin(&mut self) {
        let Some(session) = &mut self.session else { return };
        let blocked = session.open.iter().find(|(_, open)| !open.request.wait().is_zero());
        if let Some((blocked, _)) = blocked
            && self.choice.one_in(60)
            && let Some(link) = &mut self.link
        {
            link.begin(&format!("{} cancel", session.next), "_", &blocked.to_string());
            session.next += 1;
            return self.act.count("cancelled");
        }
        let now = Instant::now();
        let due = session.holds.iter().position(|held| !held.is_busy && held.next_at <= now);
        let request = if let Some(at) = due {
            let held = &mut session.holds[at];
            held.is_busy = true;
            let want = if held.renewals == 0 {
                Want::Release(held.kind, held.token.clone())
            } else {
                held.renewals -= 1;
                Want::Renew(held.kind, held.token.clone(), held.lease)
            };
            Request { key: held.key.clone(), want }
        } else if session.open.len() >= OPEN_MAX || !self.choice.one_in(3) {
            return;
        } else if self.choice.one_in(4) {
            let (key, kind, lease) = self.choice.lock();
            Request { key, want: Want::Acquire(kind, self.choice.wait(), lease) }
        } else {
            self.choice.value(true)
        };
        let number = session.next;
        session.next += 1;
        let (command, arg) = request.lines(Unit::Millis);
        let Some(link) = &mut self.link else { return };
        if number.is_multiple_of(50) && session.open.is_empty() && session.repeated.is_empty() {
            let up_to = number - 1;
            link.begin(&format!("{number} ack"), "_", &up_to.to_string());
            session.answered.clear();
            // The request that was meant gets the next number.
            session.next += 1;
            link.begin(&format!("{} {command}", number + 1), &request.key, &arg);
            let (begin, is_repeat) = (self.act.now(), false);
            session.open.insert(number + 1, Open { request, begin, is_repeat });
            return;
        }
        let begin = self.act.now();
        link.begin(&format!("{number} {command}"), &request.key, &arg);
        session.open.insert(number, Open { request, begin, is_repeat: false });
    }

    /// Takes in what comes in a while.
    fn listen(&mut self, time: Duration) {
        let until = Instant::now() + time;
        loop {
            let Some(link) = &mut self.link else { return };
            match link.hear(until.saturating_duration_since(Instant::now())) {
                Heard::Line(line) if is_push(&line) => self.pushed(&line),
                Heard::Line(line) => self.answer(&line),
                Heard::End => self.link = None,
                Heard::Nothing => break,
            }
        }
        // What waits too long shows here, too.
        let Some(session) = &self.session else { return };
        let late = session.open.values().find(|open| {
            let waited = Duration::from_nanos(self.act.now().saturating_sub(open.begin));
            waited > Act::patience(open.request.wait()) + Duration::from_secs(10)
        });
        if let Some(Open { request, begin, .. }) = late {
            self.act.check_time(request, *begin, request.wait());
            self.link = None;
            self.give_up("session given up");
        }
    }

    /// A hold ended other than by its release.
    fn pushed(&mut self, line: &str) {
        let words: Vec<_> = line.split(' ').collect();
        let ["lost", _, fence, reason] = words[..] else { return };
        let Some(session) = &mut self.session else { return };
        let now = self.act.now();
        let is_it = |held: &&Held| fence_of(&held.token).to_string() == fence;
        if let Some(held) = session.holds.iter().find(is_it)
            && now < held.until
        {
            let left = (held.until - now) / 1_000_000;
            self.act.broken(format!("11: {line} ({reason}) with {left} ms left"));
        }
        self.act.count("lost");
    }

    fn answer(&mut self, line: &str) {
        let Some((number, answer)) = line.split_once(' ') else {
            return self.act.count(line);
        };
        let Ok(number) = number.parse::<u64>() else {
            return self.act.broken(format!("47: a line without a number: {line}"));
        };
        let Some(session) = &mut self.session else { return };
        if let Some((request, told)) = session.repeated.remove(&number) {
            if answer == told {
                self.act.count("told again");
            } else if is_definite(answer) && answer != "error_draining" {
                let what = format!("19: {request:?} was answered {told}, then {answer}");
                self.act.broken(what);
            }
            return;
        }
        if number == 0 {
            return self.act.count(line);
        }
        let is_undecided = ["error_draining", "error_unavailable"].contains(&answer);
        if is_undecided && session.open.get(&number).is_some_and(|open| open.is_repeat) {
            // That says nothing about the first attempt.
            self.link = None;
            return self.act.count("repeated in vain");
        }
        let Some(Open { request, begin, .. }) = session.open.remove(&number) else { return };
        self.act.check_time(&request, begin, request.wait());
        let now = self.act.now();
        session.alive_at = session.alive_at.max(begin);
        if answer.starts_with("ok") && !request.reads() {
            session.highest = session.highest.max(number);
            session.answered.push_back((number, request.clone(), answer.to_owned()));
            if session.answered.len() > REMEMBERED {
                session.answered.pop_front();
            }
        }
        let noise = &mut self.choice.noise;
        match &request.want {
            Want::Acquire(kind, _, lease) => {
                if let Some(token) = token_of(answer) {
                    let (key, token) = (request.key.clone(), token.to_owned());
                    let renewals = 1 + noise.below(2);
                    let next_at = Instant::now();
                    let (kind, lease, until, is_busy) = (*kind, *lease, 0, false);
                    let held = Held { key, kind, lease, token, until, renewals, next_at, is_busy };
                    session.holds.push(held);
                }
            }
            Want::Renew(kind, token, lease) => {
                let at = session.holds.iter().position(|held| held.token == *token);
                if let Some(at) = at {
                    let held = &mut session.holds[at];
                    held.is_busy = false;
                    if answer.starts_with("ok") {
                        held.until = begin + moment(*lease) / 100 * 99;
                        let pause = pause(noise);
                        held.next_at = Instant::now() + pause;
                        let until = held.until.min(now + moment(pause));
                        if kind.is_exclusive() && now < until {
                            let (key, fence) = (request.key.clone(), fence_of(token));
                            let stay = Stay { key, client: self.client, fence, from: now, until };
                            self.act.history.lock().stays.push(stay);
                        }
                    } else if is_definite(answer) && !answer.starts_with("error_un") {
                        session.holds.remove(at);
                    }
                }
            }
            Want::Release(_, token) => session.holds.retain(|held| held.token != *token),
            Want::Add
            | Want::Reset(_)
            | Want::Count
            | Want::Put(_)
            | Want::Swap(..)
            | Want::Delete
            | Want::Fetch
            | Want::Push(..)
            | Want::Pop(..)
            | Want::Length
            | Want::Enqueue(..)
            | Want::Claim(..) => {}
        }
        self.choice.learn(&request, answer);
        let end = is_definite(answer).then(|| (now, answer.to_owned()));
        self.act.took(Event { client: self.client, request, begin, end, greeted: true });
    }
}

/// Until a hold is renewed or released.
fn pause(noise: &mut Noise) -> Duration {
    millis(20 + noise.next() % 300)
}
