//! The books of one pool in one epoch: which block belongs to whom, and which steps may still touch it.
//!
//! Single writer, no I/O, no clock: every method is atomic.

use std::collections::{HashMap, VecDeque};

use crate::errors::{Failure, Reason, Refusal, Result, invalid};
use crate::eviction::make_policy;
use crate::planner::StepPlanner;
use crate::plans::{StepPlan, StepRequest};
use crate::pool::BlockPool;
use crate::prefix::{BlockId, Hash, chain_hashes, root_hash};
use crate::sequences::{Row, Sequence, SequenceTable};
use crate::steps::StepInFlight;
use crate::tenants::{Asker, TenantId, Tenants, beginning_of};

/// Steps a lease may have planned without their outcome being known.
pub const MAX_STEPS_IN_FLIGHT: usize = 64;

/// Sizes of a pool and the model on it; constant for an epoch.
#[derive(Debug, Clone)]
pub struct Geometry {
    /// Tokens per block.
    pub block_size: usize,
    /// The null block included.
    pub num_blocks: usize,
    pub max_sequences: usize,
    pub max_sequence_tokens: usize,
    pub vocab_size: usize,
    pub model_fingerprint: Vec<u8>,
}

impl Geometry {
    pub fn num_blocks_for(&self, num_tokens: usize) -> usize {
        num_tokens.div_ceil(self.block_size)
    }

    /// The longest sequence: what the model can take and the pool can hold.
    pub fn max_tokens(&self) -> usize {
        self.max_sequence_tokens.min((self.num_blocks - 1) * self.block_size)
    }
}

/// What happened in a pool since its epoch was attached.
#[derive(Debug, Clone, Copy, Default)]
pub struct Counters {
    pub planned_steps: u64,
    pub computed_steps: u64,
    pub failed_steps: u64,
    pub skipped_steps: u64,
    pub admissions: u64,
    pub admitted_tokens: u64,
    pub cached_tokens: u64,
    /// Tokens that were to be computed again because their blocks were evicted.
    pub recomputed_tokens: u64,
    pub forks: u64,
    pub copied_blocks: u64,
}

/// What one lease holds, and its steps.
#[derive(Debug, Default)]
pub struct Holdings {
    pub tenant: TenantId,
    pub tenant_name: Vec<u8>,
    pub sequences: HashMap<i32, Row>,
    pub next_step: u64,
    /// The last step that was reported.
    pub settled_step: u64,
    /// Outcomes are known up to this step: reported, or doomed.
    pub known_step: u64,
    pub in_flight: VecDeque<StepInFlight>,
    /// Table entries changed since the last plan, which the next grant has to tell the worker.
    pub table_changes: Vec<(Row, usize)>,
    /// The root that was asked for last, by salt.
    pub last_root: Option<(Vec<u8>, Hash)>,
}

impl Holdings {
    /// The root of a prompt's prefix hashes.
    pub fn root(&mut self, salt: &[u8], model_fingerprint: &[u8]) -> Hash {
        if let Some((known, root)) = &self.last_root
            && known == salt
        {
            return *root;
        }
        let root = root_hash(&self.tenant_name, salt, model_fingerprint);
        self.last_root = Some((salt.to_vec(), root));
        root
    }
}

/// Books of one pool, from the attachment of an epoch to its end. Leases are known by names that the caller gives.
#[derive(Debug)]
pub struct Books {
    pub(crate) geometry: Geometry,
    pub(crate) pool: BlockPool,
    pub(crate) table: SequenceTable,
    pub(crate) leases: HashMap<String, Holdings>,
    pub(crate) tenants: Tenants,
    pub(crate) counters: Counters,
}

impl Books {
    /// None if there is no eviction policy of this name.
    pub fn new(geometry: Geometry, policy: &str) -> Option<Books> {
        let policy = make_policy(policy, geometry.num_blocks)?;
        Some(Books {
            pool: BlockPool::new(geometry.num_blocks, policy),
            geometry,
            table: SequenceTable::default(),
            leases: HashMap::new(),
            tenants: Tenants::default(),
            counters: Counters::default(),
        })
    }

    /// A new lease without sequences.
    pub fn open_lease(&mut self, lease_id: &str, tenant: &[u8]) {
        let holdings = Holdings {
            tenant: self.tenants.enter(tenant),
            tenant_name: tenant.to_vec(),
            next_step: 1,
            ..Holdings::default()
        };
        let before = self.leases.insert(lease_id.to_string(), holdings);
        assert!(before.is_none(), "lease {lease_id:.8} is opened twice");
    }

    /// The lease has ended and nothing touches its blocks any more: all of them come back. No effect if it is gone.
    pub fn close_lease(&mut self, lease_id: &str) -> Result<()> {
        let Some(holdings) = self.leases.remove(lease_id) else {
            return Ok(());
        };
        for step in &holdings.in_flight {
            self.finish(step)?;
        }
        for row in self.rows_in_order(&holdings) {
            let sequence = self.table.leave(row);
            self.pool.release(&sequence.blocks_tail_first(0))?;
        }
        Ok(())
    }

    /// What a lease holds. The caller has opened it.
    pub fn holdings(&self, lease_id: &str) -> Option<&Holdings> {
        self.leases.get(lease_id)
    }

    /// Rows of a lease's sequences, as they were admitted.
    pub fn rows_in_order(&self, holdings: &Holdings) -> Vec<Row> {
        let mut rows: Vec<Row> = holdings.sequences.values().copied().collect();
        rows.sort_unstable_by_key(|row| self.table.get(*row).number);
        rows
    }

    /// Plans the lease's next step. None if there is no such lease. Refused (TOO_MANY_STEPS, INVALID_ARGUMENT) as a
    /// whole, or item by item. `now` is in seconds of the caller's clock.
    pub fn plan(&mut self, lease_id: &str, request: &StepRequest, now: f64) -> Result<Option<StepPlan>> {
        let Some(holdings) = self.leases.get_mut(lease_id) else {
            return Ok(None);
        };
        refuse_repeated(request)?;
        refuse_too_many_steps(holdings)?;
        let asker = Asker { tenant: holdings.tenant, lease: beginning_of(lease_id), now };
        let planner =
            StepPlanner::new(holdings, &mut self.pool, &mut self.table, &self.geometry, &mut self.counters, asker);
        let plan = planner.run(request)?;
        self.counters.planned_steps += 1;
        Ok(Some(plan))
    }

    /// Nothing touches the step's blocks any more.
    pub(crate) fn finish(&mut self, step: &StepInFlight) -> Result<()> {
        step.pinned.iter().try_for_each(|blocks| self.pool.unpin(blocks))?;
        step.released_rows.iter().for_each(|row| drop(self.table.leave(*row)));
        Ok(())
    }

    // -- looking ------------------------------------------------------------------------------------------------------

    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    pub fn pool_mut(&mut self) -> &mut BlockPool {
        &mut self.pool
    }

    pub fn counters(&self) -> Counters {
        self.counters
    }

    pub fn tenant_name(&self, tenant: TenantId) -> &[u8] {
        self.tenants.name(tenant)
    }

    pub fn sequence(&self, row: Row) -> &Sequence {
        self.table.get(row)
    }

    /// Rows in the worker: sequences that leases hold, and those released that steps in flight still run.
    pub fn num_rows(&self) -> usize {
        self.table.len()
    }

    /// Tokens that an admission would find in the cache; takes nothing.
    pub fn num_cached_tokens(&self, tokens: &[i32], salt: &[u8], tenant: &[u8]) -> usize {
        let size = self.geometry.block_size;
        let num_full = tokens.len().saturating_sub(1) / size; // one token is left to compute
        let root = root_hash(tenant, salt, &self.geometry.model_fingerprint);
        let mut hashes = Vec::new();
        chain_hashes(root, &tokens[..num_full * size], size, &mut hashes);
        self.pool.index().find(&hashes).len() * size
    }

    /// Tokens in active blocks, each block counted once, as its fullest holder fills it. O(sequences), if few share.
    pub fn num_held_tokens(&self) -> usize {
        let size = self.geometry.block_size;
        let held = |row: &Row| {
            let sequence = self.table.get(*row);
            (sequence, sequence.num_known().max(sequence.num_scheduled))
        };
        let sequences = || self.leases.values().flat_map(|holdings| holdings.sequences.values()).map(held);
        let mut fills: HashMap<BlockId, usize> = HashMap::new(); // of the blocks that a holder does not fill
        for (sequence, num_tokens) in sequences() {
            for (index, block) in sequence.block_table.iter().enumerate().skip(num_tokens / size) {
                let fill = fills.entry(*block).or_default();
                *fill = num_tokens.saturating_sub(index * size).max(*fill);
            }
        }
        if fills.keys().any(|block| self.pool.ref_count(*block) > 1) {
            for (sequence, num_tokens) in sequences() {
                for block in sequence.block_table.iter().take(num_tokens / size) {
                    fills.entry(*block).and_modify(|fill| *fill = size);
                }
            }
        }
        let num_missing: usize = fills.values().map(|fill| size - fill).sum();
        self.pool.counters().num_active * size - num_missing
    }
}

/// A sequence can be computed only once in a step.
fn refuse_repeated(request: &StepRequest) -> Result<()> {
    let mut seq_ids: Vec<i32> = request.extends.iter().map(|extend| extend.seq_id).collect();
    seq_ids.sort_unstable();
    let Some(pair) = seq_ids.windows(2).find(|pair| pair[0] == pair[1]) else {
        return Ok(());
    };
    let value = format!("{} more than once", pair[0]);
    Err(Failure::Refused(invalid("extends.sequence_ids", value, "distinct")))
}

fn refuse_too_many_steps(holdings: &Holdings) -> Result<()> {
    let num_steps = holdings.in_flight.len();
    if num_steps < MAX_STEPS_IN_FLIGHT {
        return Ok(());
    }
    let message = format!("the lease has {num_steps} steps in flight, the most there may be");
    let refusal = Refusal::new(Reason::TooManySteps, message);
    Err(Failure::Refused(refusal.with("limit", MAX_STEPS_IN_FLIGHT)))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::eviction::POLICIES;
    use crate::plans::{Admission, Extend, Fork, Trim};
    use crate::pool::tests::Random;
    use crate::settle::{StepOutcome, StepReport};

    pub(crate) fn geometry(num_usable: usize) -> Geometry {
        Geometry {
            block_size: 2,
            num_blocks: num_usable + 1,
            max_sequences: 16,
            max_sequence_tokens: 64,
            vocab_size: 100,
            model_fingerprint: b"f".to_vec(),
        }
    }

    /// Books with leases "a" and "b" on blocks of two tokens; calls without a lease are those of "a".
    pub(crate) struct Bench(pub Books);

    impl Bench {
        pub(crate) fn new(num_usable: usize) -> Bench {
            Bench::with_policy("lru", num_usable)
        }

        fn with_policy(policy: &str, num_usable: usize) -> Bench {
            let mut books = Books::new(geometry(num_usable), policy).unwrap();
            ["a", "b"].iter().for_each(|lease_id| books.open_lease(lease_id, b""));
            Bench(books)
        }

        pub(crate) fn plan(&mut self, request: StepRequest) -> StepPlan {
            self.plan_for("a", request)
        }

        pub(crate) fn plan_for(&mut self, lease_id: &str, request: StepRequest) -> StepPlan {
            self.0.plan(lease_id, &request, 0.0).unwrap().unwrap()
        }

        pub(crate) fn admit(&mut self, seq_id: i64, tokens: &[i32]) -> StepPlan {
            self.plan(StepRequest { admissions: vec![admission(seq_id, tokens)], ..StepRequest::default() })
        }

        pub(crate) fn extend(&mut self, seq_id: i32, num_tokens: i64, append: &[i32]) -> StepPlan {
            let extends = vec![Extend { seq_id, num_tokens, append: append.to_vec() }];
            self.plan(StepRequest { extends, ..StepRequest::default() })
        }

        pub(crate) fn fork(&mut self, parent_id: i64, child_ids: &[i64], num_tokens: i64) -> StepPlan {
            let forks = vec![Fork { parent_id, child_ids: child_ids.to_vec(), num_tokens }];
            self.plan(StepRequest { forks, ..StepRequest::default() })
        }

        pub(crate) fn trim(&mut self, seq_id: i64, num_tokens: i64) -> StepPlan {
            self.plan(StepRequest { trims: vec![Trim { seq_id, num_tokens }], ..StepRequest::default() })
        }

        pub(crate) fn release(&mut self, seq_ids: &[i64]) -> StepPlan {
            self.plan(StepRequest { releases: seq_ids.to_vec(), ..StepRequest::default() })
        }

        /// Of the lease's first step in flight: all computed, and 9 sampled wherever it samples.
        pub(crate) fn report(&self, lease_id: &str) -> StepReport {
            let step = self.0.leases[lease_id].in_flight.front().unwrap();
            let sampled = || step.runs.iter().filter(|run| run.samples).map(|run| run.seq_id);
            StepReport {
                step_number: step.step_number,
                outcome: StepOutcome::Computed,
                seq_ids: step.runs.iter().map(|run| run.seq_id).collect(),
                token_counts: step.runs.iter().map(|run| run.sampled_position as i32).collect(),
                sampled_ids: sampled().collect(),
                sampled_tokens: sampled().map(|_| 9).collect(),
            }
        }

        /// All steps in flight were computed.
        pub(crate) fn settle(&mut self) {
            while !self.0.leases["a"].in_flight.is_empty() {
                self.0.settle("a", &self.report("a")).unwrap();
            }
        }

        pub(crate) fn row(&self, seq_id: i32) -> Row {
            self.0.leases["a"].sequences[&seq_id]
        }

        pub(crate) fn tokens(&self, seq_id: i32) -> Vec<i32> {
            self.0.table.get(self.row(seq_id)).tokens.clone()
        }

        pub(crate) fn blocks(&self, seq_id: i32) -> Vec<BlockId> {
            self.0.table.get(self.row(seq_id)).block_table.clone()
        }

        pub(crate) fn sequence(&mut self, seq_id: i32) -> &mut Sequence {
            let row = self.row(seq_id);
            self.0.table.get_mut(row)
        }
    }

    pub(crate) fn admission(seq_id: i64, tokens: &[i32]) -> Admission {
        Admission { seq_id, tokens: tokens.to_vec(), ..Admission::default() }
    }

    // -- leases -------------------------------------------------------------------------------------------------------

    #[test]
    fn a_sequence_is_as_long_as_model_and_pool_allow() {
        assert_eq!([3, 31, 32, 40].map(|num_usable| geometry(num_usable).max_tokens()), [6, 62, 64, 64]);
        assert_eq!([0, 1, 2, 3].map(|num_tokens| geometry(3).num_blocks_for(num_tokens)), [0, 1, 1, 2]);
    }

    #[test]
    fn policies_go_by_their_names() {
        assert!(POLICIES.iter().all(|policy| Books::new(geometry(4), policy).is_some()));
        assert!(Books::new(geometry(4), "mru").is_none());
    }

    #[test]
    #[should_panic(expected = "lease a is opened twice")]
    fn a_lease_is_opened_once() {
        Bench::new(4).0.open_lease("a", b"");
    }

    #[test]
    fn nothing_is_planned_for_who_has_no_lease() {
        let mut bench = Bench::new(4);
        assert!(bench.0.plan("c", &StepRequest::default(), 0.0).unwrap().is_none());
        assert!(bench.0.holdings("c").is_none());
        bench.0.close_lease("c").unwrap();
        assert_eq!(bench.0.counters().planned_steps, 0);
        let steps = [bench.plan(StepRequest::default()), bench.plan(StepRequest::default())];
        assert_eq!((steps.map(|plan| plan.step_number), bench.0.counters().planned_steps), ([1, 2], 2));
    }

    #[test]
    fn a_root_is_of_tenant_salt_and_model_whatever_was_asked_before() {
        let mut holdings = Holdings { tenant_name: b"t".to_vec(), ..Holdings::default() };
        for salt in [&b"x"[..], b"x", b"", b"y", b"x"] {
            assert_eq!(holdings.root(salt, b"f"), root_hash(b"t", salt, b"f"));
        }
    }

    #[test]
    fn rows_are_told_as_sequences_were_admitted_and_used_again() {
        let mut bench = Bench::new(8);
        [3, 1, 2].iter().for_each(|seq_id| drop(bench.admit(*seq_id, &[1])));
        bench.release(&[1]);
        bench.settle();
        bench.admit(1, &[2]);
        let rows = bench.0.rows_in_order(&bench.0.leases["a"]);
        assert_eq!(rows, [bench.row(3), bench.row(2), bench.row(1)]);
        assert_eq!((rows, bench.0.num_rows()), (vec![0, 2, 1], 3));
    }

    #[test]
    fn all_of_a_closed_lease_comes_back_and_what_was_computed_is_cached() {
        let mut bench = Bench::new(8);
        bench.admit(1, &[1, 2, 3]);
        bench.settle();
        bench.admit(2, &[5, 6, 7]);
        bench.extend(1, 1, &[]);
        bench.trim(1, 1);
        bench.release(&[2]);
        assert_eq!((bench.0.num_rows(), bench.0.pool().counts().retired), (2, 3));
        bench.0.close_lease("a").unwrap();
        assert_eq!((bench.0.num_rows(), bench.0.pool().counts().cached, bench.0.pool().counts().free), (0, 1, 7));
        assert_eq!((bench.0.violations(), bench.0.num_cached_tokens(&[1, 2, 3], b"", b"")), (vec![], 2));
    }

    #[test]
    fn a_lookup_leaves_a_token_to_compute() {
        let mut bench = Bench::new(8);
        bench.admit(1, &[1, 2, 3, 4, 5]);
        bench.settle();
        let lengths = [0, 1, 2, 3, 4, 5].map(|count| bench.0.num_cached_tokens(&[1, 2, 3, 4, 5][..count], b"", b""));
        assert_eq!(lengths, [0, 0, 0, 2, 2, 4]);
        assert_eq!(bench.0.num_cached_tokens(&[1, 2, 3], b"s", b""), 0);
        assert_eq!(bench.0.num_cached_tokens(&[1, 2, 3], b"", b"t"), 0);
    }

    #[test]
    fn a_block_is_held_as_far_as_its_fullest_holder_fills_it() {
        let mut bench = Bench::new(4);
        bench.admit(1, &[1, 2]);
        assert_eq!(bench.0.num_held_tokens(), 2);
        bench.extend(1, 1, &[]);
        bench.fork(1, &[2, 3, 4, 5, 6, 7, 8, 9], 3);
        assert_eq!((bench.0.num_held_tokens(), bench.sequence(2).num_scheduled), (3, 2));
        bench.release(&[1]);
        assert_eq!(bench.0.num_held_tokens(), 2);
    }

    // -- anything at all ----------------------------------------------------------------------------------------------

    pub(crate) fn some_request(random: &mut Random) -> StepRequest {
        let mut ids = |bound| (0..random.below(bound)).map(|_| random.below(6) as i64).collect::<Vec<_>>();
        let (releases, trimmed, parents, admitted) = (ids(2), ids(2), ids(2), ids(4));
        let extended = random.sample((0..6).collect());
        let mut count = |bound| 1 + random.below(bound) as i64;
        let trims = trimmed.into_iter().map(|seq_id| Trim { seq_id, num_tokens: count(9) }).collect();
        let fork = |parent_id| Fork { parent_id, child_ids: vec![count(6), count(6)], num_tokens: count(9) };
        let forks = parents.into_iter().map(fork).collect();
        let extend = |seq_id: i64| {
            let num_appended = [0, 0, 0, 3][random.below(4)];
            let append = random.tokens(num_appended, 2);
            Extend { seq_id: seq_id as i32, num_tokens: 1 + random.below(2) as i64, append }
        };
        let extends = extended.into_iter().map(extend).collect();
        let admit = |seq_id| {
            let num_tokens = 1 + random.below(9);
            let tokens = random.tokens(num_tokens, 2);
            Admission { seq_id, tokens, max_compute: random.below(4), ..Admission::default() }
        };
        let admissions = admitted.into_iter().map(admit).collect();
        StepRequest { releases, trims, forks, extends, admissions, ..StepRequest::default() }
    }

    /// Block by block, as its fullest holder fills it.
    fn num_held_tokens(books: &Books) -> usize {
        let mut fills = vec![0; books.geometry.num_blocks];
        for row in books.leases.values().flat_map(|holdings| holdings.sequences.values()) {
            let sequence = books.table.get(*row);
            let num_tokens = sequence.num_known().max(sequence.num_scheduled);
            for (index, block) in sequence.block_table.iter().enumerate() {
                let fill = num_tokens.saturating_sub(2 * index).min(2);
                fills[*block as usize] = fill.max(fills[*block as usize]);
            }
        }
        fills.into_iter().sum()
    }

    #[test]
    fn whatever_is_asked_the_books_are_right() {
        for (seed, policy) in (0..20).flat_map(|seed| POLICIES.map(|policy| (seed, policy))) {
            let (mut bench, mut random) = (Bench::with_policy(policy, 12), Random(seed));
            let mut findable = BTreeSet::new();
            for _ in 0..120 {
                let lease_id = ["a", "b"][random.below(2)];
                let num_in_flight = bench.0.leases[lease_id].in_flight.len();
                if num_in_flight < 3 && random.below(2) == 0 {
                    bench.plan_for(lease_id, some_request(&mut random));
                } else if num_in_flight > 0 {
                    let mut report = bench.report(lease_id);
                    report.sampled_tokens.iter_mut().for_each(|token| *token = random.below(2) as i32);
                    let step = &bench.0.leases[lease_id].in_flight[0];
                    if step.is_doomed || random.below(8) == 0 {
                        report.outcome = [StepOutcome::Failed, StepOutcome::Skipped][random.below(2)];
                    }
                    bench.0.settle(lease_id, &report).unwrap();
                } else if random.below(20) == 0 {
                    bench.0.close_lease(lease_id).unwrap();
                    bench.0.open_lease(lease_id, b"");
                }
                assert_eq!(bench.0.violations(), [""; 0]);
                assert_eq!(bench.0.num_held_tokens(), num_held_tokens(&bench.0));
                findable.extend((1..13).filter(|block| bench.0.pool().index().is_findable(*block)));
            }
            assert!(findable.len() > 6, "it gets somewhere: {findable:?}");
            ["a", "b"].iter().for_each(|lease_id| bench.0.close_lease(lease_id).unwrap());
            assert_eq!((bench.0.num_rows(), bench.0.pool().num_allocatable()), (0, 12));
        }
    }
}
