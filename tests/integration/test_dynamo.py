"""NVIDIA Dynamo's frontend and KV router, from the registry, over two backends of ours and two real workers."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from deadlines import DEADLINE_S
from deploy.tools import missing
from integration import fleet
from integration.dynamo_processes import (
    MODEL,
    PORT,
    Backend,
    Frontend,
    cached_tokens,
    dynamo_python,
    request_of,
)
from integration.fleet import Fleet
from integration.network import Network
from integration.protocol_client import await_that
from roots import python_path

from quire.client.engine.config import EngineConfig
from quire.client.engine.llm import LLM
from quire.client.engine.sampling import SamplingParams

pytestmark = pytest.mark.verify

PROMPT = "The default value is"
WORDS = ("tensor", "input", "output", "model", "memory", "block", "cache", "token", "step", "lease", "grant", "worker")
NUM_PROMPTS = 20
BLOCK_SIZE = 16
TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
ROUTED = re.compile(
    r'route request completed.* otel\.kind="client" request_id=(\S+) .*?overlap_blocks=(\d+).*?worker_id=(\d+)'
)
APPLIED = "dynamo_component_kv_cache_events_applied"


@dataclass
class Dynamo:
    """All processes."""

    fleet: Fleet
    frontend: Frontend
    backends: dict[str, Backend]

    def route_of(self, answer: dict[str, Any]) -> tuple[int, str]:
        """Return the blocks that the router expected at the worker, and that worker. Lines of the log may come late."""

        def find() -> tuple[int, str] | None:
            found = ROUTED.findall(COLOUR.sub("", self.frontend.log()))
            routes = {f"cmpl-{request_id}": (int(overlap), worker) for request_id, overlap, worker in found}
            return routes.get(answer["id"])

        route: tuple[int, str] = await_that("the request is logged", find)
        return route

    def applied(self) -> Counter[tuple[str, str]]:
        """Return the events that the router's index has applied, by type and outcome."""
        counts: Counter[tuple[str, str]] = Counter()
        for line in self.frontend.http.get("/metrics").text.splitlines():
            if line.startswith(APPLIED):
                labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
                counts[labels["event_type"], labels["status"]] += int(float(line.split()[-1]))
        return counts

    def num_sequences(self) -> int:
        return sum(pool.sequence_count for pool in self.fleet.pools().values())

    def complete_routed(self, prompt: str) -> tuple[int, int, str]:
        """Return the tokens that the router expected at the worker, those found, and the worker.

        At least one token of the prompt is computed.
        """
        answer = self.frontend.complete(prompt)
        num_blocks, worker = self.route_of(answer)
        most = (answer["usage"]["prompt_tokens"] - 1) // BLOCK_SIZE * BLOCK_SIZE
        return min(num_blocks * BLOCK_SIZE, most), cached_tokens(answer), worker

    def await_used(self, pool: str, fresh: Iterator[str]) -> None:
        """Return when the router has sent a prompt to a pool. No worker holds the beginning of a fresh prompt."""

        def is_used() -> bool:
            expected, cached, worker = self.complete_routed(next(fresh))
            assert (expected, cached) == (0, 0)
            return is_worker_of(self.backends[pool], worker)

        await_that(f"the worker of pool {pool} is used", is_used)


@pytest.fixture(scope="module")
def dynamo() -> Iterator[Dynamo]:
    with tempfile.TemporaryDirectory(prefix="q-") as name, fleet.started() as processes:
        folder = Path(name)
        model_path = folder / "model"
        shutil.copytree(fleet.MODEL, model_path)
        (model_path / "chat_template.jinja").write_text(TEMPLATE)
        try:
            network = Network(folder, PORT)
        except OSError as error:
            missing(f"a network ({error})", required_by="QUIRE_REQUIRE_FOREIGN", for_what="Dynamo's frontend")
        backends = {pool: Backend(network, folder, processes.address, pool, model_path) for pool in fleet.POOLS}
        frontend = Frontend(network, folder)
        try:
            frontend.await_model(*backends.values())
            await_that("both backends are ready", lambda: all("WorkerKvQuery" in b.log() for b in backends.values()))
            yield Dynamo(processes, frontend, backends)
        finally:
            for process in (frontend, *backends.values()):
                process.kill()
            network.close()


def draw_prompts(seed: int, count: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choice(WORDS) for _ in range(100)) for _ in range(count)]


def test_tokens_are_those_of_the_pool(dynamo: Dynamo) -> None:
    """Texts, by completion, stream, chat and token ids; log-probabilities; stop strings; usage."""
    with LLM(dynamo.fleet.address, config=EngineConfig(pool="one")) as llm:
        (expected,) = llm.generate([PROMPT], SamplingParams(max_tokens=8, temperature=0, logprobs=2))
    sample = expected.samples[0]
    answer = dynamo.frontend.complete(PROMPT, max_tokens=8)
    assert answer["choices"][0]["text"] == sample.text
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
    by_ids = dynamo.frontend.complete(list(expected.prompt_token_ids), max_tokens=8)
    assert by_ids["choices"][0]["text"] == sample.text
    events = dynamo.frontend.stream("/v1/completions", request_of(PROMPT, max_tokens=8, logprobs=2))
    choices = [choice for event in events for choice in event["choices"]]
    assert "".join(choice["text"] for choice in choices) == sample.text
    logprobs = [value for choice in choices for value in (choice.get("logprobs") or {}).get("token_logprobs", [])]
    assert logprobs == pytest.approx([each.logprob for each in sample.logprobs or ()], abs=1e-4)
    stopped = dynamo.frontend.complete(PROMPT, max_tokens=8, stop=["value"])["choices"][0]
    assert (stopped["text"], stopped["finish_reason"]) == (sample.text.partition("value")[0], "stop")


def test_chat(dynamo: Dynamo) -> None:
    """A stream, and a text that a JSON schema describes."""
    chat = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "temperature": 0}
    answer = dynamo.frontend.http.post("/v1/chat/completions", json=chat | {"max_tokens": 6}).json()
    events = dynamo.frontend.stream("/v1/chat/completions", chat | {"max_tokens": 6})
    deltas = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
    assert "".join(deltas) == answer["choices"][0]["message"]["content"] != ""
    schema = {"enum": ["yes", "no"], "x-guidance": {"whitespace_flexible": False}}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    formed = dynamo.frontend.http.post("/v1/chat/completions", json=chat | {"max_tokens": 20, "response_format": form})
    assert formed.json()["choices"][0]["message"]["content"] in ('"yes"', '"no"'), formed.text


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": 999999}, "SEQUENCE_TOO_LONG: max_tokens is 999999"),
        ({"n": 2, "temperature": 1}, "n is 2"),
        ({"prompt": "value " * 3000}, "SEQUENCE_TOO_LONG: prompt"),
        ({"nvext": {"cache_salt": "s" * 65}}, "salt"),
    ],
    ids=["max_tokens", "n", "prompt", "salt"],
)
def test_bad_input_names_the_field(dynamo: Dynamo, fields: dict[str, object], named: str) -> None:
    answer = dynamo.frontend.http.post("/v1/completions", json=request_of(PROMPT) | fields)
    assert answer.status_code == 400, answer.text
    assert named in answer.text


def test_a_caller_that_goes_frees_its_sequence(dynamo: Dynamo) -> None:
    body = request_of(PROMPT, max_tokens=1900, ignore_eos=True, stream=True)
    with dynamo.frontend.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        first = next(lines)  # the stream is closed with `lines`
        assert dynamo.num_sequences() == 1, first
    await_that("the sequence is freed", lambda: dynamo.num_sequences() == 0, timeout_s=10)


def test_salts_separate_prefixes(dynamo: Dynamo) -> None:
    (prompt,) = draw_prompts(3, 1)
    for salt, is_found in ((None, False), ("red", False), ("red", True), ("blue", False), (None, True)):
        num_before = dynamo.applied()["stored", "ok"]
        answer = dynamo.frontend.complete(prompt, **({"nvext": {"cache_salt": salt}} if salt else {}))
        assert (cached_tokens(answer) > 0) == is_found, salt
        if not is_found:
            await_that("its blocks are known", lambda before=num_before: dynamo.applied()["stored", "ok"] > before)


def test_repeats_go_to_the_holder(dynamo: Dynamo) -> None:
    """20 of 20, and both workers hold some. The router expects as many tokens as the worker finds."""
    prompts = draw_prompts(1, NUM_PROMPTS)
    holders: Counter[str] = Counter()
    for prompt in prompts:
        num_before = dynamo.applied()["stored", "ok"]
        _, cached, worker = dynamo.complete_routed(prompt)
        assert cached == 0
        holders[worker] += 1
        await_that("its blocks are known", lambda before=num_before: dynamo.applied()["stored", "ok"] > before)
    found = [dynamo.complete_routed(prompt) for prompt in prompts]
    assert all(expected == cached > 0 for expected, cached, _ in found), found
    assert len(holders) == 2, holders
    assert {status for (_, status), count in dynamo.applied().items() if count} == {"ok"}


def test_blocks_that_continue_a_known_prefix_are_known(dynamo: Dynamo) -> None:
    first, rest = draw_prompts(5, 2)
    for prompt in (first, f"{first} {rest}"):
        num_before = dynamo.applied()["stored", "ok"]
        num_found = cached_tokens(dynamo.frontend.complete(prompt))
        await_that("its blocks are known", lambda before=num_before: dynamo.applied()["stored", "ok"] > before)
    assert num_found > 0

    def is_known() -> bool:
        expected, cached, _ = dynamo.complete_routed(f"{first} {rest}")
        return expected == cached > num_found

    await_that("the longer prefix is known", is_known, timeout_s=10)


def test_nothing_is_stale_after_a_worker_was_killed(dynamo: Dynamo) -> None:
    """Requests go on at the other one. The next worker is used, and the index has nothing of the old one."""
    prompts: list[str] = []
    workers: list[str] = []
    for prompt in draw_prompts(2, 100):
        num_before = dynamo.applied()["stored", "ok"]
        dynamo.frontend.complete(prompt)
        await_that("its blocks are known", lambda before=num_before: dynamo.applied()["stored", "ok"] > before)
        prompts.append(prompt)
        workers.append(dynamo.complete_routed(prompt)[2])
        if len(prompts) >= 8 and sorted(Counter(workers).values())[:-1] >= [2]:
            break  # the router chose either worker at least twice: between equal ones it draws
    assert len(set(workers)) == 2, workers
    (gone,) = {worker for worker in workers if is_worker_of(dynamo.backends["two"], worker)}
    num_taken = taken_out(dynamo.backends["two"])
    dynamo.fleet.workers["two"].kill()
    await_that("the router knows it", lambda: taken_out(dynamo.backends["two"]) > num_taken, timeout_s=10)
    held = [prompt for prompt, worker in zip(prompts, workers, strict=True) if worker == gone]
    asked_later = held[1:]
    assert asked_later, workers
    for prompt, worker in zip(prompts, workers, strict=True):
        if prompt in asked_later:
            continue
        expected, cached, used = dynamo.complete_routed(prompt)
        assert expected == cached
        assert (cached > 0) == (worker != gone)
        assert used != gone
    dynamo.fleet.heal()
    await_that("it is registered again", lambda: "registered again" in dynamo.backends["two"].log())

    assert [dynamo.complete_routed(prompt)[:2] for prompt in asked_later] == [(0, 0)] * len(asked_later)
    dynamo.await_used("two", iter(draw_prompts(4, 1000)))


def test_an_open_stream_goes_on_at_the_other_worker(dynamo: Dynamo) -> None:
    """Its text is the one that it has without a failure: no token twice, none lost."""
    bodies = [request_of(prompt, max_tokens=1200, ignore_eos=True) for prompt in draw_prompts(6, 16)]
    num_taken = taken_out(dynamo.backends["one"])
    streams: list[Future[list[dict[str, Any]]]] = []
    with ThreadPoolExecutor(len(bodies)) as threads:
        for body in bodies:  # the router chooses: it may send some to the other worker first
            streams.append(threads.submit(dynamo.frontend.stream, "/v1/completions", body))
            await_that(
                "the stream has a worker",
                lambda: dynamo.num_sequences() + sum(stream.done() for stream in streams) >= len(streams),
            )
            if dynamo.fleet.pools()["one"].sequence_count:
                break
        dynamo.fleet.workers["one"].kill()
        texts = [text_of(stream.result(DEADLINE_S)) for stream in streams]
    assert taken_out(dynamo.backends["one"]) == num_taken + 1
    assert "recreating stream" in dynamo.frontend.log()
    dynamo.fleet.heal()
    await_that("it is registered again", lambda: "registered again" in dynamo.backends["one"].log())
    expected = [dynamo.frontend.stream("/v1/completions", body) for body in bodies[: len(streams)]]
    assert texts == [text_of(events) for events in expected]


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(choice["text"] for event in events for choice in event["choices"])


def is_worker_of(backend: Backend, worker: str) -> bool:
    return f"Dynamo's worker {worker}" in COLOUR.sub("", backend.log())


def taken_out(backend: Backend) -> int:
    return backend.log().count("taken out of discovery")


def test_a_backend_stops_by_a_signal(dynamo: Dynamo) -> None:
    """It gives its lease back. Last in this file: the backend is not started again."""
    assert dynamo.backends["two"].stop() == 0, dynamo.backends["two"].log()[-2000:]
    await_that("its lease is gone", lambda: dynamo.fleet.pools()["two"].lease_count == 0, timeout_s=10)

    def is_served() -> bool:
        answer = dynamo.frontend.http.post("/v1/completions", json=request_of(PROMPT))
        return answer.status_code == 200 and bool(answer.json()["choices"])

    # Its worker was killed: the frontend may not know it again yet. While both were there, it may never have chosen
    # this one: it can still count the load of the streams that ended with the worker.
    await_that("the other backend serves", is_served)


def test_another_version_is_said_at_the_start(tmp_path: Path) -> None:
    other = tmp_path / "ai_dynamo-9.9.9.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: ai-dynamo\nVersion: 9.9.9\n")
    # The process without Dynamo's part of it.
    program = (
        "from quire.integrations.dynamo import __main__ as process\n"
        "process.run = lambda *_, **__: None\n"
        "process.main([])\n"
    )
    paths = (os.pathsep.join((str(tmp_path), python_path())), python_path())
    said = [
        subprocess.run(
            [dynamo_python(), "-c", program],
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=True,
        ).stderr
        for path in paths
    ]
    assert "Warning: ai-dynamo 9.9.9, ai-dynamo-runtime 1.6.1: tested with 1.6.1 alone" in said[0]
    assert "tested with" not in said[1]
