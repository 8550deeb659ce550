"""Limits of a real cachemgr: reached, said with when to ask again, and nothing of others lost."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from certificates import sha256
from integration.protocol_client import (
    CHANNEL_OPTIONS,
    DEADLINE_S,
    LeaseHolder,
    Pair,
    RefusedError,
    StandInWorker,
    ask,
    await_that,
    seconds,
)

from quire.cache.v1 import attach_pb2, cache_service_pb2, cache_service_pb2_grpc
from quire.cli.service_process import ServiceExitedError, ServiceProcess

TOKENS = f"""
alice client {sha256("t-alice")}
bob client {sha256("t-bob")}
carol client {sha256("t-carol")}
wanda worker,operator {sha256("t-wanda")}
"""
MAX_LEASES = 6
MAX_ATTACHMENTS = 1_024
MANY_DEADLINE_S = 120.0
POOL = "p"

Start = Callable[..., ServiceProcess]


class Alone(Pair):
    """A cachemgr without a worker of its own, as one caller reaches it."""

    def __init__(self, address: str, token: str | None = None) -> None:
        channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self.cache_channel = grpc.intercept_channel(channel, *([WithToken(token)] if token else []))
        self.cache: Any = cache_service_pb2_grpc.CacheServiceStub(self.cache_channel)
        self._channel = channel

    def close(self) -> None:
        self._channel.close()


class WithToken(grpc.UnaryUnaryClientInterceptor, grpc.StreamStreamClientInterceptor):
    """Shows a token with each call."""

    def __init__(self, token: str) -> None:
        self._metadata = (("authorization", f"Bearer {token}"),)

    def _with_token(self, proceed: Any, details: Any, request: Any) -> Any:
        return proceed(details._replace(metadata=self._metadata), request)

    intercept_unary_unary = intercept_stream_stream = _with_token


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts a cachemgr with flags."""
    made: list[ServiceProcess] = []

    def start(*flags: str) -> ServiceProcess:
        folder = tmp_path_factory.mktemp("q")
        address = f"unix:{folder}/s"
        arguments = ("--listen", address, *flags)
        made.append(
            ServiceProcess("c", target="quire.cachemgr", arguments=arguments, address=address, log_path=folder / "log")
        )
        made[-1].start()
        made[-1].wait_serving(DEADLINE_S)
        return made[-1]

    yield start
    for server in made:
        server.kill()


@pytest.fixture
def call_as(start: Start) -> Iterator[Callable[..., Alone]]:
    """Callers of servers; every connection is closed at the end."""
    made: list[Alone] = []

    def call_as(server: ServiceProcess, token: str | None = None) -> Alone:
        made.append(Alone(server.address, token))
        return made[-1]

    yield call_as
    for each in made:
        each.close()


def attached(worker_side: Alone) -> StandInWorker:
    worker = StandInWorker(worker_side)
    worker.register(POOL)
    return worker


def create(pair: Alone, **fields: Any) -> Any:
    """CreateLease, which waits for the worker; its future."""
    request = cache_service_pb2.CreateLeaseRequest(pool=POOL, ttl=seconds(60), **fields)
    return pair.cache.CreateLease.future(request, timeout=DEADLINE_S)


def refused(call: Any) -> RefusedError:
    with pytest.raises(grpc.RpcError) as caught:
        call.result()
    return RefusedError.of_call(caught.value)


def fence(worker: StandInWorker) -> None:
    """Obeys the order that comes next."""
    lease_id = worker.hear().fence_lease.lease_id
    assert lease_id
    worker.say(lease_fenced=attach_pb2.LeaseFenced(lease_id=lease_id))


def obey(worker: StandInWorker) -> None:
    """From here on every lease is opened, until the stream ends."""

    def open_leases() -> None:
        with contextlib.suppress(RefusedError):
            for order in iter(worker.hear, None):
                if order.HasField("open_lease"):
                    worker.say(lease_opened=attach_pb2.LeaseOpened(lease_id=order.open_lease.lease_id))

    threading.Thread(target=open_leases, daemon=True).start()


def test_there_are_as_many_leases_as_the_operator_says(start: Start, call_as: Any) -> None:
    server = start("--max-leases", str(MAX_LEASES))
    client = call_as(server)
    worker = attached(client)
    leases = [worker.create_lease(client, POOL) for _ in range(MAX_LEASES)]
    answer = refused(create(client))
    assert (answer.code, answer.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_LEASES")
    assert answer.metadata == {"limit": str(MAX_LEASES), "limited_by": "server"}
    assert answer.retry_delay_s == 1.0
    assert server.log_path is not None
    log_path, told = server.log_path, "refused method=/quire.cache.v1.CacheService/CreateLease reason=TOO_MANY_LEASES"
    await_that("the operator is told", lambda: f" WARNING quire.serving.interceptor {told}" in log_path.read_text())
    for lease in leases:
        lease.renew()
    leases[2].delete()
    assert refused(create(client)).reason == "TOO_MANY_LEASES", "its blocks are not back yet"
    fence(worker)
    await_that("it is gone", lambda: len(client.leases(POOL)) == MAX_LEASES - 1)

    obey(worker)

    def made_again() -> LeaseHolder | None:
        # Leases are counted again ten times a second at most.
        try:
            made = create(client).result()
        except grpc.RpcError:
            return None
        return LeaseHolder(client, made.lease_id, made.epoch, made.term)

    leases[2] = await_that("there is room again", made_again)
    for lease in leases:
        lease.renew()
    assert refused(create(client)).reason == "TOO_MANY_LEASES"


TENANTS = """
[default]
max_leases = 1
[tenants.alice]
max_leases = 2
[tenants.bob]
"""


def test_each_tenant_has_as_many_leases_as_its_file_says(start: Start, call_as: Any, tmp_path: Path) -> None:
    tokens, tenants = tmp_path / "tokens", tmp_path / "tenants.toml"
    tokens.write_text(TOKENS)
    tenants.write_text(TENANTS)
    server = start("--token-file", str(tokens), "--tenants", str(tenants), "--max-leases", str(MAX_LEASES))
    alice, bob, carol = (call_as(server, token) for token in ("t-alice", "t-bob", "t-carol"))
    worker = attached(call_as(server, "t-wanda"))
    held = [worker.create_lease(alice, POOL) for _ in range(2)] + [worker.create_lease(carol, POOL)]
    for tenant, limit in ((alice, "2"), (carol, "1")):
        answer = refused(create(tenant))
        assert (answer.reason, answer.retry_delay_s) == ("TOO_MANY_LEASES", 1.0)
        assert answer.metadata == {"limit": limit, "limited_by": "tenant"}
    held += [worker.create_lease(bob, POOL) for _ in range(MAX_LEASES - 3)]
    assert refused(create(bob)).metadata == {"limit": str(MAX_LEASES), "limited_by": "server"}
    for lease in held:
        lease.renew()


def test_a_tenants_file_is_read_again(start: Start, call_as: Any, tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.toml"
    tenants.write_text("[default]\nmax_leases = 1")
    server = start("--tenants", str(tenants))
    client = call_as(server)
    worker = attached(client)
    worker.create_lease(client, POOL)
    assert refused(create(client)).reason == "TOO_MANY_LEASES"
    tenants.write_text("[default]\nmax_leases = 1\nmin_leases = 0")
    assert refused(create(client)).reason == "TOO_MANY_LEASES"
    assert server.log_path is not None
    assert "tenants file not reloaded, the one before stays" in server.log_path.read_text()
    tenants.write_text("[default]\nmax_leases = 2")
    worker.create_lease(client, POOL)


def test_a_tenants_file_that_is_wrong_is_no_start(start: Start, tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.toml"
    tenants.write_text("[tenants.a]\nflour = 1")
    with pytest.raises(ServiceExitedError, match=r"tenants\.toml: tenants\.a\.flour is not known"):
        start("--tenants", str(tenants))


def test_a_tenant_can_not_get_the_lease_of_another_by_its_request_id(
    start: Start, call_as: Any, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(TOKENS)
    server = start("--token-file", str(tokens))
    worker = attached(call_as(server, "t-wanda"))
    made = []
    for token in ("t-alice", "t-bob"):
        creating = create(call_as(server, token), request_id="the same")
        lease_id = worker.hear().open_lease.lease_id
        worker.say(lease_opened=attach_pb2.LeaseOpened(lease_id=lease_id))
        made.append(creating.result().lease_id)
    assert len(set(made)) == 2


def test_more_workers_than_may_attach_are_refused_and_the_others_stay(start: Start, call_as: Any) -> None:
    server = start()

    async def attach_many() -> None:
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub: Any = cache_service_pb2_grpc.CacheServiceStub(channel)
            streams = [stub.AttachPool(timeout=MANY_DEADLINE_S) for _ in range(MAX_ATTACHMENTS)]
            for stream in streams:
                await stream.write(unacceptable())
            for stream in streams:
                assert (await stream.read()).HasField("new_epoch_required")
            one_too_many = stub.AttachPool(timeout=MANY_DEADLINE_S)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await one_too_many.read()
            answer = RefusedError.of_call(caught.value)
            assert (answer.code, answer.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
            assert (answer.metadata, answer.retry_delay_s) == ({"limit": str(MAX_ATTACHMENTS)}, 0.1)
            for stream in (streams[0], streams[-1]):
                await stream.write(unacceptable())
                assert (await stream.read()).HasField("new_epoch_required"), "it is still heard"
            for stream in streams:
                stream.cancel()

    asyncio.run(attach_many())
    client = call_as(server)

    def attaches() -> bool:
        other = StandInWorker(client)
        try:
            return other.register("q").HasField("attached")
        except RefusedError:
            return False
        finally:
            other.close()

    await_that("there is room again", attaches)


def unacceptable() -> attach_pb2.AttachPoolRequest:
    """A registration that is answered with the order to begin a new epoch; the stream stays open."""
    geometry = attach_pb2.PoolGeometry(
        block_size_tokens=4,
        block_count=9,
        block_bytes=1,
        max_sequence_count=1,
        max_sequence_tokens=8,
        vocabulary_size=9,
    )
    registration = attach_pb2.RegisterPool(pool="other", epoch=1, attached_term=1, geometry=geometry)
    return attach_pb2.AttachPoolRequest(register_pool=registration)


def test_many_clients_at_once_never_get_more_leases_than_there_may_be(start: Start, call_as: Any) -> None:
    client = call_as(start("--max-leases", str(MAX_LEASES)))
    worker = attached(client)
    obey(worker)
    creating = [create(client, request_id=str(number % 20)) for number in range(40)]
    made: set[str] = set()
    reasons: list[str] = []
    for each in creating:
        try:
            made.add(each.result().lease_id)
        except grpc.RpcError as error:
            reasons.append(RefusedError.of_call(error).reason)
    assert len(made) == MAX_LEASES == len(client.leases(POOL)), "two calls of one request_id get one lease"
    assert reasons == ["TOO_MANY_LEASES"] * (40 - 2 * MAX_LEASES)


def test_what_is_away_says_when_to_ask_again(start: Start, call_as: Any) -> None:
    client = call_as(start())
    worker = attached(client)
    worker.close()
    await_that("it is detached", lambda: not client.pool(POOL).attached)
    answer = refused(create(client))
    assert (answer.reason, answer.retry_delay_s) == ("POOL_DETACHED", 1.0)
    with pytest.raises(RefusedError) as unknown:
        ask(client.cache.GetPool, cache_service_pb2.GetPoolRequest(pool="nowhere"))
    assert (unknown.value.reason, unknown.value.retry_delay_s) == ("POOL_NOT_FOUND", None)


# -- time that cachemgr itself was late -----------------------------------------------------------------------------


def test_a_lease_does_not_expire_for_time_in_which_cachemgr_was_stopped(start: Start, call_as: Any) -> None:
    """Its renewal waits in the socket. A lease without renewals expires all the same."""
    server = start()
    client = call_as(server)
    worker = attached(client)
    renewed, left = (worker.create_lease(client, POOL, ttl_s=1.0) for _ in range(2))
    assert server.pid is not None
    process = psutil.Process(server.pid)
    process.suspend()
    request = cache_service_pb2.RenewLeaseRequest(lease_id=renewed.lease_id)
    renewal = client.cache.RenewLease.future(request, timeout=DEADLINE_S)
    resume_at = time.monotonic() + 4.0
    await_that("leases would have expired", lambda: time.monotonic() >= resume_at)
    process.resume()
    renewal.result()

    def has_expired() -> bool:
        renewed.renew()
        states = {lease.lease_id_prefix: lease.state for lease in client.leases(POOL)}
        return states.get(left.lease_id[:8]) != cache_service_pb2.LEASE_STATE_OPEN

    await_that("the other one has expired", has_expired)
    assert "the event loop was held; leases are extended" in (server.log_path or Path()).read_text()
