//! All leases of a pool: renewed, extended, expired, and listed.

use std::collections::HashMap;
use std::ops::Index;

use serde::{Deserialize, Serialize};

use crate::books::lease::Lease;
use crate::books::lease::expiry::{ExpiryQueue, LeaseOrder, page_key};
use crate::books::sequences::Row;
use crate::books::steps::StepInFlight;

/// The leases of a pool by id. One that has ended is here until its blocks are freed.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Leases {
    by_id: HashMap<String, Lease>,
    #[serde(skip)]
    expiry: ExpiryQueue,
    #[serde(skip)]
    order: LeaseOrder,
}

impl Leases {
    pub fn get(&self, lease_id: &str) -> Option<&Lease> {
        self.by_id.get(lease_id)
    }

    pub fn get_mut(&mut self, lease_id: &str) -> Option<&mut Lease> {
        self.by_id.get_mut(lease_id)
    }

    /// The lease, if it has not ended.
    pub fn open_mut(&mut self, lease_id: &str) -> Option<&mut Lease> {
        self.by_id.get_mut(lease_id).filter(|lease| lease.is_open())
    }

    pub fn len(&self) -> usize {
        self.by_id.len()
    }

    /// All leases with their ids.
    pub fn iter(&self) -> impl Iterator<Item = (&String, &Lease)> {
        self.by_id.iter()
    }

    pub fn values(&self) -> impl Iterator<Item = &Lease> {
        self.by_id.values()
    }

    /// The steps in flight of all leases.
    pub fn steps(&self) -> impl Iterator<Item = &StepInFlight> {
        self.values().flat_map(|lease| &lease.in_flight)
    }

    /// The rows of all leases' sequences.
    pub fn rows(&self) -> impl Iterator<Item = Row> {
        self.values().flat_map(|lease| lease.sequences.values().copied())
    }

    /// A new lease. Its id must be new.
    pub fn enter(&mut self, lease_id: &str, lease: Lease) {
        let before = self.by_id.insert(lease_id.to_string(), lease);
        assert!(before.is_none(), "lease {lease_id:.8} is opened twice");
        self.order.insert(page_key(lease_id), lease_id.to_string());
    }

    pub fn remove(&mut self, lease_id: &str) -> Option<Lease> {
        let lease = self.by_id.remove(lease_id)?;
        self.order.remove(&page_key(lease_id));
        Some(lease)
    }

    // -- time ---------------------------------------------------------------------------------------------------------

    /// Sets a lease's expiry. `had_grace`: the value from an earlier epoch.
    pub fn set_expiry(&mut self, lease_id: &str, expires_at: f64, had_grace: bool) {
        let Some(lease) = self.by_id.get_mut(lease_id) else { return };
        (lease.expires_at, lease.had_grace) = (expires_at, had_grace);
        self.expiry.add(lease_id, &self.by_id);
    }

    /// Renews all leases of stored books, since no client could renew them meanwhile. Cost: O(leases).
    pub fn resume(&mut self, now: f64) {
        self.by_id.values_mut().for_each(|lease| lease.renew(now));
        self.order = self.by_id.keys().map(|lease_id| (page_key(lease_id), lease_id.clone())).collect();
        self.expiry = ExpiryQueue::default();
        for lease_id in self.by_id.keys() {
            self.expiry.add(lease_id, &self.by_id);
        }
    }

    /// An open lease that has expired; the caller ends it. Cost: O(log n) for each entry that is due.
    pub fn next_expired(&mut self, now: f64) -> Option<String> {
        while let Some(lease_id) = self.expiry.pop(now) {
            match self.by_id.get(&lease_id).filter(|lease| lease.is_open()) {
                Some(lease) if lease.expires_at > now => self.expiry.add(&lease_id, &self.by_id),
                Some(_) => return Some(lease_id),
                None => (),
            }
        }
        None
    }

    /// Adds the time in which no renewal could be read to the time of every lease. Cost: O(leases).
    pub fn extend(&mut self, held: f64, now: f64) {
        self.by_id.values_mut().for_each(|lease| lease.extend(held, now));
    }

    /// No lease runs out before this.
    pub fn next_expiry(&self) -> Option<f64> {
        self.expiry.next()
    }

    /// The ids of at most `most` leases from a page key on, with their keys.
    pub fn page(&self, key: &str, most: usize) -> impl Iterator<Item = (&String, &String)> {
        self.order.range(key.to_string()..).take(most)
    }
}

impl Index<&str> for Leases {
    type Output = Lease;

    fn index(&self, lease_id: &str) -> &Lease {
        &self.by_id[lease_id]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::books::Books;
    use crate::books::lease::expiry::{GRACE_S, SPARE_ENTRIES};
    use crate::books::tests::geometry;

    fn books_with(leases: &[(&str, f64)]) -> Books {
        let mut books = Books::new(geometry(4), "lru").unwrap();
        for (lease_id, expires_at) in leases {
            books.open_lease(lease_id, b"", 10.0);
            books.leases.set_expiry(lease_id, *expires_at, false);
        }
        books
    }

    fn expire(books: &mut Books, now: f64) -> Vec<String> {
        let next = || {
            let lease_id = books.leases.next_expired(now)?;
            books.end_lease(&lease_id);
            Some(lease_id)
        };
        std::iter::from_fn(next).collect()
    }

    #[test]
    fn leases_expire_in_order_unless_they_were_renewed_ended_or_gone() {
        let mut books = books_with(&[]);
        assert_eq!(books.leases.next_expiry(), None);
        books = books_with(&[("c", 3.0), ("a", 1.0), ("b", 2.0), ("d", 4.0), ("e", 3.5)]);
        assert_eq!(books.leases.next_expiry(), Some(1.0));
        books.end_lease("b");
        books.leases.open_mut("a").unwrap().expires_at = 5.0;
        books.close_lease("c").unwrap();
        assert!(expire(&mut books, 0.9).is_empty());
        assert_eq!(expire(&mut books, 4.0), ["e", "d"]);
        assert_eq!(books.leases.next_expiry(), Some(5.0));
        assert_eq!(expire(&mut books, 5.0), ["a"]);
        assert_eq!(books.leases.next_expiry(), None);
    }

    #[test]
    fn leases_that_ended_do_not_pile_up() {
        let kept: Vec<_> = (0..300).map(|number| (format!("kept {number:03}"), 1e6 + f64::from(number))).collect();
        let mut books = books_with(&kept.iter().map(|(id, at)| (id.as_str(), *at)).collect::<Vec<_>>());
        for number in 0..20_000 {
            let lease_id = format!("brief {number}");
            books.open_lease(&lease_id, b"", 10.0);
            books.leases.set_expiry(&lease_id, 1e5 + f64::from(number), false);
            if number % 2 == 0 {
                books.end_lease(&lease_id)
            } else {
                books.close_lease(&lease_id).unwrap()
            }
            assert!(books.leases.expiry.len() <= 2 * (kept.len() + 1) + SPARE_ENTRIES);
        }
        assert!(expire(&mut books, 2e5).is_empty());
        assert_eq!(expire(&mut books, 2e6), kept.into_iter().map(|(id, _)| id).collect::<Vec<_>>());
    }

    #[test]
    fn a_held_loop_takes_no_time_of_a_lease_and_leaves_some_to_read_renewals() {
        for (expires_at, extended) in [(105.0, 113.0), (100.01, 109.0), (99.0, 109.0), (108.5, 116.5)] {
            let mut books = books_with(&[("a", expires_at)]);
            books.leases.extend(8.0, 108.0); // held from 100.0
            assert_eq!(books.leases["a"].expires_at, extended);
        }
    }

    #[test]
    fn a_lease_gets_the_grace_time_once_for_each_renewal() {
        let mut books = books_with(&[("a", 1.0)]);
        let lease = books.leases.open_mut("a").unwrap();
        lease.extend(0.0, 2.0);
        assert_eq!(lease.expires_at, 2.0 + GRACE_S);
        lease.extend(0.5, 3.0);
        assert_eq!(lease.expires_at, 2.5 + GRACE_S);
        lease.renew(3.0);
        assert_eq!(lease.expires_at, 13.0);
        lease.extend(0.0, 14.0);
        assert_eq!(lease.expires_at, 14.0 + GRACE_S);
    }

    #[test]
    fn a_page_of_leases_goes_by_keys_that_do_not_give_the_ids_away() {
        assert_eq!(page_key("abc"), "ba7816bf8f01cfea414140de");
        let mut books = books_with(&[("a", 1.0), ("b", 1.0), ("c", 1.0), ("d", 1.0)]);
        books.close_lease("c").unwrap();
        let mut expected = ["a", "b", "d"].map(page_key);
        expected.sort();
        let listed = |key: &str, most| books.leases.page(key, most).map(|(key, _)| key.clone()).collect::<Vec<_>>();
        assert_eq!(listed("", 9), expected);
        assert_eq!(listed(&expected[1], 1), expected[1..2]);
        assert!(books.leases.page("", 9).all(|(key, lease_id)| *key == page_key(lease_id)));
    }

    #[test]
    fn leases_of_stored_books_have_their_whole_time_again() {
        let mut books = books_with(&[("a", 1.0), ("b", 2.0)]);
        books.end_lease("b");
        books.leases.resume(100.0);
        assert_eq!((books.leases.next_expiry(), books.leases.page("", 9).count()), (Some(110.0), 2));
        assert_eq!(expire(&mut books, 110.0), ["a"]);
    }
}
