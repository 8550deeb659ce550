//! Changes of the books as values: written to the store, and applied again after a restart.
//!
//! The books depend on nothing else: the same changes in the same order give the same books. After a restart each plan
//! is made again and compared with its first answer: if it differs, these are not the books that granted it.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::books::Books;
use crate::books::disk_reports::FoundCopy;
use crate::books::geometry::Geometry;
use crate::books::lease::answers::RequestKey;
use crate::books::pins::PinId;
use crate::books::plans::StepRequest;
use crate::books::settle::StepReport;
use crate::cache::accounts::Share;
use crate::cache::prefix::{BlockId, Namespace};
use crate::errors::{Failure, Result, broken};

/// One change, with its request's arguments. Times are in seconds of the caller's clock.
#[derive(Debug, Serialize, Deserialize)]
#[allow(clippy::large_enum_variant)] // there is one at a time
pub enum Change<'a> {
    /// The first: empty books.
    Begin {
        geometry: Cow<'a, Geometry>,
        policy: Cow<'a, str>,
        now: f64,
    },
    OpenLease {
        lease_id: Cow<'a, str>,
        tenant: Cow<'a, [u8]>,
        ttl: f64,
    },
    EndLease {
        lease_id: Cow<'a, str>,
    },
    CloseLease {
        lease_id: Cow<'a, str>,
    },
    Plan {
        lease_id: Cow<'a, str>,
        request: Cow<'a, StepRequest>,
        now: f64,
        /// Empty: it can't be repeated.
        request_id: Cow<'a, str>,
        digest: Cow<'a, [u8]>,
        checksum: u64,
    },
    Settle {
        lease_id: Cow<'a, str>,
        report: Cow<'a, StepReport>,
    },
    SetShares {
        default: Share,
        by_name: Cow<'a, BTreeMap<Vec<u8>, Share>>,
    },
    EnterTenant {
        name: Cow<'a, [u8]>,
    },
    Advance {
        now: f64,
    },
    Pin {
        tenant: Cow<'a, [u8]>,
        tokens: Cow<'a, [i32]>,
        namespace: Cow<'a, Namespace>,
        until: f64,
    },
    Unpin {
        pin_id: PinId,
    },
    Reset {
        first: BlockId,
        end: BlockId,
        now: f64,
        by: Cow<'a, [u8]>,
    },
    /// A reset of a tenant's content, or of some of it, begins.
    Withhold {
        tenant: Cow<'a, [u8]>,
        namespace: Option<Cow<'a, Namespace>>,
    },
    /// The worker has carried out orders about its disk, or could not.
    EndDiskOrders {
        done: Cow<'a, [u64]>,
        failed: Cow<'a, [u64]>,
    },
    /// The worker has found copies on its disk.
    EnterFoundCopies {
        found: Cow<'a, [FoundCopy]>,
    },
    /// Has the disk's content of tenants erased, as the epoch before would have.
    Erase {
        tenants: Cow<'a, [Option<Vec<u8>>]>,
    },
    /// Removes the content of blocks from the cache.
    Drop {
        blocks: Cow<'a, [BlockId]>,
        now: f64,
        by: Cow<'a, [u8]>,
    },
}

impl Change<'_> {
    /// The books that the first change makes. None if it is no Begin, or names a policy that does not exist.
    pub fn begin(&self) -> Option<Books> {
        let Change::Begin { geometry, policy, now } = self else { return None };
        Some(Books::new(geometry.clone().into_owned(), policy)?.begun(*now))
    }

    /// Makes a change again.
    pub fn apply(&self, books: &mut Books) -> Result<()> {
        match self {
            Change::Begin { .. } => return broken("books begin twice".to_string()),
            Change::OpenLease { lease_id, tenant, ttl } => books.open_lease(lease_id, tenant, *ttl),
            Change::EndLease { lease_id } => books.end_lease(lease_id),
            Change::CloseLease { lease_id } => books.close_lease(lease_id)?,
            Change::Plan { lease_id, request, now, request_id, digest, checksum } => {
                let plan = books.plan(lease_id, request, *now, &RequestKey { request_id, digest })?;
                if plan.as_ref().map(|plan| plan.checksum()) != Some(*checksum) {
                    return broken(format!("a plan of lease {lease_id:.8} is another one when it is made again"));
                }
            }
            Change::Settle { lease_id, report } => books.settle(lease_id, report)?,
            Change::SetShares { default, by_name } => books.set_shares(*default, by_name.clone().into_owned()),
            Change::EnterTenant { name } => drop(books.enter_tenant(name)),
            Change::Advance { now } => books.advance(*now)?,
            Change::Pin { tenant, tokens, namespace, until } => {
                books.pin_prefix(tenant, tokens, namespace, *until)?.map_err(Failure::Refused)?;
            }
            Change::Unpin { pin_id } => drop(books.unpin_prefix(None, pin_id)?),
            Change::Withhold { tenant, namespace } => books.withhold_for(tenant, namespace.as_deref()),
            Change::EndDiskOrders { done, failed } => books.end_disk_orders(done, failed)?,
            Change::EnterFoundCopies { found } => books.enter_found_copies(found),
            Change::Erase { tenants } => books.go_on_erasing(tenants),
            Change::Drop { blocks, now, by } => drop(books.drop_blocks(blocks, *now, by)),
            Change::Reset { first, end, now, by } => drop(books.reset_prefix_cache(*first, *end, *now, by)?),
        }
        Ok(())
    }
}
