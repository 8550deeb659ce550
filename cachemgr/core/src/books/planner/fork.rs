//! Forks sequences: children share the blocks of their parent.

use crate::books::geometry::Geometry;
use crate::books::planner::windows::least_position;
use crate::books::planner::{StepPlanner, find_in_pool, refuse_new, refuse_position};
use crate::books::plans::{Fork, PlanItem};
use crate::books::room::{Room, update_reservation};
use crate::books::sequences::{Row, SequenceTable};
use crate::cache::pool::BlockPool;
use crate::errors::{Refusal, Result};

impl StepPlanner<'_> {
    pub(super) fn fork(&mut self, fork: &Fork) -> Result<()> {
        let found = find_in_pool(fork.parent_id, self.lease, self.table);
        let parent = found.as_ref().ok().copied();
        let refusal = match found {
            Err(refusal) => Some(refusal),
            Ok(row) => {
                let sequence = self.table.get(row);
                let least = least_position(sequence, self.geometry) + 1;
                refuse_position(fork.parent_id, fork.num_tokens, least, sequence.num_tokens).or_else(|| {
                    refuse_unguaranteed(row, fork.num_tokens as usize, self.pool, self.table, self.geometry)
                })
            }
        };
        let mut num_children = 0;
        for &child_id in &fork.child_ids {
            let refused = refusal.clone().or_else(|| refuse_new(child_id, self.lease, self.table, self.geometry));
            match (refused, parent) {
                (None, Some(parent)) => {
                    self.continue_from(parent, child_id as i32, fork.num_tokens as usize);
                    num_children += 1;
                }
                (Some(refused), _) => self.plan.answer(PlanItem::Fork, child_id, Err(refused)),
                (None, None) => unreachable!("a fork without a parent is refused"),
            }
        }
        if let Some(row) = parent
            && num_children > 0
        {
            let parent = self.table.get_mut(row);
            let end = self.geometry.num_blocks_for(fork.num_tokens as usize);
            for table in &parent.tables {
                self.pool.acquire(table.range(0..end), num_children)?;
            }
            parent.num_writable = 0;
            self.counters.forks += u64::from(num_children);
            update_reservation(row, self.pool, self.table, self.geometry);
        }
        Ok(())
    }

    /// A sequence that has the parent's blocks in its table and computes its last token again, into a copy.
    pub(super) fn continue_from(&mut self, parent_row: Row, child_id: i32, num_tokens: usize) {
        let parent = self.table.get(parent_row);
        let parent_id = parent.seq_id;
        let child = parent.fork(child_id, num_tokens, self.geometry.block_size, self.pool.index());
        let row = self.enter(child);
        for step in &mut self.lease.in_flight {
            step.join(parent_row, row, num_tokens);
        }
        self.plan.fork_parent_ids.push(parent_id);
        self.plan.fork_child_ids.push(child_id);
    }
}

/// A sequence with a reservation that shares blocks will have to copy those that it writes: these have to be there.
fn refuse_unguaranteed(
    row: Row,
    num_tokens: usize,
    pool: &BlockPool,
    table: &SequenceTable,
    geometry: &Geometry,
) -> Option<Refusal> {
    let sequence = table.get(row);
    let room = Room { geometry, pool, tenant: sequence.tenant };
    let needed = room.num_newly_at_risk(sequence, &sequence.tables, geometry.num_blocks_for(num_tokens));
    room.refuse(sequence.seq_id.into(), needed, 0, 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::books::planner::tests::reasons;
    use crate::books::tests::Bench;
    use crate::errors::Reason;

    #[test]
    fn a_fork_takes_the_parents_right_to_write() {
        let mut bench = Bench::new(8);
        bench.admit(1, &[1, 2, 3]);
        bench.settle();
        assert_eq!(bench.sequence(1).num_writable, 4);
        assert_eq!(bench.fork(1, &[2, 3], 4).write_seq_ids, [2, 3]);
        assert_eq!((bench.sequence(1).num_writable, bench.sequence(2).num_writable), (0, 0));
        let shared = bench.blocks(1)[1];
        assert_eq!(bench.0.pool().holders().ref_count(shared), 3);
        let plan = bench.extend(1, 1, &[]);
        assert_eq!((plan.copy_sources, bench.0.pool().holders().ref_count(shared)), (vec![shared], 2));
        assert_eq!((bench.0.pool().holders().hold_count(shared), bench.0.counters().forks), (1, 2));
        assert_eq!(bench.0.violations(), [""; 0]);
    }

    #[test]
    fn a_fork_whose_children_are_all_refused_changes_nothing() {
        let mut bench = Bench::new(8);
        bench.admit(1, &[1, 2, 3]);
        let before = bench.0.state(None);
        let plan = bench.fork(1, &[1, -5], 3);
        let expected = [(PlanItem::Fork, 1, Reason::SequenceExists), (PlanItem::Fork, -5, Reason::InvalidArgument)];
        assert_eq!((reasons(&plan), bench.0.state(Some("a"))), (expected.to_vec(), before));
        assert_eq!((bench.sequence(1).num_writable, bench.0.counters().forks), (4, 0));
        assert_eq!(reasons(&bench.fork(7, &[8], 1)), [(PlanItem::Fork, 8, Reason::SequenceNotFound)]);
    }
}
