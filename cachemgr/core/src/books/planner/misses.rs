//! Why admissions find no more, and those that wait for what other leases compute.

use crate::books::explainer::{Asked, Explainer, is_being_filled};
use crate::books::miss::Miss;
use crate::books::planner::StepPlanner;
use crate::books::plans::{Admission, AdmissionMiss};
use crate::cache::groups::Group;
use crate::cache::losses::{Cause, Loss};
use crate::cache::prefix::Hash;
use crate::cache::tenants::TenantId;
use crate::errors::{Reason, Refusal};

impl StepPlanner<'_> {
    /// An admission that waits for its prefix, and finds so many blocks: refused while a step in flight of another lease
    /// fills the next one of those that it may find. Cost: O(steps in flight).
    pub(super) fn refuse_computed_elsewhere(
        &mut self,
        admission: &Admission,
        sharable: &[Hash],
        num_found: usize,
    ) -> Option<Refusal> {
        let next = sharable.get(num_found).filter(|_| admission.waits_for_prefix)?;
        let block_size = self.geometry.block_size;
        if !is_being_filled(self.fills_elsewhere.iter(), num_found, next, self.table, block_size) {
            return None;
        }
        let (seq_id, num_tokens) = (admission.seq_id, num_found * block_size);
        let message = format!("another lease computes the prefix of sequence {seq_id} behind {num_tokens} tokens");
        let refusal = Refusal::new(Reason::PrefixBeingComputed, message);
        Some(refusal.with("sequence_id", seq_id).with("tokens", num_tokens))
    }

    /// The first miss of an admission that asks for it, as its tenant may know it. Nothing was allocated for it yet.
    ///
    /// `hashes` are those of its full blocks, of which so many were found.
    pub(super) fn explain_miss(
        &mut self,
        admission: &Admission,
        tenant: TenantId,
        root: &Hash,
        hashes: &[Hash],
        num_found: usize,
    ) -> Option<AdmissionMiss> {
        if !admission.explains_miss || !admission.cache_use.reads() {
            return None;
        }
        let (index, group) = self.first_missing(hashes, num_found)?;
        let (missing, size) = (hashes[index], self.geometry.block_size);
        let own = self.lease.in_flight.iter().chain([&self.step]).flat_map(|step| &step.fills);
        let fills = self.fills_elsewhere.iter().chain(own);
        let miss = if is_being_filled(fills, index, &missing, self.table, size) {
            Miss::BeingComputed
        } else {
            let mut explainer = Explainer { geometry: self.geometry, pool: self.pool, num_left: self.num_explained };
            let tokens = &admission.tokens[..(index + 1) * size];
            let asked = Asked { tokens, root, adapter: &admission.namespace.adapter, tenant: Some(tenant) };
            let miss = explainer.explain(&asked, &missing, group, false);
            self.num_explained = explainer.num_left;
            miss
        };
        let lost_by = miss.loss().and_then(|loss| self.own_name(loss, tenant));
        Some(AdmissionMiss { seq_id: admission.seq_id as i32, index, miss, lost_by })
    }

    /// The name of a tenant, if a loss is by it. It may not know the other tenants and the operators.
    fn own_name(&self, loss: &Loss, tenant: TenantId) -> Option<Vec<u8>> {
        let name = self.tenants.name(tenant);
        let is_own = match loss.cause {
            Cause::Evicted { tenant: by, .. } => by == tenant,
            Cause::Reset { by } => self.pool.records.callers.name(by) == Some(name),
        };
        is_own.then(|| name.to_vec())
    }

    /// The first block and group without which no more is found. Blocks that steps in flight fill count as found.
    fn first_missing(&self, hashes: &[Hash], num_found: usize) -> Option<(usize, Group)> {
        let tiers = self.tiers(hashes, false);
        let missing = tiers.find(&tiers.prefix.find()).missing?;
        if missing.0 >= num_found || !self.geometry.groups[usize::from(missing.1)].is_full() {
            return Some(missing);
        }
        (num_found < hashes.len()).then_some((num_found, 0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::books::planner::tests::reasons;
    use crate::books::plans::{GrantedStep, PlanItem, StepRequest};
    use crate::books::settle::{StepOutcome, StepReport};
    use crate::books::tests::{Bench, admission, geometry};
    use crate::books::{Books, geometry::Geometry};
    use crate::cache::groups::Span;

    /// Leases "a" and "b" of tenant "alice", and "o" of "other".
    fn bench(num_usable: usize, groups: &[Span]) -> Bench {
        let sizes = Geometry { groups: groups.to_vec(), ..geometry(num_usable) };
        let mut books = Books::new(sizes, "lru").unwrap();
        for (lease, tenant) in [("a", "alice"), ("b", "alice"), ("o", "other")] {
            books.open_lease(lease, tenant.as_bytes(), 30.0);
        }
        Bench(books)
    }

    fn admit(bench: &mut Bench, lease_id: &str, admission: Admission, now: f64) -> GrantedStep {
        let request = StepRequest { admissions: vec![admission], ..StepRequest::default() };
        bench.plan_at(lease_id, &request, now)
    }

    fn settle(bench: &mut Bench, lease_id: &str) {
        bench.0.settle(lease_id, &bench.report(lease_id)).unwrap();
    }

    /// Computed, and let go of.
    fn cache(bench: &mut Bench, lease_id: &str, tokens: &[i32], now: f64) {
        assert_eq!(reasons(&admit(bench, lease_id, admission(9, tokens), now)), []);
        settle(bench, lease_id);
        bench.plan_for(lease_id, StepRequest { releases: vec![9], ..StepRequest::default() });
        settle(bench, lease_id);
    }

    fn waiting(seq_id: i64, tokens: &[i32]) -> Admission {
        Admission { waits_for_prefix: true, ..admission(seq_id, tokens) }
    }

    fn explained(bench: &mut Bench, lease_id: &str, tokens: &[i32]) -> Option<AdmissionMiss> {
        let asked = Admission { explains_miss: true, ..admission(5, tokens) };
        let plan = admit(bench, lease_id, asked, 50.0);
        assert_eq!(reasons(&plan), []);
        settle(bench, lease_id);
        bench.plan_for(lease_id, StepRequest { releases: vec![5], ..StepRequest::default() });
        settle(bench, lease_id);
        assert_eq!(bench.0.violations(), [""; 0]);
        plan.misses.first().cloned()
    }

    #[test]
    fn an_admission_waits_for_the_next_block_that_another_lease_computes() {
        let mut bench = bench(20, &[Span::Full]);
        let refused = [(PlanItem::Admission, 2, Reason::PrefixBeingComputed)];
        admit(&mut bench, "a", admission(1, &[1, 2, 3, 4, 5]), 0.0);
        let plan = admit(&mut bench, "b", waiting(2, &[1, 2, 3, 4, 6]), 0.0);
        assert_eq!(reasons(&plan), refused);
        let refusal = &plan.refusals[0].refusal;
        assert_eq!(refusal.message, "another lease computes the prefix of sequence 2 behind 0 tokens");
        assert!(refusal.metadata.iter().all(|(_, value)| refusal.message.contains(value)), "{refusal:?}");
        assert_eq!(bench.0.pool().accounts().get(0).tokens.admitted, 5, "what is refused does not count");
        assert_eq!(reasons(&admit(&mut bench, "b", waiting(3, &[2, 2, 3]), 0.0)), [], "another prefix");
        assert_eq!(reasons(&admit(&mut bench, "o", waiting(3, &[1, 2, 3]), 0.0)), [], "another tenant's");
        assert_eq!(reasons(&admit(&mut bench, "b", admission(4, &[1, 2, 3]), 0.0)), [], "it does not wait");
        settle(&mut bench, "a");
        settle(&mut bench, "b");
        let plan = admit(&mut bench, "b", waiting(2, &[1, 2, 3, 4, 6]), 0.0);
        assert_eq!((reasons(&plan), plan.admitted_cached_counts), (vec![], vec![4]));
    }

    #[test]
    fn nobody_waits_for_its_own_lease_for_a_failed_step_or_a_lease_that_has_ended() {
        let mut bench = bench(20, &[Span::Full]);
        admit(&mut bench, "a", admission(1, &[1, 2, 3]), 0.0);
        let plan = admit(&mut bench, "a", waiting(2, &[1, 2, 3, 4, 5]), 0.0);
        assert_eq!((reasons(&plan), plan.admitted_cached_counts), (vec![], vec![2]), "it shares the block at once");
        assert_eq!(reasons(&admit(&mut bench, "b", waiting(2, &[1, 2, 3]), 0.0)).len(), 1);
        let report = StepReport { outcome: StepOutcome::Failed, ..bench.report("a") };
        bench.0.settle("a", &report).unwrap();
        assert_eq!(reasons(&admit(&mut bench, "b", waiting(2, &[1, 2, 3]), 0.0)), [], "nothing is in flight");
        assert_eq!(reasons(&admit(&mut bench, "a", waiting(7, &[1, 2, 3]), 0.0)).len(), 1);
        bench.0.end_lease("b");
        assert_eq!(reasons(&admit(&mut bench, "a", waiting(7, &[1, 2, 3]), 0.0)), [], "its report may never come");
    }

    #[test]
    fn the_first_miss_is_told_as_the_tenant_may_know_it() {
        let mut bench = bench(6, &[Span::Full]);
        let reason = |miss: Option<AdmissionMiss>| miss.map(|miss| (miss.index, miss.miss.loss().map(|loss| loss.at)));
        cache(&mut bench, "o", &[1, 2, 3, 4], 1.0);
        let miss = explained(&mut bench, "a", &[1, 2, 3, 4]).unwrap();
        assert_eq!((miss.miss, miss.index), (Miss::NeverComputed, 0), "not that another tenant has it");
        assert_eq!(explained(&mut bench, "a", &[1, 2, 3, 4]), None, "it is cached, though not all of it is used");
        assert_eq!(explained(&mut bench, "a", &[1, 2, 9, 9, 9]).unwrap().index, 1);
        cache(&mut bench, "o", &[8; 12], 7.0);
        let miss = explained(&mut bench, "a", &[1, 2, 3]);
        assert_eq!(
            (reason(miss.clone()), miss.unwrap().lost_by),
            (Some((0, Some(7.0))), None),
            "not which tenant evicted it"
        );
        cache(&mut bench, "a", &[7; 12], 9.0);
        let miss = explained(&mut bench, "b", &[1, 2, 3]).unwrap();
        assert_eq!((miss.miss.loss().unwrap().at, miss.lost_by), (9.0, Some(b"alice".to_vec())));
        for (by, told) in [("op", None), ("alice", Some(b"alice".to_vec()))] {
            bench.0.reset_prefix_cache(0, 7, 11.0, by.as_bytes()).unwrap();
            let miss = explained(&mut bench, "b", &[1, 2, 3]).unwrap();
            assert!(matches!(miss.miss, Miss::Lost(Loss { cause: Cause::Reset { .. }, .. })), "{miss:?}");
            assert_eq!(miss.lost_by, told);
        }
        admit(&mut bench, "a", admission(1, &[4, 4, 4]), 12.0);
        assert_eq!(explained(&mut bench, "b", &[4, 4, 5]).unwrap().miss, Miss::BeingComputed);
        assert_eq!(admit(&mut bench, "b", admission(6, &[5, 5, 5]), 13.0).misses, [], "only who asks is told");
    }

    #[test]
    fn a_window_that_is_gone_is_told_apart() {
        let mut bench = bench(16, &[Span::Full, Span::Sliding(2)]);
        let tokens: Vec<i32> = (1..10).collect();
        cache(&mut bench, "a", &tokens, 1.0);
        let index = bench.0.pool().index();
        let root = crate::cache::prefix::root_hash(b"alice", &b"".into(), b"f");
        let mut hashes = Vec::new();
        crate::cache::prefix::chain_hashes(root, &tokens, 2, &mut hashes);
        let windows: Vec<_> =
            hashes.iter().filter_map(|hash| index.lookup(&crate::cache::groups::identity(hash, 1))).collect();
        assert!(!windows.is_empty());
        let asker = crate::cache::tenants::Asker { tenant: 0, lease: [0; 8], now: 3.0 };
        let lost = bench.0.pool_mut();
        for block in windows {
            lost.evict_for_test(block, &asker);
        }
        let miss = explained(&mut bench, "b", &tokens).unwrap();
        assert!(matches!(miss.miss, Miss::WindowLost(Some(Loss { at: 3.0, .. }))), "{miss:?}");
        assert_eq!(miss.index, 3, "the last one that could be found");
    }
}
