//! `force-release`, `end-session`: for administrators.

use std::path::PathBuf;

use serde_json::json;

use crate::connect::{Common, Settings, read_token};
use crate::failure::{Failure, Status};
use crate::output;

#[derive(Debug, clap::Args)]
pub(crate) struct Admin {
    /// File with the admin token of the server
    /// [variables: DFLOCKD_ADMIN_TOKEN_FILE, DFLOCKD_ADMIN_TOKEN].
    #[arg(long, value_name = "FILE")]
    admin_token_file: Option<PathBuf>,
    /// Why; the server logs it.
    #[arg(long, value_name = "TEXT")]
    reason: String,
}

impl Admin {
    fn token(&self) -> Result<String, Failure> {
        let env = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
        let file = env("DFLOCKD_ADMIN_TOKEN_FILE").map(PathBuf::from);
        if let Some(path) = self.admin_token_file.clone().or(file) {
            return read_token(&path);
        }
        env("DFLOCKD_ADMIN_TOKEN").ok_or_else(|| {
            let advice = "give --admin-token-file or set DFLOCKD_ADMIN_TOKEN_FILE";
            Failure::new(Status::Denied, format!("an admin token is needed; {advice}"))
        })
    }
}

#[derive(Debug, clap::Args)]
pub(crate) struct ForceReleaseArgs {
    /// What is locked.
    key: String,
    /// The fence of the hold to end, as `dflockctl show KEY` tells.
    fence: u64,
    /// It is a semaphore.
    #[arg(long)]
    sem: bool,
    #[command(flatten)]
    admin: Admin,
    #[command(flatten)]
    common: Common,
}

#[derive(Debug, clap::Args)]
pub(crate) struct EndSessionArgs {
    /// The number of the session, as `dflockctl show KEY` tells in the column CONN.
    session: u64,
    #[command(flatten)]
    admin: Admin,
    #[command(flatten)]
    common: Common,
}

/// `force-release`.
pub(crate) async fn force_release(
    args: ForceReleaseArgs,
    outer: &Settings,
) -> Result<Status, Failure> {
    let token = args.admin.token()?;
    let (client, json) = args.common.connect(&args.key, outer).await?;
    let (key, reason) = (args.key.as_bytes(), args.admin.reason.as_str());
    client.force_release(key, args.sem, args.fence, &token, reason).await?;
    if json {
        let fence = args.fence.to_string();
        output::json(&json!({ "key": args.key, "fence": fence, "released": true }));
    }
    Ok(Status::Ok)
}

/// `end-session`.
pub(crate) async fn end_session(args: EndSessionArgs, outer: &Settings) -> Result<Status, Failure> {
    let token = args.admin.token()?;
    let connection = args.common.settings.or(outer).resolve()?;
    if connection.servers.len() > 1 {
        // Each server numbers its own.
        return Err(Failure::usage("name the one server of the session with --servers"));
    }
    let client = connection.connect().await?;
    client.end_session(args.session, &token, &args.admin.reason).await?;
    if args.common.output.json {
        output::json(&json!({ "session": args.session, "ended": true }));
    }
    Ok(Status::Ok)
}
