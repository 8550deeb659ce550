//! The probe: what only tests and benchmarks look at.
//!
//! It is a class of its own and not a feature of the crate, because tests run against the module that an install builds.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::books::Books;
use crate::cache::eviction::trial::NUM_CANDIDATES;
use crate::cache::groups::Group;
use crate::cache::prefix::{BlockId, Hash};
use crate::cache::tier_copies::{Content, TierBlockId, TierCopies};
use crate::python::convert::bytes_of;
use crate::python::ledger::PyProbe;
use crate::python::views::{StepView, step_view};

#[pymethods]
impl PyProbe {
    /// The steps of a lease that were planned and not reported. Raises KeyError if there is none of this id.
    fn steps_in_flight(&self, py: Python<'_>, lease_id: &str) -> PyResult<Vec<StepView>> {
        let ledger = self.ledger.borrow(py);
        let lease = ledger.known(lease_id)?;
        Ok(lease.in_flight.iter().map(step_view).collect())
    }

    /// Ids of a lease's sequences, as they were admitted.
    fn sequence_ids(&self, py: Python<'_>, lease_id: &str) -> Vec<i32> {
        let ledger = self.ledger.borrow(py);
        let books = ledger.stored.books();
        let rows = books.lease(lease_id).map(|lease| books.rows_in_order(lease)).unwrap_or_default();
        rows.into_iter().map(|row| books.sequence(row).seq_id).collect()
    }

    /// All known tokens of a sequence.
    fn tokens<'py>(&self, py: Python<'py>, lease_id: &str, seq_id: i64) -> Option<Bound<'py, PyBytes>> {
        let ledger = self.ledger.borrow(py);
        let row = ledger.row(lease_id, seq_id)?;
        Some(PyBytes::new(py, &bytes_of(&ledger.stored.books().sequence(row).tokens)))
    }

    /// State, references, holds of steps in flight, and prefix hash of a block.
    fn block(&self, py: Python<'_>, block_id: BlockId) -> (&'static str, u32, u32, Option<Hash>) {
        let ledger = self.ledger.borrow(py);
        let pool = ledger.stored.books().pool();
        (
            pool.state(block_id).name(),
            pool.holders().ref_count(block_id),
            pool.holders().hold_count(block_id),
            pool.prefix_hash(block_id),
        )
    }

    /// The copies of evicted blocks in the host tier: see CopyView; the last is whether a step copies to it.
    fn host_copies(&self, py: Python<'_>) -> Vec<CopyView> {
        let ledger = self.ledger.borrow(py);
        copies(ledger.stored.books(), ledger.stored.books().host().copies())
    }

    /// The copies on the disk: see CopyView; the last is whether it is being written.
    fn disk_copies(&self, py: Python<'_>) -> Vec<CopyView> {
        let ledger = self.ledger.borrow(py);
        copies(ledger.stored.books(), ledger.stored.books().disk().copies())
    }

    /// Rows taken in the worker.
    fn num_rows(&self, py: Python<'_>) -> usize {
        let ledger = self.ledger.borrow(py);
        ledger.stored.books().num_rows()
    }

    fn violations(&self, py: Python<'_>) -> Vec<String> {
        let ledger = self.ledger.borrow(py);
        ledger.stored.books().violations()
    }

    #[pyo3(signature = (but_last_step_of = None))]
    fn state(&self, py: Python<'_>, but_last_step_of: Option<&str>) -> String {
        let ledger = self.ledger.borrow(py);
        ledger.stored.books().state(but_last_step_of)
    }

    /// The parked blocks in the policy's order.
    fn parked_blocks(&self, py: Python<'_>) -> Vec<BlockId> {
        let ledger = self.ledger.borrow(py);
        ledger.stored.books().pool().parking().parked()
    }

    /// The blocks that breakpoints keep for a tenant, the least recently used first: block, end, and time from a use to it,
    /// in milliseconds.
    fn kept_blocks(&self, py: Python<'_>, tenant: &str) -> Vec<(BlockId, u64, u64)> {
        let ledger = self.ledger.borrow(py);
        let books = ledger.stored.books();
        let (Some(tenant), Some(keeps)) = (books.tenants().find(tenant.as_bytes()), books.pool().parking().keeps())
        else {
            return Vec::new();
        };
        let view = |block| (block, keeps.until(block).unwrap_or(0), keeps.ttl(block));
        keeps.of_tenant(tenant).map(view).collect()
    }

    /// Lets the default policy follow a candidate until it chooses one itself. For tests.
    fn follow(&self, py: Python<'_>, candidate: usize) -> PyResult<()> {
        let mut ledger = self.ledger.borrow_mut(py);
        match ledger.stored.books_mut().pool_mut().parking_mut().policy().lineage() {
            Some(lineage) if candidate < NUM_CANDIDATES => lineage.trial.followed = candidate,
            _ => return Err(PyValueError::new_err("the policy has no such candidate")),
        }
        Ok(())
    }
}

/// Block of the tier, prefix hash, layer group, tenant, and whether it is arriving.
type CopyView = (TierBlockId, Hash, Group, String, bool);

fn copies(books: &Books, copies: &TierCopies) -> Vec<CopyView> {
    let name = |tenant| String::from_utf8_lossy(books.tenants().name(tenant)).into_owned();
    let view = |(block, content, is_arriving): (TierBlockId, Content, bool)| {
        (block, content.prefix_hash(), content.group, name(content.tenant), is_arriving)
    };
    copies.listing().map(view).collect()
}
