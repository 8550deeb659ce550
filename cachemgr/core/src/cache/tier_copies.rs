//! Copies of cached blocks in a tier below the pool, by the tier's block.
//!
//!     arriving   it is being copied here; nobody can find the copy yet
//!     findable   by the hash that the block had; evictable, unless it is being copied elsewhere
//!
//! Steps copy between the pool and the host tier, orders to the worker between the host tier and the disk.
//!
//! The copy that was used least recently is evicted first: of a tenant over its quota, if there is one; else of a tenant
//! above its floor. Quotas and floors are the tenants' shares of the pool, scaled to the limit of copies.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::cache::accounts::Accounts;
use crate::cache::groups::{Group, identity};
use crate::cache::journal::Journal;
use crate::cache::prefix::{BlockId, Hash, PrefixIndex};
use crate::cache::tenants::TenantId;

/// A place below the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Tier {
    Host,
    Disk,
}

impl fmt::Display for Tier {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(if *self == Tier::Host { "host" } else { "disk" })
    }
}

/// A block of a tier below the pool; each tier numbers its own.
pub type TierBlockId = u32;

/// The hash that a copy can be found by, the layer group of the block that it is a copy of, and its tenant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Content {
    /// See `identity`.
    pub hash: Hash,
    pub group: Group,
    pub tenant: TenantId,
}

impl Content {
    pub fn prefix_hash(&self) -> Hash {
        identity(&self.hash, self.group)
    }
}

/// A block of the pool that was evicted with its content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Evicted {
    pub block: BlockId,
    pub content: Content,
    /// The number of the journal's change with which it could be found.
    pub published_at: u64,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct TierCopy {
    content: Content,
    is_arriving: bool,
    /// Its place in the order of eviction; None while it is being copied.
    used_at: Option<u64>,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct TierCopies {
    limit: usize,
    index: PrefixIndex, // of the tier's block b under b + 1: the index has no block 0
    copies: Vec<Option<TierCopy>>,
    evictable: Vec<BTreeMap<u64, TierBlockId>>, // by tenant, the least recently used one first
    counts: Vec<usize>,                         // by tenant
    num_copies: usize,
    num_uses: u64,
    reset_at: Vec<u64>, // by tenant: no content that was published before this change is copied
    num_evicted: u64,
    journal: Journal, // of the copies that can be found
}

impl TierCopies {
    /// At most `limit` copies, in the first `num_blocks` blocks of a tier.
    pub fn new(num_blocks: usize, limit: usize) -> TierCopies {
        let num_blocks = if limit > 0 { num_blocks } else { 0 };
        TierCopies {
            limit,
            index: PrefixIndex::new(num_blocks + 1),
            copies: vec![None; num_blocks],
            evictable: Vec::new(),
            counts: Vec::new(),
            num_copies: 0,
            num_uses: 0,
            reset_at: Vec::new(),
            num_evicted: 0,
            journal: Journal::new(num_blocks),
        }
    }

    pub fn are_made(&self) -> bool {
        self.limit > 0
    }

    /// The most copies there may be.
    pub fn limit(&self) -> usize {
        self.limit
    }

    pub fn is_full(&self) -> bool {
        self.num_copies == self.limit
    }

    /// Blocks that can have a copy; 0 if none are made.
    pub fn num_blocks(&self) -> usize {
        self.copies.len()
    }

    /// Changes of the copies that can be found.
    pub fn journal(&self) -> &Journal {
        &self.journal
    }

    /// Those that can be found.
    pub fn num_findable(&self) -> usize {
        self.index.num_indexed()
    }

    /// Those that can be evicted now.
    pub fn num_evictable(&self) -> usize {
        self.evictable.iter().map(BTreeMap::len).sum()
    }

    /// Copies that were evicted since the epoch began.
    pub fn num_evicted(&self) -> u64 {
        self.num_evicted
    }

    pub fn is_findable(&self, block: TierBlockId) -> bool {
        self.copy(block).is_some_and(|copy| !copy.is_arriving)
    }

    /// True if the block has a copy, one that is arriving included.
    pub fn is_copy(&self, block: TierBlockId) -> bool {
        self.copy(block).is_some()
    }

    /// The content of a copy that can be found.
    pub fn content(&self, block: TierBlockId) -> Option<Content> {
        let copy = self.copy(block).filter(|copy| !copy.is_arriving)?;
        Some(copy.content)
    }

    /// Block and content of each copy, and whether it is arriving.
    pub fn listing(&self) -> impl Iterator<Item = (TierBlockId, Content, bool)> {
        let copies = self.copies.iter().enumerate();
        copies.filter_map(|(block, copy)| {
            let copy = copy.as_ref()?;
            Some((block as TierBlockId, copy.content, copy.is_arriving))
        })
    }

    /// The copy that can be found by a hash: see `identity`.
    pub fn lookup(&self, hash: &Hash) -> Option<TierBlockId> {
        self.index.lookup(hash).map(|number| number - 1)
    }

    /// True if a copy of this content may be made: no reset was about it since it was published.
    pub fn may_keep(&self, evicted: &Evicted) -> bool {
        let reset_at = self.reset_at.get(evicted.content.tenant as usize).copied().unwrap_or(0);
        self.are_made() && evicted.published_at > reset_at
    }

    /// True if a tenant may have one more copy within its quota.
    pub fn has_share(&self, tenant: TenantId, accounts: &Accounts) -> bool {
        let count = self.counts.get(tenant as usize).copied().unwrap_or(0);
        count < self.scaled(accounts.get(tenant).share.quota, accounts)
    }

    /// A tenant's share of the pool, scaled to the limit of copies.
    fn scaled(&self, num_blocks: usize, accounts: &Accounts) -> usize {
        num_blocks * self.limit / accounts.num_usable().max(1)
    }

    /// The evictable copy to evict first. For the copy of a tenant: None if the floors of others forbid it.
    pub fn first(&self, accounts: &Accounts, asker: Option<TenantId>) -> Option<TierBlockId> {
        let scale = |num_blocks: usize| self.scaled(num_blocks, accounts);
        let is_asker = |tenant: usize| asker == Some(tenant as TenantId);
        let share = |tenant: usize| accounts.get(tenant as TenantId).share;
        let is_over_quota =
            |tenant: usize| self.counts[tenant] + usize::from(is_asker(tenant)) > scale(share(tenant).quota);
        let is_above_floor = |tenant: usize| is_asker(tenant) || self.counts[tenant] > scale(share(tenant).floor);
        let over_quota = self.oldest(is_over_quota);
        let above_floor = over_quota.or_else(|| self.oldest(is_above_floor));
        if asker.is_some() { above_floor } else { above_floor.or_else(|| self.oldest(|_| true)) }
    }

    fn oldest(&self, is_meant: impl Fn(usize) -> bool) -> Option<TierBlockId> {
        let of_tenants = self.evictable.iter().enumerate().filter(|(tenant, _)| is_meant(*tenant));
        let oldest = of_tenants.filter_map(|(_, blocks)| blocks.first_key_value()).min()?;
        Some(*oldest.1)
    }

    // -- changes ------------------------------------------------------------------------------------------------------

    /// Content is being copied to this free block.
    pub fn begin(&mut self, block: TierBlockId, content: Content) {
        self.reach(content.tenant);
        self.counts[content.tenant as usize] += 1;
        self.num_copies += 1;
        self.copies[block as usize] = Some(TierCopy { content, is_arriving: true, used_at: None });
    }

    /// It was copied here: it can be found, unless another copy can be by this hash. No effect if it
    /// was dropped meanwhile.
    pub fn arrive(&mut self, block: TierBlockId) {
        let Some(copy) = self.copies.get_mut(block as usize).and_then(Option::as_mut) else { return };
        if self.index.lookup(&copy.content.hash).is_some() {
            self.remove(block);
            return;
        }
        copy.is_arriving = false;
        self.index.publish(&copy.content.hash, block + 1);
        self.journal.touch_content(block, copy.content.tenant);
    }

    /// It is being copied elsewhere: it is not evicted meanwhile.
    pub fn begin_use(&mut self, block: TierBlockId) {
        let Some(copy) = self.copies.get_mut(block as usize).and_then(Option::as_mut) else { return };
        if let Some(used_at) = copy.used_at.take() {
            self.evictable[copy.content.tenant as usize].remove(&used_at);
        }
    }

    /// Nothing copies it: it was used last.
    pub fn end_use(&mut self, block: TierBlockId) {
        self.begin_use(block);
        let Some(copy) = self.copies.get_mut(block as usize).and_then(Option::as_mut) else { return };
        copy.used_at = Some(self.num_uses);
        self.evictable[copy.content.tenant as usize].insert(self.num_uses, block);
        self.num_uses += 1;
    }

    /// It makes room.
    pub fn evict(&mut self, block: TierBlockId) {
        self.remove(block);
        self.num_evicted += 1;
    }

    /// Drops a copy. No effect if there is none.
    pub fn remove(&mut self, block: TierBlockId) {
        self.begin_use(block);
        let Some(copy) = self.copies.get_mut(block as usize).and_then(Option::take) else { return };
        if !copy.is_arriving {
            self.index.forget(block + 1);
            self.journal.touch_content(block, copy.content.tenant);
        }
        self.counts[copy.content.tenant as usize] -= 1;
        self.num_copies -= 1;
    }

    /// The content of these tenants is being reset: content that was published before this change is not copied any more.
    /// Lists their copies.
    pub fn begin_reset(&mut self, tenants: Range<TenantId>, num_changes: u64) -> Vec<TierBlockId> {
        if !self.are_made() || tenants.is_empty() {
            return Vec::new();
        }
        self.reach(tenants.end - 1);
        self.reset_at[tenants.start as usize..tenants.end as usize].fill(num_changes);
        self.of(|copy| tenants.contains(&copy.content.tenant))
    }

    /// All copies.
    pub fn all(&self) -> Vec<TierBlockId> {
        self.of(|_| true)
    }

    /// A new epoch begins, without any copy.
    pub fn restart_counters(&mut self) {
        self.num_evicted = 0;
    }

    fn of(&self, is_meant: impl Fn(&TierCopy) -> bool) -> Vec<TierBlockId> {
        let is_meant = |block: &TierBlockId| self.copy(*block).is_some_and(&is_meant);
        (0..self.copies.len() as TierBlockId).filter(is_meant).collect()
    }

    fn copy(&self, block: TierBlockId) -> Option<&TierCopy> {
        self.copies.get(block as usize)?.as_ref()
    }

    /// Makes a place for a tenant in the lists by tenant.
    fn reach(&mut self, tenant: TenantId) {
        let num_tenants = self.counts.len().max(tenant as usize + 1);
        self.counts.resize(num_tenants, 0);
        self.reset_at.resize(num_tenants, 0);
        self.evictable.resize_with(num_tenants, BTreeMap::new);
    }

    // -- checks -------------------------------------------------------------------------------------------------------

    /// Reports violations, given the tier's name, how often each block is held, and how often something is being
    /// copied to it.
    pub fn audit(&self, tier: Tier, holds: &[u32], arriving: &[u32], wrong: &mut Vec<String>) {
        let mut counts = vec![0; self.counts.len()];
        for block in 0..self.copies.len() as TierBlockId {
            let (holds, is_arriving) = (holds[block as usize], arriving[block as usize]);
            let Some(copy) = self.copy(block) else { continue };
            counts[copy.content.tenant as usize] += 1;
            let found = self.index.lookup(&copy.content.hash).map(|number| number - 1);
            if u32::from(copy.is_arriving) > is_arriving {
                wrong.push(format!("{tier} block {block} is a copy that nothing makes"));
            }
            if (found == Some(block)) == copy.is_arriving {
                wrong.push(format!("{tier} block {block} is a copy that is found or arrives, not both or none"));
            }
            let place = copy.used_at.and_then(|used_at| self.evictable[copy.content.tenant as usize].get(&used_at));
            if copy.used_at.is_some() != (holds == 0) || place.is_some_and(|placed| *placed != block) {
                wrong.push(format!("{tier} block {block} is a copy with {holds} holds, and in the order at {place:?}"));
            }
        }
        self.index.audit(&(0..self.copies.len() as BlockId + 1), wrong);
        self.index.audit_counts(wrong);
        let num_copies = counts.iter().sum::<usize>();
        if counts != self.counts || num_copies != self.num_copies || num_copies > self.limit {
            wrong.push(format!(
                "tenants have {counts:?} copies in the {tier} tier, {:?} are counted, {} in all of {}",
                self.counts, self.num_copies, self.limit
            ));
        }
        if self.num_evictable() != self.copies.iter().flatten().filter(|copy| copy.used_at.is_some()).count() {
            wrong.push(format!("{} copies in the {tier} tier are in the order of eviction", self.num_evictable()));
        }
    }

    /// All that a refusal leaves as it was, as text.
    pub fn state(&self) -> String {
        format!("{:?}", self.copies)
    }
}
