//! The adapters of a pool's worker, as it registered them, and the adapters that each tenant may use.

use std::collections::{BTreeMap, BTreeSet};

use crate::books::plans::Admission;
use crate::errors::{Refusal, invalid};

/// Adapters that an error names.
const SHOWN: usize = 8;

/// Names of adapters; None: all of them.
type Names = Option<BTreeSet<String>>;

/// The adapters that tenants may use: of all tenants, and of those with a section of their own.
#[derive(Debug, Default)]
pub struct AdapterRights {
    pub default: Names,
    pub by_tenant: BTreeMap<Vec<u8>, Names>,
}

impl AdapterRights {
    fn of(&self, tenant: &[u8]) -> &Names {
        self.by_tenant.get(tenant).unwrap_or(&self.default)
    }
}

/// Names of adapters by identity; None: the worker has not said which it has.
#[derive(Debug, Default)]
pub struct Adapters(Option<BTreeMap<Vec<u8>, BTreeSet<String>>>);

impl Adapters {
    /// These adapters: the identity and the name of each.
    pub fn known(adapters: Vec<(Vec<u8>, String)>) -> Adapters {
        let mut known: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
        for (identity, name) in adapters {
            known.entry(identity).or_default().insert(name);
        }
        Adapters(Some(known))
    }

    /// The refusal of an adapter that is not here, or that the tenant may not use: an adapter that it may not use does not
    /// exist for it. `field` is the adapter's in the request.
    pub fn refuse(&self, field: &str, adapter: &[u8], tenant: &[u8], rights: &AdapterRights) -> Option<Refusal> {
        if adapter.is_empty() {
            return None;
        }
        let allowed = rights.of(tenant);
        let known = match &self.0 {
            Some(known) => known,
            None if allowed.is_none() => return None,
            None => &BTreeMap::new(),
        };
        let may_use = |name: &&String| allowed.as_ref().is_none_or(|allowed| allowed.contains(*name));
        if known.get(adapter).is_some_and(|names| names.iter().any(|name| may_use(&name))) {
            return None;
        }
        let shown = |(identity, names): (&Vec<u8>, &BTreeSet<String>)| {
            names.iter().find(may_use).map(|name| format!("{name} ({})", hex(identity)))
        };
        let names: Vec<String> = known.iter().filter_map(shown).collect();
        let limit = match names.len() {
            0 => "empty: the pool's worker has no adapters".to_string(),
            count => {
                let first = names[..count.min(SHOWN)].join(", ");
                format!("one of the {count} adapters of the pool's worker, like {first}")
            }
        };
        Some(invalid(field, hex(adapter), limit))
    }

    /// The same for a tenant's admission.
    pub fn refuse_admission(&self, admission: &Admission, tenant: &[u8], rights: &AdapterRights) -> Option<Refusal> {
        let refusal = self.refuse("admissions.adapter", &admission.namespace.adapter, tenant, rights)?;
        Some(refusal.with("sequence_id", admission.seq_id))
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(adapters: &Adapters, adapter: &[u8]) -> Option<Vec<(String, String)>> {
        refused_to(adapters, adapter, b"", &AdapterRights::default())
    }

    fn refused_to(
        adapters: &Adapters,
        adapter: &[u8],
        tenant: &[u8],
        rights: &AdapterRights,
    ) -> Option<Vec<(String, String)>> {
        let refusal = adapters.refuse("adapter", adapter, tenant, rights)?;
        Some(refusal.metadata.into_iter().map(|(name, value)| (name.to_string(), value)).collect())
    }

    #[test]
    fn an_adapter_is_refused_if_the_worker_says_that_it_has_others() {
        assert_eq!(refused(&Adapters::default(), b"any"), None);
        let known = Adapters::known(vec![(vec![1], "one".into()), (vec![2], "two".into())]);
        assert_eq!(refused(&known, b""), None);
        assert_eq!(refused(&known, &[2]), None);
        let metadata = refused(&known, &[3]).expect("it is not there");
        assert!(metadata.contains(&("field".into(), "adapter".into())));
        assert!(metadata.contains(&("value".into(), "03".into())));
        let limit = "one of the 2 adapters of the pool's worker, like one (01), two (02)";
        assert!(metadata.contains(&("limit".into(), limit.into())));
        assert!(refused(&Adapters::known(Vec::new()), &[3]).is_some());
    }
    #[test]
    fn an_adapter_that_a_tenant_may_not_use_does_not_exist_for_it() {
        let names = |names: &[&str]| Some(names.iter().map(|name| name.to_string()).collect());
        let by_tenant = [(b"alice".to_vec(), names(&["two", "same"])), (b"bob".to_vec(), None)].into();
        let rights = AdapterRights { default: names(&[]), by_tenant };
        let pairs = [(1, "one"), (2, "two"), (3, "other"), (3, "same")];
        let known = Adapters::known(pairs.iter().map(|(id, name)| (vec![*id], name.to_string())).collect());
        let limit_for = |tenant: &[u8], adapter: u8| {
            let metadata = refused_to(&known, &[adapter], tenant, &rights)?;
            metadata.into_iter().find(|(name, _)| name == "limit").map(|(_, limit)| limit)
        };
        let of_alice = "one of the 2 adapters of the pool's worker, like two (02), same (03)";
        assert_eq!(limit_for(b"alice", 1).as_deref(), Some(of_alice));
        assert_eq!((limit_for(b"alice", 2), limit_for(b"alice", 3)), (None, None));
        assert_eq!((limit_for(b"bob", 1), limit_for(b"carol", 0).is_some()), (None, true));
        assert_eq!(limit_for(b"carol", 2).as_deref(), Some("empty: the pool's worker has no adapters"));
        let unknown = Adapters::default();
        assert_eq!(refused_to(&unknown, &[1], b"bob", &rights), None);
        assert!(refused_to(&unknown, &[2], b"alice", &rights).is_some(), "it can't be known to be one of alice's");
        assert_eq!(refused_to(&known, b"", b"carol", &rights), None);
    }
}
