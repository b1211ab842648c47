//! W4: many holders that do nothing but renew, each on its own connection.

use std::io::{self, Write};
use std::time::{Duration, Instant};

use mio::{Events, Poll};

use crate::link::Link;
use crate::load::{Plan, Tally, Usage, key_name};
use crate::process;
use crate::protocol::{Answer, Proof, Request, read_answer, refused};
use crate::report::{Progress, Round};

/// How long the releases at the end may take.
const RELEASE_WITHIN: Duration = Duration::from_secs(10);

struct Holder {
    link: Link,
    key: Vec<u8>,
    proof: Proof,
    request: Request,
    sent_at: Instant,
    due_at: Instant,
    waiting: bool,
}

/// Runs one round. Memory is counted from `baseline`, what the server used with no holders.
pub(crate) fn run(plan: &Plan, baseline: Option<u64>, progress: &Progress) -> io::Result<Round> {
    let poll = Poll::new()?;
    let mut crowd = Crowd {
        plan,
        poll,
        events: Events::with_capacity(1024),
        scratch: vec![0; 65_536],
        holders: Vec::with_capacity(plan.connections),
        answered: 0,
        tally: Tally::new(),
    };
    crowd.gather(progress)?;
    // One whole turn before anything is counted: the first renewal may cost more memory.
    let interval = Duration::from_secs(plan.lease_s) / 3;
    crowd.renew_for(interval + plan.warmup, interval, progress)?;
    let start = Usage::now(&plan.pids);
    crowd.tally = Tally::new();
    crowd.renew_for(plan.measure, interval, progress)?;
    let usage = Usage::now(&plan.pids).since(start);
    let memory = process::sum(&plan.pids, process::resident);
    // The releases that follow are no renewals.
    let tally = std::mem::replace(&mut crowd.tally, Tally::new());
    crowd.release_all()?;
    let mut round = tally.round(plan, usage);
    round.bytes_per_holder = memory
        .zip(baseline)
        .map(|(now, before)| (now as f64 - before as f64) / plan.connections as f64);
    Ok(round)
}

struct Crowd<'a> {
    plan: &'a Plan,
    poll: Poll,
    events: Events,
    scratch: Vec<u8>,
    holders: Vec<Holder>,
    answered: usize,
    tally: Tally,
}

impl Crowd<'_> {
    /// Connects and acquires, one after the other.
    fn gather(&mut self, progress: &Progress) -> io::Result<()> {
        for index in 0..self.plan.connections {
            let mut greeted = self.plan.connect(index)?;
            let key = key_name(index);
            let mut proof = Proof::none();
            let mut out = Vec::new();
            let acquire = Request::Acquire;
            greeted.dialect.write(&mut out, acquire, &key, &mut proof);
            greeted.stream.write_all(&out)?;
            let dialect = &greeted.dialect;
            let answer = read_answer(&mut greeted.stream, |input| dialect.frame(input))?;
            let Answer::Granted { .. } = dialect.read(acquire, &answer, &mut proof) else {
                return Err(refused("an acquire", &answer));
            };
            let link = Link::new(greeted, self.poll.registry(), index)?;
            let now = Instant::now();
            self.holders.push(Holder {
                link,
                key,
                proof,
                request: acquire,
                sent_at: now,
                due_at: now,
                waiting: false,
            });
            // The first ones must not lose their lease while the last ones connect.
            if index % 64 == 63 {
                let third = Duration::from_secs(self.plan.lease_s) / 3;
                let late = self.holders.iter().position(|holder| holder.sent_at.elapsed() > third);
                if let Some(first) = late {
                    self.renew_late(first, third)?;
                }
                progress.tick();
            }
        }
        Ok(())
    }

    fn renew_late(&mut self, first: usize, third: Duration) -> io::Result<()> {
        for index in first..self.holders.len() {
            if self.holders[index].sent_at.elapsed() <= third || self.holders[index].waiting {
                break;
            }
            self.send(index, Request::Renew)?;
        }
        self.look(Duration::ZERO)
    }

    /// Renews each holder once per `interval`, evenly spread.
    fn renew_for(
        &mut self,
        total: Duration,
        interval: Duration,
        progress: &Progress,
    ) -> io::Result<()> {
        let start = Instant::now();
        let count = u32::try_from(self.holders.len()).unwrap_or(u32::MAX);
        for (place, holder) in (0..count).zip(&mut self.holders) {
            holder.due_at = start + interval.mul_f64(f64::from(place) / f64::from(count));
        }
        let mut next = 0;
        while start.elapsed() < total {
            let now = Instant::now();
            while self.holders[next].due_at <= now {
                if !self.holders[next].waiting {
                    self.send(next, Request::Renew)?;
                }
                self.holders[next].due_at += interval;
                next = (next + 1) % self.holders.len();
            }
            self.look(self.holders[next].due_at.saturating_duration_since(now))?;
            progress.tick();
        }
        Ok(())
    }

    /// Without it the keys of servers that do not notice the end of a connection stay.
    fn release_all(&mut self) -> io::Result<()> {
        let deadline = Instant::now() + RELEASE_WITHIN;
        while self.holders.iter().any(|holder| holder.waiting) && Instant::now() < deadline {
            self.look(Duration::from_millis(10))?;
        }
        if !self.plan.protocol.excludes() {
            return Ok(());
        }
        self.answered = 0;
        for index in 0..self.holders.len() {
            self.send(index, Request::Release)?;
            if index % 256 == 255 {
                self.look(Duration::ZERO)?;
            }
        }
        while self.answered < self.holders.len() && Instant::now() < deadline {
            self.look(Duration::from_millis(10))?;
        }
        Ok(())
    }

    fn send(&mut self, index: usize, request: Request) -> io::Result<()> {
        let holder = &mut self.holders[index];
        holder.request = request;
        holder.waiting = true;
        holder.sent_at = Instant::now();
        let Holder { link, key, proof, .. } = holder;
        link.dialect.write(&mut link.out, request, key, proof);
        link.flush()
    }

    fn look(&mut self, patience: Duration) -> io::Result<()> {
        self.poll.poll(&mut self.events, Some(patience))?;
        for event in &self.events {
            let holder = &mut self.holders[event.token().0];
            let filled = holder.link.receive(&mut self.scratch)?;
            let Some(length) = holder.link.dialect.frame(&self.scratch[..filled]) else {
                holder.link.keep(&self.scratch[..filled]);
                holder.link.flush()?;
                continue;
            };
            let answer = &self.scratch[..length];
            let read = holder.link.dialect.read(holder.request, answer, &mut holder.proof);
            if read != Answer::Done {
                return Err(refused("a renewal", answer));
            }
            let Link { out, dialect, .. } = &mut holder.link;
            dialect.reply(out, answer, Instant::now());
            holder.waiting = false;
            self.answered += 1;
            self.tally.count(holder.sent_at.elapsed());
        }
        Ok(())
    }
}
