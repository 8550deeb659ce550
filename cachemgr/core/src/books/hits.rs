//! Finds prefixes in the index, and in the tiers below: with layer groups, the longest one with all the blocks that its
//! next token sees.

use std::borrow::Cow;

use crate::books::geometry::Geometry;
use crate::books::tables::{BlockTable, Tables};
use crate::cache::groups::{Group, Span, identity};
use crate::cache::prefix::{BlockId, Hash, NULL_BLOCK, Namespace, PrefixIndex, chain_hashes, root_hash};
use crate::cache::tier::TierBlockId;
use crate::cache::tier_copies::TierCopies;

/// A prefix that was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hit {
    /// Its full blocks.
    pub num_blocks: usize,
    /// By group, the blocks that the next token sees. In the place of a copy there is the null block.
    pub tables: Tables,
    /// Those of its blocks that are not in the pool, the first ones in front.
    pub copies: Vec<CopyBack>,
}

/// A copy in the host tier that comes back to a place in a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyBack {
    pub index: usize,
    pub group: Group,
    pub copy: TierBlockId,
}

impl Hit {
    /// All of its blocks that are in the pool, group by group.
    pub fn blocks(&self) -> Cow<'_, [BlockId]> {
        match &self.tables[..] {
            [table] if self.copies.is_empty() => table.blocks().into(),
            tables => {
                let blocks = tables.iter().flat_map(|table| table.blocks()).copied();
                blocks.filter(|block| *block != NULL_BLOCK).collect()
            }
        }
    }

    /// Blocks that its tables lack to end at these indexes.
    pub fn num_missing(&self, ends: &[usize]) -> usize {
        let behind = self.tables.iter().zip(ends).map(|(table, end)| end - table.end()).sum::<usize>();
        behind + self.copies.len()
    }

    /// The leading blocks of a full group's table that are in the pool.
    pub fn num_leading(&self, group: Group) -> usize {
        self.copies.iter().find(|copy| copy.group == group).map_or(self.num_blocks, |copy| copy.index)
    }

    /// The block of a table at an index, if it is there and in the pool.
    fn in_pool(&self, index: usize, group: Group) -> Option<BlockId> {
        self.tables[usize::from(group)].get(index).filter(|block| *block != NULL_BLOCK)
    }
}

/// The place of a block of a prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    Pool(BlockId),
    Host(TierBlockId),
    Disk(TierBlockId),
}

/// The known blocks of a layer group from index `first` on.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Known<P> {
    first: usize,
    blocks: Vec<P>,
}

/// The longest prefix of which all is known that its next token sees.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Longest<P> {
    /// Its full blocks.
    pub num_blocks: usize,
    /// The first block and group without which it is not longer; None if it has all blocks that were asked for.
    pub missing: Option<(usize, Group)>,
    /// By group, of the blocks that the next token sees.
    known: Vec<Known<P>>,
}

impl Longest<Place> {
    /// The places of its blocks that are not in the pool, with index and group, the first ones in front.
    pub fn below(&self) -> Vec<(usize, Group, Place)> {
        let groups = self.known.iter().enumerate();
        let all = groups.flat_map(|(group, Known { first, blocks })| {
            blocks.iter().enumerate().map(move |(place, block)| (first + place, group as Group, *block))
        });
        let mut below: Vec<_> = all.filter(|(_, _, place)| !matches!(place, Place::Pool(_))).collect();
        below.sort_unstable_by_key(|(index, group, _)| (*index, *group));
        below
    }

    /// The prefix as a hit. None of it is on the disk.
    pub fn into_hit(self) -> Hit {
        let copy_of = |(index, group, place)| match place {
            Place::Host(copy) => Some(CopyBack { index, group, copy }),
            _ => None,
        };
        let copies = self.below().into_iter().filter_map(copy_of).collect();
        let block_of = |place| match place {
            Place::Pool(block) => block,
            _ => NULL_BLOCK,
        };
        let table_of = |Known { first, blocks }| BlockTable::new(first, blocks.into_iter().map(block_of).collect());
        Hit { num_blocks: self.num_blocks, tables: self.known.into_iter().map(table_of).collect(), copies }
    }
}

/// The longest prefix of at most `most` blocks of which `find` knows, by index and group, all that its next token sees.
///
/// Cost: one call for each group and block at most.
fn find_longest<P>(geometry: &Geometry, most: usize, find: impl Fn(usize, Group) -> Option<P>) -> Longest<P> {
    let (mut num_blocks, mut missing) = (most, None);
    let mut known = Vec::with_capacity(geometry.groups.len());
    for (group, _) in geometry.groups().filter(|(_, span)| span.is_full()) {
        let blocks: Vec<P> = (0..num_blocks).map_while(|index| find(index, group)).collect();
        if blocks.len() < num_blocks {
            num_blocks = blocks.len();
            missing = Some((num_blocks, group));
        }
        known.push(Known { first: 0, blocks });
    }
    let (num_blocks, windows, missing_in_window) = find_windows(geometry, num_blocks, find);
    known.iter_mut().for_each(|full: &mut Known<P>| full.blocks.truncate(num_blocks));
    known.extend(windows);
    Longest { num_blocks, missing: missing_in_window.or(missing), known }
}

/// Of so many blocks, the longest prefix of which `find` knows all blocks of windowed groups that its next token sees;
/// what it knows of these, by windowed group; and the first block and group that keep all of them from being found, if
/// it is shorter.
///
/// Cost: one call for each of these groups and block from the end to the first one needed.
fn find_windows<P>(
    geometry: &Geometry,
    most: usize,
    find: impl Fn(usize, Group) -> Option<P>,
) -> (usize, Vec<Known<P>>, Option<(usize, Group)>) {
    let windows: Vec<(Group, Span)> = geometry.groups().filter(|(_, span)| !span.is_full()).collect();
    let mut known: Vec<Vec<P>> = windows.iter().map(|_| Vec::new()).collect(); // the last ones first
    let (mut num_blocks, mut num_known_to, mut missing) = (most, vec![most; windows.len()], None);
    'shorter: loop {
        for (at, (group, span)) in windows.iter().enumerate() {
            num_known_to[at] = num_known_to[at].min(num_blocks);
            let first = geometry.first_needed(*span, num_blocks * geometry.block_size);
            while num_known_to[at] > first {
                let index = num_known_to[at] - 1;
                num_known_to[at] = index;
                match find(index, *group) {
                    Some(block) => known[at].push(block),
                    None => {
                        missing = missing.or(Some((index, *group)));
                        known[at].clear();
                        num_blocks = index;
                        continue 'shorter;
                    }
                }
            }
        }
        break;
    }
    let of_group = |((at, (_, span)), mut blocks): ((usize, &(Group, Span)), Vec<P>)| {
        blocks.reverse();
        let needed = geometry.first_needed(*span, num_blocks * geometry.block_size);
        blocks.truncate(num_blocks.saturating_sub(num_known_to[at]));
        blocks.drain(..(needed - num_known_to[at]).min(blocks.len()));
        Known { first: needed, blocks }
    };
    let found = windows.iter().enumerate().zip(known).map(of_group).collect();
    (num_blocks, found, missing)
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
            let (num_blocks, windows, _) =
                find_windows(self.geometry, hit.num_blocks, |at, group| self.lookup(at, group));
            hit.num_blocks = num_blocks;
            hit.tables.iter_mut().for_each(|table| table.truncate(num_blocks));
            let num_full = hit.tables.len() - windows.len();
            for (table, Known { first, blocks }) in hit.tables[num_full..].iter_mut().zip(windows) {
                *table = BlockTable::new(first, blocks);
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
        Hit { num_blocks, tables, copies: Vec::new() }
    }

    /// The block of a group at an index that the next token sees, or that a longer prefix has.
    fn lookup(&self, index: usize, group: Group) -> Option<BlockId> {
        self.index.lookup(&identity(&self.hashes[index], group))
    }

    /// The leading blocks of a group that are in the pool, of which so many are known to be.
    fn num_leading(&self, group: Group, num_known: usize) -> usize {
        (num_known..self.hashes.len()).find(|index| self.lookup(*index, group).is_none()).unwrap_or(self.hashes.len())
    }
}

/// A prompt's blocks in the pool and in the tiers below it.
#[derive(Clone, Copy)]
pub struct Tiers<'a> {
    pub prefix: Prefix<'a>,
    /// None: what is there does not count.
    pub host: Option<&'a TierCopies>,
    pub disk: Option<&'a TierCopies>,
}

impl Tiers<'_> {
    /// The longest prefix with blocks of all tiers; `hit` is a shorter one that was found. A table of a full group begins
    /// with the pool's blocks, and has none of them behind a copy.
    pub fn find(&self, hit: &Hit) -> Longest<Place> {
        let Prefix { geometry, hashes, .. } = self.prefix;
        let num_in_pool = |(group, span): (Group, Span)| {
            if span.is_full() { self.prefix.num_leading(group, hit.num_leading(group)) } else { hashes.len() }
        };
        let nums_in_pool: Vec<usize> = geometry.groups().map(num_in_pool).collect();
        find_longest(geometry, hashes.len(), |index, group| {
            if index < nums_in_pool[usize::from(group)]
                && let Some(block) = hit.in_pool(index, group).or_else(|| self.prefix.lookup(index, group))
            {
                return Some(Place::Pool(block));
            }
            let hash = identity(&hashes[index], group);
            let in_host = self.host.and_then(|copies| copies.lookup(&hash)).map(Place::Host);
            in_host.or_else(|| Some(Place::Disk(self.disk?.lookup(&hash)?)))
        })
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
        let tables = Tables::from([BlockTable::new(0, found)]);
        return Hit { num_blocks: tables[0].end(), tables, copies: Vec::new() };
    }
    Prefix { geometry, index, hashes: &hashes }.find()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::books::tests::geometry;
    use crate::cache::accounts::{Accounts, Share};
    use crate::cache::pool::tests::Random;
    use crate::cache::prefix::digest_of;
    use crate::cache::tier::{Content, Tier, TierPool};

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
                match find_longest(&geometry, 12, |at, group| prefix.lookup(at, group)).missing {
                    None => assert_eq!(longest, 12),
                    Some((at, group)) => assert!(at >= longest && !is_known(at, group) && longest < 12),
                }
                lengths.insert(longest);
            }
        }
        assert!(lengths.len() > 9, "it gets somewhere: {lengths:?}");
    }

    /// Copies of these contents, by what is to be found.
    fn copies(tier: Tier, kept: &[(Group, Hash)]) -> TierPool {
        let (mut pool, mut accounts) = (TierPool::new(tier, 99, 99), Accounts::new(99));
        accounts.set_share(0, Share::everything(99));
        for (group, hash) in kept {
            let content = Content { hash: identity(hash, *group), group: *group, tenant: 0 };
            let copy = pool.keep(content, &accounts).unwrap();
            pool.arrive(&[copy]);
            pool.end_holds(&[copy]).unwrap();
        }
        pool
    }

    #[test]
    fn with_copies_the_longest_prefix_is_found_whose_next_token_sees_what_is_anywhere() {
        let hashes: Vec<Hash> = (0..12).map(|number| digest_of(&[number])).collect();
        let (mut num_longer, mut num_mixed, mut random) = (0, 0, Random(2));
        for spans in SPANS {
            let geometry = Geometry { groups: spans.to_vec(), ..geometry(99) };
            for round in 0..200 {
                let (mut index, mut kept) = (PrefixIndex::new(100), [Vec::new(), Vec::new()]);
                let all = geometry.groups().flat_map(|(group, _)| hashes.iter().map(move |hash| (group, hash)));
                for (number, (group, hash)) in all.enumerate() {
                    if random.below(4 + round % 9) > 1 {
                        index.publish(&identity(hash, group), number as BlockId + 1);
                    }
                    kept.iter_mut().for_each(|kept| kept.extend((random.below(3) > 0).then_some((group, *hash))));
                }
                let [host, disk] =
                    [(Tier::Host, &kept[0]), (Tier::Disk, &kept[1])].map(|(tier, kept)| copies(tier, kept));
                let prefix = Prefix { geometry: &geometry, index: &index, hashes: &hashes };
                let in_pool = prefix.find();
                let is_in = |at: usize, group| index.lookup(&identity(&hashes[at], group)).is_some();
                let is_leading = |at, group| (0..=at).all(|before| is_in(before, group));
                let is_full = |group: Group| spans[usize::from(group)].is_full();
                for has_disk in [false, true] {
                    let tiers = Tiers { prefix, host: Some(host.copies()), disk: has_disk.then(|| disk.copies()) };
                    let is_known = |at: usize, group: Group| {
                        let content = (group, hashes[at]);
                        let below = kept[0].contains(&content) || has_disk && kept[1].contains(&content);
                        below || if is_full(group) { is_leading(at, group) } else { is_in(at, group) }
                    };
                    let longest = (0..=12).rev().find(|length| is_hit(&geometry, &is_known, *length)).unwrap();
                    let found = tiers.find(&in_pool);
                    assert_eq!((found.num_blocks, found.missing.is_none()), (longest, longest == 12), "{spans:?}");
                    assert!(found.missing.is_none_or(|(at, group)| at >= longest && !is_known(at, group)));
                    if has_disk {
                        continue;
                    }
                    let hit = found.into_hit();
                    num_longer += usize::from(hit.num_blocks > in_pool.num_blocks);
                    let is_behind = |(at, block): (usize, BlockId)| at >= in_pool.num_blocks && block != NULL_BLOCK;
                    let is_mixed = hit.tables.iter().flat_map(|table| table.entries()).any(is_behind);
                    num_mixed += usize::from(is_mixed);
                    for ((group, span), table) in geometry.groups().zip(&hit.tables) {
                        assert_eq!((table.num_passed(), table.end()), (span.first_seen(2 * longest) / 2, longest));
                        for (at, block) in table.entries() {
                            let copy = hit.copies.iter().find(|copy| (copy.index, copy.group) == (at, group));
                            let copied = copy.map(|copy| host.copies().content(copy.copy).unwrap().hash);
                            let content = if block == NULL_BLOCK { copied } else { index.hash(block).copied() };
                            assert_eq!(content, Some(identity(&hashes[at], group)), "{hit:?}");
                        }
                    }
                    let num_in_pool =
                        hit.tables.iter().map(|table| table.blocks().len()).sum::<usize>() - hit.copies.len();
                    assert_eq!(
                        (hit.blocks().len(), hit.num_missing(&vec![longest + 1; spans.len()])),
                        (num_in_pool, spans.len() + hit.copies.len())
                    );
                }
            }
        }
        assert!(num_longer > 200 && num_mixed > 20, "it gets somewhere: {num_longer} {num_mixed}");
    }
}
