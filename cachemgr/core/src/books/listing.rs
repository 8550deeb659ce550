//! Lists sequences and blocks: in pages, and as changes since a number of the journal.

use crate::books::Books;
use crate::books::geometry::Geometry;
use crate::books::lease::leases::Leases;
use crate::books::sequences::{Row, SequenceTable};
use crate::cache::journal::{Change, Journal, Known};
use crate::cache::pool::{BlockPool, BlockState};
use crate::cache::prefix::{BlockId, NULL_BLOCK};
use crate::cache::tenants::{TenantId, Tenants};
use crate::cache::tier_copies::{Tier, TierBlockId, TierCopies};
use crate::wire::messages::{self, Block, BlockEvent, BlockEventKind};

/// The limit of blocks scanned for one page: a page with few matches ends there, and the next one continues.
pub const MAX_SCANNED: BlockId = 65_536;
/// Owns nothing.
const NOBODY: TenantId = TenantId::MAX;

/// Which states a list has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum States {
    Any,
    NotFree,
    Only(BlockState),
}

impl States {
    fn has(self, state: BlockState) -> bool {
        match self {
            States::Any => true,
            States::NotFree => state != BlockState::Free,
            States::Only(only) => state == only,
        }
    }
}

/// Which blocks a list has: all that each of these lets through.
#[derive(Debug, Clone, Copy)]
pub struct BlockFilter<'a> {
    pub states: States,
    /// Only this tenant's, which none that is free is.
    pub tenant: Option<&'a [u8]>,
    /// Only those in the tables of this lease.
    pub lease_id: Option<&'a str>,
}

impl Books {
    /// Returns the view of these books that lists read.
    pub fn listing(&self) -> Listing<'_> {
        let Books { geometry, pool, host, disk, table, leases, tenants, .. } = self;
        let (host, disk) = (host.copies(), disk.copies());
        Listing { geometry, pool, host, disk, table, leases, tenants }
    }
}

/// Reads the books for lists.
pub struct Listing<'a> {
    geometry: &'a Geometry,
    pool: &'a BlockPool,
    host: &'a TierCopies,
    disk: &'a TierCopies,
    table: &'a SequenceTable,
    leases: &'a Leases,
    tenants: &'a Tenants,
}

impl Listing<'_> {
    /// The first `most` of a lease's sequences with ids from `first` on, by id; of one tenant, if it is given.
    /// Cost: O(the lease's sequences).
    pub fn sequences_from(&self, lease_id: &str, first: i32, most: usize, tenant: Option<&[u8]>) -> Vec<Row> {
        let tenant = self.tenant_of_filter(tenant);
        let is_listed =
            |id: i32, row: Row| id >= first && tenant.is_none_or(|tenant| self.table.get(row).tenant == tenant);
        let sequences = self.leases.get(lease_id).into_iter().flat_map(|lease| &lease.sequences);
        let mut listed: Vec<(i32, Row)> =
            sequences.map(|(id, row)| (*id, *row)).filter(|(id, row)| is_listed(*id, *row)).collect();
        if most < listed.len() {
            listed.select_nth_unstable(most);
            listed.truncate(most);
        }
        listed.sort_unstable();
        listed.into_iter().map(|(_, row)| row).collect()
    }

    /// A page of a list of blocks: at most `most` of those from `first` on, and the first block of the next page, if
    /// there is one. Cost: O(MAX_SCANNED), and for a lease its table entries.
    pub fn list_blocks(&self, first: BlockId, most: usize, filter: &BlockFilter) -> (Vec<BlockId>, Option<BlockId>) {
        let first = first.max(NULL_BLOCK + 1);
        let num_blocks = self.geometry.num_blocks as BlockId;
        let end = num_blocks.min(first.saturating_add(MAX_SCANNED));
        let tenant = self.tenant_of_filter(filter.tenant);
        let held = filter.lease_id.map(|lease_id| self.held_by(lease_id, first, end));
        let is_listed = |block: &BlockId| {
            held.as_ref().is_none_or(|held| held[(block - first) as usize])
                && filter.states.has(self.pool.state(*block))
                && tenant.is_none_or(|tenant| self.pool.owner(*block) == Some(tenant))
        };
        let mut listed: Vec<BlockId> = (first..end).filter(is_listed).take(most + 1).collect();
        let next = if listed.len() > most { listed.pop() } else { (end < num_blocks).then_some(end) };
        (listed, next)
    }

    fn tenant_of_filter(&self, name: Option<&[u8]>) -> Option<TenantId> {
        name.map(|name| self.tenants.find(name).unwrap_or(NOBODY))
    }

    /// Which blocks of a range are in a lease's tables.
    fn held_by(&self, lease_id: &str, first: BlockId, end: BlockId) -> Vec<bool> {
        let mut held = vec![false; end.saturating_sub(first) as usize];
        let rows = self.leases.get(lease_id).into_iter().flat_map(|lease| lease.sequences.values());
        for block in rows.flat_map(|row| self.table.get(*row).blocks()) {
            if let Some(held) = held.get_mut(block.wrapping_sub(first) as usize) {
                *held = true;
            }
        }
        held
    }

    /// A block as lists show it.
    pub fn describe(&self, block: BlockId) -> Block {
        let pool = self.pool;
        let Some(owner) = pool.owner(block) else {
            return free_block(block);
        };
        Block {
            block_id: block as i32,
            state: number_of(pool.state(block)),
            reference_count: pool.holders().ref_count(block) as i32,
            pin_count: pool.holders().hold_count(block) as i32,
            prefix_hash: pool.prefix_hash(block).map(|hash| hash.to_vec()).unwrap_or_default(),
            tenant: String::from_utf8_lossy(self.tenants.name(owner)).into_owned(),
            priority: pool.parking().level(block).into(),
            prefix_pin_count: pool.pins().count(block) as i32,
            layer_group: pool.groups.of(block).into(),
        }
    }

    /// A page of a snapshot: events of the blocks that are not free, and the first block of the next page, if there is
    /// one. `known` has their present state then.
    pub fn snapshot(
        &self,
        first: BlockId,
        most: usize,
        known: &mut Known,
        tenant: Option<&[u8]>,
        with_content: bool,
    ) -> (Vec<BlockEvent>, Option<BlockId>) {
        let filter = BlockFilter { states: States::NotFree, tenant, lease_id: None };
        let (blocks, next) = self.list_blocks(first, most, &filter);
        known.read_page(next.unwrap_or(BlockId::MAX), self.pool.records.journal.num_changes());
        let kind =
            |block| if self.pool.index().is_findable(block) { BlockEventKind::Stored } else { BlockEventKind::Changed };
        (blocks.into_iter().map(|block| self.event(block, kind(block), with_content)).collect(), next)
    }

    /// The next changed blocks that a reader does not know, in their present state; `known` has them then. None if the
    /// journal does not keep the next change any more. A tenant sees blocks that it has lost as free.
    pub fn changes(
        &self,
        known: &mut Known,
        most: usize,
        tenant: Option<&[u8]>,
        with_content: bool,
    ) -> Option<Vec<BlockEvent>> {
        let tenant = self.tenant_of_filter(tenant);
        let event_of = |change: Change| {
            let Change { block, of_content, was_own } = change;
            let is_seen = tenant.is_none_or(|tenant| self.pool.owner(block) == Some(tenant));
            if is_seen {
                let kind = match of_content {
                    true if self.pool.index().is_findable(block) => BlockEventKind::Stored,
                    true => BlockEventKind::Removed,
                    false => BlockEventKind::Changed,
                };
                return Some(self.event(block, kind, with_content));
            }
            let kind = if of_content { BlockEventKind::Removed } else { BlockEventKind::Changed };
            was_own.then(|| BlockEvent { kind: kind as i32, block: Some(free_block(block)), ..BlockEvent::default() })
        };
        tell(&self.pool.records.journal, known, most, tenant, event_of)
    }

    fn event(&self, block: BlockId, kind: BlockEventKind, with_content: bool) -> BlockEvent {
        let mut event = BlockEvent { kind: kind as i32, block: Some(self.describe(block)), ..BlockEvent::default() };
        if with_content
            && kind == BlockEventKind::Stored
            && let Some((tokens, namespace)) = self.pool.records.contents.get(block)
        {
            let origin = self.pool.index().origin(block);
            event.token_ids = tokens;
            event.salt = namespace.salt.clone();
            event.adapter = namespace.adapter.clone();
            event.parent_prefix_hash = if origin.index > 0 { origin.parent.to_vec() } else { Vec::new() };
        }
        event
    }

    // -- copies of evicted blocks -------------------------------------------------------------------------------------

    /// The copies in a tier below the pool.
    pub fn copies(&self, tier: Tier) -> &TierCopies {
        match tier {
            Tier::Host => self.host,
            Tier::Disk => self.disk,
        }
    }

    /// As `snapshot`, of the copies in a tier that can be found. Cost: O(MAX_SCANNED).
    pub fn snapshot_of_copies(
        &self,
        tier: Tier,
        first: TierBlockId,
        most: usize,
        known: &mut Known,
        tenant: Option<&[u8]>,
    ) -> (Vec<BlockEvent>, Option<TierBlockId>) {
        let (copies, tenant) = (self.copies(tier), self.tenant_of_filter(tenant));
        let num_blocks = copies.num_blocks() as TierBlockId;
        let end = num_blocks.min(first.saturating_add(MAX_SCANNED));
        let mut stored = (first..end).filter_map(|block| self.stored_copy(tier, block, tenant));
        let events: Vec<BlockEvent> = stored.by_ref().take(most).collect();
        let following = stored.next().map(|event| event.block.unwrap_or_default().block_id as TierBlockId);
        let next = following.or_else(|| (end < num_blocks).then_some(end));
        known.read_page(next.unwrap_or(TierBlockId::MAX), copies.journal().num_changes());
        (events, next)
    }

    /// As `changes`, of the copies in a tier.
    pub fn changes_of_copies(
        &self,
        tier: Tier,
        known: &mut Known,
        most: usize,
        tenant: Option<&[u8]>,
    ) -> Option<Vec<BlockEvent>> {
        let tenant = self.tenant_of_filter(tenant);
        let event_of = |Change { block, was_own, .. }: Change| {
            let is_told = tenant.is_none() || was_own;
            let removed = || is_told.then(|| removed_copy(tier, block));
            self.stored_copy(tier, block, tenant).or_else(removed)
        };
        tell(self.copies(tier).journal(), known, most, tenant, event_of)
    }

    /// None if the block has no copy that can be found, or that of another tenant.
    fn stored_copy(&self, tier: Tier, block: TierBlockId, tenant: Option<TenantId>) -> Option<BlockEvent> {
        let content = self.copies(tier).content(block)?;
        let described = || Block {
            block_id: block as i32,
            state: number_of(BlockState::Cached),
            prefix_hash: content.prefix_hash().to_vec(),
            layer_group: content.group.into(),
            tenant: String::from_utf8_lossy(self.tenants.name(content.tenant)).into_owned(),
            ..Block::default()
        };
        let is_seen = tenant.is_none_or(|tenant| tenant == content.tenant);
        is_seen.then(|| copy_event(tier, BlockEventKind::Stored, described()))
    }
}

/// The events of the next changes in a journal that a reader does not know; `known` has them then.
fn tell(
    journal: &Journal,
    known: &mut Known,
    most: usize,
    tenant: Option<TenantId>,
    event_of: impl Fn(Change) -> Option<BlockEvent>,
) -> Option<Vec<BlockEvent>> {
    let (changes, next) = journal.since(known, most, tenant)?;
    let (blocks, events): (Vec<BlockId>, Vec<BlockEvent>) =
        changes.into_iter().filter_map(|change| Some((change.block, event_of(change)?))).unzip();
    known.go_on(next, blocks, journal.num_changes());
    Some(events)
}

fn removed_copy(tier: Tier, block: TierBlockId) -> BlockEvent {
    copy_event(tier, BlockEventKind::Removed, free_block(block))
}

fn copy_event(tier: Tier, kind: BlockEventKind, block: Block) -> BlockEvent {
    let medium = match tier {
        Tier::Host => messages::Medium::Host,
        Tier::Disk => messages::Medium::Disk,
    };
    BlockEvent { kind: kind as i32, medium: medium as i32, block: Some(block), ..BlockEvent::default() }
}

fn free_block(block: BlockId) -> Block {
    Block { block_id: block as i32, state: number_of(BlockState::Free), ..Block::default() }
}

fn number_of(state: BlockState) -> i32 {
    let state = match state {
        BlockState::Free => messages::BlockState::Free,
        BlockState::Cached => messages::BlockState::Cached,
        BlockState::Active => messages::BlockState::Active,
        BlockState::Retired => messages::BlockState::Retired,
    };
    state as i32
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;
    use crate::books::plans::StepRequest;
    use crate::books::tests::{Bench, admission, geometry, some_request};
    use crate::cache::eviction::policies::POLICIES;
    use crate::cache::pool::tests::Random;
    use crate::cache::prefix::chain_hashes;

    const ALL: BlockFilter = BlockFilter { states: States::Any, tenant: None, lease_id: None };

    /// Lease "a" of tenant "alice" and "b" of "bob".
    fn bench(policy: &str, num_usable: usize) -> Bench {
        let mut books = Books::new(geometry(num_usable), policy).unwrap();
        [("a", "alice"), ("b", "bob")]
            .iter()
            .for_each(|(lease, tenant)| books.open_lease(lease, tenant.as_bytes(), 30.0));
        Bench(books)
    }

    fn admit(bench: &mut Bench, lease_id: &str, seq_id: i64, tokens: &[i32]) {
        let request = StepRequest { admissions: vec![admission(seq_id, tokens)], ..StepRequest::default() };
        assert!(bench.plan_for(lease_id, request).refusals.is_empty());
    }

    fn settle(bench: &mut Bench, lease_id: &str) {
        bench.0.settle(lease_id, &bench.report(lease_id)).unwrap();
    }

    // -- pages --------------------------------------------------------------------------------------------------------

    #[test]
    fn sequences_come_by_id_from_one_on() {
        let mut bench = bench("lru", 8);
        [7, 3, 9, 5].iter().for_each(|seq_id| admit(&mut bench, "a", *seq_id, &[1]));
        let listed = |first, most| {
            let rows = bench.0.listing().sequences_from("a", first, most, None);
            rows.into_iter().map(|row| bench.0.sequence(row).seq_id).collect::<Vec<_>>()
        };
        assert_eq!((listed(0, 9), listed(0, 2), listed(4, 2)), (vec![3, 5, 7, 9], vec![3, 5], vec![5, 7]));
        assert_eq!((listed(9, 4), listed(10, 4), listed(0, 0)), (vec![9], vec![], vec![]));
        assert_eq!(bench.0.listing().sequences_from("none", 0, 9, None), [0; 0]);
    }

    #[test]
    fn a_page_ends_with_its_last_block_and_says_where_the_next_begins() {
        let books = bench("lru", 5).0;
        assert_eq!(books.listing().list_blocks(0, 9, &ALL), (vec![1, 2, 3, 4, 5], None));
        assert_eq!(books.listing().list_blocks(0, 2, &ALL), (vec![1, 2], Some(3)));
        assert_eq!(books.listing().list_blocks(3, 3, &ALL), (vec![3, 4, 5], None));
        assert_eq!(
            (books.listing().list_blocks(6, 3, &ALL), books.listing().list_blocks(BlockId::MAX, 3, &ALL)),
            ((vec![], None), (vec![], None))
        );
    }

    #[test]
    fn every_filter_counts() {
        let mut bench = bench("lru", 9);
        admit(&mut bench, "a", 1, &[1, 2, 3]);
        settle(&mut bench, "a");
        admit(&mut bench, "a", 2, &[4, 5, 6]);
        settle(&mut bench, "a");
        bench.release(&[1]);
        admit(&mut bench, "b", 1, &[1, 2]);
        let listed = |states, tenant: Option<&str>, lease_id| {
            bench.0.listing().list_blocks(0, 99, &BlockFilter { states, tenant: tenant.map(str::as_bytes), lease_id }).0
        };
        let only = States::Only;
        assert_eq!(listed(only(BlockState::Cached), None, None), [1]);
        assert_eq!(listed(only(BlockState::Active), None, None), [2, 3, 4]);
        assert_eq!(listed(States::NotFree, None, None), [1, 2, 3, 4]);
        assert_eq!(listed(States::Any, Some("alice"), None), [1, 3, 4]);
        assert_eq!(listed(only(BlockState::Free), Some("alice"), None), [0; 0]);
        assert_eq!(listed(States::Any, Some("carla"), None), [0; 0]);
        assert_eq!((listed(States::Any, None, Some("a")), listed(States::Any, None, Some("b"))), (vec![3, 4], vec![2]));
        assert_eq!(listed(States::Any, Some("bob"), Some("a")), [0; 0]);
        assert_eq!(listed(States::Any, None, Some("none")), [0; 0]);
    }

    #[test]
    fn what_is_rare_comes_in_short_pages_and_nothing_is_left_out() {
        let num_usable = 2 * MAX_SCANNED as usize + 10;
        let mut bench = bench("lru", num_usable);
        admit(&mut bench, "a", 1, &[1]);
        bench.0.pool.allocate(num_usable - 2, 0, &crate::cache::pool::tests::ASKER).unwrap();
        admit(&mut bench, "a", 2, &[1]);
        let filter = BlockFilter { lease_id: Some("a"), ..ALL };
        assert_eq!(bench.0.listing().list_blocks(0, 9, &filter), (vec![1], Some(1 + MAX_SCANNED)));
        assert_eq!(bench.0.listing().list_blocks(1 + MAX_SCANNED, 9, &filter), (vec![], Some(1 + 2 * MAX_SCANNED)));
        let last = num_usable as BlockId;
        assert_eq!(bench.0.listing().list_blocks(1 + 2 * MAX_SCANNED, 9, &filter), (vec![last], None));
    }

    #[test]
    fn a_block_is_described_with_all_that_is_known_of_it() {
        let mut bench = bench("lru", 9);
        admit(&mut bench, "b", 1, &[1, 2, 3]);
        settle(&mut bench, "b");
        admit(&mut bench, "b", 2, &[1, 2, 4]);
        bench.plan_for("b", StepRequest { releases: vec![2], ..StepRequest::default() });
        let block = bench.0.listing().describe(1);
        let numbers = (block.block_id, block.state, block.reference_count, block.pin_count, block.priority);
        assert_eq!((numbers, block.tenant.as_str(), block.prefix_pin_count), ((1, 3, 1, 1, 5), "bob", 0));
        assert_eq!(block.prefix_hash, bench.0.pool.index().hash(1).unwrap());
        assert_eq!(bench.0.listing().describe(9), Block { block_id: 9, state: 1, ..Block::default() });
        assert_eq!((bench.0.listing().describe(3).state, bench.0.listing().describe(2).prefix_hash), (4, vec![]));
    }

    // -- changes ------------------------------------------------------------------------------------------------------

    /// The state of a client that applies all changes.
    struct Replica {
        tenant: Option<&'static str>,
        reads: bool,
        known: Known,
        blocks: BTreeMap<i32, Block>,
        kinds: BTreeSet<i32>,
        num_contents: usize,
    }

    impl Replica {
        fn begin(books: &mut Books, tenant: Option<&'static str>, reads: bool) -> Replica {
            let known = Known::before(books.pool.records.journal.num_changes());
            let mut replica =
                Replica { tenant, reads, known, blocks: BTreeMap::new(), kinds: BTreeSet::new(), num_contents: 0 };
            let mut next = Some(0);
            while let Some(first) = next {
                let (events, following) =
                    books.listing().snapshot(first, 5, &mut replica.known, tenant.map(str::as_bytes), reads);
                events.into_iter().for_each(|event| replica.apply(books, event));
                next = following;
            }
            replica
        }

        fn go_on(&mut self, books: &Books, most: usize) {
            let number = self.known.next();
            let tenant = self.tenant.map(str::as_bytes);
            let events = books.listing().changes(&mut self.known, most, tenant, self.reads).unwrap();
            assert!(self.known.next() > number || books.pool.records.journal.num_changes() == number);
            events.into_iter().for_each(|event| self.apply(books, event));
        }

        fn apply(&mut self, books: &Books, event: BlockEvent) {
            self.check_content(books, &event);
            self.kinds.insert(event.kind);
            let block = event.block.unwrap();
            let hash = block.prefix_hash.clone();
            let before = self.blocks.get(&block.block_id).map(|known| known.prefix_hash.clone()).unwrap_or_default();
            match event.kind {
                1 => assert!(!hash.is_empty()),
                2 => assert!(hash.is_empty()),
                _ => assert_eq!(hash, before, "of a change the content is the same"),
            }
            if block.state == 1 {
                assert_eq!(block, free_block(block.block_id as BlockId));
                self.blocks.remove(&block.block_id);
            } else {
                self.blocks.insert(block.block_id, block);
            }
        }

        fn check_content(&mut self, books: &Books, event: &BlockEvent) {
            if !self.reads || event.kind != 1 {
                assert!(event.token_ids.is_empty() && event.salt.is_empty() && event.parent_prefix_hash.is_empty());
                return;
            }
            self.num_contents += 1;
            let block = event.block.as_ref().unwrap();
            let namespace =
                crate::cache::prefix::Namespace { salt: event.salt.clone(), adapter: event.adapter.clone() };
            let root = || {
                crate::cache::prefix::root_hash(block.tenant.as_bytes(), &namespace, &books.geometry.model_fingerprint)
            };
            let parent = event.parent_prefix_hash.as_slice().try_into().unwrap_or_else(|_| root());
            let mut hashes = Vec::new();
            chain_hashes(parent, &event.token_ids, books.geometry.block_size, &mut hashes);
            assert_eq!(hashes[0].to_vec(), block.prefix_hash);
        }

        fn listed(&self, books: &Books) -> BTreeMap<i32, Block> {
            let tenant = self.tenant.map(str::as_bytes);
            let (blocks, _) =
                books.listing().list_blocks(0, usize::MAX - 1, &BlockFilter { states: States::NotFree, tenant, ..ALL });
            blocks.into_iter().map(|block| (block as i32, books.listing().describe(block))).collect()
        }
    }

    #[test]
    fn who_applies_what_it_is_told_knows_what_is_listed() {
        let mut num_contents = 0;
        for (seed, policy) in (0..20).flat_map(|seed| POLICIES.map(|policy| (seed, policy))) {
            let (mut bench, mut random) = (bench(policy, 14), Random(seed));
            let mut replicas = Vec::new();
            for step in 0..150 {
                let lease_id = ["a", "b"][random.below(2)];
                let num_in_flight = bench.0.leases[lease_id].in_flight.len();
                if num_in_flight < 3 && random.below(2) == 0 {
                    let mut request = some_request(&mut random);
                    request
                        .admissions
                        .iter_mut()
                        .for_each(|admission| admission.namespace.salt = vec![7; random.below(2)]);
                    bench.plan_for(lease_id, request);
                } else if num_in_flight > 0 {
                    let mut report = bench.report(lease_id);
                    if bench.0.leases[lease_id].in_flight[0].is_doomed || random.below(9) == 0 {
                        report.outcome = crate::books::settle::StepOutcome::Failed;
                    }
                    bench.0.settle(lease_id, &report).unwrap();
                } else if random.below(9) == 0 {
                    bench.0.pool.drop_cached(random.below(15) as BlockId, 15, 0.0, 0);
                }
                if step == 30 {
                    let kinds = [(None, false), (Some("alice"), false), (Some("bob"), true), (None, true)];
                    replicas = kinds.map(|(tenant, reads)| Replica::begin(&mut bench.0, tenant, reads)).into();
                }
                let is_read: Vec<bool> = replicas.iter().map(|_| random.below(3) == 0).collect();
                let read = replicas.iter_mut().zip(is_read).filter(|(_, is_read)| *is_read);
                read.for_each(|(replica, _)| replica.go_on(&bench.0, 3));
            }
            for replica in &mut replicas {
                while replica.known.next() < bench.0.pool.records.journal.num_changes() {
                    replica.go_on(&bench.0, 4);
                }
                assert_eq!(replica.blocks, replica.listed(&bench.0));
                num_contents += replica.num_contents;
            }
            assert_eq!(replicas[0].kinds, BTreeSet::from([1, 2, 3]), "it gets somewhere");
        }
        assert!(num_contents > 100, "it gets somewhere: {num_contents}");
    }

    #[test]
    fn to_a_tenant_what_it_never_had_does_not_change() {
        let mut bench = bench("lru", 4);
        admit(&mut bench, "b", 1, &[1, 2, 3]);
        settle(&mut bench, "b");
        admit(&mut bench, "a", 1, &[5]);
        let told = |bench: &Bench, tenant: &str| {
            let events = bench.0.listing().changes(&mut Known::default(), 99, Some(tenant.as_bytes()), false).unwrap();
            events.into_iter().map(|event| (event.kind, event.block.unwrap().block_id)).collect::<Vec<_>>()
        };
        assert_eq!((told(&bench, "bob"), told(&bench, "alice")), (vec![(1, 1), (3, 2)], vec![(3, 3)]));
        let beyond = bench.0.listing().changes(&mut Known::before(99), 1, Some(b"carla"), false);
        assert_eq!((told(&bench, "carla"), beyond), (vec![], None));
        bench.plan_for("b", StepRequest { releases: vec![1], ..StepRequest::default() });
        settle(&mut bench, "b");
        admit(&mut bench, "a", 2, &[1, 2, 3, 4, 5]);
        assert_eq!(told(&bench, "bob"), [(2, 1), (3, 2)]);
        assert_eq!(bench.0.listing().describe(1).tenant, "alice");
    }

    #[test]
    fn books_that_keep_no_contents_tell_none() {
        let mut bench = bench("lru", 8);
        bench.0.keep_contents(false);
        admit(&mut bench, "a", 1, &[1, 2, 3]);
        settle(&mut bench, "a");
        let stored = |bench: &Bench| bench.0.listing().snapshot(0, 99, &mut Known::default(), None, true).0[0].clone();
        assert_eq!((stored(&bench).kind, stored(&bench).token_ids), (1, vec![]));
        bench.0.keep_contents(true);
        admit(&mut bench, "a", 2, &[1, 2, 4, 5]);
        settle(&mut bench, "a");
        let tokens = bench
            .0
            .listing()
            .snapshot(0, 99, &mut Known::default(), None, true)
            .0
            .into_iter()
            .map(|event| event.token_ids);
        assert_eq!(tokens.filter(|tokens| !tokens.is_empty()).collect::<Vec<_>>(), [[4, 5]]);
        assert_eq!(crate::cache::pool::tests::violations(&bench.0.pool), [""; 0]);
    }

    #[test]
    fn contents_of_blocks_are_told_with_what_is_stored_and_in_a_snapshot_until_the_blocks_are_lost() {
        let mut bench = bench("lru", 8);
        admit(&mut bench, "a", 1, &[1, 2, 3]);
        settle(&mut bench, "a");
        admit(&mut bench, "a", 2, &[4, 5, 6, 7]);
        settle(&mut bench, "a");
        let told = |bench: &Bench, with_content| {
            let events = bench.0.listing().changes(&mut Known::default(), 99, None, with_content).unwrap();
            events.into_iter().filter(|event| event.kind == 1).map(|event| event.token_ids).collect::<Vec<_>>()
        };
        assert_eq!(told(&bench, true), [vec![1, 2], vec![4, 5], vec![6, 7]]);
        assert_eq!(told(&bench, false), [[0; 0]; 3]);
        let (shown, _) = bench.0.listing().snapshot(0, 99, &mut Known::default(), None, true);
        assert_eq!(
            shown.iter().map(|event| &event.token_ids[..]).collect::<Vec<_>>(),
            [&[1, 2][..], &[], &[4, 5], &[6, 7]]
        );
        admit(&mut bench, "b", 1, &[9; 4]);
        bench.plan_for("a", StepRequest { releases: vec![2], ..StepRequest::default() });
        settle(&mut bench, "a");
        let num_known =
            |bench: &Bench| (1..9).filter(|block| bench.0.pool.records.contents.get(*block).is_some()).count();
        assert_eq!(num_known(&bench), 3);
        bench.0.pool.allocate(bench.0.pool.num_allocatable(), 0, &crate::cache::pool::tests::ASKER).unwrap();
        assert_eq!(num_known(&bench), 1, "of the block that is held");
        settle(&mut bench, "b");
        assert_eq!(num_known(&bench), 3);
        bench.0.pool.drop_cached(0, 9, 0.0, 0);
        assert_eq!(num_known(&bench), 0);
    }
}
