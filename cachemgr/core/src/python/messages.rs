//! Requests and answers as Python passes them on: decoded admissions, granted steps, resets, readers of changes.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::books::plans::{Admission, GrantedStep, RefusedItem};
use crate::books::resetting::Reset;
use crate::cache::journal::Known;
use crate::python::convert::{decoded, refusal_of, to_python};
use crate::wire::answers::{Grantor, encode_answer, encode_grant, item_number};
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
