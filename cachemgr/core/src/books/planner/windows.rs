//! Moves block tables on: blocks that no later token sees, and entries that a report changed.

use crate::books::geometry::Geometry;
use crate::books::lease::Lease;
use crate::books::plans::GrantedStep;
use crate::books::room::update_reservation;
use crate::books::sequences::{Sequence, SequenceTable};
use crate::books::tables::BlockTable;
use crate::cache::groups::Span;
use crate::cache::pool::BlockPool;
use crate::errors::Result;

/// Lets the blocks go that no later token of a sequence sees. The last computed token may be computed again.
pub(super) fn pass_windows(
    lease: &mut Lease,
    table: &mut SequenceTable,
    pool: &mut BlockPool,
    geometry: &Geometry,
    plan: &mut GrantedStep,
) -> Result<()> {
    for row in std::mem::take(&mut lease.computed) {
        let is_there =
            |sequence: &&Sequence| lease.sequences.get(&sequence.seq_id) == Some(&row) && !sequence.is_offloaded();
        let Some(sequence) = table.find(row).filter(is_there) else { continue };
        let (seq_id, position) = (sequence.seq_id, sequence.num_computed.saturating_sub(1));
        let mut passed = Vec::new();
        for (group, span) in geometry.groups() {
            let held = &mut table.get_mut(row).tables[usize::from(group)];
            let blocks = held.pass(geometry.first_needed(span, position));
            if !blocks.is_empty() {
                plan.pass(seq_id, group, held.num_passed());
                pool.groups.count(group, |counters| counters.num_passed += blocks.len() as u64);
                passed.extend(blocks);
            }
        }
        if !passed.is_empty() {
            lease.let_go(passed, pool)?;
            update_reservation(row, pool, table, geometry);
        }
    }
    Ok(())
}

/// Writes the table entries that reports changed since the last plan.
pub(super) fn write_changed_entries(lease: &mut Lease, table: &SequenceTable, plan: &mut GrantedStep) {
    for (row, group, index) in std::mem::take(&mut lease.table_changes) {
        let sequence = table.get(row);
        if let Some(block) = sequence.table(group).get(index).filter(|_| !sequence.released) {
            plan.write(sequence.seq_id, group, index, &[block]);
        }
    }
}

/// Positions before this one can't be computed again: the model's state before them is lost, or blocks that they see.
pub(super) fn least_position(sequence: &Sequence, geometry: &Geometry) -> usize {
    let oldest = if geometry.has_recurrent_state { sequence.oldest_state } else { 0 };
    if !geometry.has_windows() {
        return oldest;
    }
    let least_in = |(span, table): (&Span, &BlockTable)| span.first_beyond(table.num_passed() * geometry.block_size);
    geometry.groups.iter().zip(&sequence.tables).map(least_in).fold(oldest, usize::max)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::books::plans::StepRequest;
    use crate::books::tests::{Bench, admission};

    #[test]
    fn an_entry_that_a_report_changed_is_not_written_if_it_is_passed() {
        let mut bench = Bench::with_groups(20, &[Span::Full, Span::Sliding(1)]);
        let request = || StepRequest { admissions: vec![admission(1, &[1, 2, 3, 4, 5])], ..StepRequest::default() };
        bench.plan(request());
        bench.plan_for("b", request());
        bench.settle();
        let report = bench.report("b");
        bench.0.settle("b", &report).unwrap();
        let plan = bench.plan_for("b", StepRequest::default());
        assert_eq!((plan.passed_groups, plan.passed_counts), (vec![1], vec![2]));
        assert_eq!((plan.write_groups, plan.write_first_indexes), (vec![], vec![0, 1]), "of the full group alone");
        assert_eq!(plan.write_block_ids, bench.blocks(1)[..2], "those of the other lease");
        assert_eq!(bench.0.violations(), [""; 0]);
    }
}
