//! What is signed, made and checked by another implementation: the command openssl. Nothing here
//! but the messages themselves comes from the code that is tested.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use std::sync::Arc;

use barewire_dataplane::seal::{
    Credentials, Initiator, Keyring, Mode, SessionNames, read_answer, read_first, respond,
};
use rcgen::{
    CertificateParams, KeyPair, PKCS_ECDSA_P256_SHA256, PKCS_ED25519, SanType, SignatureAlgorithm,
};

const NAMES: SessionNames = SessionNames {
    opener: 0x0001_0203_0405_0602,
    answerer: 0x0002_0203_0405_0602,
    inc: 0x1122_3344_5566,
    sid: 0x0010_0003,
    epoch: 9,
    psn: 4,
    params: *b"what an OPEN says.",
};

/// What openssl says to these arguments and this input.
fn openssl(args: &[&str], input: &[u8]) -> Vec<u8> {
    let mut child = Command::new("openssl");
    let child = child.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    let mut child = child.expect("it was there");
    child.stdin.take().unwrap().write_all(input).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "openssl {args:?}");
    output.stdout
}

fn sha256(parts: &[&[u8]]) -> Vec<u8> {
    openssl(&["dgst", "-sha256", "-binary"], &parts.concat())
}

fn hmac(key: &[u8], parts: &[&[u8]]) -> Vec<u8> {
    let digits: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
    let key = format!("hexkey:{digits}");
    let args = ["dgst", "-sha256", "-mac", "HMAC", "-macopt", &key, "-binary"];
    openssl(&args, &parts.concat())
}

/// HKDF of the Noise framework (4.3): three outputs.
fn hkdf(chaining: &[u8], input: &[u8]) -> [Vec<u8>; 3] {
    let temp = hmac(chaining, &[input]);
    let first = hmac(&temp, &[&[1]]);
    let second = hmac(&temp, &[&first, &[2]]);
    let third = hmac(&temp, &[&second, &[3]]);
    [first, second, third]
}

/// The hash `h` of the handshake before its first message, and after `first`.
fn hashes(first: &[u8]) -> [Vec<u8>; 2] {
    let name = b"Noise_NNpsk0_25519_AESGCM_SHA256";
    assert_eq!(name.len(), 32, "as long as a hash: it is not hashed");
    let mut prologue = b"barewire 3".to_vec();
    prologue.extend(NAMES.opener.to_le_bytes());
    prologue.extend(NAMES.answerer.to_le_bytes());
    prologue.extend(NAMES.inc.to_le_bytes());
    prologue.extend(NAMES.sid.to_le_bytes());
    prologue.extend(NAMES.epoch.to_le_bytes());
    prologue.extend(NAMES.psn.to_le_bytes());
    prologue.extend(NAMES.params);
    let before = sha256(&[name, &prologue]);
    // What everybody knows: encrypted, and 2^22 frames to a key.
    let root = hmac(b"barewire 3 pre-shared key", &[b"barewire 3 certificates"]);
    let psk = hmac(&root, &[b"psk", &[0, 22], &[1]]);
    let [_, mixed, _] = hkdf(name, &psk);
    let hash = sha256(&[&before, &mixed]);
    let (ephemeral, sealed) = first.split_at(32);
    let hash = sha256(&[&hash, ephemeral]);
    [before, sha256(&[&hash, sealed])]
}

/// Checks the payload of a message by the table of `docs/wire.md`, and its signature by openssl.
fn check(dir: &Path, payload: &[u8], context: &str, hash: &[u8], ephemeral: &[u8]) {
    let at =
        |offset: usize| usize::from(u16::from_le_bytes([payload[offset], payload[offset + 1]]));
    let (scheme, len) = (at(0), at(2));
    let (signature, certificates) = payload[4..].split_at(len);
    let cert = &certificates[2..2 + at(4 + len)];
    let mut signed = vec![0x20; 64];
    signed.extend(format!("barewire 3 certificate, {context}").as_bytes());
    signed.push(0);
    signed.extend(hash);
    signed.extend(ephemeral);
    signed.extend(sha256(&[certificates]));
    let put = |name: &str, bytes: &[u8]| {
        let path = dir.join(name);
        std::fs::write(&path, bytes).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let public = openssl(&["x509", "-inform", "DER", "-pubkey", "-noout"], cert);
    let (key, message) = (put("key", &public), put("signed", &signed));
    let verify = |signature: &[u8]| {
        let signature = put("signature", signature);
        let args = match scheme {
            0x0403 => vec!["dgst", "-sha256", "-verify", &key, "-signature", &signature, &message],
            0x0807 => {
                let args = ["pkeyutl", "-verify", "-pubin", "-inkey", &key, "-rawin", "-in"];
                [&args[..], &[&message, "-sigfile", &signature]].concat()
            }
            other => panic!("{other:#x}"),
        };
        let output = Command::new("openssl").args(args).output().unwrap();
        output.status.success()
    };
    assert!(verify(signature), "{context}, {scheme:#x}");
    let mut bent = signature.to_vec();
    bent[len - 1] ^= 1;
    assert!(!verify(&bent), "openssl takes anything");
}

/// A certificate that is its own root.
fn own(kind: &'static SignatureAlgorithm) -> Arc<Credentials> {
    let mut params = CertificateParams::default();
    params.subject_alt_names = vec![SanType::URI("spiffe://a.org/job".try_into().unwrap())];
    let key = KeyPair::generate_for(kind).unwrap();
    let cert = params.self_signed(&key).unwrap().pem();
    let (cert, key) = (cert.as_bytes(), key.serialize_pem());
    // 2025-01-01.
    let clock = Arc::new(|| 1_735_689_600);
    let own = Credentials::from_pem(cert, key.as_bytes(), cert, Vec::new(), clock);
    Arc::new(own.unwrap())
}

/// Goal: both signatures of a handshake are of what `docs/wire.md` says, by ECDSA and Ed25519.
#[test]
fn signatures_are_what_openssl_verifies() {
    if Command::new("openssl").arg("version").output().is_err() {
        println!("SKIPPED: no openssl: sudo apt-get install openssl");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    for kind in [&PKCS_ECDSA_P256_SHA256, &PKCS_ED25519] {
        let own = own(kind);
        let ring = |n| Keyring::of_certificate(Arc::clone(&own), Mode::Encrypted, [n; 32]);
        let [mut a, mut b] = [ring(1), ring(2)];
        let opener = Initiator::new(&mut a, NAMES);
        let first = opener.message().clone();
        let [before, after] = hashes(&first);
        let payload = read_first(&b, &NAMES, &first).unwrap();
        check(dir.path(), &payload, "opener", &before, &first[..32]);
        let id = b.first();
        let second = respond(&mut b, id, NAMES, &first, true).unwrap().message;
        let payload = read_answer(opener, &second).unwrap();
        check(dir.path(), &payload, "answerer", &after, &second[..32]);
    }
}
