//! The bytes that commands have in the log and between the members of a cluster.
//!
//! Numbers are little-endian and of fixed width, byte strings have a length of 32 bits in front, a flag is a byte that
//! is 0 or 1, and every value has exactly one form. A reader accepts all that its writer can write, never panics, and
//! looks at a length before it believes it.

use alloc::vec::Vec;
use core::fmt;

use crate::types::{End, Fence, Mode, RequestId, Revision, Space, Span, Token};

/// Why bytes can not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed(pub &'static str);

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "malformed: {}", self.0)
    }
}

impl core::error::Error for Malformed {}

const SHORT: Malformed = Malformed("ends too early");

/// A value with a byte form. What is read may borrow from the input.
pub trait Field<'a>: Sized {
    /// Appends the value.
    fn put(&self, out: &mut Vec<u8>);

    /// Takes the value from the front of the input, which is left in the middle of it if it is malformed.
    ///
    /// # Errors
    ///
    /// If there is no such value.
    fn take(input: &mut &'a [u8]) -> Result<Self, Malformed>;
}

/// So many bytes as they are.
impl<'a, const N: usize> Field<'a> for [u8; N] {
    #[inline]
    fn put(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(self);
    }

    #[inline]
    fn take(input: &mut &'a [u8]) -> Result<Self, Malformed> {
        let (array, rest) = input.split_first_chunk().ok_or(SHORT)?;
        *input = rest;
        Ok(*array)
    }
}

macro_rules! numbers {
    ($($type:ty),*) => {
        $(impl<'a> Field<'a> for $type {
            #[inline]
            fn put(&self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_le_bytes());
            }

            #[inline]
            fn take(input: &mut &'a [u8]) -> Result<Self, Malformed> {
                Field::take(input).map(Self::from_le_bytes)
            }
        })*
    };
}

numbers!(u8, u16, u32, u64, i64);

/// Newtypes around a number, written as that number.
macro_rules! wrapped {
    ($($type:ident),*) => {
        $(impl<'a> Field<'a> for $type {
            #[inline]
            fn put(&self, out: &mut Vec<u8>) {
                self.0.put(out);
            }

            #[inline]
            fn take(input: &mut &'a [u8]) -> Result<Self, Malformed> {
                Field::take(input).map(Self)
            }
        })*
    };
}

wrapped!(Fence, RequestId, Revision, Span);

impl<'a> Field<'a> for bool {
    #[inline]
    fn put(&self, out: &mut Vec<u8>) {
        out.push((*self).into());
    }

    #[inline]
    fn take(input: &mut &'a [u8]) -> Result<Self, Malformed> {
        match u8::take(input)? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(Malformed("a flag that is neither 0 nor 1")),
        }
    }
}

impl<'a, T: Field<'a>> Field<'a> for Option<T> {
    #[inline]
    fn put(&self, out: &mut Vec<u8>) {
        self.is_some().put(out);
        if let Some(value) = self {
            value.put(out);
        }
    }

    #[inline]
    fn take(input: &mut &'a [u8]) -> Result<Self, Malformed> {
        Ok(if bool::take(input)? { Some(T::take(input)?) } else { None })
    }
}

impl<'a> Field<'a> for &'a [u8] {
    #[inline]
    fn put(&self, out: &mut Vec<u8>) {
        let len = u32::try_from(self.len()).expect("nothing has more than a few megabytes");
        len.put(out);
        out.extend_from_slice(self);
    }

    #[inline]
    fn take(input: &mut &'a [u8]) -> Result<Self, Malformed> {
        let len = usize::try_from(u32::take(input)?).map_err(|_| SHORT)?;
        let (bytes, rest) = input.split_at_checked(len).ok_or(SHORT)?;
        *input = rest;
        Ok(bytes)
    }
}

impl<'a> Field<'a> for Token {
    #[inline]
    fn put(&self, out: &mut Vec<u8>) {
        self.fence.put(out);
        self.salt.put(out);
    }

    #[inline]
    fn take(input: &mut &'a [u8]) -> Result<Self, Malformed> {
        Ok(Self { fence: Field::take(input)?, salt: Field::take(input)? })
    }
}

/// Enums as the number of the variant and its fields behind it.
macro_rules! variants {
    ($($type:ident $(<$life:lifetime>)? $unknown:literal {
        $($number:literal => $variant:ident $({ $($field:ident),* })? $(($inner:ident))?,)*
    })*) => {
        $(impl<'a> Field<'a> for $type $(<$life>)? {
            #[inline]
            fn put(&self, out: &mut Vec<u8>) {
                match self {
                    $(Self::$variant $({ $($field),* })? $(($inner))? => {
                        out.push($number);
                        $($($field.put(out);)*)?
                        $($inner.put(out);)?
                    })*
                }
            }

            #[inline]
            fn take(input: &mut &'a [u8]) -> Result<Self, Malformed> {
                match u8::take(input)? {
                    $($number => {
                        $($(let $field = Field::take(input)?;)*)?
                        $(let $inner = Field::take(input)?;)?
                        Ok(Self::$variant $({ $($field),* })? $(($inner))?)
                    })*
                    _ => Err(Malformed($unknown)),
                }
            }
        })*
    };
}

pub(crate) use variants;

variants! {
    Mode "an unknown mode of a lock" {
        0 => Mutex,
        1 => Election,
        2 => Semaphore { limit },
        3 => Read,
        4 => Write,
    }
    Space "an unknown Space" {
        0 => Locks,
        1 => Semaphores,
    }
    End "an unknown End" {
        0 => Left,
        1 => Right,
    }
}
