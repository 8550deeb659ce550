//! The last changes of a pool's blocks, numbered, for clients that keep a copy of the listing.
//!
//! An entry has the block and its owner, not its new state: the reader takes the block's state at reading. So several
//! changes of one block become one, and applying a change twice is harmless.
//!
//! The journal also has the time of each block's last change of content: when an entry is read, the block may have
//! newer content than at the entry, and the reader must report that.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use serde::{Deserialize, Serialize};

use crate::cache::prefix::BlockId;
use crate::cache::tenants::TenantId;

/// Changes that are kept in the smallest pool. In larger ones: as many as blocks, rounded up to a power of two.
const MIN_KEPT: usize = 65_536;
/// Changes that are read for one answer, times the blocks that it may have.
const READ_AHEAD: usize = 16;

/// The change of one block since a reader's last number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Change {
    pub block: BlockId,
    /// True if it began or ceased to be found by content since.
    pub of_content: bool,
    /// True if it was the given tenant's block at one of these changes.
    pub was_own: bool,
}

/// A ring of changes. Memory: 8 bytes for each that is kept, and 8 for each block.
#[derive(Debug, Serialize, Deserialize)]
pub struct Journal {
    ring: Vec<(BlockId, TenantId)>,
    mask: usize,
    num_changes: u64,
    content_at: Vec<u64>, // by block, the number after the last change of its content
}

impl Journal {
    pub fn new(num_blocks: usize) -> Journal {
        let num_kept = num_blocks.max(MIN_KEPT).next_power_of_two();
        Journal { ring: vec![(0, 0); num_kept], mask: num_kept - 1, num_changes: 0, content_at: vec![0; num_blocks] }
    }

    /// The number of changes so far: a later change has this number or a higher one.
    pub fn num_changes(&self) -> u64 {
        self.num_changes
    }

    /// The number of changes that are kept.
    pub fn num_kept(&self) -> usize {
        self.ring.len()
    }

    /// The state, references, pins or advice of a tenant's block change; it may be the tenant's until now, or from now on.
    pub fn touch(&mut self, block: BlockId, owner: TenantId) {
        self.ring[self.num_changes as usize & self.mask] = (block, owner);
        self.num_changes += 1;
    }

    /// Enters a change of several blocks, with the owners of all blocks.
    pub fn touch_all(&mut self, blocks: &[BlockId], owners: &[TenantId]) {
        let Journal { ring, mask, num_changes, .. } = self;
        for (block, number) in blocks.iter().zip(*num_changes..) {
            ring[number as usize & *mask] = (*block, owners[*block as usize]);
        }
        *num_changes += blocks.len() as u64;
    }

    /// A tenant's block begins or ceases to be found by content.
    pub fn touch_content(&mut self, block: BlockId, owner: TenantId) {
        self.touch(block, owner);
        self.content_at[block as usize] = self.num_changes;
    }

    /// The number after the last change of the block's content.
    pub fn content_changed_at(&self, block: BlockId) -> u64 {
        self.content_at[block as usize]
    }

    /// The next changed blocks from number `first` on, each once and at most `most`, and the number to continue from.
    /// `tenant`: only blocks that were this tenant's. None if the next change is not kept any more.
    ///
    /// Cost: O(READ_AHEAD * most).
    pub fn since(&self, first: u64, most: usize, tenant: Option<TenantId>) -> Option<(Vec<Change>, u64)> {
        let num_new = self.num_changes.checked_sub(first)?;
        if num_new > self.ring.len() as u64 {
            return None;
        }
        let end = first + num_new.min((READ_AHEAD * most) as u64);
        let (mut changes, mut places) = (Vec::new(), HashMap::new());
        for number in first..end {
            let (block, owner) = self.ring[number as usize & self.mask];
            let place = match places.entry(block) {
                Entry::Occupied(place) => *place.get(),
                Entry::Vacant(_) if changes.len() == most => return Some((changes, number)),
                Entry::Vacant(place) => {
                    let of_content = self.content_at[block as usize] > first;
                    changes.push(Change { block, of_content, was_own: false });
                    *place.insert(changes.len() - 1)
                }
            };
            changes[place].was_own |= tenant == Some(owner);
        }
        Some((changes, end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks(changes: &[Change]) -> Vec<BlockId> {
        changes.iter().map(|change| change.block).collect()
    }

    fn journal_of(blocks: impl IntoIterator<Item = BlockId>) -> Journal {
        let mut journal = Journal::new(8);
        blocks.into_iter().for_each(|block| journal.touch(block, 9));
        journal
    }

    #[test]
    fn each_block_is_told_once_with_all_that_happened_to_it() {
        let mut journal = journal_of([3, 5]);
        journal.touch_content(3, 0);
        journal.touch(5, 7);
        journal.touch_content(4, 7);
        journal.touch(3, 9);
        let told = |first, tenant| {
            let (changes, next) = journal.since(first, 9, tenant).unwrap();
            assert_eq!(next, 6);
            changes.into_iter().map(|change| (change.block, change.of_content, change.was_own)).collect::<Vec<_>>()
        };
        assert_eq!(told(0, None), [(3, true, false), (5, false, false), (4, true, false)]);
        assert_eq!(told(0, Some(7)), [(3, true, false), (5, false, true), (4, true, true)]);
        assert_eq!(told(0, Some(0)), [(3, true, true), (5, false, false), (4, true, false)]);
        assert_eq!(told(3, Some(9)), [(5, false, false), (4, true, false), (3, false, true)]);
    }

    #[test]
    fn what_is_read_in_parts_goes_on_where_the_last_part_ended() {
        let journal = journal_of([1, 2, 1, 3, 2, 4]);
        let (first, next) = journal.since(0, 2, None).unwrap();
        assert_eq!((blocks(&first), next), (vec![1, 2], 3));
        let (second, next) = journal.since(next, 2, None).unwrap();
        assert_eq!((blocks(&second), next), (vec![3, 2], 5));
        assert_eq!(journal.since(5, 2, None).unwrap().1, 6);
        assert_eq!(journal.since(6, 2, None).unwrap(), (vec![], 6));
    }

    #[test]
    fn no_more_is_read_at_once_than_was_agreed() {
        let journal = journal_of([1; 100]);
        assert_eq!(journal.since(0, 2, None).unwrap().1, 2 * READ_AHEAD as u64);
    }

    #[test]
    fn what_was_overwritten_is_a_gap_and_so_is_what_was_never_written() {
        let mut journal = journal_of((0..MIN_KEPT as BlockId).map(|number| number % 8));
        assert_eq!((journal.num_kept(), blocks(&journal.since(0, 1, None).unwrap().0)), (MIN_KEPT, vec![0]));
        journal.touch(6, 9);
        assert_eq!((journal.since(0, 1, None), blocks(&journal.since(1, 1, None).unwrap().0)), (None, vec![1]));
        let last = journal.num_changes() - 1;
        assert_eq!(blocks(&journal.since(last, 1, None).unwrap().0), [6]);
        assert_eq!((journal.since(last + 1, 1, None).unwrap().0, journal.since(last + 2, 1, None)), (vec![], None));
    }

    #[test]
    fn a_large_pool_has_room_for_a_change_of_every_block() {
        assert_eq!([2, MIN_KEPT, MIN_KEPT + 1].map(|size| Journal::new(size).num_kept()), [65_536, 65_536, 131_072]);
    }

    #[test]
    fn other_content_is_told_with_the_first_that_is_told_of_a_block() {
        let mut journal = journal_of([1, 2, 3]);
        journal.touch_content(1, 9);
        let is_told = |journal: &Journal, first| journal.since(first, 1, None).unwrap().0[0].of_content;
        assert_eq!([0, 1, 3].map(|first| is_told(&journal, first)), [true, false, true]);
        journal.touch(1, 9);
        assert_eq!([0, 4].map(|first| is_told(&journal, first)), [true, false]);
    }
}
