//! The last changes of the blocks of a pool, or of the copies in a tier below it, numbered, for clients that keep a copy
//! of the listing.
//!
//! An entry has the block and its owner, not its new state: the reader takes the block's state at reading. So several
//! changes of one block become one, and applying a change twice is harmless.
//!
//! The journal also has the time of each block's last change of content: when an entry is read, the block may have
//! newer content than at the entry, and the reader must report that.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::cache::prefix::BlockId;
use crate::cache::tenants::TenantId;

/// Changes that are kept in the smallest pool. In larger ones: as many as blocks, rounded up to a power of two.
const MIN_KEPT: usize = 65_536;
/// Changes that are read for one answer, times the blocks that it may have.
const READ_AHEAD: usize = 16;

/// The changes of one block that a reader does not know yet, as one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Change {
    pub block: BlockId,
    /// True if it began or ceased to be found by content.
    pub of_content: bool,
    /// True if it was the given tenant's block at one of these changes.
    pub was_own: bool,
}

/// The changes that a reader knows: all before `next`, and later ones of blocks that it was told of while more waited.
///
/// Memory: at most 40 bytes for each block told since the reader last knew all changes.
#[derive(Debug, Clone, Default)]
pub struct Known {
    next: u64,
    ahead: HashMap<BlockId, u64>,
    pages: Vec<(BlockId, u64)>, // of a snapshot: the block behind each page, and the number of changes that it knows
}

impl Known {
    /// All changes before a number.
    pub fn before(next: u64) -> Known {
        Known { next, ..Known::default() }
    }

    /// The number of the first change that the reader may not know.
    pub fn next(&self) -> u64 {
        self.next
    }

    /// The reader has read a page of a snapshot, which ends before this block, after so many changes.
    pub fn read_page(&mut self, end: BlockId, num_changes: u64) {
        self.pages.push((end, num_changes));
    }

    /// The number before which all changes of a block are known.
    fn of(&self, block: BlockId) -> u64 {
        let page = self.pages.partition_point(|(end, _)| *end <= block);
        let of_page = self.pages.get(page).map_or(self.next, |(_, number)| *number);
        self.ahead.get(&block).copied().unwrap_or(of_page).max(self.next)
    }

    /// The reader knows all changes before `next`, and was told the present state of these blocks, after so many changes.
    ///
    /// Of a block that a tenant was not told of it can still know an older state: later changes are not known.
    pub fn go_on(&mut self, next: u64, told: impl IntoIterator<Item = BlockId>, num_changes: u64) {
        self.next = next;
        if next == num_changes {
            self.ahead.clear();
            self.pages.clear();
        } else {
            self.ahead.extend(told.into_iter().map(|block| (block, num_changes)));
        }
    }
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
    /// Of so many blocks; 0: there is nothing to change.
    pub fn new(num_blocks: usize) -> Journal {
        let num_kept = if num_blocks > 0 { num_blocks.max(MIN_KEPT).next_power_of_two() } else { 0 };
        let mask = num_kept.saturating_sub(1);
        Journal { ring: vec![(0, 0); num_kept], mask, num_changes: 0, content_at: vec![0; num_blocks] }
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

    /// The next changed blocks that a reader does not know, each once and at most `most`, and the number to go on from.
    /// `tenant`: only blocks that were this tenant's. None if the next change is not kept any more.
    ///
    /// Cost: O(READ_AHEAD * most).
    pub fn since(&self, known: &Known, most: usize, tenant: Option<TenantId>) -> Option<(Vec<Change>, u64)> {
        let num_new = self.num_changes.checked_sub(known.next)?;
        if num_new > self.ring.len() as u64 {
            return None;
        }
        let numbers = known.next..known.next + num_new.min((READ_AHEAD * most) as u64);
        Some(self.changes_in(numbers, known, most, tenant))
    }

    /// The blocks with a change of these numbers that is not known, and the number to go on from.
    fn changes_in(
        &self,
        numbers: Range<u64>,
        known: &Known,
        most: usize,
        tenant: Option<TenantId>,
    ) -> (Vec<Change>, u64) {
        let (end, mut changes, mut places) = (numbers.end, Vec::new(), HashMap::new());
        for number in numbers {
            let (block, owner) = self.ring[number as usize & self.mask];
            let known_until = known.of(block);
            if number < known_until {
                continue;
            }
            let place = match places.entry(block) {
                Entry::Occupied(place) => *place.get(),
                Entry::Vacant(_) if changes.len() == most => return (changes, number),
                Entry::Vacant(place) => {
                    let of_content = self.content_at[block as usize] > known_until;
                    changes.push(Change { block, of_content, was_own: false });
                    *place.insert(changes.len() - 1)
                }
            };
            changes[place].was_own |= tenant == Some(owner);
        }
        (changes, end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks(changes: &[Change]) -> Vec<BlockId> {
        changes.iter().map(|change| change.block).collect()
    }

    /// The changes from a number on, for a reader who knows those before, and the number to go on from.
    fn since(journal: &Journal, first: u64, most: usize, tenant: Option<TenantId>) -> Option<(Vec<Change>, u64)> {
        journal.since(&Known::before(first), most, tenant)
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
            let (changes, next) = since(&journal, first, 9, tenant).unwrap();
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
        let (first, next) = since(&journal, 0, 2, None).unwrap();
        assert_eq!((blocks(&first), next), (vec![1, 2], 3));
        let (second, next) = since(&journal, next, 2, None).unwrap();
        assert_eq!((blocks(&second), next), (vec![3, 2], 5));
        assert_eq!(since(&journal, 5, 2, None).unwrap().1, 6);
        assert_eq!(since(&journal, 6, 2, None).unwrap(), (vec![], 6));
    }

    #[test]
    fn no_more_is_read_at_once_than_was_agreed() {
        let journal = journal_of([1; 100]);
        assert_eq!(since(&journal, 0, 2, None).unwrap().1, 2 * READ_AHEAD as u64);
    }

    #[test]
    fn what_was_overwritten_is_a_gap_and_so_is_what_was_never_written() {
        let mut journal = journal_of((0..MIN_KEPT as BlockId).map(|number| number % 8));
        assert_eq!((journal.num_kept(), blocks(&since(&journal, 0, 1, None).unwrap().0)), (MIN_KEPT, vec![0]));
        journal.touch(6, 9);
        assert_eq!((since(&journal, 0, 1, None), blocks(&since(&journal, 1, 1, None).unwrap().0)), (None, vec![1]));
        let last = journal.num_changes() - 1;
        assert_eq!(blocks(&since(&journal, last, 1, None).unwrap().0), [6]);
        assert_eq!((since(&journal, last + 1, 1, None).unwrap().0, since(&journal, last + 2, 1, None)), (vec![], None));
    }

    #[test]
    fn a_large_pool_has_room_for_a_change_of_every_block() {
        assert_eq!([2, MIN_KEPT, MIN_KEPT + 1].map(|size| Journal::new(size).num_kept()), [65_536, 65_536, 131_072]);
    }

    #[test]
    fn other_content_is_told_with_the_first_that_is_told_of_a_block() {
        let mut journal = journal_of([1, 2, 3]);
        journal.touch_content(1, 9);
        let is_told = |journal: &Journal, first| since(journal, first, 1, None).unwrap().0[0].of_content;
        assert_eq!([0, 1, 3].map(|first| is_told(&journal, first)), [true, false, true]);
        journal.touch(1, 9);
        assert_eq!([0, 4].map(|first| is_told(&journal, first)), [true, false]);
    }

    #[test]
    fn what_was_read_while_more_waited_is_not_read_again() {
        let mut journal = journal_of([1, 2, 3, 1, 2]);
        journal.touch_content(1, 9);
        let mut known = Known::before(0);
        let mut read = |journal: &Journal, most| {
            let (changes, next) = journal.since(&known, most, None).unwrap();
            known.go_on(next, blocks(&changes), journal.num_changes());
            changes.into_iter().map(|change| (change.block, change.of_content)).collect::<Vec<_>>()
        };
        assert_eq!(read(&journal, 2), [(1, true), (2, false)], "both in their newest state");
        journal.touch(2, 9);
        assert_eq!(read(&journal, 2), [(3, false), (2, false)], "block 1 is known, block 2 has changed again");
        journal.touch(1, 9);
        assert_eq!(read(&journal, 2), [(1, false)], "its content is known");
        assert_eq!(read(&journal, 2), []);
        journal.touch_content(3, 9);
        assert_eq!(read(&journal, 2), [(3, true)]);
    }

    #[test]
    fn what_a_page_of_a_snapshot_had_is_not_read_again() {
        let mut journal = journal_of([1, 2]);
        let mut known = Known::before(journal.num_changes());
        [1, 5].iter().for_each(|block| journal.touch_content(*block, 9));
        known.read_page(4, journal.num_changes());
        [1, 5].iter().for_each(|block| journal.touch(*block, 9));
        known.read_page(8, journal.num_changes());
        journal.touch(6, 9);
        let (changes, next) = journal.since(&known, 9, None).unwrap();
        assert_eq!(
            changes.iter().map(|change| (change.block, change.of_content)).collect::<Vec<_>>(),
            [(1, false), (6, false)]
        );
        known.go_on(next, blocks(&changes), journal.num_changes());
        assert_eq!((next, known.of(1)), (journal.num_changes(), journal.num_changes()));
    }
}
