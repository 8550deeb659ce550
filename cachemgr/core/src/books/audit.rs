//! Checks the books against themselves: I1 to I4 of the ownership protocol.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Debug;
use std::ops::Range;

use crate::books::Books;
use crate::books::geometry::Geometry;
use crate::books::lease::leases::Leases;
use crate::books::pins::Pins;
use crate::books::room::Room;
use crate::books::sequences::{Row, Sequence, SequenceTable};
use crate::books::tables::BlockTable;
use crate::cache::disk::DiskTier;
use crate::cache::pool::BlockPool;
use crate::cache::pool::audit::PoolAudit;
use crate::cache::prefix::{BlockId, Past};
use crate::cache::tenants::{TenantId, Tenants};
use crate::cache::tier::TierPool;

impl Books {
    /// All violations, one sentence each. Cost: O(blocks + table entries).
    pub fn violations(&self) -> Vec<String> {
        self.audit().all()
    }

    /// The checks of these books.
    pub fn audit(&self) -> Audit<'_> {
        let Books { geometry, pool, host, disk, table, leases, tenants, pins, .. } = self;
        Audit { geometry, pool, host, disk, table, leases, tenants, pins }
    }

    /// All that a refusal leaves as it was, as text; of one lease without its last step, which a plan adds in any case.
    pub fn state(&self, but_last_step_of: Option<&str>) -> String {
        let blocks = (1..self.geometry.num_blocks as BlockId).map(|block| {
            let pool = &self.pool;
            (
                pool.holders().ref_count(block),
                pool.holders().hold_count(block),
                pool.index().past(block),
                pool.index().hash(block),
            )
        });
        let mut leases: Vec<String> = Vec::new();
        for (lease_id, lease) in self.leases.iter() {
            let num_left_out = usize::from(but_last_step_of == Some(lease_id));
            let num_steps = lease.in_flight.len().saturating_sub(num_left_out);
            let steps: Vec<_> = lease.in_flight.iter().take(num_steps).collect();
            let rows = self.rows_in_order(lease);
            let sequences: Vec<_> = rows.into_iter().map(|row| (row, bounds(self.table.get(row)))).collect();
            leases.push(format!("{lease_id} {} {sequences:?} {steps:?}", lease.settled_step));
        }
        leases.sort();
        let (free, parked) = (self.pool.free_blocks(), self.pool.parking().parked());
        let blocks = blocks.collect::<Vec<_>>();
        let num_changes = self.pool.records.journal.num_changes();
        let host = format!("{} {}", self.host.state(), self.disk.state());
        format!("{blocks:?} {free:?} {parked:?} {host} {} {num_changes} {leases:?}", self.table.len())
    }
}

/// Reads the books, and reports their violations.
pub struct Audit<'a> {
    geometry: &'a Geometry,
    pool: &'a BlockPool,
    host: &'a TierPool,
    disk: &'a DiskTier,
    table: &'a SequenceTable,
    leases: &'a Leases,
    tenants: &'a Tenants,
    pins: &'a Pins,
}

impl Audit<'_> {
    /// All violations, one sentence each. Cost: O(blocks + table entries).
    pub fn all(&self) -> Vec<String> {
        let mut wrong = self.blocks(&(0..self.geometry.num_blocks as BlockId));
        wrong.extend(self.counts());
        wrong.extend(self.promises());
        wrong
    }

    /// The violations in a range of blocks. Cost: O(blocks of the range + table entries + free blocks), so that a large
    /// pool can be checked in slices with calls between them: no slice depends on another.
    pub fn blocks(&self, blocks: &Range<BlockId>) -> Vec<String> {
        let mut wrong = Vec::new();
        PoolAudit::new(self.pool).blocks(blocks, &mut wrong);
        self.check_references(blocks, &mut wrong);
        self.check_owners(blocks, &mut wrong);
        self.check_tables(blocks, &mut wrong);
        self.check_holds(blocks, &mut wrong);
        self.check_sharing(blocks, &mut wrong);
        self.check_unpublished(blocks, &mut wrong);
        wrong
    }

    /// The violations in the counts. Cost: O(blocks), a fraction of `blocks`'s for all of them.
    pub fn counts(&self) -> Vec<String> {
        let mut wrong = Vec::new();
        PoolAudit::new(self.pool).counts(&mut wrong);
        let held = self.leases.rows().count();
        let released: usize = self.leases.steps().map(|step| step.released_rows.len()).sum();
        let num_taken = held + released - self.table.num_offloaded().min(held + released);
        if num_taken != self.table.len() {
            wrong.push(format!("{} rows counted in the worker, {num_taken} are taken", self.table.len()));
        }
        self.table.audit(&mut wrong);
        self.check_host(&mut wrong);
        self.check_drafts(&mut wrong);
        wrong
    }

    /// The violations in tenants' accounts, pins and reservations. Cost: as `counts`.
    pub fn promises(&self) -> Vec<String> {
        let mut wrong = Vec::new();
        PoolAudit::new(self.pool).accounts(&mut wrong);
        self.check_pins(&mut wrong);
        self.check_reservations(&mut wrong);
        wrong
    }

    /// I1 and I2 of the tiers below the pool: each of their blocks is in one state, and one that is held is of one sequence.
    fn check_host(&self, wrong: &mut Vec<String>) {
        let blocks = 0..self.host.len() as BlockId;
        let held = self.sequences().filter_map(|sequence| sequence.in_host.as_deref());
        let holders = occurrences(&blocks, held.map(|tables| &tables.blocks[..]));
        let (ordered, read) = self.disk.host_blocks();
        let steps = self.leases.steps().flat_map(|step| &step.host_holds).map(Vec::as_slice);
        let steps = occurrences(&blocks, steps.chain([&ordered[..]]));
        let arriving = self.leases.steps().map(|step| &step.host_arriving[..]);
        let arriving = occurrences(&blocks, arriving.chain([&read[..]]));
        self.host.audit(&holders, &steps, &arriving, wrong);
        self.disk.audit(wrong);
        for sequence in self.sequences() {
            let Some(in_host) = &sequence.in_host else { continue };
            let (num_host_blocks, num_blocks) = (in_host.blocks.len(), sequence.blocks().count());
            let end = self.geometry.num_blocks_for(sequence.num_scheduled);
            let mut counts = sequence.tables.iter().zip(&in_host.counts);
            let is_short = counts.any(|(table, count)| table.num_passed() + count < end);
            if num_blocks > 0 || is_short || in_host.counts.iter().sum::<usize>() != num_host_blocks {
                let seq_id = sequence.seq_id;
                wrong.push(format!("sequence {seq_id} has {num_host_blocks} host blocks and {num_blocks} of the pool"));
            }
        }
    }

    /// A sequence has drafts in flight while one step verifies them: its run begins with the one token before them, and ends
    /// with the last one. What is published of any sequence is known: no draft is.
    fn check_drafts(&self, wrong: &mut Vec<String>) {
        let mut verified: HashMap<Row, (usize, usize)> = HashMap::new(); // the number of drafts, the end of the run
        for step in self.leases.steps().filter(|step| !step.is_doomed) {
            for (index, drafts) in &step.drafts {
                let run = &step.runs[*index];
                if verified.insert(run.row, (drafts.len(), run.sampled_position)).is_some() {
                    wrong.push(format!("two steps verify drafts of sequence {}", run.seq_id));
                }
            }
        }
        for row in self.leases.rows() {
            let (sequence, seq_id) = (self.table.get(row), self.table.get(row).seq_id);
            let (num_verified, end) = verified.get(&row).copied().unwrap_or((0, sequence.num_scheduled));
            let num_before = sequence.num_scheduled.saturating_sub(sequence.num_drafts);
            if (sequence.num_drafts, sequence.num_scheduled) != (num_verified, end) {
                let (num_drafts, num_scheduled) = (sequence.num_drafts, sequence.num_scheduled);
                wrong.push(format!(
                    "sequence {seq_id} has {num_drafts} drafts in flight up to {num_scheduled}, {num_verified} are verified up to {end}"
                ));
            }
            if sequence.num_drafts > 0 && sequence.num_known() > num_before {
                wrong.push(format!("sequence {seq_id} knows tokens in the places of its drafts"));
            }
            let (num_published, num_known) = (sequence.num_published, sequence.num_known());
            if num_published * self.geometry.block_size > num_known {
                wrong.push(format!(
                    "sequence {seq_id} has {num_published} published blocks, and {num_known} tokens that are known"
                ));
            }
        }
    }

    /// Checks that the reserved blocks are available, and are those that the sequences still need.
    fn check_reservations(&self, wrong: &mut Vec<String>) {
        let (num_reserved, num_there) = (self.pool.accounts().num_reserved(), self.pool.num_allocatable());
        if num_reserved > num_there {
            wrong.push(format!("{num_reserved} blocks are reserved, {num_there} can be handed out"));
        }
        let mut counted = vec![0; self.tenants.len()];
        for sequence in self.sequences() {
            let room = Room { geometry: self.geometry, pool: self.pool, tenant: sequence.tenant };
            let (num_reserved, needed) = (sequence.num_reserved, room.num_reserved_for(sequence));
            if num_reserved != needed {
                let seq_id = sequence.seq_id;
                wrong.push(format!("sequence {seq_id} may need {needed} blocks, {num_reserved} are reserved"));
            }
            counted[sequence.tenant as usize] += num_reserved;
        }
        for (tenant, num_counted) in counted.into_iter().enumerate() {
            let num_reserved = self.pool.accounts().get(tenant as TenantId).num_reserved;
            if num_counted != num_reserved {
                wrong.push(format!("tenant {tenant} has {num_reserved} blocks reserved, {num_counted} for sequences"));
            }
        }
    }

    fn sequences(&self) -> impl Iterator<Item = &Sequence> {
        self.leases.rows().map(|row| self.table.get(row))
    }

    /// I2: as many references as table entries.
    fn check_references(&self, blocks: &Range<BlockId>, wrong: &mut Vec<String>) {
        let tables = self.sequences().flat_map(|sequence| &sequence.tables);
        let holders = occurrences(blocks, tables.map(BlockTable::blocks));
        for (block, holders) in blocks.clone().zip(holders) {
            let references = self.pool.holders().ref_count(block);
            if references != holders {
                wrong.push(format!("block {block} is in {holders} tables and has {references} references"));
            }
        }
    }

    /// A sequence's blocks are of its tenant.
    fn check_owners(&self, blocks: &Range<BlockId>, wrong: &mut Vec<String>) {
        for sequence in self.sequences() {
            let held = sequence.blocks().filter(|block| blocks.contains(block));
            for block in held.filter(|block| self.pool.owner(*block) != Some(sequence.tenant)) {
                let (seq_id, tenant) = (sequence.seq_id, sequence.tenant);
                wrong.push(format!("block {block} of sequence {seq_id} is not of its tenant {tenant}"));
            }
        }
    }

    /// A table has blocks of its layer group, from the first one on that the next token sees to the last one that is
    /// scheduled.
    fn check_tables(&self, blocks: &Range<BlockId>, wrong: &mut Vec<String>) {
        if !self.geometry.has_windows() {
            return;
        }
        for sequence in self.sequences() {
            let num_scheduled = self.geometry.num_blocks_for(sequence.num_scheduled);
            for ((group, span), table) in self.geometry.groups().zip(&sequence.tables) {
                let (seq_id, first) = (sequence.seq_id, self.geometry.first_needed(span, sequence.num_computed));
                let held = table.blocks().iter().filter(|block| blocks.contains(block));
                for block in held.filter(|block| self.pool.groups.of(**block) != group) {
                    let other = self.pool.groups.of(*block);
                    wrong.push(format!("block {block} of sequence {seq_id} in group {group} is of group {other}"));
                }
                if table.num_passed() > first {
                    let num_passed = table.num_passed();
                    wrong.push(format!(
                        "sequence {seq_id} sees blocks from {first} on in group {group}, and let {num_passed} go"
                    ));
                }
                if !sequence.is_offloaded() && table.end() < num_scheduled {
                    let end = table.end();
                    wrong.push(format!("sequence {seq_id} has {end} of {num_scheduled} blocks in group {group}"));
                }
            }
        }
    }

    /// A sequence that publishes nothing has no block that can be found, or could be.
    fn check_unpublished(&self, blocks: &Range<BlockId>, wrong: &mut Vec<String>) {
        for sequence in self.sequences().filter(|sequence| !sequence.cache_use.writes()) {
            let held = sequence.blocks().filter(|block| blocks.contains(block));
            for block in held.filter(|block| self.pool.index().past(*block) != Past::None) {
                wrong.push(format!(
                    "block {block} of sequence {}, which publishes nothing, was published",
                    sequence.seq_id
                ));
            }
        }
    }

    fn check_holds(&self, blocks: &Range<BlockId>, wrong: &mut Vec<String>) {
        let steps = occurrences(blocks, self.leases.steps().flat_map(|step| &step.holds).map(Vec::as_slice));
        for (block, steps) in blocks.clone().zip(steps) {
            let holds = self.pool.holders().hold_count(block);
            if holds != steps {
                wrong.push(format!("block {block} is held by {steps} steps and has {holds} holds"));
            }
        }
    }

    /// Each pinned block has as many prefix pins as there are pins of prefixes with it.
    fn check_pins(&self, wrong: &mut Vec<String>) {
        let mut counted: BTreeMap<BlockId, u32> = BTreeMap::new();
        for block in self.pins.all().flat_map(|pin| &pin.blocks) {
            *counted.entry(*block).or_default() += 1;
        }
        if counted.len() != self.pool.pins().len() {
            wrong.push(format!("{} blocks are counted as pinned, {} are", self.pool.pins().len(), counted.len()));
        }
        for (block, pins) in counted {
            let known = self.pool.pins().count(block);
            if known != pins {
                wrong.push(format!("block {block} is in {pins} pinned prefixes and has {known} pins"));
            }
        }
    }

    /// I4: sequences that share a block agree on every token up to the last slot of it that both fill, as steps were
    /// planned. A block after a sequence's last token is not compared: it is kept for a reservation, or was for tokens
    /// that were not computed. As long as it is shared, it is replaced before the sequence writes to it.
    ///
    /// Two sequences that agree up to the end of one block agree up to the ends of the blocks before it. So each
    /// sequence is read from its end, and compared once with each sequence that it shares blocks with. All holders of a
    /// block are compared with the one that fills most of it.
    fn check_sharing(&self, blocks: &Range<BlockId>, wrong: &mut Vec<String>) {
        let is_shared = |block: &BlockId| blocks.contains(block) && self.pool.holders().ref_count(*block) > 1;
        if !blocks.clone().any(|block| is_shared(&block)) {
            return;
        }
        let size = self.geometry.block_size;
        let mut fullest: HashMap<BlockId, (usize, &Sequence, usize)> = HashMap::new(); // its index, its filled tokens
        for sequence in self.sequences() {
            let num_filled = sequence.num_known().min(sequence.num_scheduled);
            let mut agreed: Option<(u64, usize)> = None; // with which sequence, up to which token
            let is_filled = |(index, _): &(usize, BlockId)| index * size < num_filled;
            for (index, block) in sequence.tables.iter().flat_map(|table| table.entries().rev()).filter(is_filled) {
                if !is_shared(&block) {
                    continue;
                }
                let filled = num_filled.min((index + 1) * size);
                let known = fullest.entry(block).or_insert((index, sequence, filled));
                let (other_index, other, other_filled) = *known;
                let shorter = filled.min(other_filled);
                if filled > other_filled {
                    *known = (index, sequence, filled);
                }
                let is_same_place = index == other_index;
                if is_same_place && agreed.is_some_and(|(number, end)| number == other.number && shorter <= end) {
                    continue;
                }
                let is_same_prefix = || sequence.tokens[..shorter] == other.tokens[..shorter];
                if is_same_place && sequence.root == other.root && is_same_prefix() {
                    agreed = Some((other.number, shorter));
                } else {
                    wrong.push(format!("block {block} is shared by sequences with different tokens"));
                }
            }
        }
    }
}

/// The number of occurrences of each block of a range in these lists.
fn occurrences<'a>(blocks: &Range<BlockId>, lists: impl Iterator<Item = &'a [BlockId]>) -> Vec<u32> {
    let mut times = vec![0; blocks.len()];
    for list in lists {
        for block in list {
            if let Some(times) = times.get_mut(block.wrapping_sub(blocks.start) as usize) {
                *times += 1;
            }
        }
    }
    times
}

/// All fields of a sequence except cached hashes.
fn bounds(sequence: &Sequence) -> impl Debug {
    let Sequence { seq_id, number, tenant, root, tables, tokens, released, .. } = sequence;
    let Sequence { num_tokens, num_cached, num_computed, num_scheduled, num_published, .. } = sequence;
    let positions = (sequence.num_writable, sequence.sampled_position, sequence.num_drafts, sequence.num_withheld);
    let tables = (tables, &sequence.in_host, tokens, root, sequence.last_hash(), sequence.cache_use);
    (
        seq_id,
        number,
        *tenant,
        released,
        num_tokens,
        num_cached,
        num_computed,
        num_scheduled,
        num_published,
        positions,
        tables,
    )
}

#[cfg(test)]
mod tests {
    use crate::books::plans::{Admission, Extend, StepRequest, Trim};
    use crate::books::settle::{StepOutcome, StepReport};
    use crate::books::steps::StepInFlight;
    use crate::books::tests::{Bench, admission};
    use crate::cache::pool::tests::ASKER;
    use crate::cache::prefix::PrefixIndex;

    /// Sequences 1 and 2 of three tokens each, in blocks 1 to 4, and the steps that compute them.
    fn bench() -> Bench {
        let mut bench = Bench::new(8);
        bench.admit(1, &[1, 2, 3]);
        bench.admit(2, &[4, 5, 6]);
        bench
    }

    fn step(bench: &mut Bench, index: usize) -> &mut StepInFlight {
        &mut bench.0.leases.get_mut("a").unwrap().in_flight[index]
    }

    /// The second sequence begins with the first one's first block.
    fn share_the_first_block(bench: &mut Bench) {
        bench.0.pool.acquire(&[1], 1).unwrap();
        bench.0.pool.release(&[3]).unwrap();
        bench.sequence(2).tables[0].replace(0, 1);
    }

    #[test]
    fn nothing_is_told_of_books_that_are_right() {
        let mut bench = bench();
        bench.settle();
        bench.fork(1, &[3], 4);
        bench.extend(3, 1, &[]);
        bench.release(&[2]);
        assert_eq!(bench.0.violations(), [""; 0]);
    }

    #[test]
    fn every_wrong_book_is_told() {
        type Damage = fn(&mut Bench);
        let damages: [(Damage, &[&str]); 13] = [
            (|bench| bench.sequence(1).tables[0].extend(vec![1]), &["block 1 is in 2 tables and has 1 references"]),
            (|bench| bench.sequence(2).tables[0].truncate(1), &["block 4 is in 0 tables and has 1 references"]),
            (
                |bench| step(bench, 1).holds.push(vec![7, 1]),
                &["block 1 is held by 1 steps and has 0 holds", "block 7 is held by 1 steps and has 0 holds"],
            ),
            (
                |bench| bench.0.pool.retire(&[4]).unwrap(),
                &["block 4 is in 1 tables and has 0 references", "block 4 is held by 0 steps and has 1 holds"],
            ),
            (|bench| step(bench, 0).released_rows.push(5), &["2 rows counted in the worker, 3 are taken"]),
            (
                |bench| {
                    let again = bench.sequence(1).fork(3, 1, 2, &PrefixIndex::new(2));
                    bench.0.table.enter(again);
                },
                &["3 rows counted in the worker, 2 are taken"],
            ),
            (
                |bench| drop(bench.0.host.allocate(1, bench.0.pool.accounts()).unwrap()),
                &["host block 0 is held, and of 0 sequences"],
            ),
            (|bench| step(bench, 1).host_holds.push(vec![5]), &["host block 5 is held by 1 steps and has 0 holds"]),
            (
                |bench| {
                    bench.offload(1);
                    bench.sequence(1).tables[0].extend(vec![8]);
                },
                &[
                    "block 8 is in 1 tables and has 0 references",
                    "block 8 of sequence 1 is not of its tenant 0",
                    "sequence 1 has 2 host blocks and 1 of the pool",
                ],
            ),
            (
                |bench| {
                    bench.offload(1);
                    bench.sequence(1).in_host.as_mut().unwrap().blocks = vec![1];
                },
                &["host block 0 is held, and of 0 sequences", "sequence 1 has 1 host blocks and 0 of the pool"],
            ),
            (
                |bench| bench.sequence(2).tenant = bench.0.enter_tenant(b"t"),
                &["block 3 of sequence 2 is not of its tenant 1", "block 4 of sequence 2 is not of its tenant 1"],
            ),
            (share_the_first_block, &["block 1 is shared by sequences with different tokens"]),
            (
                |bench| {
                    share_the_first_block(bench);
                    bench.sequence(2).tokens = vec![1, 2, 6];
                    bench.sequence(2).root = [9; 32];
                },
                &["block 1 is shared by sequences with different tokens"],
            ),
        ];
        for (damage, told) in damages {
            let mut bench = bench();
            assert_eq!(bench.0.violations(), [""; 0]);
            damage(&mut bench);
            assert_eq!(bench.0.violations(), told);
        }
    }

    #[test]
    fn wrong_drafts_are_told() {
        type Damage = fn(&mut Bench);
        let damages: [(Damage, &str); 6] = [
            (
                |bench| bench.sequence(1).num_drafts = 0,
                "sequence 1 has 0 drafts in flight up to 6, 2 are verified up to 6",
            ),
            (
                |bench| bench.sequence(1).num_scheduled = 5,
                "sequence 1 has 2 drafts in flight up to 5, 2 are verified up to 6",
            ),
            (
                |bench| bench.sequence(2).num_drafts = 1,
                "sequence 2 has 1 drafts in flight up to 3, 0 are verified up to 3",
            ),
            (|bench| bench.sequence(1).append_promised(9), "sequence 1 knows tokens in the places of its drafts"),
            (
                |bench| bench.sequence(2).num_published = 3,
                "sequence 2 has 3 published blocks, and 4 tokens that are known",
            ),
            (
                |bench| {
                    let again = step(bench, 0).runs[0].clone();
                    bench.extend(2, 1, &[]);
                    let later = step(bench, 1);
                    later.runs.push(again);
                    later.drafts.insert(1, vec![9, 9]);
                },
                "two steps verify drafts of sequence 1",
            ),
        ];
        for (damage, told) in damages {
            let mut bench = bench();
            bench.settle();
            bench.draft(1, &[9, 9]);
            assert_eq!(bench.0.violations(), [""; 0]);
            damage(&mut bench);
            assert_eq!(bench.0.violations()[0], told);
        }
    }

    #[test]
    fn what_is_wrong_with_the_pool_is_told() {
        let mut bench = bench();
        bench.0.pool.drop_cached(0, 9, 0.0, 0);
        bench.0.pool.parking_mut().policy().park(&[8]);
        assert_eq!(bench.0.violations().len(), 2, "{:?}", bench.0.violations());
    }

    #[test]
    fn who_shares_a_block_agrees_as_far_as_steps_fill_it() {
        for (num_scheduled, tokens, is_right) in [
            (3, vec![1, 2, 6], true),
            (3, vec![1, 9, 6], false),
            (3, vec![9, 2, 6], false),
            (1, vec![1, 9, 6], true),
            (1, vec![9, 2, 6], false),
            (0, vec![9, 9, 6], true),
            (3, vec![1], true),
        ] {
            let mut bench = bench();
            share_the_first_block(&mut bench);
            (bench.sequence(2).num_scheduled, bench.sequence(2).tokens) = (num_scheduled, tokens.clone());
            assert_eq!(bench.0.violations().is_empty(), is_right, "{num_scheduled} of {tokens:?}");
        }
    }

    #[test]
    fn a_block_that_a_reservation_keeps_is_shared_whatever_the_tokens_before_it_are() {
        let rewrite = |trims: bool, extends: bool| {
            let trims = if trims { vec![Trim { seq_id: 2, num_tokens: 1 }] } else { vec![] };
            let extends = if extends {
                vec![Extend { seq_id: 2, num_tokens: 1, append: vec![8], ..Extend::default() }]
            } else {
                vec![]
            };
            StepRequest { trims, extends, ..StepRequest::default() }
        };
        for (of_the_fork, steps) in [(true, 1), (true, 2), (false, 1), (false, 2)] {
            let mut bench = Bench::new(12);
            let admission = Admission { reserved_tokens: 16, ..admission(2, &[5, 6, 7, 1, 2]) };
            bench.plan(StepRequest { admissions: vec![admission.clone()], ..StepRequest::default() });
            bench.settle();
            if of_the_fork {
                bench.fork(2, &[3], 3);
            } else {
                let admissions = vec![Admission { reserved_tokens: 0, ..admission }];
                bench.plan_for("b", StepRequest { admissions, ..StepRequest::default() });
            }
            bench.settle();
            let told: Vec<Vec<String>> = if steps == 1 {
                vec![bench.plan(rewrite(true, true))]
            } else {
                vec![bench.plan(rewrite(true, false)), bench.plan(rewrite(false, true))]
            }
            .into_iter()
            .map(|plan| plan.refusals.into_iter().map(|refused| refused.refusal.message).collect())
            .collect();
            assert_eq!(told.concat(), [""; 0]);
            assert_eq!(bench.blocks(2)[1], 2, "it is kept");
            assert_eq!(bench.0.violations(), [""; 0]);
            bench.settle();
            bench.extend(2, 1, &[]);
            assert_ne!(bench.blocks(2)[1], 2, "it is replaced before it is written");
            assert_eq!(bench.0.violations(), [""; 0]);
        }
    }

    #[test]
    fn a_block_for_tokens_that_were_not_computed_is_shared_whatever_the_tokens_before_it_are() {
        let mut bench = Bench::new(12);
        bench.admit(1, &[1, 2, 3]);
        bench.settle();
        (0..4).for_each(|_| drop(bench.extend(1, 1, &[])));
        bench.fork(1, &[2], 8);
        while let Some(step) = bench.0.leases["a"].in_flight.front() {
            let failed = StepReport { outcome: StepOutcome::Failed, ..report_of_nothing(step.step_number) };
            bench.0.settle("a", &failed).unwrap();
        }
        assert_eq!((bench.blocks(1), bench.blocks(2)), (vec![1, 2, 3, 4], vec![1, 2, 3, 4]));
        bench.extend(1, 2, &[7]);
        bench.extend(2, 2, &[8]);
        assert_eq!((bench.blocks(1)[3], bench.blocks(2)[3]), (4, 4));
        assert_eq!(bench.0.violations(), [""; 0]);
    }

    fn report_of_nothing(step_number: u64) -> StepReport {
        StepReport {
            step_number,
            outcome: StepOutcome::Skipped,
            seq_ids: vec![],
            token_counts: vec![],
            sampled_ids: vec![],
            sampled_tokens: vec![],
            sampled_counts: vec![],
            report_number: 0,
        }
    }

    #[test]
    fn two_holders_are_compared_whatever_a_third_fills() {
        // The sequences are gone through in another order each time.
        for filled_by_third in [1, 2].into_iter().chain([3; 20]) {
            let mut bench = Bench::new(12);
            bench.admit(1, &[1, 2, 3, 4]);
            bench.settle();
            bench.fork(1, &[2, 3], 4);
            bench.settle();
            bench.sequence(1).num_scheduled = filled_by_third;
            (2..=3).for_each(|seq_id| bench.sequence(seq_id).num_scheduled = 4);
            assert_eq!(bench.0.violations(), [""; 0]);
            bench.sequence(3).tokens[3] = 9;
            assert_eq!(bench.0.violations(), ["block 2 is shared by sequences with different tokens"]);
        }
    }

    #[test]
    fn a_block_at_two_places_is_told() {
        let mut bench = Bench::new(12);
        bench.admit(1, &[1, 1, 1, 1]);
        bench.fork(1, &[2], 4);
        bench.settle();
        let [first, second] = [0, 1].map(|index| bench.sequence(2).table(0).block(index));
        bench.sequence(2).tables[0].replace(0, second);
        bench.sequence(2).tables[0].replace(1, first);
        bench.sequence(2).num_scheduled = 4;
        let mut told = bench.0.violations();
        told.sort();
        assert_eq!(told, [1, 2].map(|block| format!("block {block} is shared by sequences with different tokens")));
    }

    #[test]
    fn the_state_tells_whatever_changed() {
        type Change = fn(&mut Bench);
        let changes: [Change; 16] = [
            |bench| bench.settle(),
            |bench| drop(bench.extend(1, 1, &[])),
            |bench| drop(bench.admit(3, &[7])),
            |bench| drop(bench.release(&[1])),
            |bench| drop(bench.0.pool.allocate(1, 0, &ASKER).unwrap()),
            |bench| bench.0.pool.acquire(&[1], 1).unwrap(),
            |bench| assert_eq!(bench.0.pool.publish(&[5; 32], 1), 1),
            |bench| bench.0.open_lease("c", b"", 30.0),
            |bench| drop(bench.offload(1)),
            |bench| drop(bench.0.host.allocate(1, bench.0.pool.accounts()).unwrap()),
            |bench| bench.sequence(1).num_writable += 1,
            |bench| bench.sequence(2).sampled_position = None,
            |bench| bench.sequence(2).num_cached = 1,
            |bench| bench.sequence(2).released = true,
            |bench| step(bench, 0).runs[0].end = 2,
            |bench| bench.0.leases.get_mut("b").unwrap().settled_step = 1,
        ];
        for (number, change) in changes.iter().enumerate() {
            let mut bench = bench();
            let before = bench.0.state(None);
            assert_eq!(bench.0.state(None), before);
            change(&mut bench);
            assert_ne!(bench.0.state(None), before, "change {number}");
        }
    }

    #[test]
    fn a_plan_whose_items_are_refused_leaves_all_but_its_step() {
        let mut bench = bench();
        let before = bench.0.state(None);
        assert_eq!(bench.admit(3, &[1, 2, 100]).refusals.len(), 1);
        assert_ne!(bench.0.state(None), before);
        assert_eq!(bench.0.state(Some("a")), before);
    }

    #[test]
    fn a_hash_that_somebody_asked_for_is_no_change() {
        let mut bench = bench();
        let before = bench.0.state(None);
        bench.sequence(1).hash_at(0, 2);
        assert_eq!(bench.0.state(None), before);
    }
}
