//! Four identities, and what each of them may do: the table that the tests of every API go by.

use crate::Dir;

/// Somebody in [`FILE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Known {
    /// The name in the file.
    pub name: &'static str,
    /// The token that goes with it.
    pub token: &'static str,
}

/// May use the keys below `billing/`, and read and signal what is below `shared/`.
pub const BILLING: Known = Known { name: "billing", token: "billing-token-of-the-tests" };
/// May read everything.
pub const VIEWER: Known = Known { name: "viewer", token: "viewer-token-of-the-tests" };
/// May read the metrics.
pub const SCRAPER: Known = Known { name: "scraper", token: "scraper-token-of-the-tests" };
/// May do everything, as an operator.
pub const OPERATOR: Known = Known { name: "ops", token: "operator-token-of-the-tests" };

/// All of them.
pub const ALL: [Known; 4] = [BILLING, VIEWER, SCRAPER, OPERATOR];

/// A key for each thing that rights can say about one.
pub const KEYS: [&str; 3] = ["billing/k", "shared/k", "other/k"];

/// What a request needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Needs {
    /// Nothing.
    Nothing,
    /// To be somebody who may have a session.
    Session,
    /// To read the key.
    Read,
    /// To lock it.
    Lock,
    /// To change it.
    Write,
    /// To send to it.
    Signal,
    /// To see all keys.
    All,
}

impl Known {
    /// Whether this one may do that with this key.
    #[must_use]
    pub fn may(self, needs: Needs, key: &str) -> bool {
        let (own, shared) = (key.starts_with("billing/"), key.starts_with("shared/"));
        match (self.name, needs) {
            (_, Needs::Nothing) | ("ops", _) => true,
            ("scraper", _) => false,
            (_, Needs::Session) => true,
            ("billing", Needs::Read | Needs::Signal) => own || shared,
            ("billing", Needs::Lock | Needs::Write) => own,
            ("viewer", Needs::Read | Needs::All) => true,
            _ => false,
        }
    }
}

/// The file that knows them. The hashes are those of the tokens, as `sha256sum` prints them.
pub const FILE: &str = r#"
[[identity]]
name = "billing"
role = "use"
keys = [{ prefix = "billing/" }, { prefix = "shared/", verbs = ["read", "signal"] }]
tokens = [{ hash = "sha256:a2a99f4690d20796150fecfaf3ab98444a035f9c3de3c593de856a33fb28b783" }]

[[identity]]
name = "viewer"
role = "read"
tokens = [{ hash = "sha256:5f8b27761cc587c85daa2daa03dd2adb19604f2217703bdac5b8e237b8fc7264" }]

[[identity]]
name = "scraper"
role = "metrics"
tokens = [{ hash = "sha256:3538d91bb89cc8ff095b8eb4d2f48ce2b929adc908189e0ceecdcb5beed4f932" }]

[[identity]]
name = "ops"
role = "admin"
tokens = [{ hash = "sha256:11371aff22562e1c8540b6417a2429007fbbdb4ae0ffda050503b3d77632e972" }]
"#;

/// Writes the file and gives its name.
#[must_use]
pub fn write(dir: &Dir) -> String {
    dir.write("identities.toml", FILE)
}
