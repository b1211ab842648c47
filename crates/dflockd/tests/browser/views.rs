//! What each view shows, and that it is what the clients of the line protocol know.

use std::thread;

use dflockd_testkit::{Cluster, Heard, Turn, granted};

use super::chromium::{Browser, MOMENT};
use super::scene::Scene;

const ADMIN: [&str; 2] = ["--admin-token", "adm1n-s3cret"];

#[test]
fn the_overview_says_who_waits_for_whom() {
    let Some((mut browser, scene)) = Scene::shown(&[]) else { return };
    browser.open(&scene.page(""));
    browser.until_text(".verdict", "Nobody waits.");
    browser.until_text(".pill", "live");

    let (_ada, _) = scene.holder("ada", "orders.invoice", 60);
    let _others = scene.waiters(&["bob", "eve", "joe"], "orders.invoice");
    browser.until_text(".verdict", "3 wait, the longest for");
    browser.until_text(".reason", "orders.invoice is held by ada");
    browser.until_text("[aria-label=Held] b", "1");
    browser.until_text("[aria-label=Waiting] b", "3");
    browser.until_text(".pair td.keys", "orders.invoice");
    browser.until_text(".pair .events", "acquire");
    // Rates come from two answers.
    browser
        .until("rates", "!document.querySelector('[aria-label=Grants] b').innerText.includes('–')");
    browser.until("a line", "document.querySelector('[aria-label=Held] .line').getAttribute('d')");
    assert!(browser.text("#foot").contains("in memory"));

    browser.click(".panel header a[href='#/contention']");
    browser.until_text("td.keys", "orders.invoice");
    browser.until_texts("td.wide b", &["3"]);
    browser.finish();
}

#[test]
fn the_table_of_locks_is_searched_and_filtered() {
    let Some((mut browser, scene)) = Scene::shown(&[]) else { return };
    let (mut ada, fence) = scene.holder("ada", "orders.invoice", 60);
    let _bob = scene.waiter("bob", "orders.invoice", 1);
    let _tokens: Vec<_> = (0..120).map(|n| ada.lock(&format!("tenant.{n:03}"), "0 600")).collect();
    assert!(ada.ask("sl", "quota", "0 5 60").starts_with("ok "));

    browser.open(&scene.page("#/locks"));
    browser.until_text("td.keys", "orders.invoice");
    let row = browser.text("tbody tr:first-child");
    for part in ["ada", &fence, "mutex", "1"] {
        assert!(row.contains(part), "no {part} in {row}");
    }
    browser.until_text("td.keys", "semaphore of 5");
    // A lease that runs down, between two answers as well.
    let left = "Number(document.querySelector('[role=meter]').ariaValueNow)";
    let begun = browser.js(left).as_f64().unwrap();
    assert!(begun <= 60.0, "{begun}");
    browser.until("a shorter lease", &format!("{left} < {begun} - 1"));
    let width = "new DOMMatrix(getComputedStyle(document.querySelector('.meter i')).transform).a";
    browser.until("a shorter bar", &format!("{width} < 0.99"));

    // 122 keys are two pages.
    browser.until_text(".pager", "page 1");
    browser.click(".pager button:last-child");
    browser.until_text("td.keys", "tenant.119");
    browser.until_text(".heading", "22 keys on page 2");
    browser.click(".pager button:first-child");
    browser.until_text("td.keys", "orders.invoice");

    browser.fill("#search", "tenant.11");
    browser.until_text(".heading", "10 keys");
    assert!(browser.js("location.hash").as_str().unwrap().contains("q=tenant.11"));
    browser.js("document.querySelector('select').value = 'contains'");
    browser.js("document.querySelector('select').dispatchEvent(new Event('change'))");
    browser.fill("#search", "voice");
    browser.until_text(".heading", "1 match among 122 keys");
    browser.until_texts("td.keys a", &["orders.invoice"]);

    // A link with the same search shows the same.
    let address = browser.js("location.href");
    browser.call("Page.navigate", serde_json::json!({"url": "about:blank"}));
    browser.open(address.as_str().unwrap());
    browser.until_text(".heading", "1 match among 122 keys");

    browser.click("#search");
    browser.js("document.activeElement.value = ''");
    browser.js("document.activeElement.dispatchEvent(new Event('input'))");
    browser.click("[value=waiting] + span");
    browser.until_text(".heading", "1 key");
    browser.until_texts("td.keys a", &["orders.invoice"]);
    browser.finish();
}

#[test]
fn a_key_shows_its_queue_in_order_and_lives() {
    let Some((mut browser, scene)) = Scene::shown(&[]) else { return };
    let (ada, fence) = scene.holder("ada", "orders.invoice", 60);
    let mut waiters = scene.waiters(&["bob", "eve", "joe"], "orders.invoice");
    browser.open(&scene.page("#/key/orders.invoice"));
    browser.until_text(".reason", "Held by ada");
    browser.until_text("h3", "Queue: 3");
    let queue = "section:first-of-type .table:last-of-type td.keys a";
    browser.until_texts(queue, &["bob", "eve", "joe"]);
    assert!(browser.text("td.fence").contains(&fence));
    browser.until_text(".events", "acquire");

    // The next holder is shown when there is one, without anybody asking.
    drop(ada);
    granted(&waiters[0].line());
    browser.until_text(".reason", "Held by bob");
    browser.until("the queue moves on", "document.querySelectorAll('td.place').length === 2");
    browser.until_texts(queue, &["eve", "joe"]);
    browser.until_text("#news", "Held by bob");

    // Nothing, and then a value, under another name.
    browser.go("#/key/counted");
    browser.until_text(".empty", "Nothing is known under this name");
    scene.client("adder").check("incr", "counted", "5", "ok 5");
    browser.until_text("dd", "value 5");
    browser.finish();
}

#[test]
fn a_forced_release_gives_the_lock_to_the_waiter() {
    let Some((mut browser, scene)) = Scene::shown(&ADMIN) else { return };
    let (mut ada, fence) = scene.holder("ada", "orders.invoice", 600);
    let mut bob = scene.waiter("bob", "orders.invoice", 1);
    browser.open(&scene.page("#/key/orders.invoice"));
    browser.click("td.end button");
    browser.until_text("dialog", "It passes to bob");

    // Without a reason, with a wrong token, and then in earnest.
    browser.click("dialog [type=submit]");
    browser.until_text("dialog .wrong", "Reason is needed");
    browser.confirm("stuck since noon", "guess");
    browser.until_text("dialog .wrong", "not the admin token");
    assert_eq!(bob.hear(MOMENT), Heard::Nothing);
    browser.fill("dialog [type=password]", ADMIN[1]);
    browser.click("dialog [type=submit]");
    granted(&bob.line());
    assert_eq!(ada.line(), format!("lost orders.invoice {fence} forced"));
    browser.until("the dialog is gone", "!document.querySelector('dialog')");
    browser.until_text(".toast", "ada no longer holds orders.invoice");
    browser.until_text(".reason", "Held by bob");

    let log = scene.server.output();
    assert!(log.contains("stuck since noon"), "{log}");
    assert!(!log.contains(ADMIN[1]), "the token is in the log");
    // The token is remembered, but in no place that outlives the page.
    browser.click("td.end button");
    browser.until(
        "only a reason is asked",
        "document.querySelector('dialog') && !document.querySelector('[type=password]')",
    );
    no_secret_is_kept(&mut browser, ADMIN[1]);
    browser.press("Escape");
    browser.until("the dialog is gone", "!document.querySelector('dialog')");
    browser.finish();
}

#[test]
fn without_an_admin_token_nothing_can_be_forced() {
    let Some((mut browser, scene)) = Scene::shown(&[]) else { return };
    let (mut ada, _) = scene.holder("ada", "k", 600);
    browser.open(&scene.page("#/key/k"));
    browser.click("td.end button");
    browser.confirm("r", "any");
    browser.until_text("dialog .wrong", "This server has no admin token");
    ada.expect_silence(MOMENT);
    browser.finish();
}

#[test]
fn a_session_shows_what_it_holds_and_can_be_ended() {
    let Some((mut browser, scene)) = Scene::shown(&ADMIN) else { return };
    let (mut ada, _) = scene.holder("ada", "orders.invoice", 600);
    ada.lock("orders.export", "0 600");
    let mut bob = scene.waiter("bob", "orders.invoice", 1);
    browser.open(&scene.page("#/sessions"));
    browser.until_text("td.keys", "ada");
    browser.until_text("td.keys", "bob");
    browser.fill("#search", "ad");
    browser.until_text(".heading", "1 session");
    browser.click("td.keys a");
    browser.until_text("h1", "ada");
    browser.until_text(".reason", "2 holds, 0 waits");
    browser.until_texts("td.keys a", &["orders.export", "orders.invoice"]);

    browser.click(".heading button.danger");
    browser.confirm("left the company", ADMIN[1]);
    granted(&bob.line());
    browser.until_text(".reason", "it has ended");
    assert!(scene.server.output().contains("left the company"));
    browser.finish();
}

#[test]
fn events_stream_by_pattern_with_pause_and_clear() {
    let Some((mut browser, scene)) = Scene::shown(&[]) else { return };
    let mut ada = scene.client("ada");
    ada.check("kset", "before.the.page", "x\t60", "ok");
    browser.open(&scene.page("#/events"));
    browser.until_text(".events", "before.the.page");
    browser.until_text(".heading", "live");
    ada.check("kset", "jobs.one", "x\t60", "ok");
    browser.until_text(".events li:first-child", "jobs.one");

    browser.fill("#search", "jobs.*");
    browser.press("Enter");
    browser.until("only what matches", "document.querySelectorAll('.events li').length === 1");
    browser.until_text(".heading", "live");
    ada.check("kset", "other", "x\t60", "ok");
    ada.check("kset", "jobs.two", "x\t60", "ok");
    browser.until_text(".events li:first-child", "jobs.two");
    assert!(!browser.text(".events").contains("other"));

    browser.click("#pause");
    ada.check("kset", "jobs.three", "x\t60", "ok");
    browser.until_text(".heading", "paused, 1 change since");
    assert!(!browser.text(".events").contains("jobs.three"));
    browser.click("#pause");
    browser.until_text(".events li:first-child", "jobs.three");
    browser.click("form button:last-child");
    browser.until("an empty list", "!document.querySelector('.events li')");

    browser.fill("#search", "jobs.*x");
    browser.press("Enter");
    browser.until_text(".empty", "This is no pattern");
    browser.finish();
}

#[test]
fn names_of_strangers_are_only_names() {
    let Some((mut browser, scene)) = Scene::shown(&[]) else { return };
    let names = [
        "<img/src=x/onerror=alert(1)>",
        "</td><script>alert(1)</script>",
        "javascript:alert(1)",
        "\"'><svg/onload=alert(1)>",
        "%2e%2e/..%2f?#&=+",
        "../..",
        "..",
        "invoice\u{202e}gnp.exe\u{200b}\u{7}",
        "{{constructor}}${alert(1)}",
    ];
    let long = "x".repeat(256);
    let mut clients = Vec::new();
    for key in names.iter().copied().chain([long.as_str()]) {
        let name = if key.len() > 60 { "long" } else { key };
        let mut client = scene.server.connect();
        // Not every name of a key is one of a client.
        let _ = client.ask("hello", name, "lost");
        client.lock(key, "0 600");
        clients.push(client);
    }
    browser.open(&scene.page("#/locks"));
    let all = names.len() + 1;
    browser.until("all keys", &format!("document.querySelectorAll('td.keys').length === {all}"));
    let shown = browser.texts("td.keys a");
    for key in names.iter().copied().chain([long.as_str()]) {
        let key = key
            .replace('\u{202e}', "\\u{202e}")
            .replace('\u{200b}', "\\u{200b}")
            .replace('\u{7}', "\\u{0007}");
        assert!(shown.contains(&key), "{key} is not in {shown:?}");
    }
    let links = "[...document.querySelectorAll('td.keys a')].map((a) => a.getAttribute('href'))";
    for hash in browser.js(links).as_array().unwrap() {
        let hash = hash.as_str().unwrap();
        assert!(hash.starts_with("#/key/"), "{hash}");
        browser.go(hash);
        let is_there = format!("location.hash === {}", serde_json::json!(hash));
        browser.until("the page of the key", &is_there);
        browser.until_text(".reason", "Held by");
    }
    for hash in
        ["#/", "#/locks", "#/contention", "#/sessions", "#/events", "#/key/%", "#/nonsense?<img>"]
    {
        browser.go(hash);
        browser.until("a heading", "document.querySelector('main h1')");
        thread::sleep(MOMENT / 4);
        let strange = "document.querySelectorAll('main img, main script, main svg[onload], main [onerror]').length";
        assert_eq!(browser.js(strange), 0, "{hash}");
    }
    browser.finish();
}

#[test]
fn a_cluster_shows_its_members_and_its_leader() {
    let Some(mut browser) = Browser::start() else { return };
    let flags = ["--election-timeout-ms", "500"];
    let mut cluster = Cluster::prepare(Turn::shared(), 3, &flags);
    let address = dflockd_testkit::free_address();
    let http = ["--http-port".to_owned(), address.port().to_string()];
    cluster.nodes[0].flags.extend(http);
    cluster.nodes[0].flags.extend(["--http-host".to_owned(), "127.0.0.1".to_owned()]);
    cluster.start_all();
    let leader = cluster.nodes[cluster.leader()].name.clone();
    browser.open(&format!("http://{address}/ui/"));
    browser.until_text(".panel .facts", &format!("leader {leader}"));
    let rows = browser.texts(".panel:last-child tbody tr");
    assert_eq!(rows.len(), 3, "{rows:?}");
    assert_eq!(rows.iter().filter(|row| row.contains("leader")).count(), 1, "{rows:?}");
    let led = rows.iter().find(|row| row.contains("leader")).unwrap();
    assert!(led.starts_with(&leader), "{led}");
    assert!(rows.iter().any(|row| row.contains("this one")), "{rows:?}");
    browser.until_text("#node", &cluster.nodes[0].name);
    // The leader knows how far the others are, a follower only how far it is itself.
    let known = if leader == cluster.nodes[0].name { 3 } else { 1 };
    browser.until(
        "how far they are",
        &format!(
            "[...document.querySelectorAll('.panel:last-child td.num')]\
             .filter((e) => e.innerText.includes('entr')).length === {known}"
        ),
    );
    browser.until_text("#foot", "replicated");
    browser.finish();
}

/// That a secret is nowhere where it could be found after the page.
#[track_caller]
pub(super) fn no_secret_is_kept(browser: &mut Browser, secret: &str) {
    let places = "JSON.stringify([document.cookie, { ...localStorage }, { ...sessionStorage }, location.href, \
                  document.documentElement.outerHTML, [...document.querySelectorAll('input')].map((e) => e.value), \
                  performance.getEntries().map((e) => e.name), history.state, window.name])";
    let kept = browser.js(places);
    assert!(!kept.as_str().unwrap().contains(secret), "the token is kept: {kept}");
}
