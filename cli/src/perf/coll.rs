//! `barewire bench --op barrier, allreduce, ...`: N processes call collectives.
//!
//! The first process starts the others, which print their addresses to standard output and read all
//! addresses, in the order of ranks, from standard input. From then on they communicate by
//! collectives alone: the first process broadcasts the number of the next calls, and 0 ends a run.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use barewire::flags::{BindFlags, Caps, InfoFlags};
use barewire::{
    API_VERSION, AtomicOp, Av, AvAttr, AvSetAttr, Buf, CollKind, Completion, Cq, CqAttr, Datatype,
    Domain, DomainAttr, Endpoint, EpAddr, Eq, EqAttr, Error, FiAddr, Info, Mc, PostResult,
    Progress, Settings, Threading, fabric, getinfo_with,
};

use super::Common;
use super::report::{Line, Times, table};
use crate::fail::Fail;
use crate::out;

/// The name of a collective on the command line.
const fn name(what: CollKind) -> &'static str {
    match what {
        CollKind::Barrier => "barrier",
        CollKind::Broadcast => "broadcast",
        CollKind::Alltoall => "alltoall",
        CollKind::Allreduce => "allreduce",
        CollKind::Allgather => "allgather",
        CollKind::ReduceScatter => "reduce-scatter",
        CollKind::Reduce => "reduce",
        CollKind::Scatter => "scatter",
        CollKind::Gather => "gather",
    }
}

/// Word `i` of the source of `rank`.
const fn source_word(rank: usize, i: usize) -> u64 {
    (rank as u64 + 1) * 1_000_003 + i as u64
}

/// The expected word `i` of the result of `me`, if a block has `block` words and the first process
/// is the root.
fn result_word(what: CollKind, me: usize, n: usize, block: usize, i: usize) -> u64 {
    let sum = |i: usize| (0..n).map(|rank| source_word(rank, i)).sum();
    match what {
        CollKind::Barrier => 0,
        CollKind::Broadcast => source_word(0, i),
        CollKind::Alltoall => source_word(i / block, me * block + i % block),
        CollKind::Allreduce | CollKind::Reduce => sum(i),
        CollKind::Allgather | CollKind::Gather => source_word(i / block, i % block),
        CollKind::ReduceScatter => sum(me * block + i),
        CollKind::Scatter => source_word(0, me * block + i),
    }
}

/// A process of the group.
struct Member {
    ep: Endpoint,
    cq: Cq,
    eq: Eq,
    av: Av,
    _domain: Domain,
    mc: Option<Mc>,
    root: FiAddr,
    rank: usize,
    n: usize,
}

/// How long a process waits for another.
const PEER_TIMEOUT: Duration = Duration::from_secs(30);

/// Empty reads after which the processor is offered to others: the group may need it.
const SPINS: u32 = 200;

/// Warm-up calls, which are not measured.
const WARM_UP: u64 = 20;

impl Member {
    fn open(args: &Common) -> Result<Self, Fail> {
        let port = args.port.as_str();
        let mut settings = Settings::from_env().map_err(Fail::usage)?;
        args.set_keys(&mut settings)?;
        settings.port = Some(port.to_owned());
        barewire::check_port(port).map_err(Fail::new)?;
        let hints = Info {
            caps: Caps::COLLECTIVE,
            domain_attr: DomainAttr {
                name: Some(port.to_owned()),
                threading: Threading::Domain,
                data_progress: Progress::Manual,
                ..DomainAttr::default()
            },
            ..Info::default()
        };
        let none = InfoFlags::empty();
        let infos = getinfo_with(&settings, API_VERSION, None, None, none, Some(&hints));
        let info =
            infos.map_err(|why| Fail::new(format!("port {port}: {why}")))?.into_iter().next();
        let info = info.ok_or_else(|| Fail::new(format!("port {port}: no collectives on it")))?;
        let fabric = fabric(&info.fabric_attr).map_err(Fail::new)?;
        let domain = fabric.domain_with(&info, settings).map_err(Fail::new)?;
        let cq = domain.cq_open(CqAttr::default()).map_err(Fail::new)?;
        let av = domain.av_open(AvAttr::default()).map_err(Fail::new)?;
        let eq = fabric.eq_open(EqAttr::default()).map_err(Fail::new)?;
        let ep = domain.endpoint(&info).map_err(Fail::new)?;
        ep.bind_cq(&cq, BindFlags::TRANSMIT | BindFlags::RECV).map_err(Fail::new)?;
        ep.bind_av(&av).map_err(Fail::new)?;
        ep.bind_eq(&eq).map_err(Fail::new)?;
        ep.enable().map_err(Fail::new)?;
        Ok(Self { ep, cq, eq, av, _domain: domain, mc: None, root: 0, rank: 0, n: 1 })
    }

    /// Joins the group of `addrs`, of which this is number `rank`.
    fn join(&mut self, addrs: &[EpAddr], rank: usize) -> Result<(), Fail> {
        let mut at = vec![0; addrs.len()];
        self.av.insert(addrs, &mut at).map_err(Fail::new)?;
        let mut set = self.av.av_set(&AvSetAttr::default()).map_err(Fail::new)?;
        at.iter().try_for_each(|&a| set.insert(a)).map_err(Fail::new)?;
        (self.root, self.rank, self.n) = (at[0], rank, at.len());
        self.mc = Some(self.ep.join_collective(set.addr(), &set, 0, 0).map_err(Fail::new)?);
        let start = Instant::now();
        loop {
            match self.eq.read(&mut [0; 8]) {
                Ok(_) => return Ok(()),
                Err(Error::Again) if start.elapsed() < PEER_TIMEOUT => std::thread::yield_now(),
                Err(Error::Avail) => {
                    let why = self.eq.readerr().map_or(Error::Again, |e| e.err);
                    return Err(Fail::new(format!("the group was not joined: {why}")));
                }
                Err(why) => return Err(Fail::new(format!("the group was not joined: {why}"))),
            }
        }
    }

    /// Makes one call and waits for its end. Returns its buffers, the source first.
    fn call(&self, what: CollKind, source: Buf, result: Buf) -> Result<(Buf, Buf), Fail> {
        let group = self.mc.as_ref().map_or(0, Mc::addr);
        let (ep, root) = (&self.ep, self.root);
        let (ty, sum) = (Datatype::Uint64, (AtomicOp::Sum, Datatype::Uint64));
        let posted: PostResult = match what {
            CollKind::Barrier => ep.barrier(group, 1),
            CollKind::Broadcast => ep.broadcast(result, group, root, ty, None, 1),
            CollKind::Alltoall => {
                let count = source.len() / 8 / self.n;
                ep.alltoall((source, result), count, group, ty, 1)
            }
            CollKind::Allreduce => ep.allreduce((source, result), group, sum, 1),
            CollKind::Allgather => ep.allgather((source, result), group, ty, 1),
            CollKind::ReduceScatter => ep.reduce_scatter((source, result), group, sum, 1),
            CollKind::Reduce => ep.reduce((source, result), group, root, sum, 1),
            CollKind::Scatter => ep.scatter((source, result), group, root, ty, 1),
            CollKind::Gather => ep.gather((source, result), group, root, ty, 1),
        };
        posted.map_err(|refused| Fail::new(format!("{}: {}", name(what), refused.error)))?;
        let mut one = [Completion::default()];
        let (mut spins, mut since) = (0, None);
        loop {
            match self.cq.read(&mut one) {
                Ok(_) => break,
                Err(Error::Again) => {
                    spins += 1;
                    if spins % SPINS == 0 {
                        let since = *since.get_or_insert_with(Instant::now);
                        if since.elapsed() > PEER_TIMEOUT {
                            let fail = Fail::new(format!("{} does not end", name(what)));
                            return Err(fail.mend("see what it waits for: barewire stats"));
                        }
                        std::thread::yield_now();
                    }
                }
                Err(_) => {
                    let why = self.cq.readerr().map_or(Error::Again, |e| e.err);
                    let fail = Fail::new(format!("{}: {why}", name(what)));
                    return Err(fail.mend(match why {
                        Error::NoSpace => "enlarge /dev/shm: mount -o remount,size=1G /dev/shm",
                        _ => "has another process ended? its own lines say why",
                    }));
                }
            }
        }
        let bufs = std::mem::take(&mut one[0].bufs).into_many().unwrap_or_default();
        let mut bufs = bufs.into_iter();
        Ok((bufs.next().unwrap_or_default(), bufs.next().unwrap_or_default()))
    }

    /// Broadcasts a number from the first process.
    fn broadcast_number(&self, number: u64) -> Result<u64, Fail> {
        let (_, said) = self.call(CollKind::Broadcast, Buf::default(), words(1, |_| number))?;
        Ok(word(&said, 0))
    }

    /// Runs one size. `times` counts at the first process only.
    fn run(
        &self,
        what: CollKind,
        size: u64,
        args: &Common,
        times: &mut Times,
    ) -> Result<RunResult, Fail> {
        let block = size as usize / 8;
        let (n, me) = (self.n as u32, self.rank as u32);
        let is_root = self.rank == 0;
        let blocks = |blocks: u64| blocks as usize * block;
        let mut source = words(blocks(what.blocks_in(n, me, 0)), |i| source_word(self.rank, i));
        let result = blocks(what.blocks_out(n, me, 0));
        let mut result = words(result, |i| if is_root { source_word(0, i) } else { 0 });
        let mut ran = RunResult { calls: 0, wrong: 0, seconds: 0.0 };
        let (mut batch, mut warm) = (WARM_UP, true);
        let mut start = Instant::now();
        loop {
            let now = self.broadcast_number(if is_root { batch } else { 0 })?;
            if now == 0 {
                break;
            }
            for _ in 0..now {
                if args.verify && !(what == CollKind::Broadcast && is_root) {
                    result.fill(0);
                }
                let before = Instant::now();
                (source, result) = self.call(what, source, result)?;
                if !warm {
                    let ns = before.elapsed().as_nanos();
                    times.add(u64::try_from(ns).unwrap_or(u64::MAX));
                    ran.calls += 1;
                }
                if args.verify {
                    let want = |i| result_word(what, self.rank, self.n, block, i);
                    let right = (0..result.len() / 8).all(|i| word(&result, i) == want(i));
                    ran.wrong += u64::from(!right);
                }
            }
            if warm {
                (warm, start) = (false, Instant::now());
            }
            ran.seconds = start.elapsed().as_secs_f64();
            batch = match args.iterations {
                Some(n) => n.saturating_sub(ran.calls).min(1000),
                None if ran.seconds < args.seconds.as_secs_f64() => 50,
                None => 0,
            };
        }
        let wrong = words(1, |_| ran.wrong);
        let (_, all) = self.call(CollKind::Allreduce, wrong, words(1, |_| 0))?;
        ran.wrong = word(&all, 0);
        Ok(ran)
    }
}

/// The result of a run with one size.
struct RunResult {
    calls: u64,
    /// Calls with a wrong result, at all processes.
    wrong: u64,
    seconds: f64,
}

fn words(count: usize, value: impl Fn(usize) -> u64) -> Buf {
    (0..count).flat_map(|i| value(i).to_le_bytes()).collect::<Vec<u8>>().into()
}

fn word(buf: &[u8], i: usize) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&buf[8 * i..8 * i + 8]);
    u64::from_le_bytes(bytes)
}

/// The processes that the first one started; killed if it fails.
struct ChildProcesses(Vec<Child>);

impl Drop for ChildProcesses {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // Both fail if the child has ended already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Starts processes 1 to `n - 1` and returns them with their addresses.
fn spawn(n: u32, args: &[OsString]) -> Result<(ChildProcesses, Vec<EpAddr>), Fail> {
    let exe = std::env::current_exe()
        .map_err(|why| Fail::new(format!("the path of this program is not known: {why}")))?;
    let (mut children, mut addrs) = (ChildProcesses(Vec::new()), Vec::new());
    for rank in 1..n {
        let child = Command::new(&exe)
            .args(args)
            .args(["--rank", &rank.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|why| Fail::new(format!("process {rank} does not start: {why}")))?;
        children.0.push(child);
    }
    for child in &mut children.0 {
        let mut line = String::new();
        if let Some(stdout) = child.stdout.take() {
            // An error leaves the line empty, which fails to parse below.
            let _ = BufReader::new(stdout).read_line(&mut line);
        }
        let addr = line.trim().parse();
        addrs.push(addr.map_err(|_| Fail::new("another process ended before it was ready"))?);
    }
    Ok((children, addrs))
}

/// Runs the first process, which starts the others, or one of these.
///
/// # Errors
/// A process does not start or dies, or a result was wrong.
pub(super) fn run(
    args: &Common,
    what: CollKind,
    sizes: &[u64],
    rank: Option<u32>,
) -> Result<ExitCode, Fail> {
    if sizes.iter().any(|size| size % 8 != 0 || *size == 0 && what != CollKind::Barrier) {
        return Err(Fail::usage("--size: collectives are measured with words of 8 bytes"));
    }
    // A barrier has no size to choose.
    let sizes = if what == CollKind::Barrier { &[0] } else { sizes };
    let mut member = Member::open(args)?;
    let own = member.ep.getname().map_err(Fail::new)?;
    if let Some(rank) = rank {
        out::print(format_args!("{own}\n"))?;
        let mut line = String::new();
        // Empty if the first process has ended: there is no group to join then.
        std::io::stdin().read_line(&mut line).map_err(Fail::new)?;
        let addrs: Result<Vec<EpAddr>, _> = line.split_whitespace().map(str::parse).collect();
        member.join(&addrs.map_err(Fail::new)?, rank as usize)?;
        for &size in sizes {
            member.run(what, size, args, &mut Times::new())?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let n = args.spawn.unwrap_or(2);
    let (mut children, theirs) = spawn(n, &child_args(args, what, sizes))?;
    let addrs: Vec<EpAddr> = std::iter::once(own).chain(theirs).collect();
    let line: String = addrs.iter().map(|a| format!("{a} ")).collect();
    for child in &mut children.0 {
        if let Some(mut stdin) = child.stdin.take() {
            writeln!(stdin, "{line}").map_err(Fail::new)?;
        }
    }
    member.join(&addrs, 0)?;
    let lines = measure(&member, args, what, sizes)?;
    for child in &mut children.0 {
        let status = child.wait().map_err(Fail::new)?;
        if !status.success() {
            return Err(Fail::new(format!("another process failed: {status}")));
        }
    }
    if !args.json {
        out::print(format_args!("{} among {n} processes\n{}", name(what), table(&lines)))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn child_args(args: &Common, what: CollKind, sizes: &[u64]) -> Vec<OsString> {
    let sizes: Vec<String> = sizes.iter().map(u64::to_string).collect();
    let mut line: Vec<OsString> =
        ["bench", "--op", name(what), "--port", &args.port, "--size"].map(OsString::from).into();
    line.push(sizes.join(",").into());
    line.extend(args.key_args());
    // Positional arguments ask for a server; a member has none.
    line.push("--spawn".into());
    if args.verify {
        line.push("--verify".into());
    }
    line
}

fn measure(
    member: &Member,
    args: &Common,
    what: CollKind,
    sizes: &[u64],
) -> Result<Vec<Line>, Fail> {
    let mut lines = Vec::new();
    for &size in sizes {
        let mut times = Times::new();
        let ran = member.run(what, size, args, &mut times)?;
        if ran.wrong > 0 {
            return Err(Fail::new(format!("{} of {size} bytes: wrong results", name(what))));
        }
        let line = Line {
            run: name(what),
            port: args.port.clone(),
            tagged: false,
            verified: args.verify,
            size,
            window: 1,
            n: ran.calls,
            ..Line::default()
        };
        let line = line.measured(&times, ran.seconds);
        if args.json {
            out::json(&line)?;
        }
        lines.push(line);
    }
    Ok(lines)
}
