"""A page of docs/, followed as a reader does it.

What is on the page, in order:

    a block of a file      begins with a comment that is the file's name, and is saved under it
    a console block        its commands run in one shell; what they say is compared with the page: conformance/page.py
    a block without a language    starts services. The test has started the same, and names the line

Spaces at the end of a line do not count, so that a page needs none.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pages
import pytest
from conformance.page import Shell, commands
from pages import ROOT, Block

from quire.cli.commands import quire
from quire.cli.launch import CACHEMGR_START_TIMEOUT_S, GATEWAY_START_TIMEOUT_S, LocalServices
from quire.cli.service_process import WORKER_START_TIMEOUT_S, GatewayProcess, ServiceProcess

FILES = ("python", "toml", "rust")
TIMEOUTS_S = {"cachemgr": CACHEMGR_START_TIMEOUT_S, "worker": WORKER_START_TIMEOUT_S, "serve": GATEWAY_START_TIMEOUT_S}
TARGETS = {"cachemgr": "quire.cachemgr", "worker": "quire.worker", "serve": "quire.gateway"}


def follow(
    name: str,
    *,
    test: str,
    folder: Path,
    services: Path | None = None,
    started: tuple[str, ...] = (),
    replaced: Mapping[str, str] | None = None,
) -> None:
    """Follow the page in a folder. Fails where the page says something else than what is so.

    services    the runtime folder's parent, where commands find the services; by default the folder
    started     lines that start services which run already; the others are started where the page has them
    replaced    texts of the page, each with the one that stands for it here: ports
    """
    (folder / "deploy").symlink_to(ROOT / "deploy")
    blocks = [each for each in pages.blocks(name) if each.test == test]
    assert set(started) <= {line for block in blocks for line in block.text.splitlines()}, "they are not on the page"
    parent = services or folder
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(shell(folder, {"XDG_RUNTIME_DIR": str(parent)}))
        for block in blocks:
            text = with_replaced(block.text, replaced or {})
            if block.language == "console":
                for command in commands(f"```console\n{text}```"):
                    said = stripped(run.run(command.text))
                    assert command.agrees_with(said), (
                        f"{block.place}\n$ {command.text}\n--- the page\n{command.output}\n--- in truth\n{said}"
                    )
            elif block.language in FILES:
                (folder / name_of(block)).write_text(text)
            elif block.text.strip() not in started:
                stack.enter_context(starting(text.strip(), folder, parent))


def starting(line: str, folder: Path, parent: Path) -> AbstractContextManager[Any]:
    """`quire up`, `worker` or `serve` as a page has it, with files of the folder, until the block ends.

    What they say is in a file of the runtime folder, which is in parent.
    """
    program, name, *words = shlex.split(line)
    assert program == "quire"
    words = [str(folder / each) if (folder / each).exists() else each for each in words]
    return up(words, parent / "quire") if name == "up" else one_service(name, words, parent / "quire")


def up(words: list[str], runtime_dir: Path) -> LocalServices:
    """Start what `quire up` with these flags starts: forked, which takes a part of the time."""
    asked: dict[str, Any] = {}
    take: Callable[..., None] = lambda **flags: asked.update(flags)  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quire.cli.up.run_up", take)
        if "--http-listen" in words:
            patch.delenv("QUIRE_UP_NO_HTTP", raising=False)
        quire.main(["up", *words], standalone_mode=False)
    return LocalServices.start(
        model=asked["model"],
        extra_cachemgr_args=asked["flags"].arguments["cachemgr"],
        extra_worker_args=asked["flags"].arguments["worker"],
        extra_gateway_args=asked["flags"].arguments["gateway"],
        http_listen=asked["http_listen"],
        runtime_dir=runtime_dir,
    )


@contextlib.contextmanager
def one_service(name: str, words: list[str], runtime_dir: Path) -> Iterator[ServiceProcess]:
    """One more service, which also listens on a socket of the runtime folder: a cachemgr where others look for it."""
    address = f"unix:{runtime_dir}/{name}{'' if name == 'cachemgr' else '-2'}.sock"
    kind = GatewayProcess if name == "serve" else ServiceProcess
    if name != "cachemgr" and "--cachemgr" not in words:
        words = [*words, "--cachemgr", f"unix:{runtime_dir}/cachemgr.sock"]
    process = kind(
        name,
        target=TARGETS[name],
        arguments=[*words, "--listen", address],
        address=address,
        log_path=runtime_dir / f"{name}-2.log",
    )
    process.start()
    try:
        process.wait_serving(TIMEOUTS_S[name])
        yield process
    finally:
        process.terminate()


@contextlib.contextmanager
def shell(folder: Path, environment: Mapping[str, str]) -> Iterator[Shell]:
    """One with the commands of this environment: `python`, `quire`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")}
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    begun = Shell(
        environment={**kept, "PATH": path, "PYTHONSAFEPATH": "", "COLUMNS": "120", **environment}, folder=folder
    )
    with contextlib.closing(begun):
        yield begun


def name_of(block: Block) -> str:
    first = block.text.partition("\n")[0]
    match = re.fullmatch(r"(?:#|//) ([\w.-]+)", first)
    assert match is not None, f"{block.place}: its first line is not a file's name"
    return match[1]


def with_replaced(text: str, replaced: Mapping[str, str]) -> str:
    for old, new in replaced.items():
        text = text.replace(old, new)
    return text


def stripped(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.splitlines())
