//! Moves sequences to the host tier and back, and copies evicted blocks there, and back for admissions.

use crate::books::geometry::Geometry;
use crate::books::hits::{CopyBack, Hit, Place, Prefix, Tiers};
use crate::books::planner::admit::{allocate_tables, count_found, enter_admission};
use crate::books::planner::advise::advise_fresh;
use crate::books::planner::{Answer, StepPlanner, find_in_pool, sequence_not_found};
use crate::books::plans::{Admission, HostCopyUse, Restore};
use crate::books::room::{refuse_no_row, update_reservation};
use crate::books::sequences::{Row, Sequence};
use crate::books::tables::{BlockTable, HostTables};
use crate::cache::pool::BlockPool;
use crate::cache::prefix::{BlockId, Hash, chain_hashes};
use crate::cache::tier::TierBlockId;
use crate::errors::{Reason, Refusal, Result};

/// The limit of evicted blocks that one plan copies to the host tier, for each layer group: the copies delay its step,
/// and a block has the less layers, the more groups there are.
const MAX_KEPT_IN_PLAN: usize = 64;

impl StepPlanner<'_> {
    /// Moves a sequence to the host tier: a block there for each one that is computed, or will be by steps in flight;
    /// one at least.
    pub(super) fn offload(&mut self, seq_id: i64) -> Answer {
        let row = match find_in_pool(seq_id, self.lease, self.table) {
            Ok(row) => row,
            Err(refusal) => return Ok(Err(refusal)),
        };
        let sequence = self.table.get(row);
        let end = self.geometry.num_blocks_for(sequence.num_scheduled).max(1);
        let sources: Vec<&[BlockId]> = sequence.tables.iter().map(|table| table.range(0..end)).collect();
        let counts: Vec<usize> = sources.iter().map(|blocks| blocks.len()).collect();
        let num_copied = counts.iter().sum();
        refuse_if!(self.host.refuse(seq_id, num_copied));
        let blocks = self.host.allocate(num_copied, self.pool.accounts())?;
        self.plan.offloaded_ids.push(sequence.seq_id);
        sources.iter().for_each(|blocks| self.plan.offload_sources.extend_from_slice(blocks));
        self.plan.offload_targets.extend_from_slice(&blocks);
        self.counters.offloads += 1;
        self.counters.offloaded_blocks += num_copied as u64;
        let in_host = HostTables { blocks, counts };
        let (num_tokens, offloaded) = (sequence.num_tokens, sequence.offload(in_host, self.pool.index()));
        let blocks = self.end(row);
        let heir = self.table.enter(offloaded);
        self.lease.sequences.insert(seq_id as i32, heir);
        for step in &mut self.lease.in_flight {
            step.hand_over(row, heir, num_tokens);
        }
        self.pool.retire(&blocks)?;
        self.step.holds.push(blocks);
        Ok(Ok(()))
    }

    /// Brings a sequence back into blocks of the pool: those that the index has, and fresh ones that are copied to.
    pub(super) fn restore(&mut self, restore: &Restore, reserve: usize) -> Answer {
        let (geometry, seq_id) = (self.geometry, restore.seq_id);
        let Some(row) = self.lease.row_of(seq_id) else {
            return Ok(Err(sequence_not_found(seq_id)));
        };
        refuse_if!(refuse_unrestorable(self.table.get(row)));
        refuse_if!(refuse_no_row(seq_id, self.table, geometry));
        let sequence = self.table.get(row);
        let (num_tokens, asker) = (sequence.num_known(), self.asker_for(sequence.tenant));
        refuse_if!(self.room_for(asker.tenant).refuse_too_long(
            seq_id,
            num_tokens.max(sequence.reserved_tokens),
            sequence.reserved_tokens
        ));
        refuse_if!(self.budget.refuse_spent(seq_id));
        let mut hashes = Vec::new();
        chain_hashes(sequence.root, &sequence.tokens, geometry.block_size, &mut hashes);
        let (cache_use, reserved_tokens) = (sequence.cache_use, sequence.reserved_tokens);
        let hit =
            find_for_restore(sequence, &hashes[..geometry.num_sharable(num_tokens, cache_use)], self.pool, geometry);
        let num_scheduled = sequence.num_scheduled.max(hit.num_blocks * geometry.block_size);
        let num_left = self.budget.num_within(num_tokens - num_scheduled, restore.max_compute);
        let ends = geometry.ends_of_tables(num_tokens, num_scheduled + num_left);
        let found = hit.blocks();
        let num_needed = hit.num_missing(&ends);
        let num_guaranteed = geometry.num_to_come(reserved_tokens, &ends);
        let num_parked = self.pool.num_parked(&found);
        refuse_if!(self.room_for(asker.tenant).refuse(seq_id, num_needed + num_guaranteed, num_parked, reserve));
        count_found(&hit, self.pool, geometry);
        self.pool.acquire(&found, 1)?;
        let (num_found, firsts) = (hit.num_blocks, hit.tables.iter().map(BlockTable::end).collect::<Vec<_>>());
        let tables = allocate_tables(hit, &ends, &asker, self.pool)?;
        if cache_use.writes() {
            enter_admission(&tables[0], num_found, &hashes, self.pool);
        }
        for (table, first) in tables.iter().zip(&firsts) {
            advise_fresh(table.range(*first..usize::MAX), self.table.get(row).tail_advice, self.pool);
        }
        let kept = self.table.get(row).kept.clone();
        let num_withheld = self.table.get(row).num_withheld;
        if num_withheld == 0 {
            self.use_prefix(asker.tenant, &kept, &tables, &hashes[..num_found]);
        }
        self.copy_back(row, &tables, &firsts)?;
        let sequence = self.table.get_mut(row);
        sequence.restore(tables, num_found, &hashes, geometry.block_size);
        sequence.write_to(&mut self.plan);
        self.plan.restored_ids.push(sequence.seq_id);
        self.plan.restored_counts.push(sequence.num_scheduled as u32);
        self.counters.restores += 1;
        self.lease.reserved.extend((sequence.reserved_tokens > 0).then_some(row));
        let num_left = num_tokens - sequence.num_scheduled;
        update_reservation(row, self.pool, self.table, self.geometry);
        self.schedule_within(row, num_left, restore.max_compute);
        Ok(Ok(()))
    }

    /// Copies the computed blocks that were not found, in each table from an index of `firsts` on, to fresh ones. All host
    /// blocks of the sequence are free when the step has ended.
    pub(super) fn copy_back(&mut self, row: Row, tables: &[BlockTable], firsts: &[usize]) -> Result<()> {
        let HostTables { blocks: host_blocks, counts } = self.table.take_from_host(row);
        let sequence = self.table.get(row);
        let end = self.geometry.num_blocks_for(sequence.num_scheduled);
        let mut num_before = 0; // host blocks of the groups before
        for (group, (table, first)) in tables.iter().zip(firsts).enumerate() {
            let num_passed = sequence.tables[group].num_passed();
            if *first < end {
                let sources = &host_blocks[num_before + first - num_passed..num_before + end - num_passed];
                self.plan.restore_sources.extend_from_slice(sources);
                self.plan.restore_targets.extend_from_slice(table.range(*first..end));
                self.counters.restored_blocks += sources.len() as u64;
            }
            num_before += counts[group];
        }
        self.host.retire(&host_blocks)?;
        self.step.host_holds.push(host_blocks);
        Ok(())
    }

    /// Copies the blocks that this plan has evicted to the host tier, as many as MAX_KEPT_IN_PLAN says, those worth most;
    /// none if the plan makes no such copies. The step copies them before it writes any block.
    pub(super) fn keep_evicted(&mut self) {
        let evicted = self.pool.take_evicted();
        if self.host_copy_use != HostCopyUse::ThereAndBack {
            return;
        }
        let most = MAX_KEPT_IN_PLAN * self.geometry.groups.len();
        for evicted in &evicted[evicted.len().saturating_sub(most)..] {
            if !self.host.may_keep(evicted) {
                continue;
            }
            let Some(copy) = self.host.keep(evicted.content, self.pool.accounts()) else { continue };
            self.plan.offload_sources.push(evicted.block);
            self.plan.offload_targets.push(copy);
            self.step.host_holds.push(vec![copy]);
            self.step.host_arriving.push(copy);
            self.counters.kept_in_host_blocks += 1;
        }
    }

    /// A prompt's blocks in the pool, in the host tier if the plan makes copies back, and perhaps on the disk.
    pub(super) fn tiers<'a>(&'a self, hashes: &'a [Hash], has_disk: bool) -> Tiers<'a> {
        let prefix = Prefix { geometry: self.geometry, index: self.pool.index(), hashes };
        let host = (self.host_copy_use != HostCopyUse::None).then(|| self.host.copies());
        Tiers { prefix, host, disk: has_disk.then(|| self.disk.copies()) }
    }

    /// The longest prefix with copies in the host tier: `hit`, the pool's, if they make it no longer. No copies behind
    /// blocks that steps in flight fill: these steps may fail.
    pub(super) fn add_copies(&self, hashes: &[Hash], hit: Hit, num_published: usize) -> Hit {
        if self.host.copies().num_findable() == 0 || hit.num_blocks > num_published || hit.num_blocks == hashes.len() {
            return hit;
        }
        let longer = self.tiers(hashes, false).find(&hit);
        if longer.num_blocks > hit.num_blocks { longer.into_hit() } else { hit }
    }

    /// An admission that waits for its prefix, and finds no more than this in the pool and the host tier: refused while a
    /// block that makes it longer is read from the disk. Orders these reads.
    pub(super) fn refuse_on_disk(&mut self, admission: &Admission, sharable: &[Hash], hit: &Hit) -> Option<Refusal> {
        let is_asked = admission.waits_for_prefix && !self.skips_disk && self.host_copy_use != HostCopyUse::None;
        if !is_asked || self.disk.copies().num_findable() == 0 {
            return None;
        }
        let copies: Vec<TierBlockId> = hit.copies.iter().map(|copy| copy.copy).collect();
        let reads = self.find_reads(sharable, hit);
        if !self.disk.bring_up(&reads, &copies, self.host, self.pool.accounts()) {
            return None;
        }
        let (seq_id, num_tokens) = (admission.seq_id, hit.num_blocks * self.geometry.block_size);
        let message = format!("the prefix of sequence {seq_id} behind {num_tokens} tokens is read from the disk");
        let refusal = Refusal::new(Reason::PrefixBeingComputed, message);
        Some(refusal.with("sequence_id", seq_id).with("tokens", num_tokens))
    }

    /// The disk blocks, the first ones in front, that make a prefix longer: as far as there is room in the host tier for
    /// all copies that it needs together.
    fn find_reads(&self, sharable: &[Hash], hit: &Hit) -> Vec<TierBlockId> {
        let limit = self.host.copies().limit();
        let num_groups = self.geometry.groups.len();
        let most = hit.num_blocks + limit.saturating_sub(hit.copies.len()) / num_groups;
        for most in [sharable.len(), most.min(sharable.len())] {
            let longest = self.tiers(&sharable[..most], true).find(hit);
            let below = longest.below();
            if longest.num_blocks > hit.num_blocks && below.len() <= limit {
                let on_disk = |(_, _, place)| if let Place::Disk(disk) = place { Some(disk) } else { None };
                return below.into_iter().filter_map(on_disk).collect();
            }
        }
        Vec::new()
    }

    /// Copies from the host tier to blocks that an admission was allocated.
    pub(super) fn bring_back(&mut self, copies: &[CopyBack], tables: &[BlockTable]) {
        let sources: Vec<TierBlockId> = copies.iter().map(|copy| copy.copy).collect();
        let target_of = |copy: &CopyBack| tables[usize::from(copy.group)].block(copy.index);
        self.plan.restore_sources.extend_from_slice(&sources);
        self.plan.restore_targets.extend(copies.iter().map(target_of));
        self.host.begin_use(&sources);
        self.step.host_holds.push(sources);
    }
}

/// Returns the blocks that a sequence in the host tier takes from the index. If the longest prefix ends before the
/// content of the host tier, the blocks of windowed groups all come from there, and so a prefix of the full groups is
/// enough.
fn find_for_restore(sequence: &Sequence, hashes: &[Hash], pool: &BlockPool, geometry: &Geometry) -> Hit {
    let prefix = Prefix { geometry, index: pool.index(), hashes };
    let mut hit = prefix.find_full();
    if !geometry.has_windows() {
        return hit;
    }
    let whole = prefix.limit_to_windows(hit.clone());
    if whole.num_blocks * geometry.block_size >= sequence.num_scheduled {
        return whole;
    }
    hit.num_blocks = hit.num_blocks.min(sequence.num_scheduled / geometry.block_size);
    for (table, (span, known)) in hit.tables.iter_mut().zip(geometry.groups.iter().zip(&sequence.tables)) {
        if span.is_full() {
            table.truncate(hit.num_blocks);
        } else {
            *table = BlockTable::new(known.num_passed(), Vec::new());
        }
    }
    hit
}

/// A sequence that is in the pool, or of which a token is still being sampled.
fn refuse_unrestorable(sequence: &Sequence) -> Option<Refusal> {
    let seq_id = sequence.seq_id;
    let (reason, message) = if !sequence.is_offloaded() {
        (Reason::SequenceExists, format!("sequence {seq_id} is in the pool already"))
    } else if sequence.num_promised() > 0 {
        (Reason::SequenceBusy, format!("a token of sequence {seq_id} is still being sampled"))
    } else {
        return None;
    };
    Some(Refusal::new(reason, message).with("sequence_id", seq_id))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::books::planner::tests::reasons;
    use crate::books::plans::{Admission, GrantedStep, PlanItem, StepRequest};
    use crate::books::tests::{Bench, admission};
    use crate::cache::groups::Span;
    use crate::cache::prefix::root_hash;

    type Pairs = Vec<(u32, u32)>;

    /// A plan's copies to the host tier, and from there: sources and targets.
    fn copies(plan: &GrantedStep) -> (Pairs, Pairs) {
        let pairs = |sources: &[u32], targets: &[u32]| {
            assert_eq!(sources.len(), targets.len());
            sources.iter().copied().zip(targets.iter().copied()).collect()
        };
        (pairs(&plan.offload_sources, &plan.offload_targets), pairs(&plan.restore_sources, &plan.restore_targets))
    }

    /// Free, held and retired.
    fn host_counts(bench: &Bench) -> (usize, usize, usize) {
        assert_eq!(bench.0.violations(), [""; 0]);
        let counts = bench.0.host().counts();
        (counts.free, counts.held, counts.retired)
    }

    /// Sequence 1 of five known tokens, four of them computed, and nothing of it cached.
    fn offloadable() -> Bench {
        let mut bench = Bench::new(8);
        bench.admit(1, &[1, 2, 3, 4]);
        bench.settle();
        bench.0.reset_prefix_cache(0, 9, 0.0, b"").unwrap();
        bench
    }

    #[test]
    fn what_is_computed_is_copied_and_its_blocks_come_back_when_the_step_has_passed() {
        let mut bench = offloadable();
        let blocks = bench.blocks(1);
        let plan = bench.offload(1);
        assert_eq!((reasons(&plan), plan.offloaded_ids.clone(), plan.released_ids.len()), (vec![], vec![1], 0));
        assert_eq!(copies(&plan), (vec![(blocks[0], 0), (blocks[1], 1)], vec![]));
        assert_eq!((bench.0.pool().counts().retired, host_counts(&bench)), (2, (4, 2, 0)));
        assert_eq!((bench.0.num_rows(), bench.0.num_offloaded(), bench.blocks(1).len()), (1, 1, 0));
        bench.settle();
        assert_eq!((bench.0.pool().counts().free, bench.0.num_rows()), (8, 0));
        assert_eq!((bench.tokens(1), host_counts(&bench)), (vec![1, 2, 3, 4, 9], (4, 2, 0)));
    }

    #[test]
    fn a_restored_sequence_goes_on_where_it_was() {
        let mut bench = offloadable();
        bench.offload(1);
        bench.settle();
        let plan = bench.restore(1);
        let blocks = bench.blocks(1);
        assert_eq!(copies(&plan), (vec![], vec![(0, blocks[0]), (1, blocks[1])]));
        assert_eq!((plan.restored_ids, plan.restored_counts, plan.admitted_ids.len()), (vec![1], vec![4], 0));
        assert_eq!((plan.write_seq_ids, plan.write_block_ids), (vec![1], blocks.clone()));
        assert_eq!((plan.run_starts, plan.run_token_counts, plan.run_samples), (vec![4], vec![1], vec![true]));
        assert_eq!(plan.given_run_indexes, [0], "the worker has forgotten the token");
        assert_eq!((blocks.len(), bench.sequence(1).num_writable, host_counts(&bench)), (3, 0, (4, 0, 2)));
        bench.settle();
        let num_cached = bench.0.num_cached_tokens(&[1, 2, 3, 4, 9], &b"".into(), b"");
        assert_eq!((host_counts(&bench), num_cached), ((6, 0, 0), 0), "a reset was about these blocks");
        assert_eq!(reasons(&bench.extend(1, 1, &[])), []);
        bench.settle();
        assert_eq!((bench.tokens(1), bench.sequence(1).num_computed), (vec![1, 2, 3, 4, 9, 9, 9], 6));
    }

    #[test]
    fn what_is_still_cached_is_shared_and_not_copied() {
        let mut bench = Bench::new(8);
        bench.admit(1, &[1, 2, 3, 4]);
        bench.settle();
        let blocks = bench.blocks(1);
        bench.offload(1);
        bench.settle();
        assert_eq!(bench.0.pool().counts().cached, 2);
        let plan = bench.restore(1);
        assert_eq!((copies(&plan).1, &bench.blocks(1)[..2]), (vec![], &blocks[..]));
        assert_eq!(
            (plan.restored_counts, bench.sequence(1).num_published, host_counts(&bench)),
            (vec![4], 2, (4, 0, 2))
        );
        let counters = bench.0.counters();
        assert_eq!((counters.offloads, counters.offloaded_blocks), (1, 2));
        assert_eq!((counters.restores, counters.restored_blocks, counters.admissions), (1, 0, 1));
    }

    #[test]
    fn what_others_computed_meanwhile_need_not_be_computed() {
        let mut bench = Bench::new(12);
        let mut chunked = admission(1, &[1, 2, 3, 4, 5, 6, 7]);
        chunked.max_compute = 3;
        bench.plan(StepRequest { admissions: vec![chunked], ..StepRequest::default() });
        bench.settle();
        bench.offload(1);
        bench.admit(2, &[1, 2, 3, 4, 5]);
        bench.settle();
        let plan = bench.restore(1);
        assert_eq!((copies(&plan).1, plan.restored_counts, plan.run_starts), (vec![], vec![4], vec![4]));
        assert_eq!((bench.blocks(1)[..2].to_vec(), host_counts(&bench)), (bench.blocks(2)[..2].to_vec(), (4, 0, 2)));
    }

    #[test]
    fn steps_in_flight_count_for_who_was_offloaded() {
        let mut bench = Bench::new(8);
        bench.admit(1, &[1, 2, 3]);
        bench.extend(1, 1, &[]);
        let blocks = bench.blocks(1);
        let plan = bench.offload(1);
        assert_eq!(copies(&plan).0, [(blocks[0], 0), (blocks[1], 1)], "what is being computed too");
        assert_eq!(reasons(&bench.restore(1)), [(PlanItem::Restore, 1, Reason::SequenceBusy)]);
        bench.0.settle("a", &bench.report("a")).unwrap();
        assert_eq!((bench.tokens(1), bench.sequence(1).num_computed), (vec![1, 2, 3, 9], 3));
        assert_eq!(reasons(&bench.restore(1)), [(PlanItem::Restore, 1, Reason::SequenceBusy)]);
        bench.0.settle("a", &bench.report("a")).unwrap();
        assert_eq!((bench.tokens(1), bench.sequence(1).num_computed), (vec![1, 2, 3, 9, 9], 4));
        let plan = bench.restore(1);
        assert_eq!((reasons(&plan), plan.restored_counts, plan.run_starts), (vec![], vec![4], vec![4]));
        assert_eq!(bench.0.violations(), [""; 0]);
    }

    #[test]
    fn a_chunk_in_flight_is_counted_in_the_row_that_it_came_back_to() {
        let mut bench = Bench::new(12);
        let mut chunked = admission(1, &[1, 2, 3, 4, 5, 6, 7]);
        chunked.max_compute = 4;
        bench.plan(StepRequest { admissions: vec![chunked], ..StepRequest::default() });
        bench.offload(1);
        bench.restore(1);
        assert_eq!((bench.sequence(1).num_computed, bench.sequence(1).num_scheduled), (0, 7));
        bench.trim(1, 3);
        bench.0.settle("a", &bench.report("a")).unwrap();
        assert_eq!(bench.sequence(1).num_computed, 3, "not beyond the trim");
        bench.settle();
        assert_eq!((bench.0.violations(), bench.0.num_cached_tokens(&[1, 2, 3, 4, 5], &b"".into(), b"")), (vec![], 4));
    }

    #[test]
    fn what_failed_in_flight_is_computed_again() {
        for (is_restored, num_left) in [(false, 2), (true, 2)] {
            let mut bench = Bench::new(12);
            let mut chunked = admission(1, &[1, 2, 3, 4, 5, 6, 7]);
            chunked.max_compute = 2;
            bench.plan(StepRequest { admissions: vec![chunked], ..StepRequest::default() });
            bench.extend(1, 2, &[]);
            bench.offload(1);
            if is_restored {
                bench.restore(1);
            }
            bench.0.settle("a", &bench.report("a")).unwrap();
            let failed = crate::books::settle::StepReport {
                outcome: crate::books::settle::StepOutcome::Failed,
                ..bench.report("a")
            };
            bench.0.settle("a", &failed).unwrap();
            let sequence = bench.sequence(1);
            assert_eq!((sequence.num_scheduled, sequence.num_computed, sequence.num_tokens), (num_left, num_left, 7));
            assert_eq!(bench.0.violations(), [""; 0]);
        }
    }

    #[test]
    fn a_shared_block_loses_a_reference_and_stays_with_its_other_holder() {
        let mut bench = offloadable();
        bench.fork(1, &[2], 4);
        bench.settle();
        let shared = bench.blocks(2);
        let plan = bench.offload(1);
        assert_eq!((copies(&plan).0.len(), bench.blocks(2)), (2, shared.clone()));
        assert_eq!(shared.iter().map(|block| bench.0.pool().holders().ref_count(*block)).collect::<Vec<_>>(), [1, 1]);
        assert_eq!(reasons(&bench.extend(2, 1, &[])), []);
        assert_eq!(bench.0.violations(), [""; 0]);
    }

    #[test]
    fn in_the_host_tier_a_sequence_can_only_be_restored_or_released() {
        let mut bench = offloadable();
        bench.offload(1);
        let before = bench.0.state(Some("a"));
        let refused = |item| vec![(item, 1, Reason::SequenceOffloaded)];
        assert_eq!(reasons(&bench.trim(1, 2)), refused(PlanItem::Trim));
        assert_eq!(reasons(&bench.extend(1, 1, &[])), refused(PlanItem::Extend));
        assert_eq!(reasons(&bench.offload(1)), refused(PlanItem::Offload));
        assert_eq!(reasons(&bench.fork(1, &[2], 2)), [(PlanItem::Fork, 2, Reason::SequenceOffloaded)]);
        assert_eq!(reasons(&bench.admit(1, &[1])), [(PlanItem::Admission, 1, Reason::SequenceExists)]);
        bench.settle();
        bench.restore(1);
        assert_eq!(reasons(&bench.restore(1)), [(PlanItem::Restore, 1, Reason::SequenceExists)]);
        assert_eq!(reasons(&bench.restore(7)), [(PlanItem::Restore, 7, Reason::SequenceNotFound)]);
        assert_eq!(reasons(&bench.offload(7)), [(PlanItem::Offload, 7, Reason::SequenceNotFound)]);
        assert_ne!(bench.0.state(Some("a")), before);
    }

    #[test]
    fn a_refused_offload_changes_nothing() {
        let mut bench = Bench::new(20);
        bench.admit(1, &[1; 15]);
        bench.settle();
        let before = bench.0.state(None);
        let plan = bench.offload(1);
        assert_eq!(reasons(&plan), [(PlanItem::Offload, 1, Reason::OutOfHostBlocks)]);
        assert_eq!((bench.0.state(Some("a")), plan.host_counts.map(|counts| counts.free)), (before, Some(6)));
    }

    #[test]
    fn a_restore_needs_room_as_an_admission_does() {
        let mut bench = offloadable();
        bench.offload(1);
        bench.settle();
        bench.admit(2, &[7; 12]);
        let before = bench.0.state(None);
        assert_eq!(reasons(&bench.restore(1)), [(PlanItem::Restore, 1, Reason::OutOfBlocks)]);
        assert_eq!((bench.0.state(Some("a")), host_counts(&bench)), (before, (4, 2, 0)));
        bench.release(&[2]);
        bench.settle();
        let restores = vec![Restore { seq_id: 1, max_compute: 0 }];
        let reserved = StepRequest { restores: restores.clone(), admission_reserve: 6, ..StepRequest::default() };
        assert_eq!(reasons(&bench.plan(reserved)), [(PlanItem::Restore, 1, Reason::OutOfBlocks)]);
        let spared = StepRequest { restores, admission_reserve: 5, ..StepRequest::default() };
        assert_eq!(reasons(&bench.plan(spared)), []);
    }

    #[test]
    fn restores_and_admissions_share_a_budget() {
        let mut bench = Bench::new(12);
        let mut chunked = admission(1, &[1, 2, 3, 4, 5, 6, 7]);
        chunked.max_compute = 2;
        bench.plan(StepRequest { admissions: vec![chunked], ..StepRequest::default() });
        bench.offload(1);
        bench.settle();
        let plan = bench.plan(StepRequest {
            restores: vec![Restore { seq_id: 1, max_compute: 3 }],
            admissions: vec![admission(2, &[8, 8, 8]), admission(3, &[9])],
            admission_token_budget: 5,
            ..StepRequest::default()
        });
        assert_eq!((plan.run_seq_ids.clone(), plan.run_token_counts.clone()), (vec![1, 2], vec![3, 2]));
        assert_eq!(reasons(&plan), [(PlanItem::Admission, 3, Reason::TokenBudgetSpent)]);
    }

    #[test]
    fn what_is_released_in_the_host_tier_comes_back_when_no_step_can_touch_it() {
        let mut bench = offloadable();
        bench.offload(1);
        assert_eq!(bench.release(&[1]).released_ids, [1]);
        assert_eq!((host_counts(&bench), bench.0.num_offloaded()), ((4, 0, 2), 0));
        bench.settle();
        assert_eq!((host_counts(&bench), bench.0.num_rows()), ((6, 0, 0), 0));
        let mut bench = offloadable();
        bench.offload(1);
        bench.settle();
        bench.release(&[1]);
        assert_eq!(host_counts(&bench), (6, 0, 0));
    }

    #[test]
    fn a_reservation_is_given_up_and_taken_again() {
        let mut bench = Bench::new(8);
        let reserved = Admission { reserved_tokens: 10, ..admission(1, &[1, 2, 3]) };
        bench.plan(StepRequest { admissions: vec![reserved], ..StepRequest::default() });
        bench.settle();
        bench.offload(1);
        assert_eq!((bench.0.violations(), bench.0.pool().accounts().num_reserved()), (vec![], 0));
        bench.settle();
        bench.admit(2, &[8; 8]);
        assert_eq!(
            reasons(&bench.restore(1)),
            [(PlanItem::Restore, 1, Reason::OutOfBlocks)],
            "4 would do, 5 are promised"
        );
        bench.release(&[2]);
        bench.settle();
        assert_eq!(reasons(&bench.restore(1)), []);
        assert_eq!((bench.0.violations(), bench.0.pool().accounts().num_reserved()), (vec![], 3));
    }

    #[test]
    fn the_worker_keeps_no_row_of_who_is_in_the_host_tier() {
        let mut bench = Bench::new(40);
        (0..16).for_each(|seq_id| drop(bench.admit(seq_id, &[seq_id as i32])));
        bench.offload(3);
        assert_eq!(reasons(&bench.admit(20, &[1])), [(PlanItem::Admission, 20, Reason::TooManySequences)]);
        bench.settle();
        assert_eq!(reasons(&bench.admit(20, &[1])), []);
        assert_eq!(reasons(&bench.restore(3)), [(PlanItem::Restore, 3, Reason::TooManySequences)]);
        assert_eq!(bench.0.violations(), [""; 0]);
    }

    #[test]
    fn a_sequence_can_leave_and_come_back_in_one_plan() {
        let mut bench = offloadable();
        let plan = bench.plan(StepRequest {
            offloads: vec![1],
            restores: vec![Restore { seq_id: 1, max_compute: 0 }],
            ..StepRequest::default()
        });
        let (offloaded, restored) = copies(&plan);
        assert_eq!((offloaded.len(), restored.len(), plan.run_starts), (2, 2, vec![4]));
        assert_eq!(offloaded.iter().map(|(_, host)| *host).collect::<Vec<_>>(), [0, 1]);
        assert_eq!((host_counts(&bench), bench.0.pool().counts().retired), ((4, 0, 2), 2));
        bench.settle();
        assert_eq!(host_counts(&bench), (6, 0, 0));
    }

    #[test]
    fn each_group_comes_back_from_its_own_host_blocks() {
        let mut bench = Bench::with_groups(20, &[Span::Full, Span::Sliding(3)]);
        bench.admit(1, &[1, 2, 3, 4, 5]);
        bench.settle();
        assert_eq!(bench.plan(StepRequest::default()).passed_counts, [1]);
        let hosts = bench.offload(1).offload_targets;
        bench.settle();
        let plan = bench.restore(1);
        assert_eq!((hosts.len(), &plan.restore_sources[..]), (5, &hosts[2..]), "two of the full group are cached");
        assert_eq!(plan.restore_targets[..], bench.blocks(1)[2..5]);
        assert_eq!(bench.0.violations(), [""; 0]);
    }

    // -- copies of evicted blocks

    /// Sequence 1 of these tokens was computed and released.
    fn cache(bench: &mut Bench, tokens: &[i32]) {
        bench.admit(1, tokens);
        bench.settle();
        bench.release(&[1]);
        bench.settle();
    }

    /// Free, held, retired and cached.
    fn all_host_counts(bench: &Bench) -> [usize; 4] {
        assert_eq!(bench.0.violations(), [""; 0]);
        let counts = bench.0.host().counts();
        [counts.free, counts.held, counts.retired, counts.cached]
    }

    #[test]
    fn an_evicted_block_is_found_in_the_host_tier_when_the_step_that_copies_it_has_ended() {
        let mut bench = Bench::with_copies(4, 6);
        cache(&mut bench, &[1, 2, 3, 4, 5]);
        let before = bench.0.pool().parking().parked();
        let plan = bench.admit(2, &[7; 7]);
        let copied = copies(&plan).0;
        assert_eq!(copied.iter().map(|(block, _)| *block).collect::<Vec<_>>(), before);
        assert!(copied.iter().all(|(block, _)| plan.write_block_ids.contains(block)));
        let found = |bench: &Bench| bench.0.cached_tokens(&[1, 2, 3, 4, 5], &b"".into(), b"");
        assert_eq!((all_host_counts(&bench), found(&bench)), ([4, 0, 2, 0], [0, 0, 0]));
        bench.settle();
        assert_eq!((all_host_counts(&bench), found(&bench)), ([4, 0, 0, 2], [0, 4, 0]));
        assert_eq!(bench.0.cached_tokens(&[1, 2, 3, 4, 5], &b"s".into(), b""), [0, 0, 0]);
        assert_eq!(bench.0.num_cached_tokens(&[1, 2, 3, 4, 5], &b"".into(), b"x"), 0);
    }

    /// A prefix of two blocks in the host tier, and a pool of four free blocks.
    fn kept() -> Bench {
        let mut bench = Bench::with_copies(4, 6);
        cache(&mut bench, &[1, 2, 3, 4, 5]);
        bench.admit(2, &[7; 7]);
        bench.release(&[2]);
        bench.settle();
        bench.0.drop_blocks(&[1, 2, 3, 4], 0.0, b"");
        assert_eq!(all_host_counts(&bench), [4, 0, 0, 2]);
        bench
    }

    #[test]
    fn an_admission_gets_copies_that_count_as_computed_and_are_published_with_its_run() {
        let mut bench = kept();
        let plan = bench.admit(1, &[1, 2, 3, 4, 5]);
        let (blocks, sources) = (bench.blocks(1), plan.restore_sources.clone());
        assert_eq!(copies(&plan).1, sources.iter().copied().zip(blocks[..2].iter().copied()).collect::<Vec<_>>());
        assert_eq!((plan.admitted_cached_counts, plan.run_starts, plan.run_token_counts), (vec![4], vec![4], vec![1]));
        assert_eq!((bench.sequence(1).num_computed, bench.sequence(1).num_published), (4, 0));
        assert_eq!((all_host_counts(&bench), bench.0.counters().found_in_host_tokens), ([4, 0, 0, 2], 4));
        bench.settle();
        assert_eq!(bench.0.cached_tokens(&[1, 2, 3, 4, 5], &b"".into(), b""), [4, 0, 0]);
        bench.release(&[1]);
        bench.settle();
        let plan = bench.admit(3, &[8; 8]);
        assert_eq!((copies(&plan).0, all_host_counts(&bench)), (vec![], [4, 0, 0, 2]), "the copies are there already");
    }

    /// Layers that see all, and layers that see three tokens.
    const WINDOWED: [Span; 2] = [Span::Full, Span::Sliding(3)];

    /// A prefix of four blocks: what its next token sees of them is in the host tier alone.
    fn kept_in_groups() -> Bench {
        let mut bench = Bench::with_groups_and_disk(12, &WINDOWED, 0);
        cache(&mut bench, &[1, 2, 3, 4, 5, 6, 7, 8, 9]);
        bench.admit(2, &[7; 11]);
        bench.settle();
        bench.release(&[2]);
        bench.settle();
        bench.0.drop_blocks(&(1..13).collect::<Vec<_>>(), 0.0, b"");
        bench
    }

    #[test]
    fn each_group_comes_back_to_its_own_table() {
        let mut bench = kept_in_groups();
        let tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9];
        assert_eq!(bench.0.cached_tokens(&tokens, &b"".into(), b""), [0, 8, 0]);
        let checked = bench.0.check_admission(b"", &admission(1, &tokens), 0);
        assert_eq!((checked.num_cached_tokens, checked.needed), (8, 7), "4 and 1 of one group, 1 and 1 of the other");
        let plan = bench.admit(1, &tokens);
        assert_eq!((plan.admitted_cached_counts, plan.run_starts.clone()), (vec![8], vec![8]));
        let content_of = |copy: &u32| bench.0.host().copies().content(*copy).unwrap();
        let contents: Vec<_> = plan.restore_sources.iter().map(content_of).collect();
        let mut hashes = Vec::new();
        chain_hashes(root_hash(b"", &b"".into(), b"f"), &tokens, 2, &mut hashes);
        let tables = bench.sequence(1).tables.clone();
        for (content, target) in contents.iter().zip(&plan.restore_targets) {
            let index = hashes.iter().position(|hash| *hash == content.prefix_hash()).unwrap();
            assert_eq!(tables[usize::from(content.group)].get(index), Some(*target));
        }
        assert_eq!(plan.restore_targets.len(), 5);
        assert_eq!((tables[1].num_passed(), bench.0.counters().found_in_host_tokens), (3, 8));
        bench.settle();
        assert_eq!((bench.0.cached_tokens(&tokens, &b"".into(), b""), bench.0.violations()), ([8, 0, 0], vec![]));
    }

    #[test]
    fn what_the_pool_still_has_of_a_group_is_shared_and_the_rest_copied() {
        let mut bench = Bench::with_groups_and_disk(12, &WINDOWED, 0);
        let tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9];
        cache(&mut bench, &tokens);
        while bench.0.cached_tokens(&tokens, &b"".into(), b"") == [8, 0, 0] {
            let evicted = bench.admit(2, &[50, 51, 52]).offload_sources.len();
            bench.settle();
            assert!(evicted < 4, "a few at a time");
            bench.plan(StepRequest { releases: vec![2], ..StepRequest::default() });
            bench.settle();
            bench.admit(3, &[60 + evicted as i32; 4]);
            bench.settle();
            bench.release(&[3]);
            bench.settle();
        }
        let [in_pool, in_host, _] = bench.0.cached_tokens(&tokens, &b"".into(), b"");
        assert_eq!((in_pool + in_host, in_host > 0), (8, true));
        let plan = bench.admit(1, &tokens);
        assert_eq!(plan.admitted_cached_counts, [8]);
        assert!(!plan.restore_sources.is_empty() && plan.restore_sources.len() < 5, "{:?}", plan.restore_sources);
        bench.settle();
        assert_eq!((bench.0.cached_tokens(&tokens, &b"".into(), b""), bench.0.violations()), ([8, 0, 0], vec![]));
    }

    #[test]
    fn a_plan_copies_no_more_blocks_of_each_group_than_it_may() {
        for groups in [&[Span::Full][..], &[Span::Full, Span::Full]] {
            let num_blocks = 3 * 32 * groups.len();
            let sizes = Geometry { groups: groups.to_vec(), ..crate::books::tests::geometry(num_blocks) };
            let sizes = Geometry { num_host_blocks: num_blocks, host_cached_limit: num_blocks, ..sizes };
            let mut bench = Bench(crate::books::Books::new(sizes, "lru").unwrap());
            bench.0.open_lease("a", b"", 30.0);
            let admit = |token: i32| admission(i64::from(token), &[token; 64]);
            let plan = |bench: &mut Bench, admissions| bench.plan(StepRequest { admissions, ..StepRequest::default() });
            assert_eq!(reasons(&plan(&mut bench, (1..4).map(admit).collect())), []);
            bench.settle();
            bench.release(&[1, 2, 3]);
            bench.settle();
            let evicting = plan(&mut bench, (4..7).map(admit).collect());
            assert_eq!((reasons(&evicting), evicting.offload_sources.len()), (vec![], MAX_KEPT_IN_PLAN * groups.len()));
        }
    }

    #[test]
    fn a_prefix_without_its_window_is_not_found_in_the_host_tier() {
        let mut bench = kept_in_groups();
        let tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9];
        let copies = bench.0.host().copies();
        let windows: Vec<u32> =
            copies.listing().filter(|(_, content, _)| content.group == 1).map(|(copy, ..)| copy).collect();
        bench.0.host.drop_copies(&windows);
        assert_eq!(bench.0.cached_tokens(&tokens, &b"".into(), b""), [0; 3]);
        let told = bench.0.explain(&tokens, &b"".into(), b"", false);
        assert_eq!((told.num_found, told.missing.map(|(index, group, _)| (index, group))), (0, Some((3, 1))));
        assert_eq!(bench.admit(1, &tokens).admitted_cached_counts, [0]);
    }

    #[test]
    fn what_all_groups_need_is_read_from_the_disk_before_the_prompt_is_admitted() {
        let mut bench = Bench::with_groups_and_disk(12, &WINDOWED, 20);
        let tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9];
        cache(&mut bench, &tokens);
        bench.admit(2, &[7; 11]);
        bench.settle();
        let open = |bench: &Bench| bench.0.disk().orders_after(0).map(|(number, _)| number).collect::<Vec<_>>();
        while !open(&bench).is_empty() {
            bench.0.end_disk_orders(&open(&bench), &[]).unwrap();
        }
        bench.release(&[2]);
        bench.settle();
        bench.0.drop_blocks(&(1..13).collect::<Vec<_>>(), 0.0, b"");
        bench.0.host.drop_copies(&bench.0.host.copies().all());
        assert_eq!(bench.0.cached_tokens(&tokens, &b"".into(), b""), [0, 0, 8]);
        let waiting = Admission { waits_for_prefix: true, ..admission(1, &tokens) };
        let mut num_read = 0;
        loop {
            let plan = bench.plan(StepRequest { admissions: vec![waiting.clone()], ..StepRequest::default() });
            bench.settle();
            if plan.refusals.is_empty() {
                assert_eq!((plan.admitted_cached_counts, num_read), (vec![8], 5));
                break;
            }
            assert_eq!(reasons(&plan), [(PlanItem::Admission, 1, Reason::PrefixBeingComputed)]);
            let reads = open(&bench);
            num_read += reads.len();
            bench.0.end_disk_orders(&reads[..1], &[]).unwrap();
            bench.0.end_disk_orders(&reads[1..], &[]).unwrap();
            assert_eq!(bench.0.violations(), [""; 0]);
        }
    }

    #[test]
    fn nothing_is_read_from_the_disk_if_all_of_it_has_no_room_in_the_host_tier() {
        let mut bench = Bench::with_groups_and_disk(20, &[Span::Full, Span::Sliding(9)], 20);
        let hashes = {
            let mut hashes = Vec::new();
            chain_hashes(root_hash(b"", &b"".into(), b"f"), &[1; 24], 2, &mut hashes);
            hashes
        };
        let copy = |(index, group): (usize, u8)| crate::books::disk_reports::FoundCopy {
            disk: (index + 12 * usize::from(group)) as u32,
            prefix_hash: hashes[index],
            group,
            tenant: Vec::new(),
        };
        let places = (0..12).map(|index| (index, 0)).chain((4..8).map(|index| (index, 1)));
        bench.0.enter_found_copies(&places.map(copy).collect::<Vec<_>>());
        let tokens: Vec<i32> = vec![1; 17];
        assert_eq!(bench.0.cached_tokens(&tokens, &b"".into(), b""), [0, 0, 16]);
        let waiting = Admission { waits_for_prefix: true, ..admission(1, &tokens) };
        let plan = bench.plan(StepRequest { admissions: vec![waiting.clone()], ..StepRequest::default() });
        assert_eq!((reasons(&plan).len(), bench.0.disk().orders_after(0).count()), (1, 12), "8 and 4 just fit");
        let mut small = Bench::with_groups_and_disk(20, &[Span::Full, Span::Sliding(9)], 20);
        small.0.host = crate::cache::tier::TierPool::new(crate::cache::tier::Tier::Host, 11, 11);
        let places = (0..12).map(|index| (index, 0)).chain((4..8).map(|index| (index, 1)));
        small.0.enter_found_copies(&places.map(copy).collect::<Vec<_>>());
        let plan = small.plan(StepRequest { admissions: vec![waiting], ..StepRequest::default() });
        assert_eq!((reasons(&plan), small.0.disk().orders_after(0).count()), (vec![], 0));
    }

    #[test]
    fn a_copy_behind_one_that_is_gone_is_not_found() {
        let mut bench = kept();
        let mut hashes = Vec::new();
        chain_hashes(root_hash(b"", &b"".into(), b"f"), &[1, 2, 3, 4], 2, &mut hashes);
        let [first, second] = [0, 1].map(|index| bench.0.host().copies().lookup(&hashes[index]).unwrap());
        bench.0.host.drop_copies(&[first]);
        assert!(bench.0.host().copies().is_findable(second));
        assert_eq!(bench.0.cached_tokens(&[1, 2, 3, 4, 5], &b"".into(), b""), [0, 0, 0]);
        assert_eq!(bench.admit(1, &[1, 2, 3, 4, 5]).admitted_cached_counts, [0]);
    }

    #[test]
    fn a_plan_makes_the_copies_that_its_client_chose() {
        for (host_copy_use, num_kept, num_found) in
            [(HostCopyUse::ThereAndBack, 1, 4), (HostCopyUse::Back, 0, 4), (HostCopyUse::None, 0, 0)]
        {
            let mut bench = kept();
            cache(&mut bench, &[8, 8, 8, 8, 8]);
            let admissions = vec![Admission { explains_miss: true, ..admission(1, &[1, 2, 3, 4, 5]) }];
            let plan = bench.plan(StepRequest { admissions, host_copy_use, ..StepRequest::default() });
            assert_eq!((copies(&plan).0.len(), plan.admitted_cached_counts.clone()), (num_kept, vec![num_found]));
            let missing = plan.misses.iter().map(|miss| miss.index).collect::<Vec<_>>();
            assert_eq!(missing, if num_found > 0 { vec![] } else { vec![0] });
            assert_eq!(copies(&plan).1.len() as u32 * 2, num_found);
            bench.settle();
            assert_eq!(bench.0.violations(), [""; 0]);
        }
    }

    #[test]
    fn a_failed_step_leaves_the_copied_tokens_computed() {
        let mut bench = kept();
        bench.admit(1, &[1, 2, 3, 4, 5]);
        let failed = crate::books::settle::StepReport {
            outcome: crate::books::settle::StepOutcome::Failed,
            ..bench.report("a")
        };
        bench.0.settle("a", &failed).unwrap();
        assert_eq!((bench.sequence(1).num_computed, bench.sequence(1).num_scheduled), (4, 4));
        assert_eq!((bench.extend(1, 1, &[]).run_starts, bench.0.violations()), (vec![4], vec![]));
    }

    #[test]
    fn a_sequence_evicts_copies_but_not_those_that_a_step_copies_back() {
        let mut bench = kept();
        bench.admit(1, &[1, 2, 3, 4, 5]);
        bench.admit(2, &[9]);
        assert_eq!(all_host_counts(&bench), [4, 0, 0, 2]);
        assert_eq!(bench.0.host().refuse(1, 5).map(|refusal| refusal.reason), Some(Reason::OutOfHostBlocks));
        bench.settle();
        assert!(bench.0.host().refuse(1, 6).is_none());
        let hosts = bench.0.host.allocate(5, bench.0.pool.accounts()).unwrap();
        assert_eq!((hosts.len(), bench.0.host().counts().cached, bench.0.host().copies().num_evicted()), (5, 1, 1));
    }

    #[test]
    fn a_copy_of_a_lease_that_ended_before_its_report_is_not_found() {
        let mut bench = Bench::with_copies(4, 6);
        cache(&mut bench, &[1, 2, 3, 4, 5]);
        bench.admit(2, &[7; 7]);
        bench.0.end_lease("a");
        bench.0.close_lease("a").unwrap();
        assert_eq!(all_host_counts(&bench), [6, 0, 0, 0]);
        assert_eq!(bench.0.num_cached_tokens(&[1, 2, 3, 4, 5], &b"".into(), b""), 0);
    }

    #[test]
    fn a_reset_drops_copies_and_those_on_their_way_there_and_back() {
        let mut bench = kept();
        bench.admit(1, &[1, 2, 3, 4, 5]);
        bench.0.withhold_for(b"", Some(&b"".into()));
        assert_eq!(all_host_counts(&bench), [4, 0, 2, 0]);
        bench.settle();
        assert_eq!((all_host_counts(&bench), bench.sequence(1).num_withheld), ([6, 0, 0, 0], 2));
        assert_eq!(bench.0.num_cached_tokens(&[1, 2, 3, 4, 5], &b"".into(), b""), 0, "it was withheld");
        let mut bench = Bench::with_copies(4, 6);
        cache(&mut bench, &[1, 2, 3, 4, 5]);
        bench.admit(2, &[7; 7]);
        bench.0.reset_prefix_cache(0, 9, 0.0, b"").unwrap();
        bench.settle();
        assert_eq!(all_host_counts(&bench), [6, 0, 0, 0]);
    }

    #[test]
    fn content_that_a_reset_is_about_is_not_copied_when_it_is_evicted_before_it_is_dropped() {
        let mut bench = Bench::with_copies(4, 6);
        cache(&mut bench, &[1, 2, 3, 4, 5]);
        bench.0.withhold_for(b"", None);
        assert_eq!(copies(&bench.admit(2, &[7; 7])).0, []);
        bench.settle();
        bench.release(&[2]);
        bench.settle();
        assert_eq!(copies(&bench.admit(3, &[8; 7])).0.len(), 3, "this content is newer");
    }

    #[test]
    fn the_least_recently_used_copy_goes_first_and_no_more_are_made_than_may_be() {
        let mut bench = Bench::with_copies(4, 2);
        cache(&mut bench, &[1, 2, 3, 4, 5]);
        for token in [7, 8] {
            let plan = bench.admit(2, &[token; 9]);
            assert_eq!((copies(&plan).0.len(), plan.refusals.len()), (0, 1), "one block too many");
            assert_eq!(copies(&bench.admit(2, &[token; 8])).0.len(), 2);
            bench.settle();
            bench.release(&[2]);
            bench.settle();
            assert_eq!(all_host_counts(&bench), [4, 0, 0, 2]);
        }
        assert_eq!((bench.0.host().copies().num_evicted(), bench.0.counters().kept_in_host_blocks), (2, 4));
    }

    #[test]
    fn blocks_that_were_advised_to_go_first_are_not_copied() {
        let mut bench = Bench::with_copies(4, 6);
        cache(&mut bench, &[1, 2, 3, 4, 5]);
        let blocks = bench.0.pool().parking().parked();
        let advice = crate::cache::advice::Advice { level: 1, until: crate::cache::advice::FOREVER };
        bench.0.pool.advisor().advise(&blocks[..1], advice);
        assert_eq!(copies(&bench.admit(2, &[7; 7])).0.iter().map(|(block, _)| *block).collect::<Vec<_>>(), blocks[1..]);
    }

    #[test]
    fn a_block_from_the_host_tier_that_a_fork_writes_on_is_not_published_for_its_released_parent() {
        let mut bench = kept();
        bench.admit(1, &[1, 2, 3, 4, 5]);
        bench.fork(1, &[2], 1);
        bench.plan(StepRequest {
            releases: vec![1],
            extends: vec![crate::books::plans::Extend {
                seq_id: 2,
                num_tokens: 2,
                append: vec![60],
                ..Default::default()
            }],
            ..StepRequest::default()
        });
        bench.settle();
        assert_eq!(bench.0.violations(), [""; 0]);
        assert_eq!(bench.0.cached_tokens(&[1, 2, 3, 4, 5], &b"".into(), b""), [0, 4, 0], "the copies are as they were");
    }
}
