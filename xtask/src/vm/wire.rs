//! A lossy cable between two guests: two sockets, and a thread per direction.

use std::io::ErrorKind;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::thread::JoinHandle;
use std::time::Duration;

use super::guest::Cable;

/// The cable; removed when dropped.
pub(crate) struct Wire {
    dir: PathBuf,
    over: Arc<AtomicBool>,
    counts: Arc<[AtomicU64; 2]>,
    threads: Vec<JoinHandle<()>>,
}

impl Wire {
    /// A cable that loses `loss_percent` of the frames; `seed` determines which.
    ///
    /// # Errors
    /// The sockets cannot be created.
    pub(crate) fn open(dir: &Path, loss_percent: u64, seed: u64) -> std::io::Result<Self> {
        std::fs::create_dir_all(dir)?;
        let over = Arc::new(AtomicBool::new(false));
        let counts = Arc::new([AtomicU64::new(0), AtomicU64::new(0)]);
        let mut threads = Vec::new();
        let bind = |end: &str| UnixDatagram::bind(dir.join(format!("wire-{end}")));
        let sockets = [bind("a")?, bind("b")?];
        for (from, other) in [(0, "b"), (1, "a")] {
            let socket = sockets[from].try_clone()?;
            socket.set_read_timeout(Some(Duration::from_millis(100)))?;
            // A connected socket of a NIC receives only from the socket at its own end.
            let out = sockets[1 - from].try_clone()?;
            let to = dir.join(format!("nic-{other}"));
            let (over, counts) = (Arc::clone(&over), Arc::clone(&counts));
            let seed = seed.wrapping_mul(2) + u64::from(from == 0);
            threads.push(std::thread::spawn(move || {
                forward(&socket, (&out, &to), loss_percent, seed, &over, &counts);
            }));
        }
        Ok(Self { dir: dir.to_owned(), over, counts, threads })
    }

    /// The cable end `a` or `b` for a NIC.
    pub(crate) fn end(&self, end: &str) -> Cable {
        let at = |name: &str| self.dir.join(format!("{name}-{end}"));
        Cable::Datagram(at("nic"), at("wire"))
    }

    /// Frames carried and frames lost so far.
    pub(crate) fn counts(&self) -> (u64, u64) {
        (self.counts[0].load(Relaxed), self.counts[1].load(Relaxed))
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.over.store(true, Relaxed);
        for thread in self.threads.drain(..) {
            // A panic of the thread was printed already.
            let _ = thread.join();
        }
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

fn forward(
    from: &UnixDatagram,
    (out, to): (&UnixDatagram, &Path),
    loss_percent: u64,
    seed: u64,
    over: &AtomicBool,
    counts: &[AtomicU64; 2],
) {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut frame = vec![0; 65_536];
    while !over.load(Relaxed) {
        let len = match from.recv(&mut frame) {
            Ok(len) => len,
            Err(why) if matches!(why.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                continue;
            }
            Err(_) => return,
        };
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        // Without a receiver the frame is lost, as on a cable.
        let lost = x % 100 < loss_percent || out.send_to(&frame[..len], to).is_err();
        counts[usize::from(lost)].fetch_add(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn datagrams_are_forwarded_except_for_the_lost_ones() {
        let dir = std::env::temp_dir().join(format!("xtask-wire-{}", std::process::id()));
        let wire = Wire::open(&dir, 20, 7).unwrap();
        let nic = |end: &str| {
            let Cable::Datagram(own, other) = wire.end(end) else { panic!("no socket") };
            let socket = UnixDatagram::bind(own).unwrap();
            socket.connect(other).unwrap();
            socket.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
            socket
        };
        let (a, b) = (nic("a"), nic("b"));
        let mut got = Vec::new();
        for i in 0..200_u8 {
            a.send(&[i; 100]).unwrap();
            if i % 8 == 7 {
                let mut frame = [0; 200];
                while let Ok(len) = b.recv(&mut frame) {
                    assert_eq!(len, 100);
                    got.push(frame[0]);
                }
            }
        }
        let (carried, lost) = wire.counts();
        assert_eq!((carried, carried + lost), (got.len() as u64, 200));
        assert!((20..70).contains(&lost), "{lost} lost of 200");
        assert!(got.windows(2).all(|w| w[0] < w[1]), "out of order");
        drop(wire);
        assert!(!dir.exists());
    }
}
