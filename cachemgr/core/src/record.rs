//! Every change of the books as a value: written down, and applied again after a restart.
//!
//! The books depend on nothing else. The same changes in the same order give the same books, and a plan that is made
//! again is compared with what was answered then: if it differs, these are not the books that granted it.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::accounts::Share;
use crate::advice::millis;
use crate::books::{AdmissionCheck, Books, Geometry};
use crate::errors::{Failure, Refusal, Result, broken};
use crate::pins::{Pin, PinId};
use crate::plans::{Admission, StepPlan, StepRequest};
use crate::prefix::BlockId;
use crate::settle::StepReport;
use crate::store::{LogLimits, Store};

/// One change, as it was asked for. Times are in seconds of the caller's clock.
#[derive(Debug, Serialize, Deserialize)]
pub enum Record<'a> {
    /// The first: empty books.
    Begin {
        geometry: Cow<'a, Geometry>,
        policy: Cow<'a, str>,
    },
    OpenLease {
        lease_id: Cow<'a, str>,
        tenant: Cow<'a, [u8]>,
        ttl: f64,
    },
    EndLease {
        lease_id: Cow<'a, str>,
    },
    CloseLease {
        lease_id: Cow<'a, str>,
    },
    Plan {
        lease_id: Cow<'a, str>,
        request: Cow<'a, StepRequest>,
        now: f64,
        /// Empty: it can't be repeated.
        request_id: Cow<'a, str>,
        digest: Cow<'a, [u8]>,
        checksum: u64,
    },
    /// A number of 0 is of no report.
    Settle {
        lease_id: Cow<'a, str>,
        report: Cow<'a, StepReport>,
        report_number: u64,
    },
    SetShares {
        default: Share,
        by_name: Cow<'a, BTreeMap<Vec<u8>, Share>>,
    },
    EnterTenant {
        name: Cow<'a, [u8]>,
    },
    Advance {
        now: f64,
    },
    Pin {
        tenant: Cow<'a, [u8]>,
        tokens: Cow<'a, [i32]>,
        salt: Cow<'a, [u8]>,
        until: f64,
    },
    Unpin {
        pin_id: PinId,
    },
    Reset {
        first: BlockId,
        end: BlockId,
        now: f64,
    },
}

/// Books, and how far the worker's reports are entered in them.
#[derive(Debug, Serialize, Deserialize)]
pub struct ReportedBooks {
    pub books: Books,
    /// The number of the last report.
    pub last_report: u64,
}

impl ReportedBooks {
    /// What the first record says. None if it is no Begin, or names a policy that does not exist.
    pub fn begin(first: &Record) -> Option<ReportedBooks> {
        let Record::Begin { geometry, policy } = first else { return None };
        Some(ReportedBooks { books: Books::new(geometry.clone().into_owned(), policy)?, last_report: 0 })
    }

    /// Makes a change again.
    pub fn apply(&mut self, record: &Record) -> Result<()> {
        let books = &mut self.books;
        match record {
            Record::Begin { .. } => return broken("books begin twice".to_string()),
            Record::OpenLease { lease_id, tenant, ttl } => books.open_lease(lease_id, tenant, *ttl),
            Record::EndLease { lease_id } => books.end_lease(lease_id),
            Record::CloseLease { lease_id } => books.close_lease(lease_id)?,
            Record::Plan { lease_id, request, now, request_id, digest, checksum } => {
                let plan = self.plan(lease_id, request, *now, request_id, digest)?;
                if plan.as_ref().map(|plan| plan.checksum()) != Some(*checksum) {
                    return broken(format!("a plan of lease {lease_id:.8} is another one when it is made again"));
                }
            }
            Record::Settle { lease_id, report, report_number } => self.settle(lease_id, report, *report_number)?,
            Record::SetShares { default, by_name } => books.set_shares(*default, by_name.clone().into_owned()),
            Record::EnterTenant { name } => drop(books.enter_tenant(name)),
            Record::Advance { now } => books.advance(*now)?,
            Record::Pin { tenant, tokens, salt, until } => {
                books.pin_prefix(tenant, tokens, salt, *until)?.map_err(Failure::Refused)?;
            }
            Record::Unpin { pin_id } => drop(books.unpin_prefix(None, pin_id)?),
            Record::Reset { first, end, now } => drop(books.reset_prefix_cache(*first, *end, *now)?),
        }
        Ok(())
    }

    fn plan(
        &mut self,
        lease_id: &str,
        request: &StepRequest,
        now: f64,
        request_id: &str,
        digest: &[u8],
    ) -> Result<Option<Arc<StepPlan>>> {
        let Some(plan) = self.books.plan(lease_id, request, now)?.map(Arc::new) else { return Ok(None) };
        if !request_id.is_empty() {
            self.books.remember(lease_id, request_id, digest, plan.clone());
        }
        Ok(Some(plan))
    }

    fn settle(&mut self, lease_id: &str, report: &StepReport, report_number: u64) -> Result<()> {
        self.books.settle(lease_id, report)?;
        self.last_report = self.last_report.max(report_number);
        Ok(())
    }
}

/// Books whose changes are written down, if there is a store, before anybody is told of them.
///
/// A store that fails is given up, with all that is in it: books without one are as good until the process ends.
#[derive(Debug)]
pub struct Recorder {
    reported: ReportedBooks,
    store: Option<Store>,
    loss: Option<String>,
}

impl Recorder {
    pub fn new(reported: ReportedBooks, store: Option<Store>) -> Recorder {
        Recorder { reported, store, loss: None }
    }

    pub fn books(&self) -> &Books {
        &self.reported.books
    }

    /// For what is no change.
    pub fn books_mut(&mut self) -> &mut Books {
        &mut self.reported.books
    }

    /// Writes changes down from here on, the books being as the first record says.
    pub fn begin_store(&mut self, directory: &Path, first: &Record) -> Result<()> {
        match Store::create(directory, first, LogLimits::default()) {
            Ok(store) => self.store = Some(store),
            Err(error) => self.loss = Some(error),
        }
        Ok(())
    }

    /// The number of the last report that was entered.
    pub fn last_report(&self) -> u64 {
        self.reported.last_report
    }

    /// Whether changes are written down.
    pub fn is_stored(&self) -> bool {
        self.store.is_some()
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
        crate::store::write_snapshot(path, &self.reported)
    }

    fn write(&mut self, record: &Record) -> Result<()> {
        let Some(store) = &mut self.store else { return Ok(()) };
        let Err(error) = store.append(record) else { return Ok(()) };
        let Some(store) = self.store.take() else { return Ok(()) };
        if let Err(worse) = store.discard() {
            return broken(format!("what is stored is out of date ({error}) and can't be removed: {worse}"));
        }
        self.loss = Some(error);
        Ok(())
    }

    /// Makes a change that can't fail, and writes it down.
    pub fn make(&mut self, record: &Record) -> Result<()> {
        self.reported.apply(record)?;
        self.write(record)
    }

    /// See Books::advance. Returns false, and writes nothing down, if there is nothing to end.
    pub fn advance(&mut self, now: f64) -> Result<bool> {
        if self.books().next_end().is_none_or(|end| end > millis(now)) {
            return Ok(false);
        }
        self.make(&Record::Advance { now })?;
        Ok(true)
    }

    /// See Books::plan. With a request id the answer is remembered.
    pub fn plan(
        &mut self,
        lease_id: &str,
        request: &StepRequest,
        now: f64,
        request_id: &str,
        digest: &[u8],
    ) -> Result<Option<Arc<StepPlan>>> {
        let plan = match self.reported.plan(lease_id, request, now, request_id, digest) {
            Ok(Some(plan)) => plan,
            Err(Failure::Refused(refusal)) => {
                self.write(&Record::Advance { now })?; // that much was done
                return Err(Failure::Refused(refusal));
            }
            other => return other,
        };
        if self.is_stored() {
            self.write(&Record::Plan {
                lease_id: lease_id.into(),
                request: Cow::Borrowed(request),
                now,
                request_id: request_id.into(),
                digest: digest.into(),
                checksum: plan.checksum(),
            })?;
        }
        Ok(Some(plan))
    }

    /// See Books::settle.
    pub fn settle(&mut self, lease_id: &str, report: &StepReport, report_number: u64) -> Result<()> {
        self.reported.settle(lease_id, report, report_number)?;
        self.write(&Record::Settle { lease_id: lease_id.into(), report: Cow::Borrowed(report), report_number })
    }

    /// See Books::check_admission.
    pub fn check_admission(&mut self, tenant: &[u8], admission: &Admission, reserve: usize) -> Result<AdmissionCheck> {
        self.enter_tenant(tenant)?;
        Ok(self.reported.books.check_admission(tenant, admission, reserve))
    }

    /// See Books::pin_prefix.
    pub fn pin_prefix(
        &mut self,
        tenant: &[u8],
        tokens: &[i32],
        salt: &[u8],
        until: f64,
    ) -> Result<std::result::Result<Pin, Refusal>> {
        self.enter_tenant(tenant)?;
        let pin = self.reported.books.pin_prefix(tenant, tokens, salt, until)?;
        if pin.is_ok() {
            self.write(&Record::Pin { tenant: tenant.into(), tokens: tokens.into(), salt: salt.into(), until })?;
        }
        Ok(pin)
    }

    /// See Books::unpin_prefix.
    pub fn unpin_prefix(&mut self, tenant: Option<&[u8]>, pin_id: &PinId) -> Result<bool> {
        let is_gone = self.reported.books.unpin_prefix(tenant, pin_id)?;
        if is_gone {
            self.write(&Record::Unpin { pin_id: *pin_id })?;
        }
        Ok(is_gone)
    }

    /// See Books::reset_prefix_cache.
    pub fn reset_prefix_cache(&mut self, first: BlockId, end: BlockId, now: f64) -> Result<usize> {
        let num_dropped = self.reported.books.reset_prefix_cache(first, end, now)?;
        self.write(&Record::Reset { first, end, now })?;
        Ok(num_dropped)
    }

    /// A tenant that only asks is known from then on.
    fn enter_tenant(&mut self, name: &[u8]) -> Result<()> {
        if self.books().tenants().find(name).is_some() {
            return Ok(());
        }
        self.make(&Record::EnterTenant { name: name.into() })
    }
}
