//! The tenants of a pool: entered with their shares, and named by admissions.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::books::planner::Owner;
use crate::books::plans::Admission;
use crate::cache::accounts::Share;
use crate::cache::pool::BlockPool;
use crate::cache::tenants::{MAX_TENANTS, TenantId, Tenants};
use crate::errors::{Reason, Refusal, invalid};

/// The tenants' shares.
#[derive(Debug, Serialize, Deserialize)]
pub struct Shares {
    pub default: Share,
    pub by_name: BTreeMap<Vec<u8>, Share>,
}

impl Shares {
    /// The share of a tenant.
    pub fn of(&self, name: &[u8]) -> Share {
        self.by_name.get(name).copied().unwrap_or(self.default)
    }
}

/// The tenants, with the accounts that a new one gets.
pub struct Tenancy<'a> {
    pub tenants: &'a mut Tenants,
    pub shares: &'a Shares,
    pub pool: &'a mut BlockPool,
}

impl Tenancy<'_> {
    /// A tenant, known from now on.
    pub fn enter(&mut self, name: &[u8]) -> TenantId {
        let tenant = self.tenants.enter(name);
        if tenant as usize == self.pool.accounts().len() {
            self.pool.set_share(tenant, self.shares.of(name));
        }
        tenant
    }

    /// Returns the tenant of an admission: the one it names, else the lease's. Refused: ROLE_MISSING, if another tenant
    /// may not be named; INVALID_ARGUMENT, if it would be one too many.
    pub fn owner_of(&mut self, admission: &Admission, lease_tenant: TenantId, names_tenants: bool) -> Owner {
        let Some(name) = &admission.tenant else { return Ok(lease_tenant) };
        let seq_id = admission.seq_id;
        let known = self.tenants.find(name);
        if known == Some(lease_tenant) {
            return Ok(lease_tenant);
        }
        if !names_tenants {
            return Err(refuse_without_role(seq_id, self.tenants.name(lease_tenant)));
        }
        if let Some(refusal) = refuse_new_tenant(name, self.tenants) {
            return Err(refusal.with("sequence_id", seq_id));
        }
        Ok(self.enter(name))
    }
}

/// Refuses a tenant that is not known, and that there is no place for.
pub fn refuse_new_tenant(name: &[u8], tenants: &Tenants) -> Option<Refusal> {
    let is_full = tenants.find(name).is_none() && tenants.len() >= MAX_TENANTS;
    let limit = || format!("one of the {MAX_TENANTS} tenants that the pool knows: there is no place for more");
    is_full.then(|| invalid("admissions.tenant", format!("'{}'", String::from_utf8_lossy(name)), limit()))
}

/// Refuses an admission that names a tenant without the role for it.
fn refuse_without_role(seq_id: i64, caller: &[u8]) -> Refusal {
    let caller = String::from_utf8_lossy(caller);
    let message =
        format!("sequence {seq_id} names a tenant; '{caller}' has none of the roles that this needs: gateway");
    let refusal = Refusal::new(Reason::RoleMissing, message).with("sequence_id", seq_id);
    refusal.with("roles", "gateway").with("name", caller)
}
