//! The books of a pool of KV blocks.
//!
//!     books     one pool in one epoch: leases, sequences, steps in flight, plans, reports; listings
//!     cache     blocks: reference counts, the prefix index, eviction
//!     store     changes as values, and the files that they are written to
//!     wire      messages of protos/quire/cache/v1
//!     errors    refusals and broken invariants
//!     python    the Python bindings, and eviction policies in Python; no other module uses Python
//!
//! No clock. No I/O and no threads outside of `store::files`.

#![forbid(unsafe_code)]

pub mod books;
pub mod cache;
pub mod errors;
#[cfg(feature = "python")]
mod python;
pub mod store;
pub mod wire;
