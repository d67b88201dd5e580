//! What a message says besides its event.

/// What a message says besides its event: its headers.
pub trait Headers: Sync {
    /// The value of the *last* header of that name. The name is compared without regard to case for `idempotency-key`
    /// only.
    fn value(&self, name: &str) -> Option<&[u8]>;
}

/// No headers.
impl Headers for () {
    fn value(&self, _name: &str) -> Option<&[u8]> {
        None
    }
}

/// Pairs of name and value, in the order of the message.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HeaderList(pub Vec<(String, Vec<u8>)>);

impl Headers for HeaderList {
    fn value(&self, name: &str) -> Option<&[u8]> {
        let same =
            |other: &str| if name == "idempotency-key" { other.eq_ignore_ascii_case(name) } else { other == name };
        self.0.iter().rev().find(|(other, _)| same(other)).map(|(_, value)| value.as_slice())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_header_counts_and_only_one_name_ignores_case() {
        let headers = HeaderList(vec![
            ("Idempotency-Key".to_owned(), b"1".to_vec()),
            ("request".to_owned(), b"2".to_vec()),
            ("request".to_owned(), b"3".to_vec()),
        ]);
        assert_eq!(headers.value("idempotency-key"), Some(&b"1"[..]));
        assert_eq!(headers.value("request"), Some(&b"3"[..]));
        assert_eq!(headers.value("Request"), None);
    }
}
