//! Doubly linked lists of numbered nodes in flat arrays.

use serde::{Deserialize, Serialize};

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
        self.append_all(&[node], sentinel);
    }

    /// The same for several nodes, in order.
    pub fn append_all(&mut self, nodes: &[u32], sentinel: u32) {
        let mut before = self.prev[sentinel as usize];
        for &node in nodes {
            self.next[before as usize] = node;
            self.prev[node as usize] = before;
            before = node;
        }
        self.next[before as usize] = sentinel;
        self.prev[sentinel as usize] = before;
    }

    /// Takes the first nodes of a ring out, at most `count` and as long as `is_taken` says so, and appends them to `taken`.
    pub fn take_first(&mut self, sentinel: u32, count: usize, is_taken: impl Fn(u32) -> bool, taken: &mut Vec<u32>) {
        let mut node = self.first(sentinel);
        for _ in 0..count {
            if node == sentinel || !is_taken(node) {
                break;
            }
            taken.push(node);
            let after = std::mem::replace(&mut self.next[node as usize], node);
            self.prev[node as usize] = node;
            node = after;
        }
        self.next[sentinel as usize] = node;
        self.prev[node as usize] = sentinel;
    }

    /// Takes a node out, wherever it is.
    pub fn remove(&mut self, node: u32) {
        let (before, after) = (self.prev[node as usize], self.next[node as usize]);
        self.next[before as usize] = after;
        self.prev[after as usize] = before;
        (self.next[node as usize], self.prev[node as usize]) = (node, node);
    }

    /// True if a node that is no sentinel is in a ring, between neighbours that agree.
    pub fn contains(&self, node: u32) -> bool {
        let (before, after) = (self.prev[node as usize], self.next[node as usize]);
        after != node && self.next[before as usize] == node && self.prev[after as usize] == node
    }

    /// The node after this one, the sentinel after the last.
    pub fn next(&self, node: u32) -> u32 {
        self.next[node as usize]
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
    fn several_nodes_come_and_go_as_one_by_one() {
        let (mut rings, mut others) = (Rings::new(8), Rings::new(8));
        for nodes in [&[3, 1, 2][..], &[], &[5, 4]] {
            rings.append_all(nodes, 7);
            nodes.iter().for_each(|node| others.append(*node, 7));
            assert_eq!((&rings.next, &rings.prev), (&others.next, &others.prev));
        }
        for (count, last_taken, expected) in
            [(2, 9, &[3, 1][..]), (9, 2, &[2]), (0, 9, &[]), (9, 9, &[5, 4]), (9, 9, &[])]
        {
            let mut taken = vec![6];
            rings.take_first(7, count, |node| node <= last_taken, &mut taken);
            assert_eq!((taken[0], &taken[1..]), (6, expected));
            expected.iter().for_each(|node| others.remove(*node));
            assert_eq!((&rings.next, &rings.prev), (&others.next, &others.prev));
        }
    }

    #[test]
    fn a_broken_ring_ends() {
        let mut rings = Rings::new(4);
        rings.append(1, 0);
        rings.next[1] = 1;
        assert_eq!(rings.nodes(0).count(), 4);
    }
}
