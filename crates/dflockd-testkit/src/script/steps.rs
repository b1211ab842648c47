//! The text of a script to steps. Names are filled in when a step is played.

use std::collections::BTreeMap;
use std::time::Duration;

/// A part of a script with a server of its own.
pub struct Section {
    /// Its title.
    pub title: String,
    /// The flags of its server.
    pub flags: Vec<String>,
    /// Where it is played, if not everywhere; [`Way::Durable`] stands for every way with a log.
    pub only: Option<Way>,
    /// Its steps.
    pub steps: Vec<Step>,
}

/// Where a script is played.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Without sockets, on a manual clock.
    InProcess,
    /// Over TCP, in memory mode.
    Tcp,
    /// Over TCP, a single node with a log.
    Durable,
    /// Over TCP, a node of three that does not lead.
    Follower,
}

/// One step.
pub struct Step {
    /// In the file, from 1.
    pub line: usize,
    /// As it stands there.
    pub text: String,
    /// What it does.
    pub action: Action,
}

/// What a step does or expects.
pub enum Action {
    /// A request of three lines.
    Send {
        /// The connection.
        conn: String,
        /// The lines.
        lines: Vec<String>,
    },
    /// Bytes as they are.
    SendRaw {
        /// The connection.
        conn: String,
        /// The bytes.
        text: String,
    },
    /// A line, or the end.
    Expect {
        /// The connection.
        conn: String,
        /// What is expected.
        pattern: String,
    },
    /// Lines in any order.
    ExpectAll {
        /// The connection.
        conn: String,
        /// What is expected.
        patterns: Vec<String>,
    },
    /// A line with JSON.
    ExpectJson {
        /// The connection.
        conn: String,
        /// What is checked in it.
        checks: String,
    },
    /// Silence.
    ExpectNothing {
        /// The connection.
        conn: String,
    },
    /// Something that a client does to its connection.
    Do {
        /// The connection.
        conn: String,
        /// What it does.
        deed: Deed,
    },
    /// Time passes.
    Pass(Duration),
    /// The first of two tokens or fences is below the other.
    Below(String, String),
    /// The server is asked to shut down.
    Terminate,
}

/// What a client does to its connection.
#[derive(Clone, Copy)]
pub enum Deed {
    /// It connects.
    Open,
    /// It sends nothing more.
    HalfClose,
    /// It goes.
    Close,
    /// It vanishes.
    Reset,
    /// It stops reading.
    Stall,
}

/// What placeholders of a section stand for.
pub type Names = BTreeMap<String, String>;

/// All sections of a script.
pub fn parse(text: &str) -> Result<Vec<Section>, String> {
    let mut sections: Vec<Section> = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let number = index + 1;
        if line.trim().is_empty() || line.starts_with('#') {
            continue;
        }
        if let Some(title) = line.strip_prefix("== ") {
            let title = title.to_owned();
            sections.push(Section { title, flags: Vec::new(), only: None, steps: Vec::new() });
            continue;
        }
        let section = sections.last_mut().ok_or(format!("line {number}: not in a section"))?;
        if let Some(flags) = line.strip_prefix("flags: ") {
            section.flags.extend(flags.split_whitespace().map(str::to_owned));
        } else if let Some(way) = line.strip_prefix("only: ") {
            section.only = Some(match way {
                "process" => Way::InProcess,
                "tcp" => Way::Tcp,
                "log" => Way::Durable,
                _ => return Err(format!("line {number}: only where? {way:?}")),
            });
        } else {
            let action = action(line).ok_or(format!("line {number}: no step: {line:?}"))?;
            section.steps.push(Step { line: number, text: line.to_owned(), action });
        }
    }
    Ok(sections)
}

fn action(line: &str) -> Option<Action> {
    if let Some(time) = line.strip_prefix('+') {
        let time = match time.strip_suffix("ms") {
            Some(millis) => Duration::from_millis(millis.parse().ok()?),
            None => Duration::from_secs(time.strip_suffix('s')?.parse().ok()?),
        };
        return Some(Action::Pass(time));
    }
    if let Some(pair) = line.strip_prefix("? ") {
        let (low, high) = pair.split_once(" < ")?;
        return Some(Action::Below(low.to_owned(), high.to_owned()));
    }
    if line == "! terminate" {
        return Some(Action::Terminate);
    }
    let end = line.find(|char: char| !char.is_ascii_alphanumeric())?;
    let (conn, rest) = line.split_at(end);
    let conn = conn.to_owned();
    // One blank behind the sign; the rest counts as it is.
    let after = |sign: &str| {
        let rest = rest.strip_prefix(sign)?;
        if rest.is_empty() { Some(rest) } else { rest.strip_prefix(' ') }
    };
    if conn.is_empty() {
        return None;
    }
    if let Some(text) = after(">>") {
        return Some(Action::SendRaw { conn, text: text.to_owned() });
    }
    if let Some(request) = after(">") {
        let lines: Vec<_> = request.split('|').map(str::to_owned).collect();
        return (lines.len() == 3).then_some(Action::Send { conn, lines });
    }
    if let Some(checks) = after("<json") {
        return Some(Action::ExpectJson { conn, checks: checks.to_owned() });
    }
    if let Some(patterns) = after("<any") {
        let patterns = patterns.split(" || ").map(str::to_owned).collect();
        return Some(Action::ExpectAll { conn, patterns });
    }
    if let Some(pattern) = after("<") {
        return Some(Action::Expect { conn, pattern: pattern.to_owned() });
    }
    if rest == "-" {
        return Some(Action::ExpectNothing { conn });
    }
    let deed = match after("!")? {
        "open" => Deed::Open,
        "half-close" => Deed::HalfClose,
        "close" => Deed::Close,
        "reset" => Deed::Reset,
        "stall" => Deed::Stall,
        _ => return None,
    };
    Some(Action::Do { conn, deed })
}

/// A piece of text with escapes and `${…}` filled in.
pub fn expand(text: &str, names: &Names) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    let mut rest = text;
    while let Some(char) = rest.chars().next() {
        if let Some(inner) = rest.strip_prefix("${") {
            let (name, behind) = inner.split_once('}').ok_or("no } behind ${")?;
            bytes.extend_from_slice(&filled_in(name, names)?);
            rest = behind;
        } else if let Some(escape) = rest.strip_prefix('\\') {
            let (byte, length) = unescape(escape).ok_or(format!("bad escape in {text:?}"))?;
            bytes.push(byte);
            rest = &escape[length..];
        } else {
            bytes.extend_from_slice(char.to_string().as_bytes());
            rest = &rest[char.len_utf8()..];
        }
    }
    Ok(bytes)
}

fn unescape(escape: &str) -> Option<(u8, usize)> {
    if let Some(hex) = escape.strip_prefix('x') {
        return Some((u8::from_str_radix(hex.get(..2)?, 16).ok()?, 3));
    }
    let byte = match escape.chars().next()? {
        'n' => b'\n',
        'r' => b'\r',
        't' => b'\t',
        '\\' => b'\\',
        _ => return None,
    };
    Some((byte, 1))
}

fn filled_in(name: &str, names: &Names) -> Result<Vec<u8>, String> {
    if let Some((text, count)) = name.split_once('*') {
        let count = count.parse().map_err(|_| format!("bad count in ${{{name}}}"))?;
        return Ok(text.as_bytes().repeat(count));
    }
    if let Some(value) = names.get(name) {
        return Ok(value.as_bytes().to_vec());
    }
    // A fence is also the first half of its token.
    let token = name.strip_prefix('F').and_then(|rest| names.get(&format!("T{rest}")));
    let fence = token.and_then(|token| fence_of(token));
    fence.map(|fence| fence.to_string().into_bytes()).ok_or(format!("{name} was never received"))
}

/// The fence in a token, or a fence in decimal.
pub fn fence_of(text: &str) -> Option<u64> {
    if text.len() == 32 {
        return u64::from_str_radix(&text[..16], 16).ok();
    }
    text.parse().ok()
}

/// Compares a line with what is expected, and binds the names in it if it is that.
pub fn matches(pattern: &str, line: &[u8], names: &mut Names) -> Result<bool, String> {
    let mut found = names.clone();
    let mut rest_of_pattern = pattern;
    let mut rest = line;
    while !rest_of_pattern.is_empty() {
        let (literal, behind) = match rest_of_pattern.split_once('<') {
            Some((literal, behind)) => (literal, Some(behind)),
            None => (rest_of_pattern, None),
        };
        let Some(after) = rest.strip_prefix(&expand(literal, names)?[..]) else { return Ok(false) };
        rest = after;
        let Some(behind) = behind else {
            rest_of_pattern = "";
            continue;
        };
        let (name, behind) = behind.split_once('>').ok_or("no > behind <")?;
        rest_of_pattern = behind;
        if name == "*" {
            rest = b"";
            continue;
        }
        let Some(length) = length_of(name, rest)? else { return Ok(false) };
        let text = String::from_utf8_lossy(&rest[..length]).into_owned();
        rest = &rest[length..];
        if found.entry(name.to_owned()).or_insert_with(|| text.clone()) != &text {
            return Ok(false);
        }
        let token = name.strip_prefix('F').and_then(|rest| found.get(&format!("T{rest}")));
        if token.is_some_and(|token| fence_of(token) != fence_of(&text)) {
            return Ok(false);
        }
    }
    if rest.is_empty() {
        *names = found;
    }
    Ok(rest.is_empty())
}

/// How many bytes at the start of `rest` the name can stand for.
fn length_of(name: &str, rest: &[u8]) -> Result<Option<usize>, String> {
    let count = |fits: fn(&u8) -> bool| rest.iter().take_while(|byte| fits(byte)).count();
    match name.as_bytes().first() {
        Some(b'T' | b'S') => {
            let digits = count(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
            Ok((digits == 32).then_some(32))
        }
        Some(b'F' | b'N') => {
            let digits = count(u8::is_ascii_digit);
            Ok((digits > 0).then_some(digits))
        }
        _ => Err(format!("<{name}> is neither a token, a secret, a fence nor a number")),
    }
}
