//! Where `barewire capture` gets frames from: a segment of shared memory, or the processes that
//! have a device open, each of which is asked to show them in a segment of its own.

use std::collections::HashSet;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use barewire::stats::{self, Publishing, record};
use barewire_driver::backend::pcap::Direction;
use barewire_driver::backend::shm::{Monitor, ShmSettings};
use barewire_driver::error::OpenError;
use barewire_driver::frame::RxFrame;
use barewire_driver::open;
use nix::unistd::{Uid, geteuid, seteuid};

use crate::fail::Fail;

/// How often a process is looked for that has just opened the device.
const LOOK: Duration = Duration::from_millis(20);
/// How often those that there are are asked again.
const ASK: Duration = Duration::from_millis(500);
/// How long a process that does not poll is waited for.
const PATIENCE: Duration = Duration::from_millis(300);

/// See the module.
pub(crate) struct Sources {
    /// What is recorded, as a port.
    name: String,
    all: Vec<Source>,
    /// Whether [`name`](Self::name) is a device, and processes are to be looked for.
    is_device: bool,
    /// Files that were looked at.
    known: HashSet<PathBuf>,
    looked: Instant,
    asked: Instant,
    /// Frames that went by of those who have gone.
    missed: u64,
}

struct Source {
    monitor: Monitor,
    /// Of a process: its file, and whether it is a switch.
    file: Option<PathBuf>,
    is_switch: bool,
    has_gone: bool,
}

impl Sources {
    /// Joins the segment that `spec` names, or asks the processes that have its device open.
    ///
    /// # Errors
    /// There is neither such a segment nor could such a device be opened.
    pub(crate) fn open(spec: &str) -> Result<Self, Fail> {
        let spec = open::choose(spec).map_err(Fail::new)?;
        let kind = open::kind_and_device(&spec).map_or("", |(kind, _)| kind);
        let now = Instant::now();
        let mut sources = Self {
            name: spec.clone(),
            all: Vec::new(),
            is_device: kind != "shm",
            known: HashSet::new(),
            looked: now,
            asked: now,
            missed: 0,
        };
        if !sources.is_device {
            let monitor = open::monitor(&spec).map_err(Fail::new)?;
            monitor.name().clone_into(&mut sources.name);
            sources.all.push(Source { monitor, file: None, is_switch: false, has_gone: false });
            return Ok(sources);
        }
        let found = sources.look()?;
        if found.is_empty() {
            open::check(&spec).map_err(Fail::new)?;
        }
        while now.elapsed() < PATIENCE && !sources.all.iter().all(|s| s.monitor.has_senders()) {
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(sources)
    }

    /// What is recorded, as a port.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The same for people, with the processes.
    pub(crate) fn summary(&self) -> String {
        let pid = |s: &Source| Some(stats::look(s.file.as_ref()?).ok()?.pid.to_string());
        let pids: Vec<String> = self.all.iter().filter_map(pid).collect();
        let name = &self.name;
        match (self.is_device, pids.is_empty()) {
            (false, _) => name.clone(),
            (true, true) => format!("{name}, which no process has open yet"),
            (true, false) => format!("{name} of {}", processes(&pids)),
        }
    }

    /// Frames that passed while there was no room for them.
    pub(crate) fn missed(&self) -> u64 {
        self.missed + self.all.iter().map(|s| s.monitor.missed()).sum::<u64>()
    }

    /// Lends frames to `each`, 64 of each source and no more than `max`, as [`Monitor::read`].
    ///
    /// # Errors
    /// Those of [`look`](Self::look).
    pub(crate) fn read(
        &mut self,
        max: usize,
        mut each: impl FnMut(u64, Direction, &RxFrame<'_>, usize),
    ) -> Result<usize, Fail> {
        if self.is_device && self.looked.elapsed() >= LOOK {
            let found = self.look()?;
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
            if source.has_gone && here == 0 {
                self.missed += source.monitor.missed();
                // Its place in `all` goes below.
                source.file = None;
            }
        }
        self.all.retain(|s| !s.has_gone || s.file.is_some());
        Ok(got)
    }

    /// Looks for processes that have the device open, joins what they show, and says their numbers.
    /// A switch that may be asked sees what the processes behind it send and receive.
    fn look(&mut self) -> Result<Vec<String>, Fail> {
        self.looked = Instant::now();
        let files = record::files().map_err(|why| Fail::new(format!("{}: {why}", stats::DIR)))?;
        for source in &mut self.all {
            source.has_gone = source.file.as_ref().is_some_and(|file| !files.contains(file));
        }
        let mut new = Vec::new();
        self.known.retain(|file| files.contains(file));
        let unknown: Vec<_> = files.into_iter().filter(|f| !self.known.contains(f)).collect();
        for file in unknown {
            let Ok(who) = stats::look(&file) else { continue };
            self.known.insert(file.clone());
            if who.alive && open::is_on(&who.port_name, &self.name) && is_here(&who) {
                new.push((file, who));
            }
        }
        let is_switch = |s: &Source| s.is_switch && !s.has_gone;
        if new.iter().any(|(_, who)| who.is_switch) || self.all.iter().any(is_switch) {
            new.retain(|(_, who)| who.is_switch);
        }
        let mut pids = Vec::new();
        for (file, who) in new {
            let Some(segment) = record::segment(&file) else { continue };
            let Publishing { pid, owner, is_switch, .. } = who;
            match join(&segment, Uid::from_raw(owner)) {
                Ok(monitor) => {
                    pids.push(pid.to_string());
                    self.all.push(Source { monitor, file: Some(file), is_switch, has_gone: false });
                }
                Err(why) => eprintln!("barewire: process {pid} is not recorded: {why}"),
            }
        }
        if !pids.is_empty() || self.asked.elapsed() >= ASK {
            self.asked = Instant::now();
            // Who cannot be asked has gone, which the next look sees.
            self.all.iter().filter_map(|s| s.file.as_ref()).for_each(|f| drop(record::ask(f)));
        }
        Ok(pids)
    }
}

fn processes(pids: &[String]) -> String {
    format!("process{} {}", if pids.len() > 1 { "es" } else { "" }, pids.join(", "))
}

/// Whether a process is in this network namespace, as far as can be seen: devices of the kernel
/// have a name in each.
fn is_here(who: &Publishing) -> bool {
    let kind = open::kind_and_device(&who.port_name).map_or("", |(kind, _)| kind);
    if ["vfio", "dpdk"].contains(&kind) {
        return true;
    }
    let of = |who: &str| Some(std::fs::metadata(format!("/proc/{who}/ns/net")).ok()?.ino());
    let (there, here) = (of(&who.pid.to_string()), of("self"));
    there.is_none() || here.is_none() || there == here
}

/// Joins a segment as the user whose process shows frames there, which is for root to do.
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
