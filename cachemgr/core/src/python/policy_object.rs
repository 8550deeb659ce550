//! An eviction policy in Python, for experiments; cachemgr/quire/cachemgr/eviction_interface.py describes its methods.
//!
//! An error can't stop a change of the books in the middle. So the change is finished in the order of `Lru`, which is
//! kept beside, and then the error is raised. The policy is not called again.

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::create_exception;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::cache::eviction::EvictionPolicy;
use crate::cache::eviction::lru::Lru;
use crate::cache::prefix::{BlockId, Hash};

create_exception!(quire.cachemgr._core, WrongVictims, PyValueError);

/// A policy's name, or its object.
#[derive(FromPyObject)]
pub enum PolicyChoice {
    Named(String),
    Given(Py<PyAny>),
}

/// The first error of a policy, until it is raised.
#[derive(Debug, Clone, Default)]
pub struct PolicyError(Arc<Mutex<Option<PyErr>>>);

impl PolicyError {
    pub fn take(&self) -> Option<PyErr> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn set(&self, error: PyErr) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
    }
}

/// The object, the parked blocks in the order of Lru, and the place of its error.
#[derive(Debug)]
pub struct PyPolicy {
    object: Option<Py<PyAny>>, // None after an error
    lru: Lru,
    num_blocks: usize,
    error: PolicyError,
}

impl PyPolicy {
    pub fn new(object: Py<PyAny>, num_blocks: usize, error: PolicyError) -> PyPolicy {
        PyPolicy { object: Some(object), lru: Lru::new(num_blocks), num_blocks, error }
    }

    /// Calls the object. Its first error is the last call.
    fn call(&mut self, call: impl FnOnce(&Bound<'_, PyAny>, &mut Lru) -> PyResult<()>) {
        let Some(object) = &self.object else { return };
        let called = Python::attach(|py| call(object.bind(py), &mut self.lru));
        if let Err(error) = called {
            self.error.set(error);
            self.object = None;
        }
    }

    fn tell(&mut self, method: &str, blocks: &[BlockId]) {
        self.call(|object, _| object.call_method1(method, (blocks,)).map(drop));
    }
}

impl EvictionPolicy for PyPolicy {
    fn admit(&mut self, found: &[BlockId], fresh: &[BlockId], hashes: &[Hash]) {
        self.call(|object, _| {
            let hashes: Vec<_> = hashes.iter().map(|hash| PyBytes::new(object.py(), hash)).collect();
            object.call_method1("admit", (found, fresh, hashes)).map(drop)
        });
    }

    fn park(&mut self, blocks: &[BlockId]) {
        self.lru.park(blocks);
        self.tell("park", blocks);
    }

    fn unpark(&mut self, blocks: &[BlockId]) {
        self.lru.unpark(blocks);
        self.tell("unpark", blocks);
    }

    fn forget(&mut self, blocks: &[BlockId]) {
        self.tell("forget", blocks);
    }

    fn evict(&mut self, count: usize, victims: &mut Vec<BlockId>) {
        let end = victims.len() + count;
        let ids = 1..self.num_blocks;
        self.call(|object, lru| {
            let returned = object.call_method1("evict", (count,))?;
            let wrong = |what: String| {
                let wanted = format!("must return {count} different parked blocks");
                Err(WrongVictims::new_err(format!("evict({count}) returned {what}: {wanted}")))
            };
            let Ok(chosen) = returned.extract::<Vec<BlockId>>() else { return wrong(returned.repr()?.to_string()) };
            if chosen.len() != count {
                return wrong(format!("{} blocks", chosen.len()));
            }
            for block in chosen {
                if !ids.contains(&(block as usize)) || !lru.is_parked(block) {
                    return wrong(format!("block {block}, which is not parked"));
                }
                lru.unpark(&[block]);
                victims.push(block);
            }
            Ok(())
        });
        self.lru.evict(end - victims.len(), victims);
    }

    fn num_parked(&self) -> usize {
        self.lru.num_parked()
    }

    fn is_parked(&self, block: BlockId) -> bool {
        self.lru.is_parked(block)
    }

    fn parked(&self) -> Vec<BlockId> {
        self.lru.parked()
    }
}
