//! The blocks without a holder that are in the index, and the order of their eviction.
//!
//!     1  those of tenants over their quota   the asker's own first; for each tenant in the order of 2 to 5
//!     2  with a priority below the default   level by level, the least recently parked first
//!     3  without advice                      by the eviction policy
//!     4  with a priority above the default   level by level, the least recently parked first; then those awaited
//!     5  kept by breakpoints                 the least recently parked first
//!
//! Levels and tenants cost nothing without advice and without quotas.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::cache::advice::{
    AWAITED, Advice, AdviceBook, FOREVER, KEPT, LEAST_WORTH, Level, Millis, NUM_LEVELS, UNADVISED,
};
use crate::cache::eviction::policies::Policy;
use crate::cache::eviction::rings::Rings;
use crate::cache::keeps::KeepBook;
use crate::cache::prefix::{BlockId, Hash};
use crate::cache::tenants::TenantId;

const NOTHING: Advice = Advice { level: UNADVISED, until: FOREVER };

/// Parked blocks with advice, or kept by breakpoints: a ring per level.
#[derive(Debug, Serialize, Deserialize)]
struct Shelves {
    book: AdviceBook,
    /// None: nothing was kept yet.
    keeps: Option<Box<KeepBook>>,
    rings: Rings,
    num_blocks: usize,
    num_parked: [usize; NUM_LEVELS + 1],
}

impl Shelves {
    fn new(num_blocks: usize) -> Shelves {
        let rings = Rings::new(num_blocks + NUM_LEVELS + 1);
        let book = AdviceBook::new(num_blocks);
        Shelves { book, keeps: None, rings, num_blocks, num_parked: [0; NUM_LEVELS + 1] }
    }

    fn is_kept(&self, block: BlockId) -> bool {
        self.keeps.as_ref().is_some_and(|keeps| keeps.is_kept(block))
    }

    fn level(&self, block: BlockId) -> Level {
        if self.is_kept(block) { KEPT } else { self.book.level(block) }
    }

    fn sentinel(&self, level: Level) -> u32 {
        (self.num_blocks + usize::from(level)) as u32
    }

    fn park(&mut self, blocks: &[BlockId], level: Level) {
        self.rings.append_all(blocks, self.sentinel(level));
        self.num_parked[usize::from(level)] += blocks.len();
    }

    fn unpark(&mut self, block: BlockId, level: Level) {
        self.rings.remove(block);
        self.num_parked[usize::from(level)] -= 1;
    }

    /// The least recently parked one of a level.
    fn first(&self, level: Level) -> Option<BlockId> {
        Some(self.rings.first(self.sentinel(level))).filter(|node| (*node as usize) < self.num_blocks)
    }
}

/// Calls with each run of blocks of one level.
fn for_levels(blocks: &[BlockId], shelves: &mut Shelves, mut call: impl FnMut(&mut Shelves, Level, &[BlockId])) {
    let mut rest = blocks;
    while let Some(first) = rest.first() {
        let level = shelves.level(*first);
        let length = rest.iter().take_while(|block| shelves.level(**block) == level).count();
        let (run, others) = rest.split_at(length);
        call(shelves, level, run);
        rest = others;
    }
}

/// Parked blocks by tenant: a ring per tenant and level.
#[derive(Debug, Serialize, Deserialize)]
struct TenantRings {
    rings: Rings,
    num_blocks: usize,
}

impl TenantRings {
    fn sentinel(&mut self, tenant: TenantId, level: Level) -> u32 {
        let node = self.num_blocks + tenant as usize * NUM_LEVELS + usize::from(level - LEAST_WORTH);
        self.rings.reach(node + 1);
        node as u32
    }

    fn park(&mut self, block: BlockId, tenant: TenantId, level: Level) {
        let sentinel = self.sentinel(tenant, level);
        self.rings.append(block, sentinel);
    }

    /// The tenant's block that is evicted first.
    fn first(&mut self, tenant: TenantId) -> Option<BlockId> {
        (LEAST_WORTH..=KEPT).find_map(|level| {
            let sentinel = self.sentinel(tenant, level);
            Some(self.rings.first(sentinel)).filter(|node| (*node as usize) < self.num_blocks)
        })
    }
}

/// All parked blocks. Each method's cost is O(1) per block it is given.
#[derive(Debug, Serialize, Deserialize)]
pub struct Parking {
    policy: Policy,
    num_blocks: usize,
    shelves: Option<Box<Shelves>>,
    tenants: Option<Box<TenantRings>>,
    #[serde(skip)]
    worth_less: BTreeSet<BlockId>,
}

impl Parking {
    pub fn new(num_blocks: usize, policy: Policy) -> Parking {
        Parking { policy, num_blocks, shelves: None, tenants: None, worth_less: BTreeSet::new() }
    }

    pub fn policy(&mut self) -> &mut Policy {
        &mut self.policy
    }

    pub fn num_parked(&self) -> usize {
        let advised = self.shelves.as_ref().map_or(0, |shelves| shelves.num_parked.iter().sum());
        self.policy.num_parked() + advised
    }

    pub fn is_parked(&self, block: BlockId) -> bool {
        self.policy.is_parked(block) || self.shelves.as_ref().is_some_and(|shelves| shelves.rings.contains(block))
    }

    /// All parked blocks, each once, in eviction order where it is known.
    pub fn parked(&self) -> Vec<BlockId> {
        let on_shelves = |levels: std::ops::RangeInclusive<Level>| {
            let rings = self.shelves.iter().flat_map(move |shelves| {
                levels.clone().flat_map(move |level| shelves.rings.nodes(shelves.sentinel(level)))
            });
            rings.collect::<Vec<_>>()
        };
        let (less, more) = (on_shelves(LEAST_WORTH..=UNADVISED - 1), on_shelves(UNADVISED + 1..=KEPT));
        [less, self.policy.parked(), more].concat()
    }

    /// The level by which the block is evicted: by its advice, or KEPT.
    pub fn level(&self, block: BlockId) -> Level {
        self.shelves.as_ref().map_or(UNADVISED, |shelves| shelves.level(block))
    }

    /// The level of the block's advice, whether breakpoints keep it or not.
    pub fn advised_level(&self, block: BlockId) -> Level {
        self.shelves.as_ref().map_or(UNADVISED, |shelves| shelves.book.level(block))
    }

    /// The advice for a block, if there is any.
    pub fn advice(&self, block: BlockId) -> Option<Advice> {
        let advice = self.shelves.as_ref()?.book.advice(block);
        (advice.level != UNADVISED).then_some(advice)
    }

    /// Begins or ends to keep the blocks by tenant. `owner` returns a block's tenant.
    pub fn set_by_tenant(&mut self, is_kept: bool, owner: impl Fn(BlockId) -> TenantId) {
        if is_kept == self.tenants.is_some() {
            return;
        }
        self.tenants =
            is_kept.then(|| Box::new(TenantRings { rings: Rings::new(self.num_blocks), num_blocks: self.num_blocks }));
        for block in self.parked() {
            let level = self.level(block);
            if let Some(tenants) = &mut self.tenants {
                tenants.park(block, owner(block), level);
            }
        }
    }

    /// Parks blocks without a holder. Children come before their parents.
    pub fn park(&mut self, blocks: &[BlockId], owner: TenantId) {
        match &mut self.shelves {
            None => self.policy.park(blocks),
            Some(shelves) => for_levels(blocks, shelves, |shelves, level, run| match level {
                UNADVISED => self.policy.park(run),
                _ => shelves.park(run, level),
            }),
        }
        if let Some(tenants) = &mut self.tenants {
            for &block in blocks {
                let level = self.shelves.as_ref().map_or(UNADVISED, |shelves| shelves.level(block));
                tenants.park(block, owner, level);
            }
        }
    }

    /// In use again, or dropped.
    pub fn unpark(&mut self, blocks: &[BlockId]) {
        match &mut self.shelves {
            None => self.policy.unpark(blocks),
            Some(shelves) => for_levels(blocks, shelves, |shelves, level, run| match level {
                UNADVISED => self.policy.unpark(run),
                _ => run.iter().for_each(|block| shelves.unpark(*block, level)),
            }),
        }
        if let Some(tenants) = &mut self.tenants {
            blocks.iter().for_each(|block| tenants.rings.remove(*block));
        }
    }

    /// Free, and without content. They are not parked.
    pub fn forget(&mut self, blocks: &[BlockId]) {
        self.policy.forget(blocks);
        if let Some(shelves) = &mut self.shelves {
            blocks.iter().for_each(|block| shelves.book.forget(*block));
            if let Some(keeps) = &mut shelves.keeps {
                blocks.iter().for_each(|block| keeps.end(*block));
            }
        }
    }

    /// Evicts `count` of the parked blocks: first as many of each tenant as in `reclaims`. There have to be enough.
    pub fn evict(&mut self, count: usize, reclaims: &[(TenantId, usize)], victims: &mut Vec<BlockId>) {
        let end = victims.len() + count;
        for &(tenant, num_reclaimed) in reclaims {
            let most = end.min(victims.len() + num_reclaimed);
            while victims.len() < most {
                let Some(block) = self.tenants.as_mut().and_then(|tenants| tenants.first(tenant)) else { break };
                self.take(block, victims);
            }
        }
        self.evict_from_shelves(LEAST_WORTH..=UNADVISED - 1, end, victims);
        let count = (end - victims.len()).min(self.policy.num_parked());
        let unadvised = victims.len();
        if count > 0 {
            self.policy.evict(count, victims);
        }
        if let Some(tenants) = &mut self.tenants {
            victims[unadvised..].iter().for_each(|block| tenants.rings.remove(*block));
        }
        self.evict_from_shelves(UNADVISED + 1..=KEPT, end, victims);
        debug_assert!(victims.len() == end);
    }

    fn evict_from_shelves(&mut self, levels: std::ops::RangeInclusive<Level>, end: usize, victims: &mut Vec<BlockId>) {
        for level in levels {
            while victims.len() < end {
                let Some(block) = self.shelves.as_ref().and_then(|shelves| shelves.first(level)) else { break };
                self.take(block, victims);
            }
        }
    }

    /// Some blocks are about to be evicted.
    pub fn begin_eviction(&mut self) {
        self.worth_less.clear();
    }

    /// True if the block, which was evicted since `begin_eviction`, had a priority below the default.
    pub fn was_worth_less(&self, block: BlockId) -> bool {
        self.worth_less.contains(&block)
    }

    /// Evicts a parked block.
    pub fn take(&mut self, block: BlockId, victims: &mut Vec<BlockId>) {
        self.worth_less.extend((self.level(block) < UNADVISED).then_some(block));
        self.unpark(&[block]);
        if let Some(keeps) = self.keeps_mut().filter(|keeps| keeps.is_kept(block)) {
            keeps.count_evicted();
        }
        self.forget(&[block]);
        victims.push(block);
    }

    // -- keeping ------------------------------------------------------------------------------------------------------

    /// The blocks that breakpoints keep; None if nothing was kept yet.
    pub fn keeps(&self) -> Option<&KeepBook> {
        self.shelves.as_ref().and_then(|shelves| shelves.keeps.as_deref())
    }

    pub fn restart_counters(&mut self) {
        if let Some(keeps) = self.keeps_mut() {
            keeps.restart_counters();
        }
    }

    fn keeps_mut(&mut self) -> Option<&mut KeepBook> {
        self.shelves.as_mut().and_then(|shelves| shelves.keeps.as_deref_mut())
    }

    /// True if breakpoints keep the block.
    pub fn is_kept(&self, block: BlockId) -> bool {
        self.keeps().is_some_and(|keeps| keeps.is_kept(block))
    }

    /// A use of a tenant's blocks with a breakpoint, the last one of a table first: they were not kept before, and
    /// are not parked.
    pub fn begin_keep(&mut self, blocks: &[BlockId], ttl: Millis, now: Millis, owner: TenantId) {
        let num_blocks = self.num_blocks;
        let shelves = self.shelves.get_or_insert_with(|| Box::new(Shelves::new(num_blocks)));
        let keeps = shelves.keeps.get_or_insert_with(|| Box::new(KeepBook::new(num_blocks)));
        keeps.begin(blocks, ttl, now, owner);
    }

    /// The same of blocks that are kept: see KeepBook::renew.
    pub fn renew_keep(&mut self, blocks: &[BlockId], ttl: Millis, now: Millis, owner: TenantId) {
        if let Some(keeps) = self.keeps_mut() {
            keeps.renew(blocks, ttl, now, owner);
        }
    }

    /// A tenant's kept blocks are not kept any more: their level is that of their advice.
    pub fn end_keep(&mut self, blocks: &[BlockId], owner: TenantId) {
        if let Some(keeps) = self.keeps_mut() {
            blocks.iter().for_each(|block| keeps.end(*block));
        }
        self.park_again(blocks, owner);
    }

    /// The same of those of a tenant that were used least recently. Lists them.
    pub fn end_oldest_keeps(&mut self, tenant: TenantId, count: usize) -> Vec<BlockId> {
        let ended = self.keeps_mut().map_or_else(Vec::new, |keeps| keeps.end_oldest(tenant, count));
        self.park_again(&ended, tenant);
        ended
    }

    /// Parks by their level those blocks that are parked as kept ones.
    fn park_again(&mut self, blocks: &[BlockId], owner: TenantId) {
        let Some(shelves) = &mut self.shelves else { return };
        let mut parked = Vec::with_capacity(blocks.len());
        shelves.rings.take_all(blocks, &mut parked);
        shelves.num_parked[usize::from(KEPT)] -= parked.len();
        if let Some(tenants) = &mut self.tenants {
            parked.iter().for_each(|block| tenants.rings.remove(*block));
        }
        self.park(&parked, owner);
    }

    /// Kept blocks with a time that is over: see KeepBook::take_ended.
    pub fn take_ended_keeps(&mut self, now: Millis) -> Vec<BlockId> {
        self.keeps_mut().map_or_else(Vec::new, |keeps| keeps.take_ended(now))
    }

    // -- advice -------------------------------------------------------------------------------------------------------

    /// Enters advice for blocks, the last one of a table first. `owner` is their tenant, if they are parked.
    pub fn advise(&mut self, blocks: &[BlockId], advice: Advice, owner: TenantId) {
        if self.shelves.is_none() {
            if advice.level == UNADVISED {
                return;
            }
            self.shelves = Some(Box::new(Shelves::new(self.num_blocks)));
        }
        for &block in blocks {
            let is_parked = self.is_parked(block);
            if is_parked {
                self.unpark(&[block]);
            }
            if let Some(shelves) = &mut self.shelves {
                shelves.book.enter(block, advice);
            }
            if is_parked {
                self.park(&[block], owner);
            }
        }
    }

    /// A prompt waits for these blocks, the last one of a table first: they are evicted last, until as many prompts have
    /// found them as wait for them.
    pub fn expect(&mut self, blocks: &[BlockId], until: Millis, owner: TenantId) {
        for &block in blocks {
            let known = self.advice(block).filter(|advice| advice.level == AWAITED).map_or(0, |advice| advice.until);
            self.advise(&[block], Advice { level: AWAITED, until: until.max(known) }, owner);
            if let Some(shelves) = &mut self.shelves {
                shelves.book.count_waiting(block);
            }
        }
    }

    /// A prompt has found these blocks. Lists those that no other prompt waits for.
    pub fn end_waits(&mut self, blocks: &[BlockId], owner: TenantId) -> Vec<BlockId> {
        let Some(shelves) = &mut self.shelves else { return Vec::new() };
        let book = &mut shelves.book;
        if !book.is_any_awaited() {
            return Vec::new();
        }
        let mut is_met = |block: &BlockId| book.level(*block) == AWAITED && book.was_last_waiting(*block);
        let met: Vec<BlockId> = blocks.iter().copied().filter(|block| is_met(block)).collect();
        self.advise(&met, NOTHING, owner);
        met
    }

    /// No advice and no time of a kept block ends before this; None if there is none that ends.
    pub fn next_end(&self) -> Option<Millis> {
        let advice = self.shelves.as_ref().and_then(|shelves| shelves.book.next_end());
        advice.into_iter().chain(self.keeps().and_then(KeepBook::next_end)).min()
    }

    /// Ends the expired advice, and lists its blocks in `ended`.
    pub fn end_advice(&mut self, now: Millis, owner: impl Fn(BlockId) -> TenantId, ended: &mut Vec<BlockId>) {
        while let Some(block) = self.shelves.as_mut().and_then(|shelves| shelves.book.pop_ended(now)) {
            self.advise(&[block], NOTHING, owner(block));
            ended.push(block);
        }
    }

    /// Tells the policy which blocks a new sequence uses.
    pub fn admit(&mut self, found: &[BlockId], fresh: &[BlockId], hashes: &[Hash]) {
        self.policy.admit(found, fresh, hashes);
    }

    /// Reports violations of a block that should be parked or not.
    pub fn audit(&self, block: BlockId, should_be: bool, wrong: &mut Vec<String>) {
        let places =
            [self.policy.is_parked(block), self.shelves.as_ref().is_some_and(|shelves| shelves.rings.contains(block))];
        let is_advised = self.level(block) != UNADVISED;
        if places != [should_be && !is_advised, should_be && is_advised] {
            wrong.push(format!("block {block} is parked with the policy and on the shelves {places:?}"));
        }
        if let Some(tenants) = &self.tenants
            && tenants.rings.contains(block) != should_be
        {
            wrong.push(format!("block {block} is {} among its tenant's", if should_be { "not" } else { "still" }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parking() -> Parking {
        Parking::new(12, Policy::named("lru", 12).unwrap())
    }

    fn advice(level: Level, until: Millis) -> Advice {
        Advice { level, until }
    }

    fn evicted(parking: &mut Parking, count: usize, reclaims: &[(TenantId, usize)]) -> Vec<BlockId> {
        let mut victims = Vec::new();
        parking.evict(count, reclaims, &mut victims);
        victims
    }

    fn violations(parking: &Parking, parked: &[BlockId]) -> Vec<String> {
        let mut wrong = Vec::new();
        (1..12).for_each(|block| parking.audit(block, parked.contains(&block), &mut wrong));
        wrong
    }

    #[test]
    fn what_is_worth_less_goes_first_whenever_it_was_said() {
        let mut parking = parking();
        parking.park(&[1, 2], 0);
        parking.advise(&[3, 4], advice(9, FOREVER), 0);
        parking.advise(&[5], advice(2, FOREVER), 0);
        parking.park(&[3, 4, 5, 6], 0);
        parking.advise(&[1], advice(8, FOREVER), 0);
        parking.advise(&[6], advice(1, FOREVER), 0);
        assert_eq!((parking.parked(), parking.num_parked()), (vec![6, 5, 2, 1, 3, 4], 6));
        assert_eq!(violations(&parking, &[1, 2, 3, 4, 5, 6]), [""; 0]);
        assert_eq!(evicted(&mut parking, 4, &[]), [6, 5, 2, 1]);
        assert_eq!(
            (parking.level(6), parking.advice(1), parking.advice(3)),
            (UNADVISED, None, Some(advice(9, FOREVER)))
        );
        parking.unpark(&[3]);
        assert_eq!((evicted(&mut parking, 1, &[]), parking.num_parked()), (vec![4], 0));
        assert_eq!(violations(&parking, &[]), [""; 0]);
        parking.park(&[3], 0);
        assert_eq!((parking.level(3), parking.is_parked(3), parking.is_parked(4)), (9, true, false));
    }

    #[test]
    fn advice_ends_where_the_block_is_and_the_last_of_a_chain_still_goes_first() {
        let mut parking = parking();
        parking.park(&[1], 0);
        parking.advise(&[4, 3, 2], advice(9, 100), 0);
        parking.park(&[4, 3, 2], 0);
        parking.advise(&[5], advice(9, 100), 0);
        let mut ended = Vec::new();
        parking.end_advice(99, |_| 0, &mut ended);
        assert_eq!((ended.len(), parking.parked()), (0, vec![1, 4, 3, 2]));
        parking.end_advice(100, |_| 0, &mut ended);
        assert_eq!((ended, parking.level(4), parking.level(5)), (vec![4, 3, 2, 5], UNADVISED, UNADVISED));
        assert_eq!((violations(&parking, &[1, 2, 3, 4]), evicted(&mut parking, 3, &[])), (vec![], vec![1, 4, 3]));
    }

    #[test]
    fn what_has_no_content_any_more_is_worth_nothing() {
        let mut parking = parking();
        parking.advise(&[1, 2], advice(9, 100), 0);
        parking.forget(&[1]);
        assert_eq!((parking.level(1), parking.level(2)), (UNADVISED, 9));
        let mut ended = Vec::new();
        parking.end_advice(1000, |_| 0, &mut ended);
        assert_eq!(ended, [2]);
    }

    #[test]
    fn nothing_is_kept_of_advice_that_says_nothing() {
        let mut parking = parking();
        parking.advise(&[1], advice(UNADVISED, 100), 0);
        assert!(parking.shelves.is_none());
    }

    #[test]
    fn of_who_is_over_the_quota_the_least_worth_goes_first_and_no_more_than_said() {
        let mut parking = parking();
        parking.park(&[1, 2], 0);
        parking.set_by_tenant(true, |_| 0);
        parking.advise(&[4], advice(9, FOREVER), 1);
        parking.advise(&[5], advice(1, FOREVER), 2);
        parking.park(&[3, 4], 1);
        parking.park(&[5, 6], 2);
        parking.park(&[7], 1);
        assert_eq!(violations(&parking, &[1, 2, 3, 4, 5, 6, 7]), [""; 0]);
        assert_eq!(evicted(&mut parking, 3, &[(1, 2)]), [3, 7, 5], "two of tenant 1, then what is worth least of all");
        assert_eq!(evicted(&mut parking, 1, &[(1, 9), (2, 9)]), [4], "though it is worth much");
        assert_eq!(evicted(&mut parking, 2, &[(1, 9)]), [1, 2], "a tenant without any gives none");
        assert_eq!(violations(&parking, &[6]), [""; 0]);
        parking.set_by_tenant(false, |_| 0);
        assert_eq!((evicted(&mut parking, 1, &[(2, 1)]), violations(&parking, &[])), (vec![6], vec![]));
    }

    #[test]
    fn what_is_parked_at_two_places_is_told() {
        let mut parking = parking();
        parking.advise(&[1], advice(9, FOREVER), 0);
        parking.park(&[1], 0);
        parking.policy.park(&[1]);
        assert_eq!(violations(&parking, &[1]), ["block 1 is parked with the policy and on the shelves [true, true]"]);
        parking.set_by_tenant(true, |_| 0);
        parking.tenants.as_mut().unwrap().rings.remove(1);
        assert_eq!(violations(&parking, &[1])[1], "block 1 is not among its tenant's");
    }
}
