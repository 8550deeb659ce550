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
        if let Some(first) = tail_first.first() {
            let new = self.parking.keep(tail_first, ttl, now, self.owners[*first as usize]);
            self.journal.touch_all(&new, self.owners);
        }
    }

    /// Renews the time of those of a tenant's blocks that are kept, the last one of a table first.
    pub fn renew(&mut self, tail_first: &[BlockId], now: Millis) {
        let Some(keeps) = self.parking.keeps() else { return };
        let kept: Vec<BlockId> = tail_first.iter().copied().filter(|block| keeps.is_kept(*block)).collect();
        self.keep(&kept, 0, now); // each for its own time
    }

    /// Ends what a tenant keeps beyond its limit, the least recently used first.
    pub fn limit(&mut self, tenant: TenantId) {
        let Some(keeps) = self.parking.keeps() else { return };
        let num_over = keeps.num_kept(tenant).saturating_sub(self.accounts.get(tenant).share.keep_limit);
        let over: Vec<BlockId> = keeps.of_tenant(tenant).take(num_over).collect();
        self.end_all(&over);
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
