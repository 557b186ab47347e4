//! Deterministic simulator of whole nodes.
//!
//! Real nodes and the real codec exchange bytes over a virtual segment in virtual time. Faults, the
//! applications' calls and the moments at which anybody looks are drawn from one seed. A failure
//! prints `SIM_SEED=n`, and with that in the environment the same stage runs that seed alone
//! (`SIM_SEED=1000..2000`: those); `SIM_TRACE=1` prints every frame. `SIM_NIGHTLY=1` runs the large
//! sizes.
//!
//! - [`plan`]: what a seed decides. [`net`]: time and the segment. [`switches`]:
//!   the driver's, between the two. [`arena`]: the applications'
//!   memory. [`caller`], [`onesided`]: what they call, [`entries`]: by which ways. [`ledger`],
//!   [`remote`]: the checker. [`world`]: the run.
//! - [`coll`]: groups on bare nodes, and what collectives must give. [`board`]: the memory that
//!   they may share.
//! - [`tcp`]: other tenants in a switch's port.
//! - `stages`: the tests.

mod alloc;
mod arena;
mod board;
mod caller;
#[path = "../atomics/cases.rs"]
mod cases;
mod coll;
mod entries;
mod ledger;
mod net;
mod onesided;
mod plan;
mod remote;
mod rig;
mod stages;
mod switches;
mod tcp;
#[path = "../atomics/values.rs"]
mod values;
mod world;

use barewire_tests::rng;
