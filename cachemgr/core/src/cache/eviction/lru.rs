//! The policy that gives up the least recently used block first.

use serde::{Deserialize, Serialize};

use crate::cache::eviction::EvictionPolicy;
use crate::cache::eviction::rings::Rings;
use crate::cache::prefix::{BlockId, Hash, NULL_BLOCK};

/// The least recently parked first. 8 bytes per block.
#[derive(Debug, Serialize, Deserialize)]
pub struct Lru {
    ring: Rings, // the null block is its sentinel
    num_parked: usize,
}

impl Lru {
    pub fn new(num_blocks: usize) -> Lru {
        Lru { ring: Rings::new(num_blocks), num_parked: 0 }
    }
}

impl EvictionPolicy for Lru {
    fn admit(&mut self, _: &[BlockId], _: &[BlockId], _: &[Hash]) {}

    fn forget(&mut self, _: &[BlockId]) {}

    fn park(&mut self, blocks: &[BlockId]) {
        self.ring.append_all(blocks, NULL_BLOCK);
        self.num_parked += blocks.len();
    }

    fn unpark(&mut self, blocks: &[BlockId]) {
        blocks.iter().for_each(|block| self.ring.remove(*block));
        self.num_parked -= blocks.len();
    }

    fn evict(&mut self, count: usize, victims: &mut Vec<BlockId>) {
        self.num_parked -= count;
        self.ring.take_first(NULL_BLOCK, count, |_| true, victims);
    }

    fn num_parked(&self) -> usize {
        self.num_parked
    }

    fn is_parked(&self, block: BlockId) -> bool {
        self.ring.contains(block)
    }

    fn parked(&self) -> Vec<BlockId> {
        self.ring.nodes(NULL_BLOCK).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lru_gives_up_what_was_parked_first() {
        let mut policy = Lru::new(8);
        policy.park(&[3, 1, 2]);
        policy.park(&[5]);
        policy.unpark(&[1]);
        policy.park(&[1]);
        let mut victims = vec![9];
        policy.evict(3, &mut victims);
        assert_eq!(victims, [9, 3, 2, 5]);
        assert_eq!((policy.num_parked(), policy.parked()), (1, vec![1]));
    }
}
