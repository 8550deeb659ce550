//! The eviction policies by name.

use std::ops::{Deref, DerefMut};

use serde::{Deserialize, Serialize};

use crate::cache::eviction::EvictionPolicy;
use crate::cache::eviction::lineage::Lineage;
use crate::cache::eviction::lru::Lru;

/// The first is the default.
pub const POLICIES: [&str; 2] = ["lineage", "lru"];

/// Any of the policies.
#[derive(Debug, Serialize, Deserialize)]
pub enum Policy {
    Lineage(Box<Lineage>),
    Lru(Lru),
    /// The caller's own, for experiments. It has no name, and books with it can't be stored.
    #[serde(skip)]
    Given(Box<dyn EvictionPolicy>),
}

impl Policy {
    /// A policy for blocks 1 to num_blocks - 1, if there is one of the name.
    pub fn named(name: &str, num_blocks: usize) -> Option<Policy> {
        match name {
            "lineage" => Some(Policy::Lineage(Box::new(Lineage::new(num_blocks)))),
            "lru" => Some(Policy::Lru(Lru::new(num_blocks))),
            _ => None,
        }
    }

    /// The policy that learns, if it is this one.
    pub fn lineage(&mut self) -> Option<&mut Lineage> {
        match self {
            Policy::Lineage(lineage) => Some(lineage),
            Policy::Lru(_) | Policy::Given(_) => None,
        }
    }
}

impl Deref for Policy {
    type Target = dyn EvictionPolicy;

    fn deref(&self) -> &Self::Target {
        match self {
            Policy::Lineage(lineage) => &**lineage,
            Policy::Lru(lru) => lru,
            Policy::Given(policy) => &**policy,
        }
    }
}

impl DerefMut for Policy {
    fn deref_mut(&mut self) -> &mut Self::Target {
        match self {
            Policy::Lineage(lineage) => &mut **lineage,
            Policy::Lru(lru) => lru,
            Policy::Given(policy) => &mut **policy,
        }
    }
}
