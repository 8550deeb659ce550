//! The books of a pool of KV blocks.
//!
//!     books       one pool in one epoch: leases' sequences and steps in flight
//!       planner   plans a step            settle    enters what was computed      audit   checks I1 to I4
//!       sequences tokens and tables       steps     what is in flight             plans   requests and plans
//!       pool      who holds a block       prefix    what is found                 eviction, lineage, retention
//!       host      who holds a block of the host tier
//!     tenants     whose a block is
//!     looking   pages and changes of blocks   explain   why a prefix misses
//!     journal   what changed last   losses   what was cached once   contents   what is in blocks, for who may ask
//!     wire        plans as bytes
//!     record      changes as values: to be written down, and made again     store   the files they are written to
//!     python      the only one that knows Python
//!
//! No clock. No I/O and no threads either, but in the store.

#![forbid(unsafe_code)]

pub mod accounts;
pub mod advice;
pub mod audit;
pub mod books;
pub mod contents;
pub mod errors;
pub mod eviction;
pub mod explain;
pub mod host;
pub mod journal;
pub mod lineage;
pub mod looking;
pub mod losses;
pub mod parking;
pub mod pins;
pub mod planner;
pub mod plans;
pub mod pool;
pub mod prefix;
#[cfg(feature = "python")]
mod python;
pub mod record;
pub mod retention;
pub mod room;
pub mod sequences;
pub mod settle;
pub mod steps;
pub mod store;
pub mod tenants;
pub mod wire;
