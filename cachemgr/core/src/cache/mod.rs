//! The blocks of a pool: reference counts, the prefix index, and the eviction order.

pub mod accounts;
pub mod advice;
pub mod contents;
pub mod disk;
pub mod eviction;
pub mod groups;
pub mod journal;
pub mod keeps;
pub mod losses;
pub mod mixing;
pub mod pool;
pub mod prefix;
pub mod tenants;
pub mod tier;
pub mod tier_copies;
