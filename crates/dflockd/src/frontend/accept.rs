//! Accepting connections, for every API alike.

use std::net::SocketAddr;
use std::pin::pin;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};

/// The pause after an accept that failed; each is twice as long as the one before.
const PAUSE_MIN: Duration = Duration::from_millis(5);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// Accepts connections until `stop` is ready.
pub(crate) async fn accept(
    socket: TcpListener,
    stop: impl Future,
    mut admit: impl FnMut(TcpStream, SocketAddr),
) {
    let mut stop = pin!(stop);
    let mut pause = PAUSE_MIN;
    loop {
        let accepted = tokio::select! {
            _ = &mut stop => return,
            accepted = socket.accept() => accepted,
        };
        match accepted {
            Ok((stream, address)) => {
                pause = PAUSE_MIN;
                admit(stream, address);
            }
            Err(error) => {
                tracing::warn!(%error, "accept failed");
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(PAUSE_MAX);
            }
        }
    }
}
