//! Prefix pins: prefixes that tenants keep from eviction.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::cache::advice::{Millis, millis};
use crate::cache::pool::BlockPool;
use crate::cache::prefix::BlockId;
use crate::cache::tenants::TenantId;
use crate::errors::Result;

/// The beginning of the prefix hash of the last pinned block: equal for equal prefixes.
pub type PinId = [u8; 16];

/// A prefix that is kept.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Pin {
    pub id: PinId,
    pub tenant: TenantId,
    /// Blocks of the prefix.
    pub num_blocks: usize,
    /// Those that its next token sees, group by group in table order.
    pub blocks: Vec<BlockId>,
    /// Seconds of the caller's clock.
    pub until: f64,
}

/// The pins of a pool. There are no more than pinned blocks, since no two end with the same one.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Pins {
    by_id: BTreeMap<PinId, Pin>,
    ends: BTreeSet<(Millis, PinId)>,
}

impl Pins {
    pub fn get(&self, id: &PinId) -> Option<&Pin> {
        self.by_id.get(id)
    }

    pub fn len(&self) -> usize {
        self.by_id.len()
    }

    pub fn all(&self) -> impl Iterator<Item = &Pin> {
        self.by_id.values()
    }

    /// The pins after a given one, by id.
    pub fn behind(&self, id: PinId) -> impl Iterator<Item = &Pin> {
        self.by_id.range((std::ops::Bound::Excluded(id), std::ops::Bound::Unbounded)).map(|(_, pin)| pin)
    }

    pub fn insert(&mut self, pin: Pin) {
        self.ends.insert((millis(pin.until), pin.id));
        self.by_id.insert(pin.id, pin);
    }

    pub fn remove(&mut self, id: &PinId) -> Option<Pin> {
        let pin = self.by_id.remove(id)?;
        self.ends.remove(&(millis(pin.until), *id));
        Some(pin)
    }

    pub fn next_end(&self) -> Option<Millis> {
        self.ends.first().map(|(end, _)| *end)
    }

    pub fn first_ended(&self, now: f64) -> Option<PinId> {
        self.ends.first().filter(|(end, _)| *end <= millis(now)).map(|(_, id)| *id)
    }

    /// Takes a pin back, if there is one of this id.
    pub fn take_back(&mut self, id: &PinId, pool: &mut BlockPool) -> Result<()> {
        let Some(pin) = self.remove(id) else { return Ok(()) };
        let tail_first: Vec<BlockId> = pin.blocks.iter().rev().copied().collect();
        pool.unpin(&tail_first)
    }

    /// Takes the expired pins back.
    pub fn end_expired(&mut self, now: f64, pool: &mut BlockPool) -> Result<()> {
        while let Some(id) = self.first_ended(now) {
            self.take_back(&id, pool)?;
        }
        Ok(())
    }

    /// Takes all pins back.
    pub fn drop_all(&mut self, pool: &mut BlockPool) -> Result<()> {
        let ids: Vec<PinId> = self.all().map(|pin| pin.id).collect();
        ids.iter().try_for_each(|id| self.take_back(id, pool))
    }
}
