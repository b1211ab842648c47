//! Whom the page reaches: by keyboard, on a phone, in the dark, with a screen reader.

use dflockd_testkit::granted;

use super::chromium::Browser;
use super::scene::Scene;

const VIEWS: [&str; 7] = [
    "#/",
    "#/locks",
    "#/contention",
    "#/sessions",
    "#/events",
    "#/key/orders.invoice",
    "#/key/xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx",
];

/// A server with something in every view.
fn furnished() -> (Scene, Vec<dflockd_testkit::Client>) {
    let scene = Scene::start(&["--admin-token", "adm1n"]);
    let (ada, _) = scene.holder("ada", "orders.invoice", 600);
    let (joe, _) = scene.holder("joe", &"x".repeat(88), 600);
    let bob = scene.waiter("bob", "orders.invoice", 1);
    let eve = scene.waiter(
        "a-client-with-a-name-as-long-as-a-name-may-be-which-is-a-lot",
        "orders.invoice",
        2,
    );
    (scene, vec![ada, joe, bob, eve])
}

/// The focus, in a word.
const FOCUS: &str =
    "(() => { const e = document.activeElement; return e.id || e.innerText || e.tagName; })()";

#[test]
fn everything_can_be_done_from_the_keyboard() {
    let Some(mut browser) = Browser::start() else { return };
    let (scene, mut clients) = furnished();
    browser.open(&scene.page(""));
    browser.until_text(".pill", "live");
    browser.press("?");
    browser.until_text("dialog", "this help");
    browser.press("Escape");
    browser.until("no dialog", "!document.querySelector('dialog')");
    for (key, heading) in
        [("3", "Contention"), ("4", "Sessions"), ("5", "Events"), ("2", "Locks"), ("1", "Overview")]
    {
        browser.press(key);
        browser.until_text("h1", heading);
    }
    // From anywhere to the search, from there into the table, down and up, and into a key.
    browser.press("/");
    browser.until("the search has the focus", "document.activeElement.id === 'search'");
    browser.until_text("td.keys", "orders.invoice");
    browser.press("ArrowDown");
    browser.until("the first row", &format!("{FOCUS} === 'orders.invoice'"));
    browser.press("ArrowDown");
    browser.until("the second row", &format!("{FOCUS}.startsWith('xxx')"));
    browser.press("ArrowUp");
    browser.until("the first row", &format!("{FOCUS} === 'orders.invoice'"));
    let outline = browser.js("getComputedStyle(document.activeElement).outlineStyle");
    assert_eq!(outline, "solid", "the focus is not seen");
    browser.press("Enter");
    browser.until_text(".reason", "Held by ada");
    browser.press("Escape");
    browser.until_text("h1", "Locks");
    // A key by its name.
    browser.press("/");
    browser.until("the search has the focus", "document.activeElement.id === 'search'");
    browser.write("orders.invoice");
    browser.press("Enter");
    browser.until_text(".reason", "Held by ada");

    // To the button by tabs, through the dialog, to the end.
    let button = "document.activeElement.innerText?.includes('Force-release')";
    let mut tabs = 0;
    while browser.js(button) != true {
        browser.press("Tab");
        tabs += 1;
        assert!(tabs < 30, "no way to the button");
    }
    browser.press("Enter");
    browser
        .until("the reason has the focus", "document.activeElement.matches('dialog [type=text]')");
    browser.write("by hand");
    browser.press("Tab");
    browser.write("adm1n");
    browser.press("Enter");
    browser.until_text(".reason", "Held by bob");
    granted(&clients[2].line());

    browser.press("t");
    browser.until("light", "document.documentElement.dataset.theme === 'light'");
    browser.finish();
}

#[test]
fn it_is_light_or_dark_as_the_system_or_as_chosen() {
    let Some(mut browser) = Browser::start() else { return };
    let (scene, _clients) = furnished();
    let ground = "getComputedStyle(document.body).backgroundColor";
    browser.open(&scene.page(""));
    let light = browser.js(ground);
    browser.prefer_dark(true);
    let dark = browser.js(ground);
    assert_ne!(light, dark);
    browser.click("#theme");
    assert_eq!(browser.js(ground), light);
    assert_eq!(browser.js("document.querySelector('#theme').ariaLabel"), "Theme: light");
    // The choice outlives a reload.
    browser.call("Page.reload", serde_json::json!({}));
    browser.until_text(".pill", "live");
    assert_eq!(browser.js(ground), light);
    browser.click("#theme");
    browser.prefer_dark(false);
    assert_eq!(browser.js(ground), dark);
    browser.click("#theme");
    assert_eq!(browser.js(ground), light);
    browser.finish();
}

/// Every text against the ground it stands on, as WCAG counts it; gives those that are too pale.
const PALE: &str = r"(() => {
    const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
    const rgba = (color) => {
        canvas.clearRect(0, 0, 1, 1);
        canvas.fillStyle = color;
        canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data];
    };
    const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
        .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
        .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
    const ground = (e) => {
        for (; e; e = e.parentElement) {
            const color = rgba(getComputedStyle(e).backgroundColor);
            if (color[3] > 250) return color;
        }
        return [255, 255, 255];
    };
    const pale = [];
    for (const e of document.querySelectorAll('body *')) {
        const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
        if (!own || !e.getClientRects().length || e.closest('.away, :disabled')) continue;
        const [a, b] = [light(rgba(getComputedStyle(e).color)), light(ground(e))].sort((x, y) => y - x);
        const ratio = (a + 0.05) / (b + 0.05);
        if (ratio < 4.5) pale.push(`${e.tagName}.${e.className} ${e.innerText.slice(0, 20)} ${ratio.toFixed(2)}`);
    }
    return pale;
})()";

/// What has no name for those who listen, and what stands outside the landmarks.
const NAMELESS: &str = "[...document.querySelectorAll('a, button, input, select, [role=meter]')].filter((e) => \
    e.getClientRects().length && !(e.innerText?.trim() || e.ariaLabel || e.labels?.length))\
    .map((e) => e.outerHTML).concat(\
    [...document.body.children].filter((e) => !e.matches('header, main, footer, .notice, .away, .skip, dialog'))\
    .map((e) => e.outerHTML)).concat(document.querySelectorAll('h1').length === 1 ? [] : ['headings'])";

#[test]
fn it_can_be_read_in_both_lights_and_has_names_for_everything() {
    let Some(mut browser) = Browser::start() else { return };
    let (scene, _clients) = furnished();
    browser.open(&scene.page(""));
    browser.until_text(".pill", "live");
    for dark in [false, true] {
        browser.prefer_dark(dark);
        for view in VIEWS {
            browser.go(view);
            browser.until("something to see", "document.querySelector('main td, .events li')");
            assert_eq!(browser.js(PALE), serde_json::json!([]), "{view} dark: {dark}");
            assert_eq!(browser.js(NAMELESS), serde_json::json!([]), "{view}");
        }
    }
    browser.click("td.end button");
    browser.until("a dialog", "document.querySelector('dialog[open]')");
    assert_eq!(browser.js(PALE), serde_json::json!([]), "dialog");
    assert_eq!(browser.js(NAMELESS), serde_json::json!([]), "dialog");
    browser.finish();
}

#[test]
fn a_phone_needs_no_sideways_scrolling() {
    let Some(mut browser) = Browser::start() else { return };
    let (scene, _clients) = furnished();
    browser.resize(360, 780);
    browser.open(&scene.page(""));
    browser.until_text(".pill", "live");
    for view in VIEWS {
        browser.go(view);
        browser.until("something to see", "document.querySelector('main td, .events li')");
        // A page that is wider than the screen makes a phone zoom out.
        let width = browser.js("[document.documentElement.scrollWidth, innerWidth]");
        assert_eq!(width, serde_json::json!([360, 360]), "{view}");
        let small = "[...document.querySelectorAll('nav a, button')].filter((e) => e.getClientRects().length && \
                     e.getBoundingClientRect().height < 36).map((e) => e.outerHTML)";
        assert_eq!(browser.js(small), serde_json::json!([]), "{view}: too small for a finger");
    }
    browser.click("nav a:last-child");
    browser.until_text("h1", "Events");
    browser.finish();
}
