//! Layer groups: layers of the model that see the same positions. A block holds keys and values of one group.
//!
//! A block's identity in the index is its prefix hash together with its group, so that blocks of several groups with the
//! same tokens are found apart.

use serde::{Deserialize, Serialize};

use crate::cache::prefix::{BlockId, Hash, PrefixIndex};

/// The number of a layer group in its geometry.
pub type Group = u8;

/// The positions that a token sees in the layers of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Span {
    /// All before it.
    Full,
    /// The last so many, its own included.
    Sliding(usize),
    /// Those of its own chunk of so many.
    Chunked(usize),
}

impl Span {
    pub fn is_full(self) -> bool {
        self == Span::Full
    }

    /// The first position that a token at a position sees.
    pub fn first_seen(self, position: usize) -> usize {
        match self {
            Span::Full => 0,
            Span::Sliding(size) => (position + 1).saturating_sub(size),
            Span::Chunked(size) => position - position % size,
        }
    }

    /// The first position at which a token sees nothing before `bound`.
    pub fn first_beyond(self, bound: usize) -> usize {
        match self {
            _ if bound == 0 => 0,
            Span::Full => usize::MAX,
            Span::Sliding(size) => bound + size - 1,
            Span::Chunked(size) => bound.next_multiple_of(size),
        }
    }

    /// Blocks that a sequence holds at most while its tokens are computed one by one; None: all.
    pub fn most_held(self, block_size: usize) -> Option<usize> {
        match self {
            Span::Full => None,
            // what two neighbouring tokens see together: one position more than one of them sees
            Span::Sliding(size) | Span::Chunked(size) => Some((size - 1) / block_size + 2),
        }
    }
}

/// The hash by which a group's block with this prefix hash is found; and the prefix hash of such a hash.
pub fn identity(hash: &Hash, group: Group) -> Hash {
    let mut identity = *hash;
    if group != 0 {
        identity[0] ^= group; // a write of one byte delays the reading of the eight around it
    }
    identity
}

/// Counters of one group.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupCounters {
    /// Blocks that admissions and restores found in the index.
    pub num_found: u64,
    /// Table entries that were let go because no later token sees them.
    pub num_passed: u64,
    pub num_evicted: u64,
}

/// The group of each block, and the cached blocks that nobody can find. Empty in a pool with one group.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct LayerGroups {
    spans: Vec<Span>,
    of: Vec<Group>, // by block, since it was allocated last
    /// Blocks that could no longer be found when something else was lost: candidates to be evicted first.
    stranded: Vec<BlockId>,
    counters: Vec<GroupCounters>,
}

impl LayerGroups {
    pub fn new(spans: &[Span], num_blocks: usize) -> LayerGroups {
        if spans.len() < 2 {
            return LayerGroups::default();
        }
        LayerGroups {
            spans: spans.to_vec(),
            of: vec![0; num_blocks],
            stranded: Vec::new(),
            counters: vec![GroupCounters::default(); spans.len()],
        }
    }

    /// False in a pool with one group.
    pub fn are_several(&self) -> bool {
        !self.spans.is_empty()
    }

    /// The block's group, if it is not free.
    pub fn of(&self, block: BlockId) -> Group {
        self.of.get(block as usize).copied().unwrap_or(0)
    }

    /// These blocks were allocated for a group.
    pub fn enter(&mut self, blocks: &[BlockId], group: Group) {
        if self.are_several() {
            blocks.iter().for_each(|block| self.of[*block as usize] = group);
        }
    }

    /// By group; empty in a pool with one.
    pub fn counters(&self) -> &[GroupCounters] {
        &self.counters
    }

    pub fn count(&mut self, group: Group, count: impl FnOnce(&mut GroupCounters)) {
        if let Some(counters) = self.counters.get_mut(usize::from(group)) {
            count(counters);
        }
    }

    pub fn restart_counters(&mut self) {
        self.counters.fill(GroupCounters::default());
    }

    /// The block, found by this hash until now, was lost: those that nobody can find without it are stranded.
    pub fn lose(&mut self, block: BlockId, hash: &Hash, index: &PrefixIndex) {
        let group = self.of(block);
        self.count(group, |counters| counters.num_evicted += 1);
        let (prefix, span) = (identity(hash, group), self.spans[usize::from(group)]);
        for (other, other_span) in self.spans.iter().enumerate() {
            if (span.is_full() || *other_span == span)
                && let Some(stranded) = index.lookup(&identity(&prefix, other as Group))
            {
                self.stranded.push(stranded);
            }
        }
    }

    /// The next block that was stranded, the last one first. It may have been found, lost or used since.
    pub fn pop_stranded(&mut self) -> Option<BlockId> {
        self.stranded.pop()
    }

    /// True if nobody can find this cached block: a block of a full group, or of a group with the same window, is missing
    /// at its place.
    pub fn is_stranded(&self, block: BlockId, index: &PrefixIndex) -> bool {
        let Some(hash) = index.hash(block) else { return false };
        let group = self.of(block);
        let (prefix, span) = (identity(hash, group), self.spans[usize::from(group)]);
        let is_missing = |other: usize| index.lookup(&identity(&prefix, other as Group)).is_none();
        (0..self.spans.len())
            .any(|other| (self.spans[other].is_full() || self.spans[other] == span) && is_missing(other))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::prefix::digest_of;

    #[test]
    fn what_a_token_sees_begins_with_its_window_or_chunk() {
        let first = |span: Span| [0, 1, 3, 4, 7, 8, 9].map(|position| span.first_seen(position));
        assert_eq!(first(Span::Full), [0; 7]);
        assert_eq!(first(Span::Sliding(4)), [0, 0, 0, 1, 4, 5, 6]);
        assert_eq!(first(Span::Sliding(1)), [0, 1, 3, 4, 7, 8, 9]);
        assert_eq!(first(Span::Chunked(4)), [0, 0, 0, 4, 4, 8, 8]);
    }

    #[test]
    fn the_first_token_beyond_a_bound_is_the_first_that_sees_nothing_before_it() {
        for span in [Span::Sliding(1), Span::Sliding(5), Span::Chunked(1), Span::Chunked(4), Span::Chunked(6)] {
            for bound in 0..30 {
                let first = (0..).find(|position| span.first_seen(*position) >= bound);
                assert_eq!(Some(span.first_beyond(bound)), first, "{span:?} {bound}");
            }
        }
        assert_eq!([0, 1].map(|bound| Span::Full.first_beyond(bound)), [0, usize::MAX]);
    }

    #[test]
    fn no_more_blocks_are_held_than_two_neighbours_see() {
        for span in [Span::Sliding(1), Span::Sliding(7), Span::Chunked(3), Span::Chunked(16), Span::Chunked(20)] {
            for size in [1, 2, 3, 16] {
                let held = (1..200).map(|position: usize| position / size + 1 - span.first_seen(position - 1) / size);
                assert!(held.max() <= span.most_held(size), "{span:?} {size}");
            }
        }
        assert_eq!((Span::Sliding(16).most_held(16), Span::Full.most_held(16)), (Some(2), None));
    }

    fn groups() -> (LayerGroups, PrefixIndex) {
        let spans = [Span::Full, Span::Full, Span::Sliding(4), Span::Sliding(4), Span::Chunked(8)];
        let (mut groups, mut index) = (LayerGroups::new(&spans, 12), PrefixIndex::new(12));
        for (block, group) in (1..=5).zip(0..) {
            groups.enter(&[block], group);
            index.publish(&identity(&digest_of(&[7]), group), block);
        }
        (groups, index)
    }

    fn lose(groups: &mut LayerGroups, index: &mut PrefixIndex, block: BlockId) -> Vec<BlockId> {
        let hash = *index.hash(block).unwrap();
        index.forget(block);
        groups.lose(block, &hash, index);
        let mut stranded: Vec<BlockId> = std::iter::from_fn(|| groups.pop_stranded()).collect();
        stranded.sort();
        stranded
    }

    #[test]
    fn what_is_lost_strands_what_can_not_be_found_without_it() {
        let (mut groups, mut index) = groups();
        assert_eq!(lose(&mut groups, &mut index, 5), [0; 0], "no other group has such chunks");
        assert!((1..5).all(|block| !groups.is_stranded(block, &index)));
        assert_eq!(lose(&mut groups, &mut index, 3), [4], "the same window");
        assert_eq!([1, 2, 4].map(|block| groups.is_stranded(block, &index)), [false, false, true]);
        assert_eq!(lose(&mut groups, &mut index, 1), [2, 4], "a full one");
        assert!(groups.is_stranded(2, &index) && !groups.is_stranded(9, &index));
        assert_eq!(groups.counters()[2], GroupCounters { num_evicted: 1, ..GroupCounters::default() });
    }

    #[test]
    fn one_group_needs_no_memory() {
        let groups = LayerGroups::new(&[Span::Sliding(3)], 1 << 20);
        assert_eq!((groups.are_several(), groups.of(77), groups.of.len(), groups.counters().len()), (false, 0, 0, 0));
    }
}
