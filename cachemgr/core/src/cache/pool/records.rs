//! The records of a pool beside its present state.

use serde::{Deserialize, Serialize};

use crate::cache::contents::Contents;
use crate::cache::journal::Journal;
use crate::cache::losses::{Callers, Losses, Roots};

/// No decision on blocks depends on these records.
#[derive(Debug, Serialize, Deserialize)]
pub struct Records {
    /// The last changes.
    pub journal: Journal,
    /// Content that was in the index and is lost.
    pub losses: Losses,
    /// The callers that reset content.
    pub callers: Callers,
    /// The roots of admissions.
    pub roots: Roots,
    /// Tokens and namespaces of the blocks that can be found, if they are kept.
    pub contents: Contents,
}

impl Records {
    pub fn new(num_blocks: usize) -> Records {
        let (journal, losses) = (Journal::new(num_blocks), Losses::new(num_blocks));
        Records { journal, losses, callers: Callers::default(), roots: Roots::default(), contents: Contents::default() }
    }
}
