//! The disk below the host tier: copies of cached blocks, and the orders that move them.
//!
//!     write   a host copy to the disk: behind, when the copy has arrived in the host tier
//!     read    a disk copy to the host tier: for an admission that waits for it; a plan copies it on from there
//!     erase   a tenant's content, or all of it: a reset was about it
//!
//! The worker carries out orders beside the steps, and reports each as done or failed. No step waits for one, and no
//! grant depends on one. An order holds its host block and its disk block until it is reported, so that neither is used
//! for anything else; what is dropped meanwhile is not found afterwards. A copy that could not be written or read is lost.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::cache::accounts::Accounts;
use crate::cache::prefix::Hash;
use crate::cache::tenants::TenantId;
use crate::cache::tier::{Content, Tier, TierBlockCounts, TierBlockId, TierPool};
use crate::cache::tier_copies::TierCopies;
use crate::errors::Result;

/// Orders of each kind that are not reported: more would only wait at the worker.
const MAX_WRITES: usize = 16;
const MAX_READS: usize = 64;

/// An order to the worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum DiskOrder {
    Write {
        host: TierBlockId,
        disk: TierBlockId,
        content: Content,
    },
    Read {
        disk: TierBlockId,
        host: TierBlockId,
        content: Content,
    },
    /// None: the content of all tenants.
    Erase {
        tenant: Option<Vec<u8>>,
    },
}

/// Blocks since the epoch began.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskCounters {
    pub written: u64,
    pub read: u64,
    /// Copies that could not be written or read.
    pub lost: u64,
    /// Found at the start of the epoch.
    pub found: u64,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct DiskTier {
    pool: TierPool,
    /// Not reported, by number.
    orders: BTreeMap<u64, DiskOrder>,
    last_order: u64,
    /// The tenants of orders to erase that have failed: the next epoch has their content erased. None: all.
    unerased: BTreeSet<Option<Vec<u8>>>,
    /// Copies that have arrived in the host tier, by host block and hash, in this order.
    to_write: VecDeque<(TierBlockId, Hash)>,
    counters: DiskCounters,
}

impl DiskTier {
    pub fn new(num_blocks: usize) -> DiskTier {
        DiskTier {
            pool: TierPool::new(Tier::Disk, num_blocks, num_blocks),
            orders: BTreeMap::new(),
            last_order: 0,
            unerased: BTreeSet::new(),
            to_write: VecDeque::new(),
            counters: DiskCounters::default(),
        }
    }

    /// Blocks of the disk; 0: there is none.
    pub fn len(&self) -> usize {
        self.pool.len()
    }

    pub fn copies(&self) -> &TierCopies {
        self.pool.copies()
    }

    pub fn counts(&self) -> TierBlockCounts {
        self.pool.counts()
    }

    pub fn counters(&self) -> DiskCounters {
        self.counters
    }

    /// The number of the last order.
    pub fn last_order(&self) -> u64 {
        self.last_order
    }

    /// The orders that are not reported, behind this number.
    pub fn orders_after(&self, number: u64) -> impl Iterator<Item = (u64, &DiskOrder)> {
        self.orders.range(number + 1..).map(|(number, order)| (*number, order))
    }

    // -- down ---------------------------------------------------------------------------------------------------------

    /// These have arrived in the host tier: they are to be written.
    pub fn note_arrived(&mut self, host: &TierPool, blocks: &[TierBlockId]) {
        if self.len() == 0 {
            return;
        }
        for block in blocks {
            let Some(content) = host.copies().content(*block) else { continue };
            if self.to_write.len() >= host.len() {
                self.to_write.pop_front();
            }
            self.to_write.push_back((*block, content.hash));
        }
    }

    /// Orders the next writes, as far as the worker has few to do. A copy that has left the host tier is not written.
    pub fn write_behind(&mut self, host: &mut TierPool, accounts: &Accounts) {
        while self.num_writes() < MAX_WRITES
            && let Some((block, hash)) = self.to_write.pop_front()
        {
            let Some(content) = host.copies().content(block).filter(|content| content.hash == hash) else { continue };
            let Some(disk) = self.pool.keep(content, accounts) else { continue };
            host.begin_use(&[block]);
            self.order(DiskOrder::Write { host: block, disk, content });
        }
    }

    // -- up -----------------------------------------------------------------------------------------------------------

    /// Orders reads of the first of these copies, for a prompt that has found others in the host tier, which are not to
    /// make room for them. True if the first one is on its way.
    pub fn bring_up(
        &mut self,
        copies: &[TierBlockId],
        found: &[TierBlockId],
        host: &mut TierPool,
        accounts: &Accounts,
    ) -> bool {
        let Some(first) = copies.first() else { return false };
        host.touch(found);
        for disk in copies {
            if self.is_being_read(*disk) {
                continue;
            }
            let Some(content) = self.pool.copies().content(*disk).filter(|_| self.num_reads() < MAX_READS) else {
                break;
            };
            let Some(block) = host.keep(content, accounts) else { break };
            self.pool.begin_use(&[*disk]);
            self.order(DiskOrder::Read { disk: *disk, host: block, content });
        }
        self.is_being_read(*first)
    }

    // -- reports ------------------------------------------------------------------------------------------------------

    /// An order was carried out, or failed. No effect if it is not open.
    pub fn end_order(&mut self, number: u64, is_done: bool, host: &mut TierPool) -> Result<()> {
        let Some(order) = self.orders.remove(&number) else { return Ok(()) };
        match order {
            DiskOrder::Write { host: source, disk, .. } => {
                if is_done {
                    self.pool.arrive(&[disk])
                } else {
                    self.pool.drop_copies(&[disk])
                }
                self.counters.written += u64::from(is_done);
                self.pool.end_holds(&[disk])?;
                host.end_holds(&[source])?;
            }
            DiskOrder::Read { disk, host: target, .. } => {
                if is_done {
                    host.arrive(&[target]);
                } else {
                    host.drop_copies(&[target]);
                    self.pool.drop_copies(&[disk]);
                }
                self.counters.read += u64::from(is_done);
                host.end_holds(&[target])?;
                self.pool.end_holds(&[disk])?;
            }
            DiskOrder::Erase { tenant } => {
                self.end_erasure(tenant, is_done);
                return Ok(());
            }
        }
        self.counters.lost += u64::from(!is_done);
        Ok(())
    }

    fn end_erasure(&mut self, tenant: Option<Vec<u8>>, is_done: bool) {
        match tenant {
            tenant if !is_done => drop(self.unerased.insert(tenant)),
            None => self.unerased.clear(),
            tenant => drop(self.unerased.remove(&tenant)),
        }
    }

    /// Copies that the worker has found on the disk, the ones that were written first in front. Content that is
    /// to be erased is left out.
    pub fn enter_found(&mut self, found: impl Iterator<Item = (TierBlockId, Content, Vec<u8>)>, accounts: &Accounts) {
        let erasing: Vec<_> = self.erasing().cloned().collect();
        let is_erased = |name: &[u8]| erasing.iter().any(|tenant| tenant.as_ref().is_none_or(|tenant| tenant == name));
        let left = found.filter(|(_, _, name)| !is_erased(name)).map(|(block, content, _)| (block, content));
        self.counters.found += self.pool.enter(left, accounts) as u64;
    }

    // -- resets -------------------------------------------------------------------------------------------------------

    /// The content of these tenants is being reset: drops their copies. `tenant` is their name; None: all.
    pub fn begin_reset(&mut self, tenants: Range<TenantId>, tenant: Option<&[u8]>, num_changes: u64) {
        if self.len() > 0 {
            self.pool.begin_reset(tenants, num_changes);
            self.erase(tenant.map(<[u8]>::to_vec));
        }
    }

    /// Has a tenant's content erased; None: that of all.
    pub fn erase(&mut self, tenant: Option<Vec<u8>>) {
        self.order(DiskOrder::Erase { tenant });
    }

    /// The tenants with content that is to be erased, by open orders and by those that have failed; None: all.
    pub fn erasing(&self) -> impl Iterator<Item = &Option<Vec<u8>>> {
        self.orders.values().filter_map(erased_by).chain(&self.unerased)
    }

    /// Open orders to erase.
    pub fn num_erasing(&self) -> usize {
        self.orders.values().filter_map(erased_by).count()
    }

    /// A new epoch begins: the worker has forgotten its orders, and will say what it finds. What was to be erased still
    /// is. The host tier has no copies any more.
    pub fn begin_epoch(&mut self, host: &mut TierPool) -> Result<()> {
        host.end_holds(&self.host_blocks().0)?;
        let erasing: Vec<_> = self.erasing().cloned().collect();
        *self = DiskTier::new(self.len());
        erasing.into_iter().for_each(|tenant| self.erase(tenant));
        Ok(())
    }

    fn order(&mut self, order: DiskOrder) {
        self.last_order += 1;
        self.orders.insert(self.last_order, order);
    }

    fn num_writes(&self) -> usize {
        self.orders.values().filter(|order| matches!(order, DiskOrder::Write { .. })).count()
    }

    fn num_reads(&self) -> usize {
        self.orders.values().filter(|order| matches!(order, DiskOrder::Read { .. })).count()
    }

    fn is_being_read(&self, copy: TierBlockId) -> bool {
        self.orders.values().any(|order| matches!(order, DiskOrder::Read { disk, .. } if *disk == copy))
    }

    // -- checks -------------------------------------------------------------------------------------------------------

    /// The host blocks that orders hold, and those of them to which they copy.
    pub fn host_blocks(&self) -> (Vec<TierBlockId>, Vec<TierBlockId>) {
        let (mut held, mut arriving) = (Vec::new(), Vec::new());
        for order in self.orders.values() {
            match order {
                DiskOrder::Write { host, .. } => held.push(*host),
                DiskOrder::Read { host, .. } => {
                    held.push(*host);
                    arriving.push(*host);
                }
                DiskOrder::Erase { .. } => {}
            }
        }
        (held, arriving)
    }

    /// Reports violations: a disk block has as many holds as orders, and arrives while it is being written.
    pub fn audit(&self, wrong: &mut Vec<String>) {
        let (mut holds, mut arriving) = (vec![0; self.len()], vec![0; self.len()]);
        for order in self.orders.values() {
            match order {
                DiskOrder::Write { disk, .. } => {
                    holds[*disk as usize] += 1;
                    arriving[*disk as usize] += 1;
                }
                DiskOrder::Read { disk, .. } => holds[*disk as usize] += 1,
                DiskOrder::Erase { .. } => {}
            }
        }
        self.pool.audit(&vec![0; self.len()], &holds, &arriving, wrong);
    }

    /// All that a refusal leaves as it was, as text.
    pub fn state(&self) -> String {
        format!("{} {:?} {:?}", self.pool.state(), self.orders, self.to_write)
    }
}

fn erased_by(order: &DiskOrder) -> Option<&Option<Vec<u8>>> {
    match order {
        DiskOrder::Erase { tenant } => Some(tenant),
        _ => None,
    }
}
