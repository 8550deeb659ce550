//! Hash tables of numbers that clients can influence.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher, RandomState};

/// A table by number. Numbers are mixed by a key of the process, so that no client can choose some that collide.
pub type NumberMap<V> = HashMap<u64, V, Mixing>;

/// Makes hashers with a key that every table has for itself.
#[derive(Debug, Clone, Copy)]
pub struct Mixing(u64);

impl Default for Mixing {
    fn default() -> Mixing {
        Mixing(mixing_key())
    }
}

impl BuildHasher for Mixing {
    type Hasher = Mixer;

    fn build_hasher(&self) -> Mixer {
        Mixer { key: self.0, mixed: 0 }
    }
}

/// An odd random number.
pub fn mixing_key() -> u64 {
    RandomState::new().build_hasher().finish() | 1
}

/// Folds the product of a number and the key: a third of the cost of SipHash.
#[derive(Debug)]
pub struct Mixer {
    key: u64,
    mixed: u64,
}

impl Hasher for Mixer {
    fn write_u64(&mut self, number: u64) {
        let product = u128::from(self.mixed ^ number ^ self.key) * u128::from(self.key);
        self.mixed = (product >> 64) as u64 ^ product as u64;
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64((*byte).into()));
    }

    fn finish(&self) -> u64 {
        self.mixed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_differ_in_few_bits_are_spread_and_every_table_has_its_own_key() {
        let (mixing, other) = (Mixing::default(), Mixing::default());
        for shift in [0, 20, 56] {
            let low: std::collections::HashSet<u64> =
                (0..256).map(|number: u64| mixing.hash_one(number << shift) % 4096).collect();
            assert!(low.len() > 200, "{shift}: {}", low.len());
        }
        assert_ne!(mixing.hash_one(7u64), other.hash_one(7u64));
    }
}
