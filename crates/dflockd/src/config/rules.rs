//! How the text of a setting becomes a value, and what is said of one that does not.

use std::net::IpAddr;
use std::ops::{Bound, RangeBounds};
use std::path::PathBuf;
use std::time::Duration;

use dflockd_replica::types::AutoRelease;
use dflockd_wire::SECONDS_MAX;

use super::cluster::{FollowerMode, HostPort, PeerSpec};
use super::{ConfigError, GrantDelay, LogFormat};

/// Counts are 63 bits wide, so that sums of two of them cannot overflow.
const COUNT_MAX: u64 = i64::MAX as u64;

/// How the text of a setting becomes a value.
pub(super) trait Rule {
    type Value;

    /// The valid values in words.
    fn valid(&self) -> String;

    fn parse_flag(&self, text: &str) -> Result<Self::Value, Problem>;

    /// Variables differ from flags only in the words for true and false.
    fn parse_env(&self, text: &str) -> Result<Self::Value, Problem> {
        self.parse_flag(text)
    }

    fn parse_default(&self, text: &str) -> Result<Self::Value, Problem> {
        self.parse_flag(text)
    }

    fn is_boolean(&self) -> bool {
        false
    }

    /// Whether the value says no more than that the setting is not wanted.
    fn is_off(&self, _: &Self::Value) -> bool {
        false
    }
}

/// What is wrong with a text.
#[derive(Debug)]
pub(super) enum Problem {
    /// It is of the wrong kind; the text is quoted in the message.
    Malformed(String),
    /// It is a number outside its range; the message shows it as it was given.
    OutOfRange(String),
}

impl Problem {
    pub(super) fn in_flag(&self, flag: &str, text: &str) -> ConfigError {
        ConfigError(match self {
            Self::Malformed(rule) => format!("{flag} {rule} (got {text:?})"),
            Self::OutOfRange(rule) => format!("{flag} {rule} (got {text})"),
        })
    }

    pub(super) fn in_env(&self, env: &str, flag: &str, text: &str) -> ConfigError {
        ConfigError(match self {
            Self::Malformed(rule) => format!("{env} {rule} (got {text:?})"),
            // The range is that of the setting, however it was given.
            Self::OutOfRange(rule) => format!("{env}: {flag} {rule} (got {text})"),
        })
    }
}

/// A whole number of some unit.
pub(super) struct Range<T> {
    /// Told before the range; empty for a count.
    unit: &'static str,
    min: u64,
    max: u64,
    /// The range ends only where the unit does, which is told to those alone who go beyond.
    open: bool,
    /// What 0 means if it is no ordinary value.
    zero: &'static str,
    value: fn(u64) -> T,
}

/// How many of something.
pub(super) fn count(range: impl RangeBounds<u64>) -> Range<u64> {
    Range::new("", COUNT_MAX, range, |number| number)
}

/// How many of something there may be, without a limit if the operator sets none.
pub(super) fn limit() -> Range<u64> {
    count(0..).zero("unlimited")
}

/// How many connections there may be: what the limit of open files leaves for them if the operator sets none.
pub(super) fn connections() -> Range<u64> {
    count(0..).zero("by the limit of open files")
}

/// A TCP port.
pub(super) fn tcp_port() -> Range<u16> {
    let value = |port| u16::try_from(port).expect("the range ends at the largest port");
    Range::new("", COUNT_MAX, 0..=u16::MAX.into(), value)
}

/// A duration in whole seconds.
pub(super) fn seconds(range: impl RangeBounds<u64>) -> Range<Duration> {
    Range::new("seconds, ", SECONDS_MAX, range, Duration::from_secs)
}

/// A duration in whole milliseconds.
pub(super) fn millis(range: impl RangeBounds<u64>) -> Range<Duration> {
    Range::new("milliseconds, ", COUNT_MAX, range, Duration::from_millis)
}

impl<T> Range<T> {
    fn new(
        unit: &'static str,
        unit_max: u64,
        range: impl RangeBounds<u64>,
        value: fn(u64) -> T,
    ) -> Self {
        let min = match range.start_bound() {
            Bound::Included(&min) => min,
            Bound::Excluded(&below) => below + 1,
            Bound::Unbounded => 0,
        };
        let (max, open) = match range.end_bound() {
            Bound::Included(&max) => (max, false),
            Bound::Excluded(&above) => (above - 1, false),
            Bound::Unbounded => (unit_max, true),
        };
        Self { unit, min, max, open, zero: "", value }
    }

    /// This range, with a meaning for 0.
    pub(super) fn zero(self, zero: &'static str) -> Self {
        Self { zero, ..self }
    }
}

impl<T> Rule for Range<T> {
    type Value = T;

    fn valid(&self) -> String {
        let Self { unit, min, max, zero, .. } = self;
        let range = match min {
            1 if self.open => "> 0".to_owned(),
            _ if self.open => format!(">= {min}"),
            _ => format!("{min}-{max}"),
        };
        let zero = if zero.is_empty() { String::new() } else { format!(", 0 = {zero}") };
        format!("{unit}{range}{zero}")
    }

    fn parse_flag(&self, text: &str) -> Result<T, Problem> {
        let number = text
            .parse::<i128>()
            .map_err(|_| Problem::Malformed("must be an integer".to_owned()))?;
        let in_range = u64::try_from(number).ok().filter(|n| (self.min..=self.max).contains(n));
        in_range.map(self.value).ok_or_else(|| {
            Problem::OutOfRange(match self.min {
                min if !self.open => format!("must be between {min} and {}", self.max),
                _ if number > 0 => format!("must be <= {}", self.max),
                1 => "must be > 0".to_owned(),
                min => format!("must be >= {min}"),
            })
        })
    }
}

/// True or false.
pub(super) struct Switch;

impl Rule for Switch {
    type Value = bool;

    fn valid(&self) -> String {
        "`true` or `false`".to_owned()
    }

    fn parse_flag(&self, text: &str) -> Result<bool, Problem> {
        parse_go_bool(text)
    }

    fn parse_env(&self, text: &str) -> Result<bool, Problem> {
        match text.to_ascii_lowercase().as_str() {
            "1" | "yes" | "true" => Ok(true),
            "0" | "no" | "false" => Ok(false),
            _ => Err(not_a_boolean()),
        }
    }

    fn is_boolean(&self) -> bool {
        true
    }

    fn is_off(&self, value: &bool) -> bool {
        !value
    }
}

/// The words that the flag package of Go takes, which scripts for upstream servers use.
pub(super) fn parse_go_bool(text: &str) -> Result<bool, Problem> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
        _ => Err(not_a_boolean()),
    }
}

fn not_a_boolean() -> Problem {
    Problem::Malformed("must be a boolean".to_owned())
}

/// A text of some form.
pub(super) struct Form<T> {
    valid: &'static str,
    /// What is said of any other text.
    rule: &'static str,
    parse: fn(&str) -> Option<T>,
}

impl<T> Rule for Form<T> {
    type Value = T;

    fn valid(&self) -> String {
        self.valid.to_owned()
    }

    fn parse_flag(&self, text: &str) -> Result<T, Problem> {
        (self.parse)(text).ok_or_else(|| Problem::Malformed(self.rule.to_owned()))
    }
}

/// Any text but the empty one: an empty flag is nearly always a shell variable that was not set.
pub(super) const TEXT: Form<String> = Form {
    valid: "not empty",
    rule: "must not be empty",
    parse: |text| (!text.is_empty()).then(|| text.to_owned()),
};

pub(super) const FILE_PATH: Form<PathBuf> =
    Form { valid: "path", rule: TEXT.rule, parse: |text| (TEXT.parse)(text).map(PathBuf::from) };

/// The id of a node.
pub(super) const NODE_NAME: Form<String> = Form {
    valid: "1-64 of `A-Z a-z 0-9 . _ -`",
    rule: "must be 1-64 of A-Z a-z 0-9 . _ -",
    parse: |text| {
        let is_name_byte = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
        let is_name = (1..=64).contains(&text.len()) && text.bytes().all(is_name_byte);
        is_name.then(|| text.to_owned())
    },
};

/// Where a collector is.
pub(super) const ENDPOINT: Form<String> = Form {
    valid: "`http://host:port` or `https://host:port`",
    rule: "must be http://host:port or https://host:port",
    parse: |text| {
        let uri = text.parse::<axum::http::Uri>().ok()?;
        let known = matches!(uri.scheme_str(), Some("http" | "https"));
        // A password in it would be shown wherever settings are.
        let named = uri.authority().is_some_and(|at| !at.as_str().contains('@'));
        let has_host = uri.host().is_some_and(|host| !host.is_empty());
        (known && named && has_host).then(|| text.to_owned())
    },
};

/// Seconds or `auto`.
pub(super) struct Delay;

impl Rule for Delay {
    type Value = GrantDelay;

    fn valid(&self) -> String {
        "seconds, >= 0, or `auto`".to_owned()
    }

    fn parse_flag(&self, text: &str) -> Result<GrantDelay, Problem> {
        if text == "auto" {
            return Ok(GrantDelay::Auto);
        }
        match seconds(0..).parse_flag(text) {
            Ok(delay) => Ok(GrantDelay::Seconds(delay.as_secs())),
            Err(Problem::Malformed(rule)) => Err(Problem::Malformed(format!("{rule} or auto"))),
            Err(Problem::OutOfRange(rule)) => Err(Problem::OutOfRange(rule)),
        }
    }
}

/// One of a few words.
pub(super) struct OneOf<T: 'static>(&'static [(&'static str, T)]);

pub(super) const LOG_FORMAT: OneOf<LogFormat> =
    OneOf(&[("text", LogFormat::Text), ("json", LogFormat::Json)]);

pub(super) const AUTO_RELEASE: OneOf<AutoRelease> = OneOf(&[
    (AutoRelease::Any.word(), AutoRelease::Any),
    (AutoRelease::Clean.word(), AutoRelease::Clean),
    (AutoRelease::Lease.word(), AutoRelease::Lease),
]);

pub(super) const FOLLOWER_MODE: OneOf<FollowerMode> = OneOf(&[
    ("redirect", FollowerMode::Redirect),
    ("forward", FollowerMode::Forward),
    ("auto", FollowerMode::Auto),
]);

impl<T: Copy> Rule for OneOf<T> {
    type Value = T;

    fn valid(&self) -> String {
        let words: Vec<_> = self.0.iter().map(|(word, _)| format!("`{word}`")).collect();
        let (last, others) = words.split_last().expect("there is a word to choose");
        format!("{} or {last}", others.join(", "))
    }

    fn parse_flag(&self, text: &str) -> Result<T, Problem> {
        let found = self.0.iter().find(|(word, _)| *word == text);
        let no_such = || Problem::Malformed(format!("must be {}", self.valid().replace('`', "")));
        found.map(|(_, value)| *value).ok_or_else(no_such)
    }
}

/// A setting without a default; what the list says in its place is for people only.
pub(super) struct Optional<R>(pub(super) R);

impl<R: Rule> Rule for Optional<R> {
    type Value = Option<R::Value>;

    fn valid(&self) -> String {
        self.0.valid()
    }

    fn parse_flag(&self, text: &str) -> Result<Self::Value, Problem> {
        self.0.parse_flag(text).map(Some)
    }

    fn parse_env(&self, text: &str) -> Result<Self::Value, Problem> {
        self.0.parse_env(text).map(Some)
    }

    fn parse_default(&self, _: &str) -> Result<Self::Value, Problem> {
        Ok(None)
    }
}

/// `host:port`, to bind or to be dialled by others.
pub(super) struct Address {
    pub(super) dialled: bool,
}

impl Rule for Address {
    type Value = HostPort;

    fn valid(&self) -> String {
        "`host:port`".to_owned()
    }

    fn parse_flag(&self, text: &str) -> Result<HostPort, Problem> {
        match HostPort::parse(text) {
            None => Err(Problem::Malformed("must be host:port".to_owned())),
            Some(address) if self.dialled && !address.can_be_dialled() => {
                Err(Problem::Malformed("must be a host:port that others can dial".to_owned()))
            }
            Some(address) => Ok(address),
        }
    }
}

/// Entries with commas between them, none by default.
pub(super) struct List<T: 'static> {
    valid: &'static str,
    /// What each entry must be.
    each: &'static str,
    parse: fn(&str) -> Option<T>,
    /// Checks the entries as a whole, and may put them in order.
    check: fn(&mut [T]) -> Result<(), String>,
}

impl<T> Rule for List<T> {
    type Value = Vec<T>;

    fn valid(&self) -> String {
        self.valid.to_owned()
    }

    fn parse_flag(&self, text: &str) -> Result<Vec<T>, Problem> {
        let mut entries = Vec::new();
        for (index, entry) in text.split(',').enumerate() {
            let wrong = || Problem::Malformed(format!("entry {} must be {}", index + 1, self.each));
            entries.push((self.parse)(entry.trim_ascii()).ok_or_else(wrong)?);
        }
        (self.check)(&mut entries).map_err(Problem::Malformed)?;
        Ok(entries)
    }

    fn parse_default(&self, _: &str) -> Result<Vec<T>, Problem> {
        Ok(Vec::new())
    }
}

/// The nodes of a cluster; the value is sorted by node id.
pub(super) const PEERS: List<PeerSpec> = List {
    valid: "`id=raftHost:port@clientHost:port,…`",
    each: "id=raftHost:port@clientHost:port",
    parse: parse_peer,
    check: check_peers,
};

fn parse_peer(text: &str) -> Option<PeerSpec> {
    let (node, addresses) = text.split_once('=')?;
    let (raft_addr, client_addr) = addresses.split_once('@')?;
    Some(PeerSpec {
        node: (NODE_NAME.parse)(node)?,
        raft_addr: HostPort::parse(raft_addr)?,
        client_addr: HostPort::parse(client_addr)?,
    })
}

fn check_peers(peers: &mut [PeerSpec]) -> Result<(), String> {
    peers.sort_by(|a, b| a.node.cmp(&b.node));
    if let Some(pair) = peers.windows(2).find(|pair| pair[0].node == pair[1].node) {
        return Err(format!("must name {} only once", pair[0].node));
    }
    // Also across the two kinds: no port can speak both protocols.
    let mut addresses: Vec<_> =
        peers.iter().flat_map(|peer| [&peer.raft_addr, &peer.client_addr]).collect();
    addresses.sort();
    if let Some(address) = addresses.iter().find(|address| !address.can_be_dialled()) {
        return Err(format!("must not have {address}, which others cannot dial"));
    }
    if let Some(pair) = addresses.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(format!("must have {} only once", pair[0]));
    }
    Ok(())
}

/// Where pages come from, as browsers write it: `scheme://host[:port]`, or `*`.
pub(super) const ORIGINS: List<String> = List {
    valid: "`scheme://host:port,…` or `*`",
    each: "scheme://host:port or *",
    parse: |origin| {
        let host = origin.split_once("://").map(|(_, host)| host);
        // A path or a slash at the end would never match: browsers send neither.
        let is_origin = host.is_some_and(|host| !host.is_empty() && !host.contains('/'));
        let known = origin == "*" || is_origin && origin.bytes().all(|b| b.is_ascii_graphic());
        known.then(|| origin.to_ascii_lowercase())
    },
    check: |_| Ok(()),
};

/// What a server is called, as it stands in `Host` but without a port.
pub(super) const HOSTS: List<String> = List {
    valid: "`host,.domain,…` or `*`",
    each: "a host without a port, .domain or *",
    parse: |host| {
        let host = bare(host).to_ascii_lowercase();
        let name = host.strip_prefix('.').unwrap_or(&host);
        let is_name = !name.is_empty()
            && !name.starts_with('.')
            && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b));
        (host == "*" || is_name || host.parse::<IpAddr>().is_ok()).then_some(host)
    },
    check: |_| Ok(()),
};

/// Whether only this machine can reach the address. A name other than `localhost` counts as
/// reachable: what it resolves to may change after the warning was due.
pub(super) fn is_loopback(host: &str) -> bool {
    let bare = bare(host);
    match bare.parse::<IpAddr>() {
        Ok(address) => address.to_canonical().is_loopback(),
        Err(_) => bare.eq_ignore_ascii_case("localhost"),
    }
}

/// Whether a socket bound to the address listens on all of them, which nobody can dial.
pub(super) fn is_wildcard(host: &str) -> bool {
    bare(host).parse::<IpAddr>().is_ok_and(|address| address.to_canonical().is_unspecified())
}

/// An address without the brackets that IPv6 may have around it.
pub(super) fn bare(host: &str) -> &str {
    host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host)
}
