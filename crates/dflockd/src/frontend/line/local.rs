//! A server without sockets, for tests of programs that use one: the same engine and the same conversation
//! over any stream of bytes.

use std::sync::Arc;

use dflockd_engine::{Clock, PendingFlushes};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::Notify;

use crate::config::Config;
use crate::frontend::line::connection::{Connection, Inbox};
use crate::service::Service;

/// A server in this process.
#[derive(Clone)]
pub struct LocalServer {
    service: Arc<Service>,
}

impl LocalServer {
    /// An empty server. To be called inside a tokio runtime, which runs its timers.
    ///
    /// # Errors
    ///
    /// If the configuration names a file that can not be used.
    pub fn start(config: &Config) -> anyhow::Result<Self> {
        let background = |job: Box<dyn FnOnce() + Send>| {
            tokio::task::spawn_blocking(job);
        };
        let service = Arc::new(Service::new(config, Clock::system(), background)?);
        service.engine.start()?;
        Ok(Self { service })
    }

    /// Serves one connection until it ends.
    pub async fn converse(&self, mut stream: impl AsyncRead + AsyncWrite + Unpin) {
        let (inbox, flushed) = (Arc::<Inbox>::default(), Arc::new(Notify::new()));
        let notified = Arc::clone(&flushed);
        let mailbox = inbox.mailbox(move |_| notified.notify_one());
        let me = self.service.engine.open(mailbox, "local".into());
        let connection = Connection::new(Arc::clone(&self.service), inbox, me, "local".into());
        let mut talk = Talk(connection);
        let connection = &mut talk.0;
        let mut flushes = PendingFlushes::new();
        let mut input = vec![0; 16 * 1024];
        while !connection.is_over() {
            if !connection.output().is_empty() {
                let written = stream.write(connection.output()).await;
                let Ok(count @ 1..) = written else { break };
                connection.handle_written(count);
                continue;
            }
            if connection.has_more() {
                connection.handle_more(&mut flushes);
                flushes.run();
                continue;
            }
            let clock = self.service.engine.clock();
            let wait = connection.next_deadline().map(|at| clock.until(at));
            let deadline = async {
                match wait {
                    Some(wait) => tokio::time::sleep(wait).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                read = stream.read(&mut input), if connection.wants_input() => match read {
                    Ok(0) => connection.handle_end_of_input(),
                    Ok(count) => connection.handle_input(&input[..count], &mut flushes),
                    Err(_) => break,
                },
                () = flushed.notified() => connection.handle_messages(&mut flushes),
                () = deadline => connection.handle_time(&mut flushes),
            }
            flushes.run();
        }
    }
}

/// A conversation that ends even if its future is dropped.
struct Talk(Connection);

impl Drop for Talk {
    fn drop(&mut self) {
        let mut flushes = PendingFlushes::new();
        self.0.end(&mut flushes);
        flushes.run();
    }
}

impl Drop for LocalServer {
    fn drop(&mut self) {
        self.service.engine.stop();
    }
}
