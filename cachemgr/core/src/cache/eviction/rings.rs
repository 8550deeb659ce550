//! Doubly linked lists of numbered nodes in flat arrays.

use serde::{Deserialize, Serialize};

/// The neighbours of a node, beside each other: a node is mostly looked up in a cold line of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Link {
    next: u32,
    prev: u32,
}

impl Link {
    /// Of a node that is in no ring.
    fn alone(node: u32) -> Link {
        Link { next: node, prev: node }
    }
}

/// Doubly linked rings of nodes in a flat array, a ring for each sentinel: a node that stays.
#[derive(Debug, Serialize, Deserialize)]
pub struct Rings {
    links: Vec<Link>,
}

impl Rings {
    pub fn new(num_nodes: usize) -> Rings {
        Rings { links: (0..num_nodes as u32).map(Link::alone).collect() }
    }

    /// More nodes, each alone, if there are fewer.
    pub fn reach(&mut self, num_nodes: usize) {
        self.links.extend((self.links.len()..num_nodes).map(|node| Link::alone(node as u32)));
    }

    /// Puts a node that is in no ring at the end of one.
    pub fn append(&mut self, node: u32, sentinel: u32) {
        self.append_all(&[node], sentinel);
    }

    /// The same for several nodes, in order.
    pub fn append_all(&mut self, nodes: &[u32], sentinel: u32) {
        let mut before = self.links[sentinel as usize].prev;
        for &node in nodes {
            self.links[before as usize].next = node;
            self.links[node as usize].prev = before;
            before = node;
        }
        self.links[before as usize].next = sentinel;
        self.links[sentinel as usize].prev = before;
    }

    /// Puts nodes of a ring at its end, in order. Cost: O(1) for those that follow one another already, but for a look at
    /// each.
    pub fn move_to_end(&mut self, nodes: &[u32], sentinel: u32) {
        let mut rest = nodes;
        while !rest.is_empty() {
            let (run, others) = self.split_run(rest);
            let (first, last) = (run[0], run[run.len() - 1]);
            self.close_over(first, last);
            let end = std::mem::replace(&mut self.links[sentinel as usize].prev, last);
            self.links[end as usize].next = first;
            (self.links[first as usize].prev, self.links[last as usize].next) = (end, sentinel);
            rest = others;
        }
    }

    /// Takes the first nodes of a ring out, at most `count` and as long as `is_taken` says so, and appends them to `taken`.
    pub fn take_first(&mut self, sentinel: u32, count: usize, is_taken: impl Fn(u32) -> bool, taken: &mut Vec<u32>) {
        let mut node = self.first(sentinel);
        for _ in 0..count {
            if node == sentinel || !is_taken(node) {
                break;
            }
            taken.push(node);
            node = std::mem::replace(&mut self.links[node as usize], Link::alone(node)).next;
        }
        self.links[sentinel as usize].next = node;
        self.links[node as usize].prev = sentinel;
    }

    /// Takes the first nodes of a ring out, at most `count`, and appends them to `taken`. They keep their links, so that
    /// `contains` says nothing about them until they are in a ring again.
    pub fn cut_first(&mut self, sentinel: u32, count: usize, taken: &mut Vec<u32>) {
        taken.extend(self.nodes(sentinel).take(count));
        if let Some(last) = taken.last() {
            let after = self.links[*last as usize].next;
            self.links[sentinel as usize].next = after;
            self.links[after as usize].prev = sentinel;
        }
    }

    /// Takes those of these nodes out that are in a ring, and appends them to `taken`.
    pub fn take_all(&mut self, nodes: &[u32], taken: &mut Vec<u32>) {
        let mut rest = nodes;
        while let Some(first) = rest.first() {
            if !self.contains(*first) {
                rest = &rest[1..];
                continue;
            }
            let (run, others) = self.split_run(rest);
            self.close_over(run[0], run[run.len() - 1]);
            for &node in run {
                self.links[node as usize] = Link::alone(node);
            }
            taken.extend_from_slice(run);
            rest = others;
        }
    }

    /// The first of some nodes with those that follow it in its ring as they do here, and the others.
    fn split_run<'a>(&self, nodes: &'a [u32]) -> (&'a [u32], &'a [u32]) {
        let num_following = nodes.windows(2).take_while(|pair| self.links[pair[0] as usize].next == pair[1]).count();
        nodes.split_at(1 + num_following)
    }

    /// Connects what is before a node with what is after it or one that follows it.
    fn close_over(&mut self, first: u32, last: u32) {
        let (before, after) = (self.links[first as usize].prev, self.links[last as usize].next);
        self.links[before as usize].next = after;
        self.links[after as usize].prev = before;
    }

    /// Takes a node out, wherever it is.
    pub fn remove(&mut self, node: u32) {
        self.close_over(node, node);
        self.links[node as usize] = Link::alone(node);
    }

    /// True if a node that is no sentinel is in a ring, between neighbours that agree.
    pub fn contains(&self, node: u32) -> bool {
        let Link { next, prev } = self.links[node as usize];
        next != node && self.links[next as usize].prev == node && self.links[prev as usize].next == node
    }

    /// The node after this one, the sentinel after the last.
    pub fn next(&self, node: u32) -> u32 {
        self.links[node as usize].next
    }

    /// The first node of a ring; the sentinel if there is none.
    pub fn first(&self, sentinel: u32) -> u32 {
        self.links[sentinel as usize].next
    }

    /// The nodes of a ring; ends after as many as there can be, should the ring be broken.
    pub fn nodes(&self, sentinel: u32) -> impl Iterator<Item = u32> + '_ {
        std::iter::successors(Some(self.first(sentinel)), |node| Some(self.first(*node)))
            .take(self.links.len())
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
        rings.links[7].next = 7;
        assert!(!rings.contains(2));
    }

    #[test]
    fn several_nodes_come_and_go_as_one_by_one() {
        let (mut rings, mut others) = (Rings::new(8), Rings::new(8));
        for nodes in [&[3, 1, 2][..], &[], &[5, 4]] {
            rings.append_all(nodes, 7);
            nodes.iter().for_each(|node| others.append(*node, 7));
            assert_eq!(rings.links, others.links);
        }
        for (count, last_taken, expected) in
            [(2, 9, &[3, 1][..]), (9, 2, &[2]), (0, 9, &[]), (9, 9, &[5, 4]), (9, 9, &[])]
        {
            let mut taken = vec![6];
            rings.take_first(7, count, |node| node <= last_taken, &mut taken);
            assert_eq!((taken[0], &taken[1..]), (6, expected));
            expected.iter().for_each(|node| others.remove(*node));
            assert_eq!(rings.links, others.links);
        }
    }

    #[test]
    fn the_first_ones_are_cut_off_and_come_back() {
        let mut rings = Rings::new(8);
        rings.append_all(&[3, 1, 2], 7);
        for (count, expected, left) in [(0, &[][..], &[3, 1, 2][..]), (2, &[3, 1], &[2]), (9, &[2], &[]), (9, &[], &[])]
        {
            let mut taken = Vec::new();
            rings.cut_first(7, count, &mut taken);
            assert_eq!((&taken[..], &rings.nodes(7).collect::<Vec<_>>()[..]), (expected, left));
        }
        rings.append_all(&[2, 3], 7);
        assert_eq!((rings.nodes(7).collect::<Vec<_>>(), rings.first(7)), (vec![2, 3], 2));
        rings.move_to_end(&[2], 7);
        rings.remove(3);
        assert_eq!(rings.nodes(7).collect::<Vec<_>>(), [2]);
    }

    #[test]
    fn those_in_a_ring_leave_it_from_anywhere() {
        let (mut rings, mut others) = (Rings::new(10), Rings::new(10));
        rings.append_all(&[1, 2, 3, 4, 5, 6], 9);
        others.append_all(&[1, 2, 3, 4, 5, 6], 9);
        for (nodes, expected) in
            [(&[7, 2, 3, 8][..], &[2, 3][..]), (&[3, 2], &[]), (&[6, 5, 1], &[6, 5, 1]), (&[4], &[4])]
        {
            let mut taken = Vec::new();
            rings.take_all(nodes, &mut taken);
            assert_eq!(taken, expected);
            expected.iter().for_each(|node| others.remove(*node));
            assert_eq!(rings.links, others.links, "{nodes:?}");
        }
    }

    #[test]
    fn nodes_move_to_the_end_as_one_by_one() {
        let (mut rings, mut others) = (Rings::new(8), Rings::new(8));
        for node in 1..7 {
            rings.append(node, 7);
            others.append(node, 7);
        }
        for nodes in [&[2, 3][..], &[2, 3], &[1, 5, 6], &[3], &[], &[6, 5, 1], &[4, 2, 3, 6, 5, 1]] {
            rings.move_to_end(nodes, 7);
            for node in nodes {
                others.remove(*node);
                others.append(*node, 7);
            }
            assert_eq!(rings.links, others.links, "{nodes:?}");
        }
    }

    #[test]
    fn a_broken_ring_ends() {
        let mut rings = Rings::new(4);
        rings.append(1, 0);
        rings.links[1].next = 1;
        assert_eq!(rings.nodes(0).count(), 4);
    }
}
