//! The other side as somebody who says and writes anything: for the fuzz target `memif`, and joined
//! ends without sockets for tests.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering::Relaxed;

use super::MemifSettings;
use super::handshake::{ClientHandshake, Rules, ServerHandshake, ServerStep};
use super::proto::{AddRing, Init, MESSAGE_LEN, Message, SECRET_LEN, VERSION};
use super::region::{ClientMemory, Conn, Layout, TO_CLIENT, TO_SERVER};
use super::ring::{Broken, Pushed, Receiver, RxItem, Sender};
use crate::backend::unix::DeferredClose;
use crate::frame::{RxFrame, TxFrame};

/// Longest frame here.
const FRAME_MAX: usize = 2000;

pub(super) const LAYOUT: Layout = Layout { log2_ring: 4, bsize: 512 };

pub(super) fn rules() -> Rules {
    Rules::of(&MemifSettings::at("@wild"), LAYOUT)
}

pub(super) fn init() -> Message {
    Message::Init(Init { version: VERSION, id: 0, mode: 0, secret: [0; SECRET_LEN] })
}

pub(super) fn ring(to_server: bool, region: u16, offset: u32, log2_len: u8) -> Message {
    Message::AddRing(AddRing { to_server, index: 0, region, offset, log2_len, private_len: 0 })
}

/// What a client says before the last, each with its descriptor.
fn client_messages(made: &ClientMemory) -> [(Message, Option<&OwnedFd>); 4] {
    let place = |which| ring(which == TO_SERVER, 0, LAYOUT.ring_at(which) as u32, LAYOUT.log2_ring);
    let region = Message::AddRegion { index: 0, size: made.len as u64 };
    [
        (init(), None),
        (region, Some(&made.fd)),
        (place(TO_SERVER), Some(&made.events[TO_SERVER])),
        (place(TO_CLIENT), Some(&made.events[TO_CLIENT])),
    ]
}

/// Both sides of a connection, the server's first. None if there is no memory.
pub(super) fn joined() -> Option<[Conn; 2]> {
    let made = ClientMemory::new(LAYOUT).ok()?;
    let mut handshake = ServerHandshake::default();
    for (message, fd) in client_messages(&made) {
        let fd = fd.map(|fd| fd.as_fd().try_clone_to_owned()).transpose().ok()?;
        handshake.handle(Some(message), fd.map(DeferredClose::new), &rules(), true).ok()?;
    }
    match handshake.handle(Some(Message::Connect), None, &rules(), true).ok()? {
        ServerStep::Done(at_server) => Some([*at_server, made.connected().ok()?]),
        ServerStep::Reply(_) => None,
    }
}

/// Has both sides hear what `data` says, and read and write rings that it scribbles on.
#[doc(hidden)]
pub fn wild_peer(data: &[u8]) {
    match data.split_first() {
        Some((&kind, data)) if kind % 4 == 0 => messages(data),
        Some((&kind, data)) => {
            if let Some(conns) = joined() {
                let _ = scribbled(&conns[usize::from(kind) % 2], data);
            }
        }
        None => {}
    }
}

/// Messages in pieces of 129 bytes, of which the first selects the descriptor, and which
/// right message takes the place of the other bytes, if one does.
fn messages(data: &[u8]) {
    let Ok(made) = ClientMemory::new(LAYOUT) else { return };
    let (mut server, mut client) = (ServerHandshake::default(), ClientHandshake::new());
    let rules = rules();
    for piece in data.chunks(1 + MESSAGE_LEN).take(16) {
        let mut bytes = [0; MESSAGE_LEN];
        bytes[..piece.len() - 1].copy_from_slice(&piece[1..]);
        let fds = [None, Some(&made.fd), Some(&made.events[0]), Some(&made.events[1])];
        let (mut message, mut fd) = (Message::parse(&bytes), fds[usize::from(piece[0]) % 4]);
        match piece[0] / 4 {
            0..4 => {
                let right = client_messages(&made).into_iter().nth(usize::from(piece[0] / 4));
                (message, fd) = right.map_or((None, None), |(message, fd)| (Some(message), fd));
            }
            4 => message = Some(Message::Connect),
            _ => {}
        }
        let fd = fd.and_then(|fd| fd.try_clone().ok()).map(DeferredClose::new);
        // Both sides disconnect after a message that they refuse.
        let _ = client.handle(message.clone(), &rules);
        if server.handle(message, fd, &rules, true).is_err() {
            return;
        }
    }
}

/// Frames through a ring of which ten bytes at a time overwrite a word.
fn scribbled(conn: &Conn, data: &[u8]) -> Result<(), Broken> {
    let (mut tx, mut rx) = (Sender::new(&conn.tx), Receiver::new(&conn.rx));
    let mut whole = vec![0; FRAME_MAX];
    let frame = [7; FRAME_MAX];
    for piece in data.chunks_exact(10).take(200) {
        let value = piece[2..].iter().fold(0_u64, |value, byte| value << 8 | u64::from(*byte));
        let ring = if piece[0] & 1 == 0 { conn.rx.ring } else { conn.tx.ring };
        match piece[0] / 2 % 8 {
            0 => ring.head().store(value as u16, Relaxed),
            1 => ring.tail().store(value as u16, Relaxed),
            // As one does who keeps to the rules.
            2 => drop(ring.head().fetch_add(u16::from(piece[1] % 4), Relaxed)),
            3 => drop(ring.tail().fetch_add(u16::from(piece[1] % 4), Relaxed)),
            word => ring.words(piece[1].into())[usize::from(word) % 2].store(value, Relaxed),
        }
        let len = 14 + value as usize % (FRAME_MAX - 14);
        let frame = TxFrame::whole(&frame[..len]);
        if tx.push(conn, &frame, len, 0, &mut whole)? == Pushed::Sent {
            tx.publish();
        }
        tx.prefetch_buffer(conn)?;
        for left in (1..=rx.pending()?).rev() {
            rx.prefetch_next();
            match rx.take(conn, FRAME_MAX) {
                RxItem::Frame(base, len) => {
                    let mut copy = [0; FRAME_MAX];
                    // SAFETY: `len` bytes at `base` are mapped as long as `conn` is there (`take`).
                    let lent = unsafe { RxFrame::from_raw(base, len as usize) };
                    assert!(lent.copy_to(0, &mut copy[..len as usize]), "longer than it says");
                }
                RxItem::Bad => {}
                RxItem::Chain => {
                    let joined = rx.copy_chain(conn, left, &mut whole);
                    assert!(joined.is_none_or(|len| len <= FRAME_MAX));
                    break;
                }
            }
        }
        rx.release();
    }
    Ok(())
}
