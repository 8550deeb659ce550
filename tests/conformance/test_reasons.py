"""Every error reason of both services, provoked once through grpcurl.

The services ask for tokens, so that the reasons of access are among them; the calls that are about something else show
a token with all roles. The last tests end the services.
"""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import lora_zoo
import pytest
from certificates import sha256
from conformance.foreign import CACHE, WORKER, Grpcurl, Refused, status_of
from deadlines import DEADLINE_S
from integration.protocol_client import FAULTY_WORKER, MAX_SEQUENCES, NUM_BLOCKS, WORKER_ARGS, await_that
from model_zoo import build, save

from quire.cache.v1 import cache_service_pb2, cache_service_pb2_grpc, error_pb2, grant_pb2
from quire.cache.v1 import reasons as cache_reasons
from quire.cache.v1.error_reason import ErrorReason
from quire.cli.launch import LocalServices
from quire.cli.service_process import ServiceProcess
from quire.compute.v1 import reasons as worker_reasons

TOKENS = f"""
all client,operator,worker {sha256("t-all")}
wanda worker {sha256("t-worker")}
olga operator {sha256("t-operator")}
lena client {sha256("t-lena")}
quinn client {sha256("t-quinn")}
"""
TENANTS = "[tenants.lena]\nmax_leases = 0\n[tenants.quinn]\nlimit = 3\n"
MAX_WATCHES = 256
PROMPT = [1, 2, 3, 4, 5]
GEOMETRY = {
    "block_size_tokens": 4,
    "block_count": 9,
    "block_bytes": 1024,
    "max_sequence_count": 4,
    "max_sequence_tokens": 24,
    "vocabulary_size": 100,
    "model": "none",
    "model_fingerprint": "none",
}
Json = dict[str, Any]
DOMAINS = {CACHE: cache_reasons.DOMAIN, WORKER: worker_reasons.DOMAIN}


@dataclass
class Both:
    """The two services as grpcurl reaches them, with the token that may do everything."""

    services: LocalServices
    cache: Grpcurl
    worker: Grpcurl
    lease_ids: list[str] = field(default_factory=list)

    def ask(self, method: str, **request: Any) -> Json:
        """One call of CacheService."""
        return self.cache.call(f"{CACHE}/{method}", request)

    def lease(self, **fields: Any) -> Lease:
        """A new one."""
        created = self.ask("CreateLease", **{"ttl": "60s", "pool": "default"} | fields)
        self.lease_ids.append(created["lease_id"])
        return Lease(self, created["lease_id"], created["epoch"])

    def end_leases(self) -> None:
        """All of them; returns when they are fenced and nothing is cached."""
        for lease_id in self.lease_ids:
            self.ask("DeleteLease", lease_id=lease_id)
        self.lease_ids.clear()
        await_that("they are fenced", lambda: not self.ask("ListLeases"), timeout_s=DEADLINE_S)
        self.ask("ResetPrefixCache", pool="default")

    def run(self, plan: Json, *token_ids: int, **fields: Any) -> Json:
        """Runs a planned step of sequence 1."""
        inputs = [{"sequence_id": 1, "token_ids": token_ids}] if token_ids else []
        return self.worker.call(f"{WORKER}/RunStep", {"grant": plan["grant"], "inputs": inputs} | fields)


@dataclass
class Lease:
    """A lease and its plans."""

    both: Both
    lease_id: str
    epoch: str

    def plan(self, **fields: Any) -> Json:
        """PlanStep."""
        return self.both.ask("PlanStep", **{"lease_id": self.lease_id, "epoch": self.epoch} | fields)

    def admit(self, *prompts: list[int], **fields: Any) -> Json:
        """Sequences 1, 2, … with these tokens."""
        admissions = [{"sequence_id": number, "token_ids": tokens} for number, tokens in enumerate(prompts, 1)]
        return self.plan(admissions=admissions, **fields)

    def refused(self, plan: Json) -> None:
        """Raises the refusal of the plan's last item."""
        assert plan["refusals"], plan
        raise Refused.of_error(plan["refusals"][-1]["error"])


@pytest.fixture(scope="module")
def both(grpcurl: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    """A cachemgr and a worker that can be told to fail, with tokens."""
    folder = tmp_path_factory.mktemp("reasons")
    (folder / "tokens").write_text(TOKENS)
    (folder / "own").write_text("t-worker\n")
    (folder / "tenants.toml").write_text(TENANTS)
    tokens = ("--token-file", str(folder / "tokens"))
    with LocalServices.start(
        model=save("llama", folder / "model"),
        num_blocks=NUM_BLOCKS,
        extra_cachemgr_args=(*tokens, "--tenants", str(folder / "tenants.toml")),
        extra_worker_args=(*WORKER_ARGS, "--host-memory", "16K", *tokens, "--cachemgr-token-file", str(folder / "own")),
        worker_target=FAULTY_WORKER,
    ) as services:
        flags = ("-H", "authorization: Bearer t-all")
        yield Both(
            services,
            Grpcurl.on_socket(grpcurl, services.cachemgr_address, *flags),
            Grpcurl.on_socket(grpcurl, services.worker_address, *flags),
        )


# -- cachemgr -----------------------------------------------------------------------------------------------------


def cache_invalid_argument(both: Both) -> None:
    both.lease(ttl="0.1s")


def cache_request_id_reused(both: Both) -> None:
    both.lease(request_id="once")
    both.lease(request_id="once", ttl="61s")


def cache_empty_prompt(both: Both) -> None:
    lease = both.lease()
    lease.refused(lease.admit([]))


def cache_sequence_too_long(both: Both) -> None:
    lease = both.lease()
    lease.refused(lease.admit([1] * 200))


def cache_token_out_of_range(both: Both) -> None:
    lease = both.lease()
    lease.refused(lease.admit([1, 1000]))


def cache_position_out_of_range(both: Both) -> None:
    lease = both.lease()
    lease.admit(PROMPT)
    lease.refused(lease.plan(trim_sequence_ids=[1], trim_token_counts=[100]))


def cache_pool_not_found(both: Both) -> None:
    both.ask("GetPool", pool="nowhere")


def cache_lease_not_found(both: Both) -> None:
    both.ask("RenewLease", lease_id="gone")


def cache_sequence_not_found(both: Both) -> None:
    both.ask("GetSequence", lease_id=both.lease().lease_id, sequence_id=7)


def cache_prefix_not_cached(both: Both) -> None:
    both.ask("PinPrefix", pool="default", token_ids=PROMPT)


def cache_sequence_exists(both: Both) -> None:
    lease = both.lease()
    lease.admit(PROMPT)
    lease.refused(lease.admit(PROMPT))


def cache_epoch_changed(both: Both) -> None:
    both.lease().plan(epoch="1")


def cache_cursor_expired(both: Both) -> None:
    epoch = int(both.ask("GetPool", pool="default")["pool"]["epoch"])
    cursor = (epoch.to_bytes(8, "big", signed=True) + (2**63).to_bytes(8, "big")).hex()
    both.cache.stream(f"{CACHE}/WatchBlocks", [{"pool": "default", "cursor": cursor}])


def cache_nothing_to_compute(both: Both) -> None:
    lease = both.lease()
    lease.admit(PROMPT)
    lease.refused(lease.plan(extends={"sequence_ids": [1], "token_counts": [2]}))


def cache_pool_already_attached(both: Both) -> None:
    attach(both, pool="default", epoch="1")


def cache_term_superseded(both: Both) -> None:
    attach(both, pool="other", epoch="1", highest_term=str(2**62))


def cache_out_of_blocks(both: Both) -> None:
    lease = both.lease()
    lease.refused(lease.admit([1] * 80, [2] * 80))


def cache_out_of_host_blocks(both: Both) -> None:
    lease = both.lease()
    lease.admit(list(range(1, 70)))
    lease.refused(lease.plan(offload_sequence_ids=[1]))


def cache_sequence_offloaded(both: Both) -> None:
    lease = both.lease()
    lease.admit(PROMPT)
    lease.refused(lease.plan(offload_sequence_ids=[1], trim_sequence_ids=[1], trim_token_counts=[1]))


def cache_sequence_busy(both: Both) -> None:
    lease = both.lease()
    lease.admit(PROMPT)
    lease.refused(lease.plan(offload_sequence_ids=[1], restores=[{"sequence_id": 1}]))


def cache_prefix_being_computed(both: Both) -> None:
    prompt = list(range(1, 40))
    both.lease().admit(prompt)
    other = both.lease()
    other.refused(other.plan(admissions=[{"sequence_id": 1, "token_ids": prompt, "waits_for_prefix": True}]))


def cache_too_many_sequences(both: Both) -> None:
    lease = both.lease()
    lease.admit(*([number] for number in range(MAX_SEQUENCES)))
    one_more = {"sequence_id": MAX_SEQUENCES + 1, "token_ids": [MAX_SEQUENCES]}
    lease.refused(lease.plan(admissions=[one_more]))


def cache_too_many_steps(both: Both) -> None:
    lease = both.lease()
    plans = [{"plan": {"lease_id": lease.lease_id, "epoch": lease.epoch}}] * 65
    *planned, answer = both.cache.stream(f"{CACHE}/PlanSteps", plans)
    assert all("plan" in plan for plan in planned)
    raise Refused.of_error(answer["error"])


def cache_token_budget_spent(both: Both) -> None:
    lease = both.lease()
    lease.refused(lease.admit(PROMPT, [6, *PROMPT], admission_token_budget=len(PROMPT)))


def cache_quota_exceeded(both: Both) -> None:
    quinn = replace(both, cache=with_token(both.cache, "t-quinn"), lease_ids=[])
    lease = quinn.lease()
    try:
        lease.refused(lease.admit(PROMPT, [6, *PROMPT]))
    finally:
        quinn.ask("DeleteLease", lease_id=lease.lease_id)


def cache_pin_budget_spent(both: Both) -> None:
    """Four blocks, where the budget is a tenth of thirty."""
    prompt = list(range(1, 18))
    both.run(both.lease().admit(prompt), *prompt)
    found = {"pool": "default", "token_ids": prompt}
    await_that("it is cached", lambda: both.ask("LookupPrefix", **found)["matches"][0].get("cached_token_count") == 16)
    both.ask("PinPrefix", **found)


def cache_too_many_leases(both: Both) -> None:
    with_token(both.cache, "t-lena").call(f"{CACHE}/CreateLease", {"pool": "default"})


def cache_overloaded(both: Both) -> None:
    shown = (("authorization", "Bearer t-all"),)
    request = cache_service_pb2.WatchBlocksRequest(pool="default")
    with grpc.insecure_channel(both.services.cachemgr_address, options=(("grpc.enable_http_proxy", 0),)) as channel:
        watch: Any = cache_service_pb2_grpc.CacheServiceStub(channel).WatchBlocks
        watching = [watch(request, metadata=shown, timeout=DEADLINE_S) for _ in range(MAX_WATCHES)]
        for answers in watching:
            assert next(answers).epoch
        both.cache.stream(f"{CACHE}/WatchBlocks", [{"pool": "default"}])


def cache_pool_detached(both: Both) -> None:
    attach(both, pool="brief", epoch="1")  # and the stream ends
    await_that("it is detached", lambda: not both.ask("GetPool", pool="brief")["pool"].get("attached"))
    both.lease(pool="brief")


def attach(both: Both, **registration: Any) -> None:
    """The first message of a worker."""
    message = {"register_pool": {"geometry": GEOMETRY, "worker_address": "nowhere:1"} | registration}
    both.cache.stream(f"{CACHE}/AttachPool", [message])


# -- access, at both ----------------------------------------------------------------------------------------------


def with_token(server: Grpcurl, token: str | None) -> Grpcurl:
    flags = ("-H", f"authorization: Bearer {token}") if token else ()
    return replace(server, flags=("-plaintext", "-unix", *flags))


def cache_credentials_missing(both: Both) -> None:
    with_token(both.cache, None).call(f"{CACHE}/GetPool")


def cache_token_rejected(both: Both) -> None:
    with_token(both.cache, "t-old").call(f"{CACHE}/GetPool")


def cache_role_missing(both: Both) -> None:
    with_token(both.cache, "t-operator").call(f"{CACHE}/CreateLease")


def worker_credentials_missing(both: Both) -> None:
    with_token(both.worker, None).call(f"{WORKER}/GetModel")


def worker_token_rejected(both: Both) -> None:
    with_token(both.worker, "t-old").call(f"{WORKER}/GetModel")


def worker_role_missing(both: Both) -> None:
    with_token(both.worker, "t-worker").call(f"{WORKER}/RunStep")


# -- the worker ---------------------------------------------------------------------------------------------------


def worker_invalid_argument(both: Both) -> None:
    both.worker.call(f"{WORKER}/ChecksumBlocks", {"block_ids": [1] * 10_001})


def worker_tokens_mismatch(both: Both) -> None:
    both.run(both.lease().admit(PROMPT), *PROMPT[:-1], 9)


def worker_block_out_of_range(both: Both) -> None:
    both.worker.call(f"{WORKER}/ChecksumBlocks", {"block_ids": [NUM_BLOCKS]})


def worker_bad_signature(both: Both) -> None:
    plan = both.lease().admit(PROMPT)
    both.run({"grant": plan["grant"] | {"signature": base64.b64encode(bytes(32)).decode()}}, *PROMPT)


def worker_lease_fenced(both: Both) -> None:
    lease = both.lease()
    plan = lease.admit(PROMPT)
    both.end_leases()
    both.run(plan, *PROMPT)


def worker_step_out_of_order(both: Both) -> None:
    plan = both.lease().admit(PROMPT)
    both.run(plan, *PROMPT)
    both.run(plan, *PROMPT)


def worker_adapters_in_use(both: Both) -> None:
    folder = lora_zoo.save(build("llama"), both.services.runtime_dir / "adapter", seed=1, rank=1)
    loaded = both.worker.call(f"{WORKER}/LoadAdapter", {"name": "used", "path": str(folder)})
    admission = {"sequence_id": 1, "token_ids": PROMPT, "adapter": loaded["adapter"]["identity"]}
    await_that(
        "cachemgr knows it", lambda: both.ask("GetPool", pool="default")["pool"].get("adapters"), timeout_s=DEADLINE_S
    )
    both.run(both.lease().plan(admissions=[admission]), *PROMPT)
    both.worker.call(f"{WORKER}/UnloadAdapter", {"name": "used"})


def worker_epoch_changed(both: Both) -> None:
    plan = both.lease().admit(PROMPT)
    grant = grant_pb2.StepGrant.FromString(base64.b64decode(plan["grant"]["grant"]))
    grant.epoch = 1
    both.run({"grant": plan["grant"] | {"grant": base64.b64encode(grant.SerializeToString()).decode()}}, *PROMPT)


def worker_step_failed(both: Both) -> None:
    plan = both.lease().admit(PROMPT)
    fail(both, plan)


def worker_prior_step_failed(both: Both) -> None:
    lease = both.lease()
    first = lease.admit(PROMPT)
    second = lease.plan(extends={"sequence_ids": [1], "token_counts": [1]})
    with pytest.raises(Refused):
        fail(both, first)
    both.run(second)


def fail(both: Both, plan: Json) -> None:
    """Runs a step on a model that fails."""
    sign = both.services.runtime_dir / "fail"
    sign.touch()
    try:
        both.run(plan, *PROMPT)
    finally:
        sign.unlink()


# -- the end of the services, in this order -----------------------------------------------------------------------


def cache_shutting_down(both: Both) -> None:
    plan = {"lease_id": both.lease().lease_id, "epoch": both.ask("GetPool", pool="default")["pool"]["epoch"]}
    raise told_to_stop(both.services.cachemgr, both.cache, f"{CACHE}/PlanSteps", {"plan": plan})


def worker_shutting_down(both: Both) -> None:
    raise told_to_stop(both.services.worker, both.worker, f"{WORKER}/RunSteps", {"step": {}})


def worker_pool_detached(both: Both) -> None:
    both.services.worker.start()  # and no cachemgr
    model: Json = {}

    def answers() -> bool:
        try:
            model.update(both.worker.call(f"{WORKER}/GetModel"))
        except ValueError:  # no status but grpcurl's own words: the port is not open yet
            return False
        return True

    await_that("it answers", answers, timeout_s=DEADLINE_S)
    grant = grant_pb2.StepGrant(pool=model["pool"], epoch=int(model["epoch"]), lease_id="a", step_number=1)
    both.run({"grant": {"grant": base64.b64encode(grant.SerializeToString()).decode(), "signature": ""}})


def told_to_stop(process: ServiceProcess, server: Grpcurl, method: str, request: Json) -> Refused:
    """The end of an open stream when its server gets SIGTERM."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(server.command(method), text=True, **pipes) as call:
        try:
            assert call.stdin is not None
            assert call.stdout is not None
            call.stdin.write(json.dumps(request))
            call.stdin.flush()
            assert call.stdout.readline() == "{\n", "an answer: the stream is open"
            process.terminate()
            # grpcurl looks at the stream's end when it has no more to send.
            return status_of(call.communicate(timeout=DEADLINE_S)[1])
        finally:
            call.kill()


# In the order above: the last ones end the services.
CASES: dict[tuple[str, str], Callable[[Both], None]] = {
    (service, name.removeprefix(prefix).upper()): case
    for name, case in list(globals().items())
    for service, prefix in ((CACHE, "cache_"), (WORKER, "worker_"))
    if name.startswith(prefix) and callable(case)
}
# What nothing from outside can bring about, with why.
OUT_OF_REACH: dict[tuple[str, str], str] = {
    (WORKER, "OVERLOADED"): "8,192 calls open at a time; tests/unit/serving/test_interceptor.py has it with fewer",
}


def contract() -> dict[tuple[str, str], ErrorReason]:
    """Every reason of both services."""
    apis = ((CACHE, cache_reasons), (WORKER, worker_reasons))
    return {(service, reason.value): reason for service, api in apis for reason in api.Reason}


def test_every_reason_has_a_case() -> None:
    assert CASES.keys() | OUT_OF_REACH.keys() == contract().keys()
    assert not set(CASES) & set(OUT_OF_REACH)


@pytest.mark.parametrize(
    ("service", "reason"), CASES, ids=[f"{service.rsplit('.')[-1]}-{reason}" for service, reason in CASES]
)
def test_the_reason_is_said(both: Both, service: str, reason: str) -> None:
    with pytest.raises(Refused) as caught:
        CASES[service, reason](both)
    if both.services.cachemgr.is_running:
        both.end_leases()
    refused = caught.value
    assert refused.reason == reason, refused
    assert refused.code == error_pb2.StatusCode.Value(f"STATUS_CODE_{contract()[service, reason].status_code}")
    assert refused.domain in ("", DOMAINS[service])  # none inside an answer
