//! Messages of protos/quire/cache/v1 as bytes, field by field: those that are written for every step, and blocks by the
//! thousand.
//!
//! `uint32` stands for `int32` where nothing is negative: the bytes are the same.

use prost::Message;

use crate::plans::StepPlan;

/// Who a grant is from and for.
pub struct Grantor<'a> {
    pub pool: &'a str,
    pub epoch: i64,
    pub term: i64,
    pub lease_id: &'a str,
}

/// grant.proto
#[derive(Clone, PartialEq, Message)]
struct StepGrant {
    #[prost(string, tag = "1")]
    pool: String,
    #[prost(int64, tag = "2")]
    epoch: i64,
    #[prost(int64, tag = "3")]
    term: i64,
    #[prost(string, tag = "4")]
    lease_id: String,
    #[prost(uint64, tag = "5")]
    step_number: u64,
    #[prost(uint64, tag = "6")]
    known_step_number: u64,
    #[prost(int32, repeated, tag = "10")]
    released_sequence_ids: Vec<i32>,
    #[prost(int32, repeated, tag = "11")]
    fork_parent_ids: Vec<i32>,
    #[prost(int32, repeated, tag = "12")]
    fork_child_ids: Vec<i32>,
    #[prost(int32, repeated, tag = "13")]
    offloaded_sequence_ids: Vec<i32>,
    #[prost(int32, repeated, tag = "20")]
    write_sequence_ids: Vec<i32>,
    #[prost(uint32, repeated, tag = "21")]
    write_first_indexes: Vec<u32>,
    #[prost(uint32, repeated, tag = "22")]
    write_block_counts: Vec<u32>,
    #[prost(uint32, repeated, tag = "23")]
    write_block_ids: Vec<u32>,
    #[prost(uint32, repeated, tag = "30")]
    copy_source_block_ids: Vec<u32>,
    #[prost(uint32, repeated, tag = "31")]
    copy_target_block_ids: Vec<u32>,
    #[prost(uint32, repeated, tag = "32")]
    offload_source_block_ids: Vec<u32>,
    #[prost(uint32, repeated, tag = "33")]
    offload_target_host_block_ids: Vec<u32>,
    #[prost(uint32, repeated, tag = "34")]
    restore_source_host_block_ids: Vec<u32>,
    #[prost(uint32, repeated, tag = "35")]
    restore_target_block_ids: Vec<u32>,
    #[prost(int32, repeated, tag = "40")]
    run_sequence_ids: Vec<i32>,
    #[prost(uint32, repeated, tag = "41")]
    run_starts: Vec<u32>,
    #[prost(uint32, repeated, tag = "42")]
    run_token_counts: Vec<u32>,
    #[prost(bool, repeated, tag = "43")]
    run_samples: Vec<bool>,
    #[prost(uint32, repeated, tag = "44")]
    given_run_indexes: Vec<u32>,
    #[prost(bytes = "vec", tag = "45")]
    given_token_digests: Vec<u8>,
}

/// cache_service.proto, PlanStepResponse; without its grant, which is signed elsewhere, and its refusals.
#[derive(Clone, PartialEq, Message)]
struct PlanAnswer {
    #[prost(uint64, tag = "2")]
    step_number: u64,
    #[prost(int32, repeated, tag = "10")]
    run_sequence_ids: Vec<i32>,
    #[prost(uint32, repeated, tag = "11")]
    run_starts: Vec<u32>,
    #[prost(uint32, repeated, tag = "12")]
    run_token_counts: Vec<u32>,
    #[prost(uint32, repeated, tag = "13")]
    given_run_indexes: Vec<u32>,
    #[prost(int32, repeated, tag = "20")]
    admitted_sequence_ids: Vec<i32>,
    #[prost(uint32, repeated, tag = "21")]
    admitted_cached_token_counts: Vec<u32>,
    #[prost(int32, repeated, tag = "22")]
    restored_sequence_ids: Vec<i32>,
    #[prost(uint32, repeated, tag = "23")]
    restored_token_counts: Vec<u32>,
    #[prost(message, optional, tag = "30")]
    block_counts: Option<BlockCounts>,
    #[prost(message, optional, tag = "31")]
    host_block_counts: Option<HostBlockCounts>,
}

#[derive(Clone, PartialEq, Message)]
struct BlockCounts {
    #[prost(uint64, tag = "1")]
    free_count: u64,
    #[prost(uint64, tag = "2")]
    cached_count: u64,
    #[prost(uint64, tag = "3")]
    active_count: u64,
    #[prost(uint64, tag = "4")]
    retired_count: u64,
}

#[derive(Clone, PartialEq, Message)]
struct HostBlockCounts {
    #[prost(uint64, tag = "1")]
    free_count: u64,
    #[prost(uint64, tag = "2")]
    held_count: u64,
    #[prost(uint64, tag = "3")]
    retired_count: u64,
}

/// cache_service.proto, Block.
#[derive(Clone, PartialEq, Message)]
pub struct Block {
    #[prost(uint32, tag = "1")]
    pub block_id: u32,
    #[prost(int32, tag = "2")]
    pub state: i32,
    #[prost(uint32, tag = "3")]
    pub reference_count: u32,
    #[prost(uint32, tag = "4")]
    pub pin_count: u32,
    #[prost(bytes = "vec", tag = "5")]
    pub prefix_hash: Vec<u8>,
    #[prost(string, tag = "6")]
    pub tenant: String,
    #[prost(uint32, tag = "7")]
    pub priority: u32,
    #[prost(uint32, tag = "8")]
    pub prefix_pin_count: u32,
}

/// cache_service.proto, ListBlocksResponse; without its token.
#[derive(Clone, PartialEq, Message)]
struct BlockPage {
    #[prost(message, repeated, tag = "1")]
    blocks: Vec<Block>,
}

/// cache_service.proto, BlockEvent.
#[derive(Clone, PartialEq, Message)]
pub struct BlockEvent {
    #[prost(int32, tag = "1")]
    pub kind: i32,
    #[prost(message, optional, tag = "2")]
    pub block: Option<Block>,
    #[prost(int32, repeated, tag = "3")]
    pub token_ids: Vec<i32>,
    #[prost(bytes = "vec", tag = "4")]
    pub salt: Vec<u8>,
    #[prost(bytes = "vec", tag = "5")]
    pub parent_prefix_hash: Vec<u8>,
}

/// cache_service.proto, WatchBlocksResponse; events alone.
#[derive(Clone, PartialEq, Message)]
struct BlockEvents {
    #[prost(message, repeated, tag = "3")]
    events: Vec<BlockEvent>,
}

/// The blocks of a ListBlocksResponse.
pub fn encode_blocks(blocks: Vec<Block>) -> Vec<u8> {
    BlockPage { blocks }.encode_to_vec()
}

/// The events of a WatchBlocksResponse.
pub fn encode_events(events: Vec<BlockEvent>) -> Vec<u8> {
    BlockEvents { events }.encode_to_vec()
}

/// A StepGrant.
pub fn encode_grant(plan: &StepPlan, grantor: &Grantor) -> Vec<u8> {
    let plan = plan.clone();
    let grant = StepGrant {
        pool: grantor.pool.to_string(),
        epoch: grantor.epoch,
        term: grantor.term,
        lease_id: grantor.lease_id.to_string(),
        step_number: plan.step_number,
        known_step_number: plan.known_step,
        released_sequence_ids: plan.released_ids,
        fork_parent_ids: plan.fork_parent_ids,
        fork_child_ids: plan.fork_child_ids,
        offloaded_sequence_ids: plan.offloaded_ids,
        write_sequence_ids: plan.write_seq_ids,
        write_first_indexes: plan.write_first_indexes,
        write_block_counts: plan.write_block_counts,
        write_block_ids: plan.write_block_ids,
        copy_source_block_ids: plan.copy_sources,
        copy_target_block_ids: plan.copy_targets,
        offload_source_block_ids: plan.offload_sources,
        offload_target_host_block_ids: plan.offload_targets,
        restore_source_host_block_ids: plan.restore_sources,
        restore_target_block_ids: plan.restore_targets,
        run_sequence_ids: plan.run_seq_ids,
        run_starts: plan.run_starts,
        run_token_counts: plan.run_token_counts,
        run_samples: plan.run_samples,
        given_run_indexes: plan.given_run_indexes,
        given_token_digests: plan.given_digests,
    };
    grant.encode_to_vec()
}

/// What a PlanStepResponse says beside the signed grant and the refusals.
pub fn encode_answer(plan: &StepPlan) -> Vec<u8> {
    let counts = plan.counts;
    let answer = PlanAnswer {
        step_number: plan.step_number,
        run_sequence_ids: plan.run_seq_ids.clone(),
        run_starts: plan.run_starts.clone(),
        run_token_counts: plan.run_token_counts.clone(),
        given_run_indexes: plan.given_run_indexes.clone(),
        admitted_sequence_ids: plan.admitted_ids.clone(),
        admitted_cached_token_counts: plan.admitted_cached_counts.clone(),
        restored_sequence_ids: plan.restored_ids.clone(),
        restored_token_counts: plan.restored_counts.clone(),
        block_counts: Some(BlockCounts {
            free_count: counts.free as u64,
            cached_count: counts.cached as u64,
            active_count: counts.active as u64,
            retired_count: counts.retired as u64,
        }),
        host_block_counts: plan.host_counts.map(|counts| HostBlockCounts {
            free_count: counts.free as u64,
            held_count: counts.held as u64,
            retired_count: counts.retired as u64,
        }),
    };
    answer.encode_to_vec()
}
