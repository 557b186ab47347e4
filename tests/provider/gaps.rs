//! Switches that are killed again and again under an MPI job: no operation fails, no byte is wrong,
//! and ranks of a host reach each other meanwhile.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use barewire_tests::nodes::FABRIC;
use barewire_tests::rng::Rng;

use super::hosts::{Helper, Hosts, SWITCH, switches};
use super::ranks::{Mpi, nightly, with_each};
use super::{Bench, compile, succeed};

/// The number behind `word`.
fn number(said: &str, word: &str) -> u64 {
    let rest = said.split_once(word).unwrap_or_else(|| panic!("no {word}: {said}")).1;
    let digits: String = rest.trim_start().chars().take_while(char::is_ascii_digit).collect();
    digits.parse().unwrap_or_else(|_| panic!("no number behind {word}: {said}"))
}

/// Kills a switch of two hosts `kills` times while the job runs, and lets it end then.
fn kill_under(mpi: &Mpi, bench: &Bench, kills: usize) {
    let port = format!("afpacket:{FABRIC}");
    let Some(hosts) = Hosts::new(2).map(Hosts::patient) else { return };
    let dir = tempfile::tempdir().unwrap();
    let program = compile(dir.path(), &[&mpi.compiler()], "gaps.c");
    let stop = dir.path().join("stop");
    let mut helpers = switches(&hosts, &port);
    let (hosts, helpers, stopped) = (&hosts, &mut helpers, &stop);
    let (done, is_done) = channel();
    let (said, mut gaps) = std::thread::scope(|scope| {
        // Goes with this closure, also when the job fails, and ends the killer.
        let done: Sender<()> = done;
        let killer = scope.spawn(move || {
            let mut rng = Rng::new(2_931, 0);
            let mut gaps = Vec::new();
            for kill in 0..kills {
                let node = kill % 2;
                // Of the frames of a job that has begun.
                assert!(helpers[node].says("@@serves"), "the switch of node {node} ended");
                let pause = Duration::from_millis(50 + rng.index(200) as u64);
                if is_done.recv_timeout(pause) != Err(RecvTimeoutError::Timeout) {
                    return gaps;
                }
                let start = Instant::now();
                drop(helpers.swap_remove(node));
                std::thread::sleep(Duration::from_millis(rng.index(300) as u64));
                helpers.insert(node, Helper::start(hosts, node, "switch_process", SWITCH, &port));
                gaps.push(start.elapsed().as_millis());
            }
            std::fs::write(stopped, "").unwrap();
            // It needs them until its end, and they end with this thread.
            let _ = is_done.recv();
            gaps
        });
        let mut command = hosts.launch(mpi, bench, 2);
        command.arg(&program).arg(stopped).env("FI_BAREWIRE_PORT", format!("afpacket:{FABRIC}"));
        let said = succeed(&mut command, 120 + 5 * kills as u64);
        drop(done);
        (said, killer.join().unwrap())
    });
    assert_eq!(gaps.len(), kills);
    gaps.sort_unstable();
    let line = said.lines().find(|line| line.contains("longest:")).unwrap_or("");
    let (waits, lively) = (number(&said, "long waits:"), number(&said, "more than two rounds:"));
    println!(
        "{}: {kills} kills, without a switch for {} ms, at most {} ms; {line}; {waits} long waits, \
         in {lively} of them more than two rounds within a host",
        mpi.name,
        gaps[kills / 2],
        gaps[kills - 1]
    );
    assert!(said.contains("all 4 ranks agree"), "{}: {said}", mpi.name);
    // On a loaded machine a round may itself take as long as a long wait.
    assert!(2 * lively > waits, "{}: {said}", mpi.name);
}

/// Goal: a switch may be killed and started again under a job as often as it likes: operations to
/// other hosts wait for it, those within a host do not, and nothing fails. By night 200 times.
#[test]
fn switches_are_killed_under_mpi() {
    with_each(|mpi, bench| kill_under(mpi, bench, if nightly() { 200 } else { 8 }));
}
