//! Sizes of a pool, and values derived from them.

use serde::{Deserialize, Serialize};

/// Sizes of a pool and the model on it; constant for an epoch.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Geometry {
    /// Tokens per block.
    pub block_size: usize,
    /// The null block included.
    pub num_blocks: usize,
    /// Blocks of the host tier; 0: there is none.
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

    /// The longest sequence: the lesser of the model's context and the pool's blocks.
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

#[cfg(test)]
mod tests {
    use crate::books::tests::geometry;

    #[test]
    fn a_sequence_is_as_long_as_model_and_pool_allow() {
        assert_eq!([3, 31, 32, 40].map(|num_usable| geometry(num_usable).max_tokens()), [6, 62, 64, 64]);
        assert_eq!([0, 1, 2, 3].map(|num_tokens| geometry(3).num_blocks_for(num_tokens)), [0, 1, 1, 2]);
    }
}
