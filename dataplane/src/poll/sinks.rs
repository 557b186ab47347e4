//! Adapters between port and node: receive sinks from a port to the node, and frame sinks from the
//! node to a port of any type.

use barewire_driver::backend::any_board::AnyBoard;
use barewire_driver::backend::any_port::{AnyPort, PortVisitor};
use barewire_driver::frame::{Body, HeadBuf, RxFrame, TxFrame, WriteHead};
use barewire_driver::hint::cold;
use barewire_driver::mem::{IoBuf, SHORT};
use barewire_driver::port::{FastPort, InPlaceTx, Port, PortGone, Presence, RxSink, Station, Tx};

use crate::node::{FrameSink, InPlaceFrame, Message, NoReader, Node, Reader, send_whole};
use crate::types::Instant;
use crate::wire::{EagerMsg, FrameHead, TRAILER_LEN};

/// The receive sink: passes the frames of a burst to the node, with the time of the burst. The
/// completion of the first frame may go to a reader.
pub(super) struct ToNode<'a, R> {
    pub(super) node: &'a mut Node,
    pub(super) now: &'a Instant,
    pub(super) reader: Option<R>,
}

impl<'a> ToNode<'a, NoReader> {
    pub(super) fn of(node: &'a mut Node, now: &'a Instant) -> Self {
        Self { node, now, reader: None }
    }
}

impl<R: Reader> RxSink for ToNode<'_, R> {
    #[inline]
    fn prefetch(&mut self, frame: &RxFrame<'_>) {
        self.node.prefetch(frame);
    }

    #[inline(always)]
    fn frame(&mut self, frame: &RxFrame<'_>) {
        self.reader = None;
        self.node.on_frame(*self.now, frame);
    }

    #[inline(always)]
    fn frame_with(&mut self, frame: &RxFrame<'_>, back: impl InPlaceTx) {
        match self.reader.take() {
            Some(reader) => self.node.on_frame_read(self.now, frame, ReplySink(back), reader),
            None => self.node.on_frame_with(self.now, frame, ReplySink(back)),
        }
    }
}

/// A frame sink for responses: writes them into a frame that the port lends during receive.
struct ReplySink<T>(T);

impl<T: InPlaceTx> FrameSink for ReplySink<T> {
    #[inline(always)]
    fn is_lossless(&self) -> bool {
        T::LOSSLESS
    }

    fn send(&mut self, _: &TxFrame<'_>) -> Tx {
        Tx::Full
    }

    #[inline(always)]
    fn send_in_place<const H: usize>(&mut self, frame: &impl InPlaceFrame<H>) -> Tx {
        if send_frame_in_place(&mut self.0, frame) { Tx::Sent } else { Tx::Full }
    }
}

/// Writes the headers of a short frame.
struct InPlaceHead<'a, F>(&'a F);

impl<const H: usize, F: InPlaceFrame<H>> WriteHead<H> for InPlaceHead<'_, F> {
    #[inline(always)]
    fn fill(&self, out: &mut HeadBuf<H>) {
        self.0.put(out);
    }
}

/// Sends a short frame in place. False, and nothing sent, if the port cannot do that now.
#[inline(always)]
fn send_frame_in_place<const H: usize>(
    port: &mut impl InPlaceTx,
    frame: &impl InPlaceFrame<H>,
) -> bool {
    let (dst, head) = (frame.dst(), InPlaceHead(frame));
    match frame.part() {
        Some((buf, at, len)) => port.tx_part(dst, &head, buf, at, len),
        None => port.tx_inline(dst, &head, frame.inline_bytes()),
    }
}

/// Writes Ethernet header, base and operation header of a message.
struct MsgHead<'a, M>(&'a M);

impl<M: Message> WriteHead<{ EagerMsg::LEN }> for MsgHead<'_, M> {
    #[inline(always)]
    fn fill(&self, out: &mut HeadBuf<{ EagerMsg::LEN }>) {
        self.0.put(out);
    }
}

/// Sends a message in place. False, and nothing sent, if the port cannot do that now.
#[inline(always)]
fn send_msg_in_place(port: &mut impl FastPort, msg: &impl Message) -> bool {
    let (dst, head) = (msg.head().dst, MsgHead(msg));
    match msg.crc() {
        None => port.tx_short(dst, msg.body(), msg.imm(), &head),
        crc => port.tx_checked(dst, (msg.body(), crc), msg.imm(), &head),
    }
}

/// Sends a message to any port, as a frame built on the stack.
#[inline(always)]
fn send_msg_long(port: &mut dyn Port, msg: &impl Message) -> Result<Tx, PortGone> {
    let (head, ar, body) = (msg.head(), msg.ar(), msg.body().again());
    send_frame_of(port, (head, msg.msg(), ar), body, msg.crc())
}

#[inline(never)]
fn send_frame_of(
    port: &mut dyn Port,
    (head, msg, ar): (FrameHead, EagerMsg, bool),
    body: IoBuf,
    crc: Option<u32>,
) -> Result<Tx, PortGone> {
    let (bytes, len) = msg.emit(&head, ar);
    let body = Body::Io { buf: &body, offset: 0, len: body.len() };
    let crc = crc.map(u32::to_le_bytes);
    let tail = crc.as_ref().map_or(&[][..], |crc| crc);
    let sent = port.tx(&TxFrame { head: &bytes[..len], body, tail })?;
    if sent == Tx::Sent {
        port.flush()?;
    }
    Ok(sent)
}

/// A frame sink for a port of known type, on which sending never reports [`PortGone`]. (Holds the
/// box, so that the port's address is loaded where it is used and occupies no register.)
pub(super) struct ToFastPort<'a, P>(pub(super) &'a mut Box<P>);

impl<P: FastPort> FrameSink for ToFastPort<'_, P> {
    fn send(&mut self, frame: &TxFrame<'_>) -> Tx {
        self.0.tx(frame).unwrap_or(Tx::Full)
    }

    fn send_alone(&mut self, frame: &TxFrame<'_>) -> Tx {
        let sent = self.send(frame);
        if sent == Tx::Sent {
            // Flushing such a port does not report `PortGone`.
            let _ = self.0.flush();
        }
        sent
    }

    #[inline(always)]
    fn send_in_place<const H: usize>(&mut self, frame: &impl InPlaceFrame<H>) -> Tx {
        if send_frame_in_place(&mut **self.0, frame) {
            return Tx::Sent;
        }
        cold(());
        send_whole(self, frame)
    }

    #[inline(always)]
    fn send_msg(&mut self, msg: &impl Message) -> Tx {
        if send_msg_in_place(&mut **self.0, msg) {
            return Tx::Sent;
        }
        cold(());
        send_msg_long(&mut **self.0, msg).unwrap_or(Tx::Full)
    }
}

/// A frame sink for messages that are sent without a function call or not at all. The caller still
/// has to [finish](InPlaceTx::finish) the message.
pub(super) struct ToPortCached<'a, P>(pub(super) &'a mut Box<P>);

impl<P: FastPort> FrameSink for ToPortCached<'_, P> {
    fn send(&mut self, _: &TxFrame<'_>) -> Tx {
        Tx::Full
    }

    #[inline(always)]
    fn send_msg(&mut self, msg: &impl Message) -> Tx {
        let sent = self.0.begin_short(msg.head().dst, msg.body(), msg.imm(), &MsgHead(msg));
        if sent { Tx::Sent } else { cold(Tx::Full) }
    }
}

/// Port visitor of [`send_frame_in_place`].
struct VisitTxFrame<'a, const H: usize, F>(&'a F);

impl<const H: usize, F: InPlaceFrame<H>> PortVisitor for VisitTxFrame<'_, H, F> {
    type Done = bool;

    #[inline(always)]
    fn visit<P: FastPort>(self, port: &mut Box<P>) -> bool {
        send_frame_in_place(&mut **port, self.0)
    }
}

/// Port visitor of [`send_msg_in_place`].
struct VisitTxMsg<'a, M>(&'a M);

impl<M: Message> PortVisitor for VisitTxMsg<'_, M> {
    type Done = bool;

    #[inline(always)]
    fn visit<P: FastPort>(self, port: &mut Box<P>) -> bool {
        send_msg_in_place(&mut **port, self.0)
    }
}

/// A frame sink for any port, until the port is gone.
pub(super) struct ToPort<'a> {
    pub(super) port: &'a mut AnyPort,
    pub(super) gone: Option<PortGone>,
}

impl FrameSink for ToPort<'_> {
    fn presence(&mut self, station: Station) -> Presence {
        self.port.presence(station)
    }

    fn is_near(&mut self, station: Station) -> bool {
        self.port.is_near(station)
    }

    fn board(&mut self, members: &[Station]) -> Option<AnyBoard> {
        self.port.board(members)
    }

    #[inline(always)]
    fn send(&mut self, frame: &TxFrame<'_>) -> Tx {
        match self.port.tx(frame) {
            Ok(tx) => tx,
            Err(gone) => {
                self.gone = Some(gone);
                Tx::Full
            }
        }
    }

    fn lacks_memory(&self) -> bool {
        self.port.lacks_memory()
    }

    #[inline(always)]
    fn send_alone(&mut self, frame: &TxFrame<'_>) -> Tx {
        let sent = self.send(frame);
        if sent == Tx::Sent {
            self.flush();
        }
        sent
    }

    #[inline(always)]
    fn send_in_place<const H: usize>(&mut self, frame: &impl InPlaceFrame<H>) -> Tx {
        if self.port.with_fast(frame.dst(), VisitTxFrame(frame)) == Some(true) {
            return Tx::Sent;
        }
        send_whole(self, frame)
    }

    #[inline(always)]
    fn send_msg(&mut self, msg: &impl Message) -> Tx {
        // Checked here first: most messages on this path are longer.
        let crc = msg.crc().map_or(0, |_| TRAILER_LEN);
        let short = EagerMsg::LEN + msg.body().len() + crc <= SHORT;
        if short && self.port.with_fast(msg.head().dst, VisitTxMsg(msg)) == Some(true) {
            return Tx::Sent;
        }
        send_msg_long(&mut **self.port, msg).unwrap_or_else(|gone| {
            self.gone = Some(gone);
            Tx::Full
        })
    }
}

impl ToPort<'_> {
    /// Flushes the port.
    #[inline(always)]
    pub(super) fn flush(&mut self) {
        if self.gone.is_none() {
            self.gone = self.port.flush().err();
        }
    }
}
