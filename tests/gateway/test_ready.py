"""A gateway without requests: services that go or come back are noticed, and its lease has the asked time to live."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from click.testing import CliRunner
from deadlines import DEADLINE_S
from gateway.conftest import MODEL, ROOT, Gateway
from integration.protocol_client import await_that

from quire.cache.v1 import cache_service_pb2, cache_service_pb2_grpc
from quire.cli.launch import LocalServices
from quire.engine.v1 import engine_service_pb2, engine_service_pb2_grpc
from quire.gateway.__main__ import main

LEASE_TTL_S = 1.5


@pytest.fixture(scope="module")
def own_services() -> Iterator[LocalServices]:
    with LocalServices.start(model=ROOT / "deploy/demo/model", num_blocks=64) as services:
        yield services


class Readiness:
    """A gateway, asked over HTTP, over gRPC and by its metric: all have to say the same."""

    def __init__(self, gateway: Gateway, grpc_address: str) -> None:
        self.gateway = gateway
        self._grpc_address = grpc_address

    def says(self, is_ready: bool) -> bool:
        with self.gateway.client() as client:
            is_http = client.get("/ready").status_code == 200
        with grpc.insecure_channel(self._grpc_address, options=[("grpc.enable_http_proxy", 0)]) as channel:
            stub = engine_service_pb2_grpc.EngineServiceStub(channel)
            answer = stub.ListModels(engine_service_pb2.ListModelsRequest(), timeout=DEADLINE_S, wait_for_ready=True)
        is_metric = self.gateway.metric("quire_gateway_ready") == 1
        return {is_http, answer.models[0].ready, is_metric} == {is_ready}

    def await_says(self, is_ready: bool) -> None:
        await_that(f"ready is {is_ready}", lambda: self.says(is_ready))


@pytest.fixture(scope="module", params=["pool", "router"])
def readiness(
    own_services: LocalServices, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Readiness]:
    address = f"unix:{own_services.runtime_dir}/engine-{request.param}.sock"
    flags = ("--pool", "default") if request.param == "pool" else ()
    log = tmp_path_factory.mktemp(request.param) / "log"
    gateway = Gateway(own_services.cachemgr_address, "--grpc-listen", address, *flags, log=log)
    yield Readiness(gateway, address)
    gateway.close()


@pytest.mark.parametrize("name", ["worker", "cachemgr"])
def test_a_service_that_goes_and_comes_back_is_noticed_without_a_request(
    readiness: Readiness, own_services: LocalServices, name: str
) -> None:
    readiness.await_says(True)
    service = getattr(own_services, name)
    service.kill()
    readiness.await_says(False)
    service.restart()
    readiness.await_says(True)


def test_an_outage_that_nobody_waits_for_any_more_ends_without_a_request(
    readiness: Readiness, own_services: LocalServices
) -> None:
    body = {"model": MODEL, "prompt": "A class is", "max_tokens": 400, "ignore_eos": True, "stream": True}
    url = f"{readiness.gateway.url}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=DEADLINE_S) as answer:
        next(answer.iter_lines())
        own_services.worker.kill()
        readiness.await_says(False)
    await_that("the request has ended", lambda: not readiness.gateway.metric("quire_gateway_requests"))
    own_services.worker.restart()
    readiness.await_says(True)


@pytest.mark.parametrize("flags", [("--pool", "default"), ()], ids=["pool", "router"])
def test_a_killed_gateways_lease_ends_after_the_time_of_its_flag(
    own_services: LocalServices, flags: tuple[str, ...], tmp_path: Path
) -> None:
    gateway = Gateway(own_services.cachemgr_address, "--lease-ttl", str(LEASE_TTL_S), *flags, log=tmp_path / "log")
    try:
        assert LEASE_TTL_S in ttls_of_leases(own_services)
        gateway.process.kill()
        await_that("the lease has ended", lambda: LEASE_TTL_S not in ttls_of_leases(own_services))
    finally:
        gateway.close()


def ttls_of_leases(services: LocalServices) -> set[float]:
    with grpc.insecure_channel(services.cachemgr_address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub = cache_service_pb2_grpc.CacheServiceStub(channel)
        answer = stub.ListLeases(cache_service_pb2.ListLeasesRequest(), timeout=DEADLINE_S)
    return {lease.ttl.ToTimedelta().total_seconds() for lease in answer.leases}


@pytest.mark.parametrize("seconds", ["0.5", "3601", "x"])
def test_a_lease_ttl_out_of_its_range_is_no_start(seconds: str) -> None:
    done = CliRunner().invoke(main, ["--lease-ttl", seconds])
    assert done.exit_code == 2
    assert "--lease-ttl" in done.output
