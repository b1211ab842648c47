//! `watch`, `listen`, `signal`: what happens, as it happens.

use serde_json::json;

use crate::connect::{Common, Settings};
use crate::failure::{Failure, Status, complain};
use crate::output::{self, printable};

#[derive(Debug, clap::Args)]
pub(crate) struct WatchArgs {
    /// A key, or a pattern of words separated by dots: `*` is one word, `>` at the end is all the rest.
    pattern: String,
    /// End after so many changes.
    #[arg(long, value_name = "N")]
    count: Option<u64>,
    #[command(flatten)]
    common: Common,
}

#[derive(Debug, clap::Args)]
pub(crate) struct ListenArgs {
    /// A channel, or a pattern of words separated by dots: `*` is one word, `>` at the end is all the rest.
    pattern: String,
    /// Share the signals with the other members of this group.
    #[arg(long, value_name = "GROUP")]
    group: Option<String>,
    /// End after so many signals.
    #[arg(long, value_name = "N")]
    count: Option<u64>,
    #[command(flatten)]
    common: Common,
}

#[derive(Debug, clap::Args)]
pub(crate) struct SignalArgs {
    /// The channel.
    channel: String,
    /// What to send.
    payload: String,
    #[command(flatten)]
    common: Common,
}

/// `watch`.
pub(crate) async fn watch(args: WatchArgs, outer: &Settings) -> Result<Status, Failure> {
    let client = args.common.settings.or(outer).resolve()?.connect().await?;
    let mut changes = client.watch(&args.pattern).await?;
    let mut gaps = Gaps::default();
    for _ in 0..args.count.unwrap_or(u64::MAX) {
        let Some(change) = changes.next().await else { break };
        gaps.report(changes.interruptions(), changes.dropped());
        if args.common.output.json {
            let key = String::from_utf8_lossy(&change.key);
            output::json(&json!({ "event": change.event, "key": key }));
        } else {
            output::line(format!("{:<8} {}", change.event, printable(&change.key)));
        }
    }
    Ok(Status::Ok)
}

/// `listen`.
pub(crate) async fn listen(args: ListenArgs, outer: &Settings) -> Result<Status, Failure> {
    let client = args.common.settings.or(outer).resolve()?.connect().await?;
    let mut signals = client.listen(&args.pattern, args.group.as_deref()).await?;
    let mut gaps = Gaps::default();
    for _ in 0..args.count.unwrap_or(u64::MAX) {
        let Some(signal) = signals.next().await else { break };
        gaps.report(signals.interruptions(), signals.dropped());
        if args.common.output.json {
            let payload = String::from_utf8_lossy(&signal.payload);
            output::json(&json!({ "channel": signal.channel, "payload": payload }));
        } else {
            // Bytes as they are: this is for pipes.
            let channel = output::clean(&signal.channel);
            output::line([channel.as_bytes(), b" ", &signal.payload].concat());
        }
    }
    Ok(Status::Ok)
}

/// `signal`.
pub(crate) async fn signal(args: SignalArgs, outer: &Settings) -> Result<Status, Failure> {
    let (client, json) = args.common.connect(&args.channel, outer).await?;
    let deliveries = client.signal(&args.channel, args.payload.as_bytes()).await?;
    if json {
        output::json(&json!({ "channel": args.channel, "deliveries": deliveries }));
    } else {
        output::line(deliveries.to_string());
    }
    Ok(Status::Ok)
}

/// Events that were not seen.
#[derive(Default)]
struct Gaps {
    interruptions: u64,
    dropped: u64,
}

impl Gaps {
    /// Says so if there are more than before.
    fn report(&mut self, interruptions: u64, dropped: u64) {
        if interruptions > self.interruptions {
            complain("the connection broke and stands again; what happened between was not seen");
        }
        if dropped > self.dropped {
            complain(format_args!("{} events were dropped: read faster", dropped - self.dropped));
        }
        *self = Self { interruptions, dropped };
    }
}
