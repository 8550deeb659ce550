//! Enters what the worker says of its disk.

use serde::{Deserialize, Serialize};

use crate::books::Books;
use crate::cache::groups::{Group, identity};
use crate::cache::prefix::Hash;
use crate::cache::tier::{Content, TierBlockId};
use crate::errors::Result;

/// A copy that the worker has found on its disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FoundCopy {
    pub disk: TierBlockId,
    pub prefix_hash: Hash,
    pub group: Group,
    /// The name.
    pub tenant: Vec<u8>,
}

impl Books {
    /// The orders with these numbers were carried out, or have failed. One that is not open has no effect.
    pub fn end_disk_orders(&mut self, done: &[u64], failed: &[u64]) -> Result<()> {
        let Books { disk, host, pool, .. } = self;
        done.iter().try_for_each(|number| disk.end_order(*number, true, host))?;
        failed.iter().try_for_each(|number| disk.end_order(*number, false, host))?;
        disk.write_behind(host, pool.accounts());
        Ok(())
    }

    /// Copies that the worker has found on its disk at the start of the epoch, the ones that were written first in front.
    pub fn enter_found_copies(&mut self, found: &[FoundCopy]) {
        let with_content = |copy: &FoundCopy| {
            let tenant = self.enter_tenant(&copy.tenant);
            let content = Content { hash: identity(&copy.prefix_hash, copy.group), group: copy.group, tenant };
            (copy.disk, content, copy.tenant.clone())
        };
        let found: Vec<_> = found.iter().map(with_content).collect();
        self.disk.enter_found(found.into_iter(), self.pool.accounts());
    }

    /// Takes over what the books of an epoch before were still to erase.
    pub fn go_on_erasing(&mut self, tenants: &[Option<Vec<u8>>]) {
        tenants.iter().for_each(|tenant| self.disk.erase(tenant.clone()));
    }

    /// See DiskTier::erasing.
    pub fn erasing(&self) -> Vec<Option<Vec<u8>>> {
        self.disk.erasing().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::books::plans::{Admission, GrantedStep, StepRequest};
    use crate::books::tests::{Bench, admission};
    use crate::cache::disk::DiskOrder;
    use crate::cache::journal::Known;
    use crate::cache::tier::Tier;
    use crate::errors::Reason;
    use crate::wire::messages::BlockEventKind::{Removed, Stored};
    use crate::wire::messages::{BlockEvent, Medium};

    const PROMPT: [i32; 5] = [1, 2, 3, 4, 5];

    /// PROMPT is computed and evicted: its two blocks are in the host tier, and orders to write them are open.
    fn written(host_cached_limit: usize, num_disk_blocks: usize) -> Bench {
        let mut bench = Bench::with_disk(4, host_cached_limit, num_disk_blocks);
        cache_and_evict(&mut bench, &PROMPT);
        bench
    }

    /// A prompt is computed. Then another one takes all blocks of the pool, and gives them back as free ones.
    fn cache_and_evict(bench: &mut Bench, prompt: &[i32]) {
        bench.admit(1, prompt);
        bench.settle();
        bench.release(&[1]);
        bench.admit(9, &[7; 7]);
        bench.settle();
        bench.release(&[9]);
        bench.settle();
        bench.0.drop_blocks(&[1, 2, 3, 4], 0.0, b"");
    }

    /// The open orders as text: what, and from which block to which.
    fn orders(bench: &Bench) -> Vec<String> {
        assert_eq!(bench.0.violations(), [""; 0]);
        let told = |(number, order): (u64, &DiskOrder)| match order {
            DiskOrder::Write { host, disk, .. } => format!("{number} write {host} {disk}"),
            DiskOrder::Read { disk, host, .. } => format!("{number} read {disk} {host}"),
            DiskOrder::Erase { tenant } => format!("{number} erase {tenant:?}"),
        };
        bench.0.disk().orders_after(0).map(told).collect()
    }

    fn end(bench: &mut Bench, done: &[u64], failed: &[u64]) {
        bench.0.end_disk_orders(done, failed).unwrap();
        assert_eq!(bench.0.violations(), [""; 0]);
    }

    /// Blocks of the disk that are free, retired and cached.
    fn disk_counts(bench: &Bench) -> [usize; 3] {
        let counts = bench.0.disk().counts();
        [counts.free, counts.retired, counts.cached]
    }

    fn found(bench: &Bench) -> [usize; 3] {
        bench.0.cached_tokens(&PROMPT, &b"".into(), b"")
    }

    fn admit_waiting(bench: &mut Bench) -> GrantedStep {
        bench.plan(StepRequest { admissions: vec![waiting()], ..StepRequest::default() })
    }

    fn waiting() -> Admission {
        Admission { waits_for_prefix: true, ..admission(1, &PROMPT) }
    }

    /// PROMPT is on the disk alone.
    fn on_disk() -> Bench {
        let mut bench = written(6, 4);
        end(&mut bench, &[1, 2], &[]);
        bench.0.host.drop_copies(&bench.0.host.copies().all());
        assert_eq!((found(&bench), disk_counts(&bench)), ([0, 0, 4], [2, 0, 2]));
        bench
    }

    #[test]
    fn a_copy_is_written_behind_and_found_on_the_disk_when_that_is_reported() {
        let mut bench = written(6, 4);
        assert_eq!(
            (orders(&bench), disk_counts(&bench)),
            (vec!["1 write 0 0".into(), "2 write 1 1".into()], [2, 2, 0])
        );
        end(&mut bench, &[1], &[]);
        end(&mut bench, &[1], &[]);
        end(&mut bench, &[], &[2]);
        assert_eq!((orders(&bench), disk_counts(&bench)), (vec![], [3, 0, 1]), "the second was not written");
        let counters = bench.0.disk().counters();
        assert_eq!((counters.written, counters.lost, found(&bench)), (1, 1, [0, 4, 0]));
    }

    #[test]
    fn a_copy_does_not_leave_the_host_tier_while_it_is_written() {
        let mut bench = written(2, 4);
        cache_and_evict(&mut bench, &[8; 5]);
        assert_eq!((found(&bench), orders(&bench).len()), ([0, 4, 0], 2), "nothing makes room");
        end(&mut bench, &[1, 2], &[]);
        cache_and_evict(&mut bench, &[8; 5]);
        assert_eq!((found(&bench), disk_counts(&bench)), ([0, 0, 4], [0, 2, 2]));
    }

    #[test]
    fn an_admission_that_waits_is_refused_until_the_copies_are_read_and_finds_them_in_the_host_tier() {
        let mut bench = on_disk();
        let plan = admit_waiting(&mut bench);
        assert_eq!(plan.refusals[0].refusal.reason, Reason::PrefixBeingComputed);
        assert_eq!(orders(&bench).len(), 2);
        assert_eq!(admit_waiting(&mut bench).refusals.len(), 1, "they are on their way");
        assert_eq!(orders(&bench), ["3 read 1 0", "4 read 0 1"], "each is read once");
        end(&mut bench, &[4], &[]);
        assert_eq!(admit_waiting(&mut bench).refusals.len(), 1, "the first one is not there");
        end(&mut bench, &[3], &[]);
        let plan = admit_waiting(&mut bench);
        assert_eq!((plan.admitted_cached_counts, plan.restore_sources), (vec![4], vec![0, 1]));
        assert_eq!((bench.0.disk().counters().read, disk_counts(&bench)), (2, [2, 0, 2]), "they stay on the disk");
    }

    /// Kind and block of events about copies in a tier.
    fn kinds(tier: Tier, events: Vec<BlockEvent>) -> Vec<(i32, i32)> {
        let medium = if tier == Tier::Host { Medium::Host } else { Medium::Disk };
        assert!(events.iter().all(|event| event.medium == medium as i32), "{events:?}");
        events.into_iter().map(|event| (event.kind, event.block.unwrap().block_id)).collect()
    }

    #[test]
    fn a_watch_is_told_of_copies_that_arrive_and_of_those_that_are_gone() {
        let told = |bench: &Bench, tier, known: &mut Known, tenant| {
            kinds(tier, bench.0.listing().changes_of_copies(tier, known, 9, tenant).unwrap())
        };
        let (stored, removed) = (Stored as i32, Removed as i32);
        let mut bench = written(2, 4);
        let [mut of_host, mut of_disk] = [Known::before(0), Known::before(0)];
        assert_eq!(told(&bench, Tier::Host, &mut of_host, None), [(stored, 0), (stored, 1)]);
        assert_eq!(told(&bench, Tier::Disk, &mut of_disk, None), [], "they are being written");
        end(&mut bench, &[1, 2], &[]);
        assert_eq!(told(&bench, Tier::Disk, &mut of_disk, None), [(stored, 0), (stored, 1)]);
        bench.0.host.drop_copies(&[1]);
        let [mut of_owner, mut of_other] = [of_host.clone(), of_host.clone()];
        assert_eq!(told(&bench, Tier::Host, &mut of_host, None), [(removed, 1)]);
        assert_eq!(told(&bench, Tier::Host, &mut of_owner, Some(b"")), [(removed, 1)]);
        assert_eq!(told(&bench, Tier::Host, &mut of_other, Some(b"other")), []);
        assert_eq!((of_host.next(), of_owner.next(), of_other.next()), (3, 3, 3));
    }

    #[test]
    fn a_snapshot_has_all_copies_page_by_page() {
        let bench = on_disk();
        let page = |first, most, tenant| {
            let known = &mut Known::default();
            let (events, next) = bench.0.listing().snapshot_of_copies(Tier::Disk, first, most, known, tenant);
            (kinds(Tier::Disk, events), next)
        };
        let stored = Stored as i32;
        assert_eq!(page(0, 1, None), (vec![(stored, 0)], Some(1)));
        assert_eq!(page(1, 1, Some(b"")), (vec![(stored, 1)], None));
        assert_eq!((page(0, 9, Some(b"other")), page(4, 9, None)), ((vec![], None), (vec![], None)));
    }

    #[test]
    fn an_admission_that_does_not_wait_reads_nothing() {
        let mut bench = on_disk();
        assert_eq!((bench.admit(1, &PROMPT).admitted_cached_counts, orders(&bench)), (vec![0], vec![]));
        let admissions = vec![waiting()];
        let plan = on_disk().plan(StepRequest { admissions, skips_disk: true, ..StepRequest::default() });
        assert_eq!((plan.admitted_cached_counts, plan.refusals.len()), (vec![0], 0));
    }

    #[test]
    fn a_copy_that_could_not_be_read_is_lost_and_its_tokens_are_computed() {
        let mut bench = on_disk();
        admit_waiting(&mut bench);
        end(&mut bench, &[4], &[3]);
        assert_eq!((found(&bench), disk_counts(&bench), bench.0.host().counts().cached), ([0, 0, 0], [3, 0, 1], 1));
        assert_eq!(admit_waiting(&mut bench).admitted_cached_counts, [0]);
    }

    #[test]
    fn a_reset_drops_the_copies_and_those_on_their_way_and_has_them_erased() {
        for tenant in [None, Some(&b""[..])] {
            let reset = |bench: &mut Bench| match tenant {
                Some(tenant) => bench.0.withhold_for(tenant, None),
                None => drop(bench.0.reset_prefix_cache(0, 5, 0.0, b"").unwrap()),
            };
            let mut bench = written(6, 4);
            reset(&mut bench);
            assert_eq!((found(&bench), disk_counts(&bench)), ([0; 3], [2, 2, 0]), "they are still being written");
            assert_eq!(orders(&bench)[2], format!("3 erase {:?}", tenant.map(<[u8]>::to_vec)));
            end(&mut bench, &[1, 2, 3], &[]);
            assert_eq!((found(&bench), disk_counts(&bench), bench.0.erasing()), ([0; 3], [4, 0, 0], vec![]));
            let mut bench = on_disk();
            admit_waiting(&mut bench);
            reset(&mut bench);
            assert_eq!((disk_counts(&bench), bench.0.host().counts().retired), ([2, 2, 0], 2));
            end(&mut bench, &[3, 4], &[]);
            assert_eq!((found(&bench), disk_counts(&bench), bench.0.host().counts().free), ([0; 3], [4, 0, 0], 6));
        }
    }

    fn found_copies(bench: &Bench) -> Vec<FoundCopy> {
        let copies = bench.0.disk().copies().listing();
        let found = |(disk, content, _): (TierBlockId, Content, bool)| FoundCopy {
            disk,
            prefix_hash: content.prefix_hash(),
            group: content.group,
            tenant: Vec::new(),
        };
        copies.map(found).collect()
    }

    #[test]
    fn what_the_worker_finds_is_found_again_but_not_what_is_being_erased() {
        let copies = found_copies(&on_disk());
        let mut bench = Bench::with_disk(4, 6, 4);
        bench.0.enter_found_copies(&copies);
        bench.0.enter_found_copies(&copies);
        assert_eq!((found(&bench), disk_counts(&bench), bench.0.violations()), ([0, 0, 4], [2, 0, 2], vec![]));
        bench.0.withhold_for(b"", None);
        bench.0.enter_found_copies(&copies);
        assert_eq!((found(&bench), disk_counts(&bench)), ([0, 0, 0], [4, 0, 0]));
        let mut next = Bench::with_disk(4, 6, 4);
        next.0.go_on_erasing(&bench.0.erasing());
        next.0.enter_found_copies(&copies);
        assert_eq!((found(&next), orders(&next).len()), ([0, 0, 0], 1));
        end(&mut next, &[1], &[]);
        next.0.enter_found_copies(&copies);
        assert_eq!(found(&next), [0, 0, 4]);
    }

    #[test]
    fn what_could_not_be_erased_is_not_found_again_and_erased_by_the_next_epoch() {
        let copies = found_copies(&on_disk());
        let mut bench = on_disk();
        bench.0.withhold_for(b"", None);
        end(&mut bench, &[], &[3]);
        assert_eq!((bench.0.disk().num_erasing(), bench.0.erasing()), (0, vec![Some(vec![])]));
        bench.0.enter_found_copies(&copies);
        assert_eq!(found(&bench), [0; 3]);
        bench.0.withhold_for(b"other", None);
        end(&mut bench, &[4], &[]);
        bench.0.begin_epoch(&[0xff], 0.0).unwrap();
        assert_eq!(orders(&bench), ["1 erase Some([])"]);
        end(&mut bench, &[1], &[]);
        assert_eq!(bench.0.erasing(), vec![]);
    }

    #[test]
    fn what_could_not_be_erased_is_when_a_later_order_about_it_is_carried_out() {
        let name = Some(b"b".to_vec());
        let copies = found_copies(&on_disk()).into_iter().map(|copy| FoundCopy { tenant: b"b".to_vec(), ..copy });
        let copies: Vec<_> = copies.collect();
        for later in [None, name.clone()] {
            let mut bench = Bench::with_disk(4, 6, 4);
            bench.0.go_on_erasing(&[name.clone(), Some(b"other".to_vec()), later]);
            bench.0.enter_found_copies(&copies);
            end(&mut bench, &[2], &[1]);
            bench.0.enter_found_copies(&copies);
            assert_eq!((disk_counts(&bench), bench.0.erasing()[1..].to_vec()), ([4, 0, 0], vec![name.clone()]));
            end(&mut bench, &[3], &[]);
            bench.0.enter_found_copies(&copies);
            assert_eq!((disk_counts(&bench), bench.0.erasing()), ([2, 0, 2], vec![]));
        }
    }

    #[test]
    fn a_host_block_that_has_other_content_when_its_turn_comes_is_not_written_by_its_old_hash() {
        let mut bench = Bench::with_disk(4, 17, 40);
        (10..20).for_each(|first| cache_and_evict(&mut bench, &[first; 5]));
        assert_eq!(orders(&bench).len(), 16, "one host block is left for all other copies");
        end(&mut bench, &(1..=16).collect::<Vec<_>>(), &[]);
        for (_, order) in bench.0.disk().orders_after(0) {
            let DiskOrder::Write { host, content, .. } = order else { panic!("{order:?}") };
            assert_eq!(bench.0.host.copies().content(*host), Some(*content));
        }
        assert_eq!(orders(&bench).len(), 1);
    }

    #[test]
    fn a_found_copy_takes_no_block_that_is_being_written() {
        let copies = found_copies(&on_disk());
        let mut bench = written(6, 4);
        bench.0.host.drop_copies(&bench.0.host.copies().all());
        bench.0.enter_found_copies(&copies);
        assert_eq!((found(&bench), disk_counts(&bench), bench.0.violations()), ([0; 3], [2, 2, 0], vec![]));
    }

    #[test]
    fn a_new_epoch_on_kept_memory_forgets_all_orders_but_those_to_erase() {
        let mut bench = written(6, 4);
        bench.0.withhold_for(b"other", None);
        bench.0.begin_epoch(&[0xff], 0.0).unwrap();
        assert_eq!((orders(&bench).len(), disk_counts(&bench)), (1, [4, 0, 0]));
        assert_eq!(bench.0.erasing(), [Some(b"other".to_vec())]);
    }

    #[test]
    fn the_disk_evicts_the_least_recently_used_copy_and_none_that_is_read() {
        let mut bench = written(6, 2);
        end(&mut bench, &[1, 2], &[]);
        bench.0.host.drop_copies(&bench.0.host.copies().all());
        assert_eq!(admit_waiting(&mut bench).refusals.len(), 1);
        cache_and_evict(&mut bench, &[8; 4]);
        assert_eq!((orders(&bench).len(), bench.0.disk().copies().num_evicted()), (2, 0), "both are being read");
        end(&mut bench, &[3, 4], &[]);
        cache_and_evict(&mut bench, &[6; 4]);
        assert_eq!((disk_counts(&bench), bench.0.disk().copies().num_evicted()), ([0, 2, 0], 2));
    }
}
