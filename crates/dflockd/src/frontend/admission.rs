//! Whether a request is served here and now. Each API refuses in its own words.

use dflockd_engine::Leader;

use crate::config::FollowerMode;
use crate::service::Service;

/// Why a request is not served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NotServed {
    /// The server shuts down.
    Draining,
    /// The leader of the cluster must be asked.
    NotLeader(Leader),
}

impl Service {
    /// Whether a request is served here and now. `leader_only`: not by a follower.
    pub(crate) fn check_served(&self, leader_only: bool) -> Result<(), NotServed> {
        if self.is_draining() {
            return Err(NotServed::Draining);
        }
        self.engine.serves(leader_only).map_err(NotServed::NotLeader)
    }

    /// Whether followers send clients to the leader instead of passing their requests on. `is_wished`: this client
    /// asked for that.
    pub(crate) fn redirects(&self, is_wished: bool) -> bool {
        match self.follower_mode {
            FollowerMode::Redirect => true,
            FollowerMode::Forward => false,
            FollowerMode::Auto => is_wished,
        }
    }
}
