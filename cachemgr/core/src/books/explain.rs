//! Why a prefix is not found.

use crate::books::Books;
use crate::books::explainer::{Asked, Explainer, is_being_filled};
use crate::books::hits::Tiers;
use crate::books::miss::Miss;
use crate::cache::groups::{Group, identity};
use crate::cache::prefix::{Hash, Namespace, chain_hashes, root_hash};

/// The limit of blocks looked up by hashes under other roots for one answer: about ten milliseconds.
const MAX_HASHED: usize = 65_536;

/// The found part of a prefix, and the reason for the first miss.
#[derive(Debug, Clone, PartialEq)]
pub struct Explanation {
    /// Full blocks of the tokens.
    pub num_blocks: usize,
    /// Number of leading blocks that an admission would find.
    pub num_found: usize,
    /// Of these, the ones behind the pool's, which are in the host tier.
    pub num_in_host: usize,
    /// Behind these, the ones on the disk; they count as found.
    pub num_on_disk: usize,
    /// Index, layer group and prefix hash of the block without which no more is found.
    pub missing: Option<(usize, Group, Hash)>,
    pub miss: Miss,
    /// Cached blocks after it.
    pub num_stranded: usize,
}

impl Books {
    /// Explains why no more of these tokens is found. Changes nothing except hashes, which are cached. Reports other
    /// tenants' content only if `with_other_tenants`. Cost: one SHA-256 per block, as a lookup. If the miss is not a
    /// known loss, also O(steps in flight), and one SHA-256 for each block of the prefix that is cached under another
    /// root, at most MAX_HASHED.
    pub fn explain(
        &mut self,
        tokens: &[i32],
        namespace: &Namespace,
        tenant: &[u8],
        with_other_tenants: bool,
    ) -> Explanation {
        let size = self.geometry.block_size;
        let root = root_hash(tenant, namespace, &self.geometry.model_fingerprint);
        let mut hashes = Vec::new();
        chain_hashes(root, self.geometry.holdable(tokens), size, &mut hashes);
        let num_usable = hashes.len().min(tokens.len().saturating_sub(1) / size); // one token is left to compute
        let usable = self.tiers(&hashes[..num_usable], true);
        let in_pool = usable.prefix.find();
        let num_with_host = Tiers { disk: None, ..usable }.find(&in_pool).num_blocks;
        let (num_blocks, num_found) = (hashes.len(), usable.find(&in_pool).num_blocks);
        let (num_in_host, num_on_disk) = (num_with_host - in_pool.num_blocks, num_found - num_with_host);
        let is_all_found = Explanation {
            num_blocks,
            num_found,
            num_in_host,
            num_on_disk,
            missing: None,
            miss: Miss::None,
            num_stranded: 0,
        };
        let whole = self.tiers(&hashes, true);
        let Some((index, group)) = whole.find(&whole.prefix.find()).missing else { return is_all_found };
        let missing = hashes[index];
        let is_known = |hash: &&Hash| self.pool.index().lookup(&identity(hash, group)).is_some();
        let num_stranded = hashes[index + 1..].iter().filter(is_known).count();
        let fills = self.leases.steps().flat_map(|step| &step.fills);
        let miss = if is_being_filled(fills, index, &missing, &mut self.table, size) {
            Miss::BeingComputed
        } else {
            let tokens = &tokens[..(index + 1) * size];
            let asked = Asked { tokens, root: &root, adapter: &namespace.adapter, tenant: self.tenants.find(tenant) };
            self.explainer().explain(&asked, &missing, group, with_other_tenants)
        };
        Explanation { missing: Some((index, group, missing)), miss, num_stranded, ..is_all_found }
    }

    fn explainer(&self) -> Explainer<'_> {
        Explainer { geometry: &self.geometry, pool: &self.pool, num_left: MAX_HASHED }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::books::plans::StepRequest;
    use crate::books::settle::StepOutcome;
    use crate::books::tests::{Bench, admission, geometry};
    use crate::cache::losses::{Cause, Loss};

    /// Leases "a" and "c" of tenant "alice" and "b" of "bob".
    fn bench(num_usable: usize) -> Bench {
        let mut books = Books::new(geometry(num_usable), "lru").unwrap();
        for (lease, tenant) in [("a", "alice"), ("b", "bob"), ("c", "alice")] {
            books.open_lease(lease, tenant.as_bytes(), 30.0);
        }
        Bench(books)
    }

    fn admit(bench: &mut Bench, lease_id: &str, tokens: &[i32], salt: &[u8], now: f64) {
        let mut admitted = admission(1, tokens);
        admitted.namespace = salt.into();
        let request = StepRequest { admissions: vec![admitted], ..StepRequest::default() };
        assert!(bench.plan_at(lease_id, &request, now).refusals.is_empty());
    }

    fn settle(bench: &mut Bench, lease_id: &str) {
        bench.0.settle(lease_id, &bench.report(lease_id)).unwrap();
    }

    /// Computed, and let go of.
    fn cache(bench: &mut Bench, lease_id: &str, tokens: &[i32], salt: &[u8]) {
        admit(bench, lease_id, tokens, salt, 1.0);
        settle(bench, lease_id);
        bench.plan_for(lease_id, StepRequest { releases: vec![1], ..StepRequest::default() });
        settle(bench, lease_id);
    }

    /// Hashes of alice's blocks.
    fn hashes_of(tokens: &[i32]) -> Vec<Hash> {
        let mut hashes = Vec::new();
        chain_hashes(root_hash(b"alice", &b"".into(), b"f"), tokens, 2, &mut hashes);
        hashes
    }

    fn miss(bench: &mut Bench, tokens: &[i32]) -> Miss {
        bench.0.explain(tokens, &b"".into(), b"alice", true).miss
    }

    #[test]
    fn it_says_how_far_and_what_is_behind() {
        let mut bench = bench(8);
        cache(&mut bench, "a", &[1, 2, 3, 4, 5, 6, 7], b"");
        let whole = bench.0.explain(&[1, 2, 3, 4, 5, 6, 7], &b"".into(), b"alice", false);
        assert_eq!((whole.num_blocks, whole.num_found, whole.missing, whole.miss), (3, 3, None, Miss::None));
        bench.0.pool.drop_cached(1, 2, 9.0, 0);
        let holed = bench.0.explain(&[1, 2, 3, 4, 5, 6, 7], &b"".into(), b"alice", false);
        assert_eq!((holed.num_blocks, holed.num_found, holed.num_stranded), (3, 0, 2));
        let (_, _, missing) = holed.missing.unwrap();
        assert_eq!(holed.miss, Miss::Lost(Loss { hash: missing, at: 9.0, cause: Cause::Reset { by: 0 } }));
        let other = bench.0.explain(&[1, 2, 9, 9, 5, 6], &b"".into(), b"alice", false);
        assert_eq!((other.num_found, other.num_stranded), (0, 0));
        assert_eq!(bench.0.explain(&[1], &b"".into(), b"alice", false).num_blocks, 0);
        cache(&mut bench, "c", &[7, 7, 8, 8, 9, 9, 6], b"");
        let [_, middle, _] = bench.0.pool.index().find(&hashes_of(&[7, 7, 8, 8, 9, 9]))[..] else {
            panic!("not found")
        };
        bench.0.pool.drop_cached(middle, middle + 1, 9.0, 0);
        let holed = bench.0.explain(&[7, 7, 8, 8, 9, 9], &b"".into(), b"alice", false);
        assert_eq!((holed.num_blocks, holed.num_found, holed.num_stranded), (3, 1, 1));
    }

    #[test]
    fn an_eviction_is_told_with_when_and_for_whom() {
        let mut bench = bench(4);
        cache(&mut bench, "a", &[1, 2], b"");
        admit(&mut bench, "b", &[9; 8], b"", 5.0);
        let cause = Cause::Evicted { tenant: bench.0.tenants.find(b"bob").unwrap(), lease: *b"b\0\0\0\0\0\0\0" };
        match miss(&mut bench, &[1, 2]) {
            Miss::Lost(loss) => assert_eq!((loss.at, loss.cause), (5.0, cause)),
            other => panic!("it was evicted, not {other:?}"),
        }
    }

    #[test]
    fn what_may_have_been_forgotten_is_not_said_to_be_never_computed() {
        let mut bench = bench(4);
        cache(&mut bench, "a", &[1, 2], b"");
        assert_eq!(miss(&mut bench, &[3, 4]), Miss::NeverComputed);
        for number in 0..3_000 {
            cache(&mut bench, "b", &[number / 50, number % 50, 9, 9, 9, 9, 9, 9], b"");
        }
        assert_eq!(miss(&mut bench, &[1, 2]), Miss::Unknown, "its eviction is forgotten");
        assert_eq!(miss(&mut bench, &[60, 61]), Miss::Unknown, "nor is it known that this was never computed");
        cache(&mut bench, "a", &[1, 2], b"y");
        assert_eq!(miss(&mut bench, &[1, 2]), Miss::OtherSalt, "what is known is told");
    }

    #[test]
    fn what_was_evicted_and_is_to_be_computed_again_is_counted() {
        let mut bench = bench(4);
        cache(&mut bench, "a", &[1, 2, 3, 4, 5], b"");
        cache(&mut bench, "b", &[9; 8], b"");
        assert_eq!(bench.0.counters().recomputed_tokens, 0);
        cache(&mut bench, "a", &[1, 2, 3, 4], b"");
        assert_eq!(bench.0.counters().recomputed_tokens, 2, "the last token is always computed");
        cache(&mut bench, "b", &[8; 8], b"");
        cache(&mut bench, "a", &[1, 2, 3, 4, 5], b"");
        assert_eq!(bench.0.counters().recomputed_tokens, 6);
        let request = StepRequest { admissions: vec![admission(2, &[9; 12])], ..StepRequest::default() };
        assert_eq!(bench.plan_for("b", request).refusals.len(), 1);
        assert_eq!(bench.0.counters().recomputed_tokens, 6, "what is refused is not computed");
    }

    #[test]
    fn a_step_in_flight_of_any_lease_of_the_tenant_computes_it() {
        let mut bench = bench(8);
        admit(&mut bench, "c", &[1, 2, 3, 4, 5], b"", 1.0);
        assert_eq!(miss(&mut bench, &[1, 2, 3]), Miss::BeingComputed);
        assert_eq!(bench.0.explain(&[1, 2, 3], &b"".into(), b"bob", true).miss, Miss::NeverComputed);
        assert_eq!(bench.0.explain(&[1, 2, 3], &b"s".into(), b"alice", true).miss, Miss::NeverComputed);
        assert_eq!([&[1, 3][..], &[2, 2]].map(|tokens| miss(&mut bench, tokens)), [Miss::NeverComputed; 2]);
        settle(&mut bench, "c");
        assert_eq!(miss(&mut bench, &[1, 2, 3, 4]), Miss::None);
        bench.plan_for("c", StepRequest { releases: vec![1], ..StepRequest::default() });
        admit(&mut bench, "c", &[1, 2, 3, 4, 5, 6], b"", 1.0);
        assert_eq!(miss(&mut bench, &[1, 2, 3, 4, 5, 6]), Miss::BeingComputed);
        assert_eq!(miss(&mut bench, &[1, 2, 3, 4, 5, 5]), Miss::NeverComputed);
        settle(&mut bench, "c");
        let mut report = bench.report("c");
        report.outcome = StepOutcome::Failed;
        bench.0.settle("c", &report).unwrap();
        assert_eq!(miss(&mut bench, &[1, 2, 3, 4, 5, 6]), Miss::NeverComputed);
    }

    #[test]
    fn what_is_being_computed_again_is_not_told_as_lost() {
        let mut bench = bench(8);
        cache(&mut bench, "a", &[1, 2, 3], b"");
        bench.0.pool.drop_cached(0, 9, 2.0, 0);
        admit(&mut bench, "a", &[1, 2, 3], b"", 3.0);
        assert_eq!(miss(&mut bench, &[1, 2]), Miss::BeingComputed);
    }

    #[test]
    fn what_is_there_for_others_is_told_to_who_may_know() {
        let mut bench = bench(12);
        cache(&mut bench, "b", &[1, 2, 3, 4], b"x");
        let bob = bench.0.tenants.find(b"bob").unwrap();
        assert_eq!(miss(&mut bench, &[1, 2, 3, 4]), Miss::OtherTenant(bob));
        assert_eq!(bench.0.explain(&[1, 2], &b"".into(), b"alice", false).miss, Miss::NeverComputed);
        assert_eq!(bench.0.explain(&[1, 2], &b"".into(), b"bob", false).miss, Miss::OtherSalt);
        assert_eq!(miss(&mut bench, &[1, 2, 3, 5]), Miss::OtherTenant(bob), "it is about the first block");
        cache(&mut bench, "a", &[1, 2], b"y");
        assert_eq!(miss(&mut bench, &[1, 2, 3, 4]), Miss::OtherSalt, "one's own comes first");
        cache(&mut bench, "a", &[1, 2], b"");
        assert_eq!(miss(&mut bench, &[1, 2, 3, 4]), Miss::OtherTenant(bob));
        assert_eq!(miss(&mut bench, &[1, 2, 3, 5]), Miss::NeverComputed);
    }

    #[test]
    fn looking_elsewhere_ends() {
        let mut bench = bench(8);
        cache(&mut bench, "b", &[1, 2, 3, 4], b"");
        let root = root_hash(b"bob", &b"".into(), b"f");
        let is_found = |mut num_left| bench.0.explainer().is_found(root, &[1, 2, 3, 4], &mut num_left);
        assert_eq!([is_found(2), is_found(1), is_found(0)], [true, false, false]);
    }
}
