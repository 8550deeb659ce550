//! Tenants of a pool. Each block with content has exactly one, since the root of prefix hashes is keyed by the tenant.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

/// A tenant of this pool, numbered in the order of their first use.
pub type TenantId = u32;

/// The limit of tenants that sequences may name, with those known already. None is removed, so the limit is low.
pub const MAX_TENANTS: usize = 10_000;

/// The tenant and lease that allocate blocks, and the time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Asker {
    pub tenant: TenantId,
    /// The beginning of the lease's name.
    pub lease: [u8; 8],
    /// Seconds of the caller's clock.
    pub now: f64,
}

/// Names of tenants and back. None is removed.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Tenants {
    names: Vec<Vec<u8>>,
    ids: HashMap<Vec<u8>, TenantId>,
}

impl Tenants {
    /// The tenant of this name, a new one if there was none.
    pub fn enter(&mut self, name: &[u8]) -> TenantId {
        if let Some(id) = self.ids.get(name) {
            return *id;
        }
        let id = self.names.len() as TenantId;
        self.names.push(name.to_vec());
        self.ids.insert(name.to_vec(), id);
        id
    }

    pub fn find(&self, name: &[u8]) -> Option<TenantId> {
        self.ids.get(name).copied()
    }

    pub fn name(&self, id: TenantId) -> &[u8] {
        &self.names[id as usize]
    }

    pub fn len(&self) -> usize {
        self.names.len()
    }
}

/// The beginning of a name, padded with zeros.
pub fn beginning_of(name: &str) -> [u8; 8] {
    let mut beginning = [0; 8];
    beginning.iter_mut().zip(name.bytes()).for_each(|(cell, byte)| *cell = byte);
    beginning
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenant_keeps_its_number() {
        let mut tenants = Tenants::default();
        assert_eq!([&b"a"[..], b"", b"a", b"b", b""].map(|name| tenants.enter(name)), [0, 1, 0, 2, 1]);
        assert_eq!(
            (tenants.name(1), tenants.find(b"b"), tenants.find(b"c"), tenants.len()),
            (&b""[..], Some(2), None, 3)
        );
    }

    #[test]
    fn a_name_is_cut_or_filled_up() {
        assert_eq!(beginning_of("0123456789"), *b"01234567");
        assert_eq!(beginning_of("012"), *b"012\0\0\0\0\0");
    }
}
