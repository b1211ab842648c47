//! Who counts as one client: by address.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// What caps and budgets count by: an IPv4 address, or the /64 network of an IPv6 address, because whoever has one
/// address of such a network has them all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AddressKey(IpAddr);

impl From<IpAddr> for AddressKey {
    fn from(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V4(address) => Self(address.into()),
            IpAddr::V6(address) => {
                let network = address.to_bits() & !u128::from(u64::MAX);
                Self(Ipv6Addr::from_bits(network).into())
            }
        }
    }
}

impl From<Ipv4Addr> for AddressKey {
    fn from(address: Ipv4Addr) -> Self {
        Self(address.into())
    }
}

impl fmt::Display for AddressKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            IpAddr::V4(address) => address.fmt(f),
            IpAddr::V6(network) => write!(f, "{network}/64"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_that_one_client_has_are_one() {
        let key = |text: &str| AddressKey::from(text.parse::<IpAddr>().unwrap());
        assert_eq!(key("2001:db8:1:2::1"), key("2001:db8:1:2:ffff::9"));
        assert_ne!(key("2001:db8:1:2::1"), key("2001:db8:1:3::1"));
        assert_eq!(key("::ffff:192.0.2.7"), key("192.0.2.7"));
        assert_ne!(key("192.0.2.7"), key("192.0.2.8"));
        assert_eq!(key("2001:db8:1:2::1").to_string(), "2001:db8:1:2::/64");
        assert_eq!(key("::ffff:192.0.2.7").to_string(), "192.0.2.7");
    }
}
