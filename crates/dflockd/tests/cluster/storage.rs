//! What is on disk: restarts, damage, interrupted writes, full disks (GUARANTEES 35, 38, 40).

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use dflockd_testkit::dir::files;
use dflockd_testkit::line::ANSWER;
use dflockd_testkit::{Client, Cluster, Dir, Heard, Node, Turn, eventually, granted};

use super::load::{Ledger, Load};

/// Some of everything, and a check that it is all there.
struct Treasure {
    held: String,
    ledger: Ledger,
}

impl Treasure {
    fn bury(cluster: &Cluster, at: &[usize], writes: u64) -> Self {
        let mut client = cluster.connect(at[0]);
        let held = client.lock("treasure", "0 600");
        client.check("cset", "number", "-5", "ok");
        client.check("kset", "text", "some  text", "ok");
        // Without a word, so that its lock stays.
        client.reset();
        let servers: Vec<_> = at.iter().map(|&at| cluster.nodes[at].client).collect();
        let load = Load::start("t", 3, &servers);
        load.wait_for_more(writes);
        Self { held, ledger: load.stop() }
    }

    #[track_caller]
    fn check_all(&self, cluster: &Cluster) {
        cluster.nodes.iter().for_each(|node| self.check(&mut node.connect()));
        cluster.wait_until_equal();
    }

    #[track_caller]
    fn check(&self, client: &mut Client) {
        client.check("l", "treasure", "0", "timeout");
        client.check("n", "treasure", &format!("{} 600", self.held), "ok 600");
        client.check("get", "number", "", "ok -5");
        client.check("kget", "text", "", "ok some  text");
        self.ledger.check(client);
    }
}

fn index_of(node: &Node, field: &str) -> u64 {
    node.status().and_then(|status| status[field].as_u64()).unwrap_or(0)
}

#[test]
fn a_node_comes_back_from_its_log_and_from_a_snapshot() {
    for (entries, has_snapshot) in [("100000", false), ("50", true)] {
        let mut cluster = Cluster::start(3, &["--snapshot-entries", entries]);
        let treasure = Treasure::bury(&cluster, &[0, 1, 2], 300);
        if has_snapshot {
            for node in &cluster.nodes {
                eventually("a snapshot", || index_of(node, "snapshot_index") >= 50);
            }
        }
        for node in &mut cluster.nodes {
            node.terminate();
        }
        for node in &mut cluster.nodes {
            let is_snapshot = |file: &PathBuf| name_of(file).starts_with("snapshot-");
            assert!(files(&node.dir).iter().any(is_snapshot), "the state all begin with is one");
            node.start();
        }
        cluster.wait_until_ready();
        treasure.check_all(&cluster);
    }
}

#[test]
fn a_single_durable_node_comes_back() {
    let _turn = Turn::shared();
    let dir = Dir::new();
    let formation = ["--cluster-bootstrap", "--snapshot-entries=100"];
    let mut node = Node::anywhere("node-a", dir.path("a"), &formation);
    let begun = Instant::now();
    node.start_ready();
    assert!(begun.elapsed() < Duration::from_secs(3), "nobody to wait for: {:?}", begun.elapsed());
    let mut client = node.connect();
    let mut token = client.lock("lock", "0 600");
    client.reset();
    for round in 1..=3 {
        let load = Load::start(&format!("single-{round}"), 2, &[node.client]);
        load.wait_for_more(200);
        node.kill();
        node.start();
        load.wait_for_more(20);
        let ledger = load.stop();
        let mut client = node.connect();
        ledger.check(&mut client);
        client.check("l", "lock", "0", "timeout");
        client.check("r", "lock", &token, "ok");
        let next = client.lock("lock", "0 600");
        assert!(dflockd_testkit::fence(&next) > dflockd_testkit::fence(&token));
        token = next;
        client.reset();
    }
}

#[test]
fn a_node_that_was_away_gets_a_snapshot() {
    let mut cluster = Cluster::start(3, &["--snapshot-entries", "50"]);
    let leader = cluster.leader();
    let away = cluster.others(leader)[0];
    let there = cluster.others(away);
    let last = index_of(&cluster.nodes[away], "last_log_index");
    cluster.nodes[away].kill();
    let treasure = Treasure::bury(&cluster, &there, 600);
    for &at in &there {
        eventually("the log is cut", || {
            index_of(&cluster.nodes[at], "snapshot_index") > last + 100
        });
    }
    cluster.nodes[away].start_ready();
    cluster.wait_until_equal();
    treasure.check(&mut cluster.connect(away));
    // And it can go on from there, alone on its own disk.
    cluster.nodes[away].restart();
    treasure.check(&mut cluster.connect(away));
    // Its clients are served as before.
    let mut client = cluster.connect(away);
    client.lock_and_release("again", "0 5");
}

/// Where a file has its last byte that is not zero.
fn used(file: &Path) -> u64 {
    let bytes = fs::read(file).unwrap();
    bytes.iter().rposition(|byte| *byte != 0).map_or(0, |at| at as u64 + 1)
}

fn flip(file: &Path, offset: u64, mask: u8) {
    let file = OpenOptions::new().read(true).write(true).open(file).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).unwrap();
    file.write_all_at(&[byte[0] ^ mask], offset).unwrap();
}

/// Whether it runs and is ready, or has ended and what it said.
fn outcome(node: &mut Node) -> Result<(), String> {
    node.start();
    eventually("it is ready or ends", || {
        if node.process().ended().is_some() {
            let mut process = node.process.take().expect("it ran");
            process.wait_for_end();
            return Some(Err(process.output()));
        }
        node.is_ready().then_some(Ok(()))
    })
}

fn name_of(file: &Path) -> &str {
    file.file_name().unwrap().to_str().unwrap()
}

#[test]
fn flipped_bytes_are_noticed_or_harmless() {
    let mut cluster = Cluster::start(3, &["--snapshot-entries", "100"]);
    let leader = cluster.leader();
    let victim = cluster.others(leader)[0];
    let there = cluster.others(victim);
    let treasure = Treasure::bury(&cluster, &there, 250);
    cluster.wait_until_equal();
    cluster.nodes[victim].kill();
    let (mut refused, mut started) = (0, 0);
    let dir = cluster.nodes[victim].dir.clone();
    let kinds = ["LOCK", "cut", "log-", "reserve", "snapshot-"];
    for file in files(&dir) {
        assert!(kinds.iter().any(|kind| name_of(&file).starts_with(kind)), "{file:?} is new");
    }
    for kind in kinds {
        // Anew each time: a start that succeeds may replace a file.
        let newest = files(&dir).into_iter().rfind(|file| name_of(file).starts_with(kind));
        let Some(file) = newest else { continue };
        let len = fs::metadata(&file).unwrap().len();
        if len == 0 {
            continue;
        }
        let end = used(&file);
        let mut offsets = vec![0, 9, 13, 17, 33, 45, 60, 510, 511, 512, 513, 530, 700, 1023, 1024];
        offsets.extend([end / 3, end / 2, end.saturating_sub(300), end.saturating_sub(2)]);
        offsets.extend([end.saturating_sub(1), end + 100, len / 2, len - 1]);
        offsets.retain(|offset| *offset < len);
        offsets.sort_unstable();
        offsets.dedup();
        for (number, offset) in offsets.into_iter().enumerate() {
            if !file.exists() {
                // It went on without this one.
                break;
            }
            let mask = if number % 2 == 0 { 0x01 } else { 0xff };
            flip(&file, offset, mask);
            let before = fs::metadata(&file).unwrap().modified().unwrap();
            let what = format!("{} at {offset} of {len}, used {end}", name_of(&file));
            match outcome(&mut cluster.nodes[victim]) {
                Err(said) => {
                    refused += 1;
                    assert!(said.contains(name_of(&file)), "{what}: {said}");
                    let named = said.contains("byte ") || said.contains("format version");
                    assert!(named, "{what}: {said}");
                    let after = fs::metadata(&file).unwrap().modified().unwrap();
                    assert_eq!(before, after, "{what}: changed by a start that failed");
                    flip(&file, offset, mask);
                }
                Ok(()) => {
                    started += 1;
                    treasure.check(&mut cluster.connect(victim));
                    cluster.nodes[victim].kill();
                }
            }
        }
    }
    println!("{refused} flips were refused, {started} were harmless");
    assert!(refused > 10);
    for &at in &there {
        treasure.check(&mut cluster.connect(at));
    }
    // What was flipped back is as good as before.
    cluster.nodes[victim].start_ready();
    treasure.check(&mut cluster.connect(victim));
    cluster.wait_until_equal();
}

fn newest_segment(dir: &Path) -> PathBuf {
    let mut segments = files(dir);
    segments.retain(|file| name_of(file).starts_with("log-"));
    segments.pop().expect("there is a log")
}

#[test]
fn an_interrupted_write_at_the_end_is_cut_and_made_good() {
    let mut cluster = Cluster::start(3, &[]);
    let leader = cluster.leader();
    let victim = cluster.others(leader)[0];
    let there = cluster.others(victim);
    let treasure = Treasure::bury(&cluster, &there, 150);
    for way in ["begun", "zeroed", "half a sector"] {
        cluster.wait_until_equal();
        cluster.nodes[victim].kill();
        let segment = newest_segment(&cluster.nodes[victim].dir);
        let end = used(&segment);
        assert!(end.is_multiple_of(512) && end >= 1024, "{end}");
        let file = OpenOptions::new().read(true).write(true).open(&segment).unwrap();
        match way {
            // The next block, of which only the beginning got to the disk.
            "begun" => file.write_all_at(&[0xab; 300], end).unwrap(),
            // From here on the last one, which was acknowledged: the others have it.
            "zeroed" => file.write_all_at(&[0; 512], end - 512).unwrap(),
            _ => file.write_all_at(&[0; 300], end - 300).unwrap(),
        }
        drop(file);
        let came = outcome(&mut cluster.nodes[victim]);
        assert_eq!(came, Ok(()), "{way}");
        treasure.check(&mut cluster.connect(victim));
        cluster.wait_until_equal();
        cluster.connect(victim).check("incr", "torn", "0", "ok 0");
    }
    // A file that is shorter than it ever was is no interrupted write.
    cluster.nodes[victim].kill();
    let segment = newest_segment(&cluster.nodes[victim].dir);
    let end = used(&segment);
    OpenOptions::new().write(true).open(&segment).unwrap().set_len(end - 200).unwrap();
    let said = outcome(&mut cluster.nodes[victim]).unwrap_err();
    assert!(said.contains("the file ends here") && said.contains("under a new id"), "{said}");
}

#[test]
fn garbage_in_the_reserve_does_no_harm() {
    let mut cluster = Cluster::start(3, &["--max-value-bytes", "65536"]);
    let victim = cluster.follower();
    let reserve = cluster.nodes[victim].dir.join("reserve");
    eventually("the reserve", || {
        fs::metadata(&reserve).is_ok_and(|reserve| reserve.len() >= 16 << 20)
    });
    cluster.nodes[victim].kill();
    for offset in [3, 600, 5000, 1 << 20, (16 << 20) - 1] {
        flip(&reserve, offset, 0xff);
    }
    match outcome(&mut cluster.nodes[victim]) {
        // Fine as well, if it says why.
        Err(said) => assert!(said.contains("reserve"), "{said}"),
        Ok(()) => {
            let value = "v".repeat(60_000);
            let mut client = cluster.connect(victim);
            for number in 0..600 {
                client.check("kset", &format!("k{}", number % 5), &value, "ok");
            }
            cluster.nodes[victim].kill();
            let came = outcome(&mut cluster.nodes[victim]);
            assert_eq!(came, Ok(()), "the next segment was made of garbage");
            cluster.connect(victim).check("kget", "k1", "", &format!("ok {value}"));
        }
    }
    cluster.wait_until_equal();
}

#[test]
fn a_data_directory_has_one_owner() {
    let cluster = Cluster::start(1, &[]);
    let mut second = Node::anywhere("node-a", cluster.nodes[0].dir.clone(), &[]);
    let said = second.start_in_vain();
    let dir = cluster.nodes[0].dir.to_str().unwrap();
    assert!(said.contains(dir), "{said}");
    assert!(said.contains("another") || said.contains("in use"), "{said}");
    cluster.connect(0).check("incr", "count", "1", "ok 1");
}

/// A small file system of its own, if the machine allows it.
struct Mount(PathBuf);

impl Mount {
    fn new(path: PathBuf, megabytes: u32) -> Option<Self> {
        fs::create_dir_all(&path).unwrap();
        let status = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={megabytes}m,mode=0700"), "tmpfs"])
            .arg(&path)
            .stderr(std::process::Stdio::null())
            .status();
        status.is_ok_and(|status| status.success()).then(|| Self(path))
    }

    /// Leaves no room.
    fn fill(&self) {
        let path = self.0.join("..filler");
        let file = fs::File::create(&path).unwrap();
        let block = vec![1; 64 * 1024];
        let mut at = 0;
        while let Ok(count @ 1..) = file.write_at(&block, at) {
            at += count as u64;
        }
    }

    fn free(&self) {
        fs::remove_file(self.0.join("..filler")).unwrap();
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[test]
fn a_full_disk_refuses_what_grows_and_goes_on_when_there_is_room() {
    let turn = Turn::shared();
    let dir = Dir::new();
    let Some(mount) = Mount::new(dir.path("small"), 80) else {
        println!("skipped: this machine does not allow mounting a tmpfs");
        return;
    };
    let data = dir.path("small").join("data");
    let mut node = Node::anywhere("node-a", data, &["--cluster-bootstrap"]);
    node.start_ready();
    let mut client = node.connect();
    let token = client.lock("lock", "0 600");
    client.check("kset", "value", "before", "ok");
    mount.fill();
    let value = "v".repeat(30_000);
    let mut written = 0;
    let refusal = loop {
        let begun = Instant::now();
        let heard = client.try_ask("kset", "big", &value, ANSWER);
        assert!(begun.elapsed() < Duration::from_secs(6), "not in time");
        match heard.line() {
            Some("ok") => written += 1,
            Some(line) => break line.to_owned(),
            None => panic!("{heard:?}: {}", node.output()),
        }
        assert!(written < 10_000, "the disk does not get full");
    };
    println!("{written} writes until the disk was full, then {refusal}");
    assert!(refusal.starts_with("error") && refusal != "error_unknown", "{refusal}");
    client.check("l", "other", "0", &refusal);
    client.check("incr", "count", "1", &refusal);
    client.check("kget", "value", "", "ok before");
    client.check("n", "lock", &format!("{token} 600"), "ok 600");
    client.check("r", "lock", &token, "ok");
    mount.free();
    let token = eventually("room again", || {
        let answer = client.ask("l", "lock", "0 600");
        answer.starts_with("ok ").then(|| granted(&answer))
    });
    client.check("kset", "value", "after", "ok");
    node.restart();
    let mut client = node.connect();
    client.check("kget", "value", "", "ok after");
    client.check("get", "count", "", "ok 0");
    client.check("r", "lock", &token, "ok");
    drop(node);
    drop(turn);
}

#[test]
fn a_leader_with_a_full_disk_hands_over() {
    let mut cluster = Cluster::prepare(Turn::shared(), 3, &["--election-timeout-ms", "500"]);
    let mounts = cluster.nodes.iter().map(|node| Mount::new(node.dir.clone(), 80));
    let Some(mounts) = mounts.collect::<Option<Vec<_>>>() else {
        println!("skipped: this machine does not allow mounting a tmpfs");
        return;
    };
    cluster.start_all();
    let leader = cluster.leader();
    let mut client = cluster.connect(cluster.others(leader)[0]);
    mounts[leader].fill();
    let value = "v".repeat(30_000);
    let begun = Instant::now();
    eventually("another one leads", || {
        client.check("kset", "big", &value, "ok");
        let status = cluster.nodes[leader].status()?;
        (status["role"] != "leader").then_some(())
    });
    println!("handed over after {:?}", begun.elapsed());
    client.check("kset", "value", "without it", "ok");
    mounts[leader].free();
    eventually("it takes writes again", || {
        let heard = cluster.connect(leader).try_ask("kset", "value", "with it", ANSWER);
        heard == Heard::Line("ok".into())
    });
    cluster.wait_until_ready();
    cluster.wait_until_equal();
    cluster.kill_all();
    drop(mounts);
}
