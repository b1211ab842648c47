//! Makes the pictures in `docs/images`, when `DFLOCKD_SCREENSHOTS=1` asks for them.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use dflockd_testkit::{Client, millis};

use super::chromium::Browser;
use super::scene::Scene;

/// Long enough for the sparklines to have a past.
const TRAFFIC: Duration = Duration::from_secs(40);

#[test]
fn pictures() {
    if std::env::var_os("DFLOCKD_SCREENSHOTS").is_none_or(|value| value != "1") {
        return;
    }
    let mut browser = Browser::start().expect("pictures need Chromium");
    let scene = Scene::start(&["--admin-token", "adm1n"]);
    let _people = people(&scene);
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        for worker in 0..3 {
            let (scene, done) = (&scene, &done);
            scope.spawn(move || work(scene, worker, done));
        }
        browser.open(&scene.page(""));
        thread::sleep(TRAFFIC);
        take(&mut browser, "#/", "ui-overview");
        take(&mut browser, "#/key/orders.invoice", "ui-key");
        browser.prefer_dark(true);
        take(&mut browser, "#/locks", "ui-locks-dark");
        browser.resize(390, 844);
        browser.prefer_dark(false);
        take(&mut browser, "#/key/orders.invoice", "ui-phone");
        done.store(true, Ordering::Relaxed);
    });
    browser.finish();
}

fn take(browser: &mut Browser, hash: &str, name: &str) {
    browser.go(hash);
    browser.until("something to see", "document.querySelector('main td, .events li')");
    browser.js("document.activeElement.blur()");
    thread::sleep(millis(6000));
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/images");
    browser.picture(&folder.join(format!("{name}.png")));
}

/// Those who hold for a while, and those who wait for them.
fn people(scene: &Scene) -> Vec<Client> {
    let mut people = Vec::new();
    for (name, key, lease) in [
        ("billing-worker-3@db-2", "orders.invoice", 300),
        ("deploy@ci-14", "deploy.production", 900),
        ("nightly@batch-1", "jobs.nightly", 3600),
        ("indexer-0", "search.reindex", 120),
        ("exporter@web-4", "orders.export", 90),
    ] {
        people.push(scene.holder(name, key, lease).0);
    }
    for place in 1..=6 {
        people.push(scene.waiter(
            &format!("billing-worker-{}@db-{place}", place + 3),
            "orders.invoice",
            place,
        ));
        thread::sleep(millis(700));
    }
    for place in 1..=2 {
        people.push(scene.waiter(&format!("deploy@ci-{}", 14 + place), "deploy.production", place));
    }
    people.push(scene.waiter("exporter@web-5", "orders.export", 1));
    let mut leader = scene.client("scheduler@a");
    assert!(leader.ask("elect", "scheduler.leader", "0 60").starts_with("ok "));
    people.push(leader);
    for call in 1..=5 {
        let mut caller = scene.client(&format!("api-gateway-{call}"));
        assert!(caller.ask("sl", "partner.quota", "0 5 120").starts_with("ok "));
        people.push(caller);
    }
    for reader in 1..=3 {
        let mut client = scene.client(&format!("catalog-{reader}"));
        assert!(client.ask("rl", "catalog", "0 240").starts_with("ok "));
        people.push(client);
    }
    for tenant in 0..9 {
        people.push(
            scene
                .holder(
                    &format!("sync-{tenant}"),
                    &format!("tenant.{:04}.sync", tenant * 7),
                    60 + tenant * 13,
                )
                .0,
        );
    }
    people
}

/// Takes and releases, at a pace that changes.
fn work(scene: &Scene, worker: u64, done: &AtomicBool) {
    let mut client = scene.client(&format!("mailer-{worker}"));
    let mut turn = 0_u64;
    while !done.load(Ordering::Relaxed) {
        turn += 1;
        let key = format!("mail.{}", (turn * 7 + worker) % 40);
        let token = client.lock(&key, "1 10");
        if turn.is_multiple_of(5) {
            client.ask("incr", "mail.sent", "1");
        }
        client.check("r", &key, &token, "ok");
        thread::sleep(millis(14 + (turn / 40 * 5 + worker) % 23));
    }
}
