//! Tokens and namespaces of the blocks that can be found by content, for watchers that may read them.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use crate::cache::prefix::{BlockId, Namespace};

/// The number of a namespace; UNKNOWN: the block's content was not kept.
type NamespaceId = u32;
const UNKNOWN: NamespaceId = 0;

/// Contents by block. Memory: the bits that a token of the vocabulary needs, 4 bytes a block, and each namespace once; nothing
/// while none are kept.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Contents {
    shape: Shape,
    tokens: Vec<u8>, // shape.num_bytes of each block
    namespace_of: Vec<NamespaceId>,
    namespaces: Namespaces,
}

impl Contents {
    /// Keeps the contents of blocks that are entered from now on; forgets those of before.
    pub fn keep(&mut self, num_blocks: usize, block_size: usize, vocab_size: usize) {
        let shape = Shape::new(block_size, vocab_size);
        let (tokens, namespace_of) = (vec![0; num_blocks * shape.num_bytes], vec![UNKNOWN; num_blocks]);
        *self = Contents { shape, tokens, namespace_of, namespaces: Namespaces::default() };
    }

    /// Forgets all contents, and keeps none.
    pub fn keep_none(&mut self) {
        *self = Contents::default();
    }

    pub fn are_kept(&self) -> bool {
        self.shape.block_size > 0
    }

    /// A block can be found from now on by its tokens, in a namespace.
    pub fn enter(&mut self, block: BlockId, tokens: &[i32], namespace: &Namespace) {
        if !self.are_kept() {
            return;
        }
        let first = block as usize * self.shape.num_bytes;
        self.shape.pack(tokens, &mut self.tokens[first..first + self.shape.num_bytes]);
        let standing = self.namespace_of[block as usize];
        if standing == UNKNOWN || !is_equal(self.namespaces.get(standing), namespace) {
            self.forget(block);
            self.namespace_of[block as usize] = self.namespaces.acquire(namespace);
        }
    }

    /// The block can't be found any more.
    pub fn forget(&mut self, block: BlockId) {
        if let Some(namespace @ 1..) = self.namespace_of.get_mut(block as usize) {
            self.namespaces.release(*namespace);
            *namespace = UNKNOWN;
        }
    }

    /// The tokens and the namespace of a block; None if they were not kept.
    pub fn get(&self, block: BlockId) -> Option<(Vec<i32>, &Namespace)> {
        let namespace = *self.namespace_of.get(block as usize)?;
        let first = block as usize * self.shape.num_bytes;
        let tokens = || self.shape.unpack(&self.tokens[first..first + self.shape.num_bytes]);
        (namespace != UNKNOWN).then(|| (tokens(), self.namespaces.get(namespace)))
    }

    /// Blocks with known content that can't be found, in a range, and namespaces of no block.
    pub fn audit(&self, is_findable: impl Fn(BlockId) -> bool, wrong: &mut Vec<String>) {
        let mut counts = vec![0; self.namespaces.entries.len()];
        for (block, namespace) in self.namespace_of.iter().enumerate().filter(|(_, number)| **number != UNKNOWN) {
            counts[*namespace as usize - 1] += 1;
            if !is_findable(block as BlockId) {
                wrong.push(format!("block {block} has content by which it can't be found"));
            }
        }
        for (namespace, (entry, count)) in self.namespaces.entries.iter().zip(counts).enumerate() {
            if entry.num_blocks != count {
                wrong.push(format!("namespace {namespace} counts {} blocks, {count} have it", entry.num_blocks));
            }
        }
    }
}

/// Tokens of a block in as few bytes as the vocabulary allows: 16 of 128,000 in 34 instead of 64.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct Shape {
    block_size: usize, // 0: no contents are kept
    num_bits: u32,     // of a token, at most 31
    num_bytes: usize,  // of a block
}

impl Shape {
    fn new(block_size: usize, vocab_size: usize) -> Shape {
        let num_bits = usize::BITS - vocab_size.saturating_sub(1).leading_zeros();
        Shape { block_size, num_bits, num_bytes: (block_size * num_bits as usize).div_ceil(8) }
    }

    /// Writes one block's tokens, the first one's lowest bits first. All are in the vocabulary.
    fn pack(&self, tokens: &[i32], bytes: &mut [u8]) {
        PACKERS[self.num_bits as usize](tokens, bytes);
    }

    fn unpack(&self, bytes: &[u8]) -> Vec<i32> {
        let (mut held, mut num_held, mut bytes) = (0_u64, 0, bytes.iter());
        let mut next = || {
            while num_held < self.num_bits {
                held |= u64::from(*bytes.next().expect("a block's tokens are as many as its size")) << num_held;
                num_held += u8::BITS;
            }
            let token = held & ((1 << self.num_bits) - 1);
            (held, num_held) = (held >> self.num_bits, num_held - self.num_bits);
            token as i32
        };
        (0..self.block_size).map(|_| next()).collect()
    }
}

type Packer = fn(&[i32], &mut [u8]);

/// `pack` by the number of bits of a token.
#[rustfmt::skip]
const PACKERS: [Packer; 32] = [
    pack::<0>, pack::<1>, pack::<2>, pack::<3>, pack::<4>, pack::<5>, pack::<6>, pack::<7>, pack::<8>, pack::<9>,
    pack::<10>, pack::<11>, pack::<12>, pack::<13>, pack::<14>, pack::<15>, pack::<16>, pack::<17>, pack::<18>,
    pack::<19>, pack::<20>, pack::<21>, pack::<22>, pack::<23>, pack::<24>, pack::<25>, pack::<26>, pack::<27>,
    pack::<28>, pack::<29>, pack::<30>, pack::<31>,
];

/// So many tokens fill whole bytes with any number of bits.
const PACKED_AT_ONCE: usize = 16;

/// Packs tokens of BITS bits. The compiler knows this number, so it unrolls the loop over 16 tokens: half the time.
fn pack<const BITS: usize>(tokens: &[i32], bytes: &mut [u8]) {
    let bytes_at_once = (BITS * PACKED_AT_ONCE / 8).max(1);
    for (tokens, bytes) in tokens.chunks(PACKED_AT_ONCE).zip(bytes.chunks_mut(bytes_at_once)) {
        match <&[i32; PACKED_AT_ONCE]>::try_from(tokens) {
            Ok(tokens) => pack_few::<BITS>(tokens, &mut bytes[..BITS * PACKED_AT_ONCE / 8]),
            Err(_) => pack_few::<BITS>(tokens, bytes),
        }
    }
}

#[inline(always)]
fn pack_few<const BITS: usize>(tokens: &[i32], bytes: &mut [u8]) {
    let (mut held, mut num_held, mut at) = (0_u64, 0, 0);
    for token in tokens {
        held |= (*token as u64) << num_held;
        num_held += BITS;
        if num_held >= 32 {
            bytes[at..at + 4].copy_from_slice(&(held as u32).to_le_bytes());
            (held, num_held, at) = (held >> 32, num_held - 32, at + 4);
        }
    }
    let rest = bytes.len() - at;
    bytes[at..].copy_from_slice(&held.to_le_bytes()[..rest]);
}

/// Each namespace once, with the number of blocks that have it. The number of a namespace is its place plus 1.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Namespaces {
    entries: Vec<Entry>,
    numbers: HashMap<Namespace, NamespaceId>,
    free: Vec<NamespaceId>,
    last: NamespaceId, // that was acquired last; blocks of a sequence come one after the other
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct Entry {
    namespace: Namespace,
    num_blocks: usize,
}

impl Namespaces {
    fn get(&self, number: NamespaceId) -> &Namespace {
        &self.entries[number as usize - 1].namespace
    }

    fn acquire(&mut self, namespace: &Namespace) -> NamespaceId {
        if let Some(last) = self.entries.get_mut((self.last as usize).wrapping_sub(1))
            && last.num_blocks > 0
            && is_equal(&last.namespace, namespace)
        {
            last.num_blocks += 1;
            return self.last;
        }
        let number = match self.numbers.get(namespace) {
            Some(number) => *number,
            None => {
                let number = self.free.pop().unwrap_or_else(|| {
                    self.entries.push(Entry::default());
                    self.entries.len() as NamespaceId
                });
                self.entries[number as usize - 1].namespace = namespace.clone();
                self.numbers.insert(namespace.clone(), number);
                number
            }
        };
        self.entries[number as usize - 1].num_blocks += 1;
        self.last = number;
        number
    }

    fn release(&mut self, number: NamespaceId) {
        let entry = &mut self.entries[number as usize - 1];
        entry.num_blocks -= 1;
        if entry.num_blocks == 0 {
            self.numbers.remove(&std::mem::take(&mut entry.namespace));
            self.free.push(number);
        }
    }
}

/// Compares two namespaces. Most parts are empty: comparing no bytes at an empty vector's address costs 80 ns on some
/// processors.
fn is_equal(one: &Namespace, other: &Namespace) -> bool {
    let is_same = |one: &[u8], other: &[u8]| one.len() == other.len() && (one.is_empty() || one == other);
    is_same(&one.salt, &other.salt) && is_same(&one.adapter, &other.adapter)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn violations(contents: &Contents, findable: &[BlockId]) -> Vec<String> {
        let mut wrong = Vec::new();
        contents.audit(|block| findable.contains(&block), &mut wrong);
        wrong
    }

    #[test]
    fn contents_are_kept_until_they_are_forgotten() {
        let mut contents = Contents::default();
        contents.enter(3, &[1, 2], &b"".into());
        assert_eq!((contents.are_kept(), contents.get(3)), (false, None));
        contents.keep(5, 2, 8);
        contents.enter(3, &[1, 2], &b"".into());
        contents.enter(4, &[0, 7], &b"pepper".into());
        assert_eq!(contents.get(3), Some((vec![1, 2], &b"".into())));
        assert_eq!(contents.get(4), Some((vec![0, 7], &b"pepper".into())));
        assert_eq!((contents.get(2), violations(&contents, &[3, 4])), (None, vec![]));
        (0..2).for_each(|_| contents.forget(4));
        assert_eq!((contents.get(4), violations(&contents, &[3])), (None, vec![]));
        contents.keep_none();
        assert_eq!((contents.get(3), contents.are_kept()), (None, false));
    }

    #[test]
    fn tokens_of_every_vocabulary_come_back() {
        for (vocab_size, num_bits) in [(1, 0), (2, 1), (100, 7), (65_536, 16), (65_537, 17), (1 << 31, 31)] {
            for block_size in [1, 13, 16, 40] {
                let shape = Shape::new(block_size, vocab_size);
                assert_eq!(shape.num_bytes, (block_size * num_bits).div_ceil(8), "{vocab_size}");
                let last = (vocab_size - 1) as u64;
                let tokens: Vec<i32> =
                    (0..block_size as u64).map(|index| (last * ((index * 7) % 13) / 12) as i32).collect();
                let mut bytes = vec![0xaa; shape.num_bytes];
                shape.pack(&tokens, &mut bytes);
                assert_eq!(shape.unpack(&bytes), tokens, "{vocab_size}");
            }
        }
    }

    #[test]
    fn a_namespace_is_kept_once_and_as_long_as_a_block_has_it() {
        let mut contents = Contents::default();
        contents.keep(9, 1, 8);
        for (block, salt) in [(1, "a"), (2, "b"), (3, "a"), (4, "a"), (2, "c")] {
            contents.enter(block, &[5], &salt.into());
        }
        assert_eq!((contents.namespaces.entries.len(), contents.namespaces.numbers.len()), (2, 2));
        [1, 3, 4].into_iter().for_each(|block| contents.forget(block));
        contents.enter(5, &[6], &b"d".into());
        contents.enter(6, &[6], &b"a".into());
        let salts = |contents: &Contents| [2, 5, 6].map(|block| contents.get(block).unwrap().1.salt.clone());
        assert_eq!(salts(&contents), [b"c", b"d", b"a"]);
        assert_eq!((contents.namespaces.entries.len(), violations(&contents, &[2, 5, 6])), (3, vec![]));
    }

    #[test]
    fn wrong_contents_are_told() {
        let mut contents = Contents::default();
        contents.keep(4, 1, 8);
        contents.enter(2, &[5], &b"a".into());
        assert_eq!(violations(&contents, &[1]), ["block 2 has content by which it can't be found"]);
        contents.namespaces.entries[0].num_blocks = 2;
        assert_eq!(violations(&contents, &[2]), ["namespace 0 counts 2 blocks, 1 have it"]);
    }
}
