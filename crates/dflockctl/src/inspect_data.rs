//! `inspect-data`: what is in the data directory of a node that does not run.

use std::path::PathBuf;

use crate::failure::{Failure, Status};
use crate::operator::{run_server, server_program};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The data directory, or a copy of it.
    dir: PathBuf,
    /// Also the last entries of the log, without keys and values.
    #[arg(long)]
    entries: bool,
    /// How many entries.
    #[arg(long, value_name = "N", requires = "entries")]
    last: Option<usize>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// The server program.
    #[arg(long, value_name = "FILE")]
    dflockd: Option<PathBuf>,
}

/// `inspect-data`.
pub(crate) fn run(args: &Args) -> Result<Status, Failure> {
    let mut given = vec!["inspect-data".to_owned(), args.dir.display().to_string()];
    given.extend(args.entries.then(|| "--entries".to_owned()));
    given.extend(args.last.iter().flat_map(|last| ["--last".to_owned(), last.to_string()]));
    given.extend(args.json.then(|| "--json".to_owned()));
    run_server(&server_program(args.dflockd.as_deref()), &given)
}
