//! Complex numbers as C's compilers compute them.

/// What the parts of a complex number can do. Comparisons with a NaN are false.
pub(super) trait Real: Copy {
    const ZERO: Self;
    const ONE: Self;
    const INFINITY: Self;

    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn equals(self, other: Self) -> bool;
    fn less(self, other: Self) -> bool;
    /// This magnitude with the sign of `sign`.
    fn copysign(self, sign: Self) -> Self;

    fn is_nan(self) -> bool {
        !self.equals(self)
    }

    fn is_infinite(self) -> bool {
        !self.is_nan() && self.sub(self).is_nan()
    }
}

macro_rules! real {
    ($float:ty) => {
        impl Real for $float {
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            const INFINITY: Self = Self::INFINITY;

            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self + other
            }

            #[inline(always)]
            fn sub(self, other: Self) -> Self {
                self - other
            }

            #[inline(always)]
            fn mul(self, other: Self) -> Self {
                self * other
            }

            #[inline(always)]
            fn equals(self, other: Self) -> bool {
                self == other
            }

            #[inline(always)]
            fn less(self, other: Self) -> bool {
                self < other
            }

            #[inline(always)]
            fn copysign(self, sign: Self) -> Self {
                self.copysign(sign)
            }
        }
    };
}

real!(f32);
real!(f64);

/// `re + im i`, laid out as C does.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Complex<R> {
    pub(super) re: R,
    pub(super) im: R,
}

impl<R: Real> Complex<R> {
    #[inline(always)]
    pub(super) fn sum(self, other: Self) -> Self {
        Self { re: self.re.add(other.re), im: self.im.add(other.im) }
    }

    #[inline(always)]
    pub(super) fn equals(self, other: Self) -> bool {
        self.re.equals(other.re) && self.im.equals(other.im)
    }

    /// The product, with infinities that came out as NaN + NaN i recovered as C's Annex G asks.
    #[inline(always)]
    pub(super) fn product(self, other: Self) -> Self {
        let Self { re: a, im: b } = self;
        let Self { re: c, im: d } = other;
        let product = Self { re: a.mul(c).sub(b.mul(d)), im: a.mul(d).add(b.mul(c)) };
        if product.re.is_nan() && product.im.is_nan() {
            return self.recovered(other).unwrap_or(product);
        }
        product
    }

    /// An infinite product, if one of the factors or partial products is infinite.
    ///
    /// Source: ISO C, Annex G.5.1 (`_Cmultd`), which `__muldc3` of gcc and clang follow.
    #[cold]
    fn recovered(self, other: Self) -> Option<Self> {
        let Self { re: mut a, im: mut b } = self;
        let Self { re: mut c, im: mut d } = other;
        let overflowed = [a.mul(c), b.mul(d), a.mul(d), b.mul(c)].iter().any(|p| p.is_infinite());
        let mut again = false;
        if a.is_infinite() || b.is_infinite() {
            (a, b) = (boxed(a), boxed(b));
            (c, d) = (zero_for_nan(c), zero_for_nan(d));
            again = true;
        }
        if c.is_infinite() || d.is_infinite() {
            (c, d) = (boxed(c), boxed(d));
            (a, b) = (zero_for_nan(a), zero_for_nan(b));
            again = true;
        }
        if !again && overflowed {
            (a, b) = (zero_for_nan(a), zero_for_nan(b));
            (c, d) = (zero_for_nan(c), zero_for_nan(d));
            again = true;
        }
        again.then(|| Self {
            re: R::INFINITY.mul(a.mul(c).sub(b.mul(d))),
            im: R::INFINITY.mul(a.mul(d).add(b.mul(c))),
        })
    }
}

/// 1 for an infinity, 0 for anything else, with its sign.
fn boxed<R: Real>(part: R) -> R {
    if part.is_infinite() { R::ONE.copysign(part) } else { R::ZERO.copysign(part) }
}

/// The part, or 0 with its sign if it is a NaN.
fn zero_for_nan<R: Real>(part: R) -> R {
    if part.is_nan() { R::ZERO.copysign(part) } else { part }
}
