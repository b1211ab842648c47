//! Frames as bytes on a connection: as they are inside TLS, sealed without it.
//!
//! A frame inside TLS is a length (u32, little-endian) and as many bytes. Without TLS it is *sealed*: the length counts
//! the encrypted frame and the tag of 16 bytes behind it, both by ChaCha20-Poly1305. The key belongs to one connection
//! and one direction; the nonce is the number of the frame on that connection, which is not sent. So a frame that was
//! changed, injected, repeated, left out, moved, or taken from another connection does not open, and the connection
//! ends there. ChaCha20-Poly1305 needs no new key however long a connection lives.
//!
//! The key comes from the shared secret and from an X25519 agreement of keys that both sides drew for this handshake
//! ([`KeyShare`]): whoever records a connection and learns the shared secret later can still not read it.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use ring::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce as AeadNonce, UnboundKey};
use ring::agreement::{EphemeralPrivateKey, UnparsedPublicKey, X25519, agree_ephemeral};
use ring::error::Unspecified;
use ring::hkdf::{HKDF_SHA256, Salt};
use ring::rand::{SecureRandom, SystemRandom};
use thiserror::Error;

use super::FRAME_BYTES_MAX;
use super::handshake::{Nonce, Version};

/// What sealing adds to a frame.
pub(super) const TAG_BYTES: usize = 16;

/// Up to here a frame is copied out of the buffer that it was read into.
const COPY_BYTES: usize = 64 << 10;

/// Why bytes of a connection are not a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub(super) enum BadFrame {
    /// A length prefix of more than a frame may have.
    #[error("a frame of {0} bytes")]
    TooLong(u32),
    /// The frame is not what the peer has sealed as its next one.
    #[error(
        "a frame that the peer did not send, or not as its next one: somebody on the path changes the connection"
    )]
    Forged,
}

/// What a side draws for one handshake: its nonce, and what belongs to it.
pub(super) struct KeyShare {
    pub(super) nonce: Nonce,
    /// With [`Version::Sealed`]; the nonce is its public key then.
    private: Option<EphemeralPrivateKey>,
}

impl KeyShare {
    pub(super) fn draw(version: Version, random: &SystemRandom) -> Result<Self, Unspecified> {
        let mut nonce = Nonce::default();
        match version {
            Version::Plain => {
                random.fill(&mut nonce)?;
                Ok(Self { nonce, private: None })
            }
            Version::Sealed => {
                let private = EphemeralPrivateKey::generate(&X25519, random)?;
                nonce.copy_from_slice(private.compute_public_key()?.as_ref());
                Ok(Self { nonce, private: Some(private) })
            }
        }
    }

    /// How frames go on the connection, both sides having proven themselves. `theirs` is the nonce of the other side;
    /// `transcript` has all that was said in the handshake, so keys are the same only if that is.
    pub(super) fn agree(
        self,
        theirs: &Nonce,
        secret: &[u8],
        transcript: &[u8],
    ) -> Result<Framing, Unspecified> {
        let Some(private) = self.private else { return Ok(Framing::Plain) };
        let theirs = UnparsedPublicKey::new(&X25519, theirs);
        let key = agree_ephemeral(private, &theirs, |agreed| {
            let (extracted, info) = (Salt::new(HKDF_SHA256, secret).extract(agreed), [transcript]);
            let expanded = extracted.expand(&info, &CHACHA20_POLY1305)?;
            Ok::<_, Unspecified>(LessSafeKey::new(UnboundKey::from(expanded)))
        })??;
        Ok(Framing::Sealed(Box::new(Sealed { key, next: 0 })))
    }
}

/// How frames go over a connection, in its one direction.
pub(super) enum Framing {
    /// As they are: inside TLS, or to and from a member that knows nothing else.
    Plain,
    /// Encrypted and numbered.
    Sealed(Box<Sealed>),
}

/// The key of a connection, and the number of its next frame.
pub(super) struct Sealed {
    key: LessSafeKey,
    next: u64,
}

impl Sealed {
    fn nonce(&mut self) -> AeadNonce {
        let mut nonce = [0; NONCE_LEN];
        nonce[NONCE_LEN - 8..].copy_from_slice(&self.next.to_be_bytes());
        self.next = self.next.checked_add(1).expect("nobody sends 2^64 frames");
        AeadNonce::assume_unique_for_key(nonce)
    }

    /// Encrypts in place and gives the tag.
    fn seal(&mut self, frame: &mut [u8]) -> [u8; TAG_BYTES] {
        let nonce = self.nonce();
        let tag = self.key.seal_in_place_separate_tag(nonce, Aad::empty(), frame);
        let tag = tag.expect("frames are shorter than the cipher allows");
        tag.as_ref().try_into().expect("a tag of 16 bytes")
    }

    /// Decrypts in place and gives the length of the frame.
    fn open(&mut self, sealed: &mut [u8]) -> Result<usize, BadFrame> {
        let nonce = self.nonce();
        let opened = self.key.open_in_place(nonce, Aad::empty(), sealed);
        opened.map(|frame| frame.len()).map_err(|_| BadFrame::Forged)
    }
}

impl Framing {
    fn overhead(&self) -> usize {
        match self {
            Self::Plain => 0,
            Self::Sealed(_) => TAG_BYTES,
        }
    }

    /// Whether a frame goes out as the bytes that it has.
    pub(super) fn is_plain(&self) -> bool {
        matches!(self, Self::Plain)
    }

    /// Bytes that a frame of this length takes on the connection.
    pub(super) fn bytes_of(&self, length: usize) -> usize {
        4 + length + self.overhead()
    }

    /// The length of a plain frame that follows by itself.
    pub(super) fn put_length(length: usize, out: &mut BytesMut) {
        out.put_u32_le(length.try_into().expect("frames have at most 64 MiB"));
    }

    /// Puts the next frame behind what is there.
    pub(super) fn put(&mut self, frame: &[u8], out: &mut BytesMut) {
        out.reserve(self.bytes_of(frame.len()));
        Self::put_length(frame.len() + self.overhead(), out);
        let begin = out.len();
        out.extend_from_slice(frame);
        if let Self::Sealed(sealed) = self {
            let tag = sealed.seal(&mut out[begin..]);
            out.extend_from_slice(&tag);
        }
    }

    /// Opens a message that came with its length taken off: the last one of the handshake.
    pub(super) fn open(&mut self, message: &mut Vec<u8>) -> Result<(), BadFrame> {
        if let Self::Sealed(sealed) = self {
            let length = sealed.open(message)?;
            message.truncate(length);
        }
        Ok(())
    }

    /// Takes the next frame from what was read, if it is complete.
    pub(super) fn take(&mut self, buffer: &mut BytesMut) -> Result<Option<Bytes>, BadFrame> {
        let Some(length) = self.next_length(buffer)? else { return Ok(None) };
        if buffer.len() < 4 + length {
            return Ok(None);
        }
        buffer.advance(4);
        let frame = match self {
            Self::Plain => length,
            Self::Sealed(sealed) => sealed.open(&mut buffer[..length])?,
        };
        // A short frame that is kept for long must not keep a whole buffer.
        if length <= COPY_BYTES {
            let copy = Bytes::copy_from_slice(&buffer[..frame]);
            buffer.advance(length);
            Ok(Some(copy))
        } else {
            let mut whole = buffer.split_to(length);
            whole.truncate(frame);
            Ok(Some(whole.freeze()))
        }
    }

    /// How many bytes are missing until the next frame is complete, or its length is known.
    pub(super) fn missing(&self, buffer: &[u8]) -> Result<usize, BadFrame> {
        let whole = self.next_length(buffer)?.map_or(4, |length| 4 + length);
        Ok(whole.saturating_sub(buffer.len()))
    }

    /// The length behind the prefix at the beginning of `buffer`, once that is known.
    fn next_length(&self, buffer: &[u8]) -> Result<Option<usize>, BadFrame> {
        let Some(prefix) = buffer.first_chunk() else { return Ok(None) };
        let length = u32::from_le_bytes(*prefix);
        match usize::try_from(length) {
            Ok(bytes) if bytes <= FRAME_BYTES_MAX + self.overhead() => Ok(Some(bytes)),
            _ => Err(BadFrame::TooLong(length)),
        }
    }
}
