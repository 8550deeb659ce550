//! Counters and sums of a pool.

use serde::{Deserialize, Serialize};

/// Counters and sums of the pool, kept up to date by each change.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolCounters {
    pub num_active: usize,
    pub num_references: usize,
    /// Blocks with more than one reference.
    pub num_shared: usize,
    pub num_allocated: u64,
    pub num_evicted: u64,
}
