//! Plays the steps of a section and compares.

use std::collections::BTreeSet;
use std::fmt::Write;

use serde_json::Value;

use super::steps::{Action, Deed, Names, Section, Step, expand, fence_of, matches};
use super::{Received, Server};

/// How much of the conversation a failure shows.
const SHOWN: usize = 25;
/// Bytes of a line that a failure shows.
const LINE_SHOWN: usize = 120;

/// Plays one section.
pub struct Player<'a> {
    server: &'a mut dyn Server,
    names: Names,
    open: BTreeSet<String>,
    talk: Vec<String>,
}

impl<'a> Player<'a> {
    /// Plays on this server.
    pub fn new(server: &'a mut dyn Server) -> Self {
        Self { server, names: Names::new(), open: BTreeSet::new(), talk: Vec::new() }
    }

    /// Plays all steps; an error says where and why one failed.
    pub fn play(&mut self, section: &Section, file: &str) -> Result<(), String> {
        for step in &section.steps {
            self.step(step).map_err(|reason| {
                let Step { line, text, .. } = step;
                let title = &section.title;
                let mut report = format!("{file}:{line} ({title}): {text}\n  {reason}");
                report.push_str("\n  the conversation before:");
                for line in self.talk.iter().rev().take(SHOWN).rev() {
                    let _ = write!(report, "\n    {line}");
                }
                let log = self.server.log();
                for line in log.iter().rev().take(5).rev() {
                    let _ = write!(report, "\n  log: {}", line.trim_end());
                }
                report
            })?;
            self.server.check();
        }
        Ok(())
    }

    fn step(&mut self, step: &Step) -> Result<(), String> {
        match &step.action {
            Action::Send { conn, lines } => {
                let mut bytes = Vec::new();
                for line in lines {
                    bytes.extend_from_slice(&expand(line, &self.names)?);
                    bytes.push(b'\n');
                }
                self.send(conn, &bytes);
            }
            Action::SendRaw { conn, text } => {
                let bytes = expand(text, &self.names)?;
                self.send(conn, &bytes);
            }
            Action::Expect { conn, pattern } => {
                self.ensure_open(conn);
                let got = self.receive(conn);
                let fits = match &got {
                    Received::End => pattern == "EOF",
                    Received::Line(line) => matches(pattern, line, &mut self.names)?,
                    Received::Nothing => false,
                };
                if !fits {
                    return Err(self.unexpected(pattern, &got));
                }
            }
            Action::ExpectAll { conn, patterns } => self.expect_all(conn, patterns)?,
            Action::ExpectJson { conn, checks } => self.expect_json(conn, checks)?,
            Action::ExpectNothing { conn } => {
                self.ensure_open(conn);
                // On a machine that lags behind the script, what comes now may be right.
                if self.server.is_late() {
                    return Ok(());
                }
                let got = self.server.receive_now(conn);
                if !matches!(got, Received::Nothing) {
                    return Err(self.unexpected("nothing", &got));
                }
            }
            Action::Do { conn, deed } => self.act(conn, *deed),
            Action::Pass(time) => {
                self.talk.push(format!("+{time:?}"));
                self.server.pass(*time);
            }
            Action::Below(low, high) => {
                let fence = |name: &String| self.names.get(name).and_then(|text| fence_of(text));
                let (low, high) = (fence(low), fence(high));
                if low.is_none() || high.is_none() || low >= high {
                    return Err(format!("got {low:?} and {high:?}"));
                }
            }
            Action::Terminate => self.server.terminate(),
        }
        Ok(())
    }

    fn send(&mut self, conn: &str, bytes: &[u8]) {
        self.ensure_open(conn);
        self.talk.push(format!("{conn}> {}", shown(bytes)));
        self.server.send(conn, bytes);
    }

    fn receive(&mut self, conn: &str) -> Received {
        let got = self.server.receive(conn);
        self.talk.push(format!("{conn}< {}", describe(&got)));
        got
    }

    fn ensure_open(&mut self, conn: &str) {
        if self.open.insert(conn.to_owned()) {
            self.server.open(conn);
        }
    }

    fn act(&mut self, conn: &str, deed: Deed) {
        self.ensure_open(conn);
        match deed {
            Deed::Open => {}
            Deed::HalfClose => self.server.half_close(conn),
            Deed::Close => {
                self.server.close(conn);
                self.open.remove(conn);
            }
            Deed::Reset => {
                self.server.reset(conn);
                self.open.remove(conn);
            }
            Deed::Stall => self.server.stall(conn),
        }
    }

    fn expect_all(&mut self, conn: &str, patterns: &[String]) -> Result<(), String> {
        self.ensure_open(conn);
        let mut lines = Vec::new();
        for _ in patterns {
            match self.receive(conn) {
                Received::Line(line) => lines.push(line),
                got @ (Received::End | Received::Nothing) => {
                    return Err(self.unexpected("another line", &got));
                }
            }
        }
        for pattern in patterns {
            let mut found = None;
            for (index, line) in lines.iter().enumerate() {
                if matches(pattern, line, &mut self.names)? {
                    found = Some(index);
                    break;
                }
            }
            let Some(index) = found else {
                let rest: Vec<_> = lines.iter().map(|line| shown(line)).collect();
                return Err(format!("expected: {pattern}\n  among:    {rest:?}"));
            };
            lines.remove(index);
        }
        Ok(())
    }

    fn expect_json(&mut self, conn: &str, checks: &str) -> Result<(), String> {
        self.ensure_open(conn);
        let got = self.receive(conn);
        let Received::Line(line) = &got else { return Err(self.unexpected("JSON", &got)) };
        let text = String::from_utf8_lossy(line).into_owned();
        let start = text.find(['{', '[']).unwrap_or(text.len());
        let json: Value = serde_json::from_str(&text[start..])
            .map_err(|error| format!("no JSON: {error}\n  got:      {}", shown(line)))?;
        let checks = String::from_utf8_lossy(&expand(checks, &self.names)?).into_owned();
        for check in checks.split_whitespace() {
            check_json(&json, check)
                .map_err(|reason| format!("{check}: {reason}\n  got:      {json:#}"))?;
        }
        Ok(())
    }

    fn unexpected(&self, pattern: &str, got: &Received) -> String {
        let expected = expand(pattern, &self.names).unwrap_or_default();
        format!("expected: {}\n  got:      {}", shown(&expected), describe(got))
    }
}

fn check_json(json: &Value, check: &str) -> Result<(), String> {
    if let Some(path) = check.strip_prefix('!') {
        return match find(json, path) {
            Some(found) => Err(format!("is there: {found}")),
            None => Ok(()),
        };
    }
    let sign = ["<=", ">=", "="].into_iter().filter_map(|sign| Some((check.find(sign)?, sign)));
    let (at, sign) = sign.min_by_key(|(at, _)| *at).ok_or("no comparison")?;
    let (path, wanted) = (&check[..at], &check[at + sign.len()..]);
    let wanted: Value = serde_json::from_str(wanted).map_err(|error| error.to_string())?;
    let found = find(json, path).ok_or("is not there")?;
    let right = match sign {
        "=" => found == wanted,
        "<=" => found.as_f64() <= wanted.as_f64(),
        _ => found.as_f64() >= wanted.as_f64(),
    };
    if right { Ok(()) } else { Err(format!("is {found}")) }
}

/// What a path leads to: members by name, items by index or by their key or pattern, `#` for the length.
fn find(json: &Value, path: &str) -> Option<Value> {
    let mut here = json;
    for part in path.split('.').filter(|part| !part.is_empty()) {
        let Some(items) = here.as_array() else {
            here = here.get(part)?;
            continue;
        };
        if part == "#" {
            return Some(items.len().into());
        }
        here = match part.parse::<usize>() {
            Ok(index) => items.get(index)?,
            Err(_) => items.iter().find(|item| {
                let name = item.get("key").or_else(|| item.get("pattern"));
                name.and_then(Value::as_str) == Some(part)
            })?,
        };
    }
    Some(here.clone())
}

fn describe(got: &Received) -> String {
    match got {
        Received::Line(line) => shown(line),
        Received::End => "EOF".into(),
        Received::Nothing => "nothing".into(),
    }
}

fn shown(bytes: &[u8]) -> String {
    let start = &bytes[..bytes.len().min(LINE_SHOWN)];
    let more = if start.len() < bytes.len() { "…" } else { "" };
    format!("{}{more} ({} bytes)", start.escape_ascii(), bytes.len())
}
