//! Completions, manual pages, help.

use dflockd_testkit::Dir;

use crate::command::ctl;

#[test]
fn completions() {
    for (shell, text) in [("bash", "_dflockctl"), ("zsh", "#compdef"), ("fish", "complete -c")] {
        let ran = ctl(&["completions", shell]).run().expect(0);
        assert!(ran.out.contains(text) && ran.out.contains("force-release"), "{shell}");
    }
    ctl(&["completions", "dos"]).run().refused(64, "bash");
}

#[test]
fn manual_pages() {
    let dir = Dir::new();
    let ran = ctl(&["man"]).run().expect(0);
    assert!(ran.out.contains(".TH dflockctl 1"), "{}", ran.out);
    ctl(&["man", "--dir", &dir.name("pages")]).run().expect(0);
    for page in ["dflockctl", "dflockctl-lock", "dflockctl-kv-cas", "dflockctl-top"] {
        assert!(dir.read(&format!("pages/{page}.1")).contains(".TH"), "{page}");
    }
    assert!(dir.read("pages/dflockctl-lock.1").contains("on\\-lost"));
}

#[test]
fn help_goes_to_stdout() {
    let ran = ctl(&["--help"]).run().expect(0);
    assert!(ran.out.contains("Exit statuses") && ran.err.is_empty());
    assert!(!ran.out.contains('\u{1b}'));
    assert!(ctl(&["lock", "--help"]).run().expect(0).out.contains("--on-lost"));
    assert!(ctl(&["--version"]).run().expect(0).out.starts_with("dflockctl "));
}

#[test]
fn every_verb_is_documented() {
    let document = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/dflockctl.md");
    let document = std::fs::read_to_string(document).unwrap();
    let help = ctl(&["--help"]).run().expect(0).out;
    let verbs = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let verbs: Vec<&str> = verbs
        .take_while(|line| !line.is_empty())
        .filter(|line| line.starts_with("  ") && !line.starts_with("   "))
        .filter_map(|line| line.split_whitespace().next())
        .collect();
    assert!(verbs.len() > 20, "{help}");
    for verb in verbs {
        let named = |end: &str| document.contains(&format!("`{verb}{end}"));
        assert!(named("`") || named(" "), "docs/dflockctl.md does not name {verb}");
    }
}
