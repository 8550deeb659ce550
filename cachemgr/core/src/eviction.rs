//! What is given up first of the blocks that nobody holds but that could be found again.

use std::fmt::Debug;

use serde::{Deserialize, Serialize};

use crate::lineage::Lineage;
use crate::prefix::{BlockId, Hash, NULL_BLOCK};

/// Keeps the parked blocks: findable, and held by nobody. Each method's cost is O(1) per block it is given.
pub trait EvictionPolicy: Debug + Send + Sync {
    /// A sequence begins: `found` are its blocks with known content, in table order, `fresh` those that continue
    /// them. `hashes` are the prefix hashes of its full blocks, from the first one on.
    fn admit(&mut self, found: &[BlockId], fresh: &[BlockId], hashes: &[Hash]);

    /// Nobody holds these any more; they can be given up from now on. Children come before their parents.
    fn park(&mut self, blocks: &[BlockId]);

    /// In use again, or dropped: no longer to be given up.
    fn unpark(&mut self, blocks: &[BlockId]);

    /// Free, and without content: released before they were computed, or dropped. They are not parked.
    fn forget(&mut self, blocks: &[BlockId]);

    /// Gives up `count` of the parked blocks, children before their parents. There have to be as many.
    fn evict(&mut self, count: usize, victims: &mut Vec<BlockId>);

    /// How many blocks are parked.
    fn num_parked(&self) -> usize;

    /// Whether the block is parked.
    fn is_parked(&self, block: BlockId) -> bool;

    /// The parked blocks, each once.
    fn parked(&self) -> Vec<BlockId>;

    /// What it keeps, to be written down.
    fn save(&self) -> SavedPolicy<'_>;

    /// The policy that learns, if it is this one.
    fn lineage(&mut self) -> Option<&mut Lineage> {
        None
    }
}

/// By name; the first is the default.
pub const POLICIES: [&str; 2] = ["lineage", "lru"];

/// A policy for blocks 1 to num_blocks - 1, if there is one of the name.
pub fn make_policy(name: &str, num_blocks: usize) -> Option<Box<dyn EvictionPolicy>> {
    match name {
        "lineage" => Some(Box::new(Lineage::new(num_blocks))),
        "lru" => Some(Box::new(Lru::new(num_blocks))),
        _ => None,
    }
}

/// A policy as it is written down.
#[derive(Serialize)]
pub enum SavedPolicy<'a> {
    Lineage(&'a Lineage),
    Lru(&'a Lru),
}

/// How a policy is written down and read again.
pub mod saved {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use super::{EvictionPolicy, Lineage, Lru};

    /// As SavedPolicy.
    #[derive(Deserialize)]
    enum Read {
        Lineage(Box<Lineage>),
        Lru(Lru),
    }

    #[allow(clippy::borrowed_box)] // as serde asks for it
    pub fn serialize<S: Serializer>(policy: &Box<dyn EvictionPolicy>, serializer: S) -> Result<S::Ok, S::Error> {
        policy.save().serialize(serializer)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Box<dyn EvictionPolicy>, D::Error> {
        Ok(match Read::deserialize(deserializer)? {
            Read::Lineage(lineage) => lineage,
            Read::Lru(lru) => Box::new(lru),
        })
    }
}

/// Doubly linked rings of nodes in two flat arrays, a ring for each sentinel: a node that stays.
#[derive(Debug, Serialize, Deserialize)]
pub struct Rings {
    next: Vec<u32>,
    prev: Vec<u32>,
}

impl Rings {
    pub fn new(num_nodes: usize) -> Rings {
        let alone: Vec<u32> = (0..num_nodes as u32).collect();
        Rings { next: alone.clone(), prev: alone }
    }

    /// More nodes, each alone, if there are fewer.
    pub fn reach(&mut self, num_nodes: usize) {
        for node in self.next.len()..num_nodes {
            self.next.push(node as u32);
            self.prev.push(node as u32);
        }
    }

    /// Puts a node that is in no ring at the end of one.
    pub fn append(&mut self, node: u32, sentinel: u32) {
        let before = self.prev[sentinel as usize];
        self.next[before as usize] = node;
        self.prev[node as usize] = before;
        self.next[node as usize] = sentinel;
        self.prev[sentinel as usize] = node;
    }

    /// Takes a node out, wherever it is.
    pub fn remove(&mut self, node: u32) {
        let (before, after) = (self.prev[node as usize], self.next[node as usize]);
        self.next[before as usize] = after;
        self.prev[after as usize] = before;
        (self.next[node as usize], self.prev[node as usize]) = (node, node);
    }

    /// Whether a node that is no sentinel is in a ring, between neighbours that agree.
    pub fn contains(&self, node: u32) -> bool {
        let (before, after) = (self.prev[node as usize], self.next[node as usize]);
        after != node && self.next[before as usize] == node && self.prev[after as usize] == node
    }

    /// The first node of a ring; the sentinel if there is none.
    pub fn first(&self, sentinel: u32) -> u32 {
        self.next[sentinel as usize]
    }

    /// The nodes of a ring; ends after as many as there can be, should the ring be broken.
    pub fn nodes(&self, sentinel: u32) -> impl Iterator<Item = u32> + '_ {
        std::iter::successors(Some(self.first(sentinel)), |node| Some(self.first(*node)))
            .take(self.next.len())
            .take_while(move |node| *node != sentinel)
    }
}

/// The least recently parked first. 8 bytes per block.
#[derive(Debug, Serialize, Deserialize)]
pub struct Lru {
    ring: Rings, // the null block is its sentinel
    num_parked: usize,
}

impl Lru {
    pub fn new(num_blocks: usize) -> Lru {
        Lru { ring: Rings::new(num_blocks), num_parked: 0 }
    }
}

impl EvictionPolicy for Lru {
    fn save(&self) -> SavedPolicy<'_> {
        SavedPolicy::Lru(self)
    }

    fn admit(&mut self, _: &[BlockId], _: &[BlockId], _: &[Hash]) {}

    fn forget(&mut self, _: &[BlockId]) {}

    fn park(&mut self, blocks: &[BlockId]) {
        blocks.iter().for_each(|block| self.ring.append(*block, NULL_BLOCK));
        self.num_parked += blocks.len();
    }

    fn unpark(&mut self, blocks: &[BlockId]) {
        blocks.iter().for_each(|block| self.ring.remove(*block));
        self.num_parked -= blocks.len();
    }

    fn evict(&mut self, count: usize, victims: &mut Vec<BlockId>) {
        self.num_parked -= count;
        for _ in 0..count {
            let block = self.ring.first(NULL_BLOCK);
            self.ring.remove(block);
            victims.push(block);
        }
    }

    fn num_parked(&self) -> usize {
        self.num_parked
    }

    fn is_parked(&self, block: BlockId) -> bool {
        self.ring.contains(block)
    }

    fn parked(&self) -> Vec<BlockId> {
        self.ring.nodes(NULL_BLOCK).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_leave_a_ring_from_anywhere() {
        let mut rings = Rings::new(8);
        for (node, sentinel) in [(1, 6), (2, 6), (3, 7), (4, 6)] {
            rings.append(node, sentinel);
        }
        rings.remove(2);
        assert_eq!(rings.nodes(6).collect::<Vec<_>>(), [1, 4]);
        assert_eq!(rings.nodes(7).collect::<Vec<_>>(), [3]);
        rings.remove(3);
        rings.append(2, 7);
        assert_eq!(rings.nodes(7).collect::<Vec<_>>(), [2]);
        assert_eq!([1, 2, 3, 4].map(|node| rings.contains(node)), [true, true, false, true]);
        rings.remove(1);
        rings.remove(4);
        assert_eq!((rings.first(6), rings.first(7)), (6, 2));
        rings.next[7] = 7;
        assert!(!rings.contains(2));
    }

    #[test]
    fn a_broken_ring_ends() {
        let mut rings = Rings::new(4);
        rings.append(1, 0);
        rings.next[1] = 1;
        assert_eq!(rings.nodes(0).count(), 4);
    }

    #[test]
    fn lru_gives_up_what_was_parked_first() {
        let mut policy = Lru::new(8);
        policy.park(&[3, 1, 2]);
        policy.park(&[5]);
        policy.unpark(&[1]);
        policy.park(&[1]);
        let mut victims = vec![9];
        policy.evict(3, &mut victims);
        assert_eq!(victims, [9, 3, 2, 5]);
        assert_eq!((policy.num_parked(), policy.parked()), (1, vec![1]));
    }
}
