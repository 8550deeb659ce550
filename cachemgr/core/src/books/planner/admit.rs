//! Admits sequences: the longest known prefix, fresh blocks behind it, and a first run.

use crate::books::geometry::Geometry;
use crate::books::hits::Hit;
use crate::books::kept_prefix::KeptPrefix;
use crate::books::lease::Lease;
use crate::books::planner::advise::retain;
use crate::books::planner::finder::PrefixFinder;
use crate::books::planner::{Answer, Owner, StepPlanner, refuse_new};
use crate::books::plans::{Admission, CacheUse, PromptHashes};
use crate::books::sequences::{NewSequence, Row, Sequence};
use crate::books::tables::{BlockTable, Tables};
use crate::cache::accounts::TokenCounts;
use crate::cache::groups::{Group, identity};
use crate::cache::pool::BlockPool;
use crate::cache::prefix::{Hash, NULL_BLOCK};
use crate::cache::tenants::Asker;
use crate::errors::Result;

impl StepPlanner<'_> {
    /// `known`: hashes of its prompt that were computed before.
    pub(super) fn admit(
        &mut self,
        admission: &Admission,
        owner: Owner,
        reserve: usize,
        known: Option<&PromptHashes>,
    ) -> Answer {
        let (geometry, seq_id, tokens) = (self.geometry, admission.seq_id, &admission.tokens);
        let tenant = match owner {
            Ok(tenant) => tenant,
            Err(refusal) => return Ok(Err(refusal)),
        };
        refuse_if!(refuse_new(seq_id, self.lease, self.table, geometry));
        refuse_if!(self.room_for(tenant).refuse_impossible(admission));
        refuse_if!(self.budget.refuse_spent(seq_id));
        let root = self.lease.root(tenant, self.tenants, &admission.namespace, &geometry.model_fingerprint);
        let known = known.filter(|known| known.root == root).cloned();
        let mut prompt = known.unwrap_or_else(|| PromptHashes::new(root));
        prompt.extend(tokens, geometry.block_size, usize::MAX);
        let hashes = prompt.hashes;
        let (cache_use, num_sharable) = (admission.cache_use, geometry.num_sharable(tokens.len(), admission.cache_use));
        let Lease { in_flight, .. } = &*self.lease;
        let mut finder = PrefixFinder { geometry, pool: self.pool, table: self.table, in_flight, step: &self.step };
        let (hit, num_published) = finder.find(&hashes[..num_sharable]);
        let num_shared = hit.num_blocks;
        let hit = self.add_copies(&hashes[..num_sharable], hit, num_published);
        let num_found = hit.num_blocks;
        refuse_if!(self.refuse_computed_elsewhere(admission, &hashes[..num_sharable], num_found));
        let num_cached = num_found * geometry.block_size;
        let num_left = self.budget.num_within(tokens.len() - num_cached, admission.max_compute);
        let ends = geometry.ends_of_tables(tokens.len(), num_cached + num_left);
        let found = hit.blocks();
        let num_needed = hit.num_missing(&ends);
        let num_guaranteed = self.num_guaranteed(admission.reserved_tokens, &ends, &hit, num_published);
        let num_parked = self.pool.num_parked(&found);
        refuse_if!(self.room_for(tenant).refuse(seq_id, num_needed + num_guaranteed, num_parked, reserve));
        if num_shared == num_published {
            refuse_if!(self.refuse_on_disk(admission, &hashes[..num_sharable], &hit));
        }
        let miss = self.explain_miss(admission, tenant, &root, &hashes, num_found);
        self.plan.misses.extend(miss);
        let num_recomputed = num_recomputed(&hashes[num_found..num_sharable], self.pool, geometry);
        self.counters.recomputed_tokens += (num_recomputed * geometry.block_size) as u64;
        count_found(&hit, self.pool, geometry);
        self.pool.acquire(&found, 1)?;
        self.pool.advisor().end_waits(&found);
        let written = self.num_written(&hashes, num_found, cache_use);
        let (num_leading, copies) = (hit.num_leading(0), hit.copies.clone());
        let tables = allocate_tables(hit, &ends, &self.asker_for(tenant), self.pool)?;
        let kept = self.kept_of(admission);
        self.use_prefix(tenant, &kept, &tables, &hashes[..num_shared]);
        if cache_use.writes() {
            self.pool.records.roots.enter(&root, tenant, &admission.namespace);
            enter_admission(&tables[0], num_leading, &hashes, self.pool);
        }
        if !copies.is_empty() {
            self.bring_back(&copies, &tables);
            self.counters.found_in_host_tokens += ((num_found - num_shared) * geometry.block_size) as u64;
        }
        let new = NewSequence {
            seq_id: seq_id as i32,
            tenant,
            root,
            namespace: admission.namespace.clone(),
            cache_use,
            tokens: tokens.clone(),
            hashes: &hashes,
            num_cached_blocks: num_shared,
            num_published,
            num_copied: num_found - num_shared,
            num_writable: geometry.num_slots(ends.iter().copied().min().unwrap_or(0), admission.reserved_tokens),
            reserved_tokens: admission.reserved_tokens,
            tail_advice: retain(&admission.retention, &tables, geometry.block_size, self.now, self.pool),
            tables,
            kept,
        };
        let row = self.enter(Sequence::begin(new, geometry.block_size));
        if num_guaranteed > 0 || admission.reserved_tokens > 0 {
            self.lease.reserved.extend((admission.reserved_tokens > 0).then_some(row));
            self.lease.update_reservations(self.pool, self.table, geometry);
        }
        self.answer_admission(row, admission, written * geometry.block_size);
        let num_left = tokens.len() - num_cached;
        self.schedule_within(row, num_left, admission.max_compute);
        Ok(Ok(()))
    }

    /// The prefixes that an admission's breakpoints keep: none of a sequence that publishes nothing.
    fn kept_of(&self, admission: &Admission) -> Box<[KeptPrefix]> {
        let is_published = admission.cache_use.writes() && !self.geometry.has_recurrent_state;
        let breakpoints = if is_published { &admission.breakpoints[..] } else { &[] };
        KeptPrefix::of(breakpoints, self.geometry.block_size)
    }

    /// Of a prompt's full blocks behind those that were found, the ones that will be published: no block is by their
    /// hash yet, in one layer group at least.
    fn num_written(&self, hashes: &[Hash], num_found: usize, cache_use: CacheUse) -> usize {
        if !cache_use.writes() || self.geometry.has_recurrent_state {
            return 0;
        }
        self.pool.index().warm(&hashes[num_found..]);
        let is_known = |hash: &Hash, group| self.pool.index().lookup(&identity(hash, group)).is_some();
        let is_new = |hash: &&Hash| self.geometry.groups().any(|(group, _)| !is_known(hash, group));
        hashes[num_found..].iter().filter(is_new).count()
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
        if hit.num_blocks == num_published || !hit.copies.is_empty() {
            return num_guaranteed;
        }
        if reserved_tokens > 0 {
            let unpublished = |table: &BlockTable| table.range(num_published..usize::MAX).len();
            num_guaranteed += hit.tables.iter().map(unpublished).sum::<usize>();
        }
        let rows = self.lease.reserved.iter();
        let newly_at_risk = |row: &Row| {
            let sequence = self.table.get(*row);
            self.room_for(sequence.tenant).num_newly_at_risk(sequence, &hit.tables, hit.num_blocks)
        };
        num_guaranteed + rows.map(newly_at_risk).sum::<usize>()
    }

    /// Counts a sequence that was admitted, and enters its answer. What is resumed writes nothing: it was counted before.
    fn answer_admission(&mut self, row: Row, admission: &Admission, num_written: usize) {
        let sequence = self.table.get(row);
        let (num_cached, num_known) = (sequence.num_scheduled, sequence.num_known());
        let num_written = if admission.resumed { 0 } else { num_written };
        self.counters.count_admission(num_known, num_cached, num_written, admission.resumed);
        if !admission.resumed {
            let (admitted, cached, written) = (num_known as u64, num_cached as u64, num_written as u64);
            self.pool.accounts_mut().count_admission(sequence.tenant, TokenCounts { admitted, cached, written });
        }
        let num_kept = self.num_kept_tokens(row);
        let plan = &mut self.plan;
        if !admission.breakpoints.is_empty() || !plan.admitted_kept_counts.is_empty() {
            plan.admitted_kept_counts.resize(plan.admitted_ids.len(), 0);
            plan.admitted_kept_counts.push(num_kept as u32);
        }
        plan.admitted_ids.push(admission.seq_id as i32);
        plan.admitted_cached_counts.push(num_cached as u32);
        plan.admitted_written_counts.push(num_written as u32);
    }

    /// Schedules a sequence's next tokens, within the plan's budget and its own limit (0: no limit).
    pub(super) fn schedule_within(&mut self, row: Row, num_tokens: usize, max_compute: usize) {
        let count = self.budget.num_within(num_tokens, max_compute);
        self.budget.spend(count);
        if count > 0 {
            self.schedule(row, count);
        }
    }
}

/// The tables of a hit, with fresh blocks in the places of copies, and behind it up to these indexes. There is room.
pub(super) fn allocate_tables(hit: Hit, ends: &[usize], asker: &Asker, pool: &mut BlockPool) -> Result<Tables> {
    let Hit { mut tables, copies, .. } = hit;
    for (group, (table, end)) in tables.iter_mut().zip(ends).enumerate() {
        let places: Vec<usize> =
            copies.iter().filter(|copy| usize::from(copy.group) == group).map(|copy| copy.index).collect();
        let mut fresh = pool.allocate(places.len() + end - table.end(), group as Group, asker)?;
        let behind = fresh.split_off(places.len());
        for (index, block) in places.into_iter().zip(fresh) {
            table.replace(index, block);
        }
        table.extend(behind);
    }
    Ok(tables)
}

/// Tells the eviction policy the blocks of a sequence's first table, of which so many were found.
pub(super) fn enter_admission(table: &BlockTable, num_found: usize, hashes: &[Hash], pool: &mut BlockPool) {
    pool.parking_mut().admit(table.range(0..num_found), table.range(num_found..usize::MAX), hashes);
}

/// Of these blocks, which are not found, the leading ones with content that was computed before: in each group it was
/// evicted, or is cached.
fn num_recomputed(hashes: &[Hash], pool: &BlockPool, geometry: &Geometry) -> usize {
    let is_known = |hash: &Hash| pool.index().lookup(hash).is_some() || pool.records.losses.was_evicted(hash);
    let was_computed = |hash: &&Hash| geometry.groups().all(|(group, _)| is_known(&identity(hash, group)));
    hashes.iter().take_while(was_computed).count()
}

/// Counts the blocks that were found, by layer group.
pub(super) fn count_found(hit: &Hit, pool: &mut BlockPool, geometry: &Geometry) {
    if pool.groups.are_several() {
        for ((group, _), table) in geometry.groups().zip(&hit.tables) {
            let num_found = table.blocks().iter().filter(|block| **block != NULL_BLOCK).count() as u64;
            pool.groups.count(group, |counters| counters.num_found += num_found);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::books::planner::tests::reasons;
    use crate::books::plans::{CacheUse, Extend, PlanItem, StepRequest};
    use crate::books::tests::{Bench, admission};
    use crate::cache::groups::Span;
    use crate::cache::prefix::root_hash;
    use crate::errors::Reason;

    #[test]
    fn hashes_that_were_computed_before_are_taken_if_they_are_of_the_root() {
        let tokens = [1, 2, 3, 4, 5, 6, 7];
        let planned = |known: Option<PromptHashes>| {
            let mut bench = Bench::new(20);
            bench.admit(1, &tokens);
            bench.settle();
            let hashes = known.into_iter().collect();
            let request = StepRequest { admissions: vec![admission(2, &tokens)], hashes, ..StepRequest::default() };
            let plan = bench.plan(request);
            bench.settle();
            assert_eq!(bench.0.violations(), [""; 0]);
            (plan.admitted_cached_counts, bench.0.state(None))
        };
        let root = root_hash(b"", &b"".into(), b"f");
        let (known, state) = planned(None);
        assert_eq!(known, [6]);
        for most in 0..4 {
            for root in [root, [7; 32]] {
                let mut prompt = PromptHashes::new(root);
                assert_eq!(prompt.extend(&tokens, 2, most), most.min(3));
                assert_eq!(planned(Some(prompt)), (vec![6], state.clone()), "{most} hashes of {root:?}");
            }
        }
        let mut wrong = PromptHashes::new(root);
        wrong.extend(&[1, 2, 9, 9], 2, 9);
        assert_eq!(planned(Some(wrong)).0, [2], "they are used");
    }

    #[test]
    fn a_sequence_with_a_state_finds_nothing_and_goes_back_one_token_at_most() {
        let mut bench = Bench::with_states(20);
        bench.admit(1, &[1, 2, 3, 4, 5]);
        assert_eq!(bench.admit(2, &[1, 2, 3, 4, 5]).admitted_cached_counts, [0], "not what a step fills");
        bench.settle();
        assert_eq!(bench.admit(3, &[1, 2, 3, 4, 5]).admitted_cached_counts, [0], "nor what one has filled");
        assert_eq!(bench.0.num_cached_tokens(&[1, 2, 3, 4, 5], &b"".into(), b""), 0);
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
        assert_eq!((bench.0.pool().records.roots.iter().count(), bench.0.violations()), (0, vec![]));
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
            extends: vec![Extend { seq_id: 2, num_tokens: 1, append: vec![2], ..Extend::default() }],
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
        assert_eq!(bench.0.num_cached_tokens(&[1, 2, 3, 4, 60], &b"".into(), b""), 4);
        bench.admit(2, &[50, 51, 52, 53, 54]);
        bench.settle();
        bench.release(&[2]);
        bench.settle();
        assert_eq!(bench.0.num_cached_tokens(&[1, 2, 3, 4, 60], &b"".into(), b""), 0, "the window was evicted");
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
