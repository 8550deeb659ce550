//! A client's request for its next step, and the answer: plain values.

use serde::{Deserialize, Serialize};

use crate::books::miss::Miss;
use crate::cache::advice::Level;
use crate::cache::groups::Group;
use crate::cache::pool::BlockCounts;
use crate::cache::prefix::{BlockId, Hash, Namespace, chain_hashes};
use crate::cache::tier::{TierBlockCounts, TierBlockId};
use crate::errors::{Failure, Refusal, Result, invalid};

/// The kinds of items that are answered one by one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum PlanItem {
    Offload,
    Trim,
    Fork,
    Extend,
    Restore,
    Admission,
}

impl PlanItem {
    pub fn name(self) -> &'static str {
        match self {
            PlanItem::Offload => "offload",
            PlanItem::Trim => "trim",
            PlanItem::Fork => "fork",
            PlanItem::Extend => "extend",
            PlanItem::Restore => "restore",
            PlanItem::Admission => "admission",
        }
    }
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Trim {
    pub seq_id: i64,
    /// Tokens to keep.
    pub num_tokens: i64,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Fork {
    pub parent_id: i64,
    pub child_ids: Vec<i64>,
    /// Tokens each child begins with.
    pub num_tokens: i64,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Extend {
    pub seq_id: i32,
    /// The tokens below are drafts: guesses at the tokens after the last one, which is computed with them.
    pub has_drafts: bool,
    /// Tokens to compute.
    pub num_tokens: i64,
    /// Tokens to append before computing.
    pub append: Vec<i32>,
}

impl Extend {
    /// Tokens that become the sequence's before it is computed, and drafts.
    pub fn appended_and_drafts(&self) -> (&[i32], &[i32]) {
        if self.has_drafts { (&[], &self.append) } else { (&self.append, &[]) }
    }
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Restore {
    pub seq_id: i64,
    /// The limit of tokens to compute in this step; 0: no limit of its own.
    pub max_compute: usize,
}

/// How a sequence uses the prefix cache.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum CacheUse {
    #[default]
    ReadAndWrite,
    WriteOnly,
    None,
}

impl CacheUse {
    /// True if it takes blocks that are found.
    pub fn reads(self) -> bool {
        self == CacheUse::ReadAndWrite
    }

    /// True if its blocks may be found.
    pub fn writes(self) -> bool {
        self != CacheUse::None
    }
}

/// The copies of evicted blocks that a plan may make.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum HostCopyUse {
    #[default]
    ThereAndBack,
    Back,
    None,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Admission {
    pub seq_id: i64,
    pub tokens: Vec<i32>,
    /// The limit of tokens to compute in this step; 0: no limit of its own.
    pub max_compute: usize,
    pub namespace: Namespace,
    /// The most tokens the sequence will ever have, guaranteed; 0: best effort.
    pub reserved_tokens: usize,
    /// A range of tokens that is worth keeping, from the first token on.
    pub retention: Vec<Retention>,
    /// It was here before, and was released to make room.
    pub resumed: bool,
    pub cache_use: CacheUse,
    /// The tenant that owns it, by name; None: the lease's.
    pub tenant: Option<Vec<u8>>,
    /// Prefixes to keep, the shorter ones first.
    pub breakpoints: Vec<Breakpoint>,
    /// It is refused while a step of another lease computes the next block that it needs.
    pub waits_for_prefix: bool,
    /// The answer says why it did not find more.
    pub explains_miss: bool,
}

/// A prefix of a prompt to keep for a time after each use.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Breakpoint {
    pub num_tokens: usize,
    /// Seconds from the last use to the end.
    pub ttl: f64,
}

/// The retention of a range of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Retention {
    /// From the end of the range before it on; 0: all that follow.
    pub num_tokens: usize,
    pub level: Level,
    /// The validity of the advice, in seconds; None: as long as the content is cached.
    pub ttl: Option<f64>,
}

/// Hints about the future of a sequence that is released.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ReturnHint {
    pub seq_id: i64,
    /// The expected time until its next use, in seconds; None: never.
    pub expected_in: Option<f64>,
}

/// A prompt that will be admitted soon. The tokens are as the client sent them.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ExpectedPrompt {
    pub tokens: Vec<i32>,
    pub namespace: Namespace,
    /// The tenant of the admission, by name; None: the lease's.
    pub tenant: Option<Vec<u8>>,
    /// The time until the admission, in seconds.
    pub expected_in: f64,
}

/// A client's request for one step.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct StepRequest {
    pub releases: Vec<i64>,
    /// About sequences that are released.
    pub return_hints: Vec<ReturnHint>,
    /// Sequences to move to the host tier.
    pub offloads: Vec<i64>,
    /// Prompts that wait at the client, the next one first.
    pub expected_prompts: Vec<ExpectedPrompt>,
    pub trims: Vec<Trim>,
    pub forks: Vec<Fork>,
    pub extends: Vec<Extend>,
    pub restores: Vec<Restore>,
    pub admissions: Vec<Admission>,
    /// The most tokens restores and admissions may compute together; 0: no limit.
    pub admission_token_budget: usize,
    /// Blocks that restores and admissions leave allocatable.
    pub admission_reserve: usize,
    pub host_copy_use: HostCopyUse,
    /// No copies are read from the disk for it.
    pub skips_disk: bool,
    /// Admissions and expected prompts may be another tenant's than the lease's.
    pub names_tenants: bool,
    /// Prefix hashes of the first admissions that were computed before; planning computes the others.
    #[serde(skip)]
    pub hashes: Vec<PromptHashes>,
}

/// The prefix hashes of a prompt's first blocks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PromptHashes {
    pub root: Hash,
    pub hashes: Vec<Hash>,
}

impl PromptHashes {
    /// Of no block yet.
    pub fn new(root: Hash) -> PromptHashes {
        PromptHashes { root, hashes: Vec::new() }
    }

    /// Computes the hashes of the next blocks of a prompt, at most so many; returns how many.
    pub fn extend(&mut self, tokens: &[i32], block_size: usize, most: usize) -> usize {
        let (first, num_full) = (self.hashes.len(), tokens.len() / block_size);
        let end = num_full.min(first.saturating_add(most));
        let parent = self.hashes.last().copied().unwrap_or(self.root);
        chain_hashes(parent, &tokens[first * block_size..end * block_size], block_size, &mut self.hashes);
        end - first
    }
}

impl StepRequest {
    /// Refused (INVALID_ARGUMENT) if a sequence is extended twice: it can be computed only once in a step.
    pub fn refuse_repeated(&self) -> Result<()> {
        let mut seq_ids: Vec<i32> = self.extends.iter().map(|extend| extend.seq_id).collect();
        seq_ids.sort_unstable();
        let Some(pair) = seq_ids.windows(2).find(|pair| pair[0] == pair[1]) else {
            return Ok(());
        };
        let value = format!("{} more than once", pair[0]);
        Err(Failure::Refused(invalid("extends.sequence_ids", value, "distinct")))
    }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RefusedItem {
    pub item: PlanItem,
    pub seq_id: i64,
    pub refusal: Refusal,
}

/// Why an admission did not find a block.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AdmissionMiss {
    pub seq_id: i32,
    /// The index of the block.
    pub index: usize,
    pub miss: Miss,
    /// The name of the tenant of the admission, if that evicted or reset it.
    pub lost_by: Option<Vec<u8>>,
}

/// The blocks that one step may access, and its computations. Built while the step is planned, constant afterwards.
///
/// Lists named alike belong together by index, as in quire.cache.v1.StepGrant.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct GrantedStep {
    pub step_number: u64,
    pub known_step: u64,
    pub released_ids: Vec<i32>,
    pub offloaded_ids: Vec<i32>,
    pub fork_parent_ids: Vec<i32>,
    pub fork_child_ids: Vec<i32>,
    pub write_seq_ids: Vec<i32>,
    pub write_first_indexes: Vec<u32>,
    pub write_block_counts: Vec<u32>,
    pub write_block_ids: Vec<BlockId>,
    /// Empty if all writes are of group 0.
    pub write_groups: Vec<u32>,
    pub passed_seq_ids: Vec<i32>,
    pub passed_groups: Vec<u32>,
    pub passed_counts: Vec<u32>,
    pub copy_sources: Vec<BlockId>,
    pub copy_targets: Vec<BlockId>,
    pub offload_sources: Vec<BlockId>,
    pub offload_targets: Vec<TierBlockId>,
    pub restore_sources: Vec<TierBlockId>,
    pub restore_targets: Vec<BlockId>,
    pub run_seq_ids: Vec<i32>,
    pub run_starts: Vec<u32>,
    pub run_token_counts: Vec<u32>,
    pub run_samples: Vec<bool>,
    pub given_run_indexes: Vec<u32>,
    pub given_digests: Vec<u8>,
    /// Empty if no run has drafts.
    pub run_draft_counts: Vec<u32>,
    /// The adapters of the runs, each once.
    pub adapters: Vec<Vec<u8>>,
    /// 1 plus the index of a run's adapter, 0 for none; empty if no run has one.
    pub run_adapters: Vec<u32>,
    pub refusals: Vec<RefusedItem>,
    pub admitted_ids: Vec<i32>,
    pub admitted_cached_counts: Vec<u32>,
    /// Tokens that are computed in full blocks, and published. 0 for what is resumed.
    pub admitted_written_counts: Vec<u32>,
    /// Tokens that breakpoints keep. Empty if no admission has any.
    pub admitted_kept_counts: Vec<u32>,
    /// Why admissions that ask for it did not find more.
    pub misses: Vec<AdmissionMiss>,
    pub restored_ids: Vec<i32>,
    /// Tokens that need not be computed again.
    pub restored_counts: Vec<u32>,
    pub counts: BlockCounts,
    /// None: there is no host tier.
    pub host_counts: Option<TierBlockCounts>,
}

impl GrantedStep {
    /// A checksum of the worker's orders: the same request, planned on the same books, has the same.
    pub fn checksum(&self) -> u64 {
        let numbers = [
            &self.write_first_indexes,
            &self.write_block_ids,
            &self.write_groups,
            &self.passed_counts,
            &self.copy_sources,
            &self.copy_targets,
            &self.offload_sources,
            &self.offload_targets,
            &self.restore_sources,
            &self.restore_targets,
            &self.run_starts,
            &self.run_token_counts,
            &self.run_draft_counts,
            &self.run_adapters,
            &self.admitted_cached_counts,
            &self.admitted_written_counts,
            &self.admitted_kept_counts,
        ];
        let ids =
            [&self.released_ids, &self.offloaded_ids, &self.fork_child_ids, &self.write_seq_ids, &self.run_seq_ids];
        let lists = numbers.into_iter().map(|list| fold(list.iter().copied()));
        let lists = lists.chain(ids.into_iter().map(|list| fold(list.iter().map(|id| *id as u32))));
        lists.fold(self.step_number, |all, list| all.rotate_left(7).wrapping_mul(PRIME) ^ list)
    }

    /// Adds the refusal of an item, if it was refused.
    pub fn answer(&mut self, item: PlanItem, seq_id: i64, answer: std::result::Result<(), Refusal>) {
        if let Err(refusal) = answer {
            self.refusals.push(RefusedItem { item, seq_id, refusal });
        }
    }

    /// The client gives the tokens of the next run, which have this digest.
    pub fn give(&mut self, digest: &[u8]) {
        self.given_run_indexes.push(self.run_seq_ids.len() as u32);
        self.given_digests.extend_from_slice(digest);
    }

    /// The next run is computed with this adapter; empty: with none.
    pub fn adapt(&mut self, adapter: &[u8]) {
        if adapter.is_empty() && self.adapters.is_empty() {
            return;
        }
        self.run_adapters.resize(self.run_seq_ids.len(), 0);
        let number = if adapter.is_empty() { 0 } else { self.number_of(adapter) };
        self.run_adapters.push(number);
    }

    fn number_of(&mut self, adapter: &[u8]) -> u32 {
        let index = self.adapters.iter().position(|known| known == adapter).unwrap_or_else(|| {
            self.adapters.push(adapter.to_vec());
            self.adapters.len() - 1
        });
        index as u32 + 1
    }

    /// Adds a write to the block table of a layer group.
    pub fn write(&mut self, seq_id: i32, group: Group, first_index: usize, blocks: &[BlockId]) {
        if group > 0 || !self.write_groups.is_empty() {
            self.write_groups.resize(self.write_seq_ids.len(), 0);
            self.write_groups.push(group.into());
        }
        self.write_seq_ids.push(seq_id);
        self.write_first_indexes.push(first_index as u32);
        self.write_block_counts.push(blocks.len() as u32);
        self.write_block_ids.extend_from_slice(blocks);
    }

    /// The first entries of a table, so many, are let go.
    pub fn pass(&mut self, seq_id: i32, group: Group, num_passed: usize) {
        self.passed_seq_ids.push(seq_id);
        self.passed_groups.push(group.into());
        self.passed_counts.push(num_passed as u32);
    }
}

/// The prime of 64-bit FNV.
const PRIME: u64 = 0x0000_0100_0000_01b3;

fn fold(numbers: impl ExactSizeIterator<Item = u32>) -> u64 {
    let num_numbers = numbers.len() as u64;
    numbers.fold(num_numbers, |all, number| (all ^ u64::from(number)).wrapping_mul(PRIME).rotate_left(23))
}
