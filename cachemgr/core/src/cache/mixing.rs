//! Hash tables of numbers that clients can influence.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher, RandomState};

/// 2^64 over the golden ratio, odd.
const SPREAD: u64 = 0x9E37_79B9_7F4A_7C15;

/// A table by number. Numbers are mixed by a random key, so that no client can choose some that collide.
pub type NumberMap<V> = HashMap<u64, V, Mixing>;
/// The same by the number of a sequence.
pub type SequenceMap<V> = HashMap<i32, V, Mixing>;

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

/// Folds the product of a number and the key, and spreads it: a third of the cost of SipHash. The product alone would
/// crowd numbers at equal distances for one key in a hundred.
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

    fn write_i32(&mut self, number: i32) {
        self.write_u64(number as u32 as u64);
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64((*byte).into()));
    }

    fn finish(&self) -> u64 {
        self.mixed.wrapping_mul(SPREAD).rotate_left(32) // tables take the lowest bits and the highest ones
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_at_equal_distances_are_spread_for_every_key() {
        let mut key = 1u64;
        for _ in 0..1000 {
            key = key.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let mixing = Mixing(key | 1);
            for shift in [0, 20, 56] {
                let low: std::collections::HashSet<u64> =
                    (0..256).map(|number: u64| mixing.hash_one(number << shift) % 4096).collect();
                assert!(low.len() > 230, "key {key}, shift {shift}: {}", low.len()); // 248 is the mean of random ones
            }
        }
    }

    #[test]
    fn every_table_has_its_own_key() {
        assert_ne!(Mixing::default().hash_one(7u64), Mixing::default().hash_one(7u64));
    }
}
