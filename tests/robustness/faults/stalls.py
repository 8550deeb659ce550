"""The largest allowed requests, and larger ones, against real services: the longest delay of other calls.

    python tests/robustness/faults/stalls.py                         all cases
    python tests/robustness/faults/stalls.py --case largest_plans

Each case is a function that gets an `Attacked` service, or the URL of a gateway, and returns the answers it got. While
it runs, another client renews a lease with a ttl of 1 s every 0.3 s, and a third one calls again and again. The table
has the longest time that such a call took, and the longest before the attack. A lease that was renewed in time and is
gone, an answer that is not one of the case's, and memory beyond the case's bound end the run with status 1. Times are
figures, not bounds: they depend on what else runs on the machine. "CPU ms" is the processor time that the service used
during the attack, for its bystanders too.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).parents[2] / folder) for folder in (".", "framework"))

# isort: split
import click
import grpc
import httpx
import psutil
from integration.lone_cachemgr import Bookkeeper, LoneCachemgr, Tenant
from integration.protocol_client import CHANNEL_OPTIONS, RefusedError
from rich.console import Console
from rich.table import Table
from robustness.fuzz.names import varint

from quire.cache.v1 import cache_service_pb2, cache_service_pb2_grpc
from quire.cli.launch import LocalServices
from quire.cli.service_process import ServiceProcess
from quire.compute.v1 import worker_service_pb2, worker_service_pb2_grpc

MODEL = Path(__file__).parents[3] / "deploy/demo/model"
MIB = 1 << 20
TIMEOUT_S = 120.0
TTL_S, RENEWAL_PERIOD_S = 1.0, 0.3
WARM_UP_S = 2.0
PAUSE_S = 5.0
MAX_SEQUENCES, MAX_TOKENS = 256, 131_072
GEOMETRY = {
    "block_size_tokens": 16,
    "max_sequence_count": MAX_SEQUENCES,
    "max_sequence_tokens": MAX_TOKENS,
    "vocabulary_size": 128_256,
}
NUM_IDS = 60_000_000
SALT = b"s"
Answers = Counter[str]


@dataclass
class Attacked:
    """A service, and what an attacker has of it. `tenant` is of cachemgr only."""

    process: ServiceProcess
    channel: grpc.Channel
    tenant: Tenant | None = None

    def send(self, method: str, data: bytes, *, caller: str = "bob") -> str:
        """OK or the reason of the refusal."""
        service = "quire.cache.v1.CacheService" if self.tenant else "quire.compute.v1.WorkerService"
        metadata = [("authorization", f"Bearer {caller}")] if self.tenant else []
        call = self.channel.unary_unary(f"/{service}/{method}")
        try:
            call(data, timeout=TIMEOUT_S, metadata=metadata)
        except grpc.RpcError as error:
            return RefusedError.of_call(error).reason or error.code().name
        return "OK"

    def ask(self, method: str, request: Any) -> str:
        return self.send(method, request.SerializeToString())

    def plan(self, **fields: Any) -> str:
        assert self.tenant is not None
        tenant = self.tenant
        request = cache_service_pb2.PlanStepRequest(lease_id=tenant.lease_id, epoch=tenant.epoch, **fields)
        return self.ask("PlanStep", request)


Attack = Callable[[Any], Answers]


@dataclass(frozen=True)
class Case:
    """An attack; num_blocks is the size of cachemgr's pool, and prepare is called before anything is measured."""

    attack: Attack
    answers: frozenset[str]
    max_peak_mib: float
    num_blocks: int
    prepare: Callable[[Tenant], None] | None


CACHEMGR_CASES: dict[str, Case] = {}
WORKER_CASES: dict[str, Case] = {}
GATEWAY_CASES: dict[str, Case] = {}


def case(
    cases: dict[str, Case],
    *answers: str,
    max_peak_mib: float = 600,
    num_blocks: int = 1 << 17,
    prepare: Callable[[Tenant], None] | None = None,
) -> Callable[[Attack], Attack]:
    """Put an attack into the cases under its function's name."""

    def add(attack: Attack) -> Attack:
        cases[attack.__name__] = Case(attack, frozenset(answers), max_peak_mib, num_blocks, prepare)
        return attack

    return add


def packed(*path: int, count: int) -> bytes:
    """So many token ids, 1 each, in the field at the end of a path of field numbers."""
    data = bytes([1]) * count
    for number in reversed(path):
        data = bytes([number << 3 | 2]) + varint(len(data)) + data
    return data


def admissions(count: int, length: int) -> list[dict[str, Any]]:
    """Prompts that begin differently, each with as many ranges as may be."""
    ranges = [{"token_count": 1, "priority": 5, "ttl": {"seconds": 60}}] * 16
    prompts = ([number, *[1] * (length - 1)] for number in range(count))
    return [{"sequence_id": number, "token_ids": ids, "retention": ranges} for number, ids in enumerate(prompts)]


# -- cachemgr -----------------------------------------------------------------------------------------------------


@case(CACHEMGR_CASES, "INVALID_ARGUMENT")
def plans_of_65536_admissions(attacked: Attacked) -> Answers:
    """11 MB. They are put together as bytes, so that the other threads of this process can renew their lease."""
    tenant = attacked.tenant
    assert tenant is not None
    one = cache_service_pb2.PlanStepRequest(admissions=admissions(1, 1)).SerializeToString()
    head = cache_service_pb2.PlanStepRequest(lease_id=tenant.lease_id, epoch=tenant.epoch).SerializeToString()
    return Counter(attacked.send("PlanStep", head + one * 65_536) for _ in range(3))


@case(CACHEMGR_CASES, "OK")
def largest_plans(attacked: Attacked) -> Answers:
    """As many admissions as the pool takes, with as many tokens as a plan may bring; then all of them end."""
    tenant = attacked.tenant
    assert tenant is not None
    wanted = admissions(MAX_SEQUENCES, 262_144 // MAX_SEQUENCES)
    answers: Answers = Counter()
    for fields in ({"admissions": wanted}, {"release_sequence_ids": range(MAX_SEQUENCES)}) * 3:
        refusals = tenant.plan(**fields).refusals
        answers[f"{len(refusals)} refusals" if refusals else "OK"] += 1
        tenant.settle()
    return answers


@case(CACHEMGR_CASES, "OK")
def plans_of_which_everything_is_refused(attacked: Attacked) -> Answers:
    ids = range(1_000, 1_000 + MAX_SEQUENCES)
    forks = [{"parent_sequence_id": 1, "child_sequence_ids": ids, "token_count": 1}]
    extends = {"sequence_ids": ids, "token_counts": [1] * len(ids)}
    return Counter(
        attacked.plan(
            offload_sequence_ids=ids,
            trim_sequence_ids=ids,
            trim_token_counts=ids,
            forks=forks,
            extends=extends,
            restores=[{"sequence_id": seq_id} for seq_id in ids],
            admissions=[{"sequence_id": seq_id} for seq_id in ids],
        )
        for _ in range(5)
    )


@case(CACHEMGR_CASES, "INVALID_ARGUMENT", "OK", "RESOURCE_EXHAUSTED")
def prompts_of_60_million_tokens(attacked: Attacked) -> Answers:
    """CheckAdmission says in its answer that no pool takes it."""
    calls = {"LookupPrefix": (2,), "ExplainPrefix": (2,), "PinPrefix": (2,), "CheckAdmission": (2, 2)}
    return Counter(attacked.send(method, packed(*path, count=NUM_IDS)) for method, path in calls.items())


@case(CACHEMGR_CASES, "OK", "PREFIX_NOT_CACHED")
def longest_prompts(attacked: Attacked) -> Answers:
    calls = {"LookupPrefix": (2,), "ExplainPrefix": (2,), "PinPrefix": (2,), "CheckAdmission": (2, 2)}
    return Counter(attacked.send(method, packed(*path, count=MAX_TOKENS)) for method, path in calls.items())


@case(CACHEMGR_CASES, "OK")
def looks(attacked: Attacked) -> Answers:
    request = cache_service_pb2.ListBlocksRequest(page_size=10_000)
    answers = Counter(attacked.ask("ListBlocks", request) for _ in range(5))
    methods = ("AuditPool", "GetStatistics", "ResetPrefixCache") * 3
    return answers + Counter(attacked.send(method, b"", caller="olga") for method in methods)


def fill(tenant: Tenant) -> None:
    """Cache a million blocks under one salt: 128 prompts of 8,190 blocks that begin differently."""
    for number in range(128):
        tenant.cache(1, [number, *[1] * (8_190 * 16 - 1)], salt=SALT)


@case(CACHEMGR_CASES, "OK", num_blocks=1 << 20, prepare=fill)
def resets_of_parts_of_a_million_blocks(attacked: Attacked) -> Answers:
    """Resets one prompt with all that continues it, then the whole salt."""
    begin = [5, *[1] * 15]
    scopes = ({"salt": SALT, "token_ids": begin}, {"salt": SALT})
    return Counter(
        attacked.ask("ResetPrefixCache", cache_service_pb2.ResetPrefixCacheRequest(pool="p", **scope))
        for scope in scopes
    )


@case(CACHEMGR_CASES, "stopped")
def a_stop_of_the_process(attacked: Attacked) -> Answers:
    """SIGSTOP for longer than the other client's lease lives."""
    process = psutil.Process(attacked.process.pid)
    process.suspend()
    time.sleep(PAUSE_S)
    process.resume()
    return Counter(["stopped"])


# -- worker -------------------------------------------------------------------------------------------------------


@case(WORKER_CASES, "OK")
def one_block_10000_times(attacked: Attacked) -> Answers:
    request = worker_service_pb2.ChecksumBlocksRequest(block_ids=[1] * 10_000)
    return Counter(attacked.ask("ChecksumBlocks", request) for _ in range(3))


@case(WORKER_CASES, "OK")
def every_block(attacked: Attacked) -> Answers:
    request = worker_service_pb2.ChecksumBlocksRequest(block_ids=range(2_000))
    return Counter([attacked.ask("ChecksumBlocks", request)])


@case(WORKER_CASES, "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED")
def grants_of_60_mb(attacked: Attacked) -> Answers:
    grant = bytes([0xBA, 0x01]) + varint(NUM_IDS) + bytes([1]) * NUM_IDS
    request = worker_service_pb2.RunStepRequest(grant={"grant": b"\x10\x01" + grant, "signature": bytes(32)})
    return Counter(attacked.ask("RunStep", request) for _ in range(3))


# -- gateway ------------------------------------------------------------------------------------------------------

SENTENCE = "The quick brown fox jumps over the lazy dog. "
REFUSED, TOO_MANY = "sequence_too_long", "too_many_values"


def post(url: str, path: str, body: bytes, *, at_once: int = 1) -> Answers:
    """Send a body so many times at once. Returns the codes of the errors, or OK."""
    answers: list[str] = []

    def send() -> None:
        answer = httpx.post(f"{url}{path}", content=body, timeout=TIMEOUT_S)
        answers.append("OK" if answer.status_code == 200 else answer.json()["error"]["code"])

    threads = [threading.Thread(target=send) for _ in range(at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Counter(answers)


@case(GATEWAY_CASES, REFUSED)
def three_texts_of_5_mb(url: str) -> Answers:
    body = json.dumps({"prompt": SENTENCE * 110_000, "max_tokens": 1}).encode()
    return post(url, "/v1/completions", body, at_once=3)


@case(GATEWAY_CASES, "OK")
def three_texts_of_1_mb_to_tokenize(url: str) -> Answers:
    """The longest: a text may be tokenized that no model takes."""
    return post(url, "/tokenize", json.dumps({"prompt": SENTENCE * 23_000}).encode(), at_once=3)


@case(GATEWAY_CASES, "OK")
def texts_of_4096_characters_250_times(url: str) -> Answers:
    body = json.dumps({"prompt": [SENTENCE * 91] * 250, "max_tokens": 1}).encode()
    return post(url, "/v1/completions", body, at_once=3)


@case(GATEWAY_CASES, REFUSED)
def a_chat_of_5_mb(url: str) -> Answers:
    message = {"role": "user", "content": SENTENCE * 110_000}
    return post(url, "/v1/chat/completions", json.dumps({"messages": [message], "max_tokens": 1}).encode(), at_once=3)


@case(GATEWAY_CASES, TOO_MANY)
def bodies_of_millions_of_values(url: str) -> Answers:
    answers: Answers = Counter()
    for value, count in (("1234", 3_300_000), ("[]", 5_000_000), ('{"a":1}', 2_000_000)):
        answers += post(url, "/v1/completions", f'{{"prompt": [{",".join([value] * count)}]}}'.encode())
    return answers


@case(GATEWAY_CASES, REFUSED, "invalid_value")
def the_most_values_of_a_body(url: str) -> Answers:
    answers: Answers = Counter()
    for value, count in (("1234", 1_000_000), ("[]", 250_000)):
        answers += post(url, "/v1/completions", f'{{"prompt": [{",".join([value] * count)}]}}'.encode())
    return answers


@case(GATEWAY_CASES, "OK")
def detokenize_a_million(url: str) -> Answers:
    return post(url, "/detokenize", json.dumps({"tokens": [100] * 1_000_000}).encode())


# -- the clients beside it ----------------------------------------------------------------------------------------


@dataclass
class Bystander:
    """Calls something again and again on a thread of its own, from `start` to `stop`."""

    call: Callable[[], object]
    period_s: float
    times_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def start(self) -> None:
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(TIMEOUT_S)

    def _run(self) -> None:
        while not self._stopped.wait(self.period_s):
            begun = time.monotonic()
            try:
                self.call()
            except grpc.RpcError as error:
                self.failures.append(RefusedError.of_call(error).reason)
            self.times_s.append(time.monotonic() - begun)


@dataclass
class Result:
    case: Case
    answers: Answers
    seconds: float
    usual_s: float
    longest_s: float
    cpu_s: float
    peak_bytes: int
    failures: list[str]

    def broken_bounds(self) -> Iterator[str]:
        yield from (f"the lease: {reason}" for reason in set(self.failures))
        if wrong := set(self.answers) - self.case.answers:
            yield f"answers {', '.join(sorted(wrong))}"
        if self.peak_bytes > self.case.max_peak_mib * MIB:
            yield f"peak {self.peak_bytes / MIB:.0f} MiB, at most {self.case.max_peak_mib:g}"


def measure(case: Case, attacked: Attacked, renew: Callable[[], object], look: Callable[[], object]) -> Result:
    renewing, looking = Bystander(renew, RENEWAL_PERIOD_S), Bystander(look, 0.002)
    process = psutil.Process(attacked.process.pid)
    memory = Bystander(lambda: sizes.append(process.memory_info().rss), 0.02)
    sizes: list[int] = [process.memory_info().rss]
    for each in (renewing, looking, memory):
        each.start()
    time.sleep(WARM_UP_S)
    num_before, begun, used = len(looking.times_s), time.monotonic(), sum(process.cpu_times()[:2])
    answers = case.attack(attacked)
    seconds, cpu_s = time.monotonic() - begun, sum(process.cpu_times()[:2]) - used
    time.sleep(2 * TTL_S)  # a lease that was lost is missed at its next renewal
    for each in (looking, renewing, memory):
        each.stop()
    usual, attacked_s = looking.times_s[:num_before], looking.times_s[num_before:]
    return Result(
        case=case,
        answers=answers,
        seconds=seconds,
        usual_s=max(usual),
        longest_s=max(attacked_s),
        cpu_s=cpu_s,
        peak_bytes=max(sizes) - sizes[0],
        failures=renewing.failures + looking.failures,
    )


def run_on_cachemgr(case: Case) -> Result:
    with tempfile.TemporaryDirectory(prefix="quire-stalls-", dir="/tmp") as name:
        cachemgr = LoneCachemgr(Path(name)).start()
        try:
            worker = Bookkeeper(cachemgr, "p", epoch=1, block_count=case.num_blocks, **GEOMETRY)
            attacker = Tenant.begin(cachemgr, worker, "bob", ttl_s=600)
            if case.prepare is not None:
                case.prepare(attacker)
            innocent = Tenant.begin(cachemgr, worker, "alice", ttl_s=TTL_S)
            renewal = cache_service_pb2.RenewLeaseRequest(lease_id=innocent.lease_id)
            pool = cache_service_pb2.GetPoolRequest(pool="p")
            with grpc.insecure_channel(cachemgr.process.address, options=CHANNEL_OPTIONS) as channel:
                attacked = Attacked(cachemgr.process, channel, attacker)
                return measure(
                    case,
                    attacked,
                    lambda: innocent.stub.RenewLease(renewal, timeout=TIMEOUT_S),
                    lambda: innocent.stub.GetPool(pool, timeout=TIMEOUT_S),
                )
        finally:
            cachemgr.close()


def run_on_worker(case: Case) -> Result:
    """Others look at the worker, and renew a lease with cachemgr."""
    with tempfile.TemporaryDirectory(prefix="quire-stalls-", dir="/tmp") as name, contextlib.ExitStack() as stack:
        flags = ("--dtype", "float32", "--threads", "1", "--block-size", "16")
        services = stack.enter_context(
            LocalServices.start(model=MODEL, num_blocks=2_000, runtime_dir=Path(name), extra_worker_args=flags)
        )
        channels = [
            stack.enter_context(grpc.insecure_channel(address, options=CHANNEL_OPTIONS))
            for address in (services.cachemgr.address, services.worker.address, services.worker.address)
        ]
        cache: Any = cache_service_pb2_grpc.CacheServiceStub(channels[0])
        stub: Any = worker_service_pb2_grpc.WorkerServiceStub(channels[1])
        lease = cache.CreateLease(cache_service_pb2.CreateLeaseRequest(ttl={"seconds": int(TTL_S)}), timeout=TIMEOUT_S)
        renewal = cache_service_pb2.RenewLeaseRequest(lease_id=lease.lease_id)
        return measure(
            case,
            Attacked(services.worker, channels[2]),
            lambda: cache.RenewLease(renewal, timeout=TIMEOUT_S),
            lambda: stub.GetStatistics(worker_service_pb2.GetStatisticsRequest(), timeout=TIMEOUT_S),
        )


def run_on_gateway(case: Case) -> Result:
    """Another caller asks for /health, and a lease is renewed with cachemgr."""
    with tempfile.TemporaryDirectory(prefix="quire-stalls-", dir="/tmp") as name, contextlib.ExitStack() as stack:
        flags = ("--dtype", "float32", "--threads", "1", "--block-size", "16")
        services = stack.enter_context(
            LocalServices.start(
                model=MODEL,
                num_blocks=2_000,
                runtime_dir=Path(name),
                extra_worker_args=flags,
                http_listen=("127.0.0.1:0",),
            )
        )
        gateway = services.gateway
        assert gateway is not None
        channel = stack.enter_context(grpc.insecure_channel(services.cachemgr.address, options=CHANNEL_OPTIONS))
        cache: Any = cache_service_pb2_grpc.CacheServiceStub(channel)
        lease = cache.CreateLease(cache_service_pb2.CreateLeaseRequest(ttl={"seconds": int(TTL_S)}), timeout=TIMEOUT_S)
        renewal = cache_service_pb2.RenewLeaseRequest(lease_id=lease.lease_id)
        client = stack.enter_context(httpx.Client(base_url=gateway.urls[0], timeout=TIMEOUT_S))
        attack = replace(case, attack=lambda _: case.attack(gateway.urls[0]))
        return measure(
            attack,
            Attacked(gateway, channel),
            lambda: cache.RenewLease(renewal, timeout=TIMEOUT_S),
            lambda: client.get("/health").raise_for_status(),
        )


def run_cases(names: Sequence[str]) -> Iterator[tuple[str, Result]]:
    """Every case finds fresh processes."""
    for name in names:
        for cases, run in RUNS:
            if name in cases:
                yield name, run(cases[name])


RUNS = ((CACHEMGR_CASES, run_on_cachemgr), (WORKER_CASES, run_on_worker), (GATEWAY_CASES, run_on_gateway))
ALL_CASES = [name for cases, _ in RUNS for name in cases]


@click.command()
@click.option("--case", "names", multiple=True, type=click.Choice(ALL_CASES), help="Only these.")
def main(names: tuple[str, ...]) -> None:
    """Send requests as large as may be, and larger, and print how long each holds up others."""
    columns = ("case", "answers", "seconds", "usual ms", "longest ms", "CPU ms", "peak MiB", "broken bounds")
    table, broken = Table(*columns), False
    for name, result in run_cases(names or ALL_CASES):
        bounds = list(result.broken_bounds())
        broken |= bool(bounds)
        answers = ", ".join(f"{count} {answer}" for answer, count in result.answers.most_common())
        milliseconds = (f"{each * 1e3:.0f}" for each in (result.usual_s, result.longest_s, result.cpu_s))
        figures = (f"{result.seconds:.1f}", *milliseconds, f"{result.peak_bytes / MIB:.0f}")
        row = (name, answers, *figures, "; ".join(bounds))
        table.add_row(*row)
        print(*row, sep=" | ", file=sys.stderr, flush=True)
    Console(width=150).print(table)
    sys.exit(broken)


if __name__ == "__main__":
    main()
