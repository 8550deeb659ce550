//! The budget of tokens that restores and admissions of one plan share.

use crate::errors::{Reason, Refusal};

/// The tokens that may still be computed; None: no limit.
pub(super) struct Budget(Option<usize>);

impl Budget {
    /// `num_tokens`: 0 for no limit.
    pub(super) fn new(num_tokens: usize) -> Budget {
        Budget((num_tokens > 0).then_some(num_tokens))
    }

    /// Of so many tokens, those that may be computed within the budget and a limit (0: no limit).
    pub(super) fn num_within(&self, num_tokens: usize, max_compute: usize) -> usize {
        let limits = [(max_compute > 0).then_some(max_compute), self.0];
        limits.into_iter().flatten().fold(num_tokens, usize::min)
    }

    pub(super) fn spend(&mut self, num_tokens: usize) {
        self.0 = self.0.map(|left| left - num_tokens);
    }

    /// Refuses a sequence if nothing is left.
    pub(super) fn refuse_spent(&self, seq_id: i64) -> Option<Refusal> {
        if self.0 != Some(0) {
            return None;
        }
        let message = format!("the plan's admission_token_budget was used up before sequence {seq_id}");
        Some(Refusal::new(Reason::TokenBudgetSpent, message).with("sequence_id", seq_id))
    }
}
