//! Why admissions find no more, and those that wait for what other leases compute.

use crate::books::explain::{Explainer, Miss, is_being_filled};
use crate::books::hits::Prefix;
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
            let miss = explainer.explain(tokens, root, &missing, group, Some(tenant), false);
            self.num_explained = explainer.num_left;
            miss
        };
        let is_own =
            matches!(miss.loss(), Some(Loss { cause: Cause::Evicted { tenant: by, .. }, .. }) if *by == tenant);
        let evicted_by = is_own.then(|| self.tenants.name(tenant).to_vec());
        Some(AdmissionMiss { seq_id: admission.seq_id as i32, index, miss, evicted_by })
    }

    /// The first block and group without which no more is found. Blocks that steps in flight fill count as found.
    fn first_missing(&self, hashes: &[Hash], num_found: usize) -> Option<(usize, Group)> {
        let missing = Prefix { geometry: self.geometry, index: self.pool.index(), hashes }.first_missing()?;
        if missing.0 >= num_found || !self.geometry.groups[usize::from(missing.1)].is_full() {
            return Some(missing);
        }
        (num_found < hashes.len()).then_some((num_found, 0))
    }
}
