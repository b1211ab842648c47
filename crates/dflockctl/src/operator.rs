//! Talking to members as an operator: one request, one answer, to whichever member answers.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::pki_types::ServerName;
use serde_json::{Value, json};

use crate::connect::{Connection, Settings, read_token};
use crate::failure::{Failure, Status};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a server may take for its part of a change.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);
/// How long a server may take to say how it is, which it knows without asking anybody.
const STATUS_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a snapshot may take.
pub(crate) const SNAPSHOT_TIMEOUT: Duration = Duration::from_secs(610);
/// The longest answer: far above a piece of a backup and the status of many members.
const ANSWER_BYTES_MAX: u64 = 16 << 20;
const RETRY_DELAY: Duration = Duration::from_millis(200);
/// The shortest timeout of a change, however short `--timeout` is: a leader needs a few syncs.
const ANSWER_TIMEOUT_MIN: Duration = Duration::from_secs(1);
/// The advice behind a connection that failed.
pub(crate) const CHECK_SERVERS: &str = "; check --servers (DFLOCKD_SERVERS) and that dflockd runs";

/// The admin token and the reason that go with each change.
#[derive(Debug, clap::Args)]
pub(crate) struct Operator {
    /// File with the admin token of the servers
    /// [variables: DFLOCKD_ADMIN_TOKEN_FILE, DFLOCKD_ADMIN_TOKEN].
    #[arg(long, value_name = "FILE")]
    admin_token_file: Option<PathBuf>,
    /// Why; the server logs it. The name of this client if not given.
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,
}

/// The cluster, as an operator reaches it.
pub(crate) struct Cluster {
    connection: Connection,
    token: Option<String>,
    reason: String,
    /// To the member that answered last.
    link: Option<Link>,
}

impl Cluster {
    pub(crate) fn new(settings: Settings, operator: Option<&Operator>) -> Result<Self, Failure> {
        let connection = settings.resolve()?;
        let token = match operator {
            None => None,
            Some(operator) => Some(token(operator.admin_token_file.as_deref())?),
        };
        let reason = operator.and_then(|operator| operator.reason.clone());
        let reason = reason.unwrap_or_else(|| format!("dflockctl of {}", connection.name));
        Ok(Self { connection, token, reason, link: None })
    }

    /// A cluster that is asked for its status only, without an admin token.
    pub(crate) fn read_only(connection: Connection) -> Self {
        Self { connection, token: None, reason: String::new(), link: None }
    }

    /// The servers that were named.
    pub(crate) fn servers(&self) -> &[String] {
        &self.connection.servers
    }

    /// Asks any member; another one if one does not answer.
    pub(crate) fn ask(&mut self, verb: &str, arguments: Value) -> Result<Value, Failure> {
        self.ask_within(verb, arguments, ANSWER_TIMEOUT)
    }

    pub(crate) fn ask_within(
        &mut self,
        verb: &str,
        arguments: Value,
        limit: Duration,
    ) -> Result<Value, Failure> {
        let mut failure = None;
        let servers = self.connection.servers.clone();
        for server in servers {
            let asked = match self.link.take().filter(|link| link.server == server) {
                Some(link) => Ok(link),
                None => Link::open(&self.connection, &server),
            };
            let asked = asked.and_then(|mut link| {
                let answer = link.ask(verb, self.token.as_deref(), &arguments, limit)?;
                self.link = Some(link);
                Ok(answer)
            });
            match asked {
                Err(why) if why.status == Status::Unreachable => failure = Some(why),
                answered => return answered,
            }
        }
        Err(failure.unwrap_or_else(|| Failure::usage("no server given")))
    }

    /// Asks one member, which need not be among the named servers.
    pub(crate) fn ask_at(
        &self,
        server: &str,
        verb: &str,
        arguments: &Value,
        limit: Duration,
    ) -> Result<Value, Failure> {
        let mut link = Link::open(&self.connection, server)?;
        link.ask(verb, self.token.as_deref(), arguments, limit)
    }

    /// A connection to one member.
    pub(crate) fn open(&self, server: &str) -> Result<Link, Failure> {
        Link::open(&self.connection, server)
    }

    /// The status of one member.
    pub(crate) fn status_at(&self, server: &str) -> Result<Value, Failure> {
        self.ask_at(server, "status", &json!({}), ANSWER_TIMEOUT)
    }

    /// Asks the member with this node id; if it can not be reached the error says that it must be started.
    pub(crate) fn ask_node(
        &self,
        (node, address): (&str, &str),
        verb: &str,
        arguments: &Value,
        limit: Duration,
    ) -> Result<Value, Failure> {
        self.ask_at(address, verb, arguments, limit).map_err(|failure| {
            if failure.status != Status::Unreachable {
                return failure;
            }
            // What was given as servers is not to blame.
            let text = failure.to_string();
            let why = text.strip_suffix(CHECK_SERVERS).unwrap_or(&text);
            let advice = "only the node itself can do that: start it first";
            Failure::new(Status::Unreachable, format!("{node} does not answer: {why}; {advice}"))
        })
    }

    /// Asks for a change until it is done. What only takes time is asked for again.
    pub(crate) fn change(
        &mut self,
        verb: &str,
        mut arguments: Value,
        limit: Duration,
    ) -> Result<Value, Failure> {
        arguments["reason"] = self.reason.clone().into();
        let begun = Instant::now();
        loop {
            let left = limit.saturating_sub(begun.elapsed());
            let asked = self.ask("status", json!({})).and_then(|seen| {
                // Nobody could decide, and the answer would only be late.
                if seen["leader_id"] == "" {
                    let text = "the cluster has no leader, so nothing can be changed";
                    let text = format!("{text}; `dflockctl doctor` says who is missing");
                    return Err(Failure::new(Status::Unreachable, text));
                }
                self.ask_within(
                    verb,
                    arguments.clone(),
                    left.clamp(ANSWER_TIMEOUT_MIN, ANSWER_TIMEOUT),
                )
            });
            let passes = match &asked {
                Ok(_) => false,
                Err(failure) => {
                    let text = failure.to_string();
                    let soon = [
                        "caught up",
                        "under way",
                        "try again",
                        "no answer in time",
                        "has not said",
                    ];
                    failure.status == Status::Unreachable
                        || soon.iter().any(|words| text.contains(words))
                }
            };
            if !passes || begun.elapsed() >= limit {
                return asked;
            }
            std::thread::sleep(RETRY_DELAY);
        }
    }

    pub(crate) fn token(&self) -> Option<&str> {
        self.token.as_deref()
    }

    pub(crate) fn reason(&self) -> &str {
        &self.reason
    }
}

fn token(file: Option<&Path>) -> Result<String, Failure> {
    let env = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
    let from_env = env("DFLOCKD_ADMIN_TOKEN_FILE").map(PathBuf::from);
    if let Some(path) = file.map(Path::to_owned).or(from_env) {
        return read_token(&path);
    }
    env("DFLOCKD_ADMIN_TOKEN").ok_or_else(|| {
        let advice = "give --admin-token-file or set DFLOCKD_ADMIN_TOKEN_FILE";
        Failure::new(Status::Denied, format!("an admin token is needed; {advice}"))
    })
}

/// A connection to one server.
pub(crate) struct Link {
    server: String,
    socket: TcpStream,
    stream: BufReader<Box<dyn Stream>>,
}

trait Stream: Read + Write {}

impl<T: Read + Write> Stream for T {}

impl Link {
    fn open(connection: &Connection, server: &str) -> Result<Self, Failure> {
        let failed = |error: &dyn std::fmt::Display| {
            Failure::new(Status::Unreachable, format!("{server}: {error}{CHECK_SERVERS}"))
        };
        let limit = connection.connect_timeout.unwrap_or(CONNECT_TIMEOUT);
        let addresses = server.to_socket_addrs().map_err(|error| failed(&error))?;
        let mut socket = Err(ErrorKind::AddrNotAvailable.into());
        for address in addresses {
            socket = TcpStream::connect_timeout(&address, limit);
            if socket.is_ok() {
                break;
            }
        }
        let socket = socket.map_err(|error| failed(&error))?;
        let prepared = socket.set_nodelay(true);
        let prepared = prepared.and_then(|()| socket.set_read_timeout(Some(limit)));
        prepared.map_err(|error| failed(&error))?;
        let copy = socket.try_clone().map_err(|error| failed(&error))?;
        let stream: Box<dyn Stream> = match &connection.tls {
            None => Box::new(copy),
            Some(config) => {
                let host = server.rsplit_once(':').map_or(server, |(host, _)| host);
                let host = host.trim_start_matches('[').trim_end_matches(']');
                let name = ServerName::try_from(host.to_owned()).map_err(|error| failed(&error))?;
                let session = rustls::ClientConnection::new(Arc::clone(config), name);
                let session = session.map_err(|error| failed(&error))?;
                Box::new(rustls::StreamOwned::new(session, copy))
            }
        };
        let mut link = Self { server: server.to_owned(), socket, stream: BufReader::new(stream) };
        if let Some(auth) = &connection.auth {
            let answer = link.exchange(&format!("auth\n_\n{auth}\n"), limit, "")?;
            if answer != "ok" {
                let advice =
                    "give the right token with --auth-token-file or DFLOCKD_AUTH_TOKEN_FILE";
                let text = format!("{server} refused the token; {advice}");
                return Err(Failure::new(Status::Denied, text));
            }
        }
        Ok(link)
    }

    /// Asks the server to do something as an operator wants it.
    pub(crate) fn ask(
        &mut self,
        verb: &str,
        token: Option<&str>,
        arguments: &Value,
        limit: Duration,
    ) -> Result<Value, Failure> {
        let token = token.unwrap_or("_");
        let (limit, late) = match verb {
            "status" => (limit.min(STATUS_TIMEOUT), ""),
            _ => (limit, "; it may still happen"),
        };
        let request = format!("cluster\n{verb}\n{token} {arguments}\n");
        let answer = self.exchange(&request, limit, late)?;
        let server = &self.server;
        let strange = |what: &str| {
            Failure::new(
                Status::No,
                format!("{server} {what}; is it a dflockd server, and new enough?"),
            )
        };
        let json = match answer.split_once(' ') {
            Some(("ok", json)) => json,
            _ if answer == "error_auth" => {
                let advice = "give the right tokens with --admin-token-file and --auth-token-file";
                let text = format!("{server} refused the token; {advice}");
                return Err(Failure::new(Status::Denied, text));
            }
            _ if answer == "error_draining" => {
                let text = format!("{server} shuts down");
                return Err(Failure::new(Status::Unreachable, text));
            }
            _ => return Err(strange("does not know what an operator wants")),
        };
        let value: Value = serde_json::from_str(json).map_err(|_| strange("answers no JSON"))?;
        match value["done"].as_bool() {
            Some(true) => Ok(value),
            Some(false) => {
                let why = value["why"].as_str().unwrap_or("refused");
                Err(Failure::new(Status::No, crate::output::clean(why)))
            }
            None => Err(strange("answers something else")),
        }
    }

    /// Sends a request and reads its answer; if that is `late`, there is this to be said.
    fn exchange(&mut self, request: &str, limit: Duration, late: &str) -> Result<String, Failure> {
        let server = self.server.clone();
        let failed = |error: &dyn std::fmt::Display| {
            Failure::new(Status::Unreachable, format!("{server}: {error}"))
        };
        let unread = |error: std::io::Error| {
            if [ErrorKind::WouldBlock, ErrorKind::TimedOut].contains(&error.kind()) {
                let seconds = limit.as_secs();
                failed(&format_args!("no answer in time ({seconds} s){late}"))
            } else {
                failed(&error)
            }
        };
        self.socket.set_read_timeout(Some(limit)).map_err(|error| failed(&error))?;
        let stream = self.stream.get_mut();
        let sent = stream.write_all(request.as_bytes()).and_then(|()| stream.flush());
        sent.map_err(|error| failed(&error))?;
        let mut line = String::new();
        let read = (&mut self.stream).take(ANSWER_BYTES_MAX).read_line(&mut line);
        read.map_err(unread)?;
        match line.strip_suffix('\n') {
            Some(line) => Ok(line.trim_end_matches('\r').to_owned()),
            None => Err(failed(&"the connection ended before the answer")),
        }
    }
}

/// The server program: where it is said to be, beside this program, or where the shell would find it.
pub(crate) fn server_program(named: Option<&Path>) -> PathBuf {
    if let Some(path) = named {
        return path.to_owned();
    }
    let beside = std::env::current_exe().ok().map(|path| path.with_file_name("dflockd"));
    beside.filter(|path| path.is_file()).unwrap_or_else(|| PathBuf::from("dflockd"))
}

/// Runs the server program for its offline work, and ends as it ends.
pub(crate) fn run_server(program: &Path, args: &[String]) -> Result<Status, Failure> {
    let status = Command::new(program).args(args).status().map_err(|error| {
        let shown = program.display();
        let text = format!("can not run {shown}: {error}; name it with --dflockd");
        Failure::new(Status::NotFound, text)
    })?;
    Ok(if status.success() { Status::Ok } else { Status::No })
}
