//! Sizes of a pool, and values derived from them.

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use crate::books::plans::CacheUse;
use crate::cache::groups::{Group, Span};

/// Layer groups of a pool: the worker keeps a table for each of them.
pub const MAX_LAYER_GROUPS: usize = 64;

/// Sizes of a pool and the model on it; constant for an epoch.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Geometry {
    /// Tokens per block.
    pub block_size: usize,
    /// The null block included.
    pub num_blocks: usize,
    /// Blocks of the host tier; 0: there is none.
    pub num_host_blocks: usize,
    /// The limit of host blocks with copies of evicted blocks; 0: none are made. With recurrent states there are none.
    pub host_cached_limit: usize,
    /// Blocks of the disk below the host tier; 0: there is none, as without copies in the host tier.
    pub num_disk_blocks: usize,
    pub max_sequences: usize,
    pub max_sequence_tokens: usize,
    pub vocab_size: usize,
    pub model_fingerprint: Vec<u8>,
    /// The model keeps a state per sequence that no block holds: nothing is shared by prefix.
    pub has_recurrent_state: bool,
    /// The limit of drafts of a sequence in a step; 0: the worker verifies none.
    pub max_drafts: usize,
    /// By layer group, the full ones first; one at least.
    pub groups: Vec<Span>,
}

impl Geometry {
    pub fn num_blocks_for(&self, num_tokens: usize) -> usize {
        num_tokens.div_ceil(self.block_size)
    }

    /// The layer groups with their spans.
    pub fn groups(&self) -> impl DoubleEndedIterator<Item = (Group, Span)> {
        self.groups.iter().enumerate().map(|(group, span)| (group as Group, *span))
    }

    /// True if a group gives blocks back while a sequence grows.
    pub fn has_windows(&self) -> bool {
        self.groups.iter().any(|span| !span.is_full())
    }

    /// The index of the first block that a token at a position sees in a group.
    pub fn first_needed(&self, span: Span, position: usize) -> usize {
        span.first_seen(position) / self.block_size
    }

    /// The index after the last block of a table in a group: a full group has blocks for all tokens, a windowed one for
    /// those that are computed or being computed.
    pub fn end_of_table(&self, span: Span, num_tokens: usize, num_scheduled: usize) -> usize {
        self.num_blocks_for(if span.is_full() { num_tokens } else { num_scheduled })
    }

    /// By group, the index after the last block of a table: see `end_of_table`.
    pub fn ends_of_tables(&self, num_tokens: usize, num_scheduled: usize) -> SmallVec<[usize; 1]> {
        self.groups.iter().map(|span| self.end_of_table(*span, num_tokens, num_scheduled)).collect()
    }

    /// Blocks that a sequence with a reservation will need beyond tables that end at these indexes.
    pub fn num_to_come(&self, reserved_tokens: usize, ends: &[usize]) -> usize {
        let num_most = self.num_blocks_for(reserved_tokens);
        ends.iter().map(|end| num_most.saturating_sub(*end)).sum()
    }

    /// The longest sequence: the lesser of the model's context and the pool's blocks.
    pub fn max_tokens(&self) -> usize {
        self.max_tokens_in(self.num_blocks - 1)
    }

    /// The longest sequence that fits in so many blocks, if its tokens are computed one by one.
    pub fn max_tokens_in(&self, num_blocks: usize) -> usize {
        if !self.has_windows() {
            return self.max_reserved_in(num_blocks);
        }
        let held = |span: &Span, length: usize| span.most_held(self.block_size).map_or(length, |most| most.min(length));
        let fits = |length: usize| self.groups.iter().map(|span| held(span, length)).sum::<usize>() <= num_blocks;
        let (mut fitting, mut too_long) = (0, self.num_blocks_for(self.max_sequence_tokens) + 1);
        while too_long - fitting > 1 {
            let length = fitting.midpoint(too_long);
            if fits(length) { fitting = length } else { too_long = length }
        }
        self.max_sequence_tokens.min(fitting * self.block_size)
    }

    /// The longest sequence that can be guaranteed in so many blocks: its steps may be as long as it is.
    pub fn max_reserved_in(&self, num_blocks: usize) -> usize {
        self.max_sequence_tokens.min(num_blocks / self.groups.len() * self.block_size)
    }

    /// Slots of so many blocks that one sequence may fill; `reserved` is its reservation in tokens, 0 if it has none.
    pub fn num_slots(&self, num_blocks: usize, reserved: usize) -> usize {
        let most = if reserved > 0 { reserved.min(self.max_tokens()) } else { self.max_tokens() };
        most.min(num_blocks * self.block_size)
    }

    /// Blocks of a prompt that may be found: at least one token is left to compute. None for a model with a state per
    /// sequence, and for a sequence that does not read the cache.
    pub fn num_sharable(&self, num_tokens: usize, cache_use: CacheUse) -> usize {
        let is_read = cache_use.reads() && !self.has_recurrent_state;
        if is_read { num_tokens.saturating_sub(1) / self.block_size } else { 0 }
    }

    /// As many of a prompt's tokens as a sequence can have: no more are worth looking for.
    pub fn holdable<'a>(&self, tokens: &'a [i32]) -> &'a [i32] {
        &tokens[..tokens.len().min(self.max_tokens())]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::books::tests::geometry;

    fn longest(groups: &[Span], num_usable: usize) -> usize {
        Geometry { groups: groups.to_vec(), max_sequence_tokens: 1000, ..geometry(num_usable) }.max_tokens()
    }

    #[test]
    fn windows_let_a_sequence_be_longer_than_the_pool() {
        let full_and_window = [Span::Full, Span::Sliding(4)]; // at most 3 blocks of the window
        assert_eq!([1, 2, 6, 7, 13].map(|num_usable| longest(&full_and_window, num_usable)), [0, 2, 6, 8, 20]);
        assert_eq!([2, 3, 50].map(|num_usable| longest(&[Span::Chunked(4)], num_usable)), [4, 1000, 1000]);
        assert_eq!(longest(&[Span::Full, Span::Full], 7), 6);
        let geometry = Geometry { groups: full_and_window.to_vec(), ..geometry(13) };
        assert_eq!((geometry.max_reserved_in(13), geometry.end_of_table(Span::Sliding(4), 9, 4)), (12, 2));
    }

    #[test]
    fn a_sequence_is_as_long_as_model_and_pool_allow() {
        assert_eq!([3, 31, 32, 40].map(|num_usable| geometry(num_usable).max_tokens()), [6, 62, 64, 64]);
        assert_eq!([0, 1, 2, 3].map(|num_tokens| geometry(3).num_blocks_for(num_tokens)), [0, 1, 1, 2]);
    }
}
