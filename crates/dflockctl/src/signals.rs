//! The signals that are passed on to a program.

use std::thread;
use std::time::Duration;

use dflockd_client::Client;
use rustix::process::Signal;
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::WithOrigin;
use signal_hook::low_level::siginfo::Cause;
use tokio::sync::mpsc;

use crate::failure::{Failure, Status};

/// All of them.
const PASSED_ON: [Signal; 6] =
    [Signal::INT, Signal::TERM, Signal::HUP, Signal::QUIT, Signal::USR1, Signal::USR2];

/// How long giving up may take.
const WITHDRAW: Duration = Duration::from_secs(2);

/// A signal that came.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Received {
    pub(crate) signal: Signal,
    /// Sent by the terminal to everybody in the foreground, the program included. Passing it on would
    /// make two of one Ctrl-C, and many programs give up cleaning up at the second.
    pub(crate) by_terminal: bool,
}

impl Received {
    fn interrupted(self) -> Failure {
        let status = Status::Signal(self.signal.as_raw());
        Failure::new(status, "interrupted; no longer waiting")
    }
}

/// Signals as they come.
pub(crate) struct Signals {
    receiver: mpsc::UnboundedReceiver<Received>,
}

impl Signals {
    /// From now on signals no longer end this process but come here.
    pub(crate) fn listen() -> Result<Self, Failure> {
        let ignored = ignored();
        // Whoever started us under nohup wants the program to be spared as well.
        let wanted: Vec<i32> = PASSED_ON
            .iter()
            .map(|signal| signal.as_raw())
            .filter(|number| ignored & (1 << (number - 1)) == 0)
            .collect();
        let explain =
            |error| Failure::new(Status::No, format!("can not listen to signals: {error}"));
        let mut signals = SignalsInfo::<WithOrigin>::new(wanted).map_err(explain)?;
        let (sender, receiver) = mpsc::unbounded_channel();
        thread::spawn(move || {
            for origin in signals.forever() {
                let Some(signal) = Signal::from_named_raw(origin.signal) else { continue };
                let by_terminal = origin.cause == Cause::Kernel;
                if sender.send(Received { signal, by_terminal }).is_err() {
                    return;
                }
            }
        });
        Ok(Self { receiver })
    }

    pub(crate) async fn next(&mut self) -> Received {
        match self.receiver.recv().await {
            Some(received) => received,
            // The thread lives as long as the process.
            None => std::future::pending().await,
        }
    }

    /// Connects, unless a signal comes first.
    pub(crate) async fn connect(
        &mut self,
        connecting: impl Future<Output = Result<Client, Failure>>,
    ) -> Result<Client, Failure> {
        tokio::select! {
            client = connecting => client,
            received = self.next() => Err(received.interrupted()),
        }
    }

    /// Waits for an answer. If a signal comes first, the question is withdrawn, so that nothing is granted
    /// to a process that has ended.
    pub(crate) async fn unless_interrupted<T>(
        &mut self,
        client: &Client,
        waiting: impl Future<Output = T>,
    ) -> Result<T, Failure> {
        let received = tokio::select! {
            answer = waiting => return Ok(answer),
            received = self.next() => received,
        };
        let withdrawn = async {
            // Requests are handled in order. The first answer comes after that to the withdrawal; if the
            // lock was granted in the same instant, it is released before the second.
            let _ = client.ping().await;
            let _ = client.ping().await;
        };
        let _ = tokio::time::timeout(WITHDRAW, withdrawn).await;
        Err(received.interrupted())
    }
}

/// The signals this process was told to ignore, as bits.
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let bits = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    bits.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok()).unwrap_or(0)
}
