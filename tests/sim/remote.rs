//! What the ledger knows of memory that peers reach: regions, what reads, writes and atomics did to
//! them, and what their bytes must therefore be.
//!
//! A region begins with words that only ever grow by one, by an addition or by a swap of `n` for
//! `n + 1`. So the old values that come back are places in one order: no two are alike, none is
//! older than what was known when the operation was posted, and at the end the word is the number
//! of operations that were executed. Behind the words lie slots, each written by one operation at a
//! time. Their content is known but while somebody writes, and unknown for ever once a write of
//! unknown outcome has named them. The memory is the ledger's, and stays when its process is gone.

use std::collections::HashSet;

use barewire_dataplane::error::Error;
use barewire_dataplane::flags::MrAccess;
use barewire_driver::mem::IoBuf;

use crate::arena::{Arena, Buf, write_content};
use crate::ledger::{Addr, Checked, Violation, ensure};
use crate::rng::Rng;

/// Words at the beginning of a region: as many as one atomic call may name.
pub(crate) const WORDS: usize = 512;

/// Bytes of the words.
const SLOTS_AT: usize = WORDS * 8;

/// What an operation does.
#[derive(Clone, Debug)]
pub(crate) enum Act {
    /// Writes the content of the operation's number to parts of slots, in order.
    Write(Vec<Part>),
    /// Reads parts of slots, in order.
    Read(Vec<Part>),
    /// Adds one to words and brings nothing back.
    Add(Words),
    /// Adds one, brings the old values back.
    FetchAdd(Words),
    /// Swaps each word for its successor if it is what was guessed.
    Cswap(Words, Vec<u64>),
    /// Brings the values back.
    Fetch(Words),
    /// Must be refused by the target, with this error.
    Bad(Error),
}

/// A part of a slot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    pub(crate) slot: usize,
    pub(crate) at: usize,
    pub(crate) len: usize,
}

/// Some words, and the least values that they were known to have when the call was made.
#[derive(Clone, Debug)]
pub(crate) struct Words {
    pub(crate) first: usize,
    floors: Vec<u64>,
}

impl Words {
    pub(crate) fn len(&self) -> usize {
        self.floors.len()
    }
}

/// An operation on a region.
#[derive(Clone, Debug)]
pub(crate) struct Remote {
    pub(crate) src_host: usize,
    /// The life that made the call, and the place of that among the calls of the world.
    pub(crate) src: u32,
    pub(crate) seq: u64,
    pub(crate) dst: Addr,
    pub(crate) region: usize,
    pub(crate) act: Act,
    pub(crate) fence: bool,
    /// Carries its number as remote CQ data.
    pub(crate) imm: bool,
    /// No success completion will come.
    pub(crate) silent: bool,
    /// The target has told its application of the data.
    pub(crate) told: bool,
    end: End,
}

impl std::fmt::Display for Remote {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let what = match &self.act {
            Act::Write(parts) => format!("write {parts:?}"),
            Act::Read(parts) => format!("read {parts:?}"),
            Act::Add(w) => format!("add to {w}"),
            Act::FetchAdd(w) => format!("fetch-add to {w}"),
            Act::Cswap(w, guess) => format!("compare-swap of {w}, guess {:?}", guess[0]),
            Act::Fetch(w) => format!("fetch of {w}"),
            Act::Bad(err) => format!("what must fail with {err}"),
        };
        let Self { src_host, dst, region, .. } = self;
        write!(f, "{what} in region {region} by host {src_host} to {dst:?}, {:?}", self.end)
    }
}

impl std::fmt::Display for Words {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} words from {}, {:?} at first", self.len(), self.first, self.floors[0])
    }
}

/// What is known of the outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Pending,
    Ok,
    NotExecuted,
    Unknown,
}

impl Remote {
    pub(crate) fn new(src_host: usize, dst: Addr, region: usize, act: Act) -> Self {
        let (fence, imm, silent, told) = (false, false, false, false);
        let (src, seq, end) = (0, 0, End::Pending);
        Self { src_host, src, seq, dst, region, act, fence, imm, silent, told, end }
    }

    /// Whether its success is a read's: it brings bytes back.
    pub(crate) fn reads(&self) -> bool {
        matches!(self.act, Act::Read(_) | Act::FetchAdd(_) | Act::Cswap(..) | Act::Fetch(_))
    }

    /// Whether success has been told, or is certain and will not be.
    pub(crate) fn is_ok(&self) -> bool {
        self.end == End::Ok
    }
}

/// One word.
#[derive(Clone, Debug, Default)]
struct Word {
    /// Values that operations found and replaced.
    olds: HashSet<u64>,
    /// Additions that were executed and brought nothing back.
    blind: u64,
    /// Operations that may have changed it.
    unknown: u64,
    /// The least that it can be now.
    floor: u64,
}

/// What one slot is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    /// By so many readers.
    Known(u32),
    Written(usize),
    Unknown,
}

struct Slot {
    at: usize,
    len: usize,
    used: Use,
}

/// Memory that one life offers to its peers.
pub(crate) struct Region {
    pub(crate) life: u32,
    arena: Arena,
    buf: Buf,
    pub(crate) key: u64,
    /// Remote address of its first byte.
    pub(crate) base: u64,
    pub(crate) access: MrAccess,
    /// What it held when it was closed.
    frozen: Option<Vec<u8>>,
    words: Vec<Word>,
    slots: Vec<Slot>,
    /// What it holds, where that is known.
    shadow: Vec<u8>,
}

impl Region {
    fn new(life: u32, len_max: usize, access: MrAccess) -> Result<Self, Violation> {
        let mut slots = Vec::new();
        let mut at = SLOTS_AT;
        for len in [64, 64, 64, 64, 2048, 2048, 2048, 16 << 10, len_max.min(64 << 10)] {
            slots.push(Slot { at, len, used: Use::Known(0) });
            at += len;
        }
        let mut arena = Arena::default();
        let buf = arena.take(at)?;
        arena.fill(buf, 0, 0);
        let (key, base, frozen) = (0, 0, None);
        let words = vec![Word::default(); WORDS];
        Ok(Self { life, arena, buf, key, base, access, frozen, words, slots, shadow: vec![0; at] })
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.frozen.is_some()
    }

    pub(crate) fn len(&self) -> usize {
        self.buf.len
    }

    fn bytes(&self) -> &[u8] {
        self.arena.bytes(self.buf)
    }

    fn word(&self, i: usize) -> u64 {
        let at = &self.bytes()[i * 8..][..8];
        u64::from_le_bytes([at[0], at[1], at[2], at[3], at[4], at[5], at[6], at[7]])
    }

    /// Remote address of a part.
    pub(crate) fn addr(&self, part: &Part) -> u64 {
        self.base + (self.slots[part.slot].at + part.at) as u64
    }

    /// Chooses parts of slots that a read may compare, or that a write may have; at most
    /// `len_max` bytes.
    pub(crate) fn choose(&self, write: bool, len_max: usize, rng: &mut Rng) -> Vec<Part> {
        let mut parts: Vec<Part> = Vec::new();
        let mut left = len_max;
        for _ in 0..rng.pick(&[1, 1, 1, 2, 3, 8]) {
            let slot = rng.index(self.slots.len());
            let s = &self.slots[slot];
            let free = match s.used {
                Use::Known(0) => true,
                Use::Known(_) => !write,
                Use::Written(_) | Use::Unknown => false,
            };
            if !free || write && parts.iter().any(|p| p.slot == slot) {
                continue;
            }
            let at = rng.index(s.len);
            let whole = rng.chance(0.3);
            let most = (s.len - at).min(left);
            let len = if whole { most } else { rng.range(0, most as u64) as usize };
            left -= len;
            parts.push(Part { slot, at, len });
        }
        parts
    }

    /// Some words, most often the first; only one as often as `one` of all times.
    pub(crate) fn some_words(&self, one: f64, rng: &mut Rng) -> Words {
        let n = if rng.chance(one) { 1 } else { rng.pick(&[2, 8, 17, 100, WORDS]) };
        let spread = if rng.chance(0.7) { 4 } else { WORDS };
        let first = rng.index(spread.min(WORDS + 1 - n));
        self.words_at(first, n)
    }

    pub(crate) fn words_at(&self, first: usize, n: usize) -> Words {
        Words { first, floors: self.words[first..first + n].iter().map(|w| w.floor).collect() }
    }

    /// Values that are likely to be right, as somebody who saw all answers so far would guess.
    pub(crate) fn guess(&self, words: &Words, rng: &mut Rng) -> Vec<u64> {
        let wrong = rng.chance(0.2);
        words.floors.iter().map(|&f| f + u64::from(wrong && rng.chance(0.5))).collect()
    }

    fn bytes_of(&self, part: &Part) -> std::ops::Range<usize> {
        let at = self.slots[part.slot].at + part.at;
        at..at + part.len
    }

    /// An operation found `old` in word `i` and replaced it.
    fn took(&mut self, i: usize, old: u64, floor: u64) -> Checked {
        let now = self.word(i);
        let word = &mut self.words[i];
        ensure!(word.olds.insert(old), "two operations replaced {old} in word {i}");
        word.floor = word.floor.max(old + 1);
        ensure!(old >= floor, "word {i}: {old} came back, but it was {floor} at the call already");
        ensure!(old < now, "word {i}: {old} was replaced, and it is {now}");
        Ok(())
    }

    /// An operation found `value` in word `i` and left it.
    fn saw(&mut self, i: usize, value: u64, floor: u64) -> Checked {
        let now = self.word(i);
        let word = &mut self.words[i];
        word.floor = word.floor.max(value);
        let fair = floor <= value && value <= now;
        ensure!(fair, "word {i}: {value} came back, {floor} at the call, {now} now");
        Ok(())
    }

    /// The word must be the number of what was done to it.
    fn verdict(&self, silent: &[(u64, u64)]) -> Checked {
        for (i, word) in self.words.iter().enumerate() {
            let (sure, maybe) = silent[i];
            let least = word.olds.len() as u64 + word.blind + sure;
            let most = least + word.unknown + maybe;
            let is = self.word(i);
            ensure!(
                (least..=most).contains(&is),
                "word {i} of life {} is {is}: {least} operations were executed, {} may have been",
                self.life,
                most - least
            );
            let known = word.olds.iter().all(|&old| old < is);
            ensure!(known, "word {i} is {is}, and a larger value came back");
        }
        for slot in &self.slots {
            let range = slot.at..slot.at + slot.len;
            let same = self.bytes()[range.clone()] == self.shadow[range];
            let known = matches!(slot.used, Use::Known(_));
            ensure!(!known || same, "a slot of {} bytes holds what nobody wrote", slot.len);
        }
        let frozen = self.frozen.as_ref().is_none_or(|f| f == self.bytes());
        ensure!(frozen, "a region of life {} was written after it closed", self.life);
        self.arena.guards(self.buf)
    }
}

/// All regions, and all operations on them.
#[derive(Default)]
pub(crate) struct Remotes {
    pub(crate) regions: Vec<Region>,
    pub(crate) ops: Vec<Remote>,
}

impl Remotes {
    /// Memory for a new region, to be registered.
    pub(crate) fn open(
        &mut self,
        life: u32,
        len_max: usize,
        access: MrAccess,
    ) -> Result<(usize, IoBuf), Violation> {
        let region = Region::new(life, len_max, access)?;
        let io = region.arena.lend(region.buf, false, &mut Rng::new(0, 0));
        self.regions.push(region);
        Ok((self.regions.len() - 1, io))
    }

    /// The region is registered by this key, from this remote address on.
    pub(crate) fn registered(&mut self, region: usize, key: u64, virt_addr: bool) {
        let r = &mut self.regions[region];
        (r.key, r.base) = (key, if virt_addr { r.arena.addr(r.buf) } else { 0 });
    }

    /// The region has been closed: it is written no more.
    pub(crate) fn closed(&mut self, region: usize) {
        let r = &mut self.regions[region];
        r.frozen = Some(r.bytes().to_vec());
    }

    /// The newest region of a life that may be accessed so.
    pub(crate) fn find(&self, life: u32, access: MrAccess) -> Option<usize> {
        self.regions.iter().rposition(|r| r.life == life && r.access == access)
    }

    /// Notes an operation that was accepted. Gives its number.
    pub(crate) fn accepted(&mut self, n: usize) {
        let Remote { region, act, .. } = &self.ops[n];
        let slots = &mut self.regions[*region].slots;
        match act {
            Act::Write(parts) => parts.iter().for_each(|p| slots[p.slot].used = Use::Written(n)),
            Act::Read(parts) => parts.iter().for_each(|p| {
                if let Use::Known(readers) = &mut slots[p.slot].used {
                    *readers += 1;
                }
            }),
            _ => {}
        }
    }

    /// The bytes that operation `n` writes.
    pub(crate) fn content(&self, n: usize) -> Vec<u8> {
        let Act::Write(parts) = &self.ops[n].act else { return Vec::new() };
        let mut bytes = vec![0; parts.iter().map(|p| p.len).sum()];
        write_content(&mut bytes, n as u64);
        bytes
    }

    /// Operation `n` succeeded and brought `got` back.
    pub(crate) fn succeeded(&mut self, n: usize, got: &[u8]) -> Checked {
        self.ops[n].end = End::Ok;
        let content = self.content(n);
        let Remote { region, act, .. } = &self.ops[n];
        let region = &mut self.regions[*region];
        let values = got.chunks_exact(8);
        let values: Vec<u64> =
            values.map(|b| b.iter().rev().fold(0, |v, &b| v << 8 | u64::from(b))).collect();
        match act {
            Act::Write(parts) => {
                region.wrote(parts, &content)?;
                for p in parts {
                    region.slots[p.slot].used = Use::Known(0);
                }
            }
            Act::Read(parts) => {
                let mut at = 0;
                for p in parts {
                    let range = region.bytes_of(p);
                    let same = got[at..at + p.len] == region.shadow[range];
                    at += p.len;
                    ensure!(same, "a read of {} bytes brought other bytes back", p.len);
                }
                region.release(parts);
            }
            Act::Add(words) => {
                for i in words.first..words.first + words.len() {
                    region.words[i].blind += 1;
                }
            }
            Act::FetchAdd(words) => {
                for ((i, &old), &floor) in (words.first..).zip(&values).zip(&words.floors) {
                    region.took(i, old, floor)?;
                }
            }
            Act::Cswap(words, guesses) => {
                let all = (words.first..).zip(&values).zip(&words.floors).zip(guesses);
                for (((i, &old), &floor), &guess) in all {
                    if old == guess {
                        region.took(i, old, floor)?;
                    } else {
                        region.saw(i, old, floor)?;
                    }
                }
            }
            Act::Fetch(words) => {
                for ((i, &value), &floor) in (words.first..).zip(&values).zip(&words.floors) {
                    region.saw(i, value, floor)?;
                }
            }
            Act::Bad(err) => return Err(format!("operation {n} succeeded, {err} is due")),
        }
        Ok(())
    }

    /// Operation `n` failed, or nobody will hear of it any more.
    pub(crate) fn failed(&mut self, n: usize, executed: bool) -> Checked {
        let op = &mut self.ops[n];
        op.end = if executed { End::Unknown } else { End::NotExecuted };
        ensure!(executed || !op.told, "operation {n} was told of at its target: not executed?");
        let region = &mut self.regions[op.region];
        match &op.act {
            Act::Write(parts) => {
                let used = if executed { Use::Unknown } else { Use::Known(0) };
                parts.iter().for_each(|p| region.slots[p.slot].used = used);
            }
            Act::Read(parts) => region.release(parts),
            // AddrRole target was told of it has done all of it.
            Act::Add(w) | Act::FetchAdd(w) if op.told => {
                for i in w.first..w.first + w.len() {
                    region.words[i].blind += 1;
                }
            }
            Act::Add(w) | Act::FetchAdd(w) | Act::Cswap(w, _) if executed => {
                for i in w.first..w.first + w.len() {
                    region.words[i].unknown += 1;
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// The target tells its application of operation `n` of which it has the data: it has been
    /// executed by now.
    pub(crate) fn told(&mut self, n: u64, life: u32) -> Result<usize, Violation> {
        let known = usize::try_from(n).ok().filter(|&n| n < self.ops.len());
        let n = known.ok_or(format!("data {n:#x} of no operation arrived"))?;
        let content = self.content(n);
        let op = &mut self.ops[n];
        ensure!(op.imm && !op.told, "operation {n} was told of twice, or has no data: {op:?}");
        op.told = true;
        let possible = !matches!(op.act, Act::Bad(_)) && op.end != End::NotExecuted;
        ensure!(possible, "operation {n} was not executed, and was told of: {op:?}");
        let region = &mut self.regions[op.region];
        // Without bytes no region is named, and the address may leave open which life is meant.
        let there = region.life == life
            || matches!(op.act, Act::Write(_)) && content.is_empty() && op.dst.life.is_none();
        ensure!(there, "operation {n} for life {} was told of in {life}", region.life);
        match &op.act {
            // Behind one that succeeded there may have been others.
            Act::Write(parts) if op.end != End::Ok => {
                let mut at = 0;
                for p in parts {
                    let range = region.bytes_of(p);
                    let same = region.bytes()[range] == content[at..at + p.len];
                    ensure!(same, "operation {n} was told of before all bytes were there");
                    at += p.len;
                }
            }
            Act::Add(w) | Act::FetchAdd(w) if op.end == End::Unknown => {
                for i in w.first..w.first + w.len() {
                    region.words[i].blind += 1;
                    region.words[i].unknown -= 1;
                }
            }
            _ => {}
        }
        Ok(n)
    }

    /// The rules for the end. `sure` says of each operation whether it has been executed, if that
    /// is certain, and if nobody was told that it failed.
    pub(crate) fn verdict(&mut self, sure: &[Option<bool>]) -> Checked {
        let mut silent = vec![vec![(0, 0); WORDS]; self.regions.len()];
        for (n, &sure) in sure.iter().enumerate() {
            let op = &self.ops[n];
            if op.end != End::Pending {
                continue;
            }
            let sure = if op.told { Some(true) } else { sure };
            match &op.act {
                Act::Add(w) => {
                    for word in &mut silent[op.region][w.first..w.first + w.len()] {
                        let (yes, maybe) = (sure == Some(true), sure.is_none());
                        *word = (word.0 + u64::from(yes), word.1 + u64::from(maybe));
                    }
                }
                Act::Write(parts) if sure == Some(true) => {
                    let (parts, region) = (parts.clone(), op.region);
                    let content = self.content(n);
                    self.regions[region].wrote(&parts, &content)?;
                }
                _ => {}
            }
        }
        let mut all = self.regions.iter().zip(&silent);
        all.try_for_each(|(region, silent)| region.verdict(silent))
    }
}

impl Region {
    /// A write of `content` has been executed.
    fn wrote(&mut self, parts: &[Part], content: &[u8]) -> Checked {
        let mut at = 0;
        for p in parts {
            let range = self.bytes_of(p);
            self.shadow[range.clone()].copy_from_slice(&content[at..at + p.len]);
            let same = self.bytes()[range.clone()] == self.shadow[range];
            ensure!(same, "{} bytes were written, but they are not there", p.len);
            at += p.len;
        }
        self.arena.guards(self.buf)
    }

    fn release(&mut self, parts: &[Part]) {
        for p in parts {
            if let Use::Known(readers) = &mut self.slots[p.slot].used {
                *readers -= 1;
            }
        }
    }
}
