//! `identity`: entries for the file of identities of a server, and what such a file says. No server is asked.

use std::fmt::Write;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use clap::Subcommand;
use dflockd_identity::{
    Access, Identities, Identity, Proof, RESERVED, Right, Rights, Role, Subject, TOKEN_BYTES_MAX,
    TOKEN_BYTES_MIN, TokenHash,
};

use serde_json::json;

use crate::failure::{Failure, Status};
use crate::files::{secret, write};
use crate::output::{self, Output};

#[derive(Debug, Subcommand)]
pub(crate) enum IdentityVerb {
    /// Make a token for somebody and print the entry for the file of identities.
    New(NewArgs),
    /// Print the hash of a token, which is read from stdin or from a file.
    Hash(HashArgs),
    /// Check a file of identities, and say what each of them may do.
    Check(CheckArgs),
}

#[derive(Debug, clap::Args)]
pub(crate) struct NewArgs {
    /// Its name: 1 to 64 letters, digits and characters of `._-@/`.
    name: String,
    /// What it may do at most: metrics, read, use or admin.
    #[arg(long, default_value = "use", value_parser = role)]
    role: Role,
    /// Keys that it may use, by how they begin; with `:VERB,…` only to read, lock, write, signal. Without it: all.
    #[arg(long = "prefix", value_name = "PREFIX[:VERBS]")]
    prefixes: Vec<String>,
    /// A new file for the token; without it the token is printed on stderr, once.
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct HashArgs {
    /// The file with the token; white space around it is ignored.
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct CheckArgs {
    /// The file of identities.
    file: PathBuf,
    /// Say only what this one may do.
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Say what they may do with this key.
    #[arg(long, value_name = "KEY")]
    key: Option<String>,
    #[command(flatten)]
    output: Output,
}

fn role(text: &str) -> Result<Role, String> {
    let found = Role::ALL.into_iter().find(|role| role.name() == text);
    found.ok_or_else(|| "metrics, read, use or admin".to_owned())
}

/// `identity`.
pub(crate) fn run(verb: IdentityVerb) -> Result<Status, Failure> {
    match verb {
        IdentityVerb::New(args) => new(&args),
        IdentityVerb::Hash(args) => hash(&args),
        IdentityVerb::Check(args) => check(&args),
    }
}

fn new(args: &NewArgs) -> Result<Status, Failure> {
    let token = secret()?;
    let entry = entry(args, TokenHash::of(token.as_bytes()));
    // What is printed must be taken by the server.
    Identities::parse(&entry).map_err(|error| Failure::usage(error.to_string()))?;
    match &args.token_file {
        Some(path) => write(path, &format!("{token}\n"), 0o600)?,
        None => eprintln!("token: {token}"),
    }
    output::line(entry.trim_end());
    Ok(Status::Ok)
}

fn entry(args: &NewArgs, hash: TokenHash) -> String {
    let quoted = |text: &str| json!(text).to_string();
    let mut entry =
        format!("[[identity]]\nname = {}\nrole = \"{}\"\n", quoted(&args.name), args.role);
    if !args.prefixes.is_empty() {
        entry.push_str("keys = [\n");
        for prefix in &args.prefixes {
            // A prefix may have a colon, the names of verbs have none.
            let is_verb = |verb: &str| Rights::VERBS.iter().any(|(_, name)| *name == verb);
            let split = prefix.rsplit_once(':');
            let split = split.filter(|(_, verbs)| verbs.split(',').all(is_verb));
            let (prefix, verbs) = split.map_or((prefix.as_str(), None), |(a, b)| (a, Some(b)));
            let verbs = verbs.map_or_else(String::new, |verbs| {
                let verbs: Vec<_> = verbs.split(',').map(quoted).collect();
                format!(", verbs = [{}]", verbs.join(", "))
            });
            // A string can be written to.
            let _ = writeln!(entry, "  {{ prefix = {}{verbs} }},", quoted(prefix));
        }
        entry.push_str("]\n");
    }
    let _ = writeln!(entry, "tokens = [\n  {{ hash = \"{hash}\" }},\n]");
    entry
}

fn hash(args: &HashArgs) -> Result<Status, Failure> {
    let mut token = Vec::new();
    let limit = TOKEN_BYTES_MAX as u64 + 1024;
    let read = match &args.token_file {
        Some(path) => std::fs::File::open(path)
            .and_then(|file| file.take(limit).read_to_end(&mut token))
            .map_err(|error| can_not_read(path, &error)),
        None => std::io::stdin()
            .take(limit)
            .read_to_end(&mut token)
            .map_err(|error| Failure::new(Status::No, format!("can not read stdin: {error}"))),
    };
    read?;
    let token = token.trim_ascii();
    if !(TOKEN_BYTES_MIN..=TOKEN_BYTES_MAX).contains(&token.len()) {
        return Err(Failure::usage(format!(
            "a token has {TOKEN_BYTES_MIN} to {TOKEN_BYTES_MAX} bytes, and must be random: make one with \
             `dflockctl identity new` or `openssl rand -hex 32`"
        )));
    }
    if token.iter().any(|byte| byte.is_ascii_whitespace()) {
        return Err(Failure::usage("a token has no white space"));
    }
    output::line(TokenHash::of(token).to_string());
    Ok(Status::Ok)
}

fn check(args: &CheckArgs) -> Result<Status, Failure> {
    let text = std::fs::read_to_string(&args.file).map_err(|e| can_not_read(&args.file, &e))?;
    let refuse = |why: String| Failure::new(Status::No, format!("{}: {why}", args.file.display()));
    let all = Identities::parse(&text).map_err(|error| refuse(error.to_string()))?;
    let is_wanted = |who: &&Identity| args.name.as_ref().is_none_or(|name| name == who.name());
    let wanted: Vec<&Identity> =
        all.identities().iter().map(|who| &**who).filter(is_wanted).collect();
    if let Some(name) = args.name.as_ref().filter(|_| wanted.is_empty()) {
        let known = RESERVED.contains(&name.as_str());
        let why = if known { "has no entry: it needs none" } else { "is not in the file" };
        return Err(refuse(format!("{name} {why}")));
    }
    let now = SystemTime::now();
    for who in wanted {
        let own = || all.credentials().iter().filter(|it| it.identity.name() == who.name());
        let of = |valid: bool| {
            let tokens = own().filter(|it| matches!(it.proof, Proof::Token(_)));
            tokens.filter(|it| it.is_valid_at(now) == valid).count()
        };
        let (valid, other) = (of(true), of(false));
        let certificates: Vec<&str> = own()
            .filter_map(|it| match &it.proof {
                Proof::Certificate(name) => Some(name.as_str()),
                Proof::Token(_) => None,
            })
            .collect();
        let may = args.key.as_ref().map(|key| verbs(who, key.as_bytes()));
        if args.output.json {
            let keys = who.rules().iter().map(|rule| {
                json!({ "prefix": String::from_utf8_lossy(&rule.prefix), "verbs": names(rule.rights) })
            });
            output::json(&json!({
                "name": who.name(),
                "role": who.role().name(),
                "keys": keys.collect::<Vec<_>>(),
                "tokens": valid,
                "tokens_not_valid_now": other,
                "certificates": certificates,
                "may": may,
            }));
            continue;
        }
        let tokens = match (valid, other) {
            (0, 0) if certificates.is_empty() => "none: nobody can be it".to_owned(),
            (valid, 0) => format!("{valid} valid"),
            (valid, other) => format!("{valid} valid, {other} not valid now"),
        };
        output::line(format!("{}: role {}, tokens: {tokens}", who.name(), who.role()));
        if !certificates.is_empty() {
            output::line(format!("  certificates: {}", certificates.join(", ")));
        }
        match may {
            Some(may) if may.is_empty() => output::line("  nothing with this key"),
            Some(may) => output::line(format!("  {}", may.join(", "))),
            None => rules(who),
        }
    }
    Ok(Status::Ok)
}

fn rules(who: &Identity) {
    match who.role() {
        Role::Metrics => output::line("  reads the metrics and nothing else"),
        Role::Admin => output::line("  everything, and what operators do"),
        Role::Read | Role::Use if who.rules().is_empty() => output::line("  no key"),
        Role::Read | Role::Use => {
            for rule in who.rules() {
                let prefix = match &rule.prefix[..] {
                    [] => "all keys".to_owned(),
                    prefix => format!("{}…", prefix.escape_ascii()),
                };
                output::line(format!("  {prefix}: {}", names(rule.rights).join(", ")));
            }
        }
    }
}

/// What somebody may do with a key.
fn verbs(who: &Identity, key: &[u8]) -> Vec<&'static str> {
    let may = |right: Right| who.may(Access::To(right, Subject::Name(key)));
    Rights::VERBS.into_iter().filter(|(right, _)| may(*right)).map(|(_, name)| name).collect()
}

fn names(rights: Rights) -> Vec<&'static str> {
    Rights::VERBS
        .into_iter()
        .filter(|(right, _)| rights.has(*right))
        .map(|(_, name)| name)
        .collect()
}

fn can_not_read(path: &Path, error: &std::io::Error) -> Failure {
    Failure::new(Status::No, format!("can not read {}: {error}", path.display()))
}
