"""--unknown-fields ignore: fields that no endpoint has change nothing, and the answer names them. Lines of refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from gateway.conftest import ROOT, Gateway
from gateway.test_bad_input import check_error
from integration.protocol_client import await_that

from quire.cli.launch import LocalServices

NAMES = "X-Quire-Ignored-Fields"
BODY: dict[str, Any] = {"prompt": "Hi", "max_tokens": 2, "temperature": 0}


@pytest.fixture(scope="module")
def lenient(services: LocalServices, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    log = tmp_path_factory.mktemp("lenient") / "log"
    gateway = Gateway(services.cachemgr_address, "--unknown-fields", "ignore", log=log)
    yield gateway
    gateway.close()


def ask(gateway: Gateway, body: dict[str, Any]) -> httpx.Response:
    with gateway.client() as client:
        return client.post("/v1/completions", json=body)


@pytest.mark.parametrize("stream", [False, True])
def test_unknown_fields_are_named_and_change_nothing(lenient: Gateway, stream: bool) -> None:
    unknown = {"no_such_field": 1, "another, one": {"a": 2}, "null": None, "ü": 1}
    answer = ask(lenient, BODY | unknown | {"stream": stream, "response_format": {"type": "text", "deep": 1}})
    assert answer.status_code == 200, answer.text
    assert answer.headers[NAMES] == "response_format.deep, no_such_field, another%2C%20one, %C3%BC"
    if not stream:
        assert answer.json()["choices"] == ask(lenient, BODY).json()["choices"]
    assert NAMES not in ask(lenient, BODY).headers


def test_many_long_names_make_a_short_header(lenient: Gateway) -> None:
    answer = ask(lenient, BODY | {f"{'x' * 1000}{i}": i for i in range(1000)})
    assert answer.status_code == 200
    assert len(answer.headers[NAMES]) < 8_000


def test_known_fields_are_checked_all_the_same(lenient: Gateway) -> None:
    assert check_error(ask(lenient, BODY | {"temperature": "hot"}), 400)["param"] == "temperature"
    assert check_error(ask(lenient, BODY | {"best_of": 3}), 400)["param"] == "best_of"


def lines_of(gateway: Gateway, name: str) -> list[str]:
    return [line for line in gateway.log.read_text().splitlines() if name in line]


def awaited_lines_of(gateway: Gateway, name: str) -> list[str]:
    """Return the lines when there are some: they are written behind the answer."""
    found: list[str] = await_that("the line is there", lambda: lines_of(gateway, name))
    return found


def test_each_refusal_is_a_line_with_its_field_and_reason(gateway: Gateway, http_client: httpx.Client) -> None:
    for number, (body, words) in enumerate(
        [
            ({"prompt": "A secret", "top_p": 7}, "status=400 code=invalid_argument param=top_p"),
            ({"prompt": "A secret", "no such\nfield": 1}, "status=400 code=unknown_field param=no?such?field"),
            ({"prompt": "A secret", "model": "x"}, "status=404 code=model_not_found param=model"),
        ]
    ):
        headers = {"X-Request-Id": f"refused-{number}"}
        assert http_client.post("/v1/completions", content=json.dumps(body), headers=headers).status_code >= 400
        (line,) = awaited_lines_of(gateway, f"request_id=refused-{number}")
        assert f"refused method=POST path=/v1/completions {words}" in line
    assert "secret" not in gateway.log.read_text()
    assert http_client.get("/health", headers={"X-Request-Id": "fine"}).status_code == 200
    assert not lines_of(gateway, "request_id=fine")


def test_a_gateway_that_starts_logs_no_line_for_each_probe() -> None:
    """`quire up` asks for /ready until it is 200."""
    options: dict[str, Any] = {"model": ROOT / "deploy/demo/model", "num_blocks": 64, "http_listen": ["127.0.0.1:0"]}
    with LocalServices.start(**options) as services:
        assert services.gateway is not None
        assert services.gateway.log_path is not None
        logged = services.gateway.log_path.read_text()
    assert "listening" in logged
    assert "/ready" not in logged
