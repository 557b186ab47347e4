//! One-way messages between two processes, with a window in flight.

use barewire::SealMode;
use barewire_driver::clock::now_ns;
use barewire_tests::nodes::Nodes;

use crate::duo::{First, Second, Task, start};
use crate::end::{BenchResult, End, RawEnd};

/// Messages in flight, each with its own buffer at both ends.
pub const WINDOW: usize = 16;

/// Two processes with a port each.
pub struct Stream {
    /// The process that measures.
    pub first: First,
    end: RawEnd,
    len: usize,
}

impl Stream {
    /// Opens a port in this process and one in another, for messages of `len` bytes.
    ///
    /// # Errors
    /// The error of the port or the API.
    pub fn open(ports: [&str; 2], len: usize, seal: Option<SealMode>) -> BenchResult<Self> {
        Self::begin(None, ports, len, seal)
    }

    /// [`open`](Self::open) between node 0, which this process enters, and node 1.
    ///
    /// # Errors
    /// As [`open`](Self::open), or a node could not be entered.
    pub fn open_between(nodes: &Nodes, ports: [&str; 2], len: usize) -> BenchResult<Self> {
        Self::begin(Some(nodes), ports, len, None)
    }

    fn begin(
        nodes: Option<&Nodes>,
        [own, other]: [&str; 2],
        len: usize,
        seal: Option<SealMode>,
    ) -> BenchResult<Self> {
        let enter = |node: usize| nodes.map_or(Ok(()), |nodes| nodes.enter(node));
        let first = start(|second| {
            enter(1)?;
            serve(second, other, len, seal)
        })?;
        enter(0)?;
        let mut end = RawEnd::open_sealed(own, len * WINDOW, seal)?;
        end.join(|mac| first.exchange_station(mac));
        Ok(Self { first, end, len })
    }

    /// Sends `count` messages; returns GB/s up to the receiver's last completion.
    ///
    /// # Errors
    /// The other process has exited.
    pub fn run(&mut self, count: u64) -> BenchResult<f64> {
        let Self { first, end, len } = self;
        let begin = now_ns();
        first.begin(Task { what: 0, len: *len, count });
        let (mut posted, mut done) = (0, 0);
        while done < count {
            if posted < count && posted - done < WINDOW as u64 {
                let at = posted as usize % WINDOW * *len;
                posted += u64::from(end.send(at, *len, false));
            }
            done += end.poll().sent;
        }
        first.finish(|| {
            end.poll();
        })?;
        Ok((*len as u64 * count) as f64 / (now_ns() - begin) as f64)
    }
}

/// The second process: receives.
fn serve(second: &Second, spec: &str, len: usize, seal: Option<SealMode>) -> BenchResult<()> {
    let mut end = RawEnd::open_sealed(spec, len * WINDOW, seal)?;
    end.join(|mac| second.exchange_station(mac));
    second.serve(
        &mut end,
        |end| {
            end.poll();
        },
        |end, task| {
            let (mut posted, mut done) = (0, 0);
            while done < task.count {
                if posted < task.count && posted - done < WINDOW as u64 {
                    let at = posted as usize % WINDOW * task.len;
                    posted += u64::from(end.recv(at, task.len));
                    continue;
                }
                done += end.poll().received;
            }
            Ok(())
        },
    )
}
