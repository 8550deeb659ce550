"""The state after a kill, a pause, a stop: nothing is lost, nothing is owned twice, and every party is notified."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from deadlines import DEADLINE_S
from grpc_health.v1 import health_pb2
from integration.protocol_client import (
    CACHE_SERVICE,
    FAULTY_WORKER,
    NUM_BLOCKS,
    WORKER_ARGS,
    WORKER_SERVICE,
    LeaseHolder,
    Pair,
    RefusedError,
    Wire,
    ask,
    await_that,
    draw_tokens,
)
from ports import free_port

from quire.cache.v1 import cache_service_pb2, grant_pb2
from quire.cli.launch import LocalServices
from quire.cli.service_process import ServiceProcess
from quire.compute.v1 import worker_service_pb2

CreateLease = Callable[..., LeaseHolder]
Generate = Callable[[list[int], int], list[int]]
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
PROMPT = draw_tokens(21, seed=1)
NUM_NEW = 10

# Takes a lease of one second and six blocks, says so, and waits to be killed.
DOOMED_CLIENT = f"""
import sys
import grpc
from quire.cache.v1 import cache_service_pb2, cache_service_pb2_grpc
from quire.compute.v1 import worker_service_pb2, worker_service_pb2_grpc
cache = cache_service_pb2_grpc.CacheServiceStub(grpc.insecure_channel(sys.argv[1]))
worker = worker_service_pb2_grpc.WorkerServiceStub(grpc.insecure_channel(sys.argv[2]))
request = cache_service_pb2.CreateLeaseRequest(pool="default", ttl={{"seconds": 1}})
lease = cache.CreateLease(request, timeout={DEADLINE_S})
plan = cache.PlanStep(
    cache_service_pb2.PlanStepRequest(
        lease_id=lease.lease_id, epoch=lease.epoch, admissions=[{{"sequence_id": 1, "token_ids": {PROMPT}}}]
    ),
    timeout={DEADLINE_S},
)
inputs = [{{"sequence_id": 1, "token_ids": {PROMPT}}}]
worker.RunStep(worker_service_pb2.RunStepRequest(grant=plan.grant, inputs=inputs), timeout={DEADLINE_S})
cache.PlanStep(
    cache_service_pb2.PlanStepRequest(
        lease_id=lease.lease_id, epoch=lease.epoch, extends={{"sequence_ids": [1], "token_counts": [1]}}
    ),
    timeout={DEADLINE_S},
)
print(lease.lease_id, flush=True)
sys.stdin.read()
"""


def begin(pair: Pair, *, num_steps: int = 3) -> LeaseHolder:
    """A lease with sequence 1, which has run its prompt and some steps."""
    holder = LeaseHolder.create(pair)
    holder.run(holder.admit((1, PROMPT)))
    holder.go_on(1, num_steps=num_steps - 1)
    holder.await_settled()
    return holder


def reason_of(call: Callable[[], Any]) -> str:
    """Why a call is refused."""
    with pytest.raises(RefusedError) as caught:
        call()
    return caught.value.reason


# -- clients ------------------------------------------------------------------------------------------------------


def test_the_blocks_of_a_killed_client_come_back(pair: Pair, create_lease: CreateLease, generate: Generate) -> None:
    other, prompt = create_lease(), draw_tokens(10, seed=2)
    other.run(other.admit((1, prompt)))
    command = [sys.executable, "-c", DOOMED_CLIENT, pair.services.cachemgr_address, pair.services.worker_address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        lease_id = client.stdout.readline().strip()
        assert len(pair.blocks(lease_id=lease_id)) == 6
        client.send_signal(signal.SIGKILL)
    other.go_on(1, num_steps=1)
    await_that("the lease is gone", lambda: not pair.has_lease(lease_id))
    held = {block.block_id for block in pair.blocks(lease_id=other.lease_id)}
    counts = pair.counts()
    assert counts.free_count + counts.cached_count == NUM_BLOCKS - 1 - len(held)
    assert counts.retired_count == 0
    other.go_on(1, num_steps=NUM_NEW - 2)
    assert other.tokens[1] == prompt + generate(prompt, NUM_NEW)


def test_a_client_that_wakes_after_its_lease_is_told(pair: Pair, create_lease: CreateLease, generate: Generate) -> None:
    sleeper = create_lease(ttl_s=1.0)
    plan = sleeper.admit((1, PROMPT))
    await_that("the lease is gone", lambda: not pair.has_lease(sleeper.lease_id))
    other = create_lease()
    other.run(other.admit((1, draw_tokens(80, seed=3))))  # takes over what the sleeper held
    other.await_settled()
    with pair.untouched():
        assert reason_of(lambda: sleeper.run(plan)) == "LEASE_FENCED"
        assert reason_of(lambda: sleeper.run(plan, skip=True)) == "LEASE_FENCED"
        assert reason_of(lambda: sleeper.extend(1)) == "LEASE_NOT_FOUND"
        assert reason_of(sleeper.renew) == "LEASE_NOT_FOUND"
        assert reason_of(lambda: sleeper.sequence(1)) == "LEASE_NOT_FOUND"
    again = create_lease()
    again.run(again.admit((1, PROMPT)))
    assert again.tokens[1] == PROMPT + generate(PROMPT, 1)


def test_a_lease_that_is_renewed_lives(pair: Pair, create_lease: CreateLease) -> None:
    renewed, planning = create_lease(ttl_s=1.0), create_lease(ttl_s=1.0)
    for holder in (renewed, planning):
        holder.run(holder.admit((1, PROMPT)))
    end = time.monotonic() + 2.2

    def two_lives_later() -> bool:
        renewed.renew()
        planning.run(planning.plan())
        return time.monotonic() > end

    await_that("more than twice the leases' time has passed", two_lives_later)
    renewed.go_on(1, num_steps=1)
    assert renewed.sequence(1).token_count == 23
    assert planning.sequence(1).token_count == 22


# -- processes ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def port() -> int:
    """A free TCP port."""
    return free_port()


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Short enough for a socket's path."""
    with tempfile.TemporaryDirectory(prefix="q-") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def wire(folder: Path) -> Iterator[Wire]:
    """The worker's connection to cachemgr."""
    wire = Wire(folder / "wire.sock", folder / "cachemgr.sock")
    yield wire
    wire.close()


@pytest.fixture(scope="module")
def services(model_dir: Path, folder: Path, wire: Wire, port: int) -> Iterator[LocalServices]:
    """Processes that tests here kill, one after the other."""
    with LocalServices.start(
        model=model_dir,
        num_blocks=NUM_BLOCKS,
        extra_cachemgr_args=("--listen", f"127.0.0.1:{port}"),
        extra_worker_args=(*WORKER_ARGS, "--cachemgr", f"unix:{folder}/wire.sock"),
        runtime_dir=folder,
        worker_target=FAULTY_WORKER,
    ) as started:
        yield started


@pytest.fixture
def mortals(services: LocalServices) -> Iterator[Pair]:
    """The processes, both alive and attached, without any lease; what an earlier test has ended is started again."""
    if not services.cachemgr.is_running:
        services.cachemgr.restart(DEADLINE_S)
    if not services.worker.is_running:
        services.worker.restart(DEADLINE_S)
    pair = Pair(services)
    await_that("the worker is attached", lambda: pair.worker_statistics().attached)
    yield pair
    pair.close()


def await_attached(pair: Pair, *, not_epoch: int) -> None:
    """Returns when the pool is attached with another epoch, on both sides."""

    def is_attached() -> bool:
        try:
            pool = pair.pool()
        except RefusedError:  # POOL_NOT_FOUND: no worker has come yet
            return False
        return pool.attached and pool.epoch != not_epoch and pair.worker_statistics().epoch == pool.epoch

    await_that("the pool is attached with a new epoch", is_attached)


def restarted(process: ServiceProcess) -> None:
    process.start()
    process.wait_serving(DEADLINE_S)


def assert_whole_after(pair: Pair, *holders: LeaseHolder) -> None:
    """I8: when all leases have ended, every block is back."""
    for holder in holders:
        holder.delete()
    await_that("no lease is left", lambda: not pair.leases())
    counts = pair.counts()
    assert counts.free_count + counts.cached_count == NUM_BLOCKS - 1
    assert pair.violations() == []
    assert pair.worker_statistics().sequence_count == 0


def test_a_killed_worker_is_a_new_epoch_and_the_lease_goes_on(mortals: Pair, generate: Generate) -> None:
    holder = begin(mortals)
    waiting = [holder.extend(1), holder.extend(1)]
    with mortals.held() as hold:
        running = holder.start(waiting[0])
        hold.await_running()
        mortals.services.worker.kill()
    with pytest.raises(RefusedError) as caught:
        holder.finish(running)
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    await_that("cachemgr has noticed", lambda: not mortals.pool().attached)
    assert reason_of(lambda: LeaseHolder.create(mortals)) == "POOL_DETACHED"
    holder.renew()
    restarted(mortals.services.worker)
    pool = mortals.pool()
    assert pool.attached
    assert pool.epoch != holder.epoch
    assert pool.sequence_count == 0
    checksums = mortals.checksums()

    with pytest.raises(RefusedError) as caught:
        holder.extend(1)
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.ABORTED, "EPOCH_CHANGED")
    changed = {"pool": "default", "epoch": str(pool.epoch), "value": str(holder.epoch)}
    assert caught.value.metadata == changed
    for plan in waiting:
        with pytest.raises(RefusedError) as caught:
            ask(mortals.worker.RunStep, holder.step(plan, inputs=[]), wait_for_ready=True)
        assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.ABORTED, "EPOCH_CHANGED")
        assert caught.value.metadata == {"value": str(holder.epoch), "epoch": str(pool.epoch)}
    assert mortals.checksums() == checksums

    holder.epoch = int(changed["epoch"])
    plan = holder.admit((1, PROMPT))
    assert plan.step_number == 1
    assert list(plan.admitted_cached_token_counts) == [0]
    holder.run(plan)
    holder.go_on(1, num_steps=NUM_NEW - 1)
    assert holder.tokens[1] == PROMPT + generate(PROMPT, NUM_NEW)
    assert_whole_after(mortals, holder)


def test_a_killed_cachemgr_is_a_new_term_and_a_new_epoch(mortals: Pair, generate: Generate) -> None:
    holder = begin(mortals)
    waiting = [holder.extend(1), holder.extend(1), holder.extend(1)]
    with mortals.held() as hold:
        running = holder.start(waiting[0])
        hold.await_running()
        mortals.services.cachemgr.kill()
    holder.finish(running)
    holder.run(waiting[1])  # was granted: runs without a cachemgr
    await_that("the worker has noticed", lambda: not mortals.worker_statistics().attached)
    assert mortals.worker_statistics().unacknowledged_report_count >= 2
    restarted(mortals.services.cachemgr)
    await_attached(mortals, not_epoch=holder.epoch)
    statistics = mortals.worker_statistics()
    assert statistics.term == mortals.pool().term > holder.term
    assert (statistics.open_lease_count, statistics.sequence_count) == (0, 0)
    checksums = mortals.checksums()
    assert reason_of(lambda: holder.extend(1)) == "LEASE_NOT_FOUND"
    assert reason_of(holder.renew) == "LEASE_NOT_FOUND"
    assert reason_of(lambda: holder.run(waiting[2])) == "EPOCH_CHANGED"
    assert reason_of(lambda: holder.run(waiting[1])) == "EPOCH_CHANGED"
    assert mortals.checksums() == checksums
    assert holder.tokens[1] == PROMPT + generate(PROMPT, 5)
    later = begin(mortals, num_steps=NUM_NEW)
    assert later.epoch == statistics.epoch
    assert later.tokens[1] == PROMPT + generate(PROMPT, NUM_NEW)
    assert_whole_after(mortals, later)


def test_a_step_that_outlives_its_epoch_is_not_reported_in_the_next(mortals: Pair, generate: Generate) -> None:
    holder = begin(mortals)
    plan = holder.extend(1)
    with mortals.held() as hold:
        running = holder.start(plan)
        hold.await_running()
        mortals.services.cachemgr.kill()
        restarted(mortals.services.cachemgr)
        await_attached(mortals, not_epoch=holder.epoch)
        later = LeaseHolder.create(mortals)
        plan = later.admit((1, PROMPT))
        assert mortals.statistics().computed_step_count == 0
    holder.finish(running)
    assert mortals.statistics().computed_step_count == 0
    later.run(plan)
    later.go_on(1, num_steps=NUM_NEW - 1)
    assert later.tokens[1] == PROMPT + generate(PROMPT, NUM_NEW)
    assert_whole_after(mortals, later)


def test_a_wire_that_is_cut_and_healed_loses_nothing(mortals: Pair, wire: Wire, generate: Generate) -> None:
    holder, ending = begin(mortals), begin(mortals)
    plans = [holder.extend(1) for _ in range(3)]
    last = ending.extend(1)
    epoch = mortals.pool().epoch
    with mortals.held() as hold:
        running = holder.start(plans[0])
        hold.await_running()
        wire.cut()
        await_that("cachemgr has noticed", lambda: not mortals.pool().attached)
        await_that("the worker has noticed", lambda: not mortals.worker_statistics().attached)
    holder.finish(running)
    holder.run(plans[1])  # was granted
    ending.delete()
    held = mortals.counts().active_count
    ending.run(last)  # was granted, and the worker does not know of the end: the blocks are still the lease's
    assert mortals.counts().active_count == held
    assert mortals.has_lease(ending.lease_id)
    assert mortals.worker_statistics().unacknowledged_report_count >= 3
    planned = holder.extend(1)
    wire.heal()
    await_that("the worker is back", lambda: mortals.pool().attached)
    await_that("the lease is gone", lambda: not mortals.has_lease(ending.lease_id))
    assert reason_of(lambda: ending.run(last)) == "LEASE_FENCED"
    assert mortals.pool().epoch == epoch
    holder.run(plans[2])
    holder.run(planned)
    holder.await_settled()
    assert holder.sequence(1).computed_token_count == len(PROMPT) + 6
    assert mortals.cached_tokens([*holder.tokens[1][:24], 0]) == 24
    await_that("all reports are acknowledged", lambda: not mortals.worker_statistics().unacknowledged_report_count)
    holder.go_on(1, num_steps=NUM_NEW - 7)
    assert holder.tokens[1] == PROMPT + generate(PROMPT, NUM_NEW)
    assert_whole_after(mortals, holder)


def test_a_damaged_pool_is_a_new_epoch(mortals: Pair, generate: Generate) -> None:
    holder, bystander = begin(mortals), begin(mortals)
    plans = [holder.extend(1), bystander.extend(1), holder.extend(1)]
    with mortals.held() as hold:
        first = holder.start(plans[0])
        hold.await_running()
        others = [bystander.start(plans[1]), holder.start(plans[2])]
        await_that("all are in line", lambda: mortals.worker_statistics().step_in_flight_count == 3)
        with mortals.fault("damage"):  # strikes once
            hold.release()
            holder.finish(first)
            for running in others:  # a pool with unknown content is not computed on
                with pytest.raises(RefusedError) as caught:
                    holder.finish(running)
                assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.ABORTED, "EPOCH_CHANGED")
    await_attached(mortals, not_epoch=holder.epoch)
    for damaged in (holder, bystander):
        assert reason_of(lambda: damaged.extend(1)) == "EPOCH_CHANGED"  # noqa: B023
        damaged.epoch = mortals.pool().epoch
        damaged.run(damaged.admit((1, PROMPT)))
        damaged.go_on(1, num_steps=NUM_NEW - 1)
        assert damaged.tokens[1] == PROMPT + generate(PROMPT, NUM_NEW)
    assert_whole_after(mortals, holder, bystander)


def test_a_second_cachemgr_can_not_bind_what_the_first_has(mortals: Pair, port: int, generate: Generate) -> None:
    holder = begin(mortals)
    for address in (mortals.services.cachemgr_address, f"127.0.0.1:{port}"):
        log_path = mortals.folder / "second.log"
        arguments = ("--listen", address)
        second = ServiceProcess(
            "second", target="quire.cachemgr", arguments=arguments, address=address, log_path=log_path
        )
        try:
            second.start()
            assert second.wait_exited(DEADLINE_S)
        finally:
            second.kill()
        assert second.returncode == 1
        assert "listening there" in second.log_tail()
    holder.go_on(1, num_steps=NUM_NEW - 3)
    assert holder.tokens[1] == PROMPT + generate(PROMPT, NUM_NEW)
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        get_pool = channel.unary_unary(
            f"/{CACHE_SERVICE}/GetPool",
            cache_service_pb2.GetPoolRequest.SerializeToString,
            cache_service_pb2.GetPoolResponse.FromString,
        )
        assert ask(get_pool, cache_service_pb2.GetPoolRequest(), wait_for_ready=True).pool.term == holder.term
    assert_whole_after(mortals, holder)


def test_a_second_worker_of_a_pool_is_refused_until_the_first_is_gone(
    mortals: Pair, model_dir: Path, generate: Generate
) -> None:
    holder = begin(mortals)
    address = f"unix:{mortals.folder}/second.sock"
    flags = ("--listen", address, "--cachemgr", mortals.services.cachemgr_address, "--model", str(model_dir))
    second = ServiceProcess(
        "second",
        target="quire.worker",
        arguments=(*flags, "--num-blocks", str(NUM_BLOCKS), *WORKER_ARGS),
        address=address,
        log_path=mortals.folder / "second-worker.log",
    )
    try:
        second.start()
        refusal = f"a worker with epoch {holder.epoch} is attached"
        await_that("it is refused", lambda: refusal in second.log_tail(), timeout_s=DEADLINE_S)
        with grpc.insecure_channel(address) as channel:
            run_without_a_cachemgr(channel)
        assert second.terminate() == 0
    finally:
        second.kill()
    assert mortals.pool().epoch == holder.epoch
    holder.go_on(1, num_steps=NUM_NEW - 3)
    assert holder.tokens[1] == PROMPT + generate(PROMPT, NUM_NEW)
    assert_whole_after(mortals, holder)


def run_without_a_cachemgr(channel: grpc.Channel) -> None:
    """A worker without a cachemgr runs nothing, even for its own epoch."""
    get_model = channel.unary_unary(
        f"/{WORKER_SERVICE}/GetModel",
        worker_service_pb2.GetModelRequest.SerializeToString,
        worker_service_pb2.GetModelResponse.FromString,
    )
    run_step = channel.unary_unary(
        f"/{WORKER_SERVICE}/RunStep",
        worker_service_pb2.RunStepRequest.SerializeToString,
        worker_service_pb2.RunStepResponse.FromString,
    )
    model = ask(get_model, worker_service_pb2.GetModelRequest(), wait_for_ready=True)
    grant = grant_pb2.StepGrant(pool=model.pool, epoch=model.epoch, lease_id="a", step_number=1)
    signed = grant_pb2.SignedGrant(grant=grant.SerializeToString(), signature=bytes(32))
    with pytest.raises(RefusedError) as caught:
        ask(run_step, worker_service_pb2.RunStepRequest(grant=signed))
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.UNAVAILABLE, "POOL_DETACHED")
    assert caught.value.metadata == {"pool": "default"}


# -- SIGTERM ------------------------------------------------------------------------------------------------------


def signal_and_watch(process: ServiceProcess, watch: Any) -> None:
    """Sends SIGTERM; returns when health has gone from SERVING to NOT_SERVING."""
    assert next(watch).status == SERVING
    assert process.pid is not None
    threading.Thread(target=process.terminate, args=(DEADLINE_S,), daemon=True).start()
    assert next(watch).status == NOT_SERVING


def stay_open(requests: Iterable[Any], process: ServiceProcess) -> Iterator[Any]:
    """A stream's requests; the stream is not ended from here while the process lives."""
    yield from requests
    process.wait_exited(DEADLINE_S)


def test_a_cachemgr_that_is_told_to_stop_ends_its_streams_and_leaves(mortals: Pair, generate: Generate) -> None:
    holder = begin(mortals)
    plans = [holder.extend(1) for _ in range(2)]
    cachemgr = mortals.services.cachemgr
    request = cache_service_pb2.PlanStepsRequest(plan=holder.plan_request())
    stream = mortals.cache.PlanSteps(stay_open([request], cachemgr), timeout=DEADLINE_S)
    assert next(stream).plan.step_number == plans[-1].step_number + 1
    watch = mortals.health(mortals.cache_channel, CACHE_SERVICE)
    with mortals.held() as hold:
        running = holder.start(plans[0])
        hold.await_running()
        signal_and_watch(cachemgr, watch)
        with pytest.raises(grpc.RpcError) as ended:
            next(stream)
        error = RefusedError.of_call(ended.value)
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")
        assert cachemgr.wait_exited(DEADLINE_S)
    assert cachemgr.returncode == 0
    assert not Path(mortals.services.cachemgr_address.removeprefix("unix:")).exists()
    holder.finish(running)  # was granted
    holder.run(plans[1])
    assert holder.tokens[1] == PROMPT + generate(PROMPT, 5)


def test_a_worker_that_is_told_to_stop_finishes_what_runs(mortals: Pair, generate: Generate) -> None:
    holder = begin(mortals)
    plans = [holder.extend(1) for _ in range(4)]
    worker = mortals.services.worker
    watch = mortals.health(mortals.worker_channel, WORKER_SERVICE)
    with mortals.held() as hold:
        running = holder.start(plans[0])
        hold.await_running()
        sent = [worker_service_pb2.RunStepsRequest(step=holder.step(plan)) for plan in plans[1:3]]
        answers = mortals.worker.RunSteps(stay_open(sent, worker), timeout=DEADLINE_S)
        await_that("all are in line", lambda: mortals.worker_statistics().step_in_flight_count == 3)
        signal_and_watch(worker, watch)
        with pytest.raises(RefusedError) as caught:
            holder.run(plans[3])
        assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")
        assert worker.is_running
    holder.finish(running)
    for _ in sent:
        holder.keep(next(answers).step)
    with pytest.raises(grpc.RpcError) as ended:
        next(answers)
    assert RefusedError.of_call(ended.value).reason == "SHUTTING_DOWN"
    assert holder.tokens[1] == PROMPT + generate(PROMPT, 6)
    assert worker.wait_exited(DEADLINE_S)
    assert worker.returncode == 0
    assert not Path(mortals.services.worker_address.removeprefix("unix:")).exists()
    await_that("cachemgr has noticed", lambda: not mortals.pool().attached)
    holder.delete()
