//! Counters of a pool.

use serde::{Deserialize, Serialize};

/// Counters of a pool since its epoch was attached.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct Counters {
    pub planned_steps: u64,
    pub computed_steps: u64,
    pub failed_steps: u64,
    pub skipped_steps: u64,
    pub admissions: u64,
    pub admitted_tokens: u64,
    pub cached_tokens: u64,
    pub written_tokens: u64,
    /// Tokens that were to be computed again because their blocks were evicted.
    pub recomputed_tokens: u64,
    pub forks: u64,
    pub copied_blocks: u64,
    /// Sequences that were released to make room and admitted again, which do not count as admissions; their tokens.
    pub resumed_admissions: u64,
    pub resumed_tokens: u64,
    pub resumed_cached_tokens: u64,
    /// Sequences moved to the host tier and back, and blocks copied for them.
    pub offloads: u64,
    pub restores: u64,
    pub offloaded_blocks: u64,
    pub restored_blocks: u64,
    /// Evicted blocks that were copied to the host tier, and tokens that admissions found there.
    pub kept_in_host_blocks: u64,
    pub found_in_host_tokens: u64,
    /// Tokens with keys and values that reported steps computed, and tokens that these steps added to sequences.
    pub computed_tokens: u64,
    pub generated_tokens: u64,
    /// Drafts that these steps verified, and those of them that they accepted.
    pub drafted_tokens: u64,
    pub accepted_drafts: u64,
    /// Since the books are here: they are not stored.
    #[serde(skip)]
    pub expired_leases: u64,
}

impl Counters {
    /// A prompt was admitted. What is resumed writes nothing.
    pub fn count_admission(&mut self, num_tokens: usize, num_cached: usize, num_written: usize, is_resumed: bool) {
        let (admissions, tokens, cached_tokens) = if is_resumed {
            (&mut self.resumed_admissions, &mut self.resumed_tokens, &mut self.resumed_cached_tokens)
        } else {
            (&mut self.admissions, &mut self.admitted_tokens, &mut self.cached_tokens)
        };
        *admissions += 1;
        *tokens += num_tokens as u64;
        *cached_tokens += num_cached as u64;
        self.written_tokens += num_written as u64;
    }
}
