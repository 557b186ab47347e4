//! The client of a measurement: requests runs, sends first, measures and prints.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use barewire::Settings;
use barewire::names::{AddrRole, Names, QueryPort};
use barewire::{Buf, EpAddr, FiAddr};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::control::{Control, Mode, Run};
use super::link::{CLIENT_TIMEOUT, Event, Link};
use super::remote::Target;
use super::report::{Line, Times, table};
use super::spawn::Spawned;
use super::{Common, Until, pattern};
use crate::fail::Fail;
use crate::out;

/// Most memory for the buffers of one side, bytes: beyond it fewer buffers are used.
const BUFFER_BYTES: u64 = 256 << 20;

/// Bytes, messages and longest time of the warm-up of a run: caches, the session, memory of the
/// segment.
const WARM_BYTES: u64 = 16 << 20;
const WARM_COUNT: u64 = 1000;
const WARM_TIME: Duration = Duration::from_millis(500);

/// The address form that works on every port.
const PRINTED: &str = "give the address that the other side printed, barewire://MAC/NUMBER";

/// Measures every size and prints.
///
/// # Errors
/// The server cannot be reached or failed, or a byte was wrong.
pub(super) fn run(args: &Common, mode: Mode, window: u32, sizes: &[u64]) -> Result<ExitCode, Fail> {
    let given = args.addr.as_deref().map(|text| whom(text, &args.port)).transpose();
    let given = given.map_err(|fail| fail.or_of_port(&args.port))?;
    let mut link = Link::open(args, CLIENT_TIMEOUT)?;
    let spawned = if args.spawn.is_some() { Some(Spawned::start(args)?) } else { None };
    let addr = match (given, &spawned) {
        (Some(addr), _) => addr,
        (None, Some(server)) => parse_addr(&server.addr)?,
        (None, None) => return Err(Fail::usage("no address of the other side")),
    };
    let peer = link.add_peer(addr)?;
    let me = link.addr()?.to_bytes();
    let bar = bar(args, sizes);
    let mut lines = Vec::new();
    for &size in sizes {
        let room = u32::try_from(BUFFER_BYTES / size.max(1)).unwrap_or(u32::MAX);
        let window = window.min(room).max(1);
        let run = Run { client: me, mode, tagged: args.tagged, verify: args.verify, size, window };
        let mut client = Client { link: &mut link, peer, run, bar: &bar };
        let warm = WARM_COUNT.min(WARM_BYTES / size.max(1)).max(2);
        client.measure(Until { count: warm, time: WARM_TIME })?;
        let line = client.measure(args.until())?;
        bar.inc(1);
        if args.json {
            out::json(&line)?;
        }
        lines.push(line);
    }
    link.send_final(peer, Control::Bye)?;
    if let Some(server) = spawned {
        server.finish()?;
    }
    bar.finish_and_clear();
    if !args.json {
        out::print(header(&link, args, mode))?;
        out::print(table(&lines))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Resolves the server: an address, or HOST or HOST:SERVICE on a port with such names.
fn whom(text: &str, port: &str) -> Result<EpAddr, Fail> {
    let names = Names::of(port);
    if names == Names::Labels {
        let hosts = "hosts are known on ports that leave the machine: --port udp:eth0";
        return parse_addr(text).map_err(|fail| fail.mend(format!("{PRINTED}; {hosts}")));
    }
    if text.contains("://") {
        return parse_addr(text);
    }
    let settings = Settings::from_env().map_err(Fail::usage)?;
    let (host, service) = host_and_service(text);
    match names.find(Some(host), service, AddrRole::Peer, false, &QueryPort::new(port, &settings)) {
        Ok(Some(addr)) => Ok(addr),
        Ok(None) => parse_addr(text),
        Err(why) => Err(Fail::new(why)),
    }
}

/// `HOST`, `HOST:SERVICE`, an IPv6 address or `[IPv6]:SERVICE`.
pub(crate) fn host_and_service(text: &str) -> (&str, Option<&str>) {
    if let Some((host, rest)) = text.strip_prefix('[').and_then(|text| text.split_once(']')) {
        return (host, rest.strip_prefix(':'));
    }
    match text.rsplit_once(':') {
        Some((host, service)) if !host.contains(':') => (host, Some(service)),
        _ => (text, None),
    }
}

fn parse_addr(text: &str) -> Result<EpAddr, Fail> {
    text.parse().map_err(|_| Fail::usage(format!("\"{text}\" is no address")).mend(PRINTED))
}

/// A progress bar on a terminal.
fn bar(args: &Common, sizes: &[u64]) -> ProgressBar {
    if args.json {
        return ProgressBar::hidden();
    }
    let target = ProgressDrawTarget::stderr();
    let bar = ProgressBar::with_draw_target(Some(sizes.len() as u64), target);
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} sizes  {msg}");
    bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

fn header(link: &Link, args: &Common, mode: Mode) -> String {
    let kind = if args.tagged { "tagged messages" } else { mode.names().1 };
    let what = match mode {
        Mode::PingPong => "half round trip",
        Mode::Stream => "one way; times are from posting to completion",
        _ => "on memory of the other side; times are from posting to completion",
    };
    format!("{kind} over {}, {what}\n", link.port())
}

struct Client<'a> {
    link: &'a mut Link,
    peer: FiAddr,
    run: Run,
    bar: &'a ProgressBar,
}

impl Client<'_> {
    /// One run, from Start to Done.
    fn measure(&mut self, until: Until) -> Result<Line, Fail> {
        let size = crate::table::bytes(self.run.size);
        self.bar.set_message(size);
        self.link.begin();
        self.link.send_control(self.peer, Control::Start(self.run))?;
        let Control::Ready { key } = self.wait_for(|said| matches!(said, Control::Ready { .. }))?
        else {
            return Err(Fail::new("the other side is not ready"));
        };
        let mut times = Times::new();
        let (sent, seconds) = match self.run.mode {
            Mode::PingPong => self.ping_pong(until, &mut times)?,
            mode => {
                let target = Target::new(self.run, self.peer, key);
                let mut target = mode.is_one_sided().then_some(target);
                let measured = self.stream(until, &mut times, &mut target)?;
                self.compare(target, measured.0)?;
                measured
            }
        };
        let line = Line {
            run: self.run.mode.names().0,
            port: self.link.port().to_owned(),
            tagged: self.run.tagged,
            verified: self.run.verify,
            size: self.run.size,
            window: self.run.window,
            n: sent,
            seconds: 0.0,
            min_ns: 0,
            p50_ns: 0,
            p99_ns: 0,
            p999_ns: 0,
            max_ns: 0,
            rate: 0.0,
            goodput: 0.0,
        };
        Ok(line.measured(&times, seconds))
    }

    /// Sends one message at a time and waits for its echo. Returns their number and the total
    /// one-way time.
    fn ping_pong(&mut self, until: Until, times: &mut Times) -> Result<(u64, f64), Fail> {
        let Run { size, tagged, verify, .. } = self.run;
        let len = usize::try_from(size).map_err(Fail::new)?;
        let inject = len <= self.link.inject_size();
        let mut out_buf = Some(Buf::zeroed(len));
        let mut in_buf = Some(Buf::zeroed(len));
        let mut sent = 0;
        let mut total = Duration::ZERO;
        let started = Instant::now();
        while !over(until, sent, started) {
            let mut message = out_buf.take().unwrap_or_default();
            if verify {
                pattern::fill(sent, &mut message);
            }
            self.link.recv(in_buf.take().unwrap_or_default(), tagged, 0)?;
            let posted = Instant::now();
            if inject {
                self.link.inject(&message, self.peer, tagged)?;
                out_buf = Some(message);
            } else {
                self.link.send(message, self.peer, tagged, 1)?;
            }
            let mut took = None;
            while took.is_none() || out_buf.is_none() {
                match self.link.next()? {
                    Event::Received { buf, len: got, .. } => {
                        took = Some(posted.elapsed());
                        if verify && !(got == len && pattern::holds(sent, &buf)) {
                            return Err(wrong(1, sent + 1));
                        }
                        in_buf = Some(buf);
                    }
                    Event::Sent { buf, .. } => out_buf = Some(buf),
                    Event::Failed(why) | Event::InjectFailed(why) => return Err(why),
                    Event::Control(_) => {}
                }
            }
            let took = took.unwrap_or_default();
            times.add((took.as_nanos() / 2) as u64);
            total += took;
            sent += 1;
        }
        self.stop(sent)?;
        Ok((sent, total.as_secs_f64() / 2.0))
    }

    /// Keeps the window full of messages, or of operations on `target`. Returns their number and
    /// the time until the server had them all.
    fn stream(
        &mut self,
        until: Until,
        times: &mut Times,
        target: &mut Option<Target>,
    ) -> Result<(u64, f64), Fail> {
        let Run { size, tagged, verify, window, .. } = self.run;
        let len = usize::try_from(size).map_err(Fail::new)?;
        let mut free: Vec<(usize, Buf)> =
            (0..window as usize).map(|slot| (slot, Buf::zeroed(len))).collect();
        let started = Instant::now();
        let mut posted = vec![started; window as usize];
        let mut sent = 0;
        while !over(until, sent, started) || free.len() < window as usize {
            let mut room = true;
            let mut now = Instant::now();
            while room && !over_at(now, until, sent, started) {
                let Some((slot, mut buf)) = free.pop() else { break };
                posted[slot] = now;
                let refused = match target {
                    Some(target) => self
                        .link
                        .try_post(slot, |ep, context| target.post(ep, buf, slot, sent, context))?,
                    None => {
                        if verify {
                            pattern::fill(sent, &mut buf);
                        }
                        self.link.try_send(buf, self.peer, tagged, slot)?
                    }
                };
                match refused {
                    None => sent += 1,
                    Some(buf) => {
                        free.push((slot, buf));
                        room = false;
                    }
                }
                now = Instant::now();
            }
            let mut event = Some(self.link.next()?);
            let now = Instant::now();
            while let Some(happened) = event {
                match happened {
                    Event::Sent { slot, buf } => {
                        times.add(now.saturating_duration_since(posted[slot]).as_nanos() as u64);
                        if let Some(target) = target {
                            target.ended(slot, &buf);
                        }
                        free.push((slot, buf));
                    }
                    Event::Failed(why) | Event::InjectFailed(why) => return Err(why),
                    Event::Control(_) | Event::Received { .. } => {}
                }
                event = self.link.poll()?;
            }
        }
        if target.is_none() {
            self.stop(sent)?;
        }
        Ok((sent, started.elapsed().as_secs_f64()))
    }

    /// Reads back the last write to each slot, with `--verify`, and ends the run.
    fn compare(&mut self, target: Option<Target>, sent: u64) -> Result<(), Fail> {
        let Some(mut target) = target else { return Ok(()) };
        let len = usize::try_from(self.run.size).map_err(Fail::new)?;
        for (slot, number) in target.to_compare() {
            let buf = Buf::zeroed(len);
            let read = |ep: &_, context| target.read_back(ep, buf, slot, context);
            if self.link.try_post(slot, read)?.is_some() {
                return Err(Fail::new("no room for one operation"));
            }
            loop {
                match self.link.next()? {
                    Event::Sent { buf, .. } => {
                        target.wrong += u64::from(!pattern::holds(number, &buf));
                        break;
                    }
                    Event::Failed(why) | Event::InjectFailed(why) => return Err(why),
                    Event::Control(_) | Event::Received { .. } => {}
                }
            }
        }
        self.stop(sent)?;
        if target.wrong > 0 { Err(wrong(target.wrong, sent)) } else { Ok(()) }
    }

    /// Ends the run and receives the server's result.
    fn stop(&mut self, sent: u64) -> Result<(), Fail> {
        self.link.send_control(self.peer, Control::Stop { sent })?;
        let said = self.wait_for(|said| matches!(said, Control::Done { .. }))?;
        match said {
            Control::Done { received, .. } if received != sent => {
                Err(Fail::new(format!("{sent} messages were sent and {received} arrived")))
            }
            Control::Done { wrong: count, .. } if count > 0 => Err(wrong(count, sent)),
            _ => Ok(()),
        }
    }

    fn wait_for(&mut self, wanted: impl Fn(Control) -> bool) -> Result<Control, Fail> {
        loop {
            match self.link.next()? {
                Event::Control(said) if wanted(said) => return Ok(said),
                Event::Control(said) if said.is_of_client() => self.link.drop_control(&said.odd()),
                Event::Control(said) => {
                    return Err(Fail::new(format!("the other side said {said:?} out of turn")));
                }
                Event::Failed(why) | Event::InjectFailed(why) => return Err(why),
                Event::Sent { .. } | Event::Received { .. } => {}
            }
        }
    }
}

fn wrong(count: u64, sent: u64) -> Fail {
    Fail::new(format!("{count} of {sent} messages or answers arrived with wrong bytes"))
        .mend("please report it, with the command line")
}

/// Whether a run has reached its count or its time.
fn over(until: Until, sent: u64, started: Instant) -> bool {
    over_at(Instant::now(), until, sent, started)
}

fn over_at(now: Instant, until: Until, sent: u64, started: Instant) -> bool {
    let is_late = || now.saturating_duration_since(started) >= until.time;
    sent >= until.count || (sent > 0 && is_late())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_and_its_service_are_told_apart() {
        for (text, host, service) in [
            ("node7", "node7", None),
            ("node7:9", "node7", Some("9")),
            ("10.1.1.1:52000", "10.1.1.1", Some("52000")),
            ("2001:db8::1", "2001:db8::1", None),
            ("[2001:db8::1]", "2001:db8::1", None),
            ("[2001:db8::1]:9", "2001:db8::1", Some("9")),
        ] {
            assert_eq!(host_and_service(text), (host, service), "{text}");
        }
    }
}
