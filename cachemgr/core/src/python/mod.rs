//! The Python bindings of the books: messages in and out, no decisions.
//!
//! Token ids, sequence ids and counts are bytes, 4 each, little-endian: the format of `array.tobytes()`.

mod convert;
mod inspector;
mod ledger;
mod messages;
mod policy_object;
mod probe;
mod views;

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::books::geometry::MAX_LAYER_GROUPS;
use crate::books::lease::MAX_STEPS_IN_FLIGHT;
use crate::books::lease::answers::REMEMBERED_PLANS;
use crate::books::lease::expiry::GRACE_S;
use crate::cache::eviction::policies::POLICIES;
use crate::cache::eviction::trial::NUM_CANDIDATES;
use crate::cache::prefix::Hash;
use crate::python::convert::{geometry_of, namespace_of};
use crate::wire::bounds;

#[pymodule]
mod _core {
    #[pymodule_export]
    use super::ledger::{PyInspector, PyLedger, PyProbe};
    #[pymodule_export]
    use super::messages::{PyAdmission, PyGrantedStep, PyKnown, PyPlanRequest, PyReset, PyStepReport};
    #[pymodule_export]
    use super::views::{AdmissionCheckView, LeaseView, PinView, PyExplanation, SequenceView, StepView, TenantUse};

    use super::*;

    #[pyfunction]
    #[pyo3(signature = (tenant, salt, model_fingerprint, adapter = b"".as_slice()))]
    fn root_hash(tenant: &str, salt: &[u8], model_fingerprint: &str, adapter: &[u8]) -> Hash {
        let namespace = namespace_of(salt, adapter);
        crate::cache::prefix::root_hash(tenant.as_bytes(), &namespace, model_fingerprint.as_bytes())
    }

    /// A serialised PlanStepsResponse with a serialised PlanStepResponse.
    #[pyfunction]
    fn answer_on_stream<'py>(py: Python<'py>, answer: Vec<u8>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &crate::wire::answers::answer_on_stream(answer))
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
        module.add("ADAPTER_BYTES", bounds::ADAPTER_BYTES)?;
        module.add("MAX_RANGES", bounds::MAX_RANGES)?;
        module.add("MAX_BREAKPOINTS", bounds::MAX_BREAKPOINTS)?;
        module.add("LEAST_KEEP_S", bounds::LEAST_KEEP_S)?;
        module.add("MAX_KEEP_S", bounds::MAX_KEEP_S)?;
        module.add("MAX_RETENTION_S", bounds::MAX_RETENTION_S)?;
        module.add("MAX_EXPECTED_S", bounds::MAX_EXPECTED_S)?;
        module.add("LEAST_PRIORITY", crate::cache::advice::LEAST_WORTH)?;
        module.add("MOST_PRIORITY", crate::cache::advice::MOST_WORTH)?;
        module.add("NUM_CANDIDATES", NUM_CANDIDATES)
    }
}
