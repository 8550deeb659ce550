//! The block pool: the reference count of each block, the free blocks, and the next one to evict.
//!
//! A block is in exactly one state, given by three facts about it:
//!
//!     references  holds  hash     state
//!     > 0         any    any      active    in that many block tables
//!     0           > 0    any      retired   released, but a planned step could still access it
//!     0           0      yes      cached    evictable: parked; or pinned
//!     0           0      no       free      on the free stack
//!
//! Flat arrays indexed by block id. The blocks of one call are distinct and of one tenant, as those of a table are.
//!
//!     holders.rs    references and holds            pins.rs       prefix pins
//!     advisor.rs    advice on blocks                records.rs    changes, losses, roots, contents
//!     counters.rs   counters and sums               audit.rs      checks of a pool
//!     keeper.rs     blocks kept by breakpoints

pub mod advisor;
pub mod audit;
pub mod counters;
pub mod holders;
pub mod keeper;
pub mod pins;
pub mod records;

use serde::{Deserialize, Serialize};

use crate::cache::accounts::{Accounts, Share};
use crate::cache::advice::Millis;
use crate::cache::eviction::parking::Parking;
use crate::cache::eviction::policies::Policy;
use crate::cache::groups::{Group, LayerGroups, Span, identity};
use crate::cache::losses::CallerId;
use crate::cache::pool::advisor::Advisor;
use crate::cache::pool::counters::PoolCounters;
use crate::cache::pool::holders::Holders;
use crate::cache::pool::keeper::Keeper;
use crate::cache::pool::pins::PrefixPins;
use crate::cache::pool::records::Records;
use crate::cache::prefix::{BlockId, Hash, Origin, Past, PrefixIndex};
use crate::cache::tenants::{Asker, TenantId};
use crate::cache::tier_copies::{Content, Evicted};
use crate::errors::{Result, broken};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockState {
    Free,
    Cached,
    Active,
    Retired,
}

impl BlockState {
    pub fn name(self) -> &'static str {
        match self {
            BlockState::Free => "free",
            BlockState::Cached => "cached",
            BlockState::Active => "active",
            BlockState::Retired => "retired",
        }
    }
}

/// Blocks by state; they add up to the pool's blocks without the null block.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockCounts {
    pub free: usize,
    pub cached: usize,
    pub active: usize,
    pub retired: usize,
}

/// Blocks 1 to num_blocks - 1. Callers record the holders of a block; this has their number only.
#[derive(Debug, Serialize, Deserialize)]
pub struct BlockPool {
    index: PrefixIndex,
    parking: Parking,
    accounts: Accounts,
    holders: Holders,
    owners: Vec<TenantId>, // of the blocks that are not free
    pins: PrefixPins,
    free: Vec<BlockId>, // a stack: the lowest id on top at first
    counters: PoolCounters,
    pub(crate) records: Records,
    pub(crate) groups: LayerGroups,
    evicted: Option<Vec<Evicted>>, // since they were taken last, if they are noted
}

impl BlockPool {
    /// `spans`: by layer group.
    pub fn new(num_blocks: usize, spans: &[Span], policy: Policy) -> BlockPool {
        BlockPool {
            index: PrefixIndex::new(num_blocks),
            parking: Parking::new(num_blocks, policy),
            accounts: Accounts::new(num_blocks - 1),
            holders: Holders::new(num_blocks),
            owners: vec![0; num_blocks],
            pins: PrefixPins::default(),
            free: (1..num_blocks as BlockId).rev().collect(),
            counters: PoolCounters::default(),
            records: Records::new(num_blocks),
            groups: LayerGroups::new(spans, num_blocks),
            evicted: None,
        }
    }

    /// The same pool, which notes the blocks that it evicts, for copies of them.
    pub fn noting_evicted(self) -> BlockPool {
        BlockPool { evicted: Some(Vec::new()), ..self }
    }

    /// The blocks that were evicted since the last call, the one worth most last. Not those that a caller has advised to
    /// evict before others.
    pub fn take_evicted(&mut self) -> Vec<Evicted> {
        self.evicted.as_mut().map(std::mem::take).unwrap_or_default()
    }

    pub fn index(&self) -> &PrefixIndex {
        &self.index
    }

    /// The parked blocks, with their advice and the eviction policy.
    pub fn parking(&self) -> &Parking {
        &self.parking
    }

    pub fn parking_mut(&mut self) -> &mut Parking {
        &mut self.parking
    }

    /// The references and holds of each block.
    pub fn holders(&self) -> &Holders {
        &self.holders
    }

    /// The prefix pins of blocks.
    pub fn pins(&self) -> &PrefixPins {
        &self.pins
    }

    /// Changes the advice on blocks.
    pub fn advisor(&mut self) -> Advisor<'_> {
        let BlockPool { parking, owners, records, .. } = self;
        Advisor { parking, owners, journal: &mut records.journal }
    }

    /// Ends advice and keeping at their times.
    pub fn end_times(&mut self, now: Millis) {
        self.advisor().end(now);
        self.keeper().end(now);
    }

    /// Changes what breakpoints keep.
    pub fn keeper(&mut self) -> Keeper<'_> {
        let BlockPool { parking, accounts, index, owners, records, .. } = self;
        Keeper { parking, accounts, index, owners, journal: &mut records.journal }
    }

    pub fn accounts(&self) -> &Accounts {
        &self.accounts
    }

    pub fn accounts_mut(&mut self) -> &mut Accounts {
        &mut self.accounts
    }

    pub fn counters(&self) -> PoolCounters {
        self.counters
    }

    /// A new epoch begins: all that is counted begins at 0, and the present state stays.
    pub fn restart_counters(&mut self) {
        self.counters = PoolCounters { num_allocated: 0, num_evicted: 0, ..self.counters };
        self.index.restart_counters();
        self.parking.restart_counters();
        self.accounts.restart_counters();
        self.groups.restart_counters();
    }

    /// The hash of a findable block's content and of all content before it.
    pub fn prefix_hash(&self, block: BlockId) -> Option<Hash> {
        self.index.hash(block).map(|hash| identity(hash, self.groups.of(block)))
    }

    /// Blocks that `allocate` could return now: free or evictable.
    pub fn num_allocatable(&self) -> usize {
        self.free.len() + self.parking.num_parked()
    }

    pub fn counts(&self) -> BlockCounts {
        let (free, active) = (self.free.len(), self.counters.num_active);
        let cached = self.parking.num_parked() + self.pins.num_idle();
        let retired = (self.holders.len() - 1).saturating_sub(free + cached + active); // less than none if the books are wrong
        BlockCounts { free, cached, active, retired }
    }

    /// The block's tenant; None if it is free.
    pub fn owner(&self, block: BlockId) -> Option<TenantId> {
        (self.state(block) != BlockState::Free).then(|| self.owners[block as usize])
    }

    /// True if its one holder may write it: it has no other holder, and was never published.
    pub fn is_writable(&self, block: BlockId) -> bool {
        self.holders.ref_count(block) == 1 && self.index.past(block) == Past::None
    }

    pub fn state(&self, block: BlockId) -> BlockState {
        if self.holders.ref_count(block) > 0 {
            BlockState::Active
        } else if self.holders.hold_count(block) > 0 {
            BlockState::Retired
        } else if self.index.is_findable(block) {
            BlockState::Cached
        } else {
            BlockState::Free
        }
    }

    /// The free stack, the next one to be allocated last.
    pub fn free_blocks(&self) -> &[BlockId] {
        &self.free
    }

    /// Allocates `count` blocks of a layer group with one reference each, for the asker's tenant: blocks without content
    /// first, then evicted ones.
    ///
    /// The caller has compared `count` with `num_allocatable`.
    pub fn allocate(&mut self, count: usize, group: Group, asker: &Asker) -> Result<Vec<BlockId>> {
        let num_popped = count.min(self.free.len());
        let num_missing = count - num_popped;
        if num_missing > self.parking.num_parked() {
            return broken(format!("{num_missing} blocks to evict, {} are cached", self.parking.num_parked()));
        }
        let mut blocks = self.free.split_off(self.free.len() - num_popped);
        blocks.reverse();
        self.parking.begin_eviction();
        if self.groups.are_several() {
            (0..num_missing).for_each(|_| self.evict_one(count, asker, &mut blocks));
        } else if num_missing > 0 {
            self.parking.evict(num_missing, &self.accounts.reclaims(asker.tenant, count), &mut blocks);
            self.index.warm_blocks(&blocks[num_popped..]);
            for block in &blocks[num_popped..] {
                self.accounts.uncache(self.owners[*block as usize], 1);
                self.lose(*block, asker);
            }
        }
        self.groups.enter(&blocks, group);
        self.holders.give(&blocks);
        for block in &blocks {
            self.owners[*block as usize] = asker.tenant;
        }
        self.accounts.hold(asker.tenant, count);
        self.records.journal.touch_all(&blocks[..num_popped], &self.owners);
        self.counters.num_active += count;
        self.counters.num_references += count;
        self.counters.num_allocated += count as u64;
        self.counters.num_evicted += num_missing as u64;
        Ok(blocks)
    }

    /// Evicts a block that nobody can find, if there is one; else the next one in order.
    fn evict_one(&mut self, count: usize, asker: &Asker, victims: &mut Vec<BlockId>) {
        let end = victims.len();
        while let Some(block) = self.groups.pop_stranded() {
            if self.parking.is_parked(block) && self.groups.is_stranded(block, &self.index) {
                self.parking.take(block, victims);
                break;
            }
        }
        if victims.len() == end {
            self.parking.evict(1, &self.accounts.reclaims(asker.tenant, count), victims);
        }
        let block = victims[end];
        self.accounts.uncache(self.owners[block as usize], 1);
        self.lose(block, asker);
    }

    /// The number of these that are evictable: acquiring them makes so many blocks less allocatable.
    pub fn num_parked(&self, blocks: &[BlockId]) -> usize {
        blocks.iter().filter(|block| self.holders.is_idle(**block) && !self.pins.is_pinned(**block)).count()
    }

    /// Adds `count` references to each of these blocks, which are held or in the index.
    pub fn acquire(&mut self, blocks: &[BlockId], count: u32) -> Result<()> {
        let (idle, num_shared) = self.holders.acquire(blocks, count);
        if let Some(block) = idle.iter().find(|block| !self.index.is_findable(**block)) {
            return broken(format!("block {block} has no content to share"));
        }
        self.counters.num_shared += num_shared;
        self.counters.num_active += idle.len();
        let mut parked = Vec::with_capacity(idle.len());
        for block in idle {
            match (self.holders.hold_count(block), self.pins.is_pinned(block)) {
                (0, false) => parked.push(block),
                (0, true) => self.pins.end_idle(),
                _ => {}
            }
        }
        self.counters.num_references += blocks.len() * count as usize;
        if let Some(first) = parked.first() {
            let owner = self.owners[*first as usize];
            self.accounts.uncache(owner, parked.len());
            self.accounts.hold(owner, parked.len());
            self.parking.unpark(&parked);
        }
        self.records.journal.touch_all(blocks, &self.owners);
        Ok(())
    }

    /// Removes one reference from each. Give a table's tail first: blocks are evicted in this order.
    pub fn release(&mut self, blocks: &[BlockId]) -> Result<()> {
        self.holders.let_go(blocks, &mut self.counters)?;
        self.records.journal.touch_all(blocks, &self.owners);
        self.rest(blocks);
        Ok(())
    }

    /// Removes one reference from each and adds one hold of a step: not reused until `end_holds`.
    pub fn retire(&mut self, blocks: &[BlockId]) -> Result<()> {
        self.holders.let_go(blocks, &mut self.counters)?;
        self.holders.hold(blocks);
        self.records.journal.touch_all(blocks, &self.owners);
        Ok(())
    }

    /// Ends one hold of each. Give a table's tail first, as for `release`.
    pub fn end_holds(&mut self, blocks: &[BlockId]) -> Result<()> {
        self.holders.end_holds(blocks)?;
        self.records.journal.touch_all(blocks, &self.owners);
        self.rest(blocks);
        Ok(())
    }

    /// Makes a computed block findable by its prefix hash, unless another one of its group is; returns the one that is
    /// from now on.
    #[inline]
    pub fn publish(&mut self, hash: &Hash, block: BlockId) -> BlockId {
        let standing = self.index.publish(&identity(hash, self.groups.of(block)), block);
        if standing == block {
            self.records.journal.touch_content(block, self.owners[block as usize]);
        }
        standing
    }

    /// Enters the parent of a published block.
    pub fn enter_origin(&mut self, block: BlockId, origin: Origin) {
        self.index.enter_origin(block, origin);
    }

    /// Makes the blocks from `first` to before `end` unfindable, for a caller; returns how many were findable.
    ///
    /// Held blocks stay with their holders; pinned ones stay findable.
    pub fn drop_cached(&mut self, first: BlockId, end: BlockId, now: f64, by: CallerId) -> usize {
        let blocks = first.max(1)..end.min(self.holders.len() as BlockId);
        blocks.filter(|block| self.drop_content(*block, now, by)).count()
    }

    /// As above, for some blocks.
    pub fn drop_blocks(&mut self, blocks: &[BlockId], now: f64, by: CallerId) -> usize {
        blocks.iter().filter(|block| self.drop_content(**block, now, by)).count()
    }

    /// As above, for one block; true if it was findable.
    fn drop_content(&mut self, block: BlockId, now: f64, by: CallerId) -> bool {
        if !self.index.is_findable(block) || self.pins.is_pinned(block) {
            return false;
        }
        if let Some(hash) = self.index.hash(block) {
            self.records.losses.reset(hash, now, by);
        }
        self.records.contents.forget(block);
        self.records.journal.touch_content(block, self.owners[block as usize]);
        self.keeper().end_all(&[block]);
        self.index.drop_hash(block);
        if self.holders.is_idle(block) {
            self.parking.unpark(&[block]);
            self.accounts.uncache(self.owners[block as usize], 1);
            self.push_free(&[block]);
        }
        true
    }

    /// Evicts the content of a block for the asker.
    #[inline]
    fn lose(&mut self, block: BlockId, asker: &Asker) {
        if let Some(hash) = self.index.hash(block) {
            self.records.losses.evicted(hash, asker);
            if let Some(evicted) = &mut self.evicted
                && !self.parking.was_worth_less(block)
            {
                let (group, tenant) = (self.groups.of(block), self.owners[block as usize]);
                let published_at = self.records.journal.content_changed_at(block);
                evicted.push(Evicted { block, content: Content { hash: *hash, group, tenant }, published_at });
            }
        }
        let found_by = self.groups.are_several().then(|| self.index.hash(block).copied());
        self.records.contents.forget(block);
        self.records.journal.touch_content(block, self.owners[block as usize]);
        self.index.forget(block);
        if let Some(Some(hash)) = found_by {
            self.groups.lose(block, &hash, &self.index);
        }
    }

    /// Those of these that nothing keeps any more: with content they are parked, without they are free.
    fn rest(&mut self, blocks: &[BlockId]) {
        let (mut parked, mut free) = (Vec::with_capacity(blocks.len()), Vec::new());
        for &block in blocks {
            if !self.holders.is_idle(block) {
                continue;
            }
            if self.pins.is_pinned(block) {
                self.pins.begin_idle();
            } else if self.index.is_findable(block) {
                parked.push(block);
            } else {
                free.push(block);
            }
        }
        let Some(first) = parked.first().or(free.first()) else { return };
        let owner = self.owners[*first as usize];
        self.accounts.let_go(owner, parked.len() + free.len());
        if !free.is_empty() {
            self.push_free(&free);
        }
        if !parked.is_empty() {
            self.accounts.cache(owner, parked.len());
            self.parking.park(&parked, owner);
        }
    }

    // -- tenants ------------------------------------------------------------------------------------------------------

    /// Sets a tenant's share. New tenants have consecutive numbers.
    pub fn set_share(&mut self, tenant: TenantId, share: Share) {
        self.accounts.set_share(tenant, share);
        let owners = &self.owners;
        self.parking.set_by_tenant(self.accounts.has_quotas(), |block| owners[block as usize]);
        self.keeper().limit(tenant);
    }

    /// A reservation of the tenant was `before`, and is `after`.
    pub fn reserve(&mut self, tenant: TenantId, before: usize, after: usize) {
        self.accounts.reserve(tenant, before, after);
    }

    /// Blocks that the tenant could be allocated now beyond its promised ones.
    pub fn num_available(&self, tenant: TenantId) -> usize {
        self.accounts.num_available(tenant, self.num_allocatable())
    }

    // -- prefix pins --------------------------------------------------------------------------------------------------

    /// One prefix pin more for each of these findable blocks.
    pub fn pin(&mut self, blocks: &[BlockId]) {
        self.records.journal.touch_all(blocks, &self.owners);
        for &block in blocks {
            let owner = self.owners[block as usize];
            if self.holders.is_idle(block) && !self.pins.is_pinned(block) {
                self.parking.unpark(&[block]);
                self.accounts.uncache(owner, 1);
                self.accounts.hold(owner, 1);
                self.pins.begin_idle();
            }
            if self.pins.add(block) == 1 {
                self.accounts.pin(owner);
            }
        }
    }

    /// Takes back one prefix pin of each. Give a prefix's tail first, as for `release`.
    pub fn unpin(&mut self, blocks: &[BlockId]) -> Result<()> {
        self.records.journal.touch_all(blocks, &self.owners);
        for &block in blocks {
            let owner = self.owners[block as usize];
            if self.pins.take_back(block)? == 0 {
                self.accounts.unpin(owner);
                if self.holders.is_idle(block) {
                    self.pins.end_idle();
                    self.rest(&[block]);
                }
            }
        }
        Ok(())
    }

    /// Evicts a parked block, whatever the order is.
    #[cfg(test)]
    pub(crate) fn evict_for_test(&mut self, block: BlockId, asker: &Asker) {
        self.parking.take(block, &mut Vec::new());
        self.accounts.uncache(self.owners[block as usize], 1);
        self.lose(block, asker);
        self.free.push(block);
    }

    // -- inside -------------------------------------------------------------------------------------------------------

    /// Frees these blocks: their content does not matter any more.
    fn push_free(&mut self, blocks: &[BlockId]) {
        blocks.iter().for_each(|block| self.index.forget_past(*block));
        self.records.journal.touch_all(blocks, &self.owners);
        self.parking.forget(blocks);
        self.free.extend_from_slice(blocks);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::fmt::Debug;

    use super::*;
    use crate::cache::advice::Advice;
    use crate::cache::eviction::policies::POLICIES;
    use crate::cache::pool::audit::PoolAudit;
    use crate::cache::pool::counters::PoolCounters;
    use crate::cache::prefix::digest_of;
    use crate::errors::Failure;

    pub(crate) const ASKER: Asker = Asker { tenant: 0, lease: [0; 8], now: 0.0 };

    /// Random numbers, the same for the same seed.
    pub(crate) struct Random(pub u64);

    impl Random {
        pub(crate) fn below(&mut self, bound: usize) -> usize {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 33) as usize % bound
        }

        pub(crate) fn tokens(&mut self, count: usize, vocab_size: usize) -> Vec<i32> {
            (0..count).map(|_| self.below(vocab_size) as i32).collect()
        }

        /// Some of these, in any order.
        pub(crate) fn sample<T>(&mut self, mut items: Vec<T>) -> Vec<T> {
            let count = self.below(items.len() + 1);
            (0..count).map(|_| items.swap_remove(self.below(items.len()))).collect()
        }
    }

    /// The message of a broken invariant.
    pub(crate) fn told<T: Debug>(answer: Result<T>) -> String {
        match answer {
            Err(Failure::Broken(what)) => what,
            other => panic!("the books are wrong, the answer is {other:?}"),
        }
    }

    /// Audits all blocks, two at a time.
    pub(crate) fn violations(pool: &BlockPool) -> Vec<String> {
        let (mut wrong, num_blocks) = (Vec::new(), pool.holders.len() as BlockId);
        (0..num_blocks)
            .step_by(2)
            .for_each(|first| PoolAudit::new(pool).blocks(&(first..num_blocks.min(first + 2)), &mut wrong));
        PoolAudit::new(pool).counts(&mut wrong);
        PoolAudit::new(pool).accounts(&mut wrong);
        wrong
    }

    /// Tenant 0 may take everything.
    pub(crate) fn of_one_tenant(num_blocks: usize, policy: Policy) -> BlockPool {
        let mut pool = BlockPool::new(num_blocks, &[Span::Full], policy);
        pool.set_share(0, Share::everything(num_blocks - 1));
        pool
    }

    fn pool() -> BlockPool {
        of_one_tenant(5, Policy::named("lru", 5).unwrap())
    }

    fn hash(name: i32) -> Hash {
        digest_of(&[name])
    }

    /// Blocks that are cached, the first one evicted first.
    fn cache(pool: &mut BlockPool, names: &[i32]) -> Vec<BlockId> {
        let blocks = pool.allocate(names.len(), 0, &ASKER).unwrap();
        names.iter().zip(&blocks).for_each(|(name, block)| assert_eq!(pool.publish(&hash(*name), *block), *block));
        pool.release(&blocks).unwrap();
        blocks
    }

    /// Blocks 1 to 4, all of them published, as one table.
    fn published_table(pool: &mut BlockPool) -> Vec<BlockId> {
        let table = pool.allocate(4, 0, &ASKER).unwrap();
        table.iter().for_each(|block| assert_eq!(pool.publish(&hash(*block as i32), *block), *block));
        table
    }

    fn counts(free: usize, cached: usize, active: usize, retired: usize) -> BlockCounts {
        BlockCounts { free, cached, active, retired }
    }

    #[test]
    fn a_new_pool_is_free_but_for_the_null_block() {
        let mut pool = pool();
        assert_eq!((pool.counts(), pool.num_allocatable()), (counts(4, 0, 0, 0), 4));
        assert_eq!(pool.allocate(0, 0, &ASKER).unwrap(), [0; 0]);
        assert_eq!(pool.allocate(4, 0, &ASKER).unwrap(), [1, 2, 3, 4]);
        assert_eq!(told(pool.allocate(1, 0, &ASKER)), "1 blocks to evict, 0 are cached");
        assert_eq!((pool.counts(), violations(&pool)), (counts(0, 0, 4, 0), vec![]));
    }

    #[test]
    fn the_block_freed_last_is_handed_out_first() {
        let mut pool = pool();
        pool.allocate(4, 0, &ASKER).unwrap();
        pool.release(&[3, 1, 4]).unwrap();
        assert_eq!(pool.allocate(2, 0, &ASKER).unwrap(), [4, 1]);
        pool.release(&[2]).unwrap();
        assert_eq!(pool.allocate(2, 0, &ASKER).unwrap(), [2, 3]);
    }

    #[test]
    fn a_block_goes_through_all_states() {
        let mut pool = pool();
        pool.allocate(1, 0, &ASKER).unwrap();
        assert_eq!((pool.state(1), pool.num_allocatable()), (BlockState::Active, 3));
        pool.retire(&[1]).unwrap();
        assert_eq!(
            (pool.state(1), pool.counts(), pool.num_allocatable()),
            (BlockState::Retired, counts(3, 0, 0, 1), 3)
        );
        pool.end_holds(&[1]).unwrap();
        assert_eq!((pool.state(1), pool.num_allocatable()), (BlockState::Free, 4));
        cache(&mut pool, &[7]);
        assert_eq!((pool.state(1), pool.num_allocatable()), (BlockState::Cached, 4));
        pool.acquire(&[1], 1).unwrap();
        assert_eq!((pool.counts(), violations(&pool)), (counts(3, 0, 1, 0), vec![]));
    }

    #[test]
    fn what_somebody_else_holds_stays_active_when_it_is_retired() {
        let mut pool = pool();
        pool.allocate(2, 0, &ASKER).unwrap();
        pool.acquire(&[1], 1).unwrap();
        pool.retire(&[2, 1]).unwrap();
        assert_eq!((pool.state(1), pool.state(2)), (BlockState::Active, BlockState::Retired));
        assert_eq!(
            (pool.holders().hold_count(1), pool.holders().hold_count(2), pool.counts()),
            (1, 1, counts(2, 0, 1, 1))
        );
        pool.retire(&[1]).unwrap();
        assert_eq!(pool.counts(), counts(2, 0, 0, 2));
        pool.end_holds(&[2, 1]).unwrap();
        assert_eq!((pool.counts(), violations(&pool)), (counts(3, 0, 0, 1), vec![]));
    }

    #[test]
    fn free_blocks_are_handed_out_before_cached_ones_and_the_oldest_of_these_first() {
        let mut pool = pool();
        assert_eq!(cache(&mut pool, &[1, 2, 3]), [1, 2, 3]);
        assert_eq!(pool.allocate(3, 0, &ASKER).unwrap(), [4, 1, 2]);
        assert_eq!((pool.counters().num_evicted, pool.state(3)), (2, BlockState::Cached));
        assert_eq!((pool.index().lookup(&hash(1)), pool.index().lookup(&hash(3))), (None, Some(3)));
        assert_eq!(violations(&pool), [""; 0]);
    }

    #[test]
    fn what_is_used_again_is_the_most_recent() {
        let mut pool = pool();
        cache(&mut pool, &[1, 2]);
        pool.acquire(&[1], 1).unwrap();
        pool.release(&[1]).unwrap();
        assert_eq!(pool.allocate(4, 0, &ASKER).unwrap()[2..], [2, 1]);
    }

    #[test]
    fn a_table_let_go_tail_first_is_evicted_leaf_first() {
        let mut released = pool();
        published_table(&mut released);
        released.release(&[4, 3, 2, 1]).unwrap();
        assert_eq!(released.allocate(4, 0, &ASKER).unwrap(), [4, 3, 2, 1]);
        let mut ended = pool();
        published_table(&mut ended);
        ended.retire(&[4, 3, 2, 1]).unwrap();
        ended.end_holds(&[4, 3, 2, 1]).unwrap();
        assert_eq!(ended.allocate(4, 0, &ASKER).unwrap(), [4, 3, 2, 1]);
    }

    #[test]
    fn of_a_released_table_the_part_without_content_is_free_and_the_rest_cached() {
        let mut pool = pool();
        pool.allocate(4, 0, &ASKER).unwrap();
        pool.publish(&hash(1), 1);
        pool.publish(&hash(3), 3);
        pool.release(&[4, 3, 2, 1]).unwrap();
        assert_eq!((pool.free_blocks(), pool.parking().parked()), (&[4, 2][..], vec![3, 1]));
        assert_eq!(violations(&pool), [""; 0]);
        assert_eq!(pool.allocate(4, 0, &ASKER).unwrap(), [2, 4, 3, 1]);
    }

    #[test]
    fn a_retired_block_is_handed_out_only_after_its_last_pin() {
        let mut pool = pool();
        pool.allocate(1, 0, &ASKER).unwrap();
        pool.acquire(&[1], 1).unwrap();
        pool.retire(&[1]).unwrap();
        pool.retire(&[1]).unwrap();
        pool.end_holds(&[1]).unwrap();
        assert_eq!(pool.allocate(3, 0, &ASKER).unwrap(), [2, 3, 4]);
        assert_eq!(pool.num_allocatable(), 0);
        pool.end_holds(&[1]).unwrap();
        assert_eq!(pool.allocate(1, 0, &ASKER).unwrap(), [1]);
    }

    #[test]
    fn a_retired_block_with_content_can_be_acquired_at_once() {
        let mut pool = pool();
        pool.allocate(1, 0, &ASKER).unwrap();
        pool.publish(&hash(7), 1);
        pool.retire(&[1]).unwrap();
        pool.acquire(&[1], 1).unwrap();
        pool.end_holds(&[1]).unwrap();
        assert_eq!(pool.state(1), BlockState::Active);
        pool.release(&[1]).unwrap();
        assert_eq!((pool.state(1), violations(&pool)), (BlockState::Cached, vec![]));
    }

    #[test]
    fn several_references_are_taken_at_once_and_given_back_one_by_one() {
        let mut pool = pool();
        pool.allocate(2, 0, &ASKER).unwrap();
        pool.acquire(&[1, 2], 3).unwrap();
        assert_eq!(
            (pool.holders().ref_count(1), pool.holders().ref_count(2), pool.counters().num_references),
            (4, 4, 8)
        );
        for num_left in (1..4).rev() {
            pool.release(&[2, 1]).unwrap();
            let counters = pool.counters();
            assert_eq!((counters.num_references, counters.num_active), (2 * num_left, 2));
            assert_eq!(counters.num_shared, if num_left > 1 { 2 } else { 0 });
        }
        pool.release(&[2, 1]).unwrap();
        assert_eq!((pool.counts(), pool.counters().num_references), (counts(4, 0, 0, 0), 0));
    }

    #[test]
    fn only_blocks_that_nothing_keeps_are_what_acquiring_takes_from_the_allocatable_ones() {
        let mut pool = pool();
        cache(&mut pool, &[1, 2]);
        assert_eq!(pool.allocate(2, 0, &ASKER).unwrap(), [3, 4]);
        pool.publish(&hash(4), 4);
        pool.retire(&[4]).unwrap();
        assert_eq!((pool.num_parked(&[1, 2, 3, 4]), pool.num_parked(&[3, 4]), pool.num_parked(&[])), (2, 0, 0));
        pool.acquire(&[1, 2, 3, 4], 1).unwrap();
        assert_eq!((pool.num_allocatable(), violations(&pool)), (0, vec![]));
    }

    #[test]
    fn only_the_one_holder_of_an_unpublished_block_may_write_it() {
        let mut pool = pool();
        assert!(!pool.is_writable(1));
        pool.allocate(1, 0, &ASKER).unwrap();
        assert!(pool.is_writable(1));
        pool.acquire(&[1], 1).unwrap();
        assert!(!pool.is_writable(1));
        pool.release(&[1]).unwrap();
        assert!(pool.is_writable(1));
        pool.publish(&hash(7), 1);
        assert!(!pool.is_writable(1));
    }

    #[test]
    fn a_published_block_stays_unwritable_after_the_cache_was_dropped_until_it_is_handed_out_again() {
        let mut pool = pool();
        pool.allocate(1, 0, &ASKER).unwrap();
        pool.publish(&hash(7), 1);
        assert_eq!(pool.drop_cached(0, 5, 0.0, 0), 1);
        assert!(!pool.is_writable(1));
        pool.release(&[1]).unwrap();
        assert_eq!((pool.state(1), violations(&pool)), (BlockState::Free, vec![]));
        assert_eq!(pool.allocate(1, 0, &ASKER).unwrap(), [1]);
        assert!(pool.is_writable(1));
    }

    #[test]
    fn a_duplicate_is_not_published_and_stays_writable() {
        let mut pool = pool();
        pool.allocate(2, 0, &ASKER).unwrap();
        assert_eq!((pool.publish(&hash(7), 1), pool.publish(&hash(7), 2)), (1, 1));
        assert!(pool.is_writable(2));
    }

    #[test]
    fn dropping_the_cache_frees_cached_blocks_and_leaves_held_and_retired_ones() {
        let mut pool = pool();
        cache(&mut pool, &[1, 2]);
        pool.allocate(2, 0, &ASKER).unwrap();
        pool.publish(&hash(3), 3);
        pool.publish(&hash(4), 4);
        pool.retire(&[4]).unwrap();
        assert_eq!(pool.drop_cached(0, 5, 0.0, 0), 4);
        assert_eq!((pool.counts(), pool.parking().parked()), (counts(2, 0, 1, 1), vec![]));
        pool.end_holds(&[4]).unwrap();
        assert_eq!(pool.state(4), BlockState::Free);
        assert_eq!((pool.drop_cached(0, 5, 0.0, 0), violations(&pool)), (0, vec![]));
    }

    #[test]
    fn the_cache_is_dropped_in_slices_of_any_bounds() {
        let mut pool = pool();
        cache(&mut pool, &[1, 2, 3, 4]);
        assert_eq!((pool.drop_cached(2, 3, 0.0, 0), pool.parking().parked()), (1, vec![1, 3, 4]));
        assert_eq!(
            (pool.drop_cached(0, 2, 0.0, 0), pool.drop_cached(2, 3, 0.0, 0), pool.drop_cached(3, 100, 0.0, 0)),
            (1, 0, 2)
        );
        assert_eq!((pool.counts(), pool.drop_cached(4, 2, 0.0, 0)), (counts(4, 0, 0, 0), 0));
    }

    #[test]
    fn counters_tell_references_sharers_and_what_happened() {
        let mut pool = pool();
        cache(&mut pool, &[1, 2, 3]);
        pool.acquire(&[1, 2], 2).unwrap();
        pool.acquire(&[2], 1).unwrap();
        pool.allocate(2, 0, &ASKER).unwrap();
        let told = PoolCounters { num_active: 4, num_references: 7, num_shared: 2, num_allocated: 5, num_evicted: 1 };
        assert_eq!((pool.counters(), pool.counts()), (told, counts(0, 0, 4, 0)));
    }

    #[test]
    fn a_wrong_call_is_a_broken_book() {
        let held = || {
            let mut pool = pool();
            pool.allocate(2, 0, &ASKER).unwrap();
            pool
        };
        assert_eq!(told(pool().release(&[1])), "block 1 is released, nobody holds it");
        assert_eq!(told(pool().retire(&[1])), "block 1 is released, nobody holds it");
        assert_eq!(told(held().release(&[1, 2, 3])), "block 3 is released, nobody holds it");
        assert_eq!(told(held().release(&[1, 1])), "block 1 is released, nobody holds it");
        assert_eq!(told(held().end_holds(&[1])), "a hold of block 1 ends, it has none");
        assert_eq!(told(pool().acquire(&[1], 1)), "block 1 has no content to share");
        assert_eq!(told(held().acquire(&[1, 2, 3], 1)), "block 3 has no content to share");
        let mut retired = held();
        retired.retire(&[1]).unwrap();
        assert_eq!(told(retired.acquire(&[1], 1)), "block 1 has no content to share");
    }

    #[test]
    fn pins_and_advice_and_their_ends_are_changes() {
        let mut pool = pool();
        let cached = cache(&mut pool, &[1, 2]);
        let told = |pool: &mut BlockPool, change: &dyn Fn(&mut BlockPool, &[BlockId])| {
            let first = pool.records.journal.num_changes();
            change(pool, &cached);
            let known = crate::cache::journal::Known::before(first);
            let (changes, _) = pool.records.journal.since(&known, 9, None).unwrap();
            changes.into_iter().map(|change| change.block).collect::<Vec<_>>()
        };
        assert_eq!(told(&mut pool, &|pool, blocks| pool.pin(blocks)), cached);
        assert_eq!(told(&mut pool, &|pool, blocks| pool.unpin(blocks).unwrap()), cached);
        assert_eq!(
            told(&mut pool, &|pool, blocks| pool.advisor().advise(blocks, Advice { level: 7, until: 9 })),
            cached
        );
        assert_eq!(told(&mut pool, &|pool, _| pool.advisor().end(8)), [0; 0]);
        assert_eq!(told(&mut pool, &|pool, _| pool.advisor().end(9)), cached);
    }

    #[test]
    fn wrong_accounts_are_told() {
        type Damage = fn(&mut BlockPool);
        let damages: [(Damage, &str); 5] = [
            (|pool| pool.accounts.hold(0, 1), "tenant 0 has (2, 1, 1) blocks held, cached and pinned"),
            (|pool| pool.accounts.cache(0, 1), "its account says (2, 2, 1)"),
            (|pool| pool.accounts.pin(0), "its account says (2, 1, 2)"),
            (|pool| pool.owners[1] = 7, "block 1 is tenant 7's, which has no account"),
            (|pool| assert_eq!(pool.pins.add(4), 1), "block 4 is pinned and can't be found"),
        ];
        for (damage, told) in damages {
            let mut pool = pool();
            let cached = cache(&mut pool, &[1, 2]);
            pool.pin(&cached[..1]);
            pool.allocate(1, 0, &ASKER).unwrap();
            assert_eq!(violations(&pool), [""; 0]);
            damage(&mut pool);
            let wrong = violations(&pool);
            assert!(wrong.iter().any(|wrong| wrong.contains(told)), "{told}: {wrong:?}");
        }
    }

    #[test]
    fn broken_lists_and_counts_are_told() {
        type Damage = fn(&mut BlockPool);
        let damages: [(Damage, &str); 10] = [
            (|pool| pool.free.truncate(3), "block 1 is Free and 0 times on the free stack"),
            (|pool| pool.free[0] = 2, "block 4 is Free and 0 times on the free stack"),
            (|pool| pool.free.push(1), "block 1 is Free and 2 times on the free stack"),
            (
                |pool| pool.parking.policy().park(&[1]),
                "block 1 is parked with the policy and on the shelves [true, false]",
            ),
            (|pool| pool.parking.policy().park(&[1]), "1 blocks counted as cached, 0 are"),
            (|pool| pool.counters.num_active = 1, "counted PoolCounters { num_active: 1, num_references: 0"),
            (|pool| pool.counters.num_references = 1, "counted PoolCounters { num_active: 0, num_references: 1"),
            (|pool| pool.counters.num_shared = 1, "there are PoolCounters { num_active: 0"),
            (|pool| pool.holders.hold(&[0]), "somebody holds the null block"),
            (
                |pool| {
                    pool.index.publish(&hash(7), 2);
                    pool.index.drop_hash(2);
                },
                "block 2 is free and still has a past",
            ),
        ];
        for (damage, message) in damages {
            let mut pool = pool();
            damage(&mut pool);
            let wrong = violations(&pool);
            assert!(wrong.iter().any(|line| line.contains(message)), "{message}: {wrong:?}");
        }
    }

    #[test]
    fn what_is_wrong_with_the_index_is_told() {
        let mut pool = pool();
        pool.index.publish(&hash(7), 2);
        pool.index.forget_past(2);
        assert!(violations(&pool).iter().any(|line| line.contains("index finds block 2 by a hash")));
    }

    const NUM_BLOCKS: usize = 11;
    const NUM_NAMES: usize = 6;

    /// Plain lists of the expected state; calls the pool and compares.
    struct Model {
        pool: BlockPool,
        is_lru: bool,
        random: Random,
        refs: [u32; NUM_BLOCKS],
        holds: [u32; NUM_BLOCKS],
        name_of: [Option<usize>; NUM_BLOCKS],
        was_named: [bool; NUM_BLOCKS],
        free: Vec<BlockId>,
        parked: Vec<BlockId>,
        num_allocated: usize,
        num_evicted: usize,
    }

    impl Model {
        fn new(policy: &str, seed: u64) -> Model {
            Model {
                pool: of_one_tenant(NUM_BLOCKS, Policy::named(policy, NUM_BLOCKS).unwrap()),
                is_lru: policy == "lru",
                random: Random(seed),
                refs: [0; NUM_BLOCKS],
                holds: [0; NUM_BLOCKS],
                name_of: [None; NUM_BLOCKS],
                was_named: [false; NUM_BLOCKS],
                free: (1..NUM_BLOCKS as BlockId).rev().collect(),
                parked: Vec::new(),
                num_allocated: 0,
                num_evicted: 0,
            }
        }

        /// Some of the blocks that are as wanted, in any order.
        fn pick(&mut self, is_wanted: impl Fn(&Model, usize) -> bool) -> Vec<BlockId> {
            let wanted =
                (1..NUM_BLOCKS).filter(|block| is_wanted(self, *block)).map(|block| block as BlockId).collect();
            self.random.sample(wanted)
        }

        fn do_anything(&mut self) {
            match self.random.below(14) {
                0..3 => self.allocate(),
                3..5 => self.publish(),
                5..7 => self.acquire(),
                7..9 => self.release(),
                9..11 => self.retire(),
                11..13 => self.end_holds(),
                _ => self.drop_cached(),
            }
        }

        fn allocate(&mut self) {
            let count = self.random.below(4.min(self.free.len() + self.parked.len()) + 1);
            let taken = self.pool.allocate(count, 0, &ASKER).unwrap();
            assert_eq!(taken.len(), count);
            let (popped, evicted) = taken.split_at(count.min(self.free.len()));
            popped.iter().for_each(|block| assert_eq!(self.free.pop(), Some(*block)));
            assert!(!self.is_lru || self.parked.starts_with(evicted));
            for &block in evicted {
                let place = self.parked.iter().position(|parked| *parked == block);
                self.parked.remove(place.expect("what is evicted was parked"));
                (self.name_of[block as usize], self.was_named[block as usize]) = (None, false);
            }
            taken.iter().for_each(|block| self.refs[*block as usize] = 1);
            self.num_allocated += count;
            self.num_evicted += evicted.len();
        }

        fn publish(&mut self) {
            let is_taken = |model: &Model, block: usize| model.refs[block] + model.holds[block] > 0;
            for block in self.pick(|model, block| is_taken(model, block) && model.name_of[block].is_none()) {
                let name = self.random.below(NUM_NAMES);
                let known = self.name_of.iter().position(|known| *known == Some(name)).map(|block| block as BlockId);
                assert_eq!(self.pool.publish(&hash(name as i32), block), known.unwrap_or(block));
                if known.is_none() {
                    (self.name_of[block as usize], self.was_named[block as usize]) = (Some(name), true);
                }
            }
        }

        fn acquire(&mut self) {
            let chosen = self.pick(|model, block| model.refs[block] > 0 || model.name_of[block].is_some());
            let count = self.random.below(3) as u32 + 1;
            let num_parked = self.parked.iter().filter(|block| chosen.contains(block)).count();
            assert_eq!(self.pool.num_parked(&chosen), num_parked);
            self.pool.acquire(&chosen, count).unwrap();
            self.parked.retain(|block| !chosen.contains(block));
            chosen.iter().for_each(|block| self.refs[*block as usize] += count);
        }

        fn release(&mut self) {
            let held = self.pick(|model, block| model.refs[block] > 0);
            self.pool.release(&held).unwrap();
            held.iter().for_each(|block| self.refs[*block as usize] -= 1);
            self.rest(&held);
        }

        fn retire(&mut self) {
            let held = self.pick(|model, block| model.refs[block] > 0);
            self.pool.retire(&held).unwrap();
            held.iter().for_each(|block| self.refs[*block as usize] -= 1);
            held.iter().for_each(|block| self.holds[*block as usize] += 1);
        }

        fn end_holds(&mut self) {
            let held = self.pick(|model, block| model.holds[block] > 0);
            self.pool.end_holds(&held).unwrap();
            held.iter().for_each(|block| self.holds[*block as usize] -= 1);
            self.rest(&held);
        }

        fn drop_cached(&mut self) {
            let (first, end) = (self.random.below(NUM_BLOCKS + 2), self.random.below(NUM_BLOCKS + 2));
            let named = (1..NUM_BLOCKS).filter(|block| (first..end).contains(block) && self.name_of[*block].is_some());
            let dropped: Vec<BlockId> = named.map(|block| block as BlockId).collect();
            assert_eq!(self.pool.drop_cached(first as BlockId, end as BlockId, 0.0, 0), dropped.len());
            for block in dropped {
                self.name_of[block as usize] = None;
                if self.parked.contains(&block) {
                    self.parked.retain(|parked| *parked != block);
                    self.rest(&[block]);
                }
            }
        }

        /// Those that nothing keeps any more go to their places, in this order.
        fn rest(&mut self, blocks: &[BlockId]) {
            for &block in blocks {
                let cells = block as usize;
                if self.refs[cells] + self.holds[cells] > 0 {
                    continue;
                }
                if self.name_of[cells].is_some() {
                    self.parked.push(block);
                } else {
                    self.free.push(block);
                    self.was_named[cells] = false;
                }
            }
        }

        fn state(&self, block: usize) -> BlockState {
            match (self.refs[block], self.holds[block], self.name_of[block]) {
                (0, 0, None) => BlockState::Free,
                (0, 0, Some(_)) => BlockState::Cached,
                (0, ..) => BlockState::Retired,
                _ => BlockState::Active,
            }
        }

        fn check(&self) {
            let pool = &self.pool;
            assert_eq!(violations(pool), [""; 0]);
            for block in 1..NUM_BLOCKS {
                let id = block as BlockId;
                assert_eq!((pool.state(id), pool.holders().ref_count(id)), (self.state(block), self.refs[block]));
                assert_eq!(pool.holders().hold_count(id), self.holds[block]);
                let expected = self.name_of[block].map(|name| hash(name as i32));
                assert_eq!(pool.index().hash(id), expected.as_ref());
                assert_eq!(pool.is_writable(id), self.refs[block] == 1 && !self.was_named[block]);
            }
            let num = |state| (1..NUM_BLOCKS).filter(|block| self.state(*block) == state).count();
            let states = [BlockState::Free, BlockState::Cached, BlockState::Active, BlockState::Retired].map(num);
            assert_eq!(pool.counts(), counts(states[0], states[1], states[2], states[3]));
            assert_eq!(pool.num_allocatable(), self.free.len() + self.parked.len());
            assert_eq!(pool.free_blocks(), self.free);
            assert!(!self.is_lru || pool.parking().parked() == self.parked);
            let counters = pool.counters();
            assert_eq!(counters.num_references, self.refs.iter().sum::<u32>() as usize);
            assert_eq!(counters.num_shared, self.refs.iter().filter(|refs| **refs > 1).count());
            assert_eq!(counters.num_allocated, self.num_allocated as u64);
            assert_eq!(counters.num_evicted, self.num_evicted as u64);
        }
    }

    #[test]
    fn any_calls_leave_the_pool_as_plain_lists_have_it() {
        for (seed, policy) in (0..30).flat_map(|seed| POLICIES.map(|policy| (seed, policy))) {
            let mut model = Model::new(policy, seed);
            for _ in 0..100 {
                model.do_anything();
                model.check();
            }
        }
    }
}
