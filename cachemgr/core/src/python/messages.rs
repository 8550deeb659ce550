//! Requests and answers as Python passes them on: decoded admissions, granted steps, resets, readers of changes.

use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::books::plans::{Admission, GrantedStep, PromptHashes, RefusedItem};
use crate::books::resetting::Reset;
use crate::cache::journal::Known;
use crate::cache::prefix::{Hash, Namespace};
use crate::python::convert::{decoded, refusal_of, to_python};
use crate::wire::answers::{self, Grantor, item_number};
use crate::wire::{messages, requests};

/// A decoded and checked admission of a request.
#[pyclass(name = "Admission", module = "quire.cachemgr._core", frozen)]
pub struct PyAdmission(pub Admission);

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

/// A decoded request for a step. Its items are checked when it is planned.
#[pyclass(name = "PlanRequest", module = "quire.cachemgr._core")]
pub struct PyPlanRequest {
    message: messages::PlanStepRequest,
    digest: Vec<u8>,
    hashes: Vec<PromptHashes>,
    is_taken: bool,
}

impl PyPlanRequest {
    /// The message, once, with the fingerprint of its bytes, and the hashes of its prompts that are computed. Planning
    /// takes its lists.
    pub fn take(&mut self) -> PyResult<(&mut messages::PlanStepRequest, &[u8], Vec<PromptHashes>)> {
        if std::mem::replace(&mut self.is_taken, true) {
            return Err(PyValueError::new_err("the request was planned already"));
        }
        Ok((&mut self.message, &self.digest, std::mem::take(&mut self.hashes)))
    }

    /// Computes the next hashes of its prompts, at most so many. True if the plan would still compute more than that.
    ///
    /// `root_of`: the root of a prompt in a namespace, with the tenant of its admission. Prompts of more than `most_tokens`
    /// are refused by their length.
    pub fn hash_part(
        &mut self,
        most: usize,
        block_size: usize,
        most_tokens: usize,
        root_of: impl Fn(&Namespace, Option<&str>) -> Hash,
    ) -> bool {
        let hashed = |admission: &messages::Admission| match admission.token_ids.len() {
            num_tokens if num_tokens <= most_tokens => num_tokens / block_size,
            _ => 0,
        };
        let num_done: usize = self.hashes.iter().map(|prompt| prompt.hashes.len()).sum();
        let num_blocks: usize = self.message.admissions.iter().map(hashed).sum();
        if self.is_taken || num_blocks - num_done <= most {
            return false;
        }
        let mut left = most;
        for (index, admission) in self.message.admissions.iter().enumerate() {
            if self.hashes.len() == index {
                let namespace = Namespace { salt: admission.salt.clone(), adapter: admission.adapter.clone() };
                self.hashes.push(PromptHashes::new(root_of(&namespace, admission.tenant.as_deref())));
            }
            let tokens = &admission.token_ids[..hashed(admission) * block_size];
            left -= self.hashes[index].extend(tokens, block_size, left);
            if left == 0 {
                break;
            }
        }
        num_blocks - num_done - most > most
    }
}

#[pymethods]
impl PyPlanRequest {
    /// Decodes a serialised PlanStepRequest.
    #[new]
    fn new(body: &[u8]) -> PyResult<PyPlanRequest> {
        let message = decoded::<messages::PlanStepRequest>(body)?;
        let digest = requests::digest_of(&message, body);
        Ok(PyPlanRequest { message, digest, hashes: Vec::new(), is_taken: false })
    }

    /// Decodes a serialised PlanStepsRequest.
    #[staticmethod]
    fn on_stream(body: &[u8]) -> PyResult<PyPlanRequest> {
        let plan = requests::plan_on_stream(body).map_err(|error| PyValueError::new_err(error.to_string()))?;
        PyPlanRequest::new(&plan)
    }

    #[getter]
    pub fn lease_id(&self) -> &str {
        &self.message.lease_id
    }

    /// True if it has admissions or restores.
    #[getter]
    fn has_admissions(&self) -> bool {
        !self.message.admissions.is_empty() || !self.message.restores.is_empty()
    }
}

/// A decoded report of a step. It is checked when it is settled.
#[pyclass(name = "StepReport", module = "quire.cachemgr._core", frozen)]
pub struct PyStepReport(pub messages::StepReport);

#[pymethods]
impl PyStepReport {
    /// Decodes a serialised StepReport.
    #[new]
    fn new(body: &[u8]) -> PyResult<PyStepReport> {
        Ok(PyStepReport(decoded(body)?))
    }

    /// Decodes the report in a serialised AttachPoolRequest; None if that is something else.
    #[staticmethod]
    fn on_stream(body: &[u8]) -> PyResult<Option<PyStepReport>> {
        let report = requests::report_on_stream(body).map_err(|error| PyValueError::new_err(error.to_string()))?;
        Ok(report.map(PyStepReport))
    }

    #[getter]
    fn report_number(&self) -> i64 {
        self.0.report_number
    }
}

/// One granted step: the blocks that it may touch and the tokens that it computes.
#[pyclass(name = "GrantedStep", module = "quire.cachemgr._core", frozen)]
pub struct PyGrantedStep(pub Arc<GrantedStep>);

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
        PyBytes::new(py, &answers::encode_grant(&self.0, &Grantor { pool, epoch, term, lease_id }))
    }

    /// A serialised PlanStepResponse, without its grant and its refusals.
    #[pyo3(signature = (*, wall_clock_offset_s = 0.0))]
    fn encode_answer<'py>(&self, py: Python<'py>, wall_clock_offset_s: f64) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &answers::encode_answer(&self.0, wall_clock_offset_s, None))
    }

    /// A serialised PlanStepResponse with its grant, signed under a key, and without its refusals.
    #[pyo3(signature = (pool, epoch, term, lease_id, signing_key, *, wall_clock_offset_s = 0.0))]
    fn encode_signed<'py>(
        &self,
        py: Python<'py>,
        pool: &str,
        epoch: i64,
        term: i64,
        lease_id: &str,
        signing_key: &[u8],
        wall_clock_offset_s: f64,
    ) -> Bound<'py, PyBytes> {
        let grantor = Grantor { pool, epoch, term, lease_id };
        PyBytes::new(py, &answers::encode_answer(&self.0, wall_clock_offset_s, Some((&grantor, signing_key))))
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

/// A reset of the prefix cache that was begun.
#[pyclass(name = "Reset", module = "quire.cachemgr._core")]
pub struct PyReset(pub Reset);

/// The changes of a pool's blocks that a reader knows.
#[pyclass(name = "Known", module = "quire.cachemgr._core")]
pub struct PyKnown(pub Known);

#[pymethods]
impl PyKnown {
    /// All changes before a number.
    #[new]
    fn new(number: u64) -> PyKnown {
        PyKnown(Known::before(number))
    }

    /// The number of the first change that the reader may not know.
    #[getter]
    fn number(&self) -> u64 {
        self.0.next()
    }
}
