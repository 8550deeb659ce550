//! The retention time of each class of prefix, learned from the gaps between uses.
//!
//! Keeping a class for a time T brings F(T) hits per block and takes B(T) = integral of 1 - F block-times. The best T
//! for each class, if everything has to fit in the pool, is a fractional knapsack over the concave hulls of (B, F):
//! take the steepest pieces until the pool is full. The last piece is taken for a fraction of the segments.
//!
//! Time is counted in blocks that were allocated.

use serde::{Deserialize, Serialize};

pub const NUM_TIMES: usize = 10;

/// The place of T = the pool's blocks among the times 0, 1/16, 1/8 ... 16 pools: the time of every class under LRU.
pub const BASE_TIME: usize = 5;

pub const NUM_CLASSES: usize = 19;
pub const MOST_USES: u8 = 5;
const FIRST_REUSED_CLASS: usize = 4;
const SMALL_SEGMENT: usize = 8; // blocks

/// Events of the mean class that each class starts with.
const PRIOR_EVENTS: f64 = 8.0;

/// The factor of all counts from plan to plan.
const FADE: f64 = 0.97;

/// The factor for a plan's measured gain: smaller, so that a bad plan is dropped soon.
const TRIAL_FADE: f64 = 0.9;

// Admissions from plan to plan: the most, unless before that POOL_SHARE_OF_PERIOD of the pool's blocks were allocated.
const LEAST_PERIOD: usize = 32;
const MOST_PERIOD: usize = 128;
const POOL_SHARE_OF_PERIOD: f64 = 1.0 / 16.0;

const SHOWN_DEVIATIONS: f64 = 1.5;
const LEAST_PREDICTED_GAIN: f64 = 1.03;
const LEAST_SHOWN_GAIN: f64 = 0.02;
const REMEMBERED_ADMISSIONS: usize = 1000;

/// The class of a segment's first use.
pub fn class_of_new(num_blocks: usize, continues: bool) -> usize {
    2 * usize::from(continues) + usize::from(num_blocks > SMALL_SEGMENT)
}

/// The class of a later use: the second, third to fourth, or beyond; and the last gap.
pub fn class_of_reused(num_uses: u8, gap_place: usize) -> usize {
    FIRST_REUSED_CLASS + 5 * (usize::from(num_uses > 2) + usize::from(num_uses >= MOST_USES)) + (gap_place / 2).min(4)
}

/// The time that a class is kept: `low`, or `high` for `share` of its segments. Places in the list of times.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Choice {
    pub low: usize,
    pub high: usize,
    pub share: f64,
}

/// A class: events per block of time, and for each T the hits F and the block-times B that an event brings.
#[derive(Debug, Clone)]
struct Curve {
    rate: f64,
    hits: [f64; NUM_TIMES],
    held: [f64; NUM_TIMES],
}

/// A step up a class's hull: hits per block-time, the class, the place it leads to, the blocks it takes.
struct Piece {
    density: f64,
    class: usize,
    place: usize,
    num_blocks: f64,
}

/// A use of a segment that was used before.
pub struct Return {
    pub class: usize,
    pub gap: i64,
    /// Blocks that were wanted again.
    pub weight: i64,
    /// Of them, those that were still cached.
    pub found: i64,
    /// The place of the time that the plan had for it, if there was a plan.
    pub planned: Option<u8>,
}

/// Learns from the gaps how long each class is worth keeping. A plan's cost does not depend on the pool's size.
#[derive(Debug, Serialize, Deserialize)]
pub struct RetentionPlanner {
    pub is_trusted: bool,
    pub plan: Option<Vec<Choice>>,
    num_blocks: i64,
    times: [f64; NUM_TIMES],
    pub(crate) returned: [[f64; NUM_TIMES + 1]; NUM_CLASSES], // blocks by class and place of the gap
    pub(crate) used: [f64; NUM_CLASSES],                      // blocks by class, when used
    elapsed: f64,                                             // blocks allocated meanwhile
    evicted: f64,
    parked_evicted: f64, // sum over evicted blocks of how many were parked
    lru_time: f64,
    lru_hits: f64,     // since there is a plan: blocks that LRU would have kept,
    gain: f64,         // what the plan would have kept more,
    gain_squares: f64, // and the sum of that squared, by admission
    admission_gain: i64,
    num_admissions: usize,
    since_plan: usize,
    last_clock: i64,
}

impl RetentionPlanner {
    pub fn new(num_blocks: usize) -> RetentionPlanner {
        let mut times = [0.0; NUM_TIMES];
        for (place, time) in times.iter_mut().enumerate().skip(1) {
            *time = num_blocks as f64 * 2f64.powi(place as i32 - BASE_TIME as i32);
        }
        RetentionPlanner {
            is_trusted: false,
            plan: None,
            num_blocks: num_blocks as i64,
            times,
            returned: [[0.0; NUM_TIMES + 1]; NUM_CLASSES],
            used: [0.0; NUM_CLASSES],
            elapsed: 0.0,
            evicted: 0.0,
            parked_evicted: 0.0,
            lru_time: num_blocks as f64,
            lru_hits: 0.0,
            gain: 0.0,
            gain_squares: 0.0,
            admission_gain: 0,
            num_admissions: 0,
            since_plan: 0,
            last_clock: 0,
        }
    }

    /// The time at a place, in blocks.
    pub fn time(&self, place: usize) -> f64 {
        self.times[place]
    }

    /// The first of the times that is as long as the gap; NUM_TIMES if none is.
    pub fn place(&self, gap: i64) -> usize {
        if gap <= 0 {
            return 0;
        }
        let sixteenths = ((gap * 16 - 1) / self.num_blocks) as u64;
        NUM_TIMES.min((u64::BITS - sixteenths.leading_zeros()) as usize + 1)
    }

    /// A segment of `weight` blocks was used.
    pub fn enter_use(&mut self, class: usize, weight: i64) {
        self.used[class] += weight as f64;
    }

    /// Enters a repeated use. Returns the place of the gap.
    ///
    /// A plan in use is judged by the hits that it had, another one by the hits that it predicted.
    pub fn enter_return(&mut self, event: &Return) -> usize {
        let place = self.place(event.gap);
        self.returned[event.class][place] += event.weight as f64;
        if let Some(planned) = event.planned {
            let lru_hits = if event.gap as f64 <= self.lru_time { event.weight } else { 0 };
            self.lru_hits += lru_hits as f64;
            let promised = if place <= planned.into() { event.weight } else { 0 };
            self.admission_gain += if self.is_trusted { event.found } else { promised } - lru_hits;
        }
        place
    }

    /// `count` blocks were evicted, `num_parked` stay.
    pub fn enter_eviction(&mut self, count: usize, num_parked: usize) {
        self.evicted += count as f64;
        self.parked_evicted += count as f64 * num_parked as f64;
    }

    /// Closes the books of an admission; makes a new plan when it is time to.
    pub fn end_admission(&mut self, clock: i64) {
        let gain = std::mem::take(&mut self.admission_gain) as f64;
        self.gain += gain;
        self.gain_squares += gain * gain;
        self.num_admissions += 1;
        self.since_plan += 1;
        let elapsed = (clock - self.last_clock) as f64;
        let is_busy = elapsed >= self.num_blocks as f64 * POOL_SHARE_OF_PERIOD;
        if self.since_plan < if is_busy { LEAST_PERIOD } else { MOST_PERIOD } {
            return;
        }
        self.since_plan = 0;
        self.last_clock = clock;
        self.elapsed += elapsed;
        if self.elapsed >= self.num_blocks as f64 / 2.0 {
            self.make_plan();
        } else {
            self.is_trusted = false;
        }
        self.fade();
    }

    fn make_plan(&mut self) {
        let has_evicted = self.evicted > 0.0;
        let room = if has_evicted { self.parked_evicted / self.evicted } else { self.num_blocks as f64 };
        let curves = self.curves();
        let plan = plan_retention(&curves, room);
        let planned: f64 = curves.iter().zip(&plan).map(|(curve, choice)| planned_hits(curve, choice)).sum();
        let lru_hits;
        (lru_hits, self.lru_time) = hits_of_one_time(&curves, &self.times, room);
        self.plan = Some(plan);
        self.is_trusted = planned >= LEAST_PREDICTED_GAIN * lru_hits
            && self.gain > SHOWN_DEVIATIONS * self.gain_squares.sqrt()
            && self.gain >= LEAST_SHOWN_GAIN * self.lru_hits;
    }

    /// Each class's gaps, drawn towards the mean of all classes by PRIOR_EVENTS events of mean size.
    fn curves(&self) -> Vec<Curve> {
        let total: f64 = self.used.iter().sum();
        let mean = |place: usize| self.returned.iter().map(|returned| returned[place]).sum::<f64>() / total;
        let means: Vec<f64> = (0..NUM_TIMES).map(mean).collect();
        let prior = PRIOR_EVENTS * total / self.num_admissions.min(REMEMBERED_ADMISSIONS) as f64;
        let curve = |(used, returned): (&f64, &[f64; NUM_TIMES + 1])| {
            let mut curve = Curve { rate: used / self.elapsed, hits: [0.0; NUM_TIMES], held: [0.0; NUM_TIMES] };
            let (mut hits, mut held) = (0.0, 0.0);
            for place in 0..NUM_TIMES {
                let more = f64::min(1.0, hits + (returned[place] + prior * means[place]) / (used + prior));
                if place > 0 {
                    held += (self.times[place] - self.times[place - 1]) * (1.0 - (hits + more) / 2.0);
                }
                hits = more;
                (curve.hits[place], curve.held[place]) = (hits, held);
            }
            curve
        };
        self.used.iter().zip(&self.returned).map(curve).collect()
    }

    fn fade(&mut self) {
        self.used.iter_mut().for_each(|weight| *weight *= FADE);
        self.returned.iter_mut().flatten().for_each(|weight| *weight *= FADE);
        self.elapsed *= FADE;
        self.evicted *= FADE;
        self.parked_evicted *= FADE;
        self.lru_hits *= TRIAL_FADE;
        self.gain *= TRIAL_FADE;
        self.gain_squares *= TRIAL_FADE * TRIAL_FADE;
    }
}

/// Places of the times that the concave hull of (held, hits) goes through, from the first on.
fn hull(curve: &Curve) -> Vec<usize> {
    let Curve { hits, held, .. } = curve;
    let mut places: Vec<usize> = Vec::new();
    for place in 0..NUM_TIMES {
        while let [.., a, b] = places[..] {
            let (rise, run) = (hits[b] - hits[a], held[b] - held[a]);
            if (hits[place] - hits[b]) * run < rise * (held[place] - held[b]) {
                break;
            }
            places.pop();
        }
        if let [only] = places[..]
            && held[place] <= held[only]
        {
            places.pop();
        }
        places.push(place);
    }
    places
}

/// The times that bring most hits, if `room` blocks can be kept.
fn plan_retention(curves: &[Curve], mut room: f64) -> Vec<Choice> {
    let (mut plan, mut pieces) = (Vec::new(), Vec::new());
    for (class, curve) in curves.iter().enumerate() {
        let places = hull(curve);
        plan.push(Choice { low: places[0], high: places[0], share: 0.0 });
        for pair in places.windows(2) {
            let (low, high) = (pair[0], pair[1]);
            let (hits, held) = (curve.hits[high] - curve.hits[low], curve.held[high] - curve.held[low]);
            if hits > 0.0 {
                pieces.push(Piece { density: hits / held, class, place: high, num_blocks: curve.rate * held });
            }
        }
    }
    pieces.sort_by(|a, b| b.density.total_cmp(&a.density).then((a.class, a.place).cmp(&(b.class, b.place))));
    for piece in pieces {
        let kept = plan[piece.class].low;
        if piece.num_blocks > room {
            plan[piece.class] = Choice { low: kept, high: piece.place, share: room / piece.num_blocks };
            break;
        }
        plan[piece.class] = Choice { low: piece.place, high: piece.place, share: 0.0 };
        room -= piece.num_blocks;
    }
    plan
}

/// Hits per block of time that a choice brings.
fn planned_hits(curve: &Curve, choice: &Choice) -> f64 {
    curve.rate * ((1.0 - choice.share) * curve.hits[choice.low] + choice.share * curve.hits[choice.high])
}

/// Hits per block of time if all classes are kept equally long, as under LRU, and how long that is.
fn hits_of_one_time(curves: &[Curve], times: &[f64; NUM_TIMES], room: f64) -> (f64, f64) {
    let (mut last_hits, mut last_held) = (0.0, 0.0);
    for (place, time) in times.iter().enumerate() {
        let hits: f64 = curves.iter().map(|curve| curve.rate * curve.hits[place]).sum();
        let held: f64 = curves.iter().map(|curve| curve.rate * curve.held[place]).sum();
        if held >= room && place > 0 {
            let share = (room - last_held) / (held - last_held);
            return (last_hits + (hits - last_hits) * share, times[place - 1] + (time - times[place - 1]) * share);
        }
        (last_hits, last_held) = (hits, held);
    }
    (last_hits, times[NUM_TIMES - 1])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::pool::tests::Random;

    const NUM_BLOCKS: usize = 100;

    fn planner() -> RetentionPlanner {
        RetentionPlanner::new(NUM_BLOCKS)
    }

    /// One of the values from 0 to 1.
    fn share(random: &mut Random) -> f64 {
        random.below(1 << 20) as f64 / f64::from(1 << 20)
    }

    /// Hits that rise with the time, and their cost: as of some distribution of gaps.
    fn curve(random: &mut Random, times: &[f64; NUM_TIMES]) -> Curve {
        let mut curve = Curve { rate: share(random), hits: [0.0; NUM_TIMES], held: [0.0; NUM_TIMES] };
        let most = share(random) * 1.5; // beyond 1: nothing is left to hit from some time on
        let mut gaps = times.map(|_| if random.below(3) == 0 { 0.0 } else { share(random) });
        let total: f64 = gaps.iter().sum();
        gaps.iter_mut().for_each(|gap| *gap *= most / total.max(1.0));
        curve.hits[0] = gaps[0].min(1.0);
        for place in 1..NUM_TIMES {
            curve.hits[place] = (curve.hits[place - 1] + gaps[place]).min(1.0);
            let left = 1.0 - (curve.hits[place - 1] + curve.hits[place]) / 2.0;
            curve.held[place] = curve.held[place - 1] + (times[place] - times[place - 1]) * left;
        }
        curve
    }

    fn curves(random: &mut Random) -> Vec<Curve> {
        let times = planner().times;
        (0..1 + random.below(4)).map(|_| curve(random, &times)).collect()
    }

    fn assert_close(left: f64, right: f64, what: &str) {
        assert!((left - right).abs() <= 1e-9 * left.abs().max(right.abs()).max(1.0), "{what}: {left} and {right}");
    }

    // -- times and classes --------------------------------------------------------------------------------------------

    #[test]
    fn a_gap_is_placed_at_the_first_time_that_is_long_enough() {
        let gaps = [-1, 0, 1, 10, 11, 20, 21, 160, 161, 2560, 2561];
        let places = gaps.map(|gap| RetentionPlanner::new(160).place(gap));
        assert_eq!(places, [0, 0, 1, 1, 2, 2, 3, BASE_TIME, BASE_TIME + 1, NUM_TIMES - 1, NUM_TIMES]);
        for num_blocks in [1, 3, 100, 160] {
            let planner = RetentionPlanner::new(num_blocks);
            for gap in 0..20 * num_blocks as i64 {
                let first = (0..NUM_TIMES).find(|place| planner.time(*place) >= gap as f64);
                assert_eq!(planner.place(gap), first.unwrap_or(NUM_TIMES), "{gap} of {num_blocks}");
            }
        }
        assert_eq!((planner().time(0), planner().time(BASE_TIME)), (0.0, NUM_BLOCKS as f64));
    }

    #[test]
    fn uses_fall_into_classes() {
        let new = [(1, false), (8, false), (9, false), (8, true), (9, true)];
        assert_eq!(new.map(|(num_blocks, continues)| class_of_new(num_blocks, continues)), [0, 0, 1, 2, 3]);
        assert_eq!([2, 3, 4, 5].map(|num_uses| class_of_reused(num_uses, 0)), [4, 9, 9, 14]);
        let by_gap = [0, 1, 2, 3, 7, 8, 9, NUM_TIMES].map(|place| class_of_reused(2, place));
        assert_eq!(by_gap, [4, 4, 5, 5, 7, 8, 8, 8]);
        assert_eq!(class_of_reused(MOST_USES, NUM_TIMES), NUM_CLASSES - 1);
    }

    // -- the plan -----------------------------------------------------------------------------------------------------

    #[test]
    fn the_hull_leaves_out_times_that_bring_less_than_their_neighbours() {
        let hits = [0.0, 0.1, 0.8, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9];
        let held = [0.0, 1.0, 2.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0];
        assert_eq!(hull(&Curve { rate: 1.0, hits, held }), [0, 2, 3, 9]);
        assert_eq!(hull(&Curve { rate: 1.0, hits: [1.0; NUM_TIMES], held: [0.0; NUM_TIMES] }), [NUM_TIMES - 1]);
    }

    #[test]
    fn no_time_brings_more_than_the_hull() {
        let (mut random, times) = (Random(1), planner().times);
        for _ in 0..300 {
            let curve = curve(&mut random, &times);
            let places = hull(&curve);
            let slope = |low: usize, high: usize| {
                (curve.hits[high] - curve.hits[low]) / (curve.held[high] - curve.held[low]).max(f64::MIN_POSITIVE)
            };
            assert!(places.windows(3).all(|three| slope(three[0], three[1]) > slope(three[1], three[2])));
            for pair in places.windows(2) {
                for place in pair[0]..pair[1] {
                    let most =
                        curve.hits[pair[0]] + slope(pair[0], pair[1]) * (curve.held[place] - curve.held[pair[0]]);
                    assert!(curve.hits[place] <= most + 1e-9);
                }
            }
            assert_eq!((curve.held[places[0]], places.last()), (0.0, Some(&(NUM_TIMES - 1))));
        }
    }

    #[test]
    fn room_goes_to_the_densest_class_first_and_the_rest_in_part() {
        let curve = |hits, held: f64| {
            let times = [0., 1., 1., 1., 1., 1., 1., 1., 1., 1.];
            Curve { rate: 1.0, hits: times.map(|time| time * hits), held: times.map(|time| time * held) }
        };
        let (dense, sparse) = (curve(0.9, 4.0), curve(0.5, 8.0));
        let last = NUM_TIMES - 1;
        let plan = plan_retention(&[sparse, dense], 6.0);
        assert_eq!(plan[1], Choice { low: last, high: last, share: 0.0 });
        assert_eq!(plan[0], Choice { low: 0, high: last, share: 0.25 });
    }

    /// The limit of any plan's hits: the least, over all prices of a block, of the gain at that price.
    fn most_hits(curves: &[Curve], room: f64) -> f64 {
        let mut prices = vec![0.0];
        for Curve { hits, held, .. } in curves {
            for (low, high) in (0..NUM_TIMES).flat_map(|high| (0..high).map(move |low| (low, high))) {
                if held[high] > held[low] {
                    prices.push((hits[high] - hits[low]) / (held[high] - held[low]));
                }
            }
        }
        let gain = |curve: &Curve, price: f64| {
            let gains = (0..NUM_TIMES).map(|place| curve.hits[place] - price * curve.held[place]);
            curve.rate * gains.fold(f64::NEG_INFINITY, f64::max)
        };
        let total = |price: &f64| price * room + curves.iter().map(|curve| gain(curve, *price)).sum::<f64>();
        prices.iter().map(total).fold(f64::INFINITY, f64::min)
    }

    #[test]
    fn no_plan_brings_more_hits() {
        let mut random = Random(2);
        for _ in 0..300 {
            let (curves, room) = (curves(&mut random), share(&mut random) * 1000.0);
            let plan = plan_retention(&curves, room);
            let pairs = || curves.iter().zip(&plan);
            let hits: f64 = pairs().map(|(curve, choice)| planned_hits(curve, choice)).sum();
            assert_close(hits, most_hits(&curves, room), "hits");
            let held = |(Curve { rate, held, .. }, choice): (&Curve, &Choice)| {
                rate * (held[choice.low] * (1.0 - choice.share) + held[choice.high] * choice.share)
            };
            assert!(pairs().map(held).sum::<f64>() <= room + 1e-9);
            assert!(plan.iter().all(|choice| choice.low <= choice.high && (0.0..1.0).contains(&choice.share)));
        }
    }

    /// The time is found by halving, and hits and blocks held are those between the times beside it.
    #[test]
    fn one_time_for_all_takes_all_the_room() {
        let (mut random, times) = (Random(3), planner().times);
        for _ in 0..300 {
            let (curves, room) = (curves(&mut random), share(&mut random) * 1000.0);
            let sum = |time: f64, of: fn(&Curve) -> &[f64; NUM_TIMES]| -> f64 {
                let high = (1..NUM_TIMES - 1).find(|place| times[*place] >= time).unwrap_or(NUM_TIMES - 1);
                let part = (time - times[high - 1]) / (times[high] - times[high - 1]);
                let between = |values: &[f64; NUM_TIMES]| values[high - 1] * (1.0 - part) + values[high] * part;
                curves.iter().map(|curve| curve.rate * between(of(curve))).sum()
            };
            let (mut time, mut longer) = (0.0, times[NUM_TIMES - 1]);
            for _ in 0..100 {
                let middle = (time + longer) / 2.0;
                *(if sum(middle, |curve| &curve.held) < room { &mut time } else { &mut longer }) = middle;
            }
            let (hits, lru_time) = hits_of_one_time(&curves, &times, room);
            assert_close(hits, sum(time, |curve| &curve.hits), "hits");
            if sum(times[NUM_TIMES - 1], |curve| &curve.held) > room {
                assert_close(lru_time, time, "time");
            } else {
                assert_eq!(lru_time, times[NUM_TIMES - 1]);
            }
        }
    }

    // -- learning -----------------------------------------------------------------------------------------------------

    #[test]
    fn a_class_that_was_never_seen_is_as_all_are() {
        let mut planner = planner();
        (planner.elapsed, planner.num_admissions) = (1000.0, 10);
        planner.enter_use(0, 300);
        planner.enter_use(4, 100);
        planner.enter_return(&Return { class: 4, gap: 100, weight: 80, found: 0, planned: None });
        planner.enter_return(&Return { class: 4, gap: 5000, weight: 20, found: 0, planned: None });
        let curves = planner.curves();
        assert_eq!((curves[0].rate, curves[4].rate, curves[9].rate), (0.3, 0.1, 0.0));
        assert_eq!((curves[9].hits[BASE_TIME - 1], curves[9].hits[NUM_TIMES - 1]), (0.0, 0.2));
        let prior = 8.0 * 400.0 / 10.0;
        assert_close(curves[4].hits[BASE_TIME], (80.0 + prior * 0.2) / (100.0 + prior), "of itself and all");
        assert_close(curves[0].hits[BASE_TIME], prior * 0.2 / (300.0 + prior), "of itself and all");
        assert_close(curves[9].held[BASE_TIME - 1], 50.0, "until then all are kept");
        assert_close(curves[9].held[BASE_TIME], 50.0 + 50.0 * 0.9, "and on the way half of the hits are gone");
        assert_close(curves[9].held[BASE_TIME + 1], 95.0 + 100.0 * 0.8, "and then all of them");
    }

    #[test]
    fn no_class_hits_more_than_always() {
        let mut planner = planner();
        (planner.elapsed, planner.num_admissions) = (1000.0, 10_000);
        planner.enter_use(4, 10);
        planner.enter_return(&Return { class: 4, gap: 1, weight: 50, found: 50, planned: None });
        let curve = &planner.curves()[4];
        assert_eq!((curve.hits[0], curve.hits[1], curve.hits[NUM_TIMES - 1]), (0.0, 1.0, 1.0));
        assert_eq!(curve.held[NUM_TIMES - 1], curve.held[1]);
    }

    #[test]
    fn the_room_is_what_is_parked_when_blocks_are_evicted() {
        for (evictions, room) in [(vec![], 100.0), (vec![(2, 10), (1, 40)], 20.0)] {
            let mut planner = planner();
            (planner.elapsed, planner.num_admissions) = (1000.0, 10);
            planner.enter_use(0, 1000);
            evictions.iter().for_each(|(count, num_parked)| planner.enter_eviction(*count, *num_parked));
            planner.make_plan();
            assert_close(
                planner.lru_time,
                room,
                "a block is allocated at a time, so each stays as long as there is room",
            );
        }
    }

    #[test]
    fn a_plan_that_is_followed_is_judged_by_what_was_found_and_another_by_what_it_promised() {
        let gain = |is_trusted, gap, planned| {
            let mut planner = planner();
            planner.is_trusted = is_trusted;
            planner.enter_return(&Return { class: 4, gap, weight: 7, found: 3, planned });
            (planner.admission_gain, planner.lru_hits)
        };
        assert_eq!(gain(false, 100, None), (0, 0.0));
        assert_eq!(gain(false, 100, Some(5)), (0, 7.0));
        assert_eq!(gain(false, 100, Some(4)), (-7, 7.0));
        assert_eq!(gain(false, 101, Some(5)), (0, 0.0));
        assert_eq!(gain(false, 101, Some(6)), (7, 0.0));
        assert_eq!((gain(true, 100, Some(4)), gain(true, 101, Some(4))), ((-4, 7.0), (3, 0.0)));
    }

    #[test]
    fn gains_are_counted_by_admission() {
        let mut planner = planner();
        for (gap, planned) in [(150, 6), (150, 6), (90, 4)] {
            planner.enter_return(&Return { class: 4, gap, weight: 5, found: 0, planned: Some(planned) });
        }
        planner.end_admission(0);
        planner.enter_return(&Return { class: 4, gap: 150, weight: 2, found: 0, planned: Some(6) });
        planner.end_admission(0);
        assert_eq!((planner.gain, planner.gain_squares, planner.admission_gain), (5.0 + 2.0, 25.0 + 4.0, 0));
    }

    /// Half of the blocks are used again after two pools, the others never: LRU finds none of them.
    fn planner_with_a_gain() -> RetentionPlanner {
        let mut planner = planner();
        (planner.elapsed, planner.num_admissions) = (2000.0, 1000);
        planner.enter_use(0, 1000);
        planner.enter_use(4, 1000);
        planner.enter_return(&Return { class: 4, gap: 200, weight: 1000, found: 0, planned: None });
        planner
    }

    #[test]
    fn a_plan_is_trusted_only_if_it_predicts_a_gain_and_has_shown_one() {
        for (gain, gain_squares, lru_hits, is_trusted) in [
            (50.0, 100.0, 0.0, true),
            (50.0, 1600.0, 0.0, false),
            (50.0, 100.0, 2400.0, true),
            (50.0, 100.0, 2600.0, false),
            (0.0, 0.0, 0.0, false),
            (-50.0, 100.0, 0.0, false),
        ] {
            let mut planner = planner_with_a_gain();
            (planner.gain, planner.gain_squares, planner.lru_hits) = (gain, gain_squares, lru_hits);
            planner.make_plan();
            assert_eq!(planner.is_trusted, is_trusted, "{gain} {gain_squares} {lru_hits}");
            let choice = planner.plan.as_ref().unwrap()[4];
            assert!(choice.low == BASE_TIME + 1 || choice.high == BASE_TIME + 1, "two pools long: {choice:?}");
        }
        let mut alike = planner();
        (alike.elapsed, alike.num_admissions, alike.gain) = (2000.0, 1000, 50.0);
        for class in [0, 4] {
            alike.enter_use(class, 1000);
            alike.enter_return(&Return { class, gap: 50, weight: 500, found: 0, planned: None });
        }
        alike.make_plan();
        assert!(!alike.is_trusted && alike.plan.is_some());
    }

    #[test]
    fn plans_are_made_more_often_when_more_is_allocated() {
        for (clock, period) in [(NUM_BLOCKS as i64, LEAST_PERIOD), (6, MOST_PERIOD)] {
            let mut planner = planner();
            planner.elapsed = NUM_BLOCKS as f64;
            planner.enter_use(0, 100);
            for _ in 1..period {
                planner.end_admission(clock);
            }
            assert!(planner.plan.is_none(), "{clock}");
            planner.end_admission(clock);
            assert!(planner.plan.is_some(), "{clock}");
            assert_eq!((planner.since_plan, planner.last_clock), (0, clock));
        }
    }

    #[test]
    fn a_plan_is_not_trusted_when_too_little_is_allocated_to_make_another() {
        for (elapsed, is_made) in [(49.0, false), (50.0, true)] {
            let mut planner = planner_with_a_gain();
            (planner.elapsed, planner.is_trusted, planner.gain) = (elapsed, true, 50.0);
            (0..MOST_PERIOD).for_each(|_| planner.end_admission(0));
            assert_eq!((planner.is_trusted, planner.plan.is_some()), (is_made, is_made));
        }
    }

    #[test]
    fn all_counts_fade_from_plan_to_plan() {
        let mut planner = planner_with_a_gain();
        planner.enter_eviction(10, 30);
        (planner.gain, planner.gain_squares, planner.lru_hits) = (100.0, 50.0, 10.0);
        (0..MOST_PERIOD).for_each(|_| planner.end_admission(0));
        assert_eq!((planner.used[0], planner.returned[4][BASE_TIME + 1]), (970.0, 970.0));
        assert_eq!((planner.elapsed, planner.evicted, planner.parked_evicted), (1940.0, 9.7, 291.0));
        assert_eq!((planner.gain, planner.lru_hits), (90.0, 9.0));
        assert_close(planner.gain_squares, 50.0 * 0.81, "squares");
    }
}
