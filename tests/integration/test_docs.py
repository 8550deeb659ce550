"""The blocks of the pages do what the pages say, on both real services with the model that ships here: those of
README.md (plan, grant, step), docs/how-to/inspection.md, docs/reference/security.md and the pages in COMMAND_PAGES."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pages
import pytest
from conformance.foreign import build_grpcurl, find
from deadlines import DEADLINE_S
from integration.test_tracing import Collector
from pages import ROOT, SHELL, Block
from ports import free_ports

from quire.cache.v1 import cache_service_pb2 as pb
from quire.cli.launch import CACHEMGR_START_TIMEOUT_S, LocalServices
from quire.cli.service_process import WORKER_START_TIMEOUT_S, ServiceProcess
from quire.client import CacheClient, Engine, SamplingParams

THIS = "tests/integration/test_docs.py"
MODEL = ROOT / "deploy/demo/model"
TIMEOUT_S = 120
DEFAULT_FOLDER = "/run/quire"
SECURITY_PORTS = ("7070", "7071", "7080", "7081", "9400")


@pytest.fixture(scope="module")
def services() -> Iterator[LocalServices]:
    """Both services, for all blocks but those that start their own."""
    with LocalServices.start(model=MODEL, num_blocks=64) as services:
        yield services


def run_shell(text: str, folder: Path, environment: Mapping[str, str]) -> str:
    """Return the output of the commands. Fails if one of them fails."""
    paths = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-euo", "pipefail", "-c", text],
        cwd=folder,
        env={**os.environ, "PATH": paths, **environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


async def run_python(block: Block, names: dict[str, Any]) -> dict[str, Any]:
    """The names that a block leaves behind; it may await at its top."""
    code = compile(block.text, block.place, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    outcome = eval(code, names)  # the pages are ours
    if inspect.isawaitable(outcome):
        await outcome
    return names


COMMAND_PAGES = (
    "docs/concepts/blocks-and-tables.md",
    "docs/concepts/leases-and-fences.md",
    "docs/concepts/prefix-cache.md",
    "docs/concepts/tenants.md",
    "docs/how-to/observability.md",
    "docs/how-to/operations.md",
)
COMMANDS = [
    pytest.param(each, id=each.place, marks=[pytest.mark.verify] if "grpcurl" in each.text else [])
    for page in COMMAND_PAGES
    for each in pages.blocks(page)
    if each.test == THIS and each.language in SHELL
]


@pytest.mark.parametrize("block", COMMANDS)
def test_commands(block: Block, services: LocalServices, tmp_path: Path) -> None:
    """All but `quire up`, which does not end; tests/unit/repository/test_docs.py reads its flags."""
    text = re.sub(r"^quire up .*$", "", block.text, flags=re.M)
    assert text.strip()
    folder = Path(services.cachemgr_address.removeprefix("unix:")).parent
    environment = {"QUIRE_CACHEMGR": services.cachemgr_address}
    if "grpcurl" in text:
        environment["PATH"] = os.pathsep.join(
            (str(build_grpcurl().parent), str(Path(sys.executable).parent), os.environ["PATH"])
        )
    said = run_shell(text.replace(DEFAULT_FOLDER, str(folder)), tmp_path, environment)
    assert said
    if "AuditPool" in text:
        assert '"violations"' not in said


def test_a_plan_is_granted_and_its_step_runs(services: LocalServices, capsys: pytest.CaptureFixture[str]) -> None:
    """README.md: the default address is in place of the services' own."""
    text = pages.block("README.md", test=THIS).text
    connected = text.replace("CacheClient()", f"CacheClient({services.cachemgr_address!r})")
    assert connected != text
    exec(compile(connected, "README.md", "exec"), {})
    assert re.fullmatch(r"the next token: \d+\n", capsys.readouterr().out)


def test_a_copy_of_the_blocks_is_kept(services: LocalServices) -> None:
    """docs/how-to/inspection.md: the snippet's copy is equal to ListBlocks."""

    async def run() -> None:
        names = await run_python(pages.block("docs/how-to/inspection.md", test=THIS), {})
        cache = CacheClient(services.cachemgr_address)
        blocks: dict[int, pb.Block] = {}
        keeping = asyncio.create_task(names["keep"](cache, blocks))
        try:
            async with Engine.connect(services.cachemgr_address) as engine:
                await engine.complete(["Each thread holds a lock while it reads"], SamplingParams(max_tokens=40))
            async with asyncio.timeout(DEADLINE_S):
                while not blocks or blocks != await listed(cache):
                    await asyncio.sleep(0.02)
                await cache.reset_prefix_cache()
                while blocks:
                    await asyncio.sleep(0.02)
        finally:
            keeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await keeping
            await cache.close()

    asyncio.run(run())


async def listed(cache: CacheClient) -> dict[int, pb.Block]:
    return {block.block_id: block for block in await cache.list_blocks() if block.state != pb.BLOCK_STATE_FREE}


def test_an_engine_serves_metrics(services: LocalServices) -> None:
    """docs/how-to/observability.md, Metrics."""

    async def run() -> None:
        block = pages.block("docs/how-to/observability.md", test=THIS, containing="metrics_listen")
        port = free_ports(1)[0]
        names = await run_python(on_ports(block, {"9402": port}), {"cachemgr": services.cachemgr_address})
        async with names["engine"] as engine:
            await engine.complete(["The input tensor"], SamplingParams(max_tokens=2))
            page = await asyncio.to_thread(run_shell, f"curl --silent --fail http://127.0.0.1:{port}/metrics", ROOT, {})
        assert "quire_engine_generation_tokens_total" in page

    find("curl", for_what="docs/how-to/observability.md")
    asyncio.run(run())


def test_an_engine_makes_traces(services: LocalServices) -> None:
    """docs/how-to/observability.md, Traces."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc")
    collector = Collector()

    async def run() -> None:
        block = pages.block("docs/how-to/observability.md", test=THIS, containing="otlp_tracing")
        assert block.text.count("    ...\n") == 1
        text = block.text.replace("    ...\n", "    done = await engine.complete(['The input tensor'])\n")
        block = on_ports(replace(block, text=text), {"4317": int(collector.endpoint.rpartition(":")[2])})
        names = await run_python(block, {"cachemgr": services.cachemgr_address})
        assert names["done"][0].samples[0].token_ids

    asyncio.run(run())
    assert {span.service for span in collector.spans()} == {"quire-client"}
    collector.close()


def test_the_set_up_of_security(tmp_path: Path) -> None:
    """docs/reference/security.md, Set up: certificates, tokens, both services, and the callers."""
    find("openssl", for_what="docs/reference/security.md")
    find("curl", for_what="docs/reference/security.md")
    ports = dict(zip(SECURITY_PORTS, free_ports(len(SECURITY_PORTS)), strict=True))
    blocks = [each for each in pages.blocks("docs/reference/security.md") if each.test == THIS]
    certificates, callers, servers, calls, python = (on_ports(each, ports) for each in blocks)
    run_shell(certificates.text, tmp_path, {})
    run_shell(callers.text, tmp_path, {})
    with contextlib.ExitStack() as stack:
        for command in servers.commands():
            stack.enter_context(serving(command.replace("0.0.0.0", "127.0.0.1"), tmp_path))
        said = run_shell(calls.text, tmp_path, {})
        assert "quire_kv_blocks" in said
        asyncio.run(call_with_a_token(python, tmp_path))


async def call_with_a_token(block: Block, folder: Path) -> None:
    with contextlib.chdir(folder):
        names = await run_python(block, {})
        async with names["engine"] as engine:
            (done,) = await engine.complete(["The input tensor"], SamplingParams(max_tokens=2))
    assert done.samples[0].token_ids


@contextlib.contextmanager
def serving(command: str, folder: Path) -> Iterator[None]:
    """`quire cachemgr ...` or `quire worker ...`, with files of the folder, until the block ends."""
    _, name, *arguments = shlex.split(command)
    arguments = [str(folder / each) if (folder / each).is_file() else each for each in arguments]
    arguments = [{"PATH_OR_HUB_ID": str(MODEL)}.get(each, each) for each in arguments]
    arguments += ["--num-blocks", "64"] if name == "worker" else []
    health = f"unix:{folder}/{name}.sock"
    process = ServiceProcess(name, target=f"quire.{name}", arguments=[*arguments, "--listen", health], address=health)
    process.start()
    try:
        process.wait_serving({"cachemgr": CACHEMGR_START_TIMEOUT_S, "worker": WORKER_START_TIMEOUT_S}[name])
        yield
    finally:
        process.terminate()


def on_ports(block: Block, ports: Mapping[str, int]) -> Block:
    """With these ports in place of those on the page."""
    return replace(block, text=re.sub("|".join(ports), lambda found: str(ports[found[0]]), block.text))
