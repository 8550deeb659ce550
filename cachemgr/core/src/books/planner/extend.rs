//! Extends sequences: blocks to write for the next tokens, and the runs that compute them.

use crate::books::geometry::Geometry;
use crate::books::lease::Lease;
use crate::books::planner::advise::advise_fresh;
use crate::books::planner::{Answer, DIGEST_BYTES, StepPlanner, find_in_pool};
use crate::books::plans::{Extend, PlanItem};
use crate::books::room::{refuse_foreign_tokens, update_reservation};
use crate::books::sequences::{Row, Sequence, SequenceTable};
use crate::books::steps::{Run, StepInFlight};
use crate::books::tables::BlockTable;
use crate::cache::groups::{Group, Span};
use crate::cache::prefix::{BlockId, digest_of};
use crate::errors::{Reason, Refusal, Result, invalid};

impl StepPlanner<'_> {
    /// All extends: room for each one, in the order of the request; then their runs.
    pub(super) fn extend_all(&mut self, extends: &[Extend]) -> Result<()> {
        let mut ready = Vec::with_capacity(extends.len());
        for extend in extends {
            let seq_id = extend.seq_id.into();
            let row = self.lease.row_of(seq_id);
            let is_ready = |row: &Row| {
                let sequence = self.table.get(*row);
                sequence.is_decode(extend) && sequence.has_slot()
            };
            match row.filter(is_ready) {
                Some(row) => ready.push((row, extend)),
                None => match self.extend(extend)? {
                    Ok(row) => ready.push((row, extend)),
                    Err(refusal) => self.plan.answer(PlanItem::Extend, seq_id, Err(refusal)),
                },
            }
        }
        for (row, extend) in ready {
            if extend.has_drafts {
                self.schedule_drafts(row, &extend.append);
            } else {
                self.schedule(row, extend.num_tokens as usize);
            }
        }
        Ok(())
    }

    /// Makes room for the next tokens of a sequence and appends those that are given.
    pub(super) fn extend(&mut self, extend: &Extend) -> Result<std::result::Result<Row, Refusal>> {
        let seq_id = extend.seq_id;
        let row = match find_in_pool(seq_id.into(), self.lease, self.table) {
            Ok(row) => row,
            Err(refusal) => return Ok(Err(refusal)),
        };
        if extend.num_tokens < 1 {
            return Ok(Err(invalid("extends.token_counts", extend.num_tokens, "at least 1")));
        }
        let (append, drafts) = extend.appended_and_drafts();
        let (num_appended, num_wanted, num_drafts) = (append.len(), extend.num_tokens as usize, drafts.len());
        let sequence = self.table.get(row);
        let end = sequence.num_scheduled + num_wanted;
        refuse_if!(refuse_append(sequence, append, self.geometry));
        refuse_if!(refuse_drafts(sequence, drafts, self.geometry));
        let num_most = end.max(sequence.num_known() + num_appended);
        refuse_if!(self.room_for(sequence.tenant).refuse_too_long(seq_id.into(), num_most, sequence.reserved_tokens));
        refuse_if!(refuse_uncomputable(sequence, num_wanted - num_drafts, num_appended));
        let num_tokens = sequence.num_tokens + num_appended + num_drafts;
        if let Err(refusal) = self.make_writable(row, end, num_tokens)? {
            return Ok(Err(refusal));
        }
        if num_appended > 0 {
            self.table.get_mut(row).append(append);
        }
        Ok(Ok(row))
    }

    /// Blocks of the sequence's own from its next position to `end`, and tables long enough for `num_tokens`.
    ///
    /// A block that is shared or published is replaced, by a copy if slots before the next position count. Refused,
    /// with nothing changed, if there are too few blocks.
    pub(super) fn make_writable(&mut self, row: Row, end: usize, num_tokens: usize) -> Answer {
        let geometry = self.geometry;
        let sequence = self.table.get(row);
        let (seq_id, first, num_reserved) =
            (sequence.seq_id, sequence.num_scheduled / geometry.block_size, sequence.num_reserved);
        let (tenant, num_blocks) = (sequence.tenant, geometry.num_blocks_for(end));
        let num_fresh_in = |(span, table): (&Span, &BlockTable)| {
            let written = table.range(first..num_blocks).iter();
            let num_foreign = written.filter(|block| !self.pool.is_writable(**block)).count();
            num_foreign + geometry.end_of_table(*span, num_tokens, end).saturating_sub(table.end())
        };
        let num_fresh: usize = geometry.groups.iter().zip(&sequence.tables).map(num_fresh_in).sum();
        refuse_if!(self.room_for(tenant).refuse(seq_id.into(), num_fresh.saturating_sub(num_reserved), 0, 0));
        for (group, span) in geometry.groups() {
            self.make_table_writable(row, group, num_blocks, geometry.end_of_table(span, num_tokens, end))?;
        }
        let sequence = self.table.get_mut(row);
        sequence.num_writable = geometry.num_slots(num_blocks, sequence.reserved_tokens);
        if num_fresh > 0 {
            update_reservation(row, self.pool, self.table, self.geometry);
        }
        Ok(Ok(()))
    }

    /// As above for one layer group, with blocks to be written up to index `num_blocks` of a table up to index `end`.
    /// There is room.
    pub(super) fn make_table_writable(&mut self, row: Row, group: Group, num_blocks: usize, end: usize) -> Result<()> {
        let block_size = self.geometry.block_size;
        let sequence = self.table.get(row);
        let (start, table, asker) = (sequence.num_scheduled, sequence.table(group), self.asker_for(sequence.tenant));
        let (seq_id, length) = (sequence.seq_id, table.end());
        let written = start / block_size..num_blocks.min(length);
        let (foreign, own): (Vec<usize>, Vec<usize>) =
            written.partition(|index| !self.pool.is_writable(table.block(*index)));
        for block in own.into_iter().map(|index| table.block(index)).collect::<Vec<_>>() {
            if self.pool.holders().hold_count(block) > 0 {
                forget_claims(block, self.lease, &mut self.step, self.table, self.geometry.block_size);
            }
        }
        let num_fresh = foreign.len() + end.saturating_sub(length);
        let mut fresh = self.pool.allocate(num_fresh, group, &asker)?;
        advise_fresh(&fresh, self.table.get(row).tail_advice, self.pool);
        let added = fresh.split_off(foreign.len());
        for (index, target) in foreign.iter().zip(fresh) {
            self.replace(row, group, *index, target, index * block_size < start)?;
        }
        if !added.is_empty() {
            self.plan.write(seq_id, group, length, &added);
        }
        self.table.get_mut(row).tables[usize::from(group)].extend(added);
        self.keep_fresh(row, group, foreign.into_iter().chain(length..end));
        Ok(())
    }

    /// Copy-on-write of one block of a table; the old one is held as long as a step may read it.
    pub(super) fn replace(
        &mut self,
        row: Row,
        group: Group,
        index: usize,
        target: BlockId,
        is_copied: bool,
    ) -> Result<()> {
        let sequence = self.table.get_mut(row);
        let source = sequence.tables[usize::from(group)].replace(index, target);
        self.plan.write(sequence.seq_id, group, index, &[target]);
        if !is_copied {
            return self.lease.let_go(vec![source], self.pool);
        }
        self.plan.copy_sources.push(source);
        self.plan.copy_targets.push(target);
        self.counters.copied_blocks += 1;
        self.step.holds.push(vec![source]);
        self.pool.retire(&[source])
    }

    /// Puts a run of the sequence's next tokens into the plan. One that reaches its last token samples the next one.
    pub(super) fn schedule(&mut self, row: Row, num_tokens: usize) {
        let sequence = self.table.get_mut(row);
        let (start, end) = (sequence.num_scheduled, sequence.num_scheduled + num_tokens);
        let is_given = sequence.sampled_position != Some(start) || num_tokens > 1;
        let samples = sequence.num_tokens == end;
        sequence.num_scheduled = end;
        sequence.oldest_state = end - 1;
        if samples {
            sequence.num_tokens = end + 1;
            sequence.sampled_position = Some(end);
        }
        if is_given {
            self.plan.give(&digest_of(&sequence.tokens[start..end])[..DIGEST_BYTES]);
        }
        self.enter_run(row, start, end, samples);
    }

    /// Puts a run of the token that the sequence's last step sampled and of drafts after it into the plan.
    fn schedule_drafts(&mut self, row: Row, drafts: &[i32]) {
        let sequence = self.table.get_mut(row);
        let start = sequence.num_scheduled;
        sequence.send_drafts(drafts.len());
        let (index, end) = (self.plan.run_seq_ids.len(), sequence.num_scheduled);
        self.plan.give(&digest_of(drafts)[..DIGEST_BYTES]);
        self.plan.run_draft_counts.resize(index, 0);
        self.plan.run_draft_counts.push(drafts.len() as u32);
        self.step.drafts.insert(index, drafts.to_vec());
        self.enter_run(row, start, end, true);
    }

    /// A run of the positions from `start` to before `end`.
    fn enter_run(&mut self, row: Row, start: usize, end: usize, samples: bool) {
        let (sequence, plan) = (self.table.get(row), &mut self.plan);
        let seq_id = sequence.seq_id;
        plan.adapt(&sequence.namespace.adapter);
        plan.run_seq_ids.push(seq_id);
        plan.run_starts.push(start as u32);
        plan.run_token_counts.push((end - start) as u32);
        plan.run_samples.push(samples);
        self.step.runs.push(Run { row, seq_id, sampled_position: end, end, samples, receives: samples });
        if sequence.cache_use.writes() {
            self.step.expect_fill(row, sequence, start, end, self.geometry.block_size);
        }
    }
}

/// A released sequence shared this block, which is to be written again: its runs in flight do not publish it.
fn forget_claims(
    block: BlockId,
    lease: &mut Lease,
    step: &mut StepInFlight,
    table: &mut SequenceTable,
    block_size: usize,
) {
    let steps = lease.in_flight.iter().chain([&*step]);
    let released: Vec<Row> = steps.flat_map(|step| step.released_rows.iter().copied()).collect();
    for row in released {
        let entry = table.get(row).tables.iter().flat_map(|table| table.entries()).find(|(_, held)| *held == block);
        if let Some((index, _)) = entry {
            for step in lease.in_flight.iter_mut().chain([&mut *step]) {
                step.limit(row, index, block_size);
            }
            table.get_mut(row).limit_computed(index * block_size); // it may have come from the host tier
        }
    }
}

fn refuse_append(sequence: &Sequence, append: &[i32], geometry: &Geometry) -> Option<Refusal> {
    if append.is_empty() {
        return None;
    }
    let seq_id = sequence.seq_id;
    if sequence.num_promised() > 0 {
        let message = format!("sequence {seq_id} has tokens being sampled; trim it before others are appended");
        let refusal = Refusal::new(Reason::InvalidArgument, message);
        return Some(refusal.with("field", "extends.append_token_ids").with("value", seq_id));
    }
    refuse_foreign_tokens(seq_id.into(), append, geometry)
}

/// Drafts come after the token that the worker sampled last, if that is all that is left to compute.
fn refuse_drafts(sequence: &Sequence, drafts: &[i32], geometry: &Geometry) -> Option<Refusal> {
    if drafts.is_empty() {
        return None;
    }
    let seq_id = sequence.seq_id;
    if !sequence.takes_drafts() {
        let limit = format!("0: what is left to compute of sequence {seq_id} is not just the token sampled last");
        return Some(invalid("extends.draft_token_counts", drafts.len(), limit).with("sequence_id", seq_id));
    }
    refuse_foreign_tokens(seq_id.into(), drafts, geometry)
}

/// Only known tokens can be computed, or the one token that is being sampled.
fn refuse_uncomputable(sequence: &Sequence, num_tokens: usize, num_appended: usize) -> Option<Refusal> {
    let (seq_id, start) = (sequence.seq_id, sequence.num_scheduled);
    let num_known = sequence.num_known() + num_appended;
    let is_sampled = sequence.sampled_position == Some(start) && start < sequence.num_tokens;
    let limit = num_known.saturating_sub(start).max(usize::from(is_sampled));
    if num_tokens <= limit {
        return None;
    }
    let message = format!("sequence {seq_id} has {limit} tokens left to compute, {num_tokens} asked for");
    let refusal = Refusal::new(Reason::NothingToCompute, message);
    Some(refusal.with("sequence_id", seq_id).with("value", num_tokens).with("limit", limit))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::books::plans::{Admission, GrantedStep, StepRequest};
    use crate::books::tests::{Bench, admission, draft};

    #[test]
    fn a_block_that_a_fork_writes_on_is_not_published_for_its_released_parent() {
        let mut bench = Bench::new(8);
        bench.admit(1, &[1, 2, 3, 4, 5]);
        bench.fork(1, &[2], 3);
        let plan = bench.plan(StepRequest {
            releases: vec![1],
            extends: vec![Extend { seq_id: 2, num_tokens: 2, append: vec![8], ..Extend::default() }],
            admissions: vec![admission(3, &[1, 2, 3, 4, 5])],
            ..StepRequest::default()
        });
        assert_eq!((plan.copy_sources, plan.admitted_cached_counts), (vec![], vec![2]));
        bench.0.settle("a", &bench.report("a")).unwrap();
        assert_eq!(bench.0.num_cached_tokens(&[1, 2, 3, 4, 5], &b"".into(), b""), 2);
        bench.settle();
        assert_eq!(bench.0.num_cached_tokens(&[1, 2, 3, 8, 5], &b"".into(), b""), 4);
        assert_eq!(bench.0.violations(), [""; 0]);
    }

    #[test]
    fn a_decode_with_room_takes_no_block_and_writes_nothing() {
        let mut bench = Bench::new(4);
        bench.admit(1, &[1, 2, 3]);
        let allocated = bench.0.pool().counters().num_allocated;
        let plan = bench.extend(1, 1, &[]);
        assert_eq!((plan.run_starts, plan.run_samples, plan.given_run_indexes), (vec![3], vec![true], vec![]));
        assert_eq!((plan.write_seq_ids.len(), bench.0.pool().counters().num_allocated), (0, allocated));
        assert_eq!(bench.extend(1, 1, &[]).write_first_indexes, [2]);
        assert_eq!((bench.sequence(1).num_writable, bench.sequence(1).num_scheduled), (6, 5));
    }

    /// Sequence 1 of a prompt of three tokens, and a fourth one that is being sampled.
    fn drafting() -> Bench {
        let mut bench = Bench::new(8);
        bench.admit(1, &[1, 2, 3]);
        bench
    }

    #[test]
    fn drafts_are_computed_behind_the_token_that_was_sampled_last() {
        for is_reported in [true, false] {
            let mut bench = drafting();
            if is_reported {
                bench.settle();
            }
            let extends = vec![draft(1, &[9, 9, 8])];
            let admissions = vec![admission(2, &[5])];
            let plan = bench.plan(StepRequest { extends, admissions, ..StepRequest::default() });
            assert_eq!(
                (plan.run_seq_ids, plan.run_starts, plan.run_token_counts),
                (vec![1, 2], vec![3, 0], vec![4, 1])
            );
            assert_eq!((plan.run_samples, plan.run_draft_counts), (vec![true, true], vec![3, 0]));
            assert_eq!(plan.given_run_indexes, [0, 1]);
            assert_eq!(plan.given_digests[..DIGEST_BYTES], digest_of(&[9, 9, 8])[..DIGEST_BYTES]);
            assert_eq!((plan.write_seq_ids, plan.write_first_indexes), (vec![1, 2], vec![2, 0]));
            let sequence = bench.sequence(1);
            assert_eq!((sequence.num_scheduled, sequence.num_tokens, sequence.num_drafts), (7, 8, 3));
            assert_eq!(bench.0.violations(), [""; 0]);
        }
    }

    #[test]
    fn while_drafts_are_in_flight_a_sequence_can_only_be_released() {
        let mut bench = drafting();
        bench.draft(1, &[9]);
        let before = bench.0.state(None);
        for plan in
            [bench.extend(1, 1, &[]), bench.draft(1, &[9]), bench.trim(1, 2), bench.offload(1), bench.fork(1, &[2], 2)]
        {
            let [refused] = &plan.refusals[..] else { panic!("{:?}", plan.refusals) };
            assert_eq!(refused.refusal.reason, Reason::SequenceBusy, "{refused:?}");
            assert_eq!(refused.refusal.message, "drafts of sequence 1 are in flight");
        }
        assert_ne!(bench.0.state(None), before, "the plans are steps");
        assert_eq!(bench.0.leases["a"].in_flight.len(), 7);
        assert_eq!(bench.release(&[1]).released_ids, [1]);
        bench.settle();
        assert_eq!((bench.0.num_rows(), bench.0.violations()), (0, vec![]));
        assert_eq!(
            bench.0.num_cached_tokens(&[1, 2, 3, 9, 9, 9], &b"".into(), b""),
            4,
            "a fifth token was accepted, not a sixth"
        );
    }

    #[test]
    fn drafts_need_the_token_sampled_last_and_nothing_else_to_compute() {
        let told = |plan: GrantedStep| plan.refusals[0].refusal.message.clone();
        let limit = "must be 0: what is left to compute of sequence 1 is not just the token sampled last";
        let mut bench = Bench::new(8);
        bench.plan(StepRequest {
            admissions: vec![Admission { max_compute: 2, ..admission(1, &[1, 2, 3]) }],
            ..StepRequest::default()
        });
        let before = bench.0.state(None);
        assert_eq!(told(bench.draft(1, &[9])), format!("extends.draft_token_counts is 1; {limit}"), "a prompt's token");
        assert_eq!(bench.0.state(Some("a")), before);
        bench.settle();
        bench.extend(1, 1, &[]);
        assert_eq!(
            told(bench.draft(1, &[9, 100])),
            "token 100 at index 1 of sequence 1 is not in the vocabulary, 0 to 99"
        );
        bench.trim(1, 3);
        assert_eq!(told(bench.draft(1, &[9])), format!("extends.draft_token_counts is 1; {limit}"), "all is computed");
        assert_eq!(told(bench.draft(2, &[9])), "the lease holds no sequence 2");
    }

    #[test]
    fn drafts_need_room() {
        let mut bench = Bench::new(3);
        bench.admit(1, &[1, 2, 3]);
        assert_eq!(
            bench.draft(1, &[9; 3]).refusals[0].refusal.message,
            "sequence 1 would have 7 tokens; the pool's limit is 6"
        );
        bench.admit(2, &[5]);
        let before = bench.0.state(None);
        assert_eq!(
            bench.draft(1, &[9]).refusals[0].refusal.message,
            "sequence 1 needs 1 blocks; 0 are free or evictable, 0 retired"
        );
        assert_eq!(bench.0.state(Some("a")), before);
        assert_eq!(bench.extend(1, 1, &[]).refusals.len(), 0);
    }
}
