//! Watches and signals: one client makes them, others see them in order and without gaps while their connections last.
//! And barriers, at which all go on or nobody does.

use std::collections::BTreeMap;
use std::thread;
use std::time::Duration;

use dflockd_testkit::{Client, Heard, millis};

use crate::choice::Choice;
use crate::history::Act;

/// What is done to a key, in turn: whoever sees one of these sees the next one next.
const TURNS: [(&str, &str, &str); 6] = [
    ("kset", "value", "ok"),
    ("incr", "1", "ok 1"),
    ("rpush", "item", "ok 1"),
    ("kdel", "", "ok"),
    ("decr", "1", "ok 0"),
    ("lpop", "", "ok item"),
];
/// How long an answer is waited for.
const ANSWER: Duration = Duration::from_secs(50);

/// Makes events and signals, each answered before the next. When nobody knows whether one happened, it goes on with
/// another key.
pub fn publish(act: &Act, seed: u64, client: usize) {
    let mut choice = Choice::new(act, seed, client);
    let mut link = None;
    let (mut generation, mut step) = (0, 0);
    while !act.is_over() {
        let pause = choice.between(10, 150);
        thread::sleep(pause);
        let Some(connection) = &mut link else {
            link = Client::connect(act.server(&mut choice.noise)).ok();
            continue;
        };
        let key = act.key(format!("watched.{generation}"));
        let (command, arg, wanted) = TURNS[step % TURNS.len()];
        let heard = connection.try_ask(command, &key, arg, ANSWER);
        let is_ok = heard.line() == Some(wanted);
        let definite = heard.line().is_some_and(|line| !line.starts_with("error"));
        if definite && !is_ok {
            act.broken(format!("23-25: {command} {key} is answered {heard:?}, not {wanted}"));
        }
        let signalled = is_ok && {
            let channel = act.key(format!("signalled.{generation}"));
            let heard = connection.try_ask("signal", &channel, &step.to_string(), ANSWER);
            heard.line().is_some_and(|line| line.starts_with("ok "))
        };
        step += 1;
        if !signalled {
            (generation, step) = (generation + 1, 0);
            link = None;
        }
        if choice.one_in(200) {
            link = None;
        }
    }
}

/// Watches and listens.
pub fn follow(act: &Act, seed: u64, client: usize) {
    let mut choice = Choice::new(act, seed, client);
    let (watched, signalled) = (act.key("watched.*"), act.key("signalled.*"));
    'connection: while !act.is_over() {
        thread::sleep(millis(50));
        let Ok(mut link) = Client::connect(act.server(&mut choice.noise)) else { continue };
        let mut told = Vec::new();
        for (command, key) in [("watch", &watched), ("listen", &signalled)] {
            link.begin(command, key, "");
            // Pushes may come first for what was asked first.
            loop {
                match link.hear(ANSWER) {
                    Heard::Line(line) if line == "ok" => break,
                    Heard::Line(line) if line.starts_with("error") => continue 'connection,
                    Heard::Line(line) => told.push(line),
                    Heard::End | Heard::Nothing => continue 'connection,
                }
            }
        }
        let mut seen = Seen::default();
        told.iter().for_each(|line| seen.check(act, line));
        while !act.is_over() {
            match link.hear(millis(100)) {
                Heard::Line(line) if line.starts_with("error") => continue 'connection,
                Heard::Line(line) => seen.check(act, &line),
                Heard::End => continue 'connection,
                Heard::Nothing if choice.one_in(300) => continue 'connection,
                Heard::Nothing => {}
            }
        }
    }
}

/// What a connection has seen.
#[derive(Default)]
struct Seen {
    /// The last turn of each key.
    events: BTreeMap<String, usize>,
    /// The last number of each channel.
    signals: BTreeMap<String, u64>,
}

impl Seen {
    fn check(&mut self, act: &Act, line: &str) {
        let words: Vec<_> = line.split(' ').collect();
        match words[..] {
            ["watch", event, key] => {
                // The last pop was not answered, and its item was put back.
                let last = self.events.get(key).copied().unwrap_or(TURNS.len() - 1);
                if event == "lpush" && last == TURNS.len() - 1 {
                    return act.count("item put back");
                }
                let Some(turn) = TURNS.iter().position(|turn| turn.0 == event) else {
                    return act.broken(format!("31: {line}"));
                };
                let before = self.events.insert(key.to_owned(), turn);
                if before.is_some_and(|before| (before + 1) % TURNS.len() != turn) {
                    act.broken(format!("31: {line} after {}", TURNS[before.unwrap_or(0)].0));
                }
                act.count("event seen");
            }
            ["sig", channel, number] => {
                let number = number.parse().unwrap_or(0);
                let before = self.signals.insert(channel.to_owned(), number);
                if before.is_some_and(|before| before >= number) {
                    act.broken(format!("33: {line} after {before:?}"));
                }
                act.count("signal seen");
            }
            _ => act.broken(format!("47: {line} to somebody who watches")),
        }
    }
}

/// Three clients meet, again and again, through any members.
pub fn meet(act: &Act, seed: u64, client: usize) {
    let mut choice = Choice::new(act, seed, client);
    let mut links: [Option<Client>; 3] = [None, None, None];
    for round in 0.. {
        if act.is_over() {
            return;
        }
        let pause = choice.between(50, 600);
        thread::sleep(pause);
        for link in links.iter_mut().filter(|link| link.is_none()) {
            *link = Client::connect(act.server(&mut choice.noise)).ok();
        }
        let [Some(_), Some(_), Some(_)] = &links else { continue };
        let key = act.key(format!("met{round}"));
        // Sometimes one does not come.
        let missing = choice.one_in(10).then(|| choice.noise.below(3));
        let wait = Duration::from_secs(3);
        let begin = act.now();
        for (_, link) in links.iter_mut().enumerate().filter(|(at, _)| missing != Some(*at)) {
            if let Some(link) = link {
                link.begin("bwait", &key, "3 3");
            }
        }
        let mut told = Vec::new();
        for (_, link) in links.iter_mut().enumerate().filter(|(at, _)| missing != Some(*at)) {
            let Some(connection) = link else { continue };
            let heard = connection.hear(Act::patience(wait) + millis(500));
            act.check_time(&"bwait", begin, wait);
            let line = heard.line().unwrap_or("(lost)").to_owned();
            if heard.line().is_none_or(|line| line.starts_with("error")) {
                *link = None;
            }
            act.count(&format!("bwait {line}"));
            told.push(line);
        }
        let met = told.iter().any(|line| line == "ok");
        let is_lost = |line: &&String| ["(lost)", "error_unknown", "ok"].contains(&line.as_str());
        if met && (missing.is_some() || told.iter().any(|line| !is_lost(&line))) {
            act.broken(format!("28: at the barrier {key}: {told:?}"));
        }
    }
}
