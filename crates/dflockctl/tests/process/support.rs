//! Servers, command lines, and waiting for what they do.

use std::ffi::OsStr;
use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

pub(super) const EXE: &str = env!("CARGO_BIN_EXE_dflockctl");

/// How long anything may take that is bound to happen. Generous: the machine may be busy.
pub(super) const LIMIT: Duration = Duration::from_secs(40);

/// Asks again and again until there is an answer.
#[track_caller]
pub(super) fn eventually<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(begun.elapsed() < LIMIT, "waited in vain for: {what}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// The server beside `dflockctl`, built if it is not there.
pub(super) fn server_exe() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| {
        let path = Path::new(EXE).with_file_name("dflockd");
        if !path.exists() {
            let mut build = Command::new(env!("CARGO"));
            build.args(["build", "-p", "dflockd", "--bin", "dflockd"]);
            build.current_dir(env!("CARGO_MANIFEST_DIR"));
            if path.parent().is_some_and(|directory| directory.ends_with("release")) {
                build.arg("--release");
            }
            assert!(build.status().expect("cargo runs").success());
        }
        path
    })
}

fn clean(command: &mut Command) {
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("DFLOCKD_") {
            command.env_remove(name);
        }
    }
}

/// Ends a child, by its own id.
pub(super) struct Reaper(pub(super) Child);

impl Drop for Reaper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A running server.
pub(super) struct Server {
    child: Reaper,
    pub(super) address: SocketAddr,
}

impl Server {
    pub(super) fn start(args: &[&str]) -> Self {
        Self::start_at(0, args)
    }

    pub(super) fn start_at(port: u16, args: &[&str]) -> Self {
        Self::start_with(port, args, None)
    }

    /// The same with a variable in its environment.
    pub(super) fn start_with(port: u16, args: &[&str], variable: Option<(&str, &str)>) -> Self {
        let mut command = Command::new(server_exe());
        clean(&mut command);
        command.envs(variable);
        let port = port.to_string();
        command.args(["--port", &port]).args(args).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = Reaper(command.stderr(Stdio::piped()).spawn().expect("the server exists"));
        let output = Arc::default();
        collect(child.0.stdout.take().expect("piped"), Arc::clone(&output));
        collect(child.0.stderr.take().expect("piped"), Arc::clone(&output));
        let address = eventually("the server listens", || {
            let text = text_of(&output);
            let ended = child.0.try_wait().expect("it is our child");
            assert!(ended.is_none(), "the server ended: {text}");
            let (_, rest) = text.split_once("msg=\"listening\" addr=")?;
            let (address, _) = rest.split_once([' ', '\n'])?;
            let address: SocketAddr = address.parse().expect("an address is logged");
            Some(SocketAddr::from(([127, 0, 0, 1], address.port())))
        });
        Self { child, address }
    }

    /// Ends it as a crash would.
    pub(super) fn kill(mut self) -> u16 {
        self.child.0.kill().expect("it is our child");
        self.child.0.wait().expect("it is our child");
        self.address.port()
    }

    /// The command line, for this server.
    pub(super) fn ctl<S: AsRef<OsStr>>(&self, args: &[S]) -> Ctl {
        ctl(args).env("DFLOCKD_SERVERS", &self.address.to_string())
    }

    /// Its output, which must be JSON.
    #[track_caller]
    pub(super) fn json(&self, args: &[&str]) -> Value {
        let ran = self.ctl(args).run();
        serde_json::from_str(&ran.out).unwrap_or_else(|error| panic!("{error}: {ran:?}"))
    }

    /// What is known of a lock.
    #[track_caller]
    pub(super) fn shown(&self, key: &str) -> Value {
        self.json(&["show", key, "--json"])
    }

    #[track_caller]
    pub(super) fn wait_for_holders(&self, key: &str, count: u64) {
        eventually(&format!("{count} holders"), || {
            let holders = self.shown(key)["holders_total"].as_u64().unwrap_or_default();
            (holders == count).then_some(())
        });
    }

    #[track_caller]
    pub(super) fn wait_for_waiters(&self, key: &str, count: u64) {
        eventually(&format!("{count} waiters"), || {
            let waiters = self.shown(key)["waiters"].as_u64().unwrap_or_default();
            (waiters == count).then_some(())
        });
    }
}

/// A command line to run.
pub(super) struct Ctl(Command);

/// The command line without the settings of whoever runs the tests.
pub(super) fn ctl<S: AsRef<OsStr>>(args: &[S]) -> Ctl {
    let mut command = Command::new(EXE);
    clean(&mut command);
    command.args(args).env("HOME", "/nonexistent").env_remove("XDG_CONFIG_HOME");
    Ctl(command)
}

/// How a command ended.
#[derive(Debug)]
pub(super) struct Ran {
    pub(super) code: i32,
    pub(super) out: String,
    pub(super) err: String,
}

impl Ran {
    #[track_caller]
    pub(super) fn expect(self, code: i32) -> Self {
        assert_eq!(self.code, code, "{self:?}");
        self
    }

    /// That it failed with one line that has this text.
    #[track_caller]
    pub(super) fn refused(self, code: i32, text: &str) {
        assert_eq!(self.code, code, "{self:?}");
        assert_eq!(self.err.lines().count(), 1, "{self:?}");
        assert!(self.err.starts_with("dflockctl: ") && self.err.contains(text), "{self:?}");
    }
}

impl Ctl {
    pub(super) fn env(mut self, name: &str, value: &str) -> Self {
        self.0.env(name, value);
        self
    }

    pub(super) fn run(self) -> Ran {
        self.spawn().end()
    }

    pub(super) fn spawn(mut self) -> Running {
        let command = self.0.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = Reaper(command.spawn().expect("the binary exists"));
        let (out, err) = (Arc::default(), Arc::default());
        let readers = vec![
            collect(child.0.stdout.take().expect("piped"), Arc::clone(&out)),
            collect(child.0.stderr.take().expect("piped"), Arc::clone(&err)),
        ];
        Running { child, out, err, readers }
    }
}

/// A command that runs.
pub(super) struct Running {
    child: Reaper,
    out: Arc<Mutex<Vec<u8>>>,
    err: Arc<Mutex<Vec<u8>>>,
    readers: Vec<thread::JoinHandle<()>>,
}

impl Running {
    /// A command of another kind, as one that runs.
    pub(super) fn of(command: Command) -> Self {
        Ctl(command).spawn()
    }

    #[track_caller]
    pub(super) fn signal(&self, name: &str) {
        signal(self.child.0.id(), name);
    }

    pub(super) fn id(&self) -> u32 {
        self.child.0.id()
    }

    pub(super) fn write(&mut self, bytes: &[u8]) {
        self.child.0.stdin.as_mut().expect("piped").write_all(bytes).unwrap();
    }

    /// Tells a program that reads its input to go on.
    pub(super) fn close_input(&mut self) {
        self.child.0.stdin = None;
    }

    pub(super) fn output(&self) -> String {
        text_of(&self.out)
    }

    /// Whether all who could write have ended.
    pub(super) fn is_ended(&self) -> bool {
        self.readers.iter().all(|reader| reader.is_finished())
    }

    #[track_caller]
    pub(super) fn wait_for_output(&self, text: &str) {
        eventually(text, || text_of(&self.out).contains(text).then_some(()));
    }

    #[track_caller]
    pub(super) fn wait_for_errors(&self, text: &str) {
        eventually(text, || text_of(&self.err).contains(text).then_some(()));
    }

    #[track_caller]
    pub(super) fn wait_for_end(&mut self) -> ExitStatus {
        eventually("the command ends", || self.child.0.try_wait().expect("it is our child"))
    }

    #[track_caller]
    pub(super) fn end(mut self) -> Ran {
        let status = self.wait_for_end();
        let code = status.code().unwrap_or_else(|| panic!("{status}: {}", text_of(&self.err)));
        // Something it started may still have the pipe.
        let readers = std::mem::take(&mut self.readers);
        eventually("the output ends", || readers.iter().all(|it| it.is_finished()).then_some(()));
        Ran { code, out: text_of(&self.out), err: text_of(&self.err) }
    }
}

#[track_caller]
pub(super) fn signal(id: u32, name: &str) {
    let status = Command::new("/bin/kill")
        .args([format!("-{name}"), id.to_string()])
        .status()
        .expect("kill exists");
    assert!(status.success(), "kill -{name}");
}

/// Whether a process runs.
pub(super) fn is_alive(id: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", id.trim())).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
}

fn text_of(output: &Mutex<Vec<u8>>) -> String {
    String::from_utf8_lossy(&output.lock().unwrap()).into_owned()
}

fn collect(
    mut stream: impl Read + Send + 'static,
    output: Arc<Mutex<Vec<u8>>>,
) -> thread::JoinHandle<()> {
    thread::spawn(move || {
        let mut bytes = [0; 4096];
        while let Ok(count @ 1..) = stream.read(&mut bytes) {
            output.lock().unwrap().extend_from_slice(&bytes[..count]);
        }
    })
}

/// A directory that is removed at the end.
pub(super) struct Dir(PathBuf);

impl Dir {
    pub(super) fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path =
            std::env::temp_dir().join(format!("dflockctl-test-{}-{number}", std::process::id()));
        fs::create_dir(&path).unwrap();
        Self(path)
    }

    pub(super) fn name(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_owned()
    }

    pub(super) fn write(&self, name: &str, content: &str) -> String {
        let path = self.0.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
        self.name(name)
    }

    /// What is in a file; nothing if there is none.
    pub(super) fn read(&self, name: &str) -> String {
        fs::read_to_string(self.0.join(name)).unwrap_or_default()
    }

    #[track_caller]
    pub(super) fn wait_for(&self, name: &str, text: &str) {
        eventually(&format!("{text:?} in {name}"), || self.read(name).contains(text).then_some(()));
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A wire to a server that can be cut.
pub(super) struct Wire {
    pub(super) address: SocketAddr,
    ends: Arc<Mutex<Vec<TcpStream>>>,
}

impl Wire {
    pub(super) fn to(server: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let ends: Arc<Mutex<Vec<TcpStream>>> = Arc::default();
        let kept = Arc::clone(&ends);
        thread::spawn(move || {
            for near in listener.incoming() {
                let (Ok(near), Ok(far)) = (near, TcpStream::connect(server)) else { return };
                let clone = |stream: &TcpStream| stream.try_clone().unwrap();
                kept.lock().unwrap().extend([clone(&near), clone(&far)]);
                for (mut from, mut to) in [(clone(&near), clone(&far)), (far, near)] {
                    thread::spawn(move || {
                        let _ = std::io::copy(&mut from, &mut to);
                        let _ = to.shutdown(Shutdown::Both);
                    });
                }
            }
        });
        Self { address, ends }
    }

    /// Breaks all connections; new ones can be made. Returns how many there were.
    pub(super) fn cut(&self) -> usize {
        let ends = std::mem::take(&mut *self.ends.lock().unwrap());
        for end in &ends {
            let _ = end.shutdown(Shutdown::Both);
        }
        ends.len() / 2
    }

    pub(super) fn connections(&self) -> usize {
        self.ends.lock().unwrap().len() / 2
    }
}
