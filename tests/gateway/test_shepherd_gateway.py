"""The real Shepherd Model Gateway in front of two workers, started as docs/how-to/shepherd.md says."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pages
import pytest
from deadlines import DEADLINE_S
from gateway.conftest import MODEL, Gateway
from integration.fleet import POOLS, Fleet, started
from integration.protocol_client import await_that
from package_environments import SMG, environment
from ports import free_port

pytestmark = pytest.mark.verify

THIS = "tests/gateway/test_shepherd_gateway.py"
*SERVE, LAUNCH = pages.block("docs/how-to/shepherd.md", test=THIS).commands()
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
BLOCK_SIZE = 16
# The gateway excludes a worker that it has not heard from for this time; it is 15 s by default.
STALE_S = 5
LEFT_OVER_S = 2.0
"""The longest time that the index may have blocks of a worker that was killed."""
SCHEMA = {
    "type": "object",
    "properties": {"size": {"enum": [1, 22]}},
    "required": ["size"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


class Smg:
    """A process of the gateway in front of some workers."""

    def __init__(self, urls: list[str], folder: Path) -> None:
        command = shlex.split(LAUNCH)
        assert command[0] == "smg"
        self._port, self._metrics_port = free_port(), free_port()
        template = folder / "template.jinja"
        template.write_text(TEMPLATE)
        command[0] = str(environment("smg", SMG) / "smg")
        command[command.index("--port") + 1] = str(self._port)
        command[command.index("--worker-urls") + 1 :] = urls
        more = ("--prometheus-host", "127.0.0.1", "--prometheus-port", str(self._metrics_port))
        more += ("--chat-template", str(template), "--worker-stale-secs", str(STALE_S))
        self._urls = urls
        self.log = folder / f"smg-{self._port}.log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen([*command, *more], stdout=log, stderr=log)
        self.client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{self._port}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S
        )

    def await_ready(self) -> None:
        """Return when all workers are registered and have streams of events."""

        def is_ready() -> bool:
            assert self._process.poll() is None, self.log.read_text()[-3000:]
            with contextlib.suppress(httpx.TransportError):
                return all(self.metric("smg_kv_event_subscriptions_total", url) for url in self._urls)
            return False

        await_that("all workers are registered", is_ready)

    def metric(self, name: str, worker: str, **labels: str) -> float:
        """Return the sum of a worker's samples."""
        page = httpx.get(f"http://127.0.0.1:{self._metrics_port}/metrics", timeout=DEADLINE_S).text
        wanted = [f'{label}="{value}"' for label, value in {"worker": worker, **labels}.items()]
        lines = [line for line in page.splitlines() if line.startswith(f"{name}{{")]
        return sum(float(line.split()[-1]) for line in lines if all(each in line for each in wanted))

    def num_indexed(self, worker: str) -> int:
        return int(self.metric("smg_kv_index_blocks", worker))

    def complete(self, prompt: str, **fields: Any) -> Any:
        asked = {"max_tokens": 2, "temperature": 0, **fields}
        return self.client.completions.create(model=MODEL, prompt=prompt, **asked)

    def chat(self, **fields: Any) -> Any:
        messages: Any = [{"role": "user", "content": "What is the default value?"}]
        return self.client.chat.completions.create(model=MODEL, messages=messages, **{"max_tokens": 12, **fields})

    def close(self) -> None:
        self.client.close()
        self._process.terminate()
        try:
            self._process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Site:
    """Two workers, an adapter beside each, and the gateway."""

    def __init__(self, fleet: Fleet, folder: Path) -> None:
        self.fleet = fleet
        self.folder = folder
        self.adapters: dict[str, Gateway] = {}
        self.urls = {pool: f"grpc://127.0.0.1:{free_port()}" for pool in POOLS}
        for pool in POOLS:
            self.start_adapter(pool)
        self.smg = Smg(list(self.urls.values()), folder)

    def start_adapter(self, pool: str) -> None:
        """Start the adapter of a pool with the flags of the page, but for its addresses."""
        (command,) = [shlex.split(each) for each in SERVE if f"--pool {pool}" in each]
        assert command[:2] == ["quire", "serve"]
        flags = dict(zip(command[2::2], command[3::2], strict=True))
        assert flags.keys() == {"--cachemgr", "--served-model-name", "--pool", "--listen", "--shepherd"}
        address = self.urls[pool].removeprefix("grpc://")
        adapter = Gateway(
            self.fleet.address, "--pool", pool, "--shepherd", address, log=self.folder / f"{pool}-{len(self.adapters)}"
        )
        assert adapter.next_line().endswith(self.urls[pool])
        self.adapters[pool] = adapter

    def num_cached(self, pool: str) -> int:
        return self.fleet.pools()[pool].block_counts.cached_count

    def busy_pool(self) -> str | None:
        """Return a pool with a request that runs; None if there is none."""
        return next((name for name, pool in self.fleet.pools().items() if pool.block_counts.active_count), None)

    def is_idle(self) -> bool:
        return self.busy_pool() is None

    def await_indexed(self, smg: Smg | None = None) -> None:
        """Return when nothing runs and the gateway's index has the blocks of each pool."""

        def is_indexed() -> bool:
            pools = self.fleet.pools()
            counts = {pool: pools[pool].block_counts for pool in POOLS}
            indexed = {pool: (smg or self.smg).num_indexed(self.urls[pool]) for pool in POOLS}
            return all(not counts[pool].active_count and counts[pool].cached_count == indexed[pool] for pool in POOLS)

        await_that("the index has what the pools have", is_indexed)

    def close(self) -> None:
        self.smg.close()
        for adapter in self.adapters.values():
            adapter.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with started() as fleet:
        site = Site(fleet, tmp_path_factory.mktemp("shepherd"))
        try:
            site.smg.await_ready()
            yield site
        finally:
            site.close()
        logs = [path.read_text() for path in site.folder.glob("*-*") if path.suffix != ".log"]
        assert not [line for log in logs for line in log.splitlines() if "handler failed" in line]
        assert not fleet.violations()


def prompt_of(number: int) -> str:
    return f"{number} is the number of arguments that the function takes from its caller, one after the other. " * 2


def test_completions_chats_and_streams(site: Site) -> None:
    smg = site.smg
    whole = smg.complete("The default value of", max_tokens=16)
    parts = list(
        smg.complete("The default value of", max_tokens=16, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(part.choices[0].text for part in parts if part.choices) == whole.choices[0].text
    assert parts[-1].usage.completion_tokens == whole.usage.completion_tokens == 16
    assert len(parts) > 8
    both = smg.complete("The default value of", max_tokens=8, n=2, temperature=1, seed=3)
    assert both.choices[0].text != both.choices[1].text
    assert (
        both.choices[0].text
        == smg.complete("The default value of", max_tokens=8, temperature=1, seed=3).choices[0].text
    )
    word = whole.choices[0].text.split()[2]
    stopped = smg.complete("The default value of", max_tokens=16, stop=[word]).choices[0]
    assert (stopped.finish_reason, stopped.text) == ("stop", whole.choices[0].text.split(word)[0])
    chat = smg.chat(logprobs=True, top_logprobs=2, temperature=0)
    assert chat.usage.completion_tokens == 12
    assert "".join(each.token for each in chat.choices[0].logprobs.content) == chat.choices[0].message.content
    assert {len(each.top_logprobs) for each in chat.choices[0].logprobs.content} == {2}
    said = [part.choices[0].delta.content or "" for part in smg.chat(stream=True, temperature=0) if part.choices]
    assert "".join(said) == smg.chat(temperature=0).choices[0].message.content


def test_constraints_become_grammars(site: Site) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    for seed in range(3):
        said = site.smg.chat(max_tokens=64, seed=seed, response_format=wanted).choices[0]
        assert json.loads(said.message.content)["size"] in (1, 22)
    said = site.smg.chat(extra_body={"regex": "[0-9]{4}"}).choices[0].message.content
    assert re.fullmatch("[0-9]{4}", said)
    with pytest.raises(openai.BadRequestError, match=r"sampling_params\.\w+ is .* must be"):
        site.smg.chat(extra_body={"regex": "("})
    with pytest.raises(openai.BadRequestError, match=r"sampling_params.max_tokens is 5000; must be at most"):
        site.smg.complete("one", max_tokens=5000)
    assert site.smg.complete("one").choices


def test_repeated_prompts_go_to_their_holder(site: Site) -> None:
    for number in range(10):
        site.smg.complete(prompt_of(number))
    site.await_indexed()
    assert all(site.num_cached(pool) for pool in POOLS)
    at_holder = 0
    for number in range(100):
        usage = site.smg.complete(prompt_of(number % 10)).usage
        at_holder += usage.prompt_tokens_details.cached_tokens == (usage.prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert at_holder >= 95


def test_a_gateway_that_comes_late_knows_all_blocks(site: Site) -> None:
    site.smg.complete(prompt_of(50))
    other = Smg(list(site.urls.values()), site.folder)
    try:
        other.await_ready()
        site.await_indexed(other)
        usage = other.complete(prompt_of(50)).usage
        assert usage.prompt_tokens_details.cached_tokens > usage.prompt_tokens - BLOCK_SIZE - 1
    finally:
        other.close()


def test_load_records_go_on_without_requests(site: Site) -> None:
    """A worker is not excluded while nothing happens for longer than the gateway accepts silence."""
    urls = site.urls.values()

    def records() -> list[float]:
        return [site.smg.metric("smg_kv_event_batches_total", url, disposition="load_only") for url in urls]

    before = records()
    awaited = [number + STALE_S + 2 for number in before]
    await_that("records come", lambda: all(now >= wanted for now, wanted in zip(records(), awaited, strict=True)))
    assert not any(site.smg.metric("smg_worker_stall_transitions_total", url) for url in urls)


def test_a_caller_that_goes_frees_its_blocks(site: Site) -> None:
    stream = site.smg.complete("It is", max_tokens=1900, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    await_that("no block is held", site.is_idle)


def test_a_restarted_adapter_makes_the_index_anew(site: Site) -> None:
    adapter = site.adapters[POOLS[0]]
    adapter.process.kill()
    adapter.close()
    assert site.smg.complete(prompt_of(60)).choices
    site.start_adapter(POOLS[0])
    url = site.urls[POOLS[0]]
    await_that("it is used again", lambda: not site.smg.metric("smg_worker_stalled", url))
    site.smg.complete(prompt_of(61))
    site.await_indexed()


def test_requests_survive_a_killed_worker_and_its_blocks_leave_the_index(site: Site) -> None:
    """Of the requests that run, a stream ends with an error; each other one is answered, and each that comes later."""
    site.await_indexed()

    def long(number: int) -> Any:
        return site.smg.complete(prompt_of(number), max_tokens=200, extra_body={"ignore_eos": True})

    stream = iter(site.smg.complete(prompt_of(69), max_tokens=1900, stream=True, extra_body={"ignore_eos": True}))
    next(stream)
    with ThreadPoolExecutor(8) as threads:
        victim = await_that("one serves", site.busy_pool)
        answers = [threads.submit(long, number) for number in range(70, 78)]
        killed, (other,) = site.urls[victim], (url for pool, url in site.urls.items() if pool != victim)
        await_that("it is indexed", lambda: site.smg.num_indexed(killed))
        site.fleet.workers[victim].kill()
        await_that("the index is empty", lambda: not site.smg.num_indexed(killed), timeout_s=LEFT_OVER_S)
        assert [answer.result().usage.completion_tokens for answer in answers] == [200] * 8
    with pytest.raises(openai.APIError):
        list(stream)
    before = site.smg.metric("smg_worker_requests_total", other)
    for number in range(20):
        assert site.smg.complete(prompt_of(number)).choices
    assert site.smg.metric("smg_worker_requests_total", other) == before + 20
    site.fleet.heal()
    await_that("it is used again", lambda: not site.smg.metric("smg_worker_stalled", killed))
    before = site.smg.metric("smg_worker_requests_total", killed)
    fresh = map(prompt_of, itertools.count(100))  # no worker holds them
    await_that(
        "requests go there",
        lambda: site.smg.complete(next(fresh)) and site.smg.metric("smg_worker_requests_total", killed) > before,
    )
    site.await_indexed()


def test_another_version_is_said_at_start(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tmp_path / "smg_grpc_proto-9.9.9.dist-info"
    found.mkdir()
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: smg-grpc-proto\nVersion: 9.9.9\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    adapter = Gateway(site.fleet.address, "--pool", POOLS[1], "--shepherd", "127.0.0.1:0", log=tmp_path / "log")
    adapter.close()
    assert "smg-grpc-proto is 9.9.9, but this adapter was tested with 0.4.28 alone" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "--shepherd needs --pool"),
        (("--pool", "one", "--api-keys", "keys"), "--shepherd and API keys exclude each other"),
    ],
)
def test_flags_that_do_not_go_together(flags: tuple[str, ...], message: str) -> None:
    command = [sys.executable, "-P", "-m", "quire.gateway", "--shepherd", "127.0.0.1:0", *flags]
    said = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert said.returncode == 2
    assert message in said.stderr
