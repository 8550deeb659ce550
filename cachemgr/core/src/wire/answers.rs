//! Answers as bytes: plans with their grants, and blocks by the thousand.

use prost::Message;

use crate::books::plans::{PlanItem, StepPlan};
use crate::wire::messages::{
    self, Block, BlockCounts, BlockEvent, HostBlockCounts, ListBlocksResponse, PlanStepResponse, StepGrant,
    WatchBlocksResponse,
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
pub fn encode_grant(plan: &StepPlan, grantor: &Grantor) -> Vec<u8> {
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
    };
    grant.encode_to_vec()
}

/// A PlanStepResponse without its grant, which is signed elsewhere, and without its refusals.
pub fn encode_answer(plan: &StepPlan) -> Vec<u8> {
    let counts = plan.counts;
    let answer = PlanStepResponse {
        step_number: plan.step_number as i64,
        run_sequence_ids: plan.run_seq_ids.clone(),
        run_starts: signed(&plan.run_starts),
        run_token_counts: signed(&plan.run_token_counts),
        given_run_indexes: signed(&plan.given_run_indexes),
        admitted_sequence_ids: plan.admitted_ids.clone(),
        admitted_cached_token_counts: signed(&plan.admitted_cached_counts),
        restored_sequence_ids: plan.restored_ids.clone(),
        restored_token_counts: signed(&plan.restored_counts),
        block_counts: Some(BlockCounts {
            free_count: counts.free as i32,
            cached_count: counts.cached as i32,
            active_count: counts.active as i32,
            retired_count: counts.retired as i32,
        }),
        host_block_counts: plan.host_counts.map(|counts| HostBlockCounts {
            free_count: counts.free as i32,
            held_count: counts.held as i32,
            retired_count: counts.retired as i32,
        }),
        ..PlanStepResponse::default()
    };
    answer.encode_to_vec()
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
