//! Each tenant's use of a pool, and its limits.
//!
//!     held      active, retired and pinned blocks: not available to others
//!     cached    in the index, without a holder: the tenant's until they are evicted
//!     reserved  guaranteed to its sequences, and not held yet
//!     promised  always available to it: the reserved blocks, or those missing to its floor, whichever is more

use serde::{Deserialize, Serialize};

use crate::cache::tenants::TenantId;

/// The limits of a tenant in a pool, in blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// It can always hold as many.
    pub floor: usize,
    /// While it holds and caches more, its cached blocks go before others'.
    pub quota: usize,
    /// It never holds more.
    pub limit: usize,
    /// It never pins more.
    pub pin_budget: usize,
    /// Breakpoints of its prompts never keep more.
    pub keep_limit: usize,
}

impl Share {
    /// The share of a tenant without limits.
    pub fn everything(num_usable: usize) -> Share {
        Share { floor: 0, quota: num_usable, limit: num_usable, pin_budget: num_usable, keep_limit: num_usable }
    }
}

/// Tokens of a tenant's admitted prompts. Resumed admissions do not count.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenCounts {
    pub admitted: u64,
    /// Found in the prefix cache.
    pub cached: u64,
    /// To be computed in full blocks, and published.
    pub written: u64,
}

/// One tenant's part of the pool, in blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Account {
    pub share: Share,
    pub num_held: usize,
    pub num_cached: usize,
    pub num_reserved: usize,
    /// Held blocks that are pinned, whether sequences hold them too or not.
    pub num_pinned: usize,
    pub tokens: TokenCounts,
}

impl Account {
    fn new(share: Share) -> Account {
        Account { share, num_held: 0, num_cached: 0, num_reserved: 0, num_pinned: 0, tokens: TokenCounts::default() }
    }

    fn num_promised(&self) -> usize {
        self.num_reserved.max(self.share.floor.saturating_sub(self.num_held))
    }

    fn num_over_quota(&self) -> usize {
        (self.num_held + self.num_cached).saturating_sub(self.share.quota)
    }

    /// Blocks that its sequences hold or are guaranteed.
    pub fn num_charged(&self) -> usize {
        self.num_held + self.num_reserved
    }
}

/// All tenants' accounts, by tenant. Every change is O(1).
#[derive(Debug, Serialize, Deserialize)]
pub struct Accounts {
    accounts: Vec<Account>,
    num_usable: usize,
    num_promised: usize,
    num_reserved: usize,
    num_floors: usize,
    has_quotas: bool,
}

impl Accounts {
    pub fn new(num_usable: usize) -> Accounts {
        Accounts {
            accounts: Vec::new(),
            num_usable,
            num_promised: 0,
            num_reserved: 0,
            num_floors: 0,
            has_quotas: false,
        }
    }

    /// Opens the account of a new tenant, or gives another share to one that is known.
    pub fn set_share(&mut self, tenant: TenantId, share: Share) {
        if tenant as usize == self.accounts.len() {
            self.accounts.push(Account::new(Share { floor: 0, ..share }));
        }
        self.change(tenant, |account| account.share = share);
        self.num_floors = self.accounts.iter().map(|account| account.share.floor).sum();
        self.has_quotas = self.accounts.iter().any(|account| account.share.quota < self.num_usable);
    }

    pub fn get(&self, tenant: TenantId) -> &Account {
        &self.accounts[tenant as usize]
    }

    /// The pool's blocks, without the null block.
    pub fn num_usable(&self) -> usize {
        self.num_usable
    }

    pub fn len(&self) -> usize {
        self.accounts.len()
    }

    /// True if any tenant's cached blocks may have to go before others'.
    pub fn has_quotas(&self) -> bool {
        self.has_quotas
    }

    /// Guaranteed to sequences of all tenants, and not held yet.
    pub fn num_reserved(&self) -> usize {
        self.num_reserved
    }

    /// Of so many allocatable blocks, those that the tenant may take beyond its promised ones.
    pub fn num_available(&self, tenant: TenantId, num_allocatable: usize) -> usize {
        let account = self.get(tenant);
        let num_unclaimed = account.num_promised() - account.num_reserved; // of its floor
        num_allocatable.saturating_sub(self.num_promised - num_unclaimed)
    }

    /// Of so many allocatable blocks, those that are promised to no tenant.
    pub fn num_spare(&self, num_allocatable: usize) -> usize {
        num_allocatable.saturating_sub(self.num_promised)
    }

    /// The most that a tenant could ever hold.
    pub fn most(&self, tenant: TenantId) -> usize {
        let share = self.get(tenant).share;
        share.limit.min(self.num_usable.saturating_sub(self.num_floors - share.floor))
    }

    /// The tenants that lose cached blocks first if `count` blocks are allocated to a tenant, and the number of
    /// each: its own, if that puts it over its quota, and those of others over theirs, the one most over first.
    pub fn reclaims(&self, asker: TenantId, count: usize) -> Vec<(TenantId, usize)> {
        if !self.has_quotas {
            return Vec::new();
        }
        let over = |(tenant, account): (usize, &Account)| {
            let is_asker = tenant == asker as usize;
            let num_over = Account { num_held: account.num_held + if is_asker { count } else { 0 }, ..*account };
            let num_reclaimed = num_over.num_over_quota().min(account.num_cached);
            (num_reclaimed > 0).then_some((!is_asker, std::cmp::Reverse(num_reclaimed), tenant as TenantId))
        };
        let mut reclaims: Vec<_> = self.accounts.iter().enumerate().filter_map(over).collect();
        reclaims.sort_unstable();
        reclaims.into_iter().map(|(_, num_reclaimed, tenant)| (tenant, num_reclaimed.0)).collect()
    }

    // -- changes ------------------------------------------------------------------------------------------------------

    pub fn hold(&mut self, tenant: TenantId, count: usize) {
        self.change(tenant, |account| account.num_held += count);
    }

    pub fn let_go(&mut self, tenant: TenantId, count: usize) {
        self.change(tenant, |account| account.num_held -= count);
    }

    pub fn cache(&mut self, tenant: TenantId, count: usize) {
        self.accounts[tenant as usize].num_cached += count;
    }

    pub fn uncache(&mut self, tenant: TenantId, count: usize) {
        self.accounts[tenant as usize].num_cached -= count;
    }

    pub fn pin(&mut self, tenant: TenantId) {
        self.accounts[tenant as usize].num_pinned += 1;
    }

    /// A prompt of the tenant was admitted.
    pub fn count_admission(&mut self, tenant: TenantId, counts: TokenCounts) {
        let tokens = &mut self.accounts[tenant as usize].tokens;
        tokens.admitted += counts.admitted;
        tokens.cached += counts.cached;
        tokens.written += counts.written;
    }

    pub fn restart_counters(&mut self) {
        self.accounts.iter_mut().for_each(|account| account.tokens = TokenCounts::default());
    }

    pub fn unpin(&mut self, tenant: TenantId) {
        self.accounts[tenant as usize].num_pinned -= 1;
    }

    /// A reservation of the tenant was `before`, and is `after`.
    pub fn reserve(&mut self, tenant: TenantId, before: usize, after: usize) {
        self.num_reserved = self.num_reserved - before + after;
        self.change(tenant, |account| account.num_reserved = account.num_reserved - before + after);
    }

    fn change(&mut self, tenant: TenantId, change: impl FnOnce(&mut Account)) {
        let account = &mut self.accounts[tenant as usize];
        let before = account.num_promised();
        change(account);
        self.num_promised = self.num_promised - before + account.num_promised();
    }

    /// Reports violations in the sums.
    pub fn audit(&self, wrong: &mut Vec<String>) {
        let num_promised: usize = self.accounts.iter().map(Account::num_promised).sum();
        let num_reserved: usize = self.accounts.iter().map(|account| account.num_reserved).sum();
        if (num_promised, num_reserved) != (self.num_promised, self.num_reserved) {
            wrong.push(format!(
                "{} blocks are counted as promised, {} as reserved; {num_promised} and {num_reserved} are",
                self.num_promised, self.num_reserved
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(floor: usize, quota: usize, limit: usize) -> Share {
        Share { floor, quota, limit, pin_budget: 5, keep_limit: 100 }
    }

    /// Accounts of 100 blocks, tenant by tenant.
    fn accounts(shares: &[Share]) -> Accounts {
        let mut accounts = Accounts::new(100);
        shares.iter().enumerate().for_each(|(tenant, share)| accounts.set_share(tenant as TenantId, *share));
        accounts
    }

    fn available(accounts: &Accounts, num_allocatable: usize) -> Vec<usize> {
        (0..accounts.len()).map(|tenant| accounts.num_available(tenant as TenantId, num_allocatable)).collect()
    }

    #[test]
    fn a_floor_is_kept_from_others_until_it_is_held() {
        let mut accounts = accounts(&[share(30, 100, 100), share(0, 100, 100), share(20, 100, 100)]);
        assert_eq!((available(&accounts, 100), accounts.num_spare(100)), (vec![80, 50, 70], 50));
        accounts.hold(0, 10);
        assert_eq!(available(&accounts, 90), [70, 50, 60 + 10]);
        accounts.hold(0, 40);
        assert_eq!(available(&accounts, 50), [30, 30, 50]);
        accounts.let_go(0, 50);
        assert_eq!(available(&accounts, 100), [80, 50, 70]);
        assert_eq!(available(&accounts, 10), [0, 0, 0]);
    }

    #[test]
    fn what_is_reserved_is_nobodys_else_not_even_the_tenants() {
        let mut accounts = accounts(&[share(30, 100, 100), share(0, 100, 100)]);
        accounts.reserve(0, 0, 10);
        assert_eq!((available(&accounts, 100), accounts.num_reserved()), (vec![90, 70], 10));
        accounts.reserve(0, 0, 40);
        assert_eq!((available(&accounts, 100), accounts.get(0).num_charged()), (vec![50, 50], 50));
        accounts.hold(0, 25);
        accounts.reserve(0, 40, 15);
        assert_eq!((available(&accounts, 75), accounts.get(0).num_charged()), (vec![50, 50], 50));
        accounts.reserve(0, 25, 0);
        assert_eq!((available(&accounts, 75), accounts.num_reserved()), (vec![75, 70], 0));
        accounts.audit(&mut Vec::new());
    }

    #[test]
    fn nobody_ever_holds_more_than_its_limit_and_what_others_are_promised() {
        let accounts = accounts(&[share(30, 100, 100), share(0, 100, 60), share(20, 100, 100), share(10, 10, 10)]);
        assert_eq!([0, 1, 2, 3].map(|tenant| accounts.most(tenant)), [70, 40, 60, 10]);
    }

    #[test]
    fn who_is_over_the_quota_gives_its_cached_blocks_first() {
        let mut accounts = accounts(&[share(0, 20, 100), share(0, 10, 100), share(0, 10, 100), share(0, 100, 100)]);
        assert!(accounts.has_quotas() && accounts.reclaims(0, 5).is_empty());
        for (tenant, num_held, num_cached) in [(0, 10, 10), (1, 5, 8), (2, 5, 10), (3, 10, 30)] {
            accounts.hold(tenant, num_held);
            accounts.cache(tenant, num_cached);
        }
        assert_eq!(accounts.reclaims(3, 5), [(2, 5), (1, 3)]);
        assert_eq!(accounts.reclaims(0, 2), [(0, 2), (2, 5), (1, 3)]);
        assert_eq!(accounts.reclaims(0, 50)[0], (0, 10), "no more than it has");
        accounts.set_share(1, share(0, 100, 100));
        assert_eq!(accounts.reclaims(3, 5), [(2, 5)]);
        [0, 2].iter().for_each(|tenant| accounts.set_share(*tenant, share(0, 100, 100)));
        assert!(!accounts.has_quotas() && accounts.reclaims(3, 5).is_empty());
    }

    #[test]
    fn a_share_can_be_changed_at_any_time() {
        let mut accounts = accounts(&[share(0, 100, 100), share(0, 100, 100)]);
        accounts.hold(0, 10);
        accounts.set_share(0, share(15, 100, 100));
        assert_eq!(available(&accounts, 90), [90, 85]);
        accounts.set_share(0, share(5, 100, 100));
        assert_eq!((available(&accounts, 90), accounts.most(1)), (vec![90, 90], 95));
    }

    #[test]
    fn wrong_sums_are_told() {
        let mut accounts = accounts(&[share(10, 100, 100)]);
        let mut wrong = Vec::new();
        accounts.audit(&mut wrong);
        assert_eq!(wrong, [""; 0]);
        accounts.num_promised = 11;
        accounts.audit(&mut wrong);
        assert_eq!(wrong, ["11 blocks are counted as promised, 0 as reserved; 10 and 0 are"]);
    }
}
