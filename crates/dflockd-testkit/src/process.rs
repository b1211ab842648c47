//! Programs as processes: where they are, how they are started, what they say and how they end. Each is ended by its
//! own id when the test is done with it.

use std::ffi::OsStr;
use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime};

use parking_lot::Mutex;
use serde_json::Value;

use crate::line::Client;
use crate::ports::connect_narrow;
use crate::{A_WHILE, LIMIT, eventually, free_address, millis};

/// How long something may go on writing into the pipe of a process that has ended.
const LAST_WORDS: Duration = A_WHILE;

/// Where the server is.
static DFLOCKD: OnceLock<PathBuf> = OnceLock::new();

/// Takes this program as the server from the first start on, instead of the one beside the test.
pub fn set_dflockd(path: PathBuf) {
    DFLOCKD.set(path).expect("set before the server was looked for");
}

/// The server, beside the test. Cargo builds it for the tests of its own crate; for those of other crates it is built
/// here, if it is missing or older than its sources.
pub fn dflockd() -> &'static Path {
    DFLOCKD.get_or_init(|| {
        let sources = [
            "dflockd/src",
            "dflockd-core/src",
            "dflockd-engine/src",
            "dflockd-replica/src",
            "dflockd-wire/src",
        ];
        program("dflockd", &["-p", "dflockd"], &sources)
    })
}

/// An example of the client library, built if it is missing or older than its sources.
pub fn example(name: &str) -> PathBuf {
    let cargo = ["-p", "dflockd-client", "--example", name];
    program(&format!("examples/{name}"), &cargo, &["dflockd-client/src", "dflockd-client/examples"])
}

/// A program of this workspace in the profile of the test.
fn program(name: &str, cargo: &[&str], sources: &[&str]) -> PathBuf {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _one = ONE_AT_A_TIME.lock();
    let test = std::env::current_exe().unwrap();
    let built = test.parent().and_then(Path::parent).expect("tests are in a directory of cargo's");
    let path = built.join(name);
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let newest = sources.iter().map(|source| newest(&crates.join(source))).max().unwrap();
    let age = fs::metadata(&path).and_then(|it| it.modified());
    if age.is_ok_and(|built| built >= newest) {
        return path;
    }
    let mut command = Command::new(env!("CARGO"));
    command.current_dir(crates).arg("build").args(cargo).arg("--offline");
    if built.ends_with("release") {
        command.arg("--release");
    }
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    path
}

fn newest(path: &Path) -> SystemTime {
    if path.is_dir() {
        let entries = fs::read_dir(path).unwrap().map(|entry| newest(&entry.unwrap().path()));
        return entries.max().unwrap_or(SystemTime::UNIX_EPOCH);
    }
    fs::metadata(path).unwrap().modified().unwrap()
}

/// The server with some arguments, without the settings of whoever runs the tests.
pub fn command<S: AsRef<OsStr>>(args: &[S]) -> Command {
    let mut command = Command::new(dflockd());
    command.args(args);
    clean(&mut command);
    command
}

/// The server with some arguments, under a limit: what stands behind `ulimit` in a shell.
pub fn limited<S: AsRef<OsStr>>(limit: &str, args: &[S]) -> Command {
    let mut command = Command::new("/bin/sh");
    command.args(["-c", &format!("ulimit {limit} && exec \"$0\" \"$@\"")]);
    command.arg(dflockd()).args(args);
    clean(&mut command);
    command
}

/// Removes the settings of whoever runs the tests.
pub fn clean(command: &mut Command) {
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("DFLOCKD_") || name == "NOTIFY_SOCKET" {
            command.env_remove(name);
        }
    }
}

/// Runs a command that ends by itself, without input. One that does not is ended, and that is a failure.
#[track_caller]
pub fn run(command: Command) -> Ran {
    Process::spawn(command).finish()
}

/// Sends a signal, by its name without `SIG`.
#[track_caller]
pub fn signal(pid: u32, name: &str) {
    let status = Command::new("/bin/kill").args([format!("-{name}"), pid.to_string()]).status();
    assert!(status.expect("kill exists").success(), "kill -{name}");
}

/// Whether a process runs.
pub fn is_alive(pid: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
}

/// How a command ended.
#[derive(Debug)]
pub struct Ran {
    program: String,
    /// Its exit status.
    pub code: i32,
    /// Its standard output.
    pub out: String,
    /// Its standard error.
    pub err: String,
}

impl Ran {
    /// That it failed with one line of its own that has this text.
    #[track_caller]
    pub fn refused(self, code: i32, text: &str) {
        assert_eq!(self.code, code, "{self:?}");
        assert_eq!(self.err.lines().count(), 1, "{self:?}");
        let begin = format!("{}: ", self.program);
        assert!(self.err.starts_with(&begin) && self.err.contains(text), "{self:?}");
    }

    /// That it ended with this status.
    #[track_caller]
    pub fn expect(self, code: i32) -> Self {
        assert_eq!(self.code, code, "{self:?}");
        self
    }

    /// Its standard output, which must be JSON.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// That all of this is in its standard error.
    #[track_caller]
    pub fn complains(self, parts: &[&str]) -> Self {
        for part in parts {
            assert!(self.err.contains(part), "{part:?} is not in {self:?}");
        }
        self
    }
}

/// Ends a child, by its own id.
#[derive(Debug)]
pub struct Reaper(pub Child);

impl Drop for Reaper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What a process prints, kept for as long as it prints.
type Output = Arc<Mutex<Vec<u8>>>;

fn collect(mut stream: impl Read + Send + 'static, output: &Output) -> JoinHandle<()> {
    let output = Arc::clone(output);
    thread::spawn(move || {
        let mut bytes = [0; 4096];
        while let Ok(count @ 1..) = stream.read(&mut bytes) {
            output.lock().extend_from_slice(&bytes[..count]);
        }
    })
}

fn text_of(output: &Output) -> String {
    String::from_utf8_lossy(&output.lock()).into_owned()
}

/// A process that runs, or did.
#[derive(Debug)]
pub struct Process {
    program: String,
    child: Reaper,
    out: Output,
    err: Output,
    readers: [JoinHandle<()>; 2],
}

impl Process {
    /// Starts a command with pipes for its input and its output.
    #[track_caller]
    pub fn spawn(mut command: Command) -> Self {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let program = Path::new(command.get_program()).file_name().unwrap();
        let program = program.to_string_lossy().into_owned();
        let mut child = Reaper(child);
        let (out, err) = (Output::default(), Output::default());
        let readers = [
            collect(child.0.stdout.take().expect("piped"), &out),
            collect(child.0.stderr.take().expect("piped"), &err),
        ];
        Self { program, child, out, err, readers }
    }

    /// Its id.
    pub fn pid(&self) -> u32 {
        self.child.0.id()
    }

    /// Its standard output so far.
    pub fn out(&self) -> String {
        text_of(&self.out)
    }

    /// Its standard error so far.
    pub fn err(&self) -> String {
        text_of(&self.err)
    }

    /// Everything it has printed: standard output, then standard error.
    pub fn output(&self) -> String {
        self.out() + &self.err()
    }

    /// Waits until it has printed a text.
    #[track_caller]
    pub fn wait_for_output(&self, text: &str) {
        eventually(text, || self.output().contains(text));
    }

    /// Waits for a text in its standard output.
    #[track_caller]
    pub fn wait_for_out(&self, text: &str) {
        eventually(text, || self.out().contains(text));
    }

    /// Waits for a text in its standard error.
    #[track_caller]
    pub fn wait_for_err(&self, text: &str) {
        eventually(text, || self.err().contains(text));
    }

    /// Writes to its standard input.
    pub fn write(&mut self, bytes: &[u8]) {
        self.child.0.stdin.as_mut().expect("piped").write_all(bytes).unwrap();
    }

    /// Ends its standard input.
    pub fn close_input(&mut self) {
        self.child.0.stdin = None;
    }

    /// Sends a signal, by its name without `SIG`.
    #[track_caller]
    pub fn signal(&self, name: &str) {
        signal(self.pid(), name);
    }

    /// How it ended, if it did.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.0.try_wait().expect("it is our child")
    }

    /// Whether it runs.
    pub fn is_running(&mut self) -> bool {
        self.ended().is_none()
    }

    /// Whether all who could write to its output have ended: itself, and what it started.
    pub fn is_silent(&self) -> bool {
        self.readers.iter().all(JoinHandle::is_finished)
    }

    /// Ends it as an operator would, in good order.
    #[track_caller]
    pub fn terminate(&mut self) {
        self.signal("TERM");
        let status = self.wait_for_end();
        assert!(status.success(), "{status}: {}", self.output());
    }

    /// Waits until it has ended and said its last words.
    #[track_caller]
    pub fn wait_for_end(&mut self) -> ExitStatus {
        let begun = Instant::now();
        let status = loop {
            if let Some(status) = self.ended() {
                break status;
            }
            assert!(begun.elapsed() < LIMIT, "it does not end: {}", self.output());
            thread::sleep(millis(5));
        };
        // Something it started may have its pipes for longer.
        let ended = Instant::now();
        while !self.is_silent() && ended.elapsed() < LAST_WORDS {
            thread::sleep(millis(1));
        }
        status
    }

    /// Waits until it has ended, and everything that has its pipes.
    #[track_caller]
    pub fn end(mut self) -> Ran {
        let status = self.wait_for_end();
        let code = status.code().unwrap_or_else(|| panic!("{status}: {}", self.err()));
        eventually("the output ends", || self.is_silent());
        let (out, err) = (self.out(), self.err());
        Ran { program: self.program, code, out, err }
    }

    /// Closes the standard input, then waits until the program has ended and everything that has its pipes.
    #[track_caller]
    pub fn finish(mut self) -> Ran {
        self.close_input();
        self.end()
    }

    /// Ends it as a crash would.
    pub fn kill(self) {
        drop(self);
    }

    /// Its resident memory in KiB.
    pub fn resident_kib(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }

    /// That it has less than so many KiB more memory than it had before.
    #[track_caller]
    pub fn check_growth(&self, before: u64, most: u64) {
        let growth = self.resident_kib().saturating_sub(before);
        assert!(growth < most, "{growth} KiB");
    }

    /// The processor time it has used.
    pub fn cpu_time(&self) -> Duration {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid())).expect("it runs");
        let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
        // Those of its own and of the kernel for it, in hundredths of a second.
        let ticks: u64 =
            fields.skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum();
        millis(ticks * 10)
    }
}

/// A server that listens.
#[derive(Debug)]
pub struct Server {
    process: Process,
    /// Where it speaks the line protocol.
    pub address: SocketAddr,
    /// When it was started.
    pub begun_at: Instant,
}

impl Deref for Server {
    type Target = Process;

    fn deref(&self) -> &Process {
        &self.process
    }
}

impl DerefMut for Server {
    fn deref_mut(&mut self) -> &mut Process {
        &mut self.process
    }
}

impl Server {
    /// A server on a free port of the loopback interface.
    #[track_caller]
    pub fn start<S: AsRef<OsStr>>(args: &[S]) -> Self {
        Self::launch(command(args))
    }

    /// A server on this port.
    #[track_caller]
    pub fn start_at<S: AsRef<OsStr>>(port: u16, args: &[S]) -> Self {
        let mut command = command(args);
        command.args(["--port", &port.to_string()]);
        Self::launch(command)
    }

    /// A server with another API, whose port a flag names. The system cannot choose that one: 0 means that there is
    /// no such API.
    #[track_caller]
    pub fn start_with_api<S: AsRef<OsStr>>(flag: &str, args: &[S]) -> (Self, SocketAddr) {
        let begun = Instant::now();
        loop {
            let address = free_address();
            let mut command = command(args);
            command.args([flag, &address.port().to_string()]);
            match Self::try_launch(command) {
                Ok(server) => {
                    server.wait_for_output(&format!(":{} ", address.port()));
                    return (server, address);
                }
                // Somebody else may have the port now.
                Err(error) => {
                    let taken = error.to_lowercase().contains("in use");
                    assert!(taken && begun.elapsed() < LIMIT, "{error}");
                }
            }
        }
    }

    /// Starts a command that must end up as a server.
    #[track_caller]
    pub fn launch(command: Command) -> Self {
        Self::try_launch(command).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Starts a command that may end up as a server, on a free port if it names none; the error says how it ended
    /// otherwise.
    #[track_caller]
    pub fn try_launch(mut command: Command) -> Result<Self, String> {
        let begun_at = Instant::now();
        if !command.get_args().any(|arg| arg == "--port") {
            command.args(["--port", "0"]);
        }
        let mut process = Process::spawn(command);
        let address = eventually("the server listens", || {
            if let Some(status) = process.ended() {
                process.wait_for_end();
                return Some(Err(format!("the server ended with {status}: {}", process.output())));
            }
            let text = process.output();
            let (_, rest) = text.split_once("msg=\"listening\" addr=")?;
            let (address, _) = rest.split_once([' ', '\n'])?;
            let mut address: SocketAddr = address.parse().expect("an address is logged");
            if !matches!(address, SocketAddr::V4(v4) if v4.ip().is_loopback()) {
                address.set_ip(Ipv4Addr::LOCALHOST.into());
            }
            Some(Ok(address))
        });
        Ok(Self { process, address: address?, begun_at })
    }

    /// Ends it as a crash would; gives its port, which is free again.
    pub fn kill(self) -> u16 {
        self.process.kill();
        self.address.port()
    }

    /// A client of the line protocol.
    pub fn connect(&self) -> Client {
        Client::over(self.socket())
    }

    /// A client that has shown a token that is good.
    #[track_caller]
    pub fn login(&self, token: &str) -> Client {
        let mut client = self.connect();
        client.check("auth", "_", token, "ok");
        client
    }

    /// A bare socket.
    pub fn socket(&self) -> TcpStream {
        let socket = TcpStream::connect(self.address).expect("the server listens");
        socket.set_nodelay(true).unwrap();
        socket.set_read_timeout(Some(LIMIT)).unwrap();
        socket
    }

    /// A socket with small buffers, which is soon full if nobody reads.
    pub fn narrow_socket(&self) -> TcpStream {
        connect_narrow(self.address)
    }
}
