//! Books with the store that their changes are written to.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use crate::books::disk_reports::FoundCopy;
use crate::books::kept_memory::CarriedOver;
use crate::books::lease::answers::RequestKey;
use crate::books::pins::{Pin, PinId};
use crate::books::plans::{Admission, GrantedStep, StepRequest};
use crate::books::resetting::{Reset, ResetPart};
use crate::books::settle::StepReport;
use crate::books::tenancy::refuse_new_tenant;
use crate::books::{AdmissionCheck, Books};
use crate::cache::advice::millis;
use crate::cache::prefix::{BlockId, Namespace};
use crate::errors::{Failure, Reason, Refusal, Result, broken};
use crate::store::adapters::{AdapterRights, Adapters};
use crate::store::changes::Change;
use crate::store::files::{LogLimits, Store};

/// Books with a store, if there is one: a change is written before it is answered.
///
/// A store that fails is abandoned with its content: the books work without one until the process ends.
#[derive(Debug)]
pub struct StoredBooks {
    pool: String,
    epoch: i64,
    books: Books,
    store: Option<Store>,
    loss: Option<String>,
    /// Items of plans that were refused, by the name of the reason.
    refusals: BTreeMap<&'static str, u64>,
    adapters: Adapters,
    adapter_rights: AdapterRights,
}

impl StoredBooks {
    /// Books of a pool in an epoch.
    pub fn new(pool: &str, epoch: i64, books: Books, store: Option<Store>) -> StoredBooks {
        let (pool, adapters, adapter_rights) = (pool.to_string(), Adapters::default(), AdapterRights::default());
        StoredBooks { pool, epoch, books, store, loss: None, refusals: BTreeMap::new(), adapters, adapter_rights }
    }

    pub fn pool(&self) -> &str {
        &self.pool
    }

    pub fn epoch(&self) -> i64 {
        self.epoch
    }

    pub fn books(&self) -> &Books {
        &self.books
    }

    /// The books, for access that is not a change.
    pub fn books_mut(&mut self) -> &mut Books {
        &mut self.books
    }

    /// Writes changes to a new store from here on; the first record makes the books as they are now.
    pub fn begin_store(&mut self, directory: &Path, first: &Change) -> Result<()> {
        match Store::create(directory, first, LogLimits::default()) {
            Ok(store) => self.store = Some(store),
            Err(error) => self.loss = Some(error),
        }
        Ok(())
    }

    /// See Books::begin_epoch. Changes are written to a new store in the directory from here on, if one is given.
    pub fn begin_epoch(&mut self, epoch: i64, whole: &[u8], now: f64, directory: Option<&Path>) -> Result<CarriedOver> {
        self.store = None;
        let carried = self.books.begin_epoch(whole, now)?;
        self.epoch = epoch;
        self.refusals.clear();
        let begun = directory.map(|directory| Store::continue_from(directory, &self.books, LogLimits::default()));
        match begun.transpose() {
            Ok(store) => self.store = store,
            Err(error) => self.loss = Some(error),
        }
        Ok(carried)
    }

    /// Sets the adapters that admissions may have. They are the worker's, not the books': a restart does not restore
    /// them.
    pub fn set_adapters(&mut self, adapters: Adapters) {
        self.adapters = adapters;
    }

    /// Sets the adapters that tenants may use. They are the operator's: a restart does not restore them, either.
    pub fn set_adapter_rights(&mut self, rights: AdapterRights) {
        self.adapter_rights = rights;
    }

    /// True if changes are written down.
    pub fn is_stored(&self) -> bool {
        self.store.is_some()
    }

    /// The number of refused items of plans since the books were made, by the name of the reason.
    pub fn refusals(&self) -> &BTreeMap<&'static str, u64> {
        &self.refusals
    }

    /// Why the store was given up, once.
    pub fn take_loss(&mut self) -> Option<String> {
        self.loss.take()
    }

    /// Waits for a snapshot that is being made.
    #[cfg(test)]
    pub fn finish(&mut self) -> std::result::Result<(), String> {
        self.store.as_mut().map_or(Ok(()), Store::finish)
    }

    #[cfg(test)]
    pub fn write_snapshot(&self, path: &Path) -> std::result::Result<(), String> {
        crate::store::files::write_snapshot(path, &self.books)
    }

    fn write(&mut self, change: &Change) -> Result<()> {
        let Some(store) = &mut self.store else { return Ok(()) };
        let Err(error) = store.append(change) else { return Ok(()) };
        let Some(store) = self.store.take() else { return Ok(()) };
        if let Err(worse) = store.discard() {
            return broken(format!("what is stored is out of date ({error}) and can't be removed: {worse}"));
        }
        self.loss = Some(error);
        Ok(())
    }

    /// Makes a change that can't fail, and writes it down.
    pub fn make(&mut self, change: &Change) -> Result<()> {
        change.apply(&mut self.books)?;
        self.write(change)
    }

    /// True if the time of a pin or of advice is over.
    pub fn has_ended(&self, now: f64) -> bool {
        self.books().next_end().is_some_and(|end| end <= millis(now))
    }

    /// See Books::advance. Cost: a record of the store, so call `has_ended` first.
    pub fn advance(&mut self, now: f64) -> Result<()> {
        self.make(&Change::Advance { now })
    }

    /// A new lease without sequences, with an expiry. `had_grace`: the value from an earlier epoch.
    pub fn open_lease(
        &mut self,
        lease_id: &str,
        tenant: &[u8],
        ttl: f64,
        expires_at: f64,
        had_grace: bool,
    ) -> Result<()> {
        self.make(&Change::OpenLease { lease_id: lease_id.into(), tenant: tenant.into(), ttl })?;
        self.books.leases_mut().set_expiry(lease_id, expires_at, had_grace);
        Ok(())
    }

    /// Stops a lease; `close_lease` frees its blocks. False if it is not open.
    pub fn end_lease(&mut self, lease_id: &str) -> Result<bool> {
        let is_open = self.books.leases_mut().open_mut(lease_id).is_some();
        if is_open {
            self.make(&Change::EndLease { lease_id: lease_id.into() })?;
        }
        Ok(is_open)
    }

    /// Stops the expired leases, and returns their ids.
    pub fn expire_leases(&mut self, now: f64) -> Result<Vec<String>> {
        let mut expired = Vec::new();
        while let Some(lease_id) = self.books.leases_mut().next_expired(now) {
            self.end_lease(&lease_id)?;
            self.books.counters.expired_leases += 1;
            expired.push(lease_id);
        }
        Ok(expired)
    }

    /// Removes a lease and frees its blocks, which no step can access any more. False if there is none.
    pub fn close_lease(&mut self, lease_id: &str) -> Result<bool> {
        let is_there = self.books.lease(lease_id).is_some();
        if is_there {
            self.make(&Change::CloseLease { lease_id: lease_id.into() })?;
        }
        Ok(is_there)
    }

    /// See Books::plan. Renews the lease; None if it is not open. A repeated request id gets its first answer. Refused
    /// with EPOCH_CHANGED for another epoch than that of the books, and with REQUEST_ID_REUSED if the request id
    /// belongs to another request. Refused with INVALID_ARGUMENT for an admission with an adapter that the worker does not
    /// have, or its tenant may not use.
    pub fn plan(
        &mut self,
        lease_id: &str,
        epoch: i64,
        request: &StepRequest,
        now: f64,
        key: &RequestKey,
    ) -> Result<Option<Arc<GrantedStep>>> {
        let Some(lease) = self.books.leases_mut().open_mut(lease_id) else { return Ok(None) };
        lease.renew(now);
        if epoch != self.epoch {
            return Err(Failure::Refused(epoch_changed(&self.pool, self.epoch, epoch)));
        }
        if let Some(known) = lease.answers.recall(key)? {
            return Ok(Some(known));
        }
        for admission in &request.admissions {
            let tenant = admission.tenant.as_deref().unwrap_or(&lease.tenant_name);
            if let Some(refusal) = self.adapters.refuse_admission(admission, tenant, &self.adapter_rights) {
                return Err(Failure::Refused(refusal));
            }
        }
        let plan = match self.books.plan(lease_id, request, now, key) {
            Ok(Some(plan)) => plan,
            Err(Failure::Refused(refusal)) => {
                self.write(&Change::Advance { now })?; // that much was done
                return Err(Failure::Refused(refusal));
            }
            other => return other,
        };
        for refused in &plan.refusals {
            *self.refusals.entry(refused.refusal.reason.name()).or_default() += 1;
        }
        if self.is_stored() {
            self.write(&Change::Plan {
                lease_id: lease_id.into(),
                request: Cow::Borrowed(request),
                now,
                request_id: key.request_id.into(),
                digest: key.digest.into(),
                checksum: plan.checksum(),
            })?;
        }
        Ok(Some(plan))
    }

    /// See Books::settle.
    pub fn settle(&mut self, lease_id: &str, report: &StepReport) -> Result<()> {
        self.books.settle(lease_id, report)?;
        self.write(&Change::Settle { lease_id: lease_id.into(), report: Cow::Borrowed(report) })
    }

    /// The refusal of an adapter that a plan would refuse the tenant; `field` is the adapter's in the request.
    pub fn refuse_adapter(&self, field: &str, adapter: &[u8], tenant: &[u8]) -> Option<Refusal> {
        self.adapters.refuse(field, adapter, tenant, &self.adapter_rights)
    }

    /// See Books::check_admission. An adapter that a plan would refuse is the refusal.
    pub fn check_admission(&mut self, tenant: &[u8], admission: &Admission, reserve: usize) -> Result<AdmissionCheck> {
        if admission.tenant.is_some()
            && let Some(refusal) = refuse_new_tenant(tenant, self.books.tenants())
        {
            return Err(Failure::Refused(refusal));
        }
        self.enter_tenant(tenant)?;
        let mut check = self.books.check_admission(tenant, admission, reserve);
        check.refusal = self.adapters.refuse_admission(admission, tenant, &self.adapter_rights).or(check.refusal);
        Ok(check)
    }

    /// See Books::pin_prefix.
    pub fn pin_prefix(
        &mut self,
        tenant: &[u8],
        tokens: &[i32],
        namespace: &Namespace,
        until: f64,
    ) -> Result<std::result::Result<Pin, Refusal>> {
        self.enter_tenant(tenant)?;
        let pin = self.books.pin_prefix(tenant, tokens, namespace, until)?;
        if pin.is_ok() {
            self.write(&Change::Pin {
                tenant: tenant.into(),
                tokens: tokens.into(),
                namespace: Cow::Borrowed(namespace),
                until,
            })?;
        }
        Ok(pin)
    }

    /// See Books::unpin_prefix.
    pub fn unpin_prefix(&mut self, tenant: Option<&[u8]>, pin_id: &PinId) -> Result<bool> {
        let is_gone = self.books.unpin_prefix(tenant, pin_id)?;
        if is_gone {
            self.write(&Change::Unpin { pin_id: *pin_id })?;
        }
        Ok(is_gone)
    }

    /// See Books::reset_prefix_cache.
    pub fn reset_prefix_cache(&mut self, first: BlockId, end: BlockId, now: f64, by: &[u8]) -> Result<usize> {
        let num_dropped = self.books.reset_prefix_cache(first, end, now, by)?;
        self.write(&Change::Reset { first, end, now, by: by.into() })?;
        Ok(num_dropped)
    }

    /// See Books::end_disk_orders.
    pub fn end_disk_orders(&mut self, done: &[u64], failed: &[u64]) -> Result<()> {
        self.make(&Change::EndDiskOrders { done: done.into(), failed: failed.into() })
    }

    /// See Books::enter_found_copies.
    pub fn enter_found_copies(&mut self, found: &[FoundCopy]) -> Result<()> {
        self.make(&Change::EnterFoundCopies { found: found.into() })
    }

    /// See Books::go_on_erasing.
    pub fn go_on_erasing(&mut self, tenants: &[Option<Vec<u8>>]) -> Result<()> {
        self.make(&Change::Erase { tenants: tenants.into() })
    }

    /// See Reset::begin. Sequences in the host tier do not publish their computed blocks from here on.
    pub fn begin_reset(&mut self, tenant: &[u8], namespace: Option<&Namespace>, tokens: &[i32]) -> Result<Reset> {
        self.make(&Change::Withhold { tenant: tenant.into(), namespace: namespace.map(Cow::Borrowed) })?;
        Ok(Reset::begin(&self.books, tenant, namespace, tokens))
    }

    /// Drops the next part of a reset: returns the numbers of blocks and pins. None if all is done.
    pub fn go_on_with_reset(&mut self, reset: &mut Reset, now: f64, by: &[u8]) -> Result<Option<(usize, usize)>> {
        let Some(ResetPart { pins, blocks }) = reset.next_part(&self.books) else { return Ok(None) };
        for pin in &pins {
            self.unpin_prefix(None, pin)?;
        }
        if blocks.is_empty() {
            return Ok(Some((0, pins.len())));
        }
        let num_dropped = self.books.drop_blocks(&blocks, now, by);
        self.write(&Change::Drop { blocks: blocks.into(), now, by: by.into() })?;
        Ok(Some((num_dropped, pins.len())))
    }

    /// Enters a tenant at its first request.
    fn enter_tenant(&mut self, name: &[u8]) -> Result<()> {
        if self.books().tenants().find(name).is_some() {
            return Ok(());
        }
        self.make(&Change::EnterTenant { name: name.into() })
    }
}

fn epoch_changed(pool: &str, epoch: i64, asked: i64) -> Refusal {
    let message = format!("pool '{pool}' has epoch {epoch}, the call is for {asked}; its sequences are gone");
    Refusal::new(Reason::EpochChanged, message).with("pool", pool).with("epoch", epoch).with("value", asked)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::books::tests::geometry;

    #[test]
    fn a_plan_for_another_epoch_is_refused_and_changes_nothing() {
        let first = Change::Begin { geometry: Cow::Owned(geometry(12)), policy: "lru".into(), now: 0.0 };
        let mut stored = StoredBooks::new("pool", 7, first.begin().unwrap(), None);
        stored.make(&Change::OpenLease { lease_id: "a".into(), tenant: b"x".into(), ttl: 30.0 }).unwrap();
        let key = RequestKey { request_id: "", digest: b"" };
        let mut plan = |epoch| stored.plan("a", epoch, &StepRequest::default(), 1.0, &key);
        for epoch in [6, 8] {
            let told = format!("{:?}", plan(epoch).unwrap_err());
            assert!(told.contains("EpochChanged") && told.contains(&format!("the call is for {epoch}")), "{told}");
        }
        let number = plan(7).unwrap().unwrap().step_number;
        assert_eq!(number, 1, "the refused plans took no number");
    }
}
