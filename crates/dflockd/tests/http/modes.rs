//! Every tour in every mode.

use super::site::{Members, Place, Site};
use super::{apis, inspection, locks, sessions, streams, values, vanish, watches};

fn everything(place: &Place) {
    locks::tour(place);
    values::tour(place);
    sessions::tour(place);
    apis::tour(place);
    streams::tour(place);
    watches::tour(place);
    vanish::tour(place);
    inspection::tour(place);
}

#[test]
fn memory() {
    everything(&Site::start(&[]));
}

#[test]
fn tls() {
    everything(&Site::with_tls(&[]));
}

#[test]
fn durable_node() {
    everything(&Site::durable(&[]));
}

#[test]
fn follower() {
    let members = Members::start(3, &["--follower-mode", "forward"]);
    everything(members.follower());
}

#[test]
fn leader() {
    let members = Members::start(3, &[]);
    everything(members.leader());
}
