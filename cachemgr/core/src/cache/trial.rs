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

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::cache::rings::Rings;

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

/// The place of the ring with the head that ends first: used at, and its place's time. `sentinel` is that of place 0.
///
/// Of equal ends it is the lowest place, which is the child's if one is.
pub fn first_to_end(
    rings: &Rings,
    sentinel: u32,
    used_at: impl Fn(u32) -> i64,
    time: impl Fn(usize) -> i64,
) -> Option<usize> {
    let head = |place: usize| rings.first(sentinel + place as u32);
    let places = (0..NUM_PLACES).filter(|place| head(*place) != sentinel + *place as u32);
    places.min_by_key(|place| used_at(head(*place)) + time(*place))
}

/// A cache of keys in the order of one candidate.
#[derive(Debug, Serialize, Deserialize)]
struct Shadow {
    candidate: usize,
    rings: Rings, // of slots, one per place; the last nodes are their sentinels
    slots: BTreeMap<u64, u32>,
    keys: Vec<u64>, // by slot
    used_at: Vec<i64>,
    free: Vec<u32>,
}

impl Shadow {
    fn new(candidate: usize, num_slots: usize) -> Shadow {
        Shadow {
            candidate,
            rings: Rings::new(num_slots + NUM_PLACES),
            slots: BTreeMap::new(),
            keys: vec![0; num_slots],
            used_at: vec![0; num_slots],
            free: (0..num_slots as u32).rev().collect(),
        }
    }

    fn sentinel(&self) -> u32 {
        self.keys.len() as u32
    }

    /// Enters a prompt's keys with their places. Returns how many are found from the beginning on, and how many are new.
    fn enter(&mut self, prompt: &[(u64, u8)], now: i64, num_blocks: i64) -> (usize, usize) {
        let known: Vec<Option<u32>> = prompt.iter().map(|(key, _)| self.slots.get(key).copied()).collect();
        known.iter().flatten().for_each(|slot| self.rings.remove(*slot));
        for ((key, place), slot) in prompt.iter().zip(&known).rev() {
            if let Some(slot) = slot.or_else(|| self.take(*key, num_blocks)) {
                self.used_at[slot as usize] = now;
                self.rings.append(slot, self.sentinel() + u32::from(*place));
            }
        }
        let num_found = known.iter().take_while(|slot| slot.is_some()).count();
        (num_found, known.iter().filter(|slot| slot.is_none()).count())
    }

    /// A slot for a key: a free one, or that of the first to end. None if this prompt has all.
    fn take(&mut self, key: u64, num_blocks: i64) -> Option<u32> {
        let slot = self.free.pop().or_else(|| self.evict(num_blocks))?;
        self.keys[slot as usize] = key;
        self.slots.insert(key, slot);
        Some(slot)
    }

    fn evict(&mut self, num_blocks: i64) -> Option<u32> {
        let time = |place| time_of(self.candidate, place, num_blocks);
        let place = first_to_end(&self.rings, self.sentinel(), |slot| self.used_at[slot as usize], time)?;
        let slot = self.rings.first(self.sentinel() + place as u32);
        self.rings.remove(slot);
        self.slots.remove(&self.keys[slot as usize]);
        Some(slot)
    }
}

/// Measures the candidates, and says which one to follow. Some 200 kB, whatever the pool's size.
#[derive(Debug, Serialize, Deserialize)]
pub struct Trial {
    pub followed: usize,
    num_blocks: i64,
    unsampled: u64, // bits of a key that are 0 in the sample
    shadows: Vec<Shadow>,
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
            shadows: (0..NUM_CANDIDATES).map(|candidate| Shadow::new(candidate, num_slots)).collect(),
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
        let results: Vec<(usize, usize)> =
            self.shadows.iter_mut().map(|shadow| shadow.enter(prompt, now, self.num_blocks)).collect();
        let (lru_hits, num_new) = results[LRU];
        let num_turned = num_new as f64 + FOUND_WEIGHT * prompt.len() as f64;
        let num_slots = self.shadows[LRU].keys.len() as f64;
        let fade = 1.0 / (1.0 + num_turned / (FADE_TURNOVERS * num_slots));
        let fade_lately = 1.0 / (1.0 + prompt.len() as f64 / (LATELY_TURNOVERS * num_slots));
        self.lru_hits = self.lru_hits * fade + lru_hits as f64;
        for (candidate, (hits, _)) in results.iter().enumerate() {
            let gain = *hits as f64 - lru_hits as f64;
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

    #[test]
    fn the_first_shadow_finds_what_a_list_in_lru_order_finds() {
        for seed in 0..4 {
            let (mut shadow, mut list) = (Shadow::new(LRU, 20), Vec::<u64>::new());
            for (now, prompt) in prompts(seed).enumerate() {
                let known: Vec<bool> = prompt.iter().map(|(key, _)| list.contains(key)).collect();
                let num_found = known.iter().take_while(|known| **known).count();
                let num_new = known.iter().filter(|known| !**known).count();
                assert_eq!(shadow.enter(&prompt, now as i64, 20), (num_found, num_new));
                list.retain(|key| !prompt.iter().any(|(other, _)| other == key));
                list.drain(..(list.len() + prompt.len()).saturating_sub(20));
                list.extend(prompt.iter().rev().map(|(key, _)| key));
            }
        }
    }

    #[test]
    fn a_shadow_keeps_what_is_at_a_high_place() {
        let mut shadow = Shadow::new(NUM_CANDIDATES - 1, 8);
        shadow.enter(&keys(1..5, HIGH), 0, 8);
        (1..20).for_each(|number| assert_eq!(shadow.enter(&keys(100 * number..100 * number + 3, LOW), 9, 8).1, 3));
        assert_eq!(shadow.enter(&keys(1..5, HIGH), 30, 8), (4, 0));
        let mut lru = Shadow::new(LRU, 8);
        lru.enter(&keys(1..5, HIGH), 0, 8);
        for number in 1..20 {
            lru.enter(&keys(100 * number..100 * number + 3, LOW), 9, 8);
        }
        assert_eq!(lru.enter(&keys(1..5, HIGH), 30, 8), (0, 4));
    }

    #[test]
    fn a_prompt_that_is_longer_than_a_shadow_fills_it() {
        let mut shadow = Shadow::new(LRU, 4);
        shadow.enter(&keys(1..4, LOW), 0, 4);
        assert_eq!(shadow.enter(&keys(1..9, LOW), 1, 4), (3, 5));
        assert_eq!(shadow.enter(&keys(1..9, LOW), 2, 4).0, 4);
        assert_eq!(shadow.slots.len(), 4);
    }

    #[test]
    fn hits_after_the_first_missing_block_do_not_count() {
        let mut shadow = Shadow::new(LRU, 8);
        shadow.enter(&keys([2, 3], LOW), 0, 8);
        assert_eq!(shadow.enter(&keys([1, 2, 3], LOW), 1, 8), (0, 1));
    }

    // -- the choice ---------------------------------------------------------------------------------------------------

    #[test]
    fn shadows_have_the_pools_share_of_the_sample() {
        for (num_blocks, num_slots, unsampled) in
            [(1, 1, 0), (60, 60, 0), (1023, 1023, 0), (1024, 512, 1), (3000, 750, 3), (1 << 20, 512, 2047)]
        {
            let trial = Trial::new(num_blocks);
            assert_eq!((trial.shadows[LRU].keys.len(), trial.unsampled), (num_slots, unsampled), "{num_blocks}");
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
