"""Both services over mTLS and with tokens, with certificates made here: the whole path, attachments, commands."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import ssl
import subprocess
import sysconfig
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificates import Authority, Pair, sha256
from integration.protocol_client import (
    CACHE_SERVICE,
    CHANNEL_OPTIONS,
    DEADLINE_S,
    NUM_BLOCKS,
    WORKER_ARGS,
    WORKER_SERVICE,
    RefusedError,
    await_that,
    draw_tokens,
)
from ports import free_ports

from quire.cache.v1 import cache_service_pb2, cache_service_pb2_grpc
from quire.cli.launch import LocalServices
from quire.client import AccessDenied, CacheClient, Credentials, Engine, Unavailable, WorkerClient
from quire.client.engine.sampling import SamplingParams
from quire.compute.v1 import worker_service_pb2, worker_service_pb2_grpc

QUIRE = str(Path(sysconfig.get_path("scripts")) / "quire")
DENIED, UNKNOWN = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED
TOKENS = f"""
alice   client          {sha256("a-token")}
bob     client          {sha256("b-token")}
olga    operator        {sha256("o-token")}
wanda   worker          {sha256("w-token")}
worker-1.example    client  cert
engine.example      client  cert
"""


@dataclasses.dataclass
class Cluster:
    """The two processes, their addresses and credentials."""

    services: LocalServices
    authority: Authority
    tokens: Path
    certificate: Pair
    cachemgr: str
    cachemgr_by_token: str
    worker: str
    worker_by_token: str
    metrics: int

    def credentials(self, name: str | None = None, *, token: str | None = None) -> Credentials:
        """Those of a certificate of this name, or of a token."""
        if name is None:
            return Credentials(tls_ca=self.authority.path, token=token)
        pair = self.authority.issue(name)
        return Credentials(tls_ca=self.authority.path, tls_cert=pair.cert, tls_key=pair.key, token=token)

    def environment(self, **more: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")}
        return {**kept, "QUIRE_TLS_CA": str(self.authority.path), **more}

    def worker_log(self) -> str:
        assert self.services.worker.log_path is not None
        return self.services.worker.log_path.read_text()


@pytest.fixture(scope="module")
def cluster(model_dir: Path) -> Iterator[Cluster]:
    """cachemgr and a worker with mTLS and tokens everywhere.

    The worker reaches cachemgr by its certificate, and may attach by its token.
    """
    with tempfile.TemporaryDirectory(prefix="q-") as name:
        folder = Path(name)
        authority = Authority(folder)
        tokens = folder / "tokens"
        tokens.write_text(TOKENS)
        certificate = Pair(folder / "server.pem", folder / "server.key")
        certificate.replace_by(authority.issue("localhost", "127.0.0.1"))
        own = authority.issue("worker-1.example")
        (folder / "wanda.token").write_text("w-token\n")
        addresses = [f"127.0.0.1:{port}" for port in free_ports(5)]
        cachemgr, cachemgr_by_token, worker, worker_by_token, metrics = addresses
        both = (*certificate.flags(), "--tls-client-ca", str(authority.path), "--token-file", str(tokens))
        with LocalServices.start(
            model=model_dir,
            num_blocks=NUM_BLOCKS,
            runtime_dir=folder / "run",
            worker_start_timeout_s=120,
            extra_cachemgr_args=(
                *both,
                *("--listen", cachemgr, "--token-listen", cachemgr_by_token, "--metrics-listen", metrics),
            ),
            extra_worker_args=(
                *both,
                *WORKER_ARGS,
                *("--listen", worker, "--token-listen", worker_by_token, "--advertise", worker),
                *("--cachemgr", cachemgr, "--cachemgr-tls-ca", str(authority.path), *own.flags("--cachemgr-tls")),
                *("--cachemgr-token-file", str(folder / "wanda.token")),
            ),
        ) as services:
            port = int(metrics.rpartition(":")[2])
            yield Cluster(services, authority, tokens, certificate, *addresses[:4], port)


def run_quire(cluster: Cluster, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [QUIRE, *arguments],
        capture_output=True,
        text=True,
        env=cluster.environment(**environment),
        timeout=DEADLINE_S,
        check=False,
    )


def test_the_whole_path_over_mutual_tls(cluster: Cluster, generate: Callable[[list[int], int], list[int]]) -> None:
    prompt = draw_tokens(21, seed=1)

    async def complete() -> tuple[int, ...]:
        credentials = cluster.credentials("engine.example")
        async with Engine.connect(cluster.cachemgr, credentials=credentials) as engine:  # the worker by its own address
            (completion,) = await engine.complete([prompt], [SamplingParams(max_tokens=12, temperature=0.0)])
            return tuple(completion.samples[0].token_ids)

    assert asyncio.run(complete()) == tuple(generate(prompt, 12))


def test_the_whole_path_by_token(cluster: Cluster, generate: Callable[[list[int], int], list[int]]) -> None:
    prompt = draw_tokens(9, seed=2)

    async def complete(cachemgr: str, worker: str, credentials: Credentials) -> tuple[int, ...]:
        async with Engine.connect(cachemgr, worker=worker, credentials=credentials) as engine:
            (completion,) = await engine.complete([prompt], [SamplingParams(max_tokens=5, temperature=0.0)])
            return tuple(completion.samples[0].token_ids)

    expected = tuple(generate(prompt, 5))
    over_tls = complete(cluster.cachemgr_by_token, cluster.worker_by_token, cluster.credentials(token="a-token"))
    assert asyncio.run(over_tls) == expected
    sockets = cluster.services.cachemgr_address, cluster.services.worker_address
    # The same credentials: TLS is for host:port.
    assert asyncio.run(complete(*sockets, cluster.credentials(token="a-token"))) == expected


def test_who_may_not_is_told_why(cluster: Cluster) -> None:
    """Each refusal of each service, by the Python client."""

    async def refusals(credentials: Credentials) -> list[str]:
        cache = CacheClient(cluster.cachemgr_by_token, credentials=credentials)
        worker = WorkerClient(cluster.worker_by_token, credentials=credentials)
        reasons = []
        for call in (cache.list_pools, worker.get_model):
            with pytest.raises(AccessDenied) as denied:
                await call()
            reasons.append(denied.value.reason)
        await cache.close()
        await worker.close()
        return reasons

    assert asyncio.run(refusals(cluster.credentials())) == ["CREDENTIALS_MISSING"] * 2
    assert asyncio.run(refusals(cluster.credentials(token="x-token"))) == ["TOKEN_REJECTED"] * 2
    assert asyncio.run(refusals(cluster.credentials(token="w-token"))) == ["ROLE_MISSING"] * 2


def test_a_server_is_asked_for_the_name_that_was_given(cluster: Cluster) -> None:
    async def ask(credentials: Credentials) -> str:
        cache = CacheClient(cluster.cachemgr, credentials=credentials, timeout_s=3.0)
        with pytest.raises(Unavailable) as refused:
            await cache.list_pools()
        await cache.close()
        return refused.value.message

    credentials = dataclasses.replace(cluster.credentials("engine.example"), tls_server_name="other.example")
    assert "Hostname Verification" in asyncio.run(ask(credentials))


@pytest.mark.parametrize("role", ["client", "operator", "worker"])
def test_every_method_asks_for_its_role(cluster: Cluster, role: str) -> None:
    """By hand, with empty requests: an authorized call is refused for another reason, or answered."""
    from quire.cachemgr.service.roles import ROLES as CACHE_ROLES
    from quire.worker.service.roles import ROLES as WORKER_ROLES

    authorization = (("authorization", f"Bearer {role[0] if role != 'client' else 'a'}-token"),)
    services = (
        (cluster.services.cachemgr_address, CACHE_ROLES, cache_service_pb2.DESCRIPTOR.services_by_name),
        (cluster.services.worker_address, WORKER_ROLES, worker_service_pb2.DESCRIPTOR.services_by_name),
    )
    for address, table, descriptors in services:
        (descriptor,) = descriptors.values()
        with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            for method in descriptor.methods:
                path = f"/{descriptor.full_name}/{method.name}"
                if method.name != "ResetPrefixCache":  # it changes the pool, and asks for the role by what is reset
                    assert is_let_in(channel, path, method, authorization) is (role in table[path]), path
                assert refusal_reason(channel, path, method, ()) == "CREDENTIALS_MISSING", path


def is_let_in(channel: grpc.Channel, path: str, method: Any, metadata: tuple[tuple[str, str], ...]) -> bool:
    return refusal_reason(channel, path, method, metadata) not in (
        "ROLE_MISSING",
        "TOKEN_REJECTED",
        "CREDENTIALS_MISSING",
    )


def refusal_reason(channel: grpc.Channel, path: str, method: Any, metadata: tuple[tuple[str, str], ...]) -> str:
    """The reason that refuses an empty request, "" if there is none."""
    if method.client_streaming:
        answers = channel.stream_stream(path)(iter(()), metadata=metadata, timeout=DEADLINE_S)
        try:
            list(answers)
        except grpc.RpcError:
            return RefusedError.of_call(answers).reason
        return ""
    if method.server_streaming:
        answers = channel.unary_stream(path)(b"", metadata=metadata, timeout=DEADLINE_S)
        try:
            next(answers)
        except grpc.RpcError:
            return RefusedError.of_call(answers).reason
        answers.cancel()
        return ""
    try:
        channel.unary_unary(path)(b"", metadata=metadata, timeout=DEADLINE_S)
    except grpc.RpcError as error:
        return RefusedError.of_call(error).reason
    return ""


def test_a_tenant_sees_and_ends_only_what_is_its_own(
    cluster: Cluster, generate: Callable[[list[int], int], list[int]]
) -> None:
    """Alice's leases and prefixes are invisible to other tenants; an operator sees them, and their tenants."""
    prompt = draw_tokens(40, seed=11)

    async def complete(token: str) -> tuple[int, ...]:
        services = {"worker": cluster.worker_by_token, "credentials": cluster.credentials(token=token)}
        async with Engine.connect(cluster.cachemgr_by_token, **services) as engine:
            (completion,) = await engine.complete([prompt], [SamplingParams(max_tokens=2, temperature=0.0)])
            return tuple(completion.samples[0].token_ids)

    assert asyncio.run(complete("a-token")) == tuple(generate(prompt, 2))
    with grpc.insecure_channel(cluster.services.cachemgr_address, options=CHANNEL_OPTIONS) as channel:
        stub: Any = cache_service_pb2_grpc.CacheServiceStub(channel)

        def call(method: str, token: str, **fields: Any) -> Any:
            metadata = (("authorization", f"Bearer {token}-token"),)
            request = getattr(cache_service_pb2, f"{method}Request")(**fields)
            return getattr(stub, method)(request, metadata=metadata, timeout=DEADLINE_S)

        def refusal(method: str, token: str, **fields: Any) -> str:
            with pytest.raises(grpc.RpcError) as failed:
                call(method, token, **fields)
            return RefusedError.of_call(failed.value).reason

        found = {token: call("LookupPrefix", token, token_ids=prompt).matches[0] for token in ("a", "b")}
        assert {token: match.cached_token_count for token, match in found.items()} == {"a": 36, "b": 0}
        lease = call("CreateLease", "a", ttl={"seconds": 60})
        planned = {"lease_id": lease.lease_id, "epoch": lease.epoch}
        call("PlanStep", "a", **planned, admissions=[{"sequence_id": 1, "token_ids": prompt}])
        for method, fields in (
            ("PlanStep", planned),
            ("RenewLease", {"lease_id": lease.lease_id}),
            ("GetSequence", {"lease_id": lease.lease_id, "sequence_id": 1}),
            ("ListBlocks", {"lease_id": lease.lease_id}),
        ):
            assert refusal(method, "b", **fields) == "LEASE_NOT_FOUND", method
        owners = [[block.tenant for block in call("ListBlocks", token).blocks] for token in ("a", "b", "o")]
        assert (set(owners[0]), owners[1], len(owners[2])) == ({"alice"}, [], NUM_BLOCKS - 1)
        call("DeleteLease", "b", lease_id=lease.lease_id)
        for token, tenants in (("a", ["alice"]), ("b", []), ("o", ["alice"])):
            open_leases = [each for each in call("ListLeases", token).leases if each.ttl.seconds == 60]
            assert [each.tenant for each in open_leases] == tenants
            sequences = call("ListSequences", token, lease_id=lease.lease_id).sequences
            assert [each.sequence_id for each in sequences] == ([1] if tenants else [])
        for token in ("a", "o"):
            assert call("GetSequence", token, lease_id=lease.lease_id, sequence_id=1).sequence.block_count == 10
            assert len(call("ListBlocks", token, lease_id=lease.lease_id).blocks) == 10
        call("DeleteLease", "a", lease_id=lease.lease_id)


def test_refusals_name_service_method_and_roles(cluster: Cluster) -> None:
    with grpc.insecure_channel(cluster.services.worker_address, options=CHANNEL_OPTIONS) as channel:
        stub: Any = worker_service_pb2_grpc.WorkerServiceStub(channel)
        with pytest.raises(grpc.RpcError) as failed:
            stub.GetStatistics(
                worker_service_pb2.GetStatisticsRequest(),
                metadata=(("authorization", "Bearer a-token"),),
                timeout=DEADLINE_S,
            )
    refused = RefusedError.of_call(failed.value)
    assert (refused.code, refused.reason, refused.domain) == (DENIED, "ROLE_MISSING", "compute.quire.dev")
    assert refused.metadata == {"method": f"/{WORKER_SERVICE}/GetStatistics", "roles": "operator", "name": "alice"}
    with grpc.insecure_channel(cluster.services.cachemgr_address, options=CHANNEL_OPTIONS) as channel:
        cache: Any = cache_service_pb2_grpc.CacheServiceStub(channel)
        with pytest.raises(grpc.RpcError) as failed:
            cache.ListPools(cache_service_pb2.ListPoolsRequest(), timeout=DEADLINE_S)
    refused = RefusedError.of_call(failed.value)
    assert (refused.code, refused.reason, refused.domain) == (UNKNOWN, "CREDENTIALS_MISSING", "cache.quire.dev")
    assert CACHE_SERVICE not in refused.message


def test_a_worker_attaches_only_with_its_role(cluster: Cluster) -> None:
    def is_attached() -> bool:
        return asyncio.run(first_pool()).attached

    async def first_pool() -> Any:
        cache = CacheClient(cluster.services.cachemgr_address, credentials=Credentials(token="o-token"))
        try:
            (pool,) = await cache.list_pools()
            return pool
        finally:
            await cache.close()

    assert is_attached()
    cluster.tokens.write_text(re.sub("wanda +worker", "wanda client", TOKENS))
    await_that("the worker is sent away", lambda: not is_attached())
    await_that("it says why", lambda: "PERMISSION_DENIED: 'wanda' has none" in cluster.worker_log())
    cluster.tokens.write_text(TOKENS)
    await_that("the worker is back", is_attached)


def test_metrics_over_mutual_tls(cluster: Cluster) -> None:
    context = ssl.create_default_context(cafile=str(cluster.authority.path))
    own = cluster.authority.issue("prometheus")
    context.load_cert_chain(own.cert, own.key)
    url = f"https://127.0.0.1:{cluster.metrics}/metrics"
    with urllib.request.urlopen(url, timeout=DEADLINE_S, context=context) as page:
        assert b"\nquire_tls_certificate_expiry_timestamp_seconds 1" in page.read()


# -- commands -----------------------------------------------------------------------------------------------------


def test_commands_take_credentials(cluster: Cluster, tmp_path: Path) -> None:
    token = tmp_path / "olga.token"
    token.write_text("o-token\n")
    address = ("--cachemgr", cluster.cachemgr_by_token)
    done = run_quire(cluster, "stats", "--json", *address, "--token-file", str(token))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["pools"][0]["name"] == "default"
    own = cluster.authority.issue("engine.example")
    shown = {"QUIRE_TLS_CERT": str(own.cert), "QUIRE_TLS_KEY": str(own.key)}
    done = run_quire(cluster, "stats", "--cachemgr", cluster.cachemgr, **shown)
    assert done.returncode == 1
    assert "has none of the roles that" in done.stderr
    assert "(ROLE_MISSING)" in done.stderr
    done = run_quire(cluster, "stats", *address)
    assert done.returncode == 1
    assert "(CREDENTIALS_MISSING)" in done.stderr
    assert "Traceback" not in done.stderr


def test_commands_say_what_is_wrong_with_a_connection(cluster: Cluster, tmp_path: Path) -> None:
    stranger = Authority(tmp_path, "stranger")
    done = run_quire(cluster, "stats", "--cachemgr", cluster.cachemgr_by_token, "--tls-ca", str(stranger.path))
    assert done.returncode == 1
    assert f"no cachemgr answers at {cluster.cachemgr_by_token}" in done.stderr
    assert "CERTIFICATE_VERIFY_FAILED" in done.stderr
    missing = run_quire(cluster, "stats", "--cachemgr", cluster.cachemgr, "--tls-ca", "/nowhere.pem")
    assert missing.returncode == 1
    assert "/nowhere.pem: No such file" in missing.stderr


def test_a_token_made_by_the_command_is_taken(cluster: Cluster, tmp_path: Path) -> None:
    out = tmp_path / "bob.token"
    done = run_quire(cluster, "token", "bob", "--role", "operator", "--out", str(out))
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"bob operator [0-9a-f]{64}\n", done.stdout)
    cluster.tokens.write_text(TOKENS + done.stdout)
    shown = {"QUIRE_TOKEN_FILE": str(out), "QUIRE_CACHEMGR": cluster.cachemgr_by_token}
    assert run_quire(cluster, "stats", **shown).returncode == 0
    cluster.tokens.write_text(TOKENS)
    revoked = run_quire(cluster, "stats", **shown)
    assert revoked.returncode == 1
    assert "(TOKEN_REJECTED)" in revoked.stderr


def test_no_secret_is_in_a_log(cluster: Cluster) -> None:
    for service in (cluster.services.cachemgr, cluster.services.worker):
        assert service.log_path is not None
        log = service.log_path.read_text()
        assert "-token" not in log.replace("--token", "")
        assert not [line for line in log.splitlines() if "Traceback" in line or "handler failed" in line]
        assert sha256("a-token") not in log
