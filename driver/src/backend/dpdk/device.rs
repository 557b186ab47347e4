//! A DPDK device (ethdev): probing, configuration, start and removal.
//!
//! Everything here runs in EAL's thread.

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::mem::MaybeUninit;
use std::ptr::null_mut;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};

use barewire_dpdk_sys as sys;

use super::failure::{Failure, errno};
use super::irq_guard;
use super::link::link;
use super::listener::Listener;
use super::pmd::{MTU_MAX, Mtu, Pmd, interface};
use super::{DpdkSettings, lock};
use crate::backend::netdev::interface_mtu;
use crate::frame::ETH_HDR_LEN;
use crate::mem::{prefetch, prefetch_to_write};
use crate::port::{MTU_MIN, MacAddr};
use crate::setup;

/// Per-thread mbuf cache, and the number of threads that a pool is sized for: with more, a full
/// queue finds no mbuf, which is back-pressure.
const CACHE: u32 = 64;
const CACHES: usize = 8;

/// Mbufs held by a port: receive and transmit bursts, and its mbuf cache.
const IN_HAND: usize = 256;

/// A configured device.
pub(super) struct Device {
    pub(super) port: u16,
    pub(super) pool: Pool,
    pub(super) mac: MacAddr,
    pub(super) mtu: usize,
    pub(super) frame_max: usize,
    pub(super) link_bps: u64,
    pub(super) pmd: Pmd,
    /// Name and index of the interface below it.
    pub(super) interface: Option<(String, u32)>,
    /// It was started. False only for a memif client whose server is not there yet.
    pub(super) is_started: bool,
    /// For a memif: keeps the interrupt thread away from bursts.
    pub(super) irq_guard: Option<Arc<irq_guard::BurstGuard>>,
    guard: DeviceGuard,
}

/// Mbuf pool of one device, and its size.
#[derive(Clone, Copy)]
pub(super) struct Pool(pub(super) *mut sys::rte_mempool, usize);

// SAFETY: a mempool may be used from any thread.
unsafe impl Send for Pool {}

/// Pools of removed devices some of whose mbufs are still in another device.
static RETIRED_POOLS: Mutex<Vec<Pool>> = Mutex::new(Vec::new());

/// Pairs of rings, by name.
static RING_PAIRS: Mutex<Option<HashMap<String, RingPair>>> = Mutex::new(None);

/// Two rings between two ports of this process.
struct RingPair {
    rings: [Ring; 2],
    taken: [bool; 2],
}

#[derive(Clone, Copy)]
pub(super) struct Ring(*mut sys::rte_ring);

// SAFETY: an rte_ring may be used from any thread.
unsafe impl Send for Ring {}

impl Ring {
    /// Prefetches what the next enqueue needs: the consumer's index, which the other end writes at
    /// each dequeue, and the next slot.
    #[inline(always)]
    pub(super) fn prefetch_for_tx(self) {
        // SAFETY: a ring lives until both its ends are closed, and the caller owns one.
        let place = unsafe {
            prefetch((&raw const (*self.0).__bindgen_anon_2).cast());
            let at = (*self.0).__bindgen_anon_1.prod.head & (*self.0).mask;
            self.0.add(1).cast::<*mut sys::rte_mbuf>().add(at as usize)
        };
        prefetch_to_write(place.cast());
    }

    /// Whether it is empty, for its consumer. If not, the slot of the next mbuf is prefetched.
    #[inline(always)]
    pub(super) fn is_empty(self) -> bool {
        // SAFETY: as in `prefetch_for_tx`. The producer writes `prod.tail` concurrently, by atomic
        // accesses; `cons.head` is the caller's own.
        let (tail, head) = unsafe {
            let tail = AtomicU32::from_ptr(&raw mut (*self.0).__bindgen_anon_1.prod.tail);
            (tail.load(Relaxed), (*self.0).__bindgen_anon_2.cons.head)
        };
        if tail == head {
            return true;
        }
        // SAFETY: as in `prefetch_for_tx`.
        let place = unsafe {
            let at = head & (*self.0).mask;
            self.0.add(1).cast::<*mut sys::rte_mbuf>().add(at as usize)
        };
        prefetch(place.cast());
        false
    }
}

impl Device {
    /// Probes, configures and starts the device.
    ///
    /// # Errors
    /// [`Failure`], with DPDK's log line if there is one; the device is left as it was.
    pub(super) fn open(settings: &DpdkSettings) -> Result<Self, Failure> {
        let pmd = Pmd::of(&settings.device);
        let iface = settings.arg("iface").filter(|_| matches!(pmd.mtu, Mtu::Interface(_)));
        let iface = iface.map(|name| Ok((name.to_owned(), interface(name)?))).transpose()?;
        let mtu = choose_mtu(&pmd, settings, iface.as_ref().map(|(name, _)| name.as_str()))?;
        let listener = Listener::of(settings)?;
        let (port, ring_end) = match settings.arg("pair").filter(|_| pmd.is("net_ring")) {
            Some(name) => {
                let (port, end) = open_ring(settings, name)?;
                (port, Some((name.to_owned(), end)))
            }
            None => (probe(&pmd, settings, mtu, listener.as_ref())?, None),
        };
        let guard = DeviceGuard { port, ring_end, _listener: listener };
        let mut device = setup(guard, &pmd, settings, mtu)?;
        device.interface = match pmd.is("net_tap") {
            true => {
                settings.arg("iface").and_then(|name| Some((name.into(), interface(name).ok()?)))
            }
            false => iface,
        };
        Ok(device)
    }

    /// Starts a device that is stopped.
    ///
    /// # Errors
    /// The negative errno of the driver.
    pub(super) fn start(&mut self) -> Result<(), i32> {
        start(self.port)?;
        self.is_started = true;
        Ok(())
    }

    /// Whether a sent frame cannot be lost: the device is one end of a pair of rings, or a memif
    /// that the user declared lossless.
    pub(super) fn is_lossless(&self, settings: &DpdkSettings) -> bool {
        self.guard.ring_end.is_some() || settings.lossless
    }

    /// Its receive and transmit rings, if it is one end of a pair.
    pub(super) fn rings(&self) -> Option<[Ring; 2]> {
        let (name, end) = self.guard.ring_end.as_ref()?;
        let rings = lock(&RING_PAIRS).as_ref()?.get(name)?.rings;
        Some([rings[*end], rings[1 - end]])
    }

    /// Stops and removes the device, and frees its memory.
    pub(super) fn close(self) {
        drop(self.guard);
        lock(&RETIRED_POOLS).push(self.pool);
        free_retired_pools();
    }
}

/// Starts the device of `port`.
///
/// # Errors
/// The negative errno of the driver.
pub(super) fn start(port: u16) -> Result<(), i32> {
    // SAFETY: a configured port.
    match unsafe { sys::rte_eth_dev_start(port) } {
        0 => Ok(()),
        code => Err(code),
    }
}

/// Restarts the device of `port`, which makes a memif client reconnect.
pub(super) fn restart(port: u16, was_started: bool) -> Result<(), i32> {
    if was_started {
        // SAFETY: a port that exists and runs no burst: the DPDK port waits for the end. Fails only
        // if it is stopped already.
        let _ = unsafe { sys::rte_eth_dev_stop(port) };
    }
    start(port)
}

/// Removes the device when dropped.
struct DeviceGuard {
    port: u16,
    /// Name and index of its end of a pair of rings.
    ring_end: Option<(String, usize)>,
    /// Dropped after the device was removed, since fields are dropped last.
    _listener: Option<Listener>,
}

impl Drop for DeviceGuard {
    fn drop(&mut self) {
        irq_guard::unregister(self.port);
        // SAFETY: a port that was found by its name and that this guard owns; `rte_dev_remove`
        // closes it and frees its device, which `info` names while the port exists.
        unsafe {
            let _ = sys::rte_eth_dev_stop(self.port);
            match info(self.port) {
                Ok(info) if !info.device.is_null() => {
                    let code = sys::rte_dev_remove(info.device);
                    if code != 0 {
                        tracing::warn!(port = self.port, code, "a device could not be removed");
                    }
                }
                _ => {
                    let _ = sys::rte_eth_dev_close(self.port);
                }
            }
        }
        if let Some((name, end)) = &self.ring_end {
            release_ring_end(name, *end);
        }
    }
}

/// The requested MTU, or the default.
fn choose_mtu(pmd: &Pmd, settings: &DpdkSettings, iface: Option<&str>) -> Result<usize, Failure> {
    let max = match pmd.mtu {
        Mtu::Any | Mtu::Driver => MTU_MAX,
        Mtu::Only(mtu) => mtu,
        Mtu::Interface(max) => iface.and_then(interface_mtu).unwrap_or(1500).min(max),
    };
    let max = pmd.mtu_max(settings).map_or(max, |limit| limit.min(max));
    let usual = if matches!(pmd.mtu, Mtu::Interface(_)) { max } else { max.min(1500) };
    let mtu = settings.mtu.unwrap_or(usual);
    if (MTU_MIN..=max).contains(&mtu) {
        return Ok(mtu);
    }
    let mend = match (pmd.mtu, iface) {
        (Mtu::Interface(limit), Some(iface)) if (max..=limit).contains(&mtu) => {
            format!("sudo ip link set {iface} mtu {mtu}")
        }
        _ => format!("write mtu={max} or less"),
    };
    let why = format!("mtu {mtu} is outside {MTU_MIN} to {max}");
    Err(Failure::new(libc::EINVAL, why).mend(mend))
}

/// Probes the device and returns its port id.
fn probe(
    pmd: &Pmd,
    settings: &DpdkSettings,
    mtu: usize,
    listener: Option<&Listener>,
) -> Result<u16, Failure> {
    let name = &settings.device;
    if port_of(name).is_some() {
        let taken = Failure::new(libc::EBUSY, format!("{name} is open in this process already"));
        return Err(taken.mend("choose another number"));
    }
    let args = match listener {
        Some(listener) => listener.args(&settings.args),
        None => settings.args.clone(),
    };
    let args = format!("{args}{}", pmd.extra_args(settings, mtu));
    let device = format!("{name}{}{args}", if args.is_empty() { "" } else { "," });
    let device = device.replace(",,", ",");
    let device = cstring(&device)?;
    // SAFETY: reads a C string.
    let code = unsafe { sys::rte_dev_probe(device.as_ptr()) };
    match (code, port_of(name)) {
        // EAL returns 0 also if no driver took the device.
        (0, Some(port)) => Ok(port),
        (0, None) => Err(Failure::new(libc::ENODEV, "")),
        (code, _) => Err(Failure::new(-code, "")),
    }
}

fn cstring(text: &str) -> Result<CString, Failure> {
    CString::new(text).map_err(|_nul| Failure::new(libc::EINVAL, "a zero byte in the name"))
}

/// Port id of the device `name`.
fn port_of(name: &str) -> Option<u16> {
    let name = cstring(name).ok()?;
    let mut port = 0;
    // SAFETY: reads a C string and writes a local variable.
    let code = unsafe { sys::rte_eth_dev_get_port_by_name(name.as_ptr(), &mut port) };
    (code == 0).then_some(port)
}

/// `rte_eth_dev_info_get`.
fn info(port: u16) -> Result<sys::rte_eth_dev_info, Failure> {
    let mut info = MaybeUninit::<sys::rte_eth_dev_info>::zeroed();
    // SAFETY: fills a struct that is local; zeros are one.
    let (code, info) = unsafe {
        let code = sys::rte_eth_dev_info_get(port, info.as_mut_ptr());
        (code, info.assume_init())
    };
    if code == 0 { Ok(info) } else { Err(failed("asking the driver", code)) }
}

/// The error of an operation `what` that returned the negative errno `code`; the caller adds DPDK's
/// log line.
fn failed(what: &str, code: i32) -> Failure {
    let errno = code.abs();
    let error = std::io::Error::from_raw_os_error(errno);
    Failure::new(errno, format!("{what}: {error}"))
}

/// Configures the port with one queue per direction, and starts it.
fn setup(
    guard: DeviceGuard,
    pmd: &Pmd,
    settings: &DpdkSettings,
    mtu: usize,
) -> Result<Device, Failure> {
    let port = guard.port;
    let info = info(port)?;
    // SAFETY: the name is a static string of the driver, or null.
    let driver = unsafe { info.driver_name.as_ref().map(|name| CStr::from_ptr(name)) };
    let driver = driver.map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    // SAFETY: zeros are the configuration with nothing special.
    let mut conf: sys::rte_eth_conf = unsafe { MaybeUninit::zeroed().assume_init() };
    if pmd.mtu == Mtu::Driver {
        let max = usize::from(info.max_mtu).min(MTU_MAX);
        if mtu > max {
            let why = format!("mtu {mtu} is more than {driver} can");
            return Err(Failure::new(libc::EINVAL, why).mend(format!("write mtu={max} or less")));
        }
        conf.rxmode.mtu = mtu as u32;
    }
    // SAFETY: a port that is not started; the struct is read.
    let code = unsafe { sys::rte_eth_dev_configure(port, 1, 1, &conf) };
    if code != 0 {
        return Err(failed("configuring", code));
    }
    let frame_max = ETH_HDR_LEN + mtu;
    let room = pmd.mbuf_room(settings, mtu, frame_max).max(info.min_rx_bufsize as usize);
    let ring = u16::try_from(settings.ring_len).unwrap_or(u16::MAX);
    let (mut rx, mut tx) = (ring, ring);
    // SAFETY: writes two local variables.
    let code = unsafe { sys::rte_eth_dev_adjust_nb_rx_tx_desc(port, &mut rx, &mut tx) };
    if code != 0 {
        return Err(failed("choosing the length of the queues", code));
    }
    // SAFETY: asks for a number.
    let socket = unsafe { sys::rte_eth_dev_socket_id(port) };
    let ring_total = (usize::from(rx) + usize::from(tx)).max(pmd.queued_mbufs());
    let pool = make_pool(settings, ring_total, room, socket)?;
    let mut device = Device {
        port,
        pool,
        mac: address(port, pmd, settings),
        mtu,
        frame_max,
        link_bps: 0,
        pmd: *pmd,
        interface: None,
        is_started: false,
        irq_guard: pmd.is("net_memif").then(|| irq_guard::register(port)),
        guard,
    };
    let up = setup_queues(port, rx, tx, socket as u32, pool)
        .and_then(|()| configure_and_start(&mut device, settings));
    match up {
        Ok(()) => {
            tracing::info!(port, driver, mac = %device.mac, mtu, rx, tx, room, "DPDK port is up");
            Ok(device)
        }
        Err(failure) => {
            device.close();
            Err(failure)
        }
    }
}

/// Sets up both queues with the driver's default configuration.
fn setup_queues(port: u16, rx: u16, tx: u16, socket: u32, pool: Pool) -> Result<(), Failure> {
    // SAFETY: a configured port and a pool that outlives it; null asks for the driver's defaults.
    let code = unsafe {
        match sys::rte_eth_rx_queue_setup(port, 0, rx, socket, std::ptr::null(), pool.0) {
            0 => sys::rte_eth_tx_queue_setup(port, 0, tx, socket, std::ptr::null()),
            code => code,
        }
    };
    if code == 0 { Ok(()) } else { Err(failed("making the queues", code)) }
}

fn configure_and_start(device: &mut Device, settings: &DpdkSettings) -> Result<(), Failure> {
    match device.start() {
        Ok(()) => {}
        Err(_code) if device.pmd.is("net_memif") && settings.arg("role") != Some("server") => {
            let socket = settings.arg("socket").unwrap_or("/run/memif.sock");
            tracing::warn!("{}: no memif server at {socket} yet; retrying", settings.device);
            return Ok(());
        }
        Err(code) => return Err(failed("starting", code)),
    }
    let port = device.port;
    // SAFETY: a started port. Multicast is needed for broadcasts of the fabric only; drivers
    // without filters refuse the call, which is fine.
    unsafe { sys::rte_eth_allmulticast_enable(port) };
    let filters_us = !device.pmd.needs_own_mac
        && settings.mac.is_some()
        && device_address(port) != Some(device.mac);
    if filters_us || settings.promiscuous {
        // SAFETY: a started port. The only way to receive frames to an address that is not the
        // device's.
        unsafe { sys::rte_eth_promiscuous_enable(port) };
    }
    device.link_bps = link(port).1;
    if let Some(ethertype) = settings.ethertype {
        super::steer::steer(port, ethertype)?;
    }
    Ok(())
}

/// The device's MAC address.
fn device_address(port: u16) -> Option<MacAddr> {
    let mut addr = sys::rte_ether_addr { addr_bytes: [0; 6] };
    // SAFETY: fills a struct that is local.
    let code = unsafe { sys::rte_eth_macaddr_get(port, &mut addr) };
    (code == 0).then_some(MacAddr(addr.addr_bytes))
}

/// MAC address of the port: the requested one, the device's, or a random one.
fn address(port: u16, pmd: &Pmd, settings: &DpdkSettings) -> MacAddr {
    if let Some(mac) = settings.mac {
        if pmd.needs_own_mac {
            return mac;
        }
        let mut addr = sys::rte_ether_addr { addr_bytes: mac.0 };
        // SAFETY: reads a local struct. If the driver cannot change it, promiscuous mode is enabled
        // later.
        unsafe { sys::rte_eth_dev_default_mac_addr_set(port, &mut addr) };
        return mac;
    }
    match device_address(port) {
        Some(mac) if !pmd.needs_own_mac && mac.is_single() => mac,
        _ => MacAddr::random(),
    }
}

/// Creates the mbuf pool of a port.
fn make_pool(
    settings: &DpdkSettings,
    ring_total: usize,
    room: usize,
    socket: i32,
) -> Result<Pool, Failure> {
    static SERIAL: Mutex<u32> = Mutex::new(0);
    let least = ring_total + IN_HAND + CACHES * CACHE as usize * 3 / 2;
    let count = settings.mbuf_count.unwrap_or(least).max(least);
    let room = (room + sys::RTE_PKTMBUF_HEADROOM as usize).next_multiple_of(64);
    let room = u16::try_from(room).map_err(|_long| {
        let why = format!("a packet buffer of {room} bytes is too long");
        Failure::new(libc::EINVAL, why).mend("write a smaller mtu=")
    })?;
    free_retired_pools();
    let name = {
        let mut serial = lock(&SERIAL);
        *serial += 1;
        cstring(&format!("barewire{serial}"))?
    };
    // SAFETY: reads a C string; everything else is by value.
    let pool = unsafe {
        sys::rte_pktmbuf_pool_create(name.as_ptr(), count as u32, CACHE, 0, room, socket)
    };
    if !pool.is_null() {
        return Ok(Pool(pool, count));
    }
    let need = (count * (usize::from(room) + 256)) >> 20;
    let why = format!("no memory for {count} packet buffers, about {need} MiB");
    let pages = (need / 2 + 32).next_multiple_of(64);
    let setup = setup::command();
    let mend = format!("sudo {setup} --2m {pages}, or write mbufs= or ring= smaller");
    Err(Failure::new(libc::ENOMEM, why).mend(mend))
}

/// Frees retired pools all of whose mbufs were returned.
fn free_retired_pools() {
    lock(&RETIRED_POOLS).retain(|&Pool(pool, count)| {
        // SAFETY: a pool that was not freed; its device is gone, so its mbufs are in the pool or in
        // a ring of another device, and only a full pool is freed.
        unsafe {
            let whole = sys::rte_mempool_avail_count(pool) as usize >= count;
            if whole {
                sys::rte_mempool_free(pool);
            }
            !whole
        }
    });
}

// ---------------------------------------------------------------------------------------------
// Pairs of rings
// ---------------------------------------------------------------------------------------------

/// Creates a port on a free end of the pair `name`, and returns its id and the end's index.
fn open_ring(settings: &DpdkSettings, name: &str) -> Result<(u16, usize), Failure> {
    let mut pairs = lock(&RING_PAIRS);
    let pairs = pairs.get_or_insert_default();
    if !pairs.contains_key(name) {
        pairs.insert(name.to_owned(), RingPair::make(name, settings.ring_len)?);
    }
    let pair = pairs.get_mut(name).expect("it was just inserted");
    let Some(end) = pair.taken.iter().position(|taken| !taken) else {
        let taken = Failure::new(libc::EBUSY, format!("both ends of pair={name} are taken"));
        return Err(taken.mend("choose another name"));
    };
    let device = cstring(&settings.device)?;
    let (rx, tx) = (pair.rings[end].0, pair.rings[1 - end].0);
    // SAFETY: reads a C string and two arrays of one ring each, which live until both ends are
    // closed.
    let port = unsafe { sys::rte_eth_from_rings(device.as_ptr(), &rx, 1, &tx, 1, 0) };
    match u16::try_from(port) {
        Ok(port) => {
            pair.taken[end] = true;
            Ok((port, end))
        }
        Err(_negative) => {
            free_unused_pair(pairs, name);
            let why = format!("{} is open in this process already", settings.device);
            Err(Failure::new(libc::EBUSY, why).mend("choose another name"))
        }
    }
}

impl RingPair {
    fn make(name: &str, ring_len: usize) -> Result<Self, Failure> {
        let mut pair = Self { rings: [Ring(null_mut()); 2], taken: [false; 2] };
        for (i, ring) in pair.rings.iter_mut().enumerate() {
            let name = cstring(&format!("bw{i}-{name}"))?;
            // One producer and one consumer, each a single thread at a time.
            let flags = sys::RING_F_SP_ENQ | sys::RING_F_SC_DEQ;
            let count = ring_len.next_power_of_two() as u32;
            // SAFETY: reads a C string.
            ring.0 = unsafe { sys::rte_ring_create(name.as_ptr(), count, -1, flags) };
            if ring.0.is_null() {
                return Err(failed("making a ring", errno()));
            }
        }
        Ok(pair)
    }
}

impl Drop for RingPair {
    /// Both ends are closed. Frees the frames in the rings as well.
    fn drop(&mut self) {
        for Ring(ring) in self.rings.into_iter().filter(|ring| !ring.0.is_null()) {
            let mut mbuf = null_mut();
            // SAFETY: the rings hold mbufs, and both are owned here.
            unsafe {
                while sys::rte_ring_dequeue_burst(ring, &mut mbuf, 1, null_mut()) == 1 {
                    sys::rte_pktmbuf_free(mbuf.cast());
                }
                sys::rte_ring_free(ring);
            }
        }
    }
}

/// Releases an end. The rings are freed with the second one.
fn release_ring_end(name: &str, end: usize) {
    let mut pairs = lock(&RING_PAIRS);
    let Some(pairs) = pairs.as_mut() else { return };
    if let Some(pair) = pairs.get_mut(name) {
        pair.taken[end] = false;
    }
    free_unused_pair(pairs, name);
}

/// Frees a pair neither end of which is in use.
fn free_unused_pair(pairs: &mut HashMap<String, RingPair>, name: &str) {
    if pairs.get(name).is_some_and(|pair| pair.taken == [false; 2]) {
        pairs.remove(name);
    }
}
