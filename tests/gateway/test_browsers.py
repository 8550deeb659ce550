"""Requests that a browser sends for a page: the page of another site drives no gateway that is not told to let it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import click
import httpx
import pytest
from gateway.conftest import Gateway
from gateway.test_bad_input import check_error
from gateway.test_keys import KEYS, write_keys

from quire.cli.launch import LocalServices
from quire.gateway.config import OriginType
from quire.gateway.http.browsers import BrowserRules, browser_rules
from quire.serving.addresses import TcpAddress, UnixAddress

SITE, APP = "https://site.example", "https://chat.example"
BODY = json.dumps({"prompt": "Hi", "max_tokens": 1})
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
}


@pytest.fixture(scope="module")
def opened(services: LocalServices, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway without keys that pages of one other site may call, and that has a name of its own."""
    flags = ("--allowed-origins", APP, "--allowed-hosts", "Quire.Internal")
    gateway = Gateway(services.cachemgr_address, *flags, log=tmp_path_factory.mktemp("opened") / "log")
    yield gateway
    gateway.close()


def post(client: httpx.Client, **headers: str) -> httpx.Response:
    """Return the answer to a POST as browsers send it without asking first."""
    return client.post("/v1/completions", content=BODY, headers={"Content-Type": "text/plain", **headers})


@pytest.mark.parametrize("origin", [SITE, "null", "http://localhost:1", "http://127.0.0.1", ""])
def test_a_page_of_another_site_generates_nothing(gateway: Gateway, http_client: httpx.Client, origin: str) -> None:
    before = gateway.metric("vllm:generation_tokens_total")
    answer = post(http_client, Origin=origin)
    assert check_error(answer, 403)["code"] == "origin_not_allowed"
    assert "access-control-allow-origin" not in answer.headers
    assert gateway.metric("vllm:generation_tokens_total") == before


def test_the_gateways_own_page_and_clients_that_are_no_browser_are_served(
    gateway: Gateway, http_client: httpx.Client
) -> None:
    assert post(http_client, Origin=gateway.url).status_code == 200
    assert post(http_client).status_code == 200


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/", "/live", "/health", "/nowhere"])
@pytest.mark.parametrize(
    "host", ["site.example", "site.example:8000", "localhost.site.example", "10.1.2.3", "[::2]", "[a"]
)
def test_another_name_of_a_loopback_address_is_refused(http_client: httpx.Client, path: str, host: str) -> None:
    """A site lets its own name resolve to 127.0.0.1, and its pages are of one origin with the gateway."""
    assert check_error(http_client.get(path, headers={"Host": host}), 403)["code"] == "host_not_allowed"


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "a.localhost", "127.0.0.1", "127.8.8.8:80", "[::1]:9"])
def test_names_of_loopback_are_answered_to(http_client: httpx.Client, host: str) -> None:
    assert http_client.get("/v1/models", headers={"Host": host}).status_code == 200


def test_a_page_of_an_allowed_site_asks_first_and_reads_answers_and_errors(opened: Gateway) -> None:
    with opened.client(headers={"Origin": APP}) as client:
        asked = client.options("/v1/chat/completions", headers=PREFLIGHT)
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == APP
        assert "POST" in asked.headers["access-control-allow-methods"]
        assert asked.headers["access-control-allow-headers"] == PREFLIGHT["Access-Control-Request-Headers"]
        answers = [client.post("/v1/completions", content=BODY), client.post("/v1/completions", content=b"{")]
        for answer, status in zip(answers, (200, 400), strict=True):
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == APP
            assert "Origin" in answer.headers["vary"]
            assert "X-Request-Id" in answer.headers["access-control-expose-headers"]


def test_a_page_of_another_site_gets_no_leave(opened: Gateway, http_client: httpx.Client) -> None:
    with opened.client() as client:
        for each in (client, http_client):
            answer = each.options("/v1/completions", headers={"Origin": SITE, **PREFLIGHT})
            assert check_error(answer, 403)["code"] == "origin_not_allowed"
            assert check_error(post(each, Origin=SITE), 403)["code"] == "origin_not_allowed"


def test_a_name_that_was_given_is_answered_to(opened: Gateway) -> None:
    with opened.client() as client:
        assert client.get("/v1/models", headers={"Host": "quire.internal:8000"}).status_code == 200
        check_error(client.get("/v1/models", headers={"Host": "quire.external"}), 403)


def test_a_key_decides_and_not_the_origin(services: LocalServices, tmp_path: Path) -> None:
    """A foreign page has no key. A proxy may change Host, and then the own page looks foreign."""
    gateway = Gateway(services.cachemgr_address, "--api-keys", str(write_keys(tmp_path)), log=tmp_path / "log")
    try:
        with gateway.client(headers={"Origin": SITE, "Host": "quire.example"}) as client:
            assert post(client).status_code == 401
            answer = post(client, Authorization=f"Bearer {KEYS['alice']}")
            assert answer.status_code == 200
            assert "access-control-allow-origin" not in answer.headers
            check_error(client.options("/v1/completions", headers=PREFLIGHT), 403)
    finally:
        gateway.close()


def test_names_are_any_where_others_reach_the_gateway_or_have_keys() -> None:
    loopback, all_of_them = TcpAddress("127.0.0.1", 1), TcpAddress("0.0.0.0", 1)
    given = {"origins": (), "hosts": ()}
    assert browser_rules([loopback], has_keys=False, **given).hosts == {"127.0.0.1"}
    assert browser_rules([UnixAddress("/a")], has_keys=False, **given).hosts == set()
    assert browser_rules([loopback, all_of_them], has_keys=False, **given).hosts is None
    assert browser_rules([loopback], has_keys=True, **given).hosts is None
    assert browser_rules([all_of_them], has_keys=True, origins=(), hosts=("A",)).hosts == {"a", "0.0.0.0"}
    assert browser_rules([loopback], has_keys=False, origins=(), hosts=("*",)).hosts is None


def test_all_origins() -> None:
    rules = BrowserRules(origins=frozenset({"*"}))
    rules.check({"host": "a", "origin": "null"})
    assert rules.allows(SITE)


@pytest.mark.parametrize("origin", ["chat.example", "https://chat.example/", "https://", "//a", "http://[a", "a://b c"])
def test_a_flag_that_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(click.BadParameter, match="is no origin"):
        OriginType().convert(origin, None, None)


def test_a_flag_with_an_origin() -> None:
    for origin in ("https://Chat.Example", "http://localhost:3000", "vscode-webview://0a1b", "http://[::1]:1", "*"):
        assert OriginType().convert(origin, None, None) == origin.lower()
