"""NVIDIA Dynamo's indexer, from the registry, finds what LookupPrefix finds, after schedules drawn by seed.

A schedule has prompts, held and ended sequences, evictions, the host tier, resets, kills of the worker, of cachemgr and
of `quire events`, and consumers that come late, with a replay socket and without. The indexer listens on all addresses,
so it runs in a network of its own.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from deadlines import DEADLINE_S
from deploy.tools import missing
from integration.dynamo_processes import dynamo_python
from integration.kv_events import EventsProcess, draw_prompt
from integration.lone_cachemgr import SMALL_POOL, Bookkeeper, LoneCachemgr, Tenant
from integration.network import Network
from integration.protocol_client import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    WORKER_ARGS,
    LeaseHolder,
    Pair,
    ask,
    await_that,
)

from quire.cache.v1 import cache_service_pb2
from quire.cli.launch import LocalServices

pytestmark = pytest.mark.verify

MODEL, PORT = "demo", 8090
LISTEN, REPLAY_LISTEN = "127.0.0.1:5557", "127.0.0.1:6557"
NUM_QUERIES = 500
NUM_STEPS = 40
MAX_BLOCKS = 10
SALTS = ("", "blue")
SEEDS = (1, 2, 3)


class Indexer:
    """The process. Consumers of one publisher are registered by number; the first one is there from the start."""

    def __init__(self, network: Network, folder: Path, *, block_size: int) -> None:
        self._block_size = block_size
        self._log = (folder / "indexer.log").open("ab")
        flags = ("--block-size", str(block_size), "--port", str(PORT), "--model-name", MODEL, "--threads", "1")
        command = [*network.prefix, dynamo_python(), "-m", "dynamo.indexer", *flags, "--workers", f"1=tcp://{LISTEN}"]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)
        transport = httpx.HTTPTransport(uds=str(network.socket_path))
        self._http = httpx.Client(transport=transport, base_url="http://indexer", timeout=DEADLINE_S)
        await_that("the indexer answers", self._answers)
        self.workers = ["1"]

    def _answers(self) -> bool:
        try:
            return self._http.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def register(self, *, with_replay: bool) -> None:
        """A consumer that comes late."""
        number = len(self.workers) + 1
        replay = {"replay_endpoint": f"tcp://{REPLAY_LISTEN}"} if with_replay else {}
        place = {"endpoint": f"tcp://{LISTEN}", "model_name": MODEL, "block_size": self._block_size}
        assert self._http.post("/register", json={"instance_id": number, **place, **replay}).status_code == 201
        self.workers.append(str(number))

    def matches(self, tokens: Sequence[int], salt: str) -> dict[str, int]:
        """Return how many tokens each consumer finds."""
        query = {"token_ids": tokens, "model_name": MODEL, **({"cache_salt": salt} if salt else {})}
        answer = self._http.post("/query", json=query)
        assert answer.status_code == 200, answer.text
        scores = answer.json()["scores"]
        return {worker: scores.get(worker, {}).get("0", 0) for worker in self.workers}

    def close(self) -> None:
        self._http.close()
        self._process.kill()
        self._process.wait(DEADLINE_S)
        self._log.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="q-") as name:
        yield Path(name)


@pytest.fixture
def network(folder: Path) -> Iterator[Network]:
    try:
        network = Network(folder, PORT)
    except OSError as error:
        missing(f"a network ({error})", required_by="QUIRE_REQUIRE_FOREIGN", for_what="Dynamo's indexer")
    yield network
    network.close()


@dataclass
class Schedule:
    """Both services, `quire events`, and what is done with them."""

    pair: Pair
    events: EventsProcess
    indexer: Indexer
    network: Network
    state_dir: Path
    draw: random.Random
    num_sequences: int = 0
    held: list[int] = field(default_factory=list)
    offloaded: list[int] = field(default_factory=list)
    done: list[str] = field(default_factory=list)

    def begin_lease(self) -> None:
        self.pair.await_attached()
        self.holder = LeaseHolder.create(self.pair)
        self.held.clear()
        self.offloaded.clear()

    def step(self) -> None:
        weights = {
            "prompt": 24,
            "release": 8,
            "offload": 4,
            "restore": 3,
            "reset": 1,
            "kill_worker": 1,
            "kill_cachemgr": 1,
            "kill_events": 1,
            "register": 1,
        }
        self.do(self.draw.choices(list(weights), list(weights.values()))[0])

    def do(self, name: str) -> None:
        self.done.append(name)
        getattr(self, name)()

    def prompt(self) -> None:
        self.num_sequences += 1
        tokens = draw_prompt(self.draw, block_size=BLOCK_SIZE, max_blocks=MAX_BLOCKS)
        self.holder.tokens[self.num_sequences] = tokens
        admission = {"sequence_id": self.num_sequences, "token_ids": tokens, "salt": self.draw.choice(SALTS).encode()}
        plan = self.holder.plan(admissions=[admission])
        self.holder.run(plan, skip=bool(plan.refusals))
        self.holder.await_settled()
        if plan.refusals:
            self.release()
        else:
            self.held.append(self.num_sequences)

    def release(self) -> None:
        if self.held:
            seq_id = self.held.pop(self.draw.randrange(len(self.held)))
            self.holder.run(self.holder.plan(release_sequence_ids=[seq_id]))
            self.holder.await_settled()

    def offload(self) -> None:
        if self.held:
            seq_id = self.held.pop(self.draw.randrange(len(self.held)))
            self.move(seq_id, self.offloaded, self.held, offload_sequence_ids=[seq_id])

    def restore(self) -> None:
        if self.offloaded:
            seq_id = self.offloaded.pop(self.draw.randrange(len(self.offloaded)))
            self.move(seq_id, self.held, self.offloaded, restores=[{"sequence_id": seq_id}])

    def move(self, seq_id: int, target: list[int], source: list[int], **fields: object) -> None:
        plan = self.holder.plan(**fields)
        self.holder.run(plan, skip=bool(plan.refusals))
        self.holder.await_settled()
        (source if plan.refusals else target).append(seq_id)

    def reset(self) -> None:
        tokens = draw_prompt(self.draw, block_size=BLOCK_SIZE, max_blocks=2) + [1] * BLOCK_SIZE
        what = self.draw.choice([{}, {"salt": b"blue"}, {"token_ids": tokens}])
        ask(self.pair.cache.ResetPrefixCache, cache_service_pb2.ResetPrefixCacheRequest(pool="default", **what))

    def kill_worker(self) -> None:
        worker = self.pair.services.worker
        worker.kill()
        worker.start()
        worker.wait_serving(DEADLINE_S)
        self.begin_lease()

    def kill_cachemgr(self) -> None:
        """With the state directory, or with an empty one: then every pool begins a new epoch."""
        cachemgr = self.pair.services.cachemgr
        cachemgr.kill()
        if self.draw.random() < 0.5:
            shutil.rmtree(self.state_dir)
        cachemgr.start()
        cachemgr.wait_serving(DEADLINE_S)
        self.begin_lease()

    def kill_events(self) -> None:
        self.events.kill()
        self.events = start_events(self.pair, self.network)

    def register(self) -> None:
        self.indexer.register(with_replay=self.draw.random() < 0.5)

    def mismatches(self) -> list[str]:
        """Queries with another answer than LookupPrefix's, which leaves a token of the prompt to compute."""
        found = []
        draw = random.Random(self.num_sequences)
        for _ in range(NUM_QUERIES):
            tokens, salt = draw_prompt(draw, block_size=BLOCK_SIZE, max_blocks=MAX_BLOCKS), draw.choice(SALTS)
            expected = self.pair.cached_tokens([*tokens, 1], salt=salt.encode())
            for worker, answered in self.indexer.matches(tokens, salt).items():
                if answered != expected:
                    found.append(f"{worker}: {salt!r} {tokens}: {answered}, not {expected}")
            if found:
                return found
        return found

    def await_equal(self) -> None:
        try:
            await_that("the indexer knows what can be found", lambda: not self.mismatches())
        except AssertionError:
            raise AssertionError(f"after {self.done}: {self.mismatches()}") from None


def start_events(pair: Pair, network: Network) -> EventsProcess:
    place = ("--cachemgr", pair.services.cachemgr_address, "--listen", LISTEN, "--replay-listen", REPLAY_LISTEN)
    return EventsProcess(pair.folder, *place, "--pool", "default", prefix=network.prefix)


@pytest.fixture(params=SEEDS)
def schedule(request: pytest.FixtureRequest, model_dir: Path, folder: Path, network: Network) -> Iterator[Schedule]:
    state_dir = folder / "state"
    with LocalServices.start(
        model=model_dir,
        num_blocks=NUM_BLOCKS,
        extra_cachemgr_args=("--state-dir", str(state_dir)),
        extra_worker_args=(*WORKER_ARGS, "--host-memory", "128K"),
        runtime_dir=folder,
    ) as services:
        pair = Pair(services)
        indexer = Indexer(network, folder, block_size=BLOCK_SIZE)
        schedule = Schedule(
            pair, start_events(pair, network), indexer, network, state_dir, random.Random(request.param)
        )
        schedule.begin_lease()
        yield schedule
        indexer.close()
        schedule.events.kill()
        pair.close()


def test_the_indexer_finds_what_lookup_finds(schedule: Schedule) -> None:
    for first in ("prompt", "prompt", "register", "prompt"):
        schedule.do(first)
    schedule.await_equal()
    for _ in range(NUM_STEPS):
        schedule.step()
    schedule.await_equal()
    for kill in ("kill_worker", "prompt", "kill_cachemgr", "prompt", "kill_events", "prompt"):
        schedule.do(kill)
    schedule.await_equal()
    schedule.do("register")
    schedule.await_equal()
    schedule.pair.services.worker.kill()
    await_that("nothing is found", lambda: not any(schedule.indexer.matches([1] * BLOCK_SIZE, "").values()))


def test_tenants_and_salts_are_apart(folder: Path, network: Network) -> None:
    """A router queries with TENANT:SALT where cachemgr authenticates callers."""
    cachemgr = LoneCachemgr(folder).start()
    (folder / "token").write_text("oscar")
    place = ("--cachemgr", cachemgr.process.address, "--cachemgr-token-file", str(folder / "token"))
    events = EventsProcess(folder, *place, "--listen", LISTEN, prefix=network.prefix)
    indexer = Indexer(network, folder, block_size=BLOCK_SIZE)
    try:
        worker = Bookkeeper(cachemgr, "one", epoch=1, **SMALL_POOL)
        for number, (caller, salt) in enumerate((("alice", b""), ("alice", b"blue"), ("bob", b"blue")), start=1):
            Tenant.begin(cachemgr, worker, caller).cache(1, [1] * BLOCK_SIZE * number, salt=salt)
        expected = {"alice:": 1, "alice:blue": 2, "bob:blue": 3, "": 0, "blue": 0, "bob:": 0, "alice": 0}
        for namespace, num_blocks in expected.items():
            found = {"1": BLOCK_SIZE * num_blocks}
            await_that(namespace, lambda asked=(namespace, found): indexer.matches([1] * 99, asked[0]) == asked[1])
    finally:
        indexer.close()
        events.kill()
        cachemgr.close()
