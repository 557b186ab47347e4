//! The monotonic clock, cheap enough to read once a burst.

use std::sync::OnceLock;

/// Nanoseconds since an arbitrary moment before the first call; never goes backwards.
///
/// Reads the time-stamp counter (TSC) if the processor declares it invariant and the kernel has not
/// found it to differ between processors (one instruction and a multiplication), else
/// `CLOCK_MONOTONIC`. While the machine is suspended the TSC goes on, or restarts where
/// `/proc/cpuinfo` lacks `nonstop_tsc_s3`; `CLOCK_MONOTONIC` stands still.
#[inline]
pub fn now_ns() -> u64 {
    let c = CLOCK.get_or_init(Clock::calibrate);
    match c.tsc {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `_rdtsc` needs the TSC to be readable from user space, which `calibrate` saw.
        Some(t) => c.base_ns + t.to_ns(unsafe { std::arch::x86_64::_rdtsc() }.wrapping_sub(t.base)),
        #[cfg(not(target_arch = "x86_64"))]
        Some(_) => monotonic_ns(),
        None => monotonic_ns(),
    }
}

static CLOCK: OnceLock<Clock> = OnceLock::new();

struct Clock {
    base_ns: u64,
    tsc: Option<Tsc>,
}

/// Ticks to nanoseconds: `ticks * mult >> 32`.
#[derive(Clone, Copy)]
struct Tsc {
    base: u64,
    mult: u64,
}

impl Tsc {
    fn to_ns(self, ticks: u64) -> u64 {
        ((u128::from(ticks) * u128::from(self.mult)) >> 32) as u64
    }
}

impl Clock {
    fn calibrate() -> Self {
        Self { base_ns: monotonic_ns(), tsc: calibrate_tsc() }
    }
}

/// The kernel's usable clock sources. One that it found unreliable is not listed.
#[cfg(target_arch = "x86_64")]
const CLOCKSOURCES: &str = "/sys/devices/system/clocksource/clocksource0/available_clocksource";

/// Whether the time-stamp counter is among these clocks.
#[cfg(target_arch = "x86_64")]
fn has_tsc(clocksources: &str) -> bool {
    clocksources.split_whitespace().any(|name| name == "tsc")
}

/// Measures the counter against `CLOCK_MONOTONIC` for two milliseconds, or `None` if it is not
/// invariant or the kernel does not trust it.
#[cfg(target_arch = "x86_64")]
fn calibrate_tsc() -> Option<Tsc> {
    use std::arch::x86_64::{__cpuid, _rdtsc};
    if __cpuid(0x8000_0000).eax < 0x8000_0007 || __cpuid(0x8000_0007).edx & (1 << 8) == 0 {
        return None;
    }
    // Without /sys, the processor is trusted.
    if std::fs::read_to_string(CLOCKSOURCES).is_ok_and(|names| !has_tsc(&names)) {
        return None;
    }
    // SAFETY: user space may read the counter: Linux clears CR4.TSD except for processes that asked
    // for `PR_TSC_SIGSEGV`, which do not poll a fabric.
    let ticks = || unsafe { _rdtsc() };
    // A context switch between the two readings would skew the clock for the life of the process,
    // so the closest pair of several is used.
    let read = || {
        let pairs = (0..16).map(|_| (ticks(), monotonic_ns(), ticks()));
        let closest = pairs.min_by_key(|(before, _, after)| after.saturating_sub(*before));
        closest.map_or((0, 0), |(before, ns, after)| (before + (after - before) / 2, ns))
    };
    let (t0, n0) = read();
    while monotonic_ns().saturating_sub(n0) < 2_000_000 {
        std::hint::spin_loop();
    }
    let (t1, n1) = read();
    let ticks = t1.checked_sub(t0).filter(|&d| d > 0)?;
    let mult = (u128::from(n1 - n0) << 32) / u128::from(ticks);
    Some(Tsc { base: t0, mult: u64::try_from(mult).ok()? })
}

#[cfg(not(target_arch = "x86_64"))]
fn calibrate_tsc() -> Option<Tsc> {
    None
}

/// `CLOCK_MONOTONIC` itself, the same in every process of the machine: [`now_ns`] of two processes
/// drifts apart by what their calibrations differ.
pub(crate) fn monotonic_ns() -> u64 {
    let mut ts = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `clock_gettime` writes one timespec to a valid pointer; CLOCK_MONOTONIC exists on
    // every Linux, so the call cannot fail.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut ts) };
    ts.tv_sec as u64 * 1_000_000_000 + ts.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Both clocks, read with less than 20 us between them.
    fn both() -> (u64, u64) {
        loop {
            let before = monotonic_ns();
            let ns = now_ns();
            let after = monotonic_ns();
            if after - before < 20_000 {
                return (ns, before);
            }
        }
    }

    /// Goal: a TSC that the kernel removed from its list, as one that is not synchronised, is not
    /// used. Method: lists as kernels write them.
    #[test]
    #[cfg(target_arch = "x86_64")]
    fn a_counter_that_the_kernel_rejects_is_no_clock() {
        for (names, is) in [
            ("tsc hpet acpi_pm \n", true),
            ("kvm-clock tsc acpi_pm \n", true),
            ("hpet acpi_pm \n", false),
            ("tsc-early hpet \n", false),
            ("hyperv_clocksource_tsc_page acpi_pm \n", false),
        ] {
            assert_eq!(has_tsc(names), is, "{names}");
        }
    }

    #[test]
    fn clock_follows_clock_monotonic() {
        now_ns();
        let (a, m) = both();
        std::thread::sleep(std::time::Duration::from_millis(50));
        let (b, n) = both();
        let (da, dm) = (b - a, n - m);
        assert!(da.abs_diff(dm) < dm / 100, "50 ms measured as {da} ns against {dm} ns");
    }
}
