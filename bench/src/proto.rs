//! As much of the encoding of protocol buffers as the calls of the generator need.

/// Appends a field of bytes. All of ours are shorter than 128.
pub fn bytes(out: &mut Vec<u8>, tag: u8, value: &[u8]) {
    debug_assert!(value.len() < 128, "its length would take two bytes");
    out.push(tag << 3 | 2);
    out.push(u8::try_from(value.len()).unwrap_or(0));
    out.extend_from_slice(value);
}

/// Appends a field with a number.
pub fn number(out: &mut Vec<u8>, tag: u8, mut value: u64) {
    out.push(tag << 3);
    while value >= 0x80 {
        out.push(u8::try_from(value & 0x7f).unwrap_or(0) | 0x80);
        value >>= 7;
    }
    out.push(u8::try_from(value).unwrap_or(0));
}

/// What a field holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Value<'a> {
    /// A number or a truth.
    Number(u64),
    /// Text, bytes or a message.
    Bytes(&'a [u8]),
}

/// The fields of a message with their tags, as far as they can be read.
pub struct Fields<'a>(pub &'a [u8]);

impl<'a> Iterator for Fields<'a> {
    type Item = (u64, Value<'a>);

    fn next(&mut self) -> Option<Self::Item> {
        let key = self.varint()?;
        let value = match key & 7 {
            0 => Value::Number(self.varint()?),
            2 => {
                let length = usize::try_from(self.varint()?).ok()?;
                let (value, rest) = self.0.split_at_checked(length)?;
                self.0 = rest;
                Value::Bytes(value)
            }
            _ => return None,
        };
        Some((key >> 3, value))
    }
}

impl<'a> Fields<'a> {
    fn varint(&mut self) -> Option<u64> {
        let mut value = 0;
        for place in 0..10 {
            let (&byte, rest) = self.0.split_first()?;
            self.0 = rest;
            value |= u64::from(byte & 0x7f) << (7 * place);
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }

    /// The number of field `tag`; what is absent is 0.
    pub fn number(message: &'a [u8], tag: u64) -> u64 {
        let found = Self(message).find_map(|field| match field {
            (found, Value::Number(value)) if found == tag => Some(value),
            _ => None,
        });
        found.unwrap_or(0)
    }

    /// The bytes of the first field `tag`; what is absent is empty.
    pub fn bytes(message: &'a [u8], tag: u64) -> &'a [u8] {
        let found = Self(message).find_map(|field| match field {
            (found, Value::Bytes(value)) if found == tag => Some(value),
            _ => None,
        });
        found.unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let mut message = Vec::new();
        bytes(&mut message, 1, b"name");
        number(&mut message, 2, u64::MAX);
        number(&mut message, 3, 300);
        let fields: Vec<_> = Fields(&message).collect();
        let expected =
            [(1, Value::Bytes(b"name")), (2, Value::Number(u64::MAX)), (3, Value::Number(300))];
        assert_eq!(fields, expected);
        assert_eq!(Fields::number(&message, 3), 300);
        assert_eq!(Fields::number(&message, 1), 0, "it is no number");
        assert_eq!(
            (Fields::bytes(&message, 1), Fields::bytes(&message, 9)),
            (&b"name"[..], &b""[..])
        );
    }

    #[test]
    fn a_message_that_was_cut_off_ends() {
        let mut message = Vec::new();
        bytes(&mut message, 1, b"name");
        for end in 0..message.len() {
            assert_eq!(Fields(&message[..end]).count(), 0, "{end}");
        }
        assert_eq!(Fields(&[0xff; 20]).count(), 0);
    }
}
