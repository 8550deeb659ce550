//! Admits sequences: the longest known prefix, fresh blocks behind it, and a first run.

use smallvec::SmallVec;

use crate::books::hits::{Hit, Prefix};
use crate::books::planner::{Answer, Owner, StepPlanner};
use crate::books::plans::{Admission, CacheUse};
use crate::books::sequences::{Row, Sequence};
use crate::books::tables::{BlockTable, Tables};
use crate::cache::groups::{Group, identity};
use crate::cache::pool::BlockState;
use crate::cache::prefix::{BlockId, Hash, Past, chain_hashes};
use crate::cache::tenants::Asker;
use crate::errors::{Reason, Refusal, Result};

impl StepPlanner<'_> {
    pub(super) fn admit(&mut self, admission: &Admission, owner: Owner, reserve: usize) -> Answer {
        let (geometry, seq_id, tokens) = (self.geometry, admission.seq_id, &admission.tokens);
        let tenant = match owner {
            Ok(tenant) => tenant,
            Err(refusal) => return Ok(Err(refusal)),
        };
        refuse_if!(self.refuse_new(seq_id));
        refuse_if!(self.room_for(tenant).refuse_impossible(admission));
        refuse_if!(self.refuse_over_budget(seq_id));
        let root = self.lease.root(tenant, self.tenants, &admission.salt, &geometry.model_fingerprint);
        let mut hashes = Vec::new();
        chain_hashes(root, tokens, geometry.block_size, &mut hashes);
        let (cache_use, num_sharable) = (admission.cache_use, self.num_sharable(tokens.len(), admission.cache_use));
        let (hit, num_published) = self.find_prefix(&hashes[..num_sharable]);
        let num_found = hit.num_blocks;
        let num_cached = num_found * geometry.block_size;
        let num_left = self.num_within(tokens.len() - num_cached, admission.max_compute);
        let ends = geometry.ends_of_tables(tokens.len(), num_cached + num_left);
        let found = hit.blocks();
        let num_needed = hit.num_missing(&ends);
        let num_guaranteed = self.num_guaranteed(admission.reserved_tokens, &ends, &hit, num_published);
        let num_parked = self.pool.num_parked(&found);
        refuse_if!(self.room_for(tenant).refuse(seq_id, num_needed + num_guaranteed, num_parked, reserve));
        let num_recomputed = self.num_recomputed(&hashes[num_found..num_sharable]);
        self.counters.recomputed_tokens += (num_recomputed * geometry.block_size) as u64;
        self.count_found(&hit);
        self.pool.acquire(&found, 1)?;
        self.pool.end_waits(&found);
        let tables = self.allocate_tables(hit.tables, &ends, &self.asker_for(tenant))?;
        if cache_use.writes() {
            self.pool.enter_root(&root, tenant, &admission.salt);
            self.enter_admission(&tables[0], num_found, &hashes);
        }
        let num_writable = geometry.num_slots(ends.iter().copied().min().unwrap_or(0), admission.reserved_tokens);
        let mut sequence = Sequence::begin(
            seq_id as i32,
            tenant,
            root,
            tokens.clone(),
            tables,
            &hashes,
            num_found,
            num_published,
            geometry.block_size,
        );
        sequence.num_writable = num_writable;
        sequence.reserved_tokens = admission.reserved_tokens;
        sequence.tail_advice = self.advise(&admission.retention, &sequence.tables);
        sequence.salt = admission.salt.clone();
        sequence.cache_use = cache_use;
        let row = self.enter(sequence);
        if num_guaranteed > 0 || admission.reserved_tokens > 0 {
            self.lease.reserved.extend((admission.reserved_tokens > 0).then_some(row));
            self.lease.update_reservations(self.pool, self.table, geometry);
        }
        self.run_admitted(row, admission.max_compute, admission.resumed);
        Ok(Ok(()))
    }

    /// Extends tables by fresh blocks up to these indexes. There is room.
    pub(super) fn allocate_tables(&mut self, mut tables: Tables, ends: &[usize], asker: &Asker) -> Result<Tables> {
        for (group, (table, end)) in tables.iter_mut().zip(ends).enumerate() {
            table.extend(self.pool.allocate(end - table.end(), group as Group, asker)?);
        }
        Ok(tables)
    }

    /// Tells the eviction policy the blocks of a sequence's first table, of which so many were found.
    pub(super) fn enter_admission(&mut self, table: &BlockTable, num_found: usize, hashes: &[Hash]) {
        self.pool.enter_admission(table.range(0..num_found), table.range(num_found..usize::MAX), hashes);
    }

    /// Of these blocks, which are not found, the leading ones with content that was computed before: in each group it was
    /// evicted, or is cached.
    pub(super) fn num_recomputed(&self, hashes: &[Hash]) -> usize {
        let is_known = |hash: &Hash| self.pool.index().lookup(hash).is_some() || self.pool.losses().was_evicted(hash);
        let was_computed = |hash: &&Hash| self.geometry.groups().all(|(group, _)| is_known(&identity(hash, group)));
        hashes.iter().take_while(was_computed).count()
    }

    pub(super) fn count_found(&mut self, hit: &Hit) {
        if self.pool.groups().are_several() {
            for ((group, _), table) in self.geometry.groups().zip(&hit.tables) {
                let num_found = table.blocks().len() as u64;
                self.pool.groups_mut().count(group, |counters| counters.num_found += num_found);
            }
        }
    }

    /// Blocks that must be allocatable beside those that are allocated now: for the future tokens of a sequence with a
    /// reservation, and for the blocks that it shares with others before they are computed, in case that fails; the
    /// same for these others.
    pub(super) fn num_guaranteed(
        &self,
        reserved_tokens: usize,
        ends: &[usize],
        hit: &Hit,
        num_published: usize,
    ) -> usize {
        let mut num_guaranteed = self.geometry.num_to_come(reserved_tokens, ends);
        if hit.num_blocks == num_published {
            return num_guaranteed;
        }
        if reserved_tokens > 0 {
            let unpublished = |table: &BlockTable| table.range(num_published..usize::MAX).len();
            num_guaranteed += hit.tables.iter().map(unpublished).sum::<usize>();
        }
        let rows = self.lease.reserved.iter();
        num_guaranteed + rows.map(|row| self.num_newly_at_risk(*row, &hit.tables, hit.num_blocks)).sum::<usize>()
    }

    pub(super) fn num_newly_at_risk(&self, row: Row, shared: &[BlockTable], end: usize) -> usize {
        let sequence = self.table.get(row);
        self.room_for(sequence.tenant).num_newly_at_risk(sequence, shared, end)
    }

    /// The longest known prefix, and the number of its blocks in the index; steps in flight fill the rest.
    ///
    /// `hashes` are those of the blocks that may be found.
    pub(super) fn find_prefix(&mut self, hashes: &[Hash]) -> (Hit, usize) {
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
    pub(super) fn find_shareable(&mut self, index: usize, hash: &Hash) -> Option<SmallVec<[BlockId; 1]>> {
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

    /// Blocks of a prompt that may be found: at least one token is left to compute. None for a model with a state per
    /// sequence, and for a sequence that does not read the cache.
    pub(super) fn num_sharable(&self, num_tokens: usize, cache_use: CacheUse) -> usize {
        let is_read = cache_use.reads() && !self.geometry.has_recurrent_state;
        if is_read { num_tokens.saturating_sub(1) / self.geometry.block_size } else { 0 }
    }

    /// The block at this index of a group's table that a step in flight of the lease, or this one, fills: the first such
    /// block.
    pub(super) fn find_filled(&mut self, index: usize, group: Group, hash: &Hash) -> Option<BlockId> {
        let steps = self.lease.in_flight.iter().chain([&self.step]);
        for fill in steps.flat_map(|step| &step.fills).filter(|fill| (fill.first..fill.end).contains(&index)) {
            let sequence = self.table.get_mut(fill.row);
            if sequence.hash_at(index, self.geometry.block_size) == hash {
                return sequence.table(group).get(index);
            }
        }
        None
    }

    pub(super) fn is_shareable(&self, block: BlockId) -> bool {
        self.pool.state(block) == BlockState::Active || self.pool.index().past(block) == Past::Findable
    }

    pub(super) fn run_admitted(&mut self, row: Row, max_compute: usize, is_resumed: bool) {
        let sequence = self.table.get(row);
        let (start, num_known) = (sequence.num_scheduled, sequence.num_known());
        self.counters.count_admission(num_known, start, is_resumed);
        self.plan.admitted_ids.push(sequence.seq_id);
        self.plan.admitted_cached_counts.push(start as u32);
        self.schedule_within(row, num_known - start, max_compute);
    }

    /// Of so many tokens, those that may be computed within the plan's budget and a limit (0: no limit).
    pub(super) fn num_within(&self, num_tokens: usize, max_compute: usize) -> usize {
        let limits = [(max_compute > 0).then_some(max_compute), self.budget];
        limits.into_iter().flatten().fold(num_tokens, usize::min)
    }

    /// Schedules a sequence's next tokens, within the plan's budget and its own limit (0: no limit).
    pub(super) fn schedule_within(&mut self, row: Row, num_tokens: usize, max_compute: usize) {
        let count = self.num_within(num_tokens, max_compute);
        self.budget = self.budget.map(|budget| budget - count);
        if count > 0 {
            self.schedule(row, count);
        }
    }

    pub(super) fn refuse_over_budget(&self, seq_id: i64) -> Option<Refusal> {
        if self.budget != Some(0) {
            return None;
        }
        let message = format!("the plan's admission_token_budget was used up before sequence {seq_id}");
        Some(Refusal::new(Reason::TokenBudgetSpent, message).with("sequence_id", seq_id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::books::planner::tests::reasons;
    use crate::books::plans::{Extend, PlanItem, StepRequest};
    use crate::books::tests::{Bench, admission};
    use crate::cache::groups::Span;

    #[test]
    fn a_sequence_with_a_state_finds_nothing_and_goes_back_one_token_at_most() {
        let mut bench = Bench::with_states(20);
        bench.admit(1, &[1, 2, 3, 4, 5]);
        assert_eq!(bench.admit(2, &[1, 2, 3, 4, 5]).admitted_cached_counts, [0], "not what a step fills");
        bench.settle();
        assert_eq!(bench.admit(3, &[1, 2, 3, 4, 5]).admitted_cached_counts, [0], "nor what one has filled");
        assert_eq!(bench.0.num_cached_tokens(&[1, 2, 3, 4, 5], b"", b""), 0);
        assert_eq!(reasons(&bench.fork(1, &[4], 4)), [(PlanItem::Fork, 4, Reason::PositionOutOfRange)]);
        assert_eq!(reasons(&bench.trim(1, 3)), [(PlanItem::Trim, 1, Reason::PositionOutOfRange)]);
        assert_eq!(reasons(&bench.fork(1, &[4], 5)), []);
        assert_eq!(reasons(&bench.fork(4, &[5], 4)), [(PlanItem::Fork, 5, Reason::PositionOutOfRange)], "not run yet");
        assert_eq!(bench.extend(4, 1, &[]).run_starts, [4]);
        assert_eq!(reasons(&bench.trim(1, 4)), []);
        assert_eq!(bench.extend(1, 1, &[9]).run_starts, [4]);
        assert_eq!(bench.0.violations(), [""; 0]);
    }

    #[test]
    fn who_only_writes_computes_all_and_takes_the_block_that_stands() {
        let mut bench = Bench::new(20);
        let using = |seq_id, cache_use| Admission { cache_use, ..admission(seq_id, &[1, 2, 3, 4, 5]) };
        let admit = |bench: &mut Bench, admission| {
            bench.plan(StepRequest { admissions: vec![admission], ..StepRequest::default() }).admitted_cached_counts
        };
        assert_eq!(admit(&mut bench, using(1, CacheUse::None)), [0]);
        assert_eq!(admit(&mut bench, using(2, CacheUse::WriteOnly)), [0], "in flight");
        assert_eq!(admit(&mut bench, using(3, CacheUse::ReadAndWrite)), [4], "of the second one, which publishes");
        assert_eq!(bench.blocks(3)[..2], bench.blocks(2)[..2]);
        bench.settle();
        let own = bench.blocks(2)[..2].to_vec();
        for cache_use in [CacheUse::WriteOnly, CacheUse::None] {
            let check = bench.0.check_admission(b"", &using(9, cache_use), 0);
            assert_eq!((check.num_cached_tokens, check.needed), (0, 3));
            assert_eq!(admit(&mut bench, using(4, cache_use)), [0]);
            assert!(bench.blocks(4)[..2] != own);
            bench.settle();
            assert_eq!(bench.blocks(4)[..2] == own, cache_use == CacheUse::WriteOnly, "one block stands");
            bench.release(&[4]);
            bench.settle();
        }
        assert_eq!((bench.0.pool().index().num_published(), bench.0.counters().recomputed_tokens), (2, 0));
        assert_eq!(bench.0.violations(), [""; 0]);
    }

    #[test]
    fn nothing_of_who_uses_no_cache_can_be_found_whatever_becomes_of_it() {
        let mut bench = Bench::new(20);
        let private = Admission { cache_use: CacheUse::None, ..admission(1, &[1, 2, 3]) };
        bench.plan(StepRequest { admissions: vec![private], ..StepRequest::default() });
        bench.settle();
        bench.fork(1, &[2], 4);
        bench.settle();
        bench.extend(2, 2, &[7]);
        bench.settle();
        bench.offload(2);
        bench.settle();
        bench.restore(2);
        bench.settle();
        bench.extend(2, 1, &[]);
        bench.release(&[1]);
        bench.settle();
        assert_eq!(bench.sequence(2).cache_use, CacheUse::None);
        bench.release(&[2]);
        bench.settle();
        assert_eq!((bench.0.pool().index().num_published(), bench.0.pool().counts().free), (0, 20));
        assert_eq!((bench.0.pool().roots().iter().count(), bench.0.violations()), (0, vec![]));
    }

    #[test]
    fn a_block_being_filled_is_shared_only_if_all_before_it_is_the_same() {
        let mut bench = Bench::new(20);
        bench.admit(1, &[1, 2, 3, 4, 5]);
        let plan = bench.admit(2, &[9, 2, 3, 4, 5]);
        assert_eq!(plan.admitted_cached_counts, [0]);
        assert_eq!(bench.admit(3, &[1, 2, 3, 4, 6]).admitted_cached_counts, [4]);
        assert_eq!(bench.admit(4, &[1, 2, 9, 4, 6]).admitted_cached_counts, [2]);
        let (first, third, fourth) = (bench.blocks(1), bench.blocks(3), bench.blocks(4));
        assert_eq!((&third[..2], &fourth[..1]), (&first[..2], &first[..1]));
        assert_eq!((bench.sequence(3).num_published, bench.0.violations()), (0, vec![]));
    }

    #[test]
    fn a_block_is_shared_while_a_chunk_of_it_is_filled_only_when_it_is_full() {
        let mut bench = Bench::new(20);
        let mut chunked = admission(1, &[1, 2, 3, 4, 5]);
        chunked.max_compute = 3;
        bench.plan(StepRequest { admissions: vec![chunked], ..StepRequest::default() });
        assert_eq!(bench.admit(2, &[1, 2, 3, 4, 5]).admitted_cached_counts, [2]);
        bench.extend(1, 1, &[]);
        assert_eq!(bench.admit(3, &[1, 2, 3, 4, 5]).admitted_cached_counts, [4]);
    }

    #[test]
    fn of_blocks_filled_alike_the_one_of_the_earlier_step_is_shared() {
        let mut bench = Bench::new(20);
        bench.admit(1, &[1, 2, 3]);
        let mut short = admission(2, &[1]);
        short.max_compute = 1;
        bench.plan(StepRequest { admissions: vec![short], ..StepRequest::default() });
        bench.trim(2, 1);
        let plan = bench.plan(StepRequest {
            extends: vec![Extend { seq_id: 2, num_tokens: 1, append: vec![2] }],
            admissions: vec![admission(3, &[1, 2, 3])],
            ..StepRequest::default()
        });
        assert_eq!(plan.admitted_cached_counts, [2]);
        assert_ne!(bench.blocks(1)[0], bench.blocks(2)[0]);
        assert_eq!(bench.blocks(3)[0], bench.blocks(1)[0]);
    }

    #[test]
    fn a_budget_and_a_limit_of_its_own_bound_what_an_admission_computes() {
        let mut bench = Bench::new(20);
        let limited =
            |seq_id, max_compute| Admission { max_compute, ..admission(seq_id, &[seq_id as i32, 7, 7, 7, 7]) };
        let plan = bench.plan(StepRequest {
            admissions: vec![limited(1, 2), limited(2, 0), limited(3, 9), limited(4, 1)],
            admission_token_budget: 9,
            ..StepRequest::default()
        });
        assert_eq!(plan.run_token_counts, [2, 5, 2]);
        assert_eq!(reasons(&plan), [(PlanItem::Admission, 4, Reason::TokenBudgetSpent)]);
    }

    #[test]
    fn tokens_are_computed_again_if_the_window_before_them_was_evicted() {
        let mut bench = Bench::with_groups(13, &[Span::Full, Span::Sliding(3)]);
        bench.admit(1, &[1, 2, 3, 4, 5, 6, 7, 8, 9]);
        bench.settle();
        assert_eq!(bench.plan(StepRequest::default()).passed_counts, [3]);
        bench.settle();
        assert_eq!(bench.0.num_cached_tokens(&[1, 2, 3, 4, 60], b"", b""), 4);
        bench.admit(2, &[50, 51, 52, 53, 54]);
        bench.settle();
        bench.release(&[2]);
        bench.settle();
        assert_eq!(bench.0.num_cached_tokens(&[1, 2, 3, 4, 60], b"", b""), 0, "the window was evicted");
        assert_eq!(bench.0.counters().recomputed_tokens, 0);
        bench.admit(3, &[1, 2, 3, 4, 60]);
        assert_eq!(bench.0.counters().recomputed_tokens, 4);
    }

    #[test]
    fn who_came_back_does_not_count_as_new() {
        let mut bench = Bench::new(20);
        bench.admit(1, &[1; 5]);
        bench.settle();
        bench.plan(StepRequest {
            releases: vec![1],
            admissions: vec![Admission { resumed: true, ..admission(2, &[1; 6]) }],
            ..StepRequest::default()
        });
        let counters = bench.0.counters();
        assert_eq!((counters.admissions, counters.admitted_tokens, counters.cached_tokens), (1, 5, 0));
        let resumed = (counters.resumed_admissions, counters.resumed_tokens, counters.resumed_cached_tokens);
        assert_eq!(resumed, (1, 6, 4));
    }
}
