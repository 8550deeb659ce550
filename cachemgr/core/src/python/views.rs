//! The values that Python gets, as they are at the time of the call.

use pyo3::prelude::*;

use crate::books::Books;
use crate::books::explain::Explanation;
use crate::books::lease::Lease;
use crate::books::miss::Miss;
use crate::books::pins::{Pin, PinId};
use crate::books::sequences::{Row, Sequence};
use crate::books::steps::StepInFlight;
use crate::cache::accounts::Share;
use crate::cache::losses::{Cause, Loss};
use crate::cache::prefix::{BlockId, Hash};
use crate::cache::tenants::TenantId;
use crate::cache::tier::TierBlockId;
use crate::python::convert::{name_of, position};
use crate::store::stored_books::StoredBooks;
use crate::wire::answers::cache_use_number;

/// A sequence at the time of the call.
#[pyclass(name = "SequenceView", module = "quire.cachemgr._core", frozen, get_all)]
pub struct SequenceView {
    pub seq_id: i32,
    pub tenant: String,
    pub num_known: usize,
    pub num_tokens: usize,
    pub num_cached: usize,
    pub num_computed: usize,
    pub num_scheduled: usize,
    pub num_published: usize,
    pub num_promised: usize,
    pub num_drafts: usize,
    pub sampled_position: i64,
    /// The most tokens it will ever have, guaranteed; 0: best effort.
    pub reserved_tokens: usize,
    /// Of all layer groups, as the next three.
    pub num_blocks: usize,
    /// Group by group.
    pub block_table: Vec<BlockId>,
    pub is_offloaded: bool,
    pub host_blocks: Vec<TierBlockId>,
    /// By layer group, the entries that were let go and the blocks, in the host tier if it is offloaded.
    pub tables: Vec<(usize, usize)>,
    /// The pool has several layer groups, or one with a window.
    pub has_groups: bool,
    /// The number of a CacheUse.
    pub cache_use: i32,
}

/// A lease at the time of the call, one that has ended included.
#[pyclass(name = "Lease", module = "quire.cachemgr._core", frozen, get_all)]
pub struct LeaseView {
    pub lease_id: String,
    pub pool: String,
    pub tenant: String,
    pub ttl_s: f64,
    pub expires_at: f64,
    pub had_grace: bool,
    pub is_ending: bool,
    pub next_step: u64,
    pub settled_step: u64,
    pub num_in_flight: usize,
    pub num_sequences: usize,
}

/// A tenant's part of a pool, in blocks.
#[pyclass(name = "TenantUse", module = "quire.cachemgr._core", frozen, get_all)]
pub struct TenantUse {
    pub name: String,
    pub floor: usize,
    pub quota: usize,
    pub limit: usize,
    pub pin_budget: usize,
    pub num_held: usize,
    pub num_cached: usize,
    pub num_reserved: usize,
    pub num_pinned: usize,
    pub keep_limit: usize,
    pub num_kept: usize,
    /// When the next of its kept blocks ends, in seconds of the caller's clock.
    pub next_keep_end_s: Option<f64>,
    /// Tokens of its admitted prompts: found, written, and all.
    pub num_cached_tokens: u64,
    pub num_written_tokens: u64,
    pub num_admitted_tokens: u64,
}

/// The outcome that an admission would have now.
#[pyclass(name = "AdmissionCheck", module = "quire.cachemgr._core", frozen, get_all)]
pub struct AdmissionCheckView {
    pub num_cached_tokens: usize,
    pub num_needed: usize,
    pub num_available: usize,
    pub refusal: Option<Py<PyAny>>,
}

/// A prefix that is kept.
#[pyclass(name = "PinView", module = "quire.cachemgr._core", frozen, get_all)]
pub struct PinView {
    pub pin_id: PinId,
    pub tenant: String,
    pub num_tokens: usize,
    pub until: f64,
}

/// Why a prefix is not found.
#[pyclass(name = "Explanation", module = "quire.cachemgr._core", frozen, get_all)]
pub struct PyExplanation {
    pub num_blocks: usize,
    pub num_found: usize,
    pub num_in_host: usize,
    pub num_on_disk: usize,
    /// Index, layer group and prefix hash.
    pub missing: Option<(usize, u8, Hash)>,
    pub reason: &'static str,
    pub lost_at: Option<f64>,
    pub evicted_by: Option<(String, String)>,
    pub num_stranded: usize,
    pub other_tenant: Option<String>,
    /// The caller that reset it, if that is known.
    pub reset_by: Option<String>,
}

/// A step in flight at the time of the call.
#[pyclass(name = "StepView", module = "quire.cachemgr._core", frozen, get_all)]
pub struct StepView {
    pub step_number: u64,
    pub is_doomed: bool,
    pub run_seq_ids: Vec<i32>,
    pub num_held: usize,
    pub num_fills: usize,
    pub num_released: usize,
}

pub fn lease_view(stored: &StoredBooks, lease_id: &str, lease: &Lease) -> LeaseView {
    LeaseView {
        lease_id: lease_id.to_string(),
        pool: stored.pool().to_string(),
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

pub fn tenant_name(books: &Books, tenant: TenantId) -> String {
    String::from_utf8_lossy(books.tenants().name(tenant)).into_owned()
}

pub fn explanation_view(books: &Books, explanation: Explanation) -> PyExplanation {
    let Explanation { num_blocks, num_found, num_in_host, num_on_disk, missing, miss, num_stranded } = explanation;
    let (mut lost_at, mut evicted_by, mut other_tenant, mut reset_by) = (None, None, None, None);
    let reason = match miss {
        Miss::None => "none",
        Miss::NeverComputed => "never_computed",
        Miss::Unknown => "unknown",
        Miss::BeingComputed => "being_computed",
        Miss::OtherSalt => "other_salt",
        Miss::OtherAdapter => "other_adapter",
        Miss::OtherTenant(tenant) => {
            other_tenant = Some(tenant_name(books, tenant));
            "other_tenant"
        }
        Miss::WindowLost(loss) => {
            lost_at = loss.map(|loss| loss.at);
            if let Some(Loss { cause: Cause::Evicted { tenant, lease }, .. }) = loss {
                evicted_by = Some((tenant_name(books, tenant), name_of(&lease)));
            }
            "window_evicted"
        }
        Miss::Lost(loss) => {
            lost_at = Some(loss.at);
            match loss.cause {
                Cause::Reset { by } => {
                    let name = books.pool().records.callers.name(by);
                    reset_by = name.map(|name| String::from_utf8_lossy(name).into_owned());
                    "reset"
                }
                Cause::Evicted { tenant, lease } => {
                    evicted_by = Some((tenant_name(books, tenant), name_of(&lease)));
                    "evicted"
                }
            }
        }
    };
    PyExplanation {
        num_blocks,
        num_found,
        num_in_host,
        num_on_disk,
        missing,
        reason,
        lost_at,
        evicted_by,
        num_stranded,
        other_tenant,
        reset_by,
    }
}

pub fn sequence_view(books: &Books, row: Row) -> SequenceView {
    let sequence = books.sequence(row);
    SequenceView {
        seq_id: sequence.seq_id,
        tenant: tenant_name(books, sequence.tenant),
        num_known: sequence.num_known(),
        num_tokens: sequence.num_tokens,
        num_cached: sequence.num_cached,
        num_computed: sequence.num_computed,
        num_scheduled: sequence.num_scheduled,
        num_published: sequence.num_published,
        num_promised: sequence.num_promised(),
        num_drafts: sequence.num_drafts,
        sampled_position: position(sequence.sampled_position),
        reserved_tokens: sequence.reserved_tokens,
        num_blocks: sequence.blocks().count(),
        block_table: sequence.blocks().collect(),
        tables: tables_of(sequence),
        has_groups: sequence.tables.len() > 1 || books.geometry().has_windows(),
        is_offloaded: sequence.is_offloaded(),
        host_blocks: sequence.in_host.as_ref().map_or_else(Vec::new, |tables| tables.blocks.clone()),
        cache_use: cache_use_number(sequence.cache_use),
    }
}

pub fn pin_view(books: &Books, pin: &Pin) -> PinView {
    PinView {
        pin_id: pin.id,
        tenant: tenant_name(books, pin.tenant),
        num_tokens: pin.num_blocks * books.geometry().block_size,
        until: pin.until,
    }
}

pub fn use_view(books: &Books, tenant: TenantId) -> TenantUse {
    let account = books.pool().accounts().get(tenant);
    let Share { floor, quota, limit, pin_budget, keep_limit } = account.share;
    let tokens = account.tokens;
    TenantUse {
        name: tenant_name(books, tenant),
        floor,
        quota,
        limit,
        pin_budget,
        num_held: account.num_held,
        num_cached: account.num_cached,
        num_reserved: account.num_reserved,
        num_pinned: account.num_pinned,
        keep_limit,
        num_kept: books.pool().parking().keeps().map_or(0, |keeps| keeps.num_kept(tenant)),
        next_keep_end_s: books.next_keep_end(tenant).map(|end| end as f64 / 1e3),
        num_cached_tokens: tokens.cached,
        num_written_tokens: tokens.written,
        num_admitted_tokens: tokens.admitted,
    }
}

/// See SequenceView.
fn tables_of(sequence: &Sequence) -> Vec<(usize, usize)> {
    let held = |group: usize| sequence.tables[group].blocks().len();
    let count = |group: usize| sequence.in_host.as_ref().map_or_else(|| held(group), |tables| tables.counts[group]);
    sequence.tables.iter().enumerate().map(|(group, table)| (table.num_passed(), count(group))).collect()
}

pub fn step_view(step: &StepInFlight) -> StepView {
    StepView {
        step_number: step.step_number,
        is_doomed: step.is_doomed,
        run_seq_ids: step.runs.iter().map(|run| run.seq_id).collect(),
        num_held: step.holds.iter().map(Vec::len).sum(),
        num_fills: step.fills.len(),
        num_released: step.released_rows.len(),
    }
}
