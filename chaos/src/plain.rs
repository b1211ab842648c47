//! Clients with one request at a time or several in a row, whose sessions end with their connections. Some say
//! `hello`.

use std::thread;
use std::time::{Duration, Instant};

use dflockd_testkit::{Client, Heard, millis};

use crate::choice::Choice;
use crate::history::{Act, Event, Moment, Stay, moment};
use crate::request::{Kind, Request, Unit, Want, fence_of, is_definite, is_push, token_of};

/// One such client.
pub struct Plain<'a> {
    act: &'a Act,
    client: usize,
    choice: Choice<'a>,
    /// It says `hello`.
    greets: bool,
    link: Option<Client>,
    /// Connections that it ended by itself. With each of them go the holds that came with it, sooner or later.
    left: u64,
}

impl<'a> Plain<'a> {
    /// A client with chance from a seed.
    pub fn new(act: &'a Act, seed: u64, client: usize) -> Self {
        let choice = Choice::new(act, seed, client);
        Self { act, client, choice, greets: client % 2 == 1, link: None, left: 0 }
    }

    /// Does this and that until the act is over.
    pub fn run(mut self) {
        while !self.act.is_over() {
            match self.choice.noise.below(10) {
                0..=2 => {
                    let request = self.choice.value(true);
                    self.ask(request);
                }
                3 | 4 => self.pipeline(),
                5 if self.choice.one_in(3) => self.leave(),
                5 | 6 => self.two_phases(),
                _ => self.lock(),
            }
            let pause = self.choice.between(10, 120);
            thread::sleep(pause);
        }
        self.leave();
    }

    /// A connection to some member. None: try again.
    fn connect(&mut self) -> Option<&mut Client> {
        if self.link.is_none() {
            let server = self.act.server(&mut self.choice.noise);
            let mut link = Client::connect(server).ok()?;
            if self.greets {
                let begin = self.act.now();
                let heard = link.try_ask("hello", "plain", "fence lease-status", HELLO);
                match heard.line() {
                    Some("ok fence lease-status") => {}
                    Some("error_draining") | None => {
                        if heard == Heard::Nothing {
                            self.act.check_time(&"hello", begin, Duration::ZERO);
                        }
                        return None;
                    }
                    Some(other) => {
                        self.act.broken(format!("20: hello is answered {other}"));
                        return None;
                    }
                }
            }
            self.link = Some(link);
        }
        self.link.as_mut()
    }

    /// Ends the connection, in good order or not.
    fn leave(&mut self) {
        let Some(link) = self.link.take() else { return };
        self.act.give_up(self.client);
        self.left += 1;
        if self.choice.one_in(2) { link.reset() } else { drop(link) }
    }

    /// Sends a request; when it was sent.
    fn send(&mut self, request: &Request) -> Option<Moment> {
        let Some(_) = self.connect() else {
            thread::sleep(millis(50));
            return None;
        };
        let (command, arg) = request.lines(Unit::Seconds);
        let begin = self.act.now();
        if self.choice.one_in(120) {
            // The end comes within the request: it is never executed.
            let text = format!("{command}\n{}\n{arg}\n", request.key);
            let part = self.choice.noise.below(text.len());
            if let Some(link) = &mut self.link {
                let _ = link.try_send(&text[..part]);
            }
            self.act.count("cut within a request");
            self.leave();
            return None;
        }
        self.link.as_mut()?.begin(command, &request.key, &arg);
        Some(begin)
    }

    /// The answer to a request that was sent, if there is one.
    fn hear(&mut self, request: Request, begin: Moment) -> Option<String> {
        let wait = request.wait();
        let until = Instant::now() + Act::patience(wait) + millis(500);
        let answer = loop {
            let Some(link) = &mut self.link else { break None };
            match link.hear(until.saturating_duration_since(Instant::now())) {
                Heard::Line(line) if is_push(&line) => {}
                Heard::Line(line) => break Some(line),
                Heard::End => {
                    self.link = None;
                    break None;
                }
                Heard::Nothing => {
                    self.leave();
                    break None;
                }
            }
        };
        let end = answer.clone().filter(|answer| is_definite(answer));
        self.act.check_time(&request, begin, wait);
        if let Some(answer) = &answer {
            self.choice.learn(&request, answer);
        }
        let end = end.map(|answer| (self.act.now(), answer));
        let greeted = self.greets;
        self.act.took(Event { client: self.client, request, begin, end, greeted });
        answer
    }

    /// A request and its answer, unless nobody knows.
    fn ask(&mut self, request: Request) -> Option<String> {
        let begin = self.send(&request)?;
        if self.choice.one_in(100) {
            // The client goes before it is answered.
            let pause = self.choice.between(0, 20);
            thread::sleep(pause);
            self.leave();
            self.act.count("cut before the answer");
        }
        self.hear(request, begin)
    }

    /// Several requests before the first answer.
    fn pipeline(&mut self) {
        let count = 2 + self.choice.noise.below(5);
        let mut sent = Vec::new();
        for _ in 0..count {
            let request = self.choice.value(false);
            if let Some(begin) = self.send(&request) {
                sent.push((request, begin));
            }
            if self.link.is_none() {
                sent.drain(..).for_each(|(request, begin)| self.lost(request, begin));
            }
        }
        for (request, begin) in sent {
            self.hear(request, begin);
        }
    }

    fn lost(&self, request: Request, begin: Moment) {
        let greeted = self.greets;
        self.act.took(Event { client: self.client, request, begin, end: None, greeted });
    }

    /// Takes a lock, keeps it a little and gives it back.
    fn lock(&mut self) {
        let (key, kind, lease) = self.choice.lock();
        let want = Want::Acquire(kind, self.choice.wait(), lease);
        let Some(answer) = self.ask(Request { key: key.clone(), want }) else { return };
        if let Some(token) = token_of(&answer) {
            self.hold(key, kind, lease, token.to_owned());
        }
    }

    /// Takes a place in the queue, then waits.
    fn two_phases(&mut self) {
        let (key, mut kind, lease) = self.choice.lock();
        if kind == Kind::Election {
            // Only as the mutex that it is as well.
            kind = Kind::Mutex;
        }
        let want = Want::Enqueue(kind, lease);
        let Some(answer) = self.ask(Request { key: key.clone(), want }) else { return };
        if token_of(&answer).is_none() && answer != "queued" && answer != "error_already_enqueued" {
            return;
        }
        let pause = self.choice.between(0, 300);
        thread::sleep(pause);
        let link = self.link.is_some();
        let want = Want::Claim(kind, self.choice.wait());
        let Some(answer) = self.ask(Request { key: key.clone(), want }) else { return };
        if let Some(token) = token_of(&answer) {
            self.hold(key, kind, lease, token.to_owned());
        } else if answer == "error_not_enqueued" && link {
            self.act.count("place lost");
        }
    }

    fn hold(&mut self, key: String, kind: Kind, lease: Duration, token: String) {
        let (fence, left) = (fence_of(&token), self.left);
        // What was granted says nothing about when: it counts from a renewal.
        let mut until: Moment = 0;
        for _ in 0..=self.choice.noise.below(3) {
            let sent = self.act.now();
            let want = Want::Renew(kind, token.clone(), lease);
            match self.ask(Request { key: key.clone(), want }) {
                Some(answer) if answer.starts_with("ok") && self.left == left => {
                    let from = self.act.now();
                    until = sent + moment(lease) / 100 * 99;
                    let pause = self.choice.between(10, 250);
                    let rest = Duration::from_nanos(until.saturating_sub(from));
                    thread::sleep(pause.min(rest));
                    let until = until.min(self.act.now());
                    if kind.is_exclusive() && from < until {
                        let stay =
                            Stay { key: key.clone(), client: self.client, fence, from, until };
                        self.act.history.lock().stays.push(stay);
                    }
                }
                // Its node is gone: the token is good at any other.
                None if self.act.now() < until => {}
                Some(_) | None => break,
            }
        }
        if self.choice.one_in(12) {
            if self.choice.one_in(2) {
                self.leave();
            }
            return;
        }
        self.ask(Request { key, want: Want::Release(kind, token) });
    }
}

/// How long `hello` may take.
const HELLO: Duration = Duration::from_secs(50);
