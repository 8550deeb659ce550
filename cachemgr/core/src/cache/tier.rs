//! The blocks of a tier below the pool, the host tier or the disk: those that hold an offloaded sequence, copies of
//! cached blocks, and those that a planned step, or an order to the worker, could still access.
//!
//!     held  copy      holds  state
//!     yes   no        any    held       by exactly one sequence: nothing is shared here
//!     no    findable  any    cached     a copy of a cached block; evictable without holds
//!     no    other     > 0    retired    released, or a copy that arrives: something could still write or read it
//!     no    no        0      free       on the free stack
//!
//! Sequences come first: a copy is evicted if a sequence needs its block. No sequence is offloaded to the disk. A tier's
//! blocks have numbers of their own, from 0 on; each has room for one block of the pool.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::cache::accounts::Accounts;
use crate::cache::tenants::TenantId;
pub use crate::cache::tier_copies::{Content, Tier, TierBlockId};
use crate::cache::tier_copies::{Evicted, TierCopies};
use crate::errors::{Reason, Refusal, Result, broken};

/// Blocks of a tier by state; they add up to the tier's blocks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TierBlockCounts {
    pub free: usize,
    pub held: usize,
    pub retired: usize,
    pub cached: usize,
}

/// Callers record the holder of each block.
#[derive(Debug, Serialize, Deserialize)]
pub struct TierPool {
    tier: Tier,
    is_held: Vec<bool>,
    holds: Vec<u32>,
    free: Vec<TierBlockId>, // a stack: the lowest id on top at first
    num_held: usize,
    copies: TierCopies,
}

impl TierPool {
    /// With at most `most_copies` copies of cached blocks.
    pub fn new(tier: Tier, num_blocks: usize, most_copies: usize) -> TierPool {
        TierPool {
            tier,
            is_held: vec![false; num_blocks],
            holds: vec![0; num_blocks],
            free: (0..num_blocks as TierBlockId).rev().collect(),
            num_held: 0,
            copies: TierCopies::new(num_blocks, most_copies),
        }
    }

    /// The copies of cached blocks.
    pub fn copies(&self) -> &TierCopies {
        &self.copies
    }

    /// Blocks of the tier; 0: there is none.
    pub fn len(&self) -> usize {
        self.holds.len()
    }

    pub fn counts(&self) -> TierBlockCounts {
        let (free, held, cached) = (self.free.len(), self.num_held, self.copies.num_findable());
        let retired = self.len().saturating_sub(free + held + cached); // less than none if the books are wrong
        TierBlockCounts { free, held, retired, cached }
    }

    /// Too few blocks for a sequence: free ones, and copies that can be evicted.
    pub fn refuse(&self, seq_id: i64, needed: usize) -> Option<Refusal> {
        let (free, retired) = (self.free.len() + self.copies.num_evictable(), self.counts().retired);
        if needed <= free {
            return None;
        }
        let limit = self.len();
        let message =
            format!("sequence {seq_id} needs {needed} host blocks; of {limit} {free} are free, {retired} retired");
        let refusal = Refusal::new(Reason::OutOfHostBlocks, message).with("sequence_id", seq_id);
        Some(refusal.with("needed", needed).with("free", free).with("retired", retired).with("limit", limit))
    }

    /// Allocates blocks, in the order of their numbers as long as none was released. Evicts copies if too few are free.
    ///
    /// The caller has checked `refuse`.
    pub fn allocate(&mut self, count: usize, accounts: &Accounts) -> Result<Vec<TierBlockId>> {
        while self.free.len() < count
            && let Some(copy) = self.copies.first(accounts, None)
        {
            self.evict(copy);
        }
        let Some(num_left) = self.free.len().checked_sub(count) else {
            return broken(format!("{count} {} blocks to hand out, {} are free", self.tier, self.free.len()));
        };
        let mut blocks = self.free.split_off(num_left);
        blocks.reverse();
        blocks.iter().for_each(|block| self.is_held[*block as usize] = true);
        self.num_held += count;
        Ok(blocks)
    }

    /// Releases these held blocks. They are free at once unless a step holds them.
    pub fn release(&mut self, blocks: &[TierBlockId]) -> Result<()> {
        for &block in blocks.iter().rev() {
            if !std::mem::take(&mut self.is_held[block as usize]) {
                return broken(format!("{} block {block} is released, nobody holds it", self.tier));
            }
            self.num_held -= 1;
            self.rest(block);
        }
        Ok(())
    }

    /// As `release`, but none is free before as many `end_holds`.
    pub fn retire(&mut self, blocks: &[TierBlockId]) -> Result<()> {
        blocks.iter().for_each(|block| self.holds[*block as usize] += 1);
        self.release(blocks)
    }

    /// Ends one hold of each.
    pub fn end_holds(&mut self, blocks: &[TierBlockId]) -> Result<()> {
        for &block in blocks.iter().rev() {
            let Some(holds) = self.holds[block as usize].checked_sub(1) else {
                return broken(format!("a hold of {} block {block} ends, it has none", self.tier));
            };
            self.holds[block as usize] = holds;
            self.rest(block);
        }
        Ok(())
    }

    /// A block without a holder: if no step holds it, a copy is evictable, and any other block is free.
    fn rest(&mut self, block: TierBlockId) {
        if self.holds[block as usize] > 0 {
            return;
        }
        if self.copies.is_findable(block) {
            self.copies.end_use(block);
        } else {
            self.free.push(block);
        }
    }

    // -- copies of evicted blocks -------------------------------------------------------------------------------------

    /// True if a copy of an evicted block may be made here: see TierCopies::may_keep.
    pub fn may_keep(&self, evicted: &Evicted) -> bool {
        self.copies.may_keep(evicted)
    }

    /// A block for a copy of this content, which is held once for what copies it. None if no copy is made: there is one
    /// already, or there is no room.
    pub fn keep(&mut self, content: Content, accounts: &Accounts) -> Option<TierBlockId> {
        if !self.copies.are_made() {
            return None;
        }
        if let Some(copy) = self.copies.lookup(&content.hash) {
            self.touch(&[copy]);
            return None;
        }
        if self.copies.is_full() || self.free.is_empty() {
            let victim = self.copies.first(accounts, Some(content.tenant))?;
            self.evict(victim);
        }
        let block = self.free.pop()?;
        self.copies.begin(block, content);
        self.holds[block as usize] += 1;
        Some(block)
    }

    /// These copies were used now, later than all others.
    pub fn touch(&mut self, copies: &[TierBlockId]) {
        for copy in copies.iter().filter(|copy| self.holds[**copy as usize] == 0) {
            self.copies.end_use(*copy);
        }
    }

    /// Enters copies that are there already, each in a free block, the least recently used one first. Leaves out those
    /// that have no room, and those of content of which there is a copy. Returns how many were entered. Cost:
    /// O(blocks of the tier).
    pub fn enter(&mut self, found: impl Iterator<Item = (TierBlockId, Content)>, accounts: &Accounts) -> usize {
        let mut is_free = vec![false; self.len()];
        self.free.iter().for_each(|block| is_free[*block as usize] = true);
        let num_before = self.free.len();
        for (block, content) in found {
            let has_room = !self.copies.is_full() && self.copies.has_share(content.tenant, accounts);
            let is_known = self.copies.lookup(&content.hash).is_some();
            if has_room && !is_known && is_free.get(block as usize) == Some(&true) {
                is_free[block as usize] = false;
                self.copies.begin(block, content);
                self.copies.arrive(block);
                self.copies.end_use(block);
            }
        }
        self.free.retain(|block| is_free[*block as usize]);
        num_before - self.free.len()
    }

    /// These are being copied elsewhere, and each is held once for it.
    pub fn begin_use(&mut self, copies: &[TierBlockId]) {
        for copy in copies {
            self.holds[*copy as usize] += 1;
            self.copies.begin_use(*copy);
        }
    }

    /// These were copied here. They are findable from now on; `end_holds` follows.
    pub fn arrive(&mut self, copies: &[TierBlockId]) {
        copies.iter().for_each(|copy| self.copies.arrive(*copy));
    }

    /// Drops copies: those that nothing holds are free.
    pub fn drop_copies(&mut self, copies: &[TierBlockId]) {
        for copy in copies.iter().rev() {
            self.copies.remove(*copy);
            self.rest(*copy);
        }
    }

    /// The content of these tenants is being reset: drops their copies. Content that was published before this change of
    /// the journal is not copied any more. Cost: O(blocks of the tier + tenants).
    pub fn begin_reset(&mut self, tenants: Range<TenantId>, num_changes: u64) {
        let copies = self.copies.begin_reset(tenants, num_changes);
        self.drop_copies(&copies);
    }

    /// A new epoch begins: the tier is empty.
    pub fn begin_epoch(&mut self) {
        self.drop_copies(&self.copies.all());
        self.copies.restart_counters();
    }

    fn evict(&mut self, copy: TierBlockId) {
        self.copies.evict(copy);
        self.free.push(copy);
    }

    /// Reports violations, given the number of sequences that hold each block, of steps in flight and orders that hold
    /// it, and of those that make a copy in it.
    pub fn audit(&self, holders: &[u32], steps: &[u32], arriving: &[u32], wrong: &mut Vec<String>) {
        let tier = self.tier;
        let mut times_free = vec![0; self.len()];
        self.free.iter().for_each(|block| times_free[*block as usize] += 1);
        for (block, (holders, steps)) in holders.iter().zip(steps).enumerate() {
            let (is_held, holds) = (self.is_held[block], self.holds[block]);
            if u32::from(is_held) != *holders {
                let told = if is_held { "held" } else { "nobody's" };
                wrong.push(format!("{tier} block {block} is {told}, and of {holders} sequences"));
            }
            if holds != *steps {
                wrong.push(format!("{tier} block {block} is held by {steps} steps and has {holds} holds"));
            }
            let is_copy = self.copies.is_copy(block as TierBlockId);
            if is_held && is_copy {
                wrong.push(format!("{tier} block {block} is held by a sequence, and a copy of a cached block"));
            }
            if times_free[block] != usize::from(!is_held && !is_copy && holds == 0) {
                wrong.push(format!("{tier} block {block} is {} times on the free stack", times_free[block]));
            }
        }
        let num_held = self.is_held.iter().filter(|is_held| **is_held).count();
        if num_held != self.num_held {
            wrong.push(format!("{} {tier} blocks counted as held, {num_held} are", self.num_held));
        }
        if self.copies.are_made() {
            self.copies.audit(tier, &self.holds, arriving, wrong);
        }
    }

    /// All that a refusal leaves as it was, as text.
    pub fn state(&self) -> String {
        format!("{:?} {:?} {:?} {}", self.is_held, self.holds, self.free, self.copies.state())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::errors::Failure;

    fn counts(pool: &TierPool) -> (usize, usize, usize) {
        let TierBlockCounts { free, held, retired, .. } = pool.counts();
        (free, held, retired)
    }

    fn violations(pool: &TierPool, held: &[TierBlockId], retired: &[TierBlockId]) -> Vec<String> {
        let times = |blocks: &[TierBlockId]| {
            let count = |block| blocks.iter().filter(|each| **each == block).count() as u32;
            (0..pool.len() as TierBlockId).map(count).collect::<Vec<_>>()
        };
        let mut wrong = Vec::new();
        pool.audit(&times(held), &times(retired), &times(&[]), &mut wrong);
        wrong
    }

    #[test]
    fn a_block_is_held_then_retired_then_free() {
        let mut pool = TierPool::new(Tier::Host, 4, 0);
        assert_eq!(pool.allocate(3, &Accounts::new(9)).unwrap(), [0, 1, 2]);
        assert_eq!((counts(&pool), violations(&pool, &[0, 1, 2], &[])), ((1, 3, 0), vec![]));
        pool.release(&[2]).unwrap();
        pool.retire(&[0, 1]).unwrap();
        assert_eq!((counts(&pool), violations(&pool, &[], &[0, 1])), ((2, 0, 2), vec![]));
        assert_eq!(pool.allocate(2, &Accounts::new(9)).unwrap(), [2, 3]);
        pool.end_holds(&[0, 1]).unwrap();
        assert_eq!(pool.allocate(2, &Accounts::new(9)).unwrap(), [0, 1], "in the order in which they were given back");
        assert_eq!(counts(&pool), (0, 4, 0));
    }

    #[test]
    fn there_is_room_for_as_many_as_are_free() {
        let mut pool = TierPool::new(Tier::Host, 3, 0);
        pool.allocate(2, &Accounts::new(9)).unwrap();
        pool.retire(&[1]).unwrap();
        assert!(pool.refuse(7, 1).is_none());
        let refusal = pool.refuse(7, 2).unwrap();
        assert_eq!(
            (refusal.reason, &*refusal.message),
            (Reason::OutOfHostBlocks, "sequence 7 needs 2 host blocks; of 3 1 are free, 1 retired")
        );
        assert!(refusal.metadata.iter().all(|(_, value)| refusal.message.contains(value)), "{refusal:?}");
        assert!(TierPool::new(Tier::Host, 0, 0).refuse(7, 1).is_some());
    }

    #[test]
    fn what_cant_be_is_told() {
        let mut pool = TierPool::new(Tier::Host, 2, 0);
        assert!(matches!(pool.allocate(3, &Accounts::new(9)), Err(Failure::Broken(_))));
        assert!(matches!(pool.release(&[0]), Err(Failure::Broken(_))));
        assert!(matches!(pool.end_holds(&[1]), Err(Failure::Broken(_))));
    }

    #[test]
    fn wrong_books_are_told() {
        let mut pool = TierPool::new(Tier::Host, 3, 0);
        pool.allocate(2, &Accounts::new(9)).unwrap();
        assert_eq!(violations(&pool, &[0], &[]), ["host block 1 is held, and of 0 sequences"]);
        assert_eq!(violations(&pool, &[0, 1, 1], &[]), ["host block 1 is held, and of 2 sequences"]);
        assert_eq!(violations(&pool, &[0, 1, 2], &[]), ["host block 2 is nobody's, and of 1 sequences"]);
        assert_eq!(violations(&pool, &[0, 1], &[1]), ["host block 1 is held by 1 steps and has 0 holds"]);
        pool.free.push(2);
        assert_eq!(violations(&pool, &[0, 1], &[]), ["host block 2 is 2 times on the free stack"]);
        pool.free.truncate(1);
        pool.num_held = 1;
        assert_eq!(violations(&pool, &[0, 1], &[]), ["1 host blocks counted as held, 2 are"]);
    }

    #[test]
    fn the_state_tells_whatever_changed() {
        let mut pool = TierPool::new(Tier::Host, 2, 0);
        let mut states = vec![pool.state()];
        pool.allocate(1, &Accounts::new(9)).unwrap();
        states.push(pool.state());
        pool.retire(&[0]).unwrap();
        states.push(pool.state());
        states.dedup();
        assert_eq!(states.len(), 3);
    }
}
