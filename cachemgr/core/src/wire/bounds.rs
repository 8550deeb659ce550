//! The limits of requests. All of these are checked before anything is looked up.

use std::fmt::Display;

use crate::cache::advice::{LEAST_WORTH, Level, MOST_WORTH};
use crate::errors::{Failure, Result, invalid};

/// Items of each kind in one plan, also if the pool has room for more sequences.
pub const MAX_PLAN_ITEMS: usize = 8_192;
/// Tokens of all admissions of a plan together, and of all its appended tokens; the longest sequence's length if that
/// is more.
pub const MAX_PLAN_TOKENS: usize = 262_144;
/// The tokens that the children of a plan's forks begin with, all together; or as many as one sequence can have, if more.
pub const MAX_FORKED_TOKENS: usize = 8_388_608;
pub const MAX_REQUEST_ID_BYTES: usize = 64;
pub const MAX_SALT_BYTES: usize = 64;
/// The identity of an adapter.
pub const ADAPTER_BYTES: usize = 32;
pub const MAX_TENANT_LENGTH: usize = 128;
/// Ranges of an admission's retention.
pub const MAX_RANGES: usize = 16;
pub const MAX_RETENTION_S: f64 = 86_400.0;
/// Breakpoints of an admission.
pub const MAX_BREAKPOINTS: usize = 4;
pub const LEAST_KEEP_S: f64 = 1.0;
pub const MAX_KEEP_S: f64 = 86_400.0;
pub const MAX_EXPECTED_S: f64 = 86_400.0;
/// Copies of a part of a disk's content.
pub const MAX_FOUND_COPIES: usize = 8_192;

/// A refused call: a field that is out of range.
pub fn refused<T>(field: &str, value: impl Display, limit: impl Display) -> Result<T> {
    Err(Failure::Refused(invalid(field, value, limit)))
}

/// A list has at most so many entries.
pub fn check_count(field: &str, size: usize, most: usize) -> Result<()> {
    if size <= most {
        return Ok(());
    }
    refused(field, format!("{size} entries"), format!("at most {most} entries"))
}

/// Two lists are parallel.
pub fn check_parallel(field: &str, size: usize, other: &str, other_size: usize) -> Result<()> {
    if size == other_size {
        return Ok(());
    }
    refused(field, format!("{size} entries"), format!("{other_size} entries, as {other}"))
}

/// Text or bytes of at most so many bytes.
pub fn check_bytes(field: &str, size: usize, most: usize) -> Result<()> {
    if size <= most {
        return Ok(());
    }
    refused(field, format!("{size} bytes"), format!("at most {most} bytes"))
}

/// Text of at most so many characters.
pub fn check_length(field: &str, text: &str, most: usize) -> Result<()> {
    let length = text.chars().count();
    if length <= most {
        return Ok(());
    }
    refused(field, format!("{length} characters"), format!("at most {most} characters"))
}

/// The number, if it is not negative.
pub fn not_negative(field: &str, value: i32) -> Result<usize> {
    usize::try_from(value).or_else(|_| refused(field, value, "at least 0"))
}

/// The level, if there is one of this number.
pub fn level(field: &str, value: i32) -> Result<Level> {
    match Level::try_from(value) {
        Ok(level) if (LEAST_WORTH..=MOST_WORTH).contains(&level) => Ok(level),
        _ => refused(field, value, format!("{LEAST_WORTH} to {MOST_WORTH}")),
    }
}

/// Seconds as refusals show them: a fraction always, and an exponent of two digits.
pub fn shown_seconds(seconds: f64) -> String {
    let shown = format!("{seconds:?}");
    let Some((digits, exponent)) = shown.split_once('e') else { return format!("{shown} s") };
    let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |exponent| ('-', exponent));
    format!("{digits}e{sign}{exponent:0>2} s")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_are_shown_with_a_fraction_or_an_exponent() {
        let shown = [86_401.0, -0.5, 1e-9, 9.2e18].map(shown_seconds);
        assert_eq!(shown, ["86401.0 s", "-0.5 s", "1e-09 s", "9.2e+18 s"]);
    }
}
