//! A browser of its own for each test, over the DevTools protocol.
//!
//! The protocol is spoken over two pipes, messages end with a zero byte: that needs no port and no WebSocket. A page
//! that complains about anything (an exception, a violated policy, an error on the console) fails the test.

use std::env;
use std::fs;
use std::io::{Read, Write, stderr};
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use dflockd_testkit::process::Reaper;
use dflockd_testkit::{Dir, LIMIT, millis};
use serde_json::{Value, json};

const NAMES: [&str; 4] = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"];

/// Long enough to see that something does not happen.
pub(super) const MOMENT: Duration = Duration::from_millis(600);
/// How long a browser may take to end before it is killed.
const PARTING: Duration = Duration::from_secs(5);

/// The program, or None and a word about it. Where the test is demanded there is no None.
fn find() -> Option<PathBuf> {
    let named = env::var_os("DFLOCKD_CHROMIUM").map(PathBuf::from);
    let path = env::var_os("PATH").unwrap_or_default();
    let found = named.or_else(|| {
        let folders: Vec<_> = env::split_paths(&path).collect();
        let all = NAMES.iter().flat_map(|name| folders.iter().map(move |f| f.join(name)));
        all.into_iter().find(|file| file.is_file())
    });
    if found.is_none() {
        let demanded = env::var_os("CI").is_some_and(|value| !value.is_empty())
            || env::var_os("DFLOCKD_BROWSER").is_some_and(|value| value == "required");
        let why = "there is no Chromium in PATH (Debian: apt-get install chromium)";
        assert!(!demanded, "{why}");
        // Not eprintln: the harness of the tests would keep it to itself.
        let _ = writeln!(stderr(), "SKIPPED, not passed: a test of the web page: {why}");
    }
    found
}

/// A running browser with one tab.
pub(super) struct Browser {
    child: Reaper,
    commands: ChildStdin,
    messages: Receiver<Value>,
    asked: u64,
    tab: Option<String>,
    /// What the page complained about.
    complaints: Vec<String>,
    /// Calls that failed in the network or with an error status; the page decides what that means.
    pub(super) refusals: Vec<String>,
    profile: Dir,
}

impl Browser {
    /// A tab of 1280 by 860 points and light colours; None if there is no browser.
    pub(super) fn start() -> Option<Self> {
        Self::start_with("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")
    }

    /// The same, where a name resolves to the loopback address.
    pub(super) fn start_knowing(name: &str) -> Option<Self> {
        Self::start_with(&format!("--host-resolver-rules=MAP {name} 127.0.0.1"))
    }

    fn start_with(resolver: &str) -> Option<Self> {
        let program = find()?;
        let profile = Dir::new();
        // The shell puts the pipes where Chromium looks for them.
        let mut child = Command::new("/bin/sh")
            .args(["-c", r#"exec "$@" 3<&0 4>&1 0</dev/null 1>/dev/null"#, "sh"])
            .arg(program)
            .args([
                "--headless=new",
                "--remote-debugging-pipe",
                // The only pages it sees are ours, and in containers there is none to be had.
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-extensions",
                "--disable-sync",
                "--hide-scrollbars",
                "--no-first-run",
                "--force-prefers-no-reduced-motion",
                resolver,
            ])
            .arg(format!("--user-data-dir={}", profile.name("profile")))
            .env("HOME", profile.path("."))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("there is a shell");
        let commands = child.stdin.take().expect("piped");
        let output = child.stdout.take().expect("piped");
        let (sender, messages) = channel();
        thread::spawn(move || read(output, &sender));
        let mut browser = Self {
            child: Reaper(child),
            commands,
            messages,
            asked: 0,
            tab: None,
            complaints: Vec::new(),
            refusals: Vec::new(),
            profile,
        };
        let target = browser.call("Target.createTarget", json!({"url": "about:blank"}));
        let target = json!({"targetId": target["targetId"], "flatten": true});
        let tab = browser.call("Target.attachToTarget", target);
        browser.tab = Some(tab["sessionId"].as_str().expect("a session").to_owned());
        for domain in ["Page", "Runtime", "Log", "Network"] {
            browser.call(&format!("{domain}.enable"), json!({}));
        }
        // The console says it too, but not who did it.
        let listen = "addEventListener('securitypolicyviolation', (event) => \
                      console.error('policy', event.violatedDirective, event.blockedURI))";
        browser.call("Page.addScriptToEvaluateOnNewDocument", json!({"source": listen}));
        browser.resize(1280, 860);
        browser.prefer_dark(false);
        Some(browser)
    }

    /// Sends a command and waits for its result.
    #[track_caller]
    pub(super) fn call(&mut self, method: &str, params: Value) -> Value {
        self.asked += 1;
        let id = self.asked;
        let mut command = json!({"id": id, "method": method, "params": params});
        if let Some(tab) = &self.tab {
            command["sessionId"] = json!(tab);
        }
        let mut bytes = serde_json::to_vec(&command).unwrap();
        bytes.push(0);
        self.commands.write_all(&bytes).expect("the browser runs");
        let begun = Instant::now();
        loop {
            let left = LIMIT.saturating_sub(begun.elapsed());
            match self.messages.recv_timeout(left) {
                Ok(mut message) if message["id"] == id => {
                    assert!(message["error"].is_null(), "{method}: {}", message["error"]);
                    return message["result"].take();
                }
                Ok(message) => self.note(&message),
                Err(RecvTimeoutError::Timeout) => panic!("the browser does not answer {method}"),
                Err(RecvTimeoutError::Disconnected) => panic!("the browser is gone at {method}"),
            }
        }
    }

    fn note(&mut self, message: &Value) {
        let params = &message["params"];
        match message["method"].as_str().unwrap_or_default() {
            "Runtime.exceptionThrown" => {
                self.complaints.push(params["exceptionDetails"].to_string())
            }
            "Runtime.consoleAPICalled"
                if params["type"] == "error" || params["type"] == "warning" =>
            {
                self.complaints.push(params["args"].to_string());
            }
            "Log.entryAdded" => {
                let entry = &params["entry"];
                let text = format!("{} {}", entry["text"], entry["url"]);
                if entry["source"] == "network" {
                    self.refusals.push(text);
                } else if entry["level"] == "error" || entry["level"] == "warning" {
                    self.complaints.push(text);
                }
            }
            _ => {}
        }
    }

    /// What an expression of the page is worth; promises are waited for.
    #[track_caller]
    pub(super) fn js(&mut self, expression: &str) -> Value {
        let params = json!({"expression": expression, "awaitPromise": true, "returnByValue": true});
        let mut answer = self.call("Runtime.evaluate", params);
        assert!(answer["exceptionDetails"].is_null(), "{expression}: {answer}");
        answer["result"]["value"].take()
    }

    /// Asks the page again and again until it says yes.
    #[track_caller]
    pub(super) fn until(&mut self, what: &str, expression: &str) {
        let begun = Instant::now();
        let expression = format!("Boolean({expression})");
        while self.js(&expression) != true {
            if begun.elapsed() > LIMIT {
                let text = self.js("location.href + '\\n' + document.body.innerText");
                let text = text.as_str().unwrap_or_default();
                panic!("waited in vain for: {what}\n{expression}\n{text}\n{:?}", self.complaints);
            }
            thread::sleep(millis(20));
        }
    }

    /// Answers a dialog that asks for a reason and for a token.
    #[track_caller]
    pub(super) fn confirm(&mut self, reason: &str, token: &str) {
        self.fill("dialog [type=text]", reason);
        self.fill("dialog [type=password]", token);
        self.click("dialog [type=submit]");
    }

    /// Answers a dialog that asks for a token, from the keyboard.
    #[track_caller]
    pub(super) fn sign_in(&mut self, token: &str) {
        self.fill("dialog [type=password]", token);
        self.press("Enter");
    }

    /// Waits until the text of an element contains another.
    #[track_caller]
    pub(super) fn until_text(&mut self, selector: &str, text: &str) {
        let (selector_js, text_js) = (json!(selector), json!(text));
        let expression = format!(
            "[...document.querySelectorAll({selector_js})].some((e) => e.innerText.includes({text_js}))"
        );
        self.until(&format!("{text:?} in {selector}"), &expression);
    }

    /// The text of the first such element.
    #[track_caller]
    pub(super) fn text(&mut self, selector: &str) -> String {
        let text = self.js(&format!("document.querySelector({})?.innerText", json!(selector)));
        text.as_str().unwrap_or_else(|| panic!("there is no {selector}")).to_owned()
    }

    /// Waits until the texts of all such elements are these.
    #[track_caller]
    pub(super) fn until_texts(&mut self, selector: &str, texts: &[&str]) {
        let all =
            format!("[...document.querySelectorAll({})].map((e) => e.innerText)", json!(selector));
        let same = format!("JSON.stringify({all}) === JSON.stringify({})", json!(texts));
        self.until(&format!("{texts:?} in {selector}"), &same);
    }

    /// The texts of all such elements.
    #[track_caller]
    pub(super) fn texts(&mut self, selector: &str) -> Vec<String> {
        let all =
            format!("[...document.querySelectorAll({})].map((e) => e.innerText)", json!(selector));
        let texts = self.js(&all);
        texts.as_array().unwrap().iter().map(|text| text.as_str().unwrap().to_owned()).collect()
    }

    pub(super) fn open(&mut self, url: &str) {
        self.call("Page.navigate", json!({"url": url}));
        self.until("the page is there", "document.querySelector('main h1')");
    }

    /// Goes to another view of the page.
    pub(super) fn go(&mut self, hash: &str) {
        self.js(&format!("location.hash = {}", json!(hash)));
    }

    /// Clicks into the middle of the first such element, as soon as there is one.
    #[track_caller]
    pub(super) fn click(&mut self, selector: &str) {
        let selector = json!(selector);
        self.until(&format!("{selector} can be clicked"), &format!(
            "(() => {{ const e = document.querySelector({selector}); return e && !e.disabled && e.offsetParent; }})()"
        ));
        let middle = self.js(&format!(
            "(() => {{ const e = document.querySelector({selector}); e.scrollIntoView({{ block: 'center' }});
               const box = e.getBoundingClientRect();
               return [box.x + box.width / 2, box.y + box.height / 2]; }})()"
        ));
        for kind in ["mousePressed", "mouseReleased"] {
            let (x, y) = (&middle[0], &middle[1]);
            let event = json!({"type": kind, "x": x, "y": y, "button": "left", "clickCount": 1});
            self.call("Input.dispatchMouseEvent", event);
        }
    }

    /// Presses a key, by its name or letter.
    pub(super) fn press(&mut self, key: &str) {
        let (code, text) = match key {
            "Tab" => (9, ""),
            "Enter" => (13, "\r"),
            "Escape" => (27, ""),
            "ArrowUp" => (38, ""),
            "ArrowDown" => (40, ""),
            letter => (0, letter),
        };
        let kind = if text.is_empty() { "rawKeyDown" } else { "keyDown" };
        let down = json!({"type": kind, "key": key, "text": text, "windowsVirtualKeyCode": code});
        self.call("Input.dispatchKeyEvent", down);
        let up = json!({"type": "keyUp", "key": key, "windowsVirtualKeyCode": code});
        self.call("Input.dispatchKeyEvent", up);
    }

    /// Writes into the field that has the focus.
    pub(super) fn write(&mut self, text: &str) {
        self.call("Input.insertText", json!({"text": text}));
    }

    /// Clicks into a field and writes.
    #[track_caller]
    pub(super) fn fill(&mut self, selector: &str, text: &str) {
        self.click(selector);
        self.js("document.activeElement.select()");
        self.write(text);
    }

    pub(super) fn resize(&mut self, width: u32, height: u32) {
        let mobile = width < 600;
        let scale = if mobile { 2 } else { 1 };
        let metrics =
            json!({"width": width, "height": height, "deviceScaleFactor": scale, "mobile": mobile});
        self.call("Emulation.setDeviceMetricsOverride", metrics);
    }

    pub(super) fn prefer_dark(&mut self, dark: bool) {
        let value = if dark { "dark" } else { "light" };
        let features = json!([{"name": "prefers-color-scheme", "value": value}]);
        self.call("Emulation.setEmulatedMedia", json!({"features": features}));
    }

    /// Keeps what is seen as a PNG file.
    pub(super) fn picture(&mut self, file: &Path) {
        let data = self.call("Page.captureScreenshot", json!({"format": "png"}));
        fs::write(file, from_base64(data["data"].as_str().unwrap())).unwrap();
    }

    /// What the page complained about so far; afterwards it is forgotten.
    pub(super) fn take_complaints(&mut self) -> Vec<String> {
        // Complaints that are on their way come before this answer.
        self.js("1");
        std::mem::take(&mut self.complaints)
    }

    /// Demands that the page had nothing to complain about.
    #[track_caller]
    pub(super) fn finish(mut self) {
        let complaints = self.take_complaints();
        assert!(complaints.is_empty(), "the page complains: {complaints:#?}");
    }
}

impl Drop for Browser {
    /// Lets it end by itself, with all its processes: one that was killed leaves some that still write for a moment.
    fn drop(&mut self) {
        let _ = self.commands.write_all(b"{\"id\":0,\"method\":\"Browser.close\"}\0");
        let begun = Instant::now();
        while begun.elapsed() < PARTING {
            let ended = !matches!(self.child.0.try_wait(), Ok(None));
            if ended && fs::remove_dir_all(self.profile.path("profile")).is_ok() {
                return;
            }
            thread::sleep(millis(20));
        }
    }
}

/// Hands on what the browser says, for as long as it speaks.
fn read(mut output: ChildStdout, sender: &Sender<Value>) {
    let (mut bytes, mut piece) = (Vec::new(), vec![0; 64 * 1024]);
    while let Ok(count @ 1..) = output.read(&mut piece) {
        for &byte in &piece[..count] {
            if byte != 0 {
                bytes.push(byte);
                continue;
            }
            let message = serde_json::from_slice(&bytes).expect("DevTools speaks JSON");
            bytes.clear();
            if sender.send(message).is_err() {
                return;
            }
        }
    }
}

fn from_base64(text: &str) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    let (mut bits, mut count) = (0_u32, 0);
    for letter in text.bytes() {
        let six = match letter {
            b'A'..=b'Z' => letter - b'A',
            b'a'..=b'z' => letter - b'a' + 26,
            b'0'..=b'9' => letter - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => break,
        };
        bits = bits << 6 | u32::from(six);
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push(u8::try_from(bits >> count & 0xff).unwrap());
        }
    }
    bytes
}
