//! A new epoch on memory that outlived its worker.
//!
//! A published block is never written before it is allocated again, and then it is not published any more. So its content
//! is right, whatever the worker did when it died. All else that the worker knew is lost: leases' sequences and steps.

use crate::books::Books;
use crate::books::pins::{Pin, PinId};
use crate::cache::prefix::BlockId;
use crate::errors::Result;

/// The caller of a reset, as an explanation names it: the worker did not find the content whole.
const DROPPED_BY: &[u8] = b"worker: the memory was kept, and this block was not whole";

/// Findable blocks by what became of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CarriedOver {
    pub num_kept: usize,
    pub num_dropped: usize,
}

/// True if the bit of a block is set: the lowest bit of the first byte is block 0.
fn has(whole: &[u8], block: BlockId) -> bool {
    let byte = whole.get(block as usize / 8).copied().unwrap_or(0);
    byte >> (block % 8) & 1 == 1
}

impl Books {
    /// Begins a new epoch: sequences, steps in flight, host and disk blocks are gone, and all findable blocks are cached, or
    /// pinned. Those without a bit in `whole` lose their content, and pins with such a block end. Open leases go on with
    /// step 1, leases that had ended are removed. All counters begin at 0. Cost: O(blocks + sequences).
    pub fn begin_epoch(&mut self, whole: &[u8], now: f64) -> Result<CarriedOver> {
        self.empty_leases()?;
        self.host.begin_epoch();
        self.disk.begin_epoch(&mut self.host)?;
        let findable = |block: &BlockId| self.pool.index().is_findable(*block);
        let findable: Vec<BlockId> = (1..self.geometry.num_blocks as BlockId).filter(findable).collect();
        let dropped: Vec<BlockId> = findable.iter().copied().filter(|block| !has(whole, *block)).collect();
        let is_broken = |pin: &&Pin| pin.blocks.iter().any(|block| !has(whole, *block));
        let ended: Vec<PinId> = self.pins.all().filter(is_broken).map(|pin| pin.id).collect();
        ended.iter().try_for_each(|id| self.pins.take_back(id, &mut self.pool))?;
        self.drop_blocks(&dropped, now, DROPPED_BY);
        self.counters = Default::default();
        self.pool.restart_counters();
        (self.last_report, self.began_at) = (0, now);
        Ok(CarriedOver { num_kept: findable.len() - dropped.len(), num_dropped: dropped.len() })
    }

    /// Ends the sequences and steps of all leases, in the order of their ids.
    fn empty_leases(&mut self) -> Result<()> {
        let mut ids: Vec<String> = self.leases.iter().map(|(lease_id, _)| lease_id.clone()).collect();
        ids.sort_unstable();
        for lease_id in &ids {
            let lease = &self.leases[lease_id];
            let (tenant, ttl, is_open) = (lease.tenant_name.clone(), lease.ttl, lease.is_open());
            let (expires_at, had_grace) = (lease.expires_at, lease.had_grace);
            self.close_lease(lease_id)?;
            if is_open {
                self.open_lease(lease_id, &tenant, ttl);
                self.leases.set_expiry(lease_id, expires_at, had_grace);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::books::plans::{Breakpoint, StepRequest};
    use crate::books::tests::{Bench, admission, some_report, some_request, some_share};
    use crate::cache::accounts::Share;
    use crate::cache::groups::Span;
    use crate::cache::keeps::KeepBook;
    use crate::cache::pool::BlockState;
    use crate::cache::pool::tests::Random;
    use crate::cache::tenants::TenantId;

    const ALL: [u8; 16] = [255; 16];

    fn begin_epoch(bench: &mut Bench, whole: &[u8]) -> (usize, usize) {
        let carried = bench.0.begin_epoch(whole, 5.0).unwrap();
        assert_eq!(bench.0.violations(), [""; 0]);
        (carried.num_kept, carried.num_dropped)
    }

    /// All that the pool has counted.
    fn counted(bench: &Bench) -> Vec<u64> {
        let pool = bench.0.pool();
        let tokens = (0..pool.accounts().len() as TenantId).map(|tenant| pool.accounts().get(tenant).tokens);
        let of_tenants = tokens.flat_map(|counts| [counts.admitted, counts.cached, counts.written]);
        let groups = pool.groups.counters().iter();
        let of_groups = groups.flat_map(|counters| [counters.num_found, counters.num_passed, counters.num_evicted]);
        let num_kept_evicted = pool.parking().keeps().map_or(0, KeepBook::num_evicted);
        let of_pool = [pool.counters().num_allocated, pool.counters().num_evicted, pool.index().num_published()];
        of_pool.into_iter().chain([num_kept_evicted]).chain(of_tenants).chain(of_groups).collect()
    }

    fn cached(bench: &Bench, tokens: &[i32]) -> usize {
        bench.0.num_cached_tokens(tokens, &b"".into(), b"")
    }

    #[test]
    fn published_blocks_are_cached_and_all_else_is_free() {
        let mut bench = Bench::new(8);
        bench.admit(1, &[1, 2, 3, 4, 5]);
        bench.settle();
        bench.admit(2, &[7, 8, 9]);
        bench.extend(1, 1, &[]);
        bench.plan_for("b", StepRequest { admissions: vec![admission(1, &[1, 2, 6])], ..StepRequest::default() });
        assert_eq!(begin_epoch(&mut bench, &ALL), (2, 0));
        let counts = bench.0.pool().counts();
        assert_eq!((counts.cached, counts.free, bench.0.num_rows()), (2, 6, 0));
        assert_eq!([cached(&bench, &[1, 2, 3, 4, 5]), cached(&bench, &[7, 8, 9])], [4, 0]);
        assert_eq!((bench.0.last_report(), bench.0.began_at(), bench.0.counters().planned_steps), (0, 5.0, 0));
        let plan = bench.admit(1, &[1, 2, 3, 4, 5]);
        assert_eq!((plan.step_number, bench.blocks(1)[..2].to_vec()), (1, vec![1, 2]));
    }

    #[test]
    fn a_block_that_is_being_refilled_is_free() {
        let mut bench = Bench::new(2);
        bench.admit(1, &[1, 2, 3]);
        bench.settle();
        bench.release(&[1]);
        bench.settle();
        bench.admit(2, &[7, 8, 9]);
        assert_eq!(begin_epoch(&mut bench, &ALL), (0, 0));
        assert_eq!([cached(&bench, &[1, 2, 3]), cached(&bench, &[7, 8, 9])], [0, 0]);
    }

    #[test]
    fn a_block_that_is_not_whole_is_free_and_a_pin_with_it_ends() {
        let mut bench = Bench::new(8);
        bench.0.set_shares(Share { pin_budget: 8, ..Share::everything(8) }, Default::default());
        bench.admit(1, &[1, 2, 3, 4, 5]);
        bench.settle();
        let pin = |bench: &mut Bench, count| {
            bench.0.pin_prefix(b"", &[1, 2, 3, 4][..count], &b"".into(), 9.0).unwrap().unwrap().id
        };
        let (shorter, longer) = (pin(&mut bench, 2), pin(&mut bench, 4));
        assert_eq!(begin_epoch(&mut bench, &[0b011]), (1, 1));
        assert_eq!(bench.0.pool().state(2), BlockState::Free);
        assert_eq!((bench.0.pins().get(&shorter).is_some(), bench.0.pins().get(&longer)), (true, None));
        assert_eq!((cached(&bench, &[1, 2, 3, 4, 5]), bench.0.pool().counts().cached), (2, 1));
    }

    #[test]
    fn what_breakpoints_keep_is_kept_and_leases_go_on_unless_they_had_ended() {
        let mut bench = Bench::new(8);
        bench.0.set_shares(Share { keep_limit: 8, ..Share::everything(8) }, Default::default());
        let mut kept = admission(1, &[1, 2, 3]);
        kept.breakpoints = vec![Breakpoint { num_tokens: 2, ttl: 60.0 }];
        bench.plan(StepRequest { admissions: vec![kept], ..StepRequest::default() });
        bench.settle();
        bench.0.leases_mut().set_expiry("a", 17.0, true);
        bench.0.end_lease("b");
        assert_eq!(begin_epoch(&mut bench, &ALL), (1, 0));
        assert!(bench.0.pool().parking().is_kept(1));
        let lease = bench.0.lease("a").unwrap();
        assert_eq!((lease.expires_at, lease.had_grace, lease.next_step, lease.ttl), (17.0, true, 1, 30.0));
        assert!(bench.0.lease("b").is_none());
    }

    #[test]
    fn books_in_any_state_go_on_and_count_from_0() {
        let mut most = vec![0];
        for (seed, groups) in
            (0..60).flat_map(|seed| [vec![Span::Full], vec![Span::Full, Span::Sliding(3)]].map(|g| (seed, g)))
        {
            let (mut bench, mut random) = (Bench::with_groups(12, &groups), Random(seed));
            for number in 0..60 {
                if number % 20 == 19 {
                    let findable = bench.0.pool().index().num_indexed();
                    let whole = [0, 1].map(|_| random.below(256) as u8);
                    let before = counted(&bench);
                    most.resize(most.len().max(before.len()), 0);
                    most.iter_mut().zip(&before).for_each(|(most, count)| *most = (*most).max(*count));
                    let (num_kept, num_dropped) = begin_epoch(&mut bench, &whole);
                    let counts = bench.0.pool().counts();
                    assert_eq!(
                        (num_kept + num_dropped, counts.cached, counts.free),
                        (findable, num_kept, 12 - num_kept)
                    );
                    assert_eq!(counted(&bench), vec![0; before.len()]);
                }
                if number % 7 == 0 {
                    bench.0.set_shares(some_share(&mut random), Default::default());
                }
                let lease_id = ["a", "b"][random.below(2)];
                if bench.0.leases()[lease_id].in_flight.len() < 3 {
                    bench.plan_at(lease_id, &some_request(&mut random), 0.0);
                } else {
                    let report = some_report(&bench.0, lease_id, &mut random);
                    bench.0.settle(lease_id, &report).unwrap();
                }
            }
        }
        assert!(most.iter().all(|count| *count > 0), "{most:?}");
    }
}
