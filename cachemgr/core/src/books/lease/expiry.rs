//! The expiry times of leases, and the order of leases in lists. Time is an argument.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BinaryHeap, HashMap};

use sha2::{Digest, Sha256};

use crate::books::lease::Lease;

pub const SPARE_ENTRIES: usize = 256;
/// When the loop was held, no lease ends within this time, in seconds: renewals that wait are read first. Once for each
/// renewal.
pub const GRACE_S: f64 = 1.0;

impl Lease {
    /// True if it has not ended.
    pub fn is_open(&self) -> bool {
        !self.is_ending
    }

    pub fn renew(&mut self, now: f64) {
        (self.expires_at, self.had_grace) = (now + self.ttl, false);
    }

    /// Adds the time in which no renewal could be read, and once the time to read those that wait.
    pub fn extend(&mut self, held: f64, now: f64) {
        self.expires_at += held;
        if !self.had_grace && self.expires_at < now + GRACE_S {
            (self.expires_at, self.had_grace) = (now + GRACE_S, true);
        }
    }
}

/// A lease that may run out at a time.
#[derive(Debug)]
struct Entry {
    at: f64,
    lease_id: String,
}

impl Ord for Entry {
    /// The first to run out is the greatest: heaps have that on top.
    fn cmp(&self, other: &Entry) -> Ordering {
        other.at.total_cmp(&self.at).then_with(|| other.lease_id.cmp(&self.lease_id))
    }
}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Entry) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Entry {
    fn eq(&self, other: &Entry) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Entry {}

/// The leases by expiry. A renewal costs nothing here: an entry that is due too early is put back then.
///
/// The end of a lease costs nothing either. Its entry stays until it is due, or until there are twice as many entries
/// as there were open leases at the last sweep, at least SPARE_ENTRIES; then all of them are checked.
#[derive(Debug, Default)]
pub struct ExpiryQueue {
    entries: BinaryHeap<Entry>,
    limit: usize,
}

impl ExpiryQueue {
    /// Cost: O(log n), on average over many.
    pub fn add(&mut self, lease_id: &str, leases: &HashMap<String, Lease>) {
        if self.entries.len() >= self.limit.max(SPARE_ENTRIES) {
            self.entries.retain(|entry| leases.get(&entry.lease_id).is_some_and(Lease::is_open));
            self.limit = 2 * self.entries.len();
        }
        if let Some(lease) = leases.get(lease_id) {
            self.entries.push(Entry { at: lease.expires_at, lease_id: lease_id.to_string() });
        }
    }

    /// Removes the next expired entry and returns its lease.
    pub fn pop(&mut self, now: f64) -> Option<String> {
        self.entries.peek().filter(|entry| entry.at <= now)?;
        self.entries.pop().map(|entry| entry.lease_id)
    }

    /// The time of the next entry.
    pub fn next(&self) -> Option<f64> {
        self.entries.peek().map(|entry| entry.at)
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }
}

/// Leases by their page keys, so that a page of a list costs no more than its leases.
pub type LeaseOrder = BTreeMap<String, String>;

/// Orders leases in lists without disclosing their ids, which are capabilities: 24 hexadecimal digits.
pub fn page_key(lease_id: &str) -> String {
    Sha256::digest(lease_id)[..12].iter().map(|byte| format!("{byte:02x}")).collect()
}
