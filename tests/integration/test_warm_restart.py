"""cachemgr with a state directory: killed and started again it goes on where it was, or begins anew and says so."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from deadlines import DEADLINE_S
from integration.lone_cachemgr import BLOCK_SIZE, Bookkeeper, LoneCachemgr, Tenant, call, prompt
from integration.protocol_client import (
    FAULTY_WORKER,
    NUM_BLOCKS,
    WORKER_ARGS,
    LeaseHolder,
    Pair,
    RefusedError,
    ask,
    await_that,
    draw_tokens,
)

from quire.cache.v1 import cache_service_pb2
from quire.cachemgr.state import seal, unseal
from quire.cli.launch import LocalServices

Generate = Callable[[list[int], int], list[int]]
PROMPT = draw_tokens(21, seed=1)
NUM_NEW = 10


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="quire-") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def services(model_dir: Path, folder: Path) -> Iterator[LocalServices]:
    with LocalServices.start(
        model=model_dir,
        num_blocks=NUM_BLOCKS,
        extra_cachemgr_args=("--state-dir", str(folder / "state")),
        extra_worker_args=WORKER_ARGS,
        runtime_dir=folder,
        worker_target=FAULTY_WORKER,
    ) as started:
        yield started


@pytest.fixture
def pair(services: LocalServices) -> Iterator[Pair]:
    """Both processes, attached, without a lease. Afterwards every block is back (I8)."""
    pair = Pair(services)
    pair.await_attached()
    yield pair
    for lease in pair.leases():
        pytest.fail(f"lease {lease.lease_id_prefix} was left over")
    counts = pair.counts()
    assert (counts.free_count + counts.cached_count, pair.violations()) == (NUM_BLOCKS - 1, [])
    assert pair.worker_statistics().sequence_count == 0
    pair.close()


def kill(pair: Pair) -> None:
    pair.services.cachemgr.kill()


def start(pair: Pair) -> None:
    pair.services.cachemgr.start()
    pair.services.cachemgr.wait_serving(DEADLINE_S)
    pair.await_attached()


def begin(pair: Pair, prompt: list[int] = PROMPT, *, num_steps: int = 3) -> LeaseHolder:
    """A lease with sequence 1, which has run its prompt and some steps."""
    holder = LeaseHolder.create(pair)
    holder.run(holder.admit((1, prompt)))
    holder.go_on(1, num_steps=num_steps - 1)
    holder.await_settled()
    return holder


def end(*holders: LeaseHolder) -> None:
    for holder in holders:
        holder.delete()
    await_that("the leases are gone", lambda: not holders[0].pair.leases())


def listing(pair: Pair) -> dict[str, Any]:
    """All that can be asked of a pool but times."""
    ask_pool = {"pool": "default"}
    leases = pair.leases()
    for lease in leases:
        lease.ClearField("expire_time")
    counted = pair.statistics()
    counted.ClearField("refusal_counts")  # they begin with the process
    return {
        "blocks": pair.blocks(),
        "leases": leases,
        "sequences": list(
            ask(pair.cache.ListSequences, cache_service_pb2.ListSequencesRequest(**ask_pool)).sequences  # type: ignore[arg-type]
        ),
        "statistics": counted,
        "epoch": pair.pool().epoch,
    }


def state_of(pair: Pair) -> Path:
    """The folder of the pool's epoch."""
    (folder,) = (pair.folder / "state").glob("default@*")
    return folder


def last_log(pair: Pair) -> Path:
    return max(state_of(pair).glob("log-*"), key=lambda path: int(path.name.removeprefix("log-")))


# -- nothing is lost ----------------------------------------------------------------------------------------------


def test_everything_is_as_it_was(pair: Pair, generate: Generate) -> None:
    holders = [begin(pair), begin(pair, draw_tokens(9, seed=2), num_steps=2)]
    holders[0].plan(forks=[{"parent_sequence_id": 1, "child_sequence_ids": [2], "token_count": 20}])
    before, term = listing(pair), pair.pool().term
    kill(pair)
    start(pair)
    after = listing(pair)
    for name, value in before.items():
        assert after[name] == value, name
    assert pair.pool().term > term
    assert pair.cached_tokens(PROMPT) == 20
    end(*holders)


def test_steps_in_flight_go_on_under_their_grants(pair: Pair, generate: Generate) -> None:
    holder = begin(pair)
    waiting = [holder.extend(1) for _ in range(4)]
    with pair.held() as hold:
        running = holder.start(waiting[0])
        hold.await_running()
        kill(pair)
    holder.finish(running)
    holder.run(waiting[1])  # without a cachemgr
    await_that("the worker has noticed", lambda: not pair.worker_statistics().attached)
    start(pair)
    holder.run(waiting[2])  # under the one that comes after the one that signed it
    holder.run(waiting[3])
    holder.go_on(1, num_steps=NUM_NEW - 7)
    holder.await_settled()
    assert holder.tokens[1] == PROMPT + generate(PROMPT, NUM_NEW)
    assert pair.statistics().computed_step_count >= NUM_NEW
    end(holder)


def test_a_plan_whose_answer_was_lost_is_answered_alike(pair: Pair, generate: Generate) -> None:
    holder = begin(pair)
    extends = cache_service_pb2.Extends(sequence_ids=[1], token_counts=[1])
    other = draw_tokens(10, seed=5)
    request = holder.plan_request(
        request_id="once", extends=extends, admissions=[{"sequence_id": 2, "token_ids": other}]
    )
    answered = ask(pair.cache.PlanStep, request)
    before = listing(pair)
    kill(pair)
    start(pair)
    again = ask(pair.cache.PlanStep, request)
    assert listing(pair) == before
    answered.ClearField("grant")  # signed under another term
    grant = again.grant
    again.ClearField("grant")
    assert again == answered
    again.grant.CopyFrom(grant)
    holder.tokens[2] = list(other)
    holder.run(again)
    with pytest.raises(RefusedError) as caught:
        ask(pair.cache.PlanStep, holder.plan_request(request_id="once"))
    assert caught.value.reason == "REQUEST_ID_REUSED"
    holder.go_on(1, 2, num_steps=2)
    assert holder.tokens[1] == PROMPT + generate(PROMPT, 6)
    assert holder.tokens[2] == other + generate(other, 3)
    end(holder)


def test_it_goes_on_through_many_restarts(pair: Pair, generate: Generate) -> None:
    holder, epoch = begin(pair, num_steps=1), pair.pool().epoch
    for _ in range(4):
        plan = holder.extend(1)
        kill(pair)
        start(pair)
        holder.run(plan)
        holder.go_on(1, num_steps=1)
    assert holder.tokens[1] == PROMPT + generate(PROMPT, 9)
    assert pair.pool().epoch == epoch
    pair.services.cachemgr.terminate()  # as a service manager does
    start(pair)
    holder.go_on(1, num_steps=1)
    assert holder.tokens[1] == PROMPT + generate(PROMPT, 10)
    end(holder)


def test_a_lease_that_was_ended_stays_so_and_its_blocks_come_back(pair: Pair) -> None:
    holder = begin(pair)
    plan = holder.extend(1)
    with pair.held() as hold:
        running = holder.start(plan)
        hold.await_running()
        holder.delete()
        kill(pair)
        pair.services.cachemgr.start()
        pair.services.cachemgr.wait_serving(DEADLINE_S)
        await_that("the worker is back", lambda: pair.pool().attached)
        assert pair.has_lease(holder.lease_id)
        assert pair.counts().active_count > 0
        with pytest.raises(RefusedError) as caught:
            holder.extend(1)
        assert caught.value.reason == "LEASE_NOT_FOUND"
    holder.finish(running)
    await_that("the lease is gone", lambda: not pair.leases())


def test_a_lease_has_its_whole_time_after_a_restart(pair: Pair) -> None:
    holder = LeaseHolder.create(pair, ttl_s=2.0)
    holder.run(holder.admit((1, PROMPT)))
    kill(pair)
    start(pair)
    holder.go_on(1, num_steps=1)
    await_that("it runs out when nobody renews it", lambda: not pair.leases())


def test_a_worker_that_died_meanwhile_is_a_new_epoch(pair: Pair, generate: Generate) -> None:
    holder = begin(pair)
    epoch = holder.epoch
    kill(pair)
    pair.services.worker.kill()
    pair.services.cachemgr.start()
    pair.services.worker.start()
    pair.services.cachemgr.wait_serving(DEADLINE_S)
    pair.services.worker.wait_serving(DEADLINE_S)
    pair.await_attached()
    with pytest.raises(RefusedError) as caught:
        holder.extend(1)
    assert caught.value.reason == "EPOCH_CHANGED"
    holder.epoch = int(caught.value.metadata["epoch"])
    assert holder.epoch != epoch
    holder.run(holder.admit((1, PROMPT)))
    kill(pair)
    start(pair)
    holder.go_on(1, num_steps=3)
    assert holder.tokens[1] == PROMPT + generate(PROMPT, 4)
    end(holder)


# -- what can't be gone on with -----------------------------------------------------------------------------------


def assert_begins_anew(
    pair: Pair, holder: LeaseHolder, generate: Generate, told: str, *, reason: str = "LEASE_NOT_FOUND"
) -> None:
    """After the next start the pool has a new epoch, and serves. The reason is that of the lease's refusal."""
    start(pair)
    pool = pair.pool()
    assert pool.epoch != holder.epoch
    assert not [lease for lease in pair.leases() if lease.sequence_count]
    assert told in log_of(pair)
    with pytest.raises(RefusedError) as caught:
        holder.extend(1)
    assert caught.value.reason == reason
    later = begin(pair, num_steps=NUM_NEW)
    assert later.tokens[1] == PROMPT + generate(PROMPT, NUM_NEW)
    end(later, holder)


def log_of(pair: Pair) -> str:
    return (pair.folder / "cachemgr.log").read_text()


def cut_short(log: Path) -> None:
    log.write_bytes(log.read_bytes()[:-3])


def flip_a_bit(log: Path) -> None:
    content = bytearray(log.read_bytes())
    content[len(content) // 2] ^= 4
    log.write_bytes(content)


def lose_the_log(log: Path) -> None:
    log.unlink()


def change(field: str, value: Any) -> Callable[[Path], None]:
    def change(log: Path) -> None:
        about = log.with_name("pool.json")
        about.write_text(seal(unseal(about.read_bytes()) | {field: value}))

    return change


def make_it_a_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def make_it_a_link(path: Path) -> None:
    kept = path.parents[2] / "linked"
    path.rename(kept)
    path.symlink_to(kept)


def make_the_description_a_fifo(log: Path) -> None:
    make_it_a_fifo(log.with_name("pool.json"))


def tear_the_description(log: Path) -> None:
    about = log.with_name("pool.json")
    about.write_text(about.read_text()[:-9])


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (cut_short, "it is torn or damaged"),
        (flip_a_bit, "it is torn or damaged"),
        (lose_the_log, "there is no log"),
        (change("version", 99), "it is of version 99"),
        (change("boot_id", "another"), "the machine may have been rebooted since"),
        (change("terms", []), "terms: must be rising numbers"),
        (change("signing_key", ""), "signing_key: must be 32 bytes"),
        (tear_the_description, "state not used"),
        (make_it_a_fifo, "it is not a regular file"),
        (make_it_a_link, "Too many levels of symbolic links"),
        (make_the_description_a_fifo, "not a regular file"),
    ],
)
def test_a_damaged_state_is_a_new_epoch(pair: Pair, generate: Generate, damage: Any, told: str) -> None:
    holder = begin(pair)
    kill(pair)
    damage(last_log(pair))
    assert_begins_anew(pair, holder, generate, told)


def test_an_older_state_than_what_the_worker_has_done_is_a_new_epoch(pair: Pair, generate: Generate) -> None:
    """A log that ends between two records looks whole. Only the worker knows."""
    holder = begin(pair)
    older = pair.folder / "older"
    shutil.copytree(state_of(pair), older)
    holder.go_on(1, num_steps=1)
    holder.await_settled()
    kill(pair)
    state = state_of(pair)
    shutil.rmtree(state)
    shutil.move(older, state)
    assert_begins_anew(pair, holder, generate, "new epoch required", reason="EPOCH_CHANGED")


def test_a_state_without_a_lease_that_the_worker_serves_is_a_new_epoch(pair: Pair, generate: Generate) -> None:
    first = begin(pair)
    end(first)
    older = pair.folder / "older"
    shutil.copytree(state_of(pair), older)
    holder = LeaseHolder.create(pair)
    kill(pair)
    state = state_of(pair)
    shutil.rmtree(state)
    shutil.move(older, state)
    assert_begins_anew(pair, holder, generate, "new epoch required")


def test_what_another_cachemgr_has_ruled_meanwhile_is_a_new_epoch(pair: Pair, generate: Generate) -> None:
    """The worker connects to a cachemgr without the state, which requires a new epoch, and returns."""
    holder = begin(pair)
    kill(pair)
    kept = pair.folder / "kept"
    shutil.move(pair.folder / "state", kept)
    start(pair)
    assert pair.pool().epoch != holder.epoch
    kill(pair)
    shutil.rmtree(pair.folder / "state")
    shutil.move(kept, pair.folder / "state")
    assert_begins_anew(pair, holder, generate, "new epoch required", reason="EPOCH_CHANGED")


def test_a_full_disk_costs_the_state_and_nothing_else(pair: Pair, generate: Generate) -> None:
    """Files can grow no further: what serves goes on, and a restart begins anew."""
    holder, output = begin(pair), pair.folder / "cachemgr.log"
    while last_log(pair).stat().st_size < output.stat().st_size + 2_000:
        holder.run(holder.plan(), skip=True)
    limit = last_log(pair).stat().st_size + 100
    pid = pair.services.cachemgr.pid
    assert pid is not None
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, limit))
    holder.go_on(1, num_steps=NUM_NEW - 3)
    assert holder.tokens[1] == PROMPT + generate(PROMPT, NUM_NEW)
    assert not list((pair.folder / "state").glob("default@*"))
    assert pair.violations() == []
    kill(pair)
    assert_begins_anew(pair, holder, generate, "state given up, a restart will begin new epochs: File too large")


def test_a_directory_is_for_one_cachemgr_at_a_time(pair: Pair) -> None:
    second = subprocess.run(
        [
            *(sys.executable, "-m", "quire.cachemgr", "--listen", f"unix:{pair.folder}/second.sock"),
            *("--state-dir", str(pair.folder / "state")),
        ],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert second.returncode == 1
    assert second.stderr.strip().endswith(f"state directory {pair.folder}/state is used by another cachemgr")
    assert "Traceback" not in second.stderr


def test_a_directory_that_cant_be_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused = subprocess.run(
        [sys.executable, "-m", "quire.cachemgr", "--state-dir", str(tmp_path / "file" / "state")],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert refused.returncode == 1
    assert refused.stderr.strip().endswith(f"state directory {tmp_path}/file/state can't be used: Not a directory")


# -- what tenants were promised -----------------------------------------------------------------------------------


def test_pins_reservations_shares_and_watches_go_on() -> None:
    with tempfile.TemporaryDirectory(prefix="q-") as name:
        tenants = Path(name, "tenants.toml")
        tenants.write_text("[tenants.alice]\npin_budget = 6\n")
        cachemgr = LoneCachemgr(Path(name), "--state-dir", f"{name}/state", "--tenants", str(tenants)).start()
        worker = Bookkeeper(cachemgr, "pool", epoch=7)
        tenant = Tenant.begin(cachemgr, worker, "alice")
        tenant.cache(1, prompt(3, 2))
        pin = call(cachemgr, "alice", "PinPrefix", pool="pool", token_ids=prompt(3, 2), ttl={"seconds": 600})
        tenant.plan(admissions=[{"sequence_id": 2, "token_ids": [9], "reserved_token_count": 3 * BLOCK_SIZE}])
        tenant.settle()

        def told() -> Any:
            pins = [each.pin_id for each in call(cachemgr, "alice", "ListPins", pool="pool").pins]
            return call(cachemgr, "olga", "ListTenants", pool="pool").tenants, pins

        before, cursor = told(), next(watch(cachemgr)).cursor
        assert (before[0][0].reserved_block_count, before[1]) == (2, [pin.pin_id])
        cachemgr.close()
        worker.detach()
        cachemgr.start()
        assert told() == before
        events = watch(cachemgr, cursor)
        call(cachemgr, "alice", "UnpinPrefix", pin_id=pin.pin_id)
        changed = next(answer.events for answer in events if answer.events)
        assert [event.block.prefix_pin_count for event in changed] == [0, 0]
        assert call(cachemgr, "olga", "AuditPool", pool="pool").violations == []
        cachemgr.close()


def test_the_time_of_kept_prefixes_goes_on() -> None:
    """It neither begins anew nor ends early, and what tenants wrote is not forgotten."""
    with tempfile.TemporaryDirectory(prefix="q-") as name:
        cachemgr = LoneCachemgr(Path(name), "--state-dir", f"{name}/state", "--keep-share", "0.5").start()
        worker = Bookkeeper(cachemgr, "pool", epoch=7)
        tenant = Tenant.begin(cachemgr, worker, "alice")
        kept = [{"token_count": BLOCK_SIZE, "ttl": {"seconds": 600}}]
        tenant.plan(admissions=[{"sequence_id": 1, "token_ids": [*prompt(3, 2), 5], "breakpoints": kept}])
        tenant.settle()

        def told() -> tuple[Any, float]:
            (use,) = call(cachemgr, "alice", "ListTenants", pool="pool").tenants
            end_s = use.next_keep_end_time.ToNanoseconds() / 1e9
            use.ClearField("next_keep_end_time")
            return use, end_s

        before, end_s = told()
        assert (before.kept_block_count, before.written_token_count) == (1, 2 * BLOCK_SIZE)
        cachemgr.close()
        worker.detach()
        cachemgr.start()
        after, end_after_s = told()
        assert (after, abs(end_after_s - end_s) < 0.5) == (before, True)
        assert call(cachemgr, "olga", "AuditPool", pool="pool").violations == []
        cachemgr.close()


def test_a_sequence_that_keeps_blocks_which_its_fork_shares_goes_on() -> None:
    """Its tokens differ from the fork's before the block that both have, and neither has filled."""
    with tempfile.TemporaryDirectory(prefix="q-") as name:
        cachemgr = LoneCachemgr(Path(name), "--state-dir", f"{name}/state").start()
        worker = Bookkeeper(cachemgr, "pool", epoch=7)
        tenant = Tenant.begin(cachemgr, worker, "alice")
        tokens, reserved = [*prompt(3, 1), 5], 4 * BLOCK_SIZE
        tenant.plan(admissions=[{"sequence_id": 2, "token_ids": tokens, "reserved_token_count": reserved}])
        tenant.settle()
        tenant.plan(forks=[{"parent_sequence_id": 2, "child_sequence_ids": [3], "token_count": BLOCK_SIZE + 1}])
        tenant.settle()
        others = [token + 1 for token in tokens[1:BLOCK_SIZE]]
        extends = {
            "sequence_ids": [2],
            "token_counts": [len(others)],
            "append_token_counts": [len(others)],
            "append_token_ids": others,
        }
        plan = tenant.plan(trim_sequence_ids=[2], trim_token_counts=[1], extends=extends)
        assert not plan.refusals

        def told() -> Any:
            ids = {"lease_id": tenant.lease_id}
            answers = [call(cachemgr, "alice", "GetSequence", sequence_id=seq_id, **ids) for seq_id in (2, 3)]
            tables = [list(answer.sequence.block_ids) for answer in answers]
            return tables, list(call(cachemgr, "olga", "AuditPool", pool="pool").violations)

        before = told()
        tables, violations = before
        assert (tables[0][1], violations) == (tables[1][1], [])
        cachemgr.close()
        worker.detach()
        cachemgr.start()
        assert told() == before
        cachemgr.close()


def watch(cachemgr: LoneCachemgr, cursor: str = "") -> Any:
    request = cache_service_pb2.WatchBlocksRequest(pool="pool", cursor=cursor)
    return cachemgr.stub("oscar").WatchBlocks(request, timeout=DEADLINE_S)
