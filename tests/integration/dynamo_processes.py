"""NVIDIA Dynamo's frontend and backends of ours, in a network of their own: Dynamo listens on all addresses.

environment of Dynamo   .venv-clients/dynamo, with the packages of dynamo_requirements.txt
Frontend                its HTTP server and its router, reached through the network's unix socket
Backend                 `quire dynamo` on one pool
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from deadlines import DEADLINE_S
from integration.network import Network
from integration.protocol_client import await_that
from package_environments import environment
from roots import python_path

REQUIREMENTS = Path(__file__).with_name("dynamo_requirements.txt")
# Without their dependencies: one of ai-dynamo's, aisimulate, is on NVIDIA's index alone. Only its planner imports it.
PACKAGES = ("--no-deps", *REQUIREMENTS.read_text().split())
MODEL = "demo"
PORT = 8000
PLANES = ("--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq")


def dynamo_python() -> Path:
    """Return the interpreter with Dynamo; the environment is made once."""
    return environment("dynamo", *PACKAGES) / "python"


class DynamoProcess:
    """A process in the network, from the constructor to `kill`."""

    def __init__(self, network: Network, folder: Path, name: str, *arguments: str) -> None:
        self.log_path = folder / f"{name}.log"
        variables = {
            "PYTHONPATH": python_path(),
            "DYN_FILE_KV": str(folder / "discovery"),
            "DYN_LOG": "info",
            "HF_HUB_OFFLINE": "1",
        }
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [*network.prefix, str(dynamo_python()), "-P", "-m", *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | variables,
            )

    def log(self) -> str:
        return self.log_path.read_text()

    def stop(self) -> int:
        """Send SIGTERM; return the exit status."""
        self.process.terminate()
        return self.process.wait(DEADLINE_S)

    def kill(self) -> None:
        """End it, if it runs. Idempotent."""
        self.process.kill()
        self.process.wait(DEADLINE_S)


class Backend(DynamoProcess):
    """`quire dynamo` on one pool."""

    def __init__(self, network: Network, folder: Path, cachemgr: str, pool: str, model_path: Path) -> None:
        place = ("--cachemgr", cachemgr, "--pool", pool)
        served = ("--model-path", str(model_path), "--served-model-name", MODEL)
        drafts = ("--speculative-config", '{"method": "ngram"}')
        flags = (*place, *served, *drafts, *PLANES)
        super().__init__(network, folder, f"backend-{pool}", "quire.integrations.dynamo", *flags)


class Frontend(DynamoProcess):
    """Dynamo's frontend with its KV router."""

    def __init__(self, network: Network, folder: Path) -> None:
        flags = ("--http-port", str(PORT), "--router-mode", "kv", "--migration-limit", "3")
        super().__init__(network, folder, "frontend", "dynamo.frontend", *flags, *PLANES)
        transport = httpx.HTTPTransport(uds=str(network.socket_path))
        self.http = httpx.Client(transport=transport, base_url="http://frontend", timeout=DEADLINE_S)

    def await_model(self, *backends: Backend) -> None:
        def is_served() -> bool:
            for process in (self, *backends):
                assert process.process.poll() is None, process.log()
            try:
                answer = self.http.get("/v1/models")
            except httpx.TransportError:
                return False
            return answer.is_success and MODEL in [model["id"] for model in answer.json()["data"]]

        await_that("the frontend serves the model", is_served)

    def complete(self, prompt: str | Sequence[int], **fields: Any) -> dict[str, Any]:
        """Return the answer to a completion. Raises AssertionError for another status than 200."""
        answer = self.http.post("/v1/completions", json=request_of(prompt, **fields))
        assert answer.status_code == 200, answer.text
        body: dict[str, Any] = answer.json()
        return body

    def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the events of a stream, up to its end."""
        with self.http.stream("POST", path, json=body | {"stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    def kill(self) -> None:
        self.http.close()
        super().kill()


def request_of(prompt: str | Sequence[int], **fields: Any) -> dict[str, Any]:
    """Return the body of a completion."""
    return {"model": MODEL, "prompt": prompt, "max_tokens": 2, "temperature": 0, **fields}


def cached_tokens(answer: dict[str, Any]) -> int:
    """Return how many tokens of the prompt were found in the prefix cache."""
    return int((answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
