//! Statistics of samples.

/// Repeated measurements of one quantity.
#[derive(Clone, Debug, Default)]
pub struct Sample(Vec<f64>);

impl Sample {
    /// Reserves `n` measurements, so that measuring does not allocate.
    pub fn with_capacity(n: usize) -> Self {
        Self(Vec::with_capacity(n))
    }

    /// Adds a measurement.
    #[inline]
    pub fn push(&mut self, value: f64) {
        self.0.push(value);
    }

    /// Adds the measurements of another sample.
    pub fn extend(&mut self, other: &Self) {
        self.0.extend_from_slice(&other.0);
    }

    /// Number of measurements.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are no measurements.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The quantile `q` (0 to 1); 0 if there are no measurements.
    pub fn quantile(&self, q: f64) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let at = (sorted.len() as f64 * q) as usize;
        sorted.get(at.min(sorted.len().saturating_sub(1))).copied().unwrap_or(0.0)
    }

    /// The median.
    pub fn median(&self) -> f64 {
        self.quantile(0.5)
    }

    /// The minimum.
    pub fn min(&self) -> f64 {
        self.quantile(0.0)
    }
}

impl FromIterator<f64> for Sample {
    fn from_iter<I: IntoIterator<Item = f64>>(iter: I) -> Self {
        Self(iter.into_iter().collect())
    }
}

/// The median of `values`; 0 if there are none.
pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    values.into_iter().collect::<Sample>().median()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_values_of_the_sample() {
        let sample: Sample = (0..100).rev().map(f64::from).collect();
        assert_eq!((sample.min(), sample.median(), sample.quantile(0.99)), (0.0, 50.0, 99.0));
        assert_eq!(sample.quantile(1.0), 99.0);
        assert_eq!(median([]), 0.0);
        assert_eq!(median([3.0, 1.0, 2.0]), 2.0);
    }
}
