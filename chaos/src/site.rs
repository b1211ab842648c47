//! The processes of a run: members, the network between them, their disks, their last words.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::net::SocketAddr;
use std::os::unix::process::ExitStatusExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use dflockd_testkit::brake::Brake;
use dflockd_testkit::cluster::{Addresses, NAMES};
use dflockd_testkit::peers::Proxy;
use dflockd_testkit::{Client, Cluster, LIMIT, Node, Turn, free_addresses, millis};
use serde_json::{Value, json};

use crate::Broken;

/// What operators know.
pub const TOKEN: &str = "an-admin-token-for-chaos";
/// Flags of all members. Few entries between two snapshots, so that there are many.
const FLAGS: [&str; 6] =
    ["--admin-token", TOKEN, "--snapshot-entries", "200", "--shutdown-timeout", "5"];
/// How long members may take to serve again when nothing is broken any more.
const READY: Duration = Duration::from_secs(60);
/// What no member says, but for one that is removed.
const COMPLAINTS: [&str; 2] = ["level=ERROR", "panicked"];
/// How long an operator waits for an answer.
const OPERATOR: Duration = Duration::from_secs(10);
/// Memory that no member may need for this load.
const MEMORY_KIB_MAX: u64 = 512 * 1024;
/// Descriptors that no member may need for this load.
const FILES_MAX: usize = 400;

/// All members and what is around them. The members that run are `cluster.nodes`, in no order.
pub struct Site {
    /// The members.
    pub cluster: Cluster,
    proxy: Proxy,
    brakes: Vec<Brake>,
    /// Members so far: the number of the next one.
    made: usize,
    flags: Vec<String>,
    /// Processes started so far.
    pub starts: u64,
    /// The most memory that a member had, in KiB.
    pub memory_kib: u64,
    /// The most descriptors that a member had.
    pub files: usize,
    /// The most descriptors that a member had when nothing was broken and most clients were gone.
    pub files_at_rest: usize,
}

impl Site {
    /// A cluster that serves.
    pub fn start(size: usize, election_ms: u64) -> Result<Self, Broken> {
        let election = election_ms.to_string();
        let mut flags: Vec<_> = FLAGS.iter().map(ToString::to_string).collect();
        flags.extend(["--election-timeout-ms".to_owned(), election]);
        let mut addresses = Addresses::free(size);
        let proxy = Proxy::between(&mut addresses);
        let given: Vec<_> = flags.iter().map(String::as_str).collect();
        let mut cluster = Cluster::prepare_at(Turn::free(), &addresses, &given);
        let dir = &cluster.dir;
        let brakes = cluster.nodes.iter_mut().map(|node| Brake::fit(node, dir)).collect();
        let mut site = Self {
            cluster,
            proxy,
            brakes,
            made: size,
            flags,
            starts: 0,
            memory_kib: 0,
            files: 0,
            files_at_rest: 0,
        };
        (0..size).for_each(|at| site.begin(at));
        site.wait_until_ready()?;
        Ok(site)
    }

    /// How many members there are.
    pub fn size(&self) -> usize {
        self.cluster.nodes.len()
    }

    /// Where members speak the line protocol.
    pub fn servers(&self) -> Vec<SocketAddr> {
        self.cluster.clients()
    }

    /// Where the data directories are.
    pub fn dir(&self) -> PathBuf {
        self.cluster.dir.path("")
    }

    /// Who leads, if anybody says so soon.
    pub fn leader(&self) -> Option<usize> {
        let until = Instant::now() + Duration::from_secs(2);
        while Instant::now() < until {
            if let Some(at) = (0..self.size()).find(|&at| self.cluster.nodes[at].leads()) {
                return Some(at);
            }
            thread::sleep(millis(20));
        }
        None
    }

    /// Whether a member runs.
    pub fn runs(&self, at: usize) -> bool {
        self.cluster.nodes[at].process.is_some()
    }

    /// Starts a member that does not run.
    pub fn begin(&mut self, at: usize) {
        if !self.runs(at) {
            self.cluster.nodes[at].start();
            self.starts += 1;
        }
    }

    /// Ends a member as a crash would.
    pub fn kill(&mut self, at: usize) -> Result<(), Broken> {
        self.check_process(at)?;
        let Some(mut process) = self.cluster.nodes[at].process.take() else { return Ok(()) };
        process.signal("KILL");
        process.wait_for_end();
        self.bury(at, &process.output())
    }

    /// Ends a member as an operator would. It may wait for its clients.
    pub fn terminate(&mut self, at: usize) -> Result<(), Broken> {
        self.check_process(at)?;
        let Some(mut process) = self.cluster.nodes[at].process.take() else { return Ok(()) };
        process.signal("TERM");
        let begun = Instant::now();
        while process.is_running() && begun.elapsed() < LIMIT {
            thread::sleep(millis(10));
        }
        if process.is_running() {
            process.signal("KILL");
            process.wait_for_end();
            self.bury(at, &process.output())?;
            return Err(Broken::new("a member does not end within 30 s of SIGTERM"));
        }
        let status = process.wait_for_end();
        self.bury(at, &process.output())?;
        // One that has just begun does not know the signal yet.
        let is_early = status.signal() == Some(15) && !process.output().contains("listening");
        if !status.success() && !is_early {
            return Err(Broken::new(format!("a member ended with {status} after SIGTERM")));
        }
        Ok(())
    }

    /// Sends a signal to a member.
    pub fn signal(&mut self, at: usize, name: &str) {
        if let Some(process) = &mut self.cluster.nodes[at].process
            && process.is_running()
        {
            process.signal(name);
        }
    }

    /// Keeps what a member has said, and looks whether it has complained.
    fn bury(&self, at: usize, output: &str) -> Result<(), Broken> {
        let name = &self.cluster.nodes[at].name;
        let path = self.cluster.dir.path(&format!("{name}.log"));
        let file = OpenOptions::new().create(true).append(true).open(path);
        file.and_then(|mut file| file.write_all(output.as_bytes())).map_err(Broken::harness)?;
        let is_error = |line: &&str| COMPLAINTS.iter().any(|word| line.contains(word));
        let removed = |line: &&str| line.contains("removed");
        match output.lines().filter(|line| !removed(line)).find(is_error) {
            Some(line) => Err(Broken::new(format!("{name} says {line}"))),
            None => Ok(()),
        }
    }

    /// That a member that should run does.
    fn check_process(&mut self, at: usize) -> Result<(), Broken> {
        let Some(process) = &mut self.cluster.nodes[at].process else { return Ok(()) };
        let Some(status) = process.ended() else { return Ok(()) };
        process.wait_for_end();
        let output = process.output();
        let last: Vec<_> = output.lines().rev().take(5).collect();
        let what = format!("{} ended by itself: {status}: {last:#?}", self.cluster.nodes[at].name);
        self.bury(at, &output)?;
        Err(Broken::new(what))
    }

    /// That all members run, within bounds, and have not complained.
    pub fn check_processes(&mut self, at_rest: bool) -> Result<(), Broken> {
        for at in 0..self.size() {
            self.check_process(at)?;
            let Some(process) = &self.cluster.nodes[at].process else { continue };
            let output = process.output();
            let name = self.cluster.nodes[at].name.clone();
            if let Some(line) =
                output.lines().find(|line| COMPLAINTS.iter().any(|word| line.contains(word)))
            {
                return Err(Broken::new(format!("{name} says {line}")));
            }
            let memory = process.resident_kib();
            let files = std::fs::read_dir(format!("/proc/{}/fd", process.pid()));
            // A child that has just been made still has the descriptors of this process, which are many with five
            // nodes, until its program runs; before that it says nothing.
            let files = if output.is_empty() { 0 } else { files.map_err(Broken::harness)?.count() };
            self.memory_kib = self.memory_kib.max(memory);
            self.files = self.files.max(files);
            if at_rest {
                self.files_at_rest = self.files_at_rest.max(files);
            }
            if memory > MEMORY_KIB_MAX || files > FILES_MAX {
                let what = format!("48: {name} has {memory} KiB and {files} descriptors");
                return Err(Broken::new(what));
            }
        }
        Ok(())
    }

    /// The place of a member on the network between them.
    fn slot(&self, at: usize) -> usize {
        let name = &self.cluster.nodes[at].name;
        NAMES.iter().position(|known| known == name).unwrap_or(0)
    }

    /// Nothing gets from one member to another.
    pub fn cut(&self, from: usize, to: usize) {
        self.proxy.cut(self.slot(from), self.slot(to));
    }

    /// What one member sends to another is late.
    pub fn delay(&self, from: usize, to: usize, by: Duration) {
        self.proxy.delay(self.slot(from), self.slot(to), by);
    }

    /// Syncs of a member are slow.
    pub fn brake(&self, at: usize, by: Duration) {
        self.brakes[at].set(by);
    }

    /// Network and disks are as they should be.
    pub fn mend(&self) {
        self.proxy.heal();
        self.brakes.iter().for_each(Brake::release);
    }

    /// Everything is as it should be, and all members serve.
    pub fn heal(&mut self) -> Result<(), Broken> {
        self.mend();
        for at in 0..self.size() {
            self.signal(at, "CONT");
            self.check_process(at)?;
            self.begin(at);
        }
        self.wait_until_ready()
    }

    /// Waits until all members serve.
    pub fn wait_until_ready(&mut self) -> Result<(), Broken> {
        let begun = Instant::now();
        for at in 0..self.size() {
            while !self.cluster.nodes[at].is_ready() {
                self.check_process(at)?;
                if begun.elapsed() > READY {
                    let node = &self.cluster.nodes[at];
                    let what = format!("43: {} is not ready: {:?}", node.name, node.status());
                    return Err(Broken::new(what));
                }
                thread::sleep(millis(20));
            }
        }
        Ok(())
    }

    /// Waits until all members have the same state.
    pub fn wait_until_equal(&self) -> Result<(), Broken> {
        catch_unwind(AssertUnwindSafe(|| self.cluster.wait_until_equal())).map_err(|panic| {
            let what = panic.downcast::<String>().map(|what| *what).unwrap_or_default();
            Broken::new(format!("36: {what}"))
        })
    }

    /// What a member says to an operator, if it says anything.
    pub fn operate(&self, at: usize, verb: &str, mut wanted: Value) -> Option<Value> {
        wanted["reason"] = "chaos".into();
        let mut client = Client::connect(self.cluster.nodes[at].client).ok()?;
        let heard = client.try_ask("cluster", verb, &format!("{TOKEN} {wanted}"), OPERATOR);
        serde_json::from_str(heard.line()?.strip_prefix("ok ")?).ok()
    }

    /// A whole backup of a member: how many bytes, none if it could not be had.
    pub fn backup(&self, at: usize) -> Result<Option<usize>, Broken> {
        let Ok(mut client) = Client::connect(self.cluster.nodes[at].client) else {
            return Ok(None);
        };
        let mut ask = |wanted: Value| -> Option<Value> {
            let heard = client.try_ask("cluster", "backup", &format!("{TOKEN} {wanted}"), LIMIT);
            serde_json::from_str(heard.line()?.strip_prefix("ok ")?).ok()
        };
        let Some(begun) = ask(json!({ "reason": "chaos" })) else { return Ok(None) };
        let Some(total) = begun["bytes"].as_u64() else { return Ok(None) };
        let mut count = 0;
        while (count as u64) < total {
            let Some(piece) = ask(json!({ "offset": count })) else { return Ok(None) };
            match piece["data"].as_str() {
                Some(data) if !data.is_empty() => count += data.len() / 2,
                Some(_) | None => {
                    return Err(Broken::new(format!(
                        "a backup ends at {count} of {total}: {piece}"
                    )));
                }
            }
        }
        Ok((count as u64 == total).then_some(count))
    }

    /// Puts a new member in the place of another. Whether there was a name left for it.
    pub fn replace(&mut self, old: usize, via: usize) -> Result<bool, Broken> {
        if self.made == NAMES.len() {
            return Ok(false);
        }
        let (name, slot) = (NAMES[self.made], self.made);
        self.made += 1;
        let free = free_addresses(self.cluster.nodes[0].client.ip(), 2);
        let dialed = self.proxy.in_front_of(slot, free[1]);
        let dir = self.cluster.dir.path(name);
        let mut node = Node::new(name, free[0], free[1], dir, &self.flags);
        self.brakes.push(Brake::fit(&mut node, &self.cluster.dir));
        self.cluster.nodes.push(node);
        let new = self.size() - 1;
        self.begin(new);
        let member = json!({
            "node": name, "peer_addr": dialed.to_string(), "client_addr": free[0].to_string(),
        });
        self.insist(via, "add", &member)?;
        self.insist(via, "promote", &json!({ "node": name }))?;
        let gone = self.cluster.nodes[old].name.clone();
        self.insist(via, "remove", &json!({ "node": gone }))?;
        let begun = Instant::now();
        while self.cluster.nodes[old].process().is_running() {
            if begun.elapsed() > LIMIT {
                return Err(Broken::new(format!("41: {gone} was removed and does not end")));
            }
            thread::sleep(millis(20));
        }
        let process = self.cluster.nodes[old].process.take();
        if let Some(mut process) = process {
            process.wait_for_end();
            self.bury(old, &process.output())?;
        }
        self.cluster.nodes.remove(old);
        self.brakes.remove(old);
        Ok(true)
    }

    /// Asks until it is done.
    fn insist(&self, via: usize, verb: &str, wanted: &Value) -> Result<(), Broken> {
        let begun = Instant::now();
        loop {
            let answer = self.operate(via, verb, wanted.clone());
            let why = match &answer {
                Some(answer) if answer["done"] == true => return Ok(()),
                Some(answer) => answer["why"].as_str().unwrap_or_default().to_owned(),
                None => "no answer".to_owned(),
            };
            // It was done although its first answer was lost.
            if verb == "remove" && why.contains("no member has the id") {
                return Ok(());
            }
            if begun.elapsed() > READY {
                return Err(Broken::new(format!("41: {verb} {wanted}: {why}")));
            }
            thread::sleep(millis(100));
        }
    }

    /// Ends all members. Their directories stay if that is wanted.
    pub fn finish(mut self, keep: bool) -> Result<(), Broken> {
        let ended: Result<Vec<()>, _> = (0..self.size())
            .map(|at| {
                self.signal(at, "CONT");
                self.kill(at)
            })
            .collect();
        for at in 0..self.size() {
            self.cluster.nodes[at].process = None;
        }
        if keep {
            // Its end would remove them.
            std::mem::forget(self.cluster);
        }
        ended.map(drop)
    }
}
