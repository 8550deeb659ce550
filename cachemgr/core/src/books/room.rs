//! Checks for room: for a tenant, in a pool, beside the blocks promised to others.

use crate::books::geometry::Geometry;
use crate::books::plans::Admission;
use crate::books::sequences::{Row, Sequence, SequenceTable};
use crate::books::tables::BlockTable;
use crate::cache::pool::BlockPool;
use crate::cache::prefix::BlockId;
use crate::cache::tenants::TenantId;
use crate::errors::{Reason, Refusal, invalid};

/// A pool as one tenant finds it.
pub struct Room<'a> {
    pub geometry: &'a Geometry,
    pub pool: &'a BlockPool,
    pub tenant: TenantId,
}

impl Room<'_> {
    /// Refuses an admission with tokens or a reservation that can never be accepted.
    pub fn refuse_impossible(&self, admission: &Admission) -> Option<Refusal> {
        let (seq_id, num_tokens, reserved) = (admission.seq_id, admission.tokens.len(), admission.reserved_tokens);
        if reserved > 0 && reserved < num_tokens {
            let limit = format!("0, or at least the {num_tokens} tokens there are");
            return Some(invalid("admissions.reserved_token_count", reserved, limit).with("sequence_id", seq_id));
        }
        refuse_empty(seq_id, num_tokens)
            .or_else(|| self.refuse_too_long(seq_id, num_tokens.max(reserved), reserved))
            .or_else(|| refuse_foreign_tokens(seq_id, &admission.tokens, self.geometry))
    }

    /// Refuses a sequence longer than it can ever be; `reserved` is its reservation, 0 if it has none.
    pub fn refuse_too_long(&self, seq_id: i64, num_tokens: usize, reserved: usize) -> Option<Refusal> {
        let longest_in = |num_blocks| match reserved {
            0 => self.geometry.max_tokens_in(num_blocks),
            _ => self.geometry.max_reserved_in(num_blocks),
        };
        let of_model = (self.geometry.max_sequence_tokens, "model");
        let of_pool = (longest_in(self.geometry.num_blocks - 1), "pool");
        let of_tenant = (longest_in(self.pool.accounts().most(self.tenant)), "tenant");
        let of_itself = (if reserved > 0 { reserved } else { usize::MAX }, "reservation");
        let (limit, limited_by) =
            [of_model, of_pool, of_tenant, of_itself].into_iter().min_by_key(|(limit, _)| *limit)?;
        if num_tokens <= limit {
            return None;
        }
        let message = format!("sequence {seq_id} would have {num_tokens} tokens; the {limited_by}'s limit is {limit}");
        let refusal = Refusal::new(Reason::SequenceTooLong, message).with("sequence_id", seq_id);
        Some(refusal.with("value", num_tokens).with("limit", limit).with("limited_by", limited_by))
    }

    /// Blocks that the tenant could take, if `num_parked` of the evictable ones are acquired beside.
    pub fn num_available(&self, num_parked: usize) -> usize {
        self.pool.num_available(self.tenant).saturating_sub(num_parked)
    }

    /// Refuses a sequence if there are too few blocks beyond its reservation. Also acquires `num_parked` evictable
    /// blocks; `spared` blocks are left.
    pub fn refuse(&self, seq_id: i64, needed: usize, num_parked: usize, spared: usize) -> Option<Refusal> {
        if needed + num_parked == 0 {
            return None;
        }
        let account = self.pool.accounts().get(self.tenant);
        let (held, limit) = (account.num_charged(), account.share.limit);
        if limit < self.geometry.num_blocks - 1 && held + num_parked + needed > limit {
            let needed = needed + num_parked;
            let message =
                format!("sequence {seq_id} needs {needed} blocks; its tenant holds {held}, and may hold {limit}");
            let refusal = Refusal::new(Reason::QuotaExceeded, message).with("sequence_id", seq_id);
            return Some(refusal.with("needed", needed).with("held", held).with("limit", limit));
        }
        let (needed, available) = (needed + spared, self.num_available(num_parked));
        if needed + num_parked <= self.pool.num_available(self.tenant) {
            return None;
        }
        let retired = self.pool.counts().retired;
        let message =
            format!("sequence {seq_id} needs {needed} blocks; {available} are free or evictable, {retired} retired");
        let refusal = Refusal::new(Reason::OutOfBlocks, message).with("sequence_id", seq_id);
        Some(refusal.with("needed", needed).with("free", available).with("retired", retired))
    }

    /// Blocks that a sequence with a reservation may still need: for the tokens to come, and for those of its blocks
    /// that it can't write but may have to compute again if a step in flight fails.
    pub fn num_reserved_for(&self, sequence: &Sequence) -> usize {
        if sequence.reserved_tokens == 0 || sequence.is_offloaded() {
            return 0;
        }
        let first = sequence.num_computed / self.geometry.block_size;
        let num_most = self.geometry.num_blocks_for(sequence.reserved_tokens);
        let needed_in = |table: &BlockTable| {
            let at_risk = table.range(first..usize::MAX).iter().filter(|block| self.is_at_risk(**block)).count();
            num_most.saturating_sub(table.end()) + at_risk
        };
        sequence.tables.iter().map(needed_in).sum()
    }

    /// True if its holder might have to replace the block before writing it.
    fn is_at_risk(&self, block: BlockId) -> bool {
        !self.pool.is_writable(block) || self.pool.holders().hold_count(block) > 0
    }

    /// Blocks that a trim of a sequence with a reservation puts at risk: computed ones, to be computed again.
    pub fn num_at_risk_after(&self, sequence: &Sequence, num_tokens: usize) -> usize {
        let size = self.geometry.block_size;
        let cut = num_tokens.min(sequence.num_computed) / size..sequence.num_computed / size;
        let at_risk =
            |table: &BlockTable| table.range(cut.clone()).iter().filter(|block| self.is_at_risk(**block)).count();
        sequence.tables.iter().map(at_risk).sum()
    }

    /// Blocks from the first not computed on that others will share from now on, of tables up to an index: those of its
    /// tables that only it holds so far.
    pub fn num_newly_at_risk(&self, sequence: &Sequence, shared: &[BlockTable], end: usize) -> usize {
        if sequence.reserved_tokens == 0 {
            return 0;
        }
        let indexes = sequence.num_computed / self.geometry.block_size..end;
        let newly_at_risk = |(own, shared): (&BlockTable, &BlockTable)| {
            let both =
                shared.entries().filter(|(index, block)| indexes.contains(index) && own.get(*index) == Some(*block));
            both.filter(|(_, block)| !self.is_at_risk(*block)).count()
        };
        sequence.tables.iter().zip(shared).map(newly_at_risk).sum()
    }
}

fn refuse_empty(seq_id: i64, num_tokens: usize) -> Option<Refusal> {
    let message = || format!("sequence {seq_id} has no tokens; at least 1 is needed");
    (num_tokens == 0).then(|| Refusal::new(Reason::EmptyPrompt, message()).with("sequence_id", seq_id))
}

/// Refuses tokens outside of the model's vocabulary.
pub fn refuse_foreign_tokens(seq_id: i64, tokens: &[i32], geometry: &Geometry) -> Option<Refusal> {
    let end = u32::try_from(geometry.vocab_size).unwrap_or(u32::MAX);
    let is_foreign = |token: &i32| *token as u32 >= end; // negative ones are large
    if !tokens.iter().fold(false, |any, token| any | is_foreign(token)) {
        return None; // several at a time, which a search for the first one is not
    }
    let index = tokens.iter().position(is_foreign)?;
    let (value, limit) = (tokens[index], geometry.vocab_size - 1);
    let message = format!("token {value} at index {index} of sequence {seq_id} is not in the vocabulary, 0 to {limit}");
    let refusal = Refusal::new(Reason::TokenOutOfRange, message).with("sequence_id", seq_id);
    Some(refusal.with("index", index).with("value", value).with("limit", limit))
}

/// Updates a sequence's reservation, if it has one.
pub fn update_reservation(row: Row, pool: &mut BlockPool, table: &mut SequenceTable, geometry: &Geometry) {
    let sequence = table.get_mut(row);
    if sequence.reserved_tokens == 0 {
        return;
    }
    let needed = (Room { geometry, pool, tenant: sequence.tenant }).num_reserved_for(sequence);
    pool.reserve(sequence.tenant, sequence.num_reserved, needed);
    sequence.num_reserved = needed;
}

/// The worker keeps no more sequences.
pub fn refuse_no_row(seq_id: i64, table: &SequenceTable, geometry: &Geometry) -> Option<Refusal> {
    let limit = geometry.max_sequences;
    if table.len() < limit {
        return None;
    }
    let message = format!("sequence {seq_id} would be one more than the {limit} the worker has room for");
    Some(Refusal::new(Reason::TooManySequences, message).with("sequence_id", seq_id).with("limit", limit))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::books::plans::{Extend, Fork, GrantedStep, StepRequest, Trim};
    use crate::books::settle::StepOutcome;
    use crate::books::tests::{Bench, admission};
    use crate::cache::accounts::Share;
    use crate::cache::tenants::MAX_TENANTS;

    fn guaranteed(seq_id: i64, tokens: &[i32], reserved_tokens: usize) -> StepRequest {
        let admission = Admission { reserved_tokens, ..admission(seq_id, tokens) };
        StepRequest { admissions: vec![admission], ..StepRequest::default() }
    }

    fn reasons(plan: &GrantedStep) -> Vec<Reason> {
        plan.refusals.iter().map(|refused| refused.refusal.reason).collect()
    }

    fn messages(plan: &GrantedStep) -> Vec<&str> {
        plan.refusals.iter().map(|refused| &*refused.refusal.message).collect()
    }

    fn num_reserved(bench: &Bench) -> usize {
        assert_eq!(bench.0.violations(), [""; 0]);
        bench.0.pool().accounts().num_reserved()
    }

    /// Sequence 1 with three tokens, which may have eight: two of its four blocks are to come. Two more are free.
    fn bench() -> Bench {
        let mut bench = Bench::new(6);
        assert_eq!(reasons(&bench.plan(guaranteed(1, &[1, 2, 3], 8))), []);
        bench
    }

    #[test]
    fn a_sequence_grows_up_to_what_it_said_whatever_others_took() {
        let mut bench = bench();
        assert_eq!(num_reserved(&bench), 2);
        assert_eq!(
            messages(&bench.admit(2, &[4, 5, 6, 7, 8])),
            ["sequence 2 needs 3 blocks; 2 are free or evictable, 0 retired"]
        );
        assert_eq!(reasons(&bench.admit(2, &[4, 5, 6])), []);
        assert_eq!(reasons(&bench.admit(3, &[4])), [Reason::OutOfBlocks]);
        bench.settle();
        for num_tokens in 4..=8 {
            assert_eq!(reasons(&bench.extend(1, 1, &[])), [], "token {num_tokens}");
            bench.settle();
        }
        assert_eq!((num_reserved(&bench), bench.0.pool().num_allocatable()), (0, 0));
        assert_eq!(
            messages(&bench.extend(1, 1, &[])),
            ["sequence 1 would have 9 tokens; the reservation's limit is 8"]
        );
    }

    #[test]
    fn what_is_used_of_a_reservation_is_not_reserved_any_more_in_the_same_plan() {
        let mut bench = bench();
        bench.settle();
        let extends = vec![Extend { seq_id: 1, num_tokens: 2, append: vec![7], ..Extend::default() }];
        let admissions = vec![admission(2, &[4, 5, 6])];
        let plan = bench.plan(StepRequest { extends, admissions, ..StepRequest::default() });
        assert_eq!((reasons(&plan), num_reserved(&bench)), (vec![], 1));
    }

    #[test]
    fn a_reservation_comes_back_with_the_sequence_and_with_the_lease() {
        let mut bench = bench();
        bench.release(&[1]);
        assert_eq!(num_reserved(&bench), 0);
        bench.plan(guaranteed(2, &[1], 8));
        assert_eq!(num_reserved(&bench), 3);
        bench.0.close_lease("a").unwrap();
        assert_eq!((num_reserved(&bench), bench.0.pool().num_allocatable()), (0, 6));
    }

    #[test]
    fn a_reservation_that_can_not_be_kept_is_refused_now_or_for_ever() {
        let mut bench = bench();
        assert_eq!(
            messages(&bench.plan(guaranteed(2, &[4], 6))),
            ["sequence 2 needs 3 blocks; 2 are free or evictable, 0 retired"]
        );
        assert_eq!(
            messages(&bench.plan(guaranteed(2, &[4], 13))),
            ["sequence 2 would have 13 tokens; the pool's limit is 12"]
        );
        let refused = bench.plan(guaranteed(2, &[4, 5, 6], 2));
        assert_eq!(
            messages(&refused),
            ["admissions.reserved_token_count is 2; must be 0, or at least the 3 tokens there are"]
        );
        assert_eq!(num_reserved(&bench), 2);
    }

    #[test]
    fn who_forks_a_guaranteed_sequence_leaves_it_the_copy_it_needs() {
        let mut bench = bench();
        bench.settle();
        assert_eq!(reasons(&bench.fork(1, &[2], 3)), []);
        assert_eq!((num_reserved(&bench), bench.sequence(2).reserved_tokens), (3, 0));
        assert_eq!(reasons(&bench.admit(3, &[4, 5])), []);
        assert_eq!(reasons(&bench.fork(1, &[4], 3)), [], "it needs one copy however many share");
        assert_eq!(reasons(&bench.extend(1, 1, &[])), []);
        bench.settle();
        assert_eq!(num_reserved(&bench), 2);
        let mut full = bench_with_no_room_left();
        assert_eq!(reasons(&full.fork(1, &[2], 3)), [Reason::OutOfBlocks]);
    }

    /// As `bench`, with all blocks taken that it does not need.
    fn bench_with_no_room_left() -> Bench {
        let mut bench = bench();
        assert_eq!(reasons(&bench.admit(9, &[20, 21, 22])), []);
        bench.settle();
        bench
    }

    /// A later step shares blocks that an earlier one is to fill; if it fails, all of them are computed again.
    #[test]
    fn a_step_that_fails_takes_nothing_from_a_guarantee() {
        let mut bench = bench();
        let plan = bench.plan(StepRequest { admissions: vec![admission(2, &[1, 2, 5])], ..StepRequest::default() });
        assert_eq!((reasons(&plan), bench.blocks(2)[0], num_reserved(&bench)), (vec![], bench.blocks(1)[0], 3));
        assert_eq!(reasons(&bench.admit(3, &[9])), [Reason::OutOfBlocks]);
        while !bench.0.leases["a"].in_flight.is_empty() {
            let mut report = bench.report("a");
            report.outcome = StepOutcome::Failed;
            bench.0.settle("a", &report).unwrap();
        }
        assert_eq!(reasons(&bench.extend(1, 3, &[])), []);
        bench.settle();
        assert_eq!(num_reserved(&bench), 2);
        let mut full = bench_with_no_room_left_and_nothing_computed();
        assert_eq!(reasons(&full.admit(2, &[1, 2, 5])), [Reason::OutOfBlocks], "one to hold and one to be there");
    }

    /// Sequence 1 is not computed yet; one block is free beyond what it needs.
    fn bench_with_no_room_left_and_nothing_computed() -> Bench {
        let mut bench = bench();
        assert_eq!(reasons(&bench.admit(9, &[20])), []);
        bench
    }

    #[test]
    fn a_guaranteed_sequence_shares_what_is_not_computed_only_if_it_could_compute_it_alone() {
        let mut bench = Bench::new(5);
        bench.admit(1, &[1, 2, 3]);
        assert_eq!(
            reasons(&bench.plan(guaranteed(2, &[1, 2, 3, 4], 8))),
            [Reason::OutOfBlocks],
            "4 at the worst, 3 are there"
        );
        assert_eq!(reasons(&bench.plan(guaranteed(2, &[1, 2, 3, 4], 6))), []);
        assert_eq!(num_reserved(&bench), 2);
    }

    #[test]
    fn a_trimmed_sequence_keeps_its_blocks_and_gets_those_that_it_can_not_write() {
        let mut bench = bench();
        bench.extend(1, 2, &[4]);
        bench.settle();
        let blocks = bench.blocks(1);
        bench.trim(1, 1);
        assert_eq!((bench.blocks(1), num_reserved(&bench)), (blocks, 1 + 2), "one to come, two are published");
        bench.settle();
        assert_eq!(reasons(&bench.extend(1, 7, &[9; 7])), []);
        bench.settle();
        let mut full = bench_with_no_room_left();
        full.extend(1, 1, &[]);
        full.settle();
        let trims = vec![Trim { seq_id: 1, num_tokens: 1 }];
        assert_eq!(reasons(&full.plan(StepRequest { trims, ..StepRequest::default() })), [Reason::OutOfBlocks]);
        assert_eq!(full.tokens(1).len(), 5);
    }

    /// Of two blocks with the same tokens the one published first is kept, unless that takes a promised block.
    #[test]
    fn a_duplicate_is_kept_if_the_other_one_is_the_last_to_be_had() {
        for reserved_tokens in [10, 8] {
            let mut bench = Bench::new(6);
            bench.plan(StepRequest { admissions: vec![admission(1, &[1, 2])], ..StepRequest::default() });
            bench.plan_for("b", guaranteed(1, &[1, 2, 3], reserved_tokens));
            bench.settle();
            bench.release(&[1]);
            bench.settle();
            let report = bench.report("b");
            bench.0.settle("b", &report).unwrap();
            assert_eq!((num_reserved(&bench), bench.0.pool().num_allocatable()), (reserved_tokens / 2 - 2, 4));
        }
    }

    /// A released sequence shared a block, and its step is still to publish it.
    #[test]
    fn a_block_that_a_step_in_flight_may_publish_is_not_counted_on() {
        let mut bench = Bench::new(8);
        let mut first = guaranteed(1, &[1, 2, 3, 4, 5], 8);
        first.admissions.push(admission(2, &[1, 2, 3, 4, 9]));
        assert_eq!(reasons(&bench.plan(first)), []);
        let before = num_reserved(&bench);
        let (trims, releases) = (vec![Trim { seq_id: 1, num_tokens: 1 }], vec![2]);
        bench.plan(StepRequest { trims, releases, ..StepRequest::default() });
        assert_eq!(num_reserved(&bench), before, "its blocks are its own now, and may be published all the same");
        bench.settle();
        assert_eq!(num_reserved(&bench), before);
    }

    #[test]
    fn a_block_behind_one_that_is_being_filled_is_counted_on_as_little_as_that_one() {
        let mut bench = Bench::new(9);
        bench.admit(1, &[1, 2, 3, 4, 5]);
        bench.settle();
        assert_eq!(bench.0.reset_prefix_cache(1, 2, 0.0, b"").unwrap(), 1);
        bench.admit(2, &[1, 2, 3, 4, 5]);
        assert_eq!(
            messages(&bench.plan(guaranteed(3, &[1, 2, 3, 4, 6], 8))),
            ["sequence 3 needs 4 blocks; 3 are free or evictable, 0 retired"]
        );
        assert_eq!(num_reserved(&bench), 0);
        assert_eq!(reasons(&bench.plan(guaranteed(3, &[1, 2, 3, 4, 6], 6))), []);
        assert_eq!((bench.blocks(3), num_reserved(&bench)), (vec![4, 2, 7], 2));
    }

    #[test]
    fn a_reservation_ends_within_a_block() {
        let mut bench = Bench::new(6);
        assert_eq!(reasons(&bench.plan(guaranteed(1, &[1, 2], 5))), []);
        bench.settle();
        for num_tokens in 3..=5 {
            assert_eq!(reasons(&bench.extend(1, 1, &[])), [], "token {num_tokens}");
            bench.settle();
        }
        let refused = ["sequence 1 would have 6 tokens; the reservation's limit is 5"];
        assert_eq!(messages(&bench.extend(1, 1, &[])), refused);
        bench.offload(1);
        bench.settle();
        assert_eq!(messages(&bench.restore(1)), refused, "the token that was sampled last is not computed");
        assert_eq!((bench.tokens(1).len(), num_reserved(&bench)), (6, 0));
    }

    #[test]
    fn a_prompt_as_long_as_its_reservation_is_computed_and_no_more() {
        let mut bench = Bench::new(6);
        assert_eq!(reasons(&bench.plan(guaranteed(1, &[1, 2, 3], 3))), []);
        assert_eq!(
            messages(&bench.extend(1, 1, &[])),
            ["sequence 1 would have 4 tokens; the reservation's limit is 3"]
        );
        assert_eq!(num_reserved(&bench), 0);
    }

    // -- tenants ------------------------------------------------------------------------------------------------------

    /// Leases "a" and "b" of tenant "", "c" of tenant "t".
    fn shared(num_usable: usize, of_a: Share, of_t: Share) -> Bench {
        let mut bench = Bench::new(num_usable);
        bench.0.open_lease("c", b"t", 30.0);
        bench.0.set_shares(of_a, BTreeMap::from([(b"t".to_vec(), of_t)]));
        bench
    }

    /// Plans a step, which is computed at once.
    fn plan_for(bench: &mut Bench, lease_id: &str, request: StepRequest) -> GrantedStep {
        let plan = bench.plan_at(lease_id, &request, 0.0);
        let report = bench.report(lease_id);
        bench.0.settle(lease_id, &report).unwrap();
        plan
    }

    fn share(floor: usize, quota: usize, limit: usize) -> Share {
        Share { floor, quota, limit, pin_budget: 0, keep_limit: 0 }
    }

    #[test]
    fn a_tenant_never_holds_more_than_its_limit() {
        let mut bench = shared(8, share(0, 8, 8), share(0, 3, 3));
        let ask = |seq_id, tokens: &[i32]| StepRequest {
            admissions: vec![admission(seq_id, tokens)],
            ..StepRequest::default()
        };
        assert_eq!(reasons(&plan_for(&mut bench, "c", ask(1, &[1, 2, 3]))), []);
        let plan = plan_for(&mut bench, "c", ask(2, &[4, 5, 6]));
        assert_eq!(messages(&plan), ["sequence 2 needs 2 blocks; its tenant holds 2, and may hold 3"]);
        let plan = plan_for(&mut bench, "c", ask(2, &[4, 5, 6, 7, 8, 9, 10]));
        assert_eq!(messages(&plan), ["sequence 2 would have 7 tokens; the tenant's limit is 6"]);
        assert_eq!(reasons(&plan_for(&mut bench, "c", guaranteed(2, &[4], 4))), [Reason::QuotaExceeded]);
        assert_eq!(reasons(&bench.admit(2, &[4, 5, 6, 7, 8, 9, 10])), []);
    }

    #[test]
    fn found_blocks_that_nobody_holds_count_against_the_limit() {
        let mut bench = shared(8, share(0, 8, 8), share(0, 8, 8));
        let ask = |seq_id, tokens: &[i32]| StepRequest {
            admissions: vec![admission(seq_id, tokens)],
            ..StepRequest::default()
        };
        plan_for(&mut bench, "c", ask(1, &[1, 2, 3, 4]));
        plan_for(&mut bench, "c", StepRequest { releases: vec![1], ..StepRequest::default() });
        bench.0.set_shares(share(0, 8, 8), BTreeMap::from([(b"t".to_vec(), share(0, 2, 2))]));
        assert_eq!(reasons(&plan_for(&mut bench, "c", ask(2, &[1, 2, 3, 4]))), []);
        assert_eq!(reasons(&plan_for(&mut bench, "c", ask(3, &[7]))), [Reason::QuotaExceeded]);
        plan_for(&mut bench, "c", StepRequest { releases: vec![2], ..StepRequest::default() });
        plan_for(&mut bench, "c", ask(3, &[7]));
        let plan = plan_for(&mut bench, "c", ask(2, &[1, 2, 3]));
        assert_eq!(messages(&plan), ["sequence 2 needs 2 blocks; its tenant holds 1, and may hold 2"]);
    }

    #[test]
    fn a_floor_is_there_for_its_tenant_alone() {
        let mut bench = shared(6, share(0, 6, 6), share(3, 6, 6));
        let ask = |seq_id, tokens: &[i32]| StepRequest {
            admissions: vec![admission(seq_id, tokens)],
            ..StepRequest::default()
        };
        assert_eq!(messages(&bench.admit(1, &[1; 7])), ["sequence 1 would have 7 tokens; the tenant's limit is 6"]);
        assert_eq!(reasons(&bench.admit(1, &[1, 2, 3])), []);
        assert_eq!(
            messages(&bench.admit(2, &[4, 5, 6])),
            ["sequence 2 needs 2 blocks; 1 are free or evictable, 0 retired"]
        );
        assert_eq!(reasons(&plan_for(&mut bench, "c", ask(1, &[1, 2, 3, 4, 5]))), []);
        assert_eq!(reasons(&bench.admit(2, &[4])), []);
        assert_eq!(bench.0.violations(), [""; 0]);
    }

    // -- tenants of one lease -----------------------------------------------------------------------------------------

    fn of(tenant: &[u8], admission: Admission) -> Admission {
        Admission { tenant: Some(tenant.to_vec()), ..admission }
    }

    /// A plan of a caller that may name tenants.
    fn naming(admissions: Vec<Admission>) -> StepRequest {
        StepRequest { admissions, names_tenants: true, ..StepRequest::default() }
    }

    /// Blocks that a tenant holds, and blocks that are reserved for its sequences.
    fn charged(bench: &Bench, tenant: &[u8]) -> (usize, usize) {
        let account = bench.0.pool().accounts().get(bench.0.tenants().find(tenant).unwrap());
        (account.num_held, account.num_reserved)
    }

    #[test]
    fn two_tenants_with_equal_prompts_share_no_block_and_each_is_charged_for_its_own() {
        let mut bench = Bench::new(12);
        let tokens = [1, 2, 3, 4, 5];
        let guaranteed = |seq_id| Admission { reserved_tokens: 8, ..admission(seq_id, &tokens) };
        let both = vec![of(b"t", guaranteed(1)), of(b"u", guaranteed(2)), of(b"t", admission(3, &tokens))];
        assert_eq!(reasons(&bench.plan(naming(both))), []);
        assert!(bench.blocks(1).iter().all(|block| !bench.blocks(2).contains(block)));
        assert_eq!(bench.blocks(1)[..2], bench.blocks(3)[..2], "one tenant's are shared");
        assert_eq!((charged(&bench, b"t").0, charged(&bench, b"u").0, charged(&bench, b"").0), (4, 3, 0));
        bench.settle();
        assert_eq!((charged(&bench, b"t").1, charged(&bench, b"u").1), (1, 1));
        bench.fork(2, &[4], 5);
        let tenant_of_fork = bench.sequence(4).tenant;
        assert_eq!(bench.0.tenants().name(tenant_of_fork), b"u");
        assert_eq!((charged(&bench, b"u"), reasons(&bench.extend(4, 1, &[]))), ((3, 2), vec![]));
        bench.settle();
        assert_eq!(charged(&bench, b"u"), (4, 1), "the copy is charged to the tenant of the fork");
        bench.release(&[2, 4]);
        assert_eq!((charged(&bench, b"u"), charged(&bench, b"t")), ((0, 0), (4, 1)));
        bench.0.close_lease("a").unwrap();
        assert_eq!((charged(&bench, b"t"), bench.0.violations()), ((0, 0), vec![]));
    }

    #[test]
    fn a_tenant_over_its_limit_is_refused_and_the_others_of_the_plan_are_not() {
        let mut bench = Bench::new(8);
        bench.0.set_shares(share(0, 8, 8), BTreeMap::from([(b"t".to_vec(), share(0, 2, 2))]));
        let admissions = vec![
            of(b"t", admission(1, &[1, 2])),
            of(b"t", admission(2, &[3, 4, 5])),
            of(b"u", admission(3, &[3, 4, 5])),
        ];
        let plan = bench.plan(naming(admissions));
        assert_eq!(messages(&plan), ["sequence 2 needs 2 blocks; its tenant holds 1, and may hold 2"]);
        assert_eq!(plan.admitted_ids, [1, 3]);
        bench.settle();
        let extends = |seq_id| Extend { seq_id, num_tokens: 3, append: vec![7, 7], ..Extend::default() };
        let plan = bench.plan(StepRequest { extends: vec![extends(3)], ..StepRequest::default() });
        assert_eq!(reasons(&plan), []);
        bench.settle();
        let plan = bench.plan(StepRequest { extends: vec![extends(1), extends(3)], ..StepRequest::default() });
        assert_eq!((plan.refusals.len(), plan.refusals[0].seq_id), (1, 1));
        assert_eq!(plan.run_seq_ids, [3]);
    }

    #[test]
    fn a_floor_is_kept_for_its_tenant_in_the_lease_of_another() {
        let mut bench = Bench::new(6);
        bench.0.set_shares(share(0, 6, 6), BTreeMap::from([(b"t".to_vec(), share(3, 6, 6))]));
        let full = vec![admission(1, &[1; 6]), admission(2, &[2]), of(b"t", admission(3, &[2; 5]))];
        assert_eq!(reasons(&bench.plan(naming(full))), [Reason::OutOfBlocks]);
        assert_eq!((bench.0.lease("a").unwrap().sequences.len(), bench.0.violations()), (2, vec![]));
    }

    #[test]
    fn another_tenant_is_named_by_those_who_may() {
        let mut bench = Bench::new(8);
        let asked = vec![of(b"", admission(1, &[1])), of(b"t", admission(2, &[1])), admission(3, &[1])];
        let plan = bench.plan(StepRequest { names_tenants: false, ..naming(asked.clone()) });
        assert_eq!(messages(&plan), ["sequence 2 names a tenant; '' has none of the roles that this needs: gateway"]);
        assert_eq!((plan.admitted_ids, bench.0.tenants().find(b"t")), (vec![1, 3], None), "nobody is entered");
        bench.plan(naming(vec![of(b"t", admission(2, &[1]))]));
        let listed = |tenant| bench.0.listing().sequences_from("a", 0, 9, tenant).len();
        assert_eq!([None, Some(&b""[..]), Some(b"t"), Some(b"u")].map(listed), [3, 2, 1, 0]);
    }

    #[test]
    fn a_pool_knows_so_many_tenants_and_no_more() {
        let mut bench = Bench::new(8);
        for number in 1..MAX_TENANTS {
            bench.0.enter_tenant(number.to_string().as_bytes());
        }
        let asked = vec![of(b"one more", admission(1, &[1])), of(b"7", admission(2, &[1])), admission(3, &[1])];
        let plan = bench.plan(naming(asked));
        assert_eq!(
            messages(&plan),
            [
                "admissions.tenant is 'one more'; must be one of the 10000 tenants that the pool knows: there is no place for more"
            ]
        );
        assert_eq!((plan.admitted_ids, bench.0.tenants().len()), (vec![2, 3], MAX_TENANTS));
    }

    #[test]
    fn a_sequence_in_the_host_tier_comes_back_to_its_tenant_and_a_reset_of_it_knows_it() {
        let mut bench = Bench::new(8);
        bench.plan(naming(vec![of(b"t", admission(1, &[1, 2, 3, 4, 5])), admission(2, &[1, 2, 3, 4, 5])]));
        bench.settle();
        bench.offload(1);
        bench.offload(2);
        bench.settle();
        bench.0.withhold_for(b"t", None);
        assert_eq!((bench.sequence(1).num_withheld, bench.sequence(2).num_withheld), (2, 0));
        bench.restore(1);
        assert_eq!(charged(&bench, b"t").0, bench.blocks(1).len());
        assert_eq!(bench.0.violations(), [""; 0]);
    }

    // -- dry runs -----------------------------------------------------------------------------------------------------

    #[test]
    fn a_dry_run_says_what_an_admission_would_be_told() {
        let mut bench = bench();
        bench.settle();
        for (tokens, reserved_tokens) in [
            (vec![1, 2, 3, 4], 0),
            (vec![4; 5], 0),
            (vec![1, 2, 9], 6),
            (vec![1, 2, 9], 8),
            (vec![], 0),
            (vec![1; 13], 0),
            (vec![100], 0),
        ] {
            let admission = Admission { reserved_tokens, ..admission(7, &tokens) };
            let before = bench.0.state(None);
            let check = bench.0.check_admission(b"", &admission, 0);
            assert_eq!(bench.0.state(None), before);
            let plan = bench.plan(StepRequest { admissions: vec![admission], ..StepRequest::default() });
            let refusal = check.refusal.map(|refusal| (refusal.reason, refusal.message));
            let told = plan.refusals.first().map(|refused| (refused.refusal.reason, refused.refusal.message.clone()));
            assert_eq!(refusal, told, "{tokens:?}");
            assert_eq!(
                plan.admitted_cached_counts.first().map_or(check.num_cached_tokens, |count| *count as usize),
                check.num_cached_tokens
            );
            bench.release(&[7]);
            bench.settle();
        }
        let check = bench.0.check_admission(b"", &admission(7, &[1, 2, 3, 4]), 1);
        assert_eq!((check.num_cached_tokens, check.needed, check.available, check.refusal.is_none()), (2, 1, 2, true));
        assert!(bench.0.check_admission(b"", &admission(7, &[1, 2, 3, 4]), 2).refusal.is_some());
        let forks = vec![Fork { parent_id: 1, child_ids: (10..25).collect(), num_tokens: 1 }];
        bench.plan(StepRequest { forks, ..StepRequest::default() });
        let refusal = bench.0.check_admission(b"", &admission(7, &[1]), 0).refusal.unwrap();
        assert_eq!(refusal.reason, Reason::TooManySequences);
    }
}
