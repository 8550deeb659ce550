//! The Python bindings of the books: messages in and out, no decisions.
//!
//! Token ids, sequence ids and counts are bytes, 4 each, little-endian: the format of `array.tobytes()`.

mod policy_object;

use std::any::Any;
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;

use policy_object::{PolicyChoice, PolicyError, PyPolicy};
use prost::Message;
use pyo3::exceptions::{PyKeyError, PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};

use crate::books::Books;
use crate::books::explain::{Explanation, Miss};
use crate::books::geometry::{Geometry, MAX_LAYER_GROUPS};
use crate::books::lease::answers::{REMEMBERED_PLANS, RequestKey};
use crate::books::lease::expiry::{GRACE_S, page_key};
use crate::books::lease::{Lease, MAX_STEPS_IN_FLIGHT};
use crate::books::listing::{BlockFilter, States};
use crate::books::pins::{Pin, PinId};
use crate::books::plans::{Admission, GrantedStep, RefusedItem};
use crate::books::resetting::Reset;
use crate::books::sequences::{Row, Sequence};
use crate::cache::accounts::Share;
use crate::cache::eviction::policies::{POLICIES, Policy};
use crate::cache::eviction::trial::NUM_CANDIDATES;
use crate::cache::groups::Span;
use crate::cache::host::HostBlockId;
use crate::cache::losses::Cause;
use crate::cache::pool::BlockState;
use crate::cache::prefix::{BlockId, Hash};
use crate::cache::tenants::TenantId;
use crate::errors::{Failure, Refusal, Result, broken};
use crate::store::changes::Change;
use crate::store::files::{LogLimits, Store};
use crate::store::stored_books::StoredBooks;
use crate::wire::answers::{
    Grantor, cache_use_number, encode_answer, encode_blocks, encode_counts, encode_events, encode_grant,
    encode_statistics, item_number,
};
use crate::wire::{bounds, messages, requests};

/// A refusal or a broken book as the exception that Python knows.
fn to_python(py: Python<'_>, failure: Failure) -> PyErr {
    let raised = || -> PyResult<Bound<'_, PyAny>> {
        let errors = py.import("quire.cachemgr.errors")?;
        match failure {
            Failure::Refused(refusal) => errors.getattr("CallRefused")?.call1((refusal_of(py, &refusal)?,)),
            Failure::Broken(what) => errors.getattr("BrokenInvariant")?.call1((what,)),
        }
    };
    raised().map_or_else(|error| error, PyErr::from_value)
}

fn refusal_of<'py>(py: Python<'py>, refusal: &Refusal) -> PyResult<Bound<'py, PyAny>> {
    let errors = py.import("quire.cachemgr.errors")?;
    let reason = errors.getattr("Reason")?.call1((refusal.reason.name(),))?;
    let metadata = PyDict::new(py);
    for (name, value) in &refusal.metadata {
        metadata.set_item(name.as_ref(), value)?;
    }
    errors.getattr("Refusal")?.call1((reason, &refusal.message, metadata))
}

fn lease_not_found(py: Python<'_>, lease_id: &str) -> PyErr {
    let raised = || py.import("quire.cachemgr.errors")?.getattr("lease_not_found")?.call1((lease_id,));
    raised().map_or_else(|error| error, PyErr::from_value)
}

/// The sizes in a Python Geometry.
fn geometry_of(geometry: &Bound<'_, PyAny>) -> PyResult<Geometry> {
    let size = |name: &str| geometry.getattr(name)?.extract();
    let spans = geometry.getattr("layer_groups")?.try_iter()?.map(|group| span_of(&group?));
    let groups = spans.collect::<PyResult<Vec<Span>>>()?;
    Ok(Geometry {
        groups: if groups.is_empty() { vec![Span::Full] } else { groups },
        block_size: size("block_size")?,
        num_blocks: size("num_blocks")?,
        num_host_blocks: size("num_host_blocks")?,
        max_sequences: size("max_sequences")?,
        max_sequence_tokens: size("max_sequence_tokens")?,
        vocab_size: size("vocab_size")?,
        model_fingerprint: geometry.getattr("model_fingerprint")?.extract::<String>()?.into_bytes(),
        has_recurrent_state: geometry.getattr("has_recurrent_state")?.extract()?,
    })
}

/// The span of a Python LayerGroup.
fn span_of(group: &Bound<'_, PyAny>) -> PyResult<Span> {
    let size: usize = group.getattr("window")?.extract()?;
    match group.getattr("kind")?.extract::<String>()?.as_str() {
        "full" => Ok(Span::Full),
        "sliding" if size > 0 => Ok(Span::Sliding(size)),
        "chunked" if size > 0 => Ok(Span::Chunked(size)),
        kind => Err(PyValueError::new_err(format!("no layer group is of kind {kind:?} with {size} tokens"))),
    }
}

fn ids(bytes: &[u8]) -> PyResult<Vec<i32>> {
    let (cells, rest) = bytes.as_chunks::<4>();
    if !rest.is_empty() {
        return Err(PyValueError::new_err(format!("{} bytes are no list of 4-byte numbers", bytes.len())));
    }
    Ok(cells.iter().map(|cell| i32::from_le_bytes(*cell)).collect())
}

fn bytes_of(tokens: &[i32]) -> Vec<u8> {
    tokens.iter().map(|token| token.to_le_bytes()).collect::<Vec<_>>().into_flattened()
}

/// The name that `beginning_of` encoded.
fn name_of(beginning: &[u8]) -> String {
    String::from_utf8_lossy(beginning).trim_end_matches('\0').to_string()
}

fn state_of(name: &str) -> PyResult<BlockState> {
    [BlockState::Free, BlockState::Cached, BlockState::Active, BlockState::Retired]
        .into_iter()
        .find(|state| state.name() == name)
        .ok_or_else(|| PyValueError::new_err(format!("{name:?} is no state of a block")))
}

fn position(position: Option<usize>) -> i64 {
    position.map_or(-1, |position| position as i64)
}

/// A decoded and checked admission of a request.
#[pyclass(name = "Admission", module = "quire.cachemgr._core", frozen)]
struct PyAdmission(Admission);

#[pymethods]
impl PyAdmission {
    /// Decodes a serialised Admission, for pools with sequences of at most `most_tokens`. Raises CallRefused.
    #[new]
    fn new(py: Python<'_>, body: &[u8], most_tokens: usize) -> PyResult<PyAdmission> {
        let message = decoded::<messages::Admission>(body)?;
        requests::admission(message, most_tokens, "admission")
            .map(PyAdmission)
            .map_err(|refused| to_python(py, refused))
    }
}

fn decoded<M: Message + Default>(body: &[u8]) -> PyResult<M> {
    M::decode(body).map_err(|error| PyValueError::new_err(error.to_string()))
}

/// One granted step: the blocks that it may touch and the tokens that it computes.
#[pyclass(name = "GrantedStep", module = "quire.cachemgr._core", frozen)]
struct PyGrantedStep(Arc<GrantedStep>);

#[pymethods]
impl PyGrantedStep {
    /// A serialised StepGrant.
    fn encode_grant<'py>(
        &self,
        py: Python<'py>,
        pool: &str,
        epoch: i64,
        term: i64,
        lease_id: &str,
    ) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &encode_grant(&self.0, &Grantor { pool, epoch, term, lease_id }))
    }

    /// A serialised PlanStepResponse, without its grant and its refusals.
    fn encode_answer<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &encode_answer(&self.0))
    }

    #[getter]
    fn has_refusals(&self) -> bool {
        !self.0.refusals.is_empty()
    }

    /// For each refused item: the number of its kind, its sequence, and the refusal.
    #[getter]
    fn refusals<'py>(&self, py: Python<'py>) -> PyResult<Vec<(i32, i64, Bound<'py, PyAny>)>> {
        let view =
            |refused: &RefusedItem| Ok((item_number(refused.item), refused.seq_id, refusal_of(py, &refused.refusal)?));
        self.0.refusals.iter().map(view).collect()
    }
}

/// A sequence at the time of the call.
#[pyclass(name = "SequenceView", module = "quire.cachemgr._core", frozen, get_all)]
struct SequenceView {
    seq_id: i32,
    tenant: String,
    num_known: usize,
    num_tokens: usize,
    num_cached: usize,
    num_computed: usize,
    num_scheduled: usize,
    num_published: usize,
    num_promised: usize,
    sampled_position: i64,
    /// The most tokens it will ever have, guaranteed; 0: best effort.
    reserved_tokens: usize,
    /// Of all layer groups, as the next three.
    num_blocks: usize,
    /// Group by group.
    block_table: Vec<BlockId>,
    is_offloaded: bool,
    host_blocks: Vec<HostBlockId>,
    /// By layer group, the entries that were let go and the blocks, in the host tier if it is offloaded.
    tables: Vec<(usize, usize)>,
    /// The pool has several layer groups, or one with a window.
    has_groups: bool,
    /// The number of a CacheUse.
    cache_use: i32,
}

/// A lease at the time of the call, one that has ended included.
#[pyclass(name = "Lease", module = "quire.cachemgr._core", frozen, get_all)]
struct LeaseView {
    lease_id: String,
    pool: String,
    tenant: String,
    ttl_s: f64,
    expires_at: f64,
    had_grace: bool,
    is_ending: bool,
    next_step: u64,
    settled_step: u64,
    num_in_flight: usize,
    num_sequences: usize,
}

/// A tenant's part of a pool, in blocks.
#[pyclass(name = "TenantUse", module = "quire.cachemgr._core", frozen, get_all)]
struct TenantUse {
    name: String,
    floor: usize,
    quota: usize,
    limit: usize,
    pin_budget: usize,
    num_held: usize,
    num_cached: usize,
    num_reserved: usize,
    num_pinned: usize,
}

/// The outcome that an admission would have now.
#[pyclass(name = "AdmissionCheck", module = "quire.cachemgr._core", frozen, get_all)]
struct AdmissionCheckView {
    num_cached_tokens: usize,
    num_needed: usize,
    num_available: usize,
    refusal: Option<Py<PyAny>>,
}

/// A prefix that is kept.
#[pyclass(name = "PinView", module = "quire.cachemgr._core", frozen, get_all)]
struct PinView {
    pin_id: PinId,
    tenant: String,
    num_tokens: usize,
    until: f64,
}

/// A reset of the prefix cache that was begun.
#[pyclass(name = "Reset", module = "quire.cachemgr._core")]
struct PyReset(Reset);

/// Why a prefix is not found.
#[pyclass(name = "Explanation", module = "quire.cachemgr._core", frozen, get_all)]
struct PyExplanation {
    num_blocks: usize,
    num_found: usize,
    /// Index, layer group and prefix hash.
    missing: Option<(usize, u8, Hash)>,
    reason: &'static str,
    lost_at: Option<f64>,
    evicted_by: Option<(String, String)>,
    num_stranded: usize,
    other_tenant: Option<String>,
}

/// A step in flight at the time of the call.
#[pyclass(name = "StepView", module = "quire.cachemgr._core", frozen, get_all)]
struct StepView {
    step_number: u64,
    is_doomed: bool,
    run_seq_ids: Vec<i32>,
    num_held: usize,
    num_fills: usize,
    num_released: usize,
}

#[pyclass(name = "Ledger", module = "quire.cachemgr._core")]
struct PyLedger {
    stored: StoredBooks,
    #[pyo3(get)]
    geometry: Py<PyAny>,
    /// True if the books are checked after every change.
    verify: bool,
    /// The functions that are called after every change.
    listeners: Py<PyAny>,
    /// The first error of an eviction policy, if that is in Python.
    policy_error: Option<PolicyError>,
}

impl PyLedger {
    /// Runs a change of the books. A panic leaves them in an unknown state: no grant is made after it.
    fn changing<T>(&mut self, py: Python<'_>, change: impl FnOnce(&mut StoredBooks) -> Result<T>) -> PyResult<T> {
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
        if let Some(violation) = self.verify.then(|| self.violations().into_iter().next()).flatten() {
            return Err(to_python(py, Failure::Broken(violation)));
        }
        for tell in self.listeners.bind(py).try_iter()? {
            tell?.call0()?;
        }
        Ok(())
    }

    /// A lease, one that has ended included. Raises KeyError if there is none of this id.
    fn known(&self, lease_id: &str) -> PyResult<&Lease> {
        self.stored.books().lease(lease_id).ok_or_else(|| PyKeyError::new_err(lease_id.to_string()))
    }

    fn lease_view(&self, lease_id: &str, lease: &Lease) -> LeaseView {
        LeaseView {
            lease_id: lease_id.to_string(),
            pool: self.stored.pool().to_string(),
            tenant: String::from_utf8_lossy(&lease.tenant_name).into_owned(),
            ttl_s: lease.ttl,
            expires_at: lease.expires_at,
            had_grace: lease.had_grace,
            is_ending: lease.is_ending,
            next_step: lease.next_step,
            settled_step: lease.settled_step,
            num_in_flight: lease.in_flight.len(),
            num_sequences: lease.sequences.len(),
        }
    }

    fn row(&self, lease_id: &str, seq_id: i64) -> Option<Row> {
        let seq_id = i32::try_from(seq_id).ok()?;
        self.stored.books().lease(lease_id)?.sequences.get(&seq_id).copied()
    }

    fn tenant(&self, tenant: TenantId) -> String {
        String::from_utf8_lossy(self.stored.books().tenants().name(tenant)).into_owned()
    }

    fn tell(&self, explanation: Explanation) -> PyExplanation {
        let Explanation { num_blocks, num_found, missing, miss, num_stranded } = explanation;
        let (mut lost_at, mut evicted_by, mut other_tenant) = (None, None, None);
        let reason = match miss {
            Miss::None => "none",
            Miss::NeverComputed => "never_computed",
            Miss::BeingComputed => "being_computed",
            Miss::OtherSalt => "other_salt",
            Miss::OtherTenant(tenant) => {
                other_tenant = Some(self.tenant(tenant));
                "other_tenant"
            }
            Miss::Lost(loss) => {
                lost_at = Some(loss.at);
                match loss.cause {
                    Cause::Reset => "reset",
                    Cause::Evicted { tenant, lease } => {
                        evicted_by = Some((self.tenant(tenant), name_of(&lease)));
                        "evicted"
                    }
                }
            }
        };
        PyExplanation { num_blocks, num_found, missing, reason, lost_at, evicted_by, num_stranded, other_tenant }
    }

    fn view(&self, row: Row) -> SequenceView {
        let sequence = self.stored.books().sequence(row);
        SequenceView {
            seq_id: sequence.seq_id,
            tenant: self.tenant(sequence.tenant),
            num_known: sequence.num_known(),
            num_tokens: sequence.num_tokens,
            num_cached: sequence.num_cached,
            num_computed: sequence.num_computed,
            num_scheduled: sequence.num_scheduled,
            num_published: sequence.num_published,
            num_promised: sequence.num_promised(),
            sampled_position: position(sequence.sampled_position),
            reserved_tokens: sequence.reserved_tokens,
            num_blocks: sequence.blocks().count(),
            block_table: sequence.blocks().collect(),
            tables: tables_of(sequence),
            has_groups: sequence.tables.len() > 1 || self.stored.books().geometry().has_windows(),
            is_offloaded: sequence.is_offloaded(),
            host_blocks: sequence.in_host.as_ref().map_or_else(Vec::new, |tables| tables.blocks.clone()),
            cache_use: cache_use_number(sequence.cache_use),
        }
    }
}

/// See SequenceView.
fn tables_of(sequence: &Sequence) -> Vec<(usize, usize)> {
    let held = |group: usize| sequence.tables[group].blocks().len();
    let count = |group: usize| sequence.in_host.as_ref().map_or_else(|| held(group), |tables| tables.counts[group]);
    sequence.tables.iter().enumerate().map(|(group, table)| (table.num_passed(), count(group))).collect()
}

/// Blocks: floor, quota, limit and pin budget.
type PyShare = (usize, usize, usize, usize);
fn share_of((floor, quota, limit, pin_budget): PyShare) -> Share {
    Share { floor, quota, limit, pin_budget }
}

impl PyLedger {
    fn pin_view(&self, pin: &Pin) -> PinView {
        PinView {
            pin_id: pin.id,
            tenant: self.tenant(pin.tenant),
            num_tokens: pin.num_blocks * self.stored.books().geometry().block_size,
            until: pin.until,
        }
    }

    fn use_of(&self, tenant: TenantId) -> TenantUse {
        let account = self.stored.books().pool().accounts().get(tenant);
        let Share { floor, quota, limit, pin_budget } = account.share;
        TenantUse {
            name: self.tenant(tenant),
            floor,
            quota,
            limit,
            pin_budget,
            num_held: account.num_held,
            num_cached: account.num_cached,
            num_reserved: account.num_reserved,
            num_pinned: account.num_pinned,
        }
    }
}

#[pymethods]
impl PyLedger {
    /// Empty books. Their changes are written to a store in a directory, if one is given; it has to exist. The policy
    /// is a name, or an object with the methods of cachemgr/quire/cachemgr/eviction_interface.py.
    #[new]
    #[pyo3(signature = (pool, epoch, geometry, *, policy = PolicyChoice::Named(POLICIES[0].into()), verify = false, listeners = None, directory = None))]
    fn new(
        py: Python<'_>,
        pool: &str,
        epoch: i64,
        geometry: Bound<'_, PyAny>,
        policy: PolicyChoice,
        verify: bool,
        listeners: Option<Py<PyAny>>,
        directory: Option<PathBuf>,
    ) -> PyResult<PyLedger> {
        let sizes = geometry_of(&geometry)?;
        let (books, begin, policy_error) = match policy {
            PolicyChoice::Named(name) => {
                let begin = Change::Begin { geometry: Cow::Owned(sizes), policy: name.clone().into() };
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

    /// The number of the last report that was entered.
    #[getter]
    fn last_report(&self) -> u64 {
        self.stored.books().last_report()
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
        self.lease(py, lease_id)
    }

    /// Adopts an open lease of an earlier epoch; its sequences are lost.
    fn adopt_lease(&mut self, py: Python<'_>, lease: &LeaseView) -> PyResult<()> {
        let LeaseView { lease_id, tenant, ttl_s, expires_at, had_grace, .. } = lease;
        self.changing(py, |books| books.open_lease(lease_id, tenant.as_bytes(), *ttl_s, *expires_at, *had_grace))
    }

    /// The open lease of this id. Raises CallRefused (LEASE_NOT_FOUND).
    fn lease(&self, py: Python<'_>, lease_id: &str) -> PyResult<LeaseView> {
        self.find_lease(lease_id).filter(|lease| !lease.is_ending).ok_or_else(|| lease_not_found(py, lease_id))
    }

    /// The lease of this id, one that has ended included.
    fn find_lease(&self, lease_id: &str) -> Option<LeaseView> {
        self.stored.books().lease(lease_id).map(|lease| self.lease_view(lease_id, lease))
    }

    /// The tenant of a lease, also of one that has ended.
    fn tenant_of(&self, lease_id: &str) -> Option<Cow<'_, str>> {
        self.stored.books().lease(lease_id).map(|lease| String::from_utf8_lossy(&lease.tenant_name))
    }

    /// All leases, those that have ended included, by id.
    fn leases(&self) -> Vec<LeaseView> {
        let mut leases: Vec<_> = self.stored.books().leases().iter().collect();
        leases.sort_unstable_by_key(|(lease_id, _)| *lease_id);
        leases.into_iter().map(|(lease_id, lease)| self.lease_view(lease_id, lease)).collect()
    }

    /// At most `most` leases from a page key on, by these, with their keys; of `only` that id.
    #[pyo3(signature = (key, most, *, only = ""))]
    fn leases_from(&self, key: &str, most: usize, only: &str) -> Vec<(String, LeaseView)> {
        let books = self.stored.books();
        let view = |(key, id): (&String, &String)| (key.clone(), self.lease_view(id, &books.leases()[id]));
        if only.is_empty() {
            return books.leases().page(key, most).map(view).collect();
        }
        let found = self.find_lease(only).map(|lease| (page_key(only), lease));
        found.into_iter().filter(|(its_key, _)| its_key.as_str() >= key).collect()
    }

    /// The number of leases of each tenant, those that have ended included.
    fn num_leases_by_tenant(&self) -> HashMap<String, usize> {
        let mut counts = HashMap::new();
        for lease in self.stored.books().leases().values() {
            *counts.entry(String::from_utf8_lossy(&lease.tenant_name).into_owned()).or_default() += 1;
        }
        counts
    }

    /// Gives an open lease its whole time again. Raises CallRefused (LEASE_NOT_FOUND).
    #[pyo3(signature = (lease_id, *, now))]
    fn renew_lease(&mut self, py: Python<'_>, lease_id: &str, now: f64) -> PyResult<LeaseView> {
        let lease = self.stored.books_mut().leases_mut().open_mut(lease_id);
        lease.ok_or_else(|| lease_not_found(py, lease_id))?.renew(now);
        self.lease(py, lease_id)
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

    /// No lease runs out before this.
    fn next_expiry(&self) -> Option<f64> {
        self.stored.books().leases().next_expiry()
    }

    /// Frees all blocks of a fenced lease. No effect if the lease is removed already.
    fn lease_fenced(&mut self, py: Python<'_>, lease_id: &str) -> PyResult<()> {
        if self.stored.books().lease(lease_id).is_some() {
            self.telling(py, |books| books.close_lease(lease_id))?;
        }
        Ok(())
    }

    // -- steps --------------------------------------------------------------------------------------------------------

    /// Plans the next step of a lease from a serialised PlanStepRequest, and renews the lease.
    ///
    /// `names_tenants`: the caller may name the tenant of an admission.
    #[pyo3(signature = (body, *, now, names_tenants = false))]
    fn plan(&mut self, py: Python<'_>, body: &[u8], now: f64, names_tenants: bool) -> PyResult<PyGrantedStep> {
        let mut request = decoded::<messages::PlanStepRequest>(body)?;
        let geometry = self.stored.books().geometry();
        let items = requests::step_request(&mut request, geometry.max_sequences, geometry.max_tokens(), names_tenants);
        let items = items.map_err(|refused| to_python(py, refused))?;
        let digest = requests::digest_of(&request, body);
        let key = RequestKey { request_id: &request.request_id, digest: &digest };
        let lease_id = &request.lease_id;
        let plan = self.changing(py, |books| books.plan(lease_id, request.epoch, &items, now, &key))?;
        let plan = plan.ok_or_else(|| lease_not_found(py, lease_id))?;
        self.tell_of_change(py)?;
        Ok(PyGrantedStep(plan))
    }

    /// Enters the worker's report of a step, a serialised StepReport.
    fn settle(&mut self, py: Python<'_>, body: &[u8]) -> PyResult<()> {
        let mut report = decoded::<messages::StepReport>(body)?;
        let lease_id = std::mem::take(&mut report.lease_id);
        let report = requests::step_report(report, self.stored.books().geometry().max_sequences);
        let report = report.map_err(|refused| to_python(py, refused))?;
        self.telling(py, |books| books.settle(&lease_id, &report))
    }

    // -- looking ------------------------------------------------------------------------------------------------------

    /// The steps of a lease that were planned and not reported. Raises KeyError if there is none of this id.
    fn steps_in_flight(&self, lease_id: &str) -> PyResult<Vec<StepView>> {
        let lease = self.known(lease_id)?;
        let view = |step: &crate::books::steps::StepInFlight| StepView {
            step_number: step.step_number,
            is_doomed: step.is_doomed,
            run_seq_ids: step.runs.iter().map(|run| run.seq_id).collect(),
            num_held: step.holds.iter().map(Vec::len).sum(),
            num_fills: step.fills.len(),
            num_released: step.released_rows.len(),
        };
        Ok(lease.in_flight.iter().map(view).collect())
    }

    /// Ids of a lease's sequences, as they were admitted.
    fn sequence_ids(&self, lease_id: &str) -> Vec<i32> {
        let rows = self
            .stored
            .books()
            .lease(lease_id)
            .map(|lease| self.stored.books().rows_in_order(lease))
            .unwrap_or_default();
        rows.into_iter().map(|row| self.stored.books().sequence(row).seq_id).collect()
    }

    /// The first `most` of a lease's sequences with ids from `first` on, by id; of one tenant, if it is given.
    #[pyo3(signature = (lease_id, first, most, *, tenant = None))]
    fn sequences_from(&self, lease_id: &str, first: i64, most: usize, tenant: Option<&str>) -> Vec<SequenceView> {
        let Ok(first) = i32::try_from(first) else {
            return Vec::new();
        };
        let rows = self.stored.books().listing().sequences_from(lease_id, first, most, tenant.map(str::as_bytes));
        rows.into_iter().map(|row| self.view(row)).collect()
    }

    /// A sequence of an open lease. Raises CallRefused (LEASE_NOT_FOUND).
    fn sequence(&self, py: Python<'_>, lease_id: &str, seq_id: i64) -> PyResult<Option<SequenceView>> {
        self.lease(py, lease_id)?;
        Ok(self.row(lease_id, seq_id).map(|row| self.view(row)))
    }

    /// All known tokens of a sequence.
    fn tokens<'py>(&self, py: Python<'py>, lease_id: &str, seq_id: i64) -> Option<Bound<'py, PyBytes>> {
        let row = self.row(lease_id, seq_id)?;
        Some(PyBytes::new(py, &bytes_of(&self.stored.books().sequence(row).tokens)))
    }

    /// Tokens that an admission would find in the cache; takes nothing.
    #[pyo3(signature = (tokens, *, salt, tenant = ""))]
    fn num_cached_tokens(&self, tokens: &[u8], salt: &[u8], tenant: &str) -> PyResult<usize> {
        Ok(self.stored.books().num_cached_tokens(&ids(tokens)?, salt, tenant.as_bytes()))
    }

    /// A serialised BlockCounts.
    fn counts<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &encode_counts(self.stored.books().pool().counts()))
    }

    /// State, references, holds of steps in flight, and prefix hash of a block.
    fn block(&self, block_id: BlockId) -> (&'static str, u32, u32, Option<Hash>) {
        let pool = self.stored.books().pool();
        (pool.state(block_id).name(), pool.ref_count(block_id), pool.hold_count(block_id), pool.prefix_hash(block_id))
    }

    // -- tenants ------------------------------------------------------------------------------------------------------

    /// Sets the tenants' shares: a default, and others by name.
    fn set_shares(&mut self, py: Python<'_>, default: PyShare, by_name: HashMap<String, PyShare>) -> PyResult<()> {
        let by_name: BTreeMap<_, _> =
            by_name.into_iter().map(|(name, share)| (name.into_bytes(), share_of(share))).collect();
        let record = Change::SetShares { default: share_of(default), by_name: Cow::Owned(by_name) };
        self.telling(py, |books| books.make(&record))
    }

    /// The tenants that were seen or have a share of their own, by name.
    fn tenants(&self) -> Vec<TenantUse> {
        let mut uses: Vec<_> =
            (0..self.stored.books().tenants().len() as TenantId).map(|tenant| self.use_of(tenant)).collect();
        uses.sort_unstable_by(|one, other| one.name.cmp(&other.name));
        uses
    }

    /// One tenant's use.
    fn tenant_use(&self, name: &str) -> Option<TenantUse> {
        self.stored.books().tenants().find(name.as_bytes()).map(|tenant| self.use_of(tenant))
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

    /// No pin and no advice ends before this; None if there is none that ends.
    fn next_end(&self) -> Option<f64> {
        self.stored.books().next_end().map(|end| end as f64 / 1e3)
    }

    /// Keeps the cached blocks of a prefix from eviction.
    #[pyo3(signature = (tokens, *, salt, tenant, ttl_s, now))]
    fn pin_prefix(
        &mut self,
        py: Python<'_>,
        tokens: &[u8],
        salt: &[u8],
        tenant: &str,
        ttl_s: f64,
        now: f64,
    ) -> PyResult<PinView> {
        let tokens = ids(tokens)?;
        self.advance(py, now)?;
        let pin = self.telling(py, |books| {
            books.pin_prefix(tenant.as_bytes(), &tokens, salt, now + ttl_s)?.map_err(Failure::Refused)
        })?;
        Ok(self.pin_view(&pin))
    }

    /// Removes a pin of the tenant, or of any tenant. False if there is none.
    #[pyo3(signature = (pin_id, *, tenant = None))]
    fn unpin_prefix(&mut self, py: Python<'_>, pin_id: PinId, tenant: Option<&str>) -> PyResult<bool> {
        self.telling(py, |books| books.unpin_prefix(tenant.map(str::as_bytes), &pin_id))
    }

    /// At most `most` pins after a given one, of one tenant or of all, by id.
    #[pyo3(signature = (*, tenant = None, behind = None, most = 1_000))]
    fn pins(&self, tenant: Option<&str>, behind: Option<PinId>, most: usize) -> Vec<PinView> {
        let id = tenant.map(|name| self.stored.books().tenants().find(name.as_bytes()));
        let is_theirs = |pin: &&Pin| id.is_none_or(|id| id == Some(pin.tenant));
        let pins: Box<dyn Iterator<Item = &Pin>> = match behind {
            Some(behind) => Box::new(self.stored.books().pins().behind(behind)),
            None => Box::new(self.stored.books().pins().all()),
        };
        pins.filter(is_theirs).take(most).map(|pin| self.pin_view(pin)).collect()
    }

    // -- looking ------------------------------------------------------------------------------------------------------

    /// Serialised blocks of a ListBlocksResponse from `first` on, and the first block of the next page. Without a
    /// state, a tenant or a lease: blocks of all.
    #[pyo3(signature = (first, most, *, state, tenant, lease_id))]
    fn list_blocks<'py>(
        &self,
        py: Python<'py>,
        first: u64,
        most: usize,
        state: Option<&str>,
        tenant: Option<&str>,
        lease_id: Option<&str>,
    ) -> PyResult<(Bound<'py, PyBytes>, Option<BlockId>)> {
        let first = first.min(self.stored.books().geometry().num_blocks as u64) as BlockId;
        let states = state.map(state_of).transpose()?.map_or(States::Any, States::Only);
        let filter = BlockFilter { states, tenant: tenant.map(str::as_bytes), lease_id };
        let (blocks, next) = self.stored.books().listing().list_blocks(first, most, &filter);
        let blocks = blocks.into_iter().map(|block| self.stored.books().listing().describe(block)).collect();
        Ok((PyBytes::new(py, &encode_blocks(blocks)), next))
    }

    /// Serialised events of a WatchBlocksResponse: blocks that are not free from `first` on, and the block to continue
    /// from.
    #[pyo3(signature = (first, most, *, tenant, with_content))]
    fn snapshot<'py>(
        &self,
        py: Python<'py>,
        first: BlockId,
        most: usize,
        tenant: Option<&str>,
        with_content: bool,
    ) -> (Bound<'py, PyBytes>, Option<BlockId>) {
        let (events, next) =
            self.stored.books().listing().snapshot(first, most, tenant.map(str::as_bytes), with_content);
        (PyBytes::new(py, &encode_events(events)), next)
    }

    /// Serialised events of a WatchBlocksResponse: the changes from number `first` on, and the number to continue from;
    /// None if the journal does not keep the next one any more.
    #[pyo3(signature = (first, most, *, tenant, with_content))]
    fn changes<'py>(
        &self,
        py: Python<'py>,
        first: u64,
        most: usize,
        tenant: Option<&str>,
        with_content: bool,
    ) -> Option<(Bound<'py, PyBytes>, u64)> {
        let (events, next) =
            self.stored.books().listing().changes(first, most, tenant.map(str::as_bytes), with_content)?;
        Some((PyBytes::new(py, &encode_events(events)), next))
    }

    /// Changes of blocks so far.
    fn num_changes(&self) -> u64 {
        self.stored.books().pool().journal().num_changes()
    }

    /// The number of changes that the journal keeps.
    fn num_changes_kept(&self) -> usize {
        self.stored.books().pool().journal().num_kept()
    }

    /// Keeps tokens and salts of the blocks that become findable from now on, or none.
    fn keep_contents(&mut self, are_kept: bool) {
        self.stored.books_mut().keep_contents(are_kept);
    }

    /// True if tokens and salts of findable blocks are kept.
    fn contents_are_kept(&self) -> bool {
        self.stored.books().pool().contents().are_kept()
    }

    /// Why an admission would not find more in the cache; takes nothing.
    #[pyo3(signature = (tokens, *, salt, tenant, with_other_tenants))]
    fn explain(
        &mut self,
        py: Python<'_>,
        tokens: &[u8],
        salt: &[u8],
        tenant: &str,
        with_other_tenants: bool,
    ) -> PyResult<PyExplanation> {
        let tokens = ids(tokens)?;
        let explain = |books: &mut StoredBooks| {
            Ok(books.books_mut().explain(&tokens, salt, tenant.as_bytes(), with_other_tenants))
        };
        let explanation = self.changing(py, explain)?;
        Ok(self.tell(explanation))
    }

    /// Removes the blocks from `first` to before `end` from the index, all of them by default; returns their number.
    #[pyo3(signature = (first = 0, end = None, *, now = 0.0))]
    fn reset_prefix_cache(
        &mut self,
        py: Python<'_>,
        first: BlockId,
        end: Option<BlockId>,
        now: f64,
    ) -> PyResult<usize> {
        let end = end.unwrap_or(self.stored.books().geometry().num_blocks as BlockId);
        self.telling(py, |books| books.reset_prefix_cache(first, end, now))
    }

    /// Begins a reset of a tenant's content: of all of it; with a salt, of the content under it; with tokens, too, of
    /// the content that begins with their full blocks.
    #[pyo3(signature = (tenant, *, salt = None, tokens = b"".as_slice()))]
    fn begin_reset(&mut self, py: Python<'_>, tenant: &str, salt: Option<&[u8]>, tokens: &[u8]) -> PyResult<PyReset> {
        let tokens = ids(tokens)?;
        self.changing(py, |books| books.begin_reset(tenant.as_bytes(), salt, &tokens)).map(PyReset)
    }

    /// Drops the next part of a reset's content: returns the numbers of blocks and pins; None if all is done.
    #[pyo3(signature = (reset, *, now = 0.0))]
    fn go_on_with_reset(&mut self, py: Python<'_>, reset: &mut PyReset, now: f64) -> PyResult<Option<(usize, usize)>> {
        self.telling(py, |books| books.go_on_with_reset(&mut reset.0, now))
    }

    /// The number of pins.
    fn num_pins(&self) -> usize {
        self.stored.books().pins().len()
    }

    /// A serialised PoolStatistics.
    fn statistics<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &encode_statistics(&self.stored))
    }

    /// Rows taken in the worker.
    fn num_rows(&self) -> usize {
        self.stored.books().num_rows()
    }

    // -- checking -----------------------------------------------------------------------------------------------------

    fn violations(&self) -> Vec<String> {
        self.stored.books().violations()
    }

    /// The violations in the blocks from `first` to before `end`.
    fn audit(&self, first: BlockId, end: BlockId) -> Vec<String> {
        self.stored.books().audit().blocks(&(first..end.min(self.stored.books().geometry().num_blocks as BlockId)))
    }

    fn audit_counts(&self) -> Vec<String> {
        self.stored.books().audit().counts()
    }

    fn audit_promises(&self) -> Vec<String> {
        self.stored.books().audit().promises()
    }

    #[pyo3(signature = (but_last_step_of = None))]
    fn state(&self, but_last_step_of: Option<&str>) -> String {
        self.stored.books().state(but_last_step_of)
    }

    /// The parked blocks in the policy's order.
    fn parked_blocks(&self) -> Vec<BlockId> {
        self.stored.books().pool().parked_blocks()
    }

    /// Lets the default policy follow a candidate until it chooses one itself. For tests.
    fn follow(&mut self, candidate: usize) -> PyResult<()> {
        match self.stored.books_mut().pool_mut().policy().lineage() {
            Some(lineage) if candidate < NUM_CANDIDATES => lineage.trial.followed = candidate,
            _ => return Err(PyValueError::new_err("the policy has no such candidate")),
        }
        Ok(())
    }
}

#[pymodule]
mod _core {
    #[pymodule_export]
    use super::{
        AdmissionCheckView, LeaseView, PinView, PyAdmission, PyExplanation, PyGrantedStep, PyLedger, PyReset,
        SequenceView, StepView, TenantUse,
    };

    use super::*;

    #[pyfunction]
    fn root_hash(tenant: &str, salt: &[u8], model_fingerprint: &str) -> Hash {
        crate::cache::prefix::root_hash(tenant.as_bytes(), salt, model_fingerprint.as_bytes())
    }

    /// The longest sequence of a pool.
    #[pyfunction]
    fn longest_sequence(geometry: &Bound<'_, PyAny>) -> PyResult<usize> {
        Ok(geometry_of(geometry)?.max_tokens())
    }

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("POLICIES", POLICIES.to_vec())?;
        module.add("WrongVictims", module.py().get_type::<policy_object::WrongVictims>())?;
        module.add("DEFAULT_POLICY", POLICIES[0])?;
        module.add("GRACE_S", GRACE_S)?;
        module.add("MAX_STEPS_IN_FLIGHT", MAX_STEPS_IN_FLIGHT)?;
        module.add("REMEMBERED_PLANS", REMEMBERED_PLANS)?;
        module.add("MAX_LAYER_GROUPS", MAX_LAYER_GROUPS)?;
        module.add("MAX_PLAN_ITEMS", bounds::MAX_PLAN_ITEMS)?;
        module.add("MAX_PLAN_TOKENS", bounds::MAX_PLAN_TOKENS)?;
        module.add("MAX_FORKED_TOKENS", bounds::MAX_FORKED_TOKENS)?;
        module.add("MAX_REQUEST_ID_BYTES", bounds::MAX_REQUEST_ID_BYTES)?;
        module.add("MAX_SALT_BYTES", bounds::MAX_SALT_BYTES)?;
        module.add("MAX_RANGES", bounds::MAX_RANGES)?;
        module.add("MAX_RETENTION_S", bounds::MAX_RETENTION_S)?;
        module.add("MAX_EXPECTED_S", bounds::MAX_EXPECTED_S)?;
        module.add("LEAST_PRIORITY", crate::cache::advice::LEAST_WORTH)?;
        module.add("MOST_PRIORITY", crate::cache::advice::MOST_WORTH)?;
        module.add("NUM_CANDIDATES", NUM_CANDIDATES)
    }
}
