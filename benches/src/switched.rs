//! Messages between the processes of a node and a far process, over a memif that belongs to a
//! process or to a switch. One thread runs all parties: nothing idles, and each party's work is
//! timed.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use barewire_driver::backend::switch::Switch;
use barewire_driver::clock::now_ns;
use barewire_driver::open::{SwitchAccess, open_switch};

use crate::end::{BenchResult, End, RawEnd};

/// Turns of all parties after which a message counts as lost.
const PATIENCE: u32 = 1_000_000;

/// A node of several processes, its switch if it has one, and a far process.
pub struct Node {
    near: Vec<RawEnd>,
    switch: Option<Switch>,
    far: RawEnd,
}

/// Work of each party, nanoseconds.
#[derive(Clone, Copy, Default)]
struct Work {
    /// All processes of the node together.
    near: u64,
    switch: u64,
    far: u64,
}

/// Runs `party`, and adds its run time to `spent`.
fn timed<R>(spent: &mut u64, party: impl FnOnce() -> R) -> R {
    let start = now_ns();
    let out = party();
    *spent += now_ns() - start;
    out
}

impl Node {
    /// A node of `processes` processes, whose NIC belongs to a switch or to its only process. Each
    /// endpoint has `memory` bytes.
    ///
    /// # Errors
    /// The error of a port or the API.
    pub fn open(processes: usize, switched: bool, memory: usize) -> BenchResult<Self> {
        static SERIAL: AtomicU32 = AtomicU32::new(0);
        let (id, serial) = (std::process::id(), SERIAL.fetch_add(1, Relaxed));
        let spec = |role: &str| {
            format!("memif:@bench-switched-{id}-{serial},role={role},mtu=9000,bsize=16384")
        };
        let far = RawEnd::open(&spec("server"), memory)?;
        let (nic, switch) = match switched {
            true => {
                let switch = open_switch(&spec("client"), &SwitchAccess::default());
                let nic = format!("{},switch=yes", spec("client"));
                (nic, Some(switch.map_err(|why| why.to_string())?))
            }
            false => (spec("client"), None),
        };
        let near =
            (0..processes).map(|_| RawEnd::open(&nic, memory)).collect::<BenchResult<Vec<_>>>()?;
        let mut node = Self { near, switch, far };
        for near in &mut node.near {
            near.connect(node.far.addr());
        }
        node.far.connect(node.near[0].addr());
        Ok(node)
    }

    /// Runs a turn of the switch.
    fn turn_switch(switch: &mut Option<Switch>, work: &mut Work) -> BenchResult<()> {
        let Some(switch) = switch else { return Ok(()) };
        timed(&mut work.switch, || switch.turn()).map_err(|gone| gone.to_string())?;
        Ok(())
    }

    /// Half round trip of `count` messages of `len` bytes, one after the other: the work of all
    /// parties, nanoseconds.
    ///
    /// # Errors
    /// A call was refused, or a message did not arrive.
    pub fn half_round_trip(&mut self, len: usize, count: u64) -> BenchResult<f64> {
        let Self { near, switch, far } = self;
        let near = &mut near[0];
        let start = now_ns();
        for _ in 0..count {
            if !near.recv(0, len) || !far.recv(0, len) || !near.send(0, len, false) {
                return Err("refused in steady state".to_owned());
            }
            let (mut ended, mut patience) = (0, PATIENCE);
            // Two messages received and two sent.
            while ended < 4 {
                Self::turn_switch(switch, &mut Work::default())?;
                let there = far.poll();
                if there.received > 0 && !far.send(0, len, false) {
                    return Err("refused in steady state".to_owned());
                }
                Self::turn_switch(switch, &mut Work::default())?;
                let back = near.poll();
                ended += there.received + there.sent + back.received + back.sent;
                patience = patience.checked_sub(1).ok_or("a message did not arrive")?;
            }
        }
        Ok((now_ns() - start) as f64 / (2 * count) as f64)
    }

    /// Message rate of all processes of the node together towards the far process, in millions a
    /// second, if each party had its own processor: the rate of the busiest party. Each process has
    /// `window` messages of `len` bytes in flight and sends `count`.
    ///
    /// # Errors
    /// A call was refused, or a message did not arrive.
    pub fn rate(&mut self, len: usize, window: u64, count: u64) -> BenchResult<f64> {
        let Self { near, switch, far } = self;
        let processes = near.len() as u64;
        let (all, mut work) = (count * processes, Work::default());
        let (mut posted, mut received) = (0, 0);
        let mut sent = vec![(0, 0); near.len()];
        let mut patience = PATIENCE;
        while received < all || sent.iter().any(|&(_, done)| done < count) {
            timed(&mut work.far, || {
                while posted < all && posted - received < window * processes {
                    let at = (posted % window) as usize * len;
                    if !far.recv(at, len) {
                        break;
                    }
                    posted += 1;
                }
                received += far.poll().received;
            });
            for (near, (begun, done)) in near.iter_mut().zip(&mut sent) {
                timed(&mut work.near, || {
                    while *begun < count && *begun - *done < window {
                        let at = (*begun % window) as usize * len;
                        if !near.send(at, len, false) {
                            break;
                        }
                        *begun += 1;
                    }
                    *done += near.poll().sent;
                });
            }
            Self::turn_switch(switch, &mut work)?;
            patience = patience.checked_sub(1).ok_or("a message did not arrive")?;
        }
        let busiest = work.far.max(work.switch).max(work.near / processes);
        Ok(all as f64 * 1e3 / busiest as f64)
    }
}
