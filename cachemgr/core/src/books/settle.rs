//! Enters the worker's report of a step.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use crate::books::counters::Counters;
use crate::books::geometry::Geometry;
use crate::books::lease::Lease;
use crate::books::sequences::{Row, SequenceTable};
use crate::books::steps::{Run, StepInFlight};
use crate::books::{Books, finish};
use crate::cache::groups::Group;
use crate::cache::pool::BlockPool;
use crate::cache::prefix::{BlockId, Origin};
use crate::errors::{Failure, Refusal, Result, invalid};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum StepOutcome {
    Computed,
    Failed,
    Skipped,
}

/// A step as the worker reports it. Lists named alike belong together by index.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct StepReport {
    pub step_number: u64,
    pub outcome: StepOutcome,
    /// The plan's runs in their order.
    pub seq_ids: Vec<i32>,
    /// Tokens with valid KV.
    pub token_counts: Vec<i32>,
    pub sampled_ids: Vec<i32>,
    /// Sequence by sequence.
    pub sampled_tokens: Vec<i32>,
    /// Tokens of each sequence; their sum is the number of sampled_tokens. Empty: 1 of each.
    pub sampled_counts: Vec<i32>,
    /// 0: of no report.
    pub report_number: u64,
}

impl StepReport {
    /// The sequences with sampled tokens, and their tokens.
    fn sampled(&self) -> impl Iterator<Item = (i32, &[i32])> {
        let counts = self.sampled_counts.iter().map(|count| *count as usize).chain(std::iter::repeat(1));
        let mut rest = &self.sampled_tokens[..];
        self.sampled_ids.iter().zip(counts).map(move |(seq_id, count)| {
            let (tokens, others) = rest.split_at(count);
            rest = others;
            (*seq_id, tokens)
        })
    }
}

impl Books {
    /// Enters the worker's report of a step.
    ///
    /// A step that is settled already, or of a lease that has ended, has no effect. Refused (INVALID_ARGUMENT) if the
    /// report does not fit the plan.
    pub fn settle(&mut self, lease_id: &str, report: &StepReport) -> Result<()> {
        self.enter_report(lease_id, report)?;
        self.last_report = self.last_report.max(report.report_number);
        Ok(())
    }

    fn enter_report(&mut self, lease_id: &str, report: &StepReport) -> Result<()> {
        let Some(lease) = self.leases.get_mut(lease_id) else {
            return Ok(());
        };
        let Books { pool, host, disk, table, geometry, counters, .. } = self;
        let settlement = Settlement { lease: &mut *lease, pool, table, geometry, counters };
        let Some(step) = settlement.enter(report)? else {
            return Ok(());
        };
        finish(&step, pool, host, disk, table)?;
        disk.write_behind(host, pool.accounts());
        lease.update_reservations(pool, table, geometry);
        Ok(())
    }
}

/// One report being entered.
struct Settlement<'a> {
    lease: &'a mut Lease,
    pool: &'a mut BlockPool,
    table: &'a mut SequenceTable,
    geometry: &'a Geometry,
    counters: &'a mut Counters,
}

impl Settlement<'_> {
    /// Returns the step, which is in flight no more; None if it was settled before.
    fn enter(mut self, report: &StepReport) -> Result<Option<StepInFlight>> {
        if report.step_number <= self.lease.settled_step {
            return Ok(None);
        }
        let Some(step) = self.lease.in_flight.front().filter(|step| step.step_number == report.step_number) else {
            let limit = format!("{}, planned and not reported", self.lease.settled_step + 1);
            return refused(invalid("step_report.step_number", report.step_number, limit));
        };
        let mut tokens = Vec::new();
        if report.outcome == StepOutcome::Computed {
            refuse_unplanned(step, report)?;
            tokens = self.tokens_by_run(step, report)?;
            refuse_doomed(step)?;
        }
        let mut step = self.lease.in_flight.pop_front().expect("it is the first one in flight");
        self.lease.settled_step = report.step_number;
        self.lease.known_step = self.lease.known_step.max(report.step_number);
        self.count(report.outcome);
        if report.outcome == StepOutcome::Computed {
            self.accept_drafts(&mut step, report);
            self.enter_computed(&step, &tokens)?;
        } else if !step.runs.is_empty() && !step.is_doomed {
            self.doom_in_flight();
        }
        Ok(Some(step))
    }

    /// The last token that each run sampled, 0 for a run that samples none.
    fn tokens_by_run(&self, step: &StepInFlight, report: &StepReport) -> Result<Vec<i32>> {
        let vocab_size = self.geometry.vocab_size;
        if let Some(token) = report.sampled_tokens.iter().find(|token| **token as u32 as usize >= vocab_size) {
            let limit = format!("0 to {}", vocab_size - 1);
            return refused(invalid("step_report.sampled_token_ids", token, limit));
        }
        let is_plain = step.drafts.is_empty() && report.sampled_counts.is_empty();
        if is_plain && step.runs.iter().map(|run| run.seq_id).eq(report.sampled_ids.iter().copied()) {
            return Ok(report.sampled_tokens.clone());
        }
        let tokens_of: HashMap<i32, &[i32]> = report.sampled().collect();
        if tokens_of.len() < report.sampled_ids.len() {
            return refused(invalid(
                "step_report.sampled_sequence_ids",
                "a sequence twice",
                "each sequence at most once",
            ));
        }
        if let Some(missing) = step.first_waiting(&tokens_of) {
            let limit = format!("a token for sequence {missing}");
            return refused(invalid("step_report.sampled_sequence_ids", "incomplete", limit));
        }
        let last_of = |(index, run): (usize, &Run)| {
            let Some(tokens) = tokens_of.get(&run.seq_id) else { return Ok(0) };
            let accepted = step.accepted_drafts(index, report.token_counts[index]).unwrap_or_default();
            last_after(accepted, tokens, run.seq_id)
        };
        step.runs.iter().enumerate().map(last_of).collect()
    }

    /// Shortens the runs with drafts, and their sequences, to the drafts that the step accepted.
    fn accept_drafts(&mut self, step: &mut StepInFlight, report: &StepReport) {
        for (index, drafts) in std::mem::take(&mut step.drafts) {
            let run = &mut step.runs[index];
            let num_rejected = run.sampled_position - report.token_counts[index] as usize;
            let accepted = &drafts[..drafts.len() - num_rejected];
            run.sampled_position -= num_rejected;
            run.end = run.end.min(run.sampled_position);
            self.table.get_mut(run.row).accept_drafts(accepted);
            self.counters.drafted_tokens += drafts.len() as u64;
            self.counters.accepted_drafts += accepted.len() as u64;
            self.counters.generated_tokens += accepted.len() as u64;
        }
    }

    fn count(&mut self, outcome: StepOutcome) {
        match outcome {
            StepOutcome::Computed => self.counters.computed_steps += 1,
            StepOutcome::Failed => self.counters.failed_steps += 1,
            StepOutcome::Skipped => self.counters.skipped_steps += 1,
        }
    }

    fn enter_computed(&mut self, step: &StepInFlight, tokens: &[i32]) -> Result<()> {
        for (run, token) in step.runs.iter().zip(tokens) {
            if run.receives {
                self.table.get_mut(run.row).append_promised(*token);
                self.counters.generated_tokens += 1;
            }
        }
        for (index, forks) in &step.also {
            for row in forks {
                self.table.get_mut(*row).append_promised(tokens[*index]);
                self.counters.generated_tokens += 1;
            }
        }
        for heir in &step.heirs {
            let sequence = self.table.get_mut(heir.row);
            sequence.num_computed = sequence.num_computed.max(heir.end);
        }
        if self.geometry.has_windows() {
            let rows = step.runs.iter().map(|run| run.row).chain(step.heirs.iter().map(|heir| heir.row));
            self.lease.computed.extend(rows);
        }
        let mut published = Vec::new();
        for Run { row, end, .. } in &step.runs {
            let sequence = self.table.get_mut(*row);
            self.counters.computed_tokens += end.saturating_sub(sequence.num_computed) as u64;
            sequence.num_computed = sequence.num_computed.max(*end);
            let num_full = sequence.num_computed.min(sequence.num_known()) / self.geometry.block_size;
            let is_published = sequence.cache_use.writes() && !self.geometry.has_recurrent_state;
            if is_published && num_full > sequence.num_published {
                published.push((*row, num_full));
            }
        }
        self.publish(&published)
    }

    /// Publishes the full blocks that were computed; a block with an equal hash replaces them.
    fn publish(&mut self, published: &[(Row, usize)]) -> Result<()> {
        let mut duplicates = Vec::new();
        for &(row, num_full) in published {
            let sequence = self.table.get_mut(row);
            let (first, mut parent) = (sequence.num_published, *sequence.last_hash());
            let hashes = sequence.take_hashes(num_full, self.geometry.block_size);
            self.pool.index().warm(&hashes);
            for (index, hash) in (first..num_full).zip(&hashes) {
                for (group, table) in sequence.tables.iter().enumerate() {
                    let Some(block) = table.get(index) else { continue };
                    let standing = self.pool.publish(hash, block);
                    if standing == block {
                        self.pool.enter_origin(block, Origin { parent, index: index as u32 });
                        let tokens = sequence.tokens_of(index, self.geometry.block_size);
                        self.pool.records.contents.enter(block, tokens, &sequence.namespace);
                        continue;
                    }
                    self.pool.keeper().hand_over(block, standing);
                    if !sequence.released {
                        duplicates.push((row, group as Group, index, standing));
                    }
                }
                parent = *hash;
            }
        }
        duplicates.into_iter().try_for_each(|(row, group, index, standing)| self.swap(row, group, index, standing))
    }

    /// Two blocks hold the same tokens: keep the published one. Keep both if the published one is the last allocatable
    /// block: it is promised to a sequence, and the other block may not be free before it is needed.
    fn swap(&mut self, row: Row, group: Group, index: usize, standing: BlockId) -> Result<()> {
        if self.pool.num_parked(&[standing]) > self.pool.accounts().num_spare(self.pool.num_allocatable()) {
            return Ok(());
        }
        let duplicate = self.table.get(row).table(group).block(index);
        if let (Some(advice), None) = (self.pool.parking().advice(duplicate), self.pool.parking().advice(standing)) {
            self.pool.advisor().advise(&[standing], advice);
        }
        self.pool.acquire(&[standing], 1)?;
        self.table.get_mut(row).tables[usize::from(group)].replace(index, standing);
        self.lease.table_changes.push((row, group, index));
        self.lease.let_go(vec![duplicate], self.pool)
    }

    /// A step computed nothing: steps that were planned before this was known will compute nothing either.
    fn doom_in_flight(&mut self) {
        for step in &mut self.lease.in_flight {
            step.doom();
            self.lease.known_step = step.step_number;
        }
        self.lease.sequences.values().for_each(|row| self.table.get_mut(*row).forget_uncomputed());
    }
}

/// Refuses a report that does not fit the plan.
fn refuse_unplanned(step: &StepInFlight, report: &StepReport) -> Result<()> {
    let is_planned = |(index, run): (usize, &Run)| {
        let num_computed = report.token_counts[index];
        let is_whole = run.sampled_position as i32 == num_computed;
        run.seq_id == report.seq_ids[index] && (is_whole || step.accepted_drafts(index, num_computed).is_some())
    };
    let num_runs = step.runs.len();
    let is_parallel = report.seq_ids.len() == num_runs && report.token_counts.len() == num_runs;
    if is_parallel && step.runs.iter().enumerate().all(is_planned) {
        return Ok(());
    }
    let limit = format!("the runs of step {}", step.step_number);
    refused(invalid("step_report.sequence_ids", "other runs", limit))
}

/// The last of the tokens that a run sampled: the others are its accepted drafts. Refused if they are not.
fn last_after(accepted: &[i32], tokens: &[i32], seq_id: i32) -> Result<i32> {
    match tokens.split_last() {
        Some((last, others)) if others == accepted => Ok(*last),
        Some((_, others)) if others.len() == accepted.len() => {
            let value = format!("other tokens for sequence {seq_id}");
            refused(invalid("step_report.sampled_token_ids", value, "its accepted drafts, and one token after them"))
        }
        _ => {
            let limit = format!("{}, 1 more than its accepted drafts", accepted.len() + 1);
            let value = format!("{} for sequence {seq_id}", tokens.len());
            refused(invalid("step_report.sampled_token_counts", value, limit))
        }
    }
}

/// Refuses a report of COMPUTED for a step after one that computed nothing.
fn refuse_doomed(step: &StepInFlight) -> Result<()> {
    if !step.is_doomed || step.runs.is_empty() {
        return Ok(());
    }
    refused(invalid("step_report.outcome", "COMPUTED", "FAILED or SKIPPED, as of a step before it"))
}

fn refused<T>(refusal: Refusal) -> Result<T> {
    Err(Failure::Refused(refusal))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::books::plans::StepRequest;
    use crate::books::tests::{Bench, admission};
    use crate::cache::groups::Span;
    use crate::errors::Reason;

    /// Sequence 1 samples with its first step, sequence 2 does not.
    fn bench() -> Bench {
        let mut bench = Bench::new(8);
        let mut chunked = admission(2, &[4, 5, 6]);
        chunked.max_compute = 2;
        bench.plan(StepRequest { admissions: vec![admission(1, &[1, 2, 3]), chunked], ..StepRequest::default() });
        bench
    }

    fn refusal_of(bench: &mut Bench, report: &StepReport) -> String {
        let before = bench.0.state(None);
        match bench.0.settle("a", report) {
            Err(Failure::Refused(refusal)) if refusal.reason == Reason::InvalidArgument => {
                assert_eq!(bench.0.state(None), before, "a refused report changes nothing");
                refusal.message
            }
            other => panic!("not refused: {other:?}"),
        }
    }

    #[test]
    fn a_report_has_to_be_about_what_was_planned() {
        type Change = fn(&mut StepReport);
        let changes: [(Change, &str); 10] = [
            (|report| report.step_number = 2, "step_report.step_number is 2; must be 1, planned and not reported"),
            (|report| report.seq_ids[1] = 3, "the runs of step 1"),
            (|report| report.seq_ids.swap(0, 1), "the runs of step 1"),
            (|report| report.token_counts[0] = 2, "the runs of step 1"),
            (|report| report.token_counts.push(1), "the runs of step 1"),
            (|report| report.seq_ids.truncate(1), "the runs of step 1"),
            (|report| report.sampled_tokens[0] = 100, "step_report.sampled_token_ids is 100; must be 0 to 99"),
            (|report| report.sampled_tokens[0] = -1, "step_report.sampled_token_ids is -1; must be 0 to 99"),
            (|report| report.sampled_ids[0] = 2, "must be a token for sequence 1"),
            (
                |report| (report.sampled_ids, report.sampled_tokens) = (vec![1, 1], vec![10, 20]),
                "step_report.sampled_sequence_ids is a sequence twice; must be each sequence at most once",
            ),
        ];
        for (change, message) in changes {
            let mut bench = bench();
            let mut report = bench.report("a");
            change(&mut report);
            let told = refusal_of(&mut bench, &report);
            assert!(told.contains(message), "{message}: {told}");
        }
    }

    #[test]
    fn tokens_go_to_whose_they_are_and_others_are_left() {
        let mut bench = bench();
        let mut report = bench.report("a");
        (report.sampled_ids, report.sampled_tokens) = (vec![7, 2, 1], vec![70, 20, 10]);
        bench.0.settle("a", &report).unwrap();
        assert_eq!((bench.tokens(1), bench.tokens(2)), (vec![1, 2, 3, 10], vec![4, 5, 6]));
        assert_eq!((bench.sequence(1).num_computed, bench.sequence(2).num_computed), (3, 2));
    }

    #[test]
    fn a_token_for_every_run_goes_to_those_who_sample() {
        let mut bench = bench();
        let mut report = bench.report("a");
        (report.sampled_ids, report.sampled_tokens) = (vec![1, 2], vec![10, 20]);
        bench.0.settle("a", &report).unwrap();
        assert_eq!((bench.sequence(1).num_known(), bench.sequence(2).num_known()), (4, 3));
        assert_eq!((bench.tokens(1)[3], bench.0.violations()), (10, vec![]));
    }

    #[test]
    fn forks_get_their_parents_token_though_the_parent_gave_it_up() {
        let mut bench = bench();
        bench.fork(1, &[3, 4], 4);
        bench.trim(1, 2);
        bench.0.settle("a", &bench.report("a")).unwrap();
        assert_eq!((bench.tokens(3), bench.tokens(4)), (vec![1, 2, 3, 9], vec![1, 2, 3, 9]));
        assert_eq!((bench.tokens(1), bench.sequence(1).num_computed), (vec![1, 2], 2));
    }

    #[test]
    fn a_report_counts_once_and_of_a_lease_that_is_gone_not_at_all() {
        let mut bench = bench();
        let report = bench.report("a");
        bench.0.settle("a", &report).unwrap();
        let before = bench.0.state(None);
        bench.0.settle("a", &report).unwrap();
        bench.0.settle("c", &report).unwrap();
        assert_eq!((bench.0.state(None), bench.0.counters().computed_steps), (before, 1));
    }

    #[test]
    fn outcomes_are_counted_apart() {
        let mut bench = bench();
        for outcome in [StepOutcome::Skipped, StepOutcome::Failed, StepOutcome::Skipped, StepOutcome::Computed] {
            bench.0.settle("a", &StepReport { outcome, ..bench.report("a") }).unwrap();
            bench.plan(StepRequest::default());
        }
        let counters = bench.0.counters();
        assert_eq!((counters.computed_steps, counters.failed_steps, counters.skipped_steps), (1, 1, 2));
        assert_eq!((bench.0.leases["a"].settled_step, bench.0.leases["a"].known_step), (4, 4));
    }

    #[test]
    fn what_was_planned_behind_a_failure_is_known_to_fail() {
        let mut bench = bench();
        bench.extend(1, 1, &[]);
        bench.plan(StepRequest::default());
        bench.0.settle("a", &StepReport { outcome: StepOutcome::Failed, ..bench.report("a") }).unwrap();
        let lease = &bench.0.leases["a"];
        assert_eq!((lease.settled_step, lease.known_step), (1, 3));
        assert!(lease.in_flight.iter().all(|step| step.is_doomed));
        assert_eq!((bench.sequence(1).num_tokens, bench.sequence(1).num_scheduled), (3, 0));
        let report = bench.report("a");
        let told = refusal_of(&mut bench, &report);
        assert!(told.contains("step_report.outcome is COMPUTED"), "{told}");
        bench.extend(1, 3, &[]);
        bench.0.settle("a", &StepReport { outcome: StepOutcome::Skipped, ..bench.report("a") }).unwrap();
        assert_eq!(
            bench.sequence(1).num_scheduled,
            3,
            "a doomed step dooms nothing that was planned when that was known"
        );
        bench.settle();
        assert_eq!((bench.sequence(1).num_computed, bench.0.counters().computed_steps), (3, 2));
    }

    /// Sequences 1 and 3 compute the same tokens, each in blocks of its own; 1 does first.
    fn duplicates() -> Bench {
        let mut bench = Bench::new(8);
        bench.admit(3, &[1]);
        bench.settle();
        bench.trim(3, 1);
        bench.settle();
        bench.admit(1, &[1, 2, 3]);
        bench.extend(3, 1, &[2]);
        assert_ne!(bench.blocks(1)[0], bench.blocks(3)[0]);
        bench
    }

    #[test]
    fn of_two_blocks_with_equal_content_the_one_that_was_published_is_kept() {
        let mut bench = duplicates();
        let (kept, given_back) = (bench.blocks(1)[0], bench.blocks(3)[0]);
        bench.settle();
        assert_eq!((bench.blocks(3)[0], bench.0.pool.holders().ref_count(kept)), (kept, 2));
        assert_eq!(
            (bench.0.pool.holders().ref_count(given_back), bench.0.pool.holders().hold_count(given_back)),
            (0, 0)
        );
        assert_eq!(
            (&bench.0.leases["a"].table_changes[..], bench.0.violations()),
            (&[(bench.row(3), 0, 0)][..], vec![])
        );
        let plan = bench.plan(StepRequest::default());
        assert_eq!(
            (plan.write_seq_ids, plan.write_first_indexes, plan.write_block_ids),
            (vec![3], vec![0], vec![kept])
        );
        assert!(bench.0.leases["a"].table_changes.is_empty());
    }

    #[test]
    fn a_duplicate_is_kept_as_long_as_a_step_may_read_it() {
        let mut bench = duplicates();
        let given_back = bench.blocks(3)[0];
        bench.plan(StepRequest::default());
        bench.plan(StepRequest::default());
        for (num_references, num_holds) in [(1, 0), (0, 1), (0, 1), (0, 0)] {
            bench.0.settle("a", &bench.report("a")).unwrap();
            let pool = &bench.0.pool;
            assert_eq!(
                (pool.holders().ref_count(given_back), pool.holders().hold_count(given_back)),
                (num_references, num_holds)
            );
            assert_eq!(bench.0.violations(), [""; 0]);
        }
    }

    #[test]
    fn a_released_sequence_takes_no_other_block() {
        let mut bench = duplicates();
        bench.release(&[3]);
        bench.settle();
        assert_eq!((bench.0.pool.holders().ref_count(bench.blocks(1)[0]), bench.0.violations()), (1, vec![]));
        assert!(bench.0.leases["a"].table_changes.is_empty());
    }

    #[test]
    fn a_released_sequence_publishes_what_its_step_computes() {
        let mut bench = bench();
        bench.release(&[1]);
        bench.settle();
        assert_eq!(bench.0.num_cached_tokens(&[1, 2, 3], &b"".into(), b""), 2);
        assert_eq!((bench.0.violations(), bench.0.num_rows()), (vec![], 1));
    }

    /// Sequence 1 with tokens 1, 2, 3, 9, of which the last one is not computed, and these drafts in flight.
    fn drafting(drafts: &[i32]) -> Bench {
        let mut bench = Bench::new(8);
        bench.admit(1, &[1, 2, 3]);
        bench.settle();
        assert_eq!(bench.draft(1, drafts).refusals.len(), 0);
        bench
    }

    #[test]
    fn a_sequence_is_as_long_as_its_drafts_were_accepted() {
        for (drafts, tokens, num_cached) in [
            (&[9, 9, 9][..], &[9; 5][..], 6),
            (&[9, 9, 8], &[9; 4], 6),
            (&[9, 8, 9], &[9; 3], 4),
            (&[8, 9, 9], &[9; 2], 4),
            (&[8], &[9; 2], 4),
        ] {
            let mut bench = drafting(drafts);
            let blocks = bench.blocks(1);
            bench.settle();
            let tokens = [&[1, 2, 3][..], tokens].concat();
            let (last, sequence) = (tokens.len() - 1, bench.sequence(1));
            assert_eq!((&sequence.tokens, sequence.num_tokens, sequence.num_drafts), (&tokens, tokens.len(), 0));
            assert_eq!((sequence.num_computed, sequence.num_scheduled), (last, last));
            assert_eq!(bench.blocks(1), blocks, "its blocks stay for the next step");
            assert_eq!(bench.0.num_cached_tokens(&[&[1, 2, 3][..], &[9; 20]].concat(), &b"".into(), b""), num_cached);
            let counters = bench.0.counters();
            assert_eq!((counters.drafted_tokens, counters.accepted_drafts), (drafts.len() as u64, last as u64 - 4));
            assert_eq!((counters.computed_tokens, counters.generated_tokens), (last as u64, tokens.len() as u64 - 3));
            assert_eq!(bench.0.violations(), [""; 0]);
            let plan = bench.extend(1, 1, &[]);
            assert_eq!(
                (plan.run_starts, plan.given_run_indexes),
                (vec![last as u32], vec![]),
                "the worker knows its token"
            );
            bench.settle();
            assert_eq!(bench.draft(1, &[7]).refusals.len(), 0);
            bench.settle();
            assert_eq!((bench.tokens(1), bench.0.violations()), ([&tokens[..], &[9, 9]].concat(), vec![]));
        }
    }

    #[test]
    fn a_report_has_to_fit_the_drafts() {
        type Change = fn(&mut StepReport);
        let changes: [(Change, &str); 9] = [
            (|report| report.token_counts[0] = 3, "the runs of step 2"),
            (|report| report.token_counts[0] = 7, "the runs of step 2"),
            (|report| report.token_counts[0] = -1, "the runs of step 2"),
            (
                |report| report.token_counts[0] = 4,
                "step_report.sampled_token_counts is 2 for sequence 1; must be 1, 1 more",
            ),
            (
                |report| report.token_counts[0] = 6,
                "step_report.sampled_token_counts is 2 for sequence 1; must be 3, 1 more",
            ),
            (|report| report.sampled_tokens[0] = 7, "step_report.sampled_token_ids is other tokens for sequence 1"),
            (|report| report.sampled_tokens[1] = 100, "step_report.sampled_token_ids is 100; must be 0 to 99"),
            (|report| report.sampled_ids[0] = 2, "must be a token for sequence 1"),
            (
                |report| (report.sampled_tokens, report.sampled_counts) = (vec![9], vec![]),
                "step_report.sampled_token_counts is 1 for sequence 1; must be 2, 1 more than its accepted drafts",
            ),
        ];
        for (change, message) in changes {
            let mut bench = drafting(&[9, 8]);
            let mut report = bench.report("a");
            change(&mut report);
            let told = refusal_of(&mut bench, &report);
            assert!(told.contains(message), "{message}: {told}");
        }
        let mut bench = bench();
        let mut report = bench.report("a");
        (report.sampled_tokens, report.sampled_counts) = (vec![9, 9], vec![2]);
        assert!(refusal_of(&mut bench, &report).contains("is 2 for sequence 1; must be 1, 1 more"), "without drafts");
    }

    #[test]
    fn drafts_of_a_step_that_computed_nothing_are_gone() {
        for outcome in [StepOutcome::Failed, StepOutcome::Skipped] {
            let mut bench = drafting(&[9, 9]);
            bench.plan(StepRequest::default());
            bench.0.settle("a", &StepReport { outcome, ..bench.report("a") }).unwrap();
            let sequence = bench.sequence(1);
            assert_eq!((&sequence.tokens[..], sequence.num_tokens, sequence.num_drafts), (&[1, 2, 3, 9][..], 4, 0));
            assert_eq!((sequence.num_computed, sequence.num_scheduled, sequence.sampled_position), (3, 3, None));
            assert_eq!((bench.0.counters().drafted_tokens, bench.0.violations()), (0, vec![]));
            assert_eq!(bench.draft(1, &[9]).refusals.len(), 1, "the worker has not kept the token");
            assert_eq!(bench.extend(1, 1, &[]).given_run_indexes, [0]);
        }
    }

    #[test]
    fn drafts_behind_a_failure_are_gone_with_the_token_before_them() {
        let mut bench = Bench::new(8);
        bench.admit(1, &[1, 2, 3]);
        bench.draft(1, &[9, 9]);
        let failed = StepReport { outcome: StepOutcome::Failed, ..bench.report("a") };
        bench.0.settle("a", &failed).unwrap();
        let sequence = bench.sequence(1);
        assert_eq!((sequence.num_tokens, sequence.num_scheduled, sequence.num_drafts), (3, 0, 0));
        let report = bench.report("a");
        assert!(refusal_of(&mut bench, &report).contains("step_report.outcome is COMPUTED"));
        assert_eq!(bench.extend(1, 3, &[]).refusals.len(), 0, "it is not busy");
        assert_eq!(bench.0.violations(), [""; 0]);
    }

    #[test]
    fn a_window_passes_by_accepted_tokens() {
        for (drafts, num_passed) in [(&[9, 9, 9, 9][..], vec![2]), (&[8, 9, 9, 9], vec![])] {
            let mut bench = Bench::with_groups(20, &[Span::Full, Span::Sliding(3)]);
            bench.admit(1, &[1, 2, 3]);
            bench.settle();
            bench.draft(1, drafts);
            assert_eq!(bench.plan(StepRequest::default()).passed_counts, [0; 0], "they are in flight");
            bench.settle();
            assert_eq!(bench.plan(StepRequest::default()).passed_counts, num_passed);
            assert_eq!(bench.0.violations(), [""; 0]);
        }
    }
}
