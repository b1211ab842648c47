//! Who counts as one source of connections and requests.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};

/// What limits per address count by: an IPv4 address, or the /64 network of an IPv6 address.
///
/// One machine has a whole /64 (2^64 addresses) of its own, so a limit per single IPv6 address would limit nothing.
/// An IPv4 address that arrives mapped into IPv6 is the IPv4 address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct AddressKey(IpAddr);

impl From<IpAddr> for AddressKey {
    fn from(address: IpAddr) -> Self {
        Self(match address.to_canonical() {
            IpAddr::V4(address) => IpAddr::V4(address),
            IpAddr::V6(address) => {
                let [a, b, c, d, ..] = address.segments();
                IpAddr::V6(Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0))
            }
        })
    }
}

impl fmt::Display for AddressKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            IpAddr::V4(address) => write!(f, "{address}"),
            IpAddr::V6(network) => write!(f, "{network}/64"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(address: &str) -> AddressKey {
        AddressKey::from(address.parse::<IpAddr>().unwrap())
    }

    /// GUARANTEES 48: the addresses of one IPv6 network are one source, so they can not share out a limit.
    #[test]
    fn an_ipv6_network_is_one_source() {
        assert_eq!(key("2001:db8:1:2::1"), key("2001:db8:1:2:ffff:ffff:ffff:ffff"));
        assert_ne!(key("2001:db8:1:2::1"), key("2001:db8:1:3::1"));
        assert_eq!(key("2001:db8:1:2::1").to_string(), "2001:db8:1:2::/64");
    }

    #[test]
    fn an_ipv4_address_is_one_source_however_it_arrives() {
        assert_eq!(key("::ffff:10.0.0.1"), key("10.0.0.1"));
        assert_ne!(key("::ffff:10.0.0.1"), key("::ffff:10.0.0.2"));
        assert_ne!(key("10.0.0.1"), key("::1"));
        assert_eq!(key("::ffff:10.0.0.1").to_string(), "10.0.0.1");
    }
}
