//! Enters what a client says about the future of blocks: retention, return hints, and prompts that wait.

use crate::books::hits::Prefix;
use crate::books::planner::StepPlanner;
use crate::books::plans::{CacheUse, ExpectedPrompt, Retention};
use crate::books::tables::{BlockTable, tail_first};
use crate::cache::advice::{AWAITED, Advice, FOREVER, LEAST_WORTH, Level, Millis, UNADVISED, millis};
use crate::cache::pool::{BlockPool, BlockState};
use crate::cache::prefix::{BlockId, chain_hashes};

/// The level of a sequence that is expected back within so many seconds.
const RETURN_LEVELS: [(f64, Level); 3] = [(10.0, 8), (60.0, 7), (f64::INFINITY, 6)];
/// Shorter expectations are raised to the least, longer ones cut to the most.
const LEAST_EXPECTED_S: f64 = 1.0;
const MOST_EXPECTED_S: f64 = 3600.0;

impl StepPlanner<'_> {
    /// Lets the blocks that a waiting prompt would find be evicted last, unless advice says so already. No effect for a
    /// tenant that can't have any.
    pub(super) fn expect_prompt(&mut self, prompt: &ExpectedPrompt, names_tenants: bool) {
        let lease_tenant = self.lease.tenant;
        let named = prompt.tenant.as_ref().map_or(Some(lease_tenant), |name| self.tenants.find(name));
        let Some(tenant) = named.filter(|tenant| names_tenants || *tenant == lease_tenant) else { return };
        let num_sharable = self.geometry.num_sharable(prompt.tokens.len(), CacheUse::ReadAndWrite);
        let root = self.lease.root(tenant, self.tenants, &prompt.namespace, &self.geometry.model_fingerprint);
        let mut hashes = Vec::new();
        let block_size = self.geometry.block_size;
        chain_hashes(root, &prompt.tokens[..num_sharable * block_size], block_size, &mut hashes);
        let hit = Prefix { geometry: self.geometry, index: self.pool.index(), hashes: &hashes }.find();
        let mut awaited = tail_first(&hit.tables, 0..hit.num_blocks);
        awaited.retain(|block| matches!(self.pool.parking().advised_level(*block), LEAST_WORTH..=UNADVISED | AWAITED));
        self.pool.advisor().expect(&awaited, end_of_expectation(prompt.expected_in, self.now));
    }
}

/// Raises the level of these blocks until their expected use; an earlier use ranks higher.
pub(super) fn expect_back(tail_first: &[BlockId], seconds: f64, now: f64, pool: &mut BlockPool) {
    let level = RETURN_LEVELS.iter().find(|(most, _)| seconds <= *most).map_or(UNADVISED, |(_, level)| *level);
    let until = end_of_expectation(seconds, now);
    let is_raised = |block: &BlockId| is_kept_on(*block, pool) && pool.parking().advised_level(*block) < level;
    let raised: Vec<BlockId> = tail_first.iter().copied().filter(is_raised).collect();
    pool.advisor().advise(&raised, Advice { level, until });
}

/// Marks blocks as not needed again: those without a holder and without advice are evicted first.
pub(super) fn expect_never(tail_first: &[BlockId], pool: &mut BlockPool) {
    let is_unwanted = |block: &BlockId| {
        let (ref_count, level) = (pool.holders().ref_count(*block), pool.parking().advised_level(*block));
        is_kept_on(*block, pool) && ref_count == 0 && level == UNADVISED
    };
    let unwanted: Vec<BlockId> = tail_first.iter().copied().filter(is_unwanted).collect();
    pool.advisor().advise(&unwanted, Advice { level: LEAST_WORTH, until: FOREVER });
}

/// Twice the expected time from now: what was expected has come by then, or will not come.
fn end_of_expectation(seconds: f64, now: f64) -> Millis {
    millis(now + (2.0 * seconds).clamp(LEAST_EXPECTED_S, MOST_EXPECTED_S))
}

/// True if something could still be found in the block, now or when a step has ended.
fn is_kept_on(block: BlockId, pool: &BlockPool) -> bool {
    pool.state(block) != BlockState::Free
}

/// Enters the advice for a sequence's blocks; returns the advice for its later blocks.
///
/// A range gets at least the level of the ranges after it: a chain without its head is useless.
pub(super) fn retain(
    retention: &[Retention],
    tables: &[BlockTable],
    block_size: usize,
    now: f64,
    pool: &mut BlockPool,
) -> Option<Advice> {
    let mut end = 0;
    let mut ranges: Vec<(usize, usize, &Retention)> = Vec::with_capacity(retention.len());
    for range in retention {
        let first = end / block_size;
        end = if range.num_tokens == 0 { usize::MAX } else { end.saturating_add(range.num_tokens) };
        ranges.push((first, end / block_size, range));
    }
    let mut least = Advice { level: LEAST_WORTH, until: FOREVER };
    let mut tail = None;
    for (first, end, range) in ranges.into_iter().rev() {
        let until = range.ttl.map_or(FOREVER, |ttl| millis(now + ttl));
        let own = Advice { level: range.level, until };
        least = if own.level >= least.level { own } else { least };
        pool.advisor().advise(&tail_first(tables, first..end), least);
        if range.num_tokens == 0 {
            tail = Some(least);
        }
    }
    tail
}

/// Enters the advice for fresh blocks of a sequence, if there is any.
pub(super) fn advise_fresh(fresh: &[BlockId], advice: Option<Advice>, pool: &mut BlockPool) {
    if let Some(advice) = advice {
        let tail_first: Vec<BlockId> = fresh.iter().rev().copied().collect();
        pool.advisor().advise(&tail_first, advice);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::books::plans::{Admission, ReturnHint, StepRequest};
    use crate::books::tests::{Bench, admission};

    fn range(num_tokens: usize, level: Level, ttl: Option<f64>) -> Retention {
        Retention { num_tokens, level, ttl }
    }

    fn retained(seq_id: i64, tokens: &[i32], retention: Vec<Retention>) -> StepRequest {
        let admission = Admission { retention, ..admission(seq_id, tokens) };
        StepRequest { admissions: vec![admission], ..StepRequest::default() }
    }

    fn levels(bench: &Bench, seq_id: i32) -> Vec<Level> {
        bench.blocks(seq_id).into_iter().map(|block| bench.0.pool().parking().level(block)).collect()
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
        blocks.into_iter().map(|block| bench.0.pool().parking().level(block)).collect()
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
            assert_eq!(bench.0.pool().parking().level(1), level);
            bench.0.advance(until).unwrap();
            assert_eq!(bench.0.pool().parking().level(1), UNADVISED);
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
        let cached = |bench: &Bench| [1, 2, 3].map(|token| bench.0.num_cached_tokens(&[token; 9], &b"".into(), b""));
        bench.admit(4, &[4; 6]);
        bench.admit(5, &[5; 4]);
        assert_eq!(cached(&bench), [2, 4, 0], "the last token is always computed, so one block of [1; 4] is found");
        bench.admit(6, &[6; 2]);
        assert_eq!(cached(&bench), [0, 4, 0], "the next prompt's blocks go last");
        bench.settle();
        bench.release(&[4, 5, 6]);
        bench.admit(7, &[2; 5]);
        let found = bench.blocks(7);
        assert_eq!(
            found[..2].iter().map(|block| bench.0.pool().parking().level(*block)).collect::<Vec<_>>(),
            [UNADVISED; 2]
        );
        assert_eq!(bench.0.violations(), [""; 0]);
    }

    #[test]
    fn what_several_prompts_wait_for_is_kept_for_the_last_of_them() {
        let mut bench = computed(&[1, 1, 2, 2, 3], vec![]);
        bench.release(&[1]);
        let prompts = vec![expected(&[1, 1, 2, 2, 9], 5.0), expected(&[1, 1, 4], 1.0), expected(&[1, 1, 5], 1.0)];
        bench.plan(expecting(prompts));
        bench.settle();
        let kept = |bench: &Bench| [1, 2].map(|block| bench.0.pool().parking().level(block) == AWAITED);
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
            assert_eq!([1, 2].map(|block| bench.0.pool().parking().level(block)), [AWAITED; 2]);
            let until = (2.0 * seconds).clamp(LEAST_EXPECTED_S, MOST_EXPECTED_S);
            bench.0.advance(until - 0.1).unwrap();
            assert_eq!(bench.0.pool().parking().level(1), AWAITED);
            bench.0.advance(until).unwrap();
            assert_eq!(bench.0.pool().parking().level(1), UNADVISED);
        }
    }

    #[test]
    fn a_waiting_prompt_keeps_what_its_own_tenant_has() {
        let mut bench = computed(&[1; 5], vec![]);
        bench.0.enter_tenant(b"x");
        let of = |tenant: &[u8]| ExpectedPrompt { tenant: Some(tenant.to_vec()), ..expected(&[1; 5], 1.0) };
        let salted = ExpectedPrompt { namespace: b"s".into(), ..expected(&[1; 5], 1.0) };
        let nothing = [of(b"x"), of(b"unknown"), salted, expected(&[], 1.0), expected(&[1; 2], 1.0)];
        bench.plan(StepRequest { names_tenants: true, ..expecting(nothing.to_vec()) });
        assert_eq!(levels(&bench, 1), [UNADVISED; 3]);
        for prompt in [of(b""), expected(&[1; 3], 1.0)] {
            bench.plan(expecting(vec![prompt]));
            assert_eq!(bench.0.pool().parking().level(1), AWAITED);
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
        let cached = |bench: &Bench| [1, 2, 3].map(|token| bench.0.num_cached_tokens(&[token; 5], &b"".into(), b""));
        bench.admit(4, &[4; 4]);
        assert_eq!(cached(&bench), [4, 4, 0]);
        bench.admit(5, &[5; 4]);
        assert_eq!(cached(&bench), [4, 0, 0]);
    }
}
