//! The plans that a lease was answered, kept for repeated requests.

use std::collections::VecDeque;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::books::plans::GrantedStep;
use crate::errors::{Failure, Reason, Refusal, Result};

/// Answers kept per lease for a repeated request id.
pub const REMEMBERED_PLANS: usize = 8;

/// Identifies a repeated request.
#[derive(Debug, Clone, Copy, Default)]
pub struct RequestKey<'a> {
    /// Empty: it is not repeated.
    pub request_id: &'a str,
    /// Digest of the request.
    pub digest: &'a [u8],
}

/// A plan that was answered.
#[derive(Debug, Serialize, Deserialize)]
struct Answer {
    request_id: String,
    /// Digest of the request.
    digest: Vec<u8>,
    plan: Arc<GrantedStep>,
}

/// The last answers of a lease, the oldest first.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct RememberedPlans(VecDeque<Answer>);

impl RememberedPlans {
    /// The answer that was given to this request id, if it is remembered. Refused (REQUEST_ID_REUSED) if that was
    /// another request.
    pub fn recall(&self, key: &RequestKey) -> Result<Option<Arc<GrantedStep>>> {
        let Some(answer) = self.0.iter().find(|answer| answer.request_id == key.request_id) else {
            return Ok(None);
        };
        if answer.digest != key.digest {
            let message = format!("request_id '{}' was used for another plan", key.request_id);
            let refusal = Refusal::new(Reason::RequestIdReused, message).with("request_id", key.request_id);
            return Err(Failure::Refused(refusal));
        }
        Ok(Some(answer.plan.clone()))
    }

    /// Keeps the answer to a request id for a repetition, and drops the oldest beyond REMEMBERED_PLANS.
    pub fn remember(&mut self, key: &RequestKey, plan: &Arc<GrantedStep>) {
        if key.request_id.is_empty() {
            return;
        }
        let (request_id, digest) = (key.request_id.to_string(), key.digest.to_vec());
        self.0.push_back(Answer { request_id, digest, plan: plan.clone() });
        if self.0.len() > REMEMBERED_PLANS {
            self.0.pop_front();
        }
    }
}
