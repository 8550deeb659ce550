//! Resets the prefix cache of a tenant, a namespace, or a prefix with all that continues it, in parts.
//!
//! Other calls run between the parts. A reset drops the content that was cached when it began: a block with newer
//! content is left.

use crate::books::Books;
use crate::books::geometry::Geometry;
use crate::books::pins::PinId;
use crate::cache::pool::BlockPool;
use crate::cache::prefix::{BlockId, Hash, Namespace, chain_hashes, root_hash};
use crate::cache::tenants::TenantId;

/// The limit of blocks and pins checked for one part, and of blocks before them that are not known yet.
const MAX_LOOKED: usize = 8_192;
/// Blocks that are dropped in one part.
const MAX_DROPPED: usize = 1_024;

/// The beginning of the dropped content: a root, or the last block of a prefix.
#[derive(Debug, Clone, Copy)]
struct Stem {
    hash: Hash,
    /// Blocks up to its end; none up to a root.
    num_blocks: usize,
}

impl Stem {
    fn of(tenant: &[u8], namespace: &Namespace, tokens: &[i32], geometry: &Geometry) -> Stem {
        let root = root_hash(tenant, namespace, &geometry.model_fingerprint);
        let mut hashes = vec![root];
        chain_hashes(root, geometry.holdable(tokens), geometry.block_size, &mut hashes);
        Stem { hash: hashes[hashes.len() - 1], num_blocks: hashes.len() - 1 }
    }
}

/// A reset that was begun. Memory: a byte for each block of the pool.
#[derive(Debug)]
pub struct Reset {
    /// None: the tenant is not known, and has nothing.
    tenant: Option<TenantId>,
    /// None: all of the tenant's content.
    stem: Option<Stem>,
    /// The number of the first change that came later.
    begun_at: u64,
    /// By block: true if it continues the stem. None: it was not looked at.
    verdicts: Vec<Option<bool>>,
    last_pin: Option<PinId>,
    has_looked_at_pins: bool,
    next_block: BlockId,
    num_looked: usize,
}

/// The next part to drop: pins first, then blocks.
#[derive(Debug, Default)]
pub struct ResetPart {
    pub pins: Vec<PinId>,
    pub blocks: Vec<BlockId>,
}

impl Books {
    /// Keeps the sequences that a reset of this scope is about from publishing blocks that came, or will come, from the
    /// host tier. Drops all copies of the tenant's blocks there and on the disk: a copy does not know its namespace.
    pub fn withhold_for(&mut self, tenant: &[u8], namespace: Option<&Namespace>) {
        let root = namespace.map(|namespace| root_hash(tenant, namespace, &self.geometry.model_fingerprint));
        let (name, num_changes) = (tenant, self.pool.records.journal.num_changes());
        let Some(tenant) = self.tenants.find(name) else {
            return self.disk.begin_reset(0..0, Some(name), num_changes); // there may be content of another time
        };
        self.table.withhold(self.leases.rows(), Some(tenant), root.as_ref(), self.geometry.block_size);
        self.host.begin_reset(tenant..tenant + 1, num_changes);
        self.disk.begin_reset(tenant..tenant + 1, Some(name), num_changes);
    }
}

impl Reset {
    /// Begins a reset of a tenant's content: of all of it, of the content in a namespace, or of the content in a namespace
    /// that begins with the full blocks of these tokens. Drops nothing yet. Cost: O(tokens + sequences in the host
    /// tier).
    pub fn begin(books: &Books, tenant: &[u8], namespace: Option<&Namespace>, tokens: &[i32]) -> Reset {
        let stem = namespace.map(|namespace| Stem::of(tenant, namespace, tokens, &books.geometry));
        Reset {
            tenant: books.tenants.find(tenant),
            stem,
            begun_at: books.pool.records.journal.num_changes(),
            verdicts: vec![None; books.geometry.num_blocks],
            last_pin: None,
            has_looked_at_pins: false,
            next_block: 1,
            num_looked: 0,
        }
    }

    /// The next part to drop; None at the end. Cost: bounded by MAX_LOOKED, and the blocks of one sequence.
    pub fn next_part(&mut self, books: &Books) -> Option<ResetPart> {
        self.num_looked = 0;
        let mut part = ResetPart::default();
        self.tenant?; // None: no tenant has such content
        if !self.has_looked_at_pins {
            self.look_at_pins(books, &mut part.pins);
            return Some(part);
        }
        let end = books.geometry().num_blocks as BlockId;
        if self.next_block == end {
            return None;
        }
        while self.next_block < end && self.num_looked < MAX_LOOKED && part.blocks.len() < MAX_DROPPED {
            let block = self.next_block;
            self.next_block += 1;
            self.num_looked += 1;
            let is_old = books.pool().records.journal.content_changed_at(block) <= self.begun_at;
            if is_old && self.is_wanted(books.pool(), block) {
                part.blocks.push(block);
            }
        }
        Some(part)
    }

    fn look_at_pins(&mut self, books: &Books, wanted: &mut Vec<PinId>) {
        loop {
            let next = match self.last_pin {
                None => books.pins().all().next(),
                Some(last) => books.pins().behind(last).next(),
            };
            let Some(pin) = next else {
                self.has_looked_at_pins = true;
                return;
            };
            if self.num_looked >= MAX_LOOKED {
                return;
            }
            self.last_pin = Some(pin.id);
            self.num_looked += 1;
            if pin.blocks.last().is_some_and(|block| self.is_wanted(books.pool(), *block)) {
                self.num_looked += pin.blocks.len();
                wanted.push(pin.id);
            }
        }
    }

    /// True if the block is in the index and belongs to the reset's content.
    fn is_wanted(&mut self, pool: &BlockPool, block: BlockId) -> bool {
        if !pool.index().is_findable(block) || pool.owner(block) != self.tenant {
            return false;
        }
        self.stem.is_none_or(|stem| self.continues(pool, stem, block))
    }

    /// True if a block in the index continues the stem, or if that is unknown because a block before it is missing: it
    /// could be found again when the missing block is computed.
    fn continues(&mut self, pool: &BlockPool, stem: Stem, block: BlockId) -> bool {
        let (index, mut path, mut at) = (pool.index(), Vec::new(), block);
        let verdict = loop {
            let is_old = pool.records.journal.content_changed_at(at) <= self.begun_at;
            if let Some(known) = self.verdicts[at as usize].filter(|_| is_old) {
                break known;
            }
            path.push(at);
            let origin = index.origin(at);
            let num_before = origin.index as usize;
            if num_before < stem.num_blocks {
                break num_before + 1 == stem.num_blocks && pool.prefix_hash(at) == Some(stem.hash);
            }
            if num_before == stem.num_blocks {
                break origin.parent == stem.hash;
            }
            match index.lookup(&origin.parent) {
                Some(parent) => at = parent,
                None => break true,
            }
        };
        self.num_looked += path.len();
        path.into_iter().for_each(|block| self.verdicts[block as usize] = Some(verdict));
        verdict
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::books::hits::find_cached;
    use crate::books::plans::{Admission, StepRequest};
    use crate::books::tests::{Bench, admission};

    fn salted(seq_id: i64, tokens: &[i32], salt: &[u8]) -> Admission {
        Admission { namespace: salt.into(), ..admission(seq_id, tokens) }
    }

    /// Cached: under the salt "s" 1 2 | 3 4 | 5 6 and 1 2 | 7 8 | 9 10; without one 1 2 | 3 4.
    fn bench() -> Bench {
        let mut bench = Bench::new(20);
        let admissions = vec![
            salted(1, &[1, 2, 3, 4, 5, 6], b"s"),
            salted(2, &[1, 2, 7, 8, 9, 10], b"s"),
            salted(3, &[1, 2, 3, 4], b""),
        ];
        bench.plan(StepRequest { admissions, ..StepRequest::default() });
        bench.settle();
        bench.release(&[1, 2, 3]);
        bench.settle();
        bench
    }

    fn run(bench: &mut Bench, reset: &mut Reset) -> (usize, usize) {
        let (mut num_blocks, mut num_pins) = (0, 0);
        while let Some(part) = reset.next_part(&bench.0) {
            for pin in &part.pins {
                num_pins += usize::from(bench.0.unpin_prefix(None, pin).unwrap());
            }
            num_blocks += bench.0.pool_mut().drop_blocks(&part.blocks, 1.0, 0);
        }
        assert_eq!(bench.0.violations(), [""; 0]);
        (num_blocks, num_pins)
    }

    /// Tokens found of 1 2 3 4 5 6, of 1 2 7 8 9 10, and of 1 2 3 4 without a salt.
    fn found(bench: &Bench) -> [usize; 3] {
        let num = |tokens: &[i32], salt: &[u8]| bench.0.num_cached_tokens(&[tokens, &[0]].concat(), &salt.into(), b"");
        [num(&[1, 2, 3, 4, 5, 6], b"s"), num(&[1, 2, 7, 8, 9, 10], b"s"), num(&[1, 2, 3, 4], b"")]
    }

    #[test]
    fn a_reset_drops_what_it_is_about_and_nothing_else() {
        type Scope<'a> = (Option<&'a [u8]>, &'a [i32]);
        let cases: [(Scope, usize, [usize; 3]); 7] = [
            ((None, &[]), 7, [0, 0, 0]),
            ((Some(b"s"), &[]), 5, [0, 0, 4]),
            ((Some(b""), &[]), 2, [6, 6, 0]),
            ((Some(b"s"), &[1, 2]), 5, [0, 0, 4]),
            ((Some(b"s"), &[1, 2, 3, 4, 5]), 2, [2, 6, 4]),
            ((Some(b"s"), &[1, 2, 7, 8, 9, 10]), 1, [6, 4, 4]),
            ((Some(b"s"), &[3, 4]), 0, [6, 6, 4]),
        ];
        for ((salt, tokens), num_dropped, left) in cases {
            let mut bench = bench();
            let mut reset = Reset::begin(&bench.0, b"", salt.map(Namespace::from).as_ref(), tokens);
            assert_eq!((run(&mut bench, &mut reset), found(&bench)), ((num_dropped, 0), left), "{salt:?} {tokens:?}");
            let mut again = Reset::begin(&bench.0, b"", salt.map(Namespace::from).as_ref(), tokens);
            assert_eq!(run(&mut bench, &mut again), (0, 0));
        }
        let mut bench = bench();
        let mut of_another = Reset::begin(&bench.0, b"x", None, &[]);
        assert_eq!((run(&mut bench, &mut of_another), found(&bench)), ((0, 0), [6, 6, 4]));
    }

    #[test]
    fn what_is_behind_a_block_that_is_gone_does_not_come_back_with_it() {
        let mut bench = bench();
        let middle =
            find_cached(&[1, 2, 3, 4, 5, 6, 0], &b"s".into(), b"", bench.0.pool.index(), &bench.0.geometry).blocks()[1];
        bench.0.reset_prefix_cache(middle, middle + 1, 0.0, b"").unwrap();
        let mut reset = Reset::begin(&bench.0, b"", Some(&b"s".into()), &[1, 2]);
        assert_eq!(run(&mut bench, &mut reset), (4, 0));
        bench.plan(StepRequest { admissions: vec![salted(1, &[1, 2, 3, 4, 0], b"s")], ..StepRequest::default() });
        bench.settle();
        assert_eq!(found(&bench), [4, 2, 4]);
    }

    #[test]
    fn what_is_published_after_the_beginning_stays() {
        let mut bench = bench();
        let mut reset = Reset::begin(&bench.0, b"", Some(&b"s".into()), &[]);
        let more = salted(1, &[1, 2, 3, 4, 5, 6, 11, 12], b"s");
        bench.plan(StepRequest { admissions: vec![more], ..StepRequest::default() });
        bench.settle();
        assert_eq!(run(&mut bench, &mut reset), (5, 0));
        bench.plan(StepRequest { admissions: vec![salted(2, &[1, 2, 3, 4, 5, 6, 0], b"s")], ..StepRequest::default() });
        bench.settle();
        assert_eq!(bench.0.num_cached_tokens(&[1, 2, 3, 4, 5, 6, 11, 12, 0], &b"s".into(), b""), 8);
    }

    #[test]
    fn pins_of_what_is_reset_end_and_others_stay() {
        let mut bench = bench();
        for (tokens, salt) in
            [(&[1, 2, 3, 4, 5, 6][..], &b"s"[..]), (&[1, 2, 3, 4], b"s"), (&[1, 2], b"s"), (&[1, 2], b"")]
        {
            bench.0.pin_prefix(b"", tokens, &salt.into(), 9.0).unwrap().unwrap();
        }
        let mut reset = Reset::begin(&bench.0, b"", Some(&b"s".into()), &[1, 2, 3, 4]);
        assert_eq!((run(&mut bench, &mut reset), found(&bench)), ((2, 2), [2, 6, 4]));
        assert_eq!(bench.0.pins().all().count(), 2);
    }

    #[test]
    fn a_sequence_that_runs_goes_on_and_is_not_found() {
        let mut bench = bench();
        bench.plan(StepRequest { admissions: vec![salted(1, &[1, 2, 3, 4, 5], b"s")], ..StepRequest::default() });
        bench.settle();
        let blocks = bench.blocks(1);
        let mut reset = Reset::begin(&bench.0, b"", None, &[]);
        assert_eq!((run(&mut bench, &mut reset), bench.0.pool().counts().active), ((7, 0), 3));
        bench.extend(1, 1, &[]);
        assert_eq!((bench.blocks(1)[..3].to_vec(), found(&bench)), (blocks, [0, 0, 0]));
    }

    /// Sequence 1 is in the host tier when its content is reset, or goes there afterwards.
    #[test]
    fn what_comes_back_from_the_host_tier_is_not_published_again() {
        for is_away in [true, false] {
            let mut bench = bench();
            bench.plan(StepRequest { admissions: vec![salted(1, &[1, 2, 3, 4, 0], b"s")], ..StepRequest::default() });
            bench.settle();
            for happens_now in [is_away, !is_away] {
                if happens_now {
                    bench.offload(1);
                    bench.settle();
                } else {
                    bench.0.withhold_for(b"", Some(&b"s".into()));
                    let mut reset = Reset::begin(&bench.0, b"", Some(&b"s".into()), &[]);
                    run(&mut bench, &mut reset);
                }
            }
            bench.restore(1);
            bench.settle();
            bench.extend(1, 2, &[]);
            bench.settle();
            assert_eq!((found(&bench), bench.0.violations()), ([0, 0, 4], vec![]), "{is_away}");
            assert_eq!(bench.sequence(1).num_published, 3, "what it computes later is published");
        }
    }

    #[test]
    fn a_part_is_bounded() {
        let mut bench = Bench::new(3 * MAX_DROPPED);
        let geometry = crate::books::geometry::Geometry {
            max_sequence_tokens: 6 * MAX_DROPPED,
            ..crate::books::tests::geometry(3 * MAX_DROPPED)
        };
        bench.0 = Books::new(geometry, "lru").unwrap();
        bench.0.open_lease("a", b"", 30.0);
        let tokens: Vec<i32> = (0..5 * MAX_DROPPED as i32).map(|token| token % 97).collect();
        bench.admit(1, &tokens);
        bench.settle();
        bench.release(&[1]);
        bench.settle();
        let mut reset = Reset::begin(&bench.0, b"", Some(&b"".into()), &tokens[..2]);
        let mut sizes = Vec::new();
        while let Some(part) = reset.next_part(&bench.0) {
            sizes.push(bench.0.pool_mut().drop_blocks(&part.blocks, 0.0, 0));
        }
        assert!(sizes.iter().all(|size| *size <= MAX_DROPPED), "{sizes:?}");
        assert_eq!(sizes.iter().sum::<usize>(), 5 * MAX_DROPPED / 2);
    }
}
