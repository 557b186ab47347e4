//! Two ends with a pre-shared key, and manipulation of their frames in transit.

use barewire_driver::port::Station;
use proptest::prelude::*;

use super::key::SealFormat;
use super::*;
use crate::psn::Psn;
use crate::wire::sealed::OPEN_END;
use crate::wire::{BASE_LEN, Base, TAG_LEN, Ty, sealed};

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

fn listed(bytes: u8) -> PreSharedKey {
    PreSharedKey::new(&[bytes; 32], Mode::Encrypted).unwrap()
}

/// A keyring of one key.
fn key(bytes: &[u8], entropy: u8, mode: Mode, bits: u32) -> Keyring {
    let key = PreSharedKey::with_key_frames(bytes, mode, bits).unwrap();
    Keyring::new(vec![key], [entropy; 32]).unwrap()
}

/// The answer to a message under the first key, and its OPEN.
fn answered(
    ring: &mut Keyring,
    names: SessionNames,
    message: &[u8],
    aes: bool,
) -> Option<(SessionKeys, Message)> {
    let first = ring.first();
    let answer = respond(ring, first, names, message, aes).ok()?;
    let open = answer.open(HEADER);
    Some((answer.keys, open))
}

fn keys() -> [Keyring; 2] {
    [1, 2].map(|entropy| key(&[7; 32], entropy, Mode::Encrypted, 22))
}

/// The two ends of a session.
fn ends([mut a, mut b]: [Keyring; 2], aes: bool) -> [SessionKeys; 2] {
    let mut initiator = Initiator::new(&mut a, NAMES);
    let (answerer, message) = answered(&mut b, NAMES, initiator.message(), aes).unwrap();
    [initiator.finish(&message, aes).unwrap(), answerer]
}

/// A frame with `len` bytes behind its base, and room for the tag.
fn frame(len: usize, fill: u8) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..BASE_LEN + len).map(|i| i as u8 ^ fill).collect();
    sealed::set_counter(&mut bytes, 0);
    bytes.extend([0; TAG_LEN]);
    bytes
}

/// The parts of a frame that opening must restore: all but counter and tag.
fn plain(bytes: &[u8]) -> (Vec<u8>, Vec<u8>) {
    (bytes[..36].to_vec(), bytes[BASE_LEN..bytes.len() - TAG_LEN].to_vec())
}

#[test]
fn frames_arrive_in_all_modes() {
    for (mode, aes) in [
        (Mode::Encrypted, true),
        (Mode::Encrypted, false),
        (Mode::Authenticated, true),
        (Mode::Authenticated, false),
    ] {
        let [mut a, mut b] = ends([1, 2].map(|e| key(&[7; 16], e, mode, 22)), aes);
        for len in [0, 1, 8, 64, 1500, 9000] {
            for _ in 0..2 {
                let sent = frame(len, len as u8);
                let mut bytes = sent.clone();
                a.seal(&mut bytes);
                let hidden = bytes[BASE_LEN..BASE_LEN + len] != sent[BASE_LEN..BASE_LEN + len];
                assert_eq!(hidden, mode == Mode::Encrypted && len > 0, "{mode:?} {len}");
                assert_eq!(b.open(&mut bytes), Ok(()), "{mode:?} {len}");
                assert_eq!(plain(&bytes), plain(&sent));
            }
        }
    }
}

#[test]
fn keys_and_modes_that_differ_do_not_meet() {
    let [a, _] = keys();
    let others = [
        key(&[8; 32], 2, Mode::Encrypted, 22),
        key(&[7; 31], 2, Mode::Encrypted, 22),
        key(&[7; 32], 2, Mode::Authenticated, 22),
        key(&[7; 32], 2, Mode::Encrypted, 21),
    ];
    for mut b in others {
        let initiator = Initiator::new(&mut a.clone(), NAMES);
        assert!(answered(&mut b, NAMES, initiator.message(), true).is_none());
        assert!(b.key_of(b"frame", &a.tag_key().tag(b"frame")).is_none());
    }
    assert!(a.key_of(b"frame", &keys()[1].tag_key().tag(b"frame")).is_some());
    assert!(PreSharedKey::new(&[1; KEY_MIN - 1], Mode::Encrypted).is_none());
    assert!(PreSharedKey::new(&[1; KEY_MAX + 1], Mode::Encrypted).is_none());
}

/// The messages of a handshake are of one session, and of one incarnation of each end.
#[test]
fn a_handshake_is_of_its_session() {
    let [mut a, mut b] = keys();
    let initiator = Initiator::new(&mut a, NAMES);
    let others = [
        SessionNames { opener: NAMES.answerer, ..NAMES },
        SessionNames { answerer: NAMES.opener, ..NAMES },
        SessionNames { inc: 8, ..NAMES },
        SessionNames { sid: 8, ..NAMES },
        SessionNames { epoch: 8, ..NAMES },
        SessionNames { psn: 8, ..NAMES },
        SessionNames { params: *b"what an OPEN sayz.", ..NAMES },
    ];
    for names in others {
        assert!(answered(&mut b, names, initiator.message(), true).is_none(), "{names:?}");
    }
    let mut other = Initiator::new(&mut a, NAMES);
    assert_ne!(other.message(), initiator.message(), "an ephemeral key is used once");
    let (_, answer) = answered(&mut b, NAMES, initiator.message(), true).unwrap();
    assert!(other.finish(&answer, true).is_err(), "the answer to another message");
    // The refusal has changed nothing.
    let (mut there, answer) = answered(&mut b, NAMES, other.message(), true).unwrap();
    let mut here = other.finish(&answer, true).unwrap();
    let mut bytes = frame(20, 0);
    here.seal(&mut bytes);
    assert_eq!(there.open(&mut bytes), Ok(()));
}

/// Goal: every bit of an OPEN in answer is protected, its header included, and the correct OPEN is
/// accepted after all changed ones. With keys; and with certificates, where tags do not prove the
/// sender.
#[test]
fn every_bit_of_an_answer_counts() {
    let root = test_certs::Root::new();
    let own = |entropy| {
        let papers = root.leaf("spiffe://a.org/job");
        let own = test_certs::credentials(&papers, &root, &[]).unwrap();
        Keyring::of_certificate(own, Mode::Encrypted, [entropy; 32])
    };
    for [mut a, mut b] in [keys(), [own(1), own(2)]] {
        let mut opener = Initiator::new(&mut a, NAMES);
        let (_, answer) = answered(&mut b, NAMES, opener.message(), true).unwrap();
        // One bit of each byte of the message and the certificates.
        let bits = (0..answer.len() * 8).filter(|bit| bit / 8 < OPEN_END || bit % 8 == bit / 8 % 8);
        for bit in bits {
            let mut bent = answer.clone();
            bent[bit / 8] ^= 1 << (bit % 8);
            assert!(opener.finish(&bent, true).is_err(), "bit {bit}");
        }
        for len in [0, OPEN_END - 1, OPEN_END, answer.len() - TAG_LEN, answer.len() - 1] {
            assert!(opener.finish(&answer[..len], true).is_err(), "{len} bytes");
        }
        assert!(opener.finish(&answer, true).is_ok());
    }
}

/// The same message answered twice yields different keys: recorded frames cannot be read in, or
/// replayed into, the second session.
#[test]
fn a_replayed_open_makes_other_keys() {
    let [mut a, mut b] = keys();
    let mut initiator = Initiator::new(&mut a, NAMES);
    let (_, answer) = answered(&mut b, NAMES, initiator.message(), true).unwrap();
    let (mut again, _) = answered(&mut b, NAMES, initiator.message(), true).unwrap();
    let mut here = initiator.finish(&answer, true).unwrap();
    let mut bytes = frame(20, 0);
    here.seal(&mut bytes);
    assert_eq!(again.open(&mut bytes), Err(OpenError::Forged));
}

#[test]
fn no_frame_is_opened_twice_or_by_its_sender() {
    let [mut a, mut b] = ends(keys(), true);
    let mut bytes = frame(30, 0);
    a.seal(&mut bytes);
    assert_eq!(a.open(&mut bytes.clone()), Err(OpenError::Forged), "reflected");
    assert_eq!(b.open(&mut bytes.clone()), Ok(()));
    assert_eq!(b.open(&mut bytes.clone()), Err(OpenError::Replayed));
    let mut second = frame(30, 0);
    a.seal(&mut second);
    assert_ne!(second[36..40], bytes[36..40], "a counter is used once");
    assert_ne!(second[BASE_LEN..], bytes[BASE_LEN..]);
    assert_eq!(b.open(&mut second), Ok(()));
}

#[test]
fn every_bit_counts_and_every_byte() {
    let [mut a, mut b] = ends(keys(), true);
    let mut bytes = frame(24, 0);
    a.seal(&mut bytes);
    for bit in 0..bytes.len() * 8 {
        let mut bent = bytes.clone();
        bent[bit / 8] ^= 1 << (bit % 8);
        assert!(b.open(&mut bent).is_err(), "bit {bit}");
    }
    for len in 0..bytes.len() {
        assert!(b.open(&mut bytes[..len].to_vec()).is_err(), "{len} bytes");
    }
    assert_eq!(b.open(&mut bytes), Ok(()), "it is still good");
}

/// Goal: an opener is answered under its key if that is listed, and each key keeps its name as long
/// as it is listed, at any position.
#[test]
fn every_listed_key_is_accepted() {
    let mut b = Keyring::new([1, 2, 3].map(listed).to_vec(), [0; 32]).unwrap();
    for bytes in [1, 2, 3, 4] {
        let mut a = Keyring::new(vec![listed(bytes)], [bytes; 32]).unwrap();
        let mut initiator = Initiator::new(&mut a, NAMES);
        let tag = a.tag_key().tag(b"an OPEN");
        let id = b.key_of(b"an OPEN", &tag);
        assert_eq!(id.is_some(), bytes < 4, "key {bytes}");
        let Some(id) = id else { continue };
        let answer = respond(&mut b, id, NAMES, initiator.message(), true).unwrap();
        assert!(a.key_of(b"its answer", &answer.tag_key.tag(b"its answer")).is_some());
        let (mut here, mut there) =
            (initiator.finish(&answer.open(HEADER), true).unwrap(), answer.keys);
        let mut bytes = frame(20, 0);
        here.seal(&mut bytes);
        assert_eq!(there.open(&mut bytes), Ok(()));
        // Under the name of another key.
        for other in [1, 2, 3] {
            let a = Keyring::new(vec![listed(other)], [0; 32]).unwrap();
            let other = b.key_of(b"", &a.tag_key().tag(b"")).unwrap();
            let taken = respond(&mut b, other, NAMES, initiator.message(), true);
            assert_eq!(taken.is_ok(), other == id);
        }
    }
    let names = |ring: &Keyring| {
        let tags = [1, 2, 3, 4].map(|bytes| listed(bytes).tag_key().tag(b"x"));
        tags.map(|tag| ring.key_of(b"x", &tag))
    };
    let [one, two, three, none] = names(&b);
    assert_eq!((b.first(), none), (one.unwrap(), None));
    assert!(b.replace([4, 3, 1].map(listed).to_vec()));
    let [again, gone, same, new] = names(&b);
    assert_eq!((again, gone, same), (one, None, three));
    assert!(new.is_some() && ![one, two, three].contains(&new) && Some(b.first()) == new);
    assert!(b.replace([2, 1].map(listed).to_vec()));
    assert_ne!(names(&b)[1], two, "a key that was taken off the list has another name");
    for bad in [0, KEYS_MAX + 1] {
        assert!(!b.replace((0..bad as u8).map(listed).collect()), "{bad} keys");
    }
    assert_eq!((b.len(), names(&b)[0]), (2, one));
}

/// Two handshakes of one node never use the same ephemeral key, also after a change of the list.
#[test]
fn another_list_draws_other_secrets() {
    let mut ring = Keyring::new(vec![listed(1)], [9; 32]).unwrap();
    let mut seen = std::collections::HashSet::new();
    for round in 0..20 {
        let initiator = Initiator::new(&mut ring, NAMES);
        assert!(seen.insert(initiator.message().clone()));
        assert!(ring.replace(vec![listed(1), listed(round)]));
    }
}

#[test]
fn no_secret_is_shown() {
    let shown = format!("{:?} {:?}", keys(), ends(keys(), true));
    assert!(!shown.contains("7, 7") && shown.contains("PreSharedKey"), "{shown}");
}

/// Bytes from hexadecimal digits.
fn hex(digits: &str) -> Vec<u8> {
    let pairs = digits.as_bytes().chunks(2);
    pairs.map(|pair| u8::from_str_radix(str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
}

/// Frames as another implementation of the ciphers and of HKDF seals them, in each mode, under the
/// first and the second key.
///
/// Source: `HKDFExpand`, `AESGCM` and `ChaCha20Poly1305` of Python's `cryptography` 48, put
/// together as docs/wire.md says, with the secret 00 01 .. 1f. In mode authenticated the first
/// eight bytes are the frame's own, and the others GMAC's, or Poly1305's.
#[test]
fn frames_are_sealed_as_others_do() {
    let secret = || {
        let mut secret = super::key::Secret::default();
        (0..32).for_each(|i| secret[i as usize] = i);
        secret
    };
    for (mode, aes, first, fifth) in [
        (
            Mode::Encrypted,
            true,
            "8cacc11b697b9617370aeaa8a9403ddcb0d5c934c03a4210",
            "cbcfa7a13aeda79bbaf9531f2fa700f982d5efd17c456aef",
        ),
        (
            Mode::Encrypted,
            false,
            "4df8aebefec3093b5d7514cdbde5f16fa5c34776776e2da4",
            "3152263a1ba5cb7ccf78a133085e1e9bc461fdadc7fd7d7c",
        ),
        (
            Mode::Authenticated,
            true,
            "28292a2b2c2d2e2f0f19480bea7a5c11396a432f27e1fa9e",
            "28292a2b2c2d2e2f33926dc1a429ef942849003baab95ab0",
        ),
        (
            Mode::Authenticated,
            false,
            "28292a2b2c2d2e2fc8e5cd3e44e79df5f3ffcbc5ae563172",
            "28292a2b2c2d2e2f3c4f525d91c435644b25ff8c751965e3",
        ),
    ] {
        let terms = SealFormat { mode, key_frames_bits: 2 };
        let mut end = SessionKeys::new(terms, aes, [secret(), secret()]);
        let sealed = [(); 5].map(|()| {
            let mut bytes = frame(8, 0);
            end.seal(&mut bytes);
            bytes[BASE_LEN..].to_vec()
        });
        assert_eq!(sealed[0], hex(first), "under the first key, {mode:?}, {aes}");
        assert_eq!(sealed[4], hex(fifth), "under the second, {mode:?}, {aes}");
    }
}

/// Keys and tags as derived by another implementation.
///
/// Source: HMAC of Python's `hmac` and `HKDFExpand` of its `cryptography` 48, put together as
/// docs/wire.md says; the tag is that of `frame`.
#[test]
fn keys_are_derived_as_others_do() {
    for (key, psk, tag) in [
        (
            PreSharedKey::new(&[7; 32], Mode::Encrypted),
            "6664330ab717f850f4a7d98d272f90c5bf58c29cbdabe34972ce3f4442cb060e",
            "b427ecd7dfc64ca5e34633369d296156",
        ),
        (
            PreSharedKey::new(&[7; 32], Mode::Authenticated),
            "d45bc3c57df02ff1c413093343be65d30ac3f4c3872ee362a74502bd27d5ebed",
            "94e500345309a356b79e66551312d37d",
        ),
        (
            PreSharedKey::public(Mode::Encrypted, 22),
            "d1c46c3f8f7d72b077c4036db41662f091a131c99d6ef92a183f700475997890",
            "929622b089d39446be047b789a32bc26",
        ),
    ] {
        let key = key.unwrap();
        assert_eq!(key.psk[..], hex(psk)[..]);
        assert_eq!(key.tag_key().tag(b"frame")[..], hex(tag)[..]);
    }
}

proptest! {
    /// Frames are lost, repeated and overtaken, also across changes of keys: each opened frame was
    /// sent, and is opened at most once; in order and without loss all are opened.
    #[test]
    fn keys_change_under_loss(
        bits in 2u32..6,
        fates in proptest::collection::vec((0usize..12, 0u8..10), 1..300),
    ) {
        let [mut a, mut b] = ends([1, 2].map(|e| key(&[7; 32], e, Mode::Encrypted, bits)), true);
        let (mut flying, mut opened) = (Vec::<(u8, Vec<u8>)>::new(), vec![0; fates.len()]);
        for (i, (place, fate)) in fates.iter().enumerate() {
            let mut bytes = frame(4, 0);
            bytes[BASE_LEN..BASE_LEN + 4].copy_from_slice(&(i as u32).to_le_bytes());
            a.seal(&mut bytes);
            let at = flying.len().saturating_sub(place % 4);
            if *fate > 2 {
                flying.insert(at, (*fate, bytes));
            }
            if flying.len() > *place {
                let (fate, mut bytes) = flying.remove(0);
                if fate > 8 {
                    flying.push((5, bytes.clone()));
                }
                if b.open(&mut bytes).is_ok() {
                    let at = u32::from_le_bytes(bytes[BASE_LEN..BASE_LEN + 4].try_into().unwrap());
                    opened[at as usize] += 1;
                }
            }
        }
        prop_assert!(opened.iter().all(|&times| times <= 1), "{:?}", opened);
        let got: usize = opened.iter().sum();
        let sent = fates.iter().filter(|(_, fate)| *fate > 2).count();
        prop_assert!(got * 2 >= sent.saturating_sub(24), "{} of {}", got, sent);
    }
}

/// Goal: the peer follows an early key change, late frames of the previous key are not opened
/// indefinitely, and no counter is used twice.
#[test]
fn a_key_that_is_left_early_is_followed() {
    for bits in [2, 5, 22] {
        let [mut a, mut b] = ends([1, 2].map(|e| key(&[7; 32], e, Mode::Encrypted, bits)), true);
        let mut counters = Vec::new();
        for round in 0..40_usize {
            let mut late = frame(20, 0);
            a.seal(&mut late);
            counters.push(sealed::counter(&late));
            if round % 3 == 2 {
                assert_eq!(b.open(&mut late.clone()), Ok(()));
            }
            a.renew();
            let mut first = frame(20, 0);
            a.seal(&mut first);
            counters.push(sealed::counter(&first));
            assert_eq!(b.open(&mut first), Ok(()), "round {round}, {bits} bits");
            b.forget_overtaken();
            b.forget_overtaken();
            if round % 3 != 2 {
                let refused = b.open(&mut late);
                assert!(refused.is_err(), "it is forgotten: round {round}, {bits} bits");
            }
        }
        assert!(counters.is_sorted_by(|a, b| a < b), "{counters:?}");
        // The peer looks ahead by one key only if keys seal many frames.
        a.renew();
        a.renew();
        let mut lost = frame(20, 0);
        a.seal(&mut lost);
        assert_eq!(b.open(&mut lost).is_err(), bits == 22);
    }
}

/// Another secret for the same session.
fn other(secret: &SessionSecret) -> SessionSecret {
    let mut line = secret.to_string();
    let last = if line.pop() == Some('0') { '1' } else { '0' };
    line.push(last);
    line.parse().unwrap()
}

/// Goal: recorded frames are opened with the lines of their session, repeated, overtaken, missing
/// and over many keys, in every mode; not with other lines, and not with a changed bit.
#[test]
fn recorded_frames_are_opened_with_the_lines_of_their_session() {
    let (a, b) = (Station::at([2, 0, 0, 0, 0, 1]), Station::at([2, 0, 0, 0, 0, 2]));
    for (mode, aes) in [
        (Mode::Encrypted, true),
        (Mode::Encrypted, false),
        (Mode::Authenticated, true),
        (Mode::Authenticated, false),
    ] {
        let ring = |entropy| key(&[7; 32], entropy, mode, 3);
        let [mut tx, _] = ends([ring(1), ring(2)], aes);
        let [secret, _] = tx.secrets(aes);
        let secret = secret.bind(a, b, 9);
        let line = secret.to_string();
        assert_eq!(line.parse::<SessionSecret>().unwrap().to_string(), line);
        assert!(!format!("{secret:?}").contains(line.rsplit(' ').next().unwrap()));
        let made = (0..300_u32).map(|n| {
            let base = Base {
                dst: b,
                src: a,
                ty: Ty::Msg,
                ar: false,
                rtx: false,
                ce: false,
                crc: false,
                dst_sid: 9,
                psn: Psn(n),
                cack: Psn(0),
                grant: 0,
                plen: 40,
            };
            let mut bytes = vec![0; BASE_LEN];
            base.emit(bytes.first_chunk_mut().unwrap());
            bytes.extend([0; 16]);
            bytes.extend([n as u8; 40]);
            let clear = bytes.clone();
            let len = bytes.len() - BASE_LEN;
            sealed::mark(&mut bytes, len);
            bytes.extend([0; TAG_LEN]);
            tx.seal(&mut bytes);
            bytes.extend([0; 5]);
            (clear, bytes)
        });
        let made: Vec<_> = made.collect();
        let mut reader = RecordReader::default();
        let text = lines(&[secret.clone(), other(&secret)]);
        reader.read(&format!("# of a test\n\n{}", *text)).unwrap();
        reader.read(&text).unwrap();
        assert_eq!(reader.len(), 2);
        // Some frames are missing, some repeated, and some late.
        for n in (0..300).filter(|n| n % 7 != 3).flat_map(|n| [n, n, n - n % 11]) {
            let (clear, mut bytes) = made[n].clone();
            assert_eq!((reader.open(&mut bytes), &bytes), (Read::Opened, &clear));
            assert_eq!(reader.open(&mut bytes), Read::Clear);
        }
        for at in [16, 20, 39, 60, 96 + TAG_LEN - 1] {
            let (_, mut bytes) = made[250].clone();
            bytes[at] ^= 1;
            let changed = bytes.clone();
            assert_eq!((reader.open(&mut bytes), &bytes), (Read::Sealed, &changed), "byte {at}");
        }
        let mut stranger = RecordReader::default();
        stranger.read(&other(&secret).to_string()).unwrap();
        assert_eq!(stranger.open(&mut made[0].1.clone()), Read::Sealed);
        for len in 0..made[0].1.len() {
            let _ = reader.open(&mut made[0].1[..len].to_vec());
        }
    }
}

#[test]
fn an_invalid_line_is_reported_by_its_number() {
    let [keys, _] = ends(keys(), true);
    let [secret, _] = keys.secrets(true);
    let good = secret.bind(Station::default(), Station::default(), 1).to_string();
    let mut reader = RecordReader::default();
    let words: Vec<&str> = good.split(' ').collect();
    for i in 0..words.len() {
        let without: Vec<_> = words.iter().copied().enumerate().filter(|w| w.0 != i).collect();
        let without: Vec<_> = without.into_iter().map(|w| w.1).collect();
        let changed = words.iter().enumerate().map(|(at, w)| if at == i { "x" } else { w });
        for bad in [without.join(" "), changed.collect::<Vec<_>>().join(" ")] {
            assert_eq!(reader.read(&format!("{good}\n{bad}\n")), Err(2), "{bad}");
        }
    }
    let frames = |bits: &str| good.replace(" 22 ", bits).parse::<SessionSecret>().is_err();
    assert!(frames(" 1 ") && frames(" 31 ") && frames(" 22 22 "));
    assert_eq!(reader.len(), 1);
}
