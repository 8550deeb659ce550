//! The books of one pool in one epoch: which block belongs to whom, and which steps may still touch it.
//!
//! Single writer, no I/O, no clock: every method is atomic.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::accounts::Share;
use crate::errors::{Failure, Reason, Refusal, Result, invalid};
use crate::eviction::make_policy;
use crate::host::HostPool;
use crate::pins::Pins;
use crate::planner::StepPlanner;
use crate::plans::{Admission, StepPlan, StepRequest};
use crate::pool::BlockPool;
use crate::prefix::{BlockId, Hash, chain_hashes, root_hash};
use crate::room::Room;
use crate::sequences::{Row, Sequence, SequenceTable};
use crate::steps::StepInFlight;
use crate::tenants::{Asker, TenantId, Tenants, beginning_of};

/// Steps a lease may have planned without their outcome being known.
pub const MAX_STEPS_IN_FLIGHT: usize = 64;
/// Answers kept per lease for a repeated request id.
pub const REMEMBERED_PLANS: usize = 8;

/// Sizes of a pool and the model on it; constant for an epoch.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Geometry {
    /// Tokens per block.
    pub block_size: usize,
    /// The null block included.
    pub num_blocks: usize,
    /// Of the host tier; 0: there is none.
    pub num_host_blocks: usize,
    pub max_sequences: usize,
    pub max_sequence_tokens: usize,
    pub vocab_size: usize,
    pub model_fingerprint: Vec<u8>,
    /// The model keeps a state per sequence that no block holds: nothing is shared by prefix.
    pub has_recurrent_state: bool,
}

impl Geometry {
    pub fn num_blocks_for(&self, num_tokens: usize) -> usize {
        num_tokens.div_ceil(self.block_size)
    }

    /// The longest sequence: what the model can take and the pool can hold.
    pub fn max_tokens(&self) -> usize {
        self.max_sequence_tokens.min((self.num_blocks - 1) * self.block_size)
    }

    /// Slots of so many blocks that one sequence may fill; `reserved` is its reservation in tokens, 0 if it has none.
    pub fn num_slots(&self, num_blocks: usize, reserved: usize) -> usize {
        let most = if reserved > 0 { reserved.min(self.max_tokens()) } else { self.max_tokens() };
        most.min(num_blocks * self.block_size)
    }

    /// As many of a prompt's tokens as a sequence can have: no more are worth looking for.
    pub fn holdable<'a>(&self, tokens: &'a [i32]) -> &'a [i32] {
        &tokens[..tokens.len().min(self.max_tokens())]
    }
}

/// What happened in a pool since its epoch was attached.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
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
    /// Sequences that were released to make room and came back, which do not count as admissions; their tokens.
    pub resumed_admissions: u64,
    pub resumed_tokens: u64,
    pub resumed_cached_tokens: u64,
    /// Sequences moved to the host tier and back, and blocks copied for them.
    pub offloads: u64,
    pub restores: u64,
    pub offloaded_blocks: u64,
    pub restored_blocks: u64,
    /// Tokens whose keys and values reported steps computed, and tokens that these steps added to sequences.
    pub computed_tokens: u64,
    pub generated_tokens: u64,
}

impl Counters {
    pub fn count_admission(&mut self, num_tokens: usize, num_cached: usize, is_resumed: bool) {
        let (admissions, tokens, cached_tokens) = if is_resumed {
            (&mut self.resumed_admissions, &mut self.resumed_tokens, &mut self.resumed_cached_tokens)
        } else {
            (&mut self.admissions, &mut self.admitted_tokens, &mut self.cached_tokens)
        };
        *admissions += 1;
        *tokens += num_tokens as u64;
        *cached_tokens += num_cached as u64;
    }
}

/// What one lease holds, and its steps.
#[derive(Debug, Default, Serialize, Deserialize)]
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
    /// Sequences with a reservation.
    pub reserved: Vec<Row>,
    /// The root that was asked for last, by salt.
    pub last_root: Option<(Vec<u8>, Hash)>,
    /// The lease ends this many seconds after it was renewed last.
    pub ttl: f64,
    /// It has ended, and waits for the worker's fence.
    pub is_ending: bool,
    /// The last plans that had a request id, for a repetition.
    answers: VecDeque<Answer>,
}

/// A plan that was answered.
#[derive(Debug, Serialize, Deserialize)]
struct Answer {
    request_id: String,
    /// Of the request.
    digest: Vec<u8>,
    plan: Arc<StepPlan>,
}

impl Holdings {
    /// Brings up to date what is reserved for the lease's sequences.
    pub fn update_reservations(&mut self, pool: &mut BlockPool, table: &mut SequenceTable, geometry: &Geometry) {
        for row in &self.reserved {
            update_reservation(*row, self.tenant, pool, table, geometry);
        }
    }

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

/// Brings up to date what is reserved for a sequence.
pub fn update_reservation(
    row: Row,
    tenant: TenantId,
    pool: &mut BlockPool,
    table: &mut SequenceTable,
    geometry: &Geometry,
) {
    let sequence = table.get_mut(row);
    let needed = (Room { geometry, pool, tenant }).num_reserved_for(sequence);
    pool.reserve(tenant, sequence.num_reserved, needed);
    sequence.num_reserved = needed;
}

/// What tenants may take.
#[derive(Debug, Serialize, Deserialize)]
struct Shares {
    default: Share,
    by_name: BTreeMap<Vec<u8>, Share>,
}

impl Shares {
    fn of(&self, name: &[u8]) -> Share {
        self.by_name.get(name).copied().unwrap_or(self.default)
    }
}

/// Books of one pool, from the attachment of an epoch to its end. Leases are known by names that the caller gives.
#[derive(Debug, Serialize, Deserialize)]
pub struct Books {
    pub(crate) geometry: Geometry,
    pub(crate) pool: BlockPool,
    pub(crate) host: HostPool,
    pub(crate) table: SequenceTable,
    pub(crate) leases: HashMap<String, Holdings>,
    pub(crate) tenants: Tenants,
    pub(crate) pins: Pins,
    shares: Shares,
    pub(crate) counters: Counters,
}

impl Books {
    /// None if there is no eviction policy of this name.
    pub fn new(geometry: Geometry, policy: &str) -> Option<Books> {
        let policy = make_policy(policy, geometry.num_blocks)?;
        let shares = Shares { default: Share::everything(geometry.num_blocks - 1), by_name: BTreeMap::new() };
        Some(Books {
            pool: BlockPool::new(geometry.num_blocks, policy),
            host: HostPool::new(geometry.num_host_blocks),
            geometry,
            table: SequenceTable::default(),
            leases: HashMap::new(),
            tenants: Tenants::default(),
            pins: Pins::default(),
            shares,
            counters: Counters::default(),
        })
    }

    /// A new lease without sequences. `ttl` is in seconds.
    pub fn open_lease(&mut self, lease_id: &str, tenant: &[u8], ttl: f64) {
        let holdings = Holdings {
            ttl,
            tenant: self.enter_tenant(tenant),
            tenant_name: tenant.to_vec(),
            next_step: 1,
            ..Holdings::default()
        };
        let before = self.leases.insert(lease_id.to_string(), holdings);
        assert!(before.is_none(), "lease {lease_id:.8} is opened twice");
    }

    /// What tenants may take from now on, by name; all others get the default.
    pub fn set_shares(&mut self, default: Share, by_name: BTreeMap<Vec<u8>, Share>) {
        self.shares = Shares { default, by_name };
        for name in self.shares.by_name.keys().cloned().collect::<Vec<_>>() {
            self.enter_tenant(&name);
        }
        for tenant in 0..self.tenants.len() as TenantId {
            self.pool.set_share(tenant, self.shares.of(self.tenants.name(tenant)));
        }
    }

    pub(crate) fn enter_tenant(&mut self, name: &[u8]) -> TenantId {
        let tenant = self.tenants.enter(name);
        if tenant as usize == self.pool.accounts().len() {
            self.pool.set_share(tenant, self.shares.of(name));
        }
        tenant
    }

    pub fn tenants(&self) -> &Tenants {
        &self.tenants
    }

    /// The lease has ended; its blocks come back when it is closed. No effect if it is gone.
    pub fn end_lease(&mut self, lease_id: &str) {
        if let Some(holdings) = self.leases.get_mut(lease_id) {
            holdings.is_ending = true;
        }
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
            self.pool.reserve(holdings.tenant, sequence.num_reserved, 0);
            self.pool.release(&sequence.blocks_tail_first(0))?;
            self.host.release(&sequence.host_blocks.unwrap_or_default())?;
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
        if !self.leases.contains_key(lease_id) {
            return Ok(None);
        }
        self.advance(now)?;
        let holdings = self.leases.get_mut(lease_id).expect("it is there");
        refuse_repeated(request)?;
        refuse_too_many_steps(holdings)?;
        let asker = Asker { tenant: holdings.tenant, lease: beginning_of(lease_id), now };
        let Books { geometry, pool, host, table, counters, .. } = self;
        let planner = StepPlanner::new(holdings, pool, host, table, geometry, counters, asker);
        let plan = planner.run(request)?;
        self.counters.planned_steps += 1;
        Ok(Some(plan))
    }

    /// The answer that was given to this request id, if it is remembered. Refused (REQUEST_ID_REUSED) if that was
    /// another request.
    pub fn recall(&self, lease_id: &str, request_id: &str, digest: &[u8]) -> Result<Option<Arc<StepPlan>>> {
        let answers = self.leases.get(lease_id).map(|holdings| &holdings.answers);
        let Some(answer) = answers.and_then(|known| known.iter().find(|answer| answer.request_id == request_id)) else {
            return Ok(None);
        };
        if answer.digest != digest {
            let message = format!("request_id '{request_id}' was used for another plan");
            let refusal = Refusal::new(Reason::RequestIdReused, message).with("request_id", request_id);
            return Err(Failure::Refused(refusal));
        }
        Ok(Some(answer.plan.clone()))
    }

    /// Keeps the lease's answer to a request id for a repetition, and forgets the oldest beyond REMEMBERED_PLANS.
    pub fn remember(&mut self, lease_id: &str, request_id: &str, digest: &[u8], plan: Arc<StepPlan>) {
        if let Some(holdings) = self.leases.get_mut(lease_id) {
            let (request_id, digest) = (request_id.to_string(), digest.to_vec());
            holdings.answers.push_back(Answer { request_id, digest, plan });
            if holdings.answers.len() > REMEMBERED_PLANS {
                holdings.answers.pop_front();
            }
        }
    }

    /// Whether an admission would be accepted of a tenant now, and what it would take; takes nothing. What steps in flight
    /// fill is not counted as found.
    pub fn check_admission(&mut self, tenant: &[u8], admission: &Admission, reserve: usize) -> AdmissionCheck {
        let tenant_id = self.enter_tenant(tenant);
        let Books { geometry, pool, .. } = &*self;
        let room = Room { geometry, pool, tenant: tenant_id };
        let found = self.find_cached(&admission.tokens, &admission.salt, tenant);
        let num_parked = pool.num_parked(&found);
        let needed = geometry.num_blocks_for(admission.tokens.len().max(admission.reserved_tokens)) - found.len();
        let refusal = room
            .refuse_impossible(admission)
            .or_else(|| refuse_no_row(admission.seq_id, &self.table, geometry))
            .or_else(|| room.refuse(admission.seq_id, needed, num_parked, reserve));
        let (num_cached_tokens, available) = (found.len() * geometry.block_size, room.num_available(num_parked));
        AdmissionCheck { num_cached_tokens, needed, available, refusal }
    }

    /// Nothing touches the step's blocks any more.
    pub(crate) fn finish(&mut self, step: &StepInFlight) -> Result<()> {
        step.pinned.iter().try_for_each(|blocks| self.pool.unpin(blocks))?;
        step.pinned_in_host.iter().try_for_each(|blocks| self.host.unpin(blocks))?;
        step.released_rows.iter().for_each(|row| drop(self.table.leave(*row)));
        Ok(())
    }

    /// Makes the blocks from `first` to before `end` unfindable; returns how many were. The first ones: takes all pins back.
    pub fn reset_prefix_cache(&mut self, first: BlockId, end: BlockId, now: f64) -> Result<usize> {
        if first == 0 {
            self.drop_pins()?;
        }
        Ok(self.pool.drop_cached(first, end, now))
    }

    // -- looking ------------------------------------------------------------------------------------------------------

    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    pub fn host(&self) -> &HostPool {
        &self.host
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

    /// Rows in the worker: sequences that leases hold, and those released that steps in flight still run; but for those
    /// in the host tier.
    pub fn num_rows(&self) -> usize {
        self.table.len()
    }

    /// Sequences that leases hold in the host tier.
    pub fn num_offloaded(&self) -> usize {
        self.rows().filter(|row| self.table.get(*row).is_offloaded()).count()
    }

    /// Steps planned and not reported, of all leases. O(leases).
    pub fn num_steps_in_flight(&self) -> usize {
        self.leases.values().map(|lease| lease.in_flight.len()).sum()
    }

    /// Rows of all leases' sequences.
    fn rows(&self) -> impl Iterator<Item = Row> {
        self.leases.values().flat_map(|lease| lease.sequences.values().copied())
    }

    /// Tokens that an admission would find in the cache; takes nothing.
    pub fn num_cached_tokens(&self, tokens: &[i32], salt: &[u8], tenant: &[u8]) -> usize {
        self.find_cached(tokens, salt, tenant).len() * self.geometry.block_size
    }

    /// The blocks that an admission would find in the cache, in order.
    fn find_cached(&self, tokens: &[i32], salt: &[u8], tenant: &[u8]) -> Vec<BlockId> {
        let size = self.geometry.block_size;
        let num_usable = tokens.len().saturating_sub(1); // one token is left to compute
        let num_full = num_usable.min(self.geometry.max_tokens()) / size;
        let root = root_hash(tenant, salt, &self.geometry.model_fingerprint);
        let mut hashes = Vec::new();
        chain_hashes(root, &tokens[..num_full * size], size, &mut hashes);
        self.pool.index().find(&hashes)
    }

    /// Tokens in active blocks, each block counted once, as its fullest holder fills it. O(sequences), if few share.
    pub fn num_held_tokens(&self) -> usize {
        let size = self.geometry.block_size;
        let held = |row: &Row| {
            let sequence = self.table.get(*row);
            (sequence, sequence.num_known().max(sequence.num_scheduled))
        };
        let sequences = || self.rows().map(|row| held(&row));
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

/// What would become of an admission.
#[derive(Debug)]
pub struct AdmissionCheck {
    pub num_cached_tokens: usize,
    /// Blocks that it would be handed out, now or later.
    pub needed: usize,
    /// Blocks that the tenant could take.
    pub available: usize,
    pub refusal: Option<Refusal>,
}

/// The worker keeps no more sequences.
pub fn refuse_no_row(seq_id: i64, table: &SequenceTable, geometry: &Geometry) -> Option<Refusal> {
    let limit = geometry.max_sequences;
    if table.len() < limit {
        return None;
    }
    let message = format!("sequence {seq_id} would be one more than the {limit} the worker has room for");
    Some(Refusal::new(Reason::TooManySequences, message).with("sequence_id", seq_id).with("limit", limit))
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
    use crate::advice::Level;
    use crate::eviction::POLICIES;
    use crate::plans::{Extend, Fork, PlanItem, Restore, Retention, ReturnHint, Trim};
    use crate::pool::tests::Random;
    use crate::settle::{StepOutcome, StepReport};

    pub(crate) fn geometry(num_usable: usize) -> Geometry {
        Geometry {
            block_size: 2,
            num_blocks: num_usable + 1,
            num_host_blocks: 6,
            max_sequences: 16,
            max_sequence_tokens: 64,
            vocab_size: 100,
            model_fingerprint: b"f".to_vec(),
            has_recurrent_state: false,
        }
    }

    /// Books with leases "a" and "b" on blocks of two tokens; calls without a lease are those of "a".
    pub(crate) struct Bench(pub Books);

    impl Bench {
        pub(crate) fn new(num_usable: usize) -> Bench {
            Bench::with_policy("lru", num_usable)
        }

        /// For a model with a state per sequence.
        pub(crate) fn with_states(num_usable: usize) -> Bench {
            Bench::of(Geometry { has_recurrent_state: true, ..geometry(num_usable) }, "lru")
        }

        fn with_policy(policy: &str, num_usable: usize) -> Bench {
            Bench::of(geometry(num_usable), policy)
        }

        fn of(geometry: Geometry, policy: &str) -> Bench {
            let mut books = Books::new(geometry, policy).unwrap();
            ["a", "b"].iter().for_each(|lease_id| books.open_lease(lease_id, b"", 30.0));
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

        pub(crate) fn offload(&mut self, seq_id: i64) -> StepPlan {
            self.plan(StepRequest { offloads: vec![seq_id], ..StepRequest::default() })
        }

        pub(crate) fn restore(&mut self, seq_id: i64) -> StepPlan {
            let restores = vec![Restore { seq_id, max_compute: 0 }];
            self.plan(StepRequest { restores, ..StepRequest::default() })
        }

        pub(crate) fn report(&self, lease_id: &str) -> StepReport {
            report(&self.0, lease_id)
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

    /// Of the lease's first step in flight: all computed, and 9 sampled wherever it samples.
    pub(crate) fn report(books: &Books, lease_id: &str) -> StepReport {
        let step = books.leases[lease_id].in_flight.front().unwrap();
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
        Bench::new(4).0.open_lease("a", b"", 30.0);
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
        let (offloads, restored) = (ids(3), ids(4));
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
            let reserved_tokens = [0, 0, num_tokens + random.below(9)][random.below(3)];
            let (resumed, retention) = (random.below(5) == 0, some_retention(random));
            Admission {
                seq_id,
                tokens,
                max_compute: random.below(4),
                reserved_tokens,
                retention,
                resumed,
                ..Admission::default()
            }
        };
        let admissions = admitted.into_iter().map(admit).collect();
        let restores = restored.into_iter().map(|seq_id| Restore { seq_id, max_compute: random.below(3) }).collect();
        let mut return_hints = Vec::new();
        for &seq_id in &releases {
            let expected_in = [None, Some(0.5), Some(20.0), Some(500.0)][random.below(4)];
            return_hints.push(ReturnHint { seq_id, expected_in });
        }
        StepRequest {
            releases,
            return_hints,
            offloads,
            trims,
            forks,
            extends,
            restores,
            admissions,
            ..StepRequest::default()
        }
    }

    fn some_retention(random: &mut Random) -> Vec<Retention> {
        let ttl = |random: &mut Random| [None, Some(1.0), Some(3.0)][random.below(3)];
        let range = |random: &mut Random, num_tokens| Retention {
            num_tokens,
            level: 1 + random.below(9) as Level,
            ttl: ttl(random),
        };
        match random.below(6) {
            0 => vec![range(random, 0)],
            1 => vec![range(random, 3), range(random, 2)],
            2 => vec![range(random, 4), range(random, 0)],
            _ => Vec::new(),
        }
    }

    pub(crate) fn some_share(random: &mut Random) -> Share {
        let floor = random.below(4);
        let quota = floor + random.below(8);
        Share { floor, quota, limit: quota + random.below(8), pin_budget: random.below(4) }
    }

    /// Pins, shares and resets.
    fn do_something_else(books: &mut Books, random: &mut Random, now: f64) {
        let tenant = [&b"x"[..], b"y"][random.below(2)];
        match random.below(5) {
            0 | 1 => {
                let tokens = random.tokens(6, 2);
                drop(books.pin_prefix(tenant, &tokens, b"", now + random.below(4) as f64).unwrap());
            }
            2 => {
                let id = books.pins().all().next().map(|pin| pin.id).unwrap_or_default();
                books.unpin_prefix(Some(tenant), &id).unwrap();
            }
            3 => {
                let everything = Share::everything(12);
                let shares = [(b"x".to_vec(), some_share(random)), (b"y".to_vec(), some_share(random))];
                books.set_shares(everything, shares.into_iter().skip(random.below(3)).collect());
            }
            _ if random.below(10) == 0 => drop(books.reset_prefix_cache(0, 13, now).unwrap()),
            _ => {}
        }
    }

    /// Whoever said how long it will be at most is never without room.
    fn check_promises(bench: &Bench, lease_id: &str, plan: &StepPlan) {
        for refused in &plan.refusals {
            let is_no_room = matches!(refused.refusal.reason, Reason::OutOfBlocks | Reason::QuotaExceeded);
            let row = bench.0.leases[lease_id].sequences.get(&(refused.seq_id as i32));
            if refused.item == PlanItem::Extend && is_no_room {
                assert_eq!(row.map(|row| bench.0.table.get(*row).reserved_tokens), Some(0), "{refused:?}");
            }
        }
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
        let mut reasons = BTreeSet::new();
        for (seed, policy) in (0..40).flat_map(|seed| POLICIES.map(|policy| (seed, policy))) {
            let (mut bench, mut random) = (Bench::with_policy(policy, 12), Random(seed));
            let (with_shares, mut now) = (seed % 2 == 1, 0.0);
            for (lease_id, tenant) in [("a", b"x"), ("b", b"x"), ("c", b"y")] {
                bench.0.close_lease(lease_id).unwrap();
                bench.0.open_lease(lease_id, tenant, 30.0);
            }
            let mut findable = BTreeSet::new();
            for _ in 0..240 {
                let lease_id = ["a", "b", "c"][random.below(3)];
                now += random.below(3) as f64 / 2.0;
                if with_shares && random.below(4) == 0 {
                    do_something_else(&mut bench.0, &mut random, now);
                }
                let num_in_flight = bench.0.leases[lease_id].in_flight.len();
                if num_in_flight < 3 && random.below(2) == 0 {
                    let request = some_request(&mut random);
                    let plan = bench.0.plan(lease_id, &request, now).unwrap().unwrap();
                    check_promises(&bench, lease_id, &plan);
                    reasons.extend(plan.refusals.iter().map(|refused| refused.refusal.reason.name()));
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
                    bench.0.open_lease(lease_id, if lease_id == "c" { b"y" } else { b"x" }, 30.0);
                }
                assert_eq!(bench.0.violations(), [""; 0]);
                assert_eq!(bench.0.num_held_tokens(), num_held_tokens(&bench.0));
                findable.extend((1..13).filter(|block| bench.0.pool().index().is_findable(*block)));
            }
            assert!(findable.len() > 4, "it gets somewhere: {findable:?}");
            ["a", "b", "c"].iter().for_each(|lease_id| bench.0.close_lease(lease_id).unwrap());
            bench.0.advance(now + 1e6).unwrap();
            assert_eq!((bench.0.num_rows(), bench.0.pool().num_allocatable()), (0, 12));
            assert_eq!((bench.0.num_offloaded(), bench.0.host().counts().free), (0, 6));
            assert_eq!((bench.0.violations(), bench.0.pool().accounts().num_reserved()), (vec![], 0));
        }
        let of_the_host_tier = ["OUT_OF_HOST_BLOCKS", "SEQUENCE_OFFLOADED", "SEQUENCE_BUSY"];
        for reason in ["OUT_OF_BLOCKS", "QUOTA_EXCEEDED", "SEQUENCE_TOO_LONG"].into_iter().chain(of_the_host_tier) {
            assert!(reasons.contains(reason), "{reasons:?}");
        }
    }
}
