//! Certificates, and clients that trust them.

use std::sync::Arc;

use rcgen::{CertificateParams, KeyPair};
use rustls::crypto::ring;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
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

/// A client that trusts one certificate and speaks some versions.
pub fn trusting(root: &str, versions: &[&'static SupportedProtocolVersion]) -> Arc<ClientConfig> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(root.as_bytes()).unwrap()).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(versions)
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    Arc::new(config)
}
