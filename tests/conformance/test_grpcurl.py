"""Every command of docs/how-to/grpcurl.md has the output on the page."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from certificates import Authority, sha256
from conformance import page
from conformance.foreign import ROOT, find
from deadlines import DEADLINE_S
from ports import free_ports

from quire.cli.launch import CACHEMGR_START_TIMEOUT_S, LocalServices
from quire.cli.service_process import ServiceProcess

PAGE = ROOT / "docs/how-to/grpcurl.md"
GATEWAY = "quire.gateway"
TOKEN = "t-client"


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A cachemgr without pools that requires certificates at one port and tokens at another; its addresses."""
    authority = Authority(tmp_path)
    server, client = authority.issue("localhost", "127.0.0.1"), authority.issue("engine.example")
    client.cert.rename(tmp_path / "client.pem")
    client.key.rename(tmp_path / "client.key")
    (tmp_path / "tokens").write_text(f"alice client {sha256(TOKEN)}\nengine.example client cert\n")
    host, token_host = (f"127.0.0.1:{port}" for port in free_ports(2))
    health = f"unix:{tmp_path}/cachemgr.sock"
    arguments = [
        *("--listen", health, "--listen", host, "--token-listen", token_host, *server.flags()),
        *("--tls-client-ca", str(authority.path), "--token-file", str(tmp_path / "tokens")),
    ]
    process = ServiceProcess("cachemgr", target="quire.cachemgr", arguments=arguments, address=health)
    process.start()
    try:
        process.wait_serving(CACHEMGR_START_TIMEOUT_S)
        yield {"HOST": host, "TOKEN_HOST": token_host, "TOKEN": TOKEN}
    finally:
        process.terminate()


def test_the_page(grpcurl: Path, demo_services: LocalServices, secured: dict[str, str], tmp_path: Path) -> None:
    find("bash", for_what="docs/how-to/grpcurl.md")
    written = PAGE.read_text()
    assert "quire up --model deploy/demo/model --num-blocks 32\n" in written, "the fixture starts something else"
    address = f"unix:{tmp_path}/engine.sock"
    engine = ServiceProcess(
        "engine",
        target=GATEWAY,
        arguments=("--cachemgr", demo_services.cachemgr_address, "--listen", "127.0.0.1:0", "--grpc-listen", address),
        address=address,
    )
    environment = {
        "ENGINE": address.removeprefix("unix:"),
        "PATH": f"{grpcurl.parent}:{os.environ['PATH']}",
        "CACHE": demo_services.cachemgr_address.removeprefix("unix:"),
        "WORKER": demo_services.worker_address.removeprefix("unix:"),
        **secured,
    }
    commands = page.commands(written)
    assert len(commands) == written.count("\n$ "), "a command is in no console block"
    shell = page.Shell(environment=environment, folder=tmp_path)
    with contextlib.closing(shell), ending(engine):
        for command in commands:
            if "${ENGINE:=" in command.text:  # only now: it holds a lease, which the pages before would show
                engine.start()
                engine.wait_serving(CACHEMGR_START_TIMEOUT_S)
            said = ask(shell, command)
            assert command.agrees_with(said), f"$ {command.text}\n--- the page\n{command.output}\n--- in truth\n{said}"


@contextlib.contextmanager
def ending(process: ServiceProcess) -> Iterator[None]:
    try:
        yield
    finally:
        process.terminate()


def ask(shell: page.Shell, command: page.Command) -> str:
    """The output of a command. A command that only reads is repeated for a while: a step's report may come later."""
    deadline = time.monotonic() + DEADLINE_S
    said = shell.run(command.text)
    while command.only_looks and not command.agrees_with(said) and time.monotonic() < deadline:
        said = shell.run(command.text)
    return said
