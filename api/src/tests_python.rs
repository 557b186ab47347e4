//! Whole frames, against another implementation: Python's `cryptography`, put together in
//! `tests_python.py` as `docs/wire.md` says.

use std::io::Write;
use std::process::{Command, Stdio};

use barewire_dataplane::seal::{Mode, SessionKeys};
use barewire_dataplane::wire::{BASE_LEN, TAG_LEN, sealed};

fn digits(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// What the other implementation makes of these lines; `None`, with a line, if there is none.
fn python(lines: &[String]) -> Option<Vec<String>> {
    let library = "import cryptography.hazmat.primitives.ciphers.aead";
    // The distribution's has the library of its package, whichever is the first in PATH.
    let python = ["python3", "/usr/bin/python3"].into_iter().find(|python| {
        let has = Command::new(python).args(["-c", library]).stderr(Stdio::null()).status();
        has.is_ok_and(|status| status.success())
    });
    let Some(python) = python else {
        println!("SKIPPED: no python3 has cryptography: sudo apt-get install python3-cryptography");
        return None;
    };
    let script = include_str!("tests_python.py");
    let mut child = Command::new(python);
    let child = child.args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    let mut child = child.unwrap();
    let mut input = child.stdin.take().unwrap();
    let lines = lines.join("\n");
    let writer = std::thread::spawn(move || input.write_all(lines.as_bytes()).unwrap());
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    assert!(output.status.success());
    Some(str::from_utf8(&output.stdout).unwrap().lines().map(str::to_owned).collect())
}

/// Goal: frames of every mode and cipher, of many lengths, over changes of the key by number and by
/// time, are byte by byte what another implementation makes of the same secrets.
#[test]
fn another_implementation_seals_the_same_bytes() {
    let (mut lines, mut ours) = (Vec::new(), Vec::new());
    let modes = [Mode::Encrypted, Mode::Authenticated].map(|mode| [(mode, true), (mode, false)]);
    for (n, (mode, aes)) in modes.into_iter().flatten().enumerate() {
        let (bits, n) = (2 + n as u32, n as u8);
        let secret: [u8; 32] = std::array::from_fn(|i| i as u8 ^ n.wrapping_mul(37));
        let mut end = SessionKeys::of_secrets(mode, bits, aes, [secret, [99; 32]]);
        let mut counter = 0_u64;
        for round in 0..60_usize {
            let len = [0, 1, 15, 16, 17, 24, 100, 1444, 8944][round % 9];
            let byte = |i: usize| (i * 7 + round * 31 + usize::from(n)) as u8;
            let mut bytes: Vec<u8> = (0..BASE_LEN + len).map(byte).collect();
            sealed::set_counter(&mut bytes, 0);
            let (secret, clear) = (digits(&secret), digits(&bytes));
            lines.push(format!("{mode:?} {aes} {bits} {secret} {counter} {clear}"));
            bytes.extend([0; TAG_LEN]);
            end.seal(&mut bytes);
            ours.push(digits(&bytes));
            counter += 1;
            if round % 20 == 13 {
                end.renew();
                counter = end.generation() << bits;
            }
        }
    }
    let Some(theirs) = python(&lines) else { return };
    assert_eq!(theirs.len(), ours.len());
    for (i, (theirs, ours)) in theirs.iter().zip(&ours).enumerate() {
        assert_eq!(theirs, ours, "line {i}: {:.60}", lines[i]);
    }
}
