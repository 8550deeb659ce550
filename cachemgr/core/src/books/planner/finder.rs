//! Finds the prefix of a prompt: in the index, and behind that in blocks that steps in flight fill.

use std::collections::VecDeque;

use smallvec::SmallVec;

use crate::books::geometry::Geometry;
use crate::books::hits::{Hit, Prefix};
use crate::books::sequences::SequenceTable;
use crate::books::steps::StepInFlight;
use crate::cache::groups::{Group, identity};
use crate::cache::pool::{BlockPool, BlockState};
use crate::cache::prefix::{BlockId, Hash, Past};

/// The blocks that an admission may find.
pub(super) struct PrefixFinder<'a> {
    pub geometry: &'a Geometry,
    pub pool: &'a BlockPool,
    pub table: &'a mut SequenceTable,
    /// Of the lease.
    pub in_flight: &'a VecDeque<StepInFlight>,
    /// The step that is being planned.
    pub step: &'a StepInFlight,
}

impl PrefixFinder<'_> {
    /// The longest known prefix, and the number of its blocks in the index; steps in flight fill the rest.
    ///
    /// `hashes` are those of the blocks that may be found.
    pub(super) fn find(&mut self, hashes: &[Hash]) -> (Hit, usize) {
        let mut hit = Prefix { geometry: self.geometry, index: self.pool.index(), hashes }.find();
        let num_published = hit.num_blocks;
        for (index, hash) in hashes.iter().enumerate().skip(num_published) {
            let Some(blocks) = self.find_shareable(index, hash) else { break };
            hit.tables.iter_mut().zip(blocks).for_each(|(table, block)| table.push(block));
            hit.num_blocks += 1;
        }
        (hit, num_published)
    }

    /// The blocks of all groups at this index of a table, known or being filled by a step in flight of the lease.
    fn find_shareable(&mut self, index: usize, hash: &Hash) -> Option<SmallVec<[BlockId; 1]>> {
        let mut blocks = SmallVec::new();
        for (group, _) in self.geometry.groups() {
            let known = self.pool.index().lookup(&identity(hash, group));
            let block = known.or_else(|| self.find_filled(index, group, hash))?;
            if !self.is_shareable(block) {
                return None;
            }
            blocks.push(block);
        }
        Some(blocks)
    }

    /// The block at this index of a group's table that a step in flight of the lease, or this one, fills: the first such
    /// block.
    fn find_filled(&mut self, index: usize, group: Group, hash: &Hash) -> Option<BlockId> {
        let steps = self.in_flight.iter().chain([self.step]);
        for fill in steps.flat_map(|step| &step.fills).filter(|fill| (fill.first..fill.end).contains(&index)) {
            let sequence = self.table.get_mut(fill.row);
            if sequence.hash_at(index, self.geometry.block_size) == hash {
                return sequence.table(group).get(index);
            }
        }
        None
    }

    fn is_shareable(&self, block: BlockId) -> bool {
        self.pool.state(block) == BlockState::Active || self.pool.index().past(block) == Past::Findable
    }
}
