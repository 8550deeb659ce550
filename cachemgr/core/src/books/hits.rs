//! Finds prefixes in the index: with layer groups, the longest one with all the blocks that its next token sees.

use std::borrow::Cow;

use crate::books::geometry::Geometry;
use crate::books::tables::{BlockTable, Tables};
use crate::cache::groups::{Group, Span, identity};
use crate::cache::prefix::{BlockId, Hash, Namespace, PrefixIndex, chain_hashes, root_hash};

/// A prefix that was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hit {
    /// Its full blocks.
    pub num_blocks: usize,
    /// By group, the blocks that the next token sees.
    pub tables: Tables,
}

impl Hit {
    /// All of its blocks, group by group.
    pub fn blocks(&self) -> Cow<'_, [BlockId]> {
        match &self.tables[..] {
            [table] => table.blocks().into(),
            tables => tables.iter().flat_map(|table| table.blocks()).copied().collect(),
        }
    }

    /// Blocks that its tables lack to end at these indexes.
    pub fn num_missing(&self, ends: &[usize]) -> usize {
        self.tables.iter().zip(ends).map(|(table, end)| end - table.end()).sum()
    }
}

/// The prefix hashes of a prompt's blocks, to be looked up in each group.
#[derive(Clone, Copy)]
pub struct Prefix<'a> {
    pub geometry: &'a Geometry,
    pub index: &'a PrefixIndex,
    pub hashes: &'a [Hash],
}

impl Prefix<'_> {
    /// The longest prefix that can be continued from the index alone.
    pub fn find(&self) -> Hit {
        self.limit_to_windows(self.find_full())
    }

    /// Shortens a prefix that all full groups have to one that can be continued.
    pub fn limit_to_windows(&self, mut hit: Hit) -> Hit {
        if self.geometry.has_windows() {
            hit.num_blocks = self.find_windows(hit.num_blocks, &mut hit.tables).0;
            for (table, span) in hit.tables.iter_mut().zip(&self.geometry.groups) {
                table.truncate(hit.num_blocks);
                if !span.is_full() {
                    table.pass(self.first_needed(*span, hit.num_blocks));
                }
            }
        }
        hit
    }

    /// The longest prefix that all full groups have; the tables of the others are empty.
    pub fn find_full(&self) -> Hit {
        let mut num_blocks = self.hashes.len();
        let mut tables = Tables::with_capacity(self.geometry.groups.len());
        for (group, span) in self.geometry.groups() {
            let found = match (span, group) {
                (Span::Full, 0) => self.index.find(self.hashes),
                (Span::Full, _) => {
                    let hashes: Vec<Hash> =
                        self.hashes[..num_blocks].iter().map(|hash| identity(hash, group)).collect();
                    self.index.find(&hashes)
                }
                _ => Vec::new(),
            };
            if span.is_full() {
                num_blocks = num_blocks.min(found.len());
            }
            tables.push(BlockTable::new(0, found));
        }
        tables.iter_mut().for_each(|table| table.truncate(num_blocks));
        Hit { num_blocks, tables }
    }

    /// Of so many blocks, the longest prefix with the blocks of windowed groups that its next token sees, and the
    /// first block and group that keep all of them from being found, if it is shorter. Fills the tables of these groups.
    ///
    /// Cost: one lookup for each group and block from the end to the first one needed.
    fn find_windows(&self, most: usize, tables: &mut [BlockTable]) -> (usize, Option<(usize, Group)>) {
        let windows = || self.geometry.groups().filter(|(_, span)| !span.is_full());
        let mut known: Vec<Vec<BlockId>> = vec![Vec::new(); tables.len()]; // the last ones first
        let (mut num_blocks, mut num_known_to, mut missing) = (most, vec![most; tables.len()], None);
        'shorter: loop {
            for (group, span) in windows() {
                let at = usize::from(group);
                num_known_to[at] = num_known_to[at].min(num_blocks);
                let first = self.first_needed(span, num_blocks);
                while num_known_to[at] > first {
                    let index = num_known_to[at] - 1;
                    num_known_to[at] = index;
                    match self.index.lookup(&identity(&self.hashes[index], group)) {
                        Some(block) => known[at].push(block),
                        None => {
                            missing = missing.or(Some((index, group)));
                            known[at].clear();
                            num_blocks = index;
                            continue 'shorter;
                        }
                    }
                }
            }
            break;
        }
        for (group, _) in windows() {
            let at = usize::from(group);
            known[at].reverse();
            tables[at] = BlockTable::new(num_known_to[at], std::mem::take(&mut known[at]));
        }
        (num_blocks, missing)
    }

    /// The first block and group without which no more is found; None if all is found.
    pub fn first_missing(&self) -> Option<(usize, Group)> {
        let mut hit = self.find_full();
        if let (_, Some(missing)) = self.find_windows(hit.num_blocks, &mut hit.tables) {
            return Some(missing);
        }
        let hash = self.hashes.get(hit.num_blocks)?;
        let is_missing = |group: &Group| self.index.lookup(&identity(hash, *group)).is_none();
        let mut full = self.geometry.groups().filter(|(_, span)| span.is_full()).map(|(group, _)| group);
        full.find(is_missing).map(|group| (hit.num_blocks, group))
    }

    fn first_needed(&self, span: Span, num_blocks: usize) -> usize {
        self.geometry.first_needed(span, num_blocks * self.geometry.block_size)
    }
}

/// A lookup hashes so many blocks, and more only if it finds all of these: most pools hold nothing of a prompt.
pub const LOOKED_UP_AT_ONCE: usize = 16;

/// Returns the hit that an admission would have in the cache. Cost: hashes of the known blocks of the first layer
/// group, if that is a full one, and of one piece more.
pub fn find_cached(
    tokens: &[i32],
    namespace: &Namespace,
    tenant: &[u8],
    index: &PrefixIndex,
    geometry: &Geometry,
) -> Hit {
    let size = geometry.block_size;
    let num_usable = tokens.len().saturating_sub(1); // one token is left to compute
    let num_full = num_usable.min(geometry.max_tokens()) / size;
    let mut parent = root_hash(tenant, namespace, &geometry.model_fingerprint);
    let (mut hashes, begins_full) = (Vec::new(), geometry.groups[0].is_full());
    let mut found = Vec::new();
    for piece in tokens[..num_full * size].chunks(size * LOOKED_UP_AT_ONCE) {
        let before = hashes.len();
        chain_hashes(parent, piece, size, &mut hashes);
        if begins_full {
            found.append(&mut index.find(&hashes[before..]));
            if found.len() < hashes.len() {
                break;
            }
        }
        parent = hashes[hashes.len() - 1];
    }
    if geometry.groups == [Span::Full] {
        return Hit { num_blocks: found.len(), tables: Tables::from([BlockTable::new(0, found)]) };
    }
    Prefix { geometry, index, hashes: &hashes }.find()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::books::tests::geometry;
    use crate::cache::pool::tests::Random;
    use crate::cache::prefix::digest_of;

    const SPANS: [&[Span]; 6] = [
        &[Span::Full],
        &[Span::Sliding(3)],
        &[Span::Full, Span::Sliding(5)],
        &[Span::Full, Span::Full, Span::Sliding(1), Span::Sliding(4)],
        &[Span::Chunked(6)],
        &[Span::Full, Span::Chunked(3), Span::Sliding(7)],
    ];

    /// True if a prefix of so many blocks can be continued, by the words of the contract.
    fn is_hit(geometry: &Geometry, is_known: &dyn Fn(usize, Group) -> bool, num_blocks: usize) -> bool {
        geometry.groups().all(|(group, span)| {
            let first = span.first_seen(2 * num_blocks) / 2;
            (first..num_blocks).all(|index| is_known(index, group))
        })
    }

    #[test]
    fn the_longest_prefix_is_found_whose_next_token_sees_what_is_there() {
        let hashes: Vec<Hash> = (0..12).map(|number| digest_of(&[number])).collect();
        let (mut lengths, mut random) = (std::collections::BTreeSet::new(), Random(1));
        for spans in SPANS {
            let geometry = Geometry { groups: spans.to_vec(), ..geometry(64) };
            for round in 0..300 {
                let (mut index, mut next) = (PrefixIndex::new(65), 1);
                for (group, hash) in
                    geometry.groups().flat_map(|(group, _)| hashes.iter().map(move |hash| (group, hash)))
                {
                    if random.below(2 + round % 9) > 0 {
                        index.publish(&identity(hash, group), next);
                        next += 1;
                    }
                }
                let is_known = |at: usize, group| index.lookup(&identity(&hashes[at], group)).is_some();
                let longest = (0..=12).rev().find(|length| is_hit(&geometry, &is_known, *length)).unwrap();
                let prefix = Prefix { geometry: &geometry, index: &index, hashes: &hashes };
                let hit = prefix.find();
                assert_eq!(hit.num_blocks, longest, "{spans:?}");
                for ((group, span), table) in geometry.groups().zip(&hit.tables) {
                    assert_eq!((table.num_passed(), table.end()), (span.first_seen(2 * longest) / 2, longest));
                    assert!(
                        table
                            .entries()
                            .all(|(at, block)| { index.lookup(&identity(&hashes[at], group)) == Some(block) })
                    );
                }
                match prefix.first_missing() {
                    None => assert_eq!(longest, 12),
                    Some((at, group)) => assert!(at >= longest && !is_known(at, group) && longest < 12),
                }
                lengths.insert(longest);
            }
        }
        assert!(lengths.len() > 9, "it gets somewhere: {lengths:?}");
    }
}
