//! Plain DPDK: the reference of barewire's ports. EAL was initialized by a port in the same process
//! or by the benchmark.

use std::ffi::CString;
use std::mem::MaybeUninit;
use std::ptr::{null, null_mut};

use barewire_benches::end::BenchResult;
use barewire_dpdk_sys as sys;
use barewire_driver::clock::now_ns;

/// Frames per burst.
pub(crate) const BURST: usize = 32;

/// Descriptors of each queue.
const RING: u16 = 512;

/// The longest frame that [`RawPort::echo_copied`] copies, bytes.
const COPIED_MAX: usize = 256;

/// A DPDK port with one queue in each direction.
pub(crate) struct RawPort {
    pub(crate) port: u16,
    pool: *mut sys::rte_mempool,
    rx: [*mut sys::rte_mbuf; BURST],
}

impl RawPort {
    /// Starts the device `name`, with packet buffers for frames of `frame_max` bytes.
    pub(crate) fn open(name: &str, args: &str, frame_max: usize) -> BenchResult<Self> {
        let c = |text: &str| CString::new(text).map_err(|e| e.to_string());
        let device = c(&format!("{name},{args}"))?;
        // SAFETY: reads a C string.
        if unsafe { sys::rte_dev_probe(device.as_ptr()) } != 0 {
            return Err(format!("DPDK has no {name}"));
        }
        Self::probed(name, RING, frame_max)
    }

    /// Starts the device `name`, which DPDK has probed, with `ring` descriptors per queue.
    pub(crate) fn probed(name: &str, ring: u16, frame_max: usize) -> BenchResult<Self> {
        let named = CString::new(name).map_err(|e| e.to_string())?;
        let mut port = 0;
        // SAFETY: a C string that is read, and a number that is written.
        if unsafe { sys::rte_eth_dev_get_port_by_name(named.as_ptr(), &mut port) } != 0 {
            return Err(format!("DPDK has no {name}"));
        }
        Self::over(port, name, ring, frame_max)
    }

    /// Starts two ports that are joined by rings.
    pub(crate) fn ring_pair(frame_max: usize) -> BenchResult<[Self; 2]> {
        let c = |text: &str| CString::new(text).map_err(|e| e.to_string());
        let mut rings = [null_mut(); 2];
        for (i, ring) in rings.iter_mut().enumerate() {
            let name = c(&format!("raw{i}"))?;
            let flags = sys::RING_F_SP_ENQ | sys::RING_F_SC_DEQ;
            // SAFETY: reads a C string.
            *ring = unsafe { sys::rte_ring_create(name.as_ptr(), RING.into(), -1, flags) };
            if ring.is_null() {
                return Err("no ring".to_owned());
            }
        }
        let mut ends = Vec::new();
        for end in [0, 1] {
            let name = format!("raw_end{end}");
            let (rx, tx, named) = (rings[end], rings[1 - end], c(&name)?);
            // SAFETY: reads a C string and two arrays of one ring, which are never freed.
            let port = unsafe { sys::rte_eth_from_rings(named.as_ptr(), &rx, 1, &tx, 1, 0) };
            let port = u16::try_from(port).map_err(|_negative| "no port of rings".to_owned())?;
            ends.push(Self::over(port, &name, RING, frame_max)?);
        }
        ends.try_into().map_err(|_other| "not two ends".to_owned())
    }

    fn over(port: u16, name: &str, ring: u16, frame_max: usize) -> BenchResult<Self> {
        let pool_name = CString::new(name).map_err(|e| e.to_string())?;
        let room = (frame_max.max(2048) + 128).next_multiple_of(64) as u16;
        // SAFETY: a port that nobody else uses, set up in the order that DPDK asks for; zeros are
        // the plain configuration, null the driver's defaults.
        let up = unsafe {
            let conf: sys::rte_eth_conf = MaybeUninit::zeroed().assume_init();
            let pool = sys::rte_pktmbuf_pool_create(pool_name.as_ptr(), 4095, 64, 0, room, -1);
            let socket = u32::MAX;
            let up = !pool.is_null()
                && sys::rte_eth_dev_configure(port, 1, 1, &conf) == 0
                && sys::rte_eth_rx_queue_setup(port, 0, ring, socket, null(), pool) == 0
                && sys::rte_eth_tx_queue_setup(port, 0, ring, socket, null()) == 0
                && sys::rte_eth_dev_start(port) == 0;
            up.then_some(pool)
        };
        let pool = up.ok_or_else(|| format!("{name} does not start"))?;
        Ok(Self { port, pool, rx: [null_mut(); BURST] })
    }

    /// Whether the link is up.
    pub(crate) fn is_up(&self) -> bool {
        let mut link = MaybeUninit::<sys::rte_eth_link>::zeroed();
        // SAFETY: fills a struct that is ours; zeros are one.
        unsafe {
            sys::rte_eth_link_get_nowait(self.port, link.as_mut_ptr());
            link.assume_init().link_status() != 0
        }
    }

    /// Receives a burst and calls `each` with every packet, which `each` then owns.
    #[inline(always)]
    pub(crate) fn receive(&mut self, mut each: impl FnMut(&mut Self, *mut sys::rte_mbuf)) -> usize {
        // SAFETY: a started port that this thread alone uses; `rx` has room.
        let count = unsafe { sys::rx_burst(self.port, 0, self.rx.as_mut_ptr(), BURST as u16) };
        for i in 0..usize::from(count) {
            each(self, self.rx[i]);
        }
        usize::from(count)
    }

    /// Sends all of `mbufs`, and retries until the device has accepted them.
    #[inline(always)]
    pub(crate) fn send(&mut self, mbufs: &mut [*mut sys::rte_mbuf]) {
        let mut sent = 0;
        while sent < mbufs.len() {
            let left = &mut mbufs[sent..];
            // SAFETY: a started port that this thread alone uses, and packets of ours.
            let count =
                unsafe { sys::tx_burst(self.port, 0, left.as_mut_ptr(), left.len() as u16) };
            sent += usize::from(count);
        }
    }

    /// Writes a packet of `len` bytes with a number.
    #[inline(always)]
    fn fill(mbuf: *mut sys::rte_mbuf, len: usize, number: u64) {
        // SAFETY: a fresh packet buffer of ours, with room for the longest frame here.
        unsafe {
            (*mbuf).data_len = len as u16;
            (*mbuf).pkt_len = len as u32;
            data(mbuf).add(14).cast::<u64>().write_unaligned(number);
        }
    }

    /// Allocates packet buffers.
    #[inline(always)]
    pub(crate) fn alloc(&mut self, mbufs: &mut [*mut sys::rte_mbuf]) {
        // SAFETY: a pool of ours and room for as many.
        unsafe {
            while sys::rte_pktmbuf_alloc_bulk(self.pool, mbufs.as_mut_ptr(), mbufs.len() as u32)
                != 0
            {
                std::hint::spin_loop();
            }
        }
    }

    /// `count` round trips of a frame of `len` bytes: half round trips in nanoseconds, the mean of
    /// every `chunk` of them. The other side runs [`echo`](Self::echo), or
    /// [`echo_copied`](Self::echo_copied) if `COPIED`: then the bytes are copied in and out here as
    /// well.
    pub(crate) fn ping_pong<const COPIED: bool>(
        &mut self,
        len: usize,
        count: u64,
        chunk: u64,
    ) -> Vec<f64> {
        let mut chunks = Vec::with_capacity((count / chunk) as usize);
        let mut bytes = [0x5a; COPIED_MAX];
        let mut at = now_ns();
        let mut mbuf = [null_mut()];
        for i in 1..=count {
            self.alloc(&mut mbuf);
            if COPIED {
                Self::put(mbuf[0], &bytes[..len]);
            }
            Self::fill(mbuf[0], len, i);
            self.send(&mut mbuf);
            let mut back = 0;
            while back != i {
                self.receive(|_, mbuf| {
                    if COPIED {
                        Self::get(mbuf, &mut bytes);
                    }
                    // SAFETY: a received packet of ours, given back.
                    unsafe {
                        back = data(mbuf).add(14).cast::<u64>().read_unaligned();
                        sys::rte_pktmbuf_free(mbuf);
                    }
                });
            }
            if i.is_multiple_of(chunk) {
                let now = now_ns();
                chunks.push((now - at) as f64 / (2 * chunk) as f64);
                at = now;
            }
        }
        chunks
    }

    /// Returns `count` frames unchanged.
    pub(crate) fn echo(&mut self, count: u64) {
        let mut left = count;
        while left > 0 {
            left -= self.receive(|port, mbuf| port.send(&mut [mbuf])) as u64;
        }
    }

    /// Answers `count` frames, each with another frame of the same bytes, as an application that
    /// reads and answers messages must: the bytes are copied out and in.
    pub(crate) fn echo_copied(&mut self, count: u64) {
        let mut bytes = [0; COPIED_MAX];
        let mut left = count;
        while left > 0 {
            let got = self.receive(|port, mbuf| {
                let len = Self::get(mbuf, &mut bytes);
                let mut answer = [null_mut()];
                port.alloc(&mut answer);
                Self::put(answer[0], &bytes[..len]);
                port.send(&mut answer);
                // SAFETY: a received packet of ours, given back.
                unsafe { sys::rte_pktmbuf_free(mbuf) };
            });
            left -= got as u64;
        }
    }

    /// Copies a short frame to a fresh packet buffer.
    #[inline(always)]
    fn put(mbuf: *mut sys::rte_mbuf, bytes: &[u8]) {
        // SAFETY: a fresh packet buffer of ours, with room for the longest frame here.
        unsafe {
            (*mbuf).data_len = bytes.len() as u16;
            (*mbuf).pkt_len = bytes.len() as u32;
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), data(mbuf), bytes.len());
        }
    }

    /// Copies a short received frame to `bytes`, and returns its length.
    #[inline(always)]
    fn get(mbuf: *mut sys::rte_mbuf, bytes: &mut [u8; COPIED_MAX]) -> usize {
        // SAFETY: a received packet of ours, of so many bytes or more.
        unsafe {
            let len = usize::from((*mbuf).data_len).min(COPIED_MAX);
            std::ptr::copy_nonoverlapping(data(mbuf), bytes.as_mut_ptr(), len);
            len
        }
    }

    /// Sends `count` frames of `len` bytes, in bursts; with `from`, their bytes are copied from it.
    pub(crate) fn stream(&mut self, len: usize, count: u64, from: Option<&[u8]>) {
        let mut mbufs = [null_mut(); BURST];
        let mut number = 0;
        while number < count {
            let burst = BURST.min((count - number) as usize);
            self.alloc(&mut mbufs[..burst]);
            for &mbuf in &mbufs[..burst] {
                number += 1;
                Self::fill(mbuf, len, number);
                if let Some(from) = from {
                    let payload = len - 22;
                    let at = number as usize * payload % (from.len() - payload);
                    // SAFETY: as in `fill`; the source is in range.
                    unsafe {
                        let to = data(mbuf).add(22);
                        std::ptr::copy_nonoverlapping(from.as_ptr().add(at), to, payload);
                    }
                }
            }
            self.send(&mut mbufs[..burst]);
        }
    }

    /// Receives `count` frames, and reads the start of each; with `to`, their bytes are copied to
    /// it.
    pub(crate) fn sink(&mut self, count: u64, mut to: Option<&mut [u8]>) {
        let (mut left, mut last) = (count, 0);
        while left > 0 {
            // SAFETY: a started port that this thread alone uses; `rx` has room.
            let got = unsafe { sys::rx_burst(self.port, 0, self.rx.as_mut_ptr(), BURST as u16) };
            let got = usize::from(got);
            for &mbuf in &self.rx[..got] {
                // SAFETY: a received packet of ours.
                unsafe {
                    last = data(mbuf).add(14).cast::<u64>().read_unaligned();
                    if let Some(to) = to.as_deref_mut() {
                        let payload = usize::from((*mbuf).data_len) - 22;
                        let at = last as usize * payload % (to.len() - payload);
                        let from = data(mbuf).add(22);
                        std::ptr::copy_nonoverlapping(from, to.as_mut_ptr().add(at), payload);
                    }
                }
            }
            // SAFETY: packets of ours, given back.
            unsafe { sys::rte_pktmbuf_free_bulk(self.rx.as_mut_ptr(), got as u32) };
            left -= got as u64;
        }
        assert_eq!(last, count, "a frame was lost or came out of order");
    }

    /// Sends and receives `count` frames of `len` bytes on one device, once.
    pub(crate) fn turn(&mut self, len: usize, count: usize) {
        let mut mbufs = [null_mut(); BURST];
        self.alloc(&mut mbufs[..count]);
        for &mbuf in &mbufs[..count] {
            Self::fill(mbuf, len, 1);
        }
        self.send(&mut mbufs[..count]);
        // SAFETY: a started port that this thread alone uses, and packets of ours.
        unsafe {
            let got = sys::rx_burst(self.port, 0, self.rx.as_mut_ptr(), count as u16);
            sys::rte_pktmbuf_free_bulk(self.rx.as_mut_ptr(), u32::from(got));
        }
    }
}

// SAFETY: a port and a pool of DPDK belong to no thread; one at a time uses them.
unsafe impl Send for RawPort {}

/// Start of a packet's data.
///
/// # Safety
/// The packet is the caller's.
#[inline(always)]
pub(crate) unsafe fn data(mbuf: *mut sys::rte_mbuf) -> *mut u8 {
    // SAFETY: the data of a packet begins inside its buffer.
    unsafe { (*mbuf).buf_addr.cast::<u8>().add(usize::from((*mbuf).data_off)) }
}
