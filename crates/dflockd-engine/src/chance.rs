//! Where salts, secrets and seeds come from: the system, or a seed for the simulator.

use parking_lot::Mutex;
use rand::distr::{Distribution, StandardUniform};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// A source of chance.
pub enum Chance {
    /// What nobody can guess.
    System,
    /// What follows from a seed.
    Seeded(Box<Mutex<StdRng>>),
}

impl Chance {
    /// The chance that follows from a seed. For simulations only: whoever knows the seed knows all secrets.
    #[must_use]
    pub fn seeded(seed: u64) -> Self {
        Self::Seeded(Box::new(Mutex::new(StdRng::seed_from_u64(seed))))
    }

    /// A value at random.
    pub fn draw<T>(&self) -> T
    where
        StandardUniform: Distribution<T>,
    {
        match self {
            Self::System => rand::random(),
            Self::Seeded(rng) => rng.lock().random(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_same_values_again() {
        let draw = |seed: u64| -> Vec<u64> {
            let chance = Chance::seeded(seed);
            (0..4).map(|_| chance.draw()).collect()
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
        assert_ne!(Chance::System.draw::<u128>(), Chance::System.draw::<u128>());
    }
}
