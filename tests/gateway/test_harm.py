"""One request does not end the gateway for others; a gateway that can compute nothing any more ends, and says why."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from deadlines import DEADLINE_S
from gateway.conftest import ROOT, Gateway
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


# Grammars of reports about other engines, each with the status of a request. CVE-2026-105757: values that are empty,
# or that no token can follow, ended the engine. CVE-2026-55574, PYSEC-2026-3933: small texts took minutes to compile.
GRAMMARS: dict[str, tuple[dict[str, Any], int]] = {
    "empty regex": ({"structured_outputs": {"regex": ""}}, 200),
    "empty choice": ({"structured_outputs": {"choice": []}}, 400),
    "choice of nothing": ({"structured_outputs": {"choice": [""]}}, 200),
    "empty schema": ({"structured_outputs": {"json": ""}}, 400),
    "schema of anything": ({"structured_outputs": {"json": {}}}, 200),
    "empty grammar": ({"structured_outputs": {"grammar": ""}}, 400),
    "empty guided regex": ({"guided_regex": ""}, 200),
    "empty guided grammar": ({"guided_grammar": ""}, 400),
    "nothing matches": ({"structured_outputs": {"regex": r"a[^\s\S]"}}, 400),
    "nothing but an end, which is ignored": ({"structured_outputs": {"regex": ""}, "ignore_eos": True}, 400),
    "nothing but an end, which is too early": ({"structured_outputs": {"choice": ["a"]}, "min_tokens": 3}, 400),
    "a character of several tokens": ({"structured_outputs": {"regex": "\u6f22{3}"}}, 200),
    "characters of no language": ({"structured_outputs": {"regex": r"[\ue000-\uf8ff]{2}"}}, 200),
    "the token that is allowed is unlikely": (
        {"structured_outputs": {"choice": ["a"]}, "logit_bias": dict.fromkeys(map(str, range(1000)), -100)},
        200,
    ),
    "repetitions of repetitions": ({"structured_outputs": {"regex": "(a+)+b"}}, 200),
    "many repetitions": ({"structured_outputs": {"regex": "[a-z]{1,100000}"}}, 200),
    "many repetitions of repetitions": ({"structured_outputs": {"regex": "(.{0,9}){0,9999}"}}, 200),
    "a schema that is itself": ({"structured_outputs": {"json": {"$ref": "#"}}}, 400),
    "a billion items": ({"structured_outputs": {"json": {"type": "array", "minItems": 10**9}}}, 200),
    "thousands of texts": ({"structured_outputs": {"regex": "|".join(f"ab{i}" for i in range(9000))}}, 200),
}


@pytest.fixture
def same_tokens(tmp_path: Path) -> Iterator[Gateway]:
    """A gateway of a deterministic worker: rounding depends on nothing else of a step."""
    model = ROOT / "deploy/demo/model"
    with LocalServices.start(model=model, num_blocks=512, extra_worker_args=("--deterministic",)) as services:
        gateway = Gateway(services.cachemgr_address, log=tmp_path / "log")
        yield gateway
        gateway.close()


def test_grammars_at_the_edges_change_no_token_of_others(same_tokens: Gateway) -> None:
    plain = {"prompt": "Once", "max_tokens": 300, "temperature": 0, "ignore_eos": True, "return_token_ids": True}

    def ask(body: dict[str, Any]) -> httpx.Response:
        with same_tokens.client() as client:
            return client.post("/v1/completions", json=body)

    alone = ask(plain).json()["choices"][0]["token_ids"]
    with ThreadPoolExecutor() as callers:
        beside = callers.submit(ask, plain)
        for name, (fields, status) in GRAMMARS.items():
            answer = ask({"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0, **fields})
            assert answer.status_code == status, (name, answer.text)
            if status == 400:
                named = answer.json()["error"]["param"]
                assert named in fields, (name, answer.text)
        assert beside.result(DEADLINE_S).json()["choices"][0]["token_ids"] == alone
    with same_tokens.client() as client:
        assert client.get("/health").status_code == 200


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
