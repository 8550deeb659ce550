//! The reason why a block of a prefix is not found.

use serde::{Deserialize, Serialize};

use crate::cache::losses::Loss;
use crate::cache::tenants::TenantId;

/// Why a block of a prefix can't be found.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub enum Miss {
    /// There is none.
    None,
    NeverComputed,
    /// Lost or never computed: the memory of losses has forgotten some.
    Unknown,
    Lost(Loss),
    /// A layer group without a window has the block, one with a window lost it; when, if that is known.
    WindowLost(Option<Loss>),
    BeingComputed,
    OtherSalt,
    OtherAdapter,
    OtherTenant(TenantId),
}

impl Miss {
    /// The loss of the block, if it is known.
    pub fn loss(&self) -> Option<&Loss> {
        match self {
            Miss::Lost(loss) | Miss::WindowLost(Some(loss)) => Some(loss),
            _ => None,
        }
    }
}
