//! Prefixes of a prompt that its breakpoints keep.

use serde::{Deserialize, Serialize};

use crate::books::plans::Breakpoint;
use crate::cache::advice::{Millis, millis};

/// The first full blocks of a prompt, kept for a time after each use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptPrefix {
    pub num_blocks: usize,
    /// At least that of the longer ones: they begin with its blocks.
    pub ttl: Millis,
}

impl KeptPrefix {
    /// The prefixes of a prompt's breakpoints in full blocks, the shorter ones first.
    pub fn of(breakpoints: &[Breakpoint], block_size: usize) -> Box<[KeptPrefix]> {
        let mut longest = 0;
        let mut tail_first: Vec<KeptPrefix> = Vec::with_capacity(breakpoints.len());
        for Breakpoint { num_tokens, ttl } in breakpoints.iter().rev() {
            longest = millis(*ttl).max(longest);
            tail_first.push(KeptPrefix { num_blocks: num_tokens / block_size, ttl: longest });
        }
        tail_first.reverse();
        tail_first.into()
    }

    /// Those of a sequence that is cut to so many full blocks.
    pub fn cut(prefixes: &mut [KeptPrefix], num_full: usize) {
        prefixes.iter_mut().for_each(|prefix| prefix.num_blocks = prefix.num_blocks.min(num_full));
    }
}

/// The blocks of all kept prefixes together.
pub fn num_kept_blocks(prefixes: &[KeptPrefix]) -> usize {
    prefixes.last().map_or(0, |prefix| prefix.num_blocks)
}
