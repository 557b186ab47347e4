//! What is fuzzed: one function a target, from arbitrary bytes to an assertion.
//!
//! The same bodies run three ways: `cargo test -p barewire-fuzz` replays `corpus/` and runs each
//! on random and on mutated inputs (`tests/replay.rs`), on any toolchain; with nightly and
//! `cargo-fuzz` each is a target of libFuzzer, from the root of the repository:
//!
//! ```text
//! cargo +nightly fuzz run --fuzz-dir fuzz/fuzz_targets frame_parser \
//!     target/fuzz/frame_parser fuzz/corpus/frame_parser
//! ```
//!
//! The first directory, to be made before, takes what libFuzzer finds; of that, what is short and
//! tells something is copied to `corpus/` by hand.
//!
//! To add a target: a body here, a line in [`TARGETS`], a file and a `[[bin]]` in `fuzz_targets/`,
//! and a directory of seeds. The test fails as long as one of them is missing.

mod api;
mod forge;
mod frame;
mod handshake;
mod input;
mod ip;
mod memif;
mod memory;
mod sack;
mod session;

pub use api::api_calls;
pub use frame::frame_parser;
pub use handshake::handshake;
pub use ip::ip_port;
pub use memif::memif;
pub use sack::sack;
pub use session::session;

/// The body of a target.
pub type Body = fn(&[u8]);

/// Every target by its name.
pub const TARGETS: &[(&str, Body)] = &[
    ("frame_parser", frame_parser),
    ("sack", sack),
    ("session", session),
    ("handshake", handshake),
    ("api_calls", api_calls),
    ("memif", memif),
    ("ip_port", ip_port),
];
