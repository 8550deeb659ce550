//! Holders' advice on the retention of blocks.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use serde::{Deserialize, Serialize};

use crate::cache::prefix::BlockId;

/// 1: given up first, to 10: kept longest.
pub type Level = u8;

pub const LEAST_WORTH: Level = 1;
/// The level of a block without advice.
pub const UNADVISED: Level = 5;
/// The most that a request can ask for.
pub const MOST_WORTH: Level = 9;
/// A prompt that waits would find the block.
pub const AWAITED: Level = 10;
/// A breakpoint keeps the block, whatever the advice is.
pub const KEPT: Level = 11;
pub const NUM_LEVELS: usize = KEPT as usize;

/// Milliseconds of the caller's clock.
pub type Millis = u64;
/// The end of advice that is valid as long as the content.
pub const FOREVER: Millis = Millis::MAX;

/// The advice for a block, and its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Advice {
    pub level: Level,
    pub until: Millis,
}

pub fn millis(seconds: f64) -> Millis {
    (seconds * 1e3) as Millis
}

/// Advice by block. 17 bytes per block, and the advice that ends.
#[derive(Debug, Serialize, Deserialize)]
pub struct AdviceBook {
    levels: Vec<Level>,
    until: Vec<Millis>,
    /// Advice by its end, earliest first, in the order of entry among equal ones. Entries replaced by newer advice stay
    /// here.
    ends: BinaryHeap<Reverse<(Millis, u64, BlockId)>>,
    num_said: u64,
    /// For each block of the level AWAITED, the prompts that wait for it.
    num_waiting: BTreeMap<BlockId, u32>,
}

impl AdviceBook {
    pub fn new(num_blocks: usize) -> AdviceBook {
        AdviceBook {
            levels: vec![UNADVISED; num_blocks],
            until: vec![FOREVER; num_blocks],
            ends: BinaryHeap::new(),
            num_said: 0,
            num_waiting: BTreeMap::new(),
        }
    }

    pub fn level(&self, block: BlockId) -> Level {
        self.levels[block as usize]
    }

    pub fn advice(&self, block: BlockId) -> Advice {
        Advice { level: self.level(block), until: self.until[block as usize] }
    }

    /// Enters advice for a block in place of earlier advice.
    pub fn enter(&mut self, block: BlockId, advice: Advice) {
        let until = if advice.level == UNADVISED { FOREVER } else { advice.until };
        self.levels[block as usize] = advice.level;
        let is_known_end = std::mem::replace(&mut self.until[block as usize], until) == until;
        if advice.level != AWAITED {
            self.num_waiting.remove(&block);
        }
        if until == FOREVER || is_known_end {
            return;
        }
        self.ends.push(Reverse((until, self.num_said, block)));
        self.num_said += 1;
        if self.ends.len() > 2 * self.levels.len() {
            let until = &self.until;
            self.ends.retain(|Reverse((end, _, block))| until[*block as usize] == *end);
        }
    }

    /// Removes the advice for an evicted block.
    pub fn forget(&mut self, block: BlockId) {
        self.levels[block as usize] = UNADVISED;
        self.until[block as usize] = FOREVER;
        self.num_waiting.remove(&block);
    }

    /// One more prompt waits for a block, for which the level AWAITED was entered.
    pub fn count_waiting(&mut self, block: BlockId) {
        *self.num_waiting.entry(block).or_default() += 1;
    }

    /// True if a prompt waits for a block.
    pub fn is_any_awaited(&self) -> bool {
        !self.num_waiting.is_empty()
    }

    /// A prompt has found a block. True if it was the last that waited for it.
    pub fn was_last_waiting(&mut self, block: BlockId) -> bool {
        let Some(count) = self.num_waiting.get_mut(&block) else { return false };
        *count -= 1;
        *count == 0
    }

    /// No advice ends before this; None if there is none that ends.
    pub fn next_end(&self) -> Option<Millis> {
        self.ends.peek().map(|Reverse((end, _, _))| *end)
    }

    /// A block with ended advice, if there is one.
    pub fn pop_ended(&mut self, now: Millis) -> Option<BlockId> {
        while let Some(Reverse((end, _, block))) = self.ends.peek().copied() {
            if end > now {
                return None;
            }
            self.ends.pop();
            if self.until[block as usize] == end {
                return Some(block);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn advice(level: Level, until: Millis) -> Advice {
        Advice { level, until }
    }

    fn ended(book: &mut AdviceBook, now: Millis) -> Vec<BlockId> {
        std::iter::from_fn(|| {
            let block = book.pop_ended(now)?;
            book.forget(block);
            Some(block)
        })
        .collect()
    }

    #[test]
    fn the_last_word_stands_until_its_time_is_over() {
        let mut book = AdviceBook::new(8);
        assert_eq!(book.advice(3), advice(UNADVISED, FOREVER));
        book.enter(3, advice(9, 100));
        book.enter(2, advice(7, 100));
        book.enter(4, advice(1, 50));
        book.enter(5, advice(2, FOREVER));
        assert_eq!((book.level(3), book.level(5), ended(&mut book, 49)), (9, 2, vec![]));
        book.enter(3, advice(8, 120));
        assert_eq!((ended(&mut book, 119), book.level(4)), (vec![4, 2], UNADVISED));
        assert_eq!((ended(&mut book, 120), ended(&mut book, FOREVER - 1)), (vec![3], vec![]));
        assert_eq!(book.level(5), 2);
    }

    #[test]
    fn what_is_forgotten_does_not_end() {
        let mut book = AdviceBook::new(8);
        book.enter(3, advice(9, 100));
        book.forget(3);
        book.enter(4, advice(9, 100));
        book.enter(4, advice(UNADVISED, 100));
        assert_eq!((ended(&mut book, 1000), book.advice(4)), (vec![], advice(UNADVISED, FOREVER)));
    }

    #[test]
    fn memory_does_not_grow_with_what_is_said() {
        let mut book = AdviceBook::new(8);
        for time in 0..1000 {
            book.enter(time as BlockId % 8, advice(9, 1_000_000 + time));
            assert!(book.ends.len() <= 17);
        }
        for level in [9, 8].repeat(1000) {
            book.enter(3, advice(level, 1_500_000));
            assert!(book.ends.len() <= 17);
        }
        assert_eq!(ended(&mut book, 2_000_000).len(), 8);
    }

    #[test]
    fn seconds_become_milliseconds() {
        assert_eq!([0.0, 0.0019, 12.5, -3.0].map(millis), [0, 1, 12_500, 0]);
    }
}
