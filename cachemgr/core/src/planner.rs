//! Plans one step of one lease: applies a request's items to the books, one by one, each whole or not at all.
//!
//! Order: releases, trims, forks, extends, admissions. Forks come before extends, so that a block that is shared from now
//! on is not written by its old holder in the same step.
//!
//! What lets go of a block, and until when it stays retired (n is the step being planned):
//!
//!     a sequence that is released, a trimmed tail      the last step in flight before n
//!     the source of a copy done at the start of n      n
//!     nothing in flight                                not at all

use crate::books::{Counters, Geometry, Holdings};
use crate::errors::{Reason, Refusal, Result, invalid};
use crate::plans::{Admission, Extend, Fork, PlanItem, RefusedItem, StepPlan, StepRequest, Trim};
use crate::pool::{BlockPool, BlockState};
use crate::prefix::{BlockId, Hash, Past, chain_hashes, digest_of};
use crate::sequences::{Row, Sequence, SequenceTable};
use crate::steps::{Run, StepInFlight};
use crate::tenants::Asker;

const DIGEST_BYTES: usize = 16;
const MAX_SEQUENCE_ID: i64 = i32::MAX as i64;

/// Whether an item was refused, inside of whether the books are right.
type Answer = Result<std::result::Result<(), Refusal>>;

/// Ends a function with a refusal, if there is one.
macro_rules! refuse_if {
    ($refusal:expr) => {
        if let Some(refusal) = $refusal {
            return Ok(Err(refusal));
        }
    };
}

/// One plan in the making. `run` it once.
pub struct StepPlanner<'a> {
    lease: &'a mut Holdings,
    pool: &'a mut BlockPool,
    table: &'a mut SequenceTable,
    geometry: &'a Geometry,
    counters: &'a mut Counters,
    asker: Asker,
    step: StepInFlight,
    plan: StepPlan,
    budget: Option<usize>,
}

impl<'a> StepPlanner<'a> {
    pub fn new(
        lease: &'a mut Holdings,
        pool: &'a mut BlockPool,
        table: &'a mut SequenceTable,
        geometry: &'a Geometry,
        counters: &'a mut Counters,
        asker: Asker,
    ) -> StepPlanner<'a> {
        let step = StepInFlight { step_number: lease.next_step, ..StepInFlight::default() };
        let plan = StepPlan { step_number: lease.next_step, known_step: lease.known_step, ..StepPlan::default() };
        StepPlanner { lease, pool, table, geometry, counters, asker, step, plan, budget: None }
    }

    /// Applies the request and puts the step in flight.
    pub fn run(mut self, request: &StepRequest) -> Result<StepPlan> {
        for seq_id in &request.releases {
            self.release(*seq_id)?;
        }
        self.write_changed_entries();
        for trim in &request.trims {
            let answer = self.trim(trim)?;
            self.answer(PlanItem::Trim, trim.seq_id, answer);
        }
        for fork in &request.forks {
            self.fork(fork)?;
        }
        self.extend_all(&request.extends)?;
        self.budget = (request.admission_token_budget > 0).then_some(request.admission_token_budget);
        for admission in &request.admissions {
            let answer = self.admit(admission, request.admission_reserve)?;
            self.answer(PlanItem::Admission, admission.seq_id, answer);
        }
        self.lease.next_step += 1;
        self.lease.in_flight.push_back(self.step);
        self.plan.counts = self.pool.counts();
        Ok(self.plan)
    }

    fn answer(&mut self, item: PlanItem, seq_id: i64, answer: std::result::Result<(), Refusal>) {
        if let Err(refusal) = answer {
            self.plan.refusals.push(RefusedItem { item, seq_id, refusal });
        }
    }

    fn find(&self, seq_id: i64) -> Option<Row> {
        i32::try_from(seq_id).ok().and_then(|seq_id| self.lease.sequences.get(&seq_id).copied())
    }

    // -- letting go ---------------------------------------------------------------------------------------------------

    fn release(&mut self, seq_id: i64) -> Result<()> {
        let Some(row) = self.find(seq_id) else {
            return Ok(());
        };
        let sequence = self.table.get_mut(row);
        sequence.released = true;
        let (seq_id, blocks) = (sequence.seq_id, sequence.blocks_tail_first(0));
        self.lease.sequences.remove(&seq_id);
        self.step.released_rows.push(row);
        self.plan.released_ids.push(seq_id);
        self.let_go(blocks)
    }

    /// Releases a table's tail; steps in flight before this one may still touch it.
    fn let_go(&mut self, tail_first: Vec<BlockId>) -> Result<()> {
        match self.lease.in_flight.back_mut() {
            Some(last) => {
                self.pool.retire(&tail_first)?;
                last.pinned.push(tail_first);
                Ok(())
            }
            None => self.pool.release(&tail_first),
        }
    }

    fn write_changed_entries(&mut self) {
        for (row, index) in std::mem::take(&mut self.lease.table_changes) {
            let sequence = self.table.get(row);
            if !sequence.released && index < sequence.block_table.len() {
                self.plan.write(sequence.seq_id, index, &sequence.block_table[index..=index]);
            }
        }
    }

    fn trim(&mut self, trim: &Trim) -> Answer {
        let Some(row) = self.find(trim.seq_id) else {
            return Ok(Err(sequence_not_found(trim.seq_id)));
        };
        let block_size = self.geometry.block_size;
        let sequence = self.table.get_mut(row);
        refuse_if!(refuse_position(trim.seq_id, trim.num_tokens, sequence.num_tokens));
        let num_tokens = trim.num_tokens as usize;
        sequence.truncate(num_tokens, block_size, self.pool.index());
        let num_kept = self.geometry.num_blocks_for(num_tokens);
        let tail_first = sequence.blocks_tail_first(num_kept);
        sequence.block_table.truncate(num_kept);
        for step in &mut self.lease.in_flight {
            step.cut(row, num_tokens, block_size);
        }
        if !tail_first.is_empty() {
            self.let_go(tail_first)?;
        }
        Ok(Ok(()))
    }

    // -- forks --------------------------------------------------------------------------------------------------------

    fn fork(&mut self, fork: &Fork) -> Result<()> {
        let parent = self.find(fork.parent_id);
        let refusal = match parent {
            None => Some(sequence_not_found(fork.parent_id)),
            Some(row) => refuse_position(fork.parent_id, fork.num_tokens, self.table.get(row).num_tokens),
        };
        let mut num_children = 0;
        for &child_id in &fork.child_ids {
            let refused = refusal.clone().or_else(|| self.refuse_new(child_id));
            match (refused, parent) {
                (None, Some(parent)) => {
                    self.continue_from(parent, child_id as i32, fork.num_tokens as usize);
                    num_children += 1;
                }
                (Some(refused), _) => self.answer(PlanItem::Fork, child_id, Err(refused)),
                (None, None) => unreachable!("a fork without a parent is refused"),
            }
        }
        if let Some(row) = parent
            && num_children > 0
        {
            let parent = self.table.get_mut(row);
            let shared = parent.blocks_of(fork.num_tokens as usize, self.geometry.block_size);
            self.pool.acquire(shared, num_children)?;
            parent.num_writable = 0;
            self.counters.forks += u64::from(num_children);
        }
        Ok(())
    }

    /// A sequence that has the parent's blocks in its table and computes its last token again, into a copy.
    fn continue_from(&mut self, parent_row: Row, child_id: i32, num_tokens: usize) {
        let parent = self.table.get(parent_row);
        let parent_id = parent.seq_id;
        let child = parent.fork(child_id, num_tokens, self.geometry.block_size, self.pool.index());
        let row = self.enter(child);
        for step in &mut self.lease.in_flight {
            step.join(parent_row, row, num_tokens);
        }
        self.plan.fork_parent_ids.push(parent_id);
        self.plan.fork_child_ids.push(child_id);
    }

    // -- computing ----------------------------------------------------------------------------------------------------

    /// All extends: room for each one, in the order of the request; then their runs.
    fn extend_all(&mut self, extends: &[Extend]) -> Result<()> {
        let mut ready = Vec::with_capacity(extends.len());
        for extend in extends {
            let row = self.find(extend.seq_id.into());
            let is_decode = row.is_some_and(|row| self.is_decode(row, extend));
            match row {
                Some(row) if is_decode && self.has_slot(row) => ready.push((row, 1)),
                _ => match self.extend(row, extend)? {
                    Ok(()) => ready.extend(row.map(|row| (row, extend.num_tokens as usize))),
                    Err(refusal) => self.answer(PlanItem::Extend, extend.seq_id.into(), Err(refusal)),
                },
            }
        }
        for (row, num_tokens) in ready {
            self.schedule(row, num_tokens);
        }
        Ok(())
    }

    /// Whether it computes just the token that the worker sampled last, the sequence's last one.
    fn is_decode(&self, row: Row, extend: &Extend) -> bool {
        let sequence = self.table.get(row);
        let start = sequence.num_scheduled;
        extend.num_tokens == 1
            && extend.append.is_empty()
            && sequence.sampled_position == Some(start)
            && sequence.num_tokens == start + 1
    }

    fn has_slot(&self, row: Row) -> bool {
        let sequence = self.table.get(row);
        sequence.num_scheduled < sequence.num_writable
    }

    /// Makes room for the next tokens of a sequence and appends those that are given.
    fn extend(&mut self, row: Option<Row>, extend: &Extend) -> Answer {
        let seq_id = extend.seq_id;
        let Some(row) = row else {
            return Ok(Err(sequence_not_found(seq_id.into())));
        };
        if extend.num_tokens < 1 {
            return Ok(Err(invalid("extends.token_counts", extend.num_tokens, "at least 1")));
        }
        let (num_appended, num_wanted) = (extend.append.len(), extend.num_tokens as usize);
        let sequence = self.table.get(row);
        let end = sequence.num_scheduled + num_wanted;
        refuse_if!(self.refuse_append(sequence, &extend.append));
        refuse_if!(refuse_too_long(seq_id.into(), end.max(sequence.num_known() + num_appended), self.geometry));
        refuse_if!(refuse_uncomputable(sequence, num_wanted, num_appended));
        let num_tokens = sequence.num_tokens + num_appended;
        if let Err(refusal) = self.make_writable(row, end, num_tokens)? {
            return Ok(Err(refusal));
        }
        if num_appended > 0 {
            self.table.get_mut(row).append(&extend.append);
        }
        Ok(Ok(()))
    }

    fn refuse_append(&self, sequence: &Sequence, append: &[i32]) -> Option<Refusal> {
        if append.is_empty() {
            return None;
        }
        let seq_id = sequence.seq_id;
        if sequence.num_promised() > 0 {
            let message = format!("sequence {seq_id} has tokens being sampled; trim it before others are appended");
            let refusal = Refusal::new(Reason::InvalidArgument, message);
            return Some(refusal.with("field", "extends.append_token_ids").with("value", seq_id));
        }
        refuse_foreign_tokens(seq_id.into(), append, self.geometry)
    }

    /// Blocks of the sequence's own from its next position to `end`, and a table long enough for `num_tokens`.
    ///
    /// A block that is shared or published is replaced, by a copy if slots before the next position count. Refused,
    /// with nothing changed, if there are too few blocks.
    fn make_writable(&mut self, row: Row, end: usize, num_tokens: usize) -> Answer {
        let sequence = self.table.get(row);
        let (seq_id, start, length) = (sequence.seq_id, sequence.num_scheduled, sequence.block_table.len());
        let (block_size, num_blocks) = (self.geometry.block_size, self.geometry.num_blocks_for(end));
        let written = start / block_size..num_blocks.min(length);
        let is_foreign = |index: &usize| !self.pool.is_writable(sequence.block_table[*index]);
        let (foreign, own): (Vec<usize>, Vec<usize>) = written.partition(is_foreign);
        let num_fresh = foreign.len() + self.geometry.num_blocks_for(num_tokens).saturating_sub(length);
        if num_fresh > self.pool.num_allocatable() {
            return Ok(Err(self.out_of_blocks(seq_id.into(), num_fresh, self.pool.num_allocatable())));
        }
        for block in own.into_iter().map(|index| sequence.block_table[index]).collect::<Vec<_>>() {
            if self.pool.pin_count(block) > 0 {
                self.forget_claims(block);
            }
        }
        let mut fresh = self.pool.allocate(num_fresh, &self.asker)?;
        let added = fresh.split_off(foreign.len());
        for (index, target) in foreign.into_iter().zip(fresh) {
            self.replace(row, index, target, index * block_size < start)?;
        }
        if !added.is_empty() {
            self.plan.write(seq_id, length, &added);
        }
        let max_tokens = self.geometry.max_tokens();
        let sequence = self.table.get_mut(row);
        sequence.block_table.extend(added);
        sequence.num_writable = max_tokens.min(num_blocks * block_size);
        Ok(Ok(()))
    }

    /// A released sequence shared this block, which is to be written again: its runs in flight do not publish it.
    fn forget_claims(&mut self, block: BlockId) {
        let steps = || self.lease.in_flight.iter().chain([&self.step]);
        let released: Vec<Row> = steps().flat_map(|step| step.released_rows.iter().copied()).collect();
        for row in released {
            let position = self.table.get(row).block_table.iter().position(|held| *held == block);
            if let Some(index) = position {
                for step in self.lease.in_flight.iter_mut().chain([&mut self.step]) {
                    step.limit(row, index, self.geometry.block_size);
                }
            }
        }
    }

    /// Copy-on-write of one block of the table; the old one stays pinned as long as a step may read it.
    fn replace(&mut self, row: Row, index: usize, target: BlockId, is_copied: bool) -> Result<()> {
        let sequence = self.table.get_mut(row);
        let source = std::mem::replace(&mut sequence.block_table[index], target);
        self.plan.write(sequence.seq_id, index, &[target]);
        if !is_copied {
            return self.let_go(vec![source]);
        }
        self.plan.copy_sources.push(source);
        self.plan.copy_targets.push(target);
        self.counters.copied_blocks += 1;
        self.step.pinned.push(vec![source]);
        self.pool.retire(&[source])
    }

    fn out_of_blocks(&self, seq_id: i64, needed: usize, available: usize) -> Refusal {
        let retired = self.pool.counts().retired;
        let message =
            format!("sequence {seq_id} needs {needed} blocks; {available} are free or evictable, {retired} retired");
        Refusal::new(Reason::OutOfBlocks, message)
            .with("sequence_id", seq_id)
            .with("needed", needed)
            .with("free", available)
            .with("retired", retired)
    }

    /// Puts a run of the sequence's next tokens into the plan. One that reaches its last token samples the next one.
    fn schedule(&mut self, row: Row, num_tokens: usize) {
        let sequence = self.table.get_mut(row);
        let (start, end) = (sequence.num_scheduled, sequence.num_scheduled + num_tokens);
        let is_given = sequence.sampled_position != Some(start) || num_tokens > 1;
        let samples = sequence.num_tokens == end;
        sequence.num_scheduled = end;
        if samples {
            sequence.num_tokens = end + 1;
            sequence.sampled_position = Some(end);
        }
        let plan = &mut self.plan;
        if is_given {
            plan.given_run_indexes.push(plan.run_seq_ids.len() as u32);
            plan.given_digests.extend_from_slice(&digest_of(&sequence.tokens[start..end])[..DIGEST_BYTES]);
        }
        plan.run_seq_ids.push(sequence.seq_id);
        plan.run_starts.push(start as u32);
        plan.run_token_counts.push(num_tokens as u32);
        plan.run_samples.push(samples);
        let (seq_id, receives) = (sequence.seq_id, samples);
        self.step.runs.push(Run { row, seq_id, sampled_position: end, end, samples, receives });
        self.step.expect_fill(row, self.table.get(row), start, end, self.geometry.block_size);
    }

    // -- admissions ---------------------------------------------------------------------------------------------------

    fn admit(&mut self, admission: &Admission, reserve: usize) -> Answer {
        let (geometry, seq_id, tokens) = (self.geometry, admission.seq_id, &admission.tokens);
        refuse_if!(self.refuse_new(seq_id));
        refuse_if!(refuse_empty(seq_id, tokens.len()));
        refuse_if!(refuse_too_long(seq_id, tokens.len(), geometry));
        refuse_if!(refuse_foreign_tokens(seq_id, tokens, geometry));
        refuse_if!(self.refuse_over_budget(seq_id));
        let root = self.lease.root(&admission.salt, &geometry.model_fingerprint);
        let mut hashes = Vec::new();
        chain_hashes(root, tokens, geometry.block_size, &mut hashes);
        let (found, num_published) = self.find_prefix(&hashes, tokens.len());
        let num_needed = geometry.num_blocks_for(tokens.len()) - found.len();
        let available = self.pool.num_allocatable() - self.pool.num_parked(&found);
        if num_needed + reserve > available {
            return Ok(Err(self.out_of_blocks(seq_id, num_needed + reserve, available)));
        }
        let num_recomputed = self.pool.losses().num_evicted(&hashes[found.len()..self.num_sharable(tokens.len())]);
        self.counters.recomputed_tokens += (num_recomputed * geometry.block_size) as u64;
        self.pool.enter_root(&root, self.asker.tenant, &admission.salt);
        self.pool.acquire(&found, 1)?;
        let fresh = self.pool.allocate(num_needed, &self.asker)?;
        self.pool.enter_admission(&found, &fresh, &hashes);
        let num_found = found.len();
        let block_table = [found, fresh].concat();
        let num_writable = geometry.max_tokens().min(block_table.len() * geometry.block_size);
        let mut sequence = Sequence::begin(
            seq_id as i32,
            root,
            tokens.clone(),
            block_table,
            &hashes,
            num_found,
            num_published,
            geometry.block_size,
        );
        sequence.num_writable = num_writable;
        sequence.salt = admission.salt.clone();
        let row = self.enter(sequence);
        self.run_admitted(row, admission.max_compute);
        Ok(Ok(()))
    }

    /// The longest known prefix: its blocks, and how many of them the index has; the rest are being filled.
    ///
    /// At least one token is left to compute.
    fn find_prefix(&mut self, hashes: &[Hash], num_tokens: usize) -> (Vec<BlockId>, usize) {
        let most = self.num_sharable(num_tokens);
        let mut found = self.pool.index().find(&hashes[..most]);
        let num_published = found.len();
        for (index, hash) in hashes[..most].iter().enumerate().skip(num_published) {
            match self.pool.index().lookup(hash).or_else(|| self.find_filled(index, hash)) {
                Some(block) if self.is_shareable(block) => found.push(block),
                _ => break,
            }
        }
        (found, num_published)
    }

    /// Blocks of a prompt that may be found: at least one token is left to compute.
    fn num_sharable(&self, num_tokens: usize) -> usize {
        (num_tokens - 1) / self.geometry.block_size
    }

    /// The block at this index of a table that a step in flight of the lease, or this one, fills: the first such block.
    fn find_filled(&mut self, index: usize, hash: &Hash) -> Option<BlockId> {
        let steps = self.lease.in_flight.iter().chain([&self.step]);
        for fill in steps.flat_map(|step| &step.fills).filter(|fill| (fill.first..fill.end).contains(&index)) {
            let sequence = self.table.get_mut(fill.row);
            if sequence.hash_at(index, self.geometry.block_size) == hash {
                return Some(sequence.block_table[index]);
            }
        }
        None
    }

    fn is_shareable(&self, block: BlockId) -> bool {
        self.pool.state(block) == BlockState::Active || self.pool.index().past(block) == Past::Findable
    }

    fn run_admitted(&mut self, row: Row, max_compute: usize) {
        let sequence = self.table.get(row);
        let (start, num_known) = (sequence.num_scheduled, sequence.num_known());
        let limits = [(max_compute > 0).then_some(max_compute), self.budget];
        let count = limits.into_iter().flatten().fold(num_known - start, usize::min);
        self.budget = self.budget.map(|budget| budget - count);
        self.counters.admissions += 1;
        self.counters.admitted_tokens += num_known as u64;
        self.counters.cached_tokens += start as u64;
        self.plan.admitted_ids.push(sequence.seq_id);
        self.plan.admitted_cached_counts.push(start as u32);
        self.schedule(row, count);
    }

    fn enter(&mut self, sequence: Sequence) -> Row {
        self.plan.write(sequence.seq_id, 0, &sequence.block_table);
        let seq_id = sequence.seq_id;
        let row = self.table.enter(sequence);
        self.lease.sequences.insert(seq_id, row);
        row
    }

    fn refuse_new(&self, seq_id: i64) -> Option<Refusal> {
        if !(0..=MAX_SEQUENCE_ID).contains(&seq_id) {
            return Some(invalid("sequence_id", seq_id, format!("0 to {MAX_SEQUENCE_ID}")));
        }
        if self.find(seq_id).is_some() {
            let message = format!("the lease holds a sequence {seq_id} already");
            return Some(Refusal::new(Reason::SequenceExists, message).with("sequence_id", seq_id));
        }
        let limit = self.geometry.max_sequences;
        if self.table.len() < limit {
            return None;
        }
        let message = format!("sequence {seq_id} would be one more than the {limit} the worker has room for");
        Some(Refusal::new(Reason::TooManySequences, message).with("sequence_id", seq_id).with("limit", limit))
    }

    fn refuse_over_budget(&self, seq_id: i64) -> Option<Refusal> {
        if self.budget != Some(0) {
            return None;
        }
        let message = format!("the plan's admission_token_budget was used up before sequence {seq_id}");
        Some(Refusal::new(Reason::TokenBudgetSpent, message).with("sequence_id", seq_id))
    }
}

fn sequence_not_found(seq_id: i64) -> Refusal {
    Refusal::new(Reason::SequenceNotFound, format!("the lease holds no sequence {seq_id}")).with("sequence_id", seq_id)
}

fn refuse_position(seq_id: i64, value: i64, limit: usize) -> Option<Refusal> {
    if (1..=limit as i64).contains(&value) {
        return None;
    }
    let message = format!("position {value} of sequence {seq_id} must be 1 to {limit}");
    let refusal = Refusal::new(Reason::PositionOutOfRange, message);
    Some(refusal.with("sequence_id", seq_id).with("value", value).with("limit", limit))
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

fn refuse_empty(seq_id: i64, num_tokens: usize) -> Option<Refusal> {
    let message = || format!("sequence {seq_id} has no tokens; at least 1 is needed");
    (num_tokens == 0).then(|| Refusal::new(Reason::EmptyPrompt, message()).with("sequence_id", seq_id))
}

fn refuse_too_long(seq_id: i64, num_tokens: usize, geometry: &Geometry) -> Option<Refusal> {
    let limit = geometry.max_tokens();
    if num_tokens <= limit {
        return None;
    }
    let limited_by = if limit == geometry.max_sequence_tokens { "model" } else { "pool" };
    let message = format!("sequence {seq_id} would have {num_tokens} tokens; the {limited_by}'s limit is {limit}");
    let refusal = Refusal::new(Reason::SequenceTooLong, message).with("sequence_id", seq_id);
    Some(refusal.with("value", num_tokens).with("limit", limit).with("limited_by", limited_by))
}

fn refuse_foreign_tokens(seq_id: i64, tokens: &[i32], geometry: &Geometry) -> Option<Refusal> {
    let is_foreign = |token: &i32| *token as u32 as usize >= geometry.vocab_size; // negative ones are large
    let index = tokens.iter().position(is_foreign)?;
    let (value, limit) = (tokens[index], geometry.vocab_size - 1);
    let message = format!("token {value} at index {index} of sequence {seq_id} is not in the vocabulary, 0 to {limit}");
    let refusal = Refusal::new(Reason::TokenOutOfRange, message).with("sequence_id", seq_id);
    Some(refusal.with("index", index).with("value", value).with("limit", limit))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::books::tests::{Bench, admission};

    fn reasons(plan: &StepPlan) -> Vec<(PlanItem, i64, Reason)> {
        plan.refusals.iter().map(|refused| (refused.item, refused.seq_id, refused.refusal.reason)).collect()
    }

    #[test]
    fn items_are_applied_in_their_order_whatever_the_requests() {
        let mut bench = Bench::new(6);
        bench.plan(StepRequest {
            admissions: vec![admission(1, &[1, 2, 3]), admission(2, &[4, 5, 6])],
            ..StepRequest::default()
        });
        bench.settle();
        let plan = bench.plan(StepRequest {
            releases: vec![2, 7],
            trims: vec![Trim { seq_id: 1, num_tokens: 3 }, Trim { seq_id: 2, num_tokens: 1 }],
            forks: vec![
                Fork { parent_id: 1, child_ids: vec![3], num_tokens: 3 },
                Fork { parent_id: 1, child_ids: vec![4], num_tokens: 4 },
            ],
            extends: vec![Extend { seq_id: 3, num_tokens: 1, append: vec![] }],
            admissions: vec![admission(2, &[4, 5, 7])],
            ..StepRequest::default()
        });
        let refused = [(PlanItem::Trim, 2, Reason::SequenceNotFound), (PlanItem::Fork, 4, Reason::PositionOutOfRange)];
        assert_eq!(reasons(&plan), refused, "what was released is gone, and what was trimmed is short");
        assert_eq!((plan.released_ids, plan.fork_child_ids, plan.run_seq_ids), (vec![2], vec![3], vec![3, 2]));
        assert_eq!(plan.admitted_cached_counts, [2], "what was released in the same step is found");
    }

    #[test]
    fn ids_are_31_bits() {
        let mut bench = Bench::new(8);
        for seq_id in [-1, 1 << 31, i64::MIN, 1 << 32] {
            assert_eq!(reasons(&bench.admit(seq_id, &[1])), [(PlanItem::Admission, seq_id, Reason::InvalidArgument)]);
            assert_eq!(reasons(&bench.trim(seq_id, 1)), [(PlanItem::Trim, seq_id, Reason::SequenceNotFound)]);
            assert_eq!(bench.release(&[seq_id]).released_ids, [0; 0]);
        }
        assert_eq!(reasons(&bench.admit(0, &[1])), []);
        assert_eq!(bench.admit(i32::MAX.into(), &[1]).admitted_ids, [i32::MAX]);
    }

    #[test]
    fn a_refusal_says_every_number_of_its_sentence() {
        let mut bench = Bench::new(3);
        let refusal = |plan: StepPlan| {
            let refusal = plan.refusals[0].refusal.clone();
            assert!(refusal.metadata.iter().all(|(_, value)| refusal.message.contains(value)), "{refusal:?}");
            refusal.message
        };
        assert_eq!(refusal(bench.admit(1, &[0; 7])), "sequence 1 would have 7 tokens; the pool's limit is 6");
        assert_eq!(refusal(bench.admit(1, &[])), "sequence 1 has no tokens; at least 1 is needed");
        assert_eq!(
            refusal(bench.admit(1, &[0, -3])),
            "token -3 at index 1 of sequence 1 is not in the vocabulary, 0 to 99"
        );
        bench.admit(1, &[1, 2, 3]);
        assert_eq!(refusal(bench.admit(1, &[0])), "the lease holds a sequence 1 already");
        assert_eq!(refusal(bench.trim(1, 5)), "position 5 of sequence 1 must be 1 to 4");
        assert_eq!(refusal(bench.fork(1, &[2], 0)), "position 0 of sequence 1 must be 1 to 4");
        assert_eq!(refusal(bench.extend(1, 2, &[])), "sequence 1 has 1 tokens left to compute, 2 asked for");
        assert_eq!(refusal(bench.extend(1, 0, &[])), "extends.token_counts is 0; must be at least 1");
        assert_eq!(
            refusal(bench.admit(2, &[5, 6, 7])),
            "sequence 2 needs 2 blocks; 1 are free or evictable, 0 retired"
        );
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
    fn a_block_that_a_fork_writes_on_is_not_published_for_its_released_parent() {
        let mut bench = Bench::new(8);
        bench.admit(1, &[1, 2, 3, 4, 5]);
        bench.fork(1, &[2], 3);
        let plan = bench.plan(StepRequest {
            releases: vec![1],
            extends: vec![Extend { seq_id: 2, num_tokens: 2, append: vec![8] }],
            admissions: vec![admission(3, &[1, 2, 3, 4, 5])],
            ..StepRequest::default()
        });
        assert_eq!((plan.copy_sources, plan.admitted_cached_counts), (vec![], vec![2]));
        bench.0.settle("a", &bench.report("a")).unwrap();
        assert_eq!(bench.0.num_cached_tokens(&[1, 2, 3, 4, 5], b"", b""), 2);
        bench.settle();
        assert_eq!(bench.0.num_cached_tokens(&[1, 2, 3, 8, 5], b"", b""), 4);
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

    #[test]
    fn a_fork_takes_the_parents_right_to_write() {
        let mut bench = Bench::new(8);
        bench.admit(1, &[1, 2, 3]);
        bench.settle();
        assert_eq!(bench.sequence(1).num_writable, 4);
        assert_eq!(bench.fork(1, &[2, 3], 4).write_seq_ids, [2, 3]);
        assert_eq!((bench.sequence(1).num_writable, bench.sequence(2).num_writable), (0, 0));
        let shared = bench.blocks(1)[1];
        assert_eq!(bench.0.pool().ref_count(shared), 3);
        let plan = bench.extend(1, 1, &[]);
        assert_eq!((plan.copy_sources, bench.0.pool().ref_count(shared)), (vec![shared], 2));
        assert_eq!((bench.0.pool().pin_count(shared), bench.0.counters().forks), (1, 2));
        assert_eq!(bench.0.violations(), [""; 0]);
    }

    #[test]
    fn a_fork_whose_children_are_all_refused_changes_nothing() {
        let mut bench = Bench::new(8);
        bench.admit(1, &[1, 2, 3]);
        let before = bench.0.state(None);
        let plan = bench.fork(1, &[1, -5], 3);
        let expected = [(PlanItem::Fork, 1, Reason::SequenceExists), (PlanItem::Fork, -5, Reason::InvalidArgument)];
        assert_eq!((reasons(&plan), bench.0.state(Some("a"))), (expected.to_vec(), before));
        assert_eq!((bench.sequence(1).num_writable, bench.0.counters().forks), (4, 0));
        assert_eq!(reasons(&bench.fork(7, &[8], 1)), [(PlanItem::Fork, 8, Reason::SequenceNotFound)]);
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
}
