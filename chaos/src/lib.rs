//! Chaos: a cluster of real processes with real files and sockets, clients that remember what they were told, and
//! faults by chance from a seed. What clients saw must be explainable, whatever was killed, stopped, cut or slow.
//!
//! A run is a row of acts. In each of them `faults.rs` breaks the processes of `site.rs` while the clients of
//! `plain.rs`, `kept.rs` and `events.rs` do what `choice.rs` says; then all is healed, everything must be answered in
//! time, all members must have the same, and `checks.rs` looks for an order of what was told. The next act has other
//! keys; some things are kept over all acts (`Treasure`).
//!
//! The seed decides what is asked and what is broken. When things happen is decided by the machine, so a failure may
//! need several runs to come again.

pub mod checks;
pub mod choice;
pub mod events;
pub mod faults;
pub mod history;
pub mod kept;
pub mod plain;
pub mod request;
pub mod site;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use dflockd_testkit::line::ANSWER;
use dflockd_testkit::{fence, granted, millis};

use crate::checks::{Findings, Items};
use crate::faults::Faults;
use crate::history::{Act, Event, History};
use crate::kept::Kept;
use crate::plain::Plain;
use crate::request::Unit;
use crate::site::Site;

/// Plain clients, and such with kept sessions.
const PLAIN: usize = 6;
const KEPT: usize = 3;
/// What a client is that only checks.
const CHECKER: usize = 99;
/// The lease of what is held over all acts, in seconds.
const LONG: &str = "80000";

/// What to run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Members.
    pub nodes: usize,
    /// How long things are broken, in all acts together.
    pub seconds: u64,
    /// Where chance begins.
    pub seed: u64,
    /// How long one act lasts.
    pub act_seconds: u64,
    /// Tell what happens.
    pub is_verbose: bool,
}

/// Why a run failed.
#[derive(Debug)]
pub struct Broken {
    /// What is wrong.
    pub what: String,
    /// Whether the harness is to blame, as far as it knows.
    pub is_harness: bool,
}

impl Broken {
    /// A promise is broken.
    pub fn new(what: impl Into<String>) -> Self {
        Self { what: what.into(), is_harness: false }
    }

    /// Something that has nothing to do with the servers went wrong.
    pub fn harness(why: impl std::fmt::Display) -> Self {
        Self { what: why.to_string(), is_harness: true }
    }
}

/// What a run came to.
#[derive(Debug, Default)]
pub struct Report {
    /// Acts that were played to their end.
    pub acts: u64,
    /// Requests.
    pub requests: u64,
    /// Of these, without an answer or with one that says so.
    pub unknown: u64,
    /// Of these, put in an order.
    pub ordered: u64,
    /// Keys that were left out of that.
    pub left_out: u64,
    /// Times in which somebody held something alone.
    pub stays: u64,
    /// Processes that were started.
    pub starts: u64,
    /// The most memory of a member, in KiB.
    pub memory_kib: u64,
    /// The most descriptors of a member.
    pub files: usize,
    /// The most of them between two acts.
    pub files_at_rest: usize,
    /// How often what happened: faults, answers.
    pub counts: BTreeMap<String, u64>,
    /// What is wrong, if anything is.
    pub broken: Vec<Broken>,
    /// Where data and logs of a failed run are.
    pub kept_in: Option<PathBuf>,
}

impl Report {
    /// The figures in one line.
    pub fn text(&self) -> String {
        let Self { acts, requests, unknown, ordered, left_out, stays, starts, .. } = self;
        let (memory, files, at_rest) = (self.memory_kib / 1024, self.files, self.files_at_rest);
        format!(
            "{acts} acts, {requests} requests ({unknown} unknown), {ordered} put in order, \
             {left_out} keys left out, {stays} exclusive stays, {starts} process starts, \
             at most {memory} MiB and {files} descriptors ({at_rest} between acts)"
        )
    }
}

/// Runs what is wanted.
pub fn run(options: &Options) -> Report {
    let mut report = Report::default();
    // Short timeouts make more elections; the default is what most clusters have.
    let election_ms = [500, 1000][usize::from(options.seed.is_multiple_of(2))];
    let started = catch_unwind(AssertUnwindSafe(|| Site::start(options.nodes, election_ms)));
    let mut site = match started {
        Ok(Ok(site)) => site,
        Ok(Err(broken)) => {
            report.broken.push(broken);
            return report;
        }
        Err(panic) => {
            report.broken.push(Broken::harness(panicked(panic.as_ref())));
            return report;
        }
    };
    let played = catch_unwind(AssertUnwindSafe(|| play_all(&mut site, options, &mut report)));
    match played {
        Ok(Ok(())) => {}
        Ok(Err(broken)) => report.broken.push(broken),
        Err(panic) => report.broken.push(of_panic(panic.as_ref())),
    }
    (report.starts, report.memory_kib) = (site.starts, site.memory_kib);
    (report.files, report.files_at_rest) = (site.files, site.files_at_rest);
    let dir = site.dir();
    let keep = !report.broken.is_empty();
    if let Err(broken) = site.finish(keep) {
        report.broken.push(broken);
    }
    report.kept_in = keep.then_some(dir);
    report
}

fn play_all(site: &mut Site, options: &Options, report: &mut Report) -> Result<(), Broken> {
    let begun = Instant::now();
    let mut left = Duration::from_secs(options.seconds);
    let mut treasure = Treasure::bury(site)?;
    while !left.is_zero() && report.broken.is_empty() {
        let time = left.min(Duration::from_secs(options.act_seconds));
        left -= time;
        report.acts += 1;
        play(site, options, begun, time, report)?;
        treasure.check(site, report.acts)?;
        if options.is_verbose {
            eprintln!("{:>6} s: {}", begun.elapsed().as_secs(), report.text());
        }
    }
    Ok(())
}

/// One act.
fn play(
    site: &mut Site,
    options: &Options,
    begun: Instant,
    time: Duration,
    report: &mut Report,
) -> Result<(), Broken> {
    let act = Act::new(report.acts, begun, site.servers());
    let seed = options.seed;
    let until = Instant::now() + time;
    let result = thread::scope(|scope| {
        let act = &act;
        let mut threads = Vec::new();
        let mut spawn = |work: Box<dyn FnOnce() + Send>| {
            threads.push(scope.spawn(|| catch_unwind(AssertUnwindSafe(work))));
        };
        let mut client = 0..;
        let mut next = || client.next().unwrap_or(CHECKER);
        for _ in 0..PLAIN {
            let plain = Plain::new(act, seed, next());
            spawn(Box::new(move || plain.run()));
        }
        for _ in 0..KEPT {
            let kept = Kept::new(act, seed, next());
            spawn(Box::new(move || kept.run()));
        }
        for work in [events::publish, events::follow, events::follow, events::meet] {
            let number = next();
            spawn(Box::new(move || work(act, seed, number)));
        }
        let broken = catch_unwind(AssertUnwindSafe(|| {
            let mut faults = Faults::new(seed, act.number, until);
            while Instant::now() < until && act.broken.lock().is_empty() {
                faults.strike(site, act)?;
            }
            site.heal()
        }));
        // Whatever went wrong, nobody waits for a process that stands still.
        site.mend();
        (0..site.size()).for_each(|at| site.signal(at, "CONT"));
        act.calm();
        if matches!(broken, Ok(Ok(()))) {
            // What is open now has to be answered, and new requests as well.
            thread::sleep(millis(500));
        }
        act.end();
        for thread in threads {
            if let Ok(Err(panic)) = thread.join() {
                report.broken.push(of_panic(panic.as_ref()));
            }
        }
        broken.unwrap_or_else(|panic| Err(of_panic(panic.as_ref())))
    });
    let broken = std::mem::take(&mut *act.broken.lock());
    report.broken.extend(broken.into_iter().map(Broken::new));
    for (what, count) in &*act.counts.lock() {
        *report.counts.entry(what.clone()).or_default() += count;
    }
    result?;
    site.wait_until_equal()?;
    site.check_processes(true)?;
    let items = read_all(site, &act)?;
    let history = std::mem::take(&mut *act.history.lock());
    sum(&history, &checks::check(&history, &items), report);
    if !report.broken.is_empty() {
        let path = site.dir().join("history");
        let text: String = history.events.iter().map(|event| format!("{event:?}\n")).collect();
        std::fs::write(path, text + &format!("{:#?}", history.given_up))
            .map_err(Broken::harness)?;
    }
    Ok(())
}

/// Reads everything through every member.
fn read_all(site: &Site, act: &Act) -> Result<Items, Broken> {
    let mut all = Items::new();
    for node in &site.cluster.nodes {
        let mut client = node.connect();
        for request in checks::last_reads(act) {
            let (command, arg) = request.lines(Unit::Seconds);
            let begin = act.now();
            let answer = client.ask(command, &request.key, &arg);
            let (client, greeted) = (CHECKER, false);
            let end = Some((act.now(), answer));
            act.took(Event { client, request, begin, end, greeted });
        }
        for number in 0..checks::LISTS {
            let key = act.key(format!("q{number}"));
            let answer = client.ask("lrange", &key, "0 -1");
            let Some(items) = checks::items(&answer) else {
                return Err(Broken::new(format!("43: lrange is answered {answer}")));
            };
            all.insert(key, items);
        }
    }
    Ok(all)
}

fn sum(history: &History, findings: &Findings, report: &mut Report) {
    report.requests += history.events.len() as u64;
    report.unknown += history.events.iter().filter(|event| event.end.is_none()).count() as u64;
    report.stays += history.stays.len() as u64;
    report.ordered += findings.ordered;
    report.left_out += findings.left_out;
    report.broken.extend(findings.broken.iter().map(Broken::new));
}

/// What is kept over all acts.
struct Treasure {
    token: String,
}

impl Treasure {
    fn bury(site: &Site) -> Result<Self, Broken> {
        let mut client = site.cluster.nodes[0].connect();
        let token = granted(&client.ask("l", "treasure", &format!("5 {LONG}")));
        // Without a word, so that the lock stays.
        client.reset();
        Ok(Self { token })
    }

    /// That it is all there, through every member; then something is added.
    fn check(&mut self, site: &Site, act: u64) -> Result<(), Broken> {
        let before = format!("ok {}", act - 1);
        let renewal = format!("{} {LONG}", self.token);
        let wanted = [
            ("get", "acts", "", before.as_str()),
            ("llen", "list", "", &before),
            ("n", "treasure", &renewal, &format!("ok {LONG}")),
            ("l", "treasure", "0", "timeout"),
        ];
        let missing = |command: &str, key: &str, answer: &str| {
            Broken::new(format!("35: {command} {key} is answered {answer} after {act} acts"))
        };
        let mut last = None;
        for node in &site.cluster.nodes {
            let mut client = node.connect();
            for (command, key, arg, wanted) in wanted {
                let answer = client.ask(command, key, arg);
                if answer != wanted {
                    return Err(missing(command, key, &answer));
                }
            }
            if act > 1 {
                let (key, value) = (format!("act-{}", act - 1), format!("ok {}", act - 1));
                let answer = client.ask("kget", &key, "");
                if answer != value {
                    return Err(missing("kget", &key, &answer));
                }
            }
            last = Some(client);
        }
        let Some(mut client) = last else { return Ok(()) };
        let key = format!("act-{act}");
        for (command, key, arg, wanted) in [
            ("incr", "acts", "1", format!("ok {act}")),
            ("rpush", "list", "item", format!("ok {act}")),
            ("kset", &key, &act.to_string(), "ok".to_owned()),
        ] {
            let answer = client.try_ask(command, key, arg, ANSWER);
            if answer.line() != Some(&wanted) {
                return Err(missing(command, key, &format!("{answer:?}")));
            }
        }
        // Fences of one key grow over all acts.
        let token = granted(&client.ask("l", "fenced", "0 60"));
        if client.ask("r", "fenced", &token) != "ok" || fence(&token) <= fence(&self.token) {
            return Err(missing("l", "fenced", &token));
        }
        Ok(())
    }
}

fn panicked(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string)).unwrap_or_default()
}

/// What the test kit complains about: of an answer's form, or that something it needs is not so.
fn of_panic(panic: &(dyn std::any::Any + Send)) -> Broken {
    let what = panicked(panic);
    match what.strip_prefix("GUARANTEES ") {
        Some(what) => Broken::new(what),
        None => Broken::harness(what),
    }
}
