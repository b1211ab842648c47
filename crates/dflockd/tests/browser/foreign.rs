//! Pages of other origins, in a real browser, before a server without a token: nothing that they can make the browser
//! send changes anything.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::thread;

use dflockd_testkit::Client;
use serde_json::{Value, json};

use super::chromium::Browser;
use super::scene::Scene;

/// A name of somebody else that resolves to the loopback address, as after DNS rebinding.
const REBOUND: &str = "evil.example";

/// Another web server, with one page for every path. It goes with the process.
fn another_origin() -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for socket in listener.incoming() {
            let Ok(mut socket) = socket else { return };
            let _ = socket.read(&mut [0; 4096]);
            let page = "<!doctype html><main><h1>another page</h1></main>";
            let _ = write!(
                socket,
                "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: {}\r\n\
                 Connection: close\r\n\r\n{page}",
                page.len()
            );
        }
    });
    address
}

/// Everything that the attacks below would change: a value, a counter, a list with one item, sessions, a listener.
struct Victim {
    client: Client,
    listener: Client,
}

impl Victim {
    fn new(scene: &Scene) -> Self {
        let mut client = scene.server.connect();
        client.check("rpush", "jobs", "the-only-job", "ok 1");
        let mut listener = scene.server.connect();
        listener.check("listen", "alarm", "", "ok");
        Self { client, listener }
    }

    #[track_caller]
    fn is_untouched(&mut self, scene: &Scene) {
        let client = &mut self.client;
        let sessions = scene.ask("/v1/overview")["http_sessions"].to_string();
        let locks = client.stats()["locks"].to_string();
        // Had a signal come, it would be heard first.
        let heard = client.ask("signal", "alarm", "mine");
        let found = [
            ("who hears signals", heard),
            ("a value", client.ask("kget", "evil", "")),
            ("a counter", client.ask("get", "counter", "")),
            ("a list", client.ask("lrange", "jobs", "0 -1")),
            ("a counter, by lines", client.ask("get", "line", "")),
            ("a signal", self.listener.line()),
            ("locks", locks),
            ("sessions", sessions),
        ];
        let mine =
            ["ok 1", "nil", "ok 0", r#"ok ["the-only-job"]"#, "ok 0", "sig alarm mine", "[]", "0"];
        let changed: Vec<_> = found.iter().zip(mine).filter(|(it, mine)| it.1 != *mine).collect();
        assert!(changed.is_empty(), "{changed:#?}");
    }
}

impl Scene {
    /// What a program of this machine is told.
    fn ask(&self, path: &str) -> Value {
        let mut socket = std::net::TcpStream::connect(self.http).unwrap();
        write!(socket, "GET {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n", self.http)
            .unwrap();
        let mut answer = String::new();
        socket.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 200 "), "{answer}");
        serde_json::from_str(body).unwrap()
    }
}

/// Sends what can be sent without asking, waits for all of it, and tells how each ended.
const SIMPLE: &str = r"async (line, http) => {
    const lines = 'kset\nevil\nowned\nincr\nline\n1\nl\nlock\n0\n';
    const posts = [
        ['/v1/counters/counter/add', '{\'delta\':1}'],
        ['/v1/lists/jobs/push', '{\'value\':\'evil\'}'],
        ['/v1/lists/jobs/pop', ''],
        ['/v1/lists/jobs/pop', '{}'],
        ['/v1/signals/alarm', '{\'payload\':\'evil\'}'],
        ['/v1/sessions', ''],
        ['/v1/sessions', '{}'],
    ].map(([path, body]) => [path, body.replaceAll('\'', '\u0022')]);
    const send = (url, options) => fetch(url, { mode: 'no-cors', ...options })
        .then((answer) => answer.type, (error) => error.name);
    const all = [];
    for (const pad of ['', '\n', '\n\n']) {
        for (const method of ['POST', 'GET', 'HEAD']) {
            const body = method === 'POST' ? pad + lines.repeat(3) : undefined;
            all.push(send(`http://${line}/${method === 'POST' ? '' : '\n' + lines}`, { method, body }));
        }
        all.push(send(`http://${line}/`, { method: 'POST', body: new Blob([pad + lines]) }));
        const form = new FormData();
        form.append('x', '\n' + pad + lines);
        all.push(send(`http://${line}/`, { method: 'POST', body: form }));
        navigator.sendBeacon(`http://${line}/`, pad + lines);
    }
    const types = [undefined, 'text/plain', 'application/x-www-form-urlencoded', 'multipart/form-data; boundary=x'];
    for (const [path, text] of posts) {
        const url = `http://${http}${path}`;
        for (const type of types) {
            const options = { method: 'POST', body: text || undefined };
            if (type) options.headers = { 'Content-Type': type };
            all.push(send(url, options));
            all.push(send(url, { ...options, referrerPolicy: 'no-referrer' }));
        }
        all.push(send(url, { method: 'POST', body: new Blob([text]) }));
        // Asks first, and is refused.
        all.push(fetch(url, { method: 'POST', body: text, headers: { 'Content-Type': 'application/json' } })
            .then(() => 'read', (error) => error.name));
        navigator.sendBeacon(url, text);
    }
    // A stream that shares signals with others takes them away.
    const stream = `http://${http}/v1/signals?pattern=alarm&group=thieves`;
    all.push(send(stream, {}), send(stream, { referrerPolicy: 'no-referrer' }));
    document.body.append(Object.assign(document.createElement('img'), { src: stream }));
    globalThis.source = new EventSource(stream);
    all.push(new Promise((done) => { source.onerror = () => done('refused'); source.onopen = () => done('read'); }));
    const read = (url, options) => fetch(url, options).then(() => 'read', (error) => error.name);
    all.push(read(`http://${http}/v1/kv/evil`, { method: 'PUT', body: '{}' }), read(`http://${http}/v1/stats`));
    return Promise.all(all);
}";

/// Posts a form into a frame, and waits until the frame has an answer.
const FORM: &str = r"(url, encoding, name, value) => new Promise((done) => {
    const frame = document.createElement('iframe');
    frame.name = 'f' + Math.random();
    const form = document.createElement('form');
    Object.assign(form, { action: url, method: 'POST', enctype: encoding, target: frame.name });
    const field = document.createElement('textarea');
    Object.assign(field, { name, value });
    form.append(field);
    document.body.append(frame, form);
    // The empty page of a new frame may be told first.
    setTimeout(() => done('late'), 3000);
    frame.onload = () => { if (form.sent) done('answered'); };
    form.sent = true;
    form.submit();
})";

/// GUARANTEES 48: a page that somebody visits is no client of a server on the same machine.
#[test]
fn a_page_of_another_origin_changes_nothing() {
    let Some((mut browser, scene)) = Scene::shown(&[]) else { return };
    let (line, http) = (scene.server.address, scene.http);
    let mut victim = Victim::new(&scene);
    browser.open(&format!("http://{}/", another_origin()));
    let outcomes = browser.js(&format!("({SIMPLE})('{line}', '{http}')"));
    let outcomes = outcomes.as_array().unwrap();
    assert!(outcomes.len() > 80, "{outcomes:?}");
    assert!(!outcomes.iter().any(|outcome| outcome == "read"), "{outcomes:?}");
    victim.is_untouched(&scene);

    let json = r#"{"value":"evil","x":""#;
    for (url, encoding, name, value) in [
        (format!("http://{http}/v1/lists/jobs/push"), "text/plain", json, "\"}"),
        (format!("http://{http}/v1/lists/jobs/pop"), "application/x-www-form-urlencoded", "x", "y"),
        (format!("http://{http}/v1/sessions"), "multipart/form-data", "x", "y"),
        (format!("http://{line}/"), "text/plain", "x", "\nkset\nevil\nowned\nkset\nevil\nowned\n"),
        (
            format!("http://{line}/"),
            "text/plain",
            "x",
            "\n\nkset\nevil\nowned\nkset\nevil\nowned\n",
        ),
        (
            format!("http://{line}/"),
            "text/plain",
            "x",
            "\n\n\nkset\nevil\nowned\nkset\nevil\nowned\n",
        ),
    ] {
        let [url, encoding, name, value] = [json!(url), json!(encoding), json!(name), json!(value)];
        browser.js(&format!("({FORM})({url}, {encoding}, {name}, {value})"));
        victim.is_untouched(&scene);
    }
    // The page of the server itself goes on working in the same browser.
    browser.open(&scene.page("#/"));
    browser.until_text(".pill", "live");
}

/// GUARANTEES 48: neither is a page whose own name leads to this server, though for the browser they are one.
#[test]
fn a_rebound_name_reads_and_changes_nothing() {
    let Some(mut browser) = Browser::start_knowing(REBOUND) else { return };
    let scene = Scene::start(&[]);
    let mut victim = Victim::new(&scene);
    browser.open(&format!("http://{REBOUND}:{}/ui/", scene.http.port()));
    assert_eq!(browser.js("location.hostname"), REBOUND);
    let attack = r#"async () => {
        const json = { 'Content-Type': 'application/json' };
        const send = (method, path, body) => fetch(path, { method, body, headers: body ? json : {} })
            .then(async (answer) => [answer.status, await answer.json().then((it) => it.error, () => '')]);
        return Promise.all([
            send('GET', '/v1/stats'),
            send('GET', '/v1/lists/jobs'),
            send('PUT', '/v1/kv/evil', '{"value":"owned"}'),
            send('POST', '/v1/counters/counter/add', '{"delta":1}'),
            send('POST', '/v1/lists/jobs/pop', '{}'),
            send('POST', '/v1/lists/jobs/pop'),
            send('DELETE', '/v1/kv/evil'),
            send('POST', '/v1/signals/alarm', '{"payload":"evil"}'),
            send('POST', '/v1/sessions', '{}'),
            send('POST', '/v1/admin/sessions/1/end', '{"reason":"x"}'),
        ]);
    }"#;
    let outcomes = browser.js(&format!("({attack})()"));
    for outcome in outcomes.as_array().unwrap() {
        assert_eq!(*outcome, json!([421, "host_not_allowed"]), "{outcomes}");
    }
    victim.is_untouched(&scene);
    // The page says what is wrong.
    browser.until_text("#notice", "--http-allowed-hosts");
}
