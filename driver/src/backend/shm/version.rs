//! Version of the segment layout that this process speaks.

use super::layout::VERSION;

/// Test builds speak a layout of this version instead, which differs in nothing else.
#[cfg(debug_assertions)]
const PRETENDED: &str = "BAREWIRE_TEST_LAYOUT";

/// [`VERSION`]; in a test build, what the environment says.
pub(crate) fn version() -> u64 {
    #[cfg(debug_assertions)]
    {
        static READ: std::sync::LazyLock<u64> = std::sync::LazyLock::new(|| {
            let text = std::env::var(PRETENDED);
            text.ok().and_then(|text| text.parse().ok()).unwrap_or(VERSION)
        });
        *READ
    }
    #[cfg(not(debug_assertions))]
    VERSION
}
