"""Processes that tests share, and those that a test may kill. Every one is ended by its own handle."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from deadlines import DEADLINE_S
from integration.lone_cachemgr import ROOMY_POOL, SMALL_POOL, Begin, Bookkeeper, LoneCachemgr, Serve, Tenant, call
from integration.protocol_client import (
    FAULTY_WORKER,
    NUM_BLOCKS,
    WORKER_ARGS,
    LeaseHolder,
    Pair,
    StandInWorker,
    await_that,
)

from quire.cache.v1 import cache_service_pb2
from quire.cli.launch import LocalServices

CreateLease = Callable[..., LeaseHolder]
Generate = Callable[[list[int], int], list[int]]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with random weights."""
    from model_zoo import save  # imports torch, which most tests here do not need

    return save("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def generate() -> Generate:
    """generate(prompt, n): n greedy tokens by transformers alone."""
    import torch
    from model_zoo import build

    model = build("llama")

    def generate(prompt: list[int], num_tokens: int) -> list[int]:
        ids = torch.tensor([prompt])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False)
        tokens: list[int] = output[0, len(prompt) :].tolist()
        return tokens

    return generate


@pytest.fixture(scope="session")
def shared_pair(model_dir: Path) -> Iterator[Pair]:
    """Both processes, for all tests that leave them alive."""
    with LocalServices.start(
        model=model_dir, num_blocks=NUM_BLOCKS, extra_worker_args=WORKER_ARGS, worker_target=FAULTY_WORKER
    ) as services:
        pair = Pair(services)
        yield pair
        pair.close()
        assert_nothing_unexpected(services)


@pytest.fixture
def pair(shared_pair: Pair) -> Iterator[Pair]:
    """The shared processes with an empty prefix cache. After the test every block has to be back (I8)."""
    epoch = shared_pair.pool().epoch
    cache_service = shared_pair.cache
    cache_service.ResetPrefixCache(cache_service_pb2.ResetPrefixCacheRequest(pool="default"), timeout=DEADLINE_S)
    yield shared_pair
    await_all_blocks_back(shared_pair)
    assert shared_pair.violations() == []
    assert shared_pair.pool().epoch == epoch
    statistics = shared_pair.worker_statistics()
    assert (statistics.sequence_count, statistics.open_lease_count, statistics.attached) == (0, 0, True)


@pytest.fixture
def create_lease(pair: Pair) -> Iterator[CreateLease]:
    """Makes leases, which end with the test."""
    made: list[LeaseHolder] = []

    def create(**options: Any) -> LeaseHolder:
        made.append(LeaseHolder.create(pair, **options))
        return made[-1]

    yield create
    for holder in made:
        holder.delete()


@pytest.fixture
def lease(create_lease: CreateLease) -> LeaseHolder:
    return create_lease()


@pytest.fixture
def attach(pair: Pair) -> Iterator[Callable[[], StandInWorker]]:
    """Opens attachments, which end with the test."""
    opened: list[StandInWorker] = []

    def attach() -> StandInWorker:
        opened.append(StandInWorker(pair))
        return opened[-1]

    yield attach
    for worker in opened:
        worker.close()


@pytest.fixture
def serve(cachemgr: LoneCachemgr, request: pytest.FixtureRequest) -> Iterator[Serve]:
    """Attaches pools of the test's own to the module's cachemgr; the same pool again is a new epoch of it."""
    attached: list[Bookkeeper] = []
    own = re.sub(r"[^A-Za-z0-9._-]", "-", request.node.name)

    def serve(pool: str = own, *, num_blocks: int = 9, **geometry: int) -> Bookkeeper:
        for before in attached:
            if before.pool == pool:
                before.detach()
        fields = {"block_count": num_blocks} | ROOMY_POOL | geometry
        attached.append(Bookkeeper(cachemgr, pool, epoch=len(attached) + 1, **fields))
        return attached[-1]

    yield serve
    for bookkeeper in attached:
        bookkeeper.detach()


@pytest.fixture
def worker(cachemgr: LoneCachemgr, serve: Serve) -> Iterator[Bookkeeper]:
    """A small pool of the test's own; at its end nothing may be wrong with it."""
    worker = serve(**SMALL_POOL)
    yield worker
    assert list(call(cachemgr, "olga", "AuditPool", pool=worker.pool).violations) == []


@pytest.fixture
def begin(cachemgr: LoneCachemgr, worker: Bookkeeper) -> Begin:
    """begin(caller): a lease of alice's, or of the caller given, on the small pool."""
    return lambda caller="alice": Tenant.begin(cachemgr, worker, caller)


def assert_nothing_unexpected(services: LocalServices) -> None:
    """No handler has failed in a way it did not foresee, and nothing was left behind on an event loop."""
    for service in (services.cachemgr, services.worker):
        assert service.log_path is not None
        lines = service.log_path.read_text().splitlines()
        signs = ("handler failed", "Traceback", "never retrieved", "was destroyed", "pool damaged")
        assert not [line for line in lines if any(sign in line for sign in signs)]


def await_all_blocks_back(pair: Pair) -> None:
    def all_back() -> bool:
        pool = pair.pool()
        counts = pool.block_counts
        return counts.free_count + counts.cached_count == pool.geometry.block_count - 1 and not pool.lease_count

    await_that("every block is free or cached", all_back)
