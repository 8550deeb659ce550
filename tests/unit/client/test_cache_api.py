"""The suite of every CacheApi: the client of a CacheService, the gateway's view of it, and the tests' stand-ins."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import grpc
import pytest
from deadlines import DEADLINE_S
from unit.engine.test_engine import PROMPT_END, Services, geometry
from unit.gateway.test_gateway_routing import Cache, Pool

from quire.cache.v1 import attach_pb2
from quire.cache.v1 import cache_service_pb2 as pb
from quire.cachemgr.catalog import Catalog
from quire.cachemgr.service import messages
from quire.cachemgr.service.attachments import Attachments
from quire.cachemgr.service.servicer import CacheServicer
from quire.client import CacheApi, CacheClient, EpochChanged
from quire.gateway.routing.members import SameModel

POOL = "p"
TTL_S = 30.0


@asynccontextmanager
async def client(folder: Path) -> AsyncIterator[CacheApi]:
    """A CacheClient of a server in this process, with a pool that has every lease accepted."""
    shape = geometry()
    shape.block_bytes, shape.model, shape.model_fingerprint = 8, "m", "weights"
    registration = attach_pb2.RegisterPool(pool=POOL, epoch=1, geometry=shape, worker_address="w")
    catalog = Catalog(1, verify=True)
    catalog.register(messages.decode_registration(registration), signing_key=bytes(32))
    server = grpc.aio.server()
    CacheServicer(catalog).add_to(server)
    address = f"unix:{folder}/s"
    server.add_insecure_port(address)
    await server.start()
    cache = CacheClient(address)
    try:
        yield cache
    finally:
        await cache.close()
        await server.stop(None)


@asynccontextmanager
async def same_model(folder: Path) -> AsyncIterator[CacheApi]:
    async with client(folder) as cache:
        yield SameModel(cache, "weights")


@asynccontextmanager
async def engine_services(folder: Path) -> AsyncIterator[CacheApi]:
    yield Services()


@asynccontextmanager
async def routed_cache(folder: Path) -> AsyncIterator[CacheApi]:
    yield Cache({POOL: Pool(POOL)})


IMPLEMENTATIONS = (client, same_model, engine_services, routed_cache)
Body = Callable[[CacheApi], Awaitable[None]]
Run = Callable[[Body], None]


@pytest.fixture(params=IMPLEMENTATIONS, ids=lambda implementation: implementation.__name__)
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a test's body with one implementation."""
    implementation: Callable[[Path], AbstractAsyncContextManager[CacheApi]] = request.param

    async def accept(self: Attachments, pool: object, lease_id: str) -> None:
        pass

    monkeypatch.setattr(Attachments, "open_lease", accept)

    async def main(body: Body) -> None:
        async with implementation(tmp_path) as cache:
            await asyncio.wait_for(body(cache), DEADLINE_S)

    return lambda body: asyncio.run(main(body))


def admission(lease: pb.CreateLeaseResponse, *, epoch: int | None = None, request_id: str = "") -> pb.PlanStepRequest:
    """A plan that admits a sequence of three tokens."""
    return pb.PlanStepRequest(
        lease_id=lease.lease_id,
        epoch=lease.epoch if epoch is None else epoch,
        request_id=request_id,
        admissions=[pb.Admission(sequence_id=1, token_ids=[1, 2, PROMPT_END])],
        admission_token_budget=100,
    )


def test_a_lease_names_the_pool_as_the_pool_itself_does(run: Run) -> None:
    async def body(cache: CacheApi) -> None:
        lease, pool = await cache.create_lease(POOL, ttl_s=TTL_S), await cache.get_pool(POOL)
        assert (lease.pool, lease.epoch, lease.worker_address) == (pool.name, pool.epoch, pool.worker_address)
        assert lease.worker_address
        assert lease.geometry.block_count == pool.geometry.block_count > 0
        await cache.renew_lease(lease.lease_id)

    run(body)


def test_leases_have_different_ids(run: Run) -> None:
    async def body(cache: CacheApi) -> None:
        leases = [await cache.create_lease(POOL, ttl_s=TTL_S) for _ in range(3)]
        assert len({lease.lease_id for lease in leases}) == 3

    run(body)


def test_a_plan_has_the_runs_of_its_admissions(run: Run) -> None:
    async def body(cache: CacheApi) -> None:
        plan = await cache.plan(admission(await cache.create_lease(POOL, ttl_s=TTL_S)))
        assert (plan.step_number, plan.admitted_sequence_ids, plan.refusals) == (1, [1], [])
        assert (plan.run_sequence_ids, plan.run_token_counts) == ([1], [3])

    run(body)


def test_a_repeated_plan_gets_its_first_answer(run: Run) -> None:
    async def body(cache: CacheApi) -> None:
        request = admission(await cache.create_lease(POOL, ttl_s=TTL_S), request_id="one")
        first = await cache.plan(request)
        await cache.hang_up()
        assert await cache.plan(request) == first

    run(body)


def test_a_plan_for_another_epoch_is_refused_with_the_present_one(run: Run) -> None:
    async def body(cache: CacheApi) -> None:
        lease = await cache.create_lease(POOL, ttl_s=TTL_S)
        with pytest.raises(EpochChanged) as caught:
            await cache.plan(admission(lease, epoch=lease.epoch + 1))
        assert caught.value.epoch == lease.epoch
        assert (await cache.plan(admission(lease))).step_number == 1, "nothing was changed"

    run(body)


def test_a_lease_can_be_ended_twice(run: Run) -> None:
    async def body(cache: CacheApi) -> None:
        lease = await cache.create_lease(POOL, ttl_s=TTL_S)
        for _ in range(2):
            await cache.delete_lease(lease.lease_id)
        await cache.close()

    run(body)
