//! Handshakes of nodes with certificates.

use std::sync::Arc;

use rcgen::{PKCS_ECDSA_P256_SHA256, PKCS_ECDSA_P384_SHA384, PKCS_ED25519, PKCS_RSA_SHA256};

use super::test_certs::{NOW, PemCredentials, Root, at, ca, credentials, foreign, leaf};
use super::*;
use crate::wire::TAG_LEN;
use crate::wire::sealed::OPEN_END;

const NAMES: SessionNames = SessionNames {
    opener: 0x0001_0200,
    answerer: 0x0002_0200,
    inc: 7,
    sid: 0x0010_0003,
    epoch: 9,
    psn: 4,
    params: *b"what an OPEN says.",
};

/// The header of the answering OPEN.
const HEADER: &[u8; OPEN_END] = &[9; OPEN_END];

const A: &str = "spiffe://a.org/job/1";
const B: &str = "spiffe://a.org/job/2";

fn ring(credentials: Arc<Credentials>, entropy: u8) -> Keyring {
    Keyring::of_certificate(credentials, Mode::Encrypted, [entropy; 32])
}

/// The result of the first message of `a` at `b`.
fn answer(a: &Initiator, b: &mut Keyring) -> Result<Answer, Refused> {
    let first = b.first();
    respond(b, first, *a.names(), a.message(), true)
}

/// The faults that the two ends find, the opener's first, or success.
fn meet(a: &mut Keyring, b: &mut Keyring) -> Result<(), [Option<BadCert>; 2]> {
    let fault = |why| match why {
        Refused::Certificate(bad) => Some(bad),
        Refused::Forged => panic!("forged"),
    };
    let mut opener = Initiator::new(a, NAMES);
    let answer = answer(&opener, b).map_err(|why| [None, fault(why)])?;
    opener.finish(&answer.open(HEADER), true).map_err(|why| [fault(why), None])?;
    Ok(())
}

fn fault(met: Result<(), [Option<BadCert>; 2]>) -> [Option<CertFault>; 2] {
    met.unwrap_err().map(|bad| bad.map(|bad| bad.fault))
}

#[test]
fn certificates_of_all_kinds_meet() {
    let root = Root::new();
    let kinds = [&PKCS_ED25519, &PKCS_ECDSA_P256_SHA256, &PKCS_ECDSA_P384_SHA384, &PKCS_RSA_SHA256];
    for kind in kinds {
        let papers = |name| root.sign(&leaf(name, [2020, 2040]), kind);
        let ends = [A, B].map(|name| credentials(&papers(name), &root, &[]).unwrap());
        let [mut a, mut b] = [ring(ends[0].clone(), 1), ring(ends[1].clone(), 2)];
        let mut opener = Initiator::new(&mut a, NAMES);
        let len = opener.message().len() + TAG_LEN;
        assert!(
            (len..=len + 8).contains(&a.message_and_finished_max()),
            "{kind:?}: a bound that is near"
        );
        let answer = answer(&opener, &mut b).unwrap();
        assert!(opener.finish(&answer.open(HEADER), true).is_ok());
    }
    let ends = [root.leaf_below(A), root.leaf("n2.a.org")];
    let [a, b] = ends.map(|papers| credentials(&papers, &root, &["*.a.org", "spiffe://a.org/*"]));
    assert_eq!(meet(&mut ring(a.unwrap(), 1), &mut ring(b.unwrap(), 2)), Ok(()));
}

#[test]
fn a_certificate_is_refused_for_its_fault() {
    let (root, other) = (Root::new(), Root::new());
    let good = |peers: &[&str]| ring(credentials(&root.leaf(A), &root, peers).unwrap(), 1);
    // Both trust `root`, so each is refused by the other end only.
    let late = root.sign(&leaf(B, [2020, 2026]), &PKCS_ED25519);
    let early = root.sign(&leaf(B, [2024, 2040]), &PKCS_ED25519);
    let late = at(&late, &root, &[], NOW).unwrap();
    let early = at(&early, &root, &[], NOW).unwrap();
    let then = |now| ring(at(&root.leaf(A), &root, &[], now).unwrap(), 1);
    let foreign = foreign(&other.leaf(B), &other, &root);
    let stranger =
        credentials(&root.leaf("spiffe://b.org/job"), &root, &["spiffe://a.org/*"]).unwrap();
    let nameless = credentials(&root.leaf("n2.b.org"), &root, &[]).unwrap();
    for (bad, mut good, want) in [
        (late, then(NOW + 3 * 365 * 86_400), CertFault::Time),
        (early, then(NOW - 3 * 365 * 86_400), CertFault::Time),
        (foreign, good(&[]), CertFault::Issuer),
        (stranger.clone(), good(&[]), CertFault::Name),
        (stranger, good(&["spiffe://b.org/other", B]), CertFault::Name),
        (nameless, good(&[]), CertFault::Name),
    ] {
        let mut bad = ring(bad, 2);
        assert_eq!(fault(meet(&mut bad, &mut good)), [None, Some(want)]);
        assert_eq!(fault(meet(&mut good, &mut bad)), [Some(want), None], "{want:?}");
    }
}

#[test]
fn names_that_spiffe_forbids_are_none() {
    let root = Root::new();
    let mut two = leaf(A, [2020, 2040]);
    two.subject_alt_names.push(rcgen::SanType::URI("https://a.org".try_into().unwrap()));
    let path = leaf("spiffe://a.org/x/../y", [2020, 2040]);
    let none = leaf("*.a.org", [2020, 2040]);
    for params in [two, path, none] {
        let papers = root.sign(&params, &PKCS_ED25519);
        assert_eq!(credentials(&papers, &root, &[]).unwrap_err(), BadCredentials::Nameless);
    }
}

/// Name constraints for DNS names apply. Those for URIs are not evaluated: with them every SPIFFE
/// ID is refused.
#[test]
fn constraints_bind_dns_names() {
    let (dns, uris) = (Root::constrained(2, "a.org"), Root::constrained(6, "a.org"));
    let is = |root: &Root, name| credentials(&root.leaf(name), root, &[]).map(|_| ());
    let refused = Err(BadCredentials::NameForbidden);
    assert_eq!([is(&dns, "n1.a.org"), is(&dns, "n1.b.org")], [Ok(()), refused.clone()]);
    assert_eq!([is(&dns, A), is(&dns, "spiffe://b.org/x")], [Ok(()), Ok(())]);
    assert_eq!([is(&uris, A), is(&uris, "n1.b.org")], [refused, Ok(())]);
}

/// Goal: a message is bound to its session, its direction and its ephemeral key, and every byte of
/// it is protected. A man in the middle can insert neither his certificate nor another's.
#[test]
fn a_signature_is_of_its_handshake() {
    let root = Root::new();
    let of = |name, entropy| ring(credentials(&root.leaf(name), &root, &[]).unwrap(), entropy);
    let [mut a, mut b] = [of(A, 1), of(B, 2)];
    let mut opener = Initiator::new(&mut a, NAMES);
    let first = b.first();
    let others = [
        SessionNames { opener: NAMES.answerer, ..NAMES },
        SessionNames { answerer: NAMES.opener, ..NAMES },
        SessionNames { inc: 8, ..NAMES },
        SessionNames { epoch: 8, ..NAMES },
        SessionNames { psn: 8, ..NAMES },
        SessionNames { params: *b"what an OPEN sayz.", ..NAMES },
    ];
    for names in others {
        let taken = respond(&mut b, first, names, opener.message(), true);
        assert_eq!(taken.unwrap_err(), Refused::Forged, "{names:?}");
    }
    let message = opener.message().clone();
    for at in 0..message.len() {
        let mut bent = message.clone();
        bent[at] ^= 4;
        assert!(respond(&mut b, first, NAMES, &bent, true).is_err(), "byte {at}");
        assert!(respond(&mut b, first, NAMES, &message[..at], true).is_err(), "{at} bytes");
    }
    // Anybody can write such a message: only its content authenticates it.
    let own = b.credentials().unwrap().clone();
    let signed = |role, hash, ephemeral| Signed { role, hash, ephemeral };
    use super::path::Role;
    use super::proof::{Signed, check, prove};
    let right = signed(Role::Opener, [1; 32], [2; 32]);
    let payload = prove(&own, &right);
    assert!(check(&own, &right, &payload).is_ok());
    for wrong in [
        signed(Role::Answerer, [1; 32], [2; 32]),
        signed(Role::Opener, [3; 32], [2; 32]),
        signed(Role::Opener, [1; 32], [3; 32]),
    ] {
        let bad = check(&own, &wrong, &payload).unwrap_err();
        assert_eq!(bad.fault, CertFault::Signature, "{wrong:?}");
        assert_eq!(bad.name.unwrap().to_string(), B);
    }
    for at in 0..payload.len() {
        assert!(check(&own, &right, &payload[..at]).is_err(), "{at} bytes");
        let mut bent = payload.clone();
        bent[at] ^= 4;
        assert!(check(&own, &right, &bent).is_err(), "byte {at}");
    }
    // Another's certificate with the own signature.
    let (mine, theirs) = (a.credentials().unwrap(), prove(&own, &right));
    let len = |payload: &[u8]| 4 + usize::from(u16::from_le_bytes([payload[2], payload[3]]));
    let ours = prove(mine, &right);
    let mixed = [&ours[..len(&ours)], &theirs[len(&theirs)..]].concat();
    assert_eq!(check(&own, &right, &mixed).unwrap_err().fault, CertFault::Signature);
    // The valid answer is accepted after an invalid one that could be decrypted.
    let other = Root::new();
    let foreign = foreign(&other.leaf(B), &other, &root);
    for entropy in 3..6 {
        let bad = answer(&opener, &mut ring(foreign.clone(), entropy)).unwrap();
        let refused = opener.finish(&bad.open(HEADER), true).unwrap_err();
        assert!(matches!(refused, Refused::Certificate(BadCert { fault: CertFault::Issuer, .. })));
    }
    let good = answer(&opener, &mut b).unwrap();
    assert!(opener.finish(&good.open(HEADER), true).is_ok());
}

/// Goal: the payload of a first message that a man in the middle relays into a session of his own
/// is refused. So is the opener's own payload in an answer.
#[test]
fn a_payload_that_is_relayed_is_refused() {
    use super::handshake::{begin, read, write};
    let root = Root::new();
    let of = |name, entropy| ring(credentials(&root.leaf(name), &root, &[]).unwrap(), entropy);
    let [mut a, mut b] = [of(A, 1), of(B, 2)];
    let mut opener = Initiator::new(&mut a, NAMES);
    // The public key material.
    let first = b.first();
    let key = b.get(first).unwrap().clone();
    let seed = |byte| super::key::secret_of(&mut [byte; 32]);
    let (mut between, _) = begin(&key, &seed(9), &NAMES, false);
    let payload = read(&mut between, opener.message()).unwrap();
    assert!(payload.len() > 200);
    let elsewhere = SessionNames { opener: 0x0009_0200, ..NAMES };
    for names in [elsewhere, SessionNames { epoch: 10, ..NAMES }, NAMES] {
        let (mut state, _) = begin(&key, &seed(7), &names, true);
        let message = write(&mut state, &payload).unwrap();
        let refused = respond(&mut b, first, names, &message, true).unwrap_err();
        let Refused::Certificate(bad) = refused else { panic!("{refused:?}") };
        assert_eq!(
            (bad.fault, bad.name.unwrap().to_string()),
            (CertFault::Signature, A.to_owned())
        );
    }
    let reflected = write(&mut between, &payload).unwrap();
    let reflected = [HEADER, &reflected[..], &[0; TAG_LEN]].concat();
    let refused = opener.finish(&reflected, true).unwrap_err();
    assert!(matches!(refused, Refused::Certificate(BadCert { fault: CertFault::Signature, .. })));
    let answer = answer(&opener, &mut b).unwrap();
    assert!(opener.finish(&answer.open(HEADER), true).is_ok(), "it has done no harm");
}

#[test]
fn keys_and_certificates_do_not_meet() {
    let root = Root::new();
    let mut a = ring(credentials(&root.leaf(A), &root, &[]).unwrap(), 1);
    let other = Keyring::of_certificate(
        credentials(&root.leaf(A), &root, &[]).unwrap(),
        Mode::Authenticated,
        [1; 32],
    );
    assert!(a.key_of(b"x", &other.tag_key().tag(b"x")).is_none());
    let key = PreSharedKey::new(&[7; 32], Mode::Encrypted).unwrap();
    assert!(!a.replace(vec![key.clone()]));
    let b = Keyring::new(vec![key], [0; 32]).unwrap();
    assert!(b.key_of(b"x", &a.tag_key().tag(b"x")).is_none());
}

#[test]
fn bad_papers_are_told_apart() {
    let root = Root::new();
    let good = root.leaf(A);
    let why = |chain: &str, key: &str| {
        let papers = PemCredentials { chain: chain.to_owned(), key: key.to_owned() };
        credentials(&papers, &root, &[]).unwrap_err()
    };
    let (chain, key) = (&*good.chain, &*good.key);
    assert_eq!(why("", key), BadCredentials::Chain);
    assert_eq!(why(key, key), BadCredentials::Chain);
    assert_eq!(why(&chain.replacen("MI", "XX", 1), key), BadCredentials::Chain);
    assert_eq!(why(&chain.repeat(5), key), BadCredentials::ChainLong);
    assert_eq!(why(chain, chain), BadCredentials::Key);
    assert_eq!(why(chain, &root.leaf(A).key), BadCredentials::KeyOfAnother);
    for (now, want) in [(0, BadCredentials::NotYet), (NOW * 2, BadCredentials::Expired)] {
        assert_eq!(at(&good, &root, &[], now).unwrap_err(), want);
    }
    // 2020-01-01 and 2040-01-01.
    assert_eq!(credentials(&good, &root, &[]).unwrap().valid(), [1_577_836_800, 2_208_988_800]);
    assert!(!format!("{:?}", credentials(&good, &root, &[]).unwrap()).contains("key"));
}

/// Goal: credentials that a peer would refuse are refused when they are loaded, with the cause.
/// Method: each fault alone, beside valid counterparts.
#[test]
fn credentials_that_peers_would_refuse_are_refused_at_load() {
    let (root, other) = (Root::new(), Root::new());
    let made = |params: &rcgen::CertificateParams| {
        credentials(&root.sign(params, &PKCS_ED25519), &root, &[]).map(|own| own.valid())
    };
    let used = |usages: &[rcgen::ExtendedKeyUsagePurpose]| {
        let mut params = leaf(A, [2020, 2040]);
        params.extended_key_usages = usages.to_vec();
        made(&params).err()
    };
    use rcgen::ExtendedKeyUsagePurpose::{ClientAuth, CodeSigning, ServerAuth};
    for lacks in [&[ClientAuth][..], &[ServerAuth], &[CodeSigning]] {
        assert_eq!(used(lacks), Some(BadCredentials::Usage), "{lacks:?}");
    }
    assert_eq!(used(&[ServerAuth, CodeSigning, ClientAuth]), None);
    let mut authority = ca("leaf");
    authority.subject_alt_names = leaf(A, [2020, 2040]).subject_alt_names;
    assert_eq!(made(&authority), Err(BadCredentials::Authority));
    let mut critical = leaf(A, [2020, 2040]);
    let mut unknown = rcgen::CustomExtension::from_oid_content(&[1, 2, 3, 4], vec![5, 0]);
    unknown.set_criticality(true);
    critical.custom_extensions.push(unknown);
    assert!(matches!(made(&critical), Err(BadCredentials::Unchecked(_))));
    let refused = |papers: &PemCredentials| credentials(papers, &root, &[]).unwrap_err();
    assert_eq!(refused(&other.leaf(A)), BadCredentials::OtherRoots);
    assert_eq!(refused(&other.leaf_below(A)), BadCredentials::OtherRoots);
    let below = root.leaf_below(A);
    let (alone, _) = below.chain.split_at(below.chain.rfind("-----BEGIN").unwrap());
    let alone = PemCredentials { chain: alone.to_owned(), ..below.clone() };
    assert_eq!(refused(&alone), BadCredentials::OtherRoots, "without its intermediate");
    // The intermediate expires before the leaf, and limits both.
    let short = root.leaf_below_until(A, 2030);
    let own = credentials(&short, &root, &[]).unwrap();
    assert_eq!(own.valid(), [1_577_836_800, 1_893_456_000]);
    assert!(at(&short, &root, &[], 1_893_456_000).is_ok());
    assert_eq!(at(&short, &root, &[], 1_893_456_001).unwrap_err(), BadCredentials::Expired);
}
