//! The TLS settings of the server, from PEM files.
//!
//! Knows files and rustls, no sockets. TLS 1.2 and 1.3, no application protocols. Clients may show certificates if
//! there is an authority for them; whose they are is for others to say.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use rustls::crypto::CryptoProvider;
use rustls::crypto::ring;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use rustls::{Error, RootCertStore, ServerConfig};

/// Loads the certificate chain (the server's own certificate first), the private key that belongs to it, and the
/// authorities of client certificates, if clients may show any.
pub fn load(cert: &Path, key: &Path, client_ca: Option<&Path>) -> Result<Arc<ServerConfig>> {
    let chain = read_chain(cert)
        .with_context(|| format!("cannot read the TLS certificate {}", cert.display()))?;
    let private_key =
        read_key(key).with_context(|| format!("cannot read the TLS key {}", key.display()))?;

    // The provider is named, not taken from the process: a library that is linked in later and
    // brings another one must not change what the server speaks, or make the choice ambiguous.
    let provider = Arc::new(ring::default_provider());
    let clients = match client_ca {
        None => WebPkiClientVerifier::no_client_auth(),
        Some(path) => client_verifier(path, Arc::clone(&provider))
            .with_context(|| format!("cannot use the authorities of clients {}", path.display()))?,
    };
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .context("the cryptography provider lacks TLS 1.2 and 1.3")?
        .with_client_cert_verifier(clients)
        .with_single_cert(chain, private_key);
    match config {
        Ok(config) => Ok(Arc::new(config)),
        Err(Error::InconsistentKeys(_)) => bail!(
            "the TLS key {} does not belong to the certificate {}",
            key.display(),
            cert.display()
        ),
        Err(error) => Err(error).with_context(|| {
            format!("cannot use the TLS certificate {} with key {}", cert.display(), key.display())
        }),
    }
}

/// Checks certificates of clients, who may also come without one.
fn client_verifier(
    path: &Path,
    provider: Arc<CryptoProvider>,
) -> Result<Arc<dyn ClientCertVerifier>> {
    let mut roots = RootCertStore::empty();
    for authority in read_chain(path)? {
        roots.add(authority)?;
    }
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
    Ok(verifier.allow_unauthenticated().build()?)
}

fn read_chain(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let chain = CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(readable)?;
    if chain.is_empty() {
        bail!("no certificate in PEM form found");
    }
    Ok(chain)
}

fn read_key(path: &Path) -> Result<PrivateKeyDer<'static>> {
    match PrivateKeyDer::from_pem_file(path) {
        Ok(key) => Ok(key),
        Err(pem::Error::NoItemsFound) => {
            bail!("no private key in PEM form found (encrypted keys are not supported)")
        }
        Err(error) => Err(readable(error)),
    }
}

/// Lets an error of the system speak for itself, without a wrapper around it.
fn readable(error: pem::Error) -> anyhow::Error {
    if let pem::Error::Io(error) = error { error.into() } else { error.into() }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use dflockd_testkit::certificates::trusting;
    use dflockd_testkit::{Dir, Pair};
    use rustls::pki_types::ServerName;
    use rustls::version::{TLS12, TLS13};
    use rustls::{ClientConnection, ProtocolVersion, ServerConnection, SupportedProtocolVersion};

    use super::*;

    /// A certificate and its key, and a directory for files.
    struct Place {
        dir: Dir,
        pair: Pair,
    }

    impl Place {
        fn new() -> Self {
            Self { dir: Dir::new(), pair: Pair::new() }
        }

        fn file(&self, name: &str, content: &str) -> PathBuf {
            self.dir.write(name, content).into()
        }

        fn load(&self, cert: &str, key: &str) -> Result<Arc<ServerConfig>> {
            load(&self.file("cert.pem", cert), &self.file("key.pem", key), None)
        }

        /// The message of the refusal, with DIR for the directory.
        fn refusal(&self, cert: &str, key: &str) -> String {
            let error = self.load(cert, key).unwrap_err();
            format!("{error:#}").replace(self.dir.name("").trim_end_matches('/'), "DIR")
        }
    }

    /// A handshake in memory; gives the version that both agree on.
    fn handshake(
        server: Arc<ServerConfig>,
        pair: &Pair,
        versions: &[&'static SupportedProtocolVersion],
    ) -> Option<ProtocolVersion> {
        let name = ServerName::try_from("localhost").unwrap();
        let mut client = ClientConnection::new(trusting(&pair.cert, versions), name).unwrap();
        let mut server = ServerConnection::new(server).unwrap();
        while client.is_handshaking() || server.is_handshaking() {
            let mut bytes = Vec::new();
            while client.wants_write() {
                client.write_tls(&mut bytes).unwrap();
            }
            server.read_tls(&mut &bytes[..]).unwrap();
            server.process_new_packets().unwrap();
            bytes.clear();
            while server.wants_write() {
                server.write_tls(&mut bytes).unwrap();
            }
            client.read_tls(&mut &bytes[..]).unwrap();
            client.process_new_packets().unwrap();
        }
        assert_eq!(server.alpn_protocol(), None);
        assert!(server.peer_certificates().is_none());
        server.protocol_version()
    }

    #[test]
    fn both_versions() {
        let place = Place::new();
        let server = place.load(&place.pair.cert, &place.pair.key).unwrap();
        assert!(server.alpn_protocols.is_empty());
        for (versions, agreed) in [
            (&[&TLS12, &TLS13][..], ProtocolVersion::TLSv1_3),
            (&[&TLS13], ProtocolVersion::TLSv1_3),
            (&[&TLS12], ProtocolVersion::TLSv1_2),
        ] {
            assert_eq!(handshake(server.clone(), &place.pair, versions), Some(agreed));
        }
    }

    #[test]
    fn chain_and_text_around_it() {
        let (place, other) = (Place::new(), Place::new());
        let chain = format!("# ours\n{}\nissuer\n{}", place.pair.cert, other.pair.cert);
        assert_eq!(read_chain(&place.file("chain", &chain)).unwrap().len(), 2);
        // One file for both is common too.
        let both = format!("{}{chain}", place.pair.key);
        place.load(&both, &both).unwrap();
    }

    #[test]
    fn foreign_key_is_refused() {
        let (place, other) = (Place::new(), Place::new());
        assert_eq!(
            place.refusal(&place.pair.cert, &other.pair.key),
            "the TLS key DIR/key.pem does not belong to the certificate DIR/cert.pem"
        );
        // The server's own certificate stands first.
        let chain = format!("{}{}", other.pair.cert, place.pair.cert);
        assert!(place.refusal(&chain, &place.pair.key).contains("does not belong"));
    }

    #[test]
    fn unusable_files_are_named() {
        let place = Place::new();
        let cert_start = "cannot read the TLS certificate DIR/cert.pem: ";
        let key_start = "cannot read the TLS key DIR/key.pem: ";
        for cert in ["", "nonsense", &place.pair.key] {
            let refusal = place.refusal(cert, &place.pair.key);
            assert_eq!(refusal, format!("{cert_start}no certificate in PEM form found"));
        }
        let encrypted = place.pair.key.replace("PRIVATE KEY", "ENCRYPTED PRIVATE KEY");
        for key in ["", "nonsense", &place.pair.cert, &encrypted] {
            let why = "no private key in PEM form found (encrypted keys are not supported)";
            assert_eq!(place.refusal(&place.pair.cert, key), format!("{key_start}{why}"));
        }
        let cut = &place.pair.cert[..100];
        assert!(place.refusal(cut, &place.pair.key).starts_with(cert_start));
        let cut = &place.pair.key[..60];
        assert!(place.refusal(&place.pair.cert, cut).starts_with(key_start));
        let hollow = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
        let error = place.refusal(hollow, &place.pair.key);
        assert!(error.starts_with("cannot use the TLS certificate DIR/cert.pem"), "{error}");
        let hollow = "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n";
        let error = place.refusal(&place.pair.cert, hollow);
        assert!(error.starts_with("cannot use the TLS certificate DIR/cert.pem"), "{error}");

        let missing = place.dir.path("missing");
        let error = format!("{:#}", load(&missing, &missing, None).unwrap_err());
        assert!(error.contains("missing: ") && error.contains("os error 2"), "{error}");
    }
}
