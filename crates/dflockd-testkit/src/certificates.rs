//! Certificates, and clients that trust them.

use std::sync::Arc;

use rcgen::{BasicConstraints, CertificateParams, DistinguishedName, IsCa, Issuer, KeyPair};
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore, SupportedProtocolVersion, version};

use crate::Dir;

/// A certificate for this machine that signs itself, and its key; both as PEM.
#[derive(Debug)]
pub struct Pair {
    /// The certificate.
    pub cert: String,
    /// Its private key.
    pub key: String,
}

impl Pair {
    /// A new one.
    #[expect(clippy::new_without_default, reason = "each is another one")]
    pub fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let names = ["localhost", "127.0.0.1"].map(str::to_owned);
        let params = CertificateParams::new(names).unwrap();
        let cert = params.self_signed(&key).unwrap().pem();
        Self { cert, key: key.serialize_pem() }
    }

    /// Writes both files and gives the flags that name them.
    pub fn flags(&self, dir: &Dir) -> [String; 2] {
        let (cert, key) = (dir.write("cert.pem", &self.cert), dir.write("key.pem", &self.key));
        [format!("--tls-cert={cert}"), format!("--tls-key={key}")]
    }

    /// A client that trusts this certificate only.
    pub fn client(&self) -> Arc<ClientConfig> {
        trusting(&self.cert, &[&version::TLS12, &version::TLS13])
    }
}

/// Who signs certificates of clients.
pub struct Authority {
    /// Its own certificate as PEM.
    pub cert: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    /// A new one.
    #[expect(clippy::new_without_default, reason = "each is another one")]
    pub fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let cert = params.self_signed(&key).unwrap().pem();
        Self { cert, issuer: Issuer::new(params, key) }
    }

    /// A certificate of a client with this name, and its key.
    pub fn sign(&self, name: &str) -> Pair {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new([name.to_owned()]).unwrap();
        params.distinguished_name = DistinguishedName::new();
        let cert = params.signed_by(&key, &self.issuer).unwrap().pem();
        Pair { cert, key: key.serialize_pem() }
    }
}

/// A client that trusts one certificate and shows another one.
pub fn showing(root: &str, own: &Pair) -> Arc<ClientConfig> {
    showing_by(root, own, &[&version::TLS12, &version::TLS13])
}

/// The same for a client that speaks some versions. With TLS 1.2 it hears during its handshake whether it is let in.
pub fn showing_by(
    root: &str,
    own: &Pair,
    versions: &[&'static SupportedProtocolVersion],
) -> Arc<ClientConfig> {
    let chain = vec![CertificateDer::from_pem_slice(own.cert.as_bytes()).unwrap()];
    let key = PrivateKeyDer::from_pem_slice(own.key.as_bytes()).unwrap();
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let builder = builder.with_protocol_versions(versions).unwrap();
    let config = builder.with_root_certificates(trust(root)).with_client_auth_cert(chain, key);
    Arc::new(config.unwrap())
}

fn trust(root: &str) -> RootCertStore {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(root.as_bytes()).unwrap()).unwrap();
    roots
}

/// A client that trusts one certificate and speaks some versions.
pub fn trusting(root: &str, versions: &[&'static SupportedProtocolVersion]) -> Arc<ClientConfig> {
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(versions)
        .unwrap()
        .with_root_certificates(trust(root))
        .with_no_client_auth();
    Arc::new(config)
}
