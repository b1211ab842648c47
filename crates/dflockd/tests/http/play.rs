//! A server that is talked to by HTTP, as scripts of the line protocol see it: each request line becomes the request
//! that stands for it, and what comes of it is printed as the line protocol would.
//!
//! A connection of a script is a session and an HTTP connection for its requests, one after the other, so a long poll
//! keeps those behind it waiting. What it subscribes to are streams of events, each on a connection of its own.

use std::collections::{BTreeMap, VecDeque};
use std::net::TcpStream;
use std::time::Duration;

use dflockd_testkit::http::{Ask, Events, Got, Reply, Wire, escape};
use dflockd_testkit::script::list::Difference;
use dflockd_testkit::script::rest::{Activity, Rest};
use dflockd_testkit::script::through::{
    Api, answer_line, next_line, outcome_line, push_line, read,
};
use dflockd_testkit::{eventually, millis};
use dflockd_wire::command::{
    self as wire, Acquire, Add, BarrierWait, CounterSet, Enqueue, ForceRelease, KvCompareAndSet,
    KvDelete, KvSet, Pop, Release, Renew, Signal, Subscribe, Unsubscribe, Wait,
};
use dflockd_wire::{
    Command, End, ErrorCode, Expect, Fence, Frame, Grant, Mode, Op, Outcome, Push, Query, Request,
    Response, Space, Span, Subscription, Token,
};
use serde_json::{Value, json};

use super::site::Site;
use super::transcripts;

/// A server, and the connections of a script.
pub(super) struct Played {
    site: Site,
    durable: bool,
    conns: BTreeMap<String, Conn>,
}

/// What a script calls a connection.
struct Conn {
    session: String,
    wire: Wire,
    /// What the request in flight is.
    asked: Option<Op>,
    /// What comes behind it.
    queue: VecDeque<Vec<u8>>,
    /// By the command that began them and what it named.
    streams: BTreeMap<(Op, String), Stream>,
    /// What came and the script has not read.
    lines: VecDeque<Vec<u8>>,
}

/// A stream of events.
struct Stream {
    events: Events,
    /// To see whether something is there without waiting for it.
    socket: TcpStream,
    /// Whether more than what was asked for may have been read.
    fresh: bool,
}

/// What to do for a request.
enum Deed {
    Ask(Ask),
    /// A stream of events.
    Begin(Op, String, String),
    /// The end of one.
    End(Op, String),
}

impl Api for Played {
    const NOT_THE_SAME: &'static [Difference] = transcripts::NOT_THE_SAME;
    const PLAYED_MIN: usize = transcripts::PLAYED_MIN;

    fn has(op: Op, frame: &Frame<'_>) -> bool {
        transcripts::has_route(op, frame)
    }

    fn start(flags: &[String], durable: bool) -> Result<Self, String> {
        let mut all: Vec<&str> = flags.iter().map(String::as_str).collect();
        let site = if durable {
            // Leases end when the scripts say so, although there was an election, of which one is enough: the only
            // voter does not wait for it, and a slow machine is no reason for another.
            all.extend(["--election-timeout-ms", "10000", "--failover-grace", "0"]);
            Site::durable(&all)
        } else {
            Site::start(&all)
        };
        Ok(Self { site, durable, conns: BTreeMap::new() })
    }

    fn open(&mut self, conn: &str) {
        let opened = Conn {
            session: self.site.session().id,
            wire: self.site.wire(),
            asked: None,
            queue: VecDeque::new(),
            streams: BTreeMap::new(),
            lines: VecDeque::new(),
        };
        self.conns.insert(conn.to_owned(), opened);
    }

    fn send(&mut self, conn: &str, requests: Vec<Vec<u8>>) {
        let pids = [self.site.server.pid()];
        let mut rest = Rest::new(Activity::of(&pids), self.durable);
        self.conn(conn).queue.extend(requests);
        loop {
            let progress = self.turn();
            let here = self.conn(conn);
            if here.asked.is_none() && here.queue.is_empty() {
                return;
            }
            if !progress && rest.has_come(&pids) && !self.turn() {
                return;
            }
        }
    }

    fn close(&mut self, conn: &str) {
        let Conn { session, mut wire, asked, streams, .. } =
            self.conns.remove(conn).expect("opened before it is used");
        self.site.delete(&format!("/v1/sessions/{session}")).empty();
        if asked.is_some() {
            wire.reply().refused(410, "session_gone");
        }
        drop(streams);
        self.forget_streams();
    }

    fn line(&mut self, conn: &str) -> Option<Vec<u8>> {
        self.turn();
        next_line(&mut self.conn(conn).lines)
    }

    fn settle(&mut self) {
        let pids = [self.site.server.pid()];
        let mut rest = Rest::new(None, self.durable);
        while self.turn() || !rest.has_come(&pids) {}
        self.turn();
    }

    fn log(&self) -> Vec<String> {
        self.site.server.output().lines().map(str::to_owned).collect()
    }
}

impl Played {
    fn conn(&mut self, conn: &str) -> &mut Conn {
        self.conns.get_mut(conn).expect("opened before it is used")
    }

    /// Reads what is there and sends what can be sent; whether there was anything.
    fn turn(&mut self) -> bool {
        let mut progress = false;
        let names: Vec<_> = self.conns.keys().cloned().collect();
        for name in names {
            progress |= self.conn(&name).hear();
            while self.conn(&name).asked.is_none()
                && let Some(request) = self.conn(&name).queue.pop_front()
            {
                progress = true;
                match read(&request) {
                    Err(line) => self.conn(&name).lines.push_back(line),
                    Ok((op, request)) => self.execute(&name, op, &request),
                }
            }
        }
        progress
    }

    fn execute(&mut self, name: &str, op: Op, request: &Request<'_>) {
        let conn = self.conns.get_mut(name).expect("opened before it is used");
        match deed(op, request, &conn.session) {
            Deed::Ask(ask) => {
                conn.wire.begin(&ask.session(&conn.session));
                conn.asked = Some(op);
                return;
            }
            Deed::Begin(begun, what, path) => {
                let key = (begun, what);
                // Whoever observes again is told again; the others have what they ask for.
                if begun == Op::Observe || !conn.streams.contains_key(&key) {
                    let stream = Stream::open(&self.site, &path);
                    conn.streams.insert(key, stream);
                }
            }
            Deed::End(begun, what) => {
                conn.streams.remove(&(begun, what));
            }
        }
        self.forget_streams();
        self.conn(name).lines.push_back(answer_line(&Response::Ok));
    }

    /// Waits until the server has noticed which streams have ended.
    fn forget_streams(&self) {
        let here = self.conns.values().map(|conn| 1 + conn.streams.len()).sum::<usize>() as u64;
        eventually("the ends of streams are noticed", || {
            (self.site.sessions() == here).then_some(())
        });
    }
}

impl Conn {
    /// Reads what is there; whether there was anything.
    fn hear(&mut self) -> bool {
        let before = self.lines.len();
        for stream in self.streams.values_mut() {
            stream.hear(&mut self.lines);
        }
        if let Some(op) = self.asked
            && has_more(&self.wire.socket)
        {
            self.asked = None;
            let line = line_of(op, &self.wire.reply());
            self.lines.push_back(line);
        }
        self.lines.len() > before
    }
}

impl Stream {
    fn open(site: &Site, path: &str) -> Self {
        let wire = site.begin(Ask::get(path));
        let socket = wire.socket.try_clone().expect("a socket can be cloned");
        Self { events: wire.into_events(), socket, fresh: true }
    }

    /// Reads the events that are there.
    fn hear(&mut self, lines: &mut VecDeque<Vec<u8>>) {
        if !self.fresh && !has_more(&self.socket) {
            return;
        }
        self.fresh = false;
        loop {
            let event = match self.events.hear(millis(1)) {
                Ok(event) => event,
                Err(Got::End) => panic!("the server ended a stream"),
                Err(Got::More | Got::Nothing) => return,
            };
            let text = |name: &str| event.data[name].as_str().expect("a string");
            let line = match event.name.as_str() {
                "sig" => push_line(&Push::Signal {
                    channel: text("channel").as_bytes(),
                    payload: text("payload").as_bytes(),
                }),
                "change" => {
                    push_line(&Push::Watch { event: text("event"), key: text("key").as_bytes() })
                }
                "leader" => {
                    push_line(&Push::Leader { event: text("event"), key: text("key").as_bytes() })
                }
                other => panic!("an event {other}"),
            };
            lines.push_back(line);
        }
    }
}

/// Whether a read would not wait.
fn has_more(socket: &TcpStream) -> bool {
    socket.set_nonblocking(true).expect("a socket takes options");
    let peeked = socket.peek(&mut [0]);
    socket.set_nonblocking(false).expect("a socket takes options");
    // An end is something, too, and fails where it is read.
    peeked.is_ok()
}

/// What stands for a request.
#[expect(clippy::wildcard_enum_match_arm, reason = "others are not played")]
fn deed(op: Op, request: &Request<'_>, session: &str) -> Deed {
    let ask = match *request {
        Request::Ping => Ask::new("POST", &format!("/v1/sessions/{session}/ping")),
        Request::Stats => Ask::get("/v1/stats"),
        Request::Query(Query::Counter { key } | Query::Kv { key }) => Ask::get(&route(op, key, "")),
        Request::Query(Query::Length { key }) => Ask::get(&route(op, key, "/length")),
        Request::Query(Query::Range { key, start, stop }) => {
            Ask::get(&route(op, key, &format!("?start={start}&stop={stop}")))
        }
        Request::Command(command) => return command_deed(op, &command),
        Request::ForceRelease { command: ForceRelease { space, fence, key }, token, reason } => {
            let space = match space {
                Space::Locks => "lock",
                Space::Semaphores => "sem",
            };
            let body = json!({ "space": space, "fence": fence.0.to_string(), "reason": reason });
            Ask::post(&route(op, key, "/force-release"), &body).admin(text(token))
        }
        _ => unreachable!("sections with {op:?} are not played"),
    };
    Deed::Ask(ask)
}

#[expect(clippy::wildcard_enum_match_arm, reason = "others are not played")]
fn command_deed(op: Op, command: &Command<'_>) -> Deed {
    let put = |path: String, body: Value| Ask::new("PUT", &path).body(body.to_string());
    let ask = match *command {
        Command::Acquire(Acquire { mode, key, wait, lease, .. }) => {
            let mut body = json!({ "acquire_timeout_s": seconds(wait) });
            lasts(&mut body, "lease_ttl_s", lease);
            limited(&mut body, mode);
            let path = match mode {
                Mode::Read => route(op, key, "/read"),
                Mode::Write => route(op, key, "/write"),
                Mode::Mutex | Mode::Semaphore { .. } | Mode::Election => route(op, key, ""),
            };
            Ask::post(&path, &body)
        }
        Command::Enqueue(Enqueue { mode, key, lease, .. }) => {
            let mut body = json!({});
            lasts(&mut body, "lease_ttl_s", lease);
            limited(&mut body, mode);
            let path = match mode {
                Mode::Read => route(op, key, "/read/enqueue"),
                Mode::Write => route(op, key, "/write/enqueue"),
                Mode::Mutex | Mode::Semaphore { .. } | Mode::Election => route(op, key, "/enqueue"),
            };
            Ask::post(&path, &body)
        }
        Command::Wait(Wait { key, wait, .. }) => {
            Ask::post(&route(op, key, "/wait"), &json!({ "timeout_s": seconds(wait) }))
        }
        Command::Release(Release { key, token, resign, .. }) => {
            let verb = if resign { "/resign" } else { "/release" };
            Ask::post(&route(op, key, verb), &json!({ "token": &*token.text() }))
        }
        Command::Renew(Renew { key, token, lease, .. }) => {
            let mut body = json!({ "token": &*token.text() });
            lasts(&mut body, "lease_ttl_s", lease);
            Ask::post(&route(op, key, "/renew"), &body)
        }
        Command::Add(Add { key, delta, decrement }) => {
            let delta = if decrement { delta.wrapping_neg() } else { delta };
            Ask::post(&route(op, key, "/add"), &json!({ "delta": delta }))
        }
        Command::CounterSet(CounterSet { key, value }) => {
            put(route(op, key, ""), json!({ "value": value }))
        }
        Command::KvSet(KvSet { key, value, ttl }) => {
            let mut body = json!({ "value": text(value) });
            lasts(&mut body, "ttl_s", ttl);
            put(route(op, key, ""), body)
        }
        Command::KvDelete(KvDelete { key }) => Ask::new("DELETE", &route(op, key, "")),
        Command::KvCompareAndSet(KvCompareAndSet { key, expect, value, ttl }) => {
            let mut body = json!({ "value": text(value) });
            match expect {
                Expect::Absent => body["if_absent"] = true.into(),
                Expect::Value(old) => body["if_value"] = text(old).into(),
                Expect::Revision(_) => unreachable!("lines have no revisions"),
            }
            lasts(&mut body, "ttl_s", ttl);
            put(route(op, key, ""), body)
        }
        Command::Push(wire::Push { key, end, value }) => {
            let body = json!({ "value": text(value), "end": end_of(end) });
            Ask::post(&route(op, key, "/push"), &body)
        }
        Command::Pop(Pop { key, end, wait }) => {
            let mut body = json!({ "end": end_of(end) });
            lasts(&mut body, "timeout_s", wait);
            Ask::post(&route(op, key, "/pop"), &body)
        }
        Command::BarrierWait(BarrierWait { key, count, wait }) => {
            let body = json!({ "count": count, "timeout_s": seconds(wait) });
            Ask::post(&route(op, key, "/wait"), &body)
        }
        Command::Signal(Signal { channel, payload }) => {
            Ask::post(&route(op, channel, ""), &json!({ "payload": text(payload) }))
        }
        Command::Subscribe(Subscribe { to }) => {
            let (op, what, path) = stream(to);
            return Deed::Begin(op, what, path);
        }
        Command::Unsubscribe(Unsubscribe { from }) => {
            let (op, what, _) = stream(from);
            return Deed::End(op, what);
        }
        command => unreachable!("sections with {} are not played", command.name()),
    };
    Deed::Ask(ask)
}

/// How a stream begins, what it is called, and where it is.
fn stream(subscription: Subscription<'_>) -> (Op, String, String) {
    match subscription {
        Subscription::Signals { pattern, group } => {
            let what = format!("pattern={}&group={}", escape(pattern), escape(group));
            let path = format!("/v1/signals?{what}");
            (Op::Listen, what, path)
        }
        Subscription::Changes { pattern, .. } => {
            let path = format!("/v1/watch?pattern={}", escape(pattern));
            (Op::Watch, escape(pattern), path)
        }
        Subscription::Leaders { key } => {
            (Op::Observe, escape(key), route(Op::Observe, key, "/events"))
        }
    }
}

/// The route of a key: the name of the command says under which name it is used.
#[expect(clippy::wildcard_enum_match_arm, reason = "others have no key")]
fn route(op: Op, key: &[u8], verb: &str) -> String {
    let family = match op {
        Op::L | Op::R | Op::N | Op::E | Op::W => "locks",
        Op::Sl | Op::Sr | Op::Sn | Op::Se | Op::Sw => "semaphores",
        Op::Rl | Op::Wl | Op::Rr | Op::Wr | Op::Rn | Op::Wn => "rwlocks",
        Op::Re | Op::We | Op::Rw | Op::Ww => "rwlocks",
        Op::Elect | Op::Resign | Op::Observe => "elections",
        Op::Incr | Op::Decr | Op::Get | Op::Cset => "counters",
        Op::Kset | Op::Kget | Op::Kdel | Op::Kcas => "kv",
        Op::Lpush | Op::Rpush | Op::Lpop | Op::Rpop | Op::Blpop | Op::Brpop => "lists",
        Op::Llen | Op::Lrange => "lists",
        Op::Bwait => "barriers",
        Op::Signal => "signals",
        Op::ForceRelease => "admin/locks",
        other => unreachable!("{other:?} has no key"),
    };
    format!("/v1/{family}/{}{verb}", escape(key))
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("others are not played")
}

/// A lease or time to live, if one is asked for.
fn lasts(body: &mut Value, name: &str, time: Option<Span>) {
    if let Some(time) = time {
        body[name] = seconds(time).into();
    }
}

fn seconds(span: Span) -> u64 {
    Duration::from(span).as_secs()
}

fn limited(body: &mut Value, mode: Mode) {
    if let Mode::Semaphore { limit } = mode {
        body["limit"] = limit.into();
    }
}

fn end_of(end: End) -> &'static str {
    match end {
        End::Left => "left",
        End::Right => "right",
    }
}

/// What the line protocol would say.
#[expect(clippy::wildcard_enum_match_arm, reason = "others are answered without a body")]
fn line_of(op: Op, reply: &Reply) -> Vec<u8> {
    if reply.status == 204 {
        reply.empty();
        return answer_line(&Response::Ok);
    }
    if reply.status != 200 {
        return answer_line(&Response::Error(refusal(reply)));
    }
    let body = reply.json();
    let number = |name: &str| body[name].as_i64().unwrap_or_else(|| panic!("no {name}: {body}"));
    let items = || serde_json::to_vec(&body["items"]).expect("it was JSON");
    let granted = |yes, no, none| outcome_line(op, &told(&body, yes, no).unwrap_or(none));
    let response = match op {
        Op::L | Op::Sl | Op::Rl | Op::Wl | Op::Elect | Op::W | Op::Sw | Op::Rw | Op::Ww => {
            return granted("ok", "timeout", Outcome::Timeout);
        }
        Op::E | Op::Se | Op::Re | Op::We => return granted("acquired", "queued", Outcome::Queued),
        Op::N | Op::Sn | Op::Rn | Op::Wn => {
            let (lease, fence) = (millis_of(&body, "remaining_ms"), fence_of(&body));
            return outcome_line(op, &Outcome::Renewed { fence, lease });
        }
        Op::Incr | Op::Decr | Op::Get => {
            assert_eq!(body["value_s"], number("value").to_string(), "{body}");
            Response::Number(number("value"))
        }
        Op::Cset => Response::Ok,
        Op::Kset | Op::Kcas | Op::Bwait => match body["status"].as_str() {
            Some("ok") => Response::Ok,
            Some("cas_conflict") => Response::CasConflict,
            Some("timeout") => Response::Timeout,
            other => panic!("{other:?}: {body}"),
        },
        Op::Kget | Op::Lpop | Op::Rpop | Op::Blpop | Op::Brpop => match body["status"].as_str() {
            Some("ok") => Response::Value(body["value"].as_str().expect("a string").as_bytes()),
            Some("empty") => Response::Nil,
            other => panic!("{other:?}: {body}"),
        },
        Op::Lpush | Op::Rpush | Op::Llen => Response::Number(number("length")),
        Op::Lrange => return answer_line(&Response::Value(&items())),
        Op::Signal => Response::Number(number("delivered")),
        Op::Stats => return answer_line(&Response::Value(reply.text().trim_end().as_bytes())),
        other => panic!("{other:?} is answered 200: {body}"),
    };
    answer_line(&response)
}

/// What a grant says; none if there is none.
fn told(body: &Value, yes: &str, no: &str) -> Option<Outcome> {
    let status = body["status"].as_str().expect("a status");
    if status == no {
        assert_eq!(body.as_object().map(serde_json::Map::len), Some(1), "{body}");
        return None;
    }
    assert_eq!(status, yes, "{body}");
    let token = body["token"].as_str().and_then(|token| Token::parse(token.as_bytes()));
    let token = token.unwrap_or_else(|| panic!("no token: {body}"));
    assert_eq!(token.fence, fence_of(body), "R5: the token begins with the fence");
    Some(Outcome::Granted(Grant { token, lease: millis_of(body, "lease_ttl_ms") }))
}

/// A time, which is also there in seconds.
fn millis_of(body: &Value, name: &str) -> Span {
    let time = body[name].as_u64().map(Span::from_millis);
    let time = time.unwrap_or_else(|| panic!("no {name}: {body}"));
    assert_eq!(body[name.replace("_ms", "_s")], seconds(time), "{body}");
    time
}

fn fence_of(body: &Value) -> Fence {
    let fence = body["fence"].as_str().and_then(|fence| fence.parse().ok());
    Fence(fence.unwrap_or_else(|| panic!("no fence: {body}")))
}

/// The status word of a refusal. Those of the line protocol have the same names.
fn refusal(reply: &Reply) -> ErrorCode {
    let body = reply.json();
    let code = body["error"].as_str().expect("a code");
    match (reply.status, code) {
        (400, "bad_request")
        | (404, "not_held")
        | (409, "overflow" | "already_waiting")
        | (503, "admin_disabled") => ErrorCode::Error,
        (409 | 503, code) => ErrorCode::parse(&format!("error_{code}"))
            .unwrap_or_else(|| panic!("the line protocol has no {code}: {body}")),
        (status, _) => panic!("{status}: {body}"),
    }
}
