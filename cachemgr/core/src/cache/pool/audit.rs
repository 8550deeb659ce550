//! Checks a pool against itself.

use std::ops::Range;

use crate::cache::pool::{BlockPool, BlockState};
use crate::cache::prefix::{BlockId, NULL_BLOCK, Past};
use crate::cache::tenants::TenantId;

/// Reads a pool, and reports its violations.
pub struct PoolAudit<'a> {
    pool: &'a BlockPool,
}

impl<'a> PoolAudit<'a> {
    pub fn new(pool: &'a BlockPool) -> PoolAudit<'a> {
        PoolAudit { pool }
    }

    /// Reports violations in a range of blocks: lists and index against their states. Cost: O(range + free blocks).
    pub fn blocks(&self, blocks: &Range<BlockId>, wrong: &mut Vec<String>) {
        self.pool.index.audit(blocks, wrong);
        let mut times_free = vec![0; blocks.len()];
        for block in &self.pool.free {
            if let Some(times) = times_free.get_mut(block.wrapping_sub(blocks.start) as usize) {
                *times += 1;
            }
        }
        for (block, times) in blocks.clone().zip(times_free) {
            let state = self.pool.state(block);
            if times != u32::from(state == BlockState::Free && block != NULL_BLOCK) {
                wrong.push(format!("block {block} is {state:?} and {times} times on the free stack"));
            }
            if block != NULL_BLOCK {
                self.pool.parking.audit(block, state == BlockState::Cached && !self.pool.pins.is_pinned(block), wrong);
            }
            if self.pool.pins.is_pinned(block) && !self.pool.index.is_findable(block) {
                wrong.push(format!("block {block} is pinned and can't be found"));
            }
            if state == BlockState::Free && self.pool.parking.advice(block).is_some() {
                wrong.push(format!("block {block} is free and still advised to be kept"));
            }
            if self.pool.parking.is_kept(block)
                && (state == BlockState::Free || self.pool.index.past(block) == Past::Dropped)
            {
                wrong.push(format!("block {block} is kept, and nobody will find it"));
            }
            if state == BlockState::Free && self.pool.index.past(block) != Past::None {
                wrong.push(format!("block {block} is free and still has a past"));
            }
        }
    }

    /// Reports violations in the counts. Cost: O(blocks), a fraction of `blocks`'s.
    pub fn counts(&self, wrong: &mut Vec<String>) {
        self.pool.index.audit_counts(wrong);
        let counters = self.pool.holders.recount(self.pool.counters);
        let busy = self.pool.holders.busy().zip(self.pool.index.pasts());
        let num_cached = busy.filter(|(is_busy, past)| !is_busy && **past == Past::Findable).count();
        if counters != self.pool.counters {
            wrong.push(format!("counted {:?}, there are {counters:?}", self.pool.counters));
        }
        if self.pool.counts().cached != num_cached {
            wrong.push(format!("{} blocks counted as cached, {num_cached} are", self.pool.counts().cached));
        }
        self.pool.records.contents.audit(|block| self.pool.index.is_findable(block), wrong);
        if !self.pool.holders.is_idle(NULL_BLOCK) {
            wrong.push("somebody holds the null block".into());
        }
    }

    /// Reports violations in the tenants' accounts, counted block by block. Cost: as `counts`.
    pub fn accounts(&self, wrong: &mut Vec<String>) {
        self.pool.accounts.audit(wrong);
        if let Some(keeps) = self.pool.parking.keeps() {
            let limit = |tenant| self.pool.accounts.get(tenant).share.keep_limit;
            keeps.audit(|block| self.pool.owners[block as usize], limit, wrong);
        }
        let mut counted = vec![(0, 0, 0); self.pool.accounts.len()];
        let blocks = self.pool.owners.iter().zip(self.pool.holders.busy()).zip(self.pool.index.pasts()).enumerate();
        for (block, ((owner, is_busy), past)) in blocks {
            if !is_busy && *past != Past::Findable {
                continue; // free
            }
            let Some((num_held, num_cached, num_pinned)) = counted.get_mut(*owner as usize) else {
                wrong.push(format!("block {block} is tenant {owner}'s, which has no account"));
                continue;
            };
            let is_pinned = self.pool.pins.is_pinned(block as BlockId);
            *num_held += usize::from(is_busy || is_pinned);
            *num_cached += usize::from(!is_busy && !is_pinned);
            *num_pinned += usize::from(is_pinned);
        }
        for (tenant, counted) in counted.into_iter().enumerate() {
            let account = self.pool.accounts.get(tenant as TenantId);
            let entered = (account.num_held, account.num_cached, account.num_pinned);
            if entered != counted {
                let what = "blocks held, cached and pinned";
                wrong.push(format!("tenant {tenant} has {counted:?} {what}, its account says {entered:?}"));
            }
        }
    }
}
