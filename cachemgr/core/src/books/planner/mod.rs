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

/// Ends a function with a refusal, if there is one.
macro_rules! refuse_if {
    ($refusal:expr) => {
        if let Some(refusal) = $refusal {
            return Ok(Err(refusal));
        }
    };
}

mod admit;
mod advise;
mod budget;
mod extend;
mod finder;
mod fork;
mod host_tier;
pub(crate) mod keep;
mod misses;
mod release;
mod windows;

use std::collections::HashMap;

use crate::books::counters::Counters;
use crate::books::geometry::Geometry;
use crate::books::lease::Lease;
use crate::books::planner::budget::Budget;
use crate::books::planner::windows::{pass_windows, write_changed_entries};
use crate::books::plans::{GrantedStep, HostCopyUse, PlanItem, ReturnHint, StepRequest};
use crate::books::room::{Room, refuse_no_row};
use crate::books::sequences::{Row, Sequence, SequenceTable};
use crate::books::steps::{Fill, StepInFlight};
use crate::cache::disk::DiskTier;
use crate::cache::pool::BlockPool;
use crate::cache::tenants::{Asker, TenantId, Tenants};
use crate::cache::tier::TierPool;
use crate::errors::{Reason, Refusal, Result, invalid};

/// The limit of blocks that all admissions of a plan together look up by hashes under other roots: about 0.2 ms.
const MAX_HASHED_IN_PLAN: usize = 1_024;

const DIGEST_BYTES: usize = 16;
const MAX_SEQUENCE_ID: i64 = i32::MAX as i64;

/// Outer `Err`: broken invariant. Inner `Err`: the item was refused.
type Answer = Result<std::result::Result<(), Refusal>>;

/// The tenant of an admission, or the reason why it can't be that one.
pub type Owner = std::result::Result<TenantId, Refusal>;

/// One plan in the making. `run` it once.
pub struct StepPlanner<'a> {
    lease: &'a mut Lease,
    pool: &'a mut BlockPool,
    host: &'a mut TierPool,
    disk: &'a mut DiskTier,
    table: &'a mut SequenceTable,
    geometry: &'a Geometry,
    tenants: &'a Tenants,
    counters: &'a mut Counters,
    lease_name: [u8; 8],
    now: f64,
    step: StepInFlight,
    plan: GrantedStep,
    budget: Budget,
    host_copy_use: HostCopyUse,
    skips_disk: bool,
    /// Blocks that steps in flight of other leases fill, if an admission asks for it.
    fills_elsewhere: Vec<Fill>,
    /// Blocks that explanations may still look up.
    num_explained: usize,
}

impl<'a> StepPlanner<'a> {
    pub fn new(
        lease: &'a mut Lease,
        pool: &'a mut BlockPool,
        host: &'a mut TierPool,
        disk: &'a mut DiskTier,
        table: &'a mut SequenceTable,
        geometry: &'a Geometry,
        tenants: &'a Tenants,
        counters: &'a mut Counters,
        lease_name: [u8; 8],
        now: f64,
    ) -> StepPlanner<'a> {
        let budget = Budget::new(0);
        let step = StepInFlight { step_number: lease.next_step, ..StepInFlight::default() };
        let plan = GrantedStep { step_number: lease.next_step, known_step: lease.known_step, ..GrantedStep::default() };
        StepPlanner {
            lease,
            pool,
            host,
            disk,
            table,
            geometry,
            tenants,
            counters,
            lease_name,
            now,
            step,
            plan,
            budget,
            host_copy_use: HostCopyUse::default(),
            skips_disk: false,
            fills_elsewhere: Vec::new(),
            num_explained: MAX_HASHED_IN_PLAN,
        }
    }

    /// The same planner, which knows what steps in flight of other leases fill.
    pub fn knowing(self, fills_elsewhere: Vec<Fill>) -> StepPlanner<'a> {
        StepPlanner { fills_elsewhere, ..self }
    }

    /// Applies the request and puts the step in flight. `owners`: the owners of its admissions.
    pub fn run(mut self, request: &StepRequest, owners: Vec<Owner>) -> Result<GrantedStep> {
        self.host_copy_use = request.host_copy_use;
        self.skips_disk = request.skips_disk;
        let hints: HashMap<i64, &ReturnHint> = request.return_hints.iter().map(|hint| (hint.seq_id, hint)).collect();
        for seq_id in &request.releases {
            self.release(*seq_id, hints.get(seq_id).copied())?;
        }
        for seq_id in &request.offloads {
            let answer = self.offload(*seq_id)?;
            self.plan.answer(PlanItem::Offload, *seq_id, answer);
        }
        pass_windows(self.lease, self.table, self.pool, self.geometry, &mut self.plan)?;
        write_changed_entries(self.lease, self.table, &mut self.plan);
        // The blocks of the last one are parked first, and so evicted first.
        for prompt in request.expected_prompts.iter().rev() {
            self.expect_prompt(prompt, request.names_tenants);
        }
        for trim in &request.trims {
            let answer = self.trim(trim)?;
            self.plan.answer(PlanItem::Trim, trim.seq_id, answer);
        }
        for fork in &request.forks {
            self.fork(fork)?;
        }
        self.extend_all(&request.extends)?;
        self.budget = Budget::new(request.admission_token_budget);
        for restore in &request.restores {
            let answer = self.restore(restore, request.admission_reserve)?;
            self.plan.answer(PlanItem::Restore, restore.seq_id, answer);
        }
        for (index, (admission, owner)) in request.admissions.iter().zip(owners).enumerate() {
            let answer = self.admit(admission, owner, request.admission_reserve, request.hashes.get(index))?;
            self.plan.answer(PlanItem::Admission, admission.seq_id, answer);
        }
        self.keep_evicted();
        if !self.lease.reserved.is_empty() {
            self.lease.update_reservations(self.pool, self.table, self.geometry);
        }
        if !self.plan.run_draft_counts.is_empty() {
            self.plan.run_draft_counts.resize(self.plan.run_seq_ids.len(), 0);
        }
        self.lease.next_step += 1;
        self.lease.in_flight.push_back(self.step);
        self.plan.counts = self.pool.counts();
        self.plan.host_counts = (self.host.len() > 0).then(|| self.host.counts());
        Ok(self.plan)
    }

    fn room_for(&self, tenant: TenantId) -> Room<'_> {
        Room { geometry: self.geometry, pool: self.pool, tenant }
    }

    fn asker_for(&self, tenant: TenantId) -> Asker {
        Asker { tenant, lease: self.lease_name, now: self.now }
    }

    fn enter(&mut self, sequence: Sequence) -> Row {
        sequence.write_to(&mut self.plan);
        let seq_id = sequence.seq_id;
        let row = self.table.enter(sequence);
        self.lease.sequences.insert(seq_id, row);
        row
    }
}

/// The row of a sequence in the pool that a plan may change. Refused if there is none, if it is in the host tier, or if
/// drafts of it are in flight.
fn find_in_pool(seq_id: i64, lease: &Lease, table: &SequenceTable) -> std::result::Result<Row, Refusal> {
    let row = lease.row_of(seq_id).ok_or_else(|| sequence_not_found(seq_id))?;
    let sequence = table.get(row);
    let (reason, message) = if sequence.is_offloaded() {
        (Reason::SequenceOffloaded, format!("sequence {seq_id} is in the host tier"))
    } else if sequence.num_drafts > 0 {
        (Reason::SequenceBusy, format!("drafts of sequence {seq_id} are in flight"))
    } else {
        return Ok(row);
    };
    Err(Refusal::new(reason, message).with("sequence_id", seq_id))
}

fn refuse_new(seq_id: i64, lease: &Lease, table: &SequenceTable, geometry: &Geometry) -> Option<Refusal> {
    if !(0..=MAX_SEQUENCE_ID).contains(&seq_id) {
        return Some(invalid("sequence_id", seq_id, format!("0 to {MAX_SEQUENCE_ID}")));
    }
    if lease.row_of(seq_id).is_some() {
        let message = format!("the lease holds a sequence {seq_id} already");
        return Some(Refusal::new(Reason::SequenceExists, message).with("sequence_id", seq_id));
    }
    refuse_no_row(seq_id, table, geometry)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::books::plans::{Extend, Fork, Trim};
    use crate::books::tests::{Bench, admission};

    pub(super) fn reasons(plan: &GrantedStep) -> Vec<(PlanItem, i64, Reason)> {
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
            extends: vec![Extend { seq_id: 3, num_tokens: 1, append: vec![], ..Extend::default() }],
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
        let refusal = |plan: GrantedStep| {
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
}
