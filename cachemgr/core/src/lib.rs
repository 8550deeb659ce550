//! The books of a pool of KV blocks.
//!
//!     books     one pool in one epoch: leases, sequences, steps in flight, plans, reports; what can be asked of them
//!     cache     blocks: who holds them, what is found, what is evicted
//!     store     changes as values, and the files that they are written to
//!     wire      messages of protos/quire/cache/v1
//!     errors    refusals, and books that are wrong
//!     python    the only one that knows Python
//!
//! No clock. No I/O and no threads either, but in `store::files`.

#![forbid(unsafe_code)]

pub mod books;
pub mod cache;
pub mod errors;
#[cfg(feature = "python")]
mod python;
pub mod store;
pub mod wire;
