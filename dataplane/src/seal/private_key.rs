//! Loads the private key of a certificate from PEM (RFC 7468) without a copy outside of secret
//! memory.

use barewire_driver::mem::Locked;

/// PEM labels of sections with a private key.
const LABELS: [&str; 3] = ["PRIVATE KEY", "EC PRIVATE KEY", "RSA PRIVATE KEY"];

/// A private key in DER, not parsed further.
pub(super) struct PrivateKey {
    pub(super) der: Locked<[u8]>,
    /// Whether the format is PKCS #8; otherwise SEC 1 or PKCS #1.
    pub(super) is_pkcs8: bool,
}

impl PrivateKey {
    /// The first private key in the text, if there is one and it is complete.
    pub(super) fn from_pem(pem: &[u8]) -> Option<Self> {
        let mut lines = pem.split(|&byte| byte == b'\n').map(<[u8]>::trim_ascii);
        let label = lines.find_map(|line| {
            let label = line.strip_prefix(b"-----BEGIN ")?.strip_suffix(b"-----")?;
            LABELS.into_iter().find(|known| known.as_bytes() == label)
        })?;
        let mut der = Locked::zeros(pem.len().min(Locked::LEN_MAX));
        let mut base64 = Base64::default();
        let mut len = 0;
        for line in lines {
            if let Some(end) = line.strip_prefix(b"-----END ") {
                let is_whole = end.strip_suffix(b"-----")? == label.as_bytes() && base64.is_whole();
                let is_pkcs8 = label == LABELS[0];
                return is_whole.then(|| Self { der: Locked::copy_of(&der[..len]), is_pkcs8 });
            }
            for &digit in line {
                if let Some(byte) = base64.take(digit)? {
                    *der.get_mut(len)? = byte;
                    len += 1;
                }
            }
        }
        None
    }
}

/// Base64 decoder (RFC 4648, 4).
#[derive(Default)]
struct Base64 {
    /// Decoded bits; those of an incomplete byte are the lowest.
    bits: u32,
    /// Number of digits and padding characters so far.
    digits: usize,
    padding: usize,
}

impl Base64 {
    /// Adds a digit, which may complete a byte. `None` if it is no digit.
    fn take(&mut self, digit: u8) -> Option<Option<u8>> {
        self.digits += 1;
        let value = match digit {
            b'=' => {
                self.padding += 1;
                return Some(None);
            }
            b'A'..=b'Z' => digit - b'A',
            b'a'..=b'z' => digit - b'a' + 26,
            b'0'..=b'9' => digit - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        if self.padding > 0 {
            return None;
        }
        self.bits = self.bits << 6 | u32::from(value);
        // The first of four digits completes no byte.
        let left = match self.digits % 4 {
            1 => return Some(None),
            2 => 4,
            3 => 2,
            _ => 0,
        };
        Some(Some((self.bits >> left) as u8))
    }

    fn is_whole(&self) -> bool {
        self.digits.is_multiple_of(4) && self.padding <= 2
    }
}

#[cfg(test)]
mod tests {
    use rustls_pki_types::PrivateKeyDer;
    use rustls_pki_types::pem::PemObject;

    use super::*;

    fn encoded(bytes: &[u8]) -> String {
        const DIGITS: &[u8; 64] =
            b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        let mut digits = Vec::new();
        for three in bytes.chunks(3) {
            let bits = (0..3).fold(0, |bits, i| bits << 8 | u32::from(*three.get(i).unwrap_or(&0)));
            let digit = |i: usize| char::from(DIGITS[(bits >> (18 - 6 * i)) as usize & 63]);
            digits.extend((0..4).map(|i| if i <= three.len() { digit(i) } else { '=' }));
        }
        digits.chunks(64).map(|line| line.iter().collect::<String>() + "\r\n").collect()
    }

    /// Keys of each kind and of each length modulo 3 are parsed as by another parser, and damaged
    /// ones are refused.
    #[test]
    fn keys_are_read_as_others_do() {
        for label in LABELS {
            for len in 0..200_u8 {
                let bytes: Vec<u8> = (0..len).map(|i| i.wrapping_mul(37) ^ len).collect();
                let text = encoded(&bytes);
                let pem = format!(
                    "of a test\n-----BEGIN EC PARAMETERS-----\nAAAA\n-----END EC PARAMETERS-----\n\
                     -----BEGIN {label}-----\n{text}-----END {label}-----\n"
                );
                let ours = PrivateKey::from_pem(pem.as_bytes()).unwrap();
                assert_eq!(ours.der[..], bytes[..], "{pem}");
                let theirs = PrivateKeyDer::from_pem_slice(pem.as_bytes()).unwrap();
                assert_eq!(ours.der[..], *theirs.secret_der());
                assert_eq!(ours.is_pkcs8, matches!(theirs, PrivateKeyDer::Pkcs8(_)));
                let cut = &pem.as_bytes()[..pem.len() - 8];
                assert!(PrivateKey::from_pem(cut).is_none());
                assert!(
                    PrivateKey::from_pem(pem.replace("\r\n-", "!\r\n-").as_bytes()).is_none()
                        || len == 0
                );
                let short = pem.replace("\r\n-----END", "");
                assert!(PrivateKey::from_pem(short.as_bytes()).is_none() || len == 0);
            }
        }
    }
}
