//! Records of lost content, and of the roots in use, to explain a miss.

use std::collections::{HashSet, VecDeque};

use serde::{Deserialize, Serialize};

use crate::cache::prefix::{Hash, Namespace};
use crate::cache::tenants::{Asker, TenantId};

/// Roots that are remembered.
pub const NUM_ROOTS: usize = 1_024;
/// Losses that are remembered: one for four blocks, within these bounds.
const LOSSES: (usize, usize) = (1_024, 65_536);

/// The reason why a block lost its content.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub enum Cause {
    /// To make room for this tenant; the beginning of the lease's name.
    Evicted { tenant: TenantId, lease: [u8; 8] },
    /// By a reset of its prefix, its tenant or the whole cache.
    Reset { by: CallerId },
}

/// The number of the caller of a reset. 0: it is not known.
pub type CallerId = u8;

/// The names of the first 255 callers of resets.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Callers {
    names: Vec<Vec<u8>>,
}

impl Callers {
    /// The number of a caller, a new one if there is a place.
    pub fn enter(&mut self, name: &[u8]) -> CallerId {
        let known = self.names.iter().position(|known| known == name);
        let place = known.unwrap_or(self.names.len());
        let Ok(id) = CallerId::try_from(place + 1) else { return 0 };
        if known.is_none() {
            self.names.push(name.to_vec());
        }
        id
    }

    /// The name of a caller; None if it is not known.
    pub fn name(&self, id: CallerId) -> Option<&[u8]> {
        self.names.get(usize::from(id).checked_sub(1)?).map(Vec::as_slice)
    }
}

/// Content that could be found by this hash.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Loss {
    pub hash: Hash,
    /// When, in seconds of the caller's clock.
    pub at: f64,
    pub cause: Cause,
}

/// A table of losses by hash; an entry replaces an older one in the same place. About 60 bytes each. A place knows whether
/// it has forgotten one.
///
/// Content that was computed again stays in it until it is lost again; so an entry is valid only for content that is
/// not in the index.
#[derive(Debug, Serialize, Deserialize)]
pub struct Losses {
    places: Vec<Option<Loss>>,
    /// By place: true if an entry replaced one of other content.
    has_forgotten: Vec<bool>,
}

impl Losses {
    pub fn new(num_blocks: usize) -> Losses {
        let (least, most) = LOSSES;
        let num_places = (num_blocks / 4).clamp(least, most).next_power_of_two();
        Losses { places: vec![None; num_places], has_forgotten: vec![false; num_places] }
    }

    /// The content of this hash was evicted for `asker`.
    pub fn evicted(&mut self, hash: &Hash, asker: &Asker) {
        let cause = Cause::Evicted { tenant: asker.tenant, lease: asker.lease };
        self.enter(Loss { hash: *hash, at: asker.now, cause });
    }

    /// The content of this hash was dropped for a caller.
    pub fn reset(&mut self, hash: &Hash, at: f64, by: CallerId) {
        self.enter(Loss { hash: *hash, at, cause: Cause::Reset { by } });
    }

    fn enter(&mut self, loss: Loss) {
        let place = self.place(&loss.hash);
        let hash = loss.hash;
        let before = self.places[place].replace(loss);
        self.has_forgotten[place] |= before.is_some_and(|before| before.hash != hash);
    }

    /// The loss of the content of this hash, which is not in the index; None if it is unknown.
    pub fn find(&self, hash: &Hash) -> Option<&Loss> {
        self.places[self.place(hash)].as_ref().filter(|loss| loss.hash == *hash)
    }

    /// True if the content of this hash, of which no loss is known, may have been lost.
    pub fn may_have_forgotten(&self, hash: &Hash) -> bool {
        self.has_forgotten[self.place(hash)]
    }

    /// True if the content of this hash, which is not in the index, was evicted and not reset.
    pub fn was_evicted(&self, hash: &Hash) -> bool {
        self.find(hash).is_some_and(|loss| !matches!(loss.cause, Cause::Reset { .. }))
    }

    fn place(&self, hash: &Hash) -> usize {
        let bits = u64::from_le_bytes(hash[..8].try_into().expect("a hash is 32 bytes"));
        bits as usize & (self.places.len() - 1)
    }
}

/// The root of the prefix hashes of a tenant in a namespace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Root {
    pub hash: Hash,
    pub tenant: TenantId,
    pub namespace: Namespace,
}

/// The last NUM_ROOTS roots that admissions had, each once.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Roots {
    known: HashSet<Hash>,
    in_order: VecDeque<Root>,
}

impl Roots {
    /// A sequence begins under this root.
    pub fn enter(&mut self, hash: &Hash, tenant: TenantId, namespace: &Namespace) {
        if !self.known.insert(*hash) {
            return;
        }
        self.in_order.push_back(Root { hash: *hash, tenant, namespace: namespace.clone() });
        if self.in_order.len() > NUM_ROOTS
            && let Some(oldest) = self.in_order.pop_front()
        {
            self.known.remove(&oldest.hash);
        }
    }

    /// The latest first.
    pub fn iter(&self) -> impl Iterator<Item = &Root> {
        self.in_order.iter().rev()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::groups::identity;
    use crate::cache::prefix::digest_of;

    const ASKER: Asker = Asker { tenant: 3, lease: *b"abcdefgh", now: 5.0 };

    fn hash(name: i32) -> Hash {
        digest_of(&[name])
    }

    #[test]
    fn a_loss_is_told_with_its_cause_and_the_last_one_counts() {
        let mut losses = Losses::new(8);
        losses.evicted(&hash(1), &ASKER);
        losses.reset(&hash(2), 7.0, 0);
        let evicted = Loss { hash: hash(1), at: 5.0, cause: Cause::Evicted { tenant: 3, lease: *b"abcdefgh" } };
        assert_eq!(losses.find(&hash(1)), Some(&evicted));
        assert_eq!(losses.find(&hash(2)), Some(&Loss { hash: hash(2), at: 7.0, cause: Cause::Reset { by: 0 } }));
        assert_eq!(losses.find(&hash(3)), None);
        losses.evicted(&hash(2), &ASKER);
        assert_eq!(losses.find(&hash(2)), Some(&Loss { hash: hash(2), ..evicted }));
    }

    #[test]
    fn of_two_that_fall_on_one_place_the_later_is_known() {
        let (one, mut other) = (hash(1), hash(1));
        other[31] ^= 1;
        let mut losses = Losses::new(8);
        losses.reset(&one, 1.0, 0);
        losses.reset(&one, 1.5, 0);
        assert_eq!((losses.find(&other), losses.may_have_forgotten(&other)), (None, false));
        losses.reset(&other, 2.0, 0);
        assert_eq!((losses.find(&one), losses.find(&other).unwrap().at), (None, 2.0));
        assert_eq!([&one, &hash(2)].map(|hash| losses.may_have_forgotten(hash)), [true, false]);
    }

    #[test]
    fn what_was_reset_was_not_evicted() {
        let mut losses = Losses::new(8);
        losses.evicted(&hash(1), &ASKER);
        losses.reset(&hash(2), 0.0, 0);
        assert_eq!([1, 2, 3].map(|name| losses.was_evicted(&hash(name))), [true, false, false]);
    }

    #[test]
    fn losses_of_all_groups_at_one_place_are_remembered() {
        let mut losses = Losses::new(8);
        let lost = [0, 1, 2].map(|group| identity(&hash(1), group));
        lost.iter().for_each(|hash| losses.evicted(hash, &ASKER));
        assert!(lost.iter().all(|hash| losses.was_evicted(hash)));
    }

    #[test]
    fn many_are_remembered_in_a_large_pool_and_some_in_a_small_one() {
        let sizes = [2, 4_096, 5_000, 262_144, 1_000_000].map(|num_blocks| Losses::new(num_blocks).places.len());
        assert_eq!(sizes, [1_024, 1_024, 2_048, 65_536, 65_536]);
        let mut losses = Losses::new(100_000);
        (0..1_000).for_each(|name| losses.reset(&hash(name), 0.0, 0));
        let num_known = (0..1_000).filter(|name| losses.find(&hash(*name)).is_some()).count();
        assert!(num_known > 960, "{num_known} of 1,000 in 32,768 places: they are spread over all of them");
    }

    #[test]
    fn the_first_callers_have_names() {
        let mut callers = Callers::default();
        assert_eq!([&b"a"[..], b"b", b"a"].map(|name| callers.enter(name)), [1, 2, 1]);
        assert_eq!([0, 1, 2, 3].map(|id| callers.name(id)), [None, Some(&b"a"[..]), Some(b"b"), None]);
        (2..255_u8).for_each(|name| assert_eq!(callers.enter(&[name, 0]), name + 1));
        assert_eq!((callers.enter(b"one more"), callers.enter(b"b")), (0, 2));
    }

    #[test]
    fn the_last_roots_are_known_each_once() {
        let mut roots = Roots::default();
        for name in [1, 2, 1] {
            roots.enter(&hash(name), name as TenantId, &(&[name as u8]).into());
        }
        let first = Root { hash: hash(1), tenant: 1, namespace: (&[1]).into() };
        assert_eq!(
            roots.iter().collect::<Vec<_>>(),
            [&Root { hash: hash(2), tenant: 2, namespace: (&[2]).into() }, &first]
        );
        (0..NUM_ROOTS as i32 - 2).for_each(|name| roots.enter(&hash(100 + name), 0, &b"".into()));
        assert_eq!((roots.iter().count(), roots.iter().last()), (NUM_ROOTS, Some(&first)));
        roots.enter(&hash(3), 0, &b"".into());
        assert_eq!((roots.iter().count(), roots.iter().last().unwrap().hash), (NUM_ROOTS, hash(2)));
        roots.enter(&hash(1), 1, &(&[1]).into());
        assert_eq!((roots.iter().count(), roots.iter().next()), (NUM_ROOTS, Some(&first)));
    }
}
