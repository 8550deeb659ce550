//! Blocks that breakpoints of prompts keep for a time after each use.
//!
//! A kept block is evicted after all others. A tenant keeps no more than its limit: beyond it the blocks that were used
//! least recently end first, of one use the last one of a chain.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::cache::advice::{FOREVER, Millis};
use crate::cache::eviction::rings::Rings;
use crate::cache::prefix::BlockId;
use crate::cache::tenants::TenantId;

/// The times of a block, as long as it is kept.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Keep {
    until: Millis,
    /// The end under which the block is entered; FOREVER without one. Entries under another end count for nothing.
    entered: Millis,
    /// Milliseconds from the last use to the end.
    ttl: u32,
    owner: TenantId,
}

/// Kept blocks by block and by tenant. 33 bytes per block, and the ends. Each method's cost is O(1) per block, but for the
/// order of ends.
#[derive(Debug, Serialize, Deserialize)]
pub struct KeepBook {
    /// By block: true while it is kept. Apart from the times, because every block that is parked or used is looked up.
    is_kept: Vec<bool>,
    keeps: Vec<Keep>,
    /// Kept blocks by tenant, the least recently used first.
    uses: Rings,
    /// For each kept block an entry that is not after its end. A use changes none.
    ends: BTreeMap<Millis, Vec<BlockId>>,
    num_entries: usize,
    /// By tenant.
    counts: Vec<usize>,
    num_evicted: u64,
}

impl KeepBook {
    pub fn new(num_blocks: usize) -> KeepBook {
        KeepBook {
            is_kept: vec![false; num_blocks],
            keeps: vec![Keep { until: 0, entered: FOREVER, ttl: 0, owner: 0 }; num_blocks],
            uses: Rings::new(num_blocks),
            ends: BTreeMap::new(),
            num_entries: 0,
            counts: Vec::new(),
            num_evicted: 0,
        }
    }

    pub fn is_kept(&self, block: BlockId) -> bool {
        self.is_kept[block as usize]
    }

    /// The end of a block's time, if it is kept.
    pub fn until(&self, block: BlockId) -> Option<Millis> {
        self.is_kept(block).then(|| self.keeps[block as usize].until)
    }

    /// The time from a use of a kept block to its end.
    pub fn ttl(&self, block: BlockId) -> Millis {
        self.keeps[block as usize].ttl.into()
    }

    /// Kept blocks of a tenant.
    pub fn num_kept(&self, tenant: TenantId) -> usize {
        self.counts.get(tenant as usize).copied().unwrap_or(0)
    }

    /// Kept blocks.
    pub fn len(&self) -> usize {
        self.counts.iter().sum()
    }

    /// Kept blocks that were evicted.
    pub fn num_evicted(&self) -> u64 {
        self.num_evicted
    }

    /// Kept blocks of a tenant, the least recently used one first.
    pub fn of_tenant(&self, tenant: TenantId) -> impl Iterator<Item = BlockId> + '_ {
        let sentinel = self.sentinel(tenant);
        let is_known = (tenant as usize) < self.counts.len();
        is_known.then(|| self.uses.nodes(sentinel)).into_iter().flatten()
    }

    /// A use of a tenant's blocks with a breakpoint, the last block of a table first: they were not kept before.
    pub fn begin(&mut self, blocks: &[BlockId], ttl: Millis, now: Millis, tenant: TenantId) {
        self.reach(tenant);
        let ttl = u32::try_from(ttl).unwrap_or(u32::MAX);
        let until = now + Millis::from(ttl);
        let entries = self.ends.entry(until).or_default();
        let num_before = entries.len();
        entries.reserve(blocks.len());
        for &block in blocks {
            let keep = &mut self.keeps[block as usize];
            if until < keep.entered {
                keep.entered = until;
                entries.push(block);
            }
            (keep.until, keep.ttl, keep.owner) = (until, ttl, tenant);
            self.is_kept[block as usize] = true;
        }
        self.num_entries += entries.len() - num_before;
        self.counts[tenant as usize] += blocks.len();
        self.uses.append_all(blocks, self.sentinel(tenant));
        self.forget_old_entries();
    }

    /// The same of blocks that a tenant keeps. A shorter time than the known one changes nothing else.
    pub fn renew(&mut self, blocks: &[BlockId], ttl: Millis, now: Millis, tenant: TenantId) {
        let ttl = u32::try_from(ttl).unwrap_or(u32::MAX);
        for &block in blocks {
            let keep = &mut self.keeps[block as usize];
            keep.ttl = keep.ttl.max(ttl);
            keep.until = keep.until.max(now + Millis::from(keep.ttl)); // not before its entry
        }
        self.uses.move_to_end(blocks, self.sentinel(tenant));
    }

    /// The block is not kept any more, if it was.
    pub fn end(&mut self, block: BlockId) {
        if !self.is_kept(block) {
            return;
        }
        self.is_kept[block as usize] = false;
        self.counts[self.keeps[block as usize].owner as usize] -= 1;
        self.uses.remove(block);
    }

    /// A tenant's blocks that were used least recently are not kept any more. Lists them.
    pub fn end_oldest(&mut self, tenant: TenantId, count: usize) -> Vec<BlockId> {
        let mut ended = Vec::with_capacity(count);
        self.uses.cut_first(self.sentinel(tenant), count, &mut ended);
        ended.iter().for_each(|block| self.is_kept[*block as usize] = false);
        self.counts[tenant as usize] -= ended.len();
        ended
    }

    /// A kept block is being evicted.
    pub fn count_evicted(&mut self) {
        self.num_evicted += 1;
    }

    pub fn restart_counters(&mut self) {
        self.num_evicted = 0;
    }

    /// No block's time ends before this; None if none is kept.
    pub fn next_end(&self) -> Option<Millis> {
        self.ends.first_key_value().map(|(end, _)| *end)
    }

    /// Lists kept blocks with a time that is over; the caller ends them.
    pub fn take_ended(&mut self, now: Millis) -> Vec<BlockId> {
        let mut ended = Vec::new();
        while let Some(entry) = self.ends.first_entry().filter(|entry| *entry.key() <= now) {
            let (end, blocks) = entry.remove_entry();
            self.num_entries -= blocks.len();
            for block in blocks {
                let keep = &mut self.keeps[block as usize];
                if keep.entered != end {
                    continue;
                }
                keep.entered = FOREVER;
                if !self.is_kept[block as usize] {
                    continue;
                }
                if keep.until > now {
                    keep.entered = keep.until;
                    self.ends.entry(keep.until).or_default().push(block);
                    self.num_entries += 1;
                } else {
                    ended.push(block);
                }
            }
        }
        ended
    }

    /// Removes the entries that count for nothing, if they are many.
    fn forget_old_entries(&mut self) {
        if self.num_entries <= 2 * self.keeps.len() {
            return;
        }
        for (end, blocks) in &mut self.ends {
            blocks.retain(|block| self.keeps[*block as usize].entered == *end);
            blocks.sort_unstable();
            blocks.dedup();
        }
        self.ends.retain(|_, blocks| !blocks.is_empty());
        self.num_entries = self.ends.values().map(Vec::len).sum();
    }

    fn sentinel(&self, tenant: TenantId) -> u32 {
        (self.keeps.len() + tenant as usize) as u32
    }

    fn reach(&mut self, tenant: TenantId) {
        if self.counts.len() <= tenant as usize {
            self.counts.resize(tenant as usize + 1, 0);
            self.uses.reach(self.sentinel(tenant) as usize + 1);
        }
    }

    /// Reports violations: the kept blocks of each tenant are counted, ordered, and have an end. `owner` returns a
    /// block's tenant, `limit` the most that a tenant may keep.
    pub fn audit(
        &self,
        owner: impl Fn(BlockId) -> TenantId,
        limit: impl Fn(TenantId) -> usize,
        wrong: &mut Vec<String>,
    ) {
        let mut counted = vec![0; self.counts.len()];
        for block in (0..self.keeps.len() as BlockId).filter(|block| self.is_kept(*block)) {
            match counted.get_mut(owner(block) as usize) {
                Some(count) => *count += 1,
                None => wrong.push(format!("block {block} is kept for tenant {}, which keeps none", owner(block))),
            }
            if self.keeps[block as usize].owner != owner(block) {
                let (known, tenant) = (self.keeps[block as usize].owner, owner(block));
                wrong.push(format!("block {block} of tenant {tenant} is kept for tenant {known}"));
            }
            let keep = &self.keeps[block as usize];
            if keep.entered > keep.until {
                wrong.push(format!("the time of kept block {block} has no end"));
            }
        }
        for (tenant, num_kept) in counted.into_iter().enumerate() {
            let (known, most) = (self.counts[tenant], limit(tenant as TenantId));
            let num_ordered = self.of_tenant(tenant as TenantId).filter(|block| self.is_kept(*block)).count();
            if (known, num_ordered) != (num_kept, num_kept) {
                wrong.push(format!(
                    "tenant {tenant} keeps {num_kept} blocks, {known} are counted, {num_ordered} ordered"
                ));
            }
            if num_kept > most {
                wrong.push(format!("tenant {tenant} keeps {num_kept} blocks; its limit is {most}"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A use of blocks that are all kept, or all not.
    fn keep(book: &mut KeepBook, blocks: &[BlockId], ttl: Millis, now: Millis, tenant: TenantId) {
        match book.is_kept(blocks[0]) {
            false => book.begin(blocks, ttl, now, tenant),
            true => book.renew(blocks, ttl, now, tenant),
        }
    }

    fn ended(book: &mut KeepBook, now: Millis) -> Vec<BlockId> {
        let ended = book.take_ended(now);
        ended.iter().for_each(|block| book.end(*block));
        ended
    }

    fn violations(book: &KeepBook, limit: usize) -> Vec<String> {
        let mut wrong = Vec::new();
        book.audit(|_| 0, |_| limit, &mut wrong);
        wrong
    }

    #[test]
    fn each_use_renews_the_longest_time_and_none_shortens_it() {
        let mut book = KeepBook::new(8);
        keep(&mut book, &[3], 100, 0, 0);
        keep(&mut book, &[4], 50, 0, 0);
        assert_eq!((book.until(3), book.until(4), book.until(5), book.num_kept(0)), (Some(100), Some(50), None, 2));
        keep(&mut book, &[3], 10, 40, 0);
        assert_eq!((book.until(3), ended(&mut book, 139)), (Some(140), vec![4]), "its own time, from this use on");
        keep(&mut book, &[3], 500, 139, 0);
        assert_eq!((book.until(3), book.ttl(3), ended(&mut book, 638)), (Some(639), 500, vec![]));
        assert_eq!((ended(&mut book, 639), book.len(), book.next_end()), (vec![3], 0, None));
        keep(&mut book, &[3], 10, 700, 0);
        assert_eq!((book.until(3), ended(&mut book, 710)), (Some(710), vec![3]), "nothing is left of earlier times");
    }

    #[test]
    fn what_was_kept_for_long_before_ends_when_it_is_due_now() {
        let mut book = KeepBook::new(8);
        keep(&mut book, &[3], 1000, 0, 0);
        book.end(3);
        book.end(3);
        keep(&mut book, &[3], 10, 5, 0);
        assert_eq!((ended(&mut book, 14), ended(&mut book, 15)), (vec![], vec![3]));
        keep(&mut book, &[3], 2000, 15, 0);
        assert_eq!((ended(&mut book, 1000), ended(&mut book, 2014), ended(&mut book, 2015)), (vec![], vec![], vec![3]));
    }

    #[test]
    fn the_least_recently_used_one_of_a_tenant_is_known() {
        let mut book = KeepBook::new(8);
        [3, 2, 1].iter().for_each(|block| keep(&mut book, &[*block], 10, 0, 2));
        keep(&mut book, &[5], 10, 0, 0);
        keep(&mut book, &[3], 10, 1, 2);
        assert_eq!(book.of_tenant(2).collect::<Vec<_>>(), [2, 1, 3]);
        assert_eq!((book.num_kept(2), book.num_kept(1), book.num_kept(9), book.len()), (3, 0, 0, 4));
        assert_eq!((book.of_tenant(1).count(), book.of_tenant(9).count()), (0, 0));
    }

    #[test]
    fn memory_does_not_grow_with_uses() {
        let mut book = KeepBook::new(4);
        for time in 1..2000 {
            keep(&mut book, &[1], 1000, time, 0);
            keep(&mut book, &[2], 1000 + time % 7, time, 0);
            if time % 3 == 0 {
                book.end(2);
                keep(&mut book, &[2], 1 + time % 5, time, 0);
            }
            ended(&mut book, time);
            assert!(book.num_entries <= 9 && violations(&book, 8).is_empty(), "{:?}", violations(&book, 8));
        }
    }

    #[test]
    fn wrong_keeps_are_told() {
        let mut book = KeepBook::new(4);
        [1, 2].iter().for_each(|block| keep(&mut book, &[*block], 10, 0, 0));
        assert_eq!(
            (violations(&book, 2), violations(&book, 1)),
            (vec![], vec!["tenant 0 keeps 2 blocks; its limit is 1".into()])
        );
        book.keeps[1].entered = FOREVER;
        book.counts[0] = 3;
        let told = ["the time of kept block 1 has no end", "tenant 0 keeps 2 blocks, 3 are counted, 2 ordered"];
        assert_eq!(violations(&book, 2), told);
    }
}
