//! What is in the blocks that can be found, for watchers who may ask: kept only while there are such.

use std::collections::HashMap;

use crate::cache::prefix::{BlockId, Hash};

/// A full block's tokens, the salt of its prefix, and the hash of the block before it; None if it is the first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Content {
    pub tokens: Vec<i32>,
    pub salt: Vec<u8>,
    pub parent: Option<Hash>,
}

/// Content by block, of those that became findable while somebody read.
#[derive(Debug, Default)]
pub struct Contents {
    by_block: HashMap<BlockId, Content>,
    num_readers: usize,
}

impl Contents {
    /// One more reader: from now on content is kept.
    pub fn begin_reading(&mut self) {
        self.num_readers += 1;
    }

    /// One reader less; with the last one everything goes.
    pub fn end_reading(&mut self) {
        self.num_readers -= 1;
        if self.num_readers == 0 {
            self.by_block = HashMap::new();
        }
    }

    pub fn is_read(&self) -> bool {
        self.num_readers > 0
    }

    /// What is in a block that is findable from now on. The caller has asked `is_read`.
    pub fn enter(&mut self, block: BlockId, content: Content) {
        self.by_block.insert(block, content);
    }

    /// The block can't be found any more.
    pub fn forget(&mut self, block: BlockId) {
        if !self.by_block.is_empty() {
            self.by_block.remove(&block);
        }
    }

    pub fn get(&self, block: BlockId) -> Option<&Content> {
        self.by_block.get(&block)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_is_kept_until_the_last_reader_goes() {
        let mut contents = Contents::default();
        let content = Content { tokens: vec![1], salt: vec![], parent: None };
        assert!(!contents.is_read());
        (0..2).for_each(|_| contents.begin_reading());
        contents.enter(3, content.clone());
        contents.enter(4, content.clone());
        contents.forget(4);
        contents.end_reading();
        assert_eq!((contents.get(3), contents.get(4), contents.is_read()), (Some(&content), None, true));
        contents.end_reading();
        contents.begin_reading();
        assert_eq!((contents.get(3), contents.is_read()), (None, true));
    }
}
