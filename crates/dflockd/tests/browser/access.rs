//! Tokens, refusals, lost servers: what the page does when it may not or can not ask.

use std::io::{Read, Write};
use std::net::TcpStream;

use dflockd_testkit::identities::{self, BILLING, OPERATOR};
use dflockd_testkit::{Dir, LIMIT, eventually};

use super::chromium::MOMENT;
use super::scene::Scene;
use super::views::no_secret_is_kept;

const TOKEN: &str = "t0ken-of-the-api";

#[test]
fn the_page_asks_for_the_token_and_keeps_it_in_memory() {
    let Some((mut browser, scene)) = Scene::shown(&["--auth-token", TOKEN]) else { return };
    let mut ada = scene.server.login(TOKEN);
    ada.lock("secret.key", "0 600");
    browser.open(&scene.page("#/locks"));
    browser.until_text("dialog", "Sign in");
    browser.until_text(".pill", "signed out");
    assert!(!browser.text("body").contains("secret.key"));

    browser.sign_in("wr0ng");
    browser.until_text("dialog .wrong", "wants its token");
    browser.sign_in("\u{fc}\u{2713}");
    browser.until_text("dialog .wrong", "wants its token");
    assert!(!browser.text("body").contains("secret.key"));

    browser.sign_in(TOKEN);
    browser.until_text("td.keys", "secret.key");
    browser.until_text(".pill", "live");
    browser.until("no dialog", "!document.querySelector('dialog')");
    browser.go("#/events");
    browser.until_text(".heading", "live");
    no_secret_is_kept(&mut browser, TOKEN);
    assert!(!scene.server.output().contains(TOKEN), "the token is in the log");

    browser.click("#out");
    browser.until_text("dialog", "Sign in");
    browser.press("Escape");
    browser.until("no dialog", "!document.querySelector('dialog')");
    browser.click("#notice button");
    browser.sign_in(TOKEN);
    browser.until_text(".pill", "live");

    // A reload has forgotten it.
    browser.call("Page.reload", serde_json::json!({}));
    browser.until_text("dialog", "Sign in");
    browser.finish();
}

#[test]
fn a_lost_server_is_said_and_tried_again() {
    let Some((mut browser, scene)) = Scene::shown(&[]) else { return };
    let (_ada, _) = scene.holder("ada", "orders.invoice", 600);
    let http = scene.http;
    browser.open(&scene.page("#/locks"));
    browser.until_text("td.keys", "orders.invoice");
    scene.server.kill();
    browser.until_text("#notice", "The server does not answer.");
    browser.until_text("#notice", "Next try in");
    browser.until_text(".pill", "offline");
    // What was known stays, and is shown to be old.
    browser.until_text("td.keys", "orders.invoice");
    browser
        .until("pale", "Number(getComputedStyle(document.querySelector('.view')).opacity) < 0.9");

    let scene = eventually("the port is free again", || Scene::start_at(http, &[]).ok());
    let (_bob, _) = scene.holder("bob", "orders.export", 600);
    browser.until_text(".pill", "live");
    browser.until_text("td.keys", "orders.export");
    browser.until("the notice is gone", "document.querySelector('#notice').hidden");
    browser.finish();
}

#[test]
fn a_server_that_shuts_down_is_said() {
    let Some((mut browser, scene)) = Scene::shown(&[]) else { return };
    browser.open(&scene.page("#/"));
    browser.until_text(".pill", "live");
    scene.server.signal("TERM");
    // How long it drains is its own affair; then it is gone.
    browser.until(
        "a notice",
        "/shutting down|does not answer/.test(document.querySelector('#notice').innerText)",
    );
    browser.finish();
}

#[test]
fn a_rate_limit_is_said_and_kept_to() {
    let Some((mut browser, scene)) =
        Scene::shown(&["--http-rate-limit-per-ip", "1", "--http-rate-limit-burst", "18"])
    else {
        return;
    };
    browser.open(&scene.page("#/"));
    browser.until_text("#notice", "Too many requests");
    browser.until_text(".pill", "slowed");
    browser.finish();
}

/// Who may see some keys sees those, and is told where more would be needed.
#[test]
fn an_identity_sees_its_own_keys() {
    let dir = Dir::new();
    let file = identities::write(&dir);
    let Some((mut browser, scene)) = Scene::shown(&["--identities-file", &file]) else { return };
    let mut operator = scene.server.login(OPERATOR.token);
    let _waiters = ["billing/nightly", "other/secret"].map(|key| {
        operator.lock(key, "0 600");
        let mut waiter = scene.server.login(OPERATOR.token);
        waiter.begin("l", key, "600 60");
        operator.wait_for_waiters(key, 1);
        waiter
    });
    browser.open(&scene.page(""));
    browser.until_text("dialog", "Sign in");
    browser.sign_in(BILLING.token);
    browser.until_text("body", "billing/nightly");
    browser.until_text(".pill", "live");
    browser.go("#/locks");
    browser.until_text("td.keys", "billing/nightly");
    assert!(!browser.text("body").contains("other/secret"));
    browser.go("#/sessions");
    browser.until_text(".pill", "denied");
}

#[test]
fn the_files_are_guarded_by_a_policy() {
    let Some((mut browser, scene)) = Scene::shown(&["--auth-token", TOKEN]) else { return };
    // No token is needed for them.
    for path in ["/ui/", "/ui/app.js", "/ui/style.css", "/ui/icon.svg"] {
        let answer = ask(&scene, path, "");
        assert!(answer.starts_with("HTTP/1.1 200 "), "{path}: {answer}");
        let head = answer.split("\r\n\r\n").next().unwrap().to_lowercase();
        for part in [
            "content-security-policy: default-src 'none'; script-src 'self';",
            "frame-ancestors 'none'",
            "x-content-type-options: nosniff",
            "referrer-policy: no-referrer",
            "cache-control: no-cache",
        ] {
            assert!(head.contains(part), "{path} has no {part}: {head}");
        }
        let tag = head.lines().find_map(|line| line.strip_prefix("etag: ")).unwrap();
        let again = ask(&scene, path, &format!("If-None-Match: {tag}\r\n"));
        assert!(again.starts_with("HTTP/1.1 304 "), "{path}: {again}");
    }
    assert!(ask(&scene, "/ui/nothing.js", "").starts_with("HTTP/1.1 404 "));
    for path in ["/", "/ui"] {
        let answer = ask(&scene, path, "").to_lowercase();
        assert!(answer.contains(" 307 ") && answer.contains("location: ui/"), "{answer}");
    }

    // The browser holds the page to it, and these tests would notice.
    browser.open(&scene.page(""));
    browser.until_text("dialog", "Sign in");
    assert!(browser.take_complaints().is_empty());
    for wrong in [
        "document.body.append(Object.assign(document.createElement('img'), { src: 'http://127.0.0.1:1/x.png' }))",
        "(() => { try { document.body.innerHTML = '<b>markup</b>'; } catch { return 'refused'; } })()",
        "(() => { try { document.body.setAttribute('onclick', 'alert(1)'); } catch { return 'refused'; } })()",
    ] {
        browser.js(wrong);
        let begun = std::time::Instant::now();
        while browser.take_complaints().is_empty() {
            assert!(begun.elapsed() < LIMIT, "{wrong} was not noticed");
            std::thread::sleep(MOMENT / 20);
        }
    }
}

/// The answer to a bare request.
fn ask(scene: &Scene, path: &str, headers: &str) -> String {
    let mut socket = TcpStream::connect(scene.http).unwrap();
    socket.set_read_timeout(Some(LIMIT)).unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{headers}\r\n");
    socket.write_all(request.as_bytes()).unwrap();
    let mut answer = Vec::new();
    socket.read_to_end(&mut answer).unwrap();
    String::from_utf8_lossy(&answer).into_owned()
}
