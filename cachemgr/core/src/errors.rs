//! Errors: refusals of a request, and broken invariants.

use std::borrow::Cow;
use std::fmt::Display;

use serde::{Deserialize, Serialize};

/// Why something is refused; the names of `quire.cache.v1.ErrorReason` without their prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reason {
    InvalidArgument,
    EmptyPrompt,
    SequenceTooLong,
    TokenOutOfRange,
    PositionOutOfRange,
    SequenceNotFound,
    PrefixNotCached,
    SequenceExists,
    NothingToCompute,
    OutOfBlocks,
    OutOfHostBlocks,
    SequenceOffloaded,
    SequenceBusy,
    TooManySequences,
    TooManySteps,
    TokenBudgetSpent,
    QuotaExceeded,
    PinBudgetSpent,
    RequestIdReused,
    EpochChanged,
    RoleMissing,
}

impl Reason {
    pub fn name(self) -> &'static str {
        match self {
            Reason::InvalidArgument => "INVALID_ARGUMENT",
            Reason::EmptyPrompt => "EMPTY_PROMPT",
            Reason::SequenceTooLong => "SEQUENCE_TOO_LONG",
            Reason::TokenOutOfRange => "TOKEN_OUT_OF_RANGE",
            Reason::PositionOutOfRange => "POSITION_OUT_OF_RANGE",
            Reason::SequenceNotFound => "SEQUENCE_NOT_FOUND",
            Reason::PrefixNotCached => "PREFIX_NOT_CACHED",
            Reason::SequenceExists => "SEQUENCE_EXISTS",
            Reason::NothingToCompute => "NOTHING_TO_COMPUTE",
            Reason::OutOfBlocks => "OUT_OF_BLOCKS",
            Reason::OutOfHostBlocks => "OUT_OF_HOST_BLOCKS",
            Reason::SequenceOffloaded => "SEQUENCE_OFFLOADED",
            Reason::SequenceBusy => "SEQUENCE_BUSY",
            Reason::TooManySequences => "TOO_MANY_SEQUENCES",
            Reason::TooManySteps => "TOO_MANY_STEPS",
            Reason::TokenBudgetSpent => "TOKEN_BUDGET_SPENT",
            Reason::QuotaExceeded => "QUOTA_EXCEEDED",
            Reason::PinBudgetSpent => "PIN_BUDGET_SPENT",
            Reason::RequestIdReused => "REQUEST_ID_REUSED",
            Reason::EpochChanged => "EPOCH_CHANGED",
            Reason::RoleMissing => "ROLE_MISSING",
        }
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
