//! Changes of the advice on the retention of blocks.

use crate::cache::advice::{Advice, Millis};
use crate::cache::eviction::parking::Parking;
use crate::cache::journal::Journal;
use crate::cache::prefix::BlockId;
use crate::cache::tenants::TenantId;

/// The parts of a pool that advice changes.
pub struct Advisor<'a> {
    pub parking: &'a mut Parking,
    pub owners: &'a [TenantId],
    pub journal: &'a mut Journal,
}

impl Advisor<'_> {
    /// Enters advice about blocks, the last one of a table first.
    pub fn advise(&mut self, blocks: &[BlockId], advice: Advice) {
        if let Some(first) = blocks.first() {
            self.parking.advise(blocks, advice, self.owners[*first as usize]);
            self.journal.touch_all(blocks, self.owners);
        }
    }

    /// A prompt waits for these blocks: see Parking::expect.
    pub fn expect(&mut self, blocks: &[BlockId], until: Millis) {
        if let Some(first) = blocks.first() {
            self.parking.expect(blocks, until, self.owners[*first as usize]);
            self.journal.touch_all(blocks, self.owners);
        }
    }

    /// A prompt has found these blocks: see Parking::end_waits.
    pub fn end_waits(&mut self, blocks: &[BlockId]) {
        if let Some(first) = blocks.first() {
            let met = self.parking.end_waits(blocks, self.owners[*first as usize]);
            self.journal.touch_all(&met, self.owners);
        }
    }

    /// Ends the expired advice.
    pub fn end(&mut self, now: Millis) {
        let (owners, mut ended) = (self.owners, Vec::new());
        self.parking.end_advice(now, |block| owners[block as usize], &mut ended);
        self.journal.touch_all(&ended, owners);
    }
}
