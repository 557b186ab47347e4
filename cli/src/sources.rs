//! Sources of frames for `barewire capture`: a segment of shared memory, or the processes that have
//! a device open, each of which copies its frames to a segment of its own on request.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use barewire::stats::{self, PublisherInfo, record};
use barewire_driver::backend::pcap::Direction;
use barewire_driver::backend::shm::{Monitor, ShmSettings};
use barewire_driver::error::OpenError;
use barewire_driver::frame::RxFrame;
use barewire_driver::open;
use nix::unistd::{Uid, geteuid, seteuid};

use crate::fail::Fail;

/// Period of scans for processes that have just opened the device.
const SCAN_PERIOD: Duration = Duration::from_millis(20);
/// Period of repeated capture requests.
const REQUEST_PERIOD: Duration = Duration::from_millis(500);
/// How long to wait for a process that does not poll.
const JOIN_TIMEOUT: Duration = Duration::from_secs(1);
/// Pause before a failed join is tried again.
const RETRY_PERIOD: Duration = Duration::from_secs(10);

/// The sources of a capture.
pub(crate) struct Sources {
    /// Name of the captured port.
    name: String,
    all: Vec<Source>,
    /// Whether [`name`](Self::name) is a device, and processes are to be looked for.
    is_device: bool,
    /// Statistics files that were read; `None`: on another port, dead, or unreadable.
    known: HashMap<PathBuf, Option<Candidate>>,
    scanned_at: Instant,
    requested_at: Instant,
    /// Missed frames of sources that are closed.
    missed: u64,
}

struct Source {
    monitor: Monitor,
    /// For a process: its statistics file, and its identity.
    of: Option<(PathBuf, PublisherInfo)>,
    is_dead: bool,
}

impl Source {
    /// Whether it is a switch that sees all frames of `who`.
    fn covers(&self, who: &PublisherInfo) -> bool {
        !self.is_dead && self.of.as_ref().is_some_and(|(_, switch)| covers(switch, who))
    }

    fn is_of(&self, file: &Path) -> bool {
        self.of.as_ref().is_some_and(|(of, _)| of == file)
    }
}

/// A process that has the device open.
struct Candidate {
    who: PublisherInfo,
    /// When joining it failed.
    failed: Option<Instant>,
}

impl Sources {
    /// Joins the segment that `spec` names, or the processes that have its device open.
    ///
    /// # Errors
    /// There is no such segment, and no such device can be opened.
    pub(crate) fn open(spec: &str) -> Result<Self, Fail> {
        let spec = open::choose(spec).map_err(Fail::new)?;
        let kind = open::kind_and_device(&spec).map_or("", |(kind, _)| kind);
        let now = Instant::now();
        let mut sources = Self {
            name: spec.clone(),
            all: Vec::new(),
            is_device: kind != "shm",
            known: HashMap::new(),
            scanned_at: now,
            requested_at: now,
            missed: 0,
        };
        if !sources.is_device {
            let monitor = open::monitor(&spec).map_err(Fail::new)?;
            monitor.name().clone_into(&mut sources.name);
            sources.all.push(Source { monitor, of: None, is_dead: false });
            return Ok(sources);
        }
        let found = sources.scan()?;
        if found.is_empty() {
            open::check(&spec).map_err(Fail::new)?;
        }
        while now.elapsed() < JOIN_TIMEOUT && !sources.all.iter().all(|s| s.monitor.has_senders()) {
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(sources)
    }

    /// Name of the captured port.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The name with the processes, to be printed.
    pub(crate) fn summary(&self) -> String {
        let pid = |s: &Source| Some(s.of.as_ref()?.1.pid.to_string());
        let pids: Vec<String> = self.all.iter().filter_map(pid).collect();
        let name = &self.name;
        let is_used = self.all.iter().any(|s| s.of.is_some() || s.monitor.has_senders());
        match (self.is_device, is_used) {
            (_, false) => format!("{name}, which no process has open yet"),
            (false, true) => name.clone(),
            (true, true) => format!("{name} of {}", processes(&pids)),
        }
    }

    /// Frames that were missed for lack of room.
    pub(crate) fn missed(&self) -> u64 {
        self.missed + self.all.iter().map(|s| s.monitor.missed()).sum::<u64>()
    }

    /// Lends frames to `each`, 64 of each source and no more than `max`, as [`Monitor::read`].
    ///
    /// # Errors
    /// Those of [`scan`](Self::scan).
    pub(crate) fn read(
        &mut self,
        max: usize,
        mut each: impl FnMut(u64, Direction, &RxFrame<'_>, usize),
    ) -> Result<usize, Fail> {
        if self.is_device && self.scanned_at.elapsed() >= SCAN_PERIOD {
            let found = self.scan()?;
            if !found.is_empty() {
                eprintln!("and of {}", processes(&found));
            }
        }
        let mut got = 0;
        for source in &mut self.all {
            if got == max {
                break;
            }
            let here = source.monitor.read(64.min(max - got), &mut each).map_err(Fail::new)?;
            got += here;
            if source.is_dead && here == 0 {
                self.missed += source.monitor.missed();
                // It is removed from `all` below.
                source.of = None;
            }
        }
        self.all.retain(|s| !s.is_dead || s.of.is_some());
        Ok(got)
    }

    /// Scans for processes that have the device open, joins their segments, and returns their
    /// process ids. A switch that can be captured shows the frames of its processes as well.
    fn scan(&mut self) -> Result<Vec<String>, Fail> {
        self.scanned_at = Instant::now();
        self.scan_files()?;
        for source in &mut self.all {
            let lives =
                |(file, _): &(PathBuf, _)| self.known.get(file).is_some_and(Option::is_some);
            source.is_dead = !source.of.as_ref().is_none_or(lives);
        }
        let pids = self.join_new();
        self.drop_covered();
        if !pids.is_empty() || self.requested_at.elapsed() >= REQUEST_PERIOD {
            self.requested_at = Instant::now();
            for (file, who) in self.all.iter().filter_map(|s| s.of.as_ref()) {
                // A failed request means that the process has ended, which the next scan sees.
                let _ = record::request(file, who.owner);
            }
        }
        Ok(pids)
    }

    /// Reads new statistics files, and checks that the processes of known ones live.
    fn scan_files(&mut self) -> Result<(), Fail> {
        let files = record::files().map_err(|why| Fail::new(format!("{}: {why}", stats::DIR)))?;
        self.known.retain(|file, _| files.contains(file));
        for (file, known) in &mut self.known {
            if known.is_some() && !record::is_alive(file) {
                *known = None;
            }
        }
        for file in files {
            if self.known.contains_key(&file) {
                continue;
            }
            let known = match stats::publisher_of(&file) {
                Ok(who) => {
                    let is_one = who.alive && open::is_same_device(&who.port_name, &self.name);
                    (is_one && is_here(&who)).then_some(Candidate { who, failed: None })
                }
                Err(why) if why.kind() == io::ErrorKind::Unsupported => {
                    let pid = record::pid_of(&file).unwrap_or(0);
                    eprintln!("barewire: process {pid} cannot be recorded: {why}");
                    None
                }
                // Not written yet, or another user's.
                Err(_) => continue,
            };
            self.known.insert(file, known);
        }
        Ok(())
    }

    /// Joins processes that no switch covers, switches first, and returns their process ids.
    fn join_new(&mut self) -> Vec<String> {
        let mut new: Vec<_> =
            self.known.iter_mut().filter_map(|(f, k)| Some((f, k.as_mut()?))).collect();
        new.retain(|(file, _)| !self.all.iter().any(|s| s.is_of(file)));
        new.sort_by_key(|(_, known)| !known.who.is_switch);
        let mut pids = Vec::new();
        for (file, Candidate { who, failed }) in new {
            let is_early = failed.is_some_and(|at| at.elapsed() < RETRY_PERIOD);
            if is_early || self.all.iter().any(|s| s.covers(who)) {
                continue;
            }
            let Some(segment) = record::segment(file) else { continue };
            match join(&segment, Uid::from_raw(who.owner)) {
                Ok(monitor) => {
                    pids.push(who.pid.to_string());
                    let of = Some((file.clone(), who.clone()));
                    self.all.push(Source { monitor, of, is_dead: false });
                }
                Err(why) => {
                    if failed.replace(Instant::now()).is_none() {
                        eprintln!("barewire: process {} is not recorded yet: {why}", who.pid);
                    }
                }
            }
        }
        pids
    }

    /// Leaves processes that a later switch covers: their frames would be captured twice.
    fn drop_covered(&mut self) {
        let (switches, others): (Vec<_>, _) = std::mem::take(&mut self.all)
            .into_iter()
            .partition(|s| s.of.as_ref().is_some_and(|(_, who)| who.is_switch));
        self.all = others;
        self.all.retain(|source| {
            let Some((_, who)) = &source.of else { return true };
            let is_covered = switches.iter().any(|s| s.covers(who) && s.monitor.has_senders());
            self.missed += if is_covered { source.monitor.missed() } else { 0 };
            !is_covered
        });
        self.all.extend(switches);
    }
}

/// Whether `switch` is a switch that sees all frames of `who`. Only a switch of root or of the same
/// user is trusted.
fn covers(switch: &PublisherInfo, who: &PublisherInfo) -> bool {
    switch.is_switch && !who.is_switch && (switch.owner == 0 || switch.owner == who.owner)
}

fn processes(pids: &[String]) -> String {
    format!("process{} {}", if pids.len() > 1 { "es" } else { "" }, pids.join(", "))
}

/// Whether a process is in this network namespace, as far as known: names of kernel devices are per
/// namespace.
fn is_here(who: &PublisherInfo) -> bool {
    let kind = open::kind_and_device(&who.port_name).map_or("", |(kind, _)| kind);
    ["vfio", "dpdk"].contains(&kind) || who.is_here()
}

/// Joins a segment as the user of its process. Only root can do that for other users.
fn join(segment: &ShmSettings, owner: Uid) -> Result<Monitor, Fail> {
    let me = geteuid();
    if owner == me {
        return Monitor::open(segment).map_err(Fail::new);
    }
    seteuid(owner).map_err(Fail::new)?;
    let joined: Result<Monitor, OpenError> = Monitor::open(segment);
    seteuid(me).map_err(Fail::new)?;
    joined.map_err(Fail::new)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: nobody hides another user's process from root by saying that he is its switch.
    #[test]
    fn a_switch_stands_for_its_own_user() {
        let who = |owner, is_switch| PublisherInfo {
            netns: 0,
            pid: 1,
            owner,
            alive: true,
            port_name: String::new(),
            is_switch,
        };
        for (switch, owner, stands) in [(0, 7, true), (7, 7, true), (8, 7, false), (8, 0, false)] {
            assert_eq!(covers(&who(switch, true), &who(owner, false)), stands, "{switch} {owner}");
        }
        assert!(!covers(&who(7, false), &who(7, false)) && !covers(&who(7, true), &who(7, true)));
    }
}
