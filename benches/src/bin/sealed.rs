//! Cost of sealed frames: cycles of both ends per message over a memif that may lose frames, with a
//! key in either mode against none; long messages between two processes; handshakes.
//!
//! Cycles are those of the time stamp counter, whose rate does not depend on the processor's
//! frequency. Both ends are in one thread, so nothing idles; the modes are interleaved.

use std::sync::Arc;
use std::time::Instant;

use barewire::SealMode;
use barewire_benches::attacked::{Attacked, Forgery};
use barewire_benches::duo::Rounds;
use barewire_benches::end::{BenchResult, End, RawEnd};
use barewire_benches::pair::{How, exchange, joined};
use barewire_benches::stream::{Stream, WINDOW};
use barewire_benches::{Args, Report, Row, Sample, median};
use barewire_dataplane::seal::{
    Credentials, Initiator, Keyring, PreSharedKey, SessionKeys, SessionNames, respond,
};
use barewire_dataplane::wire::sealed::OPEN_END;
use barewire_dataplane::wire::{BASE_LEN, TAG_LEN};
use barewire_driver::clock::now_ns;

/// The modes, with their names. Without a key frames carry a checksum, as on a NIC.
const MODES: [(&str, Option<SealMode>); 3] = [
    ("open", None),
    ("authenticated", Some(SealMode::Authenticated)),
    ("encrypted", Some(SealMode::Encrypted)),
];

/// Longest message of the single-thread streams, bytes.
const LEN_MAX: usize = 9000;

/// Largest frame without its Ethernet header, bytes.
const MTU: usize = 9000;

/// Length of the messages between two processes, bytes.
const LONG: usize = 64 << 10;

fn main() {
    let args = Args::read();
    let mut report = Report::new("sealed", &args);
    for (case, len, alone) in [
        ("alone-64B", 64, true),
        ("64B", 64, false),
        ("1500B", 1500, false),
        ("9000B", 9000, false),
    ] {
        if args.wants(case) {
            let measured = cycles(case, len, alone, &args, &mut report);
            measured.unwrap_or_else(|why| report.skip(case, &why));
        }
    }
    if args.wants("cipher") {
        cipher_cycles(&args, &mut report);
    }
    if args.wants("64KiB") {
        let measured = goodput(&args, &mut report);
        measured.unwrap_or_else(|why| report.skip("64KiB", &why));
    }
    if args.wants("handshake") {
        handshakes(&args, &mut report);
    }
    if args.wants("attacked") {
        let measured = attacked(&args, &mut report);
        measured.unwrap_or_else(|why| report.skip("attacked", &why));
    }
}

/// The port specification of end `role` of the memif `name`.
fn spec(name: &str, role: &str) -> String {
    let id = std::process::id();
    format!("memif:@bench-sealed-{name}-{id},role={role},mtu={MTU},crc=yes")
}

/// Cycles per message of both ends, for each mode.
fn cycles(
    case: &str,
    len: usize,
    alone: bool,
    args: &Args,
    report: &mut Report,
) -> BenchResult<()> {
    let (rounds, count) = (args.size(31, 2), args.size(10_000, 200));
    let mut pairs = Vec::new();
    for (name, seal) in MODES {
        let open = |role| RawEnd::open_sealed(&spec(name, role), LEN_MAX * WINDOW, seal);
        pairs.push(joined([open("server")?, open("client")?]));
    }
    let mut taken: [Vec<f64>; 3] = Default::default();
    for round in 0..=rounds {
        for (pair, taken) in pairs.iter_mut().zip(&mut taken) {
            let begin = tsc();
            if alone {
                exchange(pair, (How::Send, len), count)?;
            } else {
                stream(pair, len, count)?;
            }
            let spent = (tsc() - begin) as f64 / count as f64;
            // The first round opens the sessions and touches the memory.
            if round > 0 {
                taken.push(spent);
            }
        }
    }
    for mode in 1..MODES.len() {
        let name = format!("{case}-{}", MODES[mode].0);
        let mut rounds = Rounds::default();
        taken[mode].iter().zip(&taken[0]).for_each(|(&sealed, &open)| rounds.push(sealed, open));
        let more = median(taken[mode].iter().zip(&taken[0]).map(|(sealed, open)| sealed - open));
        let note = format!("{more:+.0}, {}", rounds.span());
        report.row(rounds.row(&name, "cycles", "open").note(note));
    }
    Ok(())
}

/// The time stamp counter; nanoseconds where there is none.
fn tsc() -> u64 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every 64-bit processor has the instruction, and it touches no memory.
    return unsafe { std::arch::x86_64::_rdtsc() };
    #[cfg(not(target_arch = "x86_64"))]
    return now_ns();
}

/// Sends `count` messages from the first to the second endpoint, [`WINDOW`] in flight.
fn stream(pair: &mut [RawEnd; 2], len: usize, count: u64) -> BenchResult<()> {
    let [a, b] = pair;
    let (mut posted, mut sent, mut received) = (0, 0, 0);
    for _ in 0..100_000_000_u64 {
        while posted < count && posted - sent.min(received) < WINDOW as u64 {
            let at = posted as usize % WINDOW * LEN_MAX;
            if !b.recv(at, len) || !a.send(at, len, false) {
                return Err("refused in steady state".to_owned());
            }
            posted += 1;
        }
        received += b.poll().received;
        sent += a.poll().sent;
        if sent == count && received == count {
            return Ok(());
        }
    }
    Err("a message did not arrive".to_owned())
}

/// Long messages between two processes, encrypted against clear, and against the cipher alone.
fn goodput(args: &Args, report: &mut Report) -> BenchResult<()> {
    let (rounds, count) = (args.size(21, 2), args.size(2000, 32));
    let open = |name, seal| {
        let specs = ["server", "client"].map(|role| spec(name, role));
        Stream::open([&specs[0], &specs[1]], LONG, seal)
    };
    let mut sealed = open("long-sealed", Some(SealMode::Encrypted))?;
    let mut open = open("long-open", None)?;
    let before = sealed.first.line_ns()?;
    let (mut against_open, mut against_cipher) = (Rounds::default(), Rounds::default());
    for round in 0..=rounds {
        let (value, reference) = (sealed.run(count)?, open.run(count)?);
        let cipher = cipher_rate(MTU, count * (LONG / MTU) as u64);
        if round > 0 {
            against_open.push(value, reference);
            against_cipher.push(value, cipher);
        }
    }
    let after = sealed.first.line_ns()?;
    let row = against_open.row("64KiB-encrypted", "GB/s", "open").placed(before, after);
    report.row(row.note(format!("window {WINDOW}, {}", against_open.span())));
    let row = against_cipher.row("64KiB-encrypted", "GB/s", "AES-256-GCM alone");
    report.row(row.note(format!("frames of {MTU} B, {}", against_cipher.span())));
    Ok(())
}

/// Cycles of the cipher alone to seal and to open a frame: the least additional cost of a frame.
fn cipher_cycles(args: &Args, report: &mut Report) {
    const FRAME: usize = BASE_LEN + 24 + 64 + TAG_LEN;
    let (rounds, count) = (args.size(31, 2), args.size(10_000, 200));
    for (name, seal) in MODES.iter().filter_map(|(name, seal)| seal.map(|seal| (name, seal))) {
        let [mut from, mut to] = session(seal);
        let mut frame = [0; FRAME];
        let taken = (0..rounds).map(|_| {
            let begin = tsc();
            for _ in 0..count {
                from.seal(std::hint::black_box(&mut frame));
                to.open(std::hint::black_box(&mut frame)).expect("it was sealed just now");
            }
            (tsc() - begin) as f64 / count as f64
        });
        let taken: Sample = taken.collect();
        let row = Row::new(format!("cipher-64B-{name}"), taken.median(), "cycles").spread(&taken);
        report.row(row.note("one frame, sealed and opened"));
    }
}

/// GB/s at which the cipher seals frames of `len` bytes in place.
fn cipher_rate(len: usize, count: u64) -> f64 {
    let [mut keys, _] = session(SealMode::Encrypted);
    let mut frame = vec![0; len];
    let begin = now_ns();
    for _ in 0..count {
        keys.seal(std::hint::black_box(&mut frame));
    }
    (len as u64 * count) as f64 / (now_ns() - begin) as f64
}

/// The keys of both ends of a session.
fn session(seal: SealMode) -> [SessionKeys; 2] {
    let [mut a, mut b] = [1, 2].map(|entropy| ring(seal, entropy));
    agree(&mut a, &mut b, 0)
}

/// A keyring with the common key.
fn ring(seal: SealMode, entropy: u8) -> Keyring {
    let key = PreSharedKey::new(&[7; 32], seal).expect("32 bytes are a key");
    Keyring::new(vec![key], [entropy; 32]).expect("one key is a list")
}

/// Runs the handshake of a session.
fn agree(a: &mut Keyring, b: &mut Keyring, sid: u32) -> [SessionKeys; 2] {
    let names =
        SessionNames { opener: 1, answerer: 2, inc: 3, sid, epoch: 0, psn: 0, params: [0; 18] };
    let mut opener = Initiator::new(a, names);
    let answered = respond(b, b.first(), names, opener.message(), true);
    let answered = answered.expect("both have the key");
    let open = answered.open(&[0; OPEN_END]);
    [opener.finish(&open, true).expect("both have the key"), answered.keys]
}

/// Cost of a forged frame at the receiver that drops it, and the goodput of the attacked session:
/// two nodes in one thread, single-frame messages, the quiet session and the attacked one
/// interleaved.
fn attacked(args: &Args, report: &mut Report) -> BenchResult<()> {
    const LEN: usize = 1400;
    /// One of this many frames at the receiver is forged.
    const ONE_IN: u64 = 10;
    let (rounds, count) = (args.size(31, 2), args.size(10_000, 200));
    let mut session = Attacked::open(LEN)?;
    for (name, forgery) in Forgery::ALL {
        let (mut costs, mut goodput) = (Vec::new(), Rounds::default());
        for round in 0..=rounds {
            let mut time = |attack| -> BenchResult<(f64, u64)> {
                let begin = tsc();
                let forged = session.run(count, attack)?;
                Ok(((tsc() - begin) as f64, forged))
            };
            let (quiet, _) = time(None)?;
            let (loud, forged) = time(Some((forgery, ONE_IN - 1)))?;
            // The first round opens the session and touches the memory.
            if round > 0 {
                costs.push((loud - quiet) / forged as f64);
                goodput.push(count as f64 / loud, count as f64 / quiet);
            }
        }
        let costs: Sample = costs.into_iter().collect();
        let row = Row::new(format!("attacked-{name}-frame"), costs.median(), "cycles");
        report.row(row.spread(&costs).note("a forged frame that is dropped"));
        let row = goodput.row(&format!("attacked-{name}-goodput"), "messages/cycle", "quiet");
        let note = format!("one frame in {ONE_IN} is forged, {}", goodput.span());
        report.row(row.note(note));
    }
    let counted = session.counted();
    if (counted.sessions_opened, counted.sessions_reset) != (1, 0) {
        return Err("an attacker ended the session".to_owned());
    }
    Ok(())
}

/// Handshakes a second and core: the work of one end, half of that of both.
fn handshakes(args: &Args, report: &mut Report) {
    let psk = [1, 2].map(|entropy| ring(SealMode::Encrypted, entropy));
    for (name, [mut a, mut b]) in [("psk", psk), ("certificate", certified())] {
        let (rounds, count) = (args.size(15, 2), args.size(500, 5) as u32);
        let rates = (0..rounds).map(|round| {
            let begin = Instant::now();
            for sid in 0..count {
                std::hint::black_box(agree(&mut a, &mut b, sid + round as u32 * count));
            }
            2.0 * f64::from(count) / begin.elapsed().as_secs_f64()
        });
        let rates: Sample = rates.collect();
        let row = Row::new(format!("handshake-{name}"), rates.median(), "sessions/s");
        report.row(row.spread(&rates).note("one end's share"));
    }
}

/// Two keyrings with ECDSA P-256 certificates of a root with the same algorithm.
fn certified() -> [Keyring; 2] {
    use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, SanType};
    let pair = || KeyPair::generate().expect("a key is drawn");
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let root = CertifiedIssuer::self_signed(params, pair()).expect("a root");
    [1, 2].map(|n| {
        let (mut params, key) = (CertificateParams::default(), pair());
        let id = format!("spiffe://bench.example/{n}");
        params.subject_alt_names = vec![SanType::URI(id.try_into().expect("ASCII"))];
        let cert = params.signed_by(&key, &root).expect("a certificate").pem();
        let (key, roots) = (key.serialize_pem(), root.pem());
        // Any time within the default validity.
        let day = Arc::new(|| 1_893_456_000);
        let [cert, key, roots] = [&cert, &key, &roots].map(|pem| pem.as_bytes());
        let own = Credentials::from_pem(cert, key, roots, Vec::new(), day);
        Keyring::of_certificate(Arc::new(own.expect("good papers")), SealMode::Encrypted, [n; 32])
    })
}
