//! When certificates end, for those who look after a node.

use std::path::Path;

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use x509_parser::prelude::{FromDer, X509Certificate};

/// When the first certificate of a PEM file ends, in seconds of Unix time.
///
/// # Errors
///
/// If there is none.
pub fn certificate_ends_at(path: &Path) -> Result<i64, String> {
    let failed = |why: String| format!("{}: {why}", path.display());
    let der = CertificateDer::from_pem_file(path).map_err(|error| failed(error.to_string()))?;
    let (_, certificate) =
        X509Certificate::from_der(&der).map_err(|error| failed(error.to_string()))?;
    Ok(certificate.validity().not_after.timestamp())
}
