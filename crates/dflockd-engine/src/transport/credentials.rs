//! What a node proves itself with, and what it accepts from others.
//!
//! Knows files, certificates and secrets; no sockets. Both kinds can be exchanged while the node
//! runs: see [`Credentials`].

use std::fmt::Display;
use std::path::Path;
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, verify_server_cert_signed_by_trust_anchor};
use rustls::crypto::{
    CryptoProvider, WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature,
};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{NoServerSessionStorage, ParsedCertificate, WebPkiClientVerifier};
use rustls::version::TLS13;
use rustls::{
    ClientConfig, DigitallySignedStruct, Error as TlsError, RootCertStore, ServerConfig,
    SignatureScheme,
};
use thiserror::Error;
use x509_parser::prelude::{FromDer, X509Certificate};
use zeroize::Zeroizing;

/// The shortest shared secret.
pub const SECRET_BYTES_MIN: usize = 32;

/// A secret that all members know. No Debug: it must not reach a log.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Arc<Zeroizing<Vec<u8>>>);

impl Secret {
    /// Takes the secret; refused if it is shorter than [`SECRET_BYTES_MIN`].
    pub fn new(bytes: Vec<u8>) -> Result<Self, CredentialError> {
        let bytes = Zeroizing::new(bytes);
        if bytes.len() < SECRET_BYTES_MIN {
            let length = bytes.len();
            return Err(CredentialError(format!(
                "the shared secret of the cluster has {length} bytes, it needs {SECRET_BYTES_MIN}"
            )));
        }
        Ok(Self(Arc::new(bytes)))
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Why credentials cannot be used, for people.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct CredentialError(String);

/// What a node proves itself with to its peers. A secret, TLS, or both.
///
/// To rotate a secret without an interruption, give every node `[old, new]`, then every node
/// `[new, old]`, then `[new]`. To rotate a certificate authority, give every node a CA file with
/// both, then new certificates, then a CA file with the new one only.
#[derive(Clone)]
pub struct Credentials {
    /// Shared secrets: the first is used for dialing, any is accepted. May be empty with TLS.
    pub secrets: Vec<Secret>,
    /// Mutual TLS.
    pub tls: Option<PeerTls>,
}

impl Credentials {
    /// Whether a node with this id can use them.
    pub(super) fn check(&self, node: &str) -> Result<(), CredentialError> {
        match &self.tls {
            None if self.secrets.is_empty() => Err(CredentialError(
                "peers need a shared secret or TLS, neither is given".to_owned(),
            )),
            Some(tls) if tls.name != node => Err(CredentialError(format!(
                "the common name of the peer certificate is {}, the node id is {node}: they must be equal",
                tls.name.escape_debug()
            ))),
            Some(_) | None => Ok(()),
        }
    }

    /// Whether a connection that was made with `proven` would be made again today.
    pub(super) fn still_accept(&self, proven: &Proven) -> bool {
        let secret = match &proven.secret {
            Some(secret) => self.secrets.contains(secret),
            None => self.secrets.is_empty(),
        };
        let tls = match (&proven.certificates, &self.tls) {
            (Some(chain), Some(tls)) => tls.trusts(chain, proven.role),
            (None, None) => true,
            (Some(_), None) | (None, Some(_)) => false,
        };
        secret && tls
    }
}

/// Which end of a connection somebody is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    Dialer,
    Acceptor,
}

/// What the other side of a connection has proven itself with.
pub(super) struct Proven {
    pub(super) role: Role,
    pub(super) secret: Option<Secret>,
    pub(super) certificates: Option<Chain>,
    /// Frames are sealed.
    pub(super) is_sealed: bool,
}

impl Proven {
    /// Whether somebody on the path can do no more than cut the connection.
    pub(super) fn is_protected(&self) -> bool {
        self.is_sealed || self.certificates.is_some()
    }
}

/// The certificates of a node, its own first.
pub(super) type Chain = Vec<CertificateDer<'static>>;

/// Mutual TLS 1.3 between members: both sides show a certificate of the cluster's authority, whose
/// common name is the node id.
///
/// The certificate is checked for the node id only, not for a host name: a node may be reached under
/// many addresses, but it is one node.
#[derive(Clone)]
pub struct PeerTls {
    /// The common name of our own certificate.
    name: String,
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
    acceptors: Arc<AcceptorVerifier>,
    dialers: Arc<dyn ClientCertVerifier>,
}

impl PeerTls {
    /// Loads our certificate chain (our own certificate first), its key, and the certificates of the
    /// authorities whose members we accept, all in PEM form.
    pub fn load(cert: &Path, key: &Path, ca: &Path) -> Result<Self, CredentialError> {
        let chain = read_certificates(cert, "certificate")?;
        let private_key = read_key(key)?;
        let name = common_name(&chain[0]).map_err(|reason| fault("certificate", cert, reason))?;

        let mut roots = RootCertStore::empty();
        for authority in read_certificates(ca, "authority")? {
            roots.add(authority).map_err(|error| fault("authority", ca, error))?;
        }
        let roots = Arc::new(roots);

        // Named, not taken from the process: see the TLS of the client port.
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let acceptors = Arc::new(AcceptorVerifier::new(Arc::clone(&roots), &provider));
        let dialers = WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(&provider))
            // Strangers need not know who signs for us.
            .clear_root_hint_subjects()
            .build()
            .map_err(|error| fault("authority", ca, error))?;

        let unusable = |error: TlsError| {
            fault("certificate", cert, format!("not usable with key {}: {error}", key.display()))
        };
        let client =
            client_config(&provider, &acceptors, &chain, &private_key).map_err(unusable)?;
        let server = server_config(&provider, &dialers, &chain, &private_key).map_err(unusable)?;
        Ok(Self { name, client, server, acceptors, dialers })
    }

    pub(super) fn client(&self) -> Arc<ClientConfig> {
        Arc::clone(&self.client)
    }

    pub(super) fn server(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.server)
    }

    fn trusts(&self, chain: &[CertificateDer<'static>], role: Role) -> bool {
        let Some((first, rest)) = chain.split_first() else { return false };
        let now = UnixTime::now();
        match role {
            Role::Acceptor => self.acceptors.trusts(first, rest, now).is_ok(),
            Role::Dialer => self.dialers.verify_client_cert(first, rest, now).is_ok(),
        }
    }
}

fn client_config(
    provider: &Arc<CryptoProvider>,
    verifier: &Arc<AcceptorVerifier>,
    chain: &[CertificateDer<'static>],
    key: &PrivateKeyDer<'static>,
) -> Result<Arc<ClientConfig>, TlsError> {
    let mut config = ClientConfig::builder_with_provider(Arc::clone(provider))
        .with_protocol_versions(&[&TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::clone(verifier) as Arc<dyn ServerCertVerifier>)
        .with_client_auth_cert(chain.to_vec(), key.clone_key())?;
    config.enable_sni = false;
    // A resumed session is not checked against the authorities again.
    config.resumption = Resumption::disabled();
    Ok(Arc::new(config))
}

fn server_config(
    provider: &Arc<CryptoProvider>,
    verifier: &Arc<dyn ClientCertVerifier>,
    chain: &[CertificateDer<'static>],
    key: &PrivateKeyDer<'static>,
) -> Result<Arc<ServerConfig>, TlsError> {
    let mut config = ServerConfig::builder_with_provider(Arc::clone(provider))
        .with_protocol_versions(&[&TLS13])?
        .with_client_cert_verifier(Arc::clone(verifier))
        .with_single_cert(chain.to_vec(), key.clone_key())?;
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}

/// What to tell rustls we dial. It is neither sent nor checked: [`common_name`] is.
pub(super) fn any_server_name() -> ServerName<'static> {
    ServerName::try_from("peer.invalid").expect("a DNS name")
}

/// The node id of a certificate.
pub(super) fn common_name(certificate: &CertificateDer<'_>) -> Result<String, String> {
    let (_, certificate) = X509Certificate::from_der(certificate)
        .map_err(|error| format!("the certificate cannot be read: {error}"))?;
    let mut names = certificate.subject().iter_common_name();
    // Of several names each reader might take another one.
    let (Some(name), None) = (names.next(), names.next()) else {
        return Err("the certificate has no common name, or more than one".to_owned());
    };
    name.as_str()
        .map(str::to_owned)
        .map_err(|_| "the common name of the certificate is not plain text".to_owned())
}

/// Checks that the node that we dialed has a certificate of the cluster's authorities. Which node it
/// is, is compared after the handshake: see [`common_name`].
#[derive(Debug)]
struct AcceptorVerifier {
    roots: Arc<RootCertStore>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl AcceptorVerifier {
    fn new(roots: Arc<RootCertStore>, provider: &CryptoProvider) -> Self {
        Self { roots, algorithms: provider.signature_verification_algorithms }
    }

    fn trusts(
        &self,
        first: &CertificateDer<'_>,
        rest: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<(), TlsError> {
        verify_server_cert_signed_by_trust_anchor(
            &ParsedCertificate::try_from(first)?,
            &self.roots,
            rest,
            now,
            self.algorithms.all,
        )
    }
}

impl ServerCertVerifier for AcceptorVerifier {
    fn verify_server_cert(
        &self,
        first: &CertificateDer<'_>,
        rest: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, TlsError> {
        self.trusts(first, rest, now)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        verify_tls12_signature(message, certificate, signature, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        verify_tls13_signature(message, certificate, signature, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

fn read_certificates(path: &Path, what: &str) -> Result<Chain, CredentialError> {
    let found = CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|error| fault(what, path, readable(error)))?;
    if found.is_empty() {
        return Err(fault(what, path, "no certificate in PEM form found"));
    }
    Ok(found)
}

fn read_key(path: &Path) -> Result<PrivateKeyDer<'static>, CredentialError> {
    PrivateKeyDer::from_pem_file(path).map_err(|error| {
        let reason = if matches!(error, pem::Error::NoItemsFound) {
            "no private key in PEM form found (encrypted keys are not supported)".to_owned()
        } else {
            readable(error)
        };
        fault("key", path, reason)
    })
}

/// Lets an error of the system speak for itself, without a wrapper around it.
fn readable(error: pem::Error) -> String {
    if let pem::Error::Io(error) = error { error.to_string() } else { error.to_string() }
}

fn fault(what: &str, path: &Path, reason: impl Display) -> CredentialError {
    CredentialError(format!("cannot use the peer {what} {}: {reason}", path.display()))
}
