//! The books as Python calls them: messages in and out, nothing decided here.
//!
//! Token ids, sequence ids and counts come as bytes, 4 each, little-endian: what `array.tobytes()` gives.

use std::any::Any;
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;

use pyo3::exceptions::{PyKeyError, PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBytes, PyDict};

use crate::accounts::Share;
use crate::advice::{LEAST_WORTH, Level, MOST_WORTH};
use crate::books::{Geometry, Holdings, MAX_STEPS_IN_FLIGHT, REMEMBERED_PLANS};
use crate::errors::{Failure, Refusal, Result, broken};
use crate::eviction::POLICIES;
use crate::explain::{Explanation, Miss};
use crate::host::{HostBlockCounts, HostBlockId};
use crate::looking::{BlockFilter, States};
use crate::losses::Cause;
use crate::pins::{Pin, PinId};
use crate::plans::{Admission, Extend, Fork, RefusedItem, Restore, Retention, ReturnHint, StepPlan, StepRequest, Trim};
use crate::pool::BlockState;
use crate::prefix::{BlockId, Hash};
use crate::record::{Record, Recorder, ReportedBooks};
use crate::retention::Choice;
use crate::sequences::Row;
use crate::settle::{StepOutcome, StepReport};
use crate::store::{LogLimits, Store};
use crate::tenants::TenantId;
use crate::wire::{Grantor, encode_answer, encode_blocks, encode_events, encode_grant};

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

fn refused_item<'py>(py: Python<'py>, refused: &RefusedItem) -> PyResult<Bound<'py, PyAny>> {
    let plans = py.import("quire.cachemgr.plans")?;
    let item = plans.getattr("PlanItem")?.call1((refused.item.name(),))?;
    plans.getattr("RefusedItem")?.call1((item, refused.seq_id, refusal_of(py, &refused.refusal)?))
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

/// What one step may touch and is to compute. Lists named alike belong together by index.
#[pyclass(name = "StepPlan", module = "quire.cachemgr._core", frozen)]
struct PyStepPlan(Arc<StepPlan>);

macro_rules! lists {
    ($($name:ident: $type:ty),* $(,)?) => {
        #[pymethods]
        impl PyStepPlan {
            #[getter]
            fn step_number(&self) -> u64 {
                self.0.step_number
            }

            #[getter]
            fn known_step(&self) -> u64 {
                self.0.known_step
            }

            #[getter]
            fn given_digests<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
                PyBytes::new(py, &self.0.given_digests)
            }

            #[getter]
            fn has_refusals(&self) -> bool {
                !self.0.refusals.is_empty()
            }

            #[getter]
            fn refusals<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyAny>>> {
                self.0.refusals.iter().map(|refused| refused_item(py, refused)).collect()
            }

            /// Blocks by state after the step was planned.
            #[getter]
            fn counts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
                let counts = self.0.counts;
                let make = py.import("quire.cachemgr.blocks")?.getattr("BlockCounts")?;
                make.call1((counts.free, counts.cached, counts.active, counts.retired))
            }

            /// The same of the host tier; None if there is none.
            #[getter]
            fn host_counts<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
                let make = py.import("quire.cachemgr.blocks")?.getattr("HostBlockCounts")?;
                self.0.host_counts.map(|counts| make.call1((counts.free, counts.held, counts.retired))).transpose()
            }

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

            $(#[getter]
            fn $name(&self) -> $type {
                self.0.$name.clone()
            })*
        }
    };
}

lists! {
    released_ids: Vec<i32>,
    offloaded_ids: Vec<i32>,
    fork_parent_ids: Vec<i32>,
    fork_child_ids: Vec<i32>,
    write_seq_ids: Vec<i32>,
    write_first_indexes: Vec<u32>,
    write_block_counts: Vec<u32>,
    write_block_ids: Vec<BlockId>,
    copy_sources: Vec<BlockId>,
    copy_targets: Vec<BlockId>,
    offload_sources: Vec<BlockId>,
    offload_targets: Vec<HostBlockId>,
    restore_sources: Vec<HostBlockId>,
    restore_targets: Vec<BlockId>,
    run_seq_ids: Vec<i32>,
    run_starts: Vec<u32>,
    run_token_counts: Vec<u32>,
    run_samples: Vec<bool>,
    given_run_indexes: Vec<u32>,
    admitted_ids: Vec<i32>,
    admitted_cached_counts: Vec<u32>,
    restored_ids: Vec<i32>,
    restored_counts: Vec<u32>,
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

/// A StepRequest of Python, but for its extends.
#[derive(FromPyObject)]
struct PyStepRequest {
    releases: Vec<i64>,
    return_hints: Vec<PyReturnHint>,
    offloads: Vec<i64>,
    trims: Vec<PyTrim>,
    forks: Vec<PyFork>,
    restores: Vec<PyRestore>,
    admissions: Vec<PyAdmission>,
    admission_token_budget: usize,
    admission_reserve: usize,
}

#[derive(FromPyObject)]
struct PyTrim {
    seq_id: i64,
    num_tokens: i64,
}

#[derive(FromPyObject)]
struct PyFork {
    parent_id: i64,
    child_ids: Vec<i64>,
    num_tokens: i64,
}

#[derive(FromPyObject)]
struct PyRestore {
    seq_id: i64,
    max_compute: usize,
}

#[derive(FromPyObject)]
struct PyAdmission {
    seq_id: i64,
    tokens: PyBackedBytes,
    max_compute: usize,
    salt: PyBackedBytes,
    reserved_tokens: usize,
    retention: Vec<PyRetention>,
    resumed: bool,
}

#[derive(FromPyObject)]
struct PyRetention {
    num_tokens: usize,
    priority: Level,
    ttl_s: Option<f64>,
}

#[derive(FromPyObject)]
struct PyReturnHint {
    seq_id: i64,
    expected_in_s: Option<f64>,
}

impl PyAdmission {
    fn decode(self) -> PyResult<Admission> {
        let range = |range: PyRetention| Retention {
            num_tokens: range.num_tokens,
            level: range.priority.clamp(LEAST_WORTH, MOST_WORTH),
            ttl: range.ttl_s,
        };
        Ok(Admission {
            seq_id: self.seq_id,
            tokens: ids(&self.tokens)?,
            max_compute: self.max_compute,
            salt: self.salt.to_vec(),
            reserved_tokens: self.reserved_tokens,
            retention: self.retention.into_iter().map(range).collect(),
            resumed: self.resumed,
        })
    }
}

impl PyStepRequest {
    fn decode(self, extends: Vec<Extend>) -> PyResult<StepRequest> {
        let hint = |PyReturnHint { seq_id, expected_in_s }| ReturnHint { seq_id, expected_in: expected_in_s };
        let fork = |PyFork { parent_id, child_ids, num_tokens }| Fork { parent_id, child_ids, num_tokens };
        let trim = |PyTrim { seq_id, num_tokens }| Trim { seq_id, num_tokens };
        let restore = |PyRestore { seq_id, max_compute }| Restore { seq_id, max_compute };
        Ok(StepRequest {
            releases: self.releases,
            return_hints: self.return_hints.into_iter().map(hint).collect(),
            offloads: self.offloads,
            trims: self.trims.into_iter().map(trim).collect(),
            forks: self.forks.into_iter().map(fork).collect(),
            extends,
            restores: self.restores.into_iter().map(restore).collect(),
            admissions: self.admissions.into_iter().map(PyAdmission::decode).collect::<PyResult<_>>()?,
            admission_token_budget: self.admission_token_budget,
            admission_reserve: self.admission_reserve,
        })
    }
}

#[pyclass(name = "Books", module = "quire.cachemgr._core")]
struct PyBooks(Recorder);

impl PyBooks {
    /// Runs a change of the books. One that panics leaves them wrong: nothing may be granted any more.
    fn changing<T>(&mut self, py: Python<'_>, change: impl FnOnce(&mut Recorder) -> Result<T>) -> PyResult<T> {
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
        self.0.books().holdings(lease_id)?.sequences.get(&seq_id).copied()
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
        let begin = Record::Begin { geometry: Cow::Owned(geometry), policy: policy.into() };
        let books = ReportedBooks::begin(&begin).ok_or_else(|| PyKeyError::new_err(policy.to_string()))?;
        let mut books = PyBooks(Recorder::new(books, None));
        if let Some(directory) = directory {
            books.changing(py, |recorder| recorder.begin_store(&directory, &begin))?;
        }
        Ok(books)
    }

    /// The books that a store has, to go on with. Raises OSError if it can't be read, or is not whole.
    #[staticmethod]
    fn recover(py: Python<'_>, directory: PathBuf) -> PyResult<PyBooks> {
        let recovered = py.detach(|| Store::recover(&directory, LogLimits::default()));
        let (books, store) = recovered.map_err(PyOSError::new_err)?;
        Ok(PyBooks(Recorder::new(books, Some(store))))
    }

    /// Whether changes are written down.
    fn is_stored(&self) -> bool {
        self.0.is_stored()
    }

    /// The number of the last report that was entered.
    fn last_report(&self) -> u64 {
        self.0.last_report()
    }

    fn open_lease(&mut self, py: Python<'_>, lease_id: &str, tenant: &str, ttl: f64) -> PyResult<()> {
        let record = Record::OpenLease { lease_id: lease_id.into(), tenant: tenant.as_bytes().into(), ttl };
        self.changing(py, |recorder| recorder.make(&record))
    }

    fn end_lease(&mut self, py: Python<'_>, lease_id: &str) -> PyResult<()> {
        self.changing(py, |recorder| recorder.make(&Record::EndLease { lease_id: lease_id.into() }))
    }

    fn close_lease(&mut self, py: Python<'_>, lease_id: &str) -> PyResult<()> {
        self.changing(py, |recorder| recorder.make(&Record::CloseLease { lease_id: lease_id.into() }))
    }

    /// Every lease: its id, its tenant, its time to live in seconds, whether it has ended.
    fn leases(&self) -> Vec<(String, String, f64, bool)> {
        let view = |(lease_id, holdings): (&String, &Holdings)| {
            (lease_id.clone(), self.tenant(holdings.tenant), holdings.ttl, holdings.is_ending)
        };
        self.0.books().leases.iter().map(view).collect()
    }

    /// The answer that was given to this request id, if it is remembered.
    fn recall(&self, py: Python<'_>, lease_id: &str, request_id: &str, digest: &[u8]) -> PyResult<Option<PyStepPlan>> {
        let known = self.0.books().recall(lease_id, request_id, digest);
        known.map(|plan| plan.map(PyStepPlan)).map_err(|failure| to_python(py, failure))
    }

    /// Plans the lease's next step. The extends are those of the arguments; with a request id the answer is remembered.
    #[pyo3(signature = (lease_id, request, now, *, extend_ids, extend_token_counts, appends, request_id = "", digest = b"".as_slice()))]
    fn plan(
        &mut self,
        py: Python<'_>,
        lease_id: &str,
        request: PyStepRequest,
        now: f64,
        extend_ids: &[u8],
        extend_token_counts: &[u8],
        appends: Option<Vec<PyBackedBytes>>,
        request_id: &str,
        digest: &[u8],
    ) -> PyResult<PyStepPlan> {
        let extend = |(seq_id, count): (i32, i32)| Extend { seq_id, num_tokens: count.into(), append: Vec::new() };
        let mut extends: Vec<Extend> =
            ids(extend_ids)?.into_iter().zip(ids(extend_token_counts)?).map(extend).collect();
        for (extend, tokens) in extends.iter_mut().zip(appends.unwrap_or_default()) {
            extend.append = ids(&tokens)?;
        }
        let request = request.decode(extends)?;
        let plan = self.changing(py, |recorder| recorder.plan(lease_id, &request, now, request_id, digest))?;
        plan.map(PyStepPlan).ok_or_else(|| PyKeyError::new_err(lease_id.to_string()))
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
        };
        self.changing(py, |recorder| recorder.settle(lease_id, &report, report_number))
    }

    // -- looking ------------------------------------------------------------------------------------------------------

    /// The next step's number, the last settled one, and how many are in flight.
    fn steps_of(&self, lease_id: &str) -> PyResult<(u64, u64, usize)> {
        let holdings = self.0.books().holdings(lease_id).ok_or_else(|| PyKeyError::new_err(lease_id.to_string()))?;
        Ok((holdings.next_step, holdings.settled_step, holdings.in_flight.len()))
    }

    fn in_flight(&self, lease_id: &str) -> PyResult<Vec<StepView>> {
        let holdings = self.0.books().holdings(lease_id).ok_or_else(|| PyKeyError::new_err(lease_id.to_string()))?;
        let view = |step: &crate::steps::StepInFlight| StepView {
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
        self.0.books().holdings(lease_id).map_or(0, |holdings| holdings.sequences.len())
    }

    /// Ids of a lease's sequences, as they were admitted.
    fn sequence_ids(&self, lease_id: &str) -> Vec<i32> {
        let rows = self
            .0
            .books()
            .holdings(lease_id)
            .map(|holdings| self.0.books().rows_in_order(holdings))
            .unwrap_or_default();
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

    /// What is said of a block's worth, and how many prefix pins it has.
    fn worth(&self, block_id: BlockId) -> (Level, u32) {
        (self.0.books().pool().level(block_id), self.0.books().pool().keep_count(block_id))
    }

    // -- tenants ------------------------------------------------------------------------------------------------------

    /// What tenants may take from now on: a default, and others by name.
    fn set_shares(&mut self, py: Python<'_>, default: PyShare, by_name: HashMap<String, PyShare>) -> PyResult<()> {
        let by_name: BTreeMap<_, _> =
            by_name.into_iter().map(|(name, share)| (name.into_bytes(), share_of(share))).collect();
        let record = Record::SetShares { default: share_of(default), by_name: Cow::Owned(by_name) };
        self.changing(py, |recorder| recorder.make(&record))
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

    /// Whether an admission would be accepted, and what it would take: tokens found, blocks needed and available, and
    /// why not.
    fn check_admission<'py>(
        &mut self,
        py: Python<'py>,
        tenant: &str,
        admission: PyAdmission,
        reserve: usize,
    ) -> PyResult<(usize, usize, usize, Option<Bound<'py, PyAny>>)> {
        let admission = admission.decode()?;
        let check = self.changing(py, |recorder| recorder.check_admission(tenant.as_bytes(), &admission, reserve))?;
        let refusal = check.refusal.map(|refusal| refusal_of(py, &refusal)).transpose()?;
        Ok((check.num_cached_tokens, check.needed, check.available, refusal))
    }

    /// Ends pins and advice whose time is over. False if there are none.
    fn advance(&mut self, py: Python<'_>, now: f64) -> PyResult<bool> {
        self.changing(py, |recorder| recorder.advance(now))
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
        let pin = self.changing(py, |recorder| recorder.pin_prefix(tenant.as_bytes(), &tokens, salt, until))?;
        let pin = pin.map_err(|refusal| to_python(py, Failure::Refused(refusal)))?;
        Ok(self.pin_view(&pin))
    }

    /// Takes back a pin of the tenant, or of anybody.
    fn unpin_prefix(&mut self, py: Python<'_>, tenant: Option<&str>, pin_id: PinId) -> PyResult<bool> {
        self.changing(py, |recorder| recorder.unpin_prefix(tenant.map(str::as_bytes), &pin_id))
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
        let explain = |recorder: &mut Recorder| {
            Ok(recorder.books_mut().explain(&tokens, salt, tenant.as_bytes(), with_other_tenants))
        };
        let explanation = self.changing(py, explain)?;
        Ok(self.tell(explanation))
    }

    fn reset_prefix_cache(&mut self, py: Python<'_>, first: BlockId, end: BlockId, now: f64) -> PyResult<usize> {
        self.changing(py, |recorder| recorder.reset_prefix_cache(first, end, now))
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
    use super::{PinView, PyBooks, PyExplanation, PyStepPlan, SequenceView, StepView};

    use super::*;

    #[pyfunction]
    fn root_hash(tenant: &str, salt: &[u8], model_fingerprint: &str) -> Hash {
        crate::prefix::root_hash(tenant.as_bytes(), salt, model_fingerprint.as_bytes())
    }

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("POLICIES", POLICIES.to_vec())?;
        module.add("MAX_STEPS_IN_FLIGHT", MAX_STEPS_IN_FLIGHT)?;
        module.add("REMEMBERED_PLANS", REMEMBERED_PLANS)?;
        module.add("LEAST_WORTH", LEAST_WORTH)?;
        module.add("MOST_WORTH", MOST_WORTH)?;
        module.add("NUM_CLASSES", crate::retention::NUM_CLASSES)?;
        module.add("NUM_TIMES", crate::retention::NUM_TIMES)
    }
}
