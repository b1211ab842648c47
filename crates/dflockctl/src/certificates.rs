//! `cluster cert`, and the certificates of `cluster init`: an authority for one cluster, and what it signs for nodes.
//!
//! The authority signs for the peer port only. Its key stays where it was made, and goes to no node.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, date_time_ymd,
};

use crate::failure::{Failure, Status};
use crate::files;
use crate::init::check_node;
use crate::output;

/// The certificate of the authority: all nodes have it.
pub(crate) const AUTHORITY: &str = "raft-ca.pem";
/// Its key, which no node has.
pub(crate) const AUTHORITY_KEY: &str = "raft-ca-key.pem";
/// The certificate of a node.
pub(crate) const CERTIFICATE: &str = "raft-cert.pem";
/// Its key.
pub(crate) const KEY: &str = "raft-key.pem";

/// An authority lives ten years: to change it every node must be told twice.
const AUTHORITY_DAYS: u64 = 3650;
/// A certificate is good from a day before it was made: the clocks of the nodes may differ.
const BEFORE_DAYS: u64 = 1;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The node ids.
    #[arg(required = true, value_name = "NODE")]
    nodes: Vec<String>,
    /// Where `cluster init` wrote: the authority is there, and the node gets a directory.
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
    #[command(flatten)]
    validity: Validity,
    /// Replace the certificate and the key that a node has.
    #[arg(long)]
    renew: bool,
    /// Make an authority first; there must be none.
    #[arg(long)]
    new_authority: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Validity {
    /// Days until the certificate of a node ends.
    #[arg(long = "cert-days", value_name = "DAYS", default_value = "730",
          value_parser = clap::value_parser!(u64).range(1..=3650))]
    days: u64,
}

/// `cluster cert`.
pub(crate) fn run(args: &Args) -> Result<Status, Failure> {
    for node in &args.nodes {
        check_node(node)?;
    }
    let authority =
        if args.new_authority { Authority::make(&args.dir)? } else { Authority::load(&args.dir)? };
    for node in &args.nodes {
        let dir = args.dir.join(node);
        if !args.renew && dir.join(CERTIFICATE).exists() {
            let shown = dir.join(CERTIFICATE).display().to_string();
            let text = format!("{shown} is there; give --renew to replace it");
            return Err(Failure::new(Status::No, text));
        }
        authority.issue(node, &dir, &args.validity, args.renew)?;
        let shown = dir.display();
        output::line(format!(
            "{shown}/{CERTIFICATE}, {KEY}, {AUTHORITY}: for {node}, good for {} days",
            args.validity.days
        ));
    }
    output::line(
        "copy them to where --raft-tls-cert, --raft-tls-key and --raft-tls-ca of the node",
    );
    output::line("point; a node that runs reads them again when it gets a SIGHUP");
    Ok(Status::Ok)
}

/// Who signs for the nodes of a cluster.
pub(crate) struct Authority {
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    /// Makes one, with a key that nobody had before.
    pub(crate) fn make(dir: &Path) -> Result<Self, Failure> {
        files::make_directory(dir)?;
        let key = KeyPair::generate().map_err(|error| failed(&error))?;
        let mut params = params("peers of dflockd", AUTHORITY_DAYS)?;
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let pem = params.self_signed(&key).map_err(|error| failed(&error))?.pem();
        files::write(&dir.join(AUTHORITY_KEY), &key.serialize_pem(), 0o600)?;
        files::write(&dir.join(AUTHORITY), &pem, 0o644)?;
        Ok(Self { pem, issuer: Issuer::new(params, key) })
    }

    fn load(dir: &Path) -> Result<Self, Failure> {
        let read = |name: &str| {
            let path = dir.join(name);
            fs::read_to_string(&path).map_err(|error| {
                let text = format!(
                    "no authority: {}: {error}; `cluster init` makes one, or --new-authority here",
                    path.display()
                );
                Failure::new(Status::No, text)
            })
        };
        let (pem, key) = (read(AUTHORITY)?, read(AUTHORITY_KEY)?);
        let key = KeyPair::from_pem(&key).map_err(|error| failed(&error))?;
        let issuer = Issuer::from_ca_cert_pem(&pem, key).map_err(|error| failed(&error))?;
        Ok(Self { pem, issuer })
    }

    /// Writes what a node needs. With `replace` a certificate and a key that are there go.
    pub(crate) fn issue(
        &self,
        node: &str,
        dir: &Path,
        validity: &Validity,
        replace: bool,
    ) -> Result<(), Failure> {
        files::make_directory(dir)?;
        let key = KeyPair::generate().map_err(|error| failed(&error))?;
        let mut params = params(node, validity.days)?;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        // Every node dials and is dialed.
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        params.use_authority_key_identifier_extension = true;
        let certificate = params.signed_by(&key, &self.issuer).map_err(|error| failed(&error))?;
        let write = if replace { files::replace } else { files::write };
        write(&dir.join(KEY), &key.serialize_pem(), 0o600)?;
        write(&dir.join(CERTIFICATE), &certificate.pem(), 0o644)?;
        write(&dir.join(AUTHORITY), &self.pem, 0o644)
    }
}

/// For a name, from now on.
fn params(name: &str, days: u64) -> Result<CertificateParams, Failure> {
    let mut params = CertificateParams::new(Vec::new()).map_err(|error| failed(&error))?;
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let day = |days: u64| Duration::from_secs(days * 24 * 60 * 60);
    let now = date_time_ymd(1970, 1, 1) + Duration::from_secs(since.as_secs());
    params.not_before = now - day(BEFORE_DAYS);
    params.not_after = now + day(days);
    Ok(params)
}

fn failed(error: &rcgen::Error) -> Failure {
    Failure::new(Status::No, format!("no certificate can be made: {error}"))
}
