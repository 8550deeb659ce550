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
    /// Keeps blocks for a time from now on, the last one of a table first. The caller calls `limit`.
    pub fn keep(&mut self, tail_first: &[BlockId], ttl: Millis, now: Millis) {
        for &block in tail_first {
            if self.parking.keep(block, ttl, now, self.owners[block as usize]) {
                self.journal.touch_all(&[block], self.owners);
            }
        }
    }

    /// Renews the time of those of these blocks that are kept, the last one of a table first.
    pub fn renew(&mut self, tail_first: &[BlockId], now: Millis) {
        for &block in tail_first {
            let known = self.parking.keeps().filter(|keeps| keeps.is_kept(block)).map(|keeps| keeps.ttl(block));
            if let Some(ttl) = known {
                self.parking.keep(block, ttl, now, self.owners[block as usize]);
            }
        }
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
        let mut ended: Vec<BlockId> = std::iter::from_fn(|| self.parking.pop_ended_keep(now)).collect();
        ended.sort_by_key(|block| Reverse(self.index.origin(*block).index));
        self.end_all(&ended);
    }

    /// Blocks that are not kept any more.
    pub fn end_all(&mut self, blocks: &[BlockId]) {
        for &block in blocks {
            if self.parking.end_keep(block, self.owners[block as usize]) {
                self.journal.touch_all(&[block], self.owners);
            }
        }
    }
}
