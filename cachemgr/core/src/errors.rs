//! Errors: refusals of a request, and broken invariants.

use std::borrow::Cow;
use std::fmt::Display;

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The reason why something is refused.
pub use crate::wire::messages::ErrorReason as Reason;

impl Reason {
    /// The name without its prefix, as in an error's `reason`.
    pub fn name(self) -> &'static str {
        self.as_str_name().trim_start_matches("ERROR_REASON_")
    }
}

/// In the state directory a reason is its number in the contract.
impl Serialize for Reason {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        i32::from(*self).serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Reason {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Reason, D::Error> {
        Reason::try_from(i32::deserialize(deserializer)?).map_err(Error::custom)
    }
}

/// One no: the reason, a sentence, and every number of the sentence by name.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Refusal {
    pub reason: Reason,
    pub message: String,
    pub metadata: Vec<(Cow<'static, str>, String)>,
}

impl Refusal {
    pub fn new(reason: Reason, message: String) -> Refusal {
        Refusal { reason, message, metadata: Vec::new() }
    }

    /// Adds one number of the message.
    pub fn with(mut self, name: &'static str, value: impl Display) -> Refusal {
        self.metadata.push((name.into(), value.to_string()));
        self
    }
}

/// A field that is out of range: names the field, its value and the limit.
pub fn invalid(field: &str, value: impl Display, limit: impl Display) -> Refusal {
    Refusal::new(Reason::InvalidArgument, format!("{field} is {value}; must be {limit}"))
        .with("field", field)
        .with("value", value)
        .with("limit", limit)
}

/// Why a call has no answer.
#[derive(Debug)]
pub enum Failure {
    /// The whole call is refused, and nothing was changed.
    Refused(Refusal),
    /// The books are wrong. Nothing may be granted any more.
    Broken(String),
}

pub type Result<T> = std::result::Result<T, Failure>;

/// The books are wrong, for this reason.
pub fn broken<T>(what: String) -> Result<T> {
    Err(Failure::Broken(what))
}
