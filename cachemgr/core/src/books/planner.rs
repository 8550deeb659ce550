//! Plans one step of one lease: applies a request's items to the books, one by one, each atomically.
//!
//! Order: releases, offloads, blocks behind windows, trims, forks, extends, restores, admissions. Forks come before extends,
//! so that a block that is shared from now on is not written by its old holder in the same step.
//!
//! Events that free a block, and the step until which it stays retired (n is the step being planned):
//!
//!     a sequence that is released, a trimmed tail,
//!     blocks that a sequence has passed                the last step in flight before n
//!     the source of a copy done at the start of n      n: within the pool, to the host tier and from there
//!     nothing in flight                                not at all

use std::collections::HashMap;

use smallvec::SmallVec;

use crate::books::counters::Counters;
use crate::books::geometry::Geometry;
use crate::books::hits::{Hit, Prefix};
use crate::books::leases::Lease;
use crate::books::plans::{
    Admission, CacheUse, ExpectedPrompt, Extend, Fork, PlanItem, RefusedItem, Restore, Retention, ReturnHint, StepPlan,
    StepRequest, Trim,
};
use crate::books::room::{Room, refuse_foreign_tokens, refuse_no_row, update_reservation};
use crate::books::sequences::{Row, Sequence, SequenceTable};
use crate::books::steps::{Run, StepInFlight};
use crate::books::tables::{BlockTable, HostTables, Tables, tail_first};
use crate::cache::advice::{AWAITED, Advice, FOREVER, LEAST_WORTH, Level, Millis, UNADVISED, millis};
use crate::cache::groups::{Group, Span, identity};
use crate::cache::host::{HostBlockId, HostPool};
use crate::cache::pool::{BlockPool, BlockState};
use crate::cache::prefix::{BlockId, Hash, Past, chain_hashes, digest_of};
use crate::cache::tenants::{Asker, TenantId, Tenants};
use crate::errors::{Reason, Refusal, Result, invalid};

const DIGEST_BYTES: usize = 16;
const MAX_SEQUENCE_ID: i64 = i32::MAX as i64;

/// The level of a sequence that is expected back within so many seconds.
const RETURN_LEVELS: [(f64, Level); 3] = [(10.0, 8), (60.0, 7), (f64::INFINITY, 6)];
/// Shorter expectations are raised to the least, longer ones cut to the most.
const LEAST_EXPECTED_S: f64 = 1.0;
const MOST_EXPECTED_S: f64 = 3600.0;

/// Outer `Err`: broken invariant. Inner `Err`: the item was refused.
type Answer = Result<std::result::Result<(), Refusal>>;

/// Ends a function with a refusal, if there is one.
macro_rules! refuse_if {
    ($refusal:expr) => {
        if let Some(refusal) = $refusal {
            return Ok(Err(refusal));
        }
    };
}

/// The tenant of an admission, or the reason why it can't be that one.
pub type Owner = std::result::Result<TenantId, Refusal>;

/// One plan in the making. `run` it once.
pub struct StepPlanner<'a> {
    lease: &'a mut Lease,
    pool: &'a mut BlockPool,
    host: &'a mut HostPool,
    table: &'a mut SequenceTable,
    geometry: &'a Geometry,
    tenants: &'a Tenants,
    counters: &'a mut Counters,
    lease_name: [u8; 8],
    now: f64,
    step: StepInFlight,
    plan: StepPlan,
    budget: Option<usize>,
}

impl<'a> StepPlanner<'a> {
    pub fn new(
        lease: &'a mut Lease,
        pool: &'a mut BlockPool,
        host: &'a mut HostPool,
        table: &'a mut SequenceTable,
        geometry: &'a Geometry,
        tenants: &'a Tenants,
        counters: &'a mut Counters,
        lease_name: [u8; 8],
        now: f64,
    ) -> StepPlanner<'a> {
        let step = StepInFlight { step_number: lease.next_step, ..StepInFlight::default() };
        let plan = StepPlan { step_number: lease.next_step, known_step: lease.known_step, ..StepPlan::default() };
        StepPlanner { lease, pool, host, table, geometry, tenants, counters, lease_name, now, step, plan, budget: None }
    }

    /// Applies the request and puts the step in flight. `owners`: the owners of its admissions.
    pub fn run(mut self, request: &StepRequest, owners: Vec<Owner>) -> Result<StepPlan> {
        let hints: HashMap<i64, &ReturnHint> = request.return_hints.iter().map(|hint| (hint.seq_id, hint)).collect();
        for seq_id in &request.releases {
            self.release(*seq_id, hints.get(seq_id).copied())?;
        }
        for seq_id in &request.offloads {
            let answer = self.offload(*seq_id)?;
            self.answer(PlanItem::Offload, *seq_id, answer);
        }
        self.pass_windows()?;
        self.write_changed_entries();
        // The blocks of the last one are parked first, and so evicted first.
        for prompt in request.expected_prompts.iter().rev() {
            self.expect_prompt(prompt, request.names_tenants);
        }
        for trim in &request.trims {
            let answer = self.trim(trim)?;
            self.answer(PlanItem::Trim, trim.seq_id, answer);
        }
        for fork in &request.forks {
            self.fork(fork)?;
        }
        self.extend_all(&request.extends)?;
        self.budget = (request.admission_token_budget > 0).then_some(request.admission_token_budget);
        for restore in &request.restores {
            let answer = self.restore(restore, request.admission_reserve)?;
            self.answer(PlanItem::Restore, restore.seq_id, answer);
        }
        for (admission, owner) in request.admissions.iter().zip(owners) {
            let answer = self.admit(admission, owner, request.admission_reserve)?;
            self.answer(PlanItem::Admission, admission.seq_id, answer);
        }
        if !self.lease.reserved.is_empty() {
            self.lease.update_reservations(self.pool, self.table, self.geometry);
        }
        self.lease.next_step += 1;
        self.lease.in_flight.push_back(self.step);
        self.plan.counts = self.pool.counts();
        self.plan.host_counts = (self.host.len() > 0).then(|| self.host.counts());
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

    /// Positions before this one can't be computed again: the model's state before them is lost, or blocks that they see.
    fn least_position(&self, sequence: &Sequence) -> usize {
        let oldest = if self.geometry.has_recurrent_state { sequence.oldest_state } else { 0 };
        if !self.geometry.has_windows() {
            return oldest;
        }
        let least_in =
            |(span, table): (&Span, &BlockTable)| span.first_beyond(table.num_passed() * self.geometry.block_size);
        self.geometry.groups.iter().zip(&sequence.tables).map(least_in).fold(oldest, usize::max)
    }

    /// The row of a sequence in the pool. Refused if there is none, or if it is in the host tier.
    fn find_in_pool(&self, seq_id: i64) -> std::result::Result<Row, Refusal> {
        let row = self.find(seq_id).ok_or_else(|| sequence_not_found(seq_id))?;
        if !self.table.get(row).is_offloaded() {
            return Ok(row);
        }
        let message = format!("sequence {seq_id} is in the host tier");
        Err(Refusal::new(Reason::SequenceOffloaded, message).with("sequence_id", seq_id))
    }

    fn room_for(&self, tenant: TenantId) -> Room<'_> {
        Room { geometry: self.geometry, pool: self.pool, tenant }
    }

    fn asker_for(&self, tenant: TenantId) -> Asker {
        Asker { tenant, lease: self.lease_name, now: self.now }
    }

    // -- letting go ---------------------------------------------------------------------------------------------------

    fn release(&mut self, seq_id: i64, hint: Option<&ReturnHint>) -> Result<()> {
        let Some(row) = self.find(seq_id) else {
            return Ok(());
        };
        let sequence = self.table.get_mut(row);
        let host_blocks =
            sequence.in_host.as_mut().map(|tables| std::mem::take(&mut tables.blocks)).unwrap_or_default();
        self.plan.released_ids.push(sequence.seq_id);
        let blocks = self.end(row);
        let hinted = hint.map(|hint| (hint.expected_in, blocks.clone()));
        self.let_go(blocks)?;
        self.let_go_in_host(host_blocks)?;
        match hinted {
            Some((Some(seconds), blocks)) => self.expect_back(&blocks, seconds),
            Some((None, blocks)) => {
                let sequence = self.table.get(row);
                let num_found = sequence.blocks_of(sequence.num_cached, self.geometry.block_size).count();
                self.expect_never(&blocks[..blocks.len() - num_found.min(blocks.len())]);
            }
            None => {}
        }
        Ok(())
    }

    /// The sequence of this row ends with this step; returns its blocks, tail first.
    fn end(&mut self, row: Row) -> Vec<BlockId> {
        let sequence = self.table.get_mut(row);
        sequence.released = true;
        if sequence.reserved_tokens > 0 {
            self.pool.reserve(sequence.tenant, std::mem::take(&mut sequence.num_reserved), 0);
            self.lease.reserved.retain(|reserved| *reserved != row);
        }
        self.lease.sequences.remove(&sequence.seq_id);
        self.step.released_rows.push(row);
        sequence.blocks_tail_first(0)
    }

    /// Lets the blocks that a waiting prompt would find be evicted last, unless advice says so already. No effect for a
    /// tenant that can't have any.
    fn expect_prompt(&mut self, prompt: &ExpectedPrompt, names_tenants: bool) {
        let lease_tenant = self.lease.tenant;
        let named = prompt.tenant.as_ref().map_or(Some(lease_tenant), |name| self.tenants.find(name));
        let Some(tenant) = named.filter(|tenant| names_tenants || *tenant == lease_tenant) else { return };
        let num_sharable = self.num_sharable(prompt.tokens.len(), CacheUse::ReadAndWrite);
        let root = self.lease.root(tenant, self.tenants, &prompt.salt, &self.geometry.model_fingerprint);
        let mut hashes = Vec::new();
        let block_size = self.geometry.block_size;
        chain_hashes(root, &prompt.tokens[..num_sharable * block_size], block_size, &mut hashes);
        let hit = Prefix { geometry: self.geometry, index: self.pool.index(), hashes: &hashes }.find();
        let mut awaited = tail_first(&hit.tables, 0..hit.num_blocks);
        awaited.retain(|block| matches!(self.pool.level(*block), LEAST_WORTH..=UNADVISED | AWAITED));
        self.pool.expect(&awaited, self.end_of_expectation(prompt.expected_in));
    }

    /// Raises the level of these blocks until their expected use; an earlier use ranks higher.
    fn expect_back(&mut self, tail_first: &[BlockId], seconds: f64) {
        let level = RETURN_LEVELS.iter().find(|(most, _)| seconds <= *most).map_or(UNADVISED, |(_, level)| *level);
        let until = self.end_of_expectation(seconds);
        let is_raised = |block: &BlockId| self.is_kept_on(*block) && self.pool.level(*block) < level;
        let raised: Vec<BlockId> = tail_first.iter().copied().filter(is_raised).collect();
        self.pool.advise(&raised, Advice { level, until });
    }

    /// Twice the expected time from now: what was expected has come by then, or will not come.
    fn end_of_expectation(&self, seconds: f64) -> Millis {
        millis(self.now + (2.0 * seconds).clamp(LEAST_EXPECTED_S, MOST_EXPECTED_S))
    }

    /// Marks blocks as not needed again: those without a holder and without advice are evicted first.
    fn expect_never(&mut self, tail_first: &[BlockId]) {
        let is_unwanted = |block: &BlockId| {
            let (ref_count, level) = (self.pool.ref_count(*block), self.pool.level(*block));
            self.is_kept_on(*block) && ref_count == 0 && level == UNADVISED
        };
        let unwanted: Vec<BlockId> = tail_first.iter().copied().filter(is_unwanted).collect();
        self.pool.advise(&unwanted, Advice { level: LEAST_WORTH, until: FOREVER });
    }

    /// True if something could still be found in the block, now or when a step has ended.
    fn is_kept_on(&self, block: BlockId) -> bool {
        self.pool.state(block) != BlockState::Free
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

    /// Frees blocks of the host tier; steps in flight before this one may still access them.
    fn let_go_in_host(&mut self, blocks: Vec<HostBlockId>) -> Result<()> {
        match self.lease.in_flight.back_mut() {
            Some(last) if !blocks.is_empty() => {
                self.host.retire(&blocks)?;
                last.pinned_in_host.push(blocks);
                Ok(())
            }
            _ => self.host.release(&blocks),
        }
    }

    /// Lets the blocks go that no later token of a sequence sees. The last computed token may be computed again.
    fn pass_windows(&mut self) -> Result<()> {
        for row in std::mem::take(&mut self.lease.computed) {
            let is_there = |sequence: &&Sequence| {
                self.lease.sequences.get(&sequence.seq_id) == Some(&row) && !sequence.is_offloaded()
            };
            let Some(sequence) = self.table.find(row).filter(is_there) else { continue };
            let (seq_id, position) = (sequence.seq_id, sequence.num_computed.saturating_sub(1));
            let mut passed = Vec::new();
            for (group, span) in self.geometry.groups() {
                let table = &mut self.table.get_mut(row).tables[usize::from(group)];
                let blocks = table.pass(self.geometry.first_needed(span, position));
                if !blocks.is_empty() {
                    self.plan.pass(seq_id, group, table.num_passed());
                    self.pool.groups_mut().count(group, |counters| counters.num_passed += blocks.len() as u64);
                    passed.extend(blocks);
                }
            }
            if !passed.is_empty() {
                self.let_go(passed)?;
                self.update_reservation(row);
            }
        }
        Ok(())
    }

    fn write_changed_entries(&mut self) {
        for (row, group, index) in std::mem::take(&mut self.lease.table_changes) {
            let sequence = self.table.get(row);
            if let Some(block) = sequence.table(group).get(index).filter(|_| !sequence.released) {
                self.plan.write(sequence.seq_id, group, index, &[block]);
            }
        }
    }

    fn trim(&mut self, trim: &Trim) -> Answer {
        let row = match self.find_in_pool(trim.seq_id) {
            Ok(row) => row,
            Err(refusal) => return Ok(Err(refusal)),
        };
        let block_size = self.geometry.block_size;
        let sequence = self.table.get(row);
        let least = self.least_position(sequence).max(1);
        refuse_if!(refuse_position(trim.seq_id, trim.num_tokens, least, sequence.num_tokens));
        let num_tokens = trim.num_tokens as usize;
        let has_reservation = sequence.reserved_tokens > 0;
        if has_reservation {
            let room = self.room_for(sequence.tenant);
            let needed = room.num_at_risk_after(sequence, num_tokens);
            refuse_if!(room.refuse(trim.seq_id, needed, 0, 0));
        }
        let sequence = self.table.get_mut(row);
        sequence.truncate(num_tokens, block_size, self.pool.index());
        let num_kept = if has_reservation { usize::MAX } else { num_tokens.div_ceil(block_size) };
        let tail_first = sequence.blocks_tail_first(num_kept);
        sequence.tables.iter_mut().for_each(|table| table.truncate(num_kept));
        for step in &mut self.lease.in_flight {
            step.cut(row, num_tokens, block_size);
        }
        self.update_reservation(row);
        if !tail_first.is_empty() {
            self.let_go(tail_first)?;
        }
        Ok(Ok(()))
    }

    // -- forks --------------------------------------------------------------------------------------------------------

    fn fork(&mut self, fork: &Fork) -> Result<()> {
        let found = self.find_in_pool(fork.parent_id);
        let parent = found.as_ref().ok().copied();
        let refusal = match found {
            Err(refusal) => Some(refusal),
            Ok(row) => {
                let sequence = self.table.get(row);
                let least = self.least_position(sequence) + 1;
                refuse_position(fork.parent_id, fork.num_tokens, least, sequence.num_tokens)
                    .or_else(|| self.refuse_unguaranteed(row, fork.num_tokens as usize))
            }
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
            let end = self.geometry.num_blocks_for(fork.num_tokens as usize);
            for table in &parent.tables {
                self.pool.acquire(table.range(0..end), num_children)?;
            }
            parent.num_writable = 0;
            self.counters.forks += u64::from(num_children);
            self.update_reservation(row);
        }
        Ok(())
    }

    /// A sequence with a reservation that shares blocks will have to copy those that it writes: these have to be there.
    fn refuse_unguaranteed(&self, row: Row, num_tokens: usize) -> Option<Refusal> {
        let sequence = self.table.get(row);
        let end = self.geometry.num_blocks_for(num_tokens);
        let needed = self.num_newly_at_risk(row, &sequence.tables, end);
        self.room_for(sequence.tenant).refuse(sequence.seq_id.into(), needed, 0, 0)
    }

    fn update_reservation(&mut self, row: Row) {
        if self.table.get(row).reserved_tokens > 0 {
            update_reservation(row, self.pool, self.table, self.geometry);
        }
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
            let seq_id = extend.seq_id.into();
            let row = self.find(seq_id);
            let is_decode = row.is_some_and(|row| self.is_decode(row, extend));
            match row {
                Some(row) if is_decode && self.has_slot(row) => ready.push((row, 1)),
                _ => match self.extend(extend)? {
                    Ok(row) => ready.push((row, extend.num_tokens as usize)),
                    Err(refusal) => self.answer(PlanItem::Extend, seq_id, Err(refusal)),
                },
            }
        }
        for (row, num_tokens) in ready {
            self.schedule(row, num_tokens);
        }
        Ok(())
    }

    /// True if it computes just the token that the worker sampled last, the sequence's last one.
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
    fn extend(&mut self, extend: &Extend) -> Result<std::result::Result<Row, Refusal>> {
        let seq_id = extend.seq_id;
        let row = match self.find_in_pool(seq_id.into()) {
            Ok(row) => row,
            Err(refusal) => return Ok(Err(refusal)),
        };
        if extend.num_tokens < 1 {
            return Ok(Err(invalid("extends.token_counts", extend.num_tokens, "at least 1")));
        }
        let (num_appended, num_wanted) = (extend.append.len(), extend.num_tokens as usize);
        let sequence = self.table.get(row);
        let end = sequence.num_scheduled + num_wanted;
        refuse_if!(self.refuse_append(sequence, &extend.append));
        let num_most = end.max(sequence.num_known() + num_appended);
        refuse_if!(self.room_for(sequence.tenant).refuse_too_long(seq_id.into(), num_most, sequence.reserved_tokens));
        refuse_if!(refuse_uncomputable(sequence, num_wanted, num_appended));
        let num_tokens = sequence.num_tokens + num_appended;
        if let Err(refusal) = self.make_writable(row, end, num_tokens)? {
            return Ok(Err(refusal));
        }
        if num_appended > 0 {
            self.table.get_mut(row).append(&extend.append);
        }
        Ok(Ok(row))
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

    /// Blocks of the sequence's own from its next position to `end`, and tables long enough for `num_tokens`.
    ///
    /// A block that is shared or published is replaced, by a copy if slots before the next position count. Refused,
    /// with nothing changed, if there are too few blocks.
    fn make_writable(&mut self, row: Row, end: usize, num_tokens: usize) -> Answer {
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
            self.update_reservation(row);
        }
        Ok(Ok(()))
    }

    /// As above for one layer group, with blocks to be written up to index `num_blocks` of a table up to index `end`.
    /// There is room.
    fn make_table_writable(&mut self, row: Row, group: Group, num_blocks: usize, end: usize) -> Result<()> {
        let block_size = self.geometry.block_size;
        let sequence = self.table.get(row);
        let (start, table, asker) = (sequence.num_scheduled, sequence.table(group), self.asker_for(sequence.tenant));
        let (seq_id, length) = (sequence.seq_id, table.end());
        let written = start / block_size..num_blocks.min(length);
        let (foreign, own): (Vec<usize>, Vec<usize>) =
            written.partition(|index| !self.pool.is_writable(table.block(*index)));
        for block in own.into_iter().map(|index| table.block(index)).collect::<Vec<_>>() {
            if self.pool.pin_count(block) > 0 {
                self.forget_claims(block);
            }
        }
        let num_fresh = foreign.len() + end.saturating_sub(length);
        let mut fresh = self.pool.allocate(num_fresh, group, &asker)?;
        self.advise_tail(row, &fresh);
        let added = fresh.split_off(foreign.len());
        for (index, target) in foreign.into_iter().zip(fresh) {
            self.replace(row, group, index, target, index * block_size < start)?;
        }
        if !added.is_empty() {
            self.plan.write(seq_id, group, length, &added);
        }
        self.table.get_mut(row).tables[usize::from(group)].extend(added);
        Ok(())
    }

    fn advise_tail(&mut self, row: Row, fresh: &[BlockId]) {
        if let Some(advice) = self.table.get(row).tail_advice {
            let tail_first: Vec<BlockId> = fresh.iter().rev().copied().collect();
            self.pool.advise(&tail_first, advice);
        }
    }

    /// A released sequence shared this block, which is to be written again: its runs in flight do not publish it.
    fn forget_claims(&mut self, block: BlockId) {
        let steps = || self.lease.in_flight.iter().chain([&self.step]);
        let released: Vec<Row> = steps().flat_map(|step| step.released_rows.iter().copied()).collect();
        for row in released {
            let mut entries = self.table.get(row).tables.iter().flat_map(|table| table.entries());
            if let Some((index, _)) = entries.find(|(_, held)| *held == block) {
                for step in self.lease.in_flight.iter_mut().chain([&mut self.step]) {
                    step.limit(row, index, self.geometry.block_size);
                }
            }
        }
    }

    /// Copy-on-write of one block of a table; the old one stays pinned as long as a step may read it.
    fn replace(&mut self, row: Row, group: Group, index: usize, target: BlockId, is_copied: bool) -> Result<()> {
        let sequence = self.table.get_mut(row);
        let source = sequence.tables[usize::from(group)].replace(index, target);
        self.plan.write(sequence.seq_id, group, index, &[target]);
        if !is_copied {
            return self.let_go(vec![source]);
        }
        self.plan.copy_sources.push(source);
        self.plan.copy_targets.push(target);
        self.counters.copied_blocks += 1;
        self.step.pinned.push(vec![source]);
        self.pool.retire(&[source])
    }

    /// Puts a run of the sequence's next tokens into the plan. One that reaches its last token samples the next one.
    fn schedule(&mut self, row: Row, num_tokens: usize) {
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
        let sequence = self.table.get(row);
        if sequence.cache_use.writes() {
            self.step.expect_fill(row, sequence, start, end, self.geometry.block_size);
        }
    }

    // -- the host tier ------------------------------------------------------------------------------------------------

    /// Moves a sequence to the host tier: a block there for each one that is computed, or will be by steps in flight;
    /// one at least.
    fn offload(&mut self, seq_id: i64) -> Answer {
        let row = match self.find_in_pool(seq_id) {
            Ok(row) => row,
            Err(refusal) => return Ok(Err(refusal)),
        };
        let sequence = self.table.get(row);
        let end = self.geometry.num_blocks_for(sequence.num_scheduled).max(1);
        let sources: Vec<&[BlockId]> = sequence.tables.iter().map(|table| table.range(0..end)).collect();
        let counts: Vec<usize> = sources.iter().map(|blocks| blocks.len()).collect();
        let num_copied = counts.iter().sum();
        refuse_if!(self.host.refuse(seq_id, num_copied));
        let blocks = self.host.allocate(num_copied)?;
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
        self.step.pinned.push(blocks);
        Ok(Ok(()))
    }

    /// Brings a sequence back into blocks of the pool: those that the index has, and fresh ones that are copied to.
    fn restore(&mut self, restore: &Restore, reserve: usize) -> Answer {
        let (geometry, seq_id) = (self.geometry, restore.seq_id);
        let Some(row) = self.find(seq_id) else {
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
        refuse_if!(self.refuse_over_budget(seq_id));
        let mut hashes = Vec::new();
        chain_hashes(sequence.root, &sequence.tokens, geometry.block_size, &mut hashes);
        let (cache_use, reserved_tokens) = (sequence.cache_use, sequence.reserved_tokens);
        let hit = self.find_for_restore(sequence, &hashes[..self.num_sharable(num_tokens, cache_use)]);
        let num_scheduled = sequence.num_scheduled.max(hit.num_blocks * geometry.block_size);
        let num_left = self.num_within(num_tokens - num_scheduled, restore.max_compute);
        let ends = geometry.ends_of_tables(num_tokens, num_scheduled + num_left);
        let found = hit.blocks();
        let num_needed = hit.num_missing(&ends);
        let num_guaranteed = geometry.num_to_come(reserved_tokens, &ends);
        let num_parked = self.pool.num_parked(&found);
        refuse_if!(self.room_for(asker.tenant).refuse(seq_id, num_needed + num_guaranteed, num_parked, reserve));
        self.count_found(&hit);
        self.pool.acquire(&found, 1)?;
        let (num_found, firsts) = (hit.num_blocks, hit.tables.iter().map(BlockTable::end).collect::<Vec<_>>());
        let tables = self.allocate_tables(hit.tables, &ends, &asker)?;
        if cache_use.writes() {
            self.enter_admission(&tables[0], num_found, &hashes);
        }
        for (table, first) in tables.iter().zip(&firsts) {
            self.advise_tail(row, table.range(*first..usize::MAX));
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
        self.update_reservation(row);
        self.schedule_within(row, num_left, restore.max_compute);
        Ok(Ok(()))
    }

    /// Returns the blocks that a sequence in the host tier takes from the index. If the longest prefix ends before the
    /// content of the host tier, the blocks of windowed groups all come from there, and so a prefix of the full groups is
    /// enough.
    fn find_for_restore(&self, sequence: &Sequence, hashes: &[Hash]) -> Hit {
        let prefix = Prefix { geometry: self.geometry, index: self.pool.index(), hashes };
        let mut hit = prefix.find_full();
        if !self.geometry.has_windows() {
            return hit;
        }
        let whole = prefix.limit_to_windows(hit.clone());
        if whole.num_blocks * self.geometry.block_size >= sequence.num_scheduled {
            return whole;
        }
        hit.num_blocks = hit.num_blocks.min(sequence.num_scheduled / self.geometry.block_size);
        for (table, (span, known)) in hit.tables.iter_mut().zip(self.geometry.groups.iter().zip(&sequence.tables)) {
            if span.is_full() {
                table.truncate(hit.num_blocks);
            } else {
                *table = BlockTable::new(known.num_passed(), Vec::new());
            }
        }
        hit
    }

    /// Copies the computed blocks that were not found, in each table from an index of `firsts` on, to fresh ones. All host
    /// blocks of the sequence are free when the step has ended.
    fn copy_back(&mut self, row: Row, tables: &[BlockTable], firsts: &[usize]) -> Result<()> {
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
        self.step.pinned_in_host.push(host_blocks);
        Ok(())
    }

    // -- admissions ---------------------------------------------------------------------------------------------------

    fn admit(&mut self, admission: &Admission, owner: Owner, reserve: usize) -> Answer {
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
    fn allocate_tables(&mut self, mut tables: Tables, ends: &[usize], asker: &Asker) -> Result<Tables> {
        for (group, (table, end)) in tables.iter_mut().zip(ends).enumerate() {
            table.extend(self.pool.allocate(end - table.end(), group as Group, asker)?);
        }
        Ok(tables)
    }

    /// Tells the eviction policy the blocks of a sequence's first table, of which so many were found.
    fn enter_admission(&mut self, table: &BlockTable, num_found: usize, hashes: &[Hash]) {
        self.pool.enter_admission(table.range(0..num_found), table.range(num_found..usize::MAX), hashes);
    }

    /// Of these blocks, which are not found, the leading ones with content that was computed before: in each group it was
    /// evicted, or is cached.
    fn num_recomputed(&self, hashes: &[Hash]) -> usize {
        let is_known = |hash: &Hash| self.pool.index().lookup(hash).is_some() || self.pool.losses().was_evicted(hash);
        let was_computed = |hash: &&Hash| self.geometry.groups().all(|(group, _)| is_known(&identity(hash, group)));
        hashes.iter().take_while(was_computed).count()
    }

    fn count_found(&mut self, hit: &Hit) {
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
    fn num_guaranteed(&self, reserved_tokens: usize, ends: &[usize], hit: &Hit, num_published: usize) -> usize {
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

    fn num_newly_at_risk(&self, row: Row, shared: &[BlockTable], end: usize) -> usize {
        let sequence = self.table.get(row);
        self.room_for(sequence.tenant).num_newly_at_risk(sequence, shared, end)
    }

    /// Enters the advice for a sequence's blocks; returns the advice for its later blocks.
    ///
    /// A range gets at least the level of the ranges after it: a chain without its head is useless.
    fn advise(&mut self, retention: &[Retention], tables: &[BlockTable]) -> Option<Advice> {
        let size = self.geometry.block_size;
        let mut end = 0;
        let mut ranges: Vec<(usize, usize, &Retention)> = Vec::with_capacity(retention.len());
        for range in retention {
            let first = end / size;
            end = if range.num_tokens == 0 { usize::MAX } else { end.saturating_add(range.num_tokens) };
            ranges.push((first, end / size, range));
        }
        let mut least = Advice { level: LEAST_WORTH, until: FOREVER };
        let mut tail = None;
        for (first, end, range) in ranges.into_iter().rev() {
            let until = range.ttl.map_or(FOREVER, |ttl| millis(self.now + ttl));
            let own = Advice { level: range.level, until };
            least = if own.level >= least.level { own } else { least };
            self.pool.advise(&tail_first(tables, first..end), least);
            if range.num_tokens == 0 {
                tail = Some(least);
            }
        }
        tail
    }

    /// The longest known prefix, and the number of its blocks in the index; steps in flight fill the rest.
    ///
    /// `hashes` are those of the blocks that may be found.
    fn find_prefix(&mut self, hashes: &[Hash]) -> (Hit, usize) {
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
    fn find_shareable(&mut self, index: usize, hash: &Hash) -> Option<SmallVec<[BlockId; 1]>> {
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
    fn num_sharable(&self, num_tokens: usize, cache_use: CacheUse) -> usize {
        let is_read = cache_use.reads() && !self.geometry.has_recurrent_state;
        if is_read { num_tokens.saturating_sub(1) / self.geometry.block_size } else { 0 }
    }

    /// The block at this index of a group's table that a step in flight of the lease, or this one, fills: the first such
    /// block.
    fn find_filled(&mut self, index: usize, group: Group, hash: &Hash) -> Option<BlockId> {
        let steps = self.lease.in_flight.iter().chain([&self.step]);
        for fill in steps.flat_map(|step| &step.fills).filter(|fill| (fill.first..fill.end).contains(&index)) {
            let sequence = self.table.get_mut(fill.row);
            if sequence.hash_at(index, self.geometry.block_size) == hash {
                return sequence.table(group).get(index);
            }
        }
        None
    }

    fn is_shareable(&self, block: BlockId) -> bool {
        self.pool.state(block) == BlockState::Active || self.pool.index().past(block) == Past::Findable
    }

    fn run_admitted(&mut self, row: Row, max_compute: usize, is_resumed: bool) {
        let sequence = self.table.get(row);
        let (start, num_known) = (sequence.num_scheduled, sequence.num_known());
        self.counters.count_admission(num_known, start, is_resumed);
        self.plan.admitted_ids.push(sequence.seq_id);
        self.plan.admitted_cached_counts.push(start as u32);
        self.schedule_within(row, num_known - start, max_compute);
    }

    /// Of so many tokens, those that may be computed within the plan's budget and a limit (0: no limit).
    fn num_within(&self, num_tokens: usize, max_compute: usize) -> usize {
        let limits = [(max_compute > 0).then_some(max_compute), self.budget];
        limits.into_iter().flatten().fold(num_tokens, usize::min)
    }

    /// Schedules a sequence's next tokens, within the plan's budget and its own limit (0: no limit).
    fn schedule_within(&mut self, row: Row, num_tokens: usize, max_compute: usize) {
        let count = self.num_within(num_tokens, max_compute);
        self.budget = self.budget.map(|budget| budget - count);
        if count > 0 {
            self.schedule(row, count);
        }
    }

    fn enter(&mut self, sequence: Sequence) -> Row {
        sequence.write_to(&mut self.plan);
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
        refuse_no_row(seq_id, self.table, self.geometry)
    }

    fn refuse_over_budget(&self, seq_id: i64) -> Option<Refusal> {
        if self.budget != Some(0) {
            return None;
        }
        let message = format!("the plan's admission_token_budget was used up before sequence {seq_id}");
        Some(Refusal::new(Reason::TokenBudgetSpent, message).with("sequence_id", seq_id))
    }
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

fn sequence_not_found(seq_id: i64) -> Refusal {
    Refusal::new(Reason::SequenceNotFound, format!("the lease holds no sequence {seq_id}")).with("sequence_id", seq_id)
}

fn refuse_position(seq_id: i64, value: i64, least: usize, limit: usize) -> Option<Refusal> {
    if (least as i64..=limit as i64).contains(&value) {
        return None;
    }
    let message = format!("position {value} of sequence {seq_id} must be {least} to {limit}");
    let refusal = Refusal::new(Reason::PositionOutOfRange, message);
    Some(refusal.with("sequence_id", seq_id).with("value", value).with("least", least).with("limit", limit))
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

    // -- the host tier ------------------------------------------------------------------------------------------------

    type Pairs = Vec<(u32, u32)>;

    /// A plan's copies to the host tier, and from there: sources and targets.
    fn copies(plan: &StepPlan) -> (Pairs, Pairs) {
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
        bench.0.reset_prefix_cache(0, 9, 0.0).unwrap();
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
        let num_cached = bench.0.num_cached_tokens(&[1, 2, 3, 4, 9], b"", b"");
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
        assert_eq!((bench.0.violations(), bench.0.num_cached_tokens(&[1, 2, 3, 4, 5], b"", b"")), (vec![], 4));
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
        assert_eq!(shared.iter().map(|block| bench.0.pool().ref_count(*block)).collect::<Vec<_>>(), [1, 1]);
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

    // -- layer groups -------------------------------------------------------------------------------------------------

    #[test]
    fn an_entry_that_a_report_changed_is_not_written_if_it_is_passed() {
        let mut bench = Bench::with_groups(20, &[Span::Full, Span::Sliding(1)]);
        let request = || StepRequest { admissions: vec![admission(1, &[1, 2, 3, 4, 5])], ..StepRequest::default() };
        bench.plan(request());
        bench.plan_for("b", request());
        bench.settle();
        let report = bench.report("b");
        bench.0.settle("b", &report).unwrap();
        let plan = bench.plan_for("b", StepRequest::default());
        assert_eq!((plan.passed_groups, plan.passed_counts), (vec![1], vec![2]));
        assert_eq!((plan.write_groups, plan.write_first_indexes), (vec![], vec![0, 1]), "of the full group alone");
        assert_eq!(plan.write_block_ids, bench.blocks(1)[..2], "those of the other lease");
        assert_eq!(bench.0.violations(), [""; 0]);
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

    // -- retention
    // --------------------------------------------------------------------------------------------------------

    fn range(num_tokens: usize, level: Level, ttl: Option<f64>) -> Retention {
        Retention { num_tokens, level, ttl }
    }

    fn retained(seq_id: i64, tokens: &[i32], retention: Vec<Retention>) -> StepRequest {
        let admission = Admission { retention, ..admission(seq_id, tokens) };
        StepRequest { admissions: vec![admission], ..StepRequest::default() }
    }

    fn levels(bench: &Bench, seq_id: i32) -> Vec<Level> {
        bench.blocks(seq_id).into_iter().map(|block| bench.0.pool().level(block)).collect()
    }

    #[test]
    fn a_block_is_as_much_worth_as_the_range_that_its_last_token_is_in() {
        let mut bench = Bench::new(20);
        bench.plan(retained(1, &[1; 7], vec![range(3, 9, None), range(3, 7, Some(5.0))]));
        assert_eq!(levels(&bench, 1), [9, 7, 7, UNADVISED], "nothing is said of what is behind the ranges");
        bench.plan(retained(2, &[2; 5], vec![range(4, 9, None), range(0, 2, None)]));
        assert_eq!(levels(&bench, 2), [9, 9, 2]);
        bench.settle();
        bench.extend(2, 2, &[3]);
        assert_eq!(levels(&bench, 2), [9, 9, 2, 2], "what it gets later");
        bench.plan(retained(3, &[4; 3], vec![range(3, 8, None)]));
        assert_eq!(levels(&bench, 3), [8, UNADVISED], "half a block may yet be filled with others");
    }

    #[test]
    fn a_range_is_worth_no_less_than_those_behind_it() {
        let mut bench = Bench::new(20);
        bench.plan(retained(
            1,
            &[1; 8],
            vec![range(2, 1, None), range(2, 8, Some(3.0)), range(2, 6, None), range(0, 7, None)],
        ));
        assert_eq!(levels(&bench, 1), [8, 8, 7, 7]);
        bench.0.advance(2.9).unwrap();
        assert_eq!(levels(&bench, 1), [8, 8, 7, 7]);
        bench.0.advance(3.0).unwrap();
        assert_eq!(levels(&bench, 1), [UNADVISED, UNADVISED, 7, 7]);
    }

    #[test]
    fn what_is_said_last_of_found_blocks_stands() {
        let mut bench = Bench::new(20);
        bench.plan(retained(1, &[1; 5], vec![range(0, 9, None)]));
        bench.settle();
        bench.plan(retained(2, &[1; 5], vec![]));
        assert_eq!(levels(&bench, 2)[..2], [9, 9]);
        bench.plan(retained(3, &[1; 5], vec![range(2, 3, None)]));
        assert_eq!(levels(&bench, 1), [3, 9, 9]);
    }

    /// Sequence 1, computed, then released with a hint; levels of its blocks.
    fn hinted(bench: &mut Bench, expected_in: Option<f64>) -> Vec<Level> {
        let blocks = bench.blocks(1);
        let return_hints = vec![ReturnHint { seq_id: 7, expected_in: None }, ReturnHint { seq_id: 1, expected_in }];
        bench.plan(StepRequest { releases: vec![1], return_hints, ..StepRequest::default() });
        bench.settle();
        assert_eq!(bench.0.violations(), [""; 0]);
        blocks.into_iter().map(|block| bench.0.pool().level(block)).collect()
    }

    fn computed(tokens: &[i32], retention: Vec<Retention>) -> Bench {
        let mut bench = Bench::new(20);
        bench.plan(retained(1, tokens, retention));
        bench.settle();
        bench
    }

    #[test]
    fn what_is_expected_back_is_kept_the_sooner_the_more_and_for_twice_the_time() {
        for (seconds, level) in [(0.0, 8), (10.0, 8), (11.0, 7), (60.0, 7), (61.0, 6), (9000.0, 6)] {
            let mut bench = computed(&[1; 5], vec![]);
            assert_eq!(hinted(&mut bench, Some(seconds)), [level, level, UNADVISED], "the tail has no content");
            let until = (2.0 * seconds).clamp(LEAST_EXPECTED_S, MOST_EXPECTED_S);
            bench.0.advance(until - 0.1).unwrap();
            assert_eq!(bench.0.pool().level(1), level);
            bench.0.advance(until).unwrap();
            assert_eq!(bench.0.pool().level(1), UNADVISED);
        }
        let mut bench = computed(&[1; 5], vec![range(2, 9, None)]);
        assert_eq!(hinted(&mut bench, Some(1.0))[..2], [9, 8], "what was said to be worth more stays so");
    }

    #[test]
    fn what_is_not_expected_goes_first_but_for_what_others_used() {
        let mut bench = computed(&[1; 5], vec![]);
        assert_eq!(hinted(&mut bench, None), [LEAST_WORTH, LEAST_WORTH, UNADVISED]);
        let mut bench = computed(&[1; 7], vec![range(4, 7, None)]);
        assert_eq!(hinted(&mut bench, None), [7, 7, LEAST_WORTH, UNADVISED]);
        let mut bench = computed(&[1; 7], vec![]);
        bench.plan(retained(2, &[1, 1, 1, 1, 1], vec![]));
        assert_eq!(hinted(&mut bench, None), [UNADVISED, UNADVISED, LEAST_WORTH, UNADVISED], "others hold them");
        bench.admit(1, &[1; 7]);
        bench.settle();
        bench.release(&[2]);
        bench.settle();
        assert_eq!(hinted(&mut bench, None)[..2], [UNADVISED, UNADVISED], "it found them");
    }

    fn expecting(prompts: Vec<ExpectedPrompt>) -> StepRequest {
        StepRequest { expected_prompts: prompts, ..StepRequest::default() }
    }

    fn expected(tokens: &[i32], expected_in: f64) -> ExpectedPrompt {
        ExpectedPrompt { tokens: tokens.to_vec(), expected_in, ..ExpectedPrompt::default() }
    }

    #[test]
    fn what_a_waiting_prompt_would_find_is_evicted_last_until_it_is_found() {
        let mut bench = Bench::new(8);
        for seq_id in [1, 2, 3] {
            let level = [UNADVISED, UNADVISED, 9][seq_id as usize - 1];
            bench.plan(retained(seq_id, &[seq_id as i32; 4], vec![range(0, level, None)]));
        }
        bench.settle();
        bench.release(&[1, 2, 3]);
        bench.plan(expecting(vec![expected(&[2; 9], 1.0), expected(&[1; 4], 1.0), expected(&[3; 9], 1.0)]));
        bench.settle();
        let cached = |bench: &Bench| [1, 2, 3].map(|token| bench.0.num_cached_tokens(&[token; 9], b"", b""));
        bench.admit(4, &[4; 6]);
        bench.admit(5, &[5; 4]);
        assert_eq!(cached(&bench), [2, 4, 0], "the last token is always computed, so one block of [1; 4] is found");
        bench.admit(6, &[6; 2]);
        assert_eq!(cached(&bench), [0, 4, 0], "the next prompt's blocks go last");
        bench.settle();
        bench.release(&[4, 5, 6]);
        bench.admit(7, &[2; 5]);
        let found = bench.blocks(7);
        assert_eq!(found[..2].iter().map(|block| bench.0.pool().level(*block)).collect::<Vec<_>>(), [UNADVISED; 2]);
        assert_eq!(bench.0.violations(), [""; 0]);
    }

    #[test]
    fn what_several_prompts_wait_for_is_kept_for_the_last_of_them() {
        let mut bench = computed(&[1, 1, 2, 2, 3], vec![]);
        bench.release(&[1]);
        let prompts = vec![expected(&[1, 1, 2, 2, 9], 5.0), expected(&[1, 1, 4], 1.0), expected(&[1, 1, 5], 1.0)];
        bench.plan(expecting(prompts));
        bench.settle();
        let kept = |bench: &Bench| [1, 2].map(|block| bench.0.pool().level(block) == AWAITED);
        assert_eq!(kept(&bench), [true, true]);
        bench.admit(2, &[1, 1, 4]);
        assert_eq!(kept(&bench), [true, true]);
        bench.admit(3, &[1, 1, 2, 2, 9]);
        assert_eq!(kept(&bench), [true, false]);
        bench.0.advance(9.9).unwrap();
        assert_eq!(kept(&bench), [true, false], "as long as the longest");
        bench.admit(4, &[1, 1, 5]);
        assert_eq!(kept(&bench), [false, false]);
        assert_eq!(bench.0.violations(), [""; 0]);
    }

    #[test]
    fn nobody_waits_longer_than_twice_the_expected_time() {
        for seconds in [0.0, 7.0, 9000.0] {
            let mut bench = computed(&[1; 5], vec![]);
            bench.release(&[1]);
            bench.plan(expecting(vec![expected(&[1; 5], seconds)]));
            assert_eq!([1, 2].map(|block| bench.0.pool().level(block)), [AWAITED; 2]);
            let until = (2.0 * seconds).clamp(LEAST_EXPECTED_S, MOST_EXPECTED_S);
            bench.0.advance(until - 0.1).unwrap();
            assert_eq!(bench.0.pool().level(1), AWAITED);
            bench.0.advance(until).unwrap();
            assert_eq!(bench.0.pool().level(1), UNADVISED);
        }
    }

    #[test]
    fn a_waiting_prompt_keeps_what_its_own_tenant_has() {
        let mut bench = computed(&[1; 5], vec![]);
        bench.0.enter_tenant(b"x");
        let of = |tenant: &[u8]| ExpectedPrompt { tenant: Some(tenant.to_vec()), ..expected(&[1; 5], 1.0) };
        let salted = ExpectedPrompt { salt: b"s".to_vec(), ..expected(&[1; 5], 1.0) };
        let nothing = [of(b"x"), of(b"unknown"), salted, expected(&[], 1.0), expected(&[1; 2], 1.0)];
        bench.plan(StepRequest { names_tenants: true, ..expecting(nothing.to_vec()) });
        assert_eq!(levels(&bench, 1), [UNADVISED; 3]);
        for prompt in [of(b""), expected(&[1; 3], 1.0)] {
            bench.plan(expecting(vec![prompt]));
            assert_eq!(bench.0.pool().level(1), AWAITED);
            bench.0.advance(1e6).unwrap();
        }
        bench.plan_for("b", expecting(vec![of(b"x")]));
        bench.0.close_lease("b").unwrap();
        bench.0.open_lease("b", b"x", 30.0);
        bench.plan_for("b", expecting(vec![of(b"")]));
        assert_eq!(levels(&bench, 1), [UNADVISED; 3], "of another tenant than the lease's");
        bench.plan_for("b", StepRequest { names_tenants: true, ..expecting(vec![of(b"")]) });
        assert_eq!(levels(&bench, 1), [AWAITED, AWAITED, UNADVISED]);
    }

    #[test]
    fn advice_decides_who_is_evicted() {
        let mut bench = Bench::new(6);
        bench.plan(retained(1, &[1; 4], vec![range(0, 9, None)]));
        bench.plan(retained(2, &[2; 4], vec![]));
        bench.plan(retained(3, &[3; 4], vec![range(0, 1, None)]));
        bench.settle();
        bench.release(&[3, 2, 1]);
        bench.settle();
        let cached = |bench: &Bench| [1, 2, 3].map(|token| bench.0.num_cached_tokens(&[token; 5], b"", b""));
        bench.admit(4, &[4; 4]);
        assert_eq!(cached(&bench), [4, 4, 0]);
        bench.admit(5, &[5; 4]);
        assert_eq!(cached(&bench), [4, 0, 0]);
    }

    #[test]
    fn who_came_back_does_not_count_as_new() {
        let mut bench = computed(&[1; 5], vec![]);
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
