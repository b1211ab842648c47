//! The web page in a real browser: Chromium, driven over its DevTools protocol, before the built binary.
//!
//! Contention is made with clients of the line protocol; what they hear on their sockets is checked against what the
//! page shows. Without Chromium the tests say that they are skipped, and with `CI` or `DFLOCKD_BROWSER=required` in the
//! environment they fail. On Debian: `apt-get install chromium`. `DFLOCKD_SCREENSHOTS=1` also makes the pictures in
//! `docs/images`.

#![cfg(test)]

mod access;
mod chromium;
mod foreign;
mod pictures;
mod reach;
mod scene;
mod views;
