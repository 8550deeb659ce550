//! The eviction policy that keeps long what is likely to return, where that is measured to find more than LRU.
//!
//! 1. The cache is a tree of prefixes. A segment is a run of blocks that were always used together: a conversation is one
//!    segment that grows, and is cut in two where a prompt leaves it. Time is counted in blocks that were allocated.
//!    Segments that were evicted stay known for a while by the hash of their first block.
//! 2. Each use gives a segment a place: by the number of its uses, the last gap between them, and its hash. Each place has
//!    an LRU list of its own.
//! 3. A candidate says how long each place is kept; the victim is the list head with the earliest end. LRU is the
//!    candidate that keeps all places equally long. Candidates are tried beside each other on a sample (`trial`), and one
//!    is followed only while it finds more than LRU.
//! 4. A segment's place is never lower than a descendant's, no candidate keeps a higher place shorter, and it is used no
//!    earlier; so its time ends no earlier, and chains are evicted leaf first, whichever candidate is followed.
//!
//! Sources: protection by uses and ghosts (S3-FIFO, SOSP 2023; ARC, FAST 2003). Nothing is random.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use crate::cache::eviction::EvictionPolicy;
use crate::cache::eviction::rings::Rings;
use crate::cache::eviction::trial::{MOST_USES, NUM_PLACES, Trial, first_to_end, place_of};
use crate::cache::mixing::NumberMap;
use crate::cache::prefix::{BlockId, Hash};

/// The segment of a block without content, and the key of a segment without a known first hash.
const UNKNOWN: u32 = 0;

const KEY_BYTES: usize = 7;
const LEAST_GHOSTS: usize = 4096;
const BLOCKS_PER_GHOST: usize = 32;

/// A run of blocks that were used together.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct Segment {
    used_at: i64,
    parked_at: i64,
    key: u64,         // of its first block
    start: u32,       // index of its first block in a table
    num_blocks: u32,  // that bear its number
    num_evicted: u32, // from its end, since it was used last
    num_uses: u8,     // MOST_USES also means more
    place: u8,        // its list
    is_forked: bool,  // a prompt left its end, or it was cut there: its continuation is another segment
}

/// The record of an evicted segment.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Ghost {
    used_at: i64,
    num_blocks: u32,
    num_uses: u8,
    is_forked: bool,
}

/// Ghosts by key, and which is the oldest.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Ghosts {
    by_key: NumberMap<(u64, Ghost)>,
    order: VecDeque<(u64, u64)>, // number and key; out of date where the key's ghost has another number
    next_number: u64,
}

impl Ghosts {
    /// Keeps a ghost. It replaces one of the same key and keeps its age.
    fn insert(&mut self, key: u64, ghost: Ghost) {
        if let Some((_, known)) = self.by_key.get_mut(&key) {
            *known = ghost;
            return;
        }
        self.by_key.insert(key, (self.next_number, ghost));
        self.order.push_back((self.next_number, key));
        self.next_number += 1;
        if self.order.len() > 2 * self.by_key.len() + LEAST_GHOSTS {
            self.order.retain(|(number, key)| self.by_key.get(key).is_some_and(|(known, _)| known == number));
        }
    }

    fn remove(&mut self, key: u64) -> Option<Ghost> {
        self.by_key.remove(&key).map(|(_, ghost)| ghost)
    }

    fn remove_oldest(&mut self) -> Option<Ghost> {
        while let Some((number, key)) = self.order.pop_front() {
            if self.by_key.get(&key).is_some_and(|(known, _)| *known == number) {
                return self.remove(key);
            }
        }
        None
    }

    fn len(&self) -> usize {
        self.by_key.len()
    }
}

/// A number for the block at an index of the table; UNKNOWN if its hash is not given.
fn key_of(hashes: &[Hash], index: usize) -> u64 {
    let mut key = [0; 8];
    if let Some(hash) = hashes.get(index) {
        key[..KEY_BYTES].copy_from_slice(&hash[..KEY_BYTES]);
    }
    u64::from_le_bytes(key)
}

/// A number for a block, from bytes that `key_of` does not use.
fn sample_key(hash: &Hash) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|byte| hash[KEY_BYTES + byte]))
}

/// Keeps each segment as long as the followed candidate does. 12 bytes per block, 48 per segment, the ghosts, and the trial.
///
/// Costs do not depend on the pool's size. `admit` is O(segments of the prompt), and O(1) per fresh block and per block
/// of a segment that is cut. A block without a segment (its admission was not entered) gets its parent's.
#[derive(Debug, Serialize, Deserialize)]
pub struct Lineage {
    pub trial: Trial,
    num_blocks: usize,
    rings: Rings, // one per place; the last nodes are their sentinels, the very last for blocks that nothing is known of
    segment_of: Vec<u32>,
    segments: Vec<Segment>, // the first one is unused
    unused_segments: Vec<u32>,
    ghosts: Ghosts,
    most_ghosts: usize,
    sampling: u64, // segments with a key that has these bits set are not remembered: there would be too many ghosts
    clock: i64,    // blocks allocated
    num_parked: usize,
}

impl Lineage {
    pub fn new(num_blocks: usize) -> Lineage {
        Lineage {
            trial: Trial::new((num_blocks - 1).max(1)),
            num_blocks,
            rings: Rings::new(num_blocks + NUM_PLACES + 1),
            segment_of: vec![UNKNOWN; num_blocks],
            segments: vec![Segment::default()],
            unused_segments: Vec::new(),
            ghosts: Ghosts::default(),
            most_ghosts: LEAST_GHOSTS.max(num_blocks / BLOCKS_PER_GHOST),
            sampling: 0,
            clock: 0,
            num_parked: 0,
        }
    }

    fn segment(&mut self, number: u32) -> &mut Segment {
        &mut self.segments[number as usize]
    }

    fn segment_of(&self, block: BlockId) -> u32 {
        self.segment_of[block as usize]
    }

    // -- uses -----------------------------------------------------------------------------------------------------

    /// The segments of the blocks, the last one first. One that goes on elsewhere is cut.
    fn path(&mut self, found: &[BlockId], hashes: &[Hash]) -> Vec<u32> {
        let (mut path, mut end) = (Vec::new(), found.len());
        while end > 0 {
            let mut number = self.segment_of(found[end - 1]);
            if number == UNKNOWN {
                number = self.adopt(found, end);
            }
            let start = (self.segment(number).start as usize).min(end - 1);
            if start + self.segment(number).num_blocks as usize > end {
                let upper = self.cut(number, end);
                self.label(&found[start..end], upper);
                number = upper;
            }
            if self.segment(number).key == 0 {
                self.segment(number).key = key_of(hashes, start);
            }
            path.push(number);
            end = start;
        }
        path
    }

    /// Gives blocks without a segment their parent's, or one of their own.
    fn adopt(&mut self, found: &[BlockId], end: usize) -> u32 {
        let mut start = end - 1;
        while start > 0 && self.segment_of(found[start - 1]) == UNKNOWN {
            start -= 1;
        }
        let number = if start > 0 { self.segment_of(found[start - 1]) } else { self.new_segment(0, 0) };
        self.label(&found[start..end], number);
        number
    }

    /// Makes segments of blocks that continue nothing or a fork: as they were when evicted, where that is known.
    ///
    /// Returns them with the gap before this use, the last one first.
    fn begin(&mut self, fresh: &[BlockId], start: usize, hashes: &[Hash], now: i64) -> Vec<(u32, i64)> {
        let (mut begun, mut first) = (Vec::new(), 0);
        while first < fresh.len() {
            let key = key_of(hashes, start + first);
            let ghost = self.ghosts.remove(key);
            let end = match &ghost {
                Some(ghost) if ghost.is_forked => fresh.len().min(first + ghost.num_blocks as usize),
                _ => fresh.len(),
            };
            let number = self.new_segment(start + first, key);
            self.label(&fresh[first..end], number);
            let (num_uses, is_forked, used_at) =
                ghost.map_or((0, false, now), |ghost| (ghost.num_uses, ghost.is_forked, ghost.used_at));
            let segment = self.segment(number);
            (segment.num_uses, segment.is_forked) = (MOST_USES.min(num_uses + 1), is_forked);
            begun.push((number, now - used_at));
            first = end;
        }
        begun.reverse();
        begun
    }

    /// A segment that is in the cache was found; returns the gap before this use.
    fn enter_return(&mut self, number: u32, now: i64) -> i64 {
        let segment = self.segment(number);
        segment.num_evicted = 0;
        segment.num_uses = MOST_USES.min(segment.num_uses + 1);
        now - segment.used_at
    }

    /// Gives each segment of a prompt, the last one first, its place: no lower than that of those after it.
    fn place(&mut self, uses: &[(u32, i64)]) {
        let (clock, num_usable) = (self.clock, self.num_blocks as i64 - 1);
        let mut place = 0;
        for (number, gap) in uses {
            let segment = self.segment(*number);
            segment.used_at = clock;
            let worth = place_of(segment.key, segment.num_uses, *gap, num_usable);
            place = place.max(segment.place).max(worth);
            segment.place = place;
        }
    }

    /// Enters the prompt's blocks that are in the sample.
    fn try_candidates(&mut self, found: &[BlockId], fresh: &[BlockId], hashes: &[Hash]) {
        let blocks = found.iter().chain(fresh);
        let keyed = hashes.iter().zip(blocks).map(|(hash, block)| (sample_key(hash), *block));
        let sampled: Vec<(u64, u8)> = keyed
            .filter(|(key, _)| self.trial.is_sampled(*key))
            .map(|(key, block)| (key, self.segments[self.segment_of(block) as usize].place))
            .collect();
        self.trial.enter(&sampled, self.clock);
    }

    fn is_remembered(&self, key: u64) -> bool {
        key != 0 && key & self.sampling == 0
    }

    // -- segments -------------------------------------------------------------------------------------------------

    /// A segment without blocks.
    fn new_segment(&mut self, start: usize, key: u64) -> u32 {
        let number = self.unused_segments.pop().unwrap_or_else(|| {
            self.segments.push(Segment::default());
            self.segments.len() as u32 - 1
        });
        *self.segment(number) = Segment { start: start as u32, key, ..Segment::default() };
        number
    }

    /// A new segment, without blocks yet, for those of this one before index `end`; this one keeps the others.
    fn cut(&mut self, number: u32, end: usize) -> u32 {
        let upper = self.new_segment(0, 0);
        let whole = self.segment(number).clone();
        *self.segment(upper) = Segment { num_blocks: 0, num_evicted: 0, is_forked: true, ..whole };
        let lower = self.segment(number);
        lower.start = end as u32;
        lower.key = 0;
        upper
    }

    /// Moves blocks to a segment.
    fn label(&mut self, blocks: &[BlockId], number: u32) {
        if number != UNKNOWN {
            self.segment(number).num_blocks += blocks.len() as u32;
        }
        for block in blocks {
            let old = std::mem::replace(&mut self.segment_of[*block as usize], number);
            if old != UNKNOWN {
                self.segment(old).num_blocks -= 1;
                if self.segment(old).num_blocks == 0 {
                    self.unused_segments.push(old);
                }
            }
        }
    }

    // -- blocks ---------------------------------------------------------------------------------------------------

    /// Gives blocks that came while a sequence ran the segment of the next one: their parent's. All segments.
    fn adopt_parked(&mut self, blocks: &[BlockId]) {
        let mut number = UNKNOWN;
        for block in blocks.iter().rev() {
            if self.segment_of(*block) != UNKNOWN {
                number = self.segment_of(*block);
            } else if number != UNKNOWN {
                self.segment_of[*block as usize] = number;
                self.segment(number).num_blocks += 1;
                self.clock += 1;
            }
        }
    }

    /// The ring with the head that ends first; blocks that nothing is known of go before all others.
    fn first_ring(&self) -> u32 {
        let unknown = self.unknown_ring();
        if self.rings.first(unknown) != unknown {
            return unknown;
        }
        let parked_at = |block: u32| self.segments[self.segment_of(block) as usize].parked_at;
        let end = |place| {
            let head = self.rings.first((self.num_blocks + place) as u32);
            let is_block = (head as usize) < self.num_blocks;
            is_block.then(|| parked_at(head) + self.trial.time(place))
        };
        let place = first_to_end(end);
        place.map_or(unknown, |place| (self.num_blocks + place) as u32)
    }

    fn unknown_ring(&self) -> u32 {
        (self.num_blocks + NUM_PLACES) as u32
    }

    /// Takes out the first blocks of a ring as far as they are of one segment, at most `count`. Returns that.
    fn take_alike(&mut self, ring: u32, count: usize, victims: &mut Vec<BlockId>) -> u32 {
        let Lineage { rings, segment_of, .. } = self;
        let (number, first) = (segment_of[rings.first(ring) as usize], victims.len());
        rings.take_first(ring, count, |block| segment_of[block as usize] == number, victims);
        victims[first..].iter().for_each(|block| segment_of[*block as usize] = UNKNOWN);
        number
    }

    /// The last `count` blocks of the segment were evicted.
    fn lose(&mut self, number: u32, count: u32) {
        let segment = self.segment(number);
        segment.num_blocks -= count;
        segment.num_evicted += count;
        if segment.num_blocks == 0 {
            let key = segment.key;
            if self.is_remembered(key) {
                self.remember(number);
            }
            self.unused_segments.push(number);
        }
    }

    fn remember(&mut self, number: u32) {
        let Segment { used_at, num_evicted, num_uses, is_forked, key, .. } = *self.segment(number);
        self.ghosts.insert(key, Ghost { used_at, num_blocks: num_evicted, num_uses, is_forked });
        if self.ghosts.len() > self.most_ghosts
            && let Some(oldest) = self.ghosts.remove_oldest()
            && self.clock - oldest.used_at < 4 * self.num_blocks as i64
        {
            self.sampling = self.sampling * 2 + 1;
        }
    }
}

impl EvictionPolicy for Lineage {
    /// Enters a use of each segment on the path, and a segment for what continues them.
    fn admit(&mut self, found: &[BlockId], fresh: &[BlockId], hashes: &[Hash]) {
        let now = self.clock;
        self.clock = now + fresh.len() as i64;
        let path = self.path(found, hashes);
        let returned: Vec<(u32, i64)> = path.iter().map(|number| (*number, self.enter_return(*number, now))).collect();
        let mut uses = Vec::new();
        if !fresh.is_empty() {
            match path.first() {
                Some(&last) if !self.segment(last).is_forked => self.label(fresh, last),
                _ => uses = self.begin(fresh, found.len(), hashes, now),
            }
        }
        uses.extend(returned);
        self.place(&uses);
        self.try_candidates(found, fresh, hashes);
    }

    /// Appends each to the ring of its segment's place.
    fn park(&mut self, blocks: &[BlockId]) {
        if blocks.iter().any(|block| self.segment_of(*block) == UNKNOWN) {
            self.adopt_parked(blocks);
        }
        let Lineage { rings, segments, segment_of, num_blocks, clock, .. } = self;
        for alike in blocks.chunk_by(|one, next| segment_of[*one as usize] == segment_of[*next as usize]) {
            let number = segment_of[alike[0] as usize];
            let segment = &mut segments[number as usize];
            segment.parked_at = *clock;
            let place = if number == UNKNOWN { NUM_PLACES } else { segment.place.into() };
            rings.append_all(alike, (*num_blocks + place) as u32);
        }
        self.num_parked += blocks.len();
    }

    /// Takes out of the rings, wherever they are.
    fn unpark(&mut self, blocks: &[BlockId]) {
        blocks.iter().for_each(|block| self.rings.remove(*block));
        self.num_parked -= blocks.len();
    }

    /// They leave their segments.
    fn forget(&mut self, blocks: &[BlockId]) {
        self.label(blocks, UNKNOWN);
    }

    /// Takes the list head that ends first, and the blocks after it in the same segment, until there are enough.
    fn evict(&mut self, count: usize, victims: &mut Vec<BlockId>) {
        self.num_parked -= count;
        let end = victims.len() + count;
        while victims.len() < end {
            let before = victims.len();
            let number = self.take_alike(self.first_ring(), end - before, victims);
            assert!(victims.len() > before, "fewer blocks are parked than counted");
            if number != UNKNOWN {
                self.lose(number, (victims.len() - before) as u32);
            }
        }
    }

    fn num_parked(&self) -> usize {
        self.num_parked
    }

    fn is_parked(&self, block: BlockId) -> bool {
        self.rings.contains(block)
    }

    /// The highest place last; within one, least recently parked first.
    fn parked(&self) -> Vec<BlockId> {
        let places = [NUM_PLACES].into_iter().chain(0..NUM_PLACES);
        places.flat_map(|place| self.rings.nodes((self.num_blocks + place) as u32)).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, HashSet};

    use super::*;
    use crate::cache::eviction::policies::{POLICIES, Policy};
    use crate::cache::eviction::trial::{LRU, NUM_CANDIDATES};
    use crate::cache::pool::BlockPool;
    use crate::cache::pool::tests::{ASKER, Random, of_one_tenant, violations};
    use crate::cache::prefix::chain_hashes;

    fn hashes_of(prompt: &[i32]) -> Vec<Hash> {
        let mut hashes = Vec::new();
        chain_hashes([0; 32], prompt, 1, &mut hashes);
        hashes
    }

    fn numbers(first: i32, count: i32) -> Vec<i32> {
        (first..first + count).collect()
    }

    /// A pool of blocks of one token, which are published at once; it watches that no block goes before its children.
    struct Cache {
        pool: BlockPool,
        prefix_of: HashMap<BlockId, Vec<i32>>,
        evicted: Vec<BlockId>,
        num_hits: usize,
    }

    impl Cache {
        fn new(policy: &str, num_usable: usize) -> Cache {
            let pool = of_one_tenant(num_usable + 1, Policy::named(policy, num_usable + 1).unwrap());
            Cache { pool, prefix_of: HashMap::new(), evicted: Vec::new(), num_hits: 0 }
        }

        fn lineage(&mut self) -> &mut Lineage {
            self.pool.parking_mut().policy().lineage().unwrap()
        }

        /// A table for the prompt: one block for each token, and one for a partial tail.
        fn admit(&mut self, prompt: &[i32], has_tail: bool) -> Vec<BlockId> {
            let hashes = hashes_of(prompt);
            let found = self.pool.index().find(&hashes);
            self.num_hits += found.len();
            self.pool.acquire(&found, 1).unwrap();
            let fresh = self.pool.allocate(prompt.len() - found.len() + usize::from(has_tail), 0, &ASKER).unwrap();
            fresh.iter().for_each(|block| self.enter_eviction(*block));
            self.pool.parking_mut().admit(&found, &fresh, &hashes);
            let table = [found, fresh].concat();
            for (index, block) in table.iter().enumerate().take(prompt.len()) {
                assert_eq!(self.pool.publish(&hashes[index], *block), *block);
                self.prefix_of.insert(*block, prompt[..=index].to_vec());
            }
            table
        }

        fn enter_eviction(&mut self, block: BlockId) {
            let Some(prefix) = self.prefix_of.remove(&block) else {
                return;
            };
            let is_child = |other: &Vec<i32>| other.len() == prefix.len() + 1 && other.starts_with(&prefix);
            assert!(!self.prefix_of.values().any(is_child), "a parent went before its child");
            self.evicted.push(block);
        }

        fn release(&mut self, table: &[BlockId]) {
            self.pool.release(&table.iter().rev().copied().collect::<Vec<_>>()).unwrap();
        }

        /// Admits and releases.
        fn ask(&mut self, prompt: &[i32]) -> Vec<BlockId> {
            let table = self.admit(prompt, false);
            self.release(&table);
            table
        }

        /// Evicts all cached blocks: content that returns matches a ghost.
        fn evict_all(&mut self) {
            let blocks = self.pool.allocate(self.pool.num_allocatable(), 0, &ASKER).unwrap();
            blocks.iter().for_each(|block| self.enter_eviction(*block));
            self.pool.release(&blocks).unwrap();
        }

        /// Numbers of blocks and of uses, and whether it is forked, of each segment that the table goes through.
        fn segments(&mut self, table: &[BlockId]) -> Vec<(u32, u8, bool)> {
            let lineage = self.lineage();
            let mut numbers: Vec<u32> = table.iter().map(|block| lineage.segment_of(*block)).collect();
            numbers.dedup();
            let segments = numbers.into_iter().map(|number| &lineage.segments[number as usize]);
            segments.map(|segment| (segment.num_blocks, segment.num_uses, segment.is_forked)).collect()
        }
    }

    /// Prompts that continue earlier ones, leave them in the middle, or are new.
    fn chats(seed: u64, count: usize) -> Vec<Vec<i32>> {
        let (mut random, mut open, mut prompts) = (Random(seed), VecDeque::new(), Vec::new());
        for number in 1..=count {
            let mut prompt = vec![0, 1];
            if !open.is_empty() && random.below(10) < 7 {
                prompt = Vec::clone(&open[random.below(open.len())]);
                if random.below(5) == 0 {
                    prompt.truncate(random.below(prompt.len()));
                }
            }
            prompt.extend(numbers(1000 * number as i32, 1 + random.below(4) as i32));
            prompt.truncate(20);
            prompts.push(prompt.clone());
            open.push_back(prompt);
            if open.len() > 12 {
                open.pop_front();
            }
        }
        prompts
    }

    const LAST: usize = NUM_CANDIDATES - 1;

    /// A policy for 16 blocks with one prompt per list of blocks; each prompt's segment is moved to its place, and parked.
    fn placed(followed: usize, prompts: &[(&[BlockId], u8)]) -> Lineage {
        let mut lineage = Lineage::new(17);
        for (number, (blocks, place)) in prompts.iter().enumerate() {
            lineage.admit(&[], blocks, &vec![[number as u8; 32]; blocks.len()]);
            let segment = lineage.segment_of(blocks[0]);
            lineage.segment(segment).place = *place;
            lineage.park(&blocks.iter().rev().copied().collect::<Vec<_>>());
        }
        lineage.trial.followed = followed;
        lineage
    }

    fn evict(policy: &mut dyn EvictionPolicy, count: usize) -> Vec<BlockId> {
        let mut victims = Vec::new();
        policy.evict(count, &mut victims);
        victims
    }

    // -- segments -----------------------------------------------------------------------------------------------------

    #[test]
    fn a_conversation_is_one_segment_that_grows() {
        let mut cache = Cache::new("lineage", 16);
        cache.ask(&numbers(0, 3));
        let table = cache.ask(&numbers(0, 5));
        assert_eq!(cache.segments(&table), [(5, 2, false)]);
        let key = u64::from_le_bytes([&hashes_of(&[0])[0][..KEY_BYTES], &[0]].concat().try_into().unwrap());
        assert_eq!(cache.lineage().segments[1].key, key);
    }

    #[test]
    fn a_segment_is_cut_where_a_prompt_leaves_it() {
        let mut cache = Cache::new("lineage", 16);
        let first = cache.ask(&numbers(0, 6));
        let second = cache.ask(&[numbers(0, 3), numbers(50, 2)].concat());
        assert_eq!(cache.segments(&first), [(3, 2, true), (3, 1, false)]);
        assert_eq!(cache.segments(&second), [(3, 2, true), (2, 1, false)]);
        let third = cache.ask(&[0, 70]);
        assert_eq!(cache.segments(&third), [(1, 3, true), (1, 1, false)]);
        assert_eq!(cache.segments(&first), [(1, 3, true), (2, 2, true), (3, 1, false)]);
    }

    #[test]
    fn what_is_left_of_a_segment_that_was_cut_gets_its_key_when_it_is_used() {
        let mut cache = Cache::new("lineage", 16);
        let table = cache.ask(&numbers(0, 6));
        cache.ask(&[0, 1, 2, 70]);
        let lower = cache.lineage().segment_of(table[5]);
        assert_eq!((cache.lineage().segment(lower).key, cache.lineage().segment(lower).start), (0, 3));
        cache.ask(&numbers(0, 6));
        assert_eq!(cache.lineage().segment(lower).key, key_of(&hashes_of(&numbers(0, 6)), 3));
        assert_eq!(cache.segments(&table), [(3, 3, true), (3, 2, false)]);
    }

    #[test]
    fn a_prompt_that_ends_inside_a_segment_cuts_it_too() {
        let mut cache = Cache::new("lineage", 16);
        let table = cache.ask(&numbers(0, 6));
        cache.ask(&numbers(0, 2));
        assert_eq!(cache.segments(&table), [(2, 2, true), (4, 1, false)]);
    }

    #[test]
    fn blocks_that_came_while_a_sequence_ran_are_adopted_by_their_parents_segment() {
        let mut lineage = Lineage::new(8);
        lineage.admit(&[], &[1, 2], &hashes_of(&[1, 2]));
        lineage.park(&[4, 3, 2, 1]);
        assert_eq!(lineage.segment_of[1..5], [1; 4]);
        assert_eq!((lineage.segments[1].num_blocks, lineage.clock), (4, 4));
        assert_eq!(evict(&mut lineage, 4), [4, 3, 2, 1]);
    }

    #[test]
    fn found_blocks_without_a_segment_are_adopted_or_get_one_of_their_own() {
        let mut lineage = Lineage::new(8);
        lineage.admit(&[], &[1, 2], &hashes_of(&[1, 2]));
        lineage.admit(&[1, 2, 3], &[4], &hashes_of(&[1, 2, 3, 4]));
        assert_eq!((&lineage.segment_of[1..5], lineage.segments[1].num_blocks), (&[1; 4][..], 4));
        lineage.admit(&[5, 6], &[7], &hashes_of(&[5, 6, 7]));
        assert_eq!((&lineage.segment_of[5..8], lineage.segments[2].num_blocks), (&[2; 3][..], 3));
        assert_eq!(lineage.segments[2].key, key_of(&hashes_of(&[5]), 0));
    }

    #[test]
    fn blocks_that_nothing_is_known_of_go_first_and_in_their_order() {
        let mut lineage = Lineage::new(8);
        lineage.admit(&[], &[1], &hashes_of(&[1]));
        lineage.park(&[1]);
        lineage.park(&[5, 4]);
        assert_eq!((lineage.parked(), lineage.num_parked()), (vec![5, 4, 1], 3));
        assert_eq!(evict(&mut lineage, 3), [5, 4, 1]);
    }

    #[test]
    fn what_becomes_free_leaves_its_segment_and_an_empty_segment_is_used_again() {
        let mut cache = Cache::new("lineage", 8);
        let table = cache.pool.allocate(3, 0, &ASKER).unwrap();
        cache.pool.parking_mut().admit(&[], &table, &hashes_of(&[1, 2]));
        cache.pool.publish(&hashes_of(&[1])[0], table[0]);
        cache.release(&table);
        let lineage = cache.lineage();
        assert_eq!((&lineage.segment_of[1..4], lineage.segments[1].num_blocks), (&[1, 0, 0][..], 1));
        cache.pool.drop_cached(0, 9, 0.0, 0);
        let lineage = cache.lineage();
        assert_eq!((lineage.segment_of[1], &lineage.unused_segments[..]), (UNKNOWN, &[1][..]));
        let table = cache.ask(&[7]);
        assert_eq!((cache.lineage().segment_of(table[0]), cache.lineage().segments.len()), (1, 2));
    }

    #[test]
    fn memory_does_not_grow_with_time() {
        let mut cache = Cache::new("lineage", 100);
        cache.lineage().most_ghosts = 50;
        for prompt in chats(5, 2000) {
            let table = cache.admit(&prompt, true);
            cache.release(&table);
            assert!(cache.lineage().ghosts.len() <= 50);
        }
        let lineage = cache.lineage();
        assert!(lineage.segments.len() <= 101 && lineage.ghosts.order.len() <= 2 * 50 + LEAST_GHOSTS);
        let mut num_blocks = vec![0; lineage.segments.len()];
        lineage.segment_of.iter().for_each(|number| num_blocks[*number as usize] += 1);
        let counted: Vec<u32> = lineage.segments.iter().map(|segment| segment.num_blocks).collect();
        assert_eq!(num_blocks[1..], counted[1..]);
        let unused: HashSet<u32> = lineage.unused_segments.iter().copied().collect();
        let empty = (1..).zip(&counted[1..]).filter(|(_, count)| **count == 0).map(|(number, _)| number);
        assert_eq!((unused.len(), unused), (lineage.unused_segments.len(), empty.collect()));
        let labelled = (1..101).filter(|block| cache.lineage().segment_of(*block) != UNKNOWN);
        assert_eq!(labelled.count(), cache.prefix_of.len());
    }

    // -- ghosts -------------------------------------------------------------------------------------------------------

    fn ghost(num_blocks: u32) -> Ghost {
        Ghost { used_at: 0, num_blocks, num_uses: 1, is_forked: false }
    }

    #[test]
    fn the_oldest_ghost_goes_first_and_a_replaced_one_is_as_old_as_it_was() {
        let mut ghosts = Ghosts::default();
        (1..=4).for_each(|key| ghosts.insert(key, ghost(key as u32)));
        ghosts.insert(1, ghost(10));
        assert_eq!(ghosts.remove(2).map(|ghost| ghost.num_blocks), Some(2));
        ghosts.insert(2, ghost(20));
        assert_eq!((ghosts.remove(9).is_none(), ghosts.len()), (true, 4));
        let order: Vec<u32> = std::iter::from_fn(|| ghosts.remove_oldest()).map(|ghost| ghost.num_blocks).collect();
        assert_eq!((order, ghosts.len()), (vec![10, 3, 4, 20], 0));
    }

    #[test]
    fn the_order_of_ghosts_stays_small_though_they_come_and_go() {
        let mut ghosts = Ghosts::default();
        ghosts.insert(1, ghost(1));
        for _ in 0..3 * LEAST_GHOSTS {
            ghosts.insert(2, ghost(2));
            ghosts.remove(2);
        }
        assert!(ghosts.order.len() <= LEAST_GHOSTS + 4);
        assert_eq!(ghosts.remove_oldest().map(|ghost| ghost.num_blocks), Some(1));
    }

    #[test]
    fn an_evicted_segment_that_comes_back_is_what_it_was() {
        let mut cache = Cache::new("lineage", 16);
        cache.ask(&numbers(0, 3));
        cache.ask(&numbers(0, 3));
        cache.ask(&numbers(10, 13));
        cache.evict_all();
        let table = cache.ask(&numbers(0, 3));
        assert_eq!(cache.segments(&table), [(3, 3, false)]);
        let lineage = cache.lineage();
        let number = lineage.segment_of(table[0]);
        let gap = 13; // blocks allocated and entered since then
        let (key, place) = (lineage.segment(number).key, lineage.segment(number).place);
        assert_eq!(place, place_of(key, 3, gap, 16));
        assert_eq!((lineage.segment(number).used_at, lineage.segment(number).num_evicted), (19, 0));
    }

    #[test]
    fn a_segment_that_lost_its_end_is_remembered_with_all_its_blocks() {
        let mut cache = Cache::new("lineage", 16);
        let table = cache.ask(&numbers(0, 6));
        cache.ask(&numbers(10, 12));
        assert_eq!(cache.segments(&table[..4]), [(4, 1, false)]);
        cache.evict_all();
        let key = key_of(&hashes_of(&[0]), 0);
        let ghost = cache.lineage().ghosts.remove(key).unwrap();
        assert_eq!((ghost.num_blocks, ghost.num_uses, ghost.used_at), (6, 1, 6));
    }

    #[test]
    fn a_segment_that_is_found_again_has_lost_nothing_since() {
        let mut cache = Cache::new("lineage", 16);
        cache.ask(&numbers(0, 6));
        cache.ask(&numbers(10, 12));
        let table = cache.ask(&numbers(0, 4));
        let number = cache.lineage().segment_of(table[0]);
        let segment = cache.lineage().segment(number).clone();
        assert_eq!((segment.num_blocks, segment.num_evicted, segment.num_uses), (4, 0, 2));
    }

    #[test]
    fn forks_are_revived_where_they_were() {
        let mut cache = Cache::new("lineage", 16);
        cache.ask(&numbers(0, 6));
        cache.ask(&[numbers(0, 3), numbers(50, 2)].concat());
        cache.ask(&numbers(0, 6));
        cache.evict_all();
        let table = cache.ask(&numbers(0, 7));
        assert_eq!(cache.segments(&table), [(3, 4, true), (4, 3, false)]);
        let table = cache.ask(&[numbers(0, 3), numbers(50, 2)].concat());
        assert_eq!(cache.segments(&table), [(3, 5, true), (2, 2, false)]);
    }

    #[test]
    fn uses_are_counted_up_to_the_most() {
        let mut cache = Cache::new("lineage", 16);
        for num_uses in 1..=MOST_USES + 2 {
            let table = cache.ask(&numbers(0, 3));
            assert_eq!(cache.segments(&table), [(3, num_uses.min(MOST_USES), false)]);
            if num_uses % 2 == 0 {
                cache.evict_all();
            }
        }
    }

    #[test]
    fn fewer_segments_are_remembered_when_there_are_too_many_ghosts() {
        let mut cache = Cache::new("lineage", 16);
        cache.lineage().most_ghosts = 2;
        for number in 0..40 {
            cache.ask(&numbers(100 * number, 2));
        }
        let lineage = cache.lineage();
        assert!([1, 3, 7, 15].contains(&lineage.sampling), "{}", lineage.sampling);
        assert_eq!(lineage.ghosts.len(), 2);
        let sampling = lineage.sampling;
        let keys: Vec<u64> = (0..40).map(|number| key_of(&hashes_of(&[100 * number]), 0)).collect();
        assert!(keys.iter().all(|key| lineage.is_remembered(*key) == (key & sampling == 0)));
        assert!(!lineage.is_remembered(0), "what has no key can't be told apart");
        lineage.sampling = u64::MAX;
        cache.evict_all();
        let before = cache.lineage().ghosts.next_number;
        cache.ask(&numbers(9000, 2));
        cache.evict_all();
        assert_eq!(cache.lineage().ghosts.next_number, before, "none of what is not to be remembered");
    }

    #[test]
    fn old_ghosts_are_no_sign_of_too_many() {
        for (age, sampling) in [(4 * 17 - 1, 1), (4 * 17, 0)] {
            let mut lineage = Lineage::new(17);
            (lineage.most_ghosts, lineage.clock) = (1, age);
            lineage.ghosts.insert(99, ghost(1));
            lineage.segments.push(Segment { key: 7, num_blocks: 0, ..Segment::default() });
            lineage.remember(1);
            assert_eq!(
                (lineage.sampling, lineage.ghosts.len(), lineage.ghosts.remove(99).is_none()),
                (sampling, 1, true)
            );
        }
    }

    // -- eviction order -----------------------------------------------------------------------------------------------

    #[test]
    fn chains_go_leaf_first_and_every_block_comes_back_once() {
        for (seed, policy) in (0..4).flat_map(|seed| POLICIES.map(|policy| (seed, policy))) {
            let (mut cache, mut random, mut held) = (Cache::new(policy, 80), Random(seed), Vec::new());
            for prompt in chats(seed, 250) {
                held.push(cache.admit(&prompt, random.below(2) == 0));
                while held.len() > random.below(3) {
                    let table = held.swap_remove(random.below(held.len()));
                    cache.release(&table);
                }
                assert_eq!(violations(&cache.pool), [""; 0]);
            }
            held.iter().for_each(|table| cache.release(table));
            cache.evict_all();
            assert!(cache.prefix_of.is_empty() && cache.pool.parking().parked().is_empty());
            assert_eq!(cache.pool.counts().free, 80);
        }
    }

    /// Another candidate is followed with each prompt.
    #[test]
    fn chains_go_leaf_first_whatever_is_followed() {
        for seed in 0..6 {
            let (mut cache, mut random) = (Cache::new("lineage", 80), Random(seed));
            for prompt in chats(seed, 600) {
                cache.lineage().trial.followed = random.below(NUM_CANDIDATES);
                cache.ask(&prompt);
            }
            cache.evict_all();
            assert!(cache.prefix_of.is_empty());
        }
    }

    #[test]
    fn while_no_other_candidate_is_followed_it_is_lru() {
        for seed in 0..4 {
            let mut caches = POLICIES.map(|policy| Cache::new(policy, 60));
            for prompt in chats(seed, 500) {
                caches[0].lineage().trial.followed = LRU;
                for cache in &mut caches {
                    let table = cache.admit(&prompt, prompt.len() % 2 == 0);
                    cache.release(&table);
                }
            }
            let places: HashSet<u8> = caches[0].lineage().segments.iter().map(|segment| segment.place).collect();
            assert!(places.len() > 3, "{places:?}");
            assert!(caches[0].evicted.len() > 500 && caches[0].evicted == caches[1].evicted);
        }
    }

    #[test]
    fn what_is_worth_more_is_kept_longer() {
        let mut lineage = placed(LAST, &[(&[1, 2, 3], 15), (&[11, 12], 1), (&[5], 12), (&[6], 0)]);
        assert_eq!(lineage.parked(), [6, 12, 11, 5, 3, 2, 1], "the highest place last");
        assert_eq!(
            evict(&mut lineage, 5),
            [6, 12, 11, 5, 3],
            "the lowest place first, a chain's end before its beginning"
        );
    }

    #[test]
    fn a_long_time_ends_before_a_short_one_that_began_much_later() {
        let mut lineage = placed(LAST, &[(&[1], 15), (&[2], 0)]);
        lineage.unpark(&[2]);
        lineage.clock += 15 * 8 * 16 - 1; // 8 pools for each place, since block 1 was parked
        lineage.park(&[2]);
        assert_eq!(lineage.first_ring(), 17, "both end at once: the lower place first");
        lineage.unpark(&[2]);
        lineage.clock += 1;
        lineage.park(&[2]);
        assert_eq!(lineage.first_ring(), 17 + 15);
    }

    #[test]
    fn the_order_is_lrus_as_soon_as_it_is_followed() {
        let mut lineage = placed(LAST, &[(&[1, 2], 15), (&[3], 0), (&[4], 5), (&[5], 12), (&[6], 1)]);
        lineage.trial.followed = LRU;
        assert_eq!(evict(&mut lineage, 6), [2, 1, 3, 4, 5, 6]);
    }

    #[test]
    fn nothing_is_at_a_lower_place_than_what_continues_it() {
        let mut lineage = placed(LAST, &[(&[1, 2, 3], 8)]);
        lineage.unpark(&[1, 2]);
        lineage.admit(&[1, 2], &[4], &hashes_of(&[1, 2, 4]));
        let place = |block: BlockId| lineage.segments[lineage.segment_of(block) as usize].place;
        assert_eq!((place(1), place(3)), (8, 8), "both halves of what was cut stay where they were");
        assert!(place(4) < 8);
        let continued = lineage.segment_of(4);
        lineage.segment(continued).place = 9;
        lineage.admit(&[1, 2, 4], &[5], &hashes_of(&[1, 2, 4, 5]));
        assert_eq!(lineage.segments[lineage.segment_of(1) as usize].place, 9);
    }

    #[test]
    fn prompts_are_entered_in_the_trial() {
        let mut cache = Cache::new("lineage", 20);
        cache.ask(&numbers(0, 5));
        cache.ask(&numbers(0, 7));
        let lineage = cache.lineage();
        assert_eq!(lineage.trial.lru_hits().round(), 5.0);
    }

    // -- hit rates ----------------------------------------------------------------------------------------------------

    fn num_hits(policy: &str, num_usable: usize, prompts: &[Vec<i32>]) -> usize {
        let mut cache = Cache::new(policy, num_usable);
        prompts.iter().for_each(|prompt| drop(cache.ask(prompt)));
        cache.num_hits
    }

    /// Twelve prompts of ten blocks in turn: LRU finds none of them in a pool of less than 120 blocks.
    #[test]
    fn part_of_a_loop_that_does_not_fit_is_kept() {
        let prompts: Vec<_> = (0..1500).map(|number| numbers(100 * (number % 12), 10)).collect();
        assert_eq!(num_hits("lru", 60, &prompts), 0);
        assert!(num_hits("lineage", 60, &prompts) > 3000);
    }

    /// Eight chats come back every 40 prompts, the others are asked once.
    #[test]
    fn returning_chats_survive_a_stream_of_prompts_that_never_return() {
        let prompt = |number: i32| numbers(if number % 40 < 8 { 10 * (number % 40) } else { -5 * number - 5 }, 5);
        let prompts: Vec<_> = (0..2500).map(prompt).collect();
        assert_eq!(num_hits("lru", 100, &prompts), 0);
        assert!(num_hits("lineage", 100, &prompts) > 1000);
    }

    #[test]
    fn the_same_calls_give_the_same_evictions() {
        let [first, second] = [(), ()].map(|()| {
            let mut cache = Cache::new("lineage", 60);
            chats(3, 600).iter().for_each(|prompt| drop(cache.ask(prompt)));
            cache.evicted
        });
        assert_eq!(first, second);
    }

    /// A loop that does not fit, then 20 prompts that do: after two turnovers as much is found as under LRU.
    #[test]
    fn what_fits_after_a_change_of_phase_is_found_within_two_turnovers() {
        let loops: Vec<_> = (0..1000).map(|number| numbers(100 * (number % 40), 10)).collect();
        let turnover: Vec<_> = (0..20).map(|number| numbers(50_000 + 100 * number, 10)).collect();
        let hits = ["lru", "lineage"].map(|policy| {
            let mut cache = Cache::new(policy, 200);
            loops.iter().chain(&turnover).chain(&turnover).for_each(|prompt| drop(cache.ask(prompt)));
            let before = cache.num_hits;
            for _ in 0..10 {
                turnover.iter().take(19).for_each(|prompt| drop(cache.ask(prompt)));
            }
            (before, cache.num_hits - before)
        });
        let [(lru_before, lru_after), (before, after)] = hits;
        assert!(lru_before == 200 && before > 1500, "{lru_before} and {before}");
        assert!(lru_after == 1900 && after >= 1805, "{after}");
    }
}
