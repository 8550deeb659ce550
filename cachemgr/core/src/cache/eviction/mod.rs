//! Eviction: cached blocks that no sequence holds, and the order in which they are given up.
//!
//!     parking.rs               the parked blocks; `evict` takes the victims: by tenant, by advice, then by the policy
//!     lineage.rs, trial.rs     the default policy: LRU, with candidates tried beside it
//!     lru.rs                   the policy that gives up the least recently used block
//!     policies.rs              the policies by name
//!     rings.rs                 linked lists of blocks
//!
//! This file has the interface of a policy.

pub mod lineage;
pub mod lru;
pub mod parking;
pub mod policies;
pub mod rings;
pub mod trial;

use std::fmt::Debug;

use crate::cache::prefix::{BlockId, Hash};

/// Keeps the parked blocks: in the index, without a holder. Each method's cost is O(1) per block it is given.
pub trait EvictionPolicy: Debug + Send + Sync {
    /// A sequence begins: `found` are its blocks with known content, in table order, `fresh` those that continue
    /// them. `hashes` are the prefix hashes of its full blocks, from the first one on.
    fn admit(&mut self, found: &[BlockId], fresh: &[BlockId], hashes: &[Hash]);

    /// These have no holder any more, and can be evicted from now on. Children come before their parents.
    fn park(&mut self, blocks: &[BlockId]);

    /// In use again, or dropped: no longer to be given up.
    fn unpark(&mut self, blocks: &[BlockId]);

    /// Free, and without content: released before they were computed, or dropped. They are not parked.
    fn forget(&mut self, blocks: &[BlockId]);

    /// Gives up `count` of the parked blocks, children before their parents. There have to be as many.
    fn evict(&mut self, count: usize, victims: &mut Vec<BlockId>);

    /// The number of parked blocks.
    fn num_parked(&self) -> usize;

    /// True if the block is parked.
    fn is_parked(&self, block: BlockId) -> bool;

    /// The parked blocks, each once.
    fn parked(&self) -> Vec<BlockId>;
}
