//! Block tables: the blocks of one sequence in one layer group.

use std::ops::Range;

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use crate::cache::prefix::BlockId;
use crate::cache::tier::TierBlockId;

/// The blocks of a table by index: block i has the positions from i * block size on. The first ones may have been let go,
/// because no later token sees them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockTable {
    num_passed: usize,
    blocks: Vec<BlockId>,
}

impl BlockTable {
    /// The blocks from index `num_passed` on.
    pub fn new(num_passed: usize, blocks: Vec<BlockId>) -> BlockTable {
        BlockTable { num_passed, blocks }
    }

    /// The number of entries that were let go, or never filled: the index of the first block.
    pub fn num_passed(&self) -> usize {
        self.num_passed
    }

    /// The index after the last block.
    pub fn end(&self) -> usize {
        self.num_passed + self.blocks.len()
    }

    /// The blocks that are held, in order.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// The held blocks with their indexes.
    pub fn entries(&self) -> impl DoubleEndedIterator<Item = (usize, BlockId)> + ExactSizeIterator {
        self.blocks.iter().enumerate().map(|(place, block)| (self.num_passed + place, *block))
    }

    /// The block at an index; None if it is not held.
    pub fn get(&self, index: usize) -> Option<BlockId> {
        self.blocks.get(index.checked_sub(self.num_passed)?).copied()
    }

    /// The block at an index, which is held.
    pub fn block(&self, index: usize) -> BlockId {
        self.blocks[index - self.num_passed]
    }

    /// The held blocks of a range of indexes.
    pub fn range(&self, range: Range<usize>) -> &[BlockId] {
        let place = |index: usize| index.clamp(self.num_passed, self.end()) - self.num_passed;
        &self.blocks[place(range.start)..place(range.end).max(place(range.start))]
    }

    /// Replaces the block at an index, and returns the one before.
    pub fn replace(&mut self, index: usize, block: BlockId) -> BlockId {
        std::mem::replace(&mut self.blocks[index - self.num_passed], block)
    }

    pub fn extend(&mut self, blocks: Vec<BlockId>) {
        if self.blocks.is_empty() {
            self.blocks = blocks;
        } else {
            self.blocks.extend(blocks);
        }
    }

    pub fn push(&mut self, block: BlockId) {
        self.blocks.push(block);
    }

    /// Keeps the blocks before this index.
    pub fn truncate(&mut self, end: usize) {
        self.blocks.truncate(end.saturating_sub(self.num_passed));
    }

    /// A copy of the blocks before this index.
    pub fn beginning(&self, end: usize) -> BlockTable {
        BlockTable { num_passed: self.num_passed, blocks: self.range(0..end).to_vec() }
    }

    /// Lets the blocks before this index go; returns them.
    pub fn pass(&mut self, end: usize) -> Vec<BlockId> {
        let count = end.clamp(self.num_passed, self.end()) - self.num_passed;
        self.num_passed += count;
        self.blocks.drain(..count).collect()
    }
}

/// The tables of a sequence by layer group. Most models have one group: its table needs no allocation of its own.
pub type Tables = SmallVec<[BlockTable; 1]>;

/// The tables of a sequence in the host tier.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostTables {
    /// Its blocks there: by group, from the first one on that was in the table.
    pub blocks: Vec<TierBlockId>,
    /// Of these, the number of each group.
    pub counts: Vec<usize>,
}

/// The blocks of a range of indexes of all tables, those of the last index first: children before their parents.
pub fn tail_first(tables: &[BlockTable], range: Range<usize>) -> Vec<BlockId> {
    if let [table] = tables {
        return table.range(range).iter().rev().copied().collect();
    }
    let end = tables.iter().map(BlockTable::end).max().unwrap_or(0).min(range.end);
    let indexes = (range.start..end).rev();
    indexes.flat_map(|index| tables.iter().filter_map(move |table| table.get(index))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> BlockTable {
        BlockTable::new(2, vec![12, 13, 14])
    }

    #[test]
    fn a_block_keeps_its_index_when_those_before_it_are_let_go() {
        let mut table = table();
        assert_eq!((table.num_passed(), table.end(), table.block(4)), (2, 5, 14));
        assert_eq!([1, 2, 4, 5].map(|index| table.get(index)), [None, Some(12), Some(14), None]);
        assert_eq!((table.pass(3), table.pass(1), table.get(2), table.block(3)), (vec![12], vec![], None, 13));
        assert_eq!((table.replace(4, 24), table.blocks()), (14, &[13, 24][..]));
        table.extend(vec![15]);
        assert_eq!(table.entries().collect::<Vec<_>>(), [(3, 13), (4, 24), (5, 15)]);
        assert_eq!((table.pass(9), table.num_passed(), table.end()), (vec![13, 24, 15], 6, 6));
    }

    #[test]
    fn a_range_has_what_is_held_of_it() {
        let ranges = [0..9, 0..2, 3..4, 5..9, 0..3];
        let held = ranges.map(|range| table().range(range).to_vec());
        assert_eq!(held, [vec![12, 13, 14], vec![], vec![13], vec![], vec![12]]);
        assert_eq!([1, 2, 4, 9].map(|end| table().beginning(end).end()), [2, 2, 4, 5]);
        let mut cut = table();
        cut.truncate(1);
        assert_eq!((cut.num_passed(), cut.end()), (2, 2));
    }

    #[test]
    fn of_several_tables_the_last_index_comes_first() {
        let tables = [BlockTable::new(0, vec![1, 2, 3, 4, 5]), table()];
        assert_eq!(tail_first(&tables, 1..9), [5, 14, 4, 13, 3, 12, 2]);
        assert_eq!(tail_first(&tables[..1], 1..4), [4, 3, 2]);
    }
}
