//! The books of one pool in one epoch: the holders of each block, and the steps that may still access it.
//!
//! Single writer, no I/O, no clock: every method is atomic.

pub mod audit;
pub mod counters;
pub mod disk_reports;
pub mod explain;
pub mod explainer;
pub mod geometry;
pub mod hits;
pub mod kept_memory;
pub mod kept_prefix;
pub mod lease;
pub mod listing;
pub mod miss;
pub mod pinning;
pub mod pins;
pub mod planner;
pub mod plans;
pub mod resetting;
pub mod room;
pub mod sequences;
pub mod settle;
pub mod steps;
pub mod tables;
pub mod tenancy;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::books::counters::Counters;
use crate::books::geometry::Geometry;
use crate::books::hits::{Prefix, Tiers, find_cached};
use crate::books::lease::Lease;
use crate::books::lease::answers::RequestKey;
use crate::books::lease::leases::Leases;
use crate::books::pins::Pins;
use crate::books::planner::{Owner, StepPlanner};
use crate::books::plans::{Admission, GrantedStep, StepRequest};
use crate::books::room::{Room, refuse_no_row};
use crate::books::sequences::{Row, Sequence, SequenceTable};
use crate::books::steps::{Fill, StepInFlight};
use crate::books::tenancy::{Shares, Tenancy};
use crate::cache::accounts::Share;
use crate::cache::advice::millis;
use crate::cache::disk::DiskTier;
use crate::cache::eviction::policies::Policy;
use crate::cache::pool::BlockPool;
use crate::cache::prefix::{BlockId, Hash, Namespace, chain_hashes, root_hash};
use crate::cache::tenants::{TenantId, Tenants, beginning_of};
use crate::cache::tier::{Tier, TierPool};
use crate::errors::{Refusal, Result};

/// Books of one pool, from the attachment of an epoch to its end. Leases are known by names that the caller gives.
#[derive(Debug, Serialize, Deserialize)]
pub struct Books {
    pub(crate) geometry: Geometry,
    pub(crate) pool: BlockPool,
    pub(crate) host: TierPool,
    pub(crate) disk: DiskTier,
    pub(crate) table: SequenceTable,
    pub(crate) leases: Leases,
    pub(crate) tenants: Tenants,
    pub(crate) pins: Pins,
    shares: Shares,
    pub(crate) counters: Counters,
    /// The number of the last report that was entered.
    pub(crate) last_report: u64,
    /// When the epoch began, in seconds of the caller's clock.
    pub(crate) began_at: f64,
}

impl Books {
    /// None if there is no eviction policy of this name.
    pub fn new(geometry: Geometry, policy: &str) -> Option<Books> {
        // The policy that learns knows chains of one table.
        let policy = if geometry.has_windows() { "lru" } else { policy };
        let policy = Policy::named(policy, geometry.num_blocks)?;
        Some(Books::with_policy(geometry, policy))
    }

    pub fn with_policy(geometry: Geometry, policy: Policy) -> Books {
        let shares = Shares { default: Share::everything(geometry.num_blocks - 1), by_name: BTreeMap::new() };
        let pool = BlockPool::new(geometry.num_blocks, &geometry.groups, policy);
        let mut books = Books {
            pool: if geometry.host_cached_limit > 0 { pool.noting_evicted() } else { pool },
            host: TierPool::new(Tier::Host, geometry.num_host_blocks, geometry.host_cached_limit),
            disk: DiskTier::new(geometry.num_disk_blocks),
            geometry,
            table: SequenceTable::default(),
            leases: Leases::default(),
            tenants: Tenants::default(),
            pins: Pins::default(),
            shares,
            counters: Counters::default(),
            last_report: 0,
            began_at: 0.0,
        };
        books.keep_contents(true);
        books
    }

    /// The same books, of an epoch that began at this time of the caller's clock.
    pub fn begun(self, began_at: f64) -> Books {
        Books { began_at, ..self }
    }

    /// Keeps the contents of the blocks that become findable from now on, or none. New books keep them.
    pub fn keep_contents(&mut self, are_kept: bool) {
        let Geometry { num_blocks, block_size, vocab_size, .. } = self.geometry;
        let contents = &mut self.pool.records.contents;
        match (contents.are_kept(), are_kept) {
            (false, true) => contents.keep(num_blocks, block_size, vocab_size),
            (true, false) => contents.keep_none(),
            _ => {}
        }
    }

    /// A new lease without sequences. `ttl` is in seconds.
    pub fn open_lease(&mut self, lease_id: &str, tenant: &[u8], ttl: f64) {
        let lease = Lease::new(self.enter_tenant(tenant), tenant, ttl);
        self.leases.enter(lease_id, lease);
    }

    /// Sets the tenants' shares, by name; all others get the default.
    pub fn set_shares(&mut self, default: Share, by_name: BTreeMap<Vec<u8>, Share>) {
        self.shares = Shares { default, by_name };
        for name in self.shares.by_name.keys().cloned().collect::<Vec<_>>() {
            self.enter_tenant(&name);
        }
        for tenant in 0..self.tenants.len() as TenantId {
            self.pool.set_share(tenant, self.shares.of(self.tenants.name(tenant)));
        }
    }

    /// A tenant, known from now on.
    pub(crate) fn enter_tenant(&mut self, name: &[u8]) -> TenantId {
        let Books { tenants, shares, pool, .. } = self;
        Tenancy { tenants, shares, pool }.enter(name)
    }

    pub fn tenants(&self) -> &Tenants {
        &self.tenants
    }

    /// Ends a lease; `close_lease` frees its blocks. No effect if it is removed already.
    pub fn end_lease(&mut self, lease_id: &str) {
        if let Some(lease) = self.leases.get_mut(lease_id) {
            lease.is_ending = true;
        }
    }

    /// Frees all blocks of an ended lease, which no step can access any more. No effect if it is removed already.
    pub fn close_lease(&mut self, lease_id: &str) -> Result<()> {
        let Some(lease) = self.leases.remove(lease_id) else {
            return Ok(());
        };
        for step in &lease.in_flight {
            self.host.drop_copies(&step.host_arriving); // nobody knows if the step ran
            finish(step, &mut self.pool, &mut self.host, &mut self.disk, &mut self.table)?;
        }
        for row in self.rows_in_order(&lease) {
            let sequence = self.table.leave(row);
            self.pool.reserve(sequence.tenant, sequence.num_reserved, 0);
            self.pool.release(&sequence.blocks_tail_first(0))?;
            self.host.release(&sequence.in_host.unwrap_or_default().blocks)?;
        }
        Ok(())
    }

    /// A lease's contents. The caller has opened it.
    pub fn lease(&self, lease_id: &str) -> Option<&Lease> {
        self.leases.get(lease_id)
    }

    /// Rows of a lease's sequences, as they were admitted.
    pub fn rows_in_order(&self, lease: &Lease) -> Vec<Row> {
        let mut rows: Vec<Row> = lease.sequences.values().copied().collect();
        rows.sort_unstable_by_key(|row| self.table.get(*row).number);
        rows
    }

    /// Plans the lease's next step. None if there is no such lease. Refused (TOO_MANY_STEPS, INVALID_ARGUMENT) as a
    /// whole, or item by item. `now` is in seconds of the caller's clock. A plan with a request id is kept for a
    /// repetition.
    pub fn plan(
        &mut self,
        lease_id: &str,
        request: &StepRequest,
        now: f64,
        key: &RequestKey,
    ) -> Result<Option<Arc<GrantedStep>>> {
        let fills_elsewhere = self.fills_elsewhere(lease_id, request);
        let Books { geometry, pool, host, disk, table, tenants, shares, pins, counters, leases, .. } = self;
        let Some(lease) = leases.get_mut(lease_id) else {
            return Ok(None);
        };
        pool.end_times(millis(now));
        pins.end_expired(now, pool)?;
        request.refuse_repeated()?;
        lease.refuse_too_many_steps()?;
        let mut tenancy = Tenancy { tenants, shares, pool };
        let owner = |admission| tenancy.owner_of(admission, lease.tenant, request.names_tenants);
        let owners: Vec<Owner> = request.admissions.iter().map(owner).collect();
        let name = beginning_of(lease_id);
        let planner = StepPlanner::new(lease, pool, host, disk, table, geometry, tenants, counters, name, now);
        let planner = planner.knowing(fills_elsewhere);
        let plan = Arc::new(planner.run(request, owners)?);
        disk.write_behind(host, pool.accounts());
        counters.planned_steps += 1;
        lease.answers.remember(key, &plan);
        Ok(Some(plan))
    }

    /// The blocks that steps in flight of other leases fill, if an admission asks for it. Steps of a lease that has ended
    /// fill none: they may never be reported.
    fn fills_elsewhere(&self, lease_id: &str, request: &StepRequest) -> Vec<Fill> {
        if !request.admissions.iter().any(|admission| admission.waits_for_prefix || admission.explains_miss) {
            return Vec::new();
        }
        let others = self.leases.iter().filter(|(id, lease)| *id != lease_id && !lease.is_ending);
        others.flat_map(|(_, lease)| &lease.in_flight).flat_map(|step| &step.fills).cloned().collect()
    }

    /// True if an admission of a tenant would be accepted now, and the blocks that it would take; takes none. Blocks
    /// that steps in flight fill do not count as found.
    pub fn check_admission(&mut self, tenant: &[u8], admission: &Admission, reserve: usize) -> AdmissionCheck {
        let tenant_id = self.enter_tenant(tenant);
        let Books { geometry, pool, .. } = &*self;
        let room = Room { geometry, pool, tenant: tenant_id };
        let num_tokens = admission.tokens.len();
        let looked_up: &[i32] = if admission.cache_use.reads() { &admission.tokens } else { &[] };
        let mut hit = find_cached(looked_up, &admission.namespace, tenant, pool.index(), geometry);
        if self.host.copies().are_made() {
            let hashes = self.usable_hashes(looked_up, &admission.namespace, tenant);
            hit = self.tiers(&hashes, false).find(&hit).into_hit();
        }
        let num_cached_tokens = hit.num_blocks * geometry.block_size;
        let num_parked = pool.num_parked(&hit.blocks());
        let num_left = num_tokens - num_cached_tokens.min(num_tokens);
        let most = if admission.max_compute > 0 { num_left.min(admission.max_compute) } else { num_left };
        let ends = geometry.ends_of_tables(num_tokens, num_cached_tokens + most);
        let needed = hit.num_missing(&ends) + geometry.num_to_come(admission.reserved_tokens, &ends);
        let refusal = room
            .refuse_impossible(admission)
            .or_else(|| refuse_no_row(admission.seq_id, &self.table, geometry))
            .or_else(|| room.refuse(admission.seq_id, needed, num_parked, reserve));
        let available = room.num_available(num_parked);
        AdmissionCheck { num_cached_tokens, needed, available, refusal }
    }

    /// Removes the blocks from `first` to before `end` from the index for a caller of this name; returns their number. The
    /// first range also ends
    /// all pins, and sequences in the host tier will not publish their blocks at restore.
    pub fn reset_prefix_cache(&mut self, first: BlockId, end: BlockId, now: f64, by: &[u8]) -> Result<usize> {
        if first == 0 {
            self.pins.drop_all(&mut self.pool)?;
            self.table.withhold(self.leases.rows(), None, None, self.geometry.block_size);
            let (all, num_changes) = (0..self.tenants.len() as TenantId, self.pool.records.journal.num_changes());
            self.host.begin_reset(all.clone(), num_changes);
            self.disk.begin_reset(all, None, num_changes);
        }
        let caller = self.pool.records.callers.enter(by);
        Ok(self.pool.drop_cached(first, end, now, caller))
    }

    /// Removes the content of blocks from the cache, for a caller of this name; returns how many were findable.
    pub fn drop_blocks(&mut self, blocks: &[BlockId], now: f64, by: &[u8]) -> usize {
        let caller = self.pool.records.callers.enter(by);
        self.pool.drop_blocks(blocks, now, caller)
    }

    // -- looking ------------------------------------------------------------------------------------------------------

    /// The leases.
    pub fn leases(&self) -> &Leases {
        &self.leases
    }

    pub fn leases_mut(&mut self) -> &mut Leases {
        &mut self.leases
    }

    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// The number of the last report that was entered, 0 if none.
    pub fn last_report(&self) -> u64 {
        self.last_report
    }

    /// When the epoch began, in seconds of the caller's clock.
    pub fn began_at(&self) -> f64 {
        self.began_at
    }

    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    pub fn host(&self) -> &TierPool {
        &self.host
    }

    pub fn disk(&self) -> &DiskTier {
        &self.disk
    }

    pub fn pool_mut(&mut self) -> &mut BlockPool {
        &mut self.pool
    }

    pub fn counters(&self) -> Counters {
        self.counters
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
        self.leases.rows().filter(|row| self.table.get(*row).is_offloaded()).count()
    }

    /// Tokens that an admission would find in the cache; takes nothing.
    pub fn num_cached_tokens(&self, tokens: &[i32], namespace: &Namespace, tenant: &[u8]) -> usize {
        self.cached_tokens(tokens, namespace, tenant).iter().sum()
    }

    /// The same in the pool, behind that in the host tier, and behind that on the disk.
    pub fn cached_tokens(&self, tokens: &[i32], namespace: &Namespace, tenant: &[u8]) -> [usize; 3] {
        let hit = find_cached(tokens, namespace, tenant, self.pool.index(), &self.geometry);
        let in_pool = hit.num_blocks;
        let (mut with_host, mut with_disk) = (in_pool, in_pool);
        if self.host.copies().are_made() {
            let hashes = self.usable_hashes(tokens, namespace, tenant);
            with_host = self.tiers(&hashes, false).find(&hit).num_blocks;
            let has_disk = self.disk.copies().num_findable() > 0;
            with_disk = if has_disk { self.tiers(&hashes, true).find(&hit).num_blocks } else { with_host };
        }
        [in_pool, with_host - in_pool, with_disk - with_host].map(|num_blocks| num_blocks * self.geometry.block_size)
    }

    /// The hashes of the blocks that an admission may find.
    fn usable_hashes(&self, tokens: &[i32], namespace: &Namespace, tenant: &[u8]) -> Vec<Hash> {
        let num_usable = tokens.len().saturating_sub(1).min(self.geometry.max_tokens()); // one is left to compute
        let mut hashes = Vec::new();
        let root = root_hash(tenant, namespace, &self.geometry.model_fingerprint);
        chain_hashes(root, &tokens[..num_usable], self.geometry.block_size, &mut hashes);
        hashes
    }

    /// A prompt's blocks in the pool, the host tier, and perhaps the disk.
    pub(crate) fn tiers<'a>(&'a self, hashes: &'a [Hash], has_disk: bool) -> Tiers<'a> {
        let prefix = Prefix { geometry: &self.geometry, index: self.pool.index(), hashes };
        Tiers { prefix, host: Some(self.host.copies()), disk: has_disk.then(|| self.disk.copies()) }
    }

    /// Tokens in active blocks, each block counted once, as its fullest holder fills it. O(sequences), if few share.
    pub fn num_held_tokens(&self) -> usize {
        let size = self.geometry.block_size;
        let held = |row: &Row| {
            let sequence = self.table.get(*row);
            (sequence, sequence.num_known().max(sequence.num_scheduled))
        };
        let sequences = || self.leases.rows().map(|row| held(&row));
        let mut fills: HashMap<BlockId, usize> = HashMap::new(); // of the blocks that a holder does not fill
        for (sequence, num_tokens) in sequences() {
            let entries = sequence.tables.iter().flat_map(|table| table.entries());
            for (index, block) in entries.filter(|(index, _)| *index >= num_tokens / size) {
                let fill = fills.entry(block).or_default();
                *fill = num_tokens.saturating_sub(index * size).max(*fill);
            }
        }
        if fills.keys().any(|block| self.pool.holders().ref_count(*block) > 1) {
            for (sequence, num_tokens) in sequences() {
                for block in sequence.blocks_of(num_tokens / size * size, size) {
                    fills.entry(block).and_modify(|fill| *fill = size);
                }
            }
        }
        let num_missing: usize = fills.values().map(|fill| size - fill).sum();
        self.pool.counters().num_active * size - num_missing
    }
}

/// Nothing touches the step's blocks any more.
pub(crate) fn finish(
    step: &StepInFlight,
    pool: &mut BlockPool,
    host: &mut TierPool,
    disk: &mut DiskTier,
    table: &mut SequenceTable,
) -> Result<()> {
    step.holds.iter().try_for_each(|blocks| pool.end_holds(blocks))?;
    host.arrive(&step.host_arriving);
    disk.note_arrived(host, &step.host_arriving);
    step.host_holds.iter().try_for_each(|blocks| host.end_holds(blocks))?;
    step.released_rows.iter().for_each(|row| drop(table.leave(*row)));
    Ok(())
}

/// The outcome that an admission would have now.
#[derive(Debug)]
pub struct AdmissionCheck {
    pub num_cached_tokens: usize,
    /// Blocks that it would be allocated, now or later.
    pub needed: usize,
    /// Blocks that the tenant could take.
    pub available: usize,
    pub refusal: Option<Refusal>,
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::books::hits::LOOKED_UP_AT_ONCE;
    use crate::books::plans::{
        Breakpoint, CacheUse, ExpectedPrompt, Extend, Fork, PlanItem, Restore, Retention, ReturnHint, Trim,
    };
    use crate::books::settle::{StepOutcome, StepReport};
    use crate::cache::advice::Level;
    use crate::cache::eviction::policies::POLICIES;
    use crate::cache::groups::Span;
    use crate::cache::pool::tests::Random;
    use crate::errors::Reason;

    pub(crate) fn geometry(num_usable: usize) -> Geometry {
        Geometry {
            block_size: 2,
            num_blocks: num_usable + 1,
            num_host_blocks: 6,
            host_cached_limit: 0,
            num_disk_blocks: 0,
            max_sequences: 16,
            max_sequence_tokens: 64,
            vocab_size: 100,
            model_fingerprint: b"f".to_vec(),
            has_recurrent_state: false,
            max_drafts: 4,
            groups: vec![Span::Full],
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

        /// For a model with layer groups.
        pub(crate) fn with_groups(num_usable: usize, groups: &[Span]) -> Bench {
            Bench::of(Geometry { groups: groups.to_vec(), ..geometry(num_usable) }, "lru")
        }

        /// With copies of at most so many evicted blocks in the host tier.
        pub(crate) fn with_copies(num_usable: usize, host_cached_limit: usize) -> Bench {
            Bench::of(Geometry { host_cached_limit, ..geometry(num_usable) }, "lru")
        }

        /// With a disk of so many blocks below it.
        pub(crate) fn with_disk(num_usable: usize, host_cached_limit: usize, num_disk_blocks: usize) -> Bench {
            let with_host = geometry(num_usable);
            let num_host_blocks = with_host.num_host_blocks.max(host_cached_limit);
            Bench::of(Geometry { num_host_blocks, host_cached_limit, num_disk_blocks, ..with_host }, "lru")
        }

        /// For a model with layer groups, with both.
        pub(crate) fn with_groups_and_disk(num_usable: usize, groups: &[Span], num_disk_blocks: usize) -> Bench {
            let sizes =
                Geometry { num_host_blocks: 12, host_cached_limit: 12, num_disk_blocks, ..geometry(num_usable) };
            Bench::of(Geometry { groups: groups.to_vec(), ..sizes }, "lru")
        }

        fn with_policy(policy: &str, num_usable: usize) -> Bench {
            Bench::of(geometry(num_usable), policy)
        }

        fn of(geometry: Geometry, policy: &str) -> Bench {
            let mut books = Books::new(geometry, policy).unwrap();
            ["a", "b"].iter().for_each(|lease_id| books.open_lease(lease_id, b"", 30.0));
            Bench(books)
        }

        pub(crate) fn plan(&mut self, request: StepRequest) -> GrantedStep {
            self.plan_for("a", request)
        }

        pub(crate) fn plan_for(&mut self, lease_id: &str, request: StepRequest) -> GrantedStep {
            self.plan_at(lease_id, &request, 0.0)
        }

        pub(crate) fn plan_at(&mut self, lease_id: &str, request: &StepRequest, now: f64) -> GrantedStep {
            let plan = self.0.plan(lease_id, request, now, &RequestKey::default()).unwrap().unwrap();
            Arc::unwrap_or_clone(plan)
        }

        pub(crate) fn admit(&mut self, seq_id: i64, tokens: &[i32]) -> GrantedStep {
            self.plan(StepRequest { admissions: vec![admission(seq_id, tokens)], ..StepRequest::default() })
        }

        pub(crate) fn extend(&mut self, seq_id: i32, num_tokens: i64, append: &[i32]) -> GrantedStep {
            let extends = vec![Extend { seq_id, num_tokens, append: append.to_vec(), ..Extend::default() }];
            self.plan(StepRequest { extends, ..StepRequest::default() })
        }

        pub(crate) fn draft(&mut self, seq_id: i32, drafts: &[i32]) -> GrantedStep {
            let extends = vec![draft(seq_id, drafts)];
            self.plan(StepRequest { extends, ..StepRequest::default() })
        }

        pub(crate) fn fork(&mut self, parent_id: i64, child_ids: &[i64], num_tokens: i64) -> GrantedStep {
            let forks = vec![Fork { parent_id, child_ids: child_ids.to_vec(), num_tokens }];
            self.plan(StepRequest { forks, ..StepRequest::default() })
        }

        pub(crate) fn trim(&mut self, seq_id: i64, num_tokens: i64) -> GrantedStep {
            self.plan(StepRequest { trims: vec![Trim { seq_id, num_tokens }], ..StepRequest::default() })
        }

        pub(crate) fn release(&mut self, seq_ids: &[i64]) -> GrantedStep {
            self.plan(StepRequest { releases: seq_ids.to_vec(), ..StepRequest::default() })
        }

        pub(crate) fn offload(&mut self, seq_id: i64) -> GrantedStep {
            self.plan(StepRequest { offloads: vec![seq_id], ..StepRequest::default() })
        }

        pub(crate) fn restore(&mut self, seq_id: i64) -> GrantedStep {
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
            self.0.table.get(self.row(seq_id)).blocks().collect()
        }

        pub(crate) fn sequence(&mut self, seq_id: i32) -> &mut Sequence {
            let row = self.row(seq_id);
            self.0.table.get_mut(row)
        }
    }

    /// A report of the lease's first step in flight: everything computed, and token 9 sampled by each run that samples. So
    /// drafts are accepted as far as they are 9.
    pub(crate) fn report(books: &Books, lease_id: &str) -> StepReport {
        report_with(books, lease_id, |drafts| {
            let num_accepted = drafts.iter().take_while(|draft| **draft == 9).count();
            vec![9; num_accepted + 1]
        })
    }

    /// As above, with random tokens, and a random number of accepted drafts.
    pub(crate) fn some_report(books: &Books, lease_id: &str, random: &mut Random) -> StepReport {
        report_with(books, lease_id, |drafts| {
            let num_accepted = random.below(drafts.len() + 1);
            [&drafts[..num_accepted], &[random.below(2) as i32]].concat()
        })
    }

    /// A report of the lease's first step in flight, with the tokens that runs with these drafts sample.
    fn report_with(books: &Books, lease_id: &str, mut sample: impl FnMut(&[i32]) -> Vec<i32>) -> StepReport {
        let step = books.leases[lease_id].in_flight.front().unwrap();
        let mut report = StepReport {
            step_number: step.step_number,
            outcome: StepOutcome::Computed,
            seq_ids: step.runs.iter().map(|run| run.seq_id).collect(),
            token_counts: step.runs.iter().map(|run| run.sampled_position as i32).collect(),
            sampled_ids: vec![],
            sampled_tokens: vec![],
            sampled_counts: vec![],
            report_number: 0,
        };
        for (index, run) in step.runs.iter().enumerate().filter(|(_, run)| run.samples) {
            let drafts = step.drafts.get(&index).map_or(&[][..], Vec::as_slice);
            let tokens = sample(drafts);
            report.token_counts[index] -= (drafts.len() + 1 - tokens.len()) as i32;
            report.sampled_ids.push(run.seq_id);
            report.sampled_counts.extend((!step.drafts.is_empty()).then_some(tokens.len() as i32));
            report.sampled_tokens.extend(tokens);
        }
        report
    }

    /// An extend with drafts.
    pub(crate) fn draft(seq_id: i32, drafts: &[i32]) -> Extend {
        Extend { seq_id, has_drafts: true, num_tokens: 1 + drafts.len() as i64, append: drafts.to_vec() }
    }

    pub(crate) fn admission(seq_id: i64, tokens: &[i32]) -> Admission {
        Admission { seq_id, tokens: tokens.to_vec(), ..Admission::default() }
    }

    // -- leases -------------------------------------------------------------------------------------------------------

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
        assert!(bench.0.plan("c", &StepRequest::default(), 0.0, &RequestKey::default()).unwrap().is_none());
        assert!(bench.0.lease("c").is_none());
        bench.0.close_lease("c").unwrap();
        assert_eq!(bench.0.counters().planned_steps, 0);
        let steps = [bench.plan(StepRequest::default()), bench.plan(StepRequest::default())];
        assert_eq!((steps.map(|plan| plan.step_number), bench.0.counters().planned_steps), ([1, 2], 2));
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
        assert_eq!((bench.0.violations(), bench.0.num_cached_tokens(&[1, 2, 3], &b"".into(), b"")), (vec![], 2));
    }

    #[test]
    fn a_lookup_leaves_a_token_to_compute() {
        let mut bench = Bench::new(8);
        bench.admit(1, &[1, 2, 3, 4, 5]);
        bench.settle();
        let lengths =
            [0, 1, 2, 3, 4, 5].map(|count| bench.0.num_cached_tokens(&[1, 2, 3, 4, 5][..count], &b"".into(), b""));
        assert_eq!(lengths, [0, 0, 0, 2, 2, 4]);
        assert_eq!(bench.0.num_cached_tokens(&[1, 2, 3], &b"s".into(), b""), 0);
        assert_eq!(bench.0.num_cached_tokens(&[1, 2, 3], &b"".into(), b"t"), 0);
    }

    #[test]
    fn a_long_prefix_is_found_to_its_last_block() {
        let long: Vec<i32> = (0..4 * LOOKED_UP_AT_ONCE as i32).collect();
        let mut bench = Bench::new(long.len());
        bench.admit(1, &long);
        bench.settle();
        for num_same in [0, 1, LOOKED_UP_AT_ONCE - 1, LOOKED_UP_AT_ONCE, LOOKED_UP_AT_ONCE + 1, long.len() / 2 - 1] {
            let other = [&long[..2 * num_same], &vec![99; long.len() - 2 * num_same]].concat();
            assert_eq!(bench.0.num_cached_tokens(&other, &b"".into(), b""), 2 * num_same);
        }
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
            let num_drafts = [0, 0, 0, 0, 1, 3][random.below(6)];
            if append.is_empty() && num_drafts > 0 {
                return draft(seq_id as i32, &random.tokens(num_drafts, 2));
            }
            Extend { seq_id: seq_id as i32, num_tokens: 1 + random.below(2) as i64, append, ..Extend::default() }
        };
        let extends = extended.into_iter().map(extend).collect();
        let admit = |seq_id| {
            let num_tokens = 1 + random.below(9);
            let tokens = random.tokens(num_tokens, 2);
            let reserved_tokens = [0, 0, num_tokens + random.below(9)][random.below(3)];
            let (resumed, retention) = (random.below(5) == 0, some_retention(random));
            let mut apart = Random(random.0.rotate_left(17));
            Admission {
                seq_id,
                tokens,
                max_compute: random.below(4),
                reserved_tokens,
                retention,
                resumed,
                cache_use: [CacheUse::ReadAndWrite, CacheUse::WriteOnly, CacheUse::None]
                    [random.below(8).saturating_sub(5)],
                tenant: [None, None, Some(b"x".to_vec()), Some(b"z".to_vec())][random.below(4)].clone(),
                breakpoints: some_breakpoints(&mut apart, num_tokens),
                waits_for_prefix: apart.below(4) == 0,
                explains_miss: apart.below(2) == 0,
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
        let expected_prompts = (0..random.below(3)).map(|_| some_expected_prompt(random)).collect();
        StepRequest {
            releases,
            return_hints,
            offloads,
            expected_prompts,
            trims,
            forks,
            extends,
            restores,
            admissions,
            names_tenants: random.below(8) > 0,
            ..StepRequest::default()
        }
    }

    fn some_expected_prompt(random: &mut Random) -> ExpectedPrompt {
        let num_tokens = random.below(9);
        ExpectedPrompt {
            tokens: random.tokens(num_tokens, 2),
            tenant: [None, Some(b"x".to_vec()), Some(b"unknown".to_vec())][random.below(3)].clone(),
            expected_in: [0.0, 2.0][random.below(2)],
            ..ExpectedPrompt::default()
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

    fn some_breakpoints(random: &mut Random, num_tokens: usize) -> Vec<Breakpoint> {
        let first = 1 + random.below(num_tokens);
        let mut breakpoint = |num_tokens| Breakpoint { num_tokens, ttl: 1.0 + random.below(4) as f64 };
        match num_tokens % 3 {
            0 => vec![breakpoint(first)],
            1 if first < num_tokens => vec![breakpoint(first), breakpoint(num_tokens)],
            _ => Vec::new(),
        }
    }

    pub(crate) fn some_share(random: &mut Random) -> Share {
        let floor = random.below(4);
        let quota = floor + random.below(8);
        Share {
            floor,
            quota,
            limit: quota + random.below(8),
            pin_budget: random.below(4),
            keep_limit: floor + quota % 3,
        }
    }

    /// Pins, shares and resets.
    fn do_something_else(books: &mut Books, random: &mut Random, now: f64) {
        let tenant = [&b"x"[..], b"y"][random.below(2)];
        match random.below(5) {
            0 | 1 => {
                let tokens = random.tokens(6, 2);
                drop(books.pin_prefix(tenant, &tokens, &b"".into(), now + random.below(4) as f64).unwrap());
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
            _ if random.below(10) == 0 => drop(books.reset_prefix_cache(0, 13, now, b"").unwrap()),
            _ => {}
        }
    }

    /// The worker reports some of the open orders about the disk, in any order.
    fn end_some_orders(books: &mut Books, random: &mut Random) {
        let open: Vec<u64> = books.disk().orders_after(0).map(|(number, _)| number).collect();
        let (done, failed) = random.sample(open).into_iter().partition::<Vec<u64>, _>(|_| random.below(6) > 0);
        books.end_disk_orders(&done, &failed).unwrap();
    }

    /// A sequence with a reservation never runs out of blocks.
    fn check_promises(bench: &Bench, lease_id: &str, plan: &GrantedStep) {
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
        for row in books.leases.values().flat_map(|lease| lease.sequences.values()) {
            let sequence = books.table.get(*row);
            let num_tokens = sequence.num_known().max(sequence.num_scheduled);
            for (index, block) in sequence.tables.iter().flat_map(|table| table.entries()) {
                let fill = num_tokens.saturating_sub(2 * index).min(2);
                fills[block as usize] = fill.max(fills[block as usize]);
            }
        }
        fills.into_iter().sum()
    }

    /// The layer groups of models.
    const SHAPES: [&[Span]; 5] = [
        &[Span::Full],
        &[Span::Full, Span::Sliding(3)],
        &[Span::Sliding(4)],
        &[Span::Full, Span::Sliding(1), Span::Chunked(4)],
        &[Span::Full, Span::Full, Span::Sliding(5), Span::Sliding(5)],
    ];

    #[test]
    fn whatever_is_asked_the_books_are_right() {
        let (mut reasons, mut most_kept, mut num_accepted) = (BTreeSet::new(), [0; SHAPES.len()], 0);
        let mut found_below = [[0; 2]; SHAPES.len()];
        let shapes = SHAPES.into_iter().flat_map(|groups| POLICIES.map(|policy| (policy, groups)));
        let shapes: Vec<_> = shapes.filter(|(policy, groups)| groups.len() == 1 || *policy == "lru").collect();
        for (seed, (policy, groups)) in (0..40).flat_map(|seed| shapes.iter().map(move |shape| (seed, *shape))) {
            let (host_cached_limit, num_disk_blocks) = [(0, 0), (0, 0), (6, 0), (4, 8)][seed as usize / 2 % 4];
            let of_groups = Geometry { groups: groups.to_vec(), host_cached_limit, num_disk_blocks, ..geometry(12) };
            let (mut bench, mut random) = (Bench::of(of_groups, policy), Random(seed));
            let (with_shares, mut now) = (seed % 2 == 1, 0.0);
            for (lease_id, tenant) in [("a", b"x"), ("b", b"x"), ("c", b"y")] {
                bench.0.close_lease(lease_id).unwrap();
                bench.0.open_lease(lease_id, tenant, 30.0);
            }
            let (mut findable, mut written) = (BTreeSet::new(), 0);
            for _ in 0..400 {
                let lease_id = ["a", "b", "c"][random.below(3)];
                now += random.below(3) as f64 / 2.0;
                if with_shares && random.below(4) == 0 {
                    do_something_else(&mut bench.0, &mut random, now);
                }
                let num_in_flight = bench.0.leases[lease_id].in_flight.len();
                if num_in_flight < 3 && random.below(2) == 0 {
                    let request = some_request(&mut random);
                    let plan = bench.plan_at(lease_id, &request, now);
                    check_promises(&bench, lease_id, &plan);
                    written += plan.admitted_written_counts.iter().map(|count| u64::from(*count)).sum::<u64>();
                    let num_kept = bench.0.pool().parking().keeps().map_or(0, |keeps| keeps.len());
                    let shape = SHAPES.iter().position(|shape| *shape == groups).unwrap();
                    most_kept[shape] = num_kept.max(most_kept[shape]);
                    reasons.extend(plan.refusals.iter().map(|refused| refused.refusal.reason.name()));
                } else if num_in_flight > 0 {
                    let mut report = some_report(&bench.0, lease_id, &mut random);
                    let step = &bench.0.leases[lease_id].in_flight[0];
                    if step.is_doomed || random.below(8) == 0 {
                        report.outcome = [StepOutcome::Failed, StepOutcome::Skipped][random.below(2)];
                    }
                    bench.0.settle(lease_id, &report).unwrap();
                    end_some_orders(&mut bench.0, &mut Random(random.0.rotate_left(23)));
                } else if random.below(20) == 0 {
                    bench.0.close_lease(lease_id).unwrap();
                    bench.0.open_lease(lease_id, if lease_id == "c" { b"y" } else { b"x" }, 30.0);
                }
                assert_eq!(bench.0.violations(), [""; 0]);
                assert_eq!(bench.0.num_held_tokens(), num_held_tokens(&bench.0));
                findable.extend((1..13).filter(|block| bench.0.pool().index().is_findable(*block)));
            }
            assert!(findable.len() > 4, "it gets somewhere: {findable:?} {groups:?}");
            num_accepted += bench.0.counters().accepted_drafts;
            let shape = SHAPES.iter().position(|shape| *shape == groups).unwrap();
            found_below[shape][0] += bench.0.counters().found_in_host_tokens;
            found_below[shape][1] += bench.0.disk().counters().read;
            let accounts = bench.0.pool().accounts();
            let of_tenants = (0..accounts.len()).map(|tenant| accounts.get(tenant as TenantId).tokens.written);
            assert_eq!((bench.0.counters().written_tokens, of_tenants.sum::<u64>()), (written, written));
            ["a", "b", "c"].iter().for_each(|lease_id| bench.0.close_lease(lease_id).unwrap());
            bench.0.advance(now + 1e6).unwrap();
            assert_eq!((bench.0.num_rows(), bench.0.pool().num_allocatable()), (0, 12));
            assert_eq!(bench.0.pool().parking().keeps().map_or(0, |keeps| keeps.len()), 0);
            let counts = bench.0.host().counts();
            assert_eq!((bench.0.num_offloaded(), counts.held), (0, 0));
            assert_eq!(counts.free + counts.cached + bench.0.disk().host_blocks().1.len(), 6, "{counts:?}");
            assert_eq!((bench.0.violations(), bench.0.pool().accounts().num_reserved()), (vec![], 0));
        }
        assert!(num_accepted > 400, "{num_accepted} drafts");
        assert!(most_kept.iter().all(|most| *most > 3), "{most_kept:?}");
        assert!(found_below.iter().all(|[in_host, _]| *in_host > 0), "{found_below:?}");
        assert!(found_below[..3].iter().all(|[_, on_disk]| *on_disk > 0), "{found_below:?}");
        let of_the_host_tier = ["OUT_OF_HOST_BLOCKS", "SEQUENCE_OFFLOADED", "SEQUENCE_BUSY"];
        for reason in ["OUT_OF_BLOCKS", "QUOTA_EXCEEDED", "SEQUENCE_TOO_LONG", "PREFIX_BEING_COMPUTED"]
            .into_iter()
            .chain(of_the_host_tier)
        {
            assert!(reasons.contains(reason), "{reasons:?}");
        }
    }
}
