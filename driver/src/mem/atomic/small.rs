//! The floats of 16 and 8 bits, which the processor has no arithmetic for.
//!
//! Sums and products are computed as `f32` and rounded once more, to what one rounding of the exact
//! value gives: the 24 bits of `f32` are at least twice those of the operands and two more
//! (Figueroa, "When is double rounding innocuous?", 1995). Of subnormal results, sums are exact as
//! `f32`, and so are products, down to half of the least number.

/// How a float is laid out: the sign on top, then the exponent, then `MANTISSA` bits.
pub(super) trait Format {
    /// Bits of the mantissa that are stored.
    const MANTISSA: u32;
    /// The sign bit.
    const SIGN: u32;
    /// What an exponent field says too much.
    const BIAS: u32;
    /// The magnitude of whatever is too large: infinity, or NaN where there is none.
    const OVERFLOW: u32;
    /// The magnitude of a quiet NaN.
    const NAN: u32;

    /// The value of `bits`; exact.
    #[inline(always)]
    fn widen(bits: u32) -> f32 {
        const { assert!(Self::BIAS < 127 || Self::MANTISSA == 7) };
        let magnitude = bits & (Self::SIGN - 1);
        let sign = if bits & Self::SIGN == 0 { 0 } else { 1 << 31 };
        let value = if magnitude < Self::OVERFLOW {
            // As if it had the exponent of `f32`, subnormal ones too; the rest of the exponent is a
            // factor.
            let factor = f32::from_bits((254 - Self::BIAS) << 23);
            f32::from_bits(magnitude << (23 - Self::MANTISSA)) * factor
        } else if magnitude == Self::OVERFLOW && Self::OVERFLOW != Self::NAN {
            f32::INFINITY
        } else {
            f32::NAN
        };
        f32::from_bits(value.to_bits() | sign)
    }

    /// The nearest float of the format, the even one of two.
    #[inline(always)]
    fn narrow(value: f32) -> u32 {
        let (shift, less) = (23 - Self::MANTISSA, 127 - Self::BIAS);
        let sign = if value.is_sign_negative() { Self::SIGN } else { 0 };
        let bits = value.to_bits() & !(1 << 31);
        let magnitude = if value.is_nan() {
            Self::NAN
        } else if bits >> 23 <= less && less > 0 {
            // Subnormal: a whole number of the least of them, which is the last bit of this.
            let least = f32::from_bits((less + 1 + shift) << 23);
            (f32::from_bits(bits) + least).to_bits() - least.to_bits()
        } else {
            let even = bits >> shift & 1;
            let rounded = (bits + (1 << (shift - 1)) - 1 + even) >> shift;
            (rounded - (less << Self::MANTISSA)).min(Self::OVERFLOW)
        };
        magnitude | sign
    }
}

/// A float of 16 or 8 bits.
macro_rules! small {
    ($(#[$doc:meta])* $name:ident($word:ty): $mantissa:literal, $bias:literal, $over:literal,
     $nan:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        #[repr(transparent)]
        pub(super) struct $name(pub(super) $word);

        impl Format for $name {
            const MANTISSA: u32 = $mantissa;
            const SIGN: u32 = 1 << (<$word>::BITS - 1);
            const BIAS: u32 = $bias;
            const OVERFLOW: u32 = $over;
            const NAN: u32 = $nan;
        }

        impl $name {
            pub(super) const ZERO: Self = Self(0);
            pub(super) const ONE: Self = Self($bias << $mantissa);

            #[inline(always)]
            pub(super) fn value(self) -> f32 {
                Self::widen(self.0.into())
            }

            #[inline(always)]
            pub(super) fn nearest(value: f32) -> Self {
                Self(Self::narrow(value) as $word)
            }
        }
    };
}

small! {
    /// IEEE binary16.
    F16(u16): 10, 15, 0x7c00, 0x7e00
}
small! {
    /// The upper half of an `f32`.
    Bf16(u16): 7, 127, 0x7f80, 0x7fc0
}
small! {
    /// OCP 8-bit floating point, E4M3: no infinity, and one NaN of each sign.
    E4m3(u8): 3, 7, 0x7f, 0x7f
}
small! {
    /// OCP 8-bit floating point, E5M2.
    E5m2(u8): 2, 15, 0x7c, 0x7e
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The next `f32` away from zero, or towards it.
    fn beside(value: f32, up: bool) -> f32 {
        let bits = value.to_bits();
        f32::from_bits(if up { bits + 1 } else { bits - 1 })
    }

    /// Goal: each number comes back, and what lies between two becomes the nearer one, or the even
    /// one. Method: the middle of all neighbours, and what lies beside it, with both signs.
    fn check<F: Format>(one: u32, largest: f32) {
        assert_eq!(F::widen(one), 1.0);
        assert_eq!(F::widen(F::OVERFLOW - 1), largest);
        assert_eq!(F::widen(1), 2.0_f32.powi(1 - F::BIAS as i32 - F::MANTISSA as i32));
        assert!(F::widen(F::NAN).is_nan() && F::widen(F::NAN | F::SIGN).is_nan());
        assert_eq!(F::narrow(f32::NAN) & !F::SIGN, F::NAN);
        for above in [f32::INFINITY, f32::MAX, 2.0 * largest] {
            assert_eq!(F::narrow(above), F::OVERFLOW);
            assert_eq!(F::narrow(-above), F::OVERFLOW | F::SIGN);
        }
        for low in 0..F::OVERFLOW {
            let value = F::widen(low);
            assert_eq!([F::narrow(value), F::narrow(-value)], [low, low | F::SIGN]);
            assert_eq!(F::widen(low | F::SIGN).to_bits(), (-value).to_bits());
            // Behind the largest the next would be as far away as the one before.
            let high = match low + 1 == F::OVERFLOW {
                true => f64::from(value) * 2.0 - f64::from(F::widen(low - 1)),
                false => f64::from(F::widen(low + 1)),
            };
            assert!(f64::from(value) < high);
            let middle = ((f64::from(value) + high) / 2.0) as f32;
            let even = low + (low & 1);
            for (between, nearest) in
                [(middle, even), (beside(middle, false), low), (beside(middle, true), low + 1)]
            {
                assert_eq!(F::narrow(between), nearest, "{between:e}");
                assert_eq!(F::narrow(-between), nearest | F::SIGN, "-{between:e}");
            }
        }
    }

    #[test]
    fn every_number_is_the_nearest_of_what_surrounds_it() {
        check::<F16>(0x3c00, 65_504.0);
        check::<Bf16>(0x3f80, f32::from_bits(0x7f7f_0000));
        check::<E4m3>(0x38, 448.0);
        check::<E5m2>(0x3c, 57_344.0);
    }
}
