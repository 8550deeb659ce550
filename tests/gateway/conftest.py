"""A gateway over real services, shared by all tests that leave it alive."""

from __future__ import annotations

import hashlib
import http.client
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from deadlines import DEADLINE_S

from quire.cli.launch import LocalServices

ROOT = Path(__file__).parents[2]
MODEL = "demo"


class Gateway:
    """A `quire serve` process; its base URL is on a free port of loopback."""

    def __init__(
        self, cachemgr: str, *arguments: str, log: Path, program: tuple[str, ...] = ("-m", "quire.gateway")
    ) -> None:
        self.log = log
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-P", *program, "--cachemgr", cachemgr),
                    *("--listen", "127.0.0.1:0", "--served-model-name", MODEL, *arguments),
                ],
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "QUIRE_VERIFY": "1"},
                text=True,
            )
        self.line = self.next_line()
        if not self.line.startswith("serving "):
            raise AssertionError(f"the gateway did not start: {log.read_text()[-3000:]}")
        self.url = self.line.partition(" at ")[2].split()[0]

    def next_line(self) -> str:
        """Return the next line that the process prints."""
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        stdout: Any = self.process.stdout
        threading.Thread(target=lambda: lines.put(stdout.readline()), daemon=True).start()
        try:
            return lines.get(timeout=DEADLINE_S).strip()
        except queue.Empty:
            self.process.kill()
            raise

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=DEADLINE_S, **options)

    def metric(self, name: str) -> float:
        """Return the sum of a metric's samples."""
        page = httpx.get(f"{self.url}/metrics", timeout=DEADLINE_S).text
        return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith((f"{name}{{", f"{name} ")))

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=DEADLINE_S)

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        stdout: Any = self.process.stdout
        stdout.close()


def key_lines(keys: Mapping[str, str], role: str = "client") -> str:
    """Return the lines of --api-keys for callers with these keys by name."""
    return "".join(f"{name} {role} {hashlib.sha256(key.encode()).hexdigest()}\n" for name, key in keys.items())


@pytest.fixture(scope="session")
def services() -> Iterator[LocalServices]:
    """Both services with the demo's model, which has a tokenizer."""
    with LocalServices.start(model=ROOT / "deploy/demo/model", num_blocks=512) as services:
        yield services


@pytest.fixture(scope="session")
def chat_services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServices]:
    """Both services with a model that can chat, for tests that leave them alive."""
    from gateway.chat_gateway import save_chat_model, start_chats  # imports this module
    from gateway.chat_templates import CHATML

    model = save_chat_model(tmp_path_factory.mktemp("chat_model"), CHATML)
    with start_chats(model) as services:
        yield services


@pytest.fixture(scope="session")
def shared_gateway(services: LocalServices, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    gateway = Gateway(services.cachemgr_address, log=tmp_path_factory.mktemp("gateway") / "log")
    yield gateway
    gateway.close()


@pytest.fixture
def gateway(shared_gateway: Gateway) -> Iterator[Gateway]:
    """The shared gateway; after the test nothing is open in it, and its log has no failure."""
    yield shared_gateway
    assert shared_gateway.process.poll() is None
    assert "endpoint failed" not in shared_gateway.log.read_text()


@pytest.fixture
def http_client(gateway: Gateway) -> Iterator[httpx.Client]:
    with gateway.client() as client:
        yield client
