//! Steps in flight: their computations, and the blocks that they keep from reuse.

use std::collections::{BTreeMap, HashMap};

use serde::{Deserialize, Serialize};

use crate::books::sequences::{Row, Sequence};
use crate::cache::prefix::BlockId;
use crate::cache::tier::TierBlockId;

/// One step's computation for one sequence.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Run {
    pub row: Row,
    pub seq_id: i32,
    /// The position of the token that it samples, if it samples: after the last position computed.
    pub sampled_position: usize,
    /// Positions before this count as computed when the step is; less after a trim.
    pub end: usize,
    pub samples: bool,
    /// True if the sequence still needs the sampled token.
    pub receives: bool,
}

/// Full blocks of known tokens that a step computes: later plans of the lease may share them.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Fill {
    pub row: Row,
    /// Index in the block table.
    pub first: usize,
    /// Less after a trim.
    pub end: usize,
}

/// A sequence that was offloaded while the step was in flight, and continues in another row.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Heir {
    pub row: Row,
    /// Positions before this count as computed there when the step is; less after a trim.
    pub end: usize,
}

/// A step that was planned and not reported.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct StepInFlight {
    pub step_number: u64,
    pub runs: Vec<Run>,
    /// The drafts of the runs that have some, by index of the run. Such a run computes a token and then its drafts.
    pub drafts: BTreeMap<usize, Vec<i32>>,
    /// Forks that also take a run's sampled token, by index of the run.
    pub also: BTreeMap<usize, Vec<Row>>,
    pub heirs: Vec<Heir>,
    /// Blocks that the step holds until it has ended, in the order in which they were let go.
    pub holds: Vec<Vec<BlockId>>,
    /// Blocks of the host tier that the step may access.
    pub host_holds: Vec<Vec<TierBlockId>>,
    /// Those of them to which it copies evicted blocks: they can be found when it has ended.
    pub host_arriving: Vec<TierBlockId>,
    pub fills: Vec<Fill>,
    /// Rows of sequences that end with this step: the worker keeps its rows until then.
    pub released_rows: Vec<Row>,
    /// It was planned before the outcome of one was known that computed nothing: it will compute nothing either.
    pub is_doomed: bool,
}

impl StepInFlight {
    /// The sequence was trimmed: tokens computed for it count only up to the kept ones.
    pub fn cut(&mut self, row: Row, num_tokens: usize, block_size: usize) {
        for (index, forks) in &mut self.also {
            if self.runs[*index].sampled_position >= num_tokens {
                forks.retain(|fork| *fork != row);
            }
        }
        self.limit_fills(row, num_tokens / block_size);
        for heir in self.heirs.iter_mut().filter(|heir| heir.row == row) {
            heir.end = heir.end.min(num_tokens);
        }
        if let Some(run) = self.run_of(row) {
            run.end = run.end.min(num_tokens);
            run.receives &= run.sampled_position < num_tokens;
        }
    }

    /// Blocks computed for the sequence count only up to here.
    pub fn limit(&mut self, row: Row, num_blocks: usize, block_size: usize) {
        self.limit_fills(row, num_blocks);
        if let Some(run) = self.run_of(row) {
            run.end = run.end.min(num_blocks * block_size);
        }
    }

    /// The child begins with the parent's first tokens, those being sampled included.
    pub fn join(&mut self, parent: Row, child: Row, num_tokens: usize) {
        for (index, forks) in &mut self.also {
            if forks.contains(&parent) && self.runs[*index].sampled_position < num_tokens {
                forks.push(child);
            }
        }
        let index = self.runs.iter().position(|run| run.row == parent);
        if let Some(index) = index
            && self.runs[index].receives
            && self.runs[index].sampled_position < num_tokens
        {
            self.also.entry(index).or_default().push(child);
        }
    }

    /// Moves the sequence, of so many tokens, to another row: its computed and sampled tokens count there.
    pub fn hand_over(&mut self, row: Row, heir: Row, num_tokens: usize) {
        self.join(row, heir, num_tokens);
        let end = self.run_of(row).map(|run| run.end);
        let inherited = || self.heirs.iter().find(|known| known.row == row).map(|known| known.end);
        if let Some(end) = end.or_else(inherited) {
            self.heirs.push(Heir { row: heir, end });
        }
    }

    /// Nothing of it will be computed or sampled.
    pub fn doom(&mut self) {
        self.is_doomed = true;
        self.fills.clear();
        self.also.clear();
        self.heirs.clear();
        self.runs.iter_mut().for_each(|run| run.receives = false);
    }

    /// The drafts of a run that are accepted if it has so many computed tokens; None if it can't have so many.
    pub fn accepted_drafts(&self, index: usize, num_computed: i32) -> Option<&[i32]> {
        let drafts = self.drafts.get(&index).map_or(&[][..], Vec::as_slice);
        let num_rejected = self.runs[index].sampled_position.checked_sub(usize::try_from(num_computed).ok()?)?;
        drafts.get(..drafts.len().checked_sub(num_rejected)?)
    }

    /// A sequence not among these, with a sampled token that a run waits for.
    pub fn first_waiting<T>(&self, token_of: &HashMap<i32, T>) -> Option<i32> {
        let is_wanted = |index: usize| self.also.get(&index).is_some_and(|forks| !forks.is_empty());
        let waits =
            |(index, run): &(usize, &Run)| (run.receives || is_wanted(*index)) && !token_of.contains_key(&run.seq_id);
        self.runs.iter().enumerate().find(waits).map(|(_, run)| run.seq_id)
    }

    /// Lets later plans of the lease share the blocks that it fills, as far as their tokens are known.
    pub fn expect_fill(&mut self, row: Row, sequence: &Sequence, start: usize, end: usize, block_size: usize) {
        let (first, end) = (start / block_size, end.min(sequence.num_known()) / block_size);
        if first < end {
            self.fills.push(Fill { row, first, end });
        }
    }

    fn run_of(&mut self, row: Row) -> Option<&mut Run> {
        self.runs.iter_mut().find(|run| run.row == row)
    }

    fn limit_fills(&mut self, row: Row, num_blocks: usize) {
        for fill in self.fills.iter_mut().filter(|fill| fill.row == row) {
            fill.end = fill.end.min(num_blocks);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::books::sequences::NewSequence;
    use crate::books::sequences::tests::one_table;

    /// Rows 11 to 13 of sequences 1 to 3 are computed to 6, 7 and 12; the last two sample.
    fn step() -> StepInFlight {
        let run =
            |row, seq_id, end, samples| Run { row, seq_id, sampled_position: end, end, samples, receives: samples };
        let runs = vec![run(11, 1, 6, false), run(12, 2, 7, true), run(13, 3, 12, true)];
        StepInFlight { step_number: 1, runs, ..StepInFlight::default() }
    }

    fn ends(step: &StepInFlight) -> Vec<usize> {
        step.runs.iter().map(|run| run.end).collect()
    }

    fn receives(step: &StepInFlight) -> Vec<bool> {
        step.runs.iter().map(|run| run.receives).collect()
    }

    fn also(step: &StepInFlight) -> Vec<(usize, Vec<Row>)> {
        step.also.clone().into_iter().filter(|(_, forks)| !forks.is_empty()).collect()
    }

    fn fills(step: &StepInFlight) -> Vec<(Row, usize, usize)> {
        step.fills.iter().map(|fill| (fill.row, fill.first, fill.end)).collect()
    }

    fn first_waiting(step: &StepInFlight, told: &[i32]) -> Option<i32> {
        step.first_waiting(&told.iter().map(|seq_id| (*seq_id, 9)).collect())
    }

    #[test]
    fn a_cut_limits_what_counts_and_takes_the_token_behind_it() {
        for (num_tokens, end, is_received) in [(13, 7, true), (8, 7, true), (7, 7, false), (6, 6, false), (1, 1, false)]
        {
            let mut step = step();
            step.cut(12, num_tokens, 2);
            assert_eq!((ends(&step), receives(&step)), (vec![6, end, 12], vec![false, is_received, true]));
            let planned: Vec<_> = step.runs.iter().map(|run| (run.sampled_position, run.samples)).collect();
            assert_eq!(planned, [(6, false), (7, true), (12, true)], "the report is of what was planned");
        }
    }

    #[test]
    fn a_cut_that_keeps_more_than_the_one_before_gives_nothing_back() {
        let mut step = step();
        step.cut(12, 3, 2);
        step.cut(12, 10, 2);
        assert_eq!((ends(&step), receives(&step)), (vec![6, 3, 12], vec![false, false, true]));
    }

    #[test]
    fn a_limit_leaves_the_sampled_token() {
        let mut step = step();
        step.limit(12, 2, 2);
        step.limit(12, 3, 2);
        step.limit(99, 0, 2);
        assert_eq!((ends(&step), receives(&step)), (vec![6, 4, 12], vec![false, true, true]));
    }

    #[test]
    fn a_fork_receives_the_token_if_it_begins_behind_it() {
        for (num_tokens, forks) in [(7, vec![]), (8, vec![(1, vec![20])]), (9, vec![(1, vec![20])])] {
            let mut step = step();
            step.join(12, 20, num_tokens);
            assert_eq!(also(&step), forks);
        }
    }

    #[test]
    fn a_fork_of_who_samples_nothing_or_was_cut_or_does_not_run_receives_nothing() {
        let mut step = step();
        step.join(11, 20, 12);
        step.cut(13, 12, 2);
        step.join(13, 20, 13);
        step.join(99, 20, 13);
        assert_eq!(also(&step), []);
    }

    #[test]
    fn a_fork_of_a_fork_receives_what_its_parent_does() {
        let mut step = step();
        step.join(12, 20, 8);
        step.join(20, 21, 8);
        step.join(20, 22, 7);
        assert_eq!(also(&step), [(1, vec![20, 21])]);
        step.cut(20, 7, 2);
        assert_eq!(also(&step), [(1, vec![21])]);
        step.cut(21, 8, 2);
        step.cut(12, 2, 2);
        assert_eq!(also(&step), [(1, vec![21])], "the parent's trim is not the fork's");
        assert_eq!(receives(&step), [false, false, true]);
    }

    #[test]
    fn forks_join_the_run_of_their_own_parent() {
        let mut step = step();
        step.join(13, 20, 13);
        step.join(12, 21, 13);
        step.join(13, 22, 13);
        assert_eq!(also(&step), [(1, vec![21]), (2, vec![20, 22])]);
    }

    #[test]
    fn the_first_that_waits_is_told_by_the_parents_id() {
        let mut step = step();
        let waiting = [&[][..], &[2], &[2, 3], &[1]].map(|told| first_waiting(&step, told));
        assert_eq!(waiting, [Some(2), Some(3), None, Some(2)]);
        step.join(12, 20, 8);
        step.cut(12, 7, 2);
        assert_eq!((first_waiting(&step, &[3]), first_waiting(&step, &[2, 3])), (Some(2), None));
        step.cut(20, 7, 2);
        assert_eq!(first_waiting(&step, &[3]), None, "the last fork is gone");
        assert_eq!(first_waiting(&StepInFlight::default(), &[]), None);
    }

    #[test]
    fn nobody_waits_for_a_doomed_step() {
        let mut step = step();
        step.join(12, 20, 8);
        step.fills.push(Fill { row: 11, first: 0, end: 3 });
        step.holds.push(vec![5]);
        step.released_rows.push(14);
        step.doom();
        assert!(step.is_doomed);
        assert_eq!((receives(&step), also(&step), fills(&step)), (vec![false; 3], vec![], vec![]));
        assert_eq!(first_waiting(&step, &[]), None);
        assert_eq!(step.runs.iter().map(|run| run.samples).collect::<Vec<_>>(), [false, true, true]);
        assert_eq!((&step.holds[..], &step.released_rows[..]), (&[vec![5]][..], &[14][..]), "they end with it still");
    }

    #[test]
    fn a_cut_or_a_limit_leaves_the_full_blocks_before_it() {
        let filling = || {
            let mut step = step();
            step.fills.extend([(11, 0, 2), (11, 2, 4), (12, 5, 6)].map(|(row, first, end)| Fill { row, first, end }));
            step
        };
        for (num_tokens, num_blocks) in [(12, 6), (8, 4), (7, 3), (3, 1), (2, 1), (1, 0)] {
            let left = vec![(11, 0, num_blocks.min(2)), (11, 2, num_blocks.min(4)), (12, 5, 6)];
            let (mut cut, mut limited) = (filling(), filling());
            cut.cut(11, num_tokens, 2);
            assert_eq!((fills(&cut), ends(&cut)), (left.clone(), vec![num_tokens.min(6), 7, 12]));
            limited.limit(11, num_blocks, 2);
            assert_eq!((fills(&limited), ends(&limited)), (left, vec![(2 * num_blocks).min(6), 7, 12]));
            assert_eq!(receives(&limited), [false, true, true]);
        }
    }

    #[test]
    fn only_full_blocks_of_known_tokens_are_expected() {
        let (tokens, tables) = ((0..9).collect(), one_table((1..6).collect()));
        let sequence = Sequence::begin(NewSequence { tokens, tables, ..NewSequence::default() }, 2);
        for (start, end, expected) in [
            (0, 9, vec![(11, 0, 4)]),
            (0, 12, vec![(11, 0, 4)]),
            (3, 6, vec![(11, 1, 3)]),
            (2, 5, vec![(11, 1, 2)]),
            (4, 5, vec![]),
            (8, 9, vec![]),
            (9, 12, vec![]),
        ] {
            let mut step = step();
            step.expect_fill(11, &sequence, start, end, 2);
            assert_eq!(fills(&step), expected, "{start} to {end}");
        }
    }
}
