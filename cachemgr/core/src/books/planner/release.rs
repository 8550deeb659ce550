//! Releases sequences and trims them: a block stays retired as long as a step in flight may touch it.

use crate::books::planner::advise::{expect_back, expect_never};
use crate::books::planner::windows::least_position;
use crate::books::planner::{Answer, StepPlanner, find_in_pool, refuse_position};
use crate::books::plans::{ReturnHint, Trim};
use crate::books::room::update_reservation;
use crate::books::sequences::Row;
use crate::cache::prefix::BlockId;
use crate::errors::Result;

impl StepPlanner<'_> {
    pub(super) fn release(&mut self, seq_id: i64, hint: Option<&ReturnHint>) -> Result<()> {
        let Some(row) = self.lease.row_of(seq_id) else {
            return Ok(());
        };
        let sequence = self.table.get_mut(row);
        let host_blocks =
            sequence.in_host.as_mut().map(|tables| std::mem::take(&mut tables.blocks)).unwrap_or_default();
        self.plan.released_ids.push(sequence.seq_id);
        let blocks = self.end(row);
        let hinted = hint.map(|hint| (hint.expected_in, blocks.clone()));
        self.lease.let_go(blocks, self.pool)?;
        self.lease.let_go_in_host(host_blocks, self.host)?;
        match hinted {
            Some((Some(seconds), blocks)) => expect_back(&blocks, seconds, self.now, self.pool),
            Some((None, blocks)) => {
                let sequence = self.table.get(row);
                let num_found = sequence.blocks_of(sequence.num_cached, self.geometry.block_size).count();
                expect_never(&blocks[..blocks.len() - num_found.min(blocks.len())], self.pool);
            }
            None => {}
        }
        Ok(())
    }

    /// The sequence of this row ends with this step; returns its blocks, tail first.
    pub(super) fn end(&mut self, row: Row) -> Vec<BlockId> {
        let sequence = self.table.get_mut(row);
        sequence.released = true;
        if sequence.reserved_tokens > 0 {
            self.pool.reserve(sequence.tenant, std::mem::take(&mut sequence.num_reserved), 0);
            self.lease.reserved.retain(|reserved| *reserved != row);
        }
        self.lease.sequences.remove(&sequence.seq_id);
        self.step.released_rows.push(row);
        sequence.blocks_tail_first(0)
    }

    pub(super) fn trim(&mut self, trim: &Trim) -> Answer {
        let row = match find_in_pool(trim.seq_id, self.lease, self.table) {
            Ok(row) => row,
            Err(refusal) => return Ok(Err(refusal)),
        };
        let block_size = self.geometry.block_size;
        let sequence = self.table.get(row);
        let least = least_position(sequence, self.geometry).max(1);
        refuse_if!(refuse_position(trim.seq_id, trim.num_tokens, least, sequence.num_tokens));
        let num_tokens = trim.num_tokens as usize;
        let has_reservation = sequence.reserved_tokens > 0;
        if has_reservation {
            let room = self.room_for(sequence.tenant);
            let needed = room.num_at_risk_after(sequence, num_tokens);
            refuse_if!(room.refuse(trim.seq_id, needed, 0, 0));
        }
        let sequence = self.table.get_mut(row);
        sequence.truncate(num_tokens, block_size, self.pool.index());
        let num_kept = if has_reservation { usize::MAX } else { num_tokens.div_ceil(block_size) };
        let tail_first = sequence.blocks_tail_first(num_kept);
        sequence.tables.iter_mut().for_each(|table| table.truncate(num_kept));
        for step in &mut self.lease.in_flight {
            step.cut(row, num_tokens, block_size);
        }
        update_reservation(row, self.pool, self.table, self.geometry);
        if !tail_first.is_empty() {
            self.lease.let_go(tail_first, self.pool)?;
        }
        Ok(Ok(()))
    }
}
