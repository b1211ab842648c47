//! Random numbers, the zipf distribution, and what is computed from samples.

use serde::Serialize;

/// SplitMix64: small, fast, and the same sequence for the same seed.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// A generator whose sequence is given by `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `end`, by multiplication: the bias is far below what a benchmark can see.
    pub fn below(&mut self, end: usize) -> usize {
        let wide = u128::from(self.bits()) * end as u128;
        usize::try_from(wide >> 64).expect("below a usize")
    }

    /// A number in `0.0..1.0`.
    fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// Draws from `0..n` with probability proportional to `1 / (rank + 1)^exponent`, in constant time.
#[derive(Debug)]
pub(crate) struct Zipf {
    /// For each rank: the share of its column that is its own, and who has the rest.
    columns: Vec<(f64, u32)>,
}

impl Zipf {
    /// Builds the alias table (Vose).
    pub(crate) fn new(n: usize, exponent: f64) -> Self {
        let weights: Vec<f64> = (1..=n).map(|rank| (rank as f64).powf(-exponent)).collect();
        let total: f64 = weights.iter().sum();
        let mut share: Vec<f64> = weights.iter().map(|weight| weight / total * n as f64).collect();
        let mut columns: Vec<(f64, u32)> = vec![(1.0, 0); n];
        let (mut small, mut large): (Vec<usize>, Vec<usize>) =
            (0..n).partition(|&rank| share[rank] < 1.0);
        while let (Some(under), Some(&over)) = (small.pop(), large.last()) {
            columns[under] = (share[under], u32::try_from(over).expect("fewer than 2^32 keys"));
            share[over] -= 1.0 - share[under];
            if share[over] < 1.0 {
                large.pop();
                small.push(over);
            }
        }
        Self { columns }
    }

    /// The next rank, 0 the most frequent.
    pub(crate) fn draw(&self, random: &mut Random) -> usize {
        let column = random.below(self.columns.len());
        let (own, other) = self.columns[column];
        if random.unit() < own { column } else { other as usize }
    }
}

/// The middle and the ends of a few figures, one per round.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Spread {
    /// The median.
    pub(crate) median: f64,
    /// The smallest.
    pub(crate) min: f64,
    /// The largest.
    pub(crate) max: f64,
}

impl Spread {
    /// Of nothing there is none.
    pub(crate) fn of(figures: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut sorted: Vec<f64> =
            figures.into_iter().filter(|figure| figure.is_finite()).collect();
        sorted.sort_by(f64::total_cmp);
        let (&min, &max) = (sorted.first()?, sorted.last()?);
        let half = sorted.len() / 2;
        let median = if sorted.len() % 2 == 1 {
            sorted[half]
        } else {
            f64::midpoint(sorted[half - 1], sorted[half])
        };
        Some(Self { median, min, max })
    }
}

/// Jain's index of fairness: 1 if all got the same, 1/n if one got everything.
pub(crate) fn jain(shares: &[u64]) -> f64 {
    let sum: f64 = shares.iter().map(|&share| share as f64).sum();
    let squares: f64 = shares.iter().map(|&share| (share as f64).powi(2)).sum();
    if squares == 0.0 { 1.0 } else { sum * sum / (shares.len() as f64 * squares) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zipf_follows_its_weights() {
        let zipf = Zipf::new(10_000, 0.99);
        let mut random = Random::new(7);
        let mut drawn = vec![0_u32; 10_000];
        let draws = 1_000_000;
        for _ in 0..draws {
            drawn[zipf.draw(&mut random)] += 1;
        }
        let total: f64 = (1..=10_000).map(|rank| f64::from(rank).powf(-0.99)).sum();
        for rank in [1_u32, 2, 3, 10, 100] {
            let expected = f64::from(rank).powf(-0.99) / total * f64::from(draws);
            let seen = f64::from(drawn[rank as usize - 1]);
            assert!((seen / expected - 1.0).abs() < 0.1, "rank {rank}: {seen} of {expected}");
        }
    }

    #[test]
    fn zipf_of_one_key_draws_it() {
        assert_eq!(Zipf::new(1, 0.99).draw(&mut Random::new(1)), 0);
    }

    #[test]
    fn random_stays_below() {
        let mut random = Random::new(3);
        assert!((0..10_000).all(|_| random.below(7) < 7));
        assert!((0..10_000).all(|_| (0.0..1.0).contains(&random.unit())));
    }

    #[test]
    fn spread_takes_the_middle() {
        let spread = |figures: &[f64]| Spread::of(figures.iter().copied());
        assert_eq!(spread(&[]), None);
        assert_eq!(spread(&[3.0, 1.0, 2.0]), Some(Spread { median: 2.0, min: 1.0, max: 3.0 }));
        assert_eq!(spread(&[4.0, 1.0]), Some(Spread { median: 2.5, min: 1.0, max: 4.0 }));
        assert_eq!(
            spread(&[f64::NAN, 1.0, f64::INFINITY]),
            Some(Spread { median: 1.0, min: 1.0, max: 1.0 })
        );
    }

    #[test]
    fn jain_knows_fair_and_unfair() {
        assert_eq!(jain(&[5, 5, 5, 5]), 1.0);
        assert_eq!(jain(&[8, 0, 0, 0]), 0.25);
        assert_eq!(jain(&[0, 0]), 1.0);
    }
}
