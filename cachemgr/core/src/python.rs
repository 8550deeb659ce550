//! The books as Python calls them: messages in and out, nothing decided here.
//!
//! Token ids, sequence ids and counts come as bytes, 4 each, little-endian: what `array.tobytes()` gives.

use std::any::Any;
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;

use prost::Message;
use pyo3::exceptions::{PyKeyError, PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::books::explain::{Explanation, Miss};
use crate::books::geometry::Geometry;
use crate::books::leases::{Lease, MAX_STEPS_IN_FLIGHT, REMEMBERED_PLANS, RequestKey};
use crate::books::looking::{BlockFilter, States};
use crate::books::pins::{Pin, PinId};
use crate::books::plans::{Admission, RefusedItem, StepPlan, StepRequest};
use crate::books::sequences::Row;
use crate::books::settle::{StepOutcome, StepReport};
use crate::cache::accounts::Share;
use crate::cache::host::{HostBlockCounts, HostBlockId};
use crate::cache::losses::Cause;
use crate::cache::policies::POLICIES;
use crate::cache::pool::BlockState;
use crate::cache::prefix::{BlockId, Hash};
use crate::cache::retention::Choice;
use crate::cache::tenants::TenantId;
use crate::errors::{Failure, Refusal, Result, broken};
use crate::store::changes::Change;
use crate::store::files::{LogLimits, Store};
use crate::store::stored_books::StoredBooks;
use crate::wire::answers::{Grantor, encode_answer, encode_blocks, encode_events, encode_grant, item_number};
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

fn ids(bytes: &[u8]) -> PyResult<Vec<i32>> {
    let (cells, rest) = bytes.as_chunks::<4>();
    if !rest.is_empty() {
        return Err(PyValueError::new_err(format!("{} bytes are no list of 4-byte numbers", bytes.len())));
    }
    Ok(cells.iter().map(|cell| i32::from_le_bytes(*cell)).collect())
}

fn bytes_of(tokens: &[i32]) -> Vec<u8> {
    tokens.iter().flat_map(|token| token.to_le_bytes()).collect()
}

/// What `beginning_of` made of a name.
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

/// A request for a step, decoded and checked.
#[pyclass(name = "StepRequest", module = "quire.cachemgr._core", frozen)]
struct PyStepRequest {
    #[pyo3(get)]
    lease_id: String,
    #[pyo3(get)]
    epoch: i64,
    request_id: String,
    digest: Vec<u8>,
    items: StepRequest,
}

#[pymethods]
impl PyStepRequest {
    /// Of a serialised PlanStepRequest, for a pool with so many sequences, of so many tokens each. Raises CallRefused.
    #[new]
    #[pyo3(signature = (body, *, max_sequences, max_tokens))]
    fn new(py: Python<'_>, body: &[u8], max_sequences: usize, max_tokens: usize) -> PyResult<PyStepRequest> {
        let mut request = decoded::<messages::PlanStepRequest>(body)?;
        let items = requests::step_request(&mut request, max_sequences, max_tokens);
        Ok(PyStepRequest {
            items: items.map_err(|refused| to_python(py, refused))?,
            digest: requests::digest_of(&request, body),
            lease_id: request.lease_id,
            epoch: request.epoch,
            request_id: request.request_id,
        })
    }
}

/// An admission that is asked about, decoded and checked.
#[pyclass(name = "Admission", module = "quire.cachemgr._core", frozen)]
struct PyAdmission(Admission);

#[pymethods]
impl PyAdmission {
    /// Of a serialised Admission, for pools whose sequences have at most `most_tokens`. Raises CallRefused.
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
#[pyclass(name = "StepPlan", module = "quire.cachemgr._core", frozen)]
struct PyStepPlan(Arc<StepPlan>);

#[pymethods]
impl PyStepPlan {
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

    /// Of each item that was refused: the number of its kind, its sequence, and why.
    #[getter]
    fn refusals<'py>(&self, py: Python<'py>) -> PyResult<Vec<(i32, i64, Bound<'py, PyAny>)>> {
        let view =
            |refused: &RefusedItem| Ok((item_number(refused.item), refused.seq_id, refusal_of(py, &refused.refusal)?));
        self.0.refusals.iter().map(view).collect()
    }
}

/// A sequence as it was when it was asked for.
#[pyclass(name = "SequenceView", module = "quire.cachemgr._core", frozen, get_all)]
struct SequenceView {
    seq_id: i32,
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
    num_blocks: usize,
    block_table: Vec<BlockId>,
    is_offloaded: bool,
    host_blocks: Vec<HostBlockId>,
}

/// A prefix that is kept.
#[pyclass(name = "PinView", module = "quire.cachemgr._core", frozen, get_all)]
struct PinView {
    pin_id: PinId,
    tenant: String,
    num_tokens: usize,
    until: f64,
}

/// Why a prefix is not found.
#[pyclass(name = "Explanation", module = "quire.cachemgr._core", frozen, get_all)]
struct PyExplanation {
    num_blocks: usize,
    num_found: usize,
    missing: Option<Hash>,
    reason: &'static str,
    lost_at: Option<f64>,
    evicted_by: Option<(String, String)>,
    num_stranded: usize,
    other_tenant: Option<String>,
}

/// A step in flight as it was when it was asked for.
#[pyclass(name = "StepView", module = "quire.cachemgr._core", frozen, get_all)]
struct StepView {
    step_number: u64,
    is_doomed: bool,
    run_seq_ids: Vec<i32>,
    num_pinned: usize,
    num_fills: usize,
    num_released: usize,
}

#[pyclass(name = "Books", module = "quire.cachemgr._core")]
struct PyBooks(StoredBooks);

impl PyBooks {
    /// Runs a change of the books. One that panics leaves them wrong: nothing may be granted any more.
    fn changing<T>(&mut self, py: Python<'_>, change: impl FnOnce(&mut StoredBooks) -> Result<T>) -> PyResult<T> {
        let told = |panic: Box<dyn Any + Send>| {
            let text = panic.downcast_ref::<String>().cloned();
            text.or_else(|| panic.downcast_ref::<&str>().map(|text| text.to_string())).unwrap_or_default()
        };
        let changed =
            catch_unwind(AssertUnwindSafe(|| change(&mut self.0))).unwrap_or_else(|panic| broken(told(panic)));
        if let Some(loss) = self.0.take_loss() {
            let log = py.import("logging")?.call_method1("getLogger", ("quire.cachemgr",))?;
            log.call_method1("error", ("state given up, a restart will begin new epochs: %s", loss))?;
        }
        changed.map_err(|failure| to_python(py, failure))
    }

    fn row(&self, lease_id: &str, seq_id: i64) -> Option<Row> {
        let seq_id = i32::try_from(seq_id).ok()?;
        self.0.books().lease(lease_id)?.sequences.get(&seq_id).copied()
    }

    fn tenant(&self, tenant: TenantId) -> String {
        String::from_utf8_lossy(self.0.books().tenant_name(tenant)).into_owned()
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
        let sequence = self.0.books().sequence(row);
        SequenceView {
            seq_id: sequence.seq_id,
            num_known: sequence.num_known(),
            num_tokens: sequence.num_tokens,
            num_cached: sequence.num_cached,
            num_computed: sequence.num_computed,
            num_scheduled: sequence.num_scheduled,
            num_published: sequence.num_published,
            num_promised: sequence.num_promised(),
            sampled_position: position(sequence.sampled_position),
            reserved_tokens: sequence.reserved_tokens,
            num_blocks: sequence.block_table.len(),
            block_table: sequence.block_table.clone(),
            is_offloaded: sequence.is_offloaded(),
            host_blocks: sequence.host_blocks.clone().unwrap_or_default(),
        }
    }
}

/// Blocks: floor, quota, limit and pin budget.
type PyShare = (usize, usize, usize, usize);
/// Blocks: held, cached, reserved and pinned.
type PyUse = (usize, usize, usize, usize);

fn share_of((floor, quota, limit, pin_budget): PyShare) -> Share {
    Share { floor, quota, limit, pin_budget }
}

impl PyBooks {
    fn pin_view(&self, pin: &Pin) -> PinView {
        PinView {
            pin_id: pin.id,
            tenant: self.tenant_name(pin.tenant),
            num_tokens: pin.blocks.len() * self.0.books().geometry().block_size,
            until: pin.until,
        }
    }

    fn tenant_name(&self, tenant: TenantId) -> String {
        String::from_utf8_lossy(self.0.books().tenants().name(tenant)).into_owned()
    }
}

#[pymethods]
impl PyBooks {
    /// Empty books. Their changes are written to a store in a directory, if one is given; it has to exist.
    #[new]
    #[pyo3(signature = (*, num_blocks, num_host_blocks, block_size, max_sequences, max_sequence_tokens, vocab_size, model_fingerprint, policy, has_recurrent_state = false, directory = None))]
    fn new(
        py: Python<'_>,
        num_blocks: usize,
        num_host_blocks: usize,
        block_size: usize,
        max_sequences: usize,
        max_sequence_tokens: usize,
        vocab_size: usize,
        model_fingerprint: &str,
        policy: &str,
        has_recurrent_state: bool,
        directory: Option<PathBuf>,
    ) -> PyResult<PyBooks> {
        let model_fingerprint = model_fingerprint.as_bytes().to_vec();
        let geometry = Geometry {
            block_size,
            num_blocks,
            num_host_blocks,
            max_sequences,
            max_sequence_tokens,
            vocab_size,
            model_fingerprint,
            has_recurrent_state,
        };
        let begin = Change::Begin { geometry: Cow::Owned(geometry), policy: policy.into() };
        let books = begin.begin().ok_or_else(|| PyKeyError::new_err(policy.to_string()))?;
        let mut books = PyBooks(StoredBooks::new(books, None));
        if let Some(directory) = directory {
            books.changing(py, |books| books.begin_store(&directory, &begin))?;
        }
        Ok(books)
    }

    /// The books that a store has, to go on with. Raises OSError if it can't be read, or is not whole.
    #[staticmethod]
    fn recover(py: Python<'_>, directory: PathBuf) -> PyResult<PyBooks> {
        let recovered = py.detach(|| Store::recover(&directory, LogLimits::default()));
        let (books, store) = recovered.map_err(PyOSError::new_err)?;
        Ok(PyBooks(StoredBooks::new(books, Some(store))))
    }

    /// True if changes are written down.
    fn is_stored(&self) -> bool {
        self.0.is_stored()
    }

    /// The number of the last report that was entered.
    fn last_report(&self) -> u64 {
        self.0.books().last_report()
    }

    fn open_lease(&mut self, py: Python<'_>, lease_id: &str, tenant: &str, ttl: f64) -> PyResult<()> {
        let record = Change::OpenLease { lease_id: lease_id.into(), tenant: tenant.as_bytes().into(), ttl };
        self.changing(py, |books| books.make(&record))
    }

    fn end_lease(&mut self, py: Python<'_>, lease_id: &str) -> PyResult<()> {
        self.changing(py, |books| books.make(&Change::EndLease { lease_id: lease_id.into() }))
    }

    fn close_lease(&mut self, py: Python<'_>, lease_id: &str) -> PyResult<()> {
        self.changing(py, |books| books.make(&Change::CloseLease { lease_id: lease_id.into() }))
    }

    /// Every lease: its id, its tenant, its time to live in seconds, whether it has ended.
    fn leases(&self) -> Vec<(String, String, f64, bool)> {
        let view = |(lease_id, holdings): (&String, &Lease)| {
            (lease_id.clone(), self.tenant(holdings.tenant), holdings.ttl, holdings.is_ending)
        };
        self.0.books().leases.iter().map(view).collect()
    }

    /// Plans the lease's next step; a request id that was answered gets the same answer.
    fn plan(&mut self, py: Python<'_>, request: &PyStepRequest, now: f64) -> PyResult<PyStepPlan> {
        let PyStepRequest { lease_id, request_id, digest, items, .. } = request;
        let plan = self.changing(py, |books| books.plan(lease_id, items, now, &RequestKey { request_id, digest }))?;
        plan.map(PyStepPlan).ok_or_else(|| PyKeyError::new_err(lease_id.clone()))
    }

    #[pyo3(signature = (lease_id, step_number, outcome, *, seq_ids, token_counts, sampled_ids, sampled_tokens, report_number = 0))]
    fn settle(
        &mut self,
        py: Python<'_>,
        lease_id: &str,
        step_number: u64,
        outcome: &str,
        seq_ids: &[u8],
        token_counts: &[u8],
        sampled_ids: &[u8],
        sampled_tokens: &[u8],
        report_number: u64,
    ) -> PyResult<()> {
        let outcome = match outcome {
            "computed" => StepOutcome::Computed,
            "failed" => StepOutcome::Failed,
            "skipped" => StepOutcome::Skipped,
            _ => return Err(PyValueError::new_err(format!("{outcome:?} is no outcome of a step"))),
        };
        let report = StepReport {
            step_number,
            outcome,
            seq_ids: ids(seq_ids)?,
            token_counts: ids(token_counts)?,
            sampled_ids: ids(sampled_ids)?,
            sampled_tokens: ids(sampled_tokens)?,
            report_number,
        };
        self.changing(py, |books| books.settle(lease_id, &report))
    }

    // -- looking ------------------------------------------------------------------------------------------------------

    /// The next step's number, the last settled one, and how many are in flight.
    fn steps_of(&self, lease_id: &str) -> PyResult<(u64, u64, usize)> {
        let holdings = self.0.books().lease(lease_id).ok_or_else(|| PyKeyError::new_err(lease_id.to_string()))?;
        Ok((holdings.next_step, holdings.settled_step, holdings.in_flight.len()))
    }

    fn in_flight(&self, lease_id: &str) -> PyResult<Vec<StepView>> {
        let holdings = self.0.books().lease(lease_id).ok_or_else(|| PyKeyError::new_err(lease_id.to_string()))?;
        let view = |step: &crate::books::steps::StepInFlight| StepView {
            step_number: step.step_number,
            is_doomed: step.is_doomed,
            run_seq_ids: step.runs.iter().map(|run| run.seq_id).collect(),
            num_pinned: step.pinned.iter().map(Vec::len).sum(),
            num_fills: step.fills.len(),
            num_released: step.released_rows.len(),
        };
        Ok(holdings.in_flight.iter().map(view).collect())
    }

    fn num_sequences(&self, lease_id: &str) -> usize {
        self.0.books().lease(lease_id).map_or(0, |holdings| holdings.sequences.len())
    }

    /// Ids of a lease's sequences, as they were admitted.
    fn sequence_ids(&self, lease_id: &str) -> Vec<i32> {
        let rows =
            self.0.books().lease(lease_id).map(|holdings| self.0.books().rows_in_order(holdings)).unwrap_or_default();
        rows.into_iter().map(|row| self.0.books().sequence(row).seq_id).collect()
    }

    /// The first `most` of a lease's sequences with ids from `first` on, by id.
    fn sequences_from(&self, lease_id: &str, first: i64, most: usize) -> Vec<SequenceView> {
        let Ok(first) = i32::try_from(first) else {
            return Vec::new();
        };
        self.0.books().sequences_from(lease_id, first, most).into_iter().map(|row| self.view(row)).collect()
    }

    fn sequence(&self, lease_id: &str, seq_id: i64) -> Option<SequenceView> {
        self.row(lease_id, seq_id).map(|row| self.view(row))
    }

    /// All known tokens of a sequence.
    fn tokens<'py>(&self, py: Python<'py>, lease_id: &str, seq_id: i64) -> Option<Bound<'py, PyBytes>> {
        let row = self.row(lease_id, seq_id)?;
        Some(PyBytes::new(py, &bytes_of(&self.0.books().sequence(row).tokens)))
    }

    fn num_cached_tokens(&self, tokens: &[u8], salt: &[u8], tenant: &str) -> PyResult<usize> {
        Ok(self.0.books().num_cached_tokens(&ids(tokens)?, salt, tenant.as_bytes()))
    }

    /// Free, cached, active and retired blocks.
    fn block_counts(&self) -> (usize, usize, usize, usize) {
        let counts = self.0.books().pool().counts();
        (counts.free, counts.cached, counts.active, counts.retired)
    }

    /// Free, held and retired blocks of the host tier.
    fn host_block_counts(&self) -> (usize, usize, usize) {
        let HostBlockCounts { free, held, retired } = self.0.books().host().counts();
        (free, held, retired)
    }

    /// State, references, pins and prefix hash of a block.
    fn block(&self, block_id: BlockId) -> (&'static str, u32, u32, Option<Hash>) {
        let pool = self.0.books().pool();
        (
            pool.state(block_id).name(),
            pool.ref_count(block_id),
            pool.pin_count(block_id),
            pool.index().hash(block_id).copied(),
        )
    }

    // -- tenants ------------------------------------------------------------------------------------------------------

    /// What tenants may take from now on: a default, and others by name.
    fn set_shares(&mut self, py: Python<'_>, default: PyShare, by_name: HashMap<String, PyShare>) -> PyResult<()> {
        let by_name: BTreeMap<_, _> =
            by_name.into_iter().map(|(name, share)| (name.into_bytes(), share_of(share))).collect();
        let record = Change::SetShares { default: share_of(default), by_name: Cow::Owned(by_name) };
        self.changing(py, |books| books.make(&record))
    }

    /// Name, share and use of each tenant.
    fn tenants(&self) -> Vec<(String, PyShare, PyUse)> {
        let accounts = self.0.books().pool().accounts();
        let view = |tenant: TenantId| {
            let account = accounts.get(tenant);
            let Share { floor, quota, limit, pin_budget } = account.share;
            let counts = (account.num_held, account.num_cached, account.num_reserved, account.num_pinned);
            (self.tenant_name(tenant), (floor, quota, limit, pin_budget), counts)
        };
        (0..accounts.len() as TenantId).map(view).collect()
    }

    /// True if an admission would be accepted, and what it would take: tokens found, blocks needed and available, and
    /// why not.
    fn check_admission<'py>(
        &mut self,
        py: Python<'py>,
        tenant: &str,
        admission: &PyAdmission,
        reserve: usize,
    ) -> PyResult<(usize, usize, usize, Option<Bound<'py, PyAny>>)> {
        let check = self.changing(py, |books| books.check_admission(tenant.as_bytes(), &admission.0, reserve))?;
        let refusal = check.refusal.map(|refusal| refusal_of(py, &refusal)).transpose()?;
        Ok((check.num_cached_tokens, check.needed, check.available, refusal))
    }

    /// Ends pins and advice whose time is over. False if there are none.
    fn advance(&mut self, py: Python<'_>, now: f64) -> PyResult<bool> {
        self.changing(py, |books| books.advance(now))
    }

    /// No pin and no advice ends before this; None if there is none that ends.
    fn next_end(&self) -> Option<f64> {
        self.0.books().next_end().map(|end| end as f64 / 1e3)
    }

    fn pin_prefix(
        &mut self,
        py: Python<'_>,
        tenant: &str,
        tokens: &[u8],
        salt: &[u8],
        until: f64,
    ) -> PyResult<PinView> {
        let tokens = ids(tokens)?;
        let pin = self.changing(py, |books| books.pin_prefix(tenant.as_bytes(), &tokens, salt, until))?;
        let pin = pin.map_err(|refusal| to_python(py, Failure::Refused(refusal)))?;
        Ok(self.pin_view(&pin))
    }

    /// Takes back a pin of the tenant, or of anybody.
    fn unpin_prefix(&mut self, py: Python<'_>, tenant: Option<&str>, pin_id: PinId) -> PyResult<bool> {
        self.changing(py, |books| books.unpin_prefix(tenant.map(str::as_bytes), &pin_id))
    }

    /// At most `most` pins behind one, of one tenant or of all, by id.
    fn pins(&self, tenant: Option<&str>, behind: Option<PinId>, most: usize) -> Vec<PinView> {
        let id = tenant.map(|name| self.0.books().tenants().find(name.as_bytes()));
        let is_theirs = |pin: &&Pin| id.is_none_or(|id| id == Some(pin.tenant));
        let pins: Box<dyn Iterator<Item = &Pin>> = match behind {
            Some(behind) => Box::new(self.0.books().pins().behind(behind)),
            None => Box::new(self.0.books().pins().all()),
        };
        pins.filter(is_theirs).take(most).map(|pin| self.pin_view(pin)).collect()
    }

    // -- looking ------------------------------------------------------------------------------------------------------

    /// Serialised blocks of a ListBlocksResponse from `first` on, and where the next page begins. Of any state if none
    /// is given, of all tenants and leases likewise.
    #[pyo3(signature = (first, most, *, state, tenant, lease_id))]
    fn list_blocks<'py>(
        &self,
        py: Python<'py>,
        first: BlockId,
        most: usize,
        state: Option<&str>,
        tenant: Option<&str>,
        lease_id: Option<&str>,
    ) -> PyResult<(Bound<'py, PyBytes>, Option<BlockId>)> {
        let states = state.map(state_of).transpose()?.map_or(States::Any, States::Only);
        let filter = BlockFilter { states, tenant: tenant.map(str::as_bytes), lease_id };
        let (blocks, next) = self.0.books().list_blocks(first, most, &filter);
        let blocks = blocks.into_iter().map(|block| self.0.books().describe(block)).collect();
        Ok((PyBytes::new(py, &encode_blocks(blocks)), next))
    }

    /// Serialised events of a WatchBlocksResponse: blocks that are not free from `first` on, and where to go on.
    #[pyo3(signature = (first, most, *, tenant, with_content))]
    fn snapshot<'py>(
        &self,
        py: Python<'py>,
        first: BlockId,
        most: usize,
        tenant: Option<&str>,
        with_content: bool,
    ) -> (Bound<'py, PyBytes>, Option<BlockId>) {
        let (events, next) = self.0.books().snapshot(first, most, tenant.map(str::as_bytes), with_content);
        (PyBytes::new(py, &encode_events(events)), next)
    }

    /// Serialised events of a WatchBlocksResponse: what changed from number `first` on, and the number to go on from;
    /// None if that is not known any more.
    #[pyo3(signature = (first, most, *, tenant, with_content))]
    fn changes<'py>(
        &self,
        py: Python<'py>,
        first: u64,
        most: usize,
        tenant: Option<&str>,
        with_content: bool,
    ) -> Option<(Bound<'py, PyBytes>, u64)> {
        let (events, next) = self.0.books().changes(first, most, tenant.map(str::as_bytes), with_content)?;
        Some((PyBytes::new(py, &encode_events(events)), next))
    }

    /// Changes of blocks so far.
    fn num_changes(&self) -> u64 {
        self.0.books().pool().journal().num_changes()
    }

    /// How many of them are known.
    fn num_changes_kept(&self) -> usize {
        self.0.books().pool().journal().num_kept()
    }

    /// Keeps what is in blocks that become findable, until as many `end_reading`.
    fn begin_reading(&mut self) {
        self.0.books_mut().pool_mut().contents_mut().begin_reading();
    }

    fn end_reading(&mut self) {
        self.0.books_mut().pool_mut().contents_mut().end_reading();
    }

    #[pyo3(signature = (tokens, salt, tenant, *, with_other_tenants))]
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

    fn reset_prefix_cache(&mut self, py: Python<'_>, first: BlockId, end: BlockId, now: f64) -> PyResult<usize> {
        self.changing(py, |books| books.reset_prefix_cache(first, end, now))
    }

    /// How many items of plans were refused, by the name of the reason.
    fn refusals(&self) -> BTreeMap<&'static str, u64> {
        self.0.refusals().clone()
    }

    /// Rows taken in the worker.
    fn num_rows(&self) -> usize {
        self.0.books().num_rows()
    }

    fn num_held_tokens(&self) -> usize {
        self.0.books().num_held_tokens()
    }

    /// Every counter by its name.
    fn counters(&self) -> Vec<(&'static str, u64)> {
        let (counters, pool) = (self.0.books().counters(), self.0.books().pool().counters());
        vec![
            ("planned_steps", counters.planned_steps),
            ("computed_steps", counters.computed_steps),
            ("failed_steps", counters.failed_steps),
            ("skipped_steps", counters.skipped_steps),
            ("admissions", counters.admissions),
            ("admitted_tokens", counters.admitted_tokens),
            ("cached_tokens", counters.cached_tokens),
            ("recomputed_tokens", counters.recomputed_tokens),
            ("forks", counters.forks),
            ("copied_blocks", counters.copied_blocks),
            ("resumed_admissions", counters.resumed_admissions),
            ("resumed_tokens", counters.resumed_tokens),
            ("resumed_cached_tokens", counters.resumed_cached_tokens),
            ("offloads", counters.offloads),
            ("restores", counters.restores),
            ("offloaded_blocks", counters.offloaded_blocks),
            ("restored_blocks", counters.restored_blocks),
            ("computed_tokens", counters.computed_tokens),
            ("generated_tokens", counters.generated_tokens),
            ("num_steps_in_flight", self.0.books().num_steps_in_flight() as u64),
            ("num_offloaded", self.0.books().num_offloaded() as u64),
            ("num_reserved_blocks", self.0.books().pool().accounts().num_reserved() as u64),
            ("num_pinned_blocks", self.0.books().pool().num_kept() as u64),
            ("num_table_entries", pool.num_references as u64),
            ("num_shared_blocks", pool.num_shared as u64),
            ("num_allocated", pool.num_allocated),
            ("num_evicted", pool.num_evicted),
            ("num_published", self.0.books().pool().index().num_published()),
        ]
    }

    // -- checking -----------------------------------------------------------------------------------------------------

    fn violations(&self) -> Vec<String> {
        self.0.books().violations()
    }

    /// What is wrong with the blocks from `first` to before `end`.
    fn audit(&self, first: BlockId, end: BlockId) -> Vec<String> {
        self.0.books().audit(&(first..end.min(self.0.books().geometry().num_blocks as BlockId)))
    }

    fn audit_counts(&self) -> Vec<String> {
        self.0.books().audit_counts()
    }

    fn audit_promises(&self) -> Vec<String> {
        self.0.books().audit_promises()
    }

    #[pyo3(signature = (but_last_step_of = None))]
    fn state(&self, but_last_step_of: Option<&str>) -> String {
        self.0.books().state(but_last_step_of)
    }

    /// The parked blocks in the policy's order.
    fn parked_blocks(&self) -> Vec<BlockId> {
        self.0.books().pool().parked_blocks()
    }

    /// Sets what the default policy plans: low and high place and share by class. For tests.
    fn set_retention(&mut self, plan: Vec<(usize, usize, f64)>, is_trusted: bool) -> PyResult<()> {
        let Some(lineage) = self.0.books_mut().pool_mut().policy().lineage() else {
            return Err(PyValueError::new_err("the policy does not plan"));
        };
        lineage.planner.plan = Some(plan.into_iter().map(|(low, high, share)| Choice { low, high, share }).collect());
        lineage.planner.is_trusted = is_trusted;
        Ok(())
    }
}

#[pymodule]
mod _core {
    #[pymodule_export]
    use super::{PinView, PyAdmission, PyBooks, PyExplanation, PyStepPlan, PyStepRequest, SequenceView, StepView};

    use super::*;

    #[pyfunction]
    fn root_hash(tenant: &str, salt: &[u8], model_fingerprint: &str) -> Hash {
        crate::cache::prefix::root_hash(tenant.as_bytes(), salt, model_fingerprint.as_bytes())
    }

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("POLICIES", POLICIES.to_vec())?;
        module.add("MAX_STEPS_IN_FLIGHT", MAX_STEPS_IN_FLIGHT)?;
        module.add("REMEMBERED_PLANS", REMEMBERED_PLANS)?;
        module.add("MAX_PLAN_ITEMS", bounds::MAX_PLAN_ITEMS)?;
        module.add("MAX_PLAN_TOKENS", bounds::MAX_PLAN_TOKENS)?;
        module.add("MAX_FORKED_TOKENS", bounds::MAX_FORKED_TOKENS)?;
        module.add("MAX_REQUEST_ID_BYTES", bounds::MAX_REQUEST_ID_BYTES)?;
        module.add("MAX_SALT_BYTES", bounds::MAX_SALT_BYTES)?;
        module.add("MAX_RANGES", bounds::MAX_RANGES)?;
        module.add("NUM_CLASSES", crate::cache::retention::NUM_CLASSES)?;
        module.add("NUM_TIMES", crate::cache::retention::NUM_TIMES)
    }
}
