//! The references of sequences and the holds of steps in flight, by block.

use serde::{Deserialize, Serialize};

use crate::cache::pool::counters::PoolCounters;
use crate::cache::prefix::BlockId;
use crate::errors::{Result, broken};

/// The number of table entries with a block, and of steps in flight that may still access it.
#[derive(Debug, Serialize, Deserialize)]
pub struct Holders {
    refs: Vec<u32>,
    holds: Vec<u32>,
}

impl Holders {
    pub fn new(num_blocks: usize) -> Holders {
        Holders { refs: vec![0; num_blocks], holds: vec![0; num_blocks] }
    }

    pub fn len(&self) -> usize {
        self.refs.len()
    }

    pub fn ref_count(&self, block: BlockId) -> u32 {
        self.refs[block as usize]
    }

    pub fn hold_count(&self, block: BlockId) -> u32 {
        self.holds[block as usize]
    }

    /// True if the block has neither references nor holds.
    pub fn is_idle(&self, block: BlockId) -> bool {
        self.ref_count(block) == 0 && self.hold_count(block) == 0
    }

    /// For each block, true if it is not idle.
    pub fn busy(&self) -> impl Iterator<Item = bool> {
        self.refs.iter().zip(&self.holds).map(|(refs, holds)| refs | holds > 0)
    }

    /// The first reference of each of these blocks.
    pub fn give(&mut self, blocks: &[BlockId]) {
        blocks.iter().for_each(|block| self.refs[*block as usize] = 1);
    }

    /// Adds `count` references to each; returns the blocks that had none, and the number of those that are shared from
    /// now on.
    pub fn acquire(&mut self, blocks: &[BlockId], count: u32) -> (Vec<BlockId>, usize) {
        let (mut unreferenced, mut num_shared) = (Vec::new(), 0);
        for &block in blocks {
            let refs = &mut self.refs[block as usize];
            let before = std::mem::replace(refs, *refs + count);
            num_shared += usize::from(before < 2 && before + count >= 2);
            if before == 0 {
                unreferenced.push(block);
            }
        }
        (unreferenced, num_shared)
    }

    /// Removes one reference from each.
    pub fn let_go(&mut self, blocks: &[BlockId], counters: &mut PoolCounters) -> Result<()> {
        let (mut num_unshared, mut num_left) = (0, 0);
        for block in blocks {
            let refs = &mut self.refs[*block as usize];
            match *refs {
                0 => return broken(format!("block {block} is released, nobody holds it")),
                1 => num_left += 1,
                2 => num_unshared += 1,
                _ => {}
            }
            *refs -= 1;
        }
        counters.num_references -= blocks.len();
        counters.num_shared -= num_unshared;
        counters.num_active -= num_left;
        Ok(())
    }

    /// Adds one hold to each.
    pub fn hold(&mut self, blocks: &[BlockId]) {
        blocks.iter().for_each(|block| self.holds[*block as usize] += 1);
    }

    /// Ends one hold of each.
    pub fn end_holds(&mut self, blocks: &[BlockId]) -> Result<()> {
        for &block in blocks {
            let Some(holds) = self.hold_count(block).checked_sub(1) else {
                return broken(format!("a hold of block {block} ends, it has none"));
            };
            self.holds[block as usize] = holds;
        }
        Ok(())
    }

    /// The counters, with the sums of references counted anew.
    pub fn recount(&self, counters: PoolCounters) -> PoolCounters {
        PoolCounters {
            num_active: self.refs.iter().filter(|refs| **refs > 0).count(),
            num_references: self.refs.iter().map(|refs| *refs as usize).sum(),
            num_shared: self.refs.iter().filter(|refs| **refs > 1).count(),
            ..counters
        }
    }
}
