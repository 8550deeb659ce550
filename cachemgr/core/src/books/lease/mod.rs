//! Leases: their sequences and their steps; answers.rs: plans kept for repeated requests; leases.rs: all leases of a
//! pool; expiry.rs: their times.

pub mod answers;
pub mod expiry;
pub mod leases;

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use crate::books::geometry::Geometry;
use crate::books::lease::answers::RememberedPlans;
use crate::books::room::update_reservation;
use crate::books::sequences::{Row, SequenceTable};
use crate::books::steps::StepInFlight;
use crate::cache::groups::Group;
use crate::cache::mixing::SequenceMap;
use crate::cache::pool::BlockPool;
use crate::cache::prefix::{BlockId, Hash, Namespace, root_hash};
use crate::cache::tenants::{TenantId, Tenants};
use crate::cache::tier::{TierBlockId, TierPool};
use crate::errors::{Failure, Reason, Refusal, Result};

/// Steps a lease may have planned without their outcome being known.
pub const MAX_STEPS_IN_FLIGHT: usize = 64;

/// One lease: its sequences and its steps.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Lease {
    pub tenant: TenantId,
    pub tenant_name: Vec<u8>,
    pub sequences: SequenceMap<Row>,
    pub next_step: u64,
    /// The last step that was reported.
    pub settled_step: u64,
    /// Outcomes are known up to this step: reported, or doomed.
    pub known_step: u64,
    pub in_flight: VecDeque<StepInFlight>,
    /// Table entries changed since the last plan; the next grant carries them.
    pub table_changes: Vec<(Row, Group, usize)>,
    /// In a pool with windows, sequences with tokens computed since the last plan: it takes what they have passed.
    pub computed: Vec<Row>,
    /// Sequences with a reservation.
    pub reserved: Vec<Row>,
    /// The root used last, by tenant and namespace.
    last_root: Option<(TenantId, Namespace, Hash)>,
    /// The lease ends this many seconds after it was renewed last.
    pub ttl: f64,
    /// It has ended, and waits for the worker's fence.
    pub is_ending: bool,
    /// In seconds of the caller's clock.
    #[serde(skip)]
    pub expires_at: f64,
    /// It got GRACE_S since its last renewal. A loop that is slow for long must not keep a dead client's lease.
    #[serde(skip)]
    pub had_grace: bool,
    /// The last plans that had a request id, for a repetition.
    pub answers: RememberedPlans,
}

impl Lease {
    /// A lease without sequences. `ttl` is in seconds.
    pub fn new(tenant: TenantId, tenant_name: &[u8], ttl: f64) -> Lease {
        Lease { tenant, tenant_name: tenant_name.to_vec(), ttl, next_step: 1, ..Lease::default() }
    }

    /// Refused (TOO_MANY_STEPS) if no more steps may be in flight.
    pub fn refuse_too_many_steps(&self) -> Result<()> {
        let num_steps = self.in_flight.len();
        if num_steps < MAX_STEPS_IN_FLIGHT {
            return Ok(());
        }
        let message = format!("the lease has {num_steps} steps in flight, the most there may be");
        let refusal = Refusal::new(Reason::TooManySteps, message);
        Err(Failure::Refused(refusal.with("limit", MAX_STEPS_IN_FLIGHT)))
    }

    /// The row of a sequence of the lease.
    pub fn row_of(&self, seq_id: i64) -> Option<Row> {
        i32::try_from(seq_id).ok().and_then(|seq_id| self.sequences.get(&seq_id).copied())
    }

    /// Releases a table's tail; steps in flight may still touch it.
    pub fn let_go(&mut self, tail_first: Vec<BlockId>, pool: &mut BlockPool) -> Result<()> {
        match self.in_flight.back_mut() {
            Some(last) => {
                pool.retire(&tail_first)?;
                last.holds.push(tail_first);
                Ok(())
            }
            None => pool.release(&tail_first),
        }
    }

    /// Frees blocks of the host tier; steps in flight may still access them.
    pub fn let_go_in_host(&mut self, blocks: Vec<TierBlockId>, host: &mut TierPool) -> Result<()> {
        match self.in_flight.back_mut() {
            Some(last) if !blocks.is_empty() => {
                host.retire(&blocks)?;
                last.host_holds.push(blocks);
                Ok(())
            }
            _ => host.release(&blocks),
        }
    }

    /// Updates the reservations of the lease's sequences.
    pub fn update_reservations(&mut self, pool: &mut BlockPool, table: &mut SequenceTable, geometry: &Geometry) {
        for row in &self.reserved {
            update_reservation(*row, pool, table, geometry);
        }
    }

    /// The root of the prefix hashes of a tenant's prompt.
    pub fn root(
        &mut self,
        tenant: TenantId,
        tenants: &Tenants,
        namespace: &Namespace,
        model_fingerprint: &[u8],
    ) -> Hash {
        if let Some((known_tenant, known_namespace, root)) = &self.last_root
            && *known_tenant == tenant
            && known_namespace == namespace
        {
            return *root;
        }
        let root = root_hash(tenants.name(tenant), namespace, model_fingerprint);
        self.last_root = Some((tenant, namespace.clone(), root));
        root
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_root_is_of_tenant_namespace_and_model_whatever_was_asked_before() {
        let (mut lease, mut tenants) = (Lease::default(), Tenants::default());
        for (name, salt) in [("t", "x"), ("t", "x"), ("u", "x"), ("u", ""), ("t", ""), ("t", "y"), ("t", "x")] {
            let (tenant, salt) = (tenants.enter(name.as_bytes()), salt.into());
            assert_eq!(lease.root(tenant, &tenants, &salt, b"f"), root_hash(name.as_bytes(), &salt, b"f"));
        }
    }
}
