//! `completions`, `man`: made from the definitions of the arguments.

use std::io::Write;
use std::path::PathBuf;

use clap_complete::Shell;

use crate::failure::{Failure, Status};
use crate::output;

#[derive(Debug, clap::Args)]
pub(crate) struct CompletionsArgs {
    /// The shell.
    shell: Shell,
}

#[derive(Debug, clap::Args)]
pub(crate) struct ManArgs {
    /// Write a page per verb into this directory, instead of the first one to stdout.
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

/// `completions`.
pub(crate) fn completions(args: &CompletionsArgs, mut command: clap::Command) -> Status {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut command, "dflockctl", &mut text);
    output::line(text.trim_ascii_end());
    Status::Ok
}

/// `man`.
pub(crate) fn man(args: &ManArgs, command: clap::Command) -> Result<Status, Failure> {
    let explain = |error| Failure::new(Status::No, format!("can not write the pages: {error}"));
    if let Some(dir) = &args.dir {
        std::fs::create_dir_all(dir).map_err(explain)?;
        clap_mangen::generate_to(command, dir).map_err(explain)?;
        return Ok(Status::Ok);
    }
    let mut text = Vec::new();
    clap_mangen::Man::new(command).render(&mut text).map_err(explain)?;
    text.flush().map_err(explain)?;
    output::line(text.trim_ascii_end());
    Ok(Status::Ok)
}
