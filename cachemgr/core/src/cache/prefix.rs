//! The prefix index: which block holds the KV of which tokens.
//!
//! Identity of a full block is a SHA-256 chained on its parent's, rooted in tenant, namespace and model: equal hashes
//! mean equal tokens from position 0 on, so a hit needs no verification.

use std::hint::black_box;
use std::ops::Range;

use serde::{Deserialize, Serialize};
use sha2::block_api::compress256;
use sha2::{Digest, Sha256};

use crate::cache::mixing::mixing_key;

pub type BlockId = u32;
pub type Hash = [u8; 32];

pub const NULL_BLOCK: BlockId = 0;

/// The parts of a prefix's identity that a sequence has beside its tenant and its tokens.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Namespace {
    pub salt: Vec<u8>,
    /// The identity of the adapter that computes it; empty: none.
    pub adapter: Vec<u8>,
}

/// The parent of a sequence's first block. Each part is hashed with its length, and the adapter is the last one, if
/// there is one: no two splits collide.
pub fn root_hash(tenant: &[u8], namespace: &Namespace, model_fingerprint: &[u8]) -> Hash {
    let mut root = Sha256::new();
    root.update(b"quire prefix v1");
    let adapter = (!namespace.adapter.is_empty()).then_some(&namespace.adapter[..]);
    for part in [tenant, &namespace.salt, model_fingerprint].into_iter().chain(adapter) {
        root.update((part.len() as u64).to_le_bytes());
        root.update(part);
    }
    root.finalize().into()
}

/// Appends the prefix hashes of the full blocks of `tokens`, each chained on the one before, the first on `parent`.
///
/// A token id is hashed as a little-endian int32; a partial tail is ignored. Cost: one SHA-256 per block.
pub fn chain_hashes(mut parent: Hash, tokens: &[i32], block_size: usize, hashes: &mut Vec<Hash>) {
    hashes.reserve(tokens.len() / block_size);
    let length = parent.len() + 4 * block_size;
    let mut message = padded(length);
    for block in tokens.chunks_exact(block_size) {
        let content = &mut message.as_flattened_mut()[..length];
        content[..parent.len()].copy_from_slice(&parent);
        write_tokens(block, &mut content[parent.len()..]);
        parent = hash_padded(&message);
        hashes.push(parent);
    }
}

/// A message of so many zero bytes with SHA-256's padding (FIPS 180-4, 5.1.1). That depends on the length alone: to pad
/// once for all blocks of a prompt saves 3 to 9 % of an admission's time.
fn padded(length: usize) -> Vec<[u8; 64]> {
    let mut message = vec![[0; 64]; (length + 9).div_ceil(64)];
    let bytes = message.as_flattened_mut();
    bytes[length] = 0x80;
    *bytes.last_chunk_mut().expect("it has a block at least") = (8 * length as u64).to_be_bytes();
    message
}

/// SHA-256 of a padded message (FIPS 180-4, 5.3.3 and 6.2).
fn hash_padded(message: &[[u8; 64]]) -> Hash {
    let mut state =
        [0x6a09_e667, 0xbb67_ae85, 0x3c6e_f372, 0xa54f_f53a, 0x510e_527f, 0x9b05_688c, 0x1f83_d9ab, 0x5be0_cd19];
    compress256(&mut state, message);
    let mut hash = [0; 32];
    for (cell, word) in hash.chunks_exact_mut(4).zip(state) {
        cell.copy_from_slice(&word.to_be_bytes());
    }
    hash
}

/// SHA-256 of token ids.
pub fn digest_of(tokens: &[i32]) -> Hash {
    let mut content = vec![0; 4 * tokens.len()];
    write_tokens(tokens, &mut content);
    Sha256::digest(&content).into()
}

fn write_tokens(tokens: &[i32], bytes: &mut [u8]) {
    for (cell, token) in bytes.chunks_exact_mut(4).zip(tokens) {
        cell.copy_from_slice(&token.to_le_bytes());
    }
}

/// The history of a block since it was allocated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Past {
    /// Never findable.
    None,
    /// It can be found by its hash.
    Findable,
    /// It could be found once, and can't any more.
    Dropped,
}

/// The parent of a block in the index.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// The prefix hash of the block before it, or the root.
    pub parent: Hash,
    /// Blocks before it.
    pub index: u32,
}

/// From prefix hash to block and back. Holds only blocks with computed content.
///
/// A hash table with open addressing, with twice as many slots as entries: it never grows. An entry is 32 bits of the
/// mixed hash and the block, 0 where there is none. Every process has its own key for the mix, so that no client can
/// choose tokens with entries that collide.
#[derive(Debug, Serialize, Deserialize)]
#[serde(from = "SavedIndex")]
pub struct PrefixIndex {
    hashes: Vec<Hash>,
    origins: Vec<Origin>,
    past: Vec<Past>,
    #[serde(skip)]
    entries: Vec<u64>,
    #[serde(skip)]
    mask: usize,
    #[serde(skip)]
    mix_key: u64,
    num_indexed: usize,
    num_published: u64,
}

/// An index as it is written down: the entries depend on the process.
#[derive(Deserialize)]
struct SavedIndex {
    hashes: Vec<Hash>,
    origins: Vec<Origin>,
    past: Vec<Past>,
    num_indexed: usize,
    num_published: u64,
}

impl From<SavedIndex> for PrefixIndex {
    fn from(saved: SavedIndex) -> PrefixIndex {
        let SavedIndex { hashes, origins, past, num_indexed, num_published } = saved;
        let mut index = PrefixIndex { num_indexed, num_published, ..PrefixIndex::new(past.len()) };
        (index.hashes, index.origins, index.past) = (hashes, origins, past);
        for block in 0..index.past.len().min(index.hashes.len()) as BlockId {
            if index.is_findable(block) {
                index.enter(&index.hashes[block as usize].clone(), block);
            }
        }
        index
    }
}

impl PrefixIndex {
    pub fn new(num_blocks: usize) -> PrefixIndex {
        let num_entries = (2 * num_blocks).next_power_of_two();
        PrefixIndex {
            hashes: vec![[0; 32]; num_blocks],
            origins: vec![Origin::default(); num_blocks],
            past: vec![Past::None; num_blocks],
            entries: vec![0; num_entries],
            mask: num_entries - 1,
            mix_key: mixing_key(),
            num_indexed: 0,
            num_published: 0,
        }
    }

    pub fn past(&self, block: BlockId) -> Past {
        self.past[block as usize]
    }

    /// The history of every block.
    pub fn pasts(&self) -> &[Past] {
        &self.past
    }

    pub fn is_findable(&self, block: BlockId) -> bool {
        self.past(block) == Past::Findable
    }

    /// The hash by which the block can be found.
    pub fn hash(&self, block: BlockId) -> Option<&Hash> {
        self.is_findable(block).then(|| &self.hashes[block as usize])
    }

    /// The block's parent, from its publication on.
    pub fn origin(&self, block: BlockId) -> &Origin {
        &self.origins[block as usize]
    }

    /// Enters the parent of a published block.
    pub fn enter_origin(&mut self, block: BlockId, origin: Origin) {
        self.origins[block as usize] = origin;
    }

    pub fn num_indexed(&self) -> usize {
        self.num_indexed
    }

    /// Blocks that were made findable since the count began.
    pub fn num_published(&self) -> u64 {
        self.num_published
    }

    pub fn restart_counters(&mut self) {
        self.num_published = 0;
    }

    /// The block that holds this prefix's last block.
    pub fn lookup(&self, hash: &Hash) -> Option<BlockId> {
        self.seek(hash, self.mix(hash)).ok()
    }

    /// The block of a hash; if there is none, the empty place of its entry.
    #[inline]
    fn seek(&self, hash: &Hash, mixed: u32) -> Result<BlockId, usize> {
        let mut place = mixed as usize & self.mask;
        loop {
            let entry = self.entries[place];
            if entry == 0 {
                return Err(place);
            }
            if (entry >> 32) as u32 == mixed && self.hashes[entry as u32 as usize] == *hash {
                return Ok(entry as u32);
            }
            place = (place + 1) & self.mask;
        }
    }

    /// The blocks of the longest known prefix, in order.
    pub fn find(&self, hashes: &[Hash]) -> Vec<BlockId> {
        let mut found = Vec::new();
        for ahead in hashes.chunks(LOOK_AHEAD) {
            self.warm(ahead);
            for hash in ahead {
                match self.lookup(hash) {
                    Some(block) => found.push(block),
                    None => return found,
                }
            }
        }
        found
    }

    /// Makes a computed block findable, unless another one is by this hash; returns the one that is from now on.
    #[inline]
    pub fn publish(&mut self, hash: &Hash, block: BlockId) -> BlockId {
        if let Some(standing) = self.enter(hash, block) {
            return standing;
        }
        self.hashes[block as usize] = *hash;
        self.past[block as usize] = Past::Findable;
        self.num_indexed += 1;
        self.num_published += 1;
        block
    }

    /// Enters the block of a hash. If there is one already, that stays and is returned.
    #[inline]
    fn enter(&mut self, hash: &Hash, block: BlockId) -> Option<BlockId> {
        let mixed = self.mix(hash);
        match self.seek(hash, mixed) {
            Ok(standing) => Some(standing),
            Err(place) => {
                self.entries[place] = u64::from(mixed) << 32 | u64::from(block);
                None
            }
        }
    }

    /// Removes a block from the index because it is allocated again.
    pub fn forget(&mut self, block: BlockId) {
        self.remove(block);
        self.past[block as usize] = Past::None;
    }

    /// Removes a block from the index, but keeps that it was published.
    pub fn drop_hash(&mut self, block: BlockId) {
        self.remove(block);
        self.past[block as usize] = Past::Dropped;
    }

    /// Clears the history of a block that is free and not in the index.
    pub fn forget_past(&mut self, block: BlockId) {
        self.past[block as usize] = Past::None;
    }

    /// Reads the places of these entries, so that looking them up one by one does not wait for memory each time.
    pub fn warm<'a>(&self, hashes: impl IntoIterator<Item = &'a Hash>) {
        let read = |hash| self.entries[self.mix(hash) as usize & self.mask];
        black_box(hashes.into_iter().map(read).fold(0, |all, entry| all ^ entry));
    }

    /// The same for the entries of blocks that are in the index.
    pub fn warm_blocks(&self, blocks: &[BlockId]) {
        self.warm(blocks.iter().map(|block| &self.hashes[*block as usize]));
    }

    /// Disagreements between the two directions: about the blocks of a range, and in its share of the entries.
    pub fn audit(&self, blocks: &Range<BlockId>, wrong: &mut Vec<String>) {
        for block in blocks.clone().filter(|block| self.is_findable(*block)) {
            if self.lookup(&self.hashes[block as usize]) != Some(block) {
                wrong.push(format!("block {block} has a hash by which the index does not find it"));
            }
        }
        let place = |block: BlockId| block as usize * self.entries.len() / self.past.len();
        for place in place(blocks.start)..place(blocks.end) {
            let block = self.entries[place] as BlockId;
            if self.entries[place] != 0 && !self.is_findable(block) {
                wrong.push(format!("index finds block {block} by a hash that the block does not have"));
            }
        }
    }

    /// Reports violations in the count. Cost: O(blocks), a fraction of `audit`'s.
    pub fn audit_counts(&self, wrong: &mut Vec<String>) {
        let num_findable = self.past.iter().filter(|past| **past == Past::Findable).count();
        if num_findable != self.num_indexed {
            wrong.push(format!("{num_findable} blocks have a hash, {} are counted", self.num_indexed));
        }
    }

    fn mix(&self, hash: &Hash) -> u32 {
        let head = u64::from_le_bytes(hash[..8].try_into().expect("a hash is 32 bytes"));
        (head.wrapping_mul(self.mix_key) >> 32) as u32
    }

    /// Removes an entry and moves the entries after it up, so that no search ends too early.
    fn remove(&mut self, block: BlockId) {
        let mut place = self.mix(&self.hashes[block as usize]) as usize & self.mask;
        while self.entries[place] as u32 != block {
            assert!(self.entries[place] != 0, "block {block} is not in the index");
            place = (place + 1) & self.mask;
        }
        let mut next = place;
        loop {
            next = (next + 1) & self.mask;
            let entry = self.entries[next];
            if entry == 0 {
                break;
            }
            let home = (entry >> 32) as usize & self.mask;
            if next.wrapping_sub(home) & self.mask >= next.wrapping_sub(place) & self.mask {
                self.entries[place] = entry;
                place = next;
            }
        }
        self.entries[place] = 0;
        self.num_indexed -= 1;
    }
}

const LOOK_AHEAD: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    /// A salt, without an adapter.
    impl<T: AsRef<[u8]> + ?Sized> From<&T> for Namespace {
        fn from(salt: &T) -> Namespace {
            Namespace { salt: salt.as_ref().to_vec(), adapter: Vec::new() }
        }
    }

    fn hash(number: u64) -> Hash {
        digest_of(&[number as i32, (number >> 32) as i32])
    }

    /// Audits all blocks, some at a time.
    fn violations(index: &PrefixIndex) -> Vec<String> {
        let (mut wrong, num_blocks) = (Vec::new(), index.past.len() as BlockId);
        for first in (0..num_blocks).step_by(3) {
            index.audit(&(first..num_blocks.min(first + 3)), &mut wrong);
        }
        index.audit_counts(&mut wrong);
        wrong
    }

    #[test]
    fn a_hash_is_sha256_of_the_parent_and_the_tokens() {
        let tokens: Vec<i32> = (0..200).map(|number: i32| number.wrapping_mul(0x0123_4567)).collect();
        for block_size in 1..=64 {
            let (mut parent, mut hashes) = ([7; 32], Vec::new());
            chain_hashes(parent, &tokens, block_size, &mut hashes);
            assert_eq!(hashes.len(), tokens.len() / block_size);
            for (block, hash) in tokens.chunks_exact(block_size).zip(&hashes) {
                let bytes: Vec<u8> = block.iter().flat_map(|token| token.to_le_bytes()).collect();
                parent = Sha256::digest([&parent[..], &bytes].concat()).into();
                assert_eq!(*hash, parent);
            }
        }
    }

    #[test]
    fn a_chain_depends_on_everything_before() {
        let chain = |root: Hash, tokens: &[i32]| {
            let mut hashes = Vec::new();
            chain_hashes(root, tokens, 2, &mut hashes);
            hashes
        };
        let hashes = chain([0; 32], &[1, 2, 3, 4, 5]);
        assert_eq!(hashes.len(), 2);
        assert_eq!(hashes[0], <Hash>::from(Sha256::digest([&[0; 32][..], &[1, 0, 0, 0, 2, 0, 0, 0]].concat())));
        assert_eq!(hashes[1], <Hash>::from(Sha256::digest([&hashes[0][..], &[3, 0, 0, 0, 4, 0, 0, 0]].concat())));
        assert_ne!(chain([0; 32], &[9, 2, 3, 4])[1], hashes[1]);
        assert_ne!(chain([1; 32], &[1, 2, 3, 4])[1], hashes[1]);
    }

    #[test]
    fn no_two_splits_of_a_root_collide() {
        assert_ne!(root_hash(b"ab", &b"c".into(), b""), root_hash(b"a", &b"bc".into(), b""));
        assert_ne!(root_hash(b"", &b"x".into(), b""), root_hash(b"x", &b"".into(), b""));
        let adapted = |salt: &[u8], adapter: &[u8]| Namespace { salt: salt.to_vec(), adapter: adapter.to_vec() };
        assert_ne!(root_hash(b"", &adapted(b"", b"x"), b""), root_hash(b"", &b"".into(), b""));
        assert_ne!(root_hash(b"", &adapted(b"", b"x"), b""), root_hash(b"", &b"".into(), b"x"));
        assert_ne!(root_hash(b"", &adapted(b"x", b"y"), b""), root_hash(b"", &adapted(b"y", b"x"), b""));
    }

    #[test]
    fn the_first_block_published_stands() {
        let mut index = PrefixIndex::new(4);
        assert_eq!(index.publish(&hash(1), 2), 2);
        assert_eq!(index.publish(&hash(1), 3), 2);
        assert_eq!((index.past(2), index.past(3)), (Past::Findable, Past::None));
        assert_eq!((index.hash(2), index.hash(3)), (Some(&hash(1)), None));
        assert_eq!((index.num_indexed(), index.num_published()), (1, 1));
    }

    #[test]
    fn a_prefix_ends_where_a_block_is_missing() {
        let mut index = PrefixIndex::new(8);
        for block in [1, 2, 4] {
            index.publish(&hash(block.into()), block);
        }
        assert_eq!(index.find(&[hash(1), hash(2), hash(3), hash(4)]), [1, 2]);
        assert_eq!(index.find(&[hash(3), hash(4)]), [0; 0]);
    }

    #[test]
    fn what_is_dropped_has_a_past_until_it_is_free() {
        let mut index = PrefixIndex::new(4);
        index.publish(&hash(1), 1);
        index.drop_hash(1);
        assert_eq!((index.past(1), index.lookup(&hash(1)), index.hash(1)), (Past::Dropped, None, None));
        index.forget_past(1);
        assert_eq!(index.past(1), Past::None);
    }

    /// Random inserts and removals in a table with four slots at a time; compared with a plain map after every change.
    #[test]
    fn it_agrees_with_a_map() {
        for num_blocks in [2, 3, 5, 17, 64] {
            let mut index = PrefixIndex::new(num_blocks);
            let mut map = std::collections::HashMap::new();
            let mut state = num_blocks as u64;
            for _ in 0..2_000 {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let block = (state >> 33) as u32 % num_blocks as u32;
                if block == 0 {
                    continue;
                }
                if index.is_findable(block) {
                    map.remove(index.hash(block).unwrap());
                    index.forget(block);
                } else {
                    let published = hash(state);
                    assert_eq!(index.publish(&published, block), block);
                    map.insert(published, block);
                }
                assert!(map.iter().all(|(hash, block)| index.lookup(hash) == Some(*block)));
                assert_eq!(violations(&index), [""; 0]);
            }
        }
    }

    #[test]
    fn what_is_wrong_is_told() {
        let mut index = PrefixIndex::new(4);
        index.publish(&hash(1), 1);
        index.past[1] = Past::None;
        let told =
            ["index finds block 1 by a hash that the block does not have", "0 blocks have a hash, 1 are counted"];
        assert_eq!(violations(&index), told);
        (index.past[1], index.hashes[1]) = (Past::Findable, hash(2));
        assert_eq!(violations(&index)[0], "block 1 has a hash by which the index does not find it");
    }

    #[test]
    fn hashes_that_begin_alike_are_told_apart() {
        let (one, mut other) = (hash(1), hash(1));
        other[31] ^= 1;
        let mut index = PrefixIndex::new(4);
        index.publish(&one, 1);
        assert_eq!((index.lookup(&other), index.publish(&other, 2)), (None, 2));
        assert_eq!((index.lookup(&one), index.lookup(&other)), (Some(1), Some(2)));
    }
}
