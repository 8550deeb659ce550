//! The prefix pins of blocks, which keep them from eviction.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use crate::cache::prefix::BlockId;
use crate::errors::{Result, broken};

/// The number of pinned prefixes with a block. Most blocks have none.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct PrefixPins {
    counts: HashMap<BlockId, u32>,
    num_idle: usize,
}

impl PrefixPins {
    /// True if a prefix pin keeps the block from being evicted.
    pub fn is_pinned(&self, block: BlockId) -> bool {
        !self.counts.is_empty() && self.counts.contains_key(&block)
    }

    /// The number of the block's prefix pins.
    pub fn count(&self, block: BlockId) -> u32 {
        self.counts.get(&block).copied().unwrap_or(0)
    }

    /// Pinned blocks.
    pub fn len(&self) -> usize {
        self.counts.len()
    }

    /// Pinned blocks without references and holds.
    pub fn num_idle(&self) -> usize {
        self.num_idle
    }

    /// A pinned block lost its last reference or hold, or an idle block is pinned.
    pub fn begin_idle(&mut self) {
        self.num_idle += 1;
    }

    /// An idle pinned block is referenced again, or is not pinned any more.
    pub fn end_idle(&mut self) {
        self.num_idle -= 1;
    }

    /// Adds a pin; returns the number of the block's pins.
    pub fn add(&mut self, block: BlockId) -> u32 {
        let pins = self.counts.entry(block).or_insert(0);
        *pins += 1;
        *pins
    }

    /// Takes a pin back; returns the number of pins that are left.
    pub fn take_back(&mut self, block: BlockId) -> Result<u32> {
        match self.count(block) {
            0 => return broken(format!("block {block} has no prefix pin to take back")),
            1 => drop(self.counts.remove(&block)),
            count => drop(self.counts.insert(block, count - 1)),
        }
        Ok(self.count(block))
    }
}
