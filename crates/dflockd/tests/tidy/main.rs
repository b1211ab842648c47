//! The documents tell the truth about the code, and the source stays tidy.
//!
//! Tables between markers in the documents are made from the code. `UPDATE_DOCS=1 cargo test -p dflockd
//! --test tidy` writes them anew; without it a difference is a failure.

#![expect(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

mod deploy;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use dflockd_replica::policy::POLICY_SETTINGS;
use dflockd_wire::{ArgLimit, ERROR_CODES, OPS};

const LINE_BYTES_MAX: usize = 120;

#[test]
fn commands_in_the_protocol_document() {
    check_table("docs/protocol.md", "ops", &commands());
}

#[test]
fn error_codes_in_the_protocol_document() {
    check_table("docs/protocol.md", "errors", &error_codes());
}

#[test]
fn settings_in_the_operating_document() {
    check_table("docs/operating.md", "settings", &dflockd::config::markdown_table());
}

#[test]
fn settings_of_the_policy_in_the_operating_document() {
    let text = read(&root().join("docs/operating.md"));
    let (_, list) = text.split_once("Limits and rules that decide (").unwrap();
    let (list, _) = list.split_once(')').unwrap();
    let named: BTreeSet<_> = quoted(list).collect();
    let flags: BTreeSet<_> = POLICY_SETTINGS.iter().map(|s| format!("--{}", s.name)).collect();
    assert!(named.iter().eq(&flags), "docs/operating.md names {named:?}, the policy has {flags:?}");
}

#[test]
fn metrics_in_their_document() {
    check_table("docs/metrics.md", "metrics", &dflockd::metrics::table());
}

fn commands() -> String {
    let mut table = String::from(
        "| Command | Key line | Argument line | Longest argument | Answers | Meaning |\n\
         | --- | --- | --- | --- | --- | --- |\n",
    );
    for spec in OPS {
        let key = if spec.key == "_" { "ignored".to_owned() } else { code(spec.key) };
        let arg = if spec.arg.is_empty() { "ignored".to_owned() } else { code(spec.arg) };
        let limit = match spec.arg_limit {
            ArgLimit::Short => "256",
            ArgLimit::Long => "65,536",
            ArgLimit::Value => "one value",
            ArgLimit::ValueTtl => "one value + 21",
            ArgLimit::TwoValues => "two values + 22",
        };
        let answers: Vec<_> = spec.answers.split('|').map(code).collect();
        let (name, answers) = (code(spec.name), answers.join(", "));
        let summary = spec.summary;
        writeln!(table, "| {name} | {key} | {arg} | {limit} | {answers} | {summary}. |").unwrap();
    }
    table
}

fn error_codes() -> String {
    let mut table = String::from(
        "| Status | Meaning | May have taken effect | The same request may succeed later |\n\
         | --- | --- | --- | --- |\n",
    );
    for spec in ERROR_CODES {
        let word = |yes| if yes { "yes" } else { "no" };
        let (text, meaning) = (code(spec.text), spec.meaning);
        let (applied, retry) = (word(spec.code.may_have_applied()), word(spec.code.may_retry()));
        writeln!(table, "| {text} | {meaning} | {applied} | {retry} |").unwrap();
    }
    table
}

/// Text as code in a cell of a table.
fn code(text: &str) -> String {
    format!("`{}`", text.replace('|', "\\|"))
}

/// Compares what stands between `<!-- name -->` and `<!-- /name -->` with `expected`, or writes it there.
fn check_table(document: &str, name: &str, expected: &str) {
    // Tests run side by side, and two tables can be in one document.
    static WRITING: Mutex<()> = Mutex::new(());
    let _writing = WRITING.lock().unwrap_or_else(PoisonError::into_inner);
    let path = root().join(document);
    let text = read(&path);
    let (begin, end) = (format!("<!-- {name} -->\n"), format!("<!-- /{name} -->"));
    let start = text.find(&begin).unwrap_or_else(|| panic!("{document} has no {begin}"));
    let start = start + begin.len();
    let stop = text[start..].find(&end).unwrap_or_else(|| panic!("{document} has no {end}"));
    let stop = start + stop;
    if text[start..stop] == *expected {
        return;
    }
    assert!(
        std::env::var_os("UPDATE_DOCS").is_some_and(|value| value == "1"),
        "the table {name} in {document} is not what the code says; write it anew with\n\
         UPDATE_DOCS=1 cargo test -p dflockd --test tidy"
    );
    fs::write(&path, format!("{}{expected}{}", &text[..start], &text[stop..])).unwrap();
}

#[test]
fn dependencies_have_a_reason() {
    let manifest = read(&root().join("Cargo.toml"));
    let (_, section) = manifest.split_once("[workspace.dependencies]\n").unwrap();
    let section = section.split("\n[").next().unwrap();
    let architecture = read(&root().join("ARCHITECTURE.md"));
    let mut count = 0;
    for line in section.lines().filter(|line| !line.starts_with('#')) {
        let Some((name, _)) = line.split_once('=') else { continue };
        let name = name.trim();
        assert!(
            architecture.contains(&format!("`{name}`")),
            "ARCHITECTURE.md gives no reason for the dependency {name}"
        );
        count += 1;
    }
    assert!(count > 20, "only {count} dependencies found in Cargo.toml");
}

/// The map names every source file, and no other.
#[test]
fn the_map_names_every_source_file() {
    let document = read(&root().join("ARCHITECTURE.md"));
    assert!(document.lines().count() <= 250, "ARCHITECTURE.md has more than 250 lines");
    let (_, map) = document.split_once("\n## The map\n").unwrap();
    let (map, _) = map.split_once("\n## ").unwrap();
    let mut named = BTreeSet::new();
    let mut folder = "";
    for row in map.lines().filter(|line| line.starts_with("| ")) {
        let cell = row.split(" | ").next().unwrap();
        if cell.contains("**") {
            folder = quoted(cell).next().unwrap();
            continue;
        }
        let mut before = "";
        for name in quoted(cell) {
            if name.ends_with('/') {
                before = name;
            } else {
                let path = format!("{folder}{before}{name}");
                assert!(named.insert(path.clone()), "ARCHITECTURE.md names {path} twice");
            }
        }
    }
    let found: BTreeSet<_> = source_files().collect();
    let gone: Vec<_> = named.difference(&found).collect();
    assert!(gone.is_empty(), "the map of ARCHITECTURE.md names files that do not exist: {gone:?}");
    let missing: Vec<_> = found.difference(&named).collect();
    assert!(missing.is_empty(), "the map of ARCHITECTURE.md lacks {missing:?}");
}

/// The files that belong on the map, relative to the root: Rust in the `src` folders, scripts of the web page.
fn source_files() -> impl Iterator<Item = String> {
    let paths = files().into_iter().map(|path| {
        let path = path.strip_prefix(root()).unwrap().to_owned();
        path.into_os_string().into_string().unwrap()
    });
    paths.filter(|path| {
        let parts: Vec<_> = path.split('/').collect();
        match parts[..] {
            ["crates", "dflockd", "ui", ..] => path.ends_with(".js"),
            ["crates", _, "src", ..] | ["bench" | "chaos" | "sim" | "fuzz", "src", ..] => {
                path.ends_with(".rs")
            }
            _ => false,
        }
    })
}

#[test]
fn links_lead_somewhere() {
    for path in files().iter().filter(|path| has_extension(path, &["md"])) {
        let text = read(path);
        for part in text.split("](").skip(1) {
            let target = part.split(')').next().unwrap();
            let file = target.split('#').next().unwrap();
            if target.contains("://") || file.is_empty() {
                continue;
            }
            let linked = path.parent().unwrap().join(file);
            assert!(linked.exists(), "{}: {target} does not exist", path.display());
        }
    }
}

/// The last column of each table in `docs/guarantees.md` names tests: functions and scripts.
#[test]
fn promises_name_tests_that_exist() {
    let tests = Tests::find();
    let mut named = 0;
    for row in read(&root().join("docs/guarantees.md")).lines().filter(|l| l.starts_with('|')) {
        let cell = row.trim_end_matches('|').rsplit('|').next().unwrap();
        for name in quoted(cell) {
            assert!(tests.has(name), "docs/guarantees.md: there is no test {name}");
            named += 1;
        }
    }
    assert!(named > 30, "only {named} tests are named in docs/guarantees.md");
}

/// Each threat of `docs/security.md` says where its defence lives and which tests show it, or why there is none.
#[test]
fn threats_name_tests_that_exist() {
    let tests = Tests::find();
    let text = read(&root().join("docs/security.md"));
    let (_, table) = text.split_once("<!-- threats -->\n").unwrap();
    let (table, _) = table.split_once("<!-- /threats -->").unwrap();
    let rows: Vec<_> = table.lines().skip(2).collect();
    assert_eq!(rows.len(), 28, "threats in docs/security.md");
    for (number, row) in (1..).zip(rows) {
        let cells: Vec<_> = row.trim_matches('|').split(" | ").map(str::trim).collect();
        let [found, threat, defence, place, shown] = cells[..] else {
            panic!("docs/security.md: a row has {} cells: {row}", cells.len());
        };
        assert_eq!(found, number.to_string(), "docs/security.md: threats are numbered");
        assert!(!threat.is_empty() && !defence.is_empty(), "docs/security.md: {row}");
        for path in quoted(place) {
            let exists = root().join(path).exists() || root().join("crates").join(path).exists();
            assert!(exists, "docs/security.md: there is no file {path}");
        }
        for name in quoted(shown) {
            assert!(tests.has(name), "docs/security.md: there is no test {name}");
        }
        let excused = shown.strip_prefix("not covered: ").is_some_and(|reason| reason.len() > 20);
        assert!(excused || quoted(shown).next().is_some(), "no test for threat {number}: {threat}");
    }
    for attack in &tests.attacks {
        let named = format!("`attacks/{attack}`");
        assert!(table.contains(&named), "docs/security.md: which threat is the attack {attack}?");
    }
}

/// What documents may name as a test.
struct Tests {
    functions: BTreeSet<String>,
    attacks: BTreeSet<String>,
}

impl Tests {
    fn find() -> Self {
        let mut functions = BTreeSet::new();
        for path in files().iter().filter(|path| has_extension(path, &["rs"])) {
            for part in read(path).split("fn ").skip(1) {
                functions.insert(part.split(['(', '<']).next().unwrap().to_owned());
            }
        }
        let catalog = read(&root().join("bench/attack/catalog.py"));
        let names = catalog.split("@attack(\"").skip(1).map(|part| part.split('"').next().unwrap());
        Self { functions, attacks: names.map(str::to_owned).collect() }
    }

    /// A function, a transcript, an attack or a part of the gate.
    fn has(&self, name: &str) -> bool {
        if name.ends_with(".txt") {
            return root().join("crates/dflockd/tests/scripts").join(name).exists();
        }
        if let Some(attack) = name.strip_prefix("attacks/") {
            return self.attacks.contains(attack);
        }
        if name.starts_with(".ci/") {
            let gate = read(&root().join(".ci/run"));
            return root().join(name).exists() && gate.contains(&format!("step {name}"));
        }
        self.functions.contains(name)
    }
}

/// What stands between backticks.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

#[test]
fn the_gate_checks_dependencies() {
    let gate = read(&root().join(".ci/run"));
    for step in ["step .ci/deny", "step .ci/sbom --check", "step .ci/attacks"] {
        assert!(gate.lines().any(|line| line == step), ".ci/run has no {step}");
    }
}

#[test]
fn the_gate_runs_what_the_readme_says() {
    let commands = [
        "cargo test --workspace --locked",
        "cargo test -p dflockd-sim --features bugs --test bugs --locked",
    ];
    for file in ["README.md", ".ci/run"] {
        let text = read(&root().join(file));
        for command in commands {
            assert!(text.contains(command), "{file} does not say {command}");
        }
    }
}

#[test]
fn lines_are_short() {
    let mut long = String::new();
    for path in files() {
        let in_document = has_extension(&path, &["md"]);
        let mut transcript = false;
        for (index, line) in read(&path).lines().enumerate() {
            let trimmed = line.trim();
            transcript ^= in_document && trimmed.starts_with("```");
            // What a program printed and a table can not be broken; a string literal alone on its line is one in
            // disguise.
            let table = in_document && trimmed.starts_with('|');
            let opens = ["\"", "r#\"", "b\""].iter().any(|open| trimmed.starts_with(open));
            let literal = opens && trimmed.trim_end_matches(['#', ',']).ends_with('"');
            if line.len() > LINE_BYTES_MAX && !table && !literal && !transcript {
                writeln!(long, "{}:{}: {} bytes", path.display(), index + 1, line.len()).unwrap();
            }
        }
    }
    assert!(long.is_empty(), "longer than {LINE_BYTES_MAX} bytes:\n{long}");
}

/// What comments and tests call GUARANTEES, by a number or a rule, stands in `docs/guarantees.md`.
#[test]
fn guarantees_that_are_named_are_in_the_document() {
    let document = read(&root().join("docs/guarantees.md"));
    let is_there = |name: &str| match name.strip_prefix('R') {
        Some(_) => document.contains(&format!("\n**{name} ")),
        None => document.contains(&format!("\n| {name} | ")),
    };
    let mut named = 0;
    for path in files().iter().filter(|path| has_extension(path, &["rs", "txt"])) {
        for (index, line) in read(path).lines().enumerate() {
            let Some((_, behind)) = line.split_once("GUARANTEES ") else { continue };
            let name = behind.split(|letter: char| !letter.is_ascii_alphanumeric()).next();
            let name = name.unwrap_or_default();
            let digits = name.strip_prefix('R').unwrap_or(name);
            if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
                continue;
            }
            named += 1;
            let at = format!("{}:{}", path.display(), index + 1);
            assert!(is_there(name), "{at}: there is no {name} in docs/guarantees.md");
        }
    }
    assert!(named > 100, "only {named} are named");
}

#[test]
fn nothing_is_left_unfinished() {
    // Put together here, or this file would find itself.
    let words = ["todo", "unimplemented", "dbg"].map(|word| format!("{word}!("));
    for path in files().iter().filter(|path| has_extension(path, &["rs"])) {
        for (index, line) in read(path).lines().enumerate() {
            for word in &words {
                assert!(!line.contains(word), "{}:{}: {word}", path.display(), index + 1);
            }
        }
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn has_extension(path: &Path, extensions: &[&str]) -> bool {
    path.extension().is_some_and(|found| extensions.iter().any(|extension| found == *extension))
}

/// Source and documents of the repository, without what was built, downloaded or generated.
fn files() -> Vec<PathBuf> {
    const SKIPPED: [&str; 7] =
        [".git", "target", "corpus", "artifacts", "node_modules", "__pycache__", ".venv"];
    let mut files = vec![root().join(".ci/run")];
    let mut folders = vec![root()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let entry = entry.unwrap();
            let path = entry.path();
            let kind = entry.file_type().unwrap();
            if kind.is_dir() {
                if !SKIPPED.iter().any(|skipped| entry.file_name() == *skipped) {
                    folders.push(path);
                }
            } else if kind.is_file()
                && has_extension(&path, &["rs", "js", "toml", "md", "py", "sh"])
            {
                files.push(path);
            }
        }
    }
    files.sort();
    assert!(files.len() > 40, "only {} files found", files.len());
    files
}
