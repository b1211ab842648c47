//! Names in the certificates of clients.

use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

/// The kinds of names that an identity can have, as they begin in the file.
pub const NAME_KINDS: [&str; 4] = ["cn:", "dns:", "email:", "uri:"];

/// All names of a certificate, each with its kind: the common names of its subject, and its alternative names. Whether
/// the certificate is good is for TLS to say.
#[must_use]
pub fn certificate_names(der: &[u8]) -> Vec<String> {
    let Ok((_, certificate)) = X509Certificate::from_der(der) else { return Vec::new() };
    let common = certificate.subject().iter_common_name().filter_map(|name| name.as_str().ok());
    let mut names: Vec<String> = common.map(|name| format!("cn:{name}")).collect();
    let Ok(Some(others)) = certificate.subject_alternative_name() else { return names };
    names.extend(others.value.general_names.iter().filter_map(|name| match name {
        GeneralName::DNSName(name) => Some(format!("dns:{name}")),
        GeneralName::RFC822Name(name) => Some(format!("email:{name}")),
        GeneralName::URI(name) => Some(format!("uri:{name}")),
        GeneralName::OtherName(..)
        | GeneralName::X400Address(_)
        | GeneralName::DirectoryName(_)
        | GeneralName::EDIPartyName(_)
        | GeneralName::IPAddress(_)
        | GeneralName::RegisteredID(_)
        | GeneralName::Invalid(..) => None,
    }));
    names
}
