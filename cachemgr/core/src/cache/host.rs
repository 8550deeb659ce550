//! The host tier: the blocks that hold an offloaded sequence, and those that a planned step could still access.
//!
//!     held  holds  state
//!     yes   any    held       by exactly one sequence: nothing is shared here
//!     no    > 0    retired    released, but a planned step could still write or read it
//!     no    0      free       on the free stack
//!
//! Host blocks have numbers of their own, from 0 on; each has room for one block of the pool.

use serde::{Deserialize, Serialize};

use crate::errors::{Reason, Refusal, Result, broken};

pub type HostBlockId = u32;

/// Host blocks by state; they add up to the tier's blocks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostBlockCounts {
    pub free: usize,
    pub held: usize,
    pub retired: usize,
}

/// Callers record the holder of each block.
#[derive(Debug, Serialize, Deserialize)]
pub struct HostPool {
    is_held: Vec<bool>,
    holds: Vec<u32>,
    free: Vec<HostBlockId>, // a stack: the lowest id on top at first
    num_held: usize,
}

impl HostPool {
    pub fn new(num_blocks: usize) -> HostPool {
        HostPool {
            is_held: vec![false; num_blocks],
            holds: vec![0; num_blocks],
            free: (0..num_blocks as HostBlockId).rev().collect(),
            num_held: 0,
        }
    }

    /// Blocks of the tier; 0: there is none.
    pub fn len(&self) -> usize {
        self.holds.len()
    }

    pub fn counts(&self) -> HostBlockCounts {
        let (free, held) = (self.free.len(), self.num_held);
        HostBlockCounts { free, held, retired: self.len().saturating_sub(free + held) } // less than none if the books are wrong
    }

    /// Too few blocks for a sequence.
    pub fn refuse(&self, seq_id: i64, needed: usize) -> Option<Refusal> {
        let HostBlockCounts { free, retired, .. } = self.counts();
        if needed <= free {
            return None;
        }
        let limit = self.len();
        let message =
            format!("sequence {seq_id} needs {needed} host blocks; of {limit} {free} are free, {retired} retired");
        let refusal = Refusal::new(Reason::OutOfHostBlocks, message).with("sequence_id", seq_id);
        Some(refusal.with("needed", needed).with("free", free).with("retired", retired).with("limit", limit))
    }

    /// Allocates blocks, in the order of their numbers as long as none was released.
    ///
    /// The caller has checked `refuse`.
    pub fn allocate(&mut self, count: usize) -> Result<Vec<HostBlockId>> {
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
            self.free.extend((self.holds[block as usize] == 0).then_some(block));
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
            self.free.extend((holds == 0).then_some(block)); // one with a hold is not reused
        }
        Ok(())
    }

    /// Reports violations, given the number of sequences that hold each block and of steps in flight that hold it.
    pub fn audit(&self, holders: &[u32], steps: &[u32], wrong: &mut Vec<String>) {
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
            if times_free[block] != usize::from(!is_held && holds == 0) {
                wrong.push(format!("host block {block} is {} times on the free stack", times_free[block]));
            }
        }
        let num_held = self.is_held.iter().filter(|is_held| **is_held).count();
        if num_held != self.num_held {
            wrong.push(format!("{} host blocks counted as held, {num_held} are", self.num_held));
        }
    }

    /// All that a refusal leaves as it was, as text.
    pub fn state(&self) -> String {
        format!("{:?} {:?} {:?}", self.is_held, self.holds, self.free)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::errors::Failure;

    fn counts(pool: &HostPool) -> (usize, usize, usize) {
        let HostBlockCounts { free, held, retired } = pool.counts();
        (free, held, retired)
    }

    fn violations(pool: &HostPool, held: &[HostBlockId], retired: &[HostBlockId]) -> Vec<String> {
        let times = |blocks: &[HostBlockId]| {
            let count = |block| blocks.iter().filter(|each| **each == block).count() as u32;
            (0..pool.len() as HostBlockId).map(count).collect::<Vec<_>>()
        };
        let mut wrong = Vec::new();
        pool.audit(&times(held), &times(retired), &mut wrong);
        wrong
    }

    #[test]
    fn a_block_is_held_then_retired_then_free() {
        let mut pool = HostPool::new(4);
        assert_eq!(pool.allocate(3).unwrap(), [0, 1, 2]);
        assert_eq!((counts(&pool), violations(&pool, &[0, 1, 2], &[])), ((1, 3, 0), vec![]));
        pool.release(&[2]).unwrap();
        pool.retire(&[0, 1]).unwrap();
        assert_eq!((counts(&pool), violations(&pool, &[], &[0, 1])), ((2, 0, 2), vec![]));
        assert_eq!(pool.allocate(2).unwrap(), [2, 3]);
        pool.end_holds(&[0, 1]).unwrap();
        assert_eq!(pool.allocate(2).unwrap(), [0, 1], "in the order in which they were given back");
        assert_eq!(counts(&pool), (0, 4, 0));
    }

    #[test]
    fn there_is_room_for_as_many_as_are_free() {
        let mut pool = HostPool::new(3);
        pool.allocate(2).unwrap();
        pool.retire(&[1]).unwrap();
        assert!(pool.refuse(7, 1).is_none());
        let refusal = pool.refuse(7, 2).unwrap();
        assert_eq!(
            (refusal.reason, &*refusal.message),
            (Reason::OutOfHostBlocks, "sequence 7 needs 2 host blocks; of 3 1 are free, 1 retired")
        );
        assert!(refusal.metadata.iter().all(|(_, value)| refusal.message.contains(value)), "{refusal:?}");
        assert!(HostPool::new(0).refuse(7, 1).is_some());
    }

    #[test]
    fn what_cant_be_is_told() {
        let mut pool = HostPool::new(2);
        assert!(matches!(pool.allocate(3), Err(Failure::Broken(_))));
        assert!(matches!(pool.release(&[0]), Err(Failure::Broken(_))));
        assert!(matches!(pool.end_holds(&[1]), Err(Failure::Broken(_))));
    }

    #[test]
    fn wrong_books_are_told() {
        let mut pool = HostPool::new(3);
        pool.allocate(2).unwrap();
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
        let mut pool = HostPool::new(2);
        let mut states = vec![pool.state()];
        pool.allocate(1).unwrap();
        states.push(pool.state());
        pool.retire(&[0]).unwrap();
        states.push(pool.state());
        states.dedup();
        assert_eq!(states.len(), 3);
    }
}
