//! Sequences: their tokens, their block tables, and the progress of both.
//!
//!     0            num_cached      num_computed     num_scheduled     num_known        num_tokens
//!     |-- found ------|-- reported -----|-- planned -----|-- waiting -----|-- promised -----|
//!       in the cache     by the worker     in steps         known tokens     being sampled
//!                                          in flight        not run yet      by steps in flight
//!
//! Each bound is at most the next, except num_scheduled and num_known: a promised token may be scheduled, too. The
//! table of a full layer group has blocks for all of them, except perhaps for the token sampled last, which gets its slot
//! when it is scheduled. The table of a windowed group has blocks for the scheduled ones that the next tokens see.

use serde::{Deserialize, Serialize};

use crate::books::kept_prefix::KeptPrefix;
use crate::books::plans::{CacheUse, Extend, GrantedStep};
use crate::books::tables::{BlockTable, HostTables, Tables, tail_first};
use crate::cache::advice::Advice;
use crate::cache::groups::{Group, identity};
use crate::cache::prefix::{BlockId, Hash, Namespace, Past, PrefixIndex, chain_hashes};
use crate::cache::tenants::TenantId;

/// The row of a sequence in the table; not reused while a step in flight needs it.
pub type Row = u32;

/// One stream of tokens with its KV in the pool; owned by one lease.
#[derive(Debug, Serialize, Deserialize)]
pub struct Sequence {
    pub seq_id: i32,
    /// Later sequences of the pool have larger ones.
    pub number: u64,
    /// The tenant that owns it, and all of its blocks.
    pub tenant: TenantId,
    /// Root of its prefix hashes: tenant, namespace and model.
    pub root: Hash,
    pub namespace: Namespace,
    pub cache_use: CacheUse,
    /// By layer group.
    pub tables: Tables,
    /// Those that are known.
    pub tokens: Vec<i32>,
    /// Known ones, and those being sampled.
    pub num_tokens: usize,
    pub num_cached: usize,
    /// Tokens with valid KV, as reported.
    pub num_computed: usize,
    /// Tokens that are computed or that a step in flight computes.
    pub num_scheduled: usize,
    /// Drafts that a step in flight verifies: they count as scheduled, and as promised. The sequence does not change until
    /// the outcome is known, unless it is released.
    pub num_drafts: usize,
    /// Leading blocks with hashes in the index.
    pub num_published: usize,
    /// Leading blocks that a reset of the cache was about: they are not published again.
    pub num_withheld: usize,
    /// Slots before this one, from the scheduled ones on, are known to be the sequence's own to write.
    pub num_writable: usize,
    /// The position of the token that the worker sampled last, or is sampling: a run can compute it without a token id.
    pub sampled_position: Option<usize>,
    /// For a model with a state per sequence, the least position from which it can compute: before the token that ran
    /// last.
    pub oldest_state: usize,
    pub released: bool,
    /// The most tokens it will ever have, guaranteed; 0: best effort.
    pub reserved_tokens: usize,
    /// Blocks that are kept for it beyond those in its table.
    pub num_reserved: usize,
    /// The advice for the blocks that it will get.
    pub tail_advice: Option<Advice>,
    /// The prefixes that its prompt's breakpoints keep, the shorter ones first.
    pub kept: Box<[KeptPrefix]>,
    /// While it is in the host tier, with no blocks in its tables. Boxed: this is rare, and all others are smaller for it.
    pub in_host: Option<Box<HostTables>>,
    last_hash: Hash,   // of the last published block
    hashes: Vec<Hash>, // of the blocks after the published ones, as far as they were needed
}

/// A sequence that begins.
#[derive(Debug, Default)]
pub struct NewSequence<'a> {
    pub seq_id: i32,
    pub tenant: TenantId,
    /// Root of its prefix hashes.
    pub root: Hash,
    pub namespace: Namespace,
    pub cache_use: CacheUse,
    pub tokens: Vec<i32>,
    pub tables: Tables,
    /// Prefix hashes of its full blocks.
    pub hashes: &'a [Hash],
    /// Leading blocks that were found, in the index or in steps in flight.
    pub num_cached_blocks: usize,
    /// Leading blocks that were found in the index.
    pub num_published: usize,
    /// Blocks behind the found ones that the step copies from the host tier; those of before are all published then.
    pub num_copied: usize,
    pub num_writable: usize,
    pub reserved_tokens: usize,
    pub tail_advice: Option<Advice>,
    pub kept: Box<[KeptPrefix]>,
}

impl Sequence {
    /// A sequence of a prompt. Nothing of it is scheduled beyond the blocks that were found.
    pub fn begin(new: NewSequence, block_size: usize) -> Sequence {
        let NewSequence { seq_id, tenant, root, namespace, cache_use, tokens, tables, hashes, .. } = new;
        let NewSequence { num_published, num_copied, num_writable, reserved_tokens, tail_advice, kept, .. } = new;
        let num_cached_blocks = new.num_cached_blocks + num_copied;
        Sequence {
            seq_id,
            number: 0,
            tenant,
            root,
            namespace,
            cache_use,
            tables,
            num_tokens: tokens.len(),
            tokens,
            num_cached: num_cached_blocks * block_size,
            num_computed: (num_published + num_copied) * block_size,
            num_scheduled: num_cached_blocks * block_size,
            num_drafts: 0,
            num_published,
            num_withheld: 0,
            num_writable,
            sampled_position: None,
            oldest_state: 0,
            released: false,
            reserved_tokens,
            num_reserved: 0,
            tail_advice,
            kept,
            in_host: None,
            last_hash: if num_published > 0 { hashes[num_published - 1] } else { root },
            hashes: hashes[num_published..].to_vec(),
        }
    }

    /// A fork: it begins with this one's first tokens, promised ones included. All but the last are computed as far as
    /// here. It has the same blocks, which the caller acquires.
    pub fn fork(&self, child_id: i32, num_tokens: usize, block_size: usize, index: &PrefixIndex) -> Sequence {
        let num_known = num_tokens.min(self.num_known());
        let num_scheduled = self.num_scheduled.min(num_tokens - 1);
        let num_published = self.num_published.min(num_scheduled / block_size);
        let (last_hash, hashes) = if num_published == self.num_published {
            let num_hashes = self.hashes.len().min((num_known / block_size).saturating_sub(num_published));
            (self.last_hash, self.hashes[..num_hashes].to_vec())
        } else {
            (self.prefix_hash(num_published, block_size, index), Vec::new())
        };
        Sequence {
            seq_id: child_id,
            number: 0,
            tenant: self.tenant,
            root: self.root,
            namespace: self.namespace.clone(),
            cache_use: self.cache_use,
            tables: self.tables.iter().map(|table| table.beginning(num_tokens.div_ceil(block_size))).collect(),
            tokens: self.tokens[..num_known].to_vec(),
            num_tokens,
            num_cached: self.num_cached.min(num_scheduled),
            num_computed: self.num_computed.min(num_scheduled),
            num_scheduled,
            num_drafts: 0,
            num_published,
            num_withheld: self.num_withheld.min(num_published),
            num_writable: 0,
            sampled_position: self.sampled_position.filter(|position| *position < num_tokens),
            oldest_state: self.oldest_state,
            released: false,
            reserved_tokens: 0,
            num_reserved: 0,
            tail_advice: self.tail_advice,
            kept: Box::default(), // the parent's uses count
            in_host: None,
            last_hash,
            hashes,
        }
    }

    /// The sequence as it is in the host tier: without published blocks, and without a token that the worker has sampled.
    pub fn offload(&self, in_host: HostTables, index: &PrefixIndex) -> Sequence {
        let is_dropped =
            |(at, block): &(usize, BlockId)| *at < self.num_published && index.past(*block) == Past::Dropped;
        let num_dropped_in = |table: &BlockTable| table.entries().rfind(is_dropped).map_or(0, |(last, _)| last + 1);
        let num_dropped = self.tables.iter().map(num_dropped_in).max().unwrap_or(0);
        Sequence {
            seq_id: self.seq_id,
            number: 0,
            tenant: self.tenant,
            root: self.root,
            namespace: self.namespace.clone(),
            cache_use: self.cache_use,
            tables: self.tables.iter().map(|table| BlockTable::new(table.num_passed(), Vec::new())).collect(),
            tokens: self.tokens.clone(),
            num_tokens: self.num_tokens,
            num_cached: self.num_cached,
            num_computed: self.num_computed,
            num_scheduled: self.num_scheduled,
            num_drafts: 0,
            num_published: 0,
            num_withheld: self.num_withheld.max(num_dropped),
            num_writable: 0,
            sampled_position: None,
            oldest_state: self.oldest_state,
            released: false,
            reserved_tokens: self.reserved_tokens,
            num_reserved: 0,
            tail_advice: self.tail_advice,
            kept: self.kept.clone(),
            in_host: Some(Box::new(in_host)),
            last_hash: self.root,
            hashes: Vec::new(),
        }
    }

    /// Returns to the pool with these tables: the first `num_found` blocks were found in the index, the others are its
    /// own.
    /// `hashes` are those of all its full blocks.
    pub fn restore(&mut self, tables: Tables, num_found: usize, hashes: &[Hash], block_size: usize) {
        let num_valid = num_found * block_size;
        self.tables = tables;
        self.num_computed = self.num_computed.max(num_valid);
        self.num_scheduled = self.num_scheduled.max(num_valid);
        self.num_published = num_found.max(self.num_withheld);
        self.last_hash = if self.num_published > 0 { hashes[self.num_published - 1] } else { self.root };
        self.hashes = hashes[self.num_published..].to_vec();
    }

    /// At a reset: the computed blocks that are not published will not be. In the pool these came from the host tier.
    pub fn withhold(&mut self, block_size: usize) {
        let num_computed = self.num_computed.min(self.num_known()) / block_size;
        if self.is_offloaded() {
            self.num_withheld = num_computed;
        } else if self.cache_use.writes() && num_computed > self.num_published {
            self.num_withheld = num_computed;
            self.take_hashes(num_computed, block_size);
        }
    }

    /// For a released sequence: tokens from this one on are not computed for it any more.
    pub fn limit_computed(&mut self, num_tokens: usize) {
        self.num_computed = self.num_computed.min(num_tokens);
    }

    pub fn is_offloaded(&self) -> bool {
        self.in_host.is_some()
    }

    pub fn num_known(&self) -> usize {
        self.tokens.len()
    }

    /// Tokens after the known ones that steps in flight are sampling.
    pub fn num_promised(&self) -> usize {
        self.num_tokens - self.num_known()
    }

    /// True if this computes just the token that the worker sampled last, the sequence's last one.
    pub fn is_decode(&self, extend: &Extend) -> bool {
        extend.num_tokens == 1 && extend.append.is_empty() && self.takes_drafts()
    }

    /// True if the one token that is left to compute, its last one, is the one that the worker sampled last.
    pub fn takes_drafts(&self) -> bool {
        self.sampled_position == Some(self.num_scheduled) && self.num_tokens == self.num_scheduled + 1
    }

    /// True if the slot of the next token to schedule is its own to write.
    pub fn has_slot(&self) -> bool {
        self.num_scheduled < self.num_writable
    }

    /// Its table in a layer group.
    pub fn table(&self, group: Group) -> &BlockTable {
        &self.tables[usize::from(group)]
    }

    /// The blocks of its first tokens, as far as it holds them.
    pub fn blocks_of(&self, num_tokens: usize, block_size: usize) -> impl Iterator<Item = BlockId> {
        let end = num_tokens.div_ceil(block_size);
        self.tables.iter().flat_map(move |table| table.range(0..end)).copied()
    }

    /// All blocks that it holds, group by group.
    pub fn blocks(&self) -> impl Iterator<Item = BlockId> {
        self.tables.iter().flat_map(|table| table.blocks()).copied()
    }

    /// Its blocks from index `first` of the tables on, the last one first.
    pub fn blocks_tail_first(&self, first: usize) -> Vec<BlockId> {
        tail_first(&self.tables, first..usize::MAX)
    }

    /// Writes its tables into a plan, as those of a sequence that begins.
    pub fn write_to(&self, plan: &mut GrantedStep) {
        for (group, table) in self.tables.iter().enumerate() {
            if group == 0 || !table.blocks().is_empty() {
                plan.write(self.seq_id, group as Group, table.num_passed(), table.blocks());
            }
        }
    }

    /// More known tokens; none is promised.
    pub fn append(&mut self, tokens: &[i32]) {
        self.tokens.extend_from_slice(tokens);
        self.num_tokens = self.num_known();
    }

    /// The next of the promised tokens becomes known.
    pub fn append_promised(&mut self, token: i32) {
        self.tokens.push(token);
    }

    /// A step computes the token that was sampled last and so many drafts after it, and samples as many tokens as it
    /// accepts drafts, and one more.
    pub fn send_drafts(&mut self, num_drafts: usize) {
        self.num_drafts = num_drafts;
        self.num_scheduled += 1 + num_drafts;
        self.num_tokens = self.num_scheduled + 1;
        self.sampled_position = None;
    }

    /// The step with its drafts was computed: those that it accepted become known, the others are no more. The token that
    /// it sampled after them is promised. Blocks stay in the tables, for the next step.
    pub fn accept_drafts(&mut self, accepted: &[i32]) {
        self.num_scheduled -= self.num_drafts - accepted.len();
        self.num_drafts = 0;
        self.tokens.extend_from_slice(accepted);
        self.num_tokens = self.num_scheduled + 1;
        self.sampled_position = Some(self.num_scheduled);
    }

    /// Keeps the first tokens, with promised ones, and their advice. Blocks stay in the table.
    pub fn truncate(&mut self, num_tokens: usize, block_size: usize, index: &PrefixIndex) {
        let num_full = num_tokens / block_size;
        if num_full < self.num_published {
            self.last_hash = self.prefix_hash(num_full, block_size, index);
            self.num_published = num_full;
            self.hashes.clear();
        } else {
            self.hashes.truncate(num_full - self.num_published);
        }
        self.num_withheld = self.num_withheld.min(num_full);
        KeptPrefix::cut(&mut self.kept, num_full);
        self.tokens.truncate(num_tokens);
        self.num_tokens = num_tokens;
        self.num_cached = self.num_cached.min(num_tokens);
        self.num_computed = self.num_computed.min(num_tokens);
        self.num_scheduled = self.num_scheduled.min(num_tokens);
        self.num_writable = 0;
        self.sampled_position = self.sampled_position.filter(|position| *position < num_tokens);
    }

    /// Removes the tokens that steps in flight were to compute and sample: back to the reported state.
    pub fn forget_uncomputed(&mut self) {
        self.num_scheduled = self.num_computed;
        self.num_drafts = 0;
        self.oldest_state = self.oldest_state.min(self.num_computed);
        self.num_tokens = self.num_known();
        self.num_writable = 0;
        self.sampled_position = self.sampled_position.filter(|position| *position < self.tokens.len());
    }

    /// The tokens of a block, which are all known.
    pub fn tokens_of(&self, index: usize, block_size: usize) -> &[i32] {
        &self.tokens[index * block_size..(index + 1) * block_size]
    }

    // -- hashes -------------------------------------------------------------------------------------------------------

    /// Prefix hash of the last published block; the root if there is none.
    pub fn last_hash(&self) -> &Hash {
        &self.last_hash
    }

    /// Prefix hash of the block at an index, not before the published ones, with known tokens.
    pub fn hash_at(&mut self, block_index: usize, block_size: usize) -> &Hash {
        self.hash_up_to(block_index + 1, block_size);
        &self.hashes[block_index - self.num_published]
    }

    /// Publishes the blocks up to the first `num_full`, all with known tokens: returns their hashes.
    pub fn take_hashes(&mut self, num_full: usize, block_size: usize) -> Vec<Hash> {
        self.hash_up_to(num_full, block_size);
        let taken: Vec<Hash> = self.hashes.drain(..num_full - self.num_published).collect();
        self.last_hash = taken.last().copied().unwrap_or(self.last_hash);
        self.num_published = num_full;
        taken
    }

    fn hash_up_to(&mut self, num_full: usize, block_size: usize) {
        let done = self.num_published + self.hashes.len();
        if num_full > done {
            let parent = self.hashes.last().copied().unwrap_or(self.last_hash);
            chain_hashes(parent, &self.tokens[done * block_size..num_full * block_size], block_size, &mut self.hashes);
        }
    }

    /// Hash of the first `num_full` blocks, at most the published ones; the root's of none.
    fn prefix_hash(&self, num_full: usize, block_size: usize, index: &PrefixIndex) -> Hash {
        if num_full == 0 {
            return self.root;
        }
        if num_full == self.num_published {
            return self.last_hash;
        }
        for (group, table) in self.tables.iter().enumerate() {
            if let Some(known) = table.get(num_full - 1).and_then(|block| index.hash(block)) {
                return identity(known, group as Group);
            }
        }
        let mut hashes = Vec::new();
        chain_hashes(self.root, &self.tokens[..num_full * block_size], block_size, &mut hashes);
        hashes[num_full - 1]
    }
}

/// All sequences of a pool, by row.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct SequenceTable {
    rows: Vec<Option<Sequence>>,
    free: Vec<Row>,
    num_offloaded: usize,
    next_number: u64,
}

impl SequenceTable {
    /// Rows taken in the worker: sequences that leases hold, and those released that steps in flight still run; but for
    /// those in the host tier.
    pub fn len(&self) -> usize {
        self.rows.len() - self.free.len() - self.num_offloaded
    }

    /// Sequences in the host tier, those that end with a step in flight included.
    pub fn num_offloaded(&self) -> usize {
        self.num_offloaded
    }

    /// The sequence of a row, if it is taken.
    pub fn find(&self, row: Row) -> Option<&Sequence> {
        self.rows.get(row as usize)?.as_ref()
    }

    pub fn get(&self, row: Row) -> &Sequence {
        self.rows[row as usize].as_ref().expect("a row that is referred to is taken")
    }

    pub fn get_mut(&mut self, row: Row) -> &mut Sequence {
        self.rows[row as usize].as_mut().expect("a row that is referred to is taken")
    }

    /// A row for a sequence that begins.
    pub fn enter(&mut self, mut sequence: Sequence) -> Row {
        sequence.number = self.next_number;
        self.next_number += 1;
        self.num_offloaded += usize::from(sequence.is_offloaded());
        if let Some(row) = self.free.pop() {
            self.rows[row as usize] = Some(sequence);
            return row;
        }
        self.rows.push(Some(sequence));
        self.rows.len() as Row - 1
    }

    /// Reports violations in the counts.
    pub fn audit(&self, wrong: &mut Vec<String>) {
        let num_offloaded = self.rows.iter().flatten().filter(|sequence| sequence.is_offloaded()).count();
        if num_offloaded != self.num_offloaded {
            wrong.push(format!("{} sequences counted in the host tier, {num_offloaded} are", self.num_offloaded));
        }
    }

    /// The sequence of this row leaves the host tier: its tables there, empty if it was not in it.
    pub fn take_from_host(&mut self, row: Row) -> HostTables {
        let in_host = self.get_mut(row).in_host.take();
        self.num_offloaded -= usize::from(in_host.is_some());
        in_host.map_or_else(HostTables::default, |tables| *tables)
    }

    /// Keeps those of these sequences that are of this tenant and with this root from publishing computed blocks: those
    /// that are in the host tier, or came from there.
    pub fn withhold(
        &mut self,
        rows: impl Iterator<Item = Row>,
        tenant: Option<TenantId>,
        root: Option<&Hash>,
        block_size: usize,
    ) {
        for row in rows {
            let sequence = self.get_mut(row);
            let is_meant =
                tenant.is_none_or(|tenant| tenant == sequence.tenant) && root.is_none_or(|root| *root == sequence.root);
            if is_meant {
                sequence.withhold(block_size);
            }
        }
    }

    /// Nothing needs this row any more.
    pub fn leave(&mut self, row: Row) -> Sequence {
        self.free.push(row);
        let sequence = self.rows[row as usize].take().expect("a row is left once");
        self.num_offloaded -= usize::from(sequence.is_offloaded());
        sequence
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::cache::pool::tests::Random;

    const ROOT: Hash = [7; 32];
    const BLOCK_SIZES: [usize; 4] = [1, 2, 3, 16];

    /// Sequence 1 with these tokens and blocks, and the numbers of blocks that were found, and found published.
    fn begin(
        tokens: Vec<i32>,
        blocks: Vec<BlockId>,
        hashes: &[Hash],
        num_cached_blocks: usize,
        num_published: usize,
        block_size: usize,
    ) -> Sequence {
        let (seq_id, root, tables) = (1, ROOT, one_table(blocks));
        let found = NewSequence { num_cached_blocks, num_published, hashes, ..NewSequence::default() };
        Sequence::begin(NewSequence { seq_id, root, tokens, tables, ..found }, block_size)
    }

    fn hashes_of(tokens: &[i32], block_size: usize) -> Vec<Hash> {
        let mut hashes = Vec::new();
        chain_hashes(ROOT, tokens, block_size, &mut hashes);
        hashes
    }

    pub(crate) fn one_table(blocks: Vec<BlockId>) -> Tables {
        Tables::from([BlockTable::new(0, blocks)])
    }

    /// A sequence with these tokens and blocks 1 to 40, none of them computed.
    fn sequence_of(tokens: &[i32]) -> Sequence {
        begin(tokens.to_vec(), (1..41).collect(), &[], 0, 0, 1)
    }

    fn numbers(count: usize) -> Vec<i32> {
        (0..count as i32).collect()
    }

    // -- tokens and blocks --------------------------------------------------------------------------------------------

    #[test]
    fn a_prompt_begins_behind_what_was_found() {
        for size in BLOCK_SIZES {
            let tokens = numbers(3 * size + 1);
            let hashes = hashes_of(&tokens, size);
            let mut sequence = begin(tokens.clone(), vec![1, 2, 3, 4], &hashes, 2, 1, size);
            assert_eq!((&sequence.tokens, sequence.num_tokens, sequence.seq_id), (&tokens, 3 * size + 1, 1));
            assert_eq!((sequence.num_cached, sequence.num_scheduled), (2 * size, 2 * size));
            assert_eq!((sequence.num_computed, sequence.num_published), (size, 1));
            assert_eq!((sequence.num_writable, sequence.sampled_position, sequence.released), (0, None, false));
            assert_eq!((sequence.last_hash(), &sequence.hashes[..]), (&hashes[0], &hashes[1..]));
            assert_eq!(sequence.take_hashes(3, size), hashes[1..3]);
            assert_eq!(sequence_of(&tokens).last_hash(), &ROOT);
        }
    }

    #[test]
    fn promised_tokens_become_known_one_by_one() {
        let mut sequence = sequence_of(&[7]);
        sequence.num_tokens = 3;
        assert_eq!((sequence.num_known(), sequence.num_promised()), (1, 2));
        sequence.append_promised(8);
        assert_eq!((sequence.num_tokens, sequence.num_promised()), (3, 1));
        sequence.append_promised(9);
        assert_eq!((&sequence.tokens[..], sequence.num_promised()), (&[7, 8, 9][..], 0));
        sequence.append(&[1, 2]);
        assert_eq!((&sequence.tokens[..], sequence.num_tokens), (&[7, 8, 9, 1, 2][..], 5));
    }

    #[test]
    fn promised_tokens_are_cut_off_first() {
        let (mut sequence, index) = (sequence_of(&[1, 2, 3]), PrefixIndex::new(2));
        sequence.num_tokens = 6;
        sequence.truncate(4, 2, &index);
        assert_eq!((sequence.num_known(), sequence.num_tokens), (3, 4));
        sequence.truncate(3, 2, &index);
        assert_eq!((sequence.num_known(), sequence.num_tokens), (3, 3));
        sequence.truncate(2, 2, &index);
        assert_eq!((&sequence.tokens[..], sequence.num_tokens), (&[1, 2][..], 2));
    }

    #[test]
    fn no_bound_is_beyond_the_tokens_that_are_kept() {
        for num_kept in 1..9 {
            let mut sequence = sequence_of(&numbers(8));
            (sequence.num_cached, sequence.num_computed, sequence.num_scheduled) = (2, 4, 7);
            (sequence.num_writable, sequence.sampled_position) = (16, Some(5));
            sequence.truncate(num_kept, 2, &PrefixIndex::new(2));
            assert_eq!((sequence.num_cached, sequence.num_computed), (num_kept.min(2), num_kept.min(4)));
            assert_eq!((sequence.num_scheduled, sequence.num_writable), (num_kept.min(7), 0));
            assert_eq!(sequence.sampled_position, (num_kept > 5).then_some(5));
            assert_eq!(sequence.table(0).end(), 40);
        }
    }

    #[test]
    fn what_will_not_come_is_forgotten() {
        for (sampled_position, left) in [(Some(3), None), (Some(5), None), (Some(2), Some(2)), (None, None)] {
            let mut sequence = sequence_of(&[1, 2, 3]);
            (sequence.num_tokens, sequence.num_scheduled, sequence.num_computed) = (6, 5, 2);
            (sequence.num_writable, sequence.sampled_position, sequence.oldest_state) = (16, sampled_position, 4);
            sequence.forget_uncomputed();
            assert_eq!(sequence.oldest_state, 2);
            assert_eq!((sequence.num_tokens, sequence.num_scheduled, sequence.num_computed), (3, 2, 2));
            assert_eq!((sequence.num_writable, sequence.sampled_position), (0, left));
        }
    }

    #[test]
    fn blocks_are_told_from_the_front_and_from_the_tail() {
        let sequence = begin(vec![], vec![1, 2, 3, 4], &[], 0, 0, 2);
        let lengths = [0, 1, 2, 3, 7, 8, 9, 100].map(|num_tokens| sequence.blocks_of(num_tokens, 2).count());
        assert_eq!(lengths, [0, 1, 1, 2, 4, 4, 4, 4]);
        assert!(sequence.blocks_of(3, 2).eq([1, 2]));
        assert_eq!(sequence.blocks_tail_first(0), [4, 3, 2, 1]);
        assert_eq!(sequence.blocks_tail_first(2), [4, 3]);
        assert_eq!((sequence.blocks_tail_first(4), sequence.blocks_tail_first(5)), (vec![], vec![]));
    }

    // -- forks --------------------------------------------------------------------------------------------------------

    #[test]
    fn a_fork_of_any_length_has_the_first_tokens_and_what_was_computed_of_them() {
        let index = PrefixIndex::new(64);
        for (size, num_blocks) in BLOCK_SIZES.into_iter().flat_map(|size| (0..4).map(move |blocks| (size, blocks))) {
            let (tokens, num_computed) = (numbers(3 * size + 1), num_blocks * size);
            let hashes = hashes_of(&tokens, size);
            let mut parent = sequence_of(&tokens);
            parent.num_tokens = tokens.len() + 2;
            (parent.num_scheduled, parent.num_computed, parent.num_cached) = (tokens.len() + 1, num_computed, size);
            (parent.num_writable, parent.sampled_position) = (4 * size, Some(tokens.len() + 1));
            parent.take_hashes(num_blocks, size);
            parent.hash_up_to(3, size);
            for num_tokens in 1..tokens.len() + 3 {
                let mut child = parent.fork(2, num_tokens, size, &index);
                let num_known = num_tokens.min(tokens.len());
                assert_eq!((child.seq_id, child.root, child.released, child.num_writable), (2, ROOT, false, 0));
                assert_eq!((&child.tokens[..], child.num_tokens), (&tokens[..num_known], num_tokens));
                assert_eq!(child.tables[..], [parent.table(0).beginning(num_tokens.div_ceil(size))]);
                assert_eq!(child.num_scheduled, num_tokens - 1);
                assert_eq!(child.num_computed, num_computed.min(num_tokens - 1));
                assert_eq!(child.num_cached, size.min(num_tokens - 1));
                let samples = num_tokens == tokens.len() + 2;
                assert_eq!(child.sampled_position, samples.then_some(tokens.len() + 1));
                let num_published = num_computed.min(num_tokens - 1) / size;
                assert_eq!(child.num_published, num_published);
                assert_eq!(child.last_hash(), [&[ROOT][..], &hashes].concat().get(num_published).unwrap());
                child.hash_up_to(num_known / size, size);
                assert_eq!(child.hashes, hashes[num_published..num_known / size]);
            }
            assert_eq!(parent.tokens, tokens);
        }
    }

    #[test]
    fn a_fork_of_who_was_not_scheduled_so_far_is_not_either() {
        let mut parent = sequence_of(&numbers(8));
        (parent.num_scheduled, parent.num_computed) = (5, 3);
        let child = parent.fork(2, 8, 2, &PrefixIndex::new(2));
        assert_eq!((child.num_scheduled, child.num_computed), (5, 3));
    }

    #[test]
    fn a_fork_goes_its_own_way() {
        for num_tokens in 1..5 {
            let tokens = numbers(5);
            let mut parent = sequence_of(&tokens);
            let mut child = parent.fork(2, num_tokens, 2, &PrefixIndex::new(2));
            child.append(&[91, 92]);
            parent.append(&[81]);
            assert_eq!(child.tokens, [&tokens[..num_tokens], &[91, 92]].concat());
            assert_eq!(parent.tokens, [&tokens[..], &[81]].concat());
        }
    }

    // -- hashes -------------------------------------------------------------------------------------------------------

    #[test]
    fn hashes_are_taken_in_any_pieces() {
        for size in BLOCK_SIZES {
            let tokens = numbers(5 * size + size / 2);
            let hashes = hashes_of(&tokens, size);
            for (first, ahead) in (1..6).flat_map(|first| (0..6).map(move |ahead| (first, ahead))) {
                let mut sequence = sequence_of(&tokens);
                if ahead > 0 {
                    assert_eq!(sequence.hash_at(ahead - 1, size), &hashes[ahead - 1]);
                }
                assert_eq!(sequence.take_hashes(first, size), hashes[..first]);
                assert_eq!((sequence.num_published, sequence.last_hash()), (first, &hashes[first - 1]));
                assert_eq!(sequence.hashes, hashes[first..first.max(ahead)]);
                assert_eq!(sequence.take_hashes(first, size), [[0; 32]; 0]);
                assert_eq!(sequence.take_hashes(5, size), hashes[first..]);
                assert_eq!((sequence.num_published, sequence.last_hash()), (5, &hashes[4]));
            }
        }
    }

    /// True if the index knows the blocks of the table, has dropped them, or knows others with the same content.
    #[test]
    fn the_hash_of_any_published_prefix_is_known_or_computed_again() {
        for (size, case) in BLOCK_SIZES.into_iter().flat_map(|size| (0..3).map(move |case| (size, case))) {
            let tokens = numbers(4 * size + 1);
            let hashes = [vec![ROOT], hashes_of(&tokens, size)].concat();
            let (mut sequence, mut index) = (sequence_of(&tokens), PrefixIndex::new(64));
            let taken = sequence.take_hashes(4, size);
            for (block, hash) in (1..).zip(&taken) {
                match case {
                    0 => assert_eq!(index.publish(hash, block), block),
                    1 => assert_eq!(index.publish(hash, block + 40), block + 40),
                    _ => {
                        index.publish(hash, block);
                        index.drop_hash(block);
                    }
                }
            }
            for (num_full, hash) in hashes.iter().enumerate() {
                assert_eq!(sequence.prefix_hash(num_full, size, &index), *hash);
            }
            for num_full in [4, 2, 0] {
                let mut kept = sequence_of(&tokens);
                kept.take_hashes(4, size);
                kept.truncate((num_full * size).max(1), size, &index);
                let num_full = kept.tokens.len() / size;
                assert_eq!((kept.num_published, kept.last_hash()), (num_full, &hashes[num_full]));
                kept.append(&tokens[kept.tokens.len()..]);
                assert_eq!(kept.take_hashes(4, size), hashes[num_full + 1..5]);
            }
        }
    }

    #[test]
    fn hashes_reach_no_further_than_the_tokens_that_are_kept() {
        for (size, num_full) in BLOCK_SIZES.into_iter().flat_map(|size| (1..5).map(move |full| (size, full))) {
            let tokens = numbers(4 * size);
            let mut sequence = sequence_of(&tokens);
            sequence.take_hashes(1, size);
            sequence.hash_up_to(4, size);
            sequence.truncate(num_full * size, size, &PrefixIndex::new(2));
            assert_eq!((sequence.num_published, &sequence.hashes[..]), (1, &hashes_of(&tokens, size)[1..num_full]));
        }
    }

    // -- the table ----------------------------------------------------------------------------------------------------

    #[test]
    fn rows_are_given_out_once_and_again_after_they_were_left() {
        let mut table = SequenceTable::default();
        let rows: Vec<Row> = (0..5).map(|token| table.enter(sequence_of(&[token]))).collect();
        assert_eq!((&rows[..], table.len()), (&[0, 1, 2, 3, 4][..], 5));
        assert_eq!((table.leave(1).tokens, table.leave(3).tokens, table.len()), (vec![1], vec![3], 3));
        let mut fresh = [table.enter(sequence_of(&[8])), table.enter(sequence_of(&[9]))];
        assert_eq!((table.get(fresh[0]).number, table.get(fresh[1]).number), (5, 6));
        fresh.sort_unstable();
        assert_eq!((fresh, table.enter(sequence_of(&[7])), table.len()), ([1, 3], 5, 6));
        assert_eq!([0, 2, 4].map(|row| table.get(row).tokens[0]), [0, 2, 4]);
        assert_eq!([0, 2, 4].map(|row| table.get(row).number), [0, 2, 4]);
        table.get_mut(2).append_promised(1);
        assert_eq!(table.get(2).tokens, [2, 1]);
    }

    #[test]
    #[should_panic(expected = "a row that is referred to is taken")]
    fn a_row_that_was_left_is_nobodys() {
        let mut table = SequenceTable::default();
        let row = table.enter(sequence_of(&[]));
        table.leave(row);
        table.get(row);
    }

    #[test]
    #[should_panic(expected = "a row is left once")]
    fn a_row_is_not_left_twice() {
        let mut table = SequenceTable::default();
        let row = table.enter(sequence_of(&[]));
        table.leave(row);
        table.leave(row);
    }

    // -- everything at once, beside plain lists -----------------------------------------------------------------------

    /// One sequence as lists.
    struct Plain {
        row: Row,
        tokens: Vec<i32>,
        num_tokens: usize,
        num_published: usize,
    }

    /// Sequences of two-letter tokens, so that many begin alike; each block has one content for ever.
    struct Model {
        size: usize,
        random: Random,
        table: SequenceTable,
        index: PrefixIndex,
        next_block: BlockId,
        plains: Vec<Plain>,
    }

    impl Model {
        fn new(size: usize, seed: u64) -> Model {
            let (table, index) = (SequenceTable::default(), PrefixIndex::new(6000));
            Model { size, random: Random(seed), table, index, next_block: 1, plains: Vec::new() }
        }

        fn some(&mut self) -> Vec<i32> {
            let count = self.random.below(2 * self.size + 1) + 1;
            self.random.tokens(count, 2)
        }

        /// A table for all tokens, of which the first `num_kept` blocks stay.
        fn fill(&mut self, which: usize, num_kept: usize) {
            let plain = &self.plains[which];
            let table = &mut self.table.get_mut(plain.row).tables[0];
            table.truncate(num_kept);
            while table.end() < plain.num_tokens.div_ceil(self.size) {
                table.extend(vec![self.next_block]);
                self.next_block += 1;
            }
        }

        fn do_anything(&mut self) {
            if self.plains.is_empty() {
                return self.begin();
            }
            let which = self.random.below(self.plains.len());
            match self.random.below(12) {
                0 | 1 => self.begin(),
                2 => self.append(which),
                3 => self.promise(),
                4 | 5 => self.keep_all(),
                6 => self.cut(which),
                7 => self.fork(which),
                8 | 9 => self.publish(which),
                10 => self.drop_some(),
                _ => self.leave(which),
            }
        }

        fn begin(&mut self) {
            let tokens = [self.some(), self.some()].concat();
            let (hashes, most) = (hashes_of(&tokens, self.size), (tokens.len() - 1) / self.size);
            let found = self.index.find(&hashes[..most]);
            let (num_found, num_cached) = (found.len(), most.min(found.len() + self.random.below(2)));
            let begun = begin(tokens.clone(), found, &hashes, num_cached, num_found, self.size);
            let row = self.table.enter(begun);
            self.plains.push(Plain { row, num_tokens: tokens.len(), tokens, num_published: num_found });
            self.fill(self.plains.len() - 1, num_found);
        }

        fn append(&mut self, which: usize) {
            let more = self.some();
            let plain = &mut self.plains[which];
            if plain.num_tokens == plain.tokens.len() {
                self.table.get_mut(plain.row).append(&more);
                plain.tokens.extend(more);
                plain.num_tokens = plain.tokens.len();
                self.fill(which, usize::MAX);
            }
        }

        fn promise(&mut self) {
            for which in 0..self.plains.len() {
                let plain = &mut self.plains[which];
                plain.num_tokens += self.random.below(3);
                self.table.get_mut(plain.row).num_tokens = plain.num_tokens;
                self.fill(which, usize::MAX);
            }
        }

        fn keep_all(&mut self) {
            for plain in self.plains.iter_mut().filter(|plain| plain.num_tokens > plain.tokens.len()) {
                let token = self.random.below(2) as i32;
                plain.tokens.push(token);
                self.table.get_mut(plain.row).append_promised(token);
            }
        }

        fn cut(&mut self, which: usize) {
            let plain = &mut self.plains[which];
            let num_tokens = self.random.below(plain.num_tokens) + 1;
            self.table.get_mut(plain.row).truncate(num_tokens, self.size, &self.index);
            plain.tokens.truncate(num_tokens);
            plain.num_tokens = num_tokens;
            plain.num_published = plain.num_published.min(num_tokens / self.size);
            self.fill(which, num_tokens / self.size);
        }

        fn fork(&mut self, which: usize) {
            let plain = &self.plains[which];
            let num_tokens = self.random.below(plain.num_tokens) + 1;
            let child = self.table.get(plain.row).fork(2, num_tokens, self.size, &self.index);
            let tokens = plain.tokens[..num_tokens.min(plain.tokens.len())].to_vec();
            let num_published = plain.num_published.min((num_tokens - 1) / self.size);
            self.plains.push(Plain { row: self.table.enter(child), tokens, num_tokens, num_published });
            self.fill(self.plains.len() - 1, num_published);
        }

        fn publish(&mut self, which: usize) {
            let plain = &mut self.plains[which];
            let (first, most) = (plain.num_published, plain.tokens.len() / self.size);
            let end = first + self.random.below(most - first + 1);
            let sequence = self.table.get_mut(plain.row);
            if end < most {
                assert_eq!(sequence.hash_at(end, self.size), &hashes_of(&plain.tokens, self.size)[end]);
            }
            let hashes = sequence.take_hashes(end, self.size);
            assert_eq!(hashes, hashes_of(&plain.tokens, self.size)[first..end]);
            plain.num_published = end;
            sequence.num_scheduled = sequence.num_scheduled.max(end * self.size);
            for (index, hash) in (first..end).zip(&hashes) {
                let standing = self.index.publish(hash, sequence.table(0).block(index));
                if self.random.below(2) == 0 {
                    sequence.tables[0].replace(index, standing);
                }
            }
        }

        fn drop_some(&mut self) {
            for block in 1..self.next_block {
                if self.index.is_findable(block) && self.random.below(3) == 0 {
                    self.index.drop_hash(block);
                }
            }
        }

        fn leave(&mut self, which: usize) {
            self.table.leave(self.plains.swap_remove(which).row);
        }

        fn check(&self) {
            assert_eq!(self.table.len(), self.plains.len());
            for plain in &self.plains {
                let sequence = self.table.get(plain.row);
                let hashes = [vec![ROOT], hashes_of(&plain.tokens, self.size)].concat();
                assert_eq!((&sequence.tokens, sequence.num_tokens), (&plain.tokens, plain.num_tokens));
                assert_eq!(sequence.num_published, plain.num_published);
                assert_eq!(sequence.last_hash(), &hashes[plain.num_published]);
                assert!(hashes[plain.num_published + 1..].starts_with(&sequence.hashes));
                for (num_full, hash) in hashes.iter().enumerate().take(plain.num_published + 1) {
                    assert_eq!(sequence.prefix_hash(num_full, self.size, &self.index), *hash);
                }
            }
        }
    }

    #[test]
    fn any_calls_leave_sequences_as_plain_lists_have_them() {
        for (size, seed) in BLOCK_SIZES.into_iter().flat_map(|size| (0..8).map(move |seed| (size, seed))) {
            let mut model = Model::new(size, seed);
            for _ in 0..100 {
                model.do_anything();
                model.check();
            }
        }
    }
}
