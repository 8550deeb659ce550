//! The inspector: what only looks at the books of a ledger.

use std::collections::HashMap;

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::books::lease::expiry::page_key;
use crate::books::listing::{BlockFilter, States};
use crate::books::pins::{Pin, PinId};
use crate::cache::journal::{Journal, Known};
use crate::cache::prefix::BlockId;
use crate::cache::tenants::TenantId;
use crate::python::convert::{ids, namespace_of, state_of, tier_of};
use crate::python::ledger::PyInspector;
use crate::python::messages::PyKnown;
use crate::python::views::{
    LeaseView, PinView, PyExplanation, SequenceView, TenantUse, explanation_view, lease_view, pin_view, sequence_view,
    use_view,
};
use crate::store::stored_books::StoredBooks;
use crate::wire::answers::{encode_blocks, encode_counts, encode_events, encode_statistics};

#[pymethods]
impl PyInspector {
    /// The number of the last report that was entered.
    #[getter]
    fn last_report(&self, py: Python<'_>) -> u64 {
        let ledger = self.ledger.borrow(py);
        ledger.stored.books().last_report()
    }

    /// Steps that were planned in the epoch.
    #[getter]
    fn num_planned_steps(&self, py: Python<'_>) -> u64 {
        self.ledger.borrow(py).stored.books().counters().planned_steps
    }

    /// The open lease of this id. Raises CallRefused (LEASE_NOT_FOUND).
    fn lease(&self, py: Python<'_>, lease_id: &str) -> PyResult<LeaseView> {
        self.ledger.borrow(py).open_lease_view(py, lease_id)
    }

    /// The lease of this id, one that has ended included.
    fn find_lease(&self, py: Python<'_>, lease_id: &str) -> Option<LeaseView> {
        let ledger = self.ledger.borrow(py);
        ledger.stored.books().lease(lease_id).map(|lease| lease_view(&ledger.stored, lease_id, lease))
    }

    /// The tenant of a lease, also of one that has ended.
    fn tenant_of(&self, py: Python<'_>, lease_id: &str) -> Option<String> {
        let ledger = self.ledger.borrow(py);
        ledger.stored.books().lease(lease_id).map(|lease| String::from_utf8_lossy(&lease.tenant_name).into_owned())
    }

    /// All leases, those that have ended included, by id.
    fn leases(&self, py: Python<'_>) -> Vec<LeaseView> {
        let ledger = self.ledger.borrow(py);
        let mut leases: Vec<_> = ledger.stored.books().leases().iter().collect();
        leases.sort_unstable_by_key(|(lease_id, _)| *lease_id);
        leases.into_iter().map(|(lease_id, lease)| lease_view(&ledger.stored, lease_id, lease)).collect()
    }

    /// At most `most` leases from a page key on, by these, with their keys; of `only` that id.
    #[pyo3(signature = (key, most, *, only = ""))]
    fn leases_from(&self, py: Python<'_>, key: &str, most: usize, only: &str) -> Vec<(String, LeaseView)> {
        let ledger = self.ledger.borrow(py);
        let books = ledger.stored.books();
        let view = |(key, id): (&String, &String)| (key.clone(), lease_view(&ledger.stored, id, &books.leases()[id]));
        if only.is_empty() {
            return books.leases().page(key, most).map(view).collect();
        }
        let found = self.find_lease(py, only).map(|lease| (page_key(only), lease));
        found.into_iter().filter(|(its_key, _)| its_key.as_str() >= key).collect()
    }

    /// The number of leases of each tenant, those that have ended included.
    fn num_leases_by_tenant(&self, py: Python<'_>) -> HashMap<String, usize> {
        let ledger = self.ledger.borrow(py);
        let mut counts = HashMap::new();
        for lease in ledger.stored.books().leases().values() {
            *counts.entry(String::from_utf8_lossy(&lease.tenant_name).into_owned()).or_default() += 1;
        }
        counts
    }

    /// No lease runs out before this.
    fn next_expiry(&self, py: Python<'_>) -> Option<f64> {
        let ledger = self.ledger.borrow(py);
        ledger.stored.books().leases().next_expiry()
    }

    /// No pin and no advice ends before this; None if there is none that ends.
    fn next_end(&self, py: Python<'_>) -> Option<f64> {
        let ledger = self.ledger.borrow(py);
        ledger.stored.books().next_end().map(|end| end as f64 / 1e3)
    }

    /// A sequence of an open lease. Raises CallRefused (LEASE_NOT_FOUND).
    fn sequence(&self, py: Python<'_>, lease_id: &str, seq_id: i64) -> PyResult<Option<SequenceView>> {
        let ledger = self.ledger.borrow(py);
        ledger.open_lease_view(py, lease_id)?;
        Ok(ledger.row(lease_id, seq_id).map(|row| sequence_view(ledger.stored.books(), row)))
    }

    /// The first `most` of a lease's sequences with ids from `first` on, by id; of one tenant, if it is given.
    #[pyo3(signature = (lease_id, first, most, *, tenant = None))]
    fn sequences_from(
        &self,
        py: Python<'_>,
        lease_id: &str,
        first: i64,
        most: usize,
        tenant: Option<&str>,
    ) -> Vec<SequenceView> {
        let ledger = self.ledger.borrow(py);
        let Ok(first) = i32::try_from(first) else {
            return Vec::new();
        };
        let rows = ledger.stored.books().listing().sequences_from(lease_id, first, most, tenant.map(str::as_bytes));
        rows.into_iter().map(|row| sequence_view(ledger.stored.books(), row)).collect()
    }

    /// Tokens that an admission would find in the cache; takes nothing.
    #[pyo3(signature = (tokens, *, salt, tenant = "", adapter = b"".as_slice()))]
    fn num_cached_tokens(
        &self,
        py: Python<'_>,
        tokens: &[u8],
        salt: &[u8],
        tenant: &str,
        adapter: &[u8],
    ) -> PyResult<usize> {
        let ledger = self.ledger.borrow(py);
        Ok(ledger.stored.books().num_cached_tokens(&ids(tokens)?, &namespace_of(salt, adapter), tenant.as_bytes()))
    }

    /// The same in the pool, behind that in the host tier, and behind that on the disk.
    #[pyo3(signature = (tokens, *, salt, tenant = "", adapter = b"".as_slice()))]
    fn cached_tokens(
        &self,
        py: Python<'_>,
        tokens: &[u8],
        salt: &[u8],
        tenant: &str,
        adapter: &[u8],
    ) -> PyResult<(usize, usize, usize)> {
        let ledger = self.ledger.borrow(py);
        let [in_pool, in_host, on_disk] =
            ledger.stored.books().cached_tokens(&ids(tokens)?, &namespace_of(salt, adapter), tenant.as_bytes());
        Ok((in_pool, in_host, on_disk))
    }

    /// A serialised BlockCounts.
    fn counts<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        let ledger = self.ledger.borrow(py);
        PyBytes::new(py, &encode_counts(ledger.stored.books().pool().counts()))
    }

    /// The tenants that were seen or have a share of their own, by name.
    fn tenants(&self, py: Python<'_>) -> Vec<TenantUse> {
        let ledger = self.ledger.borrow(py);
        let mut uses: Vec<_> = (0..ledger.stored.books().tenants().len() as TenantId)
            .map(|tenant| use_view(ledger.stored.books(), tenant))
            .collect();
        uses.sort_unstable_by(|one, other| one.name.cmp(&other.name));
        uses
    }

    /// One tenant's use.
    fn tenant_use(&self, py: Python<'_>, name: &str) -> Option<TenantUse> {
        let ledger = self.ledger.borrow(py);
        ledger.stored.books().tenants().find(name.as_bytes()).map(|tenant| use_view(ledger.stored.books(), tenant))
    }

    /// At most `most` pins after a given one, of one tenant or of all, by id.
    #[pyo3(signature = (*, tenant = None, behind = None, most = 1_000))]
    fn pins(&self, py: Python<'_>, tenant: Option<&str>, behind: Option<PinId>, most: usize) -> Vec<PinView> {
        let ledger = self.ledger.borrow(py);
        let id = tenant.map(|name| ledger.stored.books().tenants().find(name.as_bytes()));
        let is_theirs = |pin: &&Pin| id.is_none_or(|id| id == Some(pin.tenant));
        let pins: Box<dyn Iterator<Item = &Pin>> = match behind {
            Some(behind) => Box::new(ledger.stored.books().pins().behind(behind)),
            None => Box::new(ledger.stored.books().pins().all()),
        };
        pins.filter(is_theirs).take(most).map(|pin| pin_view(ledger.stored.books(), pin)).collect()
    }

    /// The number of pins.
    fn num_pins(&self, py: Python<'_>) -> usize {
        let ledger = self.ledger.borrow(py);
        ledger.stored.books().pins().len()
    }

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
        let ledger = self.ledger.borrow(py);
        let first = first.min(ledger.stored.books().geometry().num_blocks as u64) as BlockId;
        let states = state.map(state_of).transpose()?.map_or(States::Any, States::Only);
        let filter = BlockFilter { states, tenant: tenant.map(str::as_bytes), lease_id };
        let (blocks, next) = ledger.stored.books().listing().list_blocks(first, most, &filter);
        let blocks = blocks.into_iter().map(|block| ledger.stored.books().listing().describe(block)).collect();
        Ok((PyBytes::new(py, &encode_blocks(blocks)), next))
    }

    /// Serialised events of a WatchBlocksResponse: blocks that are not free, or the copies in a tier, from `first` on, and
    /// the block to continue from. A reader's `known` has their present state then.
    #[pyo3(signature = (first, most, known = None, *, tenant, with_content, medium = "device"))]
    fn snapshot<'py>(
        &self,
        py: Python<'py>,
        first: BlockId,
        most: usize,
        known: Option<&mut PyKnown>,
        tenant: Option<&str>,
        with_content: bool,
        medium: &str,
    ) -> PyResult<(Bound<'py, PyBytes>, Option<BlockId>)> {
        let ledger = self.ledger.borrow(py);
        let listing = ledger.stored.books().listing();
        let mut of_nobody = Known::default();
        let known = known.map_or(&mut of_nobody, |known| &mut known.0);
        let tenant = tenant.map(str::as_bytes);
        let (events, next) = match tier_of(medium)? {
            None => listing.snapshot(first, most, known, tenant, with_content),
            Some(tier) => listing.snapshot_of_copies(tier, first, most, known, tenant),
        };
        Ok((PyBytes::new(py, &encode_events(events)), next))
    }

    /// Serialised events of a WatchBlocksResponse: the next changes that are not known, which they are then; None if the
    /// journal does not keep the next one any more.
    #[pyo3(signature = (known, most, *, tenant, with_content, medium = "device"))]
    fn changes<'py>(
        &self,
        py: Python<'py>,
        known: &mut PyKnown,
        most: usize,
        tenant: Option<&str>,
        with_content: bool,
        medium: &str,
    ) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let ledger = self.ledger.borrow(py);
        let listing = ledger.stored.books().listing();
        let (known, tenant) = (&mut known.0, tenant.map(str::as_bytes));
        let events = match tier_of(medium)? {
            None => listing.changes(known, most, tenant, with_content),
            Some(tier) => listing.changes_of_copies(tier, known, most, tenant),
        };
        Ok(events.map(|events| PyBytes::new(py, &encode_events(events))))
    }

    /// Changes of blocks, or of the copies in a tier, so far.
    #[pyo3(signature = (medium = "device"))]
    fn num_changes(&self, py: Python<'_>, medium: &str) -> PyResult<u64> {
        self.of_journal(py, medium, Journal::num_changes)
    }

    /// The number of changes that the journal keeps; 0: there are none.
    #[pyo3(signature = (medium = "device"))]
    fn num_changes_kept(&self, py: Python<'_>, medium: &str) -> PyResult<usize> {
        self.of_journal(py, medium, Journal::num_kept)
    }

    /// True if tokens and namespaces of findable blocks are kept.
    fn contents_are_kept(&self, py: Python<'_>) -> bool {
        let ledger = self.ledger.borrow(py);
        ledger.stored.books().pool().records.contents.are_kept()
    }

    /// Why an admission would not find more in the cache; takes nothing.
    #[pyo3(signature = (tokens, *, salt, tenant, with_other_tenants, adapter = b"".as_slice()))]
    fn explain(
        &self,
        py: Python<'_>,
        tokens: &[u8],
        salt: &[u8],
        tenant: &str,
        with_other_tenants: bool,
        adapter: &[u8],
    ) -> PyResult<PyExplanation> {
        let mut ledger = self.ledger.borrow_mut(py);
        let (tokens, namespace) = (ids(tokens)?, namespace_of(salt, adapter));
        let explain = |books: &mut StoredBooks| {
            Ok(books.books_mut().explain(&tokens, &namespace, tenant.as_bytes(), with_other_tenants))
        };
        let explanation = ledger.changing(py, explain)?;
        Ok(explanation_view(ledger.stored.books(), explanation))
    }

    /// Tenants that keep as many blocks as they may, and more than none.
    fn num_tenants_at_keep_limit(&self, py: Python<'_>) -> usize {
        let ledger = self.ledger.borrow(py);
        let pool = ledger.stored.books().pool();
        let Some(keeps) = pool.parking().keeps() else { return 0 };
        let is_at_limit = |tenant: &TenantId| {
            let num_kept = keeps.num_kept(*tenant);
            num_kept > 0 && num_kept >= pool.accounts().get(*tenant).share.keep_limit
        };
        (0..pool.accounts().len() as TenantId).filter(is_at_limit).count()
    }

    /// A serialised PoolStatistics.
    fn statistics<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        let ledger = self.ledger.borrow(py);
        PyBytes::new(py, &encode_statistics(&ledger.stored))
    }

    /// The violations in the blocks from `first` to before `end`.
    fn audit(&self, py: Python<'_>, first: BlockId, end: BlockId) -> Vec<String> {
        let ledger = self.ledger.borrow(py);
        ledger.stored.books().audit().blocks(&(first..end.min(ledger.stored.books().geometry().num_blocks as BlockId)))
    }

    fn audit_counts(&self, py: Python<'_>) -> Vec<String> {
        let ledger = self.ledger.borrow(py);
        ledger.stored.books().audit().counts()
    }

    fn audit_promises(&self, py: Python<'_>) -> Vec<String> {
        let ledger = self.ledger.borrow(py);
        ledger.stored.books().audit().promises()
    }
}

impl PyInspector {
    fn of_journal<T>(&self, py: Python<'_>, medium: &str, read: impl Fn(&Journal) -> T) -> PyResult<T> {
        let ledger = self.ledger.borrow(py);
        let books = ledger.stored.books();
        Ok(match tier_of(medium)? {
            None => read(&books.pool().records.journal),
            Some(tier) => read(books.listing().copies(tier).journal()),
        })
    }
}
