//! libfabric provider of barewire: `libbarewire_fi.so`, which libfabric 1.17 and 2.x load.
//!
//! It only translates: tables of functions in C's calling convention over [`barewire::raw`], which
//! decides what is refused. It is not linked with libfabric, exports one symbol, lets no panic
//! cross to C, and takes no resources and starts no thread until a domain is opened.

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
mod stub;
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

/// The provider's record.
pub(crate) fn provider() -> *mut Provider {
    PROVIDER.0.get()
}

/// The entry point of a provider library.
///
/// libfabric calls it in every process, whichever provider the process uses, under its own lock. So
/// it only fills in a record and defines the parameters.
#[unsafe(no_mangle)]
pub extern "C" fn fi_prov_ini() -> *mut std::ffi::c_void {
    static ONCE: Once = Once::new();
    let told = std::panic::catch_unwind(|| {
        ONCE.call_once(|| {
            // An application requests the newest interface version of its library, and libfabric
            // skips a provider that supports only older ones.
            let newest = host::version().unwrap_or(0).max(barewire::API_VERSION);
            // SAFETY: once, before anybody else knows the record.
            let record = unsafe { &mut *provider() };
            record.fi_version = newest;
            // The names of the parameters begin with the name in the record, so they are defined
            // afterwards.
            host::define_params(record);
            let (name, version) = known_as::record();
            (record.name, record.version) = (name.as_ptr(), version);
        });
    });
    // Without parameters and version the record is as good as it was compiled.
    drop(told);
    provider().cast()
}

/// Does nothing: objects are freed when they are closed, or with the process.
unsafe extern "C" fn cleanup() {}
