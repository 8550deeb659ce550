//! Pins the cached blocks of a prefix, and removes pins.

use crate::books::Books;
use crate::books::hits::Prefix;
use crate::books::pins::{Pin, PinId, Pins};
use crate::cache::advice::{Millis, millis};
use crate::cache::pool::BlockPool;
use crate::cache::prefix::{BlockId, Hash, Namespace, chain_hashes, root_hash};
use crate::cache::tenants::TenantId;
use crate::errors::{Reason, Refusal, Result};

impl Books {
    /// Pins the cached full blocks of a prefix until the given time; if it is pinned already, sets the new end.
    ///
    /// Refused: PREFIX_NOT_CACHED, PIN_BUDGET_SPENT, QUOTA_EXCEEDED, OUT_OF_BLOCKS.
    pub fn pin_prefix(
        &mut self,
        tenant: &[u8],
        tokens: &[i32],
        namespace: &Namespace,
        until: f64,
    ) -> Result<std::result::Result<Pin, Refusal>> {
        let size = self.geometry.block_size;
        let root = root_hash(tenant, namespace, &self.geometry.model_fingerprint);
        let mut hashes: Vec<Hash> = Vec::new();
        chain_hashes(root, self.geometry.holdable(tokens), size, &mut hashes);
        let hit = Prefix { geometry: &self.geometry, index: self.pool.index(), hashes: &hashes }.find();
        let (num_blocks, blocks) = (hit.num_blocks, hit.blocks().into_owned());
        if num_blocks == 0 {
            let message = format!("no full block of these {} tokens is cached", tokens.len());
            return Ok(Err(Refusal::new(Reason::PrefixNotCached, message)));
        }
        let tenant = self.enter_tenant(tenant);
        let mut id = PinId::default();
        id.copy_from_slice(&hashes[num_blocks - 1][..16]);
        let known = self.pins.remove(&id);
        if known.is_none() {
            if let Some(refusal) = refuse_pin(tenant, &blocks, &self.pool, self.geometry.num_blocks) {
                return Ok(Err(refusal));
            }
            self.pool.pin(&blocks);
        }
        let pin = Pin { id, tenant, num_blocks, blocks, until };
        self.pins.insert(pin.clone());
        Ok(Ok(pin))
    }

    /// Takes a pin back. False if there is none of this id for the tenant; any tenant's if it is None.
    pub fn unpin_prefix(&mut self, tenant: Option<&[u8]>, id: &PinId) -> Result<bool> {
        let is_theirs =
            |pin: &&Pin| tenant.is_none_or(|name| self.tenants.find(name).is_some_and(|tenant| tenant == pin.tenant));
        if self.pins.get(id).filter(is_theirs).is_none() {
            return Ok(false);
        }
        self.pins.take_back(id, &mut self.pool)?;
        Ok(true)
    }

    /// No pin, no advice and no kept block ends before this; None if there is none that ends.
    pub fn next_end(&self) -> Option<Millis> {
        [self.pins.next_end(), self.pool.parking().next_end()].into_iter().flatten().min()
    }

    /// When the first of the blocks ends that a tenant keeps. Cost: O(blocks that it keeps).
    pub fn next_keep_end(&self, tenant: TenantId) -> Option<Millis> {
        let keeps = self.pool.parking().keeps()?;
        keeps.of_tenant(tenant).filter_map(|block| keeps.until(block)).min()
    }

    /// Ends expired pins and advice.
    pub fn advance(&mut self, now: f64) -> Result<()> {
        self.pool.end_times(millis(now));
        self.pins.end_expired(now, &mut self.pool)
    }

    pub fn pins(&self) -> &Pins {
        &self.pins
    }
}

fn refuse_pin(tenant: TenantId, blocks: &[BlockId], pool: &BlockPool, num_blocks: usize) -> Option<Refusal> {
    let account = *pool.accounts().get(tenant);
    let needed = blocks.iter().filter(|block| !pool.pins().is_pinned(**block)).count();
    let limit = account.share.pin_budget;
    if account.num_pinned + needed > limit {
        let pinned = account.num_pinned;
        let message = format!("{needed} blocks more would be pinned, {pinned} are; the budget is {limit}");
        let refusal = Refusal::new(Reason::PinBudgetSpent, message);
        return Some(refusal.with("needed", needed).with("pinned", pinned).with("limit", limit));
    }
    let num_taken = pool.num_parked(blocks);
    let (held, limit) = (account.num_charged(), account.share.limit);
    if limit < num_blocks - 1 && held + num_taken > limit {
        let message = format!("{num_taken} blocks more would be held, {held} are; the tenant's limit is {limit}");
        let refusal = Refusal::new(Reason::QuotaExceeded, message);
        return Some(refusal.with("needed", num_taken).with("held", held).with("limit", limit));
    }
    let available = pool.num_available(tenant);
    (num_taken > available).then(|| {
        let retired = pool.counts().retired;
        let message = format!(
            "{num_taken} blocks are to be pinned; {available} can be taken from what others may need, {retired} are retired"
        );
        let refusal = Refusal::new(Reason::OutOfBlocks, message);
        refusal.with("needed", num_taken).with("free", available).with("retired", retired)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::books::plans::StepRequest;
    use crate::books::tests::{Bench, admission};
    use crate::cache::accounts::Share;

    fn share(pin_budget: usize, limit: usize) -> Share {
        Share { floor: 0, quota: limit, limit, pin_budget, keep_limit: 0 }
    }

    /// Blocks 1 to 3 are cached, with tokens 1 to 6; 3 more are free.
    fn bench() -> Bench {
        let mut bench = Bench::new(6);
        bench.0.set_shares(share(6, 6), Default::default());
        bench.admit(1, &[1, 2, 3, 4, 5, 6]);
        bench.settle();
        bench.release(&[1]);
        bench.settle();
        bench
    }

    fn pin(bench: &mut Bench, tokens: &[i32], until: f64) -> std::result::Result<Pin, Reason> {
        bench.0.pin_prefix(b"", tokens, &b"".into(), until).unwrap().map_err(|refusal| refusal.reason)
    }

    fn counts(bench: &Bench) -> (usize, usize, usize, usize) {
        let (pool, account) = (bench.0.pool(), bench.0.pool().accounts().get(0));
        assert_eq!(bench.0.violations(), [""; 0]);
        (pool.counts().cached, pool.num_allocatable(), account.num_held, account.num_pinned)
    }

    #[test]
    fn what_is_pinned_is_cached_and_not_evicted() {
        let mut bench = bench();
        let pinned = pin(&mut bench, &[1, 2, 3, 4, 9, 9], 10.0).unwrap();
        assert_eq!((pinned.blocks, counts(&bench)), (vec![1, 2], (3, 4, 2, 2)));
        let others: Vec<i32> = (20..28).collect();
        assert!(bench.admit(2, &others).refusals.is_empty());
        bench.settle();
        assert_eq!(
            (bench.0.num_cached_tokens(&[1, 2, 3, 4, 5, 6], &b"".into(), b""), counts(&bench)),
            (4, (2, 0, 6, 2))
        );
        assert_eq!(bench.admit(3, &[30]).refusals.len(), 1);
        assert_eq!(bench.admit(3, &[1, 2, 3, 4]).refusals.len(), 1, "its last token needs a block");
        bench.settle();
        bench.release(&[2]);
        bench.settle();
        assert!(bench.admit(3, &[1, 2, 3, 4, 5]).refusals.is_empty());
        bench.settle();
        assert_eq!(bench.blocks(3)[..2], [1, 2]);
        bench.release(&[3]);
        bench.settle();
        assert!(bench.0.unpin_prefix(Some(b""), &pinned.id).unwrap());
        assert_eq!((counts(&bench).1, counts(&bench).3), (6, 0));
        assert!(!bench.0.unpin_prefix(None, &pinned.id).unwrap());
    }

    #[test]
    fn the_same_prefix_is_pinned_once_and_until_the_last_word() {
        let mut bench = bench();
        let (first, longer) = (pin(&mut bench, &[1, 2], 10.0).unwrap(), pin(&mut bench, &[1, 2, 3, 4], 10.0).unwrap());
        let again = pin(&mut bench, &[1, 2, 3], 20.0).unwrap();
        assert_eq!((first.id, again.until, first.id != longer.id), (again.id, 20.0, true));
        assert_eq!((bench.0.pool().pins().count(1), bench.0.pool().pins().count(2), counts(&bench).3), (2, 1, 2));
        bench.0.advance(10.0).unwrap();
        assert_eq!((bench.0.pool().pins().count(1), bench.0.pool().pins().count(2)), (1, 0));
        bench.0.advance(19.9).unwrap();
        assert_eq!(bench.0.pins().all().count(), 1);
        bench.plan(StepRequest::default());
        bench.plan_at("a", &StepRequest::default(), 20.0);
        assert_eq!((bench.0.pins().all().count(), counts(&bench)), (0, (3, 6, 0, 0)));
    }

    #[test]
    fn pins_are_listed_by_id() {
        let mut bench = bench();
        let mut ids: Vec<PinId> =
            [2, 4, 6].map(|end| pin(&mut bench, &[1, 2, 3, 4, 5, 6][..end], 9.0).unwrap().id).into();
        ids.sort();
        assert_eq!(bench.0.pins().behind(ids[0]).map(|pin| pin.id).collect::<Vec<_>>(), ids[1..]);
        assert_eq!(bench.0.pins().get(&ids[2]).unwrap().id, ids[2]);
    }

    #[test]
    fn a_pin_is_the_tenants() {
        let mut bench = bench();
        let pinned = pin(&mut bench, &[1, 2], 10.0).unwrap();
        assert!(!bench.0.unpin_prefix(Some(b"other"), &pinned.id).unwrap());
        assert_eq!(
            bench.0.pin_prefix(b"other", &[1, 2], &b"".into(), 9.0).unwrap().unwrap_err().reason,
            Reason::PrefixNotCached
        );
        assert!(bench.0.unpin_prefix(None, &pinned.id).unwrap());
    }

    #[test]
    fn what_would_be_too_much_is_refused_with_its_numbers() {
        let mut bench = bench();
        assert_eq!(pin(&mut bench, &[1], 9.0), Err(Reason::PrefixNotCached));
        bench.0.set_shares(share(2, 6), Default::default());
        assert_eq!(pin(&mut bench, &[1, 2, 3, 4, 5, 6], 9.0), Err(Reason::PinBudgetSpent));
        pin(&mut bench, &[1, 2, 3, 4], 9.0).unwrap();
        let refusal = bench.0.pin_prefix(b"", &[1, 2, 3, 4, 5, 6], &b"".into(), 9.0).unwrap().unwrap_err();
        assert_eq!(refusal.message, "1 blocks more would be pinned, 2 are; the budget is 2");
        pin(&mut bench, &[1, 2], 9.0).unwrap();
        bench.0.set_shares(share(6, 2), Default::default());
        let refusal = bench.0.pin_prefix(b"", &[1, 2, 3, 4, 5, 6], &b"".into(), 9.0).unwrap().unwrap_err();
        assert_eq!(refusal.message, "1 blocks more would be held, 2 are; the tenant's limit is 2");
        assert_eq!((counts(&bench), bench.0.pins().all().count()), ((3, 4, 2, 2), 2), "refusals change nothing");
    }

    #[test]
    fn what_is_reserved_is_not_pinned() {
        let mut bench = bench();
        let mut guaranteed = admission(5, &[30]);
        guaranteed.reserved_tokens = 12;
        assert!(bench.plan(StepRequest { admissions: vec![guaranteed], ..StepRequest::default() }).refusals.is_empty());
        assert_eq!(pin(&mut bench, &[1, 2], 9.0), Err(Reason::OutOfBlocks));
        bench.release(&[5]);
        assert!(pin(&mut bench, &[1, 2], 9.0).is_ok());
    }

    #[test]
    fn a_reset_takes_all_pins_back() {
        let mut bench = bench();
        pin(&mut bench, &[1, 2], 9.0).unwrap();
        assert_eq!((bench.0.reset_prefix_cache(0, 7, 0.0, b"").unwrap(), counts(&bench)), (3, (0, 6, 0, 0)));
    }

    #[test]
    fn wrong_pins_are_told() {
        let mut bench = bench();
        let pinned = pin(&mut bench, &[1, 2], 9.0).unwrap();
        bench.0.pool_mut().pin(&[1]);
        assert_eq!(bench.0.violations(), ["block 1 is in 1 pinned prefixes and has 2 pins"]);
        bench.0.pins.remove(&pinned.id);
        assert_eq!(bench.0.violations(), ["1 blocks are counted as pinned, 0 are"]);
    }
}
