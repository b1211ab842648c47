use std::time::{Duration, SystemTime};

use dflockd_api::command::{
    Acquire, ForceRelease, KvSet, Pop, RenewSession, Signal, Subscribe, Unsubscribe,
};
use dflockd_api::{End, Fence, Mode, Space, Span, Subscription};
use dflockd_core::{Separators, pattern_is_valid, pattern_matches};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

use super::*;

/// A file with two tenants that share something, somebody who looks, a scraper and an operator.
const FILE: &str = r#"
    [[identity]]
    name = "billing"
    role = "use"
    keys = [{ prefix = "billing/" }, { prefix = "shared/", verbs = ["read", "signal"] }]
    tokens = [
      { hash = "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08" },
      { hash = "sha256:60303ae22b998861bce3b28f33eec1be758a213c86c93c076dbe9f558c11c752", until = 2027-01-31 },
    ]

    [[identity]]
    name = "viewer"
    role = "read"

    [[identity]]
    name = "prometheus"
    role = "metrics"

    [[identity]]
    name = "ops@example.org"
    role = "admin"
"#;

fn named(name: &str) -> Identity {
    let all = Identities::parse(FILE).unwrap();
    let found = all.identities().iter().find(|identity| identity.name() == name);
    Identity::clone(found.unwrap())
}

fn acquire(key: &[u8]) -> Access<'_> {
    let acquire = Acquire { mode: Mode::Mutex, wait: Span(0), lease: None, salt: 0, key };
    Access::command(&acquire.into())
}

fn set(key: &[u8]) -> Access<'_> {
    Access::command(&KvSet { ttl: None, key, value: b"v" }.into())
}

fn signal(channel: &[u8]) -> Access<'_> {
    Access::command(&Signal { channel, payload: b"p" }.into())
}

fn watch(pattern: &[u8]) -> Access<'_> {
    let to = Subscription::Changes { pattern, from: None };
    Access::command(&Subscribe { to }.into())
}

fn unobserve(key: &[u8]) -> Access<'_> {
    let from = Subscription::Leaders { key };
    Access::command(&Unsubscribe { from }.into())
}

fn force(key: &[u8]) -> Access<'_> {
    Access::command(&ForceRelease { space: Space::Locks, fence: Fence(1), key }.into())
}

#[test]
fn roles_and_prefixes() {
    let own = Access::command(&Command::from(RenewSession { lease: Span(1) }));
    let get = Query::Kv { key: b"shared/x" };
    #[rustfmt::skip]
    let table: &[(Access<'_>, [bool; 4])] = &[
        // What                              billing viewer prometheus ops
        (own,                                [true,  true,  false, true]),
        (acquire(b"billing/a"),              [true,  false, false, true]),
        (acquire(b"billing/"),               [true,  false, false, true]),
        (acquire(b"billing"),                [false, false, false, true]),
        (acquire(b"billing2/a"),             [false, false, false, true]),
        (acquire(b"shared/a"),               [false, false, false, true]),
        (set(b"billing/a"),                  [true,  false, false, true]),
        (set(b"shared/a"),                   [false, false, false, true]),
        (Access::query(&get),                 [true,  true,  false, true]),
        (Access::read(b"other"),             [false, true,  false, true]),
        (signal(b"shared/a"),                [true,  false, false, true]),
        (signal(b"other"),                   [false, false, false, true]),
        (watch(b"billing/*"),                [true,  true,  false, true]),
        (watch(b"billing/a"),                [true,  true,  false, true]),
        (watch(b"shared/a/>"),               [true,  true,  false, true]),
        (watch(b"billing.*"),                [false, true,  false, true]),
        (watch(b"*"),                        [false, true,  false, true]),
        (watch(b">"),                        [false, true,  false, true]),
        (Access::follow(b"billing/>"),       [true,  true,  false, true]),
        (unobserve(b"other"),                [true,  true,  false, true]),
        (force(b"billing/a"),                [false, false, false, true]),
        (Access::OPERATE,                    [false, false, false, true]),
        (Access::SeeAll,                     [false, true,  false, true]),
        (Access::Metrics,                    [true,  true,  true,  true]),
        (Access::OWN,                        [true,  true,  false, true]),
    ];
    let identities = ["billing", "viewer", "prometheus", "ops@example.org"].map(named);
    for (access, expected) in table {
        let found = identities.each_ref().map(|identity| identity.may(*access));
        assert_eq!(found, *expected, "{access:?}");
    }
    let nobody = Identity::nobody();
    assert!(table.iter().all(|(access, _)| !nobody.may(*access)));
}

#[test]
fn who_takes_from_a_list_changes_it() {
    let read = Identity::new("r", Role::Read);
    let pop = Pop { end: End::Left, wait: None, key: b"k" };
    assert!(!read.may(Access::command(&pop.into())));
    assert!(read.may(Access::query(&Query::Range { key: b"k", start: 0, stop: -1 })));
}

#[test]
fn readable_prefixes() {
    let rule = |prefix: &str, rights| KeyRule { prefix: prefix.into(), rights };
    let read = Rights::NONE.with(Right::Read);
    let rules = vec![
        rule("b/", read),
        rule("a/x", read),
        rule("a/", read),
        rule("c/", Rights::NONE.with(Right::Lock)),
    ];
    let identity = Identity::with_rules("i", Role::Use, rules);
    let readable = |prefix: &str| {
        let found = identity.readable(prefix.as_bytes());
        found.into_iter().map(|it| String::from_utf8(it).unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(readable(""), ["a/", "b/"]);
    assert_eq!(readable("a"), ["a/"]);
    assert_eq!(readable("a/x/y"), ["a/x/y"]);
    assert_eq!(readable("c/"), [""; 0]);
    assert_eq!(Identity::new("all", Role::Read).readable(b"k"), [b"k"]);
    assert!(!Identity::with_rules("i", Role::Use, vec![rule("a", read)]).sees_all());
    assert!(Identity::with_rules("i", Role::Use, vec![rule("", read)]).sees_all());
}

#[test]
fn files() {
    let all = Identities::parse(FILE).unwrap();
    let at = |unix| SystemTime::UNIX_EPOCH + Duration::from_secs(unix);
    let end = at(1_801_353_600);
    assert_eq!(all.credentials()[0].proof, Proof::Token(TokenHash::of(b"test")));
    assert_eq!(all.credentials()[1].until, Some(end));
    let valid = |now| all.credentials().iter().map(|it| it.is_valid_at(now)).collect::<Vec<_>>();
    assert_eq!(valid(end - Duration::from_secs(1)), [true, true]);
    assert_eq!(valid(end), [true, false]);
    assert_eq!((all.next_change(at(0)), all.next_change(end)), (Some(end), None));
    assert!(Identities::parse("").unwrap().identities().is_empty());
}

#[test]
fn files_that_are_refused() {
    let hash = TokenHash::of(b"test");
    let token =
        |rest: &str| format!("name = 'a'\nrole = 'use'\ntokens = [{{ hash = '{hash}'{rest} }}]");
    let entry = |rest: &str| format!("name = 'a'\nrole = 'use'\n{rest}");
    let cases = [
        ("name = 'a'".to_owned(), "missing field `role`"),
        (entry("key = []"), "unknown field `key`"),
        ("name = 'a'\nrole = 'root'".to_owned(), "unknown variant `root`"),
        ("name = 'a b'\nrole = 'use'".to_owned(), "letters, digits"),
        ("name = ''\nrole = 'use'".to_owned(), "letters, digits"),
        ("name = 'auth-token'\nrole = 'use'".to_owned(), "stands for those"),
        (entry("keys = [{ prefix = 'a b' }]"), "no key begins"),
        (entry("keys = [{ prefix = 'a', verbs = ['admin'] }]"), "unknown variant `admin`"),
        (
            "name = 'a'\nrole = 'read'\nkeys = [{ prefix = 'a', verbs = ['lock'] }]".to_owned(),
            "may not",
        ),
        ("name = 'a'\nrole = 'admin'\nkeys = []".to_owned(), "leave them out"),
        (entry("tokens = [{ hash = 'md5:1' }]"), "a hash is"),
        (entry("tokens = [{ token = 'secret' }]"), "unknown field `token`"),
        (token(", until = 12:00:00"), "is no time"),
        (token(", until = 2027-01-31T12:00:00"), "no time zone"),
        (token(", from = 2027-01-31, until = 2027-01-31"), "not before its end"),
        (format!("{0}\n[[identity]]\n{0}", entry("")), "two of this name"),
        (
            format!("{}\n[[identity]]\n{}", token(""), token("").replace("'a'", "'b'")),
            "\"a\" has the same",
        ),
    ];
    for (text, why) in cases {
        let error = Identities::parse(&format!("[[identity]]\n{text}")).unwrap_err().to_string();
        assert!(error.contains(why), "{text}\n{error}");
    }
}

/// What a certificate is called, by all kinds of names that a file can have.
#[test]
fn names_of_certificates() {
    use rcgen::{CertificateParams, DnType, KeyPair, SanType};
    let mut params = CertificateParams::new(["billing.example.org".to_owned()]).unwrap();
    params.distinguished_name.push(DnType::CommonName, "billing");
    let uri = SanType::URI("spiffe://example.org/billing".try_into().unwrap());
    let email = SanType::Rfc822Name("ada@example.org".try_into().unwrap());
    params.subject_alt_names.extend([uri, email]);
    let certificate = params.self_signed(&KeyPair::generate().unwrap()).unwrap();
    let mut names = certificate_names(certificate.der());
    names.sort();
    let expected = [
        "cn:billing",
        "dns:billing.example.org",
        "email:ada@example.org",
        "uri:spiffe://example.org/billing",
    ];
    // rcgen gives a name of its own besides.
    names.retain(|name| name != "cn:rcgen self signed cert");
    assert_eq!(names, expected);
    let certificates = expected.map(|name| format!("{name:?}")).join(", ");
    let text = format!("[[identity]]\nname = 'a'\nrole = 'use'\ncertificates = [{certificates}]");
    let file = Identities::parse(&text).unwrap();
    let proofs = file.credentials().iter().map(|it| it.proof.clone());
    assert!(proofs.eq(expected.map(|name| Proof::Certificate(name.to_owned()))));
    assert!(certificate_names(b"no certificate").is_empty());
    for wrong in ["billing", "dns:", "DNS:a"] {
        let text = format!("[[identity]]\nname = 'a'\nrole = 'use'\ncertificates = ['{wrong}']");
        let error = Identities::parse(&text).unwrap_err().to_string();
        assert!(error.contains("begins with one of"), "{error}");
    }
}

#[test]
fn hashes() {
    let text = "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08";
    let hash: TokenHash = text.parse().unwrap();
    assert_eq!((hash, hash.to_string().as_str()), (TokenHash::of(b"test"), text));
    for wrong in ["", "sha256:", &text[..70], &text[7..], "sha256:zz"] {
        assert!(wrong.parse::<TokenHash>().is_err(), "{wrong}");
    }
}

/// Keys, prefixes and patterns that nest, touch and nearly do.
fn text(tokens: &'static [&'static str]) -> impl Strategy<Value = Vec<u8>> {
    vec(select(tokens), 0..6).prop_map(|tokens| tokens.concat().into_bytes())
}

fn rules() -> impl Strategy<Value = Vec<KeyRule>> {
    let rule = (text(&["a", "b", ".", "/", "*", ">"]), 0_u8..16)
        .prop_map(|(prefix, bits)| KeyRule { prefix, rights: Rights(bits) });
    vec(rule, 0..4)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(20_000) })]

    /// A key may be used if a rule for how it begins says so, and not otherwise.
    #[test]
    fn keys_match_the_model(
        rules in rules(),
        key in text(&["a", "b", ".", "/"]),
        role in select(&Role::ALL[..]),
    ) {
        let identity = Identity::with_rules("i", role, rules.clone());
        for (index, (right, _)) in Rights::VERBS.into_iter().enumerate() {
            let in_role = match role {
                Role::Metrics => false,
                Role::Read => right == Right::Read,
                Role::Use | Role::Admin => true,
            };
            let in_rules = rules.iter().any(|rule| {
                rule.rights.0 >> index & 1 == 1
                    && rule.prefix.iter().enumerate().all(|(at, byte)| key.get(at) == Some(byte))
            });
            let found = identity.may(Access::To(right, Subject::Name(&key)));
            prop_assert_eq!(found, in_role && in_rules);
        }
    }

    /// Whoever may follow a pattern may read all that matches it, whatever counts as a separator, and finds it in the
    /// prefixes that it may list.
    #[test]
    fn patterns_show_nothing_else(
        rules in rules(),
        pattern in text(&["a", "b", ".", "/", "*", ">"]),
        key in text(&["a", "b", ".", "/"]),
    ) {
        let identity = Identity::with_rules("i", Role::Use, rules);
        let may_read = identity.may(Access::read(&key));
        for separators in [Separators::Dots, Separators::DotsAndSlashes] {
            let matches = pattern_is_valid(&pattern, separators)
                && pattern_matches(&pattern, &key, separators);
            prop_assert!(!matches || !identity.may(Access::follow(&pattern)) || may_read);
        }
        let listed = identity.readable(b"");
        prop_assert_eq!(listed.iter().any(|prefix| key.starts_with(prefix)), may_read);
        let within = identity.readable(&pattern);
        let is_within = key.starts_with(&pattern) && may_read;
        prop_assert_eq!(within.iter().any(|prefix| key.starts_with(prefix)), is_within);
        prop_assert!(within.is_sorted());
    }
}
