//! The host tier: the blocks that hold an offloaded sequence, copies of evicted blocks, and those that a planned step
//! could still access.
//!
//!     held  copy      holds  state
//!     yes   no        any    held       by exactly one sequence: nothing is shared here
//!     no    findable  any    cached     a copy of an evicted block; evictable without holds
//!     no    other     > 0    retired    released, or a copy that arrives: a planned step could still write or read it
//!     no    no        0      free       on the free stack
//!
//! Sequences come first: a copy is evicted if a sequence needs its block. Host blocks have numbers of their own, from 0
//! on; each has room for one block of the pool.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::cache::accounts::Accounts;
pub use crate::cache::host_copies::HostBlockId;
use crate::cache::host_copies::{Evicted, HostCopies};
use crate::cache::tenants::TenantId;
use crate::errors::{Reason, Refusal, Result, broken};

/// Host blocks by state; they add up to the tier's blocks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostBlockCounts {
    pub free: usize,
    pub held: usize,
    pub retired: usize,
    pub cached: usize,
}

/// Callers record the holder of each block.
#[derive(Debug, Serialize, Deserialize)]
pub struct HostPool {
    is_held: Vec<bool>,
    holds: Vec<u32>,
    free: Vec<HostBlockId>, // a stack: the lowest id on top at first
    num_held: usize,
    copies: HostCopies,
}

impl HostPool {
    /// With copies of at most `most_copies` evicted blocks.
    pub fn new(num_blocks: usize, most_copies: usize) -> HostPool {
        HostPool {
            is_held: vec![false; num_blocks],
            holds: vec![0; num_blocks],
            free: (0..num_blocks as HostBlockId).rev().collect(),
            num_held: 0,
            copies: HostCopies::new(num_blocks, most_copies),
        }
    }

    /// The copies of evicted blocks.
    pub fn copies(&self) -> &HostCopies {
        &self.copies
    }

    /// Blocks of the tier; 0: there is none.
    pub fn len(&self) -> usize {
        self.holds.len()
    }

    pub fn counts(&self) -> HostBlockCounts {
        let (free, held, cached) = (self.free.len(), self.num_held, self.copies.num_findable());
        let retired = self.len().saturating_sub(free + held + cached); // less than none if the books are wrong
        HostBlockCounts { free, held, retired, cached }
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
    pub fn allocate(&mut self, count: usize, accounts: &Accounts) -> Result<Vec<HostBlockId>> {
        while self.free.len() < count
            && let Some(copy) = self.copies.first(accounts, None)
        {
            self.evict(copy);
        }
        let Some(num_left) = self.free.len().checked_sub(count) else {
            return broken(format!("{count} host blocks to hand out, {} are free", self.free.len()));
        };
        let mut blocks = self.free.split_off(num_left);
        blocks.reverse();
        blocks.iter().for_each(|block| self.is_held[*block as usize] = true);
        self.num_held += count;
        Ok(blocks)
    }

    /// Releases these held blocks. They are free at once unless a step holds them.
    pub fn release(&mut self, blocks: &[HostBlockId]) -> Result<()> {
        for &block in blocks.iter().rev() {
            if !std::mem::take(&mut self.is_held[block as usize]) {
                return broken(format!("host block {block} is released, nobody holds it"));
            }
            self.num_held -= 1;
            self.rest(block);
        }
        Ok(())
    }

    /// As `release`, but none is free before as many `end_holds`.
    pub fn retire(&mut self, blocks: &[HostBlockId]) -> Result<()> {
        blocks.iter().for_each(|block| self.holds[*block as usize] += 1);
        self.release(blocks)
    }

    /// Ends one hold of each.
    pub fn end_holds(&mut self, blocks: &[HostBlockId]) -> Result<()> {
        for &block in blocks.iter().rev() {
            let Some(holds) = self.holds[block as usize].checked_sub(1) else {
                return broken(format!("a hold of host block {block} ends, it has none"));
            };
            self.holds[block as usize] = holds;
            self.rest(block);
        }
        Ok(())
    }

    /// A block without a holder: if no step holds it, a copy is evictable, and any other block is free.
    fn rest(&mut self, block: HostBlockId) {
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

    /// A host block for a copy of an evicted block, which the step that is being planned holds. None if no copy is made:
    /// there is one already, or there is no room.
    pub fn keep(&mut self, evicted: &Evicted, accounts: &Accounts) -> Option<HostBlockId> {
        if !self.copies.may_keep(evicted) {
            return None;
        }
        if let [copy] = self.copies.find(&[evicted.hash])[..] {
            if self.holds[copy as usize] == 0 {
                self.copies.end_use(copy);
            }
            return None;
        }
        if self.copies.is_full() || self.free.is_empty() {
            let victim = self.copies.first(accounts, Some(evicted.tenant))?;
            self.evict(victim);
        }
        let block = self.free.pop()?;
        self.copies.begin(block, evicted);
        self.holds[block as usize] += 1;
        Some(block)
    }

    /// The step that is being planned copies these back: it holds each of them.
    pub fn begin_use(&mut self, copies: &[HostBlockId]) {
        for copy in copies {
            self.holds[*copy as usize] += 1;
            self.copies.begin_use(*copy);
        }
    }

    /// The step that copies to these has ended. They are findable from now on; `end_holds` follows.
    pub fn arrive(&mut self, copies: &[HostBlockId]) {
        copies.iter().for_each(|copy| self.copies.arrive(*copy));
    }

    /// Drops copies: those that no step holds are free.
    pub fn drop_copies(&mut self, copies: &[HostBlockId]) {
        for copy in copies.iter().rev() {
            self.copies.remove(*copy);
            self.rest(*copy);
        }
    }

    /// The content of these tenants is being reset: drops their copies. Content that was published before this change of
    /// the journal is not copied any more. Cost: O(host blocks + tenants).
    pub fn begin_reset(&mut self, tenants: Range<TenantId>, num_changes: u64) {
        let copies = self.copies.begin_reset(tenants, num_changes);
        self.drop_copies(&copies);
    }

    /// A new epoch begins: the tier is empty.
    pub fn begin_epoch(&mut self) {
        self.drop_copies(&self.copies.all());
        self.copies.restart_counters();
    }

    fn evict(&mut self, copy: HostBlockId) {
        self.copies.evict(copy);
        self.free.push(copy);
    }

    /// Reports violations, given the number of sequences that hold each block, of steps in flight that hold it, and of
    /// those that copy an evicted block to it.
    pub fn audit(&self, holders: &[u32], steps: &[u32], arriving: &[u32], wrong: &mut Vec<String>) {
        let mut times_free = vec![0; self.len()];
        self.free.iter().for_each(|block| times_free[*block as usize] += 1);
        for (block, (holders, steps)) in holders.iter().zip(steps).enumerate() {
            let (is_held, holds) = (self.is_held[block], self.holds[block]);
            if u32::from(is_held) != *holders {
                let told = if is_held { "held" } else { "nobody's" };
                wrong.push(format!("host block {block} is {told}, and of {holders} sequences"));
            }
            if holds != *steps {
                wrong.push(format!("host block {block} is held by {steps} steps and has {holds} holds"));
            }
            let is_copy = self.copies.owner(block as HostBlockId).is_some();
            if is_held && is_copy {
                wrong.push(format!("host block {block} is held by a sequence, and a copy of an evicted block"));
            }
            if times_free[block] != usize::from(!is_held && !is_copy && holds == 0) {
                wrong.push(format!("host block {block} is {} times on the free stack", times_free[block]));
            }
        }
        let num_held = self.is_held.iter().filter(|is_held| **is_held).count();
        if num_held != self.num_held {
            wrong.push(format!("{} host blocks counted as held, {num_held} are", self.num_held));
        }
        if self.copies.are_made() {
            self.copies.audit(&self.holds, arriving, wrong);
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

    fn counts(pool: &HostPool) -> (usize, usize, usize) {
        let HostBlockCounts { free, held, retired, .. } = pool.counts();
        (free, held, retired)
    }

    fn violations(pool: &HostPool, held: &[HostBlockId], retired: &[HostBlockId]) -> Vec<String> {
        let times = |blocks: &[HostBlockId]| {
            let count = |block| blocks.iter().filter(|each| **each == block).count() as u32;
            (0..pool.len() as HostBlockId).map(count).collect::<Vec<_>>()
        };
        let mut wrong = Vec::new();
        pool.audit(&times(held), &times(retired), &times(&[]), &mut wrong);
        wrong
    }

    #[test]
    fn a_block_is_held_then_retired_then_free() {
        let mut pool = HostPool::new(4, 0);
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
        let mut pool = HostPool::new(3, 0);
        pool.allocate(2, &Accounts::new(9)).unwrap();
        pool.retire(&[1]).unwrap();
        assert!(pool.refuse(7, 1).is_none());
        let refusal = pool.refuse(7, 2).unwrap();
        assert_eq!(
            (refusal.reason, &*refusal.message),
            (Reason::OutOfHostBlocks, "sequence 7 needs 2 host blocks; of 3 1 are free, 1 retired")
        );
        assert!(refusal.metadata.iter().all(|(_, value)| refusal.message.contains(value)), "{refusal:?}");
        assert!(HostPool::new(0, 0).refuse(7, 1).is_some());
    }

    #[test]
    fn what_cant_be_is_told() {
        let mut pool = HostPool::new(2, 0);
        assert!(matches!(pool.allocate(3, &Accounts::new(9)), Err(Failure::Broken(_))));
        assert!(matches!(pool.release(&[0]), Err(Failure::Broken(_))));
        assert!(matches!(pool.end_holds(&[1]), Err(Failure::Broken(_))));
    }

    #[test]
    fn wrong_books_are_told() {
        let mut pool = HostPool::new(3, 0);
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
        let mut pool = HostPool::new(2, 0);
        let mut states = vec![pool.state()];
        pool.allocate(1, &Accounts::new(9)).unwrap();
        states.push(pool.state());
        pool.retire(&[0]).unwrap();
        states.push(pool.state());
        states.dedup();
        assert_eq!(states.len(), 3);
    }
}
