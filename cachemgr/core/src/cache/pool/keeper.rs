//! Uses of the blocks that breakpoints keep, and the ends of their times.

use std::cmp::Reverse;

use crate::cache::accounts::Accounts;
use crate::cache::advice::Millis;
use crate::cache::eviction::parking::Parking;
use crate::cache::journal::Journal;
use crate::cache::prefix::{BlockId, PrefixIndex};
use crate::cache::tenants::TenantId;

/// The parts of a pool that keeping changes.
pub struct Keeper<'a> {
    pub parking: &'a mut Parking,
    pub accounts: &'a Accounts,
    pub index: &'a PrefixIndex,
    pub owners: &'a [TenantId],
    pub journal: &'a mut Journal,
}

impl Keeper<'_> {
    /// Keeps a tenant's blocks for a time from now on, the last one of a table first. The caller calls `limit`.
    pub fn keep(&mut self, tail_first: &[BlockId], ttl: Millis, now: Millis) {
        let is_new = |block: &BlockId| self.parking.is_parked(*block) && !self.parking.is_kept(*block);
        let parked: Vec<BlockId> = tail_first.iter().copied().filter(is_new).collect();
        self.parking.unpark(&parked);
        self.keep_held(tail_first, ttl, now);
        if let Some(first) = parked.first() {
            self.parking.park(&parked, self.owners[*first as usize]);
        }
    }

    /// The same of blocks with a holder.
    pub fn keep_held(&mut self, tail_first: &[BlockId], ttl: Millis, now: Millis) {
        self.for_runs(tail_first, |keeper, run, is_kept, owner| {
            if is_kept {
                keeper.parking.renew_keep(run, ttl, now, owner);
            } else {
                keeper.parking.begin_keep(run, ttl, now, owner);
                keeper.journal.touch_all(run, keeper.owners);
            }
        });
    }

    /// Renews the time of those of a tenant's blocks that are kept, each for its own time, the last one of a table first.
    pub fn renew(&mut self, tail_first: &[BlockId], now: Millis) {
        self.for_runs(tail_first, |keeper, run, is_kept, owner| {
            if is_kept {
                keeper.parking.renew_keep(run, 0, now, owner);
            }
        });
    }

    /// Calls with each run of a tenant's blocks that are all kept or all not, and the tenant.
    fn for_runs(&mut self, blocks: &[BlockId], mut call: impl FnMut(&mut Self, &[BlockId], bool, TenantId)) {
        let mut rest = blocks;
        while let Some(first) = rest.first() {
            let is_kept = self.parking.is_kept(*first);
            let length = rest.iter().take_while(|block| self.parking.is_kept(**block) == is_kept).count();
            let (run, others) = rest.split_at(length);
            call(self, run, is_kept, self.owners[*first as usize]);
            rest = others;
        }
    }

    /// Ends what a tenant keeps beyond its limit, the least recently used first.
    pub fn limit(&mut self, tenant: TenantId) {
        let num_kept = self.parking.keeps().map_or(0, |keeps| keeps.num_kept(tenant));
        let limit = self.accounts.get(tenant).share.keep_limit;
        if num_kept > limit {
            let ended = self.parking.end_oldest_keeps(tenant, num_kept - limit);
            self.journal.touch_all(&ended, self.owners);
        }
    }

    /// Keeps one block instead of another one with the same tokens, if that is kept.
    pub fn hand_over(&mut self, from: BlockId, to: BlockId) {
        let Some(keeps) = self.parking.keeps() else { return };
        let (Some(until), ttl) = (keeps.until(from), keeps.ttl(from)) else { return };
        self.end_all(&[from]);
        self.keep(&[to], ttl, until.saturating_sub(ttl));
    }

    /// Ends the times that are over. Of those that end together, the last ones of chains are parked first.
    pub fn end(&mut self, now: Millis) {
        let mut ended = self.parking.take_ended_keeps(now);
        ended.sort_by_key(|block| Reverse(self.index.origin(*block).index));
        self.end_all(&ended);
    }

    /// Blocks are not kept any more, if they were.
    pub fn end_all(&mut self, blocks: &[BlockId]) {
        let kept: Vec<BlockId> = blocks.iter().copied().filter(|block| self.parking.is_kept(*block)).collect();
        let owner = |block: &BlockId| self.owners[*block as usize];
        for blocks in kept.chunk_by(|one, other| owner(one) == owner(other)) {
            self.parking.end_keep(blocks, owner(&blocks[0]));
        }
        self.journal.touch_all(&kept, self.owners);
    }
}
