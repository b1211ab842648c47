//! Clients that remember what they were told, and hold the cluster to it.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use dflockd_testkit::line::ANSWER;
use dflockd_testkit::{Client, Cluster, Heard, fence, millis};

/// What is known about a request that was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Told {
    /// It was done.
    Done,
    /// It was not and will not be.
    Refused,
    /// Nobody can tell.
    Unknown,
}

impl Told {
    pub(super) fn of(heard: &Heard) -> Self {
        match heard.line() {
            Some(line) if line == "ok" || line.starts_with("ok ") => Self::Done,
            Some(line) if line.starts_with("error_unknown") => Self::Unknown,
            Some(_) => Self::Refused,
            None => Self::Unknown,
        }
    }
}

/// What one writer was told.
#[derive(Debug, Default)]
struct Account {
    counted: u64,
    counted_perhaps: u64,
    pushed: Vec<u64>,
    pushed_perhaps: BTreeSet<u64>,
    set: u64,
    set_perhaps: BTreeSet<u64>,
    refused: Vec<String>,
}

/// Writers at work.
pub(super) struct Load {
    stop: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
    writers: Vec<JoinHandle<(Account, Vec<Instant>)>>,
    prefix: String,
}

/// What all writers were told.
pub(super) struct Ledger {
    accounts: Vec<(usize, Account)>,
    /// When writes were answered, in order.
    pub(super) answered: Vec<Instant>,
    prefix: String,
}

impl Load {
    /// `count` writers, each beginning at another of the servers and going on to the next whenever one fails it.
    pub(super) fn start(prefix: &str, count: usize, servers: &[SocketAddr]) -> Self {
        let (stop, done) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let writers = (0..count).map(|number| {
            let (stop, done) = (Arc::clone(&stop), Arc::clone(&done));
            let (prefix, servers) = (format!("{prefix}-{number}"), servers.to_vec());
            thread::spawn(move || write(&prefix, number, &servers, &stop, &done))
        });
        let writers = writers.collect();
        Self { stop, done, writers, prefix: prefix.to_owned() }
    }

    /// How many writes have been acknowledged.
    pub(super) fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    /// Waits for more acknowledged writes.
    #[track_caller]
    pub(super) fn wait_for_more(&self, count: u64) {
        let wanted = self.done() + count;
        dflockd_testkit::eventually("more writes", || self.done() >= wanted);
    }

    /// Stops writers of whom no request may have been refused.
    #[track_caller]
    pub(super) fn stop_unrefused(self) -> Ledger {
        let ledger = self.stop();
        assert_eq!(ledger.refused(), [""; 0]);
        ledger
    }

    pub(super) fn stop(self) -> Ledger {
        self.stop.store(true, Ordering::Relaxed);
        let mut accounts = Vec::new();
        let mut answered = Vec::new();
        for (number, writer) in self.writers.into_iter().enumerate() {
            let (account, times) = writer.join().expect("the writer's checks hold");
            accounts.push((number, account));
            answered.extend(times);
        }
        answered.sort();
        Ledger { accounts, answered, prefix: self.prefix }
    }
}

impl Ledger {
    /// That all members have it, and nothing that the others have not.
    #[track_caller]
    pub(super) fn check_all(&self, cluster: &Cluster) {
        cluster.nodes.iter().for_each(|node| self.check(&mut node.connect()));
        cluster.wait_until_equal();
    }

    /// That everything acknowledged is there, as this server has it, and nothing twice.
    #[track_caller]
    pub(super) fn check(&self, client: &mut Client) {
        for (number, account) in &self.accounts {
            let prefix = format!("{}-{number}", self.prefix);
            let answer = client.ask("get", &format!("{prefix}.count"), "");
            let count: u64 =
                answer.strip_prefix("ok ").unwrap_or_else(|| panic!("{answer}")).parse().unwrap();
            let allowed = account.counted..=account.counted + account.counted_perhaps;
            assert!(allowed.contains(&count), "{prefix}: {count} is not in {allowed:?}");
            let answer = client.ask("kget", &format!("{prefix}.value"), "");
            let value: u64 = answer.strip_prefix("ok ").map_or(0, |value| value.parse().unwrap());
            // What nobody knows of may have come later than what was done after it.
            let allowed = value == account.set || account.set_perhaps.contains(&value);
            assert!(allowed, "{prefix}: value {value}, but {} was set", account.set);
            let answer = client.ask("lrange", &format!("{prefix}.list"), "0 -1");
            let items: Vec<String> =
                serde_json::from_str(answer.strip_prefix("ok ").unwrap()).unwrap();
            let items: Vec<u64> = items.iter().map(|item| item.parse().unwrap()).collect();
            let different: BTreeSet<_> = items.iter().collect();
            assert_eq!(different.len(), items.len(), "{prefix}: twice: {items:?}");
            let mut sure = items;
            sure.retain(|item| !account.pushed_perhaps.contains(item));
            assert_eq!(sure, account.pushed, "{prefix}");
        }
    }

    /// Refusals that were no loss of anything, but were not asked for either.
    pub(super) fn refused(&self) -> Vec<String> {
        self.accounts.iter().flat_map(|(_, account)| account.refused.clone()).collect()
    }

    /// How many requests nobody could tell the outcome of.
    pub(super) fn unknown(&self) -> u64 {
        let unknown = |account: &Account| {
            let perhaps = account.pushed_perhaps.len() + account.set_perhaps.len();
            account.counted_perhaps + perhaps as u64
        };
        self.accounts.iter().map(|(_, account)| unknown(account)).sum()
    }

    /// The longest time in which no write of anybody was answered.
    pub(super) fn longest_gap(&self) -> Duration {
        self.answered.windows(2).map(|two| two[1] - two[0]).max().unwrap_or_default()
    }
}

fn write(
    prefix: &str,
    number: usize,
    servers: &[SocketAddr],
    stop: &AtomicBool,
    done: &AtomicU64,
) -> (Account, Vec<Instant>) {
    let mut account = Account::default();
    let mut answered = Vec::new();
    let mut at = number;
    let mut client = None;
    for step in 1.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let Some(connection) = &mut client else {
            at += 1;
            client = Client::connect(servers[at % servers.len()]).ok();
            if client.is_none() {
                thread::sleep(millis(2));
            }
            continue;
        };
        let (command, key, arg) = match step % 3 {
            0 => ("incr", "count", "1".to_owned()),
            1 => ("kset", "value", step.to_string()),
            _ => ("rpush", "list", step.to_string()),
        };
        let heard = connection.try_ask(command, &format!("{prefix}.{key}"), &arg, ANSWER);
        assert_ne!(heard, Heard::Nothing, "no answer in time to {command} {prefix}");
        let told = Told::of(&heard);
        match (command, told) {
            ("incr", Told::Done) => {
                account.counted += 1;
                let count: u64 = heard.line().unwrap()[3..].parse().unwrap();
                let allowed = account.counted..=account.counted + account.counted_perhaps;
                assert!(allowed.contains(&count), "{prefix}: {count} is not in {allowed:?}");
            }
            ("incr", Told::Unknown) => account.counted_perhaps += 1,
            ("kset", Told::Done) => account.set = step,
            ("kset", Told::Unknown) => {
                account.set_perhaps.insert(step);
            }
            ("rpush", Told::Done) => account.pushed.push(step),
            ("rpush", Told::Unknown) => {
                account.pushed_perhaps.insert(step);
            }
            _ => {}
        }
        match told {
            Told::Done => {
                answered.push(Instant::now());
                done.fetch_add(1, Ordering::Relaxed);
            }
            Told::Refused => account.refused.push(format!("{command}: {heard:?}")),
            Told::Unknown => {}
        }
        if heard == Heard::End {
            client = None;
        }
    }
    (account, answered)
}

/// A time in which somebody was entitled to act, by the client rule (R4).
#[derive(Clone, Debug)]
pub(super) struct Stay {
    pub(super) who: String,
    pub(super) fence: u64,
    pub(super) from: Instant,
    pub(super) until: Instant,
}

/// That nobody acted at the same time as somebody else, and that fences grew.
#[track_caller]
pub(super) fn check_exclusion(stays: &mut [Stay]) {
    stays.sort_by_key(|stay| stay.from);
    for two in stays.windows(2) {
        assert!(two[0].until <= two[1].from, "two at the same time: {two:?}");
        assert!(two[0].fence < two[1].fence, "fences do not grow: {two:?}");
    }
}

/// Takes a lock as a careful client does: a grant says nothing about when it was made, so it renews once and counts
/// from the sending of that.
pub(super) fn enter(
    client: &mut Client,
    key: &str,
    wait: u64,
    ttl: u64,
) -> Result<(String, Stay), Heard> {
    let time = Duration::from_secs(wait) + ANSWER;
    let heard = client.try_ask("l", key, &format!("{wait} {ttl}"), time);
    let Some(token) = heard.line().and_then(|line| line.strip_prefix("ok ")) else {
        return Err(heard);
    };
    let token = token.split(' ').next().unwrap_or_default().to_owned();
    let sent = Instant::now();
    let heard = client.try_ask("n", key, &format!("{token} {ttl}"), ANSWER);
    if Told::of(&heard) != Told::Done {
        return Err(heard);
    }
    let from = Instant::now();
    let until = sent + Duration::from_secs(ttl).mul_f64(0.99);
    let fence = fence(&token);
    Ok((token, Stay { who: String::new(), fence, from, until }))
}
