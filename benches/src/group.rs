//! A collective group in one thread, each member with a domain and a port of its own on one
//! segment: measures a collective of all members together, without idle time. And a group of two
//! processes, of which each is a [`Rank`].

use std::time::{Duration, Instant};

use barewire::coll::{CollKind, FI_NOOP, FI_VOID};
use barewire::flags::{BindFlags, Caps};
use barewire::raw::{RawCollective, RawCq, RawEndpoint};
use barewire::{
    AtomicOp, Av, AvSetAttr, CqAttr, Datatype, EpAddr, Eq, EqAttr, FI_ADDR_NOTAVAIL, FabricAttr,
    FiAddr, Mc, Progress, fabric,
};
use barewire_dataplane::types::Cqe;
use barewire_driver::port::Station;

use crate::end::{BenchResult, Memory, domain};

/// One member: a source of 8 bytes and a result.
struct Member {
    ep: RawEndpoint,
    cq: RawCq,
    av: Av,
    eq: Eq,
    mc: Option<Mc>,
    group: FiAddr,
    memory: Memory,
    open: bool,
}

/// All members.
pub struct Group(Vec<Member>);

impl Group {
    /// A group of `n` members that have joined, on the segment of `spec`. With `by_messages`
    /// collectives do not use shared memory: a group without shared memory between its members
    /// cannot.
    ///
    /// # Errors
    /// The error of the port or the API.
    pub fn open(spec: &str, n: usize, by_messages: bool) -> BenchResult<Self> {
        let members: BenchResult<Vec<Member>> = (0..n).map(|_| Member::open(spec)).collect();
        let mut group = Self(members?);
        let said = |e: barewire::Error| format!("joining: {e}");
        let addrs: Result<Vec<EpAddr>, _> = group.0.iter().map(|m| m.ep.getname()).collect();
        let addrs = addrs.map_err(said)?;
        group.0.iter_mut().try_for_each(|m| m.join(&addrs, by_messages).map_err(said))?;
        for _ in 0..1_000_000 {
            // Reading an empty event queue turns the progress engine.
            let all = group.0.iter().filter(|m| m.eq.read(&mut [0; 8]).is_ok()).count();
            group.0.iter_mut().for_each(|m| m.poll());
            if all > 0 && group.0.iter().all(|m| m.mc.as_ref().is_some_and(|mc| mc.check().is_ok()))
            {
                return Ok(group);
            }
        }
        Err("the join does not end".to_owned())
    }

    /// Runs `count` collectives one after the other: allreduces of 8 bytes, or barriers.
    ///
    /// # Errors
    /// A call was refused or does not complete.
    #[inline(never)]
    pub fn call(&mut self, kind: CollKind, count: u64) -> BenchResult<()> {
        for _ in 0..count {
            self.0.iter_mut().try_for_each(|m| m.post(kind))?;
            let mut left = self.0.len();
            for _ in 0..1_000_000 {
                for m in self.0.iter_mut().filter(|m| m.open) {
                    m.poll();
                    left -= usize::from(!m.open);
                }
                if left == 0 {
                    break;
                }
            }
            if left > 0 {
                return Err("a collective does not end".to_owned());
            }
        }
        Ok(())
    }
}

/// A member of a group of two processes.
pub struct Rank(Member);

impl Rank {
    /// Member `me`, 0 or 1, of a group on the segment of `spec`. `exchange_station` exchanges those
    /// of the two.
    ///
    /// # Errors
    /// The error of the port or the API; the other process has not joined after ten seconds.
    pub fn join(
        spec: &str,
        me: usize,
        exchange_station: impl FnOnce(Station) -> Station,
    ) -> BenchResult<Self> {
        let said = |e: barewire::Error| format!("joining: {e}");
        let mut member = Member::open(spec)?;
        let own = member.ep.getname().map_err(said)?;
        let other = EpAddr { station: exchange_station(own.station), incarnation: 0, ..own };
        let addrs = if me == 0 { [own, other] } else { [other, own] };
        member.join(&addrs, false).map_err(said)?;
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(10) {
            if member.eq.read(&mut [0; 8]).is_ok() {
                return Ok(Self(member));
            }
            member.poll();
        }
        Err("the join does not end".to_owned())
    }

    /// Runs `count` collectives one after the other: allreduces of 8 bytes, or barriers.
    ///
    /// # Errors
    /// A call was refused.
    #[inline(never)]
    pub fn call(&mut self, kind: CollKind, count: u64) -> BenchResult<()> {
        for _ in 0..count {
            self.0.post(kind)?;
            while self.0.open {
                self.0.poll();
            }
        }
        Ok(())
    }

    /// Turns the progress engine.
    pub fn poll(&mut self) {
        self.0.poll();
    }
}

impl Member {
    fn open(spec: &str) -> BenchResult<Self> {
        let said = |e: barewire::Error| format!("{spec}: {e}");
        let (domain, info, av) = domain(spec, Caps::COLLECTIVE, Progress::Manual, None, None)?;
        let cq = domain.raw_cq_open(CqAttr::default()).map_err(said)?;
        let ep = domain.raw_endpoint(&info).map_err(said)?;
        let fabric = fabric(&FabricAttr::default()).map_err(said)?;
        let eq = fabric.eq_open(EqAttr::default()).map_err(said)?;
        ep.bind_cq(&cq, BindFlags::TRANSMIT | BindFlags::RECV).map_err(said)?;
        ep.bind_av(&av).map_err(said)?;
        ep.bind_eq(&eq).map_err(said)?;
        ep.enable().map_err(said)?;
        let (mc, group, memory, open) = (None, 0, Memory::new(64), false);
        Ok(Self { ep, cq, av, eq, mc, group, memory, open })
    }

    fn join(&mut self, addrs: &[EpAddr], by_messages: bool) -> barewire::Result<()> {
        let mut at = vec![0; addrs.len()];
        self.av.insert(addrs, &mut at)?;
        let mut set = self.av.av_set(&AvSetAttr::default())?;
        at.iter().try_for_each(|&a| set.insert(a))?;
        let group = if by_messages { FI_ADDR_NOTAVAIL } else { set.addr() };
        let mc = self.ep.join_collective(group, &set, 0, 0)?;
        (self.group, self.mc) = (mc.addr(), Some(mc));
        Ok(())
    }

    #[inline]
    fn post(&mut self, kind: CollKind) -> BenchResult<()> {
        let (datatype, op) = match kind {
            CollKind::Barrier => (FI_VOID, FI_NOOP),
            _ => (Datatype::Uint64 as u32, AtomicOp::Sum as u32),
        };
        let call = RawCollective {
            kind,
            buf: self.memory.at(0, 8),
            result: self.memory.at(32, 8),
            count: 1,
            datatype,
            op,
            coll_addr: self.group,
            root_addr: 0,
            flags: 0,
            context: 0,
        };
        // SAFETY: the memory stays mapped and has no other user.
        let posted = unsafe { self.ep.collective(call) };
        self.open = true;
        posted.map_err(|e| format!("{kind:?}: {e}"))
    }

    #[inline]
    fn poll(&mut self) {
        if self.cq.read(&mut [Cqe::default()]).is_ok() {
            self.open = false;
        }
    }
}
