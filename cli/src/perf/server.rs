//! The server of a measurement: echoes a ping-pong, receives and verifies a stream, or registers
//! memory for one-sided operations.

use std::collections::VecDeque;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use barewire::names::Names;
use barewire::{Buf, EpAddr, FiAddr};
use serde::Serialize;

use super::control::{Control, Mode, Run};
use super::link::{Event, Link, SERVER_TIMEOUT};
use super::remote::LentRegion;
use super::{Common, pattern};
use crate::fail::Fail;
use crate::out::{json, print, print_optional};

/// How long the server polls at full speed after an event. Then it polls every millisecond, so that
/// an idle server takes no processor.
const AWAKE: Duration = Duration::from_millis(200);

#[derive(Serialize)]
struct Listening {
    listening: String,
    port: String,
}

#[derive(Serialize)]
struct ServedRun {
    client: String,
    run: &'static str,
    size: u64,
    received: u64,
    wrong: u64,
}

/// Prints the server's address and serves clients until interrupted or, with `--once`, one client.
///
/// # Errors
/// The port does not open. A client that fails ends its run and nothing else, unless it is the
/// only one.
pub(super) fn run(args: &Common) -> Result<ExitCode, Fail> {
    let mut link = Link::open_by_name(args, SERVER_TIMEOUT)?;
    let names = Names::of(link.port());
    let (at, is_whole) = names.name(link.addr()?);
    let is_name = is_whole || matches!(names, Names::Queried { .. }) && !at.ip().is_loopback();
    let addr = link.addr()?.to_string();
    if args.json {
        json(&Listening { listening: addr, port: link.port().to_owned() })?;
    } else {
        let port = match args.port.as_str() {
            "shm" => String::new(),
            port if link.port().contains("switch=yes") => format!("--port '{port}' "),
            port => format!("--port '{}' ", other_end(port)),
        };
        let but = if names_this_host(&args.port) { ", with its own address" } else { "" };
        print(format_args!(
            "listening on {}\non the other side{but}: barewire pingpong {port}{}{addr}\n",
            link.port(),
            args.key_words()
        ))?;
        if is_name {
            print(format_args!("or by its host and service: {at}\n"))?;
        }
    }
    let mut later = VecDeque::new();
    loop {
        let next = later.pop_front();
        let next = next.map_or_else(|| wait_for_client(&mut link, args.parent), |r| Ok(Some(r)));
        let Some(start) = next? else { return Ok(ExitCode::SUCCESS) };
        let served = serve(&mut link, start, &mut later, args.json);
        match served {
            Ok(()) if args.once => {
                // The reader of standard output has closed it.
                let _ = link.settle();
                return Ok(ExitCode::SUCCESS);
            }
            Ok(()) => {}
            Err(why) if args.once => return Err(why),
            Err(why) => eprintln!("barewire: a client failed: {why}"),
        }
    }
}

/// The port name for the other side: the same port, for a memif in the other role.
fn other_end(port: &str) -> String {
    let Some(at) = port.find("memif:").filter(|_| !port.contains('|')) else {
        return port.to_owned();
    };
    let (wrappers, memif) = port.split_at(at);
    let (roles, mut options): (Vec<&str>, Vec<&str>) =
        memif.split(',').partition(|option| option.starts_with("role="));
    if !roles.iter().any(|role| ["role=server", "role=master"].contains(role)) {
        options.push("role=server");
    }
    format!("{wrappers}{}", options.join(","))
}

/// Whether a port name has an IP address of this host alone.
fn names_this_host(port: &str) -> bool {
    if let Some((_, address)) = port.split_once("ip(") {
        return !address.starts_with("127.") && !address.starts_with("[::1]");
    }
    let address = port.split_once("udp:").map_or("", |(_, address)| address);
    if let Some((v6, _)) = address.strip_prefix('[').and_then(|at| at.split_once(']')) {
        // A prefix is the same everywhere.
        return !v6.ends_with("::") && v6 != "::1";
    }
    // A network is the same everywhere.
    !address.contains('/')
        && address.starts_with(|c: char| c.is_ascii_digit())
        && !address.starts_with("127.")
}

/// The first run of a client, or `None` if the parent process has ended.
fn wait_for_client(link: &mut Link, parent: Option<i32>) -> Result<Option<Run>, Fail> {
    let mut awake = Instant::now();
    loop {
        match link.poll() {
            Ok(Some(Event::Control(Control::Start(run)))) => return Ok(Some(run)),
            Ok(Some(_)) => awake = Instant::now(),
            Ok(None) if awake.elapsed() < AWAKE => std::thread::yield_now(),
            Ok(None) => std::thread::sleep(Duration::from_millis(1)),
            // A late error of a former client must not end the server.
            Err(why) => tracing::debug!("{why}"),
        }
        if parent.is_some_and(|pid| nix::unistd::getppid().as_raw() != pid) {
            return Ok(None);
        }
    }
}

/// Serves one client from its first Start to its Bye. Other clients meanwhile are queued in
/// `later`.
fn serve(
    link: &mut Link,
    first: Run,
    later: &mut VecDeque<Run>,
    as_json: bool,
) -> Result<(), Fail> {
    let addr = EpAddr::from_bytes(&first.client).map_err(Fail::new)?;
    let peer = link.add_peer(addr)?;
    let mut start = first;
    let done = loop {
        let mut server = Server::new(link, peer, start, later);
        let done = server.run();
        server.take_back();
        let (received, wrong) = match done {
            Ok(counts) => counts,
            Err(why) => break Err(why),
        };
        report(&addr, &start, received, wrong, as_json);
        match next_run(link, first.client, later) {
            Ok(Some(run)) => start = run,
            Ok(None) => break Ok(()),
            Err(why) => break Err(why),
        }
    };
    link.remove_peer(peer)?;
    done
}

/// Most waiting clients. A client gets no reply before its turn.
const LATER_MAX: usize = 64;

/// Queues the first run of another client, once per client.
fn defer_client(later: &mut VecDeque<Run>, run: Run) {
    later.retain(|other| other.client != run.client);
    if later.len() < LATER_MAX {
        later.push_back(run);
    }
}

/// The next run of `client`, or `None` if it is done.
fn next_run(
    link: &mut Link,
    client: [u8; 16],
    later: &mut VecDeque<Run>,
) -> Result<Option<Run>, Fail> {
    loop {
        match link.next()? {
            Event::Control(Control::Start(run)) if run.client == client => return Ok(Some(run)),
            Event::Control(Control::Start(run)) => defer_client(later, run),
            Event::Control(Control::Bye) => return Ok(None),
            _ => {}
        }
    }
}

fn report(addr: &EpAddr, run: &Run, received: u64, wrong: u64, as_json: bool) {
    let (name, ops) = run.mode.names();
    let client = addr.to_string();
    if as_json {
        let served = ServedRun { client, run: name, size: run.size, received, wrong };
        print_optional(serde_json::to_string(&served).unwrap_or_default());
    } else {
        let size = crate::table::bytes(run.size);
        let checked = match (run.verify, wrong) {
            (false, _) => String::new(),
            // The client verifies them.
            (true, 0) if run.mode.is_one_sided() => String::new(),
            (true, 0) => ", every byte right".to_owned(),
            (true, wrong) => format!(", {wrong} WRONG"),
        };
        print_optional(format_args!("{client}: {name}, {received} {ops} of {size}{checked}"));
    }
}

/// Memory for receives of one run.
const BUFFER_BYTES: u64 = 256 << 20;

/// One run.
struct Server<'a> {
    link: &'a mut Link,
    peer: FiAddr,
    run: Run,
    later: &'a mut VecDeque<Run>,
    /// Slots with a posted receive and the number of the message it will take: messages match in
    /// the order of posting, and may complete out of it.
    posted: Vec<(usize, u64)>,
    next_number: u64,
    /// Messages that are being echoed.
    returning: usize,
    received: u64,
    wrong: u64,
}

impl<'a> Server<'a> {
    fn new(link: &'a mut Link, peer: FiAddr, run: Run, later: &'a mut VecDeque<Run>) -> Self {
        let (next_number, returning, received, wrong) = (0, 0, 0, 0);
        let posted = Vec::new();
        Self { link, peer, run, later, posted, next_number, returning, received, wrong }
    }

    /// Posts receives, says Ready, and serves until Stop and the last message.
    fn run(&mut self) -> Result<(u64, u64), Fail> {
        self.link.begin();
        if self.run.mode.is_one_sided() {
            return self.lend();
        }
        let len = usize::try_from(self.run.size).map_err(Fail::new)?;
        let room = BUFFER_BYTES / self.run.size.max(1);
        let slots = room.min(u64::from(self.run.window)).max(2) as usize;
        for slot in 0..slots {
            self.post(slot, Buf::zeroed(len))?;
        }
        self.drain()?;
        self.link.send_control(self.peer, Control::Ready { key: 0 })?;
        let mut total = None;
        while total != Some(self.received) || self.returning > 0 {
            match self.link.next()? {
                Event::Received { slot, buf, len } => self.take(slot, buf, len)?,
                Event::Sent { slot, buf } => {
                    self.returning -= 1;
                    self.post(slot, buf)?;
                }
                Event::Control(Control::Stop { sent }) => total = Some(sent),
                Event::Control(Control::Start(run)) if run.client != self.run.client => {
                    defer_client(self.later, run);
                }
                Event::Control(said) if !said.is_of_client() => self.link.drop_control(&said.odd()),
                Event::Control(said) => {
                    return Err(Fail::new(format!("the client said {said:?} in a run")));
                }
                Event::Failed(why) => return Err(why),
                // It may be of a dead client. If it is of this client, the message count will show
                // it.
                Event::InjectFailed(why) => tracing::debug!("{why}"),
            }
        }
        let (received, wrong) = (self.received, self.wrong);
        self.link.send_control(self.peer, Control::Done { received, wrong })?;
        Ok((received, wrong))
    }

    /// Registers memory until Stop. One-sided operations are no events: only a counter shows them.
    fn lend(&mut self) -> Result<(u64, u64), Fail> {
        let mut lent = LentRegion::new(self.link.domain(), &self.run)?;
        self.link.send_control(self.peer, Control::Ready { key: lent.key() })?;
        loop {
            match self.link.poll()? {
                Some(Event::Control(Control::Stop { sent })) => {
                    self.link
                        .send_control(self.peer, Control::Done { received: sent, wrong: 0 })?;
                    return Ok((sent, 0));
                }
                Some(Event::Control(Control::Start(run))) if run.client != self.run.client => {
                    defer_client(self.later, run);
                }
                Some(Event::Control(said)) if !said.is_of_client() => {
                    self.link.drop_control(&said.odd());
                }
                Some(Event::Control(said)) => {
                    return Err(Fail::new(format!("the client said {said:?} in a run")));
                }
                Some(Event::Failed(why)) => return Err(why),
                Some(_) => {}
                None => {
                    self.link.note_activity(lent.untouched_since()?);
                    self.link.wait()?;
                }
            }
        }
    }

    /// Drops messages of a client that has ended early: the current client sends nothing before
    /// Ready.
    fn drain(&mut self) -> Result<(), Fail> {
        let mut quiet = 0;
        while quiet < 100 {
            quiet += 1;
            if let Some(Event::Received { slot, buf, .. }) = self.link.poll()? {
                self.posted.retain(|(posted, _)| *posted != slot);
                self.post(slot, buf)?;
                quiet = 0;
            }
        }
        for (number, (_, takes)) in (0..).zip(&mut self.posted) {
            *takes = number;
        }
        self.next_number = self.posted.len() as u64;
        Ok(())
    }

    fn post(&mut self, slot: usize, buf: Buf) -> Result<(), Fail> {
        self.link.recv(buf, self.run.tagged, slot)?;
        self.posted.push((slot, self.next_number));
        self.next_number += 1;
        Ok(())
    }

    fn take(&mut self, slot: usize, buf: Buf, len: usize) -> Result<(), Fail> {
        let place = self.posted.iter().position(|(posted, _)| *posted == slot);
        let place = place.ok_or_else(|| Fail::new("a message came where none was expected"))?;
        let (_, number) = self.posted.remove(place);
        self.received += 1;
        if self.run.mode == Mode::PingPong {
            return self.send_back(slot, buf, len);
        }
        if self.run.verify && !(len == buf.len() && pattern::holds(number, &buf)) {
            self.wrong += 1;
        }
        self.post(slot, buf)
    }

    fn send_back(&mut self, slot: usize, buf: Buf, len: usize) -> Result<(), Fail> {
        let tagged = self.run.tagged;
        if len <= self.link.inject_size() {
            self.link.inject(&buf[..len], self.peer, tagged)?;
            return self.post(slot, buf);
        }
        self.returning += 1;
        self.link.send(buf, self.peer, tagged, slot)
    }

    /// Cancels the receives that are still posted, so that none is matched in the next run.
    fn take_back(&mut self) {
        for (slot, _) in std::mem::take(&mut self.posted) {
            self.link.cancel(slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_other_end_of_a_memif_has_the_other_role() {
        for (port, other) in [
            ("memif:@job7,role=server", "memif:@job7"),
            ("memif:@job7,role=master,id=4", "memif:@job7,id=4"),
            ("memif:@job7", "memif:@job7,role=server"),
            ("memif:@job7,role=client,mtu=9000", "memif:@job7,mtu=9000,role=server"),
            ("fault(loss=0.1):memif:@job7,role=server", "fault(loss=0.1):memif:@job7"),
            ("udp:10.0.0.1", "udp:10.0.0.1"),
            ("memif:@a,role=server|shm", "memif:@a,role=server|shm"),
        ] {
            assert_eq!(other_end(port), other, "{port}");
        }
    }

    /// Goal: clients that ask again and again while another one is served take no more memory.
    #[test]
    fn clients_that_wait_are_a_bounded_number() {
        let mut later = VecDeque::new();
        let run = |client: u8| Run {
            client: [client; 16],
            mode: Mode::Stream,
            tagged: false,
            verify: false,
            size: 8,
            window: 1,
        };
        (0..=255).chain(0..=9).for_each(|client| defer_client(&mut later, run(client)));
        assert_eq!(later.len(), LATER_MAX);
        let mut clients: Vec<_> = later.iter().map(|run| run.client).collect();
        clients.sort_unstable();
        clients.dedup();
        assert_eq!(clients.len(), LATER_MAX);
    }

    #[test]
    fn an_address_is_for_one_host_only() {
        for (port, is_ours) in [
            ("udp:10.0.0.1", true),
            ("fault(loss=0.1):udp:10.0.0.1:5000", true),
            ("udp:127.0.0.1", false),
            ("udp:[2001:db8::a01:107]/96:52000", true),
            ("udp:[2001:db8::]/96", false),
            ("udp:[::1]/96", false),
            ("ip(192.0.2.7/24,gw=192.0.2.1):afpacket:eth0", true),
            ("fault():ip([2001:db8::a01:107]/96):vlan(7):xdp:eth0", true),
            ("udp:eth0", false),
            ("afpacket:eth0", false),
        ] {
            assert_eq!(names_this_host(port), is_ours, "{port}");
        }
    }
}
