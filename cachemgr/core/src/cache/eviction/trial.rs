//! Candidates for the order of eviction, tried beside LRU on a sample of the blocks.
//!
//! 1. Each use gives a segment a place from 0 to 15: its worth. A candidate is a time for each place: segments are kept
//!    longer by it than those one place lower. The first candidate's time is 0, so it keeps all equally long: it is LRU.
//! 2. Each candidate has a shadow: a small cache of keys, without blocks, for a sample of the prompts' blocks, chosen by
//!    their hash, with the same share of the pool's room. So the hits of each are measured, whichever is followed.
//! 3. A candidate is followed while its shadow finds more than LRU's, lately too. It has to find clearly more to begin
//!    with.
//!
//! The order of a pool changes at once with the candidate, because every list of segments at one place is in LRU order.
//!
//! Sources: spatial sampling by hash (SHARDS, FAST 2015), sampled candidates that compete (set dueling, ISCA 2007).
//! Nothing is random.

use serde::{Deserialize, Serialize};

use crate::cache::eviction::rings::Rings;
use crate::cache::mixing::NumberMap;

pub const NUM_PLACES: usize = 16;

/// By candidate, the time of a place beyond that of the place below it, in quarters of a pool. The first candidate is LRU.
const QUARTERS: [i64; 4] = [0, 1, 4, 32];

pub const NUM_CANDIDATES: usize = QUARTERS.len();
pub const LRU: usize = 0;

/// Knuth's multiplier: spreads keys before a share of them is chosen.
const MIX: u64 = 2_654_435_761;

/// Levels of segments by their key: half of all are at 0, a quarter at 1, and so on; the last has what is left.
const LAST_LEVEL: u32 = 5;

pub const MOST_USES: u8 = 5;

/// Blocks of a shadow, if the pool has as many: at least these, and less than twice these.
const SHADOW_BLOCKS: usize = 512;

/// Turnovers of a shadow in which a hit's weight falls to about a third.
const FADE_TURNOVERS: f64 = 12.0;

/// The same for the latest hits, in turnovers of prompts: as many blocks as the shadow has, new or found.
const LATELY_TURNOVERS: f64 = 0.5;

/// Part of a turnover for a block that was found: gains fade a little even where LRU finds everything.
const FOUND_WEIGHT: f64 = 0.1;

const SHOWN_DEVIATIONS: f64 = 2.0;
const LEAST_SHOWN_GAIN: f64 = 0.02;
const CLEARLY_BETTER: f64 = 1.1;

/// The place of a segment that was used `num_uses` times, the last two times `gap` blocks apart.
///
/// The key's level keeps a share of equal segments. Uses raise it, most of all a gap that is a little too long for LRU.
pub fn place_of(key: u64, num_uses: u8, gap: i64, num_blocks: i64) -> u8 {
    let level = if key == 0 { 0 } else { (key.wrapping_mul(MIX) >> 24).trailing_zeros().min(LAST_LEVEL) as i8 };
    let by_uses = match num_uses {
        0 | 1 => return level as u8,
        2 => 4,
        3 | 4 => 6,
        _ => 8,
    };
    let by_gap = if gap * 16 <= num_blocks {
        2
    } else if (num_blocks + 1..=4 * num_blocks).contains(&gap) {
        1
    } else {
        -1
    };
    (level + by_uses + by_gap).clamp(0, NUM_PLACES as i8 - 1) as u8
}

/// The time that a candidate keeps what is at a place, in blocks allocated since it was used: beyond that of place 0.
fn time_of(candidate: usize, place: usize, num_blocks: i64) -> i64 {
    QUARTERS[candidate] * place as i64 * num_blocks / 4
}

/// The place with the earliest end, by the end of each place that has one; of equal ones the lowest, which is the child's
/// if one is.
pub fn first_to_end(end: impl Fn(usize) -> Option<i64>) -> Option<usize> {
    let ends = (0..NUM_PLACES).filter_map(|place| Some((end(place)?, place)));
    ends.min().map(|(_, place)| place)
}

/// The shadows: caches of keys, one in the order of each candidate, all of the same number of keys.
///
/// All have the same lists, one for each place, with the latest uses at the end. A candidate evicts from the front, so
/// what its shadow holds of a list is the end of that list, from its head on. A key is there while a shadow holds it.
#[derive(Debug, Serialize, Deserialize)]
struct Shadows {
    num_slots: usize, // keys of each
    rings: Rings,     // of nodes, one per place; the last nodes are their sentinels
    nodes: NumberMap<u32>,
    keys: Vec<u64>, // by node
    used_at: Vec<i64>,
    places: Vec<u8>,
    stamps: Vec<u64>, // rise along a list; a sentinel has the highest
    next_stamp: u64,
    free: Vec<u32>,
    heads: [[u32; NUM_PLACES]; NUM_CANDIDATES], // sentinels where nothing is held
    num_held: [usize; NUM_CANDIDATES],
}

impl Shadows {
    fn new(num_slots: usize) -> Shadows {
        let num_nodes = NUM_CANDIDATES * num_slots;
        let mut stamps = vec![0; num_nodes];
        stamps.resize(num_nodes + NUM_PLACES, u64::MAX);
        Shadows {
            num_slots,
            rings: Rings::new(num_nodes + NUM_PLACES),
            nodes: NumberMap::default(),
            keys: vec![0; num_nodes],
            used_at: vec![0; num_nodes],
            places: vec![0; num_nodes],
            stamps,
            next_stamp: 0,
            free: (0..num_nodes as u32).rev().collect(),
            heads: [std::array::from_fn(|place| (num_nodes + place) as u32); NUM_CANDIDATES],
            num_held: [0; NUM_CANDIDATES],
        }
    }

    fn sentinel(&self, place: usize) -> u32 {
        (self.keys.len() + place) as u32
    }

    fn is_held(&self, candidate: usize, node: u32) -> bool {
        let head = self.heads[candidate][usize::from(self.places[node as usize])];
        self.stamps[node as usize] >= self.stamps[head as usize]
    }

    /// Enters a prompt's keys with their places, the last one first: each takes a free slot, or that of the first to end.
    ///
    /// Returns how many each candidate finds from the beginning on, and how many are new to LRU.
    fn enter(&mut self, prompt: &[(u64, u8)], now: i64, num_blocks: i64) -> ([usize; NUM_CANDIDATES], usize) {
        let mut known: Vec<Known> = prompt.iter().map(|(key, _)| self.known(*key)).collect();
        let count_found = |candidate: usize| known.iter().take_while(|known| known.held_by[candidate]).count();
        let num_found = std::array::from_fn(count_found);
        let num_new = known.iter().filter(|known| !known.held_by[LRU]).count();
        for known in &mut known {
            known.is_repeated = !self.take_out(known.node);
        }
        let mut ends = [None; NUM_CANDIDATES];
        for ((key, place), known) in prompt.iter().zip(&known).rev().filter(|(_, known)| !known.is_repeated) {
            let mut held_by = known.held_by;
            for candidate in (0..NUM_CANDIDATES).filter(|candidate| !known.held_by[*candidate]) {
                held_by[candidate] = self.take_slot(candidate, now, num_blocks, &mut ends[candidate]);
            }
            if held_by.contains(&true) {
                let node = known.node.unwrap_or_else(|| self.node_of(*key));
                self.append(node, usize::from(*place), now, held_by);
            }
        }
        (num_found, num_new)
    }

    fn known(&self, key: u64) -> Known {
        let node = self.nodes.get(&key).copied();
        let is_held = |candidate| node.is_some_and(|node| self.is_held(candidate, node));
        Known { node, held_by: std::array::from_fn(is_held), is_repeated: false }
    }

    /// Takes a prompt's node out of its list. False if it is out already: the prompt has its key before.
    fn take_out(&mut self, node: Option<u32>) -> bool {
        let Some(node) = node else { return true };
        if !self.rings.contains(node) {
            return false;
        }
        let next = self.rings.next(node);
        for heads in &mut self.heads {
            let head = &mut heads[usize::from(self.places[node as usize])];
            if *head == node {
                *head = next;
            }
        }
        self.rings.remove(node);
        true
    }

    /// A candidate gets a slot for a key. False if all are taken by later keys of the prompt, which it holds.
    ///
    /// `end`: the place that it evicted from last, and the end of what was evicted. What has the same end there is next,
    /// because the keys that were entered since then end later.
    fn take_slot(&mut self, candidate: usize, now: i64, num_blocks: i64, end: &mut Option<(usize, i64)>) -> bool {
        if self.num_held[candidate] < self.num_slots {
            self.num_held[candidate] += 1;
            return true;
        }
        let end_of = |place: usize| {
            let used_at = self.used_at.get(self.heads[candidate][place] as usize)?;
            Some(used_at + time_of(candidate, place, num_blocks))
        };
        let same = end.filter(|(place, end)| *end < now && end_of(*place) == Some(*end)).map(|(place, _)| place);
        let Some(place) = same.or_else(|| first_to_end(end_of)) else { return false };
        *end = end_of(place).map(|end| (place, end));
        self.pass(candidate, place);
        true
    }

    /// A candidate holds the head of its list at a place no more.
    fn pass(&mut self, candidate: usize, place: usize) {
        let node = self.heads[candidate][place];
        self.heads[candidate][place] = self.rings.next(node);
        if !(0..NUM_CANDIDATES).any(|candidate| self.is_held(candidate, node)) {
            self.rings.remove(node);
            self.nodes.remove(&self.keys[node as usize]);
            self.free.push(node);
        }
    }

    /// A node for a key that has none.
    fn node_of(&mut self, key: u64) -> u32 {
        let node = self.free.pop().expect("there is one for each slot of each shadow");
        self.keys[node as usize] = key;
        self.nodes.insert(key, node);
        node
    }

    /// Puts a node at the end of a list, for the candidates that hold it: the lists of all others are empty.
    fn append(&mut self, node: u32, place: usize, now: i64, held_by: [bool; NUM_CANDIDATES]) {
        let sentinel = self.sentinel(place);
        self.places[node as usize] = place as u8;
        self.used_at[node as usize] = now;
        self.stamps[node as usize] = self.next_stamp;
        self.next_stamp += 1;
        self.rings.append(node, sentinel);
        for (heads, _) in self.heads.iter_mut().zip(held_by).filter(|(_, is_held)| *is_held) {
            if heads[place] == sentinel {
                heads[place] = node;
            }
        }
    }
}

/// A prompt's key as the shadows know it.
struct Known {
    node: Option<u32>,
    held_by: [bool; NUM_CANDIDATES],
    is_repeated: bool,
}

/// Measures the candidates, and says which one to follow. Some 200 kB, whatever the pool's size.
#[derive(Debug, Serialize, Deserialize)]
pub struct Trial {
    pub followed: usize,
    num_blocks: i64,
    unsampled: u64, // bits of a key that are 0 in the sample
    shadows: Shadows,
    gains: [f64; NUM_CANDIDATES],   // hits that each candidate had more than LRU,
    squares: [f64; NUM_CANDIDATES], // the sum of their squares, by prompt,
    lately: [f64; NUM_CANDIDATES],  // and those of the latest prompts
    lru_hits: f64,
}

impl Trial {
    pub fn new(num_blocks: usize) -> Trial {
        let halvings = (num_blocks / SHADOW_BLOCKS).max(1).ilog2();
        let num_slots = num_blocks >> halvings;
        Trial {
            followed: LRU,
            num_blocks: num_blocks as i64,
            unsampled: (1 << halvings) - 1,
            shadows: Shadows::new(num_slots),
            gains: [0.0; NUM_CANDIDATES],
            squares: [0.0; NUM_CANDIDATES],
            lately: [0.0; NUM_CANDIDATES],
            lru_hits: 0.0,
        }
    }

    /// True if the shadows take the block with this key.
    pub fn is_sampled(&self, key: u64) -> bool {
        key & self.unsampled == 0
    }

    /// Hits that LRU had in the sample, faded.
    #[cfg(test)]
    pub fn lru_hits(&self) -> f64 {
        self.lru_hits
    }

    /// The time that the followed candidate keeps what is at a place.
    pub fn time(&self, place: usize) -> i64 {
        time_of(self.followed, place, self.num_blocks)
    }

    /// Enters the sampled keys of a prompt, from its first block on, with their places.
    pub fn enter(&mut self, prompt: &[(u64, u8)], now: i64) {
        if prompt.is_empty() {
            return;
        }
        let (num_found, num_new) = self.shadows.enter(prompt, now, self.num_blocks);
        let lru_hits = num_found[LRU] as f64;
        let num_turned = num_new as f64 + FOUND_WEIGHT * prompt.len() as f64;
        let num_slots = self.shadows.num_slots as f64;
        let fade = 1.0 / (1.0 + num_turned / (FADE_TURNOVERS * num_slots));
        let fade_lately = 1.0 / (1.0 + prompt.len() as f64 / (LATELY_TURNOVERS * num_slots));
        self.lru_hits = self.lru_hits * fade + lru_hits;
        for (candidate, hits) in num_found.into_iter().enumerate() {
            let gain = hits as f64 - lru_hits;
            self.gains[candidate] = self.gains[candidate] * fade + gain;
            self.squares[candidate] = self.squares[candidate] * fade * fade + gain * gain;
            self.lately[candidate] = self.lately[candidate] * fade_lately + gain;
        }
        self.choose();
    }

    /// Leaves a candidate that gains nothing any more, or lost lately; follows one that gains clearly more.
    ///
    /// After a loss it may be followed again as soon as it has made up for that.
    fn choose(&mut self) {
        let followed = self.followed;
        if followed != LRU && self.gains[followed] <= 0.0 {
            (self.gains[followed], self.squares[followed]) = (0.0, 0.0);
            self.followed = LRU;
        }
        if self.lately[followed] < 0.0 {
            self.followed = LRU;
        }
        for candidate in 0..NUM_CANDIDATES {
            let gain = self.gains[candidate];
            if self.lately[candidate] >= 0.0
                && gain > SHOWN_DEVIATIONS * self.squares[candidate].sqrt()
                && gain > LEAST_SHOWN_GAIN * self.lru_hits
                && gain > CLEARLY_BETTER * self.gains[self.followed]
            {
                self.followed = candidate;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::cache::pool::tests::Random;

    const LOW: u8 = 0;
    const HIGH: u8 = 15;

    fn keys(names: impl IntoIterator<Item = u64>, place: u8) -> Vec<(u64, u8)> {
        names.into_iter().map(|name| (name, place)).collect()
    }

    // -- places -------------------------------------------------------------------------------------------------------

    #[test]
    fn uses_and_gaps_raise_the_place() {
        let key = (1..).find(|key: &u64| key.wrapping_mul(MIX) >> 24 & 1 == 1).unwrap();
        let places = |num_uses| [0, 10, 11, 160, 161, 640, 641].map(|gap| place_of(key, num_uses, gap, 160));
        assert_eq!(places(1), [0; 7], "a first use has no gap");
        assert_eq!(places(2), [6, 6, 3, 3, 5, 5, 3]);
        assert_eq!(places(3), [8, 8, 5, 5, 7, 7, 5]);
        assert_eq!(places(4), places(3));
        assert_eq!(places(MOST_USES), [10, 10, 7, 7, 9, 9, 7]);
    }

    #[test]
    fn a_level_has_half_of_the_keys_of_the_one_before() {
        let mut counts = [0; NUM_PLACES];
        (1..=64_000u64).for_each(|key| counts[usize::from(place_of(key << 20, 1, 0, 100))] += 1);
        for (level, count) in counts.iter().enumerate().take(LAST_LEVEL as usize) {
            let expected = 32_000 >> level;
            assert!((expected * 9 / 10..=expected * 11 / 10).contains(count), "{counts:?}");
        }
        assert_eq!((counts[5..].iter().sum::<i32>(), place_of(0, 1, 0, 100)), (counts[5], 0));
    }

    #[test]
    fn no_candidate_keeps_a_higher_place_shorter_and_the_first_keeps_all_equally_long() {
        for candidate in 0..NUM_CANDIDATES {
            let times: Vec<i64> = (0..NUM_PLACES).map(|place| time_of(candidate, place, 100)).collect();
            assert!(times.is_sorted(), "{times:?}");
            assert_eq!(times[0] == times[NUM_PLACES - 1], candidate == LRU);
        }
    }

    // -- shadows ------------------------------------------------------------------------------------------------------

    /// Prompts that go on after one of the keys 10, 20 ... for some keys.
    fn prompts(seed: u64) -> impl Iterator<Item = Vec<(u64, u8)>> {
        let mut random = Random(seed);
        (0..400).map(move |_| {
            let (first, length) = (10 * random.below(9) as u64, 1 + random.below(6) as u64);
            keys(first..first + length, random.below(NUM_PLACES) as u8)
        })
    }

    /// One candidate's cache of keys as the module's text describes it, by searching.
    struct Model {
        candidate: usize,
        uses: Vec<(u64, u8, i64)>, // key, place, used at; the latest last
    }

    impl Model {
        fn enter(&mut self, prompt: &[(u64, u8)], now: i64, num_slots: usize) -> (usize, usize) {
            let is_known = |key: &u64| self.uses.iter().any(|(known, ..)| known == key);
            let num_found = prompt.iter().take_while(|(key, _)| is_known(key)).count();
            let num_new = prompt.iter().filter(|(key, _)| !is_known(key)).count();
            let is_known: Vec<bool> = prompt.iter().map(|(key, _)| is_known(key)).collect();
            self.uses.retain(|(key, ..)| prompt.iter().all(|(other, _)| other != key));
            for (at, (key, place)) in prompt.iter().enumerate().rev() {
                let num_kept = is_known[..at].iter().filter(|known| **known).count();
                if !is_known[at] && self.uses.len() + num_kept >= num_slots {
                    let end =
                        |(_, place, used_at): &(u64, u8, i64)| used_at + time_of(self.candidate, (*place).into(), 20);
                    let ends = (0..self.uses.len()).min_by_key(|at| (end(&self.uses[*at]), self.uses[*at].1));
                    let Some(first) = ends else { continue };
                    self.uses.remove(first);
                }
                self.uses.push((*key, *place, now));
            }
            (num_found, num_new)
        }
    }

    impl Shadows {
        /// The keys that a candidate's shadow holds.
        fn held(&self, candidate: usize) -> BTreeSet<u64> {
            let held = self.nodes.iter().filter(|(_, node)| self.is_held(candidate, **node));
            let keys: BTreeSet<u64> = held.map(|(key, _)| *key).collect();
            assert!(keys.len() <= self.num_held[candidate] && self.num_held[candidate] <= self.num_slots);
            keys
        }
    }

    #[test]
    fn each_shadow_is_a_cache_in_its_candidates_order() {
        let (mut num_evicted, mut num_apart) = (0, 0);
        for (seed, num_slots) in (0..12).zip([1, 3, 20].into_iter().cycle()) {
            let mut shadows = Shadows::new(num_slots);
            let mut models: Vec<Model> =
                (0..NUM_CANDIDATES).map(|candidate| Model { candidate, uses: Vec::new() }).collect();
            for (number, prompt) in prompts(seed).enumerate() {
                let now = 3 * number as i64 / 4;
                let (found, num_new) = shadows.enter(&prompt, now, 20);
                let told: Vec<_> = models.iter_mut().map(|model| model.enter(&prompt, now, num_slots)).collect();
                assert_eq!((found.to_vec(), num_new), (told.iter().map(|told| told.0).collect(), told[LRU].1));
                let held: Vec<_> = (0..NUM_CANDIDATES).map(|candidate| shadows.held(candidate)).collect();
                assert!(held.iter().map(BTreeSet::len).eq(shadows.num_held));
                for (model, held) in models.iter().zip(&held) {
                    assert_eq!(model.uses.iter().map(|(key, ..)| *key).collect::<BTreeSet<_>>(), *held);
                }
                let all: BTreeSet<u64> = held.iter().flatten().copied().collect();
                assert_eq!(shadows.nodes.keys().copied().collect::<BTreeSet<_>>(), all, "what nobody holds is gone");
                num_evicted += usize::from(held[LRU].len() == num_slots);
                num_apart += usize::from(held[LRU] != held[NUM_CANDIDATES - 1]);
            }
        }
        assert!(num_evicted > 1000 && num_apart > 1000, "it gets somewhere: {num_evicted} {num_apart}");
    }

    #[test]
    fn a_shadow_keeps_what_is_at_a_high_place() {
        let mut shadows = Shadows::new(8);
        shadows.enter(&keys(1..5, HIGH), 0, 8);
        for number in 1..20 {
            assert_eq!(shadows.enter(&keys(100 * number..100 * number + 3, LOW), 9, 8).1, 3);
        }
        assert_eq!(shadows.enter(&keys(1..5, HIGH), 30, 8), ([0, 4, 4, 4], 4));
    }

    #[test]
    fn a_prompt_that_is_longer_than_a_shadow_fills_it() {
        let mut shadows = Shadows::new(4);
        shadows.enter(&keys(1..4, LOW), 0, 4);
        assert_eq!(shadows.enter(&keys(1..9, LOW), 1, 4), ([3; NUM_CANDIDATES], 5));
        assert_eq!(shadows.enter(&keys(1..9, LOW), 2, 4), ([4; NUM_CANDIDATES], 4));
        assert_eq!((shadows.held(LRU), shadows.free.len()), ((1..5).collect(), 12));
        assert_eq!(shadows.enter(&keys(1..6, LOW), 3, 4), ([4; NUM_CANDIDATES], 1));
        assert_eq!(shadows.held(LRU), (1..5).collect(), "no slot is left for the last key");
    }

    #[test]
    fn equal_keys_of_a_prompt_do_no_harm() {
        let mut shadows = Shadows::new(4);
        shadows.enter(&keys([1, 7], LOW), 0, 4);
        (1..9).for_each(|now| _ = shadows.enter(&keys([7, 1, 7, 7], LOW), now, 4));
        assert_eq!((shadows.held(LRU), shadows.held(1), shadows.free.len()), ([1, 7].into(), [1, 7].into(), 14));
        for now in 9..99 {
            shadows.enter(&keys([now, now, 7, now], LOW), now as i64, 4); // not known, and equal
            let num_nodes = (0..16).filter(|node| shadows.rings.contains(*node)).count();
            assert_eq!((num_nodes + shadows.free.len(), shadows.num_held), (16, [4; NUM_CANDIDATES]));
        }
    }

    #[test]
    fn hits_after_the_first_missing_block_do_not_count() {
        let mut shadows = Shadows::new(8);
        shadows.enter(&keys([2, 3], LOW), 0, 8);
        assert_eq!(shadows.enter(&keys([1, 2, 3], LOW), 1, 8), ([0; NUM_CANDIDATES], 1));
    }

    // -- the choice ---------------------------------------------------------------------------------------------------

    #[test]
    fn shadows_have_the_pools_share_of_the_sample() {
        for (num_blocks, num_slots, unsampled) in
            [(1, 1, 0), (60, 60, 0), (1023, 1023, 0), (1024, 512, 1), (3000, 750, 3), (1 << 20, 512, 2047)]
        {
            let trial = Trial::new(num_blocks);
            assert_eq!((trial.shadows.num_slots, trial.unsampled), (num_slots, unsampled), "{num_blocks}");
            assert!(trial.is_sampled(unsampled + 1) && (unsampled == 0 || !trial.is_sampled(unsampled)));
        }
    }

    /// A stream of 30 keys in a loop, of which those at high places fit.
    fn run_loop(trial: &mut Trial, rounds: std::ops::Range<i64>) {
        for now in 30 * rounds.start..30 * rounds.end {
            let key = now as u64 % 30;
            trial.enter(&[(key, if key < 10 { HIGH } else { LOW })], now);
        }
    }

    #[test]
    fn a_candidate_that_finds_more_is_followed_and_left_when_it_finds_no_more() {
        let mut trial = Trial::new(20);
        run_loop(&mut trial, 0..1);
        assert_eq!(trial.followed, LRU);
        run_loop(&mut trial, 1..20);
        assert!(trial.followed != LRU && trial.lru_hits == 0.0, "{trial:?}");
        for now in 600..900 {
            trial.enter(&[(100 + now as u64 % 15, LOW)], now);
        }
        assert!(trial.followed == LRU && trial.lru_hits > 0.0, "{trial:?}");
    }

    #[test]
    fn a_candidate_has_to_show_a_gain_before_it_is_followed() {
        let cases: [(f64, f64, f64, usize); 5] = [
            (10.0, 1.0, 100.0, 1),
            (1.9, 1.0, 10.0, LRU),   // less than 2 deviations
            (10.0, 1.0, 501.0, LRU), // less than 2 % of LRU's hits
            (0.0, 0.0, 0.0, LRU),
            (-5.0, 1.0, 10.0, LRU),
        ];
        for (gain, square, lru_hits, followed) in cases {
            let mut trial = Trial::new(20);
            (trial.gains[1], trial.squares[1], trial.lru_hits) = (gain, square, lru_hits);
            trial.choose();
            assert_eq!(trial.followed, followed, "{gain}, {square}, {lru_hits}");
        }
    }

    #[test]
    fn what_lost_lately_is_not_followed_and_is_again_once_it_has_made_up_for_that() {
        let mut trial = Trial::new(20);
        (trial.followed, trial.gains[1], trial.squares[1], trial.lru_hits) = (1, 10.0, 1.0, 100.0);
        for (lately, followed) in [(0.0, 1), (-0.1, LRU), (0.1, 1)] {
            trial.lately[1] = lately;
            trial.choose();
            assert_eq!((trial.followed, trial.gains[1]), (followed, 10.0));
        }
        (trial.gains[2], trial.lately[1]) = (9.0, -0.1);
        trial.choose();
        assert_eq!(trial.followed, 2, "the next best is followed meanwhile");
    }

    #[test]
    fn another_candidate_is_followed_only_if_it_is_clearly_better() {
        for (gain, followed) in [(10.9, 1), (11.1, 2)] {
            let mut trial = Trial::new(20);
            (trial.followed, trial.gains) = (1, [0.0, 10.0, gain, 0.0]);
            trial.choose();
            assert_eq!(trial.followed, followed);
        }
    }

    #[test]
    fn what_is_left_has_to_show_its_gain_anew() {
        let mut trial = Trial::new(20);
        (trial.followed, trial.gains, trial.squares) = (2, [0.0, 0.0, -3.0, 0.0], [0.0, 0.0, 9.0, 0.0]);
        trial.choose();
        assert_eq!((trial.followed, trial.gains[2], trial.squares[2]), (LRU, 0.0, 0.0));
    }

    #[test]
    fn old_hits_fade_with_the_blocks_that_are_new() {
        let mut trial = Trial::new(20);
        trial.lru_hits = 1.0;
        trial.lately[1] = 1.0;
        (0..10).for_each(|key| trial.enter(&[(key, LOW)], key as i64));
        assert!((0.3..0.4).contains(&trial.lately[1]), "{}", trial.lately[1]);
        (10..240).for_each(|key| trial.enter(&[(key, LOW)], key as i64));
        assert!((0.3..0.4).contains(&trial.lru_hits), "{}", trial.lru_hits);
    }
}
