//! Between Python's values and the crate's: errors, geometries, lists of numbers, and decoded messages.

use prost::Message;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::books::geometry::Geometry;
use crate::cache::groups::Span;
use crate::cache::pool::BlockState;
use crate::cache::prefix::Namespace;
use crate::cache::tier_copies::Tier;
use crate::errors::{Failure, Refusal};

/// A refusal or a broken book as the exception that Python knows.
pub fn to_python(py: Python<'_>, failure: Failure) -> PyErr {
    let raised = || -> PyResult<Bound<'_, PyAny>> {
        let errors = py.import("quire.cachemgr.errors")?;
        match failure {
            Failure::Refused(refusal) => errors.getattr("CallRefused")?.call1((refusal_of(py, &refusal)?,)),
            Failure::Broken(what) => errors.getattr("BrokenInvariant")?.call1((what,)),
        }
    };
    raised().map_or_else(|error| error, PyErr::from_value)
}

pub fn refusal_of<'py>(py: Python<'py>, refusal: &Refusal) -> PyResult<Bound<'py, PyAny>> {
    let errors = py.import("quire.cachemgr.errors")?;
    let reason = errors.getattr("Reason")?.call1((refusal.reason.name(),))?;
    let metadata = PyDict::new(py);
    for (name, value) in &refusal.metadata {
        metadata.set_item(name.as_ref(), value)?;
    }
    errors.getattr("Refusal")?.call1((reason, &refusal.message, metadata))
}

pub fn lease_not_found(py: Python<'_>, lease_id: &str) -> PyErr {
    let raised = || py.import("quire.cachemgr.errors")?.getattr("lease_not_found")?.call1((lease_id,));
    raised().map_or_else(|error| error, PyErr::from_value)
}

/// The sizes in a Python Geometry.
pub fn geometry_of(geometry: &Bound<'_, PyAny>) -> PyResult<Geometry> {
    let size = |name: &str| geometry.getattr(name)?.extract();
    let spans = geometry.getattr("layer_groups")?.try_iter()?.map(|group| span_of(&group?));
    let groups = spans.collect::<PyResult<Vec<Span>>>()?;
    Ok(Geometry {
        groups: if groups.is_empty() { vec![Span::Full] } else { groups },
        block_size: size("block_size")?,
        num_blocks: size("num_blocks")?,
        num_host_blocks: size("num_host_blocks")?,
        host_cached_limit: size("host_cached_limit")?,
        num_disk_blocks: size("num_disk_blocks")?,
        max_sequences: size("max_sequences")?,
        max_sequence_tokens: size("max_sequence_tokens")?,
        max_drafts: size("max_drafts")?,
        vocab_size: size("vocab_size")?,
        model_fingerprint: geometry.getattr("model_fingerprint")?.extract::<String>()?.into_bytes(),
        has_recurrent_state: geometry.getattr("has_recurrent_state")?.extract()?,
    })
}

pub fn namespace_of(salt: &[u8], adapter: &[u8]) -> Namespace {
    Namespace { salt: salt.to_vec(), adapter: adapter.to_vec() }
}

/// The span of a Python LayerGroup.
pub fn span_of(group: &Bound<'_, PyAny>) -> PyResult<Span> {
    let size: usize = group.getattr("window")?.extract()?;
    match group.getattr("kind")?.extract::<String>()?.as_str() {
        "full" => Ok(Span::Full),
        "sliding" if size > 0 => Ok(Span::Sliding(size)),
        "chunked" if size > 0 => Ok(Span::Chunked(size)),
        kind => Err(PyValueError::new_err(format!("no layer group is of kind {kind:?} with {size} tokens"))),
    }
}

pub fn ids(bytes: &[u8]) -> PyResult<Vec<i32>> {
    let (cells, rest) = bytes.as_chunks::<4>();
    if !rest.is_empty() {
        return Err(PyValueError::new_err(format!("{} bytes are no list of 4-byte numbers", bytes.len())));
    }
    Ok(cells.iter().map(|cell| i32::from_le_bytes(*cell)).collect())
}

pub fn bytes_of(tokens: &[i32]) -> Vec<u8> {
    tokens.iter().map(|token| token.to_le_bytes()).collect::<Vec<_>>().into_flattened()
}

/// The name that `beginning_of` encoded.
pub fn name_of(beginning: &[u8]) -> String {
    String::from_utf8_lossy(beginning).trim_end_matches('\0').to_string()
}

pub fn state_of(name: &str) -> PyResult<BlockState> {
    [BlockState::Free, BlockState::Cached, BlockState::Active, BlockState::Retired]
        .into_iter()
        .find(|state| state.name() == name)
        .ok_or_else(|| PyValueError::new_err(format!("{name:?} is no state of a block")))
}

/// None: the device.
pub fn tier_of(medium: &str) -> PyResult<Option<Tier>> {
    match medium {
        "device" => Ok(None),
        "host" => Ok(Some(Tier::Host)),
        "disk" => Ok(Some(Tier::Disk)),
        _ => Err(PyValueError::new_err(format!("{medium:?} is no medium"))),
    }
}

pub fn position(position: Option<usize>) -> i64 {
    position.map_or(-1, |position| position as i64)
}

pub fn decoded<M: Message + Default>(body: &[u8]) -> PyResult<M> {
    M::decode(body).map_err(|error| PyValueError::new_err(error.to_string()))
}
