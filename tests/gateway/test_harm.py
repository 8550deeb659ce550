"""One request does not end the gateway for others; a gateway that can compute nothing any more ends, and says why."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from deadlines import DEADLINE_S
from gateway.conftest import Gateway
from gateway.dying_gateway import SEED

from quire.cli.launch import LocalServices
from quire.engine.v1 import engine_service_pb2, engine_service_pb2_grpc

INT32 = 2**31 - 1
# The value of a field, alone and in the sums and products that it is part of, at the edges of int32 and int64.
EDGES = [INT32, INT32 - 1, INT32 + 1, 2**31 - 512, 2**32, 2**63 - 1, 2**63, 2**64, -1, -(2**31), -(2**63), 10**9]
NUMBERS = (
    *("max_tokens", "min_tokens", "n", "best_of", "seed", "top_k", "logprobs", "prompt_logprobs", "priority"),
    *("truncate_prompt_tokens",),
)


@pytest.mark.parametrize("field", NUMBERS)
def test_numbers_at_the_edges_end_nobody_elses_stream(field: str, gateway: Gateway, http_client: httpx.Client) -> None:
    """Each is answered or refused with its name, and a stream beside them goes on."""
    tokens: list[str] = []
    ended = threading.Event()

    def read() -> None:
        body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with gateway.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
            tokens.extend(line for line in answer.iter_lines() if line.startswith("data: "))
        ended.set()

    reader = threading.Thread(target=read)
    reader.start()
    for value in EDGES:
        body: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 2, field: value}
        if field == "min_tokens":
            del body["max_tokens"]
        answer = http_client.post("/v1/completions", json=body)
        assert answer.status_code in (200, 400), answer.text
        if answer.status_code == 400:
            assert answer.json()["error"]["param"] == field, answer.text
            assert field in answer.json()["error"]["message"]
    assert ended.wait(DEADLINE_S)
    reader.join()
    assert tokens[-1] == "data: [DONE]"
    assert http_client.get("/health").status_code == 200


@pytest.mark.parametrize("value", [INT32, 10**9])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_min_tokens_beyond_the_room_are_refused(path: str, value: int, http_client: httpx.Client) -> None:
    prompt = {"prompt": "Once"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Once"}]}
    limits = {"max_tokens": INT32} if path == "/v1/completions" else {}
    error = http_client.post(path, json={**prompt, "min_tokens": value, **limits}).json()["error"]
    assert (error["param"], error["code"]) == ("min_tokens", "sequence_too_long" if not limits else error["code"])
    assert str(value) in error["message"]


@pytest.fixture
def dying(services: LocalServices, tmp_path: Path) -> Any:
    program = (str(Path(__file__).with_name("dying_gateway.py")),)
    flags = ("--pool", "default", "--grpc-listen", f"unix:{tmp_path}/engine.sock")
    gateway = Gateway(services.cachemgr_address, *flags, log=tmp_path / "log", program=program)
    yield gateway
    gateway.close()


def test_a_gateway_whose_engine_has_died_ends_and_says_why(dying: Gateway, tmp_path: Path) -> None:
    ends: list[str] = []

    def read() -> None:
        body = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True, "stream": True}
        with dying.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    ends.append(line)
                    begun.set()

    begun = threading.Event()
    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(DEADLINE_S)
    with dying.client() as client:
        answer = client.post("/v1/completions", json={"prompt": "Once", "max_tokens": 2, "seed": SEED})
    assert answer.status_code == 503
    assert "a seeded mistake" in answer.json()["error"]["message"]
    assert dying.process.wait(DEADLINE_S) == 1
    reader.join(DEADLINE_S)
    assert "engine_stopped" in ends[-1]
    assert "no request can be computed any more" in dying.log.read_text()
    with grpc.insecure_channel(f"unix:{tmp_path}/engine.sock") as channel:
        stub = engine_service_pb2_grpc.EngineServiceStub(channel)
        with pytest.raises(grpc.RpcError):
            stub.ListModels(engine_service_pb2.ListModelsRequest(), timeout=1)
