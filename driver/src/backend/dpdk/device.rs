//! A device of DPDK: probed, configured, started, and taken down again.
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
use super::pmd::{MTU_MOST, Mtu, Pmd, interface};
use super::{DpdkSettings, lock};
use crate::backend::netdev::interface_mtu;
use crate::frame::ETH_HDR_LEN;
use crate::mem::{prefetch, prefetch_to_write};
use crate::port::{MTU_MIN, MacAddr};
use crate::setup;

/// Packet buffers that a thread keeps for itself, and how many such threads a pool is made for:
/// with more of them at work at the same time a full queue finds no buffer, which is back-pressure.
const CACHE: u32 = 64;
const CACHES: usize = 8;

/// Packet buffers in the hands of a port: bursts that it sends and receives, and its stock.
const IN_HAND: usize = 256;

/// A device that is up.
pub(super) struct Device {
    pub(super) port: u16,
    pub(super) pool: Pool,
    pub(super) mac: MacAddr,
    pub(super) mtu: usize,
    pub(super) frame_max: usize,
    pub(super) link_bps: u64,
    pub(super) pmd: Pmd,
    /// The interface below it, with the index that it had.
    pub(super) interface: Option<(String, u32)>,
    /// It has been started. Only a memif client whose server is not there yet is not.
    pub(super) is_started: bool,
    /// What keeps the interrupt thread away, if it is a memif.
    pub(super) irq_guard: Option<Arc<irq_guard::Member>>,
    undo: Undo,
}

/// Packet buffers of one device.
#[derive(Clone, Copy)]
pub(super) struct Pool(pub(super) *mut sys::rte_mempool, usize);

// SAFETY: a pool of DPDK is used from any thread.
unsafe impl Send for Pool {}

/// Pools whose device is gone and some of whose buffers are still underway in another one.
static RETIRED: Mutex<Vec<Pool>> = Mutex::new(Vec::new());

/// Pairs of rings by name.
static LINKS: Mutex<Option<HashMap<String, Link>>> = Mutex::new(None);

/// Two rings between two ports of this process.
struct Link {
    rings: [Ring; 2],
    taken: [bool; 2],
}

#[derive(Clone, Copy)]
pub(super) struct Ring(*mut sys::rte_ring);

// SAFETY: a ring of DPDK is used from any thread.
unsafe impl Send for Ring {}

impl Ring {
    /// Fetches what the sender to this ring will need next: how far the other end has read, which
    /// it wrote when it took the last packet, and the place for the next one.
    #[inline(always)]
    pub(super) fn warm(self) {
        // SAFETY: a ring lives until both its ends are closed, and an end of it calls this.
        let place = unsafe {
            prefetch((&raw const (*self.0).__bindgen_anon_2).cast());
            let at = (*self.0).__bindgen_anon_1.prod.head & (*self.0).mask;
            self.0.add(1).cast::<*mut sys::rte_mbuf>().add(at as usize)
        };
        prefetch_to_write(place.cast());
    }

    /// Whether nothing is in it for its receiver, which calls this. If something is, the place of
    /// it is fetched.
    #[inline(always)]
    pub(super) fn is_empty(self) -> bool {
        // SAFETY: as in `warm`. The sender writes `prod.tail` meanwhile, and reads and writes of it
        // are atomic; `cons.head` is the caller's own.
        let (tail, head) = unsafe {
            let tail = AtomicU32::from_ptr(&raw mut (*self.0).__bindgen_anon_1.prod.tail);
            (tail.load(Relaxed), (*self.0).__bindgen_anon_2.cons.head)
        };
        if tail == head {
            return true;
        }
        // SAFETY: as in `warm`.
        let place = unsafe {
            let at = head & (*self.0).mask;
            self.0.add(1).cast::<*mut sys::rte_mbuf>().add(at as usize)
        };
        prefetch(place.cast());
        false
    }
}

impl Device {
    /// Brings the device up.
    ///
    /// # Errors
    /// [`Failure`], in DPDK's words where it has any; the device is as it was before.
    pub(super) fn open(settings: &DpdkSettings) -> Result<Self, Failure> {
        let pmd = Pmd::of(&settings.device);
        let iface = settings.arg("iface").filter(|_| matches!(pmd.mtu, Mtu::Interface(_)));
        let iface = iface.map(|name| Ok((name.to_owned(), interface(name)?))).transpose()?;
        let mtu = wanted_mtu(&pmd, settings, iface.as_ref().map(|(name, _)| name.as_str()))?;
        let listener = Listener::of(settings)?;
        let (port, link) = match settings.arg("pair").filter(|_| pmd.is("net_ring")) {
            Some(name) => {
                let (port, end) = open_ring(settings, name)?;
                (port, Some((name.to_owned(), end)))
            }
            None => (probe(&pmd, settings, mtu, listener.as_ref())?, None),
        };
        let undo = Undo { port, link, _listener: listener };
        let mut device = setup(undo, &pmd, settings, mtu)?;
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

    /// Whether a frame that the device has taken is where its receiver finds it: it is one end of a
    /// pair of rings, or of a memif of which the user says so.
    pub(super) fn is_lossless(&self, settings: &DpdkSettings) -> bool {
        self.undo.link.is_some() || settings.lossless
    }

    /// The rings that it receives from and sends to, if it is one end of a pair.
    pub(super) fn rings(&self) -> Option<[Ring; 2]> {
        let (name, end) = self.undo.link.as_ref()?;
        let rings = lock(&LINKS).as_ref()?.get(name)?.rings;
        Some([rings[*end], rings[1 - end]])
    }

    /// Stops it, removes it, and gives its memory back.
    pub(super) fn close(self) {
        drop(self.undo);
        lock(&RETIRED).push(self.pool);
        reap();
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

/// Stops the device of `port` and starts it again, which makes a memif client connect anew.
pub(super) fn restart(port: u16, was_started: bool) -> Result<(), i32> {
    if was_started {
        // SAFETY: a port that exists and whose bursts nobody calls: the port that asks for this
        // waits for the end. Fails only if it is stopped already.
        let _ = unsafe { sys::rte_eth_dev_stop(port) };
    }
    start(port)
}

/// Takes down what was brought up.
struct Undo {
    port: u16,
    /// The end of a pair of rings that it is.
    link: Option<(String, usize)>,
    /// Goes when the device is gone, since fields are dropped last.
    _listener: Option<Listener>,
}

impl Drop for Undo {
    fn drop(&mut self) {
        irq_guard::leave(self.port);
        // SAFETY: a port that was found by its name and is nobody else's; `rte_dev_remove` closes
        // it and frees its device, which `info` names while the port exists.
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
        if let Some((name, end)) = &self.link {
            leave_link(name, *end);
        }
    }
}

/// The MTU that was asked for, or the largest usual one.
fn wanted_mtu(pmd: &Pmd, settings: &DpdkSettings, iface: Option<&str>) -> Result<usize, Failure> {
    let most = match pmd.mtu {
        Mtu::Any | Mtu::Driver => MTU_MOST,
        Mtu::Only(mtu) => mtu,
        Mtu::Interface(most) => iface.and_then(interface_mtu).unwrap_or(1500).min(most),
    };
    let most = pmd.mtu_most(settings).map_or(most, |limit| limit.min(most));
    let usual = if matches!(pmd.mtu, Mtu::Interface(_)) { most } else { most.min(1500) };
    let mtu = settings.mtu.unwrap_or(usual);
    if (MTU_MIN..=most).contains(&mtu) {
        return Ok(mtu);
    }
    let mend = match (pmd.mtu, iface) {
        (Mtu::Interface(limit), Some(iface)) if (most..=limit).contains(&mtu) => {
            format!("sudo ip link set {iface} mtu {mtu}")
        }
        _ => format!("write mtu={most} or less"),
    };
    let why = format!("mtu {mtu} is outside {MTU_MIN} to {most}");
    Err(Failure::new(libc::EINVAL, why).mend(mend))
}

/// Makes EAL find the device, and says which port it is.
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
    let args = format!("{args}{}", pmd.more_args(settings, mtu));
    let device = format!("{name}{}{args}", if args.is_empty() { "" } else { "," });
    let device = device.replace(",,", ",");
    let device = cstring(&device)?;
    // SAFETY: reads a C string.
    let code = unsafe { sys::rte_dev_probe(device.as_ptr()) };
    match (code, port_of(name)) {
        // EAL says 0 of a device that no driver took.
        (0, Some(port)) => Ok(port),
        (0, None) => Err(Failure::new(libc::ENODEV, "")),
        (code, _) => Err(Failure::new(-code, "")),
    }
}

fn cstring(text: &str) -> Result<CString, Failure> {
    CString::new(text).map_err(|_nul| Failure::new(libc::EINVAL, "a zero byte in the name"))
}

/// The port of the device `name`.
fn port_of(name: &str) -> Option<u16> {
    let name = cstring(name).ok()?;
    let mut port = 0;
    // SAFETY: reads a C string and writes a number of ours.
    let code = unsafe { sys::rte_eth_dev_get_port_by_name(name.as_ptr(), &mut port) };
    (code == 0).then_some(port)
}

/// What the driver says of its device.
fn info(port: u16) -> Result<sys::rte_eth_dev_info, Failure> {
    let mut info = MaybeUninit::<sys::rte_eth_dev_info>::zeroed();
    // SAFETY: fills a struct that is ours; zeros are one.
    let (code, info) = unsafe {
        let code = sys::rte_eth_dev_info_get(port, info.as_mut_ptr());
        (code, info.assume_init())
    };
    if code == 0 { Ok(info) } else { Err(failed("asking the driver", code)) }
}

/// `what` ended with the negative errno `code`; what DPDK said of it is added by the caller.
fn failed(what: &str, code: i32) -> Failure {
    let errno = code.abs();
    let error = std::io::Error::from_raw_os_error(errno);
    Failure::new(errno, format!("{what}: {error}"))
}

/// Configures the port, with one queue each way, and starts it.
fn setup(undo: Undo, pmd: &Pmd, settings: &DpdkSettings, mtu: usize) -> Result<Device, Failure> {
    let port = undo.port;
    let info = info(port)?;
    // SAFETY: the name is a static string of the driver, or null.
    let driver = unsafe { info.driver_name.as_ref().map(|name| CStr::from_ptr(name)) };
    let driver = driver.map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    // SAFETY: zeros are the configuration with nothing special.
    let mut conf: sys::rte_eth_conf = unsafe { MaybeUninit::zeroed().assume_init() };
    if pmd.mtu == Mtu::Driver {
        let most = usize::from(info.max_mtu).min(MTU_MOST);
        if mtu > most {
            let why = format!("mtu {mtu} is more than {driver} can");
            return Err(Failure::new(libc::EINVAL, why).mend(format!("write mtu={most} or less")));
        }
        conf.rxmode.mtu = mtu as u32;
    }
    // SAFETY: a port that is not started; the struct is read.
    let code = unsafe { sys::rte_eth_dev_configure(port, 1, 1, &conf) };
    if code != 0 {
        return Err(failed("configuring", code));
    }
    let frame_max = ETH_HDR_LEN + mtu;
    let room = pmd.room(settings, mtu, frame_max).max(info.min_rx_bufsize as usize);
    let ring = u16::try_from(settings.ring_len).unwrap_or(u16::MAX);
    let (mut rx, mut tx) = (ring, ring);
    // SAFETY: writes two numbers of ours.
    let code = unsafe { sys::rte_eth_dev_adjust_nb_rx_tx_desc(port, &mut rx, &mut tx) };
    if code != 0 {
        return Err(failed("choosing the length of the queues", code));
    }
    // SAFETY: asks for a number.
    let socket = unsafe { sys::rte_eth_dev_socket_id(port) };
    let ring_total = (usize::from(rx) + usize::from(tx)).max(pmd.held());
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
        irq_guard: pmd.is("net_memif").then(|| irq_guard::join(port)),
        undo,
    };
    let up =
        queues(port, rx, tx, socket as u32, pool).and_then(|()| bring_up(&mut device, settings));
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

/// The queues are made with what the driver likes best.
fn queues(port: u16, rx: u16, tx: u16, socket: u32, pool: Pool) -> Result<(), Failure> {
    // SAFETY: a configured port and a pool that outlives it; null asks for the driver's defaults.
    let code = unsafe {
        match sys::rte_eth_rx_queue_setup(port, 0, rx, socket, std::ptr::null(), pool.0) {
            0 => sys::rte_eth_tx_queue_setup(port, 0, tx, socket, std::ptr::null()),
            code => code,
        }
    };
    if code == 0 { Ok(()) } else { Err(failed("making the queues", code)) }
}

fn bring_up(device: &mut Device, settings: &DpdkSettings) -> Result<(), Failure> {
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
    // SAFETY: a started port. Group addresses are needed for broadcasts of the fabric only, and
    // drivers that filter nothing refuse to be told.
    unsafe { sys::rte_eth_allmulticast_enable(port) };
    let filters_us =
        !device.pmd.own_mac && settings.mac.is_some() && device_address(port) != Some(device.mac);
    if filters_us || settings.promiscuous {
        // SAFETY: a started port. The only other way to get frames to an address that is not its
        // own.
        unsafe { sys::rte_eth_promiscuous_enable(port) };
    }
    device.link_bps = link(port).1;
    if let Some(ethertype) = settings.ethertype {
        super::steer::steer(port, ethertype)?;
    }
    Ok(())
}

/// The address in the driver's keeping.
fn device_address(port: u16) -> Option<MacAddr> {
    let mut addr = sys::rte_ether_addr { addr_bytes: [0; 6] };
    // SAFETY: fills a struct that is ours.
    let code = unsafe { sys::rte_eth_macaddr_get(port, &mut addr) };
    (code == 0).then_some(MacAddr(addr.addr_bytes))
}

/// The address that the port answers to: the one asked for, the device's, or a random one.
fn address(port: u16, pmd: &Pmd, settings: &DpdkSettings) -> MacAddr {
    if let Some(mac) = settings.mac {
        if pmd.own_mac {
            return mac;
        }
        let mut addr = sys::rte_ether_addr { addr_bytes: mac.0 };
        // SAFETY: reads a struct that is ours. A driver that cannot is made promiscuous.
        unsafe { sys::rte_eth_dev_default_mac_addr_set(port, &mut addr) };
        return mac;
    }
    match device_address(port) {
        Some(mac) if !pmd.own_mac && mac.is_single() => mac,
        _ => MacAddr::random(),
    }
}

/// Makes the packet buffers of a port.
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
    reap();
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

/// Frees pools all of whose buffers are back.
fn reap() {
    lock(&RETIRED).retain(|&Pool(pool, count)| {
        // SAFETY: a pool that was not freed; its device is gone, so its buffers are in the pool or
        // in a ring of another device, and only what is whole is freed.
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

/// Makes a port of one end of the pair `name`, and says which end it is.
fn open_ring(settings: &DpdkSettings, name: &str) -> Result<(u16, usize), Failure> {
    let mut links = lock(&LINKS);
    let links = links.get_or_insert_default();
    if !links.contains_key(name) {
        links.insert(name.to_owned(), Link::make(name, settings.ring_len)?);
    }
    let link = links.get_mut(name).expect("it was just inserted");
    let Some(end) = link.taken.iter().position(|taken| !taken) else {
        let taken = Failure::new(libc::EBUSY, format!("both ends of pair={name} are taken"));
        return Err(taken.mend("choose another name"));
    };
    let device = cstring(&settings.device)?;
    let (rx, tx) = (link.rings[end].0, link.rings[1 - end].0);
    // SAFETY: reads a C string and two arrays of one ring each, which live until both ends are
    // closed.
    let port = unsafe { sys::rte_eth_from_rings(device.as_ptr(), &rx, 1, &tx, 1, 0) };
    match u16::try_from(port) {
        Ok(port) => {
            link.taken[end] = true;
            Ok((port, end))
        }
        Err(_negative) => {
            free_unused(links, name);
            let why = format!("{} is open in this process already", settings.device);
            Err(Failure::new(libc::EBUSY, why).mend("choose another name"))
        }
    }
}

impl Link {
    fn make(name: &str, ring_len: usize) -> Result<Self, Failure> {
        let mut link = Self { rings: [Ring(null_mut()); 2], taken: [false; 2] };
        for (i, ring) in link.rings.iter_mut().enumerate() {
            let name = cstring(&format!("bw{i}-{name}"))?;
            // One port sends to it and one receives from it, each from one thread at a time.
            let flags = sys::RING_F_SP_ENQ | sys::RING_F_SC_DEQ;
            let count = ring_len.next_power_of_two() as u32;
            // SAFETY: reads a C string.
            ring.0 = unsafe { sys::rte_ring_create(name.as_ptr(), count, -1, flags) };
            if ring.0.is_null() {
                return Err(failed("making a ring", errno()));
            }
        }
        Ok(link)
    }
}

impl Drop for Link {
    /// Nobody has an end any more. The frames that are in the rings go with them.
    fn drop(&mut self) {
        for Ring(ring) in self.rings.into_iter().filter(|ring| !ring.0.is_null()) {
            let mut mbuf = null_mut();
            // SAFETY: what is in the ring are packets, which are ours, as the ring is.
            unsafe {
                while sys::rte_ring_dequeue_burst(ring, &mut mbuf, 1, null_mut()) == 1 {
                    sys::rte_pktmbuf_free(mbuf.cast());
                }
                sys::rte_ring_free(ring);
            }
        }
    }
}

/// Gives an end back. The rings go with the second one.
fn leave_link(name: &str, end: usize) {
    let mut links = lock(&LINKS);
    let Some(links) = links.as_mut() else { return };
    if let Some(link) = links.get_mut(name) {
        link.taken[end] = false;
    }
    free_unused(links, name);
}

/// Frees a pair of which nobody has an end.
fn free_unused(links: &mut HashMap<String, Link>, name: &str) {
    if links.get(name).is_some_and(|link| link.taken == [false; 2]) {
        links.remove(name);
    }
}
