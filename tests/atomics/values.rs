//! Values that find mistakes: the edges of every type, and random ones near them.

use barewire_dataplane::proto::atomic::Datatype;

/// xorshift64*, seeded by the case so that a failure repeats.
pub(crate) struct Rng(u64);

impl Rng {
    /// A generator of its own for every `seed`.
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// 64 random bits.
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// One of `from`.
    pub(crate) fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[(self.next() >> 33) as usize % from.len()]
    }
}

/// The part type of a complex type, the type itself else.
fn part(ty: Datatype) -> Datatype {
    match ty {
        Datatype::FloatComplex => Datatype::Float,
        Datatype::DoubleComplex => Datatype::Double,
        Datatype::LongDoubleComplex => Datatype::LongDouble,
        other => other,
    }
}

/// 0, 1, -1, limits and what lies beside them; for 8 bits, everything.
fn integer_edges(size: usize) -> Vec<Vec<u8>> {
    if size == 1 {
        return (0..=255_u8).map(|v| vec![v]).collect();
    }
    let bits = 8 * size as u32;
    let top = 1_u128 << (bits - 1);
    let half = 1_u128 << (bits / 2);
    let odd = 0xf39c_c060_5ced_c834_9e37_79b9_7f4a_7c15_u128;
    let plain = [0, 1, 2, 3, half - 1, half, half + 1, top - 1, top, top + 1, odd, odd >> 7];
    let all = plain.iter().flat_map(|v| [*v, !*v, v.wrapping_neg()]);
    all.map(|v| v.to_le_bytes()[..size].to_vec()).collect()
}

/// Zeros, ones, the ends of normal and subnormal numbers, infinities, and NaNs, quiet and
/// signalling, with payloads; each with both signs.
fn real_edges(ty: Datatype) -> Vec<Vec<u8>> {
    let both = |bits: &[u64], sign: u64| -> Vec<u64> {
        bits.iter().flat_map(|v| [*v, *v | sign]).collect()
    };
    match ty {
        Datatype::Float => {
            let f = |v: f32| u64::from(v.to_bits());
            let bits = [
                f(0.0),
                f(1.0),
                f(1.5),
                f(3.0),
                f(f32::EPSILON),
                f(1.0 + f32::EPSILON),
                f(f32::MAX),
                f(f32::MIN_POSITIVE),
                1,
                0x7f_ffff,
                f(1e-30),
                f(1e30),
                f(f32::INFINITY),
                0x7fc0_0000,
                0x7fc0_1234,
                0x7f80_0001,
                0x7fbf_ffff,
            ];
            both(&bits, 1 << 31).iter().map(|v| v.to_le_bytes()[..4].to_vec()).collect()
        }
        Datatype::Double => {
            let bits = [
                0,
                1.0_f64.to_bits(),
                1.5_f64.to_bits(),
                3.0_f64.to_bits(),
                f64::EPSILON.to_bits(),
                (1.0 + f64::EPSILON).to_bits(),
                f64::MAX.to_bits(),
                f64::MIN_POSITIVE.to_bits(),
                1,
                (1 << 52) - 1,
                1e-200_f64.to_bits(),
                1e200_f64.to_bits(),
                f64::INFINITY.to_bits(),
                0x7ff8 << 48,
                (0x7ff8 << 48) | 0x1234,
                (0x7ff0 << 48) | 1,
                (0x7ff8 << 48) - 1,
            ];
            both(&bits, 1 << 63).iter().map(|v| v.to_le_bytes().to_vec()).collect()
        }
        Datatype::Float16 => half_edges(10),
        Datatype::Bfloat16 => half_edges(7),
        Datatype::Float8E4M3 | Datatype::Float8E5M2 => (0..=255_u8).map(|v| vec![v]).collect(),
        _ => long_double_edges(),
    }
}

/// As `real_edges`, of 16 bits with so many of mantissa.
fn half_edges(mantissa: u32) -> Vec<Vec<u8>> {
    let (infinity, last) = (0x7fff_u16 >> mantissa << mantissa, 1_u16 << mantissa);
    let one = infinity / 2 / last * last;
    let bits = [
        0,
        one,
        one + last / 2,
        one + last + last / 2,
        one - mantissa as u16 * last,
        one | 1,
        infinity - 1,
        last,
        1,
        last - 1,
        one / 3,
        one + one / 3,
        infinity,
        infinity + last / 2,
        infinity + last / 2 + 1,
        infinity + 1,
        infinity + last / 2 - 1,
    ];
    bits.into_iter().flat_map(|v| [v, v | 0x8000]).map(|v| v.to_le_bytes().to_vec()).collect()
}

/// As `real_edges`, with the encodings that only the x87 has: pseudo-denormals, which are numbers,
/// and unnormals, pseudo-infinities and pseudo-NaNs, which count as NaNs.
fn long_double_edges() -> Vec<Vec<u8>> {
    const ONE: u64 = 1 << 63;
    let values: [(u16, u64); 20] = [
        (0, 0),
        (0x3fff, ONE),
        (0x3fff, 0xc000 << 48),
        (0x4000, 0xc000 << 48),
        (0x3fff - 63, ONE),
        (0x3fff, ONE | 1),
        (0x7ffe, u64::MAX),
        (1, ONE),
        (0, 1),
        (0, ONE - 1),
        (0, ONE), // pseudo-denormal
        (0x0800, 0xabcd << 48),
        (0x7000, 0xabcd << 48),
        (0x7fff, ONE),
        (0x7fff, 0xc000 << 48),
        (0x7fff, (0xc000 << 48) | 0x1234),
        (0x7fff, ONE | 1),
        (0x3fff, 1), // unnormal
        (0x7fff, 0), // pseudo-infinity
        (0x7fff, 1), // pseudo-NaN
    ];
    let signed = values.iter().flat_map(|(exp, man)| [(*exp, *man), (*exp | 0x8000, *man)]);
    signed.map(|(exponent, significand)| long_double(exponent, significand)).collect()
}

/// The 16 bytes, with the padding zero.
fn long_double(exponent: u16, significand: u64) -> Vec<u8> {
    let mut bytes = significand.to_le_bytes().to_vec();
    bytes.extend_from_slice(&exponent.to_le_bytes());
    bytes.resize(16, 0);
    bytes
}

/// The edges of a type; of a complex one, combinations of its parts' edges.
pub(crate) fn edges(ty: Datatype) -> Vec<Vec<u8>> {
    if ty.is_integer() {
        return integer_edges(ty.size());
    }
    let parts = real_edges(part(ty));
    if !ty.is_complex() {
        return parts;
    }
    // Every value as the real and as the imaginary part, beside zero and beside a value of another
    // kind: some 130 numbers, so 17,000 products.
    let mut all = Vec::new();
    for (i, value) in parts.iter().enumerate() {
        let other = &parts[(i * 5 + 3) % parts.len()];
        all.push([&value[..], &parts[0]].concat());
        all.push([&parts[0][..], value].concat());
        all.push([&value[..], other].concat());
        all.push([&value[..], value].concat());
    }
    all
}

/// Random elements of one type: edges, random bits, and numbers of moderate size.
pub(crate) struct Random {
    ty: Datatype,
    /// Edges of the type, or of its parts if it is complex.
    edges: Vec<Vec<u8>>,
    rng: Rng,
}

impl Random {
    /// Values of `ty` that depend on `seed` alone.
    pub(crate) fn new(ty: Datatype, seed: u64) -> Self {
        Self { ty, edges: edges(part(ty)), rng: Rng::new(seed) }
    }

    /// The next element.
    pub(crate) fn element(&mut self) -> Vec<u8> {
        let parts = if self.ty.is_complex() { 2 } else { 1 };
        (0..parts).flat_map(|_| self.part()).collect()
    }

    fn part(&mut self) -> Vec<u8> {
        let (ty, rng) = (part(self.ty), &mut self.rng);
        let bits = rng.next();
        match (ty, rng.next() % 16) {
            (_, 0..2) => rng.pick(&self.edges).clone(),
            (Datatype::Float, 2..9) => ((bits as i32) as f32 / 65536.0).to_le_bytes().to_vec(),
            (Datatype::Double, 2..9) => ((bits as i64) as f64 / 65536.0).to_le_bytes().to_vec(),
            (Datatype::LongDouble, 2..9) => {
                long_double(0x3ff0 + (rng.next() % 32) as u16, bits | 1 << 63)
            }
            (Datatype::LongDouble, _) => long_double(rng.next() as u16, bits),
            _ => (u128::from(bits) << 64 | u128::from(rng.next())).to_le_bytes()[..ty.size()]
                .to_vec(),
        }
    }
}

/// Whether two elements are the same bytes, where both are a NaN aside. Part by part.
pub(crate) fn same_but_for_nans(ty: Datatype, one: &[u8], other: &[u8]) -> bool {
    if ty.is_integer() {
        return one == other;
    }
    let ty = part(ty);
    let mut parts = one.chunks(ty.size()).zip(other.chunks(ty.size()));
    parts.all(|(a, b)| a == b || is_nan(ty, a) && is_nan(ty, b))
}

fn is_nan(ty: Datatype, bytes: &[u8]) -> bool {
    let low = |at: usize| bytes.get(at).map_or(0, |b| u16::from(*b));
    let magnitude = |bits: u32| (low(0) | low(1) << 8) & ((1 << bits) - 1);
    match ty {
        Datatype::Float16 => magnitude(15) > 0x7c00,
        Datatype::Bfloat16 => magnitude(15) > 0x7f80,
        Datatype::Float8E4M3 => magnitude(7) == 0x7f,
        Datatype::Float8E5M2 => magnitude(7) > 0x7c,
        Datatype::Float => f32::from_le_bytes(bytes.try_into().unwrap()).is_nan(),
        Datatype::Double => f64::from_le_bytes(bytes.try_into().unwrap()).is_nan(),
        _ => {
            let significand = u64::from_le_bytes(bytes[..8].try_into().unwrap());
            let exponent = u16::from_le_bytes(bytes[8..10].try_into().unwrap());
            let padded = bytes[10..].iter().all(|b| *b == 0);
            padded && exponent & 0x7fff == 0x7fff && significand << 1 != 0
        }
    }
}
