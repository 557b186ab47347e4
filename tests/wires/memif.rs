//! Two processes on the two ends of a memif of ours.

use std::os::unix::fs::PermissionsExt;

use barewire::errno::{FI_EACCES, FI_EADDRINUSE, FI_ENODEV};

use crate::lengths::{all_sizes, fewer_sizes, there_and_back};
use crate::rounds::kill_rounds;
use crate::supervisor::Worker;

/// The port of the server (0) or the client (1) of a memif of its own for each test.
fn port(test: &str, place: usize, options: &str) -> String {
    let role = ["server", "client"][place];
    format!("memif:@barewire-test-{test}-{},role={role}{options}", std::process::id())
}

/// The client comes first and finds no server yet.
#[test]
fn every_length_over_a_memif() {
    let start = |place, role: &str| Worker::start(role, role, &port("all", place, ""));
    there_and_back(start, all_sizes);
}

/// On a socket that is a file, whose server died before.
#[test]
fn every_length_over_a_memif_in_jumbo_frames() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("memif.sock");
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let start = |place: usize, role: &str| {
        let side = ["server", "client"][place];
        Worker::start(role, role, &format!("memif:{},role={side},mtu=9000", path.display()))
    };
    there_and_back(start, |mtu| {
        assert_eq!(mtu, 9000);
        all_sizes(mtu)
    });
    assert!(!path.exists(), "the server left its socket");
}

#[test]
fn every_length_over_a_memif_in_the_largest_frames() {
    let options = ",mtu=65522,id=7,secret=open";
    let start = |place, role: &str| Worker::start(role, role, &port("huge", place, options));
    there_and_back(start, all_sizes);
}

/// The server's frames are longer than the client's buffers: the smaller MTU rules.
#[test]
fn every_length_between_unequal_memifs() {
    let options = ["mtu=9000", "bsize=512,rsize=5"];
    let start = |place: usize, role: &str| {
        Worker::start(role, role, &port("unequal", place, &format!(",{}", options[place])))
    };
    there_and_back(start, fewer_sizes);
}

/// Goal: where nothing is kept to be sent again, nothing is lost either.
#[test]
fn every_length_over_a_memif_that_loses_nothing() {
    let options = ",lossless=yes";
    let start = |place, role: &str| Worker::start(role, role, &port("bare", place, options));
    there_and_back(start, all_sizes);
}

#[test]
fn every_length_over_a_bad_memif() {
    let start = |place, role: &str| {
        let port = format!("fault(loss=0.05,seed=3):{}", port("bad", place, ""));
        Worker::start(role, role, &port)
    };
    there_and_back(start, fewer_sizes);
}

#[test]
fn kills_over_a_memif() {
    let start = |place, name: &str| Worker::start(name, "traffic", &port("kills", place, ""));
    kill_rounds("kills-memif", start, 12, 5);
}

#[test]
fn kills_over_a_memif_that_loses_nothing() {
    let options = ",lossless=yes";
    let start =
        |place, name: &str| Worker::start(name, "traffic", &port("killsbare", place, options));
    kill_rounds("kills-bare-memif", start, 12, 7);
}

#[test]
fn kills_over_a_bad_memif() {
    let start = |place, name: &str| {
        let port = format!("fault(loss=0.05,seed=9):{}", port("killsbad", place, ""));
        Worker::start(name, "traffic", &port)
    };
    kill_rounds("kills-bad-memif", start, 6, 6);
}

/// What opening `port` in a process comes to: a code and the line.
fn outcome(role: &str, port: &str) -> (i32, String) {
    let mut opener = Worker::start(role, role, port);
    opener.say("END");
    let said = opener.addr.clone();
    opener.finish();
    let (code, line) = said.split_once(' ').unwrap();
    (code.parse().unwrap(), line.to_owned())
}

fn refused(role: &str, port: &str, code: i32, says: &[&str]) {
    let (got, line) = outcome(role, port);
    assert_eq!(got, code, "{port}: {line}");
    for part in says {
        assert!(line.contains(part), "{port}: {line}");
    }
}

#[test]
fn memifs_that_cannot_be_opened() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("memif.sock").display().to_string();
    let there = format!("memif:{path}");
    let server = format!("{there},role=server,id=3,secret=open");
    let mut first = Worker::start("server", "opener", &server);
    refused("opener", &server, FI_EADDRINUSE, &["a server is there already", "ss -xlp"]);
    refused("opener", &format!("{there},id=3"), FI_EACCES, &["Secret required", "secret="]);
    let port = format!("{there},id=3,secret=wrong");
    refused("opener", &port, FI_EACCES, &["Incorrect secret", "give both ends the same secret="]);
    let port = format!("{there},id=4,secret=open");
    refused("opener", &port, FI_ENODEV, &["ID not found", "no memif 4", "id="]);
    let port = format!("{there},id=3,secret=open");
    let client = Worker::start("client", "opener", &port);
    assert!(client.addr.starts_with("0 "), "{}", client.addr);
    refused("opener", &port, FI_EADDRINUSE, &["Already connected", "id=", "ss -xp"]);
    for mut worker in [std::mem::replace(&mut first, opened(&there)), client] {
        worker.say("END");
        worker.finish();
    }
    first.kill();
    let missing = format!("memif:{}/none/x.sock", dir.path().display());
    refused("opener", &missing, FI_ENODEV, &["no directory", "mkdir -p"]);
    refused("opener", &format!("{missing},role=server"), FI_ENODEV, &["no directory", "mkdir -p"]);
    std::fs::write(dir.path().join("file"), "x").unwrap();
    let file = format!("memif:{}/file,role=server", dir.path().display());
    refused("opener", &file, FI_EADDRINUSE, &["no socket", "rm "]);
}

/// Opened by somebody, whether or not its server is there.
fn opened(port: &str) -> Worker {
    let worker = Worker::start("late", "opener", &port.replace("memif.sock", "other.sock"));
    assert!(worker.addr.starts_with("0 "), "{}", worker.addr);
    worker
}

/// Processes that gave up the rights of root, before a directory and a socket that are not theirs.
#[test]
fn memifs_without_permission() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("memif.sock").display().to_string();
    let mut server = Worker::start("server", "opener", &format!("memif:{path},role=server"));
    let mode = |path: &str, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    mode(&path, 0o400);
    mode(&dir.path().display().to_string(), 0o500);
    refused("powerless", &format!("memif:{path}"), FI_EACCES, &["no permission", "chmod g+w"]);
    let other = format!("memif:{}/other.sock,role=server", dir.path().display());
    refused("powerless", &other, FI_EACCES, &["no permission", "ls -ld"]);
    mode(&dir.path().display().to_string(), 0o700);
    server.say("END");
    server.finish();
}
