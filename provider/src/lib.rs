//! libfabric provider of barewire: `libbarewire_fi.so`, which libfabric 1.17 and 2.x load.
//!
//! It translates and decides nothing: tables of functions in C's calling convention in front of
//! [`barewire::raw`]. What is refused and why is decided below. Nothing here is linked with
//! libfabric, one symbol is exported, no panic crosses, and until a domain is opened nothing is
//! claimed and nothing runs.

mod abi;
mod addr;
mod atomic;
mod av;
mod cntr;
mod coll;
mod cq;
mod domain;
mod ep;
mod eq;
mod fabric;
mod guard;
mod host;
mod info;
mod known_as;
mod log;
mod mcast;
mod mem;
mod mr;
mod msg;
mod nic;
mod object;
mod pep;
mod poll;
mod rma;
mod sep;
mod srx;
mod stx;
mod wait;
mod work;

use std::cell::UnsafeCell;
use std::sync::Once;

use abi::{Context, Provider, version};

struct Shared(UnsafeCell<Provider>);

// SAFETY: we write the record in `fi_prov_ini` alone, under a `Once`; afterwards it is libfabric's,
// which keeps what it needs in `context` under its own lock.
unsafe impl Sync for Shared {}

static PROVIDER: Shared = Shared(UnsafeCell::new(Provider {
    version: version(0, 1),
    fi_version: barewire::API_VERSION,
    context: Context { internal: [std::ptr::null_mut(); 4] },
    name: c"barewire".as_ptr(),
    getinfo: info::getinfo,
    fabric: fabric::open,
    cleanup,
}));

/// Our record, as libfabric names it.
pub(crate) fn provider() -> *mut Provider {
    PROVIDER.0.get()
}

/// What libfabric looks for in a library of its directories.
///
/// It is called in every process that uses libfabric, whichever provider that wants, and under a
/// lock of libfabric's: so it fills in a record and tells the names of our parameters, no more.
#[unsafe(no_mangle)]
pub extern "C" fn fi_prov_ini() -> *mut std::ffi::c_void {
    static ONCE: Once = Once::new();
    let told = std::panic::catch_unwind(|| {
        ONCE.call_once(|| {
            // An application asks for the newest interface of its library, and libfabric leaves
            // out a provider that knows only older ones.
            let newest = host::version().unwrap_or(0).max(barewire::API_VERSION);
            // SAFETY: once, before anybody else knows the record.
            let record = unsafe { &mut *provider() };
            record.fi_version = newest;
            // The names of our parameters begin with the name that the record has by then.
            host::define_params(record);
            let (name, version) = known_as::record();
            (record.name, record.version) = (name.as_ptr(), version);
        });
    });
    // Without parameters and version the record is as good as it was compiled.
    drop(told);
    provider().cast()
}

/// Objects end when they are closed; what a process leaves open ends with it.
unsafe extern "C" fn cleanup() {}
