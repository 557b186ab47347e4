//! Floating point the same on every target, whatever the application set on its thread.
//!
//! A program linked with `-ffast-math` runs with subnormals flushed to zero, one that computes
//! intervals with another rounding, and with manual progress it is their thread that executes a
//! peer's atomics. Rule S8 asks for IEEE defaults.

/// IEEE defaults from its making to its drop: nearest even, subnormals kept, no traps, and all 64
/// bits of the x87's significand.
pub(super) struct IeeeDefaults {
    #[cfg(target_arch = "x86_64")]
    mxcsr: u32,
    #[cfg(target_arch = "x86_64")]
    x87: u16,
}

/// MXCSR with every exception masked and nothing else set.
#[cfg(target_arch = "x86_64")]
const MXCSR: u32 = 0x1f80;
/// The bits of MXCSR that say what happened, which is the application's to keep.
#[cfg(target_arch = "x86_64")]
const MXCSR_FLAGS: u32 = 0x3f;
/// The x87's control word as the processor and Linux start it.
#[cfg(target_arch = "x86_64")]
const X87: u16 = 0x37f;
/// The bits of the control word that mean something: masks, precision, rounding.
#[cfg(target_arch = "x86_64")]
const X87_USED: u16 = 0x0f3f;

#[cfg(target_arch = "x86_64")]
impl IeeeDefaults {
    #[inline]
    pub(super) fn enter() -> Self {
        let (mut mxcsr, mut x87) = (0_u32, 0_u16);
        // SAFETY: both instructions only store a register to the variable given.
        unsafe {
            std::arch::asm!(
                "stmxcsr [{0}]", "fnstcw [{1}]",
                in(reg) &raw mut mxcsr, in(reg) &raw mut x87, options(nostack, preserves_flags),
            );
        }
        let old = Self { mxcsr, x87 };
        if old.differs() {
            set(MXCSR, X87);
        }
        old
    }

    fn differs(&self) -> bool {
        self.mxcsr & !MXCSR_FLAGS != MXCSR || self.x87 & X87_USED != X87 & X87_USED
    }
}

#[cfg(target_arch = "x86_64")]
impl Drop for IeeeDefaults {
    #[inline]
    fn drop(&mut self) {
        if self.differs() {
            set(self.mxcsr, self.x87);
        }
    }
}

/// Sets both control registers.
#[cfg(target_arch = "x86_64")]
#[cold]
fn set(mxcsr: u32, x87: u16) {
    // SAFETY: both instructions only load a register from the variable given. What is loaded are
    // the defaults that Rust assumes, or what the thread ran with before it called; both without
    // reserved bits, so nothing faults. No x87 exception can be pending that the new word unmasks:
    // the defaults mask all, and under them none becomes pending.
    unsafe {
        std::arch::asm!(
            "fnclex", "ldmxcsr [{0}]", "fldcw [{1}]",
            in(reg) &raw const mxcsr, in(reg) &raw const x87, options(nostack, preserves_flags),
        );
    }
}

#[cfg(not(target_arch = "x86_64"))]
impl IeeeDefaults {
    /// Nothing: on other processors the application's setting holds (docs/atomics.md, limits).
    pub(super) fn enter() -> Self {
        Self {}
    }
}
