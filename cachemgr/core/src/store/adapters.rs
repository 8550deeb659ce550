//! The adapters of a pool's worker, as it registered them.

use std::collections::BTreeMap;

use crate::errors::{Failure, Result, invalid};

/// Adapters that an error names.
const SHOWN: usize = 8;

/// Names of adapters by identity; None: the worker has not said which it has.
#[derive(Debug, Default)]
pub struct Adapters(Option<BTreeMap<Vec<u8>, String>>);

impl Adapters {
    /// These adapters: the identity and the name of each.
    pub fn known(adapters: Vec<(Vec<u8>, String)>) -> Adapters {
        Adapters(Some(adapters.into_iter().collect()))
    }

    /// Refuses a sequence with an adapter that is not here.
    pub fn check(&self, seq_id: i64, adapter: &[u8]) -> Result<()> {
        let Some(known) = &self.0 else { return Ok(()) };
        if adapter.is_empty() || known.contains_key(adapter) {
            return Ok(());
        }
        let shown = |(identity, name): (&Vec<u8>, &String)| format!("{name} ({})", hex(identity));
        let names: Vec<String> = known.iter().take(SHOWN).map(shown).collect();
        let limit = match known.len() {
            0 => "empty: the pool's worker has no adapters".to_string(),
            count => format!("one of the {count} adapters of the pool's worker, like {}", names.join(", ")),
        };
        Err(Failure::Refused(invalid("admissions.adapter", hex(adapter), limit).with("sequence_id", seq_id)))
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(adapters: &Adapters, adapter: &[u8]) -> Option<Vec<(String, String)>> {
        match adapters.check(7, adapter) {
            Err(Failure::Refused(refusal)) => {
                Some(refusal.metadata.into_iter().map(|(name, value)| (name.to_string(), value)).collect())
            }
            _ => None,
        }
    }

    #[test]
    fn an_adapter_is_refused_if_the_worker_says_that_it_has_others() {
        assert_eq!(refused(&Adapters::default(), b"any"), None);
        let known = Adapters::known(vec![(vec![1], "one".into()), (vec![2], "two".into())]);
        assert_eq!(refused(&known, b""), None);
        assert_eq!(refused(&known, &[2]), None);
        let metadata = refused(&known, &[3]).expect("it is not there");
        assert!(metadata.contains(&("sequence_id".into(), "7".into())));
        assert!(metadata.contains(&("value".into(), "03".into())));
        let limit = "one of the 2 adapters of the pool's worker, like one (01), two (02)";
        assert!(metadata.contains(&("limit".into(), limit.into())));
        assert!(refused(&Adapters::known(Vec::new()), &[3]).is_some());
    }
}
