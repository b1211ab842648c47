//! The built binary as a process: what its clients, its operator and its attackers see of it.
//!
//! Every test starts a server of its own on a port that the system chooses and speaks to it over the
//! loopback interface only.

#[cfg(test)]
mod process {
    mod answers;
    mod auth;
    mod both;
    mod bounds;
    mod caps;
    mod contention;
    mod crowd;
    mod descriptors;
    mod fences;
    mod foreign;
    mod hostile;
    mod leases;
    mod limits;
    mod peers;
    mod rights;
    mod signals;
    mod startup;
    mod subscriptions;
    mod systemd;
    mod tls;
    mod tokens;
}
