//! The handshake of a memif connection, sans-IO: messages of the peer in, replies out.

use std::io;
use std::os::fd::{OwnedFd, RawFd};

use super::MemifSettings;
use super::proto::{
    AddRing, Hello, Init, LOG2_RING_MAX, MODE_ETHERNET, Message, REGIONS_MAX, SECRET_LEN, VERSION,
};
use super::region::{
    ClientMemory, Conn, Layout, Region, RingSpec, TO_CLIENT, TO_SERVER, accepted, number,
};
use super::wake::check_eventfd;
use crate::backend::unix::DeferredClose;

/// Bytes that a client's regions have together at most: what offsets reach, and twice what the
/// longest rings with the longest buffers of ours take.
const REGIONS_LEN_MAX: u64 = 4 << 30;

/// What this side requires of a connection.
pub(super) struct Rules {
    /// The port's name.
    pub(super) name: String,
    id: u32,
    secret: Option<[u8; SECRET_LEN]>,
    layout: Layout,
}

impl Rules {
    pub(super) fn of(settings: &MemifSettings, layout: Layout) -> Self {
        let secret = settings.secret.as_ref().map(|secret| {
            let mut bytes = [0; SECRET_LEN];
            let len = secret.len().min(SECRET_LEN);
            bytes[..len].copy_from_slice(&secret.as_bytes()[..len]);
            bytes
        });
        Self { name: settings.name(), id: settings.id, secret, layout }
    }

    /// The server's first message.
    pub(super) fn hello(&self) -> Message {
        Message::Hello(Hello {
            version_min: VERSION,
            version_max: VERSION,
            region_max: REGIONS_MAX as u16 - 1,
            to_client_max: 0,
            to_server_max: 0,
            log2_ring_max: LOG2_RING_MAX,
        })
    }
}

/// The server's side: state received from the client so far.
#[derive(Default)]
pub(super) struct ServerHandshake {
    is_named: bool,
    regions: Vec<Region>,
    rings: [Option<RingSpec>; 2],
}

/// Outcome of a message.
pub(super) enum ServerStep {
    Reply(Message),
    /// The handshake is complete: reply with `Connected`.
    Done(Box<Conn>),
}

impl ServerHandshake {
    /// Handles a message, `None` if it was malformed; `is_free` while no client is connected.
    ///
    /// # Errors
    /// Why the client is refused, in the wording of DPDK and VPP.
    pub(super) fn handle(
        &mut self,
        message: Option<Message>,
        fd: Option<DeferredClose<OwnedFd>>,
        rules: &Rules,
        is_free: bool,
    ) -> Result<ServerStep, &'static str> {
        match message.ok_or("Invalid message")? {
            Message::Init(init) if !self.is_named => {
                check(&init, rules)?;
                if !is_free {
                    return Err("Already connected");
                }
                self.is_named = true;
            }
            Message::AddRegion { index, size } if self.is_named => {
                if usize::from(index) != self.regions.len() || self.regions.len() == REGIONS_MAX {
                    return Err("Invalid region index");
                }
                let fd = fd.ok_or("Missing region fd")?;
                let taken: u64 = self.regions.iter().map(|region| region.len() as u64).sum();
                if size > REGIONS_LEN_MAX - taken {
                    return Err("Regions of more than 4 GiB");
                }
                self.regions.push(Region::take(fd, size)?);
            }
            Message::AddRing(ring) if self.is_named => {
                let which = if ring.to_server { TO_SERVER } else { TO_CLIENT };
                if ring.index != 0 || self.rings[which].is_some() {
                    return Err("Invalid ring index");
                }
                let event = check_eventfd(fd.ok_or("Missing interrupt fd")?)?;
                let AddRing { region, offset, log2_len, .. } = ring;
                self.rings[which] = Some(RingSpec { region, offset, log2_len, event });
            }
            Message::Connect if self.is_named => {
                if !is_free {
                    return Err("Already connected");
                }
                let [Some(from), Some(to)] = std::mem::take(&mut self.rings) else {
                    return Err("Missing ring");
                };
                let conn = accepted(std::mem::take(&mut self.regions), [from, to])?;
                return Ok(ServerStep::Done(Box::new(conn)));
            }
            _ => return Err("Unexpected message"),
        }
        Ok(ServerStep::Reply(Message::Ack))
    }
}

fn check(init: &Init, rules: &Rules) -> Result<(), &'static str> {
    if init.version != VERSION {
        return Err("Incompatible memif version");
    }
    if init.id != rules.id {
        return Err("ID not found");
    }
    if init.mode != MODE_ETHERNET {
        return Err("Only ethernet mode supported");
    }
    let Some(secret) = &rules.secret else { return Ok(()) };
    if init.secret == [0; SECRET_LEN] {
        return Err("Secret required");
    }
    // All bytes, so that the time it takes tells nothing.
    let differ = secret.iter().zip(&init.secret).fold(0, |differ, (a, b)| differ | (a ^ b));
    if differ != 0 { Err("Incorrect secret") } else { Ok(()) }
}

/// A client's side: what it has said.
pub(super) struct ClientHandshake {
    step: Step,
    made: Option<ClientMemory>,
}

/// What was said last.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    Nothing,
    Init,
    Region,
    Ring(usize),
    Connect,
}

impl ClientHandshake {
    pub(super) fn new() -> Self {
        Self { step: Step::Nothing, made: None }
    }

    /// Handles a received message (`None`: a malformed one) and returns the reply; `None` after
    /// the last message.
    ///
    /// # Errors
    /// The reason of the server's refusal, or what is wrong with its message.
    pub(super) fn handle(
        &mut self,
        message: Option<Message>,
        rules: &Rules,
    ) -> Result<Option<Message>, String> {
        let message = match message.ok_or("Invalid message")? {
            Message::Disconnect(why) => return Err(why),
            message => message,
        };
        let (step, next) = match (self.step, message) {
            (Step::Nothing, Message::Hello(hello)) => (Step::Init, self.greeted(&hello, rules)?),
            (Step::Init, Message::Ack) => {
                let size = self.made.as_ref().map_or(0, |made| made.len as u64);
                (Step::Region, Message::AddRegion { index: 0, size })
            }
            (Step::Region, Message::Ack) => (Step::Ring(TO_SERVER), self.ring(TO_SERVER)),
            (Step::Ring(TO_SERVER), Message::Ack) => (Step::Ring(TO_CLIENT), self.ring(TO_CLIENT)),
            (Step::Ring(_), Message::Ack) => (Step::Connect, Message::Connect),
            (Step::Connect, Message::Connected) => return Ok(None),
            _ => return Err("Unexpected message".into()),
        };
        self.step = step;
        Ok(Some(next))
    }

    fn greeted(&mut self, hello: &Hello, rules: &Rules) -> Result<Message, String> {
        if !(hello.version_min..=hello.version_max).contains(&VERSION) {
            return Err("Incompatible memif version".into());
        }
        let log2_ring = rules.layout.log2_ring.min(hello.log2_ring_max);
        if log2_ring == 0 {
            return Err("Invalid ring size".into());
        }
        let made = ClientMemory::new(Layout { log2_ring, ..rules.layout });
        self.made = Some(made.map_err(|e| format!("no memory: {e}"))?);
        let secret = rules.secret.unwrap_or_default();
        Ok(Message::Init(Init { version: VERSION, id: rules.id, mode: MODE_ETHERNET, secret }))
    }

    fn ring(&self, which: usize) -> Message {
        let layout = self.made.as_ref().map(ClientMemory::layout);
        Message::AddRing(AddRing {
            to_server: which == TO_SERVER,
            index: 0,
            region: 0,
            offset: layout.map_or(0, |layout| layout.ring_at(which) as u32),
            log2_len: layout.map_or(0, |layout| layout.log2_ring),
            private_len: 0,
        })
    }

    /// The descriptor to send with the message that [`handle`](Self::handle) returned last.
    pub(super) fn descriptor(&self) -> Option<RawFd> {
        let made = self.made.as_ref()?;
        match self.step {
            Step::Region => Some(number(&made.fd)),
            Step::Ring(which) => Some(number(&made.events[which])),
            Step::Nothing | Step::Init | Step::Connect => None,
        }
    }

    /// Our side of the connection.
    ///
    /// # Errors
    /// What is missing for it.
    pub(super) fn connected(self) -> io::Result<Conn> {
        self.made
            .ok_or_else(|| io::ErrorKind::NotConnected.into())
            .and_then(ClientMemory::connected)
    }
}
