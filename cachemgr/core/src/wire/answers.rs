//! Answers as bytes: plans with their grants, and blocks by the thousand.

use hmac::{Hmac, KeyInit, Mac};
use prost::Message;
use prost_types::Timestamp;
use sha2::Sha256;

use crate::books::miss::Miss;
use crate::books::plans::{AdmissionMiss, CacheUse, GrantedStep, PlanItem};
use crate::cache::disk::DiskOrder;
use crate::cache::groups::GroupCounters;
use crate::cache::losses::{Cause, Loss};
use crate::cache::pool::{BlockCounts as Counts, BlockPool};
use crate::cache::prefix::BlockId;
use crate::cache::tier::TierBlockCounts;
use crate::store::stored_books::StoredBooks;
use crate::wire::messages::{
    self, Block, BlockCounts, BlockEvent, HostBlockCounts, LayerGroupStatistics, ListBlocksResponse, MissReason,
    PlanStepResponse, PoolStatistics, SignedGrant, StepGrant, WatchBlocksResponse, disk_order,
};

/// The blocks of a ListBlocksResponse.
pub fn encode_blocks(blocks: Vec<Block>) -> Vec<u8> {
    ListBlocksResponse { blocks, ..Default::default() }.encode_to_vec()
}

/// The events of a WatchBlocksResponse.
pub fn encode_events(events: Vec<BlockEvent>) -> Vec<u8> {
    WatchBlocksResponse { events, ..Default::default() }.encode_to_vec()
}

/// The issuer and the receiver of a grant.
pub struct Grantor<'a> {
    pub pool: &'a str,
    pub epoch: i64,
    pub term: i64,
    pub lease_id: &'a str,
}

/// A StepGrant.
pub fn encode_grant(plan: &GrantedStep, grantor: &Grantor) -> Vec<u8> {
    let grant = StepGrant {
        pool: grantor.pool.to_string(),
        epoch: grantor.epoch,
        term: grantor.term,
        lease_id: grantor.lease_id.to_string(),
        step_number: plan.step_number as i64,
        known_step_number: plan.known_step as i64,
        released_sequence_ids: plan.released_ids.clone(),
        fork_parent_ids: plan.fork_parent_ids.clone(),
        fork_child_ids: plan.fork_child_ids.clone(),
        offloaded_sequence_ids: plan.offloaded_ids.clone(),
        write_sequence_ids: plan.write_seq_ids.clone(),
        write_first_indexes: signed(&plan.write_first_indexes),
        write_block_counts: signed(&plan.write_block_counts),
        write_block_ids: signed(&plan.write_block_ids),
        write_layer_groups: signed(&plan.write_groups),
        passed_sequence_ids: plan.passed_seq_ids.clone(),
        passed_layer_groups: signed(&plan.passed_groups),
        passed_block_counts: signed(&plan.passed_counts),
        copy_source_block_ids: signed(&plan.copy_sources),
        copy_target_block_ids: signed(&plan.copy_targets),
        offload_source_block_ids: signed(&plan.offload_sources),
        offload_target_host_block_ids: signed(&plan.offload_targets),
        restore_source_host_block_ids: signed(&plan.restore_sources),
        restore_target_block_ids: signed(&plan.restore_targets),
        run_sequence_ids: plan.run_seq_ids.clone(),
        run_starts: signed(&plan.run_starts),
        run_token_counts: signed(&plan.run_token_counts),
        run_samples: plan.run_samples.clone(),
        given_run_indexes: signed(&plan.given_run_indexes),
        given_token_digests: plan.given_digests.clone(),
        run_draft_counts: signed(&plan.run_draft_counts),
        adapters: plan.adapters.clone(),
        run_adapters: signed(&plan.run_adapters),
    };
    grant.encode_to_vec()
}

/// A PlanStepResponse without its refusals; with the grant, signed under a key, if there is a grantor. `offset_s` makes
/// wall clock times of the caller's.
pub fn encode_answer(plan: &GrantedStep, offset_s: f64, signed_by: Option<(&Grantor, &[u8])>) -> Vec<u8> {
    let answer = PlanStepResponse {
        grant: signed_by.map(|(grantor, key)| sign(encode_grant(plan, grantor), key)),
        step_number: plan.step_number as i64,
        run_sequence_ids: plan.run_seq_ids.clone(),
        run_starts: signed(&plan.run_starts),
        run_token_counts: signed(&plan.run_token_counts),
        given_run_indexes: signed(&plan.given_run_indexes),
        admitted_sequence_ids: plan.admitted_ids.clone(),
        admitted_cached_token_counts: signed(&plan.admitted_cached_counts),
        admitted_written_token_counts: signed(&plan.admitted_written_counts),
        admitted_kept_token_counts: signed(&plan.admitted_kept_counts),
        admitted_misses: plan.misses.iter().map(|miss| admission_miss(miss, offset_s)).collect(),
        restored_sequence_ids: plan.restored_ids.clone(),
        restored_token_counts: signed(&plan.restored_counts),
        block_counts: Some(block_counts(plan.counts)),
        host_block_counts: plan.host_counts.map(host_block_counts),
        ..PlanStepResponse::default()
    };
    answer.encode_to_vec()
}

fn admission_miss(miss: &AdmissionMiss, offset_s: f64) -> messages::AdmissionMiss {
    let lost_by = miss.lost_by.as_ref().map(|name| String::from_utf8_lossy(name).into_owned());
    let is_reset = matches!(miss.miss.loss(), Some(Loss { cause: Cause::Reset { .. }, .. }));
    let (reset_by, evicted_by_tenant) = if is_reset { (lost_by, None) } else { (None, lost_by) };
    messages::AdmissionMiss {
        sequence_id: miss.seq_id,
        missing_block_index: miss.index as i32,
        reason: reason_of(&miss.miss) as i32,
        lost_time: miss.miss.loss().map(|loss| timestamp(loss.at + offset_s)),
        evicted_by_tenant,
        reset_by,
    }
}

fn reason_of(miss: &Miss) -> MissReason {
    match miss {
        Miss::None => MissReason::None,
        Miss::NeverComputed => MissReason::NeverComputed,
        Miss::Unknown => MissReason::Unknown,
        Miss::BeingComputed => MissReason::BeingComputed,
        Miss::OtherSalt => MissReason::OtherSalt,
        Miss::OtherAdapter => MissReason::OtherAdapter,
        Miss::OtherTenant(_) => MissReason::OtherTenant,
        Miss::WindowLost(_) => MissReason::WindowEvicted,
        Miss::Lost(Loss { cause: Cause::Reset { .. }, .. }) => MissReason::Reset,
        Miss::Lost(Loss { cause: Cause::Evicted { .. }, .. }) => MissReason::Evicted,
    }
}

fn timestamp(seconds: f64) -> Timestamp {
    let nanos = (seconds.fract() * 1e9) as i32;
    Timestamp { seconds: seconds as i64, nanos: nanos.max(0) }
}

/// A grant with its HMAC-SHA256.
fn sign(grant: Vec<u8>, key: &[u8]) -> SignedGrant {
    let mut signing = Hmac::<Sha256>::new_from_slice(key).expect("a key may have any length");
    signing.update(&grant);
    SignedGrant { grant, signature: signing.finalize().into_bytes().to_vec() }
}

/// A PlanStepsResponse with the plan as bytes: on the wire, a message within a message looks like bytes.
#[derive(Clone, PartialEq, Message)]
struct AnswerOnStream {
    #[prost(bytes = "vec", optional, tag = "1")]
    plan: Option<Vec<u8>>,
}

/// A PlanStepsResponse around the bytes of a PlanStepResponse.
pub fn answer_on_stream(answer: Vec<u8>) -> Vec<u8> {
    AnswerOnStream { plan: Some(answer) }.encode_to_vec()
}

fn block_counts(counts: Counts) -> BlockCounts {
    BlockCounts {
        free_count: counts.free as i32,
        cached_count: counts.cached as i32,
        active_count: counts.active as i32,
        retired_count: counts.retired as i32,
    }
}

fn host_block_counts(counts: TierBlockCounts) -> HostBlockCounts {
    HostBlockCounts {
        free_count: counts.free as i32,
        held_count: counts.held as i32,
        retired_count: counts.retired as i32,
        cached_count: counts.cached as i32,
    }
}

/// A BlockCounts.
pub fn encode_counts(counts: Counts) -> Vec<u8> {
    block_counts(counts).encode_to_vec()
}

/// A PoolStatistics: the present state of a pool, and the counters of its epoch. Cost: O(leases + sequences).
pub fn encode_statistics(stored: &StoredBooks) -> Vec<u8> {
    let books = stored.books();
    let (counters, blocks) = (books.counters(), books.pool().counters());
    let disk = books.disk();
    let has_host_tier = books.geometry().num_host_blocks > 0;
    let statistics = PoolStatistics {
        pool: stored.pool().to_string(),
        epoch: stored.epoch(),
        block_counts: Some(block_counts(books.pool().counts())),
        host_block_counts: has_host_tier.then(|| host_block_counts(books.host().counts())),
        lease_count: books.leases().len() as i32,
        fencing_lease_count: books.leases().values().filter(|lease| lease.is_ending).count() as i32,
        step_in_flight_count: books.leases().steps().count() as i32,
        sequence_count: books.leases().rows().count() as i32,
        offloaded_sequence_count: books.num_offloaded() as i32,
        held_token_count: books.num_held_tokens() as i64,
        table_entry_count: blocks.num_references as i64,
        shared_block_count: blocks.num_shared as i32,
        reserved_block_count: books.pool().accounts().num_reserved() as i32,
        pinned_block_count: books.pool().pins().len() as i32,
        planned_step_count: counters.planned_steps as i64,
        computed_step_count: counters.computed_steps as i64,
        failed_step_count: counters.failed_steps as i64,
        skipped_step_count: counters.skipped_steps as i64,
        admission_count: counters.admissions as i64,
        admitted_token_count: counters.admitted_tokens as i64,
        cached_token_count: counters.cached_tokens as i64,
        recomputed_token_count: counters.recomputed_tokens as i64,
        fork_count: counters.forks as i64,
        copied_block_count: counters.copied_blocks as i64,
        resumed_admission_count: counters.resumed_admissions as i64,
        resumed_token_count: counters.resumed_tokens as i64,
        resumed_cached_token_count: counters.resumed_cached_tokens as i64,
        offload_count: counters.offloads as i64,
        restore_count: counters.restores as i64,
        offloaded_block_count: counters.offloaded_blocks as i64,
        restored_block_count: counters.restored_blocks as i64,
        kept_in_host_block_count: counters.kept_in_host_blocks as i64,
        evicted_from_host_block_count: books.host().copies().num_evicted() as i64,
        found_in_host_token_count: counters.found_in_host_tokens as i64,
        disk_block_counts: (disk.len() > 0).then(|| host_block_counts(disk.counts())),
        written_to_disk_block_count: disk.counters().written as i64,
        read_from_disk_block_count: disk.counters().read as i64,
        lost_on_disk_block_count: disk.counters().lost as i64,
        found_on_disk_block_count: disk.counters().found as i64,
        evicted_from_disk_block_count: disk.copies().num_evicted() as i64,
        computed_token_count: counters.computed_tokens as i64,
        generated_token_count: counters.generated_tokens as i64,
        allocated_block_count: blocks.num_allocated as i64,
        evicted_block_count: blocks.num_evicted as i64,
        published_block_count: books.pool().index().num_published() as i64,
        expired_lease_count: counters.expired_leases as i64,
        written_token_count: counters.written_tokens as i64,
        kept_block_count: books.pool().parking().keeps().map_or(0, |keeps| keeps.len()) as i32,
        drafted_token_count: counters.drafted_tokens as i64,
        accepted_draft_token_count: counters.accepted_drafts as i64,
        evicted_kept_block_count: books.pool().parking().keeps().map_or(0, |keeps| keeps.num_evicted()) as i64,
        layer_groups: group_statistics(books.pool()),
        refusal_counts: stored.refusals().iter().map(|(reason, count)| (reason.to_string(), *count as i64)).collect(),
    };
    statistics.encode_to_vec()
}

/// A DiskOrders with the orders behind a number that are not reported; None if there is none.
pub fn encode_disk_orders(stored: &StoredBooks, after: u64) -> Option<Vec<u8>> {
    let (disk, tenants) = (stored.books().disk(), stored.books().tenants());
    let name = |tenant| String::from_utf8_lossy(tenants.name(tenant)).into_owned();
    let encode = |(number, order): (u64, &DiskOrder)| {
        let order = match order {
            DiskOrder::Write { host, disk, content } => disk_order::Order::Write(messages::DiskWrite {
                host_block_id: *host as i32,
                disk_block_id: *disk as i32,
                prefix_hash: content.prefix_hash().to_vec(),
                tenant: name(content.tenant),
                layer_group: content.group.into(),
            }),
            DiskOrder::Read { disk, host, content } => disk_order::Order::Read(messages::DiskRead {
                disk_block_id: *disk as i32,
                host_block_id: *host as i32,
                prefix_hash: content.prefix_hash().to_vec(),
                layer_group: content.group.into(),
            }),
            DiskOrder::Erase { tenant } => {
                let tenant = tenant.as_ref().map(|name| String::from_utf8_lossy(name).into_owned());
                disk_order::Order::Erase(messages::DiskErase { tenant })
            }
        };
        messages::DiskOrder { order_number: number as i64, order: Some(order) }
    };
    let orders: Vec<messages::DiskOrder> = disk.orders_after(after).map(encode).collect();
    let first_open = disk.orders_after(0).next().map_or(disk.last_order() + 1, |(number, _)| number);
    if orders.is_empty() {
        return None;
    }
    Some(messages::DiskOrders { orders, first_open_order_number: first_open as i64 }.encode_to_vec())
}

/// By layer group; empty in a pool with one. Cost: O(blocks).
fn group_statistics(pool: &BlockPool) -> Vec<LayerGroupStatistics> {
    let statistics = |counters: &GroupCounters| LayerGroupStatistics {
        found_block_count: counters.num_found as i64,
        passed_block_count: counters.num_passed as i64,
        evicted_block_count: counters.num_evicted as i64,
        ..LayerGroupStatistics::default()
    };
    let mut groups: Vec<LayerGroupStatistics> = pool.groups.counters().iter().map(statistics).collect();
    if !groups.is_empty() {
        for block in 1..pool.index().pasts().len() as BlockId {
            let group = &mut groups[usize::from(pool.groups.of(block))];
            group.active_block_count += i32::from(pool.holders().ref_count(block) > 0);
            group.findable_block_count += i32::from(pool.index().is_findable(block));
        }
    }
    groups
}

/// The number of a use of the cache.
pub fn cache_use_number(cache_use: CacheUse) -> i32 {
    let cache_use = match cache_use {
        CacheUse::ReadAndWrite => messages::CacheUse::ReadAndWrite,
        CacheUse::WriteOnly => messages::CacheUse::WriteOnly,
        CacheUse::None => messages::CacheUse::None,
    };
    cache_use as i32
}

/// The number of a kind of item.
pub fn item_number(item: PlanItem) -> i32 {
    let item = match item {
        PlanItem::Offload => messages::PlanItem::Offload,
        PlanItem::Trim => messages::PlanItem::Trim,
        PlanItem::Fork => messages::PlanItem::Fork,
        PlanItem::Extend => messages::PlanItem::Extend,
        PlanItem::Restore => messages::PlanItem::Restore,
        PlanItem::Admission => messages::PlanItem::Admission,
    };
    item as i32
}

/// Blocks, positions and counts, none of which is above 2^31 - 1.
fn signed(numbers: &[u32]) -> Vec<i32> {
    numbers.iter().map(|number| *number as i32).collect()
}
