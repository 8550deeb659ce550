//! Keeps the prefixes that the breakpoints of prompts name, and renews those that are used.

use crate::books::geometry::Geometry;
use crate::books::kept_prefix::{KeptPrefix, num_kept_blocks};
use crate::books::planner::StepPlanner;
use crate::books::sequences::Row;
use crate::books::tables::BlockTable;
use crate::cache::advice::millis;
use crate::cache::groups::{Group, Span, identity};
use crate::cache::pool::BlockPool;
use crate::cache::prefix::{BlockId, Hash};
use crate::cache::tenants::TenantId;

/// True if a block at an index of a group's table is needed to find one of the prefixes.
fn is_needed(prefixes: &[KeptPrefix], index: usize, span: Span, geometry: &Geometry) -> bool {
    let needs = |prefix: &KeptPrefix| {
        let first = geometry.first_needed(span, prefix.num_blocks * geometry.block_size);
        (first..prefix.num_blocks).contains(&index)
    };
    if span.is_full() { index < num_kept_blocks(prefixes) } else { prefixes.iter().any(needs) }
}

/// The blocks of a prompt: those in its tables, and those that were found before its windows.
struct PromptBlocks<'a> {
    geometry: &'a Geometry,
    pool: &'a BlockPool,
    tables: &'a [BlockTable],
    /// Of the blocks that were found.
    found: &'a [Hash],
}

impl PromptBlocks<'_> {
    /// Those of a range of indexes, the last ones first: the needed ones and the others.
    fn split_tail_first(&self, first: usize, end: usize, prefixes: &[KeptPrefix]) -> (Vec<BlockId>, Vec<BlockId>) {
        let (mut needed, mut others) = (Vec::new(), Vec::new());
        for index in (first..end).rev() {
            for (group, span) in self.geometry.groups() {
                let Some(block) = self.block(group, index) else { continue };
                let is_needed = is_needed(prefixes, index, span, self.geometry);
                if is_needed { needed.push(block) } else { others.push(block) }
            }
        }
        (needed, others)
    }

    fn block(&self, group: Group, index: usize) -> Option<BlockId> {
        let passed = || self.pool.index().lookup(&identity(self.found.get(index)?, group));
        self.tables[usize::from(group)].get(index).or_else(passed)
    }
}

impl StepPlanner<'_> {
    /// A prompt with these breakpoints uses the blocks that it found, and computes the others of its tables. Cost: a
    /// lookup for each found block of a group with a window, if the tenant keeps anything.
    pub(super) fn use_prefix(
        &mut self,
        tenant: TenantId,
        prefixes: &[KeptPrefix],
        tables: &[BlockTable],
        found: &[Hash],
    ) {
        let num_kept = self.pool.parking().keeps().map_or(0, |keeps| keeps.num_kept(tenant));
        let limit = self.pool.accounts().get(tenant).share.keep_limit;
        if num_kept == 0 && (prefixes.is_empty() || limit == 0) {
            return;
        }
        match (tables, &self.geometry.groups[..]) {
            ([table], [Span::Full]) => self.use_table(prefixes, table, found.len()),
            _ => self.use_tables(prefixes, tables, found),
        }
        self.pool.keeper().limit(tenant);
    }

    /// The same of the one table of a pool without windows.
    fn use_table(&mut self, prefixes: &[KeptPrefix], table: &BlockTable, num_found: usize) {
        let (now, num_needed) = (millis(self.now), num_kept_blocks(prefixes));
        let used: Vec<BlockId> = table.range(0..num_found.max(num_needed)).iter().rev().copied().collect();
        let (others, mut rest) = used.split_at(used.len().saturating_sub(num_needed));
        self.pool.keeper().renew(others, now);
        let mut prefixes = prefixes.iter().rev().peekable();
        while let Some(longest) = prefixes.next() {
            while prefixes.next_if(|shorter| shorter.ttl == longest.ttl).is_some() {}
            let first = prefixes.peek().map_or(0, |shorter| shorter.num_blocks);
            let needed;
            (needed, rest) = rest.split_at(rest.len().saturating_sub(first));
            self.pool.keeper().keep_held(needed, longest.ttl, now);
        }
    }

    /// The same of tables of groups, some with a window.
    fn use_tables(&mut self, prefixes: &[KeptPrefix], tables: &[BlockTable], found: &[Hash]) {
        let now = millis(self.now);
        let mut end = found.len().max(num_kept_blocks(prefixes));
        let firsts = [0].into_iter().chain(prefixes.iter().map(|prefix| prefix.num_blocks)).rev();
        let ttls = [0].into_iter().chain(prefixes.iter().rev().map(|prefix| prefix.ttl));
        for (first, ttl) in firsts.zip(ttls) {
            let blocks = PromptBlocks { geometry: self.geometry, pool: self.pool, tables, found };
            let (needed, others) = blocks.split_tail_first(first, end, prefixes);
            self.pool.keeper().renew(&others, now);
            self.pool.keeper().keep(&needed, ttl, now);
            end = first;
        }
    }

    /// Keeps those of the blocks at these indexes that a sequence's breakpoints need, and that it gets only now.
    pub(super) fn keep_fresh(&mut self, row: Row, group: Group, indexes: impl Iterator<Item = usize>) {
        let sequence = self.table.get(row);
        if sequence.kept.is_empty() {
            return;
        }
        let (span, now) = (self.geometry.groups[usize::from(group)], millis(self.now));
        let mut needed: Vec<usize> =
            indexes.filter(|index| is_needed(&sequence.kept, *index, span, self.geometry)).collect();
        needed.sort_unstable();
        for index in needed.into_iter().rev() {
            let longer = sequence.kept.iter().find(|prefix| index < prefix.num_blocks);
            if let (Some(prefix), Some(block)) = (longer, sequence.table(group).get(index)) {
                self.pool.keeper().keep_held(&[block], prefix.ttl, now);
            }
        }
        self.pool.keeper().limit(sequence.tenant);
    }

    /// The tokens of a prompt's kept prefixes that its tenant's limit leaves.
    pub(super) fn num_kept_tokens(&self, row: Row) -> usize {
        let sequence = self.table.get(row);
        let num_blocks = num_kept_blocks(&sequence.kept);
        let limit = self.pool.accounts().get(sequence.tenant).share.keep_limit;
        let is_kept = |block: BlockId| self.pool.parking().is_kept(block);
        let num_kept = if self.geometry.groups[0].is_full() {
            let kept = |index: &usize| sequence.table(0).get(*index).is_some_and(is_kept);
            (0..num_blocks).rev().find(kept).map_or(0, |last| last + 1)
        } else {
            num_blocks.min(limit)
        };
        num_kept * self.geometry.block_size
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::books::plans::{Admission, Breakpoint, CacheUse, GrantedStep, StepRequest};
    use crate::books::tests::{Bench, admission};
    use crate::cache::accounts::Share;
    use crate::cache::advice::{KEPT, UNADVISED};

    fn kept(seq_id: i64, tokens: &[i32], breakpoints: &[(usize, f64)]) -> Admission {
        let breakpoints = breakpoints.iter().map(|(num_tokens, ttl)| Breakpoint { num_tokens: *num_tokens, ttl: *ttl });
        Admission { breakpoints: breakpoints.collect(), ..admission(seq_id, tokens) }
    }

    /// Plans an admission of lease "a" at a time, computes it, and releases it.
    fn serve(bench: &mut Bench, admission: Admission, now: f64) -> GrantedStep {
        let seq_id = admission.seq_id;
        let plan = bench.plan_at("a", &StepRequest { admissions: vec![admission], ..StepRequest::default() }, now);
        assert!(plan.refusals.is_empty(), "{:?}", plan.refusals);
        bench.settle();
        bench.plan_at("a", &StepRequest { releases: vec![seq_id], ..StepRequest::default() }, now);
        bench.settle();
        assert_eq!(bench.0.violations(), [""; 0]);
        plan
    }

    fn with_limit(mut bench: Bench, keep_limit: usize) -> Bench {
        let num_usable = bench.0.geometry().num_blocks - 1;
        bench.0.set_shares(Share { keep_limit, ..Share::everything(num_usable) }, Default::default());
        bench
    }

    fn num_kept(bench: &Bench) -> usize {
        bench.0.pool().parking().keeps().map_or(0, |keeps| keeps.num_kept(0))
    }

    fn num_found(bench: &Bench, tokens: &[i32]) -> usize {
        bench.0.num_cached_tokens(tokens, &b"".into(), b"")
    }

    #[test]
    fn a_kept_prefix_is_there_after_all_others_are_evicted_and_until_its_end() {
        let mut bench = Bench::new(8);
        let plan = serve(&mut bench, kept(1, &[1, 2, 3, 4, 5, 6, 7], &[(5, 100.0)]), 0.0);
        assert_eq!((plan.admitted_kept_counts, plan.admitted_written_counts, num_kept(&bench)), (vec![4], vec![6], 2));
        serve(&mut bench, admission(2, &[9; 12]), 1.0);
        assert_eq!(num_found(&bench, &[1, 2, 3, 4, 5, 6, 7]), 4, "what is behind the breakpoint went first");
        assert_eq!(bench.0.next_keep_end(0), Some(100_000));
        bench.0.advance(99.9).unwrap();
        assert_eq!([1, 2, 3].map(|block| bench.0.pool().parking().level(block)), [KEPT, KEPT, UNADVISED]);
        bench.0.advance(100.0).unwrap();
        assert_eq!((num_kept(&bench), bench.0.pool().parking().level(1), bench.0.violations()), (0, UNADVISED, vec![]));
        serve(&mut bench, admission(3, &[8; 13]), 101.0);
        assert!(num_found(&bench, &[1, 2, 3, 4, 5, 6, 7]) < 4);
    }

    #[test]
    fn running_sequences_come_first_and_the_tail_of_a_kept_prefix_is_evicted_before_its_head() {
        let mut bench = Bench::new(6);
        serve(&mut bench, kept(1, &[1, 2, 3, 4, 5, 6, 7], &[(7, 100.0)]), 0.0);
        serve(&mut bench, admission(2, &[9; 10]), 1.0);
        assert_eq!((num_found(&bench, &[1, 2, 3, 4, 5, 6, 7]), num_kept(&bench)), (2, 1));
        assert_eq!(bench.0.pool().parking().keeps().unwrap().num_evicted(), 2);
    }

    #[test]
    fn each_hit_renews_with_the_longest_time_of_its_blocks() {
        let mut bench = Bench::new(12);
        serve(&mut bench, kept(1, &[1, 2, 3, 4, 5, 6, 7], &[(2, 10.0), (4, 30.0), (6, 20.0)]), 0.0);
        let until = |bench: &Bench| [1, 2, 3].map(|block| bench.0.pool().parking().keeps().unwrap().until(block));
        assert_eq!(
            until(&bench),
            [Some(30_000), Some(30_000), Some(20_000)],
            "a prefix lives as long as its longest use"
        );
        serve(&mut bench, admission(2, &[1, 2, 3, 4, 8]), 5.0);
        assert_eq!(until(&bench), [Some(35_000), Some(35_000), Some(20_000)], "a hit without a breakpoint renews, too");
        serve(&mut bench, kept(3, &[1, 2, 3, 4, 5, 6, 7], &[(6, 3.0)]), 6.0);
        assert_eq!(until(&bench), [Some(36_000), Some(36_000), Some(26_000)], "a shorter time shortens nothing");
        serve(&mut bench, Admission { cache_use: CacheUse::WriteOnly, ..admission(4, &[1, 2, 3]) }, 7.0);
        assert_eq!(until(&bench), [Some(36_000), Some(36_000), Some(26_000)], "what finds nothing uses nothing");
    }

    #[test]
    fn beyond_the_limit_the_least_recently_used_prefix_ends_first_and_of_one_its_tail() {
        let mut bench = with_limit(Bench::new(20), 4);
        serve(&mut bench, kept(1, &[1, 1, 1, 1, 0], &[(4, 9.0)]), 0.0);
        serve(&mut bench, kept(2, &[2, 2, 2, 2, 0], &[(4, 9.0)]), 1.0);
        serve(&mut bench, admission(3, &[1, 1, 1, 1, 0]), 2.0);
        let plan = serve(&mut bench, kept(4, &[3, 3, 0], &[(2, 9.0)]), 3.0);
        let is_kept = |bench: &Bench, block| bench.0.pool().parking().is_kept(block);
        let of = |bench: &Bench, tokens: &[i32]| {
            bench
                .0
                .pool()
                .index()
                .find(&hashes(tokens))
                .into_iter()
                .map(|block| is_kept(bench, block))
                .collect::<Vec<_>>()
        };
        assert_eq!((plan.admitted_kept_counts, num_kept(&bench)), (vec![2], 4));
        assert_eq!((of(&bench, &[1, 1, 1, 1]), of(&bench, &[2, 2, 2, 2])), (vec![true, true], vec![true, false]));
        let plan = serve(&mut bench, kept(5, &[4; 13], &[(2, 9.0), (12, 9.0)]), 4.0);
        assert_eq!((plan.admitted_kept_counts, num_kept(&bench)), (vec![8], 4), "the head, as far as the limit allows");
        assert_eq!(of(&bench, &[4; 12]), [true, true, true, true, false, false]);
        let mut none = with_limit(bench, 0);
        assert_eq!((num_kept(&none), none.0.violations()), (0, vec![]), "a new limit holds at once");
        let plan = serve(&mut none, kept(6, &[5, 5, 0], &[(2, 9.0)]), 5.0);
        assert_eq!((plan.admitted_kept_counts, num_kept(&none)), (vec![0], 0));
    }

    fn hashes(tokens: &[i32]) -> Vec<Hash> {
        let (mut hashes, root) = (Vec::new(), crate::cache::prefix::root_hash(b"", &b"".into(), b"f"));
        crate::cache::prefix::chain_hashes(root, tokens, 2, &mut hashes);
        hashes
    }

    #[test]
    fn the_limit_of_one_tenant_ends_nothing_of_another() {
        let mut bench = with_limit(Bench::new(20), 2);
        bench.0.open_lease("o", b"other", 30.0);
        let request =
            StepRequest { admissions: vec![kept(1, &[7, 7, 7, 7, 0], &[(4, 9.0)])], ..StepRequest::default() };
        bench.plan_at("o", &request, 0.0);
        serve(&mut bench, kept(1, &[1, 1, 1, 1, 0], &[(4, 9.0)]), 1.0);
        serve(&mut bench, kept(2, &[2, 2, 2, 2, 0], &[(4, 9.0)]), 2.0);
        let keeps = bench.0.pool().parking().keeps().unwrap();
        let other = bench.0.tenants().find(b"other").unwrap();
        assert_eq!((keeps.num_kept(0), keeps.num_kept(other), bench.0.violations()), (2, 2, vec![]));
    }

    #[test]
    fn a_reset_and_a_failed_step_end_what_is_kept() {
        let mut bench = Bench::new(8);
        serve(&mut bench, kept(1, &[1, 2, 3, 4, 5], &[(4, 9.0)]), 0.0);
        bench.plan(StepRequest { admissions: vec![admission(2, &[1, 2, 3])], ..StepRequest::default() });
        bench.0.reset_prefix_cache(0, 9, 1.0, b"").unwrap();
        assert_eq!((num_kept(&bench), bench.0.violations()), (0, vec![]), "of held blocks, too");
        bench.settle();
        bench.plan(StepRequest { admissions: vec![kept(3, &[6; 5], &[(4, 9.0)])], ..StepRequest::default() });
        assert_eq!(num_kept(&bench), 2);
        bench.release(&[3]);
        let report = crate::books::settle::StepReport {
            outcome: crate::books::settle::StepOutcome::Failed,
            ..bench.report("a")
        };
        bench.0.settle("a", &report).unwrap();
        bench.0.settle("a", &bench.report("a")).unwrap();
        assert_eq!((num_kept(&bench), bench.0.violations()), (0, vec![]), "nothing was computed");
    }

    #[test]
    fn what_two_leases_compute_at_once_is_kept_in_the_block_that_is_found() {
        let mut bench = Bench::new(12);
        bench.plan_for("b", StepRequest { admissions: vec![admission(1, &[1, 2, 3, 4, 5])], ..StepRequest::default() });
        bench.plan(StepRequest { admissions: vec![kept(1, &[1, 2, 3, 4, 5], &[(4, 9.0)])], ..StepRequest::default() });
        bench.0.settle("b", &bench.report("b")).unwrap();
        bench.settle();
        let found = bench.0.pool().index().find(&hashes(&[1, 2, 3, 4]));
        assert!(found.iter().all(|block| bench.0.pool().parking().is_kept(*block)), "{found:?}");
        assert_eq!((num_kept(&bench), bench.0.violations()), (2, vec![]));
    }

    #[test]
    fn what_is_cached_already_or_never_published_is_not_written() {
        let mut bench = Bench::new(12);
        let counts = |plan: GrantedStep| (plan.admitted_cached_counts[0], plan.admitted_written_counts[0]);
        assert_eq!(counts(serve(&mut bench, admission(1, &[1, 2, 3, 4]), 0.0)), (0, 4));
        assert_eq!(
            counts(serve(&mut bench, admission(2, &[1, 2, 3, 4]), 0.0)),
            (2, 0),
            "its last token is computed again"
        );
        let unread = Admission { cache_use: CacheUse::WriteOnly, ..admission(3, &[1, 2, 3, 4, 5, 6]) };
        assert_eq!(counts(serve(&mut bench, unread, 0.0)), (0, 2));
        let unwritten = Admission { cache_use: CacheUse::None, ..admission(4, &[7, 7, 7]) };
        assert_eq!(counts(serve(&mut bench, unwritten, 0.0)), (0, 0));
        let resumed = Admission { resumed: true, ..admission(5, &[8, 8, 8]) };
        assert_eq!(counts(serve(&mut bench, resumed, 0.0)), (0, 0), "it was counted when it was admitted first");
        let tokens = bench.0.pool().accounts().get(0).tokens;
        assert_eq!((tokens.admitted, tokens.cached, tokens.written, bench.0.counters().written_tokens), (17, 2, 6, 6));
        let mut states = Bench::with_states(8);
        assert_eq!(counts(serve(&mut states, kept(1, &[1, 2, 3], &[(2, 9.0)]), 0.0)), (0, 0));
        assert_eq!(num_kept(&states), 0);
    }

    #[test]
    fn the_windows_of_a_breakpoint_are_kept_though_the_sequence_passes_them() {
        let mut bench = Bench::with_groups(20, &[Span::Full, Span::Sliding(4)]);
        let tokens: Vec<i32> = (1..16).collect();
        let mut chunked = kept(1, &tokens, &[(8, 100.0)]);
        chunked.max_compute = 4;
        bench.plan_at("a", &StepRequest { admissions: vec![chunked], ..StepRequest::default() }, 0.0);
        bench.settle();
        for num_tokens in [4, 4, 3] {
            bench.extend(1, num_tokens, &[]);
            bench.settle();
        }
        bench.release(&[1]);
        bench.settle();
        assert_eq!((num_kept(&bench), bench.0.violations()), (4 + 2, vec![]), "what its next token sees");
        serve(&mut bench, admission(2, &[50; 13]), 1.0);
        assert_eq!(num_found(&bench, &tokens), 8);
        serve(&mut bench, admission(3, &tokens[..9]), 90.0);
        bench.0.advance(150.0).unwrap();
        assert_eq!((num_kept(&bench), num_found(&bench, &tokens[..9])), (6, 8), "a hit renews the windows, too");
        bench.0.advance(190.0).unwrap();
        assert_eq!((num_kept(&bench), bench.0.violations()), (0, vec![]));
    }

    #[test]
    fn a_hit_behind_a_breakpoint_renews_the_windows_that_it_passed() {
        let mut bench = Bench::with_groups(30, &[Span::Full, Span::Sliding(4)]);
        let tokens: Vec<i32> = (1..16).collect();
        serve(&mut bench, kept(1, &tokens, &[(6, 10.0)]), 0.0);
        assert_eq!(num_kept(&bench), 3 + 2);
        serve(&mut bench, kept(2, &tokens, &[(6, 5.0), (14, 10.0)]), 8.0);
        bench.0.advance(17.0).unwrap();
        let ends = |bench: &Bench| {
            let keeps = bench.0.pool().parking().keeps().unwrap();
            keeps.of_tenant(0).map(|block| keeps.until(block).unwrap()).collect::<std::collections::BTreeSet<_>>()
        };
        assert_eq!((ends(&bench).into_iter().collect::<Vec<_>>(), num_kept(&bench)), (vec![18_000], 7 + 2 + 2));
    }

    #[test]
    fn a_sequence_that_comes_back_from_the_host_tier_uses_its_prefix() {
        let mut bench = Bench::new(8);
        bench.plan_at(
            "a",
            &StepRequest { admissions: vec![kept(1, &[1, 2, 3, 4, 5], &[(4, 10.0)])], ..StepRequest::default() },
            0.0,
        );
        bench.settle();
        bench.plan_at("a", &StepRequest { offloads: vec![1], ..StepRequest::default() }, 1.0);
        bench.settle();
        serve(&mut bench, admission(2, &[9; 15]), 2.0);
        assert_eq!(num_kept(&bench), 0, "running sequences took them");
        let restores = vec![crate::books::plans::Restore { seq_id: 1, max_compute: 0 }];
        let plan = bench.plan_at("a", &StepRequest { restores, ..StepRequest::default() }, 3.0);
        assert_eq!((plan.restored_ids, num_kept(&bench), bench.0.next_keep_end(0)), (vec![1], 2, Some(13_000)));
        bench.settle();
        assert_eq!(bench.0.violations(), [""; 0]);
    }

    #[test]
    fn a_trimmed_prompt_keeps_no_blocks_of_other_tokens() {
        let mut bench = Bench::new(12);
        bench.plan(StepRequest {
            admissions: vec![kept(1, &[1, 2, 3, 4, 5, 6], &[(6, 10.0)])],
            ..StepRequest::default()
        });
        bench.settle();
        bench.trim(1, 3);
        assert!(bench.extend(1, 3, &[7, 8, 9]).refusals.is_empty());
        bench.settle();
        assert!(!bench.0.pool().parking().is_kept(bench.blocks(1)[1]));
        assert_eq!(bench.0.violations(), [""; 0]);
    }
}
