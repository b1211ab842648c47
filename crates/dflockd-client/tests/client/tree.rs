//! What the library pulls in.

use std::process::Command;

#[test]
fn nothing_of_the_server_without_the_feature() {
    let tree = |features: &[&str]| {
        let output = Command::new(env!("CARGO"))
            .args(["tree", "--offline", "-p", "dflockd-client", "-e", "normal", "--prefix", "none"])
            .args(features)
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let of_the_server = |tree: &str| -> Vec<String> {
        let names = tree.lines().filter_map(|line| line.split(' ').next());
        let mut names: Vec<String> =
            names.filter(|name| name.starts_with("dflockd")).map(str::to_owned).collect();
        names.sort_unstable();
        names.dedup();
        names
    };
    assert_eq!(of_the_server(&tree(&[])), ["dflockd-api", "dflockd-client", "dflockd-wire"]);
    let all = of_the_server(&tree(&["--features", "testing"]));
    assert!(all.contains(&"dflockd-engine".to_owned()), "{all:?}");
}
