//! Finds the reason why a block is missing.

use crate::books::geometry::Geometry;
use crate::books::miss::Miss;
use crate::books::sequences::{Row, SequenceTable};
use crate::books::steps::Fill;
use crate::cache::groups::{Group, identity};
use crate::cache::losses::Cause;
use crate::cache::pool::BlockPool;
use crate::cache::prefix::{Hash, chain_hashes};
use crate::cache::tenants::TenantId;

/// True if one of these fills computes a block at this index of a table with this content. Caches hashes.
pub fn is_being_filled<'a>(
    fills: impl Iterator<Item = &'a Fill>,
    index: usize,
    hash: &Hash,
    table: &mut SequenceTable,
    block_size: usize,
) -> bool {
    let rows: Vec<Row> = fills.filter(|fill| (fill.first..fill.end).contains(&index)).map(|fill| fill.row).collect();
    rows.into_iter().any(|row| table.get_mut(row).hash_at(index, block_size) == hash)
}

/// The parts of the books that an explanation needs.
pub struct Explainer<'a> {
    pub geometry: &'a Geometry,
    pub pool: &'a BlockPool,
    /// Blocks that may still be looked up under other roots.
    pub num_left: usize,
}

/// A prompt of which no more is found.
pub struct Asked<'a> {
    /// Up to the end of the missing block.
    pub tokens: &'a [i32],
    pub root: &'a Hash,
    pub adapter: &'a [u8],
    /// None: a tenant that the pool does not know.
    pub tenant: Option<TenantId>,
}

impl Explainer<'_> {
    /// Why the last block of these tokens, with the hash `missing`, is missing in a group, if no step computes it.
    pub fn explain(&mut self, asked: &Asked, missing: &Hash, group: Group, with_other_tenants: bool) -> Miss {
        let loss = self.pool.records.losses.find(&identity(missing, group)).copied();
        let was_reset = loss.is_some_and(|loss| matches!(loss.cause, Cause::Reset { .. }));
        match loss {
            _ if !was_reset && self.is_window_lost(missing, group) => Miss::WindowLost(loss),
            Some(loss) => Miss::Lost(loss),
            None => self.find_elsewhere(asked, with_other_tenants).unwrap_or_else(|| {
                let may_be_lost = self.pool.records.losses.may_have_forgotten(&identity(missing, group));
                if may_be_lost { Miss::Unknown } else { Miss::NeverComputed }
            }),
        }
    }

    /// True if a group without a window has a block that is missing in one with a window.
    fn is_window_lost(&self, missing: &Hash, group: Group) -> bool {
        let mut full = self.geometry.groups().filter(|(_, span)| span.is_full());
        let is_known = |(other, _)| self.pool.index().lookup(&identity(missing, other)).is_some();
        !self.geometry.groups[usize::from(group)].is_full() && full.any(is_known)
    }

    /// The miss of a block that is there under another root, with all blocks before it; None if it is under none.
    fn find_elsewhere(&mut self, asked: &Asked, with_other_tenants: bool) -> Option<Miss> {
        let mut num_left = self.num_left;
        let mut other_tenant = None;
        for other in self.pool.records.roots.iter().filter(|other| other.hash != *asked.root) {
            let is_own = asked.tenant == Some(other.tenant);
            if !is_own && (!with_other_tenants || other_tenant.is_some()) {
                continue;
            }
            if self.is_found(other.hash, asked.tokens, &mut num_left) {
                if is_own {
                    self.num_left = num_left;
                    let is_same_adapter = other.namespace.adapter == asked.adapter;
                    return Some(if is_same_adapter { Miss::OtherSalt } else { Miss::OtherAdapter });
                }
                other_tenant = Some(other.tenant);
            }
        }
        self.num_left = num_left;
        other_tenant.map(Miss::OtherTenant)
    }

    /// True if all of these full blocks are found under a root; false if that would take too many hashes.
    pub fn is_found(&self, root: Hash, tokens: &[i32], num_left: &mut usize) -> bool {
        let (mut hashes, mut parent) = (Vec::new(), root);
        for block in tokens.chunks_exact(self.geometry.block_size) {
            let Some(left) = num_left.checked_sub(1) else {
                return false;
            };
            *num_left = left;
            chain_hashes(parent, block, self.geometry.block_size, &mut hashes);
            parent = hashes.pop().expect("the hash of a full block");
            if self.pool.index().lookup(&parent).is_none() {
                return false;
            }
        }
        true
    }
}
