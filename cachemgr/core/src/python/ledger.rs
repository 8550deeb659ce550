//! The ledger: what changes the books of one pool.

use std::any::Any;
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;

use pyo3::exceptions::{PyKeyError, PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};

use crate::books::Books;
use crate::books::lease::Lease;
use crate::books::lease::answers::RequestKey;
use crate::books::pins::PinId;
use crate::books::plans::StepRequest;
use crate::books::sequences::Row;
use crate::cache::accounts::Share;
use crate::cache::eviction::policies::{POLICIES, Policy};
use crate::cache::prefix::{BlockId, Namespace, root_hash};
use crate::errors::{Failure, Result, broken};
use crate::python::convert::{decoded, geometry_of, ids, lease_not_found, namespace_of, refusal_of, to_python};
use crate::python::messages::{PyAdmission, PyGrantedStep, PyPlanRequest, PyReset, PyStepReport};
use crate::python::policy_object::{PolicyChoice, PolicyError, PyPolicy};
use crate::python::views::{AdmissionCheckView, LeaseView, PinView, lease_view, pin_view};
use crate::store::adapters::{AdapterRights, Adapters};
use crate::store::changes::Change;
use crate::store::files::{LogLimits, Store};
use crate::store::stored_books::StoredBooks;
use crate::wire::answers::encode_disk_orders;
use crate::wire::requests;

/// Blocks that a part of a plan hashes at most, and their tokens: some 0.15 ms.
const HASHED_BLOCKS: usize = 1_024;
const HASHED_TOKENS: usize = 16_384;

/// The books of one pool in one epoch, with the calls that change them.
#[pyclass(name = "Ledger", module = "quire.cachemgr._core")]
pub struct PyLedger {
    pub stored: StoredBooks,
    #[pyo3(get)]
    geometry: Py<PyAny>,
    /// True if the books are checked after every change.
    verify: bool,
    /// The functions that are called after every change.
    listeners: Py<PyAny>,
    /// The first error of an eviction policy, if that is in Python.
    policy_error: Option<PolicyError>,
}

/// The listings, lookups, statistics and audits of a ledger.
#[pyclass(name = "Inspector", module = "quire.cachemgr._core", frozen)]
pub struct PyInspector {
    pub ledger: Py<PyLedger>,
}

/// The internals of a ledger.
#[pyclass(name = "Probe", module = "quire.cachemgr._core", frozen)]
pub struct PyProbe {
    pub ledger: Py<PyLedger>,
}

impl PyLedger {
    /// Runs a change of the books. A panic leaves them in an unknown state: no grant is made after it.
    pub fn changing<T>(&mut self, py: Python<'_>, change: impl FnOnce(&mut StoredBooks) -> Result<T>) -> PyResult<T> {
        let told = |panic: Box<dyn Any + Send>| {
            let text = panic.downcast_ref::<String>().cloned();
            text.or_else(|| panic.downcast_ref::<&str>().map(|text| text.to_string())).unwrap_or_default()
        };
        let changed =
            catch_unwind(AssertUnwindSafe(|| change(&mut self.stored))).unwrap_or_else(|panic| broken(told(panic)));
        if let Some(loss) = self.stored.take_loss() {
            let log = py.import("logging")?.call_method1("getLogger", ("quire.cachemgr",))?;
            log.call_method1("error", ("state given up, a restart will begin new epochs: %s", loss))?;
        }
        match self.policy_error.as_ref().and_then(PolicyError::take) {
            Some(error) => Err(error),
            None => changed.map_err(|failure| to_python(py, failure)),
        }
    }

    /// As above, and wakes the streams that wait for a change.
    fn telling<T>(&mut self, py: Python<'_>, change: impl FnOnce(&mut StoredBooks) -> Result<T>) -> PyResult<T> {
        let changed = self.changing(py, change)?;
        self.tell_of_change(py)?;
        Ok(changed)
    }

    /// Raises BrokenInvariant if the books are checked and wrong.
    fn tell_of_change(&self, py: Python<'_>) -> PyResult<()> {
        if let Some(violation) = self.verify.then(|| self.stored.books().violations().into_iter().next()).flatten() {
            return Err(to_python(py, Failure::Broken(violation)));
        }
        for tell in self.listeners.bind(py).try_iter()? {
            tell?.call0()?;
        }
        Ok(())
    }

    /// A lease, one that has ended included. Raises KeyError if there is none of this id.
    pub fn known(&self, lease_id: &str) -> PyResult<&Lease> {
        self.stored.books().lease(lease_id).ok_or_else(|| PyKeyError::new_err(lease_id.to_string()))
    }

    /// The open lease of this id. Raises CallRefused (LEASE_NOT_FOUND).
    pub fn open_lease_view(&self, py: Python<'_>, lease_id: &str) -> PyResult<LeaseView> {
        let lease = self.stored.books().lease(lease_id).filter(|lease| lease.is_open());
        lease.map(|lease| lease_view(&self.stored, lease_id, lease)).ok_or_else(|| lease_not_found(py, lease_id))
    }

    pub fn row(&self, lease_id: &str, seq_id: i64) -> Option<Row> {
        self.stored.books().lease(lease_id)?.row_of(seq_id)
    }
}

/// Blocks: floor, quota, limit, pin budget and keep limit.
type PyShare = (usize, usize, usize, usize, usize);
fn share_of((floor, quota, limit, pin_budget, keep_limit): PyShare) -> Share {
    Share { floor, quota, limit, pin_budget, keep_limit }
}

#[pymethods]
impl PyLedger {
    /// Empty books. Their changes are written to a store in a directory, if one is given; it has to exist. The policy
    /// is a name, or an object with the methods of cachemgr/quire/cachemgr/eviction_interface.py.
    #[new]
    #[pyo3(signature = (pool, epoch, geometry, *, policy = PolicyChoice::Named(POLICIES[0].into()), verify = false, listeners = None, directory = None, now = 0.0))]
    fn new(
        py: Python<'_>,
        pool: &str,
        epoch: i64,
        geometry: Bound<'_, PyAny>,
        policy: PolicyChoice,
        verify: bool,
        listeners: Option<Py<PyAny>>,
        directory: Option<PathBuf>,
        now: f64,
    ) -> PyResult<PyLedger> {
        let sizes = geometry_of(&geometry)?;
        let (books, begin, policy_error) = match policy {
            PolicyChoice::Named(name) => {
                let begin = Change::Begin { geometry: Cow::Owned(sizes), policy: name.clone().into(), now };
                (begin.begin().ok_or_else(|| PyKeyError::new_err(name))?, Some(begin), None)
            }
            PolicyChoice::Given(object) => {
                let error = PolicyError::default();
                let policy = PyPolicy::new(object, sizes.num_blocks, error.clone());
                (Books::with_policy(sizes, Policy::Given(Box::new(policy))), None, Some(error))
            }
        };
        let mut ledger = PyLedger {
            stored: StoredBooks::new(pool, epoch, books, None),
            geometry: geometry.unbind(),
            verify,
            listeners: listeners.unwrap_or_else(|| PyTuple::empty(py).into_any().unbind()),
            policy_error,
        };
        match (directory, begin) {
            (Some(directory), Some(begin)) => ledger.changing(py, |books| books.begin_store(&directory, &begin))?,
            (Some(_), None) => return Err(PyValueError::new_err("books with a policy in Python can't be stored")),
            (None, _) => {}
        }
        Ok(ledger)
    }

    /// The books that a store has, to go on with; leases are renewed. Raises OSError if it can't be read, or is not
    /// whole.
    #[staticmethod]
    #[pyo3(signature = (pool, epoch, geometry, *, directory, now, verify = false, listeners = None))]
    fn recover(
        py: Python<'_>,
        pool: &str,
        epoch: i64,
        geometry: Py<PyAny>,
        directory: PathBuf,
        now: f64,
        verify: bool,
        listeners: Option<Py<PyAny>>,
    ) -> PyResult<PyLedger> {
        let recovered = py.detach(|| Store::recover(&directory, LogLimits::default()));
        let (mut books, store) = recovered.map_err(PyOSError::new_err)?;
        books.leases_mut().resume(now);
        let listeners = listeners.unwrap_or_else(|| PyTuple::empty(py).into_any().unbind());
        let stored = StoredBooks::new(pool, epoch, books, Some(store));
        Ok(PyLedger { stored, geometry, verify, listeners, policy_error: None })
    }

    #[getter]
    fn pool(&self) -> &str {
        self.stored.pool()
    }

    #[getter]
    fn epoch(&self) -> i64 {
        self.stored.epoch()
    }

    /// When the epoch began, in seconds of the caller's clock.
    #[getter]
    fn began_at(&self) -> f64 {
        self.stored.books().began_at()
    }

    /// The views of the books that change nothing.
    #[getter]
    fn inspector(slf: Py<PyLedger>) -> PyInspector {
        PyInspector { ledger: slf }
    }

    /// The further views that tests and benchmarks read.
    #[getter]
    fn probe(slf: Py<PyLedger>) -> PyProbe {
        PyProbe { ledger: slf }
    }

    /// Goes on in a new epoch, on memory that outlived its worker: see Books::begin_epoch. `whole_blocks` has a bit for
    /// each block, the lowest of the first byte for block 0. Changes are written to a store in a directory, if one is
    /// given; it has to exist. Returns the numbers of blocks that are kept and dropped.
    #[pyo3(signature = (epoch, *, whole_blocks, now, directory = None))]
    fn begin_epoch(
        &mut self,
        py: Python<'_>,
        epoch: i64,
        whole_blocks: &[u8],
        now: f64,
        directory: Option<PathBuf>,
    ) -> PyResult<(usize, usize)> {
        let carried = self.telling(py, |books| books.begin_epoch(epoch, whole_blocks, now, directory.as_deref()))?;
        Ok((carried.num_kept, carried.num_dropped))
    }

    // -- leases -------------------------------------------------------------------------------------------------------

    /// A new lease without sequences.
    #[pyo3(signature = (lease_id, *, ttl_s, now, tenant = ""))]
    fn open_lease(
        &mut self,
        py: Python<'_>,
        lease_id: &str,
        ttl_s: f64,
        now: f64,
        tenant: &str,
    ) -> PyResult<LeaseView> {
        self.changing(py, |books| books.open_lease(lease_id, tenant.as_bytes(), ttl_s, now + ttl_s, false))?;
        self.open_lease_view(py, lease_id)
    }

    /// Adopts an open lease of an earlier epoch; its sequences are lost.
    fn adopt_lease(&mut self, py: Python<'_>, lease: &LeaseView) -> PyResult<()> {
        let LeaseView { lease_id, tenant, ttl_s, expires_at, had_grace, .. } = lease;
        self.changing(py, |books| books.open_lease(lease_id, tenant.as_bytes(), *ttl_s, *expires_at, *had_grace))
    }

    /// Gives an open lease its whole time again. Raises CallRefused (LEASE_NOT_FOUND).
    #[pyo3(signature = (lease_id, *, now))]
    fn renew_lease(&mut self, py: Python<'_>, lease_id: &str, now: f64) -> PyResult<LeaseView> {
        let lease = self.stored.books_mut().leases_mut().open_mut(lease_id);
        lease.ok_or_else(|| lease_not_found(py, lease_id))?.renew(now);
        self.open_lease_view(py, lease_id)
    }

    /// Stops a lease; `lease_fenced` frees its blocks. False if it is not open.
    fn end_lease(&mut self, py: Python<'_>, lease_id: &str) -> PyResult<bool> {
        self.changing(py, |books| books.end_lease(lease_id))
    }

    /// Stops the expired leases and returns their ids.
    fn expire_leases(&mut self, py: Python<'_>, now: f64) -> PyResult<Vec<String>> {
        self.changing(py, |books| books.expire_leases(now))
    }

    /// Adds the time in which no renewal could be read to the time of every lease.
    fn extend_leases(&mut self, held_s: f64, now: f64) {
        self.stored.books_mut().leases_mut().extend(held_s, now);
    }

    /// Frees all blocks of a fenced lease. No effect if the lease is removed already.
    fn lease_fenced(&mut self, py: Python<'_>, lease_id: &str) -> PyResult<()> {
        if self.stored.books().lease(lease_id).is_some() {
            self.telling(py, |books| books.close_lease(lease_id))?;
        }
        Ok(())
    }

    /// Computes a part of the hashes of a request's prompts, if they are many. True if this is to be called again before
    /// it is planned, which computes the others.
    #[pyo3(signature = (request, *, names_tenants = false))]
    fn hash_part(&self, request: &mut PyPlanRequest, names_tenants: bool) -> bool {
        let books = self.stored.books();
        let Some(lease) = books.lease(request.lease_id()) else { return false };
        let geometry = books.geometry();
        let most = (HASHED_TOKENS / geometry.block_size).clamp(1, HASHED_BLOCKS);
        let root_of = |namespace: &Namespace, named: Option<&str>| {
            let named = named.filter(|_| names_tenants).map(str::as_bytes);
            root_hash(named.unwrap_or(&lease.tenant_name), namespace, &geometry.model_fingerprint)
        };
        request.hash_part(most, geometry.block_size, geometry.max_tokens(), root_of)
    }

    /// Plans the next step of a lease, and renews the lease. A request is planned once.
    ///
    /// `names_tenants`: the caller may name the tenant of an admission.
    #[pyo3(signature = (request, *, now, names_tenants = false))]
    fn plan(
        &mut self,
        py: Python<'_>,
        request: &mut PyPlanRequest,
        now: f64,
        names_tenants: bool,
    ) -> PyResult<PyGrantedStep> {
        let (request, digest, hashes) = request.take()?;
        let geometry = self.stored.books().geometry();
        let items = requests::step_request(
            request,
            geometry.max_sequences,
            geometry.max_tokens(),
            geometry.max_drafts,
            names_tenants,
        );
        let items = StepRequest { hashes, ..items.map_err(|refused| to_python(py, refused))? };
        let key = RequestKey { request_id: &request.request_id, digest };
        let lease_id = &request.lease_id;
        let plan = self.changing(py, |books| books.plan(lease_id, request.epoch, &items, now, &key))?;
        let plan = plan.ok_or_else(|| lease_not_found(py, lease_id))?;
        self.tell_of_change(py)?;
        Ok(PyGrantedStep(plan))
    }

    // -- steps and content --------------------------------------------------------------------------------------------

    /// Enters the worker's report of a step.
    fn settle(&mut self, py: Python<'_>, report: &PyStepReport) -> PyResult<()> {
        let lease_id = &report.0.lease_id;
        let report = requests::step_report(report.0.clone(), self.stored.books().geometry().max_sequences);
        let report = report.map_err(|refused| to_python(py, refused))?;
        self.telling(py, |books| books.settle(lease_id, &report))
    }

    // -- the disk -----------------------------------------------------------------------------------------------------

    /// A serialised DiskOrders with the orders behind a number that are not reported; None if there is none.
    fn disk_orders<'py>(&self, py: Python<'py>, after: u64) -> Option<Bound<'py, PyBytes>> {
        encode_disk_orders(&self.stored, after).map(|orders| PyBytes::new(py, &orders))
    }

    /// The number of the last order about the disk.
    #[getter]
    fn last_disk_order(&self) -> u64 {
        self.stored.books().disk().last_order()
    }

    /// Orders to erase content from the disk that are not reported.
    #[getter]
    fn num_erasing(&self) -> usize {
        self.stored.books().disk().num_erasing()
    }

    /// The tenants with content that is to be erased from the disk, also of orders that have failed; None: all.
    #[getter]
    fn erasing(&self) -> Vec<Option<String>> {
        let name = |name: Vec<u8>| String::from_utf8_lossy(&name).into_owned();
        self.stored.books().erasing().into_iter().map(|tenant| tenant.map(name)).collect()
    }

    /// Has content erased from the disk that was still to be erased in the epoch before.
    fn go_on_erasing(&mut self, py: Python<'_>, tenants: Vec<Option<String>>) -> PyResult<()> {
        let tenants: Vec<_> = tenants.into_iter().map(|tenant| tenant.map(String::into_bytes)).collect();
        if tenants.is_empty() || self.stored.books().disk().len() == 0 {
            return Ok(());
        }
        self.telling(py, |books| books.go_on_erasing(&tenants))
    }

    /// Enters a serialised DiskReport. Raises CallRefused (INVALID_ARGUMENT).
    fn enter_disk_report(&mut self, py: Python<'_>, body: &[u8]) -> PyResult<()> {
        let [done, failed] = requests::disk_report(&decoded(body)?).map_err(|refused| to_python(py, refused))?;
        self.telling(py, |books| books.end_disk_orders(&done, &failed))
    }

    /// Enters a serialised DiskContent. Raises CallRefused (INVALID_ARGUMENT).
    fn enter_disk_content(&mut self, py: Python<'_>, body: &[u8]) -> PyResult<()> {
        let books = self.stored.books();
        let (num_disk_blocks, num_groups) = (books.disk().len(), books.geometry().groups.len());
        let found = requests::disk_content(&decoded(body)?, num_disk_blocks, num_groups);
        let found = found.map_err(|refused| to_python(py, refused))?;
        self.telling(py, |books| books.enter_found_copies(&found))
    }

    /// Sets the tenants' shares: a default, and others by name.
    fn set_shares(&mut self, py: Python<'_>, default: PyShare, by_name: HashMap<String, PyShare>) -> PyResult<()> {
        let by_name: BTreeMap<_, _> =
            by_name.into_iter().map(|(name, share)| (name.into_bytes(), share_of(share))).collect();
        let record = Change::SetShares { default: share_of(default), by_name: Cow::Owned(by_name) };
        self.telling(py, |books| books.make(&record))
    }

    /// The outcome that an admission of the tenant would have now; takes nothing.
    #[pyo3(signature = (tenant, admission, *, reserve = 0))]
    fn check_admission(
        &mut self,
        py: Python<'_>,
        tenant: &str,
        admission: &PyAdmission,
        reserve: usize,
    ) -> PyResult<AdmissionCheckView> {
        let check = self.changing(py, |books| books.check_admission(tenant.as_bytes(), &admission.0, reserve))?;
        let refusal = check.refusal.map(|refusal| refusal_of(py, &refusal)).transpose()?.map(Bound::unbind);
        let (num_needed, num_available) = (check.needed, check.available);
        Ok(AdmissionCheckView { num_cached_tokens: check.num_cached_tokens, num_needed, num_available, refusal })
    }

    /// Ends expired pins and advice. Cost: O(1) if none has ended.
    fn advance(&mut self, py: Python<'_>, now: f64) -> PyResult<()> {
        if self.stored.has_ended(now) {
            self.telling(py, |books| books.advance(now))?;
        }
        Ok(())
    }

    /// Keeps the cached blocks of a prefix from eviction.
    #[pyo3(signature = (tokens, *, salt, tenant, ttl_s, now, adapter = b"".as_slice()))]
    fn pin_prefix(
        &mut self,
        py: Python<'_>,
        tokens: &[u8],
        salt: &[u8],
        tenant: &str,
        ttl_s: f64,
        now: f64,
        adapter: &[u8],
    ) -> PyResult<PinView> {
        let (tokens, namespace) = (ids(tokens)?, namespace_of(salt, adapter));
        self.advance(py, now)?;
        let pin = self.telling(py, |books| {
            books.pin_prefix(tenant.as_bytes(), &tokens, &namespace, now + ttl_s)?.map_err(Failure::Refused)
        })?;
        Ok(pin_view(self.stored.books(), &pin))
    }

    /// Removes a pin of the tenant, or of any tenant. False if there is none.
    #[pyo3(signature = (pin_id, *, tenant = None))]
    fn unpin_prefix(&mut self, py: Python<'_>, pin_id: PinId, tenant: Option<&str>) -> PyResult<bool> {
        self.telling(py, |books| books.unpin_prefix(tenant.map(str::as_bytes), &pin_id))
    }

    /// Sets the adapters that admissions may have: identities and names. None: any.
    fn set_adapters(&mut self, adapters: Option<Vec<(Vec<u8>, String)>>) {
        self.stored.set_adapters(adapters.map_or_else(Adapters::default, Adapters::known));
    }

    /// Refuses an adapter that a plan would refuse the tenant; `field` is the adapter's in the request.
    fn check_adapter(&self, py: Python<'_>, tenant: &str, adapter: &[u8], field: &str) -> PyResult<()> {
        match self.stored.refuse_adapter(field, adapter, tenant.as_bytes()) {
            Some(refusal) => Err(to_python(py, Failure::Refused(refusal))),
            None => Ok(()),
        }
    }

    /// Sets the names of the adapters that tenants may use: a default, and others by tenant. None: all adapters.
    fn set_adapter_rights(
        &mut self,
        default: Option<BTreeSet<String>>,
        by_name: HashMap<String, Option<BTreeSet<String>>>,
    ) {
        let by_tenant = by_name.into_iter().map(|(name, names)| (name.into_bytes(), names)).collect();
        self.stored.set_adapter_rights(AdapterRights { default, by_tenant });
    }

    /// Keeps tokens and namespaces of the blocks that become findable from now on, or none.
    fn keep_contents(&mut self, are_kept: bool) {
        self.stored.books_mut().keep_contents(are_kept);
    }

    /// Removes the blocks from `first` to before `end` from the index, all of them by default, for a caller; returns their
    /// number.
    #[pyo3(signature = (first = 0, end = None, *, now = 0.0, by = ""))]
    fn reset_prefix_cache(
        &mut self,
        py: Python<'_>,
        first: BlockId,
        end: Option<BlockId>,
        now: f64,
        by: &str,
    ) -> PyResult<usize> {
        let end = end.unwrap_or(self.stored.books().geometry().num_blocks as BlockId);
        self.telling(py, |books| books.reset_prefix_cache(first, end, now, by.as_bytes()))
    }

    /// Begins a reset of a tenant's content: of all of it; with a salt, of the content under it, computed with the
    /// adapter; with tokens, too, of the content that begins with their full blocks.
    #[pyo3(signature = (tenant, *, salt = None, adapter = b"".as_slice(), tokens = b"".as_slice()))]
    fn begin_reset(
        &mut self,
        py: Python<'_>,
        tenant: &str,
        salt: Option<&[u8]>,
        adapter: &[u8],
        tokens: &[u8],
    ) -> PyResult<PyReset> {
        let namespace = salt.map(|salt| namespace_of(salt, adapter));
        let tokens = ids(tokens)?;
        self.changing(py, |books| books.begin_reset(tenant.as_bytes(), namespace.as_ref(), &tokens)).map(PyReset)
    }

    /// Drops the next part of a reset's content for a caller: returns the numbers of blocks and pins; None if all is
    /// done.
    #[pyo3(signature = (reset, *, now = 0.0, by = ""))]
    fn go_on_with_reset(
        &mut self,
        py: Python<'_>,
        reset: &mut PyReset,
        now: f64,
        by: &str,
    ) -> PyResult<Option<(usize, usize)>> {
        self.telling(py, |books| books.go_on_with_reset(&mut reset.0, now, by.as_bytes()))
    }
}
