//! The example `gradients` among real processes.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

/// The program that cargo builds beside this test.
fn example() -> PathBuf {
    let mut path = std::env::current_exe().unwrap();
    path.pop();
    path.pop();
    path.join("examples").join("gradients")
}

#[test]
fn all_processes_have_the_same_sum() {
    let segment = format!("gradients-{}", std::process::id());
    let start = |rank: u32| -> Child {
        Command::new(example())
            .args([rank.to_string(), "4".to_owned()])
            .env("SEGMENT", &segment)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|e| panic!("{e}: cargo build -p barewire --example gradients"))
    };
    let all: Vec<Child> = (0..4).map(start).collect();
    for (rank, child) in all.into_iter().enumerate() {
        let out = child.wait_with_output().unwrap();
        assert!(out.status.success(), "rank {rank} failed");
        // 0 + 1 + 2 + 3, and four times 999 more.
        let said = String::from_utf8(out.stdout).unwrap();
        assert_eq!(said, format!("rank {rank} of 4: 6 ... 4002\n"));
    }
    let path = barewire_driver::backend::shm::ShmSettings::named(&segment).path();
    // Whoever makes another segment may have removed it.
    let _ = std::fs::remove_file(path);
}
