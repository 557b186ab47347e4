//! Shared memory through which the members of a group on one segment exchange up to [`LONG_MAX`]
//! bytes per call.
//!
//! Each member has a *slot* that it alone writes and all others read. What it *puts* there for
//! call `n` of the group stays valid until its put for call `n + LEAVES`. A long contribution lies
//! in one of two *areas*, and stays valid until the member [writes](Board::write) one for a later
//! call of the same parity. Before either the member makes sure that all others have read what it
//! overwrites: who has put something for a later call has.
//!
//! Nothing that a member writes is trusted: an unexpected call number is ignored, and bytes are
//! copied out before they are used.

use std::fmt::Debug;
use std::ops::Range;

use crate::mem::{IoBuf, Span};

/// Members of a group at most.
pub const BOARD_MEMBERS_MAX: usize = 64;

/// Calls whose contributions a slot holds.
pub const LEAVES: u32 = 8;

/// Bytes of a short contribution at most.
pub const SHORT_MAX: usize = 2032;

/// Bytes of a long contribution at most.
pub const LONG_MAX: usize = 120_832;

/// One member's view of the slots of its group. Members go by their rank, calls by their number,
/// which wraps.
///
/// Dropping it leaves the group: data that was put stays until all others have read it.
pub trait Board: Send + Debug {
    /// The name by which other members find this one's slot. Never 0.
    fn name(&self) -> u64;

    /// Attaches to the slots of all members by their `names`, in the order of ranks, for the group
    /// with the number `group`, which is not 0. Called once, before all other calls. False if a
    /// name is invalid or its member has been replaced; the board cannot be used then.
    fn attach(&mut self, group: u32, names: &[u64]) -> bool;

    /// Puts `mark` and the first `len` bytes of `body`, at most [`SHORT_MAX`], for `call`. Members
    /// that sleep are woken.
    ///
    /// # Panics
    /// If `body` is shorter than `len`, or `len` exceeds [`SHORT_MAX`].
    fn put(&mut self, call: u32, mark: u64, body: &Span, len: usize);

    /// Copies `len` bytes from an offset on of `from` to offset `at` of this member's area for
    /// `call`. Others see them once [`put`](Self::put) has followed.
    ///
    /// # Panics
    /// If `from` is shorter, or `at + len` exceeds [`LONG_MAX`].
    fn write(&mut self, call: u32, at: usize, from: (&IoBuf, usize), len: usize);

    /// The mark that `rank` has put for `call`; `None` if it has not, or has overwritten it. While
    /// the member puts `call + LEAVES`, possibly the mark of that; `call + LEAVES - 1` is then seen
    /// to be put.
    fn mark(&self, rank: u32, call: u32) -> Option<u64>;

    /// Whether `rank` has overwritten what it put for `call`, by a later call.
    fn is_past(&self, rank: u32, call: u32) -> bool;

    /// Copies `len` bytes from offset `at` of the short contribution of `rank` for `call` to an
    /// offset of `to`, which has room for them. Valid only if the member's [mark](Self::mark) was
    /// seen.
    fn read(&self, rank: u32, call: u32, at: usize, to: (&IoBuf, usize), len: usize);

    /// [`read`](Self::read) from a long contribution.
    fn read_long(&self, rank: u32, call: u32, at: usize, to: (&IoBuf, usize), len: usize);

    /// The first 8 bytes of what [`read`](Self::read) copies.
    fn first_word(&self, rank: u32, call: u32) -> u64;

    /// Returns the first of `ranks` that has not put `mark` for `call`, and whether it has put
    /// another mark; the end of `ranks` if all have. Stores the [first word](Self::first_word) of
    /// each rank before it at the rank's index in `words`.
    ///
    /// # Panics
    /// If a member or its place is missing.
    fn collect(&self, ranks: Range<u32>, call: u32, mark: u64, words: &mut [u64]) -> (u32, bool);

    /// The first of `ranks` whose data read for `call` may be another member's: the successor of a
    /// member that died or left overwrites its slot. `None` if there is none.
    fn replaced(&mut self, ranks: Range<u32>, call: u32) -> Option<u32>;

    /// Reports that this member has finished reading the calls up to `call`.
    fn done(&mut self, call: u32);
}
