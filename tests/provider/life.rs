//! Threads, forks, libraries that are closed too early, processes that end in the middle.

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use super::{Bench, compile, succeed, with};

fn survives(bench: &Bench, program: &Path, case: &str) {
    let said = succeed(bench.program(program.to_str().unwrap()).arg(case), 120);
    assert!(said.contains(&format!("{case} survived")), "{case}: {said}");
    // Nobody is left, so nothing of the segment is: whoever ends takes its part along.
    let name = format!("barewire-{}-{}", nix::unistd::geteuid(), bench.segment);
    let left = Path::new("/dev/shm").join(name).exists();
    // A process that ends without closing leaves the file to the next one that comes.
    assert!(!left || case.starts_with("exit") || case.starts_with("dlclose"), "{case}");
}

/// Row X81: threads, forks, ends without closing.
#[test]
fn a_process_may_live_and_end_as_it_likes() {
    with(&[("cc", "gcc"), ("fi_info", "libfabric-bin")], |bench| {
        if !Path::new("/usr/include/rdma/fabric.h").exists() {
            println!("SKIPPED: no rdma/fabric.h: sudo apt-get install libfabric-dev");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let program = compile(dir.path(), &["cc", "-ldl", "-lpthread"], "life.c");
        for case in ["threads", "queue", "control", "dlclose", "exit", "fork", "reload"] {
            survives(bench, &program, case);
            survives(bench, &program, &format!("{case}-auto"));
        }
        // The next one frees what was left by one that ended without closing, and says so. Another
        // process of this user that makes a segment may be the next one: a test beside this one.
        let is_freed = (0..10).any(|_| {
            survives(bench, &program, "exit");
            let mut command = bench.program(program.to_str().unwrap());
            let said = succeed(command.arg("reload").env("FI_LOG_LEVEL", "info"), 60);
            said.contains(" bytes were left by processes that died; they are freed")
        });
        assert!(is_freed, "nobody says what dead processes left");
        // What lies below logs to libfabric's log.
        let mut command = bench.program(program.to_str().unwrap());
        let said = succeed(command.arg("exit").env("FI_LOG_LEVEL", "debug"), 60);
        assert!(said.contains("joined path=/dev/shm/barewire-"), "{said}");
    });
}

/// Goal: who looks at libfabric's log learns that a peer died, and what ended with it. Method:
/// libfabric's own ping-pong, of which one side is killed.
#[test]
fn the_end_of_a_session_is_in_the_log() {
    with(&[("fi_pingpong", "libfabric-bin")], |bench| {
        // A TCP port for the program's own set-up, of nobody.
        let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let side = |with: &[&str]| {
            let mut command = bench.program("fi_pingpong");
            command.args(["-p", "barewire", "-e", "rdm", "-S", "64", "-I", "100000000"]).args(with);
            command.env("FI_BAREWIRE_T_DEAD_MS", "1000").env("FI_LOG_LEVEL", "warn");
            command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
        };
        let port = free.to_string();
        let begun = Instant::now();
        // What a client says of the end of its session. On a busy machine it takes longer than this
        // pause until there is one, and then nothing is said.
        let after = |pause: u64| {
            let mut server = side(&["-B", &port]);
            let mut client = loop {
                let mut client = side(&["-P", &port, "127.0.0.1"]);
                std::thread::sleep(Duration::from_millis(pause));
                // It ends if the server does not listen yet.
                if client.try_wait().unwrap().is_none() {
                    break client;
                }
                assert!(begun.elapsed() < Duration::from_secs(60), "no ping-pong begins");
            };
            let killed = server.id();
            server.kill().unwrap();
            server.wait().unwrap();
            let stderr = BufReader::new(client.stderr.take().unwrap());
            let watch = std::thread::spawn(move || {
                stderr.lines().map_while(Result::ok).find(|line| line.contains("session with"))
            });
            let until = Instant::now() + Duration::from_secs(20);
            while !watch.is_finished() && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(20));
            }
            let _ = client.kill();
            client.wait().unwrap();
            watch.join().unwrap().map(|line| (line, killed))
        };
        let said = [1500, 3000, 6000].into_iter().find_map(after);
        let (line, killed) = said.expect("the end of the session is told");
        println!("{line} (killed: {killed})");
        assert!(line.contains("<warn>") && line.contains(" ended: "), "{line}");
    });
}
