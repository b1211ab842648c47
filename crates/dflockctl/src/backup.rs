//! `backup` and `restore`: the whole state as a file, and a new cluster from it.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};

use crate::connect::{Common, Settings};
use crate::failure::{Failure, Status};
use crate::files::Aside;
use crate::operator::{Cluster, Link, Operator, SNAPSHOT_TIMEOUT, run_server, server_program};
use crate::output;

/// How long a piece may take.
const PIECE_TIMEOUT: Duration = Duration::from_secs(30);
const DIGEST_BYTES: usize = 32;

#[derive(Debug, clap::Args)]
pub(crate) struct BackupArgs {
    /// Where to; a file that is there is replaced only when the new one is whole.
    file: PathBuf,
    #[command(flatten)]
    operator: Operator,
    #[command(flatten)]
    common: Common,
}

#[derive(Debug, clap::Args)]
pub(crate) struct RestoreArgs {
    /// What `backup` wrote.
    file: PathBuf,
    /// Data directory of the new node; must be empty or missing.
    #[arg(long, value_name = "DIR")]
    raft_dir: PathBuf,
    /// Name of the node.
    #[arg(long, value_name = "ID")]
    node_id: String,
    /// Where other nodes will dial its peer port.
    #[arg(long, value_name = "HOST:PORT")]
    raft_addr: String,
    /// Where clients find it; it says so itself when it starts.
    #[arg(long, value_name = "HOST:PORT")]
    advertise_addr: Option<String>,
    /// Grant nothing for so many seconds; never less than the longest lease in the backup.
    #[arg(long, value_name = "SECONDS")]
    grant_delay: Option<u64>,
    /// But for no more than so many, even if a lease in the backup is longer: its holder may still believe in it.
    #[arg(long, value_name = "SECONDS")]
    grant_delay_max: Option<u64>,
    /// The server program.
    #[arg(long, value_name = "FILE")]
    dflockd: Option<PathBuf>,
}

/// `backup`.
pub(crate) fn backup(args: BackupArgs, outer: &Settings) -> Result<Status, Failure> {
    let cluster = Cluster::new(args.common.settings.or(outer), Some(&args.operator))?;
    let mut failure = None;
    for server in cluster.servers() {
        match fetch(&cluster, server, &args.file) {
            Ok(backup) => {
                let (bytes, index) = (&backup["bytes"], &backup["index"]);
                if args.common.output.json {
                    let cluster_id = &backup["cluster_id"];
                    let file = args.file.display().to_string();
                    output::json(&json!({
                        "file": file, "bytes": bytes, "index": index, "cluster_id": cluster_id,
                    }));
                } else {
                    let file = args.file.display();
                    output::line(format!("{file}: {bytes} bytes, the state at entry {index}"));
                }
                return Ok(Status::Ok);
            }
            Err(why) if why.status == Status::Unreachable => failure = Some(why),
            Err(why) => return Err(why),
        }
    }
    Err(failure.unwrap_or_else(|| Failure::usage("no server given")))
}

fn fetch(cluster: &Cluster, server: &str, file: &Path) -> Result<Value, Failure> {
    let mut link = cluster.open(server)?;
    let arguments = json!({ "reason": cluster.reason() });
    let backup = link.ask("backup", cluster.token(), &arguments, SNAPSHOT_TIMEOUT)?;
    // It has the secrets of sessions in it, and all values.
    let mut aside = Aside::create(file, 0o600)?;
    write(cluster, &mut link, &backup, file, &mut aside)?;
    aside.publish()?;
    Ok(backup)
}

fn write(
    cluster: &Cluster,
    link: &mut Link,
    backup: &Value,
    path: &Path,
    aside: &mut Aside,
) -> Result<(), Failure> {
    let failed = |error: std::io::Error| {
        Failure::new(Status::No, format!("can not write {}: {error}", path.display()))
    };
    let strange = || Failure::new(Status::No, "the server sent something that is no backup");
    let total = backup["bytes"].as_u64().and_then(|bytes| usize::try_from(bytes).ok());
    let total = total.ok_or_else(strange)?;
    let mut digest = Digest::new(total.checked_sub(DIGEST_BYTES).ok_or_else(strange)?);
    let mut offset = 0;
    while offset < total {
        let arguments = json!({ "offset": offset });
        let piece = link.ask("backup", cluster.token(), &arguments, PIECE_TIMEOUT)?;
        let piece = piece["data"]
            .as_str()
            .and_then(|digits| hex::decode(digits).ok())
            .ok_or_else(strange)?;
        if piece.is_empty() || offset + piece.len() > total {
            return Err(strange());
        }
        digest.update(&piece);
        aside.file.write_all(&piece).map_err(failed)?;
        offset += piece.len();
    }
    if !digest.matches() {
        return Err(Failure::new(Status::No, "the backup was changed on its way; try again"));
    }
    Ok(())
}

/// The digest at the end of a backup, checked as it comes.
struct Digest {
    content: usize,
    seen: usize,
    context: Box<dyn rustls::crypto::hash::Context>,
    expected: Vec<u8>,
}

impl Digest {
    fn new(content: usize) -> Self {
        let suites = rustls::crypto::ring::default_provider().cipher_suites;
        let hash = suites.iter().find_map(|suite| {
            let hash = suite.tls13()?.common.hash_provider;
            (hash.output_len() == DIGEST_BYTES).then_some(hash)
        });
        let context = hash.expect("TLS 1.3 demands SHA-256").start();
        Self { content, seen: 0, context, expected: Vec::new() }
    }

    fn update(&mut self, piece: &[u8]) {
        let of_content = (self.content - self.seen).min(piece.len());
        self.context.update(&piece[..of_content]);
        self.expected.extend_from_slice(&piece[of_content..]);
        self.seen += of_content;
    }

    fn matches(self) -> bool {
        self.context.finish().as_ref() == self.expected
    }
}

/// `restore`.
pub(crate) fn restore(args: &RestoreArgs) -> Result<Status, Failure> {
    let mut given = vec!["restore".to_owned()];
    let mut give = |flag: &str, value: String| given.extend([flag.to_owned(), value]);
    give("--from", args.file.display().to_string());
    give("--raft-dir", args.raft_dir.display().to_string());
    give("--node-id", args.node_id.clone());
    give("--raft-addr", args.raft_addr.clone());
    if let Some(address) = &args.advertise_addr {
        give("--advertise-addr", address.clone());
    }
    if let Some(delay) = args.grant_delay {
        give("--grant-delay", delay.to_string());
    }
    if let Some(delay) = args.grant_delay_max {
        give("--grant-delay-max", delay.to_string());
    }
    run_server(&server_program(args.dflockd.as_deref()), &given)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_digest_is_at_the_end() {
        // Of nothing.
        let digest = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        let mut right = Digest::new(0);
        right.update(&hex::decode(digest).expect("digits"));
        assert!(right.matches());
        let mut wrong = Digest::new(1);
        wrong.update(b"x");
        wrong.update(&hex::decode(digest).expect("digits"));
        assert!(!wrong.matches());
    }
}
