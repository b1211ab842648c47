//! Tokens as digests.

use std::fmt;
use std::str::FromStr;

use ring::digest;

/// The shortest token that is good for an identity: 16 random bytes, or as many characters, can not be guessed.
pub const TOKEN_BYTES_MIN: usize = 16;
/// The longest token of an identity.
pub const TOKEN_BYTES_MAX: usize = 512;

/// What a digest begins with in files.
const SCHEME: &str = "sha256:";

/// The digest of a token: enough to recognize the token, and nothing to find it by, because tokens are random.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TokenHash([u8; 32]);

impl TokenHash {
    /// The digest of this token.
    #[must_use]
    pub fn of(token: &[u8]) -> Self {
        let mut bytes = [0; 32];
        bytes.copy_from_slice(digest::digest(&digest::SHA256, token).as_ref());
        Self(bytes)
    }
}

impl fmt::Display for TokenHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SCHEME}{}", hex::encode(self.0))
    }
}

impl fmt::Debug for TokenHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for TokenHash {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, &'static str> {
        const FORM: &str = "a hash is \"sha256:\" and 64 hexadecimal digits, as `dflockctl identity hash` prints it";
        let digits = text.strip_prefix(SCHEME).ok_or(FORM)?;
        let mut bytes = [0; 32];
        hex::decode_to_slice(digits, &mut bytes).map_err(|_| FORM)?;
        Ok(Self(bytes))
    }
}
