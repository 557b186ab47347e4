//! The ciphers against published vectors.

use aws_lc_rs::aead::{Aad, LessSafeKey, Nonce, UnboundKey};
use aws_lc_rs::hmac;

use super::chain::{cipher, open_with};
use super::*;
use crate::wire::TAG_LEN;
use crate::wire::sealed::OPEN_END;

fn hex(digits: &str) -> Vec<u8> {
    let pairs = digits.as_bytes().chunks(2);
    pairs.map(|pair| u8::from_str_radix(str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
}

fn digits(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn key(aes: bool, digits: &str) -> LessSafeKey {
    LessSafeKey::new(UnboundKey::new(cipher(aes), &hex(digits)).unwrap())
}

fn nonce(digits: &str) -> Nonce {
    Nonce::assume_unique_for_key(hex(digits).try_into().unwrap())
}

/// Goal: the two ciphers of frames match published vectors. Frames have 40 bytes of associated data
/// and nonces that begin with zeros, for which there are no vectors, so the keys are used as in
/// [`SessionKeys::seal`].
///
/// Source: RFC 8439, 2.8.2; McGrew and Viega, The Galois/Counter Mode of Operation, test case 16.
#[test]
fn the_ciphers_are_those_of_their_authors() {
    let tip = "Ladies and Gentlemen of the class of '99: If I could offer you only one tip for \
               the future, sunscreen would be it.";
    for (aes, with, at, aad, plain, sealed) in [
        (
            false,
            "808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9f",
            "070000004041424344454647",
            "50515253c0c1c2c3c4c5c6c7",
            digits(tip.as_bytes()),
            "d31a8d34648e60db7b86afbc53ef7ec2a4aded51296e08fea9e2b5a736ee62d63dbea45e8ca9671282fafb\
             69da92728b1a71de0a9e060b2905d6a5b67ecd3b3692ddbd7f2d778b8c9803aee328091b58fab324e4fad6\
             75945585808b4831d7bc3ff4def08e4b7a9de576d26586cec64b61161ae10b594f09e26a7e902ecbd06006\
             91",
        ),
        (
            true,
            "feffe9928665731c6d6a8f9467308308feffe9928665731c6d6a8f9467308308",
            "cafebabefacedbaddecaf888",
            "feedfacedeadbeeffeedfacedeadbeefabaddad2",
            "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a721c3c0c95956809532fcf0e\
             2449a6b525b16aedf5aa0de657ba637b39"
                .into(),
            "522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa8cb08e48590dbb3da7b08b\
             1056828838c5f61e6393ba7a0abcc9f66276fc6ece0f4e1768cddf8853bb2d551b",
        ),
    ] {
        let (with, aad, mut body) = (key(aes, with), hex(aad), hex(&plain));
        let tag = with.seal_in_place_separate_tag(nonce(at), Aad::from(&aad), &mut body).unwrap();
        assert_eq!(digits(&[&body, tag.as_ref()].concat()), sealed, "AES: {aes}");
    }
}

/// Goal: frames of mode authenticated are sealed with GMAC.
///
/// Source: NIST CAVP, `gcmEncryptExtIV256.rsp`, no plaintext and 128 bits of associated data.
#[test]
fn authenticated_frames_are_gmac() {
    let with = key(true, "78dc4e0aaf52d935c3c01eea57428f00ca1fd475f5da86a49c8dd73d68c8e223");
    let frame = hex("b96baa8c1c75a671bfb2d08d06be5f363e5d486aa2e30b22e040b85723a06e76");
    let opens = |mut bytes: Vec<u8>| {
        open_with(&with, Mode::Authenticated, nonce("d79cf22d504cc793c3fb6c8a"), &mut bytes)
    };
    assert!(opens(frame.clone()));
    for bit in 0..frame.len() * 8 {
        let mut bent = frame.clone();
        bent[bit / 8] ^= 1 << (bit % 8);
        assert!(!opens(bent), "bit {bit}");
    }
}

/// Goal: an OPEN in answer ends with the tag of `docs/wire.md`, "Finished".
#[test]
fn an_answer_is_finished_by_its_secret() {
    let key = PreSharedKey::new(&[7; 32], Mode::Encrypted).unwrap();
    let [mut a, mut b] = [1, 2].map(|n| Keyring::new(vec![key.clone()], [n; 32]).unwrap());
    let (opener, answerer) = (1, 2);
    let names =
        SessionNames { opener, answerer, inc: 3, sid: 4, epoch: 5, psn: 6, params: [7; 18] };
    let opener = Initiator::new(&mut a, names);
    let id = b.first();
    let answer = respond(&mut b, id, names, opener.message(), true).unwrap();
    let open = answer.open(&[5; OPEN_END]);
    let (said, tag) = open.split_last_chunk::<TAG_LEN>().unwrap();
    let mac = |key: &[u8], bytes: &[u8]| {
        hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key), bytes).as_ref().to_vec()
    };
    let [own, _] = answer.keys.secrets(true);
    // One block of HKDF-Expand (RFC 5869).
    let finished = mac(&*own.secret, b"finished\x01");
    assert_eq!(mac(&finished, said)[..TAG_LEN], tag[..]);
}
