//! Cost as state grows: many other locks held, many waiters on one key.

use std::io::{self, Read, Write};
use std::time::{Duration, Instant};

use mio::{Events, Poll};

use crate::link::{Greeted, Link};
use crate::load::{Plan, Tally, Usage, key_name};
use crate::protocol::{Answer, Proof, Request, refused};
use crate::report::{Progress, Round};

/// Requests on their way at once while filling: their answers fit into a socket's buffer.
const FILL_BATCH: usize = 256;

/// Connections that fill.
const FILL_CONNECTIONS: usize = 8;

/// Lease of what is held while others are measured.
const FILL_LEASE_S: u64 = 3600;

/// Takes `count` locks and holds them for as long as the result lives.
pub(crate) fn fill(plan: &Plan, count: usize, progress: &Progress) -> io::Result<Vec<Greeted>> {
    let mut connections = Vec::new();
    let mut out = Vec::new();
    for index in 0..FILL_CONNECTIONS {
        let address = plan.servers[index % plan.servers.len()];
        let mut greeted = Greeted::connect(plan.protocol, address, FILL_LEASE_S, false)?;
        let keys: Vec<usize> = (index..count).step_by(FILL_CONNECTIONS).collect();
        for batch in keys.chunks(FILL_BATCH) {
            out.clear();
            for key in batch {
                // Apart from the keys of the load, which are numbered from 0.
                let name = [key_name(*key).as_slice(), b"/held"].concat();
                greeted.dialect.write(&mut out, Request::Acquire, &name, &mut Proof::none());
            }
            greeted.stream.write_all(&out)?;
            read_grants(&mut greeted, batch.len())?;
            progress.tick();
        }
        connections.push(greeted);
    }
    Ok(connections)
}

fn read_grants(greeted: &mut Greeted, count: usize) -> io::Result<()> {
    let mut input = Vec::new();
    let mut chunk = [0; 16_384];
    let mut left = count;
    while left > 0 {
        let length = greeted.stream.read(&mut chunk)?;
        if length == 0 {
            return Err(io::Error::other("the server closed the connection"));
        }
        input.extend_from_slice(&chunk[..length]);
        let mut done = 0;
        while let Some(length) = greeted.dialect.frame(&input[done..]) {
            let answer = &input[done..done + length];
            match greeted.dialect.read(Request::Acquire, answer, &mut Proof::none()) {
                Answer::Granted { .. } => left -= 1,
                Answer::Busy | Answer::Done | Answer::Refused => {
                    return Err(refused("an acquire", answer));
                }
            }
            done += length;
        }
        input.drain(..done);
    }
    Ok(())
}

/// One connection that holds or waits.
struct Client {
    link: Link,
    key: usize,
    proof: Proof,
    request: Request,
}

/// Hands over one lock at a time, `plan.connections` clients spread over `keys` keys.
///
/// The keys take turns, so that with any number of them all connections are used equally often
/// and the same bytes flow: what differs is the length of the queue only. An operation lasts
/// from the sending of the release to the arrival of the next holder's grant.
pub(crate) fn hand_over(plan: &Plan, keys: usize, progress: &Progress) -> io::Result<Round> {
    let poll = Poll::new()?;
    let mut clients = Vec::with_capacity(plan.connections);
    for index in 0..plan.connections {
        let link = Link::new(plan.connect(index)?, poll.registry(), index)?;
        let key = index % keys;
        clients.push(Client { link, key, proof: Proof::none(), request: Request::Acquire });
    }
    let mut queue = Queue {
        poll,
        events: Events::with_capacity(1024),
        scratch: vec![0; 65_536],
        names: (0..keys).map(key_name).collect(),
        holders: vec![None; keys],
        clients,
    };
    for index in 0..queue.clients.len() {
        queue.send(index, Request::Acquire)?;
        if index % 256 == 255 {
            queue.look(Duration::ZERO)?;
        }
    }
    let settled_at = Instant::now() + Duration::from_secs(10);
    while queue.holders.contains(&None) {
        queue.look(Duration::from_millis(10))?;
        if Instant::now() > settled_at {
            return Err(io::Error::other("not every key was granted within 10 s"));
        }
    }
    let mut tally = Tally::new();
    let mut turn = 0;
    queue.pass_for(plan.warmup, &mut turn, &mut tally, progress)?;
    tally = Tally::new();
    let start = Usage::now(&plan.pids);
    queue.pass_for(plan.measure, &mut turn, &mut tally, progress)?;
    let usage = Usage::now(&plan.pids).since(start);
    Ok(tally.round(plan, usage))
}

struct Queue {
    poll: Poll,
    events: Events,
    scratch: Vec<u8>,
    names: Vec<Vec<u8>>,
    /// By key.
    holders: Vec<Option<usize>>,
    clients: Vec<Client>,
}

impl Queue {
    fn pass_for(
        &mut self,
        total: Duration,
        turn: &mut usize,
        tally: &mut Tally,
        progress: &Progress,
    ) -> io::Result<()> {
        let end_at = Instant::now() + total;
        loop {
            let sent_at = Instant::now();
            if sent_at >= end_at {
                return Ok(());
            }
            let key = *turn % self.holders.len();
            *turn += 1;
            let holder = self.holders[key].take().expect("granted before its turn came again");
            self.send(holder, Request::Release)?;
            while self.holders[key].is_none() {
                self.look(Duration::from_secs(1))?;
                if sent_at.elapsed() > Duration::from_secs(10) {
                    return Err(io::Error::other("a release was not followed by a grant"));
                }
            }
            tally.count(sent_at.elapsed());
            progress.tick();
        }
    }

    fn send(&mut self, index: usize, request: Request) -> io::Result<()> {
        let Client { link, key, proof, request: asked } = &mut self.clients[index];
        *asked = request;
        let name = &self.names[*key];
        link.dialect.write(&mut link.out, request, name, proof);
        link.flush()
    }

    fn look(&mut self, patience: Duration) -> io::Result<()> {
        self.poll.poll(&mut self.events, Some(patience))?;
        let ready: Vec<usize> = self.events.iter().map(|event| event.token().0).collect();
        for index in ready {
            let client = &mut self.clients[index];
            let filled = client.link.receive(&mut self.scratch)?;
            let Some(length) = client.link.dialect.frame(&self.scratch[..filled]) else {
                client.link.keep(&self.scratch[..filled]);
                client.link.flush()?;
                continue;
            };
            let answer = &self.scratch[..length];
            match client.link.dialect.read(client.request, answer, &mut client.proof) {
                Answer::Granted { .. } => {
                    let key = client.key;
                    if self.holders[key].replace(index).is_some() {
                        return Err(io::Error::other(format!("two holders of key {key}")));
                    }
                }
                // Back to the end of the queue.
                Answer::Done => self.send(index, Request::Acquire)?,
                Answer::Busy | Answer::Refused => return Err(refused("a request", answer)),
            }
        }
        Ok(())
    }
}
